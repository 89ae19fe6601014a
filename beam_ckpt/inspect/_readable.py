"""What a reader without Beam cannot see in the bytes: windows, and the values of untyped cells."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Self

import pyarrow as pa

from beam_ckpt._primitives import UNTYPED, as_json
from beam_ckpt._unpickle import PICKLING, unpickler
from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.inspect._schemas import Decoder, Schema, decoders
from beam_ckpt.manifest import CellSpec, CheckpointManifest
from beam_ckpt.sidecar import cell_column_name

__all__ = ["WINDOW_TIMES", "Reading", "Untyped", "readable_rows"]

Untyped = Literal["bytes", "json"]
"""How cells come whose coder nobody chose: as Beam wrote them, or as JSON (text). See `state`."""

WINDOW_TIMES = ("_window_start", "_window_end")

_INTERVALS = "IntervalWindowCoder"
_TIME = pa.timestamp("ms", tz="UTC")
_SHIFT = 2**63


@dataclass(frozen=True)
class Reading:
    """How cells come.

    Attributes:
        untyped: Whether those without a type become JSON.
        unsafe_unpickle: Whether pickles in these are opened.
        decoder: Finds what reads cells of protobuf or Avro, by the coder's identity.
    """

    untyped: Untyped = "bytes"
    unsafe_unpickle: bool = False
    decoder: Callable[[str], Decoder | None] = lambda coder: None

    @classmethod
    def of(
        cls, untyped: Untyped, unsafe_unpickle: bool = False, schemas: Iterable[Schema] = ()
    ) -> Self:
        """Takes what a caller says.

        Raises:
            ValueError: One of `schemas` is none.
        """
        json = "json" if unsafe_unpickle else untyped
        return cls(json, unsafe_unpickle, decoders(schemas))


def readable_rows(
    rows: pa.Table, manifest: CheckpointManifest, uid: str, reading: Reading
) -> pa.Table:
    """Returns rows of an operator with the times of their windows, if these are intervals.

    Args:
        rows: Some columns of the operator's state.
        manifest: Of the checkpoint that they are from.
        uid: The operator.
        reading: What becomes of cells that have no type of their own.

    Raises:
        InvalidCheckpointError: A value is not of the schema that was given for it.
    """
    spec = manifest.pipeline.operators.get(uid) if manifest.pipeline else None
    if spec is None:
        return rows
    if spec.window_coder == _INTERVALS and "_window" in rows.column_names:
        at = rows.schema.get_field_index("_window")
        for offset, column in enumerate(_times(rows["_window"]), 1):
            rows = rows.add_column(at + offset, WINDOW_TIMES[offset - 1], column)
    for name, cell in spec.cells.items():
        column = cell_column_name(name)
        if column not in rows.column_names:
            continue
        try:
            read = _read(rows[column], cell, reading)
        except ValueError as error:
            raise InvalidCheckpointError(
                f"cell {name!r} of operator {uid!r} in checkpoint {manifest.id} cannot be read by "
                f"the schema that was given for {cell.coder}: {error}. Give the one that it was "
                "written with, or none."
            ) from error
        rows = rows.set_column(rows.schema.get_field_index(column), column, read)
    return rows


# Of Beam's combiners: what the parts of their accumulators are.
_PARTS = {"MeanCombineFn": ("sum", "count")}


def _read(column: pa.ChunkedArray, cell: CellSpec, reading: Reading) -> pa.Array | pa.ChunkedArray:
    decoder = reading.decoder(cell.coder)
    if decoder is not None:
        return decoder.column(column)
    parts = _PARTS.get(cell.combiner, ())
    if reading.untyped == "json" and cell.coder == UNTYPED:
        unsafe = reading.unsafe_unpickle
        return _as_json(column, lambda v: as_json(v, parts=parts, unsafe_unpickle=unsafe))
    if reading.unsafe_unpickle and cell.coder in PICKLING:
        opened = unpickler(cell.coder)
        return _as_json(column, lambda value: json.dumps(opened(value), ensure_ascii=False))
    if parts and pa.types.is_struct(column.type) and column.type.num_fields == len(parts):
        fields = [pa.field(n, f.type) for n, f in zip(parts, column.type, strict=True)]
        pieces = [
            pa.StructArray.from_arrays(
                [piece.field(i) for i in range(len(fields))],
                fields=fields,
                mask=piece.is_null(),
            )
            for piece in column.chunks
        ]
        return pa.chunked_array(pieces, pa.struct(fields))
    return column


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


def _as_json(column: pa.ChunkedArray, text: Callable[[bytes], str]) -> pa.Array | pa.ChunkedArray:
    if pa.types.is_binary(column.type):
        texts = [None if value is None else text(value) for value in column.to_pylist()]
        return pa.array(texts, pa.string())
    if pa.types.is_list(column.type) and pa.types.is_binary(column.type.value_type):
        lists = [
            None if values is None else [text(value) for value in values]
            for values in column.to_pylist()
        ]
        return pa.array(lists, pa.list_(pa.field("element", pa.string())))
    return column
