"""One result file in the order of the input, the same bytes whatever the parts and shards were."""

from __future__ import annotations

import random
import shutil

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import HASH_WIDTH, hash_config
from tests.strategies import MadeRun, fasta_records, flip_bit
from virnucpro import durable
from virnucpro.choices import ResultForm
from virnucpro.config import InputRules
from virnucpro.data.packing import make_plan
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import ResultError, SourceGoneError
from virnucpro.pipeline.blocks import finished_blocks
from virnucpro.pipeline.blocks.finished_blocks import seal_shard
from virnucpro.pipeline.shard_aggregator import aggregate_shards, validate_result, write_failed_sequences
from virnucpro.run_layout import RunLayout
from virnucpro.store.parts import SealedBlocks, write_part, write_shard
from virnucpro.store.reader import Embeddings
from virnucpro.store.schema import BlockOrigin


def random_records(num_records=40, seed=17):
    """Every fifth sequence is a copy of an earlier one."""
    chooser = random.Random(seed)
    records = []
    for n in range(num_records):
        fresh = "".join(chooser.choices("ACDEFGHIKL", k=chooser.randint(1, 30)))
        records.append((f"s{n}", chooser.choice(records)[1] if n % 5 == 4 else fresh))
    return records


@pytest.fixture
def run(tmp_path):
    made = MadeRun(tmp_path, random_records())
    assert len(made.plan) >= 8
    assert len(made.plan.positions) < len(made.index)
    return made


def aggregate(run):
    return aggregate_shards(
        run.layout, run.index, run.plan, max_residues=run.config.max_residues, hidden_dim=run.config.hidden_dim
    )


def seal(run, rank, world_size):
    seal_shard(rank, run.plan.rank_blocks(rank, world_size), run.plan, run.layout, hidden_dim=HASH_WIDTH)


def check_rows(run, path, names=None):
    """Every wanted record once, in the order of the input, with the row of its own sequence."""
    wanted = [name for name, _ in run.records if names is None or name in names]
    with Embeddings(path) as found:
        assert list(found.ids) == wanted
        for name in wanted:
            assert found[name].tobytes() == run.vector(name).tobytes(), name


def check_missing(run, aggregation, missing_blocks):
    missing = run.names_of(missing_blocks)
    in_input_order = [name for name, _ in run.records if name in missing]
    assert run.index.sequence_ids(aggregation.missing_positions) == in_input_order
    assert aggregation.num_missing == len(missing)
    assert aggregation.num_rows + aggregation.num_missing == len(run.records)
    assert not aggregation.is_complete

    def why(position):
        block = run.plan.block_of(position)
        return f"reason {block}", block + 1

    write_failed_sequences(run.layout, run.index, aggregation.missing_positions, why)
    header, *lines = run.layout.failed_sequences.read_text(encoding="utf-8").splitlines()
    assert header == "sequence_id\treason\tattempts"
    names_by_block = {block: run.names_of([block]) for block in missing_blocks}
    expected = [
        f"{name}\treason {block}\t{block + 1}"
        for name, _ in run.records
        for block, names in names_by_block.items()
        if name in names
    ]
    assert lines == expected
    assert len(lines) == aggregation.num_missing


def test_rows_stand_in_the_order_of_the_input_under_their_own_ids(run):
    for block in reversed(range(len(run.plan))):
        run.write_part([block])
    result = aggregate(run)
    assert result.output_path == run.layout.embeddings
    assert result.files == {"embeddings.h5": durable.sha256_of(run.layout.embeddings)}
    assert (result.num_rows, result.num_missing, len(result.missing_positions), result.is_complete) == (40, 0, 0, True)
    check_rows(run, run.layout.embeddings)
    validate_result(run.layout.embeddings, run.index, expected_rows=40, expected_files=result.files)


def arrange(run, data):
    """Lay every block down at least once, in random parts, some of them sealed into random shards."""
    blocks = data.draw(st.permutations(range(len(run.plan))))
    again = data.draw(st.lists(st.sampled_from(blocks), max_size=5))
    everything = [*blocks, *again]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(everything) - 1), max_size=len(everything) - 1)))
    world_size = data.draw(st.integers(1, 4))
    for start, end in zip([0, *cuts], [*cuts, len(everything)], strict=True):
        run.write_part(dict.fromkeys(everything[start:end]))
        rank = data.draw(st.integers(-2, world_size - 1))
        if rank >= 0:
            seal(run, rank, world_size)
            world_size = data.draw(st.integers(1, 4))


@given(data=st.data())
@settings(max_examples=12)
def test_the_bytes_are_the_same_whatever_the_parts_and_shards(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    run = MadeRun(folder, random_records(30, seed=data.draw(st.integers(0, 3))), max_residues=20, token_budget=80)
    run.write_part(range(len(run.plan)))
    reference = aggregate(run)
    check_rows(run, run.layout.embeddings)
    whole = run.layout.embeddings.read_bytes()
    run.layout.embeddings.unlink()
    shutil.rmtree(run.layout.parts_dir)
    arrange(run, data)
    assert aggregate(run) == reference
    assert run.layout.embeddings.read_bytes() == whole


@given(records=fasta_records(), data=st.data())
@settings(max_examples=16)
def test_rows_and_failures_add_up_for_any_input_and_any_blocks(tmp_path_factory, records, data):
    run = MadeRun(tmp_path_factory.mktemp("run"), records, token_budget=40)
    blocks = range(len(run.plan))
    done = data.draw(st.sets(st.sampled_from(blocks)))
    for block in done:
        run.write_part([block])
    result = aggregate(run)
    missing = set(blocks) - done
    if not missing:
        check_rows(run, run.layout.embeddings)
        assert result.num_rows == len(records)
        return
    check_missing(run, result, missing)
    assert not run.layout.embeddings.exists()
    if done:
        check_rows(run, run.layout.partial_embeddings, run.names_of(done))
        validate_result(
            run.layout.partial_embeddings,
            run.index,
            expected_rows=len(run.names_of(done)),
            expected_files=result.files,
        )
    else:
        assert result.output_path is None
        assert not run.layout.partial_embeddings.exists()


def test_a_block_in_several_files_is_taken_once(run):
    run.write_part(range(len(run.plan)))
    once = aggregate(run).files
    for block in range(0, len(run.plan), 2):
        run.write_part([block])
        run.write_part([block, block + 1] if block + 1 < len(run.plan) else [block])
    seal(run, 0, 2)
    run.write_part([0, 2])
    assert aggregate(run).files == once


def spoil_part(run):
    flip_bit(run.write_part([2]), 8 * 2500)


def cut_part(run):
    path = run.write_part([2])
    path.write_bytes(path.read_bytes()[:-3])


def leave_out_part(run):
    pass


def leave_stale_part(run):
    run.write_part([2], fingerprint="e" * 64)


def spoil_shard(run):
    run.write_part([2])
    seal(run, 2, 7)
    flip_bit(run.layout.shard(2), 8 * 2500)


@pytest.mark.parametrize(
    "spoil", [spoil_part, cut_part, leave_out_part, leave_stale_part, spoil_shard], ids=lambda spoil: spoil.__name__
)
def test_what_cannot_be_used_is_reported_missing_and_nothing_else_is(run, spoil):
    others = [block for block in range(len(run.plan)) if block != 2]
    run.write_part(others)
    spoil(run)
    result = aggregate(run)
    check_missing(run, result, [2])
    check_rows(run, run.layout.partial_embeddings, run.names_of(others))
    assert not run.layout.embeddings.exists()


def test_the_parts_of_a_rank_that_never_finished_are_salvaged(run):
    for rank in range(3):
        for block in run.plan.rank_blocks(rank, 3):
            run.write_part([block])
        if rank != 1:
            seal(run, rank, 3)
    assert len(run.layout.shards()) == 2
    assert aggregate(run).is_complete
    check_rows(run, run.layout.embeddings)


def seal_meanwhile(run, monkeypatch, name, call):
    """Let a rank that nobody waits for seal its blocks when aggregation has called *name* that many times."""
    real = getattr(finished_blocks, name)
    calls = []

    def with_sealing(*arguments, **options):
        found = real(*arguments, **options)
        calls.append(name)
        if len(calls) == call:
            seal(run, 1, 3)
        return found

    monkeypatch.setattr(finished_blocks, name, with_sealing)


@pytest.mark.parametrize("form", [ResultForm.SINGLE, ResultForm.SHARDED])
@pytest.mark.parametrize(("name", "call"), [("_listed", 1), ("part_paths", 2), ("find_finished_blocks", 1)])
@pytest.mark.parametrize("is_sealed_before", [False, True])
def test_what_is_sealed_while_the_result_is_put_together_is_in_it_under_its_own_id(
    run, monkeypatch, form, name, call, is_sealed_before
):
    for block in range(len(run.plan)):
        run.write_part([block])
    if is_sealed_before:
        seal(run, 1, 3)
        run.write_part([1])
    settings = {"max_residues": run.config.max_residues, "hidden_dim": HASH_WIDTH, "result_form": form}
    with monkeypatch.context() as patched:
        seal_meanwhile(run, patched, name, call)
        result = aggregate_shards(run.layout, run.index, run.plan, **settings)
    assert len(run.layout.shards()) == 1, "it was sealed"
    assert result.is_complete
    check_rows(run, result.output_path)
    assert aggregate_shards(run.layout, run.index, run.plan, **settings) == result


def test_a_source_that_another_file_took_the_name_of_is_not_read(run):
    path, other = run.write_part([0, 1]), run.write_part([2])
    source = SealedBlocks.open(path)
    for take_away in (path.unlink, lambda: other.rename(path)):
        take_away()
        with pytest.raises(SourceGoneError, match="is no longer the file that was checked"):
            next(source.iter_rows())
        with pytest.raises(SourceGoneError, match=path.name):
            next(source.iter_rows_at(np.array([1])))
    assert SealedBlocks.open(path).blocks[:, 0].tolist() == [2]


def test_a_result_completed_in_three_runs_of_4_then_1_then_3_ranks_has_the_bytes_of_one_run(run):
    run.write_part(range(len(run.plan)))
    reference = aggregate(run)
    run.layout.embeddings.unlink()
    shutil.rmtree(run.layout.parts_dir)
    num_blocks = len(run.plan)
    todo = set(range(num_blocks))
    for world_size, share in ((4, 3), (1, 4), (3, num_blocks)):
        for rank in range(world_size):
            mine = [block for block in run.plan.rank_blocks(rank, world_size) if block in todo][: max(1, share // 3)]
            for block in mine if share < num_blocks else sorted(todo & set(run.plan.rank_blocks(rank, world_size))):
                run.write_part([block])
                todo.discard(block)
            seal(run, rank, world_size)
        if todo:
            check_missing(run, aggregate(run), sorted(todo))
    assert not todo
    assert aggregate(run) == reference


def test_what_was_cut_is_recorded_with_its_length_before(tmp_path):
    records = [("a", "M" * 9), ("b", "K" * 50), ("c", "A" * 20), ("d", "K" * 50), ("e", "A" * 21)]
    run = MadeRun(tmp_path, records, max_residues=20)
    run.write_part(range(len(run.plan)))
    assert aggregate(run).num_truncated == 3
    with h5py.File(run.layout.embeddings) as file:
        assert file["truncated_from"][()].tolist() == [0, 50, 0, 50, 21]
        assert file["truncated_from"].dtype == np.int64
    check_rows(run, run.layout.embeddings)


def test_what_was_cut_is_recorded_in_a_partial_result_too(tmp_path):
    records = [("a", "M" * 9), ("b", "K" * 50), ("c", "A" * 30)]
    run = MadeRun(tmp_path, records, max_residues=20, token_budget=22)
    missing = next(block for block in range(len(run.plan)) if run.names_of([block]) == {"b"})
    run.write_part([block for block in range(len(run.plan)) if block != missing])
    assert aggregate(run).num_truncated == 1
    with h5py.File(run.layout.partial_embeddings) as file:
        assert file["truncated_from"][()].tolist() == [0, 30]


def test_a_result_in_which_nothing_was_cut_says_nothing_of_it(run):
    run.write_part(range(len(run.plan)))
    assert aggregate(run).num_truncated == 0
    with h5py.File(run.layout.embeddings) as file:
        assert set(file) == {"embeddings", "sequence_ids"}
        assert list(file.attrs) == []


def test_an_input_without_records_gives_a_result_without_rows(tmp_path):
    layout = RunLayout(tmp_path / "out")
    (tmp_path / "empty.fasta").write_text("")
    SequenceIndex.build(
        [tmp_path / "empty.fasta"], layout.index, unpack_dir=tmp_path, rules=InputRules(allow_empty=True)
    )
    index = SequenceIndex.open(layout.index)
    plan = make_plan(index, hash_config(), device_type="cpu")
    assert (len(index), len(plan)) == (0, 0)
    assert seal_shard(0, plan.rank_blocks(0, 1), plan, layout, hidden_dim=HASH_WIDTH) == 0
    result = aggregate_shards(layout, index, plan, max_residues=9, hidden_dim=HASH_WIDTH)
    assert (result.num_rows, result.num_missing, result.is_complete) == (0, 0, True)
    validate_result(layout.embeddings, index, expected_rows=0, expected_files=result.files)
    with Embeddings(layout.embeddings) as found:
        assert (len(found), found.hidden_dim) == (0, HASH_WIDTH)


def test_a_shard_of_no_rows_and_no_width_is_accepted(run):
    write_shard(run.layout.shard(9), [], plan_fingerprint=run.plan.fingerprint, hidden_dim=0)
    run.write_part(range(len(run.plan)))
    assert aggregate(run).is_complete
    check_rows(run, run.layout.embeddings)


def test_a_thousand_copies_of_one_sequence_all_get_its_row(tmp_path):
    records = [(f"s{n}", "MKTAY" if n % 10 else "ACD" + "K" * (n // 10)) for n in range(1000)]
    run = MadeRun(tmp_path, records, token_budget=200)
    run.write_part(range(len(run.plan)))
    assert len(run.plan.positions) == 101
    assert aggregate(run).num_rows == 1000
    check_rows(run, run.layout.embeddings)


def test_the_list_of_failures_goes_when_nothing_is_missing(run):
    run.write_part([0])
    result = aggregate(run)
    write_failed_sequences(run.layout, run.index, result.missing_positions, lambda _: ("died", 3))
    assert run.layout.failed_sequences.exists()
    write_failed_sequences(run.layout, run.index, result.missing_positions[:0], lambda _: ("died", 3))
    assert not run.layout.failed_sequences.exists()


def test_a_block_without_one_of_its_sequences_gives_the_rows_that_it_has(run):
    block = next(b for b in range(len(run.plan)) if len(run.plan.block_positions(b)) > 2)
    lost = int(run.plan.block_positions(block)[1])
    run.write_part([b for b in range(len(run.plan)) if b != block])
    run.write_part([block], without=[lost])
    result = aggregate(run)
    lost_names = {name for name in run.names_of([block]) if run.sequence_of[name] == run.sequence_of[run.name_of(lost)]}
    assert result.output_path == run.layout.partial_embeddings
    check_rows(run, run.layout.partial_embeddings, {name for name, _ in run.records} - lost_names)
    assert set(run.index.sequence_ids(result.missing_positions)) == lost_names
    run.write_part([block])
    assert aggregate(run).is_complete
    check_rows(run, run.layout.embeddings)


def test_a_result_of_before_does_not_stand_beside_one_with_missing_rows(run):
    run.layout.embeddings.write_bytes(b"damaged")
    run.write_part([0])
    assert aggregate(run).output_path == run.layout.partial_embeddings
    assert not run.layout.embeddings.exists()


def test_a_partial_result_of_before_goes_when_no_row_is_left(run):
    path = run.write_part([0])
    assert aggregate(run).output_path == run.layout.partial_embeddings
    path.unlink()
    assert aggregate(run).output_path is None
    assert not run.layout.partial_embeddings.exists()


# --- validate_result ---


def finished_file(run):
    run.write_part(range(len(run.plan)))
    aggregate(run)
    return run.layout.embeddings


def rewrite(path, change):
    with h5py.File(path, "r+") as file:
        change(file)


def swap_ids(file):
    names = file["sequence_ids"][()]
    names[[3, 7]] = names[[7, 3]]
    file["sequence_ids"][...] = names


def repeat_an_id(file):
    file["sequence_ids"][4] = file["sequence_ids"][3]


def rename_an_id(file):
    file["sequence_ids"][39] = "somebody"


def put_nan(file):
    file["embeddings"][39, HASH_WIDTH - 1] = np.nan


def drop_a_row(file):
    rows, names = file["embeddings"][1:], file["sequence_ids"][1:]
    del file["embeddings"], file["sequence_ids"]
    file["embeddings"], file["sequence_ids"] = rows, names


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (swap_ids, "'s7' is not in the input, or in the wrong place"),
        (repeat_an_id, "'s3' is not in the input"),
        (rename_an_id, "'somebody' is not in the input"),
        (put_nan, "not finite"),
        (drop_a_row, "has 39 rows, expected 40"),
    ],
)
def test_validation_says_what_does_not_hold(run, change, what):
    path = finished_file(run)
    validate_result(path, run.index, expected_rows=40, expected_files=None)
    rewrite(path, change)
    with pytest.raises(ResultError, match=what):
        validate_result(path, run.index, expected_rows=40, expected_files=None)


def test_validation_of_a_partial_result_wants_the_inputs_order_too(run):
    run.write_part([0, 1])
    result = aggregate(run)
    check = {"expected_rows": result.num_rows, "expected_files": None}
    validate_result(result.output_path, run.index, **check)
    with h5py.File(result.output_path, "r+") as file:
        file["sequence_ids"][...] = file["sequence_ids"][()][::-1]
    with pytest.raises(ResultError, match="wrong place"):
        validate_result(result.output_path, run.index, **check)


def test_a_flipped_bit_anywhere_in_the_result_is_seen_by_its_sha256(run):
    path = finished_file(run)
    sha256 = durable.sha256_of(path)
    for bit in random.Random(23).sample(range(path.stat().st_size * 8), 60):
        flip_bit(path, bit)
        with pytest.raises(ResultError, match="damaged"):
            validate_result(path, run.index, expected_rows=40, expected_files={"embeddings.h5": sha256})
        flip_bit(path, bit)
    validate_result(path, run.index, expected_rows=40, expected_files={"embeddings.h5": sha256})


def test_an_absent_result_is_missing(run):
    with pytest.raises(ResultError, match="is missing"):
        validate_result(run.layout.embeddings, run.index, expected_rows=40, expected_files=None)


def test_split_and_cached_blocks_are_counted_and_leave_no_trace_in_the_result(tmp_path, run):
    everything = range(len(run.plan))
    run.write_part(everything)
    plain = aggregate(run)
    before = plain.output_path.read_bytes()
    assert (plain.num_resplit_blocks, plain.num_cached_blocks) == (0, 0)
    for path in run.layout.parts_dir.iterdir():
        path.unlink()
    origin_of = {0: BlockOrigin.RESPLIT, 2: BlockOrigin.CACHED, 3: BlockOrigin.CACHED}
    rows = [run.rows(block, origin_of.get(block, BlockOrigin.COMPUTED)) for block in everything]
    write_part(run.layout.parts_dir, rows, plan_fingerprint=run.plan.fingerprint)
    seal(run, 0, 1)
    run.write_part([3])  # the same block twice: the one that is written counts
    marked = aggregate(run)
    assert (marked.num_resplit_blocks, marked.num_cached_blocks) == (1, 2)
    assert marked.output_path.read_bytes() == before
