"""find-lr: rates measured on a tiny model, their choice, their page, the weights untouched."""

from __future__ import annotations

import json

import kit
import pytest
import torch
import yaml
from fake_run import fake_run

from fivetune import cli, rundir
from fivetune.config import load_config
from fivetune.errors import ConfigError, NumericError
from fivetune.reading.report.page.render import render_html
from fivetune.reading.report.run.build import build_page
from fivetune.reading.report.run.range_test import build_range_test_page
from fivetune.training.autotune import find_lr as finder
from fivetune.training.autotune.find_lr import choose_lr, find_lr
from fivetune.training.autotune.probe import restore_learner
from fivetune.training.step.groups import build_optimizer
from fivetune.training.step.update import train_step


def rates() -> dict:
    lrs = [1e-6 * 1.2**i for i in range(60)]
    found = choose_lr(lrs, [3 - 2 * i / 50 for i in range(50)] + [1.0 + i for i in range(10)], "all rates were tried")
    return json.loads(
        json.dumps(
            {
                "lrs": found.lrs,
                "losses": found.losses,
                "smoothed": found.smoothed,
                "lr": found.lr,
                "steepest": found.steepest,
                "tenth": found.tenth,
                "rule": found.rule,
                "stopped": found.stopped,
            }
        )
    )


def test_rates_grow_by_a_factor_and_divergence_ends_the_test(tmp_path, model_folder):
    config = load_config(kit.recipe(tmp_path, model_folder))
    found = find_lr(config, low=1e-5, high=10, num_steps=25)
    factors = {round(b / a, 6) for a, b in zip(found.lrs, found.lrs[1:], strict=False)}
    assert len(factors) == 1 and found.lrs[0] == 1e-5
    assert len(found.losses) == len(found.smoothed) == len(found.lrs)
    assert found.lr is not None and found.tenth is not None and 1e-4 < found.lr < 1
    lowest = found.lrs[found.smoothed.index(min(found.smoothed))]
    assert found.tenth == pytest.approx(lowest / 10) and found.lr == pytest.approx(found.tenth, rel=0.06)


def test_a_loss_that_is_not_finite_ends_the_test(tmp_path, model_folder, monkeypatch):
    def fail(learner, group, *, step, **named):
        if step == 12:
            raise NumericError("nan")
        return train_step(learner, group, step=step, **named)

    monkeypatch.setattr(finder, "train_step", fail)
    found = find_lr(load_config(kit.recipe(tmp_path, model_folder)), low=1e-5, high=1e-3, num_steps=20)
    assert len(found.losses) == 11 and found.stopped.startswith("the loss was not finite at a rate of")


def test_weights_and_optimizer_are_restored(tmp_path, model_folder):
    setup = kit.ready(tmp_path, model_folder)
    before = {name: value.clone() for name, value in setup.learner.model.state_dict().items()}
    random = torch.get_rng_state()
    with restore_learner(setup.learner, build_optimizer(setup.config, setup.learner.model)) as learner:
        train_step(learner, setup.data.stream.build_micro_batches(0), lr=1.0, step=1)
        assert any(not torch.equal(value, before[name]) for name, value in setup.learner.model.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in setup.learner.model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not setup.learner.optimizer.state and all(p.grad is None for p in setup.learner.model.parameters())


def test_an_optimizer_that_makes_its_own_rate_is_refused(tmp_path, model_folder):
    optimizer = {"name": "adafactor", "relative_step": True}
    config = load_config(kit.recipe(tmp_path, model_folder) | {"optimizer": optimizer})
    with pytest.raises(ConfigError, match=r"optimizer\.relative_step: the optimizer computes its own rate"):
        find_lr(config)


@pytest.mark.parametrize(("low", "high", "steps"), [(1.0, 0.1, 100), (0.0, 1.0, 100), (1e-5, 1.0, 5)])
def test_a_range_that_is_none_is_refused(tmp_path, model_folder, low, high, steps):
    with pytest.raises(ConfigError, match="is not a range"):
        find_lr(load_config(kit.recipe(tmp_path, model_folder)), low=low, high=high, num_steps=steps)


def test_a_loss_that_never_falls_gives_no_choice():
    found = choose_lr([1e-5 * 2**i for i in range(20)], [1.0 + i for i in range(20)], "")
    assert (found.lr, found.steepest, found.tenth) == (None, None, None)
    text = render_html(build_range_test_page({**rates(), "lr": None, "steepest": None}, run="r"))
    assert "No rate can be chosen: the loss did not fall" in text


# --- command and pages ---


@pytest.mark.slow
def test_the_command_prints_the_setting_and_the_report_shows_the_test(tmp_path, model_folder, capsys):
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(kit.recipe(tmp_path, model_folder)))
    recipe = str(tmp_path / "r.yaml")
    assert cli.main(["find-lr", recipe, "--high", "1", "--steps", "30"]) == 0
    found = json.loads((tmp_path / "run.find-lr.json").read_text())
    assert f"use   --optimizer.lr {found['lr']:g}\n" in capsys.readouterr().out
    assert (tmp_path / "run.find-lr.html").is_file() and not (tmp_path / "run").exists()
    assert cli.main(["train", recipe, "--quiet", "--no-preflight"]) == 0
    assert rundir.read_run(tmp_path / "run").range_test["lr"] == found["lr"]
    assert "Learning-rate range test" in (tmp_path / "run" / "report.html").read_text()


def test_a_report_shows_a_test_that_was_made():
    titles = [[one.title for one in build_page(fake_run(range_test=table)).sections] for table in ({}, rates())]
    assert [one for one in titles[1] if one not in titles[0]] == ["Learning-rate range test"]


@pytest.mark.parametrize(
    ("table", "flaw"),
    [
        ({"lrs": [], "losses": [], "smoothed": []}, "lrs, losses and smoothed are empty or differ in length"),
        ({"losses": [1.0]}, "lrs, losses and smoothed are empty or differ in length"),
        ({"lrs": "many"}, "of the wrong type: lrs"),
    ],
)
def test_a_hand_made_result_without_values_is_named_as_damaged(table, flaw):
    text = render_html(build_range_test_page({**rates(), **table}, run="r"))
    assert f"The result of find-lr is damaged: {flaw}. It is left out." in text
