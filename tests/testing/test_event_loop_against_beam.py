"""The oracle against plain Beam, where plain Beam's result is defined.

Local runners order timers in ways of their own. They leave no choice to a fold that does not depend
on order, nor to one without timers over sorted input (both in batch), nor, in streaming, where
the watermark stops at every moment at which anything happens and timers of one key do not race.
"""

from __future__ import annotations

import random

import apache_beam as beam
import pytest
from apache_beam import DoFn
from apache_beam.coders import StrUtf8Coder, TupleCoder, VarIntCoder
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms import userstate
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Timestamp

from beam_ckpt.testing.event_loop import Output, canonical, run_event_loop
from beam_ckpt.testing.streams import step_by_step
from beam_ckpt.testing.subjects import MORE_CELLS, ORDER_FREE, ORDERED, TAGS

S = 1_000_000
GOT: list[Output] = []
CODER = TupleCoder((StrUtf8Coder(), VarIntCoder()))


class Keep(DoFn):
    def __init__(self, tag):
        self.tag = tag

    def process(self, value, ts=DoFn.TimestampParam, window=DoFn.WindowParam):
        GOT.append(Output(self.tag, value, ts.micros, window))


def run_plain_beam(fn, source, *options):
    GOT.clear()
    with beam.Pipeline(options=PipelineOptions(list(options))) as p:
        out = (
            p
            | source
            | "Typed" >> beam.Map(lambda x: x).with_output_types(tuple[str, int])
            | "Subject" >> beam.ParDo(fn).with_outputs(*TAGS, main="main")
        )
        out["main"] | "Keep" >> beam.ParDo(Keep(None))
        for tag in TAGS:
            out[tag] | f"Keep {tag}" >> beam.ParDo(Keep(tag))
    return list(GOT)


def on_a_grid(seed, step_s=5, span_s=150, size=40):
    rng = random.Random(seed)
    return [
        (rng.randrange(0, span_s, step_s) * S, rng.choice("abc"), rng.randrange(13))
        for _ in range(size)
    ]


BATCH = {s.name: s for s in ORDER_FREE}
WITHOUT_TIMERS = {
    s.name: s for s in (*ORDERED, *MORE_CELLS) if not userstate.get_dofn_specs(s.fn)[1]
}
STEPPED = {
    s.name: s
    for s in (*ORDER_FREE, *ORDERED, *MORE_CELLS)
    if not s.races and s.name != "History"  # BundleBasedDirectRunner has no ordered lists
}


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("subject", BATCH.values(), ids=BATCH)
def test_folds_free_of_order_give_what_fn_api_runner_gives_in_batch(subject, seed):
    rng = random.Random(seed)
    data = [
        (rng.randrange(-120_000, 400_000) * 1_000, rng.choice(["a", "b", "ä", ""]), n % 13)
        for n in range(60)
    ]
    source = beam.Create(
        [TimestampedValue((key, value), Timestamp(micros=t)) for t, key, value in data]
    ) | "Stamp" >> beam.Map(lambda x: x)
    got = run_plain_beam(subject.fn, source, "--runner=FnApiRunner")
    expected = run_event_loop(subject.fn, data).outputs
    assert len(expected) > 10
    assert canonical(got) == canonical(expected)


@pytest.mark.parametrize("subject", WITHOUT_TIMERS.values(), ids=WITHOUT_TIMERS)
def test_a_fold_without_timers_over_sorted_input_gives_what_fn_api_runner_gives(subject):
    data = sorted(on_a_grid(0), key=lambda e: (e[0], VarIntCoder().encode(e[2])))
    values = [TimestampedValue((key, v), Timestamp(micros=t)) for t, key, v in data]
    source = beam.Create(values, reshuffle=False) | "Stamp" >> beam.Map(lambda x: x)
    got = run_plain_beam(subject.fn, source, "--runner=FnApiRunner")
    expected = run_event_loop(subject.fn, data).outputs
    assert len(expected) > 10
    assert canonical(got) == canonical(expected)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("subject", STEPPED.values(), ids=STEPPED)
def test_a_watermark_that_stops_at_every_moment_leaves_the_strict_order_only(subject, seed):
    data = on_a_grid(seed)
    plan = step_by_step(data, range(-20 * S, 250 * S, 5 * S), VarIntCoder())
    got = run_plain_beam(
        subject.fn,
        plan.to_test_stream(CODER),
        "--runner=BundleBasedDirectRunner",
        "--streaming",
    )
    expected = run_event_loop(subject.fn, data).outputs
    assert len(expected) >= 8
    assert canonical(got) == canonical(expected)
    for key in "abc":  # in the very order, per key and output
        for tag in (None, *TAGS):
            assert [o for o in got if o.tag == tag and o.value[0] == key] == [
                o for o in expected if o.tag == tag and o.value[0] == key
            ]
