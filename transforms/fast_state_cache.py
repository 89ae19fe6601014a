"""A correction of Beam's state cache, for those who ask: ``--checkpoint_fast_state_cache``.

The worker's state cache measures each value that it takes in, so as to stay within its size. It
asks objsize, which first collects the globals of all loaded modules, for every single value: 0.3 to
1 ms for each cell that is read or written, per key and bundle; three quarters of a whole run where
there are many keys. The walk finds what a value shares with modules, so that it is not counted;
values of state have been decoded from bytes, and share nothing.

The correction tells objsize to leave the walk out. It changes Beam in the worker's process, for all
that runs in it, and nothing but how values are measured: which values are kept in the cache, and
what is read from it, is as before. It is off unless the option is given, and done only to a Beam
whose internals are the known ones; otherwise there is a warning in the log and everything stays as
it is. (The cache is on in FnApiRunner, and elsewhere with ``--max_cache_memory_usage_mb``.)
"""

from __future__ import annotations

import inspect
import logging
import types
from typing import Any

import apache_beam as beam

__all__ = ["correct_state_cache"]

_LOGGER = logging.getLogger(__name__)

#: Versions of Beam that this was tried with.
KNOWN_VERSIONS = ("2.77.",)
#: What the known `get_deep_size` refers to, in order.
_KNOWN_NAMES = ("objsize", "get_deep_size", "_size_func", "_get_referents_func", "_filter_func")
_OPTION = "exclude_modules_globals"


def correct_state_cache(module: types.ModuleType | None = None) -> bool:
    """Makes the state cache of this process measure without the walk over all modules.

    Args:
        module: In place of ``apache_beam.runners.worker.statecache``.

    Returns:
        Whether it does so now. Where not, the log says why.
    """
    if module is None:
        from apache_beam.runners.worker import statecache as module
    original = getattr(module, "get_deep_size", None)
    if getattr(original, "_beam_ckpt_corrected", False):
        return True
    reason = _unknown(module, original)
    if reason:
        _LOGGER.warning(
            "--checkpoint_fast_state_cache does nothing: %s. State is measured as Beam %s does it.",
            reason, beam.__version__,
        )  # fmt: skip
        return False
    known: Any = module
    objsize, options = (
        known.objsize,
        {
            "get_size_func": known._size_func,
            "get_referents_func": known._get_referents_func,
            "filter_func": known._filter_func,
            _OPTION: False,
        },
    )

    def get_deep_size(*objs: Any) -> int:
        return int(objsize.get_deep_size(*objs, **options))

    get_deep_size._beam_ckpt_corrected = True  # type: ignore[attr-defined]
    known.get_deep_size = get_deep_size
    return True


def _unknown(module: Any, function: Any) -> str:
    """Why these internals are not the known ones; empty if they are."""
    if not beam.__version__.startswith(KNOWN_VERSIONS):
        return f"Beam {beam.__version__} is not one of the versions that it knows"
    code = getattr(function, "__code__", None)
    if code is None or code.co_names != _KNOWN_NAMES:
        return "the state cache measures in a way that it does not know"
    measure = getattr(module.objsize, "get_deep_size", None)
    if measure is None or _OPTION not in inspect.signature(measure).parameters:
        return f"objsize has no option {_OPTION!r}"
    return ""
