"""Generated DoFns: a stateful DoFn made of a small program, and Hypothesis strategies for those.

A `Program` says which cells and timer families a DoFn has and what `process` and each timer
callback do, step by step; `dofn(program)` is that DoFn: importable, picklable, and a function of
its events alone. What it does has no purpose but to be nasty: it reads cells into a register,
writes it to others, sets, clears and overwrites timers in the past and the future, and emits the
register now, later, under a tag, in its own window.

    >>> fn = dofn(Program(cells=("value",), process=(Read(0), Write(0), Emit())))
    >>> from beam_ckpt.testing.event_loop import run_event_loop
    >>> [o.value for o in run_event_loop(fn, [(0, "a", 1), (1000, "a", 2)]).outputs]
    [('a', 'process', (32,)), ('a', 'process', (96,))]

Every program ends: a timer's tag counts how often a callback may set another one, and a timer that
sets itself again uses up fuel, which only elements bring.

Programs are of two classes. The result of `programs()` depends on the order of a key's events, so
it is defined with time-sorted input only. That of `programs(order_free=True)` does not: cells are
only added to, and a callback looks only at what belongs to its own period, which is over.

`hypothesis` is imported when a strategy is asked for.
"""

from __future__ import annotations

import copy
import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import apache_beam as beam
from apache_beam.coders import FastPrimitivesCoder, TupleCoder, VarIntCoder
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms import core, userstate
from apache_beam.transforms.combiners import CountCombineFn, MeanCombineFn, TopCombineFn
from apache_beam.transforms.core import CallableWrapperCombineFn
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.window import GlobalWindow, TimestampedValue
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import PANE_INFO_UNKNOWN, WindowedValue

from beam_ckpt.testing.event_loop import KeyedCells

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = [
    "TAGS",
    "Add",
    "Again",
    "Arm",
    "Cancel",
    "Clear",
    "Collect",
    "Emit",
    "Fold",
    "Program",
    "Range",
    "Read",
    "Refuel",
    "Set",
    "When",
    "Write",
    "dofn",
    "programs",
    "readable",
]

TAGS = ("left", "right")
"""The tags that programs emit under."""

_SECOND = 1_000_000
_MODULUS = 1009
_PAIR = TupleCoder((VarIntCoder(), VarIntCoder()))
_COMBINE_FNS: dict[str, Callable[[], beam.CombineFn]] = {
    "count": CountCombineFn,
    "mean": MeanCombineFn,
    "sum": lambda: CallableWrapperCombineFn(sum),
    "top": lambda: TopCombineFn(2),
}
KINDS = ("value", "bag", "set", "list", *_COMBINE_FNS)
"""Kinds of cells; those of the CombineFns are combining cells."""


# ------------------------------------------------------------------------------------ programs
# Offsets are microseconds from the time of the element or timer. `cell` and `timer` are indices.


@dataclass(frozen=True)
class Read:
    """Mixes what a cell holds into the register."""

    cell: int


@dataclass(frozen=True)
class Write:
    """Writes the register to a cell, or adds it."""

    cell: int


@dataclass(frozen=True)
class Add:
    """Adds the element's own value to a cell, which shows nothing of the order of elements."""

    cell: int


@dataclass(frozen=True)
class Fold:
    """`Read`, then `Write`: the order of a key's events shows from then on."""

    cell: int


@dataclass(frozen=True)
class Clear:
    """Clears a cell."""

    cell: int


@dataclass(frozen=True)
class Range:
    """Reads a range of an ordered list into the register, and clears it if told."""

    cell: int
    low: int
    limit: int
    clear: bool = False


@dataclass(frozen=True)
class Set:
    """Sets a timer; `depth` more may be set from its callback, each of them with one less."""

    timer: int
    offset: int
    tag: str = ""
    depth: int = 0


@dataclass(frozen=True)
class Cancel:
    """Clears a timer."""

    timer: int
    tag: str = ""
    depth: int = 0


@dataclass(frozen=True)
class Again:
    """In a callback: sets the very timer that fires, if there is fuel left."""

    offset: int


@dataclass(frozen=True)
class Refuel:
    """In `process`: fuel for so many `Again`."""

    amount: int


@dataclass(frozen=True)
class Emit:
    """Emits the register: at the event's time, or `offset` from it, maybe in its own window."""

    offset: int | None = None
    tag: str | None = None
    windowed: bool = False


@dataclass(frozen=True)
class Arm:
    """In `process`: sets a timer `lag` behind the end of the element's period."""

    timer: int
    lag: int


@dataclass(frozen=True)
class Collect:
    """In a callback: reads what the timer's period holds, and takes it out if told."""

    cell: int
    take: bool = False


Step = (
    Read | Write | Fold | Add | Clear | Range | Set | Cancel | Again | Refuel | Emit | Arm | Collect
)


@dataclass(frozen=True)
class When:
    """A step that is done if the register's remainder is `rest`."""

    modulus: int
    rest: int
    step: Step


@dataclass(frozen=True)
class Program:
    """What a generated DoFn does.

    Attributes:
        cells: Their kinds.
        process: The steps for an element; the register starts with its value.
        callbacks: For each timer family the steps of its callback; the register starts with a
            number made of its tag and time.
        period: Of `Arm` and `Collect`, and of what is added to cells, microseconds.
        returns_list: The methods return lists; otherwise they are generators.
    """

    cells: tuple[str, ...] = ()
    process: tuple[Step | When, ...] = ()
    callbacks: tuple[tuple[Step | When, ...], ...] = ()
    period: int = 60 * _SECOND
    returns_list: bool = False

    @property
    def steps(self) -> Iterator[Step]:
        """All steps."""
        for steps in (self.process, *self.callbacks):
            for step in steps:
                yield step.step if isinstance(step, When) else step


# --------------------------------------------------------------------------------- interpreter


@beam.typehints.with_input_types(tuple[str, int])
@beam.typehints.with_output_types(tuple[str, str, tuple[int, ...]])
class _GeneratedFn(beam.DoFn):
    """The base of all generated classes; `dofn` makes them."""

    program = Program()

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Any, ...]:
        return dofn, (self.program,)

    def __repr__(self) -> str:
        return f"dofn({self.program!r})"


def dofn(program: Program) -> beam.DoFn:
    """The DoFn of a program: `(str, int)` to `(key, what, (register,))`."""
    fn: beam.DoFn = _class_of(program)()
    return fn


def _cell_name(index: int, kind: str) -> str:
    return f"c{index}_{kind}"


def _spec(index: int, kind: str) -> userstate.StateSpec:
    name = _cell_name(index, kind)
    if kind == "value":
        return userstate.ReadModifyWriteStateSpec(name, VarIntCoder())
    if kind == "bag":
        return userstate.BagStateSpec(name, _PAIR)
    if kind == "set":
        return userstate.SetStateSpec(name, _PAIR)
    if kind == "list":
        return userstate.OrderedListStateSpec(name, VarIntCoder())
    return userstate.CombiningValueStateSpec(name, FastPrimitivesCoder(), _COMBINE_FNS[kind]())


@lru_cache(maxsize=256)
def _class_of(program: Program) -> type[_GeneratedFn]:
    """A class like one that is written by hand: Beam binds parameters from their defaults."""
    param = inspect.Parameter
    state: list[tuple[str, Any]] = [
        (f"cell{i}", beam.DoFn.StateParam(_spec(i, kind))) for i, kind in enumerate(program.cells)
    ]
    if any(isinstance(step, Again | Refuel) for step in program.steps):
        fuel = userstate.ReadModifyWriteStateSpec("fuel", VarIntCoder())
        state.append(("fuel", beam.DoFn.StateParam(fuel)))
    families = [
        userstate.TimerSpec(f"t{i}", TimeDomain.WATERMARK) for i in range(len(program.callbacks))
    ]
    state += [(f"timer{i}", beam.DoFn.TimerParam(spec)) for i, spec in enumerate(families)]
    common: list[tuple[str, Any]] = [
        ("ts", beam.DoFn.TimestampParam),
        ("window", beam.DoFn.WindowParam),
        *state,
    ]

    def method(
        name: str, steps: tuple[Step | When, ...], first: str, default: Any, more: list[Any]
    ) -> Any:
        signature = inspect.Signature(
            [
                param("self", param.POSITIONAL_OR_KEYWORD),
                param(first, param.POSITIONAL_OR_KEYWORD, default=default),
                *(
                    param(name, param.POSITIONAL_OR_KEYWORD, default=given)
                    for name, given in (*more, *common)
                ),
            ]
        )

        def body(*args: Any, **kwargs: Any) -> Iterable[Any]:
            given = signature.bind(*args, **kwargs).arguments
            outputs = _Call(program, name, given).run(steps)
            return list(outputs) if program.returns_list else outputs

        body.__name__ = body.__qualname__ = name
        body.__signature__ = signature  # type: ignore[attr-defined]
        return body

    methods = {"process": method("process", program.process, "element", param.empty, [])}
    for i, (spec, steps) in enumerate(zip(families, program.callbacks, strict=True)):
        tag = ("tag", beam.DoFn.DynamicTimerTagParam)
        callback = method(f"on_t{i}", steps, "key", beam.DoFn.KeyParam, [tag])
        methods[f"on_t{i}"] = userstate.on_timer(spec)(callback)
    for name, function in list(methods.items()):
        methods[f"_inspect_{name}"] = _inspector(function)
    made = type("GeneratedFn", (_GeneratedFn,), {**methods, "program": program})
    made.__module__ = __name__
    return made


def _inspector(function: Any) -> Any:
    """Beam asks this hook before it reads a signature, which takes it longer."""
    names, defaults = core.get_function_args_defaults(function)

    def inspected(self: Any) -> tuple[list[str], list[Any]]:
        return list(names[1:]), list(defaults)

    return inspected


def _depth(tag: str) -> int:
    _, slash, depth = tag.rpartition("/")
    return int(depth) if slash else 0


def _tag(name: str, depth: int) -> str:
    return f"{name}/{depth}" if depth else name


class _Call:
    """One call of a method: the register, and what the steps act on."""

    def __init__(self, program: Program, method: str, given: dict[str, Any]) -> None:
        self._program, self._given, self._method = program, given, method
        self._ts: Timestamp = given["ts"]
        self._micros = int(self._ts.micros)
        self._tag: str | None = given.get("tag")
        if self._tag is None:
            self._key, self._value = given["element"]
            self._what = method
        else:
            self._key = given["key"]
            self._value = zlib.crc32(self._tag.encode()) % 97 + self._micros // _SECOND % 97
            self._what = f"{method} {self._tag}"
        self._x: int = self._value

    def run(self, steps: Iterable[Step | When]) -> Iterator[Any]:
        for step in steps:
            if isinstance(step, When):
                if self._x % step.modulus != step.rest:
                    continue
                step = step.step
            if isinstance(step, Emit):
                yield self._emit(step)
            else:
                getattr(self, f"_{type(step).__name__.lower()}")(step)

    def _mix(self, seen: Iterable[int]) -> None:
        for number in seen:
            self._x = (self._x * 31 + number) % _MODULUS

    def _cell(self, index: int) -> tuple[str, Any]:
        return self._program.cells[index], self._given[f"cell{index}"]

    # ------------------------------------------------------------------ cells
    def _read(self, step: Read) -> None:
        kind, cell = self._cell(step.cell)
        held = cell.read()
        if kind == "value":
            self._mix([1 if held is None else held + 2])
        elif kind in ("bag", "set"):  # neither has an order
            self._mix(number for pair in sorted(held) for number in pair)
        elif kind == "list":
            self._mix(number for at, value in held for number in (at.micros // 1000, value))
        elif kind == "top":
            self._mix(held)
        else:
            self._mix([round(held * 1000) if held == held else 7])  # the mean of nothing is NaN

    def _write(self, step: Write) -> None:
        self._put(step.cell, self._x)

    def _fold(self, step: Fold) -> None:
        self._read(Read(step.cell))
        self._put(step.cell, self._x)

    def _add(self, step: Add) -> None:
        kind, cell = self._cell(step.cell)
        if kind == "value":
            cell.write((cell.read() or 0) + self._value + 1)
        else:
            self._put(step.cell, self._value)

    def _put(self, index: int, value: int) -> None:
        kind, cell = self._cell(index)
        if kind == "value":
            cell.write(value)
        elif kind in ("bag", "set"):
            cell.add((self._micros // self._program.period, value))
        elif kind == "list":
            cell.add((self._ts, value))
        else:
            cell.add(value)

    def _clear(self, step: Clear) -> None:
        self._cell(step.cell)[1].clear()

    def _range(self, step: Range) -> None:
        cell = self._cell(step.cell)[1]
        ends = [Timestamp(micros=self._micros + offset) for offset in (step.low, step.limit)]
        for at, value in cell.read_range(*ends):
            self._mix((at.micros // 1000, value))
        if step.clear:
            cell.clear_range(*ends)

    def _collect(self, step: Collect) -> None:
        assert self._tag is not None
        index = int(self._tag.partition("+")[0])
        kind, cell = self._cell(step.cell)
        if kind == "list":
            period = self._program.period
            ends = [Timestamp(micros=i * period) for i in (index, index + 1)]
            items = sorted((at.micros // 1000, value) for at, value in cell.read_range(*ends))
            if step.take:
                cell.clear_range(*ends)
        else:
            held = sorted(cell.read())
            items = [pair for pair in held if pair[0] == index]
            if step.take:
                cell.clear()
                for pair in held:
                    if pair[0] != index:
                        cell.add(pair)
        self._mix(number for pair in items for number in pair)

    # ------------------------------------------------------------------ timers
    def _set(self, step: Set) -> None:
        depth = step.depth
        if self._tag is not None:
            depth = min(depth, _depth(self._tag) - 1)
        if depth >= 0:
            at = Timestamp(micros=self._micros + step.offset)
            self._given[f"timer{step.timer}"].set(at, dynamic_timer_tag=_tag(step.tag, depth))

    def _cancel(self, step: Cancel) -> None:
        self._given[f"timer{step.timer}"].clear(_tag(step.tag, step.depth))

    def _again(self, step: Again) -> None:
        fuel = self._given["fuel"]
        left = fuel.read() or 0
        if left > 0:
            fuel.write(left - 1)
            timer = self._given[f"timer{self._method.removeprefix('on_t')}"]
            timer.set(Timestamp(micros=self._micros + step.offset), dynamic_timer_tag=self._tag)

    def _refuel(self, step: Refuel) -> None:
        fuel = self._given["fuel"]
        fuel.write(min((fuel.read() or 0) + step.amount, 5))

    def _arm(self, step: Arm) -> None:
        index = self._micros // self._program.period
        at = (index + 1) * self._program.period + step.lag
        window = self._given["window"]
        # At its end a window's timers fire, whether all of the window's elements are in or not.
        if window == GlobalWindow() or at < window.max_timestamp().micros // 1000 * 1000:
            timer = self._given[f"timer{step.timer}"]
            timer.set(Timestamp(micros=at), dynamic_timer_tag=f"{index}+{step.lag}")

    # ------------------------------------------------------------------ outputs
    def _emit(self, step: Emit) -> Any:
        output: Any = (self._key, self._what, (self._x,))
        if step.offset is not None or step.windowed:
            at = Timestamp(micros=self._micros + (step.offset or 0))
            if step.windowed:
                output = WindowedValue(output, at, (self._given["window"],), PANE_INFO_UNKNOWN)
            else:
                output = TimestampedValue(output, at)
        return output if step.tag is None else TaggedOutput(step.tag, output)


def readable(program: Program, kept: KeyedCells) -> KeyedCells:
    """State to compare: bags and lists as multisets, accumulators by what is extracted of them."""
    cells = dict(kept.cells)
    for i, kind in enumerate(program.cells):
        name = _cell_name(i, kind)
        if name not in cells:
            continue
        if kind in _COMBINE_FNS:
            combine_fn: Any = _COMBINE_FNS[kind]()
            # A copy: some CombineFns change what they are given.
            merged = combine_fn.merge_accumulators([copy.deepcopy(cells[name])])
            cells[name] = combine_fn.extract_output(merged)
        elif isinstance(value := cells[name], list):
            cells[name] = sorted(value)
    return KeyedCells(cells, dict(kept.timers), kept.carried)


# ---------------------------------------------------------------------------------- strategies


@lru_cache
def programs(
    *, order_free: bool = False, forward: bool = False, kinds: tuple[str, ...] = KINDS
) -> SearchStrategy[Program]:
    """Programs, shrinking towards fewer steps, cells and timers, and towards offset 0.

    Args:
        order_free: Only programs whose result does not depend on the order of a key's elements.
        forward: No timer and no output in the past, as it has to be for what a second operator is
            to get on time.
        kinds: Of the cells.
    """
    from hypothesis import strategies as st

    shapes = st.tuples(st.lists(st.sampled_from(kinds), max_size=3).map(tuple), st.integers(0, 3))
    return shapes.flatmap(lambda shape: _of_shape(*shape, order_free, forward))


_OFFSETS = [0, 1_000, 10 * _SECOND, 25 * _SECOND, 60 * _SECOND, 1_500, 200 * _SECOND]
_PAST = [-1_000, -5 * _SECOND, -60 * _SECOND, -1_500, -300 * _SECOND]
_NAMES = ["", "a", "ä", "b"]
_LAGS = [0, 1_000, 25 * _SECOND, 70 * _SECOND]


@cache  # building strategies costs more than drawing from them
def _of_shape(
    cells: tuple[str, ...], families: int, order_free: bool, forward: bool
) -> SearchStrategy[Program]:
    from hypothesis import strategies as st

    families = families if cells else max(families, 1)
    offsets = st.sampled_from(_OFFSETS if forward else [*_OFFSETS, *_PAST])
    emit: SearchStrategy[Step] = st.builds(
        Emit, st.one_of(st.none(), offsets), st.sampled_from([None, *TAGS]), st.booleans()
    )
    every: list[SearchStrategy[Step]] = [emit]
    in_process: list[SearchStrategy[Step]] = []
    in_callback: list[SearchStrategy[Step]] = []
    if order_free:
        if cells:
            in_process.append(st.builds(Add, st.integers(0, len(cells) - 1)))
        if families:
            lags = st.sampled_from(_LAGS)
            in_process.append(st.builds(Arm, st.integers(0, families - 1), lags))
        dated = [i for i, kind in enumerate(cells) if kind in ("bag", "set", "list")]
        if dated:
            in_callback.append(st.builds(Collect, st.sampled_from(dated), st.booleans()))
    else:
        if cells:
            cell = st.integers(0, len(cells) - 1)
            every += [st.builds(step, cell) for step in (Fold, Read, Write, Clear)]
        ordered = [i for i, kind in enumerate(cells) if kind == "list"]
        if ordered:
            ends = st.sampled_from([0, -25 * _SECOND, -1_000, 1_000, 25 * _SECOND])
            index = st.sampled_from(ordered)
            every.append(st.builds(Range, index, ends, ends, st.booleans()))
        if families:
            timer, name = st.integers(0, families - 1), st.sampled_from(_NAMES)
            depth = st.integers(0, 2)
            every += [st.builds(Set, timer, offsets, name, depth)] * 2
            every.append(st.builds(Cancel, timer, name, depth))
            in_process.append(st.builds(Refuel, st.integers(1, 3)))
            in_callback.append(st.builds(Again, offsets))

    def steps(more: list[SearchStrategy[Step]]) -> SearchStrategy[tuple[Step | When, ...]]:
        step = st.one_of(*every, *more)
        rest = st.sampled_from([(2, 0), (2, 1), (3, 0), (5, 1)])
        guarded = st.tuples(rest, step).map(lambda drawn: When(*drawn[0], drawn[1]))
        some = st.lists(st.one_of(step, step, guarded), max_size=5)
        # What is not emitted is seen at the end only, so most methods end with an output.
        last = st.sampled_from([[Emit()], [Emit()], []])
        return st.tuples(some, last).map(lambda parts: tuple(parts[0] + parts[1]))

    periods = st.sampled_from([60 * _SECOND, 100 * _SECOND, 7 * _SECOND])
    return st.builds(
        Program,
        st.just(cells),
        steps(in_process),
        st.tuples(*[steps(in_callback)] * families),
        periods,
        st.booleans(),
    )
