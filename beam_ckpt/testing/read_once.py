"""What Beam reads many times in a pipeline and never changes, read once.

In pipelines as small as those of tests it is more than half of the time: Beam reads the signatures
of all methods of a DoFn some ten times a pipeline, parses the command line at each of some two
hundred looks at an option, and goes through all loaded modules for each value that its state cache
takes in.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from argparse import Namespace
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any
from unittest import mock

import objsize.traverse
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms import core

__all__ = ["beam_reads_once"]


@contextlib.contextmanager
def beam_reads_once() -> Iterator[None]:
    """While it is open, Beam remembers what it read of functions, command lines and modules."""
    with (
        mock.patch.object(objsize.traverse, "_iter_modules_globals", _globals_listed_once()),
        mock.patch.object(core, "get_function_args_defaults", _signatures_read_once()),
        mock.patch.object(PipelineOptions, "view_as", _options_parsed_once()),
    ):
        yield


def _signatures_read_once() -> Any:
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

    return read_once


def _globals_listed_once() -> Any:
    walk = objsize.traverse._iter_modules_globals
    listed: list[Any] = []
    modules = 0

    def list_once() -> list[Any]:
        nonlocal listed, modules
        if len(sys.modules) != modules:
            listed, modules = list(walk()), len(sys.modules)
        return listed

    return list_once


def _options_parsed_once() -> Any:
    parsed: dict[tuple[type, tuple[str, ...]], Namespace] = {}

    def view_as(self: Any, cls: type[PipelineOptions]) -> Any:
        # As Beam's own method does it, but for the parser that it makes each time.
        if self._flags is None:  # from sys.argv, which may change
            visible = cls(None)._visible_options
        else:
            command_line = (cls, tuple(self._flags))
            if command_line not in parsed:
                parsed[command_line] = cls(self._flags)._visible_options
            visible = copy.deepcopy(parsed[command_line])
        for name, value in vars(visible).items():
            self._all_options.setdefault(name, value)
        view = cls.__new__(cls)
        view.__dict__.update(
            _flags=self._flags, _visible_options=visible, _all_options=self._all_options
        )
        return view

    return view_as
