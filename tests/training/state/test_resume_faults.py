"""A resume after somebody changed, damaged or lost files of the run: refused by name, or reported; never silent."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import kit
import pytest
import torch
from safetensors.torch import load_file

from fivetune import rundir
from fivetune.cli import main
from fivetune.config.model import ModelSection
from fivetune.errors import ConfigError, RunDirError
from fivetune.rundir.checksums import write_checksums
from fivetune.rundir.figures import find_exported_eval
from fivetune.training import evaluate
from fivetune.training.machine import compute_weights_fingerprint
from fivetune.training.run import train
from fivetune.training.state import resume


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model_folder) -> dict:
    """A run of 4 steps with checkpoints at 2 and 4 and its best at 2; copy it before changing it."""
    folder = tmp_path_factory.mktemp("finished")
    options = {"checkpoint": {"every_steps": 2, "keep": 2}, "eval__at_start": False, "model__dropout": 0.1}
    table = kit.recipe(folder, model_folder, train__num_steps=4, eval__every_steps=2, **options)
    train(table, preflight=False, quiet=True)
    return table


@pytest.fixture
def stopped(finished, tmp_path) -> dict:
    """The run as it was at step 2, in a folder of its own."""
    run = Path(shutil.copytree(finished["run"]["dir"], tmp_path / "run", symlinks=True))
    shutil.rmtree(run / "checkpoints" / "4")
    shutil.rmtree(run / "model")
    (run / "checksums.json").unlink()  # of a finished run
    return {**finished, "run": {**finished["run"], "dir": str(run)}}


def path_of(table: dict, name: str) -> Path:
    return Path(table["run"]["dir"]) / name


def edit(path: Path, pattern: str, replacement: str) -> None:
    text = path.read_text()
    assert re.search(pattern, text)
    path.write_text(re.sub(pattern, replacement, text))


def continue_run(table: dict):
    """Resume with the settings that config.yaml has, as `fivetune train RUN --resume` does."""
    return train(
        path_of(table, "config.yaml"), {"run.dir": table["run"]["dir"]}, resume=True, preflight=False, quiet=True
    )


def test_an_unchanged_run_resumes_to_the_same_weights(stopped, finished):
    run = continue_run(stopped)
    assert kit.weights_of(path_of(stopped, ".")) == kit.weights_of(path_of(finished, "."))
    assert run.warnings == []
    parts = run.machine.parts
    assert [part.step for part in parts] == [0, 2] and parts[1].changed == ()
    assert parts[0].num_threads == 1 and parts[0].versions["torch"]


@pytest.mark.parametrize(
    ("pattern", "replacement", "named"),
    [
        (r"dropout: 0.1", "dropout: 0.0", "model.dropout was 0.1, is 0.0"),
        (r"lr: 0.001", "lr: 0.03", "optimizer.lr was 0.001, is 0.03"),
        (r"seed: 1", "seed: 2", "run.seed was 1, is 2"),
        (r"\n  batch_size: 4", "\n  batch_size: 2", "train.batch_size was 4, is 2"),
    ],
)
def test_edited_settings_are_refused_by_name(stopped, pattern, replacement, named):
    edit(path_of(stopped, "config.yaml"), pattern, replacement)
    with pytest.raises(ConfigError, match=f"the checkpoint of step 2 was trained with other settings: {named}. Put"):
        continue_run(stopped)


def test_half_a_config_is_refused(stopped):
    path = path_of(stopped, "config.yaml")
    text = path.read_text()
    path.write_text(text[: text.index("\ntrain:") + 1])
    with pytest.raises((ConfigError, RunDirError)):
        continue_run(stopped)


def test_an_edited_micro_batch_in_the_plan_is_not_followed(stopped, finished):
    edit(path_of(stopped, "plan.json"), r'"batch_size": 4', '"batch_size": 3')
    continue_run(stopped)
    assert kit.weights_of(path_of(stopped, ".")) == kit.weights_of(path_of(finished, "."))
    assert "batch_size is 4, as at the checkpoint (plan.json has 3)" in path_of(stopped, "log.txt").read_text()


@pytest.mark.parametrize("size", [0, -4])
def test_an_impossible_micro_batch_is_refused(stopped, size):
    edit(path_of(stopped, "plan.json"), r'"batch_size": 4', f'"batch_size": {size}')
    with pytest.raises(RunDirError, match=r"plan.json: damaged"):
        continue_run(stopped)


def test_a_damaged_plan_can_be_deleted(stopped, finished):
    path = path_of(stopped, "plan.json")
    path.write_text('{"num_steps": "many"}')
    with pytest.raises(RunDirError, match=r"of the wrong type: num_steps\. Delete the file: a resume writes it again"):
        continue_run(stopped)
    path.unlink()
    continue_run(stopped)
    assert kit.weights_of(path_of(stopped, ".")) == kit.weights_of(path_of(finished, "."))
    assert path.read_bytes() == path_of(finished, "plan.json").read_bytes()


@pytest.mark.parametrize("content", [None, "{}", '{"forward": {"kind": "padded"}}', '{"forward": 3, "parts": 3}'])
def test_a_changed_machine_json_does_not_change_the_numbers(stopped, finished, content):
    path = path_of(stopped, "machine.json")
    path.unlink() if content is None else path.write_text(content)
    run = continue_run(stopped)
    assert kit.weights_of(path_of(stopped, ".")) == kit.weights_of(path_of(finished, "."))
    assert any("machine.json is missing" in text for text in run.warnings) == (content is None)


def test_a_checkpoint_of_another_run_is_refused(stopped, finished):
    other = path_of(stopped, "checkpoints/2")
    state = json.loads((other / "state.json").read_text())
    state["owner"]["run_id"] = "another"
    (other / "state.json").write_text(json.dumps(state))
    write_checksums(other)
    with pytest.raises(
        RunDirError, match=r"checkpoints/2: belongs to another run \(id another; machine\.json .* \w+\)"
    ):
        continue_run(stopped)


def test_a_checkpoint_under_another_step_is_not_used(stopped, finished):
    shutil.copytree(path_of(finished, "checkpoints/4"), path_of(stopped, "checkpoints/3"))
    run = continue_run(stopped)
    assert any("checkpoints/3: state.json is damaged (step is 4)" in text for text in run.warnings)
    assert kit.weights_of(path_of(stopped, ".")) == kit.weights_of(path_of(finished, "."))


def test_a_damaged_fingerprint_in_data_json_is_written_again(stopped, finished):
    """The checkpoints say what they were trained on."""
    edit(path_of(stopped, "data.json"), r'"fingerprint": "\w', '"fingerprint": "<')
    continue_run(stopped)
    assert path_of(stopped, "data.json").read_bytes() == path_of(finished, "data.json").read_bytes()


def test_other_data_are_refused_also_without_data_json(stopped, tmp_path):
    path_of(stopped, "data.json").unlink()
    kit.squad_file(tmp_path / "other.json", num_questions=30)
    edit(path_of(stopped, "config.yaml"), r"train: \S*train.json|- \S*train.json", f"- {tmp_path / 'other.json'}")
    with pytest.raises((ConfigError, RunDirError), match=r"other data|data.train was"):
        continue_run(stopped)


def test_other_content_of_the_same_files_is_refused_also_without_data_json(stopped):
    path_of(stopped, "data.json").unlink()
    train_file = Path(stopped["data"]["train"])
    content = train_file.read_text()
    kit.squad_file(train_file, offset=1)
    try:
        with pytest.raises(RunDirError, match=r"was trained on other data .*checkpoints/2/state\.json differs"):
            continue_run(stopped)
    finally:
        train_file.write_text(content)


def test_a_run_of_a_version_with_another_order_is_refused(stopped, monkeypatch):
    monkeypatch.setattr(resume, "ORDER_VERSION", 1)
    with pytest.raises(RunDirError, match=r"checkpoints/2/state\.json differs.* the version of FiveTune that began it"):
        continue_run(stopped)


def test_lost_histories_are_reported(stopped):
    for name in ("steps.jsonl", "evals.jsonl", "data.json"):
        path_of(stopped, name).unlink()
    warnings = continue_run(stopped).warnings
    for name in ("steps.jsonl", "evals.jsonl", "data.json"):
        assert any(text.startswith(f"{name} is missing: a new one is written") for text in warnings)
    assert "steps.jsonl: 2 of 2 steps are missing: curves, times and verdicts are of the others." in warnings


def test_a_damaged_checkpoint_is_a_warning_of_the_run_also_when_quiet(stopped, capfd):
    (path_of(stopped, "checkpoints/2") / "state.pt").write_bytes(b"")
    run = continue_run(stopped)
    assert any("state.pt is damaged" in text and "starting over" in text for text in run.warnings)
    assert "Set aside as 2.damaged" in capfd.readouterr().err


UNNEEDED = ["status.json", "machine.json", "data.json", "telemetry.jsonl"]
DAMAGED = [b"[]\n", b'{"a": 1\n{}\n', b"\xe5\n"]
PAIRS = [*zip(UNNEEDED, [*DAMAGED, DAMAGED[1]], strict=True)]
MORE_PAIRS = [pair for pair in itertools.product(UNNEEDED, DAMAGED) if pair not in PAIRS]


@pytest.mark.parametrize(("name", "content"), [*PAIRS, *(kit.release(*pair) for pair in MORE_PAIRS)])
def test_files_that_a_resume_does_not_need_do_not_stop_it(stopped, finished, name, content):
    path_of(stopped, name).write_bytes(content)
    run = continue_run(stopped)
    assert run.status.state == "finished" and len([text for text in run.warnings if name in text]) == 1
    assert kit.weights_of(path_of(stopped, ".")) == kit.weights_of(path_of(finished, "."))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"step": 2, "task": "squ', "evals.jsonl:2: damaged line (no whole JSON value). It is left out."),
        ("[]\n", "evals.jsonl:2: damaged line (an array instead of an object). It is left out."),
        ('{"step": 2}\n', "evals.jsonl: damaged: lines that lack needed values are left out: 1."),
    ],
)
def test_damaged_lines_of_evaluations_are_named_once_by_a_resume(stopped, finished, capfd, line, named):
    path = path_of(stopped, "evals.jsonl")
    path.write_text(path.read_text().partition("\n")[0] + f"\n{line}")
    run = continue_run(stopped)
    assert [text for text in run.warnings if "evals.jsonl" in text] == [f"{path.parent}/{named}"]
    assert " ".join(capfd.readouterr().err.split()).count(named) == 1
    assert [record.step for record in run.evals] == [2, 4]
    assert kit.weights_of(path_of(stopped, ".")) == kit.weights_of(path_of(finished, "."))


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("status.json", "{}", "it holds no values. Set aside as status.json.damaged; the run does not need it."),
        ("status.json", '{"state": "oops"}', "'state' is 'oops', none of preparing, "),
        ("status.json", '{"state": null, "begun": true}', "'state' is None, none of preparing, "),
        ("machine.json", "{}", "it holds no values. Set aside as machine.json.damaged; the run does not need it."),
    ],
)
def test_empty_files_and_unknown_states_are_named_once_by_a_resume(stopped, capfd, name, content, named):
    path_of(stopped, name).write_text(content)
    run = continue_run(stopped)
    (warning,) = [text for text in run.warnings if name in text]
    assert warning.startswith(f"{path_of(stopped, name)}: damaged: {named}") and run.status.state == "finished"
    assert " ".join(capfd.readouterr().err.split()).count(f"{name}: damaged: ") == 1


def test_weights_of_a_damaged_best_checkpoint_are_not_exported(tmp_path, model_folder, monkeypatch):
    kit.scored(monkeypatch, [9.0, 8.0])
    table = kit.recipe(tmp_path, model_folder, train__num_steps=2, eval__every_steps=1, eval__at_start=False)
    with monkeypatch.context() as patch:
        patch.setattr("fivetune.training.run.export_model", lambda training: [])
        train(table, preflight=False, quiet=True)
    run = tmp_path / "run"
    weights = run / "checkpoints" / "1" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    found = train(table, resume=True, preflight=False, quiet=True)
    assert any("It was the best checkpoint; model/ holds the last weights instead." in one for one in found.warnings)
    last = load_file(run / "checkpoints" / "2" / "model.safetensors")
    exported = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in last.items())


def test_a_damaged_optimizer_state_of_the_best_checkpoint_costs_nothing(finished, tmp_path):
    run = Path(shutil.copytree(finished["run"]["dir"], tmp_path / "run", symlinks=True))
    last, best = run / "checkpoints" / "4", run / "checkpoints" / "2"
    state = json.loads((last / "state.json").read_text())
    (last / "state.json").write_text(json.dumps({**state, "best": {**state["best"], "step": 2}}))
    write_checksums(last)
    (best / "state.pt").write_bytes(b"")
    after = continue_run({**finished, "run": {"dir": str(run)}})
    assert after.status.incomplete is None
    expected = load_file(best / "model.safetensors")
    exported = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported.items() if name in expected)


@pytest.mark.parametrize(
    "names", [[".lock"], [".lock", ".probe"], [".lock", "log.txt", ".config.yaml.1.tmp"]], ids=" ".join
)
def test_a_run_killed_in_its_first_milliseconds_can_be_resumed(tmp_path, model_folder, names):
    table = kit.recipe(tmp_path, model_folder, train__num_steps=1, eval__at_start=False)
    (tmp_path / "run").mkdir()
    for name in names:
        (tmp_path / "run" / name).touch()
    assert train(table, resume=True, preflight=False, quiet=True).status.state == "finished"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"eval.metric": "exact"}, "eval.metric was f1, is exact."),
        ({"data.eval": "train.json"}, "the evaluation data differ."),
        ({"eval.num_beams": 2}, "eval.num_beams was 1, is 2."),
        ({"eval.max_examples": 4}, "eval.max_examples was null, is 4."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_scores_of_another_evaluation_are_not_compared(tmp_path, model_folder, monkeypatch, changes, expected):
    """The best score stayed that of the other metric: the early step was exported, with a score of other data."""
    monkeypatch.chdir(tmp_path)
    kit.scored(monkeypatch, [90.0, 1.0, 2.0])
    table = kit.recipe(tmp_path, model_folder, train__num_steps=2, eval__every_steps=2, eval__at_start=False)
    before = train(table, preflight=False, quiet=True).evals[0]
    run = train(table, changes, resume=True, preflight=False, quiet=True)
    assert any(text.startswith("the best evaluation so far, of step 2,") for text in run.warnings)
    assert any(expected in text for text in run.warnings)
    assert run.status.best.metric == changes.get("eval.metric", "f1") and run.status.best.score < 90
    assert run.status.best.step == 2 and [record.step for record in run.evals[:2]] == [2, 2]
    is_same_basis = "eval.metric" in changes or "eval.max_examples" in changes
    assert (run.evals[1].basis == before.basis) == is_same_basis


@pytest.mark.parametrize(("changes", "is_told"), [({"eval.num_beams": 2}, True), ({"eval.max_examples": 4}, False)])
def test_scores_of_another_evaluation_than_that_of_step_0_are_told(tmp_path, model_folder, changes, is_told):
    table = kit.recipe(tmp_path, model_folder, train__num_steps=2, eval__every_steps=2, checkpoint__every_steps=1)
    whole = evaluate.run_evaluation
    with pytest.MonkeyPatch.context() as patch, pytest.raises(pytest.exit.Exception):
        patch.setattr(
            evaluate, "run_evaluation", lambda *a, step, **k: pytest.exit("") if step else whole(*a, step=0, **k)
        )
        train(table, preflight=False, quiet=True)
    run = train(table, changes, resume=True, preflight=False, quiet=True)
    expected = "the evaluations so far are not compared with later ones: eval.num_beams was 1, is 2."
    assert run.warnings == ([expected] if is_told else [])


def test_a_setting_that_changes_no_score_keeps_the_best_evaluation(tmp_path, model_folder, monkeypatch):
    kit.scored(monkeypatch, [90.0])
    table = kit.recipe(tmp_path, model_folder, train__num_steps=2, eval__every_steps=2, eval__at_start=False)
    train(table, preflight=False, quiet=True)
    run = train(table, {"eval.batch_size": 2, "eval.max_examples": 12}, resume=True, preflight=False, quiet=True)
    assert run.warnings == [] and run.status.best.score == 90 and len(run.evals) == 1


@pytest.mark.slow
def test_the_whole_set_is_evaluated_again_after_the_evaluation_data_changed(tmp_path, model_folder):
    """The score of the exported weights was that of the earlier data."""
    table = kit.recipe(tmp_path, model_folder, train__num_steps=2, eval__at_start=False, eval__max_examples=4)
    train(table, preflight=False, quiet=True)
    run = train(table, {"data.eval": str(tmp_path / "train.json")}, resume=True, preflight=False, quiet=True)
    found = [(record.split, record.num_examples) for record in run.evals]
    assert found == [("subset", 4), ("eval", 12), ("subset", 4), ("eval", 24)]
    assert find_exported_eval(run) == run.evals[3]


@pytest.mark.slow
def test_a_run_resumed_without_evaluation_data_keeps_the_best_of_a_subset(tmp_path, model_folder):
    """It ended with an AssertionError."""
    table = kit.recipe(tmp_path, model_folder, train__num_steps=3, eval__at_start=False, eval__max_examples=4)
    table["eval"]["every_steps"] = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fivetune.training.run.export_model", lambda training: [])
        best = train(table, {"train.num_steps": 2}, preflight=False, quiet=True).status.best
    run = train(table, {"data.eval": []}, resume=True, preflight=False, quiet=True)
    assert (run.status.state, run.status.step, run.status.best) == ("finished", 3, best)
    assert any(text.startswith("the run has no evaluation data now: later") for text in run.warnings)
    assert "Scores on 4 evaluation examples at step" in path_of(table, "model/README.md").read_text()
    again = train(table, {"eval.num_beams": 2}, resume=True, preflight=False, quiet=True)
    assert any("eval.num_beams was 1, is 2." in text for text in again.warnings)


def test_a_refused_resume_of_a_killed_run_leaves_it_interrupted(stopped):
    """It became a failed run, which a sweep trains from the start."""
    edit(path_of(stopped, "status.json"), '"finished"', '"running"')
    with pytest.raises(ConfigError, match=r"has done [0-9]+ steps, and train\.num_steps or train\.num_epochs sets 1\."):
        train(stopped, {"train.num_steps": 1}, resume=True, preflight=False, quiet=True)
    assert rundir.read_status(path_of(stopped, ".")).state == "interrupted"


def test_fewer_steps_than_the_checkpoint_has_are_refused_without_status_json(stopped):
    path_of(stopped, "status.json").unlink()
    with pytest.raises(ConfigError, match=r"has done 2 steps, and train\.num_steps or train\.num_epochs sets 1\."):
        train(stopped, {"train.num_steps": 1}, resume=True, preflight=False, quiet=True)


def test_a_checkpoint_killed_between_the_renames_of_its_replacement_is_used(stopped, finished):
    path_of(stopped, "checkpoints/2").rename(path_of(stopped, "checkpoints/.2.old"))
    run = continue_run(stopped)
    assert [part.step for part in run.machine.parts] == [0, 2] and run.warnings == []
    assert kit.weights_of(path_of(stopped, ".")) == kit.weights_of(path_of(finished, "."))


def test_a_run_killed_after_its_last_checkpoint_is_tidied_up(finished, tmp_path):
    """Neither `best` nor the older checkpoints had been updated."""
    run = Path(shutil.copytree(finished["run"]["dir"], tmp_path / "run", symlinks=True))
    best = (run / "best").readlink()
    (run / "best").unlink()
    shutil.copytree(run / "checkpoints" / "2", run / "checkpoints" / "1")
    (run / "checkpoints" / "1" / "manifest.json").unlink()
    continue_run({**finished, "run": {**finished["run"], "dir": str(run)}})
    assert (run / "best").readlink() == best
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["2", "4"]


def test_another_environment_is_listed_and_warned_of():
    before = {"device": {"name": "A"}, "num_threads": 2, "versions": {"torch": "2.11"}}
    parts, warnings = resume.add_part((), before, step=0)
    assert warnings == []
    parts, warnings = resume.add_part(parts, {**before, "num_threads": 1, "versions": {"torch": "2.12"}}, step=7)
    added, _ = resume.add_part(parts[:1], {**before, "versions": {"torch": "2.11", "peft": "0.18"}}, step=7)
    assert added[1].changed == ("versions.peft: none -> 0.18",)
    assert parts[1].changed == ("num_threads: 2 -> 1", "versions.torch: 2.11 -> 2.12")
    assert warnings == [
        "from step 7 on the environment differs: num_threads: 2 -> 1; versions.torch: 2.11 -> 2.12. "
        "Losses may differ in the last bits."
    ]


@pytest.mark.parametrize(("step", "source"), [(0, "the new files"), (7, "the checkpoint")])
def test_other_weights_at_the_model_s_path_are_recorded(model_folder, tmp_path, step, source):
    """A weight that changes by one bit, in files of the same size."""
    path = tmp_path / "model"
    shutil.copytree(model_folder, path)
    before = compute_weights_fingerprint(ModelSection(path=str(path)))
    weights = path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    after = compute_weights_fingerprint(ModelSection(path=str(path)))
    parts, _ = resume.add_part((), {"model": before}, step=0)
    (_, part), (warning,) = resume.add_part(parts, {"model": after}, step=step)
    assert part.changed == (f"model: {before} -> {after}",) and before
    assert warning.endswith(f"The weights at model.path have changed: the run continues with those of {source}.")
    assert resume.add_part([replace(parts[0], model=None)], {"model": after}, step=step)[1] == []


def test_weights_of_the_hub_or_of_nobody_have_no_fingerprint(model_folder):
    for model in (ModelSection(path="org/name"), ModelSection(path=str(model_folder), init="random")):
        assert compute_weights_fingerprint(model) is None


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_changed_setting_of_evaluation_in_config_yaml_is_named(finished, tmp_path, capsys, is_changed):
    """predict answered with other settings than the run's, and said nothing."""
    run = Path(shutil.copytree(finished["run"]["dir"], tmp_path / "run", symlinks=True))
    if is_changed:
        edit(run / "config.yaml", r"length_penalty: 1.0", "length_penalty: 3.0")
    sentence = f"{run}/config.yaml: differs from what the run wrote (its checksum differs). Unless you edited it, "
    assert main(["predict", str(run), "--inputs", "What has Ann?"]) == 0
    assert (sentence in " ".join(capsys.readouterr().err.split())) == is_changed
    found = rundir.read_run(run)
    assert any(text.startswith(sentence) for text in found.damage) == is_changed
    resumed = continue_run({**finished, "run": {"dir": str(run)}})
    assert any(text.startswith(sentence) for text in resumed.warnings) == is_changed
    assert rundir.read_run(run).damage == []  # the resume wrote the settings that count now
