"""What is promised when elements do not wait, and of elements that come too late."""

from __future__ import annotations

import uuid
from collections import Counter

import apache_beam as beam
import pytest
from apache_beam.coders import VarIntCoder
from apache_beam.transforms.userstate import BagStateSpec
from apache_beam.transforms.window import FixedWindows
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from beam_ckpt import open_store
from beam_ckpt.testing.cuts import run_checkpointed, saved_state
from beam_ckpt.testing.strategies import data_sets, stream_plans
from beam_ckpt.testing.streams import Advance, Arrive, StreamPlan

_S = 1_000_000
FEW = settings(
    max_examples=8, derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate]
)
MANY = settings(FEW, max_examples=50)


@beam.typehints.with_input_types(tuple[str, int])
@beam.typehints.with_output_types(tuple[str, int])
class KeepFn(beam.DoFn):
    """Keeps all that it sees, and says it."""

    SEEN = BagStateSpec("seen", VarIntCoder())

    def process(self, element, seen=beam.DoFn.StateParam(SEEN)):
        seen.add(element[1])
        yield element


def seen(store, checkpoint_id: int | None = None, **settings) -> Counter[tuple[str, int]]:
    saved = saved_state(store, KeepFn(), checkpoint_id=checkpoint_id, **settings)
    return Counter((key, value) for (key, _), kept in saved.items() for value in kept.cells["seen"])


def check_at_least_once(data, plan: StreamPlan, pick: int) -> None:
    elements = Counter((key, value) for _, key, value in data)
    store = open_store(f"memory://{uuid.uuid4().hex}")
    common = {
        "runner": "BundleBasedDirectRunner",
        "store": store,
        "alignment": "at_least_once",
        "every": 50,
        "keep": 1000,
    }
    first = run_checkpointed(KeepFn(), plan, **common)
    assert Counter(output.value for output in first.outputs) == elements
    assert first.metrics.get("elements_buffered", 0) == 0
    ids = store.list_ids()
    for id in ids:
        boundary = store.load_by_id(id).boundary
        below = Counter(
            (key, value) for at, key, value in data if boundary is None or at < boundary
        )
        saved = seen(store, id)
        assert below <= saved <= elements, boundary
    dated = [id for id in ids if store.load_by_id(id).boundary is not None]
    if not dated:
        return
    chosen = dated[pick % len(dated)]
    boundary, saved = store.load_by_id(chosen).boundary, seen(store, chosen)
    replayed = Counter((key, value) for at, key, value in data if at >= boundary)
    again = run_checkpointed(KeepFn(), plan, restore=chosen, **common)
    assert Counter(output.value for output in again.outputs) == replayed
    assert seen(store) == saved + replayed >= elements


def _property(examples) -> None:
    @examples
    @given(data=st.data(), pick=st.integers(0, 9))
    def holds(data, pick):
        drawn = [(at, key, i) for i, (at, key, _) in enumerate(data.draw(data_sets(max_size=12)))]
        check_at_least_once(drawn, data.draw(stream_plans(drawn)), pick)

    holds()


def test_without_alignment_nothing_waits_and_nothing_is_lost():
    _property(FEW)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_without_alignment_nothing_waits_and_nothing_is_lost_at_length():
    _property(MANY)


def test_an_element_that_did_not_wait_is_in_the_earlier_checkpoint_too():
    """The difference to exactly_once, which is why there are two."""
    early = StreamPlan((Arrive(((5 * _S, "a", 1), (75 * _S, "a", 2))), Advance(70 * _S)))
    for alignment, expected in (("exactly_once", 1), ("at_least_once", 2)):
        store = open_store(f"memory://{uuid.uuid4().hex}")
        run_checkpointed(
            KeepFn(), early, runner="BundleBasedDirectRunner", store=store, every=60,
            keep=9, alignment=alignment,
        )  # fmt: skip
        (first, *_) = store.list_ids()
        assert store.load_by_id(first).boundary == 60 * _S
        assert sum(seen(store, first).values()) == expected


LATE = ((30 * _S, "a", 7), (31 * _S, "new", 8), (90 * _S, "a", 3))


@pytest.mark.parametrize("runner", ["FnApiRunner", "BundleBasedDirectRunner"])
@pytest.mark.parametrize("time_sorted", [False, True])
def test_elements_below_the_restored_boundary_are_dropped_or_reprocessed(runner, time_sorted):
    first = ((5 * _S, "a", 1), (50 * _S, "b", 2))
    for late, expected, dropped, counted in (
        ("drop", {("a", 1), ("b", 2), ("a", 3)}, 2, 0),
        ("reprocess", {("a", 1), ("b", 2), ("a", 3), ("a", 7), ("new", 8)}, 0, 2),
    ):
        store = open_store(f"memory://{uuid.uuid4().hex}")
        source = {
            "FnApiRunner": lambda data: data,
            "BundleBasedDirectRunner": lambda data: StreamPlan((Arrive(data),)),
        }[runner]
        common = {"runner": runner, "store": store, "time_sorted": time_sorted, "every": 60}
        run_checkpointed(KeepFn(), source(first), until=60, **common)
        rest = run_checkpointed(KeepFn(), source(LATE), late=late, **common)
        assert seen(store) == Counter(expected)
        if runner == "FnApiRunner":  # the other one forgets the metrics of most bundles
            assert rest.metrics.get("elements_dropped_as_replayed", 0) == dropped
            assert rest.metrics.get("elements_late", 0) == counted


@pytest.mark.parametrize(("lateness", "kept"), [(0, 0), (45 * _S, 1)])
def test_an_element_of_a_window_that_is_over_is_dropped_and_counted(lateness, kept):
    store = open_store(f"memory://{uuid.uuid4().hex}")
    common = {
        "runner": "FnApiRunner",
        "store": store,
        "window_fn": FixedWindows(60),
        "lateness": lateness,
    }
    run_checkpointed(KeepFn(), ((5 * _S, "a", 1),), until=70, **common)
    late = ((6 * _S, "a", 2), (80 * _S, "a", 3))
    rest = run_checkpointed(KeepFn(), late, late="reprocess", until=100, **common)
    assert rest.metrics.get("elements_dropped_as_expired", 0) == 1 - kept
    values = sorted(seen(store, window_fn=FixedWindows(60), lateness=lateness))
    assert values == [("a", 1), ("a", 2), ("a", 3)][3 - 1 - 2 * kept :]
