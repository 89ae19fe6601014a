"""A year of flights, live: an unbounded stream on Prism, killed by SIGKILL and started again.

The pipeline of `samples/flights.py`, which keeps state per aircraft, now as a streaming job. An
unbounded source replays the year at some days per second, each departure up to six hours late, so
that the stream is out of order. Every so many hours of event time the job takes a checkpoint. It is
killed by SIGKILL at moments spread over the year; the next process restores the newest checkpoint
and starts the source at its boundary. In the end its outputs and its state are compared with those
of one batch run (on FnApiRunner) that never stopped: the same rows, or exit status 1.

    python samples/flights_stream.py

**Prism** is Beam's local runner for streams. It is built with Go the first time, which takes
minutes. Without Go, set `BEAM_CKPT_PRISM` to the path of a binary; Apache Beam's releases on GitHub
have them.

**Why the outputs are exactly once.** An output belongs to the epoch that its time is in, from one
boundary to the next. A process that is killed has written outputs of epochs whose checkpoint was
not published; its successor, which starts at a boundary, writes all of these again. So each process
writes a file of its own, and of each (epoch, aircraft) a reader takes what the last process wrote
that wrote any: as in a sink that overwrites the partition of an epoch and a key. The file is
written in the bundle in which the operator works, before the checkpoint that covers it can be
published; to a sink behind another shuffle, outputs may still be on their way when the kill comes.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import apache_beam as beam
import flights
import typer
from apache_beam.options.pipeline_options import PipelineOptions
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from beam_ckpt import open_store
from beam_ckpt.testing.prism import PrismNotFoundError, prism_binary, prism_options, stop_prism
from beam_ckpt.testing.replay import ReadReplay, ReplayLog, Row
from beam_ckpt.transforms import Checkpoints

LATE_BY = timedelta(hours=6)
"""How late a departure may come."""
DAY = timedelta(days=1).total_seconds()
console = flights.console


@dataclass(frozen=True)
class Stream:
    """One streaming job, over all of its processes.

    `every` is the interval of its checkpoints in seconds, `speed` that of the source in days per
    second.
    """

    folder: str
    data: str
    every: int
    speed: float
    seed: int

    @property
    def store(self) -> str:
        """Where its checkpoints are."""
        return str(Path(self.folder, "ckpt"))

    @property
    def files(self) -> list[Path]:
        """What its processes wrote, in their order."""
        return sorted(Path(self.folder).glob("reports-*.jsonl"))


# --- the pipeline -----------------------------------------------------------------------------


def read_rows(path: str) -> list[Row]:
    """All flights: (event time in µs, (aircraft, flight))."""
    read = flights.read_flights(path, flights.YEAR[0], flights.END, 0)
    return [(row.timestamp.micros, row.value) for row in read]


class AppendFn(beam.DoFn):
    """Writes reports to a file, each in one step."""

    def __init__(self, path: str) -> None:
        self._path = path

    def process(self, element: flights.Report) -> None:
        """Appends one line."""
        with open(self._path, "ab", buffering=0) as file:
            file.write(flights.to_json(element).encode() + b"\n")


def run_stream(job: Stream) -> None:
    """One process of the job: from the newest checkpoint to the year's end, or to its own."""
    newest = open_store(job.store).recover_latest_validated().chosen
    if newest is not None and newest.boundary is None:
        return  # all was read; the process before died after that
    path = Path(job.folder, f"reports-{len(job.files):03d}.jsonl")
    path.touch()
    log = ReplayLog(functools.partial(read_rows, job.data), LATE_BY.total_seconds(), seed=job.seed)
    options = PipelineOptions(["--runner=PrismRunner", "--streaming", *prism_options()])
    with (
        beam.Pipeline(options=options) as p,
        Checkpoints(p, job.store, every=job.every, keep=3, key_groups=4) as ckpt,
    ):
        source = ReadReplay(
            log, start=ckpt.resume_at, speed=job.speed * DAY, hint=tuple[str, flights.Flight]
        )
        _ = (
            p
            | "Flights" >> source
            | "Chain" >> ckpt.ParDo(flights.ChainFn(), uid=flights.UID, time_sorted=True)
            | "Append" >> beam.ParDo(AppendFn(str(path)))
        )


# --- its processes, and how they die ----------------------------------------------------------


def newest_boundary(job: Stream) -> datetime | None:
    """The boundary of the newest checkpoint; None without one."""
    latest = open_store(job.store).load_latest()
    if latest is None:
        return None
    if latest.boundary is None:
        return flights.END
    return datetime.fromtimestamp(latest.boundary / 1e6, UTC)


def carry_out(job: Stream, kills: int, progress: Progress) -> int:
    """Starts process after process until the year is over; returns how many were killed.

    One is killed a random while after the newest checkpoint has passed the next of `kills` moments
    that are spread over the year.
    """
    start, rng = flights.YEAR[0], random.Random(job.seed)
    due = [start + (flights.YEAR[-1] - start) * (i + 1) / (kills + 1) for i in range(kills)]
    bar = progress.add_task("stream", total=(flights.END - start).days)
    killed = 0
    while True:
        log_path = Path(job.folder, "child.log")
        with log_path.open("w") as log:
            command = [sys.executable, __file__, "child", json.dumps(asdict(job))]
            # In a group of its own, so that its Prism dies with it.
            child = subprocess.Popen(command, stderr=log, start_new_session=True)
            try:
                while child.poll() is None:
                    boundary = newest_boundary(job)
                    progress.update(bar, completed=((boundary or start) - start).days)
                    if boundary is not None and due and boundary >= due[0]:
                        time.sleep(rng.uniform(0, 0.5))
                        os.killpg(child.pid, signal.SIGKILL)
                        child.wait()
                        due = [at for at in due if at > boundary]
                        killed += 1
                        progress.console.print(f"killed after {boundary:%Y-%m-%d} ({killed})")
                    time.sleep(0.1)
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
        if child.returncode == 0:
            progress.update(bar, completed=(flights.END - start).days)
            return killed
        if child.returncode != -signal.SIGKILL:
            raise flights.ChildFailed(f"stream: exit status {child.returncode}", log_path)


# --- the proof --------------------------------------------------------------------------------


def reports_of(job: Stream) -> Counter[str]:
    """By epoch and aircraft the lines of the last process that wrote any."""
    found: dict[tuple[int, str], list[str]] = {}
    for path in job.files:
        of_process: dict[tuple[int, str], list[str]] = {}
        for line in whole_lines(path):
            report = json.loads(line)
            at = datetime.fromisoformat(report["at"])
            epoch = int(at.timestamp()) // job.every
            of_process.setdefault((epoch, report["aircraft"]), []).append(line)
        found.update(of_process)
    return Counter(line for lines in found.values() for line in lines)


def whole_lines(path: Path) -> Iterator[str]:
    """The lines of a file but for one that a kill cut short."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield line[:-1]


def differences(reference: flights.Job, job: Stream) -> list[str]:
    """What one has and the other has not: outputs, then state."""
    found: list[str] = []
    for what, here, there in (
        ("output", flights.outputs_of(reference), reports_of(job)),
        ("state", flights.state_in(reference.store), flights.state_in(job.store)),
    ):
        found += [f"{what} only in batch: {row}" for row in (here - there).elements()]
        found += [f"{what} only in stream: {row}" for row in (there - here).elements()]
    return found


# --- the command ------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def main_command(
    context: typer.Context,
    number: Annotated[int, typer.Option("--flights", help="How many.", min=1)] = 2_000,
    every: Annotated[int, typer.Option(help="Hours of event time between checkpoints.")] = 168,
    speed: Annotated[float, typer.Option(help="Days of event time per second.")] = 12.0,
    kills: Annotated[int, typer.Option(help="How often to kill it.", min=0)] = 3,
    seed: Annotated[int, typer.Option(help="Draws aircraft, disorder and moments.")] = 1,
    work: Annotated[Path, typer.Option(help="Folder for data, outputs and stores.")] = Path(
        "flights-work"
    ),
) -> None:
    """Runs the batch and the stream, kills the stream, compares them."""
    if context.invoked_subcommand is not None:
        return
    try:
        prism_binary()
    except PrismNotFoundError as error:
        console.print(f"[red]{error}")
        raise typer.Exit(2) from error
    folder = work.resolve() / "stream"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    data = folder / "flights.parquet"
    console.print(f"{flights.prepare(data, number, seed):,} flights in {data}")
    batch = flights.Job(
        name="batch",
        folder=folder / "batch",
        store=str(folder / "batch" / "ckpt"),
        data=data,
        cuts=(flights.YEAR[0], flights.END),
        runner="FnApiRunner",
        seed=seed,
    )
    job = Stream(str(folder), str(data), every * 3600, speed, seed)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        killed = carry_out(job, kills, progress)
        flights.carry_out(batch, [], progress)
    table = Table("job", "kills", "outputs", "aircraft in the state")
    for name, times, outputs, store in (
        ("batch", 0, flights.outputs_of(batch), batch.store),
        ("stream", killed, reports_of(job), job.store),
    ):
        table.add_row(
            name, str(times), f"{outputs.total():,}", f"{flights.state_in(store).total():,}"
        )
    console.print(table)
    if killed < kills:
        console.print(f"[red]only {killed} of {kills} kills came in time")
        raise typer.Exit(1)
    found = differences(batch, job)
    for line in found[:10]:
        console.print(line, markup=False)
    if found:
        console.print(f"[red]batch and stream differ in {len(found)} rows")
        raise typer.Exit(1)
    console.print("[green]stream: the same outputs and the same state as batch")
    console.print("look at the state with:")
    console.print(f"  beam-ckpt state {job.store} {flights.UID} --limit 5", soft_wrap=True)


@app.command(hidden=True)
def child(job: str) -> None:
    """What the command starts."""
    try:
        run_stream(Stream(**json.loads(job)))
    finally:
        stop_prism()


if __name__ == "__main__":
    flights.run_app(app)
