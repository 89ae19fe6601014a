"""Checkpoints move: from a laptop to a bucket, to another prefix, and back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from beam_ckpt import open_store
from beam_ckpt.blobs import BlobMeta
from beam_ckpt.errors import CheckpointConflictError, CheckpointStorageError
from beam_ckpt.manifest import MAX_MANIFEST_BYTES, RunIdentity
from beam_ckpt.store import copy
from beam_ckpt.testing.faults import Fault, FaultPlan, FaultyBlobs, faulty_store
from beam_ckpt.testing.gcs import GcsBucket
from beam_ckpt.testing.store import a_manifest, commit, listing, path_of, write


def test_a_tree_goes_from_files_to_a_bucket_and_back(tmp_path: Path, gcs_bucket: GcsBucket) -> None:
    local = open_store(tmp_path / "a")
    local.claim_generation("run-1")
    shared = write(local, b"shared")
    for id in (1, 2):
        own = write(local, b"own %d" % id, operator="own")
        local.save(a_manifest(id, operators=listing([shared, own]), finalized=True))
    local.tag("first", 1)
    bucket = open_store(f"{gcs_bucket.url}/deep/prefix", **gcs_bucket.options)
    other = open_store(f"{gcs_bucket.url}/other", **gcs_bucket.options)
    originals = [local.load_by_id(id) for id in (1, 2)]
    assert copy(local, bucket).copied == (1, 2)
    shutil.rmtree(tmp_path / "a")
    assert copy(bucket, other, ids=[2]).copied == (2,)
    back = open_store(tmp_path / "b")
    assert copy(bucket, back).copied == (1, 2)
    for store, ids in ((bucket, (1, 2)), (other, (2,)), (back, (1, 2))):
        assert store.list_ids() == list(ids)
        for id in ids:
            assert store.validate_checkpoint(id).valid
            assert store.load_by_id(id) == originals[id - 1]
        assert store.load_latest() == originals[1]
        assert store.deployment_id == back.deployment_id
    assert back.tags() == {"first": 1}
    assert back.claim_generation("run-2") == 2
    commit(back, back.next_id())


def test_a_tree_that_was_moved_by_other_means_is_a_store_where_it_is(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a")
    last = commit(store, 1)
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere/b")
    shutil.rmtree(tmp_path / "a")
    moved = open_store(tmp_path / "elsewhere/b")
    assert moved.load_latest() == last
    assert moved.validate_checkpoint(1).valid
    assert moved.recover_latest_validated().chosen_id == 1


def test_a_copy_reads_no_more_of_what_is_there_than_it_brings(tmp_path: Path) -> None:
    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    final = commit(source, 1)
    copy(source, target)
    longest = {
        "manifests/000000000001.json": MAX_MANIFEST_BYTES,  # the same, packed by another zlib?
        "manifests/000000000001.final": 1024,
        path_of(final): final.sidecars()[0][2].size_bytes,
    }

    class Watching(FaultyBlobs):
        def get(self, key: str, *, max_bytes: int | None = None) -> tuple[bytes, BlobMeta]:
            assert max_bytes is not None
            assert max_bytes <= longest.get(key, 1024)
            return super().get(key, max_bytes=max_bytes)

    watched = target.with_blobs(Watching(target.blobs, FaultPlan()))  # type: ignore[attr-defined]
    for key in longest:
        held = target.blobs.get(key)[0]  # type: ignore[attr-defined]
        target.blobs.put(key, held * 2)  # type: ignore[attr-defined]
        with pytest.raises(CheckpointConflictError, match="exists with other content"):
            copy(source, watched)
        target.blobs.put(key, held)  # type: ignore[attr-defined]
    assert copy(source, watched).present == (1,)


def test_a_copy_that_was_interrupted_is_taken_up_again(tmp_path: Path) -> None:
    source = open_store(tmp_path / "a")
    for id in (1, 2, 3):
        commit(source, id)
    target = open_store(tmp_path / "b")
    plan = FaultPlan(Fault("put_if_absent", "manifests/*.final", nth=2, action="error"))
    with pytest.raises(CheckpointStorageError):
        copy(source, faulty_store(target, plan))
    # What is not whole there is not restored there.
    assert target.load_latest() is None
    assert target.recover_latest_validated().chosen_id == 1
    report = copy(source, target)
    assert (report.copied, report.present) == ((2, 3), (1,))
    assert report.sidecars == 1
    assert target.load_latest() == source.load_latest()


def test_a_copy_is_whole_though_gc_ran_at_its_target(tmp_path: Path) -> None:
    """Until a manifest lists them, copied files are unlisted, and older than any grace period."""
    source = open_store(tmp_path / "a")
    for n, run_id in enumerate(["old", "new"], 1):
        run = RunIdentity(generation=source.claim_generation(run_id), run_id=run_id)
        commit(source, n, run=run)
    target = open_store(tmp_path / "b")
    swept: list[str] = []

    def sweep(done: int, total: int) -> None:
        swept.extend(g.key for g in target.gc(grace_s=0).deleted)

    report = copy(source, target, progress=sweep)
    assert len(swept) == 1
    assert report.copied == (1, 2)
    assert all(target.validate_checkpoint(id).valid for id in (1, 2))
    assert target.load_latest() == source.load_latest()
