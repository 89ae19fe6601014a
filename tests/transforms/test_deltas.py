"""A record has only what changed since the key's last one, and reads nothing else."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import apache_beam as beam
import pytest
from apache_beam.coders import BytesCoder, StrUtf8Coder, VarIntCoder
from apache_beam.coders.coders import FastPrimitivesCoder, GlobalWindowCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    CombiningValueStateSpec,
    OrderedListStateSpec,
    ReadModifyWriteStateSpec,
    SetStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import FixedWindows, GlobalWindow, IntervalWindow
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beam_ckpt import CheckpointStore, open_store
from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.sidecar import decode_sidecar, encode_sidecar, merge_newest_first
from beam_ckpt.testing import strategies
from beam_ckpt.testing.driven import DrivenCheckpoints, restored
from beam_ckpt.testing.event_loop import canonical, run_event_loop
from beam_ckpt.testing.fake_runner import Chaos, FakeCheckpoint, run_faked, state_of
from beam_ckpt.testing.read_once import beam_reads_once
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.elements import Restored
from beam_ckpt.transforms.keyed_state import key as key_module
from beam_ckpt.transforms.keyed_state.clock import Epochs
from beam_ckpt.transforms.keyed_state.operator import SNAPSHOTS, KeyedOperator, OperatorConfig
from beam_ckpt.transforms.signature import read_signature
from beam_ckpt.transforms.snapshot import APPEND, KEEP, REPLACE, CarriedOutput, SnapshotRecord
from beam_ckpt.transforms.windows import is_over, left_over

SECOND = 1_000_000


class SumFn(beam.CombineFn):
    def create_accumulator(self):
        return 0

    def add_input(self, accumulator, element):
        return accumulator + element

    def merge_accumulators(self, accumulators):
        return sum(accumulators)

    def extract_output(self, accumulator):
        return accumulator


@beam.typehints.with_input_types(tuple[str, int])
@beam.typehints.with_output_types(tuple[str, int])
class ScriptFn(beam.DoFn):
    """The value of an element says what is done, with one cell."""

    ONE = ReadModifyWriteStateSpec("one", VarIntCoder())
    BIG = ReadModifyWriteStateSpec("big", BytesCoder())
    SUM = CombiningValueStateSpec("sum", VarIntCoder(), SumFn())
    BAG = BagStateSpec("bag", VarIntCoder())
    OTHER = BagStateSpec("other", FastPrimitivesCoder())
    SET = SetStateSpec("set", VarIntCoder())
    LIST = OrderedListStateSpec("list", VarIntCoder())
    IDLE = TimerSpec("idle", TimeDomain.WATERMARK)

    OPERATIONS = 24

    def process(
        self,
        element,
        ts=beam.DoFn.TimestampParam,
        one=beam.DoFn.StateParam(ONE),
        big=beam.DoFn.StateParam(BIG),
        total=beam.DoFn.StateParam(SUM),
        bag=beam.DoFn.StateParam(BAG),
        other=beam.DoFn.StateParam(OTHER),
        words=beam.DoFn.StateParam(SET),
        ordered=beam.DoFn.StateParam(LIST),
        idle=beam.DoFn.TimerParam(IDLE),
    ):
        key, value = element
        number, which = divmod(value, self.OPERATIONS)
        if which == 0:
            one.write(number)
        elif which == 1:
            one.write(one.read() or 0)
        elif which == 2:
            one.clear()
        elif which == 3:
            big.write(b"%d" % number * 50)
        elif which == 4:
            big.write(b"%d" % number * 5)
        elif which == 5:
            yield key, len(big.read() or b"")
        elif which == 6:
            big.clear()
        elif which == 7:
            total.add(number)
        elif which == 8:
            total.clear()
        elif which in (9, 10, 11):
            bag.add(number)
        elif which == 12:
            bag.clear()
        elif which == 13:
            items = list(bag.read())
            bag.clear()
            for item in items[number % 3 :]:
                bag.add(item)
        elif which == 14:
            yield key, sum(bag.read())
        elif which in (15, 16):
            other.add([number])
        elif which == 17:
            other.clear()
            other.add([])
        elif which == 18:
            words.add(number)
        elif which == 19:
            words.clear()
        elif which == 20:
            ordered.add((ts, number))
        elif which == 21:
            ordered.clear_range(ts - 30, ts)
        elif which == 22:
            ordered.clear()
        else:
            idle.set(ts + 15)

    @on_timer(IDLE)
    def on_idle(
        self,
        key=beam.DoFn.KeyParam,
        one=beam.DoFn.StateParam(ONE),
        big=beam.DoFn.StateParam(BIG),
        total=beam.DoFn.StateParam(SUM),
        bag=beam.DoFn.StateParam(BAG),
        other=beam.DoFn.StateParam(OTHER),
        words=beam.DoFn.StateParam(SET),
        ordered=beam.DoFn.StateParam(LIST),
    ):
        """The key is done with; it may come back."""
        yield key, sum(bag.read()) + sum(map(len, other.read())) + (one.read() or 0)
        for cell in (one, big, total, bag, other, words, ordered):
            cell.clear()


FN = ScriptFn()
SIGNATURE = read_signature(FN)


def operator_of(window_coder: Any, lateness: int = 0) -> OperatorState:
    cells = tuple(CellState(cell.name, cell.kind, cell.coder) for cell in SIGNATURE.cells)
    return OperatorState("op", StrUtf8Coder(), window_coder, cells, False, lateness)


def in_memory() -> CheckpointStore:
    return open_store(f"memory://{uuid.uuid4().hex}")


@st.composite
def _scripts(draw: st.DrawFn) -> list[tuple[int, str, int]]:
    """Elements of two keys, over some minutes."""
    which = st.sampled_from([*range(ScriptFn.OPERATIONS)])
    value = st.builds(lambda n, w: n * ScriptFn.OPERATIONS + w, st.integers(0, 3), which)
    member = st.tuples(st.sampled_from([0, 3, 10, 25]), st.sampled_from("aab"), value)
    at, elements = 0, []
    for after, key, value_ in draw(st.lists(member, min_size=8, max_size=50)):
        at += after * SECOND
        elements.append((at, key, value_))
    return elements


SEEN: Counter[str] = Counter()


def check_scripts(data: st.DataObject) -> None:
    """Runs a script with an interval and cuts, and its records through writer and committer."""
    elements = data.draw(_scripts())
    last = elements[-1][0] // SECOND
    cuts = sorted(data.draw(st.sets(st.integers(0, last + 20), max_size=3)))
    every = data.draw(st.sampled_from([None, 5, 10, 20, 60]))
    windows = data.draw(st.sampled_from([None, None, FixedWindows(40)]))
    lateness = data.draw(st.sampled_from([0, 30])) * SECOND
    chaos = data.draw(
        st.builds(
            Chaos,
            st.integers(0, 1 << 16),
            st.booleans(),
            bag_bytes=st.sampled_from([0, 0, 3, 256]),
        )
    )
    streaming = data.draw(st.booleans())
    source = (
        data.draw(strategies.stream_plans(elements, max_displacement_s=20))
        if streaming
        else elements
    )
    store = in_memory()
    coder = GlobalWindowCoder() if windows is None else windows.get_window_coder()
    operator = operator_of(coder, lateness)
    checkpoint: FakeCheckpoint | None = None
    outputs, base = [], None
    for cut in (*cuts, None):
        until = None if cut is None else cut * SECOND
        run = run_faked(
            FN,
            source,
            signature=SIGNATURE,
            until=until,
            every=None if every is None else every * SECOND,
            restored=checkpoint,
            time_sorted=True,
            window_fn=windows,
            lateness=lateness,
            chaos=chaos,
        )
        SEEN.update(run.records)
        max_files = data.draw(st.sampled_from([1, 2, 3, 8]))
        job = DrivenCheckpoints(store, operator, 1, base_id=base, max_files=max_files, keep=1000)
        published = {result.boundary: result.id for result in publish(job, run.written)}
        for made in run.checkpoints:
            saved = state_of(made, FN, SIGNATURE, windows, lateness)
            loop = run_event_loop(
                FN, elements, until=made.boundary, window_fn=windows, lateness=lateness
            )
            assert saved == dict(loop.state), f"state at {made.boundary}"
            at = None if made.boundary is None else Timestamp(micros=made.boundary)
            if at in published:
                base = published[at]
                assert in_store(store, operator, base, lateness) == kept(made, lateness)
        checkpoint = run.checkpoints[-1]
        outputs += run.outputs
    whole = run_event_loop(FN, elements, window_fn=windows, lateness=lateness)
    assert canonical(outputs) == canonical(whole.outputs)


def publish(job: DrivenCheckpoints, written: Sequence[tuple[int, bytes]]) -> list[Any]:
    results = []
    for boundary in sorted({boundary for boundary, _ in written}):
        records = [(0, record) for at, record in written if at == boundary]
        results += job.checkpoint(boundary, records)
    return results


def in_store(
    store: CheckpointStore, operator: OperatorState, id: int, lateness: int
) -> dict[tuple[bytes, bytes], SnapshotRecord]:
    manifest = store.load_by_id(id)
    assert manifest is not None
    found = {}
    for _, data in restored(store, operator, manifest, lateness):
        record = SnapshotRecord.from_bytes(data)
        assert (record.key, record.window) not in found
        found[record.key, record.window] = record
    return found


def kept(made: FakeCheckpoint, lateness: int) -> dict[tuple[bytes, bytes], SnapshotRecord]:
    found = {}
    for (_, window), record in made.records.items():
        left = record
        if is_over(window, made.boundary, lateness):
            over = left_over(record, made.boundary)
            if over is None:
                continue
            left = over
        found[record.key, record.window] = left
    return found


def holds_for(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_module, "SPILL_BYTES", 30)
    SEEN.clear()

    @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        check_scripts(data)

    with beam_reads_once():
        holds()
    print(dict(SEEN))
    assert min(SEEN[what] for what in ("whole", "deleted", "some cells", "items added")) > 20


def test_any_changes_of_cells_over_epochs_and_runs_are_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holds_for(120, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_changes_of_cells_over_epochs_and_runs_are_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holds_for(2000, monkeypatch)


@pytest.mark.parametrize("first", range(ScriptFn.OPERATIONS))
def test_what_one_element_did_is_undone_by_any_other(first: int) -> None:
    """An element in each of two epochs, each with any operation, and one that reads."""
    for second in range(ScriptFn.OPERATIONS):
        for between in ((), (9,)):
            which = [first, *between, second, 5]
            elements = [
                (i * 10 * SECOND, "a", (i + 1) * ScriptFn.OPERATIONS + w)
                for i, w in enumerate(which)
            ]
            run = run_faked(FN, elements, signature=SIGNATURE, every=10 * SECOND, time_sorted=True)
            for made in run.checkpoints:
                loop = run_event_loop(FN, elements, until=made.boundary)
                saved = state_of(made, FN, SIGNATURE)
                assert saved == dict(loop.state), (which, made.boundary)


# ------------------------------------------------------------------------------- by hand, one key


class Cell:
    """A runner's bag or set that counts how often it was read."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.reads = 0

    def read(self) -> list[Any]:
        self.reads += 1
        return list(self.items)

    def add(self, item: Any) -> None:
        self.items.append(item)

    def clear(self) -> None:
        self.items = []


class Clock:
    def set(self, timestamp: Timestamp, dynamic_timer_tag: str = "") -> None:
        """Time is the caller's."""

    def clear(self, dynamic_timer_tag: str = "") -> None:
        """The same."""


NAMES = [cell.name for cell in SIGNATURE.cells]


class Key:
    """A key of a stream with an epoch of ten seconds, and the runner's cells for it."""

    def __init__(
        self,
        fn: beam.DoFn = FN,
        *,
        record: SnapshotRecord | None = None,
        rewrite: bool = False,
        bag_bytes: int = 0,
    ) -> None:
        signature = read_signature(fn)
        restoring = record is not None
        self.config = OperatorConfig(
            uid="op",
            key_coder=StrUtf8Coder(),
            value_coder=VarIntCoder(),
            window_coder=GlobalWindowCoder(),
            output_coders=((None, FastPrimitivesCoder()),),
            epochs=Epochs(10 * SECOND, None),
            boundary=0 if restoring else None,
            restoring=restoring,
            rewrite=rewrite,
            key_groups=1,
            time_sorted=False,
            bounded=False,
            aligned=False,
            bag_bytes=bag_bytes,
        )
        self.operator = KeyedOperator(fn, signature, self.config)
        growing = [c for c in signature.cells if c.kind in ("bag", "set", "ordered_list")]
        self.cells = {"control": Cell(), **{cell.name: Cell() for cell in growing}}
        self.cells |= {f"new in {c.name}": Cell() for c in growing if c.kind == "bag"}
        self.cells["buffer"] = Cell()
        if record is not None:
            self.element(Restored(record.to_bytes()), -1)

    def bundle(self, *calls: Any) -> list[Any]:
        self.operator.start_bundle()
        outputs = [output for call in calls for output in call()]
        self.operator.flush()
        return outputs

    @property
    def runners(self) -> tuple[Any, ...]:
        return (*self.cells.values(), Clock())

    def element(self, value: Any, second: int = 1) -> None:
        windowed = WindowedValue(("k", value), Timestamp(second), (GlobalWindow(),))
        self.bundle(lambda: self.operator.process(("k", value), windowed, self.runners))

    def do(self, which: int, number: int = 1, second: int = 1) -> None:
        self.element(number * ScriptFn.OPERATIONS + which, second)

    def cut(self, second: int) -> SnapshotRecord:
        """The record of the cut; `reads` of each cell count from here on."""
        for cell in self.cells.values():
            cell.reads = 0
        at = second * SECOND
        outputs = self.bundle(lambda: self.operator.on_clock("k", at, GlobalWindow(), self.runners))
        (record,) = [output.value.value[1][1] for output in outputs if output.tag == SNAPSHOTS]
        return SnapshotRecord.from_bytes(record)

    def read(self) -> set[str]:
        return {name for name, cell in self.cells.items() if cell.reads and name != "control"}


FILL = (0, 3, 7, 9, 15, 18, 20)
"""An operation on each cell."""


def codes_of(record: SnapshotRecord) -> dict[str, int]:
    return dict(zip(NAMES, record.patch or bytes(len(NAMES)), strict=True))


def kept_but(**codes: int) -> dict[str, int]:
    return dict.fromkeys(NAMES, KEEP) | codes


@pytest.fixture
def small_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_module, "SPILL_BYTES", 30)


def filled(**settings: Any) -> Key:
    """A key whose cells all hold something, and of which there is a record."""
    key = Key(**settings)
    for which in FILL:
        key.do(which)
    first = key.cut(10)
    assert first.patch is None
    assert all(first.cells)
    return key


@pytest.mark.usefixtures("small_spill")
@pytest.mark.parametrize("restored_first", [False, True])
def test_a_snapshot_does_not_read_what_it_does_not_write(restored_first: bool) -> None:
    key = filled()
    if restored_first:
        for which in FILL:
            key.do(which, second=11)
        record = key.cut(20)
        assert codes_of(record) == kept_but(
            sum=REPLACE, bag=APPEND, other=APPEND, set=REPLACE, list=REPLACE
        ), "what was written as it is already is no change"
        whole = Key()
        for which in FILL:
            whole.do(which)
        key = Key(record=whole.cut(10))
    changes = {
        9: ("bag", APPEND, {"new in bag"}),
        15: ("other", APPEND, {"new in other"}),
        12: ("bag", REPLACE, set()),
        17: ("other", REPLACE, {"other"}),
        18: ("set", REPLACE, {"set"}),
        22: ("list", REPLACE, set()),
        0: ("one", REPLACE, set()),
        7: ("sum", REPLACE, set()),
    }
    for i, (which, (name, code, read)) in enumerate(changes.items()):
        key.do(which, number=5, second=20 + 10 * i)
        record = key.cut(30 + 10 * i)
        assert codes_of(record) == kept_but(**{name: code}), name
        assert key.read() == read, name
    key.do(3, number=77, second=500)
    assert codes_of(key.cut(510)) == kept_but(big=REPLACE)
    assert key.read() == {"buffer"}, "the large value is read to be written"
    key.do(23, second=600)
    record = key.cut(610)
    assert codes_of(record) == kept_but()
    assert record.timers
    assert key.read() == set()


def test_the_author_reads_what_is_old_and_what_is_new_and_only_if_there_is_some() -> None:
    key = filled()
    key.do(9, number=5, second=11)
    key.cells["bag"].reads = key.cells["new in bag"].reads = 0
    key.do(14, second=11)
    assert (key.cells["bag"].reads, key.cells["new in bag"].reads) == (1, 1)
    key.cut(20)
    key.cells["bag"].reads = key.cells["new in bag"].reads = 0
    key.do(14, second=21)
    assert (key.cells["bag"].reads, key.cells["new in bag"].reads) == (1, 0)
    assert key.cells["bag"].items == [1, 5]
    assert key.cells["new in bag"].items == []


def test_a_key_that_was_gone_and_a_key_to_be_written_anew_are_whole() -> None:
    key = Key()
    key.do(9)
    record = key.cut(10)
    key.do(12, second=11)
    assert key.cut(20).deleted
    key.do(9, second=21)
    assert key.cut(30).patch is None
    again = Key(record=record, rewrite=True)
    again.do(9, number=7, second=2)
    found = again.cut(10)
    assert found.patch is None
    assert found.cells[NAMES.index("bag")] == tuple(map(VarIntCoder().encode, (1, 7)))


def test_a_small_bag_is_written_whole_in_the_one_cell() -> None:
    """Until it is large: moving items costs more than writing it."""
    key = Key(bag_bytes=3)
    told = []
    for epoch in range(6):
        key.do(9, second=20 * epoch + 1)
        record = key.cut(20 * epoch + 10)
        told.append((codes_of(record)["bag"], len(record.cells[NAMES.index("bag")] or ())))
        key.do(0, number=epoch, second=20 * epoch + 11)
        assert codes_of(key.cut(20 * epoch + 20))["bag"] == KEEP
        assert key.read() == set()
    assert told == [*((REPLACE, n) for n in (1, 2, 3, 4)), (APPEND, 1), (APPEND, 1)]
    again = Key(record=whole_record(key), bag_bytes=3)
    again.do(9, second=2)
    assert codes_of(again.cut(10))["bag"] == APPEND


def whole_record(key: Key) -> SnapshotRecord:
    many = "bag", "set", "ordered_list"
    cells: list[Any] = [() if cell.kind in many else None for cell in SIGNATURE.cells]
    items = key.cells["bag"].items + key.cells["new in bag"].items
    cells[NAMES.index("bag")] = tuple(map(VarIntCoder().encode, items))
    return SnapshotRecord(b"k", b"", False, 0, tuple(cells), (), ())


def test_a_restored_record_that_is_not_whole_is_refused() -> None:
    record = SnapshotRecord(b"k", b"", False, 0, (None,) * 7, (), (), bytes((KEEP,) * 7))
    with pytest.raises(InvalidCheckpointError, match="only what changed"):
        Key(record=record)


@beam.typehints.with_input_types(tuple[str, int])
@beam.typehints.with_output_types(int)
class GrowFn(beam.DoFn):
    """Keeps 100 bytes of each element."""

    BAG = BagStateSpec("bag", BytesCoder())

    def process(self, element, bag=beam.DoFn.StateParam(BAG)):
        bag.add(random.Random(element[1]).randbytes(100))
        return ()


def test_a_growing_bag_costs_its_items_and_not_itself() -> None:
    """10,000 items over 100 epochs: in a delta each epoch, in all files, in what is kept."""
    key, items, deltas, written = Key(GrowFn()), 0, 0, 0
    state = (CellState("bag", "bag", BytesCoder()),)
    operator = OperatorState("op", StrUtf8Coder(), GlobalWindowCoder(), state, False)
    store = in_memory()
    job = DrivenCheckpoints(store, operator, 1)
    for epoch in range(100):
        for i in range(100):
            key.element(100 * epoch + i, second=10 * epoch + 1)
            items += 100
        record = key.cut(10 * epoch + 10)
        assert key.read() == ({"new in bag"} if epoch else {"bag"})
        kind: Literal["full", "delta"] = "delta" if epoch else "full"
        header = operator.header(key_group=0, boundary=epoch, kind=kind)
        deltas += len(encode_sidecar(operator.to_table([record]), header))
        (result,) = job.checkpoint(10 * (epoch + 1) * SECOND, [(0, record.to_bytes())])
        written += result.size_bytes
        manifest = store.load_by_id(result.id)
        assert manifest is not None
        for _, _, entry in manifest.sidecars():  # what a later run knows of it
            assert 2 * entry.appended_bytes > entry.size_bytes or entry.kind == "full"
    retained = sum(blob.size for blob in store.blobs.list("state/"))
    print(f"{items} bytes of items, {deltas} as deltas, {written} written, {retained} retained")
    assert deltas <= 1.5 * items
    assert written <= 3 * items
    assert retained <= 1.5 * items
    (found,) = in_store(store, operator, result.id, 0).values()
    assert found.cells == (tuple(random.Random(i).randbytes(100) for i in range(10_000)),)


# ------------------------------------------------------------------------------ what comes late


def rec(key: bytes, cells: Sequence[Any], patch: Sequence[int] = (), window: bytes = b"") -> bytes:
    return SnapshotRecord(
        key, window, False, 0, tuple(cells), (), (), bytes(patch) if any(patch) else None
    ).to_bytes()


TWO = OperatorState(
    "op",
    StrUtf8Coder(),
    GlobalWindowCoder(),
    (CellState("n", "read_modify_write", BytesCoder()), CellState("bag", "bag", BytesCoder())),
    False,
)


@pytest.mark.parametrize("max_files", [1, 2, 8])
@pytest.mark.parametrize("committed", [True, False])
def test_what_comes_late_is_added_to_what_was_before_it(max_files: int, committed: bool) -> None:
    """Its key has no newer record: a key's records are written in the order of its cuts."""
    store = in_memory()
    job = DrivenCheckpoints(store, TWO, 1, max_files=max_files)
    pad = [rec(b"%d" % i, (random.Random(i).randbytes(300), ())) for i in range(30)]
    first = [(0, rec(b"a", (b"1", (b"x",)))), (0, rec(b"late", (b"1", (b"x",))))]
    job.checkpoint(10 * SECOND, [*first, *((0, data) for data in pad)])
    for boundary in (30, 40):
        job.add(0, boundary * SECOND, rec(b"a", (None, (b"%d" % boundary,)), (KEEP, APPEND)))
        job.write(boundary * SECOND)
        if committed:
            job.commit(boundary * SECOND)
    # The watermark of the writer is at 40.
    job.add(0, 30 * SECOND, rec(b"late", (b"3", ()), (REPLACE, KEEP)))
    job.add(0, 20 * SECOND, rec(b"late", (b"2", (b"y",)), (REPLACE, APPEND)))
    job.write(40 * SECOND)
    (*_, result) = job.commit(40 * SECOND)
    found = {key: record.cells for (key, _), record in in_store(store, TWO, result.id, 0).items()}
    assert found[b"a"] == (b"1", (b"x", b"30", b"40"))
    assert found[b"late"] == (b"3", (b"x", b"y"))
    assert len(found) == 32


@pytest.mark.parametrize("max_files", [1, 8])
def test_what_comes_late_of_a_window_that_is_over_needs_nothing_that_is_gone(
    max_files: int,
) -> None:
    """A compaction drops a window that is over, and then a record of it comes, only of changes."""
    coder = FixedWindows(60).get_window_coder()
    operator = OperatorState("op", StrUtf8Coder(), coder, TWO.cells, False)
    over, later = (coder.encode(IntervalWindow(*ends)) for ends in ((0, 60), (60, 120)))
    store = in_memory()
    job = DrivenCheckpoints(store, operator, 1, max_files=max_files)
    job.checkpoint(50 * SECOND, [(0, rec(b"a", (b"1", (b"x",)), window=over))])
    (result,) = job.checkpoint(70 * SECOND, [(0, rec(b"a", (b"1", ()), window=later))])
    # All that was there is over, so that the group has no file left that it could stand on.
    changed = rec(b"a", (None, (b"y",)), (KEEP, APPEND), over)
    out = SnapshotRecord.from_bytes(changed)
    out.carried = (CarriedOutput(None, 90 * SECOND, over, b"out"),)
    job.add(0, 60 * SECOND, changed)
    job.add(0, 55 * SECOND, out.to_bytes())
    job.write(70 * SECOND)
    (*_, result) = job.commit(70 * SECOND)
    found = in_store(store, operator, result.id, 0)
    assert found[b"a", later].cells == (b"1", ())
    left = found.pop((b"a", over), None)
    assert left is None or left.cells == (None, ())
    (result,) = job.checkpoint(130 * SECOND, [(0, rec(b"b", (b"1", ()), window=later))])


def test_a_chain_whose_base_is_gone_is_refused() -> None:
    store = in_memory()
    job = DrivenCheckpoints(store, TWO, 1)
    with pytest.raises(InvalidCheckpointError, match="what they stand on is in none"):
        job.checkpoint(10 * SECOND, [(0, rec(b"a", (None, (b"y",)), (KEEP, APPEND)))])
    full, delta = (
        encode_sidecar(TWO.encoded_to_table([data]), TWO.header(key_group=0, boundary=1, kind=kind))
        for kind, data in (
            ("full", rec(b"other", (b"1", ()))),
            ("delta", rec(b"a", (None, (b"y",)), (KEEP, APPEND))),
        )
    )
    tables = [decode_sidecar(data, where="a test")[1] for data in (delta, full)]
    with pytest.raises(InvalidCheckpointError, match=r"1 rows, that of key b'a' first"):
        merge_newest_first(tables)
