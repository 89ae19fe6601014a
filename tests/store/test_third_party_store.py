"""Somebody else's store: what is required is theirs, what is provided is the base class's."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from beam_ckpt.errors import InvalidCheckpointError, StoreUrlError
from beam_ckpt.manifest import CheckpointManifest, FinalMarker, SidecarEntry
from beam_ckpt.recovery import RecoveryReport, ValidationResult
from beam_ckpt.retention import GcReport, PruneReport, RetentionPolicy
from beam_ckpt.store import (
    CheckpointStore,
    FileSystemCheckpointStore,
    MemoryCheckpointStore,
    StateChunk,
    copy,
    open_store,
)
from beam_ckpt.testing.faults import FaultPlan, faulty_store
from beam_ckpt.testing.store import Opener, StoreSuite, a_large_manifest, a_manifest, commit


class ForeignStore(CheckpointStore):
    """Only what is abstract, forwarded to a store that it knows nothing else about."""

    def __init__(self, inner: CheckpointStore) -> None:
        self._inner = inner

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def deployment_id(self) -> str:
        return self._inner.deployment_id

    @property
    def key_group_count(self) -> int | None:
        return self._inner.key_group_count

    @property
    def participant_id(self) -> int:
        return self._inner.participant_id

    @property
    def max_state_data_bytes(self) -> int:
        return self._inner.max_state_data_bytes

    def save(self, manifest: CheckpointManifest) -> CheckpointManifest:
        return self._inner.save(manifest)

    def finalize(self, id: int) -> CheckpointManifest:
        return self._inner.finalize(id)

    def load_latest(self) -> CheckpointManifest | None:
        return self._inner.load_latest()

    def load_by_id(self, id: int) -> CheckpointManifest | None:
        return self._inner.load_by_id(id)

    def list(self) -> Any:
        return self._inner.list()

    def list_ids(self) -> Any:  # provided, but a store that can tell damaged ones does better
        return self._inner.list_ids()

    def next_id(self) -> int:
        return self._inner.next_id()

    def prune_before(self, before_epoch: int) -> int:
        return self._inner.prune_before(before_epoch)

    def save_state_data(
        self, id: int, chunks: Iterable[StateChunk]
    ) -> tuple[tuple[str, int, SidecarEntry], ...]:
        return self._inner.save_state_data(id, chunks)

    def load_state_data(self, id: int) -> Iterator[StateChunk] | None:
        return self._inner.load_state_data(id)

    def read_sidecar(self, entry: SidecarEntry) -> bytes:
        return self._inner.read_sidecar(entry)

    def validate_checkpoint(self, id: int, *, deep: bool = True) -> ValidationResult:
        return self._inner.validate_checkpoint(id, deep=deep)

    def write_sidecar(self, **what: Any) -> SidecarEntry:
        return self._inner.write_sidecar(**what)

    def claim_generation(self, run_id: str, *, restored_from: int | None = None) -> int:
        return self._inner.claim_generation(run_id, restored_from=restored_from)

    def check_generation(self, generation: int, run_id: str) -> None:
        self._inner.check_generation(generation, run_id)

    def final_marker(self, id: int) -> FinalMarker | None:
        return self._inner.final_marker(id)

    def prune(
        self, policy: RetentionPolicy, *, dry_run: bool = False, only: PruneReport | None = None
    ) -> PruneReport:
        return self._inner.prune(policy, dry_run=dry_run, only=only)

    def tag(self, name: str, id: int) -> None:
        self._inner.tag(name, id)

    def untag(self, name: str) -> None:
        self._inner.untag(name)

    def tags(self) -> Mapping[str, int]:
        return self._inner.tags()

    def gc(
        self, *, grace_s: float = 86400.0, dry_run: bool = False, only: GcReport | None = None
    ) -> GcReport:
        return self._inner.gc(grace_s=grace_s, dry_run=dry_run, only=only)

    def repair_pointer(self, *, dry_run: bool = False, discard: bool = False) -> RecoveryReport:
        return self._inner.repair_pointer(dry_run=dry_run, discard=discard)


class TestForeignStore(StoreSuite):
    @pytest.fixture
    def opener(self) -> Opener[ForeignStore]:
        name = uuid.uuid4().hex
        return lambda at="", **options: ForeignStore(
            MemoryCheckpointStore(f"{name}-{at}", **options)
        )

    def test_what_a_superseded_run_prepared_is_never_finalized(self, store: ForeignStore) -> None:
        # The base class sees the phase only; why an attempt was given up is the store's own.
        store.claim_generation("old")
        commit(store, 1, finalized=False)
        store.claim_generation("new")
        (skipped,) = store.recover_latest_validated().skipped
        assert skipped.phase == "prepared"


def test_a_foreign_store_refuses_to_read_peers_unless_it_says_how() -> None:
    store = ForeignStore(MemoryCheckpointStore(uuid.uuid4().hex))
    store.save(a_manifest(1))
    for read in (
        store.load_manifest_for_participant,
        store.load_state_data_for_participant,
        store.state_data_len_for_participant,
        store.load_checkpoint_artifacts_for_participant,
    ):
        with pytest.raises(InvalidCheckpointError, match="holds participant 0 only"):
            read(1, 1)


@pytest.mark.parametrize("groups", [1, 40])
def test_recovery_hears_the_marker_that_a_foreign_store_has(groups: int) -> None:
    """Its seal is of what that store keeps, which may be anything but the JSON."""
    store = ForeignStore(MemoryCheckpointStore(uuid.uuid4().hex, key_group_count=groups))
    final = store.finalize(store.save(a_large_manifest(store, 1, groups=groups)).id)
    facts = store._facts(1, deep=True)
    assert (facts.manifest, facts.marker, facts.issues) == (final, store.final_marker(1), ())
    assert store._facts(2, deep=True).marker is None


def test_an_open_store_passes_through_open_store() -> None:
    store = ForeignStore(MemoryCheckpointStore(uuid.uuid4().hex))
    assert open_store(store) is store
    with pytest.raises(StoreUrlError, match="open already"):
        open_store(store, token="anon")


def test_tools_that_need_blobs_say_so() -> None:
    store = ForeignStore(MemoryCheckpointStore(uuid.uuid4().hex))
    other = MemoryCheckpointStore(uuid.uuid4().hex)
    with pytest.raises(TypeError, match="does not stand on blobs"):
        copy(store, other)
    with pytest.raises(TypeError, match="does not stand on blobs"):
        faulty_store(store, FaultPlan())


def test_a_checkpoint_goes_from_files_to_memory_and_back(tmp_path: Any) -> None:
    local, memory = (
        FileSystemCheckpointStore(tmp_path / "a"),
        MemoryCheckpointStore(uuid.uuid4().hex),
    )
    last = commit(local, 1)
    copy(local, memory)
    back = FileSystemCheckpointStore(tmp_path / "b")
    copy(memory, back)
    assert back.load_latest() == last
    assert back.validate_checkpoint(1).valid
