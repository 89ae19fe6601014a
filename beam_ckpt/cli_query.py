"""The commands of `beam-ckpt` that ask what is in the state.

    beam-ckpt timers STORE OPERATOR           its pending timers, the earliest first
    beam-ckpt history STORE OPERATOR KEY      one key at each retained checkpoint
    beam-ckpt diff STORE A B [OPERATOR...]    what changed between two checkpoints
    beam-ckpt sql STORE "SELECT ..."          each operator is a table of its name
    beam-ckpt export STORE OPERATOR           all of its state as Parquet, JSON or CSV

None of them writes to the store. A KEY is text, a number, `0x...` bytes, or a JSON list for a key
of several parts. With `--json` each prints one JSON object per line to stdout (bytes as `0x...`,
event times as ISO 8601 in UTC). Cells whose coder nobody chose are shown as JSON, unless `--bytes`;
what is pickled in them is not opened, unless `--unsafe-unpickle`. Cells of protobuf and Avro are
structs where `--schema` says what their bytes mean. `export` writes a file whole or not at all.

Exit status:

    0  done, whether or not there is anything to show
    1  something is damaged: no checkpoint can be used, or what had to be read is not whole
    2  wrong usage: a query that DuckDB refuses, a KEY that can be none, a file that exists
    3  not found: no such store, checkpoint, operator or cell
    4  the storage failed (permissions, network, I/O)
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, TypedDict

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.text import Text

from beam_ckpt import inspect
from beam_ckpt._keys import encode_key, parse_key
from beam_ckpt._rows import as_json as to_json
from beam_ckpt._rows import plain_rows, shown, table_of
from beam_ckpt._terminal import Json, StoreArgument, print_json
from beam_ckpt.inspect._duckdb import StateView, views
from beam_ckpt.inspect._readable import WINDOW_TIMES, Reading, Untyped
from beam_ckpt.inspect._schemas import Schema, decoders, schemas_in
from beam_ckpt.store import open_store

if TYPE_CHECKING:
    from beam_ckpt.manifest import CheckpointManifest

__all__ = [
    "Bytes",
    "Schemas",
    "Unsafe",
    "given_key",
    "reading",
    "register",
    "typed_key",
    "whole_file",
]

Operator = Annotated[str, typer.Argument(help="The operator's uid.", metavar="OPERATOR")]
At = Annotated[int | None, typer.Option(help="Checkpoint id; default: the newest valid one.")]
Limit = Annotated[int, typer.Option(help="Rows at most; 0 for all.", min=0)]
Bytes = Annotated[
    bool, typer.Option("--bytes", help="Cells without a type as Beam wrote them, not as JSON.")
]
Unsafe = Annotated[
    bool,
    typer.Option(
        "--unsafe-unpickle",
        help="Open pickles, which runs the code that they name: only if nobody else writes here.",
    ),
]
Schemas = Annotated[
    list[Path] | None,
    typer.Option(
        "--schema",
        help="For cells of Avro (.avsc) or protobuf (a descriptor set of protoc).",
        metavar="FILE",
    ),
]
Cells = Annotated[list[str] | None, typer.Option("--cell", help="Only these cells.")]


class Format(StrEnum):
    """What `export` writes."""

    PARQUET = "parquet"
    JSON = "json"
    CSV = "csv"


def register(app: typer.Typer) -> None:
    """Adds the commands of this module to the application."""
    for command in (timers, history, diff, sql, export):
        app.command(rich_help_panel="Queries")(command)


def timers(
    store: StoreArgument,
    operator: Operator,
    key: Annotated[str | None, typer.Option(help="Only those of this key.")] = None,
    at: At = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """Lists the pending event-time timers of an operator, the earliest first."""
    opened = open_store(store, create=False)
    manifest = inspect.find_checkpoint(opened, "latest" if at is None else at)
    wanted = None if key is None else given_key(manifest, operator, key)
    table = inspect.timers(opened, operator, at=manifest.id, key=wanted)
    columns = ["fire", "key", "family", "tag", "domain"]
    columns += [name for name in WINDOW_TIMES if name in table.column_names]
    _show(table.select(columns), len(table), limit, as_json, nothing="no pending timers")


def history(
    store: StoreArgument,
    operator: Operator,
    key: Annotated[str, typer.Argument(help="The key.", metavar="KEY")],
    cell: Cells = None,
    as_bytes: Bytes = False,
    unsafe_unpickle: Unsafe = False,
    schema: Schemas = None,
    as_json: Json = False,
) -> None:
    """Shows what one key's state was at each retained checkpoint, the oldest first."""
    opened = open_store(store, create=False)
    wanted = given_key(inspect.find_checkpoint(opened), operator, key)
    table = inspect.history(
        opened, operator, wanted, cells=cell, **reading(as_bytes, unsafe_unpickle, schema)
    )
    hidden = {"epoch", "problem", "_key", "_window", "_carried"}
    columns = [name for name in table.column_names if name not in hidden]
    problems = [row for row in table.select(["id", "problem"]).to_pylist() if row["problem"]]
    if as_json:
        print_json(plain_rows(table))
        return
    _show(table.select(columns), len(table), 0, False)
    for row in problems:
        Console(stderr=True).print(f"{row['id']}: {row['problem']}", markup=False, style="red")


def diff(
    store: StoreArgument,
    a: Annotated[int, typer.Argument(help="The id of the one before.", metavar="A")],
    b: Annotated[int, typer.Argument(help="The id of the one after.", metavar="B")],
    operators: Annotated[
        list[str] | None, typer.Argument(help="Default: all.", metavar="OPERATOR...")
    ] = None,
    limit: Limit = 50,
    as_bytes: Bytes = False,
    unsafe_unpickle: Unsafe = False,
    schema: Schemas = None,
    as_json: Json = False,
) -> None:
    """Shows which keys changed between two checkpoints, and how.

    Key groups whose files are the same in both are not read.
    """
    opened = open_store(store, create=False)
    before, after = (set(inspect.operators(opened, id)["operator"].to_pylist()) for id in (a, b))
    console = Console()
    for uid in operators or sorted(before | after):
        if operators is None and uid not in before & after:
            text = f"operator {uid} is only in checkpoint {a if uid in before else b}"
            Console(stderr=True).print(text, markup=False)
            continue
        found = inspect.diff(opened, a, b, uid, **reading(as_bytes, unsafe_unpickle, schema))
        if as_json:
            print_json({"operator": uid} | row for row in plain_rows(found))
            continue
        counts = {name: 0 for name in ("added", "removed", "changed")}
        for change in found["change"].to_pylist():
            counts[change] += 1
        console.print(f"operator {uid}", style="bold", markup=False)
        console.print(", ".join(f"{count} {name}" for name, count in counts.items()))
        cells = [n for n in found.column_names if n not in _NOT_SHOWN]
        windows = [name for name in WINDOW_TIMES if name in found.column_names]
        table = table_of(("change", "key", *windows, *cells))
        for row in islice(plain_rows(found), limit or None):
            both = (row[name] for name in cells)
            which = (shown(row[name]) for name in ("change", "key", *windows))
            table.add_row(*which, *map(_before_and_after, both))
        if table.rows:
            console.print(table)
        _say_more(len(found), limit)


def sql(
    store: StoreArgument,
    query: Annotated[str, typer.Argument(help="For DuckDB.", metavar="QUERY")],
    at: At = None,
    limit: Limit = 100,
    as_bytes: Bytes = False,
    unsafe_unpickle: Unsafe = False,
    schema: Schemas = None,
    as_json: Json = False,
) -> None:
    """Runs a query over the state; each operator is a table of its name.

    Columns are `key`, one per cell, `_key`, `_window`, `_updated`, `_timers` and `_carried`. Needs
    DuckDB: pip install 'beam-ckpt[sql]'. `--limit` is for the terminal: with --json all rows are
    printed.
    """
    try:
        import duckdb
    except ImportError:
        raise typer.BadParameter("it needs DuckDB: pip install 'beam-ckpt[sql]'") from None
    opened = open_store(store, create=False)
    ways = Reading.of(**reading(as_bytes, unsafe_unpickle, schema))
    tables = views(opened, at="latest" if at is None else at, reading=ways)
    connection = duckdb.connect()
    try:
        for uid, view in tables.items():
            connection.register(uid, view)
        if not connection.extract_statements(query):
            raise typer.BadParameter("there is no statement in it")
        relation = connection.sql(query)
        if relation is None:  # a statement without a result
            return
        reader: pa.RecordBatchReader = relation.to_arrow_reader(10_000)
        batches = list(_at_most(reader, 0 if as_json else limit))
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        # What a table could not be read for is ours to say, and no fault of the query.
        failed = [view.failure for view in tables.values() if view.failure is not None]
        raise failed[0] if failed else typer.BadParameter(str(error).strip()) from error
    table = pa.Table.from_batches(batches, schema=reader.schema)
    _show(table, len(table), limit, as_json, nothing="no rows")


def export(
    store: StoreArgument,
    operator: Operator,
    format: Annotated[Format, typer.Option("--format", "-f", help="Of the rows.")] = Format.JSON,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: stdout, but for Parquet.")
    ] = None,
    at: At = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    as_bytes: Bytes = False,
    unsafe_unpickle: Unsafe = False,
    schema: Schemas = None,
) -> None:
    """Writes all of an operator's state, one row per key and window, key group by key group.

    In CSV an empty cell is empty and an empty string is `""`; lists, structs and maps are JSON.
    """
    if output is None and format is Format.PARQUET:
        raise typer.BadParameter("Parquet needs a file: --output state.parquet")
    if output is not None and output.exists() and not force:
        raise typer.BadParameter(f"{output} exists: choose another name, or --force")
    opened = open_store(store, create=False)
    manifest = inspect.find_checkpoint(opened, "latest" if at is None else at)
    ways = Reading.of(**reading(as_bytes, unsafe_unpickle, schema))
    rows = StateView(opened, manifest, operator, ways)
    if output is None:
        _write(rows, format, sys.stdout.buffer)
        sys.stdout.flush()
        return
    with whole_file(output) as file:
        count = _write(rows, format, file)
    text = f"{count} rows of {operator}, checkpoint {manifest.id}: {output}"
    Console(stderr=True, soft_wrap=True).print(text, markup=False)


# -- helpers -----------------------------------------------------------------------------------

_NOT_SHOWN = frozenset({"change", "key", "_key", "_window", *WINDOW_TIMES, "_updated", "_carried"})


class Ways(TypedDict):
    """Of reading cells, as `inspect.state` takes them."""

    untyped: Untyped
    unsafe_unpickle: bool
    schemas: list[Schema]


def reading(as_bytes: bool, unsafe_unpickle: bool, files: list[Path] | None) -> Ways:
    """Returns what the options `--bytes`, `--unsafe-unpickle` and `--schema` mean.

    Raises:
        typer.BadParameter: Two of them do not go together, or a file has no schema.
    """
    if as_bytes and unsafe_unpickle:
        raise typer.BadParameter("take one of the two", param_hint="--bytes / --unsafe-unpickle")
    schemas: list[Schema] = []
    try:
        for path in files or ():
            schemas += schemas_in(path)
        decoders(schemas)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--schema") from None
    if unsafe_unpickle:
        said = "pickles are opened: the code that they name runs"
        Console(stderr=True).print(said, style="yellow", markup=False)
    untyped: Untyped = "bytes" if as_bytes else "json"
    return {"untyped": untyped, "unsafe_unpickle": unsafe_unpickle, "schemas": schemas}


def typed_key(manifest: CheckpointManifest, operator: str, text: str) -> object | None:
    """Returns the key that was typed; None where its coder is not known here.

    Raises:
        typer.BadParameter: It cannot be a key of the operator.
    """
    spec = manifest.pipeline.operators.get(operator) if manifest.pipeline else None
    if spec is None:
        return None
    try:
        key = parse_key(spec.key_coder, text)
        if key is not None:
            encode_key(spec.key_coder, key)
    except ValueError as error:
        raise typer.BadParameter(f"no key of operator {operator!r}: {error}") from None
    return key


def given_key(manifest: CheckpointManifest, operator: str, text: str) -> object:
    """Returns the key that was typed; a guess from how it looks where its coder is not known."""
    key = typed_key(manifest, operator, text)
    if key is not None:
        return key
    if text.startswith("0x"):
        with contextlib.suppress(ValueError):
            return bytes.fromhex(text[2:])
    try:
        guess: object = json.loads(text)
    except ValueError:
        return text
    return text if guess is None else guess


def _show(
    table: pa.Table, rows: int, limit: int, as_json: bool, *, nothing: str = "nothing"
) -> None:
    if as_json:
        print_json(plain_rows(table))
        return
    console = Console()
    if not rows:
        console.print(nothing)
        return
    out = table_of(table.column_names)
    for row in islice(plain_rows(table), limit or None):
        out.add_row(*(shown(_brief(value)) for value in row.values()))
    console.print(out)
    _say_more(rows, limit)


def _say_more(rows: int, limit: int) -> None:
    if limit and rows > limit:
        text = f"{limit} rows shown; more with --limit N, all with --limit 0"
        Console(stderr=True).print(text)


def _at_most(batches: Iterable[pa.RecordBatch], limit: int) -> Iterator[pa.RecordBatch]:
    """Batches until there are more rows than are shown; 0 for all."""
    rows = 0
    for batch in batches:
        yield batch
        rows += len(batch)
        if limit and rows > limit:
            return


def _before_and_after(value: object) -> Text:
    """A cell on both sides."""
    before, after = map(_brief, value.values()) if isinstance(value, dict) else (None, None)
    if before == after:
        return shown(after)
    return Text.assemble(shown(before), " → ", shown(after))


def _brief(value: object) -> object:
    """A list of timers as their names and times; anything else as it is."""
    if not isinstance(value, list) or not all(isinstance(v, dict) and "fire" in v for v in value):
        return value
    return [" ".join(str(v[n]) for n in ("family", "tag", "fire") if v.get(n)) for v in value]


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when all of it is there."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _write(rows: StateView, format: Format, file: BinaryIO) -> int:
    count = 0
    if format is Format.PARQUET:
        with pq.ParquetWriter(file, rows.schema, compression="zstd") as writer:
            for batch in rows.batches():
                writer.write_batch(batch)
                count += len(batch)
        return count
    if format is Format.CSV:
        file.write(_csv_line(rows.schema.names))
    for batch in rows.batches():
        for row in plain_rows(batch):
            if format is Format.CSV:
                file.write(_csv_line(row.values()))
            else:
                file.write((to_json(row) + "\n").encode("utf-8"))
        count += len(batch)
    return count


def _csv_line(values: Iterable[object]) -> bytes:
    return (",".join(map(_csv_field, values)) + "\r\n").encode("utf-8")


def _csv_field(value: object) -> str:
    """As RFC 4180 has it: text in quotes, so that nothing is not the empty text."""
    if value is None:
        return ""
    if isinstance(value, bool | int | float):
        return to_json(value)
    text = value if isinstance(value, str) else to_json(value)
    return '"' + text.replace('"', '""') + '"'
