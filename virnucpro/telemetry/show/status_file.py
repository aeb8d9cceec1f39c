"""
The state of a run, as a file beside it: for readers on another terminal, or another machine.

The file is whole whenever it is read, and it is not made durable: after a crash of the machine it would be out of date
anyway. What is read from one is checked value by value, since any program may have written it.
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from virnucpro import durable
from virnucpro.errors import ResultError
from virnucpro.run_folders import only_regular
from virnucpro.telemetry.snapshot import RunSnapshot  # noqa: TC001  as there, for pydantic
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from pathlib import Path

WRITE_INTERVAL_S = 2.0
"""Least seconds between two versions of the file."""
_MOST_BYTES = 16 * 2**20
_MOST = 2**63

Read = TypeVar("Read")


@dataclass(frozen=True, kw_only=True)
class SavedStatus:
    written: float
    """Unix time."""
    host: str
    pid: int
    snapshot: RunSnapshot
    format: Literal[1] = 1


class StatusFile:
    """A view that keeps a file up to date, and removes it at the end; writes only where its folder exists."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written_s = -math.inf
        self._was_refused = False

    def update(self, snapshot: RunSnapshot) -> None:
        """Write the file, unless that was done a moment ago; a failed write is retried with the next snapshot."""
        now_s = time.monotonic()
        if now_s - self._written_s < WRITE_INTERVAL_S or not self._path.parent.is_dir():
            return
        self._written_s = now_s
        status = SavedStatus(written=time.time(), host=host_name(), pid=os.getpid(), snapshot=snapshot)
        try:
            with durable.temporary_name(self._path) as temporary:
                with temporary.open("x", encoding="ascii") as file:
                    json.dump(to_json(status), file)
                temporary.replace(self._path)
        except FileNotFoundError:  # the run has swept its folders meanwhile
            pass
        except OSError as error:
            if not self._was_refused:
                self._was_refused = True
                import structlog  # noqa: PLC0415  readers of the file do without

                structlog.get_logger(__name__).warning(
                    "status.not_written", path=str(self._path), reason=error.strerror or str(error)
                )

    def say(self, text: str) -> None:
        """Do nothing: the file is about the run alone."""

    def close(self) -> None:
        """Remove the file, and its folder where that is otherwise empty; what cannot be removed is out of date soon."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()


def read_status(path: Path) -> SavedStatus | None:
    """Return the last status of a run, None where there is no file; ``ResultError`` where it is not readable."""
    try:
        with open(path, "rb", opener=only_regular) as file:
            data = file.read(_MOST_BYTES)
        return from_json(SavedStatus, data)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResultError(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise ResultError(path, f"says nothing that this version understands ({error})") from error


def to_json(value: Any) -> Any:
    """Return a dataclass of plain values as objects, lists, strings and numbers; None for those that JSON lacks."""
    return to_jsonable_python(value, inf_nan_mode="null")


def from_json(kind: type[Read], data: bytes) -> Read:
    """Return the dataclass that ``to_json`` made *data* of; ``ValueError`` for a value missing or of another kind."""
    json.loads(data, parse_int=_checked, parse_float=_checked, parse_constant=_checked)
    try:
        return TypeAdapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _checked(number: str) -> float:
    """Refuse what is no number, and numbers that times and counts cannot have."""
    if not abs(found := float(number)) <= _MOST:
        raise ValueError("a number is out of bounds")
    return found
