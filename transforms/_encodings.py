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

import decimal
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from beam_ckpt.transforms._buffers import (
    BINARY,
    EMPTY,
    Flags,
    Positions,
    Source,
    binary_array,
    grouped,
    int32_array,
    is_present,
    join_bytes,
    lengths_of,
    number_array,
    numbers_of,
    offsets_of,
    read_varints,
    refuse_nulls,
    require,
    spread,
    write_varints,
)

__all__ = [
    "Choice",
    "Codec",
    "DecimalText",
    "Fixed",
    "Framed",
    "ListOf",
    "MapOf",
    "Optional",
    "Row",
    "Tuple",
    "VarInt",
    "locate_items",
    "read_values",
    "write_values",
]


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

    def ends(self, source: Source, at: Positions, end: Positions) -> Positions:
        """Returns where each value ends: `read`, when the values are not needed.

        What does not matter for where they end may be left unchecked.
        """
        return self.read(source, at, end)[1]

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
        require(after <= end, "a number is cut short")
        if len(at) * width == len(source.data):
            words = source.data.view(self._stored)
        else:
            words = source.words(self._stored, at)
        values = words.astype(self._loaded)
        if pa.types.is_boolean(self.type):
            require(values <= 1, "a truth value is neither 0 nor 1")
            return pa.array(values.view(np.bool_)), after
        if self._flip:
            values ^= values.dtype.type(np.iinfo(values.dtype).min)
        return number_array(self.type, values), after

    def write(self, values: pa.Array) -> pa.BinaryArray:
        refuse_nulls(values)
        if pa.types.is_boolean(self.type):
            loaded = values.to_numpy(zero_copy_only=False).view(np.uint8)
        else:
            loaded = numbers_of(values, self._loaded)
        if self._flip:
            loaded = loaded ^ loaded.dtype.type(np.iinfo(loaded.dtype).min)
        data = loaded.astype(self._stored)
        width = data.dtype.itemsize
        return binary_array(np.arange(len(data) + 1) * width, data)

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
        values, after = read_varints(source, at, end)
        if self._limit < 2**64 - 1:
            require(values <= self._limit, "an integer has more than 32 bits")
        return number_array(self.type, values.astype(self._signed)), after

    def write(self, values: pa.Array) -> pa.BinaryArray:
        refuse_nulls(values)
        signed = numbers_of(values, self._signed)
        return write_varints(signed.view(signed.dtype.str.replace("i", "u")).astype(np.uint64))

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
        at, end = self._bounds(source, at, end)
        bare = source.slices(at, end)
        # The cast to text checks that it is UTF-8 (pa.ArrowInvalid is a ValueError).
        return bare if self.type == BINARY else bare.cast(self.type), end

    def ends(self, source: Source, at: Positions, end: Positions) -> Positions:
        return self._bounds(source, at, end)[1]

    def _bounds(self, source: Source, at: Positions, end: Positions) -> tuple[Positions, Positions]:
        if not self._nested:
            return at, end
        lengths, at = read_varints(source, at, end)
        require(lengths <= (end - at).astype(np.uint64), "a length reaches past the end")
        return at, at + lengths.astype(np.int64)

    def write(self, values: pa.Array) -> pa.BinaryArray:
        refuse_nulls(values)
        bare = values if self.type == BINARY else values.cast(BINARY)
        if not self._nested:
            return bare
        lengths = lengths_of(bare).astype(np.uint64)
        return join_bytes(write_varints(lengths), bare)

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


class DecimalText(Codec):
    """Decimal numbers of any size, as the text that Python has for them: ``9.90``, ``1E+3``.

    No decimal type of Arrow's holds digits and places that differ from value to value; the text
    does, exactly. In bytes: the places after the point, then the digits as one integer in the
    fewest bytes of two's complement.
    """

    def __init__(self, *, nested: bool) -> None:
        self.type = pa.string()
        self._places, self._digits = VarInt(64), Framed(BINARY, nested=nested)

    def read(self, source: Source, at: Positions, end: Positions) -> tuple[pa.Array, Positions]:
        places, at = self._places.read(source, at, end)
        digits, after = self._digits.read(source, at, end)
        pairs = zip(places.to_pylist(), digits.to_pylist(), strict=True)
        return pa.array([_decimal_text(p, d) for p, d in pairs], self.type), after

    def write(self, values: pa.Array) -> pa.BinaryArray:
        refuse_nulls(values)
        parts = [_decimal_parts(text) for text in values.to_pylist()]
        places = pa.array([places for places, _ in parts], pa.int64())
        digits = pa.array([digits for _, digits in parts], BINARY)
        return join_bytes(self._places.write(places), self._digits.write(digits))

    def skip(self, data: bytes, at: int) -> int:
        return self._digits.skip(data, self._places.skip(data, at))


class Choice(Codec):
    """One of a few names, as a byte."""

    width = 1

    def __init__(self, names: Sequence[str]) -> None:
        self.type = pa.string()
        self._names = pa.array(names, pa.string())

    def read(self, source: Source, at: Positions, end: Positions) -> tuple[pa.Array, Positions]:
        require(at < end, "a choice is missing")
        chosen = source.data[at]
        require(chosen < len(self._names), "a choice is not known")
        return self._names.take(pa.array(chosen)), at + 1

    def write(self, values: pa.Array) -> pa.BinaryArray:
        chosen = pc.index_in(values, self._names)
        refuse_nulls(chosen)
        return binary_array(np.arange(len(values) + 1), numbers_of(chosen, "<i4").astype(np.uint8))

    def skip(self, data: bytes, at: int) -> int:
        return at + 1


class Optional(Codec):
    """A value or None: a byte 0, or a byte 1 and the value."""

    holds_null = True

    def __init__(self, value: Codec) -> None:
        self.type = value.type
        self._value = value

    def read(self, source: Source, at: Positions, end: Positions) -> tuple[pa.Array, Positions]:
        require(at < end, "a presence byte is missing")
        flags = source.data[at]
        require(flags <= 1, "a presence byte is neither 0 nor 1")
        present = flags.view(np.bool_)
        after = at + 1
        values, stops = self._value.read(source, after[present], end[present])
        after[present] = stops
        return spread(values, present), after

    def write(self, values: pa.Array) -> pa.BinaryArray:
        there = is_present(values)
        data = self._value.write(values.drop_null())
        flags = binary_array(np.arange(len(there) + 1), there.view(np.uint8))
        return join_bytes(flags, spread(data, there).fill_null(EMPTY))

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

    def ends(self, source: Source, at: Positions, end: Positions) -> Positions:
        for codec in self._codecs:
            at = codec.ends(source, at, end)
        return at

    def write(self, values: pa.Array) -> pa.BinaryArray:
        refuse_nulls(values)
        return join_bytes(*[codec.write(values.field(i)) for i, codec in enumerate(self._codecs)])

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
            require(at < end, "a row is cut short")
            require(source.data[at] == byte, "a row has another number of fields")
            at = at + 1
        require(at < end, "a row is cut short")
        masked = source.data[at] != 0
        if not masked.any():
            at = at + 1
            mask = None
        else:
            require((source.data[at] == self._mask_size) | ~masked, "a row's null mask is off")
            mask_at = at[masked] + 1
            require(mask_at + self._mask_size <= end[masked], "a row is cut short")
            mask = np.zeros((len(at), self._mask_size), np.uint8)
            for i in range(self._mask_size):
                mask[masked, i] = source.data[mask_at + i]
            require(mask[masked].any(axis=1), "a row's null mask is empty")
            spare = 8 * self._mask_size - len(self._codecs)
            require(mask[:, -1] >> (8 - spare) == 0, "a row's null mask is too long")
            at = at + 1 + self._mask_size * masked
        columns = []
        for i, codec in enumerate(self._codecs):
            nulls = None if mask is None else (mask[:, i // 8] >> (i % 8) & 1).view(np.bool_)
            if nulls is None or not nulls.any():
                column, at = codec.read(source, at, end)
            else:
                require(np.bool_(self._nullable[i]), "a field that cannot be null is null")
                column, stops = codec.read(source, at[~nulls], end[~nulls])
                at[~nulls] = stops
                column = spread(column, ~nulls)
            columns.append(column)
        return pa.StructArray.from_arrays(columns, fields=list(self.type)), at

    def write(self, values: pa.Array) -> pa.BinaryArray:
        refuse_nulls(values)
        mask = np.zeros((len(values), 1 + self._mask_size), np.uint8)
        parts: list[pa.Array | pa.Scalar] = []
        for i, codec in enumerate(self._codecs):
            column = values.field(i)
            if column.null_count and self._nullable[i]:
                there = is_present(column)
                mask[:, 1 + i // 8] |= (~there).view(np.uint8) << (i % 8)
                column = spread(codec.write(column.drop_null()), there).fill_null(EMPTY)
                parts.append(column)
            else:
                parts.append(codec.write(column))
        masked: Flags = np.any(mask, axis=1)
        if not masked.any():
            return join_bytes(pa.scalar(self._head + b"\0", BINARY), *parts)
        mask[masked, 0] = self._mask_size
        sizes = np.where(masked, 1 + self._mask_size, 1)
        kept = masked[:, None] | (np.arange(1 + self._mask_size) == 0)
        masks = binary_array(offsets_of(sizes), mask[kept])
        return join_bytes(pa.scalar(self._head, BINARY), masks, *parts)

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
        return pa.ListArray.from_arrays(
            int32_array(offsets_of(counts)), items, type=self.type
        ), after

    def write(self, values: pa.Array) -> pa.BinaryArray:
        refuse_nulls(values)
        counts = values.value_lengths().to_numpy(zero_copy_only=False)
        return join_bytes(_counts(counts), grouped(self._item.write(values.flatten()), counts))

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
        offsets = int32_array(offsets_of(counts))
        key, value = entries.field(0), entries.field(1)
        return pa.MapArray.from_arrays(offsets, key, value, type=self.type), after

    def write(self, values: pa.Array) -> pa.BinaryArray:
        refuse_nulls(values)
        offsets = values.offsets.to_numpy()
        counts = np.diff(offsets)
        # Keys and items are those of the whole buffer, of which this array may be a slice.
        parts = [part.slice(offsets[0], counts.sum()) for part in (values.keys, values.items)]
        entries = pa.StructArray.from_arrays(parts, fields=list(self._entry.type))
        return join_bytes(_counts(counts), grouped(self._entry.write(entries), counts))

    def skip(self, data: bytes, at: int) -> int:
        return _skip_items(self._entry, data, at, None)


def read_values(codec: Codec, source: Source, starts: Positions, ends: Positions) -> pa.Array:
    """Returns the values whose encoded bytes stand between these positions.

    Raises:
        ValueError: The bytes of one are not what the codec's coder writes.
    """
    try:
        values, after = codec.read(source, starts, ends)
    except IndexError as error:
        raise ValueError("a value is cut short") from error
    require(after == ends, "bytes are left over after a value")
    return values


def write_values(codec: Codec, values: pa.Array) -> pa.BinaryArray:
    """Returns the encoded bytes of values; nulls that are no None of the coder stay null.

    Raises:
        ValueError: A value cannot be one of the codec's coder.
    """
    if codec.holds_null or not values.null_count:
        return codec.write(values)
    return spread(codec.write(values.drop_null()), is_present(values))


def _decimal_text(places: int, digits: bytes) -> str:
    number = int.from_bytes(digits, "big", signed=True)
    value = decimal.Decimal((number < 0, decimal.Decimal(abs(number)).as_tuple().digits, -places))
    if digits != _two_complement(number) or value.as_tuple().exponent != -places:
        raise ValueError("a decimal is not as its coder writes it")
    return str(value)


def _decimal_parts(text: str) -> tuple[int, bytes]:
    try:
        sign, digits, exponent = decimal.Decimal(text).as_tuple()
    except decimal.InvalidOperation:
        raise ValueError(f"{text!r:.100} is no decimal") from None
    if not isinstance(exponent, int):
        raise ValueError(f"{text} is no decimal that its coder can write")
    return -exponent, _two_complement(int(decimal.Decimal((sign, digits, 0))))


def _two_complement(number: int) -> bytes:
    """Big-endian, in the fewest bytes that have room for the sign."""
    bits = (number + 1 if number < 0 else number).bit_length()
    return number.to_bytes((bits + 8) // 8, "big", signed=True)


def _varint(n: int) -> bytes:
    out = bytearray()
    while n >= 128:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def _counts(counts: npt.NDArray[np.integer]) -> pa.BinaryArray:
    return binary_array(np.arange(len(counts) + 1) * 4, counts.astype(">i4"))


def _read_items(
    item: Codec, source: Source, at: Positions, end: Positions, *, chunked: bool
) -> tuple[Positions, Positions, Positions]:
    """Returns how many items each list has, where each item starts, where each list ends."""
    require(at + 4 <= end, "a list is cut short")
    counts = source.words(">i4", at).astype(np.int64)
    require(counts >= (-1 if chunked else 0), "a list has a negative length")
    if not (counts < 0).any():
        starts, after = locate_items(item, source, at + 4, end, counts)
        return counts, starts, after
    places: list[int] = []
    after = np.empty_like(at)
    for i, (position, stop) in enumerate(zip(at.tolist(), end.tolist(), strict=True)):
        before = len(places)
        after[i] = _skip_items(item, source.raw, position, places.append)
        counts[i] = len(places) - before
        if after[i] > stop:
            raise ValueError("a list is cut short")
    return counts, np.array(places, np.int64), after


def locate_items(
    item: Codec, source: Source, at: Positions, end: Positions, counts: Positions
) -> tuple[Positions, Positions]:
    """Returns where each of so many items from these positions on starts, and each run ends."""
    if item.width is not None:
        after = at + counts * item.width
        require(after <= end, "a list is cut short")
        within = np.arange(int(counts.sum())) - np.repeat(offsets_of(counts)[:-1], counts)
        return np.repeat(at, counts) + within * item.width, after
    # All first items at once, then all second ones, ..., until few lists have any left.
    after = at.copy()
    found = []
    rows = np.flatnonzero(counts)
    passed = 0
    while len(rows) >= _MANY:
        here = after[rows]
        found.append(here)
        after[rows] = item.ends(source, here, end[rows])
        passed += 1
        rows = rows[counts[rows] > passed]
    skip, data = item.skip, source.raw
    places = []
    for row, position, stop in zip(
        rows.tolist(), after[rows].tolist(), end[rows].tolist(), strict=True
    ):
        for _ in range(int(counts[row]) - passed):
            if position >= stop:
                raise ValueError("a list is cut short")
            places.append(position)
            position = skip(data, position)
        if position > stop:
            raise ValueError("a list is cut short")
        after[row] = position
    found.append(np.array(places, np.int64))
    return np.sort(np.concatenate(found)), after


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
_MANY = 32
