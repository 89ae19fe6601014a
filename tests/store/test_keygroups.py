"""Key bytes to key groups: a mapping that must never change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_ckpt.keygroups import check_key_group_count, key_group

GROUPS_OF_128 = [66, 31, 64, 113, 94]
GROUPS_OF_7 = [4, 1, 3, 5, 4]


@pytest.mark.parametrize("count", [0, 65536, -1, True, 1.0, "8", None])
def test_a_count_outside_1_to_65535_is_refused(count: object) -> None:
    with pytest.raises(ValueError, match=r"is outside 1\.\.65535"):
        check_key_group_count(count)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 128, 65535])
def test_a_count_inside_is_taken(count: int) -> None:
    assert check_key_group_count(count) == count


@given(st.binary(), st.integers(1, 65535))
def test_a_key_always_has_the_same_group_and_it_is_in_range(key: bytes, count: int) -> None:
    assert 0 <= key_group(key, count) < count
    assert key_group(key, count) == key_group(bytes(key), count)


def test_the_groups_of_known_keys_are_those_of_the_format() -> None:
    keys = [b"", b"a", b"N12345", bytes(range(256)), "schlüssel".encode()]
    assert [key_group(k, 128) for k in keys] == GROUPS_OF_128
    assert [key_group(k, 7) for k in keys] == GROUPS_OF_7
    assert {key_group(k, 1) for k in keys} == {0}


def test_keys_spread_over_the_groups() -> None:
    counts = [0] * 16
    for n in range(16_000):
        counts[key_group(b"key %d" % n, 16)] += 1
    assert min(counts) > 850
    assert max(counts) < 1150
