"""Settings that every test shares."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester"]

# A pipeline takes a tenth of a second on a good day and a second on a bad one: no deadlines.
settings.register_profile(
    "beam_ckpt",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("beam_ckpt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first, so that no process is left with one of them at the end."""
    items.sort(key=lambda item: "/runners/test_cut" not in str(item.path))


@pytest.fixture(scope="session")
def prism() -> Iterator[Path]:
    """A Prism binary. Without one a test that asks for it is skipped, in CI it fails."""
    from beam_ckpt.testing.prism import PrismNotFoundError, prism_binary, stop_prism

    try:
        binary = prism_binary()
    except PrismNotFoundError as error:
        if os.environ.get("BEAM_CKPT_PRISM_REQUIRED") == "1":
            pytest.fail(f"BEAM_CKPT_PRISM_REQUIRED=1, and {error}", pytrace=False)
        pytest.skip(str(error))
    yield binary
    stop_prism()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what tests of many random cases have counted (`record_property("counts", ...)`)."""
    for report in terminalreporter.getreports("passed"):
        for name, counts in report.user_properties:
            if name == "counts":
                terminalreporter.write_line(f"{report.nodeid.rpartition('/')[2]}: {counts}")


@pytest.fixture(scope="session", autouse=True)
def what_beam_reads_is_read_once() -> Iterator[None]:
    """In pipelines as small as those of these tests that is half of the time."""
    if "apache_beam.transforms.core" not in sys.modules:  # no test of this process needs Beam
        yield
        return
    from beam_ckpt.testing.read_once import beam_reads_once

    with beam_reads_once():
        yield
