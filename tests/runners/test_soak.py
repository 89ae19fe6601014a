"""A stream of thousands of checkpoints, killed every few seconds: flat, bounded, exact."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.coders import VarIntCoder
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec

from beam_ckpt.testing.crashes import StreamHistory, carry_out, outputs_of
from beam_ckpt.testing.cuts import saved_state
from beam_ckpt.testing.event_loop import canonical, run_event_loop
from beam_ckpt.testing.replay import ReplayLog

S = 1_000_000
_NOTED = [0.0]
#: The worker's cache of state would grow for half an hour, to 100 MB, whatever the pipeline.
SMALL_CACHE = "--max_cache_memory_usage_mb=4"
#: Three checkpoints of four groups of eight files, with what belongs to them.
STEADY = 3 * 4 * 8 + 20


class WindowedSumFn(beam.DoFn):
    """A sum for ever, and a bag that is emptied at every hundredth element of its key."""

    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())
    RECENT = BagStateSpec("recent", VarIntCoder())

    def __init__(self, memory: str) -> None:
        self._memory = memory

    def start_bundle(self) -> None:
        """Notes the memory of this process, in which its workers are, once a second."""
        if time.monotonic() - _NOTED[0] >= 1:
            _NOTED[0] = time.monotonic()
            with open(self._memory, "a") as file:
                file.write(f"{os.getpid()} {_resident_bytes()}\n")

    def process(
        self,
        element,
        count=beam.DoFn.StateParam(COUNT),
        recent=beam.DoFn.StateParam(RECENT),
    ):
        key, value = element
        total = (count.read() or 0) + 1
        count.write(total)
        if total % 100 == 0:
            recent.clear()
        recent.add(value)
        if value % 50 == 0:
            yield key, total, sum(recent.read())


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _files(root: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(root))


@contextmanager
def counted(root: Path) -> Iterator[list[int]]:
    """While it is open: how many files there are, twice a second."""
    seen: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.5):
            seen.append(_files(root))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def soak(tmp_path: Path, epochs: int, kills: int, every_seconds: float) -> str:
    """Runs `epochs` checkpoints of 10 s of event time; returns what was seen."""
    rows = tuple(
        (n * 2 * S + n % 7 * 1000, ("abcdefghijklmnopqrstuvwxyz"[n % 26], n))
        for n in range(epochs * 5)
    )
    memory = tmp_path / "memory.log"
    root = tmp_path / "history"
    root.mkdir()
    log = ReplayLog(rows, displacement=15, seed=3)
    history = StreamHistory(
        str(root),
        WindowedSumFn(str(memory)),
        log,
        10,
        speed=200,
        key_groups=4,
        options=(SMALL_CACHE,),
    )
    started = time.monotonic()
    with counted(root / "ckpt") as files:
        crashes = carry_out(history, kill_after=[every_seconds] * kills, limit=kills + 2)
    took = time.monotonic() - started
    assert crashes.kills == kills
    elements = [(at, key, value) for at, (key, value) in log.below(None)]
    reference = run_event_loop(history.fn, elements)
    assert canonical(outputs_of(history)) == canonical(reference.outputs)
    assert saved_state(history.store, history.fn) == dict(reference.state)
    lives: dict[str, list[int]] = {}
    for line in memory.read_text().splitlines():
        process, resident = line.split()
        if int(process) != os.getpid():  # the oracle's
            lives.setdefault(process, []).append(int(resident))
    *_, last = lives.values()  # the one that was not killed
    middle, end = last[len(last) // 2], last[-1]
    assert len(last) > 8, "the last process was too short to tell"
    assert end < 1.15 * middle, f"memory grows: {last}"
    newest = history.store.load_latest()
    made = newest.epoch + 1
    assert made > 0.9 * epochs
    # What each kill leaves behind are the files of checkpoints that were not published yet.
    assert max(files) < STEADY + 60 * kills
    history.store.gc(grace_s=0)
    left = _files(root / "ckpt")
    assert left < STEADY
    return (
        f"{made} checkpoints in {took:.0f} s, {kills} kills, at most {max(files)} files, "
        f"{left} after gc, "
        f"{middle >> 20} MB in the middle and {end >> 20} MB at the end, 0 lost, 0 double"
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_5000_checkpoints_with_a_kill_every_20_seconds(prism, tmp_path, record_property):
    record_property("counts", soak(tmp_path, epochs=5000, kills=45, every_seconds=20))
