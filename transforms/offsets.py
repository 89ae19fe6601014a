"""From where a source has to read for the next run: the offsets that belong to a cut.

A cut is a point in event time, and a source reads by offset. Where data is out of order the two do
not agree: at boundary ``B`` some elements at or after it have been read already, which the cut does
not hold, and some of later offsets are in it. So what a checkpoint keeps for each partition is the
lowest offset whose event time is not in the cut: a source that reads from there misses nothing at
or after the boundary, and what it reads again from below the boundary is dropped.

The way of the data: `SummariseFn` passes the elements on and sums up each bundle by partition and
epoch; `OffsetsFn`, keyed by partition, keeps the lowest offset of each epoch that is not in a cut
yet, and tells the committer at each boundary. Nothing is written beside the manifest, which has the
positions in ``source_offsets``.

Sources and their offsets:

* **Kafka**: ``partition=lambda r: f"{r.topic}-{r.partition}"``, ``offset=lambda r: r.offset`` (of
  ``ReadFromKafka(with_metadata=True)``). The position is the next offset to consume, as Kafka's own
  committed offsets are: set the consumer group to it before the next run
  (``kafka-consumer-groups --reset-offsets``), or give it to a consumer of your own.
  ``ReadFromKafka(start_read_time=)`` takes `resume_at` instead (in milliseconds), and is exact
  where event time is the record's timestamp.
* **Files**: ``partition`` the file's name, ``offset`` the byte or the number at which a record
  begins. The position is the first byte (number) from which records have to be read; a file that is
  not listed has to be read from its start.
* **Pub/Sub** has no offsets and no order: take the publish time in microseconds for the offset, the
  subscription for the partition, and for `disorder` the longest time a message may take to be
  delivered; then seek the subscription to the position (it has to retain acknowledged messages).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import apache_beam as beam
from apache_beam.coders import coders
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms import userstate
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp
from apache_beam.utils.windowed_value import PANE_INFO_UNKNOWN, WindowedValue

from beam_ckpt.errors import CheckpointTooLargeError
from beam_ckpt.manifest import CheckpointManifest, SourceOffsetEntry
from beam_ckpt.transforms.clocked import ClockedDoFn
from beam_ckpt.transforms.keyed_state.clock import BEFORE_ALL, DRAINED, MS, Epochs
from beam_ckpt.transforms.metrics import counter

__all__ = [
    "OFFSETS",
    "OffsetsFn",
    "ResumeOffsets",
    "SummariseFn",
    "decode_offsets",
    "encode_offsets",
    "next_source_offsets",
]

_LOGGER = logging.getLogger(__name__)

#: Tag of what `SummariseFn` says about a bundle.
OFFSETS = "beam_ckpt_offsets"
#: The epoch of what is at or after a run's last boundary: after all others.
_BEYOND = DRAINED + 1
_MAX_PARTITIONS = 60_000

Summary = tuple[str, list[tuple[int, str, str]]]
"""Of a partition in a bundle: (partition, one (earliest event time, lowest offset, highest offset)
for each epoch). Offsets are of any size, so they travel as text; event time is in microseconds."""


class ResumeOffsets(dict[str, dict[str, int]]):
    """Positions by uid and partition; of a uid that nothing was saved for, none."""

    def __missing__(self, uid: str) -> dict[str, int]:
        return {}

    @classmethod
    def of(cls, manifest: CheckpointManifest | None) -> ResumeOffsets:
        """Returns those of a checkpoint; none of no checkpoint."""
        entries = {} if manifest is None else manifest.source_offsets
        return cls(
            {
                uid: {partition: int(position) for partition, position in entry.offsets.items()}
                for uid, entry in entries.items()
            }
        )


class SummariseFn(beam.DoFn):
    """Passes elements on; at the end of a bundle, what it has seen of each partition (`OFFSETS`).

    Args:
        uid: Of the source, for errors.
        partition: Element to its partition, a string or an int.
        offset: Element to its offset, an int.
        epochs: The run's boundaries.
    """

    def __init__(
        self,
        uid: str,
        partition: Callable[[Any], str | int],
        offset: Callable[[Any], int],
        epochs: Epochs,
    ) -> None:
        self._uid, self._partition, self._offset, self._epochs = uid, partition, offset, epochs
        self._seen: dict[tuple[str, int], tuple[int, int, int, Any]] = {}

    def start_bundle(self) -> None:
        self._seen = {}

    def process(
        self,
        element: Any,
        timestamp: Any = beam.DoFn.TimestampParam,
        window: Any = beam.DoFn.WindowParam,
    ) -> Iterator[Any]:
        partition, offset = self._partition(element), self._offset(element)
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise TypeError(
                f"TrackOffsets {self._uid!r}: offset= gave a {type(offset).__name__}. What to do: "
                "let it give an int that ascends within a partition."
            )
        if not isinstance(partition, (str, int)):
            raise TypeError(
                f"TrackOffsets {self._uid!r}: partition= gave a {type(partition).__name__}. What "
                "to do: let it give a string or an int."
            )
        at: int = timestamp.micros
        key = str(partition), _epoch_end(self._epochs, at)
        seen = self._seen.get(key)
        if seen is None:
            self._seen[key] = at, offset, offset, window
        else:
            first, low, high, seen_window = seen
            self._seen[key] = min(first, at), min(low, offset), max(high, offset), seen_window
        yield element

    def finish_bundle(self) -> Iterator[Any]:
        partitions: dict[str, tuple[list[tuple[int, str, str]], Any]] = {}
        for (partition, _), (at, low, high, window) in self._seen.items():
            epochs, _ = partitions.setdefault(partition, ([], window))
            epochs.append((at, str(low), str(high)))
        for partition, (epochs, window) in partitions.items():
            # Once before all event time: a runner may keep what is younger than the watermark back
            # until the watermark is there (Prism does), and what is not in a cut has to be known at
            # the cut. And once at the earliest event time, which the watermark waits for.
            earliest = Timestamp(micros=min(at for at, _, _ in epochs))
            for moment in (MIN_TIMESTAMP, earliest):
                summary = WindowedValue((partition, epochs), moment, (window,), PANE_INFO_UNKNOWN)
                yield TaggedOutput(OFFSETS, summary)
        self._seen = {}


class OffsetsFn(ClockedDoFn):
    """Summaries to (0, (boundary, positions)): of a partition, at each boundary that moves it.

    Args:
        uid: Of the source; makes the timer family unique.
        epochs: The run's boundaries.
        boundary: The boundary restored at, µs, or `None`.
        positions: By partition, as restored.
        disorder: How far behind the highest offset seen an unseen one may still be.
    """

    # As JSON; see `_Progress`.
    _PROGRESS = userstate.ReadModifyWriteStateSpec("progress", coders.BytesCoder())

    def __init__(
        self,
        uid: str,
        epochs: Epochs,
        boundary: int | None,
        positions: Mapping[str, int],
        disorder: int,
    ) -> None:
        self._arguments = uid, epochs, boundary, dict(positions), disorder
        self._uid, self._epochs, self._disorder = uid, epochs, disorder
        self._boundary = BEFORE_ALL if boundary is None else boundary
        self._positions = dict(positions)
        self.declare(
            f"ckpt_offsets_{uid}",
            {"progress": self._PROGRESS},
            on_clock=[("key", beam.DoFn.KeyParam), ("timestamp", beam.DoFn.TimestampParam)],
        )
        self._behind = counter("offsets_behind_a_checkpoint")

    def __reduce__(self) -> tuple[Any, ...]:
        return OffsetsFn, self._arguments

    def process(self, element: Any, progress: Any, clock: Any) -> None:
        partition, summaries = element
        state = _Progress.load(progress)
        if state is None:
            position = self._positions.get(partition)
            state = _Progress(self._boundary, position, position)
        for at, low, high in summaries:
            self._take_note(state, at, int(low), int(high))
        self._arm(state, clock)
        state.store(progress)

    def _take_note(self, state: _Progress, at: int, low: int, high: int) -> None:
        if at >= state.cut and state.position is not None and low < state.position:
            # It came behind elements of higher offsets, after the boundary had been passed.
            self._behind.inc()
            _LOGGER.warning(
                "source %r: an element at or after boundary %s came out of order behind the offset "
                "that the checkpoint of it resumes at. The next checkpoint is right again; give "
                "TrackOffsets the source's `disorder`.",
                self._uid, _date(state.cut),
            )  # fmt: skip
            # Not only when the element's own epoch ends, but at the very next boundary.
            state.note(_epoch_end(self._epochs, state.cut), low)
        # What comes late belongs to the epoch that is open.
        state.note(_epoch_end(self._epochs, max(at, state.cut)), low)
        state.next = high + 1 if state.next is None else max(state.next, high + 1)

    def _on_clock(self, key: Any, timestamp: Any, progress: Any, clock: Any) -> Iterator[Any]:
        state = _Progress.load(progress)
        if state is None:
            return
        reached = timestamp.micros - MS
        for end in sorted(int(end) for end in state.lowest if int(end) <= reached):
            del state.lowest[str(end)]
            assert state.next is not None
            state.cut = end
            state.position = min([*state.lowest.values(), state.next - self._disorder])
            yield TimestampedValue(
                (0, (end, encode_offsets(self._uid, {key: state.position}))),
                Timestamp(micros=end + MS),
            )
        # Also where nothing was due: some runners drop the clock with a stale fire of it.
        state.due = None
        self._arm(state, clock)
        state.store(progress)

    def _arm(self, state: _Progress, clock: Any) -> None:
        due = min((int(end) for end in state.lowest if int(end) != _BEYOND), default=None)
        if due is not None and due != state.due:
            clock.set(Timestamp(micros=due + MS))
            state.due = due


class _Progress:
    """The memory of a partition.

    Attributes:
        cut: The last boundary that its position was told of, µs.
        position: As told then, or as restored; `None`: never.
        next: The position after the highest offset seen; `None`: none seen.
        lowest: The lowest offset by the end (µs, as text) of each epoch that is in no cut yet.
        due: What the clock is set for, as the end of an epoch.
    """

    __slots__ = ("cut", "due", "lowest", "next", "position")

    def __init__(self, cut: int, position: int | None, next: int | None) -> None:
        self.cut, self.position, self.next = cut, position, next
        self.lowest: dict[str, int] = {}
        self.due: int | None = None

    def note(self, end: int, offset: int) -> None:
        """Takes note of an offset that stays out of all cuts before `end`."""
        key = str(end)
        self.lowest[key] = min(offset, self.lowest.get(key, offset))

    @classmethod
    def load(cls, cell: Any) -> _Progress | None:
        data = cell.read()
        if data is None:
            return None
        cut, position, next, lowest, due = json.loads(data)
        self = cls(cut, position, next)
        self.lowest, self.due = lowest, due
        return self

    def store(self, cell: Any) -> None:
        values = [self.cut, self.position, self.next, self.lowest, self.due]
        cell.write(json.dumps(values).encode())


def _epoch_end(epochs: Epochs, at: int) -> int:
    return epochs.end_of(at) if at < epochs.last else _BEYOND


def _date(micros: int) -> str:
    return "none" if micros == BEFORE_ALL else str(Timestamp(micros=micros))


# ---------------------------------------------------------------------- on the way to the manifest
def encode_offsets(uid: str, positions: Mapping[str, int]) -> bytes:
    """Positions on their way to the committer, as bytes; no `NewSidecar` has such bytes."""
    texts = {partition: str(position) for partition, position in positions.items()}
    return json.dumps({"source": uid, "offsets": texts}).encode()


def decode_offsets(data: bytes) -> tuple[str, dict[str, str]] | None:
    """The uid and positions; `None` of other bytes that go to the committer."""
    if not data.startswith(b"{"):
        return None
    values = json.loads(data)
    return values["source"], values["offsets"]


def next_source_offsets(
    base: Mapping[str, SourceOffsetEntry],
    types: Mapping[str, str],
    new: list[tuple[str, dict[str, str]]],
    epoch: int,
) -> dict[str, SourceOffsetEntry]:
    """Returns the source offsets of the next manifest.

    Args:
        base: Those of the manifest before it.
        types: The sources of this pipeline by uid, with their types.
        new: What was told since, in order.
        epoch: Of the next checkpoint.

    Raises:
        CheckpointTooLargeError: More partitions than a manifest holds.
    """
    entries = {}
    for uid, source_type in sorted(types.items()):
        offsets = dict(base[uid].offsets) if uid in base else {}
        for source, positions in new:
            if source == uid:
                offsets.update(positions)
        if len(offsets) > _MAX_PARTITIONS:
            raise CheckpointTooLargeError(
                f"source {uid!r} has {len(offsets)} partitions, {_MAX_PARTITIONS} allowed in a "
                "manifest. What to do: let partition= give fewer, such as folders, not files."
            )
        entries[uid] = SourceOffsetEntry(
            source_type=source_type, offsets=dict(sorted(offsets.items())), epoch=epoch
        )
    return entries
