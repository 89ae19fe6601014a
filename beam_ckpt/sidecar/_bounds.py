"""What a sidecar can take in memory, known before any of it is unpacked.

A Parquet file of a few kilobytes can unpack to any size: by compression, by dictionaries (a long
value and a million references to it), by run lengths (a billion nulls). So dictionaries are not
used in sidecars and refused when found; what pages unpack to is added up from their headers; and
rows are as few as their keys have bytes for.
"""

from __future__ import annotations

import pyarrow as pa

from beam_ckpt.errors import CheckpointTooLargeError
from beam_ckpt.sidecar._thrift import Struct, Value, read_struct

__all__ = ["MAX_DECODED_BYTES", "check_limit", "decoded_size", "decoded_sizes"]

_PLAIN = 0
_DATA_PAGE = 0


MAX_DECODED_BYTES = 2**31 - 1
"""Greatest size of a sidecar's columns in memory: offsets in Arrow's strings have 31 bits."""


def check_limit(rows: int, size: int, limit: int, where: str) -> None:
    """Raises `CheckpointTooLargeError` for rows that would take more than the limit in memory."""
    if size > limit:
        raise CheckpointTooLargeError(
            f"{where} has {rows} rows that can take {size} bytes in memory, the limit is {limit}: "
            "use more key groups, or raise the limit."
        )


def decoded_size(data: bytes, schema: pa.Schema) -> tuple[int, int]:
    """Returns the rows of a Parquet file and their size: the sums of `decoded_sizes`."""
    sizes = decoded_sizes(data, schema)
    return sum(rows for rows, _ in sizes), sum(size for _, size in sizes)


def decoded_sizes(data: bytes, schema: pa.Schema) -> list[tuple[int, int]]:
    """Returns the rows of each row group, and the bytes that they take in memory at most.

    Args:
        data: The file.
        schema: Of its columns, with a required binary column ``_key``.

    Raises:
        ValueError: The footer or a page is malformed, or not as this library writes them.
    """
    footer_size = int.from_bytes(data[-8:-4], "little")
    footer_at = len(data) - 8 - footer_size
    footer, _ = read_struct(data[footer_at:-8], 0)
    sizes = []
    per_row = sum(_bytes_per_row(field.type) for field in schema)
    for group in _structs(footer, 4):
        group_rows, size = _int(group, 3), 0
        keys = None
        for chunk in _structs(group, 1):
            if 1 in chunk:
                raise ValueError("one of its columns is in another file")
            column = _struct(chunk, 3)
            path = ".".join(_texts(column, 3))
            unpacked, values = _pages(data, footer_at, column, path)
            # Items of lists beyond one a row: a number of at most 8 bytes, or the offset of bytes
            # that are counted as unpacked; an offset of the list; whether they are null.
            size += unpacked + 14 * max(values - group_rows, 0)
            if path == "_key":
                keys = unpacked
        # Plain byte strings come after their length in four bytes.
        if keys is None or not 0 <= 4 * group_rows <= keys:
            raise ValueError(f"{keys} bytes cannot hold the keys of {group_rows} rows")
        sizes.append((group_rows, size + group_rows * per_row))
    rows = sum(group_rows for group_rows, _ in sizes)
    if rows != _int(footer, 3):
        raise ValueError(f"it has {_int(footer, 3)} rows, its row groups have {rows}")
    return sizes


def _pages(data: bytes, stop: int, column: Struct, path: str) -> tuple[int, int]:
    """Returns the bytes that a column's pages unpack to, and their number of values."""
    at, packed_size = _int(column, 9), _int(column, 7)
    end = at + packed_size
    if _int(column, 5) == packed_size == 0:  # of no rows
        return 0, 0
    if 11 in column:
        raise ValueError(f"column {path} has a dictionary")
    if not 4 <= at <= end <= stop:
        raise ValueError(f"the pages of column {path} are not where they should be")
    unpacked = values = 0
    while at < end:
        page, at = read_struct(data, at)
        if _int(page, 1) != _DATA_PAGE:
            raise ValueError(f"column {path} has a page that is not plain data")
        header = _struct(page, 5)
        if _int(header, 2) != _PLAIN:
            raise ValueError(f"column {path} has a page that is not plainly encoded")
        size, packed, count = _int(page, 2), _int(page, 3), _int(header, 1)
        if size < 0 or count < 0 or not 0 <= packed <= end - at:
            raise ValueError(f"a page of column {path} has no possible size")
        unpacked += size
        values += count
        at += packed
    if values != _int(column, 5):
        raise ValueError(f"the pages of column {path} do not have the values it should have")
    return unpacked, values


def _bytes_per_row(type: pa.DataType) -> int:
    """Returns what a row takes in memory beside the bytes of strings and the items of lists."""
    if pa.types.is_struct(type):
        return 1 + sum(_bytes_per_row(field.type) for field in type)
    if pa.types.is_primitive(type):
        return 1 + max(int(type.bit_width) // 8, 1)
    return 5


def _int(struct: Struct, number: int) -> int:
    value = struct.get(number)
    if type(value) is not int:
        raise ValueError("its metadata lacks a number")
    return value


def _struct(struct: Struct, number: int) -> Struct:
    value = struct.get(number)
    if not isinstance(value, dict):
        raise ValueError("its metadata lacks a part")
    return value


def _structs(struct: Struct, number: int) -> list[Struct]:
    return [item for item in _list(struct, number) if isinstance(item, dict)]


def _texts(struct: Struct, number: int) -> list[str]:
    items = _list(struct, number)
    return [item.decode("utf-8", "replace") for item in items if isinstance(item, bytes)]


def _list(struct: Struct, number: int) -> list[Value]:
    value = struct.get(number)
    if not isinstance(value, list):
        raise ValueError("its metadata lacks a list")
    return value
