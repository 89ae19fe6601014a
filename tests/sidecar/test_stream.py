"""Sidecars that are larger than memory: written in pages, and read and merged as streams."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from beam_ckpt.errors import CheckpointTooLargeError, InvalidCheckpointError
from beam_ckpt.manifest import SidecarEntry
from beam_ckpt.sidecar import (
    CellColumn,
    PageStream,
    SidecarHeader,
    encode_pages,
    encode_sidecar,
    read_chain,
    sidecar_schema,
    stream_chain,
)
from beam_ckpt.sidecar._decode import SidecarFile
from beam_ckpt.sidecar._schema import METADATA_KEY
from beam_ckpt.sidecar._seal import sealed
from beam_ckpt.sidecar._stream import merge_pages

CELLS = (
    CellColumn("n", "n", "read_modify_write", "VarIntCoder"),
    CellColumn("items", "items", "bag", "BytesCoder"),
)
ITEMS = pa.list_(pa.field("element", pa.binary()))
SCHEMA = sidecar_schema(pa.binary(), [("n", pa.int64()), ("items", ITEMS)])
PATCHED = SCHEMA.append(pa.field("_patch", pa.binary()))
TINY = {"row_group_rows": 2, "row_group_bytes": 300}
Row = dict[str, object]


def header(kind: str = "full", cells: Sequence[CellColumn] = CELLS) -> SidecarHeader:
    return SidecarHeader("op", 0, None, kind, "BytesCoder", "GlobalWindowCoder", tuple(cells))


def row(key: int, n: int | None, items: list[bytes] | None = None, patch: bytes | None = None):
    return {
        "key": b"%03d" % key,
        "_key": b"%03d" % (key // 2),
        "_window": b"w" * (key % 2),
        "n": n,
        "items": items,
        "_deleted": n is None and patch is None,
        "_updated": 0,
        "_patch": patch,
    }


class Files:
    """Sidecars by path, in pages as small as can be."""

    def __init__(self, **sizes: int) -> None:
        self.data: dict[str, bytes] = {}
        self.sizes = {**TINY, **sizes}

    def write(self, kind: str, rows: Sequence[Row], patched: bool = False) -> list[SidecarEntry]:
        schema = PATCHED if patched else SCHEMA
        table = pa.Table.from_pylist(list(rows), schema=schema)
        found = []
        for data, count in encode_pages([table], header(kind), schema, **self.sizes):
            path = f"state/op/0/{len(self.data)}.parquet"
            self.data[path] = data
            digest = hashlib.sha256(data).hexdigest()
            found.append(
                SidecarEntry(
                    path=path, kind=kind, size_bytes=len(data), rows=count, crc32c=0, sha256=digest
                )
            )
        return found

    def read(self, entry: SidecarEntry) -> bytes:
        return self.data[str(entry.path)]


def together(stream: PageStream) -> pa.Table:
    pages = list(stream.pages)
    assert all(page.schema.names == stream.schema.names for page in pages)
    return pa.concat_tables(pages) if pages else stream.schema.empty_table()


def random_chain(rng: random.Random, files: Files) -> list[SidecarEntry]:
    """A base in several files, and deltas with tombstones and rows that hold what changed."""
    live = {key: True for key in range(60) if rng.random() < 0.7}
    chain = files.write("full", [row(key, key, [b"base"]) for key in sorted(live)])
    assert len(chain) > 1
    for number in range(rng.randrange(5)):
        rows = []
        for key in sorted(rng.sample(range(60), rng.choice([1, 5, 40]))):
            if live.get(key) and rng.random() < 0.5:
                rows.append(row(key, None, [b"more %d" % number], patch=b"\x01\x02"))
            elif live.get(key) and rng.random() < 0.3:
                rows.append(row(key, None))
                live[key] = False
            else:
                rows.append(row(key, 100 * number + key, [b"new"]))
                live[key] = True
        chain += files.write("delta", rows, patched=any(r["_patch"] for r in rows))
    return chain


@pytest.mark.parametrize("seed", range(30))
def test_a_stream_has_the_rows_of_the_chain(seed: int) -> None:
    rng = random.Random(seed)
    files = Files(row_group_rows=rng.choice([1, 2, 7]), file_bytes=rng.choice([1, 500]))
    chain = random_chain(rng, files)
    expected = read_chain(chain, files.read)
    stream = stream_chain(chain, files.read, SCHEMA)
    assert stream.schema == SCHEMA
    found = together(stream)
    assert found.to_pylist() == expected.select(SCHEMA.names).to_pylist()
    # A part of the deltas as one.
    base = sum(entry.kind == "full" for entry in chain)
    if len(chain) > base:
        keep = rng.randrange(base, len(chain))
        merged = stream_chain(chain[keep:], files.read, SCHEMA, keep_tombstones=True)
        schema = merged.schema
        ((data, rows),) = encode_pages(merged.pages, header("delta"), schema, **TINY)
        files.data["state/op/0/merged.parquet"] = data
        entry = chain[keep].model_copy(update={"path": "state/op/0/merged.parquet", "rows": rows})
        again = read_chain([*chain[:keep], entry], files.read)
        assert again.select(SCHEMA.names).to_pylist() == expected.select(SCHEMA.names).to_pylist()


def test_no_more_of_a_file_is_read_than_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(file_bytes=2000)
    chain = files.write("full", [row(key, key, [b"x" * 50]) for key in range(200)])
    assert len(chain) > 4
    reads: list[str] = []
    pages = iter(
        stream_chain(chain, lambda e: reads.append(str(e.path)) or files.read(e), SCHEMA).pages
    )
    assert reads == []
    first = next(pages)
    assert reads == [chain[0].path]
    assert 1 <= len(first) <= 2
    assert sum(len(page) for page in pages) == 200 - len(first)
    assert reads == [entry.path for entry in chain]


def test_row_groups_and_files_are_bounded_by_rows_and_by_bytes() -> None:
    rng = random.Random(0)
    sizes = [rng.choice([1, 10, 2000, 5000]) for _ in range(100)]
    table = pa.Table.from_pylist(
        [row(key, key, [rng.randbytes(size)]) for key, size in enumerate(sizes)], schema=SCHEMA
    )
    pages = [table.slice(start, 13) for start in range(0, 100, 13)]
    limits = {"row_group_rows": 5, "row_group_bytes": 4000, "file_bytes": 10_000}
    files = [
        (SidecarFile(data, where="memory"), rows)
        for data, rows in encode_pages(pages, header(), SCHEMA, **limits)
    ]
    assert len(files) > 10
    found = []
    for file, rows in files:
        of_file = list(file.pages())
        assert sum(map(len, of_file)) == rows
        assert all(len(page) <= 5 for page in of_file)
        assert all(page.nbytes <= 4000 or len(page) == 1 for page in of_file)
        assert sum(page.nbytes for page in of_file) <= 10_000 or len(of_file) == 1
        found += of_file
    assert pa.concat_tables(found).to_pylist() == table.to_pylist()
    assert max(len(page) for page in found) == 5


def test_of_no_rows_there_is_one_file() -> None:
    ((data, rows),) = encode_pages([], header(), SCHEMA)
    assert rows == 0
    assert list(SidecarFile(data, where="memory").pages()) == []


def test_the_limit_is_that_of_a_page_and_is_known_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [row(key, key, [b"x" * 1000]) for key in range(20)]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    data = encode_sidecar(table, header(), row_group_rows=1)
    file = SidecarFile(data, where="memory", max_decoded_bytes=4000)
    assert sum(map(len, file.pages())) == 20
    with pytest.raises(CheckpointTooLargeError, match="20 rows"):
        file.read()
    data = encode_sidecar(table, header(), row_group_rows=10)
    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", None)
    with pytest.raises(CheckpointTooLargeError, match="10 rows"):
        next(SidecarFile(data, where="memory", max_decoded_bytes=4000).pages())


def forged(*pages: Sequence[Row]) -> bytes:
    """A sidecar with these row groups, as somebody may write it who imitates this library."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, SCHEMA, use_dictionary=False, store_schema=False) as writer:
        for page in pages:
            writer.write_table(pa.Table.from_pylist(list(page), schema=SCHEMA))
        writer.add_key_value_metadata({METADATA_KEY: header().to_json()})
    return sealed(memoryview(sink.getvalue()))


@pytest.mark.parametrize("second", [1, 0], ids=["twice", "before"])
def test_row_groups_that_are_not_in_order_are_refused(second: int) -> None:
    good = forged([row(0, 0), row(1, 1)], [row(2, 2)])
    assert sum(map(len, SidecarFile(good, where="x").pages())) == 3
    bad = SidecarFile(forged([row(0, 0), row(1, 1)], [row(second, 2)]), where="forged")
    with pytest.raises(InvalidCheckpointError, match=r"forged.*row groups are not in order"):
        list(bad.pages())
    with pytest.raises(InvalidCheckpointError, match="rows are not in order"):
        bad.read()


def test_files_of_a_base_that_were_swapped_are_refused() -> None:
    files = Files(file_bytes=1)
    chain = files.write("full", [row(key, key) for key in range(6)])
    assert len(chain) == 3
    swapped = [chain[1], chain[0], chain[2]]
    with pytest.raises(InvalidCheckpointError, match="not in the order of their keys"):
        list(stream_chain(swapped, files.read, SCHEMA).pages)


def test_pages_out_of_order_are_refused() -> None:
    tables = [pa.Table.from_pylist([row(key, key)], schema=SCHEMA) for key in (4, 2)]
    with pytest.raises(InvalidCheckpointError, match="not in the order of their keys"):
        list(merge_pages([PageStream(SCHEMA, tables)], SCHEMA).pages)


def test_cells_that_came_and_went_since_a_file_was_written() -> None:
    """The base has `items`, the delta does not, and what is asked for has another one."""
    files = Files()
    chain = files.write("full", [row(0, 1, [b"a"]), row(2, 2, [b"b"])])
    wanted = sidecar_schema(pa.binary(), [("fresh", pa.string()), ("n", pa.int64())])
    newer = pa.Table.from_pylist([{**row(2, 3), "fresh": "new"}], schema=wanted)
    stream = stream_chain(
        chain, files.read, wanted, newer=[PageStream(wanted, [newer])], keep_tombstones=False
    )
    found = together(stream)
    assert found.schema.names == wanted.names
    assert found.select(["fresh", "n"]).to_pylist() == [
        {"fresh": None, "n": 1},
        {"fresh": "new", "n": 3},
    ]
    cells = (CellColumn("fresh", "fresh", "read_modify_write", "StrUtf8Coder"), CELLS[0])
    ((_, rows),) = encode_pages([found], header("full", cells), wanted)
    assert rows == 2


def test_what_a_row_changes_goes_by_the_cells_that_are_asked_for() -> None:
    files = Files()
    chain = files.write("full", [row(0, 1, [b"a"]), row(2, 2, [b"b"])])
    chain += files.write("delta", [row(0, None, [b"more"], patch=b"\x01\x02")], patched=True)
    wanted = sidecar_schema(pa.binary(), [("fresh", pa.string()), ("items", ITEMS)])
    found = together(stream_chain(chain, files.read, wanted))
    assert found["items"].to_pylist() == [[b"a", b"more"], [b"b"]]
    assert found["fresh"].to_pylist() == [None, None]
    newer = pa.Table.from_pylist([{**row(0, 3, [b"c"]), "fresh": "x"}], schema=wanted)
    merged = stream_chain(
        chain[1:], files.read, wanted, newer=[PageStream(wanted, [newer])], keep_tombstones=True
    )
    assert merged.schema.names == [*wanted.names, "_patch"]
    assert together(merged)["_patch"].to_pylist() == [None]


def test_rows_of_other_types_are_not_written() -> None:
    other = sidecar_schema(pa.binary(), [("n", pa.string()), ("items", ITEMS)])
    page = pa.Table.from_pylist([{**row(0, 1), "n": "text"}], schema=other)
    with pytest.raises(InvalidCheckpointError, match="string"):
        list(encode_pages([page], header(), SCHEMA))
