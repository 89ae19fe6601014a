"""A sidecar of some values, and what pyarrow, pandas, polars and DuckDB say of its columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam import coders

from beam_ckpt.sidecar import decode_sidecar, encode_sidecar
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.snapshot import SnapshotRecord

__all__ = ["tables", "write"]

_DUCKDB = duckdb.connect()
_DUCKDB.execute("SET TimeZone = 'UTC'; SET threads = 1")


def write(path: Path, coder: coders.Coder, values: list[Any]) -> OperatorState:
    """A sidecar with a row for each value, and one with them all in a bag; each comes back."""
    window = coders.coders.GlobalWindowCoder()
    cells = (CellState("one", "read_modify_write", coder), CellState("many", "bag", coder))
    operator = OperatorState("op", coders.BytesCoder(), window, cells, False)
    encoded = [coder.encode(value) for value in values]
    records = [
        SnapshotRecord(b"%04d" % i, b"", False, 0, (value, ()), (), ())
        for i, value in enumerate(encoded)
    ]
    records.append(SnapshotRecord(b"x", b"", False, 0, (None, tuple(encoded)), (), ()))
    header = operator.header(key_group=0, boundary=None, kind="full")
    data = encode_sidecar(operator.to_table(records), header)
    path.write_bytes(data)
    assert list(operator.to_records(decode_sidecar(data, where="a test")[1])) == records
    return operator


def tables(path: Path, column: str) -> dict[str, pa.Table]:
    """What each of the four reads of a column of a file."""
    frame = pd.read_parquet(path, columns=[column], dtype_backend="pyarrow")
    return {
        "pyarrow": pq.read_table(path, columns=[column]),
        "pandas": pa.Table.from_pandas(frame, preserve_index=False),
        "polars": pl.read_parquet(path, columns=[column]).to_arrow(),
        "duckdb": _DUCKDB.sql(f"SELECT {column} FROM read_parquet('{path}')").to_arrow_table(),
    }
