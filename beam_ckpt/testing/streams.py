"""Data out of order: a schedule of elements and watermarks, and its `TestStream`.

A watermark is a promise that nothing older comes. In a `StreamPlan` it is always at least 1 ms
below every element still to come, so that no element of a plan is ever late, whichever way a
runner reads 'the watermark has reached T'.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from apache_beam.coders import Coder
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Timestamp

__all__ = ["Advance", "Arrive", "Element", "StreamPlan", "step_by_step"]

Element = tuple[int, Hashable, object]
"""(event time in microseconds, key, value)."""

_MS = 1_000


@dataclass(frozen=True)
class Arrive:
    """Elements that arrive together, in this order."""

    elements: tuple[Element, ...]


@dataclass(frozen=True)
class Advance:
    """The watermark moves to `watermark` microseconds."""

    watermark: int


@dataclass(frozen=True)
class StreamPlan:
    """When elements arrive and when the watermark moves; in the end it moves to infinity."""

    steps: tuple[Arrive | Advance, ...]

    @property
    def elements(self) -> list[Element]:
        """All elements, in order of arrival."""
        return [e for step in self.steps if isinstance(step, Arrive) for e in step.elements]

    def from_boundary(self, boundary: int) -> StreamPlan:
        """The part that a source replays from `boundary` (µs): the same steps, older data gone."""
        return StreamPlan(
            tuple(
                Arrive(tuple(e for e in step.elements if e[0] >= boundary))
                if isinstance(step, Arrive)
                else step
                for step in self.steps
            )
        )

    def to_test_stream(self, coder: Coder | None = None) -> TestStream:
        """Makes a source of (key, value) of it."""
        stream = TestStream(coder=coder) if coder is not None else TestStream()
        for step in self.steps:
            if isinstance(step, Advance):
                stream = stream.advance_watermark_to(Timestamp(micros=step.watermark))
            elif step.elements:
                stream = stream.add_elements(
                    [
                        TimestampedValue((key, value), Timestamp(micros=timestamp))
                        for timestamp, key, value in step.elements
                    ]
                )
        ended: TestStream = stream.advance_watermark_to_infinity()
        return ended


def step_by_step(
    elements: Iterable[Element], wake_ups: Sequence[int], value_coder: Coder
) -> StreamPlan:
    """A plan that leaves a runner no choice: the watermark stops at every moment that matters.

    Plain Beam runs timers and elements in event-time order when the watermark reaches each
    moment before its elements arrive, and elements of one moment arrive one by one.

    Args:
        elements: The data, in any order.
        wake_ups: Moments (µs) at which a timer may be due.
        value_coder: Its encoding orders elements of one millisecond.

    Returns:
        The plan. Its watermark equals the elements' time, so they are on time, but by no margin.
    """
    by_time: dict[int, list[Element]] = {moment // _MS * _MS: [] for moment in wake_ups}
    for element in elements:
        by_time.setdefault(element[0] // _MS * _MS, []).append(element)
    steps: list[Arrive | Advance] = []
    for moment in sorted(by_time):
        steps.append(Advance(moment))
        for element in sorted(by_time[moment], key=lambda e: value_coder.encode(e[2])):
            steps.append(Arrive((element,)))
    return StreamPlan(tuple(steps))
