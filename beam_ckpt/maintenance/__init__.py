"""Saved state that is changed: rewritten into a checkpoint of its own, or a key of it forgotten.

    >>> from beam_ckpt import maintenance
    >>> maintenance.rewrite("ckpt", rename_operators={"totals": "sums"})    # doctest: +SKIP
    >>> maintenance.rewrite("ckpt", key_groups=16, ttl=7 * 86_400)          # doctest: +SKIP
    >>> maintenance.forget("ckpt", "totals", "ada")                         # doctest: +SKIP

No Beam pipeline is started, and no value is decoded: cells are moved as the coders wrote them.
"""

from __future__ import annotations

from beam_ckpt.maintenance._forget import ForgetReport, forget
from beam_ckpt.maintenance._rewrite import RewriteReport, RewrittenOperator, rewrite

__all__ = ["ForgetReport", "RewriteReport", "RewrittenOperator", "forget", "rewrite"]
