"""What stands around the operators: groupings that a cut divides, and data without event time."""

from __future__ import annotations

import logging
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import VarIntCoder
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.trigger import (
    AccumulationMode,
    AfterCount,
    AfterWatermark,
    Always,
    Repeatedly,
)
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
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
from beam_ckpt.transforms.graph import cut_window
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
