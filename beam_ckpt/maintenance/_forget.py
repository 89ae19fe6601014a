"""One key's state out of everything that a store keeps.

Files and manifests never change, so each checkpoint that holds the key is replaced: its files are
written again without the key, under new names, and a new checkpoint lists them, of the same cut,
under a new id. Then the tags move and the old ones are deleted. The order of these steps makes it
safe to stop anywhere:

1. The store is claimed: a run that is still going cannot publish any more.
2. The files are written. Nobody lists them yet.
3. The new manifests are saved, oldest first, so that ids ascend as the cuts do. They are no
   recovery points yet.
4. They are finalized, the newest first: whatever happens in between, the newest recovery point is
   one of the newest cut.
5. The tags move, each in one step.
6. The old checkpoints are deleted as a prune does it, and with them the files that only they list.
7. Files that no checkpoint lists, left by runs that were killed, are looked through too.

Run again it goes on where it stood: what step 4 has replaced says so in its manifest.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from beam_ckpt._keys import encode_key
from beam_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidCheckpointError,
)
from beam_ckpt.inspect._catalog import AnyStore, nearest, open_existing
from beam_ckpt.inspect._state import is_key
from beam_ckpt.keygroups import key_group
from beam_ckpt.maintenance._publish import highest_epoch, new_run_id, prepare
from beam_ckpt.manifest import (
    MAX_INLINE_BYTES,
    CheckpointManifest,
    OperatorSnapshotEntry,
    PartitionSnapshotEntry,
    RunIdentity,
    SidecarEntry,
    new_checkpoint_id,
)
from beam_ckpt.sidecar import decode_sidecar, encode_sidecar
from beam_ckpt.store._blobstore import BlobCheckpointStore

__all__ = ["ForgetReport", "forget"]

# A run that has claimed nothing yet, such as one that bootstraps, may still publish its files.
_GRACE_MS = 86_400_000
# So long nobody takes to write a file.
_WRITING_S = 60
_RUN = "forget"


@dataclass(frozen=True)
class ForgetReport:
    """What `forget` touched, or with `dry_run` would touch.

    Attributes:
        operator: The uid.
        holding: Ids of the checkpoints that held the key.
        replaced: Old and new id of each checkpoint that was replaced: those that held the key, and
            younger ones, which have to stay younger. The new id is `None` for a dry run.
        deleted: Ids of checkpoints that went and have no replacement: attempts that were never
            finalized, and what an earlier, interrupted `forget` had replaced.
        tags: Names of the tags that moved with them.
        rows: Rows of the key in the files that were written again, tombstones among them.
        files: Files that were written again, or went with the key in them.
        unlisted: Files of no checkpoint that held the key, or could not be read, and went.
        left: What may still hold the key and is not this command's to delete: path and reason.
        dry_run: Whether nothing was changed.
    """

    operator: str
    holding: tuple[int, ...]
    replaced: tuple[tuple[int, int | None], ...]
    deleted: tuple[int, ...]
    tags: tuple[str, ...]
    rows: int
    files: int
    unlisted: tuple[str, ...]
    left: tuple[tuple[str, str], ...]
    dry_run: bool

    @property
    def found(self) -> bool:
        """Whether there was anything of the key."""
        return bool(self.holding or self.deleted or self.unlisted or self.left)


def forget(
    store: AnyStore,
    uid: str,
    key: object,
    *,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ForgetReport:
    """Removes one key's state, timers and held outputs from everything that a store keeps.

    Each checkpoint that holds the key, and each younger one, is replaced by one of the same cut
    with a new id; restoring an old id says which. Tags move. Everything else of these checkpoints
    stays what it was.

    Stop the pipeline first: it is fenced, so that it cannot publish any more, but it may still
    write a file that nobody lists. Safe to stop at any point and to run again, which finishes it.

    Only this operator's rows of this key go: not what values of other keys or operators say of it,
    not what a source replays, not copies of the store, nor what a bucket keeps of deleted objects
    (object versions, soft delete).

    Args:
        store: A path, a URL or a store.
        uid: The operator.
        key: As for `beam_ckpt.inspect.state`; bytes are the encoded key where its coder is not one
            of the known ones.
        dry_run: Only say what would be touched.
        progress: Called with (checkpoints done, checkpoints in all).

    Raises:
        CheckpointNotFoundError: There is no store, or nothing in it of such an operator.
        InvalidCheckpointError: A checkpoint is damaged, so that nobody can tell whether it holds
            the key: nothing was changed. Delete it (`beam-ckpt prune`), or copy it back whole.
        FencedError: A younger run has claimed the store.
        ValueError: `key` cannot be a key of this operator.
    """
    opened = open_existing(store)
    if not isinstance(opened, BlobCheckpointStore):
        raise TypeError(f"{opened!r} does not stand on blobs: remove the key by its own means")
    job = _Forgetting(opened, uid, key, progress)
    found = job.survey()
    if dry_run or not found.anything:
        return job.report(found, dry_run=dry_run)
    return job.run()


@dataclass
class _Found:
    """What a survey saw.

    Attributes:
        chain: Finalized checkpoints that nothing has replaced, ascending.
        others: All that are not in the chain.
        superseded: Ids of those that an earlier run has replaced.
        attempts: Ids of attempts that were never finalized and may hold the key, or are those of
            an interrupted run of this command.
        holding: Ids of the chain and of the attempts that hold the key.
        files: Rows of the key by the name of each listed file that holds it.
        unlisted: Files of no checkpoint that go.
        left: Files that do not, with the reason.
        tags: Names of tags by id.
    """

    chain: list[CheckpointManifest]
    others: list[CheckpointManifest]
    superseded: set[int]
    attempts: set[int] = field(default_factory=set)
    holding: set[int] = field(default_factory=set)
    files: dict[str, int] = field(default_factory=dict)
    unlisted: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    tags: dict[str, int] = field(default_factory=dict)

    @property
    def anything(self) -> bool:
        return bool(self.holding or self.superseded or self.attempts or self.unlisted)

    def identities(self) -> dict[str, str]:
        """The new `checkpoint_id` by the old one, of what is replaced and of what stood for it."""
        new = {m.checkpoint_id: new_checkpoint_id() for m in self.replace}
        by_id = {id: m.checkpoint_id for m in self.chain for id in (m.id, *m.replaces)}
        for other in self.others:
            same = [by_id[id] for id in (other.id, *other.replaces) if id in by_id]
            if same:
                new[other.checkpoint_id] = new.get(same[0], same[0])
        return new

    @property
    def replace(self) -> list[CheckpointManifest]:
        """Those to replace: from the first that holds the key on."""
        held = [i for i, manifest in enumerate(self.chain) if manifest.id in self.holding]
        return self.chain[held[0] :] if held else []


class _Forgetting:
    """One run of the command."""

    def __init__(
        self,
        store: BlobCheckpointStore,
        uid: str,
        key: object,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._store, self._uid, self._key = store, uid, key
        self._progress = progress
        self._run_id = new_run_id(_RUN)
        self._rows: dict[str, int] = {}  # of the key, by file
        self._places: dict[str, list[int]] = {}  # of these rows, by shared file
        self._written: dict[str, SidecarEntry] = {}

    # -- looking -----------------------------------------------------------------------------

    def survey(self) -> _Found:
        """Reads what may hold the key. Changes nothing."""
        store = self._store
        manifests = [m for m in map(self._readable, store.list_ids()) if m is not None]
        finalized = [m for m in manifests if m.durable_phase == "finalized"]
        superseded = {old for m in finalized for old in m.replaces}
        chain = [m for m in finalized if m.id not in superseded]
        found = _Found(
            chain, [m for m in manifests if m not in chain], superseded & {m.id for m in manifests}
        )
        found.tags = dict(store.tags())
        self._check_known(manifests)
        for manifest in found.chain:
            for entry in self._entries(manifest):
                if self._count(entry, manifest):
                    found.holding.add(manifest.id)
                    found.files[_name(entry)] = self._rows[_name(entry)]
        for manifest in manifests:
            if manifest.durable_phase == "finalized" or manifest.id in superseded:
                continue
            for entry in self._entries(manifest):
                try:
                    held = self._count(entry, manifest)
                except CheckpointError:  # it was being deleted, or never came to be
                    held = 1
                if held:
                    found.attempts.add(manifest.id)
                    found.holding.add(manifest.id)
            if manifest.run and manifest.run.run_id.startswith(_RUN):  # that was interrupted
                found.attempts.add(manifest.id)
        self._look_through_unlisted(manifests, found)
        return found

    def _readable(self, id: int) -> CheckpointManifest | None:
        try:
            return self._store.load_by_id(id)
        except InvalidCheckpointError as error:
            raise self._undecided(f"checkpoint {id}", error) from error

    def _undecided(self, what: str, error: Exception) -> InvalidCheckpointError:
        return InvalidCheckpointError(
            f"{what} of {self._store.url} is damaged, so that nobody can tell whether it holds the "
            f"key ({error}). Nothing was changed. What to do: copy it back from where it is whole, "
            "or delete it (`beam-ckpt prune`, or by hand), then run this again."
        )

    def _check_known(self, manifests: Sequence[CheckpointManifest]) -> None:
        known: set[str] = set()
        for manifest in manifests:
            known |= {*manifest.operators, *(manifest.pipeline or _NO_PIPELINE).operators}
            if manifest.durable_phase == "finalized":
                self._encoded(manifest)  # raises for what is no key
        if self._uid not in known and not self._listed_blobs():
            names = ", ".join(map(repr, sorted(known))) or "no operators"
            raise CheckpointNotFoundError(
                f"{self._store.url} has nothing of an operator {self._uid!r}; it has {names}"
                f"{nearest(self._uid, known)}"
            )

    def _encoded(self, manifest: CheckpointManifest) -> bytes | None:
        specs = manifest.pipeline.operators if manifest.pipeline else {}
        spec = specs.get(self._uid)
        return None if spec is None else self._bytes_of(spec.key_coder)

    def _bytes_of(self, coder: str) -> bytes | None:
        encoded = encode_key(coder, self._key)
        return self._key if encoded is None and isinstance(self._key, bytes) else encoded

    def _entries(self, manifest: CheckpointManifest) -> Iterator[SidecarEntry]:
        """The files that could hold the key."""
        encoded = self._encoded(manifest)
        group = None if encoded is None else key_group(encoded, manifest.key_group_count)
        operator = manifest.operators.get(self._uid, OperatorSnapshotEntry())
        shared: dict[str | None, SidecarEntry] = {}
        for partition in operator.partitions:
            for entry in partition.sidecars:
                # It may hold rows that no key group has in use any more.
                if entry.is_shared:
                    shared[entry.path] = entry
                elif group is None or partition.partition_id == group:
                    yield entry
        yield from shared.values()

    def _count(self, entry: SidecarEntry, manifest: CheckpointManifest) -> int:
        """Rows of the key in a file."""
        name = _name(entry)
        if name not in self._rows:
            encoded = self._encoded(manifest)
            try:
                data = self._store.read_sidecar(entry)
                if entry.is_shared:
                    table = decode_sidecar(data, where=name)[1]
                    places = _places(_mask(table, encoded, self._key))
                    self._places[name], self._rows[name] = places, len(places)
                    return len(places)
                table = decode_sidecar(data, where=name, key=encoded)[1]
            except (InvalidCheckpointError, CheckpointNotFoundError) as error:
                raise self._undecided(f"{name}, a file of checkpoint {manifest.id},", error) from (
                    error
                )
            if encoded is None:
                table = table.filter(is_key(table["key"], self._key))
            self._rows[name] = len(table)
        return self._rows[name]

    def _listed_blobs(self) -> list[str]:
        prefix = self._store._paths.operator(self._uid)
        with self._store._io("listing", prefix):
            return [meta.key for meta in self._store.blobs.list(prefix)]

    def _look_through_unlisted(
        self, manifests: Sequence[CheckpointManifest], found: _Found
    ) -> None:
        store, paths = self._store, self._store._paths
        present = self._listed_blobs()
        # After the listing: what a checkpoint has come to list in between is none of these.
        listed = {paths.object(p) for m in manifests for p in m.sidecar_paths()}
        claimed = {store._read_claim(generation).run_id for generation in store._claims()}
        now = time.time_ns() // 1_000_000
        for key in present:
            if key in listed:
                continue
            name = paths.parse_sidecar(key)
            held = self._unlisted_holds(key)
            if not held:
                continue
            if name.run_id is None and name.saved_id is None:
                found.left.append((key, "not a name that this library writes: see what it is"))
            elif (
                name.run_id is not None
                and name.run_id not in claimed
                and now - (name.written_ms or now) < _GRACE_MS
            ):
                why = f"run {name.run_id} may still publish it: stop it, then run this again"
                found.left.append((key, why))
            else:
                found.unlisted.append(key)
        # What a writer that was killed left of an object: of which one, its name does not tell.
        with store._io("listing", ""):
            old, every = (store.blobs.temporaries(age) for age in (_WRITING_S, 0))
        found.unlisted += [meta.key for meta in old if meta.key.startswith(paths.base)]
        for meta in every:
            if meta.key.startswith(paths.base) and meta.key not in found.unlisted:
                why = "is being written, or its writer has died: run this again in a minute"
                found.left.append((meta.key, why))

    def _unlisted_holds(self, key: str) -> bool:
        """Whether a file of no checkpoint holds the key, or cannot be read."""
        found = self._store._get(key, self._store.max_state_data_bytes)
        if found is None:
            return False
        try:
            header, table = decode_sidecar(found[0], where=key)
        except CheckpointError:
            return True
        encoded = None
        with contextlib.suppress(ValueError):  # saved by a pipeline that had other keys
            encoded = self._bytes_of(header.key_coder)
            mask = _mask(table, encoded, self._key)
            return bool(pc.any(mask).as_py())
        return False

    # -- changing ----------------------------------------------------------------------------

    def run(self) -> ForgetReport:
        """Claims the store and carries it out."""
        store = self._store
        newest = store.recover_latest_validated(deep=False).chosen_id
        generation = store.claim_generation(self._run_id, restored_from=newest)
        run = RunIdentity(generation=generation, run_id=self._run_id)
        # From here on nothing that ran before can be published; what has been until now is seen.
        found = self.survey()
        replaced = self._replace(found, run)
        self._point_at_newest()
        successors = {old: new for new in store.list_ids() for old in self._replaced_by(new)}
        moved = []
        for name, id in store.tags().items():
            if id in successors:
                store.move_tag(name, successors[id])
                moved.append(name)
        store.check_generation(generation, self._run_id)
        doomed = {*found.superseded, *found.attempts, *replaced}
        gone = store.delete_checkpoints(doomed) if doomed else None
        left = list(found.left)
        for id in sorted(doomed & set(store.list_ids())):
            left.append((f"checkpoint {id}", "a tag or a run has come to need it: run this again"))
        store._delete(found.unlisted)
        self._rows = {name: rows for name, rows in self._rows.items() if rows}
        report = self.report(found, dry_run=False, replaced=replaced, moved=tuple(moved), left=left)
        if gone is not None:
            # Nothing is left, or it is said.
            again = self.survey()
            more = [(key, "written meanwhile: run this again") for key in again.unlisted]
            left += [item for item in [*again.left, *more] if item not in left]
            report = self.report(
                found, dry_run=False, replaced=replaced, moved=tuple(moved), left=left
            )
        return report

    def _replace(self, found: _Found, run: RunIdentity) -> dict[int, int]:
        """Steps 2 to 4. Returns the new id by the old one."""
        store = self._store
        if not found.replace:
            return {}
        epoch = highest_epoch(store)
        identities = found.identities()
        prepared: list[tuple[int, int]] = []
        for number, old in enumerate(found.replace, 1):
            epoch += 1
            operators = self._without_key(old)
            fields = dict(old) | {
                "checkpoint_id": identities[old.checkpoint_id],
                "parent_id": old.parent_id and identities.get(old.parent_id, old.parent_id),
                "epoch": epoch,
                "operators": operators,
                "total_size_bytes": 0,
                "durable_phase": "prepared",
                "run": run,
                "replaces": (*old.replaces, old.id),
            }

            def make(id: int, fields: dict[str, object] = fields) -> CheckpointManifest:
                return CheckpointManifest.model_validate(fields | {"id": id})

            prepared.append((old.id, prepare(store, run, make).id))
            if self._progress is not None:
                self._progress(number, len(found.replace))
        for _, new in reversed(prepared):
            store.check_generation(run.generation, run.run_id)
            store.finalize(new)
        return dict(prepared)

    def _without_key(self, old: CheckpointManifest) -> dict[str, OperatorSnapshotEntry]:
        operators = dict(old.operators)
        mine = operators.get(self._uid)
        if mine is None:
            return operators
        partitions = []
        for partition in mine.partitions:
            left = [entry.rows - self._rows_in(entry) for entry in partition.sidecars]
            if not any(left):
                continue
            # A delta of no rows says nothing; an empty base is what deltas stand on.
            chain = tuple(
                self._cleaned(entry, old) if self._rows.get(_name(entry)) else entry
                for entry, rows in zip(partition.sidecars, left, strict=True)
                if rows or entry.kind == "full"
            )
            partitions.append(
                PartitionSnapshotEntry(partition_id=partition.partition_id, sidecars=chain)
            )
        operators[self._uid] = OperatorSnapshotEntry(partitions=tuple(partitions))
        return operators

    def _rows_in(self, entry: SidecarEntry) -> int:
        """Rows of the key in a file, or in a slice of one."""
        # (Files of other key groups were not looked at: they cannot hold it.)
        if not entry.is_shared:
            return self._rows.get(_name(entry), 0)
        first, rows = entry.row_range
        return self._before(entry, first + rows) - self._before(entry, first)

    def _before(self, entry: SidecarEntry, row: int) -> int:
        return bisect.bisect_left(self._places.get(_name(entry), ()), row)

    def _cleaned(self, entry: SidecarEntry, manifest: CheckpointManifest) -> SidecarEntry:
        """The file again, without the key; once, whoever lists it. Of a shared one, the slice."""
        written = self._rewritten(entry, manifest)
        if not entry.is_shared:
            return written
        first, rows = entry.row_range
        left = rows - self._rows_in(entry)
        own = entry.own_bytes * left // max(rows, 1)
        return entry.model_copy(
            update={
                "slice_bytes": min(own, written.size_bytes),
                "path": written.path,
                "size_bytes": written.size_bytes,
                "crc32c": written.crc32c,
                "sha256": written.sha256,
                "file_rows": written.rows,
                "first_row": first - self._before(entry, first),
                "rows": left,
            }
        )

    def _rewritten(self, entry: SidecarEntry, manifest: CheckpointManifest) -> SidecarEntry:
        name = _name(entry)
        if name not in self._written:
            header, table = decode_sidecar(self._store.read_sidecar(entry), where=name)
            mask = _mask(table, self._encoded(manifest), self._key)
            kept = table.filter(pc.invert(mask))
            written = self._store.write_sidecar(
                operator=self._uid,
                key_group=header.key_group,
                boundary=entry.boundary,
                run_id=self._run_id,
                data=encode_sidecar(kept, header),
                kind=entry.kind,
                rows=len(kept),
                inline_threshold=-1 if entry.inline is None else MAX_INLINE_BYTES,
            )
            self._written[name] = written.model_copy(update={"epoch": entry.epoch})
        return self._written[name]

    def _point_at_newest(self) -> None:
        """A run that was killed may have left the pointer at what is to be deleted."""
        store = self._store
        newest = store.recover_latest_validated(deep=False).chosen_id
        try:
            latest = store.load_latest()
        except InvalidCheckpointError:
            latest = None
        if newest is not None and (latest is None or latest.id != newest):
            store.repair_pointer()

    def _replaced_by(self, id: int) -> tuple[int, ...]:
        manifest = self._store.load_by_id(id)
        if manifest is None or manifest.durable_phase != "finalized":
            return ()
        return manifest.replaces

    # -- saying ------------------------------------------------------------------------------

    def report(
        self,
        found: _Found,
        *,
        dry_run: bool,
        replaced: dict[int, int] | None = None,
        moved: tuple[str, ...] | None = None,
        left: list[tuple[str, str]] | None = None,
    ) -> ForgetReport:
        """What was found, and done."""
        new = replaced or {}
        going = {m.id for m in found.replace} | found.superseded
        tags = tuple(sorted(name for name, id in found.tags.items() if id in going))
        return ForgetReport(
            operator=self._uid,
            holding=tuple(sorted(found.holding)),
            replaced=tuple((m.id, new.get(m.id)) for m in found.replace),
            deleted=tuple(sorted(found.superseded | found.attempts)),
            tags=tags if moved is None else moved,
            rows=sum(found.files.values()),
            files=len(found.files),
            unlisted=tuple(found.unlisted),
            left=tuple(found.left if left is None else left),
            dry_run=dry_run,
        )


def _name(entry: SidecarEntry) -> str:
    return entry.path or f"inline state {entry.sha256}"


def _mask(table: pa.Table, encoded: bytes | None, key: object) -> pa.ChunkedArray:
    """Which rows are the key's."""
    if encoded is not None:
        return pc.equal(table["_key"], encoded)
    return is_key(table["key"], key)


def _places(mask: pa.ChunkedArray) -> list[int]:
    """Where it is true."""
    found: list[int] = pc.indices_nonzero(mask).to_pylist()
    return found


class _NoPipeline:
    operators: frozenset[str] = frozenset()


_NO_PIPELINE = _NoPipeline()
