"""How the cost of an epoch and of a restore grows, printed and plotted.

One thing is varied at a time: the cost of an epoch against all of the state (it should be flat),
against the keys that the epoch touched (a line), against the key groups and the operators; and the
cost of a restore against the state (a line). What stays the same in each is printed with it.

    python benchmarks/scaling.py                       prints; writes docs/pictures/scaling.svg
    python benchmarks/scaling.py --scale 0.1 --svg ''  a tenth of the keys, no plot

The steps behind an operator (writer, committer, restore) run without a runner, on a store in
memory, so that what is measured is theirs: seconds of the processor, the median of a few epochs.
Operators are measured in whole runs on FnApiRunner with ``--checkpoint_fast_state_cache``, of one
epoch and of several: what another epoch costs is the difference by the number.
"""

from __future__ import annotations

import random
import statistics
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import apache_beam as beam
import typer
from apache_beam.coders import StrUtf8Coder, VarIntCoder
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
from apache_beam.transforms.window import GlobalWindows, TimestampedValue
from rich.console import Console
from rich.table import Table

from beam_ckpt import CheckpointStore, open_store
from beam_ckpt.testing.driven import DrivenCheckpoints, restored
from beam_ckpt.transforms import Checkpoints
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.snapshot import SnapshotRecord

OPERATOR = OperatorState(
    "totals",
    StrUtf8Coder(),
    GlobalWindows().get_window_coder(),
    tuple(CellState(name, "read_modify_write", VarIntCoder()) for name in ("count", "sum", "last")),
    False,
)
ROOT = Path(__file__).resolve().parents[1]
GROUPS = 16


@dataclass(frozen=True)
class Curve:
    """One measured curve.

    Attributes:
        title: What was measured.
        axis: What was varied.
        fixed: What was not.
        shape: What is expected of it.
        points: Of each: the varied number, and milliseconds of the processor.
    """

    title: str
    axis: str
    fixed: str
    shape: str
    points: Sequence[tuple[int, float]]


def record(key: int, rng: random.Random) -> bytes:
    """A key's record, with numbers of usual sizes."""
    cells = tuple(VarIntCoder().encode(rng.randrange(2**bits)) for bits in (10, 20, 30))
    return SnapshotRecord(b"user-%07d" % key, b"", False, 0, cells, (), ()).to_bytes()


def in_memory() -> CheckpointStore:
    """A store of its own."""
    return open_store(f"memory://scaling-{uuid.uuid4().hex}")


def saved(keys: int, groups: int) -> tuple[CheckpointStore, DrivenCheckpoints]:
    """A store whose checkpoint has all keys, and the run that wrote it."""
    rng, store = random.Random(1), in_memory()
    job = DrivenCheckpoints(store, OPERATOR, groups)
    job.checkpoint(1_000_000, [(key % groups, record(key, rng)) for key in range(keys)])
    return store, job


def epoch_ms(keys: int, touched: int, groups: int, epochs: int = 9) -> float:
    """What an epoch costs that touches that many of the keys."""
    rng = random.Random(2)
    _, job = saved(keys, groups)
    taken = []
    for epoch in range(2, epochs + 2):
        chosen = rng.sample(range(keys), min(touched, keys))
        records = [(key % groups, record(key, rng)) for key in chosen]
        begin = time.process_time()
        job.checkpoint(epoch * 1_000_000, records)
        taken.append(time.process_time() - begin)
    return statistics.median(taken) * 1000


def restore_ms(keys: int, groups: int) -> float:
    """What it costs to read all keys of a checkpoint back."""
    store, _ = saved(keys, groups)
    newest = store.load_latest()
    assert newest is not None
    taken = []
    for _ in range(3):
        begin = time.process_time()
        found = sum(1 for _ in restored(store, OPERATOR, newest))
        taken.append(time.process_time() - begin)
        assert found == keys
    return statistics.median(taken) * 1000


class CountFn(beam.DoFn):
    """Counts per key."""

    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())

    def process(self, element: tuple[str, int], count=beam.DoFn.StateParam(COUNT)) -> tuple[()]:
        """Adds one."""
        count.write((count.read() or 0) + 1)
        return ()


def run_ms(operators: int, epochs: int, keys: int) -> float:
    """What a whole run costs, each of whose epochs touches every key once in every operator."""
    arguments = ["--runner=FnApiRunner", "--checkpoint_fast_state_cache"]
    events = [
        TimestampedValue((f"user-{key:07d}", key), epoch + key / keys)
        for epoch in range(epochs)
        for key in range(keys)
    ]
    begin = time.process_time()
    with (
        beam.Pipeline(options=PipelineOptions(arguments)) as p,
        Checkpoints(p, in_memory(), every=1, key_groups=4) as ckpt,
    ):
        keyed = (
            p
            | beam.Create([None])
            | beam.FlatMap(lambda _: events).with_output_types(tuple[str, int])
        )
        for i in range(operators):
            keyed | f"Count{i}" >> ckpt.ParDo(CountFn(), uid=f"count-{i}")
    return (time.process_time() - begin) * 1000


def operators_ms(operators: int, keys: int) -> float:
    """What another epoch costs."""
    few, many = 2, 8
    return (run_ms(operators, many, keys) - run_ms(operators, few, keys)) / (many - few)


def measure(scale: float) -> list[Curve]:
    """All curves; `scale` is a factor of the numbers of keys."""

    def keys(*numbers: int) -> list[int]:
        return [max(round(number * scale), 10) for number in numbers]

    (touched, state, few) = keys(2_000, 200_000, 500)
    epoch_ms(touched, touched, GROUPS)  # what is loaded at the first use is nobody's
    return [
        Curve(
            "An epoch against all of the state", "keys in the state",
            f"{touched:,} keys touched, {GROUPS} key groups", "flat",
            [(n, epoch_ms(n, touched, GROUPS)) for n in keys(25_000, 50_000, 100_000, 200_000)],
        ),
        Curve(
            "An epoch against the keys it touched", "keys touched",
            f"{state:,} keys, {GROUPS} key groups", "a line",
            [(n, epoch_ms(state, n, GROUPS)) for n in keys(2_000, 10_000, 25_000, 50_000)],
        ),
        Curve(
            "An epoch against the key groups", "key groups",
            f"{state:,} keys, {touched:,} touched", "a line",
            [(n, epoch_ms(state, touched, n)) for n in (1, 16, 64, 128, 256)],
        ),
        Curve(
            "An epoch against the operators", "operators",
            f"{few:,} keys touched in each, 4 key groups; in whole runs", "a line",
            [(n, operators_ms(n, few)) for n in (1, 2, 4, 8)],
        ),
        Curve(
            "A restore against the state", "keys in the state", f"{GROUPS} key groups", "a line",
            [(n, restore_ms(n, GROUPS)) for n in keys(10_000, 50_000, 100_000, 200_000)],
        ),
    ]  # fmt: skip


# ---------------------------------------------------------------------- the plot
WIDTH, HEIGHT, LEFT, BOTTOM = 400, 250, 62, 42
STYLE = """
text { font: 12px sans-serif; fill: #24292f }
.title { font-weight: bold; font-size: 13px }
.axis { stroke: #57606a; stroke-width: 1; fill: none }
.grid { stroke: #57606a; stroke-opacity: 0.25 }
.line { stroke: #0969da; stroke-width: 2; fill: none }
.point { fill: #0969da }
"""


def panel(curve: Curve, x: int, y: int) -> str:
    """One curve as SVG, both axes from zero."""
    right, top = WIDTH - 20, 48
    base = HEIGHT - BOTTOM
    most, longest = max(n for n, _ in curve.points), max(ms for _, ms in curve.points) * 1.15

    def place(n: float, ms: float) -> tuple[float, float]:
        return LEFT + (right - LEFT) * n / most, base - (base - top) * ms / longest

    out = [
        f'<g transform="translate({x} {y})">',
        f'<text class="title" x="{LEFT}" y="18">{curve.title}</text>',
        f'<text x="{LEFT}" y="35">{curve.fixed}</text>',
    ]
    for part in (0.25, 0.5, 0.75, 1):
        at = place(0, longest * part)[1]
        out.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{right}"/>')
        label = f"{longest * part:,.0f}"
        out.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    out.append(f'<path class="axis" d="M{LEFT} {top}V{base}H{right}"/>')
    for part in (0, 0.5, 1):
        at = place(most * part, 0)[0]
        anchor = "end" if part == 1 else "middle"
        label = f"{most * part:,.0f}"
        out.append(f'<text x="{at:.1f}" y="{base + 16}" text-anchor="{anchor}">{label}</text>')
    out.append(f'<text x="{LEFT}" y="{base + 34}">{curve.axis}; ms of the processor upwards</text>')
    placed = [place(n, ms) for n, ms in curve.points]
    path = "L".join(f"{px:.1f} {py:.1f}" for px, py in placed)
    out.append(f'<path class="line" d="M{path}"/>')
    out += [f'<circle class="point" cx="{px:.1f}" cy="{py:.1f}" r="3.5"/>' for px, py in placed]
    return "\n".join([*out, "</g>"])


def plot(curves: Sequence[Curve]) -> str:
    """All curves as one SVG, in two columns, on a ground of its own."""
    rows = -(-len(curves) // 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{rows * HEIGHT}" '
        f'viewBox="0 0 {2 * WIDTH} {rows * HEIGHT}" role="img">',
        "<title>What an epoch and a restore cost</title>",
        '<rect fill="#ffffff" width="100%" height="100%" rx="6"/>',
        f"<style>{STYLE}</style>",
        *(panel(c, i % 2 * WIDTH, i // 2 * HEIGHT) for i, c in enumerate(curves)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main(
    scale: Annotated[float, typer.Option(help="Factor of the numbers of keys.", min=0)] = 1,
    svg: Annotated[str, typer.Option(help="Where to plot; '' for no plot.")] = str(
        ROOT / "docs" / "pictures" / "scaling.svg"
    ),
) -> None:
    """Measures, prints and plots."""
    curves = measure(scale)
    table = Table("what", "same in all", "expected", "points: ms of the processor")
    for curve in curves:
        points = "  ".join(f"{n:,}: {ms:,.1f}" for n, ms in curve.points)
        table.add_row(curve.title, curve.fixed, curve.shape, f"{curve.axis} {points}")
    Console(width=150).print(table)
    if svg:
        Path(svg).write_text(plot(curves), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
