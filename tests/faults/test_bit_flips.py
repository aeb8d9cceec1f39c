"""
Row 6: one random bit flipped in a part, a shard or the finished result.

A flip is seen when the aggregation takes nothing of the file, names its blocks as missing and everything else comes out
right, or, for the result, when ``verify`` says so.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.strategies import MadeRun, flip_bit
from virnucpro.pipeline.blocks.finished_blocks import find_finished_blocks
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.run_layout import RunLayout
from virnucpro.store.parts import part_paths

SEQUENCES = 24


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run whose parts, shards and result all lie there: ``layout`` has its shards, ``with_parts`` its parts."""
    folder = tmp_path_factory.mktemp("run")
    chooser = random.Random(3)
    letters = ["".join(chooser.choices("ACDEFGHIKLMNPQRSTVWY", k=chooser.randint(1, 40))) for _ in range(SEQUENCES)]
    made = MadeRun(folder, [(f"s{number}", sequence) for number, sequence in enumerate(letters)])
    for mine in (made.plan.rank_blocks(rank, 2) for rank in range(2)):
        for first in range(0, len(mine), 2):
            made.write_part(mine[first : first + 2])
    with_parts = RunLayout(folder / "with_parts")
    shutil.copytree(made.layout.output_dir, with_parts.output_dir)
    result = run_embedding([made.fasta], made.layout.output_dir, made.config, [CPU] * 2, keep_shards=True)
    assert result.state == "complete"
    assert sum(rank.sequences for rank in result.ranks) == 0, "every part was taken up"
    assert verify_run(made.layout.output_dir).problems == []
    return SimpleNamespace(made=made, layout=made.layout, with_parts=with_parts)


def is_seen_in_blocks(finished, layout, path, blocks):
    """Whether the search for finished blocks, which worker and aggregation share, leaves out *path* and only it."""
    found = find_finished_blocks(layout, finished.made.plan)
    return found.rejected == [path] and found.blocks == set(range(len(finished.made.plan))) - blocks


def blocks_of(finished, layout):
    whole = find_finished_blocks(layout, finished.made.plan)
    assert whole.rejected == []
    assert whole.blocks == set(range(len(finished.made.plan)))
    return {source.path: set(source.blocks[:, 0].tolist()) for source in whole.sources}


def flips_unseen(finished, chooser, tries):
    """Flip *tries* bits, one at a time, in files of each kind; return how many of each went unseen."""
    in_parts, in_shards = (blocks_of(finished, layout) for layout in (finished.with_parts, finished.layout))
    assert in_parts.keys() == set(part_paths(finished.with_parts.parts_dir))
    assert in_shards.keys() == set(finished.layout.shards())
    unseen = Counter(dict.fromkeys(("part", "shard", "result"), 0))
    for number in range(tries):
        kind = ("part", "shard", "result")[number % 3]
        if kind == "result":
            path = finished.layout.embeddings
        else:
            path = chooser.choice(sorted(in_parts if kind == "part" else in_shards))
        before = path.read_bytes()
        bit = chooser.randrange(8 * len(before))
        flip_bit(path, bit)
        if kind == "part":
            is_seen = is_seen_in_blocks(finished, finished.with_parts, path, in_parts[path])
        elif kind == "shard":
            is_seen = is_seen_in_blocks(finished, finished.layout, path, in_shards[path])
        else:
            is_seen = any("damaged" in problem for problem in verify_run(finished.layout.output_dir).problems)
        if not is_seen:
            print(f"bit {bit} of {path.name} went unseen")
            unseen[kind] += 1
        path.write_bytes(before)
    return unseen


def flip_and_report(finished, seed, soak_table, tries):
    unseen = flips_unseen(finished, random.Random(seed), tries)
    soak_table("one bit flipped in a part, a shard or the result", tries=tries, differing=sum(unseen.values()))
    assert unseen == {"part": 0, "shard": 0, "result": 0}


def test_a_flipped_bit_in_a_part_a_shard_or_the_result_is_seen(finished, seed, soak_table):
    flip_and_report(finished, seed, soak_table, tries=30)


@pytest.mark.soak
def test_200_flipped_bits_are_all_seen(finished, seed, soak_table):
    flip_and_report(finished, seed, soak_table, tries=200)


def test_a_run_with_a_damaged_part_and_a_damaged_shard_computes_them_again_and_has_the_same_bytes(
    tmp_path, finished, seed
):
    chooser = random.Random(seed)
    out = RunLayout(tmp_path / "out")
    shutil.copytree(finished.with_parts.output_dir, out.output_dir)
    shard = finished.layout.shards()[0]
    shutil.copy(shard, out.shard(5))
    damaged = [chooser.choice(part_paths(out.parts_dir)), out.shard(5)]
    for path in damaged:
        flip_bit(path, chooser.randrange(8 * path.stat().st_size))
    result = run_embedding([finished.made.fasta], out.output_dir, finished.made.config, [CPU])
    assert result.state == "complete"
    assert sum(rank.sequences for rank in result.ranks) > 0
    assert out.embeddings.read_bytes() == finished.layout.embeddings.read_bytes()
