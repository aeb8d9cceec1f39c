"""
Train the contig model: tables of k-mers, networks and boosted trees on top of them, calibration, and homology.

The training part's genomes give the tables. Networks and trees learn from its contigs, each with log-odds from tables
that have not seen its genome: networks a contig's group, trees its label. Validation's contigs stop the networks,
decide whether embeddings are inputs, and set the temperature. Of a model that takes composition alone, homology to
proteins refines the scores (``homology_fitting``). Legend: C contigs, I inputs, G groups.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.errors import StoppedError
from virnucpro.models.contigs.contig_model import ContigWeights, join_inputs
from virnucpro.models.contigs.sequence_features import SequenceFeatures, feature_count
from virnucpro.training.fitting.homology_fitting import fit_homology
from virnucpro.training.fitting.kmer_log_odds import KmerCounts
from virnucpro.training.fitting.network_fitting import Examples, binary_loss, fit_networks
from virnucpro.training.fitting.suspect_fragments import SUSPECT, SUSPECT_WEIGHT, judge
from virnucpro.training.fitting.tree_fitting import fit_trees

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from virnucpro.arrays import BoolArray, DoubleArray, FloatArray, IntArray
    from virnucpro.models.contigs.nucleotide_codes import CodeArray
    from virnucpro.models.contigs.protein_search import KnownProteins
    from virnucpro.training.training_settings import ContigSettings

_log = logging.getLogger(__name__)

SEQUENCE, EMBEDDINGS = "sequence", "sequence and embeddings"
"""Kinds of inputs."""
_CONTIGS_AT_ONCE = 128
"""Contigs read between two checks of the stop."""
_TEMPERATURES = np.exp(np.linspace(-2, 2, 401))


@dataclass(frozen=True, kw_only=True)
class LabelledRecords:
    """Genomes or contigs with their labels."""

    codes: Sequence[CodeArray]
    """Letters of each, as ``virnucpro.models.contigs.nucleotide_codes.masked`` returns them."""
    is_virus_C: BoolArray
    groups: Sequence[str]
    """Group of each; the same name under another label is another group."""
    sources: Sequence[str]
    names: Sequence[str] = ()
    """For readers: accession and organism of each."""

    def take(self, numbers: Sequence[int]) -> LabelledRecords:
        return LabelledRecords(
            codes=[self.codes[at] for at in numbers],
            is_virus_C=self.is_virus_C[numbers],
            groups=[self.groups[at] for at in numbers],
            sources=[self.sources[at] for at in numbers],
        )

    def group_names(self) -> list[tuple[bool, str]]:
        """Return label and name of every group, non-viral ones first."""
        return sorted(set(zip(self.is_virus_C.tolist(), self.groups, strict=True)))

    def group_numbers(self, names: Sequence[tuple[bool, str]]) -> IntArray:
        """Return the position of each record's group in *names*, int64 (C,)."""
        places = {name: number for number, name in enumerate(names)}
        pairs = zip(self.is_virus_C.tolist(), self.groups, strict=True)
        return np.array([places[pair] for pair in pairs], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class TrainingContigs(LabelledRecords):
    """Contigs of the training or validation part, with the embeddings of their frames."""

    dna_CD: FloatArray
    """float32 (C, D): mean over the embedded frames, zeros for a contig without any."""
    protein_CE: FloatArray
    """float32 (C, E): the same of proteins."""
    frames_C: IntArray
    """int64 (C,): embedded frames."""
    chunks_C: IntArray
    places: Sequence[str]
    """Record and range of each."""

    def inputs(self, sequence_CS: FloatArray, kind: str) -> FloatArray:
        """Return a network's inputs, float32 (C, I)."""
        if kind == SEQUENCE:
            return sequence_CS
        return join_inputs(sequence_CS, self.dna_CD, self.protein_CE, self.frames_C, self.chunks_C)


def train_contig_model(
    names: Sequence[tuple[bool, str]],
    proteins: KnownProteins,
    counted: tuple[KmerCounts, Mapping[str, int]],
    training: TrainingContigs,
    validation: TrainingContigs,
    settings: ContigSettings,
    *,
    kinds: Sequence[str] = (SEQUENCE, EMBEDDINGS),
    stop: threading.Event | None = None,
) -> tuple[ContigWeights, dict[str, Any]]:
    """
    Train and calibrate a contig model; return how it went, too, for its card.

    Of the *kinds* of inputs, that with the lower loss on validation is used. Fragments that look viral although their
    genomes are not count less (``suspect_fragments``).

    *names* are the groups of the genomes that *training* was cut from, *counted* is what ``count_kmers`` returned of
    them, and *proteins* are theirs. *validation* has contigs of other genomes, of groups that *training* has. Both
    have both labels.

    Raises:
        StoppedError: *stop* was set.
    """
    is_viral_G = np.array([is_virus for is_virus, _ in names])
    counts, fold_of_source = counted
    tables = counts.log_odds()
    features = SequenceFeatures(tables, is_viral_G)
    held_out_CS = features.of_many(validation.codes)
    training_CS = features_out_of_fold(training, counts, fold_of_source, is_viral_G, stop=stop)
    fold_C = np.array([fold_of_source[source] for source in training.sources])
    p_C = judge(training_CS, training.is_virus_C, fold_C, settings.trees, stop=stop)
    suspects = np.flatnonzero(~training.is_virus_C & (p_C >= SUSPECT))
    weight_C = np.ones(len(p_C), dtype=np.float32)
    weight_C[suspects] = SUSPECT_WEIGHT
    by_kind = {}
    for kind in kinds:
        by_kind[kind] = fit_networks(
            Examples(x_CI=training.inputs(training_CS, kind), group_C=training.group_numbers(names)),
            Examples(x_CI=validation.inputs(held_out_CS, kind), group_C=validation.group_numbers(names)),
            is_viral_G,
            settings,
            weight_C=weight_C,
            stop=stop,
        )
        _log.info("contig model on %s: validation loss %.4f", kind, by_kind[kind].validation_loss)
    chosen = min(by_kind, key=lambda kind: by_kind[kind].validation_loss)
    networks = by_kind[chosen]
    trees = fit_trees(
        training.inputs(training_CS, chosen), training.is_virus_C, settings.trees, weight_C=weight_C, stop=stop
    )
    by_trees_C = trees.log_odds(validation.inputs(held_out_CS, chosen))
    log_odds_C = (networks.validation_log_odds_C + by_trees_C) / 2
    temperature = choose_temperature(log_odds_C, validation.is_virus_C)
    homology = None
    if chosen == SEQUENCE:
        scores_C = np.asarray(1 / (1 + np.exp(-log_odds_C / temperature)), dtype=np.float32)
        homology = fit_homology(proteins, validation, scores_C, stop=stop)
    weights = ContigWeights(
        log_odds=tables,
        is_viral_G=is_viral_G,
        mean_I=networks.mean_I,
        deviation_I=networks.deviation_I,
        members=networks.members,
        trees=trees,
        temperature=temperature,
        homology=homology,
    )
    outcome = {
        "inputs": chosen,
        "validation_losses": {kind: round(networks.validation_loss, 5) for kind, networks in by_kind.items()},
        "best_epochs": networks.best_epochs,
        "losses_of_parts": {
            name: round(binary_loss(found_C, validation.is_virus_C), 5)
            for name, found_C in (
                ("networks", networks.validation_log_odds_C),
                ("trees", by_trees_C),
                ("both", log_odds_C),
            )
        },
        "temperature": temperature,
        "proteins": 0 if homology is None else len(homology.proteins.lengths_N),
        "residues": 0 if homology is None else len(homology.proteins.residues_R),
        "groups": [name for _, name in names],  # in the order of the networks' outputs
        "suspects": [
            {"place": training.places[at], "group": training.groups[at], "score": round(float(p_C[at]), 3)}
            for at in suspects.tolist()
        ],
    }
    return weights, outcome


def count_kmers(
    genomes: LabelledRecords, group_of_contigs_C: IntArray, names: Sequence[tuple[bool, str]], settings: ContigSettings
) -> tuple[KmerCounts, dict[str, int]]:
    """
    Count the genomes' k-mers by fold and group; return the fold of each genome, too.

    *group_of_contigs_C* is the group of each training contig: how much a group weighs.
    """
    numbers = genomes.group_numbers(names)
    sizes: Counter[str] = Counter()
    for codes_L, source in zip(genomes.codes, genomes.sources, strict=True):
        sizes[source] += len(codes_L)
    random = np.random.default_rng(settings.seed)
    fold_of_source: dict[str, int] = {}
    for group in range(len(names)):
        in_group = sorted({s for s, number in zip(genomes.sources, numbers, strict=True) if number == group})
        for place, at in enumerate(random.permutation(len(in_group)).tolist()):
            fold_of_source.setdefault(in_group[at], place % settings.folds)
    counts = KmerCounts(
        genomes.codes,
        numbers,
        np.array([max(sizes[source], 1) ** -0.5 for source in genomes.sources]),
        np.array([fold_of_source[source] for source in genomes.sources]),
        np.bincount(group_of_contigs_C, minlength=len(names)).astype(np.float64),
    )
    return counts, fold_of_source


def features_out_of_fold(
    contigs: LabelledRecords,
    counts: KmerCounts,
    fold_of_source: Mapping[str, int],
    is_viral_G: BoolArray,
    *,
    without_group: int | None = None,
    stop: threading.Event | None = None,
) -> FloatArray:
    """
    Return the sequence features of contigs from tables that have not seen their genomes, float32 (C, S).

    *is_viral_G* is of the groups in the tables, which may lack one.
    """
    folds_C = np.array([fold_of_source[source] for source in contigs.sources])
    sequence_CS = np.empty((len(folds_C), feature_count(len(is_viral_G))), dtype=np.float32)
    for fold in sorted(set(folds_C.tolist())):
        features = SequenceFeatures(counts.log_odds(without_fold=fold, without_group=without_group), is_viral_G)
        numbers = np.flatnonzero(folds_C == fold)
        for some in np.split(numbers, range(_CONTIGS_AT_ONCE, len(numbers), _CONTIGS_AT_ONCE)):
            _check(stop)
            sequence_CS[some] = features.of_many([contigs.codes[number] for number in some.tolist()])
    return sequence_CS


def choose_temperature(log_odds_C: DoubleArray, is_virus_C: BoolArray) -> float:
    """Return the temperature (Guo et al. 2017), from 0.14 to 7.4, with the lowest loss on these contigs."""
    losses = [binary_loss(log_odds_C / temperature, is_virus_C) for temperature in _TEMPERATURES]
    return float(_TEMPERATURES[int(np.argmin(losses))])


def _check(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise StoppedError
