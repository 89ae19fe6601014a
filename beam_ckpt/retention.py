"""Which checkpoints and files may go: retention policies, and pure plans over facts.

A policy says what it wants kept; whatever it says, the plans below also keep the target of the
pointer, the newest finalized checkpoint, every tagged one, and what a running job restored
from. A file goes only with the last checkpoint that lists it (prune), or when no checkpoint
ever listed it and its writer is gone (gc).

Example:
    >>> policy = KeepLast(5) | KeepFor(days=7)
    >>> print(policy)
    KeepLast(5) | KeepFor(seconds=604800)
"""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

__all__ = ["GcReport", "KeepFor", "KeepLast", "PruneReport", "RetentionPolicy"]


@dataclass(frozen=True)
class RetentionFacts:
    """What a policy may look at.

    Attributes:
        id: The checkpoint.
        epoch: Its epoch.
        timestamp_ms: Wall clock of its commit.
        finalized: Whether it is a recovery point.
        sidecars: Paths of the files that it lists; `None` while its manifest has not been read.
        generation: Of the run that wrote it; 0 for none.
    """

    id: int
    epoch: int
    timestamp_ms: int
    finalized: bool
    sidecars: frozenset[str] | None = frozenset()
    generation: int = 0

    def files(self) -> frozenset[str]:
        """Returns the sidecars, where they are known.

        Raises:
            ValueError: They are not: nothing may be deleted by these facts.
        """
        if self.sidecars is None:
            raise ValueError(f"the manifest of checkpoint {self.id} has not been read")
        return self.sidecars


class RetentionPolicy(ABC):
    """Says which finalized checkpoints to keep. `a | b` keeps what either does, `a & b` both."""

    @abstractmethod
    def keep(self, checkpoints: Sequence[RetentionFacts], now_ms: int) -> frozenset[int]:
        """Returns the ids to keep.

        Args:
            checkpoints: All finalized ones, ascending by id.
            now_ms: Wall clock.
        """

    def __or__(self, other: RetentionPolicy) -> RetentionPolicy:
        """Keeps what either policy keeps."""
        return _Either(self, other)

    def __and__(self, other: RetentionPolicy) -> RetentionPolicy:
        """Keeps what both policies keep."""
        return _Both(self, other)


@dataclass(frozen=True)
class KeepLast(RetentionPolicy):
    """Keeps the newest `count` finalized checkpoints."""

    count: int

    def __post_init__(self) -> None:
        """Refuses to keep none."""
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"KeepLast({self.count!r}): keep at least 1 checkpoint")

    def keep(self, checkpoints: Sequence[RetentionFacts], now_ms: int) -> frozenset[int]:
        """See `RetentionPolicy.keep`."""
        return frozenset(c.id for c in checkpoints[-self.count :])

    def __str__(self) -> str:
        """`KeepLast(n)`."""
        return f"KeepLast({self.count})"


@dataclass(frozen=True, init=False)
class KeepFor(RetentionPolicy):
    """Keeps the finalized checkpoints committed within a duration before now (wall clock)."""

    seconds: float

    def __init__(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
    ) -> None:
        """Takes the duration, in any mixture of units."""
        total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        if not 0 < total < float("inf"):
            raise ValueError(f"KeepFor of {total} seconds: give a duration above 0, such as days=7")
        object.__setattr__(self, "seconds", total)

    def keep(self, checkpoints: Sequence[RetentionFacts], now_ms: int) -> frozenset[int]:
        """See `RetentionPolicy.keep`."""
        return frozenset(
            c.id for c in checkpoints if c.timestamp_ms >= now_ms - self.seconds * 1000
        )

    def __reduce__(self) -> tuple[object, tuple[float]]:
        """Pickles by its seconds."""
        return _keep_for, (self.seconds,)

    def __str__(self) -> str:
        """`KeepFor(seconds=n)`."""
        return f"KeepFor(seconds={self.seconds:g})"


def _keep_for(seconds: float) -> KeepFor:
    return KeepFor(seconds=seconds)


@dataclass(frozen=True)
class _Either(RetentionPolicy):
    first: RetentionPolicy
    second: RetentionPolicy

    def keep(self, checkpoints: Sequence[RetentionFacts], now_ms: int) -> frozenset[int]:
        return self.first.keep(checkpoints, now_ms) | self.second.keep(checkpoints, now_ms)

    def __str__(self) -> str:
        return f"{self.first} | {self.second}"


@dataclass(frozen=True)
class _Both(RetentionPolicy):
    first: RetentionPolicy
    second: RetentionPolicy

    def keep(self, checkpoints: Sequence[RetentionFacts], now_ms: int) -> frozenset[int]:
        return self.first.keep(checkpoints, now_ms) & self.second.keep(checkpoints, now_ms)

    def __str__(self) -> str:
        return f"({self.first}) & ({self.second})"


@dataclass(frozen=True)
class KeepOnBothSides(RetentionPolicy):
    """A policy for the checkpoints up to one, and again for those after it.

    What a stream publishes while it is drained does not stand in for what was before.

    Attributes:
        policy: For each side.
        last: Id of the last one on the older side.
    """

    policy: RetentionPolicy
    last: int

    def keep(self, checkpoints: Sequence[RetentionFacts], now_ms: int) -> frozenset[int]:
        """See `RetentionPolicy.keep`."""
        older = [c for c in checkpoints if c.id <= self.last]
        newer = checkpoints[len(older) :]
        return self.policy.keep(older, now_ms) | self.policy.keep(newer, now_ms)

    def __str__(self) -> str:
        """Both sides."""
        return f"{self.policy} up to {self.last}, {self.policy} after it"


@dataclass(frozen=True)
class KeepForRetry(RetentionPolicy):
    """A policy, and besides what is needed to publish once more what was just published.

    A bundle that has published and pruned may fail at its end. Its retry stands on the checkpoint
    that it stood on, and finds what it has published.

    Attributes:
        policy: What is kept anyway.
        base: Id of the checkpoint that the bundle stood on when it began; `None` for none.
        generation: Of the run: all that it has published since then is kept.
    """

    policy: RetentionPolicy
    base: int | None
    generation: int

    def keep(self, checkpoints: Sequence[RetentionFacts], now_ms: int) -> frozenset[int]:
        """See `RetentionPolicy.keep`."""
        base = -1 if self.base is None else self.base
        needed = (
            c.id
            for c in checkpoints
            if c.id == base or (c.id > base and c.generation == self.generation)
        )
        return self.policy.keep(checkpoints, now_ms) | frozenset(needed)

    def __str__(self) -> str:
        """The policy, and what else stays."""
        return f"{self.policy} | what is needed to publish again what came after {self.base}"


@dataclass(frozen=True)
class PruneReport:
    """What a prune deleted, or with `dry_run` would delete.

    Attributes:
        deleted: Ids, ascending.
        kept: Ids, ascending.
        sidecars: Paths of the files that went with them.
        dry_run: Whether nothing was deleted.
        markers: Keys of markers of checkpoints that are gone, and that say nothing any more.
    """

    deleted: tuple[int, ...]
    kept: tuple[int, ...]
    sidecars: tuple[str, ...]
    dry_run: bool = False
    markers: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrunePlan:
    """What to delete.

    Attributes:
        doomed: Checkpoints, oldest first.
        kept: Checkpoints, ascending.
    """

    doomed: tuple[RetentionFacts, ...]
    kept: tuple[RetentionFacts, ...]

    @property
    def sidecars(self) -> tuple[str, ...]:
        """Files that a doomed checkpoint lists and no kept one.

        Raises:
            ValueError: See `RetentionFacts.files`.
        """
        if not self.doomed:
            return ()
        held = frozenset[str]().union(*(f.files() for f in self.kept))
        return tuple(sorted(frozenset[str]().union(*(f.files() for f in self.doomed)) - held))

    def sparing(self, ids: AbstractSet[int]) -> PrunePlan:
        """Returns the plan without some of its checkpoints."""
        return plan(self.doomed + self.kept, frozenset(f.id for f in self.doomed) - ids)

    def doomed_ranges(self) -> list[range]:
        """Returns the doomed ids as few ranges, none of which has a kept id in it."""
        ranges = []
        kept = sorted(f.id for f in self.kept)
        for _, run in itertools.groupby(self.doomed, lambda f: bisect.bisect(kept, f.id)):
            ids = [f.id for f in run]
            ranges.append(range(ids[0], ids[-1] + 1))
        return ranges


def plan(checkpoints: Iterable[RetentionFacts], doomed: AbstractSet[int]) -> PrunePlan:
    """Returns the plan that deletes the given checkpoints."""
    ordered = sorted(checkpoints, key=lambda f: f.id)
    going = tuple(f for f in ordered if f.id in doomed)
    kept = tuple(f for f in ordered if f.id not in doomed)
    return PrunePlan(going, kept)


def _untouchable(
    checkpoints: Sequence[RetentionFacts], protected: AbstractSet[int]
) -> AbstractSet[int]:
    newest = max((f.id for f in checkpoints if f.finalized), default=None)
    return protected if newest is None else protected | {newest}


def plan_policy(
    checkpoints: Sequence[RetentionFacts],
    policy: RetentionPolicy,
    *,
    protected: AbstractSet[int],
    now_ms: int,
) -> PrunePlan:
    """Plans a prune by policy.

    An attempt that was never finalized goes once a younger checkpoint is finalized; before
    that it may still be in the making.

    Args:
        checkpoints: All of the store.
        policy: What to keep.
        protected: The pointer's target, tagged ids, and what a running job restored from.
        now_ms: Wall clock.
    """
    finalized = sorted((f for f in checkpoints if f.finalized), key=lambda f: f.id)
    if not finalized:
        return plan(checkpoints, frozenset())
    keep = policy.keep(finalized, now_ms) | _untouchable(checkpoints, protected)
    doomed = {
        f.id for f in checkpoints if f.id not in keep and (f.finalized or f.id < finalized[-1].id)
    }
    return plan(checkpoints, doomed)


def plan_before(
    checkpoints: Sequence[RetentionFacts], before_epoch: int, *, protected: AbstractSet[int]
) -> PrunePlan:
    """Plans a prune of every checkpoint, finalized or not, of an epoch below `before_epoch`."""
    keep = _untouchable(checkpoints, protected)
    return plan(
        checkpoints, {f.id for f in checkpoints if f.epoch < before_epoch and f.id not in keep}
    )


# -- garbage -----------------------------------------------------------------------------


@dataclass(frozen=True)
class UnlistedSidecar:
    """A file below `state/` that no checkpoint lists.

    Attributes:
        key: Its path.
        size: Bytes.
        boundary: The cut in its name, event-time microseconds; `None` for the end of the input.
        run_id: The run in its name; `None` when the name is not one of ours.
        saved_id: The checkpoint it was written for, for files that `save_state_data` wrote.
        written_ms: Wall clock in its name; `None` when the name has none.
    """

    key: str
    size: int
    boundary: int | None
    run_id: str | None
    saved_id: int | None
    written_ms: int | None


@dataclass(frozen=True)
class GcFacts:
    """What garbage collection decides by.

    Attributes:
        generations: Generation by run id, of every claim.
        latest_id: The newest finalized checkpoint; 0 for none.
        latest_watermark: Its cut; `None` for none and for the drained end.
        latest_generation: Of the run that wrote it; 0 for none.
        finalized_ms: Commit time by id of every finalized checkpoint.
        now_ms: Wall clock.
        grace_ms: Files younger than this stay.
    """

    generations: Mapping[str, int]
    latest_id: int
    latest_watermark: int | None
    latest_generation: int
    finalized_ms: Mapping[int, int]
    now_ms: int
    grace_ms: int


@dataclass(frozen=True)
class Garbage:
    """An object that gc deletes, or an unlisted one that it keeps, with the reason."""

    key: str
    size: int
    reason: str


@dataclass(frozen=True)
class GcReport:
    """What gc deleted, or with `dry_run` would delete.

    Attributes:
        deleted: Objects, by key.
        kept: Files that no checkpoint lists and that stay, with the reason.
        dry_run: Whether nothing was deleted.
    """

    deleted: tuple[Garbage, ...]
    kept: tuple[Garbage, ...]
    dry_run: bool = False

    @property
    def bytes(self) -> int:
        """Sum of the sizes of what was deleted."""
        return sum(g.size for g in self.deleted)


def judge_unlisted(sidecar: UnlistedSidecar, facts: GcFacts) -> tuple[bool, str]:
    """Decides on a file that no checkpoint lists: whether it goes, and why or why not.

    It goes when its writer cannot publish it any more, and it is past the grace period.
    """
    if sidecar.saved_id is not None:
        later = [ms for i, ms in facts.finalized_ms.items() if i > sidecar.saved_id]
        if not later:
            return False, f"checkpoint {sidecar.saved_id} may still be saved"
        if facts.now_ms - min(later) < facts.grace_ms:
            return False, "younger than the grace period"
        return True, f"checkpoint {sidecar.saved_id} was never saved"
    if sidecar.run_id is None or sidecar.written_ms is None:
        return False, "not a name that this library writes: delete it by hand"
    generation = facts.generations.get(sidecar.run_id)
    youngest = max(facts.generations.values(), default=0)
    if generation is not None and generation < youngest:
        why = f"run {sidecar.run_id} was superseded by generation {youngest}"
    elif (
        sidecar.boundary is not None
        and facts.latest_watermark is not None
        and sidecar.boundary < facts.latest_watermark
        # A younger run may have restored an older checkpoint and be on its way to here.
        and (generation or 0) <= facts.latest_generation
    ):
        why = f"its boundary lies below that of checkpoint {facts.latest_id}"
    else:
        return False, f"run {sidecar.run_id} may still publish it"
    if facts.now_ms - sidecar.written_ms < facts.grace_ms:
        return False, "younger than the grace period"
    return True, why
