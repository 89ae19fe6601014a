"""Saved state as PCollections, and looking after a store from within a pipeline.

`ReadState` is for any analysis: what a checkpoint holds of one operator, in parallel by key group::

    totals = p | ReadState("gs://bucket/ckpt/job", uid="totals")     # (key, {cell: value})
    rich = totals | beam.Filter(lambda kv: (kv[1]["total"] or 0) > 1000)

`RestoreState` reads the same of the latest valid checkpoint and is at home in a pipeline that runs
again and again: nothing has been saved before its first run, so it is empty then. It may prune what
is older. `PruneCheckpoints` does that on its own::

    ckpt.results | PruneCheckpoints(store, keep=KeepLast(5) | KeepFor(days=7))

Values are decoded by the coders that the checkpoint records, where these are Beam's own coders of
plain data. A coder that unpickles, or that only its author has, is used where the author gives the
DoFn (`cells=`); without that such a value is the bytes that were saved. Nothing is unpickled unless
the author's own coders do it, or ``unsafe_unpickle=True`` says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import apache_beam as beam
from apache_beam.coders.coders import Coder
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.display import DisplayDataItem
from apache_beam.transforms.window import GlobalWindows, WindowFn
from apache_beam.typehints import typehints
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Duration, Timestamp
from apache_beam.utils.windowed_value import PANE_INFO_UNKNOWN, WindowedValue

from beam_ckpt.errors import (
    CheckpointNotFoundError,
    PipelineRefusedError,
    StateIncompatibleError,
)
from beam_ckpt.manifest import CheckpointManifest, OperatorSnapshotEntry, OperatorSpec
from beam_ckpt.retention import (
    KeepLast,
    PruneReport,
    RetentionFacts,
    RetentionPolicy,
)
from beam_ckpt.sidecar import stream_chain
from beam_ckpt.store import CheckpointStore, open_store
from beam_ckpt.transforms._recorded import Recorded, recorded_coder
from beam_ckpt.transforms.columns import CellState, OperatorState, coder_identity
from beam_ckpt.transforms.restore import plan_restore
from beam_ckpt.transforms.runners import DeclareWindowing
from beam_ckpt.transforms.signature import Signature, read_signature
from beam_ckpt.transforms.snapshot import SnapshotRecord
from beam_ckpt.transforms.values import cell_decoder
from beam_ckpt.transforms.windows import is_over

__all__ = ["PruneCheckpoints", "ReadState", "RestoreState"]

AnyStore = str | os.PathLike[str] | CheckpointStore


class _StateOf(beam.PTransform[Any, Any]):
    """What `ReadState` and `RestoreState` have in common."""

    def __init__(
        self,
        store: CheckpointStore,
        uid: str,
        manifest: CheckpointManifest | None,
        cells: beam.DoFn | type[beam.DoFn] | None,
        key_coder: Coder | None,
        windows: WindowFn | None,
        allowed_lateness: float | Duration,
        unsafe_unpickle: bool,
    ) -> None:
        super().__init__()
        self._store, self._uid, self._manifest = store, uid, manifest
        self._reader: _Reader | None = None
        if manifest is not None:
            self._reader = _reader(
                store,
                manifest,
                uid,
                cells,
                key_coder,
                windows,
                Duration.of(allowed_lateness).micros,
                bool(unsafe_unpickle),
            )

    def display_data(self) -> dict[str, Any]:
        at = None if self._manifest is None else self._manifest.id
        return {
            "store": DisplayDataItem(self._store.url, label="Checkpoint store"),
            "uid": DisplayDataItem(self._uid, label="Operator"),
            "checkpoint": DisplayDataItem(at, label="Checkpoint id").drop_if_none(),
        }

    def expand(self, pbegin: Any) -> Any:
        reader = self._reader
        if reader is None:
            return pbegin | beam.Create([]).with_output_types(tuple[Any, dict[str, Any]])
        output_type = typehints.Tuple[reader.key_type, dict[str, Any]]
        read = DeclareWindowing(_ReadStateFn(reader), Windowing(reader.windows))
        return (
            pbegin
            | beam.Impulse()
            | "KeyGroups" >> beam.FlatMap(_each, reader.groups).with_output_types(int)
            | beam.Reshuffle()
            | "Read" >> read.with_output_types(output_type)
        )


class ReadState(_StateOf):
    """A checkpoint's state of one operator: a PCollection of ``(key, {cell: value})``.

    One element per key and window, at ``MIN_TIMESTAMP``, in the windows that the state is of. Every
    cell is there: a value or `None`; the list of a bag, the set of a set; of an ordered list a list
    of (`Timestamp`, value); of a combining cell what it reads as, with `cells`, or its accumulator,
    without. A key that has nothing but timers has its empty cells.

    Args:
        store: A path, a URL, or a `~beam_ckpt.CheckpointStore`.
        uid: The operator.
        at: ``"latest"`` (the newest valid one), or the id or a tag of a checkpoint.
        cells: The author's DoFn, or its class: its coders read the values.
        key_coder: Reads the keys, where the recorded coder is not one of Beam's own.
        windows: The operator's window function, where it is in other windows than the global one.
            Nothing comes of windows that are over at the cut.
        allowed_lateness: Of these windows, seconds.
        unsafe_unpickle: Whether recorded coders may unpickle. Pickles run whatever code they
            name: say so only of a store that nobody else writes to.
        accumulators: Give the accumulators of combining cells with `cells` as well, which is what
            `~beam_ckpt.transforms.WriteState` takes.

    Attributes:
        boundary: The cut, event time; `None` for the drained end of the input.

    Raises:
        CheckpointNotFoundError: No store, no such checkpoint or operator.
        NoValidCheckpointError: All checkpoints are damaged.
        StateIncompatibleError: The given coders are not those that the state was saved with.
        PipelineRefusedError: A setting cannot be right.
    """

    def __init__(
        self,
        store: AnyStore,
        uid: str,
        at: str | int = "latest",
        *,
        cells: beam.DoFn | type[beam.DoFn] | None = None,
        key_coder: Coder | None = None,
        windows: WindowFn | None = None,
        allowed_lateness: float | Duration = 0,
        unsafe_unpickle: bool = False,
        accumulators: bool = False,
    ) -> None:
        opened = open_store(store, create=False)
        if at == "fresh":
            raise PipelineRefusedError(
                "at='fresh' is no checkpoint. What to do: give 'latest', an id or a tag."
            )
        manifest = plan_restore(opened, at, until=None, on_fallback="accept").manifest
        if manifest is None:
            raise CheckpointNotFoundError(
                f"{opened.url} has no checkpoint yet. What to do: run the pipeline that writes it."
            )
        super().__init__(
            opened, uid, manifest, cells, key_coder, windows, allowed_lateness, unsafe_unpickle
        )
        boundary = manifest.boundary
        self.boundary = None if boundary is None else Timestamp(micros=boundary)
        if accumulators and self._reader is not None:
            self._reader = replace(self._reader, combine_fns={})


class RestoreState(_StateOf):
    """The state of one operator in the latest valid checkpoint; empty where there is none yet.

    The elements are those of `ReadState`.

    Args:
        store: A path, a URL, or a `~beam_ckpt.CheckpointStore`.
        uid: The operator.
        keep: What to keep of the older checkpoints (a number, or a retention policy); the others
            are pruned when the pipeline runs. `None`: all of them. What is read is always kept.
        cells: See `ReadState`; so are `key_coder`, `windows`, `allowed_lateness` and
            `unsafe_unpickle`.

    Raises:
        CheckpointNotFoundError: There are checkpoints, and the latest has no such operator.
        NoValidCheckpointError: All checkpoints are damaged.
        StateIncompatibleError: The given coders are not those that the state was saved with.
        PipelineRefusedError: A setting cannot be right.
    """

    def __init__(
        self,
        store: AnyStore,
        uid: str,
        *,
        keep: int | RetentionPolicy | None = None,
        cells: beam.DoFn | type[beam.DoFn] | None = None,
        key_coder: Coder | None = None,
        windows: WindowFn | None = None,
        allowed_lateness: float | Duration = 0,
        unsafe_unpickle: bool = False,
    ) -> None:
        opened = open_store(store)
        manifest = plan_restore(opened, "latest", until=None, on_fallback="accept").manifest
        super().__init__(
            opened, uid, manifest, cells, key_coder, windows, allowed_lateness, unsafe_unpickle
        )
        self._keep = None if keep is None else retention(keep)

    def expand(self, pbegin: Any) -> Any:
        state = super().expand(pbegin)
        if self._keep is not None and self._manifest is not None:
            keep = self._keep | _KeepOne(self._manifest.id)
            _ = pbegin | "Prune" >> PruneCheckpoints(self._store, keep)
        return state


def saved_cells(read: ReadState) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """What `read` gives, without a pipeline: key, window and values by cell."""
    reader = read._reader
    assert reader is not None  # It refuses to be made without a checkpoint.
    fn = _ReadStateFn(reader)
    fn.setup()
    for group in reader.groups:
        for windowed in fn.process(group):
            key, values = windowed.value
            yield key, windowed.windows[0], values


class PruneCheckpoints(beam.PTransform[Any, Any]):
    """Deletes the checkpoints that a policy does not keep; gives the `PruneReport`.

    At the root of a pipeline it prunes once; applied to a PCollection, such as ``ckpt.results``,
    once for each element. The latest recovery point, tagged checkpoints and what a running job
    restored from stay, whatever the policy says. Safe to repeat, as a runner may.

    Args:
        store: A path, a URL, or a `~beam_ckpt.CheckpointStore`.
        keep: How many checkpoints to keep, or a policy.
        dry_run: Only report what would go.

    Raises:
        CheckpointNotFoundError: There is no store.
        PipelineRefusedError: `keep` is no policy.
        InvalidCheckpointError: When it runs, something in the store is damaged: what cannot be
            read may still be wanted, so nothing is deleted.
    """

    def __init__(
        self, store: AnyStore, keep: int | RetentionPolicy, *, dry_run: bool = False
    ) -> None:
        super().__init__()
        self._store, self._keep = open_store(store, create=False), retention(keep)
        self._dry_run = dry_run

    def display_data(self) -> dict[str, Any]:
        return {
            "store": DisplayDataItem(self._store.url, label="Checkpoint store"),
            "keep": DisplayDataItem(str(self._keep), label="Retention policy"),
        }

    def expand(self, pvalueish: Any) -> Any:
        if isinstance(pvalueish, (beam.Pipeline, beam.pvalue.PBegin)):
            pvalueish = pvalueish | beam.Impulse()
        fn = _PruneFn(self._store, self._keep, self._dry_run)
        return pvalueish | "Delete" >> beam.ParDo(fn).with_output_types(PruneReport)


def retention(keep: int | RetentionPolicy) -> RetentionPolicy:
    """Returns the policy that `keep` means.

    Raises:
        PipelineRefusedError: It means none.
    """
    if isinstance(keep, RetentionPolicy):
        return keep
    try:
        return KeepLast(keep)
    except ValueError as error:
        raise PipelineRefusedError(
            f"keep={keep!r} is no retention policy: {error}. What to do: give how many checkpoints "
            "to keep, from 1, or a policy such as KeepLast(5) | KeepFor(days=7)."
        ) from error


@dataclass(frozen=True)
class _KeepOne(RetentionPolicy):
    """Keeps the one that is being read: it need not be the newest, where that is damaged."""

    id: int

    def keep(self, checkpoints: Sequence[RetentionFacts], now_ms: int) -> frozenset[int]:
        return frozenset((self.id,))


class _PruneFn(beam.DoFn):
    def __init__(self, store: CheckpointStore, keep: RetentionPolicy, dry_run: bool) -> None:
        self._store, self._keep, self._dry_run = store, keep, dry_run

    def process(self, element: Any) -> Iterator[PruneReport]:
        yield self._store.prune(self._keep, dry_run=self._dry_run)


# ---------------------------------------------------------------------- how values are read
@dataclass(frozen=True)
class _Reader:
    """What the workers have to know.

    Attributes:
        store: Where the checkpoint is.
        checkpoint_id: Which one.
        operator: With coders whose columns are those of the sidecars.
        decode_key: Whether keys may be decoded; otherwise they stay bytes.
        readable: The cells whose values may be decoded; those of the others stay bytes.
        combine_fns: Of combining cells, by cell, where the author's DoFn is known.
        windows: Of the state.
        lateness: Of the windows, µs: so long after their end they still have state.
        groups: The key groups that have any.
    """

    store: CheckpointStore
    checkpoint_id: int
    operator: OperatorState
    decode_key: bool
    readable: frozenset[str]
    combine_fns: Mapping[str, Any]
    windows: WindowFn
    lateness: int
    groups: tuple[int, ...]

    @property
    def key_type(self) -> Any:
        if not self.decode_key:
            return bytes
        try:
            return self.operator.key_coder.to_type_hint()
        except NotImplementedError:
            return typehints.Any


class _ReadStateFn(beam.DoFn):
    """A key group to its keyed state."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._entry = OperatorSnapshotEntry()
        self._boundary: int | None = None

    def setup(self) -> None:
        reader = self._reader
        manifest = reader.store.load_by_id(reader.checkpoint_id)
        if manifest is None:
            raise CheckpointNotFoundError(
                f"checkpoint {reader.checkpoint_id} of {reader.store.url} is gone since this "
                "pipeline was built. What to do: build it again, or tag the checkpoint first."
            )
        self._entry, self._boundary = manifest.operators[reader.operator.uid], manifest.boundary

    def process(self, key_group: int) -> Iterator[Any]:
        reader, operator = self._reader, self._reader.operator
        (partition,) = (p for p in self._entry.partitions if p.partition_id == key_group)
        decoders = [
            cell_decoder(
                cell.kind,
                cell.coder.decode if cell.name in reader.readable else bytes,
                reader.combine_fns.get(cell.name),
            )
            for cell in operator.cells
        ]
        names = [cell.name for cell in operator.cells]
        decode_key = operator.key_coder.decode if reader.decode_key else bytes
        stream = stream_chain(partition.sidecars, reader.store.read_sidecar, operator.schema)
        for key, encoded in (pair for page in stream.pages for pair in operator.to_encoded(page)):
            record = SnapshotRecord.from_bytes(encoded)
            window = operator.window_coder.decode(record.window)
            if is_over(window, self._boundary, reader.lateness):
                continue
            values = zip(names, decoders, record.cells, strict=True)
            yield WindowedValue(
                (decode_key(key), {name: decode(value) for name, decode, value in values}),
                MIN_TIMESTAMP,
                (window,),
                PANE_INFO_UNKNOWN,
            )


def _reader(
    store: CheckpointStore,
    manifest: CheckpointManifest,
    uid: str,
    fn: beam.DoFn | type[beam.DoFn] | None,
    key_coder: Coder | None,
    windows: WindowFn | None,
    lateness: int,
    unsafe_unpickle: bool,
) -> _Reader:
    where = f"checkpoint {manifest.id} of {store.url}, operator {uid!r}"
    spec = _saved_spec(store, manifest, uid)
    key = _coder(key_coder, spec.key_coder, f"{where}: the key", "key_coder=", unsafe_unpickle)
    declared = {} if fn is None else {cell.name: cell for cell in signature_of(fn).cells}
    cells, readable, combine_fns = [], set(), {}
    for name, saved in spec.cells.items():
        cell = declared.get(name)
        if cell is not None and cell.kind != saved.kind:
            raise StateIncompatibleError(
                f"{where}: cell {name!r} was saved as {saved.kind} and is {cell.kind} in the given "
                "DoFn. What to do: give the DoFn that the state was saved with, or none."
            )
        given = None if cell is None else cell.coder
        found = _coder(given, saved.coder, f"{where}: cell {name!r}", "cells=", unsafe_unpickle)
        cells.append(CellState(name, saved.kind, found.coder))
        if found.readable:
            readable.add(name)
        if cell is not None and getattr(cell, "combine_fn", None) is not None:
            combine_fns[name] = cell.combine_fn
    window_fn = GlobalWindows() if windows is None else windows
    window_coder = window_fn.get_window_coder()
    if coder_identity(window_coder) != spec.window_coder:
        raise StateIncompatibleError(
            f"{where}: its windows were saved with {spec.window_coder}, and those of "
            f"{window_fn!r} have {coder_identity(window_coder)}. What to do: give the operator's "
            "own, as in windows=FixedWindows(60)."
        )
    entry = manifest.operators.get(uid, OperatorSnapshotEntry())
    return _Reader(
        store,
        manifest.id,
        OperatorState(uid, key.coder, window_coder, tuple(cells), spec.time_sorted),
        key.readable,
        frozenset(readable),
        combine_fns,
        window_fn,
        lateness,
        tuple(partition.partition_id for partition in entry.partitions),
    )


def _saved_spec(store: CheckpointStore, manifest: CheckpointManifest, uid: str) -> OperatorSpec:
    specs = manifest.pipeline.operators if manifest.pipeline else {}
    if uid not in specs:
        known = ", ".join(map(repr, sorted({*specs, *manifest.operators}))) or "no operators"
        why = "has no operator" if uid not in manifest.operators else "does not say the coders of"
        raise CheckpointNotFoundError(
            f"checkpoint {manifest.id} of {store.url} {why} {uid!r}; it has {known}. What to do: "
            "see `beam-ckpt show`."
        )
    return specs[uid]


def signature_of(fn: beam.DoFn | type[beam.DoFn]) -> Signature:
    if isinstance(fn, type):
        name = fn.__name__
        try:
            fn = fn()
        except TypeError as error:
            raise PipelineRefusedError(
                f"cells={name} cannot be made without arguments: {error}. What to do: give "
                "an instance of it."
            ) from error
    return read_signature(fn)


def _coder(
    given: Coder | None, identity: str, what: str, argument: str, unsafe_unpickle: bool
) -> Recorded:
    if given is not None:
        if coder_identity(given) != identity:
            raise StateIncompatibleError(
                f"{what} was saved with {identity}, and the given coder is "
                f"{coder_identity(given)}. What to do: give the one it was saved with, or none."
            )
        return Recorded(given, True)
    recorded = recorded_coder(identity, unsafe_unpickle=unsafe_unpickle)
    if recorded is None:
        raise StateIncompatibleError(
            f"{what} was saved with {identity}, a coder that cannot be made from its name. What to "
            f"do: give the author's by {argument}"
        )
    return recorded


def _each(_: bytes, groups: tuple[int, ...]) -> tuple[int, ...]:
    return groups
