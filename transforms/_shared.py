"""The small sidecars of an operator as one file: a key group's rows after those of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa

from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.lineage import Piece
from beam_ckpt.manifest import SidecarEntry
from beam_ckpt.sidecar import PATCH, SharedRows, decode_sidecar, encode_sidecar
from beam_ckpt.sidecar._stream import with_columns_of
from beam_ckpt.store import CheckpointStore
from beam_ckpt.transforms.columns import OperatorState

__all__ = ["SHARED_FILE_BYTES", "SharedPart", "footer_bytes", "shared_bytes", "shared_parts"]

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

    @property
    def kind(self) -> Literal["full", "delta"]:
        """Of all pieces."""
        return self.pieces[0].entry.kind

    def encoded(self, operator: OperatorState, boundary: int | None) -> bytes:
        """Returns the bytes of the file."""
        header = operator.header(key_group=None, boundary=boundary, kind=self.kind)
        return encode_sidecar(self.rows, header)

    def listed(self, file: SidecarEntry, footer_bytes: int) -> list[Piece]:
        """Returns the pieces as slices of the file.

        To a base belong its rows alone: what a small file is beside these is in use for nothing,
        and goes when it comes together with others. Deltas, which are swallowed soon, are not to
        be moved for that, so that they share the footer too.

        Args:
            file: Its entry.
            footer_bytes: How many of its bytes are no rows.
        """
        slices, first, total = [], 0, max(sum(self.sizes), 1)
        bytes_of_all = file.size_bytes - (footer_bytes if self.kind == "full" else 0)
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
                "slice_bytes": -(-bytes_of_all * size // total),
                "origin": entry.origin or entry.sha256[:8],
            }
            slices.append(replace(piece, entry=entry.model_copy(update=update)))
            first += entry.rows
        return slices


def footer_bytes(data: bytes) -> int:
    """Returns how many bytes of a sidecar are its footer."""
    return int.from_bytes(data[-8:-4], "little")


def shared_bytes(entry: SidecarEntry) -> int:
    """Returns about how many bytes of a shared file an entry has, or would have."""
    if entry.path is not None:
        return entry.own_bytes
    data = entry.inline_bytes()
    return len(data) - footer_bytes(data)


def shared_parts(
    operator: OperatorState, pieces: Sequence[Piece], store: CheckpointStore
) -> Iterator[SharedPart]:
    """Yields what becomes one file each; in memory is one of them at a time, and one old file.

    Args:
        operator: Whose they are.
        pieces: Of one kind, inline or slices of files, those of a file one after the other.
        store: Where these files are.

    Raises:
        InvalidCheckpointError: One is damaged.
    """
    held: list[Piece] = []
    tables: list[pa.Table] = []
    sizes: list[int] = []
    old = SharedRows(4 * SHARED_FILE_BYTES)  # of the bytes at most; one has hardly that many
    for piece in pieces:
        entry = piece.entry
        if entry.is_shared:
            where, table = entry.path, old.of(entry, store.read_sidecar)
        else:
            where = f"inline state of {operator.uid!r}, key group {piece.key_group}"
            table = decode_sidecar(store.read_sidecar(entry), where=where)[1]
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
