"""Random schedules of concurrent writers under random faults; afterwards everything holds.

A writer claims a generation, recovers, and commits and prunes as a pipeline does. Its operations
fail before or after they happened, lose their answers, are delayed; writers are killed in the
middle of a step, and every claim supersedes the writers before it. A reader looks on all the time.
"""

from __future__ import annotations

import collections
import errno
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from beam_ckpt.blobs import BlobIndeterminate, Blobs
from beam_ckpt.errors import (
    CheckpointConflictError,
    CheckpointNotFoundError,
    CheckpointStorageError,
    FencedError,
)
from beam_ckpt.manifest import CheckpointManifest, RunIdentity
from beam_ckpt.retention import KeepLast
from beam_ckpt.store import FileSystemCheckpointStore, ObjectStoreCheckpointStore
from beam_ckpt.store._blobstore import BlobCheckpointStore
from beam_ckpt.testing.fault_proxy import FaultProxy
from beam_ckpt.testing.faults import FaultPlan, FaultyBlobs
from beam_ckpt.testing.gcs import GcsServer
from beam_ckpt.testing.store import a_manifest, listing, write

_T = TypeVar("_T")


class Killed(BaseException):
    """The writer is gone: nothing of it runs any more."""


class Chaos(FaultyBlobs):
    """Blobs whose operations go wrong at random."""

    def __init__(self, inner: Blobs, rng: random.Random, rate: float, counts: Any) -> None:
        super().__init__(inner, FaultPlan())
        self._rng, self._rate, self._counts = rng, rate, counts

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._delete(key)

    def _run(self, operation: str, key: str, act: Callable[[], _T]) -> _T:
        self._counts["operations"] += 1
        if self._rng.random() >= self._rate:
            return act()
        fault = self._rng.choice(
            ["fails", "fails after", "lost", "lost before", "slow", "slow after", "killed"]
        )
        self._counts["faults"] += 1
        if fault == "fails":
            raise OSError(errno.ECONNRESET, "reset", key)
        if fault == "lost before":
            raise BlobIndeterminate(key)
        if fault == "slow":
            time.sleep(self._rng.random() * 0.02)
        if fault == "killed":
            if self._rng.random() < 0.5:
                act()
            raise Killed
        result = act()
        if fault == "fails after":
            raise OSError(errno.ETIMEDOUT, "timed out", key)
        if fault == "lost":
            raise BlobIndeterminate(key)
        if fault == "slow after":
            time.sleep(self._rng.random() * 0.02)
        return result


@dataclass
class Schedule:
    """One schedule on one empty store."""

    open: Callable[[], BlobCheckpointStore]
    seed: int
    rate: float
    counts: collections.Counter[str]
    pause: float
    acknowledged: dict[int, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        rng = random.Random(self.seed)
        writers = [
            threading.Thread(target=self._guard, args=(self._write, n, rng.random() * 0.15))
            for n in range(rng.randint(1, 8))
        ]
        done = threading.Event()
        reader = threading.Thread(target=self._guard, args=(self._read, done))
        reader.start()
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(120)
        done.set()
        reader.join(120)
        assert self.problems == [], f"seed {self.seed}"
        self._check()
        self.counts["schedules"] += 1
        self.counts["writers"] += len(writers)

    def _guard(self, act: Callable[..., None], *args: object) -> None:
        try:
            act(*args)
        except BaseException as e:
            self.problems.append(f"{act.__name__}: {e!r}")

    def _read(self, done: threading.Event) -> None:
        store = self.open()
        newest = 0
        while not done.is_set():
            latest = store.load_latest()
            if latest is not None:
                assert latest.id >= newest, "the pointer went back"
                assert latest.durable_phase == "finalized"
                newest = latest.id
            self.counts["reads"] += 1
            time.sleep(self.pause)

    def _retry(self, act: Callable[[], _T]) -> _T:
        for _ in range(60):
            try:
                return act()
            except CheckpointStorageError:
                self.counts["retries"] += 1
        raise AssertionError("60 attempts failed")

    def _write(self, n: int, delay: float) -> None:
        rng = random.Random(f"{self.seed}-{n}")
        time.sleep(delay)
        store = self.open()
        store = store.with_blobs(Chaos(store.blobs, rng, self.rate, self.counts))
        run_id = f"run-{n}"
        try:
            generation = self._retry(lambda: store.claim_generation(run_id))
            run = RunIdentity(generation=generation, run_id=run_id)
            base = self._retry(store.recover_latest_validated).chosen
            for _ in range(rng.randint(1, 4)):
                base = self._commit(store, run, base)
                self._retry(lambda: store.prune(KeepLast(rng.randint(1, 3))))
                if rng.random() < 0.2:
                    epoch = base.epoch
                    self._retry(lambda e=epoch: store.prune_before(e))  # type: ignore[misc]
            self.counts["writers that finished"] += 1
        except FencedError:
            self.counts["writers fenced"] += 1
        except Killed:
            self.counts["writers killed"] += 1

    def _commit(
        self, store: BlobCheckpointStore, run: RunIdentity, base: CheckpointManifest | None
    ) -> CheckpointManifest:
        watermark = 1000 if base is None else (base.watermark or 0) + 1000
        kept = [] if base is None else base.sidecars()[-3:]
        group = (watermark // 1000) % 4
        new = self._retry(
            lambda: write(
                store,
                b"%d " % watermark * 20,
                key_group=group,
                boundary=watermark,
                run_id=run.run_id,
            )
        )
        entries = sorted([*(e for e in kept if e[1] != group), new], key=lambda e: e[1])
        while True:
            manifest = a_manifest(
                self._retry(store.next_id),
                1 if base is None else base.epoch + 1,
                operators=listing(entries),
                key_group_count=4,
                watermark=watermark,
                run=run,
                parent_id=None if base is None else base.checkpoint_id,
            )
            try:
                self._retry(lambda m=manifest: store.save(m))  # type: ignore[misc]
                break
            except CheckpointConflictError:  # an older run took the id; it will not publish it
                self.counts["ids lost to another run"] += 1
        try:
            final = self._retry(lambda: store.finalize(manifest.id))
        except CheckpointNotFoundError:  # given up by a younger run, and pruned since
            self._retry(lambda: store.check_generation(run.generation, run.run_id))
            raise
        with self.lock:
            held = self.acknowledged.setdefault(final.id, final.checkpoint_id)
        assert held == final.checkpoint_id, f"id {final.id} was acknowledged twice"
        self.counts["acknowledged"] += 1
        return final

    def _check(self) -> None:
        store = self.open()
        ids = store.list_ids()
        report = store.recover_latest_validated()
        newest = max(self.acknowledged, default=0)
        if newest:
            assert report.chosen_id is not None
            assert report.chosen_id >= newest, f"seed {self.seed}: {newest} was lost: {report}"
        assert all(s.phase == "prepared" for s in report.skipped), f"seed {self.seed}: {report}"
        for id, checkpoint_id in self.acknowledged.items():
            loaded = store.load_by_id(id)
            if loaded is None:
                assert id < newest or report.chosen_id > newest  # type: ignore[operator]
            else:
                assert loaded.checkpoint_id == checkpoint_id
        # A fresh run takes over, and gc leaves exactly what is referenced.
        store.claim_generation("last")
        store.prune(KeepLast(2))
        store.gc(grace_s=0)
        listed: set[str] = set()
        for id in store.list_ids():
            loaded = store.load_by_id(id)
            assert loaded is not None
            listed |= loaded.sidecar_paths()
            if loaded.durable_phase == "finalized":
                assert store.validate_checkpoint(id).valid, f"seed {self.seed}, checkpoint {id}"
        found = {m.key for m in store.blobs.list("state/")}
        assert found <= listed, f"seed {self.seed}"
        assert store.next_id() > max([*ids, newest], default=0)
        self.counts["checkpoints left"] += len(store.list_ids())


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that waits as long as it does for Google would take these tests hours."""
    monkeypatch.setattr("beam_ckpt.blobs._retry._FIRST_PAUSE", 0.01)
    monkeypatch.setattr("beam_ckpt.blobs._gcs._SAME_OBJECT_SECONDS", 0.02)


def on_files(tmp_path: Path, seeds: range) -> collections.Counter[str]:
    def one(seed: int) -> collections.Counter[str]:
        root = tmp_path / str(seed)
        counts: collections.Counter[str] = collections.Counter()
        Schedule(
            lambda: FileSystemCheckpointStore(root, key_group_count=4),
            seed,
            rate=0.04,
            counts=counts,
            pause=0.002,
        ).run()
        return counts

    # Several at a time: a writer waits more than it works.
    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(one, seeds), collections.Counter())


def on_gcs(server: GcsServer, seeds: range) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    with FaultProxy(server.url) as proxy:
        bucket = server.create_bucket()
        options = {**bucket.options, "endpoint_url": proxy.url}
        for seed in seeds:
            proxy.reset()
            proxy.schedule(seed, rate=0.1)
            Schedule(
                lambda s=seed: ObjectStoreCheckpointStore(  # type: ignore[misc]
                    f"{bucket.url}/{s}", key_group_count=4, **options
                ),
                seed,
                rate=0.02,
                counts=counts,
                pause=0.01,
            ).run()
            counts["requests"] += len(proxy.requests)
            counts["requests harmed"] += sum(r.fault is not None for r in proxy.requests)
    return counts


Record = Callable[[str, object], None]


def check_counts(counts: collections.Counter[str], schedules: int, record: Record) -> None:
    """The schedules did what they are for."""
    record("counts", ", ".join(f"{name} {n}" for name, n in counts.items()))
    assert counts["schedules"] == schedules
    assert counts["acknowledged"] > schedules
    assert counts["writers fenced"] > schedules / 2
    assert counts["writers killed"] > schedules / 10


# 2,000 in all under `slow`, 200 by default; in parts, so that two processes share them.


@pytest.mark.parametrize("first", [0, 70])
def test_70_schedules_of_concurrent_writers_on_files(
    tmp_path: Path, first: int, record_property: Record
) -> None:
    check_counts(on_files(tmp_path, range(first, first + 70)), 70, record_property)


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("first", [0, 30])
def test_30_schedules_of_concurrent_writers_on_gcs(
    gcs_server: GcsServer, first: int, record_property: Record
) -> None:
    counts = on_gcs(gcs_server, range(first, first + 30))
    check_counts(counts, 30, record_property)
    assert counts["requests harmed"] > 300


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", [1000, 1350, 1700, 2050])
def test_350_schedules_of_concurrent_writers_on_files(
    tmp_path: Path, first: int, record_property: Record
) -> None:
    check_counts(on_files(tmp_path, range(first, first + 350)), 350, record_property)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("first", [1000, 1150, 1300, 1450])
def test_150_schedules_of_concurrent_writers_on_gcs(
    gcs_server: GcsServer, first: int, record_property: Record
) -> None:
    counts = on_gcs(gcs_server, range(first, first + 150))
    check_counts(counts, 150, record_property)
    assert counts["requests harmed"] > 1500
