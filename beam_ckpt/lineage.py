"""From one checkpoint to the next: which sidecars a key group consists of. Pure functions.

A manifest is self-contained: per operator and key group it lists its chain, the newest full
sidecar and the deltas after it. A writer says of each new sidecar how much of the chain stays
beneath it, so that whoever publishes needs no coordination with it.

Chains are kept short the way a log-structured merge tree keeps its runs few (O'Neil et al., 1996):
where there is no room for one more, a new delta swallows the last one, and those before it that are
no larger than what it has become. So a row is written a few times before it comes into a base.

A small sidecar is mostly the footer of its file. So the small deltas of an operator are one file,
its small bases are another, and in the chain of a key group stands which of its rows are the
group's: a slice of it. Such a file stays whole as long as a slice of it is in use. What is in use
of files of which much is not moves into the next one, as in the cleaning of a log-structured file
system (Rosenblum and Ousterhout, 1991): see `to_share`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    "Piece",
    "files_to_keep",
    "inline_over",
    "next_operators",
    "relisted",
    "same",
    "stands_on",
    "to_share",
]

_DELTAS_OF_BASE = 0.375
"""Deltas above this part of their base become a new base.

Items that were added to bags do not count: they take the place of nothing, so that a new base would
have no fewer bytes than the files before it.

What a new base replaces stays in the store as long as a retained checkpoint lists it, so at worst
both bases and all deltas are there: 2.4 times the state, and 1.4 times as a rule.
"""

_FILES_OF_BASES = 1.5
"""Shared files of bases that are larger than what is in use of them by this factor are cleaned."""

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
        after: Identity of the last file that stays, empty where none does.
        shared: Whether it is to be part of a file that key groups share; its rows are in the entry
            until then.
    """

    operator: str
    key_group: int
    sequence: int
    entry: SidecarEntry
    keeps: int = 0
    after: str = ""
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry of a chain, and where it is.

    Attributes:
        operator: The operator's uid.
        key_group: Its key group.
        index: In its chain, from the oldest on.
        entry: The entry.
    """

    operator: str
    key_group: int
    index: int
    entry: SidecarEntry


def same(one: SidecarEntry, identity: str) -> bool:
    """Tells whether an entry of a chain is the one that goes by an identity elsewhere.

    Of a slice less is told than its writer knows of it.
    """
    return identity.startswith(one.identity)


def _own_bytes(entry: SidecarEntry) -> int:
    return entry.own_bytes


def files_to_keep(
    chain: Sequence[SidecarEntry],
    new_bytes: int,
    max_files: int,
    weigh: Callable[[SidecarEntry], int] = _own_bytes,
    appended_bytes: int = 0,
) -> int:
    """Returns how many files of a chain stay beneath a new delta.

    The others are merged with it: into a bigger delta, or, when none stays, into a new base.

    Args:
        chain: The key group's files, oldest first.
        new_bytes: Size of the delta.
        max_files: How many files the chain may have with the new one, at least 1; a base of several
            files counts as one.
        weigh: The bytes of an entry.
        appended_bytes: How many bytes of the delta take the place of nothing in the chain.
    """
    pages = sum(entry.kind == "full" for entry in chain)
    sizes = [weigh(entry) for entry in chain]
    superseding = new_bytes - appended_bytes
    for entry, size in zip(chain[pages:], sizes[pages:], strict=True):
        superseding += max(size - entry.appended_bytes, 0)
    if max_files == 1 or superseding > sum(sizes[:pages]) * _DELTAS_OF_BASE:
        return 0
    keep, merged, most = len(chain), new_bytes, pages + max_files - 2
    if keep > most:
        while keep > pages and (keep > most or sizes[keep - 1] <= merged):
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
        if sidecar.keeps and not any(same(entry, sidecar.after) for entry in on):
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
    news = list(new)
    to_share = {(s.operator, s.key_group, s.entry.sha256) for s in news if s.shared}
    listed = [
        piece.entry
        for uid in operators
        for piece in _pieces(uid, operators[uid])
        if (uid, piece.key_group, piece.entry.sha256) not in to_share
    ]
    over = sum(entry.size_bytes for entry in listed if entry.path is None) - limit
    there = {entry.sha256 for entry in listed if entry.path is None}
    found = []
    inline = [s for s in news if s.entry.path is None and not s.shared and s.entry.sha256 in there]
    for sidecar in sorted(inline, key=lambda s: s.entry.size_bytes, reverse=True):
        if over <= 0:
            break
        found.append(sidecar)
        over -= sidecar.entry.size_bytes
    return found


def _pieces(uid: str, operator: OperatorSnapshotEntry) -> Iterable[Piece]:
    for partition in operator.partitions:
        for index, entry in enumerate(partition.sidecars):
            yield Piece(uid, partition.partition_id, index, entry)


def to_share(
    operators: Mapping[str, OperatorSnapshotEntry],
    new: Iterable[NewSidecar],
    weigh: Callable[[SidecarEntry], int] = _own_bytes,
) -> list[list[Piece]]:
    """Returns what has to come into new shared files: bases and deltas of an operator apart.

    That is what is new and small, in the order of key groups, and after it, file by file, what is
    left of shared files that have too much in them that is in use no more.

    Deltas leave a file when less than half of it is in use. That is soon, as they are swallowed,
    and they are few bytes. Bases are many, and those of a file are written anew at about the same
    time if keys are touched evenly, so that what is moved out of a file that goes anyway is in the
    store twice for nothing. So bases are left alone until all files of them (with their footers)
    are more than one and a half times what is in use; then the emptiest files are cleaned, as few
    as it takes. (`benchmarks/compaction.py --groups 128` prints what is retained and written so.)

    Args:
        operators: Of the next manifest, with the new sidecars in it.
        new: The new sidecars.
        weigh: The bytes that a new one comes to in a shared file.
    """
    fresh = {(s.operator, s.key_group, s.entry.sha256) for s in new if s.shared}
    found: list[list[Piece]] = []
    for uid, operator in operators.items():
        for kind in ("full", "delta"):
            there, files = list[Piece](), dict[str, list[Piece]]()
            for piece in _pieces(uid, operator):
                if piece.entry.kind != kind:
                    continue
                if piece.entry.is_shared:
                    files.setdefault(piece.entry.path or "", []).append(piece)
                elif (uid, piece.key_group, piece.entry.sha256) in fresh:
                    there.append(piece)
            if kind == "delta":
                cleaned = [pieces for pieces in files.values() if _use(pieces) < 0.5]
            else:
                new_bytes = sum(weigh(piece.entry) for piece in there)
                cleaned = _emptiest(files.values(), new_bytes)
                # One by itself would be the same again, with a footer of its own.
                if not there and len(cleaned) == 1:
                    cleaned = []
            if there or cleaned:
                found.append([*there, *(piece for pieces in cleaned for piece in pieces)])
    return found


def _in_use(pieces: Sequence[Piece]) -> int:
    return sum(piece.entry.own_bytes for piece in pieces)


def _use(pieces: Sequence[Piece]) -> float:
    """Which part of a shared file is in use."""
    return _in_use(pieces) / max(pieces[0].entry.size_bytes, 1)


def _emptiest(files: Iterable[list[Piece]], new_bytes: int) -> list[list[Piece]]:
    """Returns which shared files of bases are to be cleaned, so that all are not too large."""
    by_use = sorted(files, key=_use)
    total = new_bytes + sum(pieces[0].entry.size_bytes for pieces in by_use)
    in_use = new_bytes + sum(map(_in_use, by_use))
    for count, pieces in enumerate(by_use):
        if total <= in_use * _FILES_OF_BASES:
            return by_use[:count]
        total -= pieces[0].entry.size_bytes - _in_use(pieces)
    return by_use


def relisted(
    operators: Mapping[str, OperatorSnapshotEntry], moved: Iterable[Piece]
) -> dict[str, OperatorSnapshotEntry]:
    """Returns the operators with other entries in some places of their chains."""
    places: dict[str, dict[tuple[int, int], SidecarEntry]] = {}
    for piece in moved:
        places.setdefault(piece.operator, {})[piece.key_group, piece.index] = piece.entry
    found = dict(operators)
    for uid, entries in places.items():
        found[uid] = OperatorSnapshotEntry(
            partitions=tuple(
                PartitionSnapshotEntry(
                    partition_id=p.partition_id,
                    sidecars=tuple(
                        entries.get((p.partition_id, index), entry)
                        for index, entry in enumerate(p.sidecars)
                    ),
                )
                for p in operators[uid].partitions
            )
        )
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
