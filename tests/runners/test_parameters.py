"""Everything that Beam gives a stateful DoFn arrives, the same as without checkpoints."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import FastPrimitivesCoder, VarIntCoder
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms import combiners
from apache_beam.transforms.core import CombineFn
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    CombiningValueStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import FixedWindows, TimestampedValue
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import PaneInfo

from beam_ckpt import open_store
from beam_ckpt.testing.cuts import run_checkpointed, run_plain, saved_state
from beam_ckpt.testing.event_loop import canonical
from beam_ckpt.testing.streams import Advance, Arrive, StreamPlan

ROW = tuple[str, str, tuple[Any, ...]]
COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())
LOG: list[str] = []

DATA = (
    (5_000_000, "a", 1),
    (61_000_000, "b", 2),
    (62_000_000, "a", 3),
    (130_000_000, "a", 4),
)
STREAM = StreamPlan(
    (
        Arrive((DATA[2], DATA[0])),
        Advance(50_000_000),
        Arrive(DATA[1:2]),
        Advance(120_000_000),
        Arrive(DATA[3:]),
    )
)
SOURCES = {"FnApiRunner": DATA, "BundleBasedDirectRunner": STREAM}
runners = pytest.mark.parametrize("runner", SOURCES)
# One checkpoint at the end; epochs, for which elements wait; and sorted, for which all of them do.
settings = pytest.mark.parametrize(
    "settings", [{}, {"every": 60}, {"every": 60, "time_sorted": True}], ids=str
)


@contextlib.contextmanager
def noted(name: str) -> Iterator[list[str]]:
    LOG.append(f"{name} entered")
    yield [name]
    LOG.append(f"{name} left")


FOREVER = beam.DoFn.SetupContextParam(noted, ("setup",))
FOR_NOW = beam.DoFn.BundleContextParam(noted, ("bundle",))


@beam.typehints.with_input_types(tuple[str, int])
@beam.typehints.with_output_types(ROW)
class EverythingFn(beam.DoFn):
    """Asks for all that there is, and gives outputs in all the ways that there are."""

    LATER = TimerSpec("later", TimeDomain.WATERMARK)

    def setup(self) -> None:
        self.calls = ["setup"]

    def start_bundle(self) -> None:
        self.calls.append("start")

    def finish_bundle(self):
        LOG.append("finished")
        yield from ()

    def process(
        self,
        element=beam.DoFn.ElementParam,
        key=beam.DoFn.KeyParam,
        ts=beam.DoFn.TimestampParam,
        window=beam.DoFn.WindowParam,
        windowed=beam.DoFn.WindowedValueParam,
        pane=beam.DoFn.PaneInfoParam,
        forever=FOREVER,
        for_now=FOR_NOW,
        count=beam.DoFn.StateParam(COUNT),
        later=beam.DoFn.TimerParam(LATER),
        factor=10,
    ):
        assert key == element[0]
        assert self.calls[:2] == ["setup", "start"]
        assert windowed.value == element
        assert windowed.timestamp == ts
        assert list(windowed.windows) == [window]
        assert isinstance(pane, PaneInfo)
        assert windowed.pane_info == pane
        assert (forever, for_now) == (["setup"], ["bundle"])
        count.write((count.read() or 0) + 1)
        later.set(ts + 7, dynamic_timer_tag=f"of {element[1]}")
        said = (element[1] * factor, str(window.max_timestamp()), pane.timing)
        yield key, "plain", said
        yield TimestampedValue((key, "dated", said), ts + 1)
        yield windowed.with_value((key, "windowed", said))
        yield TaggedOutput("odd", (key, "tagged", said))
        yield TaggedOutput("odd", TimestampedValue((key, "tagged and dated", said), ts + 2))

    @on_timer(LATER)
    def on_later(
        self,
        key=beam.DoFn.KeyParam,
        ts=beam.DoFn.TimestampParam,
        window=beam.DoFn.WindowParam,
        tag=beam.DoFn.DynamicTimerTagParam,
        count=beam.DoFn.StateParam(COUNT),
        later=beam.DoFn.TimerParam(LATER),
    ):
        assert count.read() > 0
        return [(key, tag, (str(ts), str(window.max_timestamp())))]


@runners
@settings
@pytest.mark.parametrize("window_fn", [None, FixedWindows(100)], ids=["global", "windows"])
def test_every_parameter_and_every_way_of_output_is_beams_own(runner, settings, window_fn):
    LOG.clear()
    common = {"runner": runner, "tags": ["odd"], "window_fn": window_fn}
    plain = run_plain(EverythingFn(), SOURCES[runner], **common)
    assert len(plain.outputs) == 4 * 6
    LOG.clear()
    store = open_store("memory://every-parameter")
    ours = run_checkpointed(
        EverythingFn(), SOURCES[runner], store=store, restore="fresh", **settings, **common
    )
    assert canonical(ours.outputs) == canonical(plain.outputs)
    if settings:
        assert ours.metrics["elements_buffered"] > 0
    assert [LOG[i + 1] for i, entry in enumerate(LOG) if entry == "finished"] == [
        "bundle left"
    ] * LOG.count("finished"), "a bundle's context is left after its end"
    for name in ("setup", "bundle"):
        assert LOG.count(f"{name} entered") == LOG.count(f"{name} left") > 0


class AverageFn(CombineFn):
    """A CombineFn with a life of its own: used before its setup, it fails."""

    def setup(self) -> None:
        self.ready = True

    def create_accumulator(self) -> tuple[int, int]:
        assert self.ready
        return 0, 0

    def add_input(self, accumulator, element):
        return accumulator[0] + element, accumulator[1] + 1

    def merge_accumulators(self, accumulators):
        totals, counts = zip(*accumulators, strict=True)
        return sum(totals), sum(counts)

    def extract_output(self, accumulator):
        return accumulator[0] // max(accumulator[1], 1)

    def teardown(self) -> None:
        del self.ready


COMBINERS: dict[str, Any] = {
    "mean": combiners.MeanCombineFn(),
    "count": combiners.CountCombineFn(),
    "largest": combiners.Largest(2),
    "smallest": combiners.Smallest(2),
    "top": combiners.TopCombineFn(2, key=lambda x: -x),
    "list": combiners.ToListCombineFn(),
    "set": combiners.ToSetCombineFn(),
    "pair": combiners.SingleInputTupleCombineFn(max, sum),
    "sum": sum,
    "max": max,
    "min": min,
    "any": any,
    "all": all,
    "average": AverageFn(),
}
CELLS = {
    name: CombiningValueStateSpec(name, FastPrimitivesCoder(), fn) for name, fn in COMBINERS.items()
}


def combining_process(self, element, **cells):
    before = {}
    for name, cell in cells.items():
        before[name] = None if element[1] % 5 == 0 else _read(cell)
    for name, cell in cells.items():
        if element[1] % 7 == 0:
            cell.clear()
        if name != "any" or element[1] % 2:
            cell.add(element[1])
        before[name] = before[name], _read(cell)
    yield element[0], "cells", tuple(before[name] for name in COMBINERS)


def _read(cell: Any) -> Any:
    try:
        value = cell.read()
    except ValueError as error:  # the CombineFn's own: there is no greatest of nothing
        return str(error)
    if isinstance(value, float) and value != value:
        return "nan"
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    shown = repr(value)
    if isinstance(value, list):
        value.append("the author's own now")
    return shown


class CombiningFn(beam.DoFn):
    def process(
        self,
        element: tuple[str, int],
        c00=beam.DoFn.StateParam(CELLS["mean"]),
        c01=beam.DoFn.StateParam(CELLS["count"]),
        c02=beam.DoFn.StateParam(CELLS["largest"]),
        c03=beam.DoFn.StateParam(CELLS["smallest"]),
        c04=beam.DoFn.StateParam(CELLS["top"]),
        c05=beam.DoFn.StateParam(CELLS["list"]),
        c06=beam.DoFn.StateParam(CELLS["set"]),
        c07=beam.DoFn.StateParam(CELLS["pair"]),
        c08=beam.DoFn.StateParam(CELLS["sum"]),
        c09=beam.DoFn.StateParam(CELLS["max"]),
        c10=beam.DoFn.StateParam(CELLS["min"]),
        c11=beam.DoFn.StateParam(CELLS["any"]),
        c12=beam.DoFn.StateParam(CELLS["all"]),
        c13=beam.DoFn.StateParam(CELLS["average"]),
    ) -> Any:
        cells = [c00, c01, c02, c03, c04, c05, c06, c07, c08, c09, c10, c11, c12, c13]
        return combining_process(self, element, **dict(zip(COMBINERS, cells, strict=True)))


class Accumulator:
    """What a combining cell is in one process that never stops."""

    def __init__(self, fn: CombineFn) -> None:
        self._fn = fn
        self.clear()

    def clear(self) -> None:
        self._value = self._fn.create_accumulator()

    def add(self, value: Any) -> None:
        self._value = self._fn.add_input(self._value, value)

    def read(self) -> Any:
        value = self._fn.merge_accumulators([copy.deepcopy(self._value)])
        return self._fn.extract_output(value)


def test_every_combiner_of_beam_goes_on_from_its_accumulator():
    data = tuple((i * 10_000_000, "ab"[i % 2], i) for i in range(1, 25))
    expected = []
    for key in "ab":
        fns = {name: CombineFn.maybe_from_callable(fn) for name, fn in COMBINERS.items()}
        for fn in fns.values():
            fn.setup()
        cells = {name: Accumulator(fn) for name, fn in fns.items()}
        for _, k, value in data:
            if k == key:
                expected += combining_process(None, (k, value), **cells)
    store = open_store("memory://every-combiner")
    found = []
    for until in (70, 155, None):
        part = run_checkpointed(
            CombiningFn(), data, runner="FnApiRunner", store=store, until=until, time_sorted=True
        )
        found += [output.value for output in part.outputs]
    assert sorted(found, key=repr) == sorted(expected, key=repr)


@beam.typehints.with_input_types(tuple[str, int])
@beam.typehints.with_output_types(ROW)
class AlarmFn(beam.DoFn):
    """Counts, and says the count when the wall clock says so."""

    ALARM = TimerSpec("alarm", TimeDomain.REAL_TIME)

    def process(
        self,
        element,
        count=beam.DoFn.StateParam(COUNT),
        alarm=beam.DoFn.TimerParam(ALARM),
    ):
        count.write((count.read() or 0) + 1)
        if element[1] < 0:
            alarm.clear(dynamic_timer_tag=str(-element[1]))
        else:
            alarm.set(Timestamp(1000 + element[1]), dynamic_timer_tag=str(element[1]))

    @on_timer(ALARM)
    def on_alarm(
        self,
        key=beam.DoFn.KeyParam,
        tag=beam.DoFn.DynamicTimerTagParam,
        count=beam.DoFn.StateParam(COUNT),
    ):
        yield key, f"alarm {tag}", (count.read(),)


class Walled(StreamPlan):
    """A plan whose wall clock says 1,015 s before the watermark ends."""

    def to_test_stream(self, coder=None):
        stream = super().to_test_stream(coder)
        events = list(stream._events)
        clock = beam.testing.test_stream.ProcessingTimeEvent(1015)
        stream._events = [*events[:-1], clock, *events[-1:]]
        return stream


def test_processing_time_timers_ring_and_those_that_have_not_are_saved():
    early = (
        (1_000_000, "a", 10),
        (2_000_000, "a", 12),
        (3_000_000, "a", 20),
        (4_000_000, "a", -12),
    )
    store = open_store("memory://alarms")
    first = run_checkpointed(
        AlarmFn(),
        Walled((Arrive(early),)),
        runner="BundleBasedDirectRunner",
        store=store,
        until=60,
    )
    assert [output.value for output in first.outputs] == []  # later than the cut, so carried
    (saved,) = saved_state(store, AlarmFn()).values()
    assert saved.timers == {("ts-alarm", "20"): 1_020_000_000}
    assert [output.value for output in saved.carried] == [("a", "alarm 10", (4,))]
    second = run_checkpointed(
        AlarmFn(),
        Walled((Arrive(((70_000_000, "b", 11),)),)),
        runner="BundleBasedDirectRunner",
        store=store,
    )
    rung = sorted(output.value for output in second.outputs)
    # 12 was cleared. 20 was pending at the cut; a runner that drains lets it go.
    assert rung == [("a", "alarm 10", (4,)), ("b", "alarm 11", (1,))]
