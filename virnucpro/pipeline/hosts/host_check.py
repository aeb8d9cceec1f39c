"""
Checks that this host sees the same run as the driver: folder, versions, input, weights.

All differences are named before anything is computed. The input is hashed once in a process, unless it is so large that
devices would wait: workers compare every record that they read with the index anyway.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from virnucpro import durable
from virnucpro.config import computing_versions
from virnucpro.errors import ConfigurationError, ExitCode, HostCheckError, OutputError, VirNucProError
from virnucpro.models.registry import resolve_model
from virnucpro.pipeline.run.run_preparation import PreparedRun
from virnucpro.store.locks.lease import read_lease
from virnucpro.store.manifest import RunManifest, read_manifest
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from virnucpro.config import ModelConfig
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.pipeline.work.work import Work

SAMPLE = 64
"""Records of the input that are compared with the index."""
HASHED_BYTES = 4 << 30
"""Largest input that is hashed as a whole."""


def check_host(run: Work) -> Work:
    """Return *run* with the path of its weights on this host; ``HostCheckError`` names what differs here."""
    check_folder(run)
    path = run.layout.host_check(f"{host_name()}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        durable.write_bytes(path, b"")
        durable.remove(path)
    except OutputError as error:
        what = f"cannot be written to ({error.what})"
        raise HostCheckError(host_name(), run.output_dir, what, exit_code=ExitCode.CANNOT_WRITE) from error
    try:
        index = run.open_index()
    except VirNucProError as error:
        raise HostCheckError(host_name(), run.layout.work_dir, str(error)) from error
    _check_versions(run, index)
    _check_input(index)
    return replace(run, model_config=weights_here(run.model_config)) if isinstance(run, PreparedRun) else run


def check_folder(run: Work) -> None:
    """Raise ``HostCheckError`` unless the folder is held by *run*."""
    here = read_lease(run.layout.lock).get("run_id")
    if here != run.run_id:
        what = (
            f"is not the output folder of this run (it belongs to {here or 'no run'}): every host needs the same folder"
        )
        raise HostCheckError(host_name(), run.output_dir, f"{what} under the same path")


def weights_here(config: ModelConfig) -> ModelConfig:
    """Return *config* with the weights' path on this host, downloaded once; ``HostCheckError`` where they differ."""
    if not config.weights_path:
        return config
    path = Path(config.weights_path)
    try:
        if path.is_file():
            sha256 = _sha256_of(path)
        else:
            resolved = resolve_model(config.model_name)
            path, sha256 = resolved.weights_path, resolved.weights_sha256
    except (ConfigurationError, OSError) as error:
        raise HostCheckError(host_name(), path, str(error)) from error
    if sha256 != config.weights_sha256:
        difference = f"has sha256 {sha256}, but the run's weights have {config.weights_sha256}"
        raise HostCheckError(host_name(), path, difference)
    return replace(config, weights_path=str(path))


def _check_versions(run: Work, index: SequenceIndex) -> None:
    manifest = read_manifest(run.layout.manifest)
    for name, here in computing_versions().items():
        if (recorded := manifest.settings.get(name, here)) != here:  # composition has no version of torch
            what = f"the run's {name} is {recorded}, but here it is {here}: last bits would differ"
            raise HostCheckError(host_name(), run.layout.manifest, what)
    plan = manifest.plan["fingerprint"] if isinstance(manifest, RunManifest) else None
    if isinstance(run, PreparedRun) and run.plan(index).fingerprint != plan:
        what = "this host plans other blocks than the run's driver: it needs the same version of this program"
        raise HostCheckError(host_name(), run.layout.manifest, what)


def _check_input(index: SequenceIndex) -> None:
    """Compare sizes of the input files, and every byte or, where that would take long, a sample of their records."""
    files = {file.read_path: file for file in index.files}
    is_hashed = sum(file.read_size_bytes for file in files.values()) <= HASHED_BYTES
    other = "its content is not that of the run's input: it is another file"
    for path, file in files.items():
        try:
            size_bytes = Path(path).stat().st_size
            if size_bytes != file.read_size_bytes:
                what = f"has {size_bytes:,} bytes, but the run's input has {file.read_size_bytes:,}: it is another file"
                raise HostCheckError(host_name(), path, what)
            if is_hashed and _sha256_of(Path(path)) != file.read_sha256:
                raise HostCheckError(host_name(), path, other)
        except OSError as error:
            what = f"cannot be read ({error.strerror}): every host needs the input under the same path"
            raise HostCheckError(host_name(), path, what) from error
    for position in (
        np.unique(np.linspace(0, len(index) - 1, SAMPLE).astype(np.int64)).tolist()
        if len(index) and not is_hashed
        else ()
    ):
        try:
            index.read(position)
        except (VirNucProError, OSError) as error:
            raise HostCheckError(host_name(), index.path_of(position), other) from error


def _sha256_of(path: Path) -> str:
    about = path.stat()
    return _remembered(path, about.st_ino, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=64)
def _remembered(path: Path, *_about: int) -> str:
    return durable.sha256_of(path)
