"""`CheckpointStore`: the contract, as published by LaminarDB's trait of that name.

Who wants checkpoints on a storage with blobs (create if absent, compare and swap, list) writes
a `beam_ckpt.blobs.Blobs` and has all of this for it. Who keeps them elsewhere derives from
`CheckpointStore`: what is abstract is required, the rest is provided in terms of it. Either
runs `beam_ckpt.testing.store.StoreSuite` to see that the contract holds.
"""

from __future__ import annotations

import builtins
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from beam_ckpt.errors import (
    CheckpointTooLargeError,
    InvalidCheckpointError,
)
from beam_ckpt.manifest import (
    CheckpointManifest,
    FinalMarker,
    SidecarEntry,
    describe,
    parse_record,
    sha256_hex,
)
from beam_ckpt.recovery import (
    CheckpointFacts,
    RecoveryReport,
    SkippedCheckpoint,
    ValidationResult,
    binding_issues,
    judge,
)
from beam_ckpt.retention import GcReport, PruneReport, RetentionPolicy

__all__ = ["CheckpointArtifacts", "CheckpointStore", "StateChunk"]

_WALKS = 4
DEFAULT_MAX_STATE_DATA_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True)
class StateChunk:
    """State of one key group, as `save_with_state` takes it and `load_state_data` gives it.

    Attributes:
        operator: Uid.
        key_group: Below the manifest's key-group count.
        data: A sidecar's bytes; the store does not look into them.
        kind: `full` or `delta`.
        rows: One for each key and window.
        boundary: Event time in microseconds; `None` for the drained end of the input.
        first_row: Of state in a file that key groups share: where in it its rows begin. `data` is
            the whole file then, the same object for all of them. `None`: the file is its own.
    """

    operator: str
    key_group: int
    data: bytes
    kind: Literal["full", "delta"] = "full"
    rows: int = 0
    boundary: int | None = None
    first_row: int | None = None


@dataclass(frozen=True)
class CheckpointArtifacts:
    """A manifest and all of its state, read once: what was hashed is what is restored.

    Attributes:
        manifest: As stored, with its phase.
        state: Every sidecar and inline piece, in the manifest's order.
    """

    manifest: CheckpointManifest
    state: tuple[StateChunk, ...]

    def validate(
        self,
        id: int,
        *,
        participant_id: int = 0,
        key_group_count: int | None = None,
        max_state_data_bytes: int = DEFAULT_MAX_STATE_DATA_BYTES,
    ) -> ValidationResult:
        """Checks the bytes in hand against the manifest and the place they came from.

        Args:
            id: The storage id that was read.
            participant_id: The namespace that was read.
            key_group_count: Expected; `None` accepts any.
            max_state_data_bytes: For all of the state together.
        """
        from beam_ckpt.blobs._base import crc32c

        issues = binding_issues(
            self.manifest, id=id, participant_id=participant_id, key_group_count=key_group_count
        )
        shared = {builtins.id(c.data): c.data for c in self.state if c.first_row is not None}
        alone = (c.data for c in self.state if c.first_row is None)
        held = sum(len(data) for data in (*alone, *shared.values()))
        if held > max_state_data_bytes:
            issues.append(f"{held} bytes of state, {max_state_data_bytes} allowed")
        entries = self.manifest.sidecars()
        if len(entries) != len(self.state):
            issues.append(f"the manifest lists {len(entries)} sidecars, {len(self.state)} are here")
        if issues:  # no hashing of what cannot be used
            return ValidationResult(id, tuple(issues))
        sound: set[tuple[int, str]] = set()
        for (operator, key_group, entry), chunk in zip(entries, self.state, strict=True):
            where = entry.path or f"inline state of {operator!r}, key group {key_group}"
            if (operator, key_group) != (chunk.operator, chunk.key_group):
                issues.append(
                    f"{where}: state of {chunk.operator!r}, key group {chunk.key_group}, in the "
                    f"place of {operator!r}, key group {key_group}"
                )
            if chunk.first_row != entry.first_row or (entry.is_shared and chunk.rows != entry.rows):
                issues.append(
                    f"{where}: {chunk.rows} rows from {chunk.first_row} on, expected {entry.rows} "
                    f"from {entry.first_row} on"
                )
            if entry.is_shared:  # hashed once
                where = f"{where}, of key groups {_shared_by(entries, entry.path)}"
                if (same := (builtins.id(chunk.data), entry.sha256)) in sound:
                    continue
                sound.add(same)
            if len(chunk.data) != entry.size_bytes:
                issues.append(f"{where}: {len(chunk.data)} bytes, expected {entry.size_bytes}")
            elif sha256_hex(chunk.data) != entry.sha256 or crc32c(chunk.data) != entry.crc32c:
                issues.append(f"{where}: state checksum mismatch")
        return ValidationResult(id, tuple(issues))


class CheckpointStore(ABC):
    """Checkpoints of one deployment (of one participant of it), under one root.

    A checkpoint is *prepared* when its manifest is saved, and a recovery point when it is
    *finalized*. Many workers write sidecars; one committer saves and finalizes.

    All methods are safe to repeat, from any thread and process. Instances pickle (without
    clients or caches). Unless a method says otherwise, it raises `CheckpointStorageError` when
    the storage fails and `InvalidCheckpointError` when what it reads is damaged.
    """

    # -- what identifies the store -------------------------------------------------------

    @property
    @abstractmethod
    def url(self) -> str:
        """Where it is, without credentials."""

    @property
    @abstractmethod
    def deployment_id(self) -> str:
        """UUID created with the store; empty as long as nothing has been written."""

    @property
    def key_group_count(self) -> int | None:
        """Key groups that manifests must have; `None` accepts any."""
        return 1

    @property
    def participant_id(self) -> int:
        """The namespace, 0 for the only one."""
        return 0

    @property
    def max_state_data_bytes(self) -> int:
        """Bytes allowed for one sidecar, and for all state that one call holds in memory."""
        return DEFAULT_MAX_STATE_DATA_BYTES

    # -- required ------------------------------------------------------------------------

    @property
    def shares_sidecars(self) -> bool:
        """Whether `write_sidecar` takes files that several key groups share.

        Where it does not, each key group has files of its own.
        """
        return False

    @abstractmethod
    def save(self, manifest: CheckpointManifest) -> CheckpointManifest:
        """Creates a manifest under its id: atomic, and idempotent for identical content.

        A prepared manifest is inventory, not a recovery point. One whose phase is `finalized`
        is saved and finalized. Never prunes.

        How it is kept is the store's own; the stores of this library keep `manifest.to_bytes()`.
        As these may differ for the same manifest, contents are compared as `to_json()`.

        Returns:
            The manifest as stored (its deployment filled in).

        Raises:
            CheckpointConflictError: The id holds another checkpoint, which is left as it is.
            FencedError: The manifest's run has been superseded; nothing was written.
            InvalidCheckpointError: It is not valid for this store; nothing was written.
        """

    @abstractmethod
    def finalize(self, id: int) -> CheckpointManifest:
        """Publishes a prepared checkpoint as a recovery point, and as the latest if it is.

        Idempotent; repairs a missing pointer.

        Raises:
            CheckpointNotFoundError: There is no such manifest.
            FencedError: Its run has been superseded, or has been given up by a younger one.
            InvalidCheckpointError: The manifest or the pointer is damaged (`repair_pointer`).
        """

    @abstractmethod
    def load_latest(self) -> CheckpointManifest | None:
        """Returns the checkpoint that the pointer names, or `None` when there is no pointer.

        Fast, and fails closed. It proves that the checkpoint was finalized, not that its
        sidecars are whole: to restore, use `recover_latest_validated`.
        """

    @abstractmethod
    def load_by_id(self, id: int) -> CheckpointManifest | None:
        """Returns a checkpoint, finalized or only prepared; `None` when there is none."""

    @abstractmethod
    def list(self) -> builtins.list[tuple[int, int]]:
        """Returns (id, epoch) of every checkpoint, ascending by id; reads every manifest."""

    @abstractmethod
    def prune_before(self, before_epoch: int) -> int:
        """Deletes checkpoints of an epoch strictly below `before_epoch`, prepared ones too.

        The pointer's target, the newest finalized and every tagged one stay. Everything is
        classified first: anything malformed raises and nothing is deleted.

        Returns:
            How many checkpoints were deleted.
        """

    @abstractmethod
    def save_state_data(
        self, id: int, chunks: Iterable[StateChunk]
    ) -> tuple[tuple[str, int, SidecarEntry], ...]:
        """Writes state for a checkpoint that is about to be saved, one sidecar per chunk.

        Idempotent for identical bytes.

        Returns:
            (operator, key group, entry) for the manifest, in order.

        Raises:
            CheckpointConflictError: Other bytes were saved for that id.
            CheckpointTooLargeError: Over `max_state_data_bytes` in all; nothing was written.
        """

    @abstractmethod
    def load_state_data(self, id: int) -> Iterator[StateChunk] | None:
        """Yields the verified state of a checkpoint; `None` when it has none or is not there.

        Raises:
            CheckpointTooLargeError: Over `max_state_data_bytes` in all.
        """

    @abstractmethod
    def read_sidecar(self, entry: SidecarEntry) -> bytes:
        """Returns the bytes of a sidecar whose size, crc32c and sha256 are the entry's.

        Raises:
            CheckpointNotFoundError: The file is gone.
            CheckpointTooLargeError: Over `max_state_data_bytes`.
            InvalidCheckpointError: Names the path and what differs.
        """

    @abstractmethod
    def validate_checkpoint(self, id: int, *, deep: bool = True) -> ValidationResult:
        """Says what is wrong with a checkpoint.

        Missing, unparsable and mismatched things are issues; storage errors raise.

        Args:
            id: The checkpoint.
            deep: Hash every byte. Otherwise presence, sizes and, where the storage keeps it,
                crc32c are compared without reading the files.
        """

    # -- provided ------------------------------------------------------------------------

    def list_ids(self) -> builtins.list[int]:
        """Returns every id, ascending, damaged ones included where the store can tell."""
        return [id for id, _ in self.list()]

    def next_id(self) -> int:
        """Returns an id above every one that was ever given out."""
        return max(self.list_ids(), default=0) + 1

    def successor(self, id: int) -> int | None:
        """Returns the checkpoint that took the place of one; `None` where there is none.

        Such as after a `beam_ckpt.maintenance.forget`. Reads manifests, the newest first.
        """
        for other in reversed(self.list_ids()):
            try:
                manifest = self.load_by_id(other)
            except InvalidCheckpointError:
                continue
            if (
                manifest is not None
                and id in manifest.replaces
                and manifest.durable_phase == "finalized"
            ):
                return other
        return None

    def ensure_manifest_participant(self, manifest: CheckpointManifest) -> None:
        """Raises `InvalidCheckpointError` when the manifest is another participant's."""
        if manifest.participant_id != self.participant_id:
            raise InvalidCheckpointError(
                f"checkpoint {manifest.id} is of participant {manifest.participant_id}, this "
                f"store ({self.url}) that of participant {self.participant_id}: open the store "
                f"with participant_id={manifest.participant_id}"
            )

    def ensure_manifest_valid(self, manifest: CheckpointManifest) -> None:
        """Raises when the manifest could not be read back from this store. Writes nothing.

        Raises:
            InvalidCheckpointError: Another participant, key-group count or malformed.
            CheckpointTooLargeError: The manifest, or a sidecar that it lists.
        """
        self.ensure_manifest_participant(manifest)
        issues = binding_issues(
            manifest,
            id=None,
            participant_id=self.participant_id,
            key_group_count=self.key_group_count,
            deployment_id=self.deployment_id,
        )
        if issues:
            raise InvalidCheckpointError(
                f"checkpoint {manifest.id} does not fit the store {self.url}: {'; '.join(issues)}. "
                "Nothing was written"
            )
        # A copy made with model_copy or model_construct has not been validated.
        parse_record(
            CheckpointManifest,
            manifest.to_json(),
            where=f"the manifest of checkpoint {manifest.id}",
            limit=1 << 62,
        )
        for operator, group, entry in manifest.sidecars():
            if entry.size_bytes > self.max_state_data_bytes:
                raise CheckpointTooLargeError(
                    f"operator {operator!r}, key group {group}: a sidecar of {entry.size_bytes} "
                    f"bytes, {self.max_state_data_bytes} allowed (max_state_data_bytes): use "
                    "more key groups, or raise the limit on every store of this deployment"
                )

    def save_with_state(
        self, manifest: CheckpointManifest, state_data: Iterable[StateChunk] | None
    ) -> CheckpointManifest:
        """Saves a manifest with state: sidecars are durable before the manifest exists.

        The chunks' entries are added to the manifest; a failed sidecar means no manifest.
        Without chunks this is `save`.

        Raises:
            CheckpointTooLargeError: Inline and external state over the limit in all; nothing
                was written.
            InvalidCheckpointError: A chunk is for a key group that the manifest lists already,
                or that does not exist; nothing was written.
        """
        chunks = list(state_data or ())
        if not chunks:
            return self.save(manifest)
        planned = _with_chunks(manifest, [(c.operator, c.key_group, _plan(c)) for c in chunks])
        self.ensure_manifest_valid(planned)
        ensure_budget(planned.total_size_bytes, self.max_state_data_bytes, self.url)
        return self.save(_with_chunks(manifest, self.save_state_data(manifest.id, chunks)))

    def recover_latest_validated(self, *, deep: bool = True) -> RecoveryReport:
        """Walks the checkpoints from the newest down to the first that is finalized and valid.

        The pointer is not trusted; it is heard as a witness, and so is a `.final` marker: what
        they name was published, so that it is damaged, not merely absent, where its manifest or
        its marker is gone. When nothing can be restored, `chosen` is `None`: a fresh store has
        `examined == 0`, anything else must not be started afresh silently.

        Args:
            deep: See `validate_checkpoint`.
        """
        began = time.monotonic()
        skipped: list[SkippedCheckpoint] = []
        chosen: CheckpointManifest | None = None
        ids, published = self._evidence()
        for _ in range(_WALKS):
            skipped.clear()
            for id in reversed(ids):
                facts = self._facts(id, deep=deep)
                verdict = judge(facts, published=id in published)
                if verdict is None:
                    chosen = facts.manifest
                    break
                skipped.append(verdict)
            # What was skipped may have been pruned under our eyes by a run that is still alive.
            before = ids
            if skipped:
                ids, published = self._evidence()
            if ids == before:
                break
        return RecoveryReport(
            chosen_id=None if chosen is None else chosen.id,
            chosen=chosen,
            skipped=tuple(skipped),
            examined=len(skipped) + (chosen is not None),
            elapsed=time.monotonic() - began,
        )

    def _evidence(self) -> tuple[builtins.list[int], AbstractSet[int]]:
        """Returns all ids there is any trace of, ascending, and those known to be published."""
        return self.list_ids(), frozenset()

    def _facts(self, id: int, *, deep: bool) -> CheckpointFacts:
        result = self.validate_checkpoint(id, deep=deep)
        try:
            manifest, marker = self.load_by_id(id), None
            if manifest is not None and manifest.durable_phase == "finalized":
                marker = self.final_marker(id)
        except InvalidCheckpointError as e:
            return CheckpointFacts(id, None, None, result.issues or (str(e),))
        return CheckpointFacts(id, manifest, marker, result.issues)

    # -- participants and artifacts ------------------------------------------------------

    def load_manifest_for_participant(
        self, participant_id: int, id: int
    ) -> CheckpointManifest | None:
        """`load_by_id` in the namespace of a participant, where the root is shared."""
        return self._peer(participant_id).load_by_id(id)

    def load_state_data_for_participant(
        self, participant_id: int, id: int
    ) -> Iterator[StateChunk] | None:
        """`load_state_data` in the namespace of a participant, where the root is shared."""
        return self._peer(participant_id).load_state_data(id)

    def state_data_len_for_participant(self, participant_id: int, id: int) -> int | None:
        """Bytes of state of a participant's checkpoint, by the manifest alone.

        Returns:
            `None` when the checkpoint has no state or is not there.

        Raises:
            CheckpointTooLargeError: Over `max_state_data_bytes`.
        """
        peer = self._peer(participant_id)
        manifest = peer.load_by_id(id)
        if manifest is None or not manifest.sidecars():
            return None
        ensure_budget(manifest.total_size_bytes, self.max_state_data_bytes, peer.url)
        return manifest.total_size_bytes

    def load_checkpoint_artifacts(self, id: int) -> CheckpointArtifacts | None:
        """Reads a manifest and all of its state into memory, each once.

        The bytes are *not* compared with the manifest: `CheckpointArtifacts.validate` does so
        for the very bytes in hand.

        Raises:
            CheckpointTooLargeError: Over `max_state_data_bytes` in all.
        """
        return self.load_checkpoint_artifacts_for_participant(self.participant_id, id)

    def load_checkpoint_artifacts_for_participant(
        self, participant_id: int, id: int
    ) -> CheckpointArtifacts | None:
        """`load_checkpoint_artifacts` in the namespace of a participant."""
        peer = self._peer(participant_id)
        manifest = peer.load_by_id(id)
        if manifest is None:
            return None
        ensure_budget(manifest.total_size_bytes, self.max_state_data_bytes, peer.url)
        return CheckpointArtifacts(manifest, tuple(peer._chunks(manifest, peer._raw)))

    def _chunks(
        self, manifest: CheckpointManifest, read: Callable[[SidecarEntry], bytes]
    ) -> Iterator[StateChunk]:
        """Yields all state of a checkpoint; what key groups share is read once."""
        shared: dict[str, bytes] = {}
        for operator, group, e in manifest.sidecars():
            data = shared.get(e.path or "")
            if data is None or not e.is_shared:
                data = read(e)
            if e.is_shared:
                shared[e.path or ""] = data
            yield StateChunk(operator, group, data, e.kind, e.rows, e.boundary, e.first_row)

    def _raw(self, entry: SidecarEntry) -> bytes:
        return self.read_sidecar(entry)

    def _peer(self, participant_id: int) -> CheckpointStore:
        if participant_id != self.participant_id:
            raise InvalidCheckpointError(
                f"the store {self.url} holds participant {self.participant_id} only and cannot "
                f"read participant {participant_id}: use a store on a shared root (gs://...)"
            )
        return self

    # -- what distributed writers, retention and operators need --------------------------

    @abstractmethod
    def write_sidecar(
        self,
        *,
        operator: str,
        key_group: int | None,
        boundary: int | None,
        run_id: str,
        data: bytes,
        kind: Literal["full", "delta"],
        rows: int,
        inline_threshold: int = -1,
    ) -> SidecarEntry:
        """Writes a sidecar under a unique name; it is durable when this returns.

        Args:
            operator: Uid.
            key_group: From 0; `None` for a file that several share (`shares_sidecars`), of which
                the entry is then that of all rows.
            boundary: Event time in microseconds; `None` for the drained end of the input.
            run_id: Of the writing run.
            data: The bytes.
            kind: `full` or `delta`.
            rows: One for each key and window.
            inline_threshold: Data of at most so many bytes is put into the entry, not a file.

        Returns:
            The entry for the manifest, its epoch not yet set.
        """

    @abstractmethod
    def claim_generation(self, run_id: str, *, restored_from: int | None = None) -> int:
        """Makes a run the owner of the store; every older run is fenced from now on.

        Call it before recovery, or at the latest before the first commit. What older runs have
        prepared and not finalized is given up. Idempotent for a run id.

        Args:
            run_id: Unique for the run.
            restored_from: The checkpoint that it restored; retention keeps it until the run
                has finalized one of its own.

        Returns:
            The generation, from 1.

        Raises:
            FencedError: The run has been superseded since it claimed.
            CheckpointNotFoundError: `restored_from` was pruned before it could be kept.
        """

    @abstractmethod
    def check_generation(self, generation: int, run_id: str) -> None:
        """Raises `FencedError` when a younger generation than this run's exists."""

    @abstractmethod
    def final_marker(self, id: int) -> FinalMarker | None:
        """Returns the `.final` marker, which outlives a damaged manifest; `None` without one."""

    @abstractmethod
    def prune(
        self, policy: RetentionPolicy, *, dry_run: bool = False, only: PruneReport | None = None
    ) -> PruneReport:
        """Deletes what a policy does not keep, then the sidecars that nothing else lists.

        The pointer's target, the newest finalized checkpoint, every tagged one and what a
        running job restored from stay, whatever the policy says. Safe to kill at any point and
        to run again; anything malformed raises and nothing is deleted.

        Args:
            policy: What to keep.
            dry_run: Only report what would be deleted now.
            only: The report of a dry run: no checkpoint goes that it does not list.
        """

    @abstractmethod
    def tag(self, name: str, id: int) -> None:
        """Gives a finalized checkpoint a name; retention keeps it until `untag`.

        Raises:
            CheckpointConflictError: The name is that of another checkpoint.
            CheckpointNotFoundError: There is no such finalized checkpoint.
        """

    @abstractmethod
    def untag(self, name: str) -> None:
        """Removes a tag; the checkpoint stays until retention takes it.

        Raises:
            CheckpointNotFoundError: There is no such tag.
        """

    @abstractmethod
    def tags(self) -> Mapping[str, int]:
        """Returns the id by tag name, sorted by name."""

    @abstractmethod
    def gc(
        self, *, grace_s: float = 86400.0, dry_run: bool = False, only: GcReport | None = None
    ) -> GcReport:
        """Deletes files that no checkpoint lists and that nobody can publish any more.

        Args:
            grace_s: Seconds; what is younger stays whatever its run.
            dry_run: Only report; lists exactly what the real one would delete now.
            only: The report of a dry run: nothing goes that it does not list, whatever has
                become garbage since.
        """

    @abstractmethod
    def repair_pointer(self, *, dry_run: bool = False, discard: bool = False) -> RecoveryReport:
        """Points `latest.json` at the newest finalized checkpoint that validates deep.

        Nothing else changes.

        Args:
            dry_run: Only report.
            discard: Where there is none, remove the pointer: for a run that starts afresh on the
                author's word that the saved state is given up.

        Raises:
            NoValidCheckpointError: There is none and `discard` is not given; the pointer is left
                as it is.
        """


# -- helpers shared with implementations -------------------------------------------------


def ensure_budget(total: int, limit: int, where: str) -> None:
    """Raises `CheckpointTooLargeError` when state that one call would hold is over the limit."""
    if total > limit:
        raise CheckpointTooLargeError(
            f"{total} bytes of state in all, {limit} allowed (max_state_data_bytes) in {where}: "
            "read or write it sidecar by sidecar, or raise the limit"
        )


def check_budget(limit: int) -> int:
    """Returns a usable `max_state_data_bytes`.

    Raises:
        ValueError: Not in 1..2**63-2.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"max_state_data_bytes is {limit!r}: it must be greater than zero")
    if limit >= 2**63 - 1:  # one more byte is read to see an object that grows
        raise ValueError(f"max_state_data_bytes is {limit}: more than an address space holds")
    return limit


def _shared_by(entries: Sequence[tuple[str, int, SidecarEntry]], path: str | None) -> str:
    return number_ranges(group for _, group, entry in entries if entry.path == path)


def number_ranges(numbers: Iterable[int]) -> str:
    """Returns numbers in few words.

    >>> number_ranges([3, 1, 2, 7, 2])
    '1-3, 7'
    """
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


def _plan(chunk: StateChunk) -> SidecarEntry:
    # What the entry will be, as far as validation before the write can tell.
    return SidecarEntry(
        path="state/planned/" + sha256_hex(f"{chunk.operator}\0{chunk.key_group}".encode()),
        kind=chunk.kind,
        boundary=chunk.boundary,
        rows=chunk.rows,
        size_bytes=len(chunk.data),
        crc32c=0,
        sha256="0" * 64,
    )


def _with_chunks(
    manifest: CheckpointManifest, written: Iterable[tuple[str, int, SidecarEntry]]
) -> CheckpointManifest:
    from pydantic import ValidationError

    from beam_ckpt.manifest import OperatorSnapshotEntry, PartitionSnapshotEntry

    partitions = {
        uid: {p.partition_id: p for p in entry.partitions}
        for uid, entry in manifest.operators.items()
    }
    try:
        for operator, group, entry in written:
            groups = partitions.setdefault(operator, {})
            if group in groups:
                raise InvalidCheckpointError(
                    f"operator {operator!r}, key group {group} of checkpoint {manifest.id} has "
                    "state twice: give one chunk per key group, and none for those that the "
                    "manifest lists already"
                )
            stamped = entry.model_copy(update={"epoch": manifest.epoch})
            groups[group] = PartitionSnapshotEntry(partition_id=group, sidecars=(stamped,))
        operators = {
            uid: OperatorSnapshotEntry(partitions=tuple(groups[g] for g in sorted(groups)))
            for uid, groups in partitions.items()
        }
        fields = dict(manifest) | {"operators": operators, "total_size_bytes": 0}
        return CheckpointManifest.model_validate(fields)
    except ValidationError as e:
        raise InvalidCheckpointError(
            f"the state given for checkpoint {manifest.id} does not fit its manifest: "
            f"{describe(e)}. Nothing was written"
        ) from None


__all__ += ["DEFAULT_MAX_STATE_DATA_BYTES", "check_budget", "ensure_budget", "number_ranges"]
