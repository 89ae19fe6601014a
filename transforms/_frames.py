"""The bytes of many snapshot records at once, read and written a column at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from beam_ckpt.sidecar._patch import APPEND, KEEP
from beam_ckpt.transforms._buffers import (
    BINARY,
    EMPTY,
    Bytes,
    Flags,
    Positions,
    Source,
    binary_array,
    grouped,
    is_present,
    join_bytes,
    lengths_of,
    number_array,
    numbers_of,
    read_varints,
    require,
    spread,
    write_varints,
)
from beam_ckpt.transforms._encodings import (
    Choice,
    Codec,
    Fixed,
    Framed,
    ListOf,
    Optional,
    Tuple,
    locate_items,
)
from beam_ckpt.transforms.snapshot import CARRIED, DELETED, DOMAINS, FORMAT, PATCHED, TIMERS

__all__ = [
    "Frames",
    "Slots",
    "frame_lists",
    "frame_values",
    "has_patch",
    "read_frames",
    "read_keys",
    "write_frames",
]

_TIME = Fixed(pa.timestamp("us", "UTC"), ">i8", "<i8")
_TEXT = Framed(pa.string(), nested=True)
_BYTES = Framed(BINARY, nested=True)

_TIMER_LIST = ListOf(
    Tuple(
        [
            ("family", _TEXT),
            ("tag", _TEXT),
            ("domain", Choice(DOMAINS)),
            ("fire", _TIME),
            ("output", Optional(_TIME)),
        ]
    )
)
_CARRIED_LIST = ListOf(
    Tuple([("tag", Optional(_TEXT)), ("timestamp", _TIME), ("window", _BYTES), ("value", _BYTES)])
)

_NO_VALUE = pa.scalar(b"\x00", BINARY)
_NO_ITEMS = pa.scalar(b"\x02", BINARY)


@dataclass(frozen=True)
class Slots:
    """Where the values of one cell stand.

    Attributes:
        counts: How many values each record has.
        starts: Where each value starts, over all records.
        ends: Where it ends.
    """

    counts: Positions
    starts: Positions
    ends: Positions

    @property
    def places(self) -> tuple[Positions, Positions]:
        """Where the values start, and where they end."""
        return self.starts, self.ends


@dataclass(frozen=True)
class Frames:
    """The parts of many records. Values are where they were; all else is an array of its own."""

    source: Source
    key: Slots
    window: Slots
    deleted: pa.Array
    updated: pa.Array
    cells: list[Slots]
    timers: pa.Array
    carried: pa.Array
    patch: pa.Array


def read_keys(records: pa.BinaryArray) -> tuple[pa.BinaryArray, pa.BinaryArray]:
    """Returns the encoded key and window of each record.

    Raises:
        ValueError: A record is malformed.
    """
    source, at, end = Source.of(records)
    key, window, _ = _heads(source, at, end)
    return source.slices(*key.places), source.slices(*window.places)


def has_patch(records: pa.BinaryArray) -> bool:
    """Tells whether one of these records, which are well-formed so far, does not hold all cells."""
    source, at, _ = Source.of(records)
    return bool((source.data[at + 1] & PATCHED).any())


def read_frames(records: pa.BinaryArray, many: Sequence[bool]) -> Frames:
    """Takes records apart.

    Args:
        records: The bytes of each.
        many: For each cell, whether it is one of many values.

    Raises:
        ValueError: One is malformed, or does not have these cells.
    """
    source, at, end = Source.of(records)
    first = at
    key, window, at = _heads(source, at, end)
    flags = source.data[first + 1]
    updated = number_array(_TIME.type, source.words(">i8", first + 2).astype("<i8"))
    cell_counts, at = read_varints(source, at, end)
    require(cell_counts == len(many), "a record has another number of cells")
    codes, patch, at = _patches(source, at, end, flags & PATCHED != 0, many)
    cells = []
    for i, is_list in enumerate(many):
        heads, at = read_varints(source, at, end)
        sizes = (heads >> np.uint64(1)).astype(np.int64)
        is_value = heads & np.uint64(1) == 1
        if is_list:
            require(~is_value, "a cell of many values has one value")
            counts = np.maximum(sizes - 1, 0)
            starts, at = locate_items(_BYTES, source, at, end, counts)
            lengths, starts = read_varints(source, starts, np.repeat(end, counts))
            cells.append(Slots(counts, starts, starts + lengths.astype(np.int64)))
        else:
            require(is_value | (heads == 0), "a cell of one value has many")
            require(sizes <= end - at, "a value is cut short")
            after = at + sizes
            cells.append(Slots(is_value.astype(np.int64), at[is_value], after[is_value]))
            at = after
        require(cells[i].counts[codes[:, i] == KEEP] == 0, "a cell that is kept has a value")
    timers, at = _listed(_TIMER_LIST, source, at, end, flags & TIMERS != 0)
    carried, at = _listed(_CARRIED_LIST, source, at, end, flags & CARRIED != 0)
    require(at == end, "bytes are left over after a record")
    deleted = pa.array((flags & DELETED).view(np.bool_))
    require(~codes[flags & DELETED != 0].any(), "a tombstone has a patch")
    return Frames(source, key, window, deleted, updated, cells, timers, carried, patch)


def write_frames(
    keys: pa.BinaryArray,
    windows: pa.BinaryArray,
    deleted: pa.BooleanArray,
    updated: pa.Array,
    cells: Sequence[pa.BinaryArray | pa.Scalar],
    timers: pa.ListArray,
    carried: pa.ListArray,
    patch: pa.BinaryArray | None = None,
) -> pa.BinaryArray:
    """Puts records together; `cells` as `frame_values` and `frame_lists` return them.

    Raises:
        ValueError: A timer or carried output lacks a part, or a patch has another number of cells.
    """
    has_timers, timer_bytes = _unlisted(_TIMER_LIST, timers)
    has_carried, carried_bytes = _unlisted(_CARRIED_LIST, carried)
    head = np.empty((len(keys), 10), np.uint8)
    head[:, 0] = FORMAT
    head[:, 1] = deleted.to_numpy(zero_copy_only=False) * np.uint8(DELETED)
    head[:, 1] |= has_timers * np.uint8(TIMERS) | has_carried * np.uint8(CARRIED)
    head[:, 2:] = numbers_of(updated, "<i8").astype(">i8").view(np.uint8).reshape(-1, 8)
    count = write_varints(np.array([len(cells)], np.uint64))[0]
    patches = [] if patch is None or patch.null_count == len(patch) else [patch.fill_null(EMPTY)]
    if patches:
        there = is_present(patch)
        require(lengths_of(patch)[there] == len(cells), "a patch has another number of cells")
        head[:, 1] |= there * np.uint8(PATCHED)
    return join_bytes(
        binary_array(np.arange(len(keys) + 1) * 10, head),
        _BYTES.write(keys),
        _BYTES.write(windows),
        count,
        *patches,
        *cells,
        timer_bytes,
        carried_bytes,
    )


def frame_values(encoded: pa.BinaryArray | None) -> pa.BinaryArray | pa.Scalar:
    """Returns the bytes, in a record, of a cell of one value; null or None: it is empty."""
    if encoded is None or encoded.null_count == len(encoded):
        return _NO_VALUE
    heads = lengths_of(encoded) * 2 + is_present(encoded)
    return join_bytes(write_varints(heads.astype(np.uint64)), encoded.fill_null(EMPTY))


def frame_lists(
    encoded: pa.BinaryArray | None, counts: Positions | None = None
) -> pa.BinaryArray | pa.Scalar:
    """Returns the bytes, in a record, of a cell of many values; None: it is empty."""
    if encoded is None or counts is None or not len(encoded):
        return _NO_ITEMS
    heads = write_varints((counts * 2 + 2).astype(np.uint64))
    return join_bytes(heads, grouped(_BYTES.write(encoded), counts))


def _heads(source: Source, at: Positions, end: Positions) -> tuple[Slots, Slots, Positions]:
    require(at + 10 <= end, "a record is cut short")
    require(source.data[at] == FORMAT, "a record has another format")
    flags = DELETED | TIMERS | CARRIED | PATCHED
    require(source.data[at + 1] <= flags, "a record has unknown flags")
    key, at = _framed(source, at + 10, end)
    window, at = _framed(source, at, end)
    return key, window, at


def _patches(
    source: Source, at: Positions, end: Positions, there: Flags, many: Sequence[bool]
) -> tuple[Bytes, pa.Array, Positions]:
    """Returns what each record does with each cell, the same as a column, and where it ends."""
    codes = np.zeros((len(at), len(many)), np.uint8)
    if not there.any():
        return codes, pa.nulls(len(at), BINARY), at
    starts = at[there]
    ends = starts + len(many)
    require(ends <= end[there], "a patch is cut short")
    found = source.data[starts[:, np.newaxis] + np.arange(len(many))]
    highest = np.where(np.array(many, np.bool_), APPEND, KEEP)
    require(found <= highest, "a patch has an unknown byte")
    require(found.any(axis=1), "a patch of a whole record")
    codes[there] = found
    at = at.copy()
    at[there] = ends
    return codes, spread(source.slices(starts, ends), there), at


def _framed(source: Source, at: Positions, end: Positions) -> tuple[Slots, Positions]:
    lengths, at = read_varints(source, at, end)
    require(lengths <= (end - at).astype(np.uint64), "a record is cut short")
    after = at + lengths.astype(np.int64)
    return Slots(np.ones_like(at), at, after), after


def _listed(
    codec: Codec, source: Source, at: Positions, end: Positions, there: Flags
) -> tuple[pa.Array, Positions]:
    if not there.any():
        return pa.nulls(len(at), codec.type), at
    try:
        lists, after = codec.read(source, at[there], end[there])
    except IndexError as error:
        raise ValueError("a record is cut short") from error
    require(pc.min(lists.value_lengths()).as_py() > 0, "a record has a list of no timers")
    at = at.copy()
    at[there] = after
    return spread(lists, there), at


def _unlisted(codec: Codec, lists: pa.ListArray) -> tuple[Flags, pa.BinaryArray | pa.Scalar]:
    there: Flags = pc.fill_null(pc.greater(lists.value_lengths(), 0), False).to_numpy(
        zero_copy_only=False
    )
    if not there.any():
        return there, EMPTY
    return there, spread(codec.write(lists.filter(pa.array(there))), there).fill_null(EMPTY)
