"""One operator's work on its keys: elements, the clock, outputs, snapshots and restores.

The author's event-time timers, the ends of epochs, the buffered elements and the gate of a
restored run share one clock per key. Every fire of it is a wake-up: it means only that the
watermark is at least the time it was set for. What is due is then worked through in one order (the
cut at B, then timers, then elements, by event time), which makes it the same on every runner.

`KeyedOperator.process` is the hottest code of this package; it allocates and looks up nothing that
the case does not need.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import apache_beam as beam
from apache_beam.coders import coders
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.window import GlobalWindow, TimestampedValue
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import PANE_INFO_UNKNOWN, WindowedValue

from beam_ckpt.errors import (
    InvalidCheckpointError,
    PipelineRefusedError,
    StateIncompatibleError,
    WatermarkError,
)
from beam_ckpt.keygroups import key_group
from beam_ckpt.transforms.chunks import CHUNK_BYTES, cut, is_chunk
from beam_ckpt.transforms.elements import Restored
from beam_ckpt.transforms.fast_state_cache import correct_state_cache
from beam_ckpt.transforms.first_touch import SavedRecords
from beam_ckpt.transforms.graph import NO_EVENT_TIME
from beam_ckpt.transforms.keyed_state.cells import BagCell
from beam_ckpt.transforms.keyed_state.clock import BEFORE_ALL, DRAINED, MS, NO_EXPIRY, Epochs
from beam_ckpt.transforms.keyed_state.control import EVERY_CELL, Control
from beam_ckpt.transforms.keyed_state.key import (
    SAVED,
    SPILL_BYTES,
    BufferCoder,
    KeyState,
    is_small,
)
from beam_ckpt.transforms.metrics import counter
from beam_ckpt.transforms.signature import Call, Signature, TimerDomain
from beam_ckpt.transforms.snapshot import REPLACE, CarriedOutput, SavedTimer, SnapshotRecord

__all__ = [
    "DRAIN",
    "SNAPSHOTS",
    "WAITING_BYTES",
    "KeyedOperator",
    "OperatorConfig",
    "needs_buffer",
    "never_waits",
    "saves_again",
]

#: Tag of the output that carries snapshot records, whole or in chunks: (key group, (boundary in µs,
#: bytes)).
SNAPSHOTS = "beam_ckpt_snapshots"
#: In place of the key group: no record, but that the end of the stream closed this epoch.
DRAIN = -1
#: Events worked through in one wake-up; the clock is set again for the rest, so bundles stay small.
_EVENTS_PER_WAKE = 10_000


#: Encoded, in bytes: what a bag may have to be kept in the control cell, and to be written whole
#: when something is added.
BAG_BYTES = 256
#: Encoded, in bytes: what the elements of a key that wait may have to be kept in the control cell.
WAITING_BYTES = 2048


@dataclass(frozen=True)
class OperatorConfig:
    """What the workers have to know of one operator; pickled to the workers with the DoFn.

    Attributes:
        uid: The operator's identity.
        key_coder: Of the input's keys. `value_coder`: of the input's values, as the author sees it.
        window_coder: Of the input's windows.
        output_coders: By tag (`None`: the main output), for outputs beyond the cut.
        epochs: The run's boundaries.
        boundary: The boundary restored at, µs; `None` for none (a fresh start or a drained input).
        restoring: Whether saved records come down the input.
        windows: Whether the input is in other windows than the global one.
        lateness: Allowed lateness of the input's windows, in microseconds.
        late: What becomes of elements below the boundary: ``"drop"`` or ``"reprocess"``.
        marks_drained: Whether the end of the input is the drain of a stream, to be told.
        fires_once: Whether the runner fires a timer at most once for each time that it was set.
        one_bundle: Whether all of the input is in one bundle, the first there is, so that a key
            that is new in it has nothing at the runner: its cell is not read, but only added to,
            which costs the SDK's state cache nothing. And a saved record that nothing is due of
            stays unread until its key is touched.
        fast_state_cache: Whether to correct how Beam's state cache measures, if that can be.
        saved: The saved records by key, for an operator whose elements cannot wait for theirs.
        on_missing: What becomes of saved timers whose family the DoFn has no more: ``"error"`` or
            ``"drop"``.
        aligned: Whether elements wait for their epoch. Otherwise they count in every checkpoint
            from their own epoch's on, and maybe in earlier ones.
        rewrite: Whether every restored key has to be saved again at the first boundary.
        key_groups: Number of key groups.
        time_sorted: Whether elements are given in event-time order per key.
        bounded: Whether the input is bounded.
        chunk_bytes: Records of more bytes leave in chunks.
        bag_bytes: A bag whose items have more bytes has a cell of its own, and is not written again
            when some are added.
        waiting_bytes: Elements that wait are in a cell of their own when they have more bytes.
    """

    uid: str
    key_coder: Any
    value_coder: Any
    window_coder: Any
    output_coders: tuple[tuple[str | None, Any], ...]
    epochs: Epochs
    boundary: int | None
    restoring: bool
    rewrite: bool
    key_groups: int
    time_sorted: bool
    bounded: bool
    windows: bool = False
    lateness: int = 0
    late: Literal["drop", "reprocess"] = "drop"
    on_missing: Literal["error", "drop"] = "error"
    aligned: bool = True
    marks_drained: bool = False
    chunk_bytes: int = CHUNK_BYTES
    bag_bytes: int = BAG_BYTES
    waiting_bytes: int = WAITING_BYTES
    fires_once: bool = False
    one_bundle: bool = False
    fast_state_cache: bool = False
    saved: SavedRecords | None = None


def never_waits(config: OperatorConfig) -> bool:
    """Whether an element is processed when it comes, but for one whose saved state is to come."""
    return not config.time_sorted and (config.epochs.every is None or not config.aligned)


def needs_buffer(signature: Signature, config: OperatorConfig) -> bool:
    """Whether elements can have to wait, or values be too large for the control cell."""
    return (
        config.restoring
        or not never_waits(config)
        or not all(is_small(cell.coder) for cell in signature.packed)
    )


def saves_again(config: OperatorConfig) -> bool:
    """Whether there can be a record of a key and then another: a bag's new items have a cell."""
    return config.restoring or config.epochs.every is not None


class KeyedOperator:
    """Runs the author's DoFn over the keys of one worker, bundle by bundle."""

    def __init__(self, fn: beam.DoFn, signature: Signature, config: OperatorConfig) -> None:
        # Everything that the per-element path needs is looked up here, once.
        self._fn, self._signature, self._config = fn, signature, config
        epochs = config.epochs
        self._author_process = getattr(fn, signature.process.method)
        self._callbacks = tuple(getattr(fn, call.method) for call in signature.callbacks)
        self._combine_fns = [c.combine_fn for c in signature.cells if c.kind == "combining"]
        self._contexts = dict(signature.process.contexts)
        self._setup_contexts: dict[Any, Any] = {}
        self._bundle_contexts: dict[Any, Any] = {}
        self._boundary = BEFORE_ALL if config.boundary is None else config.boundary
        self._until = DRAINED if epochs.until is None else epochs.until
        self._has_until = epochs.until is not None
        # Can an output be at or beyond the open cut? Not where the only cut is the drained end.
        self._may_carry = epochs.every is not None or self._has_until
        self._output_coders = dict(config.output_coders)
        # Elements below the boundary have been applied, so the watermark counts as being there;
        # in sorted order those of the boundary's own millisecond still wait for each other.
        self._floor = self._boundary - (MS if config.time_sorted else 0)
        if config.boundary is None:
            self._floor = BEFORE_ALL
        self._always_ready = never_waits(config)
        self._buffers = needs_buffer(signature, config)
        self._buffer_coder = BufferCoder(config.value_coder)
        self._keeps_unread = config.one_bundle and not config.rewrite and config.saved is None
        # Until the bundle of the elements is over; in a later one, if there is any, cells are read.
        self._nothing_before = config.one_bundle
        # Records that this bundle has left to the first touch of their keys.
        self._unread: dict[Any, bytes] = {}
        self._drops_replayed = config.late == "drop"
        # Below it is what a cut in event time has applied, or cannot date at all.
        self._dated_from = self._boundary
        if self._may_carry:
            self._dated_from = max(self._boundary, BEFORE_ALL + 1)
        self._families: dict[tuple[str, str], int] = {
            family: i
            for i, family in enumerate(zip(signature.timers, signature.domains, strict=True))
        }
        self._keeps_pane = bool(signature.process.pane or signature.process.windowed)
        self._tie_coder = config.value_coder if config.time_sorted else None
        self._element_names = signature.process.element
        self._timestamp_names = signature.process.timestamp
        # What comes with an element and cannot be kept: side inputs, then the bundle's finalizer.
        process = signature.process
        self.sides: Sequence[Any] = ()
        self.sides_of_element = len(signature.side_inputs) + len(process.finalizer[:1])
        self._given = (*process.sides, *((name, -1) for name in process.finalizer))
        self._saves_again = saves_again(config)
        self._packed_cells = len(signature.packed)
        self._windows, self._aligned = config.windows, config.aligned
        self._sorted = config.time_sorted
        self._has_wall_timers = "processing" in signature.domains
        # At the last boundary of a bounded run a key is done.
        self._ends = config.bounded and not self._has_wall_timers
        self._marks_drained = config.marks_drained and not config.windows
        # Of this bundle: whether the stream has ended, and the cuts that were made.
        self._ended = False
        self._cut: set[int] = set()
        # By key, or by key and window.
        self._keys: dict[Any, KeyState] = {}
        self._replayed = counter("elements_dropped_as_replayed")
        self._late = counter("elements_late")
        self._expired = counter("elements_dropped_as_expired")
        self._beyond = counter("elements_beyond_until")
        self._buffered = counter("elements_buffered")
        self._restored = counter("keys_restored")
        self._ignored = counter("restored_records_ignored")
        self._saved = counter("keys_saved")
        self._carried = counter("outputs_carried")

    def setup(self) -> None:
        """Sets up what the author's DoFn gets from Beam."""
        if self._config.fast_state_cache:
            correct_state_cache()
        for combine_fn in self._combine_fns:
            combine_fn.setup()
        self._setup_contexts = self._enter(beam.DoFn.SetupContextParam)

    def teardown(self) -> None:
        """The inverse of `setup`."""
        self._exit(self._setup_contexts)
        for combine_fn in self._combine_fns:
            combine_fn.teardown()

    def start_bundle(self) -> None:
        """Forgets the keys of the bundle before."""
        self._keys, self._unread = {}, {}
        self._ended, self._cut = False, set()
        if self._contexts:
            self._bundle_contexts = self._enter(beam.DoFn.BundleContextParam)

    def flush(self) -> None:
        """Writes the keys of this bundle back to the runner."""
        epochs, two_clocks = self._config.epochs, self._config.bounded
        watched: set[int] = set()
        for state in self._keys.values():
            watches_end = False
            if self._marks_drained:
                # One key of each open epoch in the bundle is enough.
                state.settle()
                opened = state.control.open
                watches_end = opened is not None and opened not in watched
                if opened is not None:
                    watched.add(opened)
            state.flush(epochs, two_clocks, watches_end, self._config.fires_once)
            state.release()
        if self._keys or self._unread:
            self._nothing_before = False
        self._keys, self._unread = {}, {}
        if self._contexts:
            self._exit(self._bundle_contexts)

    def drained(self) -> Iterator[Any]:
        """At the end of a bundle: tells the committer which epochs the end of the stream closed."""
        if self._ended and self._cut:
            boundary = min(self._cut)
            yield TaggedOutput(
                SNAPSHOTS,
                WindowedValue(
                    (DRAIN, (boundary, b"")),
                    Timestamp(micros=boundary),
                    (GlobalWindow(),),
                    PANE_INFO_UNKNOWN,
                ),
            )

    def _enter(self, kind: Any) -> dict[Any, Any]:
        wanted = [param for param in self._contexts.values() if isinstance(param, kind)]
        return {param: param.create_and_enter() for param in dict.fromkeys(wanted)}

    def _exit(self, contexts: dict[Any, Any]) -> None:
        for manager, _ in contexts.values():
            manager.__exit__(None, None, None)
        contexts.clear()

    # ------------------------------------------------------------------ elements
    def process(self, element: Any, windowed: Any, runners: Sequence[Any]) -> Iterable[Any]:
        """One element, live or restored; returns its outputs.

        `runners` is what the runner gives: control, bags and sets, the buffer if this operator has
        one, the clock, and that of processing time if the DoFn has such timers. Behind bags and
        sets there is a cell for what is new in each bag, if that can matter (`saves_again`).
        """
        key, value = element
        slot = (key, windowed.windows[0]) if self._windows else key
        try:
            state = self._keys.get(slot)
        except TypeError as error:
            raise StateIncompatibleError(
                f"operator {self._config.uid!r}: a key of type {type(key).__name__} cannot be "
                "hashed, and state is looked up by key. What to do: key by a tuple, a string or "
                "another hashable type."
            ) from error
        if state is None:
            unread = self._keeps_unread and type(value) is Restored
            if unread and self._keep(slot, value.record, runners[0]):
                return ()
            known = self._known(slot) if self._nothing_before else None
            state = self._load(slot, key, windowed.windows[0], runners, self._buffers, known)
            if state.kept is not None:
                first = list(self._restore_kept(state))
                return chain(first, self.process(element, windowed, runners))
        memory = state.control
        timestamp: int = windowed.timestamp_micros
        if type(value) is Restored:
            return self._restore(state, value)
        if timestamp < self._dated_from:
            if timestamp <= BEFORE_ALL and (self._may_carry or self._drops_replayed):
                self._refuse_undated()
            if self._drops_replayed:
                self._replayed.inc()
                return ()
            self._late.inc()
        if timestamp >= self._until and self._has_until:
            self._beyond.inc()
            return ()
        if memory.floor > state.expiry:
            self._expired.inc()
            return ()
        if not (self._always_ready and memory.live):
            ready = self._ready(timestamp, memory.live)
            # To be sorted, an element waits in any case: for those that come with it, and so that
            # what it sets in the past fires before the next of them.
            if not memory.live or ready > memory.floor or self._sorted:
                self._buffered.inc()
                pane = windowed.pane_info if self._keeps_pane else None
                state.buffer(timestamp, value, pane, ready)
                return ()
        if state.changed:
            state.settle()
        state.now = timestamp
        if memory.open is None or not self._aligned:
            state.next_open = self._config.epochs.end_of(
                timestamp if timestamp > memory.floor else memory.floor
            )
        arguments = state.kwargs.get("process")
        if arguments is None:
            arguments = self._arguments(state, self._signature.process)
        for name in self._timestamp_names:
            arguments[name] = windowed.timestamp
        if self._keeps_pane:
            self._give_pane(arguments, windowed)
        for name, place in self._given:
            arguments[name] = self.sides[place]
        if self._element_names:
            for name in self._element_names:
                arguments[name] = element
            outputs = self._author_process(**arguments)
        else:
            outputs = self._author_process(element, **arguments)
        if outputs is None:
            return ()
        if isinstance(outputs, (str, bytes, dict)):
            self._refuse_outputs(outputs)
        if self._may_carry:
            return self._watch(state, outputs)
        return outputs  # type: ignore[no-any-return]

    def restore_at_touch(
        self, element: Any, windowed: Any, runners: Sequence[Any]
    ) -> Sequence[Any]:
        """Restores an element's key before it, for what cannot wait; returns carried outputs.

        The record comes down the input as well, before the gate: it is ignored then, which
        `Control.gated` is for.
        """
        saved = self._config.saved
        key, value = element
        window = windowed.windows[0]
        slot = (key, window) if self._windows else key
        if saved is None or type(value) is Restored or not isinstance(slot, Hashable):
            return ()
        state = self._keys.get(slot)
        if state is None:
            known = self._known(slot) if self._nothing_before else None
            state = self._load(slot, key, window, runners, known=known)
        if state.control.live:
            return ()
        record = saved.find(key, window)
        if record is None:
            state.control.live = True
            return ()
        state.control.gated = True
        return list(self._restore(state, Restored(record)))

    def _known(self, slot: Any) -> list[bytes]:
        """What a key that an element is the first to touch has at the runner, if all is known."""
        kept = self._unread.pop(slot, None)
        return [] if kept is None else [kept]

    def _load(
        self,
        slot: Any,
        key: Any,
        window: Any,
        runners: Sequence[Any],
        buffers: bool = True,
        known: list[bytes] | None = None,
    ) -> KeyState:
        config = self._config
        control, *cells = runners
        wall_clock = cells.pop() if self._has_wall_timers else None
        clock = cells.pop()
        buffer = cells.pop() if buffers else None
        expiry = NO_EXPIRY
        if config.windows:
            expiry = window.max_timestamp().micros + config.lateness
            expiry -= expiry % MS  # a runner's clock has whole milliseconds
        state = self._keys[slot] = KeyState(
            key,
            window,
            control,
            known,
            buffer,
            self._buffer_coder,
            config.waiting_bytes,
            config.bag_bytes,
            clock,
            wall_clock,
            self._floor,
            not config.restoring,
            expiry,
            self._signature.cells,
            cells,
            self._packed_cells,
            self._signature.domains,
        )
        return state

    def _ready(self, timestamp: int, live: bool = True) -> int:
        """When an element may be processed: at its own millisecond, or at its epoch's start."""
        if self._config.time_sorted:
            ready = timestamp - timestamp % MS
        elif self._always_ready:
            ready = BEFORE_ALL
        else:
            ready = self._config.epochs.start_of(timestamp)
        return ready if live or ready > BEFORE_ALL + MS else BEFORE_ALL + MS

    def _arguments(self, state: KeyState, call: Call) -> dict[str, Any]:
        """The arguments of one of the author's methods that stay the same for a key and bundle."""
        arguments: dict[str, Any] = dict(call.static)
        for name, index in call.states:
            arguments[name] = state.cells[index]
        for name, index in call.timers:
            arguments[name] = state.timers[index]
        for name in call.key:
            arguments[name] = state.key
        for name in call.window:
            arguments[name] = state.window
        for name, param in call.contexts:
            entered = self._setup_contexts.get(param) or self._bundle_contexts[param]
            arguments[name] = entered[1]
        state.kwargs[call.method] = arguments
        return arguments

    def _give_pane(self, arguments: dict[str, Any], windowed: Any) -> None:
        process = self._signature.process
        for name in process.pane:
            arguments[name] = windowed.pane_info
        for name in process.windowed:
            arguments[name] = windowed

    def _refuse_undated(self) -> None:
        raise PipelineRefusedError(
            f"operator {self._config.uid!r} got an element without a timestamp (it is at "
            "MIN_TIMESTAMP) in a run that cuts, or was cut, by event time: it would count as older "
            f"than every cut, and be dropped as applied after a restore. {NO_EVENT_TIME}."
        )

    def _refuse_outputs(self, outputs: Any) -> None:
        kind = type(outputs).__name__
        raise TypeError(
            f"{type(self._fn).__name__} returned a {kind}, not an iterable of outputs. "
            f"What to do: return [{kind}] or yield it."
        )

    # ------------------------------------------------------------------ outputs
    def _watch(self, state: KeyState, outputs: Iterable[Any]) -> Iterator[Any]:
        """Outputs of a live element: plain ones have its time, so only stamped ones can be late."""
        for output in outputs:
            stamped = output.value if type(output) is TaggedOutput else output
            if not isinstance(stamped, _STAMPED) or self._emitted(state, output, stamped):
                yield output

    def _stamp(self, state: KeyState, outputs: Any, timestamp: int) -> Iterator[Any]:
        """Outputs of a call from the clock, whose own fire time means nothing to the author."""
        if outputs is None:
            return
        if isinstance(outputs, (str, bytes, dict)):
            self._refuse_outputs(outputs)
        for output in outputs:
            tagged = type(output) is TaggedOutput
            stamped = output.value if tagged else output
            if not isinstance(stamped, _STAMPED):
                stamped = WindowedValue(
                    stamped, Timestamp(micros=timestamp), (state.window,), PANE_INFO_UNKNOWN
                )
                output = TaggedOutput(output.tag, stamped) if tagged else stamped
            if not self._may_carry or self._emitted(state, output, stamped):
                yield output

    def _emitted(self, state: KeyState, output: Any, stamped: Any) -> bool:
        """Whether a stamped output is for this run; one beyond the open cut is also carried.

        Its element is folded at the cut, so a replay does not produce it again, and whoever reads
        it has not folded it: it belongs to the checkpoint.
        """
        memory = state.control
        timestamp: int = stamped.timestamp.micros
        if timestamp >= (state.next_open if memory.open is None else memory.open):
            tag = output.tag if type(output) is TaggedOutput else None
            coder = self._output_coders.get(tag)
            if coder is None:
                coder = self._output_coders[None] if tag is None else _ANY
            # A TimestampedValue has no windows of its own: Beam assigns them from its time.
            windows = () if isinstance(stamped, TimestampedValue) else stamped.windows
            window = b"".join(self._config.window_coder.encode(w) for w in windows[:1])
            memory.carry(CarriedOutput(tag, timestamp, window, coder.encode(stamped.value)))
            state.changed = True
            self._carried.inc()
        return timestamp < self._until or not self._has_until

    def _emit_carried(self, output: CarriedOutput) -> Any:
        coder = self._output_coders.get(output.tag, _ANY)
        value, timestamp = coder.decode(output.value), Timestamp(micros=output.timestamp)
        if output.window:
            window = self._config.window_coder.decode(output.window)
            stamped: Any = WindowedValue(value, timestamp, (window,), PANE_INFO_UNKNOWN)
        else:
            stamped = TimestampedValue(value, timestamp)
        return stamped if output.tag is None else TaggedOutput(output.tag, stamped)

    # ------------------------------------------------------------------ the clock
    def _woken(self, key: Any, window: Any, runners: Sequence[Any]) -> KeyState:
        """The key that one of the runner's timers is for."""
        slot = (key, window) if self._windows else key
        state = self._keys.get(slot)
        if state is None:
            state = self._load(slot, key, window, runners)
        state.settle()
        return state

    def on_clock(self, key: Any, fired: int, window: Any, runners: Sequence[Any]) -> Iterator[Any]:
        """The clock of a key was set for `fired` µs; yields the outputs of what is due."""
        state = self._woken(key, window, runners)
        if state.kept is not None:
            yield from self._restore_kept(state)
        reached = state.control.floor
        if fired >= DRAINED:
            self._ended = True
        state.wake(fired)
        yield from self._advance(state, reached)

    def on_wall_clock(
        self,
        name: str,
        key: Any,
        fired: int,
        window: Any,
        runners: Sequence[Any],
    ) -> Iterator[Any]:
        """The runner's processing-time timer `name` is due; yields the callback's outputs.

        In event time it comes when it comes: it belongs to the epoch that is open then.
        """
        state = self._woken(key, window, runners)
        memory = state.control
        family_text, _, tag = name.partition(":")
        family = int(family_text)
        fire = memory.wall_timers.get((family, tag))
        if fire is None or fire > fired or memory.closed:
            return  # cleared or set anew since, or saved for the next run
        del memory.wall_timers[(family, tag)]
        state.changed = True
        call = self._signature.callbacks[family]
        # In event time it is where the key is: no lower than its last change.
        at = max(memory.floor, memory.updated)
        arguments = self._begin(state, call, at, at)
        for argument in call.timestamp:
            arguments[argument] = Timestamp(micros=fire)
        for argument in call.tag:
            arguments[argument] = tag
        yield from self._stamp(state, self._callbacks[family](**arguments), fire)

    def _advance(self, state: KeyState, reached: int) -> Iterator[Any]:
        """Works through what is due, in event time: the cut, then timers, then elements.

        `reached` is how far this key has come: a timer set in its past belongs to the epoch that
        is open now, not to one that may have been published.
        """
        memory = state.control
        for _ in range(_EVENTS_PER_WAKE):
            floor = memory.floor
            timer = self._first_timer(state, floor)
            element = None
            if memory.buffered and memory.live and memory.first_ready <= floor:
                element = state.peek(self._tie_coder)
                if element is not None:
                    ready = self._ready(element[1])
                    if ready > floor:
                        memory.first_ready = ready
                        element = None
            at_timer = timer[0] if timer else None
            at_element = element[0] * MS if element else None
            cut = state.next_cut(self._config.epochs)
            if (
                cut is not None
                and cut[1] <= floor
                and (at_timer is None or cut[0] <= at_timer)
                and (at_element is None or cut[0] <= at_element)
            ):
                reached = max(reached, cut[1])
                yield from self._snapshot(state, cut[0])
            elif timer is not None and (at_element is None or timer[0] <= at_element):
                reached = max(reached, timer[0])
                yield from self._fire(state, reached, timer[1], timer[2])
            elif element is not None:
                reached = max(reached, element[1])
                state.take(self._ready)
                yield from self._feed(state, reached, element)
            else:
                if floor >= self._config.epochs.last and self._ends and not memory.buffered:
                    state.done = True
                return
            state.settle()
        # More is due. The clock, set in its past, brings it at once; `floor` may only fall.
        memory.floor = min(memory.floor, reached)

    def _first_timer(self, state: KeyState, floor: int) -> tuple[int, int, str] | None:
        """The first of the author's timers that is due: (due time, family, tag).

        A timer beyond the end of its window is due at that end, the last moment there is.
        """
        first: tuple[int, int, str] | None = None
        due_of, expiry = self._config.epochs.timer_due, state.expiry
        for (family, tag), fire in state.control.timers.items():
            due = due_of(fire if fire < expiry else expiry)
            if due is not None and due <= floor and (first is None or (due, family, tag) < first):
                first = (due, family, tag)
        return first

    def _fire(self, state: KeyState, reached: int, family: int, tag: str) -> Iterator[Any]:
        fire = state.control.timers.pop((family, tag))
        # A timer that is gone has to be saved as gone.
        state.changed = True
        call = self._signature.callbacks[family]
        arguments = self._begin(state, call, fire, reached)
        for name in call.tag:
            arguments[name] = tag
        state.closing = fire > state.expiry
        yield from self._stamp(state, self._callbacks[family](**arguments), fire)
        state.closing = False

    def _feed(
        self, state: KeyState, reached: int, waited: tuple[int, int, Any, Any]
    ) -> Iterator[Any]:
        _, timestamp, value, pane = waited
        call = self._signature.process
        arguments = self._begin(state, call, timestamp, reached)
        element = (state.key, value)
        if self._keeps_pane:
            at = Timestamp(micros=timestamp)
            self._give_pane(arguments, WindowedValue(element, at, (state.window,), pane))
        if call.element:
            for name in call.element:
                arguments[name] = element
            outputs = self._author_process(**arguments)
        else:
            outputs = self._author_process(element, **arguments)
        yield from self._stamp(state, outputs, timestamp)

    def _begin(self, state: KeyState, call: Call, timestamp: int, reached: int) -> dict[str, Any]:
        """Prepares a call: the epoch that a change belongs to, and the arguments."""
        state.now = timestamp
        if state.control.open is None or not self._aligned:
            state.next_open = self._config.epochs.end_of(reached)
        arguments = state.kwargs.get(call.method)
        if arguments is None:
            arguments = self._arguments(state, call)
        for name in call.timestamp:
            arguments[name] = Timestamp(micros=timestamp)
        return arguments

    # ------------------------------------------------------------------ save and restore
    def _snapshot(self, state: KeyState, boundary: int) -> Iterator[Any]:
        """Emits the record of a changed key at its epoch's end; all is encoded here and now."""
        memory, config = state.control, self._config
        memory.open = None
        if self._marks_drained and boundary != config.epochs.last:
            self._cut.add(boundary)
        if boundary == config.epochs.last:
            memory.closed = self._has_wall_timers
            state.done = self._ends
        patch: bytes | None = None
        if boundary <= state.expiry:
            state.pack_values()
            # What the key's last record says is not said, and not read, again.
            saved = [cell.saved() for cell in state.cells]
            cells = tuple(value for _, value in saved)
            patch = bytes(code for code, _ in saved)
            timers = tuple(self._saved_timers(memory))
            empty = not (memory.filled or memory.items or any(v is not None for v in memory.values))
        else:
            # By then the window is over, and its state is gone.
            cells, timers = tuple(cell.nothing for cell in state.cells), ()
            empty = True
        carried = tuple(out for out in memory.carried if out.timestamp >= boundary)
        memory.carried = carried
        deleted = not timers and not carried and empty
        if deleted and not memory.saved:
            return
        memory.saved = not deleted
        memory.touched = memory.written = EVERY_CELL if deleted else 0
        if self._saves_again and not deleted and patch is not None:
            for cell, (code, values) in zip(state.cells, saved, strict=True):
                if type(cell) is BagCell and code == REPLACE:
                    cell.set_apart(values)
        key = config.key_coder.encode(state.key)
        record = SnapshotRecord(
            key,
            config.window_coder.encode(state.window),
            deleted,
            memory.updated,
            cells,
            timers,
            carried,
            None if deleted or not patch or not any(patch) else patch,
        )
        self._saved.inc()
        group = key_group(key, config.key_groups)
        for data in cut(record.to_bytes(), config.chunk_bytes):
            yield TaggedOutput(
                SNAPSHOTS,
                WindowedValue(
                    (group, (boundary, data)),
                    Timestamp(micros=boundary),
                    (state.window,),
                    PANE_INFO_UNKNOWN,
                ),
            )

    def _saved_timers(self, memory: Control) -> Iterator[SavedTimer]:
        families = self._signature.timers
        pending: list[tuple[dict[tuple[int, str], int], TimerDomain]]
        pending = [(memory.timers, "event"), (memory.wall_timers, "processing")]
        for timers, domain in pending:
            for (family, tag), fire in sorted(timers.items()):
                yield SavedTimer(families[family], tag, domain, fire, None)

    def _keep(self, slot: Any, data: bytes, control: Any) -> bool:
        """Leaves a record to the first touch of its key, if nothing is due before; whether so.

        Adding to a bag that was not read costs next to nothing, and most keys of a large state are
        touched by no element of the run.
        """
        if is_chunk(data) or len(data) > SPILL_BYTES or data[1]:
            return False  # flags: timers, carried outputs, or what has to be refused
        kept = SAVED + data
        control.add(kept)
        if self._nothing_before:
            self._unread[slot] = kept
        self._restored.inc()
        return True

    def _restore_kept(self, state: KeyState) -> Iterator[Any]:
        record, state.kept = state.kept, None
        assert record is not None
        return self._restore(state, Restored(record), counted=True)

    def _restore(self, state: KeyState, restored: Restored, counted: bool = False) -> Iterator[Any]:
        memory, config = state.control, self._config
        if memory.restored:
            # Some runners emit an Impulse again; the key has gone on since.
            self._ignored.inc()
            return
        if memory.live:
            raise WatermarkError(
                f"operator {config.uid!r}: the runner let the watermark pass before the saved "
                "state of a key had been restored, so that elements met no state. Nothing of this "
                "bundle counts. What to do: run again from the checkpoint, on another runner if "
                "this one does it again."
            )
        data = restored.record
        if is_chunk(data):
            whole = state.chunk(data)
            if whole is None:
                return
            data = whole
        record = SnapshotRecord.from_bytes(data)
        if record.patch is not None:
            raise InvalidCheckpointError(
                f"operator {config.uid!r}: the saved state of a key is only what changed since "
                "another checkpoint. What to do: restore from an older checkpoint."
            )
        for cell, saved in zip(state.cells, record.cells, strict=True):
            cell.restore(saved)
        for timer in record.timers:
            self._restore_timer(state, timer)
        memory.live = memory.restored = memory.saved = True
        state.pack_values()
        # Where files are not added to, the first record has to hold all.
        memory.touched = memory.written = EVERY_CELL if config.rewrite else 0
        if not config.rewrite:
            for cell, saved in zip(state.cells, record.cells, strict=True):
                if type(cell) is BagCell and isinstance(saved, tuple):
                    cell.set_apart(saved)
        memory.updated = record.updated
        if memory.buffered:
            # They waited for this record; `_advance` sees what else they wait for.
            memory.first_ready = memory.floor
        if not counted:
            self._restored.inc()
        for output in record.carried:
            # At a drained end whoever reads them has folded them all.
            if config.boundary is not None and output.timestamp >= config.boundary:
                memory.carry(output)
                if not self._has_until or output.timestamp < self._until:
                    yield self._emit_carried(output)
        if config.rewrite:
            # At the first boundary of this run, which makes its checkpoint self-contained.
            memory.open = config.epochs.end_of(self._boundary)
        yield from self._advance(state, memory.floor)

    def _restore_timer(self, state: KeyState, timer: SavedTimer) -> None:
        family = self._families.get((timer.family, timer.domain))
        if family is None:
            if self._config.on_missing == "drop":
                return
            known = ", ".join(f"{name} ({domain})" for name, domain in self._families)
            raise StateIncompatibleError(
                f"operator {self._config.uid!r}: a timer of family {timer.family!r} in "
                f"{timer.domain} time was saved, and the DoFn has no such family (it has: "
                f"{known or 'none'}). What to do: put it back, or give such timers up by "
                "on_missing='drop'."
            )
        if timer.domain == "event":
            state.control.timers[(family, timer.tag)] = timer.fire
        else:
            state.set_wall_timer(family, timer.tag, timer.fire)


# What an author wraps an output in to date it.
_STAMPED = (TimestampedValue, WindowedValue)
_ANY = coders.FastPrimitivesCoder()
