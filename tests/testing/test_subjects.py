"""The shipped subjects: picklable, typed, and right by hand-worked examples."""

from __future__ import annotations

import pickle

import pytest
from apache_beam.internal import pickler
from apache_beam.transforms import userstate

from beam_ckpt.testing.event_loop import run_event_loop
from beam_ckpt.testing.subjects import MORE_CELLS, ORDER_FREE, ORDERED, TAGS

S = 1_000_000
SUBJECTS = {subject.name: subject for subject in (*ORDER_FREE, *ORDERED, *MORE_CELLS)}


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_a_subject_survives_pickling_with_its_specs(subject):
    for copy in (
        pickle.loads(pickle.dumps(subject.fn)),
        pickler.loads(pickler.dumps(subject.fn)),
    ):
        userstate.validate_stateful_dofn(copy)
        assert userstate.get_dofn_specs(copy) == userstate.get_dofn_specs(subject.fn)


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_every_cell_has_a_deterministic_coder_and_every_tag_is_listed(subject):
    cells, _ = userstate.get_dofn_specs(subject.fn)
    assert cells
    assert all(cell.coder.is_deterministic() for cell in cells)
    data = [(n * 7 * S, key, n % 13) for n in range(60) for key in "ab"]
    assert {o.tag for o in run_event_loop(subject.fn, data).outputs} <= {None, *TAGS}


def told(name, *data, until=None):
    result = run_event_loop(
        SUBJECTS[name].fn,
        [(t * S, "k", v) for t, v in data],
        until=until,
    )
    outputs = [(o.timestamp / S, o.tag, *o.value[1:]) for o in result.outputs]
    kept = result.state.of("k")
    timers = {name: at / S for name, at in kept.timers.items()}
    return outputs, dict(kept.cells), timers


def test_tumbling_tells_each_period_at_its_end():
    assert told("Tumbling", (69, 3), (0, 5), (70, 1), (-1, 4)) == (
        [
            (0, None, "period -1", (4,)),
            (70, None, "period 0", (3, 5)),
            (140, None, "period 1", (1,)),
        ],
        {"count": 4},
        {},
    )
    assert told("Tumbling", (69, 3), (70, 1), (75, 0), until=76 * S) == (
        [(70, None, "period 0", (3,))],
        {"count": 3, "seen": [(1, 1), (1, 0)]},
        {("ts-flush", "1"): 140},
    )


def test_count_and_sum_passes_values_on():
    assert told("CountAndSum", (1, 0), (2, 3), (3, 4)) == (
        [(2, None, "value", (3,)), (2, "odd", "value", (3,)), (3, None, "value", (4,))],
        {"count": 3, "sum": 7},
        {},
    )


def test_the_closing_set_tells_distinct_values_and_dates_them_ahead():
    assert told("ClosingSet", (5, 2), (6, 2), (99, 1), (100, 9)) == (
        [
            (125, None, "closed 0", (1, 2)),
            (200, "due", "closed 0", (1, 2)),
            (225, None, "closed 1", (9,)),
            (400, "due", "closed 1", (9,)),
        ],
        {},
        {},
    )


def test_the_delay_chain_wears_off_and_ends():
    assert told("DelayChain", (0, 5), (20, 4), (20, 3), (100, 1)) == (
        [
            (0, None, "delay", (5, 5)),
            (20, None, "delay", (3, 6)),
            (20, None, "delay", (4, 10)),
            (100, None, "delay", (1, 3)),
            (190, None, "gone", (3, 100 * S)),
        ],
        {},
        {},
    )


def test_the_last_value_times_out_unless_it_is_reset():
    assert told("LastValue", (0, 1), (29, 2), (59, 3), (60, 5), (70, 4), until=71 * S) == (
        [
            (29, "was", "was", (1, 2)),
            (59, None, "timeout", (2,)),
            (60, None, "reset", (3,)),
        ],
        {"last": 4},
        {("ts-timeout", ""): 100},
    )


def test_the_echo_comes_from_the_past_and_again_from_before_that():
    assert told("Echo", (10, 1)) == (
        [
            (4, None, "echo 1", (1,)),
            (3, None, "again 1", (1,)),
            (50, None, "echo late 1", (1,)),
            (49, None, "again late 1", (1,)),
        ],
        {},
        {},
    )


def test_reminders_are_dated_ahead():
    assert told("Reminders", (10, 1), (100, 2)) == (
        [
            (10, None, "now", (1,)),
            (100, None, "bell", (1,)),
            (55, "due", "due", (1,)),
            (100, None, "now", (1, 2)),
            (200, None, "bell", (1, 2)),
            (145, "due", "due", (1, 2)),
        ],
        {"trail": (1, 2)},
        {},
    )


def test_the_conductor_moves_brings_forward_and_clears_the_horns():
    assert told("Conductor", (1, 7), (41, 8), (81, 9)) == (
        [
            (20, None, "baton", (1,)),
            (20, None, "horn first", (1, 7)),
            (60, None, "baton", (2,)),
            (53, None, "horn second", (2, 8)),
            (60, None, "horn first", (2, 8)),
            (100, None, "baton", (3,)),
            (100, None, "horn second", (3, 9)),
        ],
        {"turn": 3, "notes": [9]},
        {},
    )


def test_the_ticker_ticks_as_often_as_it_was_told():
    assert told("Ticker", (0, 3), (45, 1)) == (
        [
            (20, None, "tick", (3, 20)),
            (40, None, "tick", (2, 40)),
            (65, None, "tick", (2, 65)),
            (85, None, "tick", (1, 85)),
        ],
        {},
        {},
    )


def test_the_running_mean_begins_anew():
    assert told("RunningMean", (0, 1), (10, 2), (60, 5), until=61 * S) == (
        [(0, None, "mean", (1000,)), (10, None, "mean", (1500,)), (60, None, "mean", (5000,))],
        {"mean": (5, 1)},
        {("ts-anew", ""): 110},
    )


def test_the_history_keeps_sixty_seconds():
    assert told("History", (0, 0), (30, 3), (62, 8)) == (
        [
            (0, None, "recent", ()),
            (0, None, "kept", (0,)),
            (30, None, "recent", (3,)),
            (30, None, "kept", (0, 27_000)),
            (62, None, "recent", (8,)),
            (62, None, "kept", (27_000, 61_000)),
        ],
        {"history": [(27 * S, 3), (61 * S, 8)]},
        {},
    )
