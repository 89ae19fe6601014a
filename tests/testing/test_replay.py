"""The log that the unbounded source of tests reads: its promises, without a runner."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_ckpt.testing.replay import ReplayLog

SECOND = 1_000_000
ROWS = st.lists(
    st.tuples(st.integers(-50 * SECOND, 300 * SECOND), st.integers(0, 3)), min_size=1, max_size=20
)
LOGS = st.builds(
    ReplayLog,
    ROWS,
    st.sampled_from([0, 0.5, 7, 100]),
    st.integers(0, 5),
    st.sampled_from([1, 2, 3]),
)


@given(LOGS)
def test_no_row_is_as_old_as_the_watermark_and_nothing_goes_back(log):
    positions = range(log.stop)
    times = [log.row(p)[0] // 1000 * 1000 for p in positions]
    for p in positions:
        assert log.watermark(p) % 1000 == 0
        assert min(times[p:]) >= log.watermark(p) + 1000
        if p:
            assert log.arrival(p) >= log.arrival(p - 1)
            assert log.watermark(p) >= log.watermark(p - 1)


@given(LOGS)
def test_a_row_comes_late_by_no_more_than_the_displacement(log):
    for p in range(log.stop):
        assert 0 <= log.arrival(p) - log.row(p)[0] <= log.displacement * SECOND


@given(LOGS, st.integers(-60 * SECOND, 900 * SECOND))
def test_a_reader_that_begins_at_a_moment_misses_nothing_at_or_after_it(log, start):
    position = log.position(start)
    assert all(log.row(p)[0] < start for p in range(position))
    assert position == log.stop or log.row(position)[0] >= start
    assert log.position(None) == 0


@given(LOGS, st.integers(-60 * SECOND, 900 * SECOND))
def test_what_is_below_a_moment_is_all_of_it(log, moment):
    everything = [log.row(p) for p in range(log.stop)]
    assert log.below(None) == everything
    assert log.below(moment) == [row for row in everything if row[0] < moment]


@given(LOGS)
def test_each_round_has_the_rows_again_later(log):
    one = ReplayLog(log.rows, log.displacement, log.seed)
    assert Counter(element for _, element in log.below(None)) == Counter(
        {element: n * log.rounds for element, n in Counter(e for _, e in log.rows).items()}
    )
    assert sorted(one.below(None)) == sorted(log.rows)
    assert [log.row(p) for p in range(one.stop)] == one.below(None)


def test_a_log_is_out_of_order_and_the_same_each_time():
    rows = tuple((second * SECOND, second) for second in range(100))
    log = ReplayLog(rows, displacement=30)
    order = [element for _, element in log.below(None)]
    assert order != sorted(order)
    assert pickle.loads(pickle.dumps(log)).below(None) == log.below(None)
    assert ReplayLog(rows, displacement=30, seed=1).below(None) != log.below(None)


def made_by_a_function():
    return [(second * SECOND, second) for second in range(1000)]


def test_rows_made_by_a_function_are_not_pickled():
    log = ReplayLog(made_by_a_function)
    assert len(log.below(None)) == 1000
    assert len(pickle.dumps(log)) < 500


def test_an_endless_log_goes_on_and_has_no_end_to_ask_for():
    log = ReplayLog([(0, "a"), (SECOND, "b")], rounds=None)
    assert [log.row(p) for p in range(6)] == [
        (at * SECOND, "ab"[at % 2]) for at in (0, 1, 2, 3, 4, 5)
    ]
    assert log.position(1_000_000 * SECOND) == 1_000_000
    assert log.below(3 * SECOND) == [(0, "a"), (SECOND, "b"), (2 * SECOND, "a")]
    with pytest.raises(ValueError, match="no end"):
        log.below(None)


def test_a_log_without_rows_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        ReplayLog([]).below(None)


@given(LOGS)
def test_rows_of_one_event_time_come_together(log):
    times = [log.row(p)[0] for p in range(log.stop)]
    assert len(set(times)) == 1 + sum(a != b for a, b in itertools.pairwise(times))
