"""Chains of sidecars stay short and right, however long a job lives: no runner is needed."""

from __future__ import annotations

import importlib.util
import random
import sys
import uuid
from pathlib import Path

import pytest
from apache_beam.coders import BytesCoder, StrUtf8Coder
from apache_beam.transforms.window import GlobalWindows

from beam_ckpt import CheckpointStore, open_store
from beam_ckpt.manifest import SidecarEntry
from beam_ckpt.testing.driven import DrivenCheckpoints, restored
from beam_ckpt.transforms import committer
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.snapshot import SnapshotRecord

GROUPS = 3
SECOND = 1_000_000
OPERATOR = OperatorState(
    "totals",
    StrUtf8Coder(),
    GlobalWindows().get_window_coder(),
    (CellState("value", "read_modify_write", BytesCoder()),),
    False,
)


def in_memory() -> CheckpointStore:
    return open_store(f"memory://{uuid.uuid4().hex}")


def record(key: str, value: bytes | None) -> tuple[int, bytes]:
    """The key group and the record of a key; a value of None is a tombstone."""
    made = SnapshotRecord(key.encode(), b"", value is None, 0, (value,), (), ())
    return int(key) % GROUPS, made.to_bytes()


def values(store: CheckpointStore, checkpoint_id: int) -> dict[str, bytes]:
    manifest = store.load_by_id(checkpoint_id)
    assert manifest is not None
    found = {}
    for key, data in restored(store, OPERATOR, manifest):
        assert key not in found, "a key comes once"
        (cell,) = SnapshotRecord.from_bytes(data).cells
        assert isinstance(cell, bytes)
        found[key] = cell
    return found


@pytest.mark.parametrize("max_files", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_every_checkpoint_restores_the_state_of_its_cut(max_files: int, seed: int) -> None:
    """Some epochs touch no key of a group, some keys go and come back, and runs follow runs."""
    rng = random.Random(seed)
    store = in_memory()
    state: dict[str, bytes] = {}
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, max_files=max_files)
    latest, longest = 0, 0
    for epoch in range(60):
        if rng.random() < 0.1:
            job = DrivenCheckpoints(
                store, OPERATOR, GROUPS, base_id=latest or None, max_files=max_files
            )
        # Now and then the writer is a boundary ahead of the committer.
        boundaries = [(2 * epoch + i) * SECOND for i in range(rng.choice([1, 1, 2]))]
        for boundary in boundaries:
            keys = rng.sample(range(200), rng.choice([1, 3, 3, 150]))
            for key in map(str, keys):
                value = None if rng.random() < 0.3 else rng.randbytes(300)
                if value is not None:
                    state[key] = value
                elif state.pop(key, None) is None:
                    continue
                group, data = record(key, value)
                job.add(group, boundary, data)
            job.write(boundary)
        for result in job.commit(boundaries[-1]):
            latest = result.id
        assert values(store, latest) == state
        manifest = store.load_by_id(latest)
        assert manifest is not None
        chains = [p.sidecars for p in manifest.operators["totals"].partitions]
        longest = max(longest, *(len(chain) for chain in chains))
        retained = {path for i in store.list_ids() for path in store.load_by_id(i).sidecar_paths()}
        listed = {blob.key for blob in store.blobs.list("state/")}
        assert listed >= retained, "nothing goes that a checkpoint lists"
    assert longest <= max_files
    assert longest == 1 if max_files == 1 else longest > 1


@pytest.mark.parametrize("committed", [True, False], ids=["published", "not yet published"])
@pytest.mark.parametrize("max_files", [1, 8])
def test_what_comes_late_is_neither_lost_nor_hides_what_is_newer(
    committed: bool, max_files: int
) -> None:
    """A key whose first element is late is saved at a boundary that the writer has passed."""
    store = in_memory()
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, max_files=max_files)
    expected = {str(key): random.Random(key).randbytes(300) for key in range(60)}
    job.checkpoint(10 * SECOND, [record(key, value) for key, value in expected.items()])
    job.checkpoint(20 * SECOND, [record("3", b"at 20")])
    for boundary in (30, 40):
        job.add(0, boundary * SECOND, record("3", b"at %d" % boundary)[1])
        job.write(boundary * SECOND)
        if committed:
            job.commit(boundary * SECOND)
    # The runner has let the watermark of the writer pass 40, and gives it a record of 30.
    job.add(0, 30 * SECOND, record("6", b"late")[1])
    job.write(40 * SECOND)
    (*_, result) = job.commit(40 * SECOND)
    expected |= {"3": b"at 40", "6": b"late"}
    assert values(store, result.id) == expected
    (result,) = job.checkpoint(50 * SECOND, [record("9", b"after")])
    assert values(store, result.id) == expected | {"9": b"after"}


def measured(epochs: int) -> dict[str, float]:
    """The figures of benchmarks/compaction.py."""
    path = Path(__file__).parents[2] / "benchmarks" / "compaction.py"
    spec = importlib.util.spec_from_file_location("compaction", path)
    assert spec is not None and spec.loader is not None
    compaction = importlib.util.module_from_spec(spec)
    sys.modules["compaction"] = compaction  # where dataclasses look their module up
    spec.loader.exec_module(compaction)
    latest: dict[int, bytes] = {}
    _, *later = compaction.run(in_memory(), 10_000, 1, 0.01, epochs, latest)
    full = compaction.size_of_full(latest, 1)
    return {
        "retained": max(figures.retained for figures in later) / full,
        "files": max(figures.files for figures in later),
        "manifest": max(figures.manifest for figures in later),
        "amplification": sum(figures.written for figures in later)
        / min(figures.written for figures in later)
        / epochs,
    }


def check_measured(found: dict[str, float]) -> None:
    print(found)
    assert found["retained"] <= 2.5
    assert 3 <= found["files"] <= 8
    assert found["manifest"] <= 600 * (8 + 3)
    assert found["amplification"] <= 4


def test_what_a_job_keeps_and_writes_again_is_bounded() -> None:
    """The first epochs, in which the base is written anew a few times."""
    check_measured(measured(120))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_a_job_keeps_and_writes_again_is_bounded_over_1000_epochs() -> None:
    check_measured(measured(1000))


# --- deltas in the manifest -----------------------------------------------------------------------


def entries_of(store: CheckpointStore, checkpoint_id: int) -> list[SidecarEntry]:
    manifest = store.load_by_id(checkpoint_id)
    assert manifest is not None
    return [entry for _, _, entry in manifest.sidecars()]


def test_small_deltas_are_in_the_manifest_and_merged_from_there() -> None:
    store = in_memory()
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, inline_threshold=8000, max_files=3)
    state = {str(key): random.Random(key).randbytes(2000) for key in range(60)}
    job.checkpoint(SECOND, [record(key, value) for key, value in state.items()])
    found = set()
    for epoch in range(2, 30):
        key = str(epoch % 7)
        state[key] = b"%d" % epoch * 10
        (result,) = job.checkpoint(epoch * SECOND, [record(key, state[key])])
        assert values(store, result.id) == state
        for entry in entries_of(store, result.id):
            found.add((entry.kind, entry.path is None))
            assert (entry.path is None) == (entry.kind == "delta")
    assert found == {("full", False), ("delta", True)}
    assert len(store.blobs.list("state/")) == GROUPS
    # Another run goes on from there.
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, base_id=result.id)
    (result,) = job.checkpoint(99 * SECOND, [record("1", None)])
    del state["1"]
    assert values(store, result.id) == state


def test_what_is_too_much_for_the_manifest_is_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "MAX_INLINE", 9000)
    store = in_memory()
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, inline_threshold=8000)
    state = {str(key): random.Random(key).randbytes(9000) for key in range(60)}
    job.checkpoint(SECOND, [record(key, value) for key, value in state.items()])
    counts = set()
    for epoch in range(2, 12):
        # One of these is small, and two are not.
        changed = {"0": b"small", "1": random.randbytes(3500), "2": random.randbytes(3000)}
        state |= changed
        (result,) = job.checkpoint(
            epoch * SECOND, [record(key, value) for key, value in changed.items()]
        )
        assert values(store, result.id) == state
        inline = [e for e in entries_of(store, result.id) if e.path is None]
        assert sum(entry.size_bytes for entry in inline) <= 9000
        deltas = sum(entry.kind == "delta" for entry in entries_of(store, result.id))
        counts.add((bool(inline), deltas > len(inline)))
    assert (True, True) in counts


def test_a_commit_that_is_done_again_finds_its_manifest_though_it_wrote_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(committer, "MAX_INLINE", 1)
    store = in_memory()
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, inline_threshold=8000)
    job.checkpoint(SECOND, [record(str(key), b"x" * 3000) for key in range(60)])
    job.add(*(0, 2 * SECOND, record("3", b"new")[1]))
    job.write(2 * SECOND)
    news, progress = list(job._news.items), job._progress.value
    (first,) = job.commit(2 * SECOND)
    # The bundle failed after it had published.
    job._news.items, job._progress.value = news, progress
    (second,) = job.commit(2 * SECOND)
    assert second.id == first.id
    assert store.list_ids()[-1] == first.id
    assert all(entry.path is not None for entry in entries_of(store, first.id))


@pytest.mark.parametrize("epochs", [1, 6])
@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("shared_threshold", [0, 16_384])
def test_a_bundle_that_failed_after_it_pruned_is_done_again(
    keep: int, epochs: int, shared_threshold: int
) -> None:
    """What it stood on was pruned: the job was stuck, or listed files that were gone."""
    store = in_memory()
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, keep=keep, shared_threshold=shared_threshold)
    state = {str(key): random.Random(key).randbytes(300) for key in range(60)}
    job.checkpoint(SECOND, [record(key, value) for key, value in state.items()])
    state["0"] = b"x"
    job.checkpoint(2 * SECOND, [record("0", b"x")])
    boundaries = [(3 + epoch) * SECOND for epoch in range(epochs)]
    for boundary in boundaries:
        for key in random.Random(boundary).sample(range(60), 10):
            state[str(key)] = b"%d" % boundary * 30
            group, data = record(str(key), state[str(key)])
            job.add(group, boundary, data)
        job.write(boundary)
    news, progress = list(job._news.items), job._progress.value
    first = job.commit(boundaries[-1])
    job._news.items, job._progress.value = news, progress
    again = job.commit(boundaries[-1])
    assert [result.id for result in again] == [result.id for result in first]
    assert all(store.validate_checkpoint(id).valid for id in store.list_ids())
    assert values(store, again[-1].id) == state
    # What the retry needed goes with the next checkpoint.
    job.checkpoint(boundaries[-1] + SECOND, [record("1", b"y")])
    assert len(store.list_ids()) == max(keep, 2)
