"""
A held-out part of genomes that no record of the training part is related to.

``virnucpro.training.genomes.related`` has the rule. Whole clusters go to one side, in each file by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.training.genomes.genome_split import ACCESSIONS, ORGANISMS, bare_accession
from virnucpro.training.genomes.related import cluster, hold_out_groups, largest_shares, sketch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from virnucpro.training.genomes.records import Genome


@dataclass(frozen=True)
class GenomeSplit:
    """Which records train, which are held out, and how similar the two sides are."""

    training: list[Genome]
    held_out: list[Genome]
    num_groups: int
    """Groups of linked records."""
    largest_share: float
    """Largest share of a held-out record's 21-mers that is in one training record."""
    mean_share: float
    """Mean of these largest shares."""


def split_genomes(genomes: Sequence[Genome], *, seed: int, held_out_share: float) -> GenomeSplit:
    """Hold out about *held_out_share* of each file's nucleotides, by whole groups of linked records."""
    kmers_of = [sketch(genome.letters) for genome in genomes]
    groups = cluster(
        kmers_of, [genome.source for genome in genomes], [genome.organism.casefold() for genome in genomes]
    )
    num_nt = np.array([len(genome.letters) for genome in genomes])
    files = np.array([genome.file for genome in genomes])
    is_held_out = np.zeros(len(genomes), dtype=bool)
    random = np.random.default_rng(seed)
    for file in sorted(set(files)):
        in_file = files == file
        only_here = ~np.isin(groups, groups[~in_file])
        chosen = hold_out_groups(
            groups,
            np.where(in_file, num_nt, 0),
            eligible=in_file & only_here,
            room=int(held_out_share * num_nt[in_file].sum()),
            random=random,
        )
        is_held_out |= chosen
    held_out, training = (np.flatnonzero(side).tolist() for side in (is_held_out, ~is_held_out))
    shares = largest_shares([kmers_of[i] for i in held_out], [kmers_of[i] for i in training])
    return GenomeSplit(
        training=[genomes[i] for i in training],
        held_out=[genomes[i] for i in held_out],
        num_groups=int(groups.max()) + 1,
        largest_share=float(shares.max()),
        mean_share=float(shares.mean()),
    )


def as_card(genomes: Iterable[Genome]) -> dict[str, Any]:
    """Return the card's entries about the genomes that train an encoder."""
    genomes = list(genomes)
    return {
        ACCESSIONS: sorted({bare_accession(genome.accession) for genome in genomes}),
        ORGANISMS: sorted({genome.organism for genome in genomes if genome.organism}),
    }
