"""
What is in a FASTA header or in a path cannot pass for something that the program says.

A real run whose input has an id of every kind: those that are refused are left out and listed, those that are allowed
are computed, and the model fails on each, so that logs and lists must name it.
"""

from __future__ import annotations

import json

import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes import faulty_config, hash_vector
from tests.faults.forked import run_forked
from tests.log_queries import queries, shown
from tests.snapshots import rank_snapshot, run_snapshot, work_snapshot
from virnucpro.cli import _log_to_standard_error
from virnucpro.errors import printable
from virnucpro.pipeline.run.run_result import RunResult
from virnucpro.store.reader import read_embeddings
from virnucpro.telemetry.failure_report import failure_report
from virnucpro.telemetry.metrics.table import RunCollector
from virnucpro.telemetry.ranks import Rank

FORGED_LINE = '{"event":"shard.sealed","level":"info","timestamp":"2026-11-21T18:00:00Z","rank":0}'
FORGED_ROW = "another_id\tnot_finite\t1"
HIDDEN = {
    "CR": "\r",
    "VT": "\x0b",
    "FF": "\x0c",
    "NEL": "\x85",
    "LS": "\u2028",
    "PS": "\u2029",
    "ESC": "\x1b[2J\x1b]0;owned\x07\x1b[31m",
    "CSI": "\x9b31m",
    "BIDI": "\u202e",
    "NUL": "\0",
}
ALLOWED = [
    'quote"}' + FORGED_LINE,
    "'single'",
    "back`tick`",
    "pipe|another|row|",
    r"back\slash\n\x1b[2J",
    "equals=1=level=error",
    "</script><b>$(rm)#{x}",
    "[link](javascript:alert(1))",
    "Ünïcödé_Ω_𓂀",
    "x" * 1000,
]


def letters(number):
    """A sequence of its own for each number."""
    return "MK" + "".join("ACDEFGHIKL"[int(digit)] for digit in f"{number:06d}")


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    """The folder of a run over ids of every kind, and the ids that are missing in its result."""
    folder = tmp_path_factory.mktemp("forgery")
    refused = [f"before{hidden}{FORGED_LINE.replace(' ', '')}" for hidden in HIDDEN.values()]
    refused += [f"a{hidden}{FORGED_ROW.partition(chr(9))[0]}" for hidden in HIDDEN.values()]
    records = []
    for number, name in enumerate(ALLOWED):  # some between them succeed, or the process would be taken for broken
        records += [(f"plain_{number}_{again}", letters(100 * number + again)) for again in range(3)]
        records.append((name, letters(1000 + number)))
    records += [(name, letters(2000 + number)) for number, name in enumerate(refused)]
    fasta = folder / "in.fasta"
    fasta.write_bytes(b"".join(f">{name}\n{sequence}\n".encode() for name, sequence in records))
    poison = {letters(1000 + number): "raise" for number in range(len(ALLOWED))}
    control = folder / "mo\ndel\x1b[31m | `x`.json"
    config = faulty_config(
        control, {"rank": 9, "how": "none", "poison": poison}, on_bad_record="skip", model_name=control.name
    )
    out = folder / "out"
    ended = run_forked(fasta, out, config)
    assert ended.code == 3, ended.errors
    return out, refused


def test_the_rows_that_can_be_had_are_there(hostile_run):
    with read_embeddings(hostile_run[0] / "embeddings.partial.h5") as rows:
        assert list(rows) == [f"plain_{number}_{again}" for number in range(len(ALLOWED)) for again in range(3)]
        assert (rows["plain_3_1"] == hash_vector(letters(301))).all()


def test_the_list_of_what_is_missing_has_one_row_a_record(hostile_run):
    out, refused = hostile_run
    text = (out / "failed_sequences.tsv").read_text(encoding="utf-8")
    header, *rows = text.removesuffix("\n").split("\n")
    assert text.splitlines() == [header, *rows]
    assert all(line.count("\t") == 2 and line.replace("\t", "").isprintable() for line in (header, *rows))
    names = [row.split("\t")[0] for row in rows]
    assert sorted(names[: len(refused)]) == sorted(printable(name) for name in refused)
    assert sorted(names[len(refused) :]) == sorted(ALLOWED)


def test_the_log_has_one_json_object_a_line(hostile_run):
    raw = (hostile_run[0] / "logs" / "worker_0.log").read_bytes()
    assert raw.isascii()
    assert not set(raw) & {*range(10), *range(11, 32), 127}
    lines = [json.loads(line) for line in raw.splitlines()]
    assert all(line["run_id"] and line["rank"] == 0 for line in lines)
    assert sorted(line["sequence_id"] for line in lines if line["event"] == "sequence.failed") == sorted(ALLOWED)


def test_what_jq_shows_of_the_log_has_no_line_that_was_not_logged(hostile_run):
    out, _ = hostile_run
    logged = (out / "logs" / "worker_0.log").read_bytes().splitlines()
    warnings, by_time = map(shown, queries(out)[:2])
    assert all(line.isascii() and line.isprintable() for line in (*warnings, *by_time))
    assert len(by_time) == len(logged)
    rank_level_event = [tuple(json.loads(line)[1:]) for line in by_time]
    assert {(rank, level) for rank, level, _ in rank_level_event} <= {(0, "info"), (0, "warning"), (0, "error")}
    assert sum(event == "sequence.failed" for *_, event in rank_level_event) == len(ALLOWED)
    assert sum(event == "shard.sealed" for *_, event in rank_level_event) == 1
    named = [json.loads(line)[3] for line in warnings if json.loads(line)[2] == "sequence.failed"]
    assert named == ["RuntimeError: a fault that the test asked for"] * len(ALLOWED)


def test_the_report_of_a_failure_has_no_line_of_theirs(hostile_run):
    out, _ = hostile_run
    hostile = "\n".join((FORGED_LINE, *HIDDEN.values()))
    rank = rank_snapshot(device="cpu")
    log_path = out / "logs" / "worker_0.log"
    run_id = json.loads(log_path.read_bytes().splitlines()[0])["run_id"]
    end = {"failure": "died", "reason": hostile, "exit_code": 70, "starts_again": False}
    report = failure_report(rank, log_path=log_path, run_id=run_id, **end)
    lines = report.split("\n")
    assert report.splitlines() == lines
    assert all(line.isprintable() for line in lines)
    assert len(lines) == 4 + 10
    assert all(line.startswith("  ") for line in lines[1:])


def test_a_model_of_any_name_makes_the_same_lines_of_metrics(hostile_run):
    def lines_of(model):
        embedding = work_snapshot(rank_snapshot(), model=model)
        registry = CollectorRegistry()
        registry.register(RunCollector(lambda: run_snapshot(rank_snapshot(), embeddings=(embedding,), stages=())))
        return generate_latest(registry).decode()

    hostile = 'm"} 1\nvirnucpro_sequences_total{rank="0",device="cpu",model="m"} 99\n' + "".join(HIDDEN.values())
    plain, forged = lines_of("m"), lines_of(hostile)
    assert len(forged.split("\n")) == len(plain.split("\n"))
    assert [line.split("{")[0] for line in forged.split("\n")] == [line.split("{")[0] for line in plain.split("\n")]
    labels = {
        sample.labels["model"]
        for family in text_string_to_metric_families(forged)
        for sample in family.samples
        if "model" in sample.labels
    }
    assert labels == {hostile}


def test_a_page_and_a_table_of_prefect_have_no_row_of_theirs(hostile_run):
    pytest.importorskip("prefect")
    from flows.run.artifacts import embedding_markdown

    hostile = "\n| 9 | cuda:9 | 1 |\n# Embedding: complete\n" + "|".join(HIDDEN.values()) + "`<b>[x](javascript:1)"
    outcome = Rank(rank=0, device="cpu", state="failed", failure="died", reason=hostile, cache_problem=hostile)

    def page(folder, outcomes, device):
        result = RunResult(
            output_dir=folder,
            output_path=folder / "embeddings.h5",
            state="complete",
            num_records=2,
            num_rows=2,
            num_copies=0,
            num_truncated=0,
            num_resplit_blocks=0,
            num_cached_blocks=0,
            ranks=outcomes,
            stages_s={},
            noticed={},
        )
        rows = [{"rank": 0, "device": device, "tokens": 1, "seconds": 1.0}]
        return embedding_markdown(result, rows)

    plain = page(hostile_run[0], (Rank(rank=0, device="cpu", state="failed", reason="r", cache_problem="c"),), "cpu")
    forged = page(hostile_run[0] / hostile.replace("/", ""), (outcome,), hostile)
    assert len(forged.splitlines()) == len(plain.splitlines())
    bare = [line.replace(r"\|", "") for line in forged.splitlines()]
    assert [line.count("|") for line in bare] == [line.count("|") for line in plain.splitlines()]
    assert all(line.isprintable() for line in forged.splitlines())
    assert "`" not in forged.replace(r"\`", "")


def test_what_the_command_warns_of_is_one_line_of_text(capsys):
    hostile = "/data/" + "".join(HIDDEN.values()) + "\n2026-11-21 18:00:00 [warning  ] rank.failed rank=0"
    _log_to_standard_error()
    structlog.get_logger().warning("part.rejected", part=hostile, reason="\x1b[2J")
    structlog.reset_defaults()
    (line,) = capsys.readouterr().err.removesuffix("\n").split("\n")
    assert line.isprintable()
    assert r"\x1b[2J" in line
