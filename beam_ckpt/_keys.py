"""A key as the bytes that its coder writes, for the coders that need no Beam to write them.

The bytes say which key group a key is in, and so which few files have to be read for it. For other
coders all of an operator's state has to be looked through.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

__all__ = ["encode_key", "parse_key"]

_TOKEN = re.compile(r"[A-Za-z_][\w.]*|[\[\],]")
_SIMPLE = frozenset({"StrUtf8Coder", "BytesCoder", "VarIntCoder", "BooleanCoder"})


def encode_key(coder: str, key: object) -> bytes | None:
    r"""Returns the bytes of a key; None where only the coder itself knows them.

    Args:
        coder: Its identity, as a manifest records it (`OperatorSpec.key_coder`).
        key: A string, an integer, bytes, a truth value, or a tuple of these.

    Raises:
        ValueError: The key cannot be one of the coder's.

    >>> encode_key("TupleCoder[StrUtf8Coder,VarIntCoder]", ("a", 300))
    b'\\x01a\\xac\\x02'
    """
    parsed = _parse(coder)
    return None if parsed is None else _encode(parsed, key, False)


def parse_key(coder: str, text: str) -> object | None:
    """Returns the key that somebody typed; None where the coder is not one of the known ones.

    Strings are taken as they are, integers and truth values as JSON has them, bytes as ``0x...``,
    tuples as a JSON list of these.

    Raises:
        ValueError: The text is no key of the coder.
    """
    parsed = _parse(coder)
    if parsed is None:
        return None
    name, _ = parsed
    if name == "StrUtf8Coder" or (name == "BytesCoder" and text.startswith("0x")):
        return _from_json(parsed, text)
    if name == "BytesCoder":
        return text.encode()
    try:
        return _from_json(parsed, json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is no {coder} key: {error}") from None


_Parsed = tuple[str, Sequence["_Parsed"]]


def _parse(coder: str) -> _Parsed | None:
    """The names and parts of a coder, where all of them are known here."""
    tokens = _TOKEN.findall(coder)
    if "".join(tokens) != coder:
        return None
    stream = iter([*tokens, "", ""])
    try:
        parsed, rest = _coder(next(stream), stream)
    except ValueError:
        return None
    return parsed if rest == "" else None


def _coder(name: str, stream: Iterator[str]) -> tuple[_Parsed, str]:
    after = next(stream)
    if name in _SIMPLE:
        return (name, ()), after
    if name != "TupleCoder" or after != "[":
        raise ValueError(name)
    parts = []
    while after in ("[", ","):
        part, after = _coder(next(stream), stream)
        parts.append(part)
    if after != "]":
        raise ValueError(after)
    return (name, tuple(parts)), next(stream)


def _encode(coder: _Parsed, value: object, nested: bool) -> bytes:
    name, parts = coder
    if name == "StrUtf8Coder" and isinstance(value, str):
        data = value.encode("utf-8")
        return _varint(len(data)) + data if nested else data
    if name == "BytesCoder" and isinstance(value, bytes):
        return _varint(len(value)) + value if nested else value
    if name == "BooleanCoder" and isinstance(value, bool):
        return bytes([value])
    if name == "VarIntCoder" and isinstance(value, int) and -(2**63) <= value < 2**63:
        return _varint(value & 2**64 - 1)
    if name == "TupleCoder" and isinstance(value, list | tuple) and len(value) == len(parts):
        last = len(parts) - 1
        return b"".join(
            _encode(part, item, nested or i < last)
            for i, (part, item) in enumerate(zip(parts, value, strict=True))
        )
    raise ValueError(f"a {type(value).__name__} is no key of {name}: {value!r:.100}")


def _from_json(coder: _Parsed, value: object) -> object:
    name, parts = coder
    if name == "TupleCoder":
        if isinstance(value, dict):  # as a struct is shown
            value = list(value.values())
        if not isinstance(value, list) or len(value) != len(parts):
            raise ValueError(f"a key is a JSON list of {len(parts)} values")
        return tuple(_from_json(part, item) for part, item in zip(parts, value, strict=True))
    if name == "BytesCoder":
        if not isinstance(value, str) or not value.startswith("0x"):
            raise ValueError("bytes are written as 0x and hex digits")
        return bytes.fromhex(value[2:])
    return value


def _varint(n: int) -> bytes:
    out = bytearray()
    while n >= 128:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)
