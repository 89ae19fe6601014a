"""The shipped conformance suite on the stores of this library."""

from __future__ import annotations

import gzip
import uuid
from pathlib import Path

import pytest

from beam_ckpt.store import (
    FileSystemCheckpointStore,
    MemoryCheckpointStore,
    ObjectStoreCheckpointStore,
)
from beam_ckpt.testing.gcs import GcsBucket
from beam_ckpt.testing.store import BlobStoreSuite, Opener, commit


class TestFileSystemStore(BlobStoreSuite):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener[FileSystemCheckpointStore]:
        return lambda at="", **options: FileSystemCheckpointStore(tmp_path / "root" / at, **options)


class TestMemoryStore(BlobStoreSuite):
    @pytest.fixture
    def opener(self) -> Opener[MemoryCheckpointStore]:
        name = uuid.uuid4().hex
        return lambda at="", **options: MemoryCheckpointStore(f"{name}-{at}", **options)


class TestStoreOfPackedManifests(TestMemoryStore):
    """Every manifest is gzip, however small."""

    @pytest.fixture(autouse=True)
    def pack_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("beam_ckpt.manifest.PACKED_ABOVE", 0)

    def test_small_ones_are_gzip(self, store: MemoryCheckpointStore) -> None:
        commit(store, 1)
        assert gzip.decompress(store.blobs.get("manifests/000000000001.json")[0])


class TestObjectStore(BlobStoreSuite):
    """Through gcsfs, on a real fake-gcs-server."""

    @pytest.fixture
    def opener(self, gcs_bucket: GcsBucket) -> Opener[ObjectStoreCheckpointStore]:
        return lambda at="", **options: ObjectStoreCheckpointStore(
            f"{gcs_bucket.url}/root/{at}", **options, **gcs_bucket.options
        )
