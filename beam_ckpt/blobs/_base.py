"""The blob primitives that a checkpoint store stands on: one small class per backend.

A backend is correct when these hold, whatever the number of processes and hosts:

* an object is seen whole or not at all, and is durable when a write returns;
* `put_if_absent` has exactly one winner per key; a caller whose own earlier attempt won
  (lost response) is told that it won;
* `replace` succeeds only where the object's version is the expected one;
* `list`, `get` and `head` see every write that returned before they began (no caches).

Instances are picklable (configuration only) and open their clients lazily, once per process,
so that they may be shipped to workers and used after a fork. Keys are relative POSIX paths.

The idea of one small abstract class with private files per backend is zarr-python's
`zarr.abc.store.Store`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "ABSENT",
    "BlobConflict",
    "BlobExists",
    "BlobIndeterminate",
    "BlobInvalid",
    "BlobMeta",
    "BlobTooLarge",
    "Blobs",
    "check_key",
    "crc32c",
]

ABSENT = ""
"""The version of an object that does not exist: `replace(key, data, ABSENT)` creates it."""


def crc32c(data: bytes) -> int:
    """Returns the CRC-32C (Castagnoli) of `data`, as object stores keep it."""
    import google_crc32c  # lazily: only what reads or writes state needs it

    return int(google_crc32c.value(data))


def check_key(key: str) -> str:
    """Returns `key` when it is a relative POSIX path without empty, `.` or `..` segments.

    Raises:
        ValueError: It is not; nothing was read or written.
    """
    if not key or "\x00" in key or "\\" in key or any(s in ("", ".", "..") for s in key.split("/")):
        raise ValueError(f"{key!r} is not a relative path inside the store")
    return key


@dataclass(frozen=True, slots=True)
class BlobMeta:
    """What is known of an object without reading it.

    Attributes:
        key: Path relative to the root of the store.
        size: Bytes.
        version: Opaque; changes with every write of the object. Never `ABSENT`.
        crc32c: Of the whole object, where the backend keeps it; else `None`.
        note: As given to `put_if_absent`, where the backend keeps notes; `get` returns none.
    """

    key: str
    size: int
    version: str
    crc32c: int | None = None
    note: str = ""


class BlobExists(Exception):
    """`put_if_absent` lost: another writer's object is there. `args[0]` is the key."""


class BlobConflict(Exception):
    """The object's version is not the expected one. `args[0]` is the key."""


class BlobIndeterminate(Exception):
    """The outcome of a write is not known after the retry budget; it may still land."""


class BlobInvalid(Exception):
    """What is there cannot be an object of a store: a symlink, a device, a checksum that lies.

    Attributes:
        key: The object.
        reason: What was found.
    """

    def __init__(self, key: str, reason: str) -> None:
        """Names the object and what was found."""
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        """`key: reason`."""
        return f"{self.key}: {self.reason}"


class BlobTooLarge(Exception):
    """The object is larger than the caller's bound; nothing beyond the bound was read.

    Attributes:
        key: The object.
        size: Bytes found (at least, where the backend cannot tell).
        limit: Bytes allowed.
    """

    def __init__(self, key: str, size: int, limit: int) -> None:
        """Names the object, its size and the bound."""
        super().__init__(key, size, limit)
        self.key = key
        self.size = size
        self.limit = limit

    def __str__(self) -> str:
        """`key: size bytes, limit bytes allowed`."""
        return f"{self.key}: {self.size} bytes, {self.limit} allowed"


class Blobs(ABC):
    """Objects under one root. See the module's docstring for what a backend must guarantee.

    Errors: the `Blob*` exceptions above, `FileNotFoundError` for an absent object on `get` and
    `get_range`, and otherwise an `OSError` whose `errno` says why (`EACCES` for missing
    credentials or permissions, `ENOENT` for a missing bucket, `ENOSPC`, `EIO`, ...) and whose
    text holds neither credentials nor signed URLs.
    """

    #: Whether other machines that open the same URL see the same objects.
    shared_root: bool = True

    @property
    @abstractmethod
    def url(self) -> str:
        """Where the objects are, without credentials: for messages and lineage."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> BlobMeta:
        """Writes an object under a name that only this caller uses; safe to repeat."""

    @abstractmethod
    def put_if_absent(self, key: str, data: bytes, note: str = "") -> BlobMeta:
        """Creates an object.

        Args:
            key: Its name.
            data: Its content.
            note: Some hundred bytes of ASCII that listings show. It is a hint that a backend
                need not keep, and that is gone when the object is written anew.

        Raises:
            BlobExists: Somebody else's object is there.
            BlobIndeterminate: Not known.
        """

    @abstractmethod
    def replace(self, key: str, data: bytes, expected: str) -> BlobMeta:
        """Writes an object whose version is `expected` (`ABSENT`: that does not exist).

        Raises:
            BlobConflict: Its version is another.
            BlobIndeterminate: Not known.
        """

    @abstractmethod
    def get(self, key: str, *, max_bytes: int | None = None) -> tuple[bytes, BlobMeta]:
        """Reads a whole object; body and metadata are of the same version.

        Raises:
            FileNotFoundError: There is none.
            BlobTooLarge: It is larger than `max_bytes`; its body was not read beyond it.
            BlobInvalid: No regular object, or its checksum does not match.
        """

    @abstractmethod
    def get_range(self, key: str, start: int, end: int, version: str | None = None) -> bytes:
        """Reads bytes `[start, end)`; fewer where the object ends, none beyond it.

        Raises:
            FileNotFoundError: There is no such object.
            BlobConflict: It is not of the given version any more.
        """

    @abstractmethod
    def head(self, key: str) -> BlobMeta | None:
        """Returns an object's metadata, or `None` when there is no such object."""

    @abstractmethod
    def list(self, prefix: str, start_after: str = "") -> Sequence[BlobMeta]:
        """Lists all objects whose key starts with `prefix` and is greater than `start_after`.

        Flat, sorted by key, never cached. Temporary and lock files of the backend are hidden.
        """

    @abstractmethod
    def delete_many(self, keys: Iterable[str]) -> None:
        """Deletes objects, in batches where the backend has them; absent ones are fine."""

    def exists(self) -> bool:
        """Whether the root is there. Object stores have no root: a listing that works is one."""
        self.list("namespace.json")
        return True

    def require_writable(self) -> None:  # noqa: B027 (an optional hook)
        """Refuses a root that cannot be written safely. Called before the first write.

        A backend of unknown capabilities probes here (see `beam_ckpt.blobs._probes`); this
        default trusts the backend.

        Raises:
            StoreUrlError: With the reason.
            OSError: The probe could not be carried out.
        """

    def odd_entries(self, prefix: str) -> Sequence[str]:
        """Names directly under `prefix` that no object can have: directories, symlinks, devices.

        Only file systems have them.
        """
        return []

    def temporaries(self, min_age: float) -> Sequence[BlobMeta]:
        """Leftovers of writers that died, older than `min_age` seconds; for `delete_many`."""
        return []
