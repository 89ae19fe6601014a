"""Small sidecars of an operator are one file of all its key groups: no runner is needed."""

from __future__ import annotations

import json
import random
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import duckdb
import pytest
from apache_beam.coders import BytesCoder, StrUtf8Coder, VarIntCoder
from apache_beam.transforms.window import GlobalWindows

from beam_ckpt import CheckpointStore, inspect, open_store
from beam_ckpt.errors import CheckpointError, InvalidCheckpointError, StoreUrlError
from beam_ckpt.keygroups import key_group
from beam_ckpt.maintenance import forget, rewrite
from beam_ckpt.manifest import CheckpointManifest, SidecarEntry, parse_record
from beam_ckpt.sidecar import SharedRows, decode_sidecar
from beam_ckpt.store import copy
from beam_ckpt.testing.driven import DrivenCheckpoints, restored
from beam_ckpt.transforms._limits import Limits
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.snapshot import SnapshotRecord
from beam_ckpt.transforms.writer import SHARED_THRESHOLD, WriteSidecarsFn

GROUPS = 16
SECOND = 1_000_000
OPERATOR = OperatorState(
    "totals",
    StrUtf8Coder(),
    GlobalWindows().get_window_coder(),
    (CellState("value", "read_modify_write", BytesCoder()),),
    False,
)
State = dict[str, bytes]


def in_memory() -> CheckpointStore:
    return open_store(f"memory://{uuid.uuid4().hex}")


def record(key: str, value: bytes | None) -> tuple[int, bytes]:
    """The key group and the record of a key; a value of None is a tombstone."""
    made = SnapshotRecord(key.encode(), b"", value is None, 0, (value,), (), ())
    return key_group(key.encode(), GROUPS), made.to_bytes()


def first(job: DrivenCheckpoints, rng: random.Random, keys: int = 400) -> State:
    """Saves so many keys, which are the bases of all key groups."""
    state = {str(key): rng.randbytes(200) for key in range(keys)}
    job.checkpoint(SECOND, [record(key, value) for key, value in state.items()])
    return state


def touch(
    job: DrivenCheckpoints, rng: random.Random, state: State, epoch: int, keys: int
) -> CheckpointManifest:
    """Changes some keys, or deletes them, and takes a checkpoint of that; returns its manifest."""
    records = []
    for key in map(str, rng.sample(range(400), keys)):
        value = None if keys > 1 and rng.random() < 0.2 else rng.randbytes(200)
        if value is not None:
            state[key] = value
        elif state.pop(key, None) is None:
            continue
        records.append(record(key, value))
    (result,) = job.checkpoint((epoch + 2) * SECOND, records)
    manifest = job._committer._store.load_by_id(result.id)
    assert manifest is not None
    return manifest


def values(store: CheckpointStore, manifest: CheckpointManifest) -> State:
    found = {}
    for key, data in restored(store, OPERATOR, manifest):
        assert key not in found, "a key comes once"
        (found[key],) = SnapshotRecord.from_bytes(data).cells
    return found


def slices(manifest: CheckpointManifest, kind: str = "delta") -> list[SidecarEntry]:
    return [e for _, _, e in manifest.sidecars() if e.is_shared and e.kind == kind]


def chain(epochs: int, **settings: int) -> Iterator[tuple[CheckpointStore, CheckpointManifest]]:
    """Runs after each other, as many epochs; each checkpoint is looked at."""
    rng, store = random.Random(epochs), in_memory()
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, keep=2, **settings)
    state = first(job, rng)
    for epoch in range(epochs):
        if rng.random() < 0.1:
            (*_, newest) = store.list_ids()
            job = DrivenCheckpoints(store, OPERATOR, GROUPS, keep=2, base_id=newest, **settings)
        manifest = touch(job, rng, state, epoch, keys=rng.choice([1, 5, 5, 60]))
        assert values(store, manifest) == state
        yield store, manifest


def test_the_deltas_of_an_epoch_are_one_file_and_each_group_has_its_rows_of_it():
    rng, store = random.Random(1), in_memory()
    job = DrivenCheckpoints(store, OPERATOR, GROUPS)
    state = first(job, rng)
    before = {blob.key for blob in store.blobs.list("state/")}
    manifest = touch(job, rng, state, 0, keys=50)
    (new,) = {blob.key for blob in store.blobs.list("state/")} - before
    assert {entry.path for entry in slices(manifest)} == {new}
    assert len(slices(manifest)) > 10
    assert values(store, manifest) == state
    (of_bases,) = {entry.path for entry in slices(manifest, "full")}
    assert {of_bases} == before
    for path, kind in (new, "delta"), (of_bases, "full"):
        header, rows = decode_sidecar(store.blobs.get(path)[0], where=path)
        assert (header.key_group, header.operator, header.kind) == (None, "totals", kind)
        for _, group, entry in manifest.sidecars():
            if entry.path == path:
                assert entry.kind == kind
                keys = rows["_key"].slice(entry.first_row, entry.rows).to_pylist()
                assert [key_group(key, GROUPS) for key in keys] == [group] * entry.rows
                assert keys == sorted(keys)


def test_any_sql_engine_reads_a_shared_file(tmp_path: Path):
    rng, store = random.Random(1), open_store(tmp_path)
    job = DrivenCheckpoints(store, OPERATOR, GROUPS)
    state = first(job, rng)
    manifest = touch(job, rng, state, 0, keys=50)
    (shared,) = {entry.path for entry in slices(manifest)}
    query = "SELECT key, value FROM read_parquet($1) WHERE NOT _deleted"
    found = dict(duckdb.execute(query, [str(tmp_path / shared)]).fetchall())
    assert found == {key: state[key] for key in found}
    assert len(found) > 30
    with inspect.duckdb(store) as connection:
        assert dict(connection.execute("SELECT key, value FROM totals").fetchall()) == state
    (row,) = (r for r in inspect.files(store).to_pylist() if r["path"] == shared)
    assert (row["key_group"], row["rows"]) == (None, slices(manifest)[0].file_rows)
    assert row["checkpoints"] == [manifest.id]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shared_threshold": 1500},
        {"shared_threshold": 6800},
        {"max_files": 3},
        {"max_files": 1},
    ],
    ids=str,
)
def test_every_checkpoint_restores_the_state_of_its_cut(settings: dict[str, int]):
    """Small deltas, larger ones and bases in turn; what is left of shared files moves."""
    moved, looked_up = 0, []
    where_now = WriteSidecarsFn._where_now

    def noted(self, uid, group, old):
        looked_up.append(found := where_now(self, uid, group, old))
        return found

    with mock.patch.object(WriteSidecarsFn, "_where_now", noted):
        for store, manifest in chain(30, **settings):
            used: dict[str | None, int] = {}
            both = [*slices(manifest), *slices(manifest, "full")]
            for entry in both:
                used[entry.path] = used.get(entry.path, 0) + entry.own_bytes
                moved += entry.epoch != manifest.epoch and entry.path not in seen_before(store)
            assert store.validate_checkpoint(manifest.id).valid
            for entry in slices(manifest):
                assert 2 * used[entry.path] >= entry.size_bytes, "mostly not in use"
            sizes = {entry.path: entry.size_bytes for entry in slices(manifest, "full")}
            # (A footer has some 1,500 bytes.)
            assert sum(sizes.values()) <= 1.5 * sum(used[path] for path in sizes) + 3000
            listed = {p for i in store.list_ids() for p in store.load_by_id(i).sidecar_paths()}
            assert listed <= {blob.key for blob in store.blobs.list("state/")}
    assert moved
    assert None not in looked_up, "what has moved is found"


def seen_before(store: CheckpointStore) -> set[str]:
    """The paths in all checkpoints but the newest."""
    return {p for i in store.list_ids()[:-1] for p in store.load_by_id(i).sidecar_paths()}


def test_a_writer_finds_what_has_moved_since_it_was_listed():
    """A run that has not written to a group since its start knows the group as it was then."""
    rng, store = random.Random(7), in_memory()
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, keep=1)
    state = first(job, rng)
    base = touch(job, rng, state, 0, keys=100)
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, keep=1, base_id=base.id)
    quiet = key_group(b"0", GROUPS)
    old = [e for _, group, e in base.sidecars() if e.is_shared and group == quiet]
    assert old
    keys = [key for key in state if key_group(key.encode(), GROUPS) != quiet]
    for epoch in range(1, 40):  # all others are written again and again
        for key in keys:
            state[key] = rng.randbytes(200)
        records = [record(key, state[key]) for key in rng.sample(keys, 100)]
        records += [record(key, state[key]) for key in keys]
        job.checkpoint((epoch + 2) * SECOND, records)
    assert not {e.path for e in old} & {b.key for b in store.blobs.list("state/")}, "it is gone"
    job._writer._shared_rows = SharedRows()  # the group goes to another worker
    looked_up: list[SidecarEntry | None] = []
    where_now = WriteSidecarsFn._where_now
    with mock.patch.object(
        WriteSidecarsFn,
        "_where_now",
        lambda *args: looked_up.append(found := where_now(*args)) or found,
    ):
        for epoch in range(40, 60):
            state["0"] = rng.randbytes(200)
            (result,) = job.checkpoint((epoch + 2) * SECOND, [record("0", state["0"])])
    manifest = store.load_by_id(result.id)
    assert manifest is not None
    assert {entry.kind for entry in looked_up if entry} == {"full", "delta"}
    assert None not in looked_up
    assert values(store, manifest) == state


def test_a_first_checkpoint_is_a_few_files_of_which_a_restore_reads_each_once():
    """20,000 keys with three numbers, in 128 key groups; then one key in a hundred is touched."""
    rng, store = random.Random(1), in_memory()
    numbers = OperatorState(
        "totals",
        StrUtf8Coder(),
        GlobalWindows().get_window_coder(),
        tuple(CellState(n, "read_modify_write", VarIntCoder()) for n in ("count", "sum", "last")),
        False,
    )
    job = DrivenCheckpoints(store, numbers, 128)
    state: dict[bytes, tuple[bytes, ...]] = {}

    def saved(number: int) -> tuple[int, bytes]:
        key = b"key-%08d" % number
        state[key] = tuple(VarIntCoder().encode(rng.randrange(2**bits)) for bits in (10, 20, 30))
        made = SnapshotRecord(key, b"", False, 0, state[key], (), ())
        return key_group(key, 128), made.to_bytes()

    (result,) = job.checkpoint(SECOND, map(saved, range(20_000)))
    assert result.sidecars == len(store.blobs.list("state/")) <= 4
    assert result.size_bytes == sum(blob.size for blob in store.blobs.list("state/"))
    manifest = store.load_by_id(result.id)
    assert manifest is not None
    assert len(slices(manifest, "full")) == 128
    assert len(manifest.to_json()) < 128 * 100
    (result,) = job.checkpoint(2 * SECOND, map(saved, rng.sample(range(20_000), 200)))
    assert result.sidecars == 1
    manifest = store.load_by_id(result.id)
    assert manifest is not None
    reads, read = Counter[str](), type(store).read_sidecar

    def noting(self: CheckpointStore, entry: SidecarEntry) -> bytes:
        if entry.path is not None:
            reads[entry.path] += 1
        return read(self, entry)

    with mock.patch.object(type(store), "read_sidecar", noting):
        found = {
            key.encode(): SnapshotRecord.from_bytes(data).cells
            for key, data in restored(store, numbers, manifest)
        }
        assert found == state
        assert reads == dict.fromkeys(manifest.sidecar_paths(), 1)
        reads.clear()
        assert len(inspect.state(store, "totals")) == 20_000
        # (A look for the newest valid one has read each as well.)
        assert set(reads.values()) == {1}
        reads.clear()
        # A run that goes on from here, in which every group writes a new base.
        job = DrivenCheckpoints(store, numbers, 128, base_id=manifest.id, max_files=1)
        job.checkpoint(3 * SECOND, map(saved, range(20_000)))
        assert reads == dict.fromkeys(manifest.sidecar_paths(), 1)


def test_a_base_of_several_files_has_them_to_itself():
    rng, store = random.Random(1), in_memory()
    tiny = Limits(page_rows=8, file_bytes=2000)
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, limits=tiny)
    state = first(job, rng)
    manifest = store.load_by_id(1)
    assert manifest is not None
    assert not slices(manifest, "full")
    assert max(e.size_bytes for _, _, e in manifest.sidecars()) < SHARED_THRESHOLD
    assert values(store, manifest) == state


def test_a_base_that_is_alone_comes_together_with_the_next_ones():
    store = in_memory()
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, keep=1)
    (result,) = job.checkpoint(SECOND, [record("1", b"one")])
    (entry,) = [e for _, _, e in store.load_by_id(result.id).sidecars()]
    assert not entry.is_shared, "of the only key group there is"
    state = {"1": b"one"}
    for epoch in range(2, 40):
        key = str(epoch)
        state[key] = b"new"
        (result,) = job.checkpoint(epoch * SECOND, [record(key, b"new")])
        manifest = store.load_by_id(result.id)
        assert manifest is not None
        assert values(store, manifest) == state
        files = {e.path for e in slices(manifest, "full")}
        assert len(files) == 1
    assert len(manifest.operators["totals"].partitions) > 10


def test_a_key_group_that_has_nothing_any_more_leaves_no_slice():
    rng, store = random.Random(1), in_memory()
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, keep=1, max_files=1)
    state = first(job, rng)
    gone = [key for key in state if key_group(key.encode(), GROUPS) == 3]
    (result,) = job.checkpoint(2 * SECOND, [record(key, None) for key in gone])
    manifest = store.load_by_id(result.id)
    assert manifest is not None
    assert 3 not in {group for _, group, _ in manifest.sidecars()}
    assert {blob.key for blob in store.blobs.list("state/")} == manifest.sidecar_paths()
    assert values(store, manifest) == {k: v for k, v in state.items() if k not in gone}


def test_bases_that_are_rewritten_into_other_key_groups_are_all_there():
    store = in_memory()
    state, _, _ = two(store)
    report = rewrite(store, key_groups=5)
    manifest = store.load_by_id(report.id or 0)
    assert manifest is not None
    assert manifest.key_group_count == 5
    assert values(store, manifest) == state


@pytest.mark.parametrize("limit", [0, 100])
def test_without_sharing_each_group_has_its_own_file(limit: int):
    for _, manifest in chain(10, shared_threshold=limit):
        assert not slices(manifest)
        assert manifest.version == 2


def test_what_is_retained_is_bounded():
    """Many groups of which few rows each are touched, for long."""
    rng, store = random.Random(3), in_memory()
    job = DrivenCheckpoints(store, OPERATOR, 64, keep=3)
    state = {str(key): rng.randbytes(100) for key in range(6400)}
    job.checkpoint(SECOND, [(int(key) % 64, record(key, v)[1]) for key, v in state.items()])
    full = sum(blob.size for blob in store.blobs.list("state/"))
    most = 0
    for epoch in range(50):
        for key in map(str, rng.sample(range(6400), 64)):
            state[key] = rng.randbytes(100)
            job.add(int(key) % 64, (epoch + 2) * SECOND, record(key, state[key])[1])
        job.write((epoch + 2) * SECOND)
        (result,) = job.commit((epoch + 2) * SECOND)
        most = max(most, sum(blob.size for blob in store.blobs.list("state/")))
    manifest = store.load_by_id(result.id)
    assert manifest is not None
    assert values(store, manifest) == state
    assert most <= 2.5 * full, f"{most / full:.2f} times a full checkpoint"


@pytest.mark.parametrize("settings", [{}, {"shared_threshold": 0}], ids=str)
def test_what_is_retained_is_bounded_where_rows_are_of_all_sizes(settings: dict[str, int]):
    """A large row that nobody has any more, beside a small one in use, is not half in use."""
    rng, store = random.Random(4), in_memory()
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, keep=1, **settings)
    state = {
        f"{group}-{key}": b"" for group in range(GROUPS) for key in range(100 if group else 10)
    }

    def value(key: str) -> bytes:
        return rng.randbytes(100 if group_of(key) else 14_000)

    def group_of(key: str) -> int:
        return int(key.split("-")[0])

    def saved(key: str) -> tuple[int, bytes]:
        state[key] = value(key)
        return group_of(key), record(key, state[key])[1]

    job.checkpoint(SECOND, [saved(key) for key in [*state]])
    full = sum(blob.size for blob in store.blobs.list("state/"))
    most = 0
    for epoch in range(100):
        touched = [f"0-{rng.randrange(10)}", f"{rng.randrange(1, GROUPS)}-{rng.randrange(100)}"]
        (result,) = job.checkpoint((epoch + 2) * SECOND, map(saved, touched))
        most = max(most, sum(blob.size for blob in store.blobs.list("state/")))
    manifest = store.load_by_id(result.id)
    assert manifest is not None
    assert values(store, manifest) == state
    assert most <= 2.5 * full, f"{most / full:.2f} times a full checkpoint"


# ----------------------------------------------------------------------------- what goes wrong


def two(store: CheckpointStore, **settings: int) -> tuple[State, CheckpointManifest, str]:
    """A full checkpoint and a delta; the path of the file of deltas that groups share."""
    rng = random.Random(1)
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, **settings)
    state = first(job, rng)
    manifest = touch(job, rng, state, 0, keys=20)
    (path,) = {entry.path for entry in slices(manifest)}
    assert path is not None
    return state, manifest, path


@pytest.mark.parametrize("kind", ["full", "delta"])
@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_damage_is_named_once_with_the_key_groups_that_it_is_of(damage: str, kind: str):
    store = in_memory()
    _, manifest, _ = two(store)
    (path,) = {entry.path for entry in slices(manifest, kind)}
    assert path is not None
    data = store.blobs.get(path)[0]
    store.blobs.delete_many([path])
    if damage == "flipped":
        store.blobs.put(path, data[:99] + bytes([data[99] ^ 1]) + data[100:])
    (issue,) = store.validate_checkpoint(manifest.id, deep=True).issues
    groups = sorted({g for _, g, e in manifest.sidecars() if e.path == path})
    assert issue.startswith("operator 'totals', key groups ")
    named = issue.removeprefix("operator 'totals', key groups ").split(": ")[0]
    spelled = [
        group
        for part in named.split(", ")
        for group in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)
    ]
    assert spelled == groups
    before = manifest.id - 1 if kind == "delta" else None  # both stand on the base
    assert store.recover_latest_validated(deep=True).chosen_id == before
    with pytest.raises(CheckpointError):
        values(store, manifest)


def test_a_slice_is_read_of_a_shared_file_only_and_within_it():
    store = in_memory()
    _, manifest, path = two(store)
    data = store.blobs.get(path)[0]
    rows = slices(manifest)[0].file_rows or 0
    with pytest.raises(InvalidCheckpointError, match="not in order"):  # those of two key groups
        decode_sidecar(data, where="a test", rows=(0, rows))
    for wrong in ((0, rows + 1), (rows, 1), (-1, 1), (2, -1)):
        with pytest.raises(InvalidCheckpointError, match="rows"):
            decode_sidecar(data, where="a test", rows=wrong)
    alone = in_memory()
    _, other, _ = two(alone, shared_threshold=4000)
    base = next(e for _, _, e in other.sidecars() if not e.is_shared)
    with pytest.raises(InvalidCheckpointError, match="to be shared"):
        decode_sidecar(alone.read_sidecar(base), where="a test", rows=(0, 1))
    for entry in slices(manifest):
        key = decode_sidecar(data, where="a test", rows=entry.row_range)[1]["_key"][0].as_py()
        one = decode_sidecar(data, where="a test", rows=entry.row_range, key=key)[1]
        assert one["_key"].to_pylist() == [key]


def test_a_commit_that_dies_after_the_shared_file_leaves_one_that_gc_finds():
    store, rng = in_memory(), random.Random(1)
    job = DrivenCheckpoints(store, OPERATOR, GROUPS)
    state = first(job, rng)
    for key in "1", "2", "3":
        state[key] = b"new"
        job.add(record(key, b"new")[0], 2 * SECOND, record(key, b"new")[1])
    job.write(2 * SECOND)
    kept = list(job._news.items)
    progress = job._progress.value
    with (
        mock.patch.object(type(store), "save", side_effect=OSError("gone")),
        pytest.raises(OSError),
    ):
        job.commit(2 * SECOND)
    job._news.items, job._progress.value = kept, progress  # the bundle is tried again
    (result,) = job.commit(2 * SECOND)
    manifest = store.load_by_id(result.id)
    assert manifest is not None
    assert values(store, manifest) == state
    of_bases = {entry.path for entry in slices(manifest, "full")}
    shared = {b.key for b in store.blobs.list("state/") if "/shared/" in b.key} - of_bases
    assert len(shared) == 2
    store.claim_generation("a-later-run")
    report = store.gc(grace_s=0)
    assert {*shared} - {slices(manifest)[0].path} == {garbage.key for garbage in report.deleted}
    assert values(store, manifest) == state


def test_a_shared_file_goes_with_the_last_checkpoint_that_lists_it():
    rng, store = random.Random(5), in_memory()
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, keep=1)
    state = first(job, rng)
    for epoch in range(40):
        touch(job, rng, state, epoch, keys=20)
        there = {blob.key for blob in store.blobs.list("state/")}
        kept = [store.load_by_id(id) for id in store.list_ids()]
        assert len(kept) == 2, "the newest, and the one that it would be published on again"
        listed = {path for manifest in kept for path in manifest.sidecar_paths()}
        assert there == listed, "what a checkpoint lists, and no more"


def test_a_copy_has_it_once_and_restores(tmp_path: Path):
    store = in_memory()
    state, manifest, _ = two(store)
    there = open_store(tmp_path)
    copy(store, there)
    assert there.validate_checkpoint(manifest.id, deep=True).valid
    assert len(there.blobs.list("state/")) == 2
    copied = there.load_by_id(manifest.id)
    assert copied is not None
    assert values(there, copied) == state
    artifacts = store.load_checkpoint_artifacts(manifest.id)
    assert artifacts is not None
    assert artifacts.validate(manifest.id).valid
    assert (
        sum(len(c.data) for c in artifacts.state if c.first_row is None) < manifest.total_size_bytes
    )


def test_a_key_is_forgotten_in_shared_files_and_all_others_stay():
    """Also where its row is of no slice any more, but still in the file."""
    rng, store = random.Random(9), in_memory()
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, keep=4)
    state = first(job, rng)
    state["7"] = b"a secret of seven"
    for epoch in range(6):
        state["7"] = state["7"] + b"."
        records = [record("7", state["7"])]
        for key in map(str, rng.sample(range(20, 400), 40)):
            state[key] = rng.randbytes(200)
            records.append(record(key, state[key]))
        job.checkpoint((epoch + 2) * SECOND, records)
    before = {m.boundary: values(store, m) for i in store.list_ids() if (m := store.load_by_id(i))}
    report = forget(store, "totals", "7")
    assert report.rows > 0
    for id in store.list_ids():
        manifest = store.load_by_id(id)
        assert manifest is not None
        assert store.validate_checkpoint(id, deep=True).valid
        expected = {k: v for k, v in before[manifest.boundary].items() if k != "7"}
        assert values(store, manifest) == expected
    for blob in store.blobs.list("state/"):
        rows = decode_sidecar(store.blobs.get(blob.key)[0], where=blob.key)[1]
        assert b"7" not in rows["_key"].to_pylist()


# -------------------------------------------------------------------------- the manifest itself


def stored() -> dict:
    _, manifest, _ = two(in_memory())
    return json.loads(manifest.to_json())


def test_the_manifest_tells_of_a_shared_file_once_and_comes_back():
    _, manifest, path = two(in_memory())
    text = manifest.to_json()
    assert text.count(path.encode()) == 1
    assert manifest.version == 3
    again = parse_record(CheckpointManifest, text, where="a test", limit=1 << 24)
    assert again.to_json() == text
    assert [*again.sidecars()] == [*manifest.with_phase("prepared").sidecars()]
    assert manifest.total_size_bytes == sum(e.size_bytes for _, _, e in manifest.pieces())


def no_such_file(m: dict, chain: list) -> None:
    chain[-1][0] = 7


def negative_file(m: dict, chain: list) -> None:
    chain[-1][0] = -1


def overlapping(m: dict, chain: list) -> None:
    chain[-1][1] += 1


def beyond_the_file(m: dict, chain: list) -> None:
    chain[-1][1] = 10**6


def too_short(m: dict, chain: list) -> None:
    chain[-1] = chain[-1][:3]


def no_slice(m: dict, chain: list) -> None:
    chain[-1] = [0, "1", None, {}]


def of_nobody(m: dict, chain: list) -> None:
    m["operators"]["totals"]["shared"].append(dict(m["operators"]["totals"]["shared"][0]))


def no_files(m: dict, chain: list) -> None:
    m["operators"]["totals"]["shared"] = "all"


def also_alone(m: dict, chain: list) -> None:
    file = m["operators"]["totals"]["shared"][chain[0][0]]
    chain[0] = file | {"inline": None}


def of_version_2(m: dict, chain: list) -> None:
    m["version"] = 2


def climbing(m: dict, chain: list) -> None:
    m["operators"]["totals"]["shared"][0]["path"] = "state/../../etc/passwd"


def no_such_origin(m: dict, chain: list) -> None:
    chain[-1][4] = "x" * 8


def more_bytes_than_the_file(m: dict, chain: list) -> None:
    chain[-1][3] = 10**6


def no_list(m: dict, chain: list) -> None:
    m["operators"]["totals"]["partitions"] = 5


def other_fields(m: dict, chain: list) -> None:
    m["operators"]["totals"]["shared"][0]["first_row"] = 0


def twice(m: dict, chain: list) -> None:
    m["operators"]["totals"]["shared"] *= 2
    chain[-1][0] = 1


def millions(m: dict, chain: list) -> None:
    chain += [chain[-1]] * 400_000


@pytest.mark.parametrize(
    "spoil",
    [
        no_such_file,
        negative_file,
        overlapping,
        beyond_the_file,
        too_short,
        no_slice,
        of_nobody,
        no_files,
        also_alone,
        of_version_2,
        climbing,
        no_such_origin,
        more_bytes_than_the_file,
        no_list,
        other_fields,
        twice,
        millions,
    ],
)
def test_what_cannot_be_is_refused(spoil):
    manifest = stored()
    partitions = manifest["operators"]["totals"]["partitions"]
    chain = next(p["sidecars"] for p in partitions if isinstance(p["sidecars"][-1], list))
    spoil(manifest, chain)
    data = json.dumps(manifest).encode()
    with pytest.raises((InvalidCheckpointError, StoreUrlError)):
        parse_record(CheckpointManifest, data, where="a test", limit=1 << 24)
