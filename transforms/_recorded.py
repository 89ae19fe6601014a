"""From the identity of a coder, as a checkpoint records it, back to a coder that reads its values.

The identity is text that anybody may have written, so it is only ever looked up: Beam's own coders
by name, their components in brackets. Nothing is imported, and a coder that unpickles does not
count as readable unless the caller says so. `coder_identity` is the other direction.
"""

from __future__ import annotations

import datetime
import decimal
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
from apache_beam import coders
from apache_beam.coders.coders import (
    BigEndianShortCoder,
    BigIntegerCoder,
    CloudpickleCoder,
    Coder,
    DecimalCoder,
    GlobalWindowCoder,
    IntervalWindowCoder,
    ListCoder,
    SinglePrecisionFloatCoder,
    TupleSequenceCoder,
    VarInt32Coder,
)
from apache_beam.utils.timestamp import Timestamp

from beam_ckpt.transforms.columns import BYTE_CODERS, coder_identity

__all__ = ["Recorded", "recorded_coder"]

_PLAIN_KINDS: tuple[type[Coder], ...] = (
    coders.BooleanCoder,
    coders.BytesCoder,
    coders.FloatCoder,
    GlobalWindowCoder,
    IntervalWindowCoder,
    coders.StrUtf8Coder,
    coders.TimestampCoder,
    coders.VarIntCoder,
    BigEndianShortCoder,
    BigIntegerCoder,
    *BYTE_CODERS,
    DecimalCoder,
    SinglePrecisionFloatCoder,
    VarInt32Coder,
)
_PLAIN: Mapping[str, Callable[[], Coder]] = {kind.__qualname__: kind for kind in _PLAIN_KINDS}
_COMPOSED: Mapping[str, Callable[..., Coder]] = {
    "TupleCoder": lambda *parts: coders.TupleCoder(parts),
    "TupleSequenceCoder": TupleSequenceCoder,
    "IterableCoder": coders.IterableCoder,
    "ListCoder": ListCoder,
    "MapCoder": coders.MapCoder,
    "NullableCoder": coders.NullableCoder,
}
# These run what their bytes say.
_UNPICKLING: Mapping[str, Callable[[], Coder]] = {
    "FastPrimitivesCoder": coders.FastPrimitivesCoder,
    "PickleCoder": coders.PickleCoder,
    "DillCoder": coders.DillCoder,
    "CloudpickleCoder": CloudpickleCoder,
}
# Types of the fields of rows.
_FIELDS: Mapping[str, Any] = {
    "VarIntCoder": np.int64,
    "VarInt32Coder": np.int32,
    "BigEndianShortCoder": np.int16,
    "ByteCoder": np.int8,
    "FloatCoder": np.float64,
    "SinglePrecisionFloatCoder": np.float32,
    "BooleanCoder": bool,
    "StrUtf8Coder": str,
    "BytesCoder": bytes,
    "DecimalCoder": decimal.Decimal,
}
# Not that of a `PythonCallableWithSource`, which runs what its bytes say.
_LOGICAL: Mapping[str, Any] = {
    "beam:logical_type:date:v1": datetime.date,
    "beam:logical_type:micros_instant:v1": Timestamp,
}


class _OpaqueCoder(Coder):
    """Stands for a coder that is not known here: its values are bytes, and stay so."""


_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*"|[\w.:]+)|([\[\],?])')
_MAX_DEPTH = 64


class _Node(NamedTuple):
    """A coder's name, or a row's field, with what is in its brackets."""

    name: str
    parts: tuple[_Node, ...]
    nullable: bool


class Recorded(NamedTuple):
    """A coder as a checkpoint records it.

    Attributes:
        coder: Has the same columns in a sidecar as the one that wrote them.
        readable: Whether it may decode values. Otherwise a part of it would unpickle, or is known
            to its author only.
    """

    coder: Coder
    readable: bool


def recorded_coder(identity: str, *, unsafe_unpickle: bool = False) -> Recorded | None:
    """Returns the coder of that identity; `None` where it cannot be made from its name.

    Args:
        identity: As `coder_identity` gives it.
        unsafe_unpickle: Whether a coder that unpickles counts as readable: its values then run
            whatever code their bytes name.
    """
    try:
        node = _parse(identity)
        coder = _coder(node)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    names = set(_leaves(node))
    known = names <= {*_PLAIN, *_UNPICKLING}
    if known and coder_identity(coder) != identity:
        return None
    return Recorded(coder, known and (unsafe_unpickle or names <= set(_PLAIN)))


def _leaves(node: _Node) -> Iterator[str]:
    name = node.name.rpartition(":")[2]
    if name == "LogicalTypeCoder":
        return  # `_LOGICAL` has those that are known.
    if not node.parts:
        yield name
    for part in node.parts:
        yield from _leaves(part)


def _parse(text: str) -> _Node:
    tokens = _tokens(text)
    node, rest = _node(next(tokens, ""), tokens, 0)
    if rest is not None:
        raise ValueError(f"{rest!r} after the end")
    return node


def _tokens(text: str) -> Iterator[str]:
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise ValueError(f"no coder identity from {position} on")
        yield found.group()
        position = found.end()


def _node(name: str, tokens: Iterator[str], depth: int) -> tuple[_Node, str | None]:
    """One node, and the token after it."""
    if depth > _MAX_DEPTH or name in "[],?":
        raise ValueError("no coder identity")
    token = next(tokens, None)
    if token is not None and name.startswith('"') and token.startswith(":"):
        # A quoted field name: its coder follows the colon.
        name, token = name + token, next(tokens, None)
    parts: list[_Node] = []
    if token == "[":
        while token != "]":
            part, token = _node(next(tokens, ""), tokens, depth + 1)
            parts.append(part)
            if token not in (",", "]"):
                raise ValueError("no coder identity")
        token = next(tokens, None)
    nullable = token == "?"
    if nullable:
        token = next(tokens, None)
    return _Node(name, tuple(parts), nullable), token


def _coder(node: _Node) -> Coder:
    if not node.parts:
        make = _PLAIN.get(node.name) or _UNPICKLING.get(node.name) or _OpaqueCoder
        return make()
    if node.name == "RowCoder":
        row: Coder = coders.RowCoder.from_type_hint(_row(node), None)
        return row
    return _COMPOSED[node.name](*map(_coder, node.parts))


def _row(node: _Node) -> Any:
    fields = []
    for field in node.parts:
        name, kind = _field(field.name)
        hint = _hint(_Node(kind, field.parts, False))
        # Beam takes `hint | None` for Any.
        fields.append((name, Optional[hint] if field.nullable else hint))  # noqa: UP045
    return NamedTuple("SavedRow", fields)


def _field(text: str) -> tuple[str, str]:
    if text.startswith('"'):
        end = text.rindex('"') + 1
        return json.loads(text[:end]), text[end + 1 :]
    name, _, kind = text.rpartition(":")
    return name, kind


def _hint(node: _Node) -> Any:
    """The type of a row's field."""
    if not node.parts:
        return _FIELDS[node.name]
    if node.name == "RowCoder":
        return _row(node)
    if node.name == "LogicalTypeCoder":
        return _LOGICAL[node.parts[0].name]
    parts = [_hint(part) for part in node.parts]
    if node.name == "NullableCoder":
        return Optional[parts[0]]  # noqa: UP045
    if node.name == "IterableCoder":
        return Sequence[parts[0]]  # type: ignore[valid-type]
    if node.name == "MapCoder":
        return Mapping[parts[0], parts[1]]  # type: ignore[valid-type]
    raise KeyError(node.name)
