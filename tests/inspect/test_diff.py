"""The comparison of two tables, value by value, for every type that a column can have."""

from __future__ import annotations

import math
import struct

import pyarrow as pa
import pytest

from beam_ckpt.inspect._diff import _both, _compare

OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
FAR = 2**62  # microseconds: beyond Python's calendar
TIME = pa.timestamp("us", tz="UTC")
MS = pa.timestamp("ms", tz="UTC")

VALUES = [
    (pa.int64(), 1, 2),
    (pa.int64(), 0, None),
    (pa.bool_(), True, False),
    (pa.string(), "", None),
    (pa.string(), "a", "b"),
    (pa.binary(), b"\x00", b""),
    (pa.float64(), math.nan, OTHER_NAN),
    (pa.float64(), 0.0, -0.0),
    (pa.float32(), 1.5, math.nan),
    (TIME, FAR, FAR - 1),
    (MS, FAR, None),
    (pa.list_(pa.float64()), [math.nan], [1.0]),
    (pa.list_(pa.int64()), [], None),
    (pa.list_(pa.int64()), [1, 2], [2, 1]),
    (pa.list_(TIME), [FAR], [FAR + 1]),
    (pa.struct([("f0", pa.string()), ("f1", MS)]), ("a", FAR), ("a", 0)),
    (pa.map_(pa.string(), pa.int64()), [("a", 1)], [("a", 2)]),
    (pa.list_(pa.struct([("fire", TIME), ("tag", pa.string())])), [(FAR, "")], [(FAR, "x")]),
]


def table(kind: pa.DataType, rows: dict[bytes, object], key: pa.DataType | None = None) -> pa.Table:
    keys = sorted(rows)
    key_type = key or pa.binary()
    shown = [(name.decode(), 1) if pa.types.is_struct(key_type) else name for name in keys]
    return pa.table(
        {
            "key": pa.array(shown, key_type),
            "cell": pa.array([rows[name] for name in keys], kind),
            "_key": pa.array(keys, pa.binary()),
            "_window": pa.array([b""] * len(keys), pa.binary()),
            "_updated": pa.array([1] * len(keys), TIME),
        }
    )


def changes(before: pa.Table, after: pa.Table) -> list[tuple[str, bytes]]:
    found = _compare(*_both(before, after))
    return list(zip(found["change"].to_pylist(), found["_key"].to_pylist(), strict=True))


@pytest.mark.parametrize(("kind", "one", "two"), VALUES, ids=str)
def test_a_value_is_itself_and_no_other(kind: pa.DataType, one: object, two: object) -> None:
    before = table(kind, {b"a": one, b"b": one, b"c": two})
    after = table(kind, {b"a": two, b"b": one, b"c": two})
    assert changes(before, after) == [("changed", b"a")]
    assert changes(before, before) == []


@pytest.mark.parametrize(("kind", "one", "two"), VALUES, ids=str)
def test_what_came_and_what_went(kind: pa.DataType, one: object, two: object) -> None:
    before, after = table(kind, {b"a": one, b"b": two}), table(kind, {b"b": two, b"c": one})
    assert changes(before, after) == [("removed", b"a"), ("added", b"c")]
    nothing = pa.table({})
    assert changes(nothing, after) == [("added", b"b"), ("added", b"c")]
    assert changes(before, nothing) == [("removed", b"a"), ("removed", b"b")]
    assert changes(before.slice(0, 0), after.slice(0, 0)) == []


def test_keys_of_parts_are_kept_on_both_sides() -> None:
    pair = pa.struct([("f0", pa.string()), ("f1", pa.int64())])
    before, after = table(pa.int64(), {b"a": 1}, pair), table(pa.int64(), {b"b": 1}, pair)
    found = _compare(*_both(before, after)).to_pylist()
    assert [row["key"] for row in found] == [{"f0": "a", "f1": 1}, {"f0": "b", "f1": 1}]


def test_a_key_and_a_window_are_not_taken_for_another_pair() -> None:
    one = table(pa.int64(), {b"ab": 1})
    two = table(pa.int64(), {b"a": 1}).set_column(3, "_window", pa.array([b"b"], pa.binary()))
    assert changes(one, two) == [("added", b"a"), ("removed", b"ab")]


def test_a_cell_that_only_one_side_has_is_empty_on_the_other() -> None:
    before = table(pa.int64(), {b"a": 1, b"b": None}).drop_columns(["cell"])
    after = table(pa.int64(), {b"a": 1, b"b": None})
    assert changes(before, after) == [("changed", b"a")]
    assert changes(after, before) == [("changed", b"a")]
