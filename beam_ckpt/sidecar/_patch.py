"""Rows that hold only what changed: which cells of a row are new, kept as they were, or added to.

A row of a delta whose ``_patch`` is null is whole. Else ``_patch`` has one byte for each cell
column, in the order of the columns: ``REPLACE``: the cell is what this row has (null: empty);
``KEEP``: it is as it was in the key's row before, and null here; ``APPEND``: the items of this row
come after the ones that were there. Everything that is no cell is always this row's.

Within this package a patch is codes: a matrix of a row for each row and a column for each cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.sidecar._order import one_array
from beam_ckpt.sidecar._schema import PATCH, cell_columns

__all__ = [
    "APPEND",
    "KEEP",
    "REPLACE",
    "Codes",
    "appended_bytes",
    "has_patches",
    "of_columns",
    "patch_codes",
    "with_patches",
]

REPLACE: Final = 0
KEEP: Final = 1
APPEND: Final = 2

Codes: TypeAlias = npt.NDArray[np.uint8]


def has_patches(table: pa.Table) -> bool:
    """Tells whether a row is not whole."""
    at = table.schema.get_field_index(PATCH)
    return at >= 0 and bool(table.column(at).null_count < len(table))


def patch_codes(
    table: pa.Table, cells: Sequence[str], patched_cells: Sequence[str] | None = None
) -> Codes:
    """Returns what each row does with these cells; with one that the table lacks: it empties it.

    Args:
        table: Rows.
        cells: The cells.
        patched_cells: Those that the patches speak of, if the table has not the columns of all.

    Raises:
        InvalidCheckpointError: A patch is none of this table's.
    """
    found = np.zeros((len(table), len(cells)), np.uint8)
    if not has_patches(table):
        return found
    own = cell_columns(table.schema) if patched_cells is None else list(patched_cells)
    patch = one_array(table[PATCH])
    patched: npt.NDArray[np.bool_] = patch.is_valid().to_numpy(zero_copy_only=False)
    sizes = pc.min_max(pc.binary_length(patch))
    if not sizes["min"].as_py() == sizes["max"].as_py() == len(own):
        _malformed(f"{sizes['min']} to {sizes['max']} bytes, and there are {len(own)} cells")
    valid = patch.drop_null()  # may be a slice
    _, offsets_buffer, data_buffer = valid.buffers()
    first = int(np.frombuffer(offsets_buffer, np.int32)[valid.offset])
    shape = int(patched.sum()), len(own)
    given = np.frombuffer(data_buffer or b"", np.uint8)[first:][: shape[0] * shape[1]]
    given = given.reshape(shape)
    if given.max(initial=0) > APPEND:
        _malformed(f"a byte {given.max()}")
    if pc.any(pc.and_(one_array(table["_deleted"]), patch.is_valid())).as_py():
        _malformed("a tombstone")
    for i, name in enumerate(own):
        if name in cells:
            found[patched, cells.index(name)] = given[:, i]
            if name not in table.column_names or pa.types.is_list(table.schema.field(name).type):
                continue
            if (given[:, i] == APPEND).any():
                _malformed(f"items that are added to {name!r}, which has one value")
    return found


def of_columns(table: pa.Table, patched_cells: Sequence[str]) -> pa.Table:
    """Returns a table of some of a sidecar's columns with patches of these alone.

    Args:
        table: The rows, and their patches as they are in the file.
        patched_cells: The columns of cells that the file has.
    """
    codes = patch_codes(table, cell_columns(table.schema), patched_cells)
    return with_patches(table.drop_columns([PATCH]), codes)


def appended_bytes(table: pa.Table) -> int:
    """Returns how many bytes in memory of the rows are items that are only added to a cell."""
    if not has_patches(table):
        return 0
    cells = cell_columns(table.schema)
    added = patch_codes(table, cells) == APPEND
    return sum(
        table[name].filter(pa.array(added[:, i])).nbytes
        for i, name in enumerate(cells)
        if added[:, i].any()
    )


def with_patches(table: pa.Table, codes: Codes) -> pa.Table:
    """Returns a table without patches with these; a row that is whole has none."""
    if not codes.any():
        patch = pa.nulls(len(table), pa.binary())
        return table.append_column(PATCH, patch)
    data = np.ascontiguousarray(codes)
    sizes = np.arange(len(codes) + 1, dtype=np.int32) * codes.shape[1]
    every = pa.Array.from_buffers(
        pa.binary(), len(codes), [None, pa.py_buffer(sizes), pa.py_buffer(data)]
    )
    patch = pc.if_else(pa.array(codes.any(axis=1)), every, pa.scalar(None, pa.binary()))
    return table.append_column(PATCH, patch)


def _malformed(what: str) -> NoReturn:
    raise InvalidCheckpointError(
        f"a row of a delta has a patch of {what}; the sidecar was damaged or changed: restore from "
        "an older checkpoint."
    )
