"""What on disk may be used: this plan's whole blocks, and nothing else; and how a rank seals its own."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.strategies import MadeRun, flip_bit
from virnucpro.errors import OutputError
from virnucpro.pipeline.blocks import finished_blocks
from virnucpro.pipeline.blocks.finished_blocks import find_finished_blocks, seal_shard
from virnucpro.store.parts import BlockRows, SealedBlocks, part_paths, read_block_numbers, write_part


@pytest.fixture
def run(tmp_path):
    chooser = random.Random(11)
    records = [(f"s{n}", "".join(chooser.choices("ACDEFGHIKL", k=chooser.randint(1, 30)))) for n in range(40)]
    made = MadeRun(tmp_path, records)
    assert len(made.plan) >= 9
    return made


def seal(run, rank, world_size):
    mine = run.plan.rank_blocks(rank, world_size)
    return seal_shard(rank, mine, run.plan, run.layout, hidden_dim=run.config.hidden_dim)


def blocks_in(path):
    return SealedBlocks.open(path).blocks[:, 0].tolist()


def num_rows(run, blocks):
    return sum(len(run.plan.block_positions(block)) for block in blocks)


def test_an_empty_folder_has_nothing_finished(run):
    found = find_finished_blocks(run.layout, run.plan)
    assert (found.blocks, found.sources, found.rejected) == (set(), [], [])


def test_blocks_of_parts_and_shards_are_found(run):
    run.write_part([0, 3])
    seal(run, 0, 3)
    run.write_part([1, 4])
    found = find_finished_blocks(run.layout, run.plan)
    assert found.blocks == {0, 1, 3, 4}
    assert [source.path.name[:5] for source in found.sources] == ["shard", "part_"]


def test_files_without_a_wanted_block_are_not_even_read(run):
    wanted, other = run.write_part([0, 2]), run.write_part([1, 3])
    flip_bit(other, 8 * 100)
    found = find_finished_blocks(run.layout, run.plan, among=range(0, 9, 2))
    assert [source.path for source in found.sources] == [wanted]
    assert found.rejected == []
    assert find_finished_blocks(run.layout, run.plan).rejected == [other]


def test_every_damaged_part_is_rejected_and_never_raises(run):
    path = run.write_part([2, 5])
    num_bits = path.stat().st_size * 8
    for bit in random.Random(5).sample(range(num_bits), 60):
        flip_bit(path, bit)
        found = find_finished_blocks(run.layout, run.plan)
        assert (found.blocks, found.rejected) == (set(), [path])
        flip_bit(path, bit)
    assert find_finished_blocks(run.layout, run.plan).blocks == {2, 5}


def test_rows_of_another_plan_are_rejected(run):
    path = run.write_part([2], fingerprint="f" * 64)
    found = find_finished_blocks(run.layout, run.plan)
    assert (found.blocks, found.rejected) == (set(), [path])


def forged(run, number, **changes):
    rows = run.rows(number)
    values = {name: changes.get(name, getattr(rows, name)) for name in rows.__dataclass_fields__}
    return write_part(run.layout.parts_dir, [BlockRows(**values)], plan_fingerprint=run.plan.fingerprint)


def test_rows_that_are_not_the_plans_sequences_are_rejected(run):
    last = len(run.plan) - 1
    bad = [
        forged(run, 1, positions=run.plan.block_positions(1) + 1),
        forged(run, last, positions=run.plan.block_positions(last)[::-1].copy()),
        forged(run, 2, block=len(run.plan) + 2),
        forged(run, 3, block=-1),
    ]
    found = find_finished_blocks(run.layout, run.plan)
    assert (found.blocks, sorted(found.rejected)) == (set(), sorted(bad))


def test_rows_counted_to_the_wrong_block_are_rejected(run):
    first, second = run.rows(last := len(run.plan) - 2), run.rows(last + 1)
    ids, rows = [*first.sequence_ids, *second.sequence_ids], np.concatenate([first.embeddings, second.embeddings])
    positions = np.concatenate([first.positions, second.positions])
    at = len(first.positions) + 1
    shifted = [
        BlockRows(last, positions[:at], ids[:at], rows[:at]),
        BlockRows(last + 1, positions[at:], ids[at:], rows[at:]),
    ]
    path = write_part(run.layout.parts_dir, shifted, plan_fingerprint=run.plan.fingerprint)
    found = find_finished_blocks(run.layout, run.plan)
    assert (found.blocks, found.rejected) == (set(), [path])


def test_a_row_that_is_not_finite_is_rejected(run):
    rows = run.rows(0).embeddings.copy()
    rows[-1, 0] = np.inf
    path = forged(run, 0, embeddings=rows)
    found = find_finished_blocks(run.layout, run.plan)
    assert (found.blocks, found.rejected) == (set(), [path])


def test_sealing_puts_a_ranks_parts_into_its_shard_and_removes_them(run):
    mine = list(run.plan.rank_blocks(1, 3))
    for block in mine:
        run.write_part([block])
    other = run.write_part([0, 3])
    assert seal(run, 1, 3) == num_rows(run, mine)
    assert sorted(blocks_in(run.layout.shard(1))) == mine
    assert part_paths(run.layout.parts_dir) == [other]


def test_sealing_twice_changes_not_a_byte(run):
    run.write_part([0, 3, 6])
    seal(run, 0, 3)
    before = run.layout.shard(0).read_bytes()
    assert seal(run, 0, 3) == num_rows(run, [0, 3, 6])
    assert run.layout.shard(0).read_bytes() == before


def test_sealing_again_adds_to_the_shard_and_keeps_what_was_in_it(run):
    run.write_part([0])
    seal(run, 0, 3)
    run.write_part([3])
    run.write_part([0])
    assert seal(run, 0, 3) == num_rows(run, [0, 3])
    assert sorted(blocks_in(run.layout.shard(0))) == [0, 3]
    assert part_paths(run.layout.parts_dir) == []


@pytest.fixture
def block(run):
    return next(b for b in range(len(run.plan)) if len(run.plan.block_positions(b)) > 2)


def test_a_block_that_lacks_a_sequence_is_finished_only_while_that_is_excused(run, block):
    lost = int(run.plan.block_positions(block)[1])
    run.write_part([block], without=[lost])
    assert find_finished_blocks(run.layout, run.plan).blocks == set()
    assert find_finished_blocks(run.layout, run.plan, quarantined={lost}).blocks == {block}
    assert find_finished_blocks(run.layout, run.plan, quarantined={lost + 1}).blocks == set()


@pytest.mark.parametrize("whole_is_sealed", [False, True])
def test_the_version_of_a_block_with_more_rows_is_used_and_sealed(run, block, whole_is_sealed):
    lost = int(run.plan.block_positions(block)[1])
    mine = range(block, block + 1)
    versions = [(), [lost]] if whole_is_sealed else [[lost], ()]
    for without in versions:
        run.write_part([block], without=without)
        found = find_finished_blocks(run.layout, run.plan)
        assert sum(len(source.positions) for source in found.sources) == num_rows(run, mine) - (
            without == versions[0] == [lost]
        )
        seal_shard(0, mine, run.plan, run.layout, hidden_dim=run.config.hidden_dim)
    assert part_paths(run.layout.parts_dir) == []
    (sealed,) = find_finished_blocks(run.layout, run.plan).sources
    assert sealed.positions.tolist() == run.plan.block_positions(block).tolist()
    names = [name for some in sealed.iter_sequence_ids() for name in some]
    rows = np.concatenate(list(sealed.iter_rows()))
    assert [run.vector(name).tobytes() for name in names] == [row.tobytes() for row in rows]


def test_a_part_that_another_rank_seals_meanwhile_stays_in_its_shard(run):
    run.write_part([0])
    run.write_part([3])
    looked_at = []

    def on_step():
        looked_at.append(1)
        if len(looked_at) == 2:
            seal_shard(1, [0], run.plan, run.layout, hidden_dim=run.config.hidden_dim)

    rows = seal_shard(0, [0, 3], run.plan, run.layout, hidden_dim=run.config.hidden_dim, on_step=on_step)
    assert rows == num_rows(run, [3])
    assert find_finished_blocks(run.layout, run.plan).blocks == {0, 3}


def test_a_rank_without_sequences_seals_an_empty_shard(run):
    assert seal(run, 500, 501) == 0
    shard = SealedBlocks.open(run.layout.shard(500))
    assert (shard.hidden_dim, len(shard.positions)) == (run.config.hidden_dim, 0)
    assert find_finished_blocks(run.layout, run.plan).blocks == set()


def test_a_damaged_shard_is_replaced_by_what_the_parts_still_hold(run):
    run.write_part([0, 3])
    seal(run, 0, 3)
    flip_bit(run.layout.shard(0), 8 * 3000)
    run.write_part([6])
    assert seal(run, 0, 3) == num_rows(run, [6])
    assert blocks_in(run.layout.shard(0)) == [6]
    found = find_finished_blocks(run.layout, run.plan)
    assert (found.blocks, found.rejected) == ({6}, [])


def test_a_shard_of_another_plan_is_replaced(run):
    run.write_part([0], fingerprint="f" * 64)
    stale = next(iter(part_paths(run.layout.parts_dir)))
    stale.rename(run.layout.shard(0))
    run.write_part([3])
    assert seal(run, 0, 3) == num_rows(run, [3])
    assert blocks_in(run.layout.shard(0)) == [3]


def test_nothing_is_lost_when_the_number_of_ranks_changes_between_runs(run):
    everything = set(range(len(run.plan)))
    done = set()
    for world_size, fresh in ((4, {0, 1, 2, 5}), (1, {3}), (3, everything - {0, 1, 2, 3, 5})):
        for rank in range(world_size):
            for block in run.plan.rank_blocks(rank, world_size):
                if block in fresh:
                    assert block not in find_finished_blocks(run.layout, run.plan).blocks
                    run.write_part([block])
            done = done | (fresh & set(run.plan.rank_blocks(rank, world_size)))
            seal(run, rank, world_size)
            assert find_finished_blocks(run.layout, run.plan).blocks == done
    assert done == everything
    assert part_paths(run.layout.parts_dir) == []


def test_a_part_goes_only_when_all_its_blocks_are_in_the_shard(run):
    shared = run.write_part([0, 1])  # ranks 0 and 1 of three; of one rank that worked alone
    partly = run.write_part([3, 6])
    run.write_part([3])
    seal(run, 0, 3)
    assert shared in part_paths(run.layout.parts_dir)
    left = part_paths(run.layout.parts_dir)
    sealed = set(blocks_in(run.layout.shard(0)))
    assert 3 in sealed
    assert (6 in sealed) != (partly in left), "block 6 is in the shard or still in its part"
    assert find_finished_blocks(run.layout, run.plan).blocks == {0, 1, 3, 6}


def test_sealing_does_not_open_the_parts_that_begin_with_blocks_of_others(run, monkeypatch):
    mine, of_others = [run.write_part([0, 3]), run.write_part([6])], [run.write_part([1, 4]), run.write_part([2, 9])]
    odd = run.layout.parts_dir / "part_odd.h5"
    odd.write_bytes(b"left by somebody")
    opened = []

    def read(path):
        opened.append(path)
        return read_block_numbers(path)

    monkeypatch.setattr(finished_blocks, "read_block_numbers", read)
    assert seal(run, 0, 3) == num_rows(run, [0, 3, 6])
    assert sorted(opened) == mine
    assert part_paths(run.layout.parts_dir) == of_others
    assert odd.exists()
    assert find_finished_blocks(run.layout, run.plan).blocks == {0, 1, 2, 3, 4, 6, 9}


def test_a_shard_that_cannot_be_written_leaves_every_part(run):
    paths = [run.write_part([block]) for block in (0, 3)]
    run.layout.shard(0).mkdir()
    assert find_finished_blocks(run.layout, run.plan).rejected == [run.layout.shard(0)]
    with pytest.raises(OutputError):
        seal(run, 0, 3)
    assert part_paths(run.layout.parts_dir) == sorted(paths)
