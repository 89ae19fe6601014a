from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.sidecar import merge_newest_first, sidecar_schema

SCHEMA = sidecar_schema(pa.binary(), [("n", pa.int64())])
Row = tuple[bytes, bytes, int, bool]


def table(rows: list[Row], schema: pa.Schema = SCHEMA) -> pa.Table:
    """Rows of key, window, cell and whether it is a tombstone."""
    found = [
        {
            "key": key,
            "_key": key,
            "_window": window,
            "n": None if deleted else n,
            "_deleted": deleted,
            "_updated": n,
        }
        for key, window, n, deleted in rows
    ]
    return pa.Table.from_pylist(found, schema=schema)


def rows_of(found: pa.Table) -> list[tuple[object, ...]]:
    names = ["_key", "_window", "n", "_deleted"]
    return list(zip(*[found[name].to_pylist() for name in names], strict=True))


_rows = st.lists(
    st.tuples(
        st.sampled_from([b"", b"a", b"a\0", b"b", b"long key 1", b"long key 12"]),
        st.sampled_from([b"", b"\0", b"w"]),
        st.integers(0, 99),
        st.booleans(),
    ),
    max_size=12,
)


@given(st.lists(_rows, min_size=1, max_size=5), st.booleans())
def test_the_latest_row_of_each_key_and_window_is_left(
    newest_first: list[list[Row]], keep: bool
) -> None:
    latest: dict[tuple[bytes, bytes], Row] = {}
    for rows in reversed(newest_first):
        for row in rows:
            latest[row[:2]] = row
    expected = [
        (key, window, None if deleted else n, deleted)
        for (key, window), (_, _, n, deleted) in sorted(latest.items())
        if keep or not deleted
    ]
    merged = merge_newest_first([table(rows) for rows in newest_first], keep_tombstones=keep)
    assert rows_of(merged) == expected
    assert merged.schema == SCHEMA


def test_a_hundred_deltas_over_a_full_table() -> None:
    full = table([(b"%05d" % i, b"", 0, False) for i in range(2000)])
    deltas = [
        table([(b"%05d" % i, b"", d, d % 10 == 9) for i in range(d, 2000, 100)])
        for d in range(1, 101)
    ]
    merged = merge_newest_first([*reversed(deltas), full])
    found = {row[0]: row[2] for row in rows_of(merged)}
    assert len(found) == 2000 - 10 * 20
    assert found[b"00000"] is not None
    assert found[b"00142"] == 42
    assert b"00149" not in found


def test_a_cell_that_older_files_lack_is_empty_in_their_rows() -> None:
    wider = sidecar_schema(pa.binary(), [("n", pa.int64()), ("name", pa.string())])
    new, old = table([(b"b", b"", 2, False)], wider), table([(b"a", b"", 1, False)])
    merged = merge_newest_first([new, old])
    assert merged.select(["_key", "n", "name"]).to_pylist() == [
        {"_key": b"a", "n": 1, "name": None},
        {"_key": b"b", "n": 2, "name": None},
    ]


def test_columns_of_different_types_are_refused() -> None:
    other = sidecar_schema(pa.binary(), [("n", pa.string())])
    rows = table([(b"a", b"", 1, False)])
    text = pa.Table.from_pylist(
        [{"_key": b"b", "_window": b"", "n": "x", "_deleted": False, "_updated": 0}], schema=other
    )
    with pytest.raises(InvalidCheckpointError, match="columns of different types"):
        merge_newest_first([rows, text])


def test_empty_tables_merge_to_one_of_no_rows() -> None:
    merged = merge_newest_first([table([]), table([])])
    assert (len(merged), merged.schema) == (0, SCHEMA)


def test_a_merge_of_nothing_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no tables"):
        merge_newest_first([])
