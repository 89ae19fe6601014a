"""Portable, exact checkpoints for Apache Beam pipelines.

This package knows checkpoints and knows no Beam: it opens stores, reads manifests, validates
and maintains them. What builds pipelines is `beam_ckpt.transforms`.

Example:
    >>> import beam_ckpt
    >>> beam_ckpt.open_store("memory://docs").list_ids()
    []
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from beam_ckpt.errors import CheckpointError as CheckpointError
    from beam_ckpt.maintenance import rewrite as rewrite
    from beam_ckpt.recovery import RecoveryReport as RecoveryReport
    from beam_ckpt.recovery import ValidationResult as ValidationResult
    from beam_ckpt.retention import KeepFor as KeepFor
    from beam_ckpt.retention import KeepLast as KeepLast
    from beam_ckpt.store import CheckpointStore as CheckpointStore
    from beam_ckpt.store import FileSystemCheckpointStore as FileSystemCheckpointStore
    from beam_ckpt.store import ObjectStoreCheckpointStore as ObjectStoreCheckpointStore
    from beam_ckpt.store import open_store as open_store

# Loaded when first used: `import beam_ckpt` itself stays cheap.
_HOME = {
    "CheckpointError": "errors",
    "CheckpointStore": "store",
    "FileSystemCheckpointStore": "store",
    "KeepFor": "retention",
    "KeepLast": "retention",
    "ObjectStoreCheckpointStore": "store",
    "RecoveryReport": "recovery",
    "ValidationResult": "recovery",
    "open_store": "store",
    "rewrite": "maintenance",
}

__all__ = [
    "CheckpointError",
    "CheckpointStore",
    "FileSystemCheckpointStore",
    "KeepFor",
    "KeepLast",
    "ObjectStoreCheckpointStore",
    "RecoveryReport",
    "ValidationResult",
    "open_store",
    "rewrite",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
