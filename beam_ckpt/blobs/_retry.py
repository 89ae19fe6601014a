"""Retrying over a network: how long, how often, and what a failed attempt proves.

The budget is a length of time, not a number of tries; the pauses are drawn at random so that
workers that failed together do not come back together ("equal jitter" of Brooker, *Exponential
Backoff And Jitter*, AWS Architecture Blog, 2015).
"""

from __future__ import annotations

import logging
import random
import time

from beam_ckpt.errors import StoreUrlError

__all__ = ["Budget", "redact_url", "take_number"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 16.0


class Budget:
    """How long one logical operation may go on trying.

    Args:
        seconds: From now; the first attempt is always made, whatever the budget.
    """

    def __init__(self, seconds: float) -> None:
        """Starts the clock."""
        self.seconds = seconds
        self.attempts = 0
        self._deadline = time.monotonic() + seconds
        self._pauses = 0
        self._warned = False

    @property
    def left(self) -> float:
        """Seconds until the deadline; negative beyond it."""
        return self._deadline - time.monotonic()

    def pause(self, at_least: float = 0.0, *, why: str = "") -> bool:
        """Sleeps before another attempt; `False`, at once, when there is no time for one.

        Args:
            why: What is retried and what went wrong: logged, as a warning once it takes long.
            at_least: Seconds that the server asked for (`Retry-After`, or the write rate it
                allows an object); cut to the longest pause.
        """
        pause = min(_FIRST_PAUSE * 2.0**self._pauses, _LONGEST_PAUSE)
        pause = random.uniform(pause / 2, pause)
        if at_least > 0:
            pause = max(pause, random.uniform(1.0, 1.25) * min(at_least, _LONGEST_PAUSE))
        if pause >= self.left:
            return False
        loud = pause > 2.0 and not self._warned
        self._warned = self._warned or loud
        text = "%s; trying again, for up to %.0f s more"
        _log.log(logging.WARNING if loud else logging.DEBUG, text, why, self.left)
        self._pauses += 1
        time.sleep(pause)
        return True

    def progress(self) -> None:
        """Starts the clock anew: the other side has acknowledged a part of the work."""
        self._deadline = time.monotonic() + self.seconds
        self._pauses = 0


def redact_url(url: str) -> str:
    """Returns a URL without user info, query and fragment, for messages and lineage.

    Chained fsspec URLs (`zip://a::s3://b`) are redacted link by link.
    """

    def link(text: str) -> str:
        head, separator, rest = text.partition("://")
        if not separator:
            head, rest = "", text
        for mark in ("?", "#"):
            rest = rest.split(mark, 1)[0]
        authority, slash, path = rest.partition("/")
        return f"{head}{separator}{authority.rpartition('@')[2]}{slash}{path}"

    return "::".join(link(text) for text in url.split("::"))


def take_number(options: dict[str, object], name: str, default: float) -> float:
    """Takes a number of zero or more out of storage options; it may come as text.

    Raises:
        StoreUrlError: It is none.
    """
    value = options.pop(name, default)
    try:
        number = float(value) if isinstance(value, (int, float, str)) else -1.0
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise StoreUrlError(f"{name}={value!r} is not a number of zero or more")
    return number
