"""The page itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape

from beam_ckpt._terminal import event_time, printable, size
from beam_ckpt.inspect._catalog import AnyStore
from beam_ckpt.reporting._facts import Checkpoint, Facts, gather
from beam_ckpt.reporting._pictures import (
    depths,
    durations,
    heat_map,
    lineage,
    short_time,
    sizes,
)
from beam_ckpt.retention import KeepLast, RetentionPolicy

__all__ = ["report"]

_DRAWN = 60
_LISTED = 200
# Scripts, fonts, pictures from elsewhere: none of it, and the browser is told so.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def report(store: AnyStore, *, keep: RetentionPolicy | None = None) -> str:
    """Returns a page about a store, as one HTML document.

    Manifests are read, sidecars are not: a file that is damaged is found by `beam-ckpt validate`.

    Args:
        store: A path, a URL or a store.
        keep: The retention policy to show; that of `Checkpoints` unless told, three checkpoints.

    Raises:
        CheckpointNotFoundError: There is no store.
        CheckpointStorageError: The storage failed.
    """
    facts = gather(store, keep or KeepLast(3))
    title = f"Checkpoints in {facts.url}"
    sections = [
        _summary(facts),
        _timeline(facts),
        _state(facts),
        _chains(facts),
        _descent(facts),
        _retention(facts),
        _table_of_checkpoints(facts),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_said(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{_said(title)}</h1>\n" + "\n".join(sections) + "\n</main>\n</body>\n</html>\n"
    )


def _summary(facts: Facts) -> str:
    made = datetime.fromtimestamp(facts.now_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
    finalized = [c for c in facts.checkpoints if c.phase == "finalized"]
    damaged = [c for c in facts.checkpoints if c.problem]
    numbers = [
        _count(len(finalized), "recovery point"),
        _count(len(facts.operators), "operator"),
        _count(facts.key_groups, "key group"),
    ]
    newest = next((c for c in facts.checkpoints if c.id == facts.newest), None)
    if newest is not None:
        numbers.append((size(newest.bytes), "to restore"))
        if newest.created_ms is not None:
            age = short_time(max(0, facts.now_ms - newest.created_ms))
            numbers.append((age, "since the newest"))
    tiles = "".join(f"<li><b>{_said(n)}</b> {_said(what)}</li>" for n, what in numbers)
    lines = [
        f"<p class=faint>Made {made}. {_said(facts.versions)}</p>",
        f"<ul class=tiles>{tiles}</ul>",
    ]
    if newest is not None:
        lines.append(
            f"<p>A run that starts now goes on from checkpoint {newest.id}, up to "
            f"{_said(_cut(newest))}.</p>"
        )
    if damaged:
        items = "".join(f"<li>{c.id}: {_said(c.problem or '')}</li>" for c in damaged)
        lines.append(f"<div class=bad><b>Damaged</b><ul>{items}</ul></div>")
    if not facts.checkpoints:
        lines.append("<p>There is no checkpoint yet.</p>")
    return "\n".join(lines)


def _count(number: int, what: str) -> tuple[str, str]:
    return f"{number:,}", what if number == 1 else f"{what}s"


def _timeline(facts: Facts) -> str:
    if not facts.checkpoints:
        return ""
    drawn = facts.checkpoints[-_DRAWN:]
    left_out = len(facts.checkpoints) - len(drawn)
    note = f" The last {len(drawn)}; {left_out} older ones are not drawn." if left_out else ""
    spans = [c.created_ms for c in drawn if c.created_ms is not None]
    taken = ""
    if spans:
        first, last = (_moment(ms * 1000) for ms in (min(spans), max(spans)))
        taken = f" Taken from {first} to {last}."
    return _section(
        "Timeline",
        f"What each checkpoint wrote (solid) and what it shares with older ones (hatched). "
        f"★ the newest, ⚑ tagged, ? never published, x damaged.{note}{taken}",
        _figure(sizes(drawn)),
        "<p>How long each took, from its first file to its manifest.</p>",
        _figure(durations(drawn)),
    )


def _state(facts: Facts) -> str:
    if not facts.operators:
        return ""
    picture, per_column = heat_map(facts.operators, facts.key_groups)
    each = "" if per_column == 1 else f" A column is {per_column} key groups."
    rows = [
        (
            o.uid,
            o.key_coder or "?",
            ", ".join(f"{name} ({kind})" for name, kind, _ in o.cells) or "-",
            f"{len(o.bytes)} of {facts.key_groups}",
            f"{sum(o.rows.values()):,}",
            size(sum(o.bytes.values())),
        )
        for o in facts.operators
    ]
    heads = ("operator", "key coder", "cells", "key groups", "rows", "size")
    return _section(
        "State",
        f"Bytes of each operator by key group in checkpoint {facts.newest}. One cell that stands "
        f"out in a row is a key, or a few, with much state.{each}",
        _figure(picture),
        _table(heads, rows, numbers=(3, 4, 5), texts=(2,)),
    )


def _chains(facts: Facts) -> str:
    if not any(o.chains for o in facts.operators):
        return ""
    return _section(
        "Chain depth",
        "From how many files a key group is restored: a base, and what has changed since.",
        _figure(depths(facts.operators)),
    )


def _descent(facts: Facts) -> str:
    readable = [c for c in facts.checkpoints if not c.problem][-_DRAWN:]
    if not readable:
        return ""
    return _section(
        "Lineage",
        "Each checkpoint in the lane of the run that wrote it, with a line from the one that it "
        "came from. Hollow ones were never published.",
        _figure(lineage(readable)),
    )


def _retention(facts: Facts) -> str:
    policy = f"By {facts.policy}"
    if facts.going is None:
        text = f"{policy} nothing would be deleted now: {facts.refusal}"
        return _section("What retention will delete next", text)
    if facts.going.deleted:
        ids = ", ".join(map(str, facts.going.deleted))
        files = len(facts.going.sidecars)
        now = (
            f"a prune would delete checkpoints {ids} now, and {files} files that only they list "
            f"({size(facts.going_bytes)})."
        )
    else:
        now = "a prune would delete nothing now."
    then = "With the next checkpoint nothing more goes."
    if facts.next_going:
        then = f"With the next checkpoint {', '.join(map(str, facts.next_going))} will go as well."
    kept = [(str(id), why) for id, why in sorted(facts.kept_by.items())]
    parts = (
        [] if not kept else ["<p>These stay, whatever it says.</p>", _table(("id", "why"), kept)]
    )
    return _section("What retention will delete next", f"{policy} {now} {then}", *parts)


def _table_of_checkpoints(facts: Facts) -> str:
    if not facts.checkpoints:
        return ""
    rows = []
    for c in reversed(facts.checkpoints[-_LISTED:]):
        taken = None if c.created_ms is None else _moment(c.created_ms * 1000)
        names = ["latest"] * c.latest + list(c.tags)
        rows.append(
            (
                str(c.id),
                c.phase,
                "-" if c.problem else _cut(c),
                taken or "-",
                "-" if c.parent is None else str(c.parent),
                str(c.new_files),
                size(c.new_bytes),
                size(c.bytes),
                "-" if c.duration_ms is None else short_time(c.duration_ms),
                ", ".join(names),
            )
        )
    heads = (
        "id",
        "phase",
        "up to",
        "taken",
        "parent",
        "new files",
        "new",
        "in all",
        "took",
        "names",
    )
    listed = len(facts.checkpoints[-_LISTED:])
    note = "" if listed == len(facts.checkpoints) else f"The last {listed}."
    note = f"Times are in UTC. {note}"
    return _section(
        "Checkpoints", note, _table(heads, rows, numbers=(0, 4, 5, 6, 7, 8), whole=(1, 2, 3))
    )


def _cut(checkpoint: Checkpoint) -> str:
    if checkpoint.boundary is None:
        return "the end of the input"
    return _moment(checkpoint.boundary)


def _moment(micros: int) -> str:
    """A time in UTC, to the microsecond where it has any."""
    text = event_time(micros) or ""
    if not text.endswith("Z"):  # no year of the calendar
        return text
    whole, point, fraction = text[:-1].replace("T", " ").partition(".")
    digits = fraction.rstrip("0")
    return f"{whole}{point}{digits}" if digits else whole


def _section(title: str, text: str, *parts: str) -> str:
    words = f"<p>{_said(text)}</p>\n" if text else ""
    return f"<section>\n<h2>{_said(title)}</h2>\n{words}" + "\n".join(parts) + "\n</section>"


def _figure(picture: str) -> str:
    return f'<div class="wide" tabindex="0">{picture}</div>'


def _table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Sequence[int] = (),
    whole: Sequence[int] = (),
    texts: Sequence[int] = (),
) -> str:
    """A table; numbers stand to the right, what is whole stays on one line, texts have room."""
    kinds = {
        **dict.fromkeys(whole, " class=w"),
        **dict.fromkeys(numbers, " class=n"),
        **dict.fromkeys(texts, " class=t"),
    }

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{kinds.get(i, '')}>{_said(text)}</{tag}>" for i, text in enumerate(row)
        )

    body = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{cells(heads, 'th')}</tr></thead>"
    return f'<div class="wide" tabindex="0"><table>{head}<tbody>\n{body}\n</tbody></table></div>'


def _said(words: str) -> str:
    return escape(printable(words))


_STYLE = """
:root { --back: #fff; --text: #1a1a1a; --faint: #5c5c5c; --line: #d0d0d0; --panel: #f5f5f5;
  --new: #0072b2; --shared: #8cc4e3; --stripe: #0072b2; --warn: #b34700; --edge: #fff;
  --shade: rgb(0 0 0 / .3); --h0: #e4cf5b; --h1: #c4b56c; --h2: #a69d75; --h3: #8a8779;
  --h4: #707173; --h5: #39486b; --h6: #00204d; }
@media (prefers-color-scheme: dark) { :root { --back: #15181c; --text: #e8e8e8; --faint: #a6adb5;
  --line: #3a4048; --panel: #1e2329; --new: #56b4e9; --shared: #24455a; --stripe: #56b4e9;
  --warn: #f0a35e; --edge: #15181c; --shade: rgb(255 255 255 / .3); --h0: #39486b; --h1: #575c6d;
  --h2: #707173; --h3: #8a8779; --h4: #a69d75; --h5: #c4b56c; --h6: #ffea46; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .25rem; border-bottom: 1px solid var(--line); }
p { margin: .5rem 0; max-width: 44rem; overflow-wrap: anywhere; }
.faint { color: var(--faint); }
.tiles { display: flex; flex-wrap: wrap; gap: .5rem; padding: 0; list-style: none; }
.tiles li { background: var(--panel); border: 1px solid var(--line); border-radius: .4rem;
  padding: .4rem .7rem; }
.tiles b { font-size: 1.15rem; }
.bad { border-left: 4px solid var(--warn); padding: .2rem .8rem; overflow-wrap: anywhere; }
/* At an edge beyond which there is more lies a shadow; at an end, what scrolls along hides it. */
.wide { overflow-x: auto; margin: .5rem 0; background-repeat: no-repeat;
  background-image: linear-gradient(90deg, var(--back) 40%, transparent),
    linear-gradient(270deg, var(--back) 40%, transparent),
    linear-gradient(90deg, var(--shade), transparent),
    linear-gradient(270deg, var(--shade), transparent);
  background-position: left, right, left, right;
  background-attachment: local, local, scroll, scroll;
  background-size: 2rem 100%, 2rem 100%, .6rem 100%, .6rem 100%; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--text); }
svg text.faint { fill: var(--faint); } svg text.warn { fill: var(--warn); font-weight: bold; }
.grid { stroke: var(--line); stroke-width: 1; }
.new { fill: var(--new); }
.shared { fill: url(#hatch); stroke: var(--stripe); stroke-width: 1; }
.hatch-back { fill: var(--shared); } .hatch-line { stroke: var(--stripe); stroke-width: 2; }
.edge { fill: none; stroke: var(--faint); stroke-width: 1.5; }
.dot { fill: var(--new); stroke: var(--back); stroke-width: 1.5; }
.hollow { fill: var(--back); stroke: var(--warn); stroke-width: 2; }
.none { fill: var(--faint); }
.h0 { fill: var(--h0); } .h1 { fill: var(--h1); } .h2 { fill: var(--h2); } .h3 { fill: var(--h3); }
.h4 { fill: var(--h4); } .h5 { fill: var(--h5); } .h6 { fill: var(--h6); }
.h0, .h1, .h2, .h3, .h4, .h5, .h6 { stroke: var(--edge); stroke-width: .3; }
table { border-collapse: collapse; font-size: .875rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0;
  border-bottom: 1px solid var(--line); }
td { max-width: 22rem; overflow-wrap: break-word; }
th, .w { white-space: nowrap; }
td:last-child { min-width: 8rem; } td.t { min-width: 20rem; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
@media print { :root { --back: #fff; --text: #000; --faint: #444; --line: #999; --panel: #fff;
  --new: #0072b2; --shared: #fff; --stripe: #0072b2; --warn: #000; --edge: #fff;
  --h0: #e4cf5b; --h1: #c4b56c; --h2: #a69d75; --h3: #8a8779; --h4: #707173; --h5: #39486b;
  --h6: #00204d; }
  main { max-width: none; padding: 0; } svg { min-width: 0 !important; }
  .wide { overflow: visible; background-image: none; }
  section { break-inside: avoid; } table { font-size: .7rem; } tr { break-inside: avoid; }
  rect, circle { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
