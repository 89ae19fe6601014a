"""A damaged store is never a silent fresh start: it is named, and the run falls back or stops."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from beam_ckpt import errors, open_store
from beam_ckpt.testing.cuts import run_checkpointed, saved_state
from beam_ckpt.testing.event_loop import canonical, run_event_loop
from beam_ckpt.testing.faults import Fault, FaultPlan, faulty_store
from beam_ckpt.testing.subjects import DelayChainFn
from beam_ckpt.transforms import writer

FN = DelayChainFn()
DATA = tuple((s * 5_000_000, "abc"[s % 3], s % 5) for s in range(60))
CUTS = (70_000_000, 140_000_000, 210_000_000)


def run(store, **settings):
    return run_checkpointed(
        FN, DATA, runner="FnApiRunner", store=store, time_sorted=True, key_groups=2, **settings
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A store with a checkpoint at each cut."""
    root = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        # Files this small would be merged into the next one, and the last stand on no older one.
        patch.setattr(writer, "files_to_keep", lambda chain, *_: len(chain))
        for cut in CUTS:
            run(open_store(root), until=cut / 1_000_000)
    return root


@pytest.fixture
def tree(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "ckpt"))


def manifest(tree: Path, checkpoint_id: int) -> Path:
    return tree / "manifests" / f"{checkpoint_id:012d}.json"


def packed_manifest(tree: Path, checkpoint_id: int) -> Path:
    """The manifest, as gzip as if it were a large one, and sealed like that."""
    path = manifest(tree, checkpoint_id)
    path.write_bytes(gzip.compress(path.read_bytes()))
    seal_anew(tree, path)
    assert open_store(tree).recover_latest_validated().chosen_id == checkpoint_id
    return path


def of_a_newer_format(tree: Path, checkpoint_id: int) -> Path:
    path = manifest(tree, checkpoint_id)
    data, count = re.subn(rb'"version":[23]', b'"version":9', path.read_bytes())
    assert count == 1
    path.write_bytes(data)
    return path


def seal_anew(tree: Path, path: Path) -> None:
    """What names the bytes of the newest manifest names those that it has now."""
    for sealing in (path.with_suffix(".final"), tree / "latest.json"):
        sealed = json.loads(sealing.read_bytes())
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        sealing.write_text(json.dumps(sealed | {"manifest_sha256": digest}))


def sidecar(tree: Path, cut: int) -> Path:
    return min((tree / "state").glob(f"*/*/{cut}-*.parquet"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap(path: Path) -> None:
    other = next(p for p in sorted(path.parent.glob(f"*{path.suffix}")) if p != path)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def lose(path: Path) -> None:
    path.unlink()


DAMAGE = {"truncated": truncate, "flipped": flip, "swapped": swap, "missing": lose}
OBJECTS = {
    "manifest": lambda tree: manifest(tree, 3),
    "packed manifest": lambda tree: packed_manifest(tree, 3),
    "sidecar": lambda tree: sidecar(tree, CUTS[2]),
    "older sidecar": lambda tree: sidecar(tree, CUTS[1]),
    "marker": lambda tree: manifest(tree, 3).with_suffix(".final"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", OBJECTS)
def test_a_damaged_object_is_named_and_an_older_checkpoint_restored(
    tree, caplog, name: str, damage: str
):
    path: Path = OBJECTS[name](tree)
    DAMAGE[damage](path)
    store = open_store(tree)
    result = store.validate_checkpoint(3)
    if (name, damage) != ("marker", "missing"):  # that is what an unfinished attempt looks like
        assert not result.valid
        assert any(path.name in i or "manifest" in i or ".final" in i for i in result.issues)
    report = store.recover_latest_validated()
    assert report.chosen is not None and report.chosen.id < 3
    assert [s.id for s in report.skipped if s.phase == "invalid"]

    with caplog.at_level(logging.WARNING, "beam_ckpt"):
        done = run(open_store(tree))
    assert "is damaged" in caplog.text
    assert "Restoring the older one" in caplog.text
    assert done.metrics["checkpoints_passed_over_at_restore"] >= 1
    reference = run_event_loop(FN, DATA)
    before = run_event_loop(FN, DATA, until=report.chosen.boundary)
    assert canonical(before.outputs + done.outputs) == canonical(reference.outputs)
    assert saved_state(open_store(tree), FN) == dict(reference.state)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param(name, damage, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, name in enumerate(OBJECTS)
        for j, damage in enumerate(DAMAGE)
    ],
)
def test_a_run_with_an_until_stops_instead_and_names_both_boundaries(tree, name, damage):
    DAMAGE[damage](OBJECTS[name](tree))
    chosen = open_store(tree).recover_latest_validated().chosen
    with pytest.raises(errors.FallbackRefusedError) as refused:
        run(open_store(tree), until=280)
    assert refused.value.newest_boundary == CUTS[2]
    assert refused.value.chosen_boundary == chosen.boundary
    assert "Timestamp(210)" in str(refused.value)
    assert f"Timestamp({chosen.boundary // 1_000_000})" in str(refused.value)
    assert "on_fallback='accept'" in str(refused.value)
    assert open_store(tree).list_ids()[-1] <= 3

    done = run(open_store(tree), until=280, on_fallback="accept")
    expected = run_event_loop(FN, DATA, until=280_000_000)
    before = run_event_loop(FN, DATA, until=chosen.boundary)
    assert canonical(before.outputs + done.outputs) == canonical(expected.outputs)
    assert saved_state(open_store(tree), FN) == dict(expected.state)


POINTER: dict[str, Callable[[Path], object]] = {
    "truncated": truncate,
    "flipped": flip,
    "swapped": lambda path: shutil.copy(path.parent / "namespace.json", path),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lose,
}


@pytest.mark.parametrize("damage", POINTER)
def test_a_damaged_pointer_is_not_believed_and_is_mended_by_the_next_run(tree, caplog, damage):
    POINTER[damage](tree / "latest.json")
    store = open_store(tree)
    if damage == "missing":
        assert store.load_latest() is None
    else:
        with pytest.raises(errors.InvalidCheckpointError, match=r"latest\.json"):
            store.load_latest()
    with caplog.at_level(logging.WARNING, "beam_ckpt"):
        done = run(open_store(tree), until=280)
    if damage != "missing":
        assert "the owner of the store, sets it anew" in caplog.text
        assert done.metrics["pointers_repaired"] == 1
    assert open_store(tree).load_latest().id == 4
    expected = run_event_loop(FN, DATA, until=280_000_000)
    assert saved_state(open_store(tree), FN) == dict(expected.state)


def test_a_checkpoint_whose_marker_is_lost_is_not_taken_for_an_attempt(tree):
    manifest(tree, 3).with_suffix(".final").unlink()
    with pytest.raises(errors.FallbackRefusedError) as refused:
        run(open_store(tree), until=280)
    assert refused.value.newest_boundary == CUTS[2]


def test_when_all_checkpoints_are_damaged_the_run_stops_with_the_report(tree):
    for checkpoint_id in (1, 2, 3):
        flip(manifest(tree, checkpoint_id))
    with pytest.raises(errors.NoValidCheckpointError, match="none is valid") as refused:
        run(open_store(tree))
    assert isinstance(refused.value, LookupError)
    assert [s.id for s in refused.value.report.skipped] == [3, 2, 1]
    assert "restore='fresh'" in str(refused.value)
    # The author's word starts it afresh, and takes no id twice.
    run(open_store(tree), restore="fresh")
    assert open_store(tree).load_latest().id == 4


@pytest.mark.parametrize("until", [None, 280])
def test_what_a_newer_version_wrote_is_not_passed_over_as_damage(tree, until):
    """By an older version, after a way back: it would go on from behind, and prune the rest."""
    seal_anew(tree, of_a_newer_format(tree, 3))
    for on_fallback in ("refuse", "accept"):
        with pytest.raises(errors.UnsupportedFormatError, match="Upgrade beam_ckpt") as refused:
            run(open_store(tree), until=until, on_fallback=on_fallback)
    assert "to go back behind it, give 2 as `restore`" in str(refused.value)
    assert open_store(tree).list_ids() == [1, 2, 3]
    done = run(open_store(tree), restore=2)
    before = run_event_loop(FN, DATA, until=CUTS[1])
    assert canonical(before.outputs + done.outputs) == canonical(run_event_loop(FN, DATA).outputs)


def test_a_version_that_is_not_the_sealed_one_is_damage(tree):
    of_a_newer_format(tree, 3)
    with pytest.raises(errors.InvalidCheckpointError, match=r"not what its \.final marker seals"):
        open_store(tree).load_by_id(3)
    assert run(open_store(tree)).metrics["checkpoints_passed_over_at_restore"] == 1


def test_a_checkpoint_asked_for_by_id_has_to_be_there_and_valid(tree):
    with pytest.raises(errors.CheckpointNotFoundError, match=r"no checkpoint 9 .*1, 2, 3"):
        run(open_store(tree), restore=9)
    flip(sidecar(tree, CUTS[1]))
    with pytest.raises(errors.InvalidCheckpointError, match=r"checkpoint 2 .* cannot be restored"):
        run(open_store(tree), restore=2)
    done = run(open_store(tree), restore=1)
    before = run_event_loop(FN, DATA, until=CUTS[0])
    whole = run_event_loop(FN, DATA)
    assert canonical(before.outputs + done.outputs) == canonical(whole.outputs)


def test_a_store_that_is_a_file_is_refused_by_name(tmp_path):
    path = tmp_path / "file"
    path.write_text("something of mine")
    with pytest.raises(errors.CheckpointError, match="file") as refused:
        run(str(path))
    assert isinstance(refused.value, (ValueError, OSError))
    assert path.read_text() == "something of mine"


def test_a_store_that_cannot_be_written_stops_before_anything_is_lost(tmp_path):
    def forbidden(operation: str) -> Fault:
        return Fault(operation, action="error", errno=errno.EACCES, times=10_000)

    plan = FaultPlan(forbidden("put"), forbidden("put_if_absent"), directory=tmp_path)
    root = tmp_path / "ckpt"
    with pytest.raises(Exception, match="Permission denied") as failed:
        run(faulty_store(open_store(root), plan))
    assert "CheckpointStorageError" in repr(failed.getrepr(style="short"))


def test_a_folder_without_permission_is_named(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere; EACCES is injected in another test")
    root = tmp_path / "ckpt"
    root.mkdir()
    root.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(errors.CheckpointError, match=str(root)):
        run(str(root))


@pytest.mark.parametrize("key", ["state/*", "manifests/*.json", "manifests/*.final", "latest.json"])
def test_a_full_disk_stops_the_run_and_the_next_one_goes_on(tree, tmp_path, key):
    plan = FaultPlan(
        Fault("change", key, action="error", errno=errno.ENOSPC, times=100), directory=tmp_path
    )
    with pytest.raises(Exception, match="No space left"):
        run(faulty_store(open_store(tree), plan), until=280)
    report = open_store(tree).recover_latest_validated()
    # The marker is what makes a checkpoint; with the pointer alone it is whole.
    assert report.chosen.id == (4 if key == "latest.json" else 3)
    assert [s for s in report.skipped if s.phase == "invalid"] == []

    run(open_store(tree), until=280)
    expected = run_event_loop(FN, DATA, until=280_000_000)
    assert saved_state(open_store(tree), FN) == dict(expected.state)
