"""Another engine is one class: what it computes, resumes and loses is what the local processes do."""

from __future__ import annotations

import threading

import pytest

from tests import fakes
from virnucpro.config import RunLimits
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.executor import Executor
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.pipeline.work.rank_runner import run_worker


class ThreadRanks(Executor):
    """One thread a rank, each of which starts the rank's process and starts it again."""

    def compute(self, run, limits, telemetry, stop):
        self.recovery = recovery = run.recovery(limits, telemetry)

        def attempts(rank):
            run_worker(
                run.worker_fn,
                run.worker_args,
                rank=rank,
                policy=recovery,
                world_size=run.world_size,
                device=run.devices[rank.rank],
                stop=stop,
            )

        threads = [threading.Thread(target=attempts, args=(rank,)) for rank in recovery.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def outcomes(self):
        return list(self.recovery.ranks)

    def reasons(self):
        return self.recovery


@pytest.fixture
def proteins(tmp_path):
    path = tmp_path / "proteins.fasta"
    path.write_text("".join(f">p{n}\n{'ACDEFGHIKL' * (n % 3 + 1)}{'MN' * n}\n" for n in range(40)))
    return path


def test_another_engine_gives_the_same_bytes(tmp_path, proteins):
    config = fakes.hash_config()
    run_embedding([proteins], tmp_path / "here", config, [CPU] * 2)
    result = run_embedding([proteins], tmp_path / "threads", config, [CPU] * 2, executor=ThreadRanks())
    assert result.state == "complete"
    assert result.output_path.read_bytes() == (tmp_path / "here" / "embeddings.h5").read_bytes()


def test_it_restarts_a_rank_that_dies(tmp_path, proteins):
    config = fakes.faulty_config(tmp_path / "control.json", {"rank": 0, "how": "sigkill", "before_batch": 1})
    result = run_embedding([proteins], tmp_path / "out", config, [CPU] * 2, executor=ThreadRanks())
    assert result.state == "complete"
    assert sum(rank.attempts for rank in result.ranks) == 3


def test_what_it_loses_is_listed(tmp_path, proteins):
    config = fakes.faulty_config(
        tmp_path / "control.json", {"rank": 0, "how": "sigkill", "before_batch": 1, "times": 99}
    )
    limits = RunLimits(attempts=1)
    result = run_embedding([proteins], tmp_path / "out", config, [CPU], executor=ThreadRanks(), limits=limits)
    assert result.state in {"partial", "failed"}
    assert result.num_missing == result.num_records - result.num_rows > 0
