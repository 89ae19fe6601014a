"""A pipeline that a Beam of any supported version runs: started as a script, without pytest.

    python of_any_version.py STORE RUNNER UNTIL

runs `ManyCodersFn` to a cut (seconds; 0: to the end), checks what it saved with the oracle, and
prints the version of Beam, the outputs and the state as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.coders import (
    FastPrimitivesCoder,
    PickleCoder,
    StrUtf8Coder,
    TupleCoder,
    VarIntCoder,
    registry,
)
from apache_beam.transforms.combiners import MeanCombineFn
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    CombiningValueStateSpec,
    ReadModifyWriteStateSpec,
    SetStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Timestamp

from beam_ckpt import open_store
from beam_ckpt.testing.cuts import run_checkpointed, saved_state
from beam_ckpt.testing.event_loop import canonical, run_event_loop

S = 1_000_000
DATA = tuple((second * S, f"ключ {second % 5}", second % 7) for second in range(0, 200, 4))


class Place(NamedTuple):
    """A row."""

    name: str
    visits: int


registry.register_coder(Place, beam.coders.RowCoder)


@dataclass(frozen=True)
class Opaque:
    """What only a pickle can hold."""

    seen: int


@beam.typehints.with_input_types(tuple[str, int])
@beam.typehints.with_output_types(tuple[str, str, int])
class ManyCodersFn(beam.DoFn):
    """A cell of each sort of coder, a timer, and an output ahead of its time."""

    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())
    WORDS = BagStateSpec("words", StrUtf8Coder())
    PAIR = ReadModifyWriteStateSpec("pair", TupleCoder((StrUtf8Coder(), VarIntCoder())))
    PLACE = ReadModifyWriteStateSpec("place", registry.get_coder(Place))
    PICKLED = ReadModifyWriteStateSpec("pickled", PickleCoder())
    ANYTHING = ReadModifyWriteStateSpec("anything", FastPrimitivesCoder())
    KINDS = SetStateSpec("kinds", VarIntCoder())
    MEAN = CombiningValueStateSpec("mean", FastPrimitivesCoder(), MeanCombineFn())
    LATER = TimerSpec("later", TimeDomain.WATERMARK)

    def process(
        self,
        element,
        ts=beam.DoFn.TimestampParam,
        count=beam.DoFn.StateParam(COUNT),
        words=beam.DoFn.StateParam(WORDS),
        pair=beam.DoFn.StateParam(PAIR),
        place=beam.DoFn.StateParam(PLACE),
        pickled=beam.DoFn.StateParam(PICKLED),
        anything=beam.DoFn.StateParam(ANYTHING),
        kinds=beam.DoFn.StateParam(KINDS),
        mean=beam.DoFn.StateParam(MEAN),
        later=beam.DoFn.TimerParam(LATER),
    ):
        key, value = element
        number = (count.read() or 0) + 1
        count.write(number)
        words.add(f"ü{value}")
        pair.write((key, (pair.read() or ("", 0))[1] + value))
        was = place.read()
        place.write(Place(key, 1 if was is None else was.visits + 1))
        pickled.write(Opaque((pickled.read() or Opaque(0)).seen + value))
        anything.write([*(anything.read() or []), {"value": value, "half": value / 2}])
        kinds.add(value)
        mean.add(value)
        later.set(ts + 23, dynamic_timer_tag=str(value % 2))
        yield key, "count", number
        if value == 3:
            # Over the cut, for some.
            yield TimestampedValue((key, "ahead", number), ts + 30)

    @on_timer(LATER)
    def on_later(
        self,
        key=beam.DoFn.KeyParam,
        tag=beam.DoFn.DynamicTimerTagParam,
        words=beam.DoFn.StateParam(WORDS),
        pair=beam.DoFn.StateParam(PAIR),
        place=beam.DoFn.StateParam(PLACE),
        pickled=beam.DoFn.StateParam(PICKLED),
        anything=beam.DoFn.StateParam(ANYTHING),
        kinds=beam.DoFn.StateParam(KINDS),
        mean=beam.DoFn.StateParam(MEAN),
    ):
        yield key, f"words {tag} {sorted(words.read())}", len(list(kinds.read()))
        yield key, f"{pair.read()} {place.read().name}", place.read().visits
        yield key, f"{anything.read()} {mean.read()}", pickled.read().seen


def run(url: str, runner: str, until: int | None) -> list[Any]:
    """Goes on from the newest checkpoint of a store, if there is one; returns the outputs."""
    store = open_store(url)
    settings = {"key_groups": 3, "time_sorted": True, "until": until}
    ours = run_checkpointed(ManyCodersFn(), DATA, runner=runner, store=store, **settings)
    return list(ours.outputs)


def check(url: str, outputs: list[Any], since: int | None, until: int | None) -> None:
    """Compares outputs and saved state with the oracle's, of a run between two cuts in seconds."""
    fn, before = ManyCodersFn(), None
    if since is not None:
        before = run_event_loop(fn, DATA, until=since * S).state
    cut = None if until is None else until * S
    expected = run_event_loop(fn, DATA, until=cut, restored=before)
    assert canonical(outputs) == canonical(expected.outputs)
    state = saved_state(open_store(url), fn)
    assert state == dict(expected.state)
    if until is not None:
        kept = list(state.values())
        assert len(kept) == 5
        assert all(len(cells.cells) == 8 and cells.timers for cells in kept)
        assert any(cells.carried for cells in kept)


def resumed_at(url: str) -> int | None:
    """The newest boundary in seconds."""
    manifest = open_store(url).load_latest()
    if manifest is None or manifest.boundary is None:
        return None
    return int(Timestamp(micros=manifest.boundary).micros // S)


if __name__ == "__main__":
    where, name, end = sys.argv[1], sys.argv[2], int(sys.argv[3]) or None
    # Cells that pickle name this module, not the script.
    import of_any_version

    start = of_any_version.resumed_at(where)
    found = of_any_version.run(where, name, end)
    of_any_version.check(where, found, start, end)
    print(json.dumps({"beam": beam.__version__, "since": start, "outputs": len(found)}))
