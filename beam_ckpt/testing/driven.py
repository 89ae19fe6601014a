"""The steps behind an operator, driven by hand: the writer, the committer and the restore.

There is no runner and no pipeline, so that what is measured or counted is the work of these steps
alone. Records go in, and checkpoints come out of the store.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from apache_beam.utils.timestamp import Timestamp

from beam_ckpt.manifest import CheckpointManifest
from beam_ckpt.retention import KeepLast
from beam_ckpt.store import CheckpointStore
from beam_ckpt.transforms.columns import OperatorState
from beam_ckpt.transforms.committer import START, CheckpointResult, CommitFn
from beam_ckpt.transforms.keyed_state.clock import DRAINED, MS
from beam_ckpt.transforms.restore import ReadGroupFn
from beam_ckpt.transforms.writer import WriteSidecarsFn, _Progress

__all__ = ["DrivenCheckpoints", "restored"]


class _Bag:
    def __init__(self) -> None:
        self.items: list[Any] = []

    def read(self) -> Iterator[Any]:
        return iter(self.items)

    def add(self, item: Any) -> None:
        self.items.append(item)

    def clear(self) -> None:
        self.items = []


class _Value:
    def __init__(self) -> None:
        self.value: Any = None

    def read(self) -> Any:
        return self.value

    def write(self, value: Any) -> None:
        self.value = value


class _Clock:
    def set(self, timestamp: Timestamp) -> None:
        """Time is the caller's."""


class DrivenCheckpoints:
    """One run of one operator.

    Args:
        store: Where to write and publish.
        operator: Whose records they are.
        key_groups: How many there are.
        base_id: Of the checkpoint that the run restored, or None.
        max_files: As in `Checkpoints`: files of a key group.
        keep: How many checkpoints stay.
        **settings: Of the writer.
    """

    def __init__(
        self,
        store: CheckpointStore,
        operator: OperatorState,
        key_groups: int,
        *,
        base_id: int | None = None,
        max_files: int = 8,
        keep: int = 3,
        **settings: Any,
    ) -> None:
        run_id, name = uuid.uuid4().hex, operator.uid
        self._operator = operator
        self._writer = WriteSidecarsFn(
            store, run_id, [operator], base_id, max_files, name, **settings
        )
        self._committer = CommitFn(
            store, run_id, [operator], key_groups, base_id, DRAINED, KeepLast(keep), 0, name, {},
            False,
        )  # fmt: skip
        self._groups: dict[int, tuple[_Bag, _Value]] = {}
        self._news, self._progress, self._clock = _Bag(), _Value(), _Clock()
        self._writer.setup()
        self._committer.process(START, self._news, self._progress, self._clock)

    def add(self, key_group: int, boundary: int, record: bytes) -> None:
        """Gives the writer what an operator emits of a key: a record, or a chunk of one."""
        cells = self._groups.setdefault(key_group, (_Bag(), _Value()))
        element = ((self._operator.uid, key_group), (boundary, record))
        self._writer.process(element, *cells, self._clock)

    def write(self, boundary: int) -> None:
        """Lets the watermark of the writer pass a boundary."""
        self._writer.start_bundle()
        for key_group, cells in sorted(self._groups.items()):
            self._wake(key_group, boundary, *cells)

    def write_group(self, key_group: int, boundary: int, records: Any) -> None:
        """Lets the writer write what a bag of (boundary, record) holds; it is read once."""
        _, progress = self._groups.setdefault(key_group, (_Bag(), _Value()))
        state = _Progress.load(progress)
        state.due = boundary
        state.store(progress)
        self._wake(key_group, boundary, records, progress)

    def _wake(self, key_group: int, boundary: int, records: Any, progress: Any) -> None:
        key, at = (self._operator.uid, key_group), Timestamp(micros=boundary + MS)
        for news in self._writer._on_clock(key, at, records, progress, self._clock):
            self._committer.process(news.value, self._news, self._progress, self._clock)

    def commit(self, boundary: int) -> list[CheckpointResult]:
        """Lets the watermark of the committer pass a boundary; returns what was published."""
        at = Timestamp(micros=boundary + 2 * MS)
        results = self._committer._on_clock(at, self._news, self._progress, self._clock)
        return [result.value for result in results]

    def checkpoint(
        self, boundary: int, records: Iterable[tuple[int, bytes]]
    ) -> list[CheckpointResult]:
        """Takes a checkpoint of (key group, record) pairs; returns what was published."""
        for key_group, record in records:
            self.add(key_group, boundary, record)
        self.write(boundary)
        return self.commit(boundary)


def restored(
    store: CheckpointStore,
    operator: OperatorState,
    manifest: CheckpointManifest,
    lateness: int = 0,
    **settings: Any,
) -> Iterator[tuple[Any, bytes]]:
    """Yields what a restore hands to the operator: pairs of a key and the bytes of its record."""
    read = ReadGroupFn(store, operator, lateness, **settings)
    for partition in manifest.operators[operator.uid].partitions:
        for windowed in read.process((manifest.id, partition.partition_id)):
            key, value = windowed.value
            yield key, value.record
