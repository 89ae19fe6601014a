"""A real unbounded source for tests: a log of dated rows, replayed out of order, live.

A `ReplayLog` is what a partition of Kafka is to its readers: rows in an order of arrival that is
always the same and is not that of their event times. `ReadReplay` reads it as an unbounded source
does: a splittable DoFn that gives rows at some speed, tells the watermark by hand, and can begin at
any moment of event time. It is a part for tests: the rows are in memory, and there is one reader::

    log = ReplayLog(rows, displacement=60)
    with beam.Pipeline(options=streaming) as p, Checkpoints(p, store, every=3600) as ckpt:
        events = p | ReadReplay(log, start=ckpt.resume_at, speed=86_400, hint=tuple[str, int])
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.transforms.window import TimestampedValue
from apache_beam.typehints import typehints
from apache_beam.utils.timestamp import Duration, Timestamp

__all__ = ["ReadReplay", "ReplayLog", "Row"]

Row = tuple[int, Any]
"""(event time in µs, element)."""

_SECOND = 1_000_000
_MS = 1_000
# Without a speed: rows of one bundle. With one: the least pause between two bundles, in seconds.
_BUNDLE, _PAUSE = 50, 0.02
_FOR_EVER = 1 << 60


@dataclass(frozen=True)
class ReplayLog:
    """Rows in their order of arrival. Positions count from 0.

    Attributes:
        rows: The rows in any order, at least one, or a function that gives them, the same each
            time (so that a large set is read by the workers and not pickled to them).
        displacement: How many seconds of event time a row may come late. Each event time is drawn a
            delay of at most that; rows arrive in the order of event time plus delay. Those of one
            event time come together, in one bundle.
        seed: Draws the delays.
        rounds: How many times the rows are gone through, each time later by the length of the whole
            (and the displacement, and a second); `None`: for ever.
    """

    rows: Sequence[Row] | Callable[[], Sequence[Row]]
    displacement: float = 0.0
    seed: int = 0
    rounds: int | None = 1

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    @functools.cached_property
    def _arrivals(self) -> list[tuple[int, int, Any]]:
        """(moment of arrival, event time, element) of one round; times in µs."""
        rows = self.rows() if callable(self.rows) else self.rows
        if not rows:
            raise ValueError("a ReplayLog needs rows. What to do: give at least one")
        draw = random.Random(self.seed)
        latest = int(self.displacement * 1000)
        delay = {at: draw.randint(0, latest) * _MS for at in sorted({at for at, _ in rows})}
        late = [(at + delay[at], at, element) for at, element in rows]
        return sorted(late, key=lambda row: row[:2])

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return _FOR_EVER if self.rounds is None else len(self._arrivals) * self.rounds

    @functools.cached_property
    def _period(self) -> int:
        """How much later each round is than the one before: none comes before the last is over."""
        times = [at for _, at, _ in self._arrivals]
        span = max(times) - min(times) + int(self.displacement * _SECOND) + _SECOND
        return -(-span // _MS) * _MS

    def arrival(self, position: int) -> int:
        """When the row comes, in µs: a moment of event time, which never goes back."""
        turn, index = divmod(position, len(self._arrivals))
        return self._arrivals[index][0] + turn * self._period

    def row(self, position: int) -> Row:
        """The row at a position."""
        turn, index = divmod(position, len(self._arrivals))
        _, at, element = self._arrivals[index]
        return at + turn * self._period, element

    def watermark(self, position: int) -> int:
        """What is promised of the rows at and after a position, in µs: none is as old.

        Whole milliseconds, and 1 ms below the oldest row that the displacement allows, so that no
        row is ever late, whichever way a runner reads 'the watermark has reached T'.
        """
        oldest = self.arrival(position) - int(self.displacement * _SECOND)
        return oldest // _MS * _MS - _MS

    def position(self, start: int | None) -> int:
        """From where to read to miss nothing at or after `start` (µs); `None`: the beginning.

        The first such row in order of arrival: older rows that come after it are read again.
        """
        if start is None:
            return 0
        times = [at for _, at, _ in self._arrivals]
        turn = max(0, (start - max(times) + self._period - 1) // self._period)
        at = turn * len(times)
        while at < self.stop and self.row(at)[0] < start:
            at += 1
        return min(at, self.stop)

    def below(self, boundary: int | None) -> list[Row]:
        """The rows older than a moment (µs), in order of arrival; `None`: all of them."""
        if boundary is None and self.rounds is None:
            raise ValueError("an endless ReplayLog has no end. What to do: name a moment")
        found = []
        for position in range(self.stop):
            if boundary is not None and self.watermark(position) >= boundary:
                break
            if boundary is None or self.row(position)[0] < boundary:
                found.append(self.row(position))
        return found


class ReadReplay(beam.PTransform[Any, Any]):
    """Reads a `ReplayLog`: an unbounded PCollection of its elements at their event times.

    When the log ends, so does the source, and the watermark goes to infinity. When a runner drains
    the pipeline, it ends at once (its `truncate` leaves nothing); for runners that cannot be told
    to, `drained_at` does the same at a position of the log.

    Args:
        log: What to read.
        start: Event time to begin at: nothing at or after it is missed, and some of what is older
            may come. `None`: from the beginning.
        speed: Seconds of event time per second; `None`: as fast as they are taken.
        drained_at: The first position that is not read any more; `None`: all of the log is read.
        hint: Type hint of the elements.
    """

    def __init__(
        self,
        log: ReplayLog,
        *,
        start: Timestamp | None = None,
        speed: float | None = None,
        drained_at: int | None = None,
        hint: Any = typehints.Any,
    ) -> None:
        super().__init__()
        self._log, self._speed, self._drained_at, self._hint = log, speed, drained_at, hint
        self._start = None if start is None else start.micros

    def expand(self, pbegin: Any) -> Any:
        """Makes the source."""
        return (
            pbegin
            | beam.Impulse()
            | "Begin" >> beam.ParDo(_BeginFn(self._log, self._start, self._drained_at))
            | "Read" >> beam.ParDo(_ReadFn(self._log, self._speed)).with_output_types(self._hint)
        )


_Task = tuple[int, int, float]
"""The first position to read, that after the last one, and when that began (s since 1970)."""


class _BeginFn(beam.DoFn):
    def __init__(self, log: ReplayLog, start: int | None, drained_at: int | None) -> None:
        self._log, self._start, self._drained_at = log, start, drained_at

    def process(self, element: Any) -> Iterator[_Task]:
        first, stop = self._log.position(self._start), self._log.stop
        if self._drained_at is not None:
            stop = max(first, min(stop, self._drained_at))
        yield first, stop, time.time()


class _OneReaderTracker(OffsetRestrictionTracker):
    """What may stop here and go on later, and is never divided into two.

    Each part would have a watermark of its own, of which Prism takes the one that it was told last.
    """

    def try_split(self, fraction_of_remainder: float) -> Any:
        if fraction_of_remainder != 0:
            return None
        return super().try_split(0)  # type: ignore[no-untyped-call]

    def is_bounded(self) -> bool:
        return False


class _PositionsProvider(RestrictionProvider):
    def initial_restriction(self, element: _Task) -> OffsetRange:
        return OffsetRange(element[0], element[1])

    def create_tracker(self, restriction: OffsetRange) -> _OneReaderTracker:
        return _OneReaderTracker(restriction)

    def restriction_size(self, element: Any, restriction: OffsetRange) -> int:
        return int(restriction.size())


_TRACKER = beam.DoFn.RestrictionParam(_PositionsProvider())
_WATERMARK = beam.DoFn.WatermarkEstimatorParam(ManualWatermarkEstimator.default_provider())


class _ReadFn(beam.DoFn):
    def __init__(self, log: ReplayLog, speed: float | None) -> None:
        self._log, self._speed = log, speed

    @beam.DoFn.unbounded_per_element()  # type: ignore[untyped-decorator]
    def process(
        self, element: _Task, tracker: Any = _TRACKER, watermark: Any = _WATERMARK
    ) -> Iterator[TimestampedValue[Any]]:
        log, (first, stop, began) = self._log, element
        begin, at = tracker.current_restriction().start, None
        for position in itertools.count(begin):
            if position < stop:
                pause = self._pause(first, began, position)
                full = position - begin >= _BUNDLE and log.row(position)[0] != at
                if pause > 0 or full:
                    watermark.set_watermark(Timestamp(micros=log.watermark(position)))
                    tracker.defer_remainder(Duration(max(pause, _PAUSE)) if self._speed else None)
                    return
            if not tracker.try_claim(position):
                return
            at, row = log.row(position)
            yield TimestampedValue(row, Timestamp(micros=at))

    def _pause(self, first: int, began: float, position: int) -> float:
        """For how many seconds the row is not there yet."""
        if self._speed is None:
            return 0.0
        passed = (self._log.arrival(position) - self._log.arrival(first)) / _SECOND
        return began + passed / self._speed - time.time()
