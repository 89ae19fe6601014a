"""Every backend that can be reached on this machine, behind one fixture."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from beam_ckpt.blobs import Blobs, open_blobs
from beam_ckpt.testing.fault_proxy import FaultProxy
from beam_ckpt.testing.gcs import GcsBucket, GcsServer, gcs_bucket, gcs_server

__all__ = ["gcs_bucket", "gcs_server"]

# Public, and the same for every azurite.
_AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@dataclass(frozen=True)
class Backend:
    """A place for blobs.

    Attributes:
        name: Of the parameter.
        url: Of an empty root.
        options: To open it with.
        atomic: Whether the server itself is exact under a race (moto checks, then writes).
        across_processes: Whether other processes see the same objects.
    """

    name: str
    url: str
    options: dict[str, object]
    atomic: bool = True
    across_processes: bool = True

    def open(self, **more: object) -> Blobs:
        """Opens it as a user does."""
        return open_blobs(self.url, **{**self.options, **more})


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """An S3 server of moto's."""
    for package in ("s3fs", "moto.server"):
        pytest.importorskip(package)
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture(scope="session")
def azure_options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """An Azure blob server: azurite, where npm has installed it."""
    pytest.importorskip("adlfs")
    azurite = shutil.which("azurite-blob")
    if azurite is None:
        pytest.skip("azurite-blob is not installed (npm install -g azurite)")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [azurite, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent"]
    command += ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path_factory.mktemp("azurite"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        account = f"http://127.0.0.1:{port}/devstoreaccount1"
        yield {
            "connection_string": "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;"
            f"AccountKey={_AZURITE_KEY};BlobEndpoint={account};"
        }
    finally:
        process.terminate()
        process.wait(10)


def s3_backend(url: str) -> Backend:
    """A new bucket of an S3 server."""
    import s3fs

    options: dict[str, object] = {"endpoint_url": url, "key": "test-key", "secret": "test-secret"}
    bucket = f"t-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem(**options).mkdir(bucket)
    return Backend("s3", f"s3://{bucket}/a/root", options, atomic=False)


def azure_backend(options: dict[str, object]) -> Backend:
    """A new container of an Azure server."""
    import adlfs

    container = f"t-{uuid.uuid4().hex[:12]}"
    adlfs.AzureBlobFileSystem(**options).mkdir(container)
    return Backend("azure", f"az://{container}/a/root", options)


@pytest.fixture
def make_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Backend]:
    """Makes an empty backend by name, or skips where its server is not installed."""

    def make(name: str) -> Backend:
        if name == "local":
            return Backend(name, str(tmp_path / "root"), {})
        if name == "memory":
            return Backend(name, f"memory://{uuid.uuid4().hex}", {}, across_processes=False)
        if name == "gcs":
            bucket: GcsBucket = request.getfixturevalue("gcs_bucket")
            return Backend(name, f"{bucket.url}/a/root", bucket.options)
        if name == "s3":
            return s3_backend(request.getfixturevalue("s3_url"))
        return azure_backend(request.getfixturevalue("azure_options"))

    return make


# The others take a minute each; test_fsspec_blobs.py has their essentials, and skips by name.
OURS = ["local", "memory", "gcs"]
BUCKETS = [
    pytest.param(name, marks=pytest.mark.slow)
    for name, package, installed in [
        ("s3", "s3fs", importlib.util.find_spec("moto") is not None),
        ("azure", "adlfs", shutil.which("azurite-blob") is not None),
    ]
    if installed and importlib.util.find_spec(package) is not None
]


@pytest.fixture(params=[*OURS, *BUCKETS])
def backend(request: pytest.FixtureRequest, make_backend: Callable[[str], Backend]) -> Backend:
    """Each backend in turn, empty."""
    return make_backend(request.param)


@pytest.fixture(params=["gcs", *BUCKETS])
def bucket_backend(
    request: pytest.FixtureRequest, make_backend: Callable[[str], Backend]
) -> Backend:
    """Each backend that keeps its objects in a bucket."""
    return make_backend(request.param)


@pytest.fixture
def blobs(backend: Backend) -> Blobs:
    """Each backend in turn, empty and open."""
    return backend.open()


@pytest.fixture
def proxy(gcs_server: GcsServer) -> Iterator[FaultProxy]:
    """A proxy in front of the GCS server."""
    with FaultProxy(gcs_server.url) as running:
        yield running


@pytest.fixture
def proxied(proxy: FaultProxy, gcs_bucket: GcsBucket) -> Callable[..., Blobs]:
    """Opens blobs of an empty bucket through the proxy."""

    def open_proxied(**options: object) -> Blobs:
        given = {**gcs_bucket.options, "endpoint_url": proxy.url, "retry_seconds": 30.0, **options}
        return open_blobs(f"{gcs_bucket.url}/root", **given)

    return open_proxied
