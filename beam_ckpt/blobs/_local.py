"""Objects as files of a local POSIX file system, durable when a write returns.

fsspec is bypassed: its local `mode="create"` is a check followed by a write, its plain writes
are torn, its transactions stage in the system's temporary directory, and nothing is fsynced.
Here a write goes to a temporary file in the same directory, is fsynced and then published by
`link` (create once) or `rename` (replace, under a lock and after comparing versions), and the
directory is fsynced. Versions compare inode, size and modification time; a replaced file's
time is pushed past its predecessor's, so that a reused inode is never taken for the old file.

Works for any number of processes of one host. On a network file system the lock needs a lock
daemon.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from beam_ckpt.blobs._base import (
    ABSENT,
    BlobConflict,
    BlobExists,
    BlobInvalid,
    BlobMeta,
    Blobs,
    BlobTooLarge,
    check_key,
)
from beam_ckpt.errors import StoreUrlError

__all__ = ["LocalBlobs"]

_TEMPORARY = ".tmp-"
_LOCK = ".lock-"


def _version(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class LocalBlobs(Blobs):
    """The files below a directory, which is created with the first object."""

    shared_root = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Takes the root; relative paths are made absolute now.

        Raises:
            StoreUrlError: There is a file at the path, or on the way to it.
        """
        # The root itself may be a symlink (the user's choice); nothing below it may.
        self._root = os.path.realpath(os.path.expanduser(os.fspath(path)))
        self._made: set[str] = set()
        self._check_root()

    def __getstate__(self) -> str:
        """Pickles the path alone."""
        return self._root

    def __setstate__(self, state: str) -> None:
        """Knows no directories yet."""
        self._root = state
        self._made = set()

    @property
    def url(self) -> str:
        """The absolute path."""
        return self._root

    # -- paths ---------------------------------------------------------------------------

    def _check_root(self) -> None:
        above = self._root
        while True:
            try:
                mode = os.stat(above).st_mode
            except (FileNotFoundError, NotADirectoryError):
                above = os.path.dirname(above)
                continue
            except OSError:  # it cannot be looked at: whoever uses it is told why
                return
            if not stat.S_ISDIR(mode):
                raise StoreUrlError(
                    f"the store {self._root} cannot be a directory: {above} is a file. "
                    "Give the path of a directory, new or of an existing store"
                )
            return

    def _path(self, key: str) -> str:
        return os.path.join(self._root, *check_key(key).split("/"))

    def _refuse_symlinks(self, path: str, key: str) -> None:
        parent = os.path.dirname(path)
        if os.path.realpath(parent) != parent:
            raise BlobInvalid(
                key, f"a directory on its path is a symbolic link (to {os.path.realpath(parent)})"
            )

    def _make_directories(self, path: str) -> None:
        if path in self._made and os.path.isdir(path):
            return
        missing: list[str] = []
        above = path
        while True:
            try:
                found = os.lstat(above)
            except FileNotFoundError:
                missing.append(above)
                above = os.path.dirname(above)
                continue
            inside = len(above) > len(self._root)
            if inside and stat.S_ISLNK(found.st_mode):
                raise BlobInvalid(os.path.relpath(path, self._root), f"{above} is a symbolic link")
            break
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
            # Also when another process made it: its fsync may not have happened yet.
            _sync_directory(os.path.dirname(directory))
        self._refuse_symlinks(os.path.join(path, "x"), os.path.relpath(path, self._root))
        self._made.add(path)

    # -- writes --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _staged(self, path: str, data: bytes, *, newer_than: int = 0) -> Iterator[str]:
        directory = os.path.dirname(path)
        self._make_directories(directory)
        name = os.path.join(directory, f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}")
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(fd, rest) :]
                if newer_than:
                    now = max(time.time_ns(), newer_than + 1)
                    os.utime(fd, ns=(now, now))
                os.fsync(fd)
            finally:
                os.close(fd)
            yield name
        finally:
            with contextlib.suppress(FileNotFoundError):  # a rename took it away
                os.unlink(name)

    def put(self, key: str, data: bytes) -> BlobMeta:
        """See `Blobs.put`."""
        path = self._path(key)
        with self._staged(path, data) as staged:
            found = os.stat(staged)
            os.replace(staged, path)
        _sync_directory(os.path.dirname(path))
        return BlobMeta(key, found.st_size, _version(found))

    def put_if_absent(self, key: str, data: bytes, note: str = "") -> BlobMeta:
        """See `Blobs.put_if_absent`."""
        path = self._path(key)
        with self._staged(path, data) as staged:
            try:
                os.link(staged, path, follow_symlinks=False)
            except FileExistsError:
                # Two links: a repeated request of a network file system, and the first one won.
                if os.stat(staged).st_nlink != 2:
                    # The winner may not have reached its fsync: what we report is durable.
                    _sync_directory(os.path.dirname(path))
                    raise BlobExists(key) from None
            except OSError as e:
                if e.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                    raise
                self._create_without_links(staged, path, key)
            found = os.lstat(path)
        _sync_directory(os.path.dirname(path))
        return BlobMeta(key, found.st_size, _version(found))

    def _create_without_links(self, staged: str, path: str, key: str) -> None:
        # File systems without hard links: a lock that every writer here takes, then rename.
        with self._locked(path):
            if os.path.lexists(path):
                raise BlobExists(key)
            os.replace(staged, path)

    @contextlib.contextmanager
    def _locked(self, path: str) -> Iterator[None]:
        import fcntl  # POSIX only, like the rest of this file

        directory, name = os.path.split(path)
        self._make_directories(directory)
        lock = os.path.join(directory, _LOCK + name)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def replace(self, key: str, data: bytes, expected: str) -> BlobMeta:
        """See `Blobs.replace`."""
        if expected == ABSENT:
            try:
                return self.put_if_absent(key, data)
            except BlobExists:
                raise BlobConflict(key) from None
        path = self._path(key)
        with self._locked(path):
            try:
                current = os.lstat(path)
            except FileNotFoundError:
                raise BlobConflict(key) from None
            if _version(current) != expected:
                raise BlobConflict(key)
            with self._staged(path, data, newer_than=current.st_mtime_ns) as staged:
                found = os.stat(staged)
                os.replace(staged, path)
            _sync_directory(os.path.dirname(path))
        return BlobMeta(key, found.st_size, _version(found))

    def delete_many(self, keys: Iterable[str]) -> None:
        """See `Blobs.delete_many`."""
        touched: set[str] = set()
        try:
            for key in keys:
                path = self._path(key)
                self._refuse_symlinks(path, key)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                    touched.add(os.path.dirname(path))
        finally:
            for directory in sorted(touched):
                _sync_directory(directory)

    # -- reads ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, os.stat_result]]:
        path = self._path(key)
        self._refuse_symlinks(path, key)
        try:
            # Neither follows a link nor waits for the other end of a pipe.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except NotADirectoryError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        except OSError as e:
            if e.errno == errno.ELOOP:
                raise BlobInvalid(key, "is a symbolic link, which no store writes") from None
            if e.errno == errno.ENXIO:
                raise BlobInvalid(key, "is no regular file") from None
            raise
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                kind = "a directory" if stat.S_ISDIR(found.st_mode) else "no regular file"
                raise BlobInvalid(key, f"is {kind}")
            yield fd, found
        finally:
            os.close(fd)

    def get(self, key: str, *, max_bytes: int | None = None) -> tuple[bytes, BlobMeta]:
        """See `Blobs.get`."""
        with self._opened(key) as (fd, found):
            if max_bytes is not None and found.st_size > max_bytes:
                raise BlobTooLarge(key, found.st_size, max_bytes)
            parts: list[bytes] = []
            left = found.st_size + 1  # one more, to see a file that grows
            while left and (part := os.read(fd, min(left, 1 << 24))):
                parts.append(part)
                left -= len(part)
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            if len(data) != found.st_size:
                change = "grew" if len(data) > found.st_size else "was cut short"
                raise BlobInvalid(key, f"{change} while it was read ({found.st_size} bytes)")
        return data, BlobMeta(key, found.st_size, _version(found))

    def get_range(self, key: str, start: int, end: int, version: str | None = None) -> bytes:
        """See `Blobs.get_range`."""
        with self._opened(key) as (fd, found):
            if version is not None and _version(found) != version:
                raise BlobConflict(key)
            parts: list[bytes] = []
            at, end = start, min(end, found.st_size)
            while at < end and (part := os.pread(fd, end - at, at)):
                parts.append(part)
                at += len(part)
        return b"".join(parts)

    def head(self, key: str) -> BlobMeta | None:
        """See `Blobs.head`."""
        path = self._path(key)
        self._refuse_symlinks(path, key)
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(found.st_mode):
            raise BlobInvalid(key, "is no regular file")
        return BlobMeta(key, found.st_size, _version(found))

    def list(self, prefix: str, start_after: str = "") -> Sequence[BlobMeta]:
        """See `Blobs.list`."""
        above = prefix.rpartition("/")[0]
        if above:
            self._refuse_symlinks(self._path(prefix + "x"), prefix)
        found: list[BlobMeta] = []
        pending = [(above + "/" if above else "", self._path(above) if above else self._root)]
        while pending:
            base, directory = pending.pop()
            try:
                entries = os.scandir(directory)
            except (FileNotFoundError, NotADirectoryError):
                continue
            with entries:
                for entry in entries:
                    key = base + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if key.startswith(prefix) or prefix.startswith(key + "/"):
                            pending.append((key + "/", entry.path))
                    elif (
                        entry.is_file(follow_symlinks=False)
                        and key.startswith(prefix)
                        and key > start_after
                        and not entry.name.startswith((_TEMPORARY, _LOCK))
                    ):
                        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                            # Not entry.stat() of a link: is_file saw a regular file.
                            info = entry.stat(follow_symlinks=False)
                            found.append(BlobMeta(key, info.st_size, _version(info)))
        return sorted(found, key=attrgetter("key"))

    def odd_entries(self, prefix: str) -> Sequence[str]:
        """See `Blobs.odd_entries`."""
        try:
            entries = os.scandir(self._path(prefix.rstrip("/")))
        except (FileNotFoundError, NotADirectoryError):
            return []
        with entries:
            return sorted(prefix + e.name for e in entries if not e.is_file(follow_symlinks=False))

    def temporaries(self, min_age: float) -> Sequence[BlobMeta]:
        """See `Blobs.temporaries`."""
        limit = time.time() - min_age
        found: list[BlobMeta] = []
        for directory, _, names in os.walk(self._root):
            for name in names:
                if not name.startswith(_TEMPORARY):
                    continue
                path = os.path.join(directory, name)
                with contextlib.suppress(FileNotFoundError):
                    info = os.lstat(path)
                    if stat.S_ISREG(info.st_mode) and info.st_mtime <= limit:
                        key = os.path.relpath(path, self._root).replace(os.sep, "/")
                        found.append(BlobMeta(key, info.st_size, _version(info)))
        return sorted(found, key=lambda meta: meta.key)

    # -- the root ------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether the directory is there."""
        return os.path.isdir(self._root)

    def require_writable(self) -> None:
        """Refuses a root that is a file, or that cannot be made or written."""
        self._check_root()
        above = self._root
        while not os.path.exists(above):
            above = os.path.dirname(above)
        if not os.access(above, os.W_OK | os.X_OK):
            code = errno.EROFS if os.statvfs(above).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(code, os.strerror(code), above)
