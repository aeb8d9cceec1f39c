"""What a call rests on: kept in files of rows, read back as kinds and hits, and told in one sentence."""

from __future__ import annotations

import numpy as np
import pytest

from virnucpro.calls.evidence import COLUMNS, Evidence, Hit, read_evidence, with_hits, without_hits
from virnucpro.calls.topology import Topology
from virnucpro.models.contigs.homology import Judged
from virnucpro.models.contigs.protein_search import Hits
from virnucpro.report.prediction.wording import evidence as sentence
from virnucpro.store.contig_table import UNSCORED

RECORDS = ("NC_1 a phage", "NC_2 a host")


def judged(scores, proteins, bits):
    """All contigs were searched; identities are a thousandth of the bits."""
    proteins, bits = np.array(proteins), np.array(bits, dtype=np.float64)
    hits = Hits(proteins, bits, bits - 40, bits / 1000)
    return Judged(np.array(scores, dtype=np.float32), np.ones(len(scores), dtype=bool), hits)


@pytest.mark.parametrize(
    ("composition", "score", "proteins", "kind"),
    [
        (0.95, 0.99, [2, -1], "both"),
        (0.95, 0.2, [-1, 1], "homology"),  # composition says the opposite
        (0.5, 0.99, [2, 1], "homology"),
        (0.95, 0.8, [-1, -1], "composition"),
        (0.05, 0.02, [-1, -1], "composition"),
        (0.05, 0.02, [-1, 1], "both"),
        (0.6, 0.6, [-1, -1], "none"),
        (np.nan, np.nan, [-1, -1], ""),
    ],
)
def test_evidence_is_of_what_agrees_with_the_score(composition, score, proteins, kind):
    bits = [[100.25 if one >= 0 else 0 for one in proteins]]
    rows = with_hits(judged([score], [proteins], bits), np.array([composition], np.float32), np.array([0, 1, 0]))
    (found,) = read_evidence(rows, np.array([1], dtype=np.uint8), RECORDS)
    viral, cellular = (
        None if one < 0 else Hit(RECORDS[[0, 1, 0][one]], pytest.approx(0.1), pytest.approx(100.2, abs=0.06))
        for one in proteins
    )
    assert found == Evidence(kind, viral, cellular, "direct terminal repeat")


def test_contigs_that_were_not_searched_have_no_hits():
    rows = without_hits(np.array([0.001, np.nan], dtype=np.float32))
    assert rows.shape == (2, len(COLUMNS))
    first, second = read_evidence(rows, np.array([0, 2], dtype=np.uint8), ())
    assert first == Evidence("composition", None, None, str(Topology.LINEAR))
    assert second == Evidence("", None, None, "inverted terminal repeat")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"evidence": "none"}, "By composition alone, which is ambiguous"),
        ({"evidence": "composition"}, "By composition alone"),
        (
            {"evidence": "both", "viral_hit": RECORDS[0], "viral_identity": 0.514, "viral_bits": 99.7},
            "Most like a viral protein of NC_1 a phage (51% identical, 100 bits); composition agrees",
        ),
        (
            {
                "evidence": "homology",
                "viral_hit": RECORDS[0],
                "viral_identity": 0.5,
                "viral_bits": 60.0,
                "cellular_hit": RECORDS[1],
                "cellular_identity": 0.9,
                "cellular_bits": 200.0,
            },
            (
                "Most like a cellular protein of NC_2 a host (90% identical, 200 bits), "
                "then a viral protein of NC_1 a phage (50% identical, 60 bits)"
            ),
        ),
        ({"evidence": "frames"}, ""),
        ({"evidence": ""}, ""),
    ],
)
def test_a_sentence_says_why(changes, expected):
    assert sentence(UNSCORED._replace(**changes)) == expected
