"""Who wrote what is there? A pure decision, from the marks that every conditional write leaves.

A write of unknown outcome (its response was lost) is settled by reading the object back. Bytes
cannot settle it, since two writers may write equal ones; two marks in the object's metadata can:

* `TOKEN`: random, drawn once for a logical write and kept over its attempts;
* `REPLACED`: the version that the write expected to replace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from beam_ckpt.blobs._base import ABSENT

__all__ = ["REPLACED", "TOKEN", "Holder", "Verdict", "marks", "settle"]

TOKEN = "beam-ckpt-write"
REPLACED = "beam-ckpt-replaced"

Verdict = Literal["ours", "not_yet", "lost", "unknown"]


@dataclass(frozen=True, slots=True)
class Holder:
    """What is found under a key.

    Attributes:
        version: Of the object.
        marks: Its user metadata.
    """

    version: str
    marks: Mapping[str, str]


def marks(token: str, expected: str | None) -> dict[str, str]:
    """Returns the metadata of a write; `expected` is `None` for an unconditional one."""
    replaced = "any" if expected is None else (expected or "absent")
    return {TOKEN: token, REPLACED: replaced}


def settle(holder: Holder | None, *, token: str, expected: str, in_doubt: bool) -> Verdict:
    """Decides the outcome of a conditional write whose precondition was refused, or in doubt.

    Args:
        holder: What is there now; `None` when nothing is.
        token: Of the write.
        expected: The version that it was to replace; `ABSENT` to create.
        in_doubt: An attempt of ours may have been carried out without our hearing of it.

    Returns:
        `ours`: it was carried out, and its object is there. `not_yet`: it was not, so far, and
        another attempt may succeed (an attempt still on its way may land, too). `lost`: it was
        not, and never will be. `unknown`: it may have been, and been overwritten or deleted.
    """
    if holder is None:
        if expected == ABSENT:
            return "not_yet"
        return "unknown" if in_doubt else "lost"
    if holder.marks.get(TOKEN) == token:
        return "ours"
    if holder.version == expected:
        return "not_yet"
    if in_doubt and holder.marks.get(REPLACED) != marks(token, expected)[REPLACED]:
        # Not the direct successor of what was expected: ours may have been between the two.
        return "unknown"
    return "lost"
