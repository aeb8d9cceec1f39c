"""
Sequences that no organism has, to train what is not viral: random ones, and shuffled genomes of either label.

Without them a model extrapolates: it has seen no sequence that is neither viral nor cellular. Low complexity is masked
before it is scored, so it is not among them. Seeded.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from virnucpro.training.genomes.labelled_genomes import LabelledGenome

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUP = "artificial sequence"
FRAGMENTS_PER_RECORD = 400
"""Training fragments for each record of a kind."""
_LENGTH_NT, _LEAST_NT = 10_000, 1_000
"""Nucleotides of a record, and of one that is shuffled."""
_GC = (0.2, 0.8)


def artificial_genomes(genomes: Sequence[LabelledGenome], num_fragments: int, seed: int) -> list[LabelledGenome]:
    """Return as many random sequences, shuffled viral genomes and shuffled others as *num_fragments* bear."""
    random = np.random.default_rng([seed, *GROUP.encode()])
    clean = [genome for genome in genomes if len(genome.letters) >= _LEAST_NT and set(genome.letters) <= set("ACGT")]
    pools = [[genome.letters for genome in clean if genome.is_virus is label] for label in (True, False)]
    made = []
    for number in range(num_fragments // FRAGMENTS_PER_RECORD):
        sequences = [_random(random)]
        for pool in filter(None, pools):
            letters = pool[int(random.integers(len(pool)))]
            start = int(random.integers(max(len(letters) - _LENGTH_NT, 0) + 1))
            sequences.append(shuffled(letters[start : start + _LENGTH_NT], random))
        made += [_record(f"artificial_{number}_{kind}", letters) for kind, letters in enumerate(sequences)]
    return made


def shuffled(letters: str, random: np.random.Generator) -> str:
    """
    Return a random sequence with the same pairs of neighbours.

    A random path through all of them (Altschul and Erickson 1985): the last pair of each letter is drawn first, so that
    the paths end at the last letter.
    """
    last_letter = letters[-1]
    following: dict[str, list[str]] = {}
    for one, other in pairwise(letters):
        following.setdefault(one, []).append(other)
    while True:
        ends = {one: others[int(random.integers(len(others)))] for one, others in following.items()}
        ends.pop(last_letter, None)
        if all(_leads(one, ends, last_letter) for one in ends):
            break
    for one, others in following.items():
        if one in ends:
            others.remove(ends[one])
        order = random.permutation(len(others)).tolist()
        following[one] = [others[at] for at in order] + ([ends[one]] if one in ends else [])
    found, places = [letters[0]], dict.fromkeys(following, 0)
    while (here := found[-1]) in following and places[here] < len(following[here]):
        found.append(following[here][places[here]])
        places[here] += 1
    return "".join(found)


def _leads(one: str, ends: dict[str, str], last_letter: str) -> bool:
    for _ in ends:
        if one == last_letter:
            break
        one = ends[one]
    return one == last_letter


def _random(random: np.random.Generator) -> str:
    gc = random.uniform(*_GC)
    shares = [(1 - gc) / 2, gc / 2, gc / 2, (1 - gc) / 2]
    return bytes(np.frombuffer(b"ACGT", np.uint8)[random.choice(4, size=_LENGTH_NT, p=shares)]).decode()


def _record(name: str, letters: str) -> LabelledGenome:
    return LabelledGenome(
        accession=name, source=name, letters=letters, file="", title=name, group=GROUP, is_virus=False
    )
