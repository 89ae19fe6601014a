"""What can be seen of BigQuery without one: its SQL is parsed, and files have types that it knows.

That BigQuery itself reads an export has not been tried; the page says so.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlglot
from apache_beam.coders import BytesCoder, VarIntCoder
from apache_beam.transforms.window import GlobalWindows
from sqlglot import exp

from beam_ckpt.sidecar import encode_sidecar
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.snapshot import APPEND, SnapshotRecord
from tests.documents import ROOT, Page, blocks, run_command
from tests.transforms import test_typed_readers, test_typed_rows

DOCS = ROOT / "docs"
PAGE = DOCS / "reading-state.md"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of somebody who has read the quick start and then exported as the page says."""
    folder = tmp_path_factory.mktemp("bigquery")
    (export,) = (
        line.removeprefix("$ ")
        for block in blocks(PAGE) if block.language == "console"
        for line in block.text.splitlines() if line.startswith("$ beam-ckpt export ckpt totals")
        and "parquet" in line
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        Page(DOCS / "quick-start.md", folder, patch).run()
        patch.chdir(folder)
        status, _, err = run_command(export)
        assert status == 0, err
    return folder


def statements() -> list[exp.Expression]:
    (block,) = (block for block in blocks(PAGE) if "BigQuery" in block.title)
    return [one for one in sqlglot.parse(block.text, read="bigquery") if one is not None]


def test_the_statements_are_sql_of_bigquery_and_name_the_file_that_was_copied() -> None:
    table, query = statements()
    assert isinstance(table, exp.Create)
    assert (table.kind, table.this.sql("bigquery")) == ("TABLE", "dataset.totals")
    assert table.find(exp.ExternalProperty) is not None
    assert "format='parquet'" in table.sql("bigquery").lower()
    options = {
        one.this.name: one.args["value"]
        for one in table.find_all(exp.Property)
        if type(one) is exp.Property
    }
    assert set(options) == {"uris", "enable_list_inference"}
    (copied,) = (
        shlex.split(line)[-1]
        for block in blocks(PAGE) if block.language == "sh"
        for line in block.text.splitlines() if line.startswith("gcloud storage cp totals.parquet ")
    )  # fmt: skip
    assert [uri.name for uri in options["uris"].expressions] == [copied]
    assert isinstance(query, exp.Select)
    assert [one.sql("bigquery") for one in query.find_all(exp.Table)] == ["dataset.totals"]


def test_what_is_no_sql_is_not_taken_for_it() -> None:
    with pytest.raises(sqlglot.ParseError):
        sqlglot.parse("SELECT key, FROM WHERE", read="bigquery")


def test_the_query_gives_what_the_job_had(reader: Path) -> None:
    query = statements()[1]
    connection = duckdb.connect()
    connection.execute("CREATE SCHEMA dataset")
    connection.execute(
        f"CREATE VIEW dataset.totals AS FROM read_parquet('{reader / 'totals.parquet'}')"
    )
    rows = connection.sql(query.sql("duckdb")).fetchall()
    assert rows == [("ada", 12), ("bob", 5), ("eve", 1)]


# By https://cloud.google.com/bigquery/docs/loading-data-cloud-storage-parquet#parquet_conversions
_INTEGERS = {f"Int(bitWidth={bits}, isSigned={sign})" for bits in (8, 16, 32, 64)
             for sign in ("true", "false")}  # fmt: skip
_TIMES = {
    f"Timestamp(isAdjustedToUTC=true, timeUnit={unit}, is_from_converted_type=false, "
    "force_set_converted_type=false)"
    for unit in ("milliseconds", "microseconds")
}
CONVERTED: dict[str, set[str]] = {
    "BOOLEAN": {"None"},
    "INT32": {"None"} | _INTEGERS,
    "INT64": {"None"} | _INTEGERS | _TIMES,
    "FLOAT": {"None"},
    "DOUBLE": {"None"},
    "BYTE_ARRAY": {"None", "String"},
}
CODECS = {"UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD", "LZ4_RAW"}
# By https://cloud.google.com/bigquery/docs/schemas#column_names
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,299}")
TAKEN = ("_table_", "_file_", "_partition", "_row_timestamp", "__root__", "_colidentifier")


def strange_types(file: pq.ParquetFile) -> list[tuple[str, str, str]]:
    found = [
        (column.path, column.physical_type, str(column.logical_type))
        for column in (file.schema.column(i) for i in range(len(file.schema)))
    ]
    return [one for one in found if one[2] not in CONVERTED.get(one[1], set())]


def test_an_export_has_names_types_and_codecs_that_bigquery_knows(reader: Path) -> None:
    file = pq.ParquetFile(reader / "totals.parquet")
    assert strange_types(file) == []
    names = file.schema_arrow.names
    assert {"key", "total", "_updated"} <= set(names)
    assert [name for name in names if not NAME.fullmatch(name)] == []
    assert [name for name in names if name.lower().startswith(TAKEN)] == []
    assert len({name.lower() for name in names}) == len(names)
    codecs = {
        file.metadata.row_group(g).column(c).compression
        for g in range(file.num_row_groups) for c in range(file.metadata.num_columns)
    }  # fmt: skip
    assert codecs <= CODECS
    lists = [c for c in file.schema_arrow if str(c.type).startswith("list")]
    assert lists, "the name of what is in a list is that of the format, for enable_list_inference"
    assert all(column.type.value_field.name == "element" for column in lists)


@pytest.mark.parametrize(
    ("write", "coder"),
    [
        pytest.param(module.write, kind[0], id=f"{module.__name__.rpartition('.')[2]}-{name}")
        for module in (test_typed_readers, test_typed_rows)
        for name, kind in module.KINDS.items()
    ],
)
def test_every_type_of_a_column_is_one_that_bigquery_converts(
    write: Callable[..., Any], coder: Any, tmp_path: Path
) -> None:
    write(tmp_path / "state.parquet", coder, [])
    assert strange_types(pq.ParquetFile(tmp_path / "state.parquet")) == []


def test_a_type_that_it_does_not_convert_is_seen(tmp_path: Path) -> None:
    duckdb.sql(f"COPY (SELECT INTERVAL 1 DAY AS a) TO '{tmp_path / 'a.parquet'}'")
    assert len(strange_types(pq.ParquetFile(tmp_path / "a.parquet"))) == 1


def test_files_of_a_store_differ_in_their_columns_so_that_no_wildcard_spans_them() -> None:
    cells = (CellState("seen", "bag", VarIntCoder()),)
    state = OperatorState("op", BytesCoder(), GlobalWindows().get_window_coder(), cells, False)
    whole = SnapshotRecord(b"a", b"", False, 0, ((b"\x01",),), (), ())
    names = set()
    for kind, record in (("full", whole), ("delta", replace(whole, patch=bytes([APPEND])))):
        header = state.header(key_group=0, boundary=1, kind=kind)
        data = encode_sidecar(state.to_table([record]), header)
        names.add(tuple(pq.read_schema(pa.BufferReader(data)).names))
    assert len(names) == 2
