"""What every backend must do, one row a test."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from beam_ckpt.blobs import (
    ABSENT,
    BlobConflict,
    BlobExists,
    Blobs,
    BlobTooLarge,
)
from beam_ckpt.blobs._base import crc32c

HOSTILE = {
    "empty": b"",
    "one_zero": b"\x00",
    "ends_in_cr": b"data\r",
    "ends_in_crlf": b"data\r\n",
    "only_newlines": b"\n" * 1000,
    "looks_like_a_boundary": b"\n--==0==--\nmore",
    "looks_like_multipart": b"\r\n--b\r\nContent-Type: text/plain\r\n\r\nx\r\n--b--\r\n",
    "all_bytes": bytes(range(256)) * 17,
    "looks_like_gzip": b"\x1f\x8b\x08\x00" + b"\x00" * 64,
    "looks_like_chunks": b"5\r\nhello\r\n0\r\n\r\n",
}

KEYS = [
    "plain",
    "deep/er/and/deeper",
    "a space",
    "per%20cent",
    "plus+and&amp=eq",
    "quest?ion#hash",
    "unicode-\u00fc-\u4e16-\U0001f600",
    "semi;colon,comma'quote",
    "brackets[0]{1}*",
    "dots..in.name",
    "state/op%2Fuid/00042/12-run-uuid.parquet",
]


def test_what_was_put_is_read_with_the_same_metadata(blobs: Blobs) -> None:
    written = blobs.put("a/b", b"hello")
    data, read = blobs.get("a/b")
    assert data == b"hello"
    assert (read.key, read.size, read.version) == ("a/b", 5, written.version)
    head = blobs.head("a/b")
    assert head is not None
    assert (head.key, head.size, head.version) == ("a/b", 5, written.version)


def test_checksums_where_given_are_those_of_the_bytes(blobs: Blobs) -> None:
    blobs.put("a", b"hello")
    metas = [blobs.put("b", b"hello"), blobs.get("a")[1], blobs.head("a"), *blobs.list("a")]
    assert all(m is not None and m.crc32c in (None, crc32c(b"hello")) for m in metas)


@pytest.mark.parametrize("name", HOSTILE)
def test_payloads_of_hostile_shape_come_back_as_they_were(blobs: Blobs, name: str) -> None:
    data = HOSTILE[name]
    blobs.put_if_absent("x", data)
    first = blobs.get("x")[1]
    assert blobs.get("x", max_bytes=len(data))[0] == data
    blobs.replace("x", data + b"!", first.version)
    assert blobs.get("x")[0] == data + b"!"
    assert blobs.put("y", data).size == len(data)
    assert blobs.get("y")[0] == data


def test_a_large_payload_comes_back_as_it_was(blobs: Blobs) -> None:
    data = bytes(range(251)) * 40_000  # 10 MB
    assert blobs.put("large", data).size == len(data)
    assert blobs.get("large")[0] == data
    assert blobs.get_range("large", len(data) - 5, len(data) + 5) == data[-5:]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_hostile_shape_names_one_object(blobs: Blobs, key: str) -> None:
    if "#" in key and "az://" in blobs.url:
        pytest.skip("adlfs lists names with ? and # in another order")
    blobs.put("other", b"other")
    version = blobs.put_if_absent(key, key.encode()).version
    assert blobs.get(key)[0] == key.encode()
    assert [m.key for m in blobs.list("")] == sorted(["other", key])
    assert [m.key for m in blobs.list(key)] == [key]
    blobs.replace(key, b"new", version)
    blobs.delete_many([key])
    assert blobs.head(key) is None
    assert blobs.get("other")[0] == b"other"


@pytest.mark.parametrize("key", ["", "/abs", "a//b", "a/", "../x", "a/../b", "a/./b", "nul\x00"])
def test_a_key_that_leaves_the_root_is_refused(blobs: Blobs, key: str) -> None:
    for operation in (
        lambda: blobs.put(key, b"x"),
        lambda: blobs.put_if_absent(key, b"x"),
        lambda: blobs.replace(key, b"x", ABSENT),
        lambda: blobs.get(key),
        lambda: blobs.get_range(key, 0, 1),
        lambda: blobs.head(key),
        lambda: blobs.delete_many([key]),
    ):
        with pytest.raises(ValueError):
            operation()


def test_an_absent_object_is_not_found(blobs: Blobs) -> None:
    assert blobs.head("nope") is None
    with pytest.raises(FileNotFoundError):
        blobs.get("nope")
    with pytest.raises(FileNotFoundError):
        blobs.get("nope", max_bytes=10)
    with pytest.raises(FileNotFoundError):
        blobs.get_range("nope", 0, 10)
    assert list(blobs.list("nope")) == []


def test_put_is_safe_to_repeat_and_overwrites(blobs: Blobs) -> None:
    first = blobs.put("a", b"one")
    assert blobs.put("a", b"one").size == 3
    second = blobs.put("a", b"two!")
    assert second.version != first.version
    assert blobs.get("a")[0] == b"two!"


def test_put_if_absent_never_overwrites(blobs: Blobs) -> None:
    blobs.put_if_absent("a", b"first")
    for data in (b"second", b"first"):  # equal bytes of another writer are not a success
        with pytest.raises(BlobExists):
            blobs.put_if_absent("a", data)
    assert blobs.get("a")[0] == b"first"


def test_put_if_absent_succeeds_again_after_a_delete(blobs: Blobs) -> None:
    blobs.put_if_absent("a", b"first")
    blobs.delete_many(["a"])
    blobs.put_if_absent("a", b"second")
    assert blobs.get("a")[0] == b"second"


def test_replace_takes_only_the_expected_version(blobs: Blobs) -> None:
    first = blobs.put_if_absent("a", b"1")
    second = blobs.replace("a", b"2", first.version)
    assert second.version != first.version
    with pytest.raises(BlobConflict):
        blobs.replace("a", b"3", first.version)
    assert blobs.get("a") == (b"2", blobs.get("a")[1])
    third = blobs.replace("a", b"4", second.version)
    assert blobs.get("a")[1].version == third.version


def test_replace_of_absent_creates_and_only_then(blobs: Blobs) -> None:
    created = blobs.replace("a", b"1", ABSENT)
    with pytest.raises(BlobConflict):
        blobs.replace("a", b"2", ABSENT)
    assert blobs.get("a")[0] == b"1"
    blobs.delete_many(["a"])
    with pytest.raises(BlobConflict):
        blobs.replace("a", b"3", created.version)
    assert blobs.head("a") is None


def test_replace_with_a_version_of_another_backend_conflicts(blobs: Blobs) -> None:
    blobs.put("a", b"1")
    for version in ("not-a-version", "9" * 17):
        with pytest.raises(BlobConflict):
            blobs.replace("a", b"2", version)
    assert blobs.get("a")[0] == b"1"


def test_get_is_bounded_before_the_body_is_read(blobs: Blobs) -> None:
    data = b"x" * 100_000
    blobs.put("a", data)
    assert blobs.get("a", max_bytes=100_000)[0] == data
    for limit in (0, 1, 99_999):
        with pytest.raises(BlobTooLarge) as caught:
            blobs.get("a", max_bytes=limit)
        assert (caught.value.key, caught.value.limit) == ("a", limit)
        assert caught.value.size > limit
    blobs.put("empty", b"")
    assert blobs.get("empty", max_bytes=0)[0] == b""


def test_get_range_reads_what_there_is(blobs: Blobs) -> None:
    version = blobs.put("a", b"0123456789").version
    assert blobs.get_range("a", 0, 10) == b"0123456789"
    assert blobs.get_range("a", 3, 5) == b"34"
    assert blobs.get_range("a", 8, 99) == b"89"
    assert blobs.get_range("a", 10, 12) == b""
    assert blobs.get_range("a", 50, 60) == b""
    assert blobs.get_range("a", 4, 4) == b""
    assert blobs.get_range("a", 3, 5, version) == b"34"
    blobs.put("empty", b"")
    assert blobs.get_range("empty", 0, 5) == b""


def test_get_range_of_a_version_that_was_replaced_conflicts(blobs: Blobs) -> None:
    old = blobs.put("a", b"old bytes").version
    new = blobs.replace("a", b"new bytes", old).version
    with pytest.raises(BlobConflict):
        blobs.get_range("a", 0, 3, old)
    assert blobs.get_range("a", 0, 3, new) == b"new"


def test_list_is_flat_sorted_and_by_prefix(blobs: Blobs) -> None:
    keys = ["b/1", "a/2/x", "a/10", "a/2", "a.b", "ab", "b/0/y", "a/2-z", "Z"]
    if type(blobs).__name__ == "LocalBlobs":
        keys.remove("a/2")  # a file and a directory of one name
    for key in keys:
        blobs.put(key, key.encode())
    assert [m.key for m in blobs.list("")] == sorted(keys)
    assert [m.key for m in blobs.list("a/")] == sorted(k for k in keys if k.startswith("a/"))
    assert [m.key for m in blobs.list("a")] == sorted(k for k in keys if k.startswith("a"))
    assert [m.key for m in blobs.list("a/2")] == sorted(k for k in keys if k.startswith("a/2"))
    assert [m.size for m in blobs.list("b/")] == [5, 3]
    assert list(blobs.list("b/1/")) == []


def test_list_begins_after_a_key(blobs: Blobs) -> None:
    for n in range(7):
        blobs.put(f"m/{n:03}", b"x")
    assert [m.key for m in blobs.list("m/", "m/003")] == ["m/004", "m/005", "m/006"]
    assert [m.key for m in blobs.list("m/", "m/0035")] == ["m/004", "m/005", "m/006"]
    assert list(blobs.list("m/", "m/006")) == []
    assert len(blobs.list("m/", "a")) == 7


def test_listings_and_reads_are_never_stale(backend) -> None:
    one, other = backend.open(), backend.open()
    for n in range(5):
        assert len(one.list("d/")) == n
        assert other.head(f"d/{n}") is None
        other.put(f"d/{n}", b"x" * (n + 1))
        assert [m.size for m in one.list("d/")] == list(range(1, n + 2))
        head = one.head(f"d/{n}")
        assert head is not None and head.size == n + 1
    other.delete_many(["d/0"])
    assert [m.key for m in one.list("d/")] == [f"d/{n}" for n in range(1, 5)]


def test_versions_in_a_listing_are_those_that_replace_expects(blobs: Blobs) -> None:
    blobs.put("a", b"1")
    (meta,) = blobs.list("a")
    blobs.replace("a", b"2", meta.version)
    assert blobs.get("a")[0] == b"2"


def test_delete_many_takes_absent_keys_and_repeats(blobs: Blobs) -> None:
    for n in range(3):
        blobs.put(f"d/{n}", b"x")
    blobs.delete_many([])
    blobs.delete_many(["nope"])
    blobs.delete_many(["d/0", "nope", "d/1", "d/0"])
    blobs.delete_many(["d/0", "d/1"])
    assert [m.key for m in blobs.list("")] == ["d/2"]


def test_objects_outside_the_root_are_neither_seen_nor_deleted(bucket_backend) -> None:
    inner = bucket_backend.open()
    outer = dataclasses.replace(bucket_backend, url=bucket_backend.url.removesuffix("/root")).open()
    outer.put("rootless", b"x")
    outer.put("x", b"x")
    inner.put("x", b"y")
    assert [m.key for m in inner.list("")] == ["x"]
    assert [m.key for m in outer.list("")] == ["root/x", "rootless", "x"]
    inner.delete_many(["x"])
    assert outer.get("x")[0] == b"x"


def test_an_instance_survives_pickling(blobs: Blobs) -> None:
    blobs.put("a", b"1")
    again = pickle.loads(pickle.dumps(blobs))
    assert again.url == blobs.url
    assert again.get("a")[0] == b"1"
    again.put("b", b"2")
    assert blobs.get("b")[0] == b"2"


def test_a_backend_that_enforces_conditions_is_accepted_and_left_clean(blobs: Blobs) -> None:
    blobs.require_writable()
    blobs.require_writable()
    assert list(blobs.list("")) == []


def test_a_note_is_shown_by_listings_or_by_nothing(blobs: Blobs) -> None:
    blobs.put_if_absent("a/noted", b"x", "manifest 2 1 0")
    blobs.put("a/plain", b"x")
    keeps = blobs.url.startswith(("gs://", "memory://"))
    expected = "manifest 2 1 0" if keeps else ""
    assert [m.note for m in blobs.list("a/")] == [expected, ""]
    with pytest.raises(BlobExists):
        blobs.put_if_absent("a/noted", b"x", "another")
    assert blobs.list("a/")[0].note == expected
    blobs.put("a/noted", b"y")
    assert [m.note for m in blobs.list("a/")] == ["", ""]
