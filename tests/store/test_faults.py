"""The injector itself: a fault strikes where it says, once, in whatever process."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import signal
import time
import uuid
from pathlib import Path

import pytest

from beam_ckpt import open_store
from beam_ckpt.errors import CheckpointStorageError, IndeterminateError
from beam_ckpt.retention import KeepLast
from beam_ckpt.testing.faults import Fault, FaultPlan, fault_points, faulty_store
from beam_ckpt.testing.store import commit, write


def memory() -> str:
    return f"memory://{uuid.uuid4().hex}"


def test_the_nth_matching_operation_is_struck_and_no_other() -> None:
    plan = FaultPlan(Fault("put", "state/*", nth=3, action="error", errno=errno.ENOSPC, times=2))
    store = faulty_store(open_store(memory()), plan)
    outcomes = []
    for n in range(6):
        try:
            write(store, b"%d" % n)
            outcomes.append("ok")
        except CheckpointStorageError as e:
            assert e.errno == errno.ENOSPC
            outcomes.append("full")
    assert outcomes == ["ok", "ok", "full", "full", "ok", "ok"]
    assert plan.struck() == [6]


def test_a_fault_after_leaves_what_was_done_and_a_fault_before_does_not() -> None:
    for when, done in (("before", []), ("after", [1])):
        url = memory()
        fault = Fault("put_if_absent", "manifests/*.json", when=when, action="error")  # type: ignore[arg-type]
        with pytest.raises(CheckpointStorageError):
            commit(faulty_store(open_store(url), FaultPlan(fault)), 1)
        assert open_store(url).list_ids() == done


def test_a_lost_response_was_done_and_says_that_it_is_not_known() -> None:
    url = memory()
    fault = Fault("put_if_absent", "manifests/*.json", action="lost_response")
    with pytest.raises(IndeterminateError):
        commit(faulty_store(open_store(url), FaultPlan(fault)), 1)
    assert open_store(url).list_ids() == [1]


def test_a_delay_takes_its_time() -> None:
    plan = FaultPlan(Fault("list", action="delay", seconds=0.05))
    began = time.monotonic()
    faulty_store(open_store(memory()), plan).list_ids()
    assert time.monotonic() - began >= 0.05


def test_deletes_are_struck_one_by_one() -> None:
    store = open_store(memory())
    for id in range(1, 5):
        commit(store, id)
    faulty = faulty_store(store, FaultPlan(Fault("delete", "state/*", nth=2, action="error")))
    with pytest.raises(CheckpointStorageError):
        faulty.prune(KeepLast(1))
    assert len(store.blobs.list("state/")) == 3  # type: ignore[attr-defined]


def test_an_operation_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no operation"):
        Fault("write")


def test_a_plan_pickles_and_its_copies_count_together() -> None:
    plan = FaultPlan(Fault("put", nth=2, action="error"), record=True)
    url = memory()
    stores = [pickle.loads(pickle.dumps(faulty_store(open_store(url), plan))) for _ in range(2)]
    write(stores[0], b"first")
    with pytest.raises(CheckpointStorageError):
        write(stores[1], b"second")
    assert sum(op.name == "put" for op in plan.operations()) == 2
    assert {op.pid for op in plan.operations()} == {os.getpid()}


def _write_one(root: str, plan: FaultPlan) -> None:
    write(faulty_store(open_store(root), plan), b"state")


def test_a_kill_strikes_once_among_all_processes(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    plan = FaultPlan(Fault("put", nth=2), directory=tmp_path / "plan", record=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["beam_ckpt.testing.store", "google_crc32c"])
    codes = []
    for _ in range(4):
        child = context.Process(target=_write_one, args=(str(tmp_path / "root"), plan))
        child.start()
        child.join()
        codes.append(child.exitcode)
    assert codes == [0, -signal.SIGKILL, 0, 0]
    assert plan.struck() == [4]
    assert len({op.pid for op in plan.operations()}) == 4


def test_every_change_of_a_run_is_a_point_before_and_after() -> None:
    plan = FaultPlan(record=True)
    store = faulty_store(open_store(memory()), plan)
    commit(store, 1)
    changes = [(op.name, op.key.partition("/")[0]) for op in plan.operations()]
    changes = [c for c in changes if c[0] in ("put", "put_if_absent", "replace", "delete")]
    assert changes == [
        ("put_if_absent", "namespace.json"),
        ("put", "state"),
        ("put_if_absent", "manifests"),
        ("put_if_absent", "manifests"),
        ("replace", "latest.json"),
    ]
    points = list(fault_points(plan.operations()))
    assert [(p.nth, p.when) for p in points] == [
        (n, w) for n in range(1, 6) for w in ("before", "after")
    ]
    with_reads = list(fault_points(plan.operations(), reads=True))
    assert len(with_reads) == 2 * len(plan.operations())
