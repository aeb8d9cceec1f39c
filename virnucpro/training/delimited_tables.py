"""
Tables that others wrote: tab-separated or CSV with a header, plain or gzip, any line ends.

What is wrong with a table is told with file and line, every problem of it at once up to a limit. Knows nothing of what
the columns mean. A tab in the header makes a table tab-separated; else it is CSV.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from virnucpro.errors import BadInputError, InputProblem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Never

_GZIP_MAGIC = b"\x1f\x8b"
_SAVE_AGAIN = "save it again as tab-separated text or CSV"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    line: int
    """1-based, of its last line where a quoted cell holds line ends."""
    cells: list[str]
    """Without the blanks around them."""


@dataclass
class Problems:
    """What is wrong with a table, gathered so that it is told at once."""

    path: Path
    found: list[InputProblem] = field(default_factory=list)

    def add(self, line: int | None, what: str, remedy: str, *, sequence_id: str | None = None) -> None:
        """
        Note a problem.

        Raises:
            BadInputError: There is more than is worth telling.
        """
        if len(self.found) == BadInputError.MAX_PROBLEMS:
            raise BadInputError(self.found, more=True)
        self.found.append(InputProblem(str(self.path), line, what, remedy, sequence_id))

    def refuse(self, line: int | None, what: str, remedy: str) -> Never:
        """
        End with a problem that nothing can be read behind.

        Raises:
            BadInputError: Always.
        """
        self.add(line, what, remedy)
        raise BadInputError(self.found)

    def raise_if_any(self) -> None:
        """
        End with what was noted.

        Raises:
            BadInputError: Something was.
        """
        if self.found:
            raise BadInputError(self.found)


class DelimitedTable:
    """
    A table that is read once, from its header on.

    Args:
        path: The file.
        unquoted_header: Columns of a table of ours, in which a quotation mark is a letter like any other.

    Raises:
        BadInputError: It cannot be read, is not text, or has no header.
    """

    def __init__(self, path: Path, *, unquoted_header: Sequence[str] = ()) -> None:
        self.path = path
        self.problems = Problems(path)
        text = self._text()
        header = text.readline()
        if not header.strip():
            self.problems.refuse(None, "empty: no header", "give a table with a header line and a line a contig")
        self.is_tabbed = "\t" in header
        self._delimiter = "\t" if self.is_tabbed else ","
        (cells,) = csv.reader([header.rstrip("\n")], delimiter=self._delimiter)
        self.columns = [cell.strip().removeprefix("#").strip() for cell in cells]
        self.is_ours = tuple(self.columns) == tuple(unquoted_header)
        self._text_after_header = text
        repeated = {name for name in self.columns if name and self.columns.count(name) > 1}
        if repeated:
            self.problems.refuse(1, f"column {min(repeated)!r} is there twice", "give every column its own name")

    def column(self, name: str, option: str = "") -> int:
        """
        Return the place of a column.

        Args:
            name: Its name; capitals do not matter.
            option: What names another column.

        Raises:
            BadInputError: There is none of that name.
        """
        found = self.find(name)
        if found is None:
            instead = f"name the right one with {option}" if option else "add it, or name the column so"
            self.problems.refuse(1, f"no column {name!r}; the header has: {', '.join(self.columns)}", instead)
        return found

    def find(self, *names: str) -> int | None:
        """Return the place of the first of *names* that is a column, or None; capitals do not matter."""
        lower = [column.lower() for column in self.columns]
        return next((lower.index(name.lower()) for name in names if name.lower() in lower), None)

    def rows(self) -> Iterator[Row]:
        """
        Yield every line that is not blank.

        Raises:
            BadInputError: One has more or fewer cells than the header, or cannot be read.
        """
        reader = csv.reader(
            self._text_after_header,
            delimiter=self._delimiter,
            quoting=csv.QUOTE_NONE if self.is_ours else csv.QUOTE_MINIMAL,
            strict=True,
        )
        try:
            for cells in reader:
                if any(cells):
                    if len(cells) != len(self.columns):
                        what = f"{len(cells)} columns where the header has {len(self.columns)}"
                        row_names = ": R writes such tables unless told row.names=FALSE"
                        self.problems.refuse(
                            reader.line_num + 1,
                            what + row_names * (len(cells) == len(self.columns) + 1),
                            _SAVE_AGAIN,
                        )
                    yield Row(reader.line_num + 1, [cell.strip() for cell in cells])
        except csv.Error as error:
            self.problems.refuse(reader.line_num + 1, f"cannot be read as a line of a table ({error})", _SAVE_AGAIN)

    def _text(self) -> io.StringIO:
        """Return the whole file as text with plain line ends."""
        try:
            content = self.path.read_bytes()  # which may be a pipe
        except (OSError, ValueError) as error:
            what = (error.strerror if isinstance(error, OSError) else None) or str(error)
            self.problems.refuse(None, what, "check the name and the permissions")
        try:
            if content.startswith(_GZIP_MAGIC):
                content = gzip.decompress(content)
            text = content.decode("utf-8-sig")
        except (EOFError, OSError, zlib.error) as error:
            self.problems.refuse(None, f"damaged gzip ({error})", "copy or download the file again")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            self.problems.refuse(line, f"not UTF-8 text ({error.reason})", _SAVE_AGAIN)
        return io.StringIO(text.replace("\r\n", "\n").replace("\r", "\n"))
