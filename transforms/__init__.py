"""The Beam side of `beam_ckpt`: transforms that save and restore keyed state exactly."""

from beam_ckpt.transforms.bootstrap import WriteState
from beam_ckpt.transforms.checkpoints import CheckpointedParDo, Checkpoints
from beam_ckpt.transforms.committer import CheckpointResult
from beam_ckpt.transforms.options import CheckpointOptions
from beam_ckpt.transforms.state_io import PruneCheckpoints, ReadState, RestoreState

__all__ = [
    "CheckpointOptions",
    "CheckpointResult",
    "CheckpointedParDo",
    "Checkpoints",
    "PruneCheckpoints",
    "ReadState",
    "RestoreState",
    "WriteState",
]
