"""Every row of the tables beside these tests names tests, and they exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLES = {"tests/conformance.md": 113, "tests/pitfalls.md": 70, "tests/beam_traps.md": 20}


@cache
def names_in(path: str) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)}
    return frozenset(names)


def rows(table: str) -> list[tuple[int, str, list[str]]]:
    found = []
    for line in (ROOT / table).read_text().splitlines():
        match = re.fullmatch(r"\| (\d+) \| (.+) \| (.+) \|", line)
        if match:
            found.append((int(match[1]), match[2], re.findall(r"`([^`]+)`", match[3])))
    return found


@pytest.mark.parametrize("table", TABLES)
def test_no_row_is_missing_or_given_twice(table: str) -> None:
    assert [number for number, _, _ in rows(table)] == list(range(1, TABLES[table] + 1))


@pytest.mark.parametrize("table", TABLES)
def test_every_row_names_tests_that_exist(table: str) -> None:
    missing = []
    for number, _, tests in rows(table):
        assert tests, f"row {number} of {table} names no test"
        for test in tests:
            path, _, name = test.partition("::")
            if not (ROOT / path).is_file() or name not in names_in(path):
                missing.append(f"{number}: {test}")
    assert missing == []


def test_every_row_that_a_test_of_the_suite_claims_names_that_test() -> None:
    path = "beam_ckpt/testing/store.py"
    named = {number: tests for number, _, tests in rows("tests/conformance.md")}
    for node in ast.parse((ROOT / path).read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for test in node.body:
            if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
                claimed = re.search(r"Rows? ([0-9, and]+)", ast.get_docstring(test) or "")
                for number in re.findall(r"\d+", claimed[1]) if claimed else ():
                    assert f"{path}::{node.name}::{test.name}" in named[int(number)]
