"""What an operator of a job gets wrong, and what a disk does: one clear message, and a status."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from beam_ckpt import cli, open_store
from beam_ckpt.manifest import (
    CellSpec,
    CheckpointManifest,
    OperatorSnapshotEntry,
    OperatorSpec,
    PartitionSnapshotEntry,
    PipelineIdentity,
    RunIdentity,
    new_checkpoint_id,
)
from beam_ckpt.sidecar import CellColumn, SidecarHeader, encode_pages, sidecar_schema

CELL = CellColumn("text", "text", "read_modify_write", "StrUtf8Coder")
SCHEMA = sidecar_schema(pa.string(), [("text", pa.string())])
ROWS = 60


def beam_ckpt(*arguments: object) -> int:
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def row_groups(texts: list[str], size: int) -> bytes:
    """A sidecar with row groups of so many rows."""
    keys = pa.array([f"k{number:05}" for number in range(len(texts))])
    columns = {
        "key": keys,
        "text": pa.array(texts),
        "_key": keys.cast(pa.binary()),
        "_window": pa.array([b""] * len(texts)),
        "_deleted": pa.array([False] * len(texts)),
        "_updated": pa.array([0] * len(texts)).cast(SCHEMA.field("_updated").type),
    }
    arrays = [columns.get(f.name, pa.nulls(len(texts), f.type)) for f in SCHEMA]
    header = SidecarHeader("words", 0, None, "full", "StrUtf8Coder", "GlobalWindowCoder", (CELL,))
    pages = [pa.table(arrays, schema=SCHEMA)]
    ((data, _),) = encode_pages(pages, header, SCHEMA, row_group_rows=size)
    return data


def publish(root: Path, data: bytes, rows: int) -> None:
    store = open_store(root, key_group_count=1)
    entry = store.write_sidecar(
        operator="words",
        key_group=0,
        boundary=None,
        run_id="run",
        data=data,
        kind="full",
        rows=rows,
    ).model_copy(update={"epoch": 1})
    partition = PartitionSnapshotEntry(partition_id=0, sidecars=(entry,))
    spec = OperatorSpec(
        key_coder="StrUtf8Coder",
        window_coder="GlobalWindowCoder",
        cells={"text": CellSpec(kind=CELL.kind, coder=CELL.coder)},
    )
    store.save(
        CheckpointManifest(
            id=1,
            epoch=1,
            checkpoint_id=new_checkpoint_id(),
            timestamp_ms=1,
            key_group_count=1,
            operators={"words": OperatorSnapshotEntry(partitions=(partition,))},
            run=RunIdentity(generation=store.claim_generation("run"), run_id="run"),
            pipeline=PipelineIdentity(
                operators={"words": spec}, beam_version="2.77.0", python_version="3.11"
            ),
        )
    )
    store.finalize(1)


def damaged_in_the_middle() -> bytes:
    """The column of the cell in the middle one of three row groups is overwritten."""
    data = bytearray(row_groups([f"word {n}" * 20 for n in range(ROWS)], ROWS // 3))
    file = pq.ParquetFile(pa.BufferReader(bytes(data)))
    assert file.num_row_groups == 3
    column = file.metadata.row_group(1).column(SCHEMA.get_field_index("text"))
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    return bytes(data)


@pytest.mark.parametrize("format", ["json", "csv", "parquet"])
def test_a_row_group_that_is_damaged_in_the_middle_of_an_export(tmp_path, capfd, format):
    """Its checksum is right, as when it was damaged before it was written."""
    root, file = tmp_path / "store", tmp_path / "out" / f"words.{format}"
    file.parent.mkdir()
    publish(root, damaged_in_the_middle(), ROWS)
    assert beam_ckpt("export", root, "words", "-f", format, "-o", file) == cli.DAMAGED
    said = capfd.readouterr()
    assert "state/words/" in said.err and "Traceback" not in said.err
    assert list(file.parent.iterdir()) == []


def test_a_huge_cell_is_cut_short_on_a_terminal(tmp_path, capsys):
    huge = "x " * 100_000  # A long word is cut by the table itself.
    publish(tmp_path / "store", row_groups([huge, "small"], 10), 2)
    for arguments in (("state", "words"), ("history", "words", "k00000"), ("sql", "FROM words")):
        command, *rest = arguments
        assert beam_ckpt(command, tmp_path / "store", *rest) == 0
        out = capsys.readouterr().out
        # (A narrow column shows less.)
        assert 0 < out.count("x") <= 200, command
        assert len(out) < 20_000, command


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (("state", "{root}", "total"), "totals"),
        (("state", "{root}", "totals", "--cell", "recnt"), "recent"),
        (("timers", "{root}", "total"), "totals"),
        (("history", "{root}", "total", "ada"), "totals"),
        (("history", "{root}", "totals", "ada", "--cell", "recnt"), "recent"),
        (("diff", "{root}", "1", "2", "pair"), "pairs"),
        (("export", "{root}", "total"), "totals"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest(root, capsys, arguments, nearest):
    assert beam_ckpt(*(part.format(root=root) for part in arguments)) == cli.NOT_FOUND
    captured = capsys.readouterr()
    assert f"Did you mean '{nearest}'?" in captured.err
    assert captured.out == ""
