"""What an operator of jobs watches: the metrics that are documented, and log lines without data."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import StrUtf8Coder, VarIntCoder
from apache_beam.coders.coders import GlobalWindowCoder
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
from apache_beam.transforms.window import TimestampedValue

from beam_ckpt import open_store
from beam_ckpt.retention import KeepLast
from beam_ckpt.testing import cuts
from beam_ckpt.transforms import Checkpoints
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.committer import CommitFn, _News, _Progress
from beam_ckpt.transforms.keyed_state.clock import DRAINED
from beam_ckpt.transforms.metrics import METRICS, NAMESPACE, counter

S = 1_000_000
ROOT = Path(__file__).resolve().parents[2]
KEYS = ("hidden-key-a", "hidden-key-b", "hidden-key-c")
VALUE = 876_543_000
DATA = [(second * S, KEYS[second // 10 % 3], VALUE + second) for second in range(0, 200, 10)]


class SumFn(beam.DoFn):
    """Also says 30 s ahead what it has."""

    SUM = ReadModifyWriteStateSpec("sum", VarIntCoder())

    def process(self, element, at=beam.DoFn.TimestampParam, total=beam.DoFn.StateParam(SUM)):
        total.write((total.read() or 0) + element[1])
        yield TimestampedValue(total.read(), at + 30)


def kind(text: str) -> str:
    found = re.match(r"(distribution|gauge): ", text)
    return found[1] if found else "counter"


def test_the_readme_lists_what_there_is():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.split("## What to watch")[1].split("\n## ")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)) == dict(METRICS)


def test_what_there_is_is_what_the_code_keeps():
    used = set()
    for path in (ROOT / "transforms").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        used |= set(re.findall(r'\b(counter|distribution|gauge)\("(\w+)"\)', source))
        if path.name != "metrics.py":
            assert "Metrics." not in source, f"{path.name}: metrics are made in metrics.py"
    assert used == {(kind(text), name) for name, text in METRICS.items()}
    with pytest.raises(AssertionError, match="not in the list"):
        counter("checkpoints_admired")


def run(store: Any, fn: beam.DoFn | None = None, runner: str = "FnApiRunner", **settings: Any):
    """Runs one operator behind a tracked source; returns the metrics by kind and name."""
    p = beam.Pipeline(runner=runner)
    with Checkpoints(p, store, **settings) as ckpt:
        _ = (
            p
            | beam.Create(DATA)
            | beam.Map(cuts._stamp).with_output_types(tuple[str, int])
            | ckpt.TrackOffsets("log", partition=lambda kv: kv[0], offset=lambda kv: kv[1])
            | ckpt.ParDo(fn or SumFn(), uid="sums")
        )
    result = p.run()
    result.wait_until_finish()
    found: dict[str, Any] = {}
    for kind, metrics in result.metrics().query().items():
        for metric in metrics:
            if metric.key.metric.namespace == NAMESPACE:
                name = metric.key.metric.name
                assert kind == {"counter": "counters", "gauge": "gauges"}.get(
                    _kind_of(name), "distributions"
                )
                if kind == "counters":  # of each step that has it
                    found[name] = found.get(name, 0) + metric.committed
                else:
                    found[name] = metric.committed
    return found


def _kind_of(name: str) -> str:
    return kind(METRICS[name])


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}")


def nonzero(found: Mapping[str, Any]) -> dict[str, int]:
    return {n: v for n, v in found.items() if _kind_of(n) == "counter" and v}


def test_the_counters_and_durations_of_a_run_and_of_the_next_one(store):
    before = time.time_ns() // 1_000_000
    first = run(store, every=50, until=180, keep=2, key_groups=2)
    after = time.time_ns() // 1_000_000
    manifests = [store.load_by_id(i) for i in store.list_ids()]
    assert set(first) <= set(METRICS)
    # 18 elements below the end and 2 at or after it; those of the first epoch wait as well.
    counters = nonzero(first)
    rows = counters.pop("rows_written")
    assert counters.pop("sidecar_bytes_written") == first["bytes_per_checkpoint"].sum
    assert counters == {
        "checkpoints_committed": 4,
        "checkpoints_pruned": 2,
        "sidecars_written": first["files_per_checkpoint"].sum,
        "keys_saved": rows,
        "outputs_carried": sum(at % (50 * S) >= 20 * S or at >= 150 * S for at, _, _ in DATA[:18]),
        "elements_buffered": 18,
        "elements_beyond_until": 2,
    }
    assert first["rows_per_checkpoint"].sum == rows
    for name in ("files_per_checkpoint", "boundary_lag_ms", "commit_duration_ms"):
        assert first[name].count == 4, name
    assert first["checkpoint_interval_ms"].count == 3
    for name in ("checkpoint_duration_ms", "commit_duration_ms", "checkpoint_interval_ms"):
        assert 0 <= first[name].min <= first[name].max <= after - before, name
    assert first["boundary_lag_ms"].max >= before - 50_000
    assert before <= first["last_checkpoint_committed_at_ms"].value <= after
    # Beam dates gauges to the second, and of one second keeps any: these runs take less.
    assert first["last_checkpoint_boundary_ms"].value in {50_000, 100_000, 150_000, 180_000}

    again = nonzero(run(store, keep=5, key_groups=2))
    assert again["keys_restored"] == 3
    assert again["elements_dropped_as_replayed"] == 18
    assert again["checkpoints_committed"] == 1
    assert manifests[-1].boundary == 180 * S


def test_a_run_without_news_skips_its_checkpoint(store):
    run(store, until=300)
    counters = nonzero(run(store, until=300))
    assert counters["checkpoints_skipped"] == 1
    assert "checkpoints_committed" not in counters
    assert store.list_ids() == [1]


class Count:
    """A counter that is looked at."""

    value = 0

    def inc(self, n: int = 1) -> None:
        self.value += n


def test_a_checkpoint_that_cannot_be_published_is_counted_and_told(store, monkeypatch, caplog):
    """A failed bundle has no metrics that are committed, so the committer is asked itself."""
    cells = (CellState("sum", "read_modify_write", VarIntCoder()),)
    operator = OperatorState("sums", StrUtf8Coder(), GlobalWindowCoder(), cells, False)
    commit = CommitFn(store, "run", [operator], 1, None, DRAINED, KeepLast(1), 0, "sums", {}, False)
    failed = commit._failed = Count()
    state = _Progress()
    commit._begin(state)

    def full(manifest: Any) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(store, "save", full)
    with pytest.raises(OSError, match="no space left"):
        commit._commit(state, DRAINED, _News([]))
    assert failed.value == 1
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "operators 'sums' at boundary None was not published" in record.getMessage()


@pytest.mark.parametrize("runner", ["FnApiRunner", "BundleBasedDirectRunner"])
def test_log_lines_name_operator_and_boundary_and_never_a_key_or_value(store, caplog, runner):
    with caplog.at_level(logging.DEBUG, "beam_ckpt"):
        run(store, runner=runner, every=50, until=150, key_groups=2, max_files_per_group=1)
        run(store, runner=runner, key_groups=2, max_files_per_group=2)
    ours = [r for r in caplog.records if r.name.split(".")[0] == "beam_ckpt"]
    for record in ours:
        text = record.getMessage()
        assert "hidden-key" not in text
        assert "876543" not in text
        assert str(sum(value for _, _, value in DATA)) not in text
    of = {
        part: [r.getMessage() for r in ours if r.name.endswith(part)]
        for part in ("writer", "committer")
    }
    assert len(of["writer"]) >= 4
    assert len(of["committer"]) == 4
    assert all("sums" in text and "boundary" in text for lines in of.values() for text in lines)
    assert any("boundary Timestamp(100)" in text for text in of["committer"])
