"""The tools that watch over style and types have nothing to say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fivetune import plugins

ROOT = Path(__file__).parents[1]
FOLDERS = [name for name in ("fivetune", "tests", "benchmarks", "reliability") if (ROOT / name).is_dir()]

# Not that of tasks: pyright refuses a ClassVar where a contract has a property, and tasks may have either.
CONTRACTS = {"optimizers": "Optimizer", "schedules": "Schedule", "strategies": "Strategy"}


def write_contracts(folder: Path) -> Path:
    """Write a module that has type errors if a plugin differs from the contract of its kind in fivetune/types.py."""
    lines = [f"from fivetune.types import {', '.join(CONTRACTS.values())}"]
    for kind, contract in CONTRACTS.items():
        for name in plugins.list_plugins(kind):
            options = plugins.load_plugin(kind, name).__name__
            lines.append(f"from {plugins.KINDS[kind]}.{name} import {options} as {kind}_{name}")
            lines.append(f"check_{kind}_{name}: type[{contract}] = {kind}_{name}")
    path = folder / "contracts.py"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["ruff", "check", *FOLDERS],
        ["ruff", "format", "--check", *FOLDERS],
        pytest.param(  # of fifty CPU seconds, which `make lint` also takes
            ["pyright", "--pythonpath", sys.executable, "fivetune", "CONTRACTS"], marks=pytest.mark.release
        ),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_nothing_to_say(words, tmp_path):
    words = [str(write_contracts(tmp_path)) if word == "CONTRACTS" else word for word in words]
    tool = shutil.which(words[0], path=Path(sys.executable).parent) or shutil.which(words[0])
    if tool is None:
        pytest.skip(f"{words[0]} is not installed (make install, then pip install -e '.[test]')")
    environ = {**os.environ, "NODE_OPTIONS": "--max-semi-space-size=256"}  # fewer garbage collections of pyright
    done = subprocess.run([tool, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False, env=environ)
    if words[0] == "pyright" and "npm" in done.stderr:
        pytest.skip("pyright could not fetch its program")
    assert done.returncode == 0, done.stdout + done.stderr
