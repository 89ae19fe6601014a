"""Rows of a file that key groups share: as if the group had them in a file of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from beam_ckpt.errors import CheckpointTooLargeError
from beam_ckpt.sidecar import (
    SidecarHeader,
    decode_sidecar,
    encode_sidecar,
    merge_newest_first,
    sidecar_schema,
)
from beam_ckpt.sidecar._decode import SidecarFile
from beam_ckpt.sidecar._schema import CellColumn

REPLACE, KEEP, APPEND = 0, 1, 2
CELLS = [("n", pa.int64()), ("items", pa.list_(pa.int64())), ("word", pa.string())]
SCHEMA = sidecar_schema(pa.binary(), CELLS)
HEADER = SidecarHeader(
    "op",
    None,
    None,
    "delta",
    "BytesCoder",
    "GlobalWindowCoder",
    tuple(CellColumn(name, name, "bag", "VarIntCoder") for name, _ in CELLS),
)
TOLD_APART_BY = ["_key", "_window", "_deleted"]
#: Rows of each key group; one has a single one, and the keys of none come after those before it.
ROWS = {2: 5, 5: 1, 7: 4, 11: 13}


def rows_of(group: int, patched: bool) -> pa.Table:
    rows, patches = [], []
    for i in range(ROWS[group]):
        codes = [(REPLACE,) * 3, (KEEP, APPEND, REPLACE), (REPLACE, KEEP, KEEP)][i % 3]
        deleted = codes == (REPLACE,) * 3 and i % 2 == 1
        values = [i * group, [i] * (i % 4) or None, f"{group} {i}"]
        row = dict(zip(("n", "items", "word"), values, strict=True))
        for (name, _), code in zip(CELLS, codes, strict=True):
            if deleted or (patched and code == KEEP):
                row[name] = None
        key = b"%02d of %d" % (i // 2, group)
        common = {"key": key, "_key": key, "_window": b"%d" % (i % 2), "_updated": i}
        rows.append({**row, **common, "_deleted": deleted})
        patches.append(bytes(codes) if any(codes) else None)
    made = pa.Table.from_pylist(rows, schema=SCHEMA)
    return made.append_column("_patch", pa.array(patches, pa.binary())) if patched else made


def slices() -> Iterator[tuple[int, tuple[int, int]]]:
    first = 0
    for group, count in ROWS.items():
        yield group, (first, count)
        first += count


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("row_group_rows", [1, 2, 3, 4, 5, 6, 7, 100])
@pytest.mark.parametrize("columns", [None, ["items"], ["key", "word", "n"], ["key"], []])
def test_a_slice_is_what_a_file_of_its_rows_would_be(
    columns: list[str] | None, row_group_rows: int, patched: bool
) -> None:
    """Wherever the borders of row groups are, and whichever columns are asked for."""
    together = pa.concat_tables([rows_of(group, patched) for group in ROWS])
    data = encode_sidecar(together, HEADER, row_group_rows=row_group_rows)
    groups = pq.ParquetFile(pa.BufferReader(data)).num_row_groups
    assert groups == -(-len(together) // row_group_rows)
    for group, rows in slices():
        alone = encode_sidecar(rows_of(group, patched), replace(HEADER, key_group=group))
        expected = decode_sidecar(alone, where="a test", columns=columns)[1]
        found = decode_sidecar(data, where="a test", columns=columns, rows=rows)[1]
        assert found.schema == expected.schema
        assert found.to_pylist() == expected.to_pylist()
        (page,) = SidecarFile(data, where="a test", columns=columns, rows=rows).pages()
        assert page.to_pylist() == expected.to_pylist()
        for key in {*expected["_key"].to_pylist(), b"of nobody"}:
            one = decode_sidecar(data, where="a test", columns=columns, rows=rows, key=key)[1]
            of_key = [row for row in expected.to_pylist() if row["_key"] == key]
            assert one.to_pylist() == of_key


@pytest.mark.parametrize("columns", [["items"], ["key", "word", "n"], ["word"]])
def test_what_a_slice_says_of_cells_is_the_same_whichever_are_asked_for(columns: list[str]) -> None:
    together = pa.concat_tables([rows_of(group, True) for group in ROWS])
    data = encode_sidecar(together, HEADER, row_group_rows=3)
    for group, rows in slices():
        base = rows_of(group, False)
        some, every = (
            merge_newest_first(
                [
                    decode_sidecar(data, where="a test", columns=chosen, rows=rows)[1],
                    base if chosen is None else base.select([*chosen, *TOLD_APART_BY]),
                ]
            )
            for chosen in (columns, None)
        )
        assert some.select(columns).to_pylist() == every.select(columns).to_pylist()


def test_only_the_row_groups_of_a_slice_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    together = pa.concat_tables([rows_of(group, False) for group in ROWS])
    data = encode_sidecar(together, HEADER, row_group_rows=3)
    read: list[list[int]] = []
    real = pq.ParquetFile.read_row_groups

    def noting(self: pq.ParquetFile, groups: list[int], **kwargs: object) -> pa.Table:
        read.append(list(groups))
        return real(self, groups, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", noting)
    for _, rows in slices():
        decode_sidecar(data, where="a test", rows=rows)
    assert read == [[0, 1], [1], [2, 3], [3, 4, 5, 6, 7]]


def test_the_limit_is_for_the_row_groups_of_the_slice() -> None:
    together = pa.concat_tables([rows_of(group, False) for group in ROWS])
    data = encode_sidecar(together, HEADER, row_group_rows=3)
    small = 3 * 400
    assert len(decode_sidecar(data, where="a test", rows=(5, 1), max_decoded_bytes=small)[1]) == 1
    with pytest.raises(CheckpointTooLargeError):
        decode_sidecar(data, where="a test", rows=(10, 13), max_decoded_bytes=small)
