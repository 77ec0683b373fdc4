"""A look at the fields of a protobuf message before it is parsed, so that one of many empty parts makes no objects."""

from __future__ import annotations

from collections import Counter
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TEXTS = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)


def read_fields(content: bytes, descriptor: Any, most: int) -> Counter[str]:
    """Count the fields of a message, of all depths at most `most`; returns how many there are of each name at its top.

    Entries of packed numbers count one by one, by their bytes.

    Raises:
        ValueError: there are more, or these are no fields.
    """
    counts: Counter[str] = Counter()
    _look(content, 0, len(content), descriptor, most, counts)
    return counts


def _look(content: bytes, place: int, end: int, descriptor: Any, left: int, counts: Counter[str] | None = None) -> int:
    """Read the fields from `place` to `end`, and those in them; returns how many fewer than `left` are left."""
    fields = descriptor.fields_by_number
    while place < end:
        number, wire, start, place = _field(content, place, end)
        left -= 1
        field = fields.get(number)
        if field is not None and wire == _BYTES:
            if field.message_type is not None:
                left = _look(content, start, place, field.message_type, left)
            elif field.is_repeated and field.type not in _TEXTS:
                left -= place - start
        if left < 0:
            raise ValueError("there are more fields than a request may have")
        if counts is not None and field is not None:
            counts[field.name] += 1
    return left


def first_fields(head: bytes, numbers: tuple[int, ...]) -> dict[int, int | bytes]:
    """The fields of these numbers at the start of a message that may go on behind `head`.

    Raises:
        ValueError: these are no fields.
    """
    found: dict[int, int | bytes] = {}
    place = 0
    while place < len(head) and len(found) < len(numbers):
        try:
            number, wire, start, place = _field(head, place, len(head))
        except ValueError:
            return found
        if number in numbers:
            found[number] = _varint(head, start, len(head))[0] if wire == _VARINT else head[start:place]
    return found


def _field(content: bytes, place: int, end: int) -> tuple[int, int, int, int]:
    """The number and the wire type of the field at `place`, and where its content starts and ends."""
    key, start = _varint(content, place, end)
    wire = key & 7
    if wire == _VARINT:
        stop = _varint(content, start, end)[1]
    elif wire == _BYTES:
        length, start = _varint(content, start, end)
        stop = start + length
    elif wire in (_FIXED64, _FIXED32):
        stop = start + (8 if wire == _FIXED64 else 4)
    else:
        raise ValueError("a group, which the protocol has not")
    if stop > end:
        raise ValueError("a field goes on behind its message")
    return key >> 3, wire, start, stop


def _varint(content: bytes, place: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while place < end:
        byte = content[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
        if shift > 63:
            break
    raise ValueError("a number that does not end")
