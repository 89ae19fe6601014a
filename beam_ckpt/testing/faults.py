"""Faults on purpose: kill, fail, delay or lose the answer of a store's n-th operation.

A `FaultPlan` is data: it pickles, so a faulty store works in workers too. With a directory its
counts (and its record of operations) are shared by all processes, and outlive those it kills:
a fault that has struck does not strike the restarted process again.

Example:
    >>> from beam_ckpt import open_store
    >>> plan = FaultPlan(Fault("put", "state/*", nth=2, action="error", errno=errno.ENOSPC))
    >>> store = faulty_store(open_store("memory://docs-faults"), plan)
    >>> sidecar = dict(operator="a", key_group=0, boundary=1, run_id="r", kind="full", rows=1)
    >>> store.write_sidecar(data=b"fits", **sidecar).size_bytes
    4
    >>> store.write_sidecar(data=b"does not", **sidecar)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    beam_ckpt.errors.CheckpointStorageError: [Errno 28] writing memory://docs-faults/state/...

To strike at every step of a run: record it once, then enumerate.

    >>> recorder = FaultPlan(record=True)
    >>> other = faulty_store(open_store("memory://docs-faults"), recorder)
    >>> _ = other.write_sidecar(data=b"fits", **sidecar)
    >>> [point.when for point in fault_points(recorder.operations())]
    ['before', 'after']
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeVar
from uuid import uuid4

from beam_ckpt.blobs import BlobIndeterminate, BlobMeta, Blobs
from beam_ckpt.store import CheckpointStore
from beam_ckpt.store._blobstore import BlobCheckpointStore

__all__ = ["Fault", "FaultPlan", "FaultyBlobs", "Operation", "fault_points", "faulty_store"]

_T = TypeVar("_T")

_CHANGES = frozenset({"put", "put_if_absent", "replace", "delete"})
_READS = frozenset({"get", "get_range", "head", "list"})


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        operation: `put`, `put_if_absent`, `replace`, `delete` (of one key of a batch), `get`,
            `get_range`, `head`, `list`; or `change` for any of the first four, `read` for any
            of the rest, `*` for any.
        key: Glob of keys (of prefixes, for `list`); `*` also matches slashes.
        nth: Which matching operation it strikes, from 1.
        when: Before the operation, so that it never happens, or after it has happened.
        action: `kill` sends SIGKILL to its own process; `error` raises `OSError(errno)`;
            `lost_response` does the operation and then says that its outcome is unknown;
            `delay` sleeps.
        errno: For `error`.
        seconds: For `delay`.
        times: How many matching operations in a row it strikes.
    """

    operation: str = "*"
    key: str = "*"
    nth: int = 1
    when: Literal["before", "after"] = "before"
    action: Literal["kill", "error", "lost_response", "delay"] = "kill"
    errno: int = errno.EIO
    seconds: float = 0.0
    times: int = 1

    def __post_init__(self) -> None:
        """Refuses an operation that does not exist, which would never strike."""
        if self.operation not in _CHANGES | _READS | {"change", "read", "*"}:
            raise ValueError(f"{self.operation!r} is no operation of blobs")

    def matches(self, operation: str, key: str) -> bool:
        """Whether it counts this operation."""
        group = "change" if operation in _CHANGES else "read"
        return self.operation in ("*", operation, group) and fnmatchcase(key, self.key)

    def strikes(self, count: int) -> bool:
        """Whether the `count`-th matching operation is struck."""
        return self.nth <= count < self.nth + self.times


@dataclass(frozen=True)
class Operation:
    """An operation that was recorded: what, on which key, by which process."""

    name: str
    key: str
    pid: int


_counts: dict[tuple[str, int], int] = {}
_records: dict[str, list[Operation]] = {}
_lock = threading.Lock()


@dataclass(frozen=True, init=False)
class FaultPlan:
    """Faults to strike, and whether to record.

    Attributes:
        faults: Each counts for itself.
        directory: Where counts and records are kept, to be shared by processes. Without one
            they are this process's (and shared by all copies of the plan in it).
        record: Whether to record all operations.
    """

    faults: tuple[Fault, ...]
    directory: str | None = None
    record: bool = False
    token: str = field(default_factory=lambda: uuid4().hex)

    def __init__(
        self,
        *faults: Fault,
        directory: str | os.PathLike[str] | None = None,
        record: bool = False,
    ) -> None:
        """Takes the faults; a directory must exist."""
        object.__setattr__(self, "faults", faults)
        object.__setattr__(self, "directory", None if directory is None else os.fspath(directory))
        object.__setattr__(self, "record", record)
        object.__setattr__(self, "token", uuid4().hex)

    def operations(self) -> list[Operation]:
        """Returns what was recorded, in order."""
        if self.directory is None:
            with _lock:
                return list(_records.get(self.token, ()))
        log = Path(self.directory, "operations.jsonl")
        lines = log.read_text().splitlines() if log.exists() else []
        return [Operation(*json.loads(line)) for line in lines]

    def struck(self) -> list[int]:
        """Returns how many matching operations each fault has counted."""
        return [self._count(i, add=False) for i in range(len(self.faults))]

    def _count(self, index: int, *, add: bool = True) -> int:
        if self.directory is None:
            with _lock:
                key = (self.token, index)
                _counts[key] = _counts.get(key, 0) + add
                return _counts[key]
        path = os.path.join(self.directory, f"count-{index}")
        if not add:
            return os.stat(path).st_size if os.path.exists(path) else 0
        return _append(path, b".")

    def _note(self, operation: str, key: str) -> None:
        if not self.record:
            return
        if self.directory is None:
            with _lock:
                _records.setdefault(self.token, []).append(Operation(operation, key, os.getpid()))
        else:
            line = json.dumps([operation, key, os.getpid()]) + "\n"
            _append(os.path.join(self.directory, "operations.jsonl"), line.encode())

    def due(self, operation: str, key: str) -> list[Fault]:
        """Counts an operation and returns the faults that strike it."""
        self._note(operation, key)
        return [
            fault
            for index, fault in enumerate(self.faults)
            if fault.matches(operation, key) and fault.strikes(self._count(index))
        ]

    def watches_deletes(self) -> bool:
        """Whether deletes are looked at one by one."""
        return self.record or any(f.operation in ("delete", "change", "*") for f in self.faults)


def _append(path: str, data: bytes) -> int:
    # One write to a file open for append is one step among processes; then the offset is ours.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, data)
        return os.lseek(fd, 0, os.SEEK_CUR)
    finally:
        os.close(fd)


def fault_points(
    operations: Iterable[Operation],
    *,
    action: Literal["kill", "error", "lost_response"] = "kill",
    reads: bool = False,
) -> Iterator[Fault]:
    """Yields a fault before and after each recorded change (and each read, if asked).

    Points go by the number of the operation, since names are unique in every run.
    """
    names = [op.name for op in operations]
    groups = [("change", sum(n in _CHANGES for n in names))]
    if reads:
        groups.append(("read", sum(n in _READS for n in names)))
    for group, total in groups:
        for nth in range(1, total + 1):
            yield Fault(group, nth=nth, when="before", action=action)
            yield Fault(group, nth=nth, when="after", action=action)


class FaultyBlobs(Blobs):
    """Any blobs, with the faults of a plan."""

    def __init__(self, inner: Blobs, plan: FaultPlan) -> None:
        """Wraps `inner`."""
        self._inner = inner
        self._plan = plan
        self.shared_root = inner.shared_root

    @property
    def url(self) -> str:
        """That of the inner blobs."""
        return self._inner.url

    def _run(self, operation: str, key: str, act: Callable[[], _T]) -> _T:
        due = self._plan.due(operation, key)
        for fault in due:
            if fault.when == "before" and fault.action != "lost_response":
                _strike(fault, operation, key)
        result = act()
        for fault in due:
            if fault.when == "after" or fault.action == "lost_response":
                _strike(fault, operation, key)
        return result

    def put(self, key: str, data: bytes) -> BlobMeta:
        """See `Blobs.put`."""
        return self._run("put", key, lambda: self._inner.put(key, data))

    def put_if_absent(self, key: str, data: bytes, note: str = "") -> BlobMeta:
        """See `Blobs.put_if_absent`."""
        return self._run("put_if_absent", key, lambda: self._inner.put_if_absent(key, data, note))

    def replace(self, key: str, data: bytes, expected: str) -> BlobMeta:
        """See `Blobs.replace`."""
        return self._run("replace", key, lambda: self._inner.replace(key, data, expected))

    def get(self, key: str, *, max_bytes: int | None = None) -> tuple[bytes, BlobMeta]:
        """See `Blobs.get`."""
        return self._run("get", key, lambda: self._inner.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, end: int, version: str | None = None) -> bytes:
        """See `Blobs.get_range`."""
        return self._run("get_range", key, lambda: self._inner.get_range(key, start, end, version))

    def head(self, key: str) -> BlobMeta | None:
        """See `Blobs.head`."""
        return self._run("head", key, lambda: self._inner.head(key))

    def list(self, prefix: str, start_after: str = "") -> Sequence[BlobMeta]:
        """See `Blobs.list`."""
        return self._run("list", prefix, lambda: self._inner.list(prefix, start_after))

    def delete_many(self, keys: Iterable[str]) -> None:
        """See `Blobs.delete_many`. One key at a time where the plan looks at deletes."""
        if not self._plan.watches_deletes():
            self._inner.delete_many(keys)
            return
        for key in keys:
            self._delete(key)

    def _delete(self, key: str) -> None:
        self._run("delete", key, lambda: self._inner.delete_many([key]))

    def exists(self) -> bool:
        """See `Blobs.exists`."""
        return self._inner.exists()

    def require_writable(self) -> None:
        """See `Blobs.require_writable`."""
        self._inner.require_writable()

    def odd_entries(self, prefix: str) -> Sequence[str]:
        """See `Blobs.odd_entries`."""
        return self._inner.odd_entries(prefix)

    def temporaries(self, min_age: float) -> Sequence[BlobMeta]:
        """See `Blobs.temporaries`."""
        return self._inner.temporaries(min_age)


def _strike(fault: Fault, operation: str, key: str) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "error":
        raise OSError(fault.errno, os.strerror(fault.errno), key)
    elif fault.action == "lost_response":
        raise BlobIndeterminate(f"the answer to {operation} {key} was lost")
    else:
        time.sleep(fault.seconds)


def faulty_store(store: CheckpointStore, plan: FaultPlan) -> CheckpointStore:
    """Returns the store with the faults of a plan between it and its storage.

    Raises:
        TypeError: It is not a store over blobs.
    """
    if not isinstance(store, BlobCheckpointStore):
        raise TypeError(f"{store!r} does not stand on blobs: wrap it yourself")
    return store.with_blobs(FaultyBlobs(store.blobs, plan))
