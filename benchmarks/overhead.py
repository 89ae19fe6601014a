"""What a checkpoint costs: plain `ParDo` against `CheckpointedParDo`.

Same data, same DoFn, same runner, one after the other and alternating, each measurement in a
process of its own; one checkpoint, at the end of the bounded input. Prints the medians of the
seconds that the pipeline took (imports are not counted) and of those that the processor worked for
it, which other processes disturb less, with the ratio of each; the peak memory and the size of the
checkpoint. Both sides must come to the same result, or the exit status is 1.

    python benchmarks/overhead.py                                   a few minutes
    python benchmarks/overhead.py --full                            10,000 and 100,000 keys: hours
    python benchmarks/overhead.py --keys 20000 --events 1000000     other sizes

Much of what is measured is plain Beam: FnApiRunner's state cache measures every value that it takes
in by walking the globals of all modules, milliseconds each time.
"""

from __future__ import annotations

import json
import logging
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import apache_beam as beam
import typer
from apache_beam.coders import VarIntCoder
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import TimestampedValue
from rich.console import Console
from rich.table import Table

CHUNK = 10_000
SCATTER = 2_654_435_761
"""Knuth's multiplier: neighbouring events go to keys far apart."""


class OneCellFn(beam.DoFn):
    """Counts per key: the smallest stateful DoFn."""

    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())

    def process(self, element, count=beam.DoFn.StateParam(COUNT)) -> Iterator[int]:
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
        element: tuple[str, int],
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


DOFNS = {1: OneCellFn, 3: ThreeCellsFn}


def events(chunk: int, keys: int, total: int) -> Iterator[TimestampedValue[tuple[str, int]]]:
    """One chunk of the events, a millisecond apart."""
    for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, total)):
        yield TimestampedValue((f"key-{i * SCATTER % keys:08d}", i % 1000), i / 1000)


def run_pipeline(
    checkpointed: bool, cells: int, keys: int, total: int, runner: str, folder: str
) -> dict[str, float]:
    """Runs one pipeline and returns what it took; its result goes to `folder`/result."""
    from beam_ckpt.transforms import CheckpointedParDo

    fn = DOFNS[cells]()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    with beam.Pipeline(options=PipelineOptions([f"--runner={runner}"])) as p:
        keyed = (
            p
            | "Chunks" >> beam.Create([(c, keys, total) for c in range(-(-total // CHUNK))])
            | "Events" >> beam.FlatMapTuple(events).with_output_types(tuple[str, int])
        )
        step = (
            CheckpointedParDo(fn, uid="bench", store=f"{folder}/ckpt")
            if checkpointed
            else beam.ParDo(fn)
        )
        (
            keyed
            | "Fold" >> step
            | "Sum" >> beam.CombineGlobally(sum)
            | "ToText" >> beam.Map(str)
            | "Write" >> beam.io.WriteToText(f"{folder}/result", shard_name_template="")
        )
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB elsewhere
    return {
        "seconds": time.perf_counter() - begin,
        "cpu": time.process_time() - begin_cpu,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }


def measure(
    checkpointed: bool, cells: int, keys: int, total: int, runner: str
) -> dict[str, float | str]:
    """Measures one pipeline in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(cells), str(keys), str(total), runner, folder]
        flag = "--checkpointed" if checkpointed else "--plain"
        done = subprocess.run(
            [sys.executable, __file__, "child", flag, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        sidecars = Path(folder).glob("ckpt/state/**/*.parquet")
        return {
            **json.loads(done.stdout),
            "result": Path(folder, "result").read_text(),
            "checkpoint": sum(file.stat().st_size for file in sidecars),
        }


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(hidden=True)
def child(
    cells: int,
    keys: int,
    total: int,
    runner: str,
    folder: str,
    checkpointed: Annotated[bool, typer.Option("--checkpointed/--plain")] = False,
) -> None:
    """What `measure` starts."""
    logging.basicConfig(level=logging.ERROR)
    print(json.dumps(run_pipeline(checkpointed, cells, keys, total, runner, folder)))


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    keys: Annotated[list[int] | None, typer.Option(help="Numbers of keys.")] = None,
    total: Annotated[int, typer.Option("--events", help="Default: five for each key.")] = 0,
    cells: Annotated[list[int] | None, typer.Option(help="1 or 3 (and a timer).")] = None,
    repeat: Annotated[int, typer.Option(help="Measurements of each, alternating.", min=1)] = 1,
    full: Annotated[bool, typer.Option("--full", help="10,000 and 100,000 keys.")] = False,
    runner: Annotated[str, typer.Option(help="A Beam runner.")] = "FnApiRunner",
) -> None:
    """Measures the default sizes, or those given."""
    if context.invoked_subcommand:
        return
    sizes = [(n, c) for n in keys or (10_000, 100_000) for c in cells or (1, 3)]
    if not (full or keys or cells):
        sizes = [(1_000, 1), (1_000, 3), (10_000, 1)]
    console = Console(width=110)
    table = Table(
        *("keys", "events", "state", "seconds", "ratio", "CPU seconds", "ratio"),
        *("peak MB", "saved MB"),
        title=f"{runner}, Beam {version('apache-beam')}, median of {repeat}; ParDo / checkpointed",
    )
    for n, c in sizes:
        count = total or 5 * n
        runs: dict[bool, list[dict[str, float | str]]] = {False: [], True: []}
        for _ in range(repeat):
            for checkpointed in runs:
                runs[checkpointed].append(measure(checkpointed, c, n, count, runner))
        results = {run["result"] for side in runs.values() for run in side}
        if len(results) != 1:
            console.print(f"[red]results differ: {results}")
            raise typer.Exit(1)
        median = {
            what: [statistics.median(float(run[what]) for run in runs[side]) for side in runs]
            for what in ("seconds", "cpu", "peak")
        }
        plain, saved = zip(*median.values(), strict=True)
        table.add_row(
            f"{n:,}",
            f"{count:,}",
            "one int cell" if c == 1 else "three cells, a timer",
            f"{plain[0]:.1f} / {saved[0]:.1f}",
            f"{saved[0] / plain[0]:.2f}",
            f"{plain[1]:.1f} / {saved[1]:.1f}",
            f"{saved[1] / plain[1]:.2f}",
            f"{plain[2] / 1e6:.0f} / {saved[2] / 1e6:.0f}",
            f"{float(runs[True][-1]['checkpoint']) / 1e6:.1f}",
        )
        console.print(f"measured: {n:,} keys, {c} cells", style="dim")
    console.print(table)


if __name__ == "__main__":
    app()
