"""A checkpoint of the oldest Beam that is supported goes on in this one, and the other way round.

The older Beam is in a venv of its own, with what setup.cfg requires beside it.
"""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("of_any_version.py")


def requirements() -> list[str]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config["options"]["install_requires"].split()


def oldest() -> str:
    """The least version of Beam that setup.cfg allows."""
    (ours,) = (text for text in requirements() if text.startswith("apache-beam"))
    return ours.partition(">=")[2].partition(",")[0] + ".0"


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of a venv with it; from wheels only, so that nothing is built."""
    folder = tmp_path_factory.mktemp("older") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / ("Scripts" if sysconfig.get_platform().startswith("win") else "bin"))
    python = str(Path(python) / "python")
    subprocess.run(
        [
            python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--only-binary", ":all:",
            f"apache-beam=={oldest()}", *requirements(),
        ],
        check=True,
    )  # fmt: skip
    return python


def go(python: str, store: Path, runner: str, until: int) -> dict[str, Any]:
    done = subprocess.run(
        [python, SCRIPT, str(store), runner, str(until)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{SCRIPT.parent}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("runner", ["FnApiRunner", "BundleBasedDirectRunner"])
def test_checkpoints_go_from_one_version_of_beam_to_another_and_back(older, runner, tmp_path):
    """Each run checks outputs and state with the oracle, in its own version."""
    now, store = sys.executable, tmp_path / "store"
    runs = [
        go(python, store, runner, until)
        for python, until in ((older, 60), (now, 101), (older, 150), (now, 0))
    ]
    assert [run["beam"] for run in runs] == [oldest(), beam.__version__] * 2
    assert oldest() != beam.__version__
    assert [run["since"] for run in runs] == [None, 60, 101, 150]
    assert all(run["outputs"] for run in runs)
