"""`beam-ckpt forget`: what it asks, says and leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from beam_ckpt import cli, inspect, open_store


@pytest.fixture
def root(tmp_path: Path, made) -> Path:
    root = tmp_path / "ckpt"
    store = open_store(root)
    base = made.save(store, [made.record("ada", 1), made.record("bob", 2)])
    made.save(store, [made.record("ada", 3)], base=base, boundary=200)
    store.tag("v1", base.id)
    return root


def beam_ckpt(*arguments: object) -> int:
    """Runs the command in this process; returns the exit status."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def test_it_says_what_goes_and_what_became_of_it(root, capsys):
    before = sorted(root.rglob("*"))
    assert beam_ckpt("forget", root, "totals", "--key", "ada", "--dry-run") == 0
    planned = capsys.readouterr().out
    assert "held by checkpoints 1, 2: 2 rows in 2 files" in planned
    assert sorted(root.rglob("*")) == before
    assert beam_ckpt("forget", root, "totals", "--key", "ada", "--yes") == 0
    said = capsys.readouterr().out
    assert said.startswith(planned)
    assert "checkpoint 1 is now 3\ncheckpoint 2 is now 4\ntag 'v1' moved" in said
    assert "removed 2 rows of the key in 2 files" in said
    assert inspect.state(root, "totals")["key"].to_pylist() == ["bob"]
    assert open_store(root).tags() == {"v1": 3}
    assert beam_ckpt("forget", root, "totals", "--key", "ada", "--yes") == 0
    assert capsys.readouterr().out == "nothing in the store holds the key\n"


def test_show_says_what_a_checkpoint_took_the_place_of(root, capsys):
    assert beam_ckpt("forget", root, "totals", "--key", "ada", "--yes") == 0
    capsys.readouterr()
    assert beam_ckpt("show", root, 4) == 0
    assert "replaces       2, without a key that was forgotten" in capsys.readouterr().out
    assert beam_ckpt("show", root, 4, "--json") == 0
    assert json.loads(capsys.readouterr().out)["replaces"] == [2]
    assert beam_ckpt("show", root, 2) == 3
    assert "was replaced by 4" in capsys.readouterr().err


def test_json_is_one_object(root, capsys):
    assert beam_ckpt("forget", root, "totals", "--key", "ada", "--yes", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["replaced"] == [[1, 3], [2, 4]]
    assert (said["found"], said["rows"], said["left"], said["tags"]) == (True, 2, [], ["v1"])


def test_what_is_left_makes_it_fail(root, capsys):
    stranger = root / "state" / "totals" / "00000" / "notes.parquet"
    stranger.parent.mkdir(parents=True, exist_ok=True)
    stranger.write_bytes(b"ada was here")
    assert beam_ckpt("forget", root, "totals", "--key", "ada", "--yes") == 1
    assert "left: state/totals/00000/notes.parquet: not a name" in capsys.readouterr().err
    assert stranger.exists()


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("total", "--key", "ada", "--yes"), 3, "Did you mean 'totals'"),
        (("totals", "--yes"), 2, "--key"),
        (("totals", "--key", "ada"), 2, "--yes"),
    ],
)
def test_wrong_use_changes_nothing(root, capsys, arguments, status, says):
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    assert beam_ckpt("forget", root, *arguments) == status
    assert says in capsys.readouterr().err
    assert before == {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
