"""The benchmark of whole predictions: what it cuts, what it watches, and what follows from its figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import end_to_end_model
from benchmarks.cut_contigs import LONGEST_NT, SHORTEST_NT, write_contigs
from benchmarks.end_to_end_model import OURS, WorkerModel, further_mb, peers_over_ours, two_workers, worker_models
from benchmarks.watched_command import bytes_of, watch

ROOT = Path(__file__).parents[2]
BUSY = "import time; x = b'x' * 40_000_000\nwhile time.process_time() < 0.3: pass"
STARTS_ANOTHER = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}], check=True)"


def run(cpu_s, wall_s, *, workers_cpu_s=None):
    of_workers = {
        "workers_cpu_s": workers_cpu_s,
        "phases_parent_cpu_s": {"before": 0.5, "with": 0.1, "after": 0.5},
    }
    found = {
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "peak_mb": {"parent": 120, "workers": [125, 126] if workers_cpu_s else []},
        "folder_mb": {"end": 1.0, "peak": 2.0},
        "load": 1.5,
    }
    return found | (of_workers if workers_cpu_s else {})


def row(megabases, program, workers, *runs):
    name = f"{megabases} Mb"
    return {"input": name, "megabases": megabases, "program": program, "workers": workers, "runs": list(runs)}


REPORT = {
    "machine": {"cpu": "2 x A", "date": "2026-11-23T10:00:00", "python": "3.11"},
    "peers": {"genomad": "1.0"},
    "omp_num_threads": "1",
    "rows": [
        row(2, OURS, 1, run(2.0, 2.0), run(2.2, 2.4)),
        row(6, OURS, 1, run(6.0, 6.0), run(7.0, 7.4)),
        row(2, OURS, 2, run(4.0, 2.5, workers_cpu_s=3.0), run(4.0, 2.5, workers_cpu_s=3.0)),
        row(6, OURS, 2, run(8.0, 4.0, workers_cpu_s=7.0), run(8.0, 4.0, workers_cpu_s=7.0)),
        row(2, "geNomad", None, run(20.0, 20.0), run(22.0, 22.0)),
    ],
}


def test_a_further_mb_and_the_ratios_are_paired_by_round():
    first = further_mb(REPORT)[0]
    assert (first["program"], first["workers"], first["between"]) == (OURS, 1, "2 Mb to 6 Mb")
    assert first["cpu_s"] == {"median": 1.1, "least": 1.0, "greatest": 1.2}
    [peer] = peers_over_ours(REPORT)
    assert peer["cpu_s_over_ours"] == {"median": 10.0, "least": 10.0, "greatest": 10.0}
    gain = two_workers(REPORT)[-1]
    assert gain["wall_of_one_over_two"]["least"] == 1.5
    assert gain["workers_cpu_over_twice_wall"]["median"] == 0.88


def test_the_model_has_the_costs_that_the_runs_were_made_of():
    small, large = worker_models(REPORT)
    assert small["per_mb_s"] == pytest.approx(1.0)
    assert small["worker_start_s"] == pytest.approx(0.5)
    assert small["alone_s"] == large["alone_s"] == pytest.approx(1.0)
    assert large["wall_s_with_2"] == pytest.approx(1.0 + 0.5 + 3.0 + end_to_end_model.PART_MB)
    assert large["wall_of_one_over_two"] == pytest.approx(7.0 / 4.75, abs=0.01)
    assert large["measured_over_model_with_2"] == pytest.approx(4.0 / 4.75, abs=0.01)


def test_more_workers_take_less_time_of_which_one_core_works_alone_for_more():
    model = WorkerModel(20.0, 1.5, 0.6, 0.6)
    assert model.wall_s(16) < model.wall_s(2) < model.wall_s(1)
    assert model.share_alone(16) > model.share_alone(2)
    assert WorkerModel(200.0, 1.5, 0.6, 0.6).share_alone(16) < model.share_alone(16)


def test_the_page_has_each_row_once_and_where_it_was_measured():
    reports = [
        REPORT
        | {
            "cpu_s_of_a_further_mb": further_mb(REPORT),
            "peers_over_ours": peers_over_ours(REPORT),
            "two_workers": two_workers(REPORT),
            "model": worker_models(REPORT),
        }
    ] * 2
    text = end_to_end_model.page(reports)
    assert text.count("| 6 Mb | virnucpro, 2 workers | 8.0 | 4.0 | 120; 125 to 126 | 1.0; 2.0 |") == 1
    assert "geNomad over those of `predict` with one worker: 2 Mb: 10.0." in text
    assert "peers with one thread (`OMP_NUM_THREADS=1` for all)." in text
    assert "2 x A, load 2 to 2;" in text


def test_contigs_are_the_beginning_of_those_of_a_larger_input(tmp_path):
    genomes = ["ACGTTGCA" * 20_000, "AACC" * 300]
    assert write_contigs(tmp_path / "few.fa", genomes, 100_000)[1] >= 100_000
    contigs, letters = write_contigs(tmp_path / "many.fa", genomes, 400_000)
    many = (tmp_path / "many.fa").read_text()
    assert many.startswith((tmp_path / "few.fa").read_text())
    lengths = [len(line) for line in many.splitlines()[1::2]]
    assert (len(lengths), sum(lengths)) == (contigs, letters)
    assert all(SHORTEST_NT <= length <= LONGEST_NT for length in lengths)


def test_cpu_seconds_are_those_of_the_whole_tree_and_peaks_are_of_each_process(tmp_path):
    found = watch([sys.executable, "-c", STARTS_ANOTHER], tmp_path, tmp_path / "log.txt")
    assert found.cpu_s >= 0.3
    parent, child = found.processes.values()
    assert child.peak_bytes > 40_000_000 > parent.peak_bytes
    assert parent.cpu_s < 0.3
    assert not child.is_worker


def test_what_the_command_does_between_two_sets_of_workers_it_does_alone(tmp_path):
    script = tmp_path / "twice.py"
    script.write_text(
        "import multiprocessing, time\n"
        "def busy(seconds):\n"
        "    began_s = time.process_time()\n"
        "    while time.process_time() - began_s < seconds: pass\n"
        "if __name__ == '__main__':\n"
        "    for seconds in (0.8, 0.0):\n"
        "        worker = multiprocessing.get_context('spawn').Process(target=busy, args=(0.4,))\n"
        "        worker.start(), worker.join(), busy(seconds)\n"
    )
    found = watch([sys.executable, script], tmp_path, tmp_path / "log.txt").to_json()
    assert found["workers_cpu_s"] >= 0.6
    assert found["phases_parent_cpu_s"]["after"] >= 0.6 > 2 * found["phases_parent_cpu_s"]["with"]
    assert 0.6 <= found["phases_wall_s"]["with"] <= found["wall_s"] - 0.6


def test_a_command_that_fails_is_shown_and_raises(tmp_path, capsys):
    with pytest.raises(subprocess.CalledProcessError):
        watch([sys.executable, "-c", "raise SystemExit('no input')"], tmp_path, tmp_path / "log.txt")
    assert "no input" in capsys.readouterr().err


def test_bytes_of_a_folder_are_those_of_all_its_files(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "one").write_bytes(b"12")
    (tmp_path / "two").write_bytes(b"345")
    assert bytes_of(tmp_path) == 5


def test_without_the_genomes_nothing_is_measured_and_this_is_printed(tmp_path):
    done = subprocess.run(
        [sys.executable, "benchmarks/end_to_end.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "VIRNUCPRO_TEST_DATA": str(tmp_path)},
    )
    assert f"there are no genomes in {tmp_path}" in done.stdout
