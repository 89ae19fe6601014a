"""What an author's test of a restart finds, and what it says."""

from __future__ import annotations

import doctest
import random
import subprocess
import sys
import time
import uuid
from typing import ClassVar

import apache_beam as beam
import pytest
from apache_beam.coders import FloatCoder, VarIntCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import (
    FixedWindows,
    GlobalWindow,
    IntervalWindow,
    TimestampedValue,
)
from apache_beam.utils.timestamp import Timestamp

from beam_ckpt import errors, open_store
from beam_ckpt.testing import assert_cut_equivalent, equivalence, state_of
from beam_ckpt.testing.cuts import run_checkpointed
from beam_ckpt.testing.event_loop import KeyedCells, Output

GLOBAL = GlobalWindow()
PURCHASES = [(0, "ada", 3), (10, "bob", 5), (40, "ada", 4), (90, "bob", 1)]


class TotalsFn(beam.DoFn):
    """A running total, and one output of all of them a while after the last element."""

    TOTAL = ReadModifyWriteStateSpec("total", VarIntCoder())
    SEEN = BagStateSpec("seen", VarIntCoder())
    QUIET = TimerSpec("quiet", TimeDomain.WATERMARK)

    def process(
        self,
        element,
        timestamp=beam.DoFn.TimestampParam,
        total=beam.DoFn.StateParam(TOTAL),
        seen=beam.DoFn.StateParam(SEEN),
        quiet=beam.DoFn.TimerParam(QUIET),
        scale=1,
    ):
        key, value = element
        total.write((total.read() or 0) + scale * value)
        seen.add(value)
        quiet.set(timestamp + 30)
        yield key, total.read()

    @on_timer(QUIET)
    def on_quiet(
        self,
        key=beam.DoFn.KeyParam,
        total=beam.DoFn.StateParam(TOTAL),
        seen=beam.DoFn.StateParam(SEEN),
    ):
        yield beam.pvalue.TaggedOutput("quiet", (key, total.read(), sorted(seen.read())))


class AttributeFn(beam.DoFn):
    """Broken: it counts in an attribute, and the cell only shows it."""

    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())

    def __init__(self, emits: bool = True) -> None:
        self.counts: dict[str, int] = {}
        self.emits = emits

    def process(self, element, count=beam.DoFn.StateParam(COUNT)):
        key, _ = element
        self.counts[key] = self.counts.get(key, 0) + 1
        count.write(self.counts[key])
        if self.emits:
            yield key, self.counts[key]


class LastSeenFn(beam.DoFn):
    """Broken: what its timer needs is in an attribute."""

    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())
    QUIET = TimerSpec("quiet", TimeDomain.WATERMARK)

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def process(
        self,
        element,
        timestamp=beam.DoFn.TimestampParam,
        count=beam.DoFn.StateParam(COUNT),
        quiet=beam.DoFn.TimerParam(QUIET),
    ):
        count.write(1)
        self.names[element[0]] = str(element[0]).title()
        quiet.set(timestamp + 30)

    @on_timer(QUIET)
    def on_quiet(self, key=beam.DoFn.KeyParam):
        yield self.names[key]


class NoFunctionFn(beam.DoFn):
    """Broken: what it keeps comes from elsewhere."""

    LAST = ReadModifyWriteStateSpec("last", FloatCoder())
    calls: ClassVar[list[object]] = []

    def __init__(self, source: str) -> None:
        self.source = source

    def process(self, element, last=beam.DoFn.StateParam(LAST)):
        if self.source == "the wall clock":
            last.write(time.time())
        elif self.source == "random":
            last.write(random.random())
        else:
            self.calls.append(element)
            last.write(float(len(self.calls)))


class GapFn(beam.DoFn):
    """Right, where its elements come in order."""

    LAST = ReadModifyWriteStateSpec("last", VarIntCoder())

    def process(self, element, last=beam.DoFn.StateParam(LAST)):
        before = last.read()
        last.write(element[1])
        yield element[0], before


class ForgetfulFn(beam.DoFn):
    """Keeps nothing."""

    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())

    def process(self, element, count=beam.DoFn.StateParam(COUNT)):
        count.clear()
        yield element


class AlarmFn(beam.DoFn):
    ALARM = TimerSpec("alarm", TimeDomain.REAL_TIME)

    def process(self, element, alarm=beam.DoFn.TimerParam(ALARM)):
        alarm.set(Timestamp.now())

    @on_timer(ALARM)
    def on_alarm(self):
        yield "now"


def message(fn: beam.DoFn, elements=PURCHASES, cuts=(40,), **settings) -> list[str]:
    with pytest.raises(AssertionError) as found:
        assert_cut_equivalent(fn, elements, cuts, **settings)
    return str(found.value).splitlines()


def test_state_timers_and_tagged_outputs_that_survive_pass():
    elements = [TimestampedValue((key, value), at) for at, key, value in PURCHASES]
    assert_cut_equivalent(
        TotalsFn(), elements, time_sorted=True, tags=["quiet"], kwargs={"scale": 2}
    )


def test_windows_are_those_of_the_pipeline():
    assert_cut_equivalent(
        GapFn(), PURCHASES, [Timestamp(20)], windows=FixedWindows(60), allowed_lateness=10
    )


def test_state_in_an_attribute_is_lost_and_the_first_loss_is_shown():
    elements = [*PURCHASES[:3], (95, "ada", 1)]
    assert message(AttributeFn(), elements, cuts=[5, 40], time_sorted=True) == [
        "AttributeFn does not survive the restart at the cut at Timestamp(40) (2 of 2).",
        "  missing output, only without the restart: "
        "('ada', 2) at Timestamp(40) in GlobalWindow (and 1 more)",
        "  extra output, only with it: ('ada', 1) at Timestamp(40) in GlobalWindow (and 1 more)",
        "  state at the end of key 'ada' in GlobalWindow, cell 'count': "
        "3 without the restart, 2 with it",
        "Uninterrupted runs agree with each other, so something that it goes by is not restored: "
        "an attribute of the DoFn, say, or what a coder leaves out. What to do: keep it in a state "
        "cell.",
    ]


def test_state_that_differs_is_found_where_no_output_does():
    _, state, _ = message(AttributeFn(emits=False))
    assert state == (
        "  state at the end of key 'ada' in GlobalWindow, cell 'count': "
        "2 without the restart, 1 with it"
    )


def test_a_restored_run_that_fails_is_told_with_its_error():
    first, failure, _ = message(LastSeenFn(), PURCHASES[:2], cuts=[20], time_sorted=True)
    assert "the restart at the cut at Timestamp(20) (1 of 1)" in first
    assert "the restored run fails: KeyError: " in failure
    assert "ada" in failure or "bob" in failure


@pytest.mark.parametrize("source", ["the wall clock", "random", "an attribute of its class"])
def test_what_no_two_runs_have_in_common_is_told_from_what_a_restart_loses(source):
    first, difference, reason = message(
        NoFunctionFn(source), PURCHASES[:2], cuts=[10], time_sorted=True
    )
    assert "does not survive the restart at the cut at Timestamp(10)" in first
    assert "of key 'ada' in GlobalWindow, cell 'last': " in difference
    assert reason.startswith("Two uninterrupted runs differ as well")
    assert source in reason


def test_what_depends_on_the_order_of_elements_is_told_so():
    *_, reason = message(GapFn(), PURCHASES[::-1])
    assert reason.startswith("With time_sorted=True there is no difference")


def test_a_plain_pardo_that_does_otherwise_is_told(monkeypatch):
    def other(fn, *args, **settings):
        return run_plain(TotalsFn() if isinstance(fn, GapFn) else fn, *args, **settings)

    run_plain = equivalence.run_plain
    monkeypatch.setattr(equivalence, "run_plain", other)
    first, missing, _, reason = message(GapFn())
    assert first.startswith("GapFn gives other outputs in a CheckpointedParDo than in a beam.ParDo")
    assert "only with beam.ParDo: ('ada', 3)" in missing
    assert "bundles" in reason


@pytest.mark.parametrize(
    ("fn", "elements", "cuts", "what"),
    [
        (GapFn(), [], None, "no element lies before a cut"),
        (GapFn(), PURCHASES, [], "no element lies before a cut"),
        (GapFn(), PURCHASES, [-5, 0], "no element lies before a cut"),
        (ForgetfulFn(), PURCHASES[:1], None, "neither state nor timers at any cut"),
        (AlarmFn(), PURCHASES, None, "processing-time timers"),
    ],
)
def test_a_test_that_would_show_nothing_is_refused(fn, elements, cuts, what):
    with pytest.raises(errors.PipelineRefusedError, match=f"{what}.*What to do"):
        assert_cut_equivalent(fn, elements, cuts)


@pytest.mark.parametrize(
    ("times", "cuts"),
    [
        ([0], [1_000]),
        ([0, 9, 9, 9], [9_000_000, 9_001_000]),
        (range(0, 90, 10), [30_000_000, 60_000_000, 80_001_000]),
    ],
)
def test_default_cuts_are_at_elements_and_after_the_last_one(times, cuts):
    elements = [(at * 1_000_000, "key", 0) for at in times]
    assert equivalence._default_cuts(elements) == cuts


def test_values_that_equal_nothing_are_compared_all_the_same():
    nan = float("nan")
    assert equivalence._same([nan], [float("nan")])
    assert not equivalence._same(nan, 1.0)
    assert equivalence._same_items([1, 2, 2], [2, 1, 2])
    assert not equivalence._same_items([1, 2, 2], [2, 1, 1])
    assert not equivalence._same_items([1], None)


@pytest.mark.parametrize(
    ("restarted", "what"),
    [
        (KeyedCells({}, {("ts-quiet", ""): 9_000_000}), "cell 'n': 1 without the restart, empty"),
        (KeyedCells({"n": 1}, {}), "timer 'quiet': due at Timestamp(9) without the restart, not"),
        (
            KeyedCells({"n": 1}, {("ts-quiet", ""): 9_000_000}, (Output(None, 5, 7, GLOBAL),)),
            "output kept for later: none without the restart, 5 at Timestamp(0.000007)",
        ),
    ],
)
def test_cells_timers_and_outputs_kept_for_later_are_state(restarted, what):
    whole = KeyedCells({"n": 1}, {("ts-quiet", ""): 9_000_000})
    same = {("ada", GLOBAL): whole}
    assert equivalence._state_difference(same, dict(same), None, frozenset()) is None
    found = equivalence._state_difference(same, {("ada", GLOBAL): restarted}, None, frozenset())
    assert found is not None
    assert f"at the end of key 'ada' in GlobalWindow, {what}" in found


def test_state_of_is_what_a_checkpoint_holds():
    store = open_store(f"memory://{uuid.uuid4().hex}")
    rows = [(at * 1_000_000, key, value) for at, key, value in PURCHASES]
    for until in (15, None):
        run_checkpointed(
            TotalsFn(), rows, runner="FnApiRunner", store=store, until=until, key_groups=2
        )
    first, last = store.list_ids()
    assert state_of(store, "subject", at=first) == {
        "ada": {"total": 3, "seen": [3]},
        "bob": {"total": 5, "seen": [5]},
    }
    assert state_of(store, "subject", cells=TotalsFn) == state_of(store, "subject", at=last)
    assert state_of(store, "subject")["ada"] == {"total": 7, "seen": [3, 4]}
    with pytest.raises(errors.CheckpointNotFoundError, match="'subject'"):
        state_of(store, "totals")


def test_state_of_windows_is_by_key_and_window():
    store = open_store(f"memory://{uuid.uuid4().hex}")
    rows = [(at * 1_000_000, key, value) for at, key, value in PURCHASES]
    windows = FixedWindows(60)
    run_checkpointed(
        GapFn(), rows, runner="FnApiRunner", store=store, until=50, key_groups=2, window_fn=windows
    )
    window = IntervalWindow(0, 60)
    expected = {("ada", window): {"last": 4}, ("bob", window): {"last": 5}}
    assert state_of(store, "subject", windows=windows) == expected


def test_the_example_of_the_module_runs():
    assert doctest.testmod(equivalence) == doctest.TestResults(failed=0, attempted=5)


def test_beam_is_imported_only_when_an_author_asks():
    code = (
        "import sys\n"
        "import beam_ckpt.testing\n"
        "assert not {'apache_beam', 'pytest', 'pyarrow'} & set(sys.modules)\n"
        "assert {'assert_cut_equivalent', 'state_of'} <= set(beam_ckpt.testing.__all__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
