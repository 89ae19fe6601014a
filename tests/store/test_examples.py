"""The examples in the documentation of the store's modules run."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

MODULES = [
    "beam_ckpt",
    "beam_ckpt.errors",
    "beam_ckpt.manifest",
    "beam_ckpt.retention",
    "beam_ckpt.store._open",
    "beam_ckpt.testing.faults",
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name: str) -> None:
    results = doctest.testmod(import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
