"""A cell's values as an author has them, and as a record has them: encoded, one or many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from apache_beam.utils.timestamp import Timestamp

from beam_ckpt.errors import StateIncompatibleError
from beam_ckpt.transforms.columns import CellState

__all__ = ["cell_decoder", "cell_encoder"]


def cell_decoder(
    kind: str, decode: Callable[[bytes], Any], combine_fn: Any = None
) -> Callable[[Any], Any]:
    """Returns what turns what a record has of a cell into its value.

    That is a value or `None`, the list of a bag, the set of a set, and of an ordered list a list of
    (`Timestamp`, value).

    Args:
        kind: Of the cell.
        decode: Decodes one value.
        combine_fn: Of a combining cell, which then gives what it reads as; else its accumulator.
    """

    def one(value: bytes | None) -> Any:
        return None if value is None else decode(value)

    def combined(value: bytes | None) -> Any:
        empty = value is None
        return combine_fn.extract_output(combine_fn.create_accumulator() if empty else one(value))

    def dated(item: Any) -> Any:
        return (Timestamp(micros=item[0]), item[1]) if isinstance(item, tuple) else item

    if kind == "bag":
        return lambda items: [decode(item) for item in items or ()]
    if kind == "set":
        return lambda items: {decode(item) for item in items or ()}
    if kind == "ordered_list":
        return lambda items: [dated(decode(item)) for item in items or ()]
    return combined if combine_fn is not None else one


def cell_encoder(cell: CellState) -> Callable[[Any], bytes | tuple[bytes, ...] | None]:
    """Returns what turns a cell's value into what a record has of it; see `cell_decoder`.

    It raises `StateIncompatibleError` for what the cell does not take.
    """
    coder = cell.coder

    def dated(item: Any) -> tuple[int, Any]:
        moment, value = item
        return Timestamp.of(moment).micros, value

    def encode(value: Any) -> bytes | tuple[bytes, ...] | None:
        if not cell.has_many:
            return None if value is None else bytes(coder.encode(value))
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable | None):
            raise TypeError("it holds many values: give a list or a set")
        items = value or ()
        if cell.kind == "ordered_list":
            # By time; those of one time in the order in which they are given.
            items = sorted(map(dated, items), key=lambda item: item[0])
        encoded = [coder.encode(item) for item in items]
        return tuple(dict.fromkeys(encoded) if cell.kind == "set" else encoded)

    def named(value: Any) -> bytes | tuple[bytes, ...] | None:
        try:
            return encode(value)
        except Exception as error:
            raise StateIncompatibleError(
                f"cell {cell.name!r} ({cell.kind}, {coder!r}) does not take a "
                f"{type(value).__name__}: {error}. What to do: give what the DoFn keeps there; of "
                "a combining cell that is its accumulator."
            ) from error

    return named
