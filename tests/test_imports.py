"""What imports what: Beam stays out of `beam_ckpt`, and imports point one way."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

# A unit imports only units with a smaller number (and itself). `testing` stands above everything.
LAYERS = {
    "beam_ckpt._durations": 0,
    "beam_ckpt._terminal": 0,
    "beam_ckpt._rows": 1,
    "beam_ckpt._keys": 0,
    "beam_ckpt._unpickle": 1,
    "beam_ckpt._primitives": 2,
    "beam_ckpt.errors": 0,
    "beam_ckpt.keygroups": 1,
    "beam_ckpt.manifest": 2,
    "beam_ckpt.blobs": 3,
    "beam_ckpt.lineage": 3,
    "beam_ckpt.recovery": 3,
    "beam_ckpt.retention": 3,
    "beam_ckpt.sidecar": 3,
    "beam_ckpt.store": 4,
    "beam_ckpt": 5,  # the front door: re-exports, no code
    "beam_ckpt.cli_maintenance": 6,
    "beam_ckpt.inspect": 6,
    "beam_ckpt.transforms": 6,
    "beam_ckpt.cli_query": 7,
    "beam_ckpt.maintenance": 7,
    "beam_ckpt.reporting": 7,
    "beam_ckpt.cli_report": 8,
    "beam_ckpt.cli_rewrite": 8,
    "beam_ckpt.cli": 9,
    "beam_ckpt.testing": 10,
}


def modules() -> dict[str, Path]:
    """Every module of both packages by its importable name."""
    found = {}
    for root, package in (
        (REPO / "beam_ckpt", "beam_ckpt"),
        (REPO / "transforms", "beam_ckpt.transforms"),
    ):
        for path in sorted(root.rglob("*.py")):  # rglob does not follow the link to transforms/
            parts = path.relative_to(root).with_suffix("").parts
            if parts[0] == "transforms":
                continue
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


def unit(module: str) -> str:
    """The part of the house that a module belongs to: the longest name in LAYERS that fits."""
    fits = [name for name in LAYERS if module == name or module.startswith(name + ".")]
    best = max(fits, key=len)
    if best == "beam_ckpt" and module != "beam_ckpt":
        raise AssertionError(f"{module} is in no layer: add it to LAYERS in {Path(__file__).name}")
    return best


def imported(module: str, path: Path, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """The names that a module imports when it is imported or when a function of it runs."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join((*above, base)) if base else ".".join(above)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner if inner in known else base), node.lineno


def edges() -> list[tuple[str, str, str]]:
    """(importer, imported, place) for the imports between modules of ours."""
    known = modules()
    return [
        (module, target, f"{path.relative_to(REPO)}:{line}")
        for module, path in known.items()
        for target, line in imported(module, path, known)
        if target == "beam_ckpt" or target.startswith("beam_ckpt.")
    ]


def test_importing_beam_ckpt_imports_neither_beam_nor_a_storage_client() -> None:
    heavy = ("apache_beam", "pyarrow", "gcsfs", "fsspec", "pandas", "duckdb", "google.cloud")
    code = f"import sys, beam_ckpt; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_starts_without_beam() -> None:
    code = "import sys, beam_ckpt.cli; print('apache_beam' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_only_the_transforms_and_the_shipped_suites_import_beam() -> None:
    known = modules()
    wrong = [
        f"{path.relative_to(REPO)}:{line} imports {target}"
        for module, path in known.items()
        if unit(module) not in ("beam_ckpt.transforms", "beam_ckpt.testing")
        for target, line in imported(module, path, known)
        if target.split(".")[0] == "apache_beam"
    ]
    assert wrong == []


def test_imports_point_one_way() -> None:
    wrong = [
        f"{place}: {unit(importer)} imports {unit(target)}"
        for importer, target, place in edges()
        if unit(importer) != unit(target) and LAYERS[unit(target)] >= LAYERS[unit(importer)]
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for importer, target, _ in edges():
        if importer != target:
            graph.setdefault(importer, set()).add(target)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for target in sorted(graph.get(module, ())):
                visit(target, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_every_package_folder_is_packaged() -> None:
    config = configparser.ConfigParser()
    config.read(REPO / "setup.cfg", encoding="utf-8")
    listed = set(config["options"]["packages"].split())
    found = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert listed == found


def test_both_packages_say_that_they_are_typed() -> None:
    assert (REPO / "beam_ckpt" / "py.typed").is_file()
    assert (REPO / "transforms" / "py.typed").is_file()


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    if not (REPO / ".git").exists():
        pytest.skip("not a git checkout: there is no list of tracked files")
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True
    )
    homes = "|".join(("work", "farm", "root", "home", "Users"))
    machine_path = re.compile(rf"(?<![\w.:/<>)}}-])/(?:{homes})/")
    wrong = []
    for name in filter(None, listing.stdout.split("\0")):
        path = REPO / name
        if path.is_file() and not path.is_symlink():
            text = path.read_text(encoding="utf-8", errors="replace")
            wrong += [f"{name}: {hit.group()}" for hit in machine_path.finditer(text)]
    assert wrong == []
