"""Records that are too large for one element, in pieces on their way between stages.

A runner bounds the size of an element (Dataflow at 16 MB or less), and a record holds all of a
key's state. One that is larger than a limit travels in chunks, each an element of its own, and is
put together where it is used. A chunk is a zero byte, which begins no record, the xxh3-128 of the
whole record, which number this chunk is and of how many (four bytes each), and its part of the
record. Chunks may come in any order, and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

from beam_ckpt.errors import InvalidCheckpointError

__all__ = ["CHUNK_BYTES", "Chunks", "chunk_name", "cut", "is_chunk"]

CHUNK_BYTES = 4 * 1024 * 1024
"""Records of more bytes are cut."""

_MARK = b"\x00"
_ID_END = 17
_HEAD_BYTES = 25


def cut(record: bytes, limit: int) -> Iterable[bytes]:
    """Returns a record as it is, or in chunks with at most `limit` bytes of it each."""
    if len(record) <= limit:
        return (record,)
    count = -(-len(record) // limit)
    head = _MARK + xxhash.xxh3_128(record).digest()
    view = memoryview(record)
    return (
        b"".join((head, i.to_bytes(4), count.to_bytes(4), view[i * limit : (i + 1) * limit]))
        for i in range(count)
    )


def is_chunk(data: bytes) -> bool:
    """Tells a chunk from a whole record."""
    return data.startswith(_MARK)


def chunk_name(chunk: bytes) -> bytes:
    """What a chunk is of, and which one."""
    return chunk[:_HEAD_BYTES]


class Chunks:
    """Puts records together."""

    def __init__(self) -> None:
        self._parts: dict[bytes, dict[bytes, bytes]] = {}

    def add(self, chunk: bytes) -> bytes | None:
        """Takes a chunk; returns the record when it is the last one that was missing.

        Raises:
            InvalidCheckpointError: What the chunks make is not the record that was cut.
        """
        record_id, number, count = chunk[1:_ID_END], chunk[_ID_END:21], chunk[21:_HEAD_BYTES]
        parts = self._parts.setdefault(record_id, {})
        parts[number] = chunk
        if len(parts) < int.from_bytes(count):
            return None
        del self._parts[record_id]
        record = b"".join(memoryview(parts[number])[_HEAD_BYTES:] for number in sorted(parts))
        if xxhash.xxh3_128(record).digest() != record_id:
            raise InvalidCheckpointError(
                f"{len(parts)} chunks make a record of {len(record)} bytes that is not the one "
                "that was cut: the runner has changed an element. What to do: start again from "
                "the last checkpoint."
            )
        return record

    def __iter__(self) -> Iterator[bytes]:
        """The chunks of records of which some are missing."""
        for parts in self._parts.values():
            yield from parts.values()

    def __len__(self) -> int:
        return sum(map(len, self._parts.values()))
