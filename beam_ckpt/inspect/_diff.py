"""What changed between two checkpoints, key by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from beam_ckpt.inspect._catalog import AnyStore, At, find_checkpoint, find_operator, open_existing
from beam_ckpt.inspect._readable import WINDOW_TIMES, Reading, Untyped, readable_rows
from beam_ckpt.inspect._schemas import Schema
from beam_ckpt.inspect._state import one_table, read_group, together
from beam_ckpt.manifest import CheckpointManifest, PartitionSnapshotEntry
from beam_ckpt.sidecar import SharedRows
from beam_ckpt.store import CheckpointStore

__all__ = ["DIFF", "diff"]

DIFF = pa.schema(
    [
        pa.field("change", pa.string(), nullable=False),
        pa.field("_key", pa.binary(), nullable=False),
        pa.field("_window", pa.binary(), nullable=False),
    ]
)
"""Schema of `diff`, beside `key` (after `change`; it has the type of the operator's keys),
`_window_start` and `_window_end` where windows are intervals, and a struct of `before` and `after`
for each cell, `_timers`, `_carried` and `_updated`. `change` is `added`, `removed` or `changed`."""

_IDENTITY = ("key", "_key", "_window", *WINDOW_TIMES)


def diff(
    store: AnyStore,
    a: At,
    b: At,
    uid: str,
    *,
    untyped: Untyped = "bytes",
    unsafe_unpickle: bool = False,
    schemas: Iterable[Schema] = (),
) -> pa.Table:
    """Compares the state of one operator in two checkpoints.

    Key groups whose files are the same in both are not read, so that the difference between
    neighbours costs what changed. A key that was touched and is as it was before is no change.

    Args:
        store: A path, a URL or a store.
        a: The id of the one before, or `latest`.
        b: The id of the one after, or `latest`.
        uid: The operator.
        unsafe_unpickle: See `state`.
        schemas: See `state`.
        untyped: See `state`. As JSON a list and a tuple of the same items are the same.

    Returns:
        A table of one row per key and window that differs, sorted by `_key` and `_window` in each
        key group; see `DIFF`.

    Raises:
        CheckpointNotFoundError: There is no store, no such checkpoint, or no such operator in it.
        InvalidCheckpointError: A sidecar is damaged.
    """
    opened, reading = open_existing(store), Reading.of(untyped, unsafe_unpickle, schemas)
    before, after = find_checkpoint(opened, a), find_checkpoint(opened, b)
    tables = [_compare(*pair) for pair in _pairs(opened, before, after, uid, reading)]
    found = [table for table in tables if len(table)] or tables[:1]
    if not found:
        return pa.schema([DIFF.field(0), pa.field("key", pa.null()), *list(DIFF)[1:]]).empty_table()
    return one_table(found)


def _pairs(
    store: CheckpointStore,
    before: CheckpointManifest,
    after: CheckpointManifest,
    uid: str,
    reading: Reading,
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yields rows of both sides that can be compared with each other alone."""
    shared = SharedRows()

    def read(manifest: CheckpointManifest, partition: PartitionSnapshotEntry | None) -> pa.Table:
        if partition is None:
            return pa.table({})
        rows = read_group(store, partition, shared=shared)
        return readable_rows(rows, manifest, uid, reading)

    old, new = (
        {p.partition_id: p for p in find_operator(manifest, uid, store).partitions}
        for manifest in (before, after)
    )
    if before.key_group_count != after.key_group_count:  # a key is in another group now
        one = [read(before, partition) for partition in old.values()]
        two = [read(after, partition) for partition in new.values()]
        yield _both(together(one) if one else pa.table({}), together(two) if two else pa.table({}))
        return
    for group in sorted({*old, *new}):
        if _files(old.get(group)) != _files(new.get(group)):
            yield _both(read(before, old.get(group)), read(after, new.get(group)))


def _files(partition: PartitionSnapshotEntry | None) -> list[tuple[str, tuple[int, int]]]:
    entries = () if partition is None else partition.sidecars
    return [(entry.sha256, entry.row_range) for entry in entries]


def _both(before: pa.Table, after: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Gives both sides the same columns, in the order of the later one's."""
    if not before.num_columns or not after.num_columns:
        schema = (before if before.num_columns else after).schema
        return (
            before if before.num_columns else schema.empty_table(),
            after if after.num_columns else schema.empty_table(),
        )
    schema = pa.unify_schemas([after.schema, before.schema], promote_options="permissive")
    one, two = (
        pa.table(
            [
                side[f.name].cast(f.type)
                if f.name in side.column_names
                else pa.nulls(len(side), f.type)
                for f in schema
            ],
            schema=pa.schema([f.with_nullable(True) for f in schema]),
        )
        for side in (before, after)
    )
    return one, two


def _compare(before: pa.Table, after: pa.Table) -> pa.Table:
    names = [_name_of_rows(side) for side in (before, after)]
    in_after = pc.index_in(names[0], names[1])
    in_before = pc.index_in(names[1], names[0])
    added = np.flatnonzero(in_before.is_null().to_numpy(zero_copy_only=False))
    removed = np.flatnonzero(in_after.is_null().to_numpy(zero_copy_only=False))
    stayed = np.flatnonzero(in_after.is_valid().to_numpy(zero_copy_only=False))
    partner = in_after.drop_null().to_numpy().astype(np.int64)
    content = [n for n in after.column_names if n not in (*_IDENTITY, "_updated")]
    differs = np.zeros(len(stayed), np.bool_)
    for name in content:
        differs |= _differ(before[name].take(stayed), after[name].take(partner))
    stayed, partner = stayed[differs], partner[differs]
    # Rows of each side, -1 where it has none.
    left = np.concatenate([removed, stayed, np.full(len(added), -1)])
    right = np.concatenate([np.full(len(removed), -1), partner, added])
    change = ["removed"] * len(removed) + ["changed"] * len(stayed) + ["added"] * len(added)
    at_left, at_right = (pa.array(rows, mask=rows < 0) for rows in (left, right))
    columns: dict[str, pa.Array] = {"change": pa.array(change, pa.string())}
    for name in (n for n in _IDENTITY if n in after.column_names):
        sides = (before[name].take(at_left), after[name].take(at_right))
        columns[name] = pc.if_else(pa.array(left < 0), sides[1], sides[0])
    for name in (*content, "_updated"):
        values = [
            side[name].take(rows).combine_chunks()
            for side, rows in ((before, at_left), (after, at_right))
        ]
        columns[name] = pa.StructArray.from_arrays(values, names=["before", "after"])
    return pa.table(columns).sort_by([("_key", "ascending"), ("_window", "ascending")])


def _name_of_rows(table: pa.Table) -> pa.Array:
    """Key and window of each row in one value; no two have the same."""
    keys, windows = (table[name].combine_chunks() for name in ("_key", "_window"))
    sizes = pc.cast(pc.cast(pc.binary_length(keys), pa.string()), pa.binary())
    return pc.binary_join_element_wise(sizes, keys, windows, pa.scalar(b":", pa.binary()))


def _differ(
    one: pa.ChunkedArray, two: pa.ChunkedArray
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which values are not the same ones: a NaN is itself, and 0.0 is not -0.0."""
    bits = _bits(one.type)
    if pa.types.is_nested(one.type):
        # Times beyond the calendar have no Python value.
        pairs = zip(one.cast(bits).to_pylist(), two.cast(bits).to_pylist(), strict=True)
        return np.fromiter((repr(a) != repr(b) for a, b in pairs), np.bool_, len(one))
    if pa.types.is_floating(one.type):
        one, two = (
            pa.chunked_array([c.view(bits) for c in side.chunks], bits) for side in (one, two)
        )
    unlike = pc.not_equal(one, two)
    unlike = pc.if_else(pc.is_null(unlike), pc.not_equal(pc.is_null(one), pc.is_null(two)), unlike)
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = unlike.to_numpy()
    return found


def _bits(type: pa.DataType) -> pa.DataType:
    """A type with times as their numbers; a float as the integer of its size."""
    if pa.types.is_timestamp(type) or pa.types.is_duration(type):
        return pa.int64()
    if pa.types.is_float64(type):
        return pa.int64()
    if pa.types.is_float32(type):
        return pa.int32()
    return _without_times(type)


def _without_times(type: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(type) or pa.types.is_duration(type):
        return pa.int64()
    if pa.types.is_struct(type):
        return pa.struct([f.with_type(_without_times(f.type)) for f in type])
    if pa.types.is_map(type):
        return pa.map_(_without_times(type.key_type), _without_times(type.item_type))
    if pa.types.is_list(type):
        return pa.list_(type.value_field.with_type(_without_times(type.value_type)))
    return type
