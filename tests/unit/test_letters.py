"""DNA and proteins are told apart before any work is done."""

from __future__ import annotations

import pytest
import structlog

from tests.strategies import MadeRun
from virnucpro.config import SequenceKind
from virnucpro.data.letters import LEAST_NUCLEOTIDES, check_letters
from virnucpro.errors import BadInputError

DNA = "ACGTNRYKMSWBDHV" * 5
PROTEIN = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ" * 2


def _index(tmp_path, *sequences):
    tmp_path.mkdir(exist_ok=True)
    return MadeRun(
        tmp_path, [(f"s{number}", letters) for number, letters in enumerate(sequences)], token_budget=200
    ).index


def test_proteins_for_a_dna_model_are_refused_by_file_line_and_name(tmp_path):
    index = _index(tmp_path, DNA, DNA[:50], PROTEIN)
    with pytest.raises(BadInputError) as caught:
        check_letters(index, SequenceKind.DNA)
    (problem,) = caught.value.problems
    assert (problem.sequence_id, problem.line) == ("s2", 5)
    assert "letter 6 is 'I'" in problem.what


def test_dna_with_all_its_letters_is_taken(tmp_path):
    with structlog.testing.capture_logs() as logs:
        check_letters(_index(tmp_path, DNA), SequenceKind.DNA)
        check_letters(_index(tmp_path / "b", PROTEIN), SequenceKind.PROTEIN)
    assert logs == []


def test_rna_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(BadInputError, match="T for U"):
        check_letters(_index(tmp_path, "ACGU" * 20), SequenceKind.DNA)


@pytest.mark.parametrize(
    ("sequences", "warns"),
    [
        (["ACGTTGCAN" * 10, "ACGT" * 20], True),
        (["ACGTTGCAN" * 10, PROTEIN], False),
        (["ACGT" * 20, "ACGT"], False),
        (["A" * LEAST_NUCLEOTIDES], True),
    ],
)
def test_dna_for_a_protein_model_is_worth_a_warning_only_where_nothing_else_is_there(tmp_path, sequences, warns):
    with structlog.testing.capture_logs() as logs:
        check_letters(_index(tmp_path, *sequences), SequenceKind.PROTEIN)
    assert [entry["event"] for entry in logs] == ["input.looks_like_dna"] * warns
