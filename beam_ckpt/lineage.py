"""From one checkpoint to the next: which sidecars a key group consists of. Pure functions.

A manifest is self-contained: per operator and key group it lists the newest full sidecar and the
deltas after it. A writer marks what it wrote as full or delta, so that whoever publishes needs no
coordination with it: a full sidecar replaces what its key group had, a delta is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from beam_ckpt.manifest import OperatorSnapshotEntry, PartitionSnapshotEntry, SidecarEntry

__all__ = ["NewSidecar", "next_operators"]


@dataclass(frozen=True, slots=True)
class NewSidecar:
    """A sidecar that no manifest lists yet.

    Attributes:
        operator: The operator's uid.
        key_group: Its key group.
        sequence: Ascends with every sidecar that was written for the key group in a run.
        entry: Where it is and what it holds.
    """

    operator: str
    key_group: int
    sequence: int
    entry: SidecarEntry


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
    """
    groups: dict[str, dict[int, list[SidecarEntry]]] = {uid: {} for uid in uids}
    for uid, operator in base.items():
        groups[uid] = {p.partition_id: list(p.sidecars) for p in operator.partitions}
    for sidecar in sorted(new, key=lambda s: (s.operator, s.key_group, s.sequence)):
        entry = sidecar.entry.model_copy(update={"epoch": epoch})
        chains = groups.setdefault(sidecar.operator, {})
        if entry.kind == "full":
            # A compaction that leaves no row leaves nothing to restore.
            chains[sidecar.key_group] = [entry] if entry.rows else []
        else:
            chains.setdefault(sidecar.key_group, []).append(entry)
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
