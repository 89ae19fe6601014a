"""The proxy does what its faults say: a test that injects nothing proves nothing."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.error
import urllib.request

import pytest

from beam_ckpt.blobs import Blobs, open_blobs
from beam_ckpt.testing.fault_proxy import Fault, FaultProxy
from beam_ckpt.testing.gcs import GcsBucket


@pytest.fixture
def direct(gcs_bucket: GcsBucket) -> Blobs:
    return open_blobs(gcs_bucket.url, **gcs_bucket.options)


def fetch(proxy: FaultProxy, bucket: GcsBucket, name: str) -> bytes:
    url = f"{proxy.url}/download/storage/v1/b/{bucket.name}/o/{name}?alt=media"
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read()


def upload(proxy: FaultProxy, bucket: GcsBucket, name: str, data: bytes) -> int:
    url = f"{proxy.url}/upload/storage/v1/b/{bucket.name}/o?uploadType=media&name={name}"
    request = urllib.request.Request(url, data=data, method="POST")
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.status


def test_without_faults_all_goes_through(
    proxy: FaultProxy, gcs_bucket: GcsBucket, direct: Blobs
) -> None:
    assert upload(proxy, gcs_bucket, "a", b"hello") == 200
    assert fetch(proxy, gcs_bucket, "a") == direct.get("a")[0] == b"hello"
    assert proxy.counts() == {"write": 1, "read": 1}
    assert [r.fault for r in proxy.requests] == [None, None]
    before = proxy.bytes_returned
    assert fetch(proxy, gcs_bucket, "a") == b"hello"
    assert proxy.bytes_returned == before + 5
    proxy.reset()
    assert proxy.bytes_returned == 0


@pytest.mark.parametrize(
    ("fault", "happened"),
    [
        (Fault("lost_response"), True),
        (Fault("status_after", status=503), True),
        (Fault("status", status=503), False),
        (Fault("reset"), False),
        (Fault("stale_precondition"), False),
    ],
    ids=lambda v: v.kind if isinstance(v, Fault) else str(v),
)
def test_a_fault_before_leaves_nothing_and_one_after_leaves_the_object(
    proxy: FaultProxy, gcs_bucket: GcsBucket, direct: Blobs, fault: Fault, happened: bool
) -> None:
    proxy.add(fault)
    with pytest.raises(OSError):  # an HTTPError is one, too
        upload(proxy, gcs_bucket, "a", b"x")
    assert (direct.head("a") is not None) == happened
    assert upload(proxy, gcs_bucket, "a", b"x") == 200  # the rule is spent


def test_a_late_request_lands_after_its_connection_is_gone(
    proxy: FaultProxy, gcs_bucket: GcsBucket, direct: Blobs
) -> None:
    proxy.add(Fault("late", seconds=0.3))
    with pytest.raises(OSError):
        upload(proxy, gcs_bucket, "a", b"x")
    assert direct.head("a") is None
    time.sleep(0.6)
    assert direct.head("a") is not None


def test_a_truncated_body_ends_early_and_a_damaged_one_differs(
    proxy: FaultProxy, gcs_bucket: GcsBucket
) -> None:
    data = b"0123456789" * 1000
    upload(proxy, gcs_bucket, "a", data)
    proxy.add(Fault("truncate"))
    with pytest.raises(Exception, match=r"IncompleteRead|5000"):
        fetch(proxy, gcs_bucket, "a")
    proxy.add(Fault("damage_response"))
    damaged = fetch(proxy, gcs_bucket, "a")
    assert len(damaged) == len(data)
    assert sum(x != y for x, y in zip(damaged, data, strict=True)) == 1


@pytest.mark.parametrize("kind", ["delay", "stall", "slow_body"])
def test_slow_faults_take_their_time(proxy: FaultProxy, gcs_bucket: GcsBucket, kind: str) -> None:
    upload(proxy, gcs_bucket, "a", b"x" * 100)
    proxy.add(Fault(kind, seconds=0.3))
    started = time.monotonic()
    assert fetch(proxy, gcs_bucket, "a") == b"x" * 100
    assert time.monotonic() - started >= 0.3


def test_rules_pick_by_method_path_and_number(proxy: FaultProxy, gcs_bucket: GcsBucket) -> None:
    proxy.add(Fault("status", status=500), method="GET", path="/o/b", skip=1, count=2)
    for name in ("a", "b"):
        upload(proxy, gcs_bucket, name, b"x")
    outcomes = []
    for name in ("a", "b", "b", "a", "b", "b"):
        try:
            outcomes.append(fetch(proxy, gcs_bucket, name).decode())
        except urllib.error.HTTPError as e:
            outcomes.append(str(e.code))
    assert outcomes == ["x", "x", "500", "x", "500", "x"]


def test_a_schedule_is_the_same_for_the_same_seed_and_ends_its_runs(
    proxy: FaultProxy, gcs_bucket: GcsBucket
) -> None:
    upload(proxy, gcs_bucket, "a", b"x")

    def play(seed: int) -> list[bool]:
        proxy.reset()
        proxy.schedule(seed, rate=0.7, faults=[Fault("status", status=500)], longest_run=2)
        for _ in range(40):
            with contextlib.suppress(urllib.error.HTTPError):
                fetch(proxy, gcs_bucket, "a")
        return [r.fault is not None for r in proxy.requests]

    first = play(1)
    assert play(1) == first
    assert play(2) != first
    assert 10 < sum(first) < 30
    assert "TTT" not in "".join("T" if harmed else "f" for harmed in first)


def test_requests_are_counted_by_what_they_ask(proxy: FaultProxy, gcs_bucket: GcsBucket) -> None:
    blobs = open_blobs(gcs_bucket.url, **{**gcs_bucket.options, "endpoint_url": proxy.url})
    blobs.require_writable()
    version = blobs.put("a", b"x").version
    blobs.replace("a", b"y", version)
    blobs.get("a")
    blobs.head("a")
    blobs.list("")
    blobs.delete_many(["a", "b"])
    blobs.delete_many(["a"])
    assert proxy.counts() == {
        "bucket": 1, "write": 2, "read": 1, "head": 1, "list": 1, "batch": 1, "delete": 1
    }  # fmt: skip


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="no fault"):
        Fault("gremlin")


def test_a_proxy_ends_with_its_thread(gcs_bucket: GcsBucket) -> None:
    before = threading.active_count()
    with FaultProxy(gcs_bucket.server.url) as proxy:
        upload(proxy, gcs_bucket, "a", b"x")
        url = proxy.url
    assert threading.active_count() == before
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=1)
