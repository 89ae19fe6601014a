"""What typed sidecars cost: encode and decode against pyarrow with the same columns.

    python benchmarks/sidecar.py [--rows 1000000] [--repeat 3]

Rows have a string key, an int cell and a float cell, in random order of keys. Three comparisons,
medians of alternating runs:

* file: `encode_sidecar` and `decode_sidecar` against pyarrow writing and reading the very table;
* records: from the bytes of snapshot records to a file and back, against pyarrow from lists of
  Python values to a file and back (what one would do by hand for these three columns);
* merge: eight deltas of an eighth of the rows each over a full table.

Times are processor seconds of all threads, so that a busy machine does not matter much; wall-clock
seconds of ours are beside them. A ratio is pyarrow's time by ours: above 1 is faster than pyarrow.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam import coders

from beam_ckpt.sidecar import decode_sidecar, encode_sidecar, merge_newest_first
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.snapshot import SnapshotRecord

STATE = OperatorState(
    "totals",
    coders.StrUtf8Coder(),
    coders.coders.GlobalWindowCoder(),
    (
        CellState("count", "read_modify_write", coders.VarIntCoder()),
        CellState("sum", "read_modify_write", coders.FloatCoder()),
    ),
    False,
)


def main() -> None:
    """Runs the comparisons and prints what they took."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()

    random.seed(7)
    keys = [f"user-{n:09d}" for n in random.sample(range(10**9), args.rows)]
    counts = [random.randrange(1, 10**5) for _ in keys]
    sums = [random.random() * 1000 for _ in keys]
    encode_int: Callable[[int], bytes] = coders.VarIntCoder().encode
    encode_float: Callable[[float], bytes] = coders.FloatCoder().encode
    records = [
        SnapshotRecord(
            k.encode(), b"", False, i, (encode_int(c), encode_float(s)), (), ()
        ).to_bytes()
        for i, (k, c, s) in enumerate(zip(keys, counts, sums, strict=True))
    ]
    header = STATE.header(key_group=0, boundary=None, kind="full")
    table = STATE.encoded_to_table(records)
    file = encode_sidecar(table, header)
    rows = pa.table({"key": keys, "count": counts, "sum": sums})
    plain_same = _write(table)
    plain = _write(rows)
    print(
        f"{args.rows:,} rows; sidecar {len(file):,} bytes; pyarrow, three columns, zstd 1: "
        f"{len(plain):,} bytes; default settings: {len(_write_default(rows)):,} bytes\n"
    )
    print(f"{'':34}{'pyarrow s':>10}{'ours s':>10}{'ratio':>8}{'rows/s':>12}{'wall s':>10}")

    def compare(name: str, theirs: Callable[[], object], ours: Callable[[], object]) -> None:
        spent: dict[str, list[float]] = {"theirs": [], "ours": [], "wall": []}
        for _ in range(args.repeat):
            for who, run in (("theirs", theirs), ("ours", ours)):
                gc.collect()
                wall, start = time.perf_counter(), time.process_time()
                run()
                spent[who].append(time.process_time() - start)
            spent["wall"].append(time.perf_counter() - wall)
        a, b, wall = (statistics.median(times) for times in spent.values())
        rate = args.rows / b
        print(f"{name:34}{a:10.3f}{b:10.3f}{a / b:8.2f}{rate:12,.0f}{wall:10.3f}", flush=True)

    compare("file: write", lambda: _write(table), lambda: encode_sidecar(table, header))
    compare("file: read", lambda: _read(plain_same), lambda: decode_sidecar(file, where="memory"))
    compare(
        "records: write",
        lambda: _write(pa.table({"key": keys, "count": counts, "sum": sums})),
        lambda: encode_sidecar(STATE.encoded_to_table(records), header),
    )
    compare(
        "records: read",
        lambda: [column.to_pylist() for column in _read(plain).columns],
        lambda: _consume(STATE.to_encoded(decode_sidecar(file, where="memory")[1])),
    )
    compare(
        "  of it, records to table",
        lambda: pa.table({"key": keys, "count": counts, "sum": sums}),
        lambda: STATE.encoded_to_table(records),
    )
    compare(
        "  of it, table to records",
        lambda: [column.to_pylist() for column in rows.columns],
        lambda: _consume(STATE.to_encoded(table)),
    )
    deltas = [table.take(pa.array(range(i, len(table), 8))) for i in range(8)]
    compare(
        "merge: 8 deltas over a full one",
        lambda: pa.concat_tables([*deltas, table]).sort_by([("_key", "ascending")]),
        lambda: merge_newest_first([*deltas, table]),
    )


def _consume(pairs: Iterator[tuple[bytes, bytes]]) -> None:
    deque(pairs, maxlen=0)


def _write(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", compression_level=1)
    return memoryview(sink.getvalue())


def _write_default(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return memoryview(sink.getvalue())


def _read(data: memoryview) -> pa.Table:
    return pq.read_table(pa.BufferReader(data))


if __name__ == "__main__":
    main()
