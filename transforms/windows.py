"""Which state ends with its window: at a cut after it nothing is left but outputs beyond the cut.

A window is over when the watermark passes its end and the allowed lateness; runners drop its state
then. No tombstone says so, as the boundary of the checkpoint does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.transforms.window import (
    FixedWindows,
    GlobalWindow,
    GlobalWindows,
    Sessions,
    SlidingWindows,
    WindowFn,
)

from beam_ckpt.sidecar import PATCH
from beam_ckpt.transforms.snapshot import SnapshotRecord

__all__ = ["is_over", "left_over", "window_identity", "without_what_is_over"]


def window_identity(fn: WindowFn) -> str:
    """Returns the name of a window function by which saved state is compared with a pipeline's.

    Times in it are in microseconds. Of others than Beam's own it is the class: what else they
    depend on is their author's.

    >>> window_identity(FixedWindows(60))
    'FixedWindows[60000000,0]'
    """
    kind, own = type(fn), vars(fn)
    if kind is GlobalWindows:
        return ""
    if kind is FixedWindows:
        return f"FixedWindows[{own['size'].micros},{own['offset'].micros}]"
    if kind is SlidingWindows:
        return "SlidingWindows[{size.micros},{period.micros},{offset.micros}]".format(**own)
    if kind is Sessions:
        return f"Sessions[{own['gap_size'].micros}]"
    return f"{kind.__module__}.{kind.__qualname__}"


def is_over(window: Any, boundary: int | None, lateness: int) -> bool:
    """Whether a window's state is gone at a cut; at a drained end only the global one is left.

    Args:
        window: The window.
        boundary: The cut in microseconds; `None` for the drained end.
        lateness: Allowed lateness in microseconds.
    """
    if isinstance(window, GlobalWindow):
        return False
    return boundary is None or bool(window.max_timestamp().micros + lateness < boundary)


def left_over(record: SnapshotRecord, boundary: int | None) -> SnapshotRecord | None:
    """What is left at a cut of a window that is over: its outputs beyond the cut, or nothing."""
    if boundary is None:
        return None
    carried = tuple(output for output in record.carried if output.timestamp >= boundary)
    if not carried:
        return None
    nothing = tuple(() if isinstance(cell, tuple) else None for cell in record.cells)
    return replace(record, cells=nothing, timers=(), carried=carried, patch=None)


def without_what_is_over(
    table: pa.Table, window_coder: Any, boundary: int | None, lateness: int
) -> pa.Table:
    """Rows of a key group without those of which nothing is left at a cut.

    Rows of a window that is over are whole then, and have no more than their outputs beyond the
    cut to say.
    """
    encoded = table["_window"].unique().to_pylist()
    windows = {data: window_coder.decode(data) for data in encoded}
    over = {data for data, window in windows.items() if is_over(window, boundary, lateness)}
    if not over:
        return table
    keep = [
        window not in over
        or (boundary is not None and any(_micros(output) >= boundary for output in carried or ()))
        for window, carried in zip(
            table["_window"].to_pylist(), table["_carried"].to_pylist(), strict=True
        )
    ]
    table = table.filter(pa.array(keep))
    if PATCH not in table.column_names:
        return table
    # Nothing is left of the cells, whatever was before: what these rows stand on may be gone.
    stays = pc.invert(pc.is_in(table["_window"], pa.array(sorted(over), table["_window"].type)))
    patch = pc.if_else(stays, table[PATCH], pa.scalar(None, table[PATCH].type))
    return table.set_column(table.schema.get_field_index(PATCH), table.schema.field(PATCH), patch)


def _micros(output: dict[str, Any]) -> int:
    return int(pa.scalar(output["timestamp"], pa.timestamp("us", "UTC")).value)
