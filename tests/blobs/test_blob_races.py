"""Many writers at once, in threads and in forked processes."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Callable

import pytest

from beam_ckpt.blobs import BlobConflict, BlobExists, Blobs

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(params=["local", "memory", "gcs"])
def atomic(request: pytest.FixtureRequest, make_backend) -> Blobs:
    """The backends whose server is exact under a race (moto's looks, then writes)."""
    return make_backend(request.param).open()


@pytest.fixture(params=["local", "gcs"])
def shared(request: pytest.FixtureRequest, make_backend) -> Blobs:
    """The backends that several processes share."""
    return make_backend(request.param).open()


def run_in_threads(count: int, work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def guarded(n: int) -> None:
        try:
            work(n)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_of_many_threads_that_create_a_name_one_wins(atomic: Blobs) -> None:
    writers = 8
    for n in range(20):
        barrier = threading.Barrier(writers)
        winners: list[int] = []

        def create(who: int, n: int = n, winners: list[int] = winners) -> None:
            barrier.wait()  # noqa: B023 - all threads of a round end within it
            try:
                atomic.put_if_absent(f"c/{n}", b"%d" % who)
                winners.append(who)
            except BlobExists:
                pass

        run_in_threads(writers, create)
        assert [b"%d" % w for w in winners] == [atomic.get(f"c/{n}")[0]]


def test_counters_under_compare_and_swap_are_exact_in_threads(atomic: Blobs) -> None:
    writers, increments = 6, 15
    atomic.put_if_absent("n", b"0")
    run_in_threads(writers, lambda _: increment(atomic, increments))
    assert atomic.get("n")[0] == b"%d" % (writers * increments)


def increment(blobs: Blobs, times: int) -> None:
    done = 0
    while done < times:
        data, meta = blobs.get("n")
        try:
            blobs.replace("n", b"%d" % (int(data) + 1), meta.version)
            done += 1
        except BlobConflict:
            pass


def _create_all(blobs: Blobs, who: int, rounds: int, barrier, won) -> None:
    for n in range(rounds):
        barrier.wait(60)
        try:
            blobs.put_if_absent(f"c/{n}", b"%d" % who)
            won.put((n, who))
        except BlobExists:
            pass


def test_of_many_processes_that_create_a_name_one_wins(shared: Blobs) -> None:
    writers, rounds = 4, 15
    shared.put("used-before-the-fork", b"x")  # the children inherit an open client
    barrier, won = FORK.Barrier(writers), FORK.Queue()
    processes = [
        FORK.Process(target=_create_all, args=(shared, n, rounds, barrier, won))
        for n in range(writers)
    ]
    for process in processes:
        process.start()
    winners = dict(won.get(timeout=60) for _ in range(rounds))
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert won.empty()
    assert sorted(winners) == list(range(rounds))
    for n, who in winners.items():
        assert shared.get(f"c/{n}")[0] == b"%d" % who


def test_counters_are_exact_across_forked_processes_and_threads(shared: Blobs) -> None:
    shared.put_if_absent("n", b"0")
    processes = [FORK.Process(target=increment, args=(shared, 10)) for _ in range(3)]
    for process in processes:
        process.start()
    run_in_threads(3, lambda _: increment(shared, 10))
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert shared.get("n")[0] == b"60"


def _use(pickled: bytes, out) -> None:
    blobs = pickle.loads(pickled)
    blobs.put("from-the-child", b"x")
    out.put(blobs.get("from-the-parent")[0])


def test_a_spawned_process_opens_what_it_was_sent(shared: Blobs) -> None:
    shared.put("from-the-parent", b"y")
    out = SPAWN.Queue()
    process = SPAWN.Process(target=_use, args=(pickle.dumps(shared), out))
    process.start()
    assert out.get(timeout=60) == b"y"
    process.join(60)
    assert process.exitcode == 0
    assert shared.get("from-the-child")[0] == b"x"


def test_no_reader_sees_a_torn_object(atomic: Blobs) -> None:
    sizes = [10, 200_000, 3, 70_000]
    bodies = [bytes([65 + n]) * size for n, size in enumerate(sizes)]
    atomic.put("a", bodies[0])
    stop = threading.Event()
    reads = [0]

    def read(_: int) -> None:
        while not stop.is_set():
            data, meta = atomic.get("a")
            assert data in bodies
            assert meta.size == len(data)
            reads[0] += 1

    def act(n: int) -> None:
        if n:
            read(n)
            return
        try:
            turn = 0
            while turn < 60 or reads[0] < 20:
                atomic.put("a", bodies[turn % len(bodies)])
                turn += 1
        finally:
            stop.set()

    run_in_threads(3, act)
    assert reads[0] >= 20
