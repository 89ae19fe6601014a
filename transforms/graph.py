"""What stands around the checkpointed operators of a pipeline: looked at while it is built.

A checkpoint holds the state of its operators and of nothing else. A ``GroupByKey`` (a ``Combine``
is one) holds what its open windows have collected, so a cut through such a window loses it. And a
cut in event time says nothing about elements that have no event time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import apache_beam as beam
from apache_beam.io.iobase import SDFBoundedSourceReader
from apache_beam.pvalue import PCollection
from apache_beam.runners.common import DoFnSignature
from apache_beam.transforms.trigger import AccumulationMode, AfterCount, Always, Repeatedly
from apache_beam.transforms.userstate import is_stateful_dofn
from apache_beam.transforms.window import (
    FixedWindows,
    GlobalWindows,
    Sessions,
    SlidingWindows,
    TimestampedValue,
)

from beam_ckpt.errors import PipelineRefusedError
from beam_ckpt.transforms.keyed_state.clock import Epochs

__all__ = ["check_neighbours", "check_timestamps", "comes_in_one_go", "cut_window"]

_LOGGER = logging.getLogger(__name__)

IsOperator = Callable[[Any], bool]


def cut_window(windowing: Any, epochs: Epochs) -> tuple[str, str] | None:
    """Says which windows a cut would divide, and the way out; `None` where none is divided.

    Args:
        windowing: Of what is grouped.
        epochs: The run's boundaries.
    """
    windows = windowing.windowfn
    if epochs.every is None and epochs.until is None:
        return None  # One checkpoint at the drained end, when every window has closed.
    if windowing.accumulation_mode == AccumulationMode.DISCARDING and windowing.triggerfn in (
        Always(),
        Repeatedly(AfterCount(1)),
    ):
        return None  # It holds nothing, such as that of a Reshuffle.
    inside = "do this step in a checkpointed operator, whose state is saved"
    if isinstance(windows, FixedWindows):
        size, offset = windows.size.micros, windows.offset.micros
        every, until = epochs.every, epochs.until
        seconds = _seconds(size)
        if every is not None and (every % size or offset):
            way = f"make `every` a multiple of {seconds} s"
            if offset:
                way = "give the windows no offset (boundaries are multiples of `every`), " + way
            return f"fixed windows of {seconds} s", f"{way}, or {inside}"
        if until is not None and (until - offset) % size:
            return f"fixed windows of {seconds} s", f"let `until` be the end of one, or {inside}"
        return None
    if isinstance(windows, SlidingWindows):
        size, period = windows.size.micros, windows.period.micros
        if size == period:
            fixed = FixedWindows(size / 1_000_000, windows.offset.micros / 1_000_000)
            return cut_window(beam.transforms.core.Windowing(fixed), epochs)
        return f"sliding windows of {_seconds(size)} s every {_seconds(period)} s", inside
    if isinstance(windows, Sessions):
        return f"sessions with gaps of {_seconds(windows.gap_size.micros)} s", inside
    if isinstance(windows, GlobalWindows):
        return "the global window", f"window it, by the interval or a part of it, or {inside}"
    return None


def check_neighbours(
    inputs: Mapping[str, PCollection[Any]], is_operator: IsOperator, epochs: Epochs
) -> None:
    """Refuses a grouping between two operators whose windows a cut would divide.

    Warns of one before the first operator, and of other state between operators.

    Args:
        inputs: The input of each operator, by uid.
        is_operator: Whether a transform is a checkpointed operator.
        epochs: The run's boundaries.

    Raises:
        PipelineRefusedError: Names the grouping, its windows, the operators and the way out.
    """
    warned = set()
    for uid, pcoll in sorted(inputs.items()):
        for part in _producers(pcoll, is_operator):
            if part.full_label in warned or _enclosing(part, is_operator) is not None:
                continue
            if isinstance(part.transform, beam.GroupByKey):
                windows, way_out = cut_window(part.inputs[0].windowing, epochs) or ("", "")
                if windows:
                    warned.add(part.full_label)
                    _report_grouping(part, uid, windows, way_out, is_operator, epochs)
            elif _is_stateful(part.transform):
                before = _operator_before(part.inputs[0], is_operator)
                if before is not None:
                    warned.add(part.full_label)
                    _LOGGER.warning(
                        "between the operators %r and %r, %r keeps state that is in no checkpoint. "
                        "What to do: make it a checkpointed operator.",
                        before, uid, part.full_label,
                    )  # fmt: skip


def _report_grouping(
    part: Any, uid: str, windows: str, way_out: str, is_operator: IsOperator, epochs: Epochs
) -> None:
    before = _operator_before(part.inputs[0], is_operator)
    what = f"{part.full_label!r} groups in {windows}, which {_cuts(epochs)} divides"
    if before is not None:
        raise PipelineRefusedError(
            f"between the operators {before!r} and {uid!r}, {what}: what such a window holds at a "
            "cut is in no checkpoint, and the replay after a restore does not bring it back. What "
            f"to do: {way_out}."
        )
    _LOGGER.warning(
        "before operator %r, %s: after a restore, replay the source from the start of the windows "
        "that hold the boundary, not from the boundary itself. Or: %s.",
        uid, what, way_out,
    )  # fmt: skip


def _is_stateful(transform: Any) -> bool:
    fn = getattr(transform, "fn", None)
    return isinstance(fn, beam.DoFn) and bool(is_stateful_dofn(fn))


def check_timestamps(pcoll: PCollection[Any], uid: str, epochs: Epochs) -> None:
    """Refuses cuts in event time of data that is known to have none.

    Known is only what comes straight from a `beam.Create`: any DoFn may stamp its outputs. What
    cannot be known here stops the run when the first such element comes.

    Raises:
        PipelineRefusedError: Names the operator, the source and the way out.
    """
    if epochs.every is None and epochs.until is None:
        return
    for source in _sources(pcoll):
        values = getattr(source.transform, "values", None)
        if values and not any(isinstance(value, TimestampedValue) for value in values):
            raise PipelineRefusedError(
                f"operator {uid!r} reads {source.full_label!r}, whose elements have no event time, "
                f"and {_cuts(epochs)} cuts by event time. {NO_EVENT_TIME}."
            )


NO_EVENT_TIME = (
    "What to do: stamp the elements before the operator, as in beam.Map(lambda x: "
    "TimestampedValue(x, time_of(x))), or take one checkpoint at the drained end of the input, "
    "without `every` and `until`"
)


def comes_in_one_go(pcoll: PCollection[Any]) -> bool:
    """Whether nothing upstream, as far as the next grouping, comes back for more.

    Timers do, and splittable DoFns may, but for those that read a bounded source. A runner that
    fuses a stateful step with what is before it gives it all in the first bundle then.
    """
    seen: set[int] = set()
    waiting = [pcoll]
    while waiting:
        part = getattr(waiting.pop(), "producer", None)
        if part is None:
            return False
        if id(part) in seen or isinstance(part.transform, (beam.GroupByKey, beam.Impulse)):
            continue
        seen.add(id(part))
        if isinstance(part.transform, beam.ParDo):
            fn = part.transform.fn
            if _is_stateful(part.transform) or (
                DoFnSignature(fn).is_splittable_dofn()
                and _enclosing(part, lambda t: isinstance(t, SDFBoundedSourceReader)) is None
            ):
                return False
        elif not isinstance(part.transform, beam.Flatten):
            return False
        waiting += part.inputs
    return True


def _cuts(epochs: Epochs) -> str:
    if epochs.every is not None:
        return f"every={_seconds(epochs.every)}"
    return f"until={_seconds(epochs.until or 0)}"


def _seconds(micros: int) -> str:
    return f"{micros / 1_000_000:.15g}"


def _enclosing(part: Any, matches: IsOperator) -> Any:
    while part is not None and not matches(part.transform):
        part = part.parent
    return part


def _producers(pcoll: PCollection[Any], is_operator: IsOperator) -> Iterator[Any]:
    """The primitive transforms upstream, each once, as far as the next operators."""
    seen: set[int] = set()
    waiting = [pcoll]
    while waiting:
        part = getattr(waiting.pop(), "producer", None)
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if _enclosing(part, is_operator) is None:
            waiting += part.inputs
            waiting += [side.pvalue for side in part.side_inputs]


def _operator_before(pcoll: PCollection[Any], is_operator: IsOperator) -> str | None:
    for part in _producers(pcoll, is_operator):
        operator = _enclosing(part, is_operator)
        if operator is not None:
            return str(getattr(operator.transform, "uid", operator.full_label))
    return None


def _sources(pcoll: PCollection[Any]) -> Iterator[Any]:
    """The `Create`s that elements of a PCollection come from unchanged."""
    waiting = [pcoll]
    while waiting:
        part = getattr(waiting.pop(), "producer", None)
        create = _enclosing(part, lambda transform: isinstance(transform, beam.Create))
        if create is not None:
            yield create
        elif part is not None and isinstance(part.transform, beam.Flatten):
            waiting += part.inputs
