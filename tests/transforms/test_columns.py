# No postponed annotations here: Beam does not resolve them for the fields of rows.
import pickle
import struct
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Literal, NamedTuple, Optional

import apache_beam as beam
import duckdb
import pandas as pd
import pyarrow as pa
import pytest
from apache_beam import coders
from apache_beam.coders import row_coder
from apache_beam.coders.coders import (
    BigEndianShortCoder,
    ByteCoder,
    Coder,
    DeterministicMapCoder,
    GlobalWindowCoder,
    IntervalWindowCoder,
    ListCoder,
    SinglePrecisionFloatCoder,
    TupleSequenceCoder,
    VarInt32Coder,
)
from apache_beam.portability.api import schema_pb2
from apache_beam.typehints.row_type import RowTypeConstraint
from apache_beam.utils.timestamp import MAX_TIMESTAMP, MIN_TIMESTAMP, Timestamp
from hypothesis import example, given, settings
from hypothesis import strategies as st

from beam_ckpt.errors import InvalidCheckpointError, PipelineRefusedError
from beam_ckpt.sidecar import decode_sidecar, encode_sidecar
from beam_ckpt.transforms.columns import CellState, OperatorState, coder_identity
from beam_ckpt.transforms.snapshot import (
    APPEND,
    KEEP,
    REPLACE,
    CarriedOutput,
    SavedTimer,
    SnapshotRecord,
)


class Flight(NamedTuple):
    tail: str
    delay: Optional[int]  # Beam takes int | None for Any
    legs: Sequence[float]


coders.registry.register_coder(Flight, coders.RowCoder)
FLIGHT = coders.RowCoder.from_type_hint(Flight, coders.registry)

STR, INT, BYTES = coders.StrUtf8Coder(), coders.VarIntCoder(), coders.BytesCoder()
FLOAT, BOOL = coders.FloatCoder(), coders.BooleanCoder()
ANY = coders.FastPrimitivesCoder()
LIST = coders.IterableCoder


class LoudStr(coders.StrUtf8Coder):
    """A subclass may write anything."""

    def encode(self, value: str) -> bytes:
        return value.upper().encode()


def _list_type(item: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", item))


TYPES = {
    "str": (STR, pa.string()),
    "bytes": (BYTES, pa.binary()),
    "int": (INT, pa.int64()),
    "int32": (VarInt32Coder(), pa.int32()),
    "int16": (BigEndianShortCoder(), pa.int16()),
    "byte": (ByteCoder(), pa.uint8()),
    "float": (FLOAT, pa.float64()),
    "float32": (SinglePrecisionFloatCoder(), pa.float32()),
    "bool": (BOOL, pa.bool_()),
    "decimal": (coders.DecimalCoder(), pa.string()),
    "timestamp": (coders.TimestampCoder(), pa.timestamp("ms", "UTC")),
    "tuple": (coders.TupleCoder([STR, INT]), pa.struct({"f0": pa.string(), "f1": pa.int64()})),
    "tuple with an unknown end": (
        coders.TupleCoder([STR, ANY]),
        pa.struct({"f0": pa.string(), "f1": pa.binary()}),
    ),
    "row": (
        FLIGHT,
        pa.struct({"tail": pa.string(), "delay": pa.int64(), "legs": _list_type(pa.float64())}),
    ),
    "list": (ListCoder(STR), _list_type(pa.string())),
    "iterable": (LIST(FLOAT), _list_type(pa.float64())),
    "tuple of any length": (TupleSequenceCoder(INT), _list_type(pa.int64())),
    "map": (coders.MapCoder(STR, INT), pa.map_(pa.string(), pa.int64())),
    "sorted map": (DeterministicMapCoder(STR, INT), pa.map_(pa.string(), pa.int64())),
    # null is an empty cell, so None of a coder that knows None needs a place of its own
    "nullable": (coders.NullableCoder(STR), pa.struct({"value": pa.string()})),
    "anything": (ANY, pa.binary()),
    "pickle": (coders.PickleCoder(), pa.binary()),
    "subclass of a typed coder": (LoudStr(), pa.binary()),
    "tuple with an unknown start": (coders.TupleCoder([ANY, STR]), pa.binary()),
    "list of unknown": (ListCoder(ANY), pa.binary()),
    "no fields": (coders.TupleCoder([]), pa.binary()),
    "nullable of nullable": (coders.NullableCoder(coders.NullableCoder(INT)), pa.binary()),
    "map of nullable keys": (coders.MapCoder(coders.NullableCoder(STR), INT), pa.binary()),
    "map of float keys": (coders.MapCoder(FLOAT, INT), pa.binary()),
}


def operator(coder: Coder, key: Coder = BYTES) -> OperatorState:
    """An operator with a cell of one value and one of many."""
    cells = (CellState("one", "read_modify_write", coder), CellState("many", "bag", coder))
    return OperatorState("op", key, GlobalWindowCoder(), cells, False)


def through_a_file(state: OperatorState, records: Sequence[SnapshotRecord]) -> pa.Table:
    header = state.header(key_group=0, boundary=None, kind="full")
    return decode_sidecar(encode_sidecar(state.to_table(records), header), where="a test")[1]


def records_of(values: Sequence[bytes]) -> list[SnapshotRecord]:
    """Rows that hold each value alone, all of them in one bag, and none."""
    found = [
        SnapshotRecord(b"%06d" % i, b"", False, i, (value, ()), (), ())
        for i, value in enumerate(values)
    ]
    end = SnapshotRecord(b"x", b"", False, 0, (None, tuple(values)), (), ())
    return [*found, end, SnapshotRecord(b"y", b"", True, 0, (None, ()), (), ())]


def assert_comes_back(coder: Coder, values: Sequence[bytes]) -> None:
    state = operator(coder)
    records = records_of(values)
    assert list(state.to_records(through_a_file(state, records))) == records


@pytest.mark.parametrize("name", TYPES)
def test_a_coder_has_its_type_in_columns(name: str) -> None:
    coder, expected = TYPES[name]
    schema = operator(coder).schema
    assert schema.field("one").type == expected
    item = expected.field(0).type if name == "nullable" else expected
    assert schema.field("many").type == _list_type(item)
    assert operator(INT, key=coder).schema.field("key").type == item


# --- every value comes back as the bytes it was --------------------------------------------------


def _of(coder: Coder, values: st.SearchStrategy[object]) -> tuple[Coder, object]:
    return coder, values.map(coder.encode)


def _float_bits(form: str) -> st.SearchStrategy[object]:
    """All floats there are: infinities, negative zeros, NaNs with any payload."""
    size = struct.calcsize(form)
    return st.binary(min_size=size, max_size=size).map(lambda b: struct.unpack(form, b)[0])


_int64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-200, 200)
_micros = st.integers(MIN_TIMESTAMP.micros, MAX_TIMESTAMP.micros)
_leaves: list[tuple[Coder, st.SearchStrategy[object]]] = [
    (STR, st.text(max_size=30) | st.text(min_size=120, max_size=140)),
    (BYTES, st.binary(max_size=20) | st.binary(min_size=120, max_size=140)),
    (INT, _int64),
    (VarInt32Coder(), st.integers(-(2**31), 2**31 - 1)),
    (BigEndianShortCoder(), st.integers(-(2**15), 2**15 - 1)),
    (ByteCoder(), st.integers(0, 255)),
    (FLOAT, _float_bits(">d")),
    (SinglePrecisionFloatCoder(), st.floats(width=32)),
    (BOOL, st.booleans()),
    (coders.TimestampCoder(), _micros.map(lambda m: Timestamp(micros=m))),
    (coders.DecimalCoder(), st.decimals(allow_nan=False, allow_infinity=False)),
]
_NO_KEYS = (type(FLOAT), SinglePrecisionFloatCoder, coders.DecimalCoder)
_hashable = [leaf for leaf in _leaves if type(leaf[0]) not in _NO_KEYS]
_unknown: list[tuple[Coder, st.SearchStrategy[object]]] = [
    (ANY, st.none() | st.integers(0, 9) | st.text() | st.lists(st.booleans())),
    (coders.PickleCoder(), st.dictionaries(st.text(), st.complex_numbers(allow_nan=False))),
]
Kind = tuple[Coder, st.SearchStrategy[object]]


def _wider(inner: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
    def tuple_of(parts: list[Kind]) -> Kind:
        return coders.TupleCoder([c for c, _ in parts]), st.tuples(*[v for _, v in parts])

    def list_of(part: Kind) -> Kind:
        return ListCoder(part[0]), st.lists(part[1], max_size=4)

    def sequence_of(part: Kind) -> Kind:
        return TupleSequenceCoder(part[0]), st.lists(part[1], max_size=4).map(tuple)

    def nullable(part: Kind) -> Kind:
        return coders.NullableCoder(part[0]), st.none() | part[1]

    def map_of(parts: tuple[Kind, Kind]) -> Kind:
        (key, keys), (value, values) = parts
        return coders.MapCoder(key, value), st.dictionaries(keys, values, max_size=4)

    return (
        st.lists(inner, min_size=1, max_size=4).map(tuple_of)
        | inner.map(list_of)
        | inner.map(sequence_of)
        | inner.map(nullable)
        | st.tuples(st.sampled_from(_hashable), inner).map(map_of)
    )


kinds = st.recursive(
    st.sampled_from([*_leaves, *_unknown]) | st.sampled_from(_leaves), _wider, max_leaves=6
)


@given(st.data())
def test_values_of_any_coder_come_back_byte_for_byte(data: st.DataObject) -> None:
    coder, values = data.draw(kinds)
    encoded = [coder.encode(value) for value in data.draw(st.lists(values, max_size=12))]
    assert_comes_back(coder, encoded)


@pytest.mark.parametrize("kind", _leaves, ids=lambda kind: type(kind[0]).__name__)
@given(data=st.data())
def test_values_of_each_simple_coder_come_back_byte_for_byte(
    kind: Kind, data: st.DataObject
) -> None:
    coder, values = kind
    state = operator(coder)
    records = records_of([coder.encode(v) for v in data.draw(st.lists(values, max_size=40))])
    assert list(state.to_records(state.to_table(records))) == records


# ruff: noqa: UP045
_field_types: list[tuple[object, st.SearchStrategy[object]]] = [
    (str, st.text(max_size=10)),
    (int, _int64),
    (float, _float_bits(">d")),
    (bool, st.booleans()),
    (bytes, st.binary(max_size=10)),
    (Optional[str], st.none() | st.text(max_size=10)),
    (Optional[int], st.none() | _int64),
    (Sequence[int], st.lists(_int64, max_size=3)),
    (Sequence[Optional[str]], st.lists(st.none() | st.text(max_size=3), max_size=3)),
    (dict[str, int], st.dictionaries(st.text(max_size=3), _int64, max_size=3)),
    (
        Flight,
        st.builds(Flight, st.text(max_size=5), st.none() | _int64, st.lists(_float_bits(">d"))),
    ),
]


@settings(max_examples=50)
@given(st.data())
def test_rows_of_any_fields_come_back_byte_for_byte(data: st.DataObject) -> None:
    # up to 20, so that the mask of null fields has more than one byte
    fields = data.draw(st.lists(st.sampled_from(_field_types), min_size=1, max_size=20))
    names = [f"a{i}" for i in range(len(fields))]
    row_type = RowTypeConstraint.from_fields(
        [(n, t) for n, (t, _) in zip(names, fields, strict=True)]
    )
    coder = coders.RowCoder.from_type_hint(row_type, coders.registry)
    assert pa.types.is_struct(operator(coder).schema.field("one").type)
    rows = st.tuples(*[values for _, values in fields])
    drawn = data.draw(st.lists(rows, max_size=6))
    encoded = [coder.encode(beam.Row(**dict(zip(names, row, strict=True)))) for row in drawn]
    assert_comes_back(coder, encoded)
    assert_comes_back(
        LIST(coders.TupleCoder([coder, STR])),
        [LIST(coders.TupleCoder([coder, STR])).encode([(coder.decode(e), "x") for e in encoded])],
    )


@pytest.mark.parametrize(
    "bits",
    ["7ff8000000000001", "fff8dead00000000", "7ff0000000000001", "8000000000000000",
     "7ff0000000000000", "0000000000000001", "ffffffffffffffff"],
)  # fmt: skip
def test_floats_keep_their_bits(bits: str) -> None:
    assert_comes_back(FLOAT, [bytes.fromhex(bits), bytes(8), bytes.fromhex(bits)])


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, -1, 0, 127, 128, 2**56 - 1, 2**56])
def test_integers_at_the_edges_come_back(value: int) -> None:
    table = through_a_file(operator(INT), records_of([INT.encode(value)]))
    assert table["one"][0].as_py() == value
    assert_comes_back(INT, [INT.encode(value)])


def test_times_at_the_edges_of_beam_and_of_the_encoding_come_back() -> None:
    edges = [MIN_TIMESTAMP, MAX_TIMESTAMP, Timestamp(0), Timestamp(micros=-1)]
    coder = coders.TimestampCoder()
    assert_comes_back(coder, [*map(coder.encode, edges), bytes(8), b"\xff" * 8])


@pytest.mark.parametrize(
    "text",
    ["0", "0.00", "0E+3", "-1", "127", "128", "-128", "-129", "1E+20", "-9.90", "1E-30",
     "12345678901234567890.12345678", "9" * 28, "1E+400000"],
)  # fmt: skip
def test_decimals_are_text_with_all_their_places(text: str) -> None:
    coder = coders.DecimalCoder()
    encoded = coder.encode(Decimal(text))
    assert coder.decode(encoded) == Decimal(text)
    table = through_a_file(operator(coder), records_of([encoded]))
    assert table["one"][0].as_py() == text
    assert_comes_back(coder, [encoded])


def test_none_an_empty_value_and_an_empty_cell_are_three_things() -> None:
    coder = coders.NullableCoder(STR)
    state = operator(coder)
    records = records_of([coder.encode(None), coder.encode("")])
    table = through_a_file(state, records)
    assert table["one"].to_pylist() == [{"value": None}, {"value": ""}, None, None]
    assert table["many"].to_pylist() == [None, None, [None, ""], None]
    assert list(state.to_records(table)) == records


def test_an_empty_list_and_an_empty_cell_are_two_things() -> None:
    coder = ListCoder(INT)
    table = through_a_file(operator(coder), records_of([coder.encode([])]))
    assert table["one"].to_pylist() == [[], None, None]


def test_an_iterable_of_unknown_length_comes_back_as_beam_would_encode_it_again() -> None:
    coder = LIST(STR)
    values = ["", "a", "b" * 200] * 400
    unknown = coder.encode(iter(values))
    known = coder.encode(values)
    assert unknown != known
    state = operator(coder)
    [first, *_] = state.to_records(state.to_table(records_of([unknown, known])))
    assert first.cells[0] == known
    nested = coders.TupleCoder([coder, INT])
    [first, *_] = operator(nested).to_records(
        operator(nested).to_table(records_of([unknown + b"\x05"]))
    )
    assert first.cells[0] == nested.encode((values, 5))


def test_text_in_columns_is_text_and_a_lone_surrogate_is_refused_by_the_coder_as_in_beam() -> None:
    table = through_a_file(operator(STR), records_of([STR.encode("\u0000é🚕")]))
    assert table["one"][0].as_py() == "\u0000é🚕"
    with pytest.raises(UnicodeEncodeError):
        STR.encode("\ud800")


def test_duckdb_and_pandas_read_keys_and_cells_of_every_kind(tmp_path: Path) -> None:
    at = Timestamp(1_370_088_000)
    values: dict[str, tuple[Coder, object, str, object]] = {
        "text": (STR, "é", "VARCHAR", "é"),
        "number": (INT, -(2**63), "BIGINT", -(2**63)),
        "small": (VarInt32Coder(), 7, "INTEGER", 7),
        "ratio": (FLOAT, 1.5, "DOUBLE", 1.5),
        "price": (coders.DecimalCoder(), Decimal("9.90"), "VARCHAR", "9.90"),
        "flag": (BOOL, True, "BOOLEAN", True),
        "raw": (BYTES, b"\0", "BLOB", b"\0"),
        "at": (coders.TimestampCoder(), at, "TIMESTAMP WITH TIME ZONE", at.to_utc_datetime()),
        "first": (coders.TimestampCoder(), MIN_TIMESTAMP, "TIMESTAMP WITH TIME ZONE", None),
        "pair": (
            coders.TupleCoder([STR, INT]),
            ("a", 1),
            "STRUCT(f0 VARCHAR, f1 BIGINT)",
            {"f0": "a", "f1": 1},
        ),
        "flight": (
            FLIGHT,
            Flight("N1", None, [0.5]),
            "STRUCT(tail VARCHAR, delay BIGINT, legs DOUBLE[])",
            {"tail": "N1", "delay": None, "legs": [0.5]},
        ),
        "list": (ListCoder(STR), ["a", ""], "VARCHAR[]", ["a", ""]),
        "map": (coders.MapCoder(STR, INT), {"a": 1}, "MAP(VARCHAR, BIGINT)", {"a": 1}),
        "maybe": (coders.NullableCoder(STR), None, "STRUCT(value VARCHAR)", {"value": None}),
        "any": (ANY, 5, "BLOB", ANY.encode(5)),
    }
    state = OperatorState(
        "op",
        coders.TupleCoder([STR, INT]),
        GlobalWindowCoder(),
        (
            *(CellState(n, "read_modify_write", c) for n, (c, *_) in values.items()),
            CellState("bag", "bag", INT),
        ),
        False,
    )
    cells = (*(coder.encode(value) for coder, value, *_ in values.values()), (b"\x01", b"\x02"))
    key = coders.TupleCoder([STR, INT]).encode(("k", 3))
    record = SnapshotRecord(key, b"", False, at.micros, cells, (), ())
    path = tmp_path / "sidecar.parquet"
    header = state.header(key_group=0, boundary=None, kind="full")
    path.write_bytes(encode_sidecar(state.to_table([record]), header))

    rows = duckdb.sql(f"SELECT * FROM '{path}'")
    types = {n: str(t).replace('"', "") for n, t in zip(rows.columns, rows.types, strict=True)}
    [row] = rows.fetchall()
    found = dict(zip(rows.columns, row, strict=True))
    assert (types["key"], found["key"]) == (
        "STRUCT(f0 VARCHAR, f1 BIGINT)",
        {"f0": "k", "f1": 3},
    )
    assert (types["bag"], found["bag"]) == ("BIGINT[]", [1, 2])
    for name, (_, _, type_, expected) in values.items():
        assert types[name] == type_
        if isinstance(expected, datetime):
            found[name] = found[name].astimezone(UTC).replace(tzinfo=None)
        if name != "first":  # earlier than Python's datetime can be
            assert found[name] == expected
    [(first,)] = duckdb.sql(f"SELECT epoch_ms(first) FROM '{path}'").fetchall()
    assert first == MIN_TIMESTAMP.micros // 1000

    frame = pd.read_parquet(path, columns=["key", "text", "number", "at", "pair", "list", "bag"])
    assert frame["key"][0] == {"f0": "k", "f1": 3}
    assert (frame["text"][0], frame["number"][0]) == ("é", -(2**63))
    assert str(frame["at"].dtype) == "datetime64[ms, UTC]"
    assert frame["at"][0] == pd.Timestamp(at.to_utc_datetime(), tz="UTC")
    assert (list(frame["list"][0]), list(frame["bag"][0])) == (["a", ""], [1, 2])


# --- bytes that are not the coder's --------------------------------------------------------------


@pytest.mark.parametrize(
    ("coder", "value"),
    [
        (STR, b"\xff"),
        (STR, b"\xed\xa0\x80"),
        (INT, b""),
        (INT, b"\x80"),
        (INT, b"\x80\x00"),
        (INT, b"\x01\x01"),
        (INT, b"\xff" * 9 + b"\x02"),
        (INT, b"\xff" * 10 + b"\x01"),
        (VarInt32Coder(), INT.encode(2**32)),
        (FLOAT, bytes(7)),
        (FLOAT, bytes(9)),
        (BOOL, b"\x02"),
        (coders.DecimalCoder(), b""),
        (coders.DecimalCoder(), b"\x02"),
        (coders.DecimalCoder(), b"\x02\x00\x01"),
        (coders.DecimalCoder(), b"\xff" * 9 + b"\x00\x01"),
        (coders.NullableCoder(INT), b"\x02\x01"),
        (coders.NullableCoder(INT), b"\x00\x01"),
        (coders.TupleCoder([STR, INT]), b"\x05abc\x01"),
        (coders.TupleCoder([STR, INT]), b"\x03abc"),
        (ListCoder(INT), b"\x00\x00\x00"),
        (ListCoder(INT), b"\x00\x00\x00\x02\x01"),
        (ListCoder(FLOAT), b"\x7f\xff\xff\xff" + bytes(8)),
        (ListCoder(STR), b"\x7f\xff\xff\xff\x01a"),
        (ListCoder(STR), b"\xff\xff\xff\xff\x01\x01a"),
        (ListCoder(STR), b"\xff\xff\xff\xfe\x01\x01a"),
        (coders.MapCoder(STR, INT), b"\xff\xff\xff\xff"),
        (FLIGHT, FLIGHT.encode(Flight("a", 1, []))[:-1]),
        (FLIGHT, b"\x04" + FLIGHT.encode(Flight("a", 1, []))[1:]),
        (FLIGHT, b"\x03\x01\x01\x00\x00\x00\x00"),  # tail is null
        (FLIGHT, b"\x03\x01\x00\x01a\x05\x00\x00\x00\x00"),  # a mask of nothing
        (FLIGHT, b"\x03\x01\x08\x01a\x05\x00\x00\x00\x00"),  # a fourth field is null
    ],
)
def test_bytes_that_are_not_the_coders_are_refused(coder: Coder, value: bytes) -> None:
    with pytest.raises(InvalidCheckpointError, match="cell 'one' of operator 'op'"):
        operator(coder).to_table([SnapshotRecord(b"", b"", False, 0, (value, ()), (), ())])


@given(st.data())
def test_changed_bytes_are_refused_or_come_back_as_they_are(data: st.DataObject) -> None:
    coder, values = data.draw(kinds)
    value = bytearray(coder.encode(data.draw(values)))
    for _ in range(data.draw(st.integers(1, 3))):
        if value:
            value[data.draw(st.integers(0, len(value) - 1))] ^= data.draw(st.integers(1, 255))
    value = value[: data.draw(st.integers(0, len(value)))]
    if value.count(b"\xff\xff\xff\xff"):
        return  # may be an iterable of unknown length, which comes back with its length
    state = operator(coder)
    records = records_of([bytes(value)])
    try:
        table = state.to_table(records)
    except InvalidCheckpointError:
        return
    assert list(state.to_records(table)) == records


def test_a_column_of_another_type_is_refused() -> None:
    table = operator(INT).to_table(records_of([INT.encode(1)]))
    with pytest.raises(InvalidCheckpointError, match=r"'one' of operator 'op' is int64 .* string"):
        list(operator(STR).to_records(table))


def test_a_column_of_ours_that_is_missing_is_refused() -> None:
    state = operator(INT)
    with pytest.raises(InvalidCheckpointError, match="'_timers' of operator 'op' is missing"):
        list(state.to_records(state.to_table([]).drop_columns(["_timers"])))


def test_a_null_where_the_coder_has_no_none_is_refused() -> None:
    coder = coders.TupleCoder([INT])
    state = operator(coder)
    table = state.to_table(records_of([coder.encode((1,))]))
    column = pa.array([{"f0": None}, None, None], state.schema.field("one").type)
    table = table.set_column(1, state.schema.field("one"), column)
    with pytest.raises(InvalidCheckpointError, match="cell 'one' of operator 'op'"):
        list(state.to_records(table))


# --- rows ----------------------------------------------------------------------------------------


def test_rows_are_in_order_of_key_and_window_and_the_last_of_equal_ones_counts() -> None:
    state = operator(INT)
    rows = [(b"b", b""), (b"a\0", b""), (b"a", b"2"), (b"a", b"1"), (b"b", b""), (b"", b"")]
    records = [
        SnapshotRecord(key, window, False, i, (INT.encode(i), ()), (), ())
        for i, (key, window) in enumerate(rows)
    ]
    found = [(r.key, r.window, r.updated) for r in state.to_records(state.to_table(records))]
    assert found == [
        (b"", b"", 5),
        (b"a", b"1", 3),
        (b"a", b"2", 2),
        (b"a\0", b"", 1),
        (b"b", b"", 4),
    ]


@given(
    st.lists(
        st.tuples(
            st.binary(max_size=3) | st.binary(max_size=3).map(lambda b: b"prefix-12" + b),
            st.sampled_from([b"", b"\0", b"w"]),
        )
    )
)
@example([(b"prefix", b""), (b"prefix\0", b""), (b"prefix", b"")])
def test_any_rows_are_sorted_as_python_sorts_them(rows: list[tuple[bytes, bytes]]) -> None:
    state = operator(INT)
    records = [
        SnapshotRecord(key, window, False, i, (None, ()), (), ())
        for i, (key, window) in enumerate(rows)
    ]
    latest = {(r.key, r.window): r for r in records}
    assert list(state.to_records(state.to_table(records))) == [latest[p] for p in sorted(latest)]


_times = st.integers(-(2**63), 2**63 - 1)
_names = st.text(max_size=4)
_timers = st.builds(
    SavedTimer,
    family=_names,
    tag=_names,
    domain=st.sampled_from(["event", "processing"]),
    fire=_times,
    output=st.none() | _times,
)
_carried = st.builds(
    CarriedOutput,
    tag=st.none() | _names,
    timestamp=_times,
    window=st.binary(max_size=3),
    value=st.binary(max_size=150),
)
_value = st.none() | st.binary(max_size=150)
_whole_record = st.builds(
    SnapshotRecord,
    key=st.binary(max_size=150),
    window=st.binary(max_size=3),
    deleted=st.booleans(),
    updated=_times,
    cells=st.tuples(_value, st.lists(st.binary(max_size=150), max_size=3).map(tuple), _value),
    timers=st.lists(_timers, max_size=2).map(tuple),
    carried=st.lists(_carried, max_size=2).map(tuple),
)
_codes = st.tuples(
    st.sampled_from([REPLACE, KEEP]),
    st.sampled_from([REPLACE, KEEP, APPEND]),
    st.sampled_from([REPLACE, KEEP]),
).filter(any)


def _with_patch(record: SnapshotRecord, codes: tuple[int, ...]) -> SnapshotRecord:
    nothing = None, (), None
    cells = tuple(
        empty if code == KEEP else cell
        for cell, code, empty in zip(record.cells, codes, nothing, strict=True)
    )
    return replace(record, deleted=False, cells=cells, patch=bytes(codes))


_any_record = _whole_record | st.builds(_with_patch, _whole_record, _codes)
_any_records = st.lists(
    _any_record,
    max_size=8,
    unique_by=lambda record: (record.key, record.window),
)
_three_cells = OperatorState(
    "op",
    BYTES,
    GlobalWindowCoder(),
    (
        CellState("a", "read_modify_write", BYTES),
        CellState("b", "set", BYTES),
        CellState("c", "combining", ANY),
    ),
    False,
)


@given(_any_records, st.integers(1, 20))
def test_records_of_any_kind_come_back(records: list[SnapshotRecord], copies: int) -> None:
    # copies: few items in each of many lists are found in another way than many in few
    every = [replace(r, key=r.key + b"%d" % i) for i in range(copies) for r in records]
    found = list(_three_cells.to_records(_three_cells.to_table(every)))
    assert sorted(found, key=repr) == sorted(
        {(r.key, r.window): r for r in every}.values(), key=repr
    )


@given(
    st.lists(
        st.builds(
            lambda record, key: replace(record, key=key, window=b""),
            _any_record,
            st.sampled_from([b"", b"a", b"b"]),
        ),
        max_size=12,
    )
)
def test_several_records_of_a_key_are_what_they_say_together(records: list[SnapshotRecord]) -> None:
    latest: dict[bytes, SnapshotRecord] = {}
    for record in records:
        latest[record.key] = record.onto(latest.get(record.key))
    table = _three_cells.to_table(records)
    assert list(_three_cells.to_records(table)) == [latest[key] for key in sorted(latest)]
    whole = all(record.patch is None for record in latest.values())
    assert ("_patch" in table.column_names) == (not whole)
    kind: Literal["full", "delta"] = "full" if whole else "delta"
    header = _three_cells.header(key_group=0, boundary=1, kind=kind)
    file = encode_sidecar(table, replace(header, format_version=2))
    assert decode_sidecar(file, where="a test")[1].equals(table)


@given(_any_records)
def test_encoded_records_are_the_same_as_records(records: list[SnapshotRecord]) -> None:
    encoded = [record.to_bytes() for record in records]
    table = _three_cells.encoded_to_table(encoded)
    assert table.equals(_three_cells.to_table(records))
    pairs = {record.key: record.to_bytes() for record in records}
    assert len(table) == len(records)
    assert sorted(data for _, data in _three_cells.to_encoded(table)) == sorted(encoded)
    for key, data in _three_cells.to_encoded(table):
        assert SnapshotRecord.from_bytes(data).key == key
        assert key in pairs


@given(_any_records.filter(bool), st.data())
def test_a_changed_record_among_others_is_refused_or_comes_back(
    records: list[SnapshotRecord], data: st.DataObject
) -> None:
    encoded = [record.to_bytes() for record in records]
    changed = bytearray(encoded[0])
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    encoded[0] = bytes(changed[: data.draw(st.integers(0, len(changed)))])
    try:
        table = _three_cells.encoded_to_table(encoded)
    except InvalidCheckpointError:
        return
    latest: dict[tuple[bytes, bytes], SnapshotRecord] = {}
    for r in map(SnapshotRecord.from_bytes, encoded):
        latest[r.key, r.window] = r.onto(latest.get((r.key, r.window)))
    found = {(r.key, r.window): r for r in _three_cells.to_records(table)}
    # a cell of many that has no value is an empty one; nothing else may differ
    assert found == {
        k: replace(r, cells=(r.cells[0], r.cells[1] or (), r.cells[2])) for k, r in latest.items()
    }


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"", "a record of operator 'op' .* malformed"),
        (b"\x02abcdefghijkl", "a record of operator 'op' has format 2"),
        (SnapshotRecord(b"", b"", False, 0, (None,), (), ()).to_bytes(), "number of cells"),
        (SnapshotRecord(b"", b"", False, 0, ((), ()), (), ()).to_bytes(), "one value has many"),
        (SnapshotRecord(b"", b"", False, 0, (None, b""), (), ()).to_bytes(), "has one value"),
        (
            SnapshotRecord(b"", b"", False, 0, (None, ()), (), (), b"\2\0").to_bytes(),
            "unknown byte",
        ),
        (
            SnapshotRecord(b"", b"", False, 0, (b"", (b"",)), (), (), b"\1\0").to_bytes(),
            "its patch is none of these cells'",
        ),
    ],
)
def test_a_record_of_something_else_is_refused(record: bytes, message: str) -> None:
    good = SnapshotRecord(b"k", b"", False, 0, (None, ()), (), ()).to_bytes()
    with pytest.raises(InvalidCheckpointError, match=message):
        operator(INT).encoded_to_table([good, record, good])


def test_timers_carried_outputs_and_tombstones_come_back() -> None:
    state = operator(INT)
    timers = (
        SavedTimer("flush", "", "event", -(2**63), None),
        SavedTimer("flush", "é", "processing", 2**63 - 1, -5),
    )
    carried = (
        CarriedOutput(None, 5, b"", b"main"),
        CarriedOutput("late", -(2**63), b"window", b""),
    )
    records = [
        SnapshotRecord(b"a", b"", False, -(2**63), (None, ()), timers, ()),
        SnapshotRecord(b"b", b"", True, 2**63 - 1, (None, ()), (), ()),
        SnapshotRecord(b"c", b"", False, 0, (None, ()), timers[:1], carried),
    ]
    assert list(state.to_records(through_a_file(state, records))) == records


def test_an_operator_without_cells_keeps_keys_and_timers() -> None:
    state = OperatorState("op", STR, GlobalWindowCoder(), (), False)
    timer = SavedTimer("t", "", "event", 1, None)
    records = [SnapshotRecord(b"k", b"", False, 0, (), (timer,), ())]
    assert list(state.to_records(through_a_file(state, records))) == records


def test_no_records_are_a_table_of_no_rows() -> None:
    state = operator(FLIGHT)
    table = through_a_file(state, [])
    assert table.schema == state.schema
    assert list(state.to_records(table)) == []


def test_more_rows_than_a_slice_come_back() -> None:
    coder = coders.TupleCoder([coders.NullableCoder(STR), ListCoder(INT)])
    state = operator(coder, key=INT)
    records = [
        SnapshotRecord(
            INT.encode(i),
            IntervalWindowCoder().encode(beam.transforms.window.IntervalWindow(0, i + 1)),
            False,
            i,
            (coder.encode((None if i % 3 else str(i), [i] * (i % 5))), (coder.encode(("x", [])),)),
            (SavedTimer("t", str(i), "event", i, None),) * (i % 2),
            (),
        )
        for i in range(70_000)
    ]
    records.sort(key=lambda r: (r.key, r.window))
    assert list(state.to_records(through_a_file(state, records))) == records


def test_a_cell_that_a_file_lacks_is_empty_and_a_column_of_no_cell_is_passed_over() -> None:
    old = OperatorState("op", STR, GlobalWindowCoder(), (CellState("a", "bag", INT),), False)
    new = OperatorState(
        "op",
        STR,
        GlobalWindowCoder(),
        (CellState("b", "read_modify_write", INT), CellState("c", "set", STR)),
        False,
    )
    table = old.to_table([SnapshotRecord(b"k", b"", False, 0, ((b"\x01",),), (), ())])
    assert [r.cells for r in new.to_records(table)] == [(None, ())]


@pytest.mark.parametrize("name", ["key", "KEY", "_key", "_timers", "_", "", "cell:key", "cell:x"])
def test_a_cell_named_like_a_column_of_ours_has_a_column_of_another_name(name: str) -> None:
    names = (name, "key ", "keys", "cell")
    cells = tuple(CellState(n, "read_modify_write", INT) for n in names)
    state = OperatorState("op", STR, GlobalWindowCoder(), cells, False)
    values = tuple(INT.encode(i) for i in range(len(names)))
    records = [SnapshotRecord(b"k", b"", False, 0, values, (), ())]
    table = through_a_file(state, records)
    assert list(state.to_records(table)) == records
    columns = {
        cell.name: cell.column
        for cell in state.header(key_group=0, boundary=None, kind="full").cells
    }
    assert len({column.casefold() for column in columns.values()} | {"key", "_key"}) == 6
    assert table[columns[name]].to_pylist() == [0]
    assert columns["keys"] == "keys"


def test_a_kind_of_cell_that_cannot_be_saved_is_refused() -> None:
    with pytest.raises(PipelineRefusedError, match="'x' is of kind 'map'"):
        CellState("x", "map", INT)


def test_an_operator_state_is_the_same_after_pickling() -> None:
    state = operator(FLIGHT)
    assert state.schema.names  # what is cached is not sent
    again = pickle.loads(pickle.dumps(state))
    assert again.schema == state.schema
    assert again.spec() == state.spec()


# --- identities ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coder", "identity"),
    [
        (STR, "StrUtf8Coder"),
        (coders.TupleCoder([STR, coders.NullableCoder(INT)]),
         "TupleCoder[StrUtf8Coder,NullableCoder[VarIntCoder]]"),
        (coders.MapCoder(STR, ListCoder(FLOAT)), "MapCoder[StrUtf8Coder,ListCoder[FloatCoder]]"),
        (FLIGHT, "RowCoder[tail:StrUtf8Coder,delay:VarIntCoder?,legs:IterableCoder[FloatCoder]]"),
        (coders.ProtoCoder(schema_pb2.Schema),
         "ProtoCoder[org.apache.beam.model.pipeline.v1.Schema]"),
        (ANY, "FastPrimitivesCoder"),
        (ANY.as_deterministic_coder("a step"), "DeterministicFastPrimitivesCoderV2"),
        (coders.PickleCoder(), "PickleCoder"),
        (GlobalWindowCoder(), "GlobalWindowCoder"),
        (IntervalWindowCoder(), "IntervalWindowCoder"),
        (coders.AvroGenericCoder('{"type": "int"}'), "AvroGenericCoder[8227b502038b08ac]"),
    ],
)  # fmt: skip
def test_a_coder_has_its_identity(coder: Coder, identity: str) -> None:
    assert coder_identity(coder) == identity


def test_a_coder_of_the_authors_goes_by_its_module_and_name() -> None:
    assert coder_identity(LoudStr()) == f"{__name__}.LoudStr"


def test_row_fields_are_told_apart_whatever_their_names() -> None:
    def row(*names: str) -> coders.RowCoder:
        fields = [
            schema_pb2.Field(name=n, type=schema_pb2.FieldType(atomic_type=schema_pb2.INT64))
            for n in names
        ]
        return coders.RowCoder(schema_pb2.Schema(fields=fields, id=uuid.uuid4().hex))

    assert coder_identity(row("a", "b")) == "RowCoder[a:VarIntCoder,b:VarIntCoder]"
    assert coder_identity(row("b", "a")) != coder_identity(row("a", "b"))
    assert coder_identity(row("é")) == "RowCoder[é:VarIntCoder]"


def test_an_identity_is_the_same_in_another_process() -> None:
    code = (
        "from typing import NamedTuple, Optional; from apache_beam import coders; "
        "from beam_ckpt.transforms.columns import coder_identity as i; "
        "F = NamedTuple('F', [('a', int), ('b', bytes)]); "
        "row = coders.RowCoder.from_type_hint(F, coders.registry); "
        "print(i(coders.TupleCoder([row, coders.PickleCoder()])))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {"TupleCoder[RowCoder[a:VarIntCoder,b:BytesCoder],PickleCoder]\n"}


def test_the_spec_and_the_header_name_cells_kinds_and_coders() -> None:
    state = OperatorState("op", STR, GlobalWindowCoder(), (CellState("n", "bag", INT),), True)
    spec = state.spec()
    assert (spec.key_coder, spec.window_coder) == ("StrUtf8Coder", "GlobalWindowCoder")
    assert spec.cells["n"].model_dump() == {"kind": "bag", "coder": "VarIntCoder"}
    assert spec.time_sorted
    header = state.header(key_group=7, boundary=-5, kind="delta")
    assert (header.operator, header.key_group, header.boundary) == ("op", 7, -5)
    assert [(c.name, c.column, c.kind, c.coder) for c in header.cells] == [
        ("n", "n", "bag", "VarIntCoder")
    ]


def test_logical_types_of_rows_are_columns_of_what_represents_them() -> None:
    row_type = RowTypeConstraint.from_fields([("at", Timestamp), ("n", int)])
    coder = coders.RowCoder.from_type_hint(row_type, coders.registry)
    assert isinstance(coder.components[0], row_coder.LogicalTypeCoder)
    at = operator(coder).schema.field("one").type.field("at").type
    assert pa.types.is_struct(at)
    values = [coder.encode(beam.Row(at=Timestamp(micros=m), n=1)) for m in (0, 1, 10**15)]
    assert_comes_back(coder, values)
