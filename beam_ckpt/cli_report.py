"""`beam-ckpt report`: a store on one page.

    beam-ckpt report STORE -o report.html

The page is one file with its pictures in it; it runs no script and asks for nothing. It shows when
checkpoints were taken, how large they are and how long they took, which operators and key groups
have how much state and in how many files, which checkpoint came from which, and what retention
(`--keep-last`, `--keep-for`; three checkpoints unless told) will delete next.

Exit status:

    0  done; damage that was seen is on the page
    2  wrong usage: a file that exists, or cannot be written
    3  not found: no such store
    4  the storage failed (permissions, network, I/O)
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from beam_ckpt import reporting
from beam_ckpt._terminal import StoreArgument, printable
from beam_ckpt.cli_maintenance import KeepForOption, KeepLastOption, given_policy
from beam_ckpt.cli_query import whole_file
from beam_ckpt.store import open_store

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command of this module to the application."""
    app.command(rich_help_panel="Queries")(report)


def report(
    store: StoreArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file.", metavar="FILE")],
    keep_last: KeepLastOption = None,
    keep_for: KeepForOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
) -> None:
    """Writes a page about a store: one HTML file, with its pictures in it, that needs no network.

    Manifests are read, sidecars are not. The policy is only shown: nothing is deleted.
    """
    if output.exists() and not force:
        raise typer.BadParameter(f"{output} exists: choose another name, or --force")
    given = keep_last is not None or keep_for is not None
    keep = given_policy(keep_last, keep_for) if given else None
    opened = open_store(store, create=False)
    page = reporting.report(opened, keep=keep)
    with whole_file(output) as file:
        file.write(page.encode("utf-8"))
    said = printable(f"{opened.url}: {output}")
    Console(stderr=True, soft_wrap=True).print(said, markup=False)
