"""Settings that every test shares."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

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
def signatures_read_once() -> Iterator[None]:
    """Beam reads the signatures of all methods of a DoFn some ten times a pipeline.

    In pipelines as small as those of these tests that is a third of the time. What it reads of a
    plain function never changes, so it is kept here.
    """
    core = sys.modules.get("apache_beam.transforms.core")
    if core is None:  # no test of this process needs Beam
        yield
        return
    read: Callable[[Any], tuple[list[str], list[Any]]] = core.get_function_args_defaults
    known: dict[FunctionType, tuple[list[str], list[Any]]] = {}

    def read_once(method: Any) -> tuple[list[str], list[Any]]:
        function = method.__func__ if isinstance(method, MethodType) else None
        if not isinstance(function, FunctionType) or function.__dict__:  # wrapped, or declared
            return read(method)
        if function not in known:
            known[function] = read(method)
        names, defaults = known[function]
        return list(names), list(defaults)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "get_function_args_defaults", read_once)
        yield
