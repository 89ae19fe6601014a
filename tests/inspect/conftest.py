"""A store that real pipelines wrote: three runs, three checkpoints, two operators."""

from __future__ import annotations

from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.coders import FastPrimitivesCoder, FloatCoder, StrUtf8Coder, VarIntCoder
from apache_beam.transforms.combiners import MeanCombineFn
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    CombiningValueStateSpec,
    ReadModifyWriteStateSpec,
    SetStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import SlidingWindows, TimestampedValue

from beam_ckpt.transforms import Checkpoints, writer

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
    # Nobody chose coders for these two.
    LAST = ReadModifyWriteStateSpec("last", FastPrimitivesCoder())
    AVERAGE = CombiningValueStateSpec("average", combine_fn=MeanCombineFn())
    FLUSH = TimerSpec("flush", TimeDomain.WATERMARK)

    def process(
        self,
        element,
        ts=beam.DoFn.TimestampParam,
        total=beam.DoFn.StateParam(TOTAL),
        mean=beam.DoFn.StateParam(MEAN),
        recent=beam.DoFn.StateParam(RECENT),
        names=beam.DoFn.StateParam(NAMES),
        last=beam.DoFn.StateParam(LAST),
        average=beam.DoFn.StateParam(AVERAGE),
        flush=beam.DoFn.TimerParam(FLUSH),
    ):
        key, amount = element
        if amount == CLEAR:
            for cell in (total, mean, recent, names, last, average):
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
            last.write((key, amount, None))
            average.add(amount)
            flush.set(ts + 1000)
        yield key, amount

    @on_timer(FLUSH)
    def on_flush(self, recent=beam.DoFn.StateParam(RECENT)):
        recent.clear()


class PairsFn(beam.DoFn):
    SEEN = ReadModifyWriteStateSpec("seen", VarIntCoder())

    def process(self, element, seen=beam.DoFn.StateParam(SEEN)):
        seen.write((seen.read() or 0) + 1)


class PerWindowFn(beam.DoFn):
    SEEN = ReadModifyWriteStateSpec("seen", VarIntCoder())
    LATER = TimerSpec("later", TimeDomain.WATERMARK)

    def process(
        self,
        element,
        window=beam.DoFn.WindowParam,
        seen=beam.DoFn.StateParam(SEEN),
        later=beam.DoFn.TimerParam(LATER),
    ):
        seen.write((seen.read() or 0) + 1)
        later.set(window.end)

    @on_timer(LATER)
    def on_later(self):
        pass


def stamp(event):
    seconds, key, amount = event
    return TimestampedValue((key, amount), seconds)


def by_parity(element):
    _, amount = element
    return "odd" if amount % 2 else "even", amount


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
            events
            | "Parity" >> beam.Map(by_parity).with_output_types(tuple[str, int])
            | beam.WindowInto(SlidingWindows(1000, 500))
            | "PerWindow" >> ckpt.ParDo(PerWindowFn(), uid="per window")
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
    with pytest.MonkeyPatch.context() as patch:
        # As where there is so much that the base is not written anew, nor shared: chains of
        # several files.
        is_shared = writer.WriteSidecarsFn._is_shared
        patch.setattr(writer, "files_to_keep", lambda chain, *_: len(chain))
        patch.setattr(
            writer.WriteSidecarsFn,
            "_is_shared",
            lambda self, kind, size: kind == "delta" and is_shared(self, kind, size),
        )
        for until in CUTS:
            run(store, until)
    return store
