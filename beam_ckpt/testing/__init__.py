"""What the tests of this library, of pipelines and of other stores stand on.

* `beam_ckpt.testing.store`: the conformance suite of a `CheckpointStore`; subclass it.
* `beam_ckpt.testing.faults`: a wrapper that kills, fails or delays a store's n-th operation.
* `beam_ckpt.testing.prism`: a Prism binary, found or built.
* `beam_ckpt.testing.replay`: a real unbounded source, out of order, from any moment on.
"""
