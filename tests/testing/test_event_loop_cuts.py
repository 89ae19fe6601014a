"""The oracle agrees with itself: a history with cuts gives what one uninterrupted loop gives."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beam_ckpt.testing import event_loop
from beam_ckpt.testing.event_loop import LoopState, canonical, run_event_loop
from beam_ckpt.testing.strategies import cut_histories, data_sets
from beam_ckpt.testing.subjects import MORE_CELLS, ORDER_FREE, ORDERED, Subject

SUBJECTS = {subject.name: subject for subject in (*ORDER_FREE, *ORDERED, *MORE_CELLS)}
FEW = settings(max_examples=25, deadline=None)
MANY = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


def check_cuts(subject, history):
    data, cuts = history
    whole = run_event_loop(subject.fn, data)
    state, outputs = LoopState(), []
    for cut in (*cuts, None):
        boundary = state.boundary
        part = run_event_loop(subject.fn, data, until=cut, restored=state)
        assert part.dropped == sum(boundary is not None and e[0] < boundary for e in data)
        assert cut is None or all(output.timestamp < cut for output in part.outputs)
        assert part.state == run_event_loop(subject.fn, data, until=cut).state
        outputs += part.outputs
        state = part.state
    assert canonical(outputs) == canonical(whole.outputs)
    assert state == whole.state


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
@FEW
@given(history=cut_histories())
def test_loops_from_cut_to_cut_give_what_one_loop_gives(subject, history):
    check_cuts(subject, history)


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
@MANY
@given(history=cut_histories())
def test_loops_from_cut_to_cut_give_what_one_loop_gives_at_length(subject, history):
    check_cuts(subject, history)


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
@FEW
@given(data=data_sets(min_size=1), random=st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_change_the_result(subject, data, random):
    shuffled = list(data)
    random.shuffle(shuffled)
    one, other = run_event_loop(subject.fn, data), run_event_loop(subject.fn, shuffled)
    assert canonical(one.outputs) == canonical(other.outputs)
    assert one.state == other.state


def chain(first: Subject, second: Subject, data, until, states):
    """Two operators: the numbers of the first one's main outputs are the second one's values."""
    one = run_event_loop(first.fn, data, until=until, restored=states[0])
    between = [(o.timestamp, o.value[1], sum(o.value[2]) % 13) for o in one.outputs if not o.tag]
    two = run_event_loop(second.fn, between, until=until, restored=states[1])
    assert two.dropped == 0, "an output of the first operator lay before the cut it came after"
    return two.outputs, (one.state, two.state)


@pytest.mark.parametrize("second", ["Conductor", "Reminders"])
@pytest.mark.parametrize("first", [name for name, s in SUBJECTS.items() if not s.races])
@settings(max_examples=10, deadline=None)
@given(history=cut_histories())
def test_chained_loops_give_what_one_chain_gives(first, second, history):
    data, cuts = history
    operators = SUBJECTS[first], SUBJECTS[second]
    whole, end = chain(*operators, data, None, (None, None))
    states, outputs, boundary = (None, None), [], None
    for cut in (*cuts, None):
        rest = [e for e in data if boundary is None or e[0] >= boundary]
        part, states = chain(*operators, rest, cut, states)
        outputs += part
        boundary = cut
    assert canonical(outputs) == canonical(whole)
    assert states == end


def test_the_example_in_the_module_docstring_is_true():
    assert doctest.testmod(event_loop) == doctest.TestResults(failed=0, attempted=9)
