"""Standard input, saved once to a file named by its sha256: records are read by offset, and a run can resume."""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.data.reading.compressed import BLOCK_BYTES
from virnucpro.data.reading.input_files import DEFAULT_MAX_UNPACKED_BYTES
from virnucpro.errors import BadInputError, InputProblem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

    from virnucpro.run_layout import FolderLayout


def stdin_stream() -> BinaryIO:
    """Return standard input; BadInputError where it is a terminal, or closed."""
    remedy = "pipe a file into the command, as in: zcat FILE | virnucpro predict - -o OUT"
    if sys.stdin is None or sys.stdin.closed:
        raise _unusable("it is closed", remedy)
    if sys.stdin.isatty():
        raise _unusable("it is a terminal", remedy)
    return sys.stdin.buffer


def save_stream(stream: BinaryIO, layout: FolderLayout, *, most_bytes: int = DEFAULT_MAX_UNPACKED_BYTES) -> Path:
    """Save a stream to its end, and return the file; ``BadInputError`` where it has more than *most_bytes*."""
    digest = hashlib.sha256()
    folder = layout.unpacked_dir
    with durable.writing(folder), durable.temporary_name(folder / "stdin") as temporary:
        durable.make_folder(folder)
        with durable.NewFile(temporary) as file:
            for block in _blocks(stream, most_bytes):
                digest.update(block)
                file.write(block)
            file.sync()
        saved = layout.saved_stdin(digest.hexdigest())
        temporary.replace(saved)
        durable.sync_folder(folder)
    return saved


def _blocks(stream: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    num_bytes = 0
    while True:
        try:
            block = stream.read(BLOCK_BYTES)
        except OSError as error:
            raise _unusable(error.strerror or str(error), "save it to a file first") from error
        if not block:
            return
        num_bytes += len(block)
        if num_bytes > most_bytes:
            raise _unusable(f"more than {most_bytes} bytes", "save it to a file first, if you trust it")
        yield block


def _unusable(what: str, remedy: str) -> BadInputError:
    return BadInputError([InputProblem("standard input", None, what, remedy)])
