"""Settings that every test shares."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A pipeline takes a tenth of a second on a good day and a second on a bad one: no deadlines.
settings.register_profile(
    "beam_ckpt",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("beam_ckpt")
