"""Durations as people write them."""

from __future__ import annotations

import re

__all__ = ["parse_duration"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_PART = r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhdw])"


def parse_duration(text: str) -> float:
    """Returns the seconds of a duration such as 90s, 30m, 12h, 7d, 2w or 1d12h.

    Raises:
        ValueError: It is none.

    Example:
        >>> parse_duration("1d12h")
        129600.0
    """
    if not re.fullmatch(f"(?:{_PART})+", text):
        raise ValueError(f"{text[:40]!r} is no duration: write 90s, 30m, 12h, 7d, 2w or 1d12h")
    return float(sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, text)))
