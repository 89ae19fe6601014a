"""How much is in memory, or in one element, at a time."""

from __future__ import annotations

from dataclasses import dataclass

from beam_ckpt.sidecar import ROW_GROUP_BYTES, ROW_GROUP_ROWS
from beam_ckpt.transforms.chunks import CHUNK_BYTES

__all__ = ["DEFAULT_LIMITS", "Limits"]


@dataclass(frozen=True)
class Limits:
    """Sizes that bound memory; no result depends on them.

    Attributes:
        chunk_bytes: Records of more bytes travel between stages in chunks.
        run_bytes: Records that are sorted at a time, if they are more than one.
        page_rows: Rows of a page, which is a row group of a file.
        page_bytes: Bytes of its rows in memory, if they are more than one.
        file_bytes: Bytes in memory of the rows of a file, if it has more than one page. What is
            over goes into another file of the same base or delta.
    """

    chunk_bytes: int = CHUNK_BYTES
    run_bytes: int = 32 * 1024 * 1024
    page_rows: int = ROW_GROUP_ROWS
    page_bytes: int = ROW_GROUP_BYTES
    file_bytes: int = 64 * 1024 * 1024


DEFAULT_LIMITS = Limits()
