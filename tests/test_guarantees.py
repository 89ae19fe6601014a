"""Rows of the README's table of guarantees that no other test shows."""

from __future__ import annotations

from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.coders import VarIntCoder
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec

from beam_ckpt import inspect, open_store
from beam_ckpt.testing.cuts import run_checkpointed
from beam_ckpt.testing.streams import Advance, Arrive, StreamPlan

SECOND = 1_000_000


class SumFn(beam.DoFn):
    SUM = ReadModifyWriteStateSpec("sum", VarIntCoder())

    def process(self, element, sum=beam.DoFn.StateParam(SUM)):
        _, value = element
        sum.write((sum.read() or 0) + value)
        yield value


def totals(store: Path, at: int | None = None) -> dict[str, int]:
    table = inspect.state(store, "subject", at="latest" if at is None else at)
    return dict(zip(table["key"].to_pylist(), table["sum"].to_pylist(), strict=True))


def test_a_late_element_is_applied_once_in_the_epoch_that_is_open_when_it_comes(
    tmp_path: Path,
) -> None:
    plan = StreamPlan(
        (
            Arrive(((10 * SECOND, "a", 1),)),
            Advance(150 * SECOND),  # past the checkpoint at 100 s, within the epoch up to 200 s
            Arrive(((20 * SECOND, "a", 2), (160 * SECOND, "a", 4))),
            Advance(250 * SECOND),
        )
    )
    store = open_store(tmp_path / "ckpt")
    run = run_checkpointed(
        SumFn(), plan, runner="BundleBasedDirectRunner", store=store, every=100, until=300
    )
    assert sorted(output.value for output in run.outputs) == [1, 2, 4]
    boundaries = inspect.checkpoints(store).select(["id", "boundary"]).to_pylist()
    by_second = {int(row["boundary"].timestamp()): row["id"] for row in boundaries}
    assert totals(tmp_path / "ckpt", by_second[100]) == {"a": 1}
    assert totals(tmp_path / "ckpt", by_second[200]) == {"a": 7}


@pytest.mark.parametrize("runner", ["FnApiRunner", "BundleBasedDirectRunner"])
def test_what_is_replayed_from_below_the_boundary_is_dropped_and_counted(
    tmp_path: Path, runner: str
) -> None:
    data = [(second * SECOND, "ab"[second // 10 % 2], second) for second in range(0, 100, 10)]
    store = open_store(tmp_path / "ckpt")
    first = run_checkpointed(SumFn(), data, runner=runner, store=store, until=50)
    second = run_checkpointed(SumFn(), data, runner=runner, store=store, until=200)
    assert sorted(output.value for output in first.outputs) == [0, 10, 20, 30, 40]
    assert sorted(output.value for output in second.outputs) == [50, 60, 70, 80, 90]
    assert second.metrics["elements_dropped_as_replayed"] == 5
    assert totals(tmp_path / "ckpt") == {"a": 0 + 20 + 40 + 60 + 80, "b": 10 + 30 + 50 + 70 + 90}
