"""The batch plan: every sequence once, never over budget, and the same for everyone."""

from __future__ import annotations

import functools
import gzip
import operator
from dataclasses import fields
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import hash_config
from tests.strategies import MadeRun, write_fasta
from virnucpro.choices import BadRecordPolicy, GapPolicy, LongPolicy, Precision, SequenceKind, StopPolicy
from virnucpro.config import ModelConfig
from virnucpro.data.packing import BlockPlan, make_plan, plan_blocks, resolve_token_budget, tokens_of
from virnucpro.data.sequence_index import SequenceIndex, get_worker_indices
from virnucpro.errors import ConfigurationError, TokenBudgetError
from virnucpro.knobs import settings_of
from virnucpro.models.encoders.dnabert_checkpoint import DnaTokenizer
from virnucpro.models.registry import MODELS
from virnucpro.settings import Cache, Hardware, Monitoring, SequenceRules

token_lists = st.lists(st.integers(3, 200), max_size=80).map(lambda tokens: sorted(tokens, reverse=True))


@given(token_lists, st.integers(200, 1000))
def test_blocks_cover_every_position_once_in_order_and_never_exceed_the_budget(tokens, token_budget):
    blocks = plan_blocks(tokens, token_budget=token_budget)
    assert [position for block in blocks for position in block] == list(range(len(tokens)))
    assert all(len(block) for block in blocks)
    assert all(sum(tokens[position] for position in block) <= token_budget for block in blocks)


@given(token_lists, st.integers(200, 1000))
def test_a_block_takes_all_that_fits(tokens, token_budget):
    blocks = plan_blocks(tokens, token_budget=token_budget)
    for block in blocks[:-1]:
        assert sum(tokens[position] for position in block) + tokens[block.stop] > token_budget


@given(st.lists(st.integers(3, 200), min_size=1, max_size=20), st.integers(1, 199))
def test_a_sequence_that_does_not_fit_is_refused_with_its_tokens(tokens, token_budget):
    if max(tokens) <= token_budget:
        assert plan_blocks(tokens, token_budget=token_budget)
        return
    with pytest.raises(TokenBudgetError) as caught:
        plan_blocks(tokens, token_budget=token_budget)
    assert (caught.value.tokens, caught.value.token_budget) == (max(tokens), token_budget)
    assert f"at least {max(tokens)}" in str(caught.value)


def test_no_sequences_make_no_blocks():
    assert plan_blocks([], token_budget=1) == []


@given(st.integers(0, 50), st.integers(1, 70))
def test_ranks_share_the_blocks_out_evenly_without_rest(num_blocks, world_size):
    plan = BlockPlan(np.arange(num_blocks), np.arange(num_blocks + 1), np.ones(num_blocks, np.int64), 8, "")
    shares = [plan.rank_blocks(rank, world_size) for rank in range(world_size)]
    assert sorted(block for share in shares for block in share) == list(range(num_blocks))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    # blocks come longest first: each rank has one of every world_size that follow each other, not the long ones alone
    assert all(block // world_size == turn for share in shares for turn, block in enumerate(share))


@given(st.integers(1, 500), st.lists(st.integers(1, 3000), max_size=20), st.integers(1, 2000))
def test_the_settled_budget_is_the_asked_for_one_or_the_longest_sequence(requested, lengths, max_residues):
    settled = resolve_token_budget(requested, np.array(lengths, np.int64), max_residues=max_residues)
    longest = max((min(length, max_residues) + 2 for length in lengths), default=0)
    assert settled == max(requested, longest)
    tokens = tokens_of(np.array(lengths, np.int64), max_residues=max_residues)
    assert len(plan_blocks(tokens, token_budget=settled)) <= len(lengths)


def test_settling_twice_changes_nothing():
    lengths = np.array([700, 3])
    once = resolve_token_budget(10, lengths, max_residues=1022)
    assert once == 702
    assert resolve_token_budget(once, lengths, max_residues=1022) == once


RECORDS = [("a", "MKT"), ("b", "MKTAYIAKQR" * 4), ("c", "MKT"), ("d", "ACD" * 5), ("e", "ACD" * 5), ("f", "W")]


def test_copies_are_planned_once_and_in_the_first_ones_place(tmp_path):
    run = MadeRun(tmp_path, RECORDS)
    planned = [run.index.sequence_id(position) for position in run.plan.positions.tolist()]
    assert planned == ["b", "d", "a", "f"]
    assert run.plan.tokens.sum() == 42 + 17 + 5 + 3


def test_a_plan_is_the_same_in_every_process_and_for_every_rank(tmp_path):
    run = MadeRun(tmp_path, [(f"s{n}", "ACDEFGHIKL"[: n % 10 + 1] * (n + 1)) for n in range(30)], token_budget=400)
    again = make_plan(SequenceIndex.open(run.layout.index), run.config, device_type="cpu")
    assert len(run.plan) > 5
    for field in fields(BlockPlan):
        assert np.array_equal(getattr(again, field.name), getattr(run.plan, field.name)), field.name
    for world_size in (1, 2, 3, 7, 100):
        shares = [get_worker_indices(run.index, rank, world_size, run.plan).tolist() for rank in range(world_size)]
        assert sorted(functools.reduce(operator.iadd, shares, [])) == sorted(run.plan.positions.tolist())
        for rank, share in enumerate(shares):
            blocks = [run.plan.block_positions(block).tolist() for block in run.plan.rank_blocks(rank, world_size)]
            assert share == functools.reduce(operator.iadd, blocks, [])


def test_the_tokens_of_a_block_are_those_of_its_sequences_after_the_cut(tmp_path):
    run = MadeRun(tmp_path, [(f"s{n}", "ACDEFGHIKL" * n) for n in range(1, 9)], max_residues=25, token_budget=60)
    for block in range(len(run.plan)):
        lengths = run.index.lengths[run.plan.block_positions(block)]
        assert run.plan.tokens[block] == sum(min(int(length), 25) + 2 for length in lengths)


@given(
    st.lists(st.integers(1, 100_000), min_size=1),
    st.integers(1, 200_000),
    st.floats(1, 8, allow_nan=False),
)
def test_tokens_of_bpe_are_estimated_between_the_special_ones_and_one_a_letter(lengths, max_letters, letters_per_token):
    letters = np.array(lengths, np.int64)
    tokens = tokens_of(letters, max_residues=max_letters, letters_per_token=letters_per_token)
    kept = np.minimum(letters, max_letters)
    assert (tokens >= 3).all()
    assert (tokens <= kept + 2).all()
    assert (np.abs((tokens - 2) * letters_per_token - kept) <= letters_per_token).all()
    assert (np.diff(tokens[np.argsort(letters)]) >= 0).all()


@pytest.mark.data
def test_blocks_of_real_dna_come_close_to_the_budget_in_true_tokens(tmp_path, data_dir):
    with gzip.open(data_dir / "viral" / "train_virus_prokaryotic_virus.fna.gz", "rt") as lines:
        genomes = "".join(line.strip() for line in islice(lines, 8000) if not line.startswith(">"))
    pieces = [(f"p{n}", genomes[500 * n : 500 * n + 300 + n % 200]) for n in range(len(genomes) // 500)]
    family = MODELS["dnabert-s"].family
    run = MadeRun(
        tmp_path,
        pieces,
        token_budget=4096,
        letters_per_token=family.letters_per_token,
        max_residues=family.max_letters,
    )
    tokenizer, sequence_of = DnaTokenizer(), dict(pieces)
    true_tokens = [
        int(
            tokenizer.encode([sequence_of[run.index.sequence_id(int(p))] for p in run.plan.block_positions(block)])[
                1
            ].sum()
        )
        for block in range(len(run.plan) - 1)
    ]
    assert len(true_tokens) > 10
    assert np.mean(true_tokens) == pytest.approx(4096, rel=0.05)
    assert 0.85 * 4096 < min(true_tokens) <= max(true_tokens) < 1.1 * 4096


CHANGES_ROWS = {
    "model_name": "another",
    "weights_sha256": "1" * 64,
    "config_sha256": "1" * 64,
    "precision": Precision.BF16,
    "token_budget": 65,
    "threads_per_worker": 2,
    "max_residues": 1000,
    "letters_per_token": 4.6,
    "attention_kernel": "another",
    "provider": "package 2",
    "gaps": GapPolicy.REMOVE,
    "stops": StopPolicy.X,
    "on_bad_record": BadRecordPolicy.SKIP,
    "rna": True,
}
CHANGES_NO_ROW = {
    "weights_path": "/elsewhere/model.pt",
    "hidden_dim": 9,
    "loader": "tests.fakes:load_faulty_model",
    "sequence_kind": SequenceKind.DNA,
    "cache_dir": "/elsewhere",
    "cache_gib": 1.0,
    "data_roots": "/elsewhere",
    "long_policy": LongPolicy.ERROR,
    "allow_empty": True,
    "log_level": "DEBUG",
    "loader_processes": 2,
    "workers_per_device": 2,
    "sequences_per_part": 1,
    "profile": True,
}


def test_every_setting_is_known_to_change_rows_or_not_to():
    resolved = {field.name for field in fields(ModelConfig)} - {"settings"}
    boxes = (Hardware, SequenceRules, Cache, Monitoring)
    asked = {one.knob.recorded or one.argument for box in boxes for one in settings_of(box)}
    elsewhere = {"runner", "devices", "workers", "weights_dir"}  # where, not what
    elsewhere |= {"metrics_port", "metrics_targets", "metrics_network", "pushgateway"}
    assert resolved | asked - elsewhere == CHANGES_ROWS.keys() | CHANGES_NO_ROW.keys()


@pytest.mark.parametrize("name", CHANGES_ROWS)
def test_the_plan_is_another_one_when_a_setting_changes_rows(tmp_path, name):
    run = MadeRun(tmp_path, RECORDS)
    changed = make_plan(run.index, hash_config(**{name: CHANGES_ROWS[name]}), device_type="cpu")
    assert changed.fingerprint != run.plan.fingerprint


@pytest.mark.parametrize("name", CHANGES_NO_ROW)
def test_the_plan_is_the_same_when_a_setting_changes_no_row(tmp_path, name):
    run = MadeRun(tmp_path, RECORDS)
    changed = make_plan(run.index, hash_config(**{name: CHANGES_NO_ROW[name]}), device_type="cpu")
    assert changed.fingerprint == run.plan.fingerprint


def test_the_plan_is_another_one_on_another_type_of_device(tmp_path):
    run = MadeRun(tmp_path, RECORDS)
    assert make_plan(run.index, run.config, device_type="cuda").fingerprint != run.plan.fingerprint


@pytest.mark.parametrize(
    "records",
    [
        RECORDS[::-1],
        [*RECORDS[:-1], ("f", "Y")],
        [*RECORDS[:-1], ("g", "W")],
        RECORDS[:-1],
    ],
    ids=["order", "residue", "id", "fewer"],
)
def test_the_plan_is_another_one_for_another_input(tmp_path, records):
    run = MadeRun(tmp_path, RECORDS)
    before = run.plan.fingerprint
    write_fasta(run.fasta, records)
    index = SequenceIndex.ensure([run.fasta], run.layout.index, unpack_dir=run.layout.unpacked_dir)
    assert make_plan(index, run.config, device_type="cpu").fingerprint != before


def test_a_date_is_not_part_of_the_plan(tmp_path):
    run = MadeRun(tmp_path, RECORDS)
    write_fasta(run.fasta, RECORDS)
    index = SequenceIndex.ensure([run.fasta], run.layout.index, unpack_dir=run.layout.unpacked_dir)
    assert make_plan(index, run.config, device_type="cpu").fingerprint == run.plan.fingerprint


def test_a_long_sequence_is_refused_by_the_plan_when_it_is_not_to_be_cut(tmp_path):
    run = MadeRun(tmp_path, RECORDS)
    allowed = hash_config(long_policy=LongPolicy.ERROR, max_residues=40)
    assert len(make_plan(run.index, allowed, device_type="cpu")) > 0
    refused = hash_config(long_policy=LongPolicy.ERROR, max_residues=39)
    with pytest.raises(ConfigurationError, match="40 residues is longer than 39"):
        make_plan(run.index, refused, device_type="cpu")
