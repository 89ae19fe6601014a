"""Rows, named tuples and dataclasses of every field that Beam has a type for.

They have typed columns that four readers agree on, and are the same after `WriteState` and a run.
"""

# No postponed annotations here: Beam does not resolve them for the fields of rows.
import dataclasses
import datetime
import struct
import uuid
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, Optional

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam import coders
from apache_beam.portability.api import schema_pb2
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec
from apache_beam.typehints.row_type import RowTypeConstraint
from apache_beam.typehints.schemas import (
    FixedBytes,
    FixedString,
    LogicalType,
    MillisInstant,
    NoArgumentLogicalType,
    VariableBytes,
    VariableString,
)
from apache_beam.utils.python_callable import PythonCallableWithSource
from apache_beam.utils.timestamp import MAX_TIMESTAMP, MIN_TIMESTAMP, Duration, Timestamp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from beam_ckpt import errors, inspect, open_store
from beam_ckpt.testing.cuts import run_checkpointed
from beam_ckpt.transforms import ReadState, WriteState
from tests.transforms.four_readers import tables, write

# ruff: noqa: UP045  Beam takes `int | None` for Any.


@LogicalType.register_logical_type
class MicrosDuration(NoArgumentLogicalType[Duration, np.int64]):
    """What an author writes once to have durations in rows: Beam has no type for them."""

    @classmethod
    def urn(cls) -> str:
        return "beam_ckpt:tests:micros_duration:v1"

    @classmethod
    def representation_type(cls) -> type:
        return np.int64

    @classmethod
    def language_type(cls) -> type:
        return Duration

    def to_representation_type(self, value: Duration) -> int:
        return value.micros

    def to_language_type(self, value: int) -> Duration:
        return Duration(micros=int(value))


@dataclasses.dataclass
class Stop:
    place: str
    platform: Optional[int]


@dataclasses.dataclass
class Trip:
    """Every field that Beam has a type for."""

    name: str
    raw: bytes
    seats: int
    small: np.int32
    short: np.int16
    speed: float
    slow: np.float32
    done: bool
    price: Decimal
    at: Timestamp
    day: datetime.date
    takes: Duration
    rule: PythonCallableWithSource
    first: Stop
    delay: Optional[int]
    note: Optional[str]
    last: Optional[Stop]
    paid: Optional[Decimal]
    seen: Optional[Timestamp]
    waits: Optional[Duration]
    stops: Sequence[Stop]
    delays: Sequence[Optional[int]]
    times: Sequence[Timestamp]
    fares: Mapping[str, int]
    scores: Mapping[int, Sequence[float]]
    places: Mapping[str, Stop]
    known: Mapping[str, Optional[float]]
    maybe: Optional[Mapping[str, int]]


class Leg(NamedTuple):
    tail: str
    stop: Stop
    takes: Optional[Duration]
    pairs: Sequence[Sequence[Optional[str]]]


for row in (Stop, Trip, Leg):
    coders.registry.register_coder(row, coders.RowCoder)


def _of_length(name: str, kind: Any, atomic: Any, length: int) -> schema_pb2.Field:
    number = schema_pb2.AtomicTypeValue(int32=length)
    return schema_pb2.Field(
        name=name,
        type=schema_pb2.FieldType(
            logical_type=schema_pb2.LogicalType(
                urn=kind.urn(),
                representation=schema_pb2.FieldType(atomic_type=atomic),
                argument_type=schema_pb2.FieldType(atomic_type=schema_pb2.INT32),
                argument=schema_pb2.FieldValue(atomic_value=number),
            )
        ),
    )


# As rows come from SQL and from other languages: these types are in no Python annotation.
FOREIGN = coders.RowCoder(
    schema_pb2.Schema(
        id=str(uuid.UUID(int=7)),
        fields=[
            _of_length("code", FixedBytes, schema_pb2.BYTES, 3),
            _of_length("rest", VariableBytes, schema_pb2.BYTES, 5),
            _of_length("state", FixedString, schema_pb2.STRING, 2),
            _of_length("city", VariableString, schema_pb2.STRING, 9),
            schema_pb2.Field(
                name="at",
                type=schema_pb2.FieldType(
                    logical_type=schema_pb2.LogicalType(
                        urn=MillisInstant.urn(),
                        representation=schema_pb2.FieldType(atomic_type=schema_pb2.INT64),
                    )
                ),
            ),
        ],
    )
)
ForeignRow = FOREIGN.to_type_hint()
LOOSE = coders.RowCoder.from_type_hint(
    RowTypeConstraint.from_fields([("a", Optional[int]), ("stop", Stop)]), coders.registry
)

_int64 = st.integers(-(2**63), 2**63 - 1)
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
_floats = st.binary(min_size=8, max_size=8).map(lambda b: struct.unpack(">d", b)[0])
_bits32 = st.floats(width=32, allow_nan=False)
_decimals = st.builds(
    lambda n, places: Decimal(n).scaleb(-places), st.integers(-(10**20), 10**20), st.integers(0, 9)
)
_times = st.integers(MIN_TIMESTAMP.micros, MAX_TIMESTAMP.micros).map(lambda m: Timestamp(micros=m))
_durations = _int64.map(lambda m: Duration(micros=m))
_rules = st.sampled_from(["str.upper", "lambda x: x + 1", "def f(x):\n  return [x, 'é']\n"]).map(
    PythonCallableWithSource
)
_stops = st.builds(Stop, _text, st.none() | _int64)
_trips = st.builds(
    Trip,
    name=_text, raw=st.binary(max_size=5), seats=_int64,
    small=st.integers(-(2**31), 2**31 - 1), short=st.integers(-(2**15), 2**15 - 1),
    speed=_floats, slow=_bits32, done=st.booleans(), price=_decimals, at=_times,
    day=st.dates(), takes=_durations, rule=_rules, first=_stops, delay=st.none() | _int64,
    note=st.none() | _text, last=st.none() | _stops, paid=st.none() | _decimals,
    seen=st.none() | _times, waits=st.none() | _durations, stops=st.lists(_stops, max_size=3),
    delays=st.lists(st.none() | _int64, max_size=3), times=st.lists(_times, max_size=3),
    fares=st.dictionaries(_text, _int64, max_size=3),
    scores=st.dictionaries(_int64, st.lists(_floats, max_size=2), max_size=2),
    places=st.dictionaries(_text, _stops, max_size=2),
    known=st.dictionaries(_text, st.none() | _floats, max_size=2),
    maybe=st.none() | st.dictionaries(_text, _int64, max_size=2),
)  # fmt: skip
# (Such as Beam can hand on to a bundle: pickled, what a rule's source makes is looked up by name.)
_pickled = _trips.map(
    lambda trip: dataclasses.replace(trip, rule=PythonCallableWithSource("str.upper"))
)
_legs = st.builds(
    Leg, _text, _stops, st.none() | _durations,
    st.lists(st.lists(st.none() | _text, max_size=2), max_size=2),
)  # fmt: skip
# (Readers have times as numbers of the calendar, here.)
_calendar = st.integers(-62_135_596_800_000, 253_402_300_799_000).map(
    lambda ms: Timestamp(micros=ms * 1000)
)
_fixed = st.characters(codec="ascii")
_foreign = st.builds(
    ForeignRow, st.binary(min_size=3, max_size=3), st.binary(max_size=5),
    st.text(_fixed, min_size=2, max_size=2), st.text(_fixed, max_size=9), _calendar,
)  # fmt: skip
_loose = st.builds(lambda a, stop: beam.Row(a=a, stop=stop), st.none() | _int64, _stops)

KINDS: dict[str, tuple[coders.Coder, st.SearchStrategy[Any]]] = {
    "dataclass": (coders.registry.get_coder(Trip), _trips),
    "named tuple": (coders.registry.get_coder(Leg), _legs),
    "row of other languages": (FOREIGN, _foreign),
    "Row": (LOOSE, _loose),
}


def meant(value: Any, kind: pa.DataType) -> Any:
    """What a reader should say of a value in a column of this type."""
    if value is None:
        return None
    if isinstance(value, Timestamp):
        if pa.types.is_struct(kind):
            seconds, micros = divmod(value.micros, 1_000_000)
            return {"seconds": seconds, "micros": micros}
        return value.micros
    if isinstance(value, Duration):
        return value.micros
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, datetime.date):
        return (value - datetime.date(1970, 1, 1)).days
    if isinstance(value, PythonCallableWithSource):
        return value.get_source()
    if pa.types.is_struct(kind):
        return {field.name: meant(getattr(value, field.name), field.type) for field in kind}
    if pa.types.is_list(kind):
        return [meant(item, kind.value_type) for item in value]
    if pa.types.is_map(kind):
        return [(k, meant(v, kind.item_type)) for k, v in value.items()]
    return bits(value)


def said(value: Any, kind: pa.DataType) -> Any:
    """What a reader says: maps are mappings, pairs, or structs of key and value."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: said(value[field.name], field.type) for field in kind}
    if pa.types.is_list(kind):
        return [said(item, kind.value_type) for item in value]
    if pa.types.is_map(kind):
        items = value.items() if isinstance(value, Mapping) else value
        pairs = [tuple(i.values()) if isinstance(i, dict) else tuple(i) for i in items]
        return [(k, said(v, kind.item_type)) for k, v in pairs]
    if isinstance(value, datetime.datetime):
        return (value - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // datetime.timedelta(
            microseconds=1
        )
    return bits(value)


def bits(value: Any) -> Any:
    return struct.pack(">d", value) if isinstance(value, float) else value


def readings(path: Path, column: str) -> dict[str, list[Any]]:
    return {name: table[column].to_pylist() for name, table in tables(path, column).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_four_readers_read_the_fields_of_a_row_as_the_dofn_had_them(
    kind: str, tmp_path_factory: Any
) -> None:
    coder, values = KINDS[kind]
    path = tmp_path_factory.mktemp("rows") / "state.parquet"

    @settings(max_examples=15)
    @given(st.lists(values, min_size=1, max_size=8))
    def check(held: list[Any]) -> None:
        schema = write(path, coder, held).schema
        item = schema.field("one").type
        expected = [meant(value, item) for value in held]
        for reader, found in readings(path, "one").items():
            assert [said(v, item) for v in found[:-1]] == expected, reader
            assert found[-1] is None, reader
        for reader, found in readings(path, "many").items():
            assert [said(v, item) for v in found[-1]] == expected, reader

    check()


def test_each_field_has_a_column_type_of_its_own(tmp_path: Path) -> None:
    stop = pa.struct([("place", pa.string()), ("platform", pa.int64())])
    instant = pa.struct([("seconds", pa.int64()), ("micros", pa.int64())])

    def many(kind: pa.DataType) -> pa.DataType:
        return pa.list_(pa.field("element", kind))

    kind = write(tmp_path / "trip.parquet", KINDS["dataclass"][0], []).schema.field("one").type
    assert {field.name: field.type for field in kind} == {
        "name": pa.string(), "raw": pa.binary(), "seats": pa.int64(), "small": pa.int32(),
        "short": pa.int16(), "speed": pa.float64(), "slow": pa.float32(), "done": pa.bool_(),
        "price": pa.string(), "at": instant, "day": pa.int64(), "takes": pa.int64(),
        "rule": pa.string(), "first": stop, "delay": pa.int64(), "note": pa.string(),
        "last": stop, "paid": pa.string(), "seen": instant, "waits": pa.int64(),
        "stops": many(stop), "delays": many(pa.int64()), "times": many(instant),
        "fares": pa.map_(pa.string(), pa.int64()),
        "scores": pa.map_(pa.int64(), many(pa.float64())),
        "places": pa.map_(pa.string(), stop), "known": pa.map_(pa.string(), pa.float64()),
        "maybe": pa.map_(pa.string(), pa.int64()),
    }  # fmt: skip
    kind = write(tmp_path / "foreign.parquet", FOREIGN, []).schema.field("one").type
    assert {field.name: field.type for field in kind} == {
        "code": pa.binary(), "rest": pa.binary(), "state": pa.string(), "city": pa.string(),
        "at": pa.timestamp("ms", "UTC"),
    }  # fmt: skip


class Loose(NamedTuple):
    delay: int | None


class Elapsed(NamedTuple):
    takes: datetime.timedelta


@dataclasses.dataclass(frozen=True)
class Frozen:
    tail: str


def test_what_beam_has_no_type_for_makes_a_row_bytes(tmp_path: Path) -> None:
    """As the book says. Beam has such a field pickled, so that no reader can know where it ends."""
    for row in (Loose, Elapsed):
        coder = coders.RowCoder.from_type_hint(row, coders.registry)
        value = coder.encode(row(None))
        operator = write(tmp_path / "loose.parquet", coder, [coder.decode(value)])
        kind = operator.schema.field("one").type
        assert pa.types.is_binary(kind), row
    with pytest.raises(TypeError, match="Could not determine schema"):
        coders.RowCoder.from_type_hint(Frozen, coders.registry)


# -- through a bootstrap and a restored run --------------------------------------------------------


class RowsFn(beam.DoFn):
    """Gives what it was restored with."""

    TRIP = ReadModifyWriteStateSpec("trip", KINDS["dataclass"][0])
    TRIPS = BagStateSpec("trips", KINDS["dataclass"][0])
    LEG = ReadModifyWriteStateSpec("leg", KINDS["named tuple"][0])
    FOREIGN = ReadModifyWriteStateSpec("foreign", FOREIGN)
    # As it comes where nobody chose a coder.
    TAKES = ReadModifyWriteStateSpec("takes", coders.registry.get_coder(Duration))

    def process(
        self,
        element,
        trip=beam.DoFn.StateParam(TRIP),
        trips=beam.DoFn.StateParam(TRIPS),
        leg=beam.DoFn.StateParam(LEG),
        foreign=beam.DoFn.StateParam(FOREIGN),
        takes=beam.DoFn.StateParam(TAKES),
    ):
        yield (
            element[0],
            trip.read(), list(trips.read()), leg.read(), tuple(foreign.read()), takes.read(),
        )  # fmt: skip


def in_bits(value: Any) -> Any:
    """A value that equals another where both are the same, NaNs and -0.0 among them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return in_bits(tuple(getattr(value, f.name) for f in dataclasses.fields(value)))
    if isinstance(value, PythonCallableWithSource):
        return value.get_source()
    if isinstance(value, Mapping):
        return [(k, in_bits(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [in_bits(item) for item in value]
    return bits(value)


# (To shrink an example takes minutes: each try is three pipelines.)
@settings(max_examples=3, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(st.tuples(_pickled, _legs, _foreign, _durations), min_size=1, max_size=6))
def test_rows_that_are_written_are_restored_read_and_queried(held: list[Any]) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    rows = {
        f"key {i}": {
            "trip": trip, "trips": [trip, trip], "leg": leg, "foreign": foreign, "takes": takes
        }
        for i, (trip, leg, foreign, takes) in enumerate(held)
    }  # fmt: skip
    with beam.Pipeline(runner="FnApiRunner") as p:
        _ = (
            p
            | beam.Create(list(rows.items()), reshuffle=False).with_output_types(
                tuple[str, dict[str, Any]]
            )
            | WriteState(store, "subject", RowsFn(), boundary=100)
        )
    table = inspect.state(store, "subject", untyped="json")
    for key, trip, takes in zip(*(table[c].to_pylist() for c in ("key", "trip", "takes")),
                                strict=True):  # fmt: skip
        kind = table.schema.field("trip").type
        assert said(trip, kind) == meant(rows[key]["trip"], kind)
        assert takes.startswith('"PT') or takes.startswith('"-PT')
    elements = [(101_000_000, key, 0) for key in rows]
    found = run_checkpointed(RowsFn(), elements, runner="FnApiRunner", store=store).outputs
    expected = [
        (key, c["trip"], c["trips"], c["leg"], tuple(c["foreign"]), c["takes"])
        for key, c in rows.items()
    ]
    values = sorted((in_bits(output.value) for output in found), key=lambda v: v[0])
    assert values == sorted(map(in_bits, expected), key=lambda v: v[0])
    with beam.Pipeline(runner="FnApiRunner") as p:
        restored = p | ReadState(store, "subject", cells=RowsFn())
        _ = restored | beam.combiners.ToList() | beam.Map(lambda all: _keep(store.url, all))
    read = _KEPT.pop(store.url)
    assert {key: in_bits(cells["trip"]) for key, cells in read} == {
        key: in_bits(cells["trip"]) for key, cells in rows.items()
    }


_KEPT: dict[str, Any] = {}


def _keep(name: str, what: Any) -> None:
    _KEPT[name] = what


class Rule(NamedTuple):
    rule: PythonCallableWithSource


def test_code_that_state_holds_is_text_until_the_author_gives_the_dofn() -> None:
    """Beam runs the source of a `PythonCallableWithSource` when it decodes one."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    bomb = "__import__('sys').exit"
    coder = coders.RowCoder.from_type_hint(Rule, coders.registry)

    class RuleFn(beam.DoFn):
        RULE = ReadModifyWriteStateSpec("rule", coder)

        def process(self, element, rule=beam.DoFn.StateParam(RULE)):
            rule.write(element[1])

    run_checkpointed(
        RuleFn(), [(1, "a", Rule(PythonCallableWithSource(bomb)))], runner="FnApiRunner",
        store=store, until=10, input_type=tuple[str, Any],
    )  # fmt: skip
    ways: tuple[dict[str, Any], ...] = ({}, {"untyped": "json"}, {"unsafe_unpickle": True})
    for way in ways:
        assert inspect.state(store, "subject", **way)["rule"].to_pylist() == [{"rule": bomb}]
    with (
        pytest.raises(errors.StateIncompatibleError, match="give the author's by cells="),
        beam.Pipeline(runner="FnApiRunner") as p,
    ):
        _ = p | ReadState(store, "subject", unsafe_unpickle=True)
