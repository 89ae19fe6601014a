"""What a key does with what a runner may bring, in any order: driven by hand, without a runner."""

from __future__ import annotations

import dataclasses

import apache_beam as beam
import pytest
from apache_beam.coders import BytesCoder, FloatCoder, StrUtf8Coder, TupleCoder, VarIntCoder
from apache_beam.coders.coders import GlobalWindowCoder
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from beam_ckpt import errors
from beam_ckpt.testing.subjects import CountAndSumFn
from beam_ckpt.transforms.elements import Restored
from beam_ckpt.transforms.keyed_state.clock import BEFORE_ALL, DRAINED, GATE, Epochs
from beam_ckpt.transforms.keyed_state.key import SAVED
from beam_ckpt.transforms.keyed_state.operator import (
    DRAIN,
    KeyedOperator,
    OperatorConfig,
    needs_buffer,
)
from beam_ckpt.transforms.signature import read_signature
from beam_ckpt.transforms.snapshot import CarriedOutput, SavedTimer, SnapshotRecord


class Bag:
    """A runner's bag."""

    def __init__(self) -> None:
        self.values: list[object] = []

    def read(self):
        return list(self.values)

    def add(self, value) -> None:
        self.values.append(value)

    def clear(self) -> None:
        self.values = []


class Clock:
    """A runner's timer."""

    def __init__(self) -> None:
        self.set_for: dict[str, int] = {}

    def set(self, timestamp, dynamic_timer_tag="") -> None:
        self.set_for[dynamic_timer_tag] = timestamp.micros

    def clear(self, dynamic_timer_tag="") -> None:
        self.set_for.pop(dynamic_timer_tag, None)


class Key:
    """One key of a run, restored unless said otherwise, and the runner's cells for it."""

    def __init__(self, fn=None, **changes) -> None:
        self.fn = fn or CountAndSumFn()
        signature = read_signature(self.fn)
        config = OperatorConfig(
            uid="op",
            key_coder=StrUtf8Coder(),
            value_coder=VarIntCoder(),
            window_coder=GlobalWindowCoder(),
            output_coders=((None, VarIntCoder()),),
            epochs=Epochs(None, None),
            boundary=None,
            restoring=True,
            rewrite=False,
            key_groups=1,
            time_sorted=False,
            bounded=False,
        )
        config = dataclasses.replace(config, **changes)
        self.config = config
        self.operator = KeyedOperator(self.fn, signature, config)
        self.control, self.buffer, self.clock = Bag(), Bag(), Clock()
        self.cells = signature.cells
        self.growing = [Bag() for cell in self.cells if cell.kind != "read_modify_write"]
        self.growing += [Bag() for cell in self.cells if cell.kind == "bag"]

    def bundle(self, *steps) -> list[object]:
        self.operator.start_bundle()
        outputs = [output for step in steps for output in step()]
        self.operator.flush()
        return outputs

    def element(self, value, seconds=0):
        windowed = WindowedValue(("k", value), Timestamp(seconds), (GlobalWindow(),))
        buffers = needs_buffer(read_signature(self.fn), self.config)
        return lambda: self.operator.process(("k", value), windowed, self.runners(buffers))

    def touch(self, value):
        """An element of an operator whose elements cannot wait, its key restored before it."""
        windowed = WindowedValue(("k", value), Timestamp(0), (GlobalWindow(),))
        return lambda: [
            *self.operator.restore_at_touch(("k", value), windowed, self.runners()),
            *self.operator.process(("k", value), windowed, self.runners()),
        ]

    def fire(self, micros):
        return lambda: self.operator.on_clock("k", micros, GlobalWindow(), self.runners())

    def runners(self, buffers=True):
        return self.control, *self.growing, *[self.buffer] * buffers, self.clock

    def record(self):
        values = tuple(
            cell.coder.encode((2, 7) if cell.name == "totals" else 2)
            if cell.kind == "read_modify_write"
            else ()
            for cell in self.cells
        )
        key = StrUtf8Coder().encode("k")
        return Restored(SnapshotRecord(key, b"", False, 0, values, (), ()).to_bytes())


def test_an_element_before_its_keys_record_waits_for_it():
    key = Key()
    assert key.bundle(key.element(5)) == []
    assert key.clock.set_for == {"": GATE}
    assert len(key.bundle(lambda: key.element(key.record())())) > 0


def test_a_record_that_comes_again_is_ignored():
    key = Key()
    key.bundle(key.element(key.record()))
    before = list(key.control.values)
    assert key.bundle(key.element(key.record())) == []
    assert key.control.values == before


class BagFn(beam.DoFn):
    """Adds to a bag, empties it for 0, and tells what is in it."""

    BAG = BagStateSpec("bag", VarIntCoder())

    def process(self, element, bag=beam.DoFn.StateParam(BAG)):
        if element[1]:
            bag.add(element[1])
        else:
            bag.clear()
        yield sorted(bag.read())


class Saved:
    """Finds the record of the key."""

    def __init__(self, restored) -> None:
        self.record = restored.record

    def find(self, key, window):
        return self.record


class EndingFn(beam.DoFn):
    """Counts up to the saved count and one more, and ends."""

    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())

    def process(self, element, count=beam.DoFn.StateParam(COUNT)):
        yield (count.read() or 0) + 1
        count.clear()


def test_a_key_that_was_restored_at_its_first_element_is_not_restored_again():
    """Its record comes down the input as well, up to the gate, when the key may have ended."""
    record = Key(EndingFn()).record()
    key = Key(EndingFn(), saved=Saved(record), epochs=Epochs(None, 100_000_000))
    assert key.bundle(key.touch(3)) == [3]
    assert key.bundle(key.element(record)) == []
    assert key.clock.set_for == {"": GATE}
    assert key.bundle(key.touch(4)) == [1]
    key.bundle(key.fire(GATE))
    # The end of the key is yet to be told to the checkpoint.
    assert key.clock.set_for == {"": 100_000_000}
    *_, told = key.bundle(key.fire(100_000_000))
    assert SnapshotRecord.from_bytes(told.value.value[1][1]).deleted
    assert key.control.values == []


def test_a_record_behind_the_gate_stops_the_run_instead_of_being_lost():
    key = Key()
    key.bundle(key.element(5))
    assert len(key.bundle(key.fire(GATE))) > 0
    with pytest.raises(errors.WatermarkError, match="'op': the runner let the watermark pass"):
        key.bundle(key.element(key.record()))


def test_a_stale_fire_of_a_key_without_anything_leaves_nothing():
    key = Key()
    assert key.bundle(key.fire(GATE)) == []
    assert key.control.values == []
    assert key.clock.set_for == {}


def test_versions_of_the_control_do_not_pile_up():
    key = Key()
    key.bundle(key.element(key.record()))
    for value in range(40):
        key.bundle(key.element(value))
        assert len(key.control.values) <= 9


EPOCH = 60_000_000
STREAM = {"epochs": Epochs(EPOCH, None), "restoring": False, "marks_drained": True}


def test_a_key_that_was_touched_once_costs_nothing_afterwards():
    """No clock is left, nothing grows with the number of epochs, and no drain goes on for ever."""
    key = Key(**STREAM)
    key.bundle(key.fire(GATE))
    key.bundle(key.element(5, seconds=1))
    key.bundle(key.fire(0))  # its epoch has begun
    assert key.clock.set_for == {"": EPOCH, "horizon": DRAINED}
    key.bundle(key.fire(EPOCH))
    assert key.clock.set_for == {}, "nothing is waited for"
    kept = list(key.control.values)
    for epoch in range(2, 50):
        assert key.bundle(key.fire(epoch * EPOCH)) == []
        assert key.clock.set_for == {}
    assert key.bundle(key.fire(DRAINED)) == []
    assert len(key.control.values) <= 9
    assert len(kept[-1]) < 200


@pytest.mark.parametrize("ended", [False, True])
def test_an_epoch_that_the_end_of_the_stream_closed_is_told(ended):
    key = Key(**STREAM)
    key.bundle(key.element(5, seconds=1), key.fire(0))
    key.operator.start_bundle()
    steps = [key.fire(EPOCH)] + [key.fire(DRAINED)] * ended
    assert len([output for step in steps for output in step()]) == 1
    told = [output.value.value for output in key.operator.drained()]
    assert told == [(DRAIN, (EPOCH, b""))] * ended


AT_THE_END = {"restoring": False, "bounded": True, "fires_once": True}


def test_a_key_whose_last_clock_has_fired_is_left_as_it_is():
    """Clearing it costs a measurement of the SDK's cache, and nobody looks at it again."""
    key = Key(**AT_THE_END)
    key.bundle(key.element(5))
    assert key.clock.set_for == {"": DRAINED}
    before = list(key.control.values)
    assert len(key.bundle(key.fire(DRAINED))) == 1
    assert key.control.values == before


def test_a_key_is_cleared_where_a_runner_may_fire_again():
    key = Key(**(AT_THE_END | {"fires_once": False}))
    key.bundle(key.element(5))
    assert len(key.bundle(key.fire(DRAINED))) == 1
    assert key.bundle(key.fire(DRAINED)) == []
    assert key.control.values == []


@pytest.mark.parametrize(
    "bundles",
    [["element", "element"], ["element", "stale"]],
    ids=["the clock was set twice", "the clock was set again after a stale fire"],
)
def test_a_key_whose_clock_may_fire_again_finds_nothing_to_do_then(bundles):
    key = Key(**AT_THE_END)
    for kind in bundles:
        key.bundle(key.element(5) if kind == "element" else key.fire(BEFORE_ALL))
    assert len(key.bundle(key.fire(DRAINED))) == 1
    assert key.bundle(key.fire(DRAINED)) == []
    assert key.control.values == []


@pytest.mark.parametrize(
    ("coder", "changes", "expected"),
    [
        (VarIntCoder(), {}, False),
        (TupleCoder((VarIntCoder(), FloatCoder())), {}, False),
        (StrUtf8Coder(), {}, True),
        (TupleCoder((VarIntCoder(), BytesCoder())), {}, True),
        (VarIntCoder(), {"epochs": Epochs(EPOCH, None)}, True),
        (VarIntCoder(), {"epochs": Epochs(EPOCH, None), "aligned": False}, False),
        (VarIntCoder(), {"time_sorted": True}, True),
        (VarIntCoder(), {"restoring": True}, True),
    ],
)
def test_there_is_a_buffer_where_something_may_have_to_be_kept_in_it(coder, changes, expected):
    class Fn(beam.DoFn):
        CELL = ReadModifyWriteStateSpec("cell", coder)

        def process(self, element, cell=beam.DoFn.StateParam(CELL)):
            yield cell.read()

    config = dataclasses.replace(Key(**AT_THE_END).config, **changes)
    assert needs_buffer(read_signature(Fn()), config) is expected


UNREAD = {"one_bundle": True, "bounded": True, "fires_once": True}


def test_a_record_is_kept_unread_until_its_key_is_touched():
    key = Key(**UNREAD)
    reads = []
    read, key.control.read = key.control.read, lambda: reads.append(1) or read()
    assert key.bundle(key.element(key.record())) == []
    assert (len(key.control.values), reads) == (1, []), "added, without a look at what is there"
    assert key.clock.set_for == {}, "nothing is due of it"
    outputs = key.bundle(key.element(5))
    assert len(outputs) > 0, "nothing to wait for"
    (record,) = [o.value.value[1][1] for o in key.bundle(key.fire(DRAINED))]
    restored = SnapshotRecord.from_bytes(record)
    assert [VarIntCoder().decode(cell) for cell in restored.cells] == [3, 7]


def test_an_element_in_the_bundle_of_its_record_finds_it():
    key = Key(**UNREAD)
    assert len(key.bundle(key.element(key.record()), key.element(5), key.element(6))) > 1
    (record,) = [o.value.value[1][1] for o in key.bundle(key.fire(DRAINED))]
    cells = SnapshotRecord.from_bytes(record).cells
    assert [VarIntCoder().decode(cell) for cell in cells] == [4, 13]


def test_a_record_that_is_kept_and_comes_again_counts_once():
    key = Key(**UNREAD)
    key.bundle(key.element(key.record()), key.element(key.record()))
    key.bundle(key.element(5))
    key.bundle(key.element(key.record()))
    (record,) = [o.value.value[1][1] for o in key.bundle(key.fire(DRAINED))]
    cells = SnapshotRecord.from_bytes(record).cells
    assert [VarIntCoder().decode(cell) for cell in cells] == [3, 7]


def test_an_element_that_came_before_a_record_is_processed_when_the_clock_fires():
    key = Key(**UNREAD)
    assert key.bundle(key.element(5)) == []
    assert key.bundle(key.element(key.record())) == []
    assert len(key.bundle(key.fire(GATE))) > 0


def test_a_record_behind_the_gate_stops_the_run_where_records_are_kept_too():
    key = Key(**UNREAD)
    key.bundle(key.element(5), key.fire(GATE))
    with pytest.raises(errors.WatermarkError, match="'op': the runner let the watermark pass"):
        key.bundle(key.element(key.record()), key.element(6))


@pytest.mark.parametrize(
    "changes",
    [
        {"timers": (SavedTimer("t", "", "event", 5, None),)},
        {"carried": (CarriedOutput(None, 5, b"", VarIntCoder().encode(1)),)},
        {"cells": (b"x" * 5000, None)},
    ],
    ids=["a timer", "a carried output", "a large value"],
)
def test_a_record_of_which_something_is_due_or_that_is_large_is_restored_at_once(changes):
    key = Key(**UNREAD, on_missing="drop")
    record = dataclasses.replace(SnapshotRecord.from_bytes(key.record().record), **changes)
    key.bundle(key.element(Restored(record.to_bytes())))
    assert not any(value.startswith(SAVED) for value in key.control.values)
    assert key.control.values


def counts_reads(key):
    reads = []
    read, key.control.read = key.control.read, lambda: reads.append(1) or read()
    return reads


@pytest.mark.parametrize("steps", ["element", "record, element"])
def test_where_all_input_is_in_one_bundle_nothing_is_read_before_the_clock(steps):
    """Each cell that is read is measured by the SDK's cache, and one that is added to is not."""
    key = Key(**UNREAD, restoring="record" in steps)
    reads = counts_reads(key)
    events = [key.element(key.record())] * ("record" in steps) + [key.element(5), key.element(6)]
    assert len(key.bundle(*events)) > 1
    assert reads == []
    (record,) = [o.value.value[1][1] for o in key.bundle(key.fire(DRAINED))]
    assert reads == [1]
    cells = SnapshotRecord.from_bytes(record).cells
    assert VarIntCoder().decode(cells[0]) == (4 if "record" in steps else 2)


def test_a_bundle_after_the_one_reads_what_that_left():
    key = Key(**UNREAD, restoring=False)
    for value in (5, 6):
        key.bundle(key.element(value))
    (record,) = [o.value.value[1][1] for o in key.bundle(key.fire(DRAINED))]
    assert VarIntCoder().decode(SnapshotRecord.from_bytes(record).cells[0]) == 2


def test_two_bundles_that_each_found_nothing_stop_the_run():
    key = Key(**UNREAD, restoring=False)
    for _ in range(2):
        key.bundle(key.element(5))
        key.operator = KeyedOperator(key.fn, read_signature(key.fn), key.config)
    with pytest.raises(errors.WatermarkError, match="'k' in two bundles"):
        key.bundle(key.fire(DRAINED))


def test_a_bag_is_in_the_control_cell_while_it_is_small_and_then_in_its_own():
    key = Key(BagFn(), **AT_THE_END, bag_bytes=6)
    (cell, recent) = key.growing
    held = []
    for value in (1, 2, 3, 4, 0, 5, 6):
        (told,) = key.bundle(key.element(value))
        held.append((told, list(cell.values)))
    assert held == [
        ([1], []),
        ([1, 2], []),
        ([1, 2, 3], []),
        ([1, 2, 3, 4], [1, 2, 3, 4]),
        ([], []),
        ([5], []),
        ([5, 6], []),
    ]
    assert recent.values == []
    (record,) = [o.value.value[1][1] for o in key.bundle(key.fire(DRAINED))]
    assert SnapshotRecord.from_bytes(record).cells == ((b"\x05", b"\x06"),)


@pytest.mark.parametrize("items", [2, 4])
def test_a_restored_bag_is_where_it_belongs(items):
    values = tuple(range(1, items + 1))
    key = Key(BagFn(), bounded=True, bag_bytes=6)
    saved = SnapshotRecord(b"k", b"", False, 0, (tuple(map(VarIntCoder().encode, values)),), (), ())
    key.bundle(key.element(Restored(saved.to_bytes())))
    assert key.growing[0].values == [*values] * (items == 4)
    assert key.bundle(key.element(9)) == [[*values, 9]]


def test_a_small_bag_that_is_cleared_in_a_later_epoch_is_saved_as_empty():
    key = Key(BagFn(), epochs=Epochs(EPOCH, None), restoring=False, bag_bytes=6)
    key.bundle(key.element(1), key.fire(0), key.element(2))
    (record,) = [o.value.value[1][1] for o in key.bundle(key.fire(EPOCH))]
    assert SnapshotRecord.from_bytes(record).cells == ((b"\x01", b"\x02"),)
    key.bundle(key.element(0, seconds=61))
    (record,) = [o.value.value[1][1] for o in key.bundle(key.fire(2 * EPOCH))]
    assert SnapshotRecord.from_bytes(record).deleted
    assert key.control.values == []


@pytest.mark.parametrize("room", [0, 8, 2048])
def test_elements_that_wait_are_in_the_control_cell_up_to_a_limit(room):
    key = Key(epochs=Epochs(EPOCH, None), restoring=False, waiting_bytes=room)
    for value in (3, 0, 4):
        assert key.bundle(key.element(value, seconds=61 if value else 1)) == []
    assert len(key.buffer.values) == {0: 3, 8: 3, 2048: 0}[room]
    assert key.bundle(key.fire(0)) == []
    assert key.bundle(key.element(5, seconds=62)) == []
    assert len(key.buffer.values) == {0: 3, 8: 3, 2048: 0}[room]
    outputs = [o for o in key.bundle(key.fire(EPOCH)) if isinstance(o, WindowedValue)]
    assert sorted(o.value[2] for o in outputs) == [(3,), (4,), (5,)]
    assert key.buffer.values == []
