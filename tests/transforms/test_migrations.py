"""A cell with another coder or kind, and an operator with another uid, over saved state."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import FastPrimitivesCoder, PickleCoder, StrUtf8Coder, VarIntCoder
from apache_beam.transforms.combiners import MeanCombineFn
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    CombiningValueStateSpec,
    OrderedListStateSpec,
    ReadModifyWriteStateSpec,
    SetStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import (
    FixedWindows,
    GlobalWindow,
    GlobalWindows,
    Sessions,
    TimestampedValue,
)
from apache_beam.utils.timestamp import Timestamp

from beam_ckpt import errors, inspect, open_store
from beam_ckpt.lineage import stands_on
from beam_ckpt.manifest import CellSpec, OperatorSpec, PipelineIdentity, parse_record
from beam_ckpt.testing.cuts import run_checkpointed, saved_state
from beam_ckpt.testing.event_loop import KeyedCells, LoopState, canonical, run_event_loop
from beam_ckpt.transforms import CheckpointedParDo
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.migrations import check_migrations, plan_migration
from beam_ckpt.transforms.restore import check_compatible
from beam_ckpt.transforms.snapshot import SnapshotRecord
from beam_ckpt.transforms.windows import window_identity

S = 1_000_000
DATA = [(second * S, f"key {second % 5}", second % 7) for second in range(0, 200, 4)]


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}")


class BeforeFn(beam.DoFn):
    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())
    SEEN = BagStateSpec("seen", VarIntCoder())
    LATER = TimerSpec("later", TimeDomain.WATERMARK)

    def process(
        self,
        element,
        ts=beam.DoFn.TimestampParam,
        count=beam.DoFn.StateParam(COUNT),
        seen=beam.DoFn.StateParam(SEEN),
        later=beam.DoFn.TimerParam(LATER),
    ):
        count.write((count.read() or 0) + 1)
        seen.add(element[1])
        later.set(ts + 500)
        yield element[0], count.read()

    @on_timer(LATER)
    def on_later(self, key=beam.DoFn.KeyParam, seen=beam.DoFn.StateParam(SEEN)):
        yield key, len(list(seen.read()))


class AfterFn(beam.DoFn):
    """The count is text now, and what was a bag of all is the greatest."""

    COUNT = ReadModifyWriteStateSpec("count", StrUtf8Coder())
    SEEN = ReadModifyWriteStateSpec("seen", VarIntCoder())
    LATER = TimerSpec("later", TimeDomain.WATERMARK)

    def process(
        self,
        element,
        ts=beam.DoFn.TimestampParam,
        count=beam.DoFn.StateParam(COUNT),
        seen=beam.DoFn.StateParam(SEEN),
        later=beam.DoFn.TimerParam(LATER),
    ):
        count.write(f"n{int((count.read() or 'n0')[1:]) + 1}")
        seen.write(max(seen.read() or 0, element[1]))
        later.set(ts + 500)
        yield element[0], count.read(), seen.read()

    @on_timer(LATER)
    def on_later(self, key=beam.DoFn.KeyParam, seen=beam.DoFn.StateParam(SEEN)):
        yield key, seen.read(), "later"


class OneFn(beam.DoFn):
    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())

    def process(self, element, count=beam.DoFn.StateParam(COUNT)):
        count.write((count.read() or 0) + 1)
        yield element[0], count.read(), None


def counted(count: int) -> str:
    return f"n{count}"


MIGRATIONS = {("op", "count"): counted, ("op", "seen"): max}


def never(value: Any) -> Any:
    raise AssertionError(f"{value} was migrated twice")


def run(store, fn, uid="op", **settings) -> Any:
    settings = {"key_groups": 3, **settings}
    return run_checkpointed(fn, DATA, runner="FnApiRunner", store=store, uid=uid, **settings)


def test_a_run_goes_on_from_migrated_values_as_from_its_own(store):
    """Coder and kind changed; then another run, which has nothing to migrate any more."""
    run(store, BeforeFn(), until=60)
    first = run_event_loop(BeforeFn(), DATA, until=60 * S)
    migrated = {
        slot: KeyedCells(
            {"count": counted(kept.cells["count"]), "seen": max(kept.cells["seen"])},
            kept.timers,
            kept.carried,
        )
        for slot, kept in first.state.items()
    }
    assert len(migrated) == 5
    # To 61: two of the keys come in between, and the others have to be saved as well.
    second = run_event_loop(AfterFn(), DATA, until=65 * S, restored=LoopState(migrated, 60 * S))
    ours = run(store, AfterFn(), until=65, migrations=MIGRATIONS)
    assert canonical(ours.outputs) == canonical(second.outputs)
    assert saved_state(store, AfterFn(), uid="op") == dict(second.state)
    latest = store.load_latest()
    assert latest.pipeline.operators["op"].cells["count"].coder == "StrUtf8Coder"
    assert {s.kind for _, _, s in latest.sidecars()} == {"full"}
    assert not latest.sidecar_paths() & store.load_by_id(1).sidecar_paths()
    rows = inspect.state(store, "op").to_pylist()
    assert {row["key"] for row in rows} == {f"key {n}" for n in range(5)}
    assert all(row["count"].startswith("n") for row in rows)

    rest = run_event_loop(AfterFn(), DATA, restored=second.state)
    done = {("op", "count"): never, ("op", "seen"): never}
    assert canonical(run(store, AfterFn(), migrations=done).outputs) == canonical(rest.outputs)


def test_an_operator_with_another_uid_goes_on(store):
    run(store, BeforeFn(), until=60)
    first = run_event_loop(BeforeFn(), DATA, until=60 * S)
    second = run_event_loop(BeforeFn(), DATA, until=65 * S, restored=first.state)
    ours = run(store, BeforeFn(), uid="new", until=65, renamed={"op": "new"})
    assert canonical(ours.outputs) == canonical(second.outputs)
    assert saved_state(store, BeforeFn(), uid="new") == dict(second.state)
    latest = store.load_latest()
    assert set(latest.operators) == set(latest.pipeline.operators) == {"new"}
    assert all("/new/" in path for path in latest.sidecar_paths())
    rest = run_event_loop(BeforeFn(), DATA, restored=second.state)
    again = run(store, BeforeFn(), uid="new", renamed={"op": "new"})  # there is no `op` any more
    assert canonical(again.outputs) == canonical(rest.outputs)


# ---------------------------------------------------------------------- refused
def apply(store, fn, uid="op", windows=None, **settings) -> None:
    pipeline = beam.Pipeline(runner="FnApiRunner")
    created = pipeline | beam.Create([("a", 1)])
    rows = created | beam.Map(lambda row: TimestampedValue(row, 1000)).with_output_types(
        tuple[str, int]
    )
    if windows is not None:
        rows |= beam.WindowInto(windows)
    settings = {"key_groups": 3, **settings}
    _ = rows | CheckpointedParDo(fn, uid=uid, store=store, **settings)


@pytest.fixture(scope="module")
def saved():
    store = open_store(f"memory://{uuid.uuid4().hex}")
    run(store, BeforeFn(), until=60)
    return store


def test_another_coder_is_refused_with_both_ways_out(saved):
    with pytest.raises(errors.StateIncompatibleError) as refused:
        apply(saved, AfterFn())
    said = str(refused.value)
    assert "operator 'op': cell 'count' was saved with VarIntCoder and is now StrUtf8Coder" in said
    assert "migrations={('op', 'count'): fn}" in said
    assert "`beam-ckpt rewrite` (--drop-cell, --rename-cell)" in said
    with pytest.raises(errors.StateIncompatibleError, match=r"cell 'seen' was saved as bag and"):
        apply(saved, AfterFn(), migrations={("op", "count"): counted})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"migrations": {"count": counted}}, r"\{\(uid, cell\): fn\}"),
        ({"migrations": {("op", "count"): 7}}, r"\{\(uid, cell\): fn\}"),
        ({"migrations": counted}, "is no mapping"),
        ({"migrations": {("other", "count"): counted}}, "speak of operator 'other'"),
        ({"migrations": {("op", "cout"): counted}}, "speak of cell 'cout'"),
        ({"renamed": {"op": "new"}}, "speak of operator 'new'"),
        ({"renamed": {"a": "op", "b": "op"}}, "gives two operators one uid"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(saved, settings, says):
    with pytest.raises(errors.PipelineRefusedError, match=says):
        apply(saved, BeforeFn(), **settings)


def test_after_a_drained_input_with_an_interval_there_is_no_boundary_to_save_all_at(store):
    run(store, BeforeFn())
    with pytest.raises(errors.PipelineRefusedError, match="no first boundary"):
        apply(store, AfterFn(), every=60, migrations=MIGRATIONS)
    with pytest.raises(errors.PipelineRefusedError, match="no first boundary"):
        apply(store, BeforeFn(), uid="new", every=60, renamed={"op": "new"})
    apply(store, AfterFn(), migrations=MIGRATIONS)


@pytest.mark.parametrize(
    ("fn", "settings"),
    [(AfterFn(), {"migrations": MIGRATIONS}), (OneFn(), {"on_missing": "drop"})],
)
def test_a_job_that_is_updated_in_place_keeps_its_own_state(saved, fn, settings):
    from apache_beam.options.pipeline_options import PipelineOptions

    options = PipelineOptions(["--runner=FnApiRunner", "--update"])
    rows = beam.Pipeline(options=options) | beam.Create([("a", 1)]).with_output_types(
        tuple[str, int]
    )
    with pytest.raises(errors.PipelineRefusedError, match="updated in place"):
        _ = rows | CheckpointedParDo(fn, uid="op", store=saved, key_groups=3, **settings)


def spec(**cells: tuple[str, str]) -> OperatorSpec:
    found = {name: CellSpec(kind=kind, coder=coder) for name, (kind, coder) in cells.items()}
    return OperatorSpec(key_coder="StrUtf8Coder", window_coder="GlobalWindowCoder", cells=found)


def test_other_windows_are_refused_with_the_way_out():
    before = spec().model_copy(update={"windows": window_identity(FixedWindows(60))})
    check_compatible(before, before, "op", "here", "error")
    now = spec().model_copy(update={"windows": window_identity(FixedWindows(300))})
    says = r"FixedWindows\[60000000,0\].*FixedWindows\[300000000,0\].*ReadState .* WriteState"
    with pytest.raises(errors.StateIncompatibleError, match=says):
        check_compatible(before, now, "op", "here", "error")
    check_compatible(spec(), now, "op", "here", "error")  # it was not recorded


def test_windows_are_recorded_and_a_changed_one_is_refused_at_restore(store):
    run(store, BeforeFn(), until=60, window_fn=FixedWindows(60))
    identity = store.load_latest().pipeline
    assert identity.operators["op"].windows == "FixedWindows[60000000,0]"
    assert identity.pickler == "cloudpickle"
    with pytest.raises(errors.StateIncompatibleError, match=r"Sessions\[60000000\]"):
        apply(store, BeforeFn(), windows=Sessions(60))
    apply(store, BeforeFn(), windows=FixedWindows(60))


def test_what_is_not_recorded_is_not_written():
    """A manifest of before has the same bytes when it is written again."""
    for old, new in (
        (spec(), spec().model_copy(update={"windows": "x"})),
        (
            PipelineIdentity(operators={"a": spec()}, beam_version="2", python_version="3"),
            PipelineIdentity(
                operators={"a": spec()}, beam_version="2", python_version="3", pickler="dill"
            ),
        ),
    ):
        assert b"windows" not in old.to_json() and b"pickler" not in old.to_json()
        assert b"windows" in new.to_json() or b"pickler" in new.to_json()
        for one in (old, new):
            assert parse_record(type(one), one.to_json(), where="here") == one


# ---------------------------------------------------------------------- one record
WINDOW = GlobalWindows().get_window_coder().encode(GlobalWindow())


def operator(*cells: CellState) -> OperatorState:
    coder = GlobalWindows().get_window_coder()
    return OperatorState("op", StrUtf8Coder(), coder, tuple(cells), False)


def cell_of(fn_spec: Any, coder: Any, kind: str) -> CellState:
    return CellState(fn_spec.name, kind, coder)


def migrated(before: CellState, after: CellState, held: Any, fn: Any) -> Any:
    plan = plan_migration(
        operator(before).spec(), operator(after), check_migrations({("op", after.name): fn})
    )
    assert plan is not None
    record = SnapshotRecord(b"k", WINDOW, False, 0, (held,), (), ())
    (cell,) = SnapshotRecord.from_bytes(plan.record(record.to_bytes())).cells
    return cell


INT = VarIntCoder()
DATED = OrderedListStateSpec("c", VarIntCoder())


@pytest.mark.parametrize(
    ("kinds", "held", "fn", "expected"),
    [
        (("read_modify_write", "bag"), INT.encode(3), lambda v: [v, v], (b"3", b"3")),
        (("bag", "set"), (INT.encode(3), INT.encode(3)), lambda v: v, (b"3",)),
        (("set", "read_modify_write"), (INT.encode(3), INT.encode(4)), sum, b"7"),
        (("bag", "read_modify_write"), (INT.encode(3),), lambda v: None, None),
        (("combining", "read_modify_write"), INT.encode(3), lambda v: v + 1, b"4"),
        (("read_modify_write", "bag"), None, never, ()),
        (("bag", "read_modify_write"), (), never, None),
    ],
)
def test_every_kind_becomes_every_other(kinds, held, fn, expected):
    class TextOfIntCoder(beam.coders.Coder):
        def encode(self, value):
            return str(value).encode()

        def decode(self, data):
            return int(data)

    before, after = CellState("c", kinds[0], INT), CellState("c", kinds[1], TextOfIntCoder())
    assert migrated(before, after, held, fn) == expected


def test_ordered_lists_are_of_moments_and_values():
    from apache_beam.coders import TupleCoder

    dated = TupleCoder((VarIntCoder(), VarIntCoder()))
    texts = TupleCoder((VarIntCoder(), StrUtf8Coder()))
    held = (dated.encode((5, 1)), dated.encode((9, 2)))

    def fn(items):
        assert items == [(Timestamp(micros=5), 1), (Timestamp(micros=9), 2)]
        return [(at, str(value)) for at, value in reversed(items)]

    cell = migrated(
        CellState("c", "ordered_list", dated), CellState("c", "ordered_list", texts), held, fn
    )
    assert [texts.decode(item) for item in cell] == [(5, "1"), (9, "2")]


def test_a_pickled_value_is_opened_only_by_the_coder_that_the_author_gives():
    class Bomb:
        def __reduce__(self):
            return pytest.fail, ("a pickle was opened",)

    import pickle

    bomb = pickle.dumps(Bomb())
    after = CellState("c", "read_modify_write", StrUtf8Coder())
    for coder in (PickleCoder(), FastPrimitivesCoder()):
        before = CellState("c", "read_modify_write", coder)
        with pytest.raises(errors.StateIncompatibleError, match=r"\(OldCoder\(\), fn\)"):
            migrated(before, after, bomb, str)
    before = CellState("c", "read_modify_write", PickleCoder())
    with pytest.raises(errors.StateIncompatibleError, match="its migration has VarIntCoder"):
        migrated(before, after, bomb, (VarIntCoder(), str))
    held = PickleCoder().encode({"a": 1})
    assert migrated(before, after, held, (PickleCoder(), repr)) == b"{'a': 1}"


def test_a_function_that_fails_names_the_cell_and_no_value():
    before = CellState("c", "read_modify_write", VarIntCoder())
    after = CellState("c", "read_modify_write", StrUtf8Coder())
    with pytest.raises(errors.StateIncompatibleError, match=r"cell 'c' failed .*: KeyError"):
        migrated(before, after, INT.encode(3), {}.__getitem__)
    with pytest.raises(errors.StateIncompatibleError, match=r"cell 'c' .* does not take a int"):
        migrated(before, after, INT.encode(3), lambda v: v)


def test_files_are_added_to_where_cells_are_the_same_or_new(saved):
    base = saved.load_latest()
    same = base.pipeline.operators["op"]
    count = same.cells["count"]
    added = same.model_copy(update={"cells": {**same.cells, "more": count}})
    gone = same.model_copy(update={"cells": {"count": count}})
    other = count.model_copy(update={"coder": "StrUtf8Coder"})
    changed = same.model_copy(update={"cells": {**same.cells, "count": other}})
    assert [stands_on(base, "op", s) for s in (same, added, gone, changed)] == [
        True, True, False, False,
    ]  # fmt: skip


class TwoFn(beam.DoFn):
    """A count, and the last value that is none of the ordinary ones."""

    LAST: Any

    def process(self, element, count: Any, last: Any):
        count.write((count.read() or 0) + 1)
        yield element[0], count.read(), last.read()
        if element[1] > 6:
            last.write(self.LAST(element[1]))


class NumberFn(TwoFn):
    LAST = int
    SPEC = ReadModifyWriteStateSpec("last", VarIntCoder())

    def process(
        self,
        element,
        count=beam.DoFn.StateParam(OneFn.COUNT),
        last=beam.DoFn.StateParam(SPEC),
    ):
        yield from super().process(element, count, last)


class TextFn(TwoFn):
    LAST = str
    SPEC = ReadModifyWriteStateSpec("last", StrUtf8Coder())

    def process(
        self,
        element,
        count=beam.DoFn.StateParam(OneFn.COUNT),
        last=beam.DoFn.StateParam(SPEC),
    ):
        yield from super().process(element, count, last)


@pytest.mark.parametrize("again", [NumberFn(), TextFn()])
@pytest.mark.parametrize("max_files", [1, 8])
def test_a_cell_that_was_given_up_and_comes_again_is_empty(store, again, max_files):
    """Of the same type or another, in deltas, merged, and for keys that were not touched since."""
    rows = [(second * S // 10, f"key {second}", 7 + second % 2) for second in range(1000)]
    settings = {"on_missing": "drop", "max_files_per_group": max_files, "key_groups": 1}

    def go(fn: beam.DoFn, until: int, restored: Any, *new: tuple[int, str, int]) -> Any:
        rows.extend((at * S, key, value) for at, key, value in new)
        expected = run_event_loop(fn, rows, until=until * S, restored=restored)
        ours = run_checkpointed(
            fn, rows, runner="FnApiRunner", store=store, uid="op", until=until, **settings
        )
        assert canonical(ours.outputs) == canonical(expected.outputs)
        assert saved_state(store, fn, uid="op") == dict(expected.state)
        return expected.state

    def without_last(state: LoopState) -> LoopState:
        kept = {slot: replace(of, cells={"count": of.cells["count"]}) for slot, of in state.items()}
        return LoopState(kept, state.boundary)

    state = go(NumberFn(), 101, None)
    assert {of.cells["last"] for of in state.values()} == {7, 8}
    state = go(OneFn(), 110, without_last(state), (102, "key 1", 0))
    assert "last" not in inspect.state(store, "op").column_names
    state = go(again, 120, state, (111, "key 2", 0), (112, "key 1", 0), (113, "key 3", 9))
    assert [of.cells["last"] for of in state.values() if "last" in of.cells] == [again.LAST(9)]
    kinds = [sidecar.kind for _, _, sidecar in store.load_latest().sidecars()]
    assert kinds == (["full"] if max_files == 1 else ["full", "delta"])
    go(again, 130, state, *((121 + n, f"key {n}", 0) for n in range(5)))


def test_a_cell_cannot_be_given_up_where_there_is_no_boundary_to_save_all_at(store):
    run(store, BeforeFn())
    with pytest.raises(errors.PipelineRefusedError, match=r"given up.*by `beam-ckpt rewrite`"):
        apply(store, OneFn(), every=60, on_missing="drop")
    apply(store, OneFn(), on_missing="drop")


def test_accumulators_of_combining_cells_are_migrated(store):
    class MeanFn(beam.DoFn):
        MEAN = CombiningValueStateSpec(
            "mean", beam.coders.TupleCoder((VarIntCoder(),) * 2), MeanCombineFn()
        )
        NAMES = SetStateSpec("names", StrUtf8Coder())

        def process(self, element, mean=beam.DoFn.StateParam(MEAN)):
            mean.add(element[1])
            yield element[0], mean.read()

    class SumFn(beam.DoFn):
        MEAN = ReadModifyWriteStateSpec("mean", VarIntCoder())

        def process(self, element, mean=beam.DoFn.StateParam(MEAN)):
            yield element[0], mean.read()

    run(store, MeanFn(), until=60)
    sums: dict[str, int] = {}
    for at, key, value in DATA:
        if at < 60 * S:
            sums[key] = sums.get(key, 0) + value
    migrations = {("op", "mean"): lambda accumulator: accumulator[0]}
    ours = run(store, SumFn(), until=100, migrations=migrations)
    assert {output.value for output in ours.outputs} == set(sums.items())


def test_it_pickles():
    before = CellState("c", "read_modify_write", VarIntCoder())
    after = CellState("c", "read_modify_write", StrUtf8Coder())
    plan = plan_migration(operator(before).spec(), operator(after), {("op", "c"): counted})
    record = SnapshotRecord(b"k", WINDOW, False, 0, (INT.encode(3),), (), ()).to_bytes()
    before_use = plan.record(record)
    import pickle

    assert pickle.loads(pickle.dumps(plan)).record(record) == before_use
    assert replace(plan) == plan


def test_who_publishes_leaves_files_of_another_coder_behind(saved):
    """Also those of a key group of which nothing was saved since, as when its windows are over."""
    from beam_ckpt.retention import KeepLast
    from beam_ckpt.transforms.committer import CommitFn

    base = saved.load_latest()
    same = operator(
        CellState("count", "read_modify_write", VarIntCoder()),
        CellState("seen", "bag", VarIntCoder()),
    )
    other = operator(CellState("count", "read_modify_write", StrUtf8Coder()), same.cells[1])

    def listed(now: OperatorState) -> Any:
        arguments = (base.id, 0, KeepLast(1), 0, "x", {}, False)
        return CommitFn(saved, "r", [now], base.key_group_count, *arguments)._entries_of(base)

    assert listed(same) == {"op": base.operators["op"]}
    assert listed(other) == {}
