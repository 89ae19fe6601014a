"""How much is in memory, or in one element, at a time."""

from __future__ import annotations

from dataclasses import dataclass

from beam_ckpt.transforms.chunks import CHUNK_BYTES

__all__ = ["DEFAULT_LIMITS", "Limits"]


@dataclass(frozen=True)
class Limits:
    """Sizes that bound memory; no result depends on them.

    Attributes:
        chunk_bytes: Records of more bytes travel between stages in chunks.
    """

    chunk_bytes: int = CHUNK_BYTES


DEFAULT_LIMITS = Limits()
