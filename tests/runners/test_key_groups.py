"""Another number of key groups from run to run: equal state, and checkpoints that stand alone."""

from __future__ import annotations

import uuid

import pytest

from beam_ckpt import open_store
from beam_ckpt.keygroups import key_group
from beam_ckpt.testing.cuts import run_checkpointed, saved_state
from beam_ckpt.testing.subjects import TumblingFn

SECOND = 1_000_000
KEYS = "abcdefghijklmnop"


def counted(store, **which) -> dict[str, int]:
    state = saved_state(store, TumblingFn(), **which)
    return {key: kept.cells["count"] for (key, _), kept in state.items()}


@pytest.mark.parametrize("inline_threshold", [0, 65_536])
@pytest.mark.parametrize("max_files", [1, 8])
def test_each_checkpoint_of_a_new_number_of_key_groups_stands_alone(
    max_files: int, inline_threshold: int
) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    settings = {
        "runner": "FnApiRunner",
        "store": store,
        "max_files_per_group": max_files,
        "inline_threshold": inline_threshold,
        "keep": 100,
    }
    data = [(i * SECOND, key, 1) for i, key in enumerate(KEYS)]
    run_checkpointed(TumblingFn(), data, until=50, key_groups=4, **settings)
    counts = dict.fromkeys(KEYS, 1)
    assert counted(store) == counts
    at = 50
    for groups in (7, 1, 128, 4):
        seen = set(store.list_ids())
        old = store.load_latest().sidecar_paths()
        # One key is touched, and that in the second epoch of two.
        touched = [((at + 75) * SECOND, "a", 1)]
        run_checkpointed(
            TumblingFn(), touched, every=50, until=at + 100, key_groups=groups, **settings
        )
        at += 100
        new = [store.load_by_id(i) for i in store.list_ids() if i not in seen]
        assert len(new) == 2
        for manifest, added in zip(new, (0, 1), strict=True):
            assert manifest.key_group_count == groups
            assert not manifest.sidecar_paths() & old, "nothing of the old number is listed"
            counts["a"] += added
            assert counted(store, checkpoint_id=manifest.id) == counts
            found = {p.partition_id for o in manifest.operators.values() for p in o.partitions}
            assert found == {key_group(key.encode(), groups) for key in KEYS}
