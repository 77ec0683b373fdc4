"""Values between a program and the tests that judge it: data as JSON, anything else as a number that stands for it.

Two processes, each at an end of two pipes, ask each other for calls and attributes of objects that the other one has. Nothing
that arrives is ever more than data or such a number. Imported by path from the children: nothing of megarl.
"""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import fractions
import json
import os
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

FRAME_BYTES = 64 << 20
"""The largest message."""
_SMALL = 1 << 53
_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_DICTS: dict[str, Any] = {"dict": dict, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter}
_TIMES: dict[str, Any] = {"date": datetime.date, "datetime": datetime.datetime, "time": datetime.time}

Refer = Callable[[Any], Any]
"""From an object that is no data to the JSON that stands for it."""
Resolve = Callable[[Any], Any]
"""From that JSON to an object on the other side."""


class Closed(BaseException):
    """The other process has ended, or says something that is no message. No `except Exception` of a test hides it."""


def encode(value: Any, refer: Refer) -> Any:
    """`value` as JSON. Values of a built-in type's subclass are the built-in type's, those of a named tuple keep its names.

    Raises:
        TypeError: `refer` does not take an object in it.
        RecursionError: it is too deep, or contains itself.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_SMALL < value < _SMALL else {"int": hex(value)}
    if kind is float:
        return {"float": value.hex()}
    for name, container in _CONTAINERS.items():
        if kind is container:
            return {name: [encode(part, refer) for part in value]}
    for name, mapping in _DICTS.items():
        if kind is mapping:
            return {"dict": [name, [[encode(key, refer), encode(part, refer)] for key, part in value.items()]]}
    return _encode_other(value, kind, refer)


def _encode_other(value: Any, kind: type, refer: Refer) -> Any:
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: base64.b64encode(value).decode()}
    if kind is range:
        return {"range": [encode(part, refer) for part in (value.start, value.stop, value.step)]}
    if kind is collections.deque:
        return {"deque": [[encode(part, refer) for part in value], value.maxlen]}
    if kind is decimal.Decimal:
        return {"Decimal": str(value)}
    if kind is fractions.Fraction:
        return {"Fraction": [encode(value.numerator, refer), encode(value.denominator, refer)]}
    if kind in _TIMES.values() and getattr(value, "tzinfo", None) is None:
        return {kind.__name__: value.isoformat()}
    if kind is datetime.timedelta:
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return encode(value.item(), refer)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {"ndarray": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if any(base.__module__ == "enum" for base in kind.__mro__):
        return refer(value)
    fields = getattr(kind, "_fields", None)
    if issubclass(kind, tuple) and isinstance(fields, tuple):
        return {"named": [kind.__name__, list(fields), [encode(part, refer) for part in tuple.__iter__(value)]]}
    for base, plain in _PLAIN.items():
        if issubclass(kind, base):
            return encode(plain(value), refer)
    return refer(value)


_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: lambda value: int.__add__(value, 0),
    float: lambda value: float.__add__(value, 0.0),
    str: str.__str__,
    list: lambda value: [*list.__iter__(value)],
    tuple: lambda value: (*tuple.__iter__(value),),
    dict: lambda value: dict(dict.items(value)),
    set: lambda value: {*set.__iter__(value)},
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}
"""Plain value of one of a subclass, by its base."""


def decode(given: Any, resolve: Resolve) -> Any:
    """The value that `encode` made `given` of. Raises ValueError and the like if it is none."""
    if given is None or isinstance(given, bool | str | int):
        return given
    ((name, of),) = given.items()
    if name in _CONTAINERS:
        return _CONTAINERS[name]([decode(part, resolve) for part in of])
    if name == "dict":
        return _DICTS[of[0]]({decode(key, resolve): decode(part, resolve) for key, part in of[1]})
    reader = _READERS.get(name)
    return resolve(given) if reader is None else reader(of, resolve)


def _named(of: Any, resolve: Resolve) -> Any:
    name, fields, parts = of
    return collections.namedtuple(str(name), [str(field) for field in fields])(*(decode(part, resolve) for part in parts))


def _array(of: Any, resolve: Resolve) -> Any:
    import numpy

    kind, shape, values = of
    if numpy.dtype(kind).kind not in "biufc":
        raise ValueError(kind)
    return numpy.frombuffer(bytearray(base64.b64decode(values)), kind).reshape(shape)


def _moment(kind: Any, of: Any, resolve: Resolve) -> Any:
    return kind.fromisoformat(of)


_READERS: dict[str, Callable[[Any, Resolve], Any]] = {
    "int": lambda of, resolve: int(of, 16),
    "float": lambda of, resolve: float.fromhex(of),
    "complex": lambda of, resolve: complex(float.fromhex(of[0]), float.fromhex(of[1])),
    "bytes": lambda of, resolve: base64.b64decode(of),
    "bytearray": lambda of, resolve: bytearray(base64.b64decode(of)),
    "range": lambda of, resolve: range(*(decode(part, resolve) for part in of)),
    "deque": lambda of, resolve: collections.deque((decode(part, resolve) for part in of[0]), of[1]),
    "Decimal": lambda of, resolve: decimal.Decimal(of),
    "Fraction": lambda of, resolve: fractions.Fraction(decode(of[0], resolve), decode(of[1], resolve)),
    "timedelta": lambda of, resolve: datetime.timedelta(*of),
    "named": _named,
    "ndarray": _array,
    **{name: partial(_moment, kind) for name, kind in _TIMES.items()},
}


def take_over(old: Any, new: Any) -> None:
    """Make the mutable containers of `old` what they are in `new`, in place: what a call did to its arguments."""
    if type(old) is not type(new):
        return
    if isinstance(old, tuple):
        for old_part, new_part in zip(old, new, strict=False):
            take_over(old_part, new_part)
    elif isinstance(old, list | collections.deque | bytearray):
        merged = [old_part if _is_same(old_part, new_part) else new_part for old_part, new_part in zip(old, new, strict=False)]
        merged += [*new][len(merged) :]
        old.clear()
        old.extend(merged)
    elif isinstance(old, dict | set):
        if isinstance(old, dict):
            new = {key: old[key] if key in old and _is_same(old[key], part) else part for key, part in new.items()}
        old.clear()
        old.update(new)


def _is_same(mine: Any, theirs: Any) -> bool:
    """Return whether `mine`, perhaps after taking over `theirs`, may stay where it is."""
    if type(mine) is type(theirs) and isinstance(mine, list | dict | set | bytearray | collections.deque):
        take_over(mine, theirs)
        return True
    return mine is theirs


class Channel:
    """Messages to and from the other process: lists of JSON, each behind its length in four bytes."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer

    def send(self, message: list[Any]) -> None:
        """Raises Closed where nobody reads any more."""
        text = json.dumps(message, separators=(",", ":")).encode()
        if len(text) > FRAME_BYTES:
            raise ValueError(f"a value of {len(text)} bytes is too large to be compared")
        view = memoryview(struct.pack("<I", len(text)) + text)
        try:
            while view:
                view = view[os.write(self._writer, view) :]
        except OSError:
            raise Closed from None

    def receive(self) -> list[Any]:
        """The next message. Raises Closed where there is none, or it is none."""
        (length,) = struct.unpack("<I", self._read(4))
        if length > FRAME_BYTES:
            raise Closed
        try:
            message = json.loads(self._read(length))
        except (ValueError, RecursionError):
            raise Closed from None
        if not isinstance(message, list) or not message or not isinstance(message[0], str):
            raise Closed
        return message

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = os.read(self._reader, length - len(data))
            if not part:
                raise Closed
            data += part
        return bytes(data)
