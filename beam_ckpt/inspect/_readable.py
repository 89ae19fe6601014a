"""What a reader without Beam cannot see in the bytes: windows, and the values of untyped cells."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa

from beam_ckpt._primitives import UNTYPED, as_json
from beam_ckpt.manifest import CheckpointManifest
from beam_ckpt.sidecar import cell_column_name

__all__ = ["WINDOW_TIMES", "Untyped", "readable_rows"]

Untyped = Literal["bytes", "json"]
"""How cells come whose coder nobody chose: as Beam wrote them, or as JSON (text). See `state`."""

WINDOW_TIMES = ("_window_start", "_window_end")

_INTERVALS = "IntervalWindowCoder"
_TIME = pa.timestamp("ms", tz="UTC")
_SHIFT = 2**63


def readable_rows(
    rows: pa.Table, manifest: CheckpointManifest, uid: str, untyped: Untyped
) -> pa.Table:
    """Returns rows of an operator with the times of their windows, if these are intervals.

    Args:
        rows: Some columns of the operator's state.
        manifest: Of the checkpoint that they are from.
        uid: The operator.
        untyped: Whether cells without a type become JSON.
    """
    spec = manifest.pipeline.operators.get(uid) if manifest.pipeline else None
    if spec is None:
        return rows
    if spec.window_coder == _INTERVALS and "_window" in rows.column_names:
        at = rows.schema.get_field_index("_window")
        for offset, column in enumerate(_times(rows["_window"]), 1):
            rows = rows.add_column(at + offset, WINDOW_TIMES[offset - 1], column)
    if untyped == "json":
        for name, cell in spec.cells.items():
            column = cell_column_name(name)
            if cell.coder == UNTYPED and column in rows.column_names:
                at = rows.schema.get_field_index(column)
                rows = rows.set_column(at, column, _as_json(rows[column]))
    return rows


def _times(windows: pa.ChunkedArray) -> tuple[pa.Array, pa.Array]:
    known: dict[bytes | None, tuple[int | None, int | None]] = {None: (None, None)}
    both = []
    for window in windows.to_pylist():
        if window not in known:
            known[window] = _interval(window)
        both.append(known[window])
    starts, ends = zip(*both, strict=True) if both else ((), ())
    return pa.array(starts, _TIME), pa.array(ends, _TIME)


def _interval(window: bytes) -> tuple[int | None, int | None]:
    """Start and end in ms: eight bytes of the end, then how long it is; None for other bytes."""
    end = int.from_bytes(window[:8], "big") - _SHIFT
    span = shift = 0
    for i, byte in enumerate(window[8:18], 9):
        span |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            start = end - span
            return (start, end) if i == len(window) and start >= -_SHIFT else (None, None)
    return None, None


def _as_json(column: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    if pa.types.is_binary(column.type):
        texts = [None if value is None else as_json(value) for value in column.to_pylist()]
        return pa.array(texts, pa.string())
    if pa.types.is_list(column.type) and pa.types.is_binary(column.type.value_type):
        lists = [
            None if values is None else [as_json(value) for value in values]
            for values in column.to_pylist()
        ]
        return pa.array(lists, pa.list_(pa.field("element", pa.string())))
    return column
