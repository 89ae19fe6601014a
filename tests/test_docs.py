"""The book in docs/ does what it says: its blocks of code run, and nothing is missing from it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import beam_ckpt.errors
import beam_ckpt.testing.event_loop
import beam_ckpt.testing.prism
from beam_ckpt.cli import app
from tests.documents import NOT_RUN, ROOT, Page, blocks, missing_files, named_files

DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
# Run by a test of its own, which also looks at the graph that it builds.
ELSEWHERE = {"dataflow.md": "tests/runners/test_dataflow.py"}
FIRST = "quick-start.md"
LANGUAGES = {"console", "dockerfile", "python", "sh", "sql", "text"}


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a reader has after the quick start, with which the other pages go on."""
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        assert set(Page(DOCS / FIRST, folder, patch).run()) >= {"python", "console"}
    return folder


def runs(page: str) -> bool:
    return any(block.runs and block.language != "text" for block in blocks(DOCS / page))


@pytest.mark.parametrize("page", [p for p in PAGES if runs(p) and p not in {FIRST, *ELSEWHERE}])
def test_the_blocks_of_a_page_run_one_after_the_other(
    page: str, started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(started, tmp_path / "reader")
    assert Page(DOCS / page, folder, monkeypatch).run()


def test_the_quick_start_leaves_the_store_that_the_other_pages_go_on_from(started: Path) -> None:
    assert (started / "ckpt" / "latest.json").exists()
    assert (started / "totals.py").exists()


@pytest.mark.parametrize("page", PAGES)
def test_each_block_runs_or_says_visibly_why_not(page: str) -> None:
    for block in blocks(DOCS / page):
        assert block.language in LANGUAGES, block.where
        if block.language in {"sh", "dockerfile"}:  # these are for machines that tests have not
            assert not block.runs, block.where
        if not block.runs:
            assert len(block.title) > len(NOT_RUN) + 10, block.where
    if page in ELSEWHERE:
        assert f'"{page}"' in (ROOT / ELSEWHERE[page]).read_text(encoding="utf-8")


def errors() -> list[str]:
    """The errors of the library, those that no module of their own lists among them."""
    found = set(beam_ckpt.errors.__all__)
    for path in [*(ROOT / "beam_ckpt").rglob("*.py"), *(ROOT / "transforms").rglob("*.py")]:
        found |= set(re.findall(r"^class ([A-Z]\w*Error)\(", path.read_text("utf-8"), re.MULTILINE))
    return sorted(found)


def test_each_error_has_an_entry_that_says_what_to_do() -> None:
    entries = re.split(r"^### ", text_of("troubleshooting.md"), flags=re.MULTILINE)[1:]
    named = [entry.partition("\n")[0].strip("`") for entry in entries]
    assert sorted(named) == errors()
    for name, entry in zip(named, entries, strict=True):
        body = re.split(r"^## ", entry, flags=re.MULTILINE)[0]
        for part in ("**Means.** ", "**What to do.** "):
            said = body.partition(part)[2].partition("\n\n")[0]
            assert len(said) > 40, f"{name}: {part}"


def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_the_command_has_every_command_option_and_exit_status() -> None:
    page = hooks().command_page()
    names = {
        info.name or info.callback.__name__.replace("_", "-")
        for info in app.registered_commands
        if info.callback is not None
    }
    assert len(names) >= 15
    assert set(re.findall(r"^### beam-ckpt ([\w-]+) ", page, re.MULTILINE)) == names
    assert "| `--format`, `-f` `NAME` | Of the rows. One of `parquet`, `json`, `csv`." in page
    for section in page.split("\n## ")[1:]:
        assert [f"| {status} |" in section for status in range(5)] == [True] * 5, section[:40]


def test_docstrings_become_markdown() -> None:
    text = "See `~beam_ckpt.transforms.Checkpoints`::\n\n    a = b[::2]\n\nand ``'x'``.\n"
    documented = SimpleNamespace(docstring=SimpleNamespace(value=text))
    hooks().PlainMarkdown().on_object(obj=documented)
    expected = "See `Checkpoints`:\n\n    a = b[::2]\n\nand ``'x'``.\n"
    assert documented.docstring.value == expected


def test_all_that_is_public_is_in_the_reference() -> None:
    """What a package exports stands on a page by its name, or its module does."""
    import beam_ckpt.inspect
    import beam_ckpt.maintenance
    import beam_ckpt.transforms

    told = re.findall(r"^::: ([\w.]+)$", "\n".join(map(text_of, PAGES)), re.MULTILINE)
    assert len(told) == len(set(told))
    last = {name.rpartition(".")[2] for name in told}
    for module in (beam_ckpt, beam_ckpt.transforms, beam_ckpt.testing):
        of_errors = set(beam_ckpt.errors.__all__)
        # Other stores are made by open_store; rewrite is in beam_ckpt.maintenance.
        known = {"FileSystemCheckpointStore", "ObjectStoreCheckpointStore", "rewrite"}
        assert set(module.__all__) - last - of_errors - known == set()
    assert {"beam_ckpt.inspect", "beam_ckpt.maintenance", "beam_ckpt.errors"} <= set(told)


def test_each_statement_about_another_system_has_its_source() -> None:
    """A number at the end of each place of the table and in each paragraph, and in the list."""
    text = text_of("comparison.md")
    hosts = {
        "Flink": "https://nightlies.apache.org/flink/", "Spark": "https://spark.apache.org/docs/",
        "Dataflow": "https://cloud.google.com/",
    }  # fmt: skip
    links = dict(re.findall(r"^\[(\w+)\]: (\S+)$", text, re.MULTILINE))
    listed = re.findall(r"^(\d)\. (\w+): \[[^\]]+\]\[(\w+)\]$", text, re.MULTILINE)
    assert [int(number) for number, _, _ in listed] == list(range(1, len(links) + 1))
    assert all(links[name].startswith(hosts[system]) for _, system, name in listed)
    numbered = {(number, name) for number, _, name in listed}
    body, _, _ = text.partition("## Sources")
    cited = re.findall(r"\[(\d)\]\[(\w+)\]", body)
    assert set(cited) == numbered
    table = [line.strip("| ").split("|") for line in body.splitlines() if line.startswith("| ")]
    heads = [head.strip() for head in table[0]]
    rows = [[place.strip() for place in row] + [""] * 5 for row in table[1:]]
    assert len(rows) > 10
    for row in rows:
        for head, said in zip(heads[1:], row[2:5], strict=False):
            system = head.split()[0]
            if said:
                assert re.search(r"\[\d\]\[\w+\]$", said), said
                for name in re.findall(r"\[\d\]\[(\w+)\]", said):
                    assert links[name].startswith(hosts[system]), said
    prose = body.partition("## Where these are better")[2]
    parts = re.split(r"^\* |\n\n", prose, flags=re.MULTILINE)
    for part in parts:
        if re.search("|".join(hosts), part) and not part.startswith("#"):
            assert re.search(r"\[\d\]\[\w+\]", part), part


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r": ([\w/-]+\.md)$", contents, re.MULTILINE)
    assert sorted(listed) == sorted([*PAGES, "commands.md"])


def test_pictures_are_drawn_for_any_ground_and_say_what_they_show() -> None:
    pictures = sorted((DOCS / "pictures").glob("*.svg"))
    shown = set(
        re.findall(r"!\[[^\]]{20,}\]\(pictures/([\w-]+\.svg)\)", "".join(map(text_of, PAGES)))
    )
    assert shown == {picture.name for picture in pictures}
    for picture in pictures:
        svg = "{http://www.w3.org/2000/svg}"
        root = ElementTree.parse(picture).getroot()
        assert root.find(f"{svg}title") is not None, picture.name
        ground = next(child for child in root if child.tag == f"{svg}rect")
        assert (ground.get("fill"), ground.get("width")) == ("#ffffff", "100%"), picture.name
        assert "http" not in re.sub(r'xmlns="[^"]*"', "", picture.read_text("utf-8"))


def test_files_that_the_book_names_are_there() -> None:
    assert set().union(*(named_files(DOCS / page) for page in PAGES))
    assert [
        (page, missing_files(DOCS / page)) for page in PAGES if missing_files(DOCS / page)
    ] == []
