"""What exact checkpoints take on each runner, and nowhere else.

Everything rests on one promise of the Beam model: the watermark downstream of a stage is held by
the stage's timers. Prism, Flink and Dataflow keep it. FnApiRunner keeps it between stages, so each
step with a clock begins its stage (`AloneInItsStage`), unless all that is before it in the stage is
done in one go (`comes_in_one_go`); BundleBasedDirectRunner does not keep it ("add corresponding
watermark holds", a TODO in its source), but it knows keyed holds, so it can be taught to
(`prepare`).

And on one more: a key is in one bundle at a time. Prism breaks it when it splits a bundle that is
slow, unless it is told not to split (`prepare`).
"""

from __future__ import annotations

import inspect
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import DebugOptions, DirectOptions, GoogleCloudOptions
from apache_beam.transforms.sideinputs import SIDE_INPUT_PREFIX
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.window import GlobalWindows
from apache_beam.utils.timestamp import Duration

from beam_ckpt.errors import PipelineRefusedError

__all__ = [
    "AloneInItsStage",
    "DeclareWindowing",
    "NothingFn",
    "StatefulParDo",
    "check_lateness",
    "fires_each_timer_once",
    "prepare",
    "reads_in_one_bundle",
    "takes_over_a_running_job",
]


class DeclareWindowing(beam.ParDo):
    """A ParDo whose output has the given windowing: its DoFn emits values with their windows.

    Beam's ``WindowInto`` would assign new windows and drop the allowed lateness.
    """

    def __init__(self, fn: beam.DoFn, windowing: Any) -> None:
        if _has_lateness(windowing):
            # DirectRunner looks for this name, and then does not take Prism; see `check_lateness`.
            fn.is_materialize_values_do_fn = True  # type: ignore[attr-defined]
        super().__init__(fn)
        self._windowing = windowing

    def get_windowing(self, inputs: Any) -> Any:
        return self._windowing


class StatefulParDo(beam.ParDo):
    """A ParDo of a stateful DoFn, which may have side inputs.

    Beam's own takes the key coder from the main input or from a side input, whichever comes first
    in a set (https://github.com/apache/beam/issues/19216), and its own way to tell side inputs
    apart knows other names than those that it gives them.
    """

    def _get_key_and_window_coder(self, named_inputs: Any) -> Any:
        main = {
            name: pcoll
            for name, pcoll in (named_inputs or {}).items()
            if not name.startswith(SIDE_INPUT_PREFIX)
        }
        return super()._get_key_and_window_coder(main)


class NothingFn(beam.DoFn):
    """Lets nothing through but the watermark."""

    def process(self, element: Any) -> Any:
        return ()


class AloneInItsStage(beam.PTransform[Any, Any]):
    """Keeps FnApiRunner from fusing the next stateful stage with this one; free on other runners.

    The timers of a fused stage fire in rounds with no watermark in between. A Flatten with an
    empty PCollection of the same type, coder and windowing ends the stage. (With another windowing
    Prism loses the input.)
    """

    def expand(self, pcoll: Any) -> Any:
        nothing = (
            pcoll.pipeline
            | beam.Impulse()
            | "Nothing"
            >> DeclareWindowing(NothingFn(), pcoll.windowing).with_output_types(pcoll.element_type)
        )
        return (pcoll, nothing) | beam.Flatten()


def takes_over_a_running_job(pipeline: beam.Pipeline) -> bool:
    """Tells whether the runner gives the pipeline the state of a job that runs: ``--update``.

    Dataflow carries over state, timers and what is on its way, by the names of transforms. Saved
    records would meet keys that have gone on since.
    """
    return bool(pipeline.options.view_as(GoogleCloudOptions).update)


def fires_each_timer_once(pipeline: beam.Pipeline) -> bool:
    """Tells whether the runner is known to fire a timer at most once for each time it was set.

    FnApiRunner takes the timers that a bundle set, puts each into one later bundle, and retries
    none. (One that was set anew or cleared by a later bundle still fires there.)
    """
    from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner

    return isinstance(pipeline.runner, FnApiRunner)


def reads_in_one_bundle(pipeline: beam.Pipeline) -> bool:
    """Tells whether the runner is known to give a stage all of a bounded input in one bundle.

    FnApiRunner does: the input of a stage is an Impulse or what other stages wrote. (A splittable
    DoFn in it may come back for more: see `comes_in_one_go`.)
    """
    from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner

    return isinstance(pipeline.runner, FnApiRunner)


def prepare(pipeline: beam.Pipeline) -> None:
    """Makes ready for the pipeline's runner, or refuses.

    Raises:
        PipelineRefusedError: The runner is, or may become, BundleBasedDirectRunner, in a version of
            Beam whose internals are not those that this module knows; or FnApiRunner with several
            threads as workers.
    """
    from apache_beam.runners.direct.direct_runner import (
        BundleBasedDirectRunner,
        SwitchingDirectRunner,
    )
    from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
    from apache_beam.runners.portability.portable_runner import PortableRunner

    if isinstance(pipeline.runner, (FnApiRunner, SwitchingDirectRunner)):
        _check_workers(pipeline)
    if isinstance(pipeline.runner, (PortableRunner, SwitchingDirectRunner)):
        _keep_prism_from_splitting(pipeline)
    if isinstance(pipeline.runner, (BundleBasedDirectRunner, SwitchingDirectRunner)):
        _give_bundle_based_timer_holds()


def _check_workers(pipeline: beam.Pipeline) -> None:
    """Refuses workers that are threads of one process, each with a stale state cache of its own."""
    options = pipeline.options.view_as(DirectOptions)
    if options.direct_running_mode == "multi_threading" and options.direct_num_workers != 1:
        raise PipelineRefusedError(
            "--direct_running_mode=multi_threading with "
            f"--direct_num_workers={options.direct_num_workers}: each of these threads has a cache "
            "of state of its own, and loses what others write. What to do: take one worker, or "
            "--direct_running_mode=multi_processing."
        )


def check_lateness(pcoll: Any, uid: str) -> None:
    """Refuses windows with an allowed lateness on Prism, which drops state at a window's end.

    (It knows the lateness of a GroupByKey's windows only. `DirectRunner`, which may take Prism, is
    kept from it.)

    Raises:
        PipelineRefusedError: Names the operator and the way out.
    """
    from apache_beam.runners.portability.prism_runner import PrismRunner

    if isinstance(pcoll.pipeline.runner, PrismRunner) and _has_lateness(pcoll.windowing):
        raise PipelineRefusedError(
            f"the windows of operator {uid!r} have an allowed lateness, and Prism drops a window's "
            "state at its end, so that late elements would meet none. What to do: take "
            "allowed_lateness=0, or another runner."
        )


def _has_lateness(windowing: Any) -> bool:
    # An author's own `Windowing` may have any duration; in the global window nothing is ever late.
    return bool(
        windowing.windowfn != GlobalWindows() and Duration.of(windowing.allowed_lateness).micros
    )


def _keep_prism_from_splitting(pipeline: beam.Pipeline) -> None:
    """Sets the experiment by which Prism splits no bundles; other runners do not know it.

    It splits a bundle of which nothing is heard for some 200 ms, wherever it stands, those of
    stateful stages too. Then the rest of a key's elements run in a second bundle beside the first,
    both from the same state, and the one that ends later overwrites what the other left; where
    there are timers in the bundle, elements are processed twice as well
    (https://github.com/apache/beam/issues/35771).
    """
    pipeline.options.view_as(DebugOptions).add_experiment("prism_disable_sdf_split")


def _give_bundle_based_timer_holds() -> None:
    """After a bundle, each key's earliest event-time timer holds the output watermark."""
    from apache_beam.runners.direct import transform_evaluator
    from apache_beam.runners.direct.util import TransformResult

    evaluator = transform_evaluator._ParDoEvaluator
    if getattr(evaluator, "_beam_ckpt_holds", False):
        return
    known = (
        list(inspect.signature(evaluator.process_timer).parameters) == ["self", "timer_firing"]
        and list(inspect.signature(evaluator.finish_bundle).parameters) == ["self"]
        and "keyed_watermark_holds" in inspect.signature(TransformResult.__init__).parameters
    )
    if not known:
        raise PipelineRefusedError(
            f"BundleBasedDirectRunner of Beam {beam.__version__} lets the watermark pass pending "
            "timers, and its internals are not the ones that beam_ckpt can correct, so that "
            "checkpoints could be published incomplete. What to do: use runner=PrismRunner or "
            "FnApiRunner, or a version of beam_ckpt that knows this version of Beam."
        )
    process_timer, finish_bundle = evaluator.process_timer, evaluator.finish_bundle

    def process_timer_noting_key(self: Any, timer_firing: Any) -> None:
        self.__dict__.setdefault("_beam_ckpt_keys", set()).add(timer_firing.encoded_key)
        process_timer(self, timer_firing)

    def finish_bundle_with_holds(self: Any) -> Any:
        keys = self.__dict__.get("_beam_ckpt_keys", set())
        if self.user_state_context is not None:
            keys |= {key for key, _, _ in self.user_state_context.cached_timers}
        result = finish_bundle(self)
        for key in keys:
            pending = [
                time
                for timers in self._step_context.get_keyed_state(key).timers.values()
                for (_, domain, _), time in timers.items()
                if domain == TimeDomain.WATERMARK
            ]
            result.keyed_watermark_holds[key] = min(pending, default=None)
        return result

    for name, value in (
        ("process_timer", process_timer_noting_key),
        ("finish_bundle", finish_bundle_with_holds),
        ("_beam_ckpt_holds", True),
    ):
        setattr(evaluator, name, value)
