"""What cannot be right is refused while the pipeline is built: by name, with what to do."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import PickleCoder, VarIntCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)

from beam_ckpt import errors, open_store
from beam_ckpt.testing.cuts import run_checkpointed
from beam_ckpt.testing.subjects import CountAndSumFn
from beam_ckpt.transforms import CheckpointedParDo, Checkpoints

COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())


class CountFn(beam.DoFn):
    def process(self, element, count=beam.DoFn.StateParam(COUNT)):
        count.write((count.read() or 0) + 1)
        yield element[0], count.read()


class StatelessFn(beam.DoFn):
    def process(self, element):
        yield element


class NoCallbackFn(beam.DoFn):
    NEVER = TimerSpec("never", TimeDomain.WATERMARK)

    def process(self, element, never=beam.DoFn.TimerParam(NEVER)):
        never.set(1)


class PaneInCallbackFn(beam.DoFn):
    SOON = TimerSpec("soon", TimeDomain.WATERMARK)

    def process(self, element, soon=beam.DoFn.TimerParam(SOON)):
        soon.set(1)

    @on_timer(SOON)
    def on_soon(self, pane=beam.DoFn.PaneInfoParam):
        return []


class KeywordOnlyFn(beam.DoFn):
    def process(self, element, *, count=beam.DoFn.StateParam(COUNT)):
        yield element


class ExtraFn(beam.DoFn):
    def process(self, element, factor, count=beam.DoFn.StateParam(COUNT)):
        yield element[0], element[1] * factor


class GeneratorFn(CountFn):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number for number in range(3))


def apply(
    fn: Any = None,
    *args: Any,
    input_type: Any = tuple[str, int],
    elements: Any = (("a", 1),),
    **settings: Any,
) -> None:
    """Builds a pipeline and does not run it."""
    settings.setdefault("store", "memory://refused")
    settings.setdefault("uid", "op")
    pipeline = beam.Pipeline(runner="FnApiRunner")
    pcoll = pipeline | beam.Create(elements) | beam.Map(lambda x: x).with_output_types(input_type)
    _ = pcoll | CheckpointedParDo(fn or CountFn(), *args, **settings)


REFUSED = {
    "a DoFn without state": ((StatelessFn(),), {}, "no state and no timers.*ParDo is enough"),
    "a class instead of an instance": ((CountFn,), {}, "is not a DoFn.*an instance"),
    "a timer without a callback": ((NoCallbackFn(),), {}, "Beam refuses NoCallbackFn"),
    "the pane in a timer callback": ((PaneInCallbackFn(),), {}, "on_soon asks for.*PaneInfo"),
    "time_sorted where nothing waits": (
        (),
        {"time_sorted": True, "alignment": "at_least_once"},
        "time_sorted=True, for which elements wait.*one of the two",
    ),
    "an unknown alignment": ((), {"alignment": "exactly"}, "alignment='exactly' is not known"),
    "an unknown late": ((), {"late": "keep"}, "late='keep' is not known"),
    "a keyword-only parameter": ((KeywordOnlyFn(),), {}, "'count' by keyword only"),
    "a missing argument": ((ExtraFn(),), {}, "needs an argument 'factor'"),
    "an argument too many": ((ExtraFn(), 2, 3), {}, "no parameter for the extra arguments 3"),
    "what cannot be pickled": ((GeneratorFn(),), {}, "GeneratorFn cannot be pickled.*setup"),
    "no uid": ((), {"uid": None}, "CountFn has no uid.*give uid='countfn'"),
    "an empty uid": ((), {"uid": ""}, "has no uid"),
    "a uid of another type": ((), {"uid": 7}, r"has no uid \(found 7\)"),
    "a uid that is too long": ((), {"uid": "u" * 257}, "257 characters"),
    "no store": ((), {"store": None}, "no store.*What to do"),
    "no type": ((), {"input_type": Any}, "type hint.*with_output_types"),
    "no pairs": ((), {"input_type": int, "elements": (1,)}, "not that of key-value pairs"),
    "keys of any type": ((), {"input_type": tuple[Any, int]}, "not deterministic.*type"),
    "keys of a pickled class": (
        (),
        {"input_type": tuple[object, int]},
        "not deterministic: equal keys may have other bytes",
    ),
    "float keys": ((), {"input_type": tuple[float, int]}, "hold floats.*NaN"),
    "float parts of keys": ((), {"input_type": tuple[tuple[str, float], int]}, "hold floats"),
    "list keys": ((), {"input_type": tuple[list[int], int]}, "lists or maps.*key by tuples"),
    "an interval of nothing": ((), {"every": 0}, "every=0 is no interval"),
    "a negative interval": ((), {"every": -5}, "every=-5 is no interval"),
    "an interval below a millisecond": ((), {"every": 0.0005}, "no whole number of millisec"),
    "an until that is no time": ((), {"until": "tomorrow"}, "'tomorrow' is no event time"),
    "an until beyond time": ((), {"until": 1e13}, "outside the global window"),
    "a restore that is no name": ((), {"restore": 1.5}, "restore=1.5 is not known"),
    "an empty restore": ((), {"restore": ""}, "restore='' is not known"),
    "no checkpoints to keep": ((), {"keep": 0}, "keep=0 is no retention policy"),
    "a keep that is no number": ((), {"keep": "all"}, "keep='all' is no retention policy"),
    "an unknown fallback": ((), {"on_fallback": "maybe"}, "on_fallback='maybe' is not known"),
    "an unknown on_missing": ((), {"on_missing": "keep"}, "on_missing='keep' is not known"),
    "no files at all": ((), {"max_files_per_group": 0}, "max_files_per_group=0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_while_the_pipeline_is_built(case):
    args, settings, message = REFUSED[case]
    with pytest.raises(errors.PipelineRefusedError, match=f"(?s){message}") as refused:
        apply(*args, **settings)
    assert isinstance(refused.value, ValueError)
    assert "What to do" in str(refused.value)


@pytest.mark.parametrize("until", [-64.999, 1.001, 0.1, 64.123, -0.003, 1_577_836_800.007])
def test_a_time_in_fractions_of_a_second_is_the_millisecond_it_names(until):
    pipeline = beam.Pipeline(runner="FnApiRunner")
    ckpt = Checkpoints(pipeline, "memory://refused-times", until=until)
    assert ckpt._epochs.until == round(until * 1000) * 1000


@pytest.mark.parametrize("count", [0, -1, 65_536])
def test_a_number_of_key_groups_out_of_range_is_refused(count):
    with pytest.raises(errors.CheckpointError, match=str(count)):
        apply(key_groups=count)


def test_two_operators_of_one_uid_are_refused():
    pipeline = beam.Pipeline(runner="FnApiRunner")
    pcoll = pipeline | beam.Create([("a", 1)]).with_output_types(tuple[str, int])
    _ = pcoll | "1" >> CheckpointedParDo(CountFn(), uid="op", store="memory://refused-1")
    with pytest.raises(errors.PipelineRefusedError, match=r"two operators.*uid 'op'"):
        _ = pcoll | "2" >> CheckpointedParDo(CountFn(), uid="op", store="memory://refused-2")


def test_two_committers_on_one_store_are_refused():
    pipeline = beam.Pipeline(runner="FnApiRunner")
    pcoll = pipeline | beam.Create([("a", 1)]).with_output_types(tuple[str, int])
    _ = pcoll | "1" >> CheckpointedParDo(CountFn(), uid="one", store="memory://refused-3")
    with pytest.raises(errors.PipelineRefusedError, match=r"one committer.*Checkpoints\(p, store"):
        _ = pcoll | "2" >> CheckpointedParDo(CountFn(), uid="two", store="memory://refused-3")


def test_checkpoints_of_nothing_are_refused():
    pipeline = beam.Pipeline(runner="FnApiRunner")
    with (
        pytest.raises(errors.PipelineRefusedError, match="no operators"),
        Checkpoints(pipeline, "memory://refused-4"),
    ):
        pass


def test_an_operator_after_the_results_were_taken_is_refused():
    pipeline = beam.Pipeline(runner="FnApiRunner")
    pcoll = pipeline | beam.Create([("a", 1)]).with_output_types(tuple[str, int])
    with Checkpoints(pipeline, "memory://refused-5") as ckpt:
        _ = pcoll | "1" >> ckpt.ParDo(CountFn(), uid="one")
        assert ckpt.results is not None
        with pytest.raises(errors.PipelineRefusedError, match=r"after ckpt\.results"):
            _ = pcoll | "2" >> ckpt.ParDo(CountFn(), uid="two")


DATA = ((1_000_000, "a", 1), (70_000_000, "b", 2), (130_000_000, "a", 3))


def checkpointed(store, fn=None, **settings):
    settings.setdefault("runner", "FnApiRunner")
    return run_checkpointed(fn or CountAndSumFn(), DATA, store=store, uid="op", **settings)


def test_an_until_before_the_restored_boundary_is_refused(tmp_path):
    store = open_store(tmp_path)
    checkpointed(store, until=100)
    with pytest.raises(errors.PipelineRefusedError, match=r"until=Timestamp\(50\) is before"):
        checkpointed(store, until=50)


def test_another_number_of_key_groups_after_a_drained_run_with_an_interval_is_refused(tmp_path):
    store = open_store(tmp_path)
    checkpointed(store, key_groups=7)
    with pytest.raises(errors.PipelineRefusedError, match="no first boundary"):
        checkpointed(store, key_groups=8, every=50)
    checkpointed(store, key_groups=8)
    assert store.load_latest().key_group_count == 8


def test_saved_state_of_an_operator_that_is_gone_is_refused_unless_dropped(tmp_path):
    store = open_store(tmp_path)
    checkpointed(store, until=100)
    with pytest.raises(errors.PipelineRefusedError, match=r"state of 'op'.*on_missing='drop'"):
        run_checkpointed(
            CountAndSumFn(), DATA, store=store, uid="renamed", runner="FnApiRunner", until=200
        )
    run_checkpointed(
        CountAndSumFn(),
        DATA,
        store=store,
        uid="renamed",
        runner="FnApiRunner",
        until=200,
        on_missing="drop",
    )
    assert set(store.load_latest().operators) == {"renamed"}


def renamed_cells(**cells: Any) -> beam.DoFn:
    """A DoFn like CountAndSumFn with other cells."""
    specs = {name: make(name) for name, make in cells.items()}

    class OtherFn(beam.DoFn):
        pass

    names = list(specs)

    def process(self, element, a=beam.DoFn.StateParam(specs[names[0]])):
        yield element

    def process2(
        self,
        element,
        a=beam.DoFn.StateParam(specs[names[0]]),
        b=beam.DoFn.StateParam(specs[names[-1]]),
    ):
        yield element

    OtherFn.process = process if len(names) == 1 else process2
    return OtherFn()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            VarIntCoder(),
            PickleCoder(),
            "cell 'x' was saved with VarIntCoder and is now PickleCoder",
        ),
        (None, VarIntCoder(), "cell 'x' was saved as bag and is now read_modify_write"),
    ],
)
def test_another_coder_or_kind_of_a_cell_is_refused(tmp_path, before, after, message):
    def spec(coder):
        if coder is None:
            return lambda name: BagStateSpec(name, VarIntCoder())
        return lambda name: ReadModifyWriteStateSpec(name, coder)

    store = open_store(tmp_path)
    checkpointed(store, renamed_cells(x=spec(before)), until=100)
    with pytest.raises(errors.StateIncompatibleError, match=message) as refused:
        checkpointed(store, renamed_cells(x=spec(after)), until=200)
    assert isinstance(refused.value, ValueError)
    assert "What to do" in str(refused.value)
    assert store.list_ids() == [1]


def test_another_key_coder_is_refused(tmp_path):
    store = open_store(tmp_path)
    checkpointed(store, CountFn(), until=100)
    with pytest.raises(errors.StateIncompatibleError, match="keys were saved with StrUtf8Coder"):
        apply(CountFn(), store=store, until=200, input_type=tuple[int, int], uid="op")


def test_a_cell_that_is_gone_is_refused_unless_dropped_and_a_new_one_is_empty(tmp_path):
    def value(name):
        return ReadModifyWriteStateSpec(name, VarIntCoder())

    store = open_store(tmp_path)
    checkpointed(store, renamed_cells(x=value), until=60)
    with pytest.raises(errors.StateIncompatibleError, match=r"cell 'x' was saved and.*no such"):
        checkpointed(store, renamed_cells(y=value), until=100)
    checkpointed(store, renamed_cells(x=value, y=value), until=100)
    checkpointed(store, renamed_cells(y=value), until=200, on_missing="drop")
    assert list(store.load_latest().pipeline.operators["op"].cells) == ["y"]


class UnhashableKey(str):
    __hash__ = None


def test_a_key_that_cannot_be_hashed_is_named_when_it_comes(tmp_path):
    store = open_store(tmp_path)
    pipeline = beam.Pipeline(runner="FnApiRunner")
    _ = (
        pipeline
        | beam.Create([("a", 1)])
        # Fused with the operator's input on no runner, so the key is decoded as a plain str; the
        # wrapper itself is asked.
        | beam.Map(lambda x: x).with_output_types(tuple[str, int])
        | CheckpointedParDo(CountFn(), uid="op", store=store)
    )
    from beam_ckpt.transforms.keyed_state.dofn import StatefulWrapper

    wrapper = next(
        part.transform.fn
        for part in walk(pipeline.transforms_stack[0])
        if isinstance(getattr(part.transform, "fn", None), StatefulWrapper)
    )
    wrapper.start_bundle()
    with pytest.raises(errors.StateIncompatibleError, match=r"'op'.*UnhashableKey.*hashed"):
        wrapper.process((UnhashableKey("a"), 1), None, None, None, None)


def walk(part):
    yield part
    for child in part.parts:
        yield from walk(child)


FIRST = {"partition": lambda kv: kv[0], "offset": lambda kv: kv[1]}


def tracked(uid: Any = "log", **settings: Any) -> Any:
    """Builds a pipeline with a tracked source and one operator; returns the pipeline."""
    pipeline = beam.Pipeline(runner="FnApiRunner")
    pcoll = pipeline | beam.Create([("a", 1)]).with_output_types(tuple[str, int])
    with Checkpoints(pipeline, "memory://refused-tracked") as ckpt:
        pcoll |= ckpt.TrackOffsets(uid, **{**FIRST, **settings})
        _ = pcoll | ckpt.ParDo(CountFn(), uid="op")
    return pipeline


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"uid": ""}, "the source of TrackOffsets has no uid"),
        ({"uid": "u" * 257}, "257 characters"),
        ({"uid": "op"}, "two operators of this pipeline have uid 'op'"),
        ({"disorder": -1}, "'log': disorder=-1"),
        ({"disorder": 0.5}, "'log': disorder=0.5"),
    ],
)
def test_a_source_that_cannot_be_tracked_is_refused(settings, message):
    with pytest.raises(errors.PipelineRefusedError, match=message) as refused:
        tracked(**settings)
    assert "What to do" in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offset": lambda kv: "12"}, r"'log': offset= gave a str\. What to do.*an int"),
        ({"offset": lambda kv: True}, r"'log': offset= gave a bool\. What to do.*an int"),
        ({"partition": lambda kv: kv}, r"'log': partition= gave a tuple\. What to do.*a string"),
    ],
)
def test_an_offset_or_partition_of_another_type_stops_the_run(settings, message):
    with pytest.raises(Exception, match=message):
        tracked(**settings).run().wait_until_finish()


class TimelessFn(CountFn):
    """`AlarmedFn` in a later version, without its timer."""


class AlarmedFn(CountFn):
    ALARM = TimerSpec("alarm", TimeDomain.WATERMARK)

    def process(
        self,
        element,
        count=beam.DoFn.StateParam(COUNT),
        alarm=beam.DoFn.TimerParam(ALARM),
    ):
        count.write((count.read() or 0) + 1)
        alarm.set(500)
        return []

    @on_timer(ALARM)
    def on_alarm(self):
        return ["alarm"]


class MovedFn(AlarmedFn):
    """The same family in processing time."""

    ALARM = TimerSpec("alarm", TimeDomain.REAL_TIME)

    def process(
        self,
        element,
        count=beam.DoFn.StateParam(COUNT),
        alarm=beam.DoFn.TimerParam(ALARM),
    ):
        return []

    @on_timer(ALARM)
    def on_alarm(self):
        return ["alarm"]


@pytest.mark.parametrize("later", [TimelessFn, MovedFn])
def test_a_saved_timer_of_a_family_that_is_gone_is_refused_unless_dropped(tmp_path, later):
    store = open_store(tmp_path)
    checkpointed(store, AlarmedFn(), until=100)
    message = r"'op': a timer of family 'alarm' in event time was saved.*on_missing='drop'"
    with pytest.raises(errors.StateIncompatibleError, match=message):
        checkpointed(store, later(), until=200)
    run = checkpointed(store, later(), on_missing="drop")
    assert "alarm" not in [output.value for output in run.outputs]
