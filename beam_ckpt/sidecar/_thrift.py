"""A reader of Thrift's compact protocol, in which Parquet writes its footer and page headers.

Arrow reads them too, but ends the process over some that are malformed, and has read and unpacked
what they speak of by the time one can ask it. Here they are data, bounded by their own length.
"""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["Struct", "read_struct"]

Value: TypeAlias = "bool | int | bytes | list[Value] | Struct"
Struct: TypeAlias = dict[int, Value]
"""Fields by their number. Doubles and maps, which Parquet's metadata does not have, are refused."""

_MAX_DEPTH = 16
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _BINARY, _LIST, _STRUCT = 1, 2, 3, 4, 5, 6, 8, 9, 12
_INTEGERS = frozenset({_I16, _I32, _I64})
_FLAGS = frozenset({_TRUE, _FALSE})


def read_struct(data: bytes, at: int) -> tuple[Struct, int]:
    """Returns the struct at this position, and where it ends.

    Raises:
        ValueError: The bytes are no struct.
    """
    try:
        return _struct(data, at, _MAX_DEPTH)
    except IndexError:
        raise ValueError("its metadata ends too early") from None


def _struct(data: bytes, at: int, depth: int) -> tuple[Struct, int]:
    fields: Struct = {}
    number = 0
    while True:
        head = data[at]
        at += 1
        if head == 0:
            return fields, at
        if head >> 4:
            number += head >> 4
        else:
            zigzag, at = _varint(data, at)
            number = zigzag >> 1 ^ -(zigzag & 1)
        kind = head & 15
        if kind in _INTEGERS and data[at] < 128:  # most fields are small numbers
            zigzag = data[at]
            fields[number] = zigzag >> 1 ^ -(zigzag & 1)
            at += 1
        elif kind in _FLAGS:
            fields[number] = kind == _TRUE
        else:
            fields[number], at = _value(data, at, kind, depth)


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Value, int]:
    if depth == 0:
        raise ValueError("its metadata is nested too deeply")
    if kind in _INTEGERS:
        zigzag, at = _varint(data, at)
        return zigzag >> 1 ^ -(zigzag & 1), at
    if kind == _BINARY:
        size = data[at]
        at += 1
        if size >= 128:
            size, at = _varint(data, at - 1)
        if size > len(data) - at:
            raise ValueError("its metadata ends too early")
        return data[at : at + size], at + size
    if kind == _LIST:
        head = data[at]
        at += 1
        count, item = head >> 4, head & 15
        if count == 15:
            count, at = _varint(data, at)
        if count > len(data) - at:
            raise ValueError("its metadata ends too early")
        items: list[Value] = []
        for _ in range(count):
            value, at = _value(data, at, item, depth - 1)
            items.append(value)
        return items, at
    if kind == _STRUCT:
        return _struct(data, at, depth - 1)
    if kind == _BYTE or kind in _FLAGS:  # as items of a list, truth values are bytes
        return data[at], at + 1
    raise ValueError(f"its metadata has a value of unknown kind {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[at]
        at += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, at
        shift += 7
        if shift > 63:
            raise ValueError("its metadata has a number of more than 64 bits")
