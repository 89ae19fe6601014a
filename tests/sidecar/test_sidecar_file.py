from __future__ import annotations

import io
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from beam_ckpt.errors import (
    CheckpointError,
    CheckpointTooLargeError,
    InvalidCheckpointError,
    UnsupportedFormatError,
)
from beam_ckpt.sidecar import (
    CARRIED,
    TIMERS,
    CellColumn,
    SidecarHeader,
    cell_column_name,
    decode_sidecar,
    encode_sidecar,
    sidecar_schema,
)

NOON = datetime(2013, 6, 1, 12, tzinfo=UTC)
HEADER = SidecarHeader(
    operator="totals",
    key_group=3,
    boundary=1_370_088_000_000_000,
    kind="delta",
    key_coder="StrUtf8Coder",
    window_coder="GlobalWindowCoder",
    cells=(
        CellColumn("count", "count", "read_modify_write", "VarIntCoder"),
        CellColumn("delays", "delays", "bag", "FloatCoder"),
    ),
)
SCHEMA = sidecar_schema(
    pa.string(),
    [("count", pa.int64()), ("delays", pa.list_(pa.field("element", pa.float64())))],
)


def table(keys: int = 3) -> pa.Table:
    timer = {"family": "idle", "tag": "", "domain": "event", "fire": NOON, "output": None}
    output = {"tag": None, "timestamp": NOON, "window": b"", "value": b"v"}
    rows = [
        {
            "key": f"N{i:03d}",
            "count": None if i == 1 else i,
            "delays": None if i == 1 else [1.5] * i,
            "_key": b"N%03d" % i,
            "_window": b"",
            "_deleted": i == 1,
            "_updated": NOON,
            "_timers": [timer] if i == 2 else None,
            "_carried": [output] if i == 2 else None,
        }
        for i in range(keys)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def sealed(parquet: bytes) -> bytes:
    """Seals a file as this library does, whatever is in it."""
    footer_at = len(parquet) - 8 - int.from_bytes(parquet[-8:-4], "little")
    pages, footer = parquet[:footer_at], parquet[footer_at:]
    return pages + b"BCKP\x01" + xxhash.xxh3_64(pages + footer).digest() + footer


def foreign(rows: pa.Table, header: bytes = HEADER.to_json(), **settings: object) -> bytes:
    """A file of the same columns, sealed, but not written by this library."""
    sink = io.BytesIO()
    settings = {"use_dictionary": False, "store_schema": False, **settings}
    with pq.ParquetWriter(sink, rows.schema, **settings) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata({b"beam_ckpt.sidecar": header})
    return sealed(sink.getvalue())


# --- what is written is read ---------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 3, 100])
@pytest.mark.parametrize("row_group_rows", [1, 7, 128 * 1024])
def test_a_sidecar_is_read_as_it_was_written(rows: int, row_group_rows: int) -> None:
    data = encode_sidecar(table(rows), HEADER, row_group_rows=row_group_rows)
    header, found = decode_sidecar(data, where="a test")
    assert header == HEADER
    assert found.schema == SCHEMA
    assert found.equals(table(rows))


def test_the_same_rows_give_the_same_bytes() -> None:
    assert encode_sidecar(table(), HEADER) == encode_sidecar(table(), HEADER)


def test_row_groups_have_the_size_asked_for() -> None:
    data = encode_sidecar(table(10), HEADER, row_group_rows=4)
    metadata = pq.read_metadata(pa.BufferReader(data))
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [4, 4, 2]
    keys = metadata.row_group(1).column(3)
    assert keys.path_in_schema == "_key"
    assert (keys.statistics.min, keys.statistics.max) == (b"N004", b"N007")


def test_pages_are_compressed_and_have_checksums() -> None:
    data = encode_sidecar(table(1000), HEADER)
    chunk = pq.read_metadata(pa.BufferReader(data)).row_group(0).column(0)
    assert chunk.compression == "ZSTD"
    broken = bytearray(data)
    broken[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 1
    with pytest.raises(OSError, match="CRC checksum verification failed"):
        pq.read_table(pa.BufferReader(bytes(broken)), page_checksum_verification=True)
    with pytest.raises(InvalidCheckpointError, match="CRC checksum verification failed"):
        decode_sidecar(sealed(_unsealed(bytes(broken))), where="a test")


def _unsealed(data: bytes) -> bytes:
    footer_at = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    return data[: footer_at - 13] + data[footer_at:]


def test_a_small_delta_is_a_small_file() -> None:
    assert len(encode_sidecar(table(1), HEADER)) < 4_000


# --- other tools read it -------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "sidecar.parquet"
    path.write_bytes(encode_sidecar(table(), HEADER))
    return path


def test_duckdb_reads_typed_columns(path: Path) -> None:
    rows = duckdb.sql(f"SELECT * FROM '{path}'")
    types = {n: str(t).replace('"', "") for n, t in zip(rows.columns, rows.types, strict=True)}
    time = "TIMESTAMP WITH TIME ZONE"
    assert types == {
        "key": "VARCHAR",
        "count": "BIGINT",
        "delays": "DOUBLE[]",
        "_key": "BLOB",
        "_window": "BLOB",
        "_deleted": "BOOLEAN",
        "_updated": time,
        "_timers": "STRUCT(family VARCHAR, tag VARCHAR, domain VARCHAR, "
        f"fire {time}, output {time})[]",
        "_carried": f"STRUCT(tag VARCHAR, timestamp {time}, window BLOB, value BLOB)[]",
    }
    query = f"SELECT key, count, list_sum(delays) FROM '{path}' WHERE NOT _deleted ORDER BY key"
    assert duckdb.sql(query).fetchall() == [("N000", 0, None), ("N002", 2, 3.0)]
    waiting = f"SELECT key, epoch_us(_timers[1].fire) FROM '{path}' WHERE len(_timers) > 0"
    assert duckdb.sql(waiting).fetchall() == [("N002", 1_370_088_000_000_000)]
    kept = f"SELECT decode(value) FROM parquet_kv_metadata('{path}')"
    assert SidecarHeader.from_json(duckdb.sql(kept).fetchall()[0][0].encode(), where="x") == HEADER


def test_pandas_reads_typed_columns(path: Path) -> None:
    frame = pd.read_parquet(path, dtype_backend="pyarrow")
    assert {name: str(frame[name].dtype) for name in ("key", "count", "delays", "_updated")} == {
        "key": "string[pyarrow]",
        "count": "int64[pyarrow]",
        "delays": "list<element: double>[pyarrow]",
        "_updated": "timestamp[us, tz=UTC][pyarrow]",
    }
    assert frame["key"].tolist() == ["N000", "N001", "N002"]
    assert frame["count"].sum() == 2
    assert frame["_updated"][0] == pd.Timestamp(NOON)
    plain = pd.read_parquet(path)
    assert plain["delays"][2].tolist() == [1.5, 1.5]
    assert math.isnan(plain["count"][1])


# --- damage --------------------------------------------------------------------------------------


def test_every_flipped_bit_is_found() -> None:
    data = encode_sidecar(table(), HEADER)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(InvalidCheckpointError, match=r"^state/x\.parquet cannot be read"):
            decode_sidecar(bytes(changed), where="state/x.parquet")


def test_every_truncation_is_found() -> None:
    data = encode_sidecar(table(), HEADER)
    for size in range(len(data)):
        with pytest.raises(InvalidCheckpointError, match="cannot be read"):
            decode_sidecar(data[:size], where="state/x.parquet")
        with pytest.raises(InvalidCheckpointError):
            decode_sidecar(data[len(data) - size :], where="state/x.parquet")


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1PAR1", b"PAR1" + b"\xff" * 40 + b"PAR1"])
def test_bytes_that_are_no_parquet_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidCheckpointError, match="a test cannot be read"):
        decode_sidecar(data, where="a test")


def test_bytes_after_a_sidecar_are_found() -> None:
    with pytest.raises(InvalidCheckpointError):
        decode_sidecar(encode_sidecar(table(), HEADER) + b"PAR1", where="a test")


def test_parquet_of_somebody_else_is_refused() -> None:
    sink = io.BytesIO()
    pq.write_table(table(), sink)
    with pytest.raises(InvalidCheckpointError, match="no seal of this library"):
        decode_sidecar(sink.getvalue(), where="a test")
    with pytest.raises(InvalidCheckpointError, match="it has no header"):
        decode_sidecar(sealed(sink.getvalue()), where="a test")


def _damaged() -> Iterator[bytes]:
    """Files with a few bytes changed, sealed as if they were whole."""
    whole = _unsealed(encode_sidecar(table(), HEADER))
    chance = random.Random(11)
    for _ in range(1500):
        changed = bytearray(whole)
        for _ in range(chance.choice((1, 1, 1, 3))):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        yield sealed(bytes(changed))


def test_damage_under_a_good_seal_is_refused_or_is_a_sidecar() -> None:
    refused = 0
    for data in _damaged():
        try:
            _, found = decode_sidecar(data, where="a test", max_decoded_bytes=2**20)
        except CheckpointError as error:
            assert isinstance(error, InvalidCheckpointError | CheckpointTooLargeError)
            refused += 1
        else:
            assert found.schema.names[-6:] == SCHEMA.names[-6:]
    assert refused > 500


# --- lies ----------------------------------------------------------------------------------------


def test_a_dictionary_that_unfolds_to_a_giant_is_refused_before_it_does() -> None:
    rows = 20_000
    header = replace(HEADER, cells=()).to_json()
    data = foreign(_bomb(rows), header, use_dictionary=["key"], compression="zstd")
    assert len(data) < 500_000
    before = pa.total_allocated_bytes()
    peak = pa.default_memory_pool().max_memory()
    with pytest.raises(InvalidCheckpointError, match="column key has a dictionary"):
        decode_sidecar(data, where="a test")
    assert pa.total_allocated_bytes() - before < 10_000_000
    assert pa.default_memory_pool().max_memory() - peak < 10_000_000


def _bomb(rows: int) -> pa.Table:
    schema = sidecar_schema(pa.string(), [])
    giant = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * 2**20])
    columns = [
        giant,
        pa.array([b"%06d" % i for i in range(rows)]),
        pa.array([b""] * rows),
        pa.array([False] * rows),
        pa.array([0] * rows, schema.field("_updated").type),
        pa.nulls(rows, TIMERS),
        pa.nulls(rows, CARRIED),
    ]
    fields = [schema.field(i) for i in range(len(columns))]
    fields[0] = pa.field("key", giant.type)
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def test_more_rows_than_its_keys_can_be_are_refused() -> None:
    rows = table(0)
    nulls = pa.table({name: pa.nulls(2_000_000, SCHEMA.field(name).type) for name in SCHEMA.names})
    assert rows.schema == SCHEMA
    data = foreign(nulls, compression="zstd")
    with pytest.raises(InvalidCheckpointError, match="column _key of a test is"):
        decode_sidecar(data, where="a test")


def test_a_sidecar_over_the_limit_is_neither_written_nor_read() -> None:
    rows = table(5000)
    with pytest.raises(CheckpointTooLargeError, match="the limit is 1000"):
        encode_sidecar(rows, HEADER, max_decoded_bytes=1000)
    data = encode_sidecar(rows, HEADER)
    with pytest.raises(CheckpointTooLargeError, match="a test has 5000 rows that can take"):
        decode_sidecar(data, where="a test", max_decoded_bytes=1000)


def test_what_fits_the_limit_when_written_fits_it_when_read() -> None:
    rows = table(200)
    limit = rows.nbytes
    while True:
        try:
            data = encode_sidecar(rows, HEADER, max_decoded_bytes=limit)
        except CheckpointTooLargeError:
            limit += limit // 100
        else:
            break
    assert limit < 3 * rows.nbytes
    assert decode_sidecar(data, where="a test", max_decoded_bytes=limit)[1].equals(rows)


def test_a_sidecar_of_a_later_format_is_named() -> None:
    data = foreign(table(), replace(HEADER, format_version=9).to_json())
    with pytest.raises(UnsupportedFormatError, match="a test has sidecar format 9"):
        decode_sidecar(data, where="a test")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        HEADER.to_json()[:-1],
        HEADER.to_json().replace(b'"key_group":3', b'"key_group":"3"'),
        HEADER.to_json().replace(b'"key_group":3', b'"key_group":-3'),
        HEADER.to_json().replace(b'"key_group":3', b'"key_group":true'),
        HEADER.to_json().replace(b'"kind":"delta"', b'"kind":"other"'),
        HEADER.to_json().replace(b'"name":"delays"', b'"name":"count"'),
        HEADER.to_json().replace(b'"column":"delays"', b'"column":"count"'),
        HEADER.to_json().replace(b'"operator":"totals"', b'"operator":null'),
        HEADER.to_json() + b" " * 2**23,
    ],
)
def test_a_malformed_header_is_refused(header: bytes) -> None:
    with pytest.raises(InvalidCheckpointError, match="the header of a test is malformed"):
        decode_sidecar(foreign(table(), header), where="a test")


@pytest.mark.parametrize("column", ["count", "_key", "_updated"])
def test_a_file_without_one_of_its_columns_is_refused(column: str) -> None:
    with pytest.raises(InvalidCheckpointError, match="its header speaks of"):
        decode_sidecar(foreign(table().drop_columns([column])), where="a test")


@pytest.mark.parametrize("column", ["_timers", "_carried"])
def test_a_file_of_an_older_format_without_one_of_its_columns_is_refused(column: str) -> None:
    header = replace(HEADER, format_version=2).to_json()
    with pytest.raises(InvalidCheckpointError, match="its header speaks of"):
        decode_sidecar(foreign(table().drop_columns([column]), header), where="a test")


def names_in(data: bytes) -> list[str]:
    return pq.read_schema(pa.BufferReader(data)).names


@pytest.mark.parametrize("left_out", [(), ("_timers",), ("_carried",), ("_timers", "_carried")])
def test_columns_of_what_no_row_has_are_left_out(left_out: tuple[str, ...]) -> None:
    rows = table()
    for name in left_out:
        at, field = rows.schema.get_field_index(name), rows.schema.field(name)
        rows = rows.set_column(at, field, pa.nulls(len(rows), field.type))
    data = encode_sidecar(rows, HEADER)
    assert names_in(data) == [name for name in rows.column_names if name not in left_out]
    assert decode_sidecar(data, where="a test")[1].equals(rows)
    some = decode_sidecar(data, where="a test", columns=["_carried", "count"])[1]
    assert some.equals(rows.select(["count", "_key", "_window", "_deleted", "_carried"]))
    key = rows["_key"][0].as_py()
    assert decode_sidecar(data, where="a test", key=key)[1].equals(rows.slice(0, 1))
    # With more row groups they weigh little, and what a later one has is not known.
    paged = encode_sidecar(rows, HEADER, row_group_rows=1)
    assert names_in(paged) == rows.column_names
    assert decode_sidecar(paged, where="a test")[1].equals(rows)
    old = replace(HEADER, format_version=2)
    assert names_in(encode_sidecar(rows, old)) == rows.column_names


def test_a_file_of_few_rows_without_timers_is_smaller() -> None:
    rows = table()
    for name in ("_timers", "_carried"):
        at, field = rows.schema.get_field_index(name), rows.schema.field(name)
        rows = rows.set_column(at, field, pa.nulls(len(rows), field.type))
    old = encode_sidecar(rows, replace(HEADER, format_version=2))
    assert len(encode_sidecar(rows, HEADER)) < len(old) - 900


def test_columns_that_are_left_out_count_in_the_limit() -> None:
    """A null in a list takes an offset of four bytes in memory, and none in the file."""
    rows = table()
    keys = pa.array([b"%06d" % i for i in range(50_000)])
    columns = {"_key": keys, "_window": pa.array([b""] * len(keys))}
    columns["_deleted"] = pa.array([False] * len(keys))
    columns["_updated"] = pa.array([0] * len(keys), rows.schema.field("_updated").type)
    arrays = [columns.get(field.name, pa.nulls(len(keys), field.type)) for field in rows.schema]
    many = pa.Table.from_arrays(arrays, schema=rows.schema)
    data = encode_sidecar(many, HEADER)
    assert "_timers" not in names_in(data)
    needs = decode_sidecar(data, where="a test")[1].nbytes
    with pytest.raises(CheckpointTooLargeError):
        decode_sidecar(data, where="a test", max_decoded_bytes=needs - 1)


def test_a_file_whose_columns_of_ours_have_other_types_is_refused() -> None:
    rows = table()
    at = rows.schema.get_field_index("_deleted")
    wrong = rows.set_column(at, pa.field("_deleted", pa.int64(), nullable=False), [[0, 1, 0]])
    with pytest.raises(InvalidCheckpointError, match="column _deleted of a test is"):
        decode_sidecar(foreign(wrong), where="a test")
    with pytest.raises(InvalidCheckpointError, match="column _deleted of the table"):
        encode_sidecar(wrong, HEADER)


@pytest.mark.parametrize("order", [[1, 0, 2], [0, 0, 1], [2, 1, 0]])
def test_rows_out_of_order_or_twice_are_refused(order: list[int]) -> None:
    with pytest.raises(InvalidCheckpointError, match="not in order"):
        decode_sidecar(foreign(table().take(order)), where="a test")


def test_text_that_is_not_utf8_is_refused() -> None:
    rows = table()
    text = pa.array([b"\xff", b"b", b"c"]).view(pa.string())
    wrong = rows.set_column(0, "key", text)
    with pytest.raises(InvalidCheckpointError, match="UTF8"):
        decode_sidecar(foreign(wrong), where="a test")


# --- names ---------------------------------------------------------------------------------------


def test_no_two_cells_share_a_column_and_none_has_one_of_ours() -> None:
    names = ["key", "Key", "_key", "_KEY", "cell:key", "cell:cell:key", "", "count", "cell", "_"]
    columns = [cell_column_name(name) for name in names]
    assert len({*columns, *SCHEMA.names}) == len(names) + len(SCHEMA.names) - 1  # count is both


def test_a_key_is_read_from_the_row_groups_that_can_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = table(40)
    data = encode_sidecar(rows, HEADER, row_group_rows=10)
    read: list[list[int]] = []
    real = pq.ParquetFile.read_row_groups

    def noting(self: pq.ParquetFile, groups: list[int], **settings: object) -> pa.Table:
        read.append(list(groups))
        return real(self, groups, **settings)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", noting)
    _, found = decode_sidecar(data, where="memory", key=b"N023")
    assert found.equals(rows.slice(23, 1))
    for absent in (b"N0235", b"A", b"Z"):
        _, found = decode_sidecar(data, where="memory", key=absent)
        assert (len(found), found.schema) == (0, rows.schema)
    assert read == [[2], [2], [], []]


def test_only_the_columns_asked_for_are_read() -> None:
    rows = table(5)
    data = encode_sidecar(rows, HEADER)
    _, found = decode_sidecar(data, where="memory", columns=["key", "count", "not there"])
    assert found.column_names == ["key", "count", "_key", "_window", "_deleted"]
    assert found.equals(rows.select(found.column_names))


def test_a_cell_whose_name_has_a_dot_is_not_taken_for_a_part_of_another() -> None:
    names = ("a", "a.b")
    cells = tuple(CellColumn(name, name, "read_modify_write", "VarIntCoder") for name in names)
    schema = sidecar_schema(pa.string(), [(name, pa.int64()) for name in names])
    row = {"key": "k", "a": 1, "a.b": 2, "_key": b"k", "_window": b"", "_deleted": False}
    rows = pa.Table.from_pylist([row | {"_updated": NOON}], schema=schema)
    data = encode_sidecar(rows, replace(HEADER, cells=cells))
    for name, value in (("a", 1), ("a.b", 2)):
        _, found = decode_sidecar(data, where="memory", columns=[name])
        assert found.column_names == [name, "_key", "_window", "_deleted"]
        assert found[name].to_pylist() == [value]
