from __future__ import annotations

import pytest
from apache_beam.testing.test_stream import ElementEvent, WatermarkEvent
from apache_beam.utils.timestamp import MAX_TIMESTAMP
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from beam_ckpt.testing.strategies import (
    cut_histories,
    cuts,
    data_sets,
    intervals,
    key_group_counts,
    stream_plans,
    times,
)
from beam_ckpt.testing.streams import Advance, Arrive, StreamPlan

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(history=cut_histories(), at=times(), interval=intervals(), groups=key_group_counts())
def test_everything_is_in_whole_milliseconds_and_cuts_ascend(history, at, interval, groups):
    data, chosen = history
    moments = [at, *(e[0] for e in data), *chosen, *([] if interval is None else [interval])]
    assert all(moment % 1_000 == 0 for moment in moments)
    assert 1 <= len(chosen) <= 5
    assert list(chosen) == sorted(set(chosen))
    assert groups in (1, 7, 128)


REACHED = {
    "a cut exactly on an element": lambda d, c: any(e[0] == cut for e in d for cut in c),
    "a cut 1 ms after an element": lambda d, c: any(e[0] + 1_000 == cut for e in d for cut in c),
    "a cut before all data": lambda d, c: bool(d) and c[0] < min(e[0] for e in d),
    "a cut beyond all data": lambda d, c: bool(d) and c[-1] > max(e[0] for e in d),
    "five cuts": lambda d, c: len(c) == 5,
    "an element before 1970": lambda d, c: any(e[0] < 0 for e in d),
    "a tie in time of one key": lambda d, c: len({e[:2] for e in d}) < len(d),
    "equal elements": lambda d, c: len(set(d)) < len(d),
    "a key beyond ASCII": lambda d, c: any(not e[1].isascii() for e in d),
    "the empty key": lambda d, c: any(not e[1] for e in d),
}


@pytest.mark.parametrize("wanted", REACHED.values(), ids=REACHED)
def test_the_strategies_reach(wanted):
    data, chosen = find(
        cut_histories(),
        lambda history: wanted(*history),
        settings=settings(max_examples=2_000, database=None, phases=[Phase.generate]),
    )
    assert wanted(data, chosen)


def test_histories_shrink_to_what_matters():
    data, chosen = find(
        cut_histories(),
        lambda history: any(e[1] == "🚕" and e[0] == cut for e in history[0] for cut in history[1]),
        settings=settings(max_examples=2_000, database=None, phases=[Phase.generate, Phase.shrink]),
    )
    assert data == ((0, "🚕", 0),)
    assert chosen == (0,)


@st.composite
def data_and_plan(draw):
    data = draw(data_sets())
    return data, draw(stream_plans(data))


def watermarks_are_true(plan):
    arrived = 0
    watermark = None
    for step in plan.steps:
        if isinstance(step, Arrive):
            arrived += len(step.elements)
        else:
            assert watermark is None or step.watermark > watermark, "the watermark went back"
            watermark = step.watermark
            assert watermark % 1_000 == 0
            assert all(watermark + 1_000 <= e[0] for e in plan.elements[arrived:])


@QUICK
@given(drawn=data_and_plan())
def test_a_plan_holds_all_the_data_and_a_watermark_that_is_below_all_that_comes(drawn):
    data, plan = drawn
    assert sorted(plan.elements) == sorted(data)
    watermarks_are_true(plan)


@QUICK
@given(drawn=data_and_plan(), cut=cuts(max_cuts=1))
def test_a_replayed_plan_is_what_lies_at_or_after_the_boundary(drawn, cut):
    data, plan = drawn
    (boundary,) = cut
    replayed = plan.from_boundary(boundary)
    assert sorted(replayed.elements) == sorted(e for e in data if e[0] >= boundary)
    watermarks_are_true(replayed)


@QUICK
@given(drawn=data_and_plan())
def test_disorder_is_bounded(drawn):
    _, plan = drawn
    seen = None
    for timestamp, _, _ in plan.elements:
        assert seen is None or timestamp > seen - 61_000_000
        seen = timestamp if seen is None else max(seen, timestamp)


@QUICK
@given(drawn=data_and_plan())
def test_a_test_stream_does_what_its_plan_says(drawn):
    _, plan = drawn
    events = plan.to_test_stream().output_tags and plan.to_test_stream()._events
    got = []
    for event in events:
        if isinstance(event, ElementEvent):
            got += [(tv.timestamp.micros, *tv.value) for tv in event.timestamped_values]
        elif isinstance(event, WatermarkEvent) and event.new_watermark < MAX_TIMESTAMP:
            got.append(event.new_watermark.micros)
    expected = []
    for step in plan.steps:
        expected += [step.watermark] if isinstance(step, Advance) else step.elements
    assert got == expected


def test_plans_out_of_order_are_found_and_shrink_to_two_elements():
    data = ((0, "a", 0), (10_000_000, "a", 1), (20_000_000, "a", 2))

    def late(plan):
        return [e[0] for e in plan.elements] != [0, 10_000_000, 20_000_000]

    plan = find(stream_plans(data), late, settings=settings(database=None, deadline=None))
    assert len(plan.steps) == 1
    assert plan != StreamPlan((Arrive(data),))


def test_no_plan_needs_a_watermark():
    with pytest.raises(NoSuchExample):
        find(stream_plans(()), lambda plan: bool(plan.steps), settings=settings(database=None))
