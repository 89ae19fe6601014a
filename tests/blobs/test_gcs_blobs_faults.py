"""Blobs in Cloud Storage while responses get lost, servers stumble and writers race."""

from __future__ import annotations

import collections
import random
import threading
import time
from collections.abc import Callable

import pytest

from beam_ckpt.blobs import (
    ABSENT,
    BlobConflict,
    BlobExists,
    BlobIndeterminate,
    BlobInvalid,
    Blobs,
    open_blobs,
)
from beam_ckpt.blobs._base import crc32c
from beam_ckpt.errors import CheckpointStorageError
from beam_ckpt.testing.fault_proxy import Fault, FaultProxy
from beam_ckpt.testing.gcs import GcsBucket

Proxied = Callable[..., Blobs]

# The server did it, and the client does not know.
DONE_UNHEARD = [Fault("lost_response"), Fault("status_after", status=503)]
# The server did not do it, and the client may not know.
NOT_DONE = [
    Fault("status", status=503),
    Fault("status", status=500),
    Fault("status", status=408),
    Fault("reset"),
    Fault("stale_precondition"),
]


def names(fault: Fault) -> str:
    return f"{fault.kind}-{fault.status}" if fault.kind.startswith("status") else fault.kind


@pytest.mark.parametrize(
    "fault", [*DONE_UNHEARD, *NOT_DONE, Fault("status", status=429)], ids=names
)
def test_put_if_absent_knows_that_it_won(proxy: FaultProxy, proxied: Proxied, fault: Fault) -> None:
    blobs = proxied()
    proxy.add(fault, method="POST")
    meta = blobs.put_if_absent("a", b"mine")
    assert blobs.get("a") == (b"mine", meta)
    with pytest.raises(BlobExists):
        blobs.put_if_absent("a", b"mine")


@pytest.mark.parametrize("fault", [*DONE_UNHEARD, *NOT_DONE], ids=names)
def test_replace_knows_that_it_won(proxy: FaultProxy, proxied: Proxied, fault: Fault) -> None:
    blobs = proxied()
    first = blobs.put_if_absent("a", b"1")
    proxy.add(fault, method="POST")
    second = blobs.replace("a", b"2", first.version)
    assert blobs.get("a") == (b"2", second)
    with pytest.raises(BlobConflict):
        blobs.replace("a", b"2", first.version)


@pytest.mark.parametrize("fault", [*DONE_UNHEARD, *NOT_DONE], ids=names)
def test_put_is_written_once(proxy: FaultProxy, proxied: Proxied, fault: Fault) -> None:
    blobs = proxied()
    proxy.add(fault, method="POST")
    meta = blobs.put("a", b"bytes")
    assert blobs.get("a") == (b"bytes", meta)


@pytest.mark.parametrize(
    "fault",
    [Fault("lost_response"), Fault("status_after"), Fault("status"), Fault("reset")],
    ids=names,
)
@pytest.mark.parametrize("count", [1, 5])
def test_deletes_are_carried_through(
    proxy: FaultProxy, proxied: Proxied, fault: Fault, count: int
) -> None:
    blobs = proxied()
    for n in range(7):
        blobs.put(f"d/{n}", b"x")
    proxy.add(fault, path="^/batch/|/o/root")
    blobs.delete_many([f"d/{n}" for n in range(count)])
    assert [m.key for m in blobs.list("")] == [f"d/{n}" for n in range(count, 7)]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("truncate"),
        Fault("lost_response"),
        Fault("reset"),
        Fault("status", status=503),
        Fault("damage_response"),
        Fault("slow_body", seconds=0.2),
    ],
    ids=names,
)
def test_a_read_is_repeated_until_it_is_whole(
    proxy: FaultProxy, proxied: Proxied, fault: Fault
) -> None:
    blobs = proxied()
    data = bytes(range(256)) * 1000
    blobs.put("a", data)
    proxy.add(fault, method="GET", path="alt=media")
    assert blobs.get("a", max_bytes=len(data))[0] == data
    if fault.kind != "damage_response":  # a part of an object has no checksum
        proxy.add(fault, method="GET", path="alt=media")
        assert blobs.get_range("a", 10, 20_000) == data[10:20_000]


def test_bytes_that_stay_damaged_are_never_returned(proxy: FaultProxy, proxied: Proxied) -> None:
    blobs = proxied(retry_seconds=1.0)
    blobs.put("a", b"some bytes")
    proxy.add(Fault("damage_response"), path="alt=media", count=99)
    with pytest.raises(BlobInvalid, match="crc32c"):
        blobs.get("a")


def test_an_upload_that_is_stored_damaged_is_taken_back(
    proxy: FaultProxy, proxied: Proxied
) -> None:
    # The emulator stores it; Google's server refuses it, for the declared crc32c.
    blobs = proxied(retry_seconds=1.0)
    data = b"0123456789" * 1000
    proxy.add(Fault("damage_request"), method="POST")
    with pytest.raises(CheckpointStorageError, match="crc32c"):
        blobs.put_if_absent("a", data)
    assert blobs.head("a") is None
    blobs.put_if_absent("a", data)
    assert blobs.get("a")[0] == data


@pytest.mark.parametrize("fault", [Fault("status", status=503), Fault("truncate")], ids=names)
def test_listings_and_heads_are_repeated(proxy: FaultProxy, proxied: Proxied, fault: Fault) -> None:
    blobs = proxied()
    meta = blobs.put("a", b"x")
    proxy.add(fault, method="GET", count=2)
    assert list(blobs.list("")) == [meta]
    proxy.add(fault, method="GET", count=2)
    assert blobs.head("a") == meta


@pytest.mark.parametrize("status", [429, 503])
def test_a_burst_of_refusals_on_the_pointer_is_survived(
    proxy: FaultProxy, proxied: Proxied, status: int
) -> None:
    blobs = proxied()
    version = blobs.put_if_absent("latest.json", b"0").version
    proxy.add(Fault("status", status=status), method="POST", count=2)
    blobs.replace("latest.json", b"1", version)
    assert blobs.get("latest.json")[0] == b"1"
    assert proxy.counts()["write"] == 4


def act_once_written(proxy: FaultProxy, act: Callable[[], object]) -> threading.Thread:
    """Acts, in a thread, as soon as a first write has come to the proxy."""

    def wait_and_act() -> None:
        while not proxy.counts()["write"]:
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


@pytest.mark.parametrize("fault", [Fault("status", status=503), Fault("reset")], ids=names)
def test_a_rival_that_wins_while_ours_is_in_doubt_is_told_apart(
    proxy: FaultProxy, proxied: Proxied, gcs_bucket: GcsBucket, fault: Fault
) -> None:
    blobs, rival = proxied(), proxied(endpoint_url=gcs_bucket.server.url)
    first = blobs.put_if_absent("a", b"0")
    proxy.reset()
    proxy.add(fault, method="POST")  # not done, but we cannot know
    proxy.add(Fault("delay", seconds=0.5), method="POST")
    thread = act_once_written(proxy, lambda: rival.replace("a", b"same", first.version))
    with pytest.raises(BlobConflict):
        blobs.replace("a", b"same", first.version)  # equal bytes: still not ours
    thread.join()
    assert blobs.get("a")[0] == b"same"


def test_a_lost_write_that_was_overwritten_since_is_indeterminate(
    proxy: FaultProxy, proxied: Proxied, gcs_bucket: GcsBucket
) -> None:
    blobs, rival = proxied(), proxied(endpoint_url=gcs_bucket.server.url)
    first = blobs.put_if_absent("a", b"0")
    proxy.reset()

    def overwrite() -> None:
        while True:
            data, meta = rival.get("a")
            if data == b"ours":
                rival.replace("a", b"on top", meta.version)
                return

    proxy.add(Fault("lost_response"), method="POST")
    proxy.add(Fault("delay", seconds=0.7), method="POST")
    thread = act_once_written(proxy, overwrite)
    with pytest.raises(BlobIndeterminate):
        blobs.replace("a", b"ours", first.version)
    thread.join()
    assert blobs.get("a")[0] == b"on top"


def test_a_write_that_lands_late_is_ours_and_lands_once(
    proxy: FaultProxy, proxied: Proxied
) -> None:
    blobs = proxied()
    proxy.add(Fault("late", seconds=0.5), method="POST")
    meta = blobs.put_if_absent("a", b"x")
    time.sleep(0.8)  # the late one has come by now, and was refused
    assert blobs.get("a") == (b"x", meta)


def test_a_write_that_lands_after_the_budget_is_indeterminate_not_failed(
    proxy: FaultProxy, proxied: Proxied
) -> None:
    blobs = proxied(retry_seconds=0.3)
    proxy.add(Fault("late", seconds=1.0), method="POST")
    proxy.add(Fault("reset"), method="POST", count=99)
    with pytest.raises(BlobIndeterminate):
        blobs.put_if_absent("a", b"x")
    time.sleep(1.2)
    assert blobs.get("a")[0] == b"x"


def test_a_write_that_was_refused_to_the_end_has_failed_for_sure(
    proxy: FaultProxy, proxied: Proxied
) -> None:
    blobs = proxied(retry_seconds=0.3)
    proxy.add(Fault("status", status=429), method="POST", count=99)
    with pytest.raises(CheckpointStorageError, match="429") as caught:
        blobs.put_if_absent("a", b"x")
    assert "given up after" in str(caught.value)
    assert blobs.head("a") is None


def test_the_last_lost_response_is_settled_by_reading_back(
    proxy: FaultProxy, proxied: Proxied
) -> None:
    blobs = proxied(retry_seconds=0.1)
    proxy.add(Fault("lost_response"), method="POST")
    meta = blobs.put_if_absent("a", b"x")
    assert blobs.get("a") == (b"x", meta)
    assert proxy.counts()["write"] == 1


def test_a_server_that_stalls_is_left_and_its_write_settled(
    proxy: FaultProxy, proxied: Proxied
) -> None:
    blobs = proxied(read_timeout=0.3)
    proxy.add(Fault("stall", seconds=2.0), method="POST")
    meta = blobs.put_if_absent("a", b"x")
    assert blobs.get("a") == (b"x", meta)


def test_a_read_from_a_server_that_never_answers_ends_with_an_error(
    proxy: FaultProxy, proxied: Proxied
) -> None:
    blobs = proxied(read_timeout=0.2, retry_seconds=0.5)
    blobs.put("a", b"x")
    proxy.add(Fault("stall", seconds=1.0), method="GET", count=99)
    with pytest.raises(CheckpointStorageError, match="no answer in time"):
        blobs.get("a")


@pytest.mark.parametrize(
    "fault",
    [
        Fault("lost_response"),
        Fault("status", status=503),
        Fault("status_after", status=503),
        Fault("reset"),
        Fault("truncate"),
    ],
    ids=names,
)
@pytest.mark.parametrize("at", [0, 1, 2, 3], ids=["start", "first", "middle", "last"])
def test_a_resumable_upload_outlives_any_one_fault(
    proxy: FaultProxy, proxied: Proxied, fault: Fault, at: int
) -> None:
    blobs = proxied(resumable_bytes=1 << 20, chunk_bytes=1 << 20)
    data = bytes(range(256)) * (10 << 10)  # 2.5 MiB: three chunks
    proxy.add(fault, path="^/upload/", skip=at)
    meta = blobs.put("large", data)
    assert (meta.size, blobs.get("large")[0]) == (len(data), data)


def test_a_resumable_upload_goes_on_where_it_broke_off(proxy: FaultProxy, proxied: Proxied) -> None:
    blobs = proxied(resumable_bytes=1 << 20, chunk_bytes=1 << 20)
    data = bytes(range(256)) * (20 << 10)  # 5 MiB
    proxy.add(Fault("status", status=503), path="^/upload/", skip=3)
    blobs.put("large", data)
    sent = sum(r.size for r in proxy.requests if r.kind == "write")
    assert sent < len(data) + (1 << 20) + 4096  # one chunk twice, not the whole


def test_counters_under_compare_and_swap_lose_nothing_to_lost_responses(
    proxy: FaultProxy, proxied: Proxied
) -> None:
    writers, increments = 4, 8
    proxied().put_if_absent("n", b"0")
    proxy.schedule(
        7,
        rate=0.25,
        faults=[Fault("lost_response"), Fault("status"), Fault("reset"), Fault("status_after")],
        longest_run=2,
    )
    outcomes: collections.Counter[str] = collections.Counter()

    def count() -> None:
        blobs, done = proxied(), 0
        while done < increments:
            data, meta = blobs.get("n")
            try:
                blobs.replace("n", b"%d" % (int(data) + 1), meta.version)
                outcomes["won"] += 1
            except BlobConflict:
                continue
            except BlobIndeterminate:
                outcomes["unknown"] += 1
            done += 1

    threads = [threading.Thread(target=count) for _ in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = int(proxied().get("n")[0])
    # Every known success counts, nothing counts twice; what is unknown may or may not.
    assert outcomes["won"] <= total <= outcomes["won"] + outcomes["unknown"]
    assert sum(outcomes.values()) == writers * increments


def test_a_create_race_under_faults_has_one_winner_who_knows_it(
    proxy: FaultProxy, proxied: Proxied
) -> None:
    proxy.schedule(
        11,
        rate=0.3,
        faults=[Fault("lost_response"), Fault("status"), Fault("status_after"), Fault("reset")],
        longest_run=2,
    )
    everyone = [proxied() for _ in range(4)]
    for n in range(6):
        barrier = threading.Barrier(len(everyone))
        won: list[bytes] = []

        def create(who: int, blobs: Blobs, n: int = n) -> None:
            barrier.wait()  # noqa: B023 - joined before the next round
            try:
                blobs.put_if_absent(f"c/{n}", b"%d" % who)
                won.append(b"%d" % who)  # noqa: B023
            except BlobExists:
                pass

        threads = [threading.Thread(target=create, args=(i, b)) for i, b in enumerate(everyone)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [everyone[0].get(f"c/{n}")[0]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_large_objects_get_through_bad_weather_whole(
    proxy: FaultProxy, proxied: Proxied, seed: int
) -> None:
    blobs = proxied()  # the default sizes: resumable above 32 MiB
    data = random.Random(seed).randbytes(70 << 20)
    proxy.schedule(seed, rate=0.3, longest_run=2)
    meta = blobs.put("large", data)
    assert (meta.size, meta.crc32c) == (len(data), crc32c(data))
    assert blobs.get("large")[0] == data


def test_an_upload_that_the_server_ends_early_is_taken_back_and_made_anew(
    gcs_bucket: GcsBucket,
) -> None:
    # fake-gcs-server ends an upload when it is asked how far it has got.
    with FaultProxy(gcs_bucket.server.url, answer_upload_status=False) as proxy:
        options = {**gcs_bucket.options, "endpoint_url": proxy.url}
        sizes = {"resumable_bytes": 1 << 20, "chunk_bytes": 1 << 20}
        blobs = open_blobs(gcs_bucket.url, **options, **sizes)
        data = bytes(range(256)) * (10 << 10)
        proxy.add(Fault("status", status=503), path="^/upload/", skip=2)
        assert blobs.put("large", data).size == len(data)
        assert blobs.get("large")[0] == data
        assert proxy.counts()["delete"] == 1


def test_absent_is_expected_by_name(proxy: FaultProxy, proxied: Proxied) -> None:
    blobs = proxied()
    proxy.add(Fault("lost_response"), method="POST")
    meta = blobs.replace("latest.json", b"1", ABSENT)
    assert blobs.get("latest.json") == (b"1", meta)
