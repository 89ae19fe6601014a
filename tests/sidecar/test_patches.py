"""Rows that hold only what changed, merged: against a fold in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.sidecar import (
    SidecarHeader,
    decode_sidecar,
    encode_sidecar,
    merge_newest_first,
    sidecar_schema,
)
from beam_ckpt.sidecar._schema import CellColumn

CELLS = [("n", pa.int64()), ("items", pa.list_(pa.int64())), ("word", pa.string())]
SCHEMA = sidecar_schema(pa.binary(), CELLS)
NAMES = [name for name, _ in CELLS]
REPLACE, KEEP, APPEND = 0, 1, 2


@dataclass(frozen=True)
class Row:
    """A row: of each cell what is done with it, and its value."""

    key: bytes
    window: bytes
    deleted: bool
    updated: int
    codes: tuple[int, ...]
    values: tuple[object, ...]

    @property
    def slot(self) -> tuple[bytes, bytes]:
        return self.key, self.window


def whole(key: bytes, *values: object, window: bytes = b"", updated: int = 0) -> Row:
    return Row(key, window, False, updated, (REPLACE,) * 3, values)


def tombstone(key: bytes) -> Row:
    return Row(key, b"", True, 0, (REPLACE,) * 3, (None, None, None))


def patch(key: bytes, codes: tuple[int, ...], *values: object) -> Row:
    return Row(key, b"", False, 0, codes, values)


def onto(row: Row, base: Row | None) -> Row:
    """What the rows of a key come to, one after the other."""
    if not any(row.codes) or base is None:
        return row
    codes, values = [], []
    for code, value, before, was in zip(
        row.codes, row.values, base.codes, base.values, strict=True
    ):
        if code == REPLACE:
            codes.append(REPLACE)
            values.append(value)
        elif code == KEEP:
            codes.append(before)
            values.append(was)
        else:
            codes.append(APPEND if before == KEEP else before)
            assert value is None or isinstance(value, list)
            assert was is None or isinstance(was, list)
            values.append([*(was or ()), *(value or ())] or None)
    return replace(row, codes=tuple(codes), values=tuple(values))


def table(rows: list[Row], patched: bool = True) -> pa.Table:
    found = [
        {
            "key": row.key,
            "_key": row.key,
            "_window": row.window,
            "_deleted": row.deleted,
            "_updated": row.updated,
            **dict(zip(NAMES, row.values, strict=True)),
        }
        for row in rows
    ]
    made = pa.Table.from_pylist(found, schema=SCHEMA)
    if not patched:
        return made
    patches = [bytes(row.codes) if any(row.codes) else None for row in rows]
    return made.append_column("_patch", pa.array(patches, pa.binary()))


def rows_of(found: pa.Table) -> list[Row]:
    names = found.column_names
    patches = found["_patch"].to_pylist() if "_patch" in names else [None] * len(found)
    assert not any(p is not None and not any(p) for p in patches), "a whole row has no patch"
    return [
        Row(
            row["_key"],
            row["_window"],
            row["_deleted"],
            row["_updated"].value // 1000
            if hasattr(row["_updated"], "value")
            else int(row["_updated"].timestamp() * 1_000_000),
            tuple(patch or bytes(3)),
            tuple(row[name] for name in NAMES),
        )
        for row, patch in zip(found.to_pylist(), patches, strict=True)
    ]


_items = st.lists(st.integers(0, 9), max_size=3).map(lambda items: items or None)


@st.composite
def _row(draw: st.DrawFn) -> Row:
    codes = draw(
        st.one_of(
            st.just((REPLACE,) * 3),
            st.tuples(
                st.sampled_from([REPLACE, KEEP]),
                st.sampled_from([REPLACE, KEEP, APPEND, APPEND]),
                st.sampled_from([REPLACE, KEEP]),
            ),
        )
    )
    deleted = not any(codes) and draw(st.booleans())
    values = (
        draw(st.none() | st.integers(0, 9)),
        draw(_items),
        draw(st.none() | st.sampled_from(["a", "b"])),
    )
    return Row(
        key=draw(st.sampled_from([b"", b"a", b"a\0", b"long key 1", b"long key 12"])),
        window=draw(st.sampled_from([b"", b"w"])),
        deleted=deleted,
        updated=draw(st.integers(0, 99)),
        codes=codes,
        values=tuple(
            None if deleted or code == KEEP else value
            for code, value in zip(codes, values, strict=True)
        ),
    )


_tables = st.lists(st.lists(_row(), max_size=12), min_size=1, max_size=6)


def folded(oldest_first: list[list[Row]]) -> list[Row]:
    latest: dict[tuple[bytes, bytes], Row] = {}
    for rows in oldest_first:
        for row in rows:
            latest[row.slot] = onto(row, latest.get(row.slot))
    return [row for _, row in sorted(latest.items())]


@given(_tables)
def test_a_merge_is_the_fold_of_the_rows_of_each_key(oldest_first: list[list[Row]]) -> None:
    merged = merge_newest_first(
        [table(rows) for rows in reversed(oldest_first)], keep_tombstones=True
    )
    assert rows_of(merged) == folded(oldest_first)
    assert merged.schema.names == [*SCHEMA.names, "_patch"]


@given(_tables, st.data())
def test_parts_merged_and_merged_again_are_one_merge(
    oldest_first: list[list[Row]], data: st.DataObject
) -> None:
    expected = folded(oldest_first)
    tables = [table(rows) for rows in oldest_first]
    while len(tables) > 1:
        start = data.draw(st.integers(0, len(tables) - 2))
        end = data.draw(st.integers(start + 2, len(tables)))
        part = merge_newest_first(reversed(tables[start:end]), keep_tombstones=True)
        tables[start:end] = [part]
    assert rows_of(merge_newest_first(tables, keep_tombstones=True)) == expected


@given(_tables)
def test_over_a_full_sidecar_all_rows_are_whole(oldest_first: list[list[Row]]) -> None:
    slots = {row.slot for rows in oldest_first for row in rows}
    base = [
        Row(key, window, False, 0, (REPLACE,) * 3, (1, [1, 2], "base")) for key, window in slots
    ]
    expected = [row for row in folded([base, *oldest_first]) if not row.deleted]
    newest_first = [table(rows) for rows in reversed(oldest_first)]
    merged = merge_newest_first([*newest_first, table(base, patched=False)])
    assert rows_of(merged) == expected
    assert merged.schema == SCHEMA


@given(_tables)
def test_what_changed_without_what_it_stands_on_is_refused(oldest_first: list[list[Row]]) -> None:
    expected = folded(oldest_first)
    newest_first = [table(rows) for rows in reversed(oldest_first)]
    if any(any(row.codes) for row in expected):
        with pytest.raises(InvalidCheckpointError, match="is in none of the sidecars"):
            merge_newest_first(newest_first)
    else:
        assert rows_of(merge_newest_first(newest_first)) == [r for r in expected if not r.deleted]


def test_a_million_small_steps_are_one_row() -> None:
    base = table([whole(b"%05d" % i, 0, [0], "w") for i in range(1000)], patched=False)
    deltas = [
        table([patch(b"%05d" % i, (REPLACE, APPEND, KEEP), d, [d], None) for i in range(1000)])
        for d in range(1, 101)
    ]
    merged = merge_newest_first([*reversed(deltas), base])
    assert merged["n"].to_pylist() == [100] * 1000
    assert merged["items"].to_pylist() == [[*range(101)]] * 1000
    assert merged["word"].to_pylist() == ["w"] * 1000


def test_a_cell_that_a_table_lacks_is_empty_in_its_rows_whole_or_not() -> None:
    base = table([whole(b"a", 1, [1], "w"), whole(b"b", 1, [1], "w")], patched=False)
    newer = table([patch(b"a", (KEEP, APPEND, KEEP), None, [2], None)]).drop_columns(["word"])
    patches = pa.array([bytes((KEEP, APPEND))], pa.binary())
    newer = newer.set_column(newer.column_names.index("_patch"), "_patch", patches)
    merged = merge_newest_first([newer, base]).select(["_key", *NAMES])
    assert merged.to_pylist() == [
        {"_key": b"a", "n": 1, "items": [1, 2], "word": None},
        {"_key": b"b", "n": 1, "items": [1], "word": "w"},
    ]
    older = table([whole(b"a", 1, [1], None)], patched=False).drop_columns(["word"])
    newest = table([patch(b"a", (KEEP, APPEND, KEEP), None, [2], None)])
    merged = merge_newest_first([newest, older])
    assert merged.schema == SCHEMA, "in the order of the newest"
    assert merged.select(NAMES).to_pylist() == [{"n": 1, "items": [1, 2], "word": None}]


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (b"\0\1", "2 to 2 bytes, and there are 3 cells"),
        (b"\0\1\3", "a byte 3"),
        (b"\2\0\0", "items that are added to 'n', which has one value"),
    ],
)
def test_a_malformed_patch_is_refused(bad: bytes, what: str) -> None:
    rows = table([whole(b"a", 1, [1], "w")], patched=False)
    with pytest.raises(InvalidCheckpointError, match=what):
        merge_newest_first([rows.append_column("_patch", pa.array([bad], pa.binary()))])


def test_a_tombstone_that_is_not_whole_is_refused() -> None:
    rows = table([replace(tombstone(b"a"), codes=(KEEP,) * 3)])
    with pytest.raises(InvalidCheckpointError, match="a patch of a tombstone"):
        merge_newest_first([rows])


# ------------------------------------------------------------------------------------- in a file

HEADER = SidecarHeader(
    "op",
    0,
    None,
    "delta",
    "BytesCoder",
    "GlobalWindowCoder",
    tuple(CellColumn(name, name, "bag", "VarIntCoder") for name in NAMES),
    format_version=2,
)
ROWS = [
    whole(b"a", 1, [1], "w"),
    patch(b"b", (KEEP, APPEND, REPLACE), None, [2], "x"),
    patch(b"c", (REPLACE, REPLACE, KEEP), None, None, None),
]


def test_a_delta_has_its_patches_in_a_file() -> None:
    header, found = decode_sidecar(encode_sidecar(table(ROWS), HEADER), where="a test")
    assert header.format_version == 2
    assert rows_of(found) == ROWS


def test_a_full_sidecar_cannot_have_patches() -> None:
    with pytest.raises(InvalidCheckpointError, match="what they stand on is missing"):
        encode_sidecar(table(ROWS), replace(HEADER, kind="full"))
    with pytest.raises(InvalidCheckpointError, match="has the columns"):
        encode_sidecar(table(ROWS), replace(HEADER, format_version=1))


def test_a_full_sidecar_costs_nothing_more() -> None:
    rows = table([whole(b"a", 1, [1], "w")], patched=False)
    full = replace(HEADER, kind="full")
    old, new = (len(encode_sidecar(rows, replace(full, format_version=v))) for v in (1, 2))
    assert old == new


@pytest.mark.parametrize("columns", [["items"], ["key", "word", "n"], ["key"]])
def test_some_columns_are_merged_as_all_are(columns: list[str]) -> None:
    base = table([whole(b"b", 1, [1], "w"), whole(b"c", 1, [1], "w")], patched=False)
    files = [
        encode_sidecar(table(ROWS), HEADER),
        encode_sidecar(base, replace(HEADER, kind="full")),
    ]
    every, some = (
        merge_newest_first(
            [decode_sidecar(file, where="a test", columns=chosen)[1] for file in files]
        )
        for chosen in (None, columns)
    )
    assert some.select(columns).to_pylist() == every.select(columns).to_pylist()
    assert "_patch" not in some.column_names
