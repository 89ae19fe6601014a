"""Several sidecars of a key group as one: the latest row of each key and window."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.sidecar._order import latest_in_order

__all__ = ["merge_newest_first"]


def merge_newest_first(tables: Iterable[pa.Table], *, keep_tombstones: bool = False) -> pa.Table:
    """Returns the latest row of each key and window, sorted by (``_key``, ``_window``).

    Args:
        tables: Rows of sidecars, the newest sidecar first. If a table has a key and window more
            than once, its last row counts. A cell that a table lacks is empty in its rows.
        keep_tombstones: Whether to keep the rows of what was deleted: needed in a delta, whose
            tombstones hide rows of older files; not in a full sidecar or at restore.

    Raises:
        InvalidCheckpointError: A column has different types in two of the tables.
        ValueError: There are no tables.
    """
    chain = list(tables)
    if not chain:
        raise ValueError("there are no tables to merge")
    filled = [table for table in chain if len(table)] or chain[:1]
    # Oldest first, so that a stable sort leaves the latest of equal rows last.
    filled.reverse()
    try:
        merged = pa.concat_tables(filled, promote_options="default")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InvalidCheckpointError(
            f"sidecars that belong together have columns of different types ({error}); they were "
            "swapped or changed: restore from an older checkpoint."
        ) from error
    merged = latest_in_order(merged)
    if not keep_tombstones:
        merged = merged.filter(pc.invert(merged["_deleted"]))
    return merged
