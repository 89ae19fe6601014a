"""A drained stream: what it published while it ended is marked; the next one starts before it."""

from __future__ import annotations

import uuid

import pytest

from beam_ckpt import open_store
from beam_ckpt.testing.cuts import run_checkpointed, saved_state
from beam_ckpt.testing.event_loop import canonical, run_event_loop
from beam_ckpt.testing.streams import Advance, Arrive, StreamPlan
from beam_ckpt.testing.subjects import CountAndSumFn

_S = 1_000_000
DATA = tuple((at * _S, "ab"[at % 2], at) for at in range(0, 400, 9))
# What the source had delivered when it was drained: nothing of the last epochs is whole.
DELIVERED = tuple(e for e in DATA if e[0] < 160 * _S) + tuple(
    e for e in DATA[::2] if e[0] > 160 * _S
)


streams = pytest.mark.parametrize("runner", ["BundleBasedDirectRunner", "PrismRunner"])


def source(data, watermark: int) -> StreamPlan:
    """Data that ends with the watermark still at `watermark`: then it jumps to the end of time."""
    return StreamPlan(
        (
            Arrive(tuple(e for e in data if e[0] < watermark)),
            Advance(watermark - 1000),
            Arrive(tuple(e for e in data if e[0] >= watermark)),
        )
    )


@pytest.fixture(autouse=True)
def prism_where_asked(request):
    if "PrismRunner" in request.node.name:
        request.getfixturevalue("prism")


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}")


def run(runner, data, store, watermark=150 * _S, **settings):
    return run_checkpointed(
        CountAndSumFn(), source(data, watermark), runner=runner, store=store,
        every=50, keep=2, tags=("odd", "due", "was"), **settings,
    )  # fmt: skip


@streams
def test_the_next_stream_starts_before_the_drain_and_misses_nothing(runner, store):
    first = run(runner, DELIVERED, store)
    marks = {id: store.load_by_id(id).drained for id in store.list_ids()}
    manifests = {id: store.load_by_id(id) for id in marks}
    exact = [id for id, drained in marks.items() if not drained]
    assert exact, marks
    assert marks[max(marks)]
    assert manifests[max(marks)].boundary is None
    # Drained ones are the newest ones, and have not taken the place of what was before them.
    assert exact == [id for id in marks if id < min(id for id, d in marks.items() if d)]
    assert len(exact) == 2
    assert len(marks) == 4, "while it was drained nothing was pruned"
    boundary = manifests[max(exact)].boundary
    assert boundary is not None

    rest = run(runner, DATA, store)
    before = run_event_loop(CountAndSumFn(), DATA, until=boundary)
    whole = run_event_loop(CountAndSumFn(), DATA)
    kept = [output for output in first.outputs if output.timestamp < boundary]
    assert canonical(kept) == canonical(before.outputs)
    assert canonical(kept + rest.outputs) == canonical(whole.outputs)
    saved = saved_state(store, CountAndSumFn(), checkpoint_id=max(store.list_ids()))
    assert saved == dict(whole.state)


@streams
def test_the_drained_end_is_gone_on_from_on_request(runner, store):
    run(runner, DELIVERED, store)
    left = tuple(e for e in DATA if e not in DELIVERED)
    run(runner, left, store, restore="drained")
    whole = run_event_loop(CountAndSumFn(), DATA)
    saved = saved_state(store, CountAndSumFn(), checkpoint_id=max(store.list_ids()))
    assert saved == dict(whole.state)


def test_a_batch_that_ends_is_not_drained(store):
    run_checkpointed(CountAndSumFn(), DATA, runner="FnApiRunner", store=store, every=50)
    assert not any(store.load_by_id(id).drained for id in store.list_ids())
    assert b"drained" not in store.load_latest().to_json()
