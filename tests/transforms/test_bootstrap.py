"""Checkpoints that are made from a PCollection, and what goes on from them."""

from __future__ import annotations

import uuid
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import StrUtf8Coder, TupleCoder, VarIntCoder
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.test_stream import TestStream as Stream
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
from apache_beam.transforms.window import FixedWindows, TimestampedValue
from apache_beam.utils.timestamp import Timestamp

from beam_ckpt import errors, open_store
from beam_ckpt.manifest import new_checkpoint_id
from beam_ckpt.testing import state_of
from beam_ckpt.testing.cuts import run_checkpointed, saved_state
from beam_ckpt.testing.event_loop import canonical, run_event_loop
from beam_ckpt.testing.prism import prism_options
from beam_ckpt.transforms import Checkpoints, ReadState, WriteState

S = 1_000_000
DATA = [(second * S, f"key {second % 7}", second % 5) for second in range(0, 100, 3)]
PAIR = tuple[str, dict[str, Any]]


class AllKindsFn(beam.DoFn):
    """A cell of each kind; its outputs tell what is in them."""

    LAST = ReadModifyWriteStateSpec("last", TupleCoder((VarIntCoder(), StrUtf8Coder())))
    BAG = BagStateSpec("bag", VarIntCoder())
    SET = SetStateSpec("set", VarIntCoder())
    DATED = OrderedListStateSpec("dated", VarIntCoder())
    NEVER = ReadModifyWriteStateSpec("never", VarIntCoder())

    def process(
        self,
        element,
        timestamp=beam.DoFn.TimestampParam,
        last=beam.DoFn.StateParam(LAST),
        bag=beam.DoFn.StateParam(BAG),
        some=beam.DoFn.StateParam(SET),
        dated=beam.DoFn.StateParam(DATED),
        never=beam.DoFn.StateParam(NEVER),
    ):
        key, value = element
        before = last.read()
        last.write((value, key))
        bag.add(value)
        some.add(value)
        dated.add((timestamp, value))
        yield key, before, sorted(bag.read()), sorted(some.read()), [v for _, v in dated.read()]


class TotalsFn(beam.DoFn):
    TOTAL = ReadModifyWriteStateSpec("total", VarIntCoder())

    def process(self, element, total=beam.DoFn.StateParam(TOTAL)):
        total.write((total.read() or 0) + element[1])
        yield element[0], total.read()


class MeanFn(beam.DoFn):
    MEAN = CombiningValueStateSpec("mean", TupleCoder((VarIntCoder(),) * 2), MeanCombineFn())

    def process(self, element, mean=beam.DoFn.StateParam(MEAN)):
        mean.add(element[1])
        yield element[0], mean.read()


class TimerFn(beam.DoFn):
    TIMER = TimerSpec("timer", TimeDomain.WATERMARK)

    def process(self, element, timer=beam.DoFn.TimerParam(TIMER)):
        timer.set(Timestamp(5))

    @on_timer(TIMER)
    def on_it(self):
        return ()


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}")


def run(pipeline_of, *flags: str) -> None:
    options = PipelineOptions(list(flags) or ["--runner=FnApiRunner"])
    with beam.Pipeline(options=options) as p:
        pipeline_of(p)


def write(store, rows, fn=TotalsFn, uid="subject", **settings) -> None:
    settings = {"key_groups": 3, **settings}
    run(
        lambda p: (
            p
            | beam.Create(rows, reshuffle=False).with_output_types(tuple[str, Any])
            | WriteState(store, uid, fn, **settings)
        )
    )


def job(store, data=DATA, fn=None, **settings) -> Any:
    settings = {"key_groups": 3, **settings}
    return run_checkpointed(
        fn or TotalsFn(), data, runner="FnApiRunner", store=store, **settings
    ).outputs


def rows_of(loop_state) -> list[Any]:
    """State of the oracle as rows."""
    return [
        (
            key,
            {
                name: [(Timestamp(micros=at), v) for at, v in value] if name == "dated" else value
                for name, value in kept.cells.items()
            },
        )
        for (key, _), kept in loop_state.items()
    ]


def test_a_pipeline_goes_on_from_written_state_as_from_its_own(store):
    history = run_event_loop(AllKindsFn(), DATA, until=50 * S)
    write(store, rows_of(history.state), AllKindsFn, boundary=50)
    assert saved_state(store, AllKindsFn()) == dict(history.state)
    rest = run_event_loop(AllKindsFn(), DATA, restored=history.state)
    assert len(history.outputs) > 5 < len(rest.outputs)
    assert canonical(job(store, fn=AllKindsFn())) == canonical(rest.outputs)
    assert cuts_state(saved_state(store, AllKindsFn())) == cuts_state(rest.state)


def cuts_state(state) -> Any:
    return {
        slot: {n: sorted(v) if n == "bag" else v for n, v in kept.cells.items()}
        for slot, kept in state.items()
    }


def test_what_is_written_is_what_a_job_would_have_written(store):
    """In the same key groups, with the same coders; valid, and no garbage."""
    of_job = open_store(f"memory://{uuid.uuid4().hex}")
    job(of_job, until=50)
    totals = state_of(of_job, "subject")
    write(store, totals.items(), boundary=50)
    ours, theirs = store.load_latest(), of_job.load_latest()
    assert state_of(store, "subject") == totals
    assert ours.pipeline == theirs.pipeline
    assert (ours.boundary, ours.key_group_count, ours.durable_phase) == (50 * S, 3, "finalized")

    def rows(manifest):
        return [
            (p.partition_id, sum(s.rows for s in p.sidecars))
            for p in manifest.operators["subject"].partitions
        ]

    assert rows(ours) == rows(theirs)
    assert store.validate_checkpoint(ours.id, deep=True).valid
    assert store.gc(dry_run=True, grace_s=0).deleted == ()
    files = [s for p in ours.operators["subject"].partitions for s in p.sidecars]
    assert {(s.kind, s.epoch) for s in files} == {("full", 1)}


def test_without_a_boundary_everything_that_comes_is_new(store):
    write(store, [("key 1", {"total": 100}), ("gone", {}), ("gone as well", {"total": None})])
    assert store.load_latest().boundary is None
    assert state_of(store, "subject") == {"key 1": {"total": 100}}
    assert [output.value for output in job(store, [(0, "key 1", 1)])] == [("key 1", 101)]


@pytest.mark.parametrize("runner", ["FnApiRunner", "BundleBasedDirectRunner", "PrismRunner"])
def test_rows_dated_after_the_boundary_make_one_checkpoint(store, runner, request):
    flags = [f"--runner={runner}"]
    if runner == "PrismRunner":
        request.getfixturevalue("prism")
        flags += prism_options()

    def dated(p):
        rows = [(at, (f"key {at}", {"total": at})) for at in (0, 60, 5_000)]
        _ = (
            p
            | beam.Create(rows)
            | beam.MapTuple(
                lambda at, row: beam.window.TimestampedValue(row, at)
            ).with_output_types(PAIR)
            | WriteState(store, "subject", TotalsFn, boundary=50, key_groups=2)
        )

    run(dated, *flags)
    assert store.list_ids() == [1]
    assert len(state_of(store, "subject")) == 3


def test_read_change_write_is_a_migration(store):
    """Other values, another number of key groups, the same cut, in another store."""
    new = open_store(f"memory://{uuid.uuid4().hex}")
    before = job(store, until=50)

    def migrate(p):
        read = ReadState(store, "subject")
        assert read.boundary == Timestamp(50)
        _ = (
            p
            | read
            | beam.MapTuple(
                lambda key, cells: (key, {"total": cells["total"] * 1000})
            ).with_output_types(PAIR)
            | WriteState(new, "subject", TotalsFn, boundary=read.boundary, key_groups=5)
        )

    run(migrate)
    totals = {output.value[0]: output.value[1] for output in before}
    expected = {}
    for at, key, value in DATA:
        if at >= 50 * S:
            expected.setdefault(key, [1000 * totals[key]]).append(value)
    outputs = job(new, key_groups=5)
    assert sorted(output.value for output in outputs) == sorted(
        (key, sum(values[: n + 1]))
        for key, values in expected.items()
        for n in range(1, len(values))
    )


def test_accumulators_go_round(store):
    new = open_store(f"memory://{uuid.uuid4().hex}")
    rows = [("a", {"mean": (6, 2)})]
    write(store, rows, MeanFn)
    assert state_of(store, "subject", cells=MeanFn) == {"a": {"mean": 3.0}}
    read = ReadState(store, "subject", cells=MeanFn, accumulators=True)
    run(
        lambda p: (
            p
            | read
            | beam.Map(lambda row: row).with_output_types(PAIR)
            | WriteState(new, "subject", MeanFn, key_groups=1)
        )
    )
    assert [o.value for o in job(new, [(0, "a", 9)], MeanFn(), key_groups=1)] == [("a", 5.0)]


def test_windows_of_the_input_are_those_of_the_state(store):
    windows = FixedWindows(60)
    new = open_store(f"memory://{uuid.uuid4().hex}")
    job(store, until=70, window_fn=windows)
    read = ReadState(store, "subject", windows=windows)
    run(
        lambda p: (
            p
            | read
            | beam.Map(lambda row: row).with_output_types(PAIR)
            | WriteState(new, "subject", TotalsFn, boundary=70, key_groups=3)
        )
    )
    found = saved_state(new, TotalsFn(), window_fn=windows)
    assert found == saved_state(store, TotalsFn(), window_fn=windows) != {}
    assert canonical(job(new, window_fn=windows)) == canonical(job(store, window_fn=windows))


def test_a_bootstrap_is_added_to_and_done_again(store):
    write(store, [("a", {"total": 1}), ("b", {"total": 2})], boundary=50)
    write(store, [("a", {"mean": (6, 2)})], MeanFn, uid="means", boundary=50)
    write(store, [("b", {"total": 3})], boundary=50)
    assert state_of(store, "subject") == {"b": {"total": 3}}
    assert state_of(store, "means", cells=MeanFn) == {"a": {"mean": 3.0}}
    write(store, [], boundary=50)
    assert state_of(store, "subject") == {}
    assert set(store.load_latest().operators) == {"subject", "means"}
    assert [store.load_by_id(i).epoch for i in store.list_ids()] == [1, 2, 3, 4]
    with pytest.raises(errors.PipelineRefusedError, match=r"at the boundary Timestamp\(50\).*60"):
        write(store, [], boundary=60)
    with pytest.raises(errors.PipelineRefusedError, match="3 key groups, not 4"):
        write(store, [], boundary=50, key_groups=4)


def test_a_store_of_a_job_is_written_over_only_by_the_authors_word(store):
    write(store, [("a", {"total": 1})], boundary=50)
    two_operators(store)
    job_s = store.load_latest()
    rows = [("b", {"total": 5})]
    with pytest.raises(errors.PipelineRefusedError, match=r"is of a job.*replace=True"):
        write(store, rows, boundary=70)
    for boundary in (None, 80):
        with pytest.raises(errors.PipelineRefusedError, match="lose elements, or apply them again"):
            write(store, rows, boundary=boundary, replace=True)
    write(store, rows, boundary=70, replace=True, key_groups=None)
    latest = store.load_latest()
    assert state_of(store, "subject") == {"b": {"total": 5}}
    assert state_of(store, "other") == {"a": {"total": 1}}
    assert latest.operators["other"] == job_s.operators["other"]
    assert latest.pipeline.operators == job_s.pipeline.operators
    assert latest.source_offsets["kafka"].offsets == {"0": "8"}
    assert latest.source_offsets["kafka"].offsets == job_s.source_offsets["kafka"].offsets
    assert (latest.boundary, latest.parent_id) == (70 * S, job_s.checkpoint_id)
    assert store.list_ids() == [1, 2, 3]  # nothing is deleted


def test_what_was_taken_while_a_stream_was_drained_stays_marked(store):
    job(store, until=50)
    first = store.load_latest()
    drained = {"drained": True, "checkpoint_id": new_checkpoint_id(), "epoch": first.epoch + 1}
    store.finalize(store.save(first.model_copy(update={**drained, "id": store.next_id()})).id)
    write(store, [("b", {"total": 5})], boundary=50, replace=True)
    assert store.load_latest().drained
    assert state_of(store, "subject") == {"b": {"total": 5}}


def two_operators(store) -> None:
    """A job that goes on from the operator "subject", with another one and a source."""

    def build(p):
        with Checkpoints(p, store, until=70, key_groups=3) as ckpt:
            rows = (
                p
                | beam.Create([TimestampedValue(("a", 1), 60)], reshuffle=False)
                | beam.Map(lambda stamped: stamped).with_output_types(tuple[str, int])
                | ckpt.TrackOffsets("kafka", partition=lambda _: "0", offset=lambda _: 7)
            )
            _ = rows | "A" >> ckpt.ParDo(TotalsFn(), uid="subject")
            _ = rows | "B" >> ckpt.ParDo(TotalsFn(), uid="other")

    run(build)


def test_a_job_that_has_only_started_is_not_fenced(store):
    """Before its first checkpoint, on a bootstrap's store and on an empty one."""
    empty = open_store(f"memory://{uuid.uuid4().hex}")
    write(store, [("a", {"total": 1})])
    for on in (store, empty):
        generation = on.claim_generation("job")
        with pytest.raises(errors.PipelineRefusedError, match="a job has started"):
            write(on, [("a", {"total": 2})])
        on.check_generation(generation, "job")
    write(store, [("a", {"total": 2})], replace=True)
    with pytest.raises(errors.FencedError):
        store.check_generation(2, "job")


@pytest.mark.parametrize("starts", ["a job starts", "a job publishes"])
def test_what_happens_between_building_and_running_is_seen(store, starts):
    p = beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner"]))
    rows = p | beam.Create([("a", {"total": 1})]).with_output_types(PAIR)
    _ = rows | WriteState(store, "subject", TotalsFn, key_groups=1)
    if starts == "a job starts":
        store.claim_generation("job")
    else:
        job(store, DATA[:1])
    with pytest.raises(Exception, match=r"a job has started|had None when this pipeline was built"):
        p.run()
    if starts == "a job starts":
        assert store.list_ids() == []
        store.check_generation(1, "job")
    else:
        assert store.list_ids() == [1]


@pytest.mark.parametrize("step", ["save", "finalize"])
@pytest.mark.parametrize("lost", ["the request", "the response"])
def test_a_publishing_that_fails_and_is_tried_again_by_the_runner_is_done_once(
    store, monkeypatch, step, lost
):
    """After its claim, which the second try must not take for another run's."""
    done = getattr(type(store), step)
    calls = []

    def failing(self, argument):
        calls.append(argument)
        if len(calls) == 1:
            if lost == "the response":
                done(self, argument)
            raise OSError("connection lost")
        return done(self, argument)

    monkeypatch.setattr(type(store), step, failing)
    rows = [("a", {"total": 1})]
    run(
        lambda p: (
            p
            | beam.Create(rows).with_output_types(PAIR)
            | WriteState(store, "subject", TotalsFn, key_groups=1)
        ),
        "--runner=BundleBasedDirectRunner",
    )
    assert len(calls) > 1 or (step, lost) == ("save", "the response")
    finalized = [i for i in store.list_ids() if store.final_marker(i) is not None]
    assert len(finalized) == 1
    assert state_of(store, "subject") == {"a": {"total": 1}}


@pytest.mark.parametrize(
    ("rows", "fn", "what"),
    [
        ([("a", {"total": 1})] * 2, TotalsFn, "1 keys of operator 'subject' come more than once"),
        ([("a", {"totl": 1})], TotalsFn, "no cell 'totl'; it has 'total'"),
        ([("a", {"total": "1"})], TotalsFn, r"cell 'total' \(read_modify_write, VarIntCoder\)"),
        ([("a", {"mean": 3.0})], MeanFn, "a combining cell that is its accumulator"),
        ([("a", {"bag": "12"})], AllKindsFn, "it holds many values"),
        ([("a", {"set": 12})], AllKindsFn, "it holds many values"),
        ([("a", 12)], TotalsFn, r"the state of a key is a int.*\{cell: value\}"),
    ],
)
def test_rows_that_cannot_be_state_stop_it_and_leave_the_store_as_it_was(store, rows, fn, what):
    with pytest.raises(Exception, match=what) as found:
        write(store, rows, fn)
    assert "What to do" in str(found.value)
    assert store.list_ids() == []
    store.check_generation(0, "nobody has claimed it")


def test_a_run_that_fails_has_not_claimed_the_store(store):
    """On a runner that gives the committer its start before the writer gets to work."""
    rows = [("a", {"total": 1})] * 2
    with pytest.raises(Exception, match="come more than once"):
        run(
            lambda p: (
                p
                | beam.Create(rows).with_output_types(PAIR)
                | WriteState(store, "subject", TotalsFn, key_groups=1)
            ),
            "--runner=BundleBasedDirectRunner",
        )
    store.check_generation(0, "nobody has claimed it")


def test_timers_that_will_not_be_there_are_warned_of(store, caplog):
    class BothFn(TimerFn):
        TOTAL = ReadModifyWriteStateSpec("total", VarIntCoder())

        def process(
            self,
            element,
            total=beam.DoFn.StateParam(TOTAL),
            timer=beam.DoFn.TimerParam(TimerFn.TIMER),
        ):
            total.clear()

    WriteState(store, "subject", TotalsFn)
    assert caplog.records == []
    WriteState(store, "subject", BothFn)
    assert "operator 'subject' has the timers 'timer'" in caplog.text


def test_what_cannot_be_right_is_refused_while_the_pipeline_is_built(store):
    p = beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner"]))
    rows = p | beam.Create([]).with_output_types(PAIR)

    def refused(what: str, make) -> None:
        with pytest.raises(errors.PipelineRefusedError, match=f"{what}.*What to do"):
            make()

    refused("has no uid", lambda: WriteState(store, "", TotalsFn))
    refused("no state cells", lambda: WriteState(store, "subject", TimerFn))
    with pytest.raises(errors.PipelineRefusedError, match="key-group count 0"):
        WriteState(store, "subject", TotalsFn, key_groups=0)
    refused("no event time", lambda: WriteState(store, "subject", TotalsFn, boundary="noon"))
    untyped = p | "Untyped" >> beam.Create([]).with_output_types(dict)
    refused("not that of key-value", lambda: untyped | WriteState(store, "subject", TotalsFn))
    endless = p | Stream() | beam.Map(lambda x: x).with_output_types(PAIR)
    refused("has no end", lambda: endless | "E" >> WriteState(store, "subject", TotalsFn))
    windowed = rows | beam.WindowInto(FixedWindows(60))
    refused("their state gone", lambda: windowed | "W" >> WriteState(store, "subject", TotalsFn))
    _ = rows | "First" >> WriteState(store, "subject", TotalsFn)
    refused(
        "a store has one committer",
        lambda: rows | "Second" >> WriteState(store, "other", TotalsFn),
    )
