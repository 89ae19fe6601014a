"""The format: what a manifest may say, and how it is written."""

from __future__ import annotations

import base64
import gzip
import json
import threading
import time
import tracemalloc
import uuid
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from beam_ckpt.errors import CheckpointTooLargeError, InvalidCheckpointError
from beam_ckpt.manifest import (
    MAX_INLINE_BYTES,
    MAX_MANIFEST_BYTES,
    CheckpointManifest,
    OperatorSnapshotEntry,
    PartitionSnapshotEntry,
    RunIdentity,
    SidecarEntry,
    SourceOffsetEntry,
    new_checkpoint_id,
    uuid7_millis,
)
from beam_ckpt.testing.store import a_manifest, listing


def entry(**changes: Any) -> SidecarEntry:
    known: dict[str, Any] = {
        "path": "state/totals/00000/x.parquet",
        "kind": "full",
        "size_bytes": 3,
        "crc32c": 1,
        "sha256": "0" * 64,
    }
    return SidecarEntry(**known | changes)


def test_a_new_manifest_is_prepared_of_version_2_and_has_one_key_group() -> None:
    manifest = a_manifest(1)
    assert (manifest.version, manifest.durable_phase) == (2, "prepared")
    assert (manifest.key_group_count, manifest.participant_id) == (1, 0)
    assert manifest.boundary is manifest.watermark is None
    assert a_manifest(1, watermark=7).boundary == 7


def test_checkpoint_ids_are_uuids_of_version_7_that_ascend() -> None:
    before = time.time_ns() // 1_000_000
    ids = [new_checkpoint_id() for _ in range(10_000)]
    assert ids == sorted(set(ids))
    assert all(len(i) == 36 and i.count("-") == 4 for i in ids[:10])
    assert {uuid.UUID(i).version for i in ids} == {7}
    assert {uuid.UUID(i).variant for i in ids} == {uuid.RFC_4122}
    stamp = uuid7_millis(ids[0])
    assert stamp is not None
    assert before <= stamp <= before + 10_000
    assert uuid7_millis("x") is uuid7_millis(str(uuid.uuid4())) is None


def test_checkpoint_ids_of_many_threads_are_all_different() -> None:
    found: list[list[str]] = []

    def make() -> None:
        found.append([new_checkpoint_id() for _ in range(2000)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({i for ids in found for i in ids}) == 8000
    assert all(ids == sorted(ids) for ids in found)


@pytest.mark.parametrize(
    "changes",
    [
        {"id": 0},
        {"id": 2**64},
        {"id": "1"},
        {"id": True},
        {"epoch": 0},
        {"timestamp_ms": 0},
        {"checkpoint_id": "x"},
        {"checkpoint_id": "f81d4fae-7dec-41d0-a765-00a0c91e6bf6"},
        {"checkpoint_id": "019A0000-0001-7001-8000-000000000001"},
        {"watermark": 2**63},
        {"watermark": 1.0},
        {"key_group_count": 0},
        {"key_group_count": 65536},
        {"participant_id": -1},
        {"deployment_id": "x"},
        {"durable_phase": "pending"},
        {"version": 1},
        {"version": 4},
        {"total_size_bytes": 1},
        {"run": {"generation": 0, "run_id": "x"}},
        {"operators": {"": OperatorSnapshotEntry()}},
        {"unknown": 1},
    ],
    ids=str,
)
def test_a_field_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    good = dict(a_manifest(1))
    with pytest.raises(ValidationError):
        CheckpointManifest(**good | changes)


@pytest.mark.parametrize("run_id", ["", "-x", "a/b", "a b", "x" * 129, "ü"])
def test_a_run_id_is_plain(run_id: str) -> None:
    with pytest.raises(ValidationError):
        RunIdentity(generation=1, run_id=run_id)


def test_a_checkpoint_is_not_its_own_parent() -> None:
    own = new_checkpoint_id()
    with pytest.raises(ValidationError, match="its own parent"):
        a_manifest(1, checkpoint_id=own, parent_id=own)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "state",
        "state/",
        "state/a",
        "state/a/",
        "state//b",
        "state/../b",
        "state/./b",
        "state/a/..",
        "state/a/.hidden",
        "manifests/000000000001.json",
        "latest.json",
        "../state/a/b",
        "state/a\\b/c",
        "state/a/b\n",
        "state/a/\x00",
        "State/a/b",
        "state/a/" + "x" * 1024,
    ],
    ids=repr,
)
def test_a_sidecar_lies_below_state_and_nowhere_else(path: str) -> None:
    with pytest.raises(ValidationError, match="not a plain relative path"):
        entry(path=path)


@pytest.mark.parametrize("path", ["state/a/b", "state/a%2F/00000/-5-run-x.parquet", "state/ü/x.y"])
def test_a_plain_path_below_state_is_taken(path: str) -> None:
    assert entry(path=path).path == path


def test_a_sidecar_is_a_path_or_inline() -> None:
    inline = base64.b64encode(b"abc").decode()
    assert entry(path=None, inline=inline).inline_bytes() == b"abc"
    assert entry(path=None, inline="", size_bytes=0).inline_bytes() == b""
    for changes in (
        {"inline": inline},
        {"path": None},
        {"path": None, "inline": "YWJ"},
        {"path": None, "inline": "YWJj\n"},
        {"path": None, "inline": "YW-_", "size_bytes": 3},
        {"path": None, "inline": inline, "size_bytes": 4},
        {"path": None, "inline": "YWK=", "size_bytes": 2},
    ):
        with pytest.raises(ValidationError):
            entry(**changes)


def test_inline_state_is_bounded_apiece_and_in_all() -> None:
    def inline(size: int) -> SidecarEntry:
        text = base64.b64encode(b"x" * size).decode()
        return entry(path=None, inline=text, size_bytes=size)

    with pytest.raises(ValidationError, match="1048576 allowed"):
        inline(MAX_INLINE_BYTES + 1)
    most = [("a", g, inline(MAX_INLINE_BYTES)) for g in range(8)]
    full = a_manifest(1, key_group_count=9, operators=listing(most))
    assert len(full.to_json()) < 16 * 1024 * 1024
    with pytest.raises(ValidationError, match="8388608 allowed"):
        a_manifest(1, key_group_count=9, operators=listing([*most, ("a", 8, inline(1))]))


@pytest.mark.parametrize(
    ("sidecars", "match"),
    [
        ([], "at least 1"),
        ([entry(kind="delta")], "its base is gone"),
        (
            [entry(), entry(path="state/a/d", kind="delta"), entry(path="state/a/f")],
            "after a delta",
        ),
        ([entry(epoch=3), entry(path="state/a/d", kind="delta", epoch=2)], "by epoch"),
    ],
)
def test_a_key_group_is_a_base_and_the_deltas_after_it(
    sidecars: list[SidecarEntry], match: str
) -> None:
    with pytest.raises(ValidationError, match=match):
        PartitionSnapshotEntry(partition_id=0, sidecars=tuple(sidecars))


def test_a_base_may_have_pages_and_deltas() -> None:
    chain = (
        entry(epoch=1),
        entry(path="state/a/page-2", epoch=1),
        entry(path="state/a/d1", kind="delta", epoch=2),
        entry(path="state/a/d2", kind="delta", epoch=4),
    )
    partition = PartitionSnapshotEntry(partition_id=0, sidecars=chain)
    manifest = a_manifest(1, 4, operators={"a": OperatorSnapshotEntry(partitions=(partition,))})
    assert [e for _, _, e in manifest.sidecars()] == list(chain)
    assert manifest.operators["a"].total_bytes == manifest.total_size_bytes == 12


def test_key_groups_are_ascending_unique_and_in_range() -> None:
    def partition(id: int) -> PartitionSnapshotEntry:
        return PartitionSnapshotEntry(partition_id=id, sidecars=(entry(path=f"state/a/{id}/x"),))

    for ids in ((1, 0), (0, 0)):
        with pytest.raises(ValidationError, match="ascending and unique"):
            OperatorSnapshotEntry(partitions=tuple(partition(i) for i in ids))
    with pytest.raises(ValidationError, match="key group 4 of 4"):
        a_manifest(
            1, key_group_count=4, operators={"a": OperatorSnapshotEntry(partitions=(partition(4),))}
        )


def test_a_file_is_listed_once_and_by_no_younger_checkpoint() -> None:
    with pytest.raises(ValidationError, match="listed twice"):
        a_manifest(1, operators=listing([("a", 0, entry()), ("b", 0, entry())]))
    with pytest.raises(ValidationError, match="of epoch 2 in a checkpoint of epoch 1"):
        a_manifest(1, operators=listing([("a", 0, entry(epoch=2))]))


def test_sums_are_filled_in_and_compared() -> None:
    held = listing([("a", 0, entry(size_bytes=5))])["a"]
    assert held.total_bytes == 5
    with pytest.raises(ValidationError, match="the sidecars hold 5"):
        OperatorSnapshotEntry(partitions=held.partitions, total_bytes=6)


def test_sizes_that_overflow_are_refused() -> None:
    huge = [
        ("a", 0, entry(size_bytes=2**63)),
        ("b", 0, entry(path="state/b/x", size_bytes=2**63)),
    ]
    with pytest.raises(ValidationError, match="overflow 64 bits"):
        a_manifest(1, operators=listing(huge))


def test_a_manifest_over_16_mebibytes_is_not_written() -> None:
    offsets = {f"k{n}": "x" * 1000 for n in range(17_000)}
    source = SourceOffsetEntry(source_type="file", offsets=offsets, epoch=1)
    with pytest.raises(CheckpointTooLargeError, match="16777216 allowed"):
        a_manifest(1, source_offsets={"a": source}).to_json()


def test_the_phase_is_not_stored() -> None:
    manifest = a_manifest(1, finalized=True)
    stored = json.loads(manifest.to_json())
    assert stored["durable_phase"] == "prepared"
    assert manifest.to_json() == manifest.with_phase("prepared").to_json()


@pytest.mark.parametrize("missing", ["checkpoint_id", "epoch", "timestamp_ms", "id", "version"])
def test_a_manifest_without_a_required_field_is_refused(missing: str) -> None:
    stored = json.loads(a_manifest(1).to_json())
    del stored[missing]
    with pytest.raises(InvalidCheckpointError, match=missing):
        CheckpointManifest.from_json(json.dumps(stored).encode(), where="here")


def test_fields_that_may_be_missing_have_their_defaults() -> None:
    stored = {
        "version": 2,
        "id": 3,
        "epoch": 2,
        "timestamp_ms": 1,
        "checkpoint_id": new_checkpoint_id(),
    }
    manifest = CheckpointManifest.from_json(json.dumps(stored).encode(), where="here")
    assert (manifest.operators, manifest.parent_id, manifest.total_size_bytes) == ({}, None, 0)


def test_an_error_names_the_place_the_field_and_what_to_do() -> None:
    bad = a_manifest(1).to_json().replace(b'"epoch":1', b'"epoch":"secret-value"')
    with pytest.raises(InvalidCheckpointError) as caught:
        CheckpointManifest.from_json(bad, where="gs://bucket/manifests/x.json")
    text = str(caught.value)
    assert text.startswith("gs://bucket/manifests/x.json is invalid: epoch: ")
    assert "validate" in text
    assert "secret-value" not in text


names = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20)
segments = st.text("abcxyz0189%_-~ü", min_size=1, max_size=12)


@st.composite
def manifests(draw: st.DrawFn) -> CheckpointManifest:
    count = draw(st.integers(1, 50))
    epoch = draw(st.integers(1, 2**64 - 1))
    numbers = iter(range(10**6))

    def sidecar(kind: str) -> SidecarEntry:
        if draw(st.booleans()):
            data = draw(st.binary(max_size=20))
            place = {"inline": base64.b64encode(data).decode(), "path": None}
            size = len(data)
        else:
            place = {"path": f"state/{draw(segments)}/{next(numbers)}-{draw(segments)}"}
            size = draw(st.integers(0, 2**50))
        return entry(
            kind=kind,
            boundary=draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
            rows=draw(st.integers(0, 2**64 - 1)),
            size_bytes=size,
            crc32c=draw(st.integers(0, 2**32 - 1)),
            epoch=draw(st.sampled_from([None, epoch])),
            **place,
        )

    def chains() -> dict[int, list[SidecarEntry]]:
        """Of an operator: its own sidecars, and slices of files that its key groups share."""
        found = {
            group: [sidecar(kind) for kind in ["full", *(["delta"] * draw(st.integers(0, 2)))]]
            for group in sorted(draw(st.sets(st.integers(0, count - 1), max_size=3)))
        }
        for _ in range(draw(st.integers(0, 2)) if found else 0):
            parts = [
                (group, draw(st.integers(0, 3)), draw(st.integers(0, 2**40)))
                for group in draw(st.lists(st.sampled_from([*found]), min_size=1, max_size=4))
            ]
            size = draw(st.integers(0, 2**50))
            file = entry(
                kind="delta",
                path=f"state/{draw(segments)}/{next(numbers)}-{draw(segments)}",
                size_bytes=size,
                crc32c=draw(st.integers(0, 2**32 - 1)),
            )
            first, left = 0, size
            for group, gap, rows in parts:
                first += gap
                own = draw(st.integers(0, left))
                place = {"first_row": first, "rows": rows, "slice_bytes": own}
                found[group].append(
                    file.model_copy(
                        update={
                            **place,
                            "boundary": draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
                            "epoch": draw(st.sampled_from([None, epoch])),
                            "origin": draw(st.from_regex(r"[0-9a-f]{8}", fullmatch=True)),
                            "file_rows": sum(gap + rows for _, gap, rows in parts),
                        }
                    )
                )
                first, left = first + rows, left - own
        return found

    operators = {
        uid: OperatorSnapshotEntry(
            partitions=tuple(
                PartitionSnapshotEntry(partition_id=group, sidecars=tuple(sidecars))
                for group, sidecars in chains().items()
            )
        )
        for uid in draw(st.sets(names, max_size=3))
    }
    return a_manifest(
        draw(st.integers(1, 2**64 - 1)),
        epoch,
        operators=operators,
        key_group_count=count,
        watermark=draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
        participant_id=draw(st.integers(0, 2**64 - 1)),
        source_offsets=draw(
            st.dictionaries(
                names,
                st.builds(
                    SourceOffsetEntry,
                    source_type=names,
                    offsets=st.dictionaries(names, names, max_size=3),
                    epoch=st.integers(0, 2**64 - 1),
                ),
                max_size=2,
            )
        ),
    )


@given(manifests())
def test_every_manifest_comes_back_from_its_canonical_bytes(manifest: CheckpointManifest) -> None:
    stored = manifest.to_json()
    again = CheckpointManifest.from_json(stored, where="here")
    assert again == manifest
    assert again.to_json() == stored
    assert manifest.version == (3 if any(s.is_shared for _, _, s in again.sidecars()) else 2)
    shuffled = dict(reversed(list(dict(manifest).items())))
    assert CheckpointManifest(**shuffled).to_json() == stored
    assert json.loads(stored) == json.loads(json.dumps(json.loads(stored), sort_keys=True))


@given(manifests(), st.integers(0, 9))
def test_every_manifest_comes_back_from_gzip_of_any_level(
    manifest: CheckpointManifest, level: int
) -> None:
    packed = gzip.compress(manifest.to_json(), level)
    again = CheckpointManifest.from_bytes(packed, where="here")
    assert again == manifest
    assert CheckpointManifest.from_bytes(again.to_bytes(), where="here") == manifest


@pytest.mark.parametrize("more", [0, 1])
def test_a_manifest_of_more_than_4_kibibytes_is_stored_as_gzip(more: int) -> None:
    def padded(size: int) -> CheckpointManifest:
        offsets = {"at": "x" * size}
        source = SourceOffsetEntry(source_type="file", offsets=offsets, epoch=1)
        return a_manifest(1, source_offsets={"a": source})

    manifest = padded(4096 + more - len(padded(0).to_json()))
    text, stored = manifest.to_json(), manifest.to_bytes()
    assert len(text) == 4096 + more
    assert (stored == text) is (not more)
    if more:
        assert gzip.decompress(stored) == text
    assert CheckpointManifest.from_bytes(stored, where="here") == manifest


def test_what_gzip_does_not_make_smaller_is_stored_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("beam_ckpt.manifest.PACKED_ABOVE", 0)
    monkeypatch.setattr("beam_ckpt.manifest._GZIP_LEVEL", 0)
    manifest = a_manifest(1)
    assert manifest.to_bytes() == manifest.to_json()


def a_packed_manifest() -> tuple[CheckpointManifest, bytes]:
    inline = base64.b64encode(bytes(range(200))).decode()
    sidecar = entry(path=None, inline=inline, size_bytes=200)
    manifest = a_manifest(1, operators=listing([("a", 0, sidecar)]))
    return manifest, gzip.compress(manifest.to_json(), 9, mtime=0)


def test_gzip_cut_short_anywhere_is_a_typed_error() -> None:
    _, packed = a_packed_manifest()
    for end in range(len(packed)):
        with pytest.raises(InvalidCheckpointError, match=r"^here is invalid: "):
            CheckpointManifest.from_bytes(packed[:end], where="here")
        with pytest.raises(InvalidCheckpointError, match=r"^here is invalid: "):
            CheckpointManifest.from_bytes(packed[:end] + packed[end + 1 :], where="here")


def test_any_bit_of_gzip_flipped_is_a_typed_error_or_changes_nothing() -> None:
    """What its checksum does not cover are header and padding; the marker seals these as well."""
    manifest, packed = a_packed_manifest()
    harmless = set()
    for bit in range(len(packed) * 8):
        changed = bytearray(packed)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            found = CheckpointManifest.from_bytes(bytes(changed), where="here")
        except InvalidCheckpointError as e:
            assert str(e).startswith("here is invalid: ")
        else:
            assert found == manifest
            harmless.add(bit // 8)
    # Flags, time, level and system; and what fills up the last byte before the checksum.
    assert harmless <= {*range(3, 10), len(packed) - 9}


def test_gzip_is_unpacked_in_bounded_memory() -> None:
    """A quarter of a megabyte that would be 256."""
    gzip_of_zeros = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(gzip_of_zeros.compress(bytes(1 << 20)) for _ in range(256))
    bomb += gzip_of_zeros.flush()
    assert len(bomb) < 1 << 19
    tracemalloc.start()
    try:
        with pytest.raises(InvalidCheckpointError, match="more than the 16777216 bytes that are"):
            CheckpointManifest.from_bytes(bomb, where="here")
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_gzip_is_unpacked_up_to_16_mebibytes() -> None:
    manifest, _ = a_packed_manifest()
    full = manifest.to_json() + b" " * (MAX_MANIFEST_BYTES - len(manifest.to_json()))
    assert CheckpointManifest.from_bytes(gzip.compress(full), where="here") == manifest
    with pytest.raises(InvalidCheckpointError, match="more than the 16777216 bytes that are"):
        CheckpointManifest.from_bytes(gzip.compress(full + b" "), where="here")


def test_gzip_of_more_than_16_mebibytes_is_not_unpacked() -> None:
    _, packed = a_packed_manifest()
    long = packed + bytes(MAX_MANIFEST_BYTES + 1 - len(packed))
    with pytest.raises(InvalidCheckpointError, match="16777217 bytes, 16777216 allowed"):
        CheckpointManifest.from_bytes(long, where="here")


@given(st.binary(max_size=300), st.integers(0, 40))
def test_any_bytes_in_gzip_are_a_typed_error(data: bytes, cut: int) -> None:
    packed = gzip.compress(data)
    for hostile in (packed, packed[:cut] + data, packed + data):
        with pytest.raises(InvalidCheckpointError, match=r"^here "):
            CheckpointManifest.from_bytes(hostile, where="here")


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_any_bytes_are_a_manifest_or_a_typed_error(data: bytes) -> None:
    with pytest.raises(InvalidCheckpointError, match=r"^here "):
        CheckpointManifest.from_json(data, where="here")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@given(
    manifests(),
    st.sampled_from(sorted(CheckpointManifest.model_fields)),
    json_values,
)
def test_any_value_in_any_field_is_a_manifest_or_a_typed_error(
    manifest: CheckpointManifest, field: str, value: object
) -> None:
    stored = json.loads(manifest.to_json()) | {field: value}
    try:
        found = CheckpointManifest.from_json(json.dumps(stored).encode(), where="here")
    except InvalidCheckpointError as e:
        assert str(e).startswith("here is ")
    else:
        assert found.to_json()
