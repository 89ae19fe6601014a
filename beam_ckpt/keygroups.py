"""Key bytes → key group: the unit in which keyed state is stored, moved and restored.

The idea is Flink's key groups; the hash is xxh3, which LaminarDB uses for the same purpose.
The mapping is part of the format: a file written under a group must be found there by every
later version of this library.
"""

from __future__ import annotations

import xxhash

__all__ = ["MAX_KEY_GROUPS", "check_key_group_count", "key_group"]

MAX_KEY_GROUPS = 65535


def check_key_group_count(count: int) -> int:
    """Returns `count` when it is an integer in 1..65535.

    Raises:
        ValueError: It is not.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_KEY_GROUPS:
        raise ValueError(
            f"key-group count {count!r} is outside 1..{MAX_KEY_GROUPS}: pick a number well above "
            "the parallelism you will ever need, such as 128"
        )
    return count


def key_group(encoded_key: bytes, count: int) -> int:
    """Returns the group in `0..count-1` of a key.

    Args:
        encoded_key: The key, encoded with its (deterministic) coder.
        count: The number of key groups, constant for a run.
    """
    return xxhash.xxh3_64_intdigest(encoded_key) % count
