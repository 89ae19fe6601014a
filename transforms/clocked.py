"""The shape of every stage of ours that waits for the watermark: cells, and one clock.

Beam reads the parameters of a method from its defaults; a timer family must be named after its
owner (FnApiRunner keeps one timer buffer per family *name*), so ours are made per instance and
handed to Beam through its ``_inspect_<method>`` hook.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import apache_beam as beam
from apache_beam.transforms import userstate
from apache_beam.transforms.timeutil import TimeDomain

__all__ = ["ClockedDoFn"]


class ClockedDoFn(beam.DoFn):
    """A stateful DoFn with one event-time clock, whose callback is ``_on_clock``.

    ``process`` gets the element, what `declare` was told for it, then the cells in order and the
    clock, by position; ``_on_clock`` gets the same by name.
    """

    def declare(
        self,
        clock: str,
        cells: Mapping[str, userstate.StateSpec],
        *,
        arguments: Iterable[str] = (),
        process: Iterable[tuple[str, Any]] = (),
        on_clock: Iterable[tuple[str, Any]] = (),
        wall_clock: str | None = None,
        clock_only: Collection[str] = (),
    ) -> None:
        """Declares cells and clock.

        Args:
            clock: Name of the timer family, unique in a pipeline.
            cells: State cells by parameter name.
            clock_only: Those of them that ``process`` does not get: each cell that it gets costs
                the SDK a look-up per element.
            arguments: Parameters of ``process`` that the transform's arguments are given to,
                after the element.
            process: More parameters of ``process`` that Beam gives, before the cells.
            on_clock: Those of ``_on_clock`` (and of ``_on_wall_clock``, which gets the dynamic tag
                as ``tag`` besides).
            wall_clock: Name of a timer family in processing time, whose callback is
                ``_on_wall_clock``. (One such timer changes which runner `DirectRunner` takes.)
        """
        family = userstate.TimerSpec(clock, TimeDomain.WATERMARK)
        userstate.on_timer(family)(type(self)._on_clock)  # type: ignore[attr-defined]
        own: list[tuple[str, Any]] = [
            *((name, beam.DoFn.StateParam(spec)) for name, spec in cells.items()),
            ("clock", beam.DoFn.TimerParam(family)),
        ]
        if wall_clock is not None:
            wall_family = userstate.TimerSpec(wall_clock, TimeDomain.REAL_TIME)
            userstate.on_timer(wall_family)(type(self)._on_wall_clock)  # type: ignore[attr-defined]
            own.append(("wall_clock", beam.DoFn.TimerParam(wall_family)))
        given = [(name, value) for name, value in own if name not in clock_only]
        self._process_parameters = _split([*process, *given], before=["element", *arguments])
        self._clock_parameters = _split([*on_clock, *own])
        self._wall_clock_parameters: tuple[list[str], list[Any]] = ([], [])
        if wall_clock is not None:
            tag = ("tag", beam.DoFn.DynamicTimerTagParam)
            self._wall_clock_parameters = _split([tag, *on_clock, *own])

    def _inspect_process(self) -> tuple[list[str], list[Any]]:
        return self._process_parameters

    def _inspect__on_clock(self) -> tuple[list[str], list[Any]]:
        return self._clock_parameters

    def _inspect__on_wall_clock(self) -> tuple[list[str], list[Any]]:
        return self._wall_clock_parameters

    def default_type_hints(self) -> Any:
        # Not from the annotations of `process`: its parameters are not what they say.
        return None


def _split(
    parameters: list[tuple[str, Any]], before: Iterable[str] = ()
) -> tuple[list[str], list[Any]]:
    return [*before, *(name for name, _ in parameters)], [value for _, value in parameters]
