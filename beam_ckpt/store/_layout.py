"""Where every object of a store is. The only place that formats or reads a path."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.manifest import new_checkpoint_id, uuid7_millis

__all__ = ["Layout", "SidecarName"]

_MAX_U64 = 2**64 - 1
# Twelve digits, or more without a zero in front: each id has one name.
_MANIFEST = re.compile(r"([0-9]{12}|[1-9][0-9]{12,19})\.(json|final|used)")
_RUN = re.compile(r"([0-9]{8,20})\.json")
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_SIDECAR = re.compile(rf"(end|-?[0-9]{{1,20}})-(.{{1,160}})-({_UUID})\.parquet")
_PRUNE = re.compile(rf"({_UUID})-([0-9]{{12,20}})-([0-9]{{12,20}})")
_SAVED = re.compile(r"(end|-?[0-9]{1,20})-save-([0-9]{12,20})\.parquet")


@dataclass(frozen=True)
class SidecarName:
    """What the name of a sidecar tells; fields are `None` where it does not."""

    boundary: int | None
    run_id: str | None
    saved_id: int | None
    written_ms: int | None


@dataclass(frozen=True)
class Layout:
    """Paths of one participant's tree; participant 0 has the root itself.

    `namespace.json` is the one object that all participants share.
    """

    participant_id: int = 0

    @property
    def base(self) -> str:
        """Prefix of every key but the namespace: empty, or `participants/<n>/`."""
        return f"participants/{self.participant_id}/" if self.participant_id else ""

    @property
    def namespace(self) -> str:
        """The create-once record of the deployment."""
        return "namespace.json"

    @property
    def latest(self) -> str:
        """The pointer."""
        return f"{self.base}latest.json"

    @property
    def manifests(self) -> str:
        """Prefix of manifests and their markers."""
        return f"{self.base}manifests/"

    @property
    def runs(self) -> str:
        """Prefix of the generation claims."""
        return f"{self.base}runs/"

    @property
    def tags(self) -> str:
        """Prefix of the tags."""
        return f"{self.base}tags/"

    @property
    def prunes(self) -> str:
        """Prefix of what prunes that are under way mean to delete."""
        return f"{self.base}prunes/"

    @property
    def state(self) -> str:
        """Prefix of the sidecars."""
        return f"{self.base}state/"

    def manifest(self, id: int) -> str:
        """The manifest of a checkpoint."""
        return f"{self.manifests}{_checked(id):012d}.json"

    def final(self, id: int) -> str:
        """The marker that decides whether it is a recovery point."""
        return f"{self.manifests}{_checked(id):012d}.final"

    def used(self, id: int) -> str:
        """The marker left by a prune of the highest id, so that it is never given out again."""
        return f"{self.manifests}{_checked(id):012d}.used"

    def run(self, generation: int) -> str:
        """The claim of a generation."""
        return f"{self.runs}{_checked(generation):08d}.json"

    def tag(self, name: str) -> str:
        """The record of a tag."""
        return f"{self.tags}{_segment(name)}.json"

    def new_prune(self, ranges: Iterable[range]) -> list[str]:
        """New unique paths for what one prune means to delete: the ids are in the names."""
        prune = f"{self.prunes}{new_checkpoint_id()}"
        return [f"{prune}-{_checked(r[0]):012d}-{_checked(r[-1]):012d}" for r in ranges]

    def operator(self, uid: str) -> str:
        """Prefix of the sidecars of an operator."""
        return f"{self.state}{_segment(uid)}/"

    def object(self, relative: str) -> str:
        """The key of a sidecar, from its path in a manifest."""
        return self.base + relative

    def new_sidecar(
        self, operator: str, key_group: int | None, boundary: int | None, run_id: str
    ) -> str:
        """A new unique path, relative to this tree: the name holds the wall clock too.

        `key_group` is `None` for a file that key groups share.
        """
        cut = "end" if boundary is None else str(boundary)
        return f"{_group(operator, key_group)}/{cut}-{run_id}-{new_checkpoint_id()}.parquet"

    def saved_sidecar(self, operator: str, key_group: int, boundary: int | None, id: int) -> str:
        """The one path of a key group's state that is saved with a checkpoint."""
        cut = "end" if boundary is None else str(boundary)
        return f"{_group(operator, key_group)}/{cut}-save-{_checked(id):012d}.parquet"

    # -- back ----------------------------------------------------------------------------

    def parse_manifest(self, key: str) -> tuple[int, str]:
        """Returns id and kind (`json`, `final`, `used`) of an object below `manifests/`.

        Raises:
            InvalidCheckpointError: The name is not canonical.
        """
        found = _MANIFEST.fullmatch(key, len(self.manifests))
        if found and 1 <= (id := int(found[1])) <= _MAX_U64:
            return id, found[2]
        raise InvalidCheckpointError(_stranger(key))

    def parse_run(self, key: str) -> int:
        """Returns the generation of an object below `runs/`.

        Raises:
            InvalidCheckpointError: The name is not canonical.
        """
        found = _RUN.fullmatch(key.removeprefix(self.runs))
        if found:
            generation = int(found[1])
            if 1 <= generation <= _MAX_U64 and key == self.run(generation):
                return generation
        raise InvalidCheckpointError(_stranger(key))

    def parse_prune(self, key: str) -> tuple[range, int]:
        """Returns ids and start (wall-clock milliseconds) of an object below `prunes/`.

        Raises:
            InvalidCheckpointError: The name is not canonical.
        """
        if found := _PRUNE.fullmatch(key, len(self.prunes)):
            started_ms = uuid7_millis(found[1])
            if started_ms is not None:
                return range(int(found[2]), int(found[3]) + 1), started_ms
        raise InvalidCheckpointError(_stranger(key))

    def parse_sidecar(self, key: str) -> SidecarName:
        """Returns what the name of an object below `state/` tells; never raises."""
        name = key.rpartition("/")[2]
        if found := _SAVED.fullmatch(name):
            cut = None if found[1] == "end" else int(found[1])
            return SidecarName(cut, None, int(found[2]), None)
        if found := _SIDECAR.fullmatch(name):
            cut = None if found[1] == "end" else int(found[1])
            return SidecarName(cut, found[2], None, uuid7_millis(found[3]))
        return SidecarName(None, None, None, None)


def _stranger(key: str) -> str:
    return (
        f"{key} does not belong in a store: its name is not one that beam_ckpt writes. "
        "Move it away; no checkpoint needs it"
    )


def _checked(id: int) -> int:
    if isinstance(id, bool) or not isinstance(id, int) or not 1 <= id <= _MAX_U64:
        raise InvalidCheckpointError(f"{id!r} is no checkpoint id: ids are integers from 1 on")
    return id


def _segment(name: str) -> str:
    quoted = quote(name, safe="")
    if quoted.startswith("."):
        quoted = "%2E" + quoted[1:]
    if len(quoted) > 180:  # file systems allow 255 bytes a name
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        quoted = f"{quoted[:150]}~{digest}"
    return quoted


def _group(operator: str, key_group: int | None) -> str:
    folder = "shared" if key_group is None else f"{key_group:05d}"
    return f"state/{_segment(operator)}/{folder}"
