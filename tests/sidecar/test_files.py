"""Shared files are read once for many key groups, as far as they are kept."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from hashlib import sha256

import pyarrow as pa
import pytest

from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.manifest import SidecarEntry
from beam_ckpt.sidecar import (
    CellColumn,
    SharedRows,
    SidecarHeader,
    encode_sidecar,
    read_chain,
    sidecar_schema,
    stream_chain,
)

HEADER = SidecarHeader(
    operator="totals",
    key_group=None,
    boundary=None,
    kind="full",
    key_coder="BytesCoder",
    window_coder="GlobalWindowCoder",
    cells=(CellColumn("count", "count", "read_modify_write", "VarIntCoder"),),
)
SCHEMA = sidecar_schema(pa.binary(), [("count", pa.int64())])


class Files:
    """Shared files of 100 rows, ten of each of ten key groups; whoever reads them is counted."""

    def __init__(self, *names: str) -> None:
        self.reads = Counter[str]()
        rows = [
            {
                "key": key,
                "count": number,
                "_key": key,
                "_window": b"",
                "_deleted": False,
                "_updated": 0,
            }
            for number in range(100)
            for key in [b"%d-%03d" % (number // 10, number)]
        ]
        self.table = pa.Table.from_pylist(rows, SCHEMA)
        self.data = encode_sidecar(self.table, HEADER)
        self.names = names

    def slice(self, name: str, group: int) -> SidecarEntry:
        return SidecarEntry(
            path=f"state/totals/{name}",
            kind="full",
            rows=10,
            size_bytes=len(self.data),
            crc32c=0,
            sha256=sha256(name.encode()).hexdigest(),
            first_row=10 * group,
            file_rows=100,
            slice_bytes=1,
            origin="0" * 8,
        )

    def read(self, entry: SidecarEntry) -> bytes:
        self.reads[str(entry.path)[-1]] += 1
        return self.data


def test_a_file_is_read_once_for_all_key_groups_however_it_is_read():
    files, kept = Files(), SharedRows()
    for group in range(10):
        entry = files.slice("a", group)
        expected = files.table.slice(10 * group, 10)
        assert kept.of(entry, files.read).equals(expected)
        stream = stream_chain([entry], files.read, SCHEMA, shared=kept)
        assert pa.concat_tables(stream.pages).equals(expected)
    # (One reads all columns there are, the other those of a schema.)
    assert files.reads == {"a": 2}
    for group in range(10):
        key = b"%d-%03d" % (group, 10 * group + 3)
        found = read_chain([files.slice("a", group)], files.read, key=key, shared=kept)
        assert found["count"].to_pylist() == [10 * group + 3]
    assert files.reads == {"a": 2}


def test_columns_are_those_that_are_asked_for():
    files, kept = Files(), SharedRows()
    some = kept.of(files.slice("a", 1), files.read, columns=["key"])
    assert some.column_names == ["key", "_key", "_window", "_deleted"]
    assert kept.of(files.slice("a", 1), files.read).equals(files.table.slice(10, 10))


def test_what_is_kept_is_bounded_by_its_bytes_and_the_oldest_goes_first():
    files = Files()
    kept = SharedRows(max_bytes=files.table.nbytes * 5 // 2)
    for name in "ab", "ba", "ca", "ab":  # b goes for c, and then c for b
        for one in name:
            kept.of(files.slice(one, 0), files.read)
    assert files.reads == {"a": 1, "b": 2, "c": 1}
    assert sum(size for _, size in kept._files.values()) <= files.table.nbytes * 5 // 2


def test_a_file_that_is_too_large_to_be_kept_is_read_each_time():
    files, kept = Files(), SharedRows(max_bytes=1000)
    for group in range(3):
        found = kept.of(files.slice("a", group), files.read)
        assert found.equals(files.table.slice(10 * group, 10))
    assert files.reads == {"a": 3}
    assert not kept._files


def test_another_file_by_the_same_name_is_not_taken_for_it():
    files, kept = Files(), SharedRows()
    entry = files.slice("a", 0)
    kept.of(entry, files.read)
    kept.of(entry.model_copy(update={"sha256": "1" * 64}), files.read)
    assert files.reads == {"a": 2}


def test_what_is_wrong_is_refused_as_it_is_without():
    files, kept = Files(), SharedRows()
    kept.of(files.slice("a", 0), files.read)
    for first, rows in (0, 101), (95, 6), (100, 1):
        wrong = files.slice("a", 0).model_copy(update={"first_row": first, "rows": rows})
        with pytest.raises(InvalidCheckpointError, match="rows"):
            kept.of(wrong, files.read)
    backwards = files.table.take(list(reversed(range(100))))
    files.data = encode_sidecar(backwards, HEADER)
    with pytest.raises(InvalidCheckpointError, match="not in order"):
        kept.of(files.slice("b", 0), files.read)
    files.data = encode_sidecar(files.table, replace(HEADER, key_group=3))
    with pytest.raises(InvalidCheckpointError, match="to be shared"):
        kept.of(files.slice("c", 0), files.read)


def test_nothing_of_it_goes_to_another_process():
    files, kept = Files(), SharedRows()
    kept.of(files.slice("a", 0), files.read)
    assert len(pickle.dumps(kept)) < 200
    there = pickle.loads(pickle.dumps(kept))
    there.of(files.slice("a", 0), files.read)
    assert files.reads == {"a": 2}
