"""Prism itself: the binary for tests, its processes, and what it must be kept from doing."""

from __future__ import annotations

import logging
import os
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.coders import VarIntCoder
from apache_beam.options.pipeline_options import DebugOptions, PipelineOptions
from apache_beam.runners.portability.prism_runner import PrismRunner
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
from apache_beam.transforms.window import FixedWindows, TimestampedValue
from apache_beam.utils.shared import Shared
from apache_beam.version import __version__ as beam_version

from beam_ckpt import open_store
from beam_ckpt.errors import PipelineRefusedError
from beam_ckpt.testing import prism as prism_module
from beam_ckpt.testing.cuts import run_checkpointed, run_plain, saved_state
from beam_ckpt.testing.event_loop import run_event_loop
from beam_ckpt.testing.prism import (
    PrismNotFoundError,
    prism_binary,
    prism_options,
    stop_prism,
)
from beam_ckpt.testing.streams import Advance, Arrive, StreamPlan
from beam_ckpt.testing.subjects import TAGS, DelayChainFn, EchoFn
from beam_ckpt.transforms import CheckpointedParDo, Checkpoints

find = prism_binary.__wrapped__  # without its memory


class SlowCountFn(beam.DoFn):
    """Counts, slower than Prism has patience: it asks for a split after some 200 ms of nothing."""

    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())

    def process(self, element, count=beam.DoFn.StateParam(COUNT)):
        time.sleep(0.3)
        count.write((count.read() or 0) + 1)
        yield element


def test_a_slow_bundle_is_not_split_so_that_no_state_is_lost(prism):
    data = [(second * 1_000_000, "a", second) for second in range(6)]
    store = open_store(f"memory://{uuid.uuid4().hex}")
    run = run_checkpointed(SlowCountFn(), data, runner="PrismRunner", store=store)
    assert len(run.outputs) == 6
    ((key, _), state), *more = saved_state(store, SlowCountFn()).items()
    assert (key, state.cells, more) == ("a", {"count": 6}, [])


@pytest.mark.parametrize(
    ("runner", "split"),
    [
        ("PrismRunner", False),
        ("PortableRunner", False),  # with the endpoint of a Prism that runs already
        ("DirectRunner", False),  # which takes Prism where it can
        ("FnApiRunner", True),
    ],
)
def test_every_runner_that_may_be_prism_is_told_not_to_split(runner, split):
    pipeline = beam.Pipeline(options=PipelineOptions([f"--runner={runner}", "--experiments=mine"]))
    Checkpoints(pipeline, f"memory://{uuid.uuid4().hex}")
    experiments = pipeline.options.view_as(DebugOptions).experiments
    assert "mine" in experiments
    assert ("prism_disable_sdf_split" in experiments) == (not split)


DATA = tuple((second * 3_000_000, "abc"[second % 3], second % 5) for second in range(60))


def check_two_runs(root: Path, runner: str, options: list[str]) -> None:
    """Two runs, the second from the first's cut, leave the oracle's state."""
    fn, store = DelayChainFn(), open_store(root)
    for until in (100, None):
        run_checkpointed(
            fn, DATA, runner=runner, store=store, options=options, until=until, time_sorted=True
        )
        cut = None if until is None else until * 1_000_000
        assert saved_state(store, fn) == dict(run_event_loop(fn, DATA, until=cut).state)
    assert saved_state(store, fn, checkpoint_id=1) != {}


class AppendFn(beam.DoFn):
    """Writes outputs to a file, and the process that had them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def process(self, element):
        with self._path.open("ab", buffering=0) as file:
            file.write(f"{os.getpid()} {element!r}\n".encode())


@pytest.mark.slow
def test_workers_in_processes_of_their_own_save_and_restore_the_same(prism, tmp_path, monkeypatch):
    # Beam starts them as "python", which need not be the one that runs this.
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    fn, store, path = DelayChainFn(), open_store(tmp_path / "ckpt"), tmp_path / "outputs"
    processes = "--experiments=use_loopback_process_worker"
    options = ["--runner=PrismRunner", processes, *prism_options()]
    for until in (100, None):
        with beam.Pipeline(options=PipelineOptions(options)) as p:
            (
                p
                | beam.Create([TimestampedValue((k, v), at / 1e6) for at, k, v in DATA])
                | beam.Map(lambda kv: kv).with_output_types(tuple[str, int])
                | CheckpointedParDo(fn, uid="subject", store=store, until=until, time_sorted=True)
                | beam.ParDo(AppendFn(path))
            )
        expected = run_event_loop(fn, DATA, until=None if until is None else until * 1_000_000)
        assert saved_state(store, fn) == dict(expected.state)
    lines = [line.split(" ", 1) for line in path.read_text().splitlines()]
    assert str(os.getpid()) not in {pid for pid, _ in lines}
    whole = run_event_loop(fn, DATA)
    assert sorted(row for _, row in lines) == sorted(repr(o.value) for o in whole.outputs)


def test_the_direct_runner_takes_prism_where_it_finds_it(prism, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "apache_beam.runners.direct"):
        check_two_runs(tmp_path, "DirectRunner", prism_options())
    assert "Running pipeline with PrismRunner" in caplog.text
    assert "Falling back" not in caplog.text


def test_the_direct_runner_falls_back_where_it_finds_none(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(PrismRunner, "shared_handle", Shared())  # not the one that may run already
    with caplog.at_level(logging.INFO, "apache_beam.runners.direct"):
        check_two_runs(tmp_path, "DirectRunner", ["--prism_location=/nowhere/prism"])
    assert "Falling back to DirectRunner" in caplog.text


def test_elements_of_a_millisecond_that_its_watermark_outruns_are_sorted_among_themselves(prism):
    """Prism's watermark is at 230 s while the second part, of that moment, is on its way."""
    at = 230_000_000
    first, second = tuple((at, "c", v) for v in (5, 4)), tuple((at, "c", v) for v in (3, 1, 2))
    begin = (Arrive(((20_000_000, "b", 0), *first)), Advance(at - 2_000))
    plan = StreamPlan((*begin, Arrive(((at, "a", 0),)), Arrive(((at, "a", 0), *second))))
    store = open_store(f"memory://{uuid.uuid4().hex}")
    run = run_checkpointed(
        EchoFn(), plan, runner="PrismRunner", store=store, tags=TAGS, time_sorted=True, every=50
    )

    def at_once(outputs):
        return [o.value for o in outputs if o.value[0] == "c" and "late" not in o.value[1]]

    # Outrun, the second part is as if it were of the next millisecond; else it is sorted in.
    after = tuple((at + 1_000, *rest) for _, *rest in second)
    assert at_once(run.outputs) in [
        at_once(run_event_loop(EchoFn(), first + part).outputs) for part in (after, second)
    ]


LATE = {"window_fn": FixedWindows(60), "lateness": 45_000_000}


def test_windows_with_an_allowed_lateness_are_refused_on_prism(prism, tmp_path):
    refused = r"operator 'subject'.*lateness.*What to do: .*another runner"
    with pytest.raises(PipelineRefusedError, match=refused):
        run_checkpointed(DelayChainFn(), DATA, runner="PrismRunner", store=tmp_path, **LATE)


def test_the_direct_runner_does_not_take_prism_for_them(prism, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "apache_beam.runners.direct"):
        for windowing, taken in (({**LATE, "lateness": 0}, True), (LATE, False)):
            caplog.clear()
            store = open_store(tmp_path / str(taken))
            run_checkpointed(
                DelayChainFn(), DATA, runner="DirectRunner", store=store, options=prism_options(),
                time_sorted=True, **windowing,
            )  # fmt: skip
            assert ("Running pipeline with PrismRunner" in caplog.text) == taken


def running(binary: Path) -> list[int]:
    """The children of this process that run the binary."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue  # it has ended meanwhile
        if command.startswith(str(binary).encode() + b"\0") and int(parent) == os.getpid():
            found.append(int(folder.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="/proc lists processes on Linux")
def test_pipelines_share_one_process_and_stopping_it_leaves_none(prism):
    for _ in range(2):
        assert run_plain(beam.Map(str).dofn, [(0, "a", 1)], runner="PrismRunner").outputs
        assert len(running(prism)) == 1
    stop_prism()
    assert running(prism) == []
    assert run_plain(beam.Map(str).dofn, [(0, "a", 1)], runner="PrismRunner").outputs


@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("BEAM_CKPT_PRISM", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def go(folder: Path, monkeypatch, script: str) -> None:
    """Puts a program of the name `go` where it is looked for."""
    program = folder / "go"
    program.write_text(f"#!/bin/sh\necho \"$@\" >> '{folder}/calls'\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(prism_module, "_PLACES_OF_GO", (str(program),))


def test_of_those_who_come_together_one_builds_the_binary(empty_cache, monkeypatch):
    go(empty_cache, monkeypatch, 'sleep 0.3; echo binary > "$GOBIN/prism"')
    with ThreadPoolExecutor() as threads:
        found = {future.result() for future in [threads.submit(find) for _ in range(4)]}
    (binary,) = found
    assert binary.read_text() == "binary\n"
    assert find() == binary
    package = f"github.com/apache/beam/sdks/v2/go/cmd/prism@v{beam_version}"
    assert (empty_cache / "calls").read_text() == f"install {package}\n"
    assert sorted(p.name for p in binary.parent.iterdir()) == ["lock", "prism"]


def test_a_build_that_fails_leaves_nothing_and_says_what_go_said(empty_cache, monkeypatch):
    go(empty_cache, monkeypatch, 'echo half > "$GOBIN/prism"; echo no such host >&2; exit 1')
    with pytest.raises(PrismNotFoundError, match=r"(?s)no such host.*What to do: .*GOPROXY"):
        find()
    assert list(empty_cache.rglob("prism")) == []


def test_without_go_the_reason_is_told(empty_cache, monkeypatch):
    monkeypatch.setattr(prism_module, "_PLACES_OF_GO", (str(empty_cache / "none"),))
    with pytest.raises(PrismNotFoundError, match=r"no Go to build one.*What to do: install Go"):
        find()


def test_a_binary_that_is_named_is_taken_and_has_to_be_there(tmp_path, monkeypatch):
    monkeypatch.setenv("BEAM_CKPT_PRISM", str(tmp_path / "mine"))
    with pytest.raises(PrismNotFoundError, match=r"mine is no file.*What to do"):
        find()
    (tmp_path / "mine").touch()
    assert find() == tmp_path / "mine"


def test_where_prism_is_required_its_tests_fail_instead_of_being_skipped(pytester, monkeypatch):
    conftest = Path(__file__).resolve().parent.parent / "conftest.py"
    pytester.makeconftest(conftest.read_text(encoding="utf-8"))
    pytester.makepyfile("def test_it(prism): pass")
    monkeypatch.setenv("BEAM_CKPT_PRISM", "/nowhere")
    monkeypatch.delenv("BEAM_CKPT_PRISM_REQUIRED", raising=False)
    prism_binary.cache_clear()
    try:
        pytester.inline_run().assertoutcome(skipped=1)
        monkeypatch.setenv("BEAM_CKPT_PRISM_REQUIRED", "1")
        assert pytester.runpytest_inprocess().parseoutcomes() == {"errors": 1}
    finally:
        prism_binary.cache_clear()
