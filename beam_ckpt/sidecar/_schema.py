"""What a sidecar says of itself, and which columns it has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, NoReturn

import pyarrow as pa
from pydantic import Field, TypeAdapter, ValidationError

from beam_ckpt.errors import InvalidCheckpointError, UnsupportedFormatError

__all__ = [
    "FORMAT_VERSION",
    "METADATA_KEY",
    "PATCH",
    "CellColumn",
    "SidecarHeader",
    "cell_column_name",
    "cell_columns",
    "sidecar_schema",
]

FORMAT_VERSION = 3
"""The sidecar format this library writes. It reads every one released so far (1 to 3).

Format 2 has deltas whose rows may hold only what changed (``_patch``). In format 3 the columns of
what most operators have none of (``_timers``, ``_carried``) may be left out, and a file may be one
that key groups share: the rows of one come after those of another.
"""

METADATA_KEY = b"beam_ckpt.sidecar"
"""Of the header, in the metadata of the file."""

_MAX_HEADER_BYTES = 4 * 1024 * 1024

TIME = pa.timestamp("us", tz="UTC")

TIMERS = pa.list_(
    pa.field(
        "element",
        pa.struct(
            [
                pa.field("family", pa.string()),
                pa.field("tag", pa.string()),
                pa.field("domain", pa.string()),
                pa.field("fire", TIME),
                pa.field("output", TIME),
            ]
        ),
    )
)

CARRIED = pa.list_(
    pa.field(
        "element",
        pa.struct(
            [
                pa.field("tag", pa.string()),
                pa.field("timestamp", TIME),
                pa.field("window", pa.binary()),
                pa.field("value", pa.binary()),
            ]
        ),
    )
)

KEY = "key"
"""The column of the key as a value; ``_key`` is its bytes."""

_OWN_FIELDS = (
    pa.field("_key", pa.binary(), nullable=False),
    pa.field("_window", pa.binary(), nullable=False),
    pa.field("_deleted", pa.bool_(), nullable=False),
    pa.field("_updated", TIME, nullable=False),
    pa.field("_timers", TIMERS),
    pa.field("_carried", CARRIED),
)

#: Columns that a file need not have: a row has none of what is in them.
OPTIONAL = ("_timers", "_carried")

PATCH = "_patch"
"""The column, of a delta that has rows which are not whole, that says what each row holds."""

_PATCH_FIELD = pa.field(PATCH, pa.binary())
_NO_CELLS = frozenset({KEY, PATCH, *(field.name for field in _OWN_FIELDS)})

_PREFIX = "cell:"


def cell_column_name(cell: str) -> str:
    """Returns the name of the column that holds a cell; no two cells have the same.

    A cell's column has the cell's name, unless that is the name of a column of ours or could become
    one (``key`` in any case, as SQL engines ignore it; anything that starts with an underscore):
    then, and for names that could be taken for one of these, it is prefixed.

    >>> cell_column_name("count"), cell_column_name("Key"), cell_column_name("_timers")
    ('count', 'cell:Key', 'cell:_timers')
    """
    if not cell or cell.casefold() == KEY or cell.startswith(("_", _PREFIX)):
        return _PREFIX + cell
    return cell


@dataclass(frozen=True)
class CellColumn:
    """Where a cell of state is kept.

    Attributes:
        name: The author's name of the cell.
        column: The column that holds it, usually of the same name.
        kind: The kind of cell, ``"read_modify_write"``, ``"bag"``, ...
        coder: Identity of the coder of its values.
    """

    name: str
    column: str
    kind: str
    coder: str


@dataclass(frozen=True)
class SidecarHeader:
    """What a sidecar says of itself, in the metadata of its schema.

    Attributes:
        operator: The operator's uid.
        key_group: The key group all of its keys are in; None for a file that several share, in
            which a row's group is what the manifest says.
        boundary: The cut, event time in microseconds; None for the drained end of the input.
        kind: ``"full"``: every row of the key group. ``"delta"``: the rows touched since.
        key_coder: Identity of the coder of ``key`` and ``_key``.
        window_coder: Identity of the coder of ``_window``.
        cells: The cells, in the operator's order.
        format_version: Of the sidecar.
    """

    operator: str
    key_group: Annotated[int, Field(ge=0)] | None
    boundary: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None
    kind: Literal["full", "delta"]
    key_coder: str
    window_coder: str
    cells: tuple[CellColumn, ...]
    format_version: int = FORMAT_VERSION

    def to_json(self) -> bytes:
        """Returns canonical JSON: the same header gives the same bytes."""
        fields = {**vars(self), "cells": [vars(cell) for cell in self.cells]}
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> SidecarHeader:
        """Reads a header.

        Raises:
            UnsupportedFormatError: The sidecar has a format this version does not know.
            InvalidCheckpointError: The header is malformed.
        """
        if len(data) > _MAX_HEADER_BYTES:
            _malformed(where, f"it is {len(data)} bytes long")
        try:
            header = _reader().validate_json(data, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            _malformed(where, f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}")
        if not 1 <= header.format_version <= FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"{where} has sidecar format {header.format_version}; this version of beam_ckpt "
                f"reads formats 1 to {FORMAT_VERSION}. Read it with the version that wrote it, or "
                "a newer one."
            )
        if header.key_group is None and header.format_version < 3:
            _malformed(where, f"it is shared, which format {header.format_version} does not know")
        for what in ("name", "column"):
            names = [getattr(cell, what) for cell in header.cells]
            if len(set(names)) != len(names):
                _malformed(where, f"two of its cells have the same {what}")
        return header


@cache
def _reader() -> TypeAdapter[SidecarHeader]:
    return TypeAdapter(SidecarHeader)


def sidecar_schema(key: pa.DataType, cells: Sequence[tuple[str, pa.DataType]]) -> pa.Schema:
    """Returns the schema of a sidecar.

    Args:
        key: Type of the key column.
        cells: Column name and type of each cell, in order.

    A delta with rows that are not whole has the column ``_patch`` (binary) after these.
    """
    return pa.schema([pa.field(KEY, key), *(pa.field(n, t) for n, t in cells), *_OWN_FIELDS])


def cell_columns(schema: pa.Schema) -> list[str]:
    """Returns the columns of a sidecar that hold cells."""
    return [name for name in schema.names if name not in _NO_CELLS]


def with_optional(found: pa.Schema) -> pa.Schema:
    """Returns the schema of a file with the columns that were left out of it."""
    fields = {field.name: field for field in found}
    last = [fields.pop(PATCH)] if PATCH in fields else []
    for field in _OWN_FIELDS:
        there = fields.pop(field.name, field if field.name in OPTIONAL else None)
        if there is not None:
            fields[field.name] = there
    return pa.schema([*fields.values(), *last])


def check_columns(header: SidecarHeader, found: pa.Schema, *, where: str) -> None:
    """Checks that a file has the columns that its header speaks of, and ours of their types.

    Raises:
        InvalidCheckpointError: It has not.
    """
    left_out = {n for n in OPTIONAL if n not in found.names and header.format_version > 2}
    own = [field for field in _OWN_FIELDS if field.name not in left_out]
    if found.names[-1:] == [PATCH] and header.format_version > 1:
        own.append(_PATCH_FIELD)
    if header.kind == "full" and PATCH in found.names:
        raise InvalidCheckpointError(
            f"{where} is to be all of its key group, and has rows that say only what changed: what "
            "they stand on is missing. Restore from an older checkpoint."
        )
    expected = [KEY, *(cell.column for cell in header.cells), *(field.name for field in own)]
    if found.names != expected:
        raise InvalidCheckpointError(
            f"{where} has the columns {found.names[:50]}, its header speaks of {expected[:50]}; it "
            "was damaged or changed: restore from an older checkpoint."
        )
    for field in own:
        there = found.field(field.name)
        if there.type != field.type or there.nullable != field.nullable:
            raise InvalidCheckpointError(
                f"column {field.name} of {where} is {there}, not {field}; it was damaged or "
                "changed: restore from an older checkpoint."
            )


def _malformed(where: str, what: str) -> NoReturn:
    raise InvalidCheckpointError(
        f"the header of {where} is malformed: {what}. The file was damaged or is not a sidecar of "
        "this library; restore from an older checkpoint."
    )
