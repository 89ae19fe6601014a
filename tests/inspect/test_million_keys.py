"""One key of a million on Cloud Storage: few requests and bytes; and all of them in a stream."""

from __future__ import annotations

import pyarrow as pa
import pytest

from beam_ckpt import CheckpointStore, inspect, open_store
from beam_ckpt.keygroups import key_group
from beam_ckpt.manifest import (
    CellSpec,
    CheckpointManifest,
    OperatorSnapshotEntry,
    OperatorSpec,
    PartitionSnapshotEntry,
    PipelineIdentity,
    RunIdentity,
    new_checkpoint_id,
)
from beam_ckpt.sidecar import CellColumn, SidecarHeader, encode_sidecar, sidecar_schema
from beam_ckpt.testing.fault_proxy import FaultProxy
from beam_ckpt.testing.gcs import GcsBucket, gcs_bucket, gcs_server

__all__ = ["gcs_bucket", "gcs_server"]

KEYS = 1_000_000
KEY_GROUPS = 128
CELL = CellColumn("total", "total", "read_modify_write", "VarIntCoder")
SCHEMA = sidecar_schema(pa.string(), [("total", pa.int64())])


def publish(store: CheckpointStore) -> None:
    """A checkpoint of user-0 to user-999999, each with its number."""
    groups: list[list[int]] = [[] for _ in range(KEY_GROUPS)]
    for number in range(KEYS):
        groups[key_group(b"user-%d" % number, KEY_GROUPS)].append(number)
    partitions = []
    for group, numbers in enumerate(groups):
        rows = sorted((f"user-{number}", number) for number in numbers)
        keys = pa.array([key for key, _ in rows])
        columns = {
            "key": keys,
            "total": pa.array([number for _, number in rows]),
            "_key": keys.cast(pa.binary()),
            "_window": pa.array([b""] * len(rows)),
            "_deleted": pa.array([False] * len(rows)),
            "_updated": pa.array([0] * len(rows)).cast(SCHEMA.field("_updated").type),
        }
        table = pa.table(
            [columns.get(f.name, pa.nulls(len(rows), f.type)) for f in SCHEMA], schema=SCHEMA
        )
        header = SidecarHeader(
            "totals", group, None, "full", "StrUtf8Coder", "GlobalWindowCoder", (CELL,)
        )
        entry = store.write_sidecar(
            operator="totals",
            key_group=group,
            boundary=None,
            run_id="run",
            data=encode_sidecar(table, header),
            kind="full",
            rows=len(rows),
        ).model_copy(update={"epoch": 1})
        partitions.append(PartitionSnapshotEntry(partition_id=group, sidecars=(entry,)))
    spec = OperatorSpec(
        key_coder="StrUtf8Coder",
        window_coder="GlobalWindowCoder",
        cells={"total": CellSpec(kind=CELL.kind, coder=CELL.coder)},
    )
    manifest = CheckpointManifest(
        id=1,
        epoch=1,
        checkpoint_id=new_checkpoint_id(),
        timestamp_ms=1,
        key_group_count=KEY_GROUPS,
        operators={"totals": OperatorSnapshotEntry(partitions=tuple(partitions))},
        run=RunIdentity(generation=store.claim_generation("run"), run_id="run"),
        pipeline=PipelineIdentity(
            operators={"totals": spec}, beam_version="2.77.0", python_version="3.11"
        ),
    )
    store.save(manifest)
    store.finalize(1)


@pytest.mark.slow
def test_one_key_of_a_million_takes_six_requests_and_less_than_two_megabytes(
    gcs_bucket: GcsBucket,
) -> None:
    url = f"{gcs_bucket.url}/ckpt"
    publish(open_store(url, key_group_count=KEY_GROUPS, **gcs_bucket.options))
    with FaultProxy(gcs_bucket.server.url) as proxy:
        options = {**gcs_bucket.options, "endpoint_url": proxy.url}
        table = inspect.state(open_store(url, create=False, **options), "totals", key="user-777777")
        assert table["total"].to_pylist() == [777_777]
        assert len(proxy.requests) <= 6
        # Of the whole store this is little; and the value is not in it by chance.
        assert 10_000 < proxy.bytes_returned < 2_000_000
    store = open_store(url, create=False, **gcs_bucket.options)
    manifest = store.load_latest()
    assert manifest is not None
    assert manifest.total_size_bytes > 8_000_000

    largest = rows = total = held = 0
    before = pa.total_allocated_bytes()
    for part in inspect.state_by_key_group(store, "totals"):
        rows += len(part)
        largest = max(largest, part.nbytes)
        total += part.nbytes
        held = max(held, pa.total_allocated_bytes() - before)
    assert rows == KEYS
    assert largest < total / 50, "one key group at a time"
    assert held < total / 10, "and what was read is let go"
    totals = inspect.duckdb(store).sql("SELECT count(*), sum(total) FROM totals").fetchall()
    assert totals == [(KEYS, KEYS * (KEYS - 1) // 2)]
