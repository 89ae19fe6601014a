"""Columns of bytes as numpy sees them: positions in one buffer, and Arrow arrays made of them."""

from __future__ import annotations

from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = [
    "BINARY",
    "EMPTY",
    "Bytes",
    "Flags",
    "Positions",
    "Source",
    "binary_array",
    "grouped",
    "int32_array",
    "is_present",
    "join_bytes",
    "lengths_of",
    "number_array",
    "numbers_of",
    "offsets_of",
    "read_varints",
    "refuse_nulls",
    "require",
    "spread",
    "write_varints",
]

Bytes: TypeAlias = npt.NDArray[np.uint8]
Positions: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

BINARY = pa.binary()
EMPTY = pa.scalar(b"", BINARY)


class Source:
    """Many pieces of bytes, one after the other in one buffer."""

    def __init__(self, data: Bytes) -> None:
        self.data = data

    @classmethod
    def of(cls, values: pa.BinaryArray) -> tuple[Source, Positions, Positions]:
        """Returns an array as a source, and where each value starts and ends; nulls are empty."""
        offsets, data = _parts_of(values)
        ends = offsets[1:] - offsets[0]
        return cls(data), offsets[:-1] - offsets[0], ends

    @cached_property
    def raw(self) -> bytes:
        """The same bytes, for loops in Python: indexing them is three times as fast."""
        return self.data.tobytes()

    def words(self, dtype: str, at: Positions) -> npt.NDArray[np.generic]:
        """Returns the numbers of type ``dtype`` that stand at these positions, aligned or not."""
        found: npt.NDArray[np.generic] = self._every(dtype)[at]
        return found

    def slices(self, starts: Positions, ends: Positions) -> pa.BinaryArray:
        """Returns the bytes between these positions, which ascend and do not overlap."""
        lengths = ends - starts
        if len(lengths) < 64:
            pairs = zip(starts.tolist(), ends.tolist(), strict=True)
            return pa.array([self.raw[start:end] for start, end in pairs], BINARY)
        offsets = offsets_of(lengths)
        if int(offsets[-1]) == len(self.data):
            return binary_array(offsets, self.data)
        sizes = np.flatnonzero(np.bincount(lengths)) if lengths.max() < 256 else None
        if sizes is None or len(sizes) > 24:
            return binary_array(offsets, self.data[self._marked(starts, ends)])
        # One size at a time, as if its values were numbers that wide: a copy per value, not byte.
        out = np.empty(int(offsets[-1]), np.uint8)
        target = Source(out)
        for size in sizes.tolist():
            if size:
                these = slice(None) if len(sizes) == 1 else lengths == size
                kind = f"V{size}"
                target._every(kind)[offsets[:-1][these]] = self.words(kind, starts[these])
        return binary_array(offsets, out)

    def _every(self, dtype: str) -> npt.NDArray[np.generic]:
        size = np.dtype(dtype).itemsize
        return np.ndarray((max(len(self.data) - size + 1, 0),), dtype, self.data, strides=(1,))

    def _marked(self, starts: Positions, ends: Positions) -> Flags:
        """Tells of each byte whether it is between a start and its end."""
        # +1 where a value starts, -1 where it ends: the running sum marks what is inside one.
        edges = np.zeros(len(self.data) + 1, np.int8)
        filled = ends > starts
        edges[starts[filled]] += 1
        edges[ends[filled]] -= 1
        return np.cumsum(edges[:-1], dtype=np.int8).view(np.bool_)


def require(condition: Flags | np.bool_ | bool, otherwise: str) -> None:
    """Raises ValueError with this text unless every flag is true."""
    if not (condition.all() if isinstance(condition, np.ndarray) else condition):
        raise ValueError(otherwise)


def refuse_nulls(values: pa.Array) -> None:
    """Raises ValueError if there is a null."""
    if values.null_count:
        raise ValueError(f"a null where the coder has no None ({values.type})")


def is_present(values: pa.Array) -> Flags:
    """Tells for each value whether it is not null."""
    flags: Flags = values.is_valid().to_numpy(zero_copy_only=False)
    return flags


def spread(values: pa.Array, present: Flags) -> pa.Array:
    """Returns an array with the next of the values wherever one is present, else null."""
    if len(values) == len(present):
        return values
    return values.take(pa.array(np.cumsum(present) - 1, mask=~present))


def offsets_of(lengths: npt.NDArray[np.integer]) -> Positions:
    """Returns where pieces of these lengths start when they stand side by side, and their end."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def lengths_of(values: pa.BinaryArray) -> Positions:
    """Returns the length of each value; of nulls it is 0."""
    return np.diff(_parts_of(values)[0])


def int32_array(offsets: Positions) -> pa.Array:
    """Returns offsets as Arrow's strings and lists have them; ValueError from 2 GiB on."""
    return number_array(pa.int32(), _int32(offsets))


def binary_array(offsets: Positions, data: npt.NDArray[np.generic]) -> pa.BinaryArray:
    """Returns the bytes between each offset and the next."""
    buffers = [None, pa.py_buffer(_int32(offsets)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(BINARY, len(offsets) - 1, buffers)


def number_array(type: pa.DataType, values: npt.NDArray[np.generic]) -> pa.Array:
    """Returns an array of a type of fixed width from what its buffer has to hold."""
    return pa.Array.from_buffers(type, len(values), [None, pa.py_buffer(values)])


def numbers_of(values: pa.Array, dtype: str) -> npt.NDArray[np.generic]:
    """Returns what the buffer of an array of a type of fixed width holds."""
    data = np.frombuffer(values.buffers()[1] or b"", dtype)
    return data[values.offset : values.offset + len(values)]


def join_bytes(*columns: pa.Array | pa.Scalar) -> pa.BinaryArray:
    """Returns the bytes of each row of these columns, one column after the other."""
    joined: pa.BinaryArray = pc.binary_join_element_wise(*columns, EMPTY)
    return joined


def grouped(items: pa.BinaryArray, counts: npt.NDArray[np.integer]) -> pa.BinaryArray:
    """Returns the items joined in runs of these lengths; they stand side by side already."""
    offsets, data = _parts_of(items)
    return binary_array((offsets - offsets[0])[offsets_of(counts)], data)


def read_varints(
    source: Source, at: Positions, end: Positions
) -> tuple[npt.NDArray[np.uint64], Positions]:
    """Returns the unsigned varint at each position, and where it ends.

    Raises:
        ValueError: One reaches past its end, has more than 64 bits or is longer than it need be.
    """
    require(at < end, "an integer is missing")
    byte = source.data[at]
    values = (byte & 127).astype(np.uint64)
    after = at + 1
    more = np.flatnonzero(byte >= 128)
    for i in range(1, 10):
        if not len(more):
            break
        here = after[more]
        require(here < end[more], "an integer is cut short")
        byte = source.data[here]
        values[more] |= (byte & 127).astype(np.uint64) << np.uint64(7 * i)
        after[more] += 1
        require(byte != 0, "an integer is not in its shortest form")
        if i == 9:
            require(byte == 1, "an integer has more than 64 bits")
        more = more[byte >= 128]
    return values, after


def write_varints(values: npt.NDArray[np.uint64]) -> pa.BinaryArray:
    """Returns each number as an unsigned varint."""
    sizes = np.ones(len(values), np.int64)
    steps = max(int(values.max(initial=0)).bit_length() + 6, 7) // 7
    for i in range(1, steps):
        sizes += values >= np.uint64(1 << 7 * i)
    offsets = offsets_of(sizes)
    out = np.empty(int(offsets[-1]), np.uint8)
    starts = offsets[:-1]
    for i in range(steps):
        more = sizes > i + 1
        byte = (values & np.uint64(127)).astype(np.uint8)
        byte[more] |= 128
        out[starts + i] = byte
        values, starts, sizes = values[more] >> np.uint64(7), starts[more], sizes[more]
    return binary_array(offsets, out)


def _int32(offsets: Positions) -> npt.NDArray[np.int32]:
    if offsets[-1] >= 2**31:
        raise ValueError("a column has 2 GiB or more in one piece")
    return offsets.astype(np.int32)


def _parts_of(values: pa.BinaryArray) -> tuple[Positions, Bytes]:
    """Returns the offsets of an array's values, and the bytes from the first to the last."""
    if not len(values):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    _, offsets_buffer, data_buffer = values.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[values.offset :][: len(values) + 1]
    data = np.frombuffer(data_buffer or b"", np.uint8)
    return offsets.astype(np.int64), data[offsets[0] : offsets[-1]]
