"""A checkpoint made from a PCollection: state from history, or changed state.

A pipeline that has not run yet starts with state that was computed elsewhere::

    rows | WriteState(store, uid="totals", cells=TotalsFn)     # of (key, {cell: value})

and a migration is a pipeline from one store to another::

    read = ReadState(old, "totals", cells=TotalsFn, accumulators=True)
    _ = (p | read
           | beam.MapTuple(change).with_output_types(tuple[str, dict[str, Any]])
           | WriteState(new, "totals", cells=NewTotalsFn, boundary=read.boundary))

It goes through the writer and the committer of every checkpoint, with one difference: all of it is
published when the input has ended, whatever its event times are.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import apache_beam as beam
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.display import DisplayDataItem
from apache_beam.transforms.window import GlobalWindow, GlobalWindows
from apache_beam.utils.timestamp import Duration, Timestamp
from apache_beam.utils.windowed_value import PANE_INFO_UNKNOWN, WindowedValue

from beam_ckpt.errors import (
    CheckpointConflictError,
    FencedError,
    PipelineRefusedError,
    StateIncompatibleError,
)
from beam_ckpt.keygroups import check_key_group_count, key_group
from beam_ckpt.lineage import NewSidecar
from beam_ckpt.manifest import CheckpointManifest, OperatorSnapshotEntry, OperatorSpec
from beam_ckpt.retention import KeepLast
from beam_ckpt.store import CheckpointStore, open_store
from beam_ckpt.transforms._runs import Runs
from beam_ckpt.transforms.checkpoints import (
    Seconds,
    check_uid,
    claim_store,
    event_time,
    input_coders,
)
from beam_ckpt.transforms.chunks import CHUNK_BYTES, cut
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.committer import START, CheckpointResult, CommitFn
from beam_ckpt.transforms.keyed_state.clock import DRAINED
from beam_ckpt.transforms.restore import plan_restore
from beam_ckpt.transforms.runners import AloneInItsStage, DeclareWindowing, prepare
from beam_ckpt.transforms.snapshot import SnapshotRecord
from beam_ckpt.transforms.state_io import signature_of
from beam_ckpt.transforms.values import cell_encoder
from beam_ckpt.transforms.windows import window_identity
from beam_ckpt.transforms.writer import WriteSidecarsFn

__all__ = ["WriteState"]


_LOGGER = logging.getLogger(__name__)

_RECORD = tuple[int, tuple[int, bytes]]
_ROUTED = tuple[tuple[str, int], tuple[int, bytes]]
# Part of the run id, by which a checkpoint of a bootstrap is known.
_BOOTSTRAP = "bootstrap-"
_KEY_GROUPS = 128
# Nothing is deleted for a bootstrap.
_KEEP = KeepLast(2**31)


class WriteState(beam.PTransform[Any, Any]):
    """Makes a checkpoint of a bounded PCollection of ``(key, {cell: value})``.

    A pipeline whose operator has this uid, and cells with the same coders, goes on from it. The
    values are what `ReadState` gives: of a bag, set or ordered list (of (time, value)) a list or
    set, of a combining cell its accumulator; `None` or a cell that is left out is empty. A key may
    come once, or once per window: the windows of the input are those of the operator. Its type has
    to be known, as for the operator's input. Timers are not part of it: a DoFn that waits for one
    has to set it with the key's next element.

    Write several operators by one pipeline after another: a checkpoint that a bootstrap wrote is
    added to. Give them the same `boundary`.

    Nothing is published before the input has ended. The store becomes this run's then, as with any
    run of a pipeline: what runs on it is fenced. So a store that a job has written to, or runs
    on, is refused, unless `replace` says that the job has been stopped.

    Args:
        store: A path, a URL, or a `~beam_ckpt.CheckpointStore`.
        uid: The operator.
        cells: The author's DoFn, or its class, whose state cells these are.
        boundary: The cut, event time in seconds: everything before it is in this state, and the
            pipeline drops it when it is replayed. `None`: whatever comes is new.
        replace: Write over what a job has written: the operator's state is replaced, the other
            operators and the source offsets of its newest checkpoint stay, and so has the boundary
            to. The older checkpoints stay as well.
        key_groups: Into how many parts state is divided; 128, or those of the checkpoint that is
            added to.

    Returns:
        A PCollection of the one `CheckpointResult`.

    Raises:
        PipelineRefusedError: A job's store, an input that cannot be written exactly, or a setting
            that cannot be right.
        NoValidCheckpointError: There are checkpoints, all of them damaged.
        StateIncompatibleError: When it runs: an unknown cell, a value that its coder does not
            take, or a key that comes twice.
        CheckpointConflictError: When it runs: something else has been published since.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | CheckpointStore,
        uid: str,
        cells: beam.DoFn | type[beam.DoFn],
        *,
        boundary: Seconds | None = None,
        replace: bool = False,
        key_groups: int | None = None,
    ) -> None:
        super().__init__()
        check_uid(uid, "WriteState", "operator")
        self._uid, self._replace = uid, replace
        self._boundary = event_time("boundary", boundary)
        signature = signature_of(cells)
        self._cells = tuple(CellState(c.name, c.kind, c.coder, c.combiner) for c in signature.cells)
        if not self._cells:
            raise PipelineRefusedError(
                f"the DoFn of WriteState {uid!r} has no state cells. What to do: give the one "
                "whose state it is."
            )
        if signature.timers:
            _LOGGER.warning(
                "operator %r has the timers %s, which are not part of the state that is "
                "written: no key will have one pending before its next element sets it",
                uid, ", ".join(map(repr, signature.timers)),
            )  # fmt: skip
        self._store = open_store(store)
        plan = plan_restore(self._store, "latest", until=None, on_fallback="accept")
        self._base = plan.manifest
        if not replace:
            _check_nobody_is_there(self._store, self._base, plan.passed_over)
        base = self._base
        if key_groups is None:
            key_groups = _KEY_GROUPS if base is None else base.key_group_count
        try:
            self._key_groups = check_key_group_count(key_groups)
        except ValueError as error:
            raise PipelineRefusedError(str(error)) from error
        if base is not None:
            self._check_fits(base)

    def _check_fits(self, base: CheckpointManifest) -> None:
        where = f"checkpoint {base.id} of {self._store.url}"
        others = _others(base, self._uid)
        if (others or not _is_bootstrap(base)) and base.boundary != self._boundary:
            stands, given = (
                "at the end of a drained input"
                if at is None
                else f"at the boundary {Timestamp(micros=at)!r}"
                for at in (base.boundary, self._boundary)
            )
            raise PipelineRefusedError(
                f"{where} stands {stands}, and what is to be written {given}: a pipeline that "
                "goes on from there would lose elements, or apply them again. What to do: give "
                "boundary= that of the checkpoint (ReadState(...).boundary), or write to a store "
                "of its own."
            )
        if others and base.key_group_count != self._key_groups:
            raise PipelineRefusedError(
                f"{where} has other operators, in {base.key_group_count} key groups, not "
                f"{self._key_groups}. What to do: leave key_groups out."
            )
        if others and base.pipeline is None:
            raise PipelineRefusedError(
                f"{where} has other operators and does not say their coders. What to do: write to "
                "a store of its own."
            )

    def display_data(self) -> dict[str, Any]:
        return {
            "store": DisplayDataItem(self._store.url, label="Checkpoint store"),
            "uid": DisplayDataItem(self._uid, label="Operator"),
        }

    def expand(self, pcoll: Any) -> Any:
        uid, base = self._uid, self._base
        key_coder, _ = input_coders(pcoll, uid)
        windowing = pcoll.windowing
        if not pcoll.is_bounded:
            raise PipelineRefusedError(
                f"the input of WriteState {uid!r} has no end, and all of it makes one checkpoint. "
                "What to do: write from a bounded source."
            )
        if windowing.windowfn != GlobalWindows() and self._boundary is None:
            raise PipelineRefusedError(
                f"the input of WriteState {uid!r} is in the windows of {windowing.windowfn!r}, and "
                "without a boundary these are over, and their state gone. What to do: give "
                "boundary=."
            )
        prepare(pcoll.pipeline)
        claim_store(pcoll.pipeline, self._store)
        operator = OperatorState(
            uid,
            key_coder,
            windowing.windowfn.get_window_coder(),
            self._cells,
            False,
            Duration.of(windowing.allowed_lateness).micros,
            window_identity(windowing.windowfn),
        )
        run_id = f"{_BOOTSTRAP}{uuid.uuid4().hex}"
        encode = DeclareWindowing(_EncodeFn(operator, self._key_groups), Windowing(GlobalWindows()))
        write = _WriteFn(self._store, run_id, operator, self._boundary)
        publish = _PublishFn(
            self._store,
            run_id,
            operator,
            self._key_groups,
            self._boundary,
            None if base is None else base.id,
            {} if base is None else {u: e.source_type for u, e in base.source_offsets.items()},
            base is not None and base.drained,
            self._replace,
        )
        new = (
            pcoll
            | "Encode" >> encode.with_output_types(_ROUTED)
            | "WriterAlone" >> AloneInItsStage()
            | "WriteSidecars" >> beam.ParDo(write).with_output_types(_RECORD)
        )
        start = (
            pcoll.pipeline
            | "CommitterStart" >> beam.Impulse()
            | "Start" >> beam.Map(_start).with_output_types(_RECORD)
        )
        return (
            (new, start)
            | "Entries" >> beam.Flatten()
            | "Commit" >> beam.ParDo(publish).with_output_types(CheckpointResult)
        )


def _is_bootstrap(manifest: CheckpointManifest) -> bool:
    return manifest.run is not None and manifest.run.run_id.startswith(_BOOTSTRAP)


def _others(base: CheckpointManifest, uid: str) -> set[str]:
    return set(base.operators) - {uid}


def _check_nobody_is_there(
    store: CheckpointStore, base: CheckpointManifest | None, damaged: int
) -> None:
    """Refuses a store that is not a bootstrap's alone."""
    way_out = (
        "What to do: write to a store of its own; or, if the job has been stopped and is to go on "
        "from this, give replace=True."
    )
    if damaged:
        raise PipelineRefusedError(
            f"{store.url} has {damaged} damaged checkpoints that are newer than what can be read. "
            f"{way_out}"
        )
    if base is not None and not _is_bootstrap(base):
        raise PipelineRefusedError(
            f"checkpoint {base.id} of {store.url} is of a job, which may be running. {way_out}"
        )
    generation = 0 if base is None or base.run is None else base.run.generation
    try:
        store.check_generation(generation, "")
    except FencedError as error:
        raise PipelineRefusedError(
            f"a job has started on {store.url} since its newest checkpoint, and may be running. "
            f"{way_out}"
        ) from error


def _start(_: bytes) -> tuple[int, tuple[int, bytes]]:
    return START


class _EncodeFn(beam.DoFn):
    """(key, {cell: value}) to the record of that key and window, on its way to the writer."""

    def __init__(self, operator: OperatorState, key_groups: int) -> None:
        self._operator, self._key_groups = operator, key_groups
        self._encoders: dict[str, Callable[[Any], Any]] = {}

    def setup(self) -> None:
        self._encoders = {cell.name: cell_encoder(cell) for cell in self._operator.cells}

    def process(
        self,
        element: tuple[Any, Mapping[str, Any]],
        timestamp: Any = beam.DoFn.TimestampParam,
        window: Any = beam.DoFn.WindowParam,
    ) -> Iterator[Any]:
        operator = self._operator
        key, values = element
        if not isinstance(values, Mapping):
            raise StateIncompatibleError(
                f"operator {operator.uid!r}: the state of a key is a {type(values).__name__}. What "
                "to do: give (key, {cell: value})."
            )
        unknown = sorted(map(repr, values.keys() - self._encoders.keys()))
        if unknown:
            raise StateIncompatibleError(
                f"operator {operator.uid!r} has no cell {', '.join(unknown)}; it has "
                f"{', '.join(map(repr, self._encoders))}. What to do: name the cells as the DoFn "
                "does, and leave out what it does not have."
            )
        cells = tuple(encode(values.get(name)) for name, encode in self._encoders.items())
        if not any(cell is not None and cell != () for cell in cells):
            return
        encoded_key = operator.key_coder.encode(key)
        record = SnapshotRecord(
            key=encoded_key,
            window=operator.window_coder.encode(window),
            deleted=False,
            updated=timestamp.micros,
            cells=cells,
            timers=(),
            carried=(),
        )
        routed = operator.uid, key_group(encoded_key, self._key_groups)
        for data in cut(record.to_bytes(), CHUNK_BYTES):
            yield WindowedValue(
                (routed, (DRAINED, data)), timestamp, (GlobalWindow(),), PANE_INFO_UNKNOWN
            )


class _WriteFn(WriteSidecarsFn):
    """The writer, of one boundary: the end of the input, by whatever name."""

    def __init__(
        self, store: CheckpointStore, run_id: str, operator: OperatorState, cut: int | None
    ) -> None:
        super().__init__(store, run_id, [operator], None, 1, f"write_{operator.uid}")
        self._arguments = (store, run_id, operator, cut)  # type: ignore[assignment]
        self._cut_at = cut

    def _cut(self, boundary: int) -> int | None:
        return self._cut_at

    def _write(
        self, uid: str, key_group: int, boundary: int, records: Runs, state: Any
    ) -> list[NewSidecar]:
        new = super()._write(uid, key_group, boundary, records, state)
        rows = sum(sidecar.entry.rows for sidecar in new)
        if rows != records.count:
            raise StateIncompatibleError(
                f"{records.count - rows} keys of operator {uid!r} come more than once, in "
                f"key group {key_group}. Nothing was published. What to do: bring the values of a "
                "key together first, as by beam.GroupByKey()."
            )
        return new


class _PublishFn(CommitFn):
    """The committer, of one checkpoint."""

    # Until everything is written the store is not touched, so that a run that fails leaves it
    # as it was.
    _claims_at_start = False
    _skips = False

    def __init__(
        self,
        store: CheckpointStore,
        run_id: str,
        operator: OperatorState,
        key_groups: int,
        cut: int | None,
        base_id: int | None,
        sources: Mapping[str, str],
        drained: bool,
        replace: bool,
    ) -> None:
        super().__init__(
            store,
            run_id,
            [operator],
            key_groups,
            base_id,
            DRAINED,
            _KEEP,
            0,
            f"write_{operator.uid}",
            sources,
            False,
        )
        self._arguments = (  # type: ignore[assignment]
            store, run_id, operator, key_groups, cut, base_id, dict(sources), drained, replace,
        )  # fmt: skip
        self._uid, self._cut_at, self._replace = operator.uid, cut, replace
        self._drained = drained

    def _cut(self, boundary: int) -> int | None:
        return self._cut_at

    def _entries_of(self, base: CheckpointManifest | None) -> dict[str, OperatorSnapshotEntry]:
        if base is None:
            return {}
        return {uid: base.operators[uid] for uid in _others(base, self._uid)}

    def _specs(self, base: CheckpointManifest | None) -> dict[str, OperatorSpec]:
        specs = {} if base is None or base.pipeline is None else base.pipeline.operators
        kept = {} if base is None else {uid: specs[uid] for uid in _others(base, self._uid)}
        return {**kept, **super()._specs(base)}

    def _begin(self, state: Any) -> None:
        plan = plan_restore(self._store, "latest", until=None, on_fallback="accept")
        newest = plan.manifest
        # If an earlier try of this run has published, there is nothing to check any more.
        if newest is None or newest.run is None or newest.run.run_id != self._run_id:
            found = None if newest is None else newest.id
            if found != self._base_id:
                raise CheckpointConflictError(
                    f"{self._store.url} has checkpoint {found} now, and had {self._base_id} when "
                    "this pipeline was built. Nothing was published. What to do: see what writes "
                    "to it, then run this again."
                )
            if not self._replace and self._run_id not in _CLAIMED:
                _check_nobody_is_there(self._store, newest, plan.passed_over)
        _CLAIMED.add(self._run_id)
        super()._begin(state)
        state.draining = self._drained


#: Runs of this process that have claimed their store: a bundle that is tried again finds its own.
_CLAIMED: set[str] = set()
