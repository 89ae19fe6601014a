"""pyarrow, pandas, polars and DuckDB read the same state from a sidecar, for every type it has."""

# No postponed annotations here: Beam does not resolve them for the fields of rows.
import dataclasses
import struct
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Optional

import pyarrow as pa
import pytest
from apache_beam import coders
from apache_beam.coders.coders import (
    BigEndianShortCoder,
    Coder,
    ListCoder,
    SinglePrecisionFloatCoder,
    VarInt32Coder,
)
from apache_beam.coders.typecoders import CoderRegistry
from apache_beam.typehints.row_type import RowTypeConstraint
from apache_beam.utils.timestamp import MAX_TIMESTAMP, MIN_TIMESTAMP, Timestamp
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_ckpt.transforms.columns import CellState, OperatorState
from tests.transforms.four_readers import tables, write


@dataclasses.dataclass
class Flight:
    """A dataclass, as Beam encodes one whose coder is a row's; see `test_a_dataclass_...`."""

    tail: str
    delay: Optional[int]  # noqa: UP045  Beam takes int | None for Any
    legs: Sequence[float]
    fares: Mapping[str, int]


FLIGHT = coders.RowCoder.from_type_hint(Flight, CoderRegistry())
_int64 = st.integers(-(2**63), 2**63 - 1)
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
_floats = st.binary(min_size=8, max_size=8).map(lambda b: struct.unpack(">d", b)[0])
_times = st.integers(MIN_TIMESTAMP.micros // 1000, MAX_TIMESTAMP.micros // 1000).map(
    lambda ms: Timestamp(micros=ms * 1000)
)
# (Beam rounds what has more than 28 digits.)
_decimals = st.builds(
    lambda n, places: Decimal(n).scaleb(-places), st.integers(-(10**20), 10**20), st.integers(0, 9)
)
_flights = st.builds(
    Flight, _text, st.none() | _int64, st.lists(_floats, max_size=3),
    st.dictionaries(_text, _int64, max_size=3),
)  # fmt: skip
KINDS: dict[str, tuple[Coder, st.SearchStrategy[Any]]] = {
    "int": (coders.VarIntCoder(), _int64),
    "int32": (VarInt32Coder(), st.integers(-(2**31), 2**31 - 1)),
    "int16": (BigEndianShortCoder(), st.integers(-(2**15), 2**15 - 1)),
    "float": (coders.FloatCoder(), _floats),
    "float32": (SinglePrecisionFloatCoder(), st.floats(width=32)),
    "bool": (coders.BooleanCoder(), st.booleans()),
    "text": (coders.StrUtf8Coder(), _text),
    "bytes": (coders.BytesCoder(), st.binary(max_size=5)),
    "timestamp": (coders.TimestampCoder(), _times),
    "decimal": (coders.DecimalCoder(), _decimals),
    "tuple": (
        coders.TupleCoder([coders.StrUtf8Coder(), coders.FloatCoder()]),
        st.tuples(_text, _floats),
    ),
    "dataclass": (FLIGHT, _flights),
    "list": (ListCoder(coders.StrUtf8Coder()), st.lists(_text, max_size=3)),
    "nullable": (coders.NullableCoder(coders.VarIntCoder()), st.none() | _int64),
    "map": (
        coders.MapCoder(coders.StrUtf8Coder(), coders.VarIntCoder()),
        st.dictionaries(_text, _int64, max_size=3),
    ),
}


def same(value: Any) -> Any:
    """A value as all readers have it: floats by their bits, mappings and structs as pairs."""
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, Mapping):
        return [(k, same(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [same(item) for item in value]
    return value


def same_map(value: Any) -> Any:
    """Of a map: DuckDB gives a mapping, Arrow pairs, polars structs of key and value."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        pairs = [tuple(item.values()) if isinstance(item, dict) else tuple(item) for item in value]
    else:
        pairs = list(value.items())
    return [(k, same(v)) for k, v in pairs]


def instants(table: pa.Table) -> pa.Table:
    """Timestamps as numbers: DuckDB and pandas have other units and years than Arrow."""
    columns = []
    for column in table.columns:
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        elif pa.types.is_timestamp(getattr(column.type, "value_type", pa.null())):
            micros = column.cast(pa.list_(pa.timestamp("us", "UTC")))
            column = micros.cast(pa.list_(pa.int64()))
        columns.append(column)
    return pa.table(columns, names=table.column_names)


def readings(path: Path, column: str) -> dict[str, list[Any]]:
    """What each of the four says of a column of a file."""
    found = tables(path, column)
    return {name: instants(table)[column].to_pylist() for name, table in found.items()}


def normalised(kind: str, column: str, values: list[Any]) -> list[Any]:
    def one(value: Any) -> Any:
        if kind == "map":
            return same_map(value)
        if kind == "dataclass" and value is not None:
            pairs = dict(value)
            return same({**pairs, "fares": None}), same_map(pairs["fares"])
        return same(value)

    if column == "many":
        return [None if v is None else [one(item) for item in v] for v in values]
    return [one(value) for value in values]


@pytest.mark.parametrize("kind", KINDS)
def test_four_readers_read_what_the_dofn_had(kind: str, tmp_path_factory: Any) -> None:
    coder, values = KINDS[kind]
    path = tmp_path_factory.mktemp(kind) / "state.parquet"

    @settings(max_examples=6)
    @given(st.lists(values, min_size=1, max_size=12))
    def check(held: list[Any]) -> None:
        write(path, coder, held)
        for column in ("one", "many"):
            found = readings(path, column)
            said = {name: normalised(kind, column, v) for name, v in found.items()}
            assert said["pandas"] == said["pyarrow"], "pandas"
            assert said["polars"] == said["pyarrow"], "polars"
            assert said["duckdb"] == said["pyarrow"], "duckdb"
            items = said["pyarrow"][:-1] if column == "one" else said["pyarrow"][-1]
            assert [meant(kind, v, column) for v in held] == items, "the DoFn"

    check()


def meant(kind: str, value: Any, column: str) -> Any:
    """What a reader should say of a value."""
    if kind == "float32":
        return same(struct.unpack(">f", struct.pack(">f", value))[0])
    if kind == "timestamp":
        return value.micros
    if kind == "decimal":
        return str(value)
    if kind == "nullable":
        return [("value", value)] if column == "one" else value
    if kind == "tuple":
        return [("f0", value[0]), ("f1", same(value[1]))]
    if kind == "map":
        return list(value.items())
    if kind == "dataclass":
        head = [("tail", value.tail), ("delay", value.delay), ("legs", same(list(value.legs)))]
        return [*head, ("fares", None)], list(value.fares.items())
    return same(value)


def test_a_dataclass_is_a_struct_by_the_coder_of_rows_and_a_pickle_where_nobody_chose() -> None:
    """Beam takes a dataclass for anything, unless its coder is said to be that of rows."""
    assert type(coders.registry.get_coder(Flight)) is coders.FastPrimitivesCoder
    assert RowTypeConstraint.from_user_type(Flight) is not None
    flight = Flight("N1", None, [0.5], {"a": 1})
    assert FLIGHT.decode(FLIGHT.encode(flight)) == flight
    window = coders.coders.GlobalWindowCoder()

    def column(coder: Coder) -> pa.DataType:
        cells = (CellState("c", "read_modify_write", coder),)
        return OperatorState("op", coders.BytesCoder(), window, cells, False).schema.field("c").type

    assert pa.types.is_struct(column(FLIGHT))
    assert pa.types.is_binary(column(coders.FastPrimitivesCoder()))


@pytest.mark.parametrize("bits", ["7ff8000000000123", "fff0000000000001", "8000000000000000"])
def test_floats_keep_their_bits_in_every_reader(bits: str, tmp_path: Path) -> None:
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    write(tmp_path / "state.parquet", coders.FloatCoder(), [value])
    for name, found in readings(tmp_path / "state.parquet", "one").items():
        assert same(found[0]) == bytes.fromhex(bits), name
