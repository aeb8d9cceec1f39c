"""
Train the contig model: tables of k-mers, networks and boosted trees on top of them, calibration, and similarity.

The training part's genomes give the tables. Networks and trees learn from its contigs, each with log-odds from tables
that have not seen its genome; validation's contigs stop the networks, decide whether embeddings are inputs, and set the
temperature. A network predicts a contig's group (cross-entropy), since groups differ more than the two labels do; trees
predict the label. Of a model that takes letters alone, similarity to proteins refines the scores
(``similarity_fitting``).
Seeded, on one thread: the same contigs give the same weights on the same kind of CPU. Legend: C contigs,
I inputs, G groups, M networks.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from virnucpro.errors import StoppedError
from virnucpro.models.contigs.contig_model import ContigWeights, Layer, join_inputs, normalised, viral_log_odds
from virnucpro.models.contigs.sequence_features import SequenceFeatures, feature_count
from virnucpro.training.fitting.kmer_log_odds import KmerCounts
from virnucpro.training.fitting.similarity_fitting import fit_similarity
from virnucpro.training.fitting.tree_fitting import fit_trees

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from virnucpro.arrays import BoolArray, DoubleArray, FloatArray, IntArray
    from virnucpro.models.contigs.nucleotide_codes import CodeArray
    from virnucpro.training.training_settings import ContigSettings

_log = logging.getLogger(__name__)

SEQUENCE, EMBEDDINGS = "sequence", "sequence and embeddings"
"""Kinds of inputs."""
_LEAST_DEVIATION = 1e-6
_CONTIGS_AT_ONCE = 128
"""Contigs read between two checks of the stop."""
_TEMPERATURES = np.exp(np.linspace(-2, 2, 401))


@dataclass(frozen=True, kw_only=True)
class LabelledRecords:
    """Genomes or contigs with their labels."""

    codes: Sequence[CodeArray]
    """Letters of each, as ``virnucpro.models.contigs.nucleotide_codes.encode`` returns them."""
    is_virus_C: BoolArray
    groups: Sequence[str]
    """Group of each; the same name under another label is another group."""
    sources: Sequence[str]

    def take(self, numbers: Sequence[int]) -> LabelledRecords:
        """Return some of the records."""
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

    def inputs(self, sequence_CS: FloatArray, kind: str) -> FloatArray:
        """Return a network's inputs, float32 (C, I)."""
        if kind == SEQUENCE:
            return sequence_CS
        return join_inputs(sequence_CS, self.dna_CD, self.protein_CE, self.frames_C, self.chunks_C)


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Inputs and groups of contigs."""

    x_CI: FloatArray
    group_C: IntArray


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Trained networks and the normalisation of their inputs."""

    mean_I: FloatArray
    deviation_I: FloatArray
    members: tuple[tuple[Layer, ...], ...]
    best_epochs: tuple[int, ...]
    """Epoch of each network's weights, from 1."""
    validation_loss: float
    """Nats a contig, virus or not, before calibration; 0.693 is chance."""
    validation_log_odds_C: DoubleArray
    """float64 (C,)."""


def train_contig_model(
    names: Sequence[tuple[bool, str]],
    genomes: LabelledRecords,
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

    Of the *kinds* of inputs, that with the lower loss on validation is used.

    *names* are the groups of *genomes*, the records that *training* was cut from, and *counted* is what
    ``count_kmers`` returned of them. *validation* has contigs of other genomes, of groups that *training* has. Both
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
    by_kind = {}
    for kind in kinds:
        by_kind[kind] = fit_networks(
            Examples(x_CI=training.inputs(training_CS, kind), group_C=training.group_numbers(names)),
            Examples(x_CI=validation.inputs(held_out_CS, kind), group_C=validation.group_numbers(names)),
            is_viral_G,
            settings,
            stop=stop,
        )
        _log.info("contig model on %s: validation loss %.4f", kind, by_kind[kind].validation_loss)
    chosen = min(by_kind, key=lambda kind: by_kind[kind].validation_loss)
    networks = by_kind[chosen]
    trees = fit_trees(training.inputs(training_CS, chosen), training.is_virus_C, settings.trees, stop=stop)
    by_trees_C = trees.log_odds(validation.inputs(held_out_CS, chosen))
    log_odds_C = (networks.validation_log_odds_C + by_trees_C) / 2
    temperature = choose_temperature(log_odds_C, validation.is_virus_C)
    similarity = None
    if chosen == SEQUENCE:
        scores_C = np.asarray(1 / (1 + np.exp(-log_odds_C / temperature)), dtype=np.float32)
        similarity = fit_similarity(
            genomes, validation.codes, scores_C, validation.is_virus_C, seed=settings.seed, stop=stop
        )
    weights = ContigWeights(
        log_odds=tables,
        is_viral_G=is_viral_G,
        mean_I=networks.mean_I,
        deviation_I=networks.deviation_I,
        members=networks.members,
        trees=trees,
        temperature=temperature,
        similarity=similarity,
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
        "proteins": 0 if similarity is None else len(similarity.proteins.lengths_N),
        "residues": 0 if similarity is None else len(similarity.proteins.residues_R),
        "groups": [name for _, name in names],  # in the order of the networks' outputs
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


def fit_networks(
    training: Examples,
    validation: Examples,
    is_viral_G: BoolArray,
    settings: ContigSettings,
    *,
    stop: threading.Event | None = None,
) -> Networks:
    """Train networks that differ in seed; each keeps the weights of its best epoch on *validation*."""
    mean_I = training.x_CI.mean(axis=0)
    deviation_I = np.maximum(training.x_CI.std(axis=0), np.float32(_LEAST_DEVIATION))
    x_CI, held_out_CI = (torch.from_numpy(normalised(e.x_CI, mean_I, deviation_I)) for e in (training, validation))
    group_C = torch.from_numpy(training.group_C)
    is_virus_C = is_viral_G[validation.group_C]
    members, best_epochs, log_odds = [], [], []
    for member in range(settings.members):
        network, best_epoch, log_odds_C = _fit_one(
            x_CI, group_C, held_out_CI, is_virus_C, is_viral_G, settings, settings.seed + member, stop
        )
        members.append(_layers(network))
        best_epochs.append(best_epoch)
        log_odds.append(log_odds_C)
    mean_log_odds_C = np.mean(log_odds, axis=0)
    return Networks(
        mean_I=mean_I,
        deviation_I=deviation_I,
        members=tuple(members),
        best_epochs=tuple(best_epochs),
        validation_loss=binary_loss(mean_log_odds_C, is_virus_C),
        validation_log_odds_C=mean_log_odds_C,
    )


def binary_loss(log_odds_C: DoubleArray, is_virus_C: BoolArray) -> float:
    """Return the mean cross-entropy of virus or not, nats, both labels with the same weight."""
    losses_C = np.logaddexp(0, np.where(is_virus_C, -log_odds_C, log_odds_C))
    return float(np.mean([losses_C[is_virus_C].mean(), losses_C[~is_virus_C].mean()]))


def choose_temperature(log_odds_C: DoubleArray, is_virus_C: BoolArray) -> float:
    """Return the temperature (Guo et al. 2017), from 0.14 to 7.4, with the lowest loss on these contigs."""
    losses = [binary_loss(log_odds_C / temperature, is_virus_C) for temperature in _TEMPERATURES]
    return float(_TEMPERATURES[int(np.argmin(losses))])


def _fit_one(
    x_CI: torch.Tensor,
    group_C: torch.Tensor,
    held_out_CI: torch.Tensor,
    is_virus_C: BoolArray,
    is_viral_G: BoolArray,
    settings: ContigSettings,
    seed: int,
    stop: threading.Event | None,
) -> tuple[nn.Sequential, int, DoubleArray]:
    """Return a network with the weights of its best epoch, that epoch, and validation's log-odds."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    network = _network(x_CI.shape[1], len(is_viral_G), settings)
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    batches = -(-len(group_C) // settings.batch_contigs)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=settings.most_epochs * batches
    )
    loss = nn.CrossEntropyLoss()
    order = torch.Generator().manual_seed(seed)
    best_loss, best_epoch, best_weights = float("inf"), 0, network.state_dict()
    best_log_odds_C = np.zeros(len(is_virus_C))
    epoch = 0
    while epoch < settings.most_epochs and epoch < best_epoch + settings.patience_epochs:
        epoch += 1
        network.train()
        for batch in torch.split(torch.randperm(len(group_C), generator=order), settings.batch_contigs):
            _check(stop)
            if len(batch) > 1:  # one contig has no variance
                optimizer.zero_grad()
                loss(network(x_CI[batch]), group_C[batch]).backward()
                optimizer.step()
            schedule.step()
        network.eval()
        with torch.inference_mode():
            log_odds_C = viral_log_odds(network(held_out_CI).double().numpy(), is_viral_G)
        held_out_loss = binary_loss(log_odds_C, is_virus_C)
        if held_out_loss < best_loss:
            best_loss, best_epoch, best_log_odds_C = held_out_loss, epoch, log_odds_C
            best_weights = copy.deepcopy(network.state_dict())
    network.load_state_dict(best_weights)
    return network.eval(), best_epoch, best_log_odds_C


def _network(num_inputs: int, num_groups: int, settings: ContigSettings) -> nn.Sequential:
    first, second = settings.hidden_dims
    return nn.Sequential(
        nn.Dropout(settings.input_dropout),
        nn.Linear(num_inputs, first),
        nn.BatchNorm1d(first),
        nn.ReLU(),
        nn.Dropout(settings.dropout),
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Dropout(settings.dropout / 2),
        nn.Linear(second, num_groups),
    )


def _layers(network: nn.Sequential) -> tuple[Layer, ...]:
    """Return the layers of a network in evaluation mode, the batch norm folded into the first one."""
    linear: list[nn.Linear] = [part for part in network if isinstance(part, nn.Linear)]
    norm: Any = next(part for part in network if isinstance(part, nn.BatchNorm1d))
    scale = (norm.weight / torch.sqrt(norm.running_var + norm.eps)).detach()
    layers = [(part.weight.detach(), part.bias.detach()) for part in linear]
    weight, bias = layers[0]
    layers[0] = weight * scale[:, None], (bias - norm.running_mean) * scale + norm.bias.detach()
    return tuple(Layer(weight.numpy().copy(), bias.numpy().copy()) for weight, bias in layers)


def _check(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise StoppedError
