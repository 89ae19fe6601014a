"""Fixtures of the store's tests: a real Cloud Storage server."""

from __future__ import annotations

from beam_ckpt.testing.gcs import gcs_bucket, gcs_server

__all__ = ["gcs_bucket", "gcs_server"]
