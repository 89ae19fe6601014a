"""The commands of `beam-ckpt` that change saved state.

    beam-ckpt rewrite STORE ...               a new checkpoint with names, key groups, rows changed
    beam-ckpt forget STORE OPERATOR --key K   one key out of every checkpoint

`rewrite` leaves the checkpoint that it reads as it is. In a STORE that holds `totals` and
`sessions`:

    --rename-operator totals=sums             give an operator another uid
    --drop-operator sessions                  leave it out
    --rename-cell totals.count=n              give a cell another name
    --drop-cell totals.count                  leave it out
    --key-groups 16                           divide state into another number of parts
    --ttl 30d  or  --ttl totals=30d           drop rows last updated longer ago, before the cut
    --drop-where "totals: count < 2"          drop rows for which SQL (DuckDB) says true

`forget` replaces every checkpoint that holds the key, and those after it, by new ones without it,
moves the tags and deletes the old ones. It can be stopped at any point; run again, it goes on.

Stop the pipeline first: the store becomes the command's, and a run that is still going cannot
publish any more. So both ask before they change anything; `--yes` answers, and is needed where
there is no terminal to ask on. `--dry-run` reads and counts, and writes nothing.

With `--json` a command prints one JSON object to stdout; the question and progress go to stderr.

Exit status:

    0  done
    1  something is damaged, or something was published meanwhile, or the answer was no; or
       `forget` has to be run again
    2  wrong usage: a condition that DuckDB refuses, two things of one name
    3  not found: no such store, checkpoint, operator or cell
    4  the storage failed (permissions, network, I/O)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from beam_ckpt import inspect, maintenance
from beam_ckpt._durations import parse_duration
from beam_ckpt._terminal import (
    DAMAGED,
    Json,
    StoreArgument,
    event_time,
    print_json,
    printable,
    size,
)
from beam_ckpt.cli_maintenance import DryRun, Yes, confirm, ensure_can_ask
from beam_ckpt.cli_query import given_key
from beam_ckpt.errors import CheckpointError, CheckpointNotFoundError
from beam_ckpt.inspect import _catalog as inspect_catalog
from beam_ckpt.inspect._catalog import nearest
from beam_ckpt.manifest import CheckpointManifest
from beam_ckpt.store import CheckpointStore, open_store

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module to the application."""
    for command in (rewrite, forget):
        app.command(rich_help_panel="Changes")(command)


def rewrite(
    store: StoreArgument,
    at: Annotated[
        int | None, typer.Option(help="Checkpoint id; default: the newest valid one.")
    ] = None,
    rename_operator: Annotated[
        list[str] | None, typer.Option(help="Give an operator another uid.", metavar="OLD=NEW")
    ] = None,
    drop_operator: Annotated[
        list[str] | None, typer.Option(help="Leave an operator out.", metavar="OPERATOR")
    ] = None,
    rename_cell: Annotated[
        list[str] | None,
        typer.Option(help="Give a cell another name.", metavar="OPERATOR.CELL=NEW"),
    ] = None,
    drop_cell: Annotated[
        list[str] | None, typer.Option(help="Leave a cell out.", metavar="OPERATOR.CELL")
    ] = None,
    key_groups: Annotated[
        int | None, typer.Option(help="Into how many parts state is divided.", min=1, max=65535)
    ] = None,
    ttl: Annotated[
        list[str] | None,
        typer.Option(
            help="Drop rows last updated longer ago, such as 30d; of all operators, or of one.",
            metavar="[OPERATOR=]AGE",
        ),
    ] = None,
    as_of: Annotated[
        str | None,
        typer.Option(help="What --ttl counts from, ISO 8601; default: the cut.", metavar="TIME"),
    ] = None,
    drop_where: Annotated[
        list[str] | None,
        typer.Option(help="Drop rows for which this is true.", metavar="OPERATOR:SQL"),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Writes a checkpoint with changed state into a new one, from which the pipeline goes on.

    The old one is left as it is. Names are those of before. A run that has not been stopped is
    fenced. Needs DuckDB for --drop-where: pip install 'beam-ckpt[sql]'.
    """
    ensure_can_ask(yes=yes or dry_run)
    opened = open_store(store, create=False)
    base = inspect.find_checkpoint(opened, "latest" if at is None else at)
    names = _Names(base)
    ages: dict[str, float] = {}
    for text in ttl or ():
        uid, age = names.split(text, names.operators, "=", "--ttl", optional=True)
        for own in names.operators if uid is None else [uid]:
            ages[own] = _age(age)
    drops = drop_operator or []
    ages = {uid: age for uid, age in ages.items() if uid not in drops}
    change = {
        "rename_operators": names.pairs(rename_operator, names.operators, "--rename-operator"),
        "drop_operators": drops,
        "rename_cells": {
            names.cells[cell]: new
            for cell, new in names.pairs(rename_cell, names.cells, "--rename-cell").items()
        },
        "drop_cells": [names.cell(text) for text in drop_cell or ()],
        "key_groups": key_groups,
        "ttl": ages or None,
        "as_of": None if as_of is None else _moment(as_of),
        "drop_where": names.pairs(drop_where, names.operators, "--drop-where", sign=":"),
    }
    if not any(value or value == 0 for value in change.values()):
        raise typer.BadParameter("say what to change: see `beam-ckpt rewrite --help`")
    if not dry_run:
        at_cut = event_time(base.boundary) or "the end of the input"
        confirm(
            f"Rewrite checkpoint {base.id} (up to {at_cut}) of {printable(opened.url)} into a new "
            "one? A run that has not been stopped cannot publish any more.",
            yes=yes,
        )
    with _progress(as_json) as progress, _usage():
        report = maintenance.rewrite(
            opened,
            at="latest" if at is None else at,
            dry_run=dry_run,
            progress=progress,
            **change,  # type: ignore[arg-type]
        )
    if as_json:
        print_json([{"store": opened.url} | asdict(report)])
        return
    console = Console(soft_wrap=True, highlight=False)
    for one in report.operators:
        was = "" if one.operator == one.was else f" (was {one.was})"
        gone = [
            f"{count} {what}"
            for count, what in ((one.expired, "expired"), (one.matched, "dropped by condition"))
            if count
        ]
        gone += [f"{one.timers} pending timers went with them"] if one.timers else []
        same = "" if one.rewritten else ", as it was"
        text = f"operator {one.operator}{was}: " + ", ".join([f"{one.rows} rows{same}", *gone])
        console.print(printable(text), markup=False)
    for uid in report.dropped_operators:
        console.print(printable(f"operator {uid}: left out"), markup=False)
    wrote = f"{report.files} files, {size(report.bytes)}, {report.key_groups} key groups"
    if dry_run:
        console.print(f"would write a new checkpoint: {wrote}", markup=False)
    else:
        text = f"checkpoint {report.id}, from {report.base_id}, which is as it was: {wrote}"
        console.print(text, markup=False, style="green")


def forget(
    store: StoreArgument,
    operator: Annotated[str, typer.Argument(help="The operator's uid.", metavar="OPERATOR")],
    key: Annotated[str, typer.Option(help="The key: text, a number, 0x... bytes, or a JSON list.")],
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Removes one key's state, timers and held outputs from every checkpoint and tag.

    Checkpoints that held it are replaced by new ones of the same cut; a restore by an old id says
    which. A run that has not been stopped is fenced. Exit status 1 if something is left.
    """
    ensure_can_ask(yes=yes or dry_run)
    opened = open_store(store, create=False)
    wanted = given_key(_newest_with(opened, operator), operator, key)
    with _progress(as_json, "checkpoints") as progress, _usage():
        plan = maintenance.forget(opened, operator, wanted, dry_run=True)
        _say_forgotten(plan, as_json=as_json)
        report = plan
        if plan.found and not dry_run:
            confirm(
                "Remove it? This cannot be undone, and a run that has not been stopped cannot "
                "publish any more.",
                yes=yes,
            )
            report = maintenance.forget(opened, operator, wanted, progress=progress)
    if as_json:
        print_json([{"store": opened.url} | asdict(report) | {"found": report.found}])
    elif report.found and not dry_run:
        console = Console(soft_wrap=True, highlight=False)
        for old, new in report.replaced:
            console.print(f"checkpoint {old} is now {new}", markup=False)
        for name in report.tags:
            console.print(printable(f"tag {name!r} moved with its checkpoint"), markup=False)
        what = f"{report.rows} rows of the key in {report.files} files"
        console.print(f"removed {what}, {len(report.unlisted)} unlisted files", style="green")
    if not as_json:
        for name, why in report.left:
            Console(stderr=True, soft_wrap=True).print(
                printable(f"left: {name}: {why}"), markup=False, style="red"
            )
    if report.left:
        raise typer.Exit(DAMAGED)


# -- helpers ---------------------------------------------------------------------------------


def _newest_with(store: CheckpointStore, operator: str) -> CheckpointManifest:
    """The newest checkpoint that knows the operator, for the type of its keys; or the newest."""
    readable = list(inspect_catalog.readable(store))
    for manifest in reversed(readable):
        if manifest.pipeline and operator in manifest.pipeline.operators:
            return manifest
    if not readable:
        raise CheckpointNotFoundError(f"no checkpoint in {store.url} yet")
    return readable[-1]


def _say_forgotten(report: maintenance.ForgetReport, *, as_json: bool) -> None:
    console = Console(stderr=as_json, soft_wrap=True, highlight=False)
    if not report.found:
        console.print("nothing in the store holds the key")
        return
    if report.holding:
        held = ", ".join(map(str, report.holding))
        text = f"held by checkpoints {held}: {report.rows} rows in {report.files} files"
        console.print(text, markup=False)
    if report.replaced:
        olds = ", ".join(str(old) for old, _ in report.replaced)
        console.print(f"to be replaced (the later ones to stay later): {olds}", markup=False)
    if report.deleted:
        ids = ", ".join(map(str, report.deleted))
        console.print(f"to be deleted, never published or replaced already: {ids}", markup=False)
    for path in report.unlisted:
        console.print(printable(f"to be deleted, of no checkpoint: {path}"), markup=False)


class _Names:
    """The operators and cells of a checkpoint, to read what somebody typed."""

    def __init__(self, manifest: CheckpointManifest) -> None:
        specs = manifest.pipeline.operators if manifest.pipeline else {}
        self.where = f"checkpoint {manifest.id}"
        self.operators = sorted({*manifest.operators, *specs})
        self.cells = {f"{uid}.{cell}": (uid, cell) for uid in specs for cell in specs[uid].cells}

    def pairs(
        self, texts: list[str] | None, known: Collection[str], option: str, *, sign: str = "="
    ) -> dict[str, str]:
        found: dict[str, str] = {}
        for text in texts or ():
            name, rest = self.split(text, known, sign, option)
            assert name is not None
            if name in found:
                raise typer.BadParameter(f"{name!r} is given twice", param_hint=option)
            found[name] = rest
        return found

    def split(
        self, text: str, known: Collection[str], sign: str, option: str, *, optional: bool = False
    ) -> tuple[str | None, str]:
        """A name and what is said of it; names may have the sign in them, so the longest counts."""
        fits = [name for name in known if text.startswith(name + sign)]
        if fits:
            name = max(fits, key=len)
            return name, text[len(name) + len(sign) :].strip()
        if optional and sign not in text:
            return None, text
        if sign not in text:
            raise typer.BadParameter(f"{text!r} has no {sign!r}", param_hint=option)
        self._unknown(text.partition(sign)[0], known, option)

    def cell(self, text: str) -> tuple[str, str]:
        if text not in self.cells:
            self._unknown(text, self.cells, "--drop-cell")
        return self.cells[text]

    def _unknown(self, name: str, known: Collection[str], option: str) -> NoReturn:
        names = ", ".join(map(repr, sorted(known))) or "none"
        raise CheckpointNotFoundError(
            f"{option}: {self.where} has no {name!r}; it has {names}{nearest(name, known)}"
        )


def _age(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--ttl") from error


def _moment(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time", param_hint="--as-of") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


@contextlib.contextmanager
def _usage() -> Iterator[None]:
    """What cannot be done as it was said is wrong usage; what is damaged is not."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error


@contextlib.contextmanager
def _progress(quiet: bool, what: str = "key groups") -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=quiet or not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
