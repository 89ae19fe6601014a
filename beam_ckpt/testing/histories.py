"""Histories of generated DoFns: run, cut, restored, and run again, against the oracle.

A `History` is a program, its data and their disorder, windows, and up to five cuts. `check_faked`
runs one without a runner (`beam_ckpt.testing.fake_runner`), in milliseconds, and compares outputs
(with timestamps, windows and tags), carried outputs, state and pending timers with those of
`beam_ckpt.testing.event_loop` at each cut. Many of them::

    python -m beam_ckpt.testing.histories --examples 10000
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from apache_beam.transforms.window import (
    BoundedWindow,
    FixedWindows,
    GlobalWindow,
    Sessions,
    SlidingWindows,
    WindowFn,
)

from beam_ckpt.testing import strategies
from beam_ckpt.testing.event_loop import KeyedCells, LoopState, canonical, run_event_loop
from beam_ckpt.testing.fake_runner import Chaos, FakeCheckpoint, run_faked, state_of
from beam_ckpt.testing.generated import KINDS, TAGS, Program, dofn, programs, readable
from beam_ckpt.testing.read_once import beam_reads_once
from beam_ckpt.testing.streams import Arrive, Element, StreamPlan
from beam_ckpt.transforms.chunks import CHUNK_BYTES
from beam_ckpt.transforms.signature import Signature, read_signature

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = [
    "WINDOWS",
    "Chain",
    "History",
    "between",
    "chains",
    "check_chain_faked",
    "check_faked",
    "comparable",
    "count",
    "histories",
    "middle_of",
]

Row = tuple[str, str, tuple[int, ...]]
_SECOND = 1_000_000
WINDOWS: Sequence[WindowFn | None] = (
    *[None] * 5,
    FixedWindows(60),
    FixedWindows(37, 5),
    SlidingWindows(90, 45),
    Sessions(30),
)
"""The global window half of the time: the rest of the state is kept in it."""


CALM = Chaos()


@dataclass(frozen=True)
class History:
    """What one example is about. Times are microseconds.

    Attributes:
        program: What the DoFn does.
        order_free: Its result does not depend on the order within a key, so that `time_sorted` is
            off.
        source: A plan for a stream, or the elements of a batch in order of arrival.
        cuts: Where it is stopped and gone on from, ascending.
        every: The interval of checkpoints.
        key_groups: Of each run, one more than cuts.
        from_boundary: The source replays from the boundary, not all of its data.
        aligned: As `alignment="exactly_once"`.
        window_fn: Windows of the input.
        lateness: Their allowed lateness.
        forward: The program has no outputs in the past.
        chaos: What the fake runner makes of its freedom.
    """

    program: Program
    order_free: bool
    source: StreamPlan | Sequence[Element]
    cuts: tuple[int, ...] = ()
    every: int | None = None
    key_groups: tuple[int, ...] = (1,) * 6
    from_boundary: bool = False
    aligned: bool = True
    window_fn: WindowFn | None = None
    lateness: int = 0
    forward: bool = False
    chaos: Chaos = CALM

    @property
    def elements(self) -> Sequence[Element]:
        """The data."""
        return self.source.elements if isinstance(self.source, StreamPlan) else self.source

    def replayed(self, boundary: int | None) -> StreamPlan | Sequence[Element]:
        """What the source gives a run that goes on from `boundary`."""
        if boundary is None or not self.from_boundary:
            return self.source
        if isinstance(self.source, StreamPlan):
            return self.source.from_boundary(boundary)
        return [element for element in self.source if element[0] >= boundary]


State = Mapping[tuple[Hashable, BoundedWindow], KeyedCells]


def comparable(program: Program, state: State) -> State:
    """State to compare, without the orders that nobody promises."""
    return {
        slot: KeyedCells(kept.cells, kept.timers, tuple(canonical(kept.carried)))
        for slot, kept in ((slot, readable(program, kept)) for slot, kept in state.items())
    }


def check_faked(history: History) -> Counter[str]:
    """Runs a history without a runner; an `AssertionError` says what is not as in the oracle.

    Returns:
        How many records of cuts there were, by what they hold.
    """
    records: Counter[str] = Counter()
    program, fn = history.program, dofn(history.program)
    signature = read_signature(fn)
    windowing = history.window_fn, history.lateness
    checkpoint: FakeCheckpoint | None = None
    reference: LoopState | None = None
    outputs = []
    groups = None
    for cut, key_groups in zip((*history.cuts, None), history.key_groups, strict=False):
        run = run_faked(
            fn,
            history.replayed(None if checkpoint is None else checkpoint.boundary),
            signature=signature,
            until=cut,
            every=history.every,
            restored=checkpoint,
            time_sorted=not history.order_free,
            rewrite=checkpoint is not None and key_groups != groups,
            aligned=history.aligned,
            forward=history.forward,
            tags=TAGS,
            chaos=history.chaos,
            window_fn=history.window_fn,
            lateness=history.lateness,
        )
        groups = key_groups
        records += run.records
        expected = run_event_loop(
            fn,
            history.elements,
            until=cut,
            restored=reference,
            window_fn=history.window_fn,
            lateness=history.lateness,
        )
        assert canonical(run.outputs) == canonical(expected.outputs), f"outputs until {cut}"
        if history.aligned:
            _check_between(history, signature, run.checkpoints[:-1])
        checkpoint, reference = run.checkpoints[-1], expected.state
        assert checkpoint.boundary == cut
        saved = state_of(checkpoint, fn, signature, *windowing)
        assert comparable(program, saved) == comparable(program, expected.state), f"state at {cut}"
        outputs += run.outputs
    whole = run_event_loop(
        fn, history.elements, window_fn=history.window_fn, lateness=history.lateness
    )
    assert canonical(outputs) == canonical(whole.outputs), "the outputs of all runs together"
    if isinstance(history.source, StreamPlan):
        # (The runner itself drops what is left of a window that is over.)
        kept = {s for s in run.left if s[1] == GlobalWindow()} - set(whole.state)
        assert not kept, f"the runner is left with state of {kept}, and nothing is in it"
    return records


def _check_between(
    history: History, signature: Signature, checkpoints: Sequence[FakeCheckpoint]
) -> None:
    """Checkpoints at the interval, a few of them."""
    program, fn = history.program, dofn(history.program)
    for checkpoint in checkpoints[:: max(1, len(checkpoints) // 2)]:
        at_cut = run_event_loop(
            fn,
            history.elements,
            until=checkpoint.boundary,
            window_fn=history.window_fn,
            lateness=history.lateness,
        )
        saved = state_of(checkpoint, fn, signature, history.window_fn, history.lateness)
        assert comparable(program, saved) == comparable(program, at_cut.state), (
            f"state at {checkpoint.boundary}, with every={history.every}"
        )


@dataclass(frozen=True)
class Chain:
    """Two operators under one `Checkpoints`, the second on the first one's main output.

    Attributes:
        first: The first operator, its input and its cuts; `forward` and aligned.
        second: The program of the second one, which looks forward too.
        order_free: Of the second one.
        window_fn: Windows that the first one's output is put into for the second one.
    """

    first: History
    second: Program
    order_free: bool
    window_fn: WindowFn | None = None


def between(row: Row) -> tuple[str, int]:
    """What the second operator of a chain gets of an output of the first."""
    key, what, numbers = row
    return key, (len(what) + sum(numbers)) % 101


def check_chain_faked(chain: Chain) -> None:
    """Runs a chain without a runner, all restarts of it; see `check_faked`."""
    history, second = chain.first, chain.second
    fns = dofn(history.program), dofn(second)
    signatures = read_signature(fns[0]), read_signature(fns[1])
    middle = middle_of(chain)
    checkpoints: list[FakeCheckpoint | None] = [None, None]
    reference: LoopState | None = None
    outputs = []
    for cut in (*history.cuts, None):
        boundary = None if checkpoints[0] is None else checkpoints[0].boundary
        ahead = run_faked(
            fns[0],
            history.replayed(boundary),
            signature=signatures[0],
            until=cut,
            every=history.every,
            restored=checkpoints[0],
            time_sorted=not history.order_free,
            forward=True,
            tags=TAGS,
            chaos=history.chaos,
            window_fn=history.window_fn,
            lateness=history.lateness,
        )
        plan = StreamPlan(
            tuple(
                Arrive(tuple((at // 1000 * 1000, *between(cast(Row, row))) for at, _, row in e))
                if isinstance(step, Arrive) and (e := step.elements)
                else step
                for step in ahead.downstream
            )
        )
        streaming = isinstance(history.source, StreamPlan)
        behind = run_faked(
            fns[1],
            plan if streaming else plan.elements,
            signature=signatures[1],
            until=cut,
            every=history.every,
            restored=checkpoints[1],
            time_sorted=not chain.order_free,
            forward=True,
            tags=TAGS,
            chaos=history.chaos,
            window_fn=chain.window_fn,
        )
        expected = run_event_loop(
            fns[1], middle, until=cut, restored=reference, window_fn=chain.window_fn
        )
        assert canonical(behind.outputs) == canonical(expected.outputs), f"outputs until {cut}"
        checkpoints = [ahead.checkpoints[-1], behind.checkpoints[-1]]
        reference = expected.state
        saved = state_of(behind.checkpoints[-1], fns[1], signatures[1], chain.window_fn)
        assert comparable(second, saved) == comparable(second, expected.state), f"state at {cut}"
        outputs += behind.outputs
    whole = run_event_loop(fns[1], middle, window_fn=chain.window_fn)
    assert canonical(outputs) == canonical(whole.outputs), "the outputs of all runs together"


def middle_of(chain: Chain) -> list[Element]:
    """What the second operator gets in a run that is never stopped, by the oracle."""
    history = chain.first
    ahead = run_event_loop(
        dofn(history.program),
        history.elements,
        window_fn=history.window_fn,
        lateness=history.lateness,
    )
    return [
        (output.timestamp // 1000 * 1000, *between(cast(Row, output.value)))
        for output in ahead.outputs
        if output.tag is None
    ]


# ---------------------------------------------------------------------------------- strategies


@lru_cache
def histories(
    *,
    order_free: bool | None = None,
    kinds: tuple[str, ...] = KINDS,
    forward: bool = False,
    streaming: bool | None = None,
    max_size: int = 15,
    max_cuts: int = 5,
    lateness: tuple[int, ...] = (0, 45 * _SECOND),
    least_every: int = 7 * _SECOND,
    data: SearchStrategy[strategies.DataSet] | None = None,
) -> SearchStrategy[History]:
    """Histories of one operator.

    Args:
        order_free: The class of programs; both by default.
        kinds: Kinds of cells.
        forward: Only programs without timers and outputs in the past.
        streaming: Plans, or batches; both by default.
        max_size: The greatest number of elements.
        max_cuts: The greatest number of cuts.
        lateness: Allowed latenesses to choose from.
        least_every: The least interval of checkpoints.
        data: Where the elements come from; by default all kinds of data sets.
    """
    from hypothesis import strategies as st

    choice = st.booleans()
    data_sets = data
    if data_sets is None:
        bursts = strategies.data_sets(min_size=1, max_size=max_size)
        data_sets = st.one_of(bursts, strategies.trickles(max_size))
    intervals = st.one_of(st.none(), strategies.intervals())
    # Where the number changes all is written anew, and nothing stands on what was before.
    count = strategies.key_group_counts()
    groups = st.one_of(count.map(lambda n: (n,) * 6), st.tuples(*[count] * 6))
    chunk_bytes = st.sampled_from([CHUNK_BYTES, CHUNK_BYTES, 40, 7])
    bag_bytes, waiting_bytes = st.sampled_from([0, 3, 256]), st.sampled_from([0, 30, 2048])
    chaos = st.builds(Chaos, st.integers(0, 1 << 16), choice, chunk_bytes, bag_bytes, waiting_bytes)
    windows, lags = st.sampled_from(WINDOWS), st.sampled_from(lateness)
    alignment = st.sampled_from([True, True, False])

    def draw_one(draw: DrawFn) -> History:
        free = draw(choice) if order_free is None else order_free
        program = draw(programs(order_free=free, kinds=kinds, forward=forward))
        elements = draw(data_sets)
        as_stream = draw(choice) if streaming is None else streaming
        source: StreamPlan | Sequence[Element] = (
            draw(strategies.stream_plans(elements)) if as_stream else elements
        )
        moments = [at for at, _, _ in elements]
        cuts = draw(strategies.cuts(max_cuts=max_cuts, aligned_to=moments))
        every = draw(intervals)
        return History(
            program=program,
            order_free=free,
            source=source,
            cuts=cuts,
            every=None if every is None else max(every, least_every),
            key_groups=draw(groups),
            from_boundary=draw(choice),
            aligned=draw(alignment) if free else True,
            window_fn=draw(windows),
            lateness=draw(lags),
            forward=forward,
            chaos=draw(chaos),
        )

    return st.composite(draw_one)()


@lru_cache
def chains(
    *, second_is_order_free: bool | None = None, kinds: tuple[str, ...] = KINDS, **of_first: Any
) -> SearchStrategy[Chain]:
    """Chains of two operators.

    Args:
        second_is_order_free: The class of the second one's programs; both by default.
        kinds: Kinds of cells.
        **of_first: Arguments of `histories` for the first one.
    """
    from hypothesis import strategies as st

    first = histories(forward=True, kinds=kinds, **of_first)
    windows, choice = st.sampled_from(WINDOWS), st.booleans()

    def draw_one(draw: DrawFn) -> Chain:
        free = draw(choice) if second_is_order_free is None else second_is_order_free
        second = draw(programs(order_free=free, forward=True, kinds=kinds))
        return Chain(replace(draw(first), aligned=True), second, free, draw(windows))

    return st.composite(draw_one)()


# ------------------------------------------------------------------------------------- command


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks as many histories as asked for; 1 and the smallest one that failed, if one did."""
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st

    parser = argparse.ArgumentParser("python -m beam_ckpt.testing.histories", description=__doc__)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-shrink", action="store_true", help="print the first failure as it is")
    chosen = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    started = time.monotonic()

    @seed(chosen.seed)
    @settings(
        max_examples=chosen.examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate, *([] if chosen.no_shrink else [Phase.shrink])],
        suppress_health_check=list(HealthCheck),
    )
    @given(example=st.one_of(histories(), histories(forward=True), chains(max_cuts=3)))
    def holds(example: History | Chain) -> None:
        if isinstance(example, Chain):
            counts["chains of two"] += 1
            check_chain_faked(example)
        else:
            for held, number in check_faked(example).items():
                counts[f"records: {held}"] += number
        count(example.first if isinstance(example, Chain) else example, counts)

    try:
        with beam_reads_once():
            holds()
    except AssertionError as error:
        print(f"FAILED: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 1
    print(f"{chosen.examples} histories in {time.monotonic() - started:.0f} s, 0 bad:")
    for what, number in sorted(counts.items()):
        print(f"  {number:6} {what}")
    return 0


def count(history: History, counts: Counter[str]) -> None:
    """Counts what a history is about, so that a report can say what has been looked at."""
    counts["a stream" if isinstance(history.source, StreamPlan) else "a batch"] += 1
    counts["order-free" if history.order_free else "time-sorted"] += 1
    counts[f"windows: {type(history.window_fn).__name__}"] += 1
    counts[f"{len(history.cuts)} cuts"] += 1
    for kind in set(history.program.cells):
        counts[f"cells: {kind}"] += 1
    counts[f"{len(history.program.callbacks)} timer families"] += 1
    counts["every: none" if history.every is None else "every: some"] += 1


if __name__ == "__main__":
    sys.exit(main())
