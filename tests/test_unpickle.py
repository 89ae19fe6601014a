"""Pickles in saved state: opened only where somebody says so."""

from __future__ import annotations

import dataclasses
import enum
import json
import pickle
import unittest.mock
from datetime import timedelta
from typing import NamedTuple

import pytest
from apache_beam.coders import FastPrimitivesCoder
from apache_beam.utils.timestamp import MAX_TIMESTAMP, MIN_TIMESTAMP, Duration, Timestamp
from hypothesis import given
from hypothesis import strategies as st

from beam_ckpt._primitives import as_json
from beam_ckpt._unpickle import beam_time, plain, unpickled

ANY = FastPrimitivesCoder()


class Bomb:
    """Fails the test when it is opened."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was opened",)


def test_a_bomb_goes_off_only_where_it_was_said():
    for value in (Bomb(), [1, Bomb()], {"a": (Bomb(),)}, (Timestamp(1), Bomb())):
        data = ANY.encode(value)
        assert "undecoded" in as_json(data)
        with pytest.raises(pytest.fail.Exception):
            as_json(data, unsafe_unpickle=True)


@given(st.integers(MIN_TIMESTAMP.micros, MAX_TIMESTAMP.micros))
def test_times_and_durations_are_told_without_opening_the_pickle(micros):
    at, span = Timestamp(micros=micros), Duration(micros=micros)
    with unittest.mock.patch("pickle.loads", side_effect=AssertionError("it was opened")):
        said = json.loads(as_json(ANY.encode((at, span, 1))))
    assert said[2] == 1
    seconds = timedelta(microseconds=abs(micros)) if abs(micros) < 10**17 else None
    if seconds is not None:
        assert said[1].startswith("-PT" if micros < 0 else "PT")
        whole, _, rest = said[1].strip("-PTS").partition(".")
        assert int(whole) * 10**6 + int((rest + "000000")[:6]) == abs(micros)
    if abs(micros) < 6 * 10**16:
        assert said[0].endswith("Z") and Timestamp.from_rfc3339(said[0]) == at


def test_a_pickle_that_only_looks_like_a_time_is_none():
    real = pickle.dumps(Duration(5), 4)
    assert beam_time(real) == "PT5S"
    for fake in (
        real.replace(b"Duration", b"Dura-ion"),
        real.replace(b"apache_beam.utils.timestamp", b"apache_beam.utils.timestamq"),
        real.replace(b"micros", b"macros"),
        real[:-1],
        b"",
        b"cos\nsystem\n(S'true'\ntR.",
        pickle.dumps(Bomb()),
        pickle.dumps({"a": Duration(5)}),
        pickle.dumps([Duration(5)]),
    ):
        assert beam_time(fake) is None


@dataclasses.dataclass
class Point:
    x: int
    tags: set[str]


class Pair(NamedTuple):
    a: int
    b: object


class Colour(enum.IntEnum):
    RED = 1


class Odd:
    __slots__ = ("a",)

    def __repr__(self) -> str:
        return "odd"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Point(1, {"b", "a"}), {"python": f"{__name__}.Point", "x": 1, "tags": ["a", "b"]}),
        (Pair(1, Timestamp(2)), {"a": 1, "b": "1970-01-01T00:00:02Z"}),
        (Duration(-1.5), "-PT1.5S"),
        (float("nan"), "nan"),
        (2**70, 2**70),
        (b"\x00\xff", "0x00ff"),
        ({1: "a"}, [[1, "a"]]),
        (Colour.RED, {"python": f"{__name__}.Colour", "repr": "<Colour.RED: 1>"}),
        (Odd(), {"python": f"{__name__}.Odd", "repr": "odd"}),
    ],
)
def test_python_values_have_a_form_in_json(value, expected):
    found = plain(value)
    assert found == expected
    json.dumps(found, allow_nan=False)


def test_a_value_within_itself_ends():
    loop: list[object] = []
    loop.append(loop)
    assert "repr" in json.dumps(plain(loop))


def test_what_cannot_be_opened_says_why():
    gone = pickle.dumps(Point(1, set())).replace(b"Point", b"Paint")
    said = unpickled(gone)
    assert isinstance(said, dict) and said["undecoded"] == "0x" + gone.hex()
    assert "AttributeError" in said["error"]
