"""What an author touches: `CheckpointedParDo`, and `Checkpoints` for several operators.

A stateful DoFn, unchanged, that goes on where its last checkpoint stands::

    totals = (events                                # PCollection[tuple[K, V]]
              | "Totals" >> CheckpointedParDo(
                    TotalsFn(),                     # any stateful DoFn
                    uid="totals",                   # the operator's identity across versions
                    store="/var/ckpt/job"))         # or a CheckpointStore

Several operators, one consistent checkpoint::

    with beam.Pipeline() as p, Checkpoints(p, store, every=60) as ckpt:
        sessions = events | "Sessions" >> ckpt.ParDo(SessionFn(), uid="sessions")
        totals = sessions | "Totals" >> ckpt.ParDo(TotalsFn(), uid="totals")

This module builds the graph and nothing else; how a cut is exact is in `keyed_state`.
"""

from __future__ import annotations

import copy
import os
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Literal, Self

import apache_beam as beam
from apache_beam.coders import coders
from apache_beam.coders.typecoders import registry
from apache_beam.internal import pickler
from apache_beam.options.pipeline_options import StandardOptions
from apache_beam.pvalue import AsIter
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.display import DisplayDataItem
from apache_beam.transforms.window import GlobalWindow, GlobalWindows
from apache_beam.typehints import typehints
from apache_beam.utils.timestamp import Duration, Timestamp
from apache_beam.utils.windowed_value import PANE_INFO_UNKNOWN, WindowedValue

from beam_ckpt.errors import PipelineRefusedError
from beam_ckpt.keygroups import check_key_group_count
from beam_ckpt.lineage import MAX_INLINE, stands_on
from beam_ckpt.manifest import CheckpointManifest
from beam_ckpt.retention import RetentionPolicy
from beam_ckpt.store import CheckpointStore, open_store
from beam_ckpt.transforms._limits import DEFAULT_LIMITS
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.committer import START, CheckpointResult, CommitFn
from beam_ckpt.transforms.elements import LiveOrRestored
from beam_ckpt.transforms.first_touch import SavedRecords
from beam_ckpt.transforms.graph import check_neighbours, check_timestamps, comes_in_one_go
from beam_ckpt.transforms.keyed_state.clock import DRAINED, MS, Epochs
from beam_ckpt.transforms.keyed_state.dofn import StatefulWrapper, wrap
from beam_ckpt.transforms.keyed_state.operator import SNAPSHOTS, OperatorConfig, never_waits
from beam_ckpt.transforms.migrations import (
    Migrations,
    OperatorMigration,
    check_migrations,
    plan_migration,
)
from beam_ckpt.transforms.offsets import (
    OFFSETS,
    OffsetsFn,
    ResumeOffsets,
    SummariseFn,
    Summary,
)
from beam_ckpt.transforms.options import fast_state_cache, given_settings
from beam_ckpt.transforms.restore import (
    ReadGroupFn,
    ReadSaved,
    RestorePlan,
    check_compatible,
    plan_restore,
)
from beam_ckpt.transforms.runners import (
    AloneInItsStage,
    DeclareWindowing,
    NothingFn,
    StatefulParDo,
    check_lateness,
    fires_each_timer_once,
    prepare,
    reads_in_one_bundle,
    takes_over_a_running_job,
)
from beam_ckpt.transforms.signature import Signature, read_signature
from beam_ckpt.transforms.state_io import retention
from beam_ckpt.transforms.windows import window_identity
from beam_ckpt.transforms.writer import SHARED_THRESHOLD, WriteSidecarsFn

__all__ = ["CheckpointedParDo", "Checkpoints", "Seconds"]

Seconds = int | float | Timestamp | Duration
"""Event time in seconds, or Beam's own type for it; whole milliseconds."""

_RECORD = tuple[int, tuple[int, bytes]]

# Operators and stores of each pipeline: uids name timer families, stores have one committer.
_UIDS: weakref.WeakKeyDictionary[beam.Pipeline, set[str]] = weakref.WeakKeyDictionary()
_STORES: weakref.WeakKeyDictionary[beam.Pipeline, set[str]] = weakref.WeakKeyDictionary()


class Checkpoints:
    """One consistent checkpoint of several operators of a pipeline.

    Leaving the ``with`` block adds the step that publishes.

    Each setting but `migrations` and `renamed` is also a pipeline option, which wins over what the
    code says; see `~beam_ckpt.transforms.CheckpointOptions`.

    Args:
        pipeline: The pipeline under construction.
        store: A path, a URL, or a `~beam_ckpt.CheckpointStore`; `None` where the option says it.
        every: Interval of checkpoints in event time; boundaries are its multiples. `None`: one, at
            the end.
        until: Cut of a bounded run: exactly the elements and timers below it are processed, and
            the rest of the future is saved. `None`: the run drains.
        restore: ``"latest"`` (the newest valid checkpoint; a fresh start only in an empty store.
            In a stream the newest that was not taken while an earlier run was drained: those
            closed their epochs early, so that a replay from there could miss something, or apply
            it again), ``"drained"`` (those as well: for a source that goes on where it stopped),
            ``"fresh"``, or the id or a tag of one.
        keep: How many checkpoints to keep, or a retention policy. (The one before the newest stays
            until the next is there: a bundle that failed after it published stands on it.)
        key_groups: Into how many parts keyed state is divided, 1 to 65,535: the limit of parallel
            writes and restores.
        on_fallback: If the newest checkpoint is damaged and the run has an `until`: ``"refuse"``,
            or ``"accept"`` the older one.
        alignment: ``"exactly_once"``: an element waits for its epoch, so that a checkpoint holds
            exactly what lies before its boundary. ``"at_least_once"``: nothing waits (but for the
            saved state of its key); what lies before the boundary is in the checkpoint, and of
            what comes after it maybe some, which a replay applies again.
        late: What to do with an element below the boundary restored at: ``"drop"`` it, since it
            has been applied, or ``"reprocess"`` it: right where no source replays and what comes
            that late was never seen.
        on_missing: What to do with saved operators and cells that the pipeline no longer has:
            ``"error"`` or ``"drop"``.
        migrations: How saved values become those of a cell whose coder or kind is another one now:
            ``{(uid, cell): fn}``; see `~beam_ckpt.transforms.migrations`. Applied as keys are
            restored; the first checkpoint then saves every key of such an operator.
        renamed: Operators that have another uid now: ``{old: new}``. The first checkpoint saves
            every key of them.
        max_files_per_group: How many files a key group consists of at most (a base of more than
            64 MiB in memory is in several, which count as one): deltas are merged into bigger
            ones, and now and then with their base. 1: every file is a full one.
        inline_threshold: A delta of at most so many bytes goes into the manifest, not into a file
            of its own, as long as all that is in it stays within 1 MiB. That saves a request for
            each; the manifest is written anew by every checkpoint. 0: none does.
        shared_threshold: A base or a delta of at most so many bytes goes into one file with those
            of the operator's other key groups: a file for each would be mostly footers. The writer
            keeps them until they are merged, with its state at the runner. 0: each is a file of
            its key group.

    Raises:
        PipelineRefusedError: A setting cannot be right.
        CheckpointError: The store cannot be used, or restored from; see `plan_restore`.
    """

    #: No result depends on them: tests let them be tiny.
    _limits = DEFAULT_LIMITS

    def __init__(
        self,
        pipeline: beam.Pipeline,
        store: str | os.PathLike[str] | CheckpointStore | None = None,
        *,
        every: Seconds | None = None,
        until: Seconds | None = None,
        restore: str | int = "latest",
        keep: int | RetentionPolicy = 3,
        key_groups: int = 128,
        alignment: Literal["exactly_once", "at_least_once"] = "exactly_once",
        late: Literal["drop", "reprocess"] = "drop",
        on_fallback: Literal["refuse", "accept"] = "refuse",
        on_missing: Literal["error", "drop"] = "error",
        migrations: Migrations | None = None,
        renamed: Mapping[str, str] | None = None,
        max_files_per_group: int = 8,
        inline_threshold: int = 0,
        shared_threshold: int = SHARED_THRESHOLD,
    ) -> None:
        prepare(pipeline)
        given = given_settings(pipeline.options)
        if not isinstance(store, CheckpointStore):
            store = given.get("store", store)
        if store is None:
            raise PipelineRefusedError(
                "these checkpoints have no store. What to do: give store='/a/path', a URL or a "
                "CheckpointStore, or the pipeline option --checkpoint_store."
            )
        every, until = given.get("every", every), given.get("until", until)
        restore, keep = given.get("restore", restore), given.get("keep", keep)
        key_groups = given.get("key_groups", key_groups)
        alignment, late = given.get("alignment", alignment), given.get("late", late)
        on_fallback = given.get("on_fallback", on_fallback)
        on_missing = given.get("on_missing", on_missing)
        max_files_per_group = given.get("max_files_per_group", max_files_per_group)
        inline_threshold = given.get("inline_threshold", inline_threshold)
        shared_threshold = given.get("shared_threshold", shared_threshold)
        _check_choice("alignment", alignment, ("exactly_once", "at_least_once"))
        _check_choice("late", late, ("drop", "reprocess"))
        _check_choice("on_fallback", on_fallback, ("refuse", "accept"))
        _check_choice("on_missing", on_missing, ("error", "drop"))
        try:
            check_key_group_count(key_groups)
        except ValueError as error:
            raise PipelineRefusedError(str(error)) from error
        if max_files_per_group < 1:
            raise PipelineRefusedError(
                f"max_files_per_group={max_files_per_group}. What to do: give 1 (every checkpoint "
                "is full) or more."
            )
        if not 0 <= inline_threshold <= MAX_INLINE:
            raise PipelineRefusedError(
                f"inline_threshold={inline_threshold}. What to do: give bytes, 0 (every delta is a "
                f"file) to {MAX_INLINE}."
            )
        if not 0 <= shared_threshold <= MAX_INLINE:
            raise PipelineRefusedError(
                f"shared_threshold={shared_threshold}. What to do: give bytes, 0 (each "
                f"sidecar is a file of its key group) to {MAX_INLINE}."
            )
        self._inline_threshold, self._shared_threshold = inline_threshold, shared_threshold
        self._pipeline = pipeline
        self._keep = retention(keep)
        self._key_groups, self._on_missing = key_groups, on_missing
        self._max_files = max_files_per_group
        self._migrations = check_migrations(migrations)
        self._renamed = dict(renamed or {})
        self._late, self._aligned = late, alignment == "exactly_once"
        self._epochs = Epochs(event_time("every", every), event_time("until", until))
        if self._epochs.every is not None and self._epochs.every <= 0:
            raise PipelineRefusedError(
                f"every={every!r} is no interval. What to do: give seconds above 0, or None for "
                "one checkpoint at the end."
            )
        self._store = open_store(store)
        self._streaming = bool(pipeline.options.view_as(StandardOptions).streaming)
        self._plan: RestorePlan = plan_restore(
            self._store,
            restore,
            until=self._epochs.until,
            on_fallback=on_fallback,
            streaming=self._streaming,
        )
        self._check_plan()
        # With `until` the author says that the input is all there is up to it.
        self._marks_drained = self._streaming and self._epochs.until is None
        self._run_id = uuid.uuid4().hex
        self._operators: list[OperatorState] = []
        self._snapshots: list[Any] = []
        self._waits: list[Any] = []
        self._inputs: dict[str, Any] = {}
        self._sources: dict[str, str] = {}
        self._offsets: list[Any] = []
        self._results: Any = None
        claim_store(pipeline, self._store)

    # ------------------------------------------------------------------ what an author asks
    @property
    def resume_at(self) -> Timestamp | None:
        """The boundary restored at: replay from there. `None`: from the start of the data.

        After a drained run it is `None` as well: all of that input was applied, and everything
        that comes is taken as new.
        """
        return self._plan.resume_at

    @property
    def restored(self) -> CheckpointManifest | None:
        """The manifest of the checkpoint restored from, or `None` on a fresh start."""
        return self._plan.manifest

    @property
    def resume_offsets(self) -> ResumeOffsets:
        """By the uid of `TrackOffsets`, then partition: the offset to read from.

        Whoever reads from there misses nothing at or after the boundary restored at. A partition
        that is not listed has not been read below it: read it from its start. Empty on a fresh
        start, and of a uid that nothing was saved for.
        """
        return ResumeOffsets.of(self._plan.manifest)

    @property
    def results(self) -> Any:
        """A PCollection of `CheckpointResult`, one per published checkpoint, in the global window.

        Its elements are dated 2 ms after their boundaries. A runner that repeats a bundle may give
        one again, with the same `CheckpointResult.checkpoint_id`. Taking it closes the list of
        operators.
        """
        if self._results is None:
            self._results = self._publish(self._pipeline)
        return self._results

    def ParDo(  # Beam's name
        self,
        fn: beam.DoFn,
        *args: Any,
        uid: str | None = None,
        time_sorted: bool = False,
        **kwargs: Any,
    ) -> _Operator:
        """A `beam.ParDo` of a stateful DoFn whose state is part of these checkpoints.

        Args:
            fn: The author's DoFn, unchanged.
            *args: Static arguments of ``process``, as in `beam.ParDo`.
            uid: The operator's identity; keep it, whatever else changes.
            time_sorted: Give the DoFn its elements in event-time order per key.
            **kwargs: Static arguments of ``process``.

        Raises:
            PipelineRefusedError: `fn`, or what it asks for, cannot be saved and restored exactly.
        """
        return _Operator(self, fn, args, kwargs, uid, time_sorted)

    def TrackOffsets(  # Beam's way of names
        self,
        uid: str,
        *,
        partition: Callable[[Any], str | int],
        offset: Callable[[Any], int],
        source_type: str = "custom",
        disorder: int = 0,
    ) -> _TrackOffsets:
        """Passes its input on, and keeps from where to read it for the next run.

        Apply it right behind the source, before the first operator. Each checkpoint then has, for
        each partition, the lowest offset whose event time is not in its cut, or the one after the
        highest that was read; see `resume_offsets`, and `~beam_ckpt.transforms.offsets` for the
        conventions of Kafka, files and Pub/Sub.

        Args:
            uid: The source's identity; keep it, whatever else changes.
            partition: Gives an element's partition: a string, or an int that is kept as one.
            offset: Gives its offset: an int of any size that ascends within the partition.
            source_type: What the manifest calls the source, such as ``"kafka"``.
            disorder: How far behind the highest offset seen an element that was not seen may still
                be, in offsets: 0 where a source gives the elements of a partition in the order of
                their offsets. Whatever the event times, which may be in any order.

        Raises:
            PipelineRefusedError: The uid is another's, or `disorder` is negative.
        """
        return _TrackOffsets(self, uid, partition, offset, source_type, disorder)

    def wait_for(self, *pcolls: Any) -> None:
        """Makes each checkpoint wait until all that lies before its boundary is in these.

        Give it what the sinks return. Then an output that a checkpoint covers is in its sink before
        the checkpoint is published, whatever lies between: a restart, which emits from the boundary
        on, loses none. (The watermark tells: a sink that hands elements on later than it says so,
        by threads of its own, cannot be waited for.)

        Args:
            *pcolls: PCollections of anything, downstream of the operators; their elements are not
                looked at.

        Raises:
            PipelineRefusedError: `results` has been taken already.
        """
        if self._results is not None:
            raise PipelineRefusedError(
                "ckpt.wait_for comes after ckpt.results was taken. What to do: take the results "
                "last."
            )
        for pcoll in pcolls:
            nothing = DeclareWindowing(NothingFn(), Windowing(GlobalWindows()))
            label = f"CheckpointsWaitFor{len(self._waits) or ''}"
            self._waits.append(pcoll | label >> nothing.with_output_types(_RECORD))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._finish()

    # ------------------------------------------------------------------ the graph
    def _finish(self) -> None:
        if not self._operators:
            raise PipelineRefusedError(
                "Checkpoints has no operators. What to do: apply ckpt.ParDo(fn, uid=...) inside "
                "the with block."
            )
        missing = set() if self.restored is None else set(self.restored.operators)
        uids = {operator.uid for operator in self._operators}
        missing -= {self._saved_uid(uid) for uid in uids}
        self._check_names(uids)
        if missing and self._on_missing != "drop":
            raise PipelineRefusedError(
                f"checkpoint {self.restored.id if self.restored else ''} of {self._store.url} has "
                f"state of {_names(missing)} and the pipeline has no such operator. What to do: "
                "give the operator its old uid, say what it is called now by "
                f"renamed={{{min(missing)!r}: ...}}, or give its state up by on_missing='drop'."
            )
        check_neighbours(self._inputs, lambda part: isinstance(part, _Operator), self._epochs)
        _ = self.results

    def _saved_uid(self, uid: str) -> str:
        """The uid that an operator was saved by."""
        saved = set() if self.restored is None else set(self.restored.operators)
        olds = [old for old, new in self._renamed.items() if new == uid and old in saved]
        if olds and uid in saved:
            raise PipelineRefusedError(
                f"renamed={{{olds[0]!r}: {uid!r}}}, and the checkpoint has state of both. What to "
                "do: drop one of them by `beam-ckpt rewrite`, or leave `renamed` out."
            )
        return olds[0] if olds else uid

    def _check_names(self, uids: Set[str]) -> None:
        """Refuses migrations and new uids of operators and cells that there are none of."""
        for uid in (*self._renamed.values(), *(uid for uid, _ in self._migrations)):
            if uid not in uids:
                raise PipelineRefusedError(
                    f"migrations or renamed speak of operator {uid!r}, and the pipeline has "
                    f"{_names(uids)}. What to do: give uids of this pipeline."
                )
        cells = {(o.uid, cell.name) for o in self._operators for cell in o.cells}
        for uid, cell in self._migrations:
            if (uid, cell) not in cells:
                own = [name for other, name in cells if other == uid]
                raise PipelineRefusedError(
                    f"migrations speak of cell {cell!r} of operator {uid!r}, which has "
                    f"{_names(own) or 'none'}. What to do: name a cell of its DoFn."
                )
        if len(set(self._renamed.values())) < len(self._renamed):
            raise PipelineRefusedError(
                f"renamed={self._renamed!r} gives two operators one uid. What to do: give each "
                "its own."
            )

    def _check_plan(self) -> None:
        boundary, until = self._plan.resume_at, self._epochs.until
        if boundary is not None and until is not None and until < boundary.micros:
            raise PipelineRefusedError(
                f"until={Timestamp(micros=until)} is before {boundary}, where checkpoint "
                f"{self.restored.id if self.restored else ''} of {self._store.url} stands. What "
                "to do: give a later until, or restore an older checkpoint by its id."
            )
        if self._rewrites and takes_over_a_running_job(self._pipeline):
            raise PipelineRefusedError(
                f"key_groups={self._key_groups}, and the job that is updated in place has "
                f"{self.restored.key_group_count if self.restored else 0}. What to do: keep the "
                "number, or stop the job and start another one, which restores its checkpoint."
            )
        if self._rewrites and self._plan.resume_at is None and self._epochs.every is not None:
            raise PipelineRefusedError(
                f"{self._store.url} holds the state of a drained input in "
                f"{self.restored.key_group_count if self.restored else 0} key groups, not "
                f"{self._key_groups}, and `every` leaves no first boundary to save all of it at. "
                "What to do: keep the number of key groups, or run once without `every`."
            )

    @property
    def _rewrites(self) -> bool:
        """Whether all restored state has to be saved again, in other key groups."""
        return self.restored is not None and self.restored.key_group_count != self._key_groups

    def _claim_uid(self, uid: str) -> None:
        if self._results is not None:
            raise PipelineRefusedError(
                f"operator {uid!r} comes after ckpt.results was taken. What to do: take the "
                "results after the last ckpt.ParDo."
            )
        uids = _UIDS.setdefault(self._pipeline, set())
        if uid in uids:
            raise PipelineRefusedError(
                f"two operators of this pipeline have uid {uid!r}. What to do: give each its own; "
                "a uid is what its state is found by."
            )
        uids.add(uid)

    def _publish(self, root: Any) -> Any:
        """Records → one sidecar per operator and key group → manifests."""
        name = min((operator.uid for operator in self._operators), default="")
        base = self.restored
        write = WriteSidecarsFn(
            self._store,
            self._run_id,
            self._operators,
            None if base is None or self._rewrites else base.id,
            self._max_files,
            name,
            self._limits,
            self._inline_threshold,
            self._shared_threshold,
        )
        commit = CommitFn(
            self._store,
            self._run_id,
            self._operators,
            self._key_groups,
            None if base is None else base.id,
            self._epochs.last,
            self._keep,
            self._plan.passed_over,
            name,
            self._sources,
            self._marks_drained,
        )
        new = (
            self._snapshots
            | "Snapshots" >> beam.Flatten(pipeline=self._pipeline)
            | "WriterAlone" >> AloneInItsStage()
            | "WriteSidecars" >> beam.ParDo(write).with_output_types(_RECORD)
        )
        start = (
            root
            | "CommitterStart" >> beam.Impulse()
            | "Start" >> beam.Map(_start).with_output_types(_RECORD)
        )
        # The start is also what keeps the committer alone in its stage.
        return (
            (new, start, *self._offsets, *self._waits)
            | "Entries" >> beam.Flatten()
            | "Commit" >> beam.ParDo(commit).with_output_types(CheckpointResult)
        )


def claim_store(pipeline: beam.Pipeline, store: CheckpointStore) -> None:
    """Makes this the only transform of a pipeline that publishes to a store."""
    stores = _STORES.setdefault(pipeline, set())
    if store.url in stores:
        raise PipelineRefusedError(
            f"two checkpoints of one pipeline go to {store.url}, and a store has one "
            "committer. What to do: put the operators under one Checkpoints(p, store), or "
            "give each a store of its own."
        )
    stores.add(store.url)


class _Operator(beam.PTransform[Any, Any]):
    """One operator: the author's DoFn in its wrapper, and its restore branch if there is one."""

    def __init__(
        self,
        job: Checkpoints,
        fn: beam.DoFn,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        uid: str | None,
        time_sorted: bool,
    ) -> None:
        super().__init__()
        self._job, self._fn, self._args, self._kwargs = job, fn, args, kwargs
        self._signature = _check_author(fn, args, kwargs, uid)
        assert uid is not None
        self._uid, self._time_sorted = uid, time_sorted
        self._tags: tuple[str, ...] | None = None
        self._main_tag: str | None = None

    @property
    def uid(self) -> str:
        """The operator's identity."""
        return self._uid

    def with_outputs(self, *tags: str, main: str | None = None) -> _Operator:
        """Gives access to tagged outputs, as `beam.ParDo.with_outputs`."""
        result = copy.copy(self)
        result._tags, result._main_tag = tags, main
        return result

    def default_label(self) -> str:
        return f"CheckpointedParDo({type(self._fn).__name__})"

    def default_type_hints(self) -> Any:
        return _type_hints(self._fn)

    def infer_output_type(self, input_type: Any) -> Any:
        return self._fn.infer_output_type(input_type)

    def display_data(self) -> dict[str, Any]:
        return _display_data(self._fn, self._uid)

    def expand(self, pcoll: Any) -> Any:
        job, uid = self._job, self._uid
        key_coder, value_coder = input_coders(pcoll, uid)
        check_timestamps(pcoll, uid, job._epochs)
        check_lateness(pcoll, uid)
        if self._time_sorted and not job._aligned:
            raise PipelineRefusedError(
                f"operator {uid!r} has time_sorted=True, for which elements wait, and the "
                "checkpoints have alignment='at_least_once', for which none does. What to do: "
                "take one of the two."
            )
        self._check_kept()
        window_coder = pcoll.windowing.windowfn.get_window_coder()
        operator = OperatorState(
            uid,
            key_coder,
            window_coder,
            tuple(CellState(c.name, c.kind, c.coder, c.combiner) for c in self._signature.cells),
            self._time_sorted,
            Duration.of(pcoll.windowing.allowed_lateness).micros,
            window_identity(pcoll.windowing.windowfn),
        )
        job._claim_uid(uid)
        saved_uid = job._saved_uid(uid)
        restoring = job.restored is not None and saved_uid in job.restored.operators
        migration = self._check_saved(operator, saved_uid) if restoring else None
        rewrite = saved_uid != uid or (
            job.restored is not None and not stands_on(job.restored, uid, operator.spec())
        )
        if restoring and rewrite:
            self._check_can_save_all()
        restoring = restoring and not takes_over_a_running_job(pcoll.pipeline)
        output_types = self._output_types(pcoll.element_type)
        # Beam warns of tags without a type as soon as there is one with a type: ours.
        output_types = {**dict.fromkeys(self._tags or (), typehints.Any), **output_types}
        config = OperatorConfig(
            uid=uid,
            key_coder=key_coder,
            value_coder=value_coder,
            window_coder=window_coder,
            output_coders=tuple(
                (tag, registry.get_coder(hint)) for tag, hint in output_types.items()
            ),
            epochs=job._epochs,
            boundary=None if job.resume_at is None else job.resume_at.micros,
            restoring=restoring,
            rewrite=restoring and (rewrite or job._rewrites),
            key_groups=job._key_groups,
            time_sorted=self._time_sorted,
            bounded=bool(pcoll.is_bounded),
            windows=pcoll.windowing.windowfn != GlobalWindows(),
            lateness=operator.lateness,
            late=job._late,
            on_missing=job._on_missing,
            aligned=job._aligned,
            marks_drained=job._marks_drained and not pcoll.is_bounded,
            fires_once=fires_each_timer_once(pcoll.pipeline),
            one_bundle=bool(pcoll.is_bounded) and reads_in_one_bundle(pcoll.pipeline),
            chunk_bytes=job._limits.chunk_bytes,
            fast_state_cache=fast_state_cache(pcoll.pipeline.options),
            saved=self._saved_records(operator, saved_uid, migration) if restoring else None,
        )
        wrapper = wrap(self._fn, config, self._signature, self._args, self._kwargs)
        _check_pickles(wrapper, self._fn)
        sides = self._signature.side_inputs
        pardo = StatefulParDo(wrapper, *sides) if sides else beam.ParDo(wrapper)
        run = pardo.with_output_types(
            output_types[None],
            **{SNAPSHOTS: _RECORD},
            **{tag: hint for tag, hint in output_types.items() if tag is not None},
        )
        run.get_resource_hints().update(self.get_resource_hints())
        outputs = self._input(
            pcoll, operator, config, saved_uid, migration
        ) | "Run" >> run.with_outputs(SNAPSHOTS, *(self._tags or ()), main=self._main_tag or "main")
        job._operators.append(operator)
        job._inputs[uid] = pcoll
        job._snapshots.append(
            outputs[SNAPSHOTS]
            | "Route"
            >> DeclareWindowing(_RouteFn(uid), Windowing(GlobalWindows())).with_output_types(
                tuple[tuple[str, int], tuple[int, bytes]]
            )
        )
        if self._tags is None:
            return outputs[self._main_tag or "main"]
        # What the author asked for, without our own tag.
        named = copy.copy(outputs)
        named._tags, named._main_tag, named._allow_unknown_tags = self._tags, self._main_tag, False
        return named

    def _input(
        self,
        pcoll: Any,
        operator: OperatorState,
        config: OperatorConfig,
        saved_uid: str,
        migration: OperatorMigration | None,
    ) -> Any:
        job, restoring = self._job, config.restoring
        if pcoll.is_bounded and not job._streaming and not restoring:
            if config.one_bundle and never_waits(config) and comes_in_one_go(pcoll):
                # As a plain ParDo, it may be fused with what is before it: no element is encoded
                # only to be decoded. (Elements that wait are not to be what somebody else holds.)
                return pcoll
            return pcoll | "Alone" >> AloneInItsStage()
        # The same graph whether there is something to restore or not: a stream that started fresh
        # can be updated in place (Dataflow's --update) after its checkpoints are there. It keeps
        # FnApiRunner from fusing the operator with what is before it as well.
        key_type, value_type = pcoll.element_type.tuple_types
        union = typehints.Tuple[key_type, LiveOrRestored[value_type]]
        saved = pcoll.pipeline | "Restore" >> ReadSaved(
            job._store,
            job.restored if restoring else None,
            operator,
            pcoll.windowing,
            union,
            job._limits,
            saved_uid,
            migration,
        )
        same: Any = beam.Map(_same)
        if restoring and pcoll.is_bounded and reads_in_one_bundle(pcoll.pipeline):
            # Elements wait for this, the end of the records, so that no key has to keep what comes
            # before its record.
            nothing = DeclareWindowing(NothingFn(), Windowing(GlobalWindows()))
            end = saved | "Restored" >> nothing.with_output_types(bytes)
            same = beam.Map(_same, AsIter(end))
        live = pcoll | "Live" >> same.with_output_types(union)
        return (live, saved) | "WithRestored" >> beam.Flatten()

    def _check_kept(self) -> None:
        """Refuses what comes with an element and cannot be kept, where elements wait."""
        asked = self._signature.process.comes_with_elements
        job, fn = self._job, type(self._fn).__name__
        if asked is None:
            return
        if self._time_sorted:
            why, way_out = "time_sorted=True makes elements wait for their turn", "take that out"
        elif job._epochs.every is not None and job._aligned:
            why = "with `every` and alignment='exactly_once' elements wait for their epoch"
            way_out = "take alignment='at_least_once', or one checkpoint at the end (every=None)"
        else:
            return
        raise PipelineRefusedError(
            f"operator {self._uid!r}: {fn}.process gets {asked}, which comes with an element and "
            f"cannot be kept, and {why}. What to do: {way_out}; or do this work in a ParDo of its "
            "own: join a side input upstream of the operator, finalize downstream of it."
        )

    def _saved_records(
        self, operator: OperatorState, saved_uid: str, migration: OperatorMigration | None
    ) -> SavedRecords | None:
        job = self._job
        if self._signature.process.comes_with_elements is None:
            return None
        assert job.restored is not None
        read = ReadGroupFn(
            job._store, operator, operator.lateness, job._limits, saved_uid, migration
        )
        return SavedRecords(read, job.restored.id, job.restored.key_group_count)

    def _check_saved(self, operator: OperatorState, saved_uid: str) -> OperatorMigration | None:
        """Compares the operator with what was saved of it; returns what turns that into it."""
        job = self._job
        assert job.restored is not None
        saved = None
        if job.restored.pipeline is not None:
            saved = job.restored.pipeline.operators.get(saved_uid)
        if saved is None:
            return None
        where = f"checkpoint {job.restored.id} of {job._store.url}"
        migrated = [cell for uid, cell in job._migrations if uid == self._uid]
        check_compatible(saved, operator.spec(), self._uid, where, job._on_missing, migrated)
        return plan_migration(saved, operator, job._migrations)

    def _check_can_save_all(self) -> None:
        job = self._job
        what = (
            f"operator {self._uid!r} has another uid, or a cell that is migrated or given up, so "
            "that"
        )
        if takes_over_a_running_job(job._pipeline):
            raise PipelineRefusedError(
                f"{what} its state is restored in another form, and the job that is updated in "
                "place keeps its own. What to do: stop the job and start another one, which "
                "restores its checkpoint."
            )
        if job.resume_at is None and job._epochs.every is not None:
            raise PipelineRefusedError(
                f"{what} all of its state has to be saved anew, and after a drained input `every` "
                "leaves no first boundary to do that at. What to do: run once without `every`; or "
                "rename, or drop the cell, by `beam-ckpt rewrite`."
            )

    def _output_types(self, input_type: Any) -> dict[str | None, Any]:
        """Type hints of the outputs by tag (`None`: the main one)."""
        for hints in (self.get_type_hints(), self._fn.get_type_hints()):
            if hints.output_types and hints.output_types[0]:
                main = hints.simple_output_type(self._uid)
                return {None: main, **hints.tagged_output_types()}
        return {None: self._fn.infer_output_type(input_type) or typehints.Any}


class _TrackOffsets(beam.PTransform[Any, Any]):
    """Passes its input on; its other output is the positions, on their way to the committer."""

    def __init__(
        self,
        job: Checkpoints,
        uid: str,
        partition: Callable[[Any], str | int],
        offset: Callable[[Any], int],
        source_type: str,
        disorder: int,
    ) -> None:
        super().__init__()
        check_uid(uid, "TrackOffsets", "source")
        if isinstance(disorder, bool) or not isinstance(disorder, int) or disorder < 0:
            raise PipelineRefusedError(
                f"TrackOffsets {uid!r}: disorder={disorder!r}. What to do: give a number of "
                "offsets, 0 where a partition comes in order."
            )
        self._job, self._uid, self._source_type = job, uid, source_type
        self._partition, self._offset, self._disorder = partition, offset, disorder

    def default_label(self) -> str:
        return f"TrackOffsets({self._uid})"

    def expand(self, pcoll: Any) -> Any:
        job, uid = self._job, self._uid
        job._claim_uid(uid)
        outputs = pcoll | "Summarise" >> beam.ParDo(
            SummariseFn(uid, self._partition, self._offset, job._epochs)
        ).with_output_types(pcoll.element_type, **{OFFSETS: Summary}).with_outputs(
            OFFSETS, main="main"
        )
        job._sources[uid] = self._source_type
        resume_at = job.resume_at
        track = OffsetsFn(
            uid,
            job._epochs,
            None if resume_at is None else resume_at.micros,
            job.resume_offsets[uid],
            self._disorder,
        )
        job._offsets.append(
            outputs[OFFSETS]
            | "Global" >> beam.WindowInto(GlobalWindows())
            | "Alone" >> AloneInItsStage()
            | "Track" >> beam.ParDo(track).with_output_types(_RECORD)
        )
        return outputs["main"]


class CheckpointedParDo(beam.PTransform[Any, Any]):
    """A `beam.ParDo` of a stateful DoFn that can be stopped and started again anywhere.

    Args:
        fn: The author's DoFn, unchanged.
        *args: Static arguments of ``process``, as in `beam.ParDo`.
        uid: The operator's identity; keep it, whatever else changes.
        store: See `Checkpoints`.
        time_sorted: Give the DoFn its elements in event-time order per key, ties by their encoded
            value; then its outputs are the same on every runner.
        every: See `Checkpoints`. So are `until`, `restore`, `keep`, `key_groups`, `alignment`,
            `late`, `on_fallback`, `on_missing`, `migrations`, `renamed`, `max_files_per_group`,
            `inline_threshold` and `shared_threshold`.
        **kwargs: Static arguments of ``process``.

    Returns:
        The main output, or what `with_outputs` asked for.

    Raises:
        PipelineRefusedError: `fn`, what it asks for, its input or a setting cannot be right.
        CheckpointError: The store cannot be used, or restored from.
    """

    def __init__(
        self,
        fn: beam.DoFn,
        *args: Any,
        uid: str | None = None,
        store: str | os.PathLike[str] | CheckpointStore | None = None,
        every: Seconds | None = None,
        until: Seconds | None = None,
        restore: str | int = "latest",
        keep: int | RetentionPolicy = 3,
        key_groups: int = 128,
        time_sorted: bool = False,
        alignment: Literal["exactly_once", "at_least_once"] = "exactly_once",
        late: Literal["drop", "reprocess"] = "drop",
        on_fallback: Literal["refuse", "accept"] = "refuse",
        on_missing: Literal["error", "drop"] = "error",
        migrations: Migrations | None = None,
        renamed: Mapping[str, str] | None = None,
        max_files_per_group: int = 8,
        inline_threshold: int = 0,
        shared_threshold: int = SHARED_THRESHOLD,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        _check_author(fn, args, kwargs, uid)
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self._uid, self._store, self._time_sorted = uid, store, time_sorted
        self._settings: dict[str, Any] = {
            "every": every,
            "until": until,
            "restore": restore,
            "keep": keep,
            "key_groups": key_groups,
            "alignment": alignment,
            "late": late,
            "on_fallback": on_fallback,
            "on_missing": on_missing,
            "migrations": migrations,
            "renamed": renamed,
            "max_files_per_group": max_files_per_group,
            "inline_threshold": inline_threshold,
            "shared_threshold": shared_threshold,
        }
        self._outputs: tuple[tuple[str, ...], str | None] | None = None

    def with_outputs(self, *tags: str, main: str | None = None) -> CheckpointedParDo:
        """Gives access to tagged outputs, as `beam.ParDo.with_outputs`."""
        result = copy.copy(self)
        result._outputs = tags, main
        return result

    def default_label(self) -> str:
        return f"CheckpointedParDo({type(self._fn).__name__})"

    def default_type_hints(self) -> Any:
        return _type_hints(self._fn)

    def infer_output_type(self, input_type: Any) -> Any:
        return self._fn.infer_output_type(input_type)

    def display_data(self) -> dict[str, Any]:
        return _display_data(self._fn, str(self._uid))

    def expand(self, pcoll: Any) -> Any:
        job = Checkpoints(pcoll.pipeline, self._store, **self._settings)
        operator = job.ParDo(
            self._fn, *self._args, uid=self._uid, time_sorted=self._time_sorted, **self._kwargs
        )
        operator.get_resource_hints().update(self.get_resource_hints())
        hints = self.get_type_hints()
        if hints.output_types and hints.output_types[0]:
            operator = operator.with_output_types(hints.simple_output_type(str(self._uid)))
        if self._outputs is not None:
            tags, main = self._outputs
            operator = operator.with_outputs(*tags, main=main)
        result = pcoll | "Operator" >> operator
        job._finish()
        return result


# ---------------------------------------------------------------------- checks and small parts
def _check_author(
    fn: beam.DoFn, args: tuple[Any, ...], kwargs: dict[str, Any], uid: str | None
) -> Signature:
    signature = read_signature(fn, args, kwargs)
    check_uid(uid, type(fn).__name__, "operator")
    return signature


def check_uid(uid: object, name: str, kind: str) -> None:
    if not uid or not isinstance(uid, str):
        raise PipelineRefusedError(
            f"the {kind} of {name} has no uid (found {uid!r}), and its state is found by it. "
            f"What to do: give uid={name.lower()!r}, or any other name that you will keep."
        )
    if len(uid) > 256:
        raise PipelineRefusedError(
            f"the uid of {name} has {len(uid)} characters, 256 allowed. What to do: shorten it."
        )


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise PipelineRefusedError(
            f"{name}={value!r} is not known. What to do: give one of {_names(choices)}."
        )


def _check_pickles(wrapper: StatefulWrapper, fn: beam.DoFn) -> None:
    try:
        pickler.loads(pickler.dumps(wrapper))
    except Exception as error:
        raise PipelineRefusedError(
            f"{type(fn).__name__} cannot be pickled, and Beam pickles it to the workers: {error}. "
            "What to do: make what it holds (clients, locks, files) in setup()."
        ) from error


def input_coders(pcoll: Any, uid: str) -> tuple[Any, Any]:
    """Key and value coder of the input, or why there is no exact state by such keys."""
    hint = pcoll.element_type
    way_out = (
        "What to do: give the input a type, as in beam.Map(...).with_output_types(tuple[str, int])"
    )
    if hint is None or hint == typehints.Any or not hasattr(hint, "tuple_types"):
        raise PipelineRefusedError(
            f"the input of operator {uid!r} has the type hint {hint!r}, not that of key-value "
            f"pairs, so its keys have no deterministic coder. {way_out}."
        )
    coder = registry.get_coder(hint)
    if not coder.is_kv_coder():
        raise PipelineRefusedError(
            f"the input of operator {uid!r} ({hint!r}) is not of key-value pairs. {way_out}."
        )
    key_coder = coder.key_coder()
    if not key_coder.is_deterministic():
        raise PipelineRefusedError(
            f"the keys of operator {uid!r} have the coder {key_coder!r}, which is not "
            "deterministic: equal keys may have other bytes in another process, and the state of "
            f"a key would be lost. {way_out}."
        )
    for part in _parts(key_coder):
        if isinstance(part, coders.FloatCoder):
            raise PipelineRefusedError(
                f"the keys of operator {uid!r} hold floats, of which 0.0 equals -0.0 with other "
                "bytes and NaN does not equal itself. What to do: key by an int or a string."
            )
        if isinstance(part, (coders.ListLikeCoder, coders.MapCoder)):
            raise PipelineRefusedError(
                f"the keys of operator {uid!r} hold lists or maps ({part!r}), which cannot be "
                "hashed. What to do: key by tuples."
            )
    return key_coder, coder.value_coder()


def _parts(coder: Any) -> Iterable[Any]:
    yield coder
    parts = list(coder._get_component_coders())
    parts += list(getattr(coder, "components", ()))
    for part in parts:
        yield from _parts(part)


def event_time(name: str, value: Seconds | None) -> int | None:
    if value is None:
        return None
    try:
        if isinstance(value, float):
            # To the nearest microsecond: 1.001 is 1,001 ms, whatever its binary fraction.
            value = Timestamp(micros=round(value * 1_000_000))
        micros = value.micros if isinstance(value, Duration) else Timestamp.of(value).micros
    except (TypeError, ValueError, OverflowError) as error:
        raise PipelineRefusedError(
            f"{name}={value!r} is no event time: {error}. What to do: give seconds."
        ) from error
    if micros % MS:
        raise PipelineRefusedError(
            f"{name}={value!r} is no whole number of milliseconds, which is all that Beam's "
            "runners tell apart. What to do: round it."
        )
    if not -DRAINED < micros < DRAINED:
        raise PipelineRefusedError(
            f"{name}={value!r} is outside the global window. What to do: give a time in it."
        )
    return int(micros)


def _type_hints(fn: beam.DoFn) -> Any:
    """The author's hints; of what `process` takes only the element is an input of the transform."""
    hints = fn.get_type_hints()
    if hints.input_types is None:
        return hints
    return hints._replace(input_types=(hints.input_types[0][:1], {}))


def _display_data(fn: beam.DoFn, uid: str) -> dict[str, Any]:
    return {
        "fn": DisplayDataItem(type(fn), label="Transform Function"),
        "fn_dd": fn,
        "uid": DisplayDataItem(uid, label="Checkpoint uid"),
    }


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))


def _same(element: Any, _: Any = None) -> Any:
    return element


def _start(_: bytes) -> tuple[int, tuple[int, bytes]]:
    return START


class _RouteFn(beam.DoFn):
    """Snapshots on their way to the writer, which is in the global window."""

    def __init__(self, uid: str) -> None:
        self._uid = uid

    def process(
        self, element: tuple[int, tuple[int, bytes]], timestamp: Any = beam.DoFn.TimestampParam
    ) -> Iterable[Any]:
        key_group, dated = element
        routed = (self._uid, key_group), dated
        yield WindowedValue(routed, timestamp, (GlobalWindow(),), PANE_INFO_UNKNOWN)
