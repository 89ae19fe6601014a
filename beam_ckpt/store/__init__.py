"""Checkpoint stores: `open_store` and the contract they keep, `CheckpointStore`."""

from __future__ import annotations

from beam_ckpt.store._base import CheckpointArtifacts, CheckpointStore, StateChunk
from beam_ckpt.store._copy import CopyReport, copy
from beam_ckpt.store._open import (
    FileSystemCheckpointStore,
    MemoryCheckpointStore,
    ObjectStoreCheckpointStore,
    open_store,
)

__all__ = [
    "CheckpointArtifacts",
    "CheckpointStore",
    "CopyReport",
    "FileSystemCheckpointStore",
    "MemoryCheckpointStore",
    "ObjectStoreCheckpointStore",
    "StateChunk",
    "copy",
    "open_store",
]
