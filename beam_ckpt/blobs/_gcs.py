"""Blobs in Google Cloud Storage, over the plain JSON API client of gcsfs.

Only the session and the credentials of `gcsfs.core.GCSFileSystem` are used: its own calls retry
inside (so that a lost response turns a caller's success into "already exists"), have no
deadline, know no compare-and-swap, and frame uploads with a constant boundary.

How the guarantees of `beam_ckpt.blobs._base` come about:

* A write is one multipart request: the precondition (`ifGenerationMatch`), the declared crc32c
  and the bytes arrive together, and the object appears whole or not at all.
* Every write carries a random token in the object's metadata, the same one over all its
  attempts. After a 412 the object is read back: our token there means that an earlier attempt
  won and only its response was lost.
* Beside the token is the generation that the write replaced. It settles the last doubt: an
  attempt of unknown outcome is known to have failed when another writer's object replaced the
  very generation that ours expected.
* Bodies are checked against the crc32c that the server keeps, on writes and on reads.

The version of an object is its generation. Google allows an object name about one write a
second; more is answered with 429 and waited out.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import errno
import json
import os
import pickle
import re
import secrets
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.message import Message
from email.parser import BytesParser
from typing import Any, NoReturn
from urllib.parse import quote

from beam_ckpt.blobs._base import (
    ABSENT,
    BlobConflict,
    BlobExists,
    BlobIndeterminate,
    BlobInvalid,
    BlobMeta,
    Blobs,
    BlobTooLarge,
    check_key,
    crc32c,
)
from beam_ckpt.blobs._retry import Budget, take_number
from beam_ckpt.blobs._settle import TOKEN, Holder, marks, settle
from beam_ckpt.errors import CheckpointStorageError, StoreUrlError

__all__ = ["GcsBlobs"]

_NOTE = "beam-ckpt-note"
_FIELDS = "name,size,generation,crc32c,storageClass,metadata"
_PAGE = 1000
_BATCH = 100  # the most that Google takes in one batch request
_MIB = 1 << 20
_SLICE = 256 << 10
# Slower than this and an attempt is given up; its outcome is then unknown, and settled.
_SLOWEST_BYTES_A_SECOND = 128 << 10
_SAME_OBJECT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    url: str
    params: Mapping[str, str | None] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: tuple[bytes, ...] = ()
    max_bytes: int | None = None

    @property
    def body_size(self) -> int:
        return sum(map(len, self.body))

    @property
    def any_size(self) -> bool:
        """Whether the answer may be of any size, and take as long as it takes."""
        return self.max_bytes is None and self.params.get("alt") == "media"


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes
    size: int  # of the whole body; larger than len(body) when reading stopped at max_bytes

    def json(self) -> dict[str, Any]:
        try:
            parsed = json.loads(self.body)
        except ValueError:
            return {}
        return parsed if isinstance(parsed, dict) else {}

    @property
    def message(self) -> str:
        """What the server says is wrong, cut to a line."""
        error = self.json().get("error")
        text = error.get("message") if isinstance(error, dict) else error
        if not isinstance(text, str):
            text = self.body[:400].decode("utf-8", "replace")
        return " ".join(text.split())[:300]


@dataclass(frozen=True, slots=True)
class _Failure:
    """An attempt without an answer that settles it.

    Attributes:
        reason: For the message.
        errno: For the error.
        may_have_happened: The server may have done, or may still do, what was asked.
        wait: Seconds to wait at least.
        permanent: Trying again is of no use.
    """

    reason: str
    errno: int = errno.EIO
    may_have_happened: bool = True
    wait: float = 0.0
    permanent: bool = False


def _retry_after(headers: Mapping[str, str]) -> float:
    try:
        return max(0.0, float(headers.get("Retry-After", "0")))
    except ValueError:
        return 0.0


def _judge(reply: _Reply) -> _Reply | _Failure:
    """Tells an answer that settles its request from one that asks to come again."""
    wait = _retry_after(reply.headers)
    if reply.status == 429:
        return _Failure(
            f"too many requests (429: {reply.message})",
            errno.EAGAIN,
            may_have_happened=False,
            wait=max(wait, _SAME_OBJECT_SECONDS),
        )
    if reply.status == 408 or (reply.status >= 500 and reply.status != 501):
        return _Failure(f"the server answered {reply.status}: {reply.message}", wait=wait)
    if reply.status == 400 and "crc32c" in reply.message.lower():
        # The body was damaged on its way, and refused for it.
        return _Failure(f"the upload was damaged: {reply.message}", may_have_happened=False)
    return reply


def _encode_crc(value: int) -> str:
    return base64.b64encode(value.to_bytes(4, "big")).decode("ascii")


def _decode_crc(text: object) -> int | None:
    if not isinstance(text, str):
        return None
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error:
        return None
    return int.from_bytes(raw, "big") if len(raw) == 4 else None


def _crc_of_headers(headers: Any) -> int | None:
    """The crc32c among the `X-Goog-Hash` headers, of which there may be several."""
    for value in headers.getall("X-Goog-Hash", []):
        for part in value.split(","):
            name, _, digest = part.strip().partition("=")
            if name == "crc32c":
                return _decode_crc(digest)
    return None


class _Client:
    """One process's session to one endpoint with one set of credentials."""

    def __init__(self, options: Mapping[str, Any], connect: float, read: float) -> None:
        import aiohttp

        # Not gcsfs.GCSFileSystem: that one probes each bucket's type by gRPC, and has a write
        # path for zonal buckets that ignores preconditions.
        from gcsfs.core import GCSFileSystem

        self._connect, self._read = connect, read
        self.fs = GCSFileSystem(
            use_listings_cache=False,
            skip_instance_cache=True,
            requests_timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=connect, sock_read=read
            ),
            **options,
        )
        self._closes = False
        #: Buckets that have been seen to exist, and why one cannot be written, if so.
        self.buckets: dict[str, str | None] = {}

    @property
    def endpoint(self) -> str:
        return str(self.fs._location)

    def send(self, request: _Request) -> _Reply | _Failure:
        """Makes one attempt. Never raises for what the network or the server does."""
        from fsspec.asyn import sync

        answer = sync(self.fs.loop, self._send, request)
        assert isinstance(answer, (_Reply, _Failure))
        return answer

    async def _send(self, request: _Request) -> _Reply | _Failure:
        import aiohttp
        import google.auth.exceptions
        from gcsfs.retry import HttpError, NonRetryableError
        from yarl import URL

        try:
            session = await self.fs._set_session()
            if not self._closes:
                self._closes = True
                weakref.finalize(self, _close, self.fs.loop, session, os.getpid())
            headers = self.fs._get_headers(dict(request.headers))
        except (HttpError, NonRetryableError, google.auth.exceptions.GoogleAuthError) as e:
            cause = e.__cause__ or e
            transient = bool(getattr(cause, "retryable", False)) or isinstance(
                cause, google.auth.exceptions.TransportError
            )
            return _Failure(
                f"no valid Google credentials ({type(e).__name__})",
                errno.EACCES,
                may_have_happened=False,
                permanent=not transient,
            )
        size = request.body_size
        total = self._connect + self._read
        total += max(size, request.max_bytes or _MIB) / _SLOWEST_BYTES_A_SECOND
        timeout = aiohttp.ClientTimeout(
            total=None if request.any_size else total,
            sock_connect=self._connect,
            sock_read=self._read,
        )
        url = URL(request.url, encoded=True)
        params = self.fs._get_params(dict(request.params))
        if request.body:
            headers["Content-Length"] = str(size)
        try:
            async with session.request(
                request.method,
                url.update_query(params) if params else url,
                headers=headers,
                data=_stream(request.body) if request.body else None,
                timeout=timeout,
                allow_redirects=False,  # the headers hold credentials
            ) as response:
                body, total = await _read_body(response, request.max_bytes)
                return _judge(_Reply(response.status, response.headers, body, total))
        except aiohttp.ClientConnectorError as e:
            return _Failure(
                f"cannot connect ({type(e).__name__})",
                e.os_error.errno or errno.EIO,
                may_have_happened=False,
            )
        except (TimeoutError, aiohttp.ServerTimeoutError) as e:
            return _Failure(f"no answer in time ({type(e).__name__})", errno.ETIMEDOUT)
        except aiohttp.ClientPayloadError:
            return _Failure("the answer was cut off", errno.ECONNRESET)
        except (aiohttp.ClientError, OSError) as e:
            number = getattr(e, "errno", None)
            return _Failure(
                f"the connection broke ({type(e).__name__})",
                number if isinstance(number, int) else errno.ECONNRESET,
            )


# Connections of a parent process, which a child must neither use nor close.
_inherited: list[object] = []


def _close(loop: Any, session: Any, pid: int) -> None:
    """Closes a client's session from whatever thread lets go of it.

    gcsfs would do so from the wrong thread, and in a forked child on a loop that runs no more.
    """
    if session.closed:
        return
    if pid != os.getpid():
        _inherited.append(session.connector)
        session.detach()
        return
    try:
        on_loop = asyncio.get_running_loop() is loop
    except RuntimeError:
        on_loop = False
    if on_loop:
        _closing = loop.create_task(session.close())
    elif loop.is_running():
        with contextlib.suppress(Exception):  # at exit, all of them are closed by the system
            asyncio.run_coroutine_threadsafe(session.close(), loop).result(timeout=1)


async def _stream(body: tuple[bytes, ...]) -> AsyncIterator[bytes | memoryview]:
    """Hands a body over in slices: nothing is joined, and the event loop stays responsive."""
    for part in body:
        if len(part) <= _SLICE:
            yield part
            continue
        view = memoryview(part)
        for start in range(0, len(view), _SLICE):
            yield view[start : start + _SLICE]


async def _read_body(response: Any, max_bytes: int | None) -> tuple[bytes, int]:
    """Reads a body, or nothing of one that says it is larger than `max_bytes`.

    Returns:
        The bytes, and how many there are as far as is known: more than `max_bytes` means that
        the body was left unread.
    """
    if max_bytes is None or response.status >= 300:
        body = await response.read()
        return body, len(body)
    declared = response.content_length
    if declared is not None and declared > max_bytes:
        response.close()
        return b"", declared
    parts: list[bytes] = []
    total = 0
    async for part in response.content.iter_any():
        total += len(part)
        if total > max_bytes:
            response.close()
            return b"", total
        parts.append(part)
    return b"".join(parts), total


# Clients are shared by all GcsBlobs of a process that were opened alike, and end with the last.
_clients: weakref.WeakValueDictionary[tuple[int, bytes], _Client] = weakref.WeakValueDictionary()


def _parse(url: str) -> tuple[str, str]:
    """Splits `gs://bucket/prefix`; the prefix without slashes at its ends."""
    match = re.fullmatch(r"(?:gs|gcs)://([^/]*)(?:/(.*))?", url, re.DOTALL | re.IGNORECASE)
    if match is None:
        raise StoreUrlError(f"{url!r} is not a Cloud Storage URL: write gs://bucket/prefix")
    bucket, prefix = match[1], (match[2] or "").strip("/")
    if "@" in bucket:
        raise StoreUrlError(
            "a gs:// URL takes no user or password: write gs://bucket/prefix, and give "
            "credentials as token= or in the environment"
        )
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", bucket):
        raise StoreUrlError(
            f"{url!r}: {bucket!r} is no bucket name (3 or more of a-z, 0-9, '-', '_', '.'): "
            "write gs://bucket/prefix"
        )
    odd = sorted({c for c in prefix if c in "?#*[]" or not c.isprintable()})
    if odd:
        raise StoreUrlError(f"{url!r}: the prefix may not hold {' '.join(map(repr, odd))}")
    if prefix:
        try:
            check_key(prefix)
        except ValueError as e:
            raise StoreUrlError(f"{url!r}: {e}") from None
    return bucket, prefix


class GcsBlobs(Blobs):
    """Objects under `gs://bucket/prefix`.

    Args:
        url: `gs://bucket` or `gs://bucket/prefix`. The bucket must exist; a zonal (Rapid
            Storage) bucket is refused, since it does not enforce preconditions.
        **options: `retry_seconds` (120): how long one operation goes on trying; a large upload
            starts it anew with each chunk that the server acknowledges. `connect_timeout` (10)
            and `read_timeout` (60): seconds for a connection to be made, and without a byte from
            the server. `resumable_bytes` (32 MiB): `put` of more than this is a resumable upload
            in chunks of `chunk_bytes` (16 MiB, a multiple of 256 KiB); conditional writes are
            always one request. All others go to `gcsfs.core.GCSFileSystem`: `token`, `project`,
            `endpoint_url`, `requester_pays`, ...; they are pickled with the instance and shown
            nowhere.

    Raises:
        StoreUrlError: The URL or an option is malformed. Nothing is sent yet.
    """

    def __init__(self, url: str, **options: object) -> None:
        self._bucket, self._prefix = _parse(url)
        self._retry_seconds = take_number(options, "retry_seconds", 120.0)
        self._timeouts = (
            take_number(options, "connect_timeout", 10.0),
            take_number(options, "read_timeout", 60.0),
        )
        self._resumable_bytes = int(take_number(options, "resumable_bytes", 32.0 * _MIB))
        self._chunk_bytes = int(take_number(options, "chunk_bytes", 16.0 * _MIB))
        if self._chunk_bytes <= 0 or self._chunk_bytes % (256 << 10):
            raise StoreUrlError(
                f"chunk_bytes={self._chunk_bytes} is not a multiple of 262144 (256 KiB)"
            )
        self._options = options
        self._open: tuple[int, _Client] | None = None

    def __getstate__(self) -> dict[str, object]:
        """The configuration; the client stays in its process."""
        return {**self.__dict__, "_open": None}

    def __repr__(self) -> str:
        return f"GcsBlobs({self.url!r})"

    @property
    def url(self) -> str:
        """`gs://bucket/prefix`."""
        return f"gs://{self._bucket}/{self._prefix}" if self._prefix else f"gs://{self._bucket}"

    # Client, requests, errors

    def _client(self) -> _Client:
        """This process's client: a session must not be used across a fork."""
        pid = os.getpid()
        held = self._open
        if held is not None and held[0] == pid:
            return held[1]
        try:
            alike = pickle.dumps((sorted(self._options.items()), self._timeouts))
        except Exception:  # credentials that cannot be pickled: a client of one's own
            alike = secrets.token_bytes(16)
        client = _clients.get((pid, alike))
        if client is None:
            try:
                client = _Client(self._options, *self._timeouts)
            except ImportError:
                raise
            except Exception as e:
                # The cause is not chained: it may quote the credentials.
                raise CheckpointStorageError(
                    errno.EACCES,
                    f"{self.url}: the client could not be opened ({type(e).__name__}), mostly for "
                    "want of credentials: run `gcloud auth application-default login`, or check "
                    f"the storage options ({', '.join(sorted(self._options)) or 'none given'})",
                ) from None
            client = _clients.setdefault((pid, alike), client)
        self._open = (pid, client)
        return client

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _key(self, name: str) -> str:
        return name[len(self._prefix) + 1 :] if self._prefix else name

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _object_url(self, key: str, *, area: str = "") -> str:
        bucket, name = quote(self._bucket, safe=""), quote(self._name(check_key(key)), safe="")
        return f"{self._client().endpoint}{area}/storage/v1/b/{bucket}/o/{name}"

    def _objects_url(self, *, area: str = "") -> str:
        return f"{self._client().endpoint}{area}/storage/v1/b/{quote(self._bucket, safe='')}/o"

    def _ask(self, request: _Request, where: str) -> _Reply:
        """Sends a request that is safe to repeat, until the server answers it or time is up."""
        client = self._client()
        budget = Budget(self._retry_seconds)
        while True:
            outcome = client.send(request)
            if isinstance(outcome, _Reply):
                return outcome
            if outcome.permanent or not budget.pause(
                outcome.wait, why=f"{request.method} {where}: {outcome.reason}"
            ):
                self._gave_up(where, outcome, budget)

    def _gave_up(self, where: str, failure: _Failure, budget: Budget) -> NoReturn:
        if failure.permanent:
            raise CheckpointStorageError(
                failure.errno,
                f"{where}: {failure.reason}: run `gcloud auth application-default login`, "
                "or pass token=",
            )
        raise CheckpointStorageError(
            failure.errno,
            f"{where}: {failure.reason}; given up after {budget.seconds:g} s of retries: "
            "check the network and the service's status, then run again",
        )

    def _refuse(self, reply: _Reply, where: str) -> NoReturn:
        """Raises for an answer that no retry will change."""
        said = f"{where}: the server answered {reply.status}: {reply.message}"
        if reply.status == 404:
            self._refuse_bucket()
        if reply.status == 401:
            raise CheckpointStorageError(
                errno.EACCES,
                f"{said}. No or invalid credentials: run `gcloud auth application-default "
                "login`, or pass token=",
            )
        if reply.status == 403:
            raise CheckpointStorageError(
                errno.EACCES,
                f"{said}. The account needs roles/storage.objectUser on gs://{self._bucket} "
                "(create, get, list, delete), and no retention policy may cover the store",
            )
        if reply.status == 400 and "requester pays" in reply.message.lower():
            raise CheckpointStorageError(
                errno.EACCES, f"{said}. Pass requester_pays=True and project="
            )
        raise CheckpointStorageError(errno.EIO, said)

    def _refuse_bucket(self) -> NoReturn:
        raise CheckpointStorageError(
            errno.ENOENT,
            f"{self.url}: there is no bucket {self._bucket!r}, or it may not be seen: check the "
            "URL and the project, or create the bucket",
        )

    def _require_bucket(self, reply: _Reply | None = None) -> None:
        """Tells "no such object" from "no such bucket", which must never read as an empty store.

        Args:
            reply: The 404, when there is one: Google's says which of the two it is.
        """
        client = self._client()
        if self._bucket in client.buckets:
            return
        message = reply.message.lower() if reply is not None else ""
        if "no such object" in message:
            client.buckets[self._bucket] = None
            return
        if "bucket does not exist" in message:
            self._refuse_bucket()
        self._look_at_bucket(client)

    def _look_at_bucket(self, client: _Client) -> None:
        answer = self._ask(
            _Request(
                "GET",
                f"{client.endpoint}/storage/v1/b/{quote(self._bucket, safe='')}",
                {"fields": "name,storageClass,locationType"},
            ),
            self.url,
        )
        if answer.status == 404:
            self._refuse_bucket()
        # 401 and 403: seeing the bucket takes a permission that writing objects does not.
        found = answer.json() if answer.status == 200 else {}
        zonal = found.get("storageClass") == "RAPID" or found.get("locationType") == "zone"
        client.buckets[self._bucket] = "it is a zonal bucket (Rapid Storage)" if zonal else None

    def require_writable(self) -> None:
        """Refuses zonal buckets. One request, once per process.

        Raises:
            StoreUrlError: The bucket is a zonal one.
            CheckpointStorageError: There is no such bucket, or it cannot be reached.
        """
        client = self._client()
        if self._bucket not in client.buckets:
            self._look_at_bucket(client)
        reason = client.buckets[self._bucket]
        if reason is not None:
            self._refuse_zonal(reason)

    def _refuse_zonal(self, reason: str) -> NoReturn:
        raise StoreUrlError(
            f"{self.url} cannot be written: {reason}, where create-if-absent and "
            "compare-and-swap are not enforced: use a bucket of a region or multi-region"
        )

    def _meta(self, found: Mapping[str, Any], where: str) -> BlobMeta:
        marked = found.get("metadata")
        try:
            return BlobMeta(
                key=self._key(found["name"]),
                size=int(found.get("size", 0)),  # left out of an empty object by some servers
                version=str(int(found["generation"])),
                crc32c=_decode_crc(found.get("crc32c")),
                note=str(marked.get(_NOTE, "")) if isinstance(marked, dict) else "",
            )
        except (KeyError, TypeError, ValueError):
            raise CheckpointStorageError(
                errno.EIO,
                f"{where}: the server's answer is no object resource: is there something between "
                "this machine and Cloud Storage that answers in its place?",
            ) from None

    # Writes

    def _multipart(
        self, key: str, data: bytes, token: str, expected: str | None, note: str = ""
    ) -> _Request:
        # The boundary is drawn anew, so that no payload can hold it.
        boundary = f"beam-ckpt-{secrets.token_hex(16)}"
        resource = self._resource(key, data, token, expected, note)
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
            f"{json.dumps(resource)}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        return _Request(
            "POST",
            self._objects_url(area="/upload"),
            {
                "uploadType": "multipart",
                "fields": _FIELDS,
                "ifGenerationMatch": None if expected is None else expected or "0",
            },
            {"Content-Type": f'multipart/related; boundary="{boundary}"'},
            (head.encode("utf-8"), data, f"\r\n--{boundary}--\r\n".encode("ascii")),
        )

    def _resource(
        self, key: str, data: bytes, token: str, expected: str | None, note: str = ""
    ) -> dict[str, object]:
        return {
            "name": self._name(check_key(key)),
            "crc32c": _encode_crc(crc32c(data)),
            "metadata": marks(token, expected) | ({_NOTE: note} if note else {}),
        }

    def _stored(self, reply: _Reply, key: str, data: bytes) -> BlobMeta:
        """Returns what was stored, once it is seen to be what was sent."""
        found = reply.json()
        meta = self._meta(found, self._where(key))
        if found.get("storageClass") == "RAPID":
            self._refuse_zonal("it is a zonal bucket (Rapid Storage)")
        self._client().buckets.setdefault(self._bucket, None)
        if meta.size == len(data) and meta.crc32c in (None, crc32c(data)):
            return meta
        # A server that checks the declared crc32c, as Google's does, never comes here.
        self._take_back(meta)
        raise CheckpointStorageError(
            errno.EIO,
            f"{self._where(key)}: the server stored {meta.size} bytes with another crc32c than the "
            f"{len(data)} that were sent, and they were deleted again: run again, and check what "
            "is between this machine and Cloud Storage",
        )

    def _take_back(self, meta: BlobMeta) -> None:
        """Deletes one generation and no other."""
        self._ask(
            _Request("DELETE", self._object_url(meta.key), {"ifGenerationMatch": meta.version}),
            self._where(meta.key),
        )

    def _read_back(self, key: str) -> dict[str, Any] | None:
        """Returns the object's resource, or `None` when there is none."""
        reply = self._ask(
            _Request("GET", self._object_url(key), {"fields": _FIELDS}), self._where(key)
        )
        if reply.status == 404:
            self._require_bucket(reply)
            return None
        if reply.status != 200:
            self._refuse(reply, self._where(key))
        return reply.json()

    def _holder(self, key: str) -> tuple[Holder, BlobMeta] | None:
        """Returns who holds the name, or `None` when it is free."""
        found = self._read_back(key)
        if found is None:
            return None
        meta, held = self._meta(found, self._where(key)), found.get("metadata")
        return Holder(meta.version, held if isinstance(held, dict) else {}), meta

    def _settle(
        self, key: str, token: str, expected: str, in_doubt: bool, lost: type[Exception]
    ) -> BlobMeta | None:
        """Reads back and decides; see `beam_ckpt.blobs._settle.settle`.

        Returns:
            Our object, or `None` when the write has not happened, so far.

        Raises:
            BlobIndeterminate: It may have happened, and been overwritten since.
            Exception: `lost`, when it has not happened and never will.
        """
        found = self._holder(key)
        holder = found[0] if found is not None else None
        verdict = settle(holder, token=token, expected=expected, in_doubt=in_doubt)
        if verdict == "lost":
            raise lost(key)
        if verdict == "unknown":
            raise BlobIndeterminate(key)
        return found[1] if found is not None and verdict == "ours" else None

    def _write(
        self, key: str, data: bytes, expected: str, lost: type[Exception], note: str = ""
    ) -> BlobMeta:
        """Writes on condition, until it is known who won or time is up."""
        client, where = self._client(), self._where(key)
        token = secrets.token_hex(16)
        budget = Budget(self._retry_seconds)
        in_doubt = False
        while True:
            outcome = client.send(self._multipart(key, data, token, expected, note))
            if isinstance(outcome, _Reply):
                if outcome.status in (200, 201):
                    return self._stored(outcome, key, data)
                if outcome.status == 412:
                    meta = self._settle(key, token, expected, in_doubt, lost)
                    if meta is not None:
                        return meta
                    outcome = _Failure(
                        "the precondition failed, but holds now", may_have_happened=False
                    )
                elif in_doubt:
                    break
                else:
                    self._refuse(outcome, where)
            in_doubt = in_doubt or outcome.may_have_happened
            if outcome.permanent or not budget.pause(
                outcome.wait, why=f"write {where}: {outcome.reason}"
            ):
                break
        if not in_doubt and isinstance(outcome, _Failure):
            self._gave_up(where, outcome, budget)
        try:
            meta = self._settle(key, token, expected, in_doubt, lost)
        except CheckpointStorageError as e:
            raise BlobIndeterminate(key) from e
        if meta is None:  # absent now, but a late attempt may still land
            raise BlobIndeterminate(key)
        return meta

    def put(self, key: str, data: bytes) -> BlobMeta:
        """Writes an object. Large ones are uploaded in chunks, each of which may be retried.

        An object that is there already with the same bytes is taken as written: a retry, by
        this process or by another, needs no permission to overwrite.
        """
        data = bytes(data)
        try:
            if len(data) > self._resumable_bytes:
                return self._upload(key, data, ABSENT)
            return self._write(key, data, ABSENT, BlobExists)
        except BlobExists:
            found = self.head(key)
            if found is not None and (found.size, found.crc32c) == (len(data), crc32c(data)):
                return found
        return self._overwrite(key, data)

    def _overwrite(self, key: str, data: bytes) -> BlobMeta:
        if len(data) > self._resumable_bytes:
            return self._upload(key, data, None)
        request = self._multipart(key, data, secrets.token_hex(16), None)
        reply = self._ask(request, self._where(key))
        if reply.status not in (200, 201):
            self._refuse(reply, self._where(key))
        return self._stored(reply, key, data)

    def put_if_absent(self, key: str, data: bytes, note: str = "") -> BlobMeta:
        """Creates an object with one request. See `Blobs.put_if_absent`."""
        return self._write(key, bytes(data), ABSENT, BlobExists, note)

    def replace(self, key: str, data: bytes, expected: str) -> BlobMeta:
        """Writes an object whose generation is `expected`. See `Blobs.replace`."""
        if expected != ABSENT and not expected.isdecimal():
            raise BlobConflict(key)  # a version of another backend
        return self._write(key, bytes(data), expected, BlobConflict)

    # Large objects

    def _upload(self, key: str, data: bytes, expected: str | None) -> BlobMeta:
        """Uploads in chunks. Repeats from the last byte that the server acknowledged."""
        where = self._where(key)
        token = secrets.token_hex(16)
        budget = Budget(self._retry_seconds)
        session: str | None = None
        offset: int | None = 0  # None: ask the server how far it has got
        furthest = 0
        doubt = False
        while True:
            if session is None:
                session, offset = self._start_upload(key, data, token, expected), 0
            outcome = self._client().send(self._chunk(session, data, offset))
            if isinstance(outcome, _Reply):
                if outcome.status in (200, 201):
                    meta = self._meta(outcome.json(), where)
                    if offset is not None or meta.size == len(data):
                        return self._stored(outcome, key, data)
                    # Asked how far it has got, fake-gcs-server ends the upload there.
                    self._take_back(meta)
                    session, outcome = None, _Failure("the server ended the upload early")
                elif outcome.status == 308:
                    reached = re.fullmatch(r"bytes=0-(\d+)", outcome.headers.get("Range", ""))
                    asked, offset = offset is None, int(reached[1]) + 1 if reached else 0
                    if offset < len(data):
                        if offset > furthest:
                            furthest = offset
                            budget.progress()
                            continue
                        if asked:
                            continue
                    else:
                        offset = None
                    outcome = _Failure("the server kept nothing of a chunk")
                elif outcome.status in (404, 410, 412, 416):
                    # The session is over: because the object is complete, or for good.
                    found = self._holder(key)
                    if found is not None and found[0].marks.get(TOKEN) == token:
                        return found[1]
                    if outcome.status == 412 and found is not None:
                        raise BlobExists(key)
                    session = None
                    outcome = _Failure("the upload session is gone")
                else:
                    self._refuse(outcome, where)
            else:
                offset = None
            doubt = doubt or outcome.may_have_happened
            if outcome.permanent or not budget.pause(
                outcome.wait, why=f"upload {where}: {outcome.reason}"
            ):
                break
        if doubt:
            raise BlobIndeterminate(key)
        self._gave_up(where, outcome, budget)

    def _start_upload(self, key: str, data: bytes, token: str, expected: str | None) -> str:
        resource = self._resource(key, data, token, expected)
        request = _Request(
            "POST",
            self._objects_url(area="/upload"),
            {
                "uploadType": "resumable",
                "name": self._name(key),
                "fields": _FIELDS,
                "ifGenerationMatch": None if expected is None else expected or "0",
            },
            {
                "Content-Type": "application/json; charset=UTF-8",
                "X-Upload-Content-Type": "application/octet-stream",
                "X-Upload-Content-Length": str(len(data)),
            },
            (json.dumps(resource).encode("utf-8"),),
        )
        reply = self._ask(request, self._where(key))
        if reply.status == 412:
            raise BlobExists(key)
        if reply.status not in (200, 201):
            self._refuse(reply, self._where(key))
        session = reply.headers.get("Location", "")
        # Credentials go only where they were meant to.
        if not session.startswith(f"{self._client().endpoint}/"):
            raise CheckpointStorageError(
                errno.EIO,
                f"{self._where(key)}: the server offered an upload session at another address "
                "than its own: use an endpoint_url that the server knows as its own",
            )
        return session

    def _chunk(self, session: str, data: bytes, offset: int | None) -> _Request:
        total = len(data)
        if offset is None:
            return _Request("PUT", session, headers={"Content-Range": f"bytes */{total}"})
        part = memoryview(data)[offset : offset + self._chunk_bytes]
        span = f"bytes {offset}-{offset + len(part) - 1}/{total}"
        return _Request("PUT", session, headers={"Content-Range": span}, body=(bytes(part),))

    # Reads

    def get(self, key: str, *, max_bytes: int | None = None) -> tuple[bytes, BlobMeta]:
        """Reads a whole object and checks it against its crc32c. See `Blobs.get`."""
        where = self._where(key)
        url = self._object_url(key, area="/download")
        budget = Budget(self._retry_seconds)
        while True:
            reply = self._ask(
                _Request(
                    "GET",
                    url,
                    {"alt": "media"},
                    {"Accept-Encoding": "identity"},
                    max_bytes=max_bytes,
                ),
                where,
            )
            if reply.status == 404:
                self._require_bucket(reply)
                raise FileNotFoundError(errno.ENOENT, "no such object", where)
            if reply.status != 200:
                self._refuse(reply, where)
            self._client().buckets.setdefault(self._bucket, None)
            if max_bytes is not None and reply.size > max_bytes:
                raise BlobTooLarge(key, reply.size, max_bytes)
            stored, found = _crc_of_headers(reply.headers), crc32c(reply.body)
            generation = reply.headers.get("X-Goog-Generation", "")
            if stored in (None, found) and generation.isdecimal():
                return reply.body, BlobMeta(key, len(reply.body), generation, found)
            if not generation.isdecimal():
                raise CheckpointStorageError(
                    errno.EIO,
                    f"{where}: the answer names no generation: is there a cache between this "
                    "machine and Cloud Storage?",
                )
            if budget.attempts or not budget.pause(why=f"{where}: the crc32c does not match"):
                raise BlobInvalid(
                    key, f"crc32c {found:08x} was read, {stored:08x} is what the server keeps"
                )
            budget.attempts += 1  # damaged on its way, perhaps: once more

    def get_range(self, key: str, start: int, end: int, version: str | None = None) -> bytes:
        """Reads a part of an object. See `Blobs.get_range`."""
        if start < 0 or end < start:
            raise ValueError(f"[{start}, {end}) is no range of bytes")
        where = self._where(key)
        if end == start:
            found = self.head(key)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "no such object", where)
            if version is not None and found.version != version:
                raise BlobConflict(key)
            return b""
        reply = self._ask(
            _Request(
                "GET",
                self._object_url(key, area="/download"),
                {"alt": "media"},
                {"Accept-Encoding": "identity", "Range": f"bytes={start}-{end - 1}"},
                max_bytes=end - start,
            ),
            where,
        )
        if reply.status == 404:
            self._require_bucket(reply)
            raise FileNotFoundError(errno.ENOENT, "no such object", where)
        if reply.status not in (200, 206, 416):
            self._refuse(reply, where)
        if version is not None and reply.headers.get("X-Goog-Generation") != version:
            raise BlobConflict(key)
        if reply.status == 416:
            return b""
        if reply.status == 200 and start:
            raise CheckpointStorageError(
                errno.EIO, f"{where}: the server does not know byte ranges: check endpoint_url"
            )
        if reply.size > end - start:
            raise CheckpointStorageError(
                errno.EIO, f"{where}: {reply.size} bytes came of the {end - start} asked for"
            )
        return reply.body

    def head(self, key: str) -> BlobMeta | None:
        """Returns an object's metadata with one request. See `Blobs.head`."""
        found = self._read_back(key)
        if found is None:
            return None
        self._client().buckets.setdefault(self._bucket, None)
        return self._meta(found, self._where(key))

    def list(self, prefix: str, start_after: str = "") -> Sequence[BlobMeta]:
        """Lists, a thousand objects a request. See `Blobs.list`."""
        return [m for m in self._pages(prefix, start_after) if m.key > start_after]

    def _pages(self, prefix: str, start_after: str) -> Iterator[BlobMeta]:
        where = self._where(f"{prefix}*")
        page: str | None = None
        while True:
            reply = self._ask(
                _Request(
                    "GET",
                    self._objects_url(),
                    {
                        "prefix": self._name(prefix) or None,
                        "startOffset": self._name(start_after) if start_after else None,
                        "maxResults": str(_PAGE),
                        "pageToken": page,
                        "fields": "items(name,size,generation,crc32c,metadata),nextPageToken",
                    },
                ),
                where,
            )
            if reply.status != 200:
                self._refuse(reply, where)
            answer = reply.json()
            for item in answer.get("items", []):
                # The console marks its folders by empty objects with a slash at the end.
                if not str(item.get("name", "/")).endswith("/"):
                    yield self._meta(item, where)
            page = answer.get("nextPageToken")
            if not page:
                self._client().buckets.setdefault(self._bucket, None)
                return

    # Deletes

    def delete_many(self, keys: Iterable[str]) -> None:
        """Deletes objects, a hundred a request. See `Blobs.delete_many`."""
        pending = [check_key(key) for key in dict.fromkeys(keys)]
        for start in range(0, len(pending), _BATCH):
            self._delete_batch(pending[start : start + _BATCH])

    def _delete_batch(self, keys: Sequence[str]) -> None:
        budget = Budget(self._retry_seconds)
        while keys:
            if len(keys) == 1:
                self._delete_one(keys[0])
                return
            reply = self._ask(self._batch(keys), self.url)
            if reply.status in (401, 403):
                self._refuse(reply, self.url)
            statuses = _batch_statuses(reply) if reply.status == 200 else None
            if statuses is None or len(statuses) != len(keys):
                # No batches here (private endpoints, some emulators): one by one.
                for key in keys:
                    self._delete_one(key)
                return
            left: list[str] = []
            for key, part in zip(keys, statuses, strict=True):
                if part.status in (200, 204, 404):
                    continue
                outcome = _judge(part)
                if isinstance(outcome, _Reply):
                    self._refuse(part, self._where(key))
                left.append(key)
                last = outcome
            keys = left
            if keys and not budget.pause(last.wait, why=f"delete {self.url}: {last.reason}"):
                self._gave_up(f"{self.url}: delete of {len(keys)} objects", last, budget)

    def _delete_one(self, key: str) -> None:
        reply = self._ask(_Request("DELETE", self._object_url(key)), self._where(key))
        if reply.status == 404:
            self._require_bucket(reply)
        elif reply.status not in (200, 204):
            self._refuse(reply, self._where(key))

    def _batch(self, keys: Sequence[str]) -> _Request:
        client = self._client()
        boundary = f"beam-ckpt-{secrets.token_hex(16)}"
        host = client.endpoint.partition("://")[2]
        suffix = "?userProject=" + quote(str(p), safe="") if (p := self._payer(client)) else ""
        parts = [
            f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: <delete+{n}>\r\n\r\n"
            f"DELETE {self._object_url(key)[len(client.endpoint) :]}{suffix} HTTP/1.1\r\n"
            f"Host: {host}\r\n\r\n\r\n"
            for n, key in enumerate(keys)
        ]
        parts.append(f"--{boundary}--\r\n")
        return _Request(
            "POST",
            f"{client.endpoint}/batch/storage/v1",
            headers={"Content-Type": f'multipart/mixed; boundary="{boundary}"'},
            body=("".join(parts).encode("ascii"),),
        )

    @staticmethod
    def _payer(client: _Client) -> object:
        return client.fs._get_params({}).get("userProject")


def _batch_statuses(reply: _Reply) -> Sequence[_Reply] | None:
    """Returns the answers of a batch in the order of its parts; `None` if it is not one."""
    kind = reply.headers.get("Content-Type", "")
    if not kind.startswith("multipart/mixed"):
        return None
    message = BytesParser().parsebytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + reply.body)
    parts = message.get_payload()
    if not isinstance(parts, list):
        return None
    found: dict[int, _Reply] = {}
    for part in parts:
        if not isinstance(part, Message):
            return None
        number = re.search(r"delete\+(\d+)", str(part.get("Content-ID", "")))
        raw = part.get_payload(decode=True)
        if number is None or not isinstance(raw, bytes):
            return None
        status = re.match(rb"HTTP/\S+ (\d{3})", raw)
        if status is None:
            return None
        body = raw.partition(b"\r\n\r\n")[2]
        found[int(number[1])] = _Reply(int(status[1]), {}, body, len(body))
    return [found[n] for n in sorted(found)] if set(found) == set(range(len(found))) else None
