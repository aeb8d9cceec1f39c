"""The one way to open a text file that is no input of an index: alignments, tables, sequences for training."""

from __future__ import annotations

import io
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from virnucpro.data.reading.compressed import BLOCK_BYTES, MOST_START_BYTES, BlockFile, packing_of
from virnucpro.data.reading.input_files import DEFAULT_MAX_UNPACKED_BYTES, STDIN, open_regular, stream_blocks
from virnucpro.data.reading.standard_input import stdin_stream
from virnucpro.run_folders import read_at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST_HELD_TIMES = 100
"""Most times its size that a compressed file may unpack to where all of it is held; sequences need about four."""
_LEAST_HELD_BYTES = 64 << 20


@contextmanager
def open_text(path: str | Path, *, is_held: bool = False) -> Iterator[io.BufferedReader]:
    """
    Open a regular file, plain or compressed, or with ``-`` standard input, to be read once from its start.

    *is_held*: the caller holds all of it in memory; else it bounds its lines. ``BadInputError`` where the file cannot
    be opened, and while it is read where it is damaged, or unpacks to too many bytes.
    """
    name, most_bytes = os.fspath(path), DEFAULT_MAX_UNPACKED_BYTES
    if name == STDIN:
        file = io.BufferedReader(stdin_stream().raw, BLOCK_BYTES)  # type: ignore[attr-defined]
        blocks = stream_blocks(file, "standard input", most_bytes, packing_of(file.peek(MOST_START_BYTES)))
        yield io.BufferedReader(BlockFile(blocks), BLOCK_BYTES)
        return
    with open_regular(name) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
        if is_held:
            most_bytes = max(_LEAST_HELD_BYTES, MOST_HELD_TIMES * os.fstat(descriptor).st_size)
        blocks = stream_blocks(file, name, most_bytes, packing_of(read_at(descriptor, MOST_START_BYTES, 0)))
        yield io.BufferedReader(BlockFile(blocks), BLOCK_BYTES)
