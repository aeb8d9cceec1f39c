"""
Checks that this host sees the same run as the others; the first act of each device task.

Quick checks, in well under ten seconds even when the file system hangs: folder, versions, write access, sizes of the
input, and a sample of records against the index. Then the whole input is hashed, once for each host, unless it is so
large that devices would wait: workers compare every record that they read with the index anyway.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from virnucpro import durable
from virnucpro.config import computing_versions
from virnucpro.errors import ExitCode, HostCheckError, OutputError, VirNucProError
from virnucpro.pipeline.hosts.host_memory import sha256_once
from virnucpro.pipeline.work.unit_claims import read_units
from virnucpro.store.manifest import RunManifest
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from virnucpro.data.index.build import IndexedFile
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.pipeline.run.run_preparation import PreparedRun

QUICK_S = 8.0
"""Seconds for the quick checks; a hanging file system takes longer."""
SAMPLE = 64
"""Records of the input that are checked."""
HASHED_BYTES = 4 << 30
"""Largest input that is hashed as a whole."""
SLOW_BYTES_A_S = 20 << 20
"""Least rate (bytes/s) at which a host reads the input while all others do."""


def check_host(run: PreparedRun, owner: str) -> str:
    """Check that this host can take part in *run*, and return its name."""
    problems: list[BaseException] = []

    def check_quickly() -> None:
        try:
            _check_folder(run)
            _check_writing(run, owner)
            _check_input(run)
        except BaseException as error:  # noqa: BLE001  # raised below, in the waiting thread
            problems.append(error)

    thread = threading.Thread(target=check_quickly, name="host-check", daemon=True)
    thread.start()
    thread.join(QUICK_S)
    if problems:
        raise problems[0]
    if thread.is_alive():
        raise HostCheckError(host_name(), run.output_dir, f"did not answer for {QUICK_S:g} s: is it mounted?")
    _check_content(run)
    return host_name()


def hashing_s(run: PreparedRun) -> float:
    """Return the seconds that a host may take to hash the input."""
    return min(sum(file.read_size_bytes for file in run.open_index().files), HASHED_BYTES) / SLOW_BYTES_A_S


def _check_folder(run: PreparedRun) -> None:
    """Check that the folder is the one of this run, prepared with the versions installed here."""
    host, layout = host_name(), run.layout
    try:
        units = read_units(layout.units(run.run_id).folder)
        settings = RunManifest.read(layout.manifest).settings
    except VirNucProError as error:
        what = f"is not the output folder of this run ({error}): every host needs the same folder under the same path"
        raise HostCheckError(host, layout.output_dir, what) from error
    if units.run_id != run.run_id:
        raise HostCheckError(host, layout.output_dir, f"holds another run ({units.run_id} instead of {run.run_id})")
    for name, here in computing_versions().items():
        if settings.get(name) != here:
            what = f"the run's {name} is {settings.get(name)}, but here it is {here}: last bits would differ"
            raise HostCheckError(host, layout.manifest, what)


def _check_writing(run: PreparedRun, owner: str) -> None:
    """Check that a file can be written, renamed and removed in the folder."""
    path = run.layout.host_check(owner)
    try:
        durable.write_bytes(path, owner.encode())
        durable.remove(path)
    except OutputError as error:
        what = f"cannot be written to ({error.what})"
        raise HostCheckError(host_name(), run.output_dir, what, exit_code=ExitCode.CANNOT_WRITE) from error


def _check_input(run: PreparedRun) -> None:
    """Check sizes of the input files and a sample of their records."""
    host = host_name()
    try:
        index = run.open_index()
    except VirNucProError as error:
        raise HostCheckError(host, run.layout.index, str(error)) from error
    for file in index.files:
        try:
            size_bytes = Path(file.read_path).stat().st_size
        except OSError as error:
            what = f"cannot be read ({error.strerror}): every host needs the input under the same path"
            raise HostCheckError(host, file.read_path, what) from error
        if size_bytes != file.read_size_bytes:
            what = f"has {size_bytes:,} bytes, but the run's input has {file.read_size_bytes:,}: it is another file"
            raise HostCheckError(host, file.read_path, what)
    _check_sample(index, host)


def _check_sample(index: SequenceIndex, host: str) -> None:
    for position in np.unique(np.linspace(0, len(index) - 1, SAMPLE).astype(np.int64)).tolist() if len(index) else ():
        try:
            index.read(position)
        except (VirNucProError, OSError) as error:
            what = "its content is not that of the run's input: it is another file of the same size"
            raise HostCheckError(host, index.path_of(position), what) from error


def _check_content(run: PreparedRun) -> None:
    files: dict[str, IndexedFile] = {file.read_path: file for file in run.open_index().files}
    if sum(file.read_size_bytes for file in files.values()) > HASHED_BYTES:
        return
    for path, file in files.items():
        try:
            sha256 = sha256_once(Path(path), run_id=run.run_id)
        except OSError as error:
            raise HostCheckError(host_name(), path, f"cannot be read ({error.strerror})") from error
        if sha256 != file.read_sha256:
            what = f"has sha256 {sha256}, but the run's input has {file.read_sha256}: it is another file"
            raise HostCheckError(host_name(), path, what)
