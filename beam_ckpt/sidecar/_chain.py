"""A key group's chain: its newest full sidecar and the deltas after it, read as one table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import pyarrow as pa

from beam_ckpt.manifest import SidecarEntry
from beam_ckpt.sidecar._file import decode_sidecar
from beam_ckpt.sidecar._merge import merge_newest_first

__all__ = ["read_chain"]


def read_chain(
    sidecars: Sequence[SidecarEntry],
    read: Callable[[SidecarEntry], bytes],
    *,
    newer: pa.Table | None = None,
    keep_tombstones: bool = False,
    key: bytes | None = None,
    columns: Collection[str] | None = None,
) -> pa.Table:
    """Returns the live rows of a key group: the latest of each key and window, no tombstones.

    Args:
        sidecars: The key group's, oldest first, as a manifest lists them.
        read: Gives a sidecar's verified bytes, such as `CheckpointStore.read_sidecar`.
        newer: Rows that are newer than all of them and in no sidecar yet.
        keep_tombstones: Whether rows of what was deleted stay: where `sidecars` are not all that
            the key group has, and theirs hide rows of older ones.
        key: Only the rows of this key; see `decode_sidecar`.
        columns: Only these columns; see `decode_sidecar`.

    Raises:
        InvalidCheckpointError: A sidecar is damaged, or does not belong with the others.
        ValueError: There is nothing to read.
    """
    tables = [] if newer is None else [newer]
    for entry in reversed(sidecars):
        where = "inline state" if entry.path is None else entry.path
        tables.append(decode_sidecar(read(entry), where=where, key=key, columns=columns)[1])
    return merge_newest_first(tables, keep_tombstones=keep_tombstones)
