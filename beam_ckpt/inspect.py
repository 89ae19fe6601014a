"""What a store holds, as Arrow tables: checkpoints, operators, and the state itself.

Everything here reads, nothing writes, and no Beam pipeline is started. Cells whose coder has no
Arrow type stay the bytes that the author's coder wrote: nothing is ever unpickled.

    >>> from beam_ckpt import inspect
    >>> inspect.state("ckpt", "totals").to_pandas()                        # doctest: +SKIP
    >>> inspect.checkpoints("gs://bucket/ckpt/job").filter(...)            # doctest: +SKIP

A store is a path, a URL or a `CheckpointStore`. A store that does not exist is an error, never
created. The shape, functions that return tables with a declared schema, is that of pyiceberg's
`Table.inspect`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

import pyarrow as pa

from beam_ckpt.errors import (
    CheckpointNotFoundError,
    InvalidCheckpointError,
    NoValidCheckpointError,
)
from beam_ckpt.manifest import CheckpointManifest, OperatorSnapshotEntry
from beam_ckpt.sidecar import read_chain
from beam_ckpt.store import CheckpointStore, open_store

__all__ = [
    "CHECKPOINTS",
    "OPERATORS",
    "checkpoints",
    "find_checkpoint",
    "operators",
    "state",
    "state_by_key_group",
]

AnyStore = str | os.PathLike[str] | CheckpointStore
At = int | Literal["latest"]

EVENT_TIME = pa.timestamp("us", tz="UTC")

CHECKPOINTS = pa.schema(
    [
        pa.field("id", pa.uint64(), nullable=False),
        pa.field("epoch", pa.uint64()),
        pa.field("phase", pa.string(), nullable=False),
        pa.field("boundary", EVENT_TIME),
        pa.field("drained", pa.bool_()),
        pa.field("created", pa.timestamp("ms", tz="UTC")),
        pa.field("operators", pa.list_(pa.string())),
        pa.field("sidecars", pa.uint64()),
        pa.field("bytes", pa.uint64()),
        pa.field("latest", pa.bool_(), nullable=False),
        pa.field("tags", pa.list_(pa.string()), nullable=False),
        pa.field("checkpoint_id", pa.string()),
        pa.field("parent_id", pa.string()),
        pa.field("generation", pa.uint64()),
        pa.field("run_id", pa.string()),
        pa.field("problem", pa.string()),
    ]
)
"""Schema of `checkpoints`. `boundary` is null at the drained end of an input (`drained`) and where
it cannot be read (`drained` is null too)."""

OPERATORS = pa.schema(
    [
        pa.field("operator", pa.string(), nullable=False),
        pa.field("key_coder", pa.string()),
        pa.field("window_coder", pa.string()),
        pa.field("time_sorted", pa.bool_()),
        pa.field(
            "cells",
            pa.list_(
                pa.struct(
                    [
                        pa.field("name", pa.string()),
                        pa.field("kind", pa.string()),
                        pa.field("coder", pa.string()),
                    ]
                )
            ),
        ),
        pa.field("key_groups", pa.uint64(), nullable=False),
        pa.field("sidecars", pa.uint64(), nullable=False),
        pa.field("deltas", pa.uint64(), nullable=False),
        pa.field("rows", pa.uint64(), nullable=False),
        pa.field("bytes", pa.uint64(), nullable=False),
    ]
)
"""Schema of `operators`. `key_groups` counts those with state; `rows` those of all sidecars that
a restore reads, so a key that is in a base and in a delta counts twice."""


def checkpoints(store: AnyStore) -> pa.Table:
    """Lists every checkpoint of a store, oldest first, damaged ones included.

    Manifests are read, sidecars are not: a checkpoint that is listed as `finalized` may still
    have lost a file. `beam-ckpt validate` tells.

    Returns:
        A table with the schema `CHECKPOINTS`; `phase` is `finalized` (a recovery point),
        `prepared` (an attempt that was never published) or `invalid`, with the `problem`.

    Raises:
        CheckpointNotFoundError: There is no store.
        CheckpointStorageError: The storage failed.
    """
    opened = _open(store)
    try:
        latest = opened.load_latest()
    except InvalidCheckpointError:
        latest = None
    latest_id = None if latest is None else latest.id
    tags: dict[int, list[str]] = {}
    for name, id in opened.tags().items():
        tags.setdefault(id, []).append(name)
    rows = []
    for id in opened.list_ids():
        row = {"id": id, "latest": id == latest_id, "tags": tags.get(id, [])}
        try:
            manifest = opened.load_by_id(id)
        except InvalidCheckpointError as error:
            rows.append(row | _damaged(opened, id, str(error)))
            continue
        if manifest is not None:  # else pruned since it was listed
            rows.append(row | _facts(manifest))
    return pa.Table.from_pylist(rows, schema=CHECKPOINTS)


def operators(store: AnyStore, at: At = "latest") -> pa.Table:
    """Lists the operators of a checkpoint.

    Args:
        store: A path, a URL or a store.
        at: The id of a checkpoint; `latest` is the newest valid one.

    Returns:
        A table with the schema `OPERATORS`, by operator.

    Raises:
        CheckpointNotFoundError: There is no store or no such checkpoint.
        NoValidCheckpointError: `latest`, and all checkpoints are damaged.
    """
    manifest = find_checkpoint(store, at)
    specs = manifest.pipeline.operators if manifest.pipeline else {}
    rows = []
    for uid in sorted({*manifest.operators, *specs}):
        entry = manifest.operators.get(uid, OperatorSnapshotEntry())
        sidecars = [s for partition in entry.partitions for s in partition.sidecars]
        row: dict[str, object] = {
            "operator": uid,
            "key_groups": len(entry.partitions),
            "sidecars": len(sidecars),
            "deltas": sum(s.kind == "delta" for s in sidecars),
            "rows": sum(s.rows for s in sidecars),
            "bytes": entry.total_bytes,
        }
        if spec := specs.get(uid):
            cells = [{"name": n, "kind": c.kind, "coder": c.coder} for n, c in spec.cells.items()]
            row |= {
                "key_coder": spec.key_coder,
                "window_coder": spec.window_coder,
                "time_sorted": spec.time_sorted,
                "cells": cells,
            }
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=OPERATORS)


def state(store: AnyStore, uid: str, *, at: At = "latest") -> pa.Table:
    """Reads the state of one operator: one row per key and window.

    The columns are those of a sidecar without `_deleted`: `key` and one column per cell, typed
    where their coders have an Arrow type and binary elsewhere (null = empty), `_key` and
    `_window` (encoded), `_updated` (event time of the last touch), `_timers` and `_carried`
    (outputs dated beyond the cut).

    Args:
        store: A path, a URL or a store.
        uid: The operator.
        at: The id of a checkpoint; `latest` is the newest valid one.

    Raises:
        CheckpointNotFoundError: There is no store, no such checkpoint, or no such operator in it.
        NoValidCheckpointError: `latest`, and all checkpoints are damaged.
        InvalidCheckpointError: A sidecar is damaged.
    """
    tables = list(state_by_key_group(store, uid, at=at))
    if not tables:
        return pa.table({"key": pa.nulls(0)})
    filled = [table for table in tables if len(table)] or tables[:1]
    return pa.concat_tables(filled, promote_options="default")


def state_by_key_group(store: AnyStore, uid: str, *, at: At = "latest") -> Iterator[pa.Table]:
    """Reads what `state` does, one table per key group: bounded by the largest of them."""
    opened = _open(store)
    manifest = find_checkpoint(opened, at)
    entry = manifest.operators.get(uid)
    if entry is None:
        known = manifest.pipeline.operators if manifest.pipeline else {}
        if uid not in known:
            names = ", ".join(map(repr, sorted({*manifest.operators, *known}))) or "no operators"
            raise CheckpointNotFoundError(
                f"checkpoint {manifest.id} in {opened.url} has no operator {uid!r}; it has {names}"
            )
        entry = OperatorSnapshotEntry()
    for partition in entry.partitions:
        yield read_chain(partition.sidecars, opened.read_sidecar).drop_columns(["_deleted"])


def find_checkpoint(store: AnyStore, at: At = "latest") -> CheckpointManifest:
    """Returns the manifest that `at` means.

    Args:
        store: A path, a URL or a store.
        at: An id, of a prepared checkpoint too; `latest` is the newest that is finalized and
            valid (presence, sizes and checksums kept by the storage are compared; no sidecar is
            read).

    Raises:
        CheckpointNotFoundError: There is no store, or no such checkpoint.
        NoValidCheckpointError: `latest`, and there are only damaged or unpublished ones.
        InvalidCheckpointError: The manifest asked for by id is damaged.
    """
    opened = _open(store)
    if at != "latest":
        found = opened.load_by_id(at)
        if found is None:
            ids = opened.list_ids()
            there = f"it has {ids[0]} to {ids[-1]}" if ids else "it has none"
            raise CheckpointNotFoundError(f"no checkpoint {at} in {opened.url}; {there}")
        return found
    report = opened.recover_latest_validated(deep=False)
    if report.chosen is not None:
        return report.chosen
    if not report.examined:
        raise CheckpointNotFoundError(f"no checkpoint in {opened.url} yet")
    reasons = "; ".join(f"{skipped.id}: {skipped.reason}" for skipped in report.skipped[:3])
    raise NoValidCheckpointError(
        f"none of the {report.examined} checkpoints in {opened.url} can be used ({reasons}). "
        "`beam-ckpt validate` says what is wrong with each",
        report,
    )


def _open(store: AnyStore) -> CheckpointStore:
    return store if isinstance(store, CheckpointStore) else open_store(store, create=False)


def _facts(manifest: CheckpointManifest) -> dict[str, object]:
    return {
        "epoch": manifest.epoch,
        "phase": manifest.durable_phase,
        "boundary": manifest.watermark,
        "drained": manifest.watermark is None,
        "created": manifest.timestamp_ms,
        "operators": sorted(manifest.operators),
        "sidecars": len(manifest.sidecars()),
        "bytes": manifest.total_size_bytes,
        "checkpoint_id": manifest.checkpoint_id,
        "parent_id": manifest.parent_id,
        "generation": manifest.run and manifest.run.generation,
        "run_id": manifest.run and manifest.run.run_id,
    }


def _damaged(store: CheckpointStore, id: int, problem: str) -> dict[str, object]:
    """What is still known of a checkpoint whose manifest cannot be read: its marker's word."""
    row: dict[str, object] = {"phase": "invalid", "problem": problem}
    try:
        marker = store.final_marker(id)
    except InvalidCheckpointError as error:
        return row | {"problem": f"{problem}; {error}"}
    if marker is None:
        return row
    return row | {
        "epoch": marker.epoch,
        "boundary": marker.watermark,
        "drained": marker.watermark is None,
        "checkpoint_id": marker.checkpoint_id,
    }
