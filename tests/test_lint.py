"""The tools that watch over style and types have nothing to say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = [name for name in ("fivetune", "tests", "benchmarks") if (ROOT / name).is_dir()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["ruff", "check", *FOLDERS],
        ["ruff", "format", "--check", *FOLDERS],
        ["pyright", "--pythonpath", sys.executable, "fivetune"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_nothing_to_say(words):
    tool = shutil.which(words[0], path=Path(sys.executable).parent) or shutil.which(words[0])
    if tool is None:
        pytest.skip(f"{words[0]} is not installed (make install, then pip install -e '.[test]')")
    environ = {**os.environ, "NODE_OPTIONS": "--max-semi-space-size=64"}  # fewer garbage collections of pyright
    done = subprocess.run([tool, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False, env=environ)
    if words[0] == "pyright" and "npm" in done.stderr:
        pytest.skip("pyright could not fetch its program")
    assert done.returncode == 0, done.stdout + done.stderr
