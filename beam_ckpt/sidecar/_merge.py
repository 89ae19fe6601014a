"""Several sidecars of a key group as one: the latest state of each key and window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from beam_ckpt.errors import CheckpointTooLargeError, InvalidCheckpointError
from beam_ckpt.sidecar._order import every_in_order, latest_in_order, one_array
from beam_ckpt.sidecar._patch import (
    APPEND,
    KEEP,
    REPLACE,
    Codes,
    has_patches,
    patch_codes,
    with_patches,
)
from beam_ckpt.sidecar._schema import KEY, PATCH, cell_columns

__all__ = ["merge_newest_first"]

_Places = npt.NDArray[np.int64]


def merge_newest_first(tables: Iterable[pa.Table], *, keep_tombstones: bool = False) -> pa.Table:
    """Returns one row for each key and window, sorted by (``_key``, ``_window``): its latest state.

    That is its last row; where that holds only what changed (``_patch``), each cell as the rows
    before it, from the last whole one on, have left it.

    Args:
        tables: Rows of sidecars, the newest sidecar first. If a table has a key and window more
            than once, its rows count one after the other. A cell that a table lacks is empty in
            its rows.
        keep_tombstones: Whether to keep the rows of what was deleted, and rows that are not whole:
            needed in a delta, whose rows stand over older files; not in a full sidecar or at
            restore. The result then has the column ``_patch`` if one of the tables has it, and
            else never.

    Raises:
        InvalidCheckpointError: A column has different types in two of the tables, a patch is
            malformed, or a row is not whole and the one that it stands on is missing.
        ValueError: There are no tables.
    """
    chain = list(tables)
    if not chain:
        raise ValueError("there are no tables to merge")
    filled = [table for table in chain if len(table)] or chain[:1]
    # Oldest first, so that a stable sort leaves the latest of equal rows last.
    filled.reverse()
    try:
        merged = pa.concat_tables(filled, promote_options="default")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InvalidCheckpointError(
            f"sidecars that belong together have columns of different types ({error}); they were "
            "swapped or changed: restore from an older checkpoint."
        ) from error
    merged = _arranged(merged, filled)
    if any(has_patches(table) for table in filled):
        merged, codes = _folded(merged, np.concatenate(_codes(filled, merged)))
        if not keep_tombstones and codes.any():
            _refuse(merged, codes)
    else:
        merged = latest_in_order(merged)
        codes = np.zeros((len(merged), 0), np.uint8)
    if not keep_tombstones:
        return merged.filter(pc.invert(merged["_deleted"]))
    # Also where no row is in need of it, so that all pages of a file have the same columns.
    patched = any(PATCH in table.column_names for table in chain)
    return with_patches(merged, codes) if patched else merged


def _arranged(merged: pa.Table, oldest_first: Sequence[pa.Table]) -> pa.Table:
    """Returns the columns in the order of a sidecar, cells as in the newest table; no patches."""
    schemas = [table.schema for table in reversed(oldest_first)]
    cells = list(dict.fromkeys(name for schema in schemas for name in cell_columns(schema)))
    others = [name for name in merged.column_names if name not in cells and name != PATCH]
    key = [KEY] if KEY in others else []
    names = [*key, *cells, *(name for name in others if name != KEY)]
    return merged if names == merged.column_names else merged.select(names)


def _codes(tables: Iterable[pa.Table], merged: pa.Table) -> list[Codes]:
    cells = cell_columns(merged.schema)
    return [patch_codes(table, cells) for table in tables]


def _folded(rows: pa.Table, codes: Codes) -> tuple[pa.Table, Codes]:
    """Returns each key's and window's rows as one, in order, and its patch."""
    order, starts = every_in_order(one_array(rows["_key"]), one_array(rows["_window"]))
    codes = codes[order]
    cells = {name: i for i, name in enumerate(cell_columns(rows.schema))}
    left = np.zeros((len(starts), len(cells)), np.uint8)
    latest = order[np.append(starts[1:], len(order)) - 1]
    columns = []
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        i = cells.get(name)
        if column.null_count == len(column) and (i is None or not codes[:, i].any()):
            columns.append(pa.nulls(len(starts), column.type))
        elif i is None or not codes[:, i].any():
            columns.append(one_array(column).take(pa.array(latest)))
        else:
            cell, left[:, i] = _folded_cell(one_array(column), order, codes[:, i], starts)
            columns.append(cell)
    return pa.Table.from_arrays(columns, schema=rows.schema), left


def _folded_cell(
    column: pa.Array, order: _Places, codes: Codes, starts: _Places
) -> tuple[pa.Array, Codes]:
    """Returns what is left of one cell: its values, and what they do with what was before them.

    Args:
        column: The cell in all rows.
        order: The rows, key by key and in each from the oldest on.
        codes: What each of them does, in this order.
        starts: Where in it each key starts.
    """
    places = np.arange(len(order), dtype=np.int64)
    # The last row that says all of the cell: what is before it does not count.
    whole = np.maximum.reduceat(np.where(codes == REPLACE, places, -1), starts)
    added = codes == APPEND
    left = np.where(whole >= 0, REPLACE, KEEP).astype(np.uint8)
    if not added.any():
        found = pa.array(order[whole], mask=whole < 0)
        return column.take(found), left
    left[(whole < 0) & np.logical_or.reduceat(added, starts)] = APPEND
    sizes = np.diff(starts, append=len(order))
    counts = (codes != KEEP) & (places >= np.repeat(np.maximum(whole, starts), sizes))
    pieces = column.take(pa.array(order[counts]))
    lengths = np.zeros(len(order), np.int64)
    lengths[counts] = pieces.value_lengths().fill_null(0).to_numpy()
    totals = np.add.reduceat(lengths, starts)
    if totals.sum() >= 2**31:
        raise CheckpointTooLargeError(
            f"a cell has {totals.sum()} items in {len(totals)} rows, too many for one piece: use "
            "more key groups."
        )
    offsets = np.concatenate([[0], np.cumsum(totals)]).astype(np.int32)
    items = pieces.flatten()
    cell = pa.ListArray.from_arrays(
        pa.array(offsets), items, type=column.type, mask=pa.array(totals == 0)
    )
    return cell, left


def _refuse(rows: pa.Table, codes: Codes) -> None:
    bad = np.flatnonzero(codes.any(axis=1))
    key = rows["_key"][int(bad[0])].as_py()
    raise InvalidCheckpointError(
        f"{len(bad)} rows, that of key {key[:50]!r} first, say only what changed, and what they "
        "stand on is in none of the sidecars: one is missing, or they were swapped. Restore from "
        "an older checkpoint."
    )
