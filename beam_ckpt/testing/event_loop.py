"""The oracle: a stateful DoFn run by a plain loop over event time, with no Beam runner in it.

`run_event_loop` takes an author's unchanged stateful `beam.DoFn` and a data set and works
through elements and event-time timers one by one, per key and window, in one total order:

1. by time, in whole milliseconds (Beam's Fn API floors timestamps to them, and so does the loop,
   for elements and for the times that timers are set to);
2. at equal times, timers before elements;
3. timers of one time by (family, dynamic tag);
4. elements of one millisecond by their encoded value.

Everything that runners leave open is closed in the strictest way: a timer set or cleared in one
callback is honoured by the very next one, and a timer set in the past fires at once, at the time
it was set to. So the result is a function of the data set alone, which makes it the reference for
`time_sorted` operators. Where a fold does not depend on order within a key, the loop's sorted order
is as good as any other, and its result is the reference for operators without `time_sorted`
as well: the same outputs, as a multiset, and the same state (bags, too, as multisets).

With `until` the loop makes the cut that a checkpoint makes: exactly the elements and timers before
it have run, outputs dated at or after it are carried instead of emitted, timers at or after it are
pending, and the state that comes back can be given to the next loop:

>>> import apache_beam as beam
>>> from apache_beam.coders import VarIntCoder
>>> from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
>>> class Totals(beam.DoFn):
...     TOTAL = ReadModifyWriteStateSpec("total", VarIntCoder())
...     def process(self, element, total=beam.DoFn.StateParam(TOTAL)):
...         total.write((total.read() or 0) + element[1])
...         yield element[0], total.read()
>>> data = [(1_000, "a", 1), (2_000, "a", 2), (9_000, "a", 3)]
>>> cut = run_event_loop(Totals(), data, until=5_000)
>>> [output.value for output in cut.outputs]
[('a', 1), ('a', 3)]
>>> rest = run_event_loop(Totals(), data, restored=cut.state)
>>> [output.value for output in rest.outputs]
[('a', 6)]

The loop shares no code with `beam_ckpt.transforms`, on purpose.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, cast

from apache_beam.coders import Coder
from apache_beam.coders.typecoders import registry
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms import core, userstate
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.window import (
    BoundedWindow,
    GlobalWindow,
    GlobalWindows,
    TimestampedValue,
    WindowFn,
)
from apache_beam.typehints import Any as AnyType
from apache_beam.utils.timestamp import Timestamp, TimestampTypes
from apache_beam.utils.windowed_value import PANE_INFO_UNKNOWN, WindowedValue

from beam_ckpt.errors import CheckpointError, PipelineRefusedError, StateIncompatibleError

__all__ = [
    "EndlessTimersError",
    "KeyedCells",
    "LoopResult",
    "LoopState",
    "Output",
    "canonical",
    "run_event_loop",
]

_MS = 1_000
_MAX_FIRINGS = 10_000


class EndlessTimersError(CheckpointError, RuntimeError):
    """A key's timers set each other without end, so that the loop would never finish."""


class Output(NamedTuple):
    """One output of the author's DoFn.

    Attributes:
        tag: The tag of a `TaggedOutput`; None for the main output.
        value: What was emitted, without its wrapping.
        timestamp: Event time in microseconds, as the author gave it (not floored).
        window: The window it is in.
    """

    tag: str | None
    value: object
    timestamp: int
    window: BoundedWindow


@dataclass(frozen=True)
class KeyedCells:
    """What is kept for one key and window. Nothing empty is kept, so equality is plain.

    Attributes:
        cells: By cell name. Read-modify-write: the value. Bag: a list, in the order of adding.
            Set: a frozenset. Combining: the accumulator. Ordered list: a list of
            (timestamp in microseconds, value), by timestamp, then in the order of adding.
            An empty cell is absent, and so is a read-modify-write cell that holds None.
        timers: Pending event-time timers: (`TimerSpec.name`, dynamic tag) to fire time in
            microseconds. Beam prefixes the author's name: the family of `TimerSpec("flush", ...)`
            is `ts-flush`.
        carried: Outputs dated at or after the cut, in the order in which they were made.
    """

    cells: Mapping[str, object] = field(default_factory=dict)
    timers: Mapping[tuple[str, str], int] = field(default_factory=dict)
    carried: tuple[Output, ...] = ()


class LoopState(Mapping[tuple[Hashable, BoundedWindow], KeyedCells]):
    """The state at a cut, by (key, window). Compares equal to a dict of the same entries.

    Attributes:
        boundary: The cut in microseconds of event time; elements below it have been applied and
            are dropped when they are replayed. None: the input was drained, everything that comes
            later is new.
    """

    def __init__(
        self,
        entries: Mapping[tuple[Hashable, BoundedWindow], KeyedCells] = MappingProxyType({}),
        boundary: int | None = None,
    ) -> None:
        self._entries = dict(entries)
        self.boundary = boundary

    def __getitem__(self, item: tuple[Hashable, BoundedWindow]) -> KeyedCells:
        return self._entries[item]

    def __iter__(self) -> Iterator[tuple[Hashable, BoundedWindow]]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"LoopState({self._entries!r}, boundary={self.boundary!r})"

    def unordered(self) -> LoopState:
        """Returns the same state with lists and carried outputs sorted, to compare as multisets.

        A bag has no order, and without `time_sorted` neither have a key's carried outputs.
        """
        return LoopState(
            {
                slot: KeyedCells(
                    {
                        name: sorted(value, key=repr) if isinstance(value, list) else value
                        for name, value in kept.cells.items()
                    },
                    kept.timers,
                    tuple(canonical(kept.carried)),
                )
                for slot, kept in self.items()
            },
            self.boundary,
        )

    def of(self, key: Hashable) -> KeyedCells:
        """Returns what is kept for `key` in the global window; empty when there is nothing."""
        return self._entries.get((key, GlobalWindow()), KeyedCells())


@dataclass(frozen=True)
class LoopResult:
    """What a loop gave.

    Attributes:
        outputs: In the order in which they were made, key by key: order within a key has a
            meaning, order between keys has none.
        state: What is left at the end: the cut, or the drained state.
        dropped: How many elements lay below the restored boundary and were dropped.
    """

    outputs: list[Output]
    state: LoopState
    dropped: int = 0


def canonical(outputs: Iterable[Output]) -> list[Output]:
    """Sorts outputs for a comparison as multisets: by time, tag, window and `repr` of the value."""
    return sorted(
        outputs,
        key=lambda o: (o.timestamp, o.tag or "", o.window.max_timestamp().micros, repr(o.value)),
    )


def run_event_loop(
    fn: core.DoFn,
    elements: Iterable[tuple[int, Hashable, object]],
    *,
    until: int | None = None,
    restored: LoopState | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    value_coder: Coder | None = None,
    window_fn: WindowFn | None = None,
    lateness: int = 0,
    max_firings: int = _MAX_FIRINGS,
) -> LoopResult:
    """Runs a stateful DoFn over a data set in strict event-time order.

    Args:
        fn: The author's DoFn; a copy of it is run. State of any kind and event-time timers;
            `setup`, `start_bundle`, `finish_bundle` and `teardown` are called once.
        elements: (event time in microseconds, key, value), in any order.
        until: The cut, in microseconds, a whole number of milliseconds. Elements and timers before
            it run; elements at or after it are ignored (they are replayed to the next loop), timers
            at or after it stay pending, outputs dated at or after it are carried. None: the
            input is drained, which means that timers fire until none is left.
        restored: The state to go on from. Elements below its boundary are dropped; its carried
            outputs are emitted first.
        args: Extra positional arguments of `process`, as given to `beam.ParDo`.
        kwargs: Extra keyword arguments of `process`.
        value_coder: Gives elements of one millisecond their order. The default is the coder of
            the DoFn's input type hint, as Beam would infer it; without a hint the one for Any.
        window_fn: Assigns elements to windows; the global one by default. Each window of an element
            has its state. A timer set beyond the end of its window fires at that end, with the time
            it was set to; one set there beyond the end never does. State of a window that is over
            at the cut is gone, but for its carried outputs.
        lateness: How long after its end a window is kept, in microseconds.
        max_firings: How many timers of one key may fire with no element between them.

    Returns:
        Outputs and state.

    Raises:
        PipelineRefusedError: The DoFn asks for something that the loop has no meaning for
            (processing-time timers, bundle finalizers, ...), or the cut cannot be right.
        StateIncompatibleError: The restored state has a cell or a timer that `fn` has not.
        EndlessTimersError: More than `max_firings` timers of one key fired in a row.
    """
    boundary = restored.boundary if restored is not None else None
    if until is not None and until % _MS:
        raise PipelineRefusedError(
            f"until={until} µs is not a whole number of milliseconds, which is all that Beam's "
            f"timestamps have; take {until // _MS * _MS}."
        )
    if until is not None and boundary is not None and until < boundary:
        raise PipelineRefusedError(
            f"until={until} µs lies before the restored boundary {boundary} µs: that part of the "
            "input has been applied. Take a later cut or an older state."
        )
    user = copy.deepcopy(fn)
    author = _Author(user, args, dict(kwargs or {}))
    coder = value_coder if value_coder is not None else _input_value_coder(user)
    windowing = Windowing(window_fn or GlobalWindows(), lateness)

    queues: dict[tuple[Hashable, BoundedWindow], list[tuple[int, bytes]]] = {}
    for slot_id in restored or ():
        queues[slot_id] = []
    dropped = 0
    for timestamp, key, value in elements:
        time = timestamp // _MS * _MS
        if boundary is not None and time < boundary:
            dropped += 1
        elif until is None or time < until:
            for window in windowing.assign(time, (key, value)):
                queues.setdefault((key, window), []).append((time, coder.encode(value)))

    outputs: list[Output] = []
    left: dict[tuple[Hashable, BoundedWindow], KeyedCells] = {}
    user.setup()
    try:
        user.start_bundle()
        for (key, window), queue in queues.items():
            slot = _Slot(author, key, window, until, outputs, windowing)
            if restored is not None and (key, window) in restored:
                slot.restore(restored[key, window])
            slot.run(sorted(queue), coder, max_firings)
            kept = slot.save()
            if kept != KeyedCells():
                left[key, window] = kept
        outputs.extend(_bundle_outputs(user.finish_bundle(), windowing))
    finally:
        user.teardown()
        author.teardown()
    return LoopResult(outputs, LoopState(left, until), dropped)


class Windowing:
    """The input's windows, and when each is over."""

    def __init__(self, window_fn: WindowFn, lateness: int) -> None:
        self._window_fn, self._lateness = window_fn, lateness

    def assign(self, time: int, value: object) -> Iterable[BoundedWindow]:
        """The windows of a value at `time`, microseconds."""
        context = WindowFn.AssignContext(Timestamp(micros=time), value)
        return self._window_fn.assign(context)

    def expiry(self, window: BoundedWindow) -> int | None:
        """The last moment of a window, lateness included; None for the global one."""
        if window == GlobalWindow():
            return None
        return (int(window.max_timestamp().micros) + self._lateness) // _MS * _MS


# ------------------------------------------------------------------------------------ one key


class _Slot:
    """One key and window: its cells, its pending timers and its clock."""

    def __init__(
        self,
        author: _Author,
        key: Hashable,
        window: BoundedWindow,
        until: int | None,
        outputs: list[Output],
        windowing: Windowing,
    ) -> None:
        self.windowing = windowing
        self.expiry = windowing.expiry(window)
        self.closing = False
        self.author = author
        self.key = key
        self.window = window
        self.until = until
        self.outputs = outputs
        self.cells = {name: author.new_cell(name) for name in author.cell_specs}
        self.timers: dict[tuple[str, str], int] = {}
        self.carried: list[Output] = []

    def run(self, queue: Sequence[tuple[int, bytes]], coder: Coder, max_firings: int) -> None:
        """Works through `queue` (sorted) and the timers, to the cut or until nothing is left."""
        at, firings = 0, 0
        while True:
            due = min(((self.due(t), *name) for name, t in self.timers.items()), default=None)
            if due is not None and self.until is not None and due[0] >= self.until:
                due = None
            if due is not None and (at == len(queue) or due[0] <= queue[at][0]):
                firings += 1
                if firings > max_firings:
                    raise EndlessTimersError(
                        f"{firings} timers fired in a row without an element between them, the "
                        f"last one {due[1]!r} (tag {due[2]!r}) at {due[0]} µs: {self.author.name} "
                        "sets timers without end. Let its callback stop, or give an until."
                    )
                _, family, tag = due
                time = self.timers.pop((family, tag))
                call = _Call(self, time, tag=tag)
                self.closing = self.expiry is not None and time > self.expiry
                self.emit(self.author.callbacks[family](call), time)
                self.closing = False
            elif at < len(queue):
                time, encoded = queue[at]
                at, firings = at + 1, 0
                call = _Call(self, time, element=(self.key, coder.decode(encoded)))
                self.emit(self.author.process(call), time)
            else:
                return

    def due(self, time: int) -> int:
        """When a timer fires: at its time, or at the end of the window."""
        return time if self.expiry is None else min(time, self.expiry)

    def emit(self, results: object, time: int) -> None:
        """Takes what a method of the author's returned; lazily, as Beam does."""
        if isinstance(results, str | bytes | dict):
            raise TypeError(
                f"{self.author.name} returned a {type(results).__name__}, not an iterable of "
                f"outputs; Beam refuses that. Yield {results!r} or return it in a list."
            )
        for result in cast(Iterable[object], results or ()):
            for output in outputs_of(result, time, self.window, self.windowing):
                self.put(output)

    def put(self, output: Output) -> None:
        """Emits an output dated before the cut, carries any other."""
        if self.until is not None and output.timestamp >= self.until:
            self.carried.append(output)
        else:
            self.outputs.append(output)

    def restore(self, saved: KeyedCells) -> None:
        for name, value in saved.cells.items():
            if name not in self.cells:
                raise StateIncompatibleError(
                    f"the restored state has a cell {name!r}, {self.author.name} has only "
                    f"{sorted(self.cells)}."
                )
            self.cells[name]._restore(value)
        for (family, tag), time in saved.timers.items():
            if family not in self.author.callbacks:
                raise StateIncompatibleError(
                    f"the restored state has a timer of family {family!r}, {self.author.name} has "
                    f"only {sorted(self.author.callbacks)}."
                )
            self.timers[family, tag] = time
        for output in saved.carried:
            self.put(output)

    def save(self) -> KeyedCells:
        over = self.expiry is not None and (self.until is None or self.expiry < self.until)
        if over:
            return KeyedCells(carried=tuple(self.carried))
        saved = {name: cell._save() for name, cell in self.cells.items() if not cell._empty()}
        return KeyedCells(saved, dict(self.timers), tuple(self.carried))


def outputs_of(
    result: object, time: int, window: BoundedWindow, windowing: Windowing
) -> Iterator[Output]:
    """What Beam makes of one output of a method that was called at `time` (µs) in `window`."""
    tag = None
    if isinstance(result, TaggedOutput):
        tag, result = result.tag, result.value
        if not isinstance(tag, str):
            raise TypeError(f"the tag {tag!r} of a TaggedOutput is not a string.")
    if isinstance(result, WindowedValue):
        for own_window in result.windows:
            yield Output(tag, result.value, result.timestamp.micros, own_window)
    elif isinstance(result, TimestampedValue):
        at = int(Timestamp.of(result.timestamp).micros)
        for own_window in windowing.assign(at, result.value):
            yield Output(tag, result.value, at, own_window)
    else:
        yield Output(tag, result, time, window)


def _bundle_outputs(results: Iterable[object] | None, windowing: Windowing) -> Iterator[Output]:
    """Outputs of `finish_bundle`, which belong to no key and are therefore never carried."""
    for result in results or ():
        value = result.value if isinstance(result, TaggedOutput) else result
        if not isinstance(value, WindowedValue):
            raise TypeError(
                f"finish_bundle gave {value!r}; Beam takes a WindowedValue there and nothing else."
            )
        yield from outputs_of(result, 0, GlobalWindow(), windowing)


# ------------------------------------------------------------------------- the author's methods


@dataclass(frozen=True)
class _Call:
    """One call of a method of the author's: what its parameters are taken from."""

    slot: _Slot
    time: int
    tag: str = ""
    element: tuple[Hashable, object] | None = None


_Argument = Callable[[_Call], object]
_Method = Callable[[_Call], object]

_ANYWHERE: dict[str, _Argument] = {
    "KeyParam": lambda call: call.slot.key,
    "TimestampParam": lambda call: Timestamp(micros=call.time),
    "WindowParam": lambda call: call.slot.window,
}
_IN_PROCESS: dict[str, _Argument] = {
    **_ANYWHERE,
    "ElementParam": lambda call: call.element,
    "PaneInfoParam": lambda call: PANE_INFO_UNKNOWN,
    "WindowedValueParam": lambda call: WindowedValue(
        call.element, Timestamp(micros=call.time), (call.slot.window,), PANE_INFO_UNKNOWN
    ),
}
_IN_CALLBACK: dict[str, _Argument] = {
    **_ANYWHERE,
    "DynamicTimerTagParam": lambda call: call.tag,
}


class _Author:
    """The author's DoFn with its parameters bound."""

    def __init__(self, fn: core.DoFn, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        self.name = type(fn).__name__
        userstate.validate_stateful_dofn(fn)
        cells, timers = userstate.get_dofn_specs(fn)
        self.cell_specs = {spec.name: spec for spec in cells}
        self.combine_fns = {
            spec.name: copy.deepcopy(spec.combine_fn)
            for spec in cells
            if isinstance(spec, userstate.CombiningValueStateSpec)
        }
        for spec in cells:
            if type(spec) not in _CELLS:
                raise PipelineRefusedError(
                    f"{self.name}: no meaning is defined for cell {spec.name!r} of kind "
                    f"{type(spec).__name__}."
                )
        for combine_fn in self.combine_fns.values():
            combine_fn.setup()
        self.process = self._bind(fn.process, _IN_PROCESS, args, kwargs, takes_element=True)
        self.callbacks: dict[str, _Method] = {}
        for timer in timers:
            if timer.time_domain != TimeDomain.WATERMARK:
                raise PipelineRefusedError(
                    f"{self.name}: timer {timer.name!r} is in processing time, which an event "
                    "loop has not. Use TimeDomain.WATERMARK."
                )
            assert timer._attached_callback is not None  # validate_stateful_dofn has seen to it
            method = getattr(fn, timer._attached_callback.__name__)
            self.callbacks[timer.name] = self._bind(method, _IN_CALLBACK, (), {})

    def teardown(self) -> None:
        for combine_fn in self.combine_fns.values():
            combine_fn.teardown()

    def new_cell(self, name: str) -> _Cell:
        spec = self.cell_specs[name]
        if name in self.combine_fns:
            return _CombiningCell(spec.coder, self.combine_fns[name])
        return _CELLS[type(spec)](spec.coder)

    def _bind(
        self,
        method: Callable[..., object],
        known: Mapping[str, _Argument],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        takes_element: bool = False,
    ) -> _Method:
        """Decides once where each parameter of `method` comes from."""
        where = f"{self.name}.{method.__name__}"
        given = list(args)
        constant = dict(kwargs)
        computed: dict[str, _Argument] = {}
        for name, parameter in inspect.signature(method).parameters.items():
            default = parameter.default
            if _asks_beam(default):
                if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                    raise PipelineRefusedError(
                        f"{where}: {name} is a keyword-only parameter, which Beam does not bind. "
                        "Take the * before it away."
                    )
                computed[name] = self._argument(where, name, default, known)
                takes_element = takes_element and str(default) != "ElementParam"
            elif parameter.kind is parameter.VAR_KEYWORD:
                continue
            elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise PipelineRefusedError(
                    f"{where}: {parameter} cannot be given by name. Name each parameter."
                )
            elif takes_element and default is parameter.empty:
                computed[name] = _IN_PROCESS["ElementParam"]
                takes_element = False
            elif name in constant:
                continue
            elif given and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                constant[name] = given.pop(0)
            elif default is parameter.empty:
                raise PipelineRefusedError(f"{where}: nothing is given for the parameter {name}.")
        if given:
            raise PipelineRefusedError(f"{where}: {len(given)} extra arguments are too many.")

        def call(call: _Call) -> object:
            return method(**constant, **{name: take(call) for name, take in computed.items()})

        return call

    def _argument(
        self, where: str, name: str, default: object, known: Mapping[str, _Argument]
    ) -> _Argument:
        if isinstance(default, core._StateDoFnParam):
            cell = default.state_spec.name
            return lambda call: call.slot.cells[cell]
        if isinstance(default, core._TimerDoFnParam):
            family = default.timer_spec.name
            return lambda call: _Timer(family, call.slot)
        asked = str(getattr(default, "param_id", "BundleFinalizerParam"))
        if asked in known:
            return known[asked]
        raise PipelineRefusedError(
            f"{where}: no meaning is defined here for {name}=DoFn.{asked}; there are "
            f"{', '.join(sorted(known))}, StateParam and TimerParam."
        )


def _asks_beam(default: object) -> bool:
    # BundleFinalizerParam is the one parameter that authors name by its class.
    return isinstance(default, core._DoFnParam) or default is core.DoFn.BundleFinalizerParam


def _input_value_coder(fn: core.DoFn) -> Coder:
    hints = fn.get_type_hints().input_types
    pair = hints[0][0] if hints and hints[0] else None
    types: tuple[object, ...] = getattr(pair, "tuple_types", ())
    return registry.get_coder(types[1] if len(types) == 2 else AnyType)


class _Timer:
    """The author's handle on a family of timers: writes into the key's pending timers."""

    def __init__(self, family: str, slot: _Slot) -> None:
        self._family = family
        self._slot = slot
        self._pending = slot.timers

    def set(self, timestamp: TimestampTypes, dynamic_timer_tag: str = "") -> None:
        time = Timestamp.of(timestamp).micros
        if self._slot.closing and self._slot.expiry is not None and time > self._slot.expiry:
            return
        self._pending[self._family, dynamic_timer_tag] = time // _MS * _MS

    def clear(self, dynamic_timer_tag: str = "") -> None:
        self._pending.pop((self._family, dynamic_timer_tag), None)


# --------------------------------------------------------------------------------------- cells


class _Cell:
    """A cell holds encoded values only, so that no object is ever shared with the author."""

    def __init__(self, coder: Coder) -> None:
        self._coder = coder
        self._encoded: list[bytes] = []

    def _empty(self) -> bool:
        return not self._encoded

    def _values(self) -> list[object]:
        return [self._coder.decode(data) for data in self._encoded]

    def _save(self) -> object:
        return self._values()

    def _restore(self, value: object) -> None:
        self._encoded = [self._coder.encode(x) for x in cast(Iterable[object], value)]

    def clear(self) -> None:
        self._encoded = []


class _ValueCell(_Cell):
    def read(self) -> object:
        return self._coder.decode(self._encoded[0]) if self._encoded else None

    def write(self, value: object) -> None:
        self._encoded = [self._coder.encode(value)]

    def _empty(self) -> bool:
        return self.read() is None  # no author can tell a written None from an empty cell

    def _save(self) -> object:
        return self.read()

    def _restore(self, value: object) -> None:
        self.write(value)


class _BagCell(_Cell):
    def read(self) -> Iterable[object]:
        return self._values()

    def add(self, value: object) -> None:
        self._encoded.append(self._coder.encode(value))


class _SetCell(_Cell):
    def read(self) -> set[object]:
        return set(self._values())

    def add(self, value: object) -> None:
        if (data := self._coder.encode(value)) not in self._encoded:
            self._encoded.append(data)

    def _save(self) -> object:
        return frozenset(self._values())


class _CombiningCell(_Cell):
    """Holds one accumulator; an empty cell reads as the CombineFn's default, and stays empty."""

    def __init__(self, coder: Coder, combine_fn: core.CombineFn) -> None:
        super().__init__(coder)
        self._combine_fn = combine_fn

    def _accumulator(self) -> object:
        if self._encoded:
            return self._coder.decode(self._encoded[0])
        return self._combine_fn.create_accumulator()

    def read(self) -> object:
        return self._combine_fn.extract_output(self._accumulator())

    def add(self, value: object) -> None:
        self._restore(self._combine_fn.add_input(self._accumulator(), value))

    def _save(self) -> object:
        return self._accumulator()

    def _restore(self, value: object) -> None:
        self._encoded = [self._coder.encode(value)]


class _OrderedListCell(_Cell):
    def __init__(self, coder: Coder) -> None:
        super().__init__(coder)
        self._rows: list[tuple[int, bytes]] = []

    def _empty(self) -> bool:
        return not self._rows

    def add(self, elem: tuple[Timestamp, object]) -> None:
        timestamp, value = elem
        self._rows.append((timestamp.micros, self._coder.encode(value)))
        self._rows.sort(key=lambda row: row[0])

    def read(self) -> Iterable[tuple[Timestamp, object]]:
        return [(Timestamp(micros=t), self._coder.decode(data)) for t, data in self._rows]

    def read_range(
        self, min_timestamp: Timestamp, limit_timestamp: Timestamp
    ) -> Iterable[tuple[Timestamp, object]]:
        return [row for row in self.read() if min_timestamp <= row[0] < limit_timestamp]

    def clear(self) -> None:
        self._rows = []

    def clear_range(self, min_timestamp: Timestamp, limit_timestamp: Timestamp) -> None:
        low, limit = min_timestamp.micros, limit_timestamp.micros
        self._rows = [row for row in self._rows if not low <= row[0] < limit]

    def _save(self) -> object:
        return [(timestamp.micros, value) for timestamp, value in self.read()]

    def _restore(self, value: object) -> None:
        self._rows = [
            (t, self._coder.encode(x)) for t, x in cast(Iterable[tuple[int, object]], value)
        ]


_CELLS: dict[type[userstate.StateSpec], type[_Cell]] = {
    userstate.ReadModifyWriteStateSpec: _ValueCell,
    userstate.BagStateSpec: _BagCell,
    userstate.SetStateSpec: _SetCell,
    userstate.CombiningValueStateSpec: _CombiningCell,
    userstate.OrderedListStateSpec: _OrderedListCell,
}
