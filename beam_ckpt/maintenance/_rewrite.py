"""One checkpoint into another: operators, cells, key groups and rows changed, values as they are.

In memory are a page of rows, the deltas of one key group, and one file of it. Where the number of
key groups changes, rows wait on the local disk in between.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from beam_ckpt.errors import (
    CheckpointConflictError,
    CheckpointNotFoundError,
    FallbackRefusedError,
    InvalidCheckpointError,
    NoValidCheckpointError,
)
from beam_ckpt.inspect._catalog import AnyStore, At, find_checkpoint, nearest, open_existing
from beam_ckpt.inspect._duckdb import StateView
from beam_ckpt.inspect._readable import Reading, readable_rows
from beam_ckpt.keygroups import check_key_group_count, key_group
from beam_ckpt.maintenance._publish import highest_epoch, new_run_id, publish
from beam_ckpt.manifest import (
    CheckpointManifest,
    OperatorSnapshotEntry,
    OperatorSpec,
    PartitionSnapshotEntry,
    RunIdentity,
    SidecarEntry,
    new_checkpoint_id,
)
from beam_ckpt.sidecar import (
    CellColumn,
    PageStream,
    SharedRows,
    SidecarHeader,
    cell_column_name,
    encode_pages,
    latest_in_order,
    sidecar_schema,
    stream_chain,
)
from beam_ckpt.sidecar._decode import SidecarFile
from beam_ckpt.sidecar._order import one_array
from beam_ckpt.sidecar._stream import merge_pages
from beam_ckpt.store import CheckpointStore

__all__ = ["RewriteReport", "RewrittenOperator", "rewrite"]

_OWN = ("_key", "_window", "_deleted", "_updated", "_timers", "_carried")
_AS_JSON = Reading("json")
# In memory, of the rows of a file; what is over goes into another file of the same key group.
_FILE_BYTES = 128 * 1024 * 1024
_Group = tuple[int, Iterable[pa.Table]]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class RewrittenOperator:
    """What became of one operator.

    Attributes:
        operator: Its uid now.
        was: Its uid before.
        rewritten: Whether its files were written anew; else the old ones are listed again.
        rows: How many it has now, one for each key and window.
        expired: Rows that went by `ttl`.
        matched: Rows that went by `drop_where`.
        timers: Pending timers that went with them.
    """

    operator: str
    was: str
    rewritten: bool
    rows: int
    expired: int = 0
    matched: int = 0
    timers: int = 0


@dataclass(frozen=True)
class RewriteReport:
    """What `rewrite` did, or with `dry_run` would do.

    Attributes:
        base_id: The checkpoint that was rewritten, which is as it was.
        id: The new one; `None` for a dry run.
        boundary: The cut of both, event time in microseconds; `None` for the drained end.
        operators: Those of the new one.
        dropped_operators: Uids that went.
        key_groups: Of the new one.
        files: Written for it.
        bytes: Their sum.
        dry_run: Whether nothing was written.
    """

    base_id: int
    id: int | None
    boundary: int | None
    operators: tuple[RewrittenOperator, ...]
    dropped_operators: tuple[str, ...]
    key_groups: int
    files: int
    bytes: int
    dry_run: bool


def rewrite(
    store: AnyStore,
    *,
    at: At = "latest",
    rename_operators: Mapping[str, str] | None = None,
    drop_operators: Collection[str] = (),
    rename_cells: Mapping[tuple[str, str], str] | None = None,
    drop_cells: Collection[tuple[str, str]] = (),
    key_groups: int | None = None,
    ttl: float | Mapping[str, float] | None = None,
    as_of: datetime | None = None,
    drop_where: Mapping[str, str] | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> RewriteReport:
    """Writes a checkpoint with changed state into a new checkpoint of the same store.

    The old one is left as it is. The new one has the same cut and source offsets, a new id, the old
    one as its parent, and is the newest: the pipeline goes on from it. Whatever is said of an
    operator or cell is said by the names that they have before.

    Stop the pipeline first. When all files are written the store becomes this rewrite's, and a run
    that is still going is fenced: it cannot publish any more. If it has published meanwhile,
    nothing of this is published.

    Args:
        store: A path, a URL or a store.
        at: The id of the checkpoint; `latest` is the newest valid one.
        rename_operators: New uid by uid.
        drop_operators: Uids of operators to leave out.
        rename_cells: New name by (uid, cell).
        drop_cells: (uid, cell) of cells to leave out; keys that have nothing else go with them.
        key_groups: Into how many parts state is divided; `None`: as before.
        ttl: Seconds of event time: rows whose last update is longer ago than that are dropped,
            with their timers. For all operators, or by uid.
        as_of: What "ago" is measured from; the cut without it. Needed after a drained input.
        drop_where: A condition in SQL (DuckDB) by uid: rows for which it is true are dropped, with
            their timers. Its columns are those of `beam-ckpt sql`.
        dry_run: Read and count, and write nothing.
        progress: Called with (key groups done, key groups in all).

    Outputs that a dropped row carries beyond the cut are kept: they were emitted before it went.

    Raises:
        CheckpointNotFoundError: No store, or no such checkpoint, operator or cell; names the
            nearest.
        FallbackRefusedError: `latest`, and a newer checkpoint is damaged.
        CheckpointConflictError: Something was published meanwhile; or two operators or two cells
            would have one name.
        FencedError: A younger run has claimed the store.
        InvalidCheckpointError: A file is damaged, or the checkpoint does not say its coders.
        ValueError: A setting cannot be right, or DuckDB refuses a condition.
        ImportError: DuckDB is needed for `drop_where`: ``pip install 'beam-ckpt[sql]'``.
    """
    opened = open_existing(store)
    base = _base(opened, at)
    job = _Rewriting(
        opened,
        base,
        dict(rename_operators or {}),
        frozenset(drop_operators),
        dict(rename_cells or {}),
        frozenset(drop_cells),
        base.key_group_count if key_groups is None else check_key_group_count(key_groups),
        dict(drop_where or {}),
        dry_run,
        progress,
    )
    job.expire(ttl, as_of)
    job.check()
    with tempfile.TemporaryDirectory(prefix="beam-ckpt-rewrite-") as scratch:
        operators = job.run(Path(scratch))
    published = None if dry_run else job.publish(operators, newest=at == "latest")
    return RewriteReport(
        base.id,
        None if published is None else published.id,
        base.boundary,
        tuple(job.reports),
        tuple(sorted(job.drop_operators)),
        job.key_groups,
        job.files,
        job.bytes,
        dry_run,
    )


def _base(store: CheckpointStore, at: At) -> CheckpointManifest:
    if at != "latest":
        manifest = find_checkpoint(store, at)
        if manifest.durable_phase != "finalized":
            raise CheckpointNotFoundError(
                f"checkpoint {at} of {store.url} was never finalized: see `beam-ckpt ls`"
            )
        return manifest
    report = store.recover_latest_validated(deep=False)
    damaged = [skipped for skipped in report.skipped if skipped.phase == "invalid"]
    if report.chosen is None:
        if damaged:
            raise NoValidCheckpointError(
                f"no checkpoint in {store.url} is valid: see `beam-ckpt recover`", report
            )
        raise CheckpointNotFoundError(f"no checkpoint in {store.url} yet")
    if damaged:
        raise FallbackRefusedError(
            f"checkpoint {damaged[0].id} of {store.url} is damaged ({damaged[0].reason}); the "
            f"newest valid one is {report.chosen.id}. What to do: bring back the damaged files, or "
            f"say at={report.chosen.id} (--at {report.chosen.id}).",
            chosen_boundary=report.chosen.boundary,
            report=report,
        )
    return report.chosen


@dataclass
class _Rewriting:
    """One rewrite under way."""

    store: CheckpointStore
    base: CheckpointManifest
    rename_operators: dict[str, str]
    drop_operators: frozenset[str]
    rename_cells: dict[tuple[str, str], str]
    drop_cells: frozenset[tuple[str, str]]
    key_groups: int
    drop_where: dict[str, str]
    dry_run: bool
    progress: Callable[[int, int], None] | None
    # Micros, by uid: rows that were last updated before are dropped.
    expire_before: dict[str, int] = field(default_factory=dict)
    reports: list[RewrittenOperator] = field(default_factory=list)
    files: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        self.run_id = new_run_id("rewrite")
        self.where = f"checkpoint {self.base.id} of {self.store.url}"
        self.specs = dict(self.base.pipeline.operators) if self.base.pipeline else {}
        self.uids = sorted({*self.base.operators, *self.specs})
        self._done = self._total = 0

    # -- what is asked for -----------------------------------------------------------------

    def expire(self, ttl: float | Mapping[str, float] | None, as_of: datetime | None) -> None:
        """Says which rows are too old."""
        if ttl is None:
            return
        if as_of is None:
            now = self.base.boundary
        elif as_of.tzinfo is None:
            raise ValueError(f"as_of={as_of!r} has no time zone: give one, such as UTC")
        else:
            since = as_of - _EPOCH
            now = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
        if now is None:
            raise ValueError(
                f"{self.where} stands at the end of a drained input, which is no time that ages "
                "can be measured from: give as_of (--as-of)"
            )
        ages = dict(ttl) if isinstance(ttl, Mapping) else dict.fromkeys(self._kept(), ttl)
        for uid, seconds in ages.items():
            if not 0 <= seconds < 1e12:
                raise ValueError(f"a ttl of {seconds!r} seconds: give 0 or more")
            self._known_operator(uid)
            self.expire_before[uid] = now - round(seconds * 1_000_000)

    def check(self) -> None:
        """Refuses what cannot be done, before anything is read."""
        for uid in (*self.rename_operators, *self.drop_operators, *self.drop_where):
            self._known_operator(uid)
        for uid, cell in (*self.rename_cells, *self.drop_cells):
            self._known_cell(uid, cell)
        gone = self.drop_operators & {
            *self.rename_operators, *self.drop_where, *self.expire_before,
            *(uid for uid, _ in (*self.rename_cells, *self.drop_cells)),
        }  # fmt: skip
        if gone:
            raise ValueError(f"operator {min(gone)!r} is dropped and changed: take one of the two")
        if both := self.drop_cells & self.rename_cells.keys():
            raise ValueError(f"cell {min(both)[1]!r} is dropped and renamed: take one of the two")
        _no_twins([self._name(uid) for uid in self._kept()], f"operators of {self.where}")
        for name in self.rename_operators.values():
            if not 1 <= len(name) <= 256:
                raise ValueError(f"{name[:80]!r} is no uid: it needs 1 to 256 characters")
        for uid in self._kept():
            if not self._changes(uid):
                continue
            if uid not in self.specs:
                raise InvalidCheckpointError(
                    f"{self.where} does not say the coders of operator {uid!r}, which a rewrite "
                    "has to write down again: it was not written by a pipeline"
                )
            names = [self.rename_cells.get((uid, cell), cell) for cell in self._cells(uid)]
            _no_twins(names, f"cells of operator {uid!r}")
            if not all(names):
                raise ValueError("a cell needs a name")
        self._conditions = {
            uid: _Condition(self.store, self.base, uid, sql) for uid, sql in self.drop_where.items()
        }

    def _kept(self) -> list[str]:
        return [uid for uid in self.uids if uid not in self.drop_operators]

    def _name(self, uid: str) -> str:
        return self.rename_operators.get(uid, uid)

    def _cells(self, uid: str) -> list[str]:
        """Names of the cells that stay."""
        return [cell for cell in self.specs[uid].cells if (uid, cell) not in self.drop_cells]

    def _changes(self, uid: str) -> bool:
        """Whether the files of an operator cannot be listed as they are."""
        changed = {
            *self.rename_operators, *self.expire_before, *self.drop_where,
            *(own for own, _ in (*self.rename_cells, *self.drop_cells)),
        }  # fmt: skip
        return uid in changed or self.key_groups != self.base.key_group_count

    def _known_operator(self, uid: str) -> None:
        if uid not in self.uids:
            names = ", ".join(map(repr, self.uids)) or "no operators"
            raise CheckpointNotFoundError(
                f"{self.where} has no operator {uid!r}; it has {names}{nearest(uid, self.uids)}"
            )

    def _known_cell(self, uid: str, cell: str) -> None:
        self._known_operator(uid)
        known = list(self.specs[uid].cells) if uid in self.specs else []
        if cell not in known:
            names = ", ".join(map(repr, known)) or "none"
            raise CheckpointNotFoundError(
                f"operator {uid!r} in {self.where} has no cell {cell!r}; it has {names}"
                f"{nearest(cell, known)}"
            )

    # -- doing it --------------------------------------------------------------------------

    def run(self, scratch: Path) -> dict[str, OperatorSnapshotEntry]:
        """Reads and writes all state; returns what the new manifest lists, without epochs."""
        entries: dict[str, OperatorSnapshotEntry] = {}
        changed = [uid for uid in self._kept() if self._changes(uid)]
        regroups = self.key_groups != self.base.key_group_count
        groups = [p for uid in changed for p in self._partitions(uid)]
        self._total = len(groups) + (len(changed) * self.key_groups if regroups else 0)
        for uid in self._kept():
            if uid not in changed:
                entries[uid] = self.base.operators.get(uid, OperatorSnapshotEntry())
                # Rows of all files: a key that is in several counts once for each.
                rows = sum(s.rows for p in entries[uid].partitions for s in p.sidecars)
                self.reports.append(RewrittenOperator(uid, uid, False, rows))
                continue
            self._report = RewrittenOperator(self._name(uid), uid, True, 0)
            partitions = []
            if self._partitions(uid):
                saved = self._schema(uid)
                schema = self._renamed(uid, saved.empty_table()).schema
                pages = self._changed(uid, saved)
                if regroups:
                    folder = scratch / f"{len(self.reports)}"
                    folder.mkdir()
                    pages = self._regrouped(pages, schema, folder)
                for group, rows_of in pages:
                    sidecars = tuple(self._write(uid, group, rows_of, schema))
                    if sidecars:
                        partitions.append(
                            PartitionSnapshotEntry(partition_id=group, sidecars=sidecars)
                        )
                    self._step()
            entries[self._name(uid)] = OperatorSnapshotEntry(partitions=tuple(partitions))
            self.reports.append(self._report)
        return entries

    def _partitions(self, uid: str) -> tuple[PartitionSnapshotEntry, ...]:
        return self.base.operators.get(uid, OperatorSnapshotEntry()).partitions

    def _schema(self, uid: str) -> pa.Schema:
        """The columns of an operator's rows: a cell's type is that of its newest file."""
        wanted = [cell_column_name(cell) for cell in self.specs[uid].cells]
        entries = [entry for p in self._partitions(uid) for entry in p.sidecars]
        entries.sort(key=lambda entry: entry.epoch or 0, reverse=True)
        key: pa.DataType | None = None
        types: dict[str, pa.DataType] = {}
        seen: set[str] = set()
        for entry in entries:
            if key is not None and len(types) == len(wanted):
                break
            if entry.path in seen:  # key groups share it
                continue
            if entry.path is not None:
                seen.add(entry.path)
            where = entry.path or "inline state"
            found = SidecarFile(self.store.read_sidecar(entry), where=where).schema
            key = found.field("key").type if key is None else key
            for name in wanted:
                if name in found.names:
                    types.setdefault(name, found.field(name).type)
        # A cell that no file has a column for is empty in every row.
        return sidecar_schema(key, [(name, types[name]) for name in wanted if name in types])

    def _changed(self, uid: str, schema: pa.Schema) -> Iterator[_Group]:
        """The key groups of an operator, with new names and without the rows that go."""
        shared = SharedRows()
        for partition in self._partitions(uid):
            rows = stream_chain(partition.sidecars, self.store.read_sidecar, schema, shared=shared)
            changed = (self._renamed(uid, self._without(uid, page)) for page in rows.pages)
            yield partition.partition_id, changed

    def _without(self, uid: str, rows: pa.Table) -> pa.Table:
        goes = pa.chunked_array([pa.array([False] * len(rows), pa.bool_())])
        expired = matched = 0
        if uid in self.expire_before:
            limit = pa.scalar(self.expire_before[uid], pa.int64()).cast(rows["_updated"].type)
            goes = pc.less(rows["_updated"], limit)
            expired = _count(goes)
        if uid in self._conditions:
            found = self._conditions[uid].of(rows)
            matched = _count(pc.and_not(found, goes))
            goes = pc.or_(goes, found)
        if not expired and not matched:
            return rows
        timers = pc.sum(pc.list_value_length(rows["_timers"].filter(goes))).as_py() or 0
        self._report = replace(
            self._report,
            expired=self._report.expired + expired,
            matched=self._report.matched + matched,
            timers=self._report.timers + timers,
        )
        kept = rows.filter(pc.invert(goes))
        left = _carried_beyond(rows.filter(goes), self.base.boundary)
        return kept if not len(left) else latest_in_order(pa.concat_tables([kept, left]))

    def _renamed(self, uid: str, rows: pa.Table) -> pa.Table:
        columns, names = [rows["key"]], ["key"]
        for cell in self._cells(uid):
            column = cell_column_name(cell)
            if column in rows.column_names:
                columns.append(rows[column])
                names.append(cell_column_name(self.rename_cells.get((uid, cell), cell)))
        cells = columns[1:]
        for name in _OWN:
            columns.append(rows[name])
            names.append(name)
        fields = [
            pa.field(name, column.type, nullable=name not in _OWN[:4])
            for name, column in zip(names, columns, strict=True)
        ]
        table = pa.table(columns, schema=pa.schema(fields))
        if not any(own == uid for own, _ in self.drop_cells):
            return table
        something = pc.or_(pc.is_valid(rows["_timers"]), pc.is_valid(rows["_carried"]))
        for column in cells:
            something = pc.or_(something, pc.is_valid(column))
        return table.filter(something)

    def _regrouped(
        self, groups: Iterator[_Group], schema: pa.Schema, folder: Path
    ) -> Iterator[_Group]:
        """The same rows in their new key groups, by way of files: one for each old group."""
        # New group -> file of an old group -> which of its batches.
        places: dict[int, dict[Path, list[int]]] = {}
        for old, pages in groups:
            path, batches = folder / f"{old}.arrow", 0
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                for page in pages:
                    now = [key_group(key, self.key_groups) for key in page["_key"].to_pylist()]
                    of_rows = pa.array(now, pa.int32())
                    for group in sorted(set(now)):
                        part = page.filter(pc.equal(of_rows, group))
                        columns = [one_array(column) for column in part.columns]
                        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
                        places.setdefault(group, {}).setdefault(path, []).append(batches)
                        batches += 1
            self._step()
        for group in range(self.key_groups):
            held = places.get(group, {})
            streams = [PageStream(schema, _batches(path, held[path])) for path in held]
            yield group, merge_pages(streams, schema).pages if streams else ()

    def _write(
        self, uid: str, group: int, pages: Iterable[pa.Table], schema: pa.Schema
    ) -> Iterator[SidecarEntry]:
        """The files of a key group: one, unless it has more state than should be in memory."""
        spec, boundary = self.specs[uid], self.base.boundary
        cells = []
        for cell in self._cells(uid):
            name = self.rename_cells.get((uid, cell), cell)
            column = cell_column_name(name)
            if column in schema.names:
                saved = spec.cells[cell]
                cells.append(CellColumn(name, column, saved.kind, saved.coder))
        header = SidecarHeader(
            operator=self._name(uid),
            key_group=group,
            boundary=boundary,
            kind="full",
            key_coder=spec.key_coder,
            window_coder=spec.window_coder,
            cells=tuple(cells),
        )
        for data, rows in encode_pages(pages, header, schema, file_bytes=_FILE_BYTES):
            if not rows:
                continue
            self._report = replace(self._report, rows=self._report.rows + rows)
            self.files += 1
            self.bytes += len(data)
            if self.dry_run:
                path = f"state/dry/{self.files}"
                digest = "0" * 64
                yield SidecarEntry(
                    path=path, kind="full", rows=rows, size_bytes=len(data), crc32c=0, sha256=digest
                )
                continue
            yield self.store.write_sidecar(
                operator=self._name(uid),
                key_group=group,
                boundary=boundary,
                run_id=self.run_id,
                data=data,
                kind="full",
                rows=rows,
            )

    def _step(self) -> None:
        self._done += 1
        if self.progress is not None:
            self.progress(self._done, self._total)

    # -- publishing ------------------------------------------------------------------------

    def publish(
        self, operators: dict[str, OperatorSnapshotEntry], *, newest: bool
    ) -> CheckpointManifest:
        """Claims the store and publishes; nothing was touched before."""
        generation = self.store.claim_generation(self.run_id, restored_from=self.base.id)
        run = RunIdentity(generation=generation, run_id=self.run_id)
        if newest:
            report = self.store.recover_latest_validated(deep=False)
            if report.chosen_id != self.base.id:
                raise CheckpointConflictError(
                    f"{self.store.url} has checkpoint {report.chosen_id} now, and had "
                    f"{self.base.id} when this began. Nothing was published. What to do: stop what "
                    "writes to it, which is fenced now, then run this again."
                )
        epoch = max(self.base.epoch, highest_epoch(self.store)) + 1
        stamped = {uid: _stamped(entry, epoch) for uid, entry in operators.items()}
        pipeline = self.base.pipeline
        if pipeline is not None:
            specs = {self._name(u): self._spec(u) for u in self._kept() if u in self.specs}
            pipeline = pipeline.model_copy(update={"operators": specs})
        offsets = {
            uid: source.model_copy(update={"epoch": epoch})
            for uid, source in self.base.source_offsets.items()
        }

        def make(id: int) -> CheckpointManifest:
            return CheckpointManifest(
                checkpoint_id=new_checkpoint_id(),
                id=id,
                epoch=epoch,
                timestamp_ms=time.time_ns() // 1_000_000,
                operators=stamped,
                source_offsets=offsets,
                parent_id=self.base.checkpoint_id,
                watermark=self.base.watermark,
                participant_id=self.base.participant_id,
                key_group_count=self.key_groups,
                run=run,
                pipeline=pipeline,
                drained=self.base.drained,
            )

        return publish(self.store, run, make)

    def _spec(self, uid: str) -> OperatorSpec:
        spec = self.specs[uid]
        cells = {self.rename_cells.get((uid, c), c): spec.cells[c] for c in self._cells(uid)}
        return spec.model_copy(update={"cells": cells})


class _Condition:
    """A condition in SQL on the rows of one operator."""

    def __init__(
        self, store: CheckpointStore, manifest: CheckpointManifest, uid: str, sql: str
    ) -> None:
        """Asks DuckDB whether it understands it.

        Raises:
            ValueError: It does not.
        """
        try:
            import duckdb
        except ImportError as error:
            raise ImportError(
                "DuckDB is not installed. What to do: pip install 'beam-ckpt[sql]'"
            ) from error
        self._engine, self._manifest, self._uid, self._sql = duckdb, manifest, uid, sql
        self._schema = StateView(store, manifest, uid, _AS_JSON).schema
        self._true_of(self._schema.empty_table())

    def of(self, rows: pa.Table) -> pa.ChunkedArray:
        """Tells for which rows it is true; not for those of which it is neither true nor false."""
        shown = readable_rows(rows, self._manifest, self._uid, _AS_JSON)
        columns = [
            shown[f.name] if f.name in shown.column_names else pa.nulls(len(shown), f.type)
            for f in self._schema
        ]
        true = self._true_of(pa.table(columns, schema=self._schema))
        flags = pc.is_in(pa.array(range(len(rows)), pa.int64()), value_set=true)
        return pa.chunked_array([flags])

    def _true_of(self, rows: pa.Table) -> pa.Array:
        numbered = rows.append_column("_row", pa.array(range(len(rows)), pa.int64()))
        connection = self._engine.connect()
        try:
            connection.register("rows", numbered)
            # (A line of its own, for a condition that ends with a comment.)
            found = connection.sql(f"SELECT _row FROM rows WHERE ({self._sql}\n)")
            if found is None:
                _no_condition(self._uid, self._sql, "it is none")
            return found.to_arrow_table()["_row"].combine_chunks().cast(pa.int64())
        except self._engine.Error as error:
            _no_condition(self._uid, self._sql, str(error).strip())
        finally:
            connection.close()


def _no_condition(uid: str, sql: str, why: str) -> NoReturn:
    raise ValueError(f"the condition {sql!r:.200} on operator {uid!r}: {why}")


def _no_twins(names: list[str], what: str) -> None:
    twins = {name for name in names if names.count(name) > 1}
    if twins:
        raise CheckpointConflictError(
            f"two {what} would be named {min(twins)!r}. What to do: take another name, or drop one."
        )


def _batches(path: Path, numbers: Sequence[int]) -> Iterator[pa.Table]:
    """Some batches of a file, in order."""
    with pa.memory_map(str(path)) as source:
        file = pa.ipc.open_file(source)
        for number in numbers:
            yield pa.Table.from_batches([file.get_batch(number)])


def _count(flags: pa.ChunkedArray) -> int:
    return pc.sum(flags).as_py() or 0


def _carried_beyond(rows: pa.Table, boundary: int | None) -> pa.Table:
    """Rows with their outputs beyond the cut alone; those that have none are left out."""
    if boundary is None or rows["_carried"].null_count == len(rows):
        return rows.slice(0, 0)
    limit = pa.scalar(boundary, pa.int64()).cast(pa.timestamp("us", "UTC"))
    lists = rows["_carried"].combine_chunks()
    items = pc.list_flatten(lists)
    beyond = pc.greater_equal(pc.struct_field(items, "timestamp"), limit)
    # Ascending, so that the outputs of a row stay together.
    counts = Counter(pc.list_parent_indices(lists).filter(beyond).to_pylist())
    rows = rows.take(pa.array(counts.keys(), pa.int64()))
    ends = pa.array(itertools.accumulate(counts.values(), initial=0), pa.int32())
    carried = pa.ListArray.from_arrays(ends, items.filter(beyond), type=rows["_carried"].type)
    columns = []
    for field_ in rows.schema:
        if field_.name == "_carried":
            columns.append(carried)
        elif field_.name == "key" or field_.name in _OWN[:4]:
            columns.append(rows[field_.name])
        else:
            columns.append(pa.nulls(len(rows), field_.type))
    return pa.table(columns, schema=rows.schema)


def _stamped(entry: OperatorSnapshotEntry, epoch: int) -> OperatorSnapshotEntry:
    """The entry, with the epoch of the checkpoint on what it is the first to list."""
    partitions = tuple(
        PartitionSnapshotEntry(
            partition_id=partition.partition_id,
            sidecars=tuple(
                sidecar
                if sidecar.epoch is not None
                else sidecar.model_copy(update={"epoch": epoch})
                for sidecar in partition.sidecars
            ),
        )
        for partition in entry.partitions
    )
    return OperatorSnapshotEntry(partitions=partitions)
