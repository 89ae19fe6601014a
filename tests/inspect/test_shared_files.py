"""What is told of files that key groups share: of several operators, and in other key groups."""

from __future__ import annotations

import random
import uuid
from collections import Counter

import pytest
from apache_beam.coders import BytesCoder, StrUtf8Coder
from apache_beam.transforms.window import GlobalWindows

from beam_ckpt import CheckpointStore, inspect, open_store
from beam_ckpt.keygroups import key_group
from beam_ckpt.manifest import CheckpointManifest
from beam_ckpt.reporting._facts import gather
from beam_ckpt.retention import KeepLast
from beam_ckpt.testing.driven import DrivenCheckpoints, restored
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.snapshot import SnapshotRecord

SECOND = 1_000_000
UIDS = ("counts", "totals")
OPERATORS = tuple(
    OperatorState(
        uid,
        StrUtf8Coder(),
        GlobalWindows().get_window_coder(),
        (CellState("value", "read_modify_write", BytesCoder()),),
        False,
    )
    for uid in UIDS
)
State = dict[tuple[str, str], bytes]


class Job:
    """Two operators, run after run; each run in another number of key groups."""

    def __init__(self) -> None:
        self.store: CheckpointStore = open_store(f"memory://{uuid.uuid4().hex}")
        self.random = random.Random(6)
        self.state: State = {}
        self.boundary = 0
        #: Of each checkpoint: the state, and the sizes of the files that it added.
        self.states: dict[int, State] = {}
        self.added: dict[int, dict[str, int]] = {}

    def run(self, key_groups: int, epochs: int, keys: int = 60) -> None:
        newest = self.store.load_latest()
        job = DrivenCheckpoints(
            self.store,
            OPERATORS,
            key_groups,
            base_id=None if newest is None else newest.id,
            keep=1000,
        )
        for epoch in range(epochs):
            self.boundary += SECOND
            before = self.files()
            # Another number of key groups: everything is saved anew at the first boundary.
            some = self.random.choice([1, 5, 25]) if epoch else keys
            for uid in UIDS:
                for key in map(str, self.random.sample(range(keys), some)):
                    if epoch and self.random.random() < 0.2:
                        value = None
                        self.state.pop((uid, key), None)
                    else:
                        value = self.state[uid, key] = self.random.randbytes(150)
                    name = key.encode()
                    made = SnapshotRecord(name, b"", value is None, 0, (value,), (), ())
                    group = key_group(name, key_groups)
                    job.add(group, self.boundary, made.to_bytes(), uid)
            job.write(self.boundary)
            (result,) = job.commit(self.boundary)
            self.states[result.id] = dict(self.state)
            now = self.files()
            self.added[result.id] = {path: now[path] for path in now.keys() - before.keys()}
            assert result.size_bytes == sum(self.added[result.id].values())

    def files(self) -> dict[str, int]:
        return {blob.key: blob.size for blob in self.store.blobs.list("state/")}

    def manifests(self) -> list[CheckpointManifest]:
        return [manifest for id in self.store.list_ids() if (manifest := self.store.load_by_id(id))]


@pytest.fixture(scope="module")
def job() -> Job:
    job = Job()
    for key_groups in (7, 3, 7, 16):
        job.run(key_groups, 12)
    return job


def test_each_checkpoint_restores_its_state_whatever_the_number_of_key_groups(job: Job) -> None:
    shared: Counter[tuple[int | None, str]] = Counter()
    for manifest in job.manifests():
        found = {}
        for operator in OPERATORS:
            for key, data in restored(job.store, operator, manifest):
                (value,) = SnapshotRecord.from_bytes(data).cells
                assert (operator.uid, key) not in found
                found[operator.uid, key] = value
        assert found == job.states[manifest.id]
        for uid, _, entry in manifest.sidecars():
            shared[manifest.key_group_count, uid] += entry.is_shared
    assert all(shared[groups, uid] > 20 for groups in (3, 7, 16) for uid in UIDS)


def test_nothing_of_the_old_key_groups_is_listed_in_the_new_ones(job: Job) -> None:
    runs: dict[int, set[str]] = {}
    for manifest in job.manifests():
        assert manifest.run is not None
        runs.setdefault(manifest.run.generation, set()).update(manifest.sidecar_paths())
    assert len(runs) == 4
    assert sum(map(len, runs.values())) == len(set().union(*runs.values()))


def test_a_shared_file_is_counted_once(job: Job) -> None:
    """In all that tells of sizes, and so that what was written is the sum of what was added."""
    sizes = job.files()
    lineage = {row["id"]: row for row in inspect.lineage(job.store).to_pylist()}
    listed = {row["id"]: row for row in inspect.checkpoints(job.store).to_pylist()}
    told = {checkpoint.id: checkpoint for checkpoint in gather(job.store, KeepLast(3)).checkpoints}
    for manifest in job.manifests():
        files = sum(sizes[path] for path in manifest.sidecar_paths())
        added = sum(job.added[manifest.id].values())
        assert listed[manifest.id]["bytes"] == manifest.total_size_bytes == files
        assert listed[manifest.id]["sidecars"] == len(manifest.sidecar_paths())
        row = lineage[manifest.id]
        assert (row["new_files"], row["new_bytes"]) == (len(job.added[manifest.id]), added)
        assert row["shared_bytes"] == files - added
        checkpoint = told[manifest.id]
        assert (checkpoint.new_files, checkpoint.new_bytes) == (row["new_files"], added)
        assert checkpoint.shared_bytes == files - added
        rows = inspect.operators(job.store, at=manifest.id).to_pylist()
        assert [row["operator"] for row in rows] == [*UIDS]
        assert sum(row["bytes"] for row in rows) == files
        assert sum(row["sidecars"] for row in rows) == len(manifest.sidecar_paths())
    table = inspect.files(job.store).to_pylist()
    assert {row["path"]: row["bytes"] for row in table} == sizes
    for row in table:
        listing = [m.id for m in job.manifests() if row["path"] in m.sidecar_paths()]
        assert row["checkpoints"] == listing
