"""The conformance suite of a checkpoint store: what any implementation must be seen to do.

The author of a store subclasses `StoreSuite` in a test module and says how one is opened; a
store over `Blobs` subclasses `BlobStoreSuite`, which adds what can only be seen by damaging
objects underneath. This library's own stores do the same.

Example:
    class TestMyStore(StoreSuite):
        @pytest.fixture
        def opener(self, tmp_path):
            return lambda at="", **options: MyStore(tmp_path / at, **options)

The idea of shipping the suite is zarr-python's (`zarr.testing.store`); most of the rows are the
behaviour of LaminarDB's stores. A row's number stands in the docstring of its test.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeVar

import pytest

from beam_ckpt.blobs import ABSENT, BlobConflict, BlobMeta, Blobs
from beam_ckpt.blobs._base import crc32c
from beam_ckpt.errors import (
    CheckpointConflictError,
    CheckpointNotFoundError,
    CheckpointStorageError,
    CheckpointTooLargeError,
    FencedError,
    IndeterminateError,
    InvalidCheckpointError,
    NoValidCheckpointError,
    StoreUrlError,
    UnsupportedFormatError,
)
from beam_ckpt.manifest import (
    CellSpec,
    CheckpointManifest,
    OperatorSnapshotEntry,
    OperatorSpec,
    PartitionSnapshotEntry,
    PipelineIdentity,
    RunIdentity,
    SidecarEntry,
    SourceOffsetEntry,
    new_checkpoint_id,
    sha256_hex,
    unpacked,
)
from beam_ckpt.recovery import SkippedCheckpoint
from beam_ckpt.retention import KeepFor, KeepLast
from beam_ckpt.store import CheckpointStore, StateChunk, copy
from beam_ckpt.store._blobstore import BlobCheckpointStore
from beam_ckpt.testing.faults import Fault, FaultPlan, FaultyBlobs, fault_points, faulty_store

__all__ = ["BlobStoreSuite", "Opener", "StoreSuite", "a_manifest", "commit"]

_S = TypeVar("_S", bound=CheckpointStore, covariant=True)

PREPARED = "checkpoint is prepared but not finalized"


class Opener(Protocol[_S]):
    """Opens a store of the test's own; the same place every time for the same `at`."""

    def __call__(
        self,
        at: str = "",
        *,
        key_group_count: int | None = 1,
        participant_id: int = 0,
        max_state_data_bytes: int = 512 * 1024 * 1024,
    ) -> _S:
        """Opens the store at a place below the test's root."""


def a_manifest(
    id: int, epoch: int | None = None, *, finalized: bool = False, **fields: Any
) -> CheckpointManifest:
    """Returns a manifest without state; the epoch is the id unless given."""
    known: dict[str, Any] = {
        "checkpoint_id": new_checkpoint_id(),
        "id": id,
        "epoch": id if epoch is None else epoch,
        "timestamp_ms": time.time_ns() // 1_000_000,
        "durable_phase": "finalized" if finalized else "prepared",
    }
    return CheckpointManifest(**known | fields)


def listing(
    entries: Iterable[tuple[str, int, SidecarEntry]],
) -> dict[str, OperatorSnapshotEntry]:
    """Returns the `operators` of a manifest that lists the given entries."""
    groups: dict[str, dict[int, list[SidecarEntry]]] = {}
    for operator, group, entry in entries:
        groups.setdefault(operator, {}).setdefault(group, []).append(entry)
    return {
        operator: OperatorSnapshotEntry(
            partitions=tuple(
                PartitionSnapshotEntry(partition_id=g, sidecars=tuple(held[g]))
                for g in sorted(held)
            )
        )
        for operator, held in groups.items()
    }


def write(
    store: CheckpointStore,
    data: bytes,
    *,
    operator: str = "totals",
    key_group: int = 0,
    boundary: int | None = 1_000_000,
    run_id: str = "run-1",
    kind: Literal["full", "delta"] = "full",
    inline_threshold: int = -1,
) -> tuple[str, int, SidecarEntry]:
    """Writes a sidecar and returns it as `listing` takes it."""
    entry = store.write_sidecar(
        operator=operator,
        key_group=key_group,
        boundary=boundary,
        run_id=run_id,
        data=data,
        kind=kind,
        rows=1,
        inline_threshold=inline_threshold,
    )
    return operator, key_group, entry


def commit(
    store: CheckpointStore,
    id: int,
    data: bytes | None = None,
    *,
    epoch: int | None = None,
    finalized: bool = True,
    **fields: Any,
) -> CheckpointManifest:
    """Commits a checkpoint with one sidecar of its own, as a pipeline does."""
    run = fields.get("run")
    entry = write(
        store,
        f"state of checkpoint {id}".encode() if data is None else data,
        boundary=fields.get("watermark"),
        run_id=run.run_id if run else "run-1",
    )
    manifest = a_manifest(id, epoch, operators=listing([entry]), **fields)
    saved = store.save(manifest)
    return store.finalize(id) if finalized else saved


def a_large_manifest(
    store: CheckpointStore, id: int, *, groups: int = 40, **fields: Any
) -> CheckpointManifest:
    """Returns a manifest of so many key groups that it is stored as gzip; not saved yet."""
    entries = [
        write(store, b"%d of %d" % (group, id), key_group=group, inline_threshold=100)
        for group in range(groups)
    ]
    return a_manifest(id, operators=listing(entries), key_group_count=groups, **fields)


def path_of(manifest: CheckpointManifest, index: int = 0) -> str:
    """Returns the path of a manifest's n-th file."""
    path = manifest.sidecars()[index][2].path
    assert path is not None
    return path


def gather(chunks: Iterable[StateChunk] | None) -> list[StateChunk]:
    """Returns the chunks of a checkpoint that must have some."""
    assert chunks is not None
    return list(chunks)


class StoreSuite:
    """Every row that can be seen through the contract alone."""

    @pytest.fixture
    def opener(self) -> Opener[CheckpointStore]:
        """To be overridden: how a store is opened."""
        raise NotImplementedError("override the fixture `opener`")

    @pytest.fixture
    def store(self, opener: Opener[CheckpointStore]) -> CheckpointStore:
        """An empty store."""
        return opener()

    # -- A. configuration ----------------------------------------------------------------

    def test_a_store_defaults_to_one_key_group_and_half_a_gibibyte(
        self, store: CheckpointStore
    ) -> None:
        """Row 1."""
        assert store.key_group_count == 1
        assert store.participant_id == 0
        assert store.max_state_data_bytes == 512 * 1024 * 1024

    def test_an_explicit_key_group_count_is_kept_and_enforced(
        self, opener: Opener[CheckpointStore]
    ) -> None:
        """Row 2."""
        store = opener(key_group_count=128)
        assert store.key_group_count == 128
        with pytest.raises(InvalidCheckpointError, match=r"1 key groups.*opened with 128"):
            store.save(a_manifest(1))
        assert store.save(a_manifest(1, key_group_count=128)).key_group_count == 128

    @pytest.mark.parametrize("limit", [0, -1, 2**63 - 1, 2**64 - 1])
    def test_an_unusable_state_budget_is_refused(
        self, opener: Opener[CheckpointStore], limit: int
    ) -> None:
        """Row 3."""
        with pytest.raises(ValueError, match="max_state_data_bytes"):
            opener(max_state_data_bytes=limit)

    @pytest.mark.parametrize("count", [0, 65536])
    def test_an_impossible_key_group_count_is_refused(
        self, opener: Opener[CheckpointStore], count: int
    ) -> None:
        """Row 4."""
        with pytest.raises(ValueError, match=f"key-group count {count} is outside 1..65535"):
            opener(key_group_count=count)

    def test_a_store_pickles_with_its_configuration(self, opener: Opener[CheckpointStore]) -> None:
        """Workers get it that way."""
        store = opener(key_group_count=7, max_state_data_bytes=1000)
        commit(store, 1, key_group_count=7)
        again = pickle.loads(pickle.dumps(store))
        assert (again.url, again.key_group_count, again.max_state_data_bytes) == (
            store.url,
            7,
            1000,
        )
        assert again.deployment_id == store.deployment_id != ""

    def test_opening_and_reading_write_nothing(self, opener: Opener[CheckpointStore]) -> None:
        """A look at a wrong path leaves no trace of a store there."""
        store = opener()
        assert store.deployment_id == ""
        assert store.load_latest() is None
        assert (store.list(), store.list_ids(), dict(store.tags())) == ([], [], {})
        assert store.recover_latest_validated().examined == 0
        assert store.prune_before(10) == 0
        assert store.prune(KeepLast(1)).deleted == ()
        assert opener().deployment_id == ""

    # -- B. save and load ----------------------------------------------------------------

    def test_a_finalized_save_is_the_latest(self, store: CheckpointStore) -> None:
        """Row 5."""
        saved = store.save(a_manifest(1, epoch=4, finalized=True))
        latest = store.load_latest()
        assert latest == saved
        assert latest is not None
        assert (latest.id, latest.epoch, latest.durable_phase) == (1, 4, "finalized")

    def test_an_empty_store_has_no_latest(self, store: CheckpointStore) -> None:
        """Row 6."""
        assert store.load_latest() is None

    def test_the_last_of_five_saves_is_the_latest(self, store: CheckpointStore) -> None:
        """Row 7."""
        for id in range(1, 6):
            commit(store, id)
        latest = store.load_latest()
        assert latest is not None
        assert latest.id == 5

    def test_a_checkpoint_is_loaded_by_its_id(self, store: CheckpointStore) -> None:
        """Row 8."""
        first, second = commit(store, 1), commit(store, 2)
        assert store.load_by_id(1) == first
        assert store.load_by_id(2) == second
        assert store.load_by_id(99) is None

    def test_a_list_is_ascending_whatever_the_order_of_saves(self, store: CheckpointStore) -> None:
        """Row 9."""
        for id in (1, 3, 2):
            commit(store, id)
        assert store.list() == [(1, 1), (2, 2), (3, 3)]
        assert store.list_ids() == [1, 2, 3]

    def test_every_field_of_a_manifest_comes_back(self, opener: Opener[CheckpointStore]) -> None:
        """Rows 10 and 78."""
        store = opener(key_group_count=4)
        generation = store.claim_generation("run-é".replace("é", "e"))
        entries = [
            write(store, b"file", operator="a/ü", key_group=1),
            write(store, b"inline", operator="a/ü", key_group=3, inline_threshold=100),
            write(store, b"", operator="b", key_group=0, boundary=None, inline_threshold=0),
        ]
        manifest = a_manifest(
            1,
            epoch=9,
            operators=listing(entries),
            source_offsets={
                "events": SourceOffsetEntry(
                    source_type="kafka", offsets={"events-0": "1234"}, epoch=9
                )
            },
            parent_id=new_checkpoint_id(),
            watermark=-(2**63),
            key_group_count=4,
            run=RunIdentity(generation=generation, run_id="run-e"),
            pipeline=PipelineIdentity(
                operators={
                    "b": OperatorSpec(
                        key_coder="StrUtf8Coder",
                        window_coder="GlobalWindowCoder",
                        cells={"n": CellSpec(kind="bag", coder="VarIntCoder")},
                        time_sorted=True,
                    )
                },
                beam_version="2.77.0",
                python_version="3.11.7",
            ),
        )
        saved = store.save(manifest)
        assert saved == manifest.model_copy(update={"deployment_id": store.deployment_id})
        assert store.load_by_id(1) == saved
        assert store.finalize(1) == saved.with_phase("finalized") == store.load_by_id(1)
        assert [store.read_sidecar(e) for _, _, e in saved.sidecars()] == [b"file", b"inline", b""]

    def test_a_manifest_of_many_key_groups_is_saved_like_any_other(
        self, opener: Opener[CheckpointStore]
    ) -> None:
        """However a store keeps it: as large as it is, it is small to some."""
        store = opener(key_group_count=40)
        first, second = a_large_manifest(store, 1), a_large_manifest(store, 2)
        saved = store.save(first)
        assert saved == first.model_copy(update={"deployment_id": store.deployment_id})
        assert store.save(first) == saved == store.load_by_id(1)
        with pytest.raises(CheckpointConflictError, match="checkpoint 1 exists"):
            store.save(second.model_copy(update={"id": 1}))
        final = store.finalize(1)
        assert final == saved.with_phase("finalized") == store.finalize(1) == store.load_latest()
        assert store.validate_checkpoint(1).valid
        assert opener(key_group_count=40).recover_latest_validated().chosen == final
        held = [chunk.data for chunk in gather(store.load_state_data(1))]
        assert held == [b"%d of 1" % group for group in range(40)]
        store.finalize(store.save(second).id)
        assert store.list() == [(1, 1), (2, 2)]
        assert store.prune(KeepLast(1)).deleted == (1,)
        assert store.list_ids() == [2]

    def test_saving_prunes_nothing(self, store: CheckpointStore) -> None:
        """Row 11."""
        for id in range(1, 11):
            commit(store, id)
        assert store.list_ids() == list(range(1, 11))

    @pytest.mark.parametrize("nothing", [None, ()])
    def test_saving_with_no_state_is_saving(
        self, store: CheckpointStore, nothing: tuple[()] | None
    ) -> None:
        """Row 12."""
        manifest = a_manifest(1)
        saved = store.save_with_state(manifest, nothing)
        assert saved == store.save(manifest) == store.load_by_id(1)
        assert store.load_state_data(1) is None

    def test_a_nested_place_is_a_store_of_its_own(self, opener: Opener[CheckpointStore]) -> None:
        """Row 14."""
        nested, other = opener("nodes/abc123"), opener("nodes/abc")
        commit(nested, 1)
        assert nested.list_ids() == [1]
        assert other.list_ids() == []
        assert nested.deployment_id != other.deployment_id

    # -- C. two phases -------------------------------------------------------------------

    def test_a_prepared_checkpoint_is_inventory_until_it_is_finalized(
        self, store: CheckpointStore
    ) -> None:
        """Row 16, first part."""
        manifest = commit(store, 1, finalized=False)
        assert store.load_latest() is None
        assert store.list_ids() == [1]
        assert manifest.durable_phase == "prepared"
        assert store.load_by_id(1) == manifest
        final = store.finalize(1)
        assert final == manifest.with_phase("finalized")
        assert store.load_latest() == final == store.finalize(1)

    def test_only_the_very_manifest_that_was_prepared_can_be_finalized(
        self, store: CheckpointStore
    ) -> None:
        """Row 17."""
        manifest = a_manifest(1)
        saved = store.save(manifest)
        changed = manifest.model_copy(update={"epoch": 2})
        for phase in ("prepared", "finalized"):
            with pytest.raises(CheckpointConflictError, match="other immutable content"):
                store.save(changed.with_phase(phase))
        assert store.load_by_id(1) == saved
        assert store.load_latest() is None
        final = store.save(manifest.with_phase("finalized"))
        assert store.load_latest() == final == saved.with_phase("finalized")

    def test_finalizing_what_was_never_saved_says_so(self, store: CheckpointStore) -> None:
        """Row 18."""
        with pytest.raises(CheckpointNotFoundError, match="checkpoint 7 not found"):
            store.finalize(7)

    def test_saving_a_prepared_manifest_again_changes_nothing_after_finalize(
        self, store: CheckpointStore
    ) -> None:
        """Row 19."""
        manifest = a_manifest(1)
        store.save(manifest)
        final = store.finalize(1)
        store.save(manifest)
        assert store.load_latest() == store.load_by_id(1) == final

    def test_finalizing_keeps_sizes_and_checksums(self, store: CheckpointStore) -> None:
        """Row 20."""
        before = commit(store, 1, b"abc", finalized=False)
        assert store.finalize(1).sidecars() == before.sidecars()

    # -- D. immutability and concurrency -------------------------------------------------

    def test_the_same_manifest_saves_twice_and_another_conflicts(
        self, store: CheckpointStore
    ) -> None:
        """Row 21."""
        manifest = a_manifest(1, finalized=True)
        assert store.save(manifest) == store.save(manifest)
        with pytest.raises(CheckpointConflictError, match="checkpoint 1 exists"):
            store.save(a_manifest(1, finalized=True))
        latest = store.load_latest()
        assert latest is not None
        assert latest.checkpoint_id == manifest.checkpoint_id

    def test_the_same_state_saves_twice_and_other_state_conflicts(
        self, store: CheckpointStore
    ) -> None:
        """Row 22."""
        chunk = StateChunk("totals", 0, b"state")
        first = store.save_state_data(1, [chunk])
        assert store.save_state_data(1, [chunk]) == first
        for other in (b"State", b"longer state", b""):
            with pytest.raises(CheckpointConflictError, match="other immutable content"):
                store.save_state_data(1, [StateChunk("totals", 0, other)])
        assert store.read_sidecar(first[0][2]) == b"state"

    def test_of_two_concurrent_writers_of_one_id_exactly_one_wins_and_validates(
        self, opener: Opener[CheckpointStore]
    ) -> None:
        """Row 23."""
        stores = [opener(), opener()]
        start = threading.Barrier(2)

        def one(index: int) -> bool:
            start.wait()
            chunk = StateChunk("totals", 0, bytes([index]) * 1000)
            try:
                stores[index].save_with_state(a_manifest(1, finalized=True), [chunk])
            except CheckpointConflictError:
                return False
            return True

        with ThreadPoolExecutor(2) as pool:
            won = list(pool.map(one, range(2)))
        assert won.count(True) == 1
        assert stores[0].validate_checkpoint(1).issues == ()
        (chunk,) = gather(stores[0].load_state_data(1))
        assert chunk.data == bytes([won.index(True)]) * 1000

    def test_an_older_id_does_not_take_the_pointer_back(self, store: CheckpointStore) -> None:
        """Row 24."""
        commit(store, 10)
        commit(store, 5)
        latest = store.load_latest()
        assert latest is not None
        assert latest.id == 10

    def test_after_32_concurrent_publishers_the_pointer_names_the_highest(
        self, opener: Opener[CheckpointStore]
    ) -> None:
        """Row 25."""
        opener().claim_generation("setup")
        start = threading.Barrier(32)

        def publish(id: int) -> None:
            store = opener()
            start.wait()
            store.save(a_manifest(id, finalized=True))

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(publish, range(1, 33)))
        store = opener()
        latest = store.load_latest()
        assert latest is not None
        assert latest.id == 32
        assert store.list_ids() == list(range(1, 33))
        assert all(store.load_by_id(id) for id in range(1, 33))

    # -- E. sidecars ---------------------------------------------------------------------

    def test_state_comes_back_chunk_by_chunk(self, opener: Opener[CheckpointStore]) -> None:
        """Rows 30, 32 and 58."""
        store = opener(key_group_count=3)
        chunks = [
            StateChunk("a", 0, b"one", rows=1, boundary=5),
            StateChunk("a", 2, b"", rows=0, boundary=5),
            StateChunk("b", 1, b"\x00\xff" * 1000, rows=7),
        ]
        manifest = a_manifest(1, key_group_count=3, finalized=True)
        saved = store.save_with_state(manifest, chunks)
        assert gather(store.load_state_data(1)) == chunks
        assert saved == store.load_latest()
        for (_, _, entry), chunk in zip(saved.sidecars(), chunks, strict=True):
            assert entry.sha256 == sha256_hex(chunk.data)
            assert entry.crc32c == crc32c(chunk.data)
            assert (entry.size_bytes, entry.rows) == (len(chunk.data), chunk.rows)
            assert entry.epoch == 1
        assert saved.total_size_bytes == sum(len(c.data) for c in chunks)

    def test_state_that_is_not_there_is_none(self, store: CheckpointStore) -> None:
        """Row 31."""
        assert store.load_state_data(1) is None
        store.save(a_manifest(1))
        assert store.load_state_data(1) is None

    def test_state_without_a_manifest_is_no_checkpoint(self, store: CheckpointStore) -> None:
        """Row 33."""
        store.save_state_data(1, [StateChunk("totals", 0, b"orphan")])
        write(store, b"orphan")
        assert store.load_latest() is None
        assert store.list() == []
        assert store.load_state_data(1) is None
        assert store.recover_latest_validated().examined == 0

    def test_an_invalid_manifest_is_refused_before_anything_is_written(
        self, store: CheckpointStore
    ) -> None:
        """Row 34."""
        broken = a_manifest(1).model_copy(update={"epoch": 0})
        with pytest.raises(InvalidCheckpointError, match="epoch"):
            store.save_with_state(broken, [StateChunk("totals", 0, b"state")])
        with pytest.raises(InvalidCheckpointError, match="key group 5"):
            store.save_with_state(a_manifest(1), [StateChunk("totals", 5, b"state")])
        assert store.deployment_id == ""

    def test_the_state_budget_is_exact_and_holds_for_every_way_to_read(
        self, opener: Opener[CheckpointStore]
    ) -> None:
        """Row 35."""
        store = opener(max_state_data_bytes=8)
        with pytest.raises(CheckpointTooLargeError, match=r"9 bytes.* 8 allowed"):
            store.save_with_state(a_manifest(1), [StateChunk("totals", 0, b"9" * 9)])
        with pytest.raises(CheckpointTooLargeError, match=r"9 bytes.* 8 allowed"):
            store.save_state_data(1, [StateChunk("totals", 0, b"9" * 9)])
        with pytest.raises(CheckpointTooLargeError, match=r"9 bytes.* 8 allowed"):
            write(store, b"9" * 9)
        assert store.deployment_id == ""
        saved = store.save_with_state(a_manifest(1), [StateChunk("totals", 0, b"8" * 8)])
        assert store.state_data_len_for_participant(0, 1) == 8
        smaller = opener(max_state_data_bytes=7)
        for read in (
            lambda: smaller.load_state_data(1),
            lambda: smaller.state_data_len_for_participant(0, 1),
            lambda: smaller.read_sidecar(saved.sidecars()[0][2]),
            lambda: smaller.load_checkpoint_artifacts(1),
        ):
            with pytest.raises(CheckpointTooLargeError, match=r"8 bytes.* 7 allowed"):
                read()
        assert "8 bytes, 7 allowed" in smaller.validate_checkpoint(1).issues[0]

    def test_a_sidecar_of_size_zero_is_state(self, store: CheckpointStore) -> None:
        """Empty is not absent."""
        manifest = commit(store, 1, b"")
        assert store.read_sidecar(manifest.sidecars()[0][2]) == b""
        assert [c.data for c in gather(store.load_state_data(1))] == [b""]
        assert store.validate_checkpoint(1).valid

    def test_two_chunks_for_one_key_group_are_refused(self, store: CheckpointStore) -> None:
        """One sidecar a key group: nothing is concatenated."""
        chunks = [StateChunk("totals", 0, b"1"), StateChunk("totals", 0, b"2")]
        with pytest.raises(InvalidCheckpointError, match="key group"):
            store.save_with_state(a_manifest(1), chunks)
        with pytest.raises(InvalidCheckpointError, match="key group"):
            store.save_state_data(1, chunks)
        assert store.deployment_id == ""

    def test_sidecars_written_at_the_same_time_never_share_a_name(
        self, opener: Opener[CheckpointStore]
    ) -> None:
        """Two attempts of one task write side by side."""
        opener().claim_generation("setup")

        def one(index: int) -> SidecarEntry:
            return write(opener(), bytes([index]) * 100)[2]

        with ThreadPoolExecutor(8) as pool:
            entries = list(pool.map(one, range(16)))
        assert len({e.path for e in entries}) == 16
        store = opener()
        assert [store.read_sidecar(e)[:1] for e in entries] == [bytes([i]) for i in range(16)]

    @pytest.mark.parametrize(
        ("size", "inline"), [(0, True), (100, True), (101, False)], ids=["empty", "at", "above"]
    )
    def test_state_up_to_the_threshold_is_inline(
        self, store: CheckpointStore, size: int, inline: bool
    ) -> None:
        """Row 81."""
        _, _, entry = write(store, b"s" * size, inline_threshold=100)
        assert (entry.path is None) == inline
        assert store.read_sidecar(entry) == b"s" * size

    @pytest.mark.parametrize("uid", ["a b", "ä/ö", "..", ".", "%2F", "x" * 256, "a:b*?", "state"])
    def test_any_text_is_an_operator_uid(self, store: CheckpointStore, uid: str) -> None:
        """Authors choose uids, not we; none escapes its place."""
        entries = [write(store, uid.encode(), operator=uid), write(store, b"b", operator="other")]
        store.save(a_manifest(1, operators=listing(entries), finalized=True))
        assert store.validate_checkpoint(1).issues == ()
        assert {c.operator for c in gather(store.load_state_data(1))} == {uid, "other"}

    @pytest.mark.parametrize("uid", ["", "x" * 257, "\ud800"])
    def test_text_that_cannot_be_a_uid_is_refused(self, store: CheckpointStore, uid: str) -> None:
        """Before anything is written."""
        with pytest.raises(InvalidCheckpointError, match="uid"):
            write(store, b"x", operator=uid)
        assert store.deployment_id == ""

    # -- G. prune ------------------------------------------------------------------------

    def test_pruning_by_epoch_keeps_the_pointer_though_newer_attempts_go(
        self, store: CheckpointStore
    ) -> None:
        """Row 47."""
        commit(store, 1)
        for id in range(2, 6):
            commit(store, id, finalized=False)
        assert store.prune_before(100) == 4
        assert store.list_ids() == [1]
        latest = store.load_latest()
        assert latest is not None
        assert latest.id == 1

    def test_pruning_by_epoch_is_strict(self, store: CheckpointStore) -> None:
        """Row 52."""
        for id in range(1, 5):
            commit(store, id, epoch=10 * id)
        assert store.prune_before(0) == 0
        assert store.prune_before(10) == 0
        assert store.prune_before(20) == 1
        assert store.list() == [(2, 20), (3, 30), (4, 40)]
        assert store.prune_before(2**63) == 2
        assert store.list() == [(4, 40)]

    def test_keep_last_keeps_that_many(self, store: CheckpointStore) -> None:
        """Retention by number, with the files that only the old ones list."""
        manifests = [commit(store, id) for id in range(1, 6)]
        dry = store.prune(KeepLast(2), dry_run=True)
        assert store.list_ids() == [1, 2, 3, 4, 5]
        report = store.prune(KeepLast(2))
        assert (report.deleted, report.kept) == ((1, 2, 3), (4, 5))
        assert (dry.deleted, dry.kept, dry.sidecars) == (
            report.deleted,
            report.kept,
            report.sidecars,
        )
        assert dry.dry_run
        assert sorted(report.sidecars) == sorted(path_of(m) for m in manifests[:3])
        assert store.list_ids() == [4, 5]
        assert all(store.validate_checkpoint(id).valid for id in (4, 5))
        with pytest.raises(CheckpointNotFoundError):
            store.read_sidecar(manifests[0].sidecars()[0][2])
        assert store.prune(KeepLast(2)).deleted == ()

    def test_retention_by_age_and_its_union_and_intersection(self, store: CheckpointStore) -> None:
        """`KeepLast(2) | KeepFor(hours=3)` keeps what either keeps, `&` what both do."""
        now = time.time_ns() // 1_000_000
        for id, hours in ((1, 9), (2, 5), (3, 2), (4, 1), (5, 0)):
            commit(store, id, timestamp_ms=now - hours * 3_600_000)

        def kept(policy: Any) -> tuple[int, ...]:
            return store.prune(policy, dry_run=True).kept

        assert kept(KeepFor(hours=3)) == (3, 4, 5)
        assert kept(KeepFor(minutes=90) | KeepLast(3)) == (3, 4, 5)
        assert kept(KeepFor(hours=3) & KeepLast(2)) == (4, 5)
        assert kept(KeepFor(days=1) & (KeepLast(1) | KeepLast(4))) == (2, 3, 4, 5)

    def test_a_policy_that_keeps_nothing_still_leaves_the_newest(
        self, store: CheckpointStore
    ) -> None:
        """Retention that deletes the newest checkpoint has lost people their data."""
        for id in (1, 2, 3):
            commit(store, id, timestamp_ms=1)
        assert store.prune(KeepFor(seconds=1)).kept == (3,)
        assert store.recover_latest_validated().chosen_id == 3

    def test_a_shared_file_goes_with_the_last_checkpoint_that_lists_it(
        self, store: CheckpointStore
    ) -> None:
        """Row 89 of the store: an unchanged group refers to the file it has."""
        base = write(store, b"base")
        manifests = []
        for id in (1, 2, 3):
            own = write(store, b"own %d" % id, operator="other")
            manifests.append(store.save(a_manifest(id, operators=listing([base, own]))))
            store.finalize(id)
        assert set(store.prune(KeepLast(2)).sidecars) == {path_of(manifests[0], 1)}
        assert store.validate_checkpoint(2).valid
        commit(store, 4)
        assert path_of(manifests[2], 0) in store.prune(KeepLast(1)).sidecars
        with pytest.raises(CheckpointNotFoundError):
            store.read_sidecar(base[2])

    def test_a_file_that_a_prepared_checkpoint_lists_stays(self, store: CheckpointStore) -> None:
        """An attempt in the making builds on what its predecessor lists."""
        base = write(store, b"base")
        store.save(a_manifest(1, operators=listing([base]), finalized=True))
        commit(store, 2)
        attempt = a_manifest(3, operators=listing([base]))
        store.save(attempt)
        assert store.prune(KeepLast(1)).sidecars == ()
        store.finalize(3)
        assert store.validate_checkpoint(3).valid

    def test_attempts_go_once_a_younger_checkpoint_is_finalized(
        self, store: CheckpointStore
    ) -> None:
        """Before that they may still be in the making."""
        commit(store, 1)
        commit(store, 2, finalized=False)
        assert store.prune(KeepLast(5)).deleted == ()
        commit(store, 3)
        assert store.prune(KeepLast(5)).deleted == (2,)
        assert store.list_ids() == [1, 3]

    def test_ids_are_never_given_out_twice(self, store: CheckpointStore) -> None:
        """Row 94, also when the highest is pruned."""
        assert store.next_id() == 1
        commit(store, 1)
        commit(store, 5, finalized=False)
        assert store.next_id() == 6
        store.prune_before(100)
        assert store.list_ids() == [1]
        assert store.next_id() == 6
        commit(store, 6)
        store.prune(KeepLast(1))
        assert store.next_id() == 7

    def test_an_attempt_that_was_pruned_can_no_longer_be_finalized(
        self, store: CheckpointStore
    ) -> None:
        """Its files are gone."""
        commit(store, 1)
        commit(store, 2, finalized=False)
        store.prune_before(100)
        with pytest.raises(CheckpointNotFoundError):
            store.finalize(2)
        latest = store.load_latest()
        assert latest is not None
        assert latest.id == 1

    # -- tags ----------------------------------------------------------------------------

    def test_a_tagged_checkpoint_survives_every_retention(self, store: CheckpointStore) -> None:
        """Row 105."""
        for id in range(1, 6):
            commit(store, id, timestamp_ms=1)
        store.tag("before migration/1", 2)
        store.tag("before migration/1", 2)
        assert store.tags() == {"before migration/1": 2}
        assert store.prune(KeepLast(1) & KeepFor(seconds=1)).kept == (2, 5)
        assert store.prune_before(2**63) == 0
        assert store.validate_checkpoint(2).valid
        store.untag("before migration/1")
        assert store.tags() == {}
        assert store.prune_before(2**63) == 1
        assert store.list_ids() == [5]

    def test_a_tag_names_one_finalized_checkpoint(self, store: CheckpointStore) -> None:
        """And says what is wrong otherwise."""
        commit(store, 1)
        commit(store, 2)
        commit(store, 3, finalized=False)
        store.tag("a", 1)
        with pytest.raises(CheckpointConflictError, match="names checkpoint 1 already"):
            store.tag("a", 2)
        for id in (3, 99):
            with pytest.raises(CheckpointNotFoundError, match=f"checkpoint {id}"):
                store.tag("b", id)
        with pytest.raises(CheckpointNotFoundError, match="no tag 'b'"):
            store.untag("b")
        for name in ("", "\n", "x" * 257):
            with pytest.raises(InvalidCheckpointError, match="no tag"):
                store.tag(name, 1)
        store.tag("x" * 256, 2)
        store.tag("..", 2)
        assert store.tags() == {"a": 1, "x" * 256: 2, "..": 2}

    # -- H. validation -------------------------------------------------------------------

    @pytest.mark.parametrize("deep", [True, False])
    def test_a_whole_checkpoint_has_no_issues(self, store: CheckpointStore, deep: bool) -> None:
        """Row 53."""
        commit(store, 1)
        result = store.validate_checkpoint(1, deep=deep)
        assert (result.id, result.valid, result.issues, result.deep) == (1, True, (), deep)

    def test_a_prepared_checkpoint_can_be_valid(self, store: CheckpointStore) -> None:
        """Valid is not published."""
        commit(store, 1, finalized=False)
        assert store.validate_checkpoint(1).valid

    def test_a_missing_checkpoint_is_invalid_not_an_error(self, store: CheckpointStore) -> None:
        """Row 55."""
        result = store.validate_checkpoint(7)
        assert not result.valid
        assert result.issues == ("manifest not found for checkpoint 7",)

    def test_state_over_the_budget_is_refused_before_anything_is_written(
        self, opener: Opener[CheckpointStore]
    ) -> None:
        """Rows 61 and 62: inline and files count together."""
        store = opener(max_state_data_bytes=8)
        inline = write(store, b"inln", operator="a", inline_threshold=100)
        manifest = a_manifest(1, operators=listing([inline]), finalized=True)
        with pytest.raises(CheckpointTooLargeError, match="9 bytes"):
            store.save_with_state(manifest, [StateChunk("b", 0, b"files")])
        assert store.deployment_id == ""
        store.save_with_state(manifest, [StateChunk("b", 0, b"file")])
        artifacts = store.load_checkpoint_artifacts(1)
        assert artifacts is not None
        assert artifacts.validate(1, max_state_data_bytes=8).valid
        issues = artifacts.validate(1, max_state_data_bytes=7).issues
        assert issues == ("8 bytes of state, 7 allowed",)

    def test_state_for_a_group_that_the_manifest_lists_is_refused(
        self, store: CheckpointStore
    ) -> None:
        """Row 63, second part: inline and external at once."""
        inline = write(store, b"inline", inline_threshold=100)
        manifest = a_manifest(1, operators=listing([inline]))
        with pytest.raises(InvalidCheckpointError, match="has state twice"):
            store.save_with_state(manifest, [StateChunk("totals", 0, b"external")])
        assert store.deployment_id == ""

    def test_artifacts_are_validated_from_the_bytes_in_hand(self, store: CheckpointStore) -> None:
        """Rows 59 and 60: mixed state, tampering, and the id it was stored under."""
        entries = [
            write(store, b"inline", operator="a", inline_threshold=100),
            write(store, b"external", operator="b"),
        ]
        store.save(a_manifest(1, operators=listing(entries), finalized=True))
        artifacts = store.load_checkpoint_artifacts(1)
        assert artifacts is not None
        assert [c.data for c in artifacts.state] == [b"inline", b"external"]
        assert artifacts.validate(1, key_group_count=1).valid
        assert artifacts.validate(2).issues == (
            "storage checkpoint 2 contains manifest checkpoint 1",
        )
        assert not artifacts.validate(1, participant_id=3).valid
        assert not artifacts.validate(1, key_group_count=2).valid
        for index in (0, 1):
            state = list(artifacts.state)
            held = state[index]
            state[index] = StateChunk(held.operator, held.key_group, b"!" * len(held.data))
            tampered = type(artifacts)(artifacts.manifest, tuple(state))
            assert "checksum mismatch" in tampered.validate(1).issues[0]
        short = type(artifacts)(artifacts.manifest, artifacts.state[:1])
        assert short.validate(1).issues == ("the manifest lists 2 sidecars, 1 are here",)
        swapped = type(artifacts)(artifacts.manifest, artifacts.state[::-1])
        assert not swapped.validate(1).valid

    # -- I. recovery ---------------------------------------------------------------------

    def test_a_fresh_store_recovers_nothing_and_examined_nothing(
        self, store: CheckpointStore
    ) -> None:
        """Row 67."""
        report = store.recover_latest_validated()
        assert (report.chosen_id, report.chosen, report.skipped) == (None, None, ())
        assert report.examined == 0
        assert report.elapsed >= 0

    def test_recovery_passes_over_newer_attempts(self, store: CheckpointStore) -> None:
        """Row 69 and 93."""
        first = commit(store, 1)
        commit(store, 2, finalized=False, watermark=77)
        report = store.recover_latest_validated()
        assert (report.chosen_id, report.chosen, report.examined) == (1, first, 2)
        (skipped,) = report.skipped
        assert (skipped.id, skipped.reason, skipped.phase, skipped.boundary) == (
            2,
            PREPARED,
            "prepared",
            77,
        )

    def test_recovery_takes_the_newest(self, store: CheckpointStore) -> None:
        """Row 70."""
        commit(store, 1)
        second = commit(store, 2)
        report = store.recover_latest_validated()
        assert (report.chosen, report.skipped, report.examined) == (second, (), 1)

    def test_nothing_but_attempts_is_no_fresh_start(self, store: CheckpointStore) -> None:
        """`examined` tells an unusable history from a new store."""
        commit(store, 1, finalized=False)
        report = store.recover_latest_validated()
        assert (report.chosen_id, report.examined, len(report.skipped)) == (None, 1, 1)

    # -- J. participants -----------------------------------------------------------------

    def test_a_manifest_of_another_participant_is_refused(
        self, opener: Opener[CheckpointStore]
    ) -> None:
        """Row 71."""
        store = opener(participant_id=3)
        with pytest.raises(InvalidCheckpointError, match=r"of participant 0.*participant 3"):
            store.save(a_manifest(1, finalized=True))
        with pytest.raises(InvalidCheckpointError, match=r"of participant 0.*participant 3"):
            store.save_with_state(a_manifest(1), [StateChunk("totals", 0, b"state")])
        assert (store.deployment_id, store.list_ids()) == ("", [])

    def test_namespaces_of_participants_are_apart(self, opener: Opener[CheckpointStore]) -> None:
        """Row 72."""
        stores = {n: opener(participant_id=n) for n in (0, 3, 11)}
        for n, store in stores.items():
            chunk = StateChunk("totals", 0, b"of %d" % n)
            store.save_with_state(a_manifest(1, participant_id=n, finalized=True), [chunk])
        for n, store in stores.items():
            assert [c.data for c in gather(store.load_state_data(1))] == [b"of %d" % n]
        stores[3].save(a_manifest(2, participant_id=3, finalized=True))
        stores[3].prune(KeepLast(1))
        assert {n: s.list_ids() for n, s in stores.items()} == {0: [1], 3: [2], 11: [1]}
        assert all(s.gc(grace_s=0).deleted == () for s in stores.values())

    def test_reading_the_own_participant_is_reading(self, opener: Opener[CheckpointStore]) -> None:
        """Row 73."""
        store = opener(participant_id=3)
        saved = store.save_with_state(
            a_manifest(1, participant_id=3), [StateChunk("totals", 0, b"state")]
        )
        assert store.load_manifest_for_participant(3, 1) == saved
        assert gather(store.load_state_data_for_participant(3, 1)) == gather(
            store.load_state_data(1)
        )
        assert store.state_data_len_for_participant(3, 1) == 5
        assert store.load_checkpoint_artifacts_for_participant(3, 1) == (
            store.load_checkpoint_artifacts(1)
        )
        for read in (
            store.load_manifest_for_participant,
            store.load_state_data_for_participant,
            store.state_data_len_for_participant,
            store.load_checkpoint_artifacts_for_participant,
        ):
            assert read(3, 99) is None

    # -- fencing -------------------------------------------------------------------------

    def test_generations_ascend_and_a_repeated_claim_is_the_same(
        self, store: CheckpointStore
    ) -> None:
        """A retried claim is no new run."""
        assert store.claim_generation("run-a") == 1
        assert store.claim_generation("run-a") == 1
        assert store.claim_generation("run-b") == 2
        store.check_generation(2, "run-b")
        with pytest.raises(FencedError, match=r"run-a .generation 1. has been superseded"):
            store.check_generation(1, "run-a")
        with pytest.raises(FencedError, match="superseded"):
            store.claim_generation("run-a")

    def test_concurrent_claims_get_generations_of_their_own(
        self, opener: Opener[CheckpointStore]
    ) -> None:
        """Row 97: no two runs are ever the same generation."""
        opener().save(a_manifest(1))
        start = threading.Barrier(8)

        def claim(index: int) -> int:
            store = opener()
            start.wait()
            try:
                return store.claim_generation(f"run-{index}")
            except FencedError:  # superseded while it was asking
                return -index

        with ThreadPoolExecutor(8) as pool:
            claimed = list(pool.map(claim, range(1, 9)))
        won = [g for g in claimed if g > 0]
        assert len(set(won)) == len(won)
        assert max(won) <= 8

    def test_a_superseded_run_is_fenced_at_its_next_save(self, store: CheckpointStore) -> None:
        """Row 106, first part."""
        old = RunIdentity(generation=store.claim_generation("old"), run_id="old")
        commit(store, 1, run=old)
        new = RunIdentity(generation=store.claim_generation("new"), run_id="new")
        with pytest.raises(FencedError, match="superseded by generation 2"):
            store.save(a_manifest(2, run=old))
        assert store.list_ids() == [1]
        commit(store, 2, run=new)
        assert store.recover_latest_validated().chosen_id == 2

    def test_what_a_superseded_run_prepared_is_never_finalized(
        self, store: CheckpointStore
    ) -> None:
        """Row 106: it slept between its save and its finalize."""
        old = RunIdentity(generation=store.claim_generation("old"), run_id="old")
        commit(store, 1, run=old, finalized=False)
        store.claim_generation("new")
        with pytest.raises(FencedError):
            store.finalize(1)
        assert store.load_latest() is None
        (skipped,) = store.recover_latest_validated().skipped
        assert skipped.phase == "prepared"
        assert skipped.reason == f"{PREPARED}: abandoned by generation 2 (run new)"

    def test_a_retry_of_the_same_run_is_a_no_op_and_of_another_is_fenced(
        self, store: CheckpointStore
    ) -> None:
        """Row 107."""
        old = RunIdentity(generation=store.claim_generation("old"), run_id="old")
        new = RunIdentity(generation=store.claim_generation("new"), run_id="new")
        manifest = a_manifest(1, run=new, finalized=True)
        assert store.save(manifest) == store.save(manifest)
        with pytest.raises(FencedError):
            store.save(a_manifest(1, run=old, finalized=True))
        assert store.list_ids() == [1]

    def test_what_a_running_job_restored_is_kept_until_it_has_committed(
        self, store: CheckpointStore
    ) -> None:
        """A checkpoint of another run that this one still needs is never deleted."""
        for id in (1, 2, 3):
            commit(store, id)
        run = RunIdentity(generation=store.claim_generation("r", restored_from=1), run_id="r")
        assert store.prune(KeepLast(1)).deleted == (2,)
        assert store.validate_checkpoint(1).valid
        commit(store, 4, run=run)
        assert store.prune(KeepLast(1)).deleted == (1, 3)

    def test_a_run_is_told_when_what_it_restored_was_pruned_before_its_claim(
        self, store: CheckpointStore
    ) -> None:
        """It must not go on with half of its files gone."""
        for id in (1, 2):
            commit(store, id)
        store.prune(KeepLast(1))
        for _ in range(2):
            with pytest.raises(CheckpointNotFoundError, match=r"checkpoint 1 .* was pruned"):
                store.claim_generation("late", restored_from=1)
        run = RunIdentity(generation=store.claim_generation("r", restored_from=2), run_id="r")
        commit(store, 3, run=run)
        store.prune(KeepLast(1))
        assert store.list_ids() == [3]
        assert store.claim_generation("r", restored_from=2) == run.generation

    # -- N. the store as a whole ---------------------------------------------------------

    def test_empty_key_groups_cost_nothing(self, opener: Opener[CheckpointStore]) -> None:
        """Row 101: one sidecar per non-empty key group."""
        store = opener(key_group_count=128)
        entries = [write(store, b"x", key_group=g) for g in (3, 127)]
        saved = store.save(
            a_manifest(1, operators=listing(entries), key_group_count=128, finalized=True)
        )
        assert len(saved.sidecar_paths()) == 2
        assert [c.key_group for c in gather(store.load_state_data(1))] == [3, 127]

    def test_the_key_group_count_may_change_between_runs(
        self, opener: Opener[CheckpointStore]
    ) -> None:
        """Row 108, the store's part: each manifest says its own; any is accepted with None."""
        store = opener(key_group_count=None)
        commit(store, 1, key_group_count=7)
        commit(store, 2, key_group_count=128)
        assert [m.key_group_count for i in (1, 2) if (m := store.load_by_id(i))] == [7, 128]
        assert store.recover_latest_validated().chosen_id == 2
        strict = opener(key_group_count=7)
        assert strict.recover_latest_validated().chosen_id == 1

    def test_a_slow_store_does_not_hold_up_other_work(self, store: CheckpointStore) -> None:
        """Row 99: a store may be used from a thread beside an event loop."""

        async def run() -> float:
            async def beat() -> float:
                worst, last = 0.0, time.monotonic()
                while not done.is_set():
                    await asyncio.sleep(0.005)
                    now = time.monotonic()
                    worst, last = max(worst, now - last), now
                return worst

            def slow() -> None:
                time.sleep(1.0)
                commit(store, 1)

            done = asyncio.Event()
            beating = asyncio.create_task(beat())
            await asyncio.to_thread(slow)
            done.set()
            return await beating

        assert asyncio.run(run()) < 0.5  # seconds; a busy machine has pauses of its own
        assert store.list_ids() == [1]

    def test_gc_of_a_store_in_order_deletes_nothing(self, store: CheckpointStore) -> None:
        """What any checkpoint lists is not garbage, whatever its age."""
        for id in (1, 2):
            commit(store, id)
        commit(store, 3, finalized=False)
        store.tag("t", 1)
        assert store.gc(grace_s=0).deleted == ()
        assert all(store.validate_checkpoint(id).valid for id in (1, 2, 3))

    def test_a_pointer_that_is_right_is_left_alone_by_a_repair(
        self, store: CheckpointStore
    ) -> None:
        """Row 111, the dull half."""
        with pytest.raises(NoValidCheckpointError):
            store.repair_pointer()
        commit(store, 1)
        last = commit(store, 2)
        assert store.repair_pointer().chosen_id == 2
        assert store.load_latest() == last


class Before(FaultyBlobs):
    """Blobs that do something else before the n-th operation."""

    def __init__(self, inner: Blobs, step: int, act: Callable[[], object]) -> None:
        super().__init__(inner, FaultPlan())
        self._left, self._act = step, act

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._delete(key)

    def _run(self, operation: str, key: str, act: Callable[[], Any]) -> Any:
        self._left -= 1
        if self._left == 0:
            self._act()
        return act()


def check_tagged(store: CheckpointStore, id: int | None) -> None:
    """The tag and its checkpoint are there and whole, or neither is."""
    if id is None:
        assert store.tags() == {}
        return
    assert store.tags() == {"late": id}
    assert store.validate_checkpoint(id).valid
    manifest = store.load_by_id(id)
    assert manifest is not None
    assert manifest.durable_phase == "finalized"


class BlobStoreSuite(StoreSuite):
    """The rows that are seen by damaging objects, or by faults between store and storage."""

    @pytest.fixture
    def opener(self) -> Opener[BlobCheckpointStore]:
        """To be overridden: how a store is opened."""
        raise NotImplementedError("override the fixture `opener`")

    @pytest.fixture
    def store(self, opener: Opener[BlobCheckpointStore]) -> BlobCheckpointStore:
        """An empty store."""
        return opener()

    def damage(self, store: BlobCheckpointStore, key: str, data: bytes | None) -> None:
        """Overwrites an object behind the store's back; `None` deletes it."""
        if data is None:
            store.blobs.delete_many([key])
        else:
            store.blobs.put(key, data)

    def json_of(self, store: BlobCheckpointStore, id: int) -> bytes:
        """The JSON of a manifest, stored as it is or as gzip."""
        return unpacked(store.blobs.get(f"manifests/{id:012d}.json")[0], where="it")

    def passed_over(
        self, store: BlobCheckpointStore, first: CheckpointManifest
    ) -> SkippedCheckpoint:
        """Checks that of two checkpoints the second counts as damaged; returns what is said."""
        with pytest.raises(InvalidCheckpointError):
            store.prune_before(100)
        assert store.list_ids() == [1, 2]
        assert store.validate_checkpoint(2).issues[0].startswith("corrupt manifest: ")
        report = store.recover_latest_validated()
        assert (report.chosen, report.skipped[0].phase) == (first, "invalid")
        return report.skipped[0]

    def keys(self, store: BlobCheckpointStore) -> list[str]:
        """All objects of a store."""
        return [meta.key for meta in store.blobs.list("")]

    # -- B, C ----------------------------------------------------------------------------

    def test_objects_are_where_the_layout_says(self, store: BlobCheckpointStore) -> None:
        """Row 13."""
        store.claim_generation("run-1")
        saved = commit(store, 42, b"state", watermark=5_000_000)
        store.tag("a", 42)
        keys = self.keys(store)
        (sidecar,) = [k for k in keys if k.startswith("state/")]
        assert sidecar == path_of(saved)
        assert sidecar.startswith("state/totals/00000/5000000-run-1-")
        assert sidecar.endswith(".parquet")
        assert set(keys) - {sidecar} == {
            "namespace.json",
            "runs/00000001.json",
            "manifests/000000000042.json",
            "manifests/000000000042.final",
            "latest.json",
            "tags/a.json",
        }
        stored = store.blobs.get("manifests/000000000042.json")[0]
        assert stored == saved.to_bytes()
        assert unpacked(stored, where="it") == saved.to_json()
        assert json.loads(store.blobs.get("latest.json")[0]) == {
            "id": 42,
            "checkpoint_id": saved.checkpoint_id,
            "manifest_sha256": sha256_hex(stored),
        }
        assert json.loads(store.blobs.get("manifests/000000000042.final")[0]) == {
            "id": 42,
            "checkpoint_id": saved.checkpoint_id,
            "epoch": 42,
            "watermark": 5_000_000,
            "manifest_sha256": sha256_hex(stored),
        }

    def test_a_large_manifest_is_gzip_and_its_marker_seals_that(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """Of JSON that any tool reads; the listing tells of it what it tells of a small one."""
        store = opener(key_group_count=40)
        saved = store.finalize(store.save(a_large_manifest(store, 1)).id)
        stored = store.blobs.get("manifests/000000000001.json")[0]
        assert gzip.decompress(stored) == saved.to_json()
        assert len(stored) < len(saved.to_json()) / 3
        assert stored[4:8] == bytes(4), "a time in it: no two writers have the same bytes"
        for name in ("latest.json", "manifests/000000000001.final"):
            sealed = json.loads(store.blobs.get(name)[0])
            assert sealed["manifest_sha256"] == sha256_hex(stored)
        recorder = FaultPlan(record=True)
        assert faulty_store(opener(key_group_count=40), recorder).list() == [(1, 1)]
        noted = [meta.note for meta in store.blobs.list("manifests/") if meta.note]
        read = [op.key for op in recorder.operations() if op.name == "get"]
        assert len(read) <= 1 - bool(noted)

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            pytest.param("1", "9", id="packed worse before"),
            pytest.param("9", "1", id="packed better before"),
            pytest.param("none", "9", id="not packed before"),
            pytest.param("9", "none", id="not packed after"),
        ],
    )
    def test_a_manifest_that_another_zlib_packed_is_the_same_manifest(
        self,
        opener: Opener[BlobCheckpointStore],
        monkeypatch: pytest.MonkeyPatch,
        before: str,
        after: str,
    ) -> None:
        """What a retry, a tool or another version makes anew is compared by what it says."""

        def use(zlib: str) -> None:
            above = 1 << 30 if zlib == "none" else 4096
            monkeypatch.setattr("beam_ckpt.manifest.PACKED_ABOVE", above)
            if zlib != "none":
                monkeypatch.setattr("beam_ckpt.manifest._GZIP_LEVEL", int(zlib))

        src, dst = opener("a", key_group_count=40), opener("b", key_group_count=40)
        key, first = "manifests/000000000001.json", a_large_manifest(src, 1)
        use(before)
        saved = src.save(first)
        stored = src.blobs.get(key)[0]
        use(after)
        assert saved.to_bytes() != stored
        assert src.save(first) == saved == src.load_by_id(1)
        other = a_large_manifest(src, 1, watermark=3)
        with pytest.raises(CheckpointConflictError, match=rf"epoch 1, {first.checkpoint_id}"):
            src.save(other)
        final = src.finalize(1)
        assert src.save(first.with_phase("finalized")) == final == src.finalize(1)
        assert src.blobs.get(key)[0] == stored
        assert src.validate_checkpoint(1).valid
        assert src.recover_latest_validated().chosen == final == src.load_latest()

        # Where it lies already, packed in another way, prepared or finalized: it is there.
        dst.blobs.put_if_absent("namespace.json", src.blobs.get("namespace.json")[0])
        assert dst.save(saved).checkpoint_id == final.checkpoint_id
        held = dst.blobs.get(key)[0]
        assert held != stored
        assert (copy(src, dst).copied, copy(src, dst).present) == ((1,), (1,))
        assert dst.blobs.get(key)[0] == held
        assert dst.load_latest() == dst.load_by_id(1) == final
        assert dst.validate_checkpoint(1).valid
        self.damage(
            dst, key, other.model_copy(update=dict(deployment_id=src.deployment_id)).to_bytes()
        )
        with pytest.raises(CheckpointConflictError, match="exists with other content"):
            copy(src, dst)
        assert src.delete_checkpoints({1}).deleted == ()

    def test_finalizing_again_brings_a_lost_pointer_back(self, store: BlobCheckpointStore) -> None:
        """Row 16, second part."""
        final = commit(store, 1)
        self.damage(store, "latest.json", None)
        assert store.load_latest() is None
        assert store.finalize(1) == final == store.load_latest()

    def test_the_next_finalize_brings_a_lost_pointer_back(self, store: BlobCheckpointStore) -> None:
        """A missing pointer with finalized checkpoints is not an empty store."""
        commit(store, 1)
        self.damage(store, "latest.json", None)
        assert store.recover_latest_validated().chosen_id == 1
        last = commit(store, 2)
        assert store.load_latest() == last

    def test_a_lost_namespace_is_made_again_with_the_deployment_of_the_manifests(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """Two jobs in one place are told apart by it, so it must not change."""
        store = opener()
        deployment = commit(store, 1).deployment_id
        self.damage(store, "namespace.json", None)
        again = opener()
        commit(again, 2)
        assert again.deployment_id == deployment

    def test_a_manifest_of_another_deployment_is_refused(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """Two clusters in one bucket must not restore each other's state."""
        store, other = opener("a"), opener("b")
        foreign = commit(other, 1)
        commit(store, 2)
        with pytest.raises(InvalidCheckpointError, match="of deployment"):
            store.save(foreign)
        stored = other.blobs.get("manifests/000000000001.json")[0]
        self.damage(store, "manifests/000000000001.json", stored)
        self.damage(store, path_of(foreign), other.blobs.get(path_of(foreign))[0])
        assert "of deployment" in store.validate_checkpoint(1).issues[0]

    # -- D. concurrency and lost answers -------------------------------------------------

    def test_a_slow_finalize_cannot_take_the_pointer_back(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """Row 26."""
        opener().save(a_manifest(5))
        plan = FaultPlan(
            Fault("put_if_absent", "manifests/*.final", when="after", action="delay", seconds=0.3)
        )
        slow = faulty_store(opener(), plan)
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(slow.finalize, 5)
            while plan.struck() == [0]:
                time.sleep(0.001)
            fast = opener()
            commit(fast, 10)
            pending.result()
        latest = opener().load_latest()
        assert latest is not None
        assert latest.id == 10

    @pytest.mark.parametrize(
        ("operation", "key"),
        [
            ("put_if_absent", "namespace.json"),
            ("put", "state/*"),
            ("put_if_absent", "manifests/*.json"),
            ("put_if_absent", "manifests/*.final"),
            ("replace", "latest.json"),
        ],
    )
    @pytest.mark.parametrize("prior", [False, True], ids=["first", "later"])
    def test_a_lost_answer_is_reconciled_by_repeating(
        self, opener: Opener[BlobCheckpointStore], operation: str, key: str, prior: bool
    ) -> None:
        """Row 27: on creating the pointer and on moving it, the manifest, its marker, a file."""
        if prior:
            commit(opener(), 1)
        fault = Fault(operation, key, action="lost_response")
        store = faulty_store(opener(), FaultPlan(fault))
        manifest: CheckpointManifest | None = None
        lost = 0
        for _ in range(3):
            try:
                if manifest is None:
                    entry = write(store, b"state")
                    manifest = a_manifest(2, operators=listing([entry]), finalized=True)
                saved = store.save(manifest)
                break
            except IndeterminateError as e:
                assert "repeat the operation" in str(e)
                lost += 1
        assert lost == (0 if prior and key == "namespace.json" else 1)
        assert store.load_latest() == saved
        assert store.validate_checkpoint(2).valid

    def test_storage_that_cannot_be_written_safely_is_refused_and_can_be_read(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """Row 28."""
        store = opener()
        last = commit(store, 1)

        class Refusing(FaultyBlobs):
            def require_writable(self) -> None:
                raise StoreUrlError("compare-and-swap is not enforced here")

        refusing = opener().with_blobs(Refusing(store.blobs, FaultPlan()))
        for act in (
            lambda: refusing.save(a_manifest(2)),
            lambda: refusing.finalize(1),
            lambda: write(refusing, b"state"),
            lambda: refusing.claim_generation("run"),
            lambda: refusing.tag("t", 1),
        ):
            with pytest.raises(StoreUrlError, match="not enforced here"):
                act()
        assert refusing.load_latest() == last == store.load_latest()
        assert refusing.recover_latest_validated().chosen_id == 1

    def test_two_writers_of_the_same_bytes_both_know_who_won(
        self, store: BlobCheckpointStore
    ) -> None:
        """Compare-and-swap is decided by version, not by content."""
        blobs = store.blobs
        version = blobs.replace("latest.json", b"same", ABSENT).version
        start = threading.Barrier(8)

        def swap(_: int) -> bool:
            start.wait()
            try:
                blobs.replace("latest.json", b"same", version)
            except BlobConflict:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(swap, range(8))) == 1

    # -- E. damaged sidecars -------------------------------------------------------------

    @pytest.mark.parametrize(
        "change",
        [
            lambda data: data[:-1],
            lambda data: data + b"!",
            lambda data: b"",
            lambda data: data[:7] + bytes([data[7] ^ 1]) + data[8:],
        ],
        ids=["truncated", "longer", "emptied", "one bit"],
    )
    def test_a_damaged_sidecar_is_named_and_never_restored(
        self, store: BlobCheckpointStore, change: Callable[[bytes], bytes]
    ) -> None:
        """Rows 36 and 57."""
        first = commit(store, 1)
        second = commit(store, 2)
        path = path_of(second)
        self.damage(store, path, change(store.blobs.get(path)[0]))
        with pytest.raises(InvalidCheckpointError, match=path.replace(".", "\\.")):
            store.read_sidecar(second.sidecars()[0][2])
        with pytest.raises(InvalidCheckpointError):
            gather(store.load_state_data(2))
        (issue,) = store.validate_checkpoint(2).issues
        assert path in issue
        assert "operator 'totals', key group 0" in issue
        report = store.recover_latest_validated()
        assert report.chosen == first
        assert (report.skipped[0].id, report.skipped[0].phase) == (2, "invalid")

    def test_a_missing_sidecar_is_named(self, store: BlobCheckpointStore) -> None:
        """Row 57, last part; the manifest itself still loads."""
        manifest = commit(store, 1)
        self.damage(store, path_of(manifest), None)
        assert store.load_latest() == manifest
        with pytest.raises(CheckpointNotFoundError, match=path_of(manifest)):
            store.read_sidecar(manifest.sidecars()[0][2])
        for deep in (True, False):
            (issue,) = store.validate_checkpoint(1, deep=deep).issues
            assert issue.endswith(f"{path_of(manifest)}: missing checkpoint state sidecar")

    def test_swapped_sidecars_are_found(self, opener: Opener[BlobCheckpointStore]) -> None:
        """Each is whole, but not where it belongs."""
        store = opener(key_group_count=2)
        entries = [write(store, b"left.", key_group=0), write(store, b"right", key_group=1)]
        saved = store.save(
            a_manifest(1, operators=listing(entries), key_group_count=2, finalized=True)
        )
        paths = [path_of(saved, 0), path_of(saved, 1)]
        held = [store.blobs.get(p)[0] for p in paths]
        for path, data in zip(paths, reversed(held), strict=True):
            self.damage(store, path, data)
        assert len(store.validate_checkpoint(1).issues) == 2
        assert store.recover_latest_validated().chosen_id is None

    def test_a_storage_that_lies_about_a_body_is_caught(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """Rows 38 and 39: a body that is short, long or other than the metadata says."""
        manifest = commit(opener(), 1, b"0123456789")
        entry = manifest.sidecars()[0][2]

        class Lying(FaultyBlobs):
            body = b""

            def get(self, key: str, *, max_bytes: int | None = None) -> tuple[bytes, BlobMeta]:
                data, meta = super().get(key, max_bytes=max_bytes)
                return (self.body, meta) if key.startswith("state/") else (data, meta)

        for body in (b"", b"012345678", b"0123456789!", b"0123456789" * 1000, b"012345678!"):
            blobs = Lying(opener().blobs, FaultPlan())
            blobs.body = body
            store = opener().with_blobs(blobs)
            with pytest.raises(InvalidCheckpointError, match="expected"):
                store.read_sidecar(entry)
            assert not store.validate_checkpoint(1).valid

    def test_a_large_sidecar_is_hashed_in_pieces(
        self, opener: Opener[BlobCheckpointStore], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Validation needs no more memory than a piece."""
        monkeypatch.setattr("beam_ckpt.store._blobstore._READ_WHOLE", 1000)
        monkeypatch.setattr("beam_ckpt.store._blobstore._READ_PIECE", 300)
        store = opener()
        data = os.urandom(5000)
        manifest = commit(store, 1, data)
        assert store.validate_checkpoint(1).valid
        self.damage(store, path_of(manifest), data[:-1] + bytes([data[-1] ^ 1]))
        assert "checksum mismatch" in store.validate_checkpoint(1).issues[0]

    # -- F. hostile pointers and metadata ------------------------------------------------

    @pytest.mark.parametrize(
        "pointer",
        [
            b"",
            b"\xff\xfe",
            b"checkpoint_000001",
            b"null",
            b"[]",
            b"{}",
            b'{"id":1}',
            b'{"id":"1","checkpoint_id":"","manifest_sha256":""}',
            b'{"id":1,"id":1,"checkpoint_id":"x","manifest_sha256":"y"}',
            b"{" * 500,
            b" " * 1025,
        ],
    )
    def test_a_pointer_that_cannot_be_read_fails_closed(
        self, store: BlobCheckpointStore, pointer: bytes
    ) -> None:
        """Rows 40, 43 and 51: and recovery does not need it."""
        first = commit(store, 1)
        commit(store, 2)
        store.save(a_manifest(3))
        self.damage(store, "latest.json", pointer)
        before = self.keys(store)
        for act in (
            store.load_latest,
            lambda: store.finalize(3),
            lambda: store.prune_before(100),
            lambda: store.prune(KeepLast(1)),
        ):
            with pytest.raises(
                InvalidCheckpointError, match=r"invalid checkpoint recovery pointer.*repair-pointer"
            ):
                act()
        assert self.keys(store) == before
        assert store.recover_latest_validated().chosen_id == 2
        assert store.load_by_id(1) == first
        assert store.validate_checkpoint(1).valid

    def test_a_dangling_pointer_fails_closed(self, store: BlobCheckpointStore) -> None:
        """Row 41."""
        commit(store, 1)
        commit(store, 2)
        for kind in ("json", "final"):
            self.damage(store, f"manifests/000000000002.{kind}", None)
        with pytest.raises(InvalidCheckpointError, match="references missing checkpoint 2"):
            store.load_latest()
        with pytest.raises(InvalidCheckpointError, match="references missing checkpoint 2"):
            store.finalize(1)
        with pytest.raises(InvalidCheckpointError, match="references missing checkpoint 2"):
            store.prune_before(100)
        assert store.list_ids() == [1]
        assert store.next_id() == 3
        third = commit(store, 3)
        assert store.load_latest() == third

    def test_a_pointer_to_an_attempt_fails_closed(self, store: BlobCheckpointStore) -> None:
        """Row 42."""
        commit(store, 1)
        self.damage(store, "manifests/000000000001.final", None)
        with pytest.raises(InvalidCheckpointError, match="references non-finalized checkpoint 1"):
            store.load_latest()

    def test_a_pointer_to_other_content_fails_closed(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """Swapped with another store's."""
        store, other = opener("a"), opener("b")
        commit(store, 1)
        commit(other, 1)
        self.damage(store, "latest.json", other.blobs.get("latest.json")[0])
        with pytest.raises(InvalidCheckpointError, match="does not match the manifest"):
            store.load_latest()
        with pytest.raises(InvalidCheckpointError, match="another content"):
            store.finalize(1)

    def test_a_manifest_that_is_too_large_is_not_read(self, store: BlobCheckpointStore) -> None:
        """Row 43."""
        first = commit(store, 1)
        commit(store, 2)
        self.damage(store, "manifests/000000000002.json", b" " * (16 * 1024 * 1024 + 1))
        for act in (store.load_latest, lambda: store.load_by_id(2), store.list):
            with pytest.raises(InvalidCheckpointError, match="16777217 bytes, 16777216 allowed"):
                act()
        assert "16777217 bytes" in store.validate_checkpoint(2).issues[0]
        report = store.recover_latest_validated()
        assert report.chosen == first
        # Its marker still names the boundary.
        assert report.skipped[0].boundary is None

    @pytest.mark.parametrize(
        ("what", "change"),
        [
            ("ends too early", lambda m: m[:-1]),
            ("ends too early", lambda m: m[:-9]),
            ("ends too early", lambda m: m[: len(m) // 2]),
            ("ends too early", lambda m: m[:2]),
            ("no valid JSON", lambda m: m[:1]),
            ("no valid gzip", lambda m: m[:2] + b"\x07" + m[3:]),
            ("no valid gzip", lambda m: m[:-8] + bytes(4) + m[-4:]),
            ("no valid gzip", lambda m: m[:-4] + bytes(4)),
            ("1 bytes after the end", lambda m: m + b"\x00"),
            ("bytes after the end", lambda m: m + m),
            ("bytes after the end", lambda m: m + gzip.compress(b"")),
            ("no valid JSON", gzip.compress),
            ("16777216 bytes that are allowed", lambda m: gzip.compress(bytes(1 << 26))),
        ],
    )
    def test_gzip_of_no_manifest_is_a_typed_error(
        self,
        opener: Opener[BlobCheckpointStore],
        what: str,
        change: Callable[[bytes], bytes],
    ) -> None:
        """Cut short, changed, more than one, or more than any manifest."""
        store = opener(key_group_count=40)
        first = store.finalize(store.save(a_large_manifest(store, 1)).id)
        store.finalize(store.save(a_large_manifest(store, 2)).id)
        key = "manifests/000000000002.json"
        self.damage(store, key, change(store.blobs.get(key)[0]))
        for act in (store.load_latest, lambda: store.load_by_id(2), lambda: store.finalize(2)):
            with pytest.raises(InvalidCheckpointError) as caught:
                act()
            assert key in str(caught.value)
            assert what in str(caught.value)
        self.passed_over(store, first)

    @pytest.mark.parametrize("part", range(16))
    def test_one_flipped_bit_in_a_large_manifest_never_passes(
        self, opener: Opener[BlobCheckpointStore], part: int
    ) -> None:
        """Not in what the checksum of gzip covers, nor in its header."""
        store = opener(key_group_count=40)
        first = store.finalize(store.save(a_large_manifest(store, 1)).id)
        store.finalize(store.save(a_large_manifest(store, 2)).id)
        key = "manifests/000000000002.json"
        data = bytearray(store.blobs.get(key)[0])
        data[part if part < 10 else part * len(data) // 16] ^= 1 << (part % 8)
        self.damage(store, key, bytes(data))
        with pytest.raises(InvalidCheckpointError):
            store.load_by_id(2)
        assert not store.validate_checkpoint(2).valid
        assert store.recover_latest_validated().chosen == first

    def test_a_manifest_in_the_wrong_place_is_refused(self, store: BlobCheckpointStore) -> None:
        """Rows 43 and 60."""
        commit(store, 7)
        commit(store, 8)
        for kind in ("json", "final"):
            data = store.blobs.get(f"manifests/000000000008.{kind}")[0]
            self.damage(store, f"manifests/000000000007.{kind}", data)
        found = "storage checkpoint 7 contains manifest checkpoint 8"
        for act in (lambda: store.load_by_id(7), store.list, lambda: store.prune(KeepLast(1))):
            with pytest.raises(InvalidCheckpointError, match=found):
                act()
        assert found in store.validate_checkpoint(7).issues[0]

    def test_small_objects_are_read_with_a_bound(self, opener: Opener[BlobCheckpointStore]) -> None:
        """Row 44."""
        manifest = commit(opener(), 1, b"12345")
        asked: dict[str, int | None] = {}

        class Watching(FaultyBlobs):
            def get(self, key: str, *, max_bytes: int | None = None) -> tuple[bytes, BlobMeta]:
                asked[key.partition("/")[0]] = max_bytes
                return super().get(key, max_bytes=max_bytes)

        store = opener().with_blobs(Watching(opener().blobs, FaultPlan()))
        store.load_latest()
        store.claim_generation("run")
        store.recover_latest_validated()
        assert asked["latest.json"] == 1024
        assert asked["namespace.json"] == 1024
        assert asked["manifests"] in (1024, 16 * 1024 * 1024)
        assert asked["state"] == len(store.read_sidecar(manifest.sidecars()[0][2]))

    @pytest.mark.parametrize(
        "name",
        [
            "1.json",
            "checkpoint_01",
            "00000000001.json",
            "0000000000001.json",
            "000000000000.json",
            "000000000001.JSON",
            "000000000001.json.bak",
            "99999999999999999999.json",
            "sub/000000000001.json",
            "x",
        ],
    )
    def test_a_stranger_among_the_manifests_is_named(
        self, store: BlobCheckpointStore, name: str
    ) -> None:
        """Row 45, aliases."""
        commit(store, 1)
        self.damage(store, f"manifests/{name}", b"{}")
        for act in (
            store.list_ids,
            store.list,
            store.next_id,
            store.recover_latest_validated,
            lambda: store.prune_before(100),
        ):
            with pytest.raises(InvalidCheckpointError, match="Move it away"):
                act()
        latest = store.load_latest()
        assert latest is not None
        assert latest.id == 1

    def test_an_inventory_without_end_is_refused(
        self, opener: Opener[BlobCheckpointStore], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Row 45, the limit: noise counts."""
        monkeypatch.setattr("beam_ckpt.store._blobstore.MAX_INVENTORY", 2)
        store = opener()
        commit(store, 1)
        commit(store, 2)
        assert store.list_ids() == [1, 2]
        self.damage(store, "manifests/noise", b"")
        with pytest.raises(CheckpointTooLargeError, match="5 objects, 4 allowed"):
            store.list_ids()

    @pytest.mark.parametrize(
        ("what", "change"),
        [
            ("no valid JSON", lambda m: m[:-1]),
            ("no valid JSON", lambda m: b""),
            ("no valid JSON", lambda m: b"\xff" + m),
            ("no valid JSON", lambda m: b"[" * 200_000),
            ("more values", lambda m: b"[" * 1_000_000),
            ("no valid JSON", lambda m: b'{"version":2,"operators":' + b'{"a":' * 100_000),
            ("given twice", lambda m: m.replace(b'"epoch":3', b'"epoch":3,"epoch":3', 1)),
            ("NaN", lambda m: m.replace(b'"epoch":3', b'"epoch":NaN', 1)),
            ("Infinity", lambda m: m.replace(b'"epoch":3', b'"epoch":-Infinity', 1)),
            ("epoch", lambda m: m.replace(b'"epoch":3', b'"epoch":%d' % 2**64, 1)),
            ("epoch", lambda m: m.replace(b'"epoch":3', b'"epoch":' + b"9" * 4000, 1)),
            ("digits", lambda m: m.replace(b'"epoch":3', b'"epoch":' + b"9" * 5000, 1)),
            ("epoch", lambda m: m.replace(b'"epoch":3', b'"epoch":0', 1)),
            ("epoch", lambda m: m.replace(b'"epoch":3', b'"epoch":true', 1)),
            ("epoch", lambda m: m.replace(b'"epoch":3', b'"epoch":3.0', 1)),
            ("id", lambda m: m.replace(b'"id":2', b'"id":%d' % 2**64, 1)),
            ("extra", lambda m: m.replace(b'"epoch":3', b'"epoch":3,"more":1', 1)),
            ("version 1;", lambda m: m.replace(b'"version":2', b'"version":1', 1)),
            ("version 4;", lambda m: m.replace(b'"version":2', b'"version":4', 1)),
            ("no version", lambda m: m.replace(b'"version":2', b'"Version":2', 1)),
            ("not a plain relative path", lambda m: m.replace(b"state/totals", b"/etc/totals")),
            ("not a plain relative path", lambda m: m.replace(b"state/totals", b"state/../x")),
            ("not a plain relative path", lambda m: m.replace(b"state/totals", b"runs/totals")),
            ("not a plain relative path", lambda m: m.replace(b"state/totals", b"state//totals")),
            ("total_bytes", lambda m: m.replace(b'"size_bytes":5', b'"size_bytes":10000000000')),
            ("more values", lambda m: b"[" + b"0," * 4_000_000 + b"0]"),
            ("more values", lambda m: b"[]," * 400_000),
        ],
    )
    def test_a_hostile_manifest_is_a_typed_error(
        self, store: BlobCheckpointStore, what: str, change: Callable[[bytes], bytes]
    ) -> None:
        """Rows 54, 56, 79, 80 and 109."""
        first = commit(store, 1)
        commit(store, 2, b"12345", epoch=3)
        key = "manifests/000000000002.json"
        before = self.json_of(store, 2)
        hostile = change(before)
        assert hostile != before
        self.damage(store, key, hostile)
        began = time.monotonic()
        for act in (store.load_latest, lambda: store.load_by_id(2), store.list):
            with pytest.raises(InvalidCheckpointError) as caught:
                act()
            assert key in str(caught.value)
            assert what.casefold() in str(caught.value).casefold()
        skipped = self.passed_over(store, first)
        assert skipped.boundary is None  # as its marker says
        assert time.monotonic() - began < 2
        self.damage(store, key, gzip.compress(hostile))
        with pytest.raises(InvalidCheckpointError) as caught:
            store.load_by_id(2)
        assert what.casefold() in str(caught.value).casefold()

    def test_an_unknown_format_version_is_named(self, store: BlobCheckpointStore) -> None:
        """Row 79: it is not damage, and the way out is another; unless another one was sealed."""
        commit(store, 1)
        commit(store, 2, finalized=False)
        for id in (1, 2):
            future = self.json_of(store, id).replace(b'"version":2', b'"version":4')
            self.damage(store, f"manifests/{id:012d}.json", future)
        with pytest.raises(InvalidCheckpointError, match=r"not what its \.final marker seals"):
            store.load_by_id(1)
        with pytest.raises(UnsupportedFormatError, match="version 4; this beam_ckpt reads"):
            store.load_by_id(2)
        record = store.blobs.get("namespace.json")[0].replace(b'"format":2', b'"format":9')
        self.damage(store, "namespace.json", record)
        with pytest.raises(UnsupportedFormatError, match=r"namespace.json is of format version 9"):
            _ = pickle.loads(pickle.dumps(store)).deployment_id

    @pytest.mark.parametrize("flip", range(0, 400, 13))
    def test_one_flipped_bit_in_a_manifest_never_passes(
        self, store: BlobCheckpointStore, flip: int
    ) -> None:
        """The marker seals the bytes."""
        first = commit(store, 1)
        commit(store, 2)
        key = "manifests/000000000002.json"
        data = bytearray(store.blobs.get(key)[0])
        data[flip % len(data)] ^= 1 << (flip % 8)
        self.damage(store, key, bytes(data))
        with pytest.raises(InvalidCheckpointError):
            store.load_by_id(2)
        assert not store.validate_checkpoint(2).valid
        assert store.recover_latest_validated().chosen == first

    @pytest.mark.parametrize("marker", [b"", b"{}", b"\x00" * 100, b'{"id":2', b" " * 2000])
    def test_a_damaged_marker_makes_the_checkpoint_invalid(
        self, store: BlobCheckpointStore, marker: bytes
    ) -> None:
        """It is not taken for an attempt: a published checkpoint was damaged."""
        first = commit(store, 1)
        commit(store, 2, watermark=9)
        self.damage(store, "manifests/000000000002.final", marker)
        with pytest.raises(InvalidCheckpointError, match=r"000000000002.final"):
            store.load_by_id(2)
        report = store.recover_latest_validated()
        assert (report.chosen, report.skipped[0].phase) == (first, "invalid")
        assert report.skipped[0].boundary == 9
        with pytest.raises(InvalidCheckpointError):
            store.finalize(2)

    def test_a_damaged_manifest_still_has_a_boundary(self, store: BlobCheckpointStore) -> None:
        """Its marker tells; without either it is unknown."""
        commit(store, 1, watermark=1)
        commit(store, 2, watermark=2)
        commit(store, 3, watermark=3)
        self.damage(store, "manifests/000000000003.json", b"{}")
        self.damage(store, "manifests/000000000003.final", b"{}")
        self.damage(store, "manifests/000000000002.json", b"{}")
        report = store.recover_latest_validated()
        assert [(s.id, s.boundary) for s in report.skipped] == [(3, "unknown"), (2, 2)]
        assert report.chosen_id == 1

    # -- G. prune under faults -----------------------------------------------------------

    def test_a_failed_delete_of_a_manifest_is_taken_up_again(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """Row 48."""
        first = commit(opener(), 1)
        commit(opener(), 2)
        store = faulty_store(
            opener(), FaultPlan(Fault("delete", "manifests/*.json", action="error"))
        )
        with pytest.raises(CheckpointStorageError, match="deleting"):
            store.prune(KeepLast(1))
        assert store.list_ids() == [1, 2]
        assert path_of(first) not in self.keys(opener())
        assert store.recover_latest_validated().chosen_id == 2
        assert store.prune(KeepLast(1)).deleted == (1,)
        assert store.list_ids() == [2]

    @pytest.mark.parametrize("action", ["error", "lost_response"])
    def test_a_failed_delete_of_a_file_is_taken_up_again(
        self, opener: Opener[BlobCheckpointStore], action: Literal["error", "lost_response"]
    ) -> None:
        """Rows 49 and 50: nothing is orphaned."""
        commit(opener(), 1)
        commit(opener(), 2)
        store = faulty_store(opener(), FaultPlan(Fault("delete", "state/*", action=action)))
        with pytest.raises(CheckpointStorageError, match="deleting"):
            store.prune(KeepLast(1))
        assert store.list_ids() == [1, 2]
        assert store.prune(KeepLast(1)).deleted == (1,)
        assert sum(k.startswith("state/") for k in self.keys(opener())) == 1

    def test_a_prune_stopped_at_any_step_is_taken_up_again(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """No step leaves an orphan, or takes what a kept checkpoint needs."""

        def prepare(at: str) -> BlobCheckpointStore:
            store = opener(at)
            shared = write(store, b"shared")
            for id in (1, 2, 3):
                own = write(store, b"own %d" % id, operator="own")
                store.save(a_manifest(id, operators=listing([shared, own]), finalized=id != 2))
            return store

        recorder = FaultPlan(record=True)
        faulty_store(prepare("recorded"), recorder).prune(KeepLast(1))
        points = list(fault_points(recorder.operations(), action="error"))
        assert len(points) >= 12
        for n, point in enumerate(points):
            store = prepare(f"at-{n}")
            with pytest.raises(CheckpointStorageError):
                faulty_store(store, FaultPlan(point)).prune(KeepLast(1))
            assert store.validate_checkpoint(3).valid
            assert store.recover_latest_validated().chosen_id == 3
            store.prune(KeepLast(1))
            assert store.list_ids() == [3]
            manifest = store.load_latest()
            assert manifest is not None
            files = {k for k in self.keys(store) if k.startswith("state/")}
            assert files == manifest.sidecar_paths()
            assert [k for k in self.keys(store) if k.startswith("manifests/")] == [
                "manifests/000000000003.final",
                "manifests/000000000003.json",
            ]

    def test_a_commit_stopped_at_any_step_is_taken_up_again(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """At every step the store is the one before or the one after."""

        def run(store: CheckpointStore, manifest: list[CheckpointManifest]) -> None:
            store.claim_generation("run-1")
            if not manifest:
                entry = write(store, b"state")
                manifest.append(a_manifest(2, operators=listing([entry])))
            store.save(manifest[0])
            store.finalize(2)

        recorder = FaultPlan(record=True)
        commit(opener("recorded"), 1)
        run(faulty_store(opener("recorded"), recorder), [])
        for action in ("error", "lost_response"):
            points = list(fault_points(recorder.operations(), action=action))
            for n, point in enumerate(points):
                store = opener(f"{action}-{n}")
                commit(store, 1)
                faulty = faulty_store(store, FaultPlan(point))
                done: list[CheckpointManifest] = []
                with pytest.raises(CheckpointStorageError):
                    run(faulty, done)
                report = store.recover_latest_validated()
                assert report.chosen_id in (1, 2)
                assert all(s.phase == "prepared" for s in report.skipped)
                run(faulty, done)
                latest = store.load_latest()
                assert latest is not None
                assert latest.id == 2
                assert store.validate_checkpoint(2).valid

    def test_a_corrupt_manifest_or_pointer_stops_a_prune_before_it_deletes(
        self, store: BlobCheckpointStore
    ) -> None:
        """Row 51."""
        for id in range(1, 5):
            commit(store, id)
        self.damage(store, "manifests/000000000002.json", b"{}")
        before = self.keys(store)
        for act in (lambda: store.prune_before(4), lambda: store.prune(KeepLast(1)), store.gc):
            with pytest.raises(InvalidCheckpointError, match=r"000000000002.json"):
                act()
        assert self.keys(store) == before

    def test_without_a_pointer_the_newest_finalized_is_kept(
        self, store: BlobCheckpointStore
    ) -> None:
        """Row 112."""
        for id in (1, 2):
            commit(store, id)
        commit(store, 3, finalized=False)
        self.damage(store, "latest.json", None)
        assert store.prune_before(100) == 2
        assert store.list_ids() == [2]
        assert store.validate_checkpoint(2).valid

    def test_a_tag_that_comes_during_a_prune_is_honoured_or_is_told(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """Before any of its steps: what is tagged is whole, what goes is not tagged."""
        outcomes = set()
        for step in range(1, 100):
            at = f"step-{step}"
            for id in (1, 2, 3):
                commit(opener(at), id)
            tagged: list[bool] = []

            def tag(at: str = at, tagged: list[bool] = tagged) -> None:
                try:
                    opener(at).tag("late", 2)
                    tagged.append(True)
                except CheckpointNotFoundError:
                    tagged.append(False)

            pruning = opener(at).with_blobs(Before(opener(at).blobs, step, tag))
            deleted = pruning.prune(KeepLast(1)).deleted
            if not tagged:
                break
            outcomes.add(tagged[0])
            check_tagged(opener(at), 2 if tagged[0] else None)
            assert deleted == ((1,) if tagged[0] else (1, 2))
        assert outcomes == {True, False}

    def test_tagging_again_during_a_prune_takes_no_tag_away(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """A prune that spares what has just been tagged still names it as going, for a while."""
        outcomes = set()
        for step in range(1, 100):
            at = f"step-{step}"
            for id in (1, 2, 3):
                commit(opener(at), id)
            answers: list[bool] = []

            def tag(at: str = at, answers: list[bool] = answers) -> None:
                try:
                    opener(at).tag("late", 2)
                    answers.append(True)
                except CheckpointNotFoundError:
                    answers.append(False)

            blobs = opener(at).blobs
            for later in range(4):
                blobs = Before(blobs, step + later, tag)
            opener(at).with_blobs(blobs).prune(KeepLast(1))
            if not answers:
                break
            outcomes.add(any(answers))
            check_tagged(opener(at), 2 if any(answers) else None)
        assert outcomes == {True, False}

    def test_a_prune_that_was_killed_is_taken_up_again(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """Killed before any of its steps: the next one finishes, and gc leaves nothing of it."""
        for step in range(1, 100):
            at = f"step-{step}"
            for id in (1, 2, 3):
                commit(opener(at), id)
            killed = False

            def kill() -> None:
                nonlocal killed
                killed = True
                raise KeyboardInterrupt

            pruning = opener(at).with_blobs(Before(opener(at).blobs, step, kill))
            with contextlib.suppress(KeyboardInterrupt):
                pruning.prune(KeepLast(1))
            store = opener(at)
            with contextlib.suppress(CheckpointNotFoundError):
                store.tag("late", 2)
            kept = 2 if store.tags() else None
            store.prune(KeepLast(1))
            check_tagged(store, kept)
            store.gc(grace_s=0)
            assert store.list_ids() == ([2, 3] if kept else [3])
            assert store.blobs.list("prunes/") == []
            if not killed:
                break
        assert step > 5

    def test_a_finalize_that_comes_during_a_prune_wins_or_is_told(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """Never a pointer to a checkpoint that was pruned."""
        store = opener()
        commit(store, 1)
        recorder = FaultPlan(record=True)
        commit(opener("recorded"), 1)
        commit(opener("recorded"), 2, finalized=False)
        faulty_store(opener("recorded"), recorder).finalize(2)
        steps = len(recorder.operations())
        for step in range(1, steps + 1):
            at = f"step-{step}"
            commit(opener(at), 1)
            commit(opener(at), 2, finalized=False)
            pruned: list[int] = []

            class Pruning(FaultyBlobs):
                count = 0
                at: str
                step: int
                pruned: list[int]

                def _run(self, operation: str, key: str, act: Callable[[], Any]) -> Any:
                    self.count += 1
                    if self.count == self.step:
                        self.pruned.append(opener(self.at).prune_before(100))
                    return act()

            blobs = Pruning(opener(at).blobs, FaultPlan())
            blobs.at, blobs.step, blobs.pruned = at, step, pruned
            finalizing = opener(at).with_blobs(blobs)
            try:
                finalizing.finalize(2)
                published = True
            except (CheckpointNotFoundError, FencedError, CheckpointConflictError):
                published = False
            assert pruned, step
            after = opener(at)
            latest = after.load_latest()
            assert latest is not None
            assert latest.id == (2 if published else 1)
            assert after.validate_checkpoint(latest.id).valid
            assert after.recover_latest_validated().chosen_id == latest.id

    # -- H, I. ---------------------------------------------------------------------------

    def test_validation_reads_each_object_once(self, opener: Opener[BlobCheckpointStore]) -> None:
        """Row 65: inline state costs no read; a file one; loading artifacts the same."""
        store = opener()
        entries = [
            write(store, b"inline", operator="a", inline_threshold=100),
            write(store, b"external", operator="b"),
        ]
        store.save(a_manifest(1, operators=listing(entries[:1]), finalized=True))
        store.save(a_manifest(2, operators=listing(entries), finalized=True))
        for act in ("validate_checkpoint", "load_checkpoint_artifacts"):
            for id, files in ((1, 0), (2, 1)):
                recorder = FaultPlan(record=True)
                watched = faulty_store(opener(), recorder)
                assert getattr(watched, act)(id)
                read = [op.key for op in recorder.operations()]
                assert read.count(f"manifests/{id:012d}.json") == 1
                assert sum(k.startswith("state/") for k in read) == files

    def test_tampered_inline_state_is_found(self, store: BlobCheckpointStore) -> None:
        """Rows 59, 63 and 65: also where no marker seals it yet."""
        entry = write(store, b"inline", inline_threshold=100)
        store.save(a_manifest(1, operators=listing([entry])))
        key = "manifests/000000000001.json"
        good = self.json_of(store, 1)
        inline = base64.b64encode(b"inline")
        assert inline in good
        self.damage(store, key, good.replace(inline, base64.b64encode(b"Inline")))
        assert "checksum mismatch" in store.validate_checkpoint(1).issues[0]
        for bad in (b"aW5saW5l!", b"aW5saW5", b"aW5saW5lZQ==", b"aW5saW5m="):
            self.damage(store, key, good.replace(inline, bad))
            assert "corrupt manifest" in store.validate_checkpoint(1).issues[0]

    def test_sizes_that_overflow_are_refused(self, store: BlobCheckpointStore) -> None:
        """Row 64."""
        entries = [write(store, b"1", operator="a"), write(store, b"2", operator="b")]
        store.save(a_manifest(1, operators=listing(entries), finalized=True))
        key = "manifests/000000000001.json"
        stored = json.loads(self.json_of(store, 1))
        for operator in stored["operators"].values():
            operator["partitions"][0]["sidecars"][0]["size_bytes"] = 2**63
            operator["total_bytes"] = 2**63
        stored["total_size_bytes"] = 0
        self.damage(store, key, json.dumps(stored).encode())
        assert "overflow 64 bits" in store.validate_checkpoint(1).issues[0]

    def test_a_claimed_size_of_ten_gigabytes_reads_nothing(
        self, store: BlobCheckpointStore
    ) -> None:
        """Row 109: whatever the manifest claims."""
        operator, group, entry = write(store, b"tiny")
        claimed = entry.model_copy(update={"size_bytes": 10_000_000_000})
        big = type(store)(store.blobs, max_state_data_bytes=2**40)
        big.save(a_manifest(1, operators=listing([(operator, group, claimed)]), finalized=True))
        for reader in (store, big):
            assert not reader.validate_checkpoint(1).valid
            with pytest.raises((InvalidCheckpointError, CheckpointTooLargeError)):
                reader.read_sidecar(claimed)
        with pytest.raises(CheckpointTooLargeError, match="10000000000 bytes, 536870912 allowed"):
            store.read_sidecar(claimed)

    def test_storage_errors_are_never_taken_for_damage(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """A network that is down must not make recovery choose an older checkpoint."""
        commit(opener(), 1)
        commit(opener(), 2)
        for operation, key in (
            ("list", "manifests/"),
            ("get", "manifests/*.json"),
            ("get", "manifests/*.final"),
            ("get", "state/*"),
        ):
            store = faulty_store(opener(), FaultPlan(Fault(operation, key, action="error")))
            with pytest.raises(CheckpointStorageError):
                store.recover_latest_validated()
            assert store.recover_latest_validated().chosen_id == 2

    def test_the_newest_corrupt_one_is_passed_over(self, store: BlobCheckpointStore) -> None:
        """Row 66."""
        first = commit(store, 1)
        commit(store, 2)
        self.damage(store, "manifests/000000000002.json", b"not json")
        report = store.recover_latest_validated()
        assert (report.chosen, [s.id for s in report.skipped], report.examined) == (first, [2], 2)
        assert report.skipped[0].reason.startswith("corrupt manifest: ")

    def test_nothing_but_corrupt_ones_is_an_unusable_history(
        self, store: BlobCheckpointStore
    ) -> None:
        """Row 68."""
        commit(store, 1)
        self.damage(store, "manifests/000000000001.json", b"not json")
        report = store.recover_latest_validated()
        assert (report.chosen_id, report.examined, len(report.skipped)) == (None, 1, 1)

    def test_a_checkpoint_whose_pointer_was_never_written_is_recovered(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """Killed between the marker and the pointer: the pointer is a shortcut only."""
        commit(opener(), 1)
        store = faulty_store(opener(), FaultPlan(Fault("replace", "latest.json", action="error")))
        with pytest.raises(CheckpointStorageError):
            commit(store, 2)
        latest = store.load_latest()
        assert latest is not None
        assert latest.id == 1
        assert store.recover_latest_validated().chosen_id == 2
        store.finalize(2)
        latest = store.load_latest()
        assert latest is not None
        assert latest.id == 2

    def test_a_lost_manifest_is_damage_and_not_an_attempt(self, store: BlobCheckpointStore) -> None:
        """Its marker is a witness: a published checkpoint never vanishes silently."""
        first = commit(store, 1, watermark=1)
        commit(store, 2, watermark=2)
        self.damage(store, "manifests/000000000002.json", None)
        report = store.recover_latest_validated()
        assert report.chosen == first
        assert [(s.id, s.phase, s.boundary) for s in report.skipped] == [(2, "invalid", 2)]
        self.damage(store, "manifests/000000000001.json", None)
        assert store.list_ids() == []
        report = store.recover_latest_validated()
        assert (report.chosen_id, report.examined) == (None, 2)
        assert store.next_id() == 3

    def test_a_lost_marker_is_damage_where_the_pointer_names_the_checkpoint(
        self, store: BlobCheckpointStore
    ) -> None:
        """It was published: to pass over it as an attempt would be a silent fallback."""
        first = commit(store, 1)
        commit(store, 2)
        self.damage(store, "manifests/000000000002.final", None)
        report = store.recover_latest_validated()
        assert report.chosen == first
        assert [(s.id, s.phase) for s in report.skipped] == [(2, "invalid")]

    def test_a_marker_that_a_late_finalize_left_for_a_pruned_attempt_is_no_witness(
        self, store: BlobCheckpointStore
    ) -> None:
        """Killed right after it: the prune has noted that the id was used and is gone."""
        first = commit(store, 1)
        commit(store, 2, finalized=False)
        commit(store, 3, finalized=False)
        store.prune_before(100)
        for id in (2, 3):
            marker = store.blobs.get("manifests/000000000001.final")[0]
            marker = marker.replace(b'"id":1', b'"id":%d' % id)
            self.damage(store, f"manifests/{id:012d}.final", marker)
        report = store.recover_latest_validated()
        assert (report.chosen, report.skipped) == (first, ())
        assert store.next_id() == 4
        commit(store, 4)
        before = set(self.keys(store))
        dry = store.prune(KeepLast(1), dry_run=True)
        assert dry.markers == (
            "manifests/000000000002.final",
            "manifests/000000000002.used",
            "manifests/000000000003.final",
            "manifests/000000000003.used",
        )
        assert set(self.keys(store)) == before
        assert store.prune(KeepLast(1)) == replace(dry, dry_run=False)
        assert before - set(self.keys(store)) == {
            "manifests/000000000001.final",
            "manifests/000000000001.json",
            path_of(first),
            *dry.markers,
        }

    def test_a_prune_of_what_was_listed_takes_nothing_else(
        self, store: BlobCheckpointStore
    ) -> None:
        """What was shown to somebody, and agreed to."""
        for id in (1, 2):
            commit(store, id)
        commit(store, 3, finalized=False)
        store.prune_before(100)
        commit(store, 4)
        listed = store.prune(KeepLast(1), dry_run=True)
        assert (listed.deleted, listed.markers) == ((2,), ("manifests/000000000003.used",))
        commit(store, 5)
        self.damage(store, "manifests/000000000001.used", b"{}")
        done = store.prune(KeepLast(1), only=listed)
        assert (done.deleted, done.kept, done.markers) == ((2,), (4, 5), listed.markers)
        assert "manifests/000000000001.used" in self.keys(store)
        assert store.list_ids() == [4, 5]

    def test_gc_of_what_was_listed_takes_nothing_else(self, store: BlobCheckpointStore) -> None:
        """What was shown to somebody, and agreed to."""
        store.claim_generation("dead")
        orphan = write(store, b"x", run_id="dead")[2].path
        store.claim_generation("alive")
        late = write(store, b"x", run_id="alive")[2].path
        listed = store.gc(grace_s=0, dry_run=True)
        assert [g.key for g in listed.deleted] == [orphan]
        store.claim_generation("new")
        done = store.gc(grace_s=0, only=listed)
        assert [g.key for g in done.deleted] == [orphan]
        assert [(g.key, g.reason) for g in done.kept] == [
            (late, "run alive was superseded by generation 3, since")
        ]
        assert [k for k in self.keys(store) if k.startswith("state/")] == [late]
        assert [g.key for g in store.gc(grace_s=0).deleted] == [late]

    def test_a_prune_keeps_the_witness_of_a_lost_checkpoint_until_a_younger_one(
        self, store: BlobCheckpointStore
    ) -> None:
        """Retention must not make a loss invisible."""
        commit(store, 1)
        commit(store, 2)
        commit(store, 3, finalized=False)
        self.damage(store, "latest.json", None)
        self.damage(store, "manifests/000000000002.json", None)
        store.prune(KeepLast(5))
        store.gc(grace_s=0)
        assert [s.id for s in store.recover_latest_validated().skipped] == [3, 2]
        commit(store, 4)
        store.prune(KeepLast(5))
        assert "manifests/000000000002.final" not in self.keys(store)

    # -- J. peers ------------------------------------------------------------------------

    def test_peers_are_read_on_a_shared_root_and_refused_elsewhere(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """Rows 74 and 75."""
        peer, store = opener(participant_id=11), opener()
        chunk = StateChunk("totals", 0, b"of the peer")
        saved = peer.save_with_state(a_manifest(1, participant_id=11, finalized=True), [chunk])
        if not store.blobs.shared_root:
            for read in (
                store.load_manifest_for_participant,
                store.load_state_data_for_participant,
                store.state_data_len_for_participant,
                store.load_checkpoint_artifacts_for_participant,
            ):
                with pytest.raises(
                    InvalidCheckpointError, match=r"holds participant 0 only.*participant 11"
                ):
                    read(11, 1)
            return
        assert store.load_manifest_for_participant(11, 1) == saved
        assert gather(store.load_state_data_for_participant(11, 1)) == [chunk]
        assert store.state_data_len_for_participant(11, 1) == 11
        artifacts = store.load_checkpoint_artifacts_for_participant(11, 1)
        assert artifacts is not None
        assert artifacts.validate(1, participant_id=11).valid
        assert store.load_checkpoint_artifacts_for_participant(11, 2) is None
        assert store.load_manifest_for_participant(12, 1) is None
        key = f"participants/11/{path_of(saved)}"
        assert key in self.keys(store)
        self.damage(store, key, b"of the Peer")
        with pytest.raises(InvalidCheckpointError):
            gather(store.load_state_data_for_participant(11, 1))
        artifacts = store.load_checkpoint_artifacts_for_participant(11, 1)
        assert artifacts is not None
        assert "checksum mismatch" in artifacts.validate(1, participant_id=11).issues[0]

    # -- fencing under sleep -------------------------------------------------------------

    def test_a_run_that_sleeps_at_any_step_of_its_commit_is_fenced_or_came_first(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """Row 106: whatever it was doing when its successor claimed and recovered."""
        recorder = FaultPlan(record=True)

        def start(at: str) -> RunIdentity:
            store = opener(at)
            run = RunIdentity(generation=store.claim_generation("old"), run_id="old")
            commit(store, 1, run=run)
            return run

        def step_of_old(store: CheckpointStore, run: RunIdentity) -> None:
            commit(store, 2, run=run)

        run = start("recorded")
        step_of_old(faulty_store(opener("recorded"), recorder), run)
        steps = len(recorder.operations())
        assert steps > 8
        fenced = 0
        for step in range(1, steps + 1):
            at = f"step-{step}"
            run = start(at)
            seen: list[int | None] = []

            class Successor(FaultyBlobs):
                count = 0
                step: int
                at: str
                seen: list[int | None]

                def _run(self, operation: str, key: str, act: Callable[[], Any]) -> Any:
                    self.count += 1
                    if self.count == self.step:
                        store = opener(self.at)
                        generation = store.claim_generation("new")
                        self.seen.append(store.recover_latest_validated().chosen_id)
                        new = RunIdentity(generation=generation, run_id="new")
                        commit(store, store.next_id(), b"of the successor", run=new)
                    return act()

            blobs = Successor(opener(at).blobs, FaultPlan())
            blobs.step, blobs.at, blobs.seen = step, at, seen
            try:
                step_of_old(opener(at).with_blobs(blobs), run)
            except FencedError:
                fenced += 1
                assert seen == [1]  # what was refused had not been restored from
            else:
                assert seen == [2]  # it was published before its successor recovered
            store = opener(at)
            report = store.recover_latest_validated()
            assert report.chosen is not None
            assert report.chosen.run is not None
            assert report.chosen.run.run_id == "new"
            latest = store.load_latest()
            assert latest == report.chosen
            assert latest.id == (2 if step_count_before_manifest(recorder, step) else 3)
        assert 0 < fenced < steps

    # -- N. ------------------------------------------------------------------------------

    def test_a_checkpoint_restores_with_no_other_manifest_readable(
        self, store: BlobCheckpointStore
    ) -> None:
        """Row 102: a base that an older checkpoint listed first is listed again."""
        base = write(store, b"base")
        store.save(a_manifest(1, operators=listing([base]), finalized=True))
        first = store.load_by_id(1)
        assert first is not None
        delta = write(store, b"delta", kind="delta")
        store.save(
            a_manifest(
                2,
                operators=listing([base, delta]),
                parent_id=first.checkpoint_id,
                finalized=True,
            )
        )
        self.damage(store, "manifests/000000000001.json", b"garbage")
        assert [c.data for c in gather(store.load_state_data(2))] == [b"base", b"delta"]
        assert store.validate_checkpoint(2).valid
        for kind in ("json", "final"):
            self.damage(store, f"manifests/000000000001.{kind}", None)
        assert store.validate_checkpoint(2).valid
        assert store.recover_latest_validated().chosen_id == 2

    def test_a_copy_validates_and_restores_with_the_original_gone(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """Row 103: to another prefix, and back."""
        src, dst, back = opener("src"), opener("dst/deep"), opener("back")
        src.claim_generation("run-1")
        shared = write(src, b"shared")
        for id in (1, 2, 3):
            own = write(src, b"own %d" % id, operator="own")
            src.save(a_manifest(id, operators=listing([shared, own]), finalized=True))
        commit(src, 4, finalized=False)
        src.tag("keep", 2)
        src.tag("other", 1)
        seen: list[tuple[int, int]] = []
        report = copy(src, dst, ids=[3, 2], progress=lambda done, all: seen.append((done, all)))
        assert (report.copied, report.present, report.sidecars) == ((2, 3), (), 3)
        assert seen[-1][0] == seen[-1][1] > 0
        assert copy(src, dst, ids=[2, 3]).present == (2, 3)
        originals = {id: src.load_by_id(id) for id in (2, 3)}
        deployment = src.deployment_id
        src.blobs.delete_many(self.keys(src))
        assert dst.list_ids() == [2, 3]
        assert dst.tags() == {"keep": 2}
        assert dst.deployment_id == deployment
        for id in (2, 3):
            assert dst.validate_checkpoint(id).valid
            assert dst.load_by_id(id) == originals[id]
        assert [c.data for c in gather(dst.load_state_data(3))] == [b"own 3", b"shared"]
        copy(dst, back)
        assert back.load_latest() == originals[3]
        assert back.claim_generation("run-2") == 2
        commit(back, back.next_id())

    def test_a_copy_refuses_what_it_must(self, opener: Opener[BlobCheckpointStore]) -> None:
        """Other deployments, itself, attempts, damage."""
        src, dst, other = opener("src"), opener("dst"), opener("other")
        manifest = commit(src, 1)
        commit(src, 2, finalized=False)
        commit(other, 1)
        with pytest.raises(CheckpointConflictError, match="of deployment"):
            copy(src, other)
        with pytest.raises(StoreUrlError, match="onto itself"):
            copy(src, opener("src"))
        with pytest.raises(CheckpointNotFoundError, match="checkpoint 2 is not a finalized"):
            copy(src, dst, ids=[1, 2])
        assert dst.deployment_id == ""
        self.damage(src, path_of(manifest), b"damaged")
        with pytest.raises(InvalidCheckpointError):
            copy(src, dst)
        assert dst.list_ids() == []

    def test_gc_takes_exactly_the_orphans(self, opener: Opener[BlobCheckpointStore]) -> None:
        """Row 104."""
        store = opener()
        dead = RunIdentity(generation=store.claim_generation("dead"), run_id="dead")
        tagged = commit(store, 1, run=dead, watermark=10)
        store.tag("t", 1)
        orphans = {
            "superseded": write(store, b"x", run_id="dead", boundary=20)[2].path,
            "superseded, end": write(store, b"x", run_id="dead", boundary=None)[2].path,
        }
        live = RunIdentity(generation=store.claim_generation("live"), run_id="live")
        commit(store, 2, run=live, watermark=30)
        orphans["below"] = write(store, b"x", run_id="live", boundary=29)[2].path
        kept = {
            "at the boundary": write(store, b"x", run_id="live", boundary=30)[2].path,
            "just uploaded": write(store, b"x", run_id="live", boundary=40)[2].path,
            "unclaimed run": write(store, b"x", run_id="unborn", boundary=40)[2].path,
        }
        self.damage(store, "state/totals/00000/notes.txt", b"somebody's")
        assert store.gc(grace_s=3600).deleted == ()
        dry = store.gc(grace_s=0, dry_run=True)
        assert {g.key for g in dry.deleted} == set(orphans.values())
        assert {g.key for g in dry.kept} == {*kept.values(), "state/totals/00000/notes.txt"}
        assert dry.bytes == 3
        before = set(self.keys(store))
        report = store.gc(grace_s=0)
        assert (report.deleted, report.kept) == (dry.deleted, dry.kept)
        assert before - set(self.keys(store)) == set(orphans.values())
        assert store.validate_checkpoint(tagged.id).valid
        assert store.gc(grace_s=0).deleted == ()

    def test_gc_takes_state_that_was_saved_for_a_checkpoint_that_never_came(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """Only after a younger checkpoint, and past the grace period."""
        store = opener()
        commit(store, 1, timestamp_ms=1)
        store.save_state_data(2, [StateChunk("totals", 0, b"orphan")])
        assert store.gc(grace_s=0).deleted == ()
        commit(store, 3)
        assert store.gc(grace_s=3600).deleted == ()
        assert [g.reason for g in store.gc(grace_s=0).deleted] == ["checkpoint 2 was never saved"]

    def test_a_superseded_run_that_prunes_and_collects_takes_nothing_of_its_successor(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """A stalled run that wakes up may clean; it must not clean up others."""
        old = opener()
        run = RunIdentity(generation=old.claim_generation("old"), run_id="old")
        for id in (1, 2):
            commit(old, id, run=run, watermark=id)
        new = opener()
        generation = new.claim_generation("new", restored_from=1)
        uploaded = write(new, b"on its way", run_id="new", boundary=9)
        old.prune(KeepLast(1))
        old.prune_before(2**63)
        old.gc(grace_s=0)
        assert new.validate_checkpoint(1).valid
        successor = RunIdentity(generation=generation, run_id="new")
        new.save(a_manifest(3, operators=listing([uploaded]), run=successor, finalized=True))
        old.prune(KeepLast(1))
        old.gc(grace_s=0)
        assert new.validate_checkpoint(3).valid
        assert new.recover_latest_validated().chosen_id == 3

    def test_cleaning_a_store_touches_nothing_beside_it(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """A prefix that begins like another, or lies within it, is another store."""
        stores = [opener(at) for at in ("jobs/a", "jobs/a1", "jobs/b")]
        for store in stores:
            store.claim_generation("run-1")
            for id in (1, 2, 3):
                commit(store, id)
            write(store, b"orphan", run_id="run-1", boundary=1)
            store.claim_generation("run-2")
        before = [self.keys(s) for s in stores[1:]]
        stores[0].prune(KeepLast(1))
        assert len(stores[0].gc(grace_s=0).deleted) == 1
        assert [self.keys(s) for s in stores[1:]] == before

    def test_a_save_that_failed_is_not_remembered_as_one(
        self, opener: Opener[BlobCheckpointStore]
    ) -> None:
        """No cache of what should have happened."""
        commit(opener(), 1)
        plan = FaultPlan(Fault("put_if_absent", "manifests/*.json", action="error"))
        store = faulty_store(opener(), plan)
        store.prune(KeepLast(5))
        with pytest.raises(CheckpointStorageError):
            commit(store, 2)
        assert store.list_ids() == [1]
        assert store.load_by_id(2) is None
        assert store.prune(KeepLast(5)).kept == (1,)
        second = commit(store, 2)
        assert store.load_latest() == second
        assert store.prune(KeepLast(5)).kept == (1, 2)

    def test_gc_takes_what_a_prune_cannot_have_left_but_a_finalize_may(
        self, store: BlobCheckpointStore
    ) -> None:
        """A marker without a manifest is no checkpoint."""
        commit(store, 1)
        commit(store, 2)
        self.damage(store, "manifests/000000000001.json", None)
        assert store.list_ids() == [2]
        assert [g.key for g in store.gc(grace_s=0, dry_run=True).deleted] == [
            "manifests/000000000001.final"
        ]
        store.prune(KeepLast(5))
        assert "manifests/000000000001.final" not in self.keys(store)

    @pytest.mark.parametrize("pointer", [None, b"", b"\x00", b" " * 5000, b'{"id":99}'], ids=str)
    def test_a_broken_pointer_is_repaired_and_nothing_else_changes(
        self, store: BlobCheckpointStore, pointer: bytes | None
    ) -> None:
        """Row 111."""
        commit(store, 1)
        second = commit(store, 2)
        third = commit(store, 3)
        commit(store, 4, finalized=False)
        self.damage(store, path_of(third), b"damaged")
        self.damage(store, "latest.json", pointer)
        before = {k: store.blobs.get(k)[0] for k in self.keys(store)}
        assert store.repair_pointer(dry_run=True).chosen_id == 2
        assert {k: store.blobs.get(k)[0] for k in self.keys(store)} == before
        report = store.repair_pointer()
        assert [s.id for s in report.skipped] == [4, 3]
        assert store.load_latest() == second == report.chosen
        after = {k: store.blobs.get(k)[0] for k in self.keys(store)}
        assert {k for k in after if after[k] != before.get(k)} == {"latest.json"}

    def test_a_repair_without_a_valid_checkpoint_leaves_the_pointer(
        self, store: BlobCheckpointStore
    ) -> None:
        """And brings the report."""
        commit(store, 1)
        self.damage(store, "manifests/000000000001.json", b"{}")
        self.damage(store, "latest.json", b"broken")
        with pytest.raises(NoValidCheckpointError) as caught:
            store.repair_pointer()
        assert caught.value.report is not None
        assert caught.value.report.examined == 1
        assert store.blobs.get("latest.json")[0] == b"broken"
        assert store.repair_pointer(discard=True, dry_run=True).chosen_id is None
        assert store.blobs.get("latest.json")[0] == b"broken"
        assert store.repair_pointer(discard=True).chosen_id is None
        assert store.load_latest() is None

    @pytest.mark.parametrize("code", [28, 13, 30, 5, 122], ids=os.strerror)
    def test_a_storage_that_refuses_is_a_clear_error_and_loses_nothing(
        self, opener: Opener[BlobCheckpointStore], code: int
    ) -> None:
        """Row 113: no space, no permission, read-only, I/O error, over quota."""
        last = commit(opener(), 1)
        for operation in ("put", "put_if_absent", "replace"):
            plan = FaultPlan(Fault(operation, action="error", errno=code))
            store = faulty_store(opener(), plan)
            with pytest.raises(CheckpointStorageError, match="failed") as caught:
                commit(store, 2)
            assert caught.value.errno == code
            assert isinstance(caught.value, OSError)
            assert opener().validate_checkpoint(1).valid
            assert opener().recover_latest_validated().chosen_id in (1, 2)
        assert opener().load_by_id(1) == last

    def test_readers_never_see_a_torn_state(self, opener: Opener[BlobCheckpointStore]) -> None:
        """While checkpoints are published and pruned, what is latest is whole."""
        commit(opener(), 1)
        done = threading.Event()
        problems: list[str] = []

        def read() -> None:
            store = opener()
            while not done.is_set():
                try:
                    latest = store.load_latest()
                except InvalidCheckpointError as e:
                    problems.append(str(e))
                    continue
                if latest is None:
                    problems.append("no latest")

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        store = opener()
        for id in range(2, 30):
            commit(store, id)
            store.prune(KeepLast(3))
        done.set()
        for reader in readers:
            reader.join()
        assert problems == []


def step_count_before_manifest(recorder: FaultPlan, step: int) -> bool:
    """Whether the n-th operation of a recorded commit came no later than its manifest's."""
    for n, op in enumerate(recorder.operations(), 1):
        if (op.name, op.key) == ("put_if_absent", "manifests/000000000002.json"):
            return step <= n
    raise AssertionError("no manifest was written")
