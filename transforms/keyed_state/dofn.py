"""The wrapper: what Beam sees of an author's stateful DoFn that runs with exact cuts.

Beam inspects every method of a DoFn, again and again, so this class has few; the work is done by
`~beam_ckpt.transforms.keyed_state.operator.KeyedOperator`.

State is read at the first touch of a key in a bundle and written back in ``finish_bundle``: the
SDK commits state and timers after it, on every runner.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import apache_beam as beam
from apache_beam import pvalue
from apache_beam.coders import coders
from apache_beam.transforms import userstate

from beam_ckpt.transforms.clocked import ClockedDoFn
from beam_ckpt.transforms.keyed_state.key import BufferCoder
from beam_ckpt.transforms.keyed_state.operator import (
    KeyedOperator,
    OperatorConfig,
    needs_buffer,
    saves_again,
)
from beam_ckpt.transforms.signature import SideInput, Signature, read_signature

__all__ = ["StatefulWrapper", "wrap"]


class StatefulWrapper(ClockedDoFn):
    """Runs the author's DoFn with exact cuts."""

    def __init__(
        self,
        fn: beam.DoFn,
        config: OperatorConfig,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._fn, self._config = fn, config
        self._args = tuple(_sent(value) for value in args)
        self._kwargs = {name: _sent(value) for name, value in (kwargs or {}).items()}
        signature = read_signature(fn, self._args, self._kwargs)
        _declare(self, signature, config)
        self._operator = KeyedOperator(fn, signature, config)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._fn, self._config, self._args, self._kwargs)

    def default_type_hints(self) -> Any:
        # The author's input hints are checked on the live branch; the input here may be a union.
        return self._fn.get_type_hints()._replace(input_types=None)

    def infer_output_type(self, input_type: Any) -> Any:
        return self._fn.infer_output_type(input_type)

    def setup(self) -> Any:
        self._operator.setup()
        return self._fn.setup()

    def start_bundle(self) -> Any:
        self._operator.start_bundle()
        return self._fn.start_bundle()

    def finish_bundle(self) -> Any:
        # The author's first, and to the end: what was entered for the bundle is left by `flush`.
        outputs = [*(self._fn.finish_bundle() or ()), *self._operator.drained()]
        self._operator.flush()
        return outputs

    def teardown(self) -> Any:
        self._fn.teardown()
        self._operator.teardown()

    def process(self, element: Any, windowed: Any, *runners: Any) -> Iterable[Any]:
        return self._operator.process(element, windowed, runners)

    def _on_clock(self, key: Any, timestamp: Any, window: Any, **runners: Any) -> Iterable[Any]:
        return self._operator.on_clock(key, timestamp.micros, window, tuple(runners.values()))

    def _on_wall_clock(
        self, tag: Any, key: Any, timestamp: Any, window: Any, **runners: Any
    ) -> Iterable[Any]:
        return self._operator.on_wall_clock(
            tag, key, timestamp.micros, window, tuple(runners.values())
        )


class WithSides(StatefulWrapper):
    """A wrapper whose ``process`` is given more, which cannot be kept: side inputs, a finalizer."""

    def process(self, element: Any, *given: Any) -> Iterable[Any]:
        operator = self._operator
        sides = operator.sides_of_element
        operator.sides = given[:sides]
        windowed, runners = given[sides], given[sides + 1 :]
        restored = operator.restore_at_touch(element, windowed, runners)
        outputs = operator.process(element, windowed, runners)
        return chain(restored, outputs) if restored else outputs


def wrap(
    fn: beam.DoFn,
    config: OperatorConfig,
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> StatefulWrapper:
    """Returns the wrapper for what an author's ``process`` asks for."""
    wrapper = WithSides if signature.process.comes_with_elements else StatefulWrapper
    return wrapper(fn, config, args, kwargs)


def _sent(value: Any) -> Any:
    return SideInput() if isinstance(value, pvalue.AsSideInput) else value


def _declare(dofn: StatefulWrapper, signature: Signature, config: OperatorConfig) -> None:
    """Declares the cells: one for control and small values, the buffer, bags (two each) and sets.

    Every declared cell costs a lookup per element in the SDK, so there are as few as possible.
    """
    cells: dict[str, userstate.StateSpec] = {
        "control": userstate.BagStateSpec("ckpt_control", coders.BytesCoder())
    }
    for i, cell in enumerate(signature.cells):
        if cell.kind == "ordered_list":  # BundleBasedDirectRunner has none, and no cache has them
            cells[f"cell{i}"] = userstate.BagStateSpec(cell.name, cell.coder)
        elif cell.kind in ("bag", "set"):
            cells[f"cell{i}"] = cell.spec
    recent = {  # what was added to a bag since the key's last record
        f"recent{i}": userstate.BagStateSpec(f"ckpt_recent_{cell.name}", cell.coder)
        for i, cell in enumerate(signature.cells)
        if cell.kind == "bag"
    }
    cells |= recent
    cells["buffer"] = userstate.BagStateSpec("ckpt_buffer", BufferCoder(config.value_coder))
    clock_only = [] if saves_again(config) else list(recent)
    if not needs_buffer(signature, config):
        clock_only.append("buffer")
    given: list[tuple[str, Any]] = [("windowed", beam.DoFn.WindowedValueParam)]
    if signature.process.finalizer:
        given.insert(0, ("finalizer", beam.DoFn.BundleFinalizerParam))
    dofn.declare(
        f"ckpt_clock_{config.uid}",
        cells,
        arguments=[f"side{i}" for i in range(len(signature.side_inputs))],
        process=given,
        on_clock=[
            ("key", beam.DoFn.KeyParam),
            ("timestamp", beam.DoFn.TimestampParam),
            ("window", beam.DoFn.WindowParam),
        ],
        wall_clock=f"ckpt_wall_{config.uid}" if "processing" in signature.domains else None,
        clock_only=clock_only,
    )
