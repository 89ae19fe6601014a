"""The same work here and elsewhere: what checkpoints add to it, and the bytes they write.

A count, a sum and the last value by string key: without checkpoints, with ten, with one at the
end; then the run goes on from its checkpoint with events of one key in a hundred. Printed are the
seconds of each (starting the engine is not counted), the ratio to the run without checkpoints, the
bytes that the checkpoint of all keys takes on disk, those that the run of a hundredth of the keys
added, and the peak memory of the Python process (a JVM's is not in it).

    pip install -e '.[bench]'
    python benchmarks/peers.py                                          200,000 events, 20,000 keys
    python benchmarks/peers.py --events 1000000 --keys 100000 --repeat 3
    python benchmarks/peers.py ours bytewax
    python benchmarks/peers.py ours pyspark --bytes --events 1000000 --keys 100000

Ours is on FnApiRunner, with the three cells an author would write. Bytewax snapshots when an epoch
ends, by wall time: for ten, a tenth of what its run without took. PySpark (with a JVM) counts as a
stream of one batch or ten with its state store's checkpoint, against a batch query. An engine that
is not installed is named and left out. PyFlink is not here: it needs a version of apache-beam that
cannot be installed beside ours.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

SCATTER = 2_654_435_761
"""Knuth's multiplier: neighbouring events go to keys far apart."""
CHUNK = 10_000


class Engine(StrEnum):
    """What does the work."""

    OURS = "ours"
    BYTEWAX = "bytewax"
    PYSPARK = "pyspark"


PACKAGES = {Engine.OURS: "apache-beam", Engine.BYTEWAX: "bytewax", Engine.PYSPARK: "pyspark"}


def event(i: int, keys: int) -> tuple[str, int]:
    """The i-th event."""
    return f"key-{i * SCATTER % keys:08d}", i % 1000


def timed(work: Callable[[], int]) -> dict[str, float]:
    """Runs `work`, which returns how many events it saw."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    seen = work()
    return {
        "seconds": time.perf_counter() - begin,
        "cpu": time.process_time() - begin_cpu,
        "seen": seen,
    }


# ---------------------------------------------------------------------- ours
def run_ours(keys: int, first: int, last: int, checkpoints: int, folder: str) -> dict[str, float]:
    """Beam's FnApiRunner; without checkpoints a plain `ParDo`."""
    import apache_beam as beam
    from apache_beam.coders import VarIntCoder
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
    from apache_beam.transforms.window import TimestampedValue

    from beam_ckpt.transforms import CheckpointedParDo

    class FoldFn(beam.DoFn):
        """A count, a sum and the last value."""

        COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())
        SUM = ReadModifyWriteStateSpec("sum", VarIntCoder())
        LAST = ReadModifyWriteStateSpec("last", VarIntCoder())

        def process(
            self,
            element: tuple[str, int],
            count=beam.DoFn.StateParam(COUNT),
            total=beam.DoFn.StateParam(SUM),
            newest=beam.DoFn.StateParam(LAST),
        ) -> Iterator[int]:
            """Folds one event."""
            _, value = element
            count.write((count.read() or 0) + 1)
            total.write((total.read() or 0) + value)
            newest.write(value)
            yield 1

    def chunk(start: int) -> Iterator[TimestampedValue[tuple[str, int]]]:
        for i in range(start, min(start + CHUNK, last)):
            yield TimestampedValue(event(i, keys), i / 1000)

    def write(count: int) -> None:
        Path(folder, "seen").write_text(str(count))

    def work() -> int:
        step: Any = beam.ParDo(FoldFn())
        if checkpoints:
            every = (last - first) / checkpoints / 1000 if checkpoints > 1 else None
            step = CheckpointedParDo(FoldFn(), uid="fold", store=f"{folder}/state", every=every)
        with beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner"])) as p:
            (
                p
                | beam.Create(range(first, last, CHUNK))
                | beam.FlatMap(chunk).with_output_types(tuple[str, int])
                | "Fold" >> step
                | beam.CombineGlobally(sum)
                | beam.Map(write)
            )
        return int(Path(folder, "seen").read_text())

    return timed(work)


# ---------------------------------------------------------------------- Bytewax
def run_bytewax(
    keys: int, first: int, last: int, checkpoints: int, folder: str, without: float
) -> dict[str, float]:
    """Bytewax, one worker in this process; `without` is what its run without checkpoints took."""
    import bytewax.operators as op
    from bytewax.dataflow import Dataflow
    from bytewax.recovery import RecoveryConfig, init_db_dir
    from bytewax.testing import run_main

    source, sink = _bytewax_ends(keys, first, last)

    def fold(
        state: tuple[int, int, int] | None, value: int
    ) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        count, total, _ = state or (0, 0, 0)
        new = (count + 1, total + value, value)
        return new, new

    flow = Dataflow("fold")
    events = op.input("events", flow, source)
    op.output("count", op.stateful_map("fold", events, fold), sink)
    recovery = None
    if checkpoints:
        state = Path(folder, "state")
        if not state.exists():
            state.mkdir()
            init_db_dir(state, 1)
        recovery = RecoveryConfig(state)
    interval = timedelta(hours=1)
    if checkpoints > 1:
        interval = timedelta(seconds=without / checkpoints)

    def work() -> int:
        run_main(flow, epoch_interval=interval, recovery_config=recovery)
        return int(sink.seen)

    return timed(work)


def _bytewax_ends(keys: int, first: int, last: int) -> tuple[Any, Any]:
    from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
    from bytewax.outputs import DynamicSink, StatelessSinkPartition

    class Part(StatefulSourcePartition[tuple[str, int], int]):  # type: ignore[misc]
        def __init__(self, resume: int | None) -> None:
            # A run that goes on has data of its own, so a position of before says nothing.
            self.at = first if resume is None or resume <= first or resume >= last else resume

        def next_batch(self) -> list[tuple[str, int]]:
            if self.at >= last:
                raise StopIteration
            start, self.at = self.at, min(self.at + 100, last)
            return [event(i, keys) for i in range(start, self.at)]

        def snapshot(self) -> int:
            return self.at

    class Source(FixedPartitionedSource[tuple[str, int], int]):  # type: ignore[misc]
        def list_parts(self) -> list[str]:
            return ["all"]

        def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> Part:
            return Part(resume_state)

    class CountingPart(StatelessSinkPartition[Any]):  # type: ignore[misc]
        def __init__(self, owner: Sink) -> None:
            self.owner = owner

        def write_batch(self, items: list[Any]) -> None:
            self.owner.seen += len(items)

    class Sink(DynamicSink[Any]):  # type: ignore[misc]
        seen = 0

        def build(self, step_id: str, worker_index: int, worker_count: int) -> CountingPart:
            return CountingPart(self)

    return Source(), Sink()


# ---------------------------------------------------------------------- PySpark
def run_pyspark(
    keys: int, first: int, last: int, checkpoints: int, folder: str
) -> dict[str, float]:
    """PySpark on two cores: a batch query, or a stream of as many batches as checkpoints."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as f

    source = Path(folder, "source")
    source.mkdir(exist_ok=True)
    parts = max(checkpoints, 1)
    for part in range(parts):
        span = range(
            first + (last - first) * part // parts, first + (last - first) * (part + 1) // parts
        )
        rows = [event(i, keys) for i in span]
        columns = {"key": [k for k, _ in rows], "value": [v for _, v in rows], "at": list(span)}
        pq.write_table(pa.table(columns), source / f"{first:012d}-{part:03d}.parquet")
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.streaming.minBatchesToRetain", "100")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    newest = f.max(f.struct("at", "value"))

    def folded(frame: Any) -> Any:
        fold = [f.count("value").alias("count"), f.sum("value").alias("sum"), newest.alias("last")]
        return frame.groupBy("key").agg(*fold)

    schema = "key string, value long, at long"
    spark.range(1000).groupBy((f.col("id") % 10).alias("k")).count().collect()  # is it warm
    seen = 0

    def work() -> int:
        nonlocal seen
        if not checkpoints:
            counts = folded(spark.read.schema(schema).parquet(str(source)))
            counts.write.format("noop").mode("overwrite").save()
            return last - first
        stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
        query = (
            folded(stream.parquet(str(source)))
            .writeStream.outputMode("update")
            .format("noop")
            .option("checkpointLocation", f"{folder}/state")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return sum(int(p["numInputRows"]) for p in query.recentProgress)

    taken = timed(work)
    spark.stop()
    return taken


# ---------------------------------------------------------------------- measuring
def child(given: dict[str, Any]) -> dict[str, float]:
    """Runs one engine in this process."""
    logging.basicConfig(level=logging.ERROR)
    engine = Engine(given.pop("engine"))
    without = given.pop("without")
    if engine is Engine.OURS:
        taken = run_ours(**given)
    elif engine is Engine.BYTEWAX:
        taken = run_bytewax(**given, without=without)
    else:
        taken = run_pyspark(**given)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB elsewhere
    taken["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return taken


def bytes_below(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def run(
    engine: Engine, keys: int, first: int, last: int, checkpoints: int, folder: str, without: float
) -> dict[str, float]:
    """One run in a process of its own; `written` is what its state directory gained."""
    given = dict(
        engine=engine, keys=keys, first=first, last=last, checkpoints=checkpoints, folder=folder,
        without=without,
    )  # fmt: skip
    state = Path(folder, "state")
    before = bytes_below(state) if state.exists() else 0
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(given)],
        stdout=subprocess.PIPE,
        stderr=None if os.environ.get("PEERS_VERBOSE") else subprocess.DEVNULL,
        text=True,
        check=True,
    )
    taken: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if taken["seen"] != last - first:
        raise typer.BadParameter(f"{engine} saw {taken['seen']} events of {last - first}")
    return {**taken, "written": (bytes_below(state) if state.exists() else 0) - before}


def measure(engine: Engine, keys: int, total: int, repeat: int, bytes_only: bool) -> list[str]:
    """The lines of one engine, alternating between no checkpoints, ten and one."""
    runs: dict[int, list[dict[str, float]]] = {n: [] for n in ([1] if bytes_only else [0, 10, 1])}
    touched: dict[str, float] = {}
    without = 1.0
    for _ in range(repeat):
        for checkpoints, measured in runs.items():
            with tempfile.TemporaryDirectory() as folder:
                measured.append(run(engine, keys, 0, total, checkpoints, folder, without))
                if checkpoints == 1 and not touched:
                    shutil.rmtree(Path(folder, "source"), ignore_errors=True)
                    # Consecutive events have keys of their own.
                    few = max(keys // 100, 1)
                    touched = run(engine, keys, total, total + few, 1, folder, without)
            if not bytes_only:
                without = statistics.median(r["seconds"] for r in runs[0])
    seconds = {n: statistics.median(r["seconds"] for r in runs[n]) for n in runs}
    peaks = [statistics.median(r["peak"] for r in runs[n]) / 1e6 for n in runs]
    times = ["", "", f"{seconds[1]:.1f}"]
    if not bytes_only:
        plain, ten, one = seconds.values()
        times = [f"{plain:.1f}", *(f"{taken:.1f}  {taken / plain:.2f}x" for taken in (ten, one))]
    return [
        engine,
        version(PACKAGES[engine]),
        *times,
        f"{runs[1][-1]['written'] / 1e3:,.0f}",
        f"{touched['written'] / 1e3:,.1f}",
        " / ".join(f"{peak:.0f}" for peak in peaks),
    ]


def main(
    engines: Annotated[list[Engine] | None, typer.Argument(help="Default: all.")] = None,
    total: Annotated[int, typer.Option("--events")] = 200_000,
    keys: Annotated[int, typer.Option()] = 20_000,
    repeat: Annotated[int, typer.Option(help="Runs of each, alternating.", min=1)] = 1,
    bytes_only: Annotated[
        bool, typer.Option("--bytes", help="Only what the checkpoints write: no run without any.")
    ] = False,
    given: Annotated[str, typer.Option("--child", hidden=True)] = "",
) -> None:
    """Measures the engines that are installed."""
    if given:
        print(json.dumps(child(json.loads(given))))
        return
    console = Console(width=130)
    table = Table(
        *("engine", "version", "without, s", "ten", "one at the end"),
        *("all keys, kB", "1 % of them, kB", "peak MB"),
        title=f"{total:,} events, {keys:,} keys; median of {repeat}",
    )
    for engine in engines or list(Engine):
        package = PACKAGES[engine]
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            console.print(f"left out: {engine} is not installed (pip install {package})")
            continue
        table.add_row(*measure(engine, keys, total, repeat, bytes_only))
        console.print(f"measured: {engine}", style="dim")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
