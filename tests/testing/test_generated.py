"""Generated DoFns through whatever a runner may do, against the oracle; no runner, no pipeline.

On real runners: `tests/runners/test_generated.py`.
"""

from __future__ import annotations

import doctest
import pickle
from collections import Counter
from dataclasses import replace

import pytest
from apache_beam.internal import pickler
from apache_beam.transforms import userstate
from apache_beam.transforms.window import FixedWindows
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from beam_ckpt.testing import generated, histories
from beam_ckpt.testing.event_loop import run_event_loop
from beam_ckpt.testing.fake_runner import Chaos, run_faked
from beam_ckpt.testing.generated import (
    TAGS,
    Add,
    Again,
    Arm,
    Clear,
    Collect,
    Emit,
    Fold,
    Program,
    Range,
    Read,
    Refuel,
    Set,
    Write,
    dofn,
    programs,
)
from beam_ckpt.testing.histories import (
    Chain,
    History,
    chains,
    check_chain_faked,
    check_faked,
    count,
)
from beam_ckpt.testing.streams import Advance, Arrive, StreamPlan
from beam_ckpt.transforms.keyed_state import key as key_module
from beam_ckpt.transforms.keyed_state import operator as operator_module
from beam_ckpt.transforms.keyed_state.key import KeyState
from beam_ckpt.transforms.keyed_state.operator import KeyedOperator

S = 1_000_000
FEW, MANY = 200, 1600
EVERYTHING = st.one_of(histories.histories(), histories.histories(forward=True), chains(max_cuts=3))


def holds_for(examples: int, record_property) -> None:
    counts: Counter[str] = Counter()

    @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(example=EVERYTHING)
    def holds(example: History | Chain) -> None:
        if isinstance(example, Chain):
            counts["chains"] += 1
            check_chain_faked(example)
        else:
            check_faked(example)
        count(example.first if isinstance(example, Chain) else example, counts)

    holds()
    of = ("a stream", "a batch", "chains", "order-free", "time-sorted")
    record_property("counts", f"{examples} histories: {', '.join(f'{w} {counts[w]}' for w in of)}")


def test_generated_dofns_are_cut_exactly_whatever_a_runner_does(record_property):
    holds_for(FEW, record_property)


@pytest.mark.parametrize("least", [0, 2])
def test_values_that_are_spilled_are_cut_exactly(least, monkeypatch, record_property):
    """Values of more bytes than that are kept outside the control cell: all of them, and some."""
    monkeypatch.setattr(key_module, "SPILL_BYTES", least)
    monkeypatch.setattr(operator_module, "is_small", lambda coder: False)
    holds_for(FEW // 4, record_property)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_generated_dofns_are_cut_exactly_whatever_a_runner_does_at_length(record_property):
    holds_for(MANY, record_property)


def test_the_command_says_what_it_has_looked_at(capsys):
    assert histories.main(["--examples", "20", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("20 histories in ")
    assert ", 0 bad:" in said


# ------------------------------------------------------------------------- what they have found


def test_a_clock_that_fires_again_after_the_last_cut_of_a_batch_says_nothing_twice():
    """A key of a batch has two clocks, and wrote nothing back after its last cut."""
    program = Program(cells=("value",), process=(Write(0),), callbacks=())
    data = [(at * S, "a", at) for at in range(20)]
    for seed in range(60):
        run = run_faked(
            dofn(program), data, until=100 * S, time_sorted=True, tags=TAGS, chaos=Chaos(seed)
        )
        assert len(run.checkpoints[-1].records) == 1


def test_nothing_is_left_of_a_key_whose_outputs_beyond_the_cut_are_over():
    """Its record was kept for good, in the checkpoints and at the runner."""
    program = Program(process=(Emit(25 * S),), callbacks=((Emit(),),))
    plan = StreamPlan((Arrive(((40 * S, "a", 1),)), Advance(200 * S)))
    run = run_faked(dofn(program), plan, every=50 * S, time_sorted=True)
    sizes = {c.boundary: len(c.records) for c in run.checkpoints}
    assert sizes == {50 * S: 1, 100 * S: 0, None: 0}
    assert run.left == []
    first = run_faked(dofn(program), plan, until=50 * S, time_sorted=True)
    assert len(first.checkpoints[-1].records) == 1
    rest = run_faked(dofn(program), plan, restored=first.checkpoints[-1], time_sorted=True)
    assert len(rest.checkpoints[-1].records) == 0
    assert rest.left == []


def test_chunks_of_a_record_are_gone_once_the_key_is_done_with_its_window():
    """A key group count that changed saves it again at once; its chunks stayed at the runner.

    The last of them, come a second time, then made the record whole again.
    """
    program = Program(
        process=(Emit(25 * S), Emit(None)), callbacks=((Emit(None),),), cells=("value",)
    )
    cuts, groups = (-10 * S, 0, 10 * S), (1, 1, 1, 7)
    for seed in range(40):
        chaos = Chaos(seed, chunk_bytes=40)
        check_faked(
            History(
                program,
                order_free=False,
                source=((-10 * S, "a", 0), (-9 * S, "b", 0)),
                cuts=cuts,
                key_groups=groups,
                window_fn=FixedWindows(60),
                chaos=chaos,
            )
        )


def test_a_list_that_a_range_has_emptied_and_that_is_cleared_stays_empty():
    """Nothing was in it any more, so the runner's cell was not cleared, nor written back."""
    steps = (Range(0, -25 * S, 0, clear=True), Clear(0), Fold(0), Emit(None))
    program = Program(cells=("list",), process=steps)
    source = ((0, "a", 0), (S, "a", 0), (10 * S, "a", 0), (11 * S, "a", 1))
    for seed in range(10):
        check_faked(History(program, order_free=False, source=source, cuts=(0,), chaos=Chaos(seed)))


# ------------------------------------------------------------------------------- the programs


@settings(max_examples=60, derandomize=True)
@given(program=st.one_of(programs(), programs(order_free=True)))
def test_a_generated_dofn_is_one_that_beam_takes_and_pickles(program):
    fn = dofn(program)
    for copy in (pickle.loads(pickle.dumps(fn)), pickler.loads(pickler.dumps(fn))):
        userstate.validate_stateful_dofn(copy)
        assert copy.program == program
    cells, timers = userstate.get_dofn_specs(fn)
    assert len(timers) == len(program.callbacks)
    assert len(cells) >= len(program.cells)


def test_the_example_of_the_module_is_right():
    assert doctest.testmod(generated).failed == 0


def test_every_step_and_kind_is_generated_and_does_something():
    steps: set[type] = set()
    kinds: set[str] = set()
    tags: set[str | None] = set()

    @settings(max_examples=400, derandomize=True, database=None, phases=[Phase.generate])
    @given(program=st.one_of(programs(), programs(order_free=True)))
    def look(program):
        data = [(n * 7 * S, "ab"[n % 2], n) for n in range(12)]
        outputs = run_event_loop(dofn(program), data).outputs
        tags.update(output.tag for output in outputs)
        steps.update(type(step) for step in program.steps)
        kinds.update(program.cells)

    look()
    assert {step.__name__ for step in steps} == {
        "Add", "Again", "Arm", "Cancel", "Clear", "Collect", "Emit", "Fold", "Range", "Read",
        "Refuel", "Set", "Write",
    }  # fmt: skip
    assert kinds == set(generated.KINDS)
    assert tags == {None, *TAGS}


def told(program: Program, *data: tuple[int, int]) -> list[tuple[int, int]]:
    result = run_event_loop(dofn(program), [(at * S, "k", value) for at, value in data])
    return [(output.timestamp // S, output.value[2][0]) for output in result.outputs]


def test_a_loop_of_timers_ends_when_its_fuel_is_used_up():
    program = Program(process=(Refuel(2), Set(0, 10 * S)), callbacks=((Emit(), Again(10 * S)),))
    assert [at for at, _ in told(program, (0, 1))] == [10, 20, 30]


def test_timers_of_timers_end_with_their_depth():
    program = Program(process=(Set(0, 0, "a", 2),), callbacks=((Emit(), Set(0, 5 * S, "a", 2)),))
    assert [at for at, _ in told(program, (0, 1))] == [0, 5, 10]


def test_a_range_of_a_list_is_read_and_cleared():
    program = Program(
        cells=("list",), process=(Write(0), Range(0, -25 * S, 1_000, clear=True), Read(0), Emit())
    )
    # The list is empty after each element, so each sees its own entry, of 0 and of 5,000 ms.
    assert told(program, (0, 1), (5, 1)) == [
        (0, (31 * 31 + 1) % 1009),
        (5, ((31 + 5000) * 31 + 1) % 1009),
    ]


def test_a_period_is_collected_and_taken_out_by_its_own_timer():
    program = Program(
        cells=("bag",),
        process=(Add(0), Arm(0, 0)),
        callbacks=((Collect(0, take=True), Emit()),),
    )
    result = run_event_loop(dofn(program), [(10 * S, "k", 1), (20 * S, "k", 2), (70 * S, "k", 3)])
    assert [output.timestamp // S for output in result.outputs] == [60, 120]
    assert len(result.state) == 0


# ----------------------------------------------------------------------- would they find a fault?


def fires_in_any_order(self, state, floor):
    due = [
        (at, family, tag)
        for (family, tag), fire in state.control.timers.items()
        if (at := self._config.epochs.timer_due(min(fire, state.expiry))) is not None
        and at <= floor
    ]
    return max(due, default=None)


def never_waits(self, timestamp, live=True):
    return -(2**62)


#: Shows the order of elements, and that of timers.
FOLDS = Program(
    cells=("value",),
    process=(Fold(0), Emit(), Set(0, 25 * S), Set(1, 25 * S, "a")),
    callbacks=((Fold(0), Emit()), (Fold(0), Emit())),
)

FAULTS = {
    "timers of one key in another order": (KeyedOperator, "_first_timer", fires_in_any_order),
    "elements do not wait": (KeyedOperator, "_ready", never_waits),
    "pending timers are not saved": (KeyedOperator, "_saved_timers", lambda self, memory: ()),
    "the clock is not set again": (KeyState, "wake", lambda state, fired: None),
    "ties are not ordered": (key_module, "_order_ties", lambda items, encode: None),
    "outputs beyond the cut are not carried": (
        KeyedOperator, "_emitted", lambda self, state, output, stamped: True
    ),
    "what is released of a batch is done again": (operator_module, "_EVENTS_PER_WAKE", 0),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    drawn = histories.histories(order_free=False, forward=True, max_cuts=2)

    @settings(
        max_examples=300, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    @given(example=st.one_of(drawn, drawn.map(lambda history: replace(history, program=FOLDS))))
    def holds(example):
        check_faked(example)

    with pytest.raises(AssertionError):
        holds()
