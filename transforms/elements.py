"""What flows into an operator that restores: the author's live values and saved records, one coder.

Live and restored elements share one PCollection, so they need one type with one coder: a tag byte,
then either the author's value in the author's own coder or the bytes of a
`~beam_ckpt.transforms.snapshot.SnapshotRecord`. The pattern is Beam's own
``apache_beam.typehints.sharded_key_type``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from apache_beam.coders import coders
from apache_beam.coders.coder_impl import StreamCoderImpl
from apache_beam.coders.typecoders import registry
from apache_beam.typehints import typehints

__all__ = ["LiveOrRestored", "Restored"]

_LIVE, _RESTORED = 0, 1


class Restored:
    """A key's saved record on its way back to the key.

    `record` is `SnapshotRecord.to_bytes()`, or a chunk of it (`~beam_ckpt.transforms.chunks`).
    """

    __slots__ = ("record",)

    def __init__(self, record: bytes) -> None:
        self.record = record

    def __eq__(self, other: object) -> bool:
        return type(other) is Restored and other.record == self.record

    def __hash__(self) -> int:
        return hash((Restored, self.record))

    def __reduce__(self) -> tuple[type[Restored], tuple[bytes]]:
        return Restored, (self.record,)

    def __repr__(self) -> str:
        return f"Restored({len(self.record)} bytes)"


class LiveOrRestored(typehints.TypeConstraint, metaclass=typehints.GetitemConstructor):
    """The type hint ``LiveOrRestored[V]``: a `V`, or a `Restored` record."""

    def __init__(self, inner: Any) -> None:
        self.inner = typehints.normalize(inner)

    def _inner_types(self) -> Iterator[Any]:
        yield self.inner

    def _consistent_with_check_(self, sub: Any) -> bool:
        return isinstance(sub, LiveOrRestored) and bool(
            typehints.is_consistent_with(sub.inner, self.inner)
        )

    def type_check(self, instance: Any) -> None:
        if type(instance) is not Restored:
            typehints.check_constraint(self.inner, instance)

    def match_type_variables(self, concrete_type: Any) -> dict[Any, Any]:
        if isinstance(concrete_type, LiveOrRestored):
            matched: dict[Any, Any] = typehints.match_type_variables(
                self.inner, concrete_type.inner
            )
            return matched
        return {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiveOrRestored) and bool(self.inner == other.inner)

    def __hash__(self) -> int:
        return hash((LiveOrRestored, self.inner))

    def __repr__(self) -> str:
        return f"LiveOrRestored[{self.inner!r}]"


class _LiveOrRestoredCoderImpl(StreamCoderImpl):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode_to_stream(self, value: Any, out: Any, nested: bool) -> None:
        if type(value) is Restored:
            out.write_byte(_RESTORED)
            out.write(value.record, nested)
        else:
            out.write_byte(_LIVE)
            self._inner.encode_to_stream(value, out, nested)

    def decode_from_stream(self, stream: Any, nested: bool) -> Any:
        if stream.read_byte() == _RESTORED:
            return Restored(stream.read_all(nested))
        return self._inner.decode_from_stream(stream, nested)

    def estimate_size(self, value: Any, nested: bool = False) -> int:
        if type(value) is Restored:
            return 1 + len(value.record)
        return 1 + int(self._inner.estimate_size(value, nested))


class _LiveOrRestoredCoder(coders.FastCoder):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def _create_impl(self) -> _LiveOrRestoredCoderImpl:
        return _LiveOrRestoredCoderImpl(self._inner.get_impl())

    def is_deterministic(self) -> bool:
        return bool(self._inner.is_deterministic())

    @classmethod
    def from_type_hint(cls, typehint: Any, coders: Any) -> Any:
        return cls(coders.get_coder(typehint.inner))

    def to_type_hint(self) -> Any:
        return LiveOrRestored[self._inner.to_type_hint()]

    def __eq__(self, other: object) -> bool:
        return type(other) is _LiveOrRestoredCoder and bool(other._inner == self._inner)

    def __hash__(self) -> int:
        return hash((_LiveOrRestoredCoder, self._inner))


registry.register_coder(LiveOrRestored, _LiveOrRestoredCoder)
