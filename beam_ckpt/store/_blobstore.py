"""The one implementation of the contract, over blob primitives.

How publication is decided. `manifests/<id>.json` is created once: an id has one content.
`manifests/<id>.final` is created once: either the committer seals the manifest with it, or a
younger run (or a prune) marks the attempt as abandoned; whoever comes second sees it. A run
that claims a generation first creates its claim and then abandons what older runs have
prepared; a committer first creates its manifest and then looks for younger claims before it
seals. So of a stalled committer and its successor at least one sees the other, however long the
committer slept between two steps.

How deletion is kept safe. A prune first writes down what it means to delete (below `prunes/`,
in names of empty objects, for which a full disk has room) and then looks at tags and claims once
more, sparing what they name; who tags or claims first writes that down and then looks at the
prunes. So at least one sees the other, and nothing is ever taken back. A checkpoint that goes
loses its `.final` first (it is no recovery point any more), then the sidecars go that no kept
manifest lists, and the manifest last: until then it is the inventory from which a killed prune
is taken up again.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import copy
import errno
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, NoReturn, Self, TypeVar

from beam_ckpt.blobs import (
    ABSENT,
    BlobConflict,
    BlobExists,
    BlobIndeterminate,
    BlobInvalid,
    BlobMeta,
    Blobs,
    BlobTooLarge,
)
from beam_ckpt.blobs._base import crc32c
from beam_ckpt.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointStorageError,
    CheckpointTooLargeError,
    FencedError,
    IndeterminateError,
    InvalidCheckpointError,
    NoValidCheckpointError,
    UnsupportedFormatError,
)
from beam_ckpt.keygroups import check_key_group_count
from beam_ckpt.manifest import (
    MAX_INLINE_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_RECORD_BYTES,
    AbandonedMarker,
    CheckpointManifest,
    FinalMarker,
    Namespace,
    Pointer,
    RunClaim,
    SidecarEntry,
    Tag,
    _Record,
    new_checkpoint_id,
    parse_record,
    sha256_hex,
    unpacked,
)
from beam_ckpt.recovery import (
    CheckpointFacts,
    PointerStep,
    RecoveryReport,
    ValidationResult,
    binding_issues,
    newer_generation,
    pointer_step,
    seal_issues,
)
from beam_ckpt.retention import (
    Garbage,
    GcFacts,
    GcReport,
    PrunePlan,
    PruneReport,
    RetentionFacts,
    RetentionPolicy,
    UnlistedSidecar,
    judge_unlisted,
    plan_before,
    plan_policy,
)
from beam_ckpt.retention import plan as plan_these
from beam_ckpt.store._base import (
    DEFAULT_MAX_STATE_DATA_BYTES,
    CheckpointStore,
    StateChunk,
    check_budget,
    ensure_budget,
    number_ranges,
)
from beam_ckpt.store._layout import Layout
from beam_ckpt.store._notes import (
    ManifestNote,
    manifest_note,
    marker_note,
    read_manifest_note,
    read_marker_note,
)

__all__ = ["BlobCheckpointStore", "Stored"]

MAX_INVENTORY = 65_536
_CAS_ATTEMPTS = 32
_PARALLEL = 8
_READ_WHOLE = 32 * 1024 * 1024
_READ_PIECE = 8 * 1024 * 1024

_R = TypeVar("_R", bound=_Record)
_A = TypeVar("_A")
_B = TypeVar("_B")

_ADVICE = {
    errno.ENOSPC: "free some space (or prune) and run again: what was published is whole",
    errno.EDQUOT: "free some space (or prune) and run again: what was published is whole",
    errno.EACCES: "check the permissions of the path, or the credentials and roles of the account",
    errno.EPERM: "check the permissions of the path, or the credentials and roles of the account",
    errno.EROFS: "it is mounted read-only: give a store that can be written",
    errno.ENOENT: "create the bucket or directory, or correct the URL",
}


@dataclass(frozen=True)
class _Inventory:
    """One listing of `manifests/`."""

    manifests: Mapping[int, BlobMeta]
    finals: Mapping[int, BlobMeta]
    used: AbstractSet[int]

    @property
    def ids(self) -> builtins.list[int]:
        return sorted(self.manifests)


@dataclass(frozen=True)
class Stored:
    """A manifest as it was read: its bytes are what a `.final` seals."""

    manifest: CheckpointManifest
    data: bytes


class BlobCheckpointStore(CheckpointStore):
    """Checkpoints over any `Blobs`. Made by `open_store`; the subclasses only name a backend."""

    def __init__(
        self,
        blobs: Blobs,
        *,
        key_group_count: int | None = 1,
        participant_id: int = 0,
        max_state_data_bytes: int = DEFAULT_MAX_STATE_DATA_BYTES,
    ) -> None:
        """Keeps the configuration; nothing is read or written.

        Args:
            blobs: Where the objects are.
            key_group_count: What manifests must have; `None` accepts any.
            participant_id: The namespace.
            max_state_data_bytes: See `CheckpointStore.max_state_data_bytes`.
        """
        if key_group_count is not None:
            check_key_group_count(key_group_count)
        if participant_id < 0 or participant_id > 2**64 - 1:
            raise ValueError(f"participant_id is {participant_id}: it must be 0 or above")
        self._blobs = blobs
        self._key_group_count = key_group_count
        self._participant_id = participant_id
        self._max_state_data_bytes = check_budget(max_state_data_bytes)
        self._paths = Layout(participant_id)
        self._deployment_id = ""
        self._writable = False
        self._seen: dict[int, tuple[tuple[str, str], RetentionFacts]] = {}

    def __getstate__(self) -> dict[str, object]:
        """Pickles the configuration, not what has been seen."""
        return self.__dict__ | {"_deployment_id": "", "_writable": False, "_seen": {}}

    def __repr__(self) -> str:
        """Class and URL."""
        return f"{type(self).__name__}({self.url!r})"

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        return self._blobs.url

    @property
    def blobs(self) -> Blobs:
        """The primitives underneath, for wrappers and tools."""
        return self._blobs

    def with_blobs(self, blobs: Blobs) -> Self:
        """Returns the same store over other blobs, such as a wrapper of its own."""
        other = copy.copy(self)
        other.__dict__.update(self.__getstate__())
        other._blobs = blobs
        return other

    @property
    def key_group_count(self) -> int | None:
        """Key groups that manifests must have; `None` accepts any."""
        return self._key_group_count

    @property
    def participant_id(self) -> int:
        """The namespace."""
        return self._participant_id

    @property
    def max_state_data_bytes(self) -> int:
        """See `CheckpointStore.max_state_data_bytes`."""
        return self._max_state_data_bytes

    @property
    def shares_sidecars(self) -> bool:
        """It does: a file is a file."""
        return True

    @property
    def deployment_id(self) -> str:
        """UUID created with the store; empty as long as nothing has been written."""
        if not self._deployment_id:
            found = self._read_record(Namespace, self._paths.namespace)
            self._deployment_id = "" if found is None else found.deployment_id
        return self._deployment_id

    # -- errors at the edge --------------------------------------------------------------

    def _where(self, key: str) -> str:
        return f"{self.url.rstrip('/')}/{key}"

    @contextlib.contextmanager
    def _io(self, doing: str, key: str) -> Iterator[None]:
        """Turns what blobs raise into the errors of this library. Lets `Blob*` losses pass."""
        try:
            yield
        except (CheckpointError, BlobExists, BlobConflict):
            raise
        except BlobInvalid as e:
            raise InvalidCheckpointError(
                f"{self._where(e.key)} {e.reason}. Move it away and copy the object back from "
                "where it is whole; a restore falls back to an older checkpoint"
            ) from None
        except BlobTooLarge as e:
            raise CheckpointTooLargeError(
                f"{self._where(e.key)} holds {e.size} bytes, {e.limit} allowed"
            ) from None
        except BlobIndeterminate as e:
            raise IndeterminateError(
                errno.EIO,
                f"could not find out whether {doing} {self._where(key)} succeeded ({e}): "
                "repeat the operation, which is safe",
            ) from e
        except ValueError as e:
            raise InvalidCheckpointError(f"{doing} {self._where(key)}: {e}") from None
        except OSError as e:
            code = e.errno or errno.EIO
            advice = _ADVICE.get(code, "run again; if it persists, look at the storage")
            raise CheckpointStorageError(
                code, f"{doing} {self._where(key)} failed: {e.strerror or e}; {advice}"
            ) from e

    # -- reading -------------------------------------------------------------------------

    def _get(self, key: str, limit: int) -> tuple[bytes, BlobMeta] | None:
        try:
            with self._io("reading", key):
                try:
                    return self._blobs.get(key, max_bytes=limit)
                except FileNotFoundError:
                    return None
        except CheckpointTooLargeError as e:
            raise InvalidCheckpointError(f"{e}: this is no object of ours") from None

    def _read_record(self, cls: type[_R], key: str) -> _R | None:
        found = self._get(key, MAX_RECORD_BYTES)
        return None if found is None else parse_record(cls, found[0], where=self._where(key))

    def _read_manifest(self, id: int) -> Stored | None:
        key = self._paths.manifest(id)
        found = self._get(key, MAX_MANIFEST_BYTES)
        if found is None:
            return None
        try:
            manifest = CheckpointManifest.from_bytes(found[0], where=self._where(key))
        except UnsupportedFormatError as e:
            marker = self._witness(id)
            if isinstance(marker, FinalMarker) and marker.manifest_sha256 != sha256_hex(found[0]):
                raise InvalidCheckpointError(
                    f"{self._where(key)} is invalid: it is not what its .final marker seals ({e}). "
                    "It was changed: copy it back from where it is whole"
                ) from None
            raise
        issues = binding_issues(
            manifest,
            id=id,
            participant_id=self.participant_id,
            key_group_count=self.key_group_count,
        )
        if issues:
            raise InvalidCheckpointError(
                f"{self._where(key)} is invalid: {'; '.join(issues)}. It may have been swapped "
                "or copied: put the right object back"
            )
        return Stored(manifest.with_phase("prepared"), found[0])

    def _read_marker(self, id: int) -> FinalMarker | AbandonedMarker | None:
        key = self._paths.final(id)
        found = self._get(key, MAX_RECORD_BYTES)
        if found is None:
            return None
        data = found[0]
        marker: FinalMarker | AbandonedMarker
        if b'"abandoned_by"' in data:
            marker = parse_record(AbandonedMarker, data, where=self._where(key))
        else:
            marker = parse_record(FinalMarker, data, where=self._where(key))
        if marker.id != id:
            raise InvalidCheckpointError(
                f"{self._where(key)} is the marker of checkpoint {marker.id}. It may have been "
                "swapped or copied: put the right object back"
            )
        return marker

    def _load(self, id: int) -> tuple[Stored, FinalMarker | AbandonedMarker | None] | None:
        stored = self._read_manifest(id)
        if stored is None:
            return None
        marker = self._read_marker(id)
        issues = seal_issues(marker, stored.manifest, stored.data)
        if issues:
            raise InvalidCheckpointError(
                f"checkpoint {id} in {self.url} is invalid: {'; '.join(issues)}. Its manifest or "
                "its .final marker was changed: copy both back from where they are whole"
            )
        if isinstance(marker, FinalMarker):
            return Stored(stored.manifest.with_phase("finalized"), stored.data), marker
        return stored, marker

    def load_by_id(self, id: int) -> CheckpointManifest | None:
        """See `CheckpointStore.load_by_id`."""
        found = self._load(id)
        return None if found is None else found[0].manifest

    def final_marker(self, id: int) -> FinalMarker | None:
        """See `CheckpointStore.final_marker`."""
        marker = self._read_marker(id)
        return marker if isinstance(marker, FinalMarker) else None

    def _inventory(self) -> _Inventory:
        prefix = self._paths.manifests
        with self._io("listing", prefix):
            odd = self._blobs.odd_entries(prefix)
            listed = self._blobs.list(prefix)
        if len(listed) > MAX_INVENTORY * 2:  # manifests and their markers
            raise CheckpointTooLargeError(
                f"{self._where(prefix)} holds {len(listed)} objects, {MAX_INVENTORY * 2} allowed: "
                "prune, and move away what is not a checkpoint"
            )
        if odd:
            raise InvalidCheckpointError(
                f"{self._where(odd[0])} is no regular file. Move it away: no checkpoint needs it"
            )
        kinds: dict[str, dict[int, BlobMeta]] = {"json": {}, "final": {}, "used": {}}
        for meta in listed:
            id, kind = self._paths.parse_manifest(meta.key)
            kinds[kind][id] = meta
        return _Inventory(kinds["json"], kinds["final"], frozenset(kinds["used"]))

    def list_ids(self) -> builtins.list[int]:
        """Returns every id, ascending, damaged ones included: one listing, nothing is read."""
        return self._inventory().ids

    def next_id(self) -> int:
        """Returns an id above every one that was ever given out."""
        found = self._inventory()
        named = 0
        with contextlib.suppress(InvalidCheckpointError):  # a witness, where all else was lost
            pointer, _ = self._read_pointer()
            named = pointer.id if pointer is not None else 0
        return max([*found.manifests, *found.finals, *found.used, named]) + 1

    def list(self) -> builtins.list[tuple[int, int]]:
        """See `CheckpointStore.list`. Where listings tell the epochs, nothing else is read."""
        found = self._inventory()
        epochs: dict[int, int] = {}
        for id, meta in found.manifests.items():
            note = self._manifest_note(id, meta)
            if note is not None:
                epochs[id] = note.epoch
        unknown = [id for id in found.ids if id not in epochs]
        for id, stored in zip(unknown, self._each(self._read_manifest, unknown), strict=True):
            if stored is not None:  # else pruned meanwhile
                epochs[id] = stored.manifest.epoch
        return sorted(epochs.items())

    def _manifest_note(self, id: int, meta: BlobMeta) -> ManifestNote | None:
        note = read_manifest_note(meta, id)
        if note is None or note.participant_id != self.participant_id:
            return None
        return note if self.key_group_count in (None, note.key_group_count) else None

    def _each(self, act: Callable[[_A], _B], items: Sequence[_A]) -> builtins.list[_B]:
        """Applies a read to each; side by side where each costs a round trip."""
        if len(items) < 3 or not self._blobs.shared_root:
            return [act(item) for item in items]
        with ThreadPoolExecutor(_PARALLEL) as pool:
            return list(pool.map(act, items))

    # -- the pointer ---------------------------------------------------------------------

    def _read_pointer(self) -> tuple[Pointer | None, str]:
        key = self._paths.latest
        try:
            found = self._get(key, MAX_RECORD_BYTES)
            if found is None:
                return None, ABSENT
            return parse_record(Pointer, found[0], where=self._where(key)), found[1].version
        except InvalidCheckpointError as e:
            self._bad_pointer(str(e))

    def _bad_pointer(self, found: str) -> NoReturn:
        raise InvalidCheckpointError(
            f"invalid checkpoint recovery pointer: {found}. Run `beam-ckpt repair-pointer` "
            f"(store.repair_pointer()) on {self.url}: it points it at the newest valid checkpoint"
        )

    def _follow(self, pointer: Pointer) -> CheckpointManifest:
        where = self._where(self._paths.latest)
        found = self._load(pointer.id)
        if found is None:
            self._bad_pointer(f"{where} references missing checkpoint {pointer.id}")
        stored, _ = found
        if stored.manifest.durable_phase != "finalized":
            self._bad_pointer(f"{where} references non-finalized checkpoint {pointer.id}")
        if (
            stored.manifest.checkpoint_id != pointer.checkpoint_id
            or sha256_hex(stored.data) != pointer.manifest_sha256
        ):
            self._bad_pointer(f"{where} does not match the manifest of checkpoint {pointer.id}")
        return stored.manifest

    def load_latest(self) -> CheckpointManifest | None:
        """See `CheckpointStore.load_latest`. Three reads, unless writers are at work."""
        pointer, _ = self._read_pointer()
        return None if pointer is None else self._follow_moving(pointer)

    def _follow_moving(self, pointer: Pointer) -> CheckpointManifest:
        while True:
            try:
                return self._follow(pointer)
            except InvalidCheckpointError:
                # Its target may have been pruned since it was read, and the pointer moved on.
                current, _ = self._read_pointer()
                if current is None or current.id <= pointer.id:
                    raise
                pointer = current

    def _publish(self, target: Pointer, seen: tuple[Pointer | None, str] | None = None) -> None:
        key = self._paths.latest
        for attempt in range(_CAS_ATTEMPTS):
            current, version = seen or self._read_pointer()
            seen = None  # once: then somebody has moved it
            step = pointer_step(current, target)
            if step is PointerStep.CONFLICT:
                self._bad_pointer(
                    f"{self._where(key)} names another content of checkpoint {target.id}"
                )
            if step is PointerStep.KEEP:
                return
            try:
                with self._io("writing", key):
                    self._blobs.replace(key, target.to_json(), version)
                return
            except BlobConflict:
                time.sleep(random.uniform(0, min(0.001 * 2**attempt, 0.032)))
        raise IndeterminateError(
            errno.EAGAIN,
            f"could not move {self._where(key)} to checkpoint {target.id} in {_CAS_ATTEMPTS} "
            "attempts against other writers; the checkpoint itself is published: finalize again",
        )

    # -- writing -------------------------------------------------------------------------

    def _ensure_namespace(self) -> None:
        """Creates `namespace.json` before the first write, and refuses what cannot be written."""
        if not self._writable:
            with self._io("writing to", ""):
                self._blobs.require_writable()
            self._writable = True
        if self.deployment_id:
            return
        record = Namespace(
            deployment_id=self._former_deployment() or new_checkpoint_id(),
            key_group_count=self._key_group_count,
            created_ms=_now_ms(),
        )
        with self._io("writing", self._paths.namespace), contextlib.suppress(BlobExists):
            self._blobs.put_if_absent(self._paths.namespace, record.to_json())
        if not self.deployment_id:
            raise CheckpointStorageError(
                errno.EIO, f"{self._where(self._paths.namespace)} vanished while it was created"
            )

    def _former_deployment(self) -> str:
        # namespace.json was lost: the manifests still say whose store this is.
        for id in reversed(self.list_ids()):
            with contextlib.suppress(InvalidCheckpointError):
                stored = self._read_manifest(id)
                if stored is not None and stored.manifest.deployment_id:
                    return stored.manifest.deployment_id
        return ""

    def _create(
        self, key: str, data: bytes, *, again: bool = True, note: str = "", limit: int = 0
    ) -> bytes | None:
        """Creates an immutable object; returns the other content that the name holds.

        Args:
            key: The object.
            data: Its content.
            again: Whether to create it again when it was there and then was deleted.
            note: See `Blobs.put_if_absent`.
            limit: Bytes of the other content that may be read, if they are more than ours.
        """
        for _ in range(_CAS_ATTEMPTS):
            try:
                with self._io("writing", key):
                    self._blobs.put_if_absent(key, data, note)
                return None
            except BlobExists:
                found = self._get(key, max(len(data), MAX_RECORD_BYTES, limit))
            if found is not None:
                return None if found[0] == data else found[0]
            if not again:
                break
        raise CheckpointConflictError(
            f"{self._where(key)} was deleted while it was created: a prune or another writer is at "
            "work; read the store again before the next step"
        )

    def save(self, manifest: CheckpointManifest) -> CheckpointManifest:
        """See `CheckpointStore.save`."""
        self.ensure_manifest_valid(manifest)
        if manifest.run is not None:
            self.check_generation(manifest.run.generation, manifest.run.run_id)
        self._ensure_namespace()
        if not manifest.deployment_id:
            manifest = manifest.model_copy(update={"deployment_id": self._deployment_id})
        key, data = self._paths.manifest(manifest.id), manifest.to_bytes()
        note = manifest_note(manifest, data)
        try:
            held = self._create(key, data, again=False, note=note, limit=MAX_MANIFEST_BYTES)
        except InvalidCheckpointError:  # it is longer than any manifest, or no object
            held = b""
        if held is not None and not is_of(manifest, held):
            if manifest.run is not None:
                self.check_generation(manifest.run.generation, manifest.run.run_id)
            raise CheckpointConflictError(
                f"checkpoint {manifest.id} exists in {self.url} with other immutable content, "
                f"which was left as it is: {self._describe(held)}. Take the next id "
                "(store.next_id()) for another checkpoint"
            )
        if manifest.durable_phase == "finalized":
            return self.finalize(manifest.id)
        return manifest

    def _describe(self, data: bytes) -> str:
        try:
            other = CheckpointManifest.from_bytes(data, where="it")
        except InvalidCheckpointError:
            return "it cannot be read"
        run = f"run {other.run.run_id}" if other.run else "no run"
        return f"epoch {other.epoch}, {other.checkpoint_id}, of {run}"

    def finalize(self, id: int) -> CheckpointManifest:
        """See `CheckpointStore.finalize`."""
        stored = self._read_manifest(id)
        if stored is None:
            raise CheckpointNotFoundError(
                f"checkpoint {id} not found in {self.url}: save its manifest first; if it was "
                "saved, a younger run has given it up and pruned it"
            )
        # Before anything is published: a broken pointer stays broken, and is named.
        pointer, version = self._read_pointer()
        if pointer is not None and pointer.id > id:
            self._follow_moving(pointer)
        run = stored.manifest.run
        if run is not None:
            self.check_generation(run.generation, run.run_id)
        self._ensure_namespace()
        marker = FinalMarker.of(stored.manifest, stored.data)
        key = self._paths.final(id)
        held = self._create(key, marker.to_json(), note=marker_note(marker, stored.data))
        if held is not None:
            self._lost_final(id, held)
        with self._io("reading", self._paths.manifest(id)):
            gone = self._blobs.head(self._paths.manifest(id)) is None
        if gone:  # pruned meanwhile: take back the stray marker
            self._delete([key])
            raise CheckpointNotFoundError(
                f"checkpoint {id} in {self.url} was pruned before it could be finalized"
            )
        self._publish(
            Pointer(
                id=id, checkpoint_id=marker.checkpoint_id, manifest_sha256=marker.manifest_sha256
            ),
            (pointer, version),
        )
        return stored.manifest.with_phase("finalized")

    def _lost_final(self, id: int, held: bytes) -> NoReturn:
        where = self._where(self._paths.final(id))
        if b'"abandoned_by"' in held:
            other = parse_record(AbandonedMarker, held, where=where)
            raise FencedError(
                f"checkpoint {id} in {self.url} was abandoned by {other.abandoned_by} before it "
                "was finalized: stop this run; the store belongs to a younger one"
            )
        raise InvalidCheckpointError(
            f"{where} does not seal the manifest beside it: one of the two was changed. Copy "
            "both back from where they are whole"
        )

    def _abandon(self, id: int, by: str) -> bool:
        """Marks a prepared checkpoint as never to be finalized; False when it is finalized."""
        marker = AbandonedMarker(id=id, abandoned_by=by)
        held = self._create(self._paths.final(id), marker.to_json(), note=marker_note(marker))
        return held is None or b'"abandoned_by"' in held

    def _delete(self, keys: Sequence[str]) -> None:
        if keys:
            with self._io("deleting", keys[0]):
                self._blobs.delete_many(keys)

    # -- sidecars ------------------------------------------------------------------------

    def _check_chunk(self, operator: str, key_group: int | None, size: int) -> None:
        try:
            operator.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidCheckpointError(
                f"{operator!r} is no operator uid: it cannot be encoded"
            ) from None
        if not 1 <= len(operator) <= 256:
            raise InvalidCheckpointError(
                f"{operator[:80]!r} is no operator uid: it needs 1 to 256 characters"
            )
        bound = self.key_group_count or 65535
        if key_group is not None and not 0 <= key_group < bound:
            raise InvalidCheckpointError(
                f"operator {operator!r}: key group {key_group} is outside 0..{bound - 1}"
            )
        if size > self.max_state_data_bytes:
            raise CheckpointTooLargeError(
                f"operator {operator!r}, {_of_group(key_group)}: a sidecar of {size} bytes, "
                f"{self.max_state_data_bytes} allowed (max_state_data_bytes): use more key "
                "groups, or raise the limit on every store of this deployment"
            )

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
        """See `CheckpointStore.write_sidecar`."""
        self._check_chunk(operator, key_group, len(data))
        entry = SidecarEntry(
            path=self._paths.new_sidecar(operator, key_group, boundary, run_id),
            kind=kind,
            boundary=boundary,
            rows=rows,
            size_bytes=len(data),
            crc32c=crc32c(data),
            sha256=sha256_hex(data),
        )
        if len(data) <= min(inline_threshold, MAX_INLINE_BYTES):
            text = base64.b64encode(data).decode()
            return entry.model_copy(update={"path": None, "inline": text})
        self._ensure_namespace()
        key = self._paths.object(entry.path or "")
        with self._io("writing", key):
            self._blobs.put(key, data)
        return entry

    def read_sidecar(self, entry: SidecarEntry) -> bytes:
        """See `CheckpointStore.read_sidecar`."""
        data = self._raw(entry)
        issue = _byte_issue(entry, len(data), crc32c(data), sha256_hex(data))
        if issue:
            raise InvalidCheckpointError(
                f"{self._name(entry)}: {issue}. It was damaged or swapped after it was written: "
                "restore an older checkpoint, or copy the file back from where it is whole"
            )
        return data

    def _name(self, entry: SidecarEntry) -> str:
        if entry.path is None:
            return f"inline state in {self.url}"
        return self._where(self._paths.object(entry.path))

    def _raw(self, entry: SidecarEntry) -> bytes:
        if entry.size_bytes > self.max_state_data_bytes:
            raise CheckpointTooLargeError(
                f"{self._name(entry)}: {entry.size_bytes} bytes, {self.max_state_data_bytes} "
                "allowed (max_state_data_bytes): raise the limit"
            )
        if entry.path is None:
            return entry.inline_bytes()
        key = self._paths.object(entry.path)
        try:
            found = self._get(key, entry.size_bytes)
        except InvalidCheckpointError as e:
            raise InvalidCheckpointError(f"{e} (expected {entry.size_bytes} bytes)") from None
        if found is None:
            raise CheckpointNotFoundError(
                f"{self._where(key)} is missing, though a manifest lists it: restore an older "
                "checkpoint, or copy the file back"
            )
        return found[0]

    def save_state_data(
        self, id: int, chunks: Iterable[StateChunk]
    ) -> tuple[tuple[str, int, SidecarEntry], ...]:
        """See `CheckpointStore.save_state_data`."""
        held = list(chunks)
        groups = [(c.operator, c.key_group) for c in held]
        if len(set(groups)) != len(groups):
            raise InvalidCheckpointError(
                f"the state for checkpoint {id} has several chunks for one key group: give one"
            )
        ensure_budget(sum(len(c.data) for c in held), self.max_state_data_bytes, self.url)
        for chunk in held:
            self._check_chunk(chunk.operator, chunk.key_group, len(chunk.data))
        if held:
            self._ensure_namespace()
        written = []
        for c in held:
            entry = SidecarEntry(
                path=self._paths.saved_sidecar(c.operator, c.key_group, c.boundary, id),
                kind=c.kind,
                boundary=c.boundary,
                rows=c.rows,
                size_bytes=len(c.data),
                crc32c=crc32c(c.data),
                sha256=sha256_hex(c.data),
            )
            key = self._paths.object(entry.path or "")
            try:
                other = self._create(key, c.data)
            except InvalidCheckpointError:  # it is longer than ours
                other = b""
            if other is not None:
                raise CheckpointConflictError(
                    f"{self._where(key)} exists with other immutable content, which was left as "
                    "it is: take the next id (store.next_id()) for another checkpoint"
                )
            written.append((c.operator, c.key_group, entry))
        return tuple(written)

    def load_state_data(self, id: int) -> Iterator[StateChunk] | None:
        """See `CheckpointStore.load_state_data`."""
        manifest = self.load_by_id(id)
        if manifest is None or not manifest.operators:
            return None
        ensure_budget(manifest.total_size_bytes, self.max_state_data_bytes, self.url)
        return self._chunks(manifest, self.read_sidecar) if manifest.sidecars() else None

    def _peer(self, participant_id: int) -> CheckpointStore:
        if participant_id == self.participant_id:
            return self
        if not self._blobs.shared_root:
            return super()._peer(participant_id)
        peer = copy.copy(self)
        peer._participant_id = participant_id
        peer._paths = Layout(participant_id)
        peer._seen = {}
        return peer

    # -- validation ----------------------------------------------------------------------

    def validate_checkpoint(self, id: int, *, deep: bool = True) -> ValidationResult:
        """See `CheckpointStore.validate_checkpoint`."""
        return ValidationResult(id, self._examine(id, deep=deep, prepared=True).issues, deep)

    def _evidence(self) -> tuple[builtins.list[int], AbstractSet[int]]:
        found = self._inventory()
        published: set[int] = set()
        with contextlib.suppress(InvalidCheckpointError):
            pointer, _ = self._read_pointer()
            if pointer is not None:
                published.add(pointer.id)
        # A marker without a manifest: no step of the protocol leaves that behind, except where
        # an attempt was pruned (and its id noted as used) while somebody finalized it.
        lost = set(found.finals) - set(found.ids) - found.used
        sealed = {id for id in lost if not isinstance(self._witness(id), AbandonedMarker)}
        return sorted({*found.ids, *sealed, *published}), published

    def _witness(self, id: int) -> FinalMarker | AbandonedMarker | None:
        try:
            return self._read_marker(id)
        except InvalidCheckpointError:
            return None

    def _facts(self, id: int, *, deep: bool) -> CheckpointFacts:
        return self._examine(id, deep=deep, prepared=False)

    def _examine(self, id: int, *, deep: bool, prepared: bool) -> CheckpointFacts:
        issues: builtins.list[str] = []
        stored: Stored | None = None
        marker: FinalMarker | AbandonedMarker | None = None
        try:
            stored = self._read_manifest(id)
            if stored is None:
                issues.append(f"manifest not found for checkpoint {id}")
        except InvalidCheckpointError as e:
            issues.append(f"corrupt manifest: {e}")
        try:
            marker = self._read_marker(id)
        except InvalidCheckpointError as e:
            issues.append(f"corrupt .final marker: {e}")
        if stored is not None:
            issues += seal_issues(marker, stored.manifest, stored.data)
            try:
                deployment_id = self.deployment_id
            except InvalidCheckpointError:
                deployment_id = ""  # a damaged namespace.json takes no checkpoint with it
            issues += binding_issues(
                stored.manifest,
                id=id,
                participant_id=self.participant_id,
                key_group_count=self.key_group_count,
                deployment_id=deployment_id,
            )
        # No hashing of what cannot be used, nor of attempts that recovery passes over anyway.
        if stored is not None and not issues and (prepared or isinstance(marker, FinalMarker)):
            pieces = stored.manifest.pieces()
            found = self._each(lambda e: self._sidecar_issue(e[2], deep=deep), pieces)
            for (operator, groups, entry), issue in zip(pieces, found, strict=True):
                if issue:
                    name = entry.path or "inline state"
                    which = f"key group{'s' * (len(groups) > 1)} {number_ranges(groups)}"
                    issues.append(f"operator {operator!r}, {which}: {name}: {issue}")
        manifest = None if stored is None else stored.manifest
        if manifest is not None and isinstance(marker, FinalMarker):
            manifest = manifest.with_phase("finalized")
        return CheckpointFacts(id, manifest, marker, tuple(issues))

    def _sidecar_issue(self, entry: SidecarEntry, *, deep: bool) -> str | None:
        if entry.size_bytes > self.max_state_data_bytes:
            return f"{entry.size_bytes} bytes, {self.max_state_data_bytes} allowed"
        if entry.path is None:
            data = entry.inline_bytes()
            return _byte_issue(entry, len(data), crc32c(data), sha256_hex(data))
        key = self._paths.object(entry.path)
        try:
            if deep and entry.size_bytes <= _READ_WHOLE:
                found = self._get(key, entry.size_bytes)
                if found is None:
                    return "missing checkpoint state sidecar"
                data = found[0]
                return _byte_issue(entry, len(data), crc32c(data), sha256_hex(data))
            with self._io("reading", key):
                meta = self._blobs.head(key)
            if meta is None:
                return "missing checkpoint state sidecar"
            issue = _byte_issue(entry, meta.size, meta.crc32c, None)
            return issue or (self._hash_in_pieces(key, meta, entry) if deep else None)
        except InvalidCheckpointError as e:
            return str(e)

    def _hash_in_pieces(self, key: str, meta: BlobMeta, entry: SidecarEntry) -> str | None:
        import hashlib

        digest, at = hashlib.sha256(), 0
        while at < meta.size:
            try:
                with self._io("reading", key):
                    piece = self._blobs.get_range(key, at, at + _READ_PIECE, meta.version)
            except BlobConflict:
                return "changed while it was read"
            except CheckpointStorageError as e:
                if e.errno == errno.ENOENT:
                    return "missing checkpoint state sidecar"
                raise
            if not piece:
                return f"{at} bytes, expected {entry.size_bytes}"
            digest.update(piece)
            at += len(piece)
        return _byte_issue(entry, at, None, digest.hexdigest())

    # -- fencing -------------------------------------------------------------------------

    def _claims(self, start_after: int = 0) -> builtins.list[int]:
        prefix = self._paths.runs
        after = self._paths.run(start_after) if start_after else ""
        with self._io("listing", prefix):
            listed = self._blobs.list(prefix, start_after=after)
        return sorted(self._paths.parse_run(meta.key) for meta in listed)

    def _read_claim(self, generation: int) -> RunClaim:
        key = self._paths.run(generation)
        claim = self._read_record(RunClaim, key)
        if claim is None or claim.generation != generation:
            raise InvalidCheckpointError(
                f"{self._where(key)} does not hold the claim of generation {generation}: put the "
                "right object back"
            )
        return claim

    def check_generation(self, generation: int, run_id: str) -> None:
        """See `CheckpointStore.check_generation`. One listing of the younger claims."""
        younger = newer_generation(generation, self._claims(start_after=generation))
        if younger is not None:
            raise FencedError(
                f"run {run_id} (generation {generation}) has been superseded by generation "
                f"{younger} in {self.url}: stop it; nothing was written"
            )

    def claim_generation(self, run_id: str, *, restored_from: int | None = None) -> int:
        """See `CheckpointStore.claim_generation`."""
        self._ensure_namespace()
        while True:
            claimed = self._claims()
            held = self._each(self._read_claim, claimed)
            mine = max((c.generation for c in held if c.run_id == run_id), default=0)
            if mine:
                self.check_generation(mine, run_id)
                break
            mine = max(claimed, default=0) + 1
            record = RunClaim(
                generation=mine, run_id=run_id, claimed_ms=_now_ms(), restored_from=restored_from
            )
            if self._create(self._paths.run(mine), record.to_json()) is None:
                break
        self._give_up_older(mine, run_id)
        if restored_from is not None and self._is_going(restored_from):
            facts = self._retention_facts(self._inventory(), files=False)
            if not any(f.finalized and f.generation == mine for f in facts):
                raise CheckpointNotFoundError(
                    f"checkpoint {restored_from} of {self.url} was pruned while run {run_id} "
                    "restored it: start the run again, it then restores a younger one. (If that "
                    "prune was killed, `beam-ckpt gc` removes what it left)"
                )
        return mine

    def _give_up_older(self, generation: int, run_id: str) -> None:
        found = self._inventory()
        for id in reversed(found.ids):
            if id in found.finals:
                if isinstance(self._witness(id), AbandonedMarker):
                    continue
                # Below the newest recovery point a prune may have taken markers away; what is
                # older than that was given up by the run after it.
                break
            try:
                stored = self._read_manifest(id)
            except InvalidCheckpointError:
                continue  # no committer can seal it
            run = None if stored is None else stored.manifest.run
            if run is not None and run.generation < generation:
                self._abandon(id, f"generation {generation} (run {run_id})")

    # -- retention -----------------------------------------------------------------------

    def _retention_facts(self, found: _Inventory, *, files: bool) -> builtins.list[RetentionFacts]:
        """Gathers what pruning decides by; manifests are immutable, so each is read once.

        Args:
            found: The listing.
            files: Whether to tell the sidecars: then every manifest is read, else only those of
                which the listing does not tell enough.
        """
        noted = self._noted_facts(found)

        def versions_of(id: int) -> tuple[str, str]:
            final = found.finals.get(id)
            return found.manifests[id].version, final.version if final else ""

        known = {} if files else dict(noted)
        for id in found.ids:
            seen = self._seen.get(id)
            if seen is not None and seen[0] == versions_of(id):
                known[id] = seen[1]
        new = [id for id in found.ids if id not in known]
        read = self._each(lambda id: self._read_facts(id, noted.get(id)), new)
        for id, facts in zip(new, read, strict=True):
            if facts is None:
                continue  # pruned meanwhile
            known[id] = facts
            # (A marker that came since the listing is looked at again.)
            if facts.finalized <= (id in found.finals):
                self._seen[id] = (versions_of(id), facts)
        for id in set(self._seen) - set(found.manifests):
            del self._seen[id]
        return [known[id] for id in found.ids if id in known]

    def _read_facts(self, id: int, noted: RetentionFacts | None) -> RetentionFacts | None:
        """Reads the manifest, and the marker where no note tells it."""
        if noted is not None:
            found = self._read_manifest(id)
            if found is None:
                return None
            return replace(noted, sidecars=frozenset(found.manifest.sidecar_paths()))
        loaded = self._load(id)
        if loaded is None:
            return None
        manifest, marker = loaded[0].manifest, loaded[1]
        return RetentionFacts(
            id=id,
            epoch=manifest.epoch,
            timestamp_ms=manifest.timestamp_ms,
            finalized=isinstance(marker, FinalMarker),
            sidecars=frozenset(manifest.sidecar_paths()),
            generation=manifest.run.generation if manifest.run else 0,
        )

    def _noted_facts(self, found: _Inventory) -> Mapping[int, RetentionFacts]:
        """What the listing itself tells, by id: all but the sidecars."""
        facts = {}
        for id, meta in found.manifests.items():
            note, final = self._manifest_note(id, meta), found.finals.get(id)
            phase = "prepared" if final is None else read_marker_note(final, id, meta)
            if note is not None and phase is not None:
                facts[id] = RetentionFacts(
                    id=id,
                    epoch=note.epoch,
                    timestamp_ms=note.timestamp_ms,
                    finalized=phase == "final",
                    sidecars=None,
                    generation=note.generation,
                )
        return facts

    def _protected(self, facts: Iterable[RetentionFacts]) -> AbstractSet[int]:
        """What a prune must keep: tagged, restored by the newest run, the pointer's target."""
        keep = set(self.tags().values())
        claimed = self._claims()
        if claimed:
            claim = self._read_claim(claimed[-1])
            # Until the run has finalized one of its own, this is what a retry of it restores.
            own = any(f.finalized and f.generation == claim.generation for f in facts)
            if claim.restored_from is not None and not own:
                keep.add(claim.restored_from)
        return keep

    def prune(
        self, policy: RetentionPolicy, *, dry_run: bool = False, only: PruneReport | None = None
    ) -> PruneReport:
        """See `CheckpointStore.prune`."""
        now_ms = _now_ms()
        plan, found = self._plan(
            lambda facts, keep: plan_policy(facts, policy, protected=keep, now_ms=now_ms)
        )
        strays = self._stray_markers(plan, found)
        if only is not None:
            plan = plan.sparing({f.id for f in plan.doomed} - set(only.deleted))
            strays = [key for key in strays if key in only.markers]
        if not dry_run:
            plan = self._carry_out(plan, strays)
        return PruneReport(
            deleted=tuple(f.id for f in plan.doomed),
            kept=tuple(f.id for f in plan.kept),
            sidecars=plan.sidecars,
            dry_run=dry_run,
            markers=tuple(strays),
        )

    def prune_before(self, before_epoch: int) -> int:
        """See `CheckpointStore.prune_before`."""
        plan, found = self._plan(
            lambda facts, keep: plan_before(facts, before_epoch, protected=keep)
        )
        plan = self._carry_out(plan, self._stray_markers(plan, found))
        return len(plan.doomed)

    def _plan(
        self, decide: Callable[[Sequence[RetentionFacts], AbstractSet[int]], PrunePlan]
    ) -> tuple[PrunePlan, _Inventory]:
        """Decides on all checkpoints, before anything is deleted."""
        found = self._inventory()
        facts = self._retention_facts(found, files=False)
        pointer, _ = self._read_pointer()
        if pointer is not None and not any(f.id == pointer.id and f.finalized for f in facts):
            self._follow_moving(pointer)  # published since the listing, or it raises
        protected = set(self._protected(facts))
        if pointer is not None:
            protected.add(pointer.id)
        plan = decide(facts, protected)
        if plan.doomed:
            # A file goes with the last checkpoint that lists it, and any retained one may: who
            # lists what only its manifest can say. Each is read once, side by side.
            plan = decide(self._retention_facts(found, files=True), protected)
        return plan, found

    def delete_checkpoints(self, ids: AbstractSet[int]) -> PruneReport:
        """Deletes these checkpoints, and the files that no other one lists.

        As a prune does it: what is tagged by then, or what the newest run restored from, stays. So
        does the pointer's target.

        Args:
            ids: Finalized or not; those that are gone already do not matter.
        """
        pointer, _ = self._read_pointer()
        keep = set() if pointer is None else {pointer.id}
        plan = plan_these(self._retention_facts(self._inventory(), files=True), ids - keep)
        plan = self._carry_out(plan, [])
        return PruneReport(
            deleted=tuple(f.id for f in plan.doomed),
            kept=tuple(f.id for f in plan.kept),
            sidecars=plan.sidecars,
        )

    def _stray_markers(self, plan: PrunePlan, found: _Inventory) -> builtins.list[str]:
        # Below a younger recovery point a marker is evidence of nothing any more.
        newest = _newest(plan)
        finals = [id for id in found.finals if id not in found.manifests and id < newest]
        used = [id for id in found.used if id < newest]
        return sorted([*map(self._paths.final, finals), *map(self._paths.used, used)])

    def _carry_out(self, plan: PrunePlan, strays: Sequence[str]) -> PrunePlan:
        if plan.doomed:
            self._ensure_namespace()
            intents = self._paths.new_prune(plan.doomed_ranges())
            for key in intents:
                self._create(key, b"")
            plan = plan.sparing(self._protected(plan.doomed + plan.kept))
            # An attempt is decided before its files go: a late finalize must find out.
            attempts = [f.id for f in plan.doomed if not f.finalized]
            plan = plan.sparing({id for id in attempts if not self._abandon(id, "prune")})
            self._delete([self._paths.final(f.id) for f in plan.doomed if f.finalized])
            self._delete([self._paths.object(path) for path in plan.sidecars])
            going = [f.id for f in plan.doomed]
            for id in going:
                if id > _newest(plan):
                    self._create(self._paths.used(id), b"{}")
            self._delete([self._paths.manifest(id) for id in going])
            self._delete([self._paths.final(id) for id in going if id in attempts])
            self._delete(intents)
        self._delete(strays)
        return plan

    def _is_going(self, id: int) -> bool:
        """Whether a prune has taken a checkpoint, or may yet: asked by who has just named it."""
        # In this order: a prune removes its intent when all that it takes is gone.
        if any(id in going for _, going, _ in self._intents()):
            return True
        return self.final_marker(id) is None

    def _intents(self) -> builtins.list[tuple[BlobMeta, range, int]]:
        """Ids and start (wall-clock milliseconds) of the prunes under way, or killed."""
        prefix = self._paths.prunes
        with self._io("listing", prefix):
            listed = self._blobs.list(prefix)
        return [(meta, *self._paths.parse_prune(meta.key)) for meta in listed]

    # -- tags ----------------------------------------------------------------------------

    def tag(self, name: str, id: int) -> None:
        """See `CheckpointStore.tag`."""
        if not 1 <= len(name) <= 256 or not name.isprintable():
            raise InvalidCheckpointError(
                f"{name[:80]!r} is no tag: it needs 1 to 256 printable characters"
            )
        manifest = self.load_by_id(id)
        if manifest is None or manifest.durable_phase != "finalized":
            raise CheckpointNotFoundError(
                f"checkpoint {id} is not a finalized checkpoint of {self.url}: see `beam-ckpt ls`"
            )
        self._ensure_namespace()
        key = self._paths.tag(name)
        record = Tag(name=name, id=id, checkpoint_id=manifest.checkpoint_id)
        new = self._read_record(Tag, key) is None
        held = self._create(key, record.to_json())
        if held is not None:
            other = parse_record(Tag, held, where=self._where(key))
            raise CheckpointConflictError(
                f"tag {name!r} names checkpoint {other.id} already: untag it first, or take "
                "another name"
            )
        if self._is_going(id):
            if new:  # else it was given before, and that prune may have spared it for that
                self._delete([key])
            raise CheckpointNotFoundError(
                f"checkpoint {id} of {self.url} is being pruned: tag another one. (If that prune "
                "was killed, `beam-ckpt gc` removes what it left, and then this one can be tagged "
                "if it is still there)"
            )

    def untag(self, name: str) -> None:
        """See `CheckpointStore.untag`."""
        key = self._paths.tag(name)
        with self._io("reading", key):
            found = self._blobs.head(key)
        if found is None:
            raise CheckpointNotFoundError(f"{self.url} has no tag {name!r}: see `beam-ckpt ls`")
        self._delete([key])

    def move_tag(self, name: str, id: int) -> None:
        """Makes a tag name another checkpoint, in one step.

        Raises:
            CheckpointConflictError: Others are changing it.
            CheckpointNotFoundError: There is no such tag, or no such finalized checkpoint.
        """
        manifest = self.load_by_id(id)
        if manifest is None or manifest.durable_phase != "finalized":
            raise CheckpointNotFoundError(
                f"checkpoint {id} is not a finalized checkpoint of {self.url}: see `beam-ckpt ls`"
            )
        key = self._paths.tag(name)
        found = self._get(key, MAX_RECORD_BYTES)
        if found is None:
            raise CheckpointNotFoundError(f"{self.url} has no tag {name!r}: see `beam-ckpt ls`")
        record = Tag(name=name, id=id, checkpoint_id=manifest.checkpoint_id)
        if found[0] == record.to_json():
            return
        try:
            with self._io("writing", key):
                self._blobs.replace(key, record.to_json(), found[1].version)
        except BlobConflict:
            raise CheckpointConflictError(
                f"tag {name!r} of {self.url} was changed meanwhile: run this again"
            ) from None

    def tags(self) -> Mapping[str, int]:
        """See `CheckpointStore.tags`."""
        prefix = self._paths.tags
        with self._io("listing", prefix):
            listed = self._blobs.list(prefix)
        found = {}
        for meta in listed:
            record = self._read_record(Tag, meta.key)
            if record is None:
                continue  # untagged meanwhile
            if self._paths.tag(record.name) != meta.key:
                raise InvalidCheckpointError(
                    f"{self._where(meta.key)} holds the tag {record.name!r}: put it back under "
                    "its own name, or delete it"
                )
            found[record.name] = record.id
        return dict(sorted(found.items()))

    # -- garbage -------------------------------------------------------------------------

    def gc(
        self, *, grace_s: float = 86400.0, dry_run: bool = False, only: GcReport | None = None
    ) -> GcReport:
        """See `CheckpointStore.gc`."""
        # Files first, manifests second: what is published in between is then listed.
        prefix = self._paths.state
        with self._io("listing", prefix):
            files = self._blobs.list(prefix)
            temporaries = self._blobs.temporaries(grace_s)
        found = self._inventory()
        facts = self._retention_facts(found, files=True)
        finalized = [f for f in facts if f.finalized]
        latest = None if not finalized else self.load_by_id(max(f.id for f in finalized))
        claims = self._each(self._read_claim, self._claims())
        rules = GcFacts(
            generations={c.run_id: c.generation for c in claims},
            latest_id=latest.id if latest else 0,
            latest_watermark=latest.watermark if latest else None,
            latest_generation=latest.run.generation if latest and latest.run else 0,
            finalized_ms={f.id: f.timestamp_ms for f in finalized},
            now_ms=_now_ms(),
            grace_ms=int(grace_s * 1000),
        )
        listed = {self._paths.object(p) for f in facts for p in f.files()}
        deleted: builtins.list[Garbage] = []
        kept: builtins.list[Garbage] = []
        for meta in files:
            if meta.key in listed:
                continue
            name = self._paths.parse_sidecar(meta.key)
            goes, why = judge_unlisted(
                UnlistedSidecar(
                    meta.key, meta.size, name.boundary, name.run_id, name.saved_id, name.written_ms
                ),
                rules,
            )
            (deleted if goes else kept).append(Garbage(meta.key, meta.size, why))
        for id, meta in found.finals.items():
            if id not in found.manifests and latest is not None and id < latest.id:
                deleted.append(Garbage(meta.key, meta.size, "marks no checkpoint"))
        for meta, _, started_ms in self._intents():
            if started_ms <= rules.now_ms - rules.grace_ms:
                deleted.append(Garbage(meta.key, meta.size, "left by a prune that died"))
        for meta in temporaries:
            deleted.append(Garbage(meta.key, meta.size, "left by a writer that died"))
        if only is not None:
            listed = {g.key for g in only.deleted}
            kept += [
                replace(g, reason=f"{g.reason}, since") for g in deleted if g.key not in listed
            ]
            deleted = [g for g in deleted if g.key in listed]
        deleted.sort(key=lambda g: g.key)
        if not dry_run:
            self._delete([g.key for g in deleted])
        return GcReport(tuple(deleted), tuple(kept), dry_run)

    # -- repair --------------------------------------------------------------------------

    def repair_pointer(self, *, dry_run: bool = False, discard: bool = False) -> RecoveryReport:
        """See `CheckpointStore.repair_pointer`."""
        report = self.recover_latest_validated(deep=True)
        if report.chosen is None:
            if discard:
                if not dry_run:
                    self._delete([self._paths.latest])
                return report
            raise NoValidCheckpointError(
                f"{self.url} has no valid finalized checkpoint to point at "
                f"({report.examined} examined); the pointer was left as it is. See "
                "`beam-ckpt recover`",
                report,
            )
        if dry_run:
            return report
        self._ensure_namespace()
        stored = self._read_manifest(report.chosen.id)
        if stored is None:
            raise CheckpointNotFoundError(
                f"checkpoint {report.chosen.id} was pruned meanwhile: repair again"
            )
        target = Pointer(
            id=stored.manifest.id,
            checkpoint_id=stored.manifest.checkpoint_id,
            manifest_sha256=sha256_hex(stored.data),
        )
        key = self._paths.latest
        for _ in range(_CAS_ATTEMPTS):
            try:
                with self._io("reading", key):
                    meta = self._blobs.head(key)
            except InvalidCheckpointError:  # a symlink or the like
                self._delete([key])
                meta = None
            if meta is not None:
                with contextlib.suppress(InvalidCheckpointError):
                    if self._read_pointer()[0] == target:
                        return report
            try:
                with self._io("writing", key):
                    self._blobs.replace(key, target.to_json(), meta.version if meta else ABSENT)
                return report
            except BlobConflict:
                time.sleep(random.uniform(0, 0.032))
        raise IndeterminateError(
            errno.EAGAIN, f"{self._where(key)} is being written by others: repair again"
        )


def is_of(manifest: CheckpointManifest, stored: bytes) -> bool:
    """Whether stored bytes are those of a manifest, whichever zlib packed them."""
    try:
        return unpacked(stored, where="it") == manifest.to_json()
    except InvalidCheckpointError:
        return False


def _byte_issue(entry: SidecarEntry, size: int, crc: int | None, sha256: str | None) -> str | None:
    if size != entry.size_bytes:
        return f"{size} bytes, expected {entry.size_bytes}"
    if sha256 is not None and sha256 != entry.sha256:
        return f"state checksum mismatch: sha256 {sha256}, expected {entry.sha256}"
    if crc is not None and crc != entry.crc32c:
        return f"state checksum mismatch: crc32c {crc:08x}, expected {entry.crc32c:08x}"
    return None


def _of_group(key_group: int | None) -> str:
    return "shared by key groups" if key_group is None else f"key group {key_group}"


def _newest(plan: PrunePlan) -> int:
    return max((f.id for f in plan.kept if f.finalized), default=0)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
