"""What checkpoints cost: plain `ParDo` against `CheckpointedParDo`, case by case.

Same data, same DoFn, same runner, one after the other and alternating, each measurement in a
process of its own. Prints the medians of the seconds that the pipeline took (imports and what comes
before the first element are not counted) and of those that this process's processor worked for it,
which other work on the machine disturbs less, with the ratio of each; the peak memory, and the
bytes of the checkpoints. What comes out has to be what the data say, or the exit status is 1.

    python benchmarks/overhead.py                         every case, one measurement of each
    python benchmarks/overhead.py one-cell --repeat 3     one case
    python benchmarks/overhead.py three-cells --keys 100000 --events 1000000 --repeat 3

The cases (`--help` has their sizes; a goal's size where plain Beam does it in a minute):

* one-cell: an int per key, one checkpoint at the drained end of the input.
* three-cells: two ints, a bag and a timer per key, one checkpoint at the end.
* until: an int per key; the second of two runs that `until` divides, restored from the first.
* until-eager: the same, but as runners other than FnApiRunner have it: records come with the
  elements, so that every record is restored as it comes, and elements wait until all have.
* aligned-stream, aligned-prism: ten epochs of a stream in mild disorder (`TestStream`), on
  BundleBasedDirectRunner and on Prism.
* aligned-batch: ten epochs of a bounded input, all of which is buffered first.
* restore: a run that restores keys and has one event, by the key; beside it plain `ParDo` by the
  event, ten events a key.
* fast-state-cache: one-cell, of both with ``--checkpoint_fast_state_cache``. No other case has it.

Much of what is measured is plain Beam: FnApiRunner's state cache measures every value that it takes
in by walking the globals of all modules, a millisecond each time.
"""

from __future__ import annotations

import functools
import json
import logging
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import apache_beam as beam
import typer
from apache_beam.coders import StrUtf8Coder, TupleCoder, VarIntCoder
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import FixedWindows, TimestampedValue
from rich.console import Console
from rich.table import Table

CHUNK = 10_000
EPOCHS = 10
DISORDER = 500
"""Events of a stream that come in any order; the watermark is as far behind."""
SCATTER = 2_654_435_761
"""Knuth's multiplier: neighbouring events go to keys far apart."""
FAST = "--checkpoint_fast_state_cache"
Event = tuple[str, int]


class OneCellFn(beam.DoFn):
    """Counts per key: the smallest stateful DoFn."""

    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())

    def process(self, element: Event, count=beam.DoFn.StateParam(COUNT)) -> Iterator[int]:
        """Adds one."""
        n = (count.read() or 0) + 1
        count.write(n)
        yield n


class ThreeCellsFn(beam.DoFn):
    """A count, a maximum and a bag, and a timer that empties the bag after an hour of silence."""

    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())
    LARGEST = ReadModifyWriteStateSpec("largest", VarIntCoder())
    VALUES = BagStateSpec("values", VarIntCoder())
    SILENCE = TimerSpec("silence", TimeDomain.WATERMARK)

    def process(
        self,
        element: Event,
        at=beam.DoFn.TimestampParam,
        count=beam.DoFn.StateParam(COUNT),
        largest=beam.DoFn.StateParam(LARGEST),
        values=beam.DoFn.StateParam(VALUES),
        silence=beam.DoFn.TimerParam(SILENCE),
    ) -> Iterator[int]:
        """Folds one event into every cell."""
        _, value = element
        count.write((count.read() or 0) + 1)
        largest.write(max(largest.read() or 0, value))
        values.add(value)
        silence.set(at + 3600)
        yield value

    @on_timer(SILENCE)
    def after_silence(self, values=beam.DoFn.StateParam(VALUES)) -> Iterator[int]:
        """Emits what the bag holds."""
        yield sum(values.read())
        values.clear()


@dataclass(frozen=True)
class Case:
    """What one case runs.

    Attributes:
        about: For the table.
        keys: Number of keys by default.
        events: Number of events by default.
        goal: The ratio that is aimed at, or 0 for none.
        fn: The author's DoFn.
        runner: Beam's name of the runner.
        stream: Whether the input is a `TestStream`.
        epochs: Checkpoints by event time, 0 for one at the end.
        divided: Whether the input ends in the middle for a first run, which is not measured.
        restores: Whether the checkpointed side restores all keys and has one event.
        fast: Whether both sides run with `FAST`.
        groups: Number of key groups by default.
        eager: Whether to restore as where records and elements come together.
    """

    about: str
    keys: int
    events: int
    goal: float
    fn: type[beam.DoFn] = OneCellFn
    runner: str = "FnApiRunner"
    stream: bool = False
    epochs: int = 0
    divided: bool = False
    restores: bool = False
    fast: bool = False
    groups: int = 128
    eager: bool = False


class Name(StrEnum):
    """The names of the cases."""

    ONE_CELL = "one-cell"
    THREE_CELLS = "three-cells"
    UNTIL = "until"
    UNTIL_EAGER = "until-eager"
    ALIGNED_STREAM = "aligned-stream"
    ALIGNED_PRISM = "aligned-prism"
    ALIGNED_BATCH = "aligned-batch"
    RESTORE = "restore"
    FAST_STATE_CACHE = "fast-state-cache"


CASES = {
    Name.ONE_CELL: Case("one int cell, one checkpoint at the end", 10_000, 1_000_000, 1.1),
    Name.THREE_CELLS: Case(
        "three cells and a timer, at the end", 10_000, 100_000, 0.5, fn=ThreeCellsFn
    ),
    Name.UNTIL: Case(
        "restored, up to the next `until`", 20_000, 200_000, 1.3, divided=True
    ),
    Name.UNTIL_EAGER: Case(
        "the same, restored eagerly", 20_000, 200_000, 0, divided=True, eager=True
    ),
    Name.ALIGNED_STREAM: Case(
        "aligned stream, 10 epochs", 1_000, 100_000, 1.25,
        runner="BundleBasedDirectRunner", stream=True, epochs=EPOCHS, groups=16,
    ),
    Name.ALIGNED_PRISM: Case(
        "aligned stream, 10 epochs", 1_000, 50_000, 1.25,
        runner="PrismRunner", stream=True, epochs=EPOCHS, groups=16,
    ),
    Name.ALIGNED_BATCH: Case(
        "aligned batch, 10 epochs", 10_000, 200_000, 2.0, epochs=EPOCHS, groups=16
    ),
    Name.RESTORE: Case(
        "restore, by the key; ParDo by the event", 20_000, 200_000, 1.0, restores=True
    ),
    Name.FAST_STATE_CACHE: Case(
        f"one int cell, both with {FAST}", 10_000, 1_000_000, 0, fast=True
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One measurement: what the child process has to know.

    Attributes:
        name: The case.
        keys: Number of keys.
        first: Index of the first event.
        last: Index of the event after the last one.
        checkpointed: Whether `CheckpointedParDo` takes the place of `ParDo`.
        folder: Where the store is, and the result.
        until: The index of the event that is the cut, or 0 for none.
        fast: Whether to run with `FAST`.
        groups: Number of key groups.
    """

    name: Name
    keys: int
    first: int
    last: int
    checkpointed: bool
    folder: str
    until: int = 0
    fast: bool = False
    groups: int = 128


def event(i: int, keys: int) -> Event:
    """The i-th event, which is at i milliseconds."""
    return f"key-{i * SCATTER % keys:08d}", i % 1000


def events(first: int, last: int, keys: int) -> Iterator[TimestampedValue[Event]]:
    """Events, a millisecond apart."""
    for i in range(first, last):
        yield TimestampedValue(event(i, keys), i / 1000)


def stream(run: Run) -> TestStream:
    """All events, in any order within `DISORDER`; then the watermark passes those before."""
    shuffled, moved = random.Random(7), TestStream(TupleCoder((StrUtf8Coder(), VarIntCoder())))
    order = sorted(range(run.first, run.last), key=lambda i: i + shuffled.randrange(DISORDER))
    for start in range(0, len(order), DISORDER):
        part = [TimestampedValue(event(i, run.keys), i / 1000) for i in order[start:][:DISORDER]]
        moved = moved.add_elements(part)
        if start > DISORDER:
            moved = moved.advance_watermark_to((start - DISORDER) / 1000)
    done: TestStream = moved.advance_watermark_to_infinity()
    return done


def write(total: int, path: str) -> None:
    """Leaves the result for the process that started this one."""
    Path(path).write_text(str(total))


def run_pipeline(run: Run) -> dict[str, float]:
    """Runs one pipeline and returns what it took; its result goes to `folder`/result."""
    from beam_ckpt.transforms import CheckpointedParDo
    from beam_ckpt.transforms.fast_state_cache import correct_state_cache

    case = CASES[run.name]
    arguments = [f"--runner={case.runner}"]
    if case.runner == "PrismRunner":
        from beam_ckpt.testing.prism import prism_options

        arguments += prism_options()
    if case.stream:
        arguments.append("--streaming")
    if case.eager:
        mock.patch("beam_ckpt.transforms.checkpoints.reads_in_one_bundle", lambda _: False).start()
    if run.fast and not (correct_state_cache() and run.checkpointed):
        arguments.append(FAST)
    p = beam.Pipeline(options=PipelineOptions(arguments))
    if case.stream:
        keyed = p | "Events" >> stream(run).with_output_types(Event)
    else:
        starts = range(run.first, run.last, CHUNK)
        keyed = (
            p
            | "Chunks" >> beam.Create([(i, min(i + CHUNK, run.last), run.keys) for i in starts])
            | "Events" >> beam.FlatMapTuple(events).with_output_types(Event)
        )
    fn = case.fn()
    step: Any = beam.ParDo(fn)
    if run.checkpointed:
        step = CheckpointedParDo(
            fn,
            uid="bench",
            store=f"{run.folder}/ckpt",
            every=(run.last - run.first) / case.epochs / 1000 if case.epochs else None,
            until=run.until / 1000 if run.until else None,
            key_groups=run.groups,
        )
    (
        keyed
        | "Fold" >> step
        | "All" >> beam.WindowInto(FixedWindows(1_000_000))  # one, of all events
        | "Sum" >> beam.CombineGlobally(sum).without_defaults()
        | "Write" >> beam.Map(functools.partial(write, path=f"{run.folder}/result"))
    )
    begin, begin_cpu = time.perf_counter(), time.process_time()
    p.run().wait_until_finish()
    taken = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - begin_cpu}
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB elsewhere
    return {**taken, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def in_a_process_of_its_own(run: Run) -> dict[str, float]:
    """Measures one pipeline."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(vars(run))],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def expected(run: Run, saved: int) -> int:
    """What the outputs of `run` add up to, after `saved` events of an earlier run."""
    if CASES[run.name].fn is ThreeCellsFn:
        return 2 * sum(event(i, run.keys)[1] for i in range(run.first, run.last))
    counts = Counter(event(i, run.keys)[0] for i in range(saved))
    total = 0
    for i in range(run.first, run.last):
        key = event(i, run.keys)[0]
        counts[key] += 1
        total += counts[key]
    return total


def bytes_below(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure(
    name: Name, keys: int, total: int, groups: int, checkpointed: bool, seed: Path
) -> dict[str, float]:
    """Measures one side of a case; `seed` is a store to start from, if it exists."""
    case = CASES[name]
    first = total // 2 if case.divided else 0
    last = first + 1 if case.restores and checkpointed else total
    saved = 0
    with tempfile.TemporaryDirectory() as folder:
        if checkpointed and seed.exists():
            shutil.copytree(seed, Path(folder, "ckpt"))
            saved = first if case.divided else keys
        until = total if case.divided else 0
        run = Run(name, keys, first, last, checkpointed, folder, until, case.fast, groups)
        before = bytes_below(Path(folder))
        taken = in_a_process_of_its_own(run)
        found, right = int(Path(folder, "result").read_text()), expected(run, saved)
        if found != right:
            raise typer.BadParameter(f"{name}: the outputs add up to {found}, not to {right}")
        taken["written"] = bytes_below(Path(folder)) - before
    return taken


def prepare(name: Name, keys: int, total: int, groups: int, folder: str) -> Path:
    """The store that the measured run restores from; a folder that does not exist for none."""
    case, seed = CASES[name], Path(folder, "ckpt")
    if case.divided or case.restores:
        middle = total // 2 if case.divided else keys
        until = middle if case.divided else 0
        in_a_process_of_its_own(
            Run(name, keys, 0, middle, True, folder, until, fast=True, groups=groups)
        )
    return seed


def row(name: Name, keys: int, total: int, groups: int, repeat: int) -> list[str]:
    """Measures a case and returns its line of the table."""
    case = CASES[name]
    runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        seed = prepare(name, keys, total, groups, folder)
        for _ in range(repeat):
            for checkpointed in runs:
                runs[checkpointed].append(measure(name, keys, total, groups, checkpointed, seed))
    plain, ours = (
        {what: statistics.median(run[what] for run in runs[side]) for what in runs[side][0]}
        for side in (False, True)
    )
    unit = "s"
    if case.restores:  # microseconds by the event and by the key
        unit = "µs"
        for what in ("seconds", "cpu"):
            plain[what] *= 1e6 / total
            ours[what] *= 1e6 / keys
    return [
        name,
        case.about,
        f"{keys:,}",
        f"{total:,}",
        f"{groups}",
        f"{plain['seconds']:.1f} / {ours['seconds']:.1f} {unit}",
        f"{ours['seconds'] / plain['seconds']:.2f}",
        f"{plain['cpu']:.1f} / {ours['cpu']:.1f} {unit}",
        f"{ours['cpu'] / plain['cpu']:.2f}",
        f"{case.goal}" if case.goal else "",
        f"{plain['peak'] / 1e6:.0f} / {ours['peak'] / 1e6:.0f}",
        f"{ours['written'] / 1e6:.1f}",
    ]


def main(
    cases: Annotated[list[Name] | None, typer.Argument(help="Default: all.")] = None,
    keys: Annotated[int, typer.Option(help="In place of the case's number of keys.")] = 0,
    total: Annotated[int, typer.Option("--events", help="In place of the case's.")] = 0,
    groups: Annotated[int, typer.Option("--key-groups", help="In place of the case's.")] = 0,
    repeat: Annotated[int, typer.Option(help="Measurements of each, alternating.", min=1)] = 1,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measures the cases that are named, at their sizes or those given."""
    if child:
        logging.basicConfig(level=logging.ERROR)
        given = json.loads(child)
        print(json.dumps(run_pipeline(Run(**{**given, "name": Name(given["name"])}))))
        return
    console = Console(width=160)
    table = Table(
        *(
            "case",
            "what",
            "keys",
            "events",
            "groups",
            "wall",
            "ratio",
            "processor",
            "ratio",
            "goal",
        ),
        *("peak MB", "MB written"),
        title=f"Beam {version('apache-beam')}, median of {repeat}; ParDo / checkpointed",
    )
    for name in cases or list(Name):
        case = CASES[name]
        sizes = keys or case.keys, total or case.events, groups or case.groups
        table.add_row(*row(name, *sizes, repeat))
        console.print(f"measured: {name}", style="dim")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
