"""Reads texts, numbers, lists and NumPy arrays out of a pickle without running it: classes and calls in it stay names.

CIFAR's batches are pickles of Python 2. Format: https://docs.python.org/3.11/library/pickletools.html
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardmill.errors import IntegrityError

_BYTE_TYPES = (("u1",), ("|u1",), ("uint8",))
# CIFAR-100's train split takes about 400,000; each may make an object of 60 bytes.
_MAX_OPCODES = 5_000_000


@dataclass(slots=True)
class Call:
    """A call that unpickling would make, with what its result would be given as its state."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, slots=True)
class _Name:
    """A class or function of a module."""

    name: str


def read_pickle(data: bytes) -> Any:
    """The value: dicts, lists, tuples, texts, bytes and numbers; `Call` for all else. Raises IntegrityError.

    Bytes that Python 2 stored are texts in Latin-1, one character for each.
    """
    machine = _Machine()
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(data))):
            if opcode.name == "STOP":
                return machine.stack.pop()
            if number == _MAX_OPCODES:
                raise ValueError(f"more than {_MAX_OPCODES} opcodes")
            machine.run(opcode.name, argument)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise IntegrityError(f"no pickle of plain values: {error}") from None
    raise IntegrityError("no pickle of plain values: it ends without STOP")


def byte_array(value: Any) -> np.ndarray | None:
    """The pickled array of uint8; None if the value is none, or its bytes do not fill its shape."""
    if not isinstance(value, Call):
        return None
    function, state = value.name.rpartition(".")[2], value.state
    if function == "_reconstruct" and isinstance(state, tuple) and len(state) >= 4:
        shape, dtype, is_fortran, stored = state[-4:]
    elif function == "_frombuffer" and len(value.arguments) == 4:
        stored, dtype, shape, order = value.arguments
        is_fortran = order == "F"
    else:
        return None
    is_byte = isinstance(dtype, Call) and dtype.name == "numpy.dtype" and dtype.arguments[:1] in _BYTE_TYPES
    data = _stored_bytes(stored)
    if not is_byte or data is None:
        return None
    try:
        return np.frombuffer(data, np.uint8).reshape(shape, order="F" if is_fortran else "C")
    except (ValueError, TypeError):
        return None


def _stored_bytes(value: Any) -> bytes | None:
    """What holds an array's bytes: Python 2's strings, Python 3's bytes, or (its protocols 0 to 2) a call."""
    if isinstance(value, Call) and value.name == "_codecs.encode" and value.arguments:
        value = value.arguments[0]
    if isinstance(value, str):
        try:
            return value.encode("latin-1")
        except UnicodeEncodeError:
            return None
    return bytes(value) if isinstance(value, bytes | bytearray) else None


class _Machine:
    """The stack machine that a pickle is a program of, without what imports or calls something."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._below_marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        """One opcode. Raises ValueError for one that makes objects in another way than by a call."""
        if name in _PUSHES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _TUPLES:
            size = _TUPLES[name]
            self.stack[-size:] = [tuple(self.stack[-size:])]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = self.stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        elif name == "MARK":
            self._below_marks.append(self.stack)
            self.stack = []
        elif name in _OF_MARKED:
            marked, self.stack = self.stack, self._below_marks.pop()
            _OF_MARKED[name](self.stack, marked)
        elif name in _OF_STACK:
            _OF_STACK[name](self.stack, argument)
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"{name} in it")


def _set_items(stack: list[Any], pairs: list[Any]) -> None:
    stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))


def _set_item(stack: list[Any], _: Any) -> None:
    value, key = stack.pop(), stack.pop()
    stack[-1][key] = value


def _append(stack: list[Any], _: Any) -> None:
    value = stack.pop()
    stack[-1].append(value)


def _stack_name(stack: list[Any], _: Any) -> None:
    name, module = stack.pop(), stack.pop()
    stack.append(_Name(f"{module}.{name}"))


def _call(stack: list[Any], _: Any) -> None:
    arguments, function = stack.pop(), stack.pop()
    stack.append(Call(function.name, tuple(arguments)))


def _build(stack: list[Any], _: Any) -> None:
    state = stack.pop()
    stack[-1].state = state


_PUSHES = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    }
)
_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_OF_MARKED: Mapping[str, Callable[[list[Any], list[Any]], None]] = {
    "TUPLE": lambda stack, marked: stack.append(tuple(marked)),
    "LIST": lambda stack, marked: stack.append(marked),
    "DICT": lambda stack, marked: stack.append(dict(zip(marked[::2], marked[1::2], strict=True))),
    "APPENDS": lambda stack, marked: stack[-1].extend(marked),
    "SETITEMS": _set_items,
    "POP_MARK": lambda stack, marked: None,
}
_OF_STACK: Mapping[str, Callable[[list[Any], Any], None]] = {
    "APPEND": _append,
    "SETITEM": _set_item,
    "POP": lambda stack, _: stack.pop() and None,
    "DUP": lambda stack, _: stack.append(stack[-1]),
    "GLOBAL": lambda stack, argument: stack.append(_Name(argument.replace(" ", "."))),
    "STACK_GLOBAL": _stack_name,
    "REDUCE": _call,
    "BUILD": _build,
}
