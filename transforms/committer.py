"""From sidecars to a published checkpoint: the one committer of a pipeline.

One stateful key. It wakes two milliseconds after a boundary, when the watermark says that every
sidecar of it is there, and publishes in the order of the boundaries: the manifest (create-only),
its marker, the pointer; then it prunes. A retry finds its own manifest and changes nothing; a
younger run's claim stops it (`FencedError`).

The small sidecars of an operator come with the news: its bases are one file of all key groups, and
its deltas are another, which are written before the manifest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import apache_beam as beam
from apache_beam.coders import coders
from apache_beam.internal import pickler
from apache_beam.transforms import userstate
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Timestamp

from beam_ckpt.errors import CheckpointConflictError, CheckpointError, InvalidCheckpointError
from beam_ckpt.lineage import (
    MAX_INLINE,
    NewSidecar,
    Piece,
    inline_over,
    next_operators,
    relisted,
    same,
    stands_on,
    to_share,
)
from beam_ckpt.manifest import (
    CheckpointManifest,
    OperatorSnapshotEntry,
    OperatorSpec,
    PipelineIdentity,
    RunIdentity,
    SidecarEntry,
    SourceOffsetEntry,
    new_checkpoint_id,
    uuid7_millis,
)
from beam_ckpt.retention import KeepForRetry, KeepOnBothSides, RetentionPolicy
from beam_ckpt.store import CheckpointStore
from beam_ckpt.transforms._shared import SharedPart, footer_bytes, shared_bytes, shared_parts
from beam_ckpt.transforms.clocked import ClockedDoFn
from beam_ckpt.transforms.columns import OperatorState
from beam_ckpt.transforms.keyed_state.clock import DRAINED, MS
from beam_ckpt.transforms.metrics import counter, distribution, gauge
from beam_ckpt.transforms.offsets import decode_offsets, next_source_offsets
from beam_ckpt.transforms.writer import DRAINING, decode_new_sidecar

__all__ = ["START", "CheckpointResult", "CommitFn"]

_LOGGER = logging.getLogger(__name__)

#: The element that starts the committer, before any sidecar; its boundary is not looked at.
START = (0, (0, b""))
_ID_ATTEMPTS = 64


@dataclass(frozen=True)
class CheckpointResult:
    """A published checkpoint.

    Attributes:
        id: Names the manifest.
        checkpoint_id: Its UUID.
        epoch: Ascends with every published checkpoint of the store.
        boundary: The cut in event time, or `None` for the drained end of the input.
        sidecars: Files that this checkpoint added.
        size_bytes: Their size.
        total_size_bytes: Size of everything a restore of it reads.
        pruned: Checkpoints that were deleted after it.
    """

    id: int
    checkpoint_id: str
    epoch: int
    boundary: Timestamp | None
    sidecars: int
    size_bytes: int
    total_size_bytes: int
    pruned: int


class CommitFn(ClockedDoFn):
    """`START` and (0, (boundary, news)) to `CheckpointResult`, one per published checkpoint.

    The news are new sidecars and the positions of sources.

    Args:
        store: Where to publish.
        run_id: Of this run.
        operators: Of the pipeline.
        key_groups: Number of key groups of this run.
        base_id: Of the checkpoint restored from, or `None`.
        last: The run's last boundary in µs (`DRAINED` when it drains): published in any case.
        keep: What pruning keeps.
        fallbacks: Damaged checkpoints that were passed over at restore; becomes a metric.
        name: Makes the timer family unique in the pipeline.
        sources: Types of the sources whose offsets are tracked, by uid.
        marks_drained: Whether the end of the input is the drain of a stream, after which a replay
            may find more than was there.
    """

    _SIDECARS = userstate.BagStateSpec(
        "sidecars", coders.TupleCoder((coders.VarIntCoder(), coders.BytesCoder()))
    )
    _PROGRESS = userstate.ReadModifyWriteStateSpec("progress", coders.BytesCoder())
    #: Whether it owns the store from its first element on, or from when there is all to publish.
    _claims_at_start = True
    #: Whether a cut at which nothing has changed is left out.
    _skips = True

    def __init__(
        self,
        store: CheckpointStore,
        run_id: str,
        operators: Sequence[OperatorState],
        key_groups: int,
        base_id: int | None,
        last: int,
        keep: RetentionPolicy,
        fallbacks: int,
        name: str,
        sources: Mapping[str, str],
        marks_drained: bool,
    ) -> None:
        self._arguments = (
            store, run_id, tuple(operators), key_groups, base_id, last, keep, fallbacks, name,
            dict(sources), marks_drained,
        )  # fmt: skip
        self._marks_drained = marks_drained
        self._sources = dict(sources)
        self._store, self._run_id, self._keep = store, run_id, keep
        self._operators, self._key_groups = tuple(operators), key_groups
        self._uids = ", ".join(repr(operator.uid) for operator in self._operators)
        self._base_id, self._last, self._fallbacks = base_id, last, fallbacks
        # The checkpoint that this bundle stands on when it begins, once that is known.
        self._began, self._began_on = False, base_id
        self.declare(
            f"ckpt_committer_{name}",
            {"sidecars": self._SIDECARS, "progress": self._PROGRESS},
            on_clock=[("timestamp", beam.DoFn.TimestampParam)],
        )
        self._committed = counter("checkpoints_committed")
        self._passed_over = counter("checkpoints_passed_over_at_restore")
        self._not_pruned = counter("prunes_skipped")
        self._repaired = counter("pointers_repaired")
        self._pruned = counter("checkpoints_pruned")
        self._failed = counter("checkpoints_failed")
        self._skipped = counter("checkpoints_skipped")
        self._files_written = counter("sidecars_written")
        self._bytes_written = counter("sidecar_bytes_written")
        self._duration = distribution("checkpoint_duration_ms")
        self._commit_duration = distribution("commit_duration_ms")
        self._lag = distribution("boundary_lag_ms")
        self._interval = distribution("checkpoint_interval_ms")
        self._files = distribution("files_per_checkpoint")
        self._bytes = distribution("bytes_per_checkpoint")
        self._rows = distribution("rows_per_checkpoint")
        self._committed_at = gauge("last_checkpoint_committed_at_ms")
        self._committed_boundary = gauge("last_checkpoint_boundary_ms")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def start_bundle(self) -> None:
        self._began = False

    def process(self, element: Any, sidecars: Any, progress: Any, clock: Any) -> None:
        state = _Progress.load(progress)
        boundary, sidecar = element[1]
        if not sidecar:
            if state.generation == 0 and self._claims_at_start:
                # Claimed when the job runs, not when its graph is built: building a graph must
                # not stop the job that is running.
                self._begin(state)
            boundary = self._last
        else:
            sidecars.add((boundary, sidecar))
        if state.due is None or boundary < state.due:
            state.due = boundary
            clock.set(Timestamp(micros=boundary + 2 * MS))
        state.store(progress)

    def _on_clock(
        self, timestamp: Any, sidecars: Any, progress: Any, clock: Any
    ) -> Iterator[TimestampedValue[CheckpointResult]]:
        state = _Progress.load(progress)
        reached = timestamp.micros - 2 * MS
        if state.due is None or state.due > reached:
            if state.due is not None:
                clock.set(Timestamp(micros=state.due + 2 * MS))
            return
        if state.generation == 0:
            self._begin(state)
        if not self._began:
            self._began = True
            self._began_on = self._base_id if state.base_id is None else state.base_id
        waiting: dict[int, list[bytes]] = {}
        for boundary, sidecar in sidecars.read():
            waiting.setdefault(boundary, []).append(sidecar)
        sidecars.clear()
        due = sorted(boundary for boundary in waiting if boundary <= reached)
        if self._last <= reached and self._last not in due and not state.ended:
            due.append(self._last)
        for boundary in due:
            result = self._commit(state, boundary, _News(waiting.pop(boundary, ())))
            if result is not None:
                yield TimestampedValue(result, Timestamp(micros=boundary + 2 * MS))
        for boundary, left in waiting.items():
            for sidecar in left:
                sidecars.add((boundary, sidecar))
        state.due = min(waiting, default=None)
        if not state.ended and (state.due is None or self._last < state.due):
            state.due = self._last
        if state.due is not None:
            clock.set(Timestamp(micros=state.due + 2 * MS))
        state.store(progress)

    def _begin(self, state: _Progress) -> None:
        """Makes this run the store's owner, and the store fit to publish to."""
        state.generation = self._store.claim_generation(self._run_id, restored_from=self._base_id)
        self._passed_over.inc(self._fallbacks)
        try:
            latest = self._store.load_latest()
            pointed = None if latest is None else latest.id
        except InvalidCheckpointError as error:
            _LOGGER.warning("%s. This run, the owner of the store, sets it anew.", error)
            pointed = None
            self._repaired.inc()
        if self._base_id is not None and (pointed is None or pointed < self._base_id):
            # Damaged, or the run before died between the marker and the pointer. The checkpoint
            # restored from was found by a walk that does not trust the pointer.
            self._store.repair_pointer()
        elif pointed is None:
            # A fresh start on damaged checkpoints is the author's word.
            self._store.repair_pointer(discard=True)

    def _commit(self, state: _Progress, boundary: int, news: _News) -> CheckpointResult | None:
        # What comes late is published with the newest cut: it was applied after that.
        boundary = boundary if state.boundary is None else max(boundary, state.boundary)
        base = self._base(state)
        last = boundary >= self._last
        watermark = self._cut(boundary)
        if not state.draining and (news.draining or (watermark is None and self._marks_drained)):
            state.draining, state.before_drain = True, None if base is None else base.id
        if last:
            state.ended = True
        if self._skips and not news and base is not None and base.watermark == watermark:
            # Nothing has changed since, and that is what is published already.
            self._skipped.inc()
            return None
        if not news and not last:
            self._skipped.inc()
            return None
        began = time.monotonic()
        at = None if watermark is None else Timestamp(micros=watermark)
        try:
            self._store.check_generation(state.generation, self._run_id)
            manifest = self._publish(state, base, watermark, news)
        except Exception as error:
            self._failed.inc()
            _LOGGER.warning(
                "the checkpoint of operators %s at boundary %s was not published: %s",
                self._uids, at, error,
            )  # fmt: skip
            raise
        new = _written(manifest, base, news.sidecars)
        self._measure(manifest, base, new, time.monotonic() - began)
        state.boundary, state.base_id = boundary, manifest.id
        pruned = self._prune(state)
        self._committed.inc()
        self._pruned.inc(pruned)
        size = sum(entry.size_bytes for entry in new)
        _LOGGER.info(
            "checkpoint %d of operators %s published: boundary %s, %d sidecars, %d bytes, "
            "%d in all, %d pruned",
            manifest.id, self._uids, at, len(new), size, manifest.total_size_bytes, pruned,
        )  # fmt: skip
        return CheckpointResult(
            manifest.id,
            manifest.checkpoint_id,
            manifest.epoch,
            at,
            len(new),
            size,
            manifest.total_size_bytes,
            pruned,
        )

    def _cut(self, boundary: int) -> int | None:
        """What is recorded of a boundary."""
        return None if boundary >= DRAINED else boundary

    def _entries_of(self, base: CheckpointManifest | None) -> dict[str, OperatorSnapshotEntry]:
        """What the next checkpoint adds to."""
        # With another number of key groups every key was saved anew: the old files are not its.
        if base is None or base.key_group_count != self._key_groups:
            return {}
        specs = {operator.uid: operator.spec() for operator in self._operators}
        return {
            uid: base.operators[uid]
            for uid, spec in specs.items()
            if uid in base.operators and stands_on(base, uid, spec)
        }

    def _specs(self, base: CheckpointManifest | None) -> dict[str, OperatorSpec]:
        return {operator.uid: operator.spec() for operator in self._operators}

    def _measure(
        self,
        manifest: CheckpointManifest,
        base: CheckpointManifest | None,
        entries: Sequence[SidecarEntry],
        took_s: float,
    ) -> None:
        now = time.time_ns() // 1_000_000
        written = [millis for entry in entries if (millis := _written_ms(entry)) is not None]
        # Clocks of other machines may be ahead of this one's.
        self._duration.update(max(0, now - min(written, default=now)))
        self._commit_duration.update(round(took_s * 1000))
        self._files.update(len(entries))
        self._bytes.update(sum(entry.size_bytes for entry in entries))
        self._rows.update(sum(entry.file_rows or entry.rows for entry in entries))
        self._committed_at.set(now)
        if base is not None:
            self._interval.update(max(0, manifest.timestamp_ms - base.timestamp_ms))
        if manifest.watermark is not None:
            boundary = manifest.watermark // 1000
            self._lag.update(now - boundary)
            self._committed_boundary.set(boundary)

    def _prune(self, state: _Progress) -> int:
        keep = self._keep
        if state.draining and state.before_drain is not None:
            # What was before a drain is what the next run may want.
            keep = KeepOnBothSides(keep, state.before_drain)
        # If this bundle fails yet it is done again, from where it began.
        keep = KeepForRetry(keep, self._began_on, state.generation)
        try:
            return len(self._store.prune(keep).deleted)
        except InvalidCheckpointError as error:
            # What cannot be read may still be wanted, and publishing must go on.
            self._not_pruned.inc()
            _LOGGER.warning("nothing was pruned: %s", error)
            return 0

    def _base(self, state: _Progress) -> CheckpointManifest | None:
        base_id = self._base_id if state.base_id is None else state.base_id
        if base_id is None:
            return None
        base = self._store.load_by_id(base_id)
        if base is None:
            raise CheckpointError(
                f"checkpoint {base_id}, which this run stands on, is gone from {self._store.url}. "
                "What to do: do not prune a store by hand while a run writes to it; start again."
            )
        return base

    def _publish(
        self,
        state: _Progress,
        base: CheckpointManifest | None,
        watermark: int | None,
        news: _News,
    ) -> CheckpointManifest:
        """Writes and finalizes the manifest; finds the one that an earlier try left."""
        run = RunIdentity(generation=state.generation, run_id=self._run_id)
        uids = [operator.uid for operator in self._operators]
        operators = self._entries_of(base)
        epoch = 0 if base is None else base.epoch
        ids = [i for i in self._store.list_ids() if base is None or i > base.id]
        for checkpoint_id in ids:
            # A damaged marker says nothing, and must not stop what is sound.
            with contextlib.suppress(InvalidCheckpointError):
                marker = self._store.final_marker(checkpoint_id)
                if marker is not None:
                    epoch = max(epoch, marker.epoch)

        def entries(of_epoch: int) -> dict[str, OperatorSnapshotEntry]:
            return next_operators(operators, uids, news.sidecars, of_epoch)

        def offsets(of_epoch: int) -> dict[str, SourceOffsetEntry]:
            before = {} if base is None else base.source_offsets
            return next_source_offsets(before, self._sources, news.offsets, of_epoch)

        for checkpoint_id in reversed(ids):
            mine = self._own(checkpoint_id, run)
            if (
                mine is not None
                and mine.watermark == watermark
                and mine.drained == state.draining
                and _alike(mine.operators, entries(mine.epoch))
                and mine.source_offsets == offsets(mine.epoch)
            ):
                return self._store.finalize(mine.id)
        for sidecar in inline_over(entries(epoch + 1), news.sidecars, MAX_INLINE):
            entry = self._as_file(sidecar)
            news.sidecars[news.sidecars.index(sidecar)] = replace(sidecar, entry=entry)
        listed = self._shared(entries(epoch + 1), news.sidecars, watermark)
        for _ in range(_ID_ATTEMPTS):
            manifest = CheckpointManifest(
                checkpoint_id=new_checkpoint_id(),
                id=self._store.next_id(),
                epoch=epoch + 1,
                timestamp_ms=time.time_ns() // 1_000_000,
                operators=listed,
                source_offsets=offsets(epoch + 1),
                parent_id=None if base is None else base.checkpoint_id,
                watermark=watermark,
                key_group_count=self._key_groups,
                run=run,
                pipeline=PipelineIdentity(
                    operators=self._specs(base),
                    beam_version=beam.__version__,
                    python_version=platform.python_version(),
                    pickler=pickler.desired_pickle_lib.__name__.rpartition(".")[2].removesuffix(
                        "_pickler"
                    ),
                ),
                drained=state.draining,
            )
            try:
                saved = self._store.save(manifest)
            except CheckpointConflictError:
                # Somebody else took the id: a younger run, which this raises for, or an older
                # one that did not know yet that it was superseded.
                self._store.check_generation(state.generation, self._run_id)
                continue
            self._store.check_generation(state.generation, self._run_id)
            return self._store.finalize(saved.id)
        raise CheckpointConflictError(
            f"{_ID_ATTEMPTS} manifest ids in a row were taken in {self._store.url}. "
            "What to do: see that only one run writes to the store, then start again."
        )

    def _shared(
        self,
        operators: Mapping[str, OperatorSnapshotEntry],
        new: Sequence[NewSidecar],
        watermark: int | None,
    ) -> dict[str, OperatorSnapshotEntry]:
        """Writes the files that key groups share; returns the operators that list them."""
        moved: list[Piece] = []
        # (Of other operators, which are only listed again, nothing is written.)
        own = {operator.uid: operators[operator.uid] for operator in self._operators}
        for pieces in to_share(own, new, shared_bytes):
            if self._is_alone(pieces, own):
                (first,) = pieces
                entry = self._as_file(first).model_copy(update={"epoch": first.entry.epoch})
                moved.append(replace(first, entry=entry))
                written = [entry]
            else:
                written = []
                operator = self._operator(pieces[0].operator)
                for part in shared_parts(operator, pieces, self._store):
                    entries = self._write_part(part, watermark)
                    moved += entries
                    written.append(entries[0].entry)
            self._files_written.inc(len(written))
            self._bytes_written.inc(sum(entry.size_bytes for entry in written))
        return relisted(operators, moved)

    def _is_alone(
        self, pieces: Sequence[Piece], operators: Mapping[str, OperatorSnapshotEntry]
    ) -> bool:
        """Whether what is small shares a file with nobody, and never will.

        A base is there for long: the next ones of other key groups come together with it.
        """
        (first, *others) = pieces
        if others or first.entry.path is not None:
            return False
        return first.entry.kind == "delta" or len(operators[first.operator].partitions) == 1

    def _operator(self, uid: str) -> OperatorState:
        return next(operator for operator in self._operators if operator.uid == uid)

    def _write_part(self, part: SharedPart, watermark: int | None) -> list[Piece]:
        operator = self._operator(part.pieces[0].operator)
        data = part.encoded(operator, watermark)
        file = self._store.write_sidecar(
            operator=operator.uid,
            key_group=None,
            boundary=watermark,
            run_id=self._run_id,
            data=data,
            kind=part.kind,
            rows=len(part.rows),
        )
        return part.listed(file, footer_bytes(data))

    def _as_file(self, sidecar: NewSidecar | Piece) -> SidecarEntry:
        """Writes what came inline as a file of its key group."""
        entry = sidecar.entry
        written = self._store.write_sidecar(
            operator=sidecar.operator,
            key_group=sidecar.key_group,
            boundary=entry.boundary,
            run_id=self._run_id,
            data=entry.inline_bytes(),
            kind=entry.kind,
            rows=entry.rows,
        )
        return written.model_copy(update={"appended_bytes": entry.appended_bytes})

    def _own(self, checkpoint_id: int, run: RunIdentity) -> CheckpointManifest | None:
        """The manifest of that id, if it is this run's."""
        try:
            manifest = self._store.load_by_id(checkpoint_id)
        except ValueError:
            return None  # Damaged, so not one to build on; its id stays used.
        return manifest if manifest is not None and manifest.run == run else None


def _alike(
    one: Mapping[str, OperatorSnapshotEntry], other: Mapping[str, OperatorSnapshotEntry]
) -> bool:
    """Whether two manifests list the same state, inline or in files."""

    def content(operators: Mapping[str, OperatorSnapshotEntry]) -> list[Any]:
        return [
            (uid, partition.partition_id, s.kind, s.boundary, s.epoch, s.rows)
            for uid, operator in operators.items()
            for partition in operator.partitions
            for s in partition.sidecars
        ]

    def entries(operators: Mapping[str, OperatorSnapshotEntry]) -> list[SidecarEntry]:
        return [s for o in operators.values() for p in o.partitions for s in p.sidecars]

    return (
        set(one) == set(other)
        and content(one) == content(other)
        and all(same(a, b.identity) for a, b in zip(entries(one), entries(other), strict=True))
    )


def _written(
    manifest: CheckpointManifest, base: CheckpointManifest | None, new: Sequence[NewSidecar]
) -> list[SidecarEntry]:
    """What was written for a checkpoint, each file once."""
    entries = [sidecar.entry for sidecar in new if not sidecar.shared]
    known = set() if base is None else base.sidecar_paths()
    known.update(entry.path for entry in entries if entry.path is not None)
    listed = [entry for _, _, entry in manifest.pieces()]
    return entries + [e for e in listed if e.path is not None and e.path not in known]


def _written_ms(entry: SidecarEntry) -> int | None:
    """Wall clock at which a file was named; `None` where its name does not say."""
    found = re.search(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.parquet$", entry.path or "")
    return None if found is None else uuid7_millis(found[1])


class _News:
    """What came in for one boundary."""

    def __init__(self, encoded: Iterable[bytes]) -> None:
        self.sidecars: list[NewSidecar] = []
        self.offsets: list[tuple[str, dict[str, str]]] = []
        self.draining = False
        for data in encoded:
            if data == DRAINING:
                self.draining = True
                continue
            offsets = decode_offsets(data)
            if offsets is None:
                self.sidecars.append(decode_new_sidecar(data))
            else:
                self.offsets.append(offsets)

    def __bool__(self) -> bool:
        return bool(self.sidecars or self.offsets)


class _Progress:
    """The committer's memory. Times in µs."""

    __slots__ = ("base_id", "before_drain", "boundary", "draining", "due", "ended", "generation")

    def __init__(self) -> None:
        self.due: int | None = None
        self.generation = 0
        self.base_id: int | None = None
        self.boundary: int | None = None
        self.ended = self.draining = False
        self.before_drain: int | None = None

    @classmethod
    def load(cls, cell: Any) -> _Progress:
        self = cls()
        data = cell.read()
        if data is not None:
            (
                self.due, self.generation, self.base_id, self.boundary, self.ended, self.draining,
                self.before_drain,
            ) = json.loads(data)  # fmt: skip
        return self

    def store(self, cell: Any) -> None:
        values = [
            self.due, self.generation, self.base_id, self.boundary, self.ended, self.draining,
            self.before_drain,
        ]  # fmt: skip
        cell.write(json.dumps(values).encode())
