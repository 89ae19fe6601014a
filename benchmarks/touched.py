"""The bytes of a checkpoint in which one key in a hundred was touched, beside pyarrow's.

A count, a sum and the last value of each key. All keys are saved once, then an epoch touches a
hundredth of them. Beside it is what pyarrow writes of the same rows (key, count, sum and last) as
Parquet, compressed in the same way: as one file, and as one file for each key group, which is how
they can be read by key group again.

    python benchmarks/touched.py
    python benchmarks/touched.py --keys 1000000 --key-groups 16
"""

from __future__ import annotations

import random
import uuid
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from apache_beam.coders import StrUtf8Coder, VarIntCoder
from apache_beam.transforms.window import GlobalWindows
from rich.console import Console
from rich.table import Table

from beam_ckpt import CheckpointStore, open_store
from beam_ckpt.keygroups import key_group
from beam_ckpt.testing.driven import DrivenCheckpoints
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.snapshot import SnapshotRecord

CELLS = ("count", "sum", "last")
OPERATOR = OperatorState(
    "totals",
    StrUtf8Coder(),
    GlobalWindows().get_window_coder(),
    tuple(CellState(name, "read_modify_write", VarIntCoder()) for name in CELLS),
    False,
)
Row = tuple[str, int, int, int]


def record(row: Row) -> bytes:
    """The row as an operator gives it to the writer."""
    key, *values = row
    cells = tuple(VarIntCoder().encode(value) for value in values)
    return SnapshotRecord(key.encode(), b"", False, 0, cells, (), ()).to_bytes()


def by_pyarrow(rows: list[Row]) -> int:
    """Bytes of one Parquet file of these rows, sorted by key."""
    columns = list(zip(*sorted(rows), strict=True))
    table = pa.table(dict(zip(("key", *CELLS), map(list, columns), strict=True)))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", compression_level=1)
    return int(sink.getvalue().size)


def stored_size(store: CheckpointStore, id: int) -> int:
    """Bytes of a manifest in the store."""
    (size,) = (
        blob.size
        for blob in store.blobs.list("manifests/")  # type: ignore[attr-defined]
        if blob.key.endswith(f"{id:012d}.json")
    )
    return int(size)


def main(
    keys: Annotated[int, typer.Option()] = 100_000,
    groups: Annotated[int, typer.Option("--key-groups")] = 128,
    part: Annotated[float, typer.Option(help="Of the keys, touched.")] = 0.01,
) -> None:
    """Prints the bytes of both checkpoints."""
    rng = random.Random(3)

    def row(key: int) -> Row:
        return f"key-{key:08d}", rng.randrange(100), rng.randrange(100_000), rng.randrange(1000)

    def group(row: Row) -> int:
        return key_group(row[0].encode(), groups)

    store = open_store(f"memory://touched-{uuid.uuid4().hex}")
    job = DrivenCheckpoints(store, OPERATOR, groups)
    table = Table(
        *("rows", "ours: state", "and manifest", "pyarrow: one file", "a file a group"),
        *("state / one file", "all of ours / one file"),
        title=f"bytes; {keys:,} keys in {groups} groups, then {part:.0%} of them",
    )
    few = rng.sample(range(keys), max(round(keys * part), 1))
    for boundary, chosen in ((1_000_000, list(range(keys))), (2_000_000, few)):
        rows = [row(key) for key in chosen]
        (result,) = job.checkpoint(boundary, [(group(r), record(r)) for r in rows])
        manifest, one = stored_size(store, result.id), by_pyarrow(rows)
        divided: dict[int, list[Row]] = {}
        for r in rows:
            divided.setdefault(group(r), []).append(r)
        files = sum(map(by_pyarrow, divided.values()))
        table.add_row(
            f"{len(rows):,}",
            f"{result.size_bytes:,}",
            f"{manifest:,}",
            f"{one:,}",
            f"{files:,}",
            f"{result.size_bytes / one:.2f}",
            f"{(result.size_bytes + manifest) / one:.2f}",
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    typer.run(main)
