"""From one checkpoint to the next: which sidecars a key group consists of. Pure functions.

A manifest is self-contained: per operator and key group it lists its chain, the newest full
sidecar and the deltas after it. A writer says of each new sidecar how much of the chain stays
beneath it, so that whoever publishes needs no coordination with it.

Chains are kept short the way a log-structured merge tree keeps its runs few (O'Neil et al., 1996):
a new delta swallows those before it that are no larger than what it has become, so that each delta
is larger than all newer ones together, and a row is written a logarithmic number of times before
it comes into a base.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.manifest import (
    CheckpointManifest,
    OperatorSnapshotEntry,
    OperatorSpec,
    PartitionSnapshotEntry,
    SidecarEntry,
)

__all__ = [
    "MAX_INLINE",
    "NewSidecar",
    "files_to_keep",
    "inline_over",
    "next_operators",
    "stands_on",
]

_DELTAS_OF_BASE = 0.4
"""Deltas above this part of their base become a new base.

What a new base replaces stays in the store as long as a retained checkpoint lists it, so at worst
both bases and all deltas are there: 2.4 times the state, and 1.4 times as a rule.
"""


MAX_INLINE = 1024 * 1024
"""Bytes of state that a manifest holds itself; what is over it is written as files.

Every manifest is written anew, so that what is in it costs its bytes with each checkpoint.
"""


@dataclass(frozen=True, slots=True)
class NewSidecar:
    """A sidecar that no manifest lists yet.

    Attributes:
        operator: The operator's uid.
        key_group: Its key group.
        sequence: Ascends with every sidecar that was written for the key group in a run.
        entry: Where it is and what it holds.
        keeps: How many of the files that the key group had stay, from the oldest on; the rest is
            in this one.
        after: SHA-256 of the last file that stays, empty where none does.
    """

    operator: str
    key_group: int
    sequence: int
    entry: SidecarEntry
    keeps: int = 0
    after: str = ""


def files_to_keep(chain: Sequence[SidecarEntry], new_bytes: int, max_files: int) -> int:
    """Returns how many files of a chain stay beneath a new delta.

    The others are merged with it: into a bigger delta, or, when none stays, into a new base.

    Args:
        chain: The key group's files, oldest first.
        new_bytes: Size of the delta.
        max_files: How many files the chain may have with the new one, at least 1; a base of several
            files counts as one.
    """
    pages = sum(entry.kind == "full" for entry in chain)
    sizes = [entry.size_bytes for entry in chain]
    deltas, base = sum(sizes[pages:]) + new_bytes, sum(sizes[:pages])
    if max_files == 1 or deltas > base * _DELTAS_OF_BASE:
        return 0
    keep, merged = len(chain), new_bytes
    while keep > pages and (sizes[keep - 1] <= merged or keep - pages > max_files - 2):
        keep -= 1
        merged += sizes[keep]
    return keep


def next_operators(
    base: Mapping[str, OperatorSnapshotEntry],
    uids: Iterable[str],
    new: Iterable[NewSidecar],
    epoch: int,
) -> dict[str, OperatorSnapshotEntry]:
    """Returns the operators of the next manifest.

    Args:
        base: Those of the manifest before it.
        uids: All operators of the pipeline; each has an entry, be it empty.
        new: What was written since, in any order.
        epoch: Of the next checkpoint; stamped on what is listed for the first time.

    Raises:
        InvalidCheckpointError: A new sidecar stands on files that its key group does not have.
    """
    groups: dict[str, dict[int, list[SidecarEntry]]] = {uid: {} for uid in uids}
    for uid, operator in base.items():
        groups[uid] = {p.partition_id: list(p.sidecars) for p in operator.partitions}
    for sidecar in sorted(new, key=lambda s: (s.operator, s.key_group, s.sequence)):
        chain = groups.setdefault(sidecar.operator, {}).setdefault(sidecar.key_group, [])
        on = chain[sidecar.keeps - 1 : sidecar.keeps]
        if sidecar.keeps and [entry.sha256 for entry in on] != [sidecar.after]:
            raise InvalidCheckpointError(
                f"operator {sidecar.operator!r}, key group {sidecar.key_group}: a new sidecar, "
                f"number {sidecar.sequence} of this run, stands on file {sidecar.keeps} of "
                f"{len(chain)}, which is another one than it was written for. Nothing was "
                "published. What to do: start again from the last checkpoint; if it happens again, "
                "the runner gave the committer its entries out of order."
            )
        del chain[sidecar.keeps :]
        # A base that leaves no row leaves nothing to restore.
        if sidecar.keeps or sidecar.entry.rows:
            chain.append(sidecar.entry.model_copy(update={"epoch": epoch}))
    return {
        uid: OperatorSnapshotEntry(
            partitions=tuple(
                PartitionSnapshotEntry(partition_id=group, sidecars=tuple(chain))
                for group, chain in sorted(chains.items())
                if chain
            )
        )
        for uid, chains in sorted(groups.items())
    }


def inline_over(
    operators: Mapping[str, OperatorSnapshotEntry], new: Iterable[NewSidecar], limit: int
) -> list[NewSidecar]:
    """Returns which new sidecars have to be files, so that what is inline stays within a limit.

    Args:
        operators: Of the next manifest, with the new sidecars in it.
        new: The new sidecars.
        limit: Bytes of inline state, before they are encoded as text.

    Returns:
        The largest ones, as few as need be.
    """
    listed = [s for o in operators.values() for p in o.partitions for s in p.sidecars]
    over = sum(entry.size_bytes for entry in listed if entry.path is None) - limit
    there = {entry.sha256 for entry in listed if entry.path is None}
    found = []
    inline = [s for s in new if s.entry.path is None and s.entry.sha256 in there]
    for sidecar in sorted(inline, key=lambda s: s.entry.size_bytes, reverse=True):
        if over <= 0:
            break
        found.append(sidecar)
        over -= sidecar.entry.size_bytes
    return found


def stands_on(base: CheckpointManifest, uid: str, spec: OperatorSpec) -> bool:
    """Tells whether new files of an operator are added to those that a checkpoint has of it.

    Not if a cell has another coder or kind since, or is gone: then every key is saved anew, by who
    writes and who publishes alike, and the old files are left behind. So files never have a cell
    that their manifest does not know, and a cell that is added later does not find, under its
    name, what one of before has left.

    Args:
        base: The checkpoint.
        uid: The operator.
        spec: As it is now.
    """
    saved = base.pipeline.operators.get(uid) if base.pipeline else None
    return saved is None or all(
        name in spec.cells and spec.cells[name].same_form(cell)
        for name, cell in saved.cells.items()
    )
