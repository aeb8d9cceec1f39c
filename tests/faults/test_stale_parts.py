"""
Row 7: parts that were computed from another input, model, setting or version lie in the folder.

Everything that decides a row is in the plan's fingerprint, which every part carries. Here each of it is changed alone,
the fields of ``ModelConfig`` taken from the class itself, so that a new one cannot be forgotten.
"""

from __future__ import annotations

import dataclasses
from enum import Enum

import numpy as np
import pytest

from tests.fakes import hash_config
from tests.settings import changed
from tests.strategies import MadeRun
from virnucpro.data import packing
from virnucpro.data.packing import make_plan
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.knobs import recorded_settings
from virnucpro.pipeline.blocks.finished_blocks import find_finished_blocks
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.store.parts import part_paths, write_part
from virnucpro.store.reader import read_embeddings

RECORDS = [("one", "MKVLAAGIVG"), ("two", "MKVLAA"), ("three", "MKV"), ("four", "MKVLAWWW")]
DECIDING = [*hash_config().result_settings(), "attention_kernel"]


@pytest.fixture
def run(tmp_path):
    """A folder whose parts hold every block."""
    made = MadeRun(tmp_path, RECORDS, token_budget=16)
    made.write_part(range(len(made.plan)))
    assert find_finished_blocks(made.layout, made.plan).blocks == set(range(len(made.plan)))
    assert len(made.plan) > 1
    return made


def another(value):
    """A value of the same kind that is not *value*."""
    if isinstance(value, Enum):
        return next(member for member in type(value) if member != value)
    if isinstance(value, str):
        return value + "x"
    return value + 1


def finished_with(run, plan):
    found = find_finished_blocks(run.layout, plan)
    assert bool(found.blocks) != bool(found.rejected)
    return found.blocks


@pytest.mark.parametrize("name", DECIDING)
def test_a_part_of_another_setting_or_model_is_not_used(run, name):
    before = getattr(run.config, name, recorded_settings(run.config.settings.hardware).get(name))
    if before is None:
        before = recorded_settings(run.config.settings.sequences)[name]
    other = changed(run.config, **{name: another(before)})
    assert other.result_settings() != run.config.result_settings()
    assert finished_with(run, make_plan(run.index, other, device_type="cpu")) == set()


def test_a_part_of_another_kind_of_device_is_not_used(run):
    assert finished_with(run, make_plan(run.index, run.config, device_type="cuda")) == set()


def test_a_part_of_another_version_of_the_framework_is_not_used(run, monkeypatch):
    monkeypatch.setattr(packing, "computing_versions", lambda: {"torch version": "1.0"})
    assert finished_with(run, make_plan(run.index, run.config, device_type="cpu")) == set()


@pytest.mark.parametrize(
    "records",
    [
        [("one", "MKVLAAGIVW"), *RECORDS[1:]],
        [("another", "MKVLAAGIVG"), *RECORDS[1:]],
        [*RECORDS[1:], RECORDS[0]],
        [*RECORDS, ("five", "MKVLAA")],
        RECORDS[:-1],
    ],
    ids=["a letter", "an id", "the order", "one record more", "one record fewer"],
)
def test_a_part_of_another_input_is_not_used(run, tmp_path, records):
    fasta = tmp_path / "other.fasta"
    fasta.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in records))
    index = SequenceIndex.build([fasta], tmp_path / "other.index", unpack_dir=tmp_path)
    assert finished_with(run, make_plan(index, run.config, device_type="cpu")) == set()


def test_the_same_input_and_settings_use_every_part(run):
    plan = make_plan(SequenceIndex.open(run.layout.index), dataclasses.replace(run.config), device_type="cpu")
    assert finished_with(run, plan) == set(range(len(plan)))


def test_a_run_in_a_folder_with_another_runs_parts_computes_its_own_rows(run):
    for path in part_paths(run.layout.parts_dir):
        path.unlink()
    for block in range(len(run.plan)):
        wrong = dataclasses.replace(run.rows(block), embeddings=run.rows(block).embeddings + 1)
        write_part(run.layout.parts_dir, [wrong], plan_fingerprint="0" * 64)
    result = run_embedding([run.fasta], run.layout.output_dir, run.config, [CPU])
    assert result.ranks[0].sequences_resumed == 0
    with read_embeddings(run.layout.output_dir) as rows:
        assert np.array_equal(rows.to_numpy(), np.stack([run.vector(name) for name, _ in RECORDS]))
