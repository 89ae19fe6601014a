"""Two operators under one `Checkpoints`: one manifest, and cuts that are exact for both."""

from __future__ import annotations

import uuid

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from beam_ckpt import open_store
from beam_ckpt.testing import cuts
from beam_ckpt.testing.event_loop import Output, canonical, run_event_loop
from beam_ckpt.testing.prism import prism_options
from beam_ckpt.testing.replay import ReadReplay, ReplayLog
from beam_ckpt.testing.streams import Advance, Arrive, StreamPlan
from beam_ckpt.testing.subjects import DelayChainFn, RemindersFn
from beam_ckpt.transforms import Checkpoints

DATA = tuple((s * 3_000_000 + s % 7 * 1000, "abcd"[s % 4], s % 9) for s in range(90))
CUTS = (70_000_000, 165_000_000, None)


def between(row: tuple[str, str, tuple[int, ...]]) -> tuple[str, int]:
    key, what, values = row
    return key, len(what) + sum(values)


def plan() -> StreamPlan:
    steps: list[Arrive | Advance] = []
    for start in range(0, len(DATA), 15):
        steps.append(Arrive(tuple(reversed(DATA[start : start + 15]))))
        if start + 15 < len(DATA):
            steps.append(Advance(DATA[start + 15][0] - 2_000_000))
    return StreamPlan(tuple(steps))


def run_chain(engine, store, until: float | None) -> list[Output]:
    """Reminders, which dates outputs into the future, then a chain that depends on order."""
    name = uuid.uuid4().hex
    collected = cuts._COLLECTED[name] = []
    arguments = [
        f"--runner={engine.runner}",
        *(["--streaming"] if engine.source != "batch" else []),
    ]
    if engine.runner == "PrismRunner":
        arguments += prism_options()
    options = PipelineOptions(arguments)
    with (
        beam.Pipeline(options=options) as p,
        Checkpoints(p, store, until=until, key_groups=4) as ckpt,
    ):
        if engine.source == "batch":
            live = p | beam.Create(DATA) | beam.Map(cuts._stamp)
        elif engine.source == "stream":
            live = p | plan().to_test_stream()
        else:
            rows = [(at, (key, value)) for at, key, value in DATA]
            live = p | ReadReplay(ReplayLog(rows, displacement=30))
        first = (
            live
            | beam.Map(lambda kv: kv).with_output_types(tuple[str, int])
            | "First" >> ckpt.ParDo(RemindersFn(), uid="first", time_sorted=True)
        )
        _ = (
            first
            | beam.Map(between).with_output_types(tuple[str, int])
            | "Second" >> ckpt.ParDo(DelayChainFn(), uid="second", time_sorted=True)
            | beam.ParDo(cuts._CollectFn(name, None))
        )
        results = ckpt.results
        assert results is not None
    del cuts._COLLECTED[name]
    return collected


@pytest.mark.parametrize(
    "engine",
    [
        "FnApiRunner-batch",
        "BundleBasedDirectRunner-stream",
        "PrismRunner-live",
        pytest.param("PrismRunner-batch", marks=pytest.mark.slow),
        pytest.param("PrismRunner-stream", marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_two_operators_share_one_exact_checkpoint(engine):
    store = open_store(f"memory://{uuid.uuid4().hex}")
    middle = [
        (output.timestamp, *between(output.value))
        for output in run_event_loop(RemindersFn(), DATA).outputs
        if output.tag is None
    ]
    whole = [o for o in run_event_loop(DelayChainFn(), middle).outputs if o.tag is None]
    parts: list[Output] = []
    for number, cut in enumerate(CUTS, start=1):
        parts += run_chain(engine, store, None if cut is None else cut / 1_000_000)
        manifest = store.load_latest()
        assert manifest.id == number
        assert manifest.boundary == cut
        assert set(manifest.operators) == {"first", "second"}
        expected = run_event_loop(DelayChainFn(), middle, until=cut)
        assert cuts.saved_state(store, DelayChainFn(), uid="second") == dict(expected.state)
    assert whole
    assert canonical(parts) == canonical(whole)
