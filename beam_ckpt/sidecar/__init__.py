"""Sidecars: the state of a key group as a Parquet file that any tool can query.

A sidecar has one row per key and window, sorted by encoded key and window, with a typed column for
the key and for each cell of state (see ``docs`` of the columns at
:func:`~beam_ckpt.sidecar.sidecar_schema`). Here everything is Arrow: nothing knows of coders, and
nothing needs Beam. What turns encoded state into these columns is
:mod:`beam_ckpt.transforms.columns`.
"""

from __future__ import annotations

from beam_ckpt.sidecar._file import decode_sidecar, encode_sidecar
from beam_ckpt.sidecar._merge import merge_newest_first
from beam_ckpt.sidecar._order import latest_in_order
from beam_ckpt.sidecar._schema import (
    CARRIED,
    TIMERS,
    CellColumn,
    SidecarHeader,
    cell_column_name,
    sidecar_schema,
)

__all__ = [
    "CARRIED",
    "TIMERS",
    "CellColumn",
    "SidecarHeader",
    "cell_column_name",
    "decode_sidecar",
    "encode_sidecar",
    "latest_in_order",
    "merge_newest_first",
    "sidecar_schema",
]
