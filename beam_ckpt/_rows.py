"""Rows of Arrow tables as the commands write them: as JSON, and on a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator

import pyarrow as pa
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from beam_ckpt._terminal import event_time, printable

__all__ = ["as_json", "plain_rows", "plain_value", "shown", "table_of"]

_BYTES_SHOWN = 16
_CHARACTERS_SHOWN = 200
_ITEMS_SHOWN = 20
# Of a cell in all: lists may be in lists.
_SHOWN = 2_000


def plain_rows(table: pa.Table | pa.RecordBatch) -> Iterator[dict[str, object]]:
    """Yields rows of values that JSON has: bytes as ``0x...``, event times as ISO 8601."""
    columns = list(zip(table.schema.names, table.columns, strict=True))
    for i in range(table.num_rows):
        yield {name: plain_value(column[i]) for name, column in columns}


def plain_value(scalar: pa.Scalar) -> object:
    """Returns a value that JSON has."""
    if not scalar.is_valid:
        return None
    kind = scalar.type
    if pa.types.is_struct(kind):
        return {kind.field(i).name: plain_value(scalar[i]) for i in range(kind.num_fields)}
    if pa.types.is_map(kind):
        return [[plain_value(pair[0]), plain_value(pair[1])] for pair in scalar.values]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [plain_value(item) for item in scalar.values]
    if pa.types.is_timestamp(kind):
        return _time(scalar)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "0x" + scalar.as_py().hex()
    if pa.types.is_floating(kind) and not math.isfinite(scalar.as_py()):
        return str(scalar.as_py())
    value = scalar.as_py()
    return value if isinstance(value, str | int | float | bool) else str(value)


def as_json(value: object) -> str:
    """Returns a plain value as JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def shown(value: object) -> Text:
    """Returns a plain value for a table on a terminal, cut short where it is long."""
    if value is None:
        return Text("-", style="dim")
    if isinstance(value, str):
        if value.startswith("0x") and len(value) > 2 + 2 * _BYTES_SHOWN:
            return Text(f"{value[: 2 + 2 * _BYTES_SHOWN]}... ({len(value) // 2 - 1} bytes)")
        if len(value) > _CHARACTERS_SHOWN:
            short = printable(value[:_CHARACTERS_SHOWN])
            return Text(f"{short}... ({len(value)} characters)")
        # What a key or a cell holds must not drive the terminal.
        return Text(printable(value))
    if isinstance(value, list):
        items = [shown(item).plain for item in value[:_ITEMS_SHOWN]]
        more = [f"... ({len(value)} items)"] if len(value) > _ITEMS_SHOWN else []
        return Text(_cut(", ".join(items + more)))
    if isinstance(value, dict):
        parts = (f"{name} {shown(item).plain}" for name, item in value.items() if item is not None)
        return Text(_cut(f"({', '.join(parts)})"))
    return Text(as_json(value))


def table_of(columns: Iterable[str]) -> Table:
    """Returns a table for a terminal, without rows.

    What is too wide for the terminal is folded, not cut short: half a time is none.
    """
    names = (escape(printable(column.removeprefix("_"))) for column in columns)
    return Table(*(Column(name, overflow="fold") for name in names))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _time(scalar: pa.Scalar) -> str | None:
    """An event time; as a number of its unit where microseconds cannot hold it."""
    try:
        return event_time(scalar.cast(pa.timestamp("us", scalar.type.tz)).value)
    except pa.ArrowInvalid:
        return f"{scalar.value} {scalar.type.unit}"
