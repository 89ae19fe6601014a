"""Blob primitives, one private file per backend; `open_blobs` picks by URL.

`gs://` needs `_gcs.py`, any other fsspec URL `_fsspec.py`: both are imported only when asked
for, since they pull in their clients.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from beam_ckpt.blobs._base import (
    ABSENT,
    BlobConflict,
    BlobExists,
    BlobIndeterminate,
    BlobInvalid,
    BlobMeta,
    Blobs,
    BlobTooLarge,
)
from beam_ckpt.errors import StoreUrlError

__all__ = [
    "ABSENT",
    "BlobConflict",
    "BlobExists",
    "BlobIndeterminate",
    "BlobInvalid",
    "BlobMeta",
    "BlobTooLarge",
    "Blobs",
    "open_blobs",
]


def open_blobs(url_or_path: str | os.PathLike[str], **storage_options: object) -> Blobs:
    """Returns the blobs at a URL or local path; nothing is read or written yet.

    Args:
        url_or_path: A path or `file://` (local files), `memory://name`, `gs://bucket/prefix`,
            or any other fsspec URL.
        **storage_options: For the backend's client (`token=`, `endpoint_url=`, ...). Local
            files and memory have none.

    Raises:
        StoreUrlError: The URL is malformed or its scheme unknown.
    """
    text = os.fspath(url_or_path)
    if not isinstance(text, str) or not text.strip() or "\x00" in text:
        raise StoreUrlError(
            f"{text!r} is not a store: give a local path, file://, memory://name or "
            "gs://bucket/prefix"
        )
    scheme = text.split("://", 1)[0].lower() if "://" in text else "file"
    if scheme in ("file", "local", "memory") and storage_options:
        raise StoreUrlError(
            f"{text!r} takes no storage options; {', '.join(sorted(storage_options))} given: "
            "remove them, or check the scheme of the URL"
        )
    if scheme in ("file", "local"):
        from beam_ckpt.blobs._local import LocalBlobs

        path = text.split("://", 1)[1] if "://" in text else text
        if not path:
            raise StoreUrlError(f"{text!r} has no path: write file:///absolute/path")
        return LocalBlobs(path)
    if scheme == "memory":
        from beam_ckpt.blobs._memory import MemoryBlobs

        name = text.split("://", 1)[1].strip("/")
        if not name:
            raise StoreUrlError("memory:// needs a name, which its stores share: memory://name")
        return MemoryBlobs(name)
    if scheme in ("gs", "gcs"):
        from beam_ckpt.blobs._gcs import GcsBlobs

        if not urlsplit(text).netloc:
            raise StoreUrlError(f"{text!r} has no bucket: write gs://bucket/prefix")
        return GcsBlobs(text, **storage_options)
    from beam_ckpt.blobs._fsspec import FsspecBlobs

    return FsspecBlobs(text, **storage_options)
