"""What an author gets from a `Checkpoints`: results, where to resume, what was restored."""

from __future__ import annotations

import uuid
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import VarIntCoder
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
from apache_beam.utils.timestamp import Timestamp

from beam_ckpt import errors, open_store
from beam_ckpt.retention import KeepLast
from beam_ckpt.testing import cuts
from beam_ckpt.testing.prism import prism_options
from beam_ckpt.transforms import CheckpointResult, Checkpoints

S = 1_000_000
DATA = [(second * S, "abc"[second // 10 % 3], second) for second in range(0, 200, 10)]


class SumFn(beam.DoFn):
    SUM = ReadModifyWriteStateSpec("sum", VarIntCoder())

    def process(self, element, total=beam.DoFn.StateParam(SUM)):
        total.write((total.read() or 0) + element[1])
        yield element[0], total.read()


class Job:
    """One run of two operators in a row, and what its `Checkpoints` said."""

    def __init__(self, store: Any, runner: str = "FnApiRunner", **settings: Any) -> None:
        name = uuid.uuid4().hex
        collected = cuts._COLLECTED[name] = []
        arguments = [f"--runner={runner}"]
        if runner == "PrismRunner":
            arguments += prism_options()
        with (
            beam.Pipeline(options=PipelineOptions(arguments)) as p,
            Checkpoints(p, store, key_groups=2, **settings) as ckpt,
        ):
            self.resume_at, self.restored = ckpt.resume_at, ckpt.restored
            first = (
                p
                | beam.Create(DATA)
                | beam.Map(cuts._stamp).with_output_types(tuple[str, int])
                | "First" >> ckpt.ParDo(SumFn(), uid="first").with_output_types(tuple[str, int])
            )
            _ = first | "Second" >> ckpt.ParDo(SumFn(), uid="second")
            _ = ckpt.results | beam.ParDo(cuts._CollectFn(name, None))
            assert ckpt.results.element_type is CheckpointResult
        self.results = [output.value for output in collected]
        self.stamps = [output.timestamp for output in collected]
        del cuts._COLLECTED[name]


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}")


@pytest.mark.parametrize("runner", ["FnApiRunner", "BundleBasedDirectRunner", "PrismRunner"])
def test_there_is_a_result_for_each_finalized_checkpoint(store, runner, request):
    if runner == "PrismRunner":
        request.getfixturevalue("prism")
    job = Job(store, runner, every=50, until=180, keep=100)
    assert job.resume_at is None
    assert job.restored is None
    boundaries = [Timestamp(second) for second in (50, 100, 150, 180)]
    assert [result.boundary for result in job.results] == boundaries
    assert [result.id for result in job.results] == store.list_ids() == [1, 2, 3, 4]
    assert job.stamps == sorted(job.stamps)
    for result in job.results:
        manifest = store.load_by_id(result.id)
        assert manifest.durable_phase == "finalized"
        assert set(manifest.operators) == {"first", "second"}
        assert result.checkpoint_id == manifest.checkpoint_id
        assert result.epoch == manifest.epoch
        assert result.total_size_bytes == manifest.total_size_bytes
        new = [s for _, _, s in manifest.sidecars() if s.epoch == manifest.epoch]
        assert (result.sidecars, result.size_bytes) == (len(new), sum(s.size_bytes for s in new))
        assert result.pruned == 0
    assert store.load_latest().id == 4


def test_the_next_run_says_where_it_resumes_and_what_it_restored(store):
    Job(store, until=100)
    job = Job(store)
    assert job.resume_at == Timestamp(100)
    assert (job.restored.id, job.restored.boundary) == (1, 100 * S)
    (result,) = job.results
    assert (result.id, result.boundary) == (2, None)
    drained = Job(store)
    assert drained.resume_at is None
    assert drained.restored.id == 2


def test_old_checkpoints_go_as_keep_says(store):
    job = Job(store, every=50, until=180, keep=2)
    assert store.list_ids() == [3, 4]
    assert [result.pruned for result in job.results] == [0, 0, 1, 1]
    Job(store, until=200, keep=KeepLast(1))
    assert store.list_ids() == [4, 5], "if the last bundle had failed, 5 would be made of 4 again"
    Job(store, until=300, keep=KeepLast(1))
    assert store.list_ids() == [5, 6]


def test_a_run_starts_from_the_checkpoint_that_is_asked_for(store):
    Job(store, every=50, until=180, keep=100)
    store.tag("before the upgrade", 2)
    store.tag("3", 1)
    for restore, found in (("latest", 4), (3, 3), ("before the upgrade", 2), ("3", 1)):
        pipeline = beam.Pipeline(runner="FnApiRunner")
        ckpt = Checkpoints(pipeline, store, restore=restore)
        assert ckpt.restored.id == found
        assert ckpt.resume_at == Timestamp(micros=store.load_by_id(found).boundary)
    ckpt = Checkpoints(beam.Pipeline(runner="FnApiRunner"), store, restore="fresh")
    assert ckpt.restored is ckpt.resume_at is None


def test_a_checkpoint_or_tag_that_is_not_there_is_named_with_those_that_are(store):
    Job(store, until=100)
    store.tag("release 1", 1)
    pipeline = beam.Pipeline(runner="FnApiRunner")
    with pytest.raises(errors.CheckpointNotFoundError, match=r"no checkpoint 7 .*last ones: 1\)"):
        Checkpoints(pipeline, store, restore=7)
    with pytest.raises(errors.CheckpointNotFoundError) as refused:
        Checkpoints(pipeline, store, restore="release 2")
    for part in ("restore='release 2'", "no such tag", "'release 1'", "What to do"):
        assert part in str(refused.value)


def test_a_tagged_checkpoint_that_is_damaged_is_refused(store):
    Job(store, until=100)
    store.tag("release 1", 1)
    (path, *_) = sorted(store.load_by_id(1).sidecar_paths())
    store.blobs.delete_many([path])
    with pytest.raises(errors.InvalidCheckpointError, match=r"checkpoint 1 .*cannot be restored"):
        Checkpoints(beam.Pipeline(runner="FnApiRunner"), store, restore="release 1")


def test_what_is_saved_and_gone_is_refused_unless_dropped(store):
    Job(store, until=100)
    pipeline = beam.Pipeline(runner="FnApiRunner")
    pcoll = pipeline | beam.Create(DATA) | beam.Map(cuts._stamp).with_output_types(tuple[str, int])
    with (
        pytest.raises(errors.PipelineRefusedError, match=r"state of 'second'.*on_missing='drop'"),
        Checkpoints(pipeline, store, until=200) as ckpt,
    ):
        _ = pcoll | "First" >> ckpt.ParDo(SumFn(), uid="first")


def test_an_error_within_the_block_is_the_authors_own(store):
    with (
        pytest.raises(ZeroDivisionError),
        Checkpoints(beam.Pipeline(runner="FnApiRunner"), store),
    ):
        _ = 1 / 0
