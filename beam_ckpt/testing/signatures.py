"""Beam's reading of signatures, done once per function: it takes a third of a small pipeline.

Beam reads the signatures of all methods of a DoFn some ten times a pipeline. What it reads of a
plain function never changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any
from unittest import mock

from apache_beam.transforms import core

__all__ = ["signatures_read_once"]


@contextlib.contextmanager
def signatures_read_once() -> Iterator[None]:
    """While it is open, Beam remembers the signatures of plain functions and methods."""
    read = core.get_function_args_defaults
    known: dict[FunctionType, tuple[list[str], list[Any]]] = {}

    def read_once(method: Any) -> tuple[list[str], list[Any]]:
        function = method.__func__ if isinstance(method, MethodType) else None
        if not isinstance(function, FunctionType) or function.__dict__:  # wrapped, or declared
            names, defaults = read(method)
            return names, defaults
        if function not in known:
            known[function] = read(method)
        names, defaults = known[function]
        return list(names), list(defaults)

    with mock.patch.object(core, "get_function_args_defaults", read_once):
        yield
