"""Source offsets: a run that reads only from where the checkpoint says misses nothing."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.window import (
    GlobalWindows,
    SlidingWindows,
    TimestampedValue,
    WindowFn,
)
from apache_beam.utils.timestamp import Timestamp
from hypothesis import given, note, settings
from hypothesis import strategies as st

from beam_ckpt import open_store
from beam_ckpt.testing import cuts
from beam_ckpt.testing.cuts import saved_state
from beam_ckpt.testing.event_loop import Output, canonical, run_event_loop
from beam_ckpt.testing.prism import prism_options
from beam_ckpt.testing.replay import ReadReplay, ReplayLog
from beam_ckpt.testing.strategies import cuts as cut_times
from beam_ckpt.testing.strategies import data_sets, stream_plans
from beam_ckpt.testing.streams import Advance, Arrive, StreamPlan
from beam_ckpt.testing.subjects import CountAndSumFn
from beam_ckpt.transforms import Checkpoints

S = 1_000_000
RUNNERS = {"FnApiRunner": False, "BundleBasedDirectRunner": True}
Offsets = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Log:
    """A source with partitions: what it holds in the order of its offsets, and how it is read.

    Attributes:
        plan: Elements (event time, partition, (offset, key, value)) as they are read.
        streaming: Whether they come as a stream.
    """

    plan: StreamPlan
    streaming: bool

    @classmethod
    def of(cls, plan: StreamPlan, streaming: bool) -> Log:
        """Each element goes to the partition of its value, behind what is there."""
        ends: dict[str, int] = {}
        steps: list[Arrive | Advance] = []
        for step in plan.steps:
            if isinstance(step, Advance):
                steps.append(step)
                continue
            rows = []
            for at, key, value in step.elements:
                partition = f"p{value % 3}"
                offset = ends[partition] = ends.get(partition, -1) + 1
                rows.append((at, partition, (offset, key, value)))
            steps.append(Arrive(tuple(rows)))
        return cls(StreamPlan(tuple(steps)), streaming)

    def data(self) -> list[tuple[int, str, int]]:
        return [(at, key, value) for at, _, (_, key, value) in self.plan.elements]

    def read(self, pipeline: beam.Pipeline, positions: Mapping[str, int]) -> Any:
        """What is at or after the positions; a partition without one from its start."""
        steps: list[Arrive | Advance] = []
        for step in self.plan.steps:
            if isinstance(step, Advance):
                steps.append(step)
            else:
                rows = [row for row in step.elements if row[2][0] >= positions.get(row[1], 0)]
                steps.append(Arrive(tuple(rows)))
        plan = StreamPlan(tuple(steps))
        if self.streaming:
            return pipeline | plan.to_test_stream()
        return (
            pipeline
            | beam.Create(list(plan.elements), reshuffle=False)
            | beam.Map(lambda e: TimestampedValue((e[1], e[2]), Timestamp(micros=e[0])))
        )

    def positions(self, boundary: int | None) -> dict[str, int]:
        """From where to read after a cut, by the definition: over all that the log holds."""
        found = {}
        for partition in {row[1] for row in self.plan.elements}:
            rows = [(at, row[0]) for at, p, row in self.plan.elements if p == partition]
            after = [offset for at, offset in rows if boundary is not None and at >= boundary]
            if len(after) < len(rows):
                found[partition] = min(after, default=max(offset for _, offset in rows) + 1)
        return found


def run(log: Log, runner: str, store: Any, **settings: Any) -> tuple[list[Output], int]:
    """One run, over what the checkpoint says it has to read; its outputs and how much it read."""
    name = uuid.uuid4().hex
    collected = cuts._COLLECTED[name] = []
    arguments = [f"--runner={runner}", *(["--streaming"] if log.streaming else [])]
    if runner == "PrismRunner":
        arguments += prism_options()
    options = PipelineOptions(arguments)
    disorder = settings.pop("disorder", 0)
    with beam.Pipeline(options=options) as p, Checkpoints(p, store, **settings) as ckpt:
        positions = ckpt.resume_offsets["log"]
        _ = (
            log.read(p, positions)
            | "Typed" >> beam.Map(lambda e: e).with_output_types(tuple[str, tuple[int, str, int]])
            | "Track"
            >> ckpt.TrackOffsets(
                "log",
                partition=lambda e: e[0],
                offset=lambda e: e[1][0],
                source_type="log",
                disorder=disorder,
            )
            | "Keyed" >> beam.Map(lambda e: (e[1][1], e[1][2])).with_output_types(tuple[str, int])
            | "Subject" >> ckpt.ParDo(CountAndSumFn(), uid="subject")
            | beam.ParDo(cuts._CollectFn(name, None))
        )
    del cuts._COLLECTED[name]
    read = sum(row[2][0] >= positions.get(row[1], 0) for row in log.plan.elements)
    return collected, read


def saved(store: Any, checkpoint_id: int | None = None) -> dict[str, int]:
    manifest = store.load_latest() if checkpoint_id is None else store.load_by_id(checkpoint_id)
    entry = manifest.source_offsets["log"]
    assert (entry.source_type, entry.epoch) == ("log", manifest.epoch)
    return {partition: int(position) for partition, position in entry.offsets.items()}


def check(log: Log, runner: str, boundaries: tuple[int, ...], every: int | None) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    outputs: list[Output] = []
    for cut in (*boundaries, None):
        first = store.next_id()
        settings = {
            "until": None if cut is None else cut / S,
            "every": None if every is None else every / S,
            "keep": 10_000,
            "key_groups": 2,
        }
        part, read = run(log, runner, store, **settings)
        outputs += part
        note(f"cut {cut}: {read} of {len(log.plan.elements)} read, {saved(store)}")
        for checkpoint_id in range(first, store.next_id()):
            boundary = store.load_by_id(checkpoint_id).boundary
            expected = log.positions(boundary)
            if log.streaming:
                # What was not yet read lies behind what was: it is only read again.
                found = saved(store, checkpoint_id)
                assert found.keys() <= expected.keys()
                assert all(found[p] <= expected[p] for p in found)
            else:
                assert saved(store, checkpoint_id) == expected
        assert saved(store).keys() == log.positions(cut).keys()
        loop = run_event_loop(CountAndSumFn(), log.data(), until=cut)
        assert saved_state(store, CountAndSumFn()) == dict(loop.state)
    whole = run_event_loop(CountAndSumFn(), log.data())
    assert canonical(outputs) == canonical([o for o in whole.outputs if o.tag is None])
    assert saved(store) == log.positions(None)


@st.composite
def examples(draw: st.DrawFn, streaming: bool) -> tuple[Log, tuple[int, ...], int | None]:
    data = draw(data_sets(min_size=1, max_size=25))
    plan = draw(stream_plans(data)) if streaming else None
    if plan is None:
        # In a batch offsets and event times may be in any order to each other.
        plan = StreamPlan((Arrive(tuple(draw(st.permutations(data)))),))
    moments = [at for at, _, _ in data]
    boundaries = draw(cut_times(max_cuts=3, aligned_to=moments))
    every = draw(st.sampled_from([None, None, 50 * S, 100 * S]))
    return Log.of(plan, streaming), boundaries, every


@pytest.mark.parametrize("runner", RUNNERS)
def test_reading_from_the_saved_offsets_gives_what_reading_all_gives(runner):
    @settings(max_examples=4, derandomize=True)
    @given(examples(RUNNERS[runner]))
    def holds(example):
        log, boundaries, every = example
        check(log, runner, boundaries, every)

    holds()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("runner", RUNNERS)
def test_reading_from_the_saved_offsets_gives_what_reading_all_gives_at_length(runner):
    @settings(max_examples=40, derandomize=True)
    @given(examples(RUNNERS[runner]))
    def holds(example):
        log, boundaries, every = example
        check(log, runner, boundaries, every)

    holds()


def batch(*rows: tuple[int, int, int]) -> Log:
    """Of (second, partition, value); offsets are their order."""
    return Log.of(
        StreamPlan((Arrive(tuple((at * S, "k", value * 3 + p) for at, p, value in rows)),)), False
    )


DISORDER = batch((10, 0, 1), (70, 0, 1), (20, 0, 1), (80, 0, 1), (30, 1, 1), (90, 2, 1))


@pytest.mark.parametrize(
    ("runner", "streaming"),
    [*RUNNERS.items(), ("PrismRunner", False), ("PrismRunner", True)],
)
def test_the_lowest_offset_that_is_not_in_the_cut_is_kept(tmp_path, runner, streaming, request):
    if runner == "PrismRunner":
        request.getfixturevalue("prism")
    store = open_store(tmp_path)
    run(Log(DISORDER.plan, streaming), runner, store, until=60)
    # Of p0 offset 1 (70 s) comes before offset 2 (20 s), which is in the cut; of p1 all was read;
    # of p2 nothing lies below the boundary.
    assert saved(store) == {"p0": 1, "p1": 1}
    ckpt = Checkpoints(beam.Pipeline(runner="FnApiRunner"), store)
    assert ckpt.resume_offsets == {"log": {"p0": 1, "p1": 1}}
    assert ckpt.resume_offsets["log"]["p0"] == 1
    assert ckpt.resume_offsets["another"] == {}


def test_a_fresh_start_has_no_offsets(tmp_path):
    store = open_store(tmp_path)
    run(DISORDER, "FnApiRunner", store, until=60)
    ckpt = Checkpoints(beam.Pipeline(runner="FnApiRunner"), store, restore="fresh")
    assert ckpt.resume_offsets == {}
    assert ckpt.resume_offsets["log"] == {}


def test_a_partition_that_has_nothing_new_keeps_its_position(tmp_path):
    store = open_store(tmp_path)
    run(DISORDER, "FnApiRunner", store, until=60)
    _, read = run(DISORDER, "FnApiRunner", store, until=75)
    assert read == 4  # of p0 offsets 1 to 3, and p2
    assert saved(store) == {"p0": 3, "p1": 1}
    run(DISORDER, "FnApiRunner", store)
    assert saved(store) == {"p0": 4, "p1": 1, "p2": 1}
    _, read = run(DISORDER, "FnApiRunner", store)
    assert read == 0
    assert saved(store) == {"p0": 4, "p1": 1, "p2": 1}


def test_a_source_that_moves_on_is_a_checkpoint_where_no_state_changed(tmp_path):
    """Else a filter that lets nothing through would leave the source to be replayed for ever."""
    store = open_store(tmp_path)
    with beam.Pipeline(runner="FnApiRunner") as p, Checkpoints(p, store, every=50) as ckpt:
        _ = (
            DISORDER.read(p, {})
            | "Typed" >> beam.Map(lambda e: e).with_output_types(tuple[str, tuple[int, str, int]])
            | ckpt.TrackOffsets("log", partition=lambda e: e[0], offset=lambda e: e[1][0])
            | beam.Filter(lambda e: False)
            | "Keyed" >> beam.Map(lambda e: (e[1][1], e[1][2])).with_output_types(tuple[str, int])
            | "Subject" >> ckpt.ParDo(CountAndSumFn(), uid="subject")
        )
    boundaries = [store.load_by_id(i).boundary for i in store.list_ids()]
    assert boundaries == [50 * S, 100 * S, None]
    assert store.load_by_id(1).source_offsets["log"].source_type == "custom"


LATE = StreamPlan(
    (
        Arrive(((10 * S, "k", 0), (20 * S, "k", 3))),
        Advance(60 * S),
        Arrive(((70 * S, "k", 6),)),
        Advance(120 * S),
    )
)


def test_what_comes_behind_a_position_is_told_and_the_next_checkpoint_has_it(tmp_path, caplog):
    """The element of 70 s has offset 1 and arrives after that of offset 2 and its checkpoint."""
    swapped = {1: 2, 2: 1}
    steps = []
    for step in Log.of(LATE, True).plan.steps:
        if isinstance(step, Arrive):
            step = Arrive(
                tuple((at, p, (swapped.get(o, o), k, v)) for at, p, (o, k, v) in step.elements)
            )
        steps.append(step)
    log = Log(StreamPlan(tuple(steps)), True)
    store = open_store(tmp_path / "plain")
    run(log, "BundleBasedDirectRunner", store, every=50, until=65)
    assert saved(store, 1) == {"p0": 3}
    assert "came out of order" in caplog.text
    assert saved(store) == {"p0": 1}
    caplog.clear()
    store = open_store(tmp_path / "disorder")
    run(log, "BundleBasedDirectRunner", store, every=50, until=65, disorder=2)
    assert saved(store, 1) == {"p0": 1}
    assert "came out of order" not in caplog.text


def test_the_offsets_of_a_live_source_are_those_of_its_log(tmp_path, prism):
    """An unbounded source on Prism, out of order by up to 40 s; offsets are its positions."""
    rows = [(second * S, ("abc"[second % 3], second % 11)) for second in range(0, 400, 4)]
    arrivals = ReplayLog(rows, displacement=40)
    numbered = [arrivals.row(position) for position in range(arrivals.stop)]
    log = ReplayLog(
        [(at, ("p", (position, *row))) for position, (at, row) in enumerate(numbered)],
        displacement=40,
    )
    assert [log.row(position)[1][1][0] for position in range(log.stop)] == list(range(log.stop))
    assert [at for at, _ in numbered] != sorted(at for at, _ in numbered)
    store = open_store(tmp_path)
    options = PipelineOptions(["--runner=PrismRunner", "--streaming", *prism_options()])
    with (
        beam.Pipeline(options=options) as p,
        Checkpoints(p, store, every=50, keep=100, key_groups=1) as ckpt,
    ):
        _ = (
            p
            | ReadReplay(log)
            | "Typed" >> beam.Map(lambda e: e).with_output_types(tuple[str, tuple[int, str, int]])
            | ckpt.TrackOffsets("log", partition=lambda e: e[0], offset=lambda e: e[1][0])
            | "Keyed" >> beam.Map(lambda e: (e[1][1], e[1][2])).with_output_types(tuple[str, int])
            | ckpt.ParDo(CountAndSumFn(), uid="subject")
        )
    found = {}
    for checkpoint_id in store.list_ids():
        manifest = store.load_by_id(checkpoint_id)
        found[manifest.boundary] = int(manifest.source_offsets["log"].offsets["p"])
    assert set(found) >= {boundary * S for boundary in range(50, 400, 50)}
    for boundary, position in found.items():
        expected = log.stop if boundary is None else log.position(boundary)
        # The first row at or after the boundary; or, where it had not been read yet, a row before
        # it with which the reading goes on.
        assert position <= expected, boundary
        assert all(log.row(between)[0] < boundary for between in range(position, expected))
    assert sum(found[b] == log.position(b) for b in found if b is not None) >= 5
    assert found[max(b for b in found if b is not None)] > 80


def test_elements_in_windows_are_passed_on_in_them(tmp_path):
    store = open_store(tmp_path)
    name = uuid.uuid4().hex
    collected = cuts._COLLECTED[name] = []
    with beam.Pipeline(runner="FnApiRunner") as p, Checkpoints(p, store, until=60) as ckpt:
        passed = (
            DISORDER.read(p, {})
            | "Typed" >> beam.Map(lambda e: e).with_output_types(tuple[str, tuple[int, str, int]])
            | beam.WindowInto(SlidingWindows(60, 30))
            | ckpt.TrackOffsets("log", partition=lambda e: e[0], offset=lambda e: e[1][0])
        )
        _ = passed | beam.ParDo(cuts._CollectFn(name, None))
        _ = (
            passed
            | "Keyed" >> beam.Map(lambda e: (e[1][1], e[1][2])).with_output_types(tuple[str, int])
            | "Global" >> beam.WindowInto(GlobalWindows())
            | "Subject" >> ckpt.ParDo(CountAndSumFn(), uid="subject")
        )
    del cuts._COLLECTED[name]
    windows = SlidingWindows(60, 30)
    assert sorted((o.timestamp, o.value, repr(o.window)) for o in collected) == sorted(
        (at, (partition, row), repr(window))
        for at, partition, row in DISORDER.plan.elements
        for window in windows.assign(WindowFn.AssignContext(Timestamp(micros=at)))
    )
    assert store.load_latest().source_offsets["log"].offsets == {"p0": "1", "p1": "1"}
