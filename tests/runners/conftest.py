"""The ways to run a pipeline that the tests of this folder go through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest


@dataclass(frozen=True)
class Engine:
    """A runner, and what it is given: a batch, a `TestStream`, or a live unbounded source."""

    runner: str
    source: Literal["batch", "stream", "live"]

    def __str__(self) -> str:
        return f"{self.runner}-{self.source}"


ENGINES = {
    str(engine): engine
    for engine in (
        Engine("FnApiRunner", "batch"),
        Engine("BundleBasedDirectRunner", "stream"),
        Engine("PrismRunner", "batch"),
        Engine("PrismRunner", "stream"),
        Engine("PrismRunner", "live"),
    )
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each of them; a test that is for some asks for these by name, with ``indirect=True``."""
    chosen = ENGINES[request.param]
    if chosen.runner == "PrismRunner":
        request.getfixturevalue("prism")
    return chosen
