"""
Read tables of other programs: tab-separated or CSV with a header, plain or compressed, any line ends.

All problems of a table are reported together, with file and line, up to a limit. A tab in the header makes a table
tab-separated; otherwise it is CSV. Limits on lines and cells bound the memory that a file can take.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from virnucpro.data.reading.problems import Problems
from virnucpro.data.reading.text_files import open_text
from virnucpro.errors import BadInputError, InputProblem, PathNotAllowedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Never

MOST_LINES = 20_000_000
MOST_ROW_CHARACTERS = 1 << 20
"""Characters of a row, which may span several lines where quoted cells hold line ends."""
MOST_CELL_CHARACTERS = 1024
"""Characters of a cell that is kept: as many as an id may have bytes."""
MOST_DIGITS = 15
"""Digits of a whole number."""
_SHOWN_COLUMNS, _SHOWN_CHARACTERS = 20, 80
_BOM = "\ufeff"
_SAVE_AGAIN = "save it again as tab-separated text or CSV"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    line: int
    """1-based, of its last line where a quoted cell holds line ends."""
    cells: list[str]
    """Without surrounding blanks."""


class TableProblems(Problems):
    """The problems of a table, collected to be reported together."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def note(self, line: int | None, what: str, remedy: str, *, sequence_id: str | None = None) -> None:
        self.add(InputProblem(str(self.path), line, what, remedy, sequence_id))

    def refuse(self, line: int | None, what: str, remedy: str) -> Never:
        """Raise, with a problem after which nothing can be read."""
        self.note(line, what, remedy)
        self.raise_if_any()
        raise AssertionError("there is one")


class DelimitedTable:
    """
    A table that is read once, from its header on.

    *unquoted_headers*: columns of our own tables, in which a quotation mark is an ordinary character.
    """

    def __init__(self, path: Path, *, unquoted_headers: Sequence[tuple[str, ...]] = ()) -> None:
        self.path = path
        self.problems = TableProblems(path)
        self._row_characters = 0
        self._lines = self._read_lines()
        header = next(self._lines, "")
        if not header.strip():
            self.problems.refuse(None, "empty: no header", "give a table with a header line and a line a contig")
        self.is_tabbed = "\t" in header
        self._delimiter = "\t" if self.is_tabbed else ","
        try:
            (cells,) = csv.reader([header.rstrip("\n")], delimiter=self._delimiter)
        except csv.Error as error:
            self.problems.refuse(1, f"cannot be read as the header of a table ({error})", _SAVE_AGAIN)
        self.columns = [cell.strip().removeprefix("#").strip() for cell in cells]
        self.is_ours = tuple(self.columns) in unquoted_headers
        repeated = [name for name, count in Counter(self.columns).items() if name and count > 1]
        if repeated:
            self.problems.refuse(1, f"column {shown(min(repeated))!r} occurs twice", "give every column its own name")

    def column(self, name: str, option: str = "") -> int:
        """Return the position of a column, whatever its case; *option* names the option that chooses another."""
        found = self.find(name)
        if found is None:
            instead = f"name the right one with {option}" if option else "add it, or name the column so"
            listed = ", ".join(map(shown, self.columns[:_SHOWN_COLUMNS])) + ", ..." * (
                len(self.columns) > _SHOWN_COLUMNS
            )
            self.problems.refuse(1, f"no column {name!r}; the header has: {listed}", instead)
        return found

    def find(self, *names: str) -> int | None:
        """Return the position of the first of *names* that is a column, whatever its case; None without any."""
        lower = [column.lower() for column in self.columns]
        return next((lower.index(name.lower()) for name in names if name.lower() in lower), None)

    def rows(self, *kept: int | None) -> Iterator[Row]:
        """Yield every line that is not blank; only cells of the *kept* columns have their length checked."""
        places = [place for place in kept if place is not None]
        reader = csv.reader(
            self._lines,
            delimiter=self._delimiter,
            quoting=csv.QUOTE_NONE if self.is_ours else csv.QUOTE_MINIMAL,
            strict=True,
        )
        try:
            for cells in reader:
                self._row_characters = 0
                if any(cells):
                    if len(cells) != len(self.columns):
                        what = f"{len(cells)} columns where the header has {len(self.columns)}"
                        row_names = ": R writes such tables without row.names=FALSE"
                        self.problems.refuse(
                            reader.line_num + 1,
                            what + row_names * (len(cells) == len(self.columns) + 1),
                            _SAVE_AGAIN,
                        )
                    for place in places:
                        if len(cells[place]) > MOST_CELL_CHARACTERS:
                            what = f"{len(cells[place]):,} characters in the column {shown(self.columns[place])!r}"
                            self.problems.refuse(
                                reader.line_num + 1, what, f"at most {MOST_CELL_CHARACTERS:,} are read"
                            )
                    yield Row(reader.line_num + 1, [cell.strip() for cell in cells])
        except csv.Error as error:
            self.problems.refuse(reader.line_num + 1, f"cannot be read as a line of a table ({error})", _SAVE_AGAIN)

    def _read_lines(self) -> Iterator[str]:
        """Yield the lines with plain line ends."""
        line = 0
        try:
            with open_text(self.path, is_held=True) as content:
                # latin-1 decodes every byte: bad UTF-8 is found below, with its line
                text = io.TextIOWrapper(content, encoding="latin-1", newline=None)
                for line in itertools.count(1):
                    letters = text.readline(MOST_ROW_CHARACTERS + 1)
                    self._row_characters += len(letters)
                    if self._row_characters > MOST_ROW_CHARACTERS:
                        what = f"a row of more than {MOST_ROW_CHARACTERS:,} characters"
                        self.problems.refuse(line, what, "look for a missing line end or an extra quotation mark")
                    if line > MOST_LINES:
                        self.problems.refuse(line, f"more than {MOST_LINES:,} lines", "give a shorter table")
                    if not letters:
                        return
                    decoded = letters.encode("latin-1").decode("utf-8")
                    yield decoded.removeprefix(_BOM) if line == 1 else decoded
        except (BadInputError, PathNotAllowedError):
            raise
        except UnicodeDecodeError as error:
            self.problems.refuse(line, f"not UTF-8 text ({error.reason})", _SAVE_AGAIN)
        except (OSError, ValueError) as error:
            what = (error.strerror if isinstance(error, OSError) else None) or str(error)
            self.problems.refuse(None, what, "check the name and the permissions")


def whole_number(text: str) -> int | None:
    """Return a whole number from 0 up, of at most ``MOST_DIGITS`` digits; None if *text* is none."""
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None


def shown(text: str) -> str:
    """Return *text* shortened for a message."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
