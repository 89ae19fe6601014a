"""What comes with an element and cannot be kept: side inputs, and the bundle's finalizer."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import apache_beam as beam
import pytest
from apache_beam.coders import StrUtf8Coder, VarIntCoder
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pvalue import AsDict, AsSingleton
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)

from beam_ckpt import inspect, open_store
from beam_ckpt.errors import PipelineRefusedError
from beam_ckpt.testing import cuts
from beam_ckpt.testing.prism import prism_options
from beam_ckpt.testing.streams import Advance, Arrive, StreamPlan
from beam_ckpt.transforms import CheckpointedParDo

S = 1_000_000
DATA = tuple((S + at * 7 * S, "abcdefgh"[at % 8], at % 11) for at in range(40))
FACTORS = {"a": 2, "b": 3}


class PricedFn(beam.DoFn):
    """Adds up at the prices of a side input; ends a key at a value of 9, and begins it anew."""

    TOTAL = ReadModifyWriteStateSpec("total", VarIntCoder())
    SEEN = BagStateSpec("seen", StrUtf8Coder())
    REPORT = TimerSpec("report", TimeDomain.WATERMARK)

    def process(
        self,
        element,
        factors,
        more,
        at=beam.DoFn.TimestampParam,
        total=beam.DoFn.StateParam(TOTAL),
        seen=beam.DoFn.StateParam(SEEN),
        report=beam.DoFn.TimerParam(REPORT),
    ):
        key, value = element
        if value == 9:
            total.clear()
            seen.clear()
            report.clear()
            return
        total.write((total.read() or 0) + value * factors.get(key, 1) + more)
        seen.add(f"{value}")
        report.set(at + 1_000)
        yield key, total.read()

    @on_timer(REPORT)
    def say(
        self,
        key=beam.DoFn.KeyParam,
        total=beam.DoFn.StateParam(TOTAL),
        seen=beam.DoFn.StateParam(SEEN),
    ):
        yield key, total.read(), *sorted(seen.read())


def memory():
    return open_store(f"memory://{uuid.uuid4().hex}")


def run(fn, data, engine, store, **settings):
    """The outputs of a run with two side inputs, one by position and one by name."""
    name = uuid.uuid4().hex
    collected = cuts._COLLECTED[name] = []
    streaming = ["--streaming"] if engine.source != "batch" else []
    prism = prism_options() if engine.runner == "PrismRunner" else []
    with beam.Pipeline(
        options=PipelineOptions([f"--runner={engine.runner}", *streaming, *prism])
    ) as p:
        factors = p | "Factors" >> beam.Create(list(FACTORS.items()))
        one = p | "One" >> beam.Create([1])
        if isinstance(data, StreamPlan):
            live = p | data.to_test_stream()
        else:
            live = p | beam.Create(list(data), reshuffle=False) | beam.Map(cuts._stamp)
        typed = live | "Typed" >> beam.Map(lambda kv: kv).with_output_types(tuple[str, int])
        _ = (
            typed
            | CheckpointedParDo(
                fn, AsDict(factors), more=AsSingleton(one), uid="priced", store=store, **settings
            )
            | beam.ParDo(cuts._CollectFn(name, None))
        )
    del cuts._COLLECTED[name]
    return sorted((output.timestamp, output.value) for output in collected)


def expected_of(data):
    """The same in plain Python; nobody's timer is due before the end."""
    outputs, totals, seen, last = [], {}, {}, {}
    for at, key, value in sorted(data):
        if value == 9:
            for cells in (totals, seen, last):
                cells.pop(key, None)
            continue
        totals[key] = totals.get(key, 0) + value * FACTORS.get(key, 1) + 1
        seen.setdefault(key, []).append(f"{value}")
        last[key] = at
        outputs.append((at, (key, totals[key])))
    outputs += [
        (at + 1_000 * S, (key, totals[key], *sorted(seen[key]))) for key, at in last.items()
    ]
    return sorted(outputs)


ON = [
    "FnApiRunner-batch",
    "BundleBasedDirectRunner-stream",
    "PrismRunner-stream",
]


def in_order(data, engine):
    """Totals depend on the order within a key, so the source keeps it on every engine."""
    if engine.source == "batch":
        return data
    steps = []
    for element in data:
        steps += [Arrive((element,)), Advance(element[0])]
    return StreamPlan(tuple(steps))


@pytest.mark.parametrize("engine", ON, indirect=True)
def test_side_inputs_are_given_where_no_element_waits(engine):
    assert any(value == 9 for _, _, value in DATA)
    whole = run(PricedFn(), in_order(DATA, engine), engine, memory())
    assert whole == expected_of(DATA)
    store, outputs, begin = memory(), [], 0
    for cut in (100, 150, None):
        end = DATA[-1][0] + 1 if cut is None else cut * S
        part = tuple(element for element in DATA if begin <= element[0] < end)
        outputs += run(PricedFn(), in_order(part, engine), engine, store, until=cut)
        begin = end
    assert sorted(outputs) == whole
    table = inspect.state(store, "priced")
    saved = dict(zip(table["key"].to_pylist(), table["total"].to_pylist(), strict=True))
    # What a key's timer told at the end is what was left of it.
    assert saved == {value[0]: value[1] for _, value in whole if len(value) > 2}


@pytest.mark.parametrize("seed", ["3"])
def test_the_key_coder_is_that_of_the_main_input_whatever_the_order_of_a_set(seed):
    """Beam's own ParDo finds that of a side input with this seed, and with others."""
    build = f"""if True:
        import apache_beam as beam
        from {__name__} import PricedFn, memory
        from beam_ckpt.transforms import CheckpointedParDo
        p = beam.Pipeline(runner="FnApiRunner")
        side = p | "Side" >> beam.Create([("a", 1)])
        more = p | "More" >> beam.Create([1])
        _ = p | beam.Create([("a", 1)]) | CheckpointedParDo(
            PricedFn(), beam.pvalue.AsDict(side), beam.pvalue.AsSingleton(more), uid="priced",
            store=memory())
        p.to_runner_api()"""
    subprocess.run(
        [sys.executable, "-c", build], env={**os.environ, "PYTHONHASHSEED": seed}, check=True
    )


class FinalizedFn(beam.DoFn):
    """Notes which bundles are known to be durable."""

    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())

    def process(
        self,
        element,
        count=beam.DoFn.StateParam(COUNT),
        finalizer=beam.DoFn.BundleFinalizerParam,
    ):
        key, _ = element
        count.write((count.read() or 0) + 1)
        number = count.read()
        finalizer.register(lambda: DURABLE.append((key, number)))
        yield key, number


DURABLE: list[tuple[str, int]] = []


def test_a_bundles_finalizer_is_given_where_no_element_waits():
    DURABLE.clear()
    store, outputs = memory(), []
    for part, until in ((DATA[:10], 71), (DATA[10:], None)):
        outputs += cuts.run_checkpointed(
            FinalizedFn(), part, runner="FnApiRunner", store=store, until=until
        ).outputs
    values = [output.value for output in outputs]
    assert sorted(DURABLE) == sorted(values)
    assert sorted(values) == sorted((key, n) for key in "abcdefgh" for n in range(1, 6))


WAITING = {
    "epochs": ({"every": 60}, "wait for their epoch.*at_least_once"),
    "sorted": ({"time_sorted": True}, "time_sorted=True makes elements wait"),
}


@pytest.mark.parametrize("engine", ON[:1], indirect=True)
@pytest.mark.parametrize("settings", WAITING)
def test_a_side_input_is_refused_where_elements_wait(engine, settings):
    given, message = WAITING[settings]
    with pytest.raises(PipelineRefusedError, match=f"(?s)PricedFn.process gets a side.*{message}"):
        run(PricedFn(), DATA, engine, memory(), **given)


@pytest.mark.parametrize("settings", WAITING)
def test_a_bundles_finalizer_is_refused_where_elements_wait(settings):
    given, message = WAITING[settings]
    with pytest.raises(PipelineRefusedError, match=f"(?s)gets DoFn.BundleFinalizer.*{message}"):
        cuts.run_checkpointed(FinalizedFn(), DATA, runner="FnApiRunner", store=memory(), **given)
