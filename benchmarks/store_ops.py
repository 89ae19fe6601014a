"""What a store on Cloud Storage costs in requests: commit, load, list, recover, prune.

A real fake-gcs-server behind a proxy that counts; each number is a count of HTTP requests, so it
is the same on every machine. A commit of g non-empty key groups must cost at most g + 4 writes
and a number of reads that does not depend on g; loading the latest checkpoint at most 3 requests;
listing ids and epochs a request per thousand objects, and so does a prune that finds nothing to
delete, beside a constant. The first prune of a process that deletes also reads each manifest
once: a file goes with the last checkpoint that lists it, which only the manifests can tell.
Every later one costs a request per hundred deleted objects and a constant. Otherwise the exit
status is 1.

    python benchmarks/store_ops.py                          the default sizes
    python benchmarks/store_ops.py --groups 64 --checkpoints 20
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from beam_ckpt import CheckpointStore, KeepLast, open_store
from beam_ckpt.manifest import (
    CheckpointManifest,
    OperatorSnapshotEntry,
    PartitionSnapshotEntry,
    RunIdentity,
    new_checkpoint_id,
)
from beam_ckpt.testing.fault_proxy import FaultProxy
from beam_ckpt.testing.gcs import GcsServer, run_gcs_server

KINDS = ("write", "read", "head", "list", "batch", "delete", "bucket")
SIDECAR = b"x" * 10_000
RUN_ID = "store-ops"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def commit(store: CheckpointStore, id: int, groups: int, generation: int) -> CheckpointManifest:
    """Writes the sidecars of a checkpoint, its manifest, and publishes it, as a run does."""
    partitions = []
    for group in range(groups):
        entry = store.write_sidecar(
            operator="totals",
            key_group=group,
            boundary=id * 1_000_000,
            run_id=RUN_ID,
            data=SIDECAR,
            kind="full",
            rows=1,
        ).model_copy(update={"epoch": id})
        partitions.append(PartitionSnapshotEntry(partition_id=group, sidecars=(entry,)))
    manifest = CheckpointManifest(
        checkpoint_id=new_checkpoint_id(),
        epoch=id,
        id=id,
        timestamp_ms=int(time.time() * 1000),
        watermark=id * 1_000_000,
        operators={"totals": OperatorSnapshotEntry(partitions=tuple(partitions))},
        key_group_count=max(groups, 1),
        run=RunIdentity(generation=generation, run_id=RUN_ID),
    )
    store.save(manifest)
    return store.finalize(id)


class Counting:
    """Rows of requests by kind."""

    def __init__(self, proxy: FaultProxy) -> None:
        """Counts at a proxy."""
        self.proxy = proxy
        self.failures: list[str] = []
        self.table = Table(title="requests to Cloud Storage")
        self.table.add_column("operation")
        for kind in KINDS:
            self.table.add_column(kind, justify="right")
        self.table.add_column("total", justify="right")

    def row(self, name: str, operation: Callable[[], object]) -> dict[str, int]:
        """Carries out an operation and adds what it cost."""
        self.proxy.reset()
        operation()
        counts = {kind: self.proxy.counts().get(kind, 0) for kind in KINDS}
        counts["total"] = len(self.proxy.requests)
        self.table.add_row(name, *(str(counts[kind] or "") for kind in (*KINDS, "total")))
        return counts

    def expect(self, holds: bool, claim: str) -> None:
        """Notes a claim that does not hold."""
        if not holds:
            self.failures.append(claim)


def measure(counting: Counting, server: GcsServer, groups: int, checkpoints: int) -> int:
    """Measures one size; returns the reads of a commit, which no size may change."""
    bucket = server.create_bucket()
    options = bucket.options
    options["endpoint_url"] = counting.proxy.url

    def fresh() -> CheckpointStore:
        return open_store(f"{bucket.url}/ckpt", **options)

    store = fresh()
    generation = store.claim_generation(RUN_ID)
    counting.row(f"g={groups}: first commit", lambda: commit(store, 1, groups, generation))
    steady = counting.row("commit", lambda: commit(store, 2, groups, generation))
    counting.expect(
        steady["write"] <= groups + 4, f"g={groups}: a commit costs {steady['write']} writes"
    )
    for id in range(3, checkpoints + 1):
        commit(store, id, groups, generation)

    def load_latest() -> None:
        latest = fresh().load_latest()
        assert latest is not None and latest.id == checkpoints

    latest = counting.row("load_latest", load_latest)
    counting.expect(latest["total"] <= 3, f"g={groups}: load_latest costs {latest['total']}")
    ids = counting.row(f"list_ids of {checkpoints}", lambda: fresh().list_ids())
    pages = -(-2 * checkpoints // 1000)
    counting.expect(ids["total"] <= pages, f"g={groups}: list_ids costs {ids['total']}")
    listed = counting.row(f"list of {checkpoints}", lambda: fresh().list())
    counting.expect(listed["total"] <= pages, f"g={groups}: list costs {listed['total']}")
    counting.row("recover, metadata", lambda: fresh().recover_latest_validated(deep=False))
    counting.row("recover, deep", lambda: fresh().recover_latest_validated())
    idle = counting.row("prune 0", lambda: fresh().prune(KeepLast(checkpoints)))
    counting.expect(idle["total"] <= pages + 4, f"g={groups}: a prune of 0 costs {idle['total']}")
    first = counting.row(
        "prune 1, the first of a process", lambda: store.prune(KeepLast(checkpoints - 1))
    )
    counting.expect(
        first["total"] <= checkpoints + pages + 16,
        f"g={groups}: the first prune costs {first['total']} requests",
    )
    doomed = checkpoints - 2
    pruned = counting.row(f"prune {doomed}", lambda: store.prune(KeepLast(1)))
    batches = 2 * -(-doomed // 100) + -(-doomed * groups // 100) + 3
    counting.expect(
        pruned["batch"] + pruned["delete"] <= batches,
        f"g={groups}: a prune of {doomed} deletes in {pruned['batch'] + pruned['delete']} requests",
    )
    counting.expect(
        pruned["total"] - pruned["batch"] - pruned["delete"] <= 16,
        f"g={groups}: a prune of {doomed} costs {pruned['total']} requests",
    )
    counting.table.add_section()
    return steady["read"] + steady["head"] + steady["list"] + steady["bucket"]


@app.command()
def main(
    groups: Annotated[list[int] | None, typer.Option(help="Non-empty key groups.")] = None,
    checkpoints: Annotated[int, typer.Option(help="To list and prune.", min=3)] = 30,
) -> None:
    """Counts the requests of a store on Cloud Storage."""
    with run_gcs_server() as server, FaultProxy(server.url) as proxy:
        counting = Counting(proxy)
        sizes = groups or [1, 16, 128]
        reads = {g: measure(counting, server, g, checkpoints) for g in sizes}
    counting.expect(len(set(reads.values())) == 1, f"a commit's reads depend on g: {reads}")
    console = Console(width=100)
    console.print(counting.table)
    for failure in counting.failures:
        console.print(f"[red]too many:[/] {failure}")
    if counting.failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
