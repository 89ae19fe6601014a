"""Coders by the names that checkpoints record: the same values, and never a pickle by accident."""

# No postponed annotations here: Beam does not resolve them for the fields of rows.
import datetime
import decimal
import pickle
import string
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

import pytest
from apache_beam import coders
from apache_beam.coders.coders import (
    BigIntegerCoder,
    DecimalCoder,
    GlobalWindowCoder,
    IntervalWindowCoder,
    ListCoder,
    TupleSequenceCoder,
)
from apache_beam.utils.timestamp import Timestamp
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_ckpt.transforms._recorded import recorded_coder
from beam_ckpt.transforms.columns import coder_identity


class Leg(NamedTuple):
    at: Timestamp
    fare: decimal.Decimal
    day: datetime.date


class Trip(NamedTuple):
    name: str
    delay: Optional[int]  # noqa: UP045  Beam takes int | None for Any
    speeds: Sequence[float]
    tags: Mapping[str, bytes]
    first: Leg
    done: bool


coders.registry.register_coder(Leg, coders.RowCoder)
coders.registry.register_coder(Trip, coders.RowCoder)
TRIP = Trip(
    "a",
    None,
    [0.5, -0.0],
    {"k": b"\xff"},
    Leg(Timestamp(1.5), decimal.Decimal("9.90"), datetime.date(1970, 2, 1)),
    True,
)

PLAIN = [
    (coders.StrUtf8Coder(), st.text()),
    (coders.BytesCoder(), st.binary()),
    (coders.VarIntCoder(), st.integers(-(2**63), 2**63 - 1)),
    (coders.BooleanCoder(), st.booleans()),
    (coders.FloatCoder(), st.floats(allow_nan=False)),
    (BigIntegerCoder(), st.integers()),
    (DecimalCoder(), st.decimals(allow_nan=False, allow_infinity=False)),
]
COMPOSED = [
    lambda c, v: (coders.TupleCoder((c, coders.VarIntCoder())), st.tuples(v, st.just(1))),
    lambda c, v: (ListCoder(c), st.lists(v, max_size=3)),
    lambda c, v: (TupleSequenceCoder(c), st.lists(v, max_size=3).map(tuple)),
    lambda c, v: (coders.NullableCoder(c), st.one_of(st.none(), v)),
    lambda c, v: (
        coders.MapCoder(coders.StrUtf8Coder(), c),
        st.dictionaries(st.text(max_size=3), v, max_size=3),
    ),
]


@st.composite
def coder_and_value(draw):
    coder, values = draw(st.sampled_from(PLAIN))
    for compose in draw(st.lists(st.sampled_from(COMPOSED), max_size=4)):
        coder, values = compose(coder, values)
    return coder, draw(values)


@settings(max_examples=200)
@given(coder_and_value())
def test_a_coder_of_plain_data_is_made_from_its_name(example):
    coder, value = example
    found = recorded_coder(coder_identity(coder))
    assert found.readable
    assert coder_identity(found.coder) == coder_identity(coder)
    data = coder.encode(value)
    assert found.coder.decode(data) == coder.decode(data)


@pytest.mark.parametrize("coder", [GlobalWindowCoder(), IntervalWindowCoder()])
def test_the_coders_of_windows_are_known(coder):
    assert type(recorded_coder(coder_identity(coder)).coder) is type(coder)


def test_a_row_comes_back_field_by_field():
    coder = coders.registry.get_coder(Trip)
    found = recorded_coder(coder_identity(coder))
    assert found.readable
    row = found.coder.decode(coder.encode(TRIP))
    assert row._asdict() | {"first": tuple(row.first)} == TRIP._asdict() | {"first": TRIP.first}


@pytest.mark.parametrize("coder", [coders.FastPrimitivesCoder(), coders.PickleCoder()])
def test_a_coder_that_unpickles_is_readable_only_where_that_is_asked_for(coder):
    both = coders.TupleCoder((coders.StrUtf8Coder(), coder))
    for written in (coder, both):
        identity = coder_identity(written)
        assert not recorded_coder(identity).readable
        assert recorded_coder(identity, unsafe_unpickle=True).readable


class _Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def test_a_coder_that_is_not_known_keeps_its_bytes_whatever_is_said():
    for identity in (
        "my.module.MyCoder",
        "TupleCoder[StrUtf8Coder,my.module.MyCoder]",
        "os.system",
    ):
        assert not recorded_coder(identity, unsafe_unpickle=True).readable
    with pytest.raises(NotImplementedError):
        recorded_coder("my.module.MyCoder").coder.decode(pickle.dumps(_Bomb()))


@pytest.mark.parametrize(
    "identity",
    [
        "",
        "[",
        "TupleCoder[",
        "TupleCoder[VarIntCoder",
        "TupleCoder[VarIntCoder]]",
        "VarIntCoder VarIntCoder",
        "VarIntCoder?",
        "NullableCoder[VarIntCoder,VarIntCoder]",
        "RowCoder[a:my.module.MyCoder]",
        'RowCoder[a:LogicalTypeCoder["beam:logical_type:unknown:v1",VarIntCoder]]',
        "RowCoder[a:LogicalTypeCoder[beam:logical_type:python_callable:v1,StrUtf8Coder]]",
        "UnheardOf[VarIntCoder]",
        "TupleCoder[" * 1000 + "VarIntCoder" + "]" * 1000,
    ],
)
def test_what_is_no_identity_makes_no_coder(identity):
    assert recorded_coder(identity, unsafe_unpickle=True) is None


@settings(max_examples=300)
@given(st.text(alphabet='TupleCoder[]?,:"\\ VarIntRow' + string.ascii_lowercase, max_size=60))
def test_any_text_makes_a_coder_or_none(text):
    recorded_coder(text)
