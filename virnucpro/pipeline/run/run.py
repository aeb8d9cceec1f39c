"""
What every run does with its folder: begin, resume or refuse, reserve space, start from scratch, note a failure.

Embeddings, predictions and trainings differ in what they compute and which files they write, not in this: ``prepare``
is the order of the one preparation, and each of them a ``Preparation``. The functions expect that the caller holds the
folder's lock.
"""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from virnucpro import durable
from virnucpro.cost import Cost
from virnucpro.data.reading.input_files import hash_content, input_name, open_regular
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import BadInputError, DiskSpaceError, OutputError, ResultError, SettingsChangedError, StoppedError
from virnucpro.run_layout import RunLayout
from virnucpro.store import schema
from virnucpro.store.locks.run_lock import RunLock
from virnucpro.store.locks.worker_lock import taking_part
from virnucpro.store.manifest import Manifest, RunManifest, read_manifest
from virnucpro.store.parts import part_paths
from virnucpro.store.results.forms import FORMS, existing_results, remove_results, remove_unfinished_results
from virnucpro.telemetry.run_telemetry import RunTelemetry
from virnucpro.telemetry.show.progress import QuietView
from virnucpro.telemetry.show.status_file import read_status

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from virnucpro.choices import ResultForm
    from virnucpro.config import InputRules
    from virnucpro.cost import CostRow
    from virnucpro.run_layout import FolderLayout

MANIFEST_BYTES = 1 << 20
"""Reserved for the last manifest of a run."""


def new_run_id() -> str:
    """Return an identifier for one start of a run."""
    return uuid.uuid4().hex[:12]


@contextmanager
def running(layout: FolderLayout, telemetry: RunTelemetry | None) -> Iterator[tuple[str, RunTelemetry]]:
    """
    Hold a folder, and show the run in it, for the time of the block; ``RunLockedError`` where another run holds it.

    Yields the identifier of this start, and what shows the run: *telemetry*, or one of its own, which leaves metrics
    and status in the folder, and reports failures on standard error. At the end ``run.json`` gets what all starts in
    the folder cost. A run within another is shown, and counted, as part of it.
    """
    run_id = new_run_id()
    with (
        durable.surroundings_named(layout.output_dir),
        RunTelemetry(views=[QuietView()]) if telemetry is None else nullcontext(telemetry) as shown,
        RunLock(layout.lock, run_id=run_id),
    ):
        if shown.is_running:
            yield run_id, shown
            return
        shown.cost_before = cost_so_far(layout)

        def note() -> None:
            has_begun = read_manifest(layout.manifest).run_id == run_id
            note_cost(layout, (*shown.cost_before, *(shown.cost() if has_begun else ())))

        try:
            with shown.running(layout, run_id):
                yield run_id, shown
        except BaseException:
            with suppress(OutputError, ResultError):  # the run was refused, or the disk is full
                note()
            raise
        note()


def cost_so_far(layout: FolderLayout) -> tuple[CostRow, ...]:
    """Return what the starts in a folder cost, of one that was killed up to its last status."""
    with suppress(ResultError):
        if (status := read_status(layout.live_status)) is not None:
            return (*status.snapshot.cost_before, *status.snapshot.cost)
    with suppress(ResultError):
        return read_manifest(layout.manifest).cost.rows
    return ()


def note_cost(layout: FolderLayout, rows: Iterable[CostRow]) -> None:
    """Note in ``run.json`` what the run cost, unless it says so already."""
    manifest, cost = read_manifest(layout.manifest), Cost.of(rows)
    if manifest.cost != cost:
        manifest.cost = cost
        manifest.write(layout.manifest)


@contextmanager
def failure_noted(layout: FolderLayout) -> Iterator[None]:
    """Note in ``run.json`` that the run failed, or was stopped, when the block ends with an error."""
    try:
        yield
    except BaseException as error:
        was_stopped = isinstance(error, StoppedError) or not isinstance(error, Exception)
        with suppress(OutputError, ResultError):  # the disk may be what failed; the error itself is what counts
            note_end(layout, "stopped" if was_stopped else "failed")
        raise
    finally:
        sweep(layout)


def note_end(layout: FolderLayout, state: str) -> None:
    """Note in ``run.json`` that the run ended just now, in *state*; ``ResultError`` where it cannot be read."""
    if isinstance(layout, RunLayout):
        with suppress(OutputError):
            release_space(layout)
    manifest = read_manifest(layout.manifest)
    manifest.end(state)
    manifest.write(layout.manifest)


# --- may the run resume what the folder holds? ------------------------------------------------------------------------

M = TypeVar("M", bound=Manifest)
Source = TypeVar("Source")


class Preparation(ABC, Generic[M, Source]):
    """What a kind of run with manifest *M* has of its own; *Source* is what it reads of its input."""

    manifest_type: type[M]
    layout: FolderLayout
    inputs: Sequence[str | Path]
    """Files that a resumed run must have again, with the same paths and content."""

    def earlier(self, *, restart: bool) -> M | None:  # noqa: ARG002
        """Return the manifest in the folder, if there is one that counts; ``ResultError`` for another kind of run."""
        return self.manifest_type.read(self.layout.manifest) if self.layout.manifest.exists() else None

    def adopt(self, earlier: M | None) -> None:
        """Take over what the earlier run found or was asked for; None: it is not resumed."""

    @abstractmethod
    def foreign(self, earlier: M | None) -> Iterable[Path]:
        """Return the files that the run would write over, although no earlier run was to write them."""

    @abstractmethod
    def read_input(self) -> Source:
        """Read the input, or raise ``BadInputError``; removes nothing."""

    @abstractmethod
    def start_from_scratch(self, earlier: M, source: Source) -> None:
        """Remove what the folder holds of earlier runs, but not what *source* reads."""

    def resumes(self, earlier: M) -> bool:  # noqa: ARG002
        """Whether something that the earlier run computed is kept: then input and settings must be the same."""
        return True

    @abstractmethod
    def settings(self, earlier: M) -> dict[str, Any]:
        """Return what decides the bytes of the result, if the input is that of *earlier*."""

    def refuse_changes(self, earlier: M, settings: dict[str, Any]) -> None:
        """Raise ``SettingsChangedError``, which names all that differ, unless the settings are the earlier run's."""
        if differences := _differences(earlier.settings, settings):
            raise SettingsChangedError(self.layout.output_dir, differences)

    @abstractmethod
    def is_finished(self, earlier: M) -> bool:
        """Whether the folder holds the complete, undamaged result of the settings."""

    @abstractmethod
    def begin(self, source: Source, earlier: M | None) -> M:
        """Write the manifest of a run that is to compute, and return it."""


def prepare(kind: Preparation[M, Source], *, restart: bool) -> tuple[M, Source] | tuple[M, None]:
    """
    Return the manifest of a run that is begun or resumed, and its input; or of a finished one, and None.

    Nothing is removed before the input is known to be fit, and no file of another owner is written over.

    Raises:
        BadInputError: The input cannot be used; names every problem.
        SettingsChangedError: The folder holds a run of other input or settings.
        OutputError: The folder cannot be written, or holds files that no run wrote.
        ResultError: The folder holds another kind of run.
    """
    earlier, source = kind.earlier(restart=restart), None
    kind.adopt(None if restart else earlier)
    if restart and earlier is not None:
        source = kind.read_input()
        kind.start_from_scratch(earlier, source)
        earlier = None
    for path in kind.foreign(earlier):
        if os.path.lexists(path):
            raise OutputError(path, "there is such a file, and no run.json that tells whose: use another folder")
    if earlier is not None and kind.resumes(earlier):
        settings = kind.settings(earlier)
        is_same = _is_same_input(kind, earlier, settings)
        kind.refuse_changes(earlier, settings)
        if is_same and kind.is_finished(earlier):
            sweep(kind.layout)
            return earlier, None
    source = kind.read_input() if source is None else source
    sweep(kind.layout)
    return kind.begin(source, earlier), source


def _is_same_input(kind: Preparation[M, Source], earlier: M, settings: dict[str, Any]) -> bool:
    """
    Raise ``SettingsChangedError`` where paths or content of the input are not the earlier run's.

    False where a file cannot be read: reading the input reports it. *settings* that differ are named as well.
    """
    before = [(input_name(item["path"]), item["sha256"]) for item in earlier.inputs]
    try:
        now = [(input_name(item["path"]), item["sha256"]) for item in map(about_file, kind.inputs)]
    except BadInputError:
        return False
    others = _differences(earlier.settings, settings)
    for number, name in enumerate(("input", "sha256 of the input")):
        was, is_now = ([item[number] for item in items] for items in (before, now))
        if was != is_now:
            raise SettingsChangedError(kind.layout.output_dir, {name: (was, is_now), **others})
    return True


def is_intact(path: Path, sha256: str) -> bool:
    try:
        return path.is_file() and durable.sha256_of(path) == sha256
    except OSError:
        return False


def all_intact(output_dir: Path, files: dict[str, str]) -> bool:
    """Whether every file of a manifest is as it was recorded."""
    return all(is_intact(output_dir / name, sha256) for name, sha256 in files.items())


def _differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[object, object]]:
    keys = sorted(set(before) | set(now))
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


# --- what the run reads -----------------------------------------------------------------------------------------------


def about_file(path: str | Path) -> dict[str, Any]:
    """Return what ``run.json`` holds of an input file; ``BadInputError`` where it cannot be read."""
    with open_regular(os.fspath(path)) as descriptor:
        size, sha256 = hash_content(descriptor)
    return {"path": os.path.realpath(path), "size_bytes": size, "sha256": sha256}


def about_indexed(index: SequenceIndex) -> list[dict[str, Any]]:
    """Return what ``run.json`` holds of the files of an index."""
    return [{"path": file.real_path, "size_bytes": file.size_bytes, "sha256": file.sha256} for file in index.files]


def ensure_index(
    layout: FolderLayout, path: Path, input_files: Sequence[str | Path], rules: InputRules
) -> SequenceIndex:
    """Return the index at *path* of the input, made unless it is there; a refused input leaves nothing behind."""
    try:
        return SequenceIndex.ensure(input_files, path, unpack_dir=layout.unpacked_dir, rules=rules)
    except BadInputError:
        if not layout.manifest.exists():  # no earlier run needs what was unpacked
            remove_unpacked(layout)
        raise
    except OutputError:
        durable.remove_strays(layout.unpacked_dir)  # of a run that was killed: they may be what fills the disk
        raise


# --- the space of a result --------------------------------------------------------------------------------------------


def take_space(layout: RunLayout, index: SequenceIndex, *, hidden_dim: int, result_form: ResultForm) -> None:
    """
    Reserve the space of an embedding run's result by a file of that size; ``DiskSpaceError`` where it does not fit.

    Whatever else fills the disk meanwhile, the result and the last manifest still fit. File systems without
    reservation of space (and those that copy or compress on write) promise nothing; writing fails cleanly there.

    While shards are sealed every computed row is on disk twice, in parts and in shards; the result comes beside them.
    What the folder holds of parts and shards already is not needed again.

    A *hidden_dim* of 0, where only the checkpoint knows the width of a row, counts only the ids.
    """
    release_space(layout)
    num_unique = int(np.count_nonzero(index.representatives[:] == np.arange(len(index))))
    result_bytes = FORMS[result_form].bytes_at_most(len(index), hidden_dim, id_bytes=index.id_bytes)
    rows_bytes = schema.bytes_at_most(num_unique, hidden_dim, id_bytes=index.id_bytes)
    finished_bytes = sum(path.stat().st_size for path in [*layout.shards(), *part_paths(layout.parts_dir)])
    needed_bytes = result_bytes + max(rows_bytes, 2 * rows_bytes - finished_bytes) + MANIFEST_BYTES
    disk = os.statvfs(layout.work_dir)
    available_bytes = disk.f_bavail * disk.f_frsize
    if needed_bytes > available_bytes:
        raise DiskSpaceError(layout.output_dir, needed_bytes=needed_bytes, available_bytes=available_bytes)
    try:
        with durable.NewFile(layout.reservation) as file:
            file.reserve(result_bytes + MANIFEST_BYTES)
    except OSError as error:
        release_space(layout)
        raise OutputError(layout.output_dir, error.strerror or str(error)) from error


def give_way_to_result(layout: RunLayout, num_bytes: int) -> None:
    """Free *num_bytes* of the reservation: a file of that size is written next."""
    with durable.writing(layout.reservation), suppress(FileNotFoundError):
        reserved_bytes = layout.reservation.stat().st_size
        os.truncate(layout.reservation, max(MANIFEST_BYTES, reserved_bytes - num_bytes))


def release_space(layout: RunLayout) -> None:
    """Free all that is still reserved: the last manifest is written next."""
    durable.remove(layout.reservation)


# --- what is removed --------------------------------------------------------------------------------------------------


def sweep(layout: FolderLayout) -> None:
    """Remove what processes that have ended left half written; the input, where there is one, has been accepted."""
    for folder in (layout.output_dir, layout.work_dir, layout.unpacked_dir):
        durable.remove_strays(folder)
    if isinstance(layout, RunLayout):
        durable.remove_strays(layout.parts_dir)
        if layout.manifest.exists():  # else their owner is unknown
            with suppress(OutputError):  # they are written over then
                remove_unfinished_results(layout)


def remove_unpacked(layout: FolderLayout) -> None:
    """Remove the unpacked inputs and, where nothing else is in them, their folder and ``work/``."""
    with suppress(OutputError):
        for path in layout.unpacked():
            durable.remove(path)
    durable.remove_strays(layout.unpacked_dir)
    durable.remove_empty(layout.unpacked_dir)
    durable.remove_empty(layout.work_dir)


def remove_files(
    layout: FolderLayout, files: Iterable[Path], *, keep: Collection[Path] = (), with_manifest: bool = True
) -> None:
    """
    Remove *files* of a run but those that the next one reads, *keep* (absolute), and then its manifest.

    The manifest goes last: as long as it exists, the files are known to be of a run.
    """
    removed = [path for path in files if path.absolute() not in keep and path.resolve() not in keep]
    for path in removed:
        durable.remove(path)
    with durable.writing(layout.output_dir):
        for folder in {path.parent for path in removed}:
            if folder.is_dir():
                durable.sync_folder(folder)  # with the manifest still there, whatever of this lasts
    if with_manifest:
        durable.remove(layout.manifest)


def unknown_results(layout: RunLayout) -> list[Path]:
    """Return the results in a folder without a manifest: their owner is unknown."""
    if layout.manifest.exists():
        return []
    results = [path for which in (False, True) for path in existing_results(layout, is_partial=which)]
    return [path for path in (*results, layout.failed_sequences) if path.exists()]


def start_from_scratch(layout: RunLayout, *, index: SequenceIndex | None = None) -> None:
    """
    Remove what a folder holds of earlier embedding runs, and nothing else that may be in it.

    *index* stays, with what it reads: it is that of the next run, and was made first, so that an input that cannot be
    used removes nothing. A folder whose result has no manifest is not touched, and preparing the run refuses it.
    """
    if layout.manifest.exists():
        RunManifest.read(layout.manifest)
    elif unknown_results(layout):
        return
    for is_partial in (False, True):
        remove_results(layout, is_partial=is_partial)
    needed = set() if index is None else {layout.index.absolute(), *(Path(file.read_path) for file in index.files)}
    files = [
        layout.failed_sequences,
        *layout.shards(),
        *part_paths(layout.parts_dir),
        *layout.unpacked(),
        layout.index,
        *layout.worker_logs(),
        layout.reservation,
        layout.metrics_textfile,
        layout.trace,
    ]
    remove_files(layout, files, keep=needed)


def remove_run(layout: RunLayout) -> None:
    """Remove a whole embedding run within a folder locked by the caller, as ``start_from_scratch`` does."""
    if not layout.output_dir.is_dir():
        return
    start_from_scratch(layout)
    durable.remove_tree(layout.shared_rows_dir)
    folders = (layout.parts_dir, layout.unpacked_dir, layout.worker_locks_dir, layout.work_dir, layout.log_dir)
    with taking_part(layout.output_dir):
        for folder in (layout.output_dir, *folders):
            durable.remove_strays(folder)
    for path in (*layout.worker_locks(), layout.live_status, layout.lock):
        durable.remove(path)
    for folder in (*folders, layout.output_dir):
        durable.remove_empty(folder)
