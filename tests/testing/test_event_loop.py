"""The oracle against results worked out by hand."""

from __future__ import annotations

import apache_beam as beam
import pytest
from apache_beam import DoFn
from apache_beam.coders import PickleCoder, StrUtf8Coder, TupleCoder, VarIntCoder
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.combiners import MeanCombineFn
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    CombiningValueStateSpec,
    OrderedListStateSpec,
    ReadModifyWriteStateSpec,
    SetStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import GlobalWindow, TimestampedValue
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import PANE_INFO_UNKNOWN, WindowedValue

from beam_ckpt.errors import CheckpointError, PipelineRefusedError, StateIncompatibleError
from beam_ckpt.testing.event_loop import (
    EndlessTimersError,
    KeyedCells,
    LoopState,
    Output,
    run_event_loop,
)

S = 1_000_000
W = GlobalWindow()


class ScriptFn(beam.DoFn):
    """Does what its elements say: `a=+5` sets timer a 5 s on, `a:x=@9` tag x to 9 s, `a=no` clears.

    Callbacks do what `on` says for their `family:tag`. Everything that happens is emitted.
    """

    A = TimerSpec("a", TimeDomain.WATERMARK)
    B = TimerSpec("b", TimeDomain.WATERMARK)

    def __init__(self, on=()):
        self.on = dict(on)

    def _do(self, script, ts, timers):
        for command in script.split():
            if "=" not in command:
                continue
            name, when = command.split("=")
            family, _, tag = name.partition(":")
            if when == "no":
                timers[family].clear(dynamic_timer_tag=tag)
            elif when.startswith("@"):
                timers[family].set(Timestamp.of(float(when[1:])), dynamic_timer_tag=tag)
            else:
                timers[family].set(ts + float(when), dynamic_timer_tag=tag)

    def process(self, element, ts=DoFn.TimestampParam, a=DoFn.TimerParam(A), b=DoFn.TimerParam(B)):
        self._do(element[1], ts, {"a": a, "b": b})
        yield element[1]

    @on_timer(A)
    def on_a(
        self,
        ts=DoFn.TimestampParam,
        tag=DoFn.DynamicTimerTagParam,
        a=DoFn.TimerParam(A),
        b=DoFn.TimerParam(B),
    ):
        self._do(self.on.get(f"a:{tag}", ""), ts, {"a": a, "b": b})
        yield f"<a:{tag}>"

    @on_timer(B)
    def on_b(
        self,
        ts=DoFn.TimestampParam,
        tag=DoFn.DynamicTimerTagParam,
        a=DoFn.TimerParam(A),
        b=DoFn.TimerParam(B),
    ):
        self._do(self.on.get(f"b:{tag}", ""), ts, {"a": a, "b": b})
        yield f"<b:{tag}>"


def scripted(data, on=(), **settings):
    elements = [(round(seconds * S), "k", script) for seconds, script in data]
    return run_event_loop(ScriptFn(on), elements, value_coder=StrUtf8Coder(), **settings)


def happened(result):
    return [(output.value, output.timestamp / S) for output in result.outputs]


STRICT_ORDER = {
    "elements come by time, whatever their order of arrival": (
        [(3, "c"), (1, "a"), (-2, "z"), (2, "b")],
        {},
        [("z", -2), ("a", 1), ("b", 2), ("c", 3)],
    ),
    "elements of one millisecond come by their encoded value": (
        [(1, "c"), (1, "a"), (1.0004, "b"), (1.001, "0")],
        {},
        [("a", 1), ("b", 1), ("c", 1), ("0", 1.001)],
    ),
    "a time between milliseconds is floored, below zero too": (
        [(0.0019, "a"), (-0.0001, "b")],
        {},
        [("b", -0.001), ("a", 0.001)],
    ),
    "a timer comes before an element of its time": (
        [(1, "a=+4"), (5, "e")],
        {},
        [("a=+4", 1), ("<a:>", 5), ("e", 5)],
    ),
    "a timer is floored to the millisecond and so comes before an element of it": (
        [(1, "a=+4.0009"), (5.0001, "e")],
        {},
        [("a=+4.0009", 1), ("<a:>", 5), ("e", 5)],
    ),
    "timers of one time come by family, then by tag": (
        [(1, "b=+4 a:y=+4 b:x=+4 a:x=+4")],
        {},
        [("b=+4 a:y=+4 b:x=+4 a:x=+4", 1), ("<a:x>", 5), ("<a:y>", 5), ("<b:>", 5), ("<b:x>", 5)],
    ),
    "timers come by time before family": (
        [(1, "a=+5 b=+4")],
        {},
        [("a=+5 b=+4", 1), ("<b:>", 5), ("<a:>", 6)],
    ),
    "a later set moves the timer on": (
        [(1, "a=+4"), (2, "a=+7")],
        {},
        [("a=+4", 1), ("a=+7", 2), ("<a:>", 9)],
    ),
    "an earlier set moves the timer forward": (
        [(1, "a=+4"), (2, "a=+1")],
        {},
        [("a=+4", 1), ("a=+1", 2), ("<a:>", 3)],
    ),
    "tags are timers of their own": (
        [(1, "a:x=+4 a=+4"), (2, "a:x=no")],
        {},
        [("a:x=+4 a=+4", 1), ("a:x=no", 2), ("<a:>", 5)],
    ),
    "a cleared timer never fires": (
        [(1, "a=+4"), (2, "a=no"), (9, "e")],
        {},
        [("a=+4", 1), ("a=no", 2), ("e", 9)],
    ),
    "a timer set in the past fires at once, at the time it was set to": (
        [(10, "a=@3"), (10, "b"), (11, "c")],
        {},
        [("a=@3", 10), ("<a:>", 3), ("b", 10), ("c", 11)],
    ),
    "timers set in the past come before those that are due now": (
        [(1, "b=@10"), (10, "0"), (10, "a=@3 a:x=@2")],
        {"b:": "b:z=@1"},
        [
            ("b=@10", 1),
            ("<b:>", 10),
            ("<b:z>", 1),
            ("0", 10),
            ("a=@3 a:x=@2", 10),
            ("<a:x>", 2),
            ("<a:>", 3),
        ],
    ),
    "a timer set to now by an element fires before the next element of that time": (
        [(10, "a=+0"), (10, "b")],
        {},
        [("a=+0", 10), ("<a:>", 10), ("b", 10)],
    ),
    "a clear in a callback is honoured by the next timer of the same time": (
        [(1, "a=+4 b=+4 b:x=+4")],
        {"a:": "b=no"},
        [("a=+4 b=+4 b:x=+4", 1), ("<a:>", 5), ("<b:x>", 5)],
    ),
    "a later set in a callback is honoured by the next timer of the same time": (
        [(1, "a=+4 b=+4"), (7, "e")],
        {"a:": "b=+3"},
        [("a=+4 b=+4", 1), ("<a:>", 5), ("e", 7), ("<b:>", 8)],
    ),
    "a timer set by a callback between two that wait comes between them": (
        [(1, "a=+1 b=+9")],
        {"a:": "a:x=+3"},
        [("a=+1 b=+9", 1), ("<a:>", 2), ("<a:x>", 5), ("<b:>", 10)],
    ),
    "a callback may set its own timer again": (
        [(1, "a=+1"), (3, "e")],
        {"a:": "a:1=+1", "a:1": "a:2=+1"},
        [("a=+1", 1), ("<a:>", 2), ("<a:1>", 3), ("e", 3), ("<a:2>", 4)],
    ),
}


@pytest.mark.parametrize(("data", "on", "expected"), STRICT_ORDER.values(), ids=STRICT_ORDER)
def test_the_order_is_strict(data, on, expected):
    result = scripted(data, on)
    assert happened(result) == expected
    assert result.state == {}


@pytest.mark.parametrize(("data", "on", "expected"), STRICT_ORDER.values(), ids=STRICT_ORDER)
def test_the_order_of_arrival_means_nothing(data, on, expected):
    assert happened(scripted(reversed(data), on)) == expected


def test_a_cut_runs_exactly_what_lies_before_it_and_the_next_loop_the_rest():
    data = [(1, "a=+4 b=+5"), (4.999, "x"), (5, "y"), (7, "z")]
    cut = scripted(data, until=5 * S)
    assert happened(cut) == [("a=+4 b=+5", 1), ("x", 4.999)]
    assert cut.state == {("k", W): KeyedCells(timers={("ts-a", ""): 5 * S, ("ts-b", ""): 6 * S})}
    assert cut.state.boundary == 5 * S
    rest = scripted(data, restored=cut.state)
    assert happened(rest) == [("<a:>", 5), ("y", 5), ("<b:>", 6), ("z", 7)]
    assert rest.dropped == 2
    assert rest.state == {}
    assert rest.state.boundary is None


def test_a_timer_set_into_the_past_of_a_cut_fires_in_the_loop_that_sets_it():
    cut = scripted([(1, "a=+1"), (9, "b=@0.5")], until=5 * S)
    rest = scripted([(9, "b=@0.5")], restored=cut.state)
    assert happened(cut) == [("a=+1", 1), ("<a:>", 2)]
    assert happened(rest) == [("b=@0.5", 9), ("<b:>", 0.5)]


def test_after_a_drain_everything_is_new_and_nothing_is_dropped():
    drained = scripted([(1, "a=+4")])
    again = scripted([(0, "e")], restored=drained.state)
    assert happened(again) == [("e", 0)]
    assert again.dropped == 0


def test_a_cut_before_all_data_leaves_nothing_and_one_beyond_it_leaves_pending_timers():
    assert scripted([(1, "a=+4")], until=0).state == {}
    late = scripted([(1, "a=@99")], until=50 * S)
    assert late.state.of("k").timers == {("ts-a", ""): 99 * S}


def test_keys_do_not_see_each_other():
    elements = [(1 * S, "k", "a=+4"), (2 * S, "j", "a=no"), (3 * S, "j", "a=+1")]
    result = run_event_loop(ScriptFn(), elements, value_coder=StrUtf8Coder())
    assert happened(result) == [
        ("a=+4", 1),
        ("<a:>", 5),
        ("a=no", 2),
        ("a=+1", 3),
        ("<a:>", 4),
    ]


def test_timers_that_set_each_other_for_ever_are_reported():
    with pytest.raises(EndlessTimersError, match=r"ts-a.*ScriptFn sets timers without end"):
        scripted([(1, "a=+1")], {"a:": "a=+1"}, max_firings=50)
    with pytest.raises(EndlessTimersError):
        scripted([(1, "a=+1")], {"a:": "a=-1"}, until=9 * S, max_firings=50)


def test_as_many_timers_as_there_are_elements_for_are_no_fault():
    data = [(n, "a=+0.5") for n in range(60)]
    assert len(scripted(data, max_firings=1).outputs) == 120


def test_a_loop_of_timers_is_no_fault_when_there_is_a_cut():
    cut = scripted([(1, "a=+1")], {"a:": "a=+1"}, until=9 * S)
    assert [seconds for _, seconds in happened(cut)] == [1, 2, 3, 4, 5, 6, 7, 8]


# -------------------------------------------------------------------------------------- outputs


class OutputsFn(beam.DoFn):
    NOTHING = ReadModifyWriteStateSpec("nothing", VarIntCoder())
    LATER = TimerSpec("later", TimeDomain.WATERMARK)

    def process(
        self,
        element,
        ts=DoFn.TimestampParam,
        cell=DoFn.StateParam(NOTHING),
        later=DoFn.TimerParam(LATER),
    ):
        later.set(ts + 3)
        return {
            "none": None,
            "list": ["x", "y"],
            "tuple": ("x",),
            "generator": (c for c in "xy"),
            "stamped": [TimestampedValue("x", 8)],
            "between": [TimestampedValue("x", Timestamp(micros=8_000_001))],
            "windowed": [WindowedValue("x", Timestamp(7), (W,), PANE_INFO_UNKNOWN)],
            "tagged": [TaggedOutput("t", "x"), TaggedOutput("t", TimestampedValue("y", 9))],
            "str": "xy",
            "dict": {"x": 1},
        }[element[1]]

    @on_timer(LATER)
    def on_later(self, key=DoFn.KeyParam):
        return [f"later {key}"]


LATER = Output(None, "later k", 4 * S, W)
OUTPUTS = {
    "none": [],
    "list": [Output(None, "x", 1 * S, W), Output(None, "y", 1 * S, W)],
    "tuple": [Output(None, "x", 1 * S, W)],
    "generator": [Output(None, "x", 1 * S, W), Output(None, "y", 1 * S, W)],
    "stamped": [Output(None, "x", 8 * S, W)],
    "between": [Output(None, "x", 8 * S + 1, W)],
    "windowed": [Output(None, "x", 7 * S, W)],
    "tagged": [Output("t", "x", 1 * S, W), Output("t", "y", 9 * S, W)],
}


@pytest.mark.parametrize(("what", "expected"), OUTPUTS.items(), ids=OUTPUTS)
def test_every_form_of_output_is_taken_as_beam_takes_it(what, expected):
    result = run_event_loop(OutputsFn(), [(1 * S, "k", what)])
    assert result.outputs == [*expected, LATER]


@pytest.mark.parametrize("what", ["str", "dict"])
def test_a_string_or_a_dict_instead_of_outputs_is_refused_as_beam_refuses_it(what):
    with pytest.raises(TypeError, match=f"OutputsFn returned a {what}"):
        run_event_loop(OutputsFn(), [(1 * S, "k", what)])


def test_outputs_at_or_after_the_cut_are_carried_and_emitted_by_the_loop_they_belong_to():
    data = [(1 * S, "k", "tagged"), (2 * S, "k", "stamped")]
    first = run_event_loop(OutputsFn(), data, until=8 * S)
    x8, y9 = Output(None, "x", 8 * S, W), Output("t", "y", 9 * S, W)
    assert first.outputs == [Output("t", "x", 1 * S, W), Output(None, "later k", 5 * S, W)]
    assert first.state == {("k", W): KeyedCells(carried=(y9, x8))}
    second = run_event_loop(OutputsFn(), data, restored=first.state, until=9 * S)
    assert second.outputs == [x8]
    assert second.state == {("k", W): KeyedCells(carried=(y9,))}
    third = run_event_loop(OutputsFn(), data, restored=second.state)
    assert third.outputs == [y9]
    assert third.state == {}


# ---------------------------------------------------------------------------------------- cells


class CellsFn(beam.DoFn):
    """Runs the element, a function, on its cells, and emits what it gives."""

    VALUE = ReadModifyWriteStateSpec("value", PickleCoder())
    BAG = BagStateSpec("bag", PickleCoder())
    SET = SetStateSpec("set", VarIntCoder())
    MEAN = CombiningValueStateSpec(
        "mean", TupleCoder((VarIntCoder(), VarIntCoder())), MeanCombineFn()
    )
    LIST = OrderedListStateSpec("list", VarIntCoder())

    def process(
        self,
        element,
        value=DoFn.StateParam(VALUE),
        bag=DoFn.StateParam(BAG),
        ids=DoFn.StateParam(SET),
        mean=DoFn.StateParam(MEAN),
        rows=DoFn.StateParam(LIST),
    ):
        cells = {"value": value, "bag": bag, "set": ids, "mean": mean, "list": rows}
        out = element[1](cells)
        return [] if out is None else [out]


def on_cells(*actions, restored=None):
    data = [(n * S, "k", action) for n, action in enumerate(actions)]
    result = run_event_loop(
        CellsFn(), data, restored=restored, until=100 * S, value_coder=_Passed()
    )
    return [output.value for output in result.outputs], result.state.of("k").cells


class _Passed(PickleCoder):
    """Functions go through as they are; their times alone give the order here."""

    def __init__(self):
        self.kept = []

    def encode(self, value):
        self.kept.append(value)
        return len(self.kept).to_bytes(4, "big")

    def decode(self, encoded):
        return self.kept[int.from_bytes(encoded, "big") - 1]


def t(seconds):
    return Timestamp(seconds)


CELLS = {
    "an empty value reads None": ([lambda c: [c["value"].read()]], [[None]], {}),
    "a value is read back": (
        [lambda c: c["value"].write((1, "x")), lambda c: c["value"].read()],
        [(1, "x")],
        {"value": (1, "x")},
    ),
    "a value written as None is an empty cell": (
        [lambda c: c["value"].write(7), lambda c: c["value"].write(None)],
        [],
        {},
    ),
    "a cleared value is empty": (
        [lambda c: c["value"].write(7), lambda c: c["value"].clear()],
        [],
        {},
    ),
    "falsy values are no empty cells": ([lambda c: c["value"].write(0)], [], {"value": 0}),
    "a bag keeps equal items": (
        [lambda c: c["bag"].add(2), lambda c: c["bag"].add(1), lambda c: c["bag"].add(2)],
        [],
        {"bag": [2, 1, 2]},
    ),
    "a bag cleared and filled again keeps the new": (
        [lambda c: c["bag"].add(2), lambda c: (c["bag"].clear(), c["bag"].add(3))[1]],
        [],
        {"bag": [3]},
    ),
    "a bag read before a clear is not emptied by it": (
        [lambda c: c["bag"].add(2), lambda c: (c["bag"].read(), c["bag"].clear())[0]],
        [[2]],
        {},
    ),
    "a set keeps one of equal items": (
        [lambda c: c["set"].add(2), lambda c: c["set"].add(2), lambda c: c["set"].read()],
        [{2}],
        {"set": frozenset({2})},
    ),
    "a combining cell keeps its accumulator": (
        [lambda c: c["mean"].add(2), lambda c: c["mean"].add(4), lambda c: c["mean"].read()],
        [3.0],
        {"mean": (6, 2)},
    ),
    "a cleared combining cell begins anew": (
        [
            lambda c: c["mean"].add(2),
            lambda c: c["mean"].clear(),
            lambda c: c["mean"].add(8),
            lambda c: c["mean"].read(),
        ],
        [8.0],
        {"mean": (8, 1)},
    ),
    "an empty combining cell reads its default and stays empty": (
        [lambda c: str(c["mean"].read())],
        ["nan"],
        {},
    ),
    "an ordered list is read by time": (
        [
            lambda c: c["list"].add((t(5), 1)),
            lambda c: c["list"].add((t(-2), 2)),
            lambda c: c["list"].add((t(5), 0)),
            lambda c: c["list"].read(),
        ],
        [[(t(-2), 2), (t(5), 1), (t(5), 0)]],
        {"list": [(-2 * S, 2), (5 * S, 1), (5 * S, 0)]},
    ),
    "an ordered list's ranges are half open": (
        [
            lambda c: [c["list"].add((t(n), n)) for n in (1, 2, 3, 4)] and None,
            lambda c: [v for _, v in c["list"].read_range(t(2), t(4))],
            lambda c: c["list"].clear_range(t(1), t(3)),
        ],
        [[2, 3]],
        {"list": [(3 * S, 3), (4 * S, 4)]},
    ),
}


@pytest.mark.parametrize(("actions", "outputs", "state"), CELLS.values(), ids=CELLS)
def test_cells_keep_what_beam_says_they_keep(actions, outputs, state):
    got, cells = on_cells(*actions)
    assert got == outputs
    assert cells == state


def test_every_kind_of_cell_is_restored_and_works_on():
    def fill(c):
        c["value"].write("v")
        c["bag"].add(1)
        c["set"].add(1)
        c["mean"].add(1)
        c["list"].add((t(1), 1))

    def more(c):
        c["value"].write(c["value"].read() + "w")
        c["bag"].add(2)
        c["set"].add(2)
        c["mean"].add(3)
        c["list"].add((t(0), 2))

    _, cells = on_cells(fill)
    saved = LoopState({("k", W): KeyedCells(cells)})
    _, grown = on_cells(more, restored=saved)
    assert grown == {
        "value": "vw",
        "bag": [1, 2],
        "set": frozenset({1, 2}),
        "mean": (4, 2),
        "list": [(0, 2), (1 * S, 1)],
    }
    assert saved == {("k", W): KeyedCells(cells)}, "the state that was restored has changed"


def test_objects_in_cells_are_not_shared_with_the_author():
    shared = ["written"]

    def write(c):
        c["value"].write(shared)
        c["bag"].add(shared)
        shared.append("after the write")

    def change_what_is_read(c):
        c["value"].read().append("after the read")
        for item in c["bag"].read():
            item.append("after the read")

    _, cells = on_cells(write, change_what_is_read)
    assert cells == {"value": ["written"], "bag": [["written"]]}


def test_unordered_states_are_equal_when_bags_differ_in_order_only():
    def state(bag, carried):
        return LoopState({("k", W): KeyedCells({"bag": bag, "value": (2, 1)}, {}, carried)}, 7)

    x, y = Output(None, "x", 9 * S, W), Output("t", "y", 8 * S, W)
    one, other = state([1, 2, 2], (x, y)), state([2, 1, 2], (y, x))
    assert one != other
    assert one.unordered() == other.unordered()
    assert one.unordered() != state([1, 2], (x, y)).unordered()
    assert one.unordered().boundary == 7


# ----------------------------------------------------------------------------------- parameters


class ParametersFn(beam.DoFn):
    CELL = ReadModifyWriteStateSpec("cell", VarIntCoder())
    TIMER = TimerSpec("timer", TimeDomain.WATERMARK)

    def process(
        self,
        element,
        one,
        key=DoFn.KeyParam,
        two=2,
        ts=DoFn.TimestampParam,
        window=DoFn.WindowParam,
        timer=DoFn.TimerParam(TIMER),
        whole=DoFn.WindowedValueParam,
        pane=DoFn.PaneInfoParam,
        three=3,
    ):
        timer.set(ts + 1, dynamic_timer_tag="tag")
        yield element, one, two, three, key, ts, window, whole.value, pane

    @on_timer(TIMER)
    def on_time(
        self,
        ts=DoFn.TimestampParam,
        window=DoFn.WindowParam,
        cell=DoFn.StateParam(CELL),
        key=DoFn.KeyParam,
        tag=DoFn.DynamicTimerTagParam,
        fixed="default",
    ):
        yield key, ts, window, tag, cell.read(), fixed


@pytest.mark.parametrize(
    ("args", "kwargs", "extra"),
    [
        ((1,), {}, (1, 2, 3)),
        ((1, 20), {}, (1, 20, 3)),
        ((1, 20, 30), {}, (1, 20, 30)),
        ((), {"one": 10, "three": 30}, (10, 2, 30)),
        ((1,), {"two": 20}, (1, 20, 3)),
    ],
)
def test_parameters_are_bound_by_what_they_are(args, kwargs, extra):
    result = run_event_loop(ParametersFn(), [(5 * S, "k", 7)], args=args, kwargs=kwargs)
    assert [output.value for output in result.outputs] == [
        (("k", 7), *extra, "k", t(5), W, ("k", 7), PANE_INFO_UNKNOWN),
        ("k", t(6), W, "tag", None, "default"),
    ]


class ElementByParamFn(beam.DoFn):
    CELL = ReadModifyWriteStateSpec("cell", VarIntCoder())

    def process(self, element=DoFn.ElementParam, cell=DoFn.StateParam(CELL)):
        yield element


def test_the_element_may_be_asked_for_by_its_parameter():
    result = run_event_loop(ElementByParamFn(), [(0, "k", 7)])
    assert [output.value for output in result.outputs] == [("k", 7)]


class LifecycleFn(beam.DoFn):
    CELL = ReadModifyWriteStateSpec("cell", VarIntCoder())
    CALLS: tuple[str, ...] = ()

    def setup(self):
        LifecycleFn.CALLS += ("setup",)

    def start_bundle(self):
        LifecycleFn.CALLS += ("start_bundle",)

    def process(self, element, cell=DoFn.StateParam(CELL)):
        LifecycleFn.CALLS += ("process",)
        if element[1] < 0:
            raise ArithmeticError("the author's own")

    def finish_bundle(self):
        LifecycleFn.CALLS += ("finish_bundle",)
        yield WindowedValue("finished", Timestamp(9), (W,), PANE_INFO_UNKNOWN)

    def teardown(self):
        LifecycleFn.CALLS += ("teardown",)


def test_lifecycle_methods_are_called_once_around_all_keys():
    LifecycleFn.CALLS = ()
    result = run_event_loop(LifecycleFn(), [(0, "a", 1), (0, "b", 1)])
    assert LifecycleFn.CALLS == (
        "setup",
        "start_bundle",
        "process",
        "process",
        "finish_bundle",
        "teardown",
    )
    assert result.outputs == [Output(None, "finished", 9 * S, W)]


def test_an_exception_of_the_author_comes_through_after_teardown():
    LifecycleFn.CALLS = ()
    with pytest.raises(ArithmeticError, match="the author's own"):
        run_event_loop(LifecycleFn(), [(0, "a", -1)])
    assert LifecycleFn.CALLS == ("setup", "start_bundle", "process", "teardown")


class CountingFn(beam.DoFn):
    CELL = ReadModifyWriteStateSpec("cell", VarIntCoder())

    def __init__(self):
        self.seen = []

    def process(self, element, cell=DoFn.StateParam(CELL)):
        self.seen.append(element)


def test_the_authors_own_object_is_left_as_it_was():
    fn = CountingFn()
    run_event_loop(fn, [(0, "a", 1)])
    assert fn.seen == []


@beam.typehints.with_input_types(tuple[str, int])
class HintedFn(beam.DoFn):
    CELL = ReadModifyWriteStateSpec("cell", VarIntCoder())

    def process(self, element, cell=DoFn.StateParam(CELL)):
        yield element[1]


def test_the_coder_of_the_input_hint_orders_equal_times():
    # VarInt writes the low seven bits first: 128 is 0x80 0x01, 1 is 0x01, 300 is 0xac 0x02.
    data = [(0, "k", 300), (0, "k", 128), (0, "k", 1)]
    result = run_event_loop(HintedFn(), data)
    assert [output.value for output in result.outputs] == [1, 128, 300]
    result = run_event_loop(HintedFn(), [(0, "k", 257), (0, "k", 128)])
    assert [output.value for output in result.outputs] == [128, 257]
    result = run_event_loop(HintedFn(), [(0, "k", 129), (0, "k", 256)])
    assert [output.value for output in result.outputs] == [256, 129]


# -------------------------------------------------------------------------------------- refused


class ProcessingTimeFn(beam.DoFn):
    TIMER = TimerSpec("clock", TimeDomain.REAL_TIME)

    def process(self, element, timer=DoFn.TimerParam(TIMER)):
        pass

    @on_timer(TIMER)
    def on_time(self):
        pass


class FinalizerFn(beam.DoFn):
    CELL = ReadModifyWriteStateSpec("cell", VarIntCoder())

    def process(self, element, cell=DoFn.StateParam(CELL), finalizer=DoFn.BundleFinalizerParam):
        pass


class TagInProcessFn(beam.DoFn):
    CELL = ReadModifyWriteStateSpec("cell", VarIntCoder())

    def process(self, element, cell=DoFn.StateParam(CELL), tag=DoFn.DynamicTimerTagParam):
        pass


class KeywordOnlyFn(beam.DoFn):
    CELL = ReadModifyWriteStateSpec("cell", VarIntCoder())

    def process(self, element, cell=DoFn.StateParam(CELL), *, ts=DoFn.TimestampParam):
        pass


class NeedsOneFn(beam.DoFn):
    CELL = ReadModifyWriteStateSpec("cell", VarIntCoder())

    def process(self, element, one, cell=DoFn.StateParam(CELL)):
        pass


REFUSED = {
    "processing time": (ProcessingTimeFn(), {}, "'ts-clock' is in processing time"),
    "a bundle finalizer": (FinalizerFn(), {}, "finalizer=DoFn.BundleFinalizer"),
    "a timer tag in process": (TagInProcessFn(), {}, "tag=DoFn.DynamicTimerTagParam"),
    "keyword-only": (KeywordOnlyFn(), {}, "ts is a keyword-only parameter"),
    "a missing argument": (NeedsOneFn(), {}, "nothing is given for the parameter one"),
    "an argument too many": (NeedsOneFn(), {"args": (1, 2)}, "1 extra arguments are too many"),
    "a cut between milliseconds": (CountingFn(), {"until": 1_500}, "take 1000"),
    "a cut before the boundary": (
        CountingFn(),
        {"until": 1_000, "restored": LoopState(boundary=2_000)},
        "lies before the restored boundary 2000",
    ),
}


@pytest.mark.parametrize(("fn", "settings", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_meaning_in_the_loop_is_refused_by_name(fn, settings, message):
    with pytest.raises(PipelineRefusedError, match=message) as refused:
        run_event_loop(fn, [], **settings)
    assert isinstance(refused.value, CheckpointError)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (KeyedCells(cells={"gone": 1}), "cell 'gone'"),
        (KeyedCells(timers={("ts-gone", ""): 1}), "family 'ts-gone'"),
    ],
)
def test_state_of_another_dofn_is_refused_by_name(saved, message):
    with pytest.raises(StateIncompatibleError, match=message):
        run_event_loop(CountingFn(), [], restored=LoopState({("k", W): saved}))
