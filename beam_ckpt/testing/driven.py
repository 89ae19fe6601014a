"""The steps behind an operator, driven by hand: the writer, the committer and the restore.

There is no runner and no pipeline, so that what is measured or counted is the work of these steps
alone. Records go in, and checkpoints come out of the store.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from apache_beam.utils.timestamp import Timestamp

from beam_ckpt.lineage import NewSidecar
from beam_ckpt.manifest import CheckpointManifest
from beam_ckpt.retention import KeepLast
from beam_ckpt.store import CheckpointStore
from beam_ckpt.transforms.columns import OperatorState
from beam_ckpt.transforms.committer import START, CheckpointResult, CommitFn
from beam_ckpt.transforms.keyed_state.clock import DRAINED, MS
from beam_ckpt.transforms.restore import ReadGroupFn
from beam_ckpt.transforms.writer import WriteSidecarsFn, _Progress, decode_new_sidecar

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
    """One run of one operator, or of several.

    Args:
        store: Where to write and publish.
        operators: Whose records they are.
        key_groups: How many there are. Where the checkpoint that the run restored has another
            number, every key is to be given anew.
        base_id: Of the checkpoint that the run restored, or None.
        max_files: As in `Checkpoints`: files of a key group.
        keep: How many checkpoints stay.
        last: The run's last boundary in µs, which is published in any case.
        failures: Where to draw from which bundles fail at their end and are done again, by another
            worker.
        **settings: Of the writer.

    Attributes:
        news: What the writer told the committer, in order.
        failed: How many bundles were done again.
    """

    def __init__(
        self,
        store: CheckpointStore,
        operators: OperatorState | Sequence[OperatorState],
        key_groups: int,
        *,
        base_id: int | None = None,
        max_files: int = 8,
        keep: int = 3,
        last: int = DRAINED,
        failures: random.Random | None = None,
        **settings: Any,
    ) -> None:
        own = [operators] if isinstance(operators, OperatorState) else list(operators)
        run_id, name = uuid.uuid4().hex, min(operator.uid for operator in own)
        base = None if base_id is None else store.load_by_id(base_id)
        changed = base is not None and base.key_group_count != key_groups
        self._uid = own[0].uid
        self._writer = WriteSidecarsFn(
            store, run_id, own, None if changed else base_id, max_files, name, **settings
        )
        self._committer = CommitFn(
            store, run_id, own, key_groups, base_id, last, KeepLast(keep), 0, name, {}, False
        )
        self._groups: dict[tuple[str, int], tuple[_Bag, _Value]] = {}
        self._news, self._progress, self._clock = _Bag(), _Value(), _Clock()
        self._failures = failures
        self.news: list[NewSidecar] = []
        self.failed = 0
        self._writer.setup()
        self._committer.process(START, self._news, self._progress, self._clock)

    def add(self, key_group: int, boundary: int, record: bytes, uid: str | None = None) -> None:
        """Gives the writer what an operator emits of a key: a record, or a chunk of one."""
        key = uid or self._uid, key_group
        cells = self._groups.setdefault(key, (_Bag(), _Value()))
        self._writer.process((key, (boundary, record)), *cells, self._clock)

    def write(self, boundary: int) -> None:
        """Lets the watermark of the writer pass a boundary."""
        self._writer.start_bundle()
        for key, cells in sorted(self._groups.items()):
            self._wake(key, boundary, *cells)

    def write_group(self, key_group: int, boundary: int, records: Any) -> None:
        """Lets the writer write what a bag of (boundary, record) holds; it is read once."""
        key = self._uid, key_group
        _, progress = self._groups.setdefault(key, (_Bag(), _Value()))
        state = _Progress.load(progress)
        state.due = boundary
        state.store(progress)
        self._wake(key, boundary, records, progress)

    def _wake(self, key: tuple[str, int], boundary: int, records: Any, progress: Any) -> None:
        at = Timestamp(micros=boundary + MS)
        if self._fails():
            items, value = list(records.items), progress.value
            # What it wrote is in the store, and nobody hears of it.
            _ = list(self._writer._on_clock(key, at, records, progress, self._clock))
            records.items, progress.value = items, value
            # Another worker does it again, which knows nothing but what is in the cells.
            self._writer = type(self._writer)(*self._writer.__reduce__()[1])
            self._writer.setup()
        for news in self._writer._on_clock(key, at, records, progress, self._clock):
            self.news.append(decode_new_sidecar(news.value[1][1]))
            self._committer.process(news.value, self._news, self._progress, self._clock)

    def commit(self, boundary: int) -> list[CheckpointResult]:
        """Lets the watermark of the committer pass a boundary; returns what was published."""
        at = Timestamp(micros=boundary + 2 * MS)
        cells = self._news, self._progress, self._clock
        self._committer.start_bundle()
        if self._fails():
            items, value = list(self._news.items), self._progress.value
            _ = list(self._committer._on_clock(at, *cells))  # what it published stays
            self._news.items, self._progress.value = items, value
            self._committer = type(self._committer)(*self._committer.__reduce__()[1])
            self._committer.start_bundle()
        return [result.value for result in self._committer._on_clock(at, *cells)]

    def _fails(self) -> bool:
        fails = self._failures is not None and self._failures.random() < 0.1
        self.failed += fails
        return fails

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
