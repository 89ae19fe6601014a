"""What a listing tells of a manifest and its marker, so that they need not be read.

Object stores keep some text beside an object and show it in listings, a thousand objects a
request. A note is a hint: it is believed only where it names the id under which it is found and
the checksum that the storage has of the bytes beside it. Whatever was overwritten, swapped or
damaged, or comes from a tool that drops notes, is read instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from beam_ckpt.blobs import BlobMeta
from beam_ckpt.blobs._base import crc32c
from beam_ckpt.manifest import AbandonedMarker, CheckpointManifest, FinalMarker

__all__ = ["ManifestNote", "manifest_note", "marker_note", "read_manifest_note", "read_marker_note"]

_MANIFEST = re.compile(r"manifest 2" + r" ([0-9]{1,20})" * 7)
_MARKER = re.compile(r"(final|abandoned) 2" + r" ([0-9]{1,20})" * 3)


@dataclass(frozen=True, slots=True)
class ManifestNote:
    """What a listing tells of a manifest.

    Attributes:
        participant_id: As in the manifest.
        key_group_count: As in the manifest.
        epoch: As in the manifest.
        timestamp_ms: As in the manifest.
        generation: Of the run that wrote it; 0 for none.
    """

    participant_id: int
    key_group_count: int
    epoch: int
    timestamp_ms: int
    generation: int


def manifest_note(manifest: CheckpointManifest, data: bytes) -> str:
    """Returns the note to keep beside a manifest, whose bytes are `data`."""
    return (
        f"manifest 2 {manifest.id} {manifest.participant_id} {manifest.key_group_count} "
        f"{manifest.epoch} {manifest.timestamp_ms} "
        f"{manifest.run.generation if manifest.run else 0} {crc32c(data)}"
    )


def marker_note(marker: FinalMarker | AbandonedMarker, sealed: bytes = b"") -> str:
    """Returns the note to keep beside a marker; `sealed` are the bytes of its manifest."""
    kind = "final" if isinstance(marker, FinalMarker) else "abandoned"
    return f"{kind} 2 {marker.id} {crc32c(sealed)} {crc32c(marker.to_json())}"


def read_manifest_note(meta: BlobMeta, id: int) -> ManifestNote | None:
    """Returns what the note beside manifest `id` says, if it is to be believed."""
    found = _MANIFEST.fullmatch(meta.note)
    if found is None:
        return None
    named, participant, groups, epoch, timestamp_ms, generation, crc = map(int, found.groups())
    if (named, crc) != (id, meta.crc32c):
        return None
    return ManifestNote(participant, groups, epoch, timestamp_ms, generation)


def read_marker_note(
    meta: BlobMeta, id: int, manifest: BlobMeta
) -> Literal["final", "abandoned"] | None:
    """Returns what the note beside marker `id` says, if it is to be believed."""
    found = _MARKER.fullmatch(meta.note)
    if found is None:
        return None
    named, sealed, crc = map(int, found.groups()[1:])
    if (named, crc) != (id, meta.crc32c):
        return None
    if found[1] == "abandoned":
        return "abandoned"
    return "final" if sealed == manifest.crc32c else None
