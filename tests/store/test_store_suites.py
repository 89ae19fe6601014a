"""The shipped conformance suite on the stores of this library."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from beam_ckpt.store import FileSystemCheckpointStore, MemoryCheckpointStore
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
