"""Completion scripts: bash's is sourced and completes; the others name what they complete."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fivetune.cli import main
from fivetune.commands.completion import SHELLS, build_script
from fivetune.config.recipes import list_recipe_names

pytest.importorskip("shtab")
DRIVER = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"
_shtab_fivetune
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (folder / shell).write_text(build_script(shell), encoding="utf-8")
    return {shell: folder / shell for shell in SHELLS}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tr", {"train", "trim-vocab"}),
        ("train squad_v2_", {"squad_v2_t5_small"}),
        ("train squad_v2 --train.prec", {"--train.precision"}),
        ("train squad_v2 --train.precision b", {"bf16"}),
        ("train squad_v2 --optimizer.name adaf", {"adafactor"}),
        ("tune a.yaml --optimizer.lr 1e-3 --eval.final f", {"full"}),
        ("config a.yaml --train.recompute t", {"true"}),
        ("list opt", {"optimizers"}),
        ("evaluate runs/o", {"runs/one"}),
        ("train --model.adap", {"--model.adapter.name", "--model.adapter"}),
    ],
)
def test_bash_completes(scripts, tmp_path, words, expected):
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    call = ["bash", "-c", DRIVER, "bash", str(scripts["bash"]), "fivetune", *words.split(" ")]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    found = set(done.stdout.split())
    assert expected & found and all(word.startswith(words.split(" ")[-1]) for word in found)


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_name_commands_settings_and_recipes(scripts, shell):
    text = scripts[shell].read_text(encoding="utf-8")
    for name in ("import-config", "train.precision", "adamw_8bit", *list_recipe_names()):
        assert name in text, name
    if program := shutil.which(shell):
        assert subprocess.run([program, "-n", str(scripts[shell])], check=False).returncode == 0


def test_without_shtab_the_command_names_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 4
    message = "fivetune: completion: the package shtab is not installed. Install it: pip install "
    assert capsys.readouterr().err.startswith(message)
