"""State that an earlier version saved is restored, whatever this version writes.

`golden_state/v<n>` is a store with sidecars of format n, written by `write_golden` of the time;
`v<n>-<what>` is another one, of what came later than the first of the same format. None is changed
once its version is released; a new version adds one.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import apache_beam as beam
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.coders import FloatCoder, StrUtf8Coder, VarIntCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    SetStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Timestamp

from beam_ckpt import open_store
from beam_ckpt.sidecar import decode_sidecar
from beam_ckpt.sidecar._schema import FORMAT_VERSION
from beam_ckpt.testing.cuts import run_checkpointed, saved_state
from beam_ckpt.testing.event_loop import canonical, run_event_loop
from beam_ckpt.transforms import writer
from beam_ckpt.transforms.keyed_state.operator import KeyedOperator

GOLDEN = Path(__file__).parent / "golden_state"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir())
SECOND = 1_000_000
CUTS = (100, 200)
DATA = (
    (10 * SECOND, "ann", 1),
    (20 * SECOND, "bob", 7),
    (60 * SECOND, "", 3),
    (99 * SECOND, "ann", 5),
    (100 * SECOND, "ann", 2),
    (150 * SECOND, "ünal", -4),
    (155 * SECOND, "bob", 7),
    (250 * SECOND, "ann", 9),
    (300 * SECOND, "bob", 0),
)


@beam.typehints.with_input_types(tuple[str, int])
@beam.typehints.with_output_types(tuple[str, str, float])
class GoldenFn(beam.DoFn):
    """One cell of each kind that format 1 knows, a timer, and an output ahead of its time."""

    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())
    HALVES = BagStateSpec("halves", FloatCoder())
    WORDS = SetStateSpec("words", StrUtf8Coder())
    IDLE = TimerSpec("idle", TimeDomain.WATERMARK)

    def process(
        self,
        element,
        ts=beam.DoFn.TimestampParam,
        count=beam.DoFn.StateParam(COUNT),
        halves=beam.DoFn.StateParam(HALVES),
        words=beam.DoFn.StateParam(WORDS),
        idle=beam.DoFn.TimerParam(IDLE),
    ):
        key, value = element
        count.write((count.read() or 0) + 1)
        halves.add(value / 2)
        words.add(f"{key}{value % 3}")
        idle.set(ts + 120)
        yield TimestampedValue((key, "later", float(value)), ts + 30)

    @on_timer(IDLE)
    def on_idle(
        self,
        key=beam.DoFn.KeyParam,
        count=beam.DoFn.StateParam(COUNT),
        halves=beam.DoFn.StateParam(HALVES),
        words=beam.DoFn.StateParam(WORDS),
    ):
        yield key, f"{count.read()} {sorted(words.read())}", sum(halves.read())
        halves.clear()
        if key == "bob":
            count.clear()
            words.clear()


def run(store, until):
    return run_checkpointed(
        GoldenFn(),
        DATA,
        runner="FnApiRunner",
        store=store,
        key_groups=2,
        until=until,
        time_sorted=True,
    )


def write_golden(root: Path) -> None:
    """Writes what `golden_state/` keeps."""
    # Files this small would be one, and a base has no rows that say only what changed; bags this
    # small would be written whole.
    begin = KeyedOperator.__init__

    def with_large_bags(self, fn, signature, config):
        begin(self, fn, signature, replace(config, bag_bytes=0))

    with (
        mock.patch.object(writer, "files_to_keep", lambda chain, *_: len(chain)),
        mock.patch.object(KeyedOperator, "__init__", with_large_bags),
    ):
        for cut in CUTS:
            run(open_store(root), Timestamp(cut))


@pytest.fixture(params=VERSIONS)
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / request.param))


def test_there_is_golden_state_of_the_version_that_is_written() -> None:
    assert f"v{FORMAT_VERSION}" in VERSIONS


def test_golden_state_is_that_of_its_cut(tree: Path) -> None:
    store = open_store(tree)
    for id, cut in zip(store.list_ids(), CUTS, strict=True):
        assert store.validate_checkpoint(id).valid
        loop = run_event_loop(GoldenFn(), DATA, until=cut * SECOND)
        assert saved_state(store, GoldenFn(), checkpoint_id=id) == dict(loop.state)
    carried = run_event_loop(GoldenFn(), DATA, until=CUTS[0] * SECOND).state.values()
    assert any(key.carried and key.timers and key.cells for key in carried), "all of it is there"


def test_a_run_goes_on_from_golden_state(tree: Path) -> None:
    done = run(open_store(tree), None)
    before = run_event_loop(GoldenFn(), DATA, until=CUTS[-1] * SECOND)
    whole = run_event_loop(GoldenFn(), DATA)
    assert canonical(before.outputs + done.outputs) == canonical(whole.outputs)
    assert saved_state(open_store(tree), GoldenFn()) == dict(whole.state)


def test_golden_sidecars_have_the_columns_that_queries_rely_on(tree: Path) -> None:
    kinds, patches, left_out, shared = set(), set(), set(), set()
    for path in sorted(tree.glob("state/subject/*/*.parquet")):
        header, table = decode_sidecar(path.read_bytes(), where=str(path))
        kinds.add(header.kind)
        schema = pq.read_schema(path)
        types = {name: schema.field(name).type for name in schema.names}
        assert types["key"] == pa.string()
        assert types["count"] == pa.int64()
        assert types["halves"].value_type == pa.float64()
        assert types["words"].value_type == pa.string()
        there = [name for name in table.column_names if name in schema.names]
        assert there == schema.names
        left_out.update({*table.column_names} - {*there})
        assert header.operator == "subject"
        if header.key_group is None:
            shared.add(header.kind)
        assert header.format_version == int(tree.name[1:].partition("-")[0])
        if "_patch" in schema.names:
            patches.update(table["_patch"].drop_null().to_pylist())
        assert [cell.coder for cell in header.cells] == [
            "VarIntCoder",
            "FloatCoder",
            "StrUtf8Coder",
        ]
    assert kinds == {"full", "delta"}
    assert left_out == ({"_carried"} if header.format_version > 2 else set())
    assert (
        shared
        == {
            "v1": set(),
            "v2": set(),
            "v3": {"delta"},
            "v3-shared-bases": {"full", "delta"},
        }[tree.name]
    )
    # Cells that were replaced, kept and added to.
    told = {(0, 2, 0), (1, 0, 1)} if header.format_version > 1 else set()
    assert {tuple(patch) for patch in patches} >= told
