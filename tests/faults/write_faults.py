"""
A fault at the n-th step of writing, for every n: what may be on disk then, and that the next start finishes the run.

``fail_each_step`` and ``kill_at_steps`` return how often they tried and what they saw that was not promised.
"""

from __future__ import annotations

import os
import shutil
import signal
from typing import TYPE_CHECKING

from tests.fakes import hash_config
from tests.faults.forked import Ended, left_over, run_forked, small_input, state_of
from tests.predictions import hash_prediction, make_contigs, predict_forked, tables
from virnucpro.choices import ResultForm
from virnucpro.failpoints import ERRORS

if TYPE_CHECKING:
    from pathlib import Path

PROCESSES = ("MainProcess", "gpu_worker_0")
MOST_STEPS = 2000


class Trial:
    """One small input, the bytes that an undisturbed run writes for it, and a fresh folder for each try."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fasta = small_input(folder)
        self.config = hash_config()
        self.steps = self._trace()
        self.expected = (folder / "whole" / "embeddings.h5").read_bytes()

    def _trace(self) -> list[str]:
        """Run once undisturbed; return every step of every process, as ``process/step``."""
        trace = self.folder / "trace"
        ended = self.run(self.folder / "whole", f"*:0:trace:{trace}")
        assert ended.code == 0, ended.errors
        return trace.read_text().splitlines()

    def steps_of(self, process: str) -> int:
        """How many steps *process* takes in an undisturbed run."""
        return sum(step.startswith(f"{process}/") for step in self.steps)

    def run(self, out: Path, failpoint: str | None = None, **settings) -> Ended:
        return run_forked(self.fasta, out, self.config, failpoint=failpoint, **settings)

    def is_whole(self, out: Path) -> bool:
        """Whether the folder holds the bytes of an undisturbed run."""
        result = out / "embeddings.h5"
        return result.exists() and result.read_bytes() == self.expected

    def is_absent_or_whole(self, out: Path) -> bool:
        """Whether the result's name does not exist, or holds the whole result."""
        return not (out / "embeddings.h5").exists() or self.is_whole(out)

    def check_interrupted(self, out: Path, ended: Ended) -> list[str]:
        """What is wrong with the folder after a fault, and with the next start; the folder is removed."""
        wrong = []
        if not self.is_absent_or_whole(out):
            wrong.append("the final name holds something else than the whole result")
        if "Traceback" in ended.errors or "Exception ignored" in ended.errors:
            wrong.append(f"a traceback: {ended.errors}")
        again = self.run(out)
        if again.code != 0 or not self.is_whole(out):
            wrong.append(f"the next start ended with {again.code}: {again.errors}")
        wrong += [f"{name} was left" for name in left_over(out)]
        shutil.rmtree(out)
        return wrong


class ShardedTrial(Trial):
    """The same with a result in shards, as many as the test has made it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fasta = small_input(folder)
        self.config = hash_config()
        self.steps = self._trace()
        self.expected = self.files_of(folder / "whole")

    def run(self, out: Path, failpoint: str | None = None, **settings) -> Ended:
        return run_forked(self.fasta, out, self.config, failpoint=failpoint, result_form=ResultForm.SHARDED, **settings)

    @staticmethod
    def files_of(out: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (out / "embeddings").glob("*") if path.suffix != ".tmp"}

    def is_whole(self, out: Path) -> bool:
        return self.files_of(out) == self.expected

    def is_absent_or_whole(self, out: Path) -> bool:
        """Whether the index of the ids, without which shards are none, is not there, or the whole result is."""
        return not (out / "embeddings" / "ids.index").exists() or self.is_whole(out)


class PredictionTrial(Trial):
    """A small prediction: three contigs, all its tables."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fasta = folder / "in.fa"
        make_contigs(self.fasta, count=2)
        self.config = hash_prediction(folder, contig_model=True)
        steps = self._trace()
        of_workers = [step for step in steps if not step.startswith("MainProcess/")]
        # two workers of one name, one after the other: what is armed is armed in each, and the first one gets there
        self.steps = [step for step in steps if step.startswith("MainProcess/")] + of_workers[: len(of_workers) // 2]
        self.expected = tables(folder / "whole")

    def run(self, out: Path, failpoint: str | None = None, **settings) -> Ended:
        return predict_forked([self.fasta], out, self.config, failpoint=failpoint, **settings)

    def is_whole(self, out: Path) -> bool:
        """Every table, frame and viral contig as an undisturbed run writes them, and the report beside them."""
        try:
            return tables(out) == self.expected and (out / "report.html").exists()
        except FileNotFoundError:
            return False

    def is_absent_or_whole(self, out: Path) -> bool:
        """No name that holds a part of what belongs there, unless the run says that it is partial."""
        if state_of(out) == "partial":
            return True
        found = {name: out / name for name in self.expected}
        return all(not path.exists() or path.read_bytes() == self.expected[name] for name, path in found.items())


def fail_each_step(trial: Trial, action: str, *, step: int = 1, lasting: bool = False) -> tuple[int, list[str]]:
    """
    Let the n-th step of the parent, then of the worker, fail with *action*, for n = 1, 1 + step, ... until none fails.

    Returns:
        How often that was tried, and each violation in words.
    """
    tries, violations = 0, []
    for process in PROCESSES:
        for number in range(1, MOST_STEPS, step):
            out = trial.folder / f"{action}_{process}_{number}"
            claim = out.with_name(f"{out.name}.claim")
            spec = f"{process}/*:{number}+:{action}" if lasting else f"{process}/*:{number}:{action}:{claim}"
            ended = trial.run(out, spec)
            if number > trial.steps_of(process) if lasting else not claim.exists():
                break
            tries += 1
            where = f"{process}, step {number}, {action}: "
            step_name = [name for name in trial.steps if name.startswith(f"{process}/")][number - 1]
            # a worker's last steps may fail when every row is safe; what is only tidied up may stay; and figures of the
            # run that cannot be written are said, and cost nothing else
            may_end_well = process != "MainProcess" or step_name.endswith("file.unlink")
            may_end_well = may_end_well or "telemetry.not_written" in ended.errors
            wrong = _wrong_after_error(trial, out, ended, action, lasting=lasting)
            if ended.code == 0 and not may_end_well:
                wrong.append(f"the error of {step_name} was swallowed: exit 0")
            violations += [where + what for what in wrong + trial.check_interrupted(out, ended)]
    return tries, violations


def _wrong_after_error(trial: Trial, out: Path, ended: Ended, action: str, *, lasting: bool) -> list[str]:
    wrong = []
    if ended.code == 0 and not trial.is_whole(out):
        wrong.append("exit 0 without a result")
    if ended.code not in (0, 73):
        wrong.append(f"exit {ended.code}: {ended.errors}")
    if ended.code == 73 and os.strerror(ERRORS[action]) not in ended.errors.splitlines()[-1]:
        wrong.append(f"the last line does not say why: {ended.errors}")
    if not lasting and state_of(out) == "running":
        wrong.append("run.json says that it runs")
    return wrong


def kill_at_steps(trial: Trial, choose) -> tuple[int, list[str]]:
    """
    Kill the process at steps of each name, those that *choose* picks of their numbers.

    Returns:
        How often that was tried, and each violation in words.
    """
    tries, violations = 0, []
    for name in sorted(set(trial.steps)):
        for number in choose(trial.steps.count(name)):
            out = trial.folder / f"kill_{name.replace('/', '_')}_{number}"
            claim = out.with_name(f"{out.name}.claim")
            ended = trial.run(out, f"{name}:{number}:kill:{claim}")
            if not claim.exists():
                violations.append(f"{name} {number} was not reached")
                continue
            tries += 1
            of_parent = name.startswith("MainProcess/")
            if ended.code != -signal.SIGKILL if of_parent else ended.code not in (0, 3, 70):
                violations.append(f"{name} {number}: exit {ended.code}: {ended.errors}")
            violations += [f"{name} {number}: {what}" for what in trial.check_interrupted(out, ended)]
    return tries, violations
