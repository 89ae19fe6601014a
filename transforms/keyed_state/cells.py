"""What the author's state and timer parameters become: facades over one key's memory.

They have the interface of Beam's own state (`apache_beam.transforms.userstate`), and a value once
written is a value: changing the Python object afterwards changes nothing, on any runner.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from apache_beam.transforms import userstate
from apache_beam.utils.timestamp import Timestamp

from beam_ckpt.transforms.keyed_state.clock import MS
from beam_ckpt.transforms.keyed_state.control import SPILLED

if TYPE_CHECKING:
    from beam_ckpt.transforms.keyed_state.key import KeyState

__all__ = ["BagCell", "ReadModifyWriteCell", "SetCell", "TimerCell"]

_UNREAD = object()
# Instances of exactly these types cannot change under us, so encoding them can wait.
_IMMUTABLE = frozenset({int, str, bytes, float, bool, type(None), complex})


class ReadModifyWriteCell(userstate.ReadModifyWriteRuntimeState):
    """A value packed in the key's one cell: decoded at the first read, encoded once per bundle."""

    __slots__ = ("_coder", "_encoded", "_index", "_key", "_value")

    def __init__(self, key: KeyState, index: int, coder: Any) -> None:
        self._key, self._index, self._coder = key, index, coder
        self._encoded: bytes | object | None = key.control.values[index]
        self._value: Any = None if self._encoded is None else _UNREAD

    def read(self) -> Any:
        value = self._value
        if value is _UNREAD:
            encoded = self.encoded()
            value = self._coder.decode(encoded)
            if type(value) in _IMMUTABLE:
                self._value = value
        return value

    def write(self, value: Any) -> None:
        if type(value) in _IMMUTABLE:
            self._value, self._encoded = value, _UNREAD
        else:
            self._value, self._encoded = _UNREAD, self._coder.encode(value)
        self._key.changed = True

    def clear(self) -> None:
        if self._encoded is not None:
            self._value = self._encoded = None
            self._key.changed = True

    def encoded(self) -> bytes | None:
        """The value in its coder's bytes; `None` if the cell is empty."""
        if self._encoded is _UNREAD:
            self._encoded = self._coder.encode(self._value)
        elif self._encoded is SPILLED:
            self._encoded = self._key.spilled(self._index)
        assert self._encoded is None or isinstance(self._encoded, bytes)
        return self._encoded

    def packed(self) -> bytes | object | None:
        """As `encoded`, but a value that is still in the overflow cell stays there, unread."""
        return SPILLED if self._encoded is SPILLED else self.encoded()

    def restore(self, encoded: bytes | None) -> None:
        """Takes over saved bytes as they are."""
        self._encoded = encoded
        self._value = None if encoded is None else _UNREAD


class _GrowingCell:
    """What bags and sets share: the runner's own cell, and a bit: it may hold something."""

    __slots__ = ("_bit", "_cell", "_coder", "_key")

    def __init__(self, key: KeyState, bit: int, cell: Any, coder: Any) -> None:
        self._key, self._bit, self._cell, self._coder = key, bit, cell, coder

    def add(self, value: Any) -> None:
        self._cell.add(value)
        self._key.control.filled |= self._bit
        self._key.changed = True

    def clear(self) -> None:
        control = self._key.control
        if control.filled & self._bit:
            self._cell.clear()
            control.filled &= ~self._bit
            self._key.changed = True

    def encoded(self) -> tuple[bytes, ...]:
        """The values in their coder's bytes, now: cached state holds live objects."""
        control = self._key.control
        if not control.filled & self._bit:
            return ()
        encode = self._coder.encode
        values = tuple(encode(value) for value in self._cell.read())
        if not values:
            control.filled &= ~self._bit
        return values

    def restore(self, encoded: Iterable[bytes]) -> None:
        """Takes over saved values."""
        for value in encoded:
            self._cell.add(self._coder.decode(value))
            self._key.control.filled |= self._bit


class BagCell(_GrowingCell, userstate.BagRuntimeState):
    """The author's bag."""

    def read(self) -> Iterable[Any]:
        if not self._key.control.filled & self._bit:
            return []
        values: Iterable[Any] = self._cell.read()
        return values


class SetCell(_GrowingCell, userstate.SetRuntimeState):
    """The author's set; what is read is a copy (one runner hands out its own)."""

    def read(self) -> set[Any]:
        if not self._key.control.filled & self._bit:
            return set()
        return set(self._cell.read())

    def encoded(self) -> tuple[bytes, ...]:
        return tuple(sorted(super().encoded()))


class TimerCell(userstate.BaseTimer):
    """The author's event-time timer: a line in the key's memory; the runner knows one clock only.

    Times are cut to the millisecond, as Beam's Fn API does on its way to the runner.
    """

    __slots__ = ("_family", "_key")

    def __init__(self, key: KeyState, family: int) -> None:
        self._key, self._family = key, family

    def set(self, timestamp: Any, dynamic_timer_tag: str = "") -> None:
        micros = Timestamp.of(timestamp).micros
        self._key.control.timers[(self._family, dynamic_timer_tag)] = micros - micros % MS
        self._key.changed = True

    def clear(self, dynamic_timer_tag: str = "") -> None:
        if self._key.control.timers.pop((self._family, dynamic_timer_tag), None) is not None:
            self._key.changed = True
