"""Does a store enforce what its protocol promises? A probe that tries, and cleans up.

Object stores that speak S3 or Azure's protocol differ in what they do with a condition that they
do not know: many ignore it, and overwrite. The probe writes to names of its own and looks.

It cannot show that condition and write are one step under a race. So it is only asked of
protocols that carry the condition inside the write request, where the server is the one to
decide; a client that looks first and then writes (`pipe_file(mode="create")` of local files,
memory, SFTP, ...) is refused without a probe.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Protocol

from beam_ckpt.blobs._base import ABSENT
from beam_ckpt.blobs._settle import TOKEN, Holder, marks

__all__ = ["PROBE_NAME", "ConditionalWrites", "PreconditionFailed", "why_not_writable"]

PROBE_NAME = ".beam-ckpt-probe-"
"""What names of the probe's objects begin with; listings hide them."""


class PreconditionFailed(Exception):
    """The store refused a write because of its condition."""


class ConditionalWrites(Protocol):
    """One attempt at a time, at full paths. What a probe and a backend need of a protocol."""

    def write(self, path: str, data: bytes, marks: dict[str, str], expected: str | None) -> str:
        """Writes on condition that the version is `expected`; returns the new version.

        Raises:
            PreconditionFailed: The version is another.
        """

    def holder(self, path: str) -> Holder | None:
        """Returns version and user metadata, or `None` when there is no such object."""

    def read(self, path: str) -> bytes:
        """Reads a small object."""

    def delete(self, paths: Sequence[str]) -> None:
        """Deletes objects; absent ones are fine."""


def why_not_writable(store: ConditionalWrites, root: str) -> str | None:
    """Tries create-if-absent and compare-and-swap under `root`; nothing is left behind.

    Args:
        store: To try.
        root: Path of the store, under which two objects are written and deleted.

    Returns:
        Why the store must not be written to, or `None` when it may.

    Raises:
        OSError: The store cannot be reached, or denies access.
    """
    name = f"{root}/{PROBE_NAME}{secrets.token_hex(8)}"
    held, free = f"{name}-a", f"{name}-b"
    try:
        return _try(store, held, free)
    finally:
        store.delete([held, free])


def _refused(store: ConditionalWrites, path: str, data: bytes, expected: str) -> bool:
    try:
        store.write(path, data, marks(secrets.token_hex(8), expected), expected)
    except PreconditionFailed:
        return True
    return False


def _try(store: ConditionalWrites, held: str, free: str) -> str | None:
    token = secrets.token_hex(8)
    first = store.write(held, b"first", marks(token, ABSENT), ABSENT)
    holder = store.holder(held)
    if holder is None:
        return "an object that was just written is not seen"
    if holder.version != first or holder.marks.get(TOKEN) != token:
        return "an object's version and metadata do not come back as they were written"
    if not _refused(store, held, b"second", ABSENT) or store.read(held) != b"first":
        return "create-if-absent is not enforced: an existing object was overwritten"
    second = store.write(held, b"second", marks(token, first), first)
    if second == first:
        return "an object's version does not change when it is written"
    if not _refused(store, held, b"third", first) or store.read(held) != b"second":
        return "compare-and-swap is not enforced: a write with a stale version went through"
    if not _refused(store, free, b"fourth", second) or store.holder(free) is not None:
        return "compare-and-swap is not enforced: a write created an object it was to replace"
    store.delete([held])
    if store.holder(held) is not None:
        return "an object that was just deleted is still seen"
    return None
