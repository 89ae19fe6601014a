"""What is particular to Cloud Storage: URLs, buckets, credentials, batches, chunks, forks."""

from __future__ import annotations

import concurrent.futures
import gc
import json
import logging
import os
import pickle
import subprocess
import sys
import textwrap
import traceback
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from aiohttp import web

from beam_ckpt.blobs import Blobs, open_blobs
from beam_ckpt.blobs._gcs import GcsBlobs
from beam_ckpt.errors import CheckpointStorageError, StoreUrlError
from beam_ckpt.testing.fault_proxy import Fault, FaultProxy
from beam_ckpt.testing.gcs import GcsBucket, GcsServer

Proxied = Callable[..., Blobs]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("gs://bucket", "gs://bucket"),
        ("gs://bucket/", "gs://bucket"),
        ("gs://bucket/a/b/", "gs://bucket/a/b"),
        ("gcs://bucket/a", "gs://bucket/a"),
        ("GS://my.bucket_1/a b", "gs://my.bucket_1/a b"),
    ],
)
def test_urls_are_read_in_all_their_forms(url: str, shown: str) -> None:
    assert GcsBlobs(url).url == shown


@pytest.mark.parametrize(
    "url",
    [
        "gs://",
        "gs:///prefix",
        "gs://Bucket/a",
        "gs://user:secret@bucket/a",
        "gs://bucket/a/../b",
        "gs://bucket/a//b",
        "gs://bucket/a?generation=1",
        "gs://bucket/a#1",
        "gs://bucket/*",
        "gs://bucket/a\nb",
        "s3://bucket/a",
    ],
)
def test_a_malformed_url_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(StoreUrlError) as caught:
        GcsBlobs(url)
    assert "secret" not in str(caught.value)


def test_an_option_of_ours_that_is_malformed_is_refused() -> None:
    with pytest.raises(StoreUrlError, match="chunk_bytes"):
        GcsBlobs("gs://bucket", chunk_bytes=1000)
    with pytest.raises(StoreUrlError, match="read_timeout"):
        GcsBlobs("gs://bucket", read_timeout="soon")


def test_a_missing_bucket_is_an_error_and_never_an_empty_store(gcs_server: GcsServer) -> None:
    for operation in (
        lambda b: b.get("a"),
        lambda b: b.get_range("a", 0, 1),
        lambda b: b.head("a"),
        lambda b: b.list(""),
        lambda b: b.put("a", b"x"),
        lambda b: b.put_if_absent("a", b"x"),
        lambda b: b.replace("a", b"x", ""),
        lambda b: b.delete_many(["a"]),
        lambda b: b.require_writable(),
        lambda b: b.exists(),
    ):
        with pytest.raises(CheckpointStorageError, match="no bucket 'no-such-bucket'") as caught:
            operation(open_blobs("gs://no-such-bucket/a", **gcs_server.options))
        assert not isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize(
    ("status", "hint"),
    [(401, "gcloud auth application-default login"), (403, "roles/storage.objectUser")],
)
def test_missing_permissions_say_what_to_do_and_are_not_retried(
    proxy: FaultProxy, proxied: Proxied, status: int, hint: str
) -> None:
    blobs = proxied()
    blobs.put("a", b"x")
    proxy.add(Fault("status", status=status), count=999)
    for operation in (
        lambda: blobs.get("a"),
        lambda: blobs.head("a"),
        lambda: blobs.list(""),
        lambda: blobs.put("b", b"x"),
        lambda: blobs.put_if_absent("b", b"x"),
        lambda: blobs.delete_many(["a"]),
        lambda: blobs.delete_many(["a", "b"]),
    ):
        before = len(proxy.requests)
        with pytest.raises(CheckpointStorageError, match=hint) as caught:
            operation()
        assert caught.value.errno == 13
        assert len(proxy.requests) == before + 1


def test_credentials_that_cannot_be_loaded_say_what_to_do(tmp_path) -> None:
    broken = tmp_path / "key.json"
    broken.write_text(json.dumps({"type": "service_account", "private_key": "hush-hush"}))
    with pytest.raises(CheckpointStorageError, match=r"gcloud auth .*\(token\)") as caught:
        GcsBlobs("gs://bucket/a", token=str(broken)).get("x")
    assert "hush" not in "".join(traceback.format_exception(caught.value))


def test_credentials_reach_the_server_and_nothing_else(
    proxy: FaultProxy, gcs_bucket: GcsBucket, caplog: pytest.LogCaptureFixture
) -> None:
    from google.oauth2.credentials import Credentials

    caplog.set_level(logging.DEBUG)
    secret = "ya29.very-secret-token"
    options = {**gcs_bucket.options, "endpoint_url": proxy.url, "token": Credentials(secret)}
    blobs = open_blobs(f"{gcs_bucket.url}/a", **options, retry_seconds=0.15)
    said = [repr(blobs), blobs.url]
    for fault in (
        Fault("status", status=403),
        Fault("status", status=401),
        Fault("status", status=503),
        Fault("reset"),
        Fault("truncate"),
        Fault("status", status=400),
    ):
        proxy.reset()
        proxy.add(fault, count=999)
        for operation in (
            lambda: blobs.get("a"),
            lambda: blobs.put("a", b"x"),
            lambda: blobs.list(""),
            lambda: blobs.delete_many(["a", "b"]),
        ):
            try:
                operation()
            except Exception as e:
                said.append("".join(traceback.format_exception(e)))
    proxy.reset()
    blobs.put("a", b"x")
    assert len(said) > 15
    assert secret not in "\n".join(said) + caplog.text + repr(blobs.get("a")[1])
    assert pickle.loads(pickle.dumps(blobs)).get("a")[0] == b"x"


def test_an_upload_session_elsewhere_is_refused(proxy: FaultProxy, gcs_bucket: GcsBucket) -> None:
    # The server's session is at its own address; through this endpoint it looks foreign.
    class _Unaware(FaultProxy):
        async def _forward(self, request: web.Request, body: bytes):  # type: ignore[no-untyped-def]
            status, headers, answer = await super()._forward(request, body)
            if "Location" in headers:
                headers["Location"] = headers["Location"].replace(self.url, "http://elsewhere")
            return status, headers, answer

    with _Unaware(gcs_bucket.server.url) as unaware:
        options = {**gcs_bucket.options, "endpoint_url": unaware.url, "resumable_bytes": 10}
        with pytest.raises(CheckpointStorageError, match="another address"):
            open_blobs(gcs_bucket.url, **options).put("a", b"x" * 11)
        assert all(r.method == "POST" for r in unaware.requests)


@pytest.fixture
def zonal(gcs_bucket: GcsBucket) -> Iterator[Callable[..., Blobs]]:
    """Opens the bucket through a proxy that says what Google says of a zonal bucket."""

    class _Zonal(FaultProxy):
        look_at_bucket = 200

        async def _forward(self, request: web.Request, body: bytes):  # type: ignore[no-untyped-def]
            if request.method == "GET" and request.path == f"/storage/v1/b/{gcs_bucket.name}":
                found = {"name": gcs_bucket.name, "storageClass": "RAPID", "locationType": "zone"}
                return self.look_at_bucket, {}, json.dumps(found).encode()
            status, headers, answer = await super()._forward(request, body)
            return status, headers, answer.replace(b'"STANDARD"', b'"RAPID"')

    with _Zonal(gcs_bucket.server.url) as running:

        def open_zonal(look_at_bucket: int) -> Blobs:
            running.look_at_bucket = look_at_bucket
            return open_blobs(gcs_bucket.url, **{**gcs_bucket.options, "endpoint_url": running.url})

        yield open_zonal


def test_a_zonal_bucket_is_refused_before_the_first_write(zonal: Callable[..., Blobs]) -> None:
    with pytest.raises(StoreUrlError, match="zonal"):
        zonal(200).require_writable()


def test_a_zonal_bucket_that_may_not_be_looked_at_is_refused_by_its_first_object(
    zonal: Callable[..., Blobs],
) -> None:
    blobs = zonal(403)
    blobs.require_writable()
    with pytest.raises(StoreUrlError, match="zonal"):
        blobs.put_if_absent("a", b"x")


def test_a_listing_goes_over_pages(
    proxy: FaultProxy, proxied: Proxied, gcs_bucket: GcsBucket
) -> None:
    blobs, direct = proxied(), proxied(endpoint_url=gcs_bucket.server.url)
    keys = [f"m/{n:05}" for n in range(1003)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: direct.put(key, b""), keys))
    assert [m.key for m in blobs.list("m/")] == keys
    assert proxy.counts() == {"list": 2}
    proxy.reset()
    assert [m.key for m in blobs.list("m/", keys[-3])] == keys[-2:]
    assert proxy.counts() == {"list": 1}
    proxy.reset()
    blobs.delete_many(keys)
    assert proxy.counts() == {"batch": 11}
    assert list(blobs.list("")) == []


def test_folders_that_the_console_made_are_not_objects(
    gcs_bucket: GcsBucket,
) -> None:
    blobs = open_blobs(gcs_bucket.url, **gcs_bucket.options)
    blobs.put("a/b", b"x")
    url = f"{gcs_bucket.server.url}/upload/storage/v1/b/{gcs_bucket.name}/o"
    request = urllib.request.Request(f"{url}?uploadType=media&name=a/", data=b"", method="POST")
    urllib.request.urlopen(request).close()
    assert [m.key for m in blobs.list("")] == ["a/b"]


@pytest.mark.parametrize("status", [404, 405, 501])
def test_deletes_go_one_by_one_where_there_are_no_batches(
    proxy: FaultProxy, proxied: Proxied, status: int
) -> None:
    blobs = proxied()
    for n in range(3):
        blobs.put(f"d/{n}", b"x")
    proxy.reset()
    proxy.add(Fault("status", status=status), path="^/batch/", count=99)
    blobs.delete_many([f"d/{n}" for n in range(3)])
    assert list(blobs.list("")) == []
    assert proxy.counts() == {"batch": 1, "delete": 3, "list": 1}


def test_each_operation_costs_one_request(proxy: FaultProxy, proxied: Proxied) -> None:
    blobs = proxied()
    blobs.require_writable()
    version = ""

    def put_if_absent() -> None:
        nonlocal version
        version = blobs.put_if_absent("b", b"x").version

    for kind, operation in [
        ("write", lambda: blobs.put("a", b"x")),
        ("write", put_if_absent),
        ("write", lambda: blobs.replace("b", b"y", version)),
        ("read", lambda: blobs.get("a", max_bytes=100)),
        ("read", lambda: blobs.get_range("a", 0, 1)),
        ("head", lambda: blobs.head("a")),
        ("list", lambda: blobs.list("")),
        ("batch", lambda: blobs.delete_many(["a", "b"])),
        ("head", lambda: blobs.head("a")),
        ("delete", lambda: blobs.delete_many(["a"])),
    ]:
        proxy.reset()
        operation()
        assert proxy.counts() == {kind: 1}


def test_a_body_that_is_too_large_is_not_transferred(proxy: FaultProxy, proxied: Proxied) -> None:
    from beam_ckpt.blobs import BlobTooLarge

    blobs = proxied(read_timeout=5)
    blobs.put("a", b"x" * 5_000_000)
    proxy.add(Fault("slow_body", seconds=20.0), method="GET")
    with pytest.raises(BlobTooLarge):  # at once, though the body would take 20 s
        blobs.get("a", max_bytes=1_000_000)


def test_an_empty_object_may_come_without_its_size(gcs_bucket: GcsBucket) -> None:
    class _Omitting(FaultProxy):
        async def _forward(self, request: web.Request, body: bytes):  # type: ignore[no-untyped-def]
            status, headers, answer = await super()._forward(request, body)
            return status, headers, answer.replace(b'"size":"0",', b"")

    with _Omitting(gcs_bucket.server.url) as omitting:
        options = {**gcs_bucket.options, "endpoint_url": omitting.url}
        blobs = open_blobs(gcs_bucket.url, **options)
        meta = blobs.put_if_absent("empty", b"")
        assert meta.size == 0
        assert blobs.head("empty") == meta
        assert list(blobs.list("")) == [meta]


def test_objects_of_other_tools_are_read_and_replaced(gcs_bucket: GcsBucket) -> None:
    from gcsfs.core import GCSFileSystem

    fs = GCSFileSystem(**gcs_bucket.options, skip_instance_cache=True)
    fs.pipe_file(f"{gcs_bucket.name}/p/copied", b"by gsutil")
    blobs = open_blobs(f"{gcs_bucket.url}/p", **gcs_bucket.options)
    data, meta = blobs.get("copied")
    assert data == b"by gsutil"
    assert blobs.put("copied", b"by gsutil") == meta
    blobs.replace("copied", b"ours", meta.version)
    assert fs.cat_file(f"{gcs_bucket.name}/p/copied") == b"ours"


def test_a_forked_child_uses_a_client_of_its_own(gcs_bucket: GcsBucket) -> None:
    blobs = open_blobs(gcs_bucket.url, **gcs_bucket.options)
    blobs.put("parent", b"p")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            blobs.put("child", b"c")
            gc.collect()
            status = 0 if blobs.get("parent")[0] == b"p" else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert blobs.get("child")[0] == b"c"


def test_a_process_that_used_the_client_ends_silently(gcs_bucket: GcsBucket) -> None:
    code = f"""
        import gc
        from beam_ckpt.blobs import open_blobs
        for n in range(2):
            blobs = open_blobs({gcs_bucket.url!r}, **{gcs_bucket.options!r}, read_timeout=n + 5)
            blobs.put("a", b"x" * 3_000_000)
            blobs.get("a")
            del blobs
            gc.collect()
        blobs = open_blobs({gcs_bucket.url!r}, **{gcs_bucket.options!r})
        blobs.list("")
        print("done")
    """
    result = subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.stdout, result.returncode) == ("done\n", 0)
    assert "beam_ckpt" not in result.stderr
    assert "Unclosed" not in result.stderr
    assert "RuntimeError" not in result.stderr


def test_instances_that_are_opened_alike_share_a_client(gcs_bucket: GcsBucket) -> None:
    one = GcsBlobs(f"{gcs_bucket.url}/a", **gcs_bucket.options)
    other = GcsBlobs(f"{gcs_bucket.url}/b", **gcs_bucket.options)
    assert one._client() is other._client()
    slower = GcsBlobs(f"{gcs_bucket.url}/b", **gcs_bucket.options, read_timeout=99)
    assert slower._client() is not one._client()
