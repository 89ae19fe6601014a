"""For the authors of DoFns: does yours survive a restart, and what is in a store?

`assert_cut_equivalent` runs a stateful DoFn over a few elements twice: in one piece, and stopped at
each cut and started again from its checkpoint. Both have to give the same outputs and leave the
same state:

>>> import apache_beam as beam
>>> from apache_beam.coders import VarIntCoder
>>> from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
>>> class TotalsFn(beam.DoFn):
...     TOTAL = ReadModifyWriteStateSpec("total", VarIntCoder())
...     def process(self, element, total=beam.DoFn.StateParam(TOTAL)):
...         total.write((total.read() or 0) + element[1])
...         yield element[0], total.read()
>>> assert_cut_equivalent(TotalsFn(), [(0, "ada", 3), (40, "ada", 4), (90, "bob", 5)], cuts=[40])

What it finds is what a restart loses: state in an attribute of the DoFn, in a global, in a coder
that does not give back what it was given; and what no run repeats: random values and the wall
clock. `state_of` reads what a checkpoint holds.
"""

from __future__ import annotations

import pickle
import uuid
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import apache_beam as beam
from apache_beam.internal import pickler
from apache_beam.transforms.window import BoundedWindow, TimestampedValue, WindowFn
from apache_beam.typehints import typehints
from apache_beam.typehints.trivial_inference import instance_to_type
from apache_beam.utils.timestamp import Duration, Timestamp

from beam_ckpt.errors import PipelineRefusedError
from beam_ckpt.store import CheckpointStore, ObjectStoreCheckpointStore, open_store
from beam_ckpt.testing.cuts import run_checkpointed, run_plain, saved_state
from beam_ckpt.testing.event_loop import KeyedCells, Output
from beam_ckpt.testing.streams import Element
from beam_ckpt.transforms.signature import read_signature
from beam_ckpt.transforms.state_io import AnyStore, ReadState, saved_cells

__all__ = ["assert_cut_equivalent", "state_of"]

Seconds = int | float | Timestamp
"""A moment of event time."""

_MS = 1_000
_UID = "subject"
_RUNNER = "FnApiRunner"
# Each key group is a file, and one of them shows as much as 128.
_KEY_GROUPS = 2
_SHOWN = 200
_UNORDERED = ("bag", "set", "ordered_list")

State = Mapping[tuple[Hashable, BoundedWindow], KeyedCells]


def assert_cut_equivalent(
    fn: beam.DoFn,
    elements: Iterable[tuple[Seconds, Hashable, object] | TimestampedValue[Any]],
    cuts: Iterable[Seconds] | None = None,
    *,
    time_sorted: bool = False,
    tags: Sequence[str] = (),
    input_type: object = None,
    windows: WindowFn | None = None,
    allowed_lateness: float | Duration = 0,
    kwargs: Mapping[str, object] | None = None,
) -> None:
    """Fails if a stateful DoFn that is stopped and started again does anything else.

    Runs `fn` in a `~beam_ckpt.transforms.CheckpointedParDo` on FnApiRunner, with stores in memory:
    from cut to cut, each run restored from the checkpoint of the one before, and then to the end of
    the input. At each cut and at the end all outputs so far, the state and the pending timers are
    compared with those of a run that started at the beginning and was never interrupted. The
    elements are given to every run in the order in which they are given here.

    The outputs of the uninterrupted run are compared with those of a plain `beam.ParDo` as well,
    where they are the same by definition: elements in the order in which they come
    (`time_sorted=False`) and no timers, of which plain Beam leaves the order open when several
    are due.

    It takes 2 runs for each cut and 2 more, a good second each on a busy machine.

    Args:
        fn: The author's DoFn.
        elements: (event time in seconds, key, value), or a `TimestampedValue` of (key, value).
        cuts: Event times in seconds, whole milliseconds. What lies before a cut is applied before
            the restart, what lies at or after it afterwards. By default up to three: the time of
            the element after a third and after two thirds of the (distinct) times, and 1 ms after
            the last one, when only timers are left.
        time_sorted: Give elements to the DoFn in event-time order; say it where
            `CheckpointedParDo` is told so.
        tags: Of the tagged outputs to compare.
        input_type: Type hint of the (key, value) pairs. By default that of `fn`, or else what the
            elements are.
        windows: Of the input; the global one by default.
        allowed_lateness: Of the windows, seconds.
        kwargs: More arguments of ``process``.

    Raises:
        AssertionError: A restart makes a difference. Says the first one, at which cut it shows,
            and what is the likely reason.
        PipelineRefusedError: The test would show nothing (no elements, no cut after the first of
            them, nothing saved at any cut), or `fn` is not one that can be checkpointed, or has
            processing-time timers, whose fires no two runs have in common.
    """
    rows = [_element(item) for item in elements]
    name = type(fn).__name__
    signature = read_signature(fn, (), kwargs)
    if "processing" in signature.domains:
        raise PipelineRefusedError(
            f"{name} has processing-time timers, which fire by the wall clock: no two runs of it "
            "are the same. What to do: test the part that goes by event time in a DoFn of its own."
        )
    boundaries = _default_cuts(rows) if cuts is None else sorted({_micros(cut) for cut in cuts})
    if not rows or not boundaries or boundaries[-1] <= min(row[0] for row in rows):
        raise PipelineRefusedError(
            f"no element lies before a cut ({len(rows)} elements, {len(boundaries)} cuts), so that "
            "nothing would be restored. What to do: give elements, and a cut after the first one."
        )
    hint = _input_type(fn, rows) if input_type is None else input_type
    case = _Case(
        fn,
        tuple(rows),
        tuple(boundaries),
        time_sorted,
        tuple(tags),
        hint,
        _output_type(fn, hint),
        windows,
        Duration.of(allowed_lateness).micros,
        dict(kwargs or {}),
        frozenset(cell.name for cell in signature.cells if cell.kind in _UNORDERED),
    )
    if not time_sorted and not signature.timers:
        case.check_against_plain()
    saved = case.check()
    if not saved:
        raise PipelineRefusedError(
            f"{name} had neither state nor timers at any cut, so that nothing was restored. What "
            "to do: give other elements, or cuts at which it keeps something."
        )


def state_of(
    store: AnyStore,
    uid: str,
    *,
    at: str | int = "latest",
    cells: beam.DoFn | type[beam.DoFn] | None = None,
    windows: WindowFn | None = None,
    allowed_lateness: float | Duration = 0,
    unsafe_unpickle: bool = False,
) -> dict[Any, dict[str, Any]]:
    """Returns what a checkpoint holds of one operator, without a pipeline.

    Args:
        store: A path, a URL, or a `~beam_ckpt.CheckpointStore`.
        uid: The operator.
        at: ``"latest"`` (the newest valid one), or the id or a tag of a checkpoint.
        cells: The author's DoFn, or its class: its coders read the values; see
            `~beam_ckpt.transforms.ReadState`.
        windows: The operator's window function, where it is in other windows than the global one.
        allowed_lateness: Of these windows, seconds.
        unsafe_unpickle: Whether recorded coders may unpickle.

    Returns:
        ``{key: {cell: value}}``, with every cell, and `None` or an empty list or set for an empty
        one; ``{(key, window): {cell: value}}`` where `windows` are given.

    Raises:
        CheckpointNotFoundError: No store, no such checkpoint or operator.
        NoValidCheckpointError: All checkpoints are damaged.
        StateIncompatibleError: The given coders are not those that the state was saved with.
    """
    read = ReadState(
        store,
        uid,
        at,
        cells=cells,
        windows=windows,
        allowed_lateness=allowed_lateness,
        unsafe_unpickle=unsafe_unpickle,
    )
    return {
        key if windows is None else (key, window): values
        for key, window, values in saved_cells(read)
    }


# ---------------------------------------------------------------------- the runs
@dataclass(frozen=True)
class _Case:
    """A DoFn, its input and where it is cut. Times in µs."""

    fn: beam.DoFn
    elements: tuple[Element, ...]
    cuts: tuple[int, ...]
    time_sorted: bool
    tags: tuple[str, ...]
    input_type: Any
    output_type: Any
    windows: WindowFn | None
    lateness: int
    kwargs: dict[str, Any]
    unordered: frozenset[str]
    uninterrupted_runs: dict[int | None, tuple[list[Output], State]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return type(self.fn).__name__

    def check(self) -> int:
        """Compares from cut to cut; returns how many keys were saved at the cuts."""
        found = self.first_difference()
        if isinstance(found, int):
            return found
        cut, difference, error = found
        raise AssertionError(
            f"{self.name} does not survive the restart at the cut at {_time(cut)} "
            f"({self.cuts.index(cut) + 1} of {len(self.cuts)}).\n{difference}\n{self.reason()}"
        ) from error

    def check_against_plain(self) -> None:
        plain = run_plain(
            self.fn,
            self.elements,
            runner=_RUNNER,
            tags=self.tags,
            input_type=self.input_type,
            window_fn=self.windows,
            lateness=self.lateness,
            kwargs=self.kwargs,
        )
        difference = _output_difference(plain.outputs, self.uninterrupted(None)[0], _PLAIN)
        if difference is not None:
            raise AssertionError(
                f"{self.name} gives other outputs in a CheckpointedParDo than in a beam.ParDo, "
                f"without any restart.\n{difference}\n{self.reason(_BUNDLES)}"
            )

    def first_difference(self) -> int | tuple[int, str, Exception | None]:
        """How many keys were saved at the cuts; or the cut and what differs after it."""
        outputs: list[Output] = []
        saved = 0
        with _memory_store() as store:
            for restored_at, until in zip((None, *self.cuts), (*self.cuts, None), strict=True):
                if restored_at is None:
                    outputs, state = self.run(store, until)
                    saved += len(state)
                    continue
                expected, expected_state = self.uninterrupted(until)
                try:
                    more, state = self.run(store, until)
                except Exception as error:
                    # An uninterrupted run got as far.
                    what = f"the restored run fails: {type(error).__name__}: {_short(str(error))}"
                    return restored_at, what, error
                outputs += more
                saved += len(state) if until is not None else 0
                differences = (
                    _output_difference(expected, outputs, _RESTARTED),
                    _state_difference(expected_state, state, until, self.unordered),
                )
                if any(differences):
                    return restored_at, "\n".join(filter(None, differences)), None
        return saved

    def uninterrupted(self, until: int | None) -> tuple[list[Output], State]:
        if until not in self.uninterrupted_runs:
            with _memory_store() as store:
                self.uninterrupted_runs[until] = self.run(store, until)
        return self.uninterrupted_runs[until]

    def run(self, store: CheckpointStore, until: int | None) -> tuple[list[Output], State]:
        outputs = run_checkpointed(
            self.fn,
            self.elements,
            runner=_RUNNER,
            store=store,
            uid=_UID,
            tags=self.tags,
            input_type=self.input_type,
            window_fn=self.windows,
            lateness=self.lateness,
            time_sorted=self.time_sorted,
            key_groups=_KEY_GROUPS,
            until=None if until is None else Timestamp(micros=until),
            **self.kwargs,
        ).outputs
        state = saved_state(
            store,
            self.fn,
            uid=_UID,
            input_type=self.input_type,
            output_type=self.output_type,
            window_fn=self.windows,
            lateness=self.lateness,
        )
        return outputs, state

    def again(self) -> _Case:
        """The same, nothing of it run yet."""
        return replace(self, uninterrupted_runs={})

    def reason(self, agreeing: str | None = None) -> str:
        """The likely reason of a difference, found out by more runs.

        Args:
            agreeing: What to say where uninterrupted runs agree with each other.
        """
        outputs, state = self.uninterrupted(None)
        outputs_again, state_again = self.again().uninterrupted(None)
        if _output_difference(outputs, outputs_again, _RESTARTED) or _state_difference(
            state, state_again, None, self.unordered
        ):
            return (
                "Two uninterrupted runs differ as well, so that what it does is no function of its "
                "input: it uses random values, the wall clock, or something that lives longer than "
                "a run (a global, an attribute of its class). What to do: take these from the "
                "element, its timestamp or the state."
            )
        if agreeing is not None:
            return agreeing
        if not self.time_sorted:
            in_order = replace(self.again(), time_sorted=True)
            if isinstance(in_order.first_difference(), int):
                return (
                    "With time_sorted=True there is no difference, so what it does depends on the "
                    "order of its elements and timers, which Beam leaves open. What to do: give "
                    "time_sorted=True, here and to CheckpointedParDo."
                )
        return (
            "Uninterrupted runs agree with each other, so something that it goes by is not "
            "restored: an attribute of the DoFn, say, or what a coder leaves out. What to do: keep "
            "it in a state cell."
        )


@contextmanager
def _memory_store() -> Iterator[CheckpointStore]:
    store = cast(ObjectStoreCheckpointStore, open_store(f"memory://{uuid.uuid4().hex}"))
    try:
        yield store
    finally:
        # What is in memory stays there for as long as the process lives.
        store.blobs.delete_many([meta.key for meta in store.blobs.list("")])


# ---------------------------------------------------------------------- what is compared
_RESTARTED = ("without the restart", "with it")
_BUNDLES = (
    "What to do: see that it does not depend on bundles (start_bundle, finish_bundle), which "
    "differ between the two. If it does not, that is a fault of beam_ckpt: please report it."
)
_PLAIN = ("with beam.ParDo", "with CheckpointedParDo")


def _output_difference(
    expected: Sequence[Output], found: Sequence[Output], sides: tuple[str, str]
) -> str | None:
    missing, extra = _unmatched(expected, found)
    if not missing and not extra:
        return None
    lines = []
    for what, side, outputs in (("missing", sides[0], missing), ("extra", sides[1], extra)):
        if outputs:
            first = min(outputs, key=lambda o: (o.timestamp, o.tag or "", repr(o.value)))
            more = f" (and {len(outputs) - 1} more)" if len(outputs) > 1 else ""
            lines.append(f"  {what} output, only {side}: {_describe(first)}{more}")
    return "\n".join(lines)


def _state_difference(
    expected: State, found: State, at: int | None, unordered: frozenset[str]
) -> str | None:
    when = "at the end" if at is None else f"at {_time(at)}"
    for slot in sorted({*expected, *found}, key=repr):
        a, b = expected.get(slot, KeyedCells()), found.get(slot, KeyedCells())
        key, window = slot
        where = f"  state {when} of key {_short(repr(key))} in {window!r}"
        for cell in sorted({*a.cells, *b.cells}):
            values = a.cells.get(cell), b.cells.get(cell)
            if not (_same_items(*values) if cell in unordered else _same(*values)):
                return f"{where}, cell {cell!r}: {_sides(*map(_cell, values))}"
        for timer in sorted({*a.timers, *b.timers}):
            due = a.timers.get(timer), b.timers.get(timer)
            if due[0] != due[1]:
                family, tag = timer
                named = repr(family.removeprefix("ts-")) + (f" with tag {tag!r}" if tag else "")
                return f"{where}, timer {named}: {_sides(*map(_due, due))}"
        missing, extra = _unmatched(a.carried, b.carried)
        if missing or extra:
            shown = (_describe(outputs[0]) if outputs else "none" for outputs in (missing, extra))
            return f"{where}, output kept for later: {_sides(*shown)}"
    return None


def _unmatched(
    expected: Sequence[Output], found: Sequence[Output]
) -> tuple[list[Output], list[Output]]:
    """What only one of two multisets has."""

    def place(output: Output) -> tuple[int, str | None, BoundedWindow]:
        return output.timestamp, output.tag, output.window

    # Equal bytes are equal values, NaN and objects that cannot be compared among them. Equal values
    # need not have equal bytes, so the few that are left are compared one by one.
    common = Counter((place(o), _bytes(o.value)) for o in found)
    common &= Counter((place(o), _bytes(o.value)) for o in expected)

    def rest(outputs: Sequence[Output]) -> list[Output]:
        paired, left = common.copy(), []
        for output in outputs:
            at = place(output), _bytes(output.value)
            if paired[at]:
                paired[at] -= 1
            else:
                left.append(output)
        return left

    missing, extra = [], rest(found)
    for output in rest(expected):
        for i, other in enumerate(extra):
            if place(output) == place(other) and _same(output.value, other.value):
                del extra[i]
                break
        else:
            missing.append(output)
    return missing, extra


def _same_items(a: object, b: object) -> bool:
    """Of a bag, a set or an ordered list (whose times are part of its items), in any order."""
    rest = list(cast(Iterable[object], b or ()))
    for value in cast(Iterable[object], a or ()):
        at = next((i for i, other in enumerate(rest) if _same(value, other)), None)
        if at is None:
            return False
        del rest[at]
    return not rest


def _same(a: object, b: object) -> bool:
    try:
        if a == b:
            return True
    except Exception:
        pass  # An array, say: it has no one answer.
    return type(a) is type(b) and _bytes(a) == _bytes(b)


def _bytes(value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:
        encoded: bytes = pickler.dumps(value)  # what is defined in a function or in __main__
        return encoded


# ---------------------------------------------------------------------- how it is told
def _describe(output: Output) -> str:
    tag = "" if output.tag is None else f", tag {output.tag!r}"
    return f"{_short(repr(output.value))} at {_time(output.timestamp)} in {output.window!r}{tag}"


def _sides(expected: str, found: str) -> str:
    return f"{expected} {_RESTARTED[0]}, {found} {_RESTARTED[1]}"


def _cell(value: object) -> str:
    return "empty" if value is None else _short(repr(value))


def _due(fire: int | None) -> str:
    return "not set" if fire is None else f"due at {_time(fire)}"


def _time(micros: int) -> str:
    return f"{Timestamp(micros=micros)!r}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


# ---------------------------------------------------------------------- what the author gave
def _element(item: object) -> Element:
    if isinstance(item, TimestampedValue):
        key, value = item.value
        return _micros(item.timestamp), key, value
    timestamp, key, value = cast(tuple[Seconds, Hashable, object], item)
    return _micros(timestamp), key, value


def _micros(moment: Seconds) -> int:
    # To the nearest microsecond: 1.001 is 1,001 ms, whatever its binary fraction.
    return round(moment * 1_000_000) if isinstance(moment, float) else Timestamp.of(moment).micros


def _default_cuts(elements: Sequence[Element]) -> list[int]:
    times = sorted({timestamp // _MS * _MS for timestamp, _, _ in elements})
    if not times:
        return []
    inner = {times[len(times) // 3], times[2 * len(times) // 3]} - {times[0]}
    return sorted({*inner, times[-1] + _MS})


def _input_type(fn: beam.DoFn, elements: Sequence[Element]) -> Any:
    hints = fn.get_type_hints().input_types
    declared = hints[0][0] if hints and hints[0] else None
    if len(getattr(declared, "tuple_types", ())) == 2:
        return declared
    keys = tuple({instance_to_type(key) for _, key, _ in elements})
    values = tuple({instance_to_type(value) for _, _, value in elements})
    return typehints.Tuple[typehints.Union[keys], typehints.Union[values]]


def _output_type(fn: beam.DoFn, input_type: Any) -> Any:
    """Of the main output, as `CheckpointedParDo` finds it."""
    hints = fn.get_type_hints()
    if hints.output_types and hints.output_types[0]:
        return hints.simple_output_type(_UID)
    return fn.infer_output_type(input_type) or typehints.Any
