"""Mistakes that a user made who knew only the README."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import kit
import pytest

import fivetune
import fivetune.cli
from fivetune import plugins, rundir
from fivetune.commands import list as list_command
from fivetune.config import load_config
from fivetune.data.readers.records import read_records
from fivetune.errors import ConfigError, DataError, FiveTuneError, RunDirError
from fivetune.model.decode import labels as decode_labels
from fivetune.model.files import find_folder
from fivetune.rundir import CONFIG, RunDir
from fivetune.tasks import load_task
from fivetune.tasks.squad import SQuAD
from fivetune.training.answers.loading import load_run_model


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"cannot be used: File name too long. Choose another run.dir"):
        RunDir.create(tmp_path / ("a" * 300))


def test_a_directory_in_use_is_told_so_before_anything_else(tmp_path: Path) -> None:
    owner = RunDir.create(tmp_path / "run")
    (tmp_path / "run" / CONFIG).write_text("{}")
    with pytest.raises(RunDirError, match=r"in use by process"):
        RunDir.create(tmp_path / "run")
    owner.close()


def test_a_plugin_with_a_syntax_error_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "kaputt.py").write_text("class X(\n")
    monkeypatch.setenv("FIVETUNE_PLUGINS", str(tmp_path))
    with pytest.raises(ConfigError, match=r"kaputt.py:1: not valid Python"):
        plugins.load_plugin("tasks", "kaputt")
    assert fivetune.cli.main(["list", "tasks"]) == 0
    assert "kaputt.py:1: " in "".join(capsys.readouterr().out.split("\n"))
    plugins.import_module("fivetune.tasks").__path__.remove(str(tmp_path / "tasks"))


@pytest.mark.parametrize(
    ("folder", "wrong"), [("nowhere", "no such folder"), (".", "has no folder of plugins .tasks, ")]
)
def test_a_folder_of_plugins_without_any_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, wrong: str
) -> None:
    monkeypatch.setenv("FIVETUNE_PLUGINS", str(tmp_path / folder))
    with pytest.raises(ConfigError, match=rf"^FIVETUNE_PLUGINS: {tmp_path / folder}: {wrong}.*tasks/NAME.py"):
        plugins.list_plugins("tasks")


@pytest.mark.parametrize("command", ["train", "check", "prepare"])
def test_data_files_are_looked_at_before_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = [command, "squad_v2", "--model.path", "org/no-such-model", "--data.train", "nope.json"]
    assert fivetune.cli.main(words) == 3
    captured = capsys.readouterr()
    assert "nope.json: no such file or folder" in captured.err + captured.out
    assert list(tmp_path.iterdir()) == []  # no empty runs/ is left


def test_a_run_whose_model_is_not_found_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jsonl").write_text('{"question": "Who?", "context": "Bob.", "answer": "Bob"}\n')
    words = ["train", "squad_v2", "--model.path", "./nowhere", "--data.train", "t.jsonl", "--quiet"]
    assert fivetune.cli.main(words) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_train_quickstart_writes_its_corpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fivetune.data.corpus.reading.QUICKSTART_TRAIN", 40)
    monkeypatch.setattr("fivetune.data.corpus.reading.QUICKSTART_EVAL", 8)
    short = ["--train.num_steps", "1", "--eval.at_start", "false", "--data.cache_dir", "cache", "--train.batch_size=4"]
    assert fivetune.cli.main(["train", "quickstart", *short, "--no-preflight", "--quiet"]) == 0
    assert (tmp_path / "runs" / "quickstart-corpus" / "dev.json").is_file()
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()


@pytest.mark.slow
def test_a_run_is_evaluated_and_resumed_from_another_working_directory(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder, "model")
    table = kit.recipe(tmp_path, Path("model"))
    table["data"] |= {"train": "train.json", "eval": "dev.json"}
    Path("r.yaml").write_text(json.dumps(table))
    assert fivetune.cli.main(["train", "r.yaml", "--quiet", "--no-preflight"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert fivetune.cli.main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    assert fivetune.cli.main(["train", str(tmp_path / "run"), "--resume", "--quiet", "--train.num_steps", "7"]) == 0
    assert "data:\n  train:\n  - train.json\n" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_mistyped_model_is_answered_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "finetuned").mkdir()
    with pytest.raises(FiveTuneError, match=r"^t5-nan: .* Did you mean t5-nano\? "):
        find_folder("t5-nan")
    with pytest.raises(FiveTuneError, match=rf"no such model folder\. Did you mean {tmp_path}/finetuned\? Give"):
        find_folder(str(tmp_path / "finetund"))


KILLED = """
import os, sys
from fivetune.rundir import RunDir
run = RunDir.create(sys.argv[1])
(run.path / "config.yaml").write_text("{}")
run.update_status(state="running", step=2)
os.kill(os.getpid(), 9)
"""


def test_a_killed_run_is_interrupted_and_nothing_is_written(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == -9
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    status = rundir.read_run(tmp_path).status
    assert (status.state, status.step, status.why[:16]) == ("interrupted", 2, "killed (process ")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    owner = RunDir.resume(tmp_path)
    assert rundir.read_status(tmp_path).state == "running"
    owner.close()
    (tmp_path / ".lock").unlink()  # a copy: whether the run goes on elsewhere is not known
    assert rundir.read_status(tmp_path).state == "running"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "device",
            "gpu",
            "--device: there is no 'gpu'. Allowed: auto (a GPU if there is one, else cpu), cpu, cuda, cuda:N, mps, "
            "tpu (all chips of this machine).",
        ),
        ("optimizer.lr", float("nan"), "--optimizer.lr: Input should be a finite number, not nan."),
        ("eval.length_penalty", float("inf"), "--eval.length_penalty: Input should be a finite number, not inf."),
        ("data.eval", 5, "--data.eval: Input should be a list, not 5."),
        ("model", 5, "--model: Input should be a table, not 5."),
    ],
)
def test_a_wrong_value_is_told_in_words_of_the_recipe(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"model": {"path": "m"}, "task": "squad"}, {key: value})
    assert str(caught.value) == message


def test_a_wrong_option_of_a_metric_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^task: metrics: rouge has no option 'stemer'\. Did you mean stemmer\? "):
        load_task("jsonl", {"metrics": [{"name": "rouge", "stemer": True}]})


def test_an_id_that_was_made_up_is_no_column(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "Who?"}\n{"question": "Who?", "id": 7}\n')
    for record, columns in zip(read_records(str(path)), ("question", "id, question"), strict=True):
        with pytest.raises(DataError, match=rf"no column 'context'\. Columns: {columns}\. If"):
            SQuAD().to_text(record)


def test_a_wrong_mapping_is_not_answered_with_leaving_records_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "Who?"}\n')
    with pytest.raises(DataError, match=r"no column 'Frage'.* Correct data\.columns\.$"):
        list(read_records(str(tmp_path / "a.jsonl"), columns={"question": "Frage"}))


@pytest.mark.parametrize("columns", [20, 40, 60])
def test_a_long_line_of_a_list_is_wrapped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(list_command, "_list_plugins", lambda kind: {"x": "word " * 40, "y": "short."})
    assert fivetune.cli.main(["list", "tasks", "--json"]) == 0
    *lines, table = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert " ".join(lines).split() == ["x", *["word"] * 40, "y", "short."]
    assert json.loads(table)["tasks"][0]["help"] == "word " * 40


# --- a trained run ---


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A run of a task with labels, and beside it posts.jsonl without any."""
    folder = tmp_path_factory.mktemp("labelled")
    posts = [{"Title": word, "Body": "a hat", "Y": "HQ"} for word in kit.WORDS]
    (folder / "train.jsonl").write_text("".join(json.dumps(post) + "\n" for post in posts))
    (folder / "posts.jsonl").write_text('{"Title": "red", "Body": "a hat"}\n{"Title": "blue", "Body": "a bag"}\n')
    train = str(folder / "train.jsonl")
    table = kit.recipe(
        folder, model_folder, task={"name": "stackoverflow_quality"}, data__train=train, data__eval=train
    )
    fivetune.train(table, quiet=True, preflight=False)
    return folder / "run"


def test_labels_are_predicted_as_one_array_without_scoring_targets(
    labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_labels.LabelTree, "add_rows", lambda *_: pytest.fail("a target is scored"))
    words = ["predict", str(labelled), "--input", str(labelled.parent / "posts.jsonl"), "--json"]
    assert fivetune.cli.main(words) == 0
    lines = json.loads(capsys.readouterr().out)
    assert [line["id"] for line in lines] == ["posts-1", "posts-2"]
    assert {line["prediction"] for line in lines} <= {"HQ", "LQ_EDIT", "LQ_CLOSE"}
    assert fivetune.cli.main([*words, "--output", str(tmp_path / "o.jsonl")]) == 0
    assert json.loads(capsys.readouterr().out)["num_answers"] == 2
    assert [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()] == lines


@pytest.mark.parametrize("key", ["optimizer.lr", "run.seed", "learning_rate", "data.train", "eval.every_steps"])
def test_a_setting_without_effect_on_a_trained_run_is_refused(labelled: Path, key: str) -> None:
    value = "x.json" if key == "data.train" else 1
    with pytest.raises(
        ConfigError, match=rf"^--{key}: has no effect here: .*device, train\.precision, train\.capture, train\.num_thr"
    ):
        load_run_model(labelled, {key: value})
    assert (
        load_run_model(labelled, {"per_device_eval_batch_size": 2, "train.num_threads": 1}).config.eval.batch_size == 2
    )


def test_predict_reads_its_input_only(labelled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fivetune.cli.main(["predict", str(labelled), "--inputs", "a", "--data.eval", "x.json"]) == 2
    assert capsys.readouterr().err.startswith("fivetune: --data.eval: has no effect here: predict answers all")
