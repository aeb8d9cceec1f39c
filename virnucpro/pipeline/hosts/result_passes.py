"""
The sharded result of a run over several hosts, made by all of them: one pass after the other over its files.

The parts and shards of the ranks are checked, the shards of the result written, then validated, most of them by
another host than wrote them. Hosts claim the files of a pass in the shared folder, as they claim units of the
embedding. The driver takes part and needs no host. It alone holds the folder's lock and moves what a host has written
to its place, so that a host that wakes up late does no harm. The driver rechecks every file that a host reports as bad.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import structlog

from virnucpro import durable
from virnucpro.errors import OutputError, ResultError, SourceGoneError, VirNucProError
from virnucpro.pipeline.hosts.host_watch import watching_driver
from virnucpro.pipeline.shard_aggregator import ResultRows, RowsOfInput
from virnucpro.pipeline.work.unit_claims import UnitClaims, UnitSource, new_owner, numbers_in, read_units, write_units
from virnucpro.run_layout import UnitsLayout
from virnucpro.store.locks.lease import LEASE_S, Lease
from virnucpro.store.manifest import read_object
from virnucpro.store.parts import SealedBlocks
from virnucpro.store.results.hdf5 import ShardProof, Shards, write_file
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from virnucpro.pipeline.run.run_preparation import PreparedRun
    from virnucpro.store.results.result import NewRows

    Answer = dict[str, Any]

log = structlog.get_logger(__name__)

LOOK_S = 1.0
"""Seconds after which a host looks again for the next pass."""


class ResultPasses:
    """
    Context manager of the driver, which holds the folder's lock: the passes over the files of a result.

    *lease_s*: seconds without a heartbeat after which another host takes over a host's files.
    """

    def __init__(self, run: PreparedRun, *, lease_s: float = LEASE_S) -> None:
        self._run = run
        self._lease_s = lease_s
        self._layout = UnitsLayout(run.layout.units(run.run_id).result_dir)
        about = {"host": host_name(), "run_id": run.run_id}
        self._lease = Lease(self._layout.driver, about, lease_s=lease_s, is_kept=True)
        self._num_passes = 0

    def __enter__(self) -> Self:
        try:
            durable.make_folder(self._layout.folder)
        except OSError as error:
            raise OutputError(self._layout.folder, error.strerror or str(error)) from error
        self._lease.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._lease.__exit__()

    def end(self) -> None:
        """Tell every host to stop after its current file."""
        with suppress(OSError):  # else they stop because they miss our heartbeat
            self._lease.update(stopping=True)

    def check(self, paths: Sequence[Path]) -> dict[Path, bytes]:
        """
        Have parts and shards of ranks checked, every byte and number; return the seals of those that are right.

        Raises:
            OutputError: The folder cannot be written.
        """
        answers = self._through(_CHECK, {"paths": [str(path) for path in paths]}, len(paths))
        seals = ((path, answer["seal"]) for path, answer in zip(paths, answers, strict=True))
        return {path: bytes.fromhex(seal) for path, seal in seals if seal is not None}

    def write(self, rows: NewRows, bounds: Sequence[range], paths: Sequence[Path]) -> dict[Path, str]:
        """
        Have shards of these rows written; return the hex sha256 of each.

        Raises:
            OutputError: The system refused.
            SourceGoneError: A part or shard of a rank is no longer there.
        """
        layout = self._new_pass()
        try:
            durable.make_folder(layout.written_dir)
        except OSError as error:
            raise OutputError(layout.written_dir, error.strerror or str(error)) from error
        task = {"rows": rows.store(layout.folder), "bounds": [[one.start, one.stop] for one in bounds]}
        answers = self._through(_WRITE, task, len(bounds), layout)
        try:
            for item, path in enumerate(paths):
                durable.make_folder(path.parent)
                _written(layout, item).replace(path)
            durable.sync_folder(paths[0].parent)
        except OSError as error:
            raise OutputError(paths[0].parent, error.strerror or str(error)) from error
        return {path: str(answer["sha256"]) for path, answer in zip(paths, answers, strict=True)}

    def validate(self, proof: ShardProof) -> None:
        """
        Have the shards of a whole result validated.

        Raises:
            ResultError: Something does not hold; says what.
            OutputError: The folder cannot be written.
        """
        task = {
            "folder": str(proof.result.path),
            "rows_per_shard": proof.rows_per_shard,
            "files": dict(proof.expected.files or {}),
        }
        for number, answer in enumerate(self._through(_VALIDATE, task, len(proof))):
            if not answer["holds"]:
                proof.check(number)

    def _new_pass(self) -> UnitsLayout:
        layout = UnitsLayout(self._layout.folder / f"{self._num_passes:06d}")
        self._num_passes += 1
        try:
            durable.make_folder(layout.folder)
        except OSError as error:
            raise OutputError(layout.folder, error.strerror or str(error)) from error
        return layout

    def _through(
        self, kind: str, task: Mapping[str, Any], num_items: int, layout: UnitsLayout | None = None
    ) -> list[Answer]:
        """Do a pass with the hosts that take part; return the answer to each item."""
        layout = self._new_pass() if layout is None else layout
        durable.write_bytes(layout.task, json.dumps({"kind": kind, **task}).encode())
        write_units(
            layout.folder,
            run_id=self._run.run_id,
            plan_fingerprint="",
            blocks=range(num_items),
            tokens=np.ones(num_items, dtype=np.int64),
            devices=self._run.world_size + 1,
            lease_s=self._lease_s,
        )
        ours = _take_part(self._run, layout, threading.Event())
        log.info("result_passes.done", kind=kind, files=num_items, here=ours)
        return [read_object(layout.answer(item)) for item in range(num_items)]


def help_with_result(run: PreparedRun, *, stop: threading.Event | None = None, lease_s: float = LEASE_S) -> int:
    """
    Take part in making the result of a run until its driver says that it is done, or is gone.

    Args:
        run: As its driver has prepared it, under a path that leads to the same folder here.
        stop: Set it to stop after the current file.
        lease_s: Seconds without a heartbeat after which the driver is gone.

    Returns:
        Files that were checked, written or validated here.

    Raises:
        OutputError: The folder cannot be written.
        ResultError: It is not the one that the driver has.
    """
    stop = threading.Event() if stop is None else stop
    layout = UnitsLayout(run.layout.units(run.run_id).result_dir)
    num_done = num_passes = 0
    with watching_driver(layout.driver, stop, lease_s=lease_s):
        while not stop.is_set():
            if num_passes not in _begun(layout.folder):
                stop.wait(LOOK_S)
                continue
            try:
                num_done += _take_part(run, UnitsLayout(layout.folder / f"{num_passes:06d}"), stop)
            except SourceGoneError as error:  # the driver will see that, too, and start another pass
                log.info("result_passes.source_gone", source=Path(error.path).name)
            num_passes += 1
    return num_done


def _begun(folder: Path) -> set[int]:
    """Return the numbers of the passes that have begun; none where the run has removed them."""
    try:
        found = numbers_in(folder, refresh=True)
    except OSError:
        return set()
    return {number for number in found if UnitsLayout(folder / f"{number:06d}").plan.is_file()}


def _take_part(run: PreparedRun, layout: UnitsLayout, stop: threading.Event) -> int:
    """Do files of a pass until all are done, here or elsewhere; return how many were done here."""
    task = read_object(layout.task)
    do = _KINDS[task["kind"]](run, layout, task)
    owner, num_done = new_owner(), 0
    about = {"host": host_name(), "pid": os.getpid()}
    with Lease(layout.owner(owner), about, lease_s=read_units(layout.folder).lease_s):
        claims = UnitClaims(UnitSource(layout.folder, owner))
        try:
            while (unit := claims.wait(stop)) is not None:
                for item in unit.blocks:
                    if stop.is_set():
                        break
                    durable.write_bytes(layout.answer(item), json.dumps(do(item)).encode())
                    claims.mark_durable([item])
                    num_done += 1
        finally:
            _release(claims)
    return num_done


def _release(claims: UnitClaims) -> None:
    try:
        claims.release()
    except VirNucProError as error:  # the folder is gone, or the claims are free once our lease has expired
        log.warning("units.not_released", reason=str(error))


def _checker(_: PreparedRun, __: UnitsLayout, task: Mapping[str, Any]) -> Callable[[int], Answer]:
    def check(item: int) -> Answer:
        try:
            source = SealedBlocks.open(Path(task["paths"][item]))
            source.check()
        except (ResultError, SourceGoneError, OSError):
            return {"seal": None}
        return {"seal": source.seal.hex()}

    return check


def _writer(run: PreparedRun, layout: UnitsLayout, task: Mapping[str, Any]) -> Callable[[int], Answer]:
    rows = ResultRows.stored(layout.folder, task["rows"], run.open_index())

    def write(item: int) -> Answer:
        path = _written(layout, item)
        write_file(path, rows.subset(range(*task["bounds"][item])))
        return {"sha256": durable.sha256_of(path)}

    return write


def _validator(run: PreparedRun, _: UnitsLayout, task: Mapping[str, Any]) -> Callable[[int], Answer]:
    index = run.open_index()
    expected = RowsOfInput(index, len(index), task["files"])
    proof = ShardProof(Shards(Path(task["folder"])), expected, rows_per_shard=task["rows_per_shard"])

    def validate(item: int) -> Answer:
        try:
            proof.check(item)
        except (ResultError, OSError):
            return {"holds": False}
        return {"holds": True}

    return validate


_CHECK, _WRITE, _VALIDATE = "check", "write", "validate"
_KINDS = {_CHECK: _checker, _WRITE: _writer, _VALIDATE: _validator}


def _written(layout: UnitsLayout, item: int) -> Path:
    return layout.written_dir / f"{item:06d}.h5"
