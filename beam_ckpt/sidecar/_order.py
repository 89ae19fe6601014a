"""The order of a sidecar's rows: by encoded key, then encoded window, each pair once."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["in_order", "latest_in_order"]


def in_order(table: pa.Table) -> bool:
    """Tells whether the rows ascend by (``_key``, ``_window``), with no pair twice."""
    if len(table) < 2:
        return True
    keys, windows = _array(table["_key"]), _array(table["_window"])
    ascends = pc.less(keys[:-1], keys[1:])
    if not pc.all(ascends).as_py():
        same_key = pc.equal(keys[:-1], keys[1:])
        ascends = pc.or_(ascends, pc.and_(same_key, pc.less(windows[:-1], windows[1:])))
    return bool(pc.all(ascends).as_py())


def latest_in_order(table: pa.Table) -> pa.Table:
    """Returns the rows in order; of several with the same key and window, the last one."""
    if in_order(table):
        return table
    table = table.combine_chunks()
    by = table.select(["_key", "_window"])
    # Arrow's sort is stable: of equal pairs the last row stays last.
    order = pc.sort_indices(by, sort_keys=[("_key", "ascending"), ("_window", "ascending")])
    ordered = by.take(order)
    keys, windows = _array(ordered["_key"]), _array(ordered["_window"])
    differs = pc.or_(pc.not_equal(keys[:-1], keys[1:]), pc.not_equal(windows[:-1], windows[1:]))
    if not pc.all(differs).as_py():
        last = pa.concat_arrays([differs, pa.array([True])])
        order = order.filter(last)
    return table.take(order)


def _array(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined
