"""
The contig model: features of a whole contig in, a calibrated P(virus) out.

Inputs are the features of ``sequence_features`` and, where the model was trained with them, the means of the embeddings
of the contig's frames. A few small networks, trained alike from other initial weights, give each group of genomes a
logit; their log-odds of the viral groups against the others are averaged. Boosted trees give log-odds of their own. The
score is the mean of the two, divided by the temperature. Where a model has proteins to compare contigs with,
``homology`` refines it. Computed in float64, so that a row's score does not depend on the other rows. Imports no
torch. Legend: C contigs or windows of contigs, S features of the sequence, D and E widths of the embeddings, G groups,
I inputs.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from virnucpro.errors import WeightsError
from virnucpro.models.classifier_files.card import CONTIG_WEIGHTS_NAME, ClassifierCard, check_contig_weights
from virnucpro.models.contigs.boosted_trees import BoostedTrees
from virnucpro.models.contigs.homology import Homology
from virnucpro.models.contigs.sequence_features import SequenceFeatures, feature_count
from virnucpro.models.registry import BUNDLED_WEIGHTS_DIR

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from virnucpro.arrays import BoolArray, DoubleArray, FloatArray, IntArray
    from virnucpro.models.contigs.sequence_features import TableArray


FARTHEST = 6.0
"""Standard deviations from the mean of training at which an input is clipped."""
_NUM_COUNTS = 2
"""Inputs for the number of embedded frames, besides the embeddings."""
_DO_NOT_FIT = "the tensors of the contig model do not fit together, or hold numbers that give no score"
_TABLE, _MEMBER, _TREES, _HOMOLOGY = "log_odds.", "members.", "trees.", "similarity."
_GZIP = 31
"""For zlib: the format of gzip files."""
_MOST_BYTES, _MOST_HEADER_BYTES = 1 << 30, 1 << 20
"""Of the tensors, and of their names, so that a small file cannot fill the memory; what is cut here does not load."""


@dataclass(frozen=True)
class Layer:
    """One layer of a network, its batch norm folded in; ReLU between two layers."""

    weight: FloatArray
    """float32 (out, in), of numbers that float16 has: the file keeps them so."""
    bias: FloatArray


@dataclass(frozen=True, kw_only=True)
class ContigWeights:
    log_odds: Mapping[str, TableArray]
    """Tables of k-mers, by name, int8 (slots, G)."""
    is_viral_G: BoolArray
    """Which groups are viruses, bool (G,)."""
    mean_I: FloatArray
    """Of each input on the training contigs, float32 (I,)."""
    deviation_I: FloatArray
    """Standard deviation of each, above 0, float32 (I,)."""
    members: tuple[tuple[Layer, ...], ...]
    """The networks."""
    trees: BoostedTrees
    temperature: float
    homology: Homology | None = None
    """Refines the scores of contigs; not those of windows along them."""

    def to_bytes(self) -> bytes:
        """Return the content of ``contig_model.safetensors.gz``; ValueError where numbers are not finite."""
        self.check()
        tensors: dict[str, np.ndarray[Any, Any]] = {_TABLE + name: rows for name, rows in self.log_odds.items()}
        tensors |= {"is_viral": self.is_viral_G.astype(np.uint8), "mean": self.mean_I, "deviation": self.deviation_I}
        tensors |= {_TREES + name: values for name, values in self.trees.tensors().items()}
        if self.homology is not None:
            tensors |= {_HOMOLOGY + name: values for name, values in self.homology.tensors().items()}
        tensors["temperature"] = np.array([self.temperature], dtype=np.float32)
        for member, layers in enumerate(self.members):
            for number, layer in enumerate(layers):
                tensors[f"{_MEMBER}{member}.{number}.weight"] = layer.weight.astype(np.float16)
                tensors[f"{_MEMBER}{member}.{number}.bias"] = layer.bias
        data = save({name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)})
        packed = zlib.compressobj(9, zlib.DEFLATED, _GZIP, 9, zlib.Z_FILTERED)  # the best of its ways for residues
        return packed.compress(data) + packed.flush()

    @classmethod
    def of_bytes(cls, data: bytes) -> ContigWeights:
        """Read the content of ``contig_model.safetensors.gz``; ValueError where it is something else."""
        try:
            tensors = load(zlib.decompressobj(_GZIP).decompress(data, _MOST_BYTES))
            of_homology = _part_of(tensors, _HOMOLOGY)
            members: dict[int, dict[int, Layer]] = {}
            for name in sorted(tensors):
                if name.startswith(_MEMBER) and name.endswith(".weight"):
                    member, number = (int(part) for part in name.split(".")[1:3])
                    weight, bias = tensors[name].astype(np.float32), tensors[name.replace(".weight", ".bias")]
                    members.setdefault(member, {})[number] = Layer(weight, bias)
            weights = cls(
                log_odds=_part_of(tensors, _TABLE),
                is_viral_G=tensors["is_viral"].astype(np.bool_),
                mean_I=tensors["mean"],
                deviation_I=tensors["deviation"],
                members=tuple(tuple(layers[n] for n in sorted(layers)) for _, layers in sorted(members.items())),
                trees=BoostedTrees.of_tensors(_part_of(tensors, _TREES)),
                temperature=float(tensors["temperature"][0]),
                homology=Homology.of_tensors(of_homology) if of_homology else None,
            )
        except (SafetensorError, zlib.error, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"no contig model ({error})") from error
        weights.check()
        return weights

    def check(self) -> None:
        layers = [layer for member in self.members for layer in member]
        vectors = [self.is_viral_G, self.mean_I, self.deviation_I, *(layer.bias for layer in layers)]
        if any(x.ndim != 1 for x in vectors) or any(layer.weight.ndim != 2 for layer in layers):
            raise ValueError(_DO_NOT_FIT)
        groups = len(self.is_viral_G)
        tables = [rows.dtype == np.int8 and rows.shape[1:] == (groups,) for rows in self.log_odds.values()]
        widths = [
            [len(self.mean_I), *(len(layer.bias) for layer in layers)] == [*(w.weight.shape[1] for w in layers), groups]
            and all(layer.weight.shape[0] == len(layer.bias) for layer in layers)
            for layers in self.members
        ]
        numbers = [self.mean_I, self.deviation_I, *(x for layer in layers for x in (layer.weight, layer.bias))]
        is_sound = (
            all(tables)
            and bool(self.members)
            and all(widths)
            and self.mean_I.shape == self.deviation_I.shape
            and all(x.dtype == np.float32 and bool(np.isfinite(x).all()) for x in numbers)
            and bool((self.deviation_I > 0).all())
            and 0 < self.temperature < np.inf
            and 0 < int(self.is_viral_G.sum()) < groups
        )
        if not is_sound:
            raise ValueError(_DO_NOT_FIT)
        self.trees.check(len(self.mean_I))
        if self.homology is not None:
            self.homology.check()


def _part_of(tensors: Mapping[str, np.ndarray[Any, Any]], prefix: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors with names that begin with *prefix*, named without it."""
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


class ContigModel:
    def __init__(self, weights: ContigWeights) -> None:
        self._weights = weights
        self.features = SequenceFeatures(weights.log_odds, weights.is_viral_G)
        """Makes the inputs that come from nucleotides."""
        _checked_inputs(len(weights.mean_I), len(weights.is_viral_G))

    @property
    def uses_embeddings(self) -> bool:
        return len(self._weights.mean_I) > self.features.dim

    @property
    def homology(self) -> Homology | None:
        """What refines the scores of contigs, where the model has it."""
        return self._weights.homology

    def probabilities(
        self,
        sequence_CS: FloatArray,
        dna_CD: FloatArray,
        protein_CE: FloatArray,
        frames_C: IntArray,
        chunks_C: IntArray,
    ) -> FloatArray:
        """
        Return P(virus) of each row, float32 (C,).

        Args:
            sequence_CS: float32 (C, S): from ``features.of``.
            dna_CD: float32 (C, D): mean DNA embedding of the embedded frames, zeros where there is none.
            protein_CE: float32 (C, E): same as above, of proteins.
            frames_C: int64 (C,): embedded frames.
            chunks_C: int64 (C,): chunks, at least 1.
        """
        x_CI = sequence_CS
        if self.uses_embeddings:
            x_CI = join_inputs(sequence_CS, dna_CD, protein_CE, frames_C, chunks_C)
        weights = self._weights
        logits = network_logits(x_CI, weights.mean_I, weights.deviation_I, weights.members)
        log_odds_C = (mean_log_odds(logits, weights.is_viral_G) + weights.trees.log_odds(x_CI)) / 2
        return np.asarray(1 / (1 + np.exp(-log_odds_C / weights.temperature)), dtype=np.float32)


def network_logits(
    x_CI: FloatArray, mean_I: FloatArray, deviation_I: FloatArray, members: Sequence[Sequence[Layer]]
) -> list[DoubleArray]:
    """Return each network's logits of the groups, float64 (C, G)."""
    inputs = normalised(x_CI, mean_I, deviation_I).astype(np.float64)
    logits = []
    for layers in members:
        hidden = inputs
        for number, layer in enumerate(layers):
            weight = layer.weight.astype(np.float64).T
            hidden = (np.maximum(hidden, 0) if number else hidden) @ weight + layer.bias.astype(np.float64)
        logits.append(hidden)
    return logits


def mean_log_odds(logits: Sequence[DoubleArray], is_viral_G: BoolArray) -> DoubleArray:
    """Return the mean over networks of the log-odds of a virus, float64 (C,)."""
    return np.asarray(np.mean([viral_log_odds(x_CG, is_viral_G) for x_CG in logits], axis=0))


def join_inputs(
    sequence_CS: FloatArray, dna_CD: FloatArray, protein_CE: FloatArray, frames_C: IntArray, chunks_C: IntArray
) -> FloatArray:
    """Return the inputs of a model that uses embeddings, float32 (C, S + D + E + 2); frame counts come last."""
    counts_C2 = np.stack([np.log1p(frames_C), frames_C / np.maximum(chunks_C, 1)], axis=1).astype(np.float32)
    return np.concatenate([sequence_CS, dna_CD, protein_CE, counts_C2], axis=1)


def normalised(x_CI: FloatArray, mean_I: FloatArray, deviation_I: FloatArray) -> FloatArray:
    """Return the inputs in standard deviations from the mean, clipped at ``FARTHEST``."""
    return np.asarray(np.clip((x_CI - mean_I) / deviation_I, -FARTHEST, FARTHEST), dtype=np.float32)


@dataclass(frozen=True)
class CompositionModel:
    """The contig model of a classifier, where it reads composition alone; small and picklable."""

    folder: Path
    card: ClassifierCard
    searches_proteins: bool = False
    """Whether it compares contigs with known proteins."""

    @classmethod
    def of(cls, folder: Path, card: ClassifierCard) -> CompositionModel | None:
        """
        Return the contig model of a classifier, by the first bytes of its file; None where it reads embeddings.

        Only a bundled classifier's model is not loaded: its checksum is enough. ``WeightsError`` where the file is
        absent, not the card's, or of something else.
        """
        if card.contig_model is None:
            return None
        packed = check_contig_weights(folder, card)
        try:
            beginning = zlib.decompressobj(_GZIP).decompress(packed, _MOST_HEADER_BYTES)
            header = json.loads(beginning[8 : 8 + int.from_bytes(beginning[:8], "little")])
            (inputs,), (groups,) = header["mean"]["shape"], header["is_viral"]["shape"]
            reads_embeddings = inputs > _checked_inputs(inputs, groups)
        except (zlib.error, ValueError, LookupError, TypeError, RecursionError) as error:
            raise WeightsError(card.name, f"{folder / CONTIG_WEIGHTS_NAME}: no contig model ({error})") from error
        if folder.parent != BUNDLED_WEIGHTS_DIR:
            load_contig_model(folder, card)
        searches_proteins = any(name.startswith(_HOMOLOGY) for name in header)
        return None if reads_embeddings else cls(folder, card, searches_proteins)

    def load(self) -> ContigModel:
        """Load the model; WeightsError where its file is absent or another."""
        return load_contig_model(self.folder, self.card)

    def records(self) -> tuple[str, ...]:
        """Return the names of the genome records that its proteins are of."""
        homology = self.load().homology if self.searches_proteins else None
        return () if homology is None else homology.proteins.records


def _checked_inputs(inputs: int, groups: int) -> int:
    """Return how many of a model's inputs are of composition; ValueError where it takes fewer."""
    if inputs < (of_composition := feature_count(groups)):
        given = f"it takes {inputs} numbers, and a contig's nucleotides give {of_composition}"
        raise ValueError(f"{given}: train it again with this version")
    return of_composition


def load_contig_model(folder: Path, card: ClassifierCard) -> ContigModel:
    """Load a classifier's contig model, which its card must have; WeightsError where its file is absent or another."""
    data = check_contig_weights(folder, card)
    try:
        weights = ContigWeights.of_bytes(data)
        model = ContigModel(weights)
    except ValueError as error:
        raise WeightsError(card.name, f"{folder / CONTIG_WEIGHTS_NAME}: {error}") from error
    taken, given = len(weights.mean_I), model.features.dim + card.input_dim + _NUM_COUNTS
    if model.uses_embeddings and taken != given:
        what = f"it takes {taken} numbers, and a contig gives {given}"
        raise WeightsError(card.name, f"{folder / CONTIG_WEIGHTS_NAME}: {what}")
    return model


def viral_log_odds(logits_CG: DoubleArray, is_viral_G: BoolArray) -> DoubleArray:
    """Return log P(viral groups) - log P(other groups), float64 (C,)."""
    viral, others = (np.logaddexp.reduce(logits_CG[:, side], axis=1) for side in (is_viral_G, ~is_viral_G))
    return np.asarray(viral - others)
