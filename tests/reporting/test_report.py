"""The page about a store: what it shows is what the store has, and it asks for nothing else."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pypdfium2
import pytest
from apache_beam.coders import StrUtf8Coder, VarIntCoder
from apache_beam.transforms.window import GlobalWindow, GlobalWindows

from beam_ckpt import cli, open_store
from beam_ckpt.errors import CheckpointNotFoundError
from beam_ckpt.keygroups import key_group
from beam_ckpt.manifest import (
    CheckpointManifest,
    OperatorSnapshotEntry,
    PartitionSnapshotEntry,
    PipelineIdentity,
    RunIdentity,
    new_checkpoint_id,
)
from beam_ckpt.reporting import report
from beam_ckpt.reporting._facts import gather
from beam_ckpt.reporting._page import _STYLE
from beam_ckpt.retention import KeepLast
from beam_ckpt.sidecar import encode_sidecar
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.snapshot import SnapshotRecord

S = 1_000_000
WINDOWS = GlobalWindows().get_window_coder()
CELLS = tuple(CellState(f"a cell of a long name {n}", "bag", VarIntCoder()) for n in range(6))
TOTALS = OperatorState("totals", StrUtf8Coder(), WINDOWS, CELLS, False)
EVIL = replace(TOTALS, uid='<script src="http://evil/x.js">&"\u202e')
GROUPS = 16


def save(
    store: Any, base: Any, keys: range, operator: OperatorState = TOTALS, **fields: Any
) -> Any:
    """A checkpoint that adds a file to each key group that these keys are in."""
    run_id = uuid.uuid4().hex
    generation = store.claim_generation(run_id)
    run = RunIdentity(generation=generation, run_id=run_id)
    epoch = 1 if base is None else base.epoch + 1
    chains: dict[str, dict[int, tuple[Any, ...]]] = {operator.uid: {}}
    for uid, entry in ({} if base is None else base.operators).items():
        chains[uid] = {p.partition_id: p.sidecars for p in entry.partitions}
    groups: dict[int, list[SnapshotRecord]] = {}
    for n in keys:
        key = f"key {n}".encode()
        cells = ((b"\x01",),) * len(CELLS)
        one = SnapshotRecord(key, WINDOWS.encode(GlobalWindow()), False, 0, cells, (), ())
        groups.setdefault(key_group(key, GROUPS), []).append(one)
    for group, ones in groups.items():
        held = chains[operator.uid].get(group, ())
        kind: Any = "delta" if held else "full"
        table = operator.to_table(ones)
        header = operator.header(key_group=group, boundary=epoch * S, kind=kind)
        entry = store.write_sidecar(
            operator=operator.uid, key_group=group, boundary=epoch * S, run_id=run_id,
            data=encode_sidecar(table, header), kind=kind, rows=len(table),
        )  # fmt: skip
        chains[operator.uid][group] = (*held, entry.model_copy(update={"epoch": epoch}))
    operators = {
        uid: OperatorSnapshotEntry(
            partitions=tuple(
                PartitionSnapshotEntry(partition_id=g, sidecars=chain)
                for g, chain in sorted(of.items())
            )
        )
        for uid, of in chains.items()
    }
    specs = {uid: TOTALS.spec() for uid in operators}
    settings = {
        "checkpoint_id": new_checkpoint_id(), "id": store.next_id(), "epoch": epoch,
        "timestamp_ms": 10**12 + epoch * 60_000, "operators": operators, "watermark": epoch * S,
        "parent_id": None if base is None else base.checkpoint_id, "key_group_count": GROUPS,
        "run": run, "durable_phase": "finalized",
        "pipeline": PipelineIdentity(
            operators=specs, beam_version="2.77.0", python_version="3.11.7"
        ),
    }  # fmt: skip
    return store.save(CheckpointManifest(**(settings | fields)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Six checkpoints, one of them tagged, and an attempt; two operators."""
    root = tmp_path / "ckpt"
    store = open_store(root)
    base = save(store, None, range(30))
    for n in range(2, 6):
        base = save(store, base, range(n))
    base = save(store, base, range(3), EVIL)
    save(store, base, range(2), durable_phase="prepared")
    store.tag("<b>before</b>", 2)
    return root


class Page(HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._style = tag == "style"

    def handle_data(self, data: str) -> None:
        if not self._style:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def pictures(page: str) -> dict[str, ET.Element]:
    """The SVG pictures by their labels; each has to be well-formed XML."""
    found = {}
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        element = ET.fromstring(svg)
        found[element.attrib["aria-label"]] = element
    return found


def shapes(picture: ET.Element, kind: str) -> list[ET.Element]:
    return [e for e in picture.iter() if e.attrib.get("class") == kind]


def title(element: ET.Element) -> str:
    (found,) = [child.text or "" for child in element if child.tag.endswith("title")]
    return found


def test_the_page_asks_for_nothing_and_runs_nothing(root: Path) -> None:
    text = report(root)
    page = Page(text)
    names = {name for name, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "form", "base", "a"}
    for _, attributes in page.tags:
        assert not [n for n in attributes if n in ("src", "href", "srcset") or n.startswith("on")]
    assert set(re.findall(r"url\((.*?)\)", text)) == {"#hatch"}
    assert "@import" not in text and "@font-face" not in text
    (policy,) = [a["content"] for _, a in page.tags if a.get("http-equiv")]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    links = set(re.findall(r"https?://[^\s\"'<>&]+", text))
    links = {link for link in links if not link.startswith("http://e")}  # the text of a uid
    assert links == {"http://www.w3.org/2000/svg"}  # a name


def test_what_a_store_says_is_text_and_no_markup(root: Path) -> None:
    page = Page(report(root))
    assert '<script src="http://evil/x.js">' in page.text
    assert "<b>before</b>" in page.text
    assert "\u202e" not in page.text, "it would turn what follows round"
    assert "b" in {name for name, _ in page.tags} and "script" not in {n for n, _ in page.tags}


def test_bars_are_the_bytes_that_were_written_and_shared(root: Path) -> None:
    picture = pictures(report(root))["Bytes of each checkpoint"]
    store = open_store(root)
    new, shared = (
        [float(e.attrib["height"]) for e in shapes(picture, k)] for k in ("new", "shared")
    )
    total = [new[i] + shared[i] for i in range(7)]
    sizes = [store.load_by_id(id).total_size_bytes for id in range(1, 8)]
    most = max(sizes)
    for drawn, held in zip(total, sizes, strict=True):
        assert drawn / max(total) == pytest.approx(held / most, abs=0.01)
    assert shared[0] == 0 < new[0]
    first = title(shapes(picture, "new")[0])
    files = len(store.load_by_id(1).sidecar_paths())
    assert first.startswith("checkpoint 1, ") and first.endswith(f"in {files} files")
    marks = [e.text for e in picture.iter() if e.text in ("★", "⚑", "?", "x")]
    assert marks == ["⚑", "★", "?"]


def test_the_heat_map_is_every_operator_and_key_group(root: Path) -> None:
    picture = pictures(report(root))["Bytes by operator and key group"]
    entry = open_store(root).load_by_id(6).operators["totals"]
    held = {p.partition_id: sum(s.size_bytes for s in p.sidecars) for p in entry.partitions}
    cells = [e for e in picture.iter() if e.tag.endswith("rect") and len(e)]
    ours = [e for e in cells if title(e).startswith("totals, ")]
    assert len(ours) == GROUPS and len(cells) == 2 * GROUPS
    for group, cell in enumerate(ours):
        assert f"key group {group}: " in title(cell)
        assert (cell.attrib["class"] == "none") == (group not in held)
    most = max(held, key=lambda g: held[g])
    kinds = {group: cell.attrib["class"] for group, cell in enumerate(ours) if group in held}
    assert kinds[most] == max(kinds.values()) == "h6"
    ordered = sorted(held, key=lambda g: held[g])
    assert [kinds[g] for g in ordered] == sorted(kinds.values())


def test_many_key_groups_share_columns() -> None:
    from beam_ckpt.reporting._facts import Operator
    from beam_ckpt.reporting._pictures import heat_map

    operator = Operator("o", "", (), bytes={0: 5, 999: 7, 65534: 1})
    picture, per_column = heat_map([operator], 65535)
    cells = [e for e in ET.fromstring(picture).iter() if e.tag.endswith("rect") and len(e)]
    assert (per_column, len(cells)) == (512, 128)
    assert "key groups 512 to 1023: 7 B" in title(cells[1])
    assert "key groups 65024 to 65534: 1 B" in title(cells[-1])


def test_chain_depths_count_key_groups_by_files(root: Path) -> None:
    picture = pictures(report(root))["Files that a key group is restored from"]
    words = [e.text or "" for e in picture.iter() if e.tag.endswith("text")]
    entry = open_store(root).load_by_id(6).operators["totals"]
    depth = [len(p.sidecars) for p in entry.partitions]
    for files in set(depth):
        name = f"totals, {files} file" + ("" if files == 1 else "s")
        count = depth.count(files)
        groups = "1 key group" if count == 1 else f"{count} key groups"
        assert words[words.index(name) + 1] == groups


def test_lineage_has_a_dot_for_each_and_a_line_to_each_parent(root: Path) -> None:
    picture = pictures(report(root))["Which checkpoint came from which, by run"]
    assert len(shapes(picture, "dot")) == 6
    assert len(shapes(picture, "hollow")) == 1
    assert len(shapes(picture, "edge")) == 6
    assert title(shapes(picture, "dot")[2]) == "checkpoint 3, from 2, finalized"


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_what_it_says_will_go_goes(root: Path, keep: int) -> None:
    store = open_store(root)
    page = Page(report(root, keep=KeepLast(keep)))
    facts = gather(store, KeepLast(keep))
    planned = store.prune(KeepLast(keep), dry_run=True)
    if planned.deleted:
        ids = ", ".join(map(str, planned.deleted))
        assert f"would delete checkpoints {ids} now, and {len(planned.sidecars)} files" in page.text
    else:
        assert "a prune would delete nothing now" in page.text
    assert "2 tagged <b>before</b>" in page.text
    assert store.prune(KeepLast(keep)) == replace(planned, dry_run=False)
    save(store, store.load_latest(), range(2))
    assert set(facts.next_going) | {7} == set(store.prune(KeepLast(keep)).deleted)


def test_damage_is_on_the_page(root: Path) -> None:
    path = root / "manifests" / f"{3:012d}.json"
    path.chmod(0o644)
    path.write_text("{")
    page = Page(report(root))
    assert "Damaged 3: " in page.text and "no valid JSON" in page.text
    assert "nothing would be deleted now" in page.text
    (root / "latest.json").chmod(0o644)
    (root / "latest.json").write_text("?")
    assert "goes on from checkpoint 6" in Page(report(root)).text


def test_an_empty_store_and_none(tmp_path: Path) -> None:
    empty = open_store(tmp_path / "empty")
    empty.claim_generation("r")
    assert "There is no checkpoint yet." in Page(report(empty)).text
    with pytest.raises(CheckpointNotFoundError):
        report(tmp_path / "none")


def test_of_many_checkpoints_the_newest_are_drawn(tmp_path: Path) -> None:
    store = open_store(tmp_path / "ckpt")
    run = RunIdentity(generation=store.claim_generation("r"), run_id="r")
    for n in range(1, 71):
        store.save(CheckpointManifest(
            checkpoint_id=new_checkpoint_id(), id=n, epoch=n, timestamp_ms=n, watermark=n,
            run=run, durable_phase="finalized",
        ))  # fmt: skip
    text = report(store)
    assert "The last 60; 10 older ones are not drawn." in Page(text).text
    assert len(shapes(pictures(text)["Bytes of each checkpoint"], "new")) == 60


# -- colours -----------------------------------------------------------------------------------
WEIGHTS = (0.2126, 0.7152, 0.0722)


def linear(colour: str) -> list[float]:
    """Red, green and blue of sRGB, from 0 to 1, without its gamma."""
    digits = colour.lstrip("#")
    if len(digits) == 3:
        digits = "".join(c * 2 for c in digits)
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def luminance(colour: str) -> float:
    """Relative luminance, by WCAG 2."""
    return sum(w * c for w, c in zip(WEIGHTS, linear(colour), strict=True))


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def colours(scheme: str) -> dict[str, str]:
    start = {"light": ":root {", "dark": "scheme: dark) {", "print": "@media print {"}[scheme]
    return dict(re.findall(r"--(\w+): (#\w+)", _STYLE.split(start, 1)[1].split("}", 1)[0]))


# What who lacks one kind of cone sees, of linear RGB: Machado, Oliveira & Fernandes (2009),
# "A physiologically-based model for simulation of color vision deficiency", severity 1.0.
EYES = {
    "any": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}  # fmt: skip


def lightness(colour: str, eye: str) -> float:
    """L* of CIE 1976, from 0 to 100, as this eye sees the colour."""
    seen = [sum(m * c for m, c in zip(row, linear(colour), strict=True)) for row in EYES[eye]]
    y = max(0.0, sum(w * min(max(c, 0), 1) for w, c in zip(WEIGHTS, seen, strict=True)))
    return 116 * y ** (1 / 3) - 16 if y > 216 / 24389 else y * 24389 / 27


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_the_scale_is_ordered_by_lightness_in_print_and_to_any_eye(scheme: str, eye: str) -> None:
    """From the page's ground away, so that the most stands out, in steps that can be told apart."""
    named = colours(scheme)
    steps = [lightness(named[name], eye) for name in ("back", *(f"h{i}" for i in range(7)))]
    away = 1 if scheme == "dark" else -1
    for less, more in itertools.pairwise(steps):
        assert (more - less) * away > 7, steps


def test_what_holds_nothing_is_told_by_its_shape(root: Path) -> None:
    picture = pictures(report(root))["Bytes by operator and key group"]
    tall = {e.attrib["class"]: float(e.attrib["height"]) for e in picture.iter() if len(e) == 1
            and e.tag.endswith("rect")}  # fmt: skip
    assert tall.pop("none") == 2
    assert set(tall.values()) == {24}


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_words_stand_out_from_what_is_behind_them(scheme: str) -> None:
    named = colours(scheme)
    for name in ("text", "faint", "warn"):
        assert contrast(named[name], named["back"]) >= 4.5, name
    for name in ("text", "faint"):
        assert contrast(named[name], named["panel"]) >= 4.5, name
    for name in ("new", "stripe"):
        assert contrast(named[name], named["back"]) >= 3, name


# -- the command, and a browser ----------------------------------------------------------------
def run(*arguments: object) -> int:
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def test_the_command_writes_the_page_whole_or_not_at_all(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert run("report", root, "-o", page, "--keep-last", 2) == 0
    assert "By KeepLast(2) a prune would delete checkpoints" in Page(page.read_text()).text
    assert run("report", root, "-o", page) == 2
    assert "exists" in capsys.readouterr().err
    assert run("report", root, "-o", page, "--force", "--keep-for", "7d") == 0
    assert "By KeepFor(seconds=604800)" in Page(page.read_text()).text
    assert run("report", tmp_path / "none", "-o", tmp_path / "other.html") == 3
    assert run("report", root, "-o", tmp_path / "no" / "report.html") == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt", "report.html"]


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., str]:
    """Runs Chromium without a window; returns what it prints."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed")

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [
                browser, "--headless=new", "--no-sandbox", "--disable-gpu",
                "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}",
                *arguments,
            ],
            capture_output=True, text=True, check=False, timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_the_page_is_no_wider_than_the_window(
    root: Path, tmp_path: Path, browse: Callable[..., str], width: int
) -> None:
    """Wide tables scroll by themselves; pictures of a few checkpoints fit on a phone."""
    (tmp_path / "report.html").write_text(report(root))
    (tmp_path / "frame.html").write_text(
        f'<body style="margin:0"><iframe id=f src=report.html style="border:0;width:{width}px;'
        'height:900px"></iframe><script>onload = () => { const d = '
        'document.getElementById("f").contentDocument.documentElement; '
        "const all = what => [...d.querySelectorAll(what)]; document.body.dataset.found = "
        "`${d.scrollWidth} ${d.clientWidth} ${all('svg').length} "
        "${all('td, th').filter(c => c.scrollWidth > c.clientWidth + 1).length} "
        "${Math.max(...all('td').map(c => c.clientHeight))} "
        "${all('svg').filter(s => s.clientWidth > s.parentElement.clientWidth + 1).length}`; }"
        "</script></body>"
    )
    printed = browse(
        "--virtual-time-budget=5000", f"--window-size={width + 100},1000", "--dump-dom",
        (tmp_path / "frame.html").as_uri(),
    )  # fmt: skip
    found = re.search(r'data-found="(\d+) (\d+) (\d+) (\d+) (\d+) (\d+)"', printed)
    assert found
    needed, there, drawn, spilling, height, cut = map(int, found.groups())
    assert height < 150, "no column is so narrow that its words are broken"
    assert spilling == 0, "no cell of a table reaches into its neighbour"
    assert needed == there and width - 20 <= there <= width  # a scroll bar takes some
    assert drawn == 5
    assert cut == 0, "pictures are whole"


def test_in_print_every_word_is_on_the_paper(
    root: Path, tmp_path: Path, browse: Callable[..., str]
) -> None:
    page, file = report(root), tmp_path / "report.pdf"
    (tmp_path / "report.html").write_text(page)
    source = (tmp_path / "report.html").as_uri()
    browse("--no-pdf-header-footer", f"--print-to-pdf={file}", source)
    printed = ""
    for paper in pypdfium2.PdfDocument(file):
        text = paper.get_textpage()
        printed += text.get_text_range()
        width, height = paper.get_size()
        for i in range(text.count_chars()):
            left, bottom, right, top = text.get_charbox(i)
            assert 0 <= left <= right <= width, printed[-40:]
            assert 0 <= bottom <= top <= height, printed[-40:]
    shown = Page(re.sub(r"<title>.*?</title>", "", page)).text.split()
    assert len(shown) > 200
    # A word that is broken over two lines is one; where it is at a hyphen, that is another sign.
    whole = re.sub(r"[\s\ufffe\x02-]", "", printed)
    assert [word for word in shown if word.replace("-", "") not in whole] == []
