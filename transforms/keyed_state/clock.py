"""When things are due: epochs and the order of one key's events. Pure functions, no Beam.

All times are event time in integer microseconds. An epoch is half-open, ``[start, end)``; the cut
at its end holds exactly the elements and timers below it (the watermark is the barrier).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BEFORE_ALL", "DRAINED", "GATE", "MS", "NO_EXPIRY", "Epochs"]

MS = 1_000
#: Below every timestamp; Beam's MIN_TIMESTAMP is this, truncated to milliseconds.
BEFORE_ALL = -9_223_372_036_854_775_000
#: The earliest event time at which the last restored record is known to have been processed.
GATE = BEFORE_ALL + MS
#: The last millisecond at which the global window can fire, less room for the two stages behind.
#: (`GlobalWindow().max_timestamp()` is one day below MAX_TIMESTAMP.)
_GLOBAL_WINDOW_END = 9_223_371_950_454_774_000
DRAINED = _GLOBAL_WINDOW_END - 3 * MS
#: When the global window is over: later than anything.
NO_EXPIRY = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Epochs:
    """The boundaries of one run.

    Attributes:
        every: Interval in microseconds, or `None` for one checkpoint at the end.
        until: Last boundary of a bounded cut in microseconds, or `None` for none: the run drains.
    """

    every: int | None
    until: int | None

    @property
    def last(self) -> int:
        """The run's last boundary; `DRAINED` when the input is drained."""
        return DRAINED if self.until is None else self.until

    def start_of(self, ts: int) -> int:
        """Start of the epoch that holds `ts`; an element waits until the watermark reaches it."""
        return BEFORE_ALL if self.every is None else ts // self.every * self.every

    def end_of(self, ts: int) -> int:
        """End of the epoch that holds `ts`: the boundary of the next cut at or after it."""
        last = DRAINED if self.until is None else self.until
        if self.every is None:
            return last
        end = (ts // self.every + 1) * self.every
        return end if end < last else last

    def timer_due(self, fire: int) -> int | None:
        """When a timer set for `fire` is due in this run; `None`: not in this run.

        In a run that drains, a timer at the very end of the global window has to come before the
        last snapshot; in a run with `until`, what is at or after it belongs to the next run.
        """
        if self.until is not None:
            return fire if fire < self.until else None
        return fire if fire < DRAINED else DRAINED - MS
