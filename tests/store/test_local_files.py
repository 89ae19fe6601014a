"""What only a file system can do to a store, and what a store must do on one."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import resource
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from beam_ckpt import open_store
from beam_ckpt.blobs import ABSENT, BlobConflict, BlobExists, BlobInvalid
from beam_ckpt.blobs._local import LocalBlobs
from beam_ckpt.errors import (
    CheckpointNotFoundError,
    CheckpointStorageError,
    InvalidCheckpointError,
    StoreUrlError,
)
from beam_ckpt.retention import KeepLast
from beam_ckpt.store import FileSystemCheckpointStore
from beam_ckpt.testing.store import a_manifest, commit, listing, path_of, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def store(root: Path) -> FileSystemCheckpointStore:
    return FileSystemCheckpointStore(root)


def temporaries(root: Path) -> list[Path]:
    return [p for p in root.rglob(".tmp-*")]


def test_a_nested_store_is_made_with_its_first_write_and_leaves_nothing_temporary(
    root: Path,
) -> None:
    store = open_store(root / "a" / "b")
    assert not root.exists()
    commit(store, 1)
    assert (root / "a/b/latest.json").is_file()
    assert (root / "a/b/manifests/000000000001.json").is_file()
    assert temporaries(root) == []


def test_a_file_url_and_a_path_are_the_same_store(root: Path) -> None:
    commit(open_store(f"file://{root}"), 1)
    assert open_store(root).list_ids() == open_store(str(root)).list_ids() == [1]


def test_a_relative_path_stays_where_it_was_opened(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir()
    monkeypatch.chdir(root)
    store = open_store("ckpt")
    monkeypatch.chdir("/")
    commit(store, 1)
    assert (root / "ckpt/latest.json").is_file()


@pytest.mark.parametrize("below", ["", "store", "deep/store"])
def test_a_path_that_is_or_crosses_a_file_is_refused_at_once(root: Path, below: str) -> None:
    root.write_text("precious")
    with pytest.raises(StoreUrlError, match=f"{root} is a file"):
        open_store(root / below)
    assert root.read_text() == "precious"


@pytest.mark.parametrize("url", ["", " ", "file://", "memory://", "a\x00b", "gs://"])
def test_a_url_that_names_nothing_is_refused(url: str) -> None:
    with pytest.raises(StoreUrlError):
        open_store(url)


def test_options_that_local_files_do_not_have_are_refused(root: Path) -> None:
    with pytest.raises(StoreUrlError, match="token"):
        open_store(root, token="anon")


def test_a_store_that_is_not_there_is_not_made_by_looking(root: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint store"):
        open_store(root, create=False)
    assert not root.exists()
    commit(open_store(root), 1)
    assert open_store(root, create=False).list_ids() == [1]


# -- symlinks and other things that are no files ------------------------------------------


def test_a_symlinked_sidecar_is_refused(store: FileSystemCheckpointStore, root: Path) -> None:
    manifest = commit(store, 1)
    path = root / path_of(manifest)
    target = root.parent / "elsewhere"
    path.rename(target)
    path.symlink_to(target)
    with pytest.raises(InvalidCheckpointError, match="symbolic link"):
        store.read_sidecar(manifest.sidecars()[0][2])
    for deep in (True, False):
        assert not store.validate_checkpoint(1, deep=deep).valid


def test_a_symlinked_directory_is_refused_for_reading_and_writing(
    store: FileSystemCheckpointStore, root: Path
) -> None:
    manifest = commit(store, 1)
    outside = root.parent / "outside"
    (root / "state/totals").rename(outside)
    (root / "state/totals").symlink_to(outside)
    with pytest.raises(InvalidCheckpointError, match="symbolic link"):
        store.read_sidecar(manifest.sidecars()[0][2])
    before = sorted(outside.rglob("*"))
    fresh = FileSystemCheckpointStore(root)
    with pytest.raises(InvalidCheckpointError, match="symbolic link"):
        write(fresh, b"must not leave the store")
    assert sorted(outside.rglob("*")) == before
    assert fresh.gc(grace_s=0).deleted == ()
    assert sorted(outside.rglob("*")) == before
    (root / "state").rename(root.parent / "state")
    (root / "state").symlink_to(root.parent / "state")
    with pytest.raises(InvalidCheckpointError, match="symbolic link"):
        fresh.gc(grace_s=0)


def test_the_root_itself_may_be_a_symlink(root: Path) -> None:
    real = root.parent / "real"
    real.mkdir()
    root.symlink_to(real)
    store = open_store(root)
    commit(store, 1)
    assert store.validate_checkpoint(1).valid
    assert (real / "latest.json").is_file()


@pytest.mark.parametrize("kind", ["symlink", "directory", "fifo"])
def test_a_manifest_that_is_no_file_is_named_by_every_inventory(
    store: FileSystemCheckpointStore, root: Path, kind: str
) -> None:
    commit(store, 1)
    path = root / "manifests/000000000002.json"
    if kind == "symlink":
        path.symlink_to(root / "manifests/000000000001.json")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    for act in (store.list_ids, store.list, lambda: store.prune(KeepLast(1))):
        with pytest.raises(InvalidCheckpointError, match=r"000000000002\.json is no regular file"):
            act()
    with pytest.raises(InvalidCheckpointError):  # and does not wait for a pipe's other end
        store.load_by_id(2)
    assert store.load_latest() is not None


@pytest.mark.parametrize("kind", ["symlink", "directory"])
def test_a_pointer_that_is_no_file_fails_closed(
    store: FileSystemCheckpointStore, root: Path, kind: str
) -> None:
    last = commit(store, 1)
    pointer = root / "latest.json"
    pointer.rename(root.parent / "latest.json")
    if kind == "symlink":
        pointer.symlink_to(root.parent / "latest.json")
    else:
        pointer.mkdir()
    with pytest.raises(InvalidCheckpointError, match="invalid checkpoint recovery pointer"):
        store.load_latest()
    if kind == "symlink":
        assert store.repair_pointer().chosen_id == 1
        assert store.load_latest() == last
        assert not pointer.is_symlink()


def test_a_state_path_that_is_a_directory_is_refused(
    store: FileSystemCheckpointStore, root: Path
) -> None:
    manifest = commit(store, 1)
    path = root / path_of(manifest)
    path.unlink()
    path.mkdir()
    with pytest.raises(InvalidCheckpointError, match="directory"):
        store.read_sidecar(manifest.sidecars()[0][2])
    assert not store.validate_checkpoint(1).valid


def test_a_sparse_file_of_ten_gigabytes_is_not_read(
    store: FileSystemCheckpointStore, root: Path
) -> None:
    manifest = commit(store, 1)
    os.truncate(root / path_of(manifest), 10_000_000_000)
    os.truncate(root / "latest.json", 10_000_000_000)
    began = time.monotonic()
    with pytest.raises(InvalidCheckpointError, match="10000000000 bytes"):
        store.read_sidecar(manifest.sidecars()[0][2])
    with pytest.raises(InvalidCheckpointError, match="10000000000 bytes, 1024 allowed"):
        store.load_latest()
    assert not store.validate_checkpoint(1).valid
    assert time.monotonic() - began < 1


# -- files that change under a reader -----------------------------------------------------


@pytest.mark.parametrize(("change", "said"), [(+1, "grew"), (-1, "was cut short")])
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: int, said: str
) -> None:
    blobs = LocalBlobs(tmp_path)
    blobs.put("state/a/b", b"x" * 1000)
    opened = os.fstat

    def fstat(fd: int) -> os.stat_result:
        found = opened(fd)
        os.truncate(tmp_path / "state/a/b", 1000 + change)
        return found

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(BlobInvalid, match=said):
        blobs.get("state/a/b")


def test_readers_of_a_replaced_file_see_one_version_or_the_other(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path)
    version = blobs.put_if_absent("p", b"0" * 10_000).version
    done = threading.Event()
    torn: list[bytes] = []
    reads = 0

    def read() -> None:
        nonlocal reads
        while not done.is_set():
            data, _ = blobs.get("p")
            reads += 1
            if len(set(data)) != 1 or len(data) != 10_000:
                torn.append(data[:10])

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(1, 200):
        version = blobs.replace("p", b"%d" % (n % 10) * 10_000, version).version
    done.set()
    reader.join()
    assert torn == []
    assert reads > 50


# -- durable, create-once, compare and swap -----------------------------------------------


def test_create_once_refuses_an_existing_file_and_leaves_it(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path)
    first = blobs.put_if_absent("a/b", b"first")
    with pytest.raises(BlobExists):
        blobs.put_if_absent("a/b", b"second")
    assert blobs.get("a/b") == (b"first", first)
    assert temporaries(tmp_path) == []


def test_replace_swaps_the_expected_version_only(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path)
    first = blobs.replace("p", b"first", ABSENT)
    second = blobs.replace("p", b"other", first.version)
    assert blobs.get("p") == (b"other", second)
    for stale in (first.version, ABSENT, "nonsense"):
        with pytest.raises(BlobConflict):
            blobs.replace("p", b"third", stale)
    with pytest.raises(BlobConflict):
        blobs.replace("missing", b"x", first.version)
    assert blobs.get("p")[0] == b"other"
    assert temporaries(tmp_path) == []


def test_a_version_never_comes_back_though_inodes_are_reused(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path)
    version = blobs.replace("p", b"0", ABSENT).version
    seen = {version}
    for n in range(300):  # of one size, within a few clock ticks
        version = blobs.replace("p", b"%d" % (n % 10), version).version
        assert version not in seen
        seen.add(version)


def test_directories_are_made_by_any_number_of_writers(tmp_path: Path) -> None:
    start = threading.Barrier(8)

    def one(n: int) -> None:
        blobs = LocalBlobs(tmp_path / "root")
        start.wait()
        blobs.put(f"a/b/c/{n}", b"")
        blobs.put(f"a/b/c/{n}", b"")

    threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(LocalBlobs(tmp_path / "root").list("a/b/c/")) == 8


def test_a_file_where_a_directory_must_be_is_an_error_not_a_loss(
    store: FileSystemCheckpointStore, root: Path
) -> None:
    last = commit(store, 1)
    (root / "tags").write_text("precious")
    with pytest.raises(CheckpointStorageError) as caught:
        store.tag("a", 1)
    assert caught.value.errno in (errno.EEXIST, errno.ENOTDIR)
    assert (root / "tags").read_text() == "precious"
    assert store.load_latest() == last


def _swap_until(path: str, count: int) -> int:
    blobs, conflicts = LocalBlobs(path), 0
    for _ in range(count):
        while True:
            data, meta = blobs.get("counter")
            try:
                blobs.replace("counter", b"%d" % (int(data) + 1), meta.version)
                break
            except BlobConflict:
                conflicts += 1
    return conflicts


def test_compare_and_swap_is_exact_among_processes(tmp_path: Path) -> None:
    LocalBlobs(tmp_path).put_if_absent("counter", b"0")
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        pool.starmap(_swap_until, [(str(tmp_path), 40)] * 3)
    assert LocalBlobs(tmp_path).get("counter")[0] == b"120"


def _create_each(path: str, name: bytes, count: int) -> int:
    blobs, won = LocalBlobs(path), 0
    for n in range(count):
        try:
            blobs.put_if_absent(f"k/{n}", name * 100)
            won += 1
        except BlobExists:
            pass
    return won


def test_creation_has_one_winner_among_processes(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        won = pool.starmap(_create_each, [(str(tmp_path), n, 50) for n in (b"a", b"b", b"c")])
    assert sum(won) == 50
    blobs = LocalBlobs(tmp_path)
    assert all(len(set(blobs.get(f"k/{n}")[0])) == 1 for n in range(50))


def test_a_write_is_synced_file_first_then_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def watch(name: str, real: Callable[..., object], describe: Callable[..., str]) -> None:
        def call(*args: object, **kwargs: object) -> object:
            calls.append(f"{name} {describe(*args)}")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    def kind(fd: int) -> str:
        return "directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"

    watch("fsync", os.fsync, kind)
    watch("link", os.link, lambda *_: "")
    watch("replace", os.replace, lambda *_: "")
    watch("mkdir", os.mkdir, lambda path, *_: os.path.basename(path))
    blobs = LocalBlobs(tmp_path / "root")
    version = blobs.put_if_absent("a/p", b"1").version
    assert calls == [
        *("mkdir root", "fsync directory", "mkdir a", "fsync directory"),
        *("fsync file", "link ", "fsync directory"),
    ]
    calls.clear()
    blobs.replace("a/p", b"2", version)
    assert calls == ["fsync file", "replace ", "fsync directory"]
    calls.clear()
    blobs.put("a/q", b"3")
    assert calls == ["fsync file", "replace ", "fsync directory"]
    calls.clear()
    blobs.delete_many(["a/p", "a/q", "a/r"])
    assert calls == ["fsync directory"]


def test_leftovers_of_killed_writers_are_no_objects_and_gc_takes_them(
    store: FileSystemCheckpointStore, root: Path
) -> None:
    commit(store, 1)
    left = [root / "manifests/.tmp-1-abc", root / "state/totals/00000/.tmp-2-def"]
    for path in left:
        path.write_bytes(b"half a mani")
    assert store.list_ids() == [1]
    assert store.recover_latest_validated().chosen_id == 1
    assert store.gc(grace_s=3600).deleted == ()
    assert [g.key for g in store.gc(grace_s=0, dry_run=True).deleted] == [
        str(p.relative_to(root)) for p in left
    ]
    assert all(p.exists() for p in left)
    store.gc(grace_s=0)
    assert not any(p.exists() for p in left)


@pytest.mark.parametrize("key", ["", "/etc/x", "../x", "a/../x", "a//b", "./a", "a/.", "a\x00b"])
def test_a_key_that_leaves_the_root_is_refused(tmp_path: Path, key: str) -> None:
    blobs = LocalBlobs(tmp_path / "root")
    for act in (
        lambda: blobs.put(key, b""),
        lambda: blobs.put_if_absent(key, b""),
        lambda: blobs.get(key),
        lambda: blobs.head(key),
        lambda: blobs.delete_many([key]),
    ):
        with pytest.raises(ValueError, match="relative path"):
            act()
    assert list(tmp_path.iterdir()) == []


# -- storage that refuses -----------------------------------------------------------------


@pytest.fixture
def as_nobody() -> Iterator[None]:
    if os.geteuid() != 0:
        yield  # permissions bind us already
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_directory_without_permission_is_a_clear_error(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shared = Path(tempfile.gettempdir()).resolve()
    for above in (tmp_path, *tmp_path.parents):
        if shared in above.parents:  # pytest's own, which only its user may enter
            above.chmod(0o755)
    root = tmp_path / "root"
    store = open_store(root)
    last = commit(store, 1)
    for directory in (root, *(p for p in root.rglob("*") if p.is_dir())):
        directory.chmod(0o555)
    request.getfixturevalue("as_nobody")
    fresh = open_store(root)
    for act in (
        lambda: fresh.save(a_manifest(2)),
        lambda: write(fresh, b"state"),
        lambda: fresh.claim_generation("run"),
    ):
        with pytest.raises(CheckpointStorageError, match="check the permissions") as caught:
            act()
        assert caught.value.errno == errno.EACCES
    assert fresh.load_latest() == last
    assert fresh.validate_checkpoint(1).valid
    with pytest.raises(CheckpointStorageError, match="check the permissions"):
        open_store(tmp_path / "new").save(a_manifest(1))


_IN_A_FULL_FILE_SYSTEM = """
import errno, os, sys
from beam_ckpt import open_store
from beam_ckpt.errors import CheckpointStorageError
from beam_ckpt.testing.store import commit
store = open_store(sys.argv[1])
id = 0
try:
    while True:
        id += 1
        commit(store, id, os.urandom(20_000))
except CheckpointStorageError as e:
    assert e.errno == errno.ENOSPC, e
    assert "free some space" in str(e), e
assert id > 2
report = open_store(sys.argv[1]).recover_latest_validated()
assert report.chosen_id in (id - 1, id), report
assert store.load_latest() is not None
from beam_ckpt import KeepLast
store.prune(KeepLast(1))
store.gc(grace_s=0)
commit(store, store.next_id(), b"goes on")
print("went on after", id)
"""


def test_a_full_file_system_loses_nothing_and_the_store_goes_on_after_a_prune(
    tmp_path: Path,
) -> None:
    script = f'mount -t tmpfs -o size=256k tmpfs {tmp_path} && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", sys.executable, "-c"]
    try:
        probe = subprocess.run([*command, "pass"], capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if probe.returncode:
        pytest.skip(f"no file system can be mounted here: {probe.stderr.decode()[:200]}")
    done = subprocess.run(
        [*command, _IN_A_FULL_FILE_SYSTEM, str(tmp_path / "store")],
        capture_output=True,
        timeout=120,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "went on after" in done.stdout


_HOSTILE = """
import os, resource, sys, time
from beam_ckpt import open_store
from beam_ckpt.errors import CheckpointError
root = sys.argv[1]
store = open_store(root)
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.monotonic()
errors = 0
for act in (
    store.load_latest, store.list, store.tags, store.gc, lambda: store.prune_before(9),
    lambda: store.claim_generation("run"), *(lambda i=i: store.load_by_id(i) for i in range(1, 11)),
    lambda: open_store(root).deployment_id,
):
    try:
        act()
    except CheckpointError as e:
        errors += 1
report = store.recover_latest_validated()
for id in store.list_ids():
    store.validate_checkpoint(id)
print(errors, report.chosen_id, time.monotonic() - began,
      (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) // 1024)
"""


def test_a_hostile_tree_costs_little_memory_and_time(
    store: FileSystemCheckpointStore, root: Path
) -> None:
    commit(store, 1)
    listed = write(store, b"tiny")
    for id in range(2, 11):
        store.save(a_manifest(id, operators=listing([listed]), finalized=True))
    good = (root / "manifests/000000000002.json").read_bytes()
    hostile = {
        2: b"[" * 16_000_000,
        3: b'{"version":2,"x":' + b'{"a":' * 190_000,
        4: good.replace(b'"epoch":2', b'"epoch":' + b"9" * 15_000_000),
        5: b"[" + b"0," * 8_000_000 + b"0]",
        6: b'{"version":2,' + b",".join(b'"%d":0' % n for n in range(490_000)) + b"}",
        7: b'"' + b"\\u0061" * 2_700_000 + b'"',
        8: good.replace(b'"size_bytes":4', b'"size_bytes":10000000000'),
        9: b'{"version":2,"operators":{"a":{"partitions":[' + b"{}," * 190_000 + b"{}]}}}",
        10: b'{"version":2,"operators":{'
        + b",".join(b'"%d":{}' % n for n in range(60_000))
        + b"}}",
    }
    for id, data in hostile.items():
        (root / f"manifests/{id:012d}.json").write_bytes(data)
    os.truncate(root / "latest.json", 10_000_000_000)
    os.truncate(root / "namespace.json", 10_000_000_000)
    (root / "tags").mkdir()
    (root / "tags/a.json").write_bytes(b"[" * 1000)
    done = subprocess.run(
        [sys.executable, "-c", _HOSTILE, str(root)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    errors, chosen, seconds, megabytes = done.stdout.split()
    assert int(errors) >= 12
    assert chosen == "1"
    assert float(seconds) < 20  # each object is read by several of the calls
    assert int(megabytes) < 100


def test_more_open_files_than_allowed_is_an_error_not_a_loss(
    store: FileSystemCheckpointStore,
) -> None:
    last = commit(store, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(CheckpointStorageError):
            store.load_latest()
        with pytest.raises(CheckpointStorageError):
            store.recover_latest_validated()
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert store.load_latest() == last


def test_without_hard_links_creation_still_has_one_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", link)
    start = threading.Barrier(6)
    won: list[tuple[int, int]] = []

    def one(n: int) -> None:
        blobs = LocalBlobs(tmp_path)
        start.wait()
        for k in range(30):
            with contextlib.suppress(BlobExists):
                blobs.put_if_absent(f"k/{k}", b"%d" % n * 100)
                won.append((k, n))

    threads = [threading.Thread(target=one, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(k for k, _ in won) == list(range(30))
    assert all(LocalBlobs(tmp_path).get(f"k/{k}")[0] == b"%d" % n * 100 for k, n in won)
    assert temporaries(tmp_path) == []
