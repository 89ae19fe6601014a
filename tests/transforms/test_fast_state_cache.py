"""`--checkpoint_fast_state_cache`: the same results and sizes, and unknown internals left alone."""

from __future__ import annotations

import collections
import inspect
import logging
import types

import apache_beam as beam
import objsize
import pytest
from apache_beam.coders import VarIntCoder
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.worker import statecache
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec

from beam_ckpt.transforms import CheckpointedParDo, fast_state_cache
from beam_ckpt.transforms.fast_state_cache import correct_state_cache
from beam_ckpt.transforms.state_io import ReadState

VALUES = [
    [],
    [b"x" * 100],
    [1, 2**80, 1.5, None, True],
    [{"a": [1, 2], "b": ("c", b"d")}],
    [{i: str(i) for i in range(50)}],
    [collections.Counter("abc")],
]


@pytest.fixture(autouse=True)
def beam_as_it_was(monkeypatch):
    monkeypatch.setattr(statecache, "get_deep_size", statecache.get_deep_size)


def measuring(source: str = "", **changes) -> types.ModuleType:
    """A state cache of another Beam."""
    module = types.ModuleType("statecache")
    vars(module).update(vars(statecache) | changes)
    if source:
        exec(source, vars(module))
    return module


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_of_state_measure_the_same(value):
    before = statecache.get_deep_size(value)
    original = statecache.get_deep_size
    assert correct_state_cache()
    assert statecache.get_deep_size is not original
    assert statecache.get_deep_size(value) == before


def test_it_takes_the_walk_out_once(monkeypatch):
    walks = []
    walk = objsize.traverse._iter_modules_globals
    monkeypatch.setattr(
        objsize.traverse, "_iter_modules_globals", lambda: walks.append(1) or walk()
    )
    statecache.get_deep_size([b"x"])
    assert len(walks) == 1
    assert correct_state_cache()
    corrected = statecache.get_deep_size
    assert correct_state_cache()
    assert statecache.get_deep_size is corrected
    statecache.get_deep_size([b"x"])
    assert len(walks) == 1


OTHER = "def get_deep_size(*objs):\n  return 8\n"


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (lambda: measuring(OTHER), "the state cache measures in a way that it does not know"),
        (
            lambda: measuring(get_deep_size=len),
            "the state cache measures in a way that it does not know",
        ),
        (
            lambda: types.ModuleType("statecache"),
            "the state cache measures in a way that it does not know",
        ),
        (
            lambda: measuring(objsize=types.SimpleNamespace(get_deep_size=lambda *objs: 8)),
            "objsize has no option 'exclude_modules_globals'",
        ),
    ],
    ids=["another way", "a builtin", "nothing", "another objsize"],
)
def test_unknown_internals_are_left_alone(module, why, caplog):
    found = module()
    before = dict(vars(found))
    with caplog.at_level(logging.WARNING):
        assert not correct_state_cache(found)
    assert dict(vars(found)) == before
    assert f"--checkpoint_fast_state_cache does nothing: {why}" in caplog.text


def test_an_unknown_version_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(fast_state_cache, "KNOWN_VERSIONS", ("1.0.",))
    before = statecache.get_deep_size
    with caplog.at_level(logging.WARNING):
        assert not correct_state_cache()
    assert statecache.get_deep_size is before
    assert "is not one of the versions that it knows" in caplog.text


def test_the_beam_that_is_installed_is_known():
    assert "exclude_modules_globals" in inspect.signature(objsize.get_deep_size).parameters
    assert correct_state_cache(measuring())


class CountAndKeepFn(beam.DoFn):
    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())
    KEPT = BagStateSpec("kept", VarIntCoder())

    def process(self, element, count=beam.DoFn.StateParam(COUNT), kept=beam.DoFn.StateParam(KEPT)):
        count.write((count.read() or 0) + 1)
        kept.add(element[1])
        yield element[0], count.read(), sum(kept.read())


@pytest.mark.parametrize("arguments", [[], ["--checkpoint_fast_state_cache"]], ids=["off", "on"])
def test_a_run_gives_the_same_and_only_the_option_corrects(arguments, tmp_path):
    original = statecache.get_deep_size
    events = [(f"k{i % 3}", i) for i in range(9)]
    kept: dict[str, list[int]] = {"k0": [], "k1": [], "k2": []}
    for _ in range(2):
        expected = []
        for key, value in events:
            kept[key].append(value)
            expected.append((key, len(kept[key]), sum(kept[key])))
        options = PipelineOptions(["--runner=FnApiRunner", *arguments])
        with beam.Pipeline(options=options) as p:
            result = (
                p
                | beam.Create(events).with_output_types(tuple[str, int])
                | CheckpointedParDo(CountAndKeepFn(), uid="op", store=str(tmp_path))
            )
            assert_that(result, equal_to(expected))
    assert (statecache.get_deep_size is original) == (not arguments)
    with beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner"])) as p:
        state = p | ReadState(str(tmp_path), "op", cells=CountAndKeepFn())
        cells = state | beam.MapTuple(lambda key, cells: (key, cells["count"], cells["kept"]))
        assert_that(cells, equal_to([(key, 6, values) for key, values in kept.items()]))
