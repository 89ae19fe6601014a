"""Credentials reach the server; no log, no error and no object of a store ever holds them."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

import pytest

from beam_ckpt import open_store
from beam_ckpt.errors import CheckpointError
from beam_ckpt.retention import KeepLast
from beam_ckpt.store import copy
from beam_ckpt.store._blobstore import BlobCheckpointStore
from beam_ckpt.testing.fault_proxy import Fault, FaultProxy
from beam_ckpt.testing.gcs import GcsBucket, GcsServer
from beam_ckpt.testing.store import a_manifest, commit, write

SECRET = "ya29.very-secret-token"


@pytest.fixture
def proxy(gcs_server: GcsServer) -> object:
    with FaultProxy(gcs_server.url) as running:
        yield running


def test_a_store_with_credentials_never_shows_them(
    proxy: FaultProxy, gcs_bucket: GcsBucket, caplog: pytest.LogCaptureFixture
) -> None:
    from google.oauth2.credentials import Credentials

    caplog.set_level(logging.DEBUG)
    options = {
        **gcs_bucket.options,
        "endpoint_url": proxy.url,
        "token": Credentials(SECRET),  # type: ignore[no-untyped-call]
        "retry_seconds": 0.15,
    }
    store = open_store(f"{gcs_bucket.url}/a", key_group_count=1, **options)
    assert isinstance(store, BlobCheckpointStore)
    store.claim_generation("run")
    commit(store, 1)
    commit(store, 2)
    store.tag("kept", 1)
    said = [repr(store), store.url, repr(store.recover_latest_validated())]
    acts: list[Callable[[], object]] = [
        store.load_latest,
        store.list,
        lambda: write(store, b"state"),
        lambda: store.save(a_manifest(9)),
        lambda: store.finalize(2),
        lambda: store.prune(KeepLast(1)),
        lambda: store.gc(grace_s=0),
        lambda: store.claim_generation("other"),
        lambda: store.validate_checkpoint(2),
        lambda: copy(store, open_store(f"{gcs_bucket.url}/b", **options)),
        lambda: open_store(f"{gcs_bucket.url}/c", create=False, **options),
    ]
    for fault in (
        Fault("status", status=401),
        Fault("status", status=403),
        Fault("status", status=503),
        Fault("reset"),
        Fault("truncate"),
        Fault("damage_response"),
    ):
        proxy.reset()
        proxy.add(fault, count=9999)
        for act in acts:
            try:
                act()
            except CheckpointError as e:
                said.append("".join(traceback.format_exception(e)))
    proxy.reset()
    assert len(said) > 40
    assert sum(SECRET in text for text in said) == 0
    assert SECRET not in caplog.text
    objects = [store.blobs.get(m.key)[0] for m in store.blobs.list("")]
    assert len(objects) > 8
    assert not any(SECRET.encode() in data for data in objects)
