"""Untyped values as JSON: what Beam's coder wrote, and never a pickle opened."""

from __future__ import annotations

import json
import math
import os
import pickle

import pytest
from apache_beam import coders
from apache_beam.transforms import combiners
from hypothesis import given
from hypothesis import strategies as st

from beam_ckpt._primitives import as_json

ANY = coders.FastPrimitivesCoder()

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(values)
def test_a_value_is_the_json_that_python_makes_of_it(value):
    assert json.loads(as_json(ANY.encode(value))) == json.loads(json.dumps(value))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"\x00\xff", '"0x00ff"'),
        ({1, 2}, "[1, 2]"),
        ({1: "a", "b": 2}, '[[1, "a"], ["b", 2]]'),
        ({}, "{}"),
        (math.nan, '"nan"'),
        (-math.inf, '"-inf"'),
        (-0.0, "-0.0"),
        ("é🚕\x00", '"é🚕\\u0000"'),
    ],
)
def test_what_json_has_no_form_for(value, expected):
    assert as_json(ANY.encode(value)) == expected


@pytest.mark.parametrize(
    ("fn", "inputs", "expected"),
    [
        (combiners.MeanCombineFn(), [1, 2, 6], [9, 3]),
        (combiners.CountCombineFn(), "abc", 3),
        (combiners.ToListCombineFn(), "ab", ["a", "b"]),
        (combiners.ToDictCombineFn(), [("a", 1)], {"a": 1}),
    ],
)
def test_accumulators_of_beams_combiners_show_what_is_in_them(fn, inputs, expected):
    accumulator = fn.add_inputs(fn.create_accumulator(), inputs)
    assert json.loads(as_json(fn.get_accumulator_coder().encode(accumulator))) == expected


class Bomb:
    def __reduce__(self):
        return os.abort, ()


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [1, v], lambda v: {"a": (v, 2)}])
def test_a_pickle_is_never_opened_wherever_it_is(wrap):
    data = ANY.encode(wrap(Bomb()))
    found = as_json(data)
    assert "undecoded" in found
    assert len(found) > len(pickle.dumps(Bomb())), "all of it is still there"


@given(st.binary(max_size=40))
def test_bytes_of_anybody_are_answered_and_not_followed(data):
    json.loads(as_json(data))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x05\xff\xff\xff\xff\x0f",
        b"\x05\x01" * 500,
        b"\x04\xff",
        b"\x00\x00",
        b"\x01" + b"\x80" * 11,
    ],
)
def test_what_is_no_value_is_shown_as_it_is(data):
    assert json.loads(as_json(data)) == {"undecoded": "0x" + data.hex()}
