"""One key and window during one bundle: its memory, its buffer, and the facades over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apache_beam.coders import coders
from apache_beam.coders.coder_impl import PaneInfoCoderImpl, StreamCoderImpl
from apache_beam.coders.coders import BigEndianShortCoder, SinglePrecisionFloatCoder
from apache_beam.utils.timestamp import Timestamp

from beam_ckpt.errors import WatermarkError
from beam_ckpt.transforms.chunks import Chunks, chunk_name
from beam_ckpt.transforms.keyed_state.cells import (
    BagCell,
    CombiningCell,
    OrderedListCell,
    ReadModifyWriteCell,
    SetCell,
    TimerCell,
    WallTimerCell,
)
from beam_ckpt.transforms.keyed_state.clock import DRAINED, GATE, Epochs
from beam_ckpt.transforms.keyed_state.control import SPILLED, Control
from beam_ckpt.transforms.signature import AuthorCell, TimerDomain

__all__ = [
    "HORIZON_TAG",
    "SAVED",
    "SPILL_BYTES",
    "BufferCoder",
    "Chunk",
    "KeyState",
    "Overflow",
    "is_small",
    "wall_timer_name",
]

#: A packed value above this many encoded bytes moves to the overflow, so that control stays small.
SPILL_BYTES = 4096
# A version of the control is its number, so that the newest is found in a bag, and its bytes.
_NUMBER_BYTES = 8
_FIRST = bytes(_NUMBER_BYTES)
#: What a saved record begins with that is kept in the control's bag; no version does.
SAVED = b"\xff"
_VERSIONS = 8
_NEVER = 2**63 - 1
#: Dynamic tag of the second clock; the first has none.
HORIZON_TAG = "horizon"


# Coders whose values have a dozen bytes at most.
_SMALL = frozenset(
    {
        coders.VarIntCoder,
        coders.FloatCoder,
        coders.BooleanCoder,
        coders.TimestampCoder,
        SinglePrecisionFloatCoder,
        BigEndianShortCoder,
    }
)


def is_small(coder: Any) -> bool:
    """Whether no value of this coder can be larger than `SPILL_BYTES`."""
    if type(coder) is coders.TupleCoder:
        parts = coder.coders()
        return len(parts) < SPILL_BYTES // 16 and all(type(part) in _SMALL for part in parts)
    return type(coder) in _SMALL


class Overflow:
    """A packed value that is too large to be rewritten with every change of its key."""

    __slots__ = ("data", "index")

    def __init__(self, index: int, data: bytes) -> None:
        self.index, self.data = index, data


class Chunk:
    """A part of the key's saved record, of which others are still to come."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class _BufferCoderImpl(StreamCoderImpl):
    """Tag byte, then a waiting element (timestamp, value, pane or None), an overflow or a chunk."""

    def __init__(self, value: Any) -> None:
        self._value, self._pane = value, PaneInfoCoderImpl()

    def encode_to_stream(self, item: Any, out: Any, nested: bool) -> None:
        if type(item) is Overflow:
            out.write_byte(1)
            out.write_var_int64(item.index)
            out.write(item.data, nested)
        elif type(item) is Chunk:
            out.write_byte(3)
            out.write(item.data, nested)
        else:
            timestamp, value, pane = item
            out.write_byte(0 if pane is None else 2)
            out.write_bigendian_int64(timestamp)
            if pane is not None:
                self._pane.encode_to_stream(pane, out, True)
            self._value.encode_to_stream(value, out, nested)

    def decode_from_stream(self, stream: Any, nested: bool) -> Any:
        kind = stream.read_byte()
        if kind == 1:
            return Overflow(stream.read_var_int64(), stream.read_all(nested))
        if kind == 3:
            return Chunk(stream.read_all(nested))
        timestamp = stream.read_bigendian_int64()
        pane = self._pane.decode_from_stream(stream, True) if kind else None
        return timestamp, self._value.decode_from_stream(stream, nested), pane


class BufferCoder(coders.FastCoder):
    """Coder of the buffer's bag; the author's values keep the author's coder."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def _create_impl(self) -> _BufferCoderImpl:
        return _BufferCoderImpl(self._value.get_impl())

    def is_deterministic(self) -> bool:
        return bool(self._value.is_deterministic())

    def __eq__(self, other: object) -> bool:
        return type(other) is BufferCoder and bool(other._value == self._value)

    def __hash__(self) -> int:
        return hash((BufferCoder, self._value))


class KeyState:
    """What is known of a key and window in this bundle.

    Read from the runner's cells at the first touch, written back once, when the bundle ends
    (`flush`): Beam commits state after ``finish_bundle``, on every runner.

    Attributes:
        changed: The author changed something since `settle` looked.
        closing: A timer is firing that was set beyond the end of the window: at that end, the last
            moment there is. What it sets beyond it never fires, so a loop of timers ends.
        done: The run's last cut of this key is taken and no element can come: nothing is kept.
        expiry: When the window is over, allowed lateness included, in microseconds: the runner
            fires no timer after it, and drops the state.
        now: Event time of the author's last call.
        next_open: End of the epoch that call belongs to.
    """

    __slots__ = (
        "_aux",
        "_aux_read",
        "_aux_stale",
        "_buffer",
        "_buffer_coder",
        "_buffer_taken",
        "_cell",
        "_chunks",
        "_chunks_kept",
        "_clock",
        "_fires",
        "_head",
        "_loaded",
        "_ordered_lists",
        "_overflow",
        "_room",
        "_sorted",
        "_versions",
        "_waiting_aside",
        "_waiting_bytes",
        "_waiting_read",
        "_wall_clock",
        "_woken",
        "bag_bytes",
        "cells",
        "changed",
        "closing",
        "control",
        "done",
        "expiry",
        "kept",
        "key",
        "kwargs",
        "next_open",
        "now",
        "packed",
        "timers",
        "window",
    )

    def __init__(
        self,
        key: Any,
        window: Any,
        cell: Any,
        known: list[bytes] | None,
        aux: Any,
        buffer_coder: BufferCoder,
        waiting_bytes: int,
        bag_bytes: int,
        clock: Any,
        wall_clock: Any,
        floor: int,
        live: bool,
        expiry: int,
        cells: tuple[AuthorCell, ...],
        runner_cells: Any,
        packed: int,
        timers: tuple[TimerDomain, ...],
    ) -> None:
        self.key, self.window, self.expiry = key, window, expiry
        self._cell, self._aux, self._clock, self._wall_clock = cell, aux, clock, wall_clock
        versions = list(cell.read()) if known is None else known
        self._versions = len(versions)
        # The newest is the greatest: versions begin with their number.
        data = max(versions, default=None)
        kept: bytes | None = None
        if data is not None and data.startswith(SAVED):
            kept = data.removeprefix(SAVED)
            data = max((v for v in versions if not v.startswith(SAVED)), default=None)
        self._loaded = data
        if len(versions) > 1:
            _refuse_two_firsts(key, versions)
        #: When the clock may still fire, where that is known.
        self._fires: set[int | None] | None = None
        if data is None:
            self.control = Control(floor, live, packed)
        else:
            self.control = Control.unpack(data[_NUMBER_BYTES:])
            if data.startswith(_FIRST):
                # It was written once, so that no clock was set but those that it tells of.
                self._fires = {self.control.armed, self.control.horizon, None}
                self._fires.remove(None)
        #: A record that was kept unread, and is to be restored before anything else.
        self.kept = None if self.control.restored else kept
        self.changed = self.closing = self.done = self._woken = False
        self.now, self.next_open = 0, _NEVER
        self.bag_bytes = bag_bytes
        # Most keys need few of the lists below in a bundle, and none of those that are empty costs
        # one. The elements that wait, once read: (millisecond, timestamp, value, pane) from _head.
        self._buffer: Sequence[tuple[int, int, Any, Any]] = ()
        self._head = 0
        self._buffer_coder = buffer_coder
        #: How many more bytes of them control takes, and how many elements are not there.
        self._waiting_bytes = waiting_bytes
        self._room = waiting_bytes - sum(map(len, self.control.waiting))
        self._waiting_aside = self.control.buffered - len(self.control.waiting)
        self._waiting_read = False
        # While a saved record is awaited, chunks of it may be there.
        self._aux_read = (
            self.control.live and not self._waiting_aside and SPILLED not in self.control.values
        )
        self._chunks: Chunks | None = None
        self._chunks_kept: set[bytes] | None = None
        self._buffer_taken = self._aux_stale = False
        self._sorted = True
        self._overflow: dict[int, bytes] = {}
        self.packed: list[ReadModifyWriteCell | CombiningCell] = []
        self.cells: list[Any] = []
        self._ordered_lists: tuple[OrderedListCell, ...] = ()
        # The runner's cells are those of bags and sets, then those for what is new in each bag.
        growing, recent = 0, len(cells) - packed
        for cell_ in cells:
            kind, coder = cell_.kind, cell_.coder
            facade: Any
            if kind == "read_modify_write":
                facade = ReadModifyWriteCell(self, len(self.packed), coder)
                self.packed.append(facade)
            elif kind == "combining":
                facade = CombiningCell(self, len(self.packed), coder, cell_.combine_fn)
                self.packed.append(facade)
            else:
                cell = runner_cells[growing]
                if kind == "bag":
                    new = runner_cells[recent] if recent < len(runner_cells) else None
                    facade = BagCell(self, growing, cell, coder, new)
                    recent += 1
                else:
                    facade = _GROWING[kind](self, growing, cell, coder)
                growing += 1
                if kind == "ordered_list":
                    self._ordered_lists += (facade,)
            self.cells.append(facade)
        self.timers: Sequence[TimerCell | WallTimerCell] = ()
        if timers:
            self.timers = [
                (TimerCell if domain == "event" else WallTimerCell)(self, i)
                for i, domain in enumerate(timers)
            ]
        #: Arguments of the author's methods that do not change within the bundle, by method.
        self.kwargs: dict[str, dict[str, Any]] = {}

    def release(self) -> None:
        """After the bundle: so that neither this nor the cells wait for the garbage collector.

        They refer to each other, and where each bundle leaves some thousands of them it is the
        collector, which goes through all that a worker holds, that costs most.
        """
        self.cells, self.packed, self.timers = [], [], ()
        self._ordered_lists = ()
        self.kwargs = {}

    # ------------------------------------------------------------------ the author's changes
    def settle(self) -> None:
        """Opens the epoch of a change that the author's last call made."""
        if self.changed:
            self.changed = False
            control = self.control
            control.updated = self.now
            if control.open is None or self.next_open < control.open:
                control.open = self.next_open

    def set_wall_timer(self, family: int, tag: str, fire: int) -> None:
        """Sets the runner's processing-time timer, and notes it."""
        self.control.wall_timers[(family, tag)] = fire
        self._wall_clock.set(Timestamp(micros=fire), dynamic_timer_tag=wall_timer_name(family, tag))

    def clear_wall_timer(self, family: int, tag: str) -> bool:
        """Clears it; whether it was set."""
        if self.control.wall_timers.pop((family, tag), None) is None:
            return False
        self._wall_clock.clear(dynamic_timer_tag=wall_timer_name(family, tag))
        return True

    def spilled(self, index: int) -> bytes:
        """The value of packed cell `index` from the overflow."""
        self._read_aux()
        return self._overflow[index]

    def chunk(self, data: bytes) -> bytes | None:
        """Takes a chunk of the saved record; returns the record once all of them have come."""
        self._read_aux()
        if self._chunks is None:
            self._chunks = Chunks()
        record = self._chunks.add(data)
        if record is not None and self._chunks_kept:
            self._aux_stale = True  # so that they leave the runner's cell
        return record

    # ------------------------------------------------------------------ the buffer
    def buffer(self, timestamp: int, value: Any, pane: Any, ready: int) -> None:
        """Keeps an element until the watermark is seen to have reached `ready`."""
        control = self.control
        if not control.buffered or ready < control.first_ready:
            control.first_ready = ready
        control.buffered += 1
        if self._put((timestamp, value, pane)):
            self._read(timestamp, value, pane)

    def _read(self, timestamp: int, value: Any, pane: Any) -> None:
        """Takes an element that waits into memory."""
        if not isinstance(self._buffer, list):
            self._buffer = []
        self._buffer.append((timestamp // 1000, timestamp, value, pane))
        self._sorted = False

    def _put(self, item: tuple[int, Any, Any]) -> bool:
        """Adds an element to those that wait; whether those beside which it is have been read."""
        if self._room > 0:
            data = self._buffer_coder.encode(item)
            self._room -= len(data)
            if self._room >= 0:
                waiting = self.control.waiting
                if not isinstance(waiting, list):
                    waiting = self.control.waiting = []
                waiting.append(data)
                return self._waiting_read
        self._waiting_aside += 1
        self._aux.add(item)
        return self._aux_read

    def peek(self, tie_coder: Any) -> tuple[int, int, Any, Any] | None:
        """The first element in the buffer, if any; ties within a millisecond by `tie_coder`."""
        if not self.control.buffered:
            return None
        if not self._waiting_read:
            self._waiting_read = True
            decode = self._buffer_coder.decode
            for data in self.control.waiting:
                self._read(*decode(data))
            if self._waiting_aside:
                self._read_aux()
        if not self._sorted:
            waiting = list(self._buffer[self._head :])
            waiting.sort(key=lambda item: item[0])
            if tie_coder is not None:
                _order_ties(waiting, tie_coder.encode)
            self._buffer, self._head, self._sorted = waiting, 0, True
        return self._buffer[self._head]

    def take(self, epochs_ready: Any) -> None:
        """Takes the element that `peek` showed; `epochs_ready(timestamp)` dates the rest."""
        self._head += 1
        self._buffer_taken = True
        control = self.control
        control.buffered -= 1
        if control.buffered:
            control.first_ready = epochs_ready(self._buffer[self._head][1])

    def _read_aux(self) -> None:
        if self._aux_read:
            return
        for item in self._aux.read():
            if type(item) is Overflow:
                self._overflow[item.index] = item.data
            elif type(item) is Chunk:
                if self._chunks is None:
                    self._chunks = Chunks()
                if self._chunks_kept is None:
                    self._chunks_kept = set()
                self._chunks.add(item.data)
                self._chunks_kept.add(chunk_name(item.data))
            else:
                self._read(*item)
        self._aux_read = True

    # ------------------------------------------------------------------ the end of the bundle
    def flush(
        self,
        epochs: Epochs,
        two_clocks: bool,
        watches_end: bool = False,
        fires_once: bool = False,
    ) -> None:
        """Writes this key back to the runner and sets its clock.

        `fires_once`: the runner fires a clock once for each time that it was set.

        With `watches_end` the second clock is set at the end of time, for as long as an epoch is
        open: where the two fire together, the epoch was closed by the end of the stream.
        """
        self.settle()
        if self.done:
            # A fire that comes again, or of the other clock, has to find that nothing is due. Where
            # none can come nobody looks at the cell again, and clearing it costs a measurement.
            if self._versions and not (fires_once and self._fires == set()):
                self._cell.clear()
            if self._chunks_kept:
                self._aux.clear()  # or the last of them, come again, would complete the record
            return
        control, woken = self.control, self._woken
        self._arm(epochs, two_clocks, watches_end)
        for ordered_list in self._ordered_lists:
            ordered_list.flush()
        if self.packed:
            self.pack_values()
        self._write_back_buffer()
        if (
            control.open is None
            and not control.timers
            and not control.buffered
            and not control.filled
            and not control.items
            and not control.saved
            and not control.carried
            and not control.wall_timers
            and not control.closed
            and not control.gated
            and not any(value is not None for value in control.values)
        ):
            if self._versions:
                self._cell.clear()
            return
        self._write(control.pack(), woken)

    def _write_back_buffer(self) -> None:
        """Brings what waits, and what has a cell with it, up to what was taken and changed."""
        stale = self._aux_stale or (self._buffer_taken and self._waiting_aside > 0)
        if stale:
            self._read_aux()
            self._aux.clear()
            for index, data in self._overflow.items():
                self._aux.add(Overflow(index, data))
        for chunk in self._chunks or ():
            if stale or chunk_name(chunk) not in (self._chunks_kept or ()):
                self._aux.add(Chunk(chunk))
        if stale or self._buffer_taken:
            if self._waiting_read:
                self.control.waiting, self._room = [], self._waiting_bytes
            for _, *item in self._buffer[self._head :]:
                self._put(tuple(item))

    def _write(self, packed: bytes, woken: bool) -> None:
        """Adds a version of the control to its bag, and now and then clears the older ones.

        Adding costs the SDK's state cache one measurement, overwriting costs it two.
        """
        number = 0
        if self._loaded is not None:
            # After a wake-up the clock was set anew, and versions count how often it was.
            if self._loaded[_NUMBER_BYTES:] == packed and not woken:
                return
            number = int.from_bytes(self._loaded[:_NUMBER_BYTES], "big") + 1
        if self._versions >= _VERSIONS:
            self._cell.clear()
        self._cell.add(number.to_bytes(_NUMBER_BYTES, "big") + packed)

    def pack_values(self) -> None:
        """Brings `control` up to the packed cells, and notes which are not as they were."""
        control = self.control
        values = control.values
        for index, cell in enumerate(self.packed):
            value = cell.packed()
            before = values[index]
            if value is before:
                continue
            if isinstance(value, bytes) and len(value) > SPILL_BYTES:
                if before is SPILLED and self.spilled(index) == value:
                    continue
                self._aux_stale = True
                self._read_aux()
                self._overflow[index] = value
                value = SPILLED
            elif before is SPILLED:
                self._aux_stale = True
                self._read_aux()
                self._overflow.pop(index, None)
            elif value == before:
                continue
            values[index] = value
            control.written |= 1 << (index if index < 63 else 63)

    def next_cut(self, epochs: Epochs) -> tuple[int, int] | None:
        """The next boundary at which there is something to save, and when that is due, if any.

        Besides the end of the open epoch that is the boundary at which the last of the outputs
        beyond the cut no longer is: the record that has them is of no use then.

        Of a window that is over by then only outputs beyond the cut are left to save, at the last
        moment at which the runner lets it.
        """
        control = self.control
        cut = control.open
        if cut is not None:
            if cut > self.expiry:
                return (cut, self.expiry) if control.carried else None
            return cut, cut
        if control.carried and not control.closed:
            latest = max(output.timestamp for output in control.carried)
            over = epochs.end_of(latest)
            if latest < epochs.last and over <= self.expiry:
                return over, over
        return None

    def _arm(self, epochs: Epochs, two_clocks: bool, watches_end: bool) -> None:
        """Sets the clock at the earliest thing that this key waits for.

        With `two_clocks` (bounded input, whose watermark comes in one step) a second clock is set
        at the end of the run if there is more than that: when it fires, all that is waited for and
        all that follows from it is known to be due, and one wake-up does the work of many. The
        first still holds the output watermark.
        """
        control = self.control
        cut = self.next_cut(epochs)
        first: int | None = None if cut is None else cut[1]
        more = control.buffered > 0
        for fire in control.timers.values():
            due = epochs.timer_due(min(fire, self.expiry))
            if due is not None:
                more = more or (first is not None and due != first)
                first = due if first is None or due < first else first
        if control.buffered and (first is None or control.first_ready < first):
            first = control.first_ready
        if control.gated or (first is not None and first < GATE):
            first = GATE
        horizon = None
        if two_clocks and more and first is not None:
            end = min(epochs.last, self.expiry)
            horizon = end if end > first else None
        elif control.open is not None and (watches_end or control.horizon == DRAINED):
            horizon = DRAINED
        control.armed = self._set("", first, control.armed)
        control.horizon = self._set(HORIZON_TAG, horizon, control.horizon)
        self._woken = False

    def _set(self, tag: str, time: int | None, was: int | None) -> int | None:
        # After a wake-up also where the time is unchanged: a runner that delivers a stale fire may
        # drop the clock that was set meanwhile.
        if time is None:
            if was is not None:
                self._clock.clear(dynamic_timer_tag=tag)
        elif time != was or self._woken:
            self._clock.set(Timestamp(micros=time), dynamic_timer_tag=tag)
        return time

    def wake(self, fired: int) -> None:
        """Takes note that the watermark is at least `fired`: a wake-up, never an order."""
        control = self.control
        self._woken = True
        if self._fires is not None:
            self._fires.discard(fired)
        if fired > control.floor:
            control.floor = fired
        if fired >= GATE:
            control.live = True
            control.gated = False


def _refuse_two_firsts(key: Any, versions: list[bytes]) -> None:
    """Two bundles were each the first for a key, where only one can have been: state is lost."""
    if sum(version.startswith(_FIRST) for version in versions) > 1:
        raise WatermarkError(
            f"the runner gave elements of the key {key!r} in two bundles that each found no state "
            "of it, so that one has not seen what the other did. Nothing of this run counts. What "
            "to do: run again from the checkpoint, on another runner if this one does it again."
        )


_GROWING: dict[str, Any] = {"set": SetCell, "ordered_list": OrderedListCell}


def wall_timer_name(family: int, tag: str) -> str:
    """The dynamic tag that one of the author's processing-time timers has at the runner."""
    return f"{family}:{tag}"


def _order_ties(items: list[tuple[int, int, Any, Any]], encode: Any) -> None:
    """Orders elements of the same millisecond by their encoded value, in place."""
    start = 0
    for end in range(1, len(items) + 1):
        if end < len(items) and items[end][0] == items[start][0]:
            continue
        if end - start > 1:
            items[start:end] = sorted(items[start:end], key=lambda item: encode(item[2]))
        start = end
