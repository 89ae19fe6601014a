"""A store on one page: when checkpoints were taken, what is in them, and what goes next.

    >>> from beam_ckpt import reporting
    >>> page = reporting.report("ckpt")                                     # doctest: +SKIP

The page is one file of HTML with its pictures in it. It runs no script and asks for nothing: it
says so itself, by a content security policy.
"""

from __future__ import annotations

from beam_ckpt.reporting._page import report

__all__ = ["report"]
