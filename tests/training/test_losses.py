"""Options of the loss in a run: any split of a step, the recorded loss, weights of labels, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import family_kit
import kit
import pytest
import torch

from fivetune import rundir
from fivetune.config import load_config
from fivetune.data.store.batch import collate
from fivetune.errors import ConfigError
from fivetune.reading.report.page.parts import Table, Text
from fivetune.reading.report.run.settings import build_settings_section
from fivetune.rundir.reader import read_plan
from fivetune.rundir.records import BestEval, Run
from fivetune.training.run import train
from fivetune.training.setup import Setup, set_up
from fivetune.training.step.update import train_step


def make_tickets(folder: Path, model: Path, **overrides: Any) -> dict[str, Any]:
    """A recipe that classifies 12 tickets, 3 of them late."""
    rows = [{"id": f"t{i}", "text": f"Ann has a {w}", "label": label} for i, (w, label) in enumerate(
        [("hat", "lost")] * 9 + [("coat", "late")] * 3
    )]  # fmt: skip
    (folder / "tickets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {name: str(folder / "tickets.jsonl") for name in ("train", "eval")} | {"cache_dir": str(folder / "cache")}
    task = {"name": "classification", "inputs": "{text}"}
    return kit.recipe(folder, model, task=task, data=data, **overrides)


def compute_gradient(setup: Setup, rows: list[int], *, cut: int) -> tuple[float, torch.Tensor]:
    """The loss and the gradient that the optimizer gets for some rows in micro-batches of `cut`."""
    seen: list[torch.Tensor] = []
    handle = setup.learner.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: seen.append(
            torch.cat([p.grad.flatten().clone() for g in optimizer.param_groups for p in g["params"]])
        )
    )
    store = setup.data.stream.store
    group = [collate(store, rows[i : i + cut]) for i in range(0, len(rows), cut)]
    update = train_step(setup.learner, group, lr=0.0, step=1)
    handle.remove()
    return update.loss, seen[0]


@pytest.mark.parametrize("forward", ["flat", "padded"])
@pytest.mark.parametrize("loss", [{"label_smoothing": 0.2}, {"z_loss": 0.1}, {"class_weights": {"late": 4}}], ids=str)
def test_any_split_of_a_step_gives_one_gradient_and_the_plain_loss(tmp_path, model_folder, loss, forward):
    options: dict[str, Any] = {"model__dropout": 0.0, "train__max_grad_norm": None, "train__forward": forward}
    plain, setup = (set_up(load_config(make_tickets(tmp_path, model_folder, **options, loss=o))) for o in ({}, loss))
    rows = [0, 9, 1, 10, 2, 3]
    plain_loss, plain_gradient = compute_gradient(plain, rows, cut=6)
    found = [compute_gradient(setup, rows, cut=cut) for cut in (6, 3, 1)]
    assert [one for one, _ in found] == pytest.approx([plain_loss] * 3, rel=1e-5)
    for _, gradient in found[1:]:
        assert ((gradient - found[0][1]).norm() / found[0][1].norm()).item() < 1e-5
    assert ((found[0][1] - plain_gradient).norm() / plain_gradient.norm()).item() > 0.01


def test_balanced_weights_are_those_of_scikit_learn_and_recorded(tmp_path, model_folder, capsys):
    table = make_tickets(tmp_path, model_folder, loss={"class_weights": "balanced"}, train__num_steps=1)
    train(table, preflight=False)
    plan = read_plan(tmp_path / "run")
    assert plan and plan.class_weights == {"late": pytest.approx(12 / (2 * 3)), "lost": pytest.approx(12 / (2 * 9))}
    assert "loss with class_weights (late 2, lost 0.667)" in capsys.readouterr().err
    setup = set_up(load_config(table))
    assert sorted(setup.learner.forward.objective.class_weights.values()) == pytest.approx([2 / 3, 2])
    store = setup.data.stream.store
    weights = setup.learner.forward.objective.weigh_examples(collate(store, list(range(12))))
    assert weights.tolist() == pytest.approx([2 / 3] * 9 + [2.0] * 3)


def test_weights_by_hand_ignore_case_and_are_numbers_of_labels(tmp_path, model_folder):
    weights = {"class_weights": "{LATE: 3}"}
    setup = set_up(load_config(make_tickets(tmp_path, model_folder, loss=weights)))
    assert setup.plan.class_weights == {"late": 3.0, "lost": 1.0}
    numbers = load_config(make_tickets(tmp_path, model_folder), {"loss.class_weights": {0: 3, True: 2}})
    assert numbers.loss.class_weights == {"0": 3.0, "true": 2.0}


def test_r_drop_trains_with_two_passes_and_counts_them(tmp_path, model_folder):
    table = kit.recipe(tmp_path, model_folder, loss={"r_drop": 1.0}, model__dropout=0.2, train__num_steps=2)
    run = train(table, preflight=True, quiet=True)
    table["run"]["dir"], table["loss"] = str(tmp_path / "plain"), {}
    plain = train(table, preflight=False, quiet=True)
    assert run.steps[0].encoder_flops == pytest.approx(2 * (plain.steps[0].encoder_flops or 0))
    assert run.steps[0].padding_fraction == plain.steps[0].padding_fraction
    assert run.steps[0].loss == pytest.approx(plain.steps[0].loss, rel=0.1)
    assert run.steps[0].loss != plain.steps[0].loss
    resumed = train({**table, "run": {"dir": str(tmp_path / "run"), "seed": 1}, "loss": {"r_drop": 1.0}}, resume=True)
    assert resumed.status.step == 2


def test_r_drop_is_in_the_padded_forward_too(tmp_path, model_folder):
    """Both passes draw masks of their own; without them the divergence would be 0 and alpha without effect."""
    seen = []
    for alpha in (1e-9, 5.0):
        setup = kit.ready(tmp_path, model_folder, loss={"r_drop": alpha}, model__dropout=0.2, train__forward="padded")
        torch.manual_seed(0)
        seen.append(compute_gradient(setup, [0, 1, 2], cut=3))
    assert seen[0][0] == pytest.approx(seen[1][0], rel=1e-6)
    assert ((seen[0][1] - seen[1][1]).norm() / seen[0][1].norm()).item() > 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss.class_weights": "balanced"}, "--loss.class_weights: loss.class_weights weighs the labels of a label "
         "task, and the answers of task squad_v2 are free text. Remove it, or use task.name classification."),
        ({"loss.class_weights": "even"}, "there is no 'even'. Allowed: balanced, or a table such as {rare: 3"),
        ({"loss.class_weights": {"late": 0}}, "the weight of late is 0. Allowed is a number above 0, such as 3."),
        ({"loss.label_smoothing": 1}, "Input should be less than 1, not 1."),
        ({"loss.z_loss": -1}, "Input should be greater than or equal to 0, not -1."),
        ({"loss.smoothing": 1}, "loss.smoothing is not a setting. Did you mean label_smoothing?"),
        ({"loss.r_drop": 1, "model.dropout": 0}, "loss.r_drop 1 compares two passes with different dropout, and "
         "model.dropout is 0. Set model.dropout: 0.1, or remove loss.r_drop."),
        ({"loss.z_loss": 1e-4, "task.head": "extractive"}, "loss.z_loss is an option of generated answers. Remove it, "
         "or set task.head: generate."),
        ({"loss.label_smoothing": 0.1, "device": "tpu"}, "loss.label_smoothing 0.1 is not supported with device tpu. "
         "Use 0.0."),
        ({"loss.r_drop": 1, "device": "tpu"}, "loss.r_drop 1.0 is not supported with device tpu. Use 0.0."),
        ({"train.early_stopping": {"patience": 2, "metric": "f2"}}, "train.early_stopping.metric 'f2' is neither a "
         "score of task squad_v2 nor loss. Did you mean f1? Allowed: "),
        ({"train.early_stopping": {"min_delta": 2}}, "train.early_stopping.patience: Field required"),
        ({"train.early_stopping": 0}, "train.early_stopping.patience: Input should be greater than 0"),
        ({"train.early_stopping": "soon"}, "--train.early_stopping: 'soon' is not a number of evaluations. Give one"),
    ],
)  # fmt: skip
def test_what_is_refused_before_a_model_is_loaded(tmp_path, changes, message):
    with pytest.raises(ConfigError) as caught:
        load_config(kit.recipe(tmp_path, Path("no-such-model")), changes)
    assert message in str(caught.value)


def test_a_name_that_is_no_label_is_refused_before_the_model_is_loaded(tmp_path):
    table = make_tickets(tmp_path, tmp_path / "no-such-model", loss={"class_weights": {"lat": 2}})
    with pytest.raises(ConfigError, match=r"loss.class_weights: 'lat' is not a label of the task. Did you mean late"):
        set_up(load_config(table))


def test_r_drop_of_a_model_without_dropout_is_refused(tmp_path, tokenizer_folder):
    model = kit.make_model(tmp_path / "dry", tokenizer_folder)
    kit.changed_config(model, dropout_rate=0.0)
    with pytest.raises(ConfigError, match=r"loss.r_drop 1: it compares two passes .* this model has none"):
        kit.ready(tmp_path, model, model__dropout=None, loss={"r_drop": 1})


def test_r_drop_of_bart(tmp_path):
    """Its dropout is no module, but a function with the rate of the config."""
    bart = family_kit.make_family_model(tmp_path / "bart", "bart")
    options: dict[str, Any] = {"model__any_seq2seq": True, "loss": {"r_drop": 1.0}}
    losses = []
    for alpha in (1e-9, 5.0):
        setup = kit.ready(tmp_path, bart, **options | {"loss": {"r_drop": alpha}}, model__dropout=0.2)
        torch.manual_seed(0)
        losses.append(compute_gradient(setup, [0, 1, 2], cut=3)[1])
    assert ((losses[0] - losses[1]).norm() / losses[0].norm()).item() > 0.01
    kit.changed_config(bart, dropout=0.0)
    with pytest.raises(ConfigError, match=r"loss.r_drop 1: it compares two passes .* this model has none"):
        kit.ready(tmp_path, bart, **options, model__dropout=None)


def test_labels_of_equal_tokens_have_one_weight(tmp_path, model_folder):
    table = make_tickets(tmp_path, model_folder, loss={"class_weights": {"late": 2}}, data__max_target_tokens=1)
    table["eval"]["score_labels"] = False
    with pytest.raises(ConfigError, match=r"the targets 'late' and 'lost' have the same tokens, so their weights"):
        set_up(load_config(table))


# --- early stopping ---


def test_a_patience_is_kept_beside_a_metric_of_the_command_line(tmp_path):
    table = kit.recipe(tmp_path, Path("no-such-model"), train__early_stopping=3)

    def read(overrides: dict[str, Any], **layer: Any) -> Any:
        rule = load_config({**table, "train": {**table["train"], **layer}}, overrides).train.early_stopping
        return rule and (rule.patience, rule.min_delta, rule.metric)

    assert read({"train.early_stopping.metric": "loss"}) == (3, 0, "loss")
    assert read({"train.early_stopping.patience": 2, "train.early_stopping.min_delta": 1}) == (2, 1, None)
    assert read({"train.early_stopping.metric": "loss"}, early_stopping={"patience": 4, "min_delta": 2}) == (
        4,
        2,
        "loss",
    )
    assert read({"train.early_stopping": 5}, early_stopping={"patience": 4, "min_delta": 2}) == (5, 0, None)
    assert read({"train.early_stopping": None}) is None
    with pytest.raises(ConfigError, match=r"train.early_stopping.patience: Field required"):
        read({"train.early_stopping.metric": "loss"}, early_stopping=None)


def stop(folder: Path, model: Path, rule: Any, **overrides: Any) -> Run:
    table = kit.recipe(folder, model, eval__every_steps=2, train__num_steps=20, train__early_stopping=rule, **overrides)
    return train(table, preflight=False, quiet=True)


def test_an_improvement_is_larger_than_min_delta(tmp_path, model_folder, monkeypatch):
    """9 is the best, and 8 the last that was better by more than 1: 8.5, 9 and 8.9 are not."""
    kit.scored(monkeypatch, [5.0, 8.0, 8.5, 9.0, 8.9, 9.9], [3.0, 2.9, 2.8, 2.7, 2.6, 2.5])
    run = stop(tmp_path, model_folder, {"patience": 3, "min_delta": 1})
    assert (run.status.step, run.status.best) == (10, BestEval(8, "f1", 9.0, 2.7))
    assert run.status.why == (
        "stopped early after step 10 of 20: no evaluation was better than that of step 4 (f1 8.00) by more than 1 in 3 "
        "evaluations (train.early_stopping)"
    )


def test_the_loss_stops_a_run_whose_score_still_rises(tmp_path, model_folder, monkeypatch):
    kit.scored(monkeypatch, [5.0, 6.0, 7.0, 8.0, 9.0], [3.0, 2.0, 2.1, 2.0, 1.0])
    run = stop(tmp_path, model_folder, {"patience": 2, "metric": "loss"})
    assert (run.status.step, run.status.best) == (8, BestEval(8, "f1", 8.0, 2.0))
    assert "better than that of step 4 (loss 2.0000) in 2 evaluations" in run.status.why


def test_a_run_that_is_resumed_stops_at_the_same_step(tmp_path, model_folder, monkeypatch):
    """It ends at step 6, one evaluation after the last improvement, and is extended."""
    scores = {2: 5.0, 4: 8.0, 6: 8.5, 8: 9.0, 10: 8.9, 12: 30.0}
    rule, folders = {"patience": 3, "min_delta": 1.0}, [tmp_path / "whole", tmp_path / "halves"]
    found = []
    for folder in folders:
        folder.mkdir()
        kit.scored(monkeypatch, scores, [3.0] * 12)
        table = kit.recipe(folder, model_folder, eval__every_steps=2, train__num_steps=20, train__early_stopping=rule)
        if folder.name == "halves":
            table["checkpoint"] = {"every_steps": 2}
            train({**table, "train": {**table["train"], "num_steps": 6}}, preflight=False, quiet=True)
            train(table, resume=True, quiet=True)
        else:
            train(table, preflight=False, quiet=True)
        found.append(rundir.read_status(folder / "run"))
    assert found[0].why == found[1].why and (found[0].step, found[1].step) == (10, 10)
    assert kit.weights_of(folders[0] / "run") == kit.weights_of(folders[1] / "run")


def test_a_resume_with_another_metric_counts_from_there(tmp_path, model_folder, monkeypatch):
    kit.scored(monkeypatch, [9.0, 8.0, 7.0, 6.0, 5.0, 4.0], [3.0, 2.0, 1.0, 2.0, 2.0, 2.0])
    run = stop(tmp_path, model_folder, 2)
    assert run.status.step == 6
    table = kit.recipe(tmp_path, model_folder, eval__every_steps=2, train__num_steps=20)
    table["train"]["early_stopping"] = {"patience": 2, "metric": "loss"}
    again = train(table, resume=True, quiet=True)
    assert again.status.step == 12 and "better than that of step 8 (loss 2.0000) in 2" in again.status.why


def test_the_report_names_the_options_that_are_on():
    config = {"model": {"path": "m"}, "loss": {"z_loss": 1e-4, "r_drop": 0.0, "class_weights": {"late": 2.0}}}
    table, note, *_ = build_settings_section(Run("run", config=config)).parts
    assert isinstance(table, Table) and isinstance(note, Text)
    assert list(table.rows[-2:]) == [("loss.z_loss", "0.0001"), ("loss.class_weights.late", "2")]
    assert "r_drop" not in repr(table) and "plain negative log-likelihood" in note.body
