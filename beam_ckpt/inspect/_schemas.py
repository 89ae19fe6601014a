"""Cells of protobuf messages and Avro records as structs, by schemas that the caller has.

The files hold what the author's coder wrote, byte for byte, so that a message may get a field
without a migration. What its bytes mean is said by a schema: a message class for
`ProtoCoder[its.name]`, an Avro schema for `AvroGenericCoder[its hash]`.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

__all__ = ["Decoder", "Schema", "decoders", "schemas_in"]

Schema = Any
"""A protobuf message class, or an Avro schema: a mapping, or its JSON."""

_MAX_DEPTH = 16


class Decoder:
    """What turns the bytes of one coder into a struct.

    Attributes:
        type: Of the struct.
    """

    def __init__(self, type: pa.DataType, decode: Callable[[bytes], object]) -> None:
        """Takes the type, and what gives a value for it."""
        self.type, self._decode = type, decode

    def column(self, column: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
        """Returns a column of bytes, or of lists of bytes, as one of structs.

        Raises:
            ValueError: A value is not of the schema.
        """
        decode = self._decode

        def one(value: bytes | None) -> object:
            return None if value is None else decode(value)

        if pa.types.is_binary(column.type):
            return pa.array(map(one, column.to_pylist()), self.type)
        if pa.types.is_list(column.type) and pa.types.is_binary(column.type.value_type):
            lists = [None if v is None else list(map(one, v)) for v in column.to_pylist()]
            return pa.array(lists, pa.list_(pa.field("element", self.type)))
        return column


def decoders(schemas: Iterable[Schema]) -> Callable[[str], Decoder | None]:
    """Returns what finds the decoder of a coder by its identity.

    Raises:
        ValueError: One of them is no schema, or has what no Arrow type has (an Avro union of
            several types).
    """
    found: dict[str, Decoder] = {}
    for schema in schemas:
        descriptor = getattr(schema, "DESCRIPTOR", None)
        if descriptor is None and hasattr(schema, "pb"):  # proto-plus
            descriptor, schema = schema.pb().DESCRIPTOR, schema.pb()
        if descriptor is not None:
            found[descriptor.full_name] = _proto(schema)
            continue
        try:
            parsed = json.loads(schema) if isinstance(schema, str | bytes) else schema
        except ValueError as error:
            raise ValueError(f"{str(schema)[:100]!r} is no JSON of an Avro schema") from error
        if not isinstance(parsed, Mapping | list):
            raise ValueError(f"{schema!r:.100} is no message class and no Avro schema")
        canonical = json.dumps(parsed, sort_keys=True, separators=(",", ":"))
        found[hashlib.sha256(canonical.encode()).hexdigest()[:16]] = _avro(parsed)

    def find(coder: str) -> Decoder | None:
        matched = re.fullmatch(r"(?:\w*Proto(?:Plus)?Coder|AvroGenericCoder)\[([\w.]+)\]", coder)
        return found.get(matched[1]) if matched else None

    return find


def schemas_in(path: Path) -> list[Schema]:
    """Returns the schemas of a file: of Avro (``.avsc``, ``.json``), or protobuf descriptors.

    The latter are what ``protoc --include_imports --descriptor_set_out`` writes: no code of the
    messages is needed.

    Raises:
        ValueError: It cannot be read, or is neither.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if path.suffix in (".avsc", ".json"):
        return [data]
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(data).file
        pool = descriptor_pool.DescriptorPool()
        for file in files:
            pool.Add(file)
        found = [
            message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
            for file in files
            for message in file.message_type
            for name in _message_names(message, file.package)
        ]
    except Exception as error:  # what protobuf raises differs from version to version
        raise ValueError(f"{path} is no set of protobuf descriptors: {error}") from error
    if not found:
        raise ValueError(f"{path} has no protobuf message, and its name is not that of Avro")
    return found


def _message_names(message: Any, above: str) -> Iterator[str]:
    name = f"{above}.{message.name}" if above else message.name
    if message.options.map_entry:
        return
    yield name
    for inner in message.nested_type:
        yield from _message_names(inner, name)


# -- protobuf ----------------------------------------------------------------------------------


def _proto(message: Any) -> Decoder:
    def decode(data: bytes) -> object:
        try:
            parsed = message.FromString(data)
        except Exception as error:  # google.protobuf.message.DecodeError
            raise ValueError(f"bytes that are no {message.DESCRIPTOR.full_name}") from error
        return _message(parsed, message.DESCRIPTOR, _MAX_DEPTH, ())

    return Decoder(_message_type(message.DESCRIPTOR, _MAX_DEPTH, ()), decode)


def _message_type(descriptor: Any, depth: int, within: tuple[str, ...]) -> pa.DataType:
    inner = (*within, descriptor.full_name)
    fields = [pa.field(f.name, _field_type(f, depth, inner)) for f in descriptor.fields]
    return pa.struct(fields) if fields else pa.struct([pa.field("_empty", pa.null())])


def _opaque(field: Any, depth: int, within: tuple[str, ...]) -> bool:
    """A message within itself has no type: its bytes stay."""
    return depth == 0 or field.message_type.full_name in within


def _field_type(field: Any, depth: int, within: tuple[str, ...]) -> pa.DataType:
    if _is_map(field):
        entry = field.message_type.fields_by_name
        key = _value_type(entry["key"], depth - 1, within)
        return pa.map_(key, _value_type(entry["value"], depth - 1, within))
    value = _value_type(field, depth - 1, within)
    return pa.list_(pa.field("element", value)) if _repeated(field) else value


def _value_type(field: Any, depth: int, within: tuple[str, ...]) -> pa.DataType:
    if field.message_type is not None:
        opaque = _opaque(field, depth, within)
        return pa.binary() if opaque else _message_type(field.message_type, depth, within)
    if field.enum_type is not None:
        return pa.string()
    return _CPP_TYPES[field.cpp_type] if field.type != field.TYPE_BYTES else pa.binary()


# By FieldDescriptor.CPPTYPE_*.
_CPP_TYPES = {
    1: pa.int32(), 2: pa.int64(), 3: pa.uint32(), 4: pa.uint64(), 5: pa.float64(),
    6: pa.float32(), 7: pa.bool_(), 9: pa.string(),
}  # fmt: skip


def _message(value: Any, descriptor: Any, depth: int, within: tuple[str, ...]) -> object:
    inner = (*within, descriptor.full_name)
    found: dict[str, object] = {}
    for field in descriptor.fields:
        held = getattr(value, field.name)
        if _is_map(field):
            entry = field.message_type.fields_by_name["value"]
            pairs = ((k, _one(held[k], entry, depth - 1, inner)) for k in held)
            found[field.name] = sorted(pairs, key=lambda pair: pair[0])
        elif _repeated(field):
            found[field.name] = [_one(item, field, depth - 1, inner) for item in held]
        elif field.has_presence and not value.HasField(field.name):
            found[field.name] = None
        else:
            found[field.name] = _one(held, field, depth - 1, inner)
    return found or {"_empty": None}


def _one(value: Any, field: Any, depth: int, within: tuple[str, ...]) -> object:
    if field.message_type is not None:
        if _opaque(field, depth, within):
            return value.SerializePartialToString()
        return _message(value, field.message_type, depth, within)
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return named.name if named is not None else str(value)
    return value


def _repeated(field: Any) -> bool:
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == 3)


def _is_map(field: Any) -> bool:
    kind = field.message_type
    return kind is not None and _repeated(field) and bool(kind.GetOptions().map_entry)


# -- Avro --------------------------------------------------------------------------------------


def _avro(schema: Any) -> Decoder:
    import fastavro

    raw = _without_logical(schema)
    type = _avro_type(raw, {})
    parsed = fastavro.parse_schema(raw)

    def decode(data: bytes) -> object:
        source = io.BytesIO(data)
        try:
            value: object = fastavro.schemaless_reader(source, parsed, None)
        except Exception as error:  # what fastavro may raise is not ours to enumerate
            raise ValueError(f"bytes that are not of an Avro schema: {error}") from error
        if source.read(1):
            raise ValueError("bytes are left over after an Avro record")
        return value

    return Decoder(type, decode)


def _without_logical(schema: Any) -> Any:
    """The schema of the numbers and bytes themselves: no precision is lost on the way."""
    if isinstance(schema, Mapping):
        return {k: _without_logical(v) for k, v in schema.items() if k != "logicalType"}
    return [_without_logical(item) for item in schema] if isinstance(schema, list) else schema


def _avro_type(schema: Any, named: dict[str, pa.DataType]) -> pa.DataType:
    if isinstance(schema, list):
        others = [item for item in schema if item != "null"]
        if len(others) != 1:
            raise ValueError(f"an Avro union of several types has no type in Arrow: {schema}")
        return _avro_type(others[0], named)
    if isinstance(schema, str):
        if schema in _AVRO_TYPES:
            return _AVRO_TYPES[schema]
        if schema not in named:
            raise ValueError(f"an Avro schema names {schema!r}, which is unknown or within itself")
        return named[schema]
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "array":
        return pa.list_(pa.field("element", _avro_type(schema["items"], named)))
    if kind == "map":
        return pa.map_(pa.string(), _avro_type(schema["values"], named))
    if kind == "record":
        fields = [pa.field(f["name"], _avro_type(f["type"], named)) for f in schema["fields"]]
        found = pa.struct(fields)
    elif kind == "enum":
        found = pa.string()
    elif kind == "fixed":
        found = pa.binary()
    elif kind is not None:
        return _avro_type(kind, named)
    else:
        raise ValueError(f"{schema!r:.100} is no Avro schema")
    named[schema["name"]] = found
    return found


_AVRO_TYPES = {
    "null": pa.null(), "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(),
    "float": pa.float32(), "double": pa.float64(), "bytes": pa.binary(), "string": pa.string(),
}  # fmt: skip
