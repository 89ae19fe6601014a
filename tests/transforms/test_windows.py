"""State ends with its window, in the chain of sidecars as well."""

from __future__ import annotations

import uuid

import pytest
from apache_beam.transforms.window import FixedWindows, GlobalWindow, IntervalWindow

from beam_ckpt import open_store
from beam_ckpt.testing.cuts import run_checkpointed, saved_state
from beam_ckpt.testing.subjects import CountAndSumFn
from beam_ckpt.transforms.snapshot import CarriedOutput, SnapshotRecord
from beam_ckpt.transforms.windows import is_over, left_over

_S = 1_000_000


@pytest.mark.parametrize(
    ("boundary", "lateness", "over"),
    [
        (59 * _S, 0, False),
        (60 * _S, 0, True),  # its last moment is a microsecond before its end
        (60 * _S, _S, False),
        (61 * _S, _S, True),
        (None, 10**15, True),
    ],
)
def test_a_window_is_over_when_no_runner_would_fire_in_it(boundary, lateness, over):
    assert is_over(IntervalWindow(0, 60), boundary, lateness) == over
    assert not is_over(GlobalWindow(), boundary, lateness)


def test_outputs_beyond_the_cut_are_what_is_left():
    carried = tuple(CarriedOutput(None, at * _S, b"", b"x") for at in (70, 80, 90))
    record = SnapshotRecord(b"k", b"w", False, 5, (b"v", (b"a",), None), (), carried)
    left = left_over(record, 80 * _S)
    assert left is not None
    assert left.cells == (None, (), None)
    assert left.carried == carried[1:]
    assert left_over(record, 91 * _S) is None
    assert left_over(record, None) is None


@pytest.mark.parametrize("lateness", [0, 90 * _S])
def test_files_do_not_grow_with_the_windows_that_there_have_been(lateness):
    """Compaction leaves out what is over; a delta in between holds what its epoch touched."""
    data = [(at * _S, "ab"[at % 2], at) for at in range(5, 1800, 20)]
    store = open_store(f"memory://{uuid.uuid4().hex}")
    windowing = {"window_fn": FixedWindows(60), "lateness": lateness}
    run_checkpointed(
        CountAndSumFn(), data, runner="FnApiRunner", store=store, every=50, until=1800,
        key_groups=1, max_files_per_group=3, keep=100, **windowing,
    )  # fmt: skip
    rows = []
    for id in store.list_ids():
        manifest = store.load_by_id(id)
        ((partition,),) = [operator.partitions for operator in manifest.operators.values()]
        assert len(partition.sidecars) <= 3
        rows.append(sum(sidecar.rows for sidecar in partition.sidecars))
        alive = saved_state(store, CountAndSumFn(), checkpoint_id=id, **windowing)
        assert all(not is_over(w, manifest.boundary, lateness) for _, w in alive)
    assert len(rows) > 30
    assert max(rows[20:]) <= max(rows[8:16]), rows
