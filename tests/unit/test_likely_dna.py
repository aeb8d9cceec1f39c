"""DNA for a protein model is warned of; the other way round the reader refuses it."""

from __future__ import annotations

import pytest
import structlog

from tests.strategies import MadeRun
from virnucpro.choices import SequenceKind
from virnucpro.config import InputRules
from virnucpro.data.sequence_dataset import LEAST_NUCLEOTIDES, warn_of_dna
from virnucpro.data.sequence_index import SequenceIndex

PROTEIN = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ" * 2


@pytest.mark.parametrize(
    ("sequences", "warns"),
    [
        (["ACGTTGCAN" * 10, "ACGT" * 20], True),
        (["ACGTTGCAN" * 10, PROTEIN], False),
        (["ACGT" * 20, "ACGT"], False),
        (["A" * LEAST_NUCLEOTIDES], True),
        (["ACGU" * LEAST_NUCLEOTIDES], True),
    ],
)
def test_dna_for_a_protein_model_is_worth_a_warning_only_where_nothing_else_is_there(tmp_path, sequences, warns):
    run = MadeRun(tmp_path, [(f"s{number}", letters) for number, letters in enumerate(sequences)], token_budget=1000)
    with structlog.testing.capture_logs() as logs:
        warn_of_dna(run.index)
    assert [entry["event"] for entry in logs] == ["input.looks_like_dna"] * warns


def test_dna_for_a_dna_model_is_worth_no_warning(tmp_path):
    (tmp_path / "in.fasta").write_text(">a\n" + "ACGT" * 50 + "\n")
    rules = InputRules(sequence_kind=SequenceKind.DNA)
    index = SequenceIndex.build([tmp_path / "in.fasta"], tmp_path / "index", unpack_dir=tmp_path, rules=rules)
    with structlog.testing.capture_logs() as logs:
        warn_of_dna(index)
    assert logs == []
