"""Sidecars: the state of a key group as a Parquet file that any tool can query.

A sidecar has one row per key and window, in order of the encoded key, then window, and these
columns: ``key`` and one for each cell of state, of the types their coders have in Arrow (a list for
a cell of many values; null when a cell is empty); ``_key`` and ``_window``, the encoded bytes;
``_deleted``, true for a tombstone; ``_updated``, event time of the last touch; ``_timers`` and
``_carried``, lists of structs, null when there are none, and left out of a file of one row group
in which all are. The header, in the metadata of the file,
says of which operator, key group and boundary it is, and which cell is in which column.

The small sidecars of several key groups may be one file, of bases or of deltas, in which the rows
of one group come after those of another; which are whose, the manifest says. Its header names no
key group.

In a delta rows may hold only what changed since the key's row before. Such a delta has the column
``_patch``: null for a whole row, else a byte for each cell in the order of the columns: 0, the cell
is what this row has; 1, it is as it was; 2, the items of this row come after those that were there.

Here everything is Arrow: nothing knows of coders, and nothing needs Beam. What turns encoded state
into these columns and back is ``beam_ckpt.transforms.columns``.

Example:
    >>> import pyarrow as pa
    >>> header = SidecarHeader("totals", 0, None, "full", "StrUtf8Coder", "GlobalWindowCoder", ())
    >>> schema = sidecar_schema(pa.string(), [])
    >>> row = {"key": "a", "_key": b"a", "_window": b"", "_deleted": False, "_updated": 0}
    >>> data = encode_sidecar(pa.Table.from_pylist([row], schema), header)
    >>> decode_sidecar(data, where="memory")[1]["key"].to_pylist()
    ['a']
"""

from __future__ import annotations

from beam_ckpt.sidecar._chain import read_chain, stream_chain
from beam_ckpt.sidecar._decode import decode_sidecar
from beam_ckpt.sidecar._encode import (
    ROW_GROUP_BYTES,
    ROW_GROUP_ROWS,
    encode_pages,
    encode_sidecar,
)
from beam_ckpt.sidecar._files import SharedRows
from beam_ckpt.sidecar._merge import merge_newest_first
from beam_ckpt.sidecar._order import latest_in_order
from beam_ckpt.sidecar._patch import appended_bytes
from beam_ckpt.sidecar._schema import (
    CARRIED,
    PATCH,
    TIMERS,
    CellColumn,
    SidecarHeader,
    cell_column_name,
    sidecar_schema,
)
from beam_ckpt.sidecar._stream import PageStream

__all__ = [
    "CARRIED",
    "PATCH",
    "ROW_GROUP_BYTES",
    "ROW_GROUP_ROWS",
    "TIMERS",
    "CellColumn",
    "PageStream",
    "SharedRows",
    "SidecarHeader",
    "appended_bytes",
    "cell_column_name",
    "decode_sidecar",
    "encode_pages",
    "encode_sidecar",
    "latest_in_order",
    "merge_newest_first",
    "read_chain",
    "sidecar_schema",
    "stream_chain",
]
