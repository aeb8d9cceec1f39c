"""
Disk space for a whole run, checked and reserved before anything is computed.

The space of the result is reserved by a file of that size: whatever else fills the disk meanwhile, the result and the
last manifest still fit. The file shrinks when the result is written, and goes when the manifest is closed. File systems
without reservation of space (and those that copy or compress on write) promise nothing; writing fails cleanly there.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from virnucpro import durable
from virnucpro.choices import ResultForm
from virnucpro.errors import DiskSpaceError, OutputError
from virnucpro.store import schema
from virnucpro.store.parts import part_paths
from virnucpro.store.results.forms import FORMS

if TYPE_CHECKING:
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.run_layout import RunLayout

MANIFEST_BYTES = 1 << 20
"""Reserved for the last manifest of a run."""


def take_space(
    layout: RunLayout, index: SequenceIndex, *, hidden_dim: int, result_form: ResultForm = ResultForm.SINGLE
) -> None:
    """
    Check that a run fits its disk, and reserve the space of its result.

    While shards are sealed every computed row is on disk twice, in parts and in shards; the result comes beside them.
    What the folder holds of parts and shards already is not needed again.

    A *hidden_dim* of 0, where only the checkpoint knows the width of a row, counts only the ids.

    Raises:
        DiskSpaceError: It does not fit.
        OutputError: The system refused for another reason.
    """
    release(layout)
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
        release(layout)
        raise OutputError(layout.output_dir, error.strerror or str(error)) from error


def give_way_to_result(layout: RunLayout, num_bytes: int) -> None:
    """
    Free *num_bytes* of the reservation: a file of that size is written next.

    Raises:
        OutputError: The system refused.
    """
    try:
        reserved_bytes = layout.reservation.stat().st_size
        os.truncate(layout.reservation, max(MANIFEST_BYTES, reserved_bytes - num_bytes))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise OutputError(layout.reservation, error.strerror or str(error)) from error


def release(layout: RunLayout) -> None:
    """
    Free all that is still reserved: the last manifest is written next.

    Raises:
        OutputError: The system refused.
    """
    durable.remove(layout.reservation)
