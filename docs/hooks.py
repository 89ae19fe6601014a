"""What mkdocs runs when it builds the book: the page of the command, and docstrings as Markdown."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer.main

import beam_ckpt.cli

try:
    from griffe import Extension
except ImportError:  # The page of the command needs none of it.
    Extension = object  # type: ignore[misc,assignment]


def on_files(files: Any, config: Any) -> Any:
    """Adds the page of the command."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "commands.md", content=command_page()))
    return files


def command_page() -> str:
    """Returns the reference of `beam-ckpt` as Markdown, from the program that is installed."""
    return "\n".join(_page()).rstrip() + "\n"


def _page() -> Iterator[str]:
    app = beam_ckpt.cli.app
    group: Any = typer.main.get_command(app)
    functions = {
        info.name or info.callback.__name__.replace("_", "-"): info.callback
        for info in app.registered_commands
        if info.callback is not None
    }
    yield "# The command\n"
    yield f"{group.help}\n"
    yield "This page is made from the program itself; `beam-ckpt COMMAND --help` says the same.\n"
    panels: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        panel = command.rich_help_panel
        panels.setdefault(panel if isinstance(panel, str) else "A look at a store", []).append(name)
    for panel, names in panels.items():
        yield f"## {panel}\n"
        # A panel's commands are those of a module, whose docstring has their exit statuses.
        yield "\n".join(_statuses(sys.modules[functions[names[0]].__module__].__doc__ or "")) + "\n"
        for name in names:
            yield from _command(name, group.commands[name], functions[name])


def _statuses(text: str) -> Iterator[str]:
    yield "| exit status | means |\n|---|---|"
    _, _, listed = text.partition("Exit status:\n")
    found = re.findall(r"^    (\d)  (.*(?:\n {7}.*)*)", listed, re.MULTILINE)
    if not found:
        raise ValueError(f"no exit statuses in: {text[:60]}")
    for status, meaning in found:
        yield f"| {status} | {' '.join(meaning.split())} |"


def _command(name: str, command: Any, function: Callable[..., Any]) -> Iterator[str]:
    types = get_type_hints(function)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    yield f"### beam-ckpt {name} {{ #{name} }}\n"
    yield f"{_markdown(command.help)}\n"
    usage = " ".join(
        a.metavar if a.required else f"[{a.metavar}]" for a in map(_Argument, arguments)
    )
    yield f"```text\nbeam-ckpt {name} {usage}{' [OPTIONS]' if options else ''}\n```\n"
    yield "| argument or option | means |\n|---|---|"
    for argument in map(_Argument, arguments):
        yield f"| `{argument.metavar}` | {_cell(argument.help)} |"
    for option in options:
        names = ", ".join(f"`{n}`" for n in (*option.opts, *option.secondary_opts))
        kind = _one(types[option.name])
        value = "" if option.is_flag else f" `{option.metavar or _KINDS.get(kind, 'NAME')}`"
        choices = list(kind) if issubclass(kind, Enum) else []
        told = [_cell(option.help)]
        told += ["One of " + ", ".join(f"`{_plain(c)}`" for c in choices) + "."] * bool(choices)
        told += ["Default: `" + str(_plain(option.default)) + "`."] * _has_default(option)
        told += ["Has to be given."] * bool(option.required)
        told += ["May be given more than once."] * bool(option.multiple)
        yield f"| {names}{value} | {' '.join(told)} |"
    yield ""


class _Argument:
    """An argument as the usage line shows it."""

    def __init__(self, parameter: Any) -> None:
        self.metavar: str = parameter.metavar or parameter.name.upper()
        if parameter.nargs != 1 and not self.metavar.endswith("..."):
            self.metavar += "..."
        self.required: bool = parameter.required
        self.help: str = parameter.help or ""


_KINDS = {int: "N", float: "NUMBER", str: "TEXT", Path: "FILE"}


def _one(kind: Any) -> type:
    """The type of one value: `int` of `list[int] | None`."""
    while not isinstance(kind, type) or get_args(kind):
        kind = get_args(kind)[0]
    assert isinstance(kind, type)
    return kind


def _has_default(option: Any) -> bool:
    if option.is_flag:
        return bool(option.secondary_opts) and isinstance(option.default, bool)
    return isinstance(option.default, str | int | float)


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return getattr(value, "value", value)


def _cell(text: str | None) -> str:
    if not text:
        raise ValueError("an argument or option without help")
    return " ".join(text.split()).replace("|", "\\|")


def _markdown(text: str | None) -> str:
    """Help as it was written, without its indentation."""
    if not text:
        raise ValueError("a command without help")
    return "\n".join(line.strip() for line in text.strip().splitlines())


# Links of Sphinx, `~a.b.C`, are names here; a block that is announced by two colons is indented.
_LINK = re.compile(r"`~(?:\w+\.)*(\w+)`")
_ANNOUNCED = re.compile(r"::\n(?=\n? {4})")


class PlainMarkdown(Extension):
    """Turns the little of reStructuredText that our docstrings have into Markdown."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Changes the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            text = _LINK.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _ANNOUNCED.sub(":\n", text)
