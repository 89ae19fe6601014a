"""What the page shows, gathered in one pass over the manifests. No sidecar is read."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from beam_ckpt.errors import CheckpointError, InvalidCheckpointError
from beam_ckpt.inspect._catalog import AnyStore, new_pieces, open_existing
from beam_ckpt.manifest import CheckpointManifest
from beam_ckpt.retention import PruneReport, RetentionFacts, RetentionPolicy, plan_policy
from beam_ckpt.store import CheckpointStore
from beam_ckpt.store._layout import Layout

__all__ = ["Checkpoint", "Facts", "Operator", "gather"]


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint. Bytes are of what its manifest lists, by who listed it first.

    Attributes:
        id: Names it.
        phase: ``finalized``, ``prepared`` or ``invalid``.
        boundary: Event time in microseconds; `None` for the drained end, and where `problem`.
        created_ms: Wall clock of its manifest; `None` where it cannot be read.
        new_bytes: Of files that it wrote.
        shared_bytes: Of files of older ones.
        new_files: How many it wrote.
        longest_chain: The greatest number of files of a key group.
        duration_ms: From the first file that it wrote to its manifest; `None` where no name of a
            file tells.
        parent: Id of its parent, where that is still there.
        generation: Of its run; 0 for none.
        tags: Its names.
        latest: Whether the pointer names it.
        problem: Why it cannot be read.
    """

    id: int
    phase: str
    boundary: int | None = None
    created_ms: int | None = None
    new_bytes: int = 0
    shared_bytes: int = 0
    new_files: int = 0
    longest_chain: int = 0
    duration_ms: int | None = None
    parent: int | None = None
    generation: int = 0
    tags: tuple[str, ...] = ()
    latest: bool = False
    problem: str | None = None

    @property
    def bytes(self) -> int:
        """All that a restore reads."""
        return self.new_bytes + self.shared_bytes


@dataclass(frozen=True)
class Operator:
    """One operator in the newest finalized checkpoint.

    Attributes:
        uid: Its uid.
        key_coder: Identity of its keys' coder; empty where it is not recorded.
        cells: Name, kind and coder of each cell.
        rows: By key group; a key in several files counts once for each.
        bytes: By key group.
        chains: Number of files by key group.
    """

    uid: str
    key_coder: str
    cells: tuple[tuple[str, str, str], ...]
    rows: dict[int, int] = field(default_factory=dict)
    bytes: dict[int, int] = field(default_factory=dict)
    chains: dict[int, int] = field(default_factory=dict)

    @property
    def depths(self) -> dict[int, int]:
        """How many key groups have so many files."""
        return dict(sorted(Counter(self.chains.values()).items()))


@dataclass(frozen=True)
class Facts:
    """Everything on the page.

    Attributes:
        url: Of the store, without credentials.
        now_ms: When this was gathered.
        checkpoints: Ascending by id, damaged ones included.
        newest: The newest finalized one that can be read.
        key_groups: Of it.
        operators: Of it.
        versions: Of Beam and Python that wrote it.
        policy: What retention was asked about.
        going: What a prune would delete now; `None` where it refuses, by `refusal`.
        going_bytes: Of the files that would go.
        next_going: Ids that would go as well with one more checkpoint.
        kept_by: Why an id stays, whatever the policy says.
        refusal: Why nothing would be deleted.
    """

    url: str
    now_ms: int
    checkpoints: tuple[Checkpoint, ...]
    newest: int | None
    key_groups: int
    operators: tuple[Operator, ...]
    versions: str
    policy: str
    going: PruneReport | None
    going_bytes: int
    next_going: tuple[int, ...]
    kept_by: dict[int, str]
    refusal: str


def gather(store: AnyStore, policy: RetentionPolicy) -> Facts:
    """Reads every manifest once.

    Raises:
        CheckpointNotFoundError: There is no store.
        CheckpointStorageError: The storage failed.
    """
    opened = open_existing(store)
    manifests: dict[int, CheckpointManifest] = {}
    damaged: dict[int, str] = {}
    for id in opened.list_ids():
        try:
            manifest = opened.load_by_id(id)
        except InvalidCheckpointError as error:
            damaged[id] = str(error)
            continue
        if manifest is not None:  # else pruned since it was listed
            manifests[id] = manifest
    tags: dict[int, list[str]] = {}
    for name, id in opened.tags().items():
        tags.setdefault(id, []).append(name)
    try:
        latest = opened.load_latest()
    except InvalidCheckpointError:
        latest = None
    known = {manifest.checkpoint_id: manifest for manifest in manifests.values()}
    pointed = None if latest is None else latest.id
    checkpoints = [
        _checkpoint(
            manifest, known.get(manifest.parent_id or ""), tuple(tags.get(id, ())), id == pointed
        )
        for id, manifest in manifests.items()
    ]
    checkpoints += [
        Checkpoint(id, "invalid", tags=tuple(tags.get(id, ())), problem=problem)
        for id, problem in damaged.items()
    ]
    finalized = [m for m in manifests.values() if m.durable_phase == "finalized"]
    newest = max(finalized, key=lambda m: m.id, default=None)
    going, refusal = _prune(opened, policy)
    sizes = {e.path: e.size_bytes for m in manifests.values() for _, _, e in m.sidecars()}
    pipeline = newest.pipeline if newest else None
    versions = f"Beam {pipeline.beam_version}, Python {pipeline.python_version}" if pipeline else ""
    now_ms = time.time_ns() // 1_000_000
    kept_by = {id: f"tagged {', '.join(names)}" for id, names in tags.items()}
    if pointed is not None:
        kept_by[pointed] = "the newest recovery point"
    return Facts(
        opened.url,
        now_ms,
        tuple(sorted(checkpoints, key=lambda c: c.id)),
        None if newest is None else newest.id,
        0 if newest is None else newest.key_group_count,
        () if newest is None else _operators(newest),
        versions,
        str(policy),
        going,
        0 if going is None else sum(sizes.get(path, 0) for path in going.sidecars),
        () if going is None else _next(finalized, policy, going, kept_by, now_ms),
        kept_by,
        refusal,
    )


def _checkpoint(
    manifest: CheckpointManifest,
    parent: CheckpointManifest | None,
    tags: tuple[str, ...],
    latest: bool,
) -> Checkpoint:
    new = new_pieces(manifest, parent)
    written = [
        ms
        for entry in new
        if entry.path and (ms := Layout().parse_sidecar(entry.path).written_ms) is not None
    ]
    # Clocks of other machines may be ahead.
    duration = max(0, manifest.timestamp_ms - min(written)) if written else None
    new_bytes = sum(entry.size_bytes for entry in new)
    chains = (len(p.sidecars) for o in manifest.operators.values() for p in o.partitions)
    return Checkpoint(
        manifest.id,
        manifest.durable_phase,
        manifest.watermark,
        manifest.timestamp_ms,
        new_bytes,
        manifest.total_size_bytes - new_bytes,
        len(new),
        max(chains, default=0),
        duration,
        None if parent is None else parent.id,
        manifest.run.generation if manifest.run else 0,
        tags,
        latest,
    )


def _operators(manifest: CheckpointManifest) -> tuple[Operator, ...]:
    specs = manifest.pipeline.operators if manifest.pipeline else {}
    found = []
    for uid in sorted({*manifest.operators, *specs}):
        spec, entry = specs.get(uid), manifest.operators.get(uid)
        cells = () if spec is None else tuple((n, c.kind, c.coder) for n, c in spec.cells.items())
        one = Operator(uid, "" if spec is None else spec.key_coder, cells)
        for partition in () if entry is None else entry.partitions:
            group = partition.partition_id
            one.rows[group] = sum(s.rows for s in partition.sidecars)
            one.bytes[group] = sum(s.own_bytes for s in partition.sidecars)
            one.chains[group] = len(partition.sidecars)
        found.append(one)
    return tuple(found)


def _prune(store: CheckpointStore, policy: RetentionPolicy) -> tuple[PruneReport | None, str]:
    try:
        return store.prune(policy, dry_run=True), ""
    except CheckpointError as error:
        return None, str(error)


def _next(
    finalized: list[CheckpointManifest],
    policy: RetentionPolicy,
    going: PruneReport,
    kept_by: dict[int, str],
    now_ms: int,
) -> tuple[int, ...]:
    """What goes with the checkpoint after these, if that comes now."""
    if not finalized:
        return ()
    facts = [
        RetentionFacts(m.id, m.epoch, m.timestamp_ms, True)
        for m in sorted(finalized, key=lambda m: m.id)
    ]
    last = facts[-1]
    facts.append(RetentionFacts(last.id + 1, last.epoch + 1, now_ms, True))
    tagged = {id for id, why in kept_by.items() if why.startswith("tagged")}
    plan = plan_policy(facts, policy, protected=tagged, now_ms=now_ms)
    return tuple(f.id for f in plan.doomed if f.id not in going.deleted)
