"""
Settings of an identification: the classifier decides the chunk length and the models, unless the user insists.

``PredictionConfig.scores_settings`` is what decides the scores, which a resumed run must have in common with the first
one; ``output_settings`` may change from run to run, since everything they decide is made again in seconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from virnucpro.config import (
    AUTO_TOKEN_BUDGET,
    DEFAULT_CACHE_GIB,
    BadRecordPolicy,
    GapPolicy,
    InputRules,
    ModelConfig,
    SequenceKind,
    computing_versions,
    fingerprint,
)
from virnucpro.errors import ClassifierMismatchError, ConfigurationError, WeightsError, printable
from virnucpro.models.classifier_card import (
    DEFAULT_CLASSIFIER,
    ClassifierCard,
    locate_classifier,
    read_card,
    read_weights,
)
from virnucpro.models.contig_model import load_contig_model
from virnucpro.models.registry import MODELS, is_path
from virnucpro.pipeline.multi_gpu_inference import configure_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

FINGERPRINT_DIGITS = 16
"""Hex digits of the fingerprint that outputs carry."""


class TableFormat(StrEnum):
    """Formats of the table of contigs."""

    TSV = "tsv"
    JSON = "json"
    PARQUET = "parquet"


@dataclass(frozen=True, kw_only=True)
class PredictionConfig:
    """What an identification needs to know; small and picklable."""

    classifier_dir: Path
    """Folder of the classifier."""
    card: ClassifierCard
    """What it was trained with; ``chunk_nt`` is what it is used with."""
    dna: ModelConfig
    """How nucleotides of frames are embedded."""
    protein: ModelConfig
    """How proteins of frames are embedded."""
    rules: InputRules
    """How contigs are read."""
    min_nt: int = 0
    """Nucleotides below which a contig is listed but not looked at."""
    threshold: float
    """P(virus) from which a contig is called viral."""
    formats: tuple[TableFormat, ...] = (TableFormat.TSV,)
    """Formats of the table of contigs; TSV is always written."""
    keep_chunks: bool = False
    """Whether the chunks are written, too."""
    not_given: frozenset[str] = frozenset()
    """Output settings that stand at their defaults: a folder that a run was made in keeps its own."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ConfigurationError(f"the threshold is {self.threshold}: it must be between 0 and 1")
        if self.min_nt < 0:
            raise ConfigurationError(f"the minimal length is {self.min_nt} nt: it must be at least 0")

    @property
    def chunk_nt(self) -> int:
        """Nucleotides of a chunk."""
        return self.card.chunk_nt

    @property
    def fingerprint(self) -> str:
        """Identity of classifier, models and chunk length: scores of different ones are not to be compared."""
        parts: list[object] = [self.card.weights_sha256, self.card.batch_norm_eps, self.chunk_nt]
        parts += [config.cache_space() for config in (self.dna, self.protein)]
        if self.card.contig_model is not None:
            parts.append(asdict(self.card.contig_model))
        return fingerprint(parts)[:FINGERPRINT_DIGITS]

    def scores_settings(self, device_type: str) -> dict[str, Any]:
        """Return what decides the scores, ready for JSON."""
        models = {
            f"{name} model {key}": value
            for name, config in (("DNA", self.dna), ("protein", self.protein))
            for key, value in config.result_settings().items()
            if key not in _SETTLED_BY_EMBEDDING
        }
        contig_model = self.card.contig_model
        return {
            "classifier": self.card.name,
            "classifier sha256": self.card.weights_sha256,
            **({"contig model sha256": contig_model.weights_sha256} if contig_model else {}),
            "classifier batch norm eps": self.card.batch_norm_eps,
            "chunk length": self.chunk_nt,
            "minimal length": self.min_nt,
            "gaps": str(self.rules.gaps),
            "bad records": str(self.rules.on_bad_record),
            **models,
            "device_type": device_type,
            **computing_versions(),
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
        return replace(self, **kept)

    def output_settings(self) -> dict[str, Any]:
        """Return what may change from run to run in one folder, ready for JSON."""
        return {
            "threshold": self.threshold,
            "formats": [str(one) for one in self.formats],
            "keep_chunks": self.keep_chunks,
        }

    def models(self) -> dict[str, dict[str, Any]]:
        """Return what the manifest tells of the models."""
        encoders = {
            name: {"name": config.model_name, "sha256": config.weights_sha256, "hidden_dim": encoder.hidden_dim}
            for name, config, encoder in (
                ("dna", self.dna, self.card.dna_model),
                ("protein", self.protein, self.card.protein_model),
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
        return {**encoders, "classifier": classifier}


_SETTLED_BY_EMBEDDING = ("token_budget", "attention_kernel", "gaps", "stops", "on_bad_record", "letters_per_token")
"""Settled, kept and checked by the embedding runs, or without a meaning for frames."""


def configure_prediction(
    *,
    classifier: str | Path = DEFAULT_CLASSIFIER,
    dna_model: str | Path | None = None,
    protein_model: str | Path | None = None,
    chunk_nt: int | None = None,
    min_nt: int = 0,
    threshold: float | None = None,
    formats: Sequence[TableFormat | str] = (),
    keep_chunks: bool = False,
    device_type: str,
    precision: str = "auto",
    weights_dir: Path | None = None,
    token_budget: int = AUTO_TOKEN_BUDGET,
    threads_per_worker: int = 1,
    workers_per_device: int = 1,
    gaps: GapPolicy | str = GapPolicy.ERROR,
    on_bad_record: BadRecordPolicy | str = BadRecordPolicy.ERROR,
    allow_empty: bool = False,
    cache_dir: str | Path | None = None,
    cache_gib: float = DEFAULT_CACHE_GIB,
    log_level: str = "INFO",
    profile: bool = False,
    on_download: Callable[[int, int | None], None] | None = None,
) -> PredictionConfig:
    """
    Find the classifier and the models that it was trained with, and settle their settings.

    Args:
        classifier: Name of a bundled classifier, or the folder of a converted or trained one.
        dna_model: Name or path; by default what the classifier was trained with. So is *protein_model*.
        protein_model: As *dna_model*.
        chunk_nt: Nucleotides of a chunk, one of those that the classifier may be used with; by default what it was
            trained with.
        min_nt: Nucleotides below which a contig is listed but not looked at.
        threshold: P(virus) from which a contig is called viral; by default the folder's, at first the classifier's.
        formats: Of the table of contigs, beside TSV; by default the folder's, at first none.
        keep_chunks: Write the chunks, too; a folder goes on writing them.
        device_type: ``cpu`` or ``cuda``.
        precision: Of both models, as in ``configure_model``; so are the other arguments.
        weights_dir: Folder that is looked into first.
        token_budget: Tokens in one block at the most.
        threads_per_worker: Threads of a CPU worker.
        workers_per_device: Workers that share a GPU.
        gaps: What happens to gaps in contigs.
        on_bad_record: Whether a contig that breaks a rule ends the run or is left out.
        allow_empty: Whether an input without contigs is fine.
        cache_dir: Folder of the embedding cache.
        cache_gib: GiB that it takes at the most.
        log_level: Of the workers' log files.
        profile: Whether workers record when they did what.
        on_download: Called with bytes fetched and bytes in all.

    Raises:
        UnknownClassifierError: No such classifier.
        ClassifierMismatchError: It was trained with another chunk length or other models.
        UnknownModelError: No such model.
        WeightsError: Weights cannot be had, or a card would have us open a file that nobody named.
        ConfigurationError: A setting is out of range, or Parquet was asked for and pyarrow is not installed.
    """
    folder = locate_classifier(classifier)
    card = read_card(folder)
    card.check(chunk_nt=chunk_nt)
    card = replace(card, chunk_nt=chunk_nt or card.chunk_nt)
    read_weights(folder, card)  # before anything is fetched or embedded
    if card.contig_model is not None:
        load_contig_model(folder, card)
    for given, encoder in ((dna_model, card.dna_model), (protein_model, card.protein_model)):
        if given is None and is_path(encoder.name):  # a file of the card's choice, not of who starts the run
            raise WeightsError(card.name, f"its card names a model by a path: {printable(encoder.name)}")
        if given is not None and given in MODELS and given != encoder.name:  # before its weights are fetched
            raise ClassifierMismatchError(card.name, {"embeddings by": (encoder.name, str(given))})

    def model(name: str | Path) -> ModelConfig:
        return configure_model(
            name,
            device_type=device_type,
            precision=precision,
            weights_dir=weights_dir,
            token_budget=token_budget,
            threads_per_worker=threads_per_worker,
            workers_per_device=workers_per_device,
            allow_empty=True,  # contigs without any open frame are no error
            cache_dir=cache_dir,
            cache_gib=cache_gib,
            log_level=log_level,
            profile=profile,
            on_download=on_download,
        )

    dna = model(dna_model or card.dna_model.name)
    protein = model(protein_model or card.protein_model.name)
    for config, kind, option in ((dna, SequenceKind.DNA, "DNA"), (protein, SequenceKind.PROTEIN, "protein")):
        if config.sequence_kind is not kind:
            raise ConfigurationError(f"{config.model_name} embeds {config.sequence_kind}: it is no {option} model")
    card.check(chunk_nt=chunk_nt, dna=dna, protein=protein)
    return PredictionConfig(
        classifier_dir=folder,
        card=card,
        dna=dna,
        protein=protein,
        rules=InputRules(
            sequence_kind=SequenceKind.DNA,
            gaps=GapPolicy(gaps),
            on_bad_record=BadRecordPolicy(on_bad_record),
            allow_empty=allow_empty,
        ),
        min_nt=min_nt,
        threshold=card.threshold if threshold is None else threshold,
        formats=_formats(formats),
        keep_chunks=keep_chunks,
        not_given=frozenset(
            name
            for name, is_given in (
                ("threshold", threshold is not None),
                ("formats", formats),
                ("keep_chunks", keep_chunks),
            )
            if not is_given
        ),
    )


def _formats(wanted: Sequence[TableFormat | str]) -> tuple[TableFormat, ...]:
    if TableFormat.PARQUET in wanted and find_spec("pyarrow") is None:
        raise ConfigurationError("format parquet needs pyarrow: pip install 'virnucpro[parquet]'")
    known = {str(one) for one in TableFormat}
    for name in wanted:
        if name not in known:
            raise ConfigurationError(f"format {name!r}: choose one of {', '.join(sorted(known))}")
    return tuple(sorted({TableFormat.TSV, *(TableFormat(name) for name in wanted)}))
