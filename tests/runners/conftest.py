"""The ways to run a pipeline that the tests of this folder go through."""

from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Engine:
    """A runner, and whether it is given a batch or a stream (`TestStream`)."""

    runner: str
    streaming: bool

    def __str__(self) -> str:
        return f"{self.runner}-{'stream' if self.streaming else 'batch'}"


ENGINES = (
    Engine("FnApiRunner", False),
    Engine("BundleBasedDirectRunner", True),
    Engine("PrismRunner", False),
    Engine("PrismRunner", True),
)


@pytest.fixture(params=ENGINES, ids=str)
def engine(request: pytest.FixtureRequest) -> Engine:
    chosen: Engine = request.param
    if chosen.runner == "PrismRunner":
        request.getfixturevalue("prism")
    return chosen
