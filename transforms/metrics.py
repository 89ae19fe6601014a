"""What an operator of jobs watches: the Beam metrics of this library, all in one place.

They are under the namespace ``beam_ckpt``. Counters of a step say what that step has done in this
run; a runner that repeats a bundle may count it twice. Times of the wall clock are in milliseconds
since the epoch, durations in milliseconds; event time is in milliseconds too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apache_beam.metrics.metric import Metrics

__all__ = ["METRICS", "NAMESPACE", "counter", "distribution", "gauge"]

NAMESPACE = "beam_ckpt"

METRICS: Mapping[str, str] = {
    # checkpoints
    "checkpoints_committed": "checkpoints that were published",
    "checkpoints_failed": "attempts to publish that failed (the runner may try again)",
    "checkpoints_skipped": "boundaries at which nothing had changed, so that there was none",
    "checkpoints_passed_over_at_restore": "damaged checkpoints newer than the restored one",
    "checkpoints_pruned": "checkpoints that were deleted by retention",
    "prunes_skipped": "prunes that deleted nothing, since something could not be read",
    "pointers_repaired": "damaged pointers that were set anew",
    "checkpoint_duration_ms": "distribution: from the first file of a checkpoint to its publishing",
    "commit_duration_ms": "distribution: of the publishing alone",
    "boundary_lag_ms": "distribution: wall clock at publishing less the boundary; says how far "
    "behind a job is whose event time is the wall clock's",
    "checkpoint_interval_ms": "distribution: age of the last checkpoint when the next came",
    "last_checkpoint_committed_at_ms": "gauge: wall clock of the last checkpoint; now less this is "
    "its age",
    "last_checkpoint_boundary_ms": "gauge: boundary of the last checkpoint that has one",
    # what they hold
    "sidecars_written": "files of state that were written",
    "sidecar_bytes_written": "their bytes",
    "rows_written": "their rows",
    "files_per_checkpoint": "distribution: files that a checkpoint added",
    "bytes_per_checkpoint": "distribution: their bytes",
    "rows_per_checkpoint": "distribution: their rows",
    "keys_saved": "dirty keys: keys that had changed at a boundary, or had gone",
    "outputs_carried": "outputs dated beyond the open cut",
    # what came in
    "keys_restored": "keys that got their saved state back",
    "restored_records_ignored": "saved state that came again, to a key that has gone on since",
    "elements_buffered": "elements that waited for their epoch, or for their key's saved state",
    "elements_dropped_as_replayed": "elements below the restored boundary, which were applied",
    "elements_late": "elements below the restored boundary that late='reprocess' let in",
    "elements_dropped_as_expired": "elements of windows that had expired",
    "elements_beyond_until": "elements at or after the end of the run, left to the next one",
    "offsets_behind_a_checkpoint": "elements that came behind a published source offset",
}
"""What each metric says; a counter where nothing else is said."""


def counter(name: str) -> Any:
    """A counter of `METRICS`."""
    return Metrics.counter(NAMESPACE, _known(name))


def distribution(name: str) -> Any:
    """A distribution of `METRICS`."""
    return Metrics.distribution(NAMESPACE, _known(name))


def gauge(name: str) -> Any:
    """A gauge of `METRICS`."""
    return Metrics.gauge(NAMESPACE, _known(name))


def _known(name: str) -> str:
    assert name in METRICS, f"{name} is not in the list that is documented"
    return name
