from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_ckpt.sidecar._thrift import read_struct


def test_a_parquet_footer_is_read_as_arrow_reads_it() -> None:
    sink = io.BytesIO()
    rows = pa.table({"n": list(range(1000)), "text": ["x"] * 1000})
    pq.write_table(rows, sink, row_group_size=300)
    data = sink.getvalue()
    size = int.from_bytes(data[-8:-4], "little")
    footer, end = read_struct(data[-8 - size : -8], 0)
    assert end == size
    metadata = pq.read_metadata(io.BytesIO(data))
    groups = footer[4]
    assert footer[3] == metadata.num_rows == 1000
    assert isinstance(groups, list)
    assert [group[3] for group in groups if isinstance(group, dict)] == [300, 300, 300, 100]
    for i, group in enumerate(groups):
        assert isinstance(group, dict)
        for j, chunk in enumerate(group[1]):  # type: ignore[arg-type]
            expected = metadata.row_group(i).column(j)
            column = chunk[3]  # type: ignore[index,call-overload]
            assert column[3] == [expected.path_in_schema.encode()]
            assert column[6] == expected.total_uncompressed_size
            assert column[7] == expected.total_compressed_size
            assert column[9] == expected.data_page_offset


@given(st.binary(max_size=200))
def test_any_bytes_are_a_struct_or_refused(data: bytes) -> None:
    try:
        fields, end = read_struct(data, 0)
    except ValueError:
        return
    assert isinstance(fields, dict)
    assert data[end - 1] == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "ends too early"),
        (b"\x15", "ends too early"),
        (b"\x18\x7f", "ends too early"),
        (b"\x19\xf5\xff\xff\xff\xff\x0f", "ends too early"),
        (b"\x16" + b"\xff" * 11, "more than 64 bits"),
        (b"\x1c" * 100, "nested too deeply"),
        (b"\x19\x19" * 100, "nested too deeply"),
        (b"\x17\x00\x00\x00\x00\x00\x00\x00\x00", "unknown kind 7"),
    ],
)
def test_malformed_bytes_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_struct(data, 0)
