"""Runs with an adapter: what is trained, saved, resumed, predicted with; what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from packaging.version import Version
from ranks import start_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig, T5ForConditionalGeneration

import fivetune
from fivetune import read_run
from fivetune.cli import main
from fivetune.config import load_config
from fivetune.errors import ConfigError, FiveTuneEnvironmentError, InterruptedRunError, ModelError, RunDirError
from fivetune.model.tokenizer import suppress_output
from fivetune.reading.compare import compare_runs
from fivetune.training.answers.loading import load_run_model
from fivetune.training.run import train

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
LORA = {"name": "lora", "r": 4}
FAST = {"optimizer": {"name": "adamw", "lr": 1e-2}}


def load_by_peft(base: Path, run: Path) -> Any:
    import peft  # late, as it takes seconds: every worker of xdist imports this file

    with suppress_output():
        return peft.PeftModel.from_pretrained(T5ForConditionalGeneration.from_pretrained(base), run / "adapter").eval()


def is_prefix_lost_by_peft() -> bool:
    return Version(version("transformers")) >= Version("5.24") and Version(version("peft")) <= Version("0.21.2")


@pytest.mark.parametrize("name", ["lora", "prompt", "prefix"])
def test_a_run_writes_what_predicts_as_peft_does(tmp_path, model_folder, name):
    """Greedy and beam search with the adapter equal `generate` of peft's model."""
    if name == "prefix" and is_prefix_lost_by_peft():
        pytest.skip("peft up to 0.21.2 gives transformers from 5.24 on an empty cache in place of the prefix")
    options: dict[str, Any] = {
        "eval": {"num_beams": 2, "max_new_tokens": 5, "suppress_sentinels": False, "every_steps": 6}
    }
    train(kit.recipe(tmp_path, model_folder, model__adapter={"name": name}, **FAST, **options), quiet=True)
    run, tokenizer = tmp_path / "run", AutoTokenizer.from_pretrained(model_folder)
    texts = ["question: What has Ann? context: Ann has a red hat.", "question: What has Bob? context: Bob has a bag."]

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids[: ids.index(1) if 1 in ids else None]).strip()

    with suppress_output():
        models = [load_by_peft(model_folder, run)]
        if name == "lora":
            models.append(T5ForConditionalGeneration.from_pretrained(run / "model").eval())
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    for beams in (1, 2):
        found = [one.prediction for one in fivetune.open_run(run, {"eval.num_beams": beams}).predict(texts)]
        config = GenerationConfig(
            num_beams=beams, max_new_tokens=5, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0, do_sample=False
        )
        for model in models:
            ids = model.generate(**inputs, generation_config=config)
            assert [decode(row[1:]) for row in ids.tolist()] == found


@pytest.mark.parametrize("name", ["prompt", kit.release("prefix")])
def test_evaluate_and_predict_give_the_scores_of_the_training(tmp_path, model_folder, capsys, name):
    table = kit.recipe(tmp_path, model_folder, model__adapter={"name": name}, **FAST, eval__every_steps=6)
    last = train(table, quiet=True).evals[-1]
    run, dev = tmp_path / "run", str(tmp_path / "dev.json")
    capsys.readouterr()
    assert main(["evaluate", str(run), "--data.eval", dev, "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert {key: scores["scores"][key] for key in ("exact", "f1")} == {key: last.scores[key] for key in ("exact", "f1")}
    path = next((run / "predictions").glob("eval-6*"))
    before = {row["id"]: row["prediction"] for row in map(json.loads, path.read_text().splitlines())}
    assert main(["predict", str(run), "--input", dev, "--output", str(tmp_path / "found.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert {row["id"]: row["prediction"] for row in rows} == before


def test_what_a_run_records(tmp_path, model_folder):
    run = train(kit.recipe(tmp_path, model_folder, model__adapter=LORA, **FAST), quiet=True)
    folder = tmp_path / "run"
    assert (
        load_config(folder).model.adapter
        == load_config(kit.recipe(tmp_path, model_folder, model__adapter=LORA)).model.adapter
    )
    weights = load_file(folder / "checkpoints" / "6" / "model.safetensors")
    assert {".".join(name.split(".")[-3:-1]) for name in weights} == {"lora_A.default", "lora_B.default"}
    state = torch.load(folder / "checkpoints" / "6" / "state.pt", weights_only=True)
    assert state["optimizer"]["state"].keys() == weights.keys()
    trained = sum(weight.numel() for weight in weights.values())
    assert run.machine.num_trained_parameters == trained
    share = 100 * trained / (run.machine.num_parameters or 0)
    assert f"{share:.3g} % trained" in (folder / "log.txt").read_text()
    described = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(model_folder) and described["r"] == 4
    assert described["task_type"] == "SEQ_2_SEQ_LM"
    base, merged = (load_file(path / "model.safetensors") for path in (model_folder, folder / "model"))
    changed = {name.rpartition(".")[0].rpartition(".")[2] for name in base if not torch.equal(base[name], merged[name])}
    assert base.keys() == merged.keys() and changed == {"q", "k", "v", "o", "wi", "wo"}


@pytest.mark.parametrize("name", ["lora", "qlora", kit.release("prefix")])
def test_a_resumed_run_ends_with_the_same_weights(tmp_path, model_folder, monkeypatch, name):
    def build_recipe(name_of_run: str) -> dict[str, Any]:
        (tmp_path / name_of_run).mkdir(exist_ok=True)
        changes = {"model__adapter": {"name": name}, "checkpoint": {"every_steps": 1}, "train__num_steps": 3, **FAST}
        return kit.recipe(tmp_path / name_of_run, model_folder, **changes)

    train(build_recipe("straight"), preflight=False, quiet=True)
    with monkeypatch.context() as patched, pytest.raises(InterruptedRunError):
        kit.signal_at(patched, "show_step", 1)
        train(build_recipe("stopped"), preflight=False, quiet=True)
    other = {**build_recipe("stopped"), "model": {"path": str(model_folder), "adapter": {"name": "ia3"}}}
    with pytest.raises(
        ConfigError,
        match=rf"other settings: model.adapter was {{name: {name}, .*}}, is {{name: ia3, target_modules: \[\]}}\.",
    ):
        train(other, resume=True, quiet=True)
    train(build_recipe("stopped"), resume=True, quiet=True)
    straight, stopped = (tmp_path / one / "run" for one in ("straight", "stopped"))
    losses = [[step.loss for step in read_run(run).steps] for run in (straight, stopped)]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert kit.weights_of(straight) == kit.weights_of(stopped)
    both = [(run / "adapter" / "adapter_model.safetensors").read_bytes() for run in (straight, stopped)]
    assert both[0] == both[1]


def test_a_changed_base_is_refused_by_a_resume_and_not_read_by_predictions(tmp_path, model_folder):
    base = shutil.copytree(model_folder, tmp_path / "base")
    recipe = kit.recipe(tmp_path, base, model__adapter="lora", train__num_steps=1, **FAST)
    train(recipe, quiet=True)
    run, texts = tmp_path / "run", ["question: What has Ann? context: Ann has a red hat."]
    before = fivetune.open_run(run).predict(texts)
    weights = load_file(base / "model.safetensors")
    weights["shared.weight"] *= -1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    assert fivetune.open_run(run).predict(texts) == before  # model/ holds the base too
    expected = (
        rf"its adapter was trained on {base} with weights [0-9a-f]{{16}}, and that model has weights [0-9a-f]{{16}}"
    )
    with pytest.raises(RunDirError, match=expected):
        train({**recipe, "train": {**recipe["train"], "num_steps": 2}}, resume=True, quiet=True)


def test_virtual_tokens_beside_another_model_are_refused(tmp_path, model_folder):
    for name, model in (("one", model_folder), ("other", kit.make_model(tmp_path / "small", model_folder, seed=5))):
        (tmp_path / name).mkdir()
        train(kit.recipe(tmp_path / name, model, model__adapter="prompt", train__num_steps=1, **FAST), quiet=True)
    shutil.rmtree(tmp_path / "one/run/adapter")
    shutil.copytree(tmp_path / "other/run/adapter", tmp_path / "one/run/adapter")
    with pytest.raises(ConfigError, match=r"adapter: was trained on a base with weights \w+, and .*one.run.model has"):
        load_run_model(tmp_path / "one/run")


def test_a_continued_adapter_is_found_from_another_directory(tmp_path, model_folder, monkeypatch):
    """Its path is relative to the working directory of the training."""
    for name in ("work", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    recipe = kit.recipe(tmp_path / "work", model_folder, model__adapter="prompt", train__num_steps=1, **FAST)
    train({**recipe, "run": {"dir": "first"}}, quiet=True)
    recipe["model"]["adapter"] = {"path": "first/adapter"}
    train({**recipe, "run": {"dir": str(tmp_path / "second")}}, quiet=True)
    assert "PeftModel" in (tmp_path / "second/model/README.md").read_text()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "second/adapter").rename(tmp_path / "lost")
    with pytest.raises(RunDirError, match=r"second.adapter: missing or damaged; it holds the virtual tokens"):
        load_run_model(tmp_path / "second")


def test_a_run_continues_the_adapter_of_another(tmp_path, model_folder):
    (tmp_path / "first").mkdir()
    train(kit.recipe(tmp_path / "first", model_folder, model__adapter=LORA, **FAST), quiet=True)
    saved = {"path": str(tmp_path / "first" / "run" / "adapter")}
    run = train(kit.recipe(tmp_path, model_folder, model__adapter=saved, **FAST), quiet=True)
    before = read_run(tmp_path / "first" / "run")
    assert run.config["model"]["adapter"] == {"name": "saved", **saved}
    assert run.evals[0].loss == pytest.approx(before.evals[-1].loss, rel=1e-5) != before.evals[0].loss
    with pytest.raises(
        ConfigError, match=rf"was trained on {model_folder}, and model.path is .*/other\. Set model.path"
    ):
        other = kit.make_model(tmp_path / "other", model_folder)
        kit.ready(tmp_path, other, model__adapter=saved)


def test_an_extractive_head_is_trained_with_the_adapter(tmp_path, model_folder):
    options = {"model__adapter": LORA, "task__head": "extractive", "eval__max_new_tokens": None, **FAST}
    run = train(kit.recipe(tmp_path, model_folder, **options), quiet=True)
    weights = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert {"base_model.model.qa_outputs.weight", "base_model.model.qa_outputs.bias"} < weights.keys()
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["qa_outputs"]
    assert run.steps[-1].loss < run.steps[0].loss
    assert len(list(fivetune.open_run(tmp_path / "run").predict_file(tmp_path / "dev.json"))) == 12
    again = {**options, "model__adapter": {"path": str(tmp_path / "run" / "adapter")}}
    head = kit.ready(tmp_path, model_folder, **again).learner.model.qa_outputs
    assert torch.equal(head.weight, weights["base_model.model.qa_outputs.weight"])
    with pytest.raises(ConfigError, match=r"adapter: holds a span head, of task.head extractive. Set task.head"):
        kit.ready(tmp_path, model_folder, **{**again, "task__head": "generate"})
    with pytest.raises(
        ConfigError, match=r"task.head extractive counts positions of the input, which virtual tokens shift"
    ):
        kit.ready(tmp_path, model_folder, **{**options, "model__adapter": {"name": "prompt"}})


def test_patterns_of_freezing_and_of_groups_reach_an_adapter(tmp_path, model_folder):
    groups = [{"match": "lora_B", "lr": 16.0}]
    ready = kit.ready(
        tmp_path, model_folder, model__adapter=LORA, model__freeze=["decoder"], train__param_groups=groups
    )
    trained = [name for name, weight in ready.learner.model.named_parameters() if weight.requires_grad]
    assert trained and all(name.startswith("encoder.") and ".lora_" in name for name in trained)
    factors = {group["lr_factor"]: len(group["params"]) for group in ready.learner.optimizer.param_groups}
    assert factors == {16.0: len(trained) // 2, 1.0: len(trained) // 2}


def test_fp16_trains_an_adapter(tmp_path, model_folder):
    run = train(kit.recipe(tmp_path, model_folder, model__adapter=LORA, train__precision="fp16", **FAST), quiet=True)
    assert run.steps[-1].loss < run.steps[0].loss


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model__adapter": {"name": "lora", "r": 0}},
            r"model.adapter.r: Input should be greater than 0, not 0",
        ),
        ({"model__adapter": "lroa"}, r"model.adapter: there is no 'lroa'. Did you mean lora"),
        ({"model__adapter": {"name": "lora", "rr": 1}}, r"model.adapter.rr is not a setting. Did you mean r\?"),
        (
            {"model__adapter": {"r": 4}},
            r"model.adapter: needs a name, has r. Allowed: dora, ia3, lora.* Or give the path of one that was saved",
        ),
        ({"model__adapter": {"path": "p", "r": 4}}, r"model.adapter.r is not a setting. Allowed: name, path"),
        (
            {"model__adapter": "lora", "model__init": "random"},
            r"init: random has none that are worth keeping. Give model.path",
        ),
        (
            {"model__adapter": "lora", "model__unfreeze": {"encoder": 2}},
            r"unfreeze \(encoder\): adapter lora keeps the weights",
        ),
        ({"model__adapter": "lora", "device": "tpu"}, r"model.adapter lora is not supported with device tpu. Use none"),
        (
            {"model__adapter": "lora", "strategy": "fsdp", "launch__nproc": 2},
            r"strategy.name fsdp divides the weights of the model, and model.adapter lora adds others to them. Use ddp",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, model_folder, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_config(kit.recipe(tmp_path, model_folder, **changes))


@pytest.mark.parametrize(("name", "package"), [("lora", "peft"), ("qlora", "bitsandbytes")])
def test_a_missing_package_is_named_with_its_command(tmp_path, model_folder, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.nn", None)
    expected = rf"model.adapter.*: the package {package} is not installed. Install it: pip install .*adapters"
    with pytest.raises(FiveTuneEnvironmentError, match=expected):
        kit.ready(tmp_path, model_folder, model__adapter=name)


def test_a_merged_run_needs_no_peft_and_virtual_tokens_are_not_lost_silently(tmp_path, model_folder, monkeypatch):
    for name in ("lora", "prompt"):
        recipe = kit.recipe(tmp_path, model_folder, model__adapter=name, train={"num_steps": 1}, **FAST)
        train({**recipe, "run": {**recipe["run"], "dir": str(tmp_path / name)}}, quiet=True)
    with pytest.raises(
        ModelError, match=r"model.path: .*model is the unchanged base .* set model.adapter.path to that"
    ):
        kit.ready(tmp_path, tmp_path / "prompt/model")
    monkeypatch.setitem(sys.modules, "peft", None)
    load_run_model(tmp_path / "lora")
    with pytest.raises(FiveTuneEnvironmentError, match="peft is not installed"):
        load_run_model(tmp_path / "prompt")
    (tmp_path / "prompt/adapter").rename(tmp_path / "elsewhere")
    with pytest.raises(RunDirError, match=r"prompt.adapter: missing or damaged; .* Copy adapter/ beside model/"):
        load_run_model(tmp_path / "prompt")


def test_layers_override_the_options_of_an_adapter():
    base: dict[str, Any] = {"model": {"path": "m", "adapter": {"name": "lora", "r": 4}}, "task": "squad_v2"}

    def get_adapter(**overrides: Any) -> dict[str, Any] | None:
        return load_config(base, {f"model.{key}": value for key, value in overrides.items()}).as_dict()["model"][
            "adapter"
        ]

    assert get_adapter() == get_adapter(adapter={"name": "lora", "r": 4})
    assert (get_adapter(**{"adapter.alpha": 1}) or {}).items() >= {"r": 4, "alpha": 1.0}.items()
    assert (get_adapter(**{"adapter.name": "dora"}) or {})["r"] == 16  # another adapter: its own defaults
    assert get_adapter(adapter=None) is None and get_adapter(adapter="ia3") == {"name": "ia3", "target_modules": []}
    assert get_adapter(**{"adapter.name": "saved", "adapter.path": "p"}) == {"name": "saved", "path": "p"}


def test_adapters_on_one_base_are_compared(tmp_path, model_folder):
    folders = []
    for number, adapter in enumerate([LORA, {"name": "lora", "r": 8}, {"name": "ia3"}, None]):
        (tmp_path / str(number)).mkdir()
        recipe = kit.recipe(tmp_path / str(number), model_folder, model__adapter=adapter, train__num_steps=2)
        recipe["data"] |= {
            name: str(tmp_path / "0" / file) for name, file in (("train", "train.json"), ("eval", "dev.json"))
        }
        train({**recipe, "run": {"dir": str(tmp_path / f"run-{number}")}}, preflight=False, quiet=True)
        folders.append(tmp_path / f"run-{number}")
    found = compare_runs(folders[:2])
    assert found.varied == ("model.adapter.r",)
    found = compare_runs(folders[::2])
    assert found.varied == ("model.adapter.name",)
    assert [variant.settings["model.adapter.name"] for variant in found.variants] == ["lora", "ia3"]
    found = compare_runs(folders)
    assert found.varied == ("model.adapter.name", "model.adapter.r") and len(found.variants) == 4
    assert not [text for text in found.warnings if "model.adapter" in text or "number of parameters" in text]


def train_each(recipes: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    for recipe in recipes:
        train(recipe, preflight=False, quiet=True)


@pytest.mark.release
@pytest.mark.parametrize("names", [("lora",), ("qlora",)], ids=" ".join)
def test_two_processes_train_the_adapter_of_one(tmp_path, model_folder, names):
    recipes = []
    for name in names:
        recipe = kit.recipe(tmp_path, model_folder, model__adapter={"name": name}, model__dropout=0.0, **FAST)
        train({**recipe, "run": {"dir": str(tmp_path / f"{name}-1")}}, preflight=False, quiet=True)
        shared = {"run": {"dir": str(tmp_path / f"{name}-2")}, "strategy": "ddp", "launch": {"nproc": 2}}
        recipes.append({**recipe, **shared})
    ended = start_ranks(train_each, recipes)
    assert [rank.returncode for rank in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    for name in names:
        alone, shared = (load_file(tmp_path / f"{name}-{count}/model/model.safetensors") for count in (1, 2))
        for key, weight in alone.items():
            torch.testing.assert_close(shared[key], weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["lora", "prompt"])
def test_the_command_names_the_folder_of_the_adapter(tmp_path, model_folder, capsys, name):
    recipe = kit.recipe(tmp_path, model_folder, train__num_steps=1)
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    flags = ["--model.adapter", f"{{name: {name}}}", "--quiet", "--no-preflight", "--json"]
    assert main(["train", str(tmp_path / "r.yaml"), *flags]) == 0
    *lines, result = capsys.readouterr().out.splitlines()
    of_base, of_tokens = (" (the unchanged base)", " (the virtual tokens)") if name == "prompt" else ("", "")
    run = tmp_path / "run"
    assert lines[:2] == [f"model   {run}/model{of_base}", f"adapter {run}/adapter{of_tokens}"]
    assert json.loads(result)["adapter"] == f"{run}/adapter"
