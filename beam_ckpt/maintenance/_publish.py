"""A checkpoint that no pipeline wrote, published by the rules of those that did."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable

from beam_ckpt.errors import (
    CheckpointConflictError,
    CheckpointNotFoundError,
    InvalidCheckpointError,
)
from beam_ckpt.manifest import CheckpointManifest, RunIdentity
from beam_ckpt.store import CheckpointStore

__all__ = ["highest_epoch", "new_run_id", "prepare", "publish"]

_ID_ATTEMPTS = 64


def new_run_id(what: str) -> str:
    """Returns the id of a run of a command; says which one."""
    return f"{what}-{uuid.uuid4().hex}"


def highest_epoch(store: CheckpointStore) -> int:
    """Returns the highest epoch of any checkpoint that was published; 0 for none."""
    epoch = 0
    for id in store.list_ids():
        # A damaged marker says nothing, and must not stop what is sound.
        with contextlib.suppress(InvalidCheckpointError):
            marker = store.final_marker(id)
            if marker is not None:
                epoch = max(epoch, marker.epoch)
    return epoch


def prepare(
    store: CheckpointStore, run: RunIdentity, make: Callable[[int], CheckpointManifest]
) -> CheckpointManifest:
    """Saves a manifest under the next free id, and makes sure that what it lists is there.

    Args:
        store: Where to.
        run: Who writes; it has claimed the store.
        make: Gives the manifest for an id.

    Raises:
        FencedError: A younger run has claimed the store.
        CheckpointNotFoundError: A file that it lists is gone.
    """
    for _ in range(_ID_ATTEMPTS):
        try:
            saved = store.save(make(store.next_id()))
        except CheckpointConflictError:
            # Somebody else took the id: a younger run, which this raises for, or an older one that
            # did not know yet that it was superseded.
            store.check_generation(run.generation, run.run_id)
            continue
        result = store.validate_checkpoint(saved.id, deep=False)
        if not result.valid:
            raise CheckpointNotFoundError(
                f"checkpoint {saved.id} of {store.url} was not published: "
                f"{'; '.join(result.issues)}. A prune took files of the checkpoint that it was "
                "made from. What to do: run this again."
            )
        return saved
    raise CheckpointConflictError(
        f"{_ID_ATTEMPTS} manifest ids in a row were taken in {store.url}. What to do: see that "
        "only one run writes to the store, then run this again."
    )


def publish(
    store: CheckpointStore, run: RunIdentity, make: Callable[[int], CheckpointManifest]
) -> CheckpointManifest:
    """`prepare`, then finalizes."""
    saved = prepare(store, run, make)
    store.check_generation(run.generation, run.run_id)
    return store.finalize(saved.id)
