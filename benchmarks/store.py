"""What the store costs on local files: create, recover, and bulk sidecars.

* create: one small sidecar, the manifest, its marker and the pointer, each durable (fsync of
  file and directory) before the next. recover: a newly opened store finds the newest of the last
  five checkpoints, hashes every byte of it and hands out its state. Beside them the figures that
  LaminarDB published for its checkpoint store, on a machine of its own: 3.96 ms and 1.39 ms.
* bulk: 64 MB in 16 sidecars, against `cp` and `sync` of files with the same bytes, alternating.

Prints median and 99th percentile of each.

    python benchmarks/store.py                              a minute
    python benchmarks/store.py --rounds 1000 --where /mnt/disk
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from beam_ckpt import CheckpointStore, KeepLast, open_store
from beam_ckpt.manifest import (
    CheckpointManifest,
    OperatorSnapshotEntry,
    PartitionSnapshotEntry,
    new_checkpoint_id,
)
from beam_ckpt.store import StateChunk

MB = 1_000_000
PUBLISHED_MS = {"create": 3.96, "recover": 1.39}
FILES = 16


def manifest(id: int) -> CheckpointManifest:
    """A manifest that is finalized when it is saved."""
    return CheckpointManifest(
        checkpoint_id=new_checkpoint_id(),
        id=id,
        epoch=id,
        timestamp_ms=time.time_ns() // MB,
        durable_phase="finalized",
    )


def create(store: CheckpointStore, id: int) -> None:
    """Publishes a checkpoint with a kilobyte of state."""
    store.save_with_state(manifest(id), [StateChunk("totals", 0, os.urandom(1000))])


def recover(root: Path) -> None:
    """Finds, validates and reads the newest checkpoint with a newly opened store."""
    store = open_store(root)
    chosen = store.recover_latest_validated().chosen
    if chosen is None or not list(store.load_state_data(chosen.id) or ()):
        raise AssertionError("nothing was recovered")


def write_sidecars(root: Path, pieces: list[bytes]) -> None:
    """Publishes a checkpoint of large sidecars."""
    store = open_store(root, key_group_count=FILES)
    entries = [
        store.write_sidecar(
            operator="totals",
            key_group=group,
            boundary=1,
            run_id="bench",
            data=piece,
            kind="full",
            rows=1,
        )
        for group, piece in enumerate(pieces)
    ]
    partitions = tuple(
        PartitionSnapshotEntry(partition_id=g, sidecars=(e,)) for g, e in enumerate(entries)
    )
    operators = {"totals": OperatorSnapshotEntry(partitions=partitions)}
    fields = dict(manifest(1)) | {"operators": operators, "key_group_count": FILES}
    store.save(CheckpointManifest(**fields))


def copy_files(source: Path, target: Path) -> None:
    """The yardstick: `cp` of the same bytes, and `sync` of the copies and their directory."""
    target.mkdir()
    names = sorted(p.name for p in source.iterdir())
    subprocess.run(["cp", *(str(source / n) for n in names), str(target)], check=True)
    subprocess.run(["sync", *(str(target / n) for n in names), str(target)], check=True)


def timed(act: Callable[[], None]) -> float:
    """Seconds that it took."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def row(name: str, seconds: list[float], beside: str) -> tuple[str, str, str, str]:
    """Median and 99th percentile in milliseconds."""
    ordered = sorted(seconds)
    late = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return name, f"{statistics.median(ordered) * 1e3:.2f}", f"{late * 1e3:.2f}", beside


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Checkpoints to create and recover.")] = 300,
    bulk_rounds: Annotated[int, typer.Option(min=1, help="Times to write 64 MB.")] = 7,
    where: Annotated[
        Path | None, typer.Option(help="Directory on the file system to measure.")
    ] = None,
) -> None:
    """Measures and prints."""
    with tempfile.TemporaryDirectory(dir=where) as directory:
        root = Path(directory)
        store = open_store(root / "small")
        create(store, 1)
        creating = [timed(lambda i=i: create(store, i)) for i in range(2, rounds + 2)]  # type: ignore[misc]
        store.prune(KeepLast(5))
        recovering = [timed(lambda: recover(root / "small")) for _ in range(rounds)]
        pieces = [os.urandom(64 * MB // FILES) for _ in range(FILES)]
        (root / "source").mkdir()
        for n, piece in enumerate(pieces):
            (root / "source" / str(n)).write_bytes(piece)
        writing, copying = [], []
        for _ in range(bulk_rounds):
            copying.append(timed(lambda: copy_files(root / "source", root / "copied")))
            shutil.rmtree(root / "copied")
            writing.append(timed(lambda: write_sidecars(root / "bulk", pieces)))
            shutil.rmtree(root / "bulk")
    table = Table("", "median ms", "99 % ms", "beside it")
    table.add_row(
        *row("create, 1 kB of state", creating, f"{PUBLISHED_MS['create']} ms, LaminarDB")
    )
    table.add_row(*row("recover it, deep", recovering, f"{PUBLISHED_MS['recover']} ms, LaminarDB"))
    ratio = statistics.median(writing) / statistics.median(copying)
    table.add_row(*row("64 MB in 16 sidecars", writing, f"{ratio:.2f} times cp and sync"))
    table.add_row(*row("64 MB by cp and sync", copying, ""))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
