"""Authors' DoFns to try a checkpoint on: small, stateful, and each nasty in a way of its own.

All of them take `(key: str, value: int)` and give `(key: str, what: str, numbers: tuple[int, ...])`
so that any of them fits any test. Times in them are whole seconds. `ORDER_FREE` are folds whose
outputs and final state do not depend on the order within a key; the results of `ORDERED` ones do,
and so they have a defined result only with time-sorted input. `MORE_CELLS` are ordered as well and
use combining and ordered-list cells.
"""

# mypy: disable-error-code="assignment"
# A DoFn declares its parameters by defaults, which are not of the parameters' types.
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import apache_beam as beam
from apache_beam.coders import TupleCoder, TupleSequenceCoder, VarIntCoder
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.combiners import MeanCombineFn
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagRuntimeState,
    BagStateSpec,
    CombiningValueRuntimeState,
    CombiningValueStateSpec,
    OrderedListRuntimeState,
    OrderedListStateSpec,
    ReadModifyWriteRuntimeState,
    ReadModifyWriteStateSpec,
    RuntimeTimer,
    SetRuntimeState,
    SetStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Timestamp

__all__ = ["MORE_CELLS", "ORDERED", "ORDER_FREE", "TAGS", "Subject"]

Row = tuple[str, str, tuple[int, ...]]
Tagged = TaggedOutput[str, Row | TimestampedValue[Row]]

TAGS = ("odd", "due", "was")
"""The tags of the tagged outputs that the subjects give."""

_SECOND = 1_000_000
_PAIR = TupleCoder((VarIntCoder(), VarIntCoder()))
_TRAIL = TupleSequenceCoder(VarIntCoder())


@beam.typehints.with_input_types(tuple[str, int])
@beam.typehints.with_output_types(tuple[str, str, tuple[int, ...]])
class _SubjectFn(beam.DoFn):
    """What all subjects have in common: their types."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


def _period(ts: Timestamp, seconds: int) -> int:
    return int(ts.micros // (seconds * _SECOND))


# ------------------------------------------------------------------- order within a key is free


class TumblingFn(_SubjectFn):
    """Per 70 s of event time the values seen, sorted, and how many there have been ever."""

    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())
    SEEN = BagStateSpec("seen", _PAIR)
    FLUSH = TimerSpec("flush", TimeDomain.WATERMARK)

    def process(
        self,
        element: tuple[str, int],
        ts: Timestamp = beam.DoFn.TimestampParam,
        count: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(COUNT),
        seen: BagRuntimeState = beam.DoFn.StateParam(SEEN),
        flush: RuntimeTimer = beam.DoFn.TimerParam(FLUSH),
    ) -> None:
        index = _period(ts, 70)
        count.write((count.read() or 0) + 1)
        seen.add((index, element[1]))
        flush.set(Timestamp((index + 1) * 70), dynamic_timer_tag=str(index))

    @on_timer(FLUSH)
    def on_flush(
        self,
        key: str = beam.DoFn.KeyParam,
        tag: str = beam.DoFn.DynamicTimerTagParam,
        seen: BagRuntimeState = beam.DoFn.StateParam(SEEN),
    ) -> Iterator[Row]:
        items = list(seen.read())
        yield key, f"period {tag}", tuple(sorted(v for index, v in items if str(index) == tag))
        seen.clear()
        for item in items:
            if str(item[0]) != tag:
                seen.add(item)


class CountAndSumFn(_SubjectFn):
    """Counts and adds up for ever; passes each value on, odd ones on a tagged output too."""

    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())
    SUM = ReadModifyWriteStateSpec("sum", VarIntCoder())

    def process(
        self,
        element: tuple[str, int],
        count: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(COUNT),
        total: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(SUM),
    ) -> list[Row | Tagged] | None:
        key, value = element
        count.write((count.read() or 0) + 1)
        total.write((total.read() or 0) + value)
        if value == 0:
            return None
        row = (key, "value", (value,))
        return [row, TaggedOutput("odd", row)] if value % 2 else [row]


class ClosingSetFn(_SubjectFn):
    """The distinct values of each 100 s, told 25 s after its end and again, as due, in future."""

    IDS = SetStateSpec("ids", _PAIR)
    CLOSE = TimerSpec("close", TimeDomain.WATERMARK)

    def process(
        self,
        element: tuple[str, int],
        ts: Timestamp = beam.DoFn.TimestampParam,
        ids: SetRuntimeState = beam.DoFn.StateParam(IDS),
        close: RuntimeTimer = beam.DoFn.TimerParam(CLOSE),
    ) -> None:
        index = _period(ts, 100)
        ids.add((index, element[1]))
        close.set(Timestamp((index + 1) * 100 + 25), dynamic_timer_tag=str(index))

    @on_timer(CLOSE)
    def on_close(
        self,
        key: str = beam.DoFn.KeyParam,
        ts: Timestamp = beam.DoFn.TimestampParam,
        tag: str = beam.DoFn.DynamicTimerTagParam,
        ids: SetRuntimeState = beam.DoFn.StateParam(IDS),
    ) -> Iterator[Row | Tagged]:
        items = set(ids.read())
        row = key, f"closed {tag}", tuple(sorted(v for index, v in items if str(index) == tag))
        yield row
        yield TaggedOutput("due", TimestampedValue(row, Timestamp((_period(ts, 200) + 1) * 200)))
        ids.clear()
        for item in sorted(items):
            if str(item[0]) != tag:
                ids.add(item)


# -------------------------------------------------------------------- order within a key matters


class DelayChainFn(_SubjectFn):
    """The delay that is handed from one element to the next, worn off by the time between them.

    A timer, overwritten by each element, tells of a key that has not been seen for 90 s.
    """

    CARRY = ReadModifyWriteStateSpec("carry", VarIntCoder())
    LAST = ReadModifyWriteStateSpec("last", VarIntCoder())
    GONE = TimerSpec("gone", TimeDomain.WATERMARK)

    def process(
        self,
        element: tuple[str, int],
        ts: Timestamp = beam.DoFn.TimestampParam,
        carry: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(CARRY),
        last: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(LAST),
        gone: RuntimeTimer = beam.DoFn.TimerParam(GONE),
    ) -> Iterator[Row]:
        key, value = element
        before = last.read()
        rested = 0 if before is None else (ts.micros - before) // (10 * _SECOND)
        delay = max(0, (carry.read() or 0) - rested) + value
        carry.write(delay)
        last.write(ts.micros)
        gone.set(ts + 90)
        yield key, "delay", (value, delay)

    @on_timer(GONE)
    def on_gone(
        self,
        key: str = beam.DoFn.KeyParam,
        carry: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(CARRY),
        last: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(LAST),
    ) -> Iterator[Row]:
        yield key, "gone", (carry.read(), last.read())
        carry.clear()
        last.clear()


class LastValueFn(_SubjectFn):
    """The last value, forgotten 30 s later; a multiple of 5 forgets it at once, timer and all."""

    LAST = ReadModifyWriteStateSpec("last", VarIntCoder())
    TIMEOUT = TimerSpec("timeout", TimeDomain.WATERMARK)

    def process(
        self,
        element: tuple[str, int],
        ts: Timestamp = beam.DoFn.TimestampParam,
        last: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(LAST),
        timeout: RuntimeTimer = beam.DoFn.TimerParam(TIMEOUT),
    ) -> Iterable[Row | Tagged]:
        key, value = element
        before = last.read()
        if value % 5 == 0:
            last.clear()
            timeout.clear()
            return [(key, "reset", () if before is None else (before,))]
        last.write(value)
        timeout.set(ts + 30)
        return [] if before is None else [TaggedOutput("was", (key, "was", (before, value)))]

    @on_timer(TIMEOUT)
    def on_timeout(
        self,
        key: str = beam.DoFn.KeyParam,
        last: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(LAST),
    ) -> Iterator[Row]:
        yield key, "timeout", (last.read(),)
        last.clear()


class EchoFn(_SubjectFn):
    """Timers set in the past, by elements and by callbacks, under many tags; a trail of all."""

    TRAIL = ReadModifyWriteStateSpec("trail", _TRAIL)
    ECHO = TimerSpec("echo", TimeDomain.WATERMARK)
    AGAIN = TimerSpec("again", TimeDomain.WATERMARK)

    def process(
        self,
        element: tuple[str, int],
        ts: Timestamp = beam.DoFn.TimestampParam,
        trail: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(TRAIL),
        echo: RuntimeTimer = beam.DoFn.TimerParam(ECHO),
    ) -> None:
        value = element[1]
        trail.write((*(trail.read() or ()), value))
        echo.set(ts - 5 - value % 3, dynamic_timer_tag=str(value))
        echo.set(ts + 40, dynamic_timer_tag=f"late {value}")

    @on_timer(ECHO)
    def on_echo(
        self,
        key: str = beam.DoFn.KeyParam,
        ts: Timestamp = beam.DoFn.TimestampParam,
        tag: str = beam.DoFn.DynamicTimerTagParam,
        trail: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(TRAIL),
        again: RuntimeTimer = beam.DoFn.TimerParam(AGAIN),
    ) -> Iterator[Row]:
        yield key, f"echo {tag}", trail.read() or ()
        again.set(ts - 1, dynamic_timer_tag=tag)

    @on_timer(AGAIN)
    def on_again(
        self,
        key: str = beam.DoFn.KeyParam,
        tag: str = beam.DoFn.DynamicTimerTagParam,
        trail: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(TRAIL),
    ) -> Iterator[Row]:
        seen = trail.read() or ()
        yield key, f"again {tag}", seen
        if tag.startswith("late"):
            trail.clear()
        elif len(seen) > 3:
            trail.write(seen[-3:])


class RemindersFn(_SubjectFn):
    """Outputs dated into the future: at the next full 100 s, and 45 s on under a tag."""

    TRAIL = ReadModifyWriteStateSpec("trail", _TRAIL)

    def process(
        self,
        element: tuple[str, int],
        ts: Timestamp = beam.DoFn.TimestampParam,
        trail: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(TRAIL),
    ) -> Iterator[Row | TimestampedValue[Row] | Tagged]:
        key, value = element
        seen = (*(trail.read() or ()), value)[-3:]
        trail.write(seen)
        yield key, "now", seen
        yield TimestampedValue((key, "bell", seen), Timestamp((_period(ts, 100) + 1) * 100))
        yield TaggedOutput("due", TimestampedValue((key, "due", seen), ts + 45))


class ConductorFn(_SubjectFn):
    """Families of one time: the first clears, overwrites or brings forward the timers of others."""

    TURN = ReadModifyWriteStateSpec("turn", VarIntCoder())
    NOTES = BagStateSpec("notes", VarIntCoder())
    BATON = TimerSpec("a_baton", TimeDomain.WATERMARK)
    HORN = TimerSpec("b_horn", TimeDomain.WATERMARK)

    def process(
        self,
        element: tuple[str, int],
        ts: Timestamp = beam.DoFn.TimestampParam,
        notes: BagRuntimeState = beam.DoFn.StateParam(NOTES),
        baton: RuntimeTimer = beam.DoFn.TimerParam(BATON),
        horn: RuntimeTimer = beam.DoFn.TimerParam(HORN),
    ) -> None:
        beat = Timestamp((_period(ts, 20) + 1) * 20)
        notes.add(element[1])
        baton.set(beat)
        for name in ("first", "second"):
            horn.set(beat, dynamic_timer_tag=name)

    @on_timer(BATON)
    def on_baton(
        self,
        key: str = beam.DoFn.KeyParam,
        ts: Timestamp = beam.DoFn.TimestampParam,
        turn: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(TURN),
        horn: RuntimeTimer = beam.DoFn.TimerParam(HORN),
    ) -> Iterator[Row]:
        now = (turn.read() or 0) + 1
        turn.write(now)
        if now % 3 == 0:
            horn.clear("first")
        elif now % 3 == 1:
            horn.set(ts + 25, dynamic_timer_tag="second")
        else:
            horn.set(ts - 7, dynamic_timer_tag="second")
        yield key, "baton", (now,)

    @on_timer(HORN)
    def on_horn(
        self,
        key: str = beam.DoFn.KeyParam,
        tag: str = beam.DoFn.DynamicTimerTagParam,
        turn: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(TURN),
        notes: BagRuntimeState = beam.DoFn.StateParam(NOTES),
    ) -> Iterator[Row]:
        yield key, f"horn {tag}", (turn.read() or 0, *sorted(notes.read()))
        if tag == "first":
            notes.clear()


class TickerFn(_SubjectFn):
    """A timer that sets itself again, every 20 s, as many times as its tag's value says."""

    LEFT = ReadModifyWriteStateSpec("left", VarIntCoder())
    TICK = TimerSpec("tick", TimeDomain.WATERMARK)

    def process(
        self,
        element: tuple[str, int],
        ts: Timestamp = beam.DoFn.TimestampParam,
        left: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(LEFT),
        tick: RuntimeTimer = beam.DoFn.TimerParam(TICK),
    ) -> None:
        left.write((left.read() or 0) + element[1] % 4)
        tick.set(ts + 20)

    @on_timer(TICK)
    def on_tick(
        self,
        key: str = beam.DoFn.KeyParam,
        ts: Timestamp = beam.DoFn.TimestampParam,
        left: ReadModifyWriteRuntimeState = beam.DoFn.StateParam(LEFT),
        tick: RuntimeTimer = beam.DoFn.TimerParam(TICK),
    ) -> Iterator[Row]:
        now = left.read() or 0
        yield key, "tick", (now, ts.micros // _SECOND)
        if now > 1:
            left.write(now - 1)
            tick.set(ts + 20)
        else:
            left.clear()


# --------------------------------------------------------------------------- more kinds of cells


class RunningMeanFn(_SubjectFn):
    """The mean so far, in thousandths; a combining cell, begun anew 50 s after the last value."""

    MEAN = CombiningValueStateSpec("mean", _PAIR, MeanCombineFn())
    ANEW = TimerSpec("anew", TimeDomain.WATERMARK)

    def process(
        self,
        element: tuple[str, int],
        ts: Timestamp = beam.DoFn.TimestampParam,
        mean: CombiningValueRuntimeState = beam.DoFn.StateParam(MEAN),
        anew: RuntimeTimer = beam.DoFn.TimerParam(ANEW),
    ) -> Iterator[Row]:
        mean.add(element[1])
        anew.set(ts + 50)
        yield element[0], "mean", (round(cast(float, mean.read()) * 1000),)

    @on_timer(ANEW)
    def on_anew(
        self,
        mean: CombiningValueRuntimeState = beam.DoFn.StateParam(MEAN),
    ) -> None:
        mean.clear()


class HistoryFn(_SubjectFn):
    """An ordered list, one entry a value at `value % 7` seconds before it; 60 s are kept."""

    HISTORY = OrderedListStateSpec("history", VarIntCoder())

    def process(
        self,
        element: tuple[str, int],
        ts: Timestamp = beam.DoFn.TimestampParam,
        history: OrderedListRuntimeState = beam.DoFn.StateParam(HISTORY),
    ) -> Iterator[Row]:
        key, value = element
        history.add((ts - value % 7, value))
        history.clear_range(Timestamp(micros=-(1 << 62)), ts - 60)
        yield key, "recent", tuple(sorted(v for _, v in history.read_range(ts - 20, ts)))
        yield key, "kept", tuple(t.micros // 1000 for t, _ in history.read())


@dataclass(frozen=True)
class Subject:
    """A DoFn with what a test has to know about it.

    Attributes:
        fn: The DoFn; picklable.
        time_sorted: Its result depends on the order within a key.
        races: Timers of one key that fall due together clear or overwrite each other, or timers
            are set in the past: plain Beam's result is not the strict one even when the watermark
            follows the data step by step.
    """

    fn: beam.DoFn
    time_sorted: bool
    races: bool = False

    @property
    def name(self) -> str:
        """A name for test ids and operators."""
        return type(self.fn).__name__.removesuffix("Fn")


ORDER_FREE = (
    Subject(TumblingFn(), time_sorted=False),
    Subject(CountAndSumFn(), time_sorted=False),
    Subject(ClosingSetFn(), time_sorted=False),
)

ORDERED = (
    Subject(DelayChainFn(), time_sorted=True),
    Subject(LastValueFn(), time_sorted=True),
    Subject(EchoFn(), time_sorted=True, races=True),
    Subject(RemindersFn(), time_sorted=True),
    Subject(ConductorFn(), time_sorted=True, races=True),
    Subject(TickerFn(), time_sorted=True),
)

MORE_CELLS = (
    Subject(RunningMeanFn(), time_sorted=True),
    Subject(HistoryFn(), time_sorted=True),
)
