"""A checkpoint that is rewritten, and what goes on from it."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import StrUtf8Coder, VarIntCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    OrderedListStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.utils.timestamp import Timestamp

from beam_ckpt import errors, inspect, open_store, rewrite
from beam_ckpt.keygroups import key_group
from beam_ckpt.testing.cuts import run_checkpointed, saved_state
from beam_ckpt.testing.event_loop import LoopState, canonical, run_event_loop
from beam_ckpt.transforms import WriteState
from beam_ckpt.transforms.snapshot import CarriedOutput, SavedTimer, SnapshotRecord

S = 1_000_000
START, CUT, TTL = 1_000, 1_060, 40
# Seven keys; of these `key 0` is not seen again before the cut.
DATA = [
    ((START + second) * S, f"key {second % 7 or second}", second % 5) for second in range(0, 100, 3)
]


def counting_fn(cell: str) -> beam.DoFn:
    """A DoFn whose first cell has this name."""

    class CountFn(beam.DoFn):
        COUNT = ReadModifyWriteStateSpec(cell, VarIntCoder())
        SEEN = BagStateSpec("seen", VarIntCoder())
        DATED = OrderedListStateSpec("dated", StrUtf8Coder())
        LATER = TimerSpec("later", TimeDomain.WATERMARK)

        def process(
            self,
            element,
            ts=beam.DoFn.TimestampParam,
            count=beam.DoFn.StateParam(COUNT),
            seen=beam.DoFn.StateParam(SEEN),
            dated=beam.DoFn.StateParam(DATED),
            later=beam.DoFn.TimerParam(LATER),
        ):
            key, value = element
            count.write((count.read() or 0) + 1)
            seen.add(value)
            dated.add((ts, f"{key}/{value}"))
            later.set(ts + 500)
            yield key, count.read(), sorted(seen.read()), [v for _, v in dated.read()]

        @on_timer(LATER)
        def on_later(self, key=beam.DoFn.KeyParam, count=beam.DoFn.StateParam(COUNT)):
            yield key, count.read(), [], []
            count.clear()

    return CountFn()


def go(store, fn, uid="before", **settings) -> Any:
    return run_checkpointed(fn, DATA, runner="FnApiRunner", store=store, uid=uid, **settings)


def test_bootstrap_run_rewrite_run_is_a_run_that_had_that_history(store):
    """Renamed operator and cell, rows too old, 128 key groups that become 16."""
    with beam.Pipeline(runner="FnApiRunner") as p:
        rows = [(f"key {n}", {"count": 10 * n}) for n in (3, 5, 99)]
        _ = (
            p
            | beam.Create(rows, reshuffle=False).with_output_types(tuple[str, dict[str, Any]])
            | WriteState(store, "before", counting_fn("count"), boundary=START)
        )
    started = LoopState(saved_state(store, counting_fn("count"), uid="before"), START * S)
    go(store, counting_fn("count"), until=CUT)
    first = run_event_loop(counting_fn("count"), DATA, until=CUT * S, restored=started)
    base = store.load_latest()
    assert base.key_group_count == 128
    assert saved_state(store, counting_fn("count"), uid="before") == dict(first.state)

    report = rewrite(
        store,
        rename_operators={"before": "after"},
        rename_cells={("before", "count"): "n"},
        key_groups=16,
        ttl=TTL,
    )

    last = {f"key {n}": START for n in (3, 5, 99)}  # written at the boundary
    last |= {key: at // S for at, key, _ in DATA if at < CUT * S}
    history = {
        (key, window): replace(
            kept, cells={"n" if c == "count" else c: v for c, v in kept.cells.items()}
        )
        for (key, window), kept in first.state.items()
        if last[key] >= CUT - TTL
    }
    gone = len(first.state) - len(history)
    assert 0 < gone < len(first.state)
    (operator,) = report.operators
    assert (operator.expired, operator.rows, operator.was) == (gone, len(history), "before")
    latest = store.load_latest()
    assert (latest.id, latest.key_group_count, latest.boundary) == (report.id, 16, CUT * S)
    assert (latest.parent_id, latest.epoch) == (base.checkpoint_id, base.epoch + 1)
    assert latest.pipeline.beam_version == base.pipeline.beam_version
    assert saved_state(store, counting_fn("n"), uid="after") == history
    assert store.validate_checkpoint(latest.id, deep=True).valid
    assert store.load_by_id(base.id) == base  # as it was
    assert store.validate_checkpoint(base.id, deep=True).valid

    rest = run_event_loop(counting_fn("n"), DATA, restored=LoopState(history, CUT * S))
    assert len(rest.outputs) > 10
    ours = go(store, counting_fn("n"), uid="after", key_groups=16)
    assert canonical(ours.outputs) == canonical(rest.outputs)


# ---------------------------------------------------------------------- without pipelines
LATER = SavedTimer("flush", "", "event", 900 * S, None)


def rows(store, uid="totals", at="latest") -> dict[str, Any]:
    table = inspect.state(store, uid, at=at)
    cells = [name for name in table.column_names if name != "key" and not name.startswith("_")]
    return {row["key"]: {c: row[c] for c in cells} for row in table.to_pylist()}


def test_rows_go_by_condition_with_their_timers_and_leave_what_they_have_emitted(store, made):
    output = CarriedOutput(None, 150 * S, b"", b"out")
    emitted = CarriedOutput(None, 90 * S, b"", b"was before the cut")
    records = [
        made.record("a", 1, timers=(LATER,)),
        made.record("b", 5),
        made.record("c", 2, carried=(emitted, output)),
        made.record("d", 3, carried=(emitted,)),
        made.record("e", None, words=("x", "y")),
    ]
    made.save(store, records)
    report = rewrite(store, drop_where={"totals": "count < 4 -- not null"})
    (one,) = report.operators
    assert (one.matched, one.timers, one.rows) == (3, 1, 3)
    assert rows(store) == {
        "b": {"count": 5, "word": None},
        "c": {"count": None, "word": None},
        "e": {"count": None, "word": ["x", "y"]},
    }
    carried = inspect.state(store, "totals", key="c")["_carried"].to_pylist()
    assert [[c["value"] for c in outputs] for outputs in carried] == [[b"out"]]


def test_a_condition_sees_lists_and_untyped_cells_as_the_command_sql_does(store, made):
    made.save(store, [made.record("a", 1, words=("x",)), made.record("b", 2, words=("y", "z"))])
    rewrite(store, drop_where={"totals": "list_contains(word, 'z') AND key LIKE 'b%'"})
    assert set(rows(store)) == {"a"}


@pytest.mark.parametrize("key_groups", [1, 2, 3, 7, 10, 64])
def test_any_number_of_key_groups_becomes_any_other(store, made, key_groups):
    base = made.save(store, [made.record(f"key {n}", n) for n in range(50)])
    base = made.save(store, [made.record(f"key {n}", -n) for n in range(0, 50, 3)], base=base)
    before = rows(store)
    report = rewrite(store, key_groups=key_groups)
    latest = store.load_latest()
    assert rows(store) == before
    assert latest.key_group_count == report.key_groups == key_groups
    assert before["key 3"] == {"count": -3, "word": None}
    for partition in latest.operators["totals"].partitions:
        (entry,) = partition.sidecars
        assert (entry.kind, entry.epoch) == ("full", latest.epoch)
        keys = inspect.state(store, "totals", at=latest.id)["_key"].to_pylist()
        mine = [k for k in keys if key_group(k, key_groups) == partition.partition_id]
        assert entry.rows == len(mine)


def test_what_is_not_changed_is_listed_again_and_not_written(store, made):
    other = replace(made.OPERATOR, uid="other")
    base = made.save(store, [made.record("a", 1)])
    base = made.save(store, [made.record("b", 2)], operator=other, base=base)
    report = rewrite(store, rename_operators={"totals": "sums"})
    assert [(o.operator, o.rewritten) for o in report.operators] == [
        ("other", False),
        ("sums", True),
    ]
    latest = store.load_latest()
    assert latest.operators["other"] == base.operators["other"]
    assert rows(store, "sums") == {"a": {"count": 1, "word": None}}
    assert set(latest.pipeline.operators) == {"other", "sums"}


def test_cells_are_dropped_and_keys_that_have_nothing_else_go_with_them(store, made):
    made.save(
        store,
        [
            made.record("a", 1),
            made.record("b", 2, words=("x",)),
            made.record("c", 3, timers=(LATER,)),
        ],
    )
    rewrite(store, drop_cells=[("totals", "count")], rename_cells={("totals", "word"): "key"})
    assert inspect.state(store, "totals").column_names[:2] == ["key", "cell:key"]
    assert rows(store) == {"b": {"cell:key": ["x"]}, "c": {"cell:key": None}}
    assert list(store.load_latest().pipeline.operators["totals"].cells) == ["key"]


def test_operators_are_dropped(store, made):
    base = made.save(store, [made.record("a", 1)])
    made.save(store, [made.record("b", 2)], operator=replace(made.OPERATOR, uid="other"), base=base)
    report = rewrite(store, drop_operators=["other"])
    assert report.dropped_operators == ("other",)
    assert report.files == 0  # the other one's are listed again
    latest = store.load_latest()
    assert set(latest.operators) == set(latest.pipeline.operators) == {"totals"}


def test_of_an_older_checkpoint_a_new_newest_is_made(store, made):
    first = made.save(store, [made.record("a", 1)], boundary=100)
    made.save(store, [made.record("a", 2)], boundary=200, base=first)
    rewrite(store, at=first.id, rename_cells={("totals", "count"): "n"})
    latest = store.load_latest()
    assert (latest.id, latest.epoch, latest.boundary) == (3, 3, 100 * S)
    assert rows(store) == {"a": {"n": 1, "word": None}}


def test_ages_are_counted_from_the_cut_or_from_a_moment(store, made):
    data = [made.record("a", 1, at=10), made.record("b", 2, at=60), made.record("c", 3, at=99)]
    made.save(store, data)
    report = rewrite(store, ttl={"totals": 40}, dry_run=True)
    assert report.operators[0].expired == 1  # 10; exactly as old as the limit is not too old
    later = datetime.fromtimestamp(139, UTC)
    assert rewrite(store, ttl=40, as_of=later, dry_run=True).operators[0].expired == 2
    drained = open_store(f"memory://{uuid.uuid4().hex}")
    made.save(drained, data, boundary=None)
    with pytest.raises(ValueError, match="as_of"):
        rewrite(drained, ttl=40)
    assert rewrite(drained, ttl=40, as_of=later).operators[0].rows == 1
    with pytest.raises(ValueError, match="time zone"):
        rewrite(store, ttl=1, as_of=datetime(2020, 1, 1))


def contents(store) -> dict[str, bytes]:
    return {m.key: store.blobs.get(m.key)[0] for m in store.blobs.list("")}


def test_a_dry_run_reads_and_writes_nothing(store, made):
    made.save(store, [made.record("a", 1), made.record("b", 2)])
    before = contents(store)
    report = rewrite(store, drop_where={"totals": "count = 1"}, key_groups=3, dry_run=True)
    assert (report.id, report.operators[0].rows, report.dry_run) == (None, 1, True)
    assert report.files == 1 and report.bytes > 100
    assert contents(store) == before


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"rename_operators": {"total": "x"}}, errors.CheckpointNotFoundError, "mean 'totals'"),
        ({"drop_cells": [("totals", "cout")]}, errors.CheckpointNotFoundError, "mean 'count'"),
        ({"rename_cells": {("totals", "count"): "word"}}, errors.CheckpointConflictError, "'word'"),
        ({"rename_operators": {"totals": "other"}}, errors.CheckpointConflictError, "'other'"),
        ({"drop_where": {"totals": "cout > 1"}}, ValueError, "cout"),
        ({"drop_where": {"totals": "1); DROP TABLE rows; --"}}, ValueError, "totals"),
        ({"key_groups": 0}, ValueError, "key-group count"),
        ({"ttl": -1}, ValueError, "ttl"),
        ({"drop_operators": ["totals"], "ttl": {"totals": 1}}, ValueError, "dropped and changed"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_before_anything_is_written(
    store, made, change, error, says
):
    base = made.save(store, [made.record("a", 1)])
    made.save(store, [made.record("b", 2)], operator=replace(made.OPERATOR, uid="other"), base=base)
    before = contents(store)
    with pytest.raises(error, match=says):
        rewrite(store, **change)
    assert contents(store) == before


def test_a_run_that_still_goes_is_fenced_and_one_that_published_meanwhile_wins(store, made):
    base = made.save(store, [made.record("a", 1)])
    raced: list[Any] = []

    def meanwhile(done: int, total: int) -> None:
        if not raced:
            raced.append(made.save(store, [made.record("a", 2)], base=base))

    with pytest.raises(errors.CheckpointConflictError, match="checkpoint 2 now, and had 1"):
        rewrite(store, rename_cells={("totals", "count"): "n"}, progress=meanwhile)
    assert store.load_latest().id == raced[0].id
    rewrite(store, rename_cells={("totals", "count"): "n"})
    with pytest.raises(errors.FencedError):
        store.check_generation(raced[0].run.generation, raced[0].run.run_id)
    assert rows(store) == {"a": {"n": 2, "word": None}}


def test_a_damaged_newest_checkpoint_is_not_passed_over_in_silence(store, made):
    first = made.save(store, [made.record("a", 1)])
    second = made.save(store, [made.record("a", 2)], base=first)
    (path,) = second.sidecar_paths() - first.sidecar_paths()
    store.blobs.delete_many([path])
    with pytest.raises(errors.FallbackRefusedError, match="--at 1"):
        rewrite(store, rename_cells={("totals", "count"): "n"})
    rewrite(store, at=first.id, rename_cells={("totals", "count"): "n"})
    assert rows(store) == {"a": {"n": 1, "word": None}}


def test_files_that_a_prune_took_meanwhile_leave_nothing_published(store, made):
    first = made.save(store, [made.record("a", 1)])
    other = replace(made.OPERATOR, uid="other")
    base = made.save(store, [made.record("b", 2)], operator=other, base=first)

    def meanwhile(done: int, total: int) -> None:
        store.blobs.delete_many([p for p in base.sidecar_paths() if "other" in p])

    with pytest.raises(errors.CheckpointError):
        rewrite(store, at=base.id, rename_operators={"totals": "sums"}, progress=meanwhile)
    assert store.load_latest().id == base.id


def test_rows_of_cells_that_were_added_later_are_rewritten_too(store, made):
    old = replace(made.OPERATOR, cells=made.OPERATOR.cells[:1])
    one = SnapshotRecord(b"a", made.WINDOW, False, 0, (VarIntCoder().encode(1),), (), ())
    base = made.save(store, [one], operator=old)
    made.save(store, [made.record("b", 2, words=("x",))], base=base)
    rewrite(store, rename_cells={("totals", "word"): "words"})
    assert rows(store) == {"a": {"count": 1, "words": None}, "b": {"count": 2, "words": ["x"]}}
    rewrite(store, key_groups=1, drop_where={"totals": "words IS NULL"})
    assert rows(store) == {"b": {"count": 2, "words": ["x"]}}


@pytest.mark.parametrize("key_groups", [5, 2, 12])
def test_a_key_group_larger_than_memory_is_rewritten_in_pages_and_files(
    store, made, monkeypatch, key_groups
):
    """Whatever the sizes of pages and files are, the rows are the same."""
    from beam_ckpt.maintenance import _rewrite

    base = made.save(store, [made.record(f"key {n}", n) for n in range(400)])
    base = made.save(store, [made.record(f"key {n}", -n) for n in range(0, 400, 7)], base=base)
    made.save(store, [made.record(f"key {n}", deleted=True) for n in range(5)], base=base)
    before = rows(store)
    assert len(before) == 395
    in_pages, largest = _rewrite.encode_pages, 0

    def small(pages, header, schema, **sizes):
        nonlocal largest
        small_files = {**sizes, "row_group_rows": 7, "file_bytes": 1_000}
        for data, count in in_pages(pages, header, schema, **small_files):
            largest = max(largest, count)
            yield data, count

    monkeypatch.setattr(_rewrite, "encode_pages", small)
    change = {"rename_cells": {("totals", "count"): "n"}, "key_groups": key_groups}
    report = rewrite(store, drop_where={"totals": "count >= 0 AND count % 10 = 3"}, **change)
    assert largest < 40 and report.files > key_groups
    kept = {
        k: {"n": v["count"], "word": None}
        for k, v in before.items()
        if str(v["count"])[-1] != "3" or v["count"] < 0
    }
    assert rows(store) == kept
    latest = store.load_latest()
    assert store.validate_checkpoint(latest.id, deep=True).valid
    assert {s.kind for _, _, s in latest.sidecars()} == {"full"}
    monkeypatch.setattr(_rewrite, "encode_pages", in_pages)
    assert rewrite(store, key_groups=1).files == 1  # and files of pages are read again
    assert rows(store) == kept


def test_times_are_exact_to_the_microsecond(store, made):
    at = datetime(2020, 1, 1, 0, 0, 0, 1, tzinfo=UTC)
    micros = Timestamp.of(at.timestamp()).micros
    one = SnapshotRecord(b"a", made.WINDOW, False, micros, (VarIntCoder().encode(1), ()), (), ())
    made.save(store, [one], boundary=micros // S + 10)
    assert rewrite(store, ttl=0, as_of=at, dry_run=True).operators[0].expired == 0
    later = at.replace(microsecond=2)
    assert rewrite(store, ttl=0, as_of=later, dry_run=True).operators[0].expired == 1
