"""The settings of checkpoints as pipeline options, so that whoever starts a template sets them.

Each setting of `~beam_ckpt.transforms.Checkpoints` but `migrations` and `renamed` has one. What is
given so wins over what the code says, in all checkpoints of the pipeline, so that a run can be
started elsewhere, or from an older checkpoint, without a change of code. Code wins in one case: a
store that was made by hand (a `~beam_ckpt.CheckpointStore`, which may hold what a URL cannot say)
stays where it is.

    python pipeline.py --checkpoint_store=gs://bucket/ckpt/job --checkpoint_every=60
    python pipeline.py ... --restore_from=before-the-upgrade --checkpoint_keep='5|7d'

Options are read while the pipeline is built and are part of no DoFn. So they work in Flex
Templates, whose pipeline is built with the user's options, and not in classic templates, whose
pipeline was built before there was a user.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.utils.timestamp import Timestamp

from beam_ckpt._durations import parse_duration
from beam_ckpt.errors import PipelineRefusedError
from beam_ckpt.retention import KeepFor, KeepLast, RetentionPolicy

__all__ = ["FAST_STATE_CACHE", "CheckpointOptions", "fast_state_cache", "given_settings"]


@dataclass(frozen=True)
class _Option:
    """One setting: its flag, how its text is read, and what it says of itself."""

    setting: str
    flag: str
    parse: Callable[[str], Any]
    help: str


def _number(text: str) -> int:
    return int(text)


def _seconds(text: str) -> int | float:
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def _moment(text: str) -> int | float | Timestamp:
    return Timestamp.from_rfc3339(text) if "T" in text else _seconds(text)


def _restore(text: str) -> str | int:
    return int(text) if text.isdigit() else text.removeprefix("tag:")


def _keep(text: str) -> int | RetentionPolicy:
    for sign in "|&":
        left, found, right = text.partition(sign)
        if found:
            one, other = _policy(left), _policy(right)
            return one | other if sign == "|" else one & other
    return _policy(text)


def _policy(text: str) -> RetentionPolicy:
    text = text.strip()
    return KeepLast(int(text)) if text.isdigit() else KeepFor(seconds=parse_duration(text))


_OPTIONS = (
    _Option("store", "checkpoint_store", str, "Where checkpoints are: a path or a URL (gs://...)."),
    _Option(
        "every", "checkpoint_every", _seconds, "Interval of checkpoints in seconds of event time."
    ),
    _Option(
        "until",
        "checkpoint_until",
        _moment,
        "Event time at which this run ends: seconds, or RFC 3339 as in 2013-06-01T00:00:00Z.",
    ),
    _Option(
        "restore",
        "restore_from",
        _restore,
        "Where to start: latest, drained, fresh, the id of a checkpoint, or a tag (tag:NAME where "
        "a tag is a number or one of these words).",
    ),
    _Option(
        "keep",
        "checkpoint_keep",
        _keep,
        "Which checkpoints stay: a number, an age as in 7d, or both as in '5|7d' (what either "
        "keeps) and '5&7d' (what both keep).",
    ),
    _Option("key_groups", "checkpoint_key_groups", _number, "Number of parts of keyed state."),
    _Option("alignment", "checkpoint_alignment", str, "exactly_once or at_least_once."),
    _Option(
        "late", "checkpoint_late", str, "What lies below the restored boundary: drop or reprocess."
    ),
    _Option(
        "on_fallback",
        "checkpoint_on_fallback",
        str,
        "Newest checkpoint damaged in a run with an end: refuse, or accept an older one.",
    ),
    _Option(
        "on_missing",
        "checkpoint_on_missing",
        str,
        "Saved state that the pipeline no longer has: error or drop.",
    ),
    _Option(
        "max_files_per_group",
        "checkpoint_max_files_per_group",
        _number,
        "How many files a key group consists of at most.",
    ),
    _Option(
        "inline_threshold",
        "checkpoint_inline_threshold",
        _number,
        "Bytes up to which a delta goes into the manifest, not into a file.",
    ),
    _Option(
        "shared_threshold",
        "checkpoint_shared_threshold",
        _number,
        "Bytes up to which a base or a delta goes into one file with those of other key groups.",
    ),
)


#: No setting of checkpoints: of how Beam runs.
FAST_STATE_CACHE = "checkpoint_fast_state_cache"


class CheckpointOptions(PipelineOptions):
    """The settings of checkpoints as pipeline options; see the module for what wins over what.

    Example:
        >>> options = PipelineOptions(["--checkpoint_every=60"]).view_as(CheckpointOptions)
        >>> options.checkpoint_every
        '60'
    """

    @classmethod
    def _add_argparse_args(cls, parser: argparse.ArgumentParser) -> None:
        for option in _OPTIONS:
            parser.add_argument(f"--{option.flag}", default=None, help=option.help)
        parser.add_argument(
            f"--{FAST_STATE_CACHE}",
            action="store_true",
            default=False,
            help="Make Beam's state cache measure values without a walk over all loaded modules; "
            "see beam_ckpt.transforms.fast_state_cache. It changes Beam in the workers.",
        )


def given_settings(options: PipelineOptions) -> Mapping[str, Any]:
    """Returns the settings that were given as options, by the names that `Checkpoints` has.

    Raises:
        PipelineRefusedError: The text of an option cannot be read.
    """
    view = options.view_as(CheckpointOptions)
    given = {}
    for option in _OPTIONS:
        value = getattr(view, option.flag)
        if value is None:
            continue
        # An option that was set by code may be what the setting is already.
        try:
            given[option.setting] = option.parse(value) if isinstance(value, str) else value
        except ValueError as error:
            raise PipelineRefusedError(
                f"--{option.flag}={value!r} cannot be read: {error}. What to do: {option.help}"
            ) from error
    return given


def fast_state_cache(options: PipelineOptions) -> bool:
    """Tells whether ``--checkpoint_fast_state_cache`` is given."""
    return bool(getattr(options.view_as(CheckpointOptions), FAST_STATE_CACHE))
