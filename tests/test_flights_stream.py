"""`samples/flights_stream.py`: its stream against the plain loop, its outputs, its kills."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from beam_ckpt import inspect
from beam_ckpt.testing.event_loop import run_event_loop
from beam_ckpt.testing.prism import prism_binary

SAMPLES = Path(__file__).resolve().parent.parent / "samples"
DAY = 24 * 3600


def load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        # What Beam pickles is found by this name.
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


flights = load("flights")
stream = load("flights_stream")


def job_over(folder: Path, number: int, every: int, speed: float) -> Any:
    data = folder / "flights.parquet"
    flights.prepare(data, number, seed=1)
    return stream.Stream(str(folder), str(data), every, speed, 1)


def test_the_stream_is_the_plain_loop_with_checkpoints_on_the_way(prism, tmp_path: Path) -> None:
    job = job_over(tmp_path, 100, 28 * DAY, 200)
    stream.run_stream(job)
    events = [(at, *element) for at, element in stream.read_rows(job.data)]
    found = run_event_loop(flights.ChainFn(), events, until=flights.micros(flights.END))
    expected = Counter(flights.to_json(output.value) for output in found.outputs)
    assert expected.total() > 20
    assert stream.reports_of(job) == expected
    epochs = inspect.checkpoints(job.store)["epoch"].to_pylist()
    assert max(epochs) > 5
    assert stream.newest_boundary(job) == flights.END
    # A process that comes after the end has nothing to do.
    stream.run_stream(job)
    assert len(job.files) == 1


def line(day: int, aircraft: str, minutes: int) -> str:
    at = f"2013-01-{day:02d}T10:00Z"
    return flights.to_json(flights.Report(at, aircraft, "carried", minutes, 1, "x"))


def test_of_an_epoch_and_an_aircraft_the_last_process_counts(tmp_path: Path) -> None:
    job = stream.Stream(str(tmp_path), "", 10 * DAY, 1, 1)
    first = [line(2, "A", 1), line(12, "A", 2), line(12, "B", 3), line(13, "A", 4)]
    second = [line(12, "A", 2), line(13, "A", 4), line(13, "A", 4), line(25, "B", 5)]
    (tmp_path / "reports-000.jsonl").write_text("\n".join([*first, '{"cut sho']))
    (tmp_path / "reports-001.jsonl").write_text("\n".join([*second, ""]))
    # 1 January 2013 is day 15,706, so that epochs of ten days end on the 5th, 15th and 25th.
    assert stream.reports_of(job) == Counter([first[0], first[2], *second])


def test_differences_are_found_in_outputs_and_in_state(tmp_path, monkeypatch) -> None:
    states = {"one": Counter(["x"]), "other": Counter(["x", "y"])}
    monkeypatch.setattr(flights, "state_in", states.get)
    monkeypatch.setattr(flights, "outputs_of", lambda job: Counter(["a", "b"]))
    monkeypatch.setattr(stream, "reports_of", lambda job: Counter(["b", "b"]))
    reference = flights.Job("batch", tmp_path, "one", tmp_path, (), "FnApiRunner", 1)
    monkeypatch.setattr(stream.Stream, "store", "other")
    assert stream.differences(reference, stream.Stream(str(tmp_path), "", 1, 1, 1)) == [
        "output only in batch: a",
        "output only in stream: b",
        "state only in stream: y",
    ]


def test_without_prism_it_says_what_to_do(tmp_path, monkeypatch, capsys) -> None:
    from typer.testing import CliRunner

    monkeypatch.setenv("BEAM_CKPT_PRISM", str(tmp_path / "nowhere"))
    prism_binary.cache_clear()
    try:
        done = CliRunner().invoke(stream.app, ["--work", str(tmp_path)])
    finally:
        prism_binary.cache_clear()
    assert done.exit_code == 2
    assert "BEAM_CKPT_PRISM" in done.output + capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stream_killed_by_sigkill_gives_what_the_batch_gives(prism, tmp_path: Path) -> None:
    command = [sys.executable, str(SAMPLES / "flights_stream.py"), "--flights", "300"]
    command += ["--kills", "2", "--speed", "30", "--every", "336", "--work", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed after ") == 2
    assert "stream: the same outputs and the same state as batch" in done.stdout
    state = inspect.state(tmp_path / "stream" / "ckpt", "flights").num_rows
    assert state > 1
