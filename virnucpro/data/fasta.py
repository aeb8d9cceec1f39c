"""
The rules of a FASTA record: what an id may be, what a sequence may hold, and what is said when a rule is broken.

A record is read here in full strictness, in one piece or in several, and every fault names its line and column. What
comes out is the normalised sequence, the one that models see: upper case, without ASCII blanks and line ends, J
written as X, one stop at the end taken off. This module knows bytes and lines; it never opens a file.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

MAX_ID_BYTES = 1024
"""Bytes of an id at the most; it is a row of the result and a line of a table."""
MAX_HEADER_BYTES = 64 << 10
"""Bytes of a header line at the most, ``>`` left out."""

_SHOWN_ID_CHARACTERS = 80

LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Bytes that stand for residues, in either case: ESM-2 knows them all but J."""
BLANKS = b" \t\r\n"
"""Bytes that may stand inside a sequence and are removed. CR counts only at the end of a line."""
NORMALISE = bytes.maketrans(LETTERS.lower() + b"J", LETTERS.replace(b"J", b"X") + b"X")
"""Translation of residues: upper case, and J (leucine or isoleucine, unknown to ESM-2's alphabet) to X."""
PRINTABLE_ASCII = bytes(range(0x21, 0x7F))
"""The bytes of a plain id."""

_FAULTY_BYTE = re.compile(rb"[^A-Za-z \t\r\n]|\r(?!\n)")
_SPECIAL_TOKEN = re.compile(rb"<[A-Za-z_]{1,20}>")
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Zs", "Zl", "Zp"})
_CR_FAULT = ("CR line ends", "convert them with: tr '\\r' '\\n' < FILE > NEW_FILE")


class Fault(NamedTuple):
    """One broken rule."""

    line: int
    """1-based line."""
    what: str
    """What is wrong, without a full stop."""
    remedy: str
    """What the user can do about it."""


class Record(NamedTuple):
    """One record as read."""

    name: bytes
    """The id: the header up to its first space or tab."""
    sequence: bytes
    """Normalised residues; of no use where there is a fault."""
    fault: Fault | None
    """The first broken rule."""


class SequenceReader:
    """
    The sequence of one record, read in pieces of any size.

    A piece that is not the last one must not end between CR and LF.

    Attributes:
        residues: Normalised residues so far.
        fault: The first broken rule so far.
        mapped_j: J written as X so far.
        removed_blanks: Spaces and tabs removed so far.
    """

    def __init__(self, line: int) -> None:
        """Start at the beginning of *line*, 1-based."""
        self.residues = 0
        self.fault: Fault | None = None
        self.mapped_j = 0
        self.removed_blanks = 0
        self._line = line
        self._column = 1
        self._stop: Fault | None = None

    @property
    def stripped_stop(self) -> bool:
        """Whether a stop has been taken off the end."""
        return self._stop is not None and self.fault is None

    def feed(self, piece: bytes, *, last: bool) -> bytes:
        """Read the next piece; return its normalised residues. The *last* one may end in the CR of a CRLF cut short."""
        if last:
            piece = piece.removesuffix(b"\r")
        sequence = piece.translate(NORMALISE, BLANKS)
        if self._stop is not None or not sequence.isalpha() or _has_lone_cr(piece):
            residues = sequence.removesuffix(b"*")
            if self._stop is None and residues.isalpha() and not _has_lone_cr(piece):
                self._stop = self._fault_at(piece, piece.rindex(b"*"))
            else:
                self._inspect(piece)
            sequence = residues
        self.residues += len(sequence)
        if b"J" in piece or b"j" in piece:
            self.mapped_j += piece.count(b"J") + piece.count(b"j")
        if b" " in piece or b"\t" in piece:
            self.removed_blanks += piece.count(b" ") + piece.count(b"\t")
        last_line_end = piece.rfind(b"\n")
        self._line += piece.count(b"\n")
        self._column = len(piece) - last_line_end if last_line_end >= 0 else self._column + len(piece)
        return sequence

    def _inspect(self, piece: bytes) -> None:
        """Find the first fault of a piece that does not consist of letters alone."""
        if self.fault is not None:
            return
        if self._stop is not None and piece.strip(BLANKS):
            self.fault = self._stop
            return
        for match in _FAULTY_BYTE.finditer(piece):
            fault = self._fault_at(piece, match.start())
            if match[0] != b"*" or piece[match.end() :].strip(BLANKS):
                self.fault = fault
                return
            self._stop = fault

    def _fault_at(self, piece: bytes, at: int) -> Fault:
        line_end = piece.rfind(b"\n", 0, at)
        column = at - line_end if line_end >= 0 else self._column + at
        return Fault(self._line + piece.count(b"\n", 0, at), *_explain(piece[at : at + 24], column))


def read_record(record: bytes, line: int) -> tuple[Record, SequenceReader]:
    """
    Read one whole record.

    Args:
        record: From its ``>`` to just before the next one, line ends included.
        line: 1-based line of its header.

    Returns:
        The record, and the reader with its counts.
    """
    header, _, body = record.partition(b"\n")
    name, header_fault = read_header(header[1:], line)
    reader = SequenceReader(line + 1)
    sequence = reader.feed(body, last=True)
    return Record(name, sequence, header_fault or reader.fault or empty_fault(reader, line)), reader


def read_header(header: bytes, line: int) -> tuple[bytes, Fault | None]:
    """
    Read a header line.

    Args:
        header: The line without ``>`` and without its LF.
        line: Its 1-based number.

    Returns:
        The id, and the first broken rule.
    """
    header = header.removesuffix(b"\r")
    name = header.partition(b" ")[0].partition(b"\t")[0]
    broken = _header_fault(header, name)
    return name, None if broken is None else Fault(line, *broken)


def empty_fault(reader: SequenceReader, line: int) -> Fault | None:
    """Return the fault of a record that ended without a residue; *line* is that of its header."""
    if reader.residues:
        return None
    return Fault(line, "empty sequence", "add its residues or remove the record")


def shown_id(name: bytes) -> str | None:
    """Return an id as a message shows it: decoded as far as possible, cut to a readable length."""
    text = name.decode("utf-8", "replace")
    return (text if len(text) <= _SHOWN_ID_CHARACTERS else text[:_SHOWN_ID_CHARACTERS] + "...") or None


def _header_fault(header: bytes, name: bytes) -> tuple[str, str] | None:
    if len(header) > MAX_HEADER_BYTES:
        return f"header of more than {MAX_HEADER_BYTES} bytes", "shorten it, or look for a lost line end"
    if b"\r" in header:
        return _CR_FAULT
    if not name:
        return "empty id", "write an id right behind '>'"
    if len(name) > MAX_ID_BYTES:
        return f"id of more than {MAX_ID_BYTES} bytes", "shorten it; it ends at the first space or tab"
    if not name.translate(None, PRINTABLE_ASCII):
        return None
    try:
        text = name.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"id is not UTF-8 (byte 0x{name[error.start]:02X})", "convert the file with: iconv -f latin1 -t utf-8"
    hidden = next((char for char in text if unicodedata.category(char) in _HIDDEN_CATEGORIES), None)
    if hidden is None:
        return None
    return f"control or blank character U+{ord(hidden):04X} in the id", "remove it; an id ends at a space or tab only"


def _has_lone_cr(piece: bytes) -> bool:
    return b"\r" in piece and piece.count(b"\r") != piece.count(b"\r\n")


def _explain(found: bytes, column: int) -> tuple[str, str]:
    """Return what is wrong and what to do for the byte that *found* starts with."""
    byte = found[0]
    shown = f"'{chr(byte)}'"
    if byte == ord("*"):
        return f"stop '*' inside the sequence at column {column}", "cut the sequence there, or write X instead"
    if byte in b"-.":
        return f"gap {shown} at column {column}", "remove the gaps: sequences must not be aligned"
    if byte == ord(">"):
        return f"'>' inside a sequence line at column {column}", "start the header on a line of its own"
    if byte == ord("<") and (token := _SPECIAL_TOKEN.match(found)):
        return f"special token '{token[0].decode()}' at column {column}", "remove it: only residues are read"
    if byte == ord("\r"):
        return _CR_FAULT
    if byte == 0:
        return f"NUL byte at column {column}", "make the file again: it is damaged or not text"
    if byte > 0x7F:
        return f"non-ASCII byte 0x{byte:02X} at column {column}", "remove it: residues are ASCII letters"
    if byte < ord(" ") or byte == 0x7F:
        return f"control character 0x{byte:02X} at column {column}", "remove it: residues are ASCII letters"
    return f"unexpected character {shown} at column {column}", "remove it: residues are ASCII letters"
