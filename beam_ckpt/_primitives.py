"""Values of cells without a type, as JSON, without Beam and without opening a pickle.

Beam's coder of "anything" (`FastPrimitivesCoder`, what a cell gets whose coder nobody chose) writes
None, numbers, truth values, text, bytes, lists, tuples, sets and mappings in a form of its own, and
pickles the rest. The accumulators of Beam's own combiners are mostly of the first kind: a mean is
a tuple of sum and count.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence

from beam_ckpt._unpickle import beam_time, unpickled

__all__ = ["UNTYPED", "as_json"]

UNTYPED = "FastPrimitivesCoder"
"""The identity of the coder, as a manifest records it."""

_NONE, _INT, _FLOAT, _BYTES, _TEXT, _LIST, _TUPLE, _DICT, _SET, _BOOL, _ITERABLE = range(11)
_PICKLED = 0xFF
_MAX_DEPTH = 64


def as_json(data: bytes, *, parts: Sequence[str] = (), unsafe_unpickle: bool = False) -> str:
    """Returns a value as JSON.

    Tuples and sets are lists; a mapping is an object where all its keys are text and else a list of
    pairs; bytes are ``"0x..."``; what JSON has no number for is ``"nan"``, ``"inf"`` or ``"-inf"``.
    Beam's `Timestamp` and `Duration`, which it pickles, are told without opening the pickle, as ISO
    8601. Any other pickle, or what is no value of this coder, is ``{"undecoded": "0x..."}``.

    Args:
        data: What the coder wrote.
        parts: Names of the parts of a tuple of as many, which is an object then.
        unsafe_unpickle: Open pickles, which runs the code that they name.

    >>> as_json(bytes([6, 2, 1, 12, 1, 4]))
    '[12, 4]'
    """
    opened = unpickled if unsafe_unpickle else _undecoded
    try:
        value, end = _value(data, 0, False, _MAX_DEPTH, opened)
        if end != len(data):
            raise ValueError("bytes are left over")
        if parts and data[0] == _TUPLE and isinstance(value, list) and len(value) == len(parts):
            value = dict(zip(parts, value, strict=True))
    except (ValueError, IndexError, struct.error):
        value = _undecoded(data)
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _value(
    data: bytes, at: int, nested: bool, depth: int, opened: Callable[[bytes], object]
) -> tuple[object, int]:
    if depth == 0:
        raise ValueError("nested too deeply")
    kind = data[at]
    at += 1
    if kind == _NONE:
        return None, at
    if kind == _INT:
        number, at = _varint(data, at)
        return number - (number >> 63 << 64), at
    if kind == _FLOAT:
        (ratio,) = struct.unpack_from(">d", data, at)
        return (ratio if math.isfinite(ratio) else str(ratio)), at + 8
    if kind == _BOOL:
        return data[at] != 0, at + 1
    if kind in (_BYTES, _TEXT, _PICKLED):
        raw, at = _raw(data, at, nested)
        if kind == _TEXT:
            return raw.decode("utf-8"), at
        if kind == _BYTES:
            return "0x" + raw.hex(), at
        return beam_time(raw) or opened(raw), at
    if kind in (_LIST, _TUPLE, _SET):
        return _items(data, at, depth, opened)
    if kind == _DICT:
        return _mapping(data, at, depth, opened)
    raise ValueError(f"kind {kind} is not known here")


def _items(
    data: bytes, at: int, depth: int, opened: Callable[[bytes], object]
) -> tuple[list[object], int]:
    count, at = _count(data, at)
    items = []
    for _ in range(count):
        item, at = _value(data, at, True, depth - 1, opened)
        items.append(item)
    return items, at


def _mapping(
    data: bytes, at: int, depth: int, opened: Callable[[bytes], object]
) -> tuple[object, int]:
    count, at = _count(data, at)
    pairs = []
    text = True
    for _ in range(count):
        text = text and data[at] == _TEXT
        key, at = _value(data, at, True, depth - 1, opened)
        value, at = _value(data, at, True, depth - 1, opened)
        pairs.append((key, value))
    if text:
        return {str(key): value for key, value in pairs}, at
    return [list(pair) for pair in pairs], at


def _count(data: bytes, at: int) -> tuple[int, int]:
    count, at = _varint(data, at)
    if count > len(data) - at:  # each item has a byte at least
        raise ValueError("more items than there are bytes")
    return count, at


def _raw(data: bytes, at: int, nested: bool) -> tuple[bytes, int]:
    size = len(data) - at
    if nested:
        size, at = _varint(data, at)
    if size > len(data) - at:
        raise ValueError("a value is cut short")
    return data[at : at + size], at + size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            if number >> 64:
                raise ValueError("a number of more than 64 bits")
            return number, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _undecoded(data: bytes) -> dict[str, object]:
    return {"undecoded": "0x" + data.hex()}
