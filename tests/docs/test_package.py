"""The wheel and the source distribution: what they hold, and that the installed program works outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from docs_kit import ROOT

builders = pytest.importorskip("hatchling.builders.wheel")


def list_wheel_files(root: Path) -> set[str]:
    return {one.distribution_path for one in builders.WheelBuilder(str(root)).recurse_included_files()}


def test_the_wheel_holds_all_data_files_and_no_tests():
    files = list_wheel_files(ROOT)
    data = [path for path in (ROOT / "fivetune").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {str(path.relative_to(ROOT)) for path in data} <= files
    makers = (".py", ".pyc")  # of t5-nano
    shipped = [path for path in (ROOT / "recipes").rglob("*.*") if path.is_file() and path.suffix not in makers]
    recipes = {f"fivetune/{path.relative_to(ROOT)}" for path in shipped}
    assert recipes <= files and "fivetune/recipes/compare/quick.yaml" in files
    for name in (
        "data/corpus/t5-nano/model.safetensors",
        "data/corpus/t5-nano/tokenizer.json",
        "reading/report/page/templates/page.html",
        "py.typed",
    ):
        assert f"fivetune/{name}" in files
    assert {name.partition("/")[0] for name in files} == {"fivetune"}
    assert not [name for name in files if name.startswith("fivetune/recipes/") and name.endswith(".py")]
    assert not [
        name
        for name in files
        if name.endswith((".pyc", ".md")) and not name.endswith(("README.md", "templates/card.md"))
    ]


def run(*words: str, folder: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FIVETUNE"))}
    done = subprocess.run(words, cwd=folder, env=clean | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", str(folder), folder=ROOT)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; the packages that it needs are those of this environment."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), folder=folder.parent)
    [wheel] = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel), folder=folder.parent)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return folder


@pytest.mark.release
def test_the_source_distribution_builds_the_same_wheel(built, tmp_path):
    [archive] = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    assert {"fivetune", "recipes", "tests", "docs", "pyproject.toml", "README.md", "LICENSE"} <= {
        path.name for path in source.iterdir()
    }
    assert list_wheel_files(source) == list_wheel_files(ROOT)
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        assert {name for name in file.namelist() if ".dist-info/" not in name} == list_wheel_files(ROOT)


@pytest.mark.release
def test_the_installed_program_trains_outside_the_checkout(installed, tmp_path):
    place = run(str(installed / "bin" / "python"), "-c", "import fivetune; print(fivetune.__file__)", folder=tmp_path)
    assert Path(place.strip()).is_relative_to(installed)
    program = str(installed / "bin" / "fivetune")
    assert "squad_v2 " in run(program, "list", "recipes", folder=tmp_path)
    assert "--steps" in run(program, "quickstart", "--help", folder=tmp_path)
    out = run(program, "quickstart", "--steps", "3", folder=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "official SQuAD 2.0 scores on 600 held-out questions" in out
    assert (tmp_path / "runs/quickstart/report.html").is_file()
    assert (tmp_path / "runs/quickstart/model/model.safetensors").is_file()
