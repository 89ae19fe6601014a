"""Cut equivalence: run an author's DoFn on a real runner, stop it, go on, and compare.

`run_checkpointed` runs one pipeline and gives its outputs; `saved_state` reads back what its
checkpoint holds, in the terms of the oracle (`beam_ckpt.testing.event_loop`). A history is exact
when the outputs of its runs together are those of the loop, and the state of each checkpoint is
the loop's state at that cut.

Outputs are collected in this process, so a runner has to run its workers in it: FnApiRunner,
BundleBasedDirectRunner, and PrismRunner, of which `beam_ckpt.testing.prism` finds the binary.
"""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import apache_beam as beam
from apache_beam.coders.typecoders import registry
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.window import (
    BoundedWindow,
    GlobalWindows,
    TimestampedValue,
    WindowFn,
)
from apache_beam.typehints.native_type_compatibility import convert_to_beam_type
from apache_beam.utils.timestamp import Duration, Timestamp

from beam_ckpt.sidecar import SharedRows, read_chain
from beam_ckpt.store import CheckpointStore
from beam_ckpt.testing.event_loop import KeyedCells, Output
from beam_ckpt.testing.prism import prism_options
from beam_ckpt.testing.replay import ReadReplay, ReplayLog
from beam_ckpt.testing.streams import Element, StreamPlan
from beam_ckpt.transforms import CheckpointedParDo
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.signature import Signature, read_signature
from beam_ckpt.transforms.snapshot import SnapshotRecord
from beam_ckpt.transforms.windows import is_over, left_over

__all__ = ["Run", "run_checkpointed", "run_plain", "saved_state"]

Source = Sequence[Element] | StreamPlan | ReplayLog

_COLLECTED: dict[str, list[Any]] = {}


@dataclass
class Run:
    """What one pipeline gave.

    Attributes:
        outputs: In the order in which they arrived.
        metrics: Counters of `beam_ckpt` by name.
    """

    outputs: list[Output]
    metrics: dict[str, int] = field(default_factory=dict)


class _CollectFn(beam.DoFn):
    def __init__(self, collection: str, tag: str | None) -> None:
        self._collection, self._tag = collection, tag

    def process(
        self,
        element: Any,
        timestamp: Any = beam.DoFn.TimestampParam,
        window: Any = beam.DoFn.WindowParam,
    ) -> None:
        output = Output(self._tag, element, timestamp.micros, window)
        _COLLECTED[self._collection].append(output)


def _stamp(element: Element) -> TimestampedValue[Any]:
    timestamp, key, value = element
    return TimestampedValue((key, value), Timestamp(micros=timestamp))


def run_checkpointed(
    fn: beam.DoFn,
    source: Source,
    *,
    runner: str,
    store: CheckpointStore,
    uid: str = "subject",
    tags: Sequence[str] = (),
    input_type: Any = tuple[str, int],
    options: Sequence[str] = (),
    window_fn: Any = None,
    lateness: int = 0,
    **settings: Any,
) -> Run:
    """Runs `fn` in a `CheckpointedParDo` over `source` and waits for the end.

    Args:
        fn: The author's DoFn.
        source: Elements in any order, for a batch; a plan, for a `TestStream`; or a log of (key,
            value), for an unbounded source that reads it from its beginning.
        runner: Name of the runner.
        store: Where checkpoints go to and come from.
        uid: Of the operator.
        tags: Tagged outputs to collect beside the main one.
        input_type: Type hint of the input.
        options: More pipeline options, as on a command line.
        window_fn: Windows of the input; the global one by default.
        lateness: Allowed lateness of the windows, microseconds.
        **settings: Of `CheckpointedParDo`.
    """
    transform = CheckpointedParDo(fn, uid=uid, store=store, **settings)
    return _run(transform, source, runner, tags, input_type, options, window_fn, lateness)


def run_plain(
    fn: beam.DoFn,
    source: Source,
    *,
    runner: str,
    tags: Sequence[str] = (),
    input_type: Any = tuple[str, int],
    options: Sequence[str] = (),
    window_fn: Any = None,
    lateness: int = 0,
    kwargs: Mapping[str, Any] | None = None,
) -> Run:
    """The same with a plain `beam.ParDo`; `kwargs` are more arguments of ``process``."""
    transform = beam.ParDo(fn, **(kwargs or {}))
    return _run(transform, source, runner, tags, input_type, options, window_fn, lateness)


def _run(
    transform: Any,
    source: Source,
    runner: str,
    tags: Sequence[str],
    input_type: Any,
    options: Sequence[str],
    window_fn: Any,
    lateness: int,
) -> Run:
    collection = uuid.uuid4().hex
    collected = _COLLECTED[collection] = []
    streaming = isinstance(source, (StreamPlan, ReplayLog))
    arguments = [f"--runner={runner}", *options, *(["--streaming"] if streaming else [])]
    if runner == "PrismRunner":
        arguments += prism_options()
    try:
        pipeline = beam.Pipeline(options=PipelineOptions(arguments))
        if isinstance(source, StreamPlan):
            elements = pipeline | source.to_test_stream()
        elif isinstance(source, ReplayLog):
            elements = pipeline | ReadReplay(source)
        else:
            elements = pipeline | beam.Create(list(source), reshuffle=False) | beam.Map(_stamp)
        if window_fn is not None:
            elements |= beam.WindowInto(window_fn, allowed_lateness=Duration(micros=lateness))
        typed = elements | "Typed" >> beam.Map(_same).with_output_types(input_type)
        if tags:
            outputs = typed | "Subject" >> transform.with_outputs(*tags, main="main")
            by_tag: dict[str | None, Any] = {tag: outputs[tag] for tag in tags}
            by_tag[None] = outputs["main"]
        else:
            by_tag = {None: typed | "Subject" >> transform}
        for tag, pcoll in by_tag.items():
            _ = pcoll | f"Collect {tag}" >> beam.ParDo(_CollectFn(collection, tag))
        result = pipeline.run()
        result.wait_until_finish()
        counters = result.metrics().query()["counters"]
        metrics = {
            counter.key.metric.name: counter.committed
            for counter in counters
            if counter.key.metric.namespace == "beam_ckpt"
        }
    finally:
        del _COLLECTED[collection]
    return Run(collected, metrics)


def _same(element: Any) -> Any:
    return element


def saved_state(
    store: CheckpointStore,
    fn: beam.DoFn,
    *,
    checkpoint_id: int | None = None,
    uid: str = "subject",
    input_type: Any = tuple[str, int],
    output_type: Any = None,
    window_fn: Any = None,
    lateness: int = 0,
) -> dict[tuple[Hashable, BoundedWindow], KeyedCells]:
    """The state in a checkpoint, decoded with the coders of `fn`, as the oracle has it.

    Args:
        store: Where it is.
        fn: The DoFn whose state it is.
        checkpoint_id: Which one; the latest by default.
        uid: Of the operator.
        input_type: Type hint of the operator's input.
        output_type: Type hint of its main output, for carried outputs; by default that of `fn`.
        window_fn: Windows of the input; the global one by default. State of windows that are over
            is left out.
        lateness: Allowed lateness of the windows, microseconds.
    """
    manifest = store.load_latest() if checkpoint_id is None else store.load_by_id(checkpoint_id)
    assert manifest is not None
    signature = read_signature(fn)
    coder = coder_of(input_type)
    window_coder = (window_fn or GlobalWindows()).get_window_coder()
    operator = OperatorState(
        uid,
        coder.key_coder(),
        window_coder,
        tuple(CellState(cell.name, cell.kind, cell.coder) for cell in signature.cells),
        False,
    )
    state, shared = {}, SharedRows()
    for partition in manifest.operators[uid].partitions:
        table = read_chain(partition.sidecars, store.read_sidecar, shared=shared)
        for record in operator.to_records(table):
            key = operator.key_coder.decode(record.key)
            window = window_coder.decode(record.window)
            state[key, window] = keyed_cells(
                record, window, manifest.boundary, fn, signature, window_fn, lateness, output_type
            )
    return {key: cells for key, cells in state.items() if cells != KeyedCells()}


def keyed_cells(
    record: SnapshotRecord,
    window: BoundedWindow,
    boundary: int | None,
    fn: beam.DoFn,
    signature: Signature,
    window_fn: Any = None,
    lateness: int = 0,
    output_type: Any = None,
) -> KeyedCells:
    """One saved record as the oracle has it; see `saved_state`."""
    if is_over(window, boundary, lateness):
        left = left_over(record, boundary)
        if left is None:
            return KeyedCells()
        record = left
    window_fn = window_fn or GlobalWindows()
    window_coder = window_fn.get_window_coder()
    hints = fn.get_type_hints()
    output_types: dict[str | None, Any] = {**hints.tagged_output_types()}
    output_types[None] = output_type or hints.simple_output_type("main")
    return KeyedCells(
        cells=dict(_cells(signature.cells, record.cells)),
        timers={(f"ts-{timer.family}", timer.tag): timer.fire for timer in record.timers},
        carried=tuple(
            Output(output.tag, value, output.timestamp, own_window)
            for output in record.carried
            for value in [coder_of(output_types.get(output.tag, Any)).decode(output.value)]
            for own_window in _windows(output, value, window_fn, window_coder)
            if boundary is not None and output.timestamp >= boundary
        ),
    )


def coder_of(hint: Any) -> Any:
    """The coder that Beam has for a type hint."""
    return registry.get_coder(convert_to_beam_type(hint))


def _cells(cells: Iterable[Any], saved: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for cell, value in zip(cells, saved, strict=True):
        if value is None or value == ():
            continue
        decode = cell.coder.decode
        if cell.kind in ("read_modify_write", "combining"):
            yield cell.name, decode(value)
        elif cell.kind in ("bag", "ordered_list"):
            yield cell.name, [decode(item) for item in value]
        else:
            yield cell.name, frozenset(decode(item) for item in value)


def _windows(output: Any, value: Any, window_fn: Any, window_coder: Any) -> Iterable[Any]:
    """Of a carried output: its own, or those that Beam assigns from its time."""
    if output.window:
        return [window_coder.decode(output.window)]
    context = WindowFn.AssignContext(Timestamp(micros=output.timestamp), value)
    windows: Iterable[Any] = window_fn.assign(context)
    return windows
