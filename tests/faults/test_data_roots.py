"""
A file that is replaced by a link after its path was checked is not read from outside the allowed folders.

What the link leads to has the very content that was indexed, so that nothing but its place can be wrong with it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import psutil
import pytest

from tests.fakes import hash_config
from tests.faults.test_input_changes import FIRST, embed
from virnucpro.allowed_roots import DATA_ROOTS, MODEL_ROOTS
from virnucpro.config import RunLimits
from virnucpro.data.reading.input_files import holds_reads
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import PathNotAllowedError
from virnucpro.models.classifier_files.card import read_card
from virnucpro.models.registry import BUNDLED_WEIGHTS_DIR, resolve_model
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.gpu_coordinator import GPUProcessCoordinator
from virnucpro.pipeline.gpu_worker import gpu_worker
from virnucpro.run_layout import RunLayout
from virnucpro.training.genomes.records import read_text


def swap_file(path):
    path.unlink()
    path.symlink_to(path.parents[2] / "elsewhere" / path.name)


def swap_folder(path):
    path.parent.rename(path.parent.with_name("before"))
    path.parent.symlink_to(path.parents[2] / "elsewhere")


SWAPS = [swap_file, swap_folder]


@pytest.fixture
def fasta(tmp_path, monkeypatch):
    """An input below the allowed folder, with a twin outside."""
    for folder in ("data/sample", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "in.fasta").write_bytes(FIRST)
    monkeypatch.setenv(DATA_ROOTS, str(tmp_path / "data"))
    return tmp_path / "data" / "sample" / "in.fasta"


def workers(tmp_path, fasta, config, attempts=1):
    layout = RunLayout(tmp_path / "data" / "out")
    limits = RunLimits(attempts=attempts, stop_grace_s=5.0)
    with GPUProcessCoordinator(1, layout.output_dir, devices=[CPU], limits=limits) as coordinator:
        coordinator.spawn_workers(gpu_worker, (str(layout.index), str(layout.output_dir), config))
        coordinator.wait_for_completion(120)
        return coordinator.outcomes[0]


def indexed(tmp_path, fasta):
    layout = RunLayout(tmp_path / "data" / "out")
    return SequenceIndex.build([fasta], layout.index, unpack_dir=layout.unpacked_dir)


@pytest.mark.parametrize("swap", SWAPS)
def test_what_was_swapped_before_the_index_is_made_is_refused(tmp_path, fasta, swap):
    swap(fasta)
    for read in (lambda: embed([fasta], tmp_path / "data"), lambda: holds_reads(fasta), lambda: read_text(fasta)):
        with pytest.raises(PathNotAllowedError, match=rf"in\.fasta is not under .*{DATA_ROOTS}") as caught:
            read()
        assert caught.value.exit_code == 78


@pytest.mark.parametrize("swap", SWAPS)
def test_what_was_swapped_after_the_index_was_made_is_not_read_by_this_process(tmp_path, fasta, swap):
    index = indexed(tmp_path, fasta)
    swap(fasta)
    with pytest.raises(PathNotAllowedError):
        index.read(0)


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("is_another_host", [False, True])
def test_nor_by_a_worker_here_or_on_a_host_whose_operator_set_nothing(
    tmp_path, fasta, swap, is_another_host, monkeypatch
):
    indexed(tmp_path, fasta)
    config = hash_config()
    swap(fasta)
    if is_another_host:
        monkeypatch.delenv(DATA_ROOTS)
    outcome = workers(tmp_path, fasta, config)
    assert outcome.failure == "configuration", outcome
    assert (
        f"in.fasta is not under a folder that the worker allows ({DATA_ROOTS}: {tmp_path / 'data'})" in outcome.reason
    )
    assert list((tmp_path / "data" / "out").glob("*.h5")) == []
    monkeypatch.delenv(DATA_ROOTS, raising=False)
    assert workers(tmp_path, fasta, replace(config, data_roots=None)).state == "complete", "its place alone is wrong"


@pytest.mark.parametrize("swap", SWAPS)
def test_nor_by_the_process_that_follows_one_that_was_killed(tmp_path, fasta, swap, monkeypatch):
    indexed(tmp_path, fasta)
    reached = tmp_path / "reached"
    monkeypatch.setenv("VIRNUCPRO_FAILPOINT", f"gpu_worker_0/file.write:1:hang:{reached}")

    def swap_and_kill():
        deadline_s = time.monotonic() + 100
        while not reached.exists() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        swap(fasta)
        for child in psutil.Process().children():
            if "spawn_main" in " ".join(child.cmdline()):
                child.kill()

    killer = threading.Thread(target=swap_and_kill)
    killer.start()
    outcome = workers(tmp_path, fasta, hash_config(), attempts=3)
    killer.join()
    assert reached.exists()
    assert outcome.failure == "configuration", outcome
    assert DATA_ROOTS in outcome.reason
    assert list((tmp_path / "data" / "out").glob("*.h5")) == []


def test_an_output_folder_that_became_a_link_is_refused_before_anything_is_written(tmp_path, fasta):
    (tmp_path / "data" / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PathNotAllowedError):
        embed([fasta], tmp_path / "data")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["in.fasta"]


def test_links_within_the_folders_are_followed(tmp_path, fasta):
    (tmp_path / "data" / "link").symlink_to(fasta.parent)
    embed([tmp_path / "data" / "link" / fasta.name], tmp_path / "data")
    assert (tmp_path / "data" / "out" / "embeddings.h5").exists()


def test_a_model_or_classifier_that_became_a_link_is_refused(tmp_path, fasta, monkeypatch):
    monkeypatch.setenv(MODEL_ROOTS, str(tmp_path / "data"))
    folder = tmp_path / "data" / "models"
    folder.mkdir()
    (folder / "m.safetensors").symlink_to(tmp_path / "elsewhere" / "in.fasta")
    (folder / "card.json").symlink_to(BUNDLED_WEIGHTS_DIR / "virnucpro-tiny" / "card.json")
    with pytest.raises(PathNotAllowedError, match=MODEL_ROOTS):
        resolve_model(folder / "m.safetensors")
    with pytest.raises(PathNotAllowedError, match=MODEL_ROOTS):
        read_card(folder)
    assert read_card(BUNDLED_WEIGHTS_DIR / "virnucpro-tiny").name == "virnucpro-tiny"
