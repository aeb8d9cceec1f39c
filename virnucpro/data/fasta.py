"""
The rules of a FASTA record: its letters, what an id and a sequence may hold; every fault with line, column, remedy.

A record is read in one part or in several. The result is the normalised sequence that models see: upper case, without
ASCII blanks and line ends; in proteins J is X, and one stop at the end is removed. This module knows bytes and lines;
it opens no file.

Protein letters are those of ESM-2's alphabet, and J, which it lacks and which is read as X. DNA letters are IUPAC's
without U: the published tokenizer of DNABERT-S has no U, so nearly half of an RNA becomes [UNK] and its embedding is
further from its own DNA's than another DNA's is. ``InputRules.rna`` has U read as T.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from virnucpro.choices import GapPolicy, SequenceKind, StopPolicy

if TYPE_CHECKING:
    from virnucpro.config import InputRules


BLANKS = b" \t\r\n"
"""Bytes inside a sequence that are removed; CR only at the end of a line."""
GAPS = b"-."
"""Bytes that alignments put in place of a missing residue."""
PROTEIN_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DNA_LETTERS = b"ACGTRYSWKMBDHVN"
MAX_ID_BYTES = 1024
"""Longest id, bytes: it is a row of the result and a line of a table."""
PLAIN_ID_BYTES = MAX_ID_BYTES - 32
"""Longest id, bytes, that leaves room for any suffix of a chunk and its frame."""
MAX_HEADER_BYTES = 64 << 10
"""Longest header line, bytes, without ``>``."""

_SHOWN_ID_CHARACTERS = 80

PRINTABLE_ASCII = bytes(range(0x21, 0x7F))
"""The bytes of a plain id."""

_SPECIAL_TOKEN = re.compile(rb"<[A-Za-z_]{1,20}>")
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Zs", "Zl", "Zp"})
_SHORTEN_ID = "shorten it; it ends at the first space or tab"
_CR_FAULT = ("CR line ends", "convert them with: tr '\\r' '\\n' < FILE > NEW_FILE")


@dataclass(frozen=True, kw_only=True)
class Letters:
    kind: SequenceKind
    accepted: bytes
    """Upper-case letters of a normalised sequence."""
    taken: bytes
    """Letters of an input, in both cases: those, and U where it is read as T."""
    unknown: bytes
    """The letter for any residue or nucleotide."""
    ambiguous: bytes
    """Letters that stand for several residues or nucleotides, ``unknown`` included."""
    normalise: bytes
    """Translation table: upper case, in proteins J (leucine or isoleucine) to X, in RNA U to T."""
    in_case: bytes | None
    """Translation table of U to T that keeps the case, where U is read as T."""
    removed: bytes
    faulty: re.Pattern[bytes]
    """Bytes that need a second look: those that break a rule, and stops."""
    stops: StopPolicy | None
    """How internal stops are treated; None where ``*`` is no stop."""
    most_residues: int | None
    """Most residues or nucleotides of a record; None is no limit."""
    chunk_nt: int | None
    """Nucleotides of the chunks that a record is cut into; None where it is not."""

    def count_ambiguous(self, sequence: bytes) -> int:
        return sum(sequence.count(letter) for letter in self.ambiguous if letter in sequence)  # most are in none


@cache
def letters_of(rules: InputRules) -> Letters:
    is_protein = rules.sequence_kind is SequenceKind.PROTEIN
    accepted = PROTEIN_LETTERS if is_protein else DNA_LETTERS
    removed = BLANKS + (GAPS if rules.gaps is GapPolicy.REMOVE else b"")
    rna = b"Uu" if rules.rna else b""
    taken = accepted + accepted.lower() + rna
    return Letters(
        kind=rules.sequence_kind,
        accepted=accepted,
        taken=taken,
        unknown=b"X" if is_protein else b"N",
        ambiguous=b"XBZ" if is_protein else b"RYSWKMBDHVN",
        normalise=bytes.maketrans(
            accepted.lower() + (b"J" if is_protein else rna),
            (accepted.replace(b"J", b"X") + b"X") if is_protein else accepted + b"T" * len(rna),
        ),
        in_case=bytes.maketrans(rna, b"Tt") if rna else None,
        removed=removed,
        faulty=re.compile(rb"[^" + re.escape(taken + removed) + rb"]|\r(?!\n)"),
        stops=rules.stops if is_protein else None,
        most_residues=rules.most_residues,
        chunk_nt=rules.chunk_nt,
    )


class Fault(NamedTuple):
    """One broken rule."""

    line: int
    what: str
    """What is wrong, without a full stop."""
    remedy: str


class Record(NamedTuple):
    name: bytes
    """The id: the header up to its first space or tab."""
    sequence: bytes
    """Normalised residues; meaningless where there is a fault."""
    fault: Fault | None


class SequenceReader:
    """
    The sequence of one record, read in parts of any size; only the last part may end between CR and LF.

    Attributes:
        residues: Normalised residues or nucleotides so far.
        fault: The first broken rule so far; the counts are meaningless once there is one.
        mapped_j: J read as X.
        removed_blanks: Spaces and tabs removed.
        ambiguous: Letters, after normalisation, that stand for several residues or nucleotides.
    """

    def __init__(self, line: int, letters: Letters) -> None:
        self.residues = 0
        self.fault: Fault | None = None
        self.mapped_j = 0
        self.removed_blanks = 0
        self.removed_gaps = 0
        self.stops_as_x = 0
        self.ambiguous = 0
        self._letters = letters
        self._line = line
        self._column = 1
        self._stop: Fault | None = None  # a stop that may be the last letter
        self._only_unknown = True

    @property
    def stripped_stops(self) -> bool:
        """Whether a stop was removed from the end."""
        return self._stop is not None and self.fault is None

    @property
    def low_information(self) -> bool:
        """Whether there are residues, all of them unknown ones."""
        return self.residues > 0 and self._only_unknown

    def feed(self, piece: bytes, *, last: bool) -> bytes:
        """Read the next part of the sequence; return its normalised residues."""
        if last:
            piece = piece.removesuffix(b"\r")
        letters = self._letters
        sequence = piece.translate(letters.normalise, letters.removed)
        if self._stop is not None or sequence.translate(None, letters.accepted) or _has_lone_cr(piece):
            sequence = self._unusual(piece, sequence)
        self._count(piece, sequence)
        last_line_end = piece.rfind(b"\n")
        self._line += piece.count(b"\n")
        self._column = len(piece) - last_line_end if last_line_end >= 0 else self._column + len(piece)
        return sequence

    def _count(self, piece: bytes, sequence: bytes) -> None:
        letters = self._letters
        self.residues += len(sequence)
        self.ambiguous += letters.count_ambiguous(sequence)
        if self._only_unknown:
            self._only_unknown = not sequence.strip(letters.unknown)
        if letters.kind is SequenceKind.PROTEIN:
            self.mapped_j += piece.count(b"J") + piece.count(b"j")
        self.removed_blanks += piece.count(b" ") + piece.count(b"\t")
        if GAPS[0] in letters.removed:
            self.removed_gaps += piece.count(b"-") + piece.count(b".")

    def _unusual(self, piece: bytes, sequence: bytes) -> bytes:
        """Read a part that breaks a rule, holds a stop, or follows one."""
        if self.fault is not None or (self._stop is not None and not sequence and not _has_lone_cr(piece)):
            return b""
        before, self._stop = self._stop, None
        as_x = self._letters.stops is StopPolicy.X
        if before is not None and not as_x and sequence:
            self.fault = before
            return b""
        for match in self._letters.faulty.finditer(piece):
            found = self._fault_at(piece, match.start())
            is_stop = match[0] == b"*" and self._letters.stops is not None
            if is_stop and not piece[match.end() :].strip(self._letters.removed):
                self._stop = found
            elif not (is_stop and as_x):
                self.fault = found
                return b""
        residues = (b"*" if before is not None else b"") + sequence
        if self._stop is not None:
            residues = residues[:-1]
        self.stops_as_x += residues.count(b"*")
        return residues.replace(b"*", b"X")

    def _fault_at(self, piece: bytes, at: int) -> Fault:
        line_end = piece.rfind(b"\n", 0, at)
        column = at - line_end if line_end >= 0 else self._column + at
        what, remedy = _explain(piece[at : at + 24], column, self._letters.kind)
        return Fault(self._line + piece.count(b"\n", 0, at), what, remedy)


def read_record(record: bytes, line: int, letters: Letters) -> tuple[Record, SequenceReader]:
    """Read one whole record, ``>`` to just before the next one; *line* is the 1-based line of its header."""
    header, _, body = record.partition(b"\n")
    name, header_fault = read_header(header[1:], line)
    reader = SequenceReader(line + 1, letters)
    sequence = reader.feed(body, last=True)
    return Record(name, sequence, header_fault or reader.fault or whole_fault(name, reader, line, letters)), reader


def read_header(header: bytes, line: int) -> tuple[bytes, Fault | None]:
    """Return the id and the first fault of a header, given without ``>`` and LF; *line* is 1-based."""
    header = header.removesuffix(b"\r")
    name = header.partition(b" ")[0].partition(b"\t")[0]
    broken = _header_fault(header, name)
    return name, None if broken is None else Fault(line, *broken)


def whole_fault(name: bytes, reader: SequenceReader, line: int, letters: Letters) -> Fault | None:
    """Return the fault of a complete record: its length, or an id too long for its number of chunks."""
    if not reader.residues:
        return Fault(line, "empty sequence", "add its residues or remove the record")
    if letters.most_residues is not None and reader.residues > letters.most_residues:
        unit = "residues" if letters.kind is SequenceKind.PROTEIN else "nucleotides"
        what = f"{reader.residues} {unit}, more than --max-residues {letters.most_residues}"
        return Fault(line, what, "raise --max-residues, or use --long truncate or window")
    if letters.chunk_nt is not None and len(name) > PLAIN_ID_BYTES:
        most = MAX_ID_BYTES - len(f"_chunk_{-(-reader.residues // letters.chunk_nt)}F1")
        if len(name) > most:
            what = f"id of more than {most} bytes, which leaves no room for the numbers of its chunks and frames"
            return Fault(line, what, _SHORTEN_ID)
    return None


def shown_id(name: bytes) -> str | None:
    """Return an id as messages show it: decoded as far as possible, truncated."""
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
        return f"id of more than {MAX_ID_BYTES} bytes", _SHORTEN_ID
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


def _explain(found: bytes, column: int, kind: SequenceKind) -> tuple[str, str]:
    byte = found[0]
    shown = f"'{chr(byte)}'"
    letters_only = f"remove it: {'residues' if kind is SequenceKind.PROTEIN else 'nucleotides'} are ASCII letters"
    if byte == ord("*") and kind is SequenceKind.PROTEIN:
        return f"stop '*' inside the sequence at column {column}", "cut the sequence there, or use --stop=x"
    if byte in GAPS:
        return f"gap {shown} at column {column}", "remove the gaps, or use --gaps=remove"
    if byte == ord(">"):
        return f"'>' inside a sequence line at column {column}", "start the header on a line of its own"
    if byte == ord("<") and (token := _SPECIAL_TOKEN.match(found)):
        return f"special token '{token[0].decode()}' at column {column}", "remove it: only residues are read"
    if byte == ord("\r"):
        return _CR_FAULT
    if byte == 0:
        return f"NUL byte at column {column}", "make the file again: it is damaged or not text"
    if byte > 0x7F:
        return f"non-ASCII byte 0x{byte:02X} at column {column}", letters_only
    if byte < ord(" ") or byte == 0x7F:
        return f"control character 0x{byte:02X} at column {column}", letters_only
    if kind is SequenceKind.DNA and (byte == ord("*") or chr(byte).isalpha()):
        what = f"{shown} at column {column} stands for no nucleotide of DNA"
        of_others = "give DNA; for proteins there is `virnucpro embed`"
        return what, "write T for U, or use --rna" if byte in b"Uu" else of_others
    return f"unexpected character {shown} at column {column}", letters_only
