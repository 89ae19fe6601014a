"""A runner in a page: the keyed part of an operator, driven through whatever a runner may do.

`run_faked` gives the same as `beam_ckpt.testing.cuts.run_checkpointed` and costs milliseconds, for
there is no pipeline: the wrapper's `KeyedOperator` gets elements and fires of its clock, and
bundles end where chance has it. What is allowed by Beam and happens on some runner happens here, as
`Chaos` has it:

* bundles of any size, of elements and fires of several keys, with the state encoded and decoded at
  their borders, and bundles that fail and are done again;
* timers due at one watermark in any order, at it or behind it, or only when more has come;
* a fire that is stale (the clock has been set anew, or cleared, since), or comes twice, and one
  that takes the clock with it that was set in the meantime;
* restored records after and between the first live elements, and twice while the key is kept;
  records in chunks, of which a bundle may bring some.

The runner checks what Beam asks of an operator: no clock beyond the end of its window; and what the
operators downstream rely on: no record of a cut, and no output of a program that looks forward
only, is dated below the watermark that the operator's holds let through.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import apache_beam as beam
from apache_beam.coders import StrUtf8Coder, VarIntCoder
from apache_beam.coders.coders import BytesCoder, FastPrimitivesCoder
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.window import (
    BoundedWindow,
    GlobalWindows,
    WindowFn,
)
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from beam_ckpt.testing.cuts import coder_of, keyed_cells
from beam_ckpt.testing.event_loop import KeyedCells, Output, Windowing, outputs_of
from beam_ckpt.testing.streams import Advance, Arrive, Element, StreamPlan
from beam_ckpt.transforms.chunks import CHUNK_BYTES, Chunks, cut, is_chunk
from beam_ckpt.transforms.elements import Restored
from beam_ckpt.transforms.keyed_state.clock import BEFORE_ALL, DRAINED, MS, Epochs
from beam_ckpt.transforms.keyed_state.key import BufferCoder, Chunk
from beam_ckpt.transforms.keyed_state.operator import (
    SNAPSHOTS,
    WAITING_BYTES,
    KeyedOperator,
    OperatorConfig,
    needs_buffer,
    saves_again,
)
from beam_ckpt.transforms.signature import Signature, read_signature
from beam_ckpt.transforms.snapshot import APPEND, SnapshotRecord
from beam_ckpt.transforms.windows import is_over, left_over

__all__ = ["Chaos", "FakeCheckpoint", "FakeRun", "run_faked", "state_of"]

_END_OF_TIME = 9_223_372_036_854_775_000
_MAX_BUNDLES = 20_000
Slot = tuple[Hashable, BoundedWindow]


@dataclass(frozen=True)
class Chaos:
    """What a runner makes of its freedom.

    Attributes:
        seed: Of all choices; 0 is a runner that does one thing after the other, each once.
        late_fires: Timers fire when the watermark is above their time, not yet when it is there.
        chunk_bytes: Records of more bytes come and go in chunks.
        bag_bytes: Bags of more bytes have a cell of their own, and are not written whole when
            something is added.
        waiting_bytes: Elements that wait have a cell of their own when they have more bytes.
    """

    seed: int = 0
    late_fires: bool = False
    chunk_bytes: int = CHUNK_BYTES
    bag_bytes: int = 0
    waiting_bytes: int = WAITING_BYTES


@dataclass(frozen=True)
class FakeCheckpoint:
    """A checkpoint's records by key and window, as they would be in its files.

    Attributes:
        boundary: The cut in microseconds; None: the input was drained.
        records: The newest record of each key and window; tombstones are left out.
        read: What a restore has read of it: records, or chunks of them. None: the records as they
            are here.
    """

    boundary: int | None
    records: dict[Slot, SnapshotRecord]
    read: tuple[tuple[Slot, bytes], ...] | None = None


@dataclass
class FakeRun:
    """What one run gave.

    Attributes:
        outputs: In the order in which they were made.
        records: How many records of cuts were made, by what they hold.
        written: All of them, with their boundaries, in order of these.
        emitted: The same as they leave the operator, in chunks where they are large: key group,
            boundary and bytes.
        checkpoints: One for each boundary at which a record came, in order; the last boundary of
            the run is always among them.
        left: Slots of which the runner still holds state at the end.
        downstream: What an operator behind the main output sees of it: outputs by bundle, and the
            watermark that this one's holds let through, with a millisecond to spare.
    """

    outputs: list[Output] = field(default_factory=list)
    records: Counter[str] = field(default_factory=Counter)
    written: list[tuple[int, bytes]] = field(default_factory=list)
    emitted: list[tuple[int, int, bytes]] = field(default_factory=list)
    checkpoints: list[FakeCheckpoint] = field(default_factory=list)
    left: list[Slot] = field(default_factory=list)
    downstream: list[Arrive | Advance] = field(default_factory=list)


class _Bag:
    """A runner's bag or set: encoded values, so that no object is shared over a bundle's end."""

    def __init__(self, coder: Any, distinct: bool = False) -> None:
        self._coder, self._distinct = coder, distinct
        self.encoded: tuple[bytes, ...] = ()

    def read(self) -> list[Any]:
        return [self._coder.decode(data) for data in self.encoded]

    def add(self, value: Any) -> None:
        data = self._coder.encode(value)
        if not (self._distinct and data in self.encoded):
            self.encoded = (*self.encoded, data)

    def clear(self) -> None:
        self.encoded = ()


class _Clock:
    """A runner's timers of one family and key, by dynamic tag."""

    def __init__(self, last: int) -> None:
        self._last = last
        self.set_for: dict[str, int] = {}
        # Whatever it was set to once, which a runner may still deliver.
        self.once: set[tuple[str, int]] = set()

    def set(self, timestamp: Timestamp, dynamic_timer_tag: str = "") -> None:
        at = int(timestamp.micros)
        assert at <= self._last, f"the clock is set to {at}, its window is over at {self._last}"
        self.set_for[dynamic_timer_tag] = at
        self.once.add((dynamic_timer_tag, at))

    def clear(self, dynamic_timer_tag: str = "") -> None:
        self.set_for.pop(dynamic_timer_tag, None)


class _Cells:
    """What the runner holds for one key and window."""

    def __init__(
        self, signature: Signature, value_coder: Any, last: int, saves_again: bool
    ) -> None:
        self.control, self.buffer = _Bag(BytesCoder()), _Bag(BufferCoder(value_coder))
        self.growing = [
            _Bag(cell.coder, distinct=cell.kind == "set")
            for cell in signature.cells
            if cell.kind in ("bag", "set", "ordered_list")
        ]
        if saves_again:
            self.growing += [_Bag(cell.coder) for cell in signature.cells if cell.kind == "bag"]
        self.clock = _Clock(last)

    @property
    def bags(self) -> list[_Bag]:
        return [self.control, self.buffer, *self.growing]

    def save(self) -> tuple[list[tuple[bytes, ...]], dict[str, int]]:
        return [bag.encoded for bag in self.bags], dict(self.clock.set_for)

    def restore(self, saved: tuple[list[tuple[bytes, ...]], dict[str, int]]) -> None:
        for bag, encoded in zip(self.bags, saved[0], strict=True):
            bag.encoded = encoded
        self.clock.set_for = dict(saved[1])


@dataclass(frozen=True)
class _Live:
    """An element or a restored record on its way to a key."""

    slot: Slot
    timestamp: int
    value: Any


class _Again(_Live):
    """A restored record that comes a second time, which some runners do."""


@dataclass(frozen=True)
class _Saved:
    """A record of a cut, and the parts in which it came."""

    slot: Slot
    boundary: int
    key_group: int
    record: bytes
    parts: tuple[bytes, ...]


@dataclass(frozen=True)
class _Fire:
    """A fire of a key's clock."""

    slot: Slot
    tag: str
    at: int


def run_faked(
    fn: beam.DoFn,
    source: Sequence[Element] | StreamPlan,
    *,
    signature: Signature | None = None,
    until: int | None = None,
    every: int | None = None,
    restored: FakeCheckpoint | None = None,
    time_sorted: bool = False,
    rewrite: bool = False,
    aligned: bool = True,
    window_fn: WindowFn | None = None,
    lateness: int = 0,
    forward: bool = False,
    tags: Sequence[str] = (),
    chaos: Chaos | None = None,
    key_groups: int = 7,
) -> FakeRun:
    """Runs `fn` as an operator of `(str, int)` would be run.

    Args:
        fn: The author's DoFn.
        source: Elements for a bounded input, in any order; or a plan for an unbounded one.
        signature: Of `fn`, where it has been read.
        until: The cut, microseconds.
        every: The interval of checkpoints, microseconds.
        restored: The checkpoint to go on from.
        time_sorted: As the operator's.
        rewrite: The number of key groups has changed, so that all state is saved again.
        aligned: As `alignment="exactly_once"`.
        window_fn: Windows of the input; the global one by default.
        lateness: Their allowed lateness, microseconds.
        forward: `fn` has no outputs dated before its event, so none may be late downstream.
        tags: Of the tagged outputs.
        chaos: What the runner makes of its freedom; by default nothing.
        key_groups: How many there are.
    """
    runner = _Runner(
        fn, signature or read_signature(fn), until, every, restored, time_sorted, rewrite, aligned,
        window_fn or GlobalWindows(), lateness, isinstance(source, StreamPlan), forward, tags,
        chaos or Chaos(), key_groups,
    )  # fmt: skip
    steps = source.steps if isinstance(source, StreamPlan) else (Arrive(tuple(source)),)
    return runner.run(steps)


class _Runner:
    def __init__(
        self,
        fn: beam.DoFn,
        signature: Signature,
        until: int | None,
        every: int | None,
        restored: FakeCheckpoint | None,
        time_sorted: bool,
        rewrite: bool,
        aligned: bool,
        window_fn: WindowFn,
        lateness: int,
        streaming: bool,
        forward: bool,
        tags: Sequence[str],
        chaos: Chaos,
        key_groups: int,
    ) -> None:
        self._signature = signature
        self._window_fn, self._lateness = window_fn, lateness
        self._windowing = Windowing(window_fn, lateness)
        self._restored, self._rewrite, self._forward = restored, rewrite, forward
        self._chaos, self._random = chaos, random.Random(chaos.seed)
        self._calm = chaos.seed == 0
        main = fn.get_type_hints().simple_output_type("main")
        self._value_coder = VarIntCoder()
        self._epochs = Epochs(every, until)
        config = OperatorConfig(
            uid="faked",
            key_coder=StrUtf8Coder(),
            value_coder=self._value_coder,
            window_coder=window_fn.get_window_coder(),
            output_coders=(
                (None, coder_of(main)),
                *((tag, FastPrimitivesCoder()) for tag in tags),
            ),
            epochs=self._epochs,
            boundary=None if restored is None else restored.boundary,
            restoring=restored is not None,
            rewrite=rewrite,
            key_groups=key_groups,
            time_sorted=time_sorted,
            bounded=not streaming,
            windows=window_fn != GlobalWindows(),
            lateness=lateness,
            aligned=aligned,
            fires_once=self._calm,
            one_bundle=not streaming and chaos.seed % 2 == 0,
            chunk_bytes=chaos.chunk_bytes,
            bag_bytes=chaos.bag_bytes,
            waiting_bytes=chaos.waiting_bytes,
        )
        self._operator = KeyedOperator(fn, self._signature, config)
        self._buffers = needs_buffer(self._signature, config)
        self._saves_again = saves_again(config)
        self._slots: dict[Slot, _Cells] = {}
        self._watermark = BEFORE_ALL
        # The watermark downstream: held by every clock that is set.
        self._out = BEFORE_ALL
        self._run = FakeRun()
        self._records: dict[int, dict[Slot, SnapshotRecord]] = {}

    # ------------------------------------------------------------------ the run
    def run(self, steps: Sequence[Arrive | Advance]) -> FakeRun:
        records = self._saved_records()
        self._random.shuffle(records)
        again = [
            _Again(r.slot, r.timestamp, r.value)
            for r in records
            if not self._calm and self._random.random() < 0.2
        ]
        waiting = [*records, *again]
        held_until = 0 if self._calm or not waiting else self._random.randrange(len(steps) + 1)
        wanted = BEFORE_ALL
        self._operator.setup()
        for number, step in enumerate(steps):
            if number >= held_until and waiting:
                self._deliver(waiting)
                waiting = []
            if isinstance(step, Arrive):
                arriving = [live for element in step.elements for live in self._in_windows(element)]
                some = self._random.randrange(len(waiting) + 1) if waiting else 0
                arriving += waiting[:some]
                waiting = waiting[some:]
                if not self._calm:
                    self._random.shuffle(arriving)
                self._deliver(arriving)
            else:
                wanted = max(wanted, step.watermark)
            if not waiting:
                self._advance(wanted, lazy=True)
        self._deliver(waiting)
        self._advance(_END_OF_TIME, lazy=False)
        self._operator.teardown()
        self._publish()
        for slot, cells in self._slots.items():
            chunks = [item for item in cells.buffer.read() if isinstance(item, Chunk)]
            assert not chunks, f"chunks of {slot} are left, and its record has come"
            if any(bag.encoded for bag in cells.bags):
                self._run.left.append(slot)
        return self._run

    def _saved_records(self) -> list[_Live]:
        if self._restored is None:
            return []
        if self._restored.read is not None:
            return [_Live(slot, BEFORE_ALL, Restored(data)) for slot, data in self._restored.read]
        boundary, found = self._restored.boundary, []
        for slot, saved in self._restored.records.items():
            record: SnapshotRecord | None = saved
            if is_over(slot[1], boundary, self._lateness):
                record = left_over(saved, boundary)
            if record is not None:
                for data in cut(record.to_bytes(), self._chaos.chunk_bytes):
                    found.append(_Live(slot, BEFORE_ALL, Restored(data)))
        return found

    def _in_windows(self, element: Element) -> Iterable[_Live]:
        timestamp, key, value = element
        for window in self._windowing.assign(timestamp, (key, value)):
            yield _Live((key, window), timestamp, value)

    def _deliver(self, elements: Sequence[_Live]) -> None:
        at = 0
        while at < len(elements):
            size = 1 if self._calm else self._random.choice([1, 2, 5, 100])
            events: list[_Live | _Fire] = [*elements[at : at + size]]
            at += size
            if not self._calm:
                fires = self._due() + self._stale()
                self._random.shuffle(fires)
                for fire in fires[: self._random.randrange(3)]:
                    events.insert(self._random.randrange(len(events) + 1), fire)
            self._bundle(events)

    def _advance(self, watermark: int, lazy: bool) -> None:
        """Moves the watermark, and fires timers until none is due, or until it had enough."""
        self._watermark = max(self._watermark, watermark)
        self._hold()
        for _ in range(_MAX_BUNDLES):
            due = self._due()
            if not due or (lazy and not self._calm and self._random.random() < 0.1):
                return
            if self._calm:
                self._bundle([min(due, key=lambda fire: (fire.at, str(fire.slot), fire.tag))])
                continue
            fires = due + self._stale()
            self._random.shuffle(fires)
            chosen = fires[: self._random.choice([1, 1, 2, 5, 100])]
            if self._random.random() < 0.1:
                chosen += chosen[:1]  # twice
            self._bundle([*chosen])
        raise AssertionError(f"{_MAX_BUNDLES} bundles, and the clocks are still being set")

    def _due(self) -> list[_Fire]:
        strictly = self._chaos.late_fires and self._watermark < _END_OF_TIME
        return [
            _Fire(slot, tag, at)
            for slot, cells in self._slots.items()
            for tag, at in cells.clock.set_for.items()
            if at < self._watermark or (at == self._watermark and not strictly)
        ]

    def _stale(self) -> list[_Fire]:
        if self._random.random() < 0.8:
            return []
        return [
            _Fire(slot, tag, at)
            for slot, cells in self._slots.items()
            for tag, at in sorted(cells.clock.once)
            if at <= self._watermark and self._random.random() < 0.2
        ]

    # ------------------------------------------------------------------ one bundle
    def _bundle(self, events: Sequence[_Live | _Fire]) -> None:
        for event in events:
            if event.slot not in self._slots:
                self._slots[event.slot] = self._new_cells(event.slot)
        touched = {event.slot: self._slots[event.slot] for event in events}
        before = {slot: cells.save() for slot, cells in touched.items()}
        if not self._calm and self._random.random() < 0.1:
            self._attempt(events[: self._random.randrange(len(events) + 1)])
            for slot, cells in touched.items():  # the bundle failed: nothing of it counts
                cells.restore(before[slot])
        made = self._attempt(events)
        for output in made:
            self._take(output)
        main = [o for o in made if isinstance(o, Output) and o.tag is None]
        if main:
            rows = tuple((o.timestamp, None, o.value) for o in main)
            self._run.downstream.append(Arrive(rows))
        self._hold()

    def _new_cells(self, slot: Slot) -> _Cells:
        last = self._windowing.expiry(slot[1])
        last = DRAINED if last is None else last
        return _Cells(self._signature, self._value_coder, last, self._saves_again)

    def _attempt(self, events: Sequence[_Live | _Fire]) -> list[Output | _Saved]:
        made: list[Output | _Saved] = []
        self._operator.start_bundle()
        chunks = Chunks()
        parts: list[bytes] = []
        for event in events:
            key, window = event.slot
            cells = self._slots[event.slot]
            known = cells.control.encoded or cells.buffer.encoded
            if isinstance(event, _Again) and not known:
                continue  # nothing is kept of a key that is done, so it cannot know
            handles = (cells.control, *cells.growing, cells.buffer, cells.clock)
            outputs: Iterable[Any]
            if isinstance(event, _Live):
                element, at = (key, event.value), event.timestamp
                windowed = WindowedValue(element, Timestamp(micros=at), (window,))
                if not self._buffers:
                    handles = (cells.control, *cells.growing, cells.clock)
                outputs = self._operator.process(element, windowed, handles)
            else:
                at = event.at
                # Whatever it is set to by now is lost, unless it is set again.
                cells.clock.set_for.pop(event.tag, None)
                outputs = self._operator.on_clock(key, at, window, handles)
            for output in outputs:
                if isinstance(output, TaggedOutput) and output.tag == SNAPSHOTS:
                    key_group, (boundary, record) = output.value.value
                    parts.append(record)
                    if is_chunk(record):
                        record = chunks.add(record)
                    if record is None:
                        continue
                    made.append(_Saved(event.slot, boundary, key_group, record, tuple(parts)))
                    parts = []
                else:
                    made += outputs_of(output, at, window, self._windowing)
        assert not len(chunks), "all chunks of a record come in one bundle"
        self._operator.flush()
        return made

    def _take(self, made: Output | _Saved) -> None:
        if isinstance(made, Output):
            self._run.outputs.append(made)
            if self._forward:
                at = made.timestamp // MS * MS
                assert at >= self._out, f"{made} is late downstream: the watermark is {self._out}"
            return
        boundary, slot = made.boundary, made.slot
        assert boundary >= self._out, f"a record of the cut at {boundary} is late: {self._out}"
        records = self._records.setdefault(boundary, {})
        assert slot not in records, f"two records of {slot} for the cut at {boundary}"
        records[slot] = SnapshotRecord.from_bytes(made.record)
        self._run.emitted += ((made.key_group, boundary, part) for part in made.parts)

    def _hold(self) -> None:
        held = min(
            (at for cells in self._slots.values() for at in cells.clock.set_for.values()),
            default=self._watermark,
        )
        out = min(held, self._watermark)
        if out > self._out:
            self._out = out
            self._run.downstream.append(Advance(out - MS))

    # ------------------------------------------------------------------ checkpoints
    def _publish(self) -> None:
        kept: dict[Slot, SnapshotRecord] = {}
        if self._restored is not None and not self._rewrite:
            kept.update(self._restored.records)
        last = self._epochs.last
        for boundary in sorted({*self._records, last}):
            for slot, record in self._records.get(boundary, {}).items():
                self._run.records[_holding(record)] += 1
                self._run.written.append((boundary, record.to_bytes()))
                kept[slot] = record.onto(kept.get(slot))
            for slot, record in kept.items():
                assert record.patch is None, f"what {slot} stands on is not in the chain: {record}"
            found = {slot: record for slot, record in kept.items() if not record.deleted}
            if not self._calm and self._random.random() < 0.3:
                kept = dict(found)  # a full sidecar has no tombstones
            at = None if boundary == DRAINED else boundary
            self._run.checkpoints.append(FakeCheckpoint(at, found))


def _holding(record: SnapshotRecord) -> str:
    if record.patch is None:
        return "deleted" if record.deleted else "whole"
    return "items added" if APPEND in record.patch else "some cells"


def state_of(
    checkpoint: FakeCheckpoint,
    fn: beam.DoFn,
    signature: Signature,
    window_fn: WindowFn | None = None,
    lateness: int = 0,
) -> dict[Slot, KeyedCells]:
    """A checkpoint's state as the oracle has it; see `beam_ckpt.testing.cuts.saved_state`."""
    state = {
        slot: keyed_cells(record, slot[1], checkpoint.boundary, fn, signature, window_fn, lateness)
        for slot, record in checkpoint.records.items()
    }
    return {slot: kept for slot, kept in state.items() if kept != KeyedCells()}
