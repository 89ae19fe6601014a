"""Which checkpoint to restore: pure decisions over facts that a store has read.

Nothing here reads or writes. A store gathers `CheckpointFacts`, asks, and carries out the
answer; the shape follows arroyo-state-protocol. A valid verdict proves what was checked (see
`ValidationResult.deep`), not that the sources can still replay from its boundary.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from beam_ckpt.manifest import (
    AbandonedMarker,
    CheckpointManifest,
    FinalMarker,
    Pointer,
    sha256_hex,
)

__all__ = ["RecoveryReport", "SkippedCheckpoint", "ValidationResult"]

Unknown = Literal["unknown"]

PREPARED = "checkpoint is prepared but not finalized"
MARKER_LOST = "the pointer names this checkpoint, and its .final marker is missing"


@dataclass(frozen=True)
class ValidationResult:
    """What is wrong with a checkpoint.

    Attributes:
        id: The checkpoint.
        issues: One sentence each; empty when it is valid.
        deep: Whether every byte was hashed; else presence, sizes and the checksums that the
            storage itself keeps were compared.
    """

    id: int
    issues: tuple[str, ...] = ()
    deep: bool = True

    @property
    def valid(self) -> bool:
        """Whether there are no issues. A valid checkpoint may still be only prepared."""
        return not self.issues


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A checkpoint that recovery passed over.

    Attributes:
        id: The checkpoint.
        reason: Why.
        phase: `prepared` for an attempt that was never published, `invalid` for a damaged one.
        boundary: Its cut in event-time microseconds, `None` for the drained end of the input;
            `"unknown"` when neither its manifest nor its `.final` marker can be read.
    """

    id: int
    reason: str
    phase: Literal["prepared", "invalid"]
    boundary: int | Unknown | None


@dataclass(frozen=True)
class RecoveryReport:
    """The outcome of a walk over the checkpoints of a store, newest first.

    Attributes:
        chosen_id: The newest finalized checkpoint that validates; `None` when there is none.
        chosen: Its manifest.
        skipped: Those passed over on the way, newest first.
        examined: How many were looked at; 0 only for a store without checkpoints, so that a
            fresh store is told from an unusable history.
        elapsed: Seconds.
    """

    chosen_id: int | None
    chosen: CheckpointManifest | None
    skipped: tuple[SkippedCheckpoint, ...]
    examined: int
    elapsed: float


@dataclass(frozen=True)
class CheckpointFacts:
    """What was read of one checkpoint.

    Attributes:
        id: The checkpoint, by the name of its manifest.
        manifest: `None` when it is missing or cannot be read.
        marker: What its `.final` object says; `None` when absent or unreadable.
        issues: What is wrong, as far as it was looked at.
    """

    id: int
    manifest: CheckpointManifest | None
    marker: FinalMarker | AbandonedMarker | None
    issues: tuple[str, ...]


def binding_issues(
    manifest: CheckpointManifest,
    *,
    id: int | None,
    participant_id: int,
    key_group_count: int | None,
    deployment_id: str = "",
) -> list[str]:
    """Says where a manifest does not belong to the name or the store that it was found in.

    `None` and `""` are not compared.
    """
    issues = []
    if id is not None and manifest.id != id:
        issues.append(f"storage checkpoint {id} contains manifest checkpoint {manifest.id}")
    if manifest.participant_id != participant_id:
        issues.append(
            f"manifest of participant {manifest.participant_id} in the namespace of participant "
            f"{participant_id}"
        )
    if key_group_count is not None and manifest.key_group_count != key_group_count:
        issues.append(
            f"manifest has {manifest.key_group_count} key groups, the store was opened with "
            f"{key_group_count}"
        )
    if deployment_id and manifest.deployment_id and manifest.deployment_id != deployment_id:
        issues.append(
            f"manifest of deployment {manifest.deployment_id} in a store of deployment "
            f"{deployment_id}"
        )
    return issues


def seal_issues(
    marker: FinalMarker | AbandonedMarker | None, manifest: CheckpointManifest, stored: bytes
) -> list[str]:
    """Says where a `.final` marker does not seal the stored bytes of a manifest."""
    if marker is None:
        return []
    if isinstance(marker, AbandonedMarker):
        if marker.id != manifest.id:
            return [f"the .final marker is that of checkpoint {marker.id}"]
        return []
    issues = []
    if (marker.id, marker.checkpoint_id) != (manifest.id, manifest.checkpoint_id):
        issues.append(
            f"the .final marker is that of checkpoint {marker.id} ({marker.checkpoint_id}), the "
            f"manifest that of {manifest.id} ({manifest.checkpoint_id})"
        )
    digest = sha256_hex(stored)
    if marker.manifest_sha256 != digest:
        issues.append(
            f"manifest checksum mismatch: .final seals {marker.manifest_sha256}, found {digest}"
        )
    return issues


def judge(facts: CheckpointFacts, *, published: bool = False) -> SkippedCheckpoint | None:
    """Decides whether recovery may use a checkpoint: `None`, or why it is passed over.

    With `published` it is known to have been finalized, so that it is damaged if it is not now.
    """
    boundary: int | Unknown | None = "unknown"
    if facts.manifest is not None:
        boundary = facts.manifest.watermark
    elif isinstance(facts.marker, FinalMarker):
        boundary = facts.marker.watermark
    if facts.issues:
        return SkippedCheckpoint(facts.id, "; ".join(facts.issues), "invalid", boundary)
    if isinstance(facts.marker, FinalMarker):
        return None
    if published and facts.marker is None:
        return SkippedCheckpoint(facts.id, MARKER_LOST, "invalid", boundary)
    reason = PREPARED
    if isinstance(facts.marker, AbandonedMarker):
        reason += f": abandoned by {facts.marker.abandoned_by}"
    return SkippedCheckpoint(facts.id, reason, "prepared", boundary)


class PointerStep(enum.Enum):
    """What publishing a finalized checkpoint does to the pointer."""

    WRITE = "write"
    KEEP = "keep"
    CONFLICT = "conflict"


def pointer_step(current: Pointer | None, target: Pointer) -> PointerStep:
    """Decides how the pointer moves: forwards only."""
    if current is None or current.id < target.id:
        return PointerStep.WRITE
    if current.id > target.id or current == target:
        return PointerStep.KEEP
    return PointerStep.CONFLICT


def newer_generation(generation: int, claimed: Sequence[int]) -> int | None:
    """Returns the youngest claimed generation when it supersedes `generation`."""
    youngest = max(claimed, default=0)
    return youngest if youngest > generation else None
