from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_ckpt.errors import InvalidCheckpointError, UnsupportedFormatError
from beam_ckpt.transforms.snapshot import (
    APPEND,
    KEEP,
    REPLACE,
    CarriedOutput,
    SavedTimer,
    SnapshotRecord,
)

names = st.text(max_size=20)
times = st.integers(-(2**63), 2**63 - 1)
encoded = st.binary(max_size=20) | st.binary(min_size=120, max_size=300)
records = st.builds(
    SnapshotRecord,
    key=encoded,
    window=encoded,
    deleted=st.booleans(),
    updated=times,
    cells=st.lists(st.none() | encoded | st.lists(encoded, max_size=4).map(tuple), max_size=5).map(
        tuple
    ),
    timers=st.lists(
        st.builds(
            SavedTimer,
            family=names,
            tag=names,
            domain=st.sampled_from(["event", "processing"]),
            fire=times,
            output=st.none() | times,
        ),
        max_size=3,
    ).map(tuple),
    carried=st.lists(
        st.builds(
            CarriedOutput, tag=st.none() | names, timestamp=times, window=encoded, value=encoded
        ),
        max_size=3,
    ).map(tuple),
)


@st.composite
def patched(draw: st.DrawFn) -> SnapshotRecord:
    """A record that holds only what changed."""
    record = draw(records.filter(lambda r: len(r.cells) and not r.deleted))
    patch, cells = bytearray(), []
    for cell in record.cells:
        code = draw(st.sampled_from([REPLACE, KEEP] + [APPEND] * isinstance(cell, tuple)))
        kept: tuple[()] | None = () if isinstance(cell, tuple) else None
        patch.append(code)
        cells.append(kept if code == KEEP else cell)
    return replace(record, cells=tuple(cells), patch=bytes(patch) if any(patch) else None)


records = records | patched()


@given(records)
def test_a_record_comes_back_as_it_was(record: SnapshotRecord) -> None:
    assert SnapshotRecord.from_bytes(record.to_bytes()) == record


@pytest.mark.parametrize("size", [0, 1, 62, 63, 64, 126, 127, 128, 16383, 16384, 2**21])
def test_lengths_around_each_size_of_a_varint_come_back(size: int) -> None:
    value = bytes(size)
    record = SnapshotRecord(value, value, False, 0, (value, (value, b"")), (), ())
    assert SnapshotRecord.from_bytes(record.to_bytes()) == record


def test_no_value_an_empty_value_and_an_empty_list_are_three_things() -> None:
    record = SnapshotRecord(b"", b"", False, 0, (None, b"", ()), (), ())
    assert SnapshotRecord.from_bytes(record.to_bytes()).cells == (None, b"", ())


@given(records, st.data())
def test_a_cut_record_is_refused(record: SnapshotRecord, data: st.DataObject) -> None:
    whole = record.to_bytes()
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(InvalidCheckpointError, match="malformed"):
        SnapshotRecord.from_bytes(cut)


@given(records, st.binary(min_size=1, max_size=5))
def test_bytes_after_a_record_are_refused(record: SnapshotRecord, rest: bytes) -> None:
    with pytest.raises(InvalidCheckpointError, match="left over"):
        SnapshotRecord.from_bytes(record.to_bytes() + rest)


@given(records, st.data())
def test_a_changed_record_is_refused_or_is_another_record(
    record: SnapshotRecord, data: st.DataObject
) -> None:
    changed = bytearray(record.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = SnapshotRecord.from_bytes(bytes(changed))
    except InvalidCheckpointError:
        return
    assert found.to_bytes() == changed


@given(st.binary(max_size=60), st.integers(0, 17))
def test_any_bytes_are_refused_or_are_a_record(tail: bytes, flags: int) -> None:
    data = bytes((1, flags)) + tail
    try:
        found = SnapshotRecord.from_bytes(data)
    except InvalidCheckpointError:
        return
    assert found.to_bytes() == data


@pytest.mark.parametrize(
    "lie",
    [
        b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # cells
        b"\x01\xfe\xff\xff\xff\xff\xff\xff\xff\x7f",  # items of a list
        b"\x01\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # bytes of a value
    ],
    ids=["cells", "items", "bytes"],
)
def test_a_count_that_the_bytes_cannot_hold_costs_no_memory(lie: bytes) -> None:
    data = b"\x01\x00" + bytes(8) + b"\x00\x00" + lie
    tracemalloc.start()
    try:
        with pytest.raises(InvalidCheckpointError):
            SnapshotRecord.from_bytes(data)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_an_endless_length_is_refused() -> None:
    with pytest.raises(InvalidCheckpointError, match="more than 63 bits"):
        SnapshotRecord.from_bytes(b"\x01\x00" + bytes(8) + b"\xff" * 1000)


def test_a_record_of_a_later_format_is_named() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"the row of key x has format 2.*reads.*1"):
        SnapshotRecord.from_bytes(b"\x02abc", where="the row of key x")


def test_a_time_beyond_64_bits_is_refused_when_written() -> None:
    with pytest.raises(OverflowError):
        SnapshotRecord(b"", b"", False, 2**63, (), (), ()).to_bytes()


WHOLE = SnapshotRecord(b"k", b"", False, 1, (b"one", (b"a",), b"old"), (), ())


def test_what_changed_stands_on_what_was_before() -> None:
    patch = bytes((KEEP, APPEND, REPLACE))
    record = SnapshotRecord(b"k", b"", False, 2, (None, (b"b",), b"new"), (), (), patch)
    assert record.onto(WHOLE) == replace(record, cells=(b"one", (b"a", b"b"), b"new"), patch=None)
    cleared = replace(record, updated=3, cells=(None, (), None), patch=bytes((KEEP, REPLACE, KEEP)))
    both = cleared.onto(record)
    assert both == replace(cleared, cells=(None, (), b"new"), patch=bytes((KEEP, REPLACE, REPLACE)))
    assert both.onto(WHOLE) == cleared.onto(record.onto(WHOLE))
    assert record.onto(None) == record


@pytest.mark.parametrize(
    ("cells", "patch", "flags"),
    [
        ((b"x", ()), bytes((KEEP, REPLACE)), 0),
        ((b"", ()), bytes((KEEP, REPLACE)), 0),
        ((b"x", (b"y",)), bytes((REPLACE, KEEP)), 0),
        ((b"x", ()), bytes((APPEND, REPLACE)), 0),
        ((b"x", ()), bytes((REPLACE, 3)), 0),
        ((b"x", ()), bytes((REPLACE, REPLACE)), 0),
        ((None, ()), bytes((KEEP, KEEP)), 1),
    ],
)
def test_a_patch_that_none_could_be_is_refused(
    cells: tuple[bytes | tuple[bytes, ...] | None, ...], patch: bytes, flags: int
) -> None:
    record = SnapshotRecord(b"k", b"", bool(flags), 0, cells, (), (), patch)
    with pytest.raises(InvalidCheckpointError, match="its patch is none of these cells'"):
        SnapshotRecord.from_bytes(record.to_bytes())
