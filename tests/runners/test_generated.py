"""Generated DoFns on real runners; without one: `tests/testing/test_generated.py`."""

from __future__ import annotations

import uuid
from collections import Counter
from contextlib import ExitStack
from functools import partial
from unittest import mock

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import PANE_INFO_UNKNOWN, WindowedValue
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from beam_ckpt import open_store
from beam_ckpt.testing import cuts
from beam_ckpt.testing.event_loop import Output, canonical, run_event_loop
from beam_ckpt.testing.generated import TAGS, dofn
from beam_ckpt.testing.histories import (
    Chain,
    History,
    between,
    chains,
    comparable,
    count,
    histories,
    middle_of,
)
from beam_ckpt.testing.prism import prism_options
from beam_ckpt.testing.replay import ReadReplay, ReplayLog
from beam_ckpt.testing.stored import EXAMPLES, Storage, storages
from beam_ckpt.testing.strategies import trickles
from beam_ckpt.testing.streams import StreamPlan
from beam_ckpt.transforms import Checkpoints, checkpoints
from beam_ckpt.transforms.keyed_state.operator import OperatorConfig

S = 1_000_000
# Examples: (of one operator, of chains).
FEW = {
    "FnApiRunner-batch": (10, 5),
    "BundleBasedDirectRunner-stream": (10, 5),
    "PrismRunner-batch": (2, 1),
    "PrismRunner-stream": (2, 1),
    "PrismRunner-live": (1, 1),
}
MANY = {
    "FnApiRunner-batch": (100, 40),
    "BundleBasedDirectRunner-stream": (140, 40),
    "PrismRunner-batch": (20, 10),
    "PrismRunner-stream": (20, 10),
    "PrismRunner-live": (10, 5),
}


def source_of(history: History, engine, boundary: int | None):
    if engine.source != "live":
        return history.replayed(boundary)
    return ReplayLog([(at, (key, value)) for at, key, value in history.elements], displacement=5)


def options_of(storage: Storage) -> list[str]:
    """What there are pipeline options for."""
    return [
        f"--checkpoint_key_groups={storage.key_groups}",
        f"--checkpoint_max_files_per_group={storage.max_files}",
        f"--checkpoint_inline_threshold={storage.inline_threshold}",
        f"--checkpoint_shared_threshold={storage.shared_threshold}",
        f"--checkpoint_keep={storage.keep}",
    ]


def check_history(
    history: History, engine, stored: tuple[Storage, ...] | None = None
) -> Counter[str]:
    """Runs a history; with `stored`, each run stores its checkpoints in its own way."""
    program, fn = history.program, dofn(history.program)
    windowing = {"window_fn": history.window_fn, "lateness": history.lateness}
    store = open_store(f"memory://{uuid.uuid4().hex}")
    outputs, reference = [], None
    counts: Counter[str] = Counter()
    for number, cut in enumerate((*history.cuts, None)):
        boundary = None if reference is None else reference.boundary
        every = None if history.every is None else history.every / S
        options: list[str] = []
        with ExitStack() as stack:
            if stored is not None:
                storage = stored[number]
                options = options_of(storage)
                config = partial(
                    OperatorConfig,
                    bag_bytes=storage.bag_bytes,
                    waiting_bytes=storage.waiting_bytes,
                )
                stack.enter_context(storage.applied())
                stack.enter_context(mock.patch.object(Checkpoints, "_limits", storage.limits))
                stack.enter_context(mock.patch.object(checkpoints, "OperatorConfig", config))
            part = cuts.run_checkpointed(
                fn,
                source_of(history, engine, boundary),
                runner=engine.runner,
                store=store,
                tags=TAGS,
                time_sorted=not history.order_free,
                alignment="exactly_once" if history.aligned else "at_least_once",
                key_groups=history.key_groups[number],
                until=None if cut is None else cut / S,
                every=every,
                options=options,
                **windowing,
            )
        count_stored(store, counts)
        expected = run_event_loop(fn, history.elements, until=cut, restored=reference, **windowing)
        reference = expected.state
        saved = cuts.saved_state(store, fn, **windowing)
        assert comparable(program, saved) == comparable(program, expected.state), f"state at {cut}"
        assert store.load_latest().boundary == cut
        assert canonical(part.outputs) == canonical(expected.outputs), f"outputs until {cut}"
        outputs += part.outputs
    assert canonical(outputs) == canonical(
        run_event_loop(fn, history.elements, **windowing).outputs
    )
    return counts


def count_stored(store, counts: Counter[str]) -> None:
    newest = store.load_latest()
    counts[f"{newest.key_group_count} key groups"] += 1
    for _, _, entry in newest.sidecars():
        counts[entry.kind] += 1
        counts["shared"] += entry.is_shared
        counts["inline"] += entry.path is None


def run_chain(chain: Chain, engine, store, source, cut: int | None) -> list[Output]:
    """Both operators under one `Checkpoints`; the second one's main output and tagged ones."""
    history = chain.first
    name = uuid.uuid4().hex
    collected = cuts._COLLECTED[name] = []
    streaming = ["--streaming"] if engine.source != "batch" else []
    arguments = [f"--runner={engine.runner}", *streaming]
    if engine.runner == "PrismRunner":
        arguments += prism_options()
    settings = {
        "until": None if cut is None else cut / S,
        "every": None if history.every is None else history.every / S,
        "key_groups": 3,
    }
    with (
        beam.Pipeline(options=PipelineOptions(arguments)) as p,
        Checkpoints(p, store, **settings) as ckpt,
    ):
        if isinstance(source, StreamPlan):
            live = p | source.to_test_stream()
        elif isinstance(source, ReplayLog):
            live = p | ReadReplay(source)
        else:
            live = p | beam.Create(list(source), reshuffle=False) | beam.Map(cuts._stamp)
        if history.window_fn is not None:
            live |= beam.WindowInto(history.window_fn)
        typed = live | "Typed" >> beam.Map(lambda kv: kv).with_output_types(tuple[str, int])
        ahead = typed | "First" >> ckpt.ParDo(
            dofn(history.program), uid="first", time_sorted=not history.order_free
        )
        middle = ahead | "Between" >> beam.Map(in_ms).with_output_types(tuple[str, int])
        if chain.window_fn is not None or history.window_fn is not None:
            middle |= "Windows" >> beam.WindowInto(
                chain.window_fn or beam.transforms.window.GlobalWindows()
            )
        behind = middle | "Second" >> ckpt.ParDo(
            dofn(chain.second), uid="second", time_sorted=not chain.order_free
        ).with_outputs(*TAGS, main="main")
        for tag in (None, *TAGS):
            _ = behind[tag or "main"] | f"Collect {tag}" >> beam.ParDo(cuts._CollectFn(name, tag))
    del cuts._COLLECTED[name]
    return collected


def in_ms(row, ts=beam.DoFn.TimestampParam, window=beam.DoFn.WindowParam):
    """BundleBasedDirectRunner alone keeps parts of a millisecond on the way to the next stage."""
    at = Timestamp(micros=ts.micros // 1000 * 1000)
    # A TimestampedValue would be put into every window of its time once more.
    return WindowedValue(between(row), at, (window,), PANE_INFO_UNKNOWN)


def check_chain(chain: Chain, engine) -> None:
    history, second = chain.first, dofn(chain.second)
    store = open_store(f"memory://{uuid.uuid4().hex}")
    middle = middle_of(chain)
    outputs, reference = [], None
    for cut in (*history.cuts, None):
        boundary = None if reference is None else reference.boundary
        part = run_chain(chain, engine, store, source_of(history, engine, boundary), cut)
        expected = run_event_loop(
            second, middle, until=cut, restored=reference, window_fn=chain.window_fn
        )
        reference = expected.state
        saved = cuts.saved_state(store, second, uid="second", window_fn=chain.window_fn)
        assert comparable(chain.second, saved) == comparable(chain.second, expected.state), cut
        assert canonical(part) == canonical(expected.outputs), f"outputs until {cut}"
        outputs += part
    whole = run_event_loop(second, middle, window_fn=chain.window_fn)
    assert canonical(outputs) == canonical(whole.outputs)


def holds_on(engine, examples: dict[str, tuple[int, int]], record_property, **drawn) -> None:
    prism = engine.runner == "PrismRunner"
    drawn |= {"streaming": engine.source == "stream", "least_every": 50 * S}
    if prism:  # another lateness is refused there
        drawn["lateness"] = (0,)
        if engine.source != "batch":  # elements of one millisecond may come apart, in any order
            drawn["order_free"] = True
    alone, in_chains = examples[str(engine)]
    counts: Counter[str] = Counter()
    phases = [Phase.explicit, Phase.generate, *([] if prism else [Phase.shrink])]

    def property_of(number: int):
        return settings(
            max_examples=number, derandomize=True, phases=phases,
            suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
        )  # fmt: skip

    @property_of(alone)
    @given(history=histories(max_size=12, **drawn))
    def one(history: History) -> None:
        check_history(history, engine)
        count(history, counts)

    of_first = {**drawn, "lateness": (0,)}

    @property_of(in_chains)
    @given(chain=chains(second_is_order_free=prism or None, max_size=8, **of_first))
    def two(chain: Chain) -> None:
        check_chain(chain, engine)
        count(chain.first, counts)

    one()
    two()
    pipelines = sum(n * (int(what.split()[0]) + 1) for what, n in counts.items() if " cuts" in what)
    record_property(
        "counts", f"{alone} operators and {in_chains} chains, {pipelines} pipelines on {engine}"
    )


def holds_with_everything(examples: int, engine, record_property) -> Counter[str]:
    """Deltas, merges, pages, chunks, spilled values and key groups, all drawn for each run."""
    counts: Counter[str] = Counter()
    drawn = histories(
        max_cuts=2, streaming=False, least_every=25 * S, data=trickles(14, 7, names="aabcd")
    )

    @settings(
        max_examples=examples, derandomize=True, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @example(history=EXAMPLES[0].first, stored=EXAMPLES[0].storages)
    @example(history=EXAMPLES[1].first, stored=EXAMPLES[1].storages)
    @given(history=drawn, stored=st.tuples(*[storages()] * 3))
    def holds(history: History, stored: tuple[Storage, ...]) -> None:
        counts.update(check_history(history, engine, stored))

    holds()
    told = ", ".join(f"{what} {number}" for what, number in sorted(counts.items()))
    record_property("counts", f"{examples} operators on {engine}: {told}")
    return counts


FN_API = pytest.mark.parametrize("engine", ["FnApiRunner-batch"], indirect=True)


@FN_API
def test_with_everything_switched_on_a_cut_changes_nothing(engine, record_property):
    counts = holds_with_everything(5, engine, record_property)
    assert not {what for what in ("full", "delta", "shared", "inline") if not counts[what]}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@FN_API
def test_with_everything_switched_on_a_cut_changes_nothing_at_length(engine, record_property):
    counts = holds_with_everything(60, engine, record_property)
    assert not {what for what in ("full", "delta", "shared", "inline") if not counts[what]}


@pytest.mark.timeout(1200)
def test_generated_dofns_are_cut_exactly(engine, record_property):
    holds_on(engine, FEW, record_property, max_cuts=1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_generated_dofns_are_cut_exactly_at_length(engine, record_property):
    holds_on(engine, MANY, record_property, max_cuts=5)
