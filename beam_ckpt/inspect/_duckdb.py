"""State in SQL: a DuckDB connection with a view of each operator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from beam_ckpt.errors import CheckpointError
from beam_ckpt.inspect._catalog import AnyStore, At, find_checkpoint, find_operator, open_existing
from beam_ckpt.inspect._readable import Reading, Untyped, readable_rows
from beam_ckpt.inspect._schemas import Schema
from beam_ckpt.inspect._state import read_group
from beam_ckpt.manifest import CheckpointManifest, PartitionSnapshotEntry
from beam_ckpt.sidecar import SharedRows
from beam_ckpt.store import CheckpointStore

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["StateView", "duckdb", "views"]


def duckdb(
    store: AnyStore,
    *,
    at: At = "latest",
    untyped: Untyped = "bytes",
    unsafe_unpickle: bool = False,
    schemas: Iterable[Schema] = (),
) -> DuckDBPyConnection:
    """Returns a DuckDB connection, in memory, in which each operator is a view of its name.

    A query reads the operators that it names, key group by key group, from wherever the store is;
    nothing is kept. Before that one key group of each operator is read for its columns, which are
    those of `state`.

    Args:
        store: A path, a URL or a store.
        at: The id of a checkpoint; `latest` is the newest valid one.
        untyped: See `state`; what is ``"json"`` is text for DuckDB's JSON functions.
        unsafe_unpickle: See `state`.
        schemas: See `state`.

    Raises:
        ImportError: DuckDB is not installed: ``pip install 'beam-ckpt[sql]'``.
        CheckpointNotFoundError: There is no store, or no such checkpoint.
        NoValidCheckpointError: `latest`, and all checkpoints are damaged.

    A damaged sidecar raises `duckdb.Error` when it is read, with the message of ours in it.
    """
    try:
        import duckdb as engine
    except ImportError as error:
        raise ImportError(
            "DuckDB is not installed. What to do: pip install 'beam-ckpt[sql]'"
        ) from error
    connection = engine.connect()
    reading = Reading.of(untyped, unsafe_unpickle, schemas)
    for uid, view in views(store, at=at, reading=reading).items():
        connection.register(uid, view)
    return connection


def views(
    store: AnyStore, *, at: At = "latest", reading: Reading | None = None
) -> dict[str, StateView]:
    """Returns each operator of a checkpoint as something that DuckDB can read again and again."""
    opened = open_existing(store)
    manifest = find_checkpoint(opened, at)
    known = manifest.pipeline.operators if manifest.pipeline else {}
    return {
        uid: StateView(opened, manifest, uid, reading)
        for uid in sorted({*manifest.operators, *known})
    }


class StateView:
    """One operator's state as a stream of Arrow batches, read when somebody asks.

    The protocol is Arrow's PyCapsule interface: DuckDB, polars and pyarrow take it.

    Attributes:
        failure: What the last reading failed with; those who read through the interface see it
            only as a text.
    """

    def __init__(
        self,
        store: CheckpointStore,
        manifest: CheckpointManifest,
        uid: str,
        reading: Reading | None = None,
    ) -> None:
        """Takes an operator of a checkpoint; nothing is read."""
        self.failure: CheckpointError | None = None
        self._store, self._partitions = store, find_operator(manifest, uid, store).partitions
        self._manifest, self._uid = manifest, uid
        self._reading = reading or Reading()
        self._schema: pa.Schema | None = None

    def __arrow_c_schema__(self) -> object:
        """Reads a key group, once."""
        return self.schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Starts to read from the beginning."""
        batches = self.batches()
        reader = pa.RecordBatchReader.from_batches(self.schema, batches)
        return reader.__arrow_c_stream__(requested_schema)

    @property
    def schema(self) -> pa.Schema:
        """Of the rows; that of one null column where there are none."""
        if self._schema is None:
            # Whose newest file is the youngest: it has the cells that the operator has now.
            ages = [max(entry.epoch or 0 for entry in p.sidecars) for p in self._partitions]
            newest = ages.index(max(ages)) if ages else None
            found = pa.table({"key": pa.nulls(0)})
            if newest is not None:
                found = self._read(self._partitions[newest])
            self._schema = found.schema
        return self._schema

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Reads all rows, key group by key group.

        Raises:
            CheckpointError: As `state` does.
        """
        shared = SharedRows()
        for partition in self._partitions:
            rows = self._read(partition, shared)
            columns = [
                rows[f.name] if f.name in rows.column_names else pa.nulls(len(rows), f.type)
                for f in self.schema
            ]
            yield from pa.table(columns, schema=self.schema).to_batches()

    def _read(
        self, partition: PartitionSnapshotEntry, shared: SharedRows | None = None
    ) -> pa.Table:
        try:
            rows = read_group(self._store, partition, shared=shared)
        except CheckpointError as error:
            self.failure = error
            raise
        return readable_rows(rows, self._manifest, self._uid, self._reading)
