"""Recovery, decided over facts."""

from __future__ import annotations

import pickle

import pytest

from beam_ckpt.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointStorageError,
    CheckpointTooLargeError,
    FallbackRefusedError,
    FencedError,
    IndeterminateError,
    InvalidCheckpointError,
    NoValidCheckpointError,
    PipelineRefusedError,
    StateIncompatibleError,
    StoreUrlError,
    UnsupportedFormatError,
)
from beam_ckpt.manifest import AbandonedMarker, FinalMarker, Pointer
from beam_ckpt.recovery import (
    PREPARED,
    CheckpointFacts,
    PointerStep,
    RecoveryReport,
    SkippedCheckpoint,
    binding_issues,
    judge,
    newer_generation,
    pointer_step,
    seal_issues,
)
from beam_ckpt.testing.store import a_manifest

MANIFEST = a_manifest(7, watermark=50)
STORED = MANIFEST.to_json()
FINAL = FinalMarker.of(MANIFEST, STORED)
ABANDONED = AbandonedMarker(id=7, abandoned_by="generation 3")


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        (CheckpointFacts(7, MANIFEST, FINAL, ()), None),
        (
            CheckpointFacts(7, MANIFEST, None, ()),
            SkippedCheckpoint(7, PREPARED, "prepared", 50),
        ),
        (
            CheckpointFacts(7, MANIFEST, ABANDONED, ()),
            SkippedCheckpoint(7, f"{PREPARED}: abandoned by generation 3", "prepared", 50),
        ),
        (
            CheckpointFacts(7, MANIFEST, FINAL, ("a", "b")),
            SkippedCheckpoint(7, "a; b", "invalid", 50),
        ),
        (CheckpointFacts(7, None, FINAL, ("a",)), SkippedCheckpoint(7, "a", "invalid", 50)),
        (CheckpointFacts(7, None, None, ("a",)), SkippedCheckpoint(7, "a", "invalid", "unknown")),
        (
            CheckpointFacts(7, None, ABANDONED, ("a",)),
            SkippedCheckpoint(7, "a", "invalid", "unknown"),
        ),
    ],
)
def test_a_checkpoint_is_restored_or_passed_over_with_a_reason(
    facts: CheckpointFacts, verdict: SkippedCheckpoint | None
) -> None:
    assert judge(facts) == verdict


def _pointer(id: int, sha: str = "0") -> Pointer:
    return Pointer(id=id, checkpoint_id=MANIFEST.checkpoint_id, manifest_sha256=sha * 64)


@pytest.mark.parametrize(
    ("current", "step"),
    [
        (None, PointerStep.WRITE),
        (_pointer(6), PointerStep.WRITE),
        (_pointer(7), PointerStep.KEEP),
        (_pointer(8), PointerStep.KEEP),
        (_pointer(7, "1"), PointerStep.CONFLICT),
    ],
)
def test_the_pointer_moves_forwards_only(current: Pointer | None, step: PointerStep) -> None:
    assert pointer_step(current, _pointer(7)) is step


def test_a_manifest_is_bound_to_the_place_it_was_found_in() -> None:
    deployment = "019a0000-0001-7001-8000-000000000001"
    assert binding_issues(MANIFEST, id=7, participant_id=0, key_group_count=1) == []
    owned = MANIFEST.model_copy(update={"deployment_id": deployment})
    assert (
        len(
            binding_issues(
                owned,
                id=8,
                participant_id=1,
                key_group_count=2,
                deployment_id=deployment[:-1] + "2",
            )
        )
        == 4
    )


def test_a_seal_holds_for_the_very_bytes() -> None:
    assert seal_issues(FINAL, MANIFEST, STORED) == []
    assert seal_issues(None, MANIFEST, STORED) == []
    assert seal_issues(ABANDONED, MANIFEST, STORED) == []
    assert "checksum mismatch" in seal_issues(FINAL, MANIFEST, STORED + b" ")[0]
    assert "marker is that of" in seal_issues(FINAL, a_manifest(7), STORED)[0]
    other = AbandonedMarker(id=8, abandoned_by="x")
    assert seal_issues(other, MANIFEST, STORED) == ["the .final marker is that of checkpoint 8"]


@pytest.mark.parametrize(
    ("claimed", "younger"), [([], None), ([1, 2], None), ([1, 2, 3], 3), ([9, 1], 9)]
)
def test_a_run_is_superseded_by_any_younger_generation(
    claimed: list[int], younger: int | None
) -> None:
    assert newer_generation(2, claimed) == younger


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (CheckpointNotFoundError("x"), FileNotFoundError),
        (CheckpointConflictError("x"), FileExistsError),
        (FencedError("x"), RuntimeError),
        (InvalidCheckpointError("x"), ValueError),
        (UnsupportedFormatError("x"), ValueError),
        (CheckpointTooLargeError("x"), ValueError),
        (CheckpointStorageError(28, "x"), OSError),
        (IndeterminateError(5, "x"), OSError),
        (StoreUrlError("x"), ValueError),
        (NoValidCheckpointError("x"), LookupError),
        (FallbackRefusedError("x", 5, None), RuntimeError),
        (StateIncompatibleError("x"), ValueError),
        (PipelineRefusedError("x"), ValueError),
    ],
)
def test_an_error_is_ours_and_a_builtin_and_pickles(
    error: CheckpointError, builtin: type[Exception]
) -> None:
    assert isinstance(error, CheckpointError)
    assert isinstance(error, builtin)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))
    assert getattr(again, "errno", None) == getattr(error, "errno", None)


def test_an_error_carries_its_report_through_pickling() -> None:
    report = RecoveryReport(None, None, (SkippedCheckpoint(1, "a", "invalid", None),), 1, 0.5)
    refused = FallbackRefusedError("x", 9, 5, report)
    again = pickle.loads(pickle.dumps(refused))
    assert (again.newest_boundary, again.chosen_boundary, again.report) == (9, 5, report)
    assert pickle.loads(pickle.dumps(NoValidCheckpointError("x", report))).report == report
