"""The small deltas of an operator as one file: the rows of one key group after those of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.lineage import Piece
from beam_ckpt.manifest import SidecarEntry
from beam_ckpt.sidecar import PATCH, decode_sidecar, encode_sidecar
from beam_ckpt.sidecar._stream import with_columns_of
from beam_ckpt.store import CheckpointStore
from beam_ckpt.transforms.columns import OperatorState

__all__ = ["SHARED_FILE_BYTES", "SharedPart", "shared_parts"]

SHARED_FILE_BYTES = 1024 * 1024
"""Bytes in memory of the rows of a shared file, which is read whole for any of its key groups."""


@dataclass(frozen=True)
class SharedPart:
    """What becomes one shared file.

    Attributes:
        pieces: What it is made of, in order.
        sizes: Of the rows of each in memory, in bytes.
        rows: Their rows, one after the other.
    """

    pieces: Sequence[Piece]
    sizes: Sequence[int]
    rows: pa.Table

    def encoded(self, operator: OperatorState, boundary: int | None) -> bytes:
        """Returns the bytes of the file."""
        header = operator.header(key_group=None, boundary=boundary, kind="delta")
        return encode_sidecar(self.rows, header)

    def listed(self, file: SidecarEntry) -> list[Piece]:
        """Returns the pieces as slices of the file."""
        slices, first, total = [], 0, max(sum(self.sizes), 1)
        for piece, size in zip(self.pieces, self.sizes, strict=True):
            entry = piece.entry
            update = {
                "path": file.path,
                "inline": None,
                "size_bytes": file.size_bytes,
                "crc32c": file.crc32c,
                "sha256": file.sha256,
                "first_row": first,
                "file_rows": file.rows,
                "slice_bytes": -(-file.size_bytes * size // total),
                "origin": entry.origin or entry.sha256[:8],
            }
            slices.append(replace(piece, entry=entry.model_copy(update=update)))
            first += entry.rows
        return slices


def shared_parts(
    operator: OperatorState, pieces: Sequence[Piece], store: CheckpointStore
) -> Iterator[SharedPart]:
    """Yields what becomes one file each; in memory is one of them at a time, and one old file.

    Args:
        operator: Whose they are.
        pieces: Deltas, inline or slices of files.
        store: Where these files are.

    Raises:
        InvalidCheckpointError: One is damaged.
    """
    held: list[Piece] = []
    tables: list[pa.Table] = []
    sizes: list[int] = []
    old: tuple[str | None, bytes] = None, b""
    for piece in pieces:
        entry = piece.entry
        if entry.path is None or entry.path != old[0]:
            old = entry.path, store.read_sidecar(entry)
        where = entry.path or f"inline state of {operator.uid!r}, key group {piece.key_group}"
        rows = entry.row_range if entry.is_shared else None
        table = decode_sidecar(old[1], where=where, rows=rows)[1]
        if len(table) != entry.rows:
            raise InvalidCheckpointError(
                f"{where} has {len(table)} rows, expected {entry.rows}: start again from the last "
                "checkpoint."
            )
        if held and sum(sizes) + table.nbytes > SHARED_FILE_BYTES:
            yield SharedPart(held, sizes, _together(operator, tables))
            held, tables, sizes = [], [], []
        held.append(piece)
        tables.append(table)
        sizes.append(table.nbytes)
    if held:
        yield SharedPart(held, sizes, _together(operator, tables))


def _together(operator: OperatorState, tables: Sequence[pa.Table]) -> pa.Table:
    schema = operator.schema
    if any(PATCH in table.column_names for table in tables):
        schema = schema.append(pa.field(PATCH, pa.binary()))
    return pa.concat_tables([with_columns_of(table, schema) for table in tables]).combine_chunks()
