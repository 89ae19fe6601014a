"""`beam-ckpt`: look at the checkpoints of a store, from a shell.

    beam-ckpt ls STORE                        its checkpoints, oldest first
    beam-ckpt show STORE [ID]                 one checkpoint and its operators
    beam-ckpt validate STORE [ID...]          is what a restore needs there and unharmed
    beam-ckpt state STORE OPERATOR            rows of an operator's state, typed

those of `beam_ckpt.cli_query`: timers, history, diff, sql, export; those of
`beam_ckpt.cli_maintenance`: recover, repair-pointer, tag, prune, gc, copy; those of
`beam_ckpt.cli_rewrite`: rewrite, forget; and that of `beam_ckpt.cli_report`: report.

STORE is a path or a URL (`gs://bucket/ckpt/job`). What is here never writes to it, and cells that
only the author's coder can read are shown as bytes: nothing is unpickled, unless told
`--unsafe-unpickle`. With `--json` each
command prints one JSON object per line to stdout (bytes as `0x...`, event times as ISO 8601 in
UTC); messages and progress go to stderr.

Exit status:

    0  done; for `validate`: all is well
    1  something is damaged: no checkpoint can be used, or `validate` found a problem
    2  wrong usage, or a STORE that cannot be one
    3  not found: no such store, checkpoint, operator or cell
    4  the storage failed (permissions, network, I/O)
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import pyarrow as pa
import pyarrow.compute as pc
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from beam_ckpt import cli_maintenance, cli_query, cli_report, cli_rewrite, inspect
from beam_ckpt._rows import as_json as _json
from beam_ckpt._rows import plain_rows as _plain
from beam_ckpt._rows import plain_value as _value
from beam_ckpt._rows import shown as _text
from beam_ckpt._rows import table_of
from beam_ckpt._terminal import (
    DAMAGED,
    OK,
    Json,
    StoreArgument,
    event_time,
    print_json,
    size,
)
from beam_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointStorageError,
    InvalidCheckpointError,
    StoreUrlError,
)
from beam_ckpt.inspect._catalog import nearest
from beam_ckpt.inspect._readable import WINDOW_TIMES
from beam_ckpt.store import open_store

if TYPE_CHECKING:
    from beam_ckpt.store import CheckpointStore

__all__ = ["main"]

USAGE, NOT_FOUND, STORAGE = 2, 3, 4

app = typer.Typer(
    name="beam-ckpt",
    help="Look at the checkpoints of a store and maintain them. Nothing is unpickled unasked.",
    epilog="Exit status: 0 done, 1 damaged or refused, 2 usage, 3 not found, 4 storage failed.",
    rich_markup_mode="markdown",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status or raises `SystemExit` with it.

    Args:
        argv: The arguments; None for those of the process.
    """
    try:
        app(args=argv, prog_name="beam-ckpt")
    except CheckpointError as error:
        Console(stderr=True, soft_wrap=True).print(f"beam-ckpt: {error}", markup=False, style="red")
        return _status(error)
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OK


def _status(error: CheckpointError) -> int:
    if isinstance(error, CheckpointNotFoundError):
        return NOT_FOUND
    if isinstance(error, StoreUrlError):
        return USAGE
    if isinstance(error, CheckpointStorageError):
        return STORAGE
    return DAMAGED


# Of a source, in a terminal.
_PARTITIONS = 40


@app.command()
def ls(store: StoreArgument, as_json: Json = False) -> None:
    """Lists the checkpoints, oldest first, damaged ones included."""
    rows = list(_plain(inspect.checkpoints(store)))
    if as_json:
        print_json(rows)
        return
    table = table_of(("id", "epoch", "phase", "boundary", "taken", "operators", "size", ""))
    for row in rows:
        table.add_row(
            str(row["id"]),
            _text(row["epoch"]),
            Text(str(row["phase"]), style="" if row["phase"] == "finalized" else "yellow"),
            _boundary(row),
            _text(row["created"]),
            _text(row["operators"]),
            _size(row["bytes"]),
            Text(" ".join(["latest"] * bool(row["latest"]) + list(_strings(row["tags"])))),
        )
    Console().print(table if rows else "no checkpoints yet")
    for row in rows:
        if row["problem"]:
            Console().print(f"{row['id']}: {row['problem']}", markup=False, style="red")


@app.command()
def show(
    store: StoreArgument,
    id: Annotated[int | None, typer.Argument(help="Default: the newest valid one.")] = None,
    as_json: Json = False,
) -> None:
    """Shows one checkpoint and its operators."""
    opened = open_store(store, create=False)
    manifest = inspect.find_checkpoint(opened, "latest" if id is None else id)
    (facts,) = [row for row in _plain(inspect.checkpoints(opened)) if row["id"] == manifest.id]
    operators = list(_plain(inspect.operators(opened, manifest.id)))
    if as_json:
        pipeline = manifest.pipeline
        versions = {
            "beam_version": pipeline and pipeline.beam_version,
            "python_version": pipeline and pipeline.python_version,
            "pickler": (pipeline and pipeline.pickler) or None,
        }
        sources = {
            uid: {"source_type": source.source_type, "offsets": source.offsets}
            for uid, source in manifest.source_offsets.items()
        }
        detail = {
            "key_group_count": manifest.key_group_count,
            "replaces": list(manifest.replaces),
            **versions,
            "detail": operators,
            "source_offsets": sources,
        }
        print_json([facts | detail])
        return
    console = Console()
    console.print(f"checkpoint {manifest.id} in {opened.url}", markup=False, style="bold")
    table = Table(box=None, show_header=False)
    wanted = ("phase", "epoch", "created", "checkpoint_id", "parent_id", "generation", "run_id")
    table.add_row("boundary", _boundary(facts))
    for name in wanted:
        table.add_row(name, _text(facts[name]))
    if manifest.replaces:
        olds = ", ".join(map(str, manifest.replaces))
        table.add_row("replaces", f"{olds}, without a key that was forgotten")
    table.add_row("key groups", str(manifest.key_group_count))
    table.add_row("size", _size(facts["bytes"]))
    if manifest.pipeline:
        table.add_row("Beam", manifest.pipeline.beam_version)
        table.add_row("Python", manifest.pipeline.python_version)
        if manifest.pipeline.pickler:
            table.add_row("pickler", manifest.pipeline.pickler)
    console.print(table)
    for row in operators:
        console.print(f"\noperator {row['operator']}", markup=False, style="bold")
        console.print(
            f"key {row['key_coder'] or '?'}, {row['key_groups']} key groups with state, "
            f"{row['sidecars']} sidecars ({row['deltas']} deltas), {row['rows']} rows, "
            f"{_size(row['bytes'])}" + (", time-sorted" if row["time_sorted"] else ""),
            markup=False,
        )
        cells = table_of(("cell", "kind", "coder"))
        for cell in _objects(row["cells"]):
            cells.add_row(*(_text(cell[name]) for name in ("name", "kind", "coder")))
        if cells.rows:
            console.print(cells)
    for uid, source in manifest.source_offsets.items():
        console.print(f"\nsource {uid} ({source.source_type})", markup=False, style="bold")
        offsets = table_of(("partition", "read from"))
        for partition, offset in list(source.offsets.items())[:_PARTITIONS]:
            offsets.add_row(Text(partition), Text(offset))
        if offsets.rows:
            console.print(offsets)
        if len(source.offsets) > _PARTITIONS:
            console.print(f"and {len(source.offsets) - _PARTITIONS} more: see --json")


@app.command()
def validate(
    store: StoreArgument,
    ids: Annotated[list[int] | None, typer.Argument(help="Default: all.")] = None,
    deep: Annotated[bool, typer.Option(help="Read and hash every sidecar too.")] = False,
    as_json: Json = False,
) -> None:
    """Says what is wrong with the checkpoints: exit status 1 if anything is.

    Without --deep presence, sizes and the checksums that the storage keeps are compared. A
    checkpoint that is only prepared, left by a run that was killed, is no problem by itself.
    """
    opened = open_store(store, create=False)
    wanted = list(ids) if ids else opened.list_ids()
    if not wanted:
        raise CheckpointNotFoundError(f"no checkpoint in {opened.url} yet")
    facts = {row["id"]: row for row in _plain(inspect.checkpoints(opened))}
    for id in wanted:
        if id not in facts:
            raise CheckpointNotFoundError(f"no checkpoint {id} in {opened.url}")
    rows: list[dict[str, object]] = []
    progress = Console(stderr=True)
    for id in track(wanted, "validating", console=progress, transient=True, disable=as_json):
        result = opened.validate_checkpoint(id, deep=deep)
        row = {"id": id, "phase": facts[id]["phase"], "valid": result.valid}
        rows.append(row | {"deep": deep, "issues": list(result.issues)})
    pointer = _pointer_problem(opened)
    damaged = pointer is not None or not all(row["valid"] for row in rows)
    if as_json:
        print_json(rows)
        if pointer is not None:
            print_json([{"id": None, "valid": False, "issues": [pointer]}])
    else:
        console = Console()
        for row in rows:
            verdict = "ok" if row["valid"] else "; ".join(_strings(row["issues"]))
            if row["valid"] and row["phase"] != "finalized":
                verdict = "ok, but never finalized: nothing is restored from it"
            style = "green" if row["valid"] else "red"
            console.print(f"{row['id']}: {verdict}", markup=False, style=style)
        if pointer is not None:
            console.print(pointer, markup=False, style="red")
    raise typer.Exit(DAMAGED if damaged else OK)


@app.command()
def state(
    store: StoreArgument,
    operator: Annotated[str, typer.Argument(help="The operator's uid.", metavar="OPERATOR")],
    key: Annotated[
        str | None, typer.Option(help="Only this key (JSON for a key of several parts).")
    ] = None,
    cell: Annotated[list[str] | None, typer.Option(help="Only these cells.")] = None,
    at: Annotated[
        int | None, typer.Option(help="Checkpoint id; default: the newest valid one.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Rows at most; 0 for all.", min=0)] = 20,
    as_bytes: cli_query.Bytes = False,
    unsafe_unpickle: cli_query.Unsafe = False,
    schema: cli_query.Schemas = None,
    as_json: Json = False,
) -> None:
    """Prints rows of an operator's state, one per key and window."""
    opened = open_store(store, create=False)
    manifest = inspect.find_checkpoint(opened, "latest" if at is None else at)
    rows: list[dict[str, object]] = []
    columns: list[str] = []
    wanted = None if key is None else cli_query.typed_key(manifest, operator, key)
    ways = cli_query.reading(as_bytes, unsafe_unpickle, schema)
    for table in inspect.state_by_key_group(opened, operator, at=manifest.id, key=wanted, **ways):
        columns = columns or _columns(table, cell)
        found = (
            table if key is None or wanted is not None else table.filter(_is_key(table["key"], key))
        )
        if limit:
            found = found.slice(0, limit - len(rows))
        rows += _plain(found.select(columns))
        if limit and len(rows) >= limit:
            break
    if as_json:
        print_json(rows)
        return
    console = Console()
    if not rows:
        console.print("no such key" if key is not None else "no state")
        return
    shown = table_of(columns)
    for row in rows:
        shown.add_row(*(_text(row[name]) for name in columns))
    console.print(shown)
    boundary = _boundary({"boundary": event_time(manifest.watermark), "drained": True})
    console.print(f"checkpoint {manifest.id}, up to {boundary}", markup=False, style="dim")


cli_query.register(app)
cli_maintenance.register(app)
cli_rewrite.register(app)
cli_report.register(app)


# -- helpers ---------------------------------------------------------------------------------


def _pointer_problem(store: CheckpointStore) -> str | None:
    try:
        store.load_latest()
    except InvalidCheckpointError as error:
        return f"latest.json: {error}"
    return None


def _columns(table: pa.Table, cells: list[str] | None) -> list[str]:
    """The columns to show: the key, the cells, the last touch, the timers if there are any."""
    there = [name for name in table.column_names if name != "key" and not name.startswith("_")]
    for name in cells or ():
        if name not in there:
            raise CheckpointNotFoundError(
                f"no cell {name!r}; there are {', '.join(there)}{nearest(name, there)}"
            )
    windows = [name for name in WINDOW_TIMES if name in table.column_names]
    return ["key", *windows, *(cells or [*there, "_updated", "_timers"])]


def _is_key(keys: pa.ChunkedArray, wanted: str) -> pa.ChunkedArray:
    """Which rows have the key: as text, as a number, as 0x... bytes or as JSON."""
    if pa.types.is_string(keys.type):
        return pc.equal(keys, wanted)
    if pa.types.is_integer(keys.type):
        return pc.equal(keys.cast(pa.string()), wanted)
    as_text = [_json(_value(scalar)) for scalar in keys]
    try:
        wanted = _json(json.loads(wanted))
    except ValueError:
        wanted = _json(wanted)
    # A tuple is stored as a struct: `["a", 1]` finds it as well as its JSON object does.
    as_list = [
        _json(list(value.values())) if isinstance(value, dict) else None
        for value in map(_value, keys)
    ]
    return pa.chunked_array(
        [[wanted in (text, items) for text, items in zip(as_text, as_list, strict=True)]],
        type=pa.bool_(),
    )


def _boundary(row: Mapping[str, object]) -> str:
    if row["boundary"] is not None:
        return str(row["boundary"])
    return "end of the input" if row["drained"] else "-"


def _size(count: object) -> str:
    return size(count) if isinstance(count, int) else "-"


def _strings(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _objects(value: object) -> list[dict[str, object]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


if __name__ == "__main__":
    sys.exit(main())
