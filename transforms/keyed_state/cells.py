"""What the author's state and timer parameters become: facades over one key's memory.

They have the interface of Beam's own state (`apache_beam.transforms.userstate`), and a value once
written is a value: changing the Python object afterwards changes nothing, on any runner.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from apache_beam.transforms import userstate
from apache_beam.utils.timestamp import Timestamp

from beam_ckpt.transforms.keyed_state.clock import MS
from beam_ckpt.transforms.keyed_state.control import SPILLED
from beam_ckpt.transforms.snapshot import APPEND, KEEP, REPLACE

if TYPE_CHECKING:
    from beam_ckpt.transforms.keyed_state.key import KeyState

__all__ = [
    "BagCell",
    "CombiningCell",
    "OrderedListCell",
    "ReadModifyWriteCell",
    "SetCell",
    "TimerCell",
    "WallTimerCell",
]

_UNREAD = object()
# Instances of exactly these types cannot change under us, so encoding them can wait.
_IMMUTABLE = frozenset({int, str, bytes, float, bool, type(None), complex})


def _frozen(value: Any) -> bool:
    if type(value) is tuple:
        return all(type(part) in _IMMUTABLE for part in value)
    return type(value) in _IMMUTABLE


class _PackedCell:
    """A value packed in the key's one cell: decoded at the first read, encoded once per bundle."""

    __slots__ = ("_coder", "_encoded", "_index", "_key", "_value")

    #: As `encoded` gives it of an empty cell.
    nothing = None

    def __init__(self, key: KeyState, index: int, coder: Any) -> None:
        self._key, self._index, self._coder = key, index, coder
        self._encoded: bytes | object | None = key.control.values[index]
        self._value: Any = None if self._encoded is None else _UNREAD

    def clear(self) -> None:
        if self._encoded is not None:
            self._value = self._encoded = None
            self._key.changed = True

    def encoded(self) -> bytes | None:
        """The value in its coder's bytes; `None` if the cell is empty."""
        if self._encoded is _UNREAD:
            self._encoded = self._encode(self._value)
        elif self._encoded is SPILLED:
            self._encoded = self._key.spilled(self._index)
        assert self._encoded is None or isinstance(self._encoded, bytes)
        return self._encoded

    def _encode(self, value: Any) -> Any:
        return self._coder.encode(value)

    def packed(self) -> bytes | object | None:
        """As `encoded`, but a value that is still in the overflow cell stays there, unread."""
        return SPILLED if self._encoded is SPILLED else self.encoded()

    def saved(self) -> tuple[int, bytes | None]:
        """What a record does with the cell, whose value has been packed, and the value."""
        index = self._index
        if self._key.control.written >> (index if index < 63 else 63) & 1:
            return REPLACE, self.encoded()
        return KEEP, None

    def restore(self, encoded: bytes | None) -> None:
        """Takes over saved bytes as they are."""
        self._encoded = encoded
        self._value = None if encoded is None else _UNREAD


class ReadModifyWriteCell(_PackedCell, userstate.ReadModifyWriteRuntimeState):
    """The author's value."""

    __slots__ = ()

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


class CombiningCell(_PackedCell, userstate.CombiningValueRuntimeState):
    """The author's combining value; what is kept and saved is its accumulator.

    An empty cell reads as what the CombineFn makes of nothing. (Beam's own cell merges an empty
    list of accumulators, which `MeanCombineFn` and others do not survive.)
    """

    __slots__ = ("_combine_fn",)

    def __init__(self, key: KeyState, index: int, coder: Any, combine_fn: Any) -> None:
        super().__init__(key, index, coder)
        self._combine_fn = combine_fn

    def _accumulator(self) -> Any:
        if self._encoded is None:
            return self._combine_fn.create_accumulator()
        if self._value is _UNREAD:
            # Merged, as Beam does: some accumulators (`TopCombineFn`) are whole only then.
            decoded = self._coder.decode(self.encoded())
            self._value = self._combine_fn.merge_accumulators([decoded])
        return self._value

    def _encode(self, value: Any) -> Any:
        # Compacted, `TopCombineFn` has plain values instead of pickles.
        return self._coder.encode(self._combine_fn.compact(value))

    def add(self, value: Any) -> None:
        self._value = self._combine_fn.add_input(self._accumulator(), value)
        self._encoded = _UNREAD
        self._key.changed = True

    def read(self) -> Any:
        accumulator = self._accumulator()
        if self._encoded is not None and not _frozen(accumulator):
            # Some CombineFns change what they extract from, or give it away: the cell goes on
            # from its bytes.
            self.encoded()
            self._value = _UNREAD
        return self._combine_fn.extract_output(accumulator)


class _Own:
    """What runners' cells hold, each object that could be changed as a copy of the reader's own.

    Some runners hand out, or keep until the bundle ends, the very objects of their cache.
    """

    __slots__ = ("_coder", "_parts")

    def __init__(self, coder: Any, *parts: Iterable[Any]) -> None:
        self._parts, self._coder = parts, coder

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            for value in part:
                yield _own(value, self._coder)


def _own(value: Any, coder: Any) -> Any:
    return value if _frozen(value) else coder.decode(coder.encode(value))


class _GrowingCell:
    """What bags and sets share: the runner's own cell, and a bit: it may hold something."""

    __slots__ = ("_bit", "_cell", "_coder", "_index", "_key")

    nothing = ()

    def __init__(self, key: KeyState, index: int, cell: Any, coder: Any) -> None:
        self._key, self._cell, self._coder = key, cell, coder
        self._index, self._bit = index, 1 << index

    def add(self, value: Any) -> None:
        self._cell.add(_own(value, self._coder))
        control = self._key.control
        control.filled |= self._bit
        control.touched |= self._bit
        self._key.changed = True

    def clear(self) -> None:
        control = self._key.control
        if control.filled & self._bit:
            self._cell.clear()
            control.filled &= ~self._bit
            control.touched |= self._bit
            self._key.changed = True

    def saved(self) -> tuple[int, tuple[bytes, ...]]:
        """What a record does with the cell, and the values that it has to hold for that."""
        if self._key.control.touched & self._bit:
            return REPLACE, self.encoded()
        return KEEP, ()

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
    """The author's bag: in the key's one cell while it is small, else in the runner's own.

    Of a large one what is new since the key's last record is in another cell, so that a record can
    have these items alone, and the others are not read for it. One that was cleared since, or is of
    a key of which there is no record, is in the one cell: moving items costs two measurements of
    the SDK's state cache.
    """

    __slots__ = ("_packed", "_recent", "_room")

    def __init__(self, key: KeyState, index: int, cell: Any, coder: Any, recent: Any) -> None:
        super().__init__(key, index, cell, coder)
        self._recent = recent
        #: The items, encoded, and how many more bytes of them the key's one cell takes.
        self._packed = key.control.items.get(index, ())
        self._room = key.bag_bytes - sum(map(len, self._packed)) - len(self._packed)

    def add(self, value: Any) -> None:
        control, bit = self._key.control, self._bit
        self._key.changed = True
        if control.apart & bit:
            self._recent.add(_own(value, self._coder))
            control.recent |= bit
            return
        control.touched |= bit
        if control.filled & bit:
            self._cell.add(_own(value, self._coder))
            return
        data = self._coder.encode(value)
        # A byte more for each, so that a bag of values that have none has an end.
        self._room -= len(data) + 1
        if self._room >= 0:
            if not self._packed:
                self._packed = control.items[self._index] = []
            self._packed.append(data)
            return
        self._unpack()
        self._cell.add(self._coder.decode(data))
        control.filled |= bit

    def _unpack(self) -> None:
        """Moves the items to the runner's cell."""
        for data in self._packed:
            self._cell.add(self._coder.decode(data))
        self._forget()

    def _forget(self) -> None:
        self._key.control.items.pop(self._index, None)
        self._packed = ()

    def set_apart(self, saved: Iterable[bytes]) -> None:
        """Takes note that a record has all items; those of a large bag are not written again.

        The values are those that the record has.
        """
        if self._key.control.filled & self._bit and sum(map(len, saved)) > self._key.bag_bytes:
            self._key.control.apart |= self._bit

    def read(self) -> Iterable[Any]:
        control = self._key.control
        if self._packed:
            return list(map(self._coder.decode, self._packed))
        filled = control.filled & self._bit
        if control.recent & self._bit:
            if filled:
                return _Own(self._coder, self._cell.read(), self._recent.read())
            return _Own(self._coder, self._recent.read())
        return _Own(self._coder, self._cell.read()) if filled else []

    def clear(self) -> None:
        control = self._key.control
        if self._packed:
            self._forget()
            control.touched |= self._bit
            self._key.changed = True
        self._room = self._key.bag_bytes
        if control.recent & self._bit:
            self._recent.clear()
            control.recent &= ~self._bit
            self._key.changed = True
        control.apart &= ~self._bit
        super().clear()

    def encoded(self) -> tuple[bytes, ...]:
        return tuple(self._packed) if self._packed else super().encoded()

    def restore(self, encoded: Iterable[bytes]) -> None:
        items = list(encoded)
        room = self._room - sum(map(len, items)) - len(items)
        if room < 0:
            super().restore(items)
        elif items:
            self._room, self._packed = room, items
            self._key.control.items[self._index] = items

    def saved(self) -> tuple[int, tuple[bytes, ...]]:
        control = self._key.control
        if not control.recent & self._bit:
            return super().saved()
        items = list(self._recent.read())
        encode = self._coder.encode
        values = tuple(encode(item) for item in items)
        self._recent.clear()
        for item in items:
            self._cell.add(item)
        control.recent &= ~self._bit
        control.filled |= self._bit
        return APPEND, values


class SetCell(_GrowingCell, userstate.SetRuntimeState):
    """The author's set; what is read is a copy (one runner hands out its own)."""

    def read(self) -> set[Any]:
        if not self._key.control.filled & self._bit:
            return set()
        return set(_Own(self._coder, self._cell.read()))

    def encoded(self) -> tuple[bytes, ...]:
        return tuple(sorted(super().encoded()))


class OrderedListCell(_GrowingCell, userstate.OrderedListRuntimeState):
    """The author's ordered list, kept as a bag of (microseconds, value), which every runner has.

    A read takes all of it from the runner, once in a bundle; what has one time stays in the order
    in which it was added.
    """

    __slots__ = ("_items", "_stale")

    def __init__(self, key: KeyState, index: int, cell: Any, coder: Any) -> None:
        super().__init__(key, index, cell, coder)
        self._items: list[tuple[int, Any]] | None = None
        self._stale = False

    def _all(self) -> list[tuple[int, Any]]:
        if self._items is None:
            filled = self._key.control.filled & self._bit
            self._items = sorted(self._cell.read(), key=_TIME) if filled else []
        return self._items

    def _range(self, low: Any, limit: Any) -> tuple[int, int]:
        items = self._all()
        first = bisect.bisect_left(items, Timestamp.of(low).micros, key=_TIME)
        return first, max(first, bisect.bisect_left(items, Timestamp.of(limit).micros, key=_TIME))

    def add(self, elem: tuple[Any, Any]) -> None:
        timestamp, value = elem
        item = _own((Timestamp.of(timestamp).micros, value), self._coder)
        if self._items is not None:
            bisect.insort_right(self._items, item, key=_TIME)
        if not self._stale:
            self._cell.add(item)
        control = self._key.control
        control.filled |= self._bit
        control.touched |= self._bit
        self._key.changed = True

    def read(self) -> list[tuple[Timestamp, Any]]:
        return [(Timestamp(micros=at), value) for at, value in _Own(self._coder, self._all())]

    def read_range(self, min_timestamp: Any, limit_timestamp: Any) -> list[tuple[Timestamp, Any]]:
        first, limit = self._range(min_timestamp, limit_timestamp)
        items = _Own(self._coder, self._all()[first:limit])
        return [(Timestamp(micros=at), value) for at, value in items]

    def clear_range(self, min_timestamp: Any, limit_timestamp: Any) -> None:
        first, limit = self._range(min_timestamp, limit_timestamp)
        if first < limit:
            items = self._all()
            del items[first:limit]
            self._stale = True
            self._key.changed = True
            self._key.control.touched |= self._bit
            if not items:
                self._key.control.filled &= ~self._bit

    def clear(self) -> None:
        if self._stale:
            self._cell.clear()  # it has what was taken out of the list, which may be empty by now
        super().clear()
        self._items, self._stale = [], False

    def flush(self) -> None:
        """Writes back what `clear_range` left."""
        if self._stale:
            self._cell.clear()
            for item in self._all():
                self._cell.add(item)
            self._stale = False

    def encoded(self) -> tuple[bytes, ...]:
        items = self._all()
        if not items:
            self._key.control.filled &= ~self._bit
        return tuple(self._coder.encode(item) for item in items)

    def restore(self, encoded: Iterable[bytes]) -> None:
        super().restore(encoded)
        self._items = None


_TIME = itemgetter(0)


class TimerCell(userstate.BaseTimer):
    """The author's event-time timer: a line in the key's memory; the runner knows one clock only.

    Times are cut to the millisecond, as Beam's Fn API does on its way to the runner.
    """

    __slots__ = ("_family", "_key")

    def __init__(self, key: KeyState, family: int) -> None:
        self._key, self._family = key, family

    def set(self, timestamp: Any, dynamic_timer_tag: str = "") -> None:
        micros = Timestamp.of(timestamp).micros
        key = self._key
        if key.closing and micros > key.expiry:
            return
        key.control.timers[(self._family, dynamic_timer_tag)] = micros - micros % MS
        key.changed = True

    def clear(self, dynamic_timer_tag: str = "") -> None:
        if self._key.control.timers.pop((self._family, dynamic_timer_tag), None) is not None:
            self._key.changed = True


class WallTimerCell(userstate.BaseTimer):
    """The author's processing-time timer: the runner's own, and noted to be saved with the key.

    All families share one of the runner's, by dynamic tags.
    """

    __slots__ = ("_family", "_key")

    def __init__(self, key: KeyState, family: int) -> None:
        self._key, self._family = key, family

    def set(self, timestamp: Any, dynamic_timer_tag: str = "") -> None:
        micros = Timestamp.of(timestamp).micros
        self._key.set_wall_timer(self._family, dynamic_timer_tag, micros - micros % MS)
        self._key.changed = True

    def clear(self, dynamic_timer_tag: str = "") -> None:
        if self._key.clear_wall_timer(self._family, dynamic_timer_tag):
            self._key.changed = True
