"""`beam-ckpt` and `beam_ckpt.inspect` over a real store with two checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from beam_ckpt import _rows, cli, inspect, open_store
from beam_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointStorageError,
    IndeterminateError,
    InvalidCheckpointError,
    NoValidCheckpointError,
    StoreUrlError,
)
from beam_ckpt.manifest import (
    CellSpec,
    CheckpointManifest,
    OperatorSnapshotEntry,
    OperatorSpec,
    PartitionSnapshotEntry,
    PipelineIdentity,
    RunIdentity,
    SidecarEntry,
    SourceOffsetEntry,
    new_checkpoint_id,
)
from beam_ckpt.sidecar import CellColumn, SidecarHeader, encode_sidecar, sidecar_schema
from beam_ckpt.store import CheckpointStore

UID = "totals"
CELLS = {
    "count": CellSpec(kind="read_modify_write", coder="VarIntCoder"),
    "recent": CellSpec(kind="bag", coder="StrUtf8Coder"),
    "pickled": CellSpec(kind="read_modify_write", coder="FastPrimitivesCoder"),
}
SCHEMA = sidecar_schema(
    pa.string(),
    [("count", pa.int64()), ("recent", pa.list_(pa.string())), ("pickled", pa.binary())],
)
NEVER_OPENED = b"\x80\x04cos\nsystem\n"  # whoever unpickles it fails
MINUTE = 60_000_000


def row(key: str, count: int | None, minute: int, *, deleted: bool = False) -> dict[str, object]:
    timer = {"family": "flush", "tag": "", "domain": "event", "fire": (minute + 5) * MINUTE}
    return {
        "key": key,
        "count": count,
        "recent": None if count is None else [f"{key}{i}" for i in range(count)],
        "pickled": None if count is None else NEVER_OPENED,
        "_key": key.encode(),
        "_window": b"",
        "_deleted": deleted,
        "_updated": minute * MINUTE,
        "_timers": [timer | {"output": None}] if count else None,
        "_carried": None,
    }


def write(
    store: CheckpointStore, group: int, minute: int, kind: str, rows: list[dict[str, object]]
) -> SidecarEntry:
    header = SidecarHeader(
        operator=UID,
        key_group=group,
        boundary=minute * MINUTE,
        kind=kind,
        key_coder="StrUtf8Coder",
        window_coder="GlobalWindowCoder",
        cells=tuple(CellColumn(n, n, c.kind, c.coder) for n, c in CELLS.items()),
    )
    table = pa.Table.from_pylist(sorted(rows, key=lambda r: str(r["key"])), schema=SCHEMA)
    return store.write_sidecar(
        operator=UID,
        key_group=group,
        boundary=minute * MINUTE,
        run_id="run-1",
        data=encode_sidecar(table, header),
        kind=kind,
        rows=len(rows),
    )


def manifest(
    id: int, minute: int, groups: dict[int, Iterable[SidecarEntry]], parent: str | None = None
) -> CheckpointManifest:
    partitions = tuple(
        PartitionSnapshotEntry(
            partition_id=group,
            sidecars=tuple(e.model_copy(update={"epoch": e.epoch or id}) for e in entries),
        )
        for group, entries in groups.items()
    )
    spec = OperatorSpec(key_coder="StrUtf8Coder", window_coder="GlobalWindowCoder", cells=CELLS)
    return CheckpointManifest(
        id=id,
        epoch=id,
        checkpoint_id=new_checkpoint_id(),
        parent_id=parent,
        timestamp_ms=1_700_000_000_000 + id,
        watermark=minute * MINUTE,
        key_group_count=2,
        operators={UID: OperatorSnapshotEntry(partitions=partitions)},
        run=RunIdentity(generation=1, run_id="run-1"),
        pipeline=PipelineIdentity(
            operators={UID: spec}, beam_version="2.77.0", python_version="3.11"
        ),
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoint 1: ada, bob and eve. Checkpoint 2: ada touched, bob deleted, joe new."""
    root = tmp_path / "ckpt"
    store = open_store(root, key_group_count=2)
    store.claim_generation("run-1")
    base = write(store, 1, 10, "full", [row("ada", 1, 3), row("bob", 2, 4)])
    other = write(store, 0, 10, "full", [row("eve", 3, 5)])
    first = store.save(manifest(1, 10, {0: [other], 1: [base]}))
    store.finalize(1)
    rows = [row("ada", 4, 15), row("bob", None, 16, deleted=True), row("joe", 1, 17)]
    delta = write(store, 1, 20, "delta", rows)
    groups = {p.partition_id: p.sidecars for p in first.operators[UID].partitions}
    groups[1] = (*groups[1], delta)
    store.save(manifest(2, 20, groups, first.checkpoint_id))
    store.finalize(2)
    return root


def beam_ckpt(*arguments: object) -> int:
    """Runs the command in this process; returns the exit status."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def json_lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def damage(path: Path, at: int = -20) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


# --- inspect --------------------------------------------------------------------------------


def test_checkpoints_are_a_table_with_the_declared_schema(root: Path) -> None:
    table = inspect.checkpoints(root)
    assert table.schema == inspect.CHECKPOINTS
    assert table["id"].to_pylist() == [1, 2]
    assert table["phase"].to_pylist() == ["finalized", "finalized"]
    assert table["latest"].to_pylist() == [False, True]
    assert table["boundary"].to_pylist()[1] == datetime(1970, 1, 1, 0, 20, tzinfo=UTC)
    assert table["parent_id"][1].as_py() == table["checkpoint_id"][0].as_py()


def test_operators_are_a_table_with_the_declared_schema(root: Path) -> None:
    table = inspect.operators(root)
    assert table.schema == inspect.OPERATORS
    (found,) = table.to_pylist()
    assert found["operator"] == UID
    assert (found["key_groups"], found["sidecars"], found["deltas"]) == (2, 3, 1)
    assert {"name": "recent", "kind": "bag", "coder": "StrUtf8Coder"} in found["cells"]


def test_state_is_merged_over_the_chain_and_typed(root: Path) -> None:
    table = inspect.state(root, UID)
    assert dict(zip(table["key"].to_pylist(), table["count"].to_pylist(), strict=True)) == {
        "ada": 4,
        "eve": 3,
        "joe": 1,
    }
    assert table.schema.field("count").type == pa.int64()
    assert table.schema.field("recent").type.value_type == pa.string()
    assert "_deleted" not in table.column_names
    assert table["pickled"].to_pylist() == [NEVER_OPENED] * 3


def test_state_at_an_older_checkpoint_is_what_it_was(root: Path) -> None:
    table = inspect.state(root, UID, at=1)
    assert sorted(zip(table["key"].to_pylist(), table["count"].to_pylist(), strict=True)) == [
        ("ada", 1),
        ("bob", 2),
        ("eve", 3),
    ]


def test_latest_is_the_newest_checkpoint_that_is_whole(root: Path) -> None:
    (delta,) = [p for p in root.glob(f"state/{UID}/*/{20 * MINUTE}-*")]
    delta.unlink()
    assert inspect.find_checkpoint(root).id == 1
    assert sorted(inspect.state(root, UID)["key"].to_pylist()) == ["ada", "bob", "eve"]


def test_a_damaged_manifest_is_listed_with_what_its_marker_says(root: Path) -> None:
    damage(root / "manifests" / "000000000002.json")
    listed = inspect.checkpoints(root).to_pylist()
    assert [entry["phase"] for entry in listed] == ["finalized", "invalid"]
    assert listed[1]["boundary"] == datetime(1970, 1, 1, 0, 20, tzinfo=UTC)
    assert listed[1]["problem"]


def test_an_operator_that_is_not_there_is_named_with_those_that_are(root: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no operator 'totale'; it has 'totals'"):
        inspect.state(root, "totale")


def test_a_damaged_sidecar_is_not_read(root: Path) -> None:
    for path in root.glob(f"state/{UID}/00000/*"):
        damage(path)
    with pytest.raises(InvalidCheckpointError, match="state/totals/00000/"):
        inspect.state(root, UID, at=2)


def test_a_store_without_a_usable_checkpoint_raises_the_report(root: Path) -> None:
    for path in root.glob("manifests/*.json"):
        damage(path)
    with pytest.raises(NoValidCheckpointError) as raised:
        inspect.state(root, UID)
    assert raised.value.report is not None
    assert [skipped.id for skipped in raised.value.report.skipped] == [2, 1]


def test_looking_at_a_store_that_is_not_there_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        inspect.checkpoints(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


# --- the command ----------------------------------------------------------------------------


def test_ls_lists_checkpoints(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beam_ckpt("ls", root) == 0
    out = capsys.readouterr().out
    assert "finalized" in out
    assert "latest" in out


def test_ls_as_json_is_one_object_a_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beam_ckpt("ls", root, "--json") == 0
    first, second = json_lines(capsys.readouterr().out)
    assert first["id"] == 1
    assert second["boundary"] == "1970-01-01T00:20:00Z"
    assert second["operators"] == [UID]


def test_show_names_cells_and_coders(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beam_ckpt("show", root) == 0
    out = capsys.readouterr().out
    assert "checkpoint 2" in out
    for word in ("read_modify_write", "StrUtf8Coder", "recent", "3 sidecars (1 deltas)"):
        assert word in out


def test_show_of_one_id_as_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beam_ckpt("show", root, 1, "--json") == 0
    (shown,) = json_lines(capsys.readouterr().out)
    assert shown["id"] == 1
    assert shown["key_group_count"] == 2
    assert shown["beam_version"] == "2.77.0"


def with_offsets(path: Path, partitions: int) -> CheckpointStore:
    """A store whose only checkpoint says from where to read a source."""
    store = open_store(path)
    offsets = {f"topic-{n}[0]": str(1000 + n) for n in range(partitions)}
    manifest = CheckpointManifest(
        checkpoint_id=new_checkpoint_id(),
        id=1,
        epoch=1,
        timestamp_ms=1,
        source_offsets={"events": SourceOffsetEntry(source_type="kafka", offsets=offsets, epoch=1)},
    )
    store.save(manifest)
    store.finalize(1)
    return store


def test_show_says_from_where_to_read_the_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_offsets(tmp_path, 45)
    assert beam_ckpt("show", tmp_path) == 0
    out = capsys.readouterr().out
    assert "source events (kafka)" in out
    assert "topic-0[0]" in out and "1000" in out
    assert "and 5 more: see --json" in out
    assert beam_ckpt("show", tmp_path, "--json") == 0
    (shown,) = json_lines(capsys.readouterr().out)
    source = shown["source_offsets"]["events"]
    assert source["source_type"] == "kafka"
    assert source["offsets"]["topic-44[0]"] == "1044"


def test_state_prints_typed_rows(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beam_ckpt("state", root, UID) == 0
    out = capsys.readouterr().out
    assert "ada0, ada1" in out
    assert "bob" not in out
    assert "checkpoint 2, up to 1970-01-01T00:20:00Z" in out


def test_state_as_json_shows_bytes_as_hex(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beam_ckpt("state", root, UID, "--key", "joe", "--json") == 0
    (found,) = json_lines(capsys.readouterr().out)
    assert found["count"] == 1
    assert found["recent"] == ["joe0"]
    assert json.loads(str(found["pickled"])) == {"undecoded": "0x" + NEVER_OPENED.hex()}
    assert found["_updated"] == "1970-01-01T00:17:00Z"
    timer = {"family": "flush", "tag": "", "domain": "event", "fire": "1970-01-01T00:22:00Z"}
    assert found["_timers"] == [timer | {"output": None}]


def test_state_with_untyped_cells_as_they_are(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beam_ckpt("state", root, UID, "--key", "joe", "--json", "--bytes") == 0
    (found,) = json_lines(capsys.readouterr().out)
    assert found["pickled"] == "0x" + NEVER_OPENED.hex()


def test_state_of_one_cell_at_an_older_checkpoint(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beam_ckpt("state", root, UID, "--at", 1, "--cell", "count", "--json") == 0
    found = json_lines(capsys.readouterr().out)
    assert sorted(map(repr, found)) == sorted(
        repr({"key": key, "count": count}) for key, count in (("ada", 1), ("bob", 2), ("eve", 3))
    )


def test_state_stops_at_the_limit(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beam_ckpt("state", root, UID, "--limit", 2, "--json") == 0
    assert len(json_lines(capsys.readouterr().out)) == 2
    assert beam_ckpt("state", root, UID, "--limit", 0, "--json") == 0
    assert len(json_lines(capsys.readouterr().out)) == 3


def test_what_a_key_holds_does_not_drive_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(tmp_path / "s", key_group_count=2)
    store.save(manifest(1, 1, {0: [write(store, 0, 1, "full", [row("\x1b[2Jada", 1, 0)])]}))
    store.finalize(1)
    assert beam_ckpt("state", tmp_path / "s", UID) == 0
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out
    assert "\\x1b" in out


@pytest.mark.parametrize("wanted", ['["a", 1]', '{"f0": "a", "f1": 1}'])
def test_a_key_of_several_parts_is_found_by_its_json(wanted: str) -> None:
    keys = pa.chunked_array([[{"f0": "a", "f1": 1}, {"f0": "a", "f1": 2}]])
    assert cli._is_key(keys, wanted).to_pylist() == [True, False]


@pytest.mark.parametrize("unit", ["us", "ms"])
def test_a_time_beyond_the_calendar_is_shown_as_a_number(unit: str) -> None:
    scalar = pa.scalar(-(2**62), pa.timestamp(unit, "UTC"))
    assert cli._value(scalar) == f"{-(2**62)} {unit}"


def test_what_is_long_is_cut_short_on_a_terminal() -> None:
    assert str(_rows.shown("x" * 10**6)) == "x" * 200 + "... (1000000 characters)"
    assert str(_rows.shown(list(range(10**6)))).endswith(", 19, ... (1000000 items)")
    assert len(str(_rows.shown({"a": ["y" * 500] * 50}))) < 6_000


def test_what_is_long_within_what_is_long_is_cut_short_as_well() -> None:
    deep: object = "x" * 150
    for _ in range(3):
        deep = [deep] * 30
    for value in (deep, {"a": deep, "b": deep}, {f"field {i}": "x" * 150 for i in range(100)}):
        assert len(_rows.shown(value).plain) < 2_100


def test_a_heading_is_text_whatever_a_cell_is_called() -> None:
    headings = [c.header for c in _rows.table_of(["_updated", "[red]x[/red]", "a\x1b[2J"]).columns]
    assert headings[:2] == ["updated", r"\[red]x\[/red]"]
    assert "\x1b" not in str(headings[2])


def test_validate_says_ok(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beam_ckpt("validate", root) == 0
    assert capsys.readouterr().out.splitlines() == ["1: ok", "2: ok"]


def test_validate_deep_finds_a_flipped_bit_and_exits_with_1(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = root.glob(f"state/{UID}/00000/*")
    damage(path)
    assert beam_ckpt("validate", root) == 0, "sizes are right, and files keep no checksum"
    capsys.readouterr()
    assert beam_ckpt("validate", root, "--deep", "--json") == 1
    found = json_lines(capsys.readouterr().out)
    assert [entry["valid"] for entry in found] == [False, False]
    assert path.name in str(found[0]["issues"])


def test_validate_of_one_id_looks_at_that_only(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "manifests" / "000000000001.json").write_bytes(b"{}")
    assert beam_ckpt("validate", root, 2) == 0
    assert beam_ckpt("validate", root, 1) == 1
    assert "1: " in capsys.readouterr().out


def test_validate_looks_at_the_pointer_too(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(root / "latest.json", at=5)
    assert beam_ckpt("validate", root) == 1
    assert "latest.json: " in capsys.readouterr().out


def test_an_unfinished_checkpoint_is_no_damage(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_store(root).save(manifest(3, 30, {}))
    assert beam_ckpt("validate", root) == 0
    assert "never finalized" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("ls", "{root}/nothing"), 3),
        (("show", "{root}", "7"), 3),
        (("validate", "{root}", "7"), 3),
        (("state", "{root}", "nobody"), 3),
        (("state", "{root}", UID, "--cell", "nothing"), 3),
        (("ls", "{root}/latest.json"), 2),
        (("ls", "nosuchprotocol://x"), 2),
        (("ls",), 2),
        (("state", "{root}", UID, "--limit", "few"), 2),
    ],
)
def test_exit_statuses_mean_something(
    root: Path, arguments: tuple[str, ...], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beam_ckpt(*(argument.format(root=root) for argument in arguments)) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err != ""


def test_no_usable_checkpoint_is_exit_status_1(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in root.glob("manifests/*.json"):
        damage(path)
    assert beam_ckpt("state", root, UID) == 1
    assert "none of the 2 checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CheckpointNotFoundError("x"), cli.NOT_FOUND),
        (CheckpointStorageError("x"), cli.STORAGE),
        (IndeterminateError("x"), cli.STORAGE),
        (StoreUrlError("x"), cli.USAGE),
        (InvalidCheckpointError("x"), cli.DAMAGED),
        (NoValidCheckpointError("x"), cli.DAMAGED),
    ],
)
def test_each_kind_of_error_has_its_exit_status(error: CheckpointError, status: int) -> None:
    assert cli._status(error) == status


def test_the_installed_command_runs(root: Path) -> None:
    command = Path(sys.executable).with_name("beam-ckpt")
    done = subprocess.run([command, "ls", root], capture_output=True, text=True, check=True)
    assert "finalized" in done.stdout
    help_text = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    for name in ("ls", "show", "validate", "state", "Exit status"):
        assert name in help_text.stdout


@pytest.mark.parametrize("info", cli.app.registered_commands, ids=lambda i: i.callback.__name__)
def test_help_says_what_the_docstring_says(info: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A word in brackets is no markup, and a line of the source is no line of its own."""
    assert info.callback is not None
    name = info.name or info.callback.__name__.replace("_", "-")
    assert beam_ckpt(name, "--help") == 0
    printed = " ".join(capsys.readouterr().out.split())
    for paragraph in (info.callback.__doc__ or "").split("\n\n"):
        assert " ".join(paragraph.replace("`", "").split()) in printed
