"""Averages in place of the trained weights: what is evaluated, saved and exported, and what is trained."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from ranks import start_ranks
from safetensors.torch import load_file

from fivetune import rundir
from fivetune.config import load_config
from fivetune.errors import ConfigError
from fivetune.rundir.figures import find_exported_eval
from fivetune.rundir.progress import Progress
from fivetune.training import export
from fivetune.training.autotune.graphs import find_graph_obstacle
from fivetune.training.averaging import compute_decay
from fivetune.training.checks import preflight
from fivetune.training.run import train
from fivetune.training.state import bucket
from fivetune.training.step.update import train_step

EMA = {"train__ema": 0.9}
FREE = {"optimizer": {"name": "schedule_free", "lr": 1e-3}, "schedule": {"name": "constant", "warmup_steps": 2}}
SHARDED = [  # how the weights are shared that each kind of average needs
    {"ema": ("fsdp",), "free": ("pipeline",)},
    kit.release({"ema": ("pipeline",), "free": ("tensor",), "8bit": ("pipeline",)}),
]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def is_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_the_moving_average_is_in_the_model_for_a_while(tmp_path, model_folder):
    learner = (setup := kit.ready(tmp_path, model_folder, model__freeze=["shared"], **EMA)).learner
    weights = dict(learner.model.named_parameters())
    assert learner.averages
    expected = {name: weight.detach().clone() for name, weight in weights.items()}
    for step in (1, 2, 3):
        train_step(learner, setup.data.stream.build_micro_batches(step - 1), lr=1e-2, step=step)
        learner.averages.update(step)
        for name, weight in weights.items():
            expected[name] += (1 - compute_decay(0.9, step)) * (weight.detach() - expected[name])
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    with learner.swap_in_averages() as trained:
        assert set(weights) - set(trained) == {"shared.weight"}
        assert is_equal({name: before[name] for name in trained}, trained)
        for name, weight in weights.items():
            torch.testing.assert_close(weight.detach(), expected[name], rtol=1e-5, atol=1e-7)
    assert is_equal(before, {name: weight.detach() for name, weight in weights.items()})
    with pytest.raises(ZeroDivisionError), learner.swap_in_averages():
        raise ZeroDivisionError
    assert is_equal(before, {name: weight.detach() for name, weight in weights.items()})
    assert learner.averages.num_bytes == 4 * sum(weight.numel() for name, weight in weights.items() if name in trained)


def run_of(table: dict[str, Any], **options: Any) -> Path:
    train(table, options or None, preflight=False, quiet=True, resume=Path(table["run"]["dir"]).exists())
    return Path(table["run"]["dir"])


@pytest.mark.parametrize("options", [EMA, FREE], ids=["ema", "schedule_free"])
def test_averages_are_evaluated_saved_and_exported(tmp_path, model_folder, monkeypatch, options):
    with monkeypatch.context() as patch:
        kit.scored(patch, [0.9, 0.1])  # step 3 is the best
        run = run_of(kit.recipe(tmp_path, model_folder, eval__metric="f1", **options))
    exported = run / "model"
    assert is_equal(weights_in(exported), weights_in(run / "checkpoints/3"))
    for step in (3, 6):
        state = torch.load(run / f"checkpoints/{step}/state.pt")
        assert not is_equal(state["trained"], weights_in(run / f"checkpoints/{step}"))
    setup = kit.ready(tmp_path, exported)
    assert setup.data.evaluator
    record = setup.data.evaluator.run(setup.learner.model, step=3, split="eval", write=list)
    assert record.loss == pytest.approx(next(one.loss for one in rundir.read_evals(run) if one.step == 3), rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(EMA, id="ema"),
        pytest.param(FREE, id="schedule_free"),
        pytest.param({"optimizer": {"name": "adamw_8bit"}}, id="adamw_8bit", marks=pytest.mark.release),
        pytest.param({**EMA, "model__unfreeze": {"shared": 4}}, id="unfreeze", marks=pytest.mark.release),
    ],
)
def test_a_resumed_run_ends_with_the_same_weights(tmp_path, model_folder, options):
    options = {"eval__at_start": False, "checkpoint__every_steps": 1, **options}
    whole = run_of(kit.recipe(tmp_path, model_folder, run__dir=str(tmp_path / "whole"), **options))
    table = kit.recipe(tmp_path, model_folder, **options)
    run_of(table, **{"train.num_steps": 5})
    run = run_of(table)
    assert kit.weights_of(run) == kit.weights_of(whole)
    ends = [torch.load(one / "checkpoints/6/state.pt").get("trained", {}) for one in (run, whole)]
    assert is_equal(*ends) and bool(ends[0]) == (options.get("optimizer") != {"name": "adamw_8bit"})


def train_shared(tables: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    for table in tables:
        run_of(table)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", SHARDED, ids=["", "others"])
def test_two_processes_average_their_shares(tmp_path, model_folder, sharded):
    """One process begins, two go on with a share each."""
    tables = []
    for kind, chosen in (("ema", EMA), ("free", FREE), ("8bit", {"optimizer": {"name": "adamw_8bit"}})):
        if kind not in sharded:
            continue
        options = {"model__dropout": 0.0, "eval__every_steps": 6, "eval__at_start": False, **chosen}
        table = kit.recipe(tmp_path, model_folder, run__dir=str(tmp_path / kind), **options)
        run_of(table)
        for strategy in sharded[kind]:
            own = {**table, "run": {"dir": str(tmp_path / f"{kind}-{strategy}"), "seed": 1}}
            run_of(own, **{"train.num_steps": 3})
            tables.append({**own, "strategy": strategy, "launch": {"nproc": 2}})
    assert [rank.returncode for rank in start_ranks(train_shared, tables)] == [0, 0]
    for table in tables:
        run = Path(table["run"]["dir"])
        whole = tmp_path / run.name.partition("-")[0]
        assert rundir.read_evals(run)[-1].loss == pytest.approx(rundir.read_evals(whole)[-1].loss, rel=1e-5)
        torch.testing.assert_close(weights_in(run / "model"), weights_in(whole / "model"), rtol=0, atol=5e-6)


def test_what_cannot_be_averaged_is_refused(tmp_path, model_folder):
    table = kit.recipe(tmp_path, model_folder, **EMA)
    with pytest.raises(ConfigError, match=r"train\.ema 0\.9 averages the weights, and so does optimizer\.name"):
        load_config({**table, **FREE})
    with pytest.raises(ConfigError, match=r"train\.ema 0\.9 is not supported with device tpu\. Use none"):
        load_config({**table, "device": "tpu", "model": {"path": str(model_folder)}})


def test_steps_with_a_moving_average_can_be_replayed_as_graphs(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr("fivetune.training.autotune.graphs.supports_graphs", lambda device: True)
    setup = kit.ready(tmp_path, model_folder, train__precision="fp32", train__forward="flat", **EMA)
    assert find_graph_obstacle(setup) == ""


def test_the_forecast_counts_the_moving_average(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr(preflight, "get_peak_memory_bytes", lambda device: 2**33)
    details = [preflight._check_memory(kit.ready(tmp_path, model_folder, **options))[1] for options in ({}, EMA)]
    assert [detail.partition("optimizer ")[2].partition(",")[0] for detail in details] == ["389.0 KiB", "583.5 KiB"]


# --- checkpoint.average_best ---


def averaging(folder: Path, model: Path, num: int, **options: Any) -> dict[str, Any]:
    """Six evaluations; two newest checkpoints are kept beside the best ones."""
    options = {"eval__every_steps": 1, "eval__metric": "f1", "eval__at_start": False, **options}
    return kit.recipe(folder, model, checkpoint__average_best=num, **options)


def average_of(run: Path, steps: tuple[int, ...]) -> dict[str, torch.Tensor]:
    parts = [weights_in(run / f"checkpoints/{step}") for step in steps]
    return {name: (sum(part[name].double() for part in parts) / len(parts)).float() for name in parts[0]}  # type: ignore[union-attr]


@pytest.mark.parametrize(("mean", "exported"), [(95.0, (2, 3, 5)), (85.0, ())])
def test_the_mean_of_the_best_checkpoints_is_exported_if_it_is_better(
    tmp_path, model_folder, monkeypatch, capsys, mean, exported
):
    kit.scored(monkeypatch, [10.0, 80.0, 90.0, 20.0, 70.0, 30.0, mean])
    run = train(averaging(tmp_path, model_folder, 3), preflight=False)
    folder = tmp_path / "run"
    assert sorted(int(path.name) for path in (folder / "checkpoints").iterdir()) == [2, 3, 5, 6]
    expected = average_of(folder, (2, 3, 5)) if exported else weights_in(folder / "checkpoints/3")
    assert is_equal(weights_in(folder / "model"), expected)
    assert run.status.best and (run.status.best.step, run.status.best.averaged) == (3, exported)
    record = find_exported_eval(run)
    assert record and (record.split, record.scores["f1"]) == (("average", 95.0) if exported else ("eval", 90.0))
    wording, shown = "gets the mean" if exported else "gets the latter", capsys.readouterr().err
    assert f"of steps 2, 3, 5 has f1 {mean:.2f}, that of step 3 alone 90.00: model/ {wording}" in shown
    card = (folder / "model/README.md").read_text()
    assert f"examples at {'the mean of steps 2, 3, 5' if exported else 'step 3'}:" in card
    assert not any("average_best" in text for text in run.warnings)


def test_a_mean_that_cannot_be_written_is_not_said_to_be_exported(tmp_path, model_folder, monkeypatch):
    """The disk fills up between the two: model/ holds the single best checkpoint, and all records say so."""
    kit.scored(monkeypatch, [80.0, 70.0, 95.0])
    save, saved = export._save_model, list[object]()

    def save_once(training: export.Training) -> None:
        if saved:
            raise OSError(28, "No space left on device")
        saved.append(save(training))

    monkeypatch.setattr(export, "_save_model", save_once)
    run = train(averaging(tmp_path, model_folder, 2, train__num_steps=2), preflight=False, quiet=True)
    assert "(checkpoint.average_best) failed" in (run.status.incomplete or "")
    assert is_equal(weights_in(tmp_path / "run/model"), weights_in(tmp_path / "run/checkpoints/1"))
    assert run.status.best and (run.status.best.step, run.status.best.averaged) == (1, ())
    assert "step 1:" in (tmp_path / "run/model/README.md").read_text()


def test_a_resumed_run_averages_the_best_checkpoints_of_all_its_parts(tmp_path, model_folder, monkeypatch):
    kit.scored(monkeypatch, [10.0, 80.0, 70.0, *[20.0, 30.0, 85.0], 95.0])
    table = averaging(tmp_path, model_folder, 3)
    with monkeypatch.context() as patch:
        patch.setattr("fivetune.training.run.export_model", lambda training: [])
        train(table, {"train.num_steps": 3}, preflight=False, quiet=True)
    run = train(table, resume=True, preflight=False, quiet=True)
    assert run.status.best and run.status.best.averaged == (2, 3, 6)
    assert is_equal(weights_in(tmp_path / "run/model"), average_of(tmp_path / "run", (2, 3, 6)))


def test_fewer_checkpoints_than_asked_are_counted(tmp_path, model_folder, monkeypatch):
    kit.scored(monkeypatch, [80.0, 70.0, 95.0])
    table = averaging(tmp_path, model_folder, 5, train__num_steps=2)
    run = train(table, preflight=False, quiet=True)
    early, late = (text for text in run.warnings if text.startswith("checkpoint.average_best 5"))
    assert "the run evaluates 2 times in 2 steps, so that fewer checkpoints are averaged" in early
    assert "no more than 2 evaluated checkpoints found (step 1; step 2), and their mean is taken" in late
    assert run.status.best and run.status.best.averaged == (1, 2)


def test_a_damaged_checkpoint_is_left_out_of_the_mean(tmp_path, model_folder, monkeypatch):
    kit.scored(monkeypatch, [80.0, 70.0, 90.0, 95.0])
    table = averaging(tmp_path, model_folder, 3, train__num_steps=3)
    with monkeypatch.context() as patch:
        patch.setattr("fivetune.training.run.export_model", lambda training: [])
        train(table, preflight=False, quiet=True)
    (tmp_path / "run/checkpoints/1/model.safetensors").write_bytes(b"damaged")
    run = train(table, resume=True, preflight=False, quiet=True)
    (told,) = (text for text in run.warnings if text.startswith("checkpoint.average_best 3: no more than 2"))
    assert "(step 1: model.safetensors is damaged (its checksum differs); step 2; step 3), and their mean" in told
    assert is_equal(weights_in(tmp_path / "run/model"), average_of(tmp_path / "run", (2, 3)))


def test_one_checkpoint_has_no_mean(tmp_path, model_folder):
    run = train(averaging(tmp_path, model_folder, 2, train__num_steps=1), preflight=False, quiet=True)
    assert any("no more than 1 evaluated checkpoint found (step 1), and nothing is averaged" in w for w in run.warnings)
    assert is_equal(weights_in(tmp_path / "run/model"), weights_in(tmp_path / "run/checkpoints/1"))


def test_the_best_checkpoints_are_kept_in_the_copy(tmp_path, model_folder, monkeypatch):
    """A machine without the run fetches all of them: the run ends as it would have there."""
    kit.scored(monkeypatch, [90.0, 80.0, 10.0, 20.0, *[30.0, 40.0, 95.0]])
    url = f"file://{tmp_path}/copy"
    table = averaging(tmp_path, model_folder, 2, checkpoint__url=url)
    with monkeypatch.context() as patch:
        patch.setattr("fivetune.training.run.export_model", lambda training: [])
        patch.setattr(bucket.Uploader, "upload_results", lambda self, warn: None)
        train(table, {"train.num_steps": 4}, preflight=False, quiet=True)
    assert set(bucket.list_copied_steps(url)) == {1, 2, 3, 4}
    parts = [weights_in(tmp_path / f"run/checkpoints/{step}") for step in (1, 2)]
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    run = train(table, resume=True, preflight=False, quiet=True)
    assert run.status.best and run.status.best.averaged == (1, 2)
    assert set(bucket.list_copied_steps(url)) == {1, 2, 5, 6}
    expected = {name: ((parts[0][name].double() + parts[1][name].double()) / 2).float() for name in parts[0]}
    assert is_equal(weights_in(tmp_path / "run/model"), expected)


def test_without_evaluations_there_is_nothing_to_average(tmp_path, model_folder):
    with pytest.raises(ConfigError, match=r"checkpoint\.average_best: it compares evaluations, and no data\.eval is"):
        kit.ready(tmp_path, model_folder, checkpoint__average_best=2, data__eval=[])


def train_until_killed(table: dict[str, Any]) -> None:
    """The process is killed in its fifth step, after the checkpoint of step 4."""
    torch.set_num_threads(1)
    show = Progress.show_step

    def kill(progress: Progress, record: Any, num_steps: int) -> None:
        show(progress, record, num_steps)
        if record.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "show_step", kill)
        run_of(table)


@pytest.mark.slow
def test_a_killed_run_with_both_averages_resumes_to_the_same_weights(tmp_path, model_folder):
    table = averaging(tmp_path, model_folder, 3, **EMA, run__dir=str(tmp_path / "whole"))
    whole = run_of(table)
    table["run"] = {"dir": str(tmp_path / "killed"), "seed": 1}
    assert [rank.returncode for rank in start_ranks(train_until_killed, table, count=1)] == [-signal.SIGKILL]
    killed = run_of(table)
    assert [one.step for one in rundir.read_run(killed).steps] == [1, 2, 3, 4, 5, 6]
    assert rundir.read_run(killed).status.best == rundir.read_run(whole).status.best
    assert kit.weights_of(killed) == kit.weights_of(whole)


@pytest.mark.release
@pytest.mark.parametrize(("strategy", "count"), [("fsdp", 2), ("fsdp_tensor", 4)])
def test_ranks_that_share_the_weights_average_checkpoints_and_steps(tmp_path, model_folder, strategy, count):
    """Sharded checkpoints with a moving average; their mean is exported, or the best of them."""
    options = {**EMA, "strategy": strategy, "launch__nproc": count, "train__batch_size": 2, "model__dropout": 0.0}
    table = averaging(tmp_path, model_folder, 2, **options, train__num_steps=4)
    ranks = start_ranks(train_shared, [table], count=count)
    assert [rank.returncode for rank in ranks] == [0] * count, ranks[0].stderr
    alone = averaging(tmp_path, model_folder, 2, **EMA, model__dropout=0.0, train__num_steps=4)
    run = run_of({**alone, "run": {"dir": str(tmp_path / "alone"), "seed": 1}})
    found, expected = (rundir.read_evals(one) for one in (tmp_path / "run", run))
    assert [one.split for one in found][-1] == "average"
    assert [one.loss for one in found[:4]] == pytest.approx([one.loss for one in expected[:4]], rel=1e-4)
    best = [rundir.read_run(one).status.best for one in (tmp_path / "run", run)]
    if best[0] == best[1]:  # scores of equal rank may order the steps otherwise
        torch.testing.assert_close(weights_in(tmp_path / "run/model"), weights_in(run / "model"), rtol=0, atol=1e-5)
