"""The commands that ask what is in the state, on checkpoints that real pipelines wrote."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from beam_ckpt import cli, inspect
from beam_ckpt.cli_query import _csv_line
from beam_ckpt.keygroups import key_group


def beam_ckpt(*arguments: object) -> int:
    """Runs the command in this process; returns the exit status."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def json_lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def damaged(root: Path, tmp_path: Path) -> Path:
    """A flipped bit in a file of the last key group of `totals`: found out when it is read."""
    store = Path(shutil.copytree(root, tmp_path / "damaged"))
    for path in last_group(store).iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
    return store


def last_group(store: Path) -> Path:
    """The folder of the last key group that has one of its own."""
    return max((store / "state" / "totals").glob("[0-9]*"))


# --- timers -----------------------------------------------------------------------------------


def test_timers_are_listed_the_earliest_first(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beam_ckpt("timers", root, "totals", "--json") == 0
    found = json_lines(capsys.readouterr().out)
    assert [timer["key"] for timer in found] == ["eve", "ada", "joe"]
    assert found[0] == {
        "fire": "1970-01-01T00:17:10Z", "key": "eve", "family": "flush", "tag": "",
        "domain": "event",
    }  # fmt: skip
    assert beam_ckpt("timers", root, "totals", "--limit", 1) == 0
    captured = capsys.readouterr()
    assert "eve" in captured.out
    assert "ada" not in captured.out
    assert "more with --limit" in captured.err


def test_timers_of_one_key_and_of_an_operator_without(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beam_ckpt("timers", root, "totals", "--key", "joe", "--at", 2, "--json") == 0
    assert [timer["key"] for timer in json_lines(capsys.readouterr().out)] == ["joe"]
    assert beam_ckpt("timers", root, "pairs") == 0
    assert "no pending timers" in capsys.readouterr().out


# --- history ----------------------------------------------------------------------------------


def test_history_of_a_key(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beam_ckpt("history", root, "totals", "bob", "--json") == 0
    found = json_lines(capsys.readouterr().out)
    assert [(row["id"], row["present"], row["total"]) for row in found] == [
        (1, True, 2), (2, False, None), (3, False, None),
    ]  # fmt: skip
    assert beam_ckpt("history", root, "totals", "ada", "--cell", "total") == 0
    out = capsys.readouterr().out
    assert "11" in out
    assert "recent" not in out


def test_history_of_a_key_of_several_parts(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beam_ckpt("history", root, "pairs", '["ada", 0]', "--json") == 0
    assert [row["seen"] for row in json_lines(capsys.readouterr().out)] == [None, 1, 1]


def test_state_takes_a_key_of_several_parts_and_reads_its_group_alone(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beam_ckpt("state", damaged, "pairs", "--key", '["ada", 0]', "--json") == 0
    (found,) = json_lines(capsys.readouterr().out)
    assert found["seen"] == 1
    whole = next(
        key
        for key in ("ada", "eve", "joe")
        if key_group(key.encode(), 4) != int(last_group(damaged).name)
    )
    assert beam_ckpt("state", damaged, "totals", "--key", whole, "--json") == 0


# --- diff -------------------------------------------------------------------------------------


def test_diff_names_what_changed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beam_ckpt("diff", root, 1, 2, "totals") == 0
    out = capsys.readouterr().out
    assert "1 added, 1 removed, 1 changed" in out
    assert "1 → 11" in out
    assert "changed" in out, "not cut"
    assert beam_ckpt("diff", root, 1, 2, "--json") == 0
    rows = json_lines(capsys.readouterr().out)
    assert {row["operator"] for row in rows} == {"totals", "pairs", "per window"}
    (bob,) = [row for row in rows if row["key"] == "bob"]
    assert (bob["change"], bob["total"]) == ("removed", {"before": 2, "after": None})


def test_diff_of_a_checkpoint_with_itself_is_nothing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beam_ckpt("diff", root, 3, 3, "--json") == 0
    assert capsys.readouterr().out == ""


def test_windows_are_told_apart(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beam_ckpt("state", root, "per window", "--key", "odd", "--at", 2, "--json") == 0
    rows = json_lines(capsys.readouterr().out)
    assert sorted(str(row["_window_start"]) for row in rows) == [
        "1969-12-31T23:51:40Z", "1970-01-01T00:00:00Z",
    ]  # fmt: skip
    assert beam_ckpt("diff", root, 1, 2, "per window") == 0
    assert "window_start" in capsys.readouterr().out
    assert beam_ckpt("timers", root, "per window", "--json") == 0
    assert all("_window_end" in row for row in json_lines(capsys.readouterr().out))


# --- sql --------------------------------------------------------------------------------------


def test_sql_over_the_operators(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = "SELECT key, total, recent FROM totals WHERE total > 3 ORDER BY key"
    assert beam_ckpt("sql", root, query, "--json") == 0
    found = json_lines(capsys.readouterr().out)
    assert [(row["key"], row["total"]) for row in found] == [("ada", 11), ("joe", 4)]
    assert beam_ckpt("sql", root, "SELECT count(*) AS n FROM totals", "--at", 1) == 0
    assert "3" in capsys.readouterr().out
    assert beam_ckpt("sql", root, "SELECT * FROM range(1000) t(i)", "--limit", 5) == 0
    captured = capsys.readouterr()
    assert "5 rows shown" in captured.err
    assert "17" not in captured.out


def test_a_statement_without_a_result_is_no_error(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beam_ckpt("sql", root, "SET threads = 1") == 0
    captured = capsys.readouterr()
    assert captured.out in ("", "no rows\n"), "by the version of DuckDB"
    assert captured.err == ""


def test_a_bad_query_is_wrong_usage_and_says_what_duckdb_says(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for query, word in (
        ("SELEC 1", "Parser Error"), ("SELECT * FROM total", "totals"),
        ("SELECT totl FROM totals", "total"), ("", "no statement"),
        (" ; -- nothing", "no statement"),
    ):  # fmt: skip
        assert beam_ckpt("sql", root, query) == 2
        captured = capsys.readouterr()
        assert word in captured.err
        assert captured.out == ""


def test_a_damaged_file_under_a_query_is_damage_not_a_bad_query(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beam_ckpt("sql", damaged, "SELECT sum(total) FROM totals") == 1
    assert "state/totals/" in capsys.readouterr().err
    assert beam_ckpt("sql", damaged, "SELECT sum(seen) FROM pairs") == 0


def test_without_duckdb_it_says_how_to_get_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert beam_ckpt("sql", root, "SELECT 1") == 2
    assert "beam-ckpt[sql]" in capsys.readouterr().err
    with pytest.raises(ImportError, match=r"pip install 'beam-ckpt\[sql\]'"):
        inspect.duckdb(root)


def test_on_a_narrow_terminal_values_are_folded_and_not_cut(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for command in (
        ("state", root, "totals"), ("history", root, "totals", "ada"), ("timers", root, "totals"),
        ("diff", root, 1, 3), ("sql", root, "SELECT * FROM totals"),
    ):  # fmt: skip
        assert beam_ckpt(*command) == 0
        out = capsys.readouterr().out
        assert "…" not in out, command
        assert len(max(out.splitlines(), key=len)) <= 60, command


# --- export -----------------------------------------------------------------------------------


def test_export_as_parquet_is_the_same_table(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "totals.parquet"
    assert beam_ckpt("export", root, "totals", "--format", "parquet", "-o", file) == 0
    read, expected = pq.read_table(file), inspect.state(root, "totals", untyped="json")
    assert read.schema.names == expected.schema.names
    by_sql = duckdb.sql(f"SELECT key, total FROM '{file}' ORDER BY key").fetchall()
    assert by_sql == [("ada", 11), ("eve", 3), ("joe", 4)]
    assert sorted(map(str, read.to_pylist())) == sorted(map(str, expected.to_pylist()))


def test_export_as_json_is_what_state_prints(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "beam_ckpt.cli", "export", root, "totals"],
        capture_output=True,
        text=True,
        check=True,
    )
    exported = {str(row["key"]): row for row in json_lines(done.stdout)}
    assert beam_ckpt("state", root, "totals", "--json", "--limit", 0) == 0
    for row in json_lines(capsys.readouterr().out):
        assert row.items() <= exported.pop(str(row["key"])).items()
    assert exported == {}


def test_export_as_csv_is_read_by_others(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "totals.csv"
    assert beam_ckpt("export", root, "totals", "-f", "csv", "-o", file) == 0
    with file.open(newline="", encoding="utf-8") as opened:
        rows = {row["key"]: row for row in csv.DictReader(opened)}
    assert rows["ada"]["total"] == "11"
    assert sorted(json.loads(rows["ada"]["recent"])) == [1, 10]
    assert duckdb.sql(f"SELECT sum(total) FROM read_csv('{file}')").fetchall() == [(18,)]


def test_nothing_and_the_empty_text_are_told_apart_in_csv() -> None:
    assert _csv_line([None, "", 'a"b\n', 1.5, True, ["x"]]) == (
        b',"","a""b\n",1.5,true,"[""x""]"\r\n'
    )


def test_an_export_that_fails_leaves_no_file(
    damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    for format in ("parquet", "json", "csv"):
        file = folder / f"totals.{format}"
        assert beam_ckpt("export", damaged, "totals", "-f", format, "-o", file) == 1
        assert "state/totals/" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_what_an_export_has_printed_before_it_met_damage_is_whole_rows(
    damaged: Path, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert beam_ckpt("export", root, "totals") == 0
    whole = capfd.readouterr().out.splitlines()
    assert beam_ckpt("export", damaged, "totals") == 1
    captured = capfd.readouterr()
    printed = captured.out.splitlines()
    assert 0 < len(printed) < len(whole)
    assert printed == whole[: len(printed)]
    assert "state/totals/" in captured.err


def test_export_replaces_a_file_only_when_told(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "totals.json"
    file.write_text("mine")
    assert beam_ckpt("export", root, "totals", "-o", file) == 2
    assert file.read_text() == "mine"
    assert beam_ckpt("export", root, "totals", "-o", file, "--force") == 0
    assert len(json_lines(file.read_text())) == 3


def test_an_operator_without_state_exports_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = inspect._duckdb.StateView
    monkeypatch.setattr(view, "schema", pa.schema([("key", pa.null())]))
    monkeypatch.setattr(view, "batches", lambda self: iter(()))
    for format in ("parquet", "json", "csv"):
        assert beam_ckpt("export", root, "totals", "-f", format, "-o", tmp_path / format) == 0
    assert (tmp_path / "csv").read_bytes() == b'"key"\r\n'
    assert pq.read_table(tmp_path / "parquet").num_rows == 0


# --- exit statuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("timers", "{root}/nothing", "totals"), 3),
        (("timers", "{root}", "nobody"), 3),
        (("timers", "{root}", "totals", "--at", "9"), 3),
        (("history", "{root}", "nobody", "ada"), 3),
        (("history", "{root}", "totals", "ada", "--cell", "nothing"), 3),
        (("history", "{root}", "pairs", "ada"), 2),
        (("state", "{root}", "pairs", "--key", '["ada", 1, 2]'), 2),
        (("diff", "{root}", "1", "9"), 3),
        (("diff", "{root}", "1", "2", "nobody"), 3),
        (("diff", "{root}", "1"), 2),
        (("sql", "{root}/nothing", "SELECT 1"), 3),
        (("export", "{root}", "nobody"), 3),
        (("export", "{root}", "totals", "-f", "xml"), 2),
        (("export", "{root}", "totals", "-f", "parquet"), 2),
        (("export", "{root}", "totals", "-o", "{root}/no/such/folder/f"), 2),
    ],
)
def test_exit_statuses_mean_something(
    root: Path, arguments: tuple[str, ...], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beam_ckpt(*(argument.format(root=root) for argument in arguments)) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err != ""


def test_help_lists_the_queries(capsys: pytest.CaptureFixture[str]) -> None:
    assert beam_ckpt("--help") == 0
    out = capsys.readouterr().out
    for name in ("timers", "history", "diff", "sql", "export"):
        assert name in out
