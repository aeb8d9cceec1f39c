"""
What a prediction computes: the classifier decides the chunk length and the models, unless the user insists.

``PredictionConfig.scores_settings`` is what decides the scores, which a resumed run must have in common with the first
one; ``output_settings`` may change from run to run, since everything they decide is made again in seconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from virnucpro.choices import (
    CASCADE_AUTO,
    CASCADE_OFF,
    DEFAULT_CLASSIFIER,
    LARGE_INPUT_NT,
    PRIOR_AUTO,
    PRIOR_OFF,
    Choice,
    Keep,
    SequenceKind,
    TableFormat,
    WrittenGenes,
)
from virnucpro.config import InputRules, ModelConfig, computing_versions, fingerprint
from virnucpro.errors import ClassifierMismatchError, ConfigurationError, WeightsError, printable
from virnucpro.knobs import UsageError
from virnucpro.models.classifier_files.card import ClassifierCard, locate_classifier, read_card, read_weights
from virnucpro.models.configuration import configure_model
from virnucpro.models.contigs.contig_model import CompositionModel
from virnucpro.models.registry import MODELS, is_path
from virnucpro.settings import EmbeddingSettings, SequenceRules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from virnucpro.arrays import BoolArray, FloatArray
    from virnucpro.settings import PredictionSettings, RunSettings

ChoiceT = TypeVar("ChoiceT", bound=Choice)

FINGERPRINT_DIGITS = 16
"""Hex digits of the fingerprint that outputs carry."""


@dataclass(frozen=True)
class Cascade:
    """Which contigs are embedded: those whose composition score is from *low* to *high*, or that have none."""

    low: float
    high: float

    def embeds(self, scores: FloatArray) -> BoolArray:
        """Return which contigs are embedded, from their composition scores."""
        return ~((scores < self.low) | (scores > self.high))


EVERY_CONTIG = Cascade(0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class PredictionConfig:
    """What a prediction needs to know; small and picklable."""

    classifier_dir: Path
    card: ClassifierCard
    """What it was trained with; ``chunk_nt`` is what it is used with."""
    dna: ModelConfig | None
    """How nucleotides of frames are embedded; None where no contig is."""
    protein: ModelConfig | None
    """How proteins of frames are embedded; likewise."""
    cascade: Cascade | None = EVERY_CONTIG
    """Which contigs are embedded; None for none, where the classifier needs their composition only."""
    composition: CompositionModel | None = None
    """What scores composition; None where the frames of every contig decide."""
    rules: InputRules
    """How contigs are read."""
    min_nt: int = 0
    """Nucleotides below which a contig is listed but not looked at."""
    threshold: float
    """P(virus) from which a contig is called viral: of the posterior where the prior is on, else of the score."""
    prior: str = PRIOR_AUTO
    """Share of viruses in the sample: auto, off, or a number above 0 and below 1."""
    fdr: float | None = None
    """Most expected false discovery rate, which sets the threshold of the sample."""
    formats: tuple[TableFormat, ...] = (TableFormat.TSV,)
    """Formats of the table of contigs; TSV is always written."""
    keep: Keep = Keep.ALL
    """What a complete run leaves."""
    keep_chunks: bool = False
    """Whether the chunks are written, too."""
    genes: WrittenGenes = WrittenGenes.VIRAL
    """Contigs whose genes are written; any but ``auto``."""
    only_viral: bool = False
    """Whether tables and tracks hold the viral contigs alone."""
    log_level: str = "INFO"
    """Least severe level in the logs of workers."""
    not_given: frozenset[str] = frozenset()
    """Output settings that stand at their defaults: a folder that a run was made in keeps its own."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ConfigurationError(f"the threshold is {self.threshold}: it must be between 0 and 1")

    @property
    def is_by_composition(self) -> bool:
        """Whether the classifier itself reads composition alone."""
        return self.composition is not None and self.composition.folder == self.classifier_dir

    @property
    def reads_embeddings(self) -> bool:
        """Whether the classifier has a contig model that reads the embeddings of frames."""
        return self.card.contig_model is not None and not self.is_by_composition

    @property
    def encoders(self) -> dict[str, ModelConfig]:
        """The encoders by the stage that they embed in; none where no contig is embedded."""
        return {name: config for name, config in (("dna", self.dna), ("protein", self.protein)) if config is not None}

    @property
    def chunk_nt(self) -> int:
        return self.card.chunk_nt

    @property
    def fingerprint(self) -> str:
        """Identity of classifier, models and chunk length: scores of different ones are not to be compared."""
        parts: list[object] = [self.card.weights_sha256, self.card.batch_norm_eps, self.chunk_nt]
        parts += [config.cache_space() for config in self.encoders.values()]
        if self.card.contig_model is not None:
            parts.append(asdict(self.card.contig_model))
        if self.cascade not in {None, EVERY_CONTIG}:
            parts += [self._shown_cascade(), self._composition_sha256()]
        return fingerprint(parts)[:FINGERPRINT_DIGITS]

    def _composition_sha256(self) -> str | None:
        """Return the sha256 of another classifier's model that scores composition."""
        if self.composition is None or self.is_by_composition:
            return None
        contig_model = self.composition.card.contig_model
        assert contig_model is not None
        return contig_model.weights_sha256

    def _shown_cascade(self) -> str:
        return "no contig is embedded" if self.cascade is None else f"{self.cascade.low:g},{self.cascade.high:g}"

    def scores_settings(self, device_type: str) -> dict[str, Any]:
        """Return what decides the scores, ready for JSON."""
        contig_model, of_composition = self.card.contig_model, self._composition_sha256()
        return {
            "classifier": self.card.name,
            "classifier sha256": self.card.weights_sha256,
            **({"contig model sha256": contig_model.weights_sha256} if contig_model else {}),
            **({"letters model sha256": of_composition} if of_composition else {}),
            **({} if self.cascade == EVERY_CONTIG else {"cascade": self._shown_cascade()}),
            "classifier batch norm eps": self.card.batch_norm_eps,
            "chunk length": self.chunk_nt,
            "minimal length": self.min_nt,
            **({"rna": True} if self.rules.rna else {}),
            "gaps": str(self.rules.gaps),
            "bad records": str(self.rules.on_bad_record),
            # composition and homology are computed without torch
            **(encoder_settings(self.encoders.values(), device_type) if self.encoders else {}),
            "virnucpro version": version("virnucpro"),
        }

    def keeping(self, recorded: Mapping[str, Any]) -> PredictionConfig:
        """
        Return the same with the *recorded* output settings of a folder in place of those that were not given.

        Raises:
            ConfigurationError, TypeError: Something recorded is no such setting.
        """
        kept = {name: value for name, value in recorded.items() if name in self.not_given}
        if "formats" in kept:
            kept["formats"] = _formats(kept["formats"])
        if "keep" in kept:
            kept["keep"] = _chosen(Keep, "keep", kept["keep"])
        if "genes" in kept:
            kept["genes"] = _chosen(WrittenGenes, "genes", kept["genes"])
        return replace(self, **kept)

    def keeps_frames(self, num_nt: int) -> bool:
        """Whether a complete run leaves the frames and embeddings of so many nucleotides of contigs."""
        return self.keep is Keep.ALL or (self.keep is Keep.AUTO and num_nt < LARGE_INPUT_NT)

    def output_settings(self) -> dict[str, Any]:
        """Return what may change from run to run in one folder, ready for JSON."""
        return {
            "threshold": self.threshold,
            "prior": self.prior,
            "fdr": self.fdr,
            "formats": [str(one) for one in self.formats],
            "keep": str(self.keep),
            "keep_chunks": self.keep_chunks,
            "genes": str(self.genes),
            "only_viral": self.only_viral,
        }

    def models(self) -> dict[str, dict[str, Any]]:
        """Return what the manifest tells of the models."""
        encoders = {
            name: {"name": config.model_name, "sha256": config.weights_sha256, "hidden_dim": encoder.hidden_dim}
            for (name, config), encoder in zip(
                self.encoders.items(), (self.card.dna_model, self.card.protein_model), strict=False
            )
        }
        classifier = {
            "name": self.card.name,
            "sha256": self.card.weights_sha256,
            "source_sha256": self.card.source_sha256,
            "chunk_nt": self.chunk_nt,
        }
        if self.card.contig_model is not None:
            classifier["contig_model_sha256"] = self.card.contig_model.weights_sha256
        models: dict[str, dict[str, Any]] = {**encoders, "classifier": classifier}
        if self.composition is not None and not self.is_by_composition:
            models["composition"] = {"name": self.composition.card.name, "sha256": self._composition_sha256()}
        return models


_DECIDED_BY_EMBEDDING = ("token_budget", "attention_kernel", "gaps", "stops", "on_bad_record", "letters_per_token")
"""Resolved, kept and checked by the embedding runs, or without a meaning for frames."""


def encoder_settings(encoders: Iterable[ModelConfig], device_type: str) -> dict[str, Any]:
    """Return what decides the embeddings of frames, ready for JSON."""
    models = {
        f"{config.sequence_kind} model {key}": value
        for config in encoders
        for key, value in config.result_settings().items()
        if key not in _DECIDED_BY_EMBEDDING
    }
    return {**models, "device_type": device_type, **computing_versions()}


def configure_encoder(
    name: str,
    kind: SequenceKind,
    settings: RunSettings,
    *,
    device_type: str,
    on_download: Callable[[int, int | None], None] | None,
    allow_empty: bool = False,
) -> ModelConfig:
    """Resolve how frames' DNA or proteins are embedded; refuse a model of the other kind."""
    own = EmbeddingSettings(
        model=name,
        hardware=settings.hardware,
        cache=settings.cache,
        monitoring=settings.monitoring,
        sequences=SequenceRules(allow_empty=allow_empty),
    )
    config = configure_model(own, device_type=device_type, on_download=on_download)
    if config.sequence_kind is not kind:
        raise ConfigurationError(f"{config.model_name} embeds {config.sequence_kind}: it is no {kind} model")
    return config


def configure_prediction(
    settings: PredictionSettings, *, device_type: str, on_download: Callable[[int, int | None], None] | None = None
) -> PredictionConfig:
    """
    Find the classifier and the models that it was trained with, and resolve their settings.

    Raises:
        UnknownClassifierError: No such classifier.
        ClassifierMismatchError: It was trained with another chunk length or other models.
        UnknownModelError: No such model.
        WeightsError: Weights cannot be had, or a card names a model by a path.
        UsageError: A false discovery rate was asked for, and its scores are not calibrated.
        ConfigurationError: Parquet was asked for and pyarrow is not installed.
    """
    folder = locate_classifier(settings.classifier)
    card = read_card(folder)
    chunk_nt, asked = settings.models.chunk or None, settings.models
    card.check(chunk_nt=chunk_nt)
    card = replace(card, chunk_nt=chunk_nt or card.chunk_nt)
    if settings.fdr is not None and card.contig_model is None:
        raise UsageError(f"a false discovery rate needs calibrated scores, and {card.name} has no contig model")
    read_weights(folder, card)  # before anything is fetched or embedded
    cascade, composition = _cascade_and_composition(settings.cascade, folder, card)
    for given, encoder in ((asked.dna_model, card.dna_model), (asked.protein_model, card.protein_model)):
        if not given and is_path(encoder.name):  # a file of the card's choice, not of the user's
            raise WeightsError(card.name, f"its card names a model by a path: {printable(encoder.name)}")
        if given in MODELS and given != encoder.name:  # before its weights are fetched
            raise ClassifierMismatchError(card.name, {"embeddings by": (encoder.name, given)})
    dna = protein = None
    if cascade is None:
        _refuse_without_embedding(settings, card)
    else:
        encoder_of = partial(
            configure_encoder,
            settings=settings,
            device_type=device_type,
            on_download=on_download,
            allow_empty=True,  # contigs without any open frame are no error
        )
        dna = encoder_of(asked.dna_model or card.dna_model.name, SequenceKind.DNA)
        protein = encoder_of(asked.protein_model or card.protein_model.name, SequenceKind.PROTEIN)
        card.check(chunk_nt=chunk_nt, dna=dna, protein=protein)
    result = settings.result
    return PredictionConfig(
        classifier_dir=folder,
        card=card,
        dna=dna,
        protein=protein,
        cascade=cascade,
        composition=composition,
        rules=InputRules(
            sequence_kind=SequenceKind.DNA,
            gaps=settings.contigs.gaps,
            on_bad_record=settings.contigs.on_bad_record,
            allow_empty=settings.contigs.allow_empty,
            rna=settings.contigs.rna,
        ),
        min_nt=settings.contigs.min_length,
        threshold=card.threshold if settings.threshold is None else settings.threshold,
        prior=settings.prior or PRIOR_AUTO,
        fdr=settings.fdr,
        formats=_formats(result.formats),
        keep=result.keep,
        keep_chunks=result.keep_chunks,
        genes=WrittenGenes.VIRAL if result.genes is WrittenGenes.AUTO else result.genes,
        only_viral=result.only_viral,
        log_level=settings.monitoring.log_level,
        not_given=_not_given(settings),
    )


def _not_given(settings: PredictionSettings) -> frozenset[str]:
    """Return the settings that a folder keeps from its last start, as they were not given now."""
    result = settings.result
    has_no_rule = settings.threshold is None and settings.fdr is None
    as_before = {
        "threshold": has_no_rule,
        "prior": not settings.prior,
        "fdr": has_no_rule and settings.prior != PRIOR_OFF,
        "formats": not result.formats,
        "keep": result.keep is Keep.AUTO,
        "keep_chunks": not result.keep_chunks,
        "genes": result.genes is WrittenGenes.AUTO,
    }
    return frozenset(name for name, is_kept in as_before.items() if is_kept)


def _refuse_without_embedding(settings: PredictionSettings, card: ClassifierCard) -> None:
    """Refuse what has no effect where no contig is embedded; the card's own models are the default."""
    asked = {settings.models.dna_model, settings.models.protein_model}
    if asked - {"", card.dna_model.name, card.protein_model.name} or settings.result.keep_chunks:
        raise ConfigurationError(
            f"the classifier {card.name} reads composition alone, so nothing is cut into chunks or embedded: "
            "give --cascade off for chunks, or to embed by other models"
        )


def _cascade_and_composition(
    asked: str, folder: Path, card: ClassifierCard
) -> tuple[Cascade | None, CompositionModel | None]:
    """Return which contigs are embedded, and what scores composition: the classifier itself, or the bundled one."""
    own = CompositionModel.of(folder, card)
    if asked == CASCADE_AUTO:
        return (EVERY_CONTIG if own is None else None), own
    if asked == CASCADE_OFF:
        return EVERY_CONTIG, own
    low, high = map(float, asked.split(","))
    if own is None:
        bundled = locate_classifier(DEFAULT_CLASSIFIER)
        own = CompositionModel.of(bundled, read_card(bundled))
    return Cascade(low, high), own


def _chosen(choice: type[ChoiceT], title: str, recorded: object) -> ChoiceT:
    for one in choice:
        if one == recorded:
            return one
    raise ConfigurationError(f"{title} {recorded!r}: choose one of {', '.join(choice)}")


def _formats(wanted: Sequence[TableFormat | str]) -> tuple[TableFormat, ...]:
    if TableFormat.PARQUET in wanted and find_spec("pyarrow") is None:
        raise ConfigurationError("format parquet needs pyarrow: pip install 'virnucpro[parquet]'")
    known = {str(one) for one in TableFormat}
    for name in wanted:
        if name not in known:
            raise ConfigurationError(f"format {name!r}: choose one of {', '.join(sorted(known))}")
    return tuple(sorted({TableFormat.TSV, *(TableFormat(name) for name in wanted)}))
