"""Who won? The table of the decision."""

from __future__ import annotations

import pytest

from beam_ckpt.blobs._retry import Budget, redact_url, take_number
from beam_ckpt.blobs._settle import Holder, marks, settle
from beam_ckpt.errors import StoreUrlError

OURS = marks("ours", "7")
SUCCESSOR = marks("rival", "7")  # replaced the very version that we expected
LATER = marks("rival", "8")  # replaced another one: perhaps ours
FOREIGN: dict[str, str] = {}  # written by another tool

# what is there, the version expected, in doubt -> verdict
TABLE = [
    (None, "", False, "not_yet"),
    (None, "", True, "not_yet"),
    (None, "7", False, "lost"),
    (None, "7", True, "unknown"),
    (Holder("9", OURS), "7", False, "ours"),
    (Holder("9", OURS), "7", True, "ours"),
    (Holder("7", LATER), "7", False, "not_yet"),
    (Holder("7", LATER), "7", True, "not_yet"),
    (Holder("9", SUCCESSOR), "7", False, "lost"),
    (Holder("9", SUCCESSOR), "7", True, "lost"),
    (Holder("9", LATER), "7", False, "lost"),
    (Holder("9", LATER), "7", True, "unknown"),
    (Holder("9", FOREIGN), "7", False, "lost"),
    (Holder("9", FOREIGN), "7", True, "unknown"),
    (Holder("9", marks("rival", "")), "", False, "lost"),
    (Holder("9", marks("rival", "")), "", True, "lost"),
    (Holder("9", marks("rival", "8")), "", True, "unknown"),
    (Holder("9", marks("ours", "")), "", True, "ours"),
]


@pytest.mark.parametrize(("holder", "expected", "in_doubt", "verdict"), TABLE)
def test_the_outcome_of_a_write_is_decided_from_its_marks(
    holder: Holder | None, expected: str, in_doubt: bool, verdict: str
) -> None:
    assert settle(holder, token="ours", expected=expected, in_doubt=in_doubt) == verdict


def test_an_unconditional_write_leaves_no_trace_of_what_it_replaced() -> None:
    assert marks("t", None) != marks("t", "") != marks("t", "7")


def test_a_budget_ends_and_its_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("time.sleep", sleep)
    budget = Budget(10.0)
    while budget.pause():
        pass
    assert 4 <= len(slept) <= 8
    assert sum(slept) <= 10.0
    assert slept[-1] > 3 * slept[0]
    budget.progress()
    assert budget.left == 10.0
    assert budget.pause(at_least=3.0)
    assert 3.0 <= slept[-1] <= 3.75
    assert not budget.pause(at_least=30.0)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        ("s3://key:secret@bucket/prefix", "s3://bucket/prefix"),
        ("https://host/a/b?X-Amz-Signature=abc&sig=x#y", "https://host/a/b"),
        ("ftp://user:p@ss@host/a@b", "ftp://host/a@b"),
        ("zip://inner/*.parquet::s3://k:s@bucket/a.zip?sig=1",
         "zip://inner/*.parquet::s3://bucket/a.zip"),
    ],
)  # fmt: skip
def test_urls_are_shown_without_credentials(url: str, shown: str) -> None:
    assert redact_url(url) == shown


@pytest.mark.parametrize("value", ["x", -1, None, "nan", float("inf"), [1]])
def test_an_option_that_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(StoreUrlError, match="retry_seconds"):
        take_number({"retry_seconds": value}, "retry_seconds", 1.0)
    assert take_number({"retry_seconds": "2.5"}, "retry_seconds", 1.0) == 2.5
