"""The server that the suite trusts: it must enforce what stores rely on, or prove nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

from beam_ckpt.testing.gcs import GcsBucket, GcsServer


def insert(bucket: GcsBucket, name: str, data: bytes, **query: str) -> tuple[int, str]:
    """Uploads without any code of ours; returns status and generation."""
    body = (
        b"--b\r\nContent-Type: application/json\r\n\r\n"
        + json.dumps({"name": name}).encode()
        + b"\r\n--b\r\nContent-Type: application/octet-stream\r\n\r\n"
        + data
        + b"\r\n--b--\r\n"
    )
    query = {"uploadType": "multipart", **query}
    request = urllib.request.Request(
        f"{bucket.server.url}/upload/storage/v1/b/{bucket.name}/o?{urllib.parse.urlencode(query)}",
        data=body,
        headers={"Content-Type": "multipart/related; boundary=b"},
    )
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)["generation"]
    except urllib.error.HTTPError as e:
        e.close()
        return e.code, ""


def read(bucket: GcsBucket, name: str) -> bytes:
    url = f"{bucket.server.url}/download/storage/v1/b/{bucket.name}/o/{name}?alt=media"
    with urllib.request.urlopen(url) as response:
        return response.read()


def test_the_server_creates_only_what_is_absent(gcs_bucket: GcsBucket) -> None:
    assert insert(gcs_bucket, "a", b"first", ifGenerationMatch="0")[0] == 200
    assert insert(gcs_bucket, "a", b"second", ifGenerationMatch="0")[0] == 412
    assert read(gcs_bucket, "a") == b"first"


def test_the_server_replaces_only_the_generation_that_is_named(gcs_bucket: GcsBucket) -> None:
    _, first = insert(gcs_bucket, "a", b"1", ifGenerationMatch="0")
    status, second = insert(gcs_bucket, "a", b"2", ifGenerationMatch=first)
    assert status == 200 and second != first
    assert insert(gcs_bucket, "a", b"3", ifGenerationMatch=first)[0] == 412
    assert insert(gcs_bucket, "absent", b"4", ifGenerationMatch=first)[0] == 412
    assert read(gcs_bucket, "a") == b"2"


def test_the_server_decides_a_race_for_one(gcs_bucket: GcsBucket) -> None:
    for n in range(20):
        barrier = threading.Barrier(8)
        statuses: list[int] = []

        def create(who: int, n: int = n, statuses: list[int] = statuses) -> None:
            barrier.wait()  # noqa: B023 - joined within the round
            statuses.append(insert(gcs_bucket, f"{n}", b"%d" % who, ifGenerationMatch="0")[0])

        threads = [threading.Thread(target=create, args=(who,)) for who in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [200] + [412] * 7


def test_each_test_has_a_bucket_of_its_own(gcs_server: GcsServer, gcs_bucket: GcsBucket) -> None:
    other = gcs_server.create_bucket()
    assert other.name != gcs_bucket.name
    insert(other, "a", b"x")
    with pytest.raises(urllib.error.HTTPError):
        read(gcs_bucket, "a")


@pytest.mark.parametrize("end", ["normally", "killed"])
def test_no_server_outlives_the_process_that_started_it(end: str) -> None:
    code = """
        import sys, time
        from beam_ckpt.testing.gcs import run_gcs_server
        with run_gcs_server() as server:
            print(server.url, flush=True)
            time.sleep(60 if sys.argv[1] == "killed" else 0)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), end], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    if end == "killed":
        urllib.request.urlopen(f"{url}/_internal/healthcheck").close()
        os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    deadline = time.monotonic() + 10
    while True:
        try:
            urllib.request.urlopen(f"{url}/_internal/healthcheck", timeout=1).close()
        except OSError:
            break
        assert time.monotonic() < deadline, "the server is still there"
        time.sleep(0.05)


@pytest.mark.slow
def test_the_fixtures_work_for_others_and_in_parallel(tmp_path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from beam_ckpt.testing.gcs import gcs_bucket, gcs_server  # noqa: F401\n"
    )
    (tmp_path / "test_theirs.py").write_text(
        textwrap.dedent(
            """
            import pytest
            from beam_ckpt.blobs import open_blobs

            @pytest.mark.parametrize("n", range(4))
            def test_store(gcs_bucket, n):
                blobs = open_blobs(gcs_bucket.url, **gcs_bucket.options)
                assert list(blobs.list("")) == []
                blobs.put("a", b"x")
            """
        )
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    try:
        import xdist  # noqa: F401

        command += ["-n", "2"]
    except ImportError:
        pass
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert "4 passed" in result.stdout, result.stdout + result.stderr
