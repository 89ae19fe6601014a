"""What a DoFn had in a cell of each kind is what four readers say of the checkpoint."""

from __future__ import annotations

import struct
import uuid
from typing import Any

import apache_beam as beam
import pandas as pd
import polars as pl
import pyarrow as pa
from apache_beam.coders import FloatCoder, StrUtf8Coder, TupleCoder, VarIntCoder
from apache_beam.transforms.combiners import MeanCombineFn
from apache_beam.transforms.userstate import (
    BagStateSpec,
    CombiningValueStateSpec,
    OrderedListStateSpec,
    ReadModifyWriteStateSpec,
    SetStateSpec,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from beam_ckpt import inspect, open_store
from beam_ckpt.testing.cuts import run_checkpointed

S = 1_000_000


class KindsFn(beam.DoFn):
    """A cell of each kind that Beam has and that can be saved."""

    LAST = ReadModifyWriteStateSpec("last", FloatCoder())
    BAG = BagStateSpec("bag", FloatCoder())
    SET = SetStateSpec("set", StrUtf8Coder())
    PAST = OrderedListStateSpec("past", FloatCoder())
    MEAN = CombiningValueStateSpec("mean", TupleCoder((FloatCoder(), VarIntCoder())),
                                   MeanCombineFn())  # fmt: skip

    def process(
        self,
        element,
        at=beam.DoFn.TimestampParam,
        last=beam.DoFn.StateParam(LAST),
        bag=beam.DoFn.StateParam(BAG),
        some=beam.DoFn.StateParam(SET),
        past=beam.DoFn.StateParam(PAST),
        mean=beam.DoFn.StateParam(MEAN),
    ):
        _, value = element
        last.write(value)
        bag.add(value)
        some.add(repr(value))
        past.add((at, value))
        mean.add(value)


def tables(store: Any) -> dict[str, pa.Table]:
    arrow = inspect.state(store, "subject")
    frame = arrow.to_pandas(types_mapper=pd.ArrowDtype)
    return {
        "pyarrow": arrow,
        "pandas": pa.Table.from_pandas(frame, preserve_index=False),
        "polars": pl.from_arrow(arrow).to_arrow(),
        "duckdb": inspect.duckdb(store).sql("SELECT * FROM subject").to_arrow_table(),
    }


def bits(value: float) -> bytes:
    return struct.pack(">d", value)


_floats = st.binary(min_size=8, max_size=8).map(lambda b: struct.unpack(">d", b)[0])


# (To shrink an example takes minutes: each try is a pipeline.)
@settings(max_examples=5, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(st.tuples(st.sampled_from("abc"), _floats), min_size=1, max_size=20))
def test_a_cell_of_each_kind_is_what_the_dofn_had_in_four_readers(held: list[Any]) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    elements = [(i * S, key, value) for i, (key, value) in enumerate(held)]
    run_checkpointed(
        KindsFn(), elements, runner="FnApiRunner", store=store, until=1_000, key_groups=2,
        input_type=tuple[str, float], time_sorted=True,
    )  # fmt: skip
    had: dict[str, list[tuple[int, float]]] = {}
    for at, key, value in elements:
        had.setdefault(key, []).append((at, value))
    for reader, table in tables(store).items():
        found = {row["key"]: row for row in table.to_pylist()}
        assert set(found) == set(had), reader
        for key, items in had.items():
            row, values = found[key], [value for _, value in items]
            assert bits(row["last"]) == bits(values[-1]), reader
            assert sorted(map(bits, row["bag"])) == sorted(map(bits, values)), reader
            assert sorted(row["set"]) == sorted({repr(value) for value in values}), reader
            past = [tuple(item.values()) for item in row["past"]]
            assert [(at, bits(value)) for at, value in past] == [
                (at, bits(value)) for at, value in items
            ], reader
            total = 0.0
            for value in values:
                total += value
            assert row["mean"]["count"] == len(values), reader
            # (The bits of a NaN that was added to are the processor's choice.)
            same = bits(row["mean"]["sum"]) == bits(total)
            assert same or (total != total and row["mean"]["sum"] != row["mean"]["sum"]), reader
