"""Kill a history at chosen moments, start it again until it is done, and see what is left.

A history is a chain of pipelines, each `until` the next cut. It runs in processes of its own that
may be killed at any moment; `carry_out` starts one after another until one gets to the end. The
outputs of a pipeline are published under the name of its cut, in one step, after it has finished;
a cut without outputs is run again from the checkpoint before it. So whatever is killed, at most
one checkpoint's work is repeated.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import apache_beam as beam

from beam_ckpt.store import CheckpointStore, open_store
from beam_ckpt.testing.cuts import run_checkpointed
from beam_ckpt.testing.event_loop import Output
from beam_ckpt.testing.faults import FaultPlan, faulty_store
from beam_ckpt.testing.streams import Element, StreamPlan

__all__ = ["Crashes", "History", "carry_out", "outputs_of"]


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
class Crashes:
    """What it took.

    Attributes:
        kills: How many processes died by SIGKILL.
        attempts: How many pipelines were begun for each cut.
    """

    kills: int
    attempts: tuple[int, ...]


def carry_out(history: History, faults: FaultPlan | None = None, *, limit: int = 50) -> Crashes:
    """Runs a history to its end, in one process after another.

    Args:
        history: What to run.
        faults: What happens to its store; counts shared by processes (a directory).
        limit: How many processes at the most.

    Raises:
        RuntimeError: A process failed otherwise than by SIGKILL, or the limit was reached.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    for kills in range(limit):
        process = context.Process(target=_work_through, args=(history, faults))
        process.start()
        process.join()
        if process.exitcode == 0:
            log = Path(history.root, "attempts.log")
            begun = [int(line) for line in log.read_text().split()]
            return Crashes(kills, tuple(begun.count(i) for i in range(len(history.cuts))))
        if process.exitcode != -signal.SIGKILL:
            raise RuntimeError(f"a process of {history.root} ended with {process.exitcode}")
    raise RuntimeError(f"{history.root} did not come to its end in {limit} processes")


def outputs_of(history: History) -> list[Output]:
    """All published outputs."""
    return [
        output
        for index in range(len(history.cuts))
        for output in pickle.loads(history.published(index).read_bytes())
    ]


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
