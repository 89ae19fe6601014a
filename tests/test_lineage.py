"""Which files a key group consists of, from one checkpoint to the next."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256

import pytest

from beam_ckpt.errors import InvalidCheckpointError
from beam_ckpt.lineage import (
    NewSidecar,
    Piece,
    files_to_keep,
    inline_over,
    next_operators,
    relisted,
    same,
    to_share,
)
from beam_ckpt.manifest import OperatorSnapshotEntry, PartitionSnapshotEntry, SidecarEntry


def entry(kind: str, size: int, rows: int = 1, name: str = "") -> SidecarEntry:
    name = name or f"{kind}-{size}"
    return SidecarEntry(
        path=f"state/op/{name}",
        kind=kind,
        size_bytes=size,
        rows=rows,
        crc32c=0,
        sha256=sha256(name.encode()).hexdigest(),
    )


def chain(base: int, *deltas: int) -> list[SidecarEntry]:
    return [entry("full", base), *(entry("delta", size) for size in deltas)]


@pytest.mark.parametrize(
    ("files", "new", "keep"),
    [
        ([], 5, 0),  # nothing to build on
        (chain(1000), 5, 1),
        (chain(1000, 5, 5, 5, 5, 5, 5), 5, 7),  # there is room
        (chain(1000, 365), 10, 2),  # just not too much for the base
        (chain(1000, 366), 10, 0),
        ([entry("full", 500), entry("full", 501), entry("delta", 330)], 45, 3),  # a base in two
        (chain(1000, 100, 49, 24, 12, 6, 3), 1, 7),  # the eighth file is the last that may be
        (chain(9000, 600, 300, 150, 70, 30, 12, 5), 1, 7),  # so the last one is swallowed
        (chain(9000, 600, 300, 150, 70, 30, 6, 5), 1, 6),  # and with it what is no larger then
        (chain(9000, 40, 40, 40, 40, 10, 10, 10), 10, 1),  # 20, 30, 40, then 80: each the next
        (chain(9000, 40, 290, 40, 40, 10, 10, 10), 10, 3),  # 120 does not swallow 290
    ],
)
def test_a_full_chain_s_new_delta_swallows_those_that_are_no_larger(files, new, keep):
    assert files_to_keep(files, new, 8) == keep


def test_what_only_adds_to_bags_makes_no_new_base():
    appended = [entry("delta", 900).model_copy(update={"appended_bytes": 800})]
    assert files_to_keep([*chain(1000), *appended], 350, 8) == 0  # 100 + 350
    assert files_to_keep([*chain(1000), *appended], 350, 8, appended_bytes=80) == 2
    assert files_to_keep(chain(1000), 5000, 8, appended_bytes=5000) == 1


def test_10_000_items_over_100_epochs_are_written_three_times_at_most():
    """A file of 100 items of 100 bytes has some 1,500 bytes beside them, nearly all its footer."""
    files, written = [entry("full", 11_500)], 0
    for _ in range(100):
        keep = files_to_keep(files, 11_500, 8, appended_bytes=11_490)
        size = sum(e.size_bytes - 1500 for e in files[keep:]) + 11_500
        assert keep, "the base is not written again"
        files = [*files[:keep], entry("delta", size)]
        files[-1] = files[-1].model_copy(update={"appended_bytes": size - size // 1000})
        written += size
        assert len(files) <= 8
    assert written < 3 * 10_000 * 100


def test_with_one_file_allowed_every_file_is_full():
    assert files_to_keep(chain(1000), 1, 1) == 0
    assert files_to_keep(chain(1000), 1, 2) == 1
    assert files_to_keep(chain(1000, 100), 1, 2) == 1
    pages = [entry("full", 1000), entry("full", 900), entry("full", 800)]
    assert files_to_keep(pages, 1, 2) == 3
    assert files_to_keep([*pages, entry("delta", 100)], 1, 2) == 3


def new(sequence: int, file: SidecarEntry, on: list[SidecarEntry]) -> NewSidecar:
    after = on[-1].sha256 if on else ""
    return NewSidecar("op", 3, sequence, file, len(on), after)


def listed(*news: NewSidecar, base=None, epoch: int = 1) -> list[SidecarEntry]:
    operators = next_operators(base or {}, ["op"], news, epoch)
    partitions = operators["op"].partitions
    return list(partitions[0].sidecars) if partitions else []


def names(files: list[SidecarEntry]) -> list[str]:
    return [str(file.path).removeprefix("state/op/") for file in files]


def test_a_new_sidecar_replaces_what_is_not_kept():
    base = entry("full", 100)
    one, two, both = entry("delta", 3), entry("delta", 2), entry("delta", 4)
    first = next_operators({}, ["op"], [new(1, base, [])], 7)
    assert [file.epoch for file in first["op"].partitions[0].sidecars] == [7]
    # Two boundaries that are published as one: the second replaces a file of the first.
    news = [new(3, both, [base]), new(2, one, [base])]
    found = listed(*news, base=first, epoch=8)
    assert names(found) == ["full-100", "delta-4"]
    assert [file.epoch for file in found] == [7, 8]
    more = listed(new(2, one, [base]), new(3, two, [base, one]), base=first, epoch=8)
    assert names(more) == ["full-100", "delta-3", "delta-2"]
    pages = [entry("full", 60), entry("full", 50)]
    assert names(
        listed(new(4, pages[0], []), new(5, pages[1], pages[:1]), base=first, epoch=9)
    ) == ["full-60", "full-50"]


def test_a_base_without_rows_leaves_nothing():
    assert listed(new(1, entry("full", 100, rows=0), [])) == []


@pytest.mark.parametrize("on", [[entry("full", 99)], [entry("full", 100), entry("delta", 3)]])
def test_a_sidecar_that_stands_on_another_file_than_there_is_is_refused(on):
    first = next_operators({}, ["op"], [new(1, entry("full", 100), [])], 1)
    with pytest.raises(InvalidCheckpointError, match=r"key group 3.*stands on.*What to do"):
        listed(new(2, entry("delta", 2), on), base=first)


def test_what_is_over_the_limit_is_the_largest_that_is_new():
    def inline(size: int) -> SidecarEntry:
        data = bytes([size]) * size
        digest = sha256(data).hexdigest()
        text = b64encode(data).decode()
        return SidecarEntry(inline=text, kind="delta", size_bytes=size, crc32c=0, sha256=digest)

    base = entry("full", 100)
    on: list[SidecarEntry] = [base]
    news = [new(1, base, [])]
    for sequence, size in enumerate((40, 10, 30, 20), 2):
        news.append(new(sequence, inline(size), on))
        on = [*on, inline(size)]
    operators = next_operators({}, ["op"], news, 1)

    def over(limit: int) -> list[int]:
        return [s.entry.size_bytes for s in inline_over(operators, news, limit)]

    assert over(100) == []
    assert over(99) == over(60) == [40]
    assert over(59) == [40, 30]
    assert over(0) == [40, 30, 20, 10]
    assert inline_over(operators, news[-1:], 0) == news[-1:], "what was listed before stays"


def shared(kind: str, file: str, size: int, own: int, first: int) -> SidecarEntry:
    """A slice of a shared file."""
    update = {
        "first_row": first,
        "file_rows": 100,
        "slice_bytes": own,
        "origin": sha256(f"{file} {first}".encode()).hexdigest()[:8],
        "epoch": 1,
    }
    return entry(kind, size, name=f"shared/{file}").model_copy(update=update)


def moved_with(
    new_bytes: int, *files: tuple[str, int, list[int]], kind: str = "full"
) -> list[list[str]]:
    """Which new files there are, of what: `new`, and the names of the files it is out of.

    Args:
        new_bytes: A new sidecar, of a key group of its own; 0: none.
        files: Name, size, and the bytes of each slice that is in use.
        kind: Of all of them.
    """
    chains: dict[int, tuple[SidecarEntry, ...]] = {}
    news = []
    if new_bytes:
        fresh = entry(kind, new_bytes, name="new").model_copy(update={"epoch": 2})
        news = [NewSidecar("op", 0, 1, fresh, shared=True)]
        chains[0] = (fresh,) if kind == "full" else (entry("full", 9000, name="base"), fresh)
    for name, size, slices in files:
        for first, own in enumerate(slices):
            piece = shared(kind, name, size, own, first)
            under = () if kind == "full" else (entry("full", 9000, name=f"b{len(chains) + 1}"),)
            chains[len(chains) + 1] = (*under, piece)
    operators = {
        "op": OperatorSnapshotEntry(
            partitions=tuple(
                PartitionSnapshotEntry(partition_id=group, sidecars=chain)
                for group, chain in sorted(chains.items())
            )
        )
    }
    return [
        [str(piece.entry.path).removeprefix("state/op/").removeprefix("shared/") for piece in file]
        for file in to_share(operators, news)
    ]


@pytest.mark.parametrize(
    ("new_bytes", "files", "found"),
    [
        (0, [("a", 100, [40, 40])], []),
        (50, [("a", 100, [40, 40])], [["new"]]),  # 150 bytes, of which 130 are in use
        # 260 bytes, 150 in use: what is left of the emptiest moves, and it is enough.
        (50, [("a", 100, [50, 30]), ("b", 110, [10, 10])], [["new", "b", "b"]]),
        (50, [("a", 150, [20, 20]), ("b", 150, [10, 20])], [["new", "b", "b", "a", "a"]]),
        (0, [("a", 100, [80]), ("b", 150, [10]), ("c", 150, [20])], [["b", "c"]]),
        (0, [("a", 100, [10])], []),  # it would be the same again
        (0, [("a", 1000, [900]), ("b", 1000, [10])], []),
        (1, [("a", 100, [10])], [["new", "a"]]),
    ],
)
def test_bases_move_out_of_the_emptiest_files_until_the_rest_is_not_too_much(
    new_bytes, files, found
):
    assert moved_with(new_bytes, *files) == found


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ([("a", 100, [20, 30])], []),
        ([("a", 100, [20, 29])], [["a", "a"]]),
        ([("a", 100, [20, 29]), ("b", 900, [900])], [["a", "a"]]),
    ],
)
def test_deltas_move_out_of_each_file_of_which_less_than_half_is_in_use(files, found):
    assert moved_with(0, *files, kind="delta") == found


def test_bases_and_deltas_share_no_file():
    base, delta = entry("full", 50, name="base"), entry("delta", 9, name="delta")
    news = [NewSidecar("op", 3, 1, base, shared=True)]
    news += [NewSidecar("op", 3, 2, delta, 1, base.sha256, shared=True)]
    news += [NewSidecar("op", 4, 1, entry("full", 60, name="other"), shared=True)]
    operators = next_operators({}, ["op"], news, 1)
    kinds = [[(p.key_group, p.entry.kind) for p in file] for file in to_share(operators, news)]
    assert kinds == [[(3, "full"), (4, "full")], [(3, "delta")]]


def test_an_entry_is_known_by_its_digest_and_a_slice_by_what_is_told_of_its():
    alone = entry("delta", 9, name="alone")
    assert same(alone, alone.sha256)
    assert not same(alone, entry("delta", 9, name="other").sha256)
    piece = shared("delta", "file", 100, 10, 0).model_copy(update={"origin": alone.sha256[:8]})
    assert same(piece, alone.sha256), "as its writer knows it"
    assert same(piece, piece.identity), "as a later run does"
    assert not same(piece, piece.sha256), "which is that of the file, and of other slices too"
    assert not same(alone, piece.identity), "a file is not taken for what was moved out of one"


def test_only_the_entries_that_moved_are_others_after_it():
    """Of several operators, key groups and places in a chain; all that is not said stays."""
    uids = ("a", "b")
    files = chain(100, 9, 8)
    news = [
        NewSidecar(uid, group, 1 + i, file, i, files[i - 1].sha256 if i else "")
        for uid in uids
        for group in (3, 4)
        for i, file in enumerate(files)
    ]
    operators = next_operators({}, uids, news, 1)
    moved = [
        Piece("a", 3, 1, shared("delta", "new", 100, 9, 0)),
        Piece("a", 4, 2, shared("delta", "new", 100, 8, 1)),
    ]
    found = relisted(operators, moved)
    expected = {
        (uid, p.partition_id, i): s
        for uid, operator in operators.items()
        for p in operator.partitions
        for i, s in enumerate(p.sidecars)
    }
    assert len(expected) == 12
    expected |= {(piece.operator, piece.key_group, piece.index): piece.entry for piece in moved}
    assert {
        (uid, p.partition_id, i): s
        for uid, operator in found.items()
        for p in operator.partitions
        for i, s in enumerate(p.sidecars)
    } == expected
    assert found["b"] is operators["b"]
    assert relisted(operators, []) == operators
