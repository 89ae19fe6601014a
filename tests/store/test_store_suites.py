"""The shipped conformance suite on the stores of this library."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from beam_ckpt.store import (
    FileSystemCheckpointStore,
    MemoryCheckpointStore,
    ObjectStoreCheckpointStore,
)
from beam_ckpt.testing.gcs import GcsBucket
from beam_ckpt.testing.store import BlobStoreSuite, Opener


class TestFileSystemStore(BlobStoreSuite):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener[FileSystemCheckpointStore]:
        return lambda at="", **options: FileSystemCheckpointStore(tmp_path / "root" / at, **options)


class TestMemoryStore(BlobStoreSuite):
    @pytest.fixture
    def opener(self) -> Opener[MemoryCheckpointStore]:
        name = uuid.uuid4().hex
        return lambda at="", **options: MemoryCheckpointStore(f"{name}-{at}", **options)


class TestObjectStore(BlobStoreSuite):
    """Through gcsfs, on a real fake-gcs-server."""

    @pytest.fixture
    def opener(self, gcs_bucket: GcsBucket) -> Opener[ObjectStoreCheckpointStore]:
        return lambda at="", **options: ObjectStoreCheckpointStore(
            f"{gcs_bucket.url}/root/{at}", **options, **gcs_bucket.options
        )
