"""Retention, decided over facts: no store is needed to see it right."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_ckpt.retention import (
    GcFacts,
    KeepFor,
    KeepLast,
    RetentionFacts,
    RetentionPolicy,
    UnlistedSidecar,
    judge_unlisted,
    plan_before,
    plan_policy,
)


def fact(
    id: int, *, finalized: bool = True, ms: int = 0, sidecars: str = "", epoch: int | None = None
) -> RetentionFacts:
    return RetentionFacts(id, epoch or id, ms, finalized, frozenset(sidecars))


@pytest.mark.parametrize("count", [0, -1, True, 1.5])
def test_keeping_no_checkpoint_at_all_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KeepLast(count)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_keeping_for_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        KeepFor(seconds=seconds)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (KeepLast(3), "KeepLast(3)"),
        (KeepFor(days=1, hours=1), "KeepFor(seconds=90000)"),
        (KeepLast(1) | KeepFor(seconds=2), "KeepLast(1) | KeepFor(seconds=2)"),
        (KeepLast(1) & KeepLast(2), "(KeepLast(1)) & (KeepLast(2))"),
    ],
)
def test_policies_print_compare_and_pickle(policy: RetentionPolicy, text: str) -> None:
    assert str(policy) == text
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_keep_for_keeps_what_is_as_old_as_it_says() -> None:
    facts = [fact(1, ms=999), fact(2, ms=1000), fact(3, ms=5000)]
    assert KeepFor(seconds=4).keep(facts, now_ms=5000) == {2, 3}


@pytest.mark.parametrize(
    ("kept", "protected", "doomed", "sidecars"),
    [
        (1, set(), {1, 2, 3}, "abc"),
        (2, set(), {1, 2}, "ab"),
        (1, {1}, {2, 3}, "b"),
        (9, set(), {2}, ""),
    ],
)
def test_a_plan_dooms_what_nothing_keeps(
    kept: int, protected: set[int], doomed: set[int], sidecars: str
) -> None:
    facts = [
        fact(1, sidecars="a"),
        fact(2, sidecars="bx", finalized=False),
        fact(3, sidecars="bc" if kept == 1 and not protected else "acx"),
        fact(4, sidecars="dx"),
        fact(5, sidecars="ex", finalized=False),
    ]
    plan = plan_policy(facts, KeepLast(kept), protected=frozenset(protected), now_ms=0)
    assert {f.id for f in plan.doomed} == doomed
    held = {s for f in plan.kept for s in f.sidecars}
    assert not held & set(plan.sidecars)
    assert held | set(plan.sidecars) == {s for f in facts for s in f.sidecars}


def test_nothing_is_doomed_before_something_is_finalized() -> None:
    facts = [fact(1, finalized=False), fact(2, finalized=False)]
    assert plan_policy(facts, KeepLast(1), protected=frozenset(), now_ms=0).doomed == ()
    assert [f.id for f in plan_before(facts, 2, protected=frozenset()).doomed] == [1]


checkpoints = st.lists(
    st.tuples(st.integers(0, 30), st.booleans(), st.sets(st.sampled_from("abcdefgh"))),
    max_size=8,
).map(
    lambda rows: [
        RetentionFacts(n + 1, epoch + 1, epoch * 1000, final, frozenset(files))
        for n, (epoch, final, files) in enumerate(rows)
    ]
)
policies = st.recursive(
    st.one_of(
        st.integers(1, 5).map(KeepLast), st.integers(1, 40).map(lambda s: KeepFor(seconds=s))
    ),
    lambda inner: st.tuples(inner, inner, st.booleans()).map(
        lambda t: t[0] | t[1] if t[2] else t[0] & t[1]
    ),
    max_leaves=4,
)


@given(checkpoints, policies, st.sets(st.integers(1, 9)), st.integers(0, 40), st.integers(0, 40))
def test_no_plan_ever_takes_what_something_still_needs(
    facts: list[RetentionFacts],
    policy: RetentionPolicy,
    protected: set[int],
    now: int,
    before: int,
) -> None:
    newest = max((f.id for f in facts if f.finalized), default=None)
    plans = [
        plan_policy(facts, policy, protected=frozenset(protected), now_ms=now * 1000),
        plan_before(facts, before, protected=frozenset(protected)),
    ]
    for plan in plans:
        doomed = {f.id for f in plan.doomed}
        assert newest not in doomed
        assert not doomed & protected
        assert {f.id for f in plan.doomed + plan.kept} == {f.id for f in facts}
        assert list(plan.doomed) == sorted(plan.doomed, key=lambda f: f.id)
        for kept in plan.kept:
            assert not kept.sidecars & set(plan.sidecars)
        assert set(plan.sidecars) <= {s for f in plan.doomed for s in f.sidecars}
        ranges = plan.doomed_ranges()
        assert doomed == {f.id for f in facts if any(f.id in r for r in ranges)}
        assert len(ranges) <= 1 + len(plan.kept)
        spared = plan.sparing(doomed)
        assert (spared.doomed, spared.sidecars) == ((), ())


def gc_facts(**changes: object) -> GcFacts:
    known: dict[str, object] = {
        "generations": {"old": 1, "new": 2},
        "latest_id": 7,
        "latest_watermark": 100,
        "latest_generation": 2,
        "finalized_ms": {5: 1_000, 7: 2_000},
        "now_ms": 10_000,
        "grace_ms": 1_000,
    }
    return GcFacts(**(known | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run_id", "boundary", "saved_id", "written_ms", "goes", "why"),
    [
        ("old", 500, None, 1, True, "superseded by generation 2"),
        ("old", None, None, 1, True, "superseded by generation 2"),
        ("old", 500, None, 9_500, False, "grace"),
        ("new", 99, None, 1, True, "below that of checkpoint 7"),
        ("new", 99, None, 9_001, False, "grace"),
        ("new", 100, None, 1, False, "may still publish"),
        ("new", None, None, 1, False, "may still publish"),
        ("unclaimed", 500, None, 1, False, "may still publish"),
        ("unclaimed", 99, None, 1, True, "below"),
        (None, None, 6, None, True, "checkpoint 6 was never saved"),
        (None, None, 7, None, False, "may still be saved"),
        (None, None, None, None, False, "by hand"),
        ("old", 1, None, None, False, "by hand"),
    ],
)
def test_a_file_goes_when_nobody_can_publish_it_any_more(
    run_id: str | None,
    boundary: int | None,
    saved_id: int | None,
    written_ms: int | None,
    goes: bool,
    why: str,
) -> None:
    sidecar = UnlistedSidecar("state/a/0/x", 1, boundary, run_id, saved_id, written_ms)
    decided, reason = judge_unlisted(sidecar, gc_facts())
    assert decided is goes
    assert why in reason


def test_after_a_drained_end_boundaries_decide_nothing() -> None:
    sidecar = UnlistedSidecar("state/a/0/x", 1, 99, "new", None, 1)
    assert judge_unlisted(sidecar, gc_facts(latest_watermark=None))[0] is False


def test_what_a_younger_run_wrote_below_the_latest_cut_may_still_be_published() -> None:
    # It restored an older checkpoint, and has not come as far as the run before it.
    sidecar = UnlistedSidecar("state/a/0/x", 1, 50, "new", None, 1)
    assert judge_unlisted(sidecar, gc_facts(latest_generation=1))[0] is False
    assert judge_unlisted(sidecar, gc_facts(latest_generation=2))[0] is True


def test_state_saved_for_a_checkpoint_waits_for_the_grace_period_of_the_next() -> None:
    sidecar = UnlistedSidecar("state/a/0/x", 1, None, None, 6, None)
    assert judge_unlisted(sidecar, gc_facts(now_ms=2_999))[0] is False
    assert judge_unlisted(sidecar, gc_facts(now_ms=3_000))[0] is True
