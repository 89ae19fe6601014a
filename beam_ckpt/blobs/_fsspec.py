"""Blobs behind any other fsspec URL: read always, written where the server is seen to enforce it.

`s3://` and `az://` (`abfs://`) carry the condition of a write inside the request. Whether the
server behind the URL enforces it is seen by a probe before the first write (see
`beam_ckpt.blobs._probes`); where it does not, and for all other protocols, writing is refused
with the reason, since two writers could both believe that they had published a checkpoint.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from beam_ckpt.blobs._base import (
    ABSENT,
    BlobConflict,
    BlobExists,
    BlobIndeterminate,
    BlobMeta,
    Blobs,
    BlobTooLarge,
    check_key,
)
from beam_ckpt.blobs._dialects import Dialect, dialect_of, version_of
from beam_ckpt.blobs._probes import PROBE_NAME, PreconditionFailed, why_not_writable
from beam_ckpt.blobs._retry import Budget, redact_url, take_number
from beam_ckpt.blobs._settle import marks, settle
from beam_ckpt.errors import CheckpointStorageError, StoreUrlError

__all__ = ["FsspecBlobs"]

_T = TypeVar("_T")


class _Opened:
    """A filesystem in one process."""

    def __init__(self, url: str, shown: str, options: Mapping[str, object]) -> None:
        import fsspec
        from fsspec.core import url_to_fs

        protocol = url.split("://", 1)[0].lower() if "::" not in url else ""
        self.kind = dialect_of(protocol)
        try:
            if protocol:
                fsspec.get_filesystem_class(protocol)
            arguments = self.kind.options(options)
            if protocol:
                # Clients with sessions are shared, by fsspec, where they are opened alike.
                share = self.kind.conditional
                arguments.update(use_listings_cache=False, skip_instance_cache=not share)
            self.fs, root = url_to_fs(url, **arguments)
        except ImportError as e:
            raise StoreUrlError(f"{shown}: {e}") from None
        except (ValueError, TypeError) as e:
            raise StoreUrlError(
                f"{shown} cannot be opened ({type(e).__name__}): check the scheme of the URL and "
                f"the storage options ({', '.join(sorted(options)) or 'none given'})"
            ) from None
        self.root = str(root).rstrip("/")
        self.dialect: Dialect = self.kind(self.fs)
        self.protocol = protocol or "::".join(link.split("://")[0] for link in url.split("::"))
        self.container_seen = False


class FsspecBlobs(Blobs):
    """Objects under an fsspec URL.

    Args:
        url: `s3://bucket/prefix`, `az://container/prefix`, or any other that fsspec knows.
        **options: `retry_seconds` (120): how long one operation goes on trying. All others go to
            the filesystem (`key`, `secret`, `endpoint_url`, `account_name`, ...); they are
            pickled with the instance and shown nowhere.

    Raises:
        StoreUrlError: The URL or an option is malformed. Nothing is opened yet.
    """

    def __init__(self, url: str, **options: object) -> None:
        if "://" not in url:
            raise StoreUrlError(f"{redact_url(url)!r} is not an fsspec URL: write scheme://path")
        self._secret_url = url
        self._url = redact_url(url)
        self._retry_seconds = take_number(options, "retry_seconds", 120.0)
        self._options = options
        self._open: tuple[int, _Opened] | None = None
        #: What the probe said: not asked yet, writable (""), or why not.
        self._refusal: str | None = None

    def __getstate__(self) -> dict[str, object]:
        """The configuration and what the probe said; the client stays in its process."""
        return {**self.__dict__, "_open": None}

    def __repr__(self) -> str:
        return f"FsspecBlobs({self._url!r})"

    @property
    def url(self) -> str:
        """Without user, password, query and fragment."""
        return self._url

    def _opened(self) -> _Opened:
        pid = os.getpid()
        held = self._open
        if held is None or held[0] != pid:
            held = (pid, _Opened(self._secret_url, self._url, self._options))
            self._open = held
        return held[1]

    def _path(self, key: str) -> str:
        return f"{self._opened().root}/{check_key(key)}"

    def _where(self, key: str) -> str:
        return f"{self._url.rstrip('/')}/{key}"

    # Errors

    def _told(self, error: Exception) -> str:
        """An error in a line, without what came in with the options or the URL."""
        text = " ".join(str(error).split())[:400]
        text = re.sub(r"(\w+://)[^\s/@]*@", r"\1", text)
        text = re.sub(r"\?[^\s'\"]*", "", text)
        for secret in sorted(_strings(self._options), key=len, reverse=True):
            if len(secret) >= 6 and not secret.startswith(("http://", "https://")):
                text = text.replace(secret, "***")
        return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__

    def _final(self, trouble: str, error: Exception, where: str) -> NoReturn:
        """Raises for what no retry will change."""
        told = self._told(error)
        if trouble == "absent":
            self._require_container()
            raise FileNotFoundError(errno.ENOENT, "no such object", where) from None
        if trouble == "no_container":
            self._refuse_container()
        if trouble == "denied":
            raise CheckpointStorageError(
                errno.EACCES,
                f"{where}: access denied ({told}): check the credentials, and that they may list, "
                "read, write and delete there",
            ) from None
        if trouble == "unsupported":
            raise CheckpointStorageError(
                errno.ENOSYS, f"{where}: the server does not support this ({told})"
            ) from None
        raise CheckpointStorageError(
            error.errno if isinstance(error, OSError) and error.errno else errno.EIO,
            f"{where}: {told}",
        ) from None

    def _refuse_container(self) -> NoReturn:
        raise CheckpointStorageError(
            errno.ENOENT,
            f"{self._url}: there is no such bucket or container: check the URL, or create it",
        ) from None

    def _require_container(self) -> None:
        """Tells an absent object from an absent bucket, which must not read as an empty store."""
        opened = self._opened()
        if not opened.container_seen:
            if not self._ask(lambda: opened.dialect.has_container(opened.root), self._url):
                self._refuse_container()
            opened.container_seen = True

    def _gave_up(self, where: str, error: Exception, budget: Budget) -> NoReturn:
        raise CheckpointStorageError(
            error.errno if isinstance(error, OSError) and error.errno else errno.EIO,
            f"{where}: {self._told(error)}; given up after {budget.seconds:g} s of retries: check "
            "the network and the service's status, then run again",
        ) from None

    def _ask(self, work: Callable[[], _T], where: str) -> _T:
        """Does what is safe to repeat, until it is answered or time is up."""
        dialect = self._opened().dialect
        budget = Budget(self._retry_seconds)
        while True:
            try:
                return work()
            except (PreconditionFailed, BlobTooLarge):
                raise
            except Exception as e:
                trouble = dialect.trouble(e)
                if trouble == "precondition":
                    raise PreconditionFailed from None
                if trouble not in ("again", "unknown"):
                    self._final(trouble, e, where)
                if not budget.pause(why=f"{where}: {self._told(e)}"):
                    self._gave_up(where, e, budget)

    # Writes

    def require_writable(self) -> None:
        """Probes once, and lets what it found travel with the pickled instance.

        Raises:
            StoreUrlError: Conditional writes are not enforced; the message says which.
            CheckpointStorageError: The probe could not be carried out.
        """
        if self._refusal is None:
            self._refusal = self._probe()
        if self._refusal:
            raise StoreUrlError(
                f"{self._url} cannot be written: {self._refusal}; a store there could lose or tear "
                "checkpoints. It can be read. Write to gs://, to a local path, or to an object "
                "store that enforces If-None-Match and If-Match"
            )

    def _probe(self) -> str:
        opened = self._opened()
        if not opened.dialect.conditional:
            return (
                f"fsspec's {opened.protocol!r} has no writes on condition that the server decides "
                "(create-if-absent and compare-and-swap)"
            )
        try:
            reason = self._ask(lambda: why_not_writable(opened.dialect, opened.root), self._url)
        except PreconditionFailed:
            return "a write on a condition that holds is refused"
        except CheckpointStorageError as e:
            if e.errno == errno.ENOSYS:
                return "the server does not know writes on condition"
            raise
        opened.container_seen = True
        return reason or ""

    def _write(self, key: str, data: bytes, expected: str, lost: type[Exception]) -> BlobMeta:
        """Writes on condition, until it is known who won or time is up."""
        self.require_writable()
        dialect, path, where = self._opened().dialect, self._path(key), self._where(key)
        token = secrets.token_hex(16)
        budget = Budget(self._retry_seconds)
        in_doubt = False
        while True:
            last: Exception
            try:
                version = dialect.write(path, data, marks(token, expected), expected)
                return BlobMeta(key, len(data), version)
            except PreconditionFailed as e:
                meta = self._settle(key, len(data), token, expected, in_doubt, lost)
                if meta is not None:
                    return meta
                last = e
            except Exception as e:
                trouble = dialect.trouble(e)
                last = e
                if trouble == "unknown":
                    in_doubt = True
                elif trouble != "again":
                    if in_doubt:
                        break
                    self._final(trouble, e, where)
            if not budget.pause(why=f"write {where}: {self._told(last)}"):
                if in_doubt:
                    break
                self._gave_up(where, last, budget)
        try:
            meta = self._settle(key, len(data), token, expected, True, lost)
        except CheckpointStorageError as e:
            raise BlobIndeterminate(key) from e
        if meta is None:
            raise BlobIndeterminate(key)
        return meta

    def _settle(
        self,
        key: str,
        size: int,
        token: str,
        expected: str,
        in_doubt: bool,
        lost: type[Exception],
    ) -> BlobMeta | None:
        """Reads back and decides; see `beam_ckpt.blobs._settle.settle`."""
        path = self._path(key)
        holder = self._ask(lambda: self._opened().dialect.holder(path), self._where(key))
        verdict = settle(holder, token=token, expected=expected, in_doubt=in_doubt)
        if verdict == "lost":
            raise lost(key)
        if verdict == "unknown":
            raise BlobIndeterminate(key)
        if holder is None or verdict == "not_yet":
            return None
        return BlobMeta(key, size, holder.version)

    def put(self, key: str, data: bytes) -> BlobMeta:
        """Writes an object; one that is there with the same bytes is taken as written."""
        data = bytes(data)
        try:
            return self._write(key, data, ABSENT, BlobExists)
        except BlobExists:
            pass
        try:
            held, meta = self.get(key, max_bytes=len(data))
            if held == data:
                return meta
        except (FileNotFoundError, BlobTooLarge):
            pass
        path, token = self._path(key), secrets.token_hex(16)
        dialect = self._opened().dialect
        version = self._ask(
            lambda: dialect.write(path, data, marks(token, None), None), self._where(key)
        )
        return BlobMeta(key, len(data), version)

    def put_if_absent(self, key: str, data: bytes, note: str = "") -> BlobMeta:
        """Creates an object with one request. See `Blobs.put_if_absent`."""
        return self._write(key, bytes(data), ABSENT, BlobExists)

    def replace(self, key: str, data: bytes, expected: str) -> BlobMeta:
        """Writes an object of the expected version. See `Blobs.replace`.

        On S3 a version is an ETag, which a rewrite of the same bytes leaves as it is.
        """
        if '"' in expected or not expected.isprintable():
            raise BlobConflict(key)  # no version of ours
        return self._write(key, bytes(data), expected, BlobConflict)

    def delete_many(self, keys: Iterable[str]) -> None:
        """Deletes in the batches that the store has. See `Blobs.delete_many`."""
        paths = [self._path(key) for key in dict.fromkeys(keys)]
        if paths:
            self.require_writable()
            self._ask(lambda: self._opened().dialect.delete(paths), self._url)

    # Reads

    def get(self, key: str, *, max_bytes: int | None = None) -> tuple[bytes, BlobMeta]:
        """Reads a whole object of one version. See `Blobs.get`."""
        path, dialect = self._path(key), self._opened().dialect
        part = self._ask(lambda: dialect.part(path, 0, None, max_bytes, None), self._where(key))
        if max_bytes is not None and part.size > max_bytes:
            raise BlobTooLarge(key, part.size, max_bytes)
        if len(part.data) != part.size:
            raise CheckpointStorageError(
                errno.EIO,
                f"{self._where(key)}: {len(part.data)} bytes came of {part.size}: "
                f"fsspec's {self._opened().protocol!r} knows no sizes, or the read was cut off",
            )
        return part.data, BlobMeta(key, part.size, part.version)

    def get_range(self, key: str, start: int, end: int, version: str | None = None) -> bytes:
        """Reads a part of an object. See `Blobs.get_range`."""
        if start < 0 or end < start:
            raise ValueError(f"[{start}, {end}) is no range of bytes")
        path, dialect = self._path(key), self._opened().dialect
        found = None
        if start == end or version is not None:
            found = self._ask(lambda: dialect.stat(path), self._where(key))
            if found is None:
                self._require_container()
                raise FileNotFoundError(errno.ENOENT, "no such object", self._where(key))
            if version is not None and found[1] != version:
                raise BlobConflict(key)
            if start >= min(end, found[0]):
                return b""

        def read() -> bytes:
            try:
                return dialect.part(path, start, end, None, version).data
            except Exception as e:
                if dialect.trouble(e) == "out_of_range":
                    return b""
                raise

        try:
            return self._ask(read, self._where(key))
        except PreconditionFailed:
            raise BlobConflict(key) from None

    def head(self, key: str) -> BlobMeta | None:
        """Returns an object's metadata. See `Blobs.head`."""
        path, dialect = self._path(key), self._opened().dialect
        found = self._ask(lambda: dialect.stat(path), self._where(key))
        if found is None:
            self._require_container()
            return None
        return BlobMeta(key, found[0], found[1])

    def list(self, prefix: str, start_after: str = "") -> Sequence[BlobMeta]:
        """Lists with `find` of the directory of the prefix. See `Blobs.list`."""
        opened = self._opened()
        folder = prefix.rpartition("/")[0]
        base = f"{opened.root}/{folder}" if folder else opened.root

        def find() -> Mapping[str, Any]:
            opened.fs.invalidate_cache()
            found = opened.fs.find(base, detail=True, withdirs=False)
            # adlfs answers with a list where the base is an object: nothing is beneath it.
            return found if isinstance(found, Mapping) else {}

        try:
            found = self._ask(find, self._where(f"{prefix}*"))
        except FileNotFoundError:
            found = {}
        if not found:
            self._require_container()
        out = []
        start = f"{opened.root}/" if opened.root else ""
        for name, info in found.items():
            key = str(name).removeprefix(start)
            if not key.startswith(prefix) or key <= start_after or key.endswith("/"):
                continue
            if key.rpartition("/")[2].startswith(PROBE_NAME) or info.get("type") != "file":
                continue
            out.append(BlobMeta(key, int(info.get("size") or 0), version_of(info)))
        return sorted(out, key=lambda m: m.key)

    def exists(self) -> bool:
        """Whether there is anything under the URL."""
        opened = self._opened()
        return bool(self._ask(lambda: opened.fs.exists(opened.root), self._url))


def _strings(options: object) -> Iterable[str]:
    if isinstance(options, str):
        yield options
    elif isinstance(options, Mapping):
        for value in options.values():
            yield from _strings(value)
    elif isinstance(options, (list, tuple)):
        for value in options:
            yield from _strings(value)
