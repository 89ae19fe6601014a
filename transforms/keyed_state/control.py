"""What the wrapper itself remembers of a key, and its bytes.

One bytes cell per key and window holds all of it, the author's small values included, packed by
hand: Beam's worker measures every cell that it caches with a walk that costs more than the work,
so one cell of plain bytes is the cheapest state that a key can have.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from beam_ckpt.transforms.snapshot import CarriedOutput, SnapshotRecord

__all__ = ["EVERY_CELL", "SPILLED", "Control"]

_VERSION = 3
_HEAD = struct.Struct("<BHqqqqqQQQQQ")
_BUFFER = struct.Struct("<Iq")
_TIMER = struct.Struct("<HIq")
_COUNT = struct.Struct("<I")
_COUNTS = struct.Struct("<IIHH")
_ITEMS = struct.Struct("<HI?")

(
    _LIVE, _SAVED, _OPEN, _ARMED, _HORIZON, _BUFFERED, _RESTORED, _CLOSED, _GATED
) = (1 << i for i in range(9))  # fmt: skip
_EMPTY_LENGTH, _SPILLED_LENGTH = 0xFFFFFFFF, 0xFFFFFFFE

#: Of `touched` and `written`: nothing of the key is in the checkpoint's chain.
EVERY_CELL = (1 << 64) - 1
#: Stands for a value that is kept in the overflow cell because it is large.
SPILLED = object()


class Control:
    """The wrapper's memory of one key and window. Times are event time in microseconds.

    Attributes:
        live: The key's saved record has come, or it is known that there is none.
        restored: The key's saved record has come.
        gated: The key was restored at its first element, and its record may still come down the
            input: until the gate is passed the key is remembered, whatever becomes of it.
        closed: The run's last cut of this key is taken: what comes now belongs to the next run.
        saved: A record of this key is in the checkpoint's chain, so that emptiness has to be told.
        floor: The last wake-up of the clock: a lower bound of the watermark for this key.
        open: End of the epoch in which the key was changed and not yet saved, or `None`.
        armed: What the runner's clock is set to, or `None`.
        horizon: What the runner's second clock is set to, or `None` (see `dofn.py`).
        updated: Event time of the last change.
        items: Encoded items of the bags that are kept here, being small, by the bag's index among
            the bags and sets.
        filled: Bit i: the runner's cell of the i-th bag or set may hold something.
        touched: Bit i: the i-th bag or set is not what the key's last record says, not even with
            what was added to it since: the next record holds all of it.
        apart: Bit i: what is added to the i-th bag goes to a cell of its own, as the bag is large
            and the key's last record says all that was in it then.
        recent: Bit i: something is in that cell.
        written: Bit i: the i-th packed cell is not what the key's last record says; the last bit
            is for all cells from there on.
        buffered: Elements that wait.
        first_ready: When the first of them may be processed.
        waiting: Those of them that are kept here, encoded; the others are in the buffer's cell.
        timers: (index of the author's timer family, tag) to fire time, of event-time timers.
        wall_timers: The same of processing-time timers, which the runner has too.
        carried: Outputs at or beyond the open cut.
        values: Encoded value of each packed cell; `None` is empty, `SPILLED` is elsewhere.
    """

    __slots__ = (
        "apart",
        "armed",
        "buffered",
        "carried",
        "closed",
        "filled",
        "first_ready",
        "floor",
        "gated",
        "horizon",
        "items",
        "live",
        "open",
        "recent",
        "restored",
        "saved",
        "timers",
        "touched",
        "updated",
        "values",
        "waiting",
        "wall_timers",
        "written",
    )

    def __init__(self, floor: int, live: bool, packed_cells: int) -> None:
        self.live = live
        self.closed = self.saved = self.gated = False
        self.restored = False
        self.floor = floor
        self.open: int | None = None
        self.armed: int | None = None
        self.horizon: int | None = None
        self.updated = floor
        self.filled = self.recent = self.apart = 0
        self.touched = self.written = EVERY_CELL
        self.buffered = 0
        self.first_ready = 0
        self.waiting: Sequence[bytes] = ()
        self.items: dict[int, list[bytes]] = {}
        self.timers: dict[tuple[int, str], int] = {}
        self.wall_timers: dict[tuple[int, str], int] = {}
        self.carried: Sequence[CarriedOutput] = ()
        self.values: list[bytes | object | None] = [None] * packed_cells

    def carry(self, output: CarriedOutput) -> None:
        """Adds to what is carried."""
        if not isinstance(self.carried, list):
            self.carried = list(self.carried)
        self.carried.append(output)

    def pack(self) -> bytes:
        """These fields as bytes; `unpack` is the inverse."""
        open_, armed, horizon = self.open, self.armed, self.horizon
        flags = (
            (_LIVE if self.live else 0)
            | (_SAVED if self.saved else 0)
            | (_OPEN if open_ is not None else 0)
            | (_ARMED if armed is not None else 0)
            | (_HORIZON if horizon is not None else 0)
            | (_BUFFERED if self.buffered else 0)
            | (_RESTORED if self.restored else 0)
            | (_CLOSED if self.closed else 0)
            | (_GATED if self.gated else 0)
        )
        out = [
            _HEAD.pack(
                _VERSION, flags, self.floor, open_ or 0, armed or 0, horizon or 0,
                self.updated, self.filled, self.touched, self.recent, self.written,
                self.apart,
            ),
            _COUNTS.pack(
                len(self.timers), len(self.wall_timers), len(self.values), len(self.items)
            ),
        ]  # fmt: skip
        for value in self.values:
            if value is None:
                out.append(_COUNT.pack(_EMPTY_LENGTH))
            elif value is SPILLED:
                out.append(_COUNT.pack(_SPILLED_LENGTH))
            else:
                assert isinstance(value, bytes)
                out.append(_COUNT.pack(len(value)))
                out.append(value)
        if self.buffered:
            out.append(_BUFFER.pack(self.buffered, self.first_ready))
            _pack_items(out, 0, self.waiting)
        for index, items in self.items.items():
            _pack_items(out, index, items)
        for timers in (self.timers, self.wall_timers):
            for (family, tag), fire in timers.items():
                encoded = tag.encode("utf-8", "surrogatepass")
                out.append(_TIMER.pack(family, len(encoded), fire))
                out.append(encoded)
        if self.carried:
            out.append(SnapshotRecord(b"", b"", False, 0, (), (), tuple(self.carried)).to_bytes())
        return b"".join(out)

    @classmethod
    def unpack(cls, data: bytes) -> Control:
        """The inverse of `pack`. The bytes are the runner's own state, never a file's."""
        (
            version, flags, floor, open_, armed, horizon, updated, filled, touched, recent,
            written, apart,
        ) = _HEAD.unpack_from(data)  # fmt: skip
        if version != _VERSION:
            raise ValueError(f"control cell of version {version}, this code reads {_VERSION}")
        at = _HEAD.size
        timers, wall_timers, cells, bags = _COUNTS.unpack_from(data, at)
        at += _COUNTS.size
        self = cls(floor, bool(flags & _LIVE), cells)
        self.saved = bool(flags & _SAVED)
        self.restored = bool(flags & _RESTORED)
        self.closed = bool(flags & _CLOSED)
        self.gated = bool(flags & _GATED)
        self.open = open_ if flags & _OPEN else None
        self.armed = armed if flags & _ARMED else None
        self.horizon = horizon if flags & _HORIZON else None
        self.updated, self.filled = updated, filled
        self.touched, self.recent, self.written = touched, recent, written
        self.apart = apart
        for i in range(cells):
            (length,) = _COUNT.unpack_from(data, at)
            at += 4
            if length == _SPILLED_LENGTH:
                self.values[i] = SPILLED
            elif length != _EMPTY_LENGTH:
                self.values[i] = data[at : at + length]
                at += length
        if flags & _BUFFERED:
            self.buffered, self.first_ready = _BUFFER.unpack_from(data, at)
            _, self.waiting, at = _unpack_items(data, at + _BUFFER.size)
        for _ in range(bags):
            index, items, at = _unpack_items(data, at)
            self.items[index] = items
        for i in range(timers + wall_timers):
            family, length, fire = _TIMER.unpack_from(data, at)
            at += _TIMER.size
            tag = data[at : at + length].decode("utf-8", "surrogatepass")
            at += length
            (self.timers if i < timers else self.wall_timers)[(family, tag)] = fire
        if at < len(data):
            self.carried = SnapshotRecord.from_bytes(data[at:]).carried
        return self


def _pack_items(out: list[bytes], index: int, items: Sequence[bytes]) -> None:
    """A number, and pieces of bytes: how many, how long each is, and then all of them."""
    lengths = list(map(len, items))
    short = max(lengths, default=0) < 256
    out.append(_ITEMS.pack(index, len(items), short))
    out.append(bytes(lengths) if short else struct.pack(f"<{len(items)}I", *lengths))
    out += items


def _unpack_items(data: bytes, at: int) -> tuple[int, list[bytes], int]:
    """The inverse of `_pack_items`, and where it ends."""
    index, count, short = _ITEMS.unpack_from(data, at)
    at += _ITEMS.size
    lengths = data[at : at + count] if short else struct.unpack_from(f"<{count}I", data, at)
    at += count if short else 4 * count
    items = []
    for length in lengths:
        items.append(data[at : at + length])
        at += length
    return index, items, at
