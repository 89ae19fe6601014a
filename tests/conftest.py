"""Settings that every test shares."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

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
