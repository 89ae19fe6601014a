"""Histories of generated DoFns whose checkpoints go through a store, with all settings of it tiny.

`beam_ckpt.testing.histories` keeps the checkpoints of a history as records in memory. Here they are
what an operator emits, written by the real writer, published by the real committer, and read back
by the real restore for the next run: in deltas and bases that are merged at once, in pages of a
row, in files that key groups share, in the manifest, in chunks of a few bytes, in another number of
key groups after each restart, with bundles that are done again and runs that die. No result may
depend on any of it.

    check_stored(StoredHistory(history, storages=(Storage(key_groups=3), Storage(key_groups=2))))
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.coders import StrUtf8Coder
from apache_beam.transforms.window import GlobalWindows, WindowFn

from beam_ckpt import lineage
from beam_ckpt.keygroups import key_group
from beam_ckpt.lineage import MAX_INLINE
from beam_ckpt.manifest import CheckpointManifest, SidecarEntry
from beam_ckpt.store import CheckpointStore, open_store
from beam_ckpt.testing import strategies
from beam_ckpt.testing.driven import DrivenCheckpoints
from beam_ckpt.testing.event_loop import LoopState, Output, canonical, run_event_loop
from beam_ckpt.testing.fake_runner import Chaos, FakeCheckpoint, FakeRun, Slot, run_faked, state_of
from beam_ckpt.testing.generated import (
    KINDS,
    TAGS,
    Clear,
    Emit,
    Fold,
    Program,
    Set,
    When,
    Write,
    dofn,
)
from beam_ckpt.testing.histories import (
    Chain,
    History,
    between,
    chains,
    comparable,
    histories,
    middle_of,
)
from beam_ckpt.testing.streams import Arrive, Element, StreamPlan
from beam_ckpt.transforms import _shared, committer
from beam_ckpt.transforms._limits import DEFAULT_LIMITS, Limits
from beam_ckpt.transforms._runs import Runs
from beam_ckpt.transforms._shared import SHARED_FILE_BYTES
from beam_ckpt.transforms.chunks import CHUNK_BYTES, Chunks, is_chunk
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.keyed_state import key, operator
from beam_ckpt.transforms.keyed_state.clock import DRAINED
from beam_ckpt.transforms.keyed_state.key import SPILL_BYTES, KeyState
from beam_ckpt.transforms.keyed_state.operator import BAG_BYTES, WAITING_BYTES
from beam_ckpt.transforms.restore import ReadGroupFn, plan_restore
from beam_ckpt.transforms.signature import read_signature
from beam_ckpt.transforms.snapshot import SnapshotRecord
from beam_ckpt.transforms.windows import is_over, left_over, window_identity
from beam_ckpt.transforms.writer import SHARED_THRESHOLD, WriteSidecarsFn

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["EXAMPLES", "Storage", "StoredHistory", "check_stored", "storages", "stored_histories"]

_SECOND = 1_000_000
_ALL = 10_000


@dataclass(frozen=True)
class Storage:
    """How one run stores its checkpoints; no result depends on it.

    Attributes:
        key_groups: As in `Checkpoints`, like `max_files`, `inline_threshold`, `shared_threshold`
            and `keep`.
        limits: Of what is in memory, and in one element, at a time.
        max_inline: Bytes of state that a manifest holds itself.
        shared_file_bytes: Bytes in memory of the rows of a shared file.
        spill_bytes: Values of more bytes are outside the cell of the packed ones.
        bag_bytes: Bags of more bytes have a cell of their own.
        waiting_bytes: Elements that wait have a cell of their own when they have more bytes.
        deltas_of_base: Deltas above this part of their base become a new base.
    """

    key_groups: int = 1
    max_files: int = 8
    inline_threshold: int = 0
    shared_threshold: int = SHARED_THRESHOLD
    keep: int = _ALL
    limits: Limits = DEFAULT_LIMITS
    max_inline: int = MAX_INLINE
    shared_file_bytes: int = SHARED_FILE_BYTES
    spill_bytes: int = SPILL_BYTES
    bag_bytes: int = BAG_BYTES
    waiting_bytes: int = WAITING_BYTES
    deltas_of_base: float = lineage._DELTAS_OF_BASE

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Sets what is no argument of anything."""
        with contextlib.ExitStack() as stack:

            def patch(module: Any, name: str, value: Any) -> None:
                stack.enter_context(mock.patch.object(module, name, value))

            patch(committer, "MAX_INLINE", self.max_inline)
            patch(_shared, "SHARED_FILE_BYTES", self.shared_file_bytes)
            patch(lineage, "_DELTAS_OF_BASE", self.deltas_of_base)
            if self.spill_bytes != SPILL_BYTES:
                patch(key, "SPILL_BYTES", self.spill_bytes)
                patch(operator, "is_small", lambda coder: False)
            yield


@dataclass(frozen=True)
class StoredHistory:
    """A history, or a chain of two operators, and how each of its runs stores its checkpoints.

    Attributes:
        example: What is run. Its `History.key_groups`, and the sizes in its `Chaos`, are not looked
            at.
        storages: Of each run, one more than cuts, or more.
        seed: Of the order in which records come, of how far the committer is behind the writer,
            of the bundles that are done again, and of the runs that die before their end.
        on_disk: The store is a directory; otherwise it is in memory.
    """

    example: History | Chain
    storages: tuple[Storage, ...]
    seed: int = 0
    on_disk: bool = False

    @property
    def first(self) -> History:
        """The history of the only operator, or of the first one."""
        return self.example.first if isinstance(self.example, Chain) else self.example


# Saves something in every epoch, in each key group, and clears it again.
_BUSY = History(
    Program(
        cells=("value", "bag", "top"),
        process=(
            Fold(0),
            When(2, 0, Write(1)),
            When(3, 1, Write(2)),
            Emit(),
            When(3, 0, Set(0, 25 * _SECOND)),
        ),
        callbacks=((Clear(0), Clear(1), Clear(2), Emit()),),
    ),
    order_free=False,
    source=tuple((at * 6 * _SECOND, "abcd"[at % 4], at) for at in range(24)),
    cuts=(50 * _SECOND, 110 * _SECOND),
    every=10 * _SECOND,
    chaos=Chaos(5),
)
_TINY = Storage(
    key_groups=3,
    max_files=3,
    keep=1,
    limits=Limits(chunk_bytes=40, run_bytes=60, page_rows=1, page_bytes=200, file_bytes=600),
    spill_bytes=0,
    bag_bytes=0,
    deltas_of_base=1e6,
)
EXAMPLES = (
    StoredHistory(_BUSY, (_TINY, _TINY, replace(_TINY, key_groups=2))),
    StoredHistory(
        _BUSY, tuple(replace(_TINY, inline_threshold=4000, key_groups=n) for n in (1, 2, 2)), seed=1
    ),
    StoredHistory(_BUSY, (replace(_TINY, max_files=8, limits=DEFAULT_LIMITS),) * 3, seed=2),
    StoredHistory(
        _BUSY,
        (
            replace(
                _TINY,
                key_groups=1,
                max_files=2,
                deltas_of_base=0.375,
                limits=replace(_TINY.limits, file_bytes=1),
            ),
        )
        * 3,
        seed=3,
        on_disk=True,
    ),
)
"""A few that reach nearly all that the settings are for, whatever Hypothesis draws."""


def check_stored(stored: StoredHistory) -> Counter[str]:
    """Runs a history; an `AssertionError` says what is not as in the oracle.

    Compared are the outputs of each run and of all together; and of every checkpoint what the store
    gives back: with the records that the operators emitted, one after the other, and with the
    oracle's state at its boundary.

    Returns:
        How often it happened what the settings are for.
    """
    with _store(stored.on_disk) as store, _counted() as counts:
        _Check(stored, store, counts).run()
    return counts


@contextlib.contextmanager
def _store(on_disk: bool) -> Iterator[CheckpointStore]:
    if on_disk:
        with tempfile.TemporaryDirectory(prefix="beam-ckpt-stored-") as directory:
            yield open_store(directory)
        return
    store = cast(Any, open_store(f"memory://{uuid.uuid4().hex}"))
    try:
        yield store
    finally:
        # What is in memory stays there for as long as the process lives.
        store.blobs.delete_many([meta.key for meta in store.blobs.list("")])


@contextlib.contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Counts what cannot be seen from outside."""
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:

        def count(owner: Any, name: str, what: str, when: Callable[[Any], Any]) -> None:
            method = getattr(owner, name)

            def counting(*args: Any, **kwargs: Any) -> Any:
                result = method(*args, **kwargs)
                counts[what] += bool(when(result))
                return result

            stack.enter_context(mock.patch.object(owner, name, counting))

        count(Runs, "_spill", "runs on disk", lambda _: True)
        count(KeyState, "spilled", "spilled values read", lambda _: True)
        count(WriteSidecarsFn, "_where_now", "slices found where they moved", bool)
        yield counts


class _Operator:
    """An operator of the history, and where it stands."""

    def __init__(
        self,
        uid: str,
        program: Program,
        elements: Sequence[Element],
        order_free: bool,
        aligned: bool,
        window_fn: WindowFn | None,
        lateness: int,
    ) -> None:
        self.uid, self.program, self.fn = uid, program, dofn(program)
        self.signature = read_signature(self.fn)
        self.elements, self.order_free, self.aligned = elements, order_free, aligned
        self.window_fn, self.lateness = window_fn, lateness
        windows = window_fn or GlobalWindows()
        self.state = OperatorState(
            uid,
            StrUtf8Coder(),
            windows.get_window_coder(),
            tuple(CellState(c.name, c.kind, c.coder, c.combiner) for c in self.signature.cells),
            not order_free,
            lateness,
            window_identity(windows),
        )
        self.restored: FakeCheckpoint | None = None
        self.run = FakeRun()
        self.outputs: list[Output] = []
        #: The oracle at the cut that was restored, and at the last checkpoint that was looked at.
        self.at_cut: LoopState | None = None
        self.at_checkpoint: LoopState | None = None

    def loop(self, until: int | None, restored: LoopState | None) -> Any:
        return run_event_loop(
            self.fn,
            self.elements,
            until=until,
            restored=restored,
            window_fn=self.window_fn,
            lateness=self.lateness,
        )

    def folded(self, boundary: int | None, rewritten: bool) -> dict[Slot, SnapshotRecord]:
        """What the records say that were emitted until a boundary, without a store."""
        made = [c for c in self.run.checkpoints if _place(c.boundary) <= _place(boundary)]
        before = self.restored.records if self.restored is not None and not rewritten else {}
        records = made[-1].records if made else before
        found = {}
        for slot, record in records.items():
            left: SnapshotRecord | None = record
            if is_over(slot[1], boundary, self.lateness):
                left = left_over(record, boundary)
            if left is not None:
                found[slot] = left
        return found


def _place(boundary: int | None) -> int:
    return DRAINED if boundary is None else boundary


class _Check:
    def __init__(self, stored: StoredHistory, store: CheckpointStore, counts: Counter[str]) -> None:
        self._stored, self._history, self._store = stored, stored.first, store
        self._random, self._deaths = random.Random(stored.seed), random.Random(stored.seed + 1)
        self._counts = counts
        history, example = self._history, stored.example
        self._chain = example if isinstance(example, Chain) else None
        self._operators = [
            _Operator(
                "first", history.program, history.elements, history.order_free, history.aligned,
                history.window_fn, history.lateness,
            )
        ]  # fmt: skip
        if self._chain is not None:
            self._operators.append(
                _Operator(
                    "second", self._chain.second, middle_of(self._chain), self._chain.order_free,
                    True, self._chain.window_fn, 0,
                )
            )  # fmt: skip
        self._storage, self._rewritten = stored.storages[0], False
        self._seen: set[str] = set()
        self._paths: dict[tuple[str, str], str | None] = {}
        # A delta, too, may be in several files.
        sizes = {(s.max_files, s.limits.file_bytes) for s in stored.storages}
        self._bounded = len(sizes) == 1 and sizes.pop()[1] == DEFAULT_LIMITS.file_bytes

    def run(self) -> None:
        cuts = (*self._history.cuts, None)
        self._counts["histories on disk"] += self._stored.on_disk
        for cut, storage in zip(cuts, self._stored.storages, strict=False):
            self._storage = storage
            with storage.applied():
                # A cut within a run is as good as one that was asked for.
                if all(op.aligned for op in self._operators) and self._deaths.random() < 0.3:
                    self._run(cut, dies=True)
                self._run(cut)
        for op in self._operators:
            whole = op.loop(None, None).outputs
            assert canonical(op.outputs) == canonical(whole), (
                f"the outputs of all runs of operator {op.uid!r} together"
            )

    def _run(self, cut: int | None, dies: bool = False) -> None:
        base = plan_restore(self._store, "latest", until=cut, on_fallback="refuse").manifest
        storage = self._storage
        self._rewritten = base is not None and base.key_group_count != storage.key_groups
        self._counts["changes of the number of key groups"] += self._rewritten
        for op in self._operators:
            op.restored = None if base is None else self._read(op, base)
            if op.restored is not None:
                assert op.restored.read is not None
                self._counts["restored records"] += len(op.restored.records)
                self._counts["chunks restored"] += sum(is_chunk(d) for _, d in op.restored.read)
        self._run_operators(cut)
        job = DrivenCheckpoints(
            self._store,
            [op.state for op in self._operators],
            storage.key_groups,
            base_id=None if base is None else base.id,
            max_files=storage.max_files,
            keep=storage.keep,
            last=_place(cut),
            failures=self._random,
            limits=storage.limits,
            inline_threshold=storage.inline_threshold,
            shared_threshold=storage.shared_threshold,
        )
        for op in self._operators:
            op.at_checkpoint = op.at_cut
        self._publish(job, _place(cut), dies)
        self._count_news(job, base)
        newest = self._store.load_latest()
        if dies:
            if newest is not None and (base is None or newest.id != base.id):
                self._go_back_to(newest)
            return
        assert newest is not None
        assert newest.boundary == cut, "the cut is a checkpoint, whatever has happened before it"
        for op in self._operators:
            expected = op.loop(cut, op.at_cut)
            assert canonical(op.run.outputs) == canonical(expected.outputs), (
                f"outputs of operator {op.uid!r} until {cut}"
            )
            op.outputs += op.run.outputs
            op.at_cut = expected.state
            if not op.aligned:
                self._check_state(op, self._read(op, newest), expected.state)

    def _go_back_to(self, newest: CheckpointManifest) -> None:
        """Of what a run has done that died there is what lies before its newest checkpoint."""
        for op in self._operators:
            done = op.loop(newest.boundary, op.at_cut)
            op.outputs += done.outputs
            op.at_cut = done.state
        self._counts["runs that died"] += 1

    # ------------------------------------------------------------------ the operators
    def _run_operators(self, cut: int | None) -> None:
        history = self._history
        first = self._operators[0]
        restored_at = None if first.restored is None else first.restored.boundary
        self._run_operator(first, history.replayed(restored_at), cut)
        if self._chain is None:
            return
        plan = StreamPlan(
            tuple(
                Arrive(tuple((at // 1000 * 1000, *between(cast(Any, row))) for at, _, row in e))
                if isinstance(step, Arrive) and (e := step.elements)
                else step
                for step in first.run.downstream
            )
        )
        streaming = isinstance(history.source, StreamPlan)
        self._run_operator(self._operators[1], plan if streaming else plan.elements, cut)

    def _run_operator(
        self, op: _Operator, source: StreamPlan | Sequence[Element], cut: int | None
    ) -> None:
        history, storage = self._history, self._storage
        op.run = run_faked(
            op.fn,
            source,
            signature=op.signature,
            until=cut,
            every=history.every,
            restored=op.restored,
            time_sorted=not op.order_free,
            rewrite=self._rewritten,
            aligned=op.aligned,
            window_fn=op.window_fn,
            lateness=op.lateness,
            forward=history.forward or self._chain is not None,
            tags=TAGS,
            chaos=replace(
                history.chaos,
                chunk_bytes=storage.limits.chunk_bytes,
                bag_bytes=storage.bag_bytes,
                waiting_bytes=storage.waiting_bytes,
            ),
            key_groups=storage.key_groups,
        )
        for held, number in op.run.records.items():
            self._counts[f"records: {held}"] += number
        self._counts["chunks written"] += sum(is_chunk(data) for _, _, data in op.run.emitted)

    # ------------------------------------------------------------------ the store
    def _publish(self, job: DrivenCheckpoints, last: int, dies: bool) -> None:
        """Gives the records to the writer, and looks at each checkpoint that comes of them."""
        emitted: dict[int, list[tuple[str, int, bytes]]] = {}
        for op in self._operators:
            for group, boundary, data in op.run.emitted:
                emitted.setdefault(boundary, []).append((op.uid, group, data))
        boundaries = sorted({*emitted, last})
        if dies:
            boundaries = boundaries[: self._deaths.randrange(len(boundaries))]
        added = 0
        for number, boundary in enumerate(boundaries):
            # Records of later boundaries may be there before the watermark passes this one.
            while added < len(boundaries) and (added <= number or self._random.random() < 0.2):
                records = emitted.get(boundaries[added], [])
                self._random.shuffle(records)
                for uid, group, data in records:
                    job.add(group, boundaries[added], data, uid)
                added += 1
            job.write(boundary)
            if boundary == last or self._random.random() < 0.7:
                published = [result.id for result in job.commit(boundary)]
                for checkpoint_id in published:
                    manifest = self._store.load_by_id(checkpoint_id)
                    if manifest is not None:  # it may be pruned already
                        self._look_at(manifest)
        self._counts["bundles done again"] += job.failed

    def _look_at(self, manifest: CheckpointManifest) -> None:
        self._counts["checkpoints"] += 1
        self._count_files(manifest)
        for op in self._operators:
            found = self._read(op, manifest)
            expected = op.folded(manifest.boundary, self._rewritten)
            where = f"operator {op.uid!r} at {manifest.boundary}"
            assert found.records == expected, f"{where}: the store has not what was emitted"
            if op.aligned:
                op.at_checkpoint = op.loop(manifest.boundary, op.at_checkpoint).state
                self._check_state(op, found, op.at_checkpoint)

    def _check_state(self, op: _Operator, found: FakeCheckpoint, state: LoopState) -> None:
        saved = state_of(found, op.fn, op.signature, op.window_fn, op.lateness)
        assert comparable(op.program, saved) == comparable(op.program, state), (
            f"state of operator {op.uid!r} at {found.boundary}"
        )

    def _read(self, op: _Operator, manifest: CheckpointManifest) -> FakeCheckpoint:
        """What a restore reads of an operator."""
        assert manifest.key_group_count is not None
        read = ReadGroupFn(self._store, op.state, op.lateness, self._storage.limits)
        records: dict[Slot, SnapshotRecord] = {}
        elements: list[tuple[Slot, bytes]] = []
        for partition in manifest.operators[op.uid].partitions:
            chunks = Chunks()
            for windowed in read.process((manifest.id, partition.partition_id)):
                name, value = windowed.value
                slot = name, windowed.windows[0]
                elements.append((slot, value.record))
                whole = chunks.add(value.record) if is_chunk(value.record) else value.record
                if whole is None:
                    continue
                record = SnapshotRecord.from_bytes(whole)
                assert slot not in records, f"{slot} is there twice"
                group = key_group(record.key, manifest.key_group_count)
                assert group == partition.partition_id, f"{slot} is in another key group"
                records[slot] = record
            assert not len(chunks), "all chunks of a record are there"
        return FakeCheckpoint(manifest.boundary, records, tuple(elements))

    # ------------------------------------------------------------------ what was reached
    def _count_files(self, manifest: CheckpointManifest) -> None:
        counts = self._counts
        for uid, saved in manifest.operators.items():
            groups: dict[str, set[int]] = {}
            for partition in saved.partitions:
                bases = sum(entry.kind == "full" for entry in partition.sidecars)
                counts["bases of several files"] += bases > 1
                deltas = len(partition.sidecars) - bases
                if self._bounded:
                    most = self._storage.max_files
                    assert deltas + 1 <= most, f"{deltas} deltas, and {most} files are allowed"
                for entry in partition.sidecars:
                    if entry.is_shared:
                        groups.setdefault(entry.path or "", set()).add(partition.partition_id)
                        self._count_moves(uid, partition.partition_id, entry)
                        counts["shared slices"] += 1
                        counts["shared bases"] += entry.kind == "full"
                    if entry.path is None:
                        counts["sidecars in the manifest"] += 1
                    elif entry.path not in self._seen:
                        self._seen.add(entry.path)
                        data = pa.BufferReader(self._store.read_sidecar(entry))
                        row_groups = pq.ParquetFile(data).num_row_groups
                        counts["files of several pages"] += row_groups > 1
            counts["files of several key groups"] += sum(len(g) > 1 for g in groups.values())

    def _count_moves(self, uid: str, group: int, entry: SidecarEntry) -> None:
        """A slice that was listed as another file's."""
        name = uid, f"{group} {entry.origin} {entry.rows} {entry.epoch}"
        self._counts["slices moved"] += self._paths.get(name, entry.path) != entry.path
        self._paths[name] = entry.path

    def _count_news(self, job: DrivenCheckpoints, base: CheckpointManifest | None) -> None:
        lengths: dict[tuple[str, int], int] = {}
        if base is not None and not self._rewritten:
            for uid, saved in base.operators.items():
                lengths |= {(uid, p.partition_id): len(p.sidecars) for p in saved.partitions}
        for new in job.news:
            place = new.operator, new.key_group
            length = lengths.get(place, 0)
            self._counts[f"sidecars: {new.entry.kind}"] += 1
            if new.keeps < length:
                self._counts["merges of all files" if new.keeps == 0 else "merges of deltas"] += 1
            lengths[place] = new.keeps + bool(new.keeps or new.entry.rows)


# ---------------------------------------------------------------------------------- strategies


@lru_cache
def storages() -> SearchStrategy[Storage]:
    """How a run stores its checkpoints: nearly always with something tiny."""
    from hypothesis import strategies as st

    def some(default: int, *tiny: int) -> SearchStrategy[int]:
        return st.sampled_from([*tiny, default])

    limits = st.builds(
        Limits,
        chunk_bytes=some(CHUNK_BYTES, 40, 7),
        run_bytes=some(DEFAULT_LIMITS.run_bytes, 60, 200),
        page_rows=some(DEFAULT_LIMITS.page_rows, 1, 2),
        page_bytes=some(DEFAULT_LIMITS.page_bytes, 200),
        file_bytes=some(DEFAULT_LIMITS.file_bytes, 1, 600),
    )
    return st.builds(
        Storage,
        key_groups=st.sampled_from([2, 3, 7, 1, 128]),
        max_files=st.sampled_from([8, 3, 2, 2, 1]),
        inline_threshold=st.sampled_from([0, 0, 0, 65_536]),
        shared_threshold=some(SHARED_THRESHOLD, SHARED_THRESHOLD, 2_500, 0),
        keep=st.sampled_from([_ALL, 3, 1]),
        limits=limits,
        max_inline=some(MAX_INLINE, 3_000),
        shared_file_bytes=some(SHARED_FILE_BYTES, 300),
        spill_bytes=some(SPILL_BYTES, 0, 2),
        bag_bytes=some(BAG_BYTES, 0, 0, 3),
        waiting_bytes=some(WAITING_BYTES, 0, 30),
        # As little as there is here, there would be hardly a delta.
        deltas_of_base=st.sampled_from([1e6, 1e6, lineage._DELTAS_OF_BASE]),
    )


@lru_cache
def stored_histories(*, max_cuts: int = 4, max_size: int = 20) -> SearchStrategy[StoredHistory]:
    """Histories and chains, with a storage for each of their runs.

    Args:
        max_cuts: The greatest number of cuts.
        max_size: The greatest number of elements.
    """
    from hypothesis import strategies as st

    # Of cells only bags are ever written in part.
    drawn: dict[str, Any] = {"kinds": (*KINDS, *["bag"] * 4)}
    # Many checkpoints in a run, and several key groups in each.
    busy = strategies.trickles(max_size, min_size=max_size // 2, names="aabcd")
    some = strategies.data_sets(min_size=1, max_size=max_size)
    drawn |= {"max_cuts": max_cuts, "max_size": max_size, "data": st.one_of(busy, busy, some)}
    examples = st.one_of(histories(**drawn), histories(forward=True, **drawn), chains(**drawn))
    one, runs = storages(), max_cuts + 1
    # The same in all runs but for the number of key groups; or that as well; or all of it anew.
    count = st.sampled_from([2, 3, 7, 1, 128])
    per_run = st.one_of(
        st.builds(
            lambda storage, counts: tuple(replace(storage, key_groups=n) for n in counts),
            one,
            st.lists(count, min_size=runs, max_size=runs),
        ),
        one.map(lambda storage: (storage,) * runs),
        st.tuples(*[one] * runs),
    )
    seeds, on_disk = st.integers(0, 1 << 16), st.sampled_from([False] * 11 + [True])
    seconds = [10, 12.345, 25, 60, None]
    every = st.sampled_from([s if s is None else int(s * _SECOND) for s in seconds])

    def draw_one(draw: DrawFn) -> StoredHistory:
        example, interval = draw(examples), draw(every)
        if isinstance(example, Chain):
            example = replace(example, first=replace(example.first, every=interval))
        else:
            example = replace(example, every=interval)
        return StoredHistory(example, draw(per_run), draw(seeds), draw(on_disk))

    return st.composite(draw_one)()
