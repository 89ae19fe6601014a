"""A key group's chain as one table, through the one function that everything reads it with."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa
import pytest

from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.manifest import SidecarEntry
from beam_ckpt.sidecar import CellColumn, SidecarHeader, encode_sidecar, read_chain, sidecar_schema

SCHEMA = sidecar_schema(pa.binary(), [("n", pa.int64())])
CELL = CellColumn("n", "n", "read_modify_write", "VarIntCoder")
HEADER = SidecarHeader("op", 0, None, "full", "BytesCoder", "GlobalWindowCoder", (CELL,))


def table(*rows: tuple[bytes, int | None]) -> pa.Table:
    """Rows of key and cell; a cell that is None is a tombstone."""
    return pa.Table.from_pylist(
        [
            {"key": k, "_key": k, "_window": b"", "n": n, "_deleted": n is None, "_updated": 0}
            for k, n in rows
        ],
        schema=SCHEMA,
    )


class Files:
    """Sidecars by path."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def write(self, kind, *rows) -> SidecarEntry:
        path = f"state/op/0/{len(self.data)}.parquet"
        data = self.data[path] = encode_sidecar(table(*rows), HEADER)
        digest = hashlib.sha256(data).hexdigest()
        return SidecarEntry(path=path, kind=kind, size_bytes=len(data), crc32c=0, sha256=digest)

    def read(self, entry: SidecarEntry) -> bytes:
        return self.data[str(entry.path)]


def cells(found: pa.Table) -> dict[bytes, int]:
    return dict(zip(found["_key"].to_pylist(), found["n"].to_pylist(), strict=True))


def test_the_latest_row_of_each_key_counts_and_tombstones_are_gone():
    files = Files()
    chain = [
        files.write("full", (b"a", 1), (b"b", 1), (b"c", 1)),
        files.write("delta", (b"a", None), (b"b", 2)),
        files.write("delta", (b"a", 3), (b"c", None)),
    ]
    assert cells(read_chain(chain, files.read)) == {b"a": 3, b"b": 2}
    assert cells(read_chain(chain[:2], files.read)) == {b"b": 2, b"c": 1}


def test_what_is_damaged_is_named():
    files = Files()
    chain = [files.write("full", (b"a", 1)), files.write("delta", (b"a", 2))]
    files.data[str(chain[0].path)] = b"no Parquet"
    with pytest.raises(InvalidCheckpointError, match=str(chain[0].path)):
        read_chain(chain, files.read)


def test_nothing_else_puts_a_chain_together():
    """Reading in another order, or keeping tombstones, would bring deleted keys back."""
    root = Path(__file__).resolve().parents[2]
    sources = [*(root / "beam_ckpt").rglob("*.py"), *(root / "transforms").rglob("*.py")]
    users = {
        str(path.relative_to(root))
        for path in sources
        if "merge_newest_first(" in path.read_text(encoding="utf-8")
    }
    # (In columns.py it is several records of one key at one boundary.)
    assert users == {
        "beam_ckpt/sidecar/_chain.py",
        "beam_ckpt/sidecar/_merge.py",
        "beam_ckpt/sidecar/_stream.py",
        "transforms/columns.py",
    }
