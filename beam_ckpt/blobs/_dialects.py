"""What fsspec does not say alike for all stores: conditions, versions, metadata, causes of errors.

A dialect makes one attempt at a time, at full paths; retrying and settling are the caller's
(`beam_ckpt.blobs._fsspec`). S3 and Azure carry the condition of a write inside the request, and
so can be written to once a probe has seen that the server enforces it. Any other filesystem is
only read.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from beam_ckpt.blobs._base import ABSENT
from beam_ckpt.blobs._probes import PreconditionFailed
from beam_ckpt.blobs._settle import Holder

__all__ = ["Dialect", "Part", "Trouble", "dialect_of", "version_of"]

Trouble = Literal[
    "precondition",  # refused because of the condition
    "absent",  # no such object
    "no_container",  # no such bucket or container
    "denied",  # no credentials, or no permission
    "unsupported",  # the server does not know what it was asked
    "out_of_range",  # a range that begins beyond the end
    "again",  # refused for now; it was not carried out
    "unknown",  # no answer: it may have been carried out
    "broken",  # an error that no retry will change
]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of an object.

    Attributes:
        data: What was read; empty when the object is larger than was allowed.
        size: Of the whole object, in bytes.
        version: Of the object.
    """

    data: bytes
    size: int
    version: str


def version_of(info: Mapping[str, Any]) -> str:
    """Returns a version from an fsspec info: the ETag, or what else changes with a write."""
    for name in ("ETag", "etag"):
        if info.get(name):
            return _bare(str(info[name]))
    names = ("size", "mtime", "modified", "last_modified", "LastModified", "created", "ino", "CRC")
    seen = "|".join(f"{name}={info[name]}" for name in names if info.get(name) is not None)
    return hashlib.sha256(seen.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _bare(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')


class Dialect(ABC):
    """One filesystem's manner. Methods raise whatever the client raises; ask `trouble`."""

    #: Whether conditions travel inside write requests.
    conditional: ClassVar[bool] = False

    def __init__(self, fs: Any) -> None:
        """Takes an fsspec filesystem."""
        self.fs = fs

    @classmethod
    def options(cls, given: Mapping[str, object]) -> dict[str, object]:
        """Returns the options to open the filesystem with."""
        return dict(given)

    def _sync(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        from fsspec.asyn import sync

        result: _T = sync(self.fs.loop, work)
        return result

    @abstractmethod
    def write(self, path: str, data: bytes, marks: dict[str, str], expected: str | None) -> str:
        """Writes on condition; see `ConditionalWrites`."""

    @abstractmethod
    def holder(self, path: str) -> Holder | None:
        """Returns who holds a path; see `ConditionalWrites`."""

    @abstractmethod
    def stat(self, path: str) -> tuple[int, str] | None:
        """Returns size and version, or `None` when there is no such object."""

    @abstractmethod
    def part(
        self, path: str, start: int, end: int | None, limit: int | None, version: str | None
    ) -> Part:
        """Reads bytes `[start, end)` of one version; none where the object exceeds `limit`."""

    @abstractmethod
    def delete(self, paths: Sequence[str]) -> None:
        """Deletes; absent objects are fine."""

    def has_container(self, path: str) -> bool:
        """Whether the bucket or container of a path exists."""
        return True

    def read(self, path: str) -> bytes:
        """Reads a whole object."""
        return self.part(path, 0, None, None, None).data

    def trouble(self, error: Exception) -> Trouble:
        """Says what an error means."""
        if isinstance(error, PreconditionFailed):
            return "precondition"
        if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            # Over HTTP, a server that cannot be reached reads as "not found", with the cause.
            cause = type(error.__cause__).__module__.split(".")[0]
            return "unknown" if cause in ("aiohttp", "requests", "urllib3") else "absent"
        if isinstance(error, PermissionError):
            return "denied"
        if isinstance(error, NotImplementedError):
            return "unsupported"
        return "unknown" if isinstance(error, OSError) else "broken"


class _ReadOnly(Dialect):
    """Any filesystem: what fsspec's common methods give."""

    def write(self, path: str, data: bytes, marks: dict[str, str], expected: str | None) -> str:
        raise NotImplementedError("conditional writes")

    def holder(self, path: str) -> Holder | None:
        found = self.stat(path)
        return None if found is None else Holder(found[1], {})

    def stat(self, path: str) -> tuple[int, str] | None:
        try:
            info = self.fs.info(path)
        except (FileNotFoundError, NotADirectoryError) as e:
            if self.trouble(e) == "absent":
                return None
            raise
        if info.get("type") != "file":
            return None
        size = info.get("size")
        return (int(size) if size is not None else -1), version_of(info)

    def part(
        self, path: str, start: int, end: int | None, limit: int | None, version: str | None
    ) -> Part:
        for _ in range(10):
            before = self.stat(path)
            if before is None:
                raise FileNotFoundError(path)
            size, seen = before
            if version is not None and seen != version:
                raise PreconditionFailed
            if size < 0 or (limit is not None and size > limit):
                return Part(b"", size, seen)
            stop = size if end is None else min(end, size)
            if start >= stop:
                return Part(b"", size, seen)
            # A range even for the whole: no more than `limit` is ever read.
            data = bytes(self.fs.cat_file(path, start=start, end=stop))
            if self.stat(path) == before and len(data) == stop - start:
                return Part(data, size, seen)
        raise OSError("the object changed with every attempt to read it")

    def delete(self, paths: Sequence[str]) -> None:
        raise NotImplementedError("conditional writes")


class _S3(Dialect):
    """S3 and its likes, by s3fs. A version is an ETag: equal bytes may have equal ones."""

    conditional = True

    @classmethod
    def options(cls, given: Mapping[str, object]) -> dict[str, object]:
        # One attempt a call: whether an earlier one may have landed must be known here.
        config = given.get("config_kwargs")
        once = {"retries": {"total_max_attempts": 1, "mode": "standard"}}
        merged = {**(config if isinstance(config, Mapping) else {}), **once}
        return {**given, "config_kwargs": merged}

    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        fs.retries = 1

    def _at(self, path: str) -> dict[str, str]:
        bucket, key, _ = self.fs.split_path(path)
        return {"Bucket": bucket, "Key": key}

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._sync(lambda: self.fs._call_s3(method, **arguments))

    def write(self, path: str, data: bytes, marks: dict[str, str], expected: str | None) -> str:
        condition: dict[str, str] = {}
        if expected == ABSENT:
            condition["IfNoneMatch"] = "*"
        elif expected is not None:
            condition["IfMatch"] = f'"{expected}"'
        try:
            answer = self._call(
                "put_object", **self._at(path), Body=data, Metadata=marks, **condition
            )
        except Exception as e:
            # A condition on an object that is not there is answered by "no such key".
            if self.trouble(e) in ("precondition", "absent"):
                raise PreconditionFailed from e
            raise
        return _bare(str(answer["ETag"]))

    def holder(self, path: str) -> Holder | None:
        found = self._head(path)
        if found is None:
            return None
        return Holder(_bare(str(found["ETag"])), found.get("Metadata") or {})

    def stat(self, path: str) -> tuple[int, str] | None:
        found = self._head(path)
        return None if found is None else (int(found["ContentLength"]), _bare(str(found["ETag"])))

    def _head(self, path: str) -> Any:
        try:
            return self._call("head_object", **self._at(path))
        except Exception as e:
            if self.trouble(e) == "absent":
                return None
            raise

    def part(
        self, path: str, start: int, end: int | None, limit: int | None, version: str | None
    ) -> Part:
        arguments = self._at(path)
        if start or end is not None:
            arguments["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        if version is not None:
            arguments["IfMatch"] = f'"{version}"'

        async def get() -> Part:
            answer = await self.fs._call_s3("get_object", **arguments)
            body = answer["Body"]
            try:
                length = int(answer["ContentLength"])
                size = int(str(answer.get("ContentRange", f"/{length}")).rpartition("/")[2])
                over = limit is not None and length > limit
                data = b"" if over else await body.read()
            finally:
                body.close()
            if not over and len(data) != length:
                raise OSError(f"{len(data)} bytes came of {length}")
            return Part(data, size, _bare(str(answer["ETag"])))

        return self._sync(get)

    def delete(self, paths: Sequence[str]) -> None:
        for start in range(0, len(paths), 1000):
            at = [self._at(path) for path in paths[start : start + 1000]]
            answer = self._call(
                "delete_objects",
                Bucket=at[0]["Bucket"],
                Delete={"Objects": [{"Key": a["Key"]} for a in at], "Quiet": True},
            )
            for error in answer.get("Errors", []):
                if error.get("Code") in ("AccessDenied", "AllAccessDisabled"):
                    raise PermissionError(error.get("Message", "delete"))
                if error.get("Code") != "NoSuchKey":
                    raise OSError(f"delete: {error.get('Code')}")

    def has_container(self, path: str) -> bool:
        try:
            self._call("list_objects_v2", Bucket=self._at(path)["Bucket"], MaxKeys=1)
        except Exception as e:
            if self.trouble(e) in ("absent", "no_container"):
                return False
            raise
        return True

    def trouble(self, error: Exception) -> Trouble:
        if isinstance(error, PreconditionFailed):
            return "precondition"
        told = next((e for e in (error.__cause__, error) if hasattr(e, "response")), None)
        response = getattr(told, "response", None) or {}
        code = str(response.get("Error", {}).get("Code", ""))
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in ("NoSuchBucket", "InvalidBucketName"):
            return "no_container"
        if code == "PreconditionFailed" or status == 412:
            return "precondition"
        if code in ("ConditionalRequestConflict", "OperationAborted", "SlowDown") or status == 429:
            return "again"
        if code == "NotImplemented" or status == 501:
            return "unsupported"
        if code == "InvalidRange" or status == 416:
            return "out_of_range"
        name = type(error).__name__
        if "Credentials" in name or status in (401, 403):
            return "denied"
        if name in ("EndpointConnectionError", "ConnectTimeoutError"):
            return "again"
        if code and 400 <= status < 500 and status not in (404, 408):
            return "broken"
        if type(error).__module__.split(".")[0] in ("botocore", "aiobotocore", "aiohttp"):
            return "unknown"
        return super().trouble(error)


class _Azure(Dialect):
    """Azure Blob Storage, by adlfs."""

    conditional = True

    def _client(self, path: str) -> Any:
        container, name, _ = self.fs.split_path(path)
        return self.fs.service_client.get_blob_client(container=container, blob=name)

    @staticmethod
    def _unchanged(version: str) -> dict[str, object]:
        from azure.core import MatchConditions  # type: ignore[import-not-found,unused-ignore]

        return {"etag": f'"{version}"', "match_condition": MatchConditions.IfNotModified}

    def write(self, path: str, data: bytes, marks: dict[str, str], expected: str | None) -> str:
        # Names of metadata are identifiers there. The last one is how adlfs knows a file.
        metadata = {name.replace("-", "_"): value for name, value in marks.items()}
        metadata["is_directory"] = "false"
        condition: dict[str, object] = {"overwrite": expected != ABSENT}
        if expected:
            condition.update(self._unchanged(expected))

        async def put() -> str:
            async with self._client(path) as client:
                answer = await client.upload_blob(
                    data, metadata=metadata, retry_total=0, **condition
                )
            return _bare(str(answer["etag"]))

        try:
            return self._sync(put)
        except Exception as e:
            if self.trouble(e) in ("precondition", "absent"):
                raise PreconditionFailed from e
            raise

    def _properties(self, path: str) -> Any:
        async def get() -> Any:
            async with self._client(path) as client:
                return await client.get_blob_properties(retry_total=0)

        try:
            return self._sync(get)
        except Exception as e:
            if self.trouble(e) == "absent":
                return None
            raise

    def holder(self, path: str) -> Holder | None:
        found = self._properties(path)
        if found is None:
            return None
        metadata = {str(k).replace("_", "-"): str(v) for k, v in (found.metadata or {}).items()}
        return Holder(_bare(str(found.etag)), metadata)

    def stat(self, path: str) -> tuple[int, str] | None:
        found = self._properties(path)
        return None if found is None else (int(found.size), _bare(str(found.etag)))

    def part(
        self, path: str, start: int, end: int | None, limit: int | None, version: str | None
    ) -> Part:
        arguments: dict[str, object] = {} if version is None else self._unchanged(version)
        if end is not None:
            arguments.update(offset=start, length=end - start)
        elif limit is not None:
            arguments.update(offset=0, length=limit + 1)  # no more than that is ever read

        async def get() -> Part:
            async with self._client(path) as client:
                stream = await client.download_blob(retry_total=0, **arguments)
                size = int(str(stream.properties.content_range or "/").rpartition("/")[2] or -1)
                size = size if size >= 0 else int(stream.properties.size)
                data = await stream.readall()
            over = limit is not None and size > limit and end is None
            return Part(b"" if over else bytes(data), size, _bare(str(stream.properties.etag)))

        return self._sync(get)

    def delete(self, paths: Sequence[str]) -> None:
        # One by one, some at a time: batches are refused by azurite, and by accounts with
        # hierarchical namespaces.
        async def delete(path: str) -> None:
            async with self._client(path) as client:
                try:
                    await client.delete_blob(retry_total=0)
                except Exception as e:
                    if self.trouble(e) != "absent":
                        raise

        async def delete_some(some: Sequence[str]) -> None:
            await asyncio.gather(*map(delete, some))

        for start in range(0, len(paths), 16):
            some = paths[start : start + 16]
            self._sync(functools.partial(delete_some, some))

    def has_container(self, path: str) -> bool:
        async def exists() -> bool:
            container = self.fs.split_path(path)[0]
            async with self.fs.service_client.get_container_client(container) as client:
                return bool(await client.exists())

        return self._sync(exists)

    def trouble(self, error: Exception) -> Trouble:
        if isinstance(error, PreconditionFailed):
            return "precondition"
        told = next((e for e in (error, error.__cause__) if hasattr(e, "status_code")), None)
        status = getattr(told, "status_code", None) or 0
        code = str(getattr(told, "error_code", "") or "")
        if "ContainerNotFound" in code or "ContainerBeingDeleted" in code:
            return "no_container"
        if status == 412 or "BlobAlreadyExists" in code:
            return "precondition"
        if status == 416:
            return "out_of_range"
        if status == 404:
            return "absent"
        if status in (401, 403):
            return "denied"
        if status == 429:
            return "again"
        if status == 501:
            return "unsupported"
        if 400 <= status < 500 and status not in (408, 409):
            return "broken"
        if type(error).__module__.split(".")[0] in ("azure", "aiohttp"):
            return "unknown"
        return super().trouble(error)


def dialect_of(protocol: str) -> type[Dialect]:
    """Returns the dialect of an fsspec protocol."""
    if protocol in ("s3", "s3a"):
        return _S3
    if protocol in ("az", "abfs", "abfss"):
        return _Azure
    return _ReadOnly
