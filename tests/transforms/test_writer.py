"""The writer: sidecars of a key group that build on what the checkpoint restored from had."""

from __future__ import annotations

from pathlib import Path

import pytest
from apache_beam.coders import StrUtf8Coder, VarIntCoder
from apache_beam.transforms.window import GlobalWindows

from beam_ckpt import CheckpointStore, inspect, open_store
from beam_ckpt.errors import CheckpointNotFoundError
from beam_ckpt.keygroups import key_group
from beam_ckpt.testing.cuts import run_checkpointed
from beam_ckpt.testing.streams import Advance, Arrive, StreamPlan
from beam_ckpt.testing.subjects import TumblingFn
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.writer import WriteSidecarsFn

SECOND = 1_000_000
GROUPS = [[c for c in "abcdefghij" if key_group(c.encode(), 2) == group] for group in (0, 1)]


def test_a_worker_that_starts_after_the_restored_checkpoint_was_pruned_loses_no_key(
    tmp_path: Path,
) -> None:
    """BundleBasedDirectRunner makes a DoFn for each bundle, as a new worker does."""
    store = open_store(tmp_path / "ckpt")
    busy, idle = GROUPS
    keys = [*busy[:2], *idle[:2]]
    run_checkpointed(
        TumblingFn(),
        [(i * SECOND, key, 1) for i, key in enumerate(keys)],
        runner="FnApiRunner",
        store=store,
        until=100,
        key_groups=2,
    )
    steps: list[Arrive | Advance] = []
    for start in range(100, 150, 10):  # the idle key group is not touched while these are pruned
        steps.append(Arrive((((start + 5) * SECOND, busy[0], 1),)))
        steps.append(Advance((start + 10) * SECOND))
    steps.append(Arrive(((155 * SECOND, idle[0], 1),)))
    run_checkpointed(
        TumblingFn(),
        StreamPlan(tuple(steps)),
        runner="BundleBasedDirectRunner",
        store=store,
        every=10,
        until=200,
        key_groups=2,
        keep=1,
    )
    assert sorted(inspect.state(store, "subject")["key"].to_pylist()) == sorted(keys)


def writer(store: CheckpointStore, run_id: str, base_id: int) -> WriteSidecarsFn:
    operator = OperatorState(
        "totals",
        StrUtf8Coder(),
        GlobalWindows().get_window_coder(),
        (CellState("total", "read_modify_write", VarIntCoder()),),
        False,
    )
    return WriteSidecarsFn(store, run_id, [operator], base_id, 8, "totals")


def test_a_base_that_is_gone_and_has_no_successor_stops_the_writer(tmp_path: Path) -> None:
    store = open_store(tmp_path / "ckpt")
    with pytest.raises(CheckpointNotFoundError, match=r"checkpoint 1, .* is gone.*What to do"):
        writer(store, "mine", 1).setup()
