"""A Prism binary: the one that is named, or one built with Go, once per user and Beam version.

Prism is Beam's local runner for streaming, written in Go, and no package of Python's has it. It is
looked for

1. under the path in the environment variable `BEAM_CKPT_PRISM`;
2. in the user's cache (`$XDG_CACHE_HOME`, else `~/.cache`), where it is built, if Go is there, by
   ``go install github.com/apache/beam/sdks/v2/go/cmd/prism@v<version of apache-beam>``: minutes
   the first time on a machine, since Go fetches what it needs from its module proxy.

A pipeline runs on it in this process, its workers being threads of it::

    options = PipelineOptions(["--runner=PrismRunner", *prism_options()])

Beam starts one Prism for all pipelines of a process and stops it at the end of the process;
`stop_prism` does it earlier.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from apache_beam.runners.portability.prism_runner import PrismRunner
from apache_beam.version import __version__ as beam_version

__all__ = ["PrismNotFoundError", "prism_binary", "prism_options", "stop_prism"]

_PACKAGE = "github.com/apache/beam/sdks/v2/go/cmd/prism"
_PLACES_OF_GO = ("go", "/usr/local/go/bin/go")


class PrismNotFoundError(LookupError):
    """There is no Prism binary and none can be built; says why and what to do."""


@functools.cache
def prism_binary() -> Path:
    """The path of a Prism binary; builds it when there is none yet.

    Raises:
        PrismNotFoundError: `BEAM_CKPT_PRISM` names no file, or there is no Go, or the build failed.
    """
    named = os.environ.get("BEAM_CKPT_PRISM")
    if named:
        if not Path(named).is_file():
            raise PrismNotFoundError(
                f"BEAM_CKPT_PRISM={named} is no file. What to do: let it name a Prism binary, or "
                "unset it to have one built."
            )
        return Path(named).absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "beam_ckpt" / f"prism-{beam_version}"
    binary = folder / "prism"
    if not binary.is_file():
        _build(binary)
    return binary


def prism_options() -> list[str]:
    """What a pipeline's command line needs beside ``--runner=PrismRunner``; Prism logs warnings.

    Raises:
        PrismNotFoundError: See `prism_binary`.
    """
    return [
        "--environment_type=LOOPBACK",
        # Of the stream of the job's states as well: a job of more than the default, five minutes,
        # would be given up.
        f"--job_server_timeout={24 * 3600}",
        f"--prism_location={prism_binary()}",
        "--prism_log_level=warn",
    ]


def stop_prism() -> None:
    """Stops this process's Prism, if it runs; the next pipeline starts another."""
    server = PrismRunner.shared_handle.acquire(lambda: None)
    if server is not None:
        server.stop()


def _build(binary: Path) -> None:
    import fcntl  # POSIX only

    go = next(filter(None, map(shutil.which, _PLACES_OF_GO)), None)
    if go is None:
        raise PrismNotFoundError(
            "there is no Prism binary, and no Go to build one. What to do: install Go "
            "(https://go.dev/doc/install), or let BEAM_CKPT_PRISM name a Prism binary, which "
            "Beam's releases on GitHub have for most platforms."
        )
    binary.parent.mkdir(parents=True, exist_ok=True)
    with (binary.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of those who come together one builds, the rest wait
        if binary.is_file():
            return
        with tempfile.TemporaryDirectory(dir=binary.parent) as built:
            done = subprocess.run(
                [go, "install", f"{_PACKAGE}@v{beam_version}"],
                env={**os.environ, "GOBIN": built},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise PrismNotFoundError(
                    f"`go install {_PACKAGE}@v{beam_version}` failed: {done.stdout[-1000:]}. What "
                    "to do: see that Go reaches its module proxy (GOPROXY), or let "
                    "BEAM_CKPT_PRISM name a Prism binary."
                )
            (Path(built) / "prism").replace(binary)
