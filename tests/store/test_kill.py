"""A process that commits and prunes is killed again and again: nothing it acknowledged is lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from beam_ckpt.manifest import RunIdentity
from beam_ckpt.retention import KeepLast
from beam_ckpt.store import FileSystemCheckpointStore
from beam_ckpt.testing.store import a_manifest, listing, write


def _work(root: str, log: str, run_id: str) -> None:
    """Commits and prunes for ever; notes in a log what has been acknowledged, before going on."""
    store = FileSystemCheckpointStore(root, key_group_count=3)
    generation = store.claim_generation(run_id)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(*what: object) -> None:
        os.write(fd, json.dumps(what).encode() + b"\n")

    note("ready")
    base = store.recover_latest_validated().chosen
    while True:
        id = store.next_id()
        entries = [] if base is None else base.sidecars()[-4:]
        held = [e for e in entries if e[1] != id % 3]
        new = write(
            store, b"state %d " % id * 50, key_group=id % 3, boundary=id * 1000, run_id=run_id
        )
        manifest = a_manifest(
            id,
            operators=listing(sorted([*held, new], key=lambda e: e[1])),
            key_group_count=3,
            watermark=id * 1000,
            run=RunIdentity(generation=generation, run_id=run_id),
        )
        store.save(manifest)
        note("saved", id, manifest.checkpoint_id)
        base = store.finalize(id)
        note("finalized", id, manifest.checkpoint_id)
        store.prune(KeepLast(2))
        if id % 5 == 0:
            store.gc(grace_s=0)


def _kill_again_and_again(root: Path, kills: int) -> dict[str, int]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["beam_ckpt.testing.store", "google_crc32c"])
    log = root.parent / "log"
    log.touch()
    rng = random.Random(4711)
    contents: dict[int, str] = {}
    acknowledged = 0
    counts = {"kills": 0, "acknowledged": 0, "attempts passed over": 0, "pointer behind": 0}
    for n in range(kills):
        before = log.stat().st_size
        child = context.Process(target=_work, args=(str(root), str(log), f"run-{n}"))
        child.start()
        deadline = time.monotonic() + 60
        lines_to_see = 1 + rng.randrange(8)
        while log.read_bytes()[before:].count(b"\n") < lines_to_see:
            assert child.is_alive(), "the child died by itself"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
        counts["kills"] += 1
        with log.open("rb") as lines:
            lines.seek(before)
            for line in lines:
                what, *rest = json.loads(line)
                if what == "ready":
                    continue
                id, checkpoint_id = rest
                # An id never holds two checkpoints.
                assert contents.setdefault(id, checkpoint_id) == checkpoint_id
                if what == "finalized":
                    acknowledged = max(acknowledged, id)
                    counts["acknowledged"] += 1
        store = FileSystemCheckpointStore(root, key_group_count=3)
        report = store.recover_latest_validated()
        if acknowledged:
            assert report.chosen_id is not None
            assert report.chosen_id >= acknowledged
        assert all(s.phase == "prepared" for s in report.skipped), report
        counts["attempts passed over"] += len(report.skipped)
        latest = store.load_latest()
        assert (latest is None) == (not (root / "latest.json").exists())
        if latest is not None:
            assert store.validate_checkpoint(latest.id).valid
            counts["pointer behind"] += latest.id != report.chosen_id
        for id in store.list_ids():
            loaded = store.load_by_id(id)
            assert loaded is not None
            assert loaded.checkpoint_id == contents.get(id, loaded.checkpoint_id)
    store = FileSystemCheckpointStore(root, key_group_count=3)
    store.claim_generation("last")
    store.prune(KeepLast(2))
    store.gc(grace_s=0)
    listed: set[str] = set()
    for id in store.list_ids():
        loaded = store.load_by_id(id)
        assert loaded is not None
        listed |= loaded.sidecar_paths()
    assert {m.key for m in store.blobs.list("state/")} == listed
    assert list(root.rglob(".tmp-*")) == []
    return counts


def test_50_kills_lose_nothing_that_was_acknowledged(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    counts = _kill_again_and_again(tmp_path / "root", 50)
    record_property("counts", counts)
    assert counts["kills"] == 50
    assert counts["acknowledged"] > 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_500_kills_lose_nothing_that_was_acknowledged(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    counts = _kill_again_and_again(tmp_path / "root", 500)
    record_property("counts", counts)
    assert counts["kills"] == 500
