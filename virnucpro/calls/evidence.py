"""
What calls rest on: composition, homology to known proteins, and terminal repeats; files of fixed rows, one a contig.

``evidence`` has ``COLUMNS`` of float32. A hit is the best known viral, or cellular, protein; it names a genome that
trained the classifier, not the contig's taxonomy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from virnucpro.calls.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.arrays import ByteArray, FloatArray
    from virnucpro.models.contigs.homology import Judged
    from virnucpro.models.contigs.protein_search import Int32Array

SIDES = ("viral", "cellular")
COLUMNS = ("score", "composition", *(f"{side}_{what}" for side in SIDES for what in ("record", "bits", "identity")))
"""P(virus), that by composition alone, and of both hits number of the genome record (-1: none), bits and identity."""
CONFIDENT = 0.9
"""Composition score (or its complement) from which on composition is evidence."""
_KINDS = {
    (False, False): "none",
    (False, True): "homology",
    (True, False): "composition",
    (True, True): "both",
}
"""By whether composition is confident, and whether there is a hit."""
_IDENTITY_DIGITS, _BITS_DIGITS = 3, 1


class Hit(NamedTuple):
    name: str
    """Accession and organism of the genome record."""
    identity: float
    """Share of identical residues in the alignment, three decimals."""
    bits: float
    """Score of the alignment in bits, one decimal."""


class Evidence(NamedTuple):
    """What the call of a contig rests on."""

    kind: str
    """homology, composition, both or none; empty without a score."""
    viral: Hit | None
    cellular: Hit | None
    topology: str
    """Empty where the contig was not read."""


NO_EVIDENCE = Evidence("", None, None, "")
"""Of a contig that the composition model did not read."""


def without_hits(scores_C: FloatArray) -> FloatArray:
    """Return the evidence of contigs with composition scores and nothing else, float32 (C, columns)."""
    evidence = np.zeros((len(scores_C), len(COLUMNS)), dtype=np.float32)
    evidence[:, :2] = scores_C[:, None]
    evidence[:, [COLUMNS.index(f"{side}_record") for side in SIDES]] = -1
    return evidence


def with_hits(judged: Judged, composition_C: FloatArray, record_N: Int32Array) -> FloatArray:
    """Return the evidence of contigs that were also judged by homology; *record_N*: the genome record of a protein."""
    evidence = without_hits(composition_C)
    evidence[:, 0] = judged.scores
    proteins = judged.hits.proteins
    records = np.where(proteins >= 0, record_N[proteins], -1)
    hits = np.stack([records, judged.hits.bits, judged.hits.identities], axis=2)
    evidence[judged.searched, 2:] = hits.reshape(len(hits), -1)
    return evidence


def read_evidence(rows: FloatArray, topologies: ByteArray, records: Sequence[str]) -> list[Evidence]:
    """Return the evidence of contigs from *rows*, float32 (C, columns), and *topologies*, uint8 (C,)."""
    found = []
    for row, number in zip(rows.astype(np.float64).tolist(), topologies.tolist(), strict=True):
        score, composition, *numbers = row
        viral, cellular = (
            Hit(records[int(record)], round(identity, _IDENTITY_DIGITS), round(bits, _BITS_DIGITS))
            if record >= 0
            else None
            for record, bits, identity in (numbers[:3], numbers[3:])
        )
        is_confident = max(composition, 1 - composition) >= CONFIDENT and (composition >= 0.5) == (score >= 0.5)
        kind = "" if np.isnan(score) else _KINDS[is_confident, bool(viral or cellular)]
        found.append(Evidence(kind, viral, cellular, str(Topology(number))))
    return found
