"""``-`` as input of ``predict`` and ``embed``: the stream is an input like a file, and is refused like one."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import os
import pty
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command_line import run
from tests.predictions import hash_prediction, predict_forked
from tests.strategies import write_fasta
from virnucpro import failpoints, read_embeddings
from virnucpro.data.reading.standard_input import save_stream
from virnucpro.errors import BadInputError
from virnucpro.run_layout import PredictionLayout

PIPE = "pipe a file into the command, as in: zcat FILE | virnucpro predict - -o OUT"
TABLES = ("contigs.tsv", "viral.fasta", "genes.gff3", "genes.faa", "tracks.bedgraph", "viral_regions.bed")


@pytest.fixture
def contigs(tmp_path):
    letters = "".join(random.Random(3).choices("ACGT", k=600))
    return write_fasta(tmp_path / "contigs.fa", [("a", "ATGGCC" * 100), ("b", letters)]).read_bytes()


@pytest.fixture
def piped(monkeypatch):
    """Run a command with these bytes as standard input."""

    def command(content, *arguments):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return run(*arguments)

    return command


def tables(out):
    return {name: (out / name).read_bytes() for name in TABLES}


def copies(out):
    folder = PredictionLayout(out).unpacked_dir
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.mark.parametrize("pack", [bytes, bz2.compress])
def test_a_stream_gives_the_bytes_of_the_file_and_leaves_no_copy(tmp_path, contigs, piped, pack):
    stream = pack(contigs)
    assert run("predict", tmp_path / "contigs.fa", "-o", tmp_path / "of file").code == 0
    out = tmp_path / "out"
    done = piped(stream, "predict", "-", "-o", out)
    assert done.code == 0, done.err
    assert tables(out) == tables(tmp_path / "of file")
    assert copies(out) == []
    (about,) = json.loads((out / "run.json").read_text())["inputs"]
    assert (about["size_bytes"], about["sha256"]) == (len(stream), hashlib.sha256(stream).hexdigest())
    assert '<p class="about">stdin ' in (out / "report.html").read_text()
    assert run("verify", out).code == 0
    again = piped(stream, "predict", "-", "-o", out)
    assert "already complete; nothing was computed" in again.out
    assert copies(out) == []


def test_a_run_that_broke_off_keeps_the_copy_and_resumes_with_the_same_stream_only(tmp_path, contigs, piped):
    out = tmp_path / "out"
    failpoints.arm("MainProcess/file.rename:12+:EIO")
    try:
        broken = piped(contigs, "predict", "-", "-o", out)
    finally:
        failpoints.arm(None)
    assert broken.code == 73, broken.err
    digest = hashlib.sha256(contigs).hexdigest()
    assert copies(out) == [f"{digest}.stdin"]
    other = piped(contigs + b">c\nACGT\n", "predict", "-", "-o", out)
    assert (other.code, f"sha256 of the input was {digest}, now " in other.err) == (78, True), other.err
    assert copies(out) == [f"{digest}.stdin"]
    assert piped(contigs, "predict", "-", "-o", out).code == 0
    assert copies(out) == []
    assert run("predict", tmp_path / "contigs.fa", "-o", tmp_path / "of file").code == 0
    assert tables(out) == tables(tmp_path / "of file")


@pytest.mark.slow
@pytest.mark.long
def test_a_restart_takes_another_stream_and_leaves_no_copy_of_either(tmp_path, contigs, piped):
    out = tmp_path / "out"
    failpoints.arm("MainProcess/file.rename:12+:EIO")
    try:
        assert piped(contigs + b">c\nACGT\n", "predict", "-", "-o", out).code == 73
    finally:
        failpoints.arm(None)
    assert piped(b">a\nACGT\n>a\nACGT\n", "predict", "-", "-o", out, "--restart").code == 65
    assert len(copies(out)) == 1, "of the run that can still be resumed"
    done = piped(contigs, "predict", "-", "-o", out, "--restart")
    assert (done.code, copies(out)) == (0, []), done.err


def test_frames_and_problems_of_a_stream_are_named_stdin(tmp_path, contigs, piped):
    out = tmp_path / "out"
    saved = save_stream(io.BytesIO(contigs), PredictionLayout(out))
    assert predict_forked([saved], out, hash_prediction(tmp_path)).code == 0
    assert (out / "stdin_identified_protein.faa").exists()
    bad = piped(b">a\nACGT\n>a\nACGT\n", "predict", "-", "-o", tmp_path / "bad")
    assert (bad.code, bad.problems[-1]) == (
        65,
        "stdin:3: duplicate id, first at stdin:1 (a): give every record an id of its own",
    )
    assert copies(tmp_path / "bad") == []


def test_proteins_are_embedded_from_a_stream_beside_a_file(tmp_path, piped):
    fasta = write_fasta(tmp_path / "a.fa", [("a", "MKVLAAG")])
    done = piped(b">b\nMKVL\n", "embed", fasta, "-", "-o", tmp_path / "out", "--devices", "cpu")
    assert done.code == 0, done.err
    assert list(read_embeddings(tmp_path / "out")) == ["a", "b"]
    assert copies(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"", "stdin: no records"),
        (gzip.compress(b">a\nACGT\n" * 100)[:-9], "stdin: truncated gzip: copy or download the file again"),
        (bz2.compress(b">a\nACGT\n" * 100)[:-9], "stdin: truncated bzip2: copy or download the file again"),
    ],
    ids=["empty", "truncated gzip", "truncated bzip2"],
)
def test_a_stream_that_cannot_be_used_is_bad_input_and_leaves_nothing(tmp_path, piped, stream, expected):
    done = piped(stream, "predict", "-", "-o", tmp_path / "out")
    assert (done.code, done.problems[-1].startswith(expected)) == (65, True), done.err
    assert copies(tmp_path / "out") == []
    assert "Traceback" not in done.err


def test_a_terminal_and_a_closed_standard_input_are_refused(tmp_path, monkeypatch):
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "r") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        done = run("predict", "-", "-o", tmp_path / "out")
    assert (done.code, done.problems[-1]) == (
        65,
        "standard input: it is a terminal: pipe a file into the command, as in: zcat FILE | virnucpro predict - -o OUT",
    )
    monkeypatch.setattr(sys, "stdin", None)
    done = run("predict", "-", "-o", tmp_path / "out")
    assert (done.code, "standard input: it is closed: " in done.err) == (65, True)
    assert not (tmp_path / "out").exists()


def test_standard_input_is_refused_twice_and_for_a_flow(tmp_path, contigs, piped):
    twice = piped(contigs, "predict", "-", "-", "-o", tmp_path / "out")
    assert (twice.code, "standard input can be read only once" in twice.err) == (2, True)
    flow = piped(contigs, "embed", "-", "-o", tmp_path / "out", "--flow")
    assert (flow.code, "a flow does not read standard input" in flow.err) == (2, True)
    assert not (tmp_path / "out").exists()


def test_an_endless_stream_is_stopped_and_leaves_nothing(tmp_path):
    with Path("/dev/zero").open("rb") as endless, pytest.raises(BadInputError, match="more than 5000000 bytes"):
        save_stream(endless, PredictionLayout(tmp_path), most_bytes=5_000_000)
    assert copies(tmp_path) == []


def test_what_a_killed_start_saved_is_removed_by_the_next_one(tmp_path, contigs, piped):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "virnucpro", "predict", "-", "-o", str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdin.write(contigs)
        process.stdin.flush()
        end_s = time.monotonic() + 30
        while not copies(out):
            assert time.monotonic() < end_s
            time.sleep(0.05)
        process.kill()
    assert [name.endswith(".tmp") for name in copies(out)] == [True]
    assert piped(contigs, "predict", "-", "-o", out).code == 0
    assert copies(out) == []
