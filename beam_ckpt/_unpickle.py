"""What a pickle holds: opened where the caller has said so, and never otherwise.

Opening a pickle runs whatever code it names. Two classes need none of that: a Beam `Timestamp` and
a `Duration` are told from the pickle's text, which is read and not run.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import pickletools
from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["PICKLING", "beam_time", "plain", "unpickled", "unpickler"]

PICKLING = frozenset({"PickleCoder", "DillCoder", "CloudpickleCoder"})
"""Identities of coders that write nothing but a pickle."""

_MAX_DEPTH = 32
_MAX_TEXT = 10_000
_MODULE = "apache_beam.utils.timestamp"


def unpickled(data: bytes) -> object:
    """Opens a pickle, which runs the code that it names. Returns what JSON has for it.

    What cannot be opened, as its class is not here, is ``{"undecoded": "0x...", "error": ...}``.
    """
    return _opened(pickle.loads, data)


def unpickler(coder: str) -> Callable[[bytes], object]:
    """Returns `unpickled` for what one of the `PICKLING` coders wrote; needs Beam."""
    decode = getattr(import_module("apache_beam.coders.coders"), coder)().decode
    return lambda data: _opened(decode, data)


def _opened(loads: Callable[[bytes], object], data: bytes) -> object:
    try:
        return plain(loads(data))
    except Exception as error:  # what a pickle may raise is not ours to enumerate
        return {"undecoded": "0x" + data.hex(), "error": f"{type(error).__name__}: {error}"}


def plain(value: object, depth: int = _MAX_DEPTH) -> object:
    """Returns what JSON has for a Python value.

    Tuples and sets are lists, an object is its class and its fields, and what has none is its
    `repr`.
    """
    if depth == 0:
        return {"repr": repr(value)[:_MAX_TEXT]}
    if value is None or isinstance(value, bool | int | str):
        return value if type(value) in (type(None), bool, int, str) else plain_base(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes | bytearray):
        return "0x" + bytes(value).hex()
    if type(value).__module__ == _MODULE and hasattr(value, "micros"):
        return _time(type(value).__name__, value.micros)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(item, depth - 1) for name, item in value._asdict().items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item, depth - 1) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(item, depth - 1) for item in value]
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value):
            return {key: plain(item, depth - 1) for key, item in value.items()}
        return [[plain(k, depth - 1), plain(v, depth - 1)] for k, v in value.items()]
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    fields: Mapping[str, object] | None = None
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    elif hasattr(value, "__dict__"):
        fields = vars(value)
    if fields is None:
        return {"python": name, "repr": repr(value)[:_MAX_TEXT]}
    return {"python": name, **{key: plain(item, depth - 1) for key, item in fields.items()}}


def plain_base(value: object) -> object:
    """A value of a subclass of int or str, such as a member of an enumeration, by its own name."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return {"python": name, "repr": repr(value)[:_MAX_TEXT]}


def beam_time(data: bytes) -> str | None:
    """Returns the text of a pickled Beam `Timestamp` or `Duration`; `None` for any other pickle.

    The pickle is read as a list of instructions, of which none is carried out: only the very ones
    that make such an object, with whole numbers in it, are known.
    """
    found: list[object] = []
    try:
        for op, argument, _ in pickletools.genops(io.BytesIO(data)):
            if op.name in _NOISE:
                continue
            if op.name not in _KNOWN:
                return None
            found.append(argument if op.name in _VALUES else op.name)
    except (ValueError, IndexError, UnicodeDecodeError):
        return None
    if (
        len(found) < 8
        or found[0] != _MODULE
        or found[2:5] != ["STACK_GLOBAL", "EMPTY_TUPLE", "NEWOBJ"]
    ):
        return None
    kind = found[1]
    fields = [
        item for item in found[5:-2] if item not in ("EMPTY_DICT", "MARK", "SETITEMS", "SETITEM")
    ]
    named = dict(zip(fields[::2], fields[1::2], strict=False))
    if found[-2:] != ["BUILD", "STOP"] or not all(type(n) is int for n in named.values()):
        return None
    numbers = {str(key): value for key, value in named.items() if isinstance(value, int)}
    if set(numbers) == {"micros"} and kind in ("Timestamp", "Duration"):
        return _time(str(kind), numbers["micros"])
    if set(numbers) == {"_precision", "_seconds", "_subseconds"} and kind == "Timestamp":
        if not 0 <= numbers["_precision"] <= 6:
            return None
        micros = numbers["_subseconds"] * 10 ** (6 - numbers["_precision"])
        return _time("Timestamp", numbers["_seconds"] * 1_000_000 + micros)
    return None


_NOISE = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "BINGET"})
_VALUES = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"})
_KNOWN = _VALUES | {
    "STACK_GLOBAL", "EMPTY_TUPLE", "NEWOBJ", "EMPTY_DICT", "MARK", "SETITEMS", "SETITEM", "BUILD",
    "STOP",
}  # fmt: skip


def _time(kind: str, micros: int) -> str:
    """ISO 8601: a moment in UTC, or how long something takes."""
    from beam_ckpt._terminal import event_time

    if kind == "Timestamp":
        return event_time(micros) or ""
    seconds, rest = divmod(abs(micros), 1_000_000)
    fraction = f".{rest:06d}".rstrip("0") if rest else ""
    return f"{'-' if micros < 0 else ''}PT{seconds}{fraction}S"
