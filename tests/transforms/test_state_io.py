"""Saved state as PCollections, and pruning from within a pipeline."""

from __future__ import annotations

import uuid
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import (
    PickleCoder,
    StrUtf8Coder,
    TupleCoder,
    VarIntCoder,
)
from apache_beam.coders.coders import IntervalWindowCoder
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.combiners import CountCombineFn, MeanCombineFn
from apache_beam.transforms.userstate import (
    BagStateSpec,
    CombiningValueStateSpec,
    OrderedListStateSpec,
    ReadModifyWriteStateSpec,
    SetStateSpec,
)
from apache_beam.transforms.window import FixedWindows, IntervalWindow, WindowFn
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp

from beam_ckpt import errors, open_store
from beam_ckpt.manifest import (
    CheckpointManifest,
    PipelineIdentity,
    new_checkpoint_id,
)
from beam_ckpt.retention import KeepLast, PruneReport
from beam_ckpt.sidecar import encode_sidecar
from beam_ckpt.store import StateChunk
from beam_ckpt.testing import cuts
from beam_ckpt.testing.cuts import run_checkpointed
from beam_ckpt.testing.prism import prism_options
from beam_ckpt.transforms import Checkpoints, PruneCheckpoints, ReadState, RestoreState, writer
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.snapshot import SavedTimer, SnapshotRecord

S = 1_000_000
DATA = [(second * S, f"key {second % 70}", second) for second in range(0, 200, 10)]


class Tripwire:
    """Says that it was unpickled."""

    unpickled = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self):
        return _trip, (self.number,)

    def __eq__(self, other):
        return type(other) is Tripwire and other.number == self.number

    def __hash__(self):
        return hash(self.number)


def _trip(number: int) -> Tripwire:
    Tripwire.unpickled += 1
    return Tripwire(number)


class ReversedCoder(StrUtf8Coder):
    """An author's own, which only the author has."""

    def encode(self, value):
        return super().encode(value[::-1])

    def decode(self, encoded):
        return super().decode(encoded)[::-1]


class CellsFn(beam.DoFn):
    """A cell of each kind, one of them pickled, one by a coder of the author's."""

    TOTAL = ReadModifyWriteStateSpec("total", VarIntCoder())
    SEEN = BagStateSpec("seen", TupleCoder((VarIntCoder(), StrUtf8Coder())))
    TENS = SetStateSpec("tens", VarIntCoder())
    OBJECT = ReadModifyWriteStateSpec("object", PickleCoder())
    LABEL = ReadModifyWriteStateSpec("label", ReversedCoder())
    NEVER = ReadModifyWriteStateSpec("never", VarIntCoder())
    EMPTY = BagStateSpec("empty", VarIntCoder())

    def __init__(self, mark: str = "label") -> None:
        self.mark = mark

    def process(
        self,
        element,
        total=beam.DoFn.StateParam(TOTAL),
        seen=beam.DoFn.StateParam(SEEN),
        tens=beam.DoFn.StateParam(TENS),
        object=beam.DoFn.StateParam(OBJECT),
        label=beam.DoFn.StateParam(LABEL),
        never=beam.DoFn.StateParam(NEVER),
        empty=beam.DoFn.StateParam(EMPTY),
    ):
        key, value = element
        total.write((total.read() or 0) + value)
        seen.add((value, key))
        tens.add(value // 100)
        object.write(Tripwire(total.read()))
        label.write(f"{self.mark} of {key}")
        yield key


def expected(data: Any, objects: Any, labels: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for _, key, value in data:
        cells = found.setdefault(
            key, {"total": 0, "seen": [], "tens": set(), "never": None, "empty": []}
        )
        cells["total"] += value
        cells["seen"].append((value, key))
        cells["tens"].add(value // 100)
        cells["object"] = objects(cells["total"])
        cells["label"] = labels(f"label of {key}")
    return found


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def saved(store):
    """Checkpoints at 50, 100, 150 and 200 s, in deltas, with state that was overwritten."""
    run_checkpointed(
        CellsFn(), DATA, runner="FnApiRunner", store=store, uid="cells",
        every=50, until=200, keep=100, key_groups=3,
    )  # fmt: skip
    Tripwire.unpickled = 0
    return store


def elements(transform: Any, runner: str = "FnApiRunner") -> list[Any]:
    """What a transform at the root of a pipeline gives."""
    name = uuid.uuid4().hex
    collected = cuts._COLLECTED[name] = []
    arguments = [f"--runner={runner}", *(prism_options() if runner == "PrismRunner" else [])]
    with beam.Pipeline(options=PipelineOptions(arguments)) as p:
        _ = p | transform | beam.ParDo(cuts._CollectFn(name, None))
    del cuts._COLLECTED[name]
    return collected


def state(transform: Any, runner: str = "FnApiRunner") -> dict[str, dict[str, Any]]:
    found = elements(transform, runner)
    assert {output.timestamp for output in found} <= {MIN_TIMESTAMP.micros}
    keyed = {}
    for output in found:
        key, cells = output.value
        assert key not in keyed
        keyed[key] = {k: sorted(v) if isinstance(v, list) else v for k, v in cells.items()}
    return keyed


@pytest.mark.parametrize("runner", ["FnApiRunner", "BundleBasedDirectRunner", "PrismRunner"])
def test_state_is_read_by_the_recorded_coders_and_nothing_is_unpickled(saved, runner, request):
    if runner == "PrismRunner":
        request.getfixturevalue("prism")
    found = state(ReadState(saved, "cells"), runner)
    assert Tripwire.unpickled == 0
    assert found == expected(
        DATA, lambda total: PickleCoder().encode(Tripwire(total)), ReversedCoder().encode
    )


def test_the_authors_dofn_reads_every_value(saved):
    for cells in (CellsFn, CellsFn("other")):
        assert state(ReadState(saved, "cells", cells=cells)) == expected(DATA, Tripwire, str)
    assert Tripwire.unpickled > 0


def test_a_pickle_is_opened_where_that_is_asked_for(saved):
    found = state(ReadState(saved, "cells", unsafe_unpickle=True))
    assert found == expected(DATA, Tripwire, ReversedCoder().encode)


def test_an_older_state_is_read_by_id_and_by_tag(saved):
    saved.tag("half way", 2)
    then = [element for element in DATA if element[0] < 100 * S]
    for at in (2, "half way"):
        found = state(ReadState(saved, "cells", at, cells=CellsFn))
        assert found == expected(then, Tripwire, str)


def test_the_elements_are_typed(saved):
    pipeline = beam.Pipeline(runner="FnApiRunner")
    pcoll = pipeline | ReadState(saved, "cells")
    assert pcoll.element_type == beam.typehints.Tuple[str, dict[str, Any]]
    assert pcoll.windowing.is_default()


def test_restore_state_is_what_the_latest_valid_checkpoint_holds(saved):
    (path, *_) = {p for p in saved.load_by_id(4).sidecar_paths()} - {
        p for p in saved.load_by_id(3).sidecar_paths()
    }
    saved.blobs.delete_many([path])
    then = [element for element in DATA if element[0] < 150 * S]
    found = state(RestoreState(saved, "cells", cells=CellsFn))
    assert found == expected(then, Tripwire, str)
    assert saved.list_ids() == [1, 2, 3, 4]


def test_restore_state_prunes_what_is_older_and_never_what_it_reads(saved):
    saved.blobs.delete_many(
        [next(iter(saved.load_by_id(4).sidecar_paths() - saved.load_by_id(3).sidecar_paths()))]
    )
    then = [element for element in DATA if element[0] < 150 * S]
    found = state(RestoreState(saved, "cells", keep=1, cells=CellsFn))
    assert found == expected(then, Tripwire, str)
    assert saved.list_ids() == [3, 4]


def test_restore_state_of_a_store_without_checkpoints_is_empty(store):
    assert elements(RestoreState(store, "cells", keep=1)) == []
    assert store.list_ids() == []


def test_read_state_of_a_store_without_checkpoints_is_an_error(store, tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError, match="no checkpoint store"):
        ReadState(tmp_path / "nothing", "cells")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there_is_named(saved):
    with pytest.raises(errors.CheckpointNotFoundError, match=r"no operator 'cell'.*'cells'"):
        ReadState(saved, "cell")
    with pytest.raises(errors.CheckpointNotFoundError, match="no operator 'cell'"):
        RestoreState(saved, "cell")
    with pytest.raises(errors.CheckpointNotFoundError, match="no checkpoint 9"):
        ReadState(saved, "cells", 9)
    with pytest.raises(errors.CheckpointNotFoundError, match="no such tag"):
        ReadState(saved, "cells", "release")
    with pytest.raises(errors.PipelineRefusedError, match="at='fresh' is no checkpoint"):
        ReadState(saved, "cells", "fresh")


class OtherKindFn(beam.DoFn):
    TOTAL = BagStateSpec("total", VarIntCoder())

    def process(self, element, total=beam.DoFn.StateParam(TOTAL)):
        yield element


class OtherCoderFn(beam.DoFn):
    TOTAL = ReadModifyWriteStateSpec("total", StrUtf8Coder())

    def process(self, element, total=beam.DoFn.StateParam(TOTAL)):
        yield element


class NeedsArgumentsFn(CellsFn):
    def __init__(self, needed: int) -> None:
        super().__init__()


def test_coders_that_are_not_those_it_was_saved_with_are_refused(saved):
    with pytest.raises(
        errors.StateIncompatibleError, match=r"'total' was saved as read_modify.*bag"
    ):
        ReadState(saved, "cells", cells=OtherKindFn)
    with pytest.raises(
        errors.StateIncompatibleError, match=r"'total' was saved with VarIntCoder.*StrUtf8Coder"
    ):
        ReadState(saved, "cells", cells=OtherCoderFn)
    with pytest.raises(errors.StateIncompatibleError, match="the key was saved with StrUtf8Coder"):
        ReadState(saved, "cells", key_coder=VarIntCoder())
    with pytest.raises(errors.PipelineRefusedError, match=r"NeedsArgumentsFn.*an instance"):
        ReadState(saved, "cells", cells=NeedsArgumentsFn)
    with pytest.raises(errors.StateIncompatibleError, match=r"GlobalWindowCoder.*FixedWindows"):
        ReadState(saved, "cells", windows=FixedWindows(60))


def windowed_store(store):
    """State in windows, and of a key that has only a timer, as another version may write it."""
    operator = OperatorState(
        "windowed", StrUtf8Coder(), IntervalWindowCoder(),
        (CellState("n", "read_modify_write", VarIntCoder()),), False,
    )  # fmt: skip
    windows = [IntervalWindow(0, 60), IntervalWindow(60, 120)]
    records = [
        SnapshotRecord(
            b"a", IntervalWindowCoder().encode(window), False, 0, (VarIntCoder().encode(n),), (), ()
        )
        for n, window in enumerate(windows)
    ]
    timer = SavedTimer("close", "", "event", 60 * S, None)
    records.append(
        SnapshotRecord(
            b"b", IntervalWindowCoder().encode(windows[0]), False, 0, (None,), (timer,), ()
        )
    )
    header = operator.header(key_group=0, boundary=50 * S, kind="full")
    data = encode_sidecar(operator.to_table(records), header)
    manifest = CheckpointManifest(
        checkpoint_id=new_checkpoint_id(), id=1, epoch=1, timestamp_ms=1, watermark=50 * S,
        pipeline=PipelineIdentity(
            operators={"windowed": operator.spec()}, beam_version="2", python_version="3"
        ),
    )  # fmt: skip
    store.save_with_state(manifest, [StateChunk("windowed", 0, data, boundary=50 * S)])
    store.finalize(1)
    return windows


def test_state_in_windows_comes_in_its_windows(store):
    first, second = windowed_store(store)
    found = elements(ReadState(store, "windowed", windows=FixedWindows(60)))
    assert {(output.value[0], output.window): output.value[1] for output in found} == {
        ("a", first): {"n": 0},
        ("a", second): {"n": 1},
        ("b", first): {"n": None},
    }
    with pytest.raises(errors.StateIncompatibleError, match=r"IntervalWindowCoder.*windows="):
        ReadState(store, "windowed")


def test_prune_checkpoints_deletes_and_reports_once(saved):
    (output,) = elements(PruneCheckpoints(saved, KeepLast(3), dry_run=True))
    assert output.value.deleted == (1,)
    assert saved.list_ids() == [1, 2, 3, 4]
    (output,) = elements(PruneCheckpoints(saved, 2))
    report = output.value
    assert isinstance(report, PruneReport)
    assert (report.deleted, report.kept) == ((1, 2), (3, 4))
    assert saved.list_ids() == [3, 4]
    assert saved.validate_checkpoint(3).valid


def test_prune_checkpoints_follows_the_results(store):
    with (
        beam.Pipeline(runner="FnApiRunner") as p,
        Checkpoints(p, store, every=50, until=200, keep=100) as ckpt,
    ):
        pcoll = p | beam.Create(DATA) | beam.Map(cuts._stamp).with_output_types(tuple[str, int])
        _ = pcoll | ckpt.ParDo(CellsFn(), uid="cells")
        _ = ckpt.results | PruneCheckpoints(store, keep=1)
    assert store.list_ids() == [4]
    assert store.load_latest().boundary == Timestamp(200).micros


def test_a_prune_of_nothing_or_by_nothing_is_refused(saved, tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError):
        PruneCheckpoints(tmp_path / "nothing", 1)
    for transform in (
        PruneCheckpoints,
        lambda store, keep: RestoreState(store, "cells", keep=keep),
    ):
        with pytest.raises(errors.PipelineRefusedError, match="keep=0 is no retention policy"):
            transform(saved, 0)


def test_display_data_says_what_is_read(saved):
    data = ReadState(saved, "cells").display_data()
    assert {name: item.value for name, item in data.items()} == {
        "store": saved.url,
        "uid": "cells",
        "checkpoint": 4,
    }


class MoreCellsFn(beam.DoFn):
    """The other kinds of cells."""

    MEAN = CombiningValueStateSpec(
        "mean", TupleCoder((VarIntCoder(), VarIntCoder())), MeanCombineFn()
    )
    UNUSED = CombiningValueStateSpec("unused", VarIntCoder(), CountCombineFn())
    PAST = OrderedListStateSpec("past", StrUtf8Coder())

    def process(
        self,
        element,
        at=beam.DoFn.TimestampParam,
        mean=beam.DoFn.StateParam(MEAN),
        unused=beam.DoFn.StateParam(UNUSED),
        past=beam.DoFn.StateParam(PAST),
    ):
        mean.add(element[1])
        past.add((at, f"at {element[1]}"))
        yield element


def save_more(store: Any, windows: Any = None, **settings: Any) -> None:
    with (
        beam.Pipeline(runner="FnApiRunner") as p,
        Checkpoints(p, store, until=100, key_groups=2, **settings) as ckpt,
    ):
        pcoll = p | beam.Create(DATA) | beam.Map(cuts._stamp).with_output_types(tuple[str, int])
        if windows is not None:
            pcoll |= beam.WindowInto(windows)
        _ = pcoll | ckpt.ParDo(MoreCellsFn(), uid="more")


def test_combining_cells_and_ordered_lists_are_read_as_the_dofn_reads_them(store):
    save_more(store)
    values: dict[str, list[int]] = {}
    for at, key, value in DATA:
        if at < 100 * S:
            values.setdefault(key, []).append(value)
    past = {k: [(Timestamp(value), f"at {value}") for value in v] for k, v in values.items()}
    assert state(ReadState(store, "more", cells=MoreCellsFn)) == {
        key: {"mean": sum(v) / len(v), "unused": 0, "past": past[key]} for key, v in values.items()
    }
    assert state(ReadState(store, "more")) == {
        key: {"mean": (sum(v), len(v)), "unused": None, "past": past[key]}
        for key, v in values.items()
    }


def test_of_windows_that_are_over_at_the_cut_nothing_comes(store, monkeypatch):
    """What was saved of them lies in an older file, and nothing has been written since."""
    # As where there is so much that the base is not written anew.
    monkeypatch.setattr(writer, "files_to_keep", lambda chain, *_: len(chain))
    save_more(store, FixedWindows(60), every=50)
    read = {"windows": FixedWindows(60), "cells": MoreCellsFn}
    for at, live in ((1, [IntervalWindow(0, 60)]), (2, [IntervalWindow(60, 120)])):
        found = elements(ReadState(store, "more", at, **read))
        cut = store.load_by_id(at).boundary
        expected: dict[Any, list[int]] = {}
        for time, key, value in DATA:
            window = FixedWindows(60).assign(WindowFn.AssignContext(Timestamp(micros=time)))[0]
            if time < cut and window in live:
                expected.setdefault((key, window), []).append(value)
        assert expected
        assert {(output.value[0], output.window): output.value[1]["mean"] for output in found} == {
            at: sum(v) / len(v) for at, v in expected.items()
        }
    late = elements(ReadState(store, "more", 2, allowed_lateness=41, **read))
    assert {output.window for output in late} == {IntervalWindow(0, 60), IntervalWindow(60, 120)}
