"""Blocks of code in Markdown, and how they are run: for the README and the book in docs/.

A block is run by its language:

* ``python``: all blocks of a page share one namespace; with ``title="name.py"`` it is also a file
  that the blocks after it can import;
* ``console``: a line that begins with ``$ `` is a command, what follows it is its output, in which
  ``...`` stands for anything (white space is not compared). ``beam-ckpt`` is run within the
  process, and ``echo $?`` says its exit status;
* ``sql``: a query of the store ``ckpt``, which has to give rows;
* ``text``: with ``title="Prints"`` or ``title="Prints, in any order"``, what the block before it
  has printed; else it is no code.

A block that no test can run says why, where the reader sees it: ``title="Not run: ..."``.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from beam_ckpt import inspect
from beam_ckpt.cli import main

ROOT = Path(__file__).resolve().parent.parent
NOT_RUN = "Not run: "
_PRINTS, _IN_ANY_ORDER = "Prints", "Prints, in any order"
_FENCE = re.compile(r"^```(?P<info>[^`\n]*)\n(?P<text>.*?)^```[ ]*$", re.DOTALL | re.MULTILINE)
_LIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A block of code: where it begins, in which language, under which title."""

    where: str
    language: str
    title: str
    text: str

    @property
    def runs(self) -> bool:
        return not self.title.startswith(NOT_RUN)


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, _, rest = match["info"].partition(" ")
        title = re.fullmatch(r'title="([^"]+)"', rest.strip())
        assert not rest.strip() or title, f"{page.name}: {match['info']}"
        where = f"{page.name}:{text.count(chr(10), 0, match.start()) + 1}"
        found.append(Block(where, language, title[1] if title else "", match["text"]))
    fences = re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE)
    assert len(fences) == 2 * len(found), f"{page.name}: a fence that is indented, or not closed"
    return found


def run_command(command: str) -> tuple[int, str, str]:
    """Runs a command line of `beam-ckpt`: its exit status, output and messages."""
    program, *arguments = shlex.split(command)
    assert program == "beam-ckpt", command
    raw = io.BytesIO()
    out, err = io.TextIOWrapper(raw, "utf-8"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
    out.flush()
    return status, raw.getvalue().decode("utf-8"), err.getvalue()


def named_files(page: Path) -> set[str]:
    """The tests, samples and benchmarks that a page names."""
    text = page.read_text(encoding="utf-8")
    return set(re.findall(r"`(?:python )?((?:tests|samples|benchmarks)/[\w/.]*)", text))


def missing_files(page: Path) -> list[str]:
    return sorted(name for name in named_files(page) if not (ROOT / name).exists())


class Page:
    """Runs the blocks of a page one after the other, in a folder of its own."""

    def __init__(self, page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("COLUMNS", "120")
        self._page, self._folder, self._patch = page, folder, monkeypatch
        # No module of this name can be imported, so that what is pickled of it goes by value.
        self._names: dict[str, object] = {"__name__": f"page_{page.stem.replace('-', '_')}"}
        self._status, self._printed = 0, ""

    def run(self) -> list[str]:
        """Runs all; returns the languages of what was run."""
        ran = []
        for block in filter(lambda block: block.runs, blocks(self._page)):
            step = getattr(self, f"_{block.language}", None)
            assert step is not None, f"{block.where}: how is {block.language!r} run?"
            if step(block) is not False:
                ran.append(block.language)
        return ran

    def _python(self, block: Block) -> None:
        code = "\n" * int(block.where.rpartition(":")[2]) + block.text
        names = self._names
        if block.title.endswith(".py"):
            name = block.title.removesuffix(".py")
            (self._folder / block.title).write_text(block.text, encoding="utf-8")
            module = types.ModuleType(name)
            self._patch.setitem(sys.modules, name, module)
            names = module.__dict__
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            # As a reader runs it: without what this module imports from the future.
            exec(compile(code, self._page, "exec", dont_inherit=True), names)
        self._printed = out.getvalue()

    def _console(self, block: Block) -> None:
        assert block.text.startswith("$ "), block.where
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            if command == "echo $?":
                printed = f"{self._status}\n"
            else:
                self._status, out, err = run_command(command)
                printed = out + err
                self._printed = printed
                if "echo $?" not in block.text:
                    assert self._status == 0, f"{block.where}: {command}: {printed}"
            if expected.strip():
                _same(expected, printed, f"{block.where}: {command}")
            else:
                assert printed, f"{block.where}: {command} prints nothing"

    def _sql(self, block: Block) -> None:
        rows = inspect.duckdb("ckpt").sql(block.text).fetchall()
        assert rows, block.where

    def _text(self, block: Block) -> bool:
        if block.title == _IN_ANY_ORDER:  # a runner may give outputs in any
            lines = (sorted(text.splitlines()) for text in (block.text, self._printed))
            _same(*("\n".join(each) + "\n" for each in lines), block.where)
        elif block.title == _PRINTS:
            _same(block.text, self._printed, block.where)
        else:
            return False
        return True


def _same(expected: str, printed: str, where: str) -> None:
    if not doctest.OutputChecker().check_output(expected, printed, _LIKE):
        pytest.fail(f"{where} printed:\n{printed}\nThe page says:\n{expected}", pytrace=False)
