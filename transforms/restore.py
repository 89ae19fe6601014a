"""From a manifest back to keys: which checkpoint to restore, and the branch that brings it.

Which checkpoint it is, is decided while the pipeline is built (`plan_restore`): a fresh start pays
for nothing. The branch is one task per key group; its records stay at ``MIN_TIMESTAMP``, so that
the operator's watermark cannot pass the gate before the last of them has been processed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import apache_beam as beam
import pyarrow as pa
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Duration, Timestamp
from apache_beam.utils.windowed_value import PANE_INFO_UNKNOWN, WindowedValue

from beam_ckpt.errors import (
    CheckpointNotFoundError,
    FallbackRefusedError,
    InvalidCheckpointError,
    NoValidCheckpointError,
    PipelineRefusedError,
    StateIncompatibleError,
    UnsupportedFormatError,
)
from beam_ckpt.manifest import CheckpointManifest, OperatorSpec
from beam_ckpt.recovery import RecoveryReport
from beam_ckpt.sidecar import SharedRows, stream_chain
from beam_ckpt.store import CheckpointStore
from beam_ckpt.transforms._limits import DEFAULT_LIMITS, Limits
from beam_ckpt.transforms.chunks import cut
from beam_ckpt.transforms.columns import OperatorState
from beam_ckpt.transforms.elements import Restored
from beam_ckpt.transforms.migrations import OperatorMigration
from beam_ckpt.transforms.runners import DeclareWindowing
from beam_ckpt.transforms.snapshot import SnapshotRecord
from beam_ckpt.transforms.windows import is_over, left_over

__all__ = ["ReadGroupFn", "ReadSaved", "RestorePlan", "check_compatible", "plan_restore"]

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestorePlan:
    """What a run starts from.

    Attributes:
        manifest: The checkpoint to restore, or `None` for a fresh start.
        passed_over: Damaged checkpoints that are newer than it.
    """

    manifest: CheckpointManifest | None
    passed_over: int = 0

    @property
    def resume_at(self) -> Timestamp | None:
        """The boundary restored at: replay from there.

        `None`: from the start, or, after a drained input, new data only.
        """
        if self.manifest is None or self.manifest.boundary is None:
            return None
        return Timestamp(micros=self.manifest.boundary)


def plan_restore(
    store: CheckpointStore,
    restore: str | int,
    *,
    until: int | None,
    on_fallback: Literal["refuse", "accept"],
    streaming: bool = False,
) -> RestorePlan:
    """Decides which checkpoint a run starts from.

    Args:
        store: Where the checkpoints are.
        restore: ``"latest"`` (the newest valid one), ``"drained"``, ``"fresh"`` (none, whatever
            there is), or the id or a tag of one.
        until: The run's last boundary, µs. A run with one was given its input for the newest
            boundary, so that it must not quietly start from an older one.
        on_fallback: What to do then: ``"refuse"`` or ``"accept"``.
        streaming: ``"latest"`` passes over checkpoints that were taken while a stream was drained,
            as long as there is another; ``"drained"`` does not.

    Raises:
        NoValidCheckpointError: There are checkpoints and none is valid.
        FallbackRefusedError: The newest is damaged, an older one is valid, and `until` is given.
        CheckpointNotFoundError: No checkpoint of that id or tag.
        UnsupportedFormatError: A newer version of this library wrote a newer checkpoint: that is no
            damage.
        InvalidCheckpointError: The checkpoint of that id or tag is not valid.
        PipelineRefusedError: `restore` is none of these.
    """
    if restore == "fresh":
        return RestorePlan(None)
    if isinstance(restore, int) and not isinstance(restore, bool):
        return RestorePlan(_by_id(store, restore))
    if not isinstance(restore, str) or not restore:
        raise PipelineRefusedError(
            f"restore={restore!r} is not known. What to do: give 'latest', 'drained', 'fresh', or "
            "the id or a tag of a checkpoint."
        )
    if restore not in ("latest", "drained"):
        return RestorePlan(_by_id(store, _tagged(store, restore)))
    report = store.recover_latest_validated()
    damaged = [skipped for skipped in report.skipped if skipped.phase == "invalid"]
    _refuse_newer_formats(store, report, damaged)
    if report.chosen is None:
        if damaged:
            raise NoValidCheckpointError(
                f"{store.url} has {report.examined} checkpoints and none is valid: "
                f"{_reasons(damaged)}. What to do: see `beam-ckpt validate`; bring back the files "
                "from a copy, or start afresh by restore='fresh', which is your word that the "
                "saved state may be given up.",
                report=report,
            )
        return RestorePlan(None)
    if damaged:
        _fall_back(store, report, damaged, until, on_fallback)
    chosen = report.chosen
    if streaming and restore == "latest" and chosen.drained:
        chosen = _before_the_drain(store, chosen)
    return RestorePlan(chosen, len(damaged))


def _refuse_newer_formats(
    store: CheckpointStore, report: RecoveryReport, passed_over: list[Any]
) -> None:
    """Refuses to pass over what a newer version of this library can read."""
    for skipped in passed_over:
        try:
            if store.final_marker(skipped.id) is not None:
                store.load_by_id(skipped.id)
        except UnsupportedFormatError as error:
            way_out = f"give {report.chosen_id}" if report.chosen_id else "give 'fresh'"
            raise UnsupportedFormatError(
                f"{error}; or, to go back behind it, {way_out} as `restore`"
            ) from error
        except InvalidCheckpointError:
            pass  # damaged, for which it is passed over


def _before_the_drain(store: CheckpointStore, newest: CheckpointManifest) -> CheckpointManifest:
    """The newest valid checkpoint that was not taken while a stream was drained, if there is one.

    An older one is always exact: it only replays more.
    """
    for checkpoint_id in reversed(store.list_ids()):
        if checkpoint_id >= newest.id:
            continue
        try:
            manifest = store.load_by_id(checkpoint_id)
        except InvalidCheckpointError:
            continue
        if (
            manifest is not None
            and manifest.durable_phase == "finalized"
            and not manifest.drained
            and store.validate_checkpoint(checkpoint_id).valid
        ):
            _LOGGER.info(
                "checkpoint %d was taken while its stream was drained; restoring %d, of before: "
                "replay from its boundary on (restore='drained' takes the newest)",
                newest.id, checkpoint_id,
            )  # fmt: skip
            return manifest
    _LOGGER.warning(
        "%s: every checkpoint was taken while its stream was drained; restoring the newest, %d. A "
        "source that replays from the start would apply its data again.", store.url, newest.id,
    )  # fmt: skip
    return newest


def _tagged(store: CheckpointStore, name: str) -> int:
    tags = store.tags()
    if name not in tags:
        known = ", ".join(repr(tag) for tag in list(tags)[:20]) or "none"
        raise CheckpointNotFoundError(
            f"restore={name!r}: {store.url} has no such tag (its tags: {known}). What to do: give "
            "'latest', 'fresh', the id of a checkpoint as a number, or one of its tags."
        )
    return tags[name]


def _by_id(store: CheckpointStore, checkpoint_id: int) -> CheckpointManifest:
    manifest = store.load_by_id(checkpoint_id)
    if manifest is None:
        if (successor := store.successor(checkpoint_id)) is not None:
            raise CheckpointNotFoundError(
                f"checkpoint {checkpoint_id} of {store.url} was replaced by {successor}, of the "
                "same cut, when keys were removed from it by `beam-ckpt forget`. What to do: "
                f"restore {successor}."
            )
        known = ", ".join(str(i) for i in store.list_ids()[-10:]) or "none"
        raise CheckpointNotFoundError(
            f"{store.url} has no checkpoint {checkpoint_id} (the last ones: {known}). "
            "What to do: see `beam-ckpt ls`."
        )
    result = store.validate_checkpoint(checkpoint_id)
    if not result.valid or manifest.durable_phase != "finalized":
        issues = "; ".join(str(issue) for issue in result.issues) or "it was never finalized"
        raise InvalidCheckpointError(
            f"checkpoint {checkpoint_id} of {store.url} cannot be restored: {issues}. "
            "What to do: choose another one, see `beam-ckpt ls` and `beam-ckpt validate`."
        )
    return manifest


def _fall_back(
    store: CheckpointStore,
    report: RecoveryReport,
    damaged: list[Any],
    until: int | None,
    on_fallback: str,
) -> None:
    chosen = report.chosen
    assert chosen is not None
    newest = damaged[0].boundary
    text = (
        f"{store.url}: checkpoint {damaged[0].id} (boundary {_boundary(newest)}) is damaged; the "
        f"newest valid one is {chosen.id} (boundary {_boundary(chosen.boundary)}). Passed over: "
        f"{_reasons(damaged)}"
    )
    if until is not None and on_fallback != "accept":
        raise FallbackRefusedError(
            f"{text}. This run has an `until`, so its input was chosen for the newest boundary. "
            "What to do: give it input from the older boundary on and on_fallback='accept', or "
            "bring back the damaged files.",
            newest_boundary=newest if isinstance(newest, int) else None,
            chosen_boundary=chosen.boundary,
            report=report,
        )
    _LOGGER.warning("%s. Restoring the older one: replay from its boundary on.", text)


def _reasons(damaged: list[Any]) -> str:
    return "; ".join(f"{skipped.id}: {skipped.reason}" for skipped in damaged)


def _boundary(boundary: int | str | None) -> str:
    if boundary is None:
        return "the drained end"
    return str(Timestamp(micros=boundary)) if isinstance(boundary, int) else boundary


def check_compatible(
    saved: OperatorSpec,
    declared: OperatorSpec,
    uid: str,
    where: str,
    on_missing: str,
    migrated: Collection[str] = (),
) -> None:
    """Compares an operator with what was saved of it.

    Args:
        saved: The operator as it was saved.
        declared: As it is now.
        uid: Its uid.
        where: The checkpoint.
        on_missing: What becomes of saved cells that are gone: ``"error"`` or ``"drop"``.
        migrated: Names of cells that may have another coder or kind, as there is a migration.

    Raises:
        StateIncompatibleError: A coder or a cell's kind is another one, or a saved cell is gone and
            `on_missing` is not ``"drop"``. Names the cell, both sides and the way out.
    """

    def refuse(what: str, way_out: str) -> None:
        raise StateIncompatibleError(f"{where}: operator {uid!r}: {what}. What to do: {way_out}.")

    back = "go back to the saved one, or start afresh by restore='fresh'"
    if saved.key_coder != declared.key_coder:
        refuse(
            f"keys were saved with {saved.key_coder} and the input's coder is "
            f"{declared.key_coder}", f"{back}; see the type hints of the input",
        )  # fmt: skip
    if saved.window_coder != declared.window_coder:
        refuse(
            f"windows were saved with {saved.window_coder} and are now {declared.window_coder}",
            back,
        )
    # (What was saved before windows were recorded does not say.)
    if saved.windows and saved.windows != declared.windows:
        refuse(
            f"the input was in the windows of {saved.windows} (times in microseconds) and is now "
            f"in those of {declared.windows}, so that saved state would belong to windows that no "
            "element is in",
            f"{back}; or carry the state over by ReadState | beam.WindowInto | WriteState",
        )
    for name, cell in saved.cells.items():
        now = declared.cells.get(name)
        if now is None:
            if on_missing != "drop":
                refuse(
                    f"cell {name!r} was saved and the DoFn has no such cell",
                    "put it back, or give it up by on_missing='drop'",
                )
        elif name not in migrated and not now.same_form(cell):
            before, after = f"with {cell.coder}", now.coder
            if now.kind != cell.kind:
                before, after = f"as {cell.kind}", f"{now.kind}"
                if now.coder != cell.coder:
                    before, after = f"{before} of {cell.coder}", f"{after} of {now.coder}"
            refuse(
                f"cell {name!r} was saved {before} and is now {after}",
                f"say how a saved value becomes a new one, by migrations={{({uid!r}, {name!r}): "
                "fn}; or give the saved ones up, or another name, by `beam-ckpt rewrite` "
                "(--drop-cell, --rename-cell)",
            )


class ReadSaved(beam.PTransform[Any, Any]):
    """An operator's saved records: KV of key and `Restored`, in their own windows.

    Args:
        store: Where the checkpoint is.
        manifest: The checkpoint, or `None` for an operator that has nothing to restore.
        operator: As it is now.
        windowing: Of the operator's live input.
        output_type: The type hint of the operator's input.
        limits: Of what is in memory, and in one element, at a time.
        saved_uid: The operator's uid when it was saved, where that was another one.
        migration: What turns saved records into the operator's, if they are not.
    """

    def __init__(
        self,
        store: CheckpointStore,
        manifest: CheckpointManifest | None,
        operator: OperatorState,
        windowing: Any,
        output_type: Any,
        limits: Limits = DEFAULT_LIMITS,
        saved_uid: str | None = None,
        migration: OperatorMigration | None = None,
    ) -> None:
        super().__init__()
        self._store, self._manifest, self._operator = store, manifest, operator
        self._saved_uid, self._migration = saved_uid or operator.uid, migration
        self._windowing, self._output_type = windowing, output_type
        self._limits = limits

    def expand(self, pbegin: Any) -> Any:
        groups: list[tuple[int, int]] = []
        if self._manifest is not None:
            saved = self._manifest.operators[self._saved_uid]
            groups = [(self._manifest.id, partition.partition_id) for partition in saved.partitions]
        lateness = Duration.of(self._windowing.allowed_lateness).micros
        read = ReadGroupFn(
            self._store,
            self._operator,
            lateness,
            self._limits,
            self._saved_uid,
            self._migration,
        )
        return (
            pbegin
            | beam.Impulse()
            | "KeyGroups" >> beam.ParDo(_GroupsFn(groups)).with_output_types(tuple[int, int])
            | beam.Reshuffle()
            | "Read" >> DeclareWindowing(read, self._windowing).with_output_types(self._output_type)
        )


def _rows(source: OperatorState, pages: Iterable[pa.Table]) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yields the encoded key, the record and the encoded window of each row."""
    for page in pages:
        windows = page.column("_window").to_pylist()
        for (key, record), window in zip(source.to_encoded(page), windows, strict=True):
            yield key, record, window


class _GroupsFn(beam.DoFn):
    def __init__(self, groups: list[tuple[int, int]]) -> None:
        self._groups = groups

    def process(self, element: Any) -> Iterator[tuple[int, int]]:
        yield from self._groups


class ReadGroupFn(beam.DoFn):
    """(checkpoint, key group) to the group's live records, newest per key and window.

    Large ones come in chunks.
    """

    def __init__(
        self,
        store: CheckpointStore,
        operator: OperatorState,
        lateness: int,
        limits: Limits = DEFAULT_LIMITS,
        saved_uid: str | None = None,
        migration: OperatorMigration | None = None,
    ) -> None:
        self._store, self._operator, self._lateness = store, operator, lateness
        self._limits = limits
        self._saved_uid, self._migration = saved_uid or operator.uid, migration
        self._manifest: CheckpointManifest | None = None
        self._shared_rows = SharedRows()

    @property
    def operator(self) -> OperatorState:
        """As it is now."""
        return self._operator

    def process(self, element: tuple[int, int]) -> Iterator[Any]:
        decode_key = self._operator.key_coder.decode
        for key, window, record in self.records(*element):
            decoded_key = decode_key(key)
            for data in cut(record, self._limits.chunk_bytes):
                yield WindowedValue(
                    (decoded_key, Restored(data)), MIN_TIMESTAMP, (window,), PANE_INFO_UNKNOWN
                )

    def records(self, checkpoint_id: int, key_group: int) -> Iterator[tuple[bytes, Any, bytes]]:
        """Yields the encoded key, the window and the whole record of each key and window."""
        if self._manifest is None or self._manifest.id != checkpoint_id:
            self._manifest = self._store.load_by_id(checkpoint_id)
        if self._manifest is None:
            raise CheckpointNotFoundError(
                f"checkpoint {checkpoint_id} of {self._store.url} is gone since this pipeline was "
                "built. What to do: build it again, so that it takes the newest one."
            )
        operator = self._operator
        migration = self._migration
        source = operator if migration is None else migration.saved
        saved = self._manifest.operators[self._saved_uid]
        sidecars = next((p.sidecars for p in saved.partitions if p.partition_id == key_group), ())
        if not sidecars:
            return
        stream = stream_chain(
            sidecars, self._store.read_sidecar, source.schema, shared=self._shared_rows
        )
        boundary = self._manifest.boundary
        for key, record, window in _rows(source, stream.pages):
            decoded = operator.window_coder.decode(window)
            if is_over(decoded, boundary, self._lateness):
                left = left_over(SnapshotRecord.from_bytes(record), boundary)
                if left is None:
                    continue
                record = left.to_bytes()
            if migration is not None:
                record = migration.record(record)
            yield key, decoded, record
