"""What a store lists: checkpoints, operators, files, and where each checkpoint came from."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from typing import Literal

import pyarrow as pa

from beam_ckpt.errors import (
    CheckpointNotFoundError,
    InvalidCheckpointError,
    NoValidCheckpointError,
)
from beam_ckpt.manifest import CheckpointManifest, OperatorSnapshotEntry, SidecarEntry
from beam_ckpt.store import CheckpointStore, open_store

__all__ = [
    "CHECKPOINTS",
    "EVENT_TIME",
    "FILES",
    "LINEAGE",
    "OPERATORS",
    "AnyStore",
    "At",
    "checkpoints",
    "files",
    "find_checkpoint",
    "find_operator",
    "lineage",
    "nearest",
    "new_pieces",
    "open_existing",
    "operators",
    "readable",
]

AnyStore = str | os.PathLike[str] | CheckpointStore
"""A path, a URL or a store."""
At = int | Literal["latest"]
"""The id of a checkpoint; `latest` is the newest valid one."""

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

FILES = pa.schema(
    [
        pa.field("path", pa.string()),
        pa.field("operator", pa.string(), nullable=False),
        pa.field("key_group", pa.uint32()),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("boundary", EVENT_TIME),
        pa.field("epoch", pa.uint64()),
        pa.field("rows", pa.uint64(), nullable=False),
        pa.field("bytes", pa.uint64(), nullable=False),
        pa.field("sha256", pa.string(), nullable=False),
        pa.field("checkpoints", pa.list_(pa.uint64()), nullable=False),
    ]
)
"""Schema of `files`. `path` is relative to the root of the store, null for state that is in the
manifest itself; `key_group` is null for a file that several share; `epoch` is that of the
checkpoint which listed the file, or the newest rows of a shared one, first; `checkpoints` are the
ids of those that list it: it is deleted with the last of them."""

LINEAGE = pa.schema(
    [
        pa.field("id", pa.uint64(), nullable=False),
        pa.field("epoch", pa.uint64(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),
        pa.field("boundary", EVENT_TIME),
        pa.field("checkpoint_id", pa.string(), nullable=False),
        pa.field("parent_id", pa.string()),
        pa.field("parent", pa.uint64()),
        pa.field("generation", pa.uint64()),
        pa.field("run_id", pa.string()),
        pa.field("restored", pa.bool_()),
        pa.field("new_files", pa.uint64(), nullable=False),
        pa.field("new_bytes", pa.uint64(), nullable=False),
        pa.field("shared_bytes", pa.uint64(), nullable=False),
        pa.field("longest_chain", pa.uint64(), nullable=False),
    ]
)
"""Schema of `lineage`. `parent` is the id that `parent_id` has in this store, null when it was
pruned or there is none; `restored` tells whether another run wrote the parent (null where the
parent is not known); `shared_bytes` are those of files that an older checkpoint wrote;
`longest_chain` is the greatest number of files that a key group is restored from."""


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
    opened = open_existing(store)
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
        shared = {s.path: s for s in sidecars if s.is_shared}
        files = [*shared.values(), *(s for s in sidecars if not s.is_shared)]
        row: dict[str, object] = {
            "operator": uid,
            "key_groups": len(entry.partitions),
            "sidecars": len(files),
            "deltas": sum(s.kind == "delta" for s in files),
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


def files(store: AnyStore) -> pa.Table:
    """Lists the sidecars that the checkpoints of a store list, each once.

    Manifests that cannot be read are left out; what no manifest lists is for `beam-ckpt gc`.

    Returns:
        A table with the schema `FILES`, by operator, key group and epoch.

    Raises:
        CheckpointNotFoundError: There is no store.
    """
    rows: dict[object, dict[str, object]] = {}
    for manifest in readable(open_existing(store)):
        for operator, key_groups, entry in manifest.pieces():
            key_group = None if entry.is_shared else key_groups[0]
            row = rows.setdefault(
                entry.path or (operator, key_group, entry.sha256),
                {
                    "path": entry.path,
                    "operator": operator,
                    "key_group": key_group,
                    "kind": entry.kind,
                    "boundary": entry.boundary,
                    "epoch": entry.epoch,
                    "rows": entry.file_rows or entry.rows,
                    "bytes": entry.size_bytes,
                    "sha256": entry.sha256,
                    "checkpoints": [],
                },
            )
            listed = row["checkpoints"]
            assert isinstance(listed, list)
            listed.append(manifest.id)
    table = pa.Table.from_pylist(list(rows.values()), schema=FILES)
    return table.sort_by([(name, "ascending") for name in ("operator", "key_group", "epoch")])


def lineage(store: AnyStore) -> pa.Table:
    """Tells which checkpoint each one came from, which run wrote it, and what it added.

    Returns:
        A table with the schema `LINEAGE`, by id; manifests that cannot be read are left out.

    Raises:
        CheckpointNotFoundError: There is no store.
    """
    manifests = list(readable(open_existing(store)))
    known = {manifest.checkpoint_id: manifest for manifest in manifests}
    rows = []
    for manifest in manifests:
        parent = known.get(manifest.parent_id or "")
        new = new_pieces(manifest, parent)
        chains = (
            len(partition.sidecars)
            for operator in manifest.operators.values()
            for partition in operator.partitions
        )
        new_bytes = sum(entry.size_bytes for entry in new)
        rows.append(
            {
                "id": manifest.id,
                "epoch": manifest.epoch,
                "phase": manifest.durable_phase,
                "boundary": manifest.watermark,
                "checkpoint_id": manifest.checkpoint_id,
                "parent_id": manifest.parent_id,
                "parent": parent and parent.id,
                "generation": manifest.run and manifest.run.generation,
                "run_id": manifest.run and manifest.run.run_id,
                "restored": None if parent is None else parent.run != manifest.run,
                "new_files": len(new),
                "new_bytes": new_bytes,
                "shared_bytes": manifest.total_size_bytes - new_bytes,
                "longest_chain": max(chains, default=0),
            }
        )
    return pa.Table.from_pylist(rows, schema=LINEAGE)


def new_pieces(
    manifest: CheckpointManifest, parent: CheckpointManifest | None = None
) -> list[SidecarEntry]:
    """Returns what a checkpoint is the first to list, each file once.

    Args:
        manifest: Of the checkpoint.
        parent: That of its parent, where it is known: what has moved into another shared file is
            older than that.
    """
    before = None if parent is None else parent.sidecar_paths()
    return [
        entry
        for _, _, entry in manifest.pieces()
        if entry.epoch == manifest.epoch
        or (entry.is_shared and before is not None and entry.path not in before)
    ]


def readable(store: CheckpointStore) -> Iterable[CheckpointManifest]:
    """Yields the manifests of a store that can be read, oldest first."""
    for id in store.list_ids():
        try:
            manifest = store.load_by_id(id)
        except InvalidCheckpointError:
            continue
        if manifest is not None:
            yield manifest


def find_operator(
    manifest: CheckpointManifest, uid: str, store: CheckpointStore
) -> OperatorSnapshotEntry:
    """Returns an operator's state in a checkpoint; one that has saved nothing yet has none.

    Raises:
        CheckpointNotFoundError: The checkpoint has no such operator; names the nearest.
    """
    entry = manifest.operators.get(uid)
    if entry is not None:
        return entry
    known = {*manifest.operators, *(manifest.pipeline.operators if manifest.pipeline else {})}
    if uid in known:
        return OperatorSnapshotEntry()
    names = ", ".join(map(repr, sorted(known))) or "no operators"
    raise CheckpointNotFoundError(
        f"checkpoint {manifest.id} in {store.url} has no operator {uid!r}; it has {names}"
        f"{nearest(uid, known)}"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `. Did you mean ...?` where a known name is like it, else nothing."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f". Did you mean {close[0]!r}?" if close else ""


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
    opened = open_existing(store)
    if at != "latest":
        found = opened.load_by_id(at)
        if found is None:
            if (successor := opened.successor(at)) is not None:
                raise CheckpointNotFoundError(
                    f"checkpoint {at} of {opened.url} was replaced by {successor}, of the same "
                    "cut, when keys were removed from it by `beam-ckpt forget`"
                )
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


def open_existing(store: AnyStore) -> CheckpointStore:
    """Returns the store, which has to be there: looking creates nothing.

    Raises:
        CheckpointNotFoundError: There is no store.
    """
    return store if isinstance(store, CheckpointStore) else open_store(store, create=False)


def _facts(manifest: CheckpointManifest) -> dict[str, object]:
    return {
        "epoch": manifest.epoch,
        "phase": manifest.durable_phase,
        "boundary": manifest.watermark,
        "drained": manifest.watermark is None,
        "created": manifest.timestamp_ms,
        "operators": sorted(manifest.operators),
        "sidecars": len(manifest.pieces()),
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
