"""What a store holds, as Arrow tables: checkpoints, operators, and the state itself.

Everything here reads, nothing writes, and no Beam pipeline is started. Cells whose coder has no
Arrow type stay the bytes that the author's coder wrote: nothing is ever unpickled.

    >>> from beam_ckpt import inspect
    >>> inspect.state("ckpt", "totals").to_pandas()                        # doctest: +SKIP
    >>> inspect.state("ckpt", "totals", key="ada", cells=["total"])        # doctest: +SKIP
    >>> inspect.history("gs://bucket/ckpt/job", "totals", "ada")           # doctest: +SKIP
    >>> inspect.diff("ckpt", 7, 8, "totals")                               # doctest: +SKIP
    >>> inspect.duckdb("ckpt").sql("SELECT sum(total) FROM totals")        # doctest: +SKIP

A store is a path, a URL or a `CheckpointStore`. A store that does not exist is an error, never
created. The shape, functions that return tables with a declared schema, is that of pyiceberg's
`Table.inspect`.
"""

from __future__ import annotations

from beam_ckpt.inspect._catalog import (
    CHECKPOINTS,
    FILES,
    LINEAGE,
    OPERATORS,
    checkpoints,
    files,
    find_checkpoint,
    lineage,
    operators,
)
from beam_ckpt.inspect._diff import DIFF, diff
from beam_ckpt.inspect._duckdb import duckdb
from beam_ckpt.inspect._state import (
    HISTORY,
    TIMERS,
    history,
    state,
    state_by_key_group,
    timers,
)

__all__ = [
    "CHECKPOINTS",
    "DIFF",
    "FILES",
    "HISTORY",
    "LINEAGE",
    "OPERATORS",
    "TIMERS",
    "checkpoints",
    "diff",
    "duckdb",
    "files",
    "find_checkpoint",
    "history",
    "lineage",
    "operators",
    "state",
    "state_by_key_group",
    "timers",
]
