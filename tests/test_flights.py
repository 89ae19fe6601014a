"""`samples/flights.py`: its data, its fold against the oracle, its proof that nothing is lost."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

from beam_ckpt import inspect, open_store
from beam_ckpt.testing.event_loop import run_event_loop
from beam_ckpt.testing.faults import Fault, FaultPlan, faulty_store

SAMPLE = Path(__file__).resolve().parent.parent / "samples" / "flights.py"


def load_sample() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flights", SAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["flights"] = module  # what Beam pickles is found by this name
    spec.loader.exec_module(module)
    return module


flights = load_sample()
CUTS = (flights.YEAR[0], flights.YEAR[4], flights.YEAR[8], flights.END)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All flights of a few aircraft."""
    path: Path = tmp_path_factory.mktemp("flights") / "flights.parquet"
    flights.prepare(path, 400, seed=1)
    return path


def job_over(data: Path, folder: Path, name: str, cuts: tuple[datetime, ...]) -> Any:
    (folder / name).mkdir()
    store = str(folder / name / "ckpt")
    return flights.Job(name, folder / name, store, data, cuts, "FnApiRunner", 1)


def carry_out(job: Any) -> None:
    for index in job.todo():
        flights.run_once(job, index, open_store(job.store))


def oracle(data: Path) -> Counter[str]:
    """The outputs of a plain loop over event time, without Beam and without checkpoints."""
    rows = flights.read_flights(str(data), flights.YEAR[0], flights.END, 7)
    events = [(int(row.timestamp.micros), *row.value) for row in rows]
    found = run_event_loop(flights.ChainFn(), events, until=flights.micros(flights.END))
    return Counter(flights.to_json(output.value) for output in found.outputs)


def test_the_whole_year_is_there_and_in_utc(tmp_path: Path) -> None:
    rows = flights.prepare(tmp_path / "all.parquet", None, seed=1)
    assert rows == 336_776 - 2_512
    table = pq.read_table(tmp_path / "all.parquet")
    first = table.slice(0, 1).to_pylist()[0]
    assert first["time"] == datetime(2013, 1, 1, 10, 15, tzinfo=UTC), "05:15 in New York"
    assert first["name"] == "UA1545 EWR-IAH"
    assert (first["departure_delay"], first["arrival_delay"]) == (2, 11)
    assert table["time"].null_count == table["aircraft"].null_count == 0


def test_a_part_of_the_year_is_whole_aircraft(tmp_path: Path, data: Path) -> None:
    flights.prepare(tmp_path / "all.parquet", None, seed=1)
    full = Counter(pq.read_table(tmp_path / "all.parquet")["aircraft"].to_pylist())
    part = Counter(pq.read_table(data)["aircraft"].to_pylist())
    assert part.total() == 400
    cut_short = [aircraft for aircraft, count in part.items() if count != full[aircraft]]
    assert len(cut_short) <= 1


def test_runs_from_cut_to_cut_are_one_run_and_both_are_the_plain_loop(
    data: Path, tmp_path: Path
) -> None:
    one = job_over(data, tmp_path, "one", (CUTS[0], CUTS[-1]))
    parts = job_over(data, tmp_path, "parts", CUTS)
    carry_out(one)
    carry_out(parts)
    expected = oracle(data)
    kinds = Counter(json.loads(line)["what"] for line in expected.elements())
    assert min(kinds[what] for what in ("carried", "chain", "unseen")) > 5, kinds
    assert flights.outputs_of(one) == expected
    assert flights.outputs_of(parts) == expected
    assert flights.state_of(one) == flights.state_of(parts)
    assert flights.differences(one, parts) == []


def test_a_run_that_died_between_checkpoint_and_publishing_is_run_again_from_where_it_began(
    data: Path, tmp_path: Path
) -> None:
    job = job_over(data, tmp_path, "job", CUTS[:3])
    reference = job_over(data, tmp_path, "reference", (CUTS[0], CUTS[2]))
    carry_out(reference)
    for index in range(2):
        flights.run_once(job, index, open_store(job.store))
        name = job.published(CUTS[index + 1])
        first = name.read_bytes()
        name.unlink()
        assert job.todo()[0] == index
        again = flights.restore_from(job, index)
        assert again == ("fresh" if index == 0 else 2 * index)
        flights.run_once(job, index, open_store(job.store))
        assert sorted(name.read_bytes().splitlines()) == sorted(first.splitlines())
    assert flights.differences(reference, job) == []


def test_a_run_whose_storage_fails_publishes_nothing(data: Path, tmp_path: Path) -> None:
    job = job_over(data, tmp_path, "job", CUTS)
    full_disk = FaultPlan(Fault("put_if_absent", "manifests/*.json", action="error"))
    with pytest.raises(Exception, match="manifests"):
        flights.run_once(job, 0, faulty_store(open_store(job.store), full_disk))
    assert job.todo() == [0, 1, 2]
    assert inspect.checkpoints(job.store).num_rows == 0


def test_differences_in_outputs_and_state_are_found(data: Path, tmp_path: Path) -> None:
    one = job_over(data, tmp_path, "one", CUTS[:2])
    other = job_over(data, tmp_path, "other", CUTS[:2])
    less = tmp_path / "less.parquet"
    rows = pq.read_table(data)
    pq.write_table(rows.slice(1), less)
    third = job_over(less, tmp_path, "third", CUTS[:2])
    for job in (one, other, third):
        carry_out(job)
    name = other.published(CUTS[1])
    lines = name.read_text().splitlines()
    changed = json.loads(lines[0])
    changed["minutes"] += 1
    name.write_text("\n".join([json.dumps(changed), *lines[1:]]) + "\n")
    assert flights.differences(one, other) == [
        f"output only in one: {lines[0]}",
        f"output only in other: {json.dumps(changed)}",
    ]
    found = flights.differences(one, third)
    assert any(line.startswith("state only in third: ") for line in found)


@pytest.mark.parametrize("count", [10, 13, 14])
def test_every_second_kill_strikes_the_write_protocol_and_so_does_the_last(count: int) -> None:
    kills = flights.draw_kills(count, 12)
    assert len(kills) == count
    assert [kill.step is None for kill in reversed(kills)] == [i % 2 == 1 for i in range(count)]
    assert [kill.index for kill in kills] == sorted(kill.index for kill in kills)
    assert max(kill.index for kill in kills) < 12


def test_by_default_every_step_of_the_protocol_is_struck() -> None:
    kills = flights.draw_kills(flights.KILLS, 12)
    assert {kill.step for kill in kills} - {None} == set(flights.STEPS)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_year_killed_again_and_again_is_a_year_that_never_stopped(tmp_path: Path) -> None:
    command = [sys.executable, str(SAMPLE), "crash", "--flights", "1500", "--seed", "5"]
    command += ["--work", str(tmp_path / "work"), "--store", str(tmp_path / "stores")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" killed ") == flights.KILLS
    assert "crash: the same outputs and the same state as run" in done.stdout
    assert "months: the same outputs and the same state as run" in done.stdout
