"""`beam_ckpt.inspect` over checkpoints that real pipelines wrote."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from beam_ckpt import inspect, open_store
from beam_ckpt.errors import (
    CheckpointNotFoundError,
    InvalidCheckpointError,
    NoValidCheckpointError,
)
from beam_ckpt.keygroups import key_group
from beam_ckpt.manifest import SidecarEntry
from beam_ckpt.store import CheckpointStore
from beam_ckpt.testing.fault_proxy import FaultProxy
from beam_ckpt.testing.gcs import GcsBucket, gcs_bucket, gcs_server

__all__ = ["gcs_bucket", "gcs_server"]

GROUP = {key: key_group(key.encode(), 4) for key in ("ada", "bob", "eve", "joe")}


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root, tmp_path / "ckpt"))


def totals(table: pa.Table) -> dict[str, int]:
    return dict(zip(table["key"].to_pylist(), table["total"].to_pylist(), strict=True))


def files_of(store: Path, key: str) -> Iterator[Path]:
    for folder in (f"{GROUP[key]:05d}", "shared"):
        yield from (store / "state" / "totals" / folder).iterdir()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The operator and key group of every sidecar that is read."""
    found: list[tuple[str, int]] = []
    store = type(open_store("memory://reads"))
    real = store.__mro__[1].read_sidecar

    def noting(self: CheckpointStore, entry: SidecarEntry) -> bytes:
        assert entry.path is not None
        _, operator, group, _ = entry.path.split("/")
        found.append((operator, -1 if group == "shared" else int(group)))
        return real(self, entry)

    monkeypatch.setattr(store.__mro__[1], "read_sidecar", noting)
    return found


# --- state ------------------------------------------------------------------------------------


def test_state_is_what_the_dofn_had(root: Path) -> None:
    assert totals(inspect.state(root, "totals", at=1)) == {"ada": 1, "bob": 2, "eve": 3}
    assert totals(inspect.state(root, "totals")) == {"ada": 11, "eve": 3, "joe": 4}
    (ada,) = inspect.state(root, "totals", key="ada").to_pylist()
    assert (ada["mean"], sorted(ada["recent"]), ada["names"]) == (5.5, [1, 10], ["ADA"])


def test_one_key_reads_its_own_key_group_alone(root: Path, reads: list[tuple[str, int]]) -> None:
    table = inspect.state(root, "totals", key="ada")
    assert totals(table) == {"ada": 11}
    assert set(reads) == {("totals", GROUP["ada"]), ("totals", -1)}, "and what groups share"
    assert table.schema == inspect.state(root, "totals").schema


def test_a_key_without_state_is_an_empty_table_with_the_columns(root: Path) -> None:
    for key in ("bob", "nobody"):
        table = inspect.state(root, "totals", key=key)
        assert len(table) == 0
        assert table.schema == inspect.state(root, "totals").schema


def test_a_key_of_several_parts_is_a_tuple(root: Path, reads: list[tuple[str, int]]) -> None:
    (found,) = inspect.state(root, "pairs", key=("ada", 1)).to_pylist()
    assert (found["key"], found["seen"]) == ({"f0": "ada", "f1": 1}, 1)
    assert len(set(reads)) == 1


def test_a_value_that_can_be_no_key_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="a int is no key of StrUtf8Coder"):
        inspect.state(root, "totals", key=7)


def test_only_the_cells_asked_for_are_there(root: Path) -> None:
    table = inspect.state(root, "totals", cells=["total"])
    assert table.column_names == ["key", "total", "_key", "_window", "_updated"]
    assert totals(table) == {"ada": 11, "eve": 3, "joe": 4}


def test_an_unknown_operator_or_cell_is_named_with_the_nearest(root: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="Did you mean 'totals'"):
        inspect.state(root, "total")
    with pytest.raises(CheckpointNotFoundError, match=r"no cell 'recnt'.*Did you mean 'recent'"):
        inspect.state(root, "totals", cells=["recnt"])


def test_a_key_is_read_from_an_older_checkpoint_when_its_newest_file_is_damaged(
    copied: Path,
) -> None:
    newest = max(files_of(copied, "ada"), key=lambda path: path.name)
    flip(newest)
    store = open_store(copied)
    assert store.load_latest() is not None
    # Found out by reading: sizes are right.
    with pytest.raises(InvalidCheckpointError, match="checksum"):
        inspect.state(copied, "totals", key="ada")
    newest.unlink()
    assert inspect.find_checkpoint(copied).id == 1
    assert totals(inspect.state(copied, "totals", key="ada")) == {"ada": 1}


def test_keys_of_an_unknown_coder_are_looked_for_in_all_files(
    root: Path, monkeypatch: pytest.MonkeyPatch, reads: list[tuple[str, int]]
) -> None:
    monkeypatch.setattr("beam_ckpt.inspect._state.encode_key", lambda coder, key: None)
    assert totals(inspect.state(root, "totals", key="ada")) == {"ada": 11}
    assert {operator for operator, _ in reads} == {"totals"}
    assert len(set(reads)) > 1
    (found,) = inspect.state(root, "pairs", key=("ada", 1)).to_pylist()
    assert found["seen"] == 1
    with pytest.raises(ValueError, match="is no key of type string"):
        inspect.state(root, "totals", key=object())


def test_windows_that_are_intervals_have_their_times(root: Path) -> None:
    table = inspect.state(root, "per window", at=2)
    found = {
        (row["key"], start // 1000, end // 1000, row["seen"])
        for row, start, end in zip(
            table.to_pylist(),
            table["_window_start"].cast(pa.int64()).to_pylist(),
            table["_window_end"].cast(pa.int64()).to_pylist(),
            strict=True,
        )
    }
    assert found == {
        ("odd", -500, 500, 3), ("even", -500, 500, 3), ("odd", 0, 1000, 3), ("even", 0, 1000, 3),
    }  # fmt: skip
    some = inspect.state(root, "per window", at=2, cells=["seen"], key="odd")
    assert some["_window_end"].type == pa.timestamp("ms", tz="UTC")
    assert len(some) == 2
    changed = inspect.diff(root, 1, 2, "per window").to_pylist()
    assert {(row["key"], row["_window_start"].timestamp()) for row in changed} == {
        ("odd", -500), ("even", -500), ("odd", 0), ("even", 0),
    }  # fmt: skip
    assert {row["change"] for row in changed} == {"changed"}


def test_a_window_that_is_no_interval_has_no_times() -> None:
    from beam_ckpt.inspect._readable import _interval

    for window in (b"", b"\x00" * 8, b"\x80" + b"\x00" * 7 + b"\x80", b"\xff" * 30):
        assert _interval(window) == (None, None)


def test_untyped_cells_are_bytes_or_json_and_an_accumulator_shows_what_is_in_it(
    root: Path,
) -> None:
    plain = inspect.state(root, "totals", key="ada")
    assert plain.schema.field("last").type == pa.binary()
    table = inspect.state(root, "totals", key="ada", untyped="json")
    assert table["last"].to_pylist() == ['["ada", 10, null]']
    assert table["average"].to_pylist() == ['{"sum": 11, "count": 2}']
    assert table.column_names == plain.column_names
    gone = inspect.history(root, "totals", "bob", cells=["last"], untyped="json")
    assert gone["last"].to_pylist() == ['["bob", 2, null]', None, None]
    changed = inspect.diff(root, 1, 2, "totals", untyped="json").to_pylist()
    (ada,) = [row for row in changed if row["key"] == "ada"]
    assert ada["average"] == {
        "before": '{"sum": 1, "count": 1}',
        "after": '{"sum": 11, "count": 2}',
    }
    query = (
        "SELECT sum((average::JSON->>'sum')::INT), sum((average::JSON->>'count')::INT) FROM totals"
    )
    assert inspect.duckdb(root, untyped="json").sql(query).fetchall() == [(18, 4)]


# --- timers -----------------------------------------------------------------------------------


def test_timers_are_pending_ones_the_earliest_first(root: Path) -> None:
    table = inspect.timers(root, "totals")
    assert table.schema == pa.schema([pa.field("key", pa.string()), *inspect.TIMERS])
    assert table["key"].to_pylist() == ["eve", "ada", "joe"]
    fire = table["fire"].cast(pa.int64()).to_pylist()
    assert fire == [1_030_000_000, 1_110_000_000, 1_130_000_000]
    assert set(table["family"].to_pylist()) == {"flush"}
    assert inspect.timers(root, "totals", at=1)["key"].to_pylist() == ["ada", "bob", "eve"]


def test_timers_of_one_key_and_of_none(root: Path) -> None:
    assert inspect.timers(root, "totals", key="joe")["key"].to_pylist() == ["joe"]
    assert len(inspect.timers(root, "totals", key="bob")) == 0
    none = inspect.timers(root, "pairs")
    assert len(none) == 0
    assert none.schema.names == ["key", *inspect.TIMERS.names]


# --- history ----------------------------------------------------------------------------------


def test_history_is_a_row_per_checkpoint_with_the_time_of_its_cut(root: Path) -> None:
    table = inspect.history(root, "totals", "ada", cells=["total"])
    assert pa.schema(list(table.schema)[: len(inspect.HISTORY)]) == inspect.HISTORY
    assert table["total"].to_pylist() == [1, 11, 11]
    assert table["boundary"].cast(pa.int64()).to_pylist() == [
        c * 1_000_000 for c in (100, 200, 300)
    ]


def test_history_shows_when_a_key_came_and_went(root: Path) -> None:
    bob = inspect.history(root, "totals", "bob")
    assert bob["present"].to_pylist() == [True, False, False]
    assert bob["total"].to_pylist() == [2, None, None]
    assert inspect.history(root, "totals", "joe")["present"].to_pylist() == [False, True, True]


def test_history_names_a_checkpoint_that_cannot_be_read_and_goes_on(copied: Path) -> None:
    flip(copied / "manifests" / "000000000002.json")
    table = inspect.history(copied, "totals", "ada", cells=["total"])
    assert table["present"].to_pylist() == [True, None, True]
    assert table["total"].to_pylist() == [1, None, 11]
    assert (
        "is invalid" in table["problem"][1].as_py() or "000000000002" in table["problem"][1].as_py()
    )


def test_history_of_what_was_never_there_is_an_error(root: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no operator 'nobody'"):
        inspect.history(root, "nobody", "ada")
    with pytest.raises(CheckpointNotFoundError, match="no cell 'nothing'"):
        inspect.history(root, "totals", "ada", cells=["nothing"])


# --- diff -------------------------------------------------------------------------------------


def test_diff_is_what_changed_and_nothing_that_was_only_touched(root: Path) -> None:
    table = inspect.diff(root, 1, 2, "totals")
    found = {row["key"]: row for row in table.to_pylist()}
    assert {key: row["change"] for key, row in found.items()} == {
        "ada": "changed",
        "bob": "removed",
        "joe": "added",
    }
    assert found["ada"]["total"] == {"before": 1, "after": 11}
    assert found["bob"]["total"] == {"before": 2, "after": None}
    assert found["joe"]["names"] == {"before": None, "after": ["JOE"]}
    # eve has a NaN, and was touched in the third run.
    assert len(inspect.diff(root, 2, 3, "totals")) == 0
    assert math.isnan(inspect.state(root, "totals", key="eve")["mean"][0].as_py())


def test_diff_backwards_is_the_opposite(root: Path) -> None:
    there = inspect.diff(root, 1, 2, "totals").to_pylist()
    back = inspect.diff(root, 2, 1, "totals").to_pylist()
    opposite = {"added": "removed", "removed": "added", "changed": "changed"}
    assert sorted((r["key"], r["change"]) for r in back) == sorted(
        (r["key"], opposite[r["change"]]) for r in there
    )


def test_diff_reads_only_the_key_groups_that_differ(
    root: Path, reads: list[tuple[str, int]]
) -> None:
    inspect.diff(root, 2, 3, "totals")
    assert set(reads) == {("totals", GROUP["eve"])}
    reads.clear()
    assert len(inspect.diff(root, 3, "latest", "totals")) == 0
    assert reads == []


def test_diff_of_keys_of_several_parts(root: Path) -> None:
    found = inspect.diff(root, 1, 3, "pairs").to_pylist()
    assert {"f0": "joe", "f1": 0} in [row["key"] for row in found]


# --- files and lineage ------------------------------------------------------------------------


def test_files_are_those_of_the_manifests_each_once(root: Path) -> None:
    table = inspect.files(root)
    assert table.schema == inspect.FILES
    there = {str(path.relative_to(root)) for path in (root / "state").glob("*/*/*.parquet")}
    assert sorted(table["path"].to_pylist()) == sorted(there)
    sizes = {str(p.relative_to(root)): p.stat().st_size for p in root.glob("state/*/*/*.parquet")}
    rows = table.to_pylist()
    assert {row["path"]: row["bytes"] for row in rows} == sizes
    store = open_store(root)
    listed = {id: store.load_by_id(id).sidecar_paths() for id in (1, 2, 3)}
    for row in rows:
        assert row["checkpoints"] == [id for id in listed if row["path"] in listed[id]]
    assert any(row["checkpoints"] == [1, 2, 3] for row in rows)
    assert all(3 in row["checkpoints"] for row in rows), "all are still needed by the last"


def test_lineage_says_who_came_from_whom_and_what_was_added(root: Path) -> None:
    table = inspect.lineage(root)
    assert table.schema == inspect.LINEAGE
    assert table["parent"].to_pylist() == [None, 1, 2]
    assert table["restored"].to_pylist() == [None, True, True]
    first, *_ = table.to_pylist()
    assert first["shared_bytes"] == 0
    assert first["new_files"] == sum(1 for r in inspect.files(root).to_pylist() if r["epoch"] == 1)
    assert table["longest_chain"].to_pylist() == [
        max(
            len(partition.sidecars)
            for operator in open_store(root).load_by_id(id).operators.values()
            for partition in operator.partitions
        )
        for id in (1, 2, 3)
    ]


def by_operator(reads: list[tuple[str, int]]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for operator, group in reads:
        found.setdefault(operator, set()).add(group)
    return found


# --- SQL --------------------------------------------------------------------------------------


def test_each_operator_is_a_view_that_is_read_when_it_is_asked(
    root: Path, reads: list[tuple[str, int]]
) -> None:
    connection = inspect.duckdb(root)
    assert all(len(groups) == 1 for groups in by_operator(reads).values()), "for the columns"
    reads.clear()
    assert connection.sql("SELECT sum(total) FROM totals").fetchall() == [(18,)]
    assert {operator for operator, _ in reads} == {"totals"}
    joined = "SELECT p.key.f0, t.total FROM pairs p JOIN totals t ON p.key.f0 = t.key ORDER BY ALL"
    assert connection.sql(joined).fetchall() == [
        ("ada", 11), ("ada", 11), ("eve", 3), ("eve", 3), ("joe", 4),
    ]  # fmt: skip


def test_an_older_checkpoint_in_sql(root: Path) -> None:
    rows = inspect.duckdb(root, at=1).sql("SELECT key, total FROM totals ORDER BY key").fetchall()
    assert rows == [("ada", 1), ("bob", 2), ("eve", 3)]


def test_sql_and_arrow_and_pandas_read_the_same(root: Path) -> None:
    by_sql = inspect.duckdb(root).sql("SELECT * FROM totals ORDER BY key").to_arrow_table()
    direct = inspect.state(root, "totals").sort_by("key")
    assert by_sql.column_names == direct.column_names
    for name in ("key", "total", "recent", "names", "_key", "_window"):
        assert by_sql[name].to_pylist() == direct[name].to_pylist()
    assert str(by_sql.to_pandas().drop(columns="_updated")) == str(
        direct.to_pandas().drop(columns="_updated")
    )


def test_a_damaged_file_in_sql_is_an_error_that_names_it(copied: Path) -> None:
    for path in files_of(copied, "ada"):
        flip(path)
    with pytest.raises(duckdb.Error, match="state/totals/"):
        inspect.duckdb(copied).sql("SELECT sum(total) FROM totals").fetchall()


def test_a_store_without_a_usable_checkpoint_is_no_empty_database(copied: Path) -> None:
    for path in copied.glob("manifests/*.json"):
        flip(path)
    with pytest.raises(NoValidCheckpointError):
        inspect.duckdb(copied)


def test_a_store_on_cloud_storage_is_read_in_sql_and_a_key_in_few_requests(
    root: Path, gcs_server: object, gcs_bucket: GcsBucket
) -> None:
    from beam_ckpt.store import copy

    copy(open_store(root), open_store(f"{gcs_bucket.url}/ckpt", **gcs_bucket.options))
    with FaultProxy(gcs_bucket.server.url) as proxy:
        options = {**gcs_bucket.options, "endpoint_url": proxy.url}
        store = open_store(f"{gcs_bucket.url}/ckpt", create=False, **options)
        rows = inspect.duckdb(store).sql("SELECT key, total FROM totals ORDER BY key").fetchall()
        assert rows == [("ada", 11), ("eve", 3), ("joe", 4)]
        proxy.reset()
        store = open_store(f"{gcs_bucket.url}/ckpt", create=False, **options)
        assert totals(inspect.state(store, "totals", key="joe")) == {"joe": 4}
        (chain,) = [
            len(partition.sidecars)
            for partition in open_store(root).load_latest().operators["totals"].partitions
            if partition.partition_id == GROUP["joe"]
        ]
        # Two to open the store, three for the newest checkpoint, and the files of the key group.
        assert len(proxy.requests) == 5 + chain, [(r.method, r.path) for r in proxy.requests]
