"""The pictures, as SVG: bars, a heat map, a graph of parents. Colours are in the page's styles.

What colour tells is told by position, pattern or words as well, so that nothing is lost on paper or
to who sees other colours. The scale of the heat map is that of cividis (Nuñez et al., 2018), which
is ordered by lightness, also in grey and to the colour-blind. Its weak end is the one next to the
page's ground, so that what stands out is much; what holds nothing is no colour but a thin line.

A picture is as wide as what it shows needs, so that a few checkpoints fit on a phone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from beam_ckpt._terminal import printable, size
from beam_ckpt.reporting._facts import Checkpoint, Operator

__all__ = ["depths", "durations", "heat_map", "lineage", "short_time", "sizes"]

_NARROW, _WIDTH = 360, 720
_LEFT, _RIGHT = 74, 10
_LETTER = 6.6
STEPS = 7


def _width(needed: float) -> int:
    return round(min(max(needed, _NARROW), _WIDTH))


def short_time(ms: float) -> str:
    """Milliseconds in the unit that is read most easily."""
    if ms < 1000:
        return f"{ms:.0f} ms"
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if ms / 1000 < limit:
            return f"{ms / 1000 / unit:.1f} {name}"
    return f"{ms / 86_400_000:.1f} days"


def sizes(checkpoints: Sequence[Checkpoint]) -> str:
    """Bars: bytes of each checkpoint, what it wrote and what it shares."""

    def parts(c: Checkpoint) -> list[tuple[str, float, str]]:
        return [
            ("shared", c.shared_bytes, f"shared with older ones: {size(c.shared_bytes)}"),
            ("new", c.new_bytes, f"new: {size(c.new_bytes)} in {c.new_files} files"),
        ]

    return _bars(checkpoints, parts, lambda n: size(round(n)), "Bytes of each checkpoint")


def durations(checkpoints: Sequence[Checkpoint]) -> str:
    """Bars: how long each took to write, where that is known."""

    def parts(c: Checkpoint) -> list[tuple[str, float, str]]:
        if c.duration_ms is None:
            return []
        return [("new", c.duration_ms, f"{short_time(c.duration_ms)} from first file to manifest")]

    return _bars(checkpoints, parts, short_time, "Duration of each checkpoint")


def _bars(
    checkpoints: Sequence[Checkpoint],
    parts: Callable[[Checkpoint], list[tuple[str, float, str]]],
    text: Callable[[float], str],
    label: str,
) -> str:
    height, bottom, top = 170, 34, 22
    inner = height - bottom - top
    most = max((sum(n for _, n, _ in parts(c)) for c in checkpoints), default=0) or 1
    width = _width(_LEFT + _RIGHT + 40 * len(checkpoints))
    step = (width - _LEFT - _RIGHT) / max(len(checkpoints), 1)
    wide = min(step * 0.7, 46)
    out = [_open(width, height, label), _hatch()]
    for share in (0, 0.5, 1):
        y = top + inner * (1 - share)
        out.append(
            f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        if share in (0, 1) or text(most * share) not in (text(0), text(most)):
            out.append(_text(_LEFT - 8, y + 4, text(most * share), "end"))
    every = max(1, -(-len(checkpoints) // 24))
    for i, c in enumerate(checkpoints):
        x = _LEFT + step * i + (step - wide) / 2
        y, title = top + inner, f"checkpoint {c.id}"
        for kind, amount, words in parts(c):
            tall = inner * amount / most
            y -= tall
            title = f"{title}, {words}"
            out.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" '
                f'height="{max(tall, 0):.1f}"><title>{_said(title)}</title></rect>'
            )
        middle = x + wide / 2
        if c.phase != "finalized":
            mark = "?" if c.phase == "prepared" else "x"
            out.append(_text(middle, y - 5, mark, "middle", "warn"))
        elif c.latest or c.tags:
            mark = "★" if c.latest else "⚑"
            out.append(_text(middle, y - 5, mark, "middle", "mark"))
        if i % every == 0:
            out.append(_text(middle, height - bottom + 16, str(c.id), "middle"))
    out.append(_text((_LEFT + width) / 2, height - 4, "checkpoint id", "middle", "faint"))
    return "".join([*out, "</svg>"])


def heat_map(
    operators: Sequence[Operator], key_groups: int, most_columns: int = 128
) -> tuple[str, int]:
    """Returns operator by key group, and how many key groups a column stands for."""
    per_column = max(1, -(-key_groups // most_columns))
    columns = -(-key_groups // per_column) if key_groups else 0
    held = [
        [
            sum(o.bytes.get(g, 0) for g in range(c * per_column, (c + 1) * per_column))
            for c in range(columns)
        ]
        for o in operators
    ]
    most = max((n for row in held for n in row), default=0) or 1
    names = [_short(operator.uid, 22) for operator in operators]
    left, top, tall = 16 + _LETTER * max(map(len, names), default=0), 8, 24
    width = _width(left + _RIGHT + 13 * columns)
    wide = (width - left - _RIGHT) / max(columns, 1)
    height = top + len(operators) * (tall + 4) + 64
    out = [_open(width, height, "Bytes by operator and key group")]
    for i, (operator, name, row) in enumerate(zip(operators, names, held, strict=True)):
        y = top + i * (tall + 4)
        title = f"<title>{_said(operator.uid)}</title>"
        out.append(_text(left - 8, y + tall / 2 + 4, name, "end", inner=title))
        for c, amount in enumerate(row):
            first, last = c * per_column, min((c + 1) * per_column, key_groups) - 1
            groups = f"key group {first}" if first == last else f"key groups {first} to {last}"
            kind = f"h{min(STEPS - 1, amount * STEPS // (most + 1))}" if amount else "none"
            at, high = (y, tall) if amount else (y + tall / 2 - 1, 2)
            out.append(
                f'<rect class="{kind}" x="{left + c * wide:.2f}" y="{at}" '
                f'width="{max(wide - 0.6, 0.6):.2f}" height="{high}">'
                f"<title>{_said(operator.uid)}, {groups}: {size(amount)}</title></rect>"
            )
    y = top + len(operators) * (tall + 4) + 14
    for c in sorted({0, columns // 4, columns // 2, columns * 3 // 4, max(columns - 1, 0)}):
        out.append(_text(left + (c + 0.5) * wide, y, str(c * per_column), "middle"))
    out.append(_text((left + width) / 2, y + 14, "key group", "middle", "faint"))
    out.append(_legend(8, y + 24, most))
    return "".join([*out, "</svg>"]), per_column


def _legend(x: float, y: float, most: int) -> str:
    out = [
        f'<rect class="none" x="{x}" y="{y + 4}" width="22" height="2"/>',
        _text(x + 28, y + 9, "nothing"),
    ]
    x += 118
    for step in range(STEPS):
        out.append(f'<rect class="h{step}" x="{x + step * 22}" y="{y}" width="22" height="10"/>')
    out.append(_text(x - 6, y + 9, "1 B", "end"))
    out.append(_text(x + STEPS * 22 + 6, y + 9, size(most)))
    return "".join(out)


def depths(operators: Sequence[Operator]) -> str:
    """Bars: how many key groups are restored from so many files."""
    rows = [(o.uid, depth, count) for o in operators for depth, count in o.depths.items()]
    most = max((count for _, _, count in rows), default=0) or 1
    names = [
        f"{_short(uid, 20)}, {'1 file' if depth == 1 else f'{depth} files'}"
        for uid, depth, _ in rows
    ]
    left, right, tall, width = 16 + _LETTER * max(map(len, names), default=0), 110, 18, 420
    height = len(rows) * (tall + 6) + 10
    out = [_open(width, height, "Files that a key group is restored from"), _hatch()]
    for i, (name, (_, depth, count)) in enumerate(zip(names, rows, strict=True)):
        y = 6 + i * (tall + 6)
        long = (width - left - right) * count / most
        out.append(_text(left - 8, y + 13, name, "end"))
        out.append(
            f'<rect class="{"new" if depth == 1 else "shared"}" x="{left}" y="{y}" '
            f'width="{long:.1f}" height="{tall}"/>'
        )
        groups = "1 key group" if count == 1 else f"{count} key groups"
        out.append(_text(left + long + 8, y + 13, groups))
    return "".join([*out, "</svg>"])


def lineage(checkpoints: Sequence[Checkpoint]) -> str:
    """A dot for each checkpoint, in the lane of its run, with a line to its parent."""
    runs = sorted({c.generation for c in checkpoints})
    lane = {generation: i for i, generation in enumerate(runs)}
    height, top, between = len(runs) * 30 + 52, 18, 30
    width = _width(_LEFT + 30 + 40 * len(checkpoints))
    step = (width - _LEFT - 30) / max(len(checkpoints) - 1, 1)
    step = min(step, 90)
    place = {
        c.id: (_LEFT + 14 + i * step, top + lane[c.generation] * between)
        for i, c in enumerate(checkpoints)
    }
    out = [_open(width, height, "Which checkpoint came from which, by run")]
    for generation, i in lane.items():
        name = f"run {generation}" if generation else "no run"
        out.append(_text(_LEFT - 8, top + i * between + 4, name, "end"))
        y = top + i * between
        out.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y}" y2="{y}"/>')
    for c in checkpoints:
        if c.parent in place:
            (x1, y1), (x2, y2) = place[c.parent], place[c.id]
            middle = (x1 + x2) / 2
            out.append(
                f'<path class="edge" d="M{x1:.1f} {y1:.1f}C{middle:.1f} {y1:.1f} {middle:.1f} '
                f'{y2:.1f} {x2:.1f} {y2:.1f}"/>'
            )
    every = max(1, -(-len(checkpoints) // 24))
    for i, c in enumerate(checkpoints):
        x, y = place[c.id]
        parent = "" if c.parent is None else f", from {c.parent}"
        title = f"<title>checkpoint {c.id}{parent}, {c.phase}</title>"
        kind = "dot" if c.phase == "finalized" else "hollow"
        out.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5">{title}</circle>')
        if i % every == 0:
            out.append(_text(x, height - 20, str(c.id), "middle"))
    out.append(_text((_LEFT + width) / 2, height - 4, "checkpoint id", "middle", "faint"))
    return "".join([*out, "</svg>"])


def _short(uid: str, most: int) -> str:
    return uid if len(uid) <= most else uid[: most - 1] + "…"


def _open(width: float, height: float, label: str) -> str:
    # Letters of 12 pixels at the least size are 10, and at the greatest 16.
    return (
        f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" style="min-width:{width * 0.8:.0f}px;'
        f'max-width:{width * 4 / 3:.0f}px" xmlns="http://www.w3.org/2000/svg">'
    )


def _hatch() -> str:
    return (
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect class="hatch-back" width="6" height="6"/>'
        '<line class="hatch-line" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>'
    )


def _text(
    x: float, y: float, words: str, anchor: str = "start", kind: str = "", inner: str = ""
) -> str:
    named = f' class="{kind}"' if kind else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{_said(words)}{inner}</text>'
    )


def _said(words: str) -> str:
    return escape(printable(words))
