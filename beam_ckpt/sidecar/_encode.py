"""Rows to the bytes of sidecars: Parquet that any tool reads, in row groups that fit in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.sidecar._bounds import MAX_DECODED_BYTES, check_limit, decoded_size
from beam_ckpt.sidecar._schema import (
    KEY,
    METADATA_KEY,
    OPTIONAL,
    SidecarHeader,
    check_columns,
)
from beam_ckpt.sidecar._seal import sealed

__all__ = ["ROW_GROUP_BYTES", "ROW_GROUP_ROWS", "encode_pages", "encode_sidecar"]

ROW_GROUP_ROWS = 128 * 1024
"""Rows of a row group: what a reader that looks for one key has to read."""

ROW_GROUP_BYTES = 8 * 1024 * 1024
"""Bytes that the rows of a row group have in memory, unless one row alone has more."""


def encode_sidecar(
    table: pa.Table,
    header: SidecarHeader,
    *,
    row_group_rows: int = ROW_GROUP_ROWS,
    row_group_bytes: int = ROW_GROUP_BYTES,
    max_decoded_bytes: int = MAX_DECODED_BYTES,
) -> bytes:
    """Returns the bytes of a sidecar.

    Args:
        table: Its rows, sorted by (``_key``, ``_window``), one for each pair; columns as
            :func:`~beam_ckpt.sidecar.sidecar_schema` has them. In a shared file that is so for the
            rows of each key group.
        header: What the sidecar says of itself.
        row_group_rows: Rows of a row group at most.
        row_group_bytes: Bytes in memory of its rows, if it has more than one.
        max_decoded_bytes: Greatest size of the columns in memory.

    Raises:
        InvalidCheckpointError: The table does not have the columns of a sidecar with this header.
        CheckpointTooLargeError: The columns are over the limit.
    """
    check_columns(header, table.schema, where=_where(header))
    check_limit(len(table), table.nbytes, max_decoded_bytes, _where(header))
    ((data, _),) = encode_pages(
        [table],
        header,
        table.schema,
        row_group_rows=row_group_rows,
        row_group_bytes=row_group_bytes,
        max_decoded_bytes=max_decoded_bytes,
    )
    return data


def encode_pages(
    pages: Iterable[pa.Table],
    header: SidecarHeader,
    schema: pa.Schema,
    *,
    row_group_rows: int = ROW_GROUP_ROWS,
    row_group_bytes: int = ROW_GROUP_BYTES,
    file_bytes: int | None = None,
    max_decoded_bytes: int = MAX_DECODED_BYTES,
) -> Iterator[tuple[bytes, int]]:
    """Yields the bytes and the number of rows of sidecars that hold all rows of the pages in order.

    No more is in memory than a page, a row group, and the bytes of one file.

    Args:
        pages: Rows in order, over all pages, as :func:`encode_sidecar` has them; pages of any size.
        header: What each of the sidecars says of itself.
        schema: Of all pages.
        row_group_rows: Rows of a row group at most.
        row_group_bytes: Bytes in memory of its rows, if it has more than one.
        file_bytes: Bytes in memory of the rows of a file, if it has more than one row group; what
            is over goes into the next file. None: there is one file.
        max_decoded_bytes: Greatest size of a file's columns in memory.

    Raises:
        InvalidCheckpointError: The pages do not have the columns of a sidecar with this header.
        CheckpointTooLargeError: The columns of a file are over the limit.
    """
    where = _where(header)
    check_columns(header, schema, where=where)
    file: _File | None = None
    for page in _row_groups(pages, row_group_rows, row_group_bytes):
        if not page.schema.equals(schema):
            raise InvalidCheckpointError(
                f"rows in {where} have the columns {page.schema.to_string()[:500]}, not "
                f"{schema.to_string()[:500]}: files that belong together were swapped or changed; "
                "restore from an older checkpoint."
            )
        size = page.nbytes
        if file is not None and file_bytes is not None and file.size + size > file_bytes:
            yield file.close(max_decoded_bytes), file.rows
            file = None
        if file is None:
            file = _File(header, schema)
        check_limit(file.rows + len(page), file.size + size, max_decoded_bytes, where)
        file.write(page, size)
    if file is None:
        file = _File(header, schema)
        file.write(schema.empty_table(), 0)
    yield file.close(max_decoded_bytes), file.rows


class _File:
    """A sidecar that is being written.

    What is left out of it is seen in its first row group, which waits for that: if there is no
    other, the file may be so small that a column without a value outweighs the rows.
    """

    def __init__(self, header: SidecarHeader, schema: pa.Schema) -> None:
        self._header, self._schema = header, schema
        self.rows = self.size = 0
        self._first: pa.Table | None = None
        self._writer: pq.ParquetWriter | None = None

    def write(self, page: pa.Table, size: int) -> None:
        """Writes a row group, of a size in memory."""
        if self._writer is None and self._first is None:
            self._first = page
        else:
            self._open(self._schema).write_table(page, max(len(page), 1))
        self.rows += len(page)
        self.size += size

    def _open(self, schema: pa.Schema) -> pq.ParquetWriter:
        if self._writer is not None:
            return self._writer
        self._sink = pa.BufferOutputStream()
        statistics = (KEY, "_key", "_window", "_deleted", "_updated")
        self._writer = pq.ParquetWriter(
            self._sink,
            schema,
            version="2.6",
            compression="zstd",
            compression_level=1,
            data_page_version="1.0",
            use_dictionary=False,
            write_statistics=_leaves(schema, statistics),
            write_page_checksum=True,
            # Every type a sidecar has is one of Parquet's own; a copy in Arrow's words costs 1 kB.
            store_schema=False,
        )
        first, self._first = self._first, None
        assert first is not None
        self._writer.write_table(first.select(schema.names), max(len(first), 1))
        return self._writer

    def close(self, max_decoded_bytes: int) -> bytes:
        """Returns the bytes of the file."""
        schema = self._schema
        if self._first is not None and self._header.format_version > 2:
            for name in OPTIONAL:
                if self._first[name].null_count == len(self._first):
                    schema = schema.remove(schema.get_field_index(name))
        writer = self._open(schema)
        writer.add_key_value_metadata({METADATA_KEY: self._header.to_json()})
        writer.close()
        data = sealed(memoryview(self._sink.getvalue()))
        del self._sink, self._writer, writer
        # What is written can be read: the measure is that of the reader, never sixteen times as
        # much.
        if self.size > max_decoded_bytes // 16:
            rows, size = decoded_size(data, self._schema)
            check_limit(rows, size, max_decoded_bytes, _where(self._header))
        return data


def _row_groups(pages: Iterable[pa.Table], rows: int, size: int) -> Iterator[pa.Table]:
    """Yields the rows of pages anew, as many at a time as may be in a row group."""
    held: list[pa.Table] = []
    held_rows = held_bytes = 0
    for page in pages:
        for part in _parts(page, rows, size):
            part_bytes = part.nbytes
            if held and (held_rows + len(part) > rows or held_bytes + part_bytes > size):
                yield pa.concat_tables(held)
                held, held_rows, held_bytes = [], 0, 0
            held.append(part)
            held_rows += len(part)
            held_bytes += part_bytes
    if held:
        yield pa.concat_tables(held)


def _parts(page: pa.Table, rows: int, size: int) -> Iterator[pa.Table]:
    if not len(page):
        return
    fit = max(1, min(rows, size * len(page) // max(page.nbytes, 1)))
    if fit >= len(page):
        yield page
        return
    for start in range(0, len(page), fit):
        part = page.slice(start, fit)
        if len(part) == 1 or part.nbytes <= size:
            yield part
        else:  # some rows are larger than others
            half = len(part) // 2
            yield from _parts(part.slice(0, half), rows, size)
            yield from _parts(part.slice(half), rows, size)


def _leaves(schema: pa.Schema, columns: Sequence[str]) -> list[str]:
    """Returns the paths, as Parquet writes them, of these columns' leaves outside lists."""
    paths: list[str] = []

    def walk(path: str, type: pa.DataType) -> None:
        if pa.types.is_struct(type):
            for field in type:
                walk(f"{path}.{field.name}", field.type)
        elif not pa.types.is_nested(type):
            paths.append(path)

    for name in columns:
        walk(name, schema.field(name).type)
    return paths


def _where(header: SidecarHeader) -> str:
    group = "shared" if header.key_group is None else f"key group {header.key_group}"
    return f"the table for operator {header.operator!r}, {group}"
