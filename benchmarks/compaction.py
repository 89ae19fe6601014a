"""What a long-lived job keeps and writes again: many epochs that touch few of the keys each.

The writer and the committer run without a runner, on a store in memory. After each epoch it is
counted what the store holds: the files that the retained checkpoints list are all there is. The
goals are at most 2.5 times the bytes of one full checkpoint, at most 8 files a key group, and a
manifest whose size does not grow; otherwise the exit status is 1.

    python benchmarks/compaction.py                             1,000 epochs, 1 % of 20,000 keys
    python benchmarks/compaction.py --epochs 200 --touched 0.1
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer
from apache_beam.coders import StrUtf8Coder, VarIntCoder
from apache_beam.transforms.window import GlobalWindows
from rich.console import Console
from rich.table import Table

from beam_ckpt import CheckpointStore, open_store
from beam_ckpt.testing.driven import DrivenCheckpoints
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.snapshot import SnapshotRecord

OPERATOR = OperatorState(
    "totals",
    StrUtf8Coder(),
    GlobalWindows().get_window_coder(),
    tuple(
        CellState(name, "read_modify_write", VarIntCoder()) for name in ("count", "total", "last")
    ),
    False,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Figures:
    """What there is after an epoch.

    Attributes:
        retained: Bytes of state in the store.
        files: Of the key group that has the most.
        manifest: Bytes of the newest one in the store.
        written: Bytes of state written in this epoch.
    """

    retained: int
    files: int
    manifest: int
    written: int


def record(key: int, updated: int, rng: random.Random) -> bytes:
    """The record of a key: numbers that are as hard to compress at the start as at the end."""
    cells = tuple(VarIntCoder().encode(rng.randrange(2**bits)) for bits in (10, 20, 30))
    return SnapshotRecord(b"user-%07d" % key, b"", False, updated, cells, (), ()).to_bytes()


def run(
    store: CheckpointStore,
    keys: int,
    groups: int,
    touched: float,
    epochs: int,
    latest: dict[int, bytes],
) -> Iterator[Figures]:
    """Takes a checkpoint of all keys, then one of each epoch; yields what there is after each.

    Args:
        store: Of its own.
        keys: How many there are.
        groups: How many key groups.
        touched: Part of the keys that an epoch touches, chosen anew each time.
        epochs: How many.
        latest: Is filled with the newest record of each key.
    """
    rng = random.Random(0)
    job = DrivenCheckpoints(store, OPERATOR, groups)
    for epoch in range(epochs + 1):
        count = keys if epoch == 0 else round(keys * touched)
        boundary = (epoch + 1) * 1_000_000
        chosen = rng.sample(range(keys), count)
        records = {key: record(key, boundary - 1, rng) for key in chosen}
        latest.update(records)
        (result,) = job.checkpoint(boundary, [(key % groups, r) for key, r in records.items()])
        newest = store.load_by_id(result.id)
        assert newest is not None
        blobs = store.blobs  # type: ignore[attr-defined]
        manifests = (b for b in blobs.list("manifests/") if b.key.endswith(".json"))
        yield Figures(
            retained=sum(blob.size for blob in blobs.list("state/")),
            files=max(len(p.sidecars) for p in newest.operators["totals"].partitions),
            manifest=max(manifests, key=lambda blob: blob.key).size,
            written=result.size_bytes,
        )


def size_of_full(records: dict[int, bytes], groups: int) -> int:
    """Bytes of one full checkpoint of these records."""
    job = DrivenCheckpoints(_in_memory(), OPERATOR, groups)
    (result,) = job.checkpoint(1_000_000, [(key % groups, r) for key, r in records.items()])
    return result.size_bytes


def _in_memory() -> CheckpointStore:
    return open_store(f"memory://compaction-{uuid.uuid4().hex}")


@app.command()
def main(
    keys: Annotated[int, typer.Option(help="Keys of the operator.")] = 20_000,
    groups: Annotated[int, typer.Option(help="Key groups.")] = 2,
    touched: Annotated[float, typer.Option(help="Part of the keys that an epoch touches.")] = 0.01,
    epochs: Annotated[int, typer.Option(help="Checkpoints after the first.")] = 1000,
) -> None:
    """Prints the greatest figures over all epochs."""
    latest: dict[int, bytes] = {}
    began = time.perf_counter()
    _, *later = run(_in_memory(), keys, groups, touched, epochs, latest)
    took = time.perf_counter() - began
    full = size_of_full(latest, groups)
    delta = min(figures.written for figures in later)
    times = max(figures.retained for figures in later) / full
    files, manifest = max(f.files for f in later), max(f.manifest for f in later)
    table = Table(title=f"{epochs:,} epochs, {touched:.1%} of {keys:,} keys in {groups} groups")
    for column in ("", "found", "goal"):
        table.add_column(column)
    table.add_row("a full checkpoint, bytes", f"{full:,}", "")
    table.add_row("retained by the last 3 checkpoints, at most", f"{times:.2f}x", "2.50x")
    table.add_row("files of a key group, at most", f"{files}", "8")
    table.add_row("manifest, bytes, at most", f"{manifest:,}", f"{600 * (8 * groups + 3):,}")
    amplification = sum(figures.written for figures in later) / delta / epochs
    table.add_row("bytes written / bytes of the deltas alone", f"{amplification:.2f}x", "")
    table.add_row("an epoch, ms", f"{took / (epochs + 1) * 1000:.1f}", "")
    Console().print(table)
    if times > 2.5 or files > 8 or manifest > 600 * (8 * groups + 3):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
