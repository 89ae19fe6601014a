"""What is shown of a store whose deltas say only what changed: the state, not the changes."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest

from beam_ckpt import inspect
from beam_ckpt.cli import main

GOLDEN = Path(__file__).parents[1] / "golden_state" / "v2"
FILES = sorted(map(str, GOLDEN.glob("state/subject/*/*.parquet")))

FIRST = {"": (1, [1.5]), "ann": (2, [0.5, 2.5]), "bob": (1, [3.5])}
SECOND = {"": (1, None), "ann": (3, [0.5, 2.5, 1.0]), "bob": (1, [3.5]), "ünal": (1, [-2.0])}


def test_the_store_has_what_this_is_about() -> None:
    query = "SELECT count(*) FROM read_parquet($1, union_by_name=true) WHERE _patch IS NOT NULL"
    assert duckdb.execute(query, [FILES]).fetchall() == [(3,)]


@pytest.mark.parametrize(("at", "expected"), [(1, FIRST), (2, SECOND), ("latest", SECOND)])
def test_state_is_that_of_the_cut(at: inspect.At, expected: dict[str, object]) -> None:
    table = inspect.state(GOLDEN, "subject", at=at)
    assert not {"_patch", "_deleted"} & {*table.column_names}
    rows = table.select(["key", "count", "halves"]).to_pylist()
    assert {row["key"]: (row["count"], row["halves"]) for row in rows} == expected
    for key, (count, halves) in expected.items():
        for cells, value in ((["count"], count), (["halves"], halves)):
            (row,) = inspect.state(GOLDEN, "subject", at=at, key=key, cells=cells).to_pylist()
            assert row[cells[0]] == value


def test_history_and_diff_are_of_the_state() -> None:
    history = inspect.history(GOLDEN, "subject", "ann")
    assert history["count"].to_pylist() == [2, 3]
    assert history["halves"].to_pylist() == [[0.5, 2.5], [0.5, 2.5, 1.0]]
    assert inspect.history(GOLDEN, "subject", "")["count"].to_pylist() == [1, 1]
    changed = {row["key"]: row for row in inspect.diff(GOLDEN, 1, 2, "subject").to_pylist()}
    assert changed["ann"]["halves"] == {"before": [0.5, 2.5], "after": [0.5, 2.5, 1.0]}
    assert changed[""]["count"] == {"before": 1, "after": 1}
    assert changed[""]["halves"] == {"before": [1.5], "after": None}


def test_a_view_in_sql_and_the_command_show_the_state(capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect.duckdb(GOLDEN).sql("SELECT key, count, halves FROM subject").fetchall()
    assert {key: (count, halves) for key, count, halves in found} == SECOND
    with pytest.raises(SystemExit) as ended:
        main(["state", str(GOLDEN), "subject", "--json"])
    assert ended.value.code == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["key"]: (row["count"], row["halves"]) for row in rows} == SECOND


@pytest.mark.parametrize("files", [FILES, FILES[::-1]], ids=["bases first", "deltas first"])
def test_files_can_be_read_together_in_plain_sql(files: list[str]) -> None:
    found = duckdb.execute("SELECT key, count FROM read_parquet($1)", [files]).fetchall()
    assert sorted(found, key=str) == sorted(
        [("", 1), ("ann", 2), ("bob", 1), ("", None), ("ann", 3), ("bob", None), ("ünal", 1)],
        key=str,
    )
    query = "SELECT * FROM read_parquet($1, union_by_name=true) WHERE key = 'ann'"
    assert len(duckdb.execute(query, [files]).fetchall()) == 2
