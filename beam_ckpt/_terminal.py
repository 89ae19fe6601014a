"""What the commands share: exit statuses, arguments, and how values are written."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

__all__ = [
    "DAMAGED",
    "OK",
    "Json",
    "StoreArgument",
    "event_time",
    "print_json",
    "printable",
    "size",
]

OK, DAMAGED = 0, 1

StoreArgument = Annotated[str, typer.Argument(help="A path or a URL.", metavar="STORE")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def event_time(micros: int | None) -> str | None:
    """ISO 8601 in UTC; a plain number of microseconds where the calendar has no such year."""
    if micros is None:
        return None
    try:
        return (_EPOCH + timedelta(microseconds=micros)).isoformat().replace("+00:00", "Z")
    except OverflowError:
        return f"{micros} us"


def print_json(rows: Iterable[Mapping[str, object]]) -> None:
    """Writes one JSON object per line to stdout."""
    for row in rows:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        # A file name that is no UTF-8 has lone surrogates: written as JSON escapes them.
        sys.stdout.write(line.encode("utf-8", "backslashreplace").decode("utf-8") + "\n")
    sys.stdout.flush()


def printable(text: str) -> str:
    """Escapes what would drive the terminal: a store's content is not to be trusted with it."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def size(count: int) -> str:
    """Bytes, in the unit that is read most easily."""
    number, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
