"""Saved records looked up by key, for operators whose elements cannot wait for theirs.

A side input and a bundle's finalizer come with an element and cannot be kept until later. So where
a DoFn asks for one, an element that meets its key before the key's record has come down the input
looks the record up in the checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from beam_ckpt.keygroups import key_group
from beam_ckpt.transforms.restore import ReadGroupFn

__all__ = ["SavedRecords"]

#: Encoded records that a worker keeps, in bytes; at least one key group's.
_KEPT_BYTES = 256 * 1024 * 1024


class SavedRecords:
    """What a checkpoint holds of one operator.

    Args:
        read: What reads a key group of it.
        checkpoint_id: Which one.
        key_group_count: Of the checkpoint.
    """

    def __init__(self, read: ReadGroupFn, checkpoint_id: int, key_group_count: int) -> None:
        self._arguments = (read, checkpoint_id, key_group_count)
        # By key group, the one used last at the end: records by (key, window), and their bytes.
        self._groups: OrderedDict[int, tuple[dict[tuple[bytes, bytes], bytes], int]] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return SavedRecords, self._arguments

    def find(self, key: Any, window: Any) -> bytes | None:
        """Returns the record of a key and window (`SnapshotRecord.to_bytes`), or `None`.

        Raises:
            CheckpointNotFoundError: The checkpoint is gone.
            InvalidCheckpointError: It is damaged.
        """
        read, _, key_group_count = self._arguments
        encoded = read.operator.key_coder.encode(key)
        group = key_group(encoded, key_group_count)
        if group not in self._groups:
            self._groups[group] = self._read(group)
            kept = sum(size for _, size in self._groups.values())
            while kept > _KEPT_BYTES and len(self._groups) > 1:
                kept -= self._groups.popitem(last=False)[1][1]
        self._groups.move_to_end(group)
        return self._groups[group][0].get((encoded, read.operator.window_coder.encode(window)))

    def _read(self, group: int) -> tuple[dict[tuple[bytes, bytes], bytes], int]:
        read, checkpoint_id, _ = self._arguments
        encode_window = read.operator.window_coder.encode
        records = {
            (key, encode_window(window)): record
            for key, window, record in read.records(checkpoint_id, group)
        }
        return records, sum(map(len, records.values()))
