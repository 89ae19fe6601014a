"""The store against a model: any sequence of operations, damage and failures."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from beam_ckpt.errors import (
    CheckpointConflictError,
    CheckpointNotFoundError,
    CheckpointStorageError,
    FencedError,
    InvalidCheckpointError,
    NoValidCheckpointError,
)
from beam_ckpt.manifest import CheckpointManifest, RunIdentity
from beam_ckpt.retention import KeepLast
from beam_ckpt.store import FileSystemCheckpointStore, MemoryCheckpointStore
from beam_ckpt.store._blobstore import BlobCheckpointStore
from beam_ckpt.testing.faults import Fault, FaultPlan, faulty_store
from beam_ckpt.testing.store import a_manifest, listing, write


class StoreMachine(RuleBasedStateMachine):
    """The model is a dictionary of manifests, the set of finalized ids, and the tags."""

    runs: Bundle[RunIdentity] = Bundle("runs")

    def open(self) -> BlobCheckpointStore:
        raise NotImplementedError

    @initialize(target=runs)
    def start(self) -> RunIdentity:
        self.store = self.open()
        self.saved: dict[int, CheckpointManifest] = {}
        self.finalized: set[int] = set()
        self.abandoned: set[int] = set()
        self.bad_files: set[str] = set()
        self.tags: dict[str, int] = {}
        self.highest = 0
        self.pointer = 0
        self.generation = 0
        self.restored: int | None = None
        return self._claim(None)

    def _claim(self, restored: int | None) -> RunIdentity:
        run_id = f"run-{self.generation + 1}"
        generation = self.store.claim_generation(run_id, restored_from=restored)
        assert generation == self.generation + 1
        assert self.store.claim_generation(run_id) == generation
        self.generation, self.restored = generation, restored
        for id, manifest in self.saved.items():
            if id not in self.finalized and manifest.run is not None:
                self.abandoned.add(id)
        return RunIdentity(generation=generation, run_id=run_id)

    # -- rules -----------------------------------------------------------------------------

    @rule(target=runs)
    def claim(self) -> RunIdentity:
        return self._claim(self._newest_valid())

    @rule(
        run=runs,
        reuse=st.booleans(),
        groups=st.sets(st.integers(0, 3), max_size=3),
        inline=st.booleans(),
        as_final=st.booleans(),
        owned=st.booleans(),
        gap=st.integers(0, 2),
    )
    def save(
        self,
        run: RunIdentity,
        reuse: bool,
        groups: set[int],
        inline: bool,
        as_final: bool,
        owned: bool,
        gap: int,
    ) -> None:
        id = self.store.next_id() + gap
        assert id > self.highest
        base = self.saved.get(max(self.finalized, default=0)) if reuse else None
        entries = {} if base is None else {e[1]: e for e in base.sidecars()}
        for group in groups:
            data = b"%d-%d" % (id, group)
            entries[group] = write(
                self.store, data, key_group=group, inline_threshold=100 if inline else -1
            )
        manifest = a_manifest(
            id,
            self.generation + len(self.saved) + 1,
            operators=listing(entries[g] for g in sorted(entries)),
            key_group_count=4,
            run=run if owned else None,
            finalized=as_final,
        )
        if owned and run.generation < self.generation:
            with pytest.raises(FencedError):
                self.store.save(manifest)
            return
        saved = self.store.save(manifest)
        assert self.store.save(manifest) == saved
        self.saved[id] = saved.with_phase("prepared")
        self.highest = id
        if as_final:
            self._published(id)

    def _published(self, id: int) -> None:
        self.finalized.add(id)
        self.pointer = max(self.pointer, id)

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def save_something_else_under_a_used_id(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.saved)))
        with pytest.raises((CheckpointConflictError, InvalidCheckpointError)):
            self.store.save(a_manifest(id, key_group_count=4))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def finalize(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.saved)))
        run = self.saved[id].run
        fenced = run is not None and run.generation < self.generation
        if fenced or id in self.abandoned:
            with pytest.raises(FencedError):
                self.store.finalize(id)
            return
        final = self.store.finalize(id)
        assert final == self.saved[id].with_phase("finalized")
        self._published(id)

    @rule(id=st.integers(1, 60))
    def finalize_what_is_not_there(self, id: int) -> None:
        if id not in self.saved:
            with pytest.raises(CheckpointNotFoundError):
                self.store.finalize(id)

    def _kept(self) -> set[int]:
        keep = set(self.tags.values()) | {self.pointer, max(self.finalized, default=0)}
        own = any(
            (run := self.saved[i].run) is not None
            and run.generation == self.generation
            and i > (self.restored or 0)
            for i in self.finalized
        )
        if self.restored is not None and not own:
            keep.add(self.restored)
        return keep

    def _prune(self, doomed: set[int]) -> None:
        for id in doomed:
            del self.saved[id]
        self.finalized -= doomed
        self.abandoned -= doomed

    @rule(count=st.integers(1, 4), dry=st.booleans())
    def prune(self, count: int, dry: bool) -> None:
        finalized = sorted(self.finalized)
        keep = set(finalized[-count:]) | self._kept()
        doomed = {
            i
            for i in self.saved
            if i not in keep and (i in self.finalized or i < max(self.finalized, default=0))
        }
        report = self.store.prune(KeepLast(count), dry_run=dry)
        assert set(report.deleted) == doomed
        assert set(report.kept) == set(self.saved) - doomed
        if not dry:
            self._prune(doomed)

    @rule(epoch=st.integers(0, 30))
    def prune_before(self, epoch: int) -> None:
        doomed = {i for i, m in self.saved.items() if m.epoch < epoch and i not in self._kept()}
        assert self.store.prune_before(epoch) == len(doomed)
        self._prune(doomed)

    @precondition(lambda self: self.finalized)
    @rule(name=st.sampled_from("abc"), data=st.data())
    def tag(self, name: str, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.finalized)))
        if self.tags.get(name, id) != id:
            with pytest.raises(CheckpointConflictError):
                self.store.tag(name, id)
            return
        self.store.tag(name, id)
        self.tags[name] = id

    @rule(name=st.sampled_from("abc"))
    def untag(self, name: str) -> None:
        if self.tags.pop(name, None) is None:
            with pytest.raises(CheckpointNotFoundError):
                self.store.untag(name)
        else:
            self.store.untag(name)

    @rule(run=runs, orphans=st.integers(0, 2))
    def collect_garbage(self, run: RunIdentity, orphans: int) -> None:
        for _ in range(orphans):
            write(self.store, b"orphan", run_id=run.run_id, boundary=10**9)
        dry = self.store.gc(grace_s=0, dry_run=True)
        assert self.store.gc(grace_s=0).deleted == dry.deleted
        if run.generation < self.generation:
            assert sum(run.run_id in g.key for g in dry.deleted) >= orphans
        assert self.store.gc(grace_s=0).deleted == ()

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def damage_a_file(self, data: st.DataObject) -> None:
        files = sorted(p for m in self.saved.values() for p in m.sidecar_paths())
        if files:
            path = data.draw(st.sampled_from(files))
            self.store.blobs.put(path, b"damaged!")
            self.bad_files.add(path)

    @rule()
    def lose_and_repair_the_pointer(self) -> None:
        self.store.blobs.put("latest.json", b"broken")
        with pytest.raises(InvalidCheckpointError):
            self.store.load_latest()
        newest = self._newest_valid()
        if newest is None:
            with pytest.raises(NoValidCheckpointError):
                self.store.repair_pointer()
            self.store.blobs.delete_many(["latest.json"])
            self.pointer = 0
            if self.finalized:  # the next finalize of the newest brings it back
                return
        else:
            assert self.store.repair_pointer().chosen_id == newest
            self.pointer = newest

    @rule(
        nth=st.integers(1, 12),
        when=st.sampled_from(["before", "after"]),
        action=st.sampled_from(["error", "lost_response"]),
        run=consumes(runs),
    )
    def commit_with_a_failure(self, nth: int, when: str, action: str, run: RunIdentity) -> None:
        """A step fails; the model learns from the store what came of it, and checks that."""
        plan = FaultPlan(Fault("*", nth=nth, when=when, action=action))  # type: ignore[arg-type]
        faulty = faulty_store(self.open(), plan)
        id = self.store.next_id()
        try:
            entry = write(faulty, b"state", run_id=run.run_id)
            faulty.save(a_manifest(id, 40, operators=listing([entry]), key_group_count=4, run=run))
            faulty.finalize(id)
        except (CheckpointStorageError, FencedError):
            pass
        loaded = self.store.load_by_id(id)
        if loaded is not None:
            assert run.generation == self.generation
            assert self.store.validate_checkpoint(id).valid
            self.saved[id] = loaded.with_phase("prepared")
            self.highest = id
            if loaded.durable_phase == "finalized":
                self.store.finalize(id)
                self._published(id)
        else:
            assert id not in self.store.list_ids()

    # -- what always holds -----------------------------------------------------------------

    def _newest_valid(self) -> int | None:
        return max((i for i in self.finalized if not self._damaged(i)), default=None)

    def _damaged(self, id: int) -> bool:
        return bool(self.saved[id].sidecar_paths() & self.bad_files)

    @invariant()
    def the_store_is_the_model(self) -> None:
        if not hasattr(self, "saved"):
            return
        fresh = self.open()
        assert fresh.list_ids() == sorted(self.saved)
        assert fresh.next_id() > self.highest
        assert fresh.tags() == dict(sorted(self.tags.items()))
        for id, manifest in self.saved.items():
            phase = "finalized" if id in self.finalized else "prepared"
            assert fresh.load_by_id(id) == manifest.with_phase(phase)  # type: ignore[arg-type]
            assert fresh.validate_checkpoint(id).valid != self._damaged(id)
        latest = fresh.load_latest()
        assert (0 if latest is None else latest.id) == self.pointer

    @invariant()
    def recovery_finds_the_newest_valid(self) -> None:
        if not hasattr(self, "saved"):
            return
        report = self.open().recover_latest_validated()
        newest = self._newest_valid()
        assert report.chosen_id == newest
        passed = [i for i in sorted(self.saved, reverse=True) if newest is None or i > newest]
        assert [s.id for s in report.skipped] == passed
        for skipped in report.skipped:
            damaged = skipped.id in self.finalized and self._damaged(skipped.id)
            assert skipped.phase == ("invalid" if damaged else "prepared")


def _machine(files: bool) -> type[StoreMachine]:
    class Machine(StoreMachine):
        def __init__(self) -> None:
            super().__init__()
            self._directory = tempfile.TemporaryDirectory() if files else None
            self._name = uuid.uuid4().hex

        def open(self) -> BlobCheckpointStore:
            if self._directory is None:
                return MemoryCheckpointStore(self._name, key_group_count=4)
            root = Path(self._directory.name, "root")
            return FileSystemCheckpointStore(root, key_group_count=4)

        def teardown(self) -> None:
            if self._directory is not None:
                self._directory.cleanup()

    return Machine


@pytest.mark.parametrize(("files", "examples"), [(False, 40), (True, 8)], ids=["memory", "files"])
def test_a_store_behaves_as_its_model(files: bool, examples: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        _machine(files),
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("files", [False, True], ids=["memory", "files"])
def test_a_store_behaves_as_its_model_for_long(files: bool) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        _machine(files),
        settings=settings(
            max_examples=40 if files else 300,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
