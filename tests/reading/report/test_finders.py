"""The finders: rates and batch sizes measured on a tiny model, their choice, their pages, the weights untouched."""

from __future__ import annotations

import json
from dataclasses import replace

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
from fivetune.reading.report.run.finders import build_finder_page, build_finder_sections
from fivetune.training.autotune import find_lr as finder
from fivetune.training.autotune.find_batch import Speed, choose_batch_size, find_batch, measure_speeds
from fivetune.training.autotune.find_lr import choose_lr, find_lr
from fivetune.training.autotune.probe import restore_learner
from fivetune.training.step.learner import build_optimizer
from fivetune.training.step.update import train_step

BATCHES = {
    "batch_size": 4,
    "total": 8,
    "device": "cpu",
    "precision": "fp32",
    "rule": "The smallest size.",
    "fit": {
        "batch_size": 8,
        "measured_bytes": 2**30,
        "forecast_bytes": 2**30,
        "state_bytes": 2**20,
        "why": "that is the whole global batch",
    },
    "speeds": [{"batch_size": n, "tokens_per_second": 100.0 * n} for n in (1, 2, 4, 8)],
}


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


# --- learning rate ---


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
    with restore_learner(setup.learner, lambda: build_optimizer(setup.config, setup.learner.model)) as learner:
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
    text = render_html(build_finder_page("find-lr", {**rates(), "lr": None, "steepest": None}, run="r"))
    assert "No rate can be chosen: the loss did not fall" in text


# --- batch size ---


def test_every_part_of_the_global_batch_that_fits_is_measured(tmp_path, model_folder):
    found = find_batch(load_config(kit.recipe(tmp_path, model_folder)))
    assert [one.batch_size for one in found.speeds] == [1, 2, 4, 8] and found.fit.batch_size == 8
    assert all(one.tokens_per_second > 0 for one in found.speeds)
    assert found.batch_size == choose_batch_size(found.speeds)


def test_a_moving_average_is_counted_once(tmp_path, model_folder):
    """The set-up of the test holds it while the sizes are tried, unlike the optimizer's state."""
    plain, averaged = (
        find_batch(load_config(kit.recipe(tmp_path, model_folder, train__ema=ema))) for ema in (None, 0.9)
    )
    assert plain.fit.state_bytes == averaged.fit.state_bytes


def test_all_sizes_compute_the_same_tokens(tmp_path, model_folder, monkeypatch):
    setup = kit.ready(tmp_path, model_folder)
    seen: dict[int, list] = {}
    forward = setup.learner.forward

    class Spy:
        def compute_losses(self, model, batch, *, device):
            seen.setdefault(len(batch.ids), []).extend(batch.ids)
            return forward.compute_losses(model, batch, device=device)

    setup = replace(setup, learner=replace(setup.learner, forward=Spy()))  # type: ignore[arg-type]
    measure_speeds(setup, [2, 8], lambda *args: None)
    assert sorted(seen[2]) == sorted(seen[8]) and len(seen[2]) == 4 * 8
    assert all(p.grad is None for p in setup.learner.model.parameters())


def test_the_smallest_size_within_five_percent_is_chosen():
    assert choose_batch_size([Speed(1, 94.9), Speed(2, 95.1), Speed(4, 100.0), Speed(8, 99.0)]) == 2


# --- commands and pages ---


@pytest.mark.slow
def test_the_commands_print_the_setting_and_the_report_shows_both(tmp_path, model_folder, capsys):
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(kit.recipe(tmp_path, model_folder)))
    recipe = str(tmp_path / "r.yaml")
    assert cli.main(["find-lr", recipe, "--high", "1", "--steps", "30"]) == 0
    found = json.loads((tmp_path / "run.find-lr.json").read_text())
    assert f"use   --optimizer.lr {found['lr']:g}\n" in capsys.readouterr().out
    assert cli.main(["find-batch", recipe, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["largest_fit"] == 8
    assert (tmp_path / "run.find-lr.html").is_file() and (tmp_path / "run.find-batch.html").is_file()
    assert not (tmp_path / "run").exists()
    assert cli.main(["train", recipe, "--quiet", "--no-preflight"]) == 0
    run = rundir.read_run(tmp_path / "run")
    assert sorted(run.found) == ["find-batch", "find-lr"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Learning-rate range test" in page and "Micro-batch size" in page


def test_sections_are_there_only_for_what_was_found():
    assert build_finder_sections({}) == ()


@pytest.mark.parametrize(
    ("name", "table", "flaw"),
    [
        (
            "find-lr",
            {"lrs": [], "losses": [], "smoothed": []},
            "lrs, losses and smoothed are empty or differ in length",
        ),
        ("find-lr", {"losses": [1.0]}, "lrs, losses and smoothed are empty or differ in length"),
        ("find-lr", {"lrs": "many"}, "of the wrong type: lrs"),
        ("find-lr", None, "values are missing"),
        ("find-batch", {"speeds": []}, "speeds is empty"),
        ("find-batch", None, "values are missing"),
    ],
)
def test_a_hand_made_result_without_values_is_named_as_damaged(name, table, flaw):
    whole = rates() if name == "find-lr" else BATCHES
    text = render_html(build_finder_page(name, {} if table is None else {**whole, **table}, run="r"))
    assert f"The result of {name} is damaged: {flaw}. It is left out." in text
    titles = [
        section.title for section in build_page(fake_run(found={"find-lr": rates(), "find-batch": BATCHES})).sections
    ]
    assert titles.index("Learning-rate range test") + 1 == titles.index("Micro-batch size")
    text = render_html(build_finder_page("find-batch", BATCHES, run="runs/x"))
    assert "Micro-batches of 4 examples." in text and "The largest that fits: 8 (1.0 GiB)" in text


def test_wrong_flags_are_named(capsys):
    assert cli.main(["find-batch", "squad_v2", "--largest", "0"]) == 2
    assert "--largest 0: must be at least 1." in capsys.readouterr().err
