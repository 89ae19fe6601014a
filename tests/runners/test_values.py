"""Values of any size in every kind of cell, written, cleared and written again in one bundle."""

from __future__ import annotations

import hashlib
import uuid

import apache_beam as beam
import pytest
from apache_beam.coders import BytesCoder, StrUtf8Coder
from apache_beam.transforms.userstate import (
    BagStateSpec,
    CombiningValueStateSpec,
    OrderedListStateSpec,
    ReadModifyWriteStateSpec,
    SetStateSpec,
)

from beam_ckpt import open_store
from beam_ckpt.testing.cuts import run_checkpointed, saved_state
from beam_ckpt.testing.event_loop import canonical, run_event_loop

S = 1_000_000
SIZES = (0, 1, 4095, 4096, 4097, 65_536, 1_000_000)
# Each key sees every size, before and after the cuts, the large ones in another order.
DATA = tuple(
    (at * S, key, size)
    for at, (key, size) in enumerate(
        [("a", size) for size in SIZES] + [("b", size) for size in reversed(SIZES)] * 2
    )
)


class Longest(beam.CombineFn):
    """The longest text of all; its accumulator is that text."""

    def create_accumulator(self):
        return ""

    def add_input(self, accumulator, element):
        return max(accumulator, element, key=len)

    def merge_accumulators(self, accumulators):
        return max(accumulators, key=len)

    def extract_output(self, accumulator):
        return accumulator


class HoarderFn(beam.DoFn):
    """Keeps values in cells of every kind; every third time it clears and fills them again."""

    LAST = ReadModifyWriteStateSpec("last", BytesCoder())
    ALL = BagStateSpec("all", BytesCoder())
    DISTINCT = SetStateSpec("distinct", BytesCoder())
    LONGEST = CombiningValueStateSpec("longest", StrUtf8Coder(), Longest())
    IN_ORDER = OrderedListStateSpec("in_order", BytesCoder())

    def process(
        self,
        element,
        at=beam.DoFn.TimestampParam,
        last=beam.DoFn.StateParam(LAST),
        everything=beam.DoFn.StateParam(ALL),
        distinct=beam.DoFn.StateParam(DISTINCT),
        longest=beam.DoFn.StateParam(LONGEST),
        in_order=beam.DoFn.StateParam(IN_ORDER),
    ):
        key, size = element
        value = bytes([size % 251]) * size
        cells = (last, everything, distinct, longest, in_order)
        for turn in range(2 if at.seconds() % 3 == 0 else 1):
            if turn:
                for cell in cells:
                    cell.clear()
            last.write(value)
            everything.add(value)
            distinct.add(value)
            longest.add("ä" * (size // 2))
            in_order.add((at, value))
        seen = [
            [last.read()],
            sorted(everything.read()),
            sorted(distinct.read()),
            [longest.read().encode()],
            [v for _, v in in_order.read()],
        ]
        digest = hashlib.sha256()
        for values in seen:
            for v in values:
                digest.update(len(v).to_bytes(8, "big") + v)
        yield key, size, tuple(len(values) for values in seen), digest.hexdigest()


@pytest.mark.parametrize("runner", ["FnApiRunner", "PrismRunner"])
def test_values_from_empty_to_a_megabyte_are_cut_exactly(runner, request):
    if runner == "PrismRunner":
        request.getfixturevalue("prism")
    store = open_store(f"memory://{uuid.uuid4().hex}")
    outputs, reference = [], None
    for cut in (4, 11, 17, None):
        until = None if cut is None else cut * S
        part = run_checkpointed(
            HoarderFn(), DATA, runner=runner, store=store, until=cut, time_sorted=True
        )
        expected = run_event_loop(HoarderFn(), DATA, until=until, restored=reference)
        reference = expected.state
        assert saved_state(store, HoarderFn()) == dict(expected.state)
        outputs += part.outputs
    assert canonical(outputs) == canonical(run_event_loop(HoarderFn(), DATA).outputs)
    assert {size for _, size, *_ in (output.value for output in outputs)} == set(SIZES)
