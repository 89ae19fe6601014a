"""What the tests of this library, of pipelines and of other stores stand on.

For whoever writes a stateful DoFn, both loaded when first used:

* `assert_cut_equivalent`: does it survive a restart?
* `state_of`: what a checkpoint holds.

And the parts:

* `beam_ckpt.testing.store`: the conformance suite of a `CheckpointStore`; subclass it.
* `beam_ckpt.testing.faults`: a wrapper that kills, fails or delays a store's n-th operation.
* `beam_ckpt.testing.prism`: a Prism binary, found or built.
* `beam_ckpt.testing.replay`: a real unbounded source, out of order, from any moment on.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from beam_ckpt.testing.equivalence import assert_cut_equivalent as assert_cut_equivalent
    from beam_ckpt.testing.equivalence import state_of as state_of

__all__ = ["assert_cut_equivalent", "state_of"]


def __getattr__(name: str) -> object:
    # Loaded when first used: the suite of a store needs no Beam.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.equivalence"), name)
    globals()[name] = value
    return value
