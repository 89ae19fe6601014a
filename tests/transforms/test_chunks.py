"""Records in chunks: no element between two stages is larger than a runner takes."""

from __future__ import annotations

import random
import resource
import uuid

import apache_beam as beam
import pytest
from apache_beam.coders import BytesCoder, StrUtf8Coder
from apache_beam.transforms.userstate import BagStateSpec
from apache_beam.transforms.window import GlobalWindows, TimestampedValue

from beam_ckpt import open_store
from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.testing.driven import DrivenCheckpoints, restored
from beam_ckpt.testing.fake_runner import Chaos, run_faked
from beam_ckpt.testing.generated import Add, Program, dofn
from beam_ckpt.transforms import CheckpointedParDo, Checkpoints
from beam_ckpt.transforms._limits import Limits
from beam_ckpt.transforms.chunks import Chunks, cut, is_chunk
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.keyed_state.operator import KeyedOperator
from beam_ckpt.transforms.snapshot import SnapshotRecord
from beam_ckpt.transforms.writer import WriteSidecarsFn

HEAD = 25
S = 1_000_000
OPERATOR = OperatorState(
    "big",
    StrUtf8Coder(),
    GlobalWindows().get_window_coder(),
    (CellState("items", "bag", BytesCoder()),),
    False,
)


def record(key: str, size: int) -> bytes:
    item = random.Random(key).randbytes(size)
    return SnapshotRecord(key.encode(), b"", False, 0, ((item,),), (), ()).to_bytes()


@pytest.mark.parametrize("limit", [1, 7, 40])
def test_a_record_is_what_its_chunks_make_in_any_order_and_again(limit: int) -> None:
    one, other = record("a", 80), record("b", 80)
    pieces = [*cut(one, limit), *cut(other, limit)]
    assert all(is_chunk(piece) and len(piece) <= limit + HEAD for piece in pieces)
    for seed in range(20):
        rng = random.Random(seed)
        chunks, found = Chunks(), []
        *coming, last = [*pieces, *rng.sample(pieces, len(pieces) // 3)]
        rng.shuffle(coming)
        for piece in [*coming, last]:
            whole = chunks.add(piece)
            if whole is not None:
                found.append(whole)
        assert set(found) == {one, other}


def test_a_record_that_is_no_larger_is_not_cut() -> None:
    data = record("a", 50)
    assert list(cut(data, len(data))) == [data]
    assert not is_chunk(data)
    assert len(list(cut(data, len(data) - 1))) == 2


def test_chunks_that_were_changed_are_no_record() -> None:
    first, second = cut(record("a", 50), 40)
    chunks = Chunks()
    assert chunks.add(first) is None
    with pytest.raises(InvalidCheckpointError, match="not the one that was cut"):
        chunks.add(second[:-1] + b"\xff")


@pytest.mark.parametrize("order", ["as they were cut", "shuffled"])
def test_the_writer_waits_for_the_other_chunks_of_a_record_that_comes_late(order: str) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    job = DrivenCheckpoints(store, OPERATOR, 1)
    small, big = record("small", 10), record("big", 1000)
    pieces = list(cut(big, 100))
    if order == "shuffled":
        random.Random(0).shuffle(pieces)
    (first,) = job.checkpoint(10 * S, [(0, small)])
    for piece in pieces[:4]:
        job.add(0, 10 * S, piece)
    job.write(10 * S)
    assert job.commit(10 * S) == []
    assert [r for _, r in restored(store, OPERATOR, store.load_by_id(first.id))] == [small]
    for piece in pieces[4:]:
        job.add(0, 10 * S, piece)
    job.write(10 * S)
    (second,) = job.commit(10 * S)
    manifest = store.load_by_id(second.id)
    assert [r for _, r in restored(store, OPERATOR, manifest)] == [big, small]
    again = list(restored(store, OPERATOR, manifest, limits=Limits(chunk_bytes=100)))
    chunks = Chunks()
    assert [key for key, _ in again] == ["big"] * len(pieces) + ["small"]
    assert [whole for _, piece in again[:-1] if (whole := chunks.add(piece))] == [big]


def test_chunks_wait_in_the_state_of_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles end between them, elements come before the last of them, and they come again."""
    program = Program(cells=("bag",), process=(Add(0),), callbacks=())
    data = [(at * S, key, at) for at in range(40) for key in "abc"]
    data = [element for element in data if element[0] < 20 * S or element[1] == "a"]
    first = run_faked(dofn(program), data, until=20 * S, time_sorted=True)
    saved = first.checkpoints[-1]
    expected = run_faked(dofn(program), data, restored=saved, time_sorted=True)
    loads: list[bool] = []
    load = KeyedOperator._restore

    def watched(self, state, restored_value):
        loads.append(bool(state._chunks_kept))
        yield from load(self, state, restored_value)

    monkeypatch.setattr(KeyedOperator, "_restore", watched)
    for seed in range(40):
        run = run_faked(
            dofn(program), data, restored=saved, time_sorted=True, chaos=Chaos(seed, False, 9)
        )
        assert run.checkpoints[-1] == expected.checkpoints[-1]
        assert sorted(map(repr, run.outputs)) == sorted(map(repr, expected.outputs))
        assert sorted(run.left, key=repr) == sorted(expected.left, key=repr)
    assert any(loads), "a bundle has ended between the chunks of a key"


class KeepFn(beam.DoFn):
    ITEMS = BagStateSpec("items", BytesCoder())

    def process(self, element, items=beam.DoFn.StateParam(ITEMS)):
        key, value = element
        if value is None:
            yield key, sorted(map(len, items.read()))
        else:
            items.add(value)


FOUND: list[tuple[str, list[int]]] = []


def note(output: tuple[str, list[int]]) -> None:
    FOUND.append(output)


def run(store, elements, **settings):
    FOUND.clear()
    with beam.Pipeline(runner="FnApiRunner") as p:
        kept = (
            p
            | beam.Create(elements)
            | beam.MapTuple(
                lambda at, key, value: TimestampedValue((key, value), at)
            ).with_output_types(tuple[str, bytes | None])
            | CheckpointedParDo(KeepFn(), uid="keep", store=store, **settings)
        )
        _ = kept | beam.Map(note)
    return list(FOUND)


def test_no_element_is_larger_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoints, "_limits", Limits(chunk_bytes=1000))
    sizes: dict[str, list[int]] = {"written": [], "restored": []}
    write, restore = WriteSidecarsFn.process, KeyedOperator._restore

    def written(self, element, *cells):
        sizes["written"].append(len(element[1][1]))
        return write(self, element, *cells)

    def brought(self, state, value, **how):
        sizes["restored"].append(len(value.record))
        return restore(self, state, value, **how)

    monkeypatch.setattr(WriteSidecarsFn, "process", written)
    monkeypatch.setattr(KeyedOperator, "_restore", brought)
    store = open_store(f"memory://{uuid.uuid4().hex}")
    items = [(10, "a", random.Random(i).randbytes(500 * i)) for i in range(1, 9)]
    assert run(store, [*items, (10, "b", b"small")], until=50) == []
    asked = run(store, [(60, "a", None), (60, "b", None)], until=100)
    assert sorted(asked) == [("a", [500 * i for i in range(1, 9)]), ("b", [5])]
    for found in sizes.values():
        assert max(found) <= 1000 + HEAD
        assert len(found) > 18


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_single_key_with_200_megabytes_passes(tmp_path) -> None:
    """Saved, restored, added to, saved again and restored; it says what that took."""
    store = open_store(tmp_path)

    def peak() -> str:
        return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MB"

    print(f"\npeak memory before: {peak()}")
    items = [(10, "a", random.Random(i).randbytes(1_000_000)) for i in range(200)]
    run(store, items, until=50)
    print(f"after 200 MB were saved: {peak()}")
    del items
    assert run(store, [(60, "a", b"one more"), (70, "a", None)], until=100) == [
        ("a", [8, *[1_000_000] * 200])
    ]
    print(f"after they were restored and saved again: {peak()}")
    manifest = store.load_latest()
    assert manifest is not None
    print(f"the checkpoint has {manifest.total_size_bytes:,} bytes")
    assert run(store, [(110, "a", None)], until=150) == [("a", [8, *[1_000_000] * 200])]
