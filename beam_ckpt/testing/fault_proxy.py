"""A proxy that makes the network fail: between a client and an object store's server.

Faults come by rule (the next n requests that match) or by a seeded random schedule. The proxy
also counts requests by kind, which is how the benchmarks know what a commit costs.

In one thing it corrects the server: asked how far a resumable upload has got, fake-gcs-server
ends the upload there. The proxy answers such questions itself, as Google documents them
(https://cloud.google.com/storage/docs/performing-resumable-uploads#status-check).

Example:
    >>> with run_gcs_server() as server, FaultProxy(server.url) as proxy:   # doctest: +SKIP
    ...     bucket = server.create_bucket()
    ...     store = open_store(bucket.url, **{**bucket.options, "endpoint_url": proxy.url})
    ...     proxy.add(Fault("lost_response"), method="POST")
    ...     store.save(manifest)             # the server did it, the answer never came
    ...     proxy.counts()["write"]
    2
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import json
import random
import re
import socket
import struct
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Literal, get_args
from urllib.parse import unquote

if TYPE_CHECKING:
    from aiohttp import ClientSession, web

__all__ = ["Fault", "FaultKind", "FaultProxy", "RequestKind", "SeenRequest"]

FaultKind = Literal[
    "lost_response",
    "late",
    "status",
    "status_after",
    "reset",
    "delay",
    "stall",
    "slow_body",
    "truncate",
    "damage_response",
    "damage_request",
    "stale_precondition",
]
RequestKind = Literal["write", "read", "head", "list", "delete", "batch", "bucket", "other"]

# Of one connection, not of the request that goes through it.
_HOP = {"connection", "content-length", "expect", "keep-alive", "transfer-encoding"}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one request.

    Attributes:
        kind: `lost_response`: the server does it, then the connection is closed. `late`: the
            connection is closed, and the server does it `seconds` later. `status`: the proxy
            answers `status`; the server hears nothing. `status_after`: the server does it, then
            the proxy answers `status`. `reset`: the connection is reset; the server hears
            nothing. `delay`: it is forwarded `seconds` later. `stall`: the answer comes `seconds`
            later. `slow_body`: the answer's body dribbles over `seconds`. `truncate`: half of the
            answer's body, then the end. `damage_response`, `damage_request`: a bit of the body
            is flipped. `stale_precondition`: 412, though the server was not asked.
        status: HTTP status, for the two kinds that answer one.
        seconds: For the kinds that take time.
        retry_after: Seconds to name in a `Retry-After` header beside `status`.
    """

    kind: FaultKind
    status: int = 503
    seconds: float = 0.05
    retry_after: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(f"{self.kind!r} is no fault: {', '.join(get_args(FaultKind))}")


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """One request that came.

    Attributes:
        method: HTTP method.
        path: Decoded path and query.
        kind: What it asks for; objects in a batch count as one request.
        fault: What was done to it, if anything.
        size: Bytes of its body.
    """

    method: str
    path: str
    kind: RequestKind
    fault: Fault | None
    size: int


@dataclass(slots=True)
class _Rule:
    fault: Fault
    method: str | None
    path: re.Pattern[str]
    skip: int
    left: int


@dataclass(slots=True)
class _Schedule:
    rng: random.Random
    rate: float
    faults: Sequence[Fault]
    longest_run: int
    run: int = field(default=0)

    def draw(self) -> Fault | None:
        if self.run >= self.longest_run or self.rng.random() >= self.rate:
            self.run = 0
            return None
        self.run += 1
        return self.rng.choice(self.faults)


_NETWORK_WEATHER: tuple[Fault, ...] = (
    Fault("lost_response"),
    Fault("status", status=429),
    Fault("status", status=503),
    Fault("status_after", status=503),
    Fault("reset"),
    Fault("delay", seconds=0.02),
    Fault("truncate"),
)


def _kind(method: str, path: str) -> RequestKind:
    """Sorts a request of the JSON API, or of any other by its method."""
    bare, _, query = path.partition("?")
    if bare.startswith("/batch/"):
        return "batch"
    if method == "DELETE":
        return "delete"
    if bare.startswith("/upload/") or method == "PUT":
        return "write"
    if re.fullmatch(r"/storage/v1/b(/[^/]+)?", bare):
        return "bucket"
    if re.fullmatch(r"/storage/v1/b/[^/]+/o", bare):
        return "list"
    if method == "GET":
        return "head" if bare.startswith("/storage/v1/") and "alt=media" not in query else "read"
    return "head" if method == "HEAD" else "other"


def _flip(data: bytes) -> bytes:
    if not data:
        return data
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


class FaultProxy:
    """An HTTP proxy on a loopback port, in a thread of its own; a context manager.

    Args:
        upstream: URL of the server.
        drop_headers: Names of request headers that the server is not to see: `If-Match` and
            `If-None-Match` make of an honest S3 server one that overwrites.
        answer_upload_status: Whether the proxy answers how far a resumable upload has got.
    """

    def __init__(
        self,
        upstream: str,
        *,
        drop_headers: Sequence[str] = (),
        answer_upload_status: bool = True,
    ) -> None:
        self._dropped = _HOP | {name.lower() for name in drop_headers}
        self._answer_upload_status = answer_upload_status
        self._upstream = upstream.rstrip("/")
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._schedule: _Schedule | None = None
        self._seen: list[SeenRequest] = []
        self._returned = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._late: set[asyncio.Task[None]] = set()
        #: By upload session, the server's last answer: 308 with a range, or the object.
        self._uploads: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self._url = ""

    @property
    def url(self) -> str:
        """Where clients reach the proxy, without a slash at the end."""
        return self._url

    @property
    def requests(self) -> Sequence[SeenRequest]:
        """All requests since the last `reset`, in the order of their arrival."""
        with self._lock:
            return list(self._seen)

    @property
    def bytes_returned(self) -> int:
        """Bytes of the bodies that were returned whole since the last `reset`."""
        with self._lock:
            return self._returned

    def counts(self) -> Mapping[str, int]:
        """How many requests of each `RequestKind` came since the last `reset`."""
        return collections.Counter(r.kind for r in self.requests)

    def add(
        self,
        fault: Fault,
        *,
        method: str | None = None,
        path: str = "",
        skip: int = 0,
        count: int = 1,
    ) -> None:
        """Adds a rule; the oldest that matches a request applies.

        Args:
            fault: What happens.
            method: Only to requests of this HTTP method.
            path: Regular expression searched for in the decoded path and query.
            skip: Matching requests that pass unharmed before.
            count: Matching requests that are harmed, then the rule is spent.
        """
        with self._lock:
            self._rules.append(_Rule(fault, method, re.compile(path), skip, count))

    def schedule(
        self,
        seed: int,
        *,
        rate: float = 0.2,
        faults: Sequence[Fault] = _NETWORK_WEATHER,
        longest_run: int = 3,
    ) -> None:
        """Harms requests at random from now on; rules go before.

        Args:
            seed: The same seed gives the same faults to the same sequence of requests.
            rate: Share of requests that is harmed, 0 to 1.
            faults: To draw from.
            longest_run: Harmed requests in a row, at most: what a retry budget must outlast.
        """
        with self._lock:
            self._schedule = _Schedule(random.Random(seed), rate, tuple(faults), longest_run)

    def reset(self) -> None:
        """Removes all rules and the schedule, and forgets the requests."""
        with self._lock:
            self._rules.clear()
            self._schedule = None
            self._seen.clear()
            self._returned = 0

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._run(self._open())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _run(self, work: Coroutine[object, object, None]) -> None:
        future: concurrent.futures.Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.result(30)

    async def _open(self) -> None:
        import aiohttp
        from aiohttp import web

        self._session: ClientSession = aiohttp.ClientSession(
            auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
        )
        app = web.Application(client_max_size=1 << 40)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        await web.SockSite(self._runner, listening).start()
        self._url = f"http://127.0.0.1:{listening.getsockname()[1]}"

    async def _close(self) -> None:
        if self._late:
            await asyncio.wait(self._late, timeout=5)
        await self._runner.cleanup()
        await self._session.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _choose(self, method: str, path: str, size: int) -> Fault | None:
        with self._lock:
            fault: Fault | None = None
            for rule in self._rules:
                if rule.left and rule.method in (None, method) and rule.path.search(path):
                    if rule.skip:
                        rule.skip -= 1
                        continue
                    rule.left -= 1
                    fault = rule.fault
                    break
            else:
                fault = self._schedule.draw() if self._schedule is not None else None
            self._seen.append(SeenRequest(method, path, _kind(method, path), fault, size))
            return fault

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        body = await request.read()
        fault = self._choose(request.method, unquote(request.raw_path), len(body))
        kind = fault.kind if fault is not None else None
        if fault is not None:
            if kind == "reset":
                return _hang_up(request, reset=True)
            if kind == "late":
                task = self._loop.create_task(self._forward_late(request, body, fault.seconds))
                self._late.add(task)
                task.add_done_callback(self._late.discard)
                return _hang_up(request)
            if kind in ("status", "stale_precondition"):
                return _answer(412 if kind == "stale_precondition" else fault.status, fault)
            if kind == "delay":
                await asyncio.sleep(fault.seconds)
        status, headers, answer = await self._forward(
            request, _flip(body) if kind == "damage_request" else body
        )
        if fault is not None:
            if kind == "lost_response":
                return _hang_up(request)
            if kind == "status_after":
                return _answer(fault.status, fault)
            if kind == "stall":
                await asyncio.sleep(fault.seconds)
            if kind == "damage_response":
                answer = _flip(answer)
            if kind in ("slow_body", "truncate") and answer:
                return await _dribble(request, status, headers, answer, fault)
        if request.method == "HEAD":
            # The length is that of the body that a GET would have.
            return web.Response(status=status, headers=headers)
        with self._lock:
            self._returned += len(answer)
        return web.Response(status=status, body=answer, headers=_without_length(headers))

    async def _forward_late(self, request: web.Request, body: bytes, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._forward(request, body)

    async def _forward(
        self, request: web.Request, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        from yarl import URL

        session = request.raw_path if "upload_id=" in request.raw_path else None
        asked = request.headers.get("Content-Range", "").startswith("bytes */")
        if session is not None and asked and self._answer_upload_status:
            return self._uploads.get(session, (308, {}, b""))
        # Paths hold encoded slashes, and signatures cover the host: both go through untouched.
        headers = {k: v for k, v in request.headers.items() if k.lower() not in self._dropped}
        async with self._session.request(
            request.method,
            URL(self._upstream + request.raw_path, encoded=True),
            data=body or None,
            headers=headers,
            allow_redirects=False,
        ) as response:
            answer = await response.read()
            kept = {
                k: v
                for k, v in response.headers.items()
                if k.lower() not in _HOP or k.lower() == "content-length"
            }
            if "Location" in kept:
                kept["Location"] = kept["Location"].replace(self._upstream, self._url)
            if session is not None and response.status in (200, 201, 308):
                self._uploads[session] = (response.status, kept, answer)
            return response.status, kept, answer


def _without_length(headers: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in headers.items() if k.lower() != "content-length"}


def _hang_up(request: web.Request, *, reset: bool = False) -> web.Response:
    from aiohttp import web

    transport = request.transport
    if transport is not None:
        if reset:
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        else:
            transport.close()
    return web.Response()


def _answer(status: int, fault: Fault) -> web.Response:
    from aiohttp import web

    headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
    text = json.dumps({"error": {"code": status, "message": "injected by the fault proxy"}})
    return web.Response(status=status, text=text, headers=headers, content_type="application/json")


async def _dribble(
    request: web.Request, status: int, headers: Mapping[str, str], answer: bytes, fault: Fault
) -> web.StreamResponse:
    from aiohttp import web

    response = web.StreamResponse(status=status, headers=_without_length(headers))
    response.content_length = len(answer)
    await response.prepare(request)
    if fault.kind == "truncate":
        await response.write(answer[: len(answer) // 2])
        _hang_up(request)
        return response
    steps = 10
    for n in range(steps):
        await asyncio.sleep(fault.seconds / steps)
        await response.write(answer[len(answer) * n // steps : len(answer) * (n + 1) // steps])
    await response.write_eof()
    return response
