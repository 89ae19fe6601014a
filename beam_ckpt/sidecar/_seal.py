"""The seal of a sidecar: no damage goes unnoticed.

Parquet's own checksums cover its pages, not the footer, which says where the pages are and what
they mean. So between the last page and the footer, where readers of Parquet never look, stands a
seal of 13 bytes: ``BCKP``, the version of the seal (1), and the xxh3-64 of every other byte of the
file. Page checksums are there as well, for readers of a part of the file and for other tools.
"""

from __future__ import annotations

from typing import NoReturn

import xxhash

from beam_ckpt.errors import InvalidCheckpointError

__all__ = ["check_seal", "not_a_sidecar", "sealed"]

_MAGIC = b"PAR1"
_SEAL = b"BCKP\x01"
_SEAL_SIZE = len(_SEAL) + 8
_TAIL_SIZE = 4 + len(_MAGIC)


def sealed(file: memoryview) -> bytes:
    """Returns a Parquet file with its seal."""
    footer_size = int.from_bytes(file[-_TAIL_SIZE:-4], "little") + _TAIL_SIZE
    pages, footer = file[:-footer_size], file[-footer_size:]
    digest = xxhash.xxh3_64(pages)
    digest.update(footer)
    return b"".join((pages, _SEAL, digest.digest(), footer))


def check_seal(data: bytes, where: str) -> None:
    """Checks that every byte of a sidecar is the one that was written.

    Raises:
        InvalidCheckpointError: It is not.
    """
    size = len(data)
    if size < len(_MAGIC) + _SEAL_SIZE + _TAIL_SIZE or not (
        data.startswith(_MAGIC) and data.endswith(_MAGIC)
    ):
        not_a_sidecar(where, f"its {size} bytes do not begin and end as Parquet does")
    footer_at = size - _TAIL_SIZE - int.from_bytes(data[-_TAIL_SIZE:-4], "little")
    seal_at = footer_at - _SEAL_SIZE
    if seal_at < len(_MAGIC) or data[seal_at : seal_at + len(_SEAL)] != _SEAL:
        not_a_sidecar(where, "there is no seal of this library before its footer")
    view = memoryview(data)
    digest = xxhash.xxh3_64(view[:seal_at])
    digest.update(view[footer_at:])
    there, found = data[seal_at + len(_SEAL) : footer_at], digest.digest()
    if there != found:
        not_a_sidecar(where, f"its xxh3-64 is {found.hex()}, it was sealed as {there.hex()}")


def not_a_sidecar(where: str, why: object) -> NoReturn:
    """Raises `InvalidCheckpointError` for what cannot be read."""
    cause = why if isinstance(why, Exception) else None
    raise InvalidCheckpointError(
        f"{where} cannot be read as a sidecar: {why}. It was damaged, cut short or not written by "
        "this library; restore from an older checkpoint."
    ) from cause
