"""Objects in the memory of this process, shared by name: for tests and trials.

A memory store pickles by name: unpickled in the same process it is the same store; in another
process it is another, empty one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from beam_ckpt.blobs._base import (
    ABSENT,
    BlobConflict,
    BlobExists,
    BlobMeta,
    Blobs,
    BlobTooLarge,
    check_key,
    crc32c,
)

__all__ = ["MemoryBlobs"]


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    version: str
    crc32c: int
    note: str

    def meta(self, key: str) -> BlobMeta:
        return BlobMeta(key, len(self.data), self.version, self.crc32c, self.note)


_LOCK = threading.RLock()
_STORES: dict[str, dict[str, _Object]] = {}
_VERSIONS = itertools.count(1)


class MemoryBlobs(Blobs):
    """The objects of `memory://name`."""

    def __init__(self, name: str) -> None:
        """Names the store; it comes into being with its first object."""
        self._name = name

    @property
    def url(self) -> str:
        """`memory://name`."""
        return f"memory://{self._name}"

    def _write(self, key: str, data: bytes, note: str = "") -> BlobMeta:
        held = bytes(data)
        entry = _Object(held, str(next(_VERSIONS)), crc32c(held), note)
        _STORES.setdefault(self._name, {})[check_key(key)] = entry
        return entry.meta(key)

    def _find(self, key: str) -> _Object | None:
        return _STORES.get(self._name, {}).get(check_key(key))

    def put(self, key: str, data: bytes) -> BlobMeta:
        """See `Blobs.put`."""
        with _LOCK:
            return self._write(key, data)

    def put_if_absent(self, key: str, data: bytes, note: str = "") -> BlobMeta:
        """See `Blobs.put_if_absent`."""
        with _LOCK:
            if self._find(key) is not None:
                raise BlobExists(key)
            return self._write(key, data, note)

    def replace(self, key: str, data: bytes, expected: str) -> BlobMeta:
        """See `Blobs.replace`."""
        with _LOCK:
            entry = self._find(key)
            if (ABSENT if entry is None else entry.version) != expected:
                raise BlobConflict(key)
            return self._write(key, data)

    def get(self, key: str, *, max_bytes: int | None = None) -> tuple[bytes, BlobMeta]:
        """See `Blobs.get`."""
        with _LOCK:
            entry = self._find(key)
        if entry is None:
            raise FileNotFoundError(f"{self.url}/{key}")
        if max_bytes is not None and len(entry.data) > max_bytes:
            raise BlobTooLarge(key, len(entry.data), max_bytes)
        return entry.data, replace(entry.meta(key), note="")

    def get_range(self, key: str, start: int, end: int, version: str | None = None) -> bytes:
        """See `Blobs.get_range`."""
        data, meta = self.get(key)
        if version is not None and meta.version != version:
            raise BlobConflict(key)
        return data[start:end]

    def head(self, key: str) -> BlobMeta | None:
        """See `Blobs.head`."""
        with _LOCK:
            entry = self._find(key)
        if entry is None:
            return None
        return entry.meta(key)

    def list(self, prefix: str, start_after: str = "") -> Sequence[BlobMeta]:
        """See `Blobs.list`."""
        with _LOCK:
            found = [
                entry.meta(key)
                for key, entry in _STORES.get(self._name, {}).items()
                if key.startswith(prefix) and key > start_after
            ]
        return sorted(found, key=lambda meta: meta.key)

    def delete_many(self, keys: Iterable[str]) -> None:
        """See `Blobs.delete_many`."""
        with _LOCK:
            held = _STORES.get(self._name, {})
            for key in keys:
                held.pop(check_key(key), None)

    def exists(self) -> bool:
        """Whether the store holds an object."""
        with _LOCK:
            return bool(_STORES.get(self._name))
