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
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from virnucpro import durable
from virnucpro.errors import ResultError
from virnucpro.run_folders import only_regular
from virnucpro.telemetry.snapshot import RunSnapshot
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
WRITE_INTERVAL_S = 2.0
"""Least seconds between two versions of the file."""
_MOST_BYTES = 16 * 2**20
_MOST_WHOLE = 2**63
_MOST = 1e15

Read = TypeVar("Read")


@dataclass(frozen=True, kw_only=True)
class SavedStatus:
    written: float
    """Unix time."""
    host: str
    pid: int
    snapshot: RunSnapshot
    format: int = FORMAT


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
        return from_json(SavedStatus, json.loads(data))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResultError(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise ResultError(path, f"says nothing that this version understands ({error})") from error


def to_json(value: Any) -> Any:
    """Return a dataclass of plain values as objects, lists, strings and numbers."""
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_json(kind: type[Read], data: Any) -> Read:
    """Return the dataclass that ``to_json`` made *data* of; ``ValueError`` for a value missing or of another kind."""
    return _read(kind, data, kind.__name__)  # type: ignore[no-any-return]


def _read(kind: Any, data: Any, where: str) -> Any:
    if is_dataclass(kind):
        return _read_fields(kind, data, where)
    arguments = get_args(kind)
    if get_origin(kind) in {Union, types.UnionType}:
        return None if data is None else _read(next(one for one in arguments if one is not type(None)), data, where)
    if get_origin(kind) is tuple and isinstance(data, list):
        return tuple(_read(arguments[0], item, where) for item in data)
    if get_origin(kind) is Mapping and isinstance(data, dict):
        return {key: _read(arguments[1], item, f"{where} {key!r}") for key, item in data.items()}
    if isinstance(kind, type) and issubclass(kind, StrEnum) and isinstance(data, str):
        return kind(data)
    if kind is float and type(data) in {int, float} and abs(data) <= _MOST:  # which NaN is not
        return float(data)
    if kind in {str, int, bool} and type(data) is kind and not (kind is int and abs(data) >= _MOST_WHOLE):
        return data
    raise ValueError(f"{where} is no {getattr(kind, '__name__', kind)}")


def _read_fields(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where} is no object")  # noqa: TRY004  a value of the file, not of a caller
    if kind is SavedStatus and data.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    hints = get_type_hints(kind, localns={"Mapping": Mapping, "RunSnapshot": RunSnapshot})
    values = {}
    for field in fields(kind):
        if field.name in data:
            values[field.name] = _read(hints[field.name], data[field.name], f"{where}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where}.{field.name} is missing")
    return kind(**values)
