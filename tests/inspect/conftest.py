"""A store that real pipelines wrote: three runs, three checkpoints, two operators."""

from __future__ import annotations

from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.coders import FloatCoder, StrUtf8Coder, VarIntCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    SetStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import TimestampedValue

from beam_ckpt.transforms import Checkpoints

KEY_GROUPS = 4
CLEAR = -1

EVENTS = (
    (10, "ada", 1),
    (20, "bob", 2),
    (30, "eve", 3),
    # from 100 on: the second run
    (110, "ada", 10),
    (120, "bob", CLEAR),
    (130, "joe", 4),
    # from 200 on: the third; it touches eve and leaves her as she is
    (210, "eve", 0),
)
CUTS = (100, 200, 300)


class TotalsFn(beam.DoFn):
    TOTAL = ReadModifyWriteStateSpec("total", VarIntCoder())
    MEAN = ReadModifyWriteStateSpec("mean", FloatCoder())
    RECENT = BagStateSpec("recent", VarIntCoder())
    NAMES = SetStateSpec("names", StrUtf8Coder())
    FLUSH = TimerSpec("flush", TimeDomain.WATERMARK)

    def process(
        self,
        element,
        ts=beam.DoFn.TimestampParam,
        total=beam.DoFn.StateParam(TOTAL),
        mean=beam.DoFn.StateParam(MEAN),
        recent=beam.DoFn.StateParam(RECENT),
        names=beam.DoFn.StateParam(NAMES),
        flush=beam.DoFn.TimerParam(FLUSH),
    ):
        key, amount = element
        if amount == CLEAR:
            for cell in (total, mean, recent, names):
                cell.clear()
            flush.clear()
            return
        if not amount:
            total.write(total.read())
        else:
            total.write((total.read() or 0) + amount)
            mean.write(float("nan") if key == "eve" else total.read() / 2)
            recent.add(amount)
            names.add(key.upper())
            flush.set(ts + 1000)
        yield key, amount

    @on_timer(FLUSH)
    def on_flush(self, recent=beam.DoFn.StateParam(RECENT)):
        recent.clear()


class PairsFn(beam.DoFn):
    SEEN = ReadModifyWriteStateSpec("seen", VarIntCoder())

    def process(self, element, seen=beam.DoFn.StateParam(SEEN)):
        seen.write((seen.read() or 0) + 1)


def stamp(event):
    seconds, key, amount = event
    return TimestampedValue((key, amount), seconds)


def by_pair(element):
    key, amount = element
    return (key, amount % 2), amount


def run(store: Path, until: int) -> None:
    with (
        beam.Pipeline(runner="FnApiRunner") as pipeline,
        Checkpoints(pipeline, store, until=until, key_groups=KEY_GROUPS, keep=10) as ckpt,
    ):
        events = pipeline | beam.Create(EVENTS, reshuffle=False) | "Stamp" >> beam.Map(stamp)
        totals = (
            events
            | "Typed" >> beam.Map(lambda e: e).with_output_types(tuple[str, int])
            | "Totals" >> ckpt.ParDo(TotalsFn(), uid="totals")
        )
        _ = (
            totals
            | "Pairs" >> beam.Map(by_pair).with_output_types(tuple[tuple[str, int], int])
            | "Count" >> ckpt.ParDo(PairsFn(), uid="pairs")
        )


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store. Do not change it: copy it."""
    store = tmp_path_factory.mktemp("inspected") / "ckpt"
    for until in CUTS:
        run(store, until)
    return store
