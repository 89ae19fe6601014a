"""Cut equivalence on real runners: a history with cuts gives what one uninterrupted run gives.

The reference is the plain event loop of `beam_ckpt.testing.event_loop`, which has no runner in it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
from apache_beam.transforms.window import FixedWindows, Sessions, SlidingWindows, WindowFn
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st

from beam_ckpt import open_store
from beam_ckpt.testing.cuts import run_checkpointed, saved_state
from beam_ckpt.testing.event_loop import KeyedCells, canonical, run_event_loop
from beam_ckpt.testing.replay import ReplayLog
from beam_ckpt.testing.strategies import (
    DataSet,
    cuts,
    data_sets,
    intervals,
    key_group_counts,
    stream_plans,
)
from beam_ckpt.testing.streams import StreamPlan
from beam_ckpt.testing.subjects import MORE_CELLS, ORDER_FREE, ORDERED, TAGS, Subject
from beam_ckpt.transforms import Checkpoints
from beam_ckpt.transforms._limits import DEFAULT_LIMITS, Limits

SUBJECTS = (*ORDER_FREE, *ORDERED, *MORE_CELLS)
# The global window most of the time: the rest of the state is kept in it.
WINDOWS = (
    *[None] * 5,
    FixedWindows(60),
    FixedWindows(37, 5),
    SlidingWindows(90, 45),
    Sessions(30),
)
TINY = Limits(chunk_bytes=20, run_bytes=60, page_rows=2, page_bytes=200, file_bytes=600)
FEW = settings(max_examples=40, derandomize=True)
MANY = settings(max_examples=200, derandomize=True)
# A pipeline takes the better part of a second on Prism, so its examples are few, not the least
# ones, and not shrunk.
_PHASES = (Phase.explicit, Phase.generate)
FEW_OF_PRISM = settings(max_examples=2, derandomize=True, phases=_PHASES)
MANY_OF_PRISM = settings(max_examples=25, derandomize=True, phases=_PHASES)


def logs(data: DataSet) -> st.SearchStrategy[ReplayLog]:
    """The data for an unbounded source."""
    rows = [(at, (key, value)) for at, key, value in data]
    displacement = st.sampled_from([0, 5, 60])
    return st.builds(ReplayLog, st.just(rows), displacement, st.integers(0, 9))


def apart(data: DataSet) -> DataSet:
    """The same with no two elements of a key in one millisecond.

    Prism says a watermark of T while elements of T are on their way, so that those of one
    millisecond, coming in two bundles, come in no defined order.
    """
    taken: set[tuple[int, str]] = set()
    moved = []
    for at, key, value in data:
        while (at // 1000, key) in taken:
            at += 1000
        taken.add((at // 1000, key))
        moved.append((at, key, value))
    return tuple(moved)


SOURCES = {"batch": st.just, "stream": stream_plans, "live": logs}


@dataclass(frozen=True)
class History:
    """What one example is about: a pipeline, its data, and where it is cut."""

    subject: Subject
    data: DataSet
    source: StreamPlan | DataSet | ReplayLog
    cuts: tuple[int, ...]
    key_groups: tuple[int, ...]
    every: int | None
    window_fn: WindowFn | None
    lateness: int
    limits: Limits = DEFAULT_LIMITS
    max_files: int = 8

    @property
    def windowing(self):
        return {"window_fn": self.window_fn, "lateness": self.lateness}


@st.composite
def histories(
    draw: st.DrawFn,
    kind: str,
    size: int = 15,
    many: int = 1,
    least: int = 0,
    no_ties: bool = False,
    lateness: Sequence[int] = (0, 45_000_000),
) -> History:
    subject = draw(st.sampled_from(SUBJECTS))
    data = draw(data_sets(min_size=least, max_size=size))
    if no_ties:
        data = apart(data)
    boundaries = draw(cuts(max_cuts=many, aligned_to=[timestamp for timestamp, _, _ in data]))
    groups = draw(st.tuples(*[key_group_counts()] * (len(boundaries) + 1)))
    source = draw(SOURCES[kind](data))
    every = draw(st.one_of(st.none(), intervals()))
    if every is not None and every < 50_000_000:
        every = 50_000_000  # Shorter ones make many wake-ups and show nothing more.
    window_fn = draw(st.sampled_from(WINDOWS))
    allowed = draw(st.sampled_from(lateness))
    # What may be in memory or in one element at a time, and how soon files are merged.
    limits = draw(st.sampled_from([DEFAULT_LIMITS, TINY, TINY]))
    max_files = draw(st.sampled_from([1, 2, 8]))
    return History(
        subject, data, source, boundaries, groups, every, window_fn, allowed, limits, max_files
    )


def comparable(state):
    """State with bags as multisets and carried outputs in no order."""
    return {
        key: KeyedCells(
            {
                name: sorted(value, key=repr) if isinstance(value, list) else value
                for name, value in kept.cells.items()
            },
            dict(kept.timers),
            tuple(canonical(kept.carried)),
        )
        for key, kept in state.items()
    }


def run(history: History, runner: str, store, key_groups: int, **settings):
    with mock.patch.object(Checkpoints, "_limits", history.limits):
        return run_checkpointed(
            history.subject.fn,
            history.source,
            runner=runner,
            store=store,
            tags=TAGS,
            time_sorted=history.subject.time_sorted,
            key_groups=key_groups,
            max_files_per_group=history.max_files,
            # Where there are deltas at all, they go into the manifest in half of the histories.
            inline_threshold=65_536 if history.max_files == 2 else 0,
            **history.windowing,
            **settings,
        )


@contextlib.contextmanager
def memory_store():
    """A store without the cost of fsync, which shows nothing here; files are killed elsewhere."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    yield store
    # Nothing is left behind in this process.
    blobs = store.blobs
    blobs.delete_many([meta.key for meta in blobs.list("")])


def check_restarts(history: History, runner: str) -> None:
    """Run after run, each until the next cut: outputs together, and state at each cut."""
    subject, data = history.subject, history.data
    with memory_store() as store:
        outputs, reference = [], None
        for cut, key_groups in zip((*history.cuts, None), history.key_groups, strict=True):
            until = None if cut is None else cut / 1_000_000
            every = None if history.every is None else history.every / 1_000_000
            if reference is not None and reference.boundary is None:
                every = None
            part = run(history, runner, store, key_groups, until=until, every=every)
            outputs += part.outputs
            expected = run_event_loop(
                subject.fn, data, until=cut, restored=reference, **history.windowing
            )
            reference = expected.state
            note(f"cut {cut}: {len(part.outputs)} outputs, {part.metrics}")
            assert comparable(saved_state(store, subject.fn, **history.windowing)) == comparable(
                expected.state
            )
            assert store.load_latest().boundary == cut
            assert canonical(part.outputs) == canonical(expected.outputs)
        assert canonical(outputs) == canonical(
            run_event_loop(subject.fn, data, **history.windowing).outputs
        )


def check_epochs(history: History, runner: str, every: int, pick: int) -> None:
    """One run with many checkpoints: each holds its cut, and any of them can be gone on from."""
    subject, data = history.subject, history.data
    with memory_store() as store:
        settings = {"every": every / 1_000_000, "keep": 10_000}
        first, *_, last = history.key_groups
        whole = run(history, runner, store, first, **settings)
        loop = run_event_loop(subject.fn, data, **history.windowing)
        assert canonical(whole.outputs) == canonical(loop.outputs)
        ids = store.list_ids()
        for checkpoint_id in ids:
            manifest = store.load_by_id(checkpoint_id)
            assert manifest.durable_phase == "finalized"
            at_cut = run_event_loop(subject.fn, data, until=manifest.boundary, **history.windowing)
            saved = saved_state(store, subject.fn, checkpoint_id=checkpoint_id, **history.windowing)
            assert comparable(saved) == comparable(at_cut.state), manifest.boundary
        dated = [i for i in ids if store.load_by_id(i).boundary is not None]
        if not dated:
            return
        chosen = dated[pick % len(dated)]
        before = run_event_loop(
            subject.fn, data, until=store.load_by_id(chosen).boundary, **history.windowing
        )
        rest = run(history, runner, store, last, restore=chosen, **settings)
        assert canonical(before.outputs + rest.outputs) == canonical(loop.outputs)
        saved = saved_state(store, subject.fn, **history.windowing)
        assert comparable(saved) == comparable(loop.state)


@st.composite
def epochs(draw: st.DrawFn, kind: str, **settings) -> tuple[History, int, int]:
    history = draw(histories(kind, **settings))
    every = draw(st.sampled_from([50_000_000, 100_000_000, 61_001_000]))
    return history, every, draw(st.integers(0, 20))


def property_of(check, examples, runner: str, strategy) -> None:
    @examples
    @given(example=strategy)
    def holds(example):
        check(*example, runner=runner) if isinstance(example, tuple) else check(example, runner)

    holds()


def _epochs(history: History, every: int, pick: int, *, runner: str) -> None:
    check_epochs(history, runner, every, pick)


def of_prism(engine, least: int) -> dict[str, object]:
    """How examples are drawn for an engine."""
    if engine.runner != "PrismRunner":
        return {}
    return {
        "least": max(least, engine.source == "live"),
        "no_ties": engine.source == "stream",  # those of a log come together
        "lateness": (0,),  # any other is refused
    }


@pytest.mark.timeout(1200)
def test_restarts_from_cut_to_cut_give_what_one_run_gives(engine):
    examples = FEW_OF_PRISM if engine.runner == "PrismRunner" else FEW
    strategy = histories(engine.source, **of_prism(engine, least=4))
    property_of(check_restarts, examples, engine.runner, strategy)


@pytest.mark.timeout(1200)
def test_every_checkpoint_of_a_run_is_its_cut(engine):
    prism = engine.runner == "PrismRunner"
    examples = settings(FEW_OF_PRISM, max_examples=1) if prism else settings(FEW, max_examples=4)
    strategy = epochs(engine.source, **of_prism(engine, least=4))
    property_of(_epochs, examples, engine.runner, strategy)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_restarts_from_cut_to_cut_give_what_one_run_gives_at_length(engine):
    examples = MANY_OF_PRISM if engine.runner == "PrismRunner" else MANY
    strategy = histories(engine.source, size=25, **of_prism(engine, least=0))
    property_of(check_restarts, examples, engine.runner, strategy)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_checkpoint_of_a_run_is_its_cut_at_length(engine):
    prism = engine.runner == "PrismRunner"
    examples = (
        settings(MANY_OF_PRISM, max_examples=10) if prism else settings(MANY, max_examples=30)
    )
    strategy = epochs(engine.source, **of_prism(engine, least=0))
    property_of(_epochs, examples, engine.runner, strategy)


def test_the_strategies_reach_what_they_are_for():
    """Guards the property against examples that show nothing: cuts in the data, several keys."""
    seen: Sequence[str] = set()

    @settings(max_examples=200, derandomize=True, database=None)
    @given(histories("stream"))
    def look(history: History) -> None:
        times = [timestamp for timestamp, _, _ in history.data]
        if any(min(times, default=0) < cut <= max(times, default=0) for cut in history.cuts):
            seen.add("a cut within the data")
        if len({key for _, key, _ in history.data}) > 2:
            seen.add("several keys")
        if len(set(history.key_groups)) > 1:
            seen.add("another number of key groups")
        if history.source.elements != sorted(history.source.elements):
            seen.add("disorder")
        if history.limits is TINY and history.max_files == 1 and len(set(history.key_groups)) > 1:
            seen.add("tiny limits, compaction at every epoch, another number of key groups")
        seen.add(history.subject.name)
        seen.add(type(history.window_fn).__name__)

    look()
    assert {
        "a cut within the data",
        "several keys",
        "another number of key groups",
        "tiny limits, compaction at every epoch, another number of key groups",
        "disorder",
        "NoneType",
        "FixedWindows",
        "SlidingWindows",
        "Sessions",
    } <= seen
    assert {subject.name for subject in SUBJECTS} <= seen
