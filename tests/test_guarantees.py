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


# The table row by row: a test that shows it.
ROWS = {
    "elements that are on time":
        "runners/test_cut_equivalence.py::test_restarts_from_cut_to_cut_give_what_one_run_gives",
    "an element that was late in the first run":
        "test_guarantees.py::"
        "test_a_late_element_is_applied_once_in_the_epoch_that_is_open_when_it_comes",
    "an element below the restored boundary, replayed":
        "test_guarantees.py::test_what_is_replayed_from_below_the_boundary_is_dropped_and_counted",
    '`alignment="at_least_once"`':
        "runners/test_alignment.py::test_without_alignment_nothing_waits_and_nothing_is_lost",
    "state in a window other than the global one":
        "runners/test_cut_equivalence.py::test_every_checkpoint_of_a_run_is_its_cut",
    "a source that reads by offset, with data out of order across the cut":
        "runners/test_offsets.py::test_reading_from_the_saved_offsets_gives_what_reading_all_gives",
    "data without timestamps in a run with `every` or `until`":
        "transforms/test_graph.py::"
        "test_an_element_without_a_timestamp_stops_a_run_that_is_cut_by_event_time",
    "the process is killed at any moment":
        "runners/test_kills.py::test_a_kill_at_each_kind_of_step_changes_nothing",
    "the newest checkpoint is damaged, an older one is restored":
        "runners/test_damage.py::test_a_damaged_object_is_named_and_an_older_checkpoint_restored",
    "no checkpoint is valid":
        "runners/test_damage.py::"
        "test_when_all_checkpoints_are_damaged_the_run_stops_with_the_report",
    "another coder or kind of a cell than was saved":
        "transforms/test_migrations.py::"
        "test_a_run_goes_on_from_migrated_values_as_from_its_own",
    "another number of key groups, or another setting of how state is stored, than in the run "
    "before":
        "testing/test_stored.py::test_with_everything_switched_on_a_cut_changes_nothing",
    "another uid of an operator":
        "transforms/test_migrations.py::test_an_operator_with_another_uid_goes_on",
    "other windows of the input than state was saved in":
        "transforms/test_migrations.py::"
        "test_windows_are_recorded_and_a_changed_one_is_refused_at_restore",
    "outputs of a restarted run":
        "runners/test_sinks.py::"
        "test_what_a_checkpoint_covers_is_in_the_sink_before_it_is_published",
    "outputs dated beyond the cut":
        "runners/test_cut_equivalence.py::test_restarts_from_cut_to_cut_give_what_one_run_gives",
    "a stream is drained (Dataflow's drain, a source that ends)":
        "runners/test_drain.py::test_the_next_stream_starts_before_the_drain_and_misses_nothing",
    "several operators under one `Checkpoints`":
        "runners/test_chain.py::test_two_operators_share_one_exact_checkpoint",
    "the runner lets the watermark pass before saved state is back":
        "transforms/test_operator.py::"
        "test_a_record_behind_the_gate_stops_the_run_instead_of_being_lost",
    "order within a key":
        "runners/test_cut_equivalence.py::test_restarts_from_cut_to_cut_give_what_one_run_gives",
    "several timers of a key due at once":
        "runners/test_order.py::test_timers_of_a_key_fire_in_the_same_order_on_every_runner",
}  # fmt: skip


def test_every_row_of_the_table_has_a_test_in_a_file_that_it_names() -> None:
    root = Path(__file__).parents[1]
    table = (root / "README.md").read_text().split("| case | state after restore |")[1]
    rows = [line.split(" | ") for line in table.split("\n\n")[0].splitlines()[2:]]
    assert [row[0].removeprefix("| ") for row in rows] == list(ROWS)
    for case, *_, shown in rows:
        path, _, name = ROWS[case.removeprefix("| ")].partition("::")
        assert f"`tests/{path}`" in shown, case
        assert f"\ndef {name}(" in (root / "tests" / path).read_text(), name
