"""What the oracle must not lean on."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import beam_ckpt.testing

HERE = Path(beam_ckpt.testing.__file__).parent


@pytest.mark.parametrize("module", ["event_loop", "subjects", "streams", "strategies"])
def test_the_oracle_and_its_data_share_no_code_with_the_transforms_or_with_a_runner(module):
    imported = []
    for node in ast.walk(ast.parse((HERE / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
    assert imported
    forbidden = ("beam_ckpt.transforms", "apache_beam.runners", "beam_ckpt.store")
    assert [name for name in imported if name.startswith(forbidden)] == []


def test_hypothesis_is_imported_only_when_a_strategy_is_asked_for():
    code = (
        "import sys\n"
        "from beam_ckpt.testing import strategies\n"
        "assert 'hypothesis' not in sys.modules\n"
        "strategies.cut_histories()\n"
        "assert 'hypothesis' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
