"""Records to sidecars: as a rule one file per operator, key group and boundary.

A small sidecar goes to the committer as it is, which makes one file of those of all key groups.

The writer is keyed by (operator, key group) and wakes one millisecond after a boundary, when the
watermark says that every record of it has come. It is in the global window. Records are sorted in
runs, and runs and files merged as streams: what is in memory does not depend on how much there is.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import apache_beam as beam
import pyarrow as pa
from apache_beam.coders import coders
from apache_beam.transforms import userstate
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Timestamp

from beam_ckpt.errors import CheckpointNotFoundError
from beam_ckpt.lineage import NewSidecar, files_to_keep, stands_on
from beam_ckpt.manifest import CheckpointManifest, SidecarEntry
from beam_ckpt.sidecar import (
    PATCH,
    PageStream,
    SharedRows,
    appended_bytes,
    encode_pages,
    stream_chain,
)
from beam_ckpt.sidecar._schema import OPTIONAL
from beam_ckpt.store import CheckpointStore
from beam_ckpt.transforms._limits import DEFAULT_LIMITS, Limits
from beam_ckpt.transforms._runs import Runs
from beam_ckpt.transforms._shared import footer_bytes
from beam_ckpt.transforms.chunks import Chunks, is_chunk
from beam_ckpt.transforms.clocked import ClockedDoFn
from beam_ckpt.transforms.columns import OperatorState
from beam_ckpt.transforms.keyed_state.clock import DRAINED, MS
from beam_ckpt.transforms.keyed_state.operator import DRAIN
from beam_ckpt.transforms.metrics import counter
from beam_ckpt.transforms.windows import without_what_is_over

__all__ = [
    "DRAINING",
    "SHARED_THRESHOLD",
    "WriteSidecarsFn",
    "decode_new_sidecar",
    "encode_new_sidecar",
]

_LOGGER = logging.getLogger(__name__)


SHARED_THRESHOLD = 16 * 1024
"""Up to how many bytes sidecars share a file, unless told otherwise: of a larger one the footer is
no great part, and the writer keeps those that are shared."""

# Of a page of a column, beside its values: its header, and what its codec adds.
_PAGE_BYTES = 60

# Of a slice, between two reads of it.
_MOVES = 4

#: News that are no sidecar: the end of the stream closed this epoch.
DRAINING = b"draining"


def encode_new_sidecar(sidecar: NewSidecar) -> bytes:
    """A sidecar on its way to the committer, as bytes."""
    s, entry = sidecar, sidecar.entry.model_dump(mode="json")
    fields = [s.operator, s.key_group, s.sequence, entry, s.keeps, s.after, s.shared]
    return json.dumps(fields).encode()


def decode_new_sidecar(data: bytes) -> NewSidecar:
    """The inverse of `encode_new_sidecar`."""
    operator, key_group, sequence, entry, *rest = json.loads(data)
    return NewSidecar(operator, key_group, sequence, SidecarEntry(**entry), *rest)


class WriteSidecarsFn(ClockedDoFn):
    """((operator, key group), (boundary, record)) to (0, (boundary, new sidecar)), by boundary.

    Args:
        store: Where to write.
        run_id: Of this run; part of every file's name.
        operators: Of the pipeline.
        base_id: Of the checkpoint whose files the new ones are added to, or `None`.
        max_files: How many sidecars a key group has at most; 1: each is a full one.
        name: Makes the timer family unique in the pipeline.
        limits: Of what is in memory at a time.
        inline_threshold: A delta of at most so many bytes goes into the manifest, not into a file.
        shared_threshold: A base or a delta of at most so many bytes, that does not go into the
            manifest, goes into one file with those of other key groups.
    """

    _RECORDS = userstate.BagStateSpec(
        "records", coders.TupleCoder((coders.VarIntCoder(), coders.BytesCoder()))
    )
    # The earliest boundary that waits, the next sequence number and the chain, as JSON.
    _PROGRESS = userstate.ReadModifyWriteStateSpec("progress", coders.BytesCoder())

    def __init__(
        self,
        store: CheckpointStore,
        run_id: str,
        operators: Sequence[OperatorState],
        base_id: int | None,
        max_files: int,
        name: str,
        limits: Limits = DEFAULT_LIMITS,
        inline_threshold: int = 0,
        shared_threshold: int = SHARED_THRESHOLD,
    ) -> None:
        self._arguments = (
            store, run_id, tuple(operators), base_id, max_files, name, limits, inline_threshold,
            shared_threshold,
        )  # fmt: skip
        self._limits, self._inline_threshold = limits, inline_threshold
        self._shared_threshold = shared_threshold if store.shares_sidecars else 0
        self._store, self._run_id, self._max_files = store, run_id, max_files
        self._operators = {operator.uid: operator for operator in operators}
        self._base_id = base_id
        self._base: dict[tuple[str, int], tuple[SidecarEntry, ...]] = {}
        self._shared_rows = SharedRows()
        self.declare(
            f"ckpt_writer_{name}",
            {"records": self._RECORDS, "progress": self._PROGRESS},
            on_clock=[("key", beam.DoFn.KeyParam), ("timestamp", beam.DoFn.TimestampParam)],
        )
        self._due: dict[Any, int] = {}
        self._rows = counter("rows_written")
        self._files = counter("sidecars_written")
        self._bytes = counter("sidecar_bytes_written")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def setup(self) -> None:
        base = None if self._base_id is None else self._load_base(self._base_id)
        if base is not None:
            self._base = {
                (uid, partition.partition_id): partition.sidecars
                for uid, operator in base.operators.items()
                if uid in self._operators and stands_on(base, uid, self._operators[uid].spec())
                for partition in operator.partitions
            }

    def _load_base(self, base_id: int) -> CheckpointManifest:
        # It is kept until this run has published. Then a key group that this run has not written
        # to has in the newest checkpoint what it had there. (If that is a younger run's, what is
        # written here is never published.)
        base = self._store.load_by_id(base_id) or self._store.load_latest()
        if base is None:
            raise CheckpointNotFoundError(
                f"checkpoint {base_id}, which this run stands on, is gone from {self._store.url}, "
                "and there is no younger one. What to do: bring the store back from a copy; do "
                "not delete from a store by hand while a run writes to it."
            )
        return base

    def start_bundle(self) -> None:
        self._due = {}

    def process(self, element: Any, records: Any, progress: Any, clock: Any) -> None:
        key, item = element
        records.add(item)
        boundary: int = item[0]
        due = self._due.get(key)
        if due is not None and due <= boundary:
            return
        state = _Progress.load(progress)
        if state.due is None or boundary < state.due:
            state.due = boundary
            state.store(progress)
            clock.set(Timestamp(micros=boundary + MS))
        self._due[key] = state.due

    def _on_clock(
        self, key: Any, timestamp: Any, records: Any, progress: Any, clock: Any
    ) -> Iterator[Any]:
        state = _Progress.load(progress)
        if state.due is None:
            return
        reached = timestamp.micros - MS
        if state.due > reached:
            # A stale fire. Some runners drop the clock with it, so set it again.
            clock.set(Timestamp(micros=state.due + MS))
            return
        uid, key_group = key
        due, waiting = self._sort(self._operators.get(uid), records.read(), reached)
        records.clear()
        try:
            for boundary in sorted(due):
                # What comes late stands on what was written before it, so it is published with
                # that, not before it.
                at = max(boundary, state.newest)
                if key_group == DRAIN:
                    news: Iterable[bytes] = [DRAINING]
                else:
                    written = self._write(uid, key_group, at, due[boundary], state)
                    news = map(encode_new_sidecar, written)
                for new in news:
                    yield TimestampedValue((0, (at, new)), Timestamp(micros=at + MS))
        finally:
            for runs in due.values():
                runs.close()
        for item in waiting:
            records.add(item)
        # Of chunks that came late the others are on their way, and wake the clock.
        state.due = min((boundary for boundary, _ in waiting if boundary > reached), default=None)
        state.store(progress)
        if state.due is not None:
            clock.set(Timestamp(micros=state.due + MS))
            self._due[key] = state.due
        else:
            self._due.pop(key, None)

    def _cut(self, boundary: int) -> int | None:
        """What is recorded of a boundary."""
        return None if boundary >= DRAINED else boundary

    def _sort(
        self, operator: OperatorState | None, items: Iterable[tuple[int, bytes]], reached: int
    ) -> tuple[dict[int, Runs], list[tuple[int, bytes]]]:
        """Returns the records of each boundary that is reached, and what has to wait."""
        due: dict[int, Runs] = {}
        waiting: list[tuple[int, bytes]] = []
        chunks: dict[int, Chunks] = {}
        for boundary, data in items:
            if boundary > reached:
                waiting.append((boundary, data))
                continue
            record: bytes | None = data
            if is_chunk(data):
                record = chunks.setdefault(boundary, Chunks()).add(data)
            if record is not None:
                runs = due.get(boundary)
                if runs is None:
                    runs = due[boundary] = Runs(operator, self._limits)
                runs.add(record)
        for boundary, parts in chunks.items():
            waiting += ((boundary, chunk) for chunk in parts)
        return due, waiting

    def _write(
        self, uid: str, key_group: int, boundary: int, records: Runs, state: _Progress
    ) -> list[NewSidecar]:
        """Writes what came for a boundary: a delta, or with files of the chain a new file."""
        if state.chain is None:
            state.chain = list(self._base.get((uid, key_group), ()))
        chain, keeps = state.chain, 0
        files: Iterator[tuple[bytes, int]] | None = None
        if chain and self._max_files > 1:
            # It is encoded to be weighed, and kept where it is one file and all there is to write.
            pages = self._pages(uid, key_group, boundary, records, chain, len(chain))
            files = self._encode(uid, key_group, boundary, pages, kind="delta")
            delta, rest = next(files), sum(len(data) for data, _ in files)
            size = len(delta[0]) + rest
            shared_pages = self._pages_shared(uid, chain)
            if not rest and self._is_shared("delta", size):
                size = _bytes_of_rows(delta[0], shared_pages)
            weigh = functools.partial(self._weight, shared_pages)
            keeps = files_to_keep(chain, size, self._max_files, weigh, pages.appended(size))
            files = iter([delta]) if not rest and keeps == len(chain) else None
            del delta  # It may be large, and is not to be there while another file is made.
        kind: Literal["full", "delta"] = "delta" if keeps else "full"
        if files is None:
            pages = self._pages(uid, key_group, boundary, records, chain, keeps)
            files = self._encode(uid, key_group, boundary, pages, kind)
        new = []
        chain = chain[:keeps]
        files, is_one = _first_of(files, self._shared_threshold)
        for data, rows in files:
            # (A base without rows comes into no file at all.)
            shared = is_one and self._is_shared(kind, len(data))
            inline = kind == "delta" and len(data) <= self._inline_threshold
            entry = self._store.write_sidecar(
                operator=uid,
                key_group=key_group,
                boundary=self._cut(boundary),
                run_id=self._run_id,
                data=data,
                kind=kind,
                rows=rows,
                inline_threshold=len(data) if shared or inline else -1,
            )
            entry = entry.model_copy(update={"appended_bytes": pages.appended(len(data))})
            state.sequence += 1
            after = chain[-1].identity if chain else ""
            new.append(NewSidecar(uid, key_group, state.sequence, entry, len(chain), after, shared))
            # A base that has no row is listed nowhere.
            chain = [*chain, entry] if rows or chain else []
            self._rows.inc(entry.rows)
            if not shared:
                self._files.inc()
                self._bytes.inc(entry.size_bytes)
            _LOGGER.debug(
                "operator %s, key group %d, boundary %s: %d rows, %d bytes, %s, on %d files",
                uid, key_group, boundary, entry.rows, entry.size_bytes, kind, new[-1].keeps,
            )  # fmt: skip
        state.chain, state.newest = chain, boundary
        return new

    def _is_shared(self, kind: Literal["full", "delta"], size: int) -> bool:
        """Whether a sidecar of so many bytes goes into a file with others."""
        in_manifest = self._inline_threshold if kind == "delta" else -1
        return in_manifest < size <= self._shared_threshold

    def _pages_shared(self, uid: str, chain: Sequence[SidecarEntry]) -> int:
        """How many pages a small sidecar has that will be others' too; 0 beside a large base.

        By all its bytes a delta of one row would weigh as much as thirty rows of a small base, and
        soon make a new one. Beside a large base it is little in any case.
        """
        base = chain[0]
        if base.path is not None and not base.is_shared:
            return 0
        return len(self._operators[uid].schema) - len(OPTIONAL)

    def _weight(self, pages: int, entry: SidecarEntry) -> int:
        """The bytes that an entry of a chain costs, wherever the committer has put it."""
        if entry.path is None and self._is_shared(entry.kind, entry.size_bytes):
            return _bytes_of_rows(entry.inline_bytes(), pages)
        return entry.own_bytes

    def _found(
        self, uid: str, key_group: int, chain: Sequence[SidecarEntry]
    ) -> Sequence[SidecarEntry]:
        """Returns a chain with its slices where they are now; their rows are at hand then.

        What is in use of a shared file moves when much of it is not, and the old one goes.
        """
        entries, columns = list(chain), self._operators[uid].schema.names
        for index, entry in enumerate(chain):
            tries = _MOVES if entry.is_shared else 0
            while tries:
                try:
                    self._shared_rows.of(entry, self._store.read_sidecar, columns=columns)
                    break
                except CheckpointNotFoundError:
                    tries -= 1
                    moved = self._where_now(uid, key_group, entry) if tries else None
                    if moved is None:
                        raise
                    entry = moved
            entries[index] = entry
        return entries

    def _where_now(self, uid: str, key_group: int, old: SidecarEntry) -> SidecarEntry | None:
        newest = self._store.load_latest()
        operator = None if newest is None else newest.operators.get(uid)
        for partition in () if operator is None else operator.partitions:
            if partition.partition_id == key_group:
                for entry in partition.sidecars:
                    if entry.is_shared and (entry.origin, entry.rows) == (old.origin, old.rows):
                        return entry
        return None

    def _pages(
        self,
        uid: str,
        key_group: int,
        boundary: int,
        records: Runs,
        chain: Sequence[SidecarEntry],
        keeps: int,
    ) -> _Pages:
        """The rows that take the place of all that is above `keeps` files of a chain."""
        operator, at = self._operators[uid], self._cut(boundary)
        coder, lateness = operator.window_coder, operator.lateness

        def without_over(pages: Iterable[pa.Table]) -> Iterator[pa.Table]:
            return (without_what_is_over(page, coder, at, lateness) for page in pages)

        # What came late, of a window that is over by now, may stand on rows that are gone.
        newer = [
            PageStream(new.schema, without_over(new.pages)) if PATCH in new.schema.names else new
            for new in records.streams()
        ]
        stream = stream_chain(
            self._found(uid, key_group, chain[keeps:]),
            self._store.read_sidecar,
            operator.schema,
            newer=newer,
            keep_tombstones=keeps > 0,
            shared=self._shared_rows,
        )
        pages = stream.pages
        if chain and not keeps:
            pages = without_over(pages)
        return _Pages(PageStream(stream.schema, pages))

    def _encode(
        self, uid: str, key_group: int, boundary: int, pages: _Pages, kind: Literal["full", "delta"]
    ) -> Iterator[tuple[bytes, int]]:
        operator, limits = self._operators[uid], self._limits
        return encode_pages(
            pages,
            operator.header(key_group=key_group, boundary=self._cut(boundary), kind=kind),
            pages.schema,
            row_group_rows=limits.page_rows,
            row_group_bytes=limits.page_bytes,
            # Compressed they are hardly ever larger.
            file_bytes=min(limits.file_bytes, self._store.max_state_data_bytes // 2),
        )


def _bytes_of_rows(data: bytes, pages: int) -> int:
    """Returns about how many bytes the rows of a small sidecar have in a file with others."""
    return max(len(data) - footer_bytes(data) - pages * _PAGE_BYTES, len(data) // 16)


def _first_of(
    files: Iterator[tuple[bytes, int]], small: int
) -> tuple[Iterator[tuple[bytes, int]], bool]:
    """Returns the files and whether it is one, of at most so many bytes.

    A larger one is not held until the next one is made.
    """
    first = next(files)
    if len(first[0]) > small:
        return itertools.chain([first], files), False
    second = next(files, None)
    if second is None:
        return iter([first]), True
    return itertools.chain([first, second], files), False


class _Pages:
    """Pages that are weighed as they pass."""

    def __init__(self, stream: PageStream) -> None:
        self.schema, self._pages = stream.schema, stream.pages
        self._bytes = self._appended = 0

    def __iter__(self) -> Iterator[pa.Table]:
        for page in self._pages:
            self._bytes += page.nbytes
            self._appended += appended_bytes(page)
            yield page

    def appended(self, size: int) -> int:
        """Of so many bytes of the file: how many are items that were added to bags."""
        return size * self._appended // self._bytes if self._bytes else 0


class _Progress:
    """The writer's memory of one key group."""

    __slots__ = ("chain", "due", "newest", "sequence")

    def __init__(self) -> None:
        self.due: int | None = None
        self.sequence = 0
        self.newest = -(2**63)
        self.chain: list[SidecarEntry] | None = None

    @classmethod
    def load(cls, cell: Any) -> _Progress:
        self = cls()
        data = cell.read()
        if data is not None:
            self.due, self.sequence, self.newest, chain = json.loads(data)
            if chain is not None:
                self.chain = [SidecarEntry(**entry) for entry in chain]
        return self

    def store(self, cell: Any) -> None:
        chain = None
        if self.chain is not None:
            chain = [entry.model_dump(mode="json") for entry in self.chain]
        cell.write(json.dumps([self.due, self.sequence, self.newest, chain]).encode())
