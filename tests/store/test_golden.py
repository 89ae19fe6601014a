"""Stores of every format version that was ever released still load, byte for byte.

A directory below `golden/` is never changed once its version is released; a new version adds one,
and so does another way to store the same version: in `v3-gzip` a manifest is over 4 KiB.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from beam_ckpt import open_store
from beam_ckpt.manifest import (
    FORMAT_VERSION,
    AbandonedMarker,
    CheckpointManifest,
    FinalMarker,
    Namespace,
    Pointer,
    RunClaim,
    Tag,
    parse_record,
    unpacked,
)
from beam_ckpt.retention import KeepLast
from beam_ckpt.testing.store import commit

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(p.name for p in GOLDEN.iterdir())


@pytest.fixture(params=VERSIONS)
def version_of(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tree(version_of: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / version_of, tmp_path / "root"))


def test_there_is_a_golden_store_of_the_version_that_is_written() -> None:
    assert f"v{FORMAT_VERSION}" in VERSIONS


def test_a_golden_store_loads_validates_and_restores(tree: Path, version_of: str) -> None:
    store = open_store(tree)
    assert store.deployment_id == "019a0000-0001-7001-8000-000000000001"
    assert store.list() == [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4)]
    assert all(store.validate_checkpoint(id).valid for id in range(1, 6))
    latest = store.load_latest()
    assert latest is not None
    assert (latest.id, latest.epoch, latest.boundary) == (4, 3, None)
    assert latest.run is not None
    assert (latest.run.generation, latest.run.run_id) == (2, "second-run")
    assert latest.pipeline is not None
    assert latest.pipeline.operators["totals"].cells["seen"].kind == "bag"
    assert store.tags() == {"before migration": 1}
    assert store.next_id() == 8
    chunks = list(store.load_state_data(4) or ())
    own = [c for c in chunks if c.first_row is None]
    assert [(c.operator, c.key_group, c.kind, c.data) for c in own] == [
        ("a/ü", 3, "full", b""),
        ("totals", 0, "full", b"golden base\n"),
        ("totals", 0, "delta", b"golden delta\n"),
        ("totals", 2, "full", b"golden inline"),
    ]
    slices = [(c.key_group, c.first_row, c.rows, c.data) for c in chunks if c not in own]
    shared = [(0, 0, 2, b"golden shared\n"), (2, 2, 1, b"golden shared\n")]
    assert slices == (shared if latest.version > 2 else [])
    appended = {e.appended_bytes for _, _, e in latest.sidecars()}
    assert appended == ({0, 5} if latest.version > 2 else {0})
    assert latest.version == int(version_of[1:].removesuffix("-gzip"))
    packed = (tree / "manifests/000000000004.json").read_bytes().startswith(b"\x1f\x8b")
    assert packed is version_of.endswith("-gzip")
    if packed:
        assert latest.source_offsets["clicks"].offsets["clicks-255"] == "2020345"
    report = store.recover_latest_validated()
    assert report.chosen_id == 4
    assert [(s.id, s.phase) for s in report.skipped] == [(5, "prepared")]
    second = store.load_by_id(2)
    assert second is not None
    assert second.source_offsets["events"].offsets == {"events-0": "1234", "group_id": "g"}


def test_a_golden_store_can_be_gone_on_with(tree: Path) -> None:
    store = open_store(tree)
    assert store.claim_generation("third-run", restored_from=4) == 3
    commit(store, store.next_id(), key_group_count=4)
    assert store.prune(KeepLast(1)).kept == (1, 4, 8)
    store.gc(grace_s=0)
    assert store.validate_checkpoint(1).valid
    assert store.validate_checkpoint(8).valid


RECORDS = {
    "namespace.json": Namespace,
    "latest.json": Pointer,
    "runs/00000002.json": RunClaim,
    "tags/before%20migration.json": Tag,
    "manifests/000000000004.final": FinalMarker,
    "manifests/000000000003.final": AbandonedMarker,
    "manifests/000000000004.json": CheckpointManifest,
    "manifests/000000000002.json": CheckpointManifest,
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", RECORDS)
def test_what_is_written_is_written_as_it_was(name: str, version: str) -> None:
    """Of version 2 still, where nothing of version 3 is in it; gzip may be another zlib's."""
    stored = unpacked((GOLDEN / version / name).read_bytes(), where=name)
    record = parse_record(RECORDS[name], stored, where=name, limit=1 << 24)
    assert record.to_json() == stored
