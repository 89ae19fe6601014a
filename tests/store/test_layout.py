"""Paths: every object of a store has one, and it can be read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_ckpt.blobs._base import check_key
from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.manifest import check_sidecar_path, uuid7_millis
from beam_ckpt.store._layout import Layout, SidecarName

ids = st.integers(1, 2**64 - 1)
uids = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=256)
run_ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}", fullmatch=True)


@given(
    ids,
    ids,
    st.integers(0, 2**64 - 1),
    uids,
    st.integers(0, 65534),
    st.none() | st.integers(-(2**63), 2**63 - 1),
    run_ids,
)
def test_every_path_reads_back(
    id: int,
    generation: int,
    participant: int,
    uid: str,
    group: int,
    boundary: int | None,
    run_id: str,
) -> None:
    paths = Layout(participant)
    for kind in ("manifest", "final", "used"):
        key = getattr(paths, kind)(id)
        assert check_key(key).startswith(paths.base)
        assert paths.parse_manifest(key) == (id, "json" if kind == "manifest" else kind)
    assert paths.parse_run(paths.run(generation)) == generation
    (intent,) = paths.new_prune([range(id, id + 1)])
    assert check_key(intent).startswith(paths.prunes)
    assert paths.parse_prune(intent)[0] == range(id, id + 1)
    assert check_key(paths.tag(uid)).startswith(paths.tags)
    path = paths.new_sidecar(uid, group, boundary, run_id)
    assert check_sidecar_path(path) == path
    assert all(len(segment.encode()) <= 255 for segment in path.split("/"))
    name = paths.parse_sidecar(paths.object(path))
    assert (name.boundary, name.run_id, name.saved_id) == (boundary, run_id, None)
    assert name.written_ms is not None
    assert f"/{group:05d}/" in path
    saved = paths.saved_sidecar(uid, group, boundary, id)
    assert check_sidecar_path(saved) == saved == paths.saved_sidecar(uid, group, boundary, id)
    assert paths.parse_sidecar(saved) == SidecarName(boundary, None, id, None)


@given(uids, uids)
def test_two_operators_never_share_a_directory(first: str, second: str) -> None:
    def directory(uid: str) -> str:
        return Layout().saved_sidecar(uid, 0, 0, 1).split("/")[1]

    assert (directory(first) == directory(second)) == (first == second)


@pytest.mark.parametrize("id", [0, -1, 2**64, True, "1", None, 1.0])
def test_what_is_no_id_has_no_path(id: object) -> None:
    with pytest.raises(InvalidCheckpointError, match="no checkpoint id"):
        Layout().manifest(id)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "key", ["runs/1.json", "runs/00000000.json", "runs/x", "runs/000000001.json", "runs/a/b.json"]
)
def test_a_stranger_among_the_claims_is_named(key: str) -> None:
    with pytest.raises(InvalidCheckpointError, match="does not belong in a store"):
        Layout().parse_run(key)


@pytest.mark.parametrize(
    "key",
    [
        "prunes/x",
        "prunes/00000000-0000-4000-8000-000000000000-000000000001-000000000002",
        "prunes/01a22d95-db19-729f-8100-1f6c93d403ce-1-2",
    ],
)
def test_a_stranger_among_the_prunes_is_named(key: str) -> None:
    with pytest.raises(InvalidCheckpointError, match="does not belong in a store"):
        Layout().parse_prune(key)


@given(st.text(max_size=80))
def test_any_name_below_state_is_read_without_an_error(name: str) -> None:
    found = Layout().parse_sidecar(f"state/a/00000/{name}")
    assert found.saved_id is None or found.run_id is None


def test_paths_of_participants_lie_apart_and_the_deployment_is_shared() -> None:
    assert Layout(0).manifest(7) == "manifests/000000000007.json"
    assert Layout(3).manifest(7) == "participants/3/manifests/000000000007.json"
    assert Layout(3).object("state/a/00000/x") == "participants/3/state/a/00000/x"
    assert Layout(3).latest == "participants/3/latest.json"
    assert Layout(3).namespace == Layout(0).namespace == "namespace.json"
    assert uuid7_millis("not a uuid") is None
