"""On FnApiRunner a bounded run meets its saved records before its elements; none of them waits."""

from __future__ import annotations

import apache_beam as beam
from apache_beam.coders import VarIntCoder
from apache_beam.metrics import MetricsFilter
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec
from apache_beam.transforms.window import FixedWindows, Sessions, TimestampedValue

from beam_ckpt.transforms import CheckpointedParDo
from beam_ckpt.transforms.metrics import NAMESPACE

KEYS = [f"key-{i}" for i in range(6)]


class CountFn(beam.DoFn):
    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())
    ALL = BagStateSpec("all", VarIntCoder())

    def process(self, element, count=beam.DoFn.StateParam(COUNT), kept=beam.DoFn.StateParam(ALL)):
        count.write((count.read() or 0) + 1)
        kept.add(element[1])
        yield element[0], count.read(), sum(kept.read())


def run(store, until, elements, expected, windows=None) -> dict[str, int]:
    p = beam.Pipeline(runner="FnApiRunner")
    events = [TimestampedValue((key, value), at) for key, value, at in elements]
    keyed = (
        p | beam.Create([None]) | beam.FlatMap(lambda _: events).with_output_types(tuple[str, int])
    )
    if windows is not None:
        keyed = keyed | beam.WindowInto(windows)
    outputs = keyed | CheckpointedParDo(CountFn(), uid="op", store=str(store), until=until)
    assert_that(outputs, equal_to(expected))
    result = p.run()
    result.wait_until_finish()
    query = result.metrics().query(MetricsFilter().with_namespace(NAMESPACE))
    return {found.key.metric.name: found.committed for found in query["counters"]}


def check(tmp_path, windows=None):
    first = [(key, i, i) for i, key in enumerate(KEYS)]
    run(tmp_path, 10, first, [(key, 1, i) for i, key in enumerate(KEYS)], windows)
    # The first half is touched again, the other is not, and one key is new.
    second = [(key, 100, 10 + i) for i, key in enumerate(KEYS[:3])] + [("new", 7, 15)]
    expected = [(key, 2, 100 + i) for i, key in enumerate(KEYS[:3])] + [("new", 1, 7)]
    found = run(tmp_path, 20, second, expected, windows)
    assert found["keys_restored"] == len(KEYS)
    assert found["elements_buffered"] == 1, "the new key's, which may have a record for all we know"
    assert found["keys_saved"] == 4
    # What nobody touched was restored, and is still there.
    third = [(key, 1000, 20 + i) for i, key in enumerate(KEYS)]
    expected = [
        (key, 3 if i < 3 else 2, 1000 + i + (100 if i < 3 else 0)) for i, key in enumerate(KEYS)
    ]
    run(tmp_path, 30, third, expected, windows)


def test_no_element_waits_whose_record_is_there(tmp_path):
    check(tmp_path)


def test_no_element_waits_in_windows_either(tmp_path):
    check(tmp_path, FixedWindows(1000))


def test_sessions_of_which_no_side_input_can_be_made_run_as_well(tmp_path):
    run(tmp_path, 10, [("a", 1, 1)], [("a", 1, 1)], Sessions(100))
    found = run(tmp_path, 20, [("a", 2, 11)], [("a", 1, 2)], Sessions(100))
    assert found["keys_restored"] == 1
