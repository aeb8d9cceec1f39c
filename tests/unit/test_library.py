"""The library as users call it: types that mypy sees, sequences in memory, own worker functions, what is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from mypy import api as mypy

import virnucpro
from tests.conftest import REPOSITORY
from tests.unit.test_gpu_coordinator import cpu_coordinator
from tests.unit.test_gpu_coordinator import run as run_workers
from tools.settings_page import KEYWORDS, keywords
from virnucpro.errors import BadInputError, ConfigurationError
from virnucpro.pipeline.multi_gpu_inference import run_esm2_multi_gpu, run_multi_gpu_inference

MODEL = "virnucpro-tiny-protein"
PROTEINS = ["MKKIAFLAAGSLLALSAC", "MSLVKDPRVLAER"]


def test_the_types_of_keywords_are_those_of_the_settings():
    assert KEYWORDS.read_text() == keywords(), "python -m tools.settings_page"


def test_mypy_finds_a_typo_and_a_wrong_value_in_a_users_code(tmp_path, monkeypatch):
    user = tmp_path / "user.py"
    user.write_text(
        "import virnucpro\n"
        "calls = virnucpro.predict_fasta('a.fa', 'out', treshold=0.3)\n"
        "virnucpro.predict_fasta('a.fa', 'out', threshold=0.3, gaps='remove', formats=['json'])\n"
        "virnucpro.predict_fasta('a.fa', 'out', gaps='nothing')\n"
        "virnucpro.embed_fasta('a.fa', 'out', workers='two')\n"
        "reveal_type(calls[0].score)\n"
        "reveal_type(calls.to_polars())\n"
        "reveal_type(virnucpro.embed_sequences(['MK']))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MYPYPATH", str(REPOSITORY))
    found, problems, _ = mypy.run(["--strict", "--cache-dir", str(REPOSITORY / ".mypy_cache" / "user"), str(user)])
    errors = [line for line in found.splitlines() if "error:" in line]
    assert [line.split(":")[1] for line in errors] == ["2", "4", "5"], found + problems
    assert 'did you mean "threshold"' in errors[0]
    assert 'Revealed type is "float | None"' in found
    assert "polars.dataframe.frame.DataFrame" in found
    assert "numpy.ndarray" in found


def test_sequences_in_memory_have_the_rows_of_a_file(tmp_path):
    fasta = tmp_path / "two.fasta"
    fasta.write_text(f">a\n{PROTEINS[0]}\n>b\n{PROTEINS[1]}\n")
    rows = virnucpro.embed_sequences(PROTEINS, workers=1, model=MODEL)
    assert rows.dtype == np.float32
    with virnucpro.embed_fasta(fasta, tmp_path / "out", workers=1, model=MODEL) as from_file:
        assert np.array_equal(rows, from_file.to_numpy())
    named = virnucpro.embed_sequences({"any name": PROTEINS[1], "": PROTEINS[0]}, workers=1, model=MODEL)
    assert np.allclose(named, rows[::-1], atol=1e-5)


def test_rows_of_the_demonstration_encoder_come_with_a_warning():
    with pytest.warns(UserWarning, match="no model was named"):
        virnucpro.embed_sequences(PROTEINS, workers=1)


@pytest.mark.parametrize("bad", [["MK1"], [""], [], ["MK\n>x\nMM"]])
def test_sequences_in_memory_that_cannot_be_used_are_refused(bad):
    with pytest.raises(BadInputError, match=r"^sequences: ") as error:
        virnucpro.embed_sequences(bad, workers=1, model=MODEL)
    assert "/tmp" not in str(error.value)


def test_one_text_is_no_list_of_sequences():
    with pytest.raises(TypeError, match="not one text"):
        virnucpro.embed_sequences("MKK")


def script(tmp_path, text):
    """Run a script that has a worker function of its own."""
    path = tmp_path / "script.py"
    path.write_text(
        "from virnucpro.pipeline.gpu_coordinator import GPUProcessCoordinator\n"
        "def report(rank, world_size, results_queue):\n"
        "    results_queue.put({'rank': rank, 'status': 'complete'})\n"
        "def start():\n"
        "    with GPUProcessCoordinator(2, 'out') as coordinator:\n"
        "        coordinator.spawn_workers(report, ())\n"
        "        print(coordinator.wait_for_completion(), coordinator.outcomes[0].reason)\n" + text
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, path], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_worker_function_of_a_script_runs(tmp_path):
    done = script(tmp_path, "if __name__ == '__main__':\n    start()\n")
    assert done.stdout == "{0: True, 1: True} None\n", done.stderr


def test_a_run_that_is_not_under_the_guard_of_a_script_is_told_so(tmp_path):
    (tmp_path / "one.fasta").write_text(f">a\n{PROTEINS[0]}\n")
    done = script(
        tmp_path,
        "from virnucpro.models.configuration import configure_model\n"
        "from virnucpro.pipeline.multi_gpu_inference import run_multi_gpu_inference\n"
        "from virnucpro.settings import EmbeddingSettings\n"
        "config = configure_model(EmbeddingSettings(), device_type='cpu')\n"
        "run_multi_gpu_inference('one.fasta', 'run', config, 1, worker_fn=report)\n",
    )
    assert done.returncode == 1
    assert 'begin with if __name__ == "__main__":' in done.stderr


def test_a_script_that_starts_workers_as_it_is_imported_is_told_so(tmp_path):
    done = script(tmp_path, "start()\n")
    assert done.stdout.startswith("{0: False, 1: False} ")
    assert 'begin with if __name__ == "__main__":' in done.stdout


def put_a_tuple(rank, world_size, results_queue):
    results_queue.put((rank, "complete"))


def test_a_report_that_is_no_dict_fails_its_worker_with_a_sentence(tmp_path):
    coordinator = cpu_coordinator(1, tmp_path)
    completed, reports = run_workers(coordinator, put_a_tuple)
    assert completed == {0: False}
    assert "results_queue takes a dict" in coordinator.outcomes[0].reason
    assert "not a tuple" in reports[0]["error"]


def test_a_dict_is_no_model_configuration(tmp_path):
    with pytest.raises(ConfigurationError, match="model_config is a dict: make it with"):
        run_multi_gpu_inference(tmp_path / "a.fa", tmp_path / "out", {"model": "esm2"})


def test_esm2_names_its_model_and_leaves_standard_output_alone(tmp_path, capfd):
    fasta = tmp_path / "one.fasta"
    fasta.write_text(f">a\n{PROTEINS[0]}\n")
    with pytest.warns(UserWarning, match="virnucpro-tiny-protein, a demonstration encoder"):
        path = run_esm2_multi_gpu(fasta, tmp_path / "out", world_size=1)
    assert path.exists()
    assert capfd.readouterr().out == ""
