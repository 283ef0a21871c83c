"""The main road by the command line: from text to scores, a model folder and a report, on tiny and on real input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import kit
import pytest
import yaml
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from fivetune import cli, rundir
from reliability.warm import run_command

pytestmark = pytest.mark.slow
TRAIN = kit.SHARED / "data/squad_v2/train-v2.0.first10articles.json.gz"
DEV = kit.SHARED / "data/squad_v2/dev-v2.0.json.gz"
TOKENIZER = kit.SHARED / "data/tokenizers/t5-small"


def _fivetune(*words: str, code: int = 0) -> str:
    done = run_command(*words)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def _write(folder: Path, table: dict) -> str:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(table))
    return str(folder / "recipe.yaml")


def test_train_by_command_line(tmp_path, model_folder):
    recipe, run = _write(tmp_path, kit.recipe(tmp_path, model_folder)), tmp_path / "run"
    out = _fivetune("train", recipe, "--optimizer.lr", "2e-3", "--json").splitlines()
    result = json.loads(out[-1])
    assert (result["run"], result["step"], result["scores"]["total"]) == (str(run), 6, 12)
    assert result["best"]["metric"] == "f1"
    for name in ("config.yaml", "machine.json", "data.json", "status.json", "steps.jsonl", "evals.jsonl", "log.txt"):
        assert (run / name).stat().st_size > 0
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert result["report"] == str(run / "report.html")
    assert rundir.read_run(run).config["optimizer"]["lr"] == 2e-3
    model, words = AutoModelForSeq2SeqLM.from_pretrained(run / "model"), AutoTokenizer.from_pretrained(run / "model")
    assert model.generate(**words("question: What has Ann?", return_tensors="pt"), max_new_tokens=3).shape[0] == 1

    refused = _fivetune("train", recipe, code=4)
    assert refused.startswith("fivetune: ") and "holds a run already. Add --resume to continue it" in refused
    again = _fivetune("train", str(run), "--resume")
    assert "model   " in again and re.search(r"^f1 +\d+\.\d\d +\d+\.\d to \d+\.\d$", again, re.MULTILINE)


def test_the_result_of_labels_is_compared_with_the_most_frequent_one(tmp_path, model_folder, capsys):
    """All held-out tickets are of one label, so that no model is better than always predicting it."""
    for name, rows in (("train", ["hat,red", "coat,blue"] * 8), ("dev", ["hat,red"] * 4)):
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    table = kit.recipe(
        tmp_path,
        model_folder,
        task={"name": "classification", "inputs": "{text}", "label": "label"},
        train__num_steps=1,
    )
    table["data"] |= {"train": str(tmp_path / "train.csv"), "eval": str(tmp_path / "dev.csv")}
    assert cli.main(["train", _write(tmp_path, table), "--no-preflight", "--quiet"]) == 0
    assert re.search(r"^accuracy .* always predicting red \(100\.00\)$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.release
def test_the_same_run_from_its_own_config(tmp_path, model_folder):
    """config.yaml of a run is a recipe: it gives the same weights again."""
    recipe = _write(tmp_path, kit.recipe(tmp_path, model_folder))
    _fivetune("train", recipe, "--quiet")
    _fivetune("train", str(tmp_path / "run" / "config.yaml"), "--run.dir", str(tmp_path / "again"), "--quiet")
    assert kit.weights_of(tmp_path / "run") == kit.weights_of(tmp_path / "again")


@pytest.mark.skipif(not TRAIN.is_file(), reason=kit.NEEDS_SHARED)
@pytest.mark.release
def test_real_input(tmp_path):
    """SQuAD 2.0 with T5's own tokenizer and config at a small size, random weights: the loss falls, scores come out."""
    config = json.loads((TOKENIZER / "config.json").read_text())
    config |= {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {
        "run.dir": tmp_path / "run", "model.init": "random", "model.path": "null",
        "model.config": tmp_path / "config.json",
        "model.tokenizer": TOKENIZER, "data.train": TRAIN, "data.eval": DEV, "data.max_train_examples": 400,
        "data.max_eval_examples": 40, "data.max_input_tokens": 160, "data.max_target_tokens": 24,
        "data.cache_dir": tmp_path / "cache", "optimizer.lr": "5e-3", "train.num_steps": 30, "train.num_epochs": "null",
        "train.batch_size": 8, "train.global_batch_size": 8, "train.num_threads": 1, "eval.every_steps": 30,
        "device": "cpu",
    }  # fmt: skip
    flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    result = json.loads(_fivetune("train", "squad_v2", *flags, "--json").splitlines()[-1])
    run = rundir.read_run(tmp_path / "run")
    losses = [step.loss for step in run.steps]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert run.evals[-1].loss < 0.9 * run.evals[0].loss
    assert result["scores"]["total"] == 40 == result["scores"]["HasAns_total"] + result["scores"]["NoAns_total"]
    assert {"exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1"} <= set(result["scores"])
    assert (tmp_path / "run" / "report.html").stat().st_size > 100_000
    assert run.data.train.num_kept == 400 and run.data.train.num_answers_lost > 0
