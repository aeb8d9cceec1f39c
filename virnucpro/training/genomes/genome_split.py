"""
Split genomes into train, validation and test, with related genomes in one part.

Whole clusters of linked genomes, and so all records of an organism, go to one part. About *share* of each group's
nucleotides goes to test, then as much to validation; a group of three clusters or more has at least one in each part.
A cluster of several groups trains, and so does one that the DNA encoder has seen a record of, unless a label has no
other for test or validation: a classifier measured on records that its encoder has seen looks better than on new
genomes. The card beside an encoder's weights lists its accessions (without range and version) and organisms; whatever a
card does not list counts as not seen. Legend: R records.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.errors import BadInputError, InputProblem
from virnucpro.models.classifier_files.card import CARD_NAME
from virnucpro.run_folders import read_bytes
from virnucpro.training.genomes.related import cluster, hold_out_groups, largest_shares, sketch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from virnucpro.config import ModelConfig
    from virnucpro.training.genomes.labelled_genomes import LabelledGenome
    from virnucpro.training.genomes.records import Genome

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = (TRAIN, VALIDATION, TEST)
_LEAST_CLUSTERS = 3
"""Clusters that a group needs to be in every part."""
ACCESSIONS, ORGANISMS = "training_accessions", "training_organisms"
"""Keys of an encoder's card, in its ``split``."""
_VERSION_AND_RANGE = re.compile(r"(\.\d+)?(:.*|#\d+)?$")


@dataclass(frozen=True, kw_only=True)
class SplitGenomes:
    genomes: list[LabelledGenome]
    """Those that are used, in the order of the input."""
    parts: list[str]
    """(R,): one of ``SPLITS``."""
    clusters: list[int]
    """(R,): number of the cluster of linked records."""
    left_out: list[str]
    """Accessions of genomes that were skipped as relatives."""
    largest_share: float
    """Largest share of a validation or test record's 21-mers that is in one record of another part."""
    notes: list[str]
    """What the user should know, a sentence each."""

    def of_part(self, part: str) -> list[LabelledGenome]:
        return [genome for genome, its_part in zip(self.genomes, self.parts, strict=True) if its_part == part]


@dataclass(frozen=True)
class EncoderData:
    """The genomes that an encoder was trained on."""

    accessions: frozenset[str]
    """Without version and range."""
    organisms: frozenset[str]
    """In lower case."""

    def has(self, genome: LabelledGenome) -> bool:
        """Whether the encoder has seen this record, or another one of its organism."""
        return bare_accession(genome.accession) in self.accessions or genome.organism.casefold() in self.organisms


def training_data_of(model: ModelConfig) -> EncoderData | None:
    """Return the training data listed in the card beside an encoder's weights; None if it lists none."""
    try:
        card = json.loads(read_bytes(Path(model.weights_path).parent / CARD_NAME))
        if card["weights_sha256"] != model.weights_sha256:
            return None
        split = card["split"]
        return EncoderData(frozenset(split[ACCESSIONS]), frozenset(name.casefold() for name in split[ORGANISMS]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def bare_accession(name: str) -> str:
    """Return a record's accession without version and range."""
    return _VERSION_AND_RANGE.sub("", name)


def split_labelled(
    genomes: Sequence[LabelledGenome],
    relatives_of: Sequence[Genome] = (),
    *,
    seed: int,
    share: float,
    shuffle_labels: bool = False,
    is_seen: Sequence[bool] | None = None,
) -> SplitGenomes:
    """
    Split genomes into the three parts.

    Args:
        genomes: Every labelled record.
        relatives_of: Genomes whose relatives are skipped, directly or through others.
        seed: Seed of the random order of clusters.
        share: Share of each group's nucleotides for test, and as much for validation.
        shuffle_labels: Give the clusters of each part and group alternating labels, in a random order.
        is_seen: (R,): whether the DNA encoder was trained on the record or its organism; None: on none.
    """
    every: list[Genome] = [*genomes, *relatives_of]
    kmers_of = [sketch(genome.letters) for genome in every]
    clusters = cluster(kmers_of, [genome.source for genome in every], [genome.organism.casefold() for genome in every])
    is_related = np.isin(clusters[: len(genomes)], clusters[len(genomes) :])
    used = np.flatnonzero(~is_related).tolist()
    left = [genomes[number] for number in used]
    _, numbers = np.unique(clusters[used], return_inverse=True)
    random = np.random.default_rng(seed)
    seen = np.zeros(len(used), dtype=bool) if is_seen is None else np.array(is_seen, dtype=bool)[used]
    parts, notes = _parts(left, numbers, np.isin(numbers, numbers[seen]), share, random)
    if shuffle_labels:
        left = _shuffled(left, numbers, parts, random)
        _refuse_groups_of_one_label(left, parts)
    _refuse_missing_labels(left, parts)
    kmers_of = [kmers_of[number] for number in used]
    return SplitGenomes(
        genomes=left,
        parts=parts,
        clusters=numbers.tolist(),
        left_out=[genome.accession for genome, related in zip(genomes, is_related, strict=True) if related],
        largest_share=_largest_share(kmers_of, parts),
        notes=notes,
    )


def _parts(
    genomes: Sequence[LabelledGenome],
    clusters: NDArray[np.int64],
    is_seen: NDArray[np.bool_],
    share: float,
    random: np.random.Generator,
) -> tuple[list[str], list[str]]:
    """Return the part of each genome, and notes on groups that only train and on genomes that the encoder has seen."""
    num_nt = np.array([len(genome.letters) for genome in genomes], dtype=np.int64)
    groups = np.array([genome.group for genome in genomes])
    is_virus = np.array([genome.is_virus for genome in genomes])
    parts = np.full(len(genomes), TRAIN, dtype=object)
    notes: dict[str, str] = {}

    def split_groups(names: Iterable[str], barred: NDArray[np.bool_]) -> None:
        for group in names:
            mine = groups == group
            own = mine & ~np.isin(clusters, clusters[~mine])
            chosen, notes[group] = _held_out(
                group, clusters, np.where(mine, num_nt, 0), own, own & ~barred, share, random
            )
            parts[mine] = chosen[mine]

    split_groups(sorted(set(groups.tolist())), is_seen)
    for label in (False, True):
        mine = is_virus == label
        if (is_seen & mine).any() and not {TEST, VALIDATION} <= set(parts[mine]):
            what = "viral genomes" if label else "genomes that are not viral"
            split_groups(sorted(set(groups[mine].tolist())), np.zeros_like(is_seen))
            notes[what] = f"{what} are held out whether or not the DNA encoder has seen them: too few are new to it"
    return parts.tolist(), [note for note in notes.values() if note]


def _held_out(
    group: str,
    clusters: NDArray[np.int64],
    num_nt: NDArray[np.int64],
    own: NDArray[np.bool_],
    eligible: NDArray[np.bool_],
    share: float,
    random: np.random.Generator,
) -> tuple[NDArray[Any], str]:
    """
    Return the part of each record of one group, and why it is in one part only.

    *num_nt* is 0 outside of the group; *own* records are in clusters of this group alone; *eligible* ones of them may
    be held out.
    """
    parts = np.full(len(clusters), TRAIN, dtype=object)
    num_own, num_eligible = len(np.unique(clusters[own])), len(np.unique(clusters[eligible]))
    if num_own < _LEAST_CLUSTERS or num_eligible < _LEAST_CLUSTERS - 1:
        unseen = f", of which the DNA encoder has not seen {num_eligible}" if num_eligible < num_own else ""
        note = f"{group} trains only: it has {num_own} clusters of genomes of its own{unseen}, and three parts need "
        return parts, note + str(_LEAST_CLUSTERS)
    others_train = num_eligible < num_own
    most_in_test = (num_eligible + 1) // 2 if others_train else num_own - 2
    for part in (TEST, VALIDATION):
        ours = np.unique(clusters[eligible])
        chosen = hold_out_groups(
            clusters,
            num_nt,
            eligible=eligible,
            room=int(share * num_nt.sum()),
            random=random,
            most=most_in_test if part == TEST else len(ours) - (not others_train),
        )
        if not chosen.any():
            weights = np.bincount(clusters[eligible], num_nt[eligible], minlength=clusters.max() + 1)
            chosen = eligible & (clusters == ours[np.argmin(weights[ours])])
        parts[chosen] = part
        eligible = eligible & ~chosen
    return parts, ""


def _shuffled(
    genomes: Sequence[LabelledGenome], clusters: NDArray[np.int64], parts: Sequence[str], random: np.random.Generator
) -> list[LabelledGenome]:
    """Give whole clusters of each part and group alternating labels, in a random order."""
    members: dict[tuple[str, str], dict[int, None]] = {}
    for genome, number, part in zip(genomes, clusters.tolist(), parts, strict=True):
        members.setdefault((part, genome.group), {})[number] = None
    label_of: dict[int, bool] = {}
    turn = bool(random.integers(2))
    for _, numbers in sorted(members.items()):
        for number in random.permutation(list(numbers)).tolist():
            if number not in label_of:
                label_of[number] = turn
                turn = not turn
    return [
        replace(genome, is_virus=label_of[number]) for genome, number in zip(genomes, clusters.tolist(), strict=True)
    ]


def _refuse_groups_of_one_label(genomes: Sequence[LabelledGenome], parts: Sequence[str]) -> None:
    """Refuse groups whose shuffled label in another part is missing in training."""
    trained = {(genome.group, genome.is_virus) for genome, part in zip(genomes, parts, strict=True) if part == TRAIN}
    for genome in genomes:
        if (genome.group, genome.is_virus) not in trained:
            what = f"the group {genome.group} has too few clusters of related genomes for labels to be shuffled"
            remedy = "leave it out, or give more genomes of it"
            raise BadInputError([InputProblem("the input", None, what, remedy, genome.accession)])


def _refuse_missing_labels(genomes: Sequence[LabelledGenome], parts: Sequence[str]) -> None:
    for is_virus, what in ((True, "viral genomes"), (False, "genomes that are not viral")):
        found = {part for genome, part in zip(genomes, parts, strict=True) if genome.is_virus is is_virus}
        if missing := [part for part in SPLITS if part not in found]:
            problem = f"there are no {what}" if len(missing) == len(SPLITS) else f"no {what} are left for {missing[-1]}"
            remedy = f"give {what} of at least {_LEAST_CLUSTERS} unrelated kinds in one group"
            raise BadInputError([InputProblem("the input", None, problem, remedy)])


def _largest_share(kmers_of: Sequence[NDArray[np.uint64]], parts: Sequence[str]) -> float:
    """Return the largest share of a held-out record's k-mers that one record of an earlier part has."""
    shares = [0.0]
    for place, part in enumerate(SPLITS[1:], start=1):
        held_out = [kmers for kmers, its_part in zip(kmers_of, parts, strict=True) if its_part == part]
        others = [kmers for kmers, its_part in zip(kmers_of, parts, strict=True) if its_part in SPLITS[:place]]
        shares.append(float(largest_shares(held_out, others).max()))
    return max(shares)
