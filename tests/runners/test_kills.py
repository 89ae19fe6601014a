"""SIGKILL at each step of the write protocol: the end state is that of a run that never stopped."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from beam_ckpt.testing.crashes import Crashes, History, carry_out, outputs_of
from beam_ckpt.testing.cuts import saved_state
from beam_ckpt.testing.event_loop import canonical, run_event_loop
from beam_ckpt.testing.faults import Fault, FaultPlan, Operation, fault_points
from beam_ckpt.testing.subjects import DelayChainFn

DATA = tuple((s * 7_000_000, "ab"[s % 2], s % 5) for s in range(40))
CUTS = (90_000_000, 180_000_000, None)
CHANGES = ("put", "put_if_absent", "replace", "delete")
STEPS = {
    "namespace": "namespace.json",
    "claim": "runs/*",
    "sidecar": "state/*",
    "manifest": "manifests/*.json",
    "marker": "manifests/*.final",
    "pointer": "latest.json",
    "intent": "prunes/*",
}

Point = tuple[Fault, Operation]


def history(root: Path) -> History:
    root.mkdir(parents=True)
    # Full sidecars only, so that pruning has files to delete.
    return History(str(root), DelayChainFn(), DATA, CUTS, max_files_per_group=1)


def plan(root: Path, *faults: Fault, record: bool = False) -> FaultPlan:
    directory = root / "faults"
    directory.mkdir(parents=True)
    return FaultPlan(*faults, directory=directory, record=record)


@pytest.fixture(scope="module")
def points(tmp_path_factory) -> list[Point]:
    """All moments before and after a change of the store in an undisturbed history."""
    root = tmp_path_factory.mktemp("recorded")
    recorder = plan(root, record=True)
    undisturbed = history(root / "history")
    assert carry_out(undisturbed, recorder) == Crashes(0, (1, 1, 1))
    check_end(undisturbed)
    operations = recorder.operations()
    changes = [op for op in operations if op.name in CHANGES]
    return [(fault, changes[fault.nth - 1]) for fault in fault_points(operations)]


def check_end(done: History) -> None:
    """Outputs and state are those of the oracle; nothing in the store is damaged."""
    reference = run_event_loop(done.fn, DATA)
    assert canonical(outputs_of(done)) == canonical(reference.outputs)
    assert saved_state(done.store, done.fn) == dict(reference.state)
    report = done.store.recover_latest_validated()
    assert report.chosen is not None
    assert report.chosen.boundary is None
    assert [s for s in report.skipped if s.phase == "invalid"] == []
    for checkpoint_id in done.store.list_ids():
        assert done.store.validate_checkpoint(checkpoint_id).valid


def kill_at(point: Fault, root: Path) -> None:
    killed = history(root / "history")
    crashes = carry_out(killed, plan(root, point))
    assert crashes.kills == 1, f"{point} never struck"
    # One cut was begun twice at the most: one checkpoint's work is repeated, no more.
    assert sum(crashes.attempts) <= len(CUTS) + 1
    check_end(killed)


def step_of(changed: Operation) -> str:
    return next((step for step, glob in STEPS.items() if fnmatchcase(changed.key, glob)), "other")


def test_every_step_of_the_protocol_is_among_the_moments(points):
    seen = {(step_of(changed), changed.name == "delete") for _, changed in points}
    assert {(step, False) for step in STEPS} <= seen
    assert {("sidecar", True), ("manifest", True), ("marker", True)} <= seen, "pruning"
    assert {fault.when for fault, _ in points} == {"before", "after"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("step", "when"),
    [
        *[(step, "after") for step in STEPS],
        *[(f"pruned {step}", "after") for step in ("sidecar", "manifest", "marker", "intent")],
        # Before a step is after the one before it: `slow` has them all. These two decide.
        ("marker", "before"),
        ("pointer", "before"),
    ],
)
def test_a_kill_at_each_kind_of_step_changes_nothing(points, tmp_path, step, when):
    pruned, step = step.startswith("pruned "), step.removeprefix("pruned ")
    # The last such moment: that of a restored run.
    point = [
        fault
        for fault, changed in points
        if step_of(changed) == step and (changed.name == "delete") == pruned and fault.when == when
    ][-1]
    kill_at(point, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_kill_at_each_step_of_a_whole_history_changes_nothing(points, tmp_path, record_property):
    for number, (point, _) in enumerate(points):
        kill_at(point, tmp_path / str(number))
    record_property("counts", {"moments": len(points), "kills": len(points), "lost": 0})
