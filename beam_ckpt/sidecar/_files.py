"""Files that key groups share, each read and decoded once for all of them that ask."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import pyarrow as pa

from beam_ckpt.manifest import SidecarEntry
from beam_ckpt.sidecar._bounds import MAX_DECODED_BYTES
from beam_ckpt.sidecar._decode import SidecarFile

__all__ = ["SHARED_ROWS_BYTES", "SharedRows"]

SHARED_ROWS_BYTES = 32 * 1024 * 1024
"""Bytes in memory of the rows of shared files that are kept for the key groups to come."""


class SharedRows:
    """The rows of the shared files that were asked for last. One thread's.

    A shared file has rows of many key groups, in one row group as a rule, so that what one key
    group takes to read and decode would do for all. Rows are kept, not bytes: to decode a file of
    1 MiB in memory for each of 128 key groups takes longer than to fetch it.

    A file is known by its path and checksum, and never changes: what is kept is never stale.

    Args:
        max_bytes: Of the rows that are kept; a file that has more is read for each key group.
    """

    def __init__(self, max_bytes: int = SHARED_ROWS_BYTES) -> None:
        self._max_bytes = max_bytes
        # The one used last at the end.
        self._files: OrderedDict[tuple[object, ...], tuple[SidecarFile, int]] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedRows, (self._max_bytes,)  # to another process goes none of the rows

    def of(
        self,
        entry: SidecarEntry,
        read: Callable[[SidecarEntry], bytes],
        *,
        columns: Collection[str] | None = None,
        max_decoded_bytes: int = MAX_DECODED_BYTES,
    ) -> pa.Table:
        """Returns the rows of a slice.

        Args:
            entry: The slice.
            read: Gives a sidecar's verified bytes, such as `CheckpointStore.read_sidecar`.
            columns: As in `decode_sidecar`.
            max_decoded_bytes: Greatest size of the columns in memory.

        Raises:
            InvalidCheckpointError: The file is damaged, or has no such rows.
            CheckpointTooLargeError: Its columns are over the limit.
        """
        chosen = None if columns is None else frozenset(columns)
        key = (entry.path, entry.sha256, entry.size_bytes, chosen)
        if key in self._files:
            self._files.move_to_end(key)
            return self._files[key][0].rows(*entry.row_range)
        file = SidecarFile(
            read(entry),
            where=entry.path or "inline state",
            max_decoded_bytes=max_decoded_bytes,
            columns=columns,
        )
        if file.decoded_bytes <= self._max_bytes:
            self._files[key] = file, file.hold()
            while sum(size for _, size in self._files.values()) > self._max_bytes:
                self._files.popitem(last=False)
        return file.rows(*entry.row_range)
