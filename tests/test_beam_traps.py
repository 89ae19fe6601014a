"""Traps of Beam that no other test holds; `tests/beam_traps.md` lists them all."""

from __future__ import annotations

import ast
import uuid
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.coders import FastPrimitivesCoder
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp

from beam_ckpt import open_store
from beam_ckpt.errors import PipelineRefusedError
from beam_ckpt.testing.cuts import run_checkpointed, saved_state
from beam_ckpt.testing.event_loop import run_event_loop
from beam_ckpt.testing.fake_runner import run_faked
from beam_ckpt.testing.generated import Emit, Fold, Program, Read, Write, dofn
from beam_ckpt.testing.streams import Arrive, StreamPlan
from beam_ckpt.testing.subjects import CountAndSumFn
from beam_ckpt.transforms import Checkpoints, restore
from beam_ckpt.transforms.keyed_state.key import KeyState

S = 1_000_000
ROOT = Path(__file__).parents[1]
COUNTS = Program(cells=("value",), process=(Fold(0), Emit()))


class _TimesFn(beam.DoFn):
    seen: list[Timestamp] = []  # noqa: RUF012 (the workers are threads of this process)

    def process(self, element, timestamp=beam.DoFn.TimestampParam):
        self.seen.append(timestamp)


def test_saved_records_come_back_below_every_watermark(monkeypatch):
    """Were they later, the watermark could pass the gate before them."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    data = [(at * S, "abc"[at % 3], at) for at in range(30)]
    run_checkpointed(CountAndSumFn(), data, runner="FnApiRunner", store=store, until=20)
    expand = restore.ReadSaved.expand

    def watched(self, pipeline):
        records = expand(self, pipeline)
        _ = records | "Times" >> beam.ParDo(_TimesFn())
        return records

    monkeypatch.setattr(restore.ReadSaved, "expand", watched)
    _TimesFn.seen.clear()
    run_checkpointed(CountAndSumFn(), data, runner="FnApiRunner", store=store, until=25)
    assert _TimesFn.seen == [MIN_TIMESTAMP] * 3


def test_a_fresh_start_has_no_gate_and_keeps_nothing_waiting():
    data = [(at * S, "abc"[at % 3], at) for at in range(30)]
    store = open_store(f"memory://{uuid.uuid4().hex}")
    first = run_checkpointed(CountAndSumFn(), data, runner="FnApiRunner", store=store)
    assert first.metrics.get("elements_buffered", 0) == 0
    second = run_checkpointed(CountAndSumFn(), data, runner="FnApiRunner", store=store)
    assert second.metrics["keys_restored"] == 3


def test_an_element_that_waits_is_added_without_reading_those_that_wait(monkeypatch):
    """Reading and writing the whole buffer at each touch would be quadratic."""
    reads = []
    read_aux = KeyState._read_aux

    def counted(self):
        if not self._aux_read:
            reads.append(self.control.buffered)
        read_aux(self)

    monkeypatch.setattr(KeyState, "_read_aux", counted)
    data = tuple((at * S, "a", at) for at in range(200))
    plan = StreamPlan(tuple(Arrive((element,)) for element in data))
    run = run_faked(dofn(COUNTS), plan, time_sorted=True)
    assert len(run.outputs) == 200
    # Each wake-up reads it once, until the rest is so little that it is not kept there; no element
    # that joined it did.
    assert 1 < len(reads) < 200
    assert reads == list(range(200, 200 - len(reads), -1))


@pytest.mark.parametrize("kind", ["mean", "count", "sum", "top"])
def test_an_empty_combining_cell_reads_as_its_default(kind):
    program = Program(cells=(kind,), process=(Read(0), Emit(), Write(0), Read(0), Emit()))
    data = [(S, "a", 3), (2 * S, "a", 4)]
    store = open_store(f"memory://{uuid.uuid4().hex}")
    run = run_checkpointed(dofn(program), data, runner="FnApiRunner", store=store, time_sorted=True)
    assert [o.value for o in run.outputs] == [
        o.value for o in run_event_loop(dofn(program), data).outputs
    ]


class _ChangesFn(beam.DoFn):
    """Goes on changing the objects that it has put into cells."""

    LAST = ReadModifyWriteStateSpec("last", FastPrimitivesCoder())
    NOTES = BagStateSpec("notes", FastPrimitivesCoder())

    def process(
        self,
        element,
        last=beam.DoFn.StateParam(LAST),
        notes=beam.DoFn.StateParam(NOTES),
    ):
        note = [element[1]]
        last.write(note)
        notes.add(note)
        note.append("changed afterwards")
        yield str((last.read(), list(notes.read())))


@pytest.mark.parametrize("runner", ["FnApiRunner", "BundleBasedDirectRunner"])
def test_an_object_that_is_changed_after_it_was_written_changes_no_state(runner):
    store = open_store(f"memory://{uuid.uuid4().hex}")
    fn = beam.typehints.with_output_types(str)(_ChangesFn)()
    run = run_checkpointed(fn, [(S, "a", 1)], runner=runner, store=store)
    assert [o.value for o in run.outputs] == ["([1], [[1]])"]
    saved = saved_state(store, fn)["a", GlobalWindow()].cells
    assert saved == {"last": [1], "notes": [[1]]}


def test_no_module_takes_all_names_of_another_nor_the_name_of_one_of_beams():
    for path in (*ROOT.glob("beam_ckpt/**/*.py"), *ROOT.glob("transforms/**/*.py")):
        assert path.name not in ("proto.py", "coders.py"), path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert [alias.name for alias in node.names] != ["*"], path


def test_a_cell_that_was_changed_in_the_bundle_that_saves_it_is_saved_as_it_is_now():
    """The fire that closes the epoch comes in the bundle of the element, and behind it."""
    program = Program(cells=("value",), process=(Fold(0), Emit()))
    data = tuple((at * S, "a", at) for at in range(1, 9))
    expected = run_event_loop(dofn(program), data, until=9 * S).state
    (kept,) = (cells.cells["c0_value"] for cells in expected.values())
    store = open_store(f"memory://{uuid.uuid4().hex}")
    # A batch that is sorted works through elements and cut in one bundle.
    run_checkpointed(
        dofn(program), data, runner="FnApiRunner", store=store, time_sorted=True, until=9
    )
    assert saved_state(store, dofn(program))["a", GlobalWindow()].cells == {"c0_value": kept}


@pytest.mark.parametrize("runner", ["FnApiRunner", "DirectRunner"])
@pytest.mark.parametrize(("workers", "refused"), [(1, False), (2, True), (0, True)])
def test_several_workers_as_threads_are_refused(tmp_path, runner, workers, refused):
    """Each has a cache of state of its own in FnApiRunner, and loses what the others write."""
    options = PipelineOptions(
        [
            f"--runner={runner}",
            "--direct_running_mode=multi_threading",
            f"--direct_num_workers={workers}",
        ]
    )
    pipeline = beam.Pipeline(options=options)
    if refused:
        with pytest.raises(PipelineRefusedError, match="take one worker, or"):
            Checkpoints(pipeline, tmp_path / "c")
    else:
        Checkpoints(pipeline, tmp_path / "c")
