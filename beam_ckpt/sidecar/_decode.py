"""The bytes of sidecars to rows, all of them or a row group at a time, whoever wrote the bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from beam_ckpt.errors import CheckpointError
from beam_ckpt.sidecar._bounds import MAX_DECODED_BYTES, check_limit, decoded_sizes
from beam_ckpt.sidecar._order import in_order
from beam_ckpt.sidecar._patch import of_columns
from beam_ckpt.sidecar._schema import (
    METADATA_KEY,
    PATCH,
    SidecarHeader,
    cell_columns,
    check_columns,
    with_optional,
)
from beam_ckpt.sidecar._seal import check_seal, not_a_sidecar

__all__ = ["SidecarFile", "decode_sidecar"]

_ALONE = 1024 * 1024
_TOLD_APART_BY = frozenset({"_key", "_window", "_deleted", PATCH})


def decode_sidecar(
    data: bytes,
    *,
    where: str,
    max_decoded_bytes: int = MAX_DECODED_BYTES,
    key: bytes | None = None,
    columns: Collection[str] | None = None,
    rows: tuple[int, int] | None = None,
) -> tuple[SidecarHeader, pa.Table]:
    """Reads a sidecar.

    What the file says of its size is checked before anything of that size is in memory.

    Args:
        data: The bytes of the file.
        where: What to call it in an error.
        max_decoded_bytes: Greatest size of the columns in memory.
        key: Read the rows of this key (its encoded bytes) alone, and only the row groups that can
            have it. None: all rows.
        columns: Read these columns alone, of which it may lack some, beside the ones that rows are
            told apart by (``_key``, ``_window``, ``_deleted``, ``_patch``). None: all columns.
        rows: Of a file that key groups share: the first row of one, and how many it has. None: all
            rows, of a shared file those of one key group after those of another.

    Raises:
        InvalidCheckpointError: It is truncated, damaged, or not a sidecar of this library; or it
            has not these rows.
        UnsupportedFormatError: It has a format that this version does not know.
        CheckpointTooLargeError: Its columns would be over the limit.
    """
    file = SidecarFile(
        data, where=where, max_decoded_bytes=max_decoded_bytes, columns=columns, rows=rows
    )
    return file.header, file.read(key)


class SidecarFile:
    """A sidecar whose row groups are read when they are asked for.

    It has the arguments and raises the errors of :func:`decode_sidecar`; the limit holds for what
    is read at once.

    Attributes:
        header: What it says of itself.
        schema: Of its pages.
    """

    def __init__(
        self,
        data: bytes,
        *,
        where: str,
        max_decoded_bytes: int = MAX_DECODED_BYTES,
        columns: Collection[str] | None = None,
        rows: tuple[int, int] | None = None,
    ) -> None:
        check_seal(data, where)
        self._where, self._limit, self._rows = where, max_decoded_bytes, rows
        self._held: pa.Table | None = None
        with self._blaming():
            self._file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
            encoded_header = (self._file.metadata.metadata or {}).get(METADATA_KEY)
            if encoded_header is None:
                not_a_sidecar(where, "it has no header")
            self.header = SidecarHeader.from_json(encoded_header, where=where)
            found = self._file.schema_arrow
            check_columns(self.header, found, where=where)
            self._there = frozenset(found.names)
            found = with_optional(found)
            self._sizes = decoded_sizes(data, found)
            if rows is not None:
                self._check_rows(*rows)
            names = found.names
            if columns is not None:
                names = [name for name in names if name in _TOLD_APART_BY or name in columns]
            self._cells = cell_columns(found)
            self._repatches = PATCH in names and len(names) < len(found.names)
            self.schema = pa.schema([found.field(name) for name in names])

    def pages(self) -> Iterator[pa.Table]:
        """Yields the rows of one row group after the other."""
        last: tuple[bytes, bytes] | None = None
        if self._rows is not None:
            with self._blaming():
                page = self._slice(*self._rows)
            yield page
            return
        for i in range(self._file.num_row_groups):
            with self._blaming():
                page = self._read([i])
                if not len(page):
                    continue
                keys, windows = page["_key"], page["_window"]
                starts = keys[0].as_py(), windows[0].as_py()
                if last is not None and last >= starts and self.header.key_group is not None:
                    not_a_sidecar(self._where, "its row groups are not in order")
                last = keys[-1].as_py(), windows[-1].as_py()
            yield page

    def read(self, key: bytes | None = None) -> pa.Table:
        """Returns all rows, or those of a key."""
        with self._blaming():
            if self._rows is not None:
                table = self._slice(*self._rows)
                return table if key is None else table.filter(pc.equal(table["_key"], key))
            # A key may be asked for in a file that is too large as a whole.
            groups = [
                i
                for i in range(self._file.num_row_groups)
                if key is None or _may_have(self._file, i, key)
            ]
            table = self._read(groups)
            return table if key is None else table.filter(pc.equal(table["_key"], key))

    @property
    def decoded_bytes(self) -> int:
        """What its columns take in memory at most."""
        return sum(size for _, size in self._sizes)

    def rows(self, first: int, count: int) -> pa.Table:
        """Returns the rows of one key group, of a file that several share."""
        with self._blaming():
            self._check_rows(first, count)
            return self._slice(first, count)

    def hold(self) -> int:
        """Reads all rows, of a shared file, so that `rows` finds them; returns their bytes."""
        with self._blaming():
            if self._held is None:
                self._held = self._read([*range(self._file.num_row_groups)])
                del self._file
        return int(self._held.nbytes)

    def _check_rows(self, first: int, count: int) -> None:
        there = sum(rows for rows, _ in self._sizes)
        if self.header.key_group is not None:
            not_a_sidecar(self._where, f"it is to be shared, and is of {self.header.key_group}")
        if not 0 <= first <= first + count <= there:
            not_a_sidecar(self._where, f"it has {there} rows, and not {count} from {first} on")

    def _slice(self, first: int, count: int) -> pa.Table:
        """Reads the rows of one key group."""
        if self._held is not None:
            return self._in_order(self._held.slice(first, count))
        groups: list[int] = []
        before = start = 0
        for i, (rows, _) in enumerate(self._sizes):
            if before < first + count and before + rows > first:
                start = start if groups else before
                groups.append(i)
            before += rows
        return self._read(groups, first - start if groups else 0, count)

    def _read(
        self, groups: Sequence[int], first: int | None = None, count: int | None = None
    ) -> pa.Table:
        sizes = [self._sizes[i] for i in groups]
        rows, size = sum(rows for rows, _ in sizes), sum(size for _, size in sizes)
        check_limit(rows, size, self._limit, self._where)
        names = [name for name in self.schema.names if name in self._there]
        # Few bytes are read sooner than other threads are told to.
        threads = size > _ALONE
        table = self._file.read_row_groups(groups, columns=names, use_threads=threads).select(names)
        table.validate(full=True)
        if first is not None:
            table = table.slice(first, count)
        for i, field in enumerate(self.schema):
            if field.name not in self._there:
                table = table.add_column(i, field, pa.nulls(len(table), field.type))
        # (Of all key groups of a shared file each is in order, and they are not.)
        if self.header.key_group is not None or first is not None:
            table = self._in_order(table)
        if self._repatches:
            table = of_columns(table, self._cells)
        return table.replace_schema_metadata(None)

    def _in_order(self, table: pa.Table) -> pa.Table:
        if not in_order(table):
            not_a_sidecar(self._where, "its rows are not in order, or one occurs twice")
        return table

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        # The bytes are the ones that were written, by this library or by somebody who imitates it,
        # so what Arrow may raise over them is not ours to enumerate.
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            not_a_sidecar(self._where, error)


def _may_have(file: pq.ParquetFile, row_group: int, key: bytes) -> bool:
    """Tells whether a key can be in a row group: between its first and its last one."""
    group = file.metadata.row_group(row_group)
    columns = (group.column(i) for i in range(group.num_columns))
    known = next(column for column in columns if column.path_in_schema == "_key").statistics
    if known is None or not known.has_min_max:
        return True
    return bool(known.min <= key <= known.max)
