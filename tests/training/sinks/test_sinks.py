"""Trackers: what they are told, and what happens when their package is not there."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import kit
import pytest
import yaml

import fivetune
from fivetune import cli, plugins
from fivetune.errors import ConfigError, FiveTuneEnvironmentError
from fivetune.rundir.records import EvalRecord, StepRecord
from fivetune.training.sinks import build_eval_values, build_step_values

STEP = StepRecord(7, 0.5, 1e-3, None, 2.0, 90, 10, 0.1, 0.5, 0.1, None, None, 1, 56)
EVAL = EvalRecord(7, "squad_v2", 1, "eval", 12, 0, {"exact": 50.0}, 0.25, {}, 8, 1.0)


def test_step_values_are_named_as_trackers_expect() -> None:
    assert build_step_values(STEP) == {
        "train/loss": 0.5,
        "train/learning_rate": 1e-3,
        "train/grad_norm": 2.0,
        "train/padding_fraction": 0.1,
        "train/tokens_per_second": 200.0,
    }


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    assert "train/loss" not in build_step_values(replace(STEP, loss=None))


def test_eval_values() -> None:
    assert build_eval_values(EVAL) == {"eval/exact": 50.0, "eval/loss": 0.25}


@pytest.mark.parametrize("name", plugins.list_plugins("sinks"))
def test_a_missing_package_is_told_before_any_work(
    name: str, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` passed such a recipe, and `train` stopped after tokenising."""
    monkeypatch.setattr("fivetune.training.sinks.find_spec", lambda package: None)
    recipe = kit.recipe(tmp_path, model_folder, report__sinks=[name], data__cache_dir=str(tmp_path / "cache"))
    with pytest.raises(FiveTuneEnvironmentError, match=rf"{name} needs .* pip install {name}; or leave"):
        fivetune.train(recipe, quiet=True)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert cli.main(["check", str(tmp_path / "recipe.yaml")]) == FiveTuneEnvironmentError.exit_code
    assert f"pip install {name}" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "cache").exists() and not (tmp_path / "run").exists()


def test_an_unknown_sink_is_refused_with_the_nearest_name(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean tensorboard"):
        fivetune.load_config(kit.recipe(tmp_path, model_folder, report__sinks=["tensorbord"]))


def test_tensorboard_gets_every_record(tmp_path: Path, model_folder: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is an extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fivetune.train(kit.recipe(tmp_path, model_folder, report__sinks=["tensorboard"]), quiet=True, preflight=False)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("eval/f1")] == [0, 3, 6]


class _Sink:
    """Notes what it is told; `fall` breaks the run at a step."""

    def __init__(self, fall: int | None = None) -> None:
        self.told: list = []
        self.fall = fall

    def __call__(self) -> _Sink:
        return self

    def open(self, folder: Path, config: dict, *, first_step: int) -> _Sink:
        self.told.append(first_step)
        self.config = config
        return self

    def step(self, record: StepRecord) -> None:
        if record.step == self.fall:
            raise ZeroDivisionError

    def evaluation(self, record: EvalRecord) -> None: ...

    def close(self) -> None:
        self.told.append("closed")


def test_sinks_are_closed_when_the_run_fails_and_told_where_it_goes_on(tmp_path, model_folder, monkeypatch) -> None:
    table = kit.recipe(tmp_path, model_folder, report__sinks=["tensorboard"], data__eval=[], checkpoint__every_steps=2)
    (tmp_path / "some.jsonl").write_text('{"question": "who", "answer": "Ann"}\n' * 24)
    table["data"]["train"] = str(tmp_path / "some.jsonl")
    table["task"] = {"name": "jsonl", "inputs": "password: {question}", "targets": "{answer}"}
    whole, sink = plugins.load_plugin, _Sink(fall=5)
    monkeypatch.setattr(plugins, "load_plugin", lambda kind, name: sink if kind == "sinks" else whole(kind, name))
    with pytest.raises(ZeroDivisionError):
        fivetune.train(table, quiet=True, preflight=False)
    assert sink.told == [1, "closed"]
    assert sink.config == fivetune.load_config(table).as_redacted_dict()  # what config.yaml shows, not more hidden
    sink.fall = None
    fivetune.train(table, quiet=True, resume=True)
    assert sink.told == [1, "closed", 5, "closed"]


def _told(name: str, client: Mock, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tracker with a made-up client tell one step and one evaluation."""
    monkeypatch.setitem(sys.modules, name, client)
    writer = plugins.load_plugin("sinks", name)().open(folder / "mine", {"run": {"seed": 3}, "device": "cpu"})
    writer.step(STEP)
    writer.evaluation(EVAL)
    writer.close()


def test_wandb_gets_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Mock()
    _told("wandb", client, tmp_path, monkeypatch)
    assert client.init.call_args.kwargs["name"] == "mine"
    assert client.init.call_args.kwargs["config"]["run"] == {"seed": 3}
    run = client.init.return_value
    assert [(call.args[0], call.kwargs) for call in run.log.call_args_list] == [
        (build_step_values(STEP), {"step": 7}),
        (build_eval_values(EVAL), {"step": 7}),
    ]
    run.finish.assert_called_once()


def test_mlflow_gets_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Mock()
    _told("mlflow", client, tmp_path, monkeypatch)
    assert client.start_run.call_args.kwargs["run_name"] == "mine"
    client.log_params.assert_called_once_with({"run.seed": 3})
    first, second = client.log_metrics.call_args_list
    assert first.kwargs == second.kwargs == {"step": 7}
    assert first.args[0]["train.loss"] == 0.5 and second.args[0] == {"eval.exact": 50.0, "eval.loss": 0.25}
    client.end_run.assert_called_once()
