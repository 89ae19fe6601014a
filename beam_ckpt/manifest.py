"""The format of a checkpoint: its manifest and the small records around it.

Everything here is data: pydantic models (frozen, no unknown fields), their canonical JSON (that of
a large manifest is stored as gzip), and a bounded, strict way back from bytes. The fields of
`CheckpointManifest` are those of LaminarDB's `CheckpointManifestV2` and this library's own.

Times are integers: wall clock in milliseconds since the epoch, event time (`watermark`,
`boundary`) in microseconds, where `None` means the drained end of a bounded input.

Example:
    >>> m = CheckpointManifest(checkpoint_id=new_checkpoint_id(), id=1, epoch=1, timestamp_ms=1)
    >>> CheckpointManifest.from_bytes(m.to_bytes(), where="memory") == m
    True
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import json
import os
import re
import threading
import time
import uuid
import zlib
from collections.abc import Iterable, Mapping
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    NoReturn,
    Self,
    TypeVar,
    get_args,
    get_origin,
)

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from beam_ckpt.errors import (
    CheckpointTooLargeError,
    InvalidCheckpointError,
    UnsupportedFormatError,
)
from beam_ckpt.keygroups import MAX_KEY_GROUPS

__all__ = [
    "FORMAT_VERSION",
    "CellSpec",
    "CheckpointManifest",
    "FinalMarker",
    "OperatorSnapshotEntry",
    "OperatorSpec",
    "PartitionSnapshotEntry",
    "PipelineIdentity",
    "RunIdentity",
    "SidecarEntry",
    "SourceOffsetEntry",
    "new_checkpoint_id",
]

FORMAT_VERSION: Final = 3
"""The newest format version. This library reads every one that was released (2 and 3).

A manifest is of version 3 where key groups share a sidecar or one has items that were added to
bags, and else of version 2, which older versions of this library read as well where it is not
stored as gzip: that is told by its first bytes, not by a version.
"""

_UNSHARED_VERSION: Final = 2

MAX_MANIFEST_BYTES = 16 * 1024 * 1024
"""As it is stored, and as JSON."""
PACKED_ABOVE = 4096
"""Bytes of JSON above which a manifest is stored as gzip."""
MAX_RECORD_BYTES = 1024
"""The pointer and every other small record."""
MAX_INLINE_BYTES = 1024 * 1024
MAX_INLINE_TOTAL_BYTES = 8 * 1024 * 1024

_U64 = 2**64 - 1
# A legal manifest of the greatest size holds fewer; more would cost memory to no purpose.
_MAX_VALUES = 500_000
_MAX_CONTAINERS = 200_000
_MAX_KEYS = 65_536
# What slices of shared sidecars stand for is told once in the stored form, and held once a slice.
_MAX_SPELLED_OUT = 4 * MAX_MANIFEST_BYTES
_SMALL = 65_536
# No JSON begins like this.
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WBITS = 16 + zlib.MAX_WBITS
_GZIP_LEVEL = 9

U64 = Annotated[int, Field(ge=0, le=_U64)]
Id = Annotated[int, Field(ge=1, le=_U64)]
Micros = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Uuid = Annotated[
    str, Field(pattern=r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$")
]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
RunId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}$")]
Uid = Annotated[str, Field(min_length=1, max_length=256)]
Crc32c = Annotated[int, Field(ge=0, le=2**32 - 1)]
Origin = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]

# No empty, "." or ".." segment, none that hides, no backslash, no control character.
_SIDECAR_PATH = re.compile(r"state(/(?!\.)[^/\\\x00-\x1f\x7f]+){2,}")

_uuid_lock = threading.Lock()
_uuid_last = (0, 0)


def new_checkpoint_id() -> str:
    """Returns a new UUID v7 in its canonical spelling; later ones of this process sort after.

    Across processes the order is that of the wall clocks, in milliseconds.
    """
    global _uuid_last
    with _uuid_lock:
        millis, count = time.time_ns() // 1_000_000, int.from_bytes(os.urandom(2), "big") >> 5
        if millis <= _uuid_last[0]:  # same millisecond, or the clock went back
            millis, count = _uuid_last[0], _uuid_last[1] + 1
            if count > 0xFFF:
                millis, count = millis + 1, 0
        _uuid_last = (millis, count)
    low = int.from_bytes(os.urandom(8), "big") >> 2
    value = (millis & (2**48 - 1)) << 80 | 7 << 76 | count << 64 | 2 << 62 | low
    return str(uuid.UUID(int=value))


def uuid7_millis(text: str) -> int | None:
    """Returns the wall-clock milliseconds in a UUID v7, or `None` when it is none."""
    try:
        value = uuid.UUID(text)
    except ValueError:
        return None
    return value.int >> 80 if value.version == 7 else None


def check_sidecar_path(path: str) -> str:
    """Returns `path` when it can only name an object below `state/`.

    Raises:
        ValueError: It is absolute, climbs, or names anything else.
    """
    if len(path) > 1024 or not _SIDECAR_PATH.fullmatch(path):
        raise ValueError(f"sidecar path {path[:200]!r} is not a plain relative path below state/")
    return path


class _Record(BaseModel):
    """A frozen model with no unknown fields and no coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    #: What is left out of the JSON where it has this value, as it came later than the format.
    _omitted: ClassVar[Mapping[str, object]] = {}
    #: The format versions that can be read, of a record that has one.
    _versions: ClassVar[tuple[int, ...]] = (_UNSHARED_VERSION,)

    def to_json(self) -> bytes:
        """Returns canonical JSON: the same value gives the same bytes."""
        return _canonical(self._values())

    def _values(self) -> dict[str, Any]:
        """Returns what is stored."""
        values = self.model_dump(mode="json")
        for name, value in self._omitted.items():
            if name in values and values[name] == value:
                del values[name]
        return values


def _canonical(values: Mapping[str, Any]) -> bytes:
    return json.dumps(
        values,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    ).encode("utf-8")


class _Later(_Record):
    """A part of a record that has got fields since: they are stored only where they say something.

    So what was written before has the same bytes when it is written again.
    """

    @model_serializer(mode="wrap")
    def _without_what_says_nothing(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        for name, value in self._omitted.items():
            if name in values and values[name] == value:
                del values[name]
        return values


class SidecarEntry(_Later):
    """One piece of keyed state: a file below `state/`, or bytes inline (small ones).

    Or rows of a file that several key groups share, one after the other: a slice of it. Size and
    checksums are then those of the whole file. In the stored manifest an operator lists its shared
    files once, and a slice is ``[file, first_row, rows, slice_bytes, origin]``, with its `boundary`
    and `epoch` after these where they are not those of the file.

    Attributes:
        path: Relative to the root of the store (of the participant's tree).
        inline: Base64 of the bytes; exactly one of the two is given.
        kind: `full` holds every row of its key group, `delta` the rows touched since.
        boundary: The cut it was taken at, event time in microseconds.
        epoch: Of the checkpoint that listed it first; `None` until listed.
        rows: One for each key and window; of a slice those of the key group.
        size_bytes: Of the file, or of the decoded bytes.
        crc32c: Of the same bytes.
        sha256: Of the same bytes, 64 lowercase hex digits.
        first_row: Of a slice: where in the file its rows begin; `None` for what is not shared.
        file_rows: Of a slice: how many rows the file has.
        slice_bytes: Of a slice: about how many of the file's bytes are for its rows.
        origin: Of a slice: the first 8 hex digits of the SHA-256 of what its writer made, by which
            the writer knows it, wherever it has come to lie.
        appended_bytes: About how many bytes are items that were added to bags, and so take the
            place of nothing in older files. (Of a slice it is not stored.)
    """

    path: str | None = None
    inline: str | None = None
    kind: Literal["full", "delta"]
    boundary: Micros | None = None
    epoch: U64 | None = None
    rows: U64 = 0
    size_bytes: U64
    crc32c: Crc32c
    sha256: Sha256
    first_row: U64 | None = None
    file_rows: U64 | None = None
    slice_bytes: U64 | None = None
    origin: Origin | None = None
    appended_bytes: U64 = 0

    _omitted: ClassVar[Mapping[str, object]] = {
        "first_row": None,
        "file_rows": None,
        "slice_bytes": None,
        "origin": None,
        "appended_bytes": 0,
    }

    @model_validator(mode="after")
    def _check(self) -> Self:
        told = (self.first_row, self.file_rows, self.slice_bytes, self.origin)
        if len({value is None for value in told}) != 1 or (self.is_shared and self.path is None):
            raise ValueError(
                "a slice has a path, first_row, file_rows, slice_bytes and origin, all of them"
            )
        if (self.slice_bytes or 0) > self.size_bytes:
            raise ValueError(f"{self.slice_bytes} bytes of a file of {self.size_bytes}")
        if self.is_shared and sum(self.row_range) > (self.file_rows or 0):
            raise ValueError(
                f"rows {self.first_row} and {self.rows} on, of a file of {self.file_rows} rows"
            )
        if (self.path is None) == (self.inline is None):
            raise ValueError("a sidecar is either a path or inline, not both and not neither")
        if self.path is not None:
            check_sidecar_path(self.path)
        elif len(self.inline_bytes()) != self.size_bytes:
            raise ValueError(
                f"inline state holds {len(self.inline_bytes())} bytes, its entry says "
                f"{self.size_bytes}"
            )
        elif self.size_bytes > MAX_INLINE_BYTES:
            raise ValueError(
                f"{self.size_bytes} bytes of inline state, {MAX_INLINE_BYTES} allowed: "
                "write a sidecar file"
            )
        return self

    @property
    def is_shared(self) -> bool:
        """Whether it is a slice of a file that other key groups have rows in, too."""
        return self.first_row is not None

    @property
    def row_range(self) -> tuple[int, int]:
        """Of a slice: its first row in the file, and how many rows it has."""
        return self.first_row or 0, self.rows

    @property
    def own_bytes(self) -> int:
        """Its size in bytes; of a slice, what its rows come to of the file's."""
        return self.size_bytes if self.slice_bytes is None else self.slice_bytes

    @property
    def identity(self) -> str:
        """By which it is known in a chain, wherever its rows lie: its SHA-256, or its origin."""
        return self.sha256 if self.origin is None else self.origin

    def inline_bytes(self) -> bytes:
        """Returns the decoded inline bytes; empty for an entry with a path.

        Raises:
            ValueError: Not canonical base64.
        """
        text = self.inline or ""
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as e:
            raise ValueError(f"inline state is no base64: {e}") from None
        if base64.b64encode(data).decode() != text:
            raise ValueError("inline state is no canonical base64")
        return data


class PartitionSnapshotEntry(_Record):
    """The state of one key group: what to read, oldest first.

    Attributes:
        partition_id: The key group.
        sidecars: The newest full one (or its pages), then the deltas after it. Never empty: a
            key group without state has no entry.
    """

    partition_id: Annotated[int, Field(ge=0, lt=MAX_KEY_GROUPS)]
    sidecars: Annotated[tuple[SidecarEntry, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sidecars[0].kind != "full":
            raise ValueError(f"key group {self.partition_id} starts with a delta: its base is gone")
        kinds = [s.kind for s in self.sidecars]
        if kinds != sorted(kinds, reverse=True):  # "full" sorts after "delta"
            raise ValueError(f"key group {self.partition_id} lists a full sidecar after a delta")
        epochs = [s.epoch for s in self.sidecars if s.epoch is not None]
        if epochs != sorted(epochs):
            raise ValueError(f"key group {self.partition_id} does not list its sidecars by epoch")
        return self


class OperatorSnapshotEntry(_Record):
    """The state of one operator.

    Attributes:
        partitions: Its non-empty key groups, ascending.
        total_bytes: Sum of their sidecars' sizes, of a shared one once; filled in when 0.
    """

    partitions: tuple[PartitionSnapshotEntry, ...] = ()
    total_bytes: U64 = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        ids = [p.partition_id for p in self.partitions]
        if ids != sorted(set(ids)):
            raise ValueError("key groups are not ascending and unique")
        total = _size(s for p in self.partitions for s in p.sidecars)
        if total > _U64:
            raise ValueError("the sizes of the sidecars overflow 64 bits")
        if self.total_bytes == 0:
            object.__setattr__(self, "total_bytes", total)
        elif self.total_bytes != total:
            raise ValueError(f"total_bytes is {self.total_bytes}, the sidecars hold {total}")
        return self


def _size(entries: Iterable[SidecarEntry]) -> int:
    """Returns the sum of the sizes, of a file that is listed several times once."""
    files: dict[str, int] = {}
    inline = 0
    for entry in entries:
        if entry.path is None:
            inline += entry.size_bytes
        else:
            files[entry.path] = entry.size_bytes
    return inline + sum(files.values())


class SourceOffsetEntry(_Record):
    """How far a source had been read.

    Attributes:
        source_type: Such as `kafka`, `file`, or the author's own.
        offsets: By the source's own names.
        epoch: Of the checkpoint.
    """

    source_type: Uid
    offsets: dict[str, str] = {}
    epoch: U64


class RunIdentity(_Record):
    """Who wrote: the generation is the fence token, ascending with every run of a store."""

    generation: Id
    run_id: RunId


class CellSpec(_Later):
    """A state cell.

    Attributes:
        kind: `read_modify_write`, `bag`, `set`, ...
        coder: Identity of its coder.
        combiner: Of a combining cell: which combiner's accumulator it holds, such as
            ``MeanCombineFn``; empty for another kind, and where it was not recorded.
    """

    kind: Uid
    coder: str
    combiner: str = ""

    _omitted: ClassVar[Mapping[str, object]] = {"combiner": ""}

    def same_form(self, other: CellSpec) -> bool:
        """Whether the bytes of one are those of the other."""
        return (self.kind, self.coder) == (other.kind, other.coder)


class OperatorSpec(_Later):
    """An operator as the pipeline declared it; compared at restore.

    Attributes:
        key_coder: Identity of the coder of its keys.
        window_coder: Identity of the coder of its windows.
        cells: Its cells, by name.
        time_sorted: Whether its input is processed in event-time order.
        windows: Which windows the input is in, such as ``FixedWindows[60000000,0]`` (microseconds);
            empty for the global one, and where it was not recorded.
    """

    key_coder: str
    window_coder: str
    cells: dict[Uid, CellSpec]
    time_sorted: bool = False
    windows: str = ""

    _omitted: ClassVar[Mapping[str, object]] = {"windows": ""}


class PipelineIdentity(_Later):
    """The pipeline that wrote a checkpoint.

    Attributes:
        operators: By uid.
        beam_version: Of the process that committed.
        python_version: Of the same.
        pickler: Which library pickles: ``cloudpickle`` or ``dill``; empty where it was not
            recorded.
    """

    operators: dict[Uid, OperatorSpec]
    beam_version: str
    python_version: str
    pickler: str = ""

    _omitted: ClassVar[Mapping[str, object]] = {"pickler": ""}


class CheckpointManifest(_Record):
    """What a checkpoint consists of. Self-contained: no other manifest is needed to restore.

    Attributes:
        version: Of the format: the lowest that can say what is in it.
        checkpoint_id: UUID v7, the identity that `parent_id` refers to.
        epoch: Ascends with every finalized checkpoint, independent of `id`.
        timestamp_ms: Wall clock.
        operators: By uid.
        source_offsets: By source name.
        parent_id: The `checkpoint_id` before it: lineage only, may be pruned.
        watermark: The cut in event time, microseconds; `None` at the drained end of the input.
        total_size_bytes: Sum over the operators; filled in when 0.
        id: Names the manifest; allocated ascending and never used twice.
        durable_phase: `prepared` is inventory, `finalized` a recovery point. Stored as
            `prepared` always; the `.final` marker decides it on load.
        participant_id: The namespace it belongs to, 0 for the only one.
        key_group_count: Of the run that wrote it.
        deployment_id: Of the store; filled in by `save` when empty.
        run: Who wrote it, for fencing.
        pipeline: What wrote it.
        drained: Taken when a stream ended, so that its epoch may have been closed before the source
            had delivered all of it: a replay from the boundary could miss something. (Stored only
            when true.)
        replaces: Ids of the checkpoints that this one took the place of, which are gone: the same
            cut, without what was to be forgotten. (Stored only when there are any.)
    """

    version: Literal[2, 3] = _UNSHARED_VERSION
    checkpoint_id: Uuid
    epoch: Id
    timestamp_ms: Id
    operators: dict[Uid, OperatorSnapshotEntry] = {}
    source_offsets: dict[Uid, SourceOffsetEntry] = {}
    parent_id: Uuid | None = None
    watermark: Micros | None = None
    total_size_bytes: U64 = 0
    id: Id
    durable_phase: Literal["prepared", "finalized"] = "prepared"
    participant_id: U64 = 0
    key_group_count: Annotated[int, Field(ge=1, le=MAX_KEY_GROUPS)] = 1
    deployment_id: Annotated[
        str, Field(pattern=r"^([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})?$")
    ] = ""
    run: RunIdentity | None = None
    pipeline: PipelineIdentity | None = None
    drained: bool = False
    replaces: tuple[Id, ...] = ()

    _omitted: ClassVar[Mapping[str, object]] = {"drained": False, "replaces": []}
    _versions: ClassVar[tuple[int, ...]] = (_UNSHARED_VERSION, FORMAT_VERSION)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if uuid.UUID(self.checkpoint_id).version != 7:
            raise ValueError(f"checkpoint_id {self.checkpoint_id} is no UUID v7")
        if self.parent_id == self.checkpoint_id:
            raise ValueError(f"checkpoint {self.checkpoint_id} is its own parent")
        total, inline, seen = 0, 0, set[str]()
        slices: dict[str, list[tuple[str, SidecarEntry]]] = {}
        for uid, operator in self.operators.items():
            total += operator.total_bytes
            for partition in operator.partitions:
                if partition.partition_id >= self.key_group_count:
                    raise ValueError(
                        f"operator {uid!r} lists key group {partition.partition_id} of "
                        f"{self.key_group_count}"
                    )
                for sidecar in partition.sidecars:
                    if sidecar.epoch is not None and sidecar.epoch > self.epoch:
                        raise ValueError(
                            f"operator {uid!r} lists a sidecar of epoch {sidecar.epoch} in a "
                            f"checkpoint of epoch {self.epoch}"
                        )
                    if sidecar.path is None:
                        inline += sidecar.size_bytes
                    elif sidecar.is_shared:
                        slices.setdefault(sidecar.path, []).append((uid, sidecar))
                    elif sidecar.path in seen:
                        raise ValueError(f"sidecar {sidecar.path} is listed twice")
                    else:
                        seen.add(sidecar.path)
        for path, of_file in slices.items():
            if path in seen:
                raise ValueError(f"sidecar {path} is listed twice")
            _check_slices(path, of_file)
        later = bool(slices) or any(s.appended_bytes for _, _, s in self.sidecars())
        object.__setattr__(self, "version", FORMAT_VERSION if later else _UNSHARED_VERSION)
        if total > _U64:
            raise ValueError("the sizes of the operators overflow 64 bits")
        if inline > MAX_INLINE_TOTAL_BYTES:
            raise ValueError(
                f"{inline} bytes of inline state in all, {MAX_INLINE_TOTAL_BYTES} allowed: "
                "write sidecar files"
            )
        if self.total_size_bytes == 0:
            object.__setattr__(self, "total_size_bytes", total)
        elif self.total_size_bytes != total:
            raise ValueError(
                f"total_size_bytes is {self.total_size_bytes}, the operators hold {total}"
            )
        return self

    @property
    def boundary(self) -> int | None:
        """The cut in event time, microseconds: the watermark under its other name."""
        return self.watermark

    def to_bytes(self) -> bytes:
        """Returns what is stored: the canonical JSON, of more than 4 KiB as gzip.

        The JSON is the same wherever it is made, the gzip is not: it depends on the zlib. So what
        a marker seals is what was stored, never what this gives for the same manifest later.

        Raises:
            CheckpointTooLargeError: More than 16 MiB of JSON.
        """
        return _packed(self.to_json())

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> CheckpointManifest:
        """Reads a manifest, JSON or gzip of it, from bytes that anybody may have written.

        Args:
            data: At most 16 MiB, and as JSON no more either.
            where: Names the object in errors.

        Raises:
            UnsupportedFormatError: Of a format version not known here.
            InvalidCheckpointError: Not a manifest; says what was found.
        """
        return cls.from_json(unpacked(data, where=where), where=where)

    def to_json(self) -> bytes:
        """Returns the canonical JSON of what is stored: always of the phase `prepared`.

        Raises:
            CheckpointTooLargeError: More than 16 MiB.
        """
        stored = self if self.durable_phase == "prepared" else self.with_phase("prepared")
        values = stored._values()
        for operator in values["operators"].values():
            _tell_shared_once(operator)
        data = _canonical(values)
        if len(data) > MAX_MANIFEST_BYTES:
            raise CheckpointTooLargeError(
                f"the manifest of checkpoint {self.id} takes {len(data)} bytes, "
                f"{MAX_MANIFEST_BYTES} allowed: use fewer key groups, or compact more often"
            )
        return data

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> CheckpointManifest:
        """Reads a manifest from bytes that anybody may have written.

        Args:
            data: At most 16 MiB.
            where: Names the object in errors.

        Raises:
            UnsupportedFormatError: Of a format version not known here.
            InvalidCheckpointError: Not a manifest; says what was found.
        """
        return parse_record(cls, data, where=where, limit=MAX_MANIFEST_BYTES)

    def with_phase(self, phase: Literal["prepared", "finalized"]) -> CheckpointManifest:
        """Returns the same manifest in the given phase."""
        return self.model_copy(update={"durable_phase": phase})

    def sidecars(self) -> list[tuple[str, int, SidecarEntry]]:
        """Returns all entries as (operator, key group, entry), in reading order."""
        return [
            (uid, partition.partition_id, sidecar)
            for uid, operator in self.operators.items()
            for partition in operator.partitions
            for sidecar in partition.sidecars
        ]

    def sidecar_paths(self) -> set[str]:
        """Returns the paths of the files that it lists."""
        return {s.path for _, _, s in self.sidecars() if s.path is not None}

    def pieces(self) -> list[tuple[str, tuple[int, ...], SidecarEntry]]:
        """Returns each file, and each inline piece, once: (operator, its key groups, entry).

        Of a shared file the entry is the newest slice that is listed.
        """
        found: list[tuple[str, list[int], SidecarEntry]] = []
        shared: dict[str, int] = {}
        for uid, group, entry in self.sidecars():
            at = shared.get(entry.path or "") if entry.is_shared else None
            if at is None:
                if entry.is_shared:
                    shared[entry.path or ""] = len(found)
                found.append((uid, [group], entry))
                continue
            _, groups, newest = found[at]
            if groups[-1] != group:
                groups.append(group)
            if (entry.epoch or 0) > (newest.epoch or 0):
                found[at] = uid, groups, entry
        return [(uid, tuple(groups), entry) for uid, groups, entry in found]


_OF_FILE = ("path", "kind", "size_bytes", "crc32c", "sha256")


def _check_slices(path: str, slices: list[tuple[str, SidecarEntry]]) -> None:
    """Raises `ValueError` for slices that cannot be of one file."""
    facts = {(uid, *(getattr(s, name) for name in _OF_FILE), s.file_rows) for uid, s in slices}
    if len(facts) != 1:
        raise ValueError(f"slices of {path} say different things of it")
    end = 0
    for first, rows in sorted(entry.row_range for _, entry in slices):
        if first < end:
            raise ValueError(f"slices of {path} overlap")
        end = first + rows


def _tell_shared_once(operator: dict[str, Any]) -> None:
    """Replaces what an operator's slices say of their files by the number of the file."""
    slices = [
        (chain, i, entry)
        for chain in (partition["sidecars"] for partition in operator["partitions"])
        for i, entry in enumerate(chain)
        if "first_row" in entry
    ]
    if not slices:
        return
    numbers: dict[str, int] = {}
    files: list[dict[str, Any]] = []
    for _, _, entry in slices:
        number = numbers.setdefault(entry["path"], len(files))
        if number == len(files):
            file = {name: entry[name] for name in (*_OF_FILE, "boundary", "epoch")}
            files.append(file | {"rows": entry["file_rows"]})
        elif (entry["epoch"] or 0) > (files[number]["epoch"] or 0):
            files[number] |= {name: entry[name] for name in ("boundary", "epoch")}
    for chain, i, entry in slices:
        number = numbers[entry["path"]]
        told = [number, *(entry[n] for n in ("first_row", "rows", "slice_bytes", "origin"))]
        at = [entry["boundary"], entry["epoch"]]
        if at != [files[number]["boundary"], files[number]["epoch"]]:
            told += at
        chain[i] = told
    operator["shared"] = files


def _spell_out_shared(operator: object, room: int) -> int:
    """The inverse of `_tell_shared_once`, of what anybody may have written.

    Args:
        operator: Is changed.
        room: Bytes that slices may take.

    Returns:
        Of these, how many are left.
    """
    if not isinstance(operator, dict) or "shared" not in operator:
        return room
    files, used = operator.pop("shared"), set[int]()
    fields = {*_OF_FILE, "boundary", "epoch", "rows"}
    if not isinstance(files, list) or not all(
        isinstance(file, dict) and file.keys() == fields for file in files
    ):
        raise ValueError(f"shared: not a list of files, each with {sorted(fields)}")
    if len({str(file["path"]) for file in files}) != len(files):
        raise ValueError("shared: a file is there twice")
    sizes = [len(_canonical(file)) + 100 for file in files]
    partitions = operator.get("partitions")
    for partition in partitions if isinstance(partitions, list) else ():
        chain = partition.get("sidecars") if isinstance(partition, dict) else None
        for i, told in enumerate(chain if isinstance(chain, list) else ()):
            if not isinstance(told, list):
                continue
            if len(told) not in (5, 7) or type(told[0]) is not int or not 0 <= told[0] < len(files):
                raise ValueError(f"a slice {str(told)[:100]} of {len(files)} shared files")
            file = dict(files[told[0]])
            room -= sizes[told[0]]
            if room < 0:
                raise ValueError("more slices of shared files than a record can hold")
            used.add(told[0])
            file["file_rows"] = file["rows"]
            file["first_row"], file["rows"], file["slice_bytes"], file["origin"] = told[1:5]
            if len(told) == 7:
                file["boundary"], file["epoch"] = told[5:]
            assert isinstance(chain, list)
            chain[i] = file
    if len(used) != len(files):
        raise ValueError("shared: a file of which no key group has rows")
    return room


class FinalMarker(_Record):
    """`manifests/<id>.final`: the checkpoint is a recovery point.

    It repeats what names a checkpoint whose manifest is damaged.
    """

    id: Id
    checkpoint_id: Uuid
    epoch: Id
    watermark: Micros | None
    manifest_sha256: Sha256

    @classmethod
    def of(cls, manifest: CheckpointManifest, stored: bytes) -> FinalMarker:
        """Seals the manifest whose stored bytes are given."""
        return cls(
            id=manifest.id,
            checkpoint_id=manifest.checkpoint_id,
            epoch=manifest.epoch,
            watermark=manifest.watermark,
            manifest_sha256=sha256_hex(stored),
        )


class AbandonedMarker(_Record):
    """`manifests/<id>.final` of a checkpoint that will never be finalized.

    Whoever creates the `.final` object first decides: the committer, or the run or prune that
    gave the attempt up.
    """

    id: Id
    abandoned_by: Uid


class Pointer(_Record):
    """`latest.json`: a shortcut to the newest finalized checkpoint, verified before use."""

    id: Id
    checkpoint_id: Uuid
    manifest_sha256: Sha256


class Namespace(_Record):
    """`namespace.json`: created once with the store."""

    format: Literal[2] = _UNSHARED_VERSION
    deployment_id: Uuid
    key_group_count: Annotated[int, Field(ge=1, le=MAX_KEY_GROUPS)] | None = None
    created_ms: U64


class RunClaim(_Record):
    """`runs/<generation>.json`: created once by the run that owns the store from then on."""

    generation: Id
    run_id: RunId
    claimed_ms: U64
    restored_from: Id | None = None


class Tag(_Record):
    """`tags/<name>.json`: a checkpoint that retention keeps."""

    name: Uid
    id: Id
    checkpoint_id: Uuid


def _packed(data: bytes) -> bytes:
    if len(data) <= PACKED_ABOVE:
        return data
    # The header that zlib writes has neither a time nor a name. Most of a manifest are digits of
    # hashes, in which short matches are chance and cost more than they save: hence Z_FILTERED.
    gzip = zlib.compressobj(
        _GZIP_LEVEL, zlib.DEFLATED, _GZIP_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_FILTERED
    )
    packed = gzip.compress(data) + gzip.flush()
    return packed if len(packed) < len(data) else data


def unpacked(data: bytes, *, where: str) -> bytes:
    """Returns what a manifest's stored bytes are gzip of; what is no gzip as it is.

    Bounded: no more than 16 MiB are unpacked, whatever the bytes stand for.

    Args:
        data: That anybody may have written.
        where: Names the object in errors.

    Raises:
        InvalidCheckpointError: Damaged, cut short, or more than one whole gzip.
    """
    if not data.startswith(_GZIP_MAGIC):
        return data
    if len(data) > MAX_MANIFEST_BYTES:
        _refuse(where, f"{len(data)} bytes, {MAX_MANIFEST_BYTES} allowed")
    gunzip = zlib.decompressobj(_GZIP_WBITS)
    try:
        text = gunzip.decompress(data, MAX_MANIFEST_BYTES + 1)
    except zlib.error as e:
        _refuse(where, f"no valid gzip: {e}")
    if len(text) > MAX_MANIFEST_BYTES:
        _refuse(where, f"gzip of more than the {MAX_MANIFEST_BYTES} bytes that are allowed")
    if not gunzip.eof:
        _refuse(where, f"gzip that ends too early, after {len(data)} bytes")
    if gunzip.unused_data:
        _refuse(where, f"{len(gunzip.unused_data)} bytes after the end of its gzip")
    return text


def sha256_hex(data: bytes) -> str:
    """Returns the SHA-256 as 64 lowercase hex digits."""
    return hashlib.sha256(data).hexdigest()


_R = TypeVar("_R", bound=_Record)


def parse_record(cls: type[_R], data: bytes, *, where: str, limit: int = MAX_RECORD_BYTES) -> _R:
    """Reads a record from bytes that anybody may have written, in bounded time and memory.

    Raises:
        UnsupportedFormatError: Of a format version not known here.
        InvalidCheckpointError: Too large, no JSON, repeated keys, NaN, nested too deeply,
            unknown, missing or ill-typed fields.
    """
    if len(data) > limit:
        _refuse(where, f"{len(data)} bytes, {limit} allowed")
    containers = data.count(b"[") + data.count(b"{")
    if containers > _MAX_CONTAINERS or data.count(b",") > _MAX_VALUES:
        _refuse(where, "more values than a record of this format can hold")
    try:
        text = data.decode("utf-8")
        raw = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        _refuse(where, f"no valid JSON: {str(e)[:300] or type(e).__name__}")
    if not isinstance(raw, dict):
        _refuse(where, f"a JSON {type(raw).__name__}, not an object")
    for name in ("version", "format"):
        found = raw.get(name)
        known = cls._versions
        if name in cls.model_fields and isinstance(found, int) and found not in known:
            raise UnsupportedFormatError(
                f"{where} is of format version {found}; this beam_ckpt reads "
                f"version{'s' * (len(known) > 1)} {' and '.join(map(str, known))}. "
                + ("Upgrade beam_ckpt" if found > known[-1] else "It was never released")
            )
    missing = [n for n in ("version", "format") if n in cls.model_fields and n not in raw]
    if missing:
        _refuse(where, f"no {missing[0]} field")
    version = raw.get("version")
    try:
        if version == FORMAT_VERSION:
            text = _spelled_out(raw)
        # pydantic collects every problem there is, which in a large hostile record are many.
        if len(data) > _SMALL:
            _stop_at_first(cls, raw, "")
        del raw
        record = cls.model_validate_json(text)
        if isinstance(record, CheckpointManifest) and record.version != version:
            raise ValueError(f"of version {version}, and what it holds is of {record.version}")
        return record
    except ValidationError as e:
        _refuse(where, describe(e))
    except ValueError as e:
        _refuse(where, str(e)[:1000])


def _spelled_out(raw: dict[str, Any]) -> str:
    """Returns a manifest of version 3 as JSON in which each slice is told in full."""
    operators, room = raw.get("operators"), _MAX_SPELLED_OUT
    for operator in operators.values() if isinstance(operators, dict) else ():
        room = _spell_out_shared(operator, room)
    return json.dumps(raw, ensure_ascii=False)


def _stop_at_first(cls: type[BaseModel], raw: object, at: str) -> None:
    """Raises for the first part of a record that has not the shape of its model."""
    if not isinstance(raw, dict):
        raise ValueError(f"{at or 'record'}: a JSON {type(raw).__name__}, not an object")
    shape = _shape(cls)
    for name, value in raw.items():
        if name not in shape:
            raise ValueError(f"{at}{name[:100]}: Extra inputs are not permitted")
        mapping, inner = shape[name]
        if mapping and isinstance(value, dict):
            for key, item in value.items():
                if inner is not None:
                    _stop_at_first(inner, item, f"{at}{name}.{key[:100]}.")
                elif not isinstance(item, str):
                    raise ValueError(f"{at}{name}.{key[:100]}: Input should be a valid string")
        elif inner is not None and isinstance(value, list):
            for index, item in enumerate(value):
                _stop_at_first(inner, item, f"{at}{name}.{index}.")
        elif inner is not None and value is not None:
            _stop_at_first(inner, value, f"{at}{name}.")
    if any(inner for _, inner in shape.values()):
        for name, field in cls.model_fields.items():
            if field.is_required() and name not in raw:
                raise ValueError(f"{at}{name}: Field required")
    else:
        try:
            cls.model_validate(raw)
        except ValidationError as e:
            raise ValueError(f"{at}{describe(e)}") from None


@functools.cache
def _shape(cls: type[BaseModel]) -> dict[str, tuple[bool, type[BaseModel] | None]]:
    """Of each field: whether it is a mapping, and the model in it if there is one."""
    return {
        name: (get_origin(field.annotation) is dict, _inner_model(field.annotation))
        for name, field in cls.model_fields.items()
    }


def _inner_model(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for a in get_args(annotation) if (m := _inner_model(a)) is not None), None)


def describe(error: ValidationError) -> str:
    """Says in a line which fields are wrong, without the values (which may be large)."""
    found = error.errors(include_url=False, include_input=False, include_context=False)[:5]
    parts = [f"{'.'.join(map(str, e['loc'])) or 'record'}: {e['msg']}" for e in found]
    return "; ".join(parts)[:1000]


def _refuse(where: str, found: str) -> NoReturn:
    raise InvalidCheckpointError(
        f"{where} is invalid: {found}. Run `beam-ckpt validate` for a report; a restore falls "
        "back to an older checkpoint, or copy the object back from where it is whole"
    )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(pairs) > _MAX_KEYS:
        raise ValueError(f"an object with {len(pairs)} keys")
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set[str]()
        twice = next(n for n, _ in pairs if n in seen or seen.add(n))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:100]!r} is given twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
