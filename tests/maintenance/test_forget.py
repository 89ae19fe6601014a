"""A key that is forgotten: nothing of it is left, and everything else is as it was."""

from __future__ import annotations

import base64
import io
import json
import multiprocessing
import signal
import time
import uuid
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from beam_ckpt import errors, inspect, open_store
from beam_ckpt.maintenance import forget
from beam_ckpt.manifest import RunIdentity, unpacked
from beam_ckpt.retention import KeepLast
from beam_ckpt.sidecar import encode_sidecar
from beam_ckpt.testing.faults import Fault, FaultPlan, fault_points, faulty_store
from beam_ckpt.transforms.restore import plan_restore
from beam_ckpt.transforms.snapshot import CarriedOutput, SavedTimer

S = 1_000_000
LATER = SavedTimer("flush", "", "event", 900 * S, None)
ADA = "ada-8c1f7e52"
OTHERS = [f"key {n}" for n in range(8)]


@pytest.fixture
def history(store, made):
    """Five checkpoints, a tag, an attempt, a dead run's file; the key comes with the second one.

    The last one has a tombstone of it.
    """
    said = {}
    first = made.save(store, [made.record(k, n) for n, k in enumerate(OTHERS)], boundary=100)
    output = CarriedOutput(None, 250 * S, b"", ADA.encode())
    here = made.record(ADA, 7, words=("x",), timers=(LATER,), carried=(output,))
    second = made.save(store, [here], boundary=200, base=first)
    third = made.save(
        store, [made.record(ADA, 8), made.record("key 1", 10)], boundary=300, base=second,
        inline_threshold=10_000,
    )  # fmt: skip
    fourth = made.save(
        store, [made.record("key 2", 11)], operator=replace(made.OPERATOR, uid="other"),
        boundary=400, base=third,
    )  # fmt: skip
    fifth = made.save(store, [made.record(ADA, deleted=True)], boundary=500, base=fourth)
    store.tag("before it went", fourth.id)
    store.tag("before it came", first.id)
    made.save(store, [made.record(ADA, 9)], boundary=600, base=fifth, durable_phase="prepared")
    run_id = "dead"
    run = RunIdentity(generation=store.claim_generation(run_id), run_id=run_id)
    table = made.OPERATOR.to_table([made.record(ADA, 1), made.record("key 3", 1)])
    header = made.OPERATOR.header(key_group=0, boundary=700 * S, kind="full")
    store.write_sidecar(
        operator="totals", key_group=0, boundary=700 * S, run_id=run.run_id,
        data=encode_sidecar(table, header), kind="full", rows=2,
    )  # fmt: skip
    said["before"] = state_by_boundary(store)
    return said


def state_by_boundary(store) -> dict[Any, Any]:
    """All that each finalized checkpoint holds, but for the forgotten key."""
    found = {}
    for id in store.list_ids():
        manifest = store.load_by_id(id)
        if manifest is None or manifest.durable_phase != "finalized":
            continue
        rows = {}
        for uid in manifest.operators:
            table = inspect.state(store, uid, at=id)
            for row in table.to_pylist():
                if row["key"] != ADA:
                    rows[uid, row["key"]] = row
        sources = {uid: e.offsets for uid, e in manifest.source_offsets.items()}
        found.setdefault(manifest.boundary, []).append(
            (rows, manifest.timestamp_ms, manifest.pipeline, manifest.drained, sources)
        )
    return found


def keys_in(sidecar: bytes) -> list[str]:
    keys: list[str] = pq.read_table(io.BytesIO(sidecar))["key"].to_pylist()
    return keys


def texts(store) -> str:
    """Everything in the store, with what is packed in it unpacked."""
    said = []
    for meta in store.blobs.list(""):
        data = unpacked(store.blobs.get(meta.key)[0], where=meta.key)
        said.append(meta.key + repr(data))
        pieces = [data] if meta.key.endswith(".parquet") else []
        if "/" in meta.key and meta.key.startswith("manifests/") and meta.key.endswith(".json"):
            manifest = json.loads(data)
            pieces += [
                base64.b64decode(entry["inline"])
                for operator in manifest["operators"].values()
                for partition in operator["partitions"]
                for entry in partition["sidecars"]
                if entry["inline"]
            ]
        for piece in pieces:
            file = pq.ParquetFile(io.BytesIO(piece))
            said.append(repr(file.read().to_pylist()))
            said.append(repr(file.metadata.to_dict()))
            said.append(repr(file.schema_arrow.metadata))
    return "\n".join(said)


def check(store, before) -> None:
    """The key is gone, the rest is there, in order; the pointer and the tags are right."""
    assert ADA not in texts(store)
    after = state_by_boundary(store)
    assert after == before
    assert all(len(of_cut) == 1 for of_cut in after.values())
    finalized = [m for id in store.list_ids() if (m := store.load_by_id(id))]
    assert [m.boundary for m in finalized] == sorted(before)
    assert [m.epoch for m in finalized] == sorted({m.epoch for m in finalized})
    identities = {m.checkpoint_id for m in finalized}
    assert all(m.parent_id in identities for m in finalized[1:])
    for manifest in finalized:
        assert manifest.durable_phase == "finalized"
        assert store.validate_checkpoint(manifest.id, deep=True).valid
    assert store.load_latest() == finalized[-1]
    tagged = {name: store.load_by_id(id).boundary for name, id in store.tags().items()}
    assert tagged == {"before it went": 400 * S, "before it came": 100 * S}


def test_nothing_of_the_key_is_left_and_the_rest_is_as_it_was(store, history):
    assert ADA in texts(store)
    report = forget(store, "totals", ADA)
    assert report.holding == (2, 3, 4, 5, 6)
    assert report.replaced == ((2, 7), (3, 8), (4, 9), (5, 10))
    assert report.deleted == (6,)
    assert report.tags == ("before it went",)
    assert (report.files, report.rows) == (3, 3)
    assert len(report.unlisted) == 1 and report.left == ()
    check(store, history["before"])
    assert store.list_ids() == [1, 7, 8, 9, 10]
    again = forget(store, "totals", ADA)
    assert not again.found
    assert store.list_ids() == [1, 7, 8, 9, 10]


def test_files_without_the_key_are_listed_again_and_not_written(store, history):
    old = {e.path: e for id in range(1, 6) for _, _, e in store.load_by_id(id).sidecars() if e.path}
    forget(store, "totals", ADA)
    new = {e.path: e for id in store.list_ids() for _, _, e in store.load_by_id(id).sidecars()}
    shared = old.keys() & new.keys()
    assert len(shared) >= len(OTHERS) / 2 and all(old[path] == new[path] for path in shared)
    assert len(old.keys() - new.keys()) == 2


def test_a_dry_run_says_the_same_and_changes_nothing(store, history):
    before = {m.key: store.blobs.get(m.key)[0] for m in store.blobs.list("")}
    said = forget(store, "totals", ADA, dry_run=True)
    assert before == {m.key: store.blobs.get(m.key)[0] for m in store.blobs.list("")}
    done = forget(store, "totals", ADA)
    assert said.replaced == tuple((old, None) for old, _ in done.replaced)
    for name in ("holding", "deleted", "tags", "rows", "files", "unlisted", "left"):
        assert getattr(said, name) == getattr(done, name), name


def test_a_restore_by_an_old_id_says_where_it_went(store, history):
    forget(store, "totals", ADA)
    with pytest.raises(errors.CheckpointNotFoundError, match="was replaced by 8"):
        plan_restore(store, 3, until=None, on_fallback="refuse")
    with pytest.raises(errors.CheckpointNotFoundError, match="was replaced by 8"):
        inspect.state(store, "totals", at=3)
    assert plan_restore(store, 8, until=None, on_fallback="refuse").manifest.id == 8
    forget(store, "totals", "key 1")
    successor = store.successor(3)
    assert successor == store.successor(8) and successor > 10


def test_a_run_that_still_goes_is_fenced(store, history, made):
    run = RunIdentity(generation=store.claim_generation("alive"), run_id="alive")
    forget(store, "totals", ADA)
    with pytest.raises(errors.FencedError):
        made.save(store, [made.record(ADA, 1)], base=store.load_latest(), run=run)


def test_what_a_run_publishes_meanwhile_is_replaced_too(store, made):
    """Between the first look and the claim."""
    base = made.save(store, [made.record(ADA, 1), made.record("b", 1)])
    claim = store.claim_generation
    raced = []

    def claim_later(run_id: str, **settings: Any) -> int:
        if not raced:
            raced.append("once")
            made.save(store, [made.record(ADA, 2)], base=base, boundary=200)
        return claim(run_id, **settings)

    store.claim_generation = claim_later
    report = forget(store, "totals", ADA)
    assert [old for old, _ in report.replaced] == [1, 2]
    assert ADA not in texts(store)
    assert store.load_latest().boundary == 200 * S


def test_a_younger_run_stops_it(store, history):
    finalize = store.finalize

    def finalize_later(id: int) -> Any:
        store.claim_generation("younger")
        return finalize(id)

    store.finalize = finalize_later
    with pytest.raises(errors.FencedError):
        forget(store, "totals", ADA)
    store.finalize = finalize
    assert state_by_boundary(store) == history["before"]
    forget(store, "totals", ADA)
    check(store, history["before"])


def test_a_run_goes_on_from_what_is_left(store, history, made):
    """A job's retention and its next checkpoint find nothing odd."""
    forget(store, "totals", ADA)
    base = store.load_latest()
    newest = made.save(store, [made.record("key 4", 44)], base=base, boundary=600)
    store.prune(KeepLast(1))
    assert store.load_latest() == newest
    assert {store.load_by_id(i).boundary for i in store.list_ids()} == {
        100 * S, 400 * S, 600 * S,
    }  # fmt: skip
    assert store.gc(grace_s=0).deleted == ()


def test_of_a_key_that_never_was_nothing_is_touched_and_nobody_fenced(store, history):
    generation = store.claim_generation("alive")
    report = forget(store, "totals", "nobody")
    assert not report.found
    store.check_generation(generation, "alive")
    with pytest.raises(errors.CheckpointNotFoundError, match="Did you mean 'totals'"):
        forget(store, "total", ADA)
    with pytest.raises(ValueError, match="no key"):
        forget(store, "totals", 7)


def test_only_one_operator_forgets_it(store, made):
    base = made.save(store, [made.record(ADA, 1)])
    made.save(store, [made.record(ADA, 2)], operator=replace(made.OPERATOR, uid="o"), base=base)
    forget(store, "totals", ADA)
    assert len(inspect.state(store, "totals")) == 0
    assert inspect.state(store, "o")["count"].to_pylist() == [2]
    assert store.load_latest().operators["totals"].partitions == ()
    forget(store, "o", ADA)
    assert ADA not in texts(store)


@pytest.mark.parametrize("what", ["manifest", "file"])
def test_damage_is_refused_before_anything_changes(store, history, what):
    """What cannot be read may hold it."""
    manifest = store.load_by_id(3)
    (path,) = [
        entry.path
        for _, _, entry in manifest.sidecars()
        if entry.path and ADA in keys_in(store.read_sidecar(entry))
    ]  # fmt: skip
    store.blobs.put(store._paths.manifest(3) if what == "manifest" else path, b"damaged")
    before = {m.key: store.blobs.get(m.key)[0] for m in store.blobs.list("")}
    with pytest.raises(errors.InvalidCheckpointError, match="Nothing was changed"):
        forget(store, "totals", ADA)
    assert before == {m.key: store.blobs.get(m.key)[0] for m in store.blobs.list("")}


def test_keys_of_a_coder_that_is_not_known_here_are_found_by_their_bytes(store, made):
    from apache_beam.coders import PickleCoder

    operator = replace(made.OPERATOR, key_coder=PickleCoder())
    records = [made.record(ADA, 1), made.record("b", 2)]
    made.save(store, records, operator=operator)
    assert not forget(store, "totals", b"c").found
    report = forget(store, "totals", ADA.encode())
    assert report.rows == 1
    assert ADA not in texts(store)
    assert inspect.state(store, "totals")["count"].to_pylist() == [2]


def test_a_file_of_a_run_that_may_yet_publish_it_is_named_and_left(store, made):
    """As a bootstrap's, which claims the store when all is written."""
    made.save(store, [made.record("b", 2)])
    table = made.OPERATOR.to_table([made.record(ADA, 1)])
    header = made.OPERATOR.header(key_group=0, boundary=None, kind="full")
    entry = store.write_sidecar(
        operator="totals", key_group=0, boundary=None, run_id="bootstrap-1",
        data=encode_sidecar(table, header), kind="full", rows=1,
    )  # fmt: skip
    report = forget(store, "totals", ADA)
    ((path, why),) = report.left
    assert path == entry.path and "run bootstrap-1 may still publish it" in why
    store.claim_generation("bootstrap-1")
    store.claim_generation("another")
    assert forget(store, "totals", ADA).unlisted == (entry.path,)
    assert ADA not in texts(store)


def test_a_writers_leftovers_on_disk_go_as_well(tmp_path, made, monkeypatch):
    store = open_store(tmp_path / "ckpt")
    made.save(store, [made.record(ADA, 1), made.record("b", 2)])
    from beam_ckpt.blobs._local import _TEMPORARY

    left = tmp_path / "ckpt" / "state" / f"{_TEMPORARY}1"
    left.write_bytes(ADA.encode())
    report = forget(store, "totals", ADA)
    assert [path for path, _ in report.left] == [f"state/{_TEMPORARY}1"]
    import os

    os.utime(left, (time.time() - 100,) * 2)
    assert forget(store, "totals", ADA).unlisted == (f"state/{_TEMPORARY}1",)
    assert not left.exists()


def clone(store) -> Any:
    other = open_store(f"memory://{uuid.uuid4().hex}")
    for meta in store.blobs.list(""):
        other.blobs.put_if_absent(meta.key, store.blobs.get(meta.key)[0])
    return other


def test_stopped_at_any_step_it_leaves_a_store_that_restores_and_is_finished_by_another_run(
    store, history
):
    """Before and after each change that it makes, twice in a row."""
    recorder = FaultPlan(record=True)
    forget(faulty_store(clone(store), recorder), "totals", ADA)
    points = list(fault_points(recorder.operations(), action="error"))
    stopped = 0
    for point in points:
        other = clone(store)
        struck = faulty_store(other, FaultPlan(point))
        try:
            forget(struck, "totals", ADA)
        except errors.CheckpointError:
            stopped += 1
        else:  # it lost a race for a name, as it should, so that there is no "after"
            assert point.when == "after"
        # Whatever is there is restored from the newest cut.
        newest = other.recover_latest_validated().chosen
        assert newest.boundary == 500 * S, point
        of_cut = state_by_boundary(other)
        assert of_cut.keys() <= history["before"].keys()
        for boundary, found in of_cut.items():
            assert all(one in history["before"][boundary] for one in found), point
        # The next one is killed as well, at its own third change, and then one is not.
        with pytest.raises(errors.CheckpointError):
            third = FaultPlan(Fault("change", nth=3, action="error"))
            forget(faulty_store(other, third), "totals", ADA)
            raise errors.CheckpointError("it had less to do than that")
        forget(other, "totals", ADA)
        check(other, history["before"])
    assert stopped > 40


def _forget(root: str, nth: int) -> None:
    plan = FaultPlan(Fault("change", nth=nth, action="kill"))
    forget(faulty_store(open_store(root), plan), "totals", ADA)


def test_killed_for_good_on_disk_it_is_finished_by_another_run(tmp_path, store, history):
    """SIGKILL, in a process of its own: nothing is tidied up on the way out."""
    context = multiprocessing.get_context("fork")
    root = tmp_path / "ckpt"
    on_disk = open_store(root)
    for meta in store.blobs.list(""):
        on_disk.blobs.put_if_absent(meta.key, store.blobs.get(meta.key)[0])
    killed = 0
    for nth in (2, 4, 7, 9, 11, 14):
        child = context.Process(target=_forget, args=(str(root), nth))
        child.start()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
        killed += child.exitcode != 0
        assert on_disk.recover_latest_validated().chosen.boundary == 500 * S
    assert killed >= 4
    report = forget(on_disk, "totals", ADA)
    assert all("being written" in why for _, why in report.left)  # a file that was cut short
    check(on_disk, history["before"])


def test_a_pointer_that_was_left_behind_is_moved_before_what_it_names_goes(store, made):
    """Of one checkpoint alone: stopped between its marker and the pointer."""
    made.save(store, [made.record(ADA, 1), made.record("b", 2)])
    struck = faulty_store(store, FaultPlan(Fault("replace", "latest.json", action="error")))
    with pytest.raises(errors.CheckpointError):
        forget(struck, "totals", ADA)
    assert store.load_latest().id == 1
    report = forget(store, "totals", ADA)
    assert (report.replaced, report.deleted, report.left) == ((), (1,), ())
    assert store.load_latest().id == 2 and store.list_ids() == [2]
    assert ADA not in texts(store)


def test_patches_of_deltas_stay_as_they_are(store, made):
    """Rows that hold only what changed are moved, not merged."""
    base = made.save(store, [made.record(ADA, 1), made.record("b", 1, words=("x",))], key_groups=1)
    table = made.OPERATOR.to_table([made.record(ADA, 2), made.record("b", None, words=("y",))])
    patch = pa.array([None, bytes([1, 2])], pa.binary())
    table = table.append_column("_patch", patch)
    header = made.OPERATOR.header(key_group=0, boundary=200 * S, kind="delta")
    header = replace(header, format_version=2)
    entry = store.write_sidecar(
        operator="totals", key_group=0, boundary=200 * S, run_id="r",
        data=encode_sidecar(table, header), kind="delta", rows=2,
    ).model_copy(update={"epoch": 2})  # fmt: skip
    mine = base.operators["totals"].partitions[0]
    chain = mine.model_copy(update={"sidecars": (*mine.sidecars, entry)})
    made.save(store, [], key_groups=1, boundary=200, base=base.model_copy(update={
        "operators": {"totals": base.operators["totals"].model_copy(update={
            "partitions": (chain,), "total_bytes": 0,
        })},
    }))  # fmt: skip
    before = inspect.state(store, "totals", key="b").to_pylist()
    assert (before[0]["count"], before[0]["word"]) == (1, ["x", "y"])
    report = forget(store, "totals", ADA)
    assert report.rows == 2
    assert inspect.state(store, "totals").to_pylist() == before
    (partition,) = store.load_latest().operators["totals"].partitions
    assert [s.kind for s in partition.sidecars] == ["full", "delta"]
    data = store.read_sidecar(partition.sidecars[1])
    assert pq.read_table(io.BytesIO(data))["_patch"].to_pylist() == [bytes([1, 2])]
