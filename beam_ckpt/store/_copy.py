"""Relocation: checkpoints from one store to another, as they are, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from beam_ckpt.blobs import BlobExists, BlobTooLarge
from beam_ckpt.errors import (
    CheckpointConflictError,
    CheckpointNotFoundError,
    InvalidCheckpointError,
    StoreUrlError,
)
from beam_ckpt.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_RECORD_BYTES,
    FinalMarker,
    Pointer,
    SidecarEntry,
    sha256_hex,
)
from beam_ckpt.store._base import CheckpointStore
from beam_ckpt.store._blobstore import BlobCheckpointStore, Stored, is_of
from beam_ckpt.store._notes import manifest_note, marker_note

__all__ = ["CopyReport", "copy"]


@dataclass(frozen=True)
class CopyReport:
    """What a copy did.

    Attributes:
        copied: Ids of the checkpoints that were copied, ascending.
        present: Ids of those that were there already.
        sidecars: Files written.
        bytes: Their sum.
    """

    copied: tuple[int, ...]
    present: tuple[int, ...]
    sidecars: int
    bytes: int


def copy(
    src: CheckpointStore,
    dst: CheckpointStore,
    ids: Iterable[int] | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> CopyReport:
    """Copies finalized checkpoints; the copies validate and restore with the original gone.

    Every byte is verified on the way. Files come before the manifest that lists them, oldest
    checkpoint first, and the pointer last: a copy that is killed is taken up again by running
    it once more. Generation claims and the tags of what is copied come along.

    Args:
        src: From where.
        dst: To where: a new store, which becomes one of the same deployment, or one of it.
        ids: Which; all finalized ones without it.
        progress: Called with (bytes done, bytes in all) after each file.

    Raises:
        CheckpointNotFoundError: One of `ids` is not a finalized checkpoint of `src`.
        CheckpointConflictError: `dst` belongs to another deployment, or holds other content
            under one of the ids.
        InvalidCheckpointError: A checkpoint of `src` is damaged; those before it were copied.
    """
    source, target = _over_blobs(src), _over_blobs(dst)
    if (source.url, source.participant_id) == (target.url, target.participant_id):
        raise StoreUrlError(f"{source.url} cannot be copied onto itself: give another store")
    if source.participant_id != target.participant_id:
        raise InvalidCheckpointError(
            f"checkpoints of participant {source.participant_id} cannot become those of "
            f"participant {target.participant_id}: open both stores with the same participant_id"
        )
    chosen = _choose(source, ids)
    _adopt(source, target)
    total = sum(e.size_bytes for _, stored, _ in chosen for e in _files(stored.manifest.sidecars()))
    done = written = size = 0
    copied: list[int] = []
    present: list[int] = []
    for id, stored, marker in chosen:
        for entry in _files(stored.manifest.sidecars()):
            if _copy_sidecar(source, target, entry):
                written += 1
                size += entry.size_bytes
            done += entry.size_bytes
            if progress is not None:
                progress(done, total)
        new, sealed = _create_manifest(target, id, stored)
        marker = marker.model_copy(update={"manifest_sha256": sha256_hex(sealed)})
        note = marker_note(marker, sealed)
        new |= _create(target, target._paths.final(id), marker.to_json(), note)
        (copied if new else present).append(id)
    _restore_swept(source, target, [stored for _, stored, _ in chosen])
    for name, id in source.tags().items():
        if any(id == c[0] for c in chosen):
            target.tag(name, id)
    if chosen:
        target._publish(
            Pointer(
                id=marker.id,
                checkpoint_id=marker.checkpoint_id,
                manifest_sha256=marker.manifest_sha256,
            )
        )
    return CopyReport(tuple(copied), tuple(present), written, size)


def _over_blobs(store: CheckpointStore) -> BlobCheckpointStore:
    if not isinstance(store, BlobCheckpointStore):
        raise TypeError(f"{store!r} does not stand on blobs: copy it by its own means")
    return store


def _files(entries: Iterable[tuple[str, int, SidecarEntry]]) -> list[SidecarEntry]:
    return list({e.path: e for _, _, e in entries if e.path is not None}.values())


def _choose(
    source: BlobCheckpointStore, ids: Iterable[int] | None
) -> list[tuple[int, Stored, FinalMarker]]:
    wanted = source.list_ids() if ids is None else sorted(set(ids))
    chosen = []
    for id in wanted:
        found = source._load(id)
        if found is not None and isinstance(found[1], FinalMarker):
            chosen.append((id, found[0], found[1]))
        elif ids is not None:
            raise CheckpointNotFoundError(
                f"checkpoint {id} is not a finalized checkpoint of {source.url}: see `beam-ckpt ls`"
            )
    return chosen


def _adopt(source: BlobCheckpointStore, target: BlobCheckpointStore) -> None:
    """Makes the target a store of the same deployment, with the same fence."""
    with target._io("writing to", ""):
        target.blobs.require_writable()
    key = source._paths.namespace
    found = source._get(key, MAX_RECORD_BYTES)
    if found is not None and not target.deployment_id:
        _create(target, key, found[0])
    target._ensure_namespace()
    if target.deployment_id != source.deployment_id:
        raise CheckpointConflictError(
            f"{target.url} is a store of deployment {target.deployment_id}, {source.url} of "
            f"{source.deployment_id}: copy into an empty place"
        )
    for generation in source._claims():
        name = source._paths.run(generation)
        claim = source._get(name, MAX_RECORD_BYTES)
        if claim is not None:
            with target._io("writing", name):
                try:
                    target.blobs.put_if_absent(name, claim[0])
                except BlobExists:
                    continue  # its own history goes on


def _copy_sidecar(
    source: BlobCheckpointStore, target: BlobCheckpointStore, entry: SidecarEntry
) -> bool:
    issue = target._sidecar_issue(entry, deep=True)
    if issue is None:
        return False
    data = source.read_sidecar(entry)
    return _create(target, target._paths.object(entry.path or ""), data)


def _restore_swept(
    source: BlobCheckpointStore, target: BlobCheckpointStore, copied: Iterable[Stored]
) -> None:
    """Copies again what a `gc` at the target took before a manifest there listed it.

    One listing. By the names that they keep, copied files are older than any grace period.
    """
    prefix = target._paths.state
    with target._io("listing", prefix):
        there = {meta.key for meta in target.blobs.list(prefix)}
    for stored in copied:
        for entry in _files(stored.manifest.sidecars()):
            if target._paths.object(entry.path or "") not in there:
                _copy_sidecar(source, target, entry)


def _create_manifest(target: BlobCheckpointStore, id: int, stored: Stored) -> tuple[bool, bytes]:
    """Returns whether it was not there, and its bytes there, which another zlib may have packed."""
    key = target._paths.manifest(id)
    note = manifest_note(stored.manifest, stored.data)
    try:
        return _create(target, key, stored.data, note), stored.data
    except CheckpointConflictError:
        held = target._get(key, MAX_MANIFEST_BYTES)
        if held is None or not is_of(stored.manifest, held[0]):
            raise
        return False, held[0]


def _create(target: BlobCheckpointStore, key: str, data: bytes, note: str = "") -> bool:
    with target._io("writing", key):
        try:
            target.blobs.put_if_absent(key, data, note)
        except BlobExists:
            try:
                held = target.blobs.get(key, max_bytes=len(data))[0]
            except BlobTooLarge:  # it is longer than ours
                held = None
            if held != data:
                raise CheckpointConflictError(
                    f"{target._where(key)} exists with other content, which was left as it is: "
                    "copy into an empty place, or restore from this one"
                ) from None
            return False
    return True
