"""The record of one key and window at a cut, and its bytes on the way to a sidecar.

The wrapper around the author's DoFn emits one :class:`SnapshotRecord` for each key and window that
was touched in an epoch; the writer groups records by key group and turns them into columns.
Everything in a record is encoded already: cells that a runner caches are live objects, so what a
record holds must not change after it was taken.

A record may hold only what changed since the key's record before: its patch says of each cell
whether it is replaced, kept, or has items added to it. Timers and carried outputs are always whole.

The bytes of a record (format 1), in order::

    version           one byte, 1
    flags             one byte: 1 deleted, 2 timers follow the cells, 4 carried outputs follow them,
                      8 a patch stands before the cells
    updated           8 bytes, big-endian, signed
    key, window       each: length, bytes
    count             of the cells
    patch             one byte a cell: 0 replaced, 1 kept (and empty here), 2 added to
    cells             per cell one head and what it announces:
                        head 0       no value
                        head 2n + 1  a value of n bytes
                        head 2n + 2  a list of n items, each: length, bytes
    timers            count in 4 bytes, then each: family, tag, domain (one byte: 0 event,
                      1 processing), fire, presence of output (one byte), output
    carried outputs   count in 4 bytes, then each: presence of tag (one byte), tag, timestamp,
                      window, value

Other counts, lengths and heads are unsigned varints (seven bits a byte, low bits first, shortest
form); times are 8 bytes like ``updated``; text is UTF-8; text and bytes come after their length.
What is in many records at once is read and written by :mod:`beam_ckpt.transforms.columns`, which
knows this format too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NoReturn

from beam_ckpt.errors import InvalidCheckpointError, UnsupportedFormatError
from beam_ckpt.sidecar._patch import APPEND, KEEP, REPLACE

__all__ = ["APPEND", "KEEP", "REPLACE", "CarriedOutput", "SavedTimer", "SnapshotRecord"]

TimerDomain = Literal["event", "processing"]
"""Which clock a saved timer waits for."""

FORMAT = 1
DELETED, TIMERS, CARRIED, PATCHED = 1, 2, 4, 8
DOMAINS: tuple[TimerDomain, ...] = ("event", "processing")

_BYTE = tuple(bytes((n,)) for n in range(256))


# Not frozen: a frozen dataclass sets each field through object.__setattr__, which doubles the cost
# of making one, and one is made for each key and window of every checkpoint and restore.
@dataclass(slots=True)
class SavedTimer:
    """A timer of the author's that was pending at the cut.

    Attributes:
        family: Name of the author's timer spec.
        tag: The dynamic timer tag, ``""`` for none.
        domain: ``"event"`` or ``"processing"``.
        fire: When it fires, in microseconds since the epoch of its domain.
        output: The timestamp its outputs are held at, in microseconds; None where the fire time
            stands for it.
    """

    family: str
    tag: str
    domain: TimerDomain
    fire: int
    output: int | None


@dataclass(slots=True)
class CarriedOutput:
    """An output that was emitted before the cut with a timestamp at or after it.

    Attributes:
        tag: Tag of the output, None for the main one.
        timestamp: Its timestamp, in microseconds.
        window: Its window, encoded with the window coder.
        value: Its value, encoded with the coder of the output PCollection.
    """

    tag: str | None
    timestamp: int
    window: bytes
    value: bytes


@dataclass(slots=True)
class SnapshotRecord:
    """The state of one key and window at a cut, encoded.

    Attributes:
        key: The key, encoded with the key coder.
        window: The window, encoded with the window coder.
        deleted: True for a tombstone: nothing is left of this key and window.
        updated: Event time of the last touch, in microseconds.
        cells: One entry per cell, in the operator's order. Cells of one value: its bytes, or None
            when empty. Cells of many (bags, sets): a tuple with the bytes of each, in order. Every
            value is what ``coder.encode(value)`` gives.
        timers: The pending timers.
        carried: Outputs beyond the cut, in the order in which they were emitted.
        patch: What the record does with each cell, a byte each: `REPLACE`, `KEEP` (the cell is
            empty here), or `APPEND` (only to a cell of many). None: it replaces them all.
    """

    key: bytes
    window: bytes
    deleted: bool
    updated: int
    cells: tuple[bytes | tuple[bytes, ...] | None, ...]
    timers: tuple[SavedTimer, ...]
    carried: tuple[CarriedOutput, ...]
    patch: bytes | None = None

    def onto(self, before: SnapshotRecord | None) -> SnapshotRecord:
        """Returns what this record and the key's one before it say together.

        Sidecars are merged in columns (`beam_ckpt.sidecar.merge_newest_first`); this is the same
        in plain words.
        """
        if self.patch is None or before is None:
            return self
        cells: list[bytes | tuple[bytes, ...] | None] = []
        patch = bytearray()
        earlier = before.patch or bytes(len(before.cells))
        parts = zip(self.patch, self.cells, earlier, before.cells, strict=True)
        for code, cell, was_code, was in parts:
            if code == REPLACE:
                cells.append(cell)
                patch.append(REPLACE)
            elif code == KEEP:
                cells.append(was)
                patch.append(was_code)
            else:
                assert not isinstance(cell, bytes)
                assert not isinstance(was, bytes)
                cells.append((*(was or ()), *(cell or ())))
                patch.append(APPEND if was_code == KEEP else was_code)
        return replace(self, cells=tuple(cells), patch=bytes(patch) if any(patch) else None)

    def to_bytes(self) -> bytes:
        """Returns the record in the format of this module.

        Raises:
            OverflowError: A time does not fit 64 bits.
            UnicodeEncodeError: A timer's or output's name has a lone surrogate.
        """
        byte = _BYTE
        key, window, cells, patch = self.key, self.window, self.cells, self.patch
        flags = DELETED if self.deleted else 0
        if patch is not None:
            flags |= PATCHED
        if self.timers:
            flags |= TIMERS
        if self.carried:
            flags |= CARRIED
        n = len(key)
        w = len(window)
        c = len(cells)
        parts = [
            b"\x01",
            byte[flags],
            self.updated.to_bytes(8, "big", signed=True),
            byte[n] if n < 128 else _varint(n),
            key,
            byte[w] if w < 128 else _varint(w),
            window,
            byte[c] if c < 128 else _varint(c),
        ]
        add = parts.append
        if patch is not None:
            add(patch)
        for cell in cells:
            if cell is None:
                add(b"\x00")
            elif isinstance(cell, tuple):
                n = 2 * len(cell) + 2
                add(byte[n] if n < 128 else _varint(n))
                for item in cell:
                    n = len(item)
                    add(byte[n] if n < 128 else _varint(n))
                    add(item)
            else:
                n = 2 * len(cell) + 1
                add(byte[n] if n < 128 else _varint(n))
                add(cell)
        if flags & TIMERS:
            add(len(self.timers).to_bytes(4, "big"))
            for timer in self.timers:
                _add_timer(parts, timer)
        if flags & CARRIED:
            add(len(self.carried).to_bytes(4, "big"))
            for output in self.carried:
                _add_carried(parts, output)
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = "a snapshot record") -> SnapshotRecord:
        """Reads what :meth:`to_bytes` wrote.

        No length or count in ``data`` is believed before the bytes it speaks of are there, so
        memory is bounded by the length of ``data``.

        Args:
            data: The bytes of exactly one record.
            where: What to call this record in an error.

        Raises:
            UnsupportedFormatError: The record was written in a format this version does not know.
            InvalidCheckpointError: The bytes are truncated, too long or not a record.
        """
        try:
            return _parse(cls, data, where)
        except IndexError:
            _malformed(where, data, "it ends too early")
        except UnicodeDecodeError as error:
            _malformed(where, data, f"a name in it is not UTF-8 ({error.reason})")


def _varint(n: int) -> bytes:
    if n < 128:
        return _BYTE[n]
    out = bytearray()
    while n >= 128:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def _text(text: str) -> bytes:
    data = text.encode("utf-8")
    return _varint(len(data)) + data


def _add_timer(parts: list[bytes], timer: SavedTimer) -> None:
    parts += (
        _text(timer.family),
        _text(timer.tag),
        _BYTE[DOMAINS.index(timer.domain)],
        timer.fire.to_bytes(8, "big", signed=True),
    )
    if timer.output is None:
        parts.append(b"\x00")
    else:
        parts += (b"\x01", timer.output.to_bytes(8, "big", signed=True))


def _add_carried(parts: list[bytes], output: CarriedOutput) -> None:
    if output.tag is None:
        parts.append(b"\x00")
    else:
        parts += (b"\x01", _text(output.tag))
    parts += (
        output.timestamp.to_bytes(8, "big", signed=True),
        _varint(len(output.window)),
        output.window,
        _varint(len(output.value)),
        output.value,
    )


def _malformed(where: str, data: bytes, what: str) -> NoReturn:
    raise InvalidCheckpointError(
        f"{where} ({len(data)} bytes) is malformed: {what}. It was damaged, or was not written by "
        "this library; restore from an older checkpoint."
    )


# A slice past the end is short instead of an error, so every read compares where it ends with the
# size; a single index past the end raises IndexError, which from_bytes turns into the real error.
def _parse(cls: type[SnapshotRecord], data: bytes, where: str) -> SnapshotRecord:
    size = len(data)
    if data[0] != FORMAT:
        raise UnsupportedFormatError(
            f"{where} has format {data[0]}; this version of beam_ckpt reads format {FORMAT}. "
            "Restore with the version that wrote it, or a newer one."
        )
    flags = data[1]
    if flags > 15:
        _malformed(where, data, f"unknown flags {flags:#04x}")
    n = data[10]
    i = 11
    if n >= 128:
        n, i = _long_varint(data, 10, where)
    end = i + n
    key = data[i:end]
    n = data[end]
    i = end + 1
    if n >= 128:
        n, i = _long_varint(data, end, where)
    end = i + n
    window = data[i:end]
    n = data[end]
    i = end + 1
    if n >= 128:
        n, i = _long_varint(data, end, where)
        if n > size - i:
            _malformed(where, data, f"it announces {n} cells")
    patch = None
    if flags & PATCHED:
        patch = data[i : i + n]
        i += n
        if i > size:
            _malformed(where, data, "it ends too early")
    cells: list[bytes | tuple[bytes, ...] | None] = []
    for _ in range(n):
        n = data[i]
        i += 1
        if n >= 128:
            n, i = _long_varint(data, i - 1, where)
        if n & 1:
            end = i + (n >> 1)
            if end > size:
                _malformed(where, data, "it ends too early")
            cells.append(data[i:end])
            i = end
        elif n:
            n = (n >> 1) - 1
            if n > size - i:
                _malformed(where, data, f"it announces a list of {n} items")
            items = []
            for _ in range(n):
                n = data[i]
                i += 1
                if n >= 128:
                    n, i = _long_varint(data, i - 1, where)
                end = i + n
                if end > size:
                    _malformed(where, data, "it ends too early")
                items.append(data[i:end])
                i = end
            cells.append(tuple(items))
        else:
            cells.append(None)
    if patch is not None and not _fits(patch, cells, flags):
        _malformed(where, data, "its patch is none of these cells'")
    timers: tuple[SavedTimer, ...] = ()
    carried: tuple[CarriedOutput, ...] = ()
    if flags & TIMERS:
        timers, i = _parse_timers(data, i, where)
    if flags & CARRIED:
        reader = _Reader(data, i, where)
        carried = tuple([reader.carried() for _ in range(reader.count())])
        i = reader.position
    if i != size:
        _malformed(where, data, f"{abs(size - i)} bytes {'left over' if i < size else 'missing'}")
    updated = int.from_bytes(data[2:10], "big", signed=True)
    return cls(key, window, flags & DELETED != 0, updated, tuple(cells), timers, carried, patch)


def _fits(patch: bytes, cells: list[bytes | tuple[bytes, ...] | None], flags: int) -> bool:
    if flags & DELETED or not any(patch):
        return False
    return all(
        code == REPLACE
        or (code == KEEP and not cell and type(cell) is not bytes)
        or (code == APPEND and type(cell) is not bytes)
        for code, cell in zip(patch, cells, strict=True)
    )


def _parse_timers(data: bytes, i: int, where: str) -> tuple[tuple[SavedTimer, ...], int]:
    size = len(data)
    count = int.from_bytes(data[i : i + 4], "big")
    i += 4
    if not 0 < count <= size - i:
        _malformed(where, data, f"it announces {count} timers")
    timers = []
    for _ in range(count):
        n = data[i]
        i += 1
        if n >= 128:
            n, i = _long_varint(data, i - 1, where)
        end = i + n
        family = data[i:end].decode("utf-8")
        n = data[end]
        i = end + 1
        if n >= 128:
            n, i = _long_varint(data, end, where)
        end = i + n
        tag = data[i:end].decode("utf-8")
        domain, has_output = data[end], data[end + 9]
        if domain > 1 or has_output > 1:
            _malformed(where, data, "a timer in it has no possible domain or output")
        fire = int.from_bytes(data[end + 1 : end + 9], "big", signed=True)
        i = end + 10
        output = None
        if has_output:
            i += 8
            if i > size:
                _malformed(where, data, "it ends too early")
            output = int.from_bytes(data[i - 8 : i], "big", signed=True)
        timers.append(SavedTimer(family, tag, DOMAINS[domain], fire, output))
    return tuple(timers), i


def _long_varint(data: bytes, i: int, where: str) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[i]
        i += 1
        result |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if shift > 56:
            _malformed(where, data, "a length in it has more than 63 bits")
    if byte == 0 and shift:
        _malformed(where, data, "a length in it is not in its shortest form")
    return result, i


class _Reader:
    """Reads the rare part of a record, where clarity comes before speed."""

    __slots__ = ("_data", "_where", "position")

    def __init__(self, data: bytes, position: int, where: str) -> None:
        self._data = data
        self._where = where
        self.position = position

    def count(self) -> int:
        count = int.from_bytes(self._take(4), "big")
        if not 0 < count <= len(self._data) - self.position:
            _malformed(self._where, self._data, f"it announces {count} carried outputs")
        return count

    def carried(self) -> CarriedOutput:
        tag = self._text() if self._choice(2, "a presence byte") else None
        return CarriedOutput(
            tag, self._time(), self._take(self._length()), self._take(self._length())
        )

    def _choice(self, below: int, what: str) -> int:
        value = self._data[self.position]
        self.position += 1
        if value >= below:
            _malformed(self._where, self._data, f"{what} in it is {value}")
        return value

    def _length(self) -> int:
        value, self.position = _long_varint(self._data, self.position, self._where)
        return value

    def _take(self, n: int) -> bytes:
        start, self.position = self.position, self.position + n
        if self.position > len(self._data):
            _malformed(self._where, self._data, "it ends too early")
        return self._data[start : self.position]

    def _text(self) -> str:
        return self._take(self._length()).decode("utf-8")

    def _time(self) -> int:
        return int.from_bytes(self._take(8), "big", signed=True)
