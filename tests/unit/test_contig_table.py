"""``contigs.tsv`` as it is written and read back."""

from __future__ import annotations

import pytest

from virnucpro.errors import ResultError
from virnucpro.store import contig_table
from virnucpro.store.contig_table import SHORT_COLUMNS, UNSCORED, Call, ContigCall, ContigTable, read_contig_calls

ROWS = 2500
CALLS = list(Call)


def call_of(number):
    of_frames = None if number % 3 else number
    return ContigCall(
        contig=f"c{number}",
        length=None if number % 7 == 0 else 300 + number,
        chunks=number % 5,
        embedded=number % 3 == 0,
        open_chunks=of_frames,
        viral_chunks=of_frames,
        frames=of_frames,
        viral_frames=of_frames,
        frame_support=None if of_frames is None else 0.125,
        score=None if number % 11 == 0 else number / ROWS,
        posterior=1e-9 * number,
        fdr=0.05,
        max_score=None,
        call=CALLS[number % len(CALLS)],
        reason="" if number % 2 else 'quotes "here"',
        evidence="homology" if number % 4 else "",
        viral_hit=f"NC_{number} a phage" if number % 4 else "",
        viral_identity=0.5 if number % 4 else None,
        viral_bits=120.5 if number % 4 else None,
        cellular_hit="",
        cellular_identity=None,
        cellular_bits=None,
        topology="linear",
        fingerprint="abc",
    )


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "contigs.tsv"
    with ContigTable(path) as written:
        written.write([call_of(number) for number in range(1000)])
        written.write([call_of(number) for number in range(1000, ROWS)])
    return path


def test_what_is_read_is_what_was_written(table):
    assert list(read_contig_calls(table)) == [call_of(number) for number in range(ROWS)]


def test_a_table_without_frames_lacks_their_columns_and_reads_back_without_them(tmp_path):
    path = tmp_path / "contigs.tsv"
    with ContigTable(path, SHORT_COLUMNS) as written:
        written.write([call_of(number) for number in range(ROWS)])
    assert path.read_text().splitlines()[0].split("\t")[-3:] == ["posterior", "fdr", "topology"]
    width = len(SHORT_COLUMNS)
    assert list(read_contig_calls(path)) == [
        ContigCall(*call_of(number)[:width], *UNSCORED[width:]) for number in range(ROWS)
    ]


def test_an_empty_table_has_no_contigs(tmp_path):
    path = tmp_path / "contigs.tsv"
    with ContigTable(path):
        pass
    assert list(read_contig_calls(path)) == []
    path.write_text("contig\tlength\n")
    with pytest.raises(ResultError, match="not a table of contigs of this version"):
        list(read_contig_calls(path))


@pytest.mark.parametrize("number", [1, contig_table._ROWS_AT_ONCE, ROWS])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda line: line + "\tmore",
        lambda line: line.rpartition("\t")[0],
        lambda line: line.replace("\tno\t", "\tperhaps\t").replace("\tyes\t", "\tperhaps\t"),
        lambda line: line.replace("\t0.05\t", "\t0.05x\t"),
    ],
    ids=["a column more", "a column less", "no yes or no", "no number"],
)
def test_a_line_that_is_no_contig_is_named(table, number, spoil):
    lines = table.read_text().splitlines()
    lines[number] = spoil(lines[number])
    table.write_text("\n".join(lines) + "\n")
    with pytest.raises(ResultError, match=rf"line {number + 1} is not a contig"):
        list(read_contig_calls(table))


def test_lines_that_all_have_a_column_more_are_none(table):
    head, *lines = table.read_text().splitlines()
    table.write_text("\n".join([head, *(f"{line}\tmore" for line in lines)]) + "\n")
    with pytest.raises(ResultError, match="line 2 is not a contig"):
        list(read_contig_calls(table))
