"""A sidecar as a file: Parquet that any tool reads, sealed so that no damage goes unnoticed.

Parquet's own checksums cover its pages, not the footer, which says where the pages are and what
they mean. So between the last page and the footer, where readers of Parquet never look, stands a
seal of 13 bytes: ``BCKP``, the version of the seal (1), and the xxh3-64 of every other byte of the
file. Page checksums are there as well, for readers of a part of the file and for other tools.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from beam_ckpt.errors import CheckpointError, CheckpointTooLargeError, InvalidCheckpointError
from beam_ckpt.sidecar._bounds import decoded_size
from beam_ckpt.sidecar._order import in_order
from beam_ckpt.sidecar._patch import of_columns
from beam_ckpt.sidecar._schema import KEY, PATCH, SidecarHeader, cell_columns, check_columns

__all__ = ["MAX_DECODED_BYTES", "ROW_GROUP_ROWS", "decode_sidecar", "encode_sidecar"]

MAX_DECODED_BYTES = 2**31 - 1
"""Greatest size of a sidecar's columns in memory: offsets in Arrow's strings have 31 bits."""

ROW_GROUP_ROWS = 128 * 1024
"""Rows of a row group: what a reader that looks for one key has to read."""

_TOLD_APART_BY = frozenset({"_key", "_window", "_deleted", PATCH})
_METADATA_KEY = b"beam_ckpt.sidecar"
_MAGIC = b"PAR1"
_SEAL = b"BCKP\x01"
_SEAL_SIZE = len(_SEAL) + 8
_TAIL_SIZE = 4 + len(_MAGIC)


def encode_sidecar(
    table: pa.Table,
    header: SidecarHeader,
    *,
    row_group_rows: int = ROW_GROUP_ROWS,
    max_decoded_bytes: int = MAX_DECODED_BYTES,
) -> bytes:
    """Returns the bytes of a sidecar.

    Args:
        table: Its rows, sorted by (``_key``, ``_window``), one for each pair; columns as
            :func:`~beam_ckpt.sidecar.sidecar_schema` has them.
        header: What the sidecar says of itself.
        row_group_rows: Rows of a row group.
        max_decoded_bytes: Greatest size of the columns in memory.

    Raises:
        InvalidCheckpointError: The table does not have the columns of a sidecar with this header.
        CheckpointTooLargeError: The columns are over the limit.
    """
    where = f"the table for operator {header.operator!r}, key group {header.key_group}"
    check_columns(header, table.schema, where=where)
    _check_limit(len(table), table.nbytes, max_decoded_bytes, where)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        table.schema,
        version="2.6",
        compression="zstd",
        compression_level=1,
        data_page_version="1.0",
        use_dictionary=False,
        write_statistics=_leaves(table.schema, (KEY, "_key", "_window", "_deleted", "_updated")),
        write_page_checksum=True,
        # Every type a sidecar has is one of Parquet's own; a copy in Arrow's words costs 1 kB.
        store_schema=False,
    ) as writer:
        writer.write_table(table, row_group_rows)
        writer.add_key_value_metadata({_METADATA_KEY: header.to_json()})
    data = _seal(memoryview(sink.getvalue()))
    # What is written can be read: the measure is that of the reader, never sixteen times as much.
    if table.nbytes > max_decoded_bytes // 16:
        _check_limit(*decoded_size(data, table.schema), max_decoded_bytes, where)
    return data


def decode_sidecar(
    data: bytes,
    *,
    where: str,
    max_decoded_bytes: int = MAX_DECODED_BYTES,
    key: bytes | None = None,
    columns: Collection[str] | None = None,
) -> tuple[SidecarHeader, pa.Table]:
    """Reads a sidecar.

    What the file says of its size is checked before anything of that size is in memory.

    Args:
        data: The bytes of the file.
        where: What to call it in an error.
        max_decoded_bytes: Greatest size of the columns in memory.
        key: Read the rows of this key (its encoded bytes) alone, and only the row groups that can
            have it. None: all rows.
        columns: Read these columns alone, of which it may lack some, beside the ones that rows are
            told apart by (``_key``, ``_window``, ``_deleted``, ``_patch``). None: all columns.

    Raises:
        InvalidCheckpointError: It is truncated, damaged, or not a sidecar of this library.
        UnsupportedFormatError: It has a format that this version does not know.
        CheckpointTooLargeError: Its columns would be over the limit.
    """
    _check_seal(data, where)
    # From here on the bytes are the ones that were written, by this library or by somebody who
    # imitates it, so what Arrow may raise over them is not ours to enumerate.
    try:
        return _read(data, where, max_decoded_bytes, key, columns)
    except CheckpointError:
        raise
    except Exception as error:
        _not_a_sidecar(where, error)


def _read(
    data: bytes, where: str, limit: int, key: bytes | None, columns: Collection[str] | None
) -> tuple[SidecarHeader, pa.Table]:
    file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    encoded_header = (file.metadata.metadata or {}).get(_METADATA_KEY)
    if encoded_header is None:
        _not_a_sidecar(where, "it has no header")
    header = SidecarHeader.from_json(encoded_header, where=where)
    schema = file.schema_arrow
    check_columns(header, schema, where=where)
    _check_limit(*decoded_size(data, schema), limit, where)
    wanted = schema.names
    if columns is not None:
        wanted = [name for name in wanted if name in _TOLD_APART_BY or name in columns]
    groups = [i for i in range(file.num_row_groups) if key is None or _may_have(file, i, key)]
    table = file.read_row_groups(groups, columns=wanted).select(wanted)
    table.validate(full=True)
    if not in_order(table):
        _not_a_sidecar(where, "its rows are not in order, or one occurs twice")
    if key is not None:
        table = table.filter(pc.equal(table["_key"], key))
    if PATCH in wanted and len(wanted) < len(schema.names):
        table = of_columns(table, cell_columns(schema))
    return header, table.replace_schema_metadata(None)


def _may_have(file: pq.ParquetFile, row_group: int, key: bytes) -> bool:
    """Tells whether a key can be in a row group: between its first and its last one."""
    group = file.metadata.row_group(row_group)
    columns = (group.column(i) for i in range(group.num_columns))
    known = next(column for column in columns if column.path_in_schema == "_key").statistics
    if known is None or not known.has_min_max:
        return True
    return bool(known.min <= key <= known.max)


def _seal(file: memoryview) -> bytes:
    footer_size = int.from_bytes(file[-_TAIL_SIZE:-4], "little") + _TAIL_SIZE
    pages, footer = file[:-footer_size], file[-footer_size:]
    digest = xxhash.xxh3_64(pages)
    digest.update(footer)
    return b"".join((pages, _SEAL, digest.digest(), footer))


def _check_seal(data: bytes, where: str) -> None:
    size = len(data)
    if size < len(_MAGIC) + _SEAL_SIZE + _TAIL_SIZE or not (
        data.startswith(_MAGIC) and data.endswith(_MAGIC)
    ):
        _not_a_sidecar(where, f"its {size} bytes do not begin and end as Parquet does")
    footer_at = size - _TAIL_SIZE - int.from_bytes(data[-_TAIL_SIZE:-4], "little")
    seal_at = footer_at - _SEAL_SIZE
    if seal_at < len(_MAGIC) or data[seal_at : seal_at + len(_SEAL)] != _SEAL:
        _not_a_sidecar(where, "there is no seal of this library before its footer")
    view = memoryview(data)
    digest = xxhash.xxh3_64(view[:seal_at])
    digest.update(view[footer_at:])
    sealed, found = data[seal_at + len(_SEAL) : footer_at], digest.digest()
    if sealed != found:
        _not_a_sidecar(where, f"its xxh3-64 is {found.hex()}, it was sealed as {sealed.hex()}")


def _check_limit(rows: int, size: int, limit: int, where: str) -> None:
    if size > limit:
        raise CheckpointTooLargeError(
            f"{where} has {rows} rows that can take {size} bytes in memory, the limit is {limit}: "
            "use more key groups, or raise the limit."
        )


def _leaves(schema: pa.Schema, columns: Sequence[str]) -> list[str]:
    """Returns the paths, as Parquet writes them, of these columns' leaves outside lists."""
    paths: list[str] = []

    def walk(path: str, type: pa.DataType) -> None:
        if pa.types.is_struct(type):
            for field in type:
                walk(f"{path}.{field.name}", field.type)
        elif not pa.types.is_nested(type):
            paths.append(path)

    for name in columns:
        walk(name, schema.field(name).type)
    return paths


def _not_a_sidecar(where: str, why: object) -> NoReturn:
    cause = why if isinstance(why, Exception) else None
    raise InvalidCheckpointError(
        f"{where} cannot be read as a sidecar: {why}. It was damaged, cut short or not written by "
        "this library; restore from an older checkpoint."
    ) from cause
