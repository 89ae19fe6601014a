"""Sidecars that are larger than memory: merged as streams of pages, newest first.

The rows of every source are in order, so what one can merge at a time is known: all rows up to the
least of the last keys of the pages that are open. None of a key is then still to come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.sidecar._merge import merge_newest_first
from beam_ckpt.sidecar._patch import has_patches, patch_codes, with_patches
from beam_ckpt.sidecar._schema import PATCH, cell_columns

__all__ = ["PageStream", "in_one_row", "merge_pages", "with_columns_of"]

_Place = tuple[bytes, bytes]


@dataclass(frozen=True)
class PageStream:
    """Rows in order, each key and window once, a page at a time.

    Attributes:
        schema: Of all pages.
        pages: To be read once; pages may be empty.
    """

    schema: pa.Schema
    pages: Iterable[pa.Table]


def merge_pages(
    newest_first: Sequence[PageStream], schema: pa.Schema, *, keep_tombstones: bool = False
) -> PageStream:
    """Returns one row for each key and window: see `merge_newest_first`, which does a page of it.

    Args:
        newest_first: What to merge.
        schema: Of the result, without ``_patch``: other columns are left out, and cells that a
            source lacks are empty in its rows.
        keep_tombstones: As in `merge_newest_first`.

    Raises:
        InvalidCheckpointError: As in `merge_newest_first`, or the rows of a source are not in
            order.
    """
    patched = any(PATCH in stream.schema.names for stream in newest_first)
    result = schema
    if keep_tombstones and patched:
        result = schema.append(pa.field(PATCH, pa.binary()))
    return PageStream(result, _merged(newest_first, schema, result, keep_tombstones))


def _merged(
    newest_first: Sequence[PageStream], schema: pa.Schema, result: pa.Schema, keep_tombstones: bool
) -> Iterator[pa.Table]:
    sources = [_Source(stream.pages, schema) for stream in newest_first]
    while True:
        sources = [source for source in sources if source.fill()]
        if not sources:
            return
        bound = min(source.last for source in sources)
        taken = [page for source in sources if len(page := source.take(bound))]
        merged = merge_newest_first(taken, keep_tombstones=keep_tombstones)
        if len(merged):
            yield with_columns_of(merged, result)


def in_one_row(streams: Iterable[PageStream]) -> Iterator[pa.Table]:
    """Yields the pages of streams that come after each other, as the files of one base do.

    Raises:
        InvalidCheckpointError: They do not.
    """
    last: _Place | None = None
    for stream in streams:
        for page in stream.pages:
            if not len(page):
                continue
            if last is not None and last >= _place(page, 0):
                raise InvalidCheckpointError(
                    "the files of a base are not in the order of their keys; they were swapped or "
                    "changed: restore from an older checkpoint."
                )
            last = _place(page, len(page) - 1)
            yield page


def with_columns_of(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns a table with the columns of a schema, of which it may lack some, and its patches."""
    names = schema.names
    if table.column_names == names:
        return table
    wanted = [name for name in names if name != PATCH]
    columns = []
    for name in wanted:
        if name in table.column_names:
            columns.append(table[name])
        else:
            columns.append(pa.nulls(len(table), schema.field(name).type))
    fields = [
        table.schema.field(name) if name in table.column_names else schema.field(name)
        for name in wanted
    ]
    found = pa.Table.from_arrays(columns, schema=pa.schema(fields))
    if has_patches(table):
        return with_patches(found, patch_codes(table, cell_columns(found.schema)))
    if PATCH in names or PATCH in table.column_names:
        return found.append_column(PATCH, pa.nulls(len(found), pa.binary()))
    return found


class _Source:
    """A stream of which one page is open."""

    def __init__(self, pages: Iterable[pa.Table], schema: pa.Schema) -> None:
        self._pages, self._schema = iter(pages), schema
        self._page: pa.Table | None = None
        self.last: _Place = (b"", b"")

    def fill(self) -> bool:
        """Opens the next page if there is none; whether there is one now."""
        while self._page is None or not len(self._page):
            self._page = next(self._pages, None)
            if self._page is None:
                return False
            if len(self._page):
                first, before = _place(self._page, 0), self.last
                self.last = _place(self._page, len(self._page) - 1)
                if before >= first and before != (b"", b""):
                    raise InvalidCheckpointError(
                        "the pages of a sidecar are not in the order of their keys; it was "
                        "changed: restore from an older checkpoint."
                    )
                self._page = with_columns_of(self._page, self._schema)
        return True

    def take(self, bound: _Place) -> pa.Table:
        """Takes the rows up to a place from the open page."""
        page = self._page
        assert page is not None
        if self.last <= bound:
            self._page = None
            return page
        low, high = 0, len(page) - 1
        while low < high:
            middle = (low + high) // 2
            if _place(page, middle) <= bound:
                low = middle + 1
            else:
                high = middle
        self._page = page.slice(low)
        return page.slice(0, low)


def _place(page: pa.Table, row: int) -> _Place:
    return page["_key"][row].as_py(), page["_window"][row].as_py()
