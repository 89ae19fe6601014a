"""Which Beam coder has which Arrow type, and an operator's state as the columns of a sidecar.

``_CODECS`` is the one table: a coder that is in it has typed columns, whose values are the coder's
own, exactly: what is read back has the same bytes. Any other coder's columns are binary and hold
the bytes that the coder wrote; they are never opened here (they may be pickles).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa
from apache_beam import coders
from apache_beam.coders import row_coder
from apache_beam.coders.coders import (
    BigEndianShortCoder,
    Coder,
    DeterministicMapCoder,
    ListCoder,
    SinglePrecisionFloatCoder,
    TupleSequenceCoder,
    VarInt32Coder,
)

from beam_ckpt.errors import (
    CheckpointError,
    CheckpointTooLargeError,
    InvalidCheckpointError,
    PipelineRefusedError,
)
from beam_ckpt.manifest import CellSpec, OperatorSpec
from beam_ckpt.sidecar import (
    CellColumn,
    SidecarHeader,
    cell_column_name,
    merge_newest_first,
    sidecar_schema,
)
from beam_ckpt.sidecar._order import every_in_order, latest_order, one_array
from beam_ckpt.sidecar._schema import PATCH
from beam_ckpt.transforms._buffers import BINARY, Source, int32_array, offsets_of, spread
from beam_ckpt.transforms._encodings import (
    Codec,
    DecimalText,
    Fixed,
    Framed,
    ListOf,
    MapOf,
    Optional,
    Row,
    Tuple,
    VarInt,
    read_values,
    write_values,
)
from beam_ckpt.transforms._frames import (
    Frames,
    Slots,
    frame_lists,
    frame_values,
    has_patch,
    read_frames,
    read_keys,
    write_frames,
)
from beam_ckpt.transforms.snapshot import SnapshotRecord

__all__ = ["BYTE_CODERS", "CellState", "OperatorState", "coder_identity"]

BYTE_CODERS: tuple[type[Coder], ...] = tuple(
    getattr(coders.coders, name) for name in ("ByteCoder",) if hasattr(coders.coders, name)
)
"""The coder of single bytes; older versions of Beam have none."""

_ONE_VALUE = frozenset({"read_modify_write", "combining"})
_MANY_VALUES = frozenset({"bag", "set", "ordered_list"})


# Rows are converted in slices, so that no more than this is in memory as Python objects at a time.
_SLICE_ROWS = 64 * 1024
_SLICE_BYTES = 256 * 1024 * 1024


def coder_identity(coder: Coder) -> str:
    """Returns the name of a coder by which saved state is compared with a pipeline's.

    It is the same in every process and Beam version in which the coder is the same: Beam's coders
    go by their class name, others by module and class, and coders with components name these. The
    fields of rows are part of it, the Python class of a row is not.

    >>> coder_identity(coders.TupleCoder([coders.StrUtf8Coder(), coders.VarIntCoder()]))
    'TupleCoder[StrUtf8Coder,VarIntCoder]'
    """
    kind = type(coder)
    name = kind.__qualname__
    if kind.__module__.split(".")[0] != "apache_beam":
        name = f"{kind.__module__}.{name}"
    parts = _identity_parts(coder)
    return f"{name}[{','.join(parts)}]" if parts else name


def _identity_parts(coder: Coder) -> list[str]:
    if isinstance(coder, coders.RowCoder):
        return [
            f"{_quoted(field.name)}:{coder_identity(component)}{'?' if field.type.nullable else ''}"
            for field, component in zip(coder.schema.fields, coder.components, strict=True)
        ]
    if isinstance(coder, row_coder.LogicalTypeCoder):
        return [_quoted(coder.logical_type.urn()), coder_identity(coder.representation_coder)]
    if isinstance(coder, coders.ProtoCoder):
        return [coder.proto_message_type.DESCRIPTOR.full_name]
    if isinstance(coder, coders.ProtoPlusCoder):
        return [coder.proto_plus_message_type.pb().DESCRIPTOR.full_name]
    if isinstance(coder, coders.AvroGenericCoder):
        canonical = json.dumps(json.loads(coder.schema), sort_keys=True, separators=(",", ":"))
        return [hashlib.sha256(canonical.encode()).hexdigest()[:16]]
    if isinstance(coder, (coders.MapCoder, DeterministicMapCoder)):
        return [coder_identity(coder._key_coder), coder_identity(coder._value_coder)]
    return [coder_identity(c) for c in coder._get_component_coders() if c is not None]


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[\w.:]+", name) else json.dumps(name)


# --- coder -> Arrow type and back -----------------------------------------------------------------


def _codec(coder: Coder, nested: bool) -> Codec | None:
    """Returns the codec of a coder in this context, None where its columns have to be binary.

    Only the very classes of the table count: a subclass may write anything.
    """
    make = _CODECS.get(type(coder))
    return make(coder, nested) if make else None


def _column_codec(coder: Coder) -> Codec:
    return _codec(coder, False) or Framed(BINARY, nested=False)


def _tuple(coder: coders.TupleCoder, nested: bool) -> Codec | None:
    components = coder.coders()
    last = len(components) - 1
    fields = []
    for i, component in enumerate(components):
        codec = _codec(component, nested or i < last)
        if codec is None and i == last and not nested:
            # Nothing follows it, so its bytes are known without opening them.
            codec = Framed(BINARY, nested=False)
        if codec is None:
            return None
        fields.append((f"f{i}", codec))
    return Tuple(fields) if fields else None


def _row(coder: coders.RowCoder, nested: bool) -> Codec | None:
    schema = coder.schema
    order = [field.encoding_position for field in schema.fields]
    if schema.encoding_positions_set and order != sorted(order):
        return None
    fields = []
    for field, component in zip(schema.fields, coder.components, strict=True):
        codec = _codec(component, True)
        if codec is None or (codec.holds_null and field.type.nullable):
            return None
        fields.append((field.name, codec, bool(field.type.nullable)))
    return Row(fields) if 0 < len(fields) < 128 else None


def _optional(coder: coders.NullableCoder, nested: bool) -> Codec | None:
    codec = _codec(coder._value_coder, nested)
    # None of None and None would be one null.
    return None if codec is None or codec.holds_null else Optional(codec)


def _list(coder: coders.IterableCoder, nested: bool) -> Codec | None:
    codec = _codec(coder.value_coder(), True)
    return None if codec is None else ListOf(codec)


def _map(coder: coders.MapCoder, nested: bool) -> Codec | None:
    # Keys that SQL engines compare as we do; a null or a NaN as a key they refuse.
    if type(coder._key_coder) not in _MAP_KEYS:
        return None
    key = _codec(coder._key_coder, True)
    value = _codec(coder._value_coder, True)
    return None if key is None or value is None else MapOf(key, value)


# Timestamps are encoded in whole milliseconds over all 64 bits; microseconds could not hold them.
_CODECS: Mapping[type[Coder], Callable[..., Codec | None]] = {
    coders.StrUtf8Coder: lambda _, nested: Framed(pa.string(), nested=nested),
    coders.BytesCoder: lambda _, nested: Framed(BINARY, nested=nested),
    coders.VarIntCoder: lambda *_: VarInt(64),
    VarInt32Coder: lambda *_: VarInt(32),
    BigEndianShortCoder: lambda *_: Fixed(pa.int16(), ">i2", "<i2"),
    **{kind: lambda *_: Fixed(pa.uint8(), "u1", "u1") for kind in BYTE_CODERS},
    coders.FloatCoder: lambda *_: Fixed(pa.float64(), ">u8", "<u8"),
    SinglePrecisionFloatCoder: lambda *_: Fixed(pa.float32(), ">u4", "<u4"),
    coders.BooleanCoder: lambda *_: Fixed(pa.bool_(), "u1", "u1"),
    coders.TimestampCoder: lambda *_: Fixed(pa.timestamp("ms", "UTC"), ">i8", "<i8", flip=True),
    coders.DecimalCoder: lambda _, nested: DecimalText(nested=nested),
    coders.TupleCoder: _tuple,
    coders.RowCoder: _row,
    row_coder.LogicalTypeCoder: lambda c, nested: _codec(c.representation_coder, nested),
    coders.NullableCoder: _optional,
    coders.IterableCoder: _list,
    ListCoder: _list,
    TupleSequenceCoder: _list,
    coders.MapCoder: _map,
    DeterministicMapCoder: _map,
}

_MAP_KEYS = frozenset(
    {
        coders.StrUtf8Coder,
        coders.BytesCoder,
        coders.VarIntCoder,
        VarInt32Coder,
        BigEndianShortCoder,
        *BYTE_CODERS,
        coders.BooleanCoder,
        coders.TimestampCoder,
    }
)


# --- state cells and operators --------------------------------------------------------------------


@dataclass(frozen=True)
class CellState:
    """A state cell of an operator.

    Attributes:
        name: Its name, as the author gave it.
        kind: ``"read_modify_write"`` or ``"combining"`` (its accumulator): one value; ``"bag"``,
            ``"set"`` or ``"ordered_list"`` (of time in microseconds and value): many.
        coder: The coder of its values.
        combiner: Of a combining cell; see `CellSpec`.

    Raises:
        PipelineRefusedError: The kind is not one of these.
    """

    name: str
    kind: str
    coder: Coder
    combiner: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _ONE_VALUE | _MANY_VALUES:
            raise PipelineRefusedError(
                f"state cell {self.name!r} is of kind {self.kind!r}, which cannot be saved yet; "
                f"these can: {', '.join(sorted(_ONE_VALUE | _MANY_VALUES))}."
            )

    @property
    def column_name(self) -> str:
        """Name of the column that holds it."""
        return cell_column_name(self.name)

    @property
    def has_many(self) -> bool:
        """Whether it holds many values."""
        return self.kind in _MANY_VALUES

    @cached_property
    def _column(self) -> _OneValue | _ManyValues:
        codec = _column_codec(self.coder)
        return _ManyValues(codec) if self.has_many else _OneValue(codec)

    def __getstate__(self) -> dict[str, object]:
        return _declared(self)


@dataclass(frozen=True)
class OperatorState:
    """The keyed state of an operator: what its sidecars hold.

    Attributes:
        uid: The operator's identity.
        key_coder: The coder of its keys.
        window_coder: The coder of its windows.
        cells: Its cells; the order is that of the cells in a record.
        time_sorted: Whether its input is processed in event-time order.
        lateness: How long after its end a window is kept, in microseconds.
        windows: Which windows the input is in; see `OperatorSpec`.
    """

    uid: str
    key_coder: Coder
    window_coder: Coder
    cells: tuple[CellState, ...]
    time_sorted: bool
    lateness: int = 0
    windows: str = ""

    def spec(self) -> OperatorSpec:
        """Returns what a manifest says of the operator."""
        return OperatorSpec(
            key_coder=coder_identity(self.key_coder),
            window_coder=coder_identity(self.window_coder),
            cells={
                cell.name: CellSpec(
                    kind=cell.kind, coder=coder_identity(cell.coder), combiner=cell.combiner
                )
                for cell in self.cells
            },
            time_sorted=self.time_sorted,
            windows=self.windows,
        )

    def header(
        self, *, key_group: int | None, boundary: int | None, kind: Literal["full", "delta"]
    ) -> SidecarHeader:
        """Returns what a sidecar of one of the operator's key groups says of itself.

        Args:
            key_group: The key group; None for a file that several share.
            boundary: The cut, event time in microseconds; None for the drained end of the input.
            kind: Whether it holds all rows of the group, or those touched since the last one.
        """
        return SidecarHeader(
            operator=self.uid,
            key_group=key_group,
            boundary=boundary,
            kind=kind,
            key_coder=coder_identity(self.key_coder),
            window_coder=coder_identity(self.window_coder),
            cells=tuple(
                CellColumn(c.name, cell_column_name(c.name), c.kind, coder_identity(c.coder))
                for c in self.cells
            ),
        )

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of the operator's tables."""
        cells = [(cell.column_name, cell._column.type) for cell in self.cells]
        return sidecar_schema(self._key_codec.type, cells)

    def to_table(self, records: Iterable[SnapshotRecord]) -> pa.Table:
        """Returns records as the rows of a sidecar: :meth:`encoded_to_table` of their bytes."""
        return self.encoded_to_table([record.to_bytes() for record in records])

    def to_records(self, table: pa.Table) -> Iterator[SnapshotRecord]:
        """Yields the records of rows: those of :meth:`to_encoded`, decoded."""
        for _, record in self.to_encoded(table):
            yield SnapshotRecord.from_bytes(record)

    def encoded_to_table(self, records: Sequence[bytes]) -> pa.Table:
        """Returns records as the rows of a sidecar, sorted by encoded key and window.

        Args:
            records: The bytes of snapshot records (``SnapshotRecord.to_bytes()``), in the order in
                which they were taken: of several of one key and window, the last one counts, and
                where that has a patch, what it says on top of those before it.

        Returns:
            A table of :attr:`schema`, and a column ``_patch`` if a record has one.

        Raises:
            UnsupportedFormatError: A record has a format that this version does not know.
            InvalidCheckpointError: A record is malformed or has other cells, or a value in it is
                not what its coder writes.
            CheckpointTooLargeError: A column is too large for one piece.
        """
        array = pa.array(records, BINARY)
        again = False
        if isinstance(array, pa.ChunkedArray):
            raise CheckpointTooLargeError(
                f"operator {self.uid!r} has {array.nbytes} bytes in {len(array)} records, too many "
                "for one piece: keep less under one key, or use more key groups."
            )
        with self._blaming(records):
            keys = read_keys(array)
        if has_patch(array):
            # The last one alone does not say all.
            places, starts = every_in_order(*keys)
            order, again = pa.array(places), len(starts) < len(places)
        else:
            order = latest_order(*keys)
        if order is not None:
            array = array.take(order)
        parts = []
        # Slices that stay in the processor's cache take half the time.
        for start in range(0, len(array), _SLICE_ROWS):
            with self._blaming(records):
                frames = read_frames(
                    array.slice(start, _SLICE_ROWS),
                    [cell.has_many for cell in self.cells],
                )
            parts.append(self._table(frames))
        if not parts:
            return self.schema.empty_table()
        table = pa.concat_tables(parts)
        if again:
            table = merge_newest_first([table], keep_tombstones=True)
        whole = table[PATCH].null_count == len(table)
        return table.drop_columns([PATCH]) if whole else table

    def to_encoded(self, table: pa.Table) -> Iterator[tuple[bytes, bytes]]:
        """Yields the encoded key and the record of each row; columns are converted in slices.

        Args:
            table: Rows of a sidecar of this operator, or of several merged. Cells that it has no
                column for are empty; columns that are no cell's are ignored.

        Yields:
            Pairs of a key's bytes and a snapshot record's (``SnapshotRecord.from_bytes()``).

        Raises:
            InvalidCheckpointError: A column does not have the type of its cell, or a value in it
                cannot be one of the cell's.
        """
        for field in self.schema:
            own = table.schema.get_field_index(field.name)
            found = table.schema.field(own).type if own >= 0 else None
            if found != field.type and (found is not None or field.name not in self._cell_columns):
                raise InvalidCheckpointError(
                    f"column {field.name!r} of operator {self.uid!r} is {found or 'missing'} in "
                    f"the saved state, not {field.type}: the state was saved with other coders or "
                    "the file was changed; restore with the pipeline that saved it."
                )
        rows = min(_SLICE_ROWS, max(1, _SLICE_BYTES * len(table) // max(table.nbytes, 1)))
        for start in range(0, len(table), rows):
            yield from self._records(table.slice(start, rows))

    @cached_property
    def _key_codec(self) -> Codec:
        return _column_codec(self.key_coder)

    @cached_property
    def _cell_columns(self) -> frozenset[str]:
        return frozenset(cell.column_name for cell in self.cells)

    def __getstate__(self) -> dict[str, object]:
        return _declared(self)

    def _table(self, frames: Frames) -> pa.Table:
        with self._naming("the keys"):
            columns = [read_values(self._key_codec, frames.source, *frames.key.places)]
        for cell, slots in zip(self.cells, frames.cells, strict=True):
            with self._naming(f"cell {cell.name!r}"):
                columns.append(cell._column.read(frames.source, slots))
        columns += [
            frames.source.slices(*frames.key.places),
            frames.source.slices(*frames.window.places),
            frames.deleted,
            frames.updated,
            frames.timers,
            frames.carried,
            frames.patch,
        ]
        return pa.Table.from_arrays(columns, schema=self.schema.append(pa.field(PATCH, BINARY)))

    @contextmanager
    def _blaming(self, records: Sequence[bytes]) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except ValueError as error:
            for record in records:  # the one to blame can say better what is wrong
                SnapshotRecord.from_bytes(record, where=f"a record of operator {self.uid!r}")
            raise InvalidCheckpointError(
                f"a record of operator {self.uid!r} is not one of its: {error}; it has the cells "
                f"{[cell.name for cell in self.cells]}. Restore with the pipeline that saved it."
            ) from error

    def _records(self, rows: pa.Table) -> Iterator[tuple[bytes, bytes]]:
        cells = []
        for cell in self.cells:
            if cell.column_name in rows.column_names:
                with self._naming(f"cell {cell.name!r}"):
                    cells.append(cell._column.write(one_array(rows[cell.column_name])))
            else:
                cells.append(cell._column.write(None))
        keys = one_array(rows["_key"])
        with self._naming("the timers and carried outputs"):
            records = write_frames(
                keys,
                one_array(rows["_window"]),
                one_array(rows["_deleted"]),
                one_array(rows["_updated"]),
                cells,
                one_array(rows["_timers"]),
                one_array(rows["_carried"]),
                one_array(rows[PATCH]) if PATCH in rows.column_names else None,
            )
        return zip(_objects(keys), _objects(records), strict=True)

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except ValueError as error:
            raise InvalidCheckpointError(
                f"{what} of operator {self.uid!r}: a value is not what the coder writes: {error}. "
                "The state was damaged, or was saved with another coder."
            ) from error


def _declared(instance: CellState | OperatorState) -> dict[str, object]:
    """Returns the fields alone: what is cached beside them is cheap and not worth sending."""
    return {name: getattr(instance, name) for name in instance.__dataclass_fields__}


# --- one cell's column ----------------------------------------------------------------------------


class _OneValue:
    """A cell of one value; null when empty.

    A coder that knows None needs a place for it beside null: a struct of one field, ``value``.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = Tuple([("value", codec)]) if codec.holds_null else codec
        self.type = self._codec.type

    def read(self, source: Source, slots: Slots) -> pa.Array:
        return spread(read_values(self._codec, source, *slots.places), slots.counts == 1)

    def write(self, column: pa.Array | None) -> pa.BinaryArray | pa.Scalar:
        return frame_values(None if column is None else write_values(self._codec, column))


class _ManyValues:
    """A cell of many values, a list; null when empty."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.type = pa.list_(pa.field("element", codec.type))

    def read(self, source: Source, slots: Slots) -> pa.Array:
        items = read_values(self._codec, source, *slots.places)
        offsets, empty = int32_array(offsets_of(slots.counts)), pa.array(slots.counts == 0)
        return pa.ListArray.from_arrays(offsets, items, type=self.type, mask=empty)

    def write(self, column: pa.Array | None) -> pa.BinaryArray | pa.Scalar:
        if column is None:
            return frame_lists(None)
        counts = column.value_lengths().fill_null(0).to_numpy()
        return frame_lists(write_values(self._codec, column.flatten()), counts.astype(np.int64))


def _objects(values: pa.BinaryArray) -> list[bytes]:
    # Several times as fast as to_pylist before pyarrow 22.
    objects: list[bytes] = values.to_numpy(zero_copy_only=False).tolist()
    return objects
