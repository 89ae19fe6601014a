"""How much memory state takes that does not fit into it: peaks of processes that save and restore.

Each row is a process of its own. The steps alone (writer, compaction, restore) are driven without a
runner: records come from a generator, files are on disk, and the peak of each has to stay below 700
MB however much state there is, or the exit status is 1. The pipelines hold all of their state in
memory, as FnApiRunner keeps it there: plain Beam beside the same DoFn restored and checkpointed.

    python benchmarks/memory.py             256 MB of state for the steps, 32 MB in the pipelines
    python benchmarks/memory.py --full      2 GB for the steps, 256 MB in the pipelines
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import apache_beam as beam
import typer
from apache_beam.coders import BytesCoder, StrUtf8Coder
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
from apache_beam.transforms.window import GlobalWindows, TimestampedValue
from rich.console import Console
from rich.table import Table

from beam_ckpt import open_store
from beam_ckpt.testing.driven import DrivenCheckpoints, restored
from beam_ckpt.transforms import CheckpointedParDo
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.snapshot import SnapshotRecord

GROUPS = 16
VALUE_BYTES = 1000
"""Of a key in the steps; in the pipelines ten times as many, as Beam's time goes by the keys."""
LIMIT_MB = 700
SECOND = 1_000_000
OPERATOR = OperatorState(
    "big",
    StrUtf8Coder(),
    GlobalWindows().get_window_coder(),
    (CellState("value", "read_modify_write", BytesCoder()),),
    False,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def value_of(key: int, version: int, size: int = VALUE_BYTES) -> bytes:
    """A value that does not compress."""
    return random.Random(key * 1000 + version).randbytes(size)


class Records:
    """The records of a key group, made when they are read, in no order of their keys."""

    def __init__(self, boundary: int, keys: Iterable[int], version: int) -> None:
        self._boundary, self._keys, self._version = boundary, keys, version

    def read(self) -> Iterator[tuple[int, bytes]]:
        """As a bag of the runner."""
        for key in self._keys:
            name = b"%08x" % (key * 2654435761 % 2**32)
            cells = (value_of(key, self._version),)
            record = SnapshotRecord(name, b"", False, 0, cells, (), ())
            yield self._boundary, record.to_bytes()

    def add(self, item: tuple[int, bytes]) -> None:
        """Nothing has to wait."""
        raise AssertionError("no record waits")

    def clear(self) -> None:
        """They are gone."""
        self._keys = ()


def checkpoint(job: DrivenCheckpoints, boundary: int, keys: int, version: int, step: int) -> None:
    """Takes a checkpoint of every `step`-th key of each group."""
    for group in range(GROUPS):
        chosen = range(group, keys, GROUPS * step)
        job.write_group(group, boundary, Records(boundary, chosen, version))
    job.commit(boundary)


def write(root: Path, keys: int) -> None:
    """A first checkpoint of all keys."""
    checkpoint(DrivenCheckpoints(open_store(root), OPERATOR, GROUPS), SECOND, keys, 0, 1)


def compact(root: Path, keys: int) -> None:
    """A checkpoint of half of the keys, after which every base is written anew."""
    store = open_store(root)
    latest = store.load_latest()
    assert latest is not None
    job = DrivenCheckpoints(store, OPERATOR, GROUPS, base_id=latest.id)
    checkpoint(job, 2 * SECOND, keys, 1, 2)
    latest = store.load_latest()
    assert latest is not None
    kinds = {s.kind for p in latest.operators["big"].partitions for s in p.sidecars}
    assert kinds == {"full"}, kinds


def restore(root: Path, keys: int) -> None:
    """All that a restore hands to the operator."""
    store = open_store(root)
    latest = store.load_latest()
    assert latest is not None
    found = sum(1 for _ in restored(store, OPERATOR, latest))
    assert found == keys, (found, keys)


class KeepFn(beam.DoFn):
    """Keeps a key's last value."""

    VALUE = ReadModifyWriteStateSpec("value", BytesCoder())

    def __init__(self) -> None:
        """Has no settings."""

    def process(self, element: Any, value: Any = beam.DoFn.StateParam(VALUE)) -> Iterator[Any]:
        """Reads and writes."""
        key, data = element
        if value.read() is None and not data:
            yield key
        if data:
            value.write(data)


def _elements(_: Any, keys: int, version: int) -> Iterator[Any]:
    at = 10 + 100 * version
    for key in range(keys):
        data = b"" if version and key % 2 else value_of(key, version, 10 * VALUE_BYTES)
        yield TimestampedValue((f"{key:08x}", data), at)


def _pipeline(keep: beam.PTransform[Any, Any], keys: int, version: int) -> None:
    with beam.Pipeline(runner="FnApiRunner") as p:
        _ = (
            p
            | beam.Impulse()
            | beam.FlatMap(_elements, keys, version).with_output_types(tuple[str, bytes])
            | keep
            | beam.Map(_missing)
        )


def _missing(key: str) -> None:
    raise AssertionError(f"{key} has lost its value")


def plain(root: Path, keys: int) -> None:
    """Plain Beam, with the same state."""
    _pipeline(beam.ParDo(KeepFn()), keys, 0)


def saved(root: Path, keys: int) -> None:
    """The same DoFn with a checkpoint at the end."""
    keep = CheckpointedParDo(KeepFn(), uid="keep", store=str(root), key_groups=GROUPS, until=100)
    _pipeline(keep, keys, 0)


def again(root: Path, keys: int) -> None:
    """Restored, half of the keys changed and the others read, and saved again."""
    keep = CheckpointedParDo(KeepFn(), uid="keep", store=str(root), key_groups=GROUPS, until=200)
    _pipeline(keep, keys, 1)


STEPS = {
    "imports alone": (None, "steps"),
    "writer, first checkpoint": (write, "steps"),
    "writer, half of it changed": (compact, "steps"),
    "restore": (restore, "steps"),
    "pipeline, plain ParDo": (plain, "pipelines"),
    "pipeline, checkpointed": (saved, "pipelines"),
    "pipeline, restored and checkpointed": (again, "pipelines"),
}


@app.command()
def main(
    full: Annotated[bool, typer.Option(help="2 GB in the steps.")] = False,
    megabytes: Annotated[int | None, typer.Option(help="State in the steps.")] = None,
    step: Annotated[str | None, typer.Option(hidden=True)] = None,
    root: Annotated[Path, typer.Option(hidden=True)] = Path(),
    keys: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Prints the peak memory of each step."""
    if step is not None:
        began, run = time.perf_counter(), STEPS[step][0]
        if run is not None:
            run(root, keys)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps([peak, time.perf_counter() - began]))
        return
    sizes = {
        "steps": megabytes or (2048 if full else 256),
        "pipelines": 256 if full else 32,
    }
    table = Table(title=f"peak memory of a process, {GROUPS} key groups")
    for column in ("step", "state, MB", "peak, MB", "goal", "seconds"):
        table.add_column(column, justify="left" if column == "step" else "right")
    over = False
    with tempfile.TemporaryDirectory() as scratch:
        for name, (_, kind) in STEPS.items():
            state = sizes[kind]
            value_bytes = VALUE_BYTES if kind == "steps" else 10 * VALUE_BYTES
            command = [
                sys.executable, __file__, "--step", name, "--root", f"{scratch}/{kind}",
                "--keys", str(state * 1024 * 1024 // value_bytes),
            ]  # fmt: skip
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            peak, seconds = json.loads(out.splitlines()[-1])
            goal = f"{LIMIT_MB}" if kind == "steps" else ""
            over = over or (kind == "steps" and peak > LIMIT_MB)
            size = "" if name == "imports alone" else f"{state:,}"
            table.add_row(name, size, f"{peak:,.0f}", goal, f"{seconds:.0f}")
    Console().print(table)
    if over:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
