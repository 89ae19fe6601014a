"""`ckpt.wait_for`: no checkpoint before its outputs are in the sink, whatever lies between."""

from __future__ import annotations

import time
import uuid
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.window import FixedWindows

from beam_ckpt import errors, open_store
from beam_ckpt.testing.prism import prism_options
from beam_ckpt.testing.replay import ReadReplay, ReplayLog
from beam_ckpt.testing.streams import Advance, Arrive, StreamPlan
from beam_ckpt.testing.subjects import CountAndSumFn
from beam_ckpt.transforms import Checkpoints

_S = 1_000_000
DATA = tuple((at * _S, "abc"[at % 3], at) for at in range(0, 300, 7))
WRITTEN: dict[str, list[tuple[str, int]]] = {}


class SlowSinkFn(beam.DoFn):
    """Takes its time, most before the end of an epoch; notes the event time of what is written."""

    def __init__(self, name: str) -> None:
        self._name = name

    def process(self, element: Any, timestamp: Any = beam.DoFn.TimestampParam) -> Any:
        time.sleep(1.5 if timestamp.micros // _S in (98, 99) else 0.01)
        WRITTEN[self._name].append(("output", timestamp.micros))
        yield element


def noted(result: Any, name: str) -> None:
    boundary = None if result.boundary is None else result.boundary.micros
    WRITTEN[name].append(("checkpoint", boundary))


def plan() -> StreamPlan:
    steps: list[Any] = []
    for begin in range(0, 300, 50):
        steps.append(Arrive(tuple(e for e in DATA if begin * _S <= e[0] < (begin + 50) * _S)))
        steps.append(Advance((begin + 50) * _S - 1000))
    return StreamPlan(tuple(steps))


def run(runner: str, name: str, *, waits: bool, grouped: bool = False) -> list[tuple[str, Any]]:
    WRITTEN[name] = []
    options = [f"--runner={runner}", "--streaming"]
    source: Any = plan().to_test_stream()
    if runner == "PrismRunner":
        options += prism_options()
        log = ReplayLog([(at, (key, value)) for at, key, value in DATA])
        source = ReadReplay(log, speed=150, hint=tuple[str, int])
    store = open_store(f"memory://{name}")
    with (
        beam.Pipeline(options=PipelineOptions(options)) as p,
        Checkpoints(p, store, every=50, keep=100, key_groups=2) as ckpt,
    ):
        outputs = (
            p
            | source
            | beam.Map(lambda e: e).with_output_types(tuple[str, int])
            | ckpt.ParDo(CountAndSumFn(), uid="subject")
        )
        if grouped:
            outputs = outputs | beam.WindowInto(FixedWindows(50))
            outputs = outputs | beam.Map(lambda e: (e[0], e)) | beam.GroupByKey()
        written = outputs | beam.Reshuffle() | "Sink" >> beam.ParDo(SlowSinkFn(name))
        if waits:
            ckpt.wait_for(written)
        _ = ckpt.results | beam.Map(noted, name)
    return WRITTEN.pop(name)


def early(log: list[tuple[str, Any]]) -> list[int]:
    """Event times of outputs that came to the sink after a checkpoint that covers them."""
    published, found = -1, []
    for kind, at in log:
        if kind == "checkpoint":
            published = 10**15 if at is None else at
        elif at < published:
            found.append(at)
    return found


@pytest.mark.parametrize("runner", ["BundleBasedDirectRunner", "PrismRunner"])
@pytest.mark.parametrize("grouped", [False, True])
def test_what_a_checkpoint_covers_is_in_the_sink_before_it_is_published(runner, grouped, request):
    if runner == "PrismRunner":
        request.getfixturevalue("prism")
    log = run(runner, uuid.uuid4().hex, waits=True, grouped=grouped)
    assert len([at for kind, at in log if kind == "checkpoint"]) >= 6
    assert len([at for kind, at in log if kind == "output"]) >= (15 if grouped else 40)
    assert early(log) == []


def test_it_is_refused_once_the_results_were_taken():
    p = beam.Pipeline()
    ckpt = Checkpoints(p, f"memory://{uuid.uuid4().hex}")
    pcoll = p | beam.Create([("a", 1)]).with_output_types(tuple[str, int])
    outputs = pcoll | ckpt.ParDo(CountAndSumFn(), uid="op")
    assert ckpt.results is not None
    with pytest.raises(errors.PipelineRefusedError, match="take the results last"):
        ckpt.wait_for(outputs)
