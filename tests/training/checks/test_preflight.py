"""Pre-flight: it sees what would go wrong, says what to do, and leaves no trace in the run."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import kit
import pytest
import torch
import yaml
from transformers import AutoTokenizer

from fivetune import cli
from fivetune.errors import FiveTuneEnvironmentError, ModelError, NumericError
from fivetune.model.family import FAMILIES
from fivetune.model.load import count_parameters, load_model_and_tokenizer
from fivetune.training.checks import preflight
from fivetune.training.checks.preflight import Check, run_checks
from fivetune.training.run import train

NAMES = [
    "data", "records", "leakage", "model", "characters", "truncation", "learning rate", "train step", "generation",
    "save and reload", "memory", "disk", "cores",
]  # fmt: skip


def _checks(folder, model, **overrides) -> dict[str, Check]:
    return {check.name: check for check in run_checks(kit.ready(folder, model, **overrides))}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
def test_a_merged_adapter_may_round_otherwise(tmp_path, model_folder, monkeypatch):
    """t5-nano in 4 bits differed by 1.1e-5; weights that are only saved and read differ by nothing."""
    monkeypatch.setattr(preflight, "_measure_reload_error", lambda *_: 1e-4)
    states = [
        preflight._check_reload(kit.ready(tmp_path, model_folder, model__adapter=name)) for name in (None, "lora")
    ]
    assert [state for state, _ in states] == ["fail", "pass"]
    assert states[0][1].startswith("a saved and reloaded model differs by 0.0001 in its token losses")
    monkeypatch.setattr(preflight, "_measure_reload_error", lambda *_: 0.01)
    assert preflight._check_reload(kit.ready(tmp_path, model_folder, model__adapter="lora"))[0] == "fail"


def _other_questions(folder) -> str:
    """An evaluation file without a question of the training file of kit.recipe."""
    path = kit.squad_file(folder / "other.json", num_questions=12)
    path.write_text(path.read_text().replace("What has", "What thing has"))
    return str(path)


def test_all_checks_of_a_good_recipe_pass(tmp_path, model_folder):
    checks = _checks(tmp_path, model_folder, data__eval=_other_questions(tmp_path))
    assert list(checks) == NAMES
    assert {name: c.detail for name, c in checks.items() if c.state != "pass" and name != "disk"} == {}
    assert checks["data"].detail == (
        "train: 24 records read = 24 kept + 0 left out; 24 examples; "
        "eval: 12 records read = 12 kept + 0 left out; 12 examples"
    )
    assert "compared with its file" in checks["model"].detail
    assert "12 predictions, f1 " in checks["generation"].detail and "cap 8 tokens" in checks["generation"].detail
    assert checks["memory"].detail.startswith("forecast: up to ") and "optimizer 389.0 KiB" in checks["memory"].detail
    assert "MiB for checkpoints and model, " in checks["disk"].detail


def test_everything_is_left_as_it_was_found(tmp_path, model_folder):
    setup = kit.ready(tmp_path, model_folder)
    weights = [p.detach().clone() for p in setup.learner.model.parameters()]
    states = setup.learner.optimizer.state_dict()
    list(run_checks(setup))
    assert all(torch.equal(a, b) for a, b in zip(weights, setup.learner.model.parameters(), strict=True))
    assert all(p.grad is None for p in setup.learner.model.parameters())
    assert setup.learner.optimizer.state_dict() == states
    assert not (tmp_path / "run").exists()


def test_inputs_beyond_what_longt5_was_made_for_are_counted(tmp_path, tokenizer_folder, monkeypatch):
    shape = {"model_type": "longt5", "local_radius": 3, "global_block_size": 4, "tie_word_embeddings": True}
    model = kit.make_model(tmp_path / "long", tokenizer_folder, **shape)
    assert FAMILIES["longt5"].longest_input == 16_384
    monkeypatch.setitem(FAMILIES, "longt5", replace(FAMILIES["longt5"], longest_input=20))
    setup = kit.ready(tmp_path, model)
    num = int((setup.data.stream.store.inputs.lengths > 20).sum())
    check = next(check for check in run_checks(setup) if check.name == "truncation")
    assert check.state == "warn" and num > 0
    assert f"train: {num} inputs ({num / 24:.1%}) over 20 tokens, the longest that longt5 has published" in check.detail
    assert check.detail.endswith("Set data.max_input_tokens to 20, or expect lower scores for them.")


@pytest.mark.parametrize("precision", ["fp32", kit.release("fp16")])
def test_training_is_the_same_with_and_without(tmp_path, model_folder, precision):
    for name in ("with", "without"):
        run = {"dir": str(tmp_path / name), "seed": 1}
        table = kit.recipe(tmp_path, model_folder, run=run, train__precision=precision)
        train(table, preflight=name == "with", quiet=True)
    assert kit.weights_of(tmp_path / "with") == kit.weights_of(tmp_path / "without")


@pytest.mark.slow
def test_random_start_is_the_same_with_and_without(tmp_path, model_folder):
    start = {"config": str(model_folder), "tokenizer": str(model_folder), "init": "random"}
    for name in ("with", "without"):
        table = kit.recipe(tmp_path, model_folder, run={"dir": str(tmp_path / name), "seed": 3})
        train({**table, "model": start}, preflight=name == "with", quiet=True)
    assert kit.weights_of(tmp_path / "with") == kit.weights_of(tmp_path / "without")


def _changed_train(folder, change) -> str:
    """The training file of kit.recipe after `change(question, paragraph)` on each of its questions."""
    path = kit.squad_file(folder / "changed.json")
    table = json.loads(path.read_text())
    for number, paragraph in enumerate(table["data"][0]["paragraphs"]):
        change(number, paragraph["qas"][0], paragraph)
    path.write_text(json.dumps(table))
    return str(path)


def test_unknown_characters_are_named(tmp_path, model_folder):
    def change(number, question, paragraph):
        if number % 2:
            question["question"] += " 漢\n"

    check = _checks(tmp_path, model_folder, data__train=_changed_train(tmp_path, change))["characters"]
    assert check.state == "warn"
    assert check.detail.startswith("train: 50.0% of examples hold characters that the tokenizer does not keep: ")
    assert "'漢' (12)" in check.detail and "ByT5 has all" in check.detail


def test_targets_that_no_answer_can_equal_are_named(tmp_path, model_folder):
    def change(number, question, paragraph):
        paragraph["context"] += " end </s>"
        question["is_impossible"] = False
        question["answers"] = [{"text": "end </s>", "answer_start": paragraph["context"].index("end </s>")}]

    check = _checks(tmp_path, model_folder, data__train=_changed_train(tmp_path, change))["characters"]
    assert check.state == "warn" and "targets end in </s>, which FiveTune adds itself" in check.detail


def test_long_answers_and_contexts_are_counted(tmp_path, model_folder):
    check = _checks(tmp_path, model_folder, data__max_input_tokens=16, data__max_target_tokens=2)["truncation"]
    assert check.state == "warn"
    assert "The limit of the inputs cuts the answer out of" in check.detail and "data.overlong: windows" in check.detail
    assert "The limit of the targets cuts" in check.detail
    assert check.detail.endswith("Raise data.max_target_tokens from 2 to 8, which keeps 99 % whole.")


def test_inputs_that_are_the_evidence_are_not_cut_silently(tmp_path, model_folder):
    """95.8 % of the inputs were cut, and the check passed; now it names the limit that fits."""
    task = {"name": "jsonl", "inputs": "{question} {context}", "targets": "{question}"}
    check = _checks(tmp_path, model_folder, task=task, data__max_input_tokens=16)["truncation"]
    assert check.state == "warn" and "The limit of the inputs cuts 5 of 24 in train (20.8 %)" in check.detail
    [fits] = re.findall(r"Raise data.max_input_tokens from 16 to (\d+), which keeps 99 %", check.detail)
    assert _checks(tmp_path, model_folder, task=task, data__max_input_tokens=int(fits))["truncation"].state == "pass"


@pytest.mark.parametrize("change", [str, str.upper, lambda text: text.replace(" ", "  ").replace("?", " ?")])
def test_evaluation_rows_that_are_training_rows_under_other_ids_are_told(tmp_path, model_folder, change):
    learnt = json.loads(kit.squad_file(tmp_path / "train.json").read_text())
    for paragraph in learnt["data"][0]["paragraphs"]:
        paragraph["qas"][0].update(
            id=f"other-{paragraph['qas'][0]['id']}", question=change(paragraph["qas"][0]["question"])
        )
    (tmp_path / "scored.json").write_text(json.dumps(learnt))
    check = _checks(tmp_path, model_folder, data__eval=str(tmp_path / "scored.json"))["leakage"]
    assert check.state == "warn" and check.detail.startswith(
        "24 of 24 evaluation examples have the input of a training"
    )


def test_evaluation_data_that_is_learnt(tmp_path, model_folder):
    copy = shutil.copy(kit.squad_file(tmp_path / "train.json"), tmp_path / "copy.json")
    for path in (copy, tmp_path / "train.json"):
        check = _checks(tmp_path, model_folder, data__eval=str(path))["leakage"]
        assert check.state == "warn" and check.detail.startswith(f"{path} is in data.train and in data.eval")


def test_questions_that_are_learnt_in_another_language(tmp_path, model_folder):
    """Fault C8: 732 ids of XQuAD are in SQuAD-es, in files and texts that differ."""

    def rename(number, question, paragraph):
        question["id"] = f"56be4db0acb8001400a5{number:04x}"

    learnt = shutil.copy(_changed_train(tmp_path, rename), tmp_path / "learnt.json")
    text = Path(_changed_train(tmp_path, rename)).read_text()
    (tmp_path / "other.json").write_text(text.replace("What has", "Was hat").replace(" has a ", " hat "))
    files = {"data__train": str(learnt), "data__eval": str(tmp_path / "other.json")}
    check = _checks(tmp_path, model_folder, **files)["leakage"]
    assert (check.state, check.detail) == (
        "warn",
        "24 of 24 ids of data.eval are in data.train, such as 56be4db0acb8001400a50000: the same questions, perhaps in "
        "another language",
    )


def test_blank_gold_answers_are_counted(tmp_path, model_folder):
    """Fault C4: predicting nothing scored 39.1, and no check counted these."""

    def change(number, question, paragraph):
        blank = [{"text": "", "answer_start": -1}] if number < 3 else []
        question["answers"] = [{"text": "red", "answer_start": 0}, *blank]
        question["is_impossible"] = False

    changed = _changed_train(tmp_path, change)
    check = _checks(tmp_path, model_folder, task="squad", data__train=changed, data__eval=changed)["records"]
    assert check.state == "warn"
    assert (
        "train and eval: records with a blank gold answer beside others, which an empty prediction matches: 3"
        in check.detail
    )


def test_line_ends_are_no_reason_for_a_warning(tmp_path, model_folder):
    def change(number, question, paragraph):
        question["question"] += "\n"

    check = _checks(tmp_path, model_folder, data__train=_changed_train(tmp_path, change))["characters"]
    assert check.state == "pass" and check.detail.endswith("; line ends and other white space become spaces")


@pytest.mark.parametrize(("lr", "state"), [(1e-6, "warn"), (1e-3, "pass"), (0.5, "warn")])
def test_learning_rate_out_of_range(tmp_path, model_folder, lr, state):
    check = _checks(tmp_path, model_folder, optimizer__lr=lr)["learning rate"]
    assert check.state == state
    if state == "warn":
        assert check.detail == f"optimizer.lr {lr:g} is outside 1e-05 to 0.005, where T5 fine-tuning is known to work"


def test_no_evaluation_data_is_a_warning(tmp_path, model_folder):
    checks = _checks(tmp_path, model_folder, data__eval=[])
    assert (checks["records"].state, checks["generation"].state) == ("warn", "warn")
    assert checks["generation"].detail == "no data.eval, nothing to generate for"


def test_score_that_the_evaluation_set_cannot_give(tmp_path, model_folder):
    def unanswerable(number, question, paragraph):
        question.update(answers=[], is_impossible=True)

    setting = {"data__eval": _changed_train(tmp_path, unanswerable), "eval__metric": "HasAns_f1"}
    check = _checks(tmp_path, model_folder, **setting)["generation"]
    assert (check.state, check.error_class.exit_code) == ("fail", 2)
    assert check.detail.startswith("eval.metric: there is no 'HasAns_f1'. Allowed: NoAns_exact")


def test_a_vocabulary_that_loses_most_characters_fails(tmp_path, model_folder):
    """Fault F3: a lost vocabulary was a warning, and the run went on."""

    def cyrillic(number, question, paragraph):
        question["question"] = f"Что есть у Анны {number}? " * 9

    check = _checks(tmp_path, model_folder, data__train=_changed_train(tmp_path, cyrillic))["characters"]
    assert (check.state, check.error_class) == ("fail", ModelError)
    assert re.search(
        r"train: the tokenizer does not keep \d\d% of the characters. Allowed is at most 50%", check.detail
    )


def test_grown_vocabulary_is_a_warning(tmp_path, model_folder):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    words = AutoTokenizer.from_pretrained(folder)
    words.add_tokens([f"<new{i}>" for i in range(200)])
    words.save_pretrained(folder)
    checks = _checks(tmp_path, folder)
    assert checks["model"].state == "warn" and "grown to" in checks["model"].detail
    assert checks["save and reload"].state == "pass"


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("share", "state"), [(0.9, "fail"), (1.5, "warn"), (2.1, "pass")])
def test_disk_space(tmp_path, model_folder, monkeypatch, share, state):
    """Four checkpoints of 12 bytes a weight (fp32, AdamW's two moments) and model/ twice."""
    needed = count_parameters(load_model_and_tokenizer(str(model_folder)).model) * (4 * 12 + 8)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: Usage(2**40, 0, share * needed))
    check = _checks(tmp_path, model_folder)["disk"]
    assert check.state == state
    assert ("Free space, lower checkpoint.keep, or choose another run.dir" in check.detail) is (state == "fail")


def test_sizes_of_a_small_disk_are_given_in_its_unit(tmp_path, model_folder, monkeypatch):
    """On a disk of 20 MB every size rounds to 0.0 GiB."""
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: Usage(20 * 2**20, 0, 300 * 2**10))
    detail = _checks(tmp_path, model_folder)["disk"].detail
    assert detail.startswith("2.7 MiB for checkpoints and model, 300.0 KiB free. Free space")


@pytest.mark.parametrize(("load", "threads", "state"), [(0.5, 2, "pass"), (1e6, 2, "warn"), (1e6, 1, "pass")])
def test_cores_that_other_programs_use(tmp_path, model_folder, monkeypatch, load, threads, state):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(preflight.torch, "get_num_threads", lambda: threads)
    check = _checks(tmp_path, model_folder)["cores"]
    assert (check.state, "train.num_threads 1" in check.detail) == (state, state == "warn")


def test_memory_that_is_nearly_full(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr(preflight, "get_peak_memory_bytes", lambda device: 2**50)
    check = _checks(tmp_path, model_folder)["memory"]
    assert check.state == "warn"
    assert check.detail.endswith("Lower train.batch_size (keep train.global_batch_size) or data.max_input_tokens")


def test_memory_forecast_adds_the_optimizer_state(tmp_path, model_folder, monkeypatch):
    """A step that took 2**33 bytes: its weights, gradients and activations; AdamW's 8 bytes a weight come on top."""
    monkeypatch.setattr(preflight, "get_peak_memory_bytes", lambda device: 2**33)
    monkeypatch.setattr(preflight, "count_parameters", lambda model, trained: 2**28)
    monkeypatch.setattr(preflight, "count_bytes", lambda model: 2**30)
    monkeypatch.setattr(preflight, "count_state_bytes", lambda *_, **__: 2**31)
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: namedtuple("Memory", "total")(2**40))
    assert preflight._check_memory(kit.ready(tmp_path, model_folder)) == (
        "pass",
        "forecast: up to 10.0 GiB of 1.0 TiB: weights 1.0 GiB, gradients 1.0 GiB, optimizer 2.0 GiB, "
        "activations and the rest 6.0 GiB",
    )


def test_first_fp16_step_may_overflow(tmp_path, model_folder):
    setup = kit.ready(tmp_path, model_folder, train__precision="fp16")
    scales = iter([math.inf, math.inf])
    setup.learner.model.shared.weight.register_hook(lambda gradient: gradient * next(scales, 1.0))
    assert preflight._check_train_step(setup)[0] == "pass"
    setup.learner.model.shared.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NumericError):
        preflight._check_train_step(setup)


def test_characters_of_the_evaluation_set_count_too(tmp_path, model_folder):
    def change(number, question, paragraph):
        question["question"] += " 漢\n"

    check = _checks(tmp_path, model_folder, data__eval=_changed_train(tmp_path, change))["characters"]
    assert check.state == "warn" and check.detail.startswith("eval: 100.0% of examples")


def test_run_directory(tmp_path):
    check = preflight.check_run_directory(tmp_path / "new" / "run")
    assert (check.state, check.detail) == ("pass", f"{tmp_path}/new/run is free")
    (tmp_path / "file").write_text("")
    check = preflight.check_run_directory(tmp_path / "file" / "run")
    assert (check.state, check.detail) == ("fail", f"{tmp_path}/file is a file. Choose another run.dir")
    assert preflight.check_run_directory(tmp_path).state == "fail"
    (tmp_path / "config.yaml").write_text("{}")
    check = preflight.check_run_directory(tmp_path)
    assert check.state == "warn" and "--overwrite to move it aside" in check.detail


def test_failed_check_stops_the_run(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: Usage(1, 1, 0))
    with pytest.raises(FiveTuneEnvironmentError, match=r"^pre-flight: disk: .* Free space, lower checkpoint.keep"):
        train(kit.recipe(tmp_path, model_folder), quiet=True)
    assert not (tmp_path / "run").exists(), "a run that never began leaves its place free"


def test_a_reloaded_model_with_nan_fails(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr(preflight, "_measure_reload_error", lambda *_: math.nan)
    assert _checks(tmp_path, model_folder)["save and reload"].state == "fail"


def test_warnings_go_into_the_run(tmp_path, model_folder):
    run = train(kit.recipe(tmp_path, model_folder, optimizer__lr=6e-3, train__num_steps=1), quiet=True)
    assert any(w.startswith("learning rate: optimizer.lr 0.006 is outside") for w in run.warnings)
    assert "pre-flight: " in (tmp_path / "run" / "log.txt").read_text()


# --- the command ---


def _check(capsys, folder, model, *flags: str, **overrides) -> tuple[int, str]:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(kit.recipe(folder, model, **overrides)))
    code = cli.main(["check", str(path), *flags])
    return code, capsys.readouterr().out


def test_command_lists_the_checks(capsys, tmp_path, model_folder):
    code, out = _check(capsys, tmp_path, model_folder, "--json", data__eval=_other_questions(tmp_path))
    assert code == 0
    names = [*NAMES, "run directory"]
    told = [line for line in out.splitlines() if not line.startswith(" ")]
    assert all(line.startswith(f"pass  {name} ") for line, name in zip(told, names, strict=False))
    result = json.loads(out.splitlines()[-1])
    assert [c["name"] for c in result["checks"]] == names
    assert (result["failed"], result["exit_code"]) == (0, 0)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("width", [80, 100])
def test_command_wraps_its_lines_under_their_beginning(capsys, tmp_path, model_folder, monkeypatch, width):
    monkeypatch.setattr("fivetune.commands.CHECK_WIDTH", width)
    bad = _changed_train(tmp_path, _two_bad_records)
    _, out = _check(capsys, tmp_path, model_folder, data__train=bad, data__on_bad_record="skip")
    lines = out.splitlines()
    assert all(len(line) <= width or str(tmp_path) in line for line in lines)
    of_data = lines[: next(i for i, line in enumerate(lines) if "  records" in line)]
    assert of_data[0].startswith("pass  data             train: 24 records read = 22 kept + 2 left out; ")
    assert all(line.startswith(" " * 23 + line.strip()[0]) for line in of_data[1:])
    assert of_data[-1].strip() == "eval: 12 records read = 12 kept + 0 left out; 12 examples"[: width - 23]


def _two_bad_records(number, question, paragraph):
    if number in (3, 5):
        question["answers"] = [{"text": "", "answer_start": 0}]
        question["is_impossible"] = False


def test_command_counts_bad_records(capsys, tmp_path, model_folder):
    bad = _changed_train(tmp_path, _two_bad_records)
    code, out = _check(capsys, tmp_path, model_folder, data__train=bad)
    assert code == 3
    first = " ".join(out.partition("  leakage")[0].split())
    assert first.startswith("pass data") and "24 records read = 22 kept + 2 left out" in first
    assert (
        "fail records train: 2 of 24 records cannot be used, the first: " in first
        and "set data.on_bad_record: skip to train without them" in first
    )
    assert out.splitlines()[-1].endswith("1 failed")


def test_command_may_skip_bad_records(capsys, tmp_path, model_folder):
    bad = _changed_train(tmp_path, _two_bad_records)
    code, out = _check(capsys, tmp_path, model_folder, data__train=bad, data__on_bad_record="skip")
    assert code == 0
    assert any(line.startswith("warn  records") for line in out.splitlines())


def test_command_lists_out_of_memory(capsys, tmp_path, model_folder, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(preflight, "train_step", full)
    code, out = _check(capsys, tmp_path, model_folder)
    assert code == 4
    assert "fail  train step       device: out of memory: CUDA out of memory. Lower train.batch_size" in out
    assert out.splitlines()[-1].endswith("1 failed")


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"optimizer__lr": 1e-30}, 4, "one optimizer step did not change the weights"),
        ({"data__train": "absent.json"}, 3, "absent.json"),
        ({"model__path": "./absent"}, 4, "./absent: no such model folder"),
    ],
)
def test_command_gives_the_exit_code_of_the_error(capsys, tmp_path, model_folder, change, code, message):
    found, out = _check(capsys, tmp_path, model_folder, "--json", **change)
    assert found == code
    assert message in out
    result = json.loads(out.splitlines()[-1])
    assert (result["failed"], result["exit_code"]) == (1, code)
