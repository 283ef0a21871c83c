"""The notebooks of the docs run and are built from their sources; progress in a notebook is one display."""

from __future__ import annotations

import re
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kit
import pytest

import fivetune
from fivetune.rundir.notebook import MAX_LINES, is_notebook
from fivetune.rundir.progress import Progress

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
SPEC = spec_from_file_location("build_notebooks", FOLDER / "build.py")
assert SPEC and SPEC.loader
build = module_from_spec(SPEC)
SPEC.loader.exec_module(build)
NAMES = build.list_names()


def list_outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_its_source_run_without_an_error(name: str) -> None:
    import nbformat  # slow: not in each process that collects tests

    path = FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    source = build.read_cells((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == source, "python docs/notebooks/build.py"
    outputs = list_outputs(notebook)
    assert len(outputs) > 2 and not [one for one in outputs if one.output_type in ("error", "stream")]
    assert re.search(r"\*\*The full system\*\*|it is the full\s+system", source[0][1])
    assert not re.search(r"(?<![\w.:/])/(?:home|root|tmp|work|usr|Users)/", path.read_text(encoding="utf-8"))
    assert path.stat().st_size < (2**18 if name.startswith("1_") else 2**16)
    drawn = "text/html" if name.startswith("1_") else "image/png"  # the report, or charts
    assert any(drawn in output.get("data", ()) for output in outputs)


@pytest.mark.release
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_an_empty_folder(name: str, tmp_path: Path) -> None:
    notebook = build.make_notebook(name)
    build.execute(notebook, tmp_path)
    assert len(list_outputs(notebook)) > 2


# --- progress ---


class _Display:
    """What a kernel's display shows: one output for each call, changed in place by `update`."""

    def __init__(self) -> None:
        self.outputs: list[str] = []
        self.num_updates = 0

    def __call__(self, content: dict[str, str], **options: object) -> _Display:
        assert options == {"raw": True, "display_id": True}
        self.outputs.append(content["text/plain"])
        return self

    def update(self, content: dict[str, str], *, raw: bool) -> None:
        self.num_updates += 1
        self.outputs[-1] = content["text/plain"]


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch) -> _Display:
    shown = _Display()
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=shown))
    return shown


def test_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))
    assert not is_notebook()


def test_training_in_a_notebook_is_one_display(
    tmp_path: Path, model_folder: Path, display: _Display, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fivetune.train(kit.recipe(tmp_path, model_folder), {"train.log_every_steps": 1})
    (shown,) = display.outputs
    lines = shown.splitlines()
    assert "eval at step      6:" in shown and lines[-1].startswith("finished in ") and "step      6/6" not in shown
    assert not "".join(capsys.readouterr())
    assert "step 6 loss" in (run.folder / "log.txt").read_text()


def test_a_long_log_keeps_its_warnings_and_says_where_the_rest_is(tmp_path: Path, display: _Display) -> None:
    progress = Progress(tmp_path / "log.txt")
    progress.warn("the first")
    for number in range(40):
        progress.log(f"line {number}")
    progress.close()
    lines = display.outputs[0].splitlines()
    assert len(display.outputs) == 1 and len(lines) == MAX_LINES + 1
    assert lines[0] == f"(29 earlier lines in {tmp_path / 'log.txt'})"
    assert lines[1] == "warning: the first" and lines[-1] == "line 39"


def test_the_live_line_changes_a_few_times_a_second(display: _Display, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("fivetune.rundir.notebook.time.monotonic", lambda: now)
    progress = Progress()
    for number in range(1000):
        now += 0.01  # ten seconds in all
        progress.update("answering", number, 1000)
    progress.close()
    assert len(display.outputs) == 1 and display.num_updates < 50
    assert display.outputs[0].startswith("answering  ") and "of 1,000" in display.outputs[0]


def test_what_is_short_or_quiet_shows_nothing(display: _Display) -> None:
    for quiet in (False, True):
        progress = Progress(quiet=quiet)
        progress.start()
        progress.update("answering", 1, 2)
        progress.close()
    assert display.outputs == []


ENDLESS = """
import fivetune
recipe = {{"model": {{"path": {model!r}}}, "task": {{"name": "jsonl"}}, "device": "cpu", "run": {{"dir": "runs/long"}}}}
recipe["data"] = {{"train": [{{"inputs": f"question: What has Ann? {{i}}", "targets": "red hat"}} for i in range(50)]}}
run = fivetune.train(recipe, {{"train.num_steps": 1_000_000, "train.batch_size": 8}}, preflight=False)
"""


@pytest.mark.release
def test_the_stop_button_saves_and_shows_one_line(tmp_path: Path, model_folder: Path) -> None:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:
        client.execute(ENDLESS.format(model=str(model_folder)))
        steps, deadline = tmp_path / "runs/long/steps.jsonl", time.monotonic() + 120
        while not (steps.is_file() and steps.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.1)
        manager.interrupt_kernel()
        shown: list[Any] = []
        while not shown or shown[-1]["msg_type"] != "error":
            shown.append(client.get_iopub_msg(timeout=60))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    (line,) = shown[-1]["content"]["traceback"]
    assert re.match(r"InterruptedRunError: stopped by SIGINT after step \d+ of 1000000; saved\. Resume with: ", line)
    assert line.endswith("In Python: fivetune.train('runs/long', resume=True)")
    displays = [one for one in shown if one["msg_type"] == "display_data"]
    assert len(displays) == 1 and fivetune.open_run(tmp_path / "runs/long").status.step > 0
