"""The state itself: of all keys, of one, its timers, and what it was before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from beam_ckpt._keys import encode_key
from beam_ckpt.errors import CheckpointNotFoundError, InvalidCheckpointError
from beam_ckpt.inspect._catalog import (
    EVENT_TIME,
    AnyStore,
    At,
    find_checkpoint,
    find_operator,
    nearest,
    open_existing,
)
from beam_ckpt.inspect._readable import WINDOW_TIMES, Reading, Untyped, readable_rows
from beam_ckpt.inspect._schemas import Schema
from beam_ckpt.keygroups import key_group
from beam_ckpt.manifest import CheckpointManifest, PartitionSnapshotEntry
from beam_ckpt.sidecar import SharedRows, cell_column_name, read_chain
from beam_ckpt.store import CheckpointStore

__all__ = [
    "HISTORY",
    "TIMERS",
    "history",
    "is_key",
    "one_table",
    "read_group",
    "state",
    "state_by_key_group",
    "timers",
    "together",
]

TIMERS = pa.schema(
    [
        pa.field("family", pa.string()),
        pa.field("tag", pa.string()),
        pa.field("domain", pa.string()),
        pa.field("fire", EVENT_TIME),
        pa.field("output", EVENT_TIME),
        pa.field("_key", pa.binary()),
        pa.field("_window", pa.binary()),
    ]
)
"""Schema of `timers`, after `key`, which has the type of the operator's keys. `fire` is when the
timer is due; `output` the timestamp of what it emits, null for `fire`. Where windows are intervals
`_window_start` and `_window_end` come after these."""

HISTORY = pa.schema(
    [
        pa.field("id", pa.uint64(), nullable=False),
        pa.field("epoch", pa.uint64()),
        pa.field("boundary", EVENT_TIME),
        pa.field("present", pa.bool_()),
        pa.field("problem", pa.string()),
    ]
)
"""Schema of `history`, before the columns of `state`. `present` is false where the key had no
state, and null where the checkpoint cannot be read (`problem`)."""

_OWN = ("_key", "_window", "_updated")


def state(
    store: AnyStore,
    uid: str,
    *,
    at: At = "latest",
    key: object = None,
    cells: Sequence[str] | None = None,
    untyped: Untyped = "bytes",
    unsafe_unpickle: bool = False,
    schemas: Iterable[Schema] = (),
) -> pa.Table:
    """Reads the state of one operator: one row per key and window.

    The columns are those of a sidecar without `_deleted`: `key` and one column per cell, typed
    where their coders have an Arrow type and binary elsewhere (null = empty), `_key` and
    `_window` (encoded), `_window_start` and `_window_end` (where windows are intervals),
    `_updated` (event time of the last touch), `_timers` and `_carried` (outputs dated beyond the
    cut).

    Args:
        store: A path, a URL or a store.
        uid: The operator.
        at: The id of a checkpoint; `latest` is the newest valid one.
        key: Only this key, as a string, an integer, bytes or a tuple of these. Only its key
            group's files are read, and of these only the row groups that can have it. Where keys
            have another coder, all files are read and `key` is compared with the column (its
            encoded bytes, where that is binary).
        cells: Only these cells: the columns are then `key`, the cells', `_key`, `_window` and
            `_updated`, and no others are decoded.
        untyped: What cells are whose coder nobody chose, so that Beam took that of anything:
            ``"bytes"``, as Beam wrote them, or ``"json"``, as text. Tuples and sets are lists
            then, bytes ``"0x..."``, and what Beam pickled, which is not opened,
            ``{"undecoded": "0x..."}``.
        unsafe_unpickle: Open pickles as well, in cells without a type and of coders that pickle:
            they come as JSON. That runs whatever code the pickles name: say so only of a store
            that nobody else writes to.
        schemas: What cells of protobuf or Avro are to be read with, as structs: message classes,
            and Avro schemas (mappings, or their JSON). Without, they are the bytes that were saved.

    Raises:
        CheckpointNotFoundError: There is no store, no such checkpoint, or no such operator or
            cell in it; names the nearest.
        NoValidCheckpointError: `latest`, and all checkpoints are damaged.
        InvalidCheckpointError: A sidecar is damaged.
        ValueError: `key` cannot be a key of this operator.
    """
    return together(
        list(
            state_by_key_group(
                store,
                uid,
                at=at,
                key=key,
                cells=cells,
                untyped=untyped,
                unsafe_unpickle=unsafe_unpickle,
                schemas=schemas,
            )
        )
    )


def state_by_key_group(
    store: AnyStore,
    uid: str,
    *,
    at: At = "latest",
    key: object = None,
    cells: Sequence[str] | None = None,
    untyped: Untyped = "bytes",
    unsafe_unpickle: bool = False,
    schemas: Iterable[Schema] = (),
) -> Iterator[pa.Table]:
    """Reads what `state` does, one table per key group: bounded by the largest of them."""
    opened, reading = open_existing(store), Reading.of(untyped, unsafe_unpickle, schemas)
    if key is None or at != "latest":
        manifest = find_checkpoint(opened, at)
        yield from _by_key_group(opened, manifest, uid, key, cells, reading)
        return
    # For one key the pointer is enough: what is read is verified. To make sure that all of the
    # checkpoint is there takes a request per file.
    manifest = _pointed(opened) or find_checkpoint(opened)
    try:
        tables = list(_by_key_group(opened, manifest, uid, key, cells, reading))
    except (InvalidCheckpointError, CheckpointNotFoundError):
        valid = find_checkpoint(opened)
        if valid.id == manifest.id:
            raise
        tables = list(_by_key_group(opened, valid, uid, key, cells, reading))
    yield from tables


def timers(store: AnyStore, uid: str, *, at: At = "latest", key: object = None) -> pa.Table:
    """Lists the pending timers of one operator, the earliest first.

    Args:
        store: A path, a URL or a store.
        uid: The operator.
        at: The id of a checkpoint; `latest` is the newest valid one.
        key: See `state`.

    Returns:
        A table of `key` and the schema `TIMERS`.

    Raises:
        CheckpointError: As `state` does.
    """
    found = []
    for rows in state_by_key_group(store, uid, at=at, key=key):
        lists = rows["_timers"].combine_chunks()
        owner = pc.list_parent_indices(lists)
        timer = pc.list_flatten(lists)
        columns = {"key": rows["key"].take(owner)}
        for name in TIMERS.names:
            own = name in _OWN
            columns[name] = rows[name].take(owner) if own else pc.struct_field(timer, name)
        for name in WINDOW_TIMES:
            if name in rows.column_names:
                columns[name] = rows[name].take(owner)
        found.append(pa.table(columns))
    table = together(found)
    if not found:
        return pa.schema([pa.field("key", pa.null()), *TIMERS]).empty_table()
    own_fields = [f for f in table.schema if f.name not in TIMERS.names]
    table = table.cast(pa.schema([own_fields[0], *TIMERS, *own_fields[1:]]))
    order = ("fire", "_key", "_window", "family", "tag")
    return table.sort_by([(name, "ascending") for name in order])


def history(
    store: AnyStore,
    uid: str,
    key: object,
    *,
    cells: Sequence[str] | None = None,
    untyped: Untyped = "bytes",
    unsafe_unpickle: bool = False,
    schemas: Iterable[Schema] = (),
) -> pa.Table:
    """Reads what one key's state was at each retained checkpoint, the oldest first.

    Args:
        store: A path, a URL or a store.
        uid: The operator.
        key: The key; see `state`.
        cells: See `state`.
        untyped: See `state`.
        unsafe_unpickle: See `state`.
        schemas: See `state`.

    Returns:
        A table of the schema `HISTORY` and the columns of `state`: a row per finalized checkpoint
        and window. A checkpoint in which the key has no state, or which is damaged, has one row
        with nulls.

    Raises:
        CheckpointNotFoundError: There is no store, or no checkpoint with such an operator.
        ValueError: `key` cannot be a key of this operator.
    """
    opened, reading = open_existing(store), Reading.of(untyped, unsafe_unpickle, schemas)
    found: list[tuple[dict[str, object], pa.Table | None]] = []
    missing: CheckpointNotFoundError | None = None
    unknown, known = set(cells or ()), set[str]()
    shared = SharedRows()
    for id in opened.list_ids():
        facts: dict[str, object] = {"id": id, "epoch": None, "boundary": None, "problem": None}
        try:
            manifest = opened.load_by_id(id)
            if manifest is None or manifest.durable_phase != "finalized":
                continue
            facts |= {"epoch": manifest.epoch, "boundary": manifest.watermark}
            if uid not in manifest.operators:
                try:
                    find_operator(manifest, uid, opened)
                except CheckpointNotFoundError as error:
                    missing = error
                    continue
            spec = manifest.pipeline.operators.get(uid) if manifest.pipeline else None
            known.update(spec.cells if spec else ())
            there = None if cells is None else [c for c in cells if spec is None or c in spec.cells]
            unknown.difference_update(there or ())
            groups = _by_key_group(opened, manifest, uid, key, there, reading, shared)
            rows = together(list(groups))
            found.append((facts | {"present": len(rows) > 0}, rows))
        except (InvalidCheckpointError, CheckpointNotFoundError) as error:
            found.append((facts | {"present": None, "problem": str(error)}, None))
    if not found:
        raise missing or CheckpointNotFoundError(f"no checkpoint in {opened.url} yet")
    if unknown:
        raise CheckpointNotFoundError(
            f"operator {uid!r} in {opened.url} has no cell {min(unknown)!r} in any checkpoint"
            f"{nearest(min(unknown), known)}"
        )
    tables = []
    for facts, rows in found:
        if rows is None or not len(rows):
            schema = pa.schema([]) if rows is None else rows.schema
            tables.append(_beside([facts], pa.table({f.name: pa.nulls(1, f.type) for f in schema})))
        else:
            tables.append(_beside([facts] * len(rows), rows))
    return one_table(tables)


def one_table(tables: list[pa.Table]) -> pa.Table:
    """Returns tables of several checkpoints as one.

    Raises:
        InvalidCheckpointError: A cell has another type in one of them than in another.
    """
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InvalidCheckpointError(
            f"the checkpoints cannot be compared: a cell or the key has another type in one than "
            f"in another ({error}). Look at them one by one."
        ) from error


def _beside(facts: list[dict[str, object]], rows: pa.Table) -> pa.Table:
    head = pa.Table.from_pylist(facts, schema=HISTORY)
    return pa.table(
        [*head.columns, *rows.columns],
        schema=pa.schema([*head.schema, *(field.with_nullable(True) for field in rows.schema)]),
    )


def together(tables: list[pa.Table]) -> pa.Table:
    """Returns the tables of key groups as one."""
    if not tables:
        return pa.table({"key": pa.nulls(0)})
    filled = [table for table in tables if len(table)] or tables[:1]
    return pa.concat_tables(filled, promote_options="default")


def _pointed(store: CheckpointStore) -> CheckpointManifest | None:
    try:
        return store.load_latest()
    except InvalidCheckpointError:
        return None


def _by_key_group(
    store: CheckpointStore,
    manifest: CheckpointManifest,
    uid: str,
    key: object,
    cells: Sequence[str] | None,
    reading: Reading,
    shared: SharedRows | None = None,
) -> Iterator[pa.Table]:
    shared = shared or SharedRows()
    partitions = find_operator(manifest, uid, store).partitions
    columns = None if cells is None else _columns(store, manifest, uid, cells)
    encoded = None if key is None else _encoded(manifest, uid, key)
    if encoded is not None:
        group = key_group(encoded, manifest.key_group_count)
        # Where its group has no state an empty table says which columns there would be.
        mine = [p for p in partitions if p.partition_id == group]
        partitions = tuple(mine or partitions[:1])
    for partition in partitions:
        rows = read_group(store, partition, key=encoded, columns=columns, shared=shared)
        if key is not None and encoded is None:
            rows = rows.filter(is_key(rows["key"], key))
        if columns is not None:
            rows = rows.select([name for name in columns if name in rows.column_names])
        yield readable_rows(rows, manifest, uid, reading)


def read_group(
    store: CheckpointStore,
    partition: PartitionSnapshotEntry,
    *,
    key: bytes | None = None,
    columns: Sequence[str] | None = None,
    shared: SharedRows | None = None,
) -> pa.Table:
    """Returns the state of one key group, or of one of its keys."""
    rows = read_chain(
        partition.sidecars, store.read_sidecar, key=key, columns=columns, shared=shared
    )
    return rows.drop_columns(["_deleted"])


def _columns(
    store: CheckpointStore, manifest: CheckpointManifest, uid: str, cells: Sequence[str]
) -> list[str]:
    spec = manifest.pipeline.operators.get(uid) if manifest.pipeline else None
    known = list(spec.cells) if spec else list(cells)
    for cell in cells:
        if cell not in known:
            raise CheckpointNotFoundError(
                f"operator {uid!r} in checkpoint {manifest.id} of {store.url} has no cell "
                f"{cell!r}; it has {', '.join(map(repr, known)) or 'none'}{nearest(cell, known)}"
            )
    return ["key", *map(cell_column_name, cells), *_OWN]


def _encoded(manifest: CheckpointManifest, uid: str, key: object) -> bytes | None:
    spec = manifest.pipeline.operators.get(uid) if manifest.pipeline else None
    return None if spec is None else encode_key(spec.key_coder, key)


def is_key(keys: pa.ChunkedArray, wanted: object) -> pa.ChunkedArray:
    """Tells which rows have a key that could not be encoded here.

    Raises:
        ValueError: Its type is not that of the keys.
    """
    if pa.types.is_nested(keys.type):
        same = [_alike(scalar.as_py(), wanted) for scalar in keys]
        return pa.chunked_array([pa.array(same, pa.bool_())])
    try:
        return pc.equal(keys, pa.scalar(wanted, keys.type))
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(f"{wanted!r:.100} is no key of type {keys.type}: {error}") from error


def _alike(found: object, wanted: object) -> bool:
    """Whether a key of parts is this one: a struct is a mapping, and a tuple of its values too."""
    if isinstance(found, dict) and isinstance(wanted, list | tuple):
        found = list(found.values())
    if isinstance(found, list) and isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(_alike, found, wanted))
    return found == wanted
