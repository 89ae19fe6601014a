"""What an author's DoFn asks for: read once while the pipeline is built, refused if it is wrong.

Beam reads the parameters of ``process`` and of every timer callback from their defaults; so does
this module, once. The result is plain data from which the wrapper binds the author's methods once
per worker, so that nothing is looked up per element.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import apache_beam as beam
from apache_beam import coders, pvalue
from apache_beam.transforms import core, userstate
from apache_beam.transforms.timeutil import TimeDomain

from beam_ckpt.errors import PipelineRefusedError

__all__ = [
    "AuthorCell",
    "Call",
    "SideInput",
    "Signature",
    "TimerDomain",
    "read_signature",
]

CellKind = Literal["read_modify_write", "combining", "bag", "set", "ordered_list"]
TimerDomain = Literal["event", "processing"]

_KINDS: Mapping[type[userstate.StateSpec], CellKind] = {
    userstate.ReadModifyWriteStateSpec: "read_modify_write",
    userstate.CombiningValueStateSpec: "combining",
    userstate.BagStateSpec: "bag",
    userstate.SetStateSpec: "set",
    userstate.OrderedListStateSpec: "ordered_list",
}
# Parameters that cannot be given, with what an author can do instead.
_REFUSED_PARAM_TYPES: Sequence[tuple[Any, str, str]] = (
    (beam.DoFn.RestrictionParam, "RestrictionParam", "a splittable DoFn cannot be stateful"),
    (beam.DoFn.WatermarkEstimatorParam, "WatermarkEstimatorParam", "see RestrictionParam"),
)


_CONTEXTS = (beam.DoFn.BundleContextParam, beam.DoFn.SetupContextParam)


class SideInput:
    """Stands for a side input in what goes to the workers, where its value comes from Beam."""


_SIDE_INPUT = (pvalue.AsSideInput, SideInput)


@dataclass(frozen=True)
class AuthorCell:
    """One of the author's state cells.

    Attributes:
        name: As the author gave it.
        kind: What it is.
        spec: As the author gave it.
        coder: Of what is saved: the value, the accumulator of a combining cell, an item of a bag
            or set, and (microseconds, value) of an ordered list.
        combine_fn: Of a combining cell, else `None`.
    """

    name: str
    kind: CellKind
    spec: userstate.StateSpec
    coder: Any
    combine_fn: Any = None

    @property
    def combiner(self) -> str:
        """Name of its combiner, as a manifest has it; empty where it has none."""
        fn = self.combine_fn
        if fn is None:
            return ""
        kind = type(fn)
        if kind.__module__.split(".")[0] != "apache_beam":
            return f"{kind.__module__}.{kind.__qualname__}"
        wrapped = getattr(fn, "_fn", None)
        called = getattr(wrapped, "__qualname__", None)
        if isinstance(fn, core.CallableWrapperCombineFn) and called is not None:
            return f"{kind.__qualname__}[{getattr(wrapped, '__module__', '')}.{called}]"
        return str(kind.__qualname__)


@dataclass(frozen=True)
class Call:
    """How one of the author's methods is called: parameter names by what they ask for.

    What is in `sides` (a side input by its place among them) and `finalizer` comes with an element
    and cannot be kept for later, so that an operator that asks for it must let no element wait.
    """

    method: str
    states: tuple[tuple[str, int], ...] = ()
    timers: tuple[tuple[str, int], ...] = ()
    element: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    timestamp: tuple[str, ...] = ()
    window: tuple[str, ...] = ()
    tag: tuple[str, ...] = ()
    pane: tuple[str, ...] = ()
    windowed: tuple[str, ...] = ()
    contexts: tuple[tuple[str, Any], ...] = ()
    static: tuple[tuple[str, Any], ...] = ()
    sides: tuple[tuple[str, int], ...] = ()
    finalizer: tuple[str, ...] = ()

    @property
    def comes_with_elements(self) -> str | None:
        """What it asks for that cannot be kept for an element that waits, in words; or `None`."""
        if self.sides:
            return "a side input"
        return "DoFn.BundleFinalizerParam" if self.finalizer else None


@dataclass(frozen=True)
class Signature:
    """All that the wrapper has to know of an author's DoFn. Cells and timers are sorted by name.

    Attributes:
        cells: Its state cells.
        timers: The names of its timer families.
        domains: What each of them waits for.
        process: How ``process`` is called.
        callbacks: How the callback of each timer family is called.
        side_inputs: Of ``process``, in the order of its `Call.sides`.
    """

    cells: tuple[AuthorCell, ...]
    timers: tuple[str, ...]
    domains: tuple[TimerDomain, ...]
    process: Call
    callbacks: tuple[Call, ...]
    side_inputs: tuple[pvalue.AsSideInput | SideInput, ...] = ()

    @property
    def packed(self) -> tuple[AuthorCell, ...]:
        """The cells of one value each, which the wrapper keeps in its control cell."""
        return tuple(c for c in self.cells if c.kind in ("read_modify_write", "combining"))


def read_signature(
    fn: beam.DoFn, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Signature:
    """Reads what `fn` asks for.

    Args:
        fn: The author's DoFn, unchanged.
        args: Positional arguments of the transform, for ``process`` only, as in `ParDo`: static
            ones and side inputs.
        kwargs: Keyword arguments, likewise.

    Raises:
        PipelineRefusedError: `fn` is not stateful, or asks for something that cannot be saved and
            restored exactly; the message names it and the way out.
    """
    name = type(fn).__name__
    if not isinstance(fn, beam.DoFn):
        _refuse(f"{fn!r} is not a DoFn", "CheckpointedParDo takes an instance of a beam.DoFn")
    _check_keyword_only(fn, "process", f"{name}.process")
    try:
        userstate.validate_stateful_dofn(fn)
        specs, timer_specs = userstate.get_dofn_specs(fn)
    except ValueError as error:
        _refuse(f"Beam refuses {name}: {error}", "correct the DoFn", cause=error)
    if not specs and not timer_specs:
        _refuse(
            f"{name} has no state and no timers, so there is nothing to save",
            "beam.ParDo is enough for it",
        )
    if type(fn).process_batch is not beam.DoFn.process_batch:
        _refuse(f"{name} has process_batch", "a stateful DoFn takes elements: use process")
    cells = tuple(_cell(name, spec) for spec in sorted(specs, key=lambda s: s.name))
    families = sorted(timer_specs, key=lambda t: t.name)
    cell_index = {cell.spec: i for i, cell in enumerate(cells)}
    timer_index = {timer: i for i, timer in enumerate(families)}
    process = _call(fn, "process", cell_index, timer_index, tuple(args), dict(kwargs or {}))
    callbacks = tuple(
        _call(fn, timer._attached_callback.__name__, cell_index, timer_index, None, {})
        for timer in families
        if timer._attached_callback is not None  # Beam has validated that there is one
    )
    domains: tuple[TimerDomain, ...] = tuple(
        "event" if timer.time_domain == TimeDomain.WATERMARK else "processing" for timer in families
    )
    names = tuple(_author_name(timer) for timer in families)
    sides = tuple(a for a in [*args, *(kwargs or {}).values()] if isinstance(a, _SIDE_INPUT))
    return Signature(cells, names, domains, process, callbacks, sides)


def _refuse(found: str, way_out: str, cause: BaseException | None = None) -> NoReturn:
    raise PipelineRefusedError(f"{found}. What to do: {way_out}.") from cause


def _author_name(timer: userstate.TimerSpec) -> str:
    # Beam prefixes the wire name.
    return str(timer.name).removeprefix(str(timer.prefix))


def _cell(dofn: str, spec: userstate.StateSpec) -> AuthorCell:
    kind = _KINDS.get(type(spec))
    if kind is None:
        supported = ", ".join(sorted(k.__name__ for k in _KINDS))
        _refuse(
            f"{dofn}: state cell {spec.name!r} is a {type(spec).__name__}, which this version "
            f"does not save (it saves {supported})",
            "keep the value in a ReadModifyWriteStateSpec or a BagStateSpec",
        )
    coder, combine_fn = spec.coder, getattr(spec, "combine_fn", None)
    if kind == "ordered_list":
        coder = coders.TupleCoder((coders.VarIntCoder(), coder))
    return AuthorCell(spec.name, kind, spec, coder, combine_fn)


def _call(
    fn: beam.DoFn,
    method: str,
    cells: Mapping[userstate.StateSpec, int],
    timers: Mapping[userstate.TimerSpec, int],
    args: tuple[Any, ...] | None,
    kwargs: dict[str, Any],
) -> Call:
    where = f"{type(fn).__name__}.{method}"
    _check_keyword_only(fn, method, where)
    names, defaults = core.get_function_arguments(fn, method)
    with_default = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    asked: dict[str, list[Any]] = {
        kind: []
        for kind in (
            "states", "timers", "element", "key", "timestamp", "window", "tag", "pane", "windowed",
            "contexts", "static", "sides", "finalizer",
        )
    }  # fmt: skip
    in_process = args is not None
    positional = [n for n in names if n not in with_default]
    if in_process and beam.DoFn.ElementParam not in defaults:
        if not positional:
            _refuse(f"{where} takes no element", "its first parameter is the (key, value) pair")
        positional = positional[1:]
    waiting = list(args or ())
    static = dict(kwargs)
    for name, param in with_default.items():
        if isinstance(param, core._StateDoFnParam):
            asked["states"].append((name, cells[param.state_spec]))
        elif isinstance(param, core._TimerDoFnParam):
            asked["timers"].append((name, timers[param.timer_spec]))
        elif param is beam.DoFn.ElementParam or param == beam.DoFn.ElementParam:
            asked["element"].append(name)
        elif param == beam.DoFn.KeyParam:
            asked["key"].append(name)
        elif param == beam.DoFn.TimestampParam:
            asked["timestamp"].append(name)
        elif param == beam.DoFn.WindowParam:
            asked["window"].append(name)
        elif param == beam.DoFn.DynamicTimerTagParam:
            asked["tag"].append(name)
        elif in_process and param == beam.DoFn.PaneInfoParam:
            asked["pane"].append(name)
        elif in_process and param == beam.DoFn.WindowedValueParam:
            asked["windowed"].append(name)
        elif in_process and isinstance(param, _CONTEXTS):
            asked["contexts"].append((name, param))
        elif in_process and param is beam.DoFn.BundleFinalizerParam:
            asked["finalizer"].append(name)
        elif in_process and param == beam.DoFn.SideInputParam:
            positional.append(name)
        else:
            _refuse_param(where, name, param)
            positional.append(name)
    given = [value for value in [*waiting, *static.values()] if isinstance(value, _SIDE_INPUT)]
    for name in positional:
        if waiting or name in static:
            value = waiting.pop(0) if waiting else static.pop(name)
            if isinstance(value, _SIDE_INPUT):
                asked["sides"].append((name, next(i for i, g in enumerate(given) if g is value)))
            else:
                asked["static"].append((name, value))
        elif name not in with_default or with_default[name] == beam.DoFn.SideInputParam:
            _refuse(
                f"{where} needs an argument {name!r} that nobody gives",
                "give it as an extra argument of CheckpointedParDo"
                if in_process
                else "a timer callback gets key, timestamp, window, state, timers and tag only",
            )
    if waiting or static:
        extra = ", ".join([*(repr(a) for a in waiting), *static])
        _refuse(f"{where} has no parameter for the extra arguments {extra}", "take them out")
    return Call(method, **{kind: tuple(found) for kind, found in asked.items()})


def _check_keyword_only(fn: beam.DoFn, method: str, where: str) -> None:
    for name, parameter in inspect.signature(getattr(fn, method)).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        if isinstance(parameter.default, core._DoFnParam) or parameter.default is parameter.empty:
            _refuse(
                f"{where} takes {name!r} by keyword only, which Beam does not fill in",
                "take the bare '*' out of its parameters",
            )


def _refuse_param(where: str, name: str, param: Any) -> None:
    for known, label, way_out in _REFUSED_PARAM_TYPES:
        if isinstance(param, known):
            _refuse(f"{where} asks for DoFn.{label} ({name!r}), which is not supported", way_out)
    if isinstance(param, core._DoFnParam):
        _refuse(f"{where} asks for {param!r} ({name!r}), which is not supported", "take it out")
