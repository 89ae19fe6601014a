"""What stands around the operators: groupings that a cut divides, and data without event time."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import FastPrimitivesCoder, VarIntCoder
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.trigger import (
    AccumulationMode,
    AfterCount,
    AfterWatermark,
    Always,
    Repeatedly,
)
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import (
    FixedWindows,
    GlobalWindows,
    Sessions,
    SlidingWindows,
    TimestampedValue,
)

from beam_ckpt import inspect, open_store
from beam_ckpt.errors import PipelineRefusedError
from beam_ckpt.transforms import CheckpointedParDo, Checkpoints
from beam_ckpt.transforms.graph import comes_in_one_go, cut_window
from beam_ckpt.transforms.keyed_state.clock import Epochs

S = 1_000_000
DISCARDING = AccumulationMode.DISCARDING


class CountFn(beam.DoFn):
    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())

    def process(self, element, count=beam.DoFn.StateParam(COUNT)):
        yield element


class SumFn(beam.DoFn):
    SUM = ReadModifyWriteStateSpec("sum", VarIntCoder())

    def process(self, element, total=beam.DoFn.StateParam(SUM)):
        total.write((total.read() or 0) + element[1])


CountFn = beam.typehints.with_output_types(tuple[str, int])(CountFn)


@pytest.mark.parametrize(
    ("windows", "every", "until", "found"),
    [
        (FixedWindows(60), 60, None, None),
        (FixedWindows(60), 300, None, None),
        (FixedWindows(60), 300, 120, None),
        (FixedWindows(60), 90, None, "make `every` a multiple of 60 s"),
        (FixedWindows(60), 30, None, "make `every` a multiple of 60 s"),
        (FixedWindows(60, 10), 60, None, "no offset"),
        (FixedWindows(60), None, 119, "`until` be the end of one"),
        (FixedWindows(60), 60, 119, "`until` be the end of one"),
        (FixedWindows(60), None, 120, None),
        (FixedWindows(60, 10), None, 130, None),
        (FixedWindows(0.5), 1.25, None, "multiple of 0.5 s"),
        (FixedWindows(60), None, None, None),
        (SlidingWindows(60, 30), 60, None, "in a checkpointed operator"),
        (SlidingWindows(60, 60), 60, None, None),
        (SlidingWindows(60, 60), 90, None, "make `every` a multiple of 60 s"),
        (Sessions(10), 60, None, "in a checkpointed operator"),
        (GlobalWindows(), 60, None, "window it"),
        (GlobalWindows(), None, 60, "window it"),
        (GlobalWindows(), None, None, None),
    ],
)
def test_which_windows_a_cut_divides(windows, every, until, found):
    micros = [None if seconds is None else round(seconds * S) for seconds in (every, until)]
    divided = cut_window(Windowing(windows), Epochs(*micros))
    assert (divided is None) == (found is None)
    if divided is not None:
        assert found in divided[1]


@pytest.mark.parametrize(
    ("trigger", "mode", "holds"),
    [
        (Always(), DISCARDING, False),
        (Repeatedly(AfterCount(1)), DISCARDING, False),
        (Repeatedly(AfterCount(2)), DISCARDING, True),
        (Repeatedly(AfterCount(1)), AccumulationMode.ACCUMULATING, True),
        (AfterWatermark(early=AfterCount(1)), DISCARDING, True),
    ],
)
def test_a_grouping_that_lets_all_through_at_once_holds_nothing(trigger, mode, holds):
    windowing = Windowing(GlobalWindows(), triggerfn=trigger, accumulation_mode=mode)
    assert (cut_window(windowing, Epochs(60 * S, None)) is not None) == holds


def build(between: Any, before: Any = None, **settings: Any) -> None:
    """Two operators with something between them; built, not run."""
    pipeline = beam.Pipeline(runner="FnApiRunner")
    source = (
        pipeline
        | beam.Create([("a", 1)])
        | beam.Map(lambda kv: TimestampedValue(kv, 1)).with_output_types(tuple[str, int])
    )
    if before is not None:
        source |= before
    with Checkpoints(pipeline, "memory://graph", **settings) as ckpt:
        first = source | "First" >> ckpt.ParDo(CountFn(), uid="first")
        second = first | between
        _ = second | "Second" >> ckpt.ParDo(CountFn(), uid="second")


class PerMinute(beam.PTransform):
    """Sums in windows, back in the global window."""

    def __init__(self, windows: Any, step: Any) -> None:
        super().__init__()
        self.windows, self.step = windows, step

    def expand(self, pcoll):
        return (
            pcoll
            | "In" >> beam.WindowInto(self.windows)
            | self.step
            | "Out" >> beam.WindowInto(GlobalWindows())
            | beam.Map(lambda kv: kv).with_output_types(tuple[str, int])
        )


SUM = beam.CombinePerKey(sum)


@pytest.mark.parametrize(
    ("step", "label"),
    [
        (SUM, "CombinePerKey(sum)/GroupByKey"),
        ("Collect" >> beam.GroupByKey(), "'PerMinute/Collect'"),
        (beam.combiners.Count.PerKey(), "GroupByKey"),
    ],
)
def test_a_grouping_between_two_operators_that_a_cut_divides_is_named(step, label):
    with pytest.raises(PipelineRefusedError) as refused:
        build(PerMinute(FixedWindows(60), step), every=90)
    text = str(refused.value)
    for part in ("'first' and 'second'", label, "windows of 60 s", "every=90", "multiple of 60 s"):
        assert part in text


def test_a_grouping_between_two_operators_that_no_cut_divides_is_accepted(caplog):
    build(PerMinute(FixedWindows(60), SUM), every=120)
    build(PerMinute(FixedWindows(60), SUM))
    build(beam.Reshuffle(), every=90)
    assert "beam_ckpt" not in {record.name.split(".")[0] for record in caplog.records}


def test_a_grouping_beside_two_operators_counts_when_it_comes_back_as_a_side_input():
    class Joined(beam.PTransform):
        def expand(self, pcoll):
            total = pcoll | beam.Values() | beam.CombineGlobally(sum)
            return pcoll | beam.Map(
                lambda kv, total: kv, beam.pvalue.AsSingleton(total)
            ).with_output_types(tuple[str, int])

    with pytest.raises(PipelineRefusedError, match=r"CombineGlobally.*the global window"):
        build(Joined(), every=60)


def test_a_grouping_before_the_first_operator_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING, "beam_ckpt"):
        build(beam.Reshuffle(), before=PerMinute(FixedWindows(60), SUM), every=90)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "before operator 'first'" in message
    assert "CombinePerKey(sum)/GroupByKey" in message
    assert "replay the source from the start of the windows" in message


def test_other_state_between_two_operators_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING, "beam_ckpt"):
        build("Plain" >> beam.ParDo(CountFn()), every=90)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "'first' and 'second', 'Plain' keeps state that is in no checkpoint" in message


@pytest.mark.parametrize("settings", [{"every": 60}, {"until": 60}])
def test_data_that_is_known_to_have_no_timestamps_is_not_cut_by_event_time(settings):
    pipeline = beam.Pipeline(runner="FnApiRunner")
    stamped = (
        pipeline
        | "Stamped" >> beam.Create([("a", 1)])
        | beam.Map(lambda kv: TimestampedValue(kv, 1)).with_output_types(tuple[str, int])
    )
    plain = pipeline | "Plain" >> beam.Create([("a", 1), ("b", 2)]).with_output_types(
        tuple[str, int]
    )
    both = (stamped, plain) | beam.Flatten()
    with pytest.raises(PipelineRefusedError, match=r"'op' reads 'Plain'.*no event time.*What to"):
        _ = both | CheckpointedParDo(CountFn(), uid="op", store="memory://graph", **settings)
    _ = both | "Drained" >> CheckpointedParDo(CountFn(), uid="op2", store="memory://graph2")


@pytest.mark.parametrize("settings", [{"every": 60}, {"until": 60}, {}])
def test_an_element_without_a_timestamp_stops_a_run_that_is_cut_by_event_time(settings, tmp_path):
    """Only when it comes: any DoFn may have stamped it, so it cannot be known before."""
    store = open_store(tmp_path)

    def run(step: Any, **settings: Any) -> None:
        with beam.Pipeline(runner="FnApiRunner") as p:
            _ = (
                p
                | beam.Create([("a", 1), ("b", 2)])
                | beam.Map(step).with_output_types(tuple[str, int])
                | CheckpointedParDo(CountFn(), uid="op", store=store, **settings)
            )

    if not settings:  # It would be dropped as applied.
        run(lambda kv: TimestampedValue(kv, 1), until=60)
    before = store.list_ids()
    with pytest.raises(Exception, match=r"'op' got an element without a timestamp.*What to do"):
        run(lambda kv: kv, **settings)
    assert store.list_ids() == before


def test_elements_without_timestamps_go_from_one_drained_run_to_the_next(tmp_path):
    store = open_store(tmp_path)
    for _ in range(2):
        with beam.Pipeline(runner="FnApiRunner") as p:
            _ = (
                p
                | beam.Create([("a", 1), ("b", 2)]).with_output_types(tuple[str, int])
                | CheckpointedParDo(SumFn(), uid="op", store=store)
            )
    assert sorted(inspect.state(store, "op")["sum"].to_pylist()) == [2, 4]


def test_what_is_flattened_has_one_coder_and_one_windowing():
    """With another windowing on one of its inputs Prism loses the whole of a Flatten."""
    pipeline = beam.Pipeline(runner="FnApiRunner")
    source = (
        pipeline
        | beam.Create([("a", 1)])
        | beam.Map(lambda kv: TimestampedValue(kv, 1)).with_output_types(tuple[str, int])
        | beam.WindowInto(
            FixedWindows(60),
            trigger=AfterWatermark(late=AfterCount(1)),
            accumulation_mode=AccumulationMode.ACCUMULATING,
            allowed_lateness=30,
        )
    )
    with Checkpoints(pipeline, "memory://graph-flatten", every=60) as ckpt:
        tracked = source | ckpt.TrackOffsets(
            "log", partition=lambda kv: kv[0], offset=lambda kv: kv[1]
        )
        _ = tracked | ckpt.ParDo(CountFn(), uid="count")
    components = pipeline.to_runner_api().components
    flattens = {
        transform.unique_name: {
            (
                components.pcollections[pcoll].coder_id,
                components.pcollections[pcoll].windowing_strategy_id,
            )
            for pcoll in (*transform.inputs.values(), *transform.outputs.values())
        }
        for transform in components.transforms.values()
        if transform.spec.urn == "beam:transform:flatten:v1"
    }
    assert any("TrackOffsets(log)" in name for name in flattens)
    assert any("Entries" in name for name in flattens)
    assert {name: kinds for name, kinds in flattens.items() if len(kinds) > 1} == {}


class OneByOne(beam.RestrictionProvider):
    def initial_restriction(self, element):
        return OffsetRange(*element)

    def create_tracker(self, restriction):
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element, restriction):
        return restriction.size()


ONE_BY_ONE = beam.DoFn.RestrictionParam(OneByOne())


class EveryOneFn(beam.DoFn):
    """Splittable: a runner may be told to come back for the rest."""

    def process(
        self,
        element,
        tracker=ONE_BY_ONE,
    ):
        offsets = tracker.current_restriction()
        for i in range(offsets.start, offsets.stop):
            if tracker.try_claim(i):
                yield "a", i


def sources(p: beam.Pipeline) -> dict[str, Any]:
    """By what is upstream: a PCollection."""
    one, many = p | "One" >> beam.Create([("a", 1)]), p | "Many" >> beam.Create([("a", 1)] * 9)
    counted = many | "Count" >> beam.ParDo(CountFn())
    ranges = p | "Ranges" >> beam.Create([(0, 5)])
    job = Checkpoints(p, "memory://sources")
    return {
        "create": one,
        "create of many": many,
        "windows and maps": one | beam.WindowInto(FixedWindows(5)) | beam.Map(lambda kv: kv),
        "flatten": (one, many) | beam.Flatten(),
        "side input": one | "Side" >> beam.Map(lambda kv, n: kv, beam.pvalue.AsIter(many)),
        "files": p | beam.io.ReadFromText("setup.cfg") | "Key" >> beam.Map(lambda line: ("a", 1)),
        "grouped state": counted | "Grouped" >> beam.GroupByKey(),
        "shuffled state": counted | beam.Reshuffle(),
        "state": counted,
        "state in one branch": (one, counted) | "Mixed" >> beam.Flatten(),
        "an operator": one | "Operator" >> job.ParDo(CountFn(), uid="of sources"),
        "splittable": ranges | "Splittable" >> beam.ParDo(EveryOneFn()),
        "stream": p | TestStream().add_elements([("a", 1)]).advance_watermark_to_infinity(),
    }


def test_what_upstream_comes_back_for_more():
    """State may have timers, and what is grouped comes from a stage of its own."""
    p = beam.Pipeline(runner="FnApiRunner")
    found = {name: comes_in_one_go(pcoll) for name, pcoll in sources(p).items()}
    comes_back = {"state", "state in one branch", "an operator", "splittable", "stream"}
    assert {name for name, in_one_go in found.items() if not in_one_go} == comes_back


def stages_of(p: beam.Pipeline, monkeypatch) -> list[list[str]]:
    """Runs a pipeline on FnApiRunner; returns the transforms of each of its stages."""
    found: list[list[str]] = []
    run_stages = FnApiRunner.run_stages

    def noted(self, context, stages):
        found.extend([t.unique_name for t in stage.transforms] for stage in stages)
        return run_stages(self, context, stages)

    monkeypatch.setattr(FnApiRunner, "run_stages", noted)
    p.run().wait_until_finish()
    return found


@pytest.mark.parametrize("every", [None, 60])
def test_an_operator_of_which_no_element_waits_is_fused_with_its_source(every, monkeypatch):
    """As a plain ParDo; where elements wait, they come encoded from a stage of their own."""
    p = beam.Pipeline(runner="FnApiRunner")
    job = Checkpoints(p, f"memory://{uuid.uuid4().hex}", every=every)
    stamp = beam.Map(lambda kv: TimestampedValue(kv, 1)).with_output_types(tuple[str, int])
    with job:
        source = p | "Source" >> beam.Create([("a", 1)]) | "Stamp" >> stamp
        _ = source | "Run" >> job.ParDo(CountFn(), uid="op")
    (together,) = [s for s in stages_of(p, monkeypatch) if any("Wrapper" in name for name in s)]
    assert any(name == "Stamp" for name in together) == (every is None)


class LaterFn(beam.DoFn):
    """Passes elements on, from timers and one after the other."""

    HELD = BagStateSpec("held", VarIntCoder())
    TURN = TimerSpec("turn", TimeDomain.WATERMARK)

    def process(
        self,
        element,
        held=beam.DoFn.StateParam(HELD),
        turn=beam.DoFn.TimerParam(TURN),
    ):
        held.add(element[1])
        turn.set(100)

    @on_timer(TURN)
    def on_turn(
        self,
        key=beam.DoFn.KeyParam,
        at=beam.DoFn.TimestampParam,
        held=beam.DoFn.StateParam(HELD),
        turn=beam.DoFn.TimerParam(TURN),
    ):
        first, *others = sorted(held.read())
        held.clear()
        for value in others:
            held.add(value)
        if others:
            turn.set(at + 100)
        yield key, first


@pytest.mark.parametrize("first", ["ParDo", "CheckpointedParDo"])
def test_what_timers_before_an_operator_emit_is_in_its_state(first, tmp_path):
    """Fused with them, it would take its last checkpoint before they have come to their end."""
    data = [(key, value) for key in "ab" for value in range(5)]
    typed = beam.typehints.with_output_types(tuple[str, int])(LaterFn)()
    with beam.Pipeline(runner="FnApiRunner") as p:
        step: Any = beam.ParDo(typed)
        if first == "CheckpointedParDo":
            step = CheckpointedParDo(typed, uid="later", store=str(tmp_path / "later"))
        stamp = beam.Map(lambda kv: TimestampedValue(kv, kv[1])).with_output_types(tuple[str, int])
        later = p | "Source" >> beam.Create(data) | stamp | "Later" >> step
        _ = later | CheckpointedParDo(SumFn(), uid="sums", store=str(tmp_path / "sums"))
    rows = inspect.state(str(tmp_path / "sums"), "sums").to_pylist()
    assert {row["key"]: row["sum"] for row in rows} == {"a": 10, "b": 10}


class CollectFn(beam.DoFn):
    ALL = BagStateSpec("all", FastPrimitivesCoder())
    LAST = ReadModifyWriteStateSpec("last", FastPrimitivesCoder())

    def process(self, element, kept=beam.DoFn.StateParam(ALL), last=beam.DoFn.StateParam(LAST)):
        kept.add(element[1])
        last.write(element[1])


def one_list_three_times(_):
    values: list[int] = []
    for i in range(3):
        values.append(i)
        yield TimestampedValue(("a", values), i)
    values.append(-1)


@pytest.mark.parametrize("every", [None, 60])
def test_a_value_that_its_source_changes_later_is_as_it_was(every, tmp_path):
    with beam.Pipeline(runner="FnApiRunner") as p:
        source = beam.FlatMap(one_list_three_times).with_output_types(tuple[str, list[int]])
        step = CheckpointedParDo(CollectFn(), uid="op", store=str(tmp_path), every=every)
        _ = p | beam.Create([None]) | source | step
    (row,) = inspect.state(str(tmp_path), "op").to_pylist()
    decode = FastPrimitivesCoder().decode
    assert [decode(item) for item in row["all"]] == [[0], [0, 1], [0, 1, 2]]
    assert decode(row["last"]) == [0, 1, 2]
