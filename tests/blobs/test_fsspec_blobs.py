"""Blobs behind other fsspec URLs: read always, written only where conditions are enforced."""

from __future__ import annotations

import dataclasses
import pickle
import traceback
import zipfile
from pathlib import Path

import pytest

from beam_ckpt.blobs import BlobConflict, BlobExists, BlobTooLarge, open_blobs
from beam_ckpt.blobs._fsspec import FsspecBlobs
from beam_ckpt.blobs._local import LocalBlobs
from beam_ckpt.errors import CheckpointStorageError, StoreUrlError
from beam_ckpt.retention import KeepLast
from beam_ckpt.store import open_store
from beam_ckpt.testing.fault_proxy import Fault, FaultProxy
from beam_ckpt.testing.store import a_manifest, listing


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree on local files."""
    root = tmp_path / "tree"
    blobs = LocalBlobs(root)
    blobs.put("manifests/1.json", b"{}")
    blobs.put("state/op/0.parquet", b"0123456789")
    blobs.put("state/op/1.parquet", b"x")
    return root


@pytest.fixture
def zipped(tree: Path, tmp_path: Path) -> str:
    """The tree in a zip file, as a chained URL."""
    with zipfile.ZipFile(tmp_path / "tree.zip", "w") as archive:
        for path in sorted(tree.rglob("*")):
            if path.is_file():
                archive.write(path, "ckpt/" + path.relative_to(tree).as_posix())
    return f"zip://ckpt::file://{tmp_path}/tree.zip"


@pytest.mark.parametrize("form", ["file", "zip"])
def test_any_filesystem_is_read(form: str, tree: Path, request: pytest.FixtureRequest) -> None:
    url = f"file://{tree}" if form == "file" else request.getfixturevalue("zipped")
    blobs = FsspecBlobs(url)
    assert [m.key for m in blobs.list("")] == [
        "manifests/1.json",
        "state/op/0.parquet",
        "state/op/1.parquet",
    ]
    assert [m.size for m in blobs.list("state/op/0")] == [10]
    assert [m.key for m in blobs.list("state/", "state/op/0.parquet")] == ["state/op/1.parquet"]
    assert list(blobs.list("nothing/here")) == []
    data, meta = blobs.get("state/op/0.parquet", max_bytes=10)
    assert (data, meta.size) == (b"0123456789", 10)
    assert blobs.head("state/op/0.parquet") == meta
    assert blobs.get_range("state/op/0.parquet", 8, 12, meta.version) == b"89"
    assert blobs.get_range("state/op/0.parquet", 20, 22) == b""
    with pytest.raises(BlobTooLarge):
        blobs.get("state/op/0.parquet", max_bytes=9)
    with pytest.raises(BlobConflict):
        blobs.get_range("state/op/0.parquet", 0, 1, "another-version")
    assert blobs.head("nope") is None
    assert blobs.head("state") is None  # a directory is no object
    for key in ("nope", "state", "manifests/1.json/x"):
        with pytest.raises(FileNotFoundError):
            blobs.get(key)
    assert blobs.exists()
    assert not FsspecBlobs(f"file://{tree}/nope").exists()
    assert pickle.loads(pickle.dumps(blobs)).get("manifests/1.json")[0] == b"{}"


@pytest.mark.parametrize("form", ["file", "memory", "zip"])
def test_a_filesystem_whose_client_looks_before_it_writes_is_refused(
    form: str, tree: Path, request: pytest.FixtureRequest
) -> None:
    url = {"file": f"file://{tree}", "memory": "memory://x", "zip": ""}[form]
    blobs = FsspecBlobs(url or request.getfixturevalue("zipped"))
    before = sorted(p.relative_to(tree) for p in tree.rglob("*"))
    for operation in (
        lambda: blobs.require_writable(),
        lambda: blobs.put("a", b"x"),
        lambda: blobs.put_if_absent("a", b"x"),
        lambda: blobs.replace("a", b"x", ""),
        lambda: blobs.delete_many(["manifests/1.json"]),
    ):
        with pytest.raises(StoreUrlError, match="create-if-absent and compare-and-swap"):
            operation()
    assert sorted(p.relative_to(tree) for p in tree.rglob("*")) == before


def test_unknown_schemes_and_bad_options_are_refused() -> None:
    with pytest.raises(StoreUrlError, match="nosuchscheme"):
        open_blobs("nosuchscheme://bucket/a").list("")
    with pytest.raises(StoreUrlError, match="fsspec URL"):
        FsspecBlobs("just/a/path")
    with pytest.raises(StoreUrlError, match="cannot be opened"):
        FsspecBlobs("file:///x", auto_mkdir=True, no_such_option=1, protocol=3).list("")


def test_user_and_signature_in_a_url_are_not_shown() -> None:
    blobs = FsspecBlobs("https://user:hush-hush@127.0.0.1:9/a?sig=hush-hush", retry_seconds=0.1)
    assert blobs.url == "https://127.0.0.1:9/a"
    with pytest.raises(CheckpointStorageError) as caught:
        blobs.get("x")
    shown = "".join(traceback.format_exception(caught.value)) + repr(blobs)
    assert "hush" not in shown


@pytest.fixture
def s3(make_backend):
    """A bucket of moto's S3 server."""
    return make_backend("s3")


@pytest.mark.parametrize("name", ["s3", "azure"])
def test_s3_and_azure_are_accepted_and_conditions_hold_there(make_backend, name: str) -> None:
    blobs = make_backend(name).open()
    blobs.require_writable()
    assert list(blobs.list("")) == []  # the probe left nothing
    first = blobs.put_if_absent("a/b", b"1")
    with pytest.raises(BlobExists):
        blobs.put_if_absent("a/b", b"1")
    second = blobs.replace("a/b", b"2", first.version)
    for stale in (first.version, "", "0" * 32):
        with pytest.raises(BlobConflict):
            blobs.replace("a/b", b"3", stale)
    with pytest.raises(BlobConflict):
        blobs.replace("absent", b"3", first.version)
    assert blobs.get("a/b", max_bytes=1) == (b"2", second)
    assert [m.version for m in blobs.list("a/")] == [second.version]
    again = pickle.loads(pickle.dumps(blobs))
    assert again._refusal == ""  # the probe's word travels to the workers
    again.delete_many(["a/b", "absent"])
    assert blobs.head("a/b") is None


@pytest.mark.parametrize("name", ["s3", "azure"])
def test_a_store_there_commits_loads_and_prunes(make_backend, name: str) -> None:
    backend = make_backend(name)
    store = open_store(backend.url, **backend.options)
    for id in (1, 2, 3):
        entry = store.write_sidecar(
            operator="totals",
            key_group=0,
            boundary=id,
            run_id="r",
            data=b"%d" % id * 100,
            kind="full",
            rows=1,
        ).model_copy(update={"epoch": id})
        operators = listing([("totals", 0, entry)])
        store.save(a_manifest(id, finalized=True, watermark=id, operators=operators))
    again = open_store(backend.url, **backend.options)
    latest = again.load_latest()
    assert latest is not None and latest.id == 3
    assert again.recover_latest_validated().chosen_id == 3
    again.prune(KeepLast(1))
    assert again.list_ids() == [3]
    assert len(again.blobs.list("state/")) == 1


def test_a_missing_s3_bucket_is_an_error_and_never_an_empty_store(s3) -> None:
    blobs = dataclasses.replace(s3, url="s3://no-such-bucket/a").open()
    for operation in (  # each of which could mistake it for an empty store
        lambda: blobs.list(""),
        lambda: blobs.head("a"),
        lambda: blobs.get("a"),
        lambda: blobs.put_if_absent("a", b"x"),
    ):
        with pytest.raises(CheckpointStorageError, match="no such bucket"):
            operation()


@pytest.mark.parametrize(
    ("dropped", "reason"),
    [
        (("If-None-Match",), "create-if-absent is not enforced"),
        (("If-Match",), "compare-and-swap is not enforced"),
    ],
)
def test_an_s3_server_that_ignores_conditions_is_refused_and_left_clean(
    s3, dropped: tuple[str, ...], reason: str
) -> None:
    with FaultProxy(s3.options["endpoint_url"], drop_headers=dropped) as proxy:
        blobs = s3.open(endpoint_url=proxy.url)
        with pytest.raises(StoreUrlError, match=reason):
            blobs.put_if_absent("a", b"x")
        with pytest.raises(StoreUrlError, match=reason):
            blobs.require_writable()
        assert list(s3.open().list("")) == []
        s3.open().put("b", b"readable")
        assert blobs.get("b")[0] == b"readable"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [Fault("lost_response"), Fault("status", status=503), Fault("status_after"), Fault("reset")],
    ids=lambda f: f.kind,
)
def test_writers_on_s3_know_that_they_won(s3, fault: Fault) -> None:
    with FaultProxy(s3.options["endpoint_url"]) as proxy:
        blobs = s3.open(endpoint_url=proxy.url, retry_seconds=30)
        blobs.require_writable()
        proxy.add(fault, method="PUT")
        first = blobs.put_if_absent("a", b"1")
        proxy.add(fault, method="PUT")
        second = blobs.replace("a", b"2", first.version)
        assert blobs.get("a") == (b"2", second)


@pytest.mark.slow
def test_s3_credentials_are_not_in_errors(s3) -> None:
    with FaultProxy(s3.options["endpoint_url"]) as proxy:
        blobs = s3.open(endpoint_url=proxy.url, retry_seconds=0.2)
        said = [repr(blobs), blobs.url]
        for fault in (Fault("status", status=403), Fault("status", status=500), Fault("reset")):
            proxy.reset()
            proxy.add(fault, count=999)
            for operation in (lambda: blobs.get("a"), lambda: blobs.put("a", b"x")):
                with pytest.raises(CheckpointStorageError) as caught:
                    operation()
                said.append("".join(traceback.format_exception(caught.value)))
    assert "test-secret" not in "\n".join(said)
    assert "test-key" not in "\n".join(said)
