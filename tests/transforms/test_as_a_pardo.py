"""What `beam.ParDo` does with a DoFn around its elements, `CheckpointedParDo` does too."""

from __future__ import annotations

import traceback
import uuid
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import VarIntCoder
from apache_beam.metrics.metric import Metrics, MetricsFilter
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.display import DisplayData
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec, TimerSpec, on_timer
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from beam_ckpt.testing import cuts
from beam_ckpt.transforms import CheckpointedParDo

COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())
LIFE: list[str] = []


class LivingFn(beam.DoFn):
    """A DoFn with a life: everything that Beam calls, and things that Beam shows."""

    LATER = TimerSpec("later", TimeDomain.WATERMARK)

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.seen = Metrics.counter("author", "seen")

    def display_data(self) -> dict[str, Any]:
        return {"fails": self.fails}

    def setup(self) -> None:
        LIFE.append("setup")

    def start_bundle(self) -> None:
        LIFE.append("start_bundle")

    def finish_bundle(self) -> Any:
        LIFE.append("finish_bundle")
        yield WindowedValue("the bundle is over", Timestamp(5), (GlobalWindow(),))

    def teardown(self) -> None:
        LIFE.append("teardown")


class WithArgumentsFn(LivingFn):
    def process(
        self,
        element: tuple[str, int],
        factor: int,
        count: Any = beam.DoFn.StateParam(COUNT),
        later: Any = beam.DoFn.TimerParam(LivingFn.LATER),
        text: str = "x",
    ) -> Any:
        if self.fails:
            raise KeyError("the author's own")
        self.seen.inc()
        count.write((count.read() or 0) + element[1] * factor)
        later.set(3)
        return [f"{element[0]} {count.read()} {text}", TaggedOutput("odd", element[1])]

    @on_timer(LivingFn.LATER)
    def on_later(self, key: Any = beam.DoFn.KeyParam) -> Any:
        return [f"later {key}"]


@beam.typehints.with_input_types(tuple[str, int])
@beam.typehints.with_output_types(str)
class TypedFn(beam.DoFn):
    def process(self, element: Any, count: Any = beam.DoFn.StateParam(COUNT)) -> Any:
        yield element[0]


def run(transform: Any, label: str, *, options: Any = None) -> tuple[Any, Any]:
    LIFE.clear()
    pipeline = beam.Pipeline(runner="FnApiRunner", options=options)
    pcoll = pipeline | beam.Create([("a", 1), ("b", 2)]).with_output_types(tuple[str, int])
    outputs = pcoll | label >> transform
    return pipeline, outputs


def test_the_life_of_a_dofn_its_arguments_outputs_and_metrics(tmp_path):
    found = {}
    for name, transform in {
        "plain": beam.ParDo(WithArgumentsFn(), 10, text="z"),
        "ours": CheckpointedParDo(WithArgumentsFn(), 10, text="z", uid="op", store=tmp_path),
    }.items():
        pipeline, outputs = run(transform.with_outputs("odd", main="main"), name)
        key = uuid.uuid4().hex
        cuts._COLLECTED[key] = []
        _ = outputs.main | "Keep" >> beam.ParDo(cuts._CollectFn(key, None))
        _ = outputs["odd"] | "KeepOdd" >> beam.ParDo(cuts._CollectFn(key, "odd"))
        result = pipeline.run()
        result.wait_until_finish()
        counters = result.metrics().query(MetricsFilter().with_namespace("author"))["counters"]
        values = sorted((o.tag or "", str(o.value)) for o in cuts._COLLECTED.pop(key))
        # Bundles are the runner's: only that there were some.
        over = [v for v in values if "bundle is over" in v[1]]
        assert over
        found[name] = (
            [v for v in values if v not in over],
            [c.committed for c in counters],
            [LIFE[0], LIFE[-1], set(LIFE)],
        )
    assert found["ours"] == found["plain"]
    assert len(found["ours"][0]) == 6


def test_an_authors_exception_has_the_authors_traceback(tmp_path):
    pipeline, _ = run(
        CheckpointedParDo(WithArgumentsFn(fails=True), 1, uid="op", store=tmp_path), "Fails"
    )
    with pytest.raises(KeyError, match="the author's own") as failed:
        pipeline.run()
    assert "Fails" in str(failed.value)
    frames = traceback.extract_tb(failed.value.__traceback__)
    assert any(f.name == "process" and "raise KeyError" in str(f.line) for f in frames)


def test_type_hints_are_the_authors(tmp_path):
    _, outputs = run(CheckpointedParDo(TypedFn(), uid="op", store=tmp_path), "Typed")
    assert outputs.element_type is str
    longer = CheckpointedParDo(TypedFn(), uid="op", store=tmp_path).with_output_types(Any)
    _, outputs = run(longer, "Told")
    assert outputs.element_type == beam.typehints.Any
    numbers = beam.Pipeline() | beam.Create([(1, 1)]).with_output_types(tuple[int, int])
    with pytest.raises(beam.typehints.decorators.TypeCheckError, match="Input type hint violation"):
        _ = numbers | CheckpointedParDo(TypedFn(), uid="op", store=tmp_path)


def test_resource_hints_and_display_data_are_passed_on(tmp_path):
    transform = CheckpointedParDo(WithArgumentsFn(), 1, uid="op", store=tmp_path)
    pipeline, _ = run(transform.with_resource_hints(min_ram="3GB"), "Hints")
    proto = pipeline.to_runner_api()
    (run_step,) = (
        t
        for t in proto.components.transforms.values()
        if "/Run/" in t.unique_name
        and t.spec.urn == "beam:transform:pardo:v1"
    )  # fmt: skip
    environment = proto.components.environments[run_step.environment_id]
    assert environment.resource_hints == {"beam:resources:min_ram_bytes:v1": b"3000000000"}
    shown = {item.key: item.value for item in DisplayData.create_from(transform).items}
    assert shown["uid"] == "op"
    assert shown["fails"] is False
    assert shown["fn"] is WithArgumentsFn
