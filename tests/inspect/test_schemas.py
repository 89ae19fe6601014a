"""Cells that need a schema, a combiner's name, or a word about pickles, to be read."""

from __future__ import annotations

import io
import json
import re
import uuid
from typing import Any

import fastavro
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from apache_beam.coders import (
    AvroGenericCoder,
    FastPrimitivesCoder,
    PickleCoder,
    ProtoCoder,
    StrUtf8Coder,
    TupleCoder,
    VarIntCoder,
)
from apache_beam.coders.coders import CloudpickleCoder
from apache_beam.transforms.combiners import MeanCombineFn
from apache_beam.transforms.userstate import CombiningValueStateSpec
from apache_beam.transforms.window import GlobalWindow, GlobalWindows
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from hypothesis import given
from hypothesis import strategies as st

from beam_ckpt import cli, errors, inspect, open_store
from beam_ckpt.keygroups import key_group
from beam_ckpt.manifest import (
    CheckpointManifest,
    OperatorSnapshotEntry,
    PartitionSnapshotEntry,
    PipelineIdentity,
    new_checkpoint_id,
)
from beam_ckpt.sidecar import encode_sidecar
from beam_ckpt.transforms.columns import CellState, OperatorState
from beam_ckpt.transforms.signature import AuthorCell
from beam_ckpt.transforms.snapshot import SnapshotRecord

FILES = text_format.Parse(
    """
    file {
      name: "shop.proto" package: "shop" syntax: "proto3"
      message_type {
        name: "Order"
        field { name: "id" number: 1 type: TYPE_UINT64 label: LABEL_OPTIONAL }
        field { name: "note" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL
                proto3_optional: true oneof_index: 0 }
        field { name: "lines" number: 3 type: TYPE_MESSAGE type_name: ".shop.Order.Line"
                label: LABEL_REPEATED }
        field { name: "colour" number: 4 type: TYPE_ENUM type_name: ".shop.Colour"
                label: LABEL_OPTIONAL }
        field { name: "stock" number: 5 type: TYPE_MESSAGE type_name: ".shop.Order.StockEntry"
                label: LABEL_REPEATED }
        field { name: "parent" number: 6 type: TYPE_MESSAGE type_name: ".shop.Order"
                label: LABEL_OPTIONAL }
        field { name: "raw" number: 7 type: TYPE_BYTES label: LABEL_OPTIONAL }
        field { name: "ratio" number: 8 type: TYPE_DOUBLE label: LABEL_OPTIONAL }
        oneof_decl { name: "_note" }
        nested_type {
          name: "Line"
          field { name: "name" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
          field { name: "count" number: 2 type: TYPE_SINT32 label: LABEL_OPTIONAL }
        }
        nested_type {
          name: "StockEntry"
          field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
          field { name: "value" number: 2 type: TYPE_INT64 label: LABEL_OPTIONAL }
          options { map_entry: true }
        }
      }
      enum_type { name: "Colour" value { name: "NONE" number: 0 } value { name: "RED" number: 1 } }
    }
    """,
    descriptor_pb2.FileDescriptorSet(),
)
POOL = descriptor_pool.DescriptorPool()
POOL.Add(FILES.file[0])
Order = message_factory.GetMessageClass(POOL.FindMessageTypeByName("shop.Order"))

AVRO = {
    "type": "record",
    "name": "Reading",
    "fields": [
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "value", "type": ["null", "double"]},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "counts", "type": {"type": "map", "values": "int"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "sum", "type": {"type": "fixed", "name": "Sum", "size": 2}},
    ],
}
WINDOWS = GlobalWindows().get_window_coder()


def save(cells: list[CellState], rows: dict[str, tuple[Any, ...]]) -> Any:
    """A store with a checkpoint of these rows: encoded values by key."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    write(store, cells, rows)
    return store


def write(store: Any, cells: list[CellState], rows: dict[str, tuple[Any, ...]]) -> None:
    operator = OperatorState("op", StrUtf8Coder(), WINDOWS, tuple(cells), False)
    partitions = []
    groups: dict[int, list[str]] = {}
    for key in rows:
        groups.setdefault(key_group(key.encode(), 2), []).append(key)
    for group, keys in sorted(groups.items()):
        table = operator.to_table(
            SnapshotRecord(k.encode(), WINDOWS.encode(GlobalWindow()), False, 0, rows[k], (), ())
            for k in keys
        )
        header = operator.header(key_group=group, boundary=1, kind="full")
        entry = store.write_sidecar(
            operator="op", key_group=group, boundary=1, run_id="r", kind="full", rows=len(table),
            data=encode_sidecar(table, header),
        )  # fmt: skip
        entry = entry.model_copy(update={"epoch": 1})
        partitions.append(PartitionSnapshotEntry(partition_id=group, sidecars=(entry,)))
    store.save(CheckpointManifest(
        checkpoint_id=new_checkpoint_id(), id=1, epoch=1, timestamp_ms=1, watermark=1,
        operators={"op": OperatorSnapshotEntry(partitions=tuple(partitions))}, key_group_count=2,
        durable_phase="finalized",
        pipeline=PipelineIdentity(
            operators={"op": operator.spec()}, beam_version="2", python_version="3"
        ),
    ))  # fmt: skip


def cell(coder: Any, kind: str = "read_modify_write", **more: Any) -> CellState:
    return CellState("c", kind, coder, **more)


def values(store: Any, **ways: Any) -> list[Any]:
    found: list[Any] = inspect.state(store, "op", **ways).sort_by("key")["c"].to_pylist()
    return found


def readings(store: Any, **ways: Any) -> dict[str, Any]:
    """What pandas, polars and DuckDB have for the only value there is."""
    table = inspect.state(store, "op", **ways)
    frame = table.to_pandas(types_mapper=pd.ArrowDtype)
    tables = {
        "pandas": pa.Table.from_pandas(frame, preserve_index=False),
        "polars": pl.from_arrow(table).to_arrow(),
        "duckdb": inspect.duckdb(store, **ways).sql("SELECT * FROM op").to_arrow_table(),
    }
    return {name: table["c"].to_pylist()[0] for name, table in tables.items()}


# -- protobuf --------------------------------------------------------------------------------
def an_order() -> Any:
    order = Order(id=2**64 - 1, colour=1, raw=b"\x00", ratio=-0.0)
    order.lines.add(name="nut", count=-3)
    order.stock["b"] = 2
    order.stock["a"] = -(2**63)
    order.parent.id = 7
    return order


def test_messages_are_structs_where_their_class_is_given_and_bytes_elsewhere():
    encoded = ProtoCoder(Order).encode(an_order())
    store = save([cell(ProtoCoder(Order))], {"a": (encoded,), "b": (b"",), "c": (None,)})
    assert values(store) == [encoded, b"", None]
    full, empty, nothing = values(store, schemas=[Order])
    parent = Order(id=7).SerializeToString()
    assert full == {
        "id": 2**64 - 1, "note": None, "lines": [{"name": "nut", "count": -3}], "colour": "RED",
        "stock": [("a", -(2**63)), ("b", 2)], "parent": parent, "raw": b"\x00", "ratio": -0.0,
    }  # fmt: skip
    assert str(full["ratio"]) == "-0.0"
    assert (empty["id"], empty["note"], empty["lines"], empty["parent"]) == (0, None, [], None)
    assert nothing is None


def test_a_message_that_has_got_a_field_since_is_still_read():
    """What the sidecar holds are the author's bytes, so that no migration is needed."""
    store = save([cell(ProtoCoder(Order), "bag")], {"a": ((Order(id=1).SerializeToString(),),)})
    more = descriptor_pb2.FileDescriptorProto.FromString(FILES.file[0].SerializeToString())
    added = more.message_type[0].field.add(name="added", number=99, type=3, label=1)
    assert added.number == 99
    pool = descriptor_pool.DescriptorPool()
    pool.Add(more)
    Newer = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))
    ((order,),) = values(store, schemas=[Newer])
    assert (order["id"], order["added"]) == (1, 0)


def test_bytes_that_are_no_message_say_which_cell():
    store = save([cell(ProtoCoder(Order))], {"a": (b"\xff\xff",)})
    with pytest.raises(errors.InvalidCheckpointError, match=r"cell 'c' .* no shop\.Order"):
        values(store, schemas=[Order])


@given(
    st.builds(
        dict, id=st.integers(0, 2**64 - 1), note=st.none() | st.text(), raw=st.binary(),
        ratio=st.floats(allow_nan=False), colour=st.sampled_from([0, 1, 7]),
    )
)  # fmt: skip
def test_any_message_shows_as_it_is(fields):
    order = Order(**{name: value for name, value in fields.items() if value is not None})
    store = save([cell(ProtoCoder(Order))], {"a": (order.SerializeToString(),)})
    (found,) = values(store, schemas=[Order])
    colour = {0: "NONE", 1: "RED", 7: "7"}[fields["colour"]]
    assert {name: found[name] for name in fields} == fields | {"colour": colour}
    for reader, said in readings(store, schemas=[Order]).items():
        assert {name: said[name] for name in fields} == fields | {"colour": colour}, reader


# -- Avro ------------------------------------------------------------------------------------
def a_reading(**changes: Any) -> dict[str, Any]:
    plain = {"at": 1, "value": None, "tags": ["x"], "counts": {"a": 1}, "kind": "B", "sum": b"ab"}
    return plain | changes


def avro(reading: dict[str, Any]) -> bytes:
    raw = {**AVRO, "fields": [{"name": "at", "type": "long"}, *AVRO["fields"][1:]]}
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(raw), reading)
    return out.getvalue()


@pytest.mark.parametrize("schema", [AVRO, json.dumps(AVRO)])
def test_avro_records_are_structs_where_their_schema_is_given(schema):
    coder = AvroGenericCoder(json.dumps(AVRO))
    at = 2**62 + 1  # no time that Python has: the number itself is shown
    rows = {"a": (avro(a_reading()),), "b": (avro(a_reading(at=at, value=0.5)),)}
    store = save([cell(coder)], rows)
    assert values(store) == [rows["a"][0], rows["b"][0]]
    one, other = values(store, schemas=[schema])
    assert one == a_reading(counts=[("a", 1)])
    assert (other["at"], other["value"]) == (at, 0.5)
    assert values(store, schemas=[{"type": "record", "name": "Other", "fields": []}]) == [
        rows["a"][0], rows["b"][0],
    ]  # fmt: skip


@given(
    st.builds(
        a_reading, at=st.integers(-(2**63), 2**63 - 1),
        value=st.none() | st.floats(allow_nan=False), tags=st.lists(st.text(), max_size=3),
        counts=st.dictionaries(st.text(), st.integers(-(2**31), 2**31 - 1), max_size=3),
        kind=st.sampled_from("AB"), sum=st.binary(min_size=2, max_size=2),
    )
)  # fmt: skip
def test_any_avro_record_shows_as_it_is(reading):
    store = save([cell(AvroGenericCoder(json.dumps(AVRO)))], {"a": (avro(reading),)})
    (found,) = values(store, schemas=[AVRO])
    expected = reading | {"counts": list(reading["counts"].items())}
    assert found == expected
    for reader, said in readings(store, schemas=[AVRO]).items():
        pairs = [tuple(p.values()) if isinstance(p, dict) else p for p in said["counts"]]
        assert said | {"counts": pairs} == expected, reader


@pytest.mark.parametrize(
    "schema",
    [7, "{", {"type": "record", "name": "X", "fields": [{"name": "a", "type": ["int", "string"]}]},
     {"type": "record", "name": "X", "fields": [{"name": "next", "type": ["null", "X"]}]}],
)  # fmt: skip
def test_what_is_no_schema_or_has_no_type_is_refused(schema):
    store = save([cell(VarIntCoder())], {"a": (b"\x01",)})
    with pytest.raises(ValueError, match=r"schema|Avro"):
        values(store, schemas=[schema])


# -- combiners -------------------------------------------------------------------------------
def author(fn: Any, coder: Any = None) -> AuthorCell:
    spec = CombiningValueStateSpec("c", coder, fn)
    return AuthorCell("c", "combining", spec, spec.coder, spec.combine_fn)


def test_a_mean_is_its_sum_and_its_count_whatever_its_coder():
    mean = author(MeanCombineFn())
    assert mean.combiner == "MeanCombineFn"
    untyped = cell(FastPrimitivesCoder(), "combining", combiner=mean.combiner)
    rows = {"a": (FastPrimitivesCoder().encode((12, 4)),), "b": (None,)}
    assert values(save([untyped], rows), untyped="json") == ['{"sum": 12, "count": 4}', None]
    coder = TupleCoder((VarIntCoder(), VarIntCoder()))
    typed = cell(coder, "combining", combiner=mean.combiner)
    rows = {"a": (coder.encode((2**62, 4)),), "b": (None,)}
    store = save([typed], rows)
    assert values(store) == [{"sum": 2**62, "count": 4}, None]
    sql = inspect.duckdb(store).sql("SELECT c.sum / c.count FROM op WHERE key = 'a'")
    assert sql.fetchall() == [(2**60,)]
    other = cell(coder, "combining", combiner="mine.MeanCombineFn")
    assert values(save([other], rows)) == [{"f0": 2**62, "f1": 4}, None]


def test_which_combiner_it_is_is_recorded():
    class Mine(MeanCombineFn):
        pass

    assert author(sum).combiner == "CallableWrapperCombineFn[builtins.sum]"
    assert author(Mine()).combiner.endswith("Mine") and "." in author(Mine()).combiner


# -- pickles ---------------------------------------------------------------------------------
class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle was opened",)


@pytest.mark.parametrize("coder", [PickleCoder(), FastPrimitivesCoder(), CloudpickleCoder()])
def test_a_bomb_is_opened_only_where_it_was_said(coder, tmp_path, capsys):
    store = save([cell(coder)], {"a": (coder.encode(Bomb()),)})
    for ways in ({}, {"untyped": "json"}, {"schemas": [Order]}):
        inspect.state(store, "op", **ways)
        inspect.history(store, "op", "a", **ways)
        inspect.diff(store, 1, 1, "op", **ways)
        inspect.duckdb(store, **ways).sql("SELECT * FROM op").fetchall()
    with pytest.raises(pytest.fail.Exception):
        inspect.state(store, "op", unsafe_unpickle=True)
    with pytest.raises(pytest.fail.Exception):
        inspect.history(store, "op", "a", unsafe_unpickle=True)
    root = tmp_path / "ckpt"
    write(open_store(root), [cell(coder)], {"a": (coder.encode(Bomb()),)})
    for command in (
        ["state", root, "op"], ["state", root, "op", "--bytes"], ["history", root, "op", "a"],
        ["diff", root, 1, 1], ["sql", root, "SELECT * FROM op"], ["export", root, "op"],
        ["timers", root, "op"],
    ):  # fmt: skip
        assert run(*command) == 0
        if command[0] in ("state", "history", "export") and "--bytes" not in command:
            with pytest.raises(pytest.fail.Exception):
                run(*command, "--unsafe-unpickle")
    assert "pickles are opened" in capsys.readouterr().err


@pytest.mark.parametrize("coder", [PickleCoder(), FastPrimitivesCoder(), CloudpickleCoder()])
def test_opened_pickles_come_as_json(coder):
    class Point:
        def __init__(self) -> None:
            self.x = 1

    held = {"at": (1, None), "of": {3}}
    store = save([cell(coder)], {"a": (coder.encode(held),)})
    assert json.loads(values(store, unsafe_unpickle=True)[0]) == {"at": [1, None], "of": [3]}
    in_bags = save([cell(coder, "bag")], {"a": ((coder.encode(1), coder.encode("x")),)})
    assert values(in_bags, unsafe_unpickle=True) == [["1", '"x"']]
    typed = save([cell(VarIntCoder())], {"a": (VarIntCoder().encode(5),)})
    assert values(typed, unsafe_unpickle=True) == [5]


# -- the command -----------------------------------------------------------------------------
def run(*arguments: object) -> int:
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def test_the_command_reads_messages_by_a_descriptor_set_and_avro_by_its_schema(tmp_path, capsys):
    root = tmp_path / "ckpt"
    order = CellState("order", "read_modify_write", ProtoCoder(Order))
    reading = CellState("reading", "read_modify_write", AvroGenericCoder(json.dumps(AVRO)))
    row = (Order(id=7, note="n").SerializeToString(), avro(a_reading()))
    write(open_store(root), [order, reading], {"a": row})
    (tmp_path / "shop.pb").write_bytes(FILES.SerializeToString())
    (tmp_path / "reading.avsc").write_text(json.dumps(AVRO))
    schemas = ("--schema", tmp_path / "shop.pb", "--schema", tmp_path / "reading.avsc")
    assert run("state", root, "op", "--json", *schemas) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["order"]["id"], said["order"]["note"], said["reading"]["kind"]) == (7, "n", "B")
    assert run("sql", root, 'SELECT "order".id AS id FROM op', "--json", *schemas) == 0
    assert json.loads(capsys.readouterr().out) == {"id": 7}
    assert run("state", root, "op", "--json") == 0
    assert json.loads(capsys.readouterr().out)["order"] == "0x" + row[0].hex()


def test_a_file_without_a_schema_is_wrong_usage(tmp_path, capsys):
    root = tmp_path / "ckpt"
    write(open_store(root), [cell(VarIntCoder())], {"a": (b"\x01",)})
    (tmp_path / "no.pb").write_bytes(b"nothing of the kind")
    (tmp_path / "no.avsc").write_text("{")
    for name in ("no.pb", "no.avsc", "gone.pb"):
        assert run("state", root, "op", "--schema", tmp_path / name) == 2
        assert "--schema" in capsys.readouterr().err
    assert run("state", root, "op", "--bytes", "--unsafe-unpickle") == 2
    assert re.search("take one of the two", capsys.readouterr().err)


def test_arrow_types_of_columns_are_those_of_the_schema():
    store = save([cell(ProtoCoder(Order))], {"a": (b"",)})
    kind = inspect.state(store, "op", schemas=[Order]).schema.field("c").type
    assert kind.field("id").type == pa.uint64()
    assert kind.field("stock").type == pa.map_(pa.string(), pa.int64())
