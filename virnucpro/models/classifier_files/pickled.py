"""
Reads the pickle of a published classifier as data: it imports no class and calls no function.

A pickle is a program for a small stack machine. This machine does not act: a global is a name from a short list, a call
is a record of its function and arguments, a state is kept beside its object. Everything else is refused by name. Knows
nothing of tensors.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import Any

MAX_BYTES = 1 << 20
"""Largest accepted pickle, bytes; a published one has 3,000."""

MODULE_CLASSES = frozenset({"__main__.MLPClassifier", "train.MLPClassifier"})
"""The class of the published script, run as a script or imported."""
LAYER_CLASSES = frozenset(
    {
        "torch.nn.modules.linear.Linear",
        "torch.nn.modules.batchnorm.BatchNorm1d",
        "torch.nn.modules.dropout.Dropout",
        "torch.nn.modules.activation.ReLU",
        "torch.nn.modules.activation.Softmax",
    }
)
STORAGE_CLASSES = frozenset(
    f"torch.{kind}Storage"
    for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
)
ORDERED_DICT, SET = "collections.OrderedDict", "builtins.set"
PARAMETER, TENSOR = "torch._utils._rebuild_parameter", "torch._utils._rebuild_tensor_v2"
ADMITTED = frozenset({ORDERED_DICT, SET, PARAMETER, TENSOR}) | MODULE_CLASSES | LAYER_CLASSES | STORAGE_CLASSES


class RefusedPickleError(ValueError):
    """The pickle is damaged, or needs something that a classifier does not; the message names it."""


@dataclass(frozen=True)
class Global:
    name: str
    """Module and name, joined by a dot."""


@dataclass(eq=False)
class Made:
    by: Global
    """The function that would have been called, or the class."""
    arguments: tuple[Any, ...]
    items: dict[str, Any] = field(default_factory=dict)
    """Items of an ordered dictionary."""
    state: dict[str, Any] = field(default_factory=dict)
    """Attributes set later."""


@dataclass(frozen=True)
class Persistent:
    reference: object


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"})
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = frozenset({"BINPUT", "LONG_BINPUT"}), frozenset({"BINGET", "LONG_BINGET"})
_IGNORED = frozenset({"PROTO", "FRAME"})
MAX_SHOWN = 100
"""Longest name in a message, letters."""


def read_pickle(data: bytes) -> object:
    """Return the object of the pickle *data*, made of plain values, ``Global``, ``Made`` and ``Persistent``."""
    if len(data) > MAX_BYTES:
        raise RefusedPickleError(f"its pickle has {len(data):,} bytes, a classifier's has a few thousand")
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                if len(machine.stack) != 1:
                    break
                return machine.stack[0]
            machine.step(opcode.name, argument)
    except RefusedPickleError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, UnicodeError) as error:  # what genops and a bad stack raise
        raise RefusedPickleError(f"its pickle is damaged ({error})") from error
    raise RefusedPickleError("its pickle is damaged (it does not end with one object)")


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, opcode: str, argument: Any) -> None:  # noqa: C901, PLR0912  one line an opcode
        stack = self.stack
        if opcode in _IGNORED:
            return
        if opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _VALUES:
            stack.append(argument)
        elif opcode in _TUPLES:
            stack.append(self._pop(_TUPLES[opcode]))
        elif opcode in _PUTS:
            self.memo[argument] = stack[-1]
        elif opcode in _GETS:
            stack.append(self.memo[argument])
        elif opcode == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif opcode == "MARK":
            stack.append(_MARK)
        elif opcode == "TUPLE":
            stack.append(self._pop_to_mark())
        elif opcode == "EMPTY_DICT":
            stack.append({})
        elif opcode == "EMPTY_LIST":
            stack.append([])
        elif opcode == "EMPTY_SET":
            stack.append(Made(Global(SET), ()))
        elif opcode in {"APPEND", "APPENDS"}:
            items = self._pop(1) if opcode == "APPEND" else self._pop_to_mark()
            _of(stack[-1], list, "list").extend(items)
        elif opcode in {"SETITEM", "SETITEMS"}:
            _set_items(self._pop(2) if opcode == "SETITEM" else self._pop_to_mark(), stack)
        elif opcode in {"GLOBAL", "STACK_GLOBAL", "INST"}:
            module, name = self._pop(2) if opcode == "STACK_GLOBAL" else argument.split(" ", 1)
            stack.append(_admit(module, name))
            if opcode == "INST":
                raise RefusedPickleError("its pickle uses the instruction INST, which a classifier does not need")
        elif opcode in {"REDUCE", "NEWOBJ"}:
            made_by, arguments = self._pop(2)
            stack.append(Made(_of(made_by, Global, "global"), _of(arguments, tuple, "tuple")))
        elif opcode == "BUILD":
            (state,) = self._pop(1)
            _of(stack[-1], Made, "new object").state.update(_of(state, dict, "dictionary"))
        elif opcode == "BINPERSID":
            stack.append(Persistent(*self._pop(1)))
        else:
            raise RefusedPickleError(f"its pickle uses the instruction {opcode}, which a classifier does not need")

    def _pop(self, count: int) -> tuple[Any, ...]:
        if len(self.stack) < count:
            raise IndexError("too little on the stack")
        taken = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        if _MARK in taken:
            raise IndexError("a mark in place of a value")
        return taken

    def _pop_to_mark(self) -> tuple[Any, ...]:
        for count, value in enumerate(reversed(self.stack)):
            if value is _MARK:
                taken = self._pop(count)
                self.stack.pop()
                return taken
        raise IndexError("no mark on the stack")


def _admit(module: object, name: object) -> Global:
    full = f"{_of(module, str, 'text')}.{_of(name, str, 'text')}".replace("__builtin__.", "builtins.", 1)
    if full not in ADMITTED:
        message = (
            f"refused: the file asks for {full[:MAX_SHOWN]}, which a classifier does not need; nothing in it was run"
        )
        raise RefusedPickleError(message)
    return Global(full)


def _of(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise RefusedPickleError(f"its pickle is damaged (no {what} where one should be)")
    return value


def _set_items(pairs: tuple[Any, ...], stack: list[Any]) -> None:
    target = stack[-1]
    if isinstance(target, Made) and target.by.name == ORDERED_DICT:
        target = target.items
    if len(pairs) % 2:
        raise IndexError("a key without a value")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        _of(target, dict, "dictionary")[_of(key, str, "text")] = value
