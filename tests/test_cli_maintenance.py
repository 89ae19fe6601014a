"""The commands that maintain a store, run on real stores: what they print, delete and leave."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from beam_ckpt import cli, open_store
from beam_ckpt.manifest import RunIdentity
from beam_ckpt.testing.store import a_manifest, commit, path_of, write

MINUTE = 60_000_000
DAY_MS = 86_400_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Finalized checkpoints 1 to 4, a sidecar each, and attempt 5, which was never finalized.

    1 to 3 were taken ten days ago, 4 now.
    """
    root = tmp_path / "ckpt"
    store = open_store(root)
    now = time.time_ns() // 1_000_000
    for id in (1, 2, 3, 4):
        taken = now if id == 4 else now - 10 * DAY_MS
        commit(store, id, watermark=id * MINUTE, timestamp_ms=taken)
    commit(store, 5, watermark=5 * MINUTE, finalized=False)
    return root


@pytest.fixture
def orphans(root: Path) -> tuple[str, ...]:
    """Files of a run that was killed, below the boundary of the latest checkpoint."""
    store = open_store(root)
    found = [write(store, b"orphan", boundary=MINUTE * n, run_id="dead")[2].path for n in (1, 2)]
    write(store, b"on its way", boundary=9 * MINUTE, run_id="alive")
    return tuple(sorted(path for path in found if path))


def beam_ckpt(*arguments: object) -> int:
    """Runs the command in this process; returns the exit status."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def one_object(text: str) -> dict[str, object]:
    (line,) = text.splitlines()
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


def tree(root: Path) -> set[str]:
    """Every file of a store."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def sidecar(root: Path, id: int) -> Path:
    manifest = open_store(root).load_by_id(id)
    assert manifest is not None
    return root / path_of(manifest)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def on_a_terminal(
    answer: str, *arguments: object, meanwhile: Callable[[], object] | None = None
) -> tuple[int, str, str]:
    """Runs the command with a terminal as stdin and stderr; returns status, stdout and stderr.

    The question is answered once it stands there and `meanwhile` has happened.
    """
    ours, theirs = os.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "beam_ckpt.cli", *map(str, arguments)],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm"},
        )
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # EIO: the other side has closed
            while chunk := os.read(ours, 4096):
                said += chunk
                if answer and b"[y/N]" in said:
                    if meanwhile is not None:
                        meanwhile()
                    os.write(ours, answer.encode())
                    answer = ""
        out, _ = process.communicate()
        return process.returncode, out.decode(), said.decode()
    finally:
        os.close(ours)


# -- recover ---------------------------------------------------------------------------------


def test_recover_says_what_would_be_chosen_and_why_others_are_skipped(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(root)
    sidecar(root, 4).unlink()
    assert beam_ckpt("recover", root) == 0
    attempt, damaged, chosen = capsys.readouterr().out.splitlines()
    assert attempt.startswith("checkpoint 5, up to 1970-01-01T00:05:00Z: skipped")
    assert "not finalized" in attempt
    assert damaged.startswith("checkpoint 4, up to 1970-01-01T00:04:00Z: skipped")
    assert re.fullmatch(
        r"checkpoint 3, up to 1970-01-01T00:03:00Z, taken 2\S+Z: would be restored", chosen
    )
    assert len(before - tree(root)) == 1, "it writes and deletes nothing"


def test_recover_as_json_is_one_object(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beam_ckpt("recover", root, "--json") == 0
    found = one_object(capsys.readouterr().out)
    chosen = found["chosen"]
    assert isinstance(chosen, dict)
    assert (chosen["id"], chosen["boundary"]) == (4, "1970-01-01T00:04:00Z")
    assert (found["deep"], found["damaged"], found["examined"]) == (True, False, 2)
    (skipped,) = found["skipped"] if isinstance(found["skipped"], list) else ()
    assert skipped == {
        "id": 5,
        "phase": "prepared",
        "boundary": "1970-01-01T00:05:00Z",
        "drained": False,
        "reason": "checkpoint is prepared but not finalized",
    }


def test_recover_finds_a_flipped_bit_deep_and_not_by_metadata(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(sidecar(root, 4))
    chosen = []
    for depth in ("--deep", "--metadata"):
        assert beam_ckpt("recover", root, depth, "--json") == 0
        found = one_object(capsys.readouterr().out)["chosen"]
        assert isinstance(found, dict)
        chosen.append(found["id"])
    assert chosen == [3, 4], "files keep no checksum that could be compared without reading"


def test_recover_exits_with_1_when_checkpoints_are_there_and_none_is_valid(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in root.glob("manifests/*.json"):
        damage(path)
    assert beam_ckpt("recover", root) == 1
    assert "none of the 5 checkpoints is valid" in capsys.readouterr().out
    assert beam_ckpt("recover", root, "--json") == 1
    found = one_object(capsys.readouterr().out)
    assert (found["chosen"], found["damaged"]) == (None, True)


def test_recover_of_attempts_only_is_no_damage_as_it_is_none_to_a_restore(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(open_store(tmp_path / "s"), 1, finalized=False)
    assert beam_ckpt("recover", tmp_path / "s") == 0
    out = capsys.readouterr().out
    assert "checkpoint 1, up to the end of the input: skipped" in out
    assert "nothing was published yet" in out


# -- repair-pointer --------------------------------------------------------------------------


def test_repair_pointer_points_at_the_newest_valid_one(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(sidecar(root, 4))
    pointer = (root / "latest.json").read_bytes()
    assert beam_ckpt("repair-pointer", root, "--dry-run", "--json") == 0
    planned = one_object(capsys.readouterr().out)
    assert (planned["before"], planned["after"], planned["changed"]) == (4, 3, True)
    assert (root / "latest.json").read_bytes() == pointer
    assert beam_ckpt("repair-pointer", root, "--json") == 0
    assert one_object(capsys.readouterr().out) == planned | {"dry_run": False}
    latest = open_store(root).load_latest()
    assert latest is not None
    assert latest.id == 3
    assert beam_ckpt("repair-pointer", root) == 0
    assert "latest.json names checkpoint 3, as it should" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b'{"id":', None])
def test_repair_pointer_makes_a_new_one_of_a_torn_or_a_missing_one(
    root: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    pointer = root / "latest.json"
    pointer.unlink()
    if content is not None:
        pointer.write_bytes(content)
    assert beam_ckpt("repair-pointer", root) == 0
    out = capsys.readouterr().out
    assert ("there was no latest.json" if content is None else "invalid checkpoint") in out
    assert "latest.json points at checkpoint 4" in out
    latest = open_store(root).load_latest()
    assert latest is not None
    assert latest.id == 4


def test_repair_pointer_without_a_valid_checkpoint_changes_nothing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in root.glob("manifests/*.json"):
        damage(path)
    pointer = (root / "latest.json").read_bytes()
    assert beam_ckpt("repair-pointer", root) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no valid finalized checkpoint" in captured.err
    assert (root / "latest.json").read_bytes() == pointer


# -- tags ------------------------------------------------------------------------------------


def test_a_checkpoint_is_tagged_listed_and_untagged(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beam_ckpt("tags", root) == 0
    assert capsys.readouterr().out == "no tags\n"
    assert beam_ckpt("tag", root, "before the move", 2) == 0
    assert capsys.readouterr().out == "checkpoint 2 is tagged 'before the move'\n"
    assert beam_ckpt("tag", root, "gold", 3, "--json") == 0
    assert one_object(capsys.readouterr().out) == {"tag": "gold", "id": 3}
    assert beam_ckpt("tags", root) == 0
    assert capsys.readouterr().out == "before the move  checkpoint 2\ngold  checkpoint 3\n"
    assert beam_ckpt("tags", root, "--json") == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"tag": "before the move", "id": 2},
        {"tag": "gold", "id": 3},
    ]
    assert beam_ckpt("untag", root, "gold", "--json") == 0
    assert one_object(capsys.readouterr().out) == {"tag": "gold", "id": 3}
    assert beam_ckpt("untag", root, "before the move") == 0
    assert "of checkpoint 2" in capsys.readouterr().out
    assert open_store(root).tags() == {}


def test_a_name_that_is_taken_is_refused_and_kept(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_store(root).tag("gold", 2)
    assert beam_ckpt("tag", root, "gold", 3) == 1
    assert "names checkpoint 2 already" in capsys.readouterr().err
    assert open_store(root).tags() == {"gold": 2}


def test_a_damaged_tag_can_be_removed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_store(root).tag("gold", 2)
    (path,) = root.glob("tags/*")
    path.write_bytes(b"{")
    assert beam_ckpt("tags", root) == 1
    assert beam_ckpt("untag", root, "gold") == 0
    assert "gold" in capsys.readouterr().out
    assert open_store(root).tags() == {}


# -- prune -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "deleted"),
    [
        (("--keep-last", "2"), [1, 2]),
        (("--keep-for", "7d"), [1, 2, 3]),
        (("--keep-for", "1w2d12h"), [1, 2, 3]),
        (("--keep-for", "2w"), []),
        (("--keep-last", "3", "--keep-for", "7d"), [1]),
    ],
)
def test_prune_deletes_exactly_what_its_dry_run_lists(
    root: Path,
    options: tuple[str, ...],
    deleted: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = tree(root)
    assert beam_ckpt("prune", root, *options, "--dry-run", "--json") == 0
    planned = one_object(capsys.readouterr().out)
    assert tree(root) == before
    going = planned["deleted"]
    assert isinstance(going, list)
    assert [row["id"] for row in going] == deleted
    assert beam_ckpt("prune", root, *options, "--yes", "--json") == 0
    assert one_object(capsys.readouterr().out) == planned | {"dry_run": False}
    assert open_store(root).list_ids() == planned["kept"]
    assert isinstance(planned["sidecars"], list)
    gone = {path for path in before - tree(root) if path.startswith("state/")}
    assert gone == set(planned["sidecars"])
    assert len(gone) == len(deleted)
    assert planned["bytes"] == len(b"state of checkpoint 1") * len(deleted)
    assert open_store(root).recover_latest_validated().chosen_id == 4


def test_prune_says_first_what_goes_and_spares_what_is_tagged(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_store(root).tag("gold", 1)
    assert beam_ckpt("prune", root, "--keep-last", 1, "--dry-run") == 0
    two, three, total = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"checkpoint 2, up to 1970-01-01T00:02:00Z, taken 2\S+Z: would go", two)
    assert three.startswith("checkpoint 3, ")
    assert total == "would delete 2 checkpoints and 2 files (42 B); 3 checkpoints stay"
    assert beam_ckpt("prune", root, "--keep-last", 1, "--yes") == 0
    *listed, done = capsys.readouterr().out.splitlines()
    assert [line.endswith(": goes") for line in listed] == [True, True]
    assert done == "deleted 2 checkpoints"
    assert open_store(root).list_ids() == [1, 4, 5]
    assert beam_ckpt("prune", root, "--keep-last", 1, "--yes") == 0
    assert capsys.readouterr().out == "nothing to delete\n"


def test_an_overtaken_attempt_is_listed_as_one(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(open_store(root), 6, watermark=6 * MINUTE)
    assert beam_ckpt("prune", root, "--keep-last", 5, "--yes") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("checkpoint 5, ")
    assert first.endswith(", never finalized: goes")
    assert open_store(root).list_ids() == [1, 2, 3, 4, 6]


def test_json_on_stdout_and_the_list_on_stderr(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beam_ckpt("prune", root, "--keep-last", 3, "--yes", "--json") == 0
    captured = capsys.readouterr()
    assert one_object(captured.out)["policy"] == "KeepLast(3)"
    assert "checkpoint 1, " in captured.err


# -- gc --------------------------------------------------------------------------------------


def test_gc_deletes_exactly_what_its_dry_run_lists(
    root: Path, orphans: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(root)
    assert beam_ckpt("gc", root, "--grace", "0s", "--dry-run", "--json") == 0
    planned = one_object(capsys.readouterr().out)
    assert tree(root) == before
    assert isinstance(planned["deleted"], list)
    assert isinstance(planned["kept"], list)
    assert tuple(row["key"] for row in planned["deleted"]) == orphans
    assert planned["bytes"] == 2 * len(b"orphan")
    assert [row["reason"] for row in planned["kept"]] == ["run alive may still publish it"]
    assert beam_ckpt("gc", root, "--grace", "0s", "--yes", "--json") == 0
    assert one_object(capsys.readouterr().out) == planned | {"dry_run": False}
    assert before - tree(root) == set(orphans)


def test_gc_names_each_file_and_why_before_it_goes(
    root: Path, orphans: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert beam_ckpt("gc", root, "--grace", "0s", "--yes") == 0
    first, second, kept, done = capsys.readouterr().out.splitlines()
    why = "6 B, its boundary lies below that of checkpoint 4: goes"
    assert (first, second) == tuple(f"{path}, {why}" for path in orphans)
    assert kept.startswith("1 unlisted file kept: run alive may still publish it (state/totals/")
    assert done == "deleted 2 files"


def test_gc_leaves_what_is_younger_than_a_day(
    root: Path, orphans: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert beam_ckpt("gc", root, "--yes") == 0
    out = capsys.readouterr().out
    assert "2 unlisted files kept: younger than the grace period" in out
    assert "nothing to delete" in out
    assert set(orphans) <= tree(root)


def test_a_file_of_a_strange_name_is_kept_and_named_without_driving_the_terminal(
    root: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    Path(os.fsdecode(os.fsencode(root / "state") + b"/\xff\x1b[2J.parquet")).write_bytes(b"x")
    assert beam_ckpt("gc", root, "--dry-run") == 0
    out = capfdbinary.readouterr().out
    assert rb"delete it by hand (state/\udcff\x1b[2J.parquet)" in out
    assert beam_ckpt("gc", root, "--dry-run", "--json") == 0
    (kept,) = json.loads(capfdbinary.readouterr().out)["kept"]
    assert kept["key"] == "state/\udcff\x1b[2J.parquet"


# -- asking ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("prune", "--keep-last", "1"), ("gc", "--grace", "0s")])
def test_without_a_terminal_nothing_is_deleted_without_yes(
    root: Path,
    orphans: tuple[str, ...],
    command: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = tree(root)
    name, *options = command
    assert beam_ckpt(name, root, *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--dry-run" in captured.err
    assert tree(root) == before


@pytest.mark.parametrize(("answer", "status", "left"), [("n\n", 1, 5), ("y\n", 0, 2)])
def test_on_a_terminal_the_answer_decides(root: Path, answer: str, status: int, left: int) -> None:
    found, out, said = on_a_terminal(answer, "prune", root, "--keep-last", 1)
    assert found == status
    assert out.startswith("checkpoint 1, ")
    assert "Delete 3 checkpoints and 3 files (63 B)? [y/N]" in said
    assert len(open_store(root).list_ids()) == left


def test_what_the_policy_gives_up_while_the_question_stands_was_not_listed_and_stays(
    root: Path,
) -> None:
    def commit_two() -> None:
        store = open_store(root)
        commit(store, 6, watermark=6 * MINUTE, finalized=False)
        commit(store, 7, watermark=7 * MINUTE)

    status, out, _ = on_a_terminal("y\n", "prune", root, "--keep-last", 1, meanwhile=commit_two)
    assert status == 0
    assert "deleted 3 checkpoints" in out
    assert open_store(root).list_ids() == [4, 5, 6, 7]


def test_a_checkpoint_that_is_tagged_while_the_question_stands_is_left(root: Path) -> None:
    status, out, _ = on_a_terminal(
        "y\n", "prune", root, "--keep-last", 1, meanwhile=lambda: open_store(root).tag("gold", 2)
    )
    assert status == 0
    assert "checkpoint 2 was left" in out
    assert open_store(root).list_ids() == [2, 4, 5]


def test_gc_leaves_what_became_garbage_while_the_question_stood(
    root: Path, orphans: tuple[str, ...]
) -> None:
    store = open_store(root)
    store.claim_generation("alive")
    before = tree(root)
    status, out, said = on_a_terminal(
        "y\n", "gc", root, "--grace", "0s", meanwhile=lambda: store.claim_generation("new")
    )
    assert status == 0
    assert "Delete 2 files (12 B)?" in said
    assert "deleted 2 files" in out
    assert before - tree(root) == set(orphans)


def test_prune_shows_markers_of_checkpoints_that_are_gone(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used = root / "manifests" / "000000000001.used"
    assert beam_ckpt("prune", root, "--keep-last", 1, "--yes") == 0
    used.write_bytes(b"{}")
    capsys.readouterr()
    assert beam_ckpt("prune", root, "--keep-last", 1, "--dry-run", "--json") == 0
    captured = capsys.readouterr()
    shown = "manifests/000000000001.used, of a checkpoint that is gone: would go"
    assert shown in captured.err
    assert one_object(captured.out)["markers"] == ["manifests/000000000001.used"]
    assert used.exists()
    assert beam_ckpt("prune", root, "--keep-last", 1, "--yes") == 0
    assert "deleted 0 checkpoints, 1 marker" in capsys.readouterr().out
    assert not used.exists()
    assert beam_ckpt("prune", root, "--keep-last", 1, "--yes") == 0
    assert "nothing to delete" in capsys.readouterr().out


# -- copy ------------------------------------------------------------------------------------


def test_a_store_is_copied_elsewhere_and_back_with_the_original_gone(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_store(root).tag("gold", 2)
    there = f"memory://{tmp_path.name}-copy"
    assert beam_ckpt("copy", root, there) == 0
    captured = capsys.readouterr()
    assert captured.out == f"copied checkpoints 1, 2, 3, 4 to {there} (4 files, 84 B)\n"
    assert captured.err == "", "no progress bar where there is no terminal"
    shutil.rmtree(root)
    assert beam_ckpt("copy", there, tmp_path / "back", "--json") == 0
    back = open_store(tmp_path / "back")
    assert one_object(capsys.readouterr().out) == {
        "source": there,
        "target": back.url,
        "copied": [1, 2, 3, 4],
        "present": [],
        "sidecars": 4,
        "bytes": 84,
    }
    assert back.recover_latest_validated().chosen_id == 4
    assert back.tags() == {"gold": 2}


def test_chosen_checkpoints_are_copied_and_a_second_run_adds_the_rest(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beam_ckpt("copy", root, tmp_path / "b", "--id", 3, "--id", 2) == 0
    assert "copied checkpoints 2, 3 to" in capsys.readouterr().out
    assert beam_ckpt("copy", root, tmp_path / "b") == 0
    copied, present = capsys.readouterr().out.splitlines()
    assert copied.startswith("copied checkpoints 1, 4 to")
    assert present == "checkpoints 2, 3 there already"
    assert beam_ckpt("copy", root, tmp_path / "b") == 0
    assert capsys.readouterr().out.startswith("copied no checkpoint")


def test_a_copy_onto_another_store_is_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(open_store(tmp_path / "other"), 1)
    before = tree(tmp_path / "other")
    assert beam_ckpt("copy", root, tmp_path / "other") == 1
    assert "copy into an empty place" in capsys.readouterr().err
    assert tree(tmp_path / "other") == before


def test_a_copy_of_attempts_only_is_not_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(open_store(tmp_path / "a"), 1, finalized=False)
    assert beam_ckpt("copy", tmp_path / "a", tmp_path / "b") == 3
    assert "no finalized checkpoint to copy" in capsys.readouterr().err


def test_a_copy_of_what_is_damaged_says_what_and_exits_with_1(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(sidecar(root, 2))
    assert beam_ckpt("copy", root, tmp_path / "b") == 1
    assert sidecar(root, 2).name in capsys.readouterr().err
    assert open_store(tmp_path / "b").list_ids() == [1]


def test_a_terminal_gets_a_progress_bar(root: Path, tmp_path: Path) -> None:
    status, _, said = on_a_terminal("", "copy", root, tmp_path / "b")
    assert status == 0
    assert "copying" in said
    assert "84/84 bytes" in said
    assert open_store(tmp_path / "b").list_ids() == [1, 2, 3, 4]


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("recover", "{root}/nothing"), 3, "no checkpoint store"),
        (("repair-pointer", "{root}/nothing"), 3, "no checkpoint store"),
        (("tag", "{root}/nothing", "gold", "1"), 3, "no checkpoint store"),
        (("untag", "{root}/nothing", "gold"), 3, "no checkpoint store"),
        (("tags", "{root}/nothing"), 3, "no checkpoint store"),
        (("prune", "{root}/nothing", "--keep-last", "1", "--yes"), 3, "no checkpoint store"),
        (("gc", "{root}/nothing", "--yes"), 3, "no checkpoint store"),
        (("copy", "{root}/nothing", "{root}/b"), 3, "no checkpoint store"),
        (("recover", "{root}/latest.json"), 2, "latest.json"),
        (("gc", "{root}/latest.json", "--yes"), 2, "latest.json"),
        (("copy", "{root}", "{root}/latest.json"), 2, "latest.json"),
        (("copy", "{root}", "{root}"), 2, "onto itself"),
        (("copy", "{root}", "nosuchprotocol://x"), 2, "nosuchprotocol"),
        (("copy", "{root}", "{root}-copy", "--id", "9"), 3, "checkpoint 9"),
        (("copy", "{root}", "{root}-copy", "--id", "5"), 3, "checkpoint 5"),
        (("tag", "{root}", "gold", "9"), 3, "checkpoint 9"),
        (("tag", "{root}", "gold", "5"), 3, "checkpoint 5"),
        (("tag", "{root}", "gold", "0"), 2, "ID"),
        (("tag", "{root}", "gold", "last"), 2, "ID"),
        (("tag", "{root}", "", "1"), 2, "is no tag"),
        (("tag", "{root}", "a\x1b[2J", "1"), 2, "is no tag"),
        (("untag", "{root}", "gold"), 3, "gold"),
        (("prune", "{root}", "--yes"), 2, "--keep-for"),
        (("prune", "{root}", "--keep-last", "0", "--yes"), 2, "--keep-last"),
        (("prune", "{root}", "--keep-for", "0d", "--yes"), 2, "above 0"),
        (("prune", "{root}", "--keep-for", "soon", "--yes"), 2, "is no duration"),
        (("prune", "{root}", "--keep-for", "-7d", "--yes"), 2, "is no duration"),
        (("prune", "{root}", "--keep-for", "7", "--yes"), 2, "is no duration"),
        (("gc", "{root}", "--grace", "nan", "--yes"), 2, "is no duration"),
        (("gc", "{root}", "--grace", "9" * 400 + "d", "--yes"), 2, "is no duration"),
    ],
)
def test_bad_input_is_one_clear_message_and_changes_nothing(
    root: Path,
    arguments: tuple[str, ...],
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = tree(root)
    assert beam_ckpt(*(argument.format(root=root) for argument in arguments)) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in " ".join(captured.err.replace("│", " ").split())
    assert "Traceback" not in captured.err
    assert "\x1b[2J" not in captured.err
    assert tree(root) == before


def test_what_is_not_whole_stops_a_prune_before_anything_goes(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(root / "manifests" / "000000000002.json")
    before = tree(root)
    assert beam_ckpt("prune", root, "--keep-last", 1, "--yes") == 1
    assert "checkpoint 2 in" in capsys.readouterr().err
    assert tree(root) == before


def test_a_storage_that_fails_is_exit_status_4(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "tags").write_bytes(b"in the way of a directory")
    assert beam_ckpt("tag", root, "gold", 1) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "tags" in captured.err


def test_a_file_of_a_superseded_run_goes_by_its_generation(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(root)
    generation = store.claim_generation("old")
    path = write(store, b"late", boundary=9 * MINUTE, run_id="old")[2].path
    store.claim_generation("new")
    store.save(a_manifest(6, run=RunIdentity(generation=generation + 1, run_id="new")))
    assert beam_ckpt("gc", root, "--grace", "0s", "--yes") == 0
    assert f"{path}, 4 B, run old was superseded by generation 2: goes" in capsys.readouterr().out
    assert path not in tree(root)
