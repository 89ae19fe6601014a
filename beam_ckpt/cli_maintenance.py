"""The commands of `beam-ckpt` that maintain a store.

    beam-ckpt recover STORE                   which checkpoint would be restored, and why
    beam-ckpt repair-pointer STORE            point latest.json at the newest valid checkpoint
    beam-ckpt tag STORE NAME ID               name a checkpoint: retention keeps it
    beam-ckpt untag STORE NAME                remove the name
    beam-ckpt tags STORE                      the names
    beam-ckpt prune STORE --keep-last N       delete old checkpoints, and the files only they list
    beam-ckpt gc STORE                        delete files that no checkpoint can list any more
    beam-ckpt copy SRC DST                    copy checkpoints, verified, to another place

`prune` and `gc` print what goes before it goes, and ask; `--yes` answers, and is needed where
there is no terminal to ask on. `--dry-run` stops after the list. `prune` then deletes what it
listed: a checkpoint that the policy gives up in between stays until the next time. `gc` does so
too, but for files whose run is superseded in between: they go and are named afterwards.

With `--json` each command prints one JSON object per line to stdout (`tags` one per tag, the
others one in all), after the deed; the list, the question and progress go to stderr.

Exit status:

    0  done; for `recover`: there is a checkpoint to restore, or none was ever published
    1  something is damaged: no checkpoint is valid, or what had to be read is not whole. Or
       refused: the tag names another checkpoint, the place holds other content, the answer was no
    2  wrong usage, or a STORE that cannot be one
    3  not found: no such store, checkpoint or tag
    4  the storage failed (permissions, network, I/O)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from beam_ckpt._durations import parse_duration
from beam_ckpt._terminal import (
    DAMAGED,
    OK,
    Json,
    StoreArgument,
    event_time,
    print_json,
    printable,
    size,
)
from beam_ckpt.errors import CheckpointNotFoundError, InvalidCheckpointError
from beam_ckpt.retention import KeepFor, KeepLast, RetentionPolicy
from beam_ckpt.store import copy as copy_checkpoints
from beam_ckpt.store import open_store

if TYPE_CHECKING:
    from beam_ckpt.manifest import CheckpointManifest
    from beam_ckpt.recovery import SkippedCheckpoint
    from beam_ckpt.retention import Garbage, PruneReport

__all__ = [
    "DryRun",
    "KeepForOption",
    "KeepLastOption",
    "Yes",
    "confirm",
    "ensure_can_ask",
    "given_policy",
    "register",
]

_READERS = 8
_NAMED = 3

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
KeepLastOption = Annotated[
    int | None, typer.Option(help="Keep the newest N recovery points.", min=1, metavar="N")
]
KeepForOption = Annotated[
    str | None,
    typer.Option(help="Keep those committed since, such as 7d or 1d12h.", metavar="DURATION"),
]
TagName = Annotated[str, typer.Argument(help="1 to 256 printable characters.", metavar="NAME")]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module to the application."""
    for command in (recover, repair_pointer, tag, untag, tags, prune, gc, copy):
        app.command(rich_help_panel="Maintenance")(command)


def recover(
    store: StoreArgument,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep/--metadata",
            help="Hash every byte, as a restore does, or compare sizes and kept checksums only.",
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Says which checkpoint would be restored, what was skipped and why. Writes nothing.

    Exit status 1 if what was published is damaged and nothing is left to restore.
    """
    opened = open_store(store, create=False)
    with _working("validating"):
        report = opened.recover_latest_validated(deep=deep)
    lost = report.chosen is None and any(s.phase == "invalid" for s in report.skipped)
    if as_json:
        facts = None if report.chosen is None else _facts(report.chosen)
        verdict = {"store": opened.url, "deep": deep, "chosen": facts, "damaged": lost}
        skipped = [_skipped(s) for s in report.skipped]
        _print_object(**verdict, skipped=skipped, examined=report.examined)
    else:
        _say_skipped(report.skipped)
        if report.chosen is not None:
            _say(f"{_describe(report.chosen)}: would be restored", style="green")
        elif lost:
            _say(f"none of the {_count(report.examined, 'checkpoint')} is valid", style="red")
        else:
            _say("nothing was published yet: a run starts at the beginning")
    raise typer.Exit(DAMAGED if lost else OK)


def repair_pointer(store: StoreArgument, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Points latest.json at the newest checkpoint that is valid, every byte hashed.

    Nothing else changes. Where no checkpoint is valid it is left as it is: exit status 1.
    """
    opened = open_store(store, create=False)
    named: int | None = None
    problem: str | None = None
    try:
        latest = opened.load_latest()
        named = None if latest is None else latest.id
    except InvalidCheckpointError as error:
        problem = str(error)
    with _working("validating"):
        report = opened.repair_pointer(dry_run=dry_run)
    changed = problem is not None or named != report.chosen_id
    if as_json:
        before = {"store": opened.url, "dry_run": dry_run, "before": named, "problem": problem}
        skipped = [_skipped(s) for s in report.skipped]
        _print_object(**before, after=report.chosen_id, changed=changed, skipped=skipped)
        return
    _say_skipped(report.skipped)
    if not changed:
        _say(f"latest.json names checkpoint {named}, as it should")
        return
    was = problem or ("there was no latest.json" if named is None else f"it named {named}")
    _say(was, style="yellow")
    verb = "would point" if dry_run else "points"
    _say(f"latest.json {verb} at checkpoint {report.chosen_id}", style="green")


def tag(
    store: StoreArgument,
    name: TagName,
    id: Annotated[int, typer.Argument(help="A finalized checkpoint.", min=1, metavar="ID")],
    as_json: Json = False,
) -> None:
    """Names a finalized checkpoint: retention keeps it until it is untagged."""
    if not 1 <= len(name) <= 256 or not name.isprintable():
        raise typer.BadParameter(f"{name[:80]!r} is no tag", param_hint="NAME")
    opened = open_store(store, create=False)
    opened.tag(name, id)
    if as_json:
        _print_object(tag=name, id=id)
    else:
        _say(f"checkpoint {id} is tagged {name!r}")


def untag(store: StoreArgument, name: TagName, as_json: Json = False) -> None:
    """Removes a tag. The checkpoint stays until retention takes it."""
    opened = open_store(store, create=False)
    id: int | None = None
    with contextlib.suppress(InvalidCheckpointError):  # a damaged tag can be removed, too
        id = opened.tags().get(name)
    opened.untag(name)
    if as_json:
        _print_object(tag=name, id=id)
    else:
        which = "a checkpoint" if id is None else f"checkpoint {id}"
        _say(f"removed the tag {name!r} of {which}, which retention may now delete")


def tags(store: StoreArgument, as_json: Json = False) -> None:
    """Lists the tags, by name."""
    found = open_store(store, create=False).tags()
    if as_json:
        print_json({"tag": name, "id": id} for name, id in found.items())
        return
    for name, id in found.items():
        _say(f"{name}  checkpoint {id}")
    if not found:
        _say("no tags")


def prune(
    store: StoreArgument,
    keep_last: KeepLastOption = None,
    keep_for: KeepForOption = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Deletes old checkpoints, and the files that only they list.

    With both --keep-last and --keep-for, what either keeps stays. Whatever they say, the newest
    recovery point, every tagged one and what a running job restored from stay. Attempts that a
    younger checkpoint has overtaken go.
    """
    policy = given_policy(keep_last, keep_for)
    ensure_can_ask(yes=yes or dry_run)
    opened = open_store(store, create=False)
    plan = opened.prune(policy, dry_run=True)
    with ThreadPoolExecutor(_READERS) as pool:
        read = [m for m in pool.map(opened.load_by_id, plan.deleted) if m is not None]
    for manifest in read:
        _say(f"{_describe(manifest)}: {_goes(dry_run)}", to_stderr=as_json)
    sizes = {e.path: e.size_bytes for m in read for _, _, e in m.sidecars()}
    for key in plan.markers:
        _say(f"{key}, of a checkpoint that is gone: {_goes(dry_run)}", to_stderr=as_json)
    what = f"{_count(len(plan.deleted), 'checkpoint')} and {_count(len(plan.sidecars), 'file')}"
    what += f" ({size(_total(plan, sizes))})"
    if plan.markers:
        what += f", {_count(len(plan.markers), 'marker')}"
    done = plan
    if not plan.deleted and not plan.markers:
        _say("nothing to delete", to_stderr=as_json)
    elif dry_run:
        _say(f"would delete {what}; {_count(len(plan.kept), 'checkpoint')} stay", to_stderr=as_json)
    else:
        confirm(f"Delete {what}?", yes=yes)
        done = opened.prune(policy, only=plan)
        went = f"deleted {_count(len(done.deleted), 'checkpoint')}"
        went += f", {_count(len(done.markers), 'marker')}" if done.markers else ""
        _say(went, to_stderr=as_json)
        for id in sorted(set(plan.deleted) - set(done.deleted)):
            _say(f"checkpoint {id} was left: others use it", style="yellow", to_stderr=as_json)
    if as_json:
        _print_object(
            store=opened.url,
            policy=str(policy),
            dry_run=dry_run,
            deleted=[_facts(m) for m in read if m.id in done.deleted],
            kept=list(done.kept),
            sidecars=list(done.sidecars),
            markers=list(done.markers),
            bytes=_total(done, sizes),
        )


def gc(
    store: StoreArgument,
    grace: Annotated[
        str, typer.Option(help="What is younger stays, such as 12h or 7d.", metavar="DURATION")
    ] = "1d",
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Deletes files that no checkpoint lists and that nobody can publish any more.

    They are left by runs that were killed or superseded.
    """
    grace_s = _seconds(grace, "--grace")
    ensure_can_ask(yes=yes or dry_run)
    opened = open_store(store, create=False)
    plan = opened.gc(grace_s=grace_s, dry_run=True)
    for item in plan.deleted:
        _say(f"{_garbage(item)}: {_goes(dry_run)}", to_stderr=as_json)
    _say_kept(plan.kept, to_stderr=as_json)
    what = f"{_count(len(plan.deleted), 'file')} ({size(plan.bytes)})"
    done = plan
    if not plan.deleted:
        _say("nothing to delete", to_stderr=as_json)
    elif dry_run:
        _say(f"would delete {what}", to_stderr=as_json)
    else:
        confirm(f"Delete {what}?", yes=yes)
        done = opened.gc(grace_s=grace_s, only=plan)
        _say(f"deleted {_count(len(done.deleted), 'file')}", to_stderr=as_json)
    if as_json:
        _print_object(
            store=opened.url,
            grace_s=grace_s,
            dry_run=dry_run,
            deleted=[_garbage_facts(item) for item in done.deleted],
            kept=[_garbage_facts(item) for item in done.kept],
            bytes=done.bytes,
        )


def copy(
    src: Annotated[str, typer.Argument(help="A path or a URL.", metavar="SRC")],
    dst: Annotated[str, typer.Argument(help="An empty place, or an earlier copy.", metavar="DST")],
    id: Annotated[
        list[int] | None,
        typer.Option("--id", help="Only this checkpoint; may be repeated.", min=1, metavar="ID"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Copies recovery points and their tags; every byte is verified on the way.

    The copy can be restored with the original gone. Run it again to go on after an interruption
    or to add what is new; nothing in DST is overwritten.
    """
    source = open_store(src, create=False)
    target = open_store(dst)
    console = Console(stderr=True)
    columns = (TextColumn("copying"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=as_json or not console.is_terminal
    ) as progress:
        task = progress.add_task("copying", total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        report = copy_checkpoints(source, target, id or None, progress=show)
    if not report.copied and not report.present:
        raise CheckpointNotFoundError(
            f"{source.url} has no finalized checkpoint to copy: see `beam-ckpt ls`"
        )
    if as_json:
        _print_object(
            source=source.url,
            target=target.url,
            copied=list(report.copied),
            present=list(report.present),
            sidecars=report.sidecars,
            bytes=report.bytes,
        )
        return
    wrote = f"{_count(report.sidecars, 'file')}, {size(report.bytes)}"
    _say(f"copied {_ids(report.copied)} to {target.url} ({wrote})")
    if report.present:
        _say(f"{_ids(report.present)} there already")


# -- retention -------------------------------------------------------------------------------


def given_policy(keep_last: int | None, keep_for: str | None) -> RetentionPolicy:
    """Returns what the options `--keep-last` and `--keep-for` mean together."""
    last = None if keep_last is None else KeepLast(keep_last)
    recent = None
    if keep_for is not None:
        seconds = _seconds(keep_for, "--keep-for")
        if not seconds:
            raise typer.BadParameter("give a duration above 0", param_hint="--keep-for")
        recent = KeepFor(seconds=seconds)
    if last and recent:
        return last | recent
    policy = last or recent
    if policy is None:
        raise typer.BadParameter("give one or both", param_hint="--keep-last / --keep-for")
    return policy


def _seconds(text: str, option: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _total(report: PruneReport, sizes: dict[str | None, int]) -> int:
    return sum(sizes.get(path, 0) for path in report.sidecars)


# -- asking ----------------------------------------------------------------------------------


def ensure_can_ask(*, yes: bool) -> None:
    """Refuses to begin what will need an answer where nobody can give one."""
    if not yes and not (sys.stdin is not None and sys.stdin.isatty()):
        raise typer.BadParameter(
            "needed where there is no terminal to ask on; --dry-run only says what would be done",
            param_hint="--yes",
        )


def confirm(question: str, *, yes: bool) -> None:
    """Asks, unless the answer was given; anything but yes ends the command."""
    if not yes:
        typer.confirm(question, abort=True, err=True)


@contextlib.contextmanager
def _working(doing: str) -> Iterator[None]:
    console = Console(stderr=True)
    with console.status(doing) if console.is_terminal else contextlib.nullcontext():
        yield


# -- saying ----------------------------------------------------------------------------------


def _say(text: str, *, style: str | None = None, to_stderr: bool = False) -> None:
    console = Console(stderr=to_stderr, soft_wrap=True, highlight=False)
    console.print(printable(text), markup=False, style=style)


def _say_skipped(skipped: Sequence[SkippedCheckpoint]) -> None:
    for one in skipped:
        style = "red" if one.phase == "invalid" else "yellow"
        cut = "boundary unknown" if one.boundary == "unknown" else _cut(one.boundary)
        _say(f"checkpoint {one.id}, {cut}: skipped, {one.reason}", style=style)


def _say_kept(kept: Sequence[Garbage], *, to_stderr: bool) -> None:
    by_reason: dict[str, list[str]] = {}
    for item in kept:
        by_reason.setdefault(item.reason, []).append(item.key)
    for reason, keys in sorted(by_reason.items()):
        named = ", ".join(keys[:_NAMED]) + (", ..." if len(keys) > _NAMED else "")
        files = _count(len(keys), "unlisted file")
        _say(f"{files} kept: {reason} ({named})", style="dim", to_stderr=to_stderr)


def _print_object(**fields: object) -> None:
    print_json([fields])


def _goes(dry_run: bool) -> str:
    return "would go" if dry_run else "goes"


def _facts(manifest: CheckpointManifest) -> dict[str, object]:
    return {
        "id": manifest.id,
        "phase": manifest.durable_phase,
        "epoch": manifest.epoch,
        "boundary": event_time(manifest.boundary),
        "drained": manifest.boundary is None,
        "created": event_time(manifest.timestamp_ms * 1000),
    }


def _skipped(skipped: SkippedCheckpoint) -> dict[str, object]:
    known = skipped.boundary if isinstance(skipped.boundary, int) else None
    return {
        "id": skipped.id,
        "phase": skipped.phase,
        "boundary": event_time(known),
        "drained": None if skipped.boundary == "unknown" else skipped.boundary is None,
        "reason": skipped.reason,
    }


def _describe(manifest: CheckpointManifest) -> str:
    taken = event_time(manifest.timestamp_ms * 1000)
    attempt = "" if manifest.durable_phase == "finalized" else ", never finalized"
    return f"checkpoint {manifest.id}, {_cut(manifest.boundary)}, taken {taken}{attempt}"


def _cut(boundary: int | str | None) -> str:
    at = event_time(boundary) if isinstance(boundary, int) else None
    return "up to the end of the input" if at is None else f"up to {at}"


def _garbage(item: Garbage) -> str:
    return f"{item.key}, {size(item.size)}, {item.reason}"


def _garbage_facts(item: Garbage) -> dict[str, object]:
    return {"key": item.key, "bytes": item.size, "reason": item.reason}


def _ids(ids: Sequence[int]) -> str:
    if not ids:
        return "no checkpoint"
    return f"checkpoint{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
