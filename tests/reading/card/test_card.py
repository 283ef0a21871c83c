"""A model card says what the records hold, and nothing else; its code runs, its metadata is valid."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import kit
import pytest
import yaml
from fake_run import change_run, fake_run, make_eval, make_predictions, write_run

import fivetune
from fivetune.cli import main
from fivetune.reading.card.card import is_generated
from fivetune.reading.card.facts import list_limits
from fivetune.rundir.records import DeviceSample, RunStatus, TelemetryRecord


def make_folder(folder: Path, run: Any = None, **settings: Any) -> Path:
    """A run directory with a model's config; `settings` replace sections of config.yaml."""
    run = run or fake_run()
    write_run(folder, replace(run, config={**run.config, **settings}))
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text('{"model_type": "t5"}')
    return folder


def card_of(folder: Path, *words: str) -> str:
    assert main(["card", str(folder), *words]) == 0
    return (folder / "model" / "README.md").read_text()


def metadata_of(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_metadata_is_what_the_hub_reads(tmp_path):
    from huggingface_hub import ModelCard

    run = fake_run(evals=[make_eval(300, {"f1": 61.25, "exact": 40.0, "total": 640}, intervals={"f1": [58.0, 64.0]})])
    data = {"eval": {"source": ["shared/dev.json"]}}
    run = change_run(
        run, data=data, status={"state": "finished", "step": 300, "best": {"step": 300, "metric": "f1", "score": 61.25}}
    )
    text = card_of(make_folder(tmp_path / "run", run), "--license", "apache-2.0")
    data = ModelCard(text).data
    assert [(one.metric_type, one.metric_value, one.dataset_name, one.task_type) for one in data.eval_results] == [
        ("f1", 61.25, "dev.json", "question-answering"),
        ("exact", 40.0, "dev.json", "question-answering"),
    ]
    assert (data.library_name, data.license, data.tags) == ("transformers", "apache-2.0", ["fivetune", "squad_v2"])
    assert "| f1 | 61.25 | 58.00 to 64.00 |" in text and "evaluate-v2.0.py of SQuAD" in text
    assert data.base_model is None and "Licence of the base model: apache-2.0." in text  # of t5-nano's own card


def test_a_base_of_the_hub_is_named_with_its_relation(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    model = {"path": "google/t5-v1_1-small", "init": "pretrained"}
    card = card_of(make_folder(tmp_path / "run", model=model))
    assert metadata_of(card)["base_model"] == "google/t5-v1_1-small"
    assert metadata_of(card)["base_model_relation"] == "finetune"
    assert "Licence" not in card and "license" not in metadata_of(card)  # unknown is left out


def test_braces_in_a_name_and_a_damaged_card_of_the_base_are_no_error(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: [mit\n  a: b: c\n---\n")
    card = card_of(make_folder(tmp_path / "run {x}", model={"path": str(base), "init": "pretrained"}))
    assert 'run {x}")' in card and "Licence" not in card


def test_names_are_no_markup_of_the_card(tmp_path):
    run = fake_run(machine={"device": {"kind": "cpu", "name": "<img src=x> | [a](b)\n# __c__ \u202e"}})
    card = card_of(make_folder(tmp_path / "<b>x", run, model={"path": "./<script>", "init": "pretrained"}))
    assert "\n# \\<b\\>x\n" in card and "from ./\\<script\\>." in card
    assert r"| hardware | \<img src=x\> \| \[a\](b) # \_\_c_\_ [U+202E] |" in card


def test_a_local_folder_with_the_form_of_a_hub_name_is_no_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    card = card_of(make_folder(tmp_path / "run", model={"path": "models/mine"}))
    assert "base_model" not in metadata_of(card) and "from models/mine." in card


def test_data_files_have_size_and_checksum_unless_they_changed(tmp_path):
    run = fake_run()
    files = {name: tmp_path / f"{name}.json" for name in ("train", "eval")}
    for name, path in files.items():
        path.write_text(f'{{"{name}": 1}}')
    data = {name: {"num_examples": 640, "source": [str(path)]} for name, path in files.items()}
    status = replace(run.status, started="2999-01-01T00:00:00+00:00")
    folder = make_folder(tmp_path / "run", change_run(run, data=data, status=status))
    digest = sha256(files["train"].read_bytes()).hexdigest()
    assert f"| training | `train.json` | 12 B | `{digest}` |" in card_of(folder)
    assert str(tmp_path) not in card_of(folder).partition("## Data")[2].partition("##")[0]
    write_run(
        folder, replace(change_run(run, data=data), status=replace(run.status, started="2001-01-01T00:00:00+00:00"))
    )
    assert "| training | `train.json` | 12 B |\n" in card_of(folder)  # the file may be another one now


def test_limits_are_counted(tmp_path):
    lines = [
        {"id": str(i), "prediction": "" if i % 4 == 0 else "x", "references": ["x"] if i % 2 else [""],
         "scores": {"f1": float(i < 60)}, "meta": {"language": "en" if i < 60 else "es", "question": "Who?"}}
        for i in range(100)
    ]  # fmt: skip
    rates = {"cap_hit": 0.03, "unknown_characters": 0.0, "empty": 0.25}
    data = {
        "eval": {
            "source": ["dev.json"], "num_examples": 200, "num_examples_clipped": 30, "num_answers_lost": 4,
            "max_input_tokens": 192, "num_unknown_tokens": 5, "num_input_tokens": 1000,
        }
    }  # fmt: skip
    run = fake_run(
        evals=[make_eval(300, {"f1": 60.0}, rates=rates, num_examples=100)],
        predictions={"eval-300": make_predictions(*lines)},
        data=data,
        status={"state": "interrupted", "step": 300, "best": {"step": 300, "metric": "f1", "score": 60.0}},
    )
    card = card_of(make_folder(tmp_path / "run", run))
    limits = card.partition("## Limits")[2].partition("##")[0]
    assert "30 of 200 inputs (15.0%) are longer than the limit of 192 tokens and were truncated; 4 lost" in limits
    assert "5 tokens (0.50%) are unknown" in limits
    assert "3.0% of the answers reach the limit of 18 new tokens" in limits
    assert "abstains (`no answer`) on 25.0% of the questions; 50.0% of them have no answer." in limits
    assert "Worse where language is `es`: f1 0.0" in limits and "`en`" not in limits
    assert "did not finish: interrupted at step 300 of 300" in limits
    assert "unknown_characters" not in limits and "are empty" not in limits


def test_an_empty_answer_is_no_limit_where_a_gold_answer_is_empty(tmp_path):
    """Records without labels: "50.0% of the answers are empty"."""
    evaluation = make_eval(300, {"f1": 60.0}, rates={"empty": 0.5})
    for gold, told in (("", False), ("b", True)):
        lines = [
            {"id": "1", "prediction": "", "references": [gold]},
            {"id": "2", "prediction": "a", "references": ["a"]},
        ]
        run = fake_run(evals=[evaluation], predictions={"eval-300": make_predictions(*lines)})
        found = list(list_limits(run, run.evals[0], no_answer=None, score=None))
        assert any("are empty" in line for line in found) == told


def test_no_group_of_a_perfect_model_is_worse(tmp_path):
    """Wilson's upper edge was 99.99999999999999: "Worse where input length is 1-64 tokens: accuracy 100.0"."""
    lines = [
        {"id": str(i), "prediction": "x", "references": ["x"], "scores": {"f1": 1.0}, "num_input_tokens": 50 + i}
        for i in range(150)
    ]
    run = fake_run(
        evals=[make_eval(300, {"f1": 100.0}, num_examples=150)],
        predictions={"eval-300": make_predictions(*lines)},
        status={"state": "finished", "step": 300, "best": {"step": 300, "metric": "f1", "score": 100.0}},
    )
    assert "Worse" not in card_of(make_folder(tmp_path / "run", run))


def test_hardware_and_energy_are_those_of_the_records(tmp_path):
    run = fake_run()
    telemetry = [
        TelemetryRecord(second, phase="train", devices=(DeviceSample(0, name="X", power_watts=360.0, ours=True),))
        for second in (0.0, 10.0)
    ]
    folder = make_folder(tmp_path / "run", run)
    assert "energy of the devices" not in card_of(folder) and "| hardware | AMD EPYC 7B13 |" in card_of(folder)
    (folder / "telemetry.jsonl").write_text("".join(json.dumps(one.as_dict()) + "\n" for one in telemetry))
    assert "| energy of the devices | 1.00 Wh |" in card_of(folder)


def test_labels_that_are_rarely_found_are_named(tmp_path):
    lines = [
        {"id": str(i), "prediction": "good", "references": ["good" if i < 50 else "bad"], "left_label_set": False,
         "scores": {"accuracy": float(i < 50)}, "meta": {"labels": ["good", "bad"]}}
        for i in range(80)
    ]  # fmt: skip
    task = {"name": "classification", "labels": {"good": "good", "bad": "bad"}, "inputs": "text: {text}"}
    evals = [make_eval(300, {"accuracy": 62.5}, task="classification", num_examples=80)]
    status = {"state": "finished", "step": 300, "best": {"step": 300, "metric": "accuracy", "score": 62.5}}
    run = fake_run(evals=evals, status=status, predictions={"eval-300": make_predictions(*lines)})
    card = card_of(make_folder(tmp_path / "run", run, task=task))
    assert "Label `bad` is found in 0.0% of its 30 examples." in card and "Label `good`" not in card
    assert 'run.predict([{"text": "the text"}])' in card
    assert metadata_of(card)["model-index"][0]["results"][0]["task"]["type"] == "text-classification"


def test_a_mixture_lists_its_parts_and_names_one_in_its_example(tmp_path):
    parts = {name: {"task": {"name": "squad"}, "train": f"{name}.json", "eval": f"{name}-dev.json"} for name in "ab"}
    data = {"train": {"parts": {name: {"source": [f"{name}.json"], "num_examples": 7} for name in "ab"}}}
    run = fake_run(data=data, evals=[], status=RunStatus(state="finished", step=3))
    task = {"name": "mixture", "parts": parts}
    card = card_of(make_folder(tmp_path / "run", run, task=task, data={}, eval={}))
    assert "- training, a: 7 examples.\n- training, b: 7 examples." in card
    assert '{"task.part": "a"}' in card and "nothing is known of their quality" in card


def test_the_examples_of_a_card_run(tmp_path, model_folder, capsys):
    fivetune.train(kit.recipe(tmp_path, model_folder, train__num_steps=1), quiet=True, preflight=False)
    card = card_of(tmp_path / "run")
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(blocks) == 2
    capsys.readouterr()
    for block in blocks:
        exec(compile(block, "card", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_an_edited_card_is_kept(tmp_path, capsys):
    folder = make_folder(tmp_path / "run")
    path = folder / "model" / "README.md"
    assert is_generated(card_of(folder)) and is_generated(card_of(folder))
    path.write_text(path.read_text().replace("# run", "# mine"))
    assert main(["card", str(folder)]) == 2
    assert "was edited by hand. Add --overwrite" in capsys.readouterr().err and "# mine" in path.read_text()
    assert main(["card", str(folder), "--print"]) == 0 and "# run" in capsys.readouterr().out
    assert "# mine" not in card_of(folder, "--overwrite")


@pytest.mark.parametrize(
    ("name", "content", "code", "words"),
    [
        ("data.json", "{", 0, "data.json:1:2: damaged"),
        ("evals.jsonl", "", 0, "lacks the evaluation that status.json names as the best"),
        ("predictions/eval-250.jsonl", '{"id"\n', 0, "predictions/eval-250.jsonl:1: damaged line"),
        ("config.yaml", "a: [", 4, "config.yaml: damaged"),
        ("config.yaml", None, 4, "not a run directory"),
        ("model/config.json", None, 4, "has no model/ with a config.json"),
        ("export.json", "{}", 4, "export.json: damaged. Export the run again"),
    ],
)
def test_damaged_records_are_named(tmp_path, capsys, name, content, code, words):
    folder = make_folder(tmp_path / "run")
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    assert main(["card", str(folder)]) == code
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error and "internal" not in error
    if code == 0:
        assert not re.search(r"\b(nan|None)\b", (folder / "model" / "README.md").read_text().partition("```yaml")[0])
