"""Hypothesis strategies for keyed event-time data, its cuts and its disorder.

`hypothesis` is imported when a strategy is asked for, so it is needed by tests only. All times are
microseconds in whole milliseconds. Everything shrinks towards little: fewer elements, one key,
value 0, time 0, one cut, data in order, all of it in one bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, cast

from beam_ckpt.testing.streams import Advance, Arrive, Element, StreamPlan

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = [
    "cut_histories",
    "cuts",
    "data_sets",
    "intervals",
    "key_group_counts",
    "keys",
    "stream_plans",
    "times",
    "trickles",
]

_MS = 1_000
_SECOND = 1_000_000

DataSet = tuple[tuple[int, str, int], ...]
"""Elements as (event time in microseconds, key, value), in no order."""


@cache
def keys() -> SearchStrategy[str]:
    """Keys: most of them a, b or c, so that each has several elements; some unusual ones."""
    from hypothesis import strategies as st

    unusual = ["", "ä", "a\u0308", "\u0000", "🚕", "a/b", "..", "\u202e%41", "k" * 200]
    return st.sampled_from([*"abc" * 4, *unusual])


@cache
def times(low_s: int = -120, high_s: int = 400) -> SearchStrategy[int]:
    """Moments in [low_s, high_s] seconds: on full tens of seconds (often equal), or to the ms."""
    from hypothesis import strategies as st

    coarse = st.integers(low_s // 10, high_s // 10).map(lambda n: n * 10 * _SECOND)
    fine = st.integers(low_s * 1_000, high_s * 1_000).map(lambda n: n * _MS)
    beside = st.builds(lambda at, by: at + by * _MS, coarse, st.sampled_from([1, -1]))
    return st.one_of(coarse, fine, beside)


def data_sets(
    *, min_size: int = 0, max_size: int = 40, at: SearchStrategy[int] | None = None
) -> SearchStrategy[DataSet]:
    """Data sets of unordered elements: bursts with ties in time, equal keys and equal elements.

    Args:
        min_size: The least number of elements.
        max_size: The greatest number of elements.
        at: Where the times of bursts come from; `times()` by default.
    """
    from hypothesis import strategies as st

    # Mostly the burst's own moment: what happens at one time is what goes wrong.
    offset = st.sampled_from([0, 0, 0, _MS, _SECOND, 10 * _SECOND, 25 * _SECOND, 70 * _SECOND])
    member = st.tuples(offset, keys(), st.integers(0, 12))
    burst = st.tuples(at if at is not None else times(), st.lists(member, min_size=1, max_size=8))

    def in_one(bursts: list[tuple[int, list[tuple[int, str, int]]]]) -> DataSet:
        elements = [(start + later, *rest) for start, ms in bursts for later, *rest in ms]
        return cast(DataSet, tuple(elements[:max_size]))

    return st.lists(burst, min_size=min_size, max_size=max_size).map(in_one)


@cache
def trickles(max_size: int = 24, min_size: int = 5, names: str = "aab") -> SearchStrategy[DataSet]:
    """Data sets of few keys whose elements come again and again, over many epochs.

    Args:
        max_size: The greatest number of elements.
        min_size: The least number of elements.
        names: The keys, some of them maybe more often.
    """
    from hypothesis import strategies as st

    gap = st.sampled_from([0, 10 * _SECOND, 25 * _SECOND, 70 * _SECOND])
    member = st.tuples(gap, st.sampled_from(names), st.integers(0, 12))

    def one_after_the_other(members: list[tuple[int, str, int]]) -> DataSet:
        at, elements = -60 * _SECOND, []
        for after, key, value in members:
            at += after
            elements.append((at, key, value))
        return tuple(elements)

    return st.lists(member, min_size=min_size, max_size=max_size).map(one_after_the_other)


def cuts(*, max_cuts: int = 5, aligned_to: Sequence[int] = ()) -> SearchStrategy[tuple[int, ...]]:
    """One to `max_cuts` ascending boundaries, some before and some beyond all data.

    Args:
        max_cuts: The greatest number of cuts.
        aligned_to: Moments (of elements, say) on, just before and just after which cuts fall too.
    """
    return _choices(max_cuts).map(lambda choices: _resolve(choices, aligned_to))


def cut_histories(
    *, max_size: int = 40, max_cuts: int = 5
) -> SearchStrategy[tuple[DataSet, tuple[int, ...]]]:
    """A data set and the cuts of its history; some cuts fall exactly on elements."""
    from hypothesis import strategies as st

    def with_cuts(drawn: tuple[DataSet, list[_Choice]]) -> tuple[DataSet, tuple[int, ...]]:
        data, choices = drawn
        return data, _resolve(choices, [timestamp for timestamp, _, _ in data])

    return st.tuples(data_sets(max_size=max_size), _choices(max_cuts)).map(with_cuts)


_Choice = tuple[int | None, int]
"""A cut: (index of the element that it is aligned to, or None; the moment, or the distance)."""


@cache
def _choices(max_cuts: int) -> SearchStrategy[list[_Choice]]:
    """Cuts before the data is known: drawn apart, data and cuts shrink apart."""
    from hypothesis import strategies as st

    outside = st.sampled_from([10_000 * _SECOND, -10_000 * _SECOND])
    anywhere = st.tuples(st.none(), st.one_of(times(), outside))
    aligned = st.tuples(st.integers(0, 39), st.sampled_from([0, _MS, -_MS]))
    return st.lists(st.one_of(anywhere, aligned), min_size=1, max_size=max_cuts)


def _resolve(choices: Sequence[_Choice], moments: Sequence[int]) -> tuple[int, ...]:
    chosen = set()
    for index, at in choices:
        base = 0 if index is None or not moments else moments[index % len(moments)] // _MS * _MS
        chosen.add(base + at)
    return tuple(sorted(chosen))


@cache
def intervals() -> SearchStrategy[int | None]:
    """Checkpoint intervals in microseconds, some that divide nothing; None: once, at the end."""
    from hypothesis import strategies as st

    seconds = [None, 50, 10, 60, 100, 7, 3_600]
    return st.sampled_from([s if s is None else s * _SECOND for s in seconds] + [12_345 * _MS])


@cache
def key_group_counts() -> SearchStrategy[int]:
    """One key group; a few that divide nothing; the default."""
    from hypothesis import strategies as st

    return st.sampled_from([1, 7, 128])


def stream_plans(
    data: Sequence[Element], *, max_displacement_s: int = 60, max_chunk: int = 12
) -> SearchStrategy[StreamPlan]:
    """Orders of arrival of `data`: out of order within bounds, in bundles, with watermarks.

    The watermark is always in whole milliseconds and at least 1 ms below every element still to
    come; it may lag behind, stand still and jump.

    Args:
        data: The elements, in any order.
        max_displacement_s: How many seconds an element may come after one that is younger.
        max_chunk: The greatest number of elements that arrive together.
    """
    return _plan_strategy()(tuple(data), max_displacement_s, max_chunk)


@cache  # `composite` reads its function's signature, which takes longer than a plan
def _plan_strategy() -> Callable[[tuple[Element, ...], int, int], SearchStrategy[StreamPlan]]:
    from hypothesis import strategies as st

    return st.composite(_draw_plan)


def _draw_plan(
    draw: DrawFn, data: tuple[Element, ...], max_displacement_s: int, max_chunk: int
) -> StreamPlan:
    from hypothesis import strategies as st

    # Few distinct delays say as much as many, and leave Hypothesis less to shrink.
    delay = st.integers(0, max_displacement_s).map(lambda s: s * _SECOND)
    ordered = sorted(data, key=lambda e: (e[0], repr(e)))
    delays = [draw(delay) for _ in ordered]
    arriving = [e for _, e in sorted(zip(delays, ordered, strict=True), key=_arrival)]
    steps: list[Arrive | Advance] = []
    watermark: int | None = None
    sizes, lags = st.integers(0, max_chunk - 1), st.sampled_from([1, 2, 1_000, 30_000])
    at = 0
    while at < len(arriving):
        size = max_chunk - draw(sizes)
        steps.append(Arrive(tuple(arriving[at : at + size])))
        at += size
        if at < len(arriving) and draw(st.booleans()):
            bound = min(e[0] for e in arriving[at:]) // _MS * _MS - draw(lags) * _MS
            if watermark is None or bound > watermark:
                watermark = bound
                steps.append(Advance(bound))
    return StreamPlan(tuple(steps))


def _arrival(delayed: tuple[int, Element]) -> tuple[int, int]:
    delay, element = delayed
    return element[0] + delay, element[0]
