"""What comes when: timers of a key, checkpoints after their records, outputs on time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterator

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.window import FixedWindows

from beam_ckpt import open_store
from beam_ckpt.testing import cuts
from beam_ckpt.testing.event_loop import Output, run_event_loop
from beam_ckpt.testing.prism import prism_options
from beam_ckpt.testing.replay import ReadReplay, ReplayLog
from beam_ckpt.testing.streams import Advance, Arrive, StreamPlan
from beam_ckpt.testing.subjects import ConductorFn, RemindersFn, TickerFn
from beam_ckpt.transforms import CheckpointedParDo, Checkpoints

S = 1_000_000
DATA = tuple((at * 7 * S, "abc"[at % 3], at % 11) for at in range(40))


def options_of(engine) -> PipelineOptions:
    streaming = ["--streaming"] if engine.source != "batch" else []
    prism = prism_options() if engine.runner == "PrismRunner" else []
    return PipelineOptions([f"--runner={engine.runner}", *streaming, *prism])


def read(pipeline, engine):
    source = source_of(engine)
    if isinstance(source, StreamPlan):
        live = pipeline | source.to_test_stream()
    elif isinstance(source, ReplayLog):
        live = pipeline | ReadReplay(source)
    else:
        live = pipeline | beam.Create(list(source), reshuffle=False) | beam.Map(cuts._stamp)
    return live | "Typed" >> beam.Map(lambda kv: kv).with_output_types(tuple[str, int])


def source_of(engine, data=DATA):
    """The same data as the engine takes them; a stream whose watermark jumps over much at once."""
    if engine.source == "batch":
        return data
    if engine.source == "live":
        return ReplayLog([(at, (key, value)) for at, key, value in data], displacement=30)
    middle = len(data) // 2
    return StreamPlan(
        (
            Arrive(tuple(reversed(data[:middle]))),
            Advance(data[middle][0] - S),
            Arrive(tuple(reversed(data[middle:]))),
        )
    )


def by_key(outputs: list[Output]) -> dict[str, list[object]]:
    found: dict[str, list[object]] = defaultdict(list)
    for output in outputs:
        found[output.value[0]].append((output.timestamp, output.value))
    return found


@pytest.mark.parametrize("fn", [ConductorFn(), TickerFn()], ids=lambda fn: type(fn).__name__)
def test_timers_of_a_key_fire_in_the_same_order_on_every_runner(engine, fn):
    """In the order in which they come out, not sorted: by time, family and tag."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    run = cuts.run_checkpointed(
        fn, source_of(engine), runner=engine.runner, store=store, time_sorted=True
    )
    assert by_key(run.outputs) == by_key(run_event_loop(fn, DATA).outputs)


# ------------------------------------------------------------------------ published too early?


@contextlib.contextmanager
def busy_machine(processes: int = 2) -> Iterator[None]:
    """Other work for the processor, so that threads and processes are slow when it hurts."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def between(row: tuple[str, str, tuple[int, ...]]) -> tuple[str, int]:
    return row[0], len(row[1]) + sum(row[2])


MIDDLE = [
    (output.timestamp, *between(output.value))
    for output in run_event_loop(RemindersFn(), DATA).outputs
    if output.tag is None
]


def check_no_checkpoint_is_early(engine, every: int) -> int:
    """Every checkpoint of a chain holds all of its cut; returns how many there were."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    with (
        beam.Pipeline(options=options_of(engine)) as p,
        Checkpoints(p, store, every=every, keep=10_000, key_groups=3) as ckpt,
    ):
        first = read(p, engine) | "First" >> ckpt.ParDo(
            RemindersFn(), uid="first", time_sorted=True
        )
        _ = (
            first
            | beam.Map(between).with_output_types(tuple[str, int])
            | "Second" >> ckpt.ParDo(TickerFn(), uid="second", time_sorted=True)
        )
    ids = store.list_ids()
    for checkpoint_id in ids:
        boundary = store.load_by_id(checkpoint_id).boundary
        for uid, fn, data in (("first", RemindersFn(), DATA), ("second", TickerFn(), MIDDLE)):
            expected = run_event_loop(fn, data, until=boundary).state
            saved = cuts.saved_state(store, fn, checkpoint_id=checkpoint_id, uid=uid)
            assert saved == dict(expected), f"{uid}: the checkpoint at {boundary} lacks records"
    return len(ids)


def test_no_checkpoint_is_published_before_its_records_are_in(engine):
    """Under load: in the long test. Here it would slow down all that runs beside it."""
    assert check_no_checkpoint_is_early(engine, every=60) > 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_checkpoint_is_published_before_its_records_are_in_100_times(engine, record_property):
    with busy_machine():
        found = sum(check_no_checkpoint_is_early(engine, every=50 + n) for n in range(20))
    record_property("counts", f"20 runs on {engine}, {found} checkpoints, none early")


# ------------------------------------------------------------------------------------ downstream


def grouped_behind(engine) -> list[Output]:
    """Counts per key and minute behind an operator, in windows, so that what is late is lost."""
    name = uuid.uuid4().hex
    collected = cuts._COLLECTED[name] = []
    store = open_store(f"memory://{uuid.uuid4().hex}")
    with beam.Pipeline(options=options_of(engine)) as p:
        outputs = read(p, engine) | CheckpointedParDo(
            RemindersFn(), uid="reminders", store=store, every=50, time_sorted=True
        )
        windowed = (
            outputs
            | beam.Map(lambda row: (f"{row[0]} {row[1]}", 1)).with_output_types(tuple[str, int])
            | beam.WindowInto(FixedWindows(20))
        )
        combined = windowed | "Combine" >> beam.CombinePerKey(sum)
        grouped = windowed | beam.GroupByKey() | beam.MapTuple(lambda k, ones: (k, len(list(ones))))
        for label, pcoll in (("combined", combined), ("grouped", grouped)):
            _ = pcoll | f"Collect {label}" >> beam.ParDo(cuts._CollectFn(name, label))
    del cuts._COLLECTED[name]
    return collected


def test_a_grouping_in_windows_behind_an_operator_loses_nothing_as_late(engine):
    expected: dict[tuple[str, int], int] = defaultdict(int)
    for output in run_event_loop(RemindersFn(), DATA).outputs:
        if output.tag is None:
            key, what, _ = output.value
            expected[f"{key} {what}", output.timestamp // (20 * S)] += 1
    assert len(expected) > 40
    collected = grouped_behind(engine)
    for label in ("combined", "grouped"):
        found: dict[tuple[str, int], int] = defaultdict(int)
        for output in collected:
            if output.tag == label:
                key, number = output.value
                found[key, output.window.start.micros // (20 * S)] += number
        assert found == expected, label
