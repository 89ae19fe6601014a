"""The byte layouts of Beam's standard coders, read and written a column at a time.

A :class:`Codec` knows how one coder lays out its values in bytes and what their Arrow type is. It
reads a whole column of encoded values into an Arrow array and writes such an array back into the
very same bytes, with array arithmetic instead of a Python object per value. Which coder has which
codec is a table in :mod:`beam_ckpt.transforms.columns`; here are only the layouts. They are those
of ``apache_beam.coders.coder_impl``, and the Beam model's for the coders that are standard.

Beam encodes a value in one of two contexts. In the outer one, where a value is all there is, text
and bytes are written bare; in the nested one, where other values follow, they come after their
length. Everything else is the same in both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = [
    "Codec",
    "Fixed",
    "Framed",
    "ListOf",
    "MapOf",
    "Optional",
    "Row",
    "Source",
    "Tuple",
    "VarInt",
    "read_column",
    "write_column",
]

Bytes: TypeAlias = npt.NDArray[np.uint8]
Positions: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

_BINARY = pa.binary()
_EMPTY = pa.scalar(b"", _BINARY)


class Source:
    """The encoded values of a column, one after the other in one buffer."""

    def __init__(self, data: Bytes) -> None:
        self.data = data

    @cached_property
    def raw(self) -> bytes:
        """The same bytes, for loops in Python: indexing them is three times as fast."""
        return self.data.tobytes()

    def words(self, dtype: str, at: Positions) -> npt.NDArray[np.generic]:
        """Returns the numbers of type ``dtype`` that stand at these positions, aligned or not."""
        size = np.dtype(dtype).itemsize
        every = np.ndarray((max(len(self.data) - size + 1, 0),), dtype, self.data, strides=(1,))
        return every[at]

    def slices(self, starts: Positions, ends: Positions) -> pa.BinaryArray:
        """Returns the bytes between these positions, which ascend and do not overlap."""
        total = len(self.data)
        offsets = _offsets(ends - starts)
        if int(offsets[-1]) == total:
            kept = self.data
        else:
            # +1 where a value starts, -1 where it ends: the running sum marks what is inside one.
            edges = np.zeros(total + 1, np.int8)
            inside = ends > starts
            edges[starts[inside]] += 1
            edges[ends[inside]] -= 1
            kept = self.data[np.cumsum(edges[:-1], dtype=np.int8).view(np.bool_)]
        return _binary(offsets, kept)


class Codec(ABC):
    """How the values of one coder are laid out in bytes, and their Arrow type.

    Attributes:
        type: The Arrow type.
        width: Bytes of an encoded value when all have the same number, else None.
        holds_null: True when a null is a value of this type (``None``), not the lack of one.
    """

    type: pa.DataType
    width: int | None = None
    holds_null: bool = False

    @abstractmethod
    def read(self, source: Source, at: Positions, end: Positions) -> tuple[pa.Array, Positions]:
        """Reads one value at each position.

        Args:
            source: The bytes.
            at: Where each value starts, ascending.
            end: Where the encoded value of the column it is part of ends.

        Returns:
            The values, and where each one ended.

        Raises:
            ValueError: The bytes are not what the coder writes.
        """

    @abstractmethod
    def write(self, values: pa.Array) -> pa.BinaryArray:
        """Returns the encoded bytes of each value; ValueError if one cannot be the coder's."""

    @abstractmethod
    def skip(self, data: bytes, at: int) -> int:
        """Returns where the value at this position ends (IndexError or ValueError if nowhere)."""


class Fixed(Codec):
    """Numbers of a fixed width, big-endian.

    Args:
        type: Arrow type of the same width, or bool.
        stored: numpy type of the bytes in the value.
        loaded: numpy type of the Arrow array's values.
        flip: True when the sign bit is stored inverted, so that bytes sort as the numbers do.
    """

    def __init__(self, type: pa.DataType, stored: str, loaded: str, *, flip: bool = False) -> None:
        self.type = type
        self.width = np.dtype(stored).itemsize
        self._stored = stored
        self._loaded = loaded
        self._flip = flip

    def read(self, source: Source, at: Positions, end: Positions) -> tuple[pa.Array, Positions]:
        width = self.width or 0
        after = at + width
        _require(after <= end, "a number is cut short")
        if len(at) * width == len(source.data):
            words = source.data.view(self._stored)
        else:
            words = source.words(self._stored, at)
        values = words.astype(self._loaded)
        if pa.types.is_boolean(self.type):
            _require(values <= 1, "a truth value is neither 0 nor 1")
            return pa.array(values.view(np.bool_)), after
        if self._flip:
            values ^= values.dtype.type(np.iinfo(values.dtype).min)
        return _from_buffer(self.type, values), after

    def write(self, values: pa.Array) -> pa.BinaryArray:
        _refuse_nulls(values)
        if pa.types.is_boolean(self.type):
            loaded = values.to_numpy(zero_copy_only=False).view(np.uint8)
        else:
            loaded = _buffer(values, self._loaded)
        if self._flip:
            loaded = loaded ^ loaded.dtype.type(np.iinfo(loaded.dtype).min)
        data = loaded.astype(self._stored)
        width = data.dtype.itemsize
        return _binary(np.arange(len(data) + 1) * width, data)

    def skip(self, data: bytes, at: int) -> int:
        return at + (self.width or 0)


class VarInt(Codec):
    """Integers in groups of seven bits, low ones first; negative ones as if unsigned.

    Args:
        bits: 64, or 32 for the coder that keeps only the low half.
    """

    def __init__(self, bits: int = 64) -> None:
        self.type = pa.int64() if bits == 64 else pa.int32()
        self._signed = "<i8" if bits == 64 else "<i4"
        self._limit = (1 << bits) - 1

    def read(self, source: Source, at: Positions, end: Positions) -> tuple[pa.Array, Positions]:
        values, after = _read_varints(source, at, end)
        if self._limit < 2**64 - 1:
            _require(values <= self._limit, "an integer has more than 32 bits")
        return _from_buffer(self.type, values.astype(self._signed)), after

    def write(self, values: pa.Array) -> pa.BinaryArray:
        _refuse_nulls(values)
        signed = _buffer(values, self._signed)
        return _write_varints(signed.view(signed.dtype.str.replace("i", "u")).astype(np.uint64))

    def skip(self, data: bytes, at: int) -> int:
        while data[at] >= 128:
            at += 1
        return at + 1


class Framed(Codec):
    """Text or bytes: as they are in the outer context, after their length in a nested one."""

    def __init__(self, type: pa.DataType, *, nested: bool) -> None:
        self.type = type
        self._nested = nested

    def read(self, source: Source, at: Positions, end: Positions) -> tuple[pa.Array, Positions]:
        if self._nested:
            lengths, at = _read_varints(source, at, end)
            _require(lengths <= (end - at).astype(np.uint64), "a length reaches past the end")
            end = at + lengths.astype(np.int64)
        return self.of_bytes(source.slices(at, end)), end

    def of_bytes(self, values: pa.BinaryArray) -> pa.Array:
        """Returns bare values as this type."""
        # The cast to text checks that it is UTF-8 (pa.ArrowInvalid is a ValueError).
        return values if self.type == _BINARY else values.cast(self.type)

    def write(self, values: pa.Array) -> pa.BinaryArray:
        _refuse_nulls(values)
        bare = values if self.type == _BINARY else values.cast(_BINARY)
        if not self._nested:
            return bare
        lengths = np.diff(_parts(bare)[1]).astype(np.uint64)
        return _join(_write_varints(lengths), bare)

    def skip(self, data: bytes, at: int) -> int:
        n, shift = data[at], 7
        at += 1
        if n >= 128:
            n &= 127
            while True:
                byte = data[at]
                at += 1
                n |= (byte & 127) << shift
                if byte < 128:
                    break
                shift += 7
        return at + n


class Optional(Codec):
    """A value or None: a byte 0, or a byte 1 and the value."""

    holds_null = True

    def __init__(self, value: Codec) -> None:
        self.type = value.type
        self._value = value

    def read(self, source: Source, at: Positions, end: Positions) -> tuple[pa.Array, Positions]:
        _require(at < end, "a presence byte is missing")
        flags = source.data[at]
        _require(flags <= 1, "a presence byte is neither 0 nor 1")
        present = flags.view(np.bool_)
        after = at + 1
        values, stops = self._value.read(source, after[present], end[present])
        after[present] = stops
        return _spread(values, present), after

    def write(self, values: pa.Array) -> pa.BinaryArray:
        present = _present(values)
        data = self._value.write(values.drop_null())
        flags = _binary(np.arange(len(present) + 1), present.view(np.uint8))
        return _join(flags, _spread(data, present).fill_null(_EMPTY))

    def skip(self, data: bytes, at: int) -> int:
        return self._value.skip(data, at + 1) if data[at] else at + 1


class Tuple(Codec):
    """Values of several coders, one after the other."""

    def __init__(self, fields: Sequence[tuple[str, Codec]]) -> None:
        self._names = [name for name, _ in fields]
        self._codecs = [codec for _, codec in fields]
        self.type = pa.struct([pa.field(name, codec.type) for name, codec in fields])
        widths = [codec.width for codec in self._codecs]
        self.width = None if None in widths else sum(width or 0 for width in widths)

    def read(self, source: Source, at: Positions, end: Positions) -> tuple[pa.Array, Positions]:
        columns = []
        for codec in self._codecs:
            column, at = codec.read(source, at, end)
            columns.append(column)
        return pa.StructArray.from_arrays(columns, fields=list(self.type)), at

    def write(self, values: pa.Array) -> pa.BinaryArray:
        _refuse_nulls(values)
        return _join(*[codec.write(values.field(i)) for i, codec in enumerate(self._codecs)])

    def skip(self, data: bytes, at: int) -> int:
        for codec in self._codecs:
            at = codec.skip(data, at)
        return at


class Row(Codec):
    """A Beam row: the number of fields, a mask of the null ones, the others one after the other.

    Args:
        fields: Name, codec and whether it may be null, of each field in order.
    """

    def __init__(self, fields: Sequence[tuple[str, Codec, bool]]) -> None:
        self._codecs = [codec for _, codec, _ in fields]
        self._nullable = [nullable for _, _, nullable in fields]
        self.type = pa.struct([pa.field(name, codec.type) for name, codec, _ in fields])
        self._head = _varint(len(fields))
        self._mask_size = (len(fields) + 7) // 8

    def read(self, source: Source, at: Positions, end: Positions) -> tuple[pa.Array, Positions]:
        for byte in self._head:
            _require(at < end, "a row is cut short")
            _require(source.data[at] == byte, "a row has another number of fields")
            at = at + 1
        _require(at < end, "a row is cut short")
        masked = source.data[at] != 0
        if not masked.any():
            at = at + 1
            mask = None
        else:
            _require((source.data[at] == self._mask_size) | ~masked, "a row's null mask is off")
            mask_at = at[masked] + 1
            _require(mask_at + self._mask_size <= end[masked], "a row is cut short")
            mask = np.zeros((len(at), self._mask_size), np.uint8)
            for i in range(self._mask_size):
                mask[masked, i] = source.data[mask_at + i]
            _require(mask[masked].any(axis=1), "a row's null mask is empty")
            spare = 8 * self._mask_size - len(self._codecs)
            _require(mask[:, -1] >> (8 - spare) == 0, "a row's null mask is too long")
            at = at + 1 + self._mask_size * masked
        columns = []
        for i, codec in enumerate(self._codecs):
            nulls = None if mask is None else (mask[:, i // 8] >> (i % 8) & 1).view(np.bool_)
            if nulls is None or not nulls.any():
                column, at = codec.read(source, at, end)
            else:
                _require(np.bool_(self._nullable[i]), "a field that cannot be null is null")
                column, stops = codec.read(source, at[~nulls], end[~nulls])
                at[~nulls] = stops
                column = _spread(column, ~nulls)
            columns.append(column)
        return pa.StructArray.from_arrays(columns, fields=list(self.type)), at

    def write(self, values: pa.Array) -> pa.BinaryArray:
        _refuse_nulls(values)
        mask = np.zeros((len(values), 1 + self._mask_size), np.uint8)
        parts: list[pa.Array | pa.Scalar] = []
        for i, codec in enumerate(self._codecs):
            column = values.field(i)
            if column.null_count and self._nullable[i]:
                present = _present(column)
                mask[:, 1 + i // 8] |= (~present).view(np.uint8) << (i % 8)
                column = _spread(codec.write(column.drop_null()), present).fill_null(_EMPTY)
                parts.append(column)
            else:
                parts.append(codec.write(column))
        masked: Flags = np.any(mask, axis=1)
        if not masked.any():
            return _join(pa.scalar(self._head + b"\0", _BINARY), *parts)
        mask[masked, 0] = self._mask_size
        sizes = np.where(masked, 1 + self._mask_size, 1)
        kept = masked[:, None] | (np.arange(1 + self._mask_size) == 0)
        masks = _binary(_offsets(sizes), mask[kept])
        return _join(pa.scalar(self._head, _BINARY), masks, *parts)

    def skip(self, data: bytes, at: int) -> int:
        at += len(self._head)
        size = data[at]
        mask = int.from_bytes(data[at + 1 : at + 1 + size], "little")
        at += 1 + size
        for i, codec in enumerate(self._codecs):
            if not mask >> i & 1:
                at = codec.skip(data, at)
        return at


class ListOf(Codec):
    """Any number of values of one coder: their number in 32 bits, then each.

    An iterable whose length was not known when it was encoded has the number -1, then chunks. It
    is written back with its number, as Beam itself does with a value that it has decoded.
    """

    def __init__(self, item: Codec) -> None:
        self.type = pa.list_(pa.field("element", item.type))
        self._item = item

    def read(self, source: Source, at: Positions, end: Positions) -> tuple[pa.Array, Positions]:
        counts, starts, after = _read_items(self._item, source, at, end, chunked=True)
        items, _ = self._item.read(source, starts, np.repeat(end, counts))
        return pa.ListArray.from_arrays(_int32(_offsets(counts)), items, type=self.type), after

    def write(self, values: pa.Array) -> pa.BinaryArray:
        _refuse_nulls(values)
        counts = values.value_lengths().to_numpy(zero_copy_only=False)
        return _join(_counts(counts), _grouped(self._item.write(values.flatten()), counts))

    def skip(self, data: bytes, at: int) -> int:
        return _skip_items(self._item, data, at, None)


class MapOf(Codec):
    """A mapping: the number of entries in 32 bits, then key and value of each, in order."""

    def __init__(self, key: Codec, value: Codec) -> None:
        self.type = pa.map_(key.type, pa.field("value", value.type))
        self._entry = Tuple([("key", key), ("value", value)])

    def read(self, source: Source, at: Positions, end: Positions) -> tuple[pa.Array, Positions]:
        counts, starts, after = _read_items(self._entry, source, at, end, chunked=False)
        entries, _ = self._entry.read(source, starts, np.repeat(end, counts))
        offsets = _int32(_offsets(counts))
        key, value = entries.field(0), entries.field(1)
        return pa.MapArray.from_arrays(offsets, key, value, type=self.type), after

    def write(self, values: pa.Array) -> pa.BinaryArray:
        _refuse_nulls(values)
        offsets = values.offsets.to_numpy()
        counts = np.diff(offsets)
        # Keys and items are those of the whole buffer, of which this array may be a slice.
        parts = [part.slice(offsets[0], counts.sum()) for part in (values.keys, values.items)]
        entries = pa.StructArray.from_arrays(parts, fields=list(self._entry.type))
        return _join(_counts(counts), _grouped(self._entry.write(entries), counts))

    def skip(self, data: bytes, at: int) -> int:
        return _skip_items(self._entry, data, at, None)


def read_column(codec: Codec, encoded: pa.BinaryArray) -> pa.Array:
    """Returns the values of a column of encoded ones; nulls stay null.

    Raises:
        ValueError: A value is not what the codec's coder writes.
    """
    if isinstance(codec, Framed):
        return codec.of_bytes(encoded)
    dense = encoded.drop_null() if encoded.null_count else encoded
    data, offsets = _parts(dense)
    positions = offsets - offsets[0]
    try:
        values, after = codec.read(Source(data), positions[:-1], positions[1:])
    except IndexError as error:
        raise ValueError("a value is cut short") from error
    _require(after == positions[1:], "bytes are left over after a value")
    return _spread(values, _present(encoded)) if encoded.null_count else values


def write_column(codec: Codec, values: pa.Array) -> pa.BinaryArray:
    """Returns the encoded values of a column; nulls stay null.

    Raises:
        ValueError: A value cannot be one of the codec's coder.
    """
    if codec.holds_null or not values.null_count:
        return codec.write(values)
    return _spread(codec.write(values.drop_null()), _present(values))


def _require(condition: Flags | np.bool_, otherwise: str) -> None:
    if not condition.all():
        raise ValueError(otherwise)


def _refuse_nulls(values: pa.Array) -> None:
    if values.null_count:
        raise ValueError(f"a null where the coder has no None ({values.type})")


def _present(values: pa.Array) -> Flags:
    flags: Flags = values.is_valid().to_numpy(zero_copy_only=False)
    return flags


def _spread(values: pa.Array, present: Flags) -> pa.Array:
    """Returns an array with the next of the values where present, else null."""
    if len(values) == len(present):
        return values
    return values.take(pa.array(np.cumsum(present) - 1, mask=~present))


def _offsets(lengths: npt.NDArray[np.integer]) -> Positions:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _int32(offsets: Positions) -> pa.Array:
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError("a column has 2 GiB or more in one piece")
    return pa.array(offsets.astype(np.int32))


def _binary(offsets: Positions, data: npt.NDArray[np.generic]) -> pa.BinaryArray:
    buffers = [None, _int32(offsets).buffers()[1], pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(_BINARY, len(offsets) - 1, buffers)


def _from_buffer(type: pa.DataType, values: npt.NDArray[np.generic]) -> pa.Array:
    return pa.Array.from_buffers(type, len(values), [None, pa.py_buffer(values)])


def _buffer(values: pa.Array, dtype: str) -> npt.NDArray[np.generic]:
    data = np.frombuffer(values.buffers()[1] or b"", dtype)
    return data[values.offset : values.offset + len(values)]


def _parts(values: pa.BinaryArray) -> tuple[Bytes, Positions]:
    """Returns the bytes of an array without nulls, and where each value starts and the last ends.

    The bytes start at the first offset.
    """
    if not len(values):
        return np.zeros(0, np.uint8), np.zeros(1, np.int64)
    _, offsets_buffer, data_buffer = values.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[values.offset :][: len(values) + 1]
    data = np.frombuffer(data_buffer or b"", np.uint8)
    return data[offsets[0] : offsets[-1]], offsets.astype(np.int64)


def _join(*parts: pa.Array | pa.Scalar) -> pa.BinaryArray:
    joined: pa.BinaryArray = pc.binary_join_element_wise(*parts, _EMPTY)
    return joined


def _varint(n: int) -> bytes:
    out = bytearray()
    while n >= 128:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def _read_varints(
    source: Source, at: Positions, end: Positions
) -> tuple[npt.NDArray[np.uint64], Positions]:
    _require(at < end, "an integer is missing")
    byte = source.data[at]
    values = (byte & 127).astype(np.uint64)
    after = at + 1
    more = np.flatnonzero(byte >= 128)
    for i in range(1, 10):
        if not len(more):
            return values, after
        here = after[more]
        _require(here < end[more], "an integer is cut short")
        byte = source.data[here]
        values[more] |= (byte & 127).astype(np.uint64) << np.uint64(7 * i)
        after[more] += 1
        goes_on = byte >= 128
        _require(byte != 0, "an integer is not in its shortest form")
        if i == 9:
            _require(byte <= 1, "an integer has more than 64 bits")
        more = more[goes_on]
    return values, after


def _write_varints(values: npt.NDArray[np.uint64]) -> pa.BinaryArray:
    sizes = np.ones(len(values), np.int64)
    largest = int(values.max()) if len(values) else 0
    steps = max(largest.bit_length() + 6, 7) // 7
    for i in range(1, steps):
        sizes += values >= np.uint64(1 << 7 * i)
    offsets = _offsets(sizes)
    out = np.empty(int(offsets[-1]), np.uint8)
    starts = offsets[:-1]
    if steps == 1:
        out[:] = values
        return _binary(offsets, out)
    rest = values
    for i in range(steps):
        more = sizes > i + 1
        byte = (rest & np.uint64(127)).astype(np.uint8)
        byte[more] |= 128
        out[starts + i] = byte
        if more.all():
            rest = rest >> np.uint64(7)
        else:
            rest, starts, sizes = rest[more] >> np.uint64(7), starts[more], sizes[more]
    return _binary(offsets, out)


def _counts(counts: npt.NDArray[np.integer]) -> pa.BinaryArray:
    return _binary(np.arange(len(counts) + 1) * 4, counts.astype(">i4"))


def _grouped(items: pa.BinaryArray, counts: npt.NDArray[np.integer]) -> pa.BinaryArray:
    """Returns the items joined in runs of these lengths; they stand side by side already."""
    data, offsets = _parts(items)
    offsets -= offsets[0]
    return _binary(offsets[_offsets(counts)], data)


def _read_items(
    item: Codec, source: Source, at: Positions, end: Positions, *, chunked: bool
) -> tuple[Positions, Positions, Positions]:
    """Returns how many items each list has, where each item starts, where each list ends."""
    _require(at + 4 <= end, "a list is cut short")
    counts = source.words(">i4", at).astype(np.int64)
    first = at + 4
    if item.width is not None and not (counts < 0).any():
        after = first + counts * item.width
        _require(after <= end, "a list is cut short")
        within = np.arange(int(counts.sum())) - np.repeat(_offsets(counts)[:-1], counts)
        return counts, np.repeat(first, counts) + within * item.width, after
    _require(counts >= (-1 if chunked else 0), "a list has a negative length")
    starts: list[int] = []
    after = np.empty_like(at)
    for i, (position, stop) in enumerate(zip(at.tolist(), end.tolist(), strict=True)):
        before = len(starts)
        position = _skip_items(item, source.raw, position, starts.append)
        if position > stop:
            raise ValueError("a list is cut short")
        after[i] = position
        counts[i] = len(starts) - before
    return counts, np.array(starts, np.int64), after


def _skip_items(item: Codec, data: bytes, at: int, each: Callable[[int], object] | None) -> int:
    skip = item.skip
    size = len(data)
    count = int.from_bytes(data[at : at + 4], "big", signed=True)
    at += 4
    chunked = count < 0
    while True:
        if chunked:
            after = VarInt.skip(_LENGTH, data, at)
            count = 0
            for byte in reversed(data[at:after]):
                count = count << 7 | byte & 127
            at = after
            if count == 0:
                return at
        for _ in range(count):
            if at >= size:
                raise ValueError("a list is cut short")
            if each is not None:
                each(at)
            at = skip(data, at)
        if not chunked:
            return at


_LENGTH = VarInt()
