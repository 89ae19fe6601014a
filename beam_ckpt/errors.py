"""The errors of `beam_ckpt`: one base, and each also the builtin that a caller would catch.

A message says what was found, where, and what to do next. Errors are raised with their
message ready made; none carries credentials (URLs in messages are redacted).

Example:
    >>> try:
    ...     raise CheckpointNotFoundError("checkpoint 7 not found")
    ... except FileNotFoundError as e:
    ...     print(type(e).__name__, e)
    CheckpointNotFoundError checkpoint 7 not found
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from beam_ckpt.recovery import RecoveryReport

__all__ = [
    "CheckpointConflictError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointStorageError",
    "CheckpointTooLargeError",
    "FallbackRefusedError",
    "FencedError",
    "IndeterminateError",
    "InvalidCheckpointError",
    "NoValidCheckpointError",
    "PipelineRefusedError",
    "StateIncompatibleError",
    "StoreUrlError",
    "UnsupportedFormatError",
    "WatermarkError",
]


class CheckpointError(Exception):
    """Base of every error of this library."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A checkpoint, store or tag that was asked for by name does not exist."""


class CheckpointConflictError(CheckpointError, FileExistsError):
    """An immutable name already holds other content."""


class FencedError(CheckpointError, RuntimeError):
    """This run has been superseded: a younger run owns the store. Stop; do not retry."""


class InvalidCheckpointError(CheckpointError, ValueError):
    """A manifest, sidecar or pointer is malformed, truncated, swapped or does not match."""


class UnsupportedFormatError(InvalidCheckpointError):
    """The object was written in a format version that this library does not know."""


class CheckpointTooLargeError(CheckpointError, ValueError):
    """State, a manifest or an inventory is over its limit."""


class CheckpointStorageError(CheckpointError, OSError):
    """The storage refused or failed an operation. `errno` is kept where there is one."""


class IndeterminateError(CheckpointStorageError):
    """The outcome of a write is not known after the retry budget: it may still have happened.

    Do not assume failure: read back (all operations of a store are safe to repeat).
    """


class StoreUrlError(CheckpointError, ValueError):
    """A store URL or path cannot be used: malformed, a file, or refused for writing."""


class _ReportingError(CheckpointError):
    """An error that carries a recovery report through pickling."""

    report: RecoveryReport | None


class NoValidCheckpointError(_ReportingError, LookupError):
    """A store has checkpoints, but none can be restored. Never means "start afresh".

    Attributes:
        report: What was examined, and why each checkpoint was skipped.
    """

    def __init__(self, message: str, report: RecoveryReport | None = None) -> None:
        """Keeps the report beside the message."""
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type[NoValidCheckpointError], tuple[object, ...]]:
        """Pickles with the report."""
        return type(self), (self.args[0], self.report)


class FallbackRefusedError(_ReportingError, RuntimeError):
    """The newest checkpoint is damaged, and falling back to an older one would not be exact.

    Attributes:
        newest_boundary: Event time in microseconds of the damaged one; `None` when it was
            taken at the drained end of its input, or when its boundary cannot be read.
        chosen_boundary: Event time in microseconds of the one that could be restored; `None`
            for the drained end.
        report: What was examined, and why each checkpoint was skipped.
    """

    def __init__(
        self,
        message: str,
        newest_boundary: int | None = None,
        chosen_boundary: int | None = None,
        report: RecoveryReport | None = None,
    ) -> None:
        """Keeps both boundaries and the report beside the message."""
        super().__init__(message)
        self.newest_boundary = newest_boundary
        self.chosen_boundary = chosen_boundary
        self.report = report

    def __reduce__(self) -> tuple[type[FallbackRefusedError], tuple[object, ...]]:
        """Pickles with its attributes."""
        return type(self), (
            self.args[0],
            self.newest_boundary,
            self.chosen_boundary,
            self.report,
        )


class StateIncompatibleError(CheckpointError, ValueError):
    """A saved cell has another coder or kind than the pipeline's."""


class PipelineRefusedError(CheckpointError, ValueError):
    """A pipeline was refused: while it was being built, or when what it cannot use came in."""


class WatermarkError(CheckpointError, RuntimeError):
    """The runner let the watermark pass what was still to come, so that a cut would not be one."""
