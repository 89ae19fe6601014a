"""Saved values of another coder or kind than a cell has now, changed one by one at restore.

    ckpt = Checkpoints(p, store, migrations={("totals", "count"): str})

The function is given what the cell held, as `~beam_ckpt.transforms.ReadState` gives it (of a
combining cell its accumulator), and returns what it is to hold, as `WriteState` takes it. It is
called where the saved coder or kind is another one than the DoFn's, and only for cells that hold
something: what has been migrated is left alone, so that the entry may stay in the code.

The saved coder is made from its name, where it is one of Beam's own that does not unpickle. For
another one, it is given with the function: ``{("totals", "count"): (OldCoder(), fn)}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from apache_beam.coders.coders import Coder

from beam_ckpt.errors import PipelineRefusedError, StateIncompatibleError
from beam_ckpt.manifest import CellSpec, OperatorSpec
from beam_ckpt.transforms._recorded import recorded_coder
from beam_ckpt.transforms.columns import CellState, OperatorState, coder_identity
from beam_ckpt.transforms.snapshot import SnapshotRecord
from beam_ckpt.transforms.values import cell_decoder, cell_encoder

__all__ = ["Migrations", "OperatorMigration", "check_migrations", "plan_migration"]

Migrations: TypeAlias = Mapping[
    tuple[str, str], Callable[[Any], Any] | tuple[Coder, Callable[[Any], Any]]
]
"""By (uid, cell): the function, or the coder that the cell was saved with and the function."""


def check_migrations(migrations: Migrations | None) -> dict[tuple[str, str], Any]:
    """Returns migrations that can be read.

    Raises:
        PipelineRefusedError: They are not by (uid, cell), or are no functions.
    """
    way_out = "What to do: give migrations={(uid, cell): fn}, or {(uid, cell): (coder, fn)}."
    if not isinstance(migrations, Mapping | None):
        raise PipelineRefusedError(f"migrations={migrations!r} is no mapping. {way_out}")
    for which, given in (migrations or {}).items():
        named = isinstance(which, tuple) and len(which) == 2 and all(map(_is_text, which))
        fn = given[1] if isinstance(given, tuple) and _with_coder(given) else given
        if not named or not callable(fn):
            raise PipelineRefusedError(f"migrations has {which!r}: {given!r}. {way_out}")
    return dict(migrations or {})


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _with_coder(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Coder)


@dataclass(frozen=True)
class OperatorMigration:
    """What turns an operator's saved records into its own.

    Attributes:
        saved: The operator, with the cells that are migrated as they were.
        now: The operator.
        functions: Of the migrated cells, by name.
    """

    saved: OperatorState
    now: OperatorState
    functions: tuple[tuple[str, Callable[[Any], Any]], ...]

    def record(self, data: bytes) -> bytes:
        """Returns a saved record with its cells migrated.

        Raises:
            StateIncompatibleError: A function failed, or what it gave is nothing for its cell.
        """
        record = SnapshotRecord.from_bytes(data)
        cells = list(record.cells)
        for at, name, decode, fn, encode in self._steps:
            held = cells[at]
            if held is None or held == ():
                cells[at] = encode(None)
                continue
            try:
                new = fn(decode(held))
            except Exception as error:
                raise StateIncompatibleError(
                    f"operator {self.now.uid!r}: the migration of cell {name!r} failed for a key: "
                    f"{type(error).__name__}: {error}. Nothing of this run counts. What to do: "
                    "make it take every value that the cell may have held."
                ) from error
            cells[at] = encode(new)
        return replace(record, cells=tuple(cells)).to_bytes()

    @cached_property
    def _steps(self) -> Sequence[tuple[int, str, Any, Callable[[Any], Any], Any]]:
        steps = []
        by_name = dict(self.functions)
        for at, (before, after) in enumerate(zip(self.saved.cells, self.now.cells, strict=True)):
            if after.name in by_name:
                decode = cell_decoder(before.kind, before.coder.decode)
                steps.append((at, after.name, decode, by_name[after.name], cell_encoder(after)))
        return steps

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def plan_migration(
    saved: OperatorSpec, operator: OperatorState, migrations: Mapping[tuple[str, str], Any]
) -> OperatorMigration | None:
    """Returns how saved records become the operator's; `None` where they are so already.

    Args:
        saved: The operator as it was saved.
        operator: As it is now.
        migrations: As `check_migrations` gives them.

    Raises:
        StateIncompatibleError: The saved coder of a cell is not known, and was not given or is
            another one than was given.
    """
    spec = operator.spec()
    cells, functions = [], []
    for cell in operator.cells:
        before = saved.cells.get(cell.name)
        given = migrations.get((operator.uid, cell.name))
        if before is None or before.same_form(spec.cells[cell.name]) or given is None:
            cells.append(cell)
            continue
        coder, fn = given if _with_coder(given) else (None, given)
        cells.append(CellState(cell.name, before.kind, _coder(before, coder, operator.uid, cell)))
        functions.append((cell.name, fn))
    if not functions:
        return None
    return OperatorMigration(replace(operator, cells=tuple(cells)), operator, tuple(functions))


def _coder(before: CellSpec, given: Coder | None, uid: str, cell: CellState) -> Coder:
    way_out = (
        f"What to do: give the coder that it was saved with, as in migrations={{({uid!r}, "
        f"{cell.name!r}): (OldCoder(), fn)}}."
    )
    if given is not None:
        if coder_identity(given) != before.coder:
            raise StateIncompatibleError(
                f"operator {uid!r}: cell {cell.name!r} was saved with {before.coder}, and its "
                f"migration has {coder_identity(given)}. {way_out}"
            )
        return given
    recorded = recorded_coder(before.coder)
    if recorded is None or not recorded.readable:
        raise StateIncompatibleError(
            f"operator {uid!r}: cell {cell.name!r} was saved with {before.coder}, which cannot be "
            f"made from its name without unpickling what anybody may have written. {way_out}"
        )
    return recorded.coder
