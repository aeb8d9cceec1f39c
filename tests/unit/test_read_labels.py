"""Reads get the call of the contig that they map to best; the rules, what is refused, and real minimap2."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import os
import random
import subprocess
import sys

import pytest

from tests.command_line import run
from tests.debian_programs import program
from tests.made_prediction import Contig, make_prediction
from virnucpro.store.contig_table import read_contig_calls

CALLS = {"v1": "virus", "v2": "virus", "n1": "not virus", "u1": "undecided", "s1": "too short"}


@pytest.fixture
def out(tmp_path):
    """A finished prediction of contigs of 1,000 nt with these calls."""
    made = make_prediction(tmp_path / "out", [Contig(name, 1000) for name in CALLS])
    lines = made.layout.contigs.read_text().splitlines()
    head = lines[0].split("\t")
    rows = [dict(zip(head, line.split("\t"), strict=True)) for line in lines[1:]]
    table = [head, *([*(row | {"call": CALLS[row["contig"]]}).values()] for row in rows)]
    made.layout.contigs.write_text("".join("\t".join(row) + "\n" for row in table))
    return made.layout.output_dir


def hit(read, contig, matches, *, score=None, columns=100, length=100, nt=1000, tags="", span=None):
    tags += "" if score is None else f"\tAS:i:{score}"
    start, end = span or (0, length)
    return f"{read}\t{length}\t{start}\t{end}\t+\t{contig}\t{nt}\t0\t{length}\t{matches}\t{columns}\t60{tags}\n"


def unmapped(read, length=100):
    return f"{read}\t{length}\t0\t0\t*\t*\t0\t0\t0\t0\t0\t0\n"


def labelled(out, *lines):
    paf = out.parent / "reads.paf"
    paf.write_text("".join(lines))
    done = run("label-reads", out, "--paf", paf)
    assert done.code == 0, done.err
    return done, table(out / "reads" / "reads.tsv", "read"), table(out / "reads" / "reads_per_contig.tsv", "contig")


def table(path, key):
    with path.open() as file:
        return {row[key]: row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)}


@pytest.mark.parametrize(
    ("contigs", "call"),
    [
        (["v1"], "virus"),
        (["v1", "v2"], "virus"),
        (["v1", "u1"], "virus"),
        (["n1"], "not virus"),
        (["n1", "s1"], "not virus"),
        (["v1", "n1"], "ambiguous"),
        (["u1", "v1", "n1"], "ambiguous"),
        (["u1", "s1"], "undecided"),
    ],
)
def test_a_read_that_maps_equally_well_gets_the_call_that_its_contigs_allow(out, contigs, call):
    worse = hit("r", "n1" if call == "virus" else "v1", 60)
    _, reads, counts = labelled(out, *(hit("r", contig, 90) for contig in contigs), worse)
    assert (reads["r"]["call"], set(reads["r"]["contigs"].split(","))) == (call, set(contigs))
    kind = "reads" if len(contigs) == 1 else "shared_reads"
    assert {name for name, row in counts.items() if row[kind] == "1"} == set(contigs)


def test_scores_of_alignments_decide_where_all_have_one_else_matching_bases(out):
    better_score = [hit("a", "v1", 80, score=150), hit("a", "n1", 90, score=140)]
    one_without = [hit("b", "v1", 80, score=150), hit("b", "n1", 90)]
    _, reads, _ = labelled(out, *better_score, *one_without)
    assert (reads["a"]["call"], reads["a"]["score"]) == ("virus", "150")
    assert (reads["b"]["call"], reads["b"]["score"]) == ("not virus", "90")


def test_counts_are_of_reads_once_a_contig_and_of_aligned_bases(out):
    twice = [hit("a", "v1", 90), hit("a", "v1", 90)]
    done, reads, counts = labelled(
        out, *twice, hit("b/1", "v1", 45, columns=60), hit("b/2", "n1", 99), unmapped("c", 70)
    )
    assert [counts[name]["reads"] for name in CALLS] == ["2", "0", "1", "0", "0"]
    assert (counts["v1"]["bases"], counts["v1"]["shared_reads"], counts["v1"]["call"]) == ("200", "0", "virus")
    assert (reads["b/1"]["identity"], reads["b/1"]["covered"]) == ("0.7500", "1.0000")
    assert [reads[name]["call"] for name in ("b/1", "b/2", "c")] == ["virus", "not virus", "unmapped"]
    assert "4 reads, 370 bases" in done.out
    assert "--paf-no-hit" not in done.out


def test_what_a_paf_without_unmapped_reads_cannot_tell_is_said(out):
    done, reads, counts = labelled(out)
    assert (reads, {row["reads"] for row in counts.values()}) == ({}, {"0"})
    assert "reads that map to no contig are not in this PAF, and not counted" in done.out


@pytest.mark.parametrize(
    ("lines", "where", "words"),
    [
        ([hit("a", "v1", 9), hit("b", "v1", 9), hit("a", "n1", 9)], ":3: ", "not grouped by read: line 1 is of the"),
        ([hit("a", "v1", 9), hit("b", "other", 9)], ":2: ", "the contig is not in"),
        ([hit("a", "v1", 9, nt=999)], ":1: ", "the contig has 999 bases, and 1,000 in"),
        ([hit("a", "v1", 9), "a\t100\t0\n"], ":2: ", "no alignment of a PAF"),
        ([hit("a", "v1", 101)], ":1: ", "no alignment of a PAF"),
        ([hit("a", "v1", 9).replace("100", "many", 1)], ":1: ", "no alignment of a PAF"),
        (["@SQ\tSN:v1\tLN:1000\n"], ":1: ", "SAM, not PAF"),
        ([hit("a", "v1", 9).replace("100", "1_00")], ":1: ", "no alignment of a PAF"),
        ([hit("a", "v1", 9, length=10**30, columns=10**30)], ":1: ", "no alignment of a PAF"),
        ([hit("a", "v1", 9, length=2**31)], ":1: ", "no alignment of a PAF"),
        ([hit("a", "v1", 9, score="1_0")], ":1: ", "no alignment of a PAF"),
        ([hit("a", "v1", 9, score=10**30)], ":1: ", "no alignment of a PAF"),
        ([hit("a\rb", "v1", 9)], ":1: ", "read: CR line ends"),
        ([hit("a\r", "v1", 9)], ":1: ", "read: blank or line end in the name"),
        ([hit("a b", "v1", 9)], ":1: ", "read: blank or line end in the name"),
        ([hit("lat\xedn".encode("latin-1").decode("utf-8", "surrogateescape"), "v1", 9)], ":1: ", "id is not UTF-8"),
    ],
)
def test_a_paf_that_cannot_be_right_is_refused_by_line_and_leaves_no_table(out, lines, where, words):
    paf = out.parent / "bad.paf"
    paf.write_bytes("".join(lines).encode("utf-8", "surrogateescape"))
    done = run("label-reads", out, "--paf", paf)
    assert (done.code, f"{paf}{where}" in done.err) == (65, True), done.err
    assert words in done.err
    assert list((out / "reads").iterdir()) == []


@pytest.mark.parametrize(
    "lines",
    [
        [hit("m", "v1", 90, tags="\ttp:A:P"), hit("m", "n1", 90, tags="\ttp:A:P", span=(10, 100))],
        [hit("m", "v1", 90), hit("m", "n1", 90, length=99)],
        [hit("m", "v1", 90), unmapped("m")],
        [unmapped("m"), unmapped("m")],
    ],
)
def test_mates_that_share_a_name_are_refused_with_the_remedy(out, lines):
    paf = out.parent / "mates.paf"
    paf.write_text("".join([hit("other", "v1", 9), *lines]))
    done = run("label-reads", out, "--paf", paf)
    assert (done.code, f"{paf}:3: alignments of two reads with one name" in done.err) == (65, True), done.err
    assert "end the names of mates in /1 and /2" in done.err


def test_a_chimeric_read_with_two_primary_alignments_is_one_read(out):
    two = [("v1", (0, 60)), ("n1", (40, 100))]
    _, reads, _ = labelled(out, *(hit("r", contig, 50, tags="\ttp:A:P", span=span) for contig, span in two))
    assert reads["r"]["call"] == "ambiguous"


def test_a_paf_that_is_a_pipe_or_one_endless_line_is_refused_at_once(out, monkeypatch):
    monkeypatch.setattr("virnucpro.calls.read_labels._MOST_LINE_BYTES", 1 << 20)
    os.mkfifo(out.parent / "pipe")
    (out.parent / "long.paf.gz").write_bytes(gzip.compress(b"a" * (3 << 20)))
    for name, what in (("pipe", ": not a regular file"), ("long.paf.gz", ":1: a line of more than 1,048,576 bytes")):
        done = run("label-reads", out, "--paf", out.parent / name)
        assert (done.code, f"{out.parent / name}{what}" in done.err) == (65, True), done.err


def test_of_many_reads_one_that_comes_again_is_found(out, monkeypatch):
    monkeypatch.setattr("virnucpro.store.sorted_lines.SortedLines.__init__.__kwdefaults__", {"lines_in_memory": 100})
    monkeypatch.setattr("virnucpro.calls.read_labels._ROWS_AT_ONCE", 50)
    names = [f"read{number}" for number in range(1_000)]
    labelled(out, *(hit(name, "v1", 9) for name in names))
    paf = out.parent / "bad.paf"
    paf.write_text("".join(hit(name, "v1", 9) for name in [*names, "read7"]))
    done = run("label-reads", out, "--paf", paf)
    assert (done.code, f"{paf}:1001: not grouped by read: line 8 is" in done.err) == (65, True), done.err


def test_a_compressed_paf_and_standard_input_give_the_same_and_a_damaged_one_is_refused(out):
    lines = [hit(f"r{number}", "v1", 50 + number) for number in range(50)]
    labelled(out, *lines)
    expected = (out / "reads" / "reads.tsv").read_bytes()
    packed = gzip.compress("".join(lines).encode())
    for name, content in (("reads.paf.gz", packed), ("reads.paf", "".join(lines).encode())):
        (out.parent / name).write_bytes(content)
        assert run("label-reads", out, "--paf", out.parent / name, "--output", out.parent / name[6:], "-q").out == ""
        command = [sys.executable, "-m", "virnucpro", "label-reads", out, "--paf", "-", "-o", out.parent / "piped"]
        subprocess.run(command, input=content, check=True, timeout=60, capture_output=True)
        for folder in (name[6:], "piped"):
            assert (out.parent / folder / "reads.tsv").read_bytes() == expected
    for pack, name in ((gzip.compress, "cut.paf.gz"), (bz2.compress, "bad.paf.bz2"), (lzma.compress, "bad.paf.xz")):
        (out.parent / name).write_bytes(pack("".join(lines).encode())[:-20])
    for paf in ("cut.paf.gz", "bad.paf.bz2", "bad.paf.xz", "absent.paf"):
        done = run("label-reads", out, "--paf", out.parent / paf)
        assert (done.code, f"{out.parent / paf}: " in done.err) == (65, True), done.err


def test_a_prediction_that_is_not_finished_is_refused(out, tmp_path):
    from virnucpro.store.manifest import PredictionManifest

    manifest = PredictionManifest.read(out / "run.json")
    manifest.state = "stopped"
    manifest.write(out / "run.json")
    (tmp_path / "reads.paf").touch()
    done = run("label-reads", out, "--paf", tmp_path / "reads.paf")
    assert (done.code, "a prediction that is not finished (stopped)" in done.err) == (65, True), done.err
    assert run("label-reads", tmp_path, "--paf", tmp_path / "reads.paf").code == 65
    assert not (out / "reads").exists()


def test_a_table_of_viral_contigs_alone_is_refused_here_and_in_evaluate(out, tmp_path):
    from virnucpro.store.manifest import PredictionManifest

    manifest = PredictionManifest.read(out / "run.json")
    manifest.output_settings["only_viral"] = True
    manifest.write(out / "run.json")
    (tmp_path / "reads.paf").touch()
    (tmp_path / "truth.tsv").write_text("contig\tlabel\nv1\tvirus\nn1\tnot virus\n")
    for command in (
        ("label-reads", out, "--paf", tmp_path / "reads.paf"),
        ("evaluate", "--scores", out / "contigs.tsv", "--truth", tmp_path / "truth.tsv", "-o", tmp_path / "evaluated"),
    ):
        done = run(*command)
        assert (done.code, "holds the viral contigs alone" in done.err) == (65, True), done.err


def test_reads_mapped_by_minimap2_get_the_calls_of_the_contigs_they_were_cut_from(tmp_path, examples_dir):
    minimap2 = program("minimap2")
    contigs = examples_dir / "contigs.fasta"
    assert run("predict", contigs, "-o", tmp_path / "out", "--devices", "cpu", "--keep", "tables").code == 0
    calls = {one.contig: str(one.call) for one in read_contig_calls(tmp_path / "out" / "contigs.tsv")}
    sequences = {}
    for record in contigs.read_text().split(">")[1:]:
        head, *lines = record.splitlines()
        sequences[head.split()[0]] = "".join(lines)
    chance = random.Random(3)
    origin = {}
    command = [minimap2, "-x", "sr", "-c", "--secondary=yes", "--paf-no-hit", "-t", "1", contigs]
    with (tmp_path / "R1.fq").open("w") as first, (tmp_path / "R2.fq").open("w") as second:
        for number, (name, letters) in enumerate(list(sequences.items()) * 4 + [("", "")] * 10):
            start = chance.randrange(max(1, len(letters) - 290))
            piece = letters[start : start + 290] or "".join(chance.choices("ACGT", k=290))
            back = piece[::-1].translate(str.maketrans("ACGT", "TGCA"))
            for mate, file, read in ((1, first, piece[:150]), (2, second, back[:150])):
                origin[f"p{number}/{mate}"] = name
                file.write(f"@p{number}/{mate}\n{read}\n+\n{'I' * len(read)}\n")
    paf = subprocess.run([*command, tmp_path / "R1.fq", tmp_path / "R2.fq"], capture_output=True, check=True).stdout
    (tmp_path / "reads.paf").write_bytes(paf)
    done = run("label-reads", tmp_path / "out", "--paf", tmp_path / "reads.paf", "--json")
    assert done.code == 0, done.err
    reads = table(tmp_path / "out" / "reads" / "reads.tsv", "read")
    assert set(reads) == set(origin)
    for read, contig in origin.items():
        assert reads[read]["call"] == (calls[contig] if contig else "unmapped"), read
        assert reads[read]["contigs"] == contig
    counted = json.loads(done.out)
    assert (sum(counted["reads"].values()), counted["mates"]) == (len(origin), len(origin))
    per_contig = table(tmp_path / "out" / "reads" / "reads_per_contig.tsv", "contig")
    assert {name: int(row["reads"]) for name, row in per_contig.items()} == dict.fromkeys(sequences, 8)
    for mate in "12":
        shared = (tmp_path / f"R{mate}.fq").read_text().replace(f"/{mate}\n", f" {mate}:N:0:ACGT\n")
        (tmp_path / f"S{mate}.fq").write_text(shared)
    paf = subprocess.run([*command, tmp_path / "S1.fq", tmp_path / "S2.fq"], capture_output=True, check=True).stdout
    (tmp_path / "shared.paf").write_bytes(paf)
    done = run("label-reads", tmp_path / "out", "--paf", tmp_path / "shared.paf")
    assert (done.code, "end the names of mates in /1 and /2" in done.err) == (65, True), done.err
    for mate in "12":
        renamed = ["awk", f'NR%4==1 {{$1=$1"/{mate}"}} 1', tmp_path / f"S{mate}.fq"]
        (tmp_path / f"N{mate}.fq").write_bytes(subprocess.run(renamed, capture_output=True, check=True).stdout)
    assert (
        run("predict", tmp_path / "S1.fq", tmp_path / "S2.fq", "-o", tmp_path / "by_read", "--devices", "cpu").code == 0
    )
    paf = subprocess.run([*command, tmp_path / "N1.fq", tmp_path / "N2.fq"], capture_output=True, check=True).stdout
    (tmp_path / "named.paf").write_bytes(paf)
    assert run("label-reads", tmp_path / "out", "--paf", tmp_path / "named.paf", "-o", tmp_path / "named").code == 0
    predicted = {one.contig for one in read_contig_calls(tmp_path / "by_read" / "contigs.tsv")}
    assert set(table(tmp_path / "named" / "reads.tsv", "read")) == predicted == set(origin)
