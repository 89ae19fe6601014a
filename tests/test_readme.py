"""The README does what it says: its Python blocks run, its shell commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import documents

README = documents.ROOT / "README.md"


def blocks(language: str) -> list[str]:
    return [block.text for block in documents.blocks(README) if block.language == language]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """What the Python blocks print when they are pasted into one file, one after the other."""
    script = folder / "example.py"
    script.write_text("\n".join(blocks("python")), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_example_goes_on_where_its_first_run_ended(printed: str) -> None:
    outputs = re.findall(r"^\('\w+', \d+\)$", printed, re.MULTILINE)
    assert sorted(outputs[:2]) == ["('ada', 3)", "('bob', 5)"]
    assert sorted(outputs[2:]) == ["('ada', 7)", "('eve', 1)"]


def test_two_operators_go_on_where_the_checkpoint_that_was_asked_for_stands(printed: str) -> None:
    lines = [line for line in printed.splitlines() if line.startswith(("from", "checkpoint "))]
    assert lines == ["from None", "checkpoint 1", "from None", "checkpoint 2"]


def test_saved_state_is_a_pcollection(printed: str) -> None:
    lines = [line for line in printed.splitlines() if line.startswith("rich:")]
    assert sorted(lines) == ["rich: ada", "rich: bob"]


def test_duckdb_reads_the_sidecars_as_typed_columns(printed: str) -> None:
    """The glob shows the rows of both checkpoints, `inspect` those of the newest one.

    (Those of ada and bob have moved into a file with what is new.)
    """
    glob, merged = printed.split("key", 2)[1:]
    row = re.compile(r"(ada|bob|eve) +│ +(\d)")
    assert sorted(row.findall(glob)) == [
        ("ada", "3"), ("ada", "3"), ("ada", "7"), ("bob", "5"), ("bob", "5"), ("eve", "1"),
    ]  # fmt: skip
    assert "int64" in glob
    assert "varchar" in glob
    assert row.findall(merged) == [("ada", "7"), ("bob", "5"), ("eve", "1")]


def test_the_commands_shown_run_on_the_example(
    printed: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(That the installed program is this function is seen in test_cli.py.)"""
    monkeypatch.chdir(folder)
    commands = [line for line in "".join(blocks("sh")).splitlines() if line.startswith("beam-ckpt")]
    assert len(commands) >= 3
    for command in commands:
        status, out, err = documents.run_command(command)
        assert status == 0, command + err
        assert out != ""


def test_every_file_that_is_named_is_there() -> None:
    assert len(documents.named_files(README)) >= 4
    assert documents.missing_files(README) == []
