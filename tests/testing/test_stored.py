"""Cut equivalence with all that the store's settings can do switched on at once.

Generated DoFns and histories, whose checkpoints go through the real writer, committer and restore;
on a real runner: `tests/runners/test_generated.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings

from beam_ckpt.errors import CheckpointError
from beam_ckpt.sidecar import PageStream, _encode, _merge
from beam_ckpt.sidecar._patch import APPEND, REPLACE
from beam_ckpt.testing import fake_runner
from beam_ckpt.testing.stored import EXAMPLES, StoredHistory, check_stored, stored_histories
from beam_ckpt.transforms import committer, restore, writer
from beam_ckpt.transforms._runs import Runs
from beam_ckpt.transforms._shared import SharedPart
from beam_ckpt.transforms.committer import CommitFn
from beam_ckpt.transforms.keyed_state.key import KeyState

FEW, MANY = 30, 500

#: What has to have happened, or the settings show nothing.
REACHED = {
    "bases of several files",
    "bundles done again",
    "changes of the number of key groups",
    "chunks restored",
    "chunks written",
    "files of several key groups",
    "files of several pages",
    "merges of all files",
    "merges of deltas",
    "records: deleted",
    "records: items added",
    "records: some cells",
    "records: whole",
    "restored records",
    "runs on disk",
    "runs that died",
    "shared bases",
    "shared slices",
    "sidecars in the manifest",
    "sidecars: delta",
    "sidecars: full",
    "spilled values read",
}
#: And in a long run.
SELDOM = {"histories on disk", "slices moved"}


def holds_for(examples: int, record_property) -> Counter[str]:
    counts: Counter[str] = Counter()

    @settings(
        max_examples=examples, derandomize=True, database=None, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(drawn=stored_histories())
    def holds(drawn: StoredHistory) -> None:
        counts.update(check_stored(drawn))

    for known in EXAMPLES:
        holds = example(drawn=known)(holds)
    holds()
    told = ", ".join(f"{what} {number}" for what, number in sorted(counts.items()))
    record_property("counts", f"{examples} histories: {told}")
    return counts


def test_with_everything_switched_on_a_cut_changes_nothing(record_property):
    counts = holds_for(FEW, record_property)
    assert not {what for what in REACHED if not counts[what]}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_with_everything_switched_on_a_cut_changes_nothing_at_length(record_property):
    counts = holds_for(MANY, record_property)
    assert not {what for what in REACHED | SELDOM if counts[what] < 10}


# ----------------------------------------------------------------------- would it find a fault?
# Each takes what the code has, and gives something worse.


def without_tombstones(stream_chain: Any) -> Any:
    def streamed(*args: Any, **kwargs: Any) -> PageStream:
        stream = stream_chain(*args, **kwargs)
        pages = (page.filter(pc.invert(page["_deleted"])) for page in stream.pages)
        return PageStream(stream.schema, pages)

    return streamed


def on_nothing(next_operators: Any) -> Any:
    return lambda base, uids, new, epoch: next_operators(
        base, uids, [replace(s, keeps=0) for s in new], epoch
    )


def without_the_last_chunk(cut: Any) -> Any:
    def lossy(record: bytes, limit: int) -> list[bytes]:
        chunks = list(cut(record, limit))
        return chunks[:-1] or chunks

    return lossy


def of_any_number_of_groups(entries_of: Any) -> Any:
    return lambda self, base: {} if base is None else dict(base.operators)


def never_anew(config: Any) -> Any:
    return lambda **kwargs: config(**{**kwargs, "rewrite": False})


def without_the_second(row_groups: Any) -> Any:
    def lossy(*args: Any) -> Iterator[Any]:
        return (page for number, page in enumerate(row_groups(*args)) if number != 1)

    return lossy


def of_each_other(listed: Any) -> Any:
    def swapped(*args: Any) -> Any:
        pieces = listed(*args)
        if len(pieces) > 1 and pieces[0].entry.rows == pieces[1].entry.rows:
            one, other = pieces[0].entry, pieces[1].entry
            pieces[:2] = replace(pieces[0], entry=other), replace(pieces[1], entry=one)
        return pieces

    return swapped


def a_minute_early(without_what_is_over: Any) -> Any:
    return lambda page, coder, at, lateness: without_what_is_over(
        page, coder, None if at is None else at + 60_000_000, lateness
    )


def stays_as_it_was(write_back: Any) -> Any:
    def kept(self: KeyState) -> None:
        self._aux_stale = False
        write_back(self)

    return kept


def in_place_of_the_bag(folded_cell: Any) -> Any:
    return lambda column, order, codes, starts: folded_cell(
        column, order, np.where(codes == APPEND, REPLACE, codes), starts
    )


def only_the_newest(streams: Any) -> Any:
    return lambda self: streams(self)[:1]


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "a merge of deltas loses tombstones": (writer, "stream_chain", without_tombstones),
    "a delta stands on nothing": (committer, "next_operators", on_nothing),
    "a chunk of a restored record is lost": (restore, "cut", without_the_last_chunk),
    "files of another number of key groups stay": (
        CommitFn, "_entries_of", of_any_number_of_groups
    ),
    "keys are not saved anew in other key groups": (fake_runner, "OperatorConfig", never_anew),
    "a page is lost": (_encode, "_row_groups", without_the_second),
    "slices of two key groups are swapped": (SharedPart, "listed", of_each_other),
    "windows that are not over are dropped": (writer, "without_what_is_over", a_minute_early),
    "a spilled value stays as it was": (KeyState, "_write_back_buffer", stays_as_it_was),
    "items that were added take the place of a bag": (
        _merge, "_folded_cell", in_place_of_the_bag
    ),
    "runs on disk are lost": (Runs, "streams", only_the_newest),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, monkeypatch):
    owner, name, spoilt = FAULTS[fault]
    monkeypatch.setattr(owner, name, spoilt(getattr(owner, name)))

    @settings(
        max_examples=300, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    @given(drawn=stored_histories())
    def holds(drawn: StoredHistory) -> None:
        check_stored(drawn)

    # (A manifest that cannot be, or a value that is not there, is found by the code itself.)
    with pytest.raises((AssertionError, CheckpointError, ValueError, KeyError)):
        holds()
