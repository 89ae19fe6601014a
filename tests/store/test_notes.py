"""What listings tell spares reads; it is believed only of the bytes that it was written for."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable

import pytest

from beam_ckpt.blobs import BlobMeta
from beam_ckpt.blobs._base import crc32c
from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.manifest import AbandonedMarker, FinalMarker, RunIdentity
from beam_ckpt.retention import KeepLast, RetentionFacts
from beam_ckpt.store import MemoryCheckpointStore, ObjectStoreCheckpointStore, copy
from beam_ckpt.store._blobstore import BlobCheckpointStore
from beam_ckpt.store._notes import marker_note, read_marker_note
from beam_ckpt.testing.faults import FaultPlan, FaultyBlobs
from beam_ckpt.testing.gcs import GcsBucket
from beam_ckpt.testing.store import a_manifest, commit, path_of

Open = Callable[[], BlobCheckpointStore]


@pytest.fixture(params=["memory", "gcs"])
def reopen(request: pytest.FixtureRequest) -> Open:
    """Opens the same store anew, as another process does."""
    if request.param == "memory":
        name = uuid.uuid4().hex
        return lambda: MemoryCheckpointStore(name)
    bucket: GcsBucket = request.getfixturevalue("gcs_bucket")
    return lambda: ObjectStoreCheckpointStore(f"{bucket.url}/root", **bucket.options)


def operations(
    store: BlobCheckpointStore, act: Callable[[BlobCheckpointStore], object]
) -> Counter[tuple[str, str]]:
    """What an act does: how often which operation below which prefix."""
    plan = FaultPlan(record=True)
    act(store.with_blobs(FaultyBlobs(store.blobs, plan)))
    return Counter((op.name, op.key.partition("/")[0]) for op in plan.operations())


def test_listing_and_a_prune_of_nothing_read_no_manifest(reopen: Open) -> None:
    for id in range(1, 8):
        commit(reopen(), id, epoch=10 * id)
    assert reopen().list() == [(id, 10 * id) for id in range(1, 8)]
    assert operations(reopen(), lambda s: s.list()) == {("list", "manifests"): 1}
    done = operations(reopen(), lambda s: s.prune(KeepLast(7)))
    assert not any(what in ("get", "head") for what, where in done if where == "manifests")
    assert done["list", "manifests"] == 1


def test_a_prune_reads_each_manifest_once_and_none_again(reopen: Open) -> None:
    manifests = [commit(reopen(), id) for id in range(1, 8)]
    store = reopen()
    first = operations(store, lambda s: s.prune(KeepLast(6)))
    assert first["get", "manifests"] == 7
    assert [m.key for m in store.blobs.list("state/")] == sorted(path_of(m) for m in manifests[1:])

    kept = reopen()
    kept.prune(KeepLast(5))
    commit(kept, 8)
    plan = FaultPlan(record=True)
    inner, kept._blobs = kept.blobs, FaultyBlobs(kept.blobs, plan)
    kept.prune(KeepLast(5))
    kept._blobs = inner
    read = [op.key for op in plan.operations() if op.name == "get" and "manifests" in op.key]
    assert read == ["manifests/000000000008.json"]


def test_what_listings_tell_is_what_the_manifests_say(reopen: Open) -> None:
    """Finalized, given up and unfinished ones; of runs and of none; on a copy too."""
    store = reopen()
    commit(store, 1, epoch=5)
    run = RunIdentity(generation=store.claim_generation("a"), run_id="a")
    commit(store, 2, epoch=6, run=run)
    commit(store, 3, epoch=7, run=run, finalized=False)
    run = RunIdentity(generation=store.claim_generation("b"), run_id="b")
    commit(store, 4, epoch=7, run=run)
    commit(store, 5, epoch=8, run=run, finalized=False)
    target = MemoryCheckpointStore(uuid.uuid4().hex)
    copy(store, target)
    for told in (reopen(), target):
        found = told._inventory()
        noted = told._noted_facts(found)
        read = {f.id: f for f in told._retention_facts(found, files=True)}
        assert set(noted) == set(read)
        for id, fact in noted.items():
            assert fact.sidecars is None
            assert (fact.epoch, fact.timestamp_ms, fact.finalized, fact.generation) == (
                read[id].epoch,
                read[id].timestamp_ms,
                read[id].finalized,
                read[id].generation,
            )
    assert set(noted) == {1, 2, 4}


def junk(store: BlobCheckpointStore) -> None:
    """Other bytes under the note of the manifest."""
    meta = next(m for m in store.blobs.list("manifests/") if m.key.endswith("2.json"))
    assert meta.note
    store.blobs.delete_many([meta.key])
    store.blobs.put_if_absent(meta.key, b"{}", meta.note)


def swapped(store: BlobCheckpointStore) -> None:
    """The manifest of another id, with its note."""
    meta = next(m for m in store.blobs.list("manifests/") if m.key.endswith("1.json"))
    store.blobs.delete_many(["manifests/000000000002.json"])
    data = store.blobs.get(meta.key)[0]
    store.blobs.put_if_absent("manifests/000000000002.json", data, meta.note)


def overwritten(store: BlobCheckpointStore) -> None:
    store.blobs.put("manifests/000000000002.json", b"{}")


@pytest.mark.parametrize("damage", [junk, swapped, overwritten])
def test_a_note_is_not_believed_of_other_bytes(
    reopen: Open, damage: Callable[[BlobCheckpointStore], None]
) -> None:
    for id in (1, 2, 3):
        commit(reopen(), id)
    damage(reopen())
    before = reopen().blobs.list("")
    for act in (lambda s: s.list(), lambda s: s.prune(KeepLast(3)), lambda s: s.prune_before(1)):
        with pytest.raises(InvalidCheckpointError):
            act(reopen())
    assert reopen().blobs.list("") == before


def test_a_marker_is_not_believed_of_another_manifest(reopen: Open) -> None:
    for id in (1, 2, 3):
        commit(reopen(), id)
    blobs = reopen().blobs
    by_key = {m.key: m for m in blobs.list("manifests/")}
    data = blobs.get("manifests/000000000001.final")[0]
    blobs.delete_many(["manifests/000000000002.final"])
    note = by_key["manifests/000000000001.final"].note
    blobs.put_if_absent("manifests/000000000002.final", data, note)
    with pytest.raises(InvalidCheckpointError):
        reopen().prune(KeepLast(3))
    # Its own marker, of a manifest that has been replaced by another valid one.
    blobs.delete_many(["manifests/000000000002.final", "manifests/000000000002.json"])
    reopen().save(a_manifest(2, 77))
    own = by_key["manifests/000000000002.final"]
    blobs.put_if_absent(own.key, b"never parsed, if the note is believed", own.note)
    assert reopen().list() == [(1, 1), (2, 77), (3, 3)]
    with pytest.raises(InvalidCheckpointError):
        reopen().prune(KeepLast(3))


def test_a_store_of_other_key_groups_refuses_what_a_listing_tells(reopen: Open) -> None:
    commit(reopen(), 1, key_group_count=1)
    other = reopen()
    other._key_group_count = 7
    with pytest.raises(InvalidCheckpointError, match="key"):
        other.list()


def test_facts_without_files_delete_nothing() -> None:
    with pytest.raises(ValueError, match="has not been read"):
        RetentionFacts(1, 1, 1, True, None).files()


def test_a_marker_note_names_its_id_its_bytes_and_what_it_seals() -> None:
    manifest = a_manifest(2)
    data, other = manifest.to_json(), a_manifest(2).to_json()
    marker = FinalMarker.of(manifest, data)
    note = marker_note(marker, data)

    def meta(content: bytes, note: str = "") -> BlobMeta:
        return BlobMeta("key", len(content), "1", crc32c(content), note)

    final = meta(marker.to_json(), note)
    assert read_marker_note(final, 2, meta(data)) == "final"
    assert read_marker_note(final, 1, meta(data)) is None
    assert read_marker_note(final, 2, meta(other)) is None
    assert read_marker_note(meta(b"{}", note), 2, meta(data)) is None
    assert read_marker_note(meta(marker.to_json()), 2, meta(data)) is None
    unknown = BlobMeta("key", 1, "1", None, note)  # a backend without checksums
    assert read_marker_note(unknown, 2, meta(data)) is None

    given_up = AbandonedMarker(id=2, abandoned_by="prune")
    abandoned = meta(given_up.to_json(), marker_note(given_up))
    assert read_marker_note(abandoned, 2, meta(data)) == "abandoned"
    assert read_marker_note(abandoned, 3, meta(data)) is None
