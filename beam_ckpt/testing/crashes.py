"""Kill a history at chosen moments, start it again until it is done, and see what is left.

It runs in processes of its own that may be killed at any moment; `carry_out` starts one after
another until one gets to the end. What a process had started (Prism) dies with it.

* A `History` is a chain of pipelines, each `until` the next cut. The outputs of a pipeline are
  published under the name of its cut, in one step, after it has finished; a cut without outputs is
  run again from the checkpoint before it. So whatever is killed, at most one checkpoint's work is
  repeated.
* A `StreamHistory` is one streaming pipeline over an unbounded source, with checkpoints on the way.
  Each process restores the newest one and starts the source at its boundary. Outputs are written as
  they come and count by (epoch, key): of the processes that wrote any, the last one's.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from beam_ckpt.store import CheckpointStore, open_store
from beam_ckpt.testing.cuts import run_checkpointed
from beam_ckpt.testing.event_loop import Output
from beam_ckpt.testing.faults import FaultPlan, faulty_store
from beam_ckpt.testing.prism import prism_options, stop_prism
from beam_ckpt.testing.replay import ReadReplay, ReplayLog
from beam_ckpt.testing.streams import Element, StreamPlan
from beam_ckpt.transforms import Checkpoints

__all__ = ["Crashes", "History", "StreamHistory", "carry_out", "last_of_each", "outputs_of"]


@dataclass(frozen=True)
class History:
    """A chain of pipelines over the same source; picklable.

    Attributes:
        root: A folder for the checkpoints and the outputs.
        fn: The author's DoFn.
        source: What each pipeline reads; what was applied already is dropped.
        cuts: Boundaries in µs, ascending; `None` at the end drains.
        runner: Name of the runner.
        time_sorted: As in `CheckpointedParDo`.
        key_groups: As in `CheckpointedParDo`.
        max_files_per_group: As in `CheckpointedParDo`.
        tags: Tagged outputs to collect.
    """

    root: str
    fn: beam.DoFn
    source: tuple[Element, ...] | StreamPlan
    cuts: tuple[int | None, ...]
    runner: str = "FnApiRunner"
    time_sorted: bool = True
    key_groups: int = 1
    max_files_per_group: int = 8
    tags: tuple[str, ...] = ()

    @property
    def store(self) -> CheckpointStore:
        """The store of its checkpoints, without faults."""
        return open_store(os.path.join(self.root, "ckpt"))

    def published(self, index: int) -> Path:
        """Where the outputs of the pipeline up to cut `index` go."""
        return Path(self.root, f"outputs-{index}.pickle")


@dataclass(frozen=True)
class StreamHistory:
    """One streaming pipeline on Prism, over a log that ends; picklable.

    Attributes:
        root: A folder for the checkpoints and the outputs.
        fn: The author's DoFn, of (key: str, value: int); its outputs are tuples of a key and more.
        log: What the source reads: (key, value).
        every: Interval of checkpoints, seconds of event time.
        speed: Seconds of event time per second; `None`: as fast as it goes.
        time_sorted: As in `CheckpointedParDo`.
        key_groups: As in `CheckpointedParDo`.
        max_files_per_group: As in `CheckpointedParDo`.
        options: Of the pipeline, beside those that it needs.
    """

    root: str
    fn: beam.DoFn
    log: ReplayLog
    every: float
    speed: float | None = None
    time_sorted: bool = True
    key_groups: int = 1
    max_files_per_group: int = 8
    options: tuple[str, ...] = ()

    @property
    def store(self) -> CheckpointStore:
        """The store of its checkpoints, without faults."""
        return open_store(os.path.join(self.root, "ckpt"))

    def written(self) -> list[Path]:
        """The files that the processes wrote their outputs to, in their order."""
        return sorted(Path(self.root).glob("outputs-*.pickles"))


@dataclass(frozen=True)
class Crashes:
    """What it took.

    Attributes:
        kills: How many processes died by SIGKILL.
        attempts: How many pipelines were begun for each cut (of a stream: in all).
    """

    kills: int
    attempts: tuple[int, ...]


def carry_out(
    history: History | StreamHistory,
    faults: FaultPlan | None = None,
    *,
    kill_after: Iterable[float] = (),
    limit: int = 50,
) -> Crashes:
    """Runs a history to its end, in one process after another.

    Args:
        history: What to run.
        faults: What happens to its store; counts shared by processes (a directory).
        kill_after: Seconds after which the first process is killed, the second, and so on. One that
            has ended by then is not.
        limit: How many processes at the most.

    Raises:
        RuntimeError: A process failed otherwise than by SIGKILL, or the limit was reached.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    moments = iter(kill_after)
    for kills in range(limit):
        process = context.Process(target=_live, args=(history, faults))
        process.start()
        process.join(next(moments, None))
        if process.is_alive():
            process.kill()
            process.join()
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it had started
        if process.exitcode == 0:
            log = Path(history.root, "attempts.log")
            begun = [int(line) for line in log.read_text().split()]
            cuts = len(history.cuts) if isinstance(history, History) else 1
            return Crashes(kills, tuple(begun.count(i) for i in range(cuts)))
        if process.exitcode != -signal.SIGKILL:
            raise RuntimeError(f"a process of {history.root} ended with {process.exitcode}")
    raise RuntimeError(f"{history.root} did not come to its end in {limit} processes")


def outputs_of(history: History | StreamHistory) -> list[Output]:
    """All published outputs; of a stream, those that count."""
    if isinstance(history, StreamHistory):
        return last_of_each(map(_read_outputs, history.written()), history.every)
    return [
        output
        for index in range(len(history.cuts))
        for output in pickle.loads(history.published(index).read_bytes())
    ]


def last_of_each(runs: Iterable[Iterable[Output]], every: float) -> list[Output]:
    """Of what runs wrote, one after the other: by (epoch, key) what the last of them wrote.

    Args:
        runs: The outputs of each; their values are tuples that begin with the key.
        every: Length of an epoch in seconds.
    """
    found: dict[tuple[int, Any], list[Output]] = {}
    for outputs in runs:
        of_run: dict[tuple[int, Any], list[Output]] = {}
        for output in outputs:
            epoch, value = output.timestamp // int(every * 1_000_000), output.value
            assert isinstance(value, tuple)
            of_run.setdefault((epoch, value[0]), []).append(output)
        found.update(of_run)
    return [output for outputs in found.values() for output in outputs]


def _read_outputs(path: Path) -> list[Output]:
    file, found = io.BytesIO(path.read_bytes()), []
    # The last one may have been cut short by the kill.
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            found.append(pickle.load(file))
    return found


def _live(history: History | StreamHistory, faults: FaultPlan | None) -> None:
    """The life of one process."""
    os.setsid()  # a group of its own, with all that it starts
    try:
        if isinstance(history, History):
            _work_through(history, faults)
        else:
            _stream(history, faults)
    finally:
        stop_prism()


class _AppendFn(beam.DoFn):
    """Writes outputs to a file as they come; it is in the stage of the operator, so in its bundle.

    (A sink that a checkpoint did not wait for could lose what was on its way to it.)
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def process(
        self,
        element: Any,
        timestamp: Any = beam.DoFn.TimestampParam,
        window: Any = beam.DoFn.WindowParam,
    ) -> None:
        with open(self._path, "ab", buffering=0) as file:
            file.write(pickle.dumps(Output(None, element, timestamp.micros, window)))


def _stream(history: StreamHistory, faults: FaultPlan | None) -> None:
    store = history.store if faults is None else faulty_store(history.store, faults)
    newest = store.recover_latest_validated().chosen
    if newest is not None and newest.boundary is None:
        return  # the log was read to its end; the process before died after that
    with Path(history.root, "attempts.log").open("a") as log:
        log.write("0\n")
    path = Path(history.root, f"outputs-{len(history.written()):04d}.pickles")
    path.touch()
    options = PipelineOptions(
        ["--runner=PrismRunner", "--streaming", *prism_options(), *history.options]
    )
    with (
        beam.Pipeline(options=options) as p,
        Checkpoints(
            p,
            store,
            every=history.every,
            keep=2,
            key_groups=history.key_groups,
            max_files_per_group=history.max_files_per_group,
        ) as ckpt,
    ):
        source = ReadReplay(
            history.log, start=ckpt.resume_at, speed=history.speed, hint=tuple[str, int]
        )
        _ = (
            p
            | source
            | "Subject" >> ckpt.ParDo(history.fn, uid="subject", time_sorted=history.time_sorted)
            | "Append" >> beam.ParDo(_AppendFn(str(path)))
        )


def _work_through(history: History, faults: FaultPlan | None) -> None:
    store = history.store if faults is None else faulty_store(history.store, faults)
    for index, cut in enumerate(history.cuts):
        if history.published(index).exists():
            continue
        with Path(history.root, "attempts.log").open("a") as log:
            log.write(f"{index}\n")
        run = run_checkpointed(
            history.fn,
            history.source,
            runner=history.runner,
            store=store,
            tags=history.tags,
            until=None if cut is None else cut / 1_000_000,
            restore=_restore_from(history, index),
            keep=2,
            key_groups=history.key_groups,
            max_files_per_group=history.max_files_per_group,
            time_sorted=history.time_sorted,
        )
        staged = Path(history.root, f".outputs-{os.getpid()}")
        staged.write_bytes(pickle.dumps(run.outputs))
        staged.rename(history.published(index))


def _restore_from(history: History, index: int) -> str | int:
    """The checkpoint to run cut `index` from: the latest, or the one before a cut of no outputs."""
    report = history.store.recover_latest_validated()
    if report.chosen is None or report.chosen.boundary != history.cuts[index]:
        return "latest"
    if index == 0:
        return "fresh"
    return _at(history.store, history.cuts[index - 1])


def _at(store: CheckpointStore, boundary: int | None) -> int:
    found: Sequence[int] = [
        checkpoint_id
        for checkpoint_id in store.list_ids()
        if store.final_marker(checkpoint_id) is not None
        and (manifest := store.load_by_id(checkpoint_id)) is not None
        and manifest.boundary == boundary
    ]
    return found[-1]
