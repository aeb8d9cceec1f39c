"""Ranks of different speed finish together: blocks of the slow one are given to the fast one."""

from __future__ import annotations

import json
import random
import time

from tests import fakes
from tests.faults.processes import RowsFound, compare_rows, make_proteins
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding

FAST_S, SLOW_S = 0.1, 0.3
"""Seconds that a batch takes."""


def test_a_rank_of_a_third_of_the_speed_finishes_with_the_other(tmp_path, seed):
    sequences = make_proteins(tmp_path / "in.fasta", random.Random(seed), 150)
    (tmp_path / "seconds.json").write_text(json.dumps([FAST_S, SLOW_S]))
    config = fakes.hash_config(
        loader="tests.fakes:load_model_of_uneven_ranks", weights_path=str(tmp_path / "seconds.json")
    )
    finished = {0: [], 1: []}

    def on_message(rank, message):
        if message.get("kind") == "progress":
            finished[rank].append((time.monotonic(), message["block"]))

    result = run_embedding([tmp_path / "in.fasta"], tmp_path / "out", config, [CPU] * 2, on_message=on_message)
    assert result.state == "complete"
    assert compare_rows(tmp_path / "out", sequences) == RowsFound()
    blocks = [block for done in finished.values() for _, block in done]
    assert len(blocks) == len(set(blocks)), "no block is computed twice"
    apart_s = abs(finished[0][-1][0] - finished[1][-1][0])
    print(f"{len(finished[0])} and {len(finished[1])} blocks, finished {apart_s:.2f} s apart")
    assert len(finished[1]) < len(finished[0])
    assert len(finished[1]) > 1
    assert apart_s < 3 * SLOW_S
