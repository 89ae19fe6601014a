"""A key group's chain: its newest full sidecar and the deltas after it, read as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from beam_ckpt.manifest import SidecarEntry
from beam_ckpt.sidecar._bounds import MAX_DECODED_BYTES
from beam_ckpt.sidecar._decode import SidecarFile, decode_sidecar
from beam_ckpt.sidecar._files import SharedRows
from beam_ckpt.sidecar._merge import merge_newest_first
from beam_ckpt.sidecar._stream import PageStream, in_one_row, merge_pages

__all__ = ["read_chain", "stream_chain"]

_Read = Callable[[SidecarEntry], bytes]


def read_chain(
    sidecars: Sequence[SidecarEntry],
    read: _Read,
    *,
    key: bytes | None = None,
    columns: Collection[str] | None = None,
    shared: SharedRows | None = None,
) -> pa.Table:
    """Returns the live rows of a key group: the latest of each key and window, no tombstones.

    All of them are in memory; see `stream_chain`.

    Args:
        sidecars: The key group's, oldest first, as a manifest lists them.
        read: Gives a sidecar's verified bytes, such as `CheckpointStore.read_sidecar`.
        key: Only the rows of this key; see `decode_sidecar`.
        columns: Only these columns; see `decode_sidecar`.
        shared: What is kept of files that key groups share, where more than one of them is read.

    Raises:
        InvalidCheckpointError: A sidecar is damaged, or does not belong with the others.
        ValueError: There is nothing to read.
    """

    def rows(entry: SidecarEntry) -> pa.Table:
        if shared is not None and entry.is_shared:
            found = shared.of(entry, read, columns=columns)
            return found if key is None else found.filter(pc.equal(found["_key"], key))
        where, rows = _name(entry), _rows(entry)
        return decode_sidecar(read(entry), where=where, key=key, columns=columns, rows=rows)[1]

    return merge_newest_first([rows(entry) for entry in reversed(sidecars)])


def stream_chain(
    sidecars: Sequence[SidecarEntry],
    read: _Read,
    schema: pa.Schema,
    *,
    newer: Sequence[PageStream] = (),
    keep_tombstones: bool = False,
    max_decoded_bytes: int = MAX_DECODED_BYTES,
    shared: SharedRows | None = None,
) -> PageStream:
    """Returns the rows of `read_chain` a page at a time.

    In memory are the bytes of the deltas and of one file of the base, and a row group of each.

    Args:
        sidecars: The key group's, oldest first, as a manifest lists them.
        read: Gives a sidecar's verified bytes, such as `CheckpointStore.read_sidecar`.
        schema: Of the result, as in `merge_pages`.
        newer: Rows that are newer than all of them and in no sidecar yet, newest first.
        keep_tombstones: Whether rows of what was deleted stay: where `sidecars` are not all that
            the key group has, and theirs stand over older ones.
        max_decoded_bytes: Greatest size of a row group in memory.
        shared: As in `read_chain`.

    Raises:
        InvalidCheckpointError: A sidecar is damaged, or does not belong with the others.
        CheckpointTooLargeError: A row group is over the limit.
    """

    def opened(entry: SidecarEntry) -> PageStream:
        if shared is not None and entry.is_shared:
            table = shared.of(
                entry, read, columns=schema.names, max_decoded_bytes=max_decoded_bytes
            )
            return PageStream(table.schema, [table])
        file = SidecarFile(
            read(entry),
            where=_name(entry),
            max_decoded_bytes=max_decoded_bytes,
            columns=schema.names,
            rows=_rows(entry),
        )
        return PageStream(file.schema, file.pages())

    def of_base(entries: Sequence[SidecarEntry]) -> Iterator[pa.Table]:
        return in_one_row(opened(entry) for entry in entries)

    base = [entry for entry in sidecars if entry.kind == "full"]
    streams = [*newer, *(opened(entry) for entry in reversed(sidecars[len(base) :]))]
    if base:
        streams.append(PageStream(schema, of_base(base)))
    return merge_pages(streams, schema, keep_tombstones=keep_tombstones)


def _rows(entry: SidecarEntry) -> tuple[int, int] | None:
    return entry.row_range if entry.is_shared else None


def _name(entry: SidecarEntry) -> str:
    return "inline state" if entry.path is None else entry.path
