"""Keys as bytes without Beam: the same bytes as Beam's own coders write."""

from __future__ import annotations

import json

import pytest
from apache_beam.coders import (
    BooleanCoder,
    BytesCoder,
    FloatCoder,
    StrUtf8Coder,
    TupleCoder,
    VarIntCoder,
)
from hypothesis import given
from hypothesis import strategies as st

from beam_ckpt._keys import encode_key, parse_key
from beam_ckpt.transforms.columns import coder_identity

SIMPLE = [
    (StrUtf8Coder(), st.text(st.characters(exclude_categories=["Cs"]))),
    (VarIntCoder(), st.integers(-(2**63), 2**63 - 1)),
    (BytesCoder(), st.binary()),
    (BooleanCoder(), st.booleans()),
]


def with_key(coder_and_keys):
    coder, keys = coder_and_keys
    return st.tuples(st.just(coder), keys)


simple = st.sampled_from(SIMPLE)
tuples = st.recursive(
    simple,
    lambda inner: st.lists(inner, min_size=1, max_size=4).map(
        lambda parts: (TupleCoder([c for c, _ in parts]), st.tuples(*[k for _, k in parts]))
    ),
    max_leaves=6,
)
keys = st.one_of(simple, tuples).flatmap(with_key)


@given(keys)
def test_a_key_has_the_bytes_that_its_coder_writes(coder_and_key):
    coder, key = coder_and_key
    assert encode_key(coder_identity(coder), key) == coder.encode(key)


def typed(key):
    """As somebody types it."""
    if isinstance(key, str):
        return key
    return json.dumps(jsonable(key)) if not isinstance(key, bytes) else "0x" + key.hex()


def jsonable(key):
    if isinstance(key, tuple):
        return [jsonable(item) for item in key]
    return "0x" + key.hex() if isinstance(key, bytes) else key


@given(keys)
def test_a_key_is_read_as_it_is_shown(coder_and_key):
    coder, key = coder_and_key
    assert parse_key(coder_identity(coder), typed(key)) == key


@pytest.mark.parametrize(
    "coder",
    [
        "FastPrimitivesCoder",
        "TupleCoder[StrUtf8Coder,FloatCoder]",
        "TupleCoder[StrUtf8Coder",
        "TupleCoder[]",
        "StrUtf8Coder]",
        "mine.StrUtf8Coder",
        'RowCoder["a b":StrUtf8Coder]',
        "",
    ],
)
def test_other_coders_are_not_guessed(coder):
    assert encode_key(coder, "a") is None
    assert parse_key(coder, "a") is None


@pytest.mark.parametrize(
    ("coder", "key"),
    [("StrUtf8Coder", 1), ("VarIntCoder", 2**63), ("TupleCoder[VarIntCoder]", (1, 2))],
)
def test_what_cannot_be_a_key_is_refused(coder, key):
    with pytest.raises(ValueError, match="is no key of"):
        encode_key(coder, key)


@pytest.mark.parametrize("text", ["", "a", "[1]", "1 2"])
def test_what_is_typed_and_no_key_is_refused(text):
    with pytest.raises(ValueError):
        key = parse_key("VarIntCoder", text)
        encode_key("VarIntCoder", key)


def test_floats_are_no_keys():
    assert encode_key(coder_identity(FloatCoder()), 1.0) is None
