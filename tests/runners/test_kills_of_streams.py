"""A stream on Prism, from an unbounded source, killed and started again: 0 lost, 0 double.

Outputs count once per (epoch, key), as in a sink that overwrites.
"""

from __future__ import annotations

import random
import time
import uuid
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from beam_ckpt import open_store
from beam_ckpt.testing import cuts
from beam_ckpt.testing.crashes import Crashes, StreamHistory, carry_out, last_of_each, outputs_of
from beam_ckpt.testing.cuts import saved_state
from beam_ckpt.testing.event_loop import canonical, run_event_loop
from beam_ckpt.testing.faults import Fault, FaultPlan
from beam_ckpt.testing.prism import prism_options
from beam_ckpt.testing.replay import ReadReplay, ReplayLog
from beam_ckpt.testing.subjects import DelayChainFn, RemindersFn
from beam_ckpt.transforms import Checkpoints

EVERY = 60
ROWS = tuple((s * 3_000_000 + s % 7 * 1000, ("abcd"[s % 4], s % 9)) for s in range(120))
LOG = ReplayLog(ROWS, displacement=45, seed=1)
#: As long as the log takes at this speed, and starting a pipeline on it, in seconds.
SPEED, LENGTH = 150, 4.0


def history(root: Path, fn: beam.DoFn, speed: float | None = None) -> StreamHistory:
    root.mkdir(parents=True)
    # Full sidecars only, so that pruning has files to delete.
    return StreamHistory(str(root), fn, LOG, EVERY, speed, key_groups=2, max_files_per_group=1)


def elements(log: ReplayLog, boundary: int | None = None) -> list[tuple[int, str, int]]:
    return [(at, key, value) for at, (key, value) in log.below(boundary)]


def check_end(done: StreamHistory) -> None:
    """Outputs and state are those of the oracle; nothing in the store is damaged."""
    reference = run_event_loop(done.fn, elements(done.log))
    assert canonical(outputs_of(done)) == canonical(
        [output for output in reference.outputs if output.tag is None]
    )
    assert saved_state(done.store, done.fn) == dict(reference.state)
    report = done.store.recover_latest_validated()
    assert report.chosen is not None
    assert report.chosen.boundary is None
    assert [s for s in report.skipped if s.phase == "invalid"] == []


STEPS = {
    "before a sidecar": Fault("put", "state/*", nth=5, when="before"),
    "after a manifest": Fault("put_if_absent", "manifests/*.json", nth=3, when="after"),
    "after a marker": Fault("put_if_absent", "manifests/*.final", nth=4, when="after"),
    "before a pruned file goes": Fault("delete", "state/*", nth=2, when="before"),
    "after a pointer": Fault("replace", "latest.json", nth=5, when="after"),
}


def kill_at_step(root: Path, step: str, fn: beam.DoFn) -> None:
    directory = root / "faults"
    directory.mkdir(parents=True)
    killed = history(root / "history", fn)
    crashes = carry_out(killed, FaultPlan(STEPS[step], directory=directory))
    assert crashes == Crashes(1, (2,))
    check_end(killed)


def kill_at_random(root: Path, fn: beam.DoFn, moments: list[float]) -> Crashes:
    killed = history(root / "history", fn, SPEED)
    crashes = carry_out(killed, kill_after=moments)
    check_end(killed)
    return crashes


def test_a_stream_killed_in_the_middle_goes_on_exactly(prism, tmp_path):
    assert kill_at_random(tmp_path, DelayChainFn(), [2.2]).kills == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", STEPS)
def test_a_stream_killed_at_each_kind_of_step_goes_on_exactly(prism, tmp_path, step):
    kill_at_step(tmp_path, step, RemindersFn() if "pruned" in step else DelayChainFn())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stream_killed_again_and_again_goes_on_exactly(prism, tmp_path):
    draw, kills = random.Random(5), 0
    for number, fn in enumerate((DelayChainFn(), RemindersFn(), DelayChainFn())):
        moments = [draw.uniform(0.3, LENGTH) for _ in range(5)]
        kills += kill_at_random(tmp_path / str(number), fn, moments).kills
    print(f"{kills} kills at random moments, 0 lost, 0 double")
    assert kills >= 10


def test_an_endless_stream_that_is_cancelled_goes_on_exactly(prism, tmp_path):
    """The clean stop: the job is cancelled, and the next one begins at the newest boundary."""
    log = ReplayLog(ROWS[:40], displacement=20, seed=2, rounds=None)
    fn, store = DelayChainFn(), open_store(f"memory://{uuid.uuid4().hex}")
    runs = []
    for until in (4, 9):
        name = uuid.uuid4().hex
        runs.append(cuts._COLLECTED.setdefault(name, []))
        options = PipelineOptions(["--runner=PrismRunner", "--streaming", *prism_options()])
        p = beam.Pipeline(options=options)
        with Checkpoints(p, store, every=EVERY, keep=100, key_groups=2) as ckpt:
            assert (ckpt.resume_at is None) == (until == 4)
            _ = (
                p
                | ReadReplay(log, start=ckpt.resume_at, speed=SPEED, hint=tuple[str, int])
                | ckpt.ParDo(fn, uid="subject", time_sorted=True)
                | beam.ParDo(cuts._CollectFn(name, None))
            )
        job = p.run()
        patience = time.monotonic() + 60
        while len(store.list_ids()) < until and time.monotonic() < patience:
            time.sleep(0.1)
        job.cancel()
        assert len(store.list_ids()) >= until
    newest = store.load_latest()
    for checkpoint_id in store.list_ids():
        boundary = store.load_by_id(checkpoint_id).boundary
        expected = run_event_loop(fn, elements(log, boundary), until=boundary)
        assert saved_state(store, fn, checkpoint_id=checkpoint_id) == dict(expected.state)
    expected = run_event_loop(fn, elements(log, newest.boundary), until=newest.boundary)
    found = [o for o in last_of_each(runs, EVERY) if o.timestamp < newest.boundary]
    assert canonical(found) == canonical(expected.outputs)


def test_a_drained_stream_has_exact_checkpoints_up_to_its_last_watermark(prism):
    """What is closed by the drain holds less than its cut: the source had more to give."""
    fn, store, position = DelayChainFn(), open_store(f"memory://{uuid.uuid4().hex}"), 70
    options = PipelineOptions(["--runner=PrismRunner", "--streaming", *prism_options()])
    with (
        beam.Pipeline(options=options) as p,
        Checkpoints(p, store, every=EVERY, keep=100, key_groups=2) as ckpt,
    ):
        source = ReadReplay(LOG, drained_at=position, hint=tuple[str, int])
        _ = p | source | ckpt.ParDo(fn, uid="subject", time_sorted=True)
    boundaries = {i: store.load_by_id(i).boundary for i in store.list_ids()}
    last = LOG.watermark(position)
    exact = [i for i, boundary in boundaries.items() if boundary is not None and boundary <= last]
    assert len(exact) == last // (EVERY * 1_000_000) >= 2
    for checkpoint_id in exact:
        expected = run_event_loop(fn, elements(LOG), until=boundaries[checkpoint_id])
        assert saved_state(store, fn, checkpoint_id=checkpoint_id) == dict(expected.state)
    assert len(boundaries) > len(exact)
    assert [i for i in boundaries if not store.load_by_id(i).drained] == exact
