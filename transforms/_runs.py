"""Records of one boundary in order: in memory where they are few, else in sorted runs on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from typing import IO

import pyarrow as pa

from beam_ckpt.sidecar import PageStream
from beam_ckpt.transforms._limits import Limits
from beam_ckpt.transforms.columns import OperatorState

__all__ = ["Runs"]

_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4")


class Runs:
    """Sorts records that may be more than fit in memory: an external merge sort.

    Args:
        operator: Whose they are; None where they are only counted.
        limits: Of what is in memory.

    Attributes:
        count: Records that it was given.
    """

    def __init__(self, operator: OperatorState | None, limits: Limits) -> None:
        self._operator, self._limits = operator, limits
        self._records: list[bytes] = []
        self._bytes = 0
        self._newest: pa.Table | None = None
        self._files: list[tuple[pa.Schema, IO[bytes]]] = []
        self.count = 0

    def add(self, record: bytes) -> None:
        """Takes a record; of several of one key and window the last one counts."""
        if self._records and self._bytes + len(record) > self._limits.run_bytes:
            self._spill(self._table())
        self._records.append(record)
        self._bytes += len(record)
        self.count += 1

    def streams(self) -> list[PageStream]:
        """Returns what there is, newest first; may be called again."""
        if self._records:
            self._newest = self._table()
        newest = [] if self._newest is None else [PageStream(self._newest.schema, [self._newest])]
        return [*newest, *(PageStream(schema, _pages(f)) for schema, f in reversed(self._files))]

    def close(self) -> None:
        """Deletes what is on disk."""
        for _, file in self._files:
            with suppress(OSError):
                file.close()
        self._files, self._records, self._newest = [], [], None

    def _table(self) -> pa.Table:
        records, self._records, self._bytes = self._records, [], 0
        assert self._operator is not None
        return self._operator.encoded_to_table(records)

    def _spill(self, table: pa.Table) -> None:
        # Small pages, as one of each run is open at a time.
        size, limits = max(table.nbytes, 1), self._limits
        rows = max(1, min(limits.page_rows, limits.page_bytes * len(table) // size // 4))
        file = tempfile.TemporaryFile(prefix="beam-ckpt-run-")  # noqa: SIM115
        with pa.ipc.new_stream(file, table.schema, options=_COMPRESSED) as writer:
            writer.write_table(table, rows)
        self._files.append((table.schema, file))


def _pages(file: IO[bytes]) -> Iterator[pa.Table]:
    file.seek(0)
    with pa.ipc.open_stream(file) as reader:
        for batch in reader:
            yield pa.Table.from_batches([batch])
