"""Checkpoints of an operator that no pipeline wrote, with the files that one would have written."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from apache_beam.coders import StrUtf8Coder, VarIntCoder
from apache_beam.transforms.window import GlobalWindow, GlobalWindows

from beam_ckpt import CheckpointStore, open_store
from beam_ckpt.keygroups import key_group
from beam_ckpt.manifest import (
    CheckpointManifest,
    OperatorSnapshotEntry,
    PartitionSnapshotEntry,
    PipelineIdentity,
    RunIdentity,
    new_checkpoint_id,
)
from beam_ckpt.sidecar import encode_sidecar
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.snapshot import SnapshotRecord

S = 1_000_000


class Made:
    """The operator `totals` of text keys, with a number `count` and a bag of text, `word`."""

    OPERATOR = OperatorState(
        "totals",
        StrUtf8Coder(),
        GlobalWindows().get_window_coder(),
        (
            CellState("count", "read_modify_write", VarIntCoder()),
            CellState("word", "bag", StrUtf8Coder()),
        ),
        False,
    )
    WINDOW = OPERATOR.window_coder.encode(GlobalWindow())

    def record(
        self,
        key: str,
        count: int | None = None,
        *,
        at: int = 0,
        words: tuple[str, ...] = (),
        timers: tuple[Any, ...] = (),
        carried: tuple[Any, ...] = (),
        deleted: bool = False,
    ) -> SnapshotRecord:
        """What is saved of a key; `at` in seconds."""
        number = None if count is None else VarIntCoder().encode(count)
        cells = (number, tuple(word.encode() for word in words))
        return SnapshotRecord(key.encode(), self.WINDOW, deleted, at * S, cells, timers, carried)

    def save(
        self,
        store: CheckpointStore,
        records: list[SnapshotRecord],
        *,
        operator: OperatorState | None = None,
        key_groups: int = 5,
        boundary: int | None = 100,
        base: CheckpointManifest | None = None,
        inline_threshold: int = -1,
        run: RunIdentity | None = None,
        **fields: Any,
    ) -> CheckpointManifest:
        """A checkpoint with these records, of a run of its own; deltas where `base` has files."""
        operator = operator or self.OPERATOR
        if run is None:
            run_id = uuid.uuid4().hex
            run = RunIdentity(generation=store.claim_generation(run_id), run_id=run_id)
        at = None if boundary is None else boundary * S
        epoch = 1 if base is None else base.epoch + 1
        others = {} if base is None else dict(base.operators)
        before = others.pop(operator.uid, OperatorSnapshotEntry()).partitions
        chains = {p.partition_id: p.sidecars for p in before}
        groups: dict[int, list[SnapshotRecord]] = {}
        for one in records:
            groups.setdefault(key_group(one.key, key_groups), []).append(one)
        for group, ones in groups.items():
            kind: Any = "delta" if group in chains else "full"
            table = operator.to_table(ones)
            header = operator.header(key_group=group, boundary=at, kind=kind)
            entry = store.write_sidecar(
                operator=operator.uid,
                key_group=group,
                boundary=at,
                run_id=run.run_id,
                data=encode_sidecar(table, header),
                kind=kind,
                rows=len(table),
                inline_threshold=inline_threshold,
            )
            chains[group] = (
                *chains.get(group, ()),
                entry.model_copy(update={"epoch": epoch}),
            )
        partitions = tuple(
            PartitionSnapshotEntry(partition_id=group, sidecars=chains[group])
            for group in sorted(chains)
        )
        specs = {} if base is None or base.pipeline is None else base.pipeline.operators
        settings = {
            "checkpoint_id": new_checkpoint_id(),
            "id": store.next_id(),
            "epoch": epoch,
            "timestamp_ms": 1,
            "operators": {**others, operator.uid: OperatorSnapshotEntry(partitions=partitions)},
            "parent_id": None if base is None else base.checkpoint_id,
            "watermark": at,
            "key_group_count": key_groups,
            "run": run,
            "durable_phase": "finalized",
            "pipeline": PipelineIdentity(
                operators={**specs, operator.uid: operator.spec()},
                beam_version="2.77.0",
                python_version="3.11.0",
            ),
        }
        return store.save(CheckpointManifest(**(settings | fields)))


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.fixture
def store() -> CheckpointStore:
    return open_store(f"memory://{uuid.uuid4().hex}")
