"""`beam-ckpt rewrite`: what it takes, prints and leaves."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from beam_ckpt import cli, inspect, open_store


@pytest.fixture
def root(tmp_path: Path, made) -> Path:
    root = tmp_path / "ckpt"
    store = open_store(root)
    records = [made.record("a", 1, at=10), made.record("b", 2, at=60, words=("x",))]
    base = made.save(store, records)
    other = replace(made.OPERATOR, uid="a=b:c.d")
    made.save(store, [made.record("c", 3, at=99)], operator=other, base=base)
    return root


def beam_ckpt(*arguments: object) -> int:
    """Runs the command in this process; returns the exit status."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def cells(root: Path, uid: str) -> dict[str, dict[str, object]]:
    table = inspect.state(root, uid)
    names = [name for name in table.column_names if name != "key" and not name.startswith("_")]
    return {row["key"]: {name: row[name] for name in names} for row in table.to_pylist()}


def test_it_says_what_it_did(root, capsys):
    status = beam_ckpt(
        "rewrite", root, "--yes", "--rename-operator", "totals=sums", "--ttl", "totals=60s",
        "--rename-cell", "totals.count=n", "--rename-cell", "a=b:c.d.count=m",
        "--rename-operator", "a=b:c.d=x=y", "--key-groups", 3,
    )  # fmt: skip
    out = capsys.readouterr().out
    assert status == 0, out
    assert "operator sums (was totals): 1 rows, 1 expired" in out
    assert "operator x=y (was a=b:c.d): 1 rows" in out
    assert re.search(r"checkpoint 3, from 2, which is as it was: 2 files, [\d.]+ KiB, 3 key", out)
    assert cells(root, "sums") == {"b": {"n": 2, "word": ["x"]}}
    assert cells(root, "x=y") == {"c": {"m": 3, "word": None}}


def test_a_dry_run_only_says_what_it_would_do(root, capsys):
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    assert beam_ckpt("rewrite", root, "--drop-where", "totals: count = 1", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "operator totals: 1 rows, 1 dropped by condition" in out
    assert "operator a=b:c.d: 1 rows, as it was" in out
    assert "would write a new checkpoint: 1 files" in out
    assert before == {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_json_is_one_object(root, capsys):
    arguments = ("--drop-cell", "totals.count", "--drop-operator", "a=b:c.d", "--yes", "--json")
    assert beam_ckpt("rewrite", root, *arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["base_id"], said["id"], said["boundary"]) == (2, 3, 100_000_000)
    assert [o["operator"] for o in said["operators"]] == ["totals"]
    assert said["dropped_operators"] == ["a=b:c.d"]
    assert cells(root, "totals") == {"b": {"word": ["x"]}}


def test_a_ttl_of_all_operators_and_a_moment(root, capsys):
    arguments = ("--ttl", "1m", "--as-of", "1970-01-01T00:02:30", "--dry-run", "--json")
    assert beam_ckpt("rewrite", root, *arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(o["operator"], o["expired"]) for o in said["operators"]] == [
        ("a=b:c.d", 0), ("totals", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ((), 2, "say what to change"),
        (("--rename-operator", "totels=x"), 3, "Did you mean 'totals'"),
        (("--drop-cell", "totals.cont"), 3, "Did you mean 'totals.count'"),
        (("--rename-operator", "totals"), 2, "has no '='"),
        (("--ttl", "soon"), 2, "soon"),
        (("--ttl", "1d", "--as-of", "then"), 2, "'then' is no time"),
        (("--drop-where", "totals: cuont > 1"), 2, "cuont"),
        (("--rename-cell", "totals.count=word"), 1, "'word'"),
        (("--drop-operator", "totals", "--drop-cell", "totals.count"), 2, "dropped and changed"),
        (("--key-groups", "3", "--at", "7"), 3, "no checkpoint 7"),
    ],
)
def test_wrong_use_says_what_is_wrong_and_changes_nothing(root, capsys, arguments, status, says):
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    assert beam_ckpt("rewrite", root, "--yes", *arguments) == status
    said = capsys.readouterr().err
    assert says in re.sub(r"\s*│?\s*\n\s*│?\s*", " ", said), said
    assert before == {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_without_a_terminal_it_needs_an_answer_beforehand(root, capsys):
    assert beam_ckpt("rewrite", root, "--key-groups", 3) == 2
    assert "--yes" in capsys.readouterr().err
    assert open_store(root).list_ids() == [1, 2]
