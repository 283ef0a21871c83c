"""Every setting acts: whatever is changed in a recipe changes what the run computes, and does so in the right place."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from transformers import AutoTokenizer, T5ForConditionalGeneration

from fivetune.config import load_config
from fivetune.data.store.batch import collate, pad
from fivetune.errors import ConfigError
from fivetune.model import files
from fivetune.training.answers.decoding import build_decoding
from fivetune.training.optimizers._batched_adafactor import compute_base_rate
from fivetune.training.optimizers.adafactor import Adafactor
from fivetune.training.run import train
from fivetune.training.setup import Setup, set_up
from fivetune.training.step.plain import PlainEngine
from fivetune.training.step.update import train_step

# A setting with another value that must change what `observe` sees; the base is that of kit.recipe.
ACTING: dict[str, Any] = {
    "run.seed": 2, "model.dropout": 0.3, "model.init": "random", "model.freeze": ["encoder"],
    "task.template": "{context} {question}", "task.no_answer": "none", "task.pad_punctuation": True,
    "data.max_input_tokens": 12, "data.max_target_tokens": 3, "data.max_train_examples": 5, "data.max_eval_examples": 5,
    "optimizer.lr": 2e-3, "optimizer.weight_decay": 0.5, "optimizer.beta1": 0.5, "optimizer.beta2": 0.5,
    "optimizer.eps": 1e-2, "schedule.name": "linear", "schedule.warmup_steps": 2, "schedule.warmup_fraction": 0.5,
    "train.num_steps": 7, "train.batch_size": 2, "train.global_batch_size": 4, "train.precision": "bf16",
    "train.forward": "padded", "train.recompute": True, "train.max_grad_norm": 0.1,
    "train.param_groups": [{"match": "encoder", "lr": 0.1}], "train.layer_decay": 0.5,
    "loss.label_smoothing": 0.1, "loss.z_loss": 1e-2, "loss.r_drop": 1.0,
    "eval.every_steps": 2, "eval.batch_size": 3, "eval.suppress_sentinels": False, "eval.max_new_tokens": 4,
    "eval.min_new_tokens": 3, "eval.num_beams": 2, "eval.num_candidates": 3, "eval.length_penalty": 2.0,
    "eval.repetition_penalty": 1.5, "eval.no_repeat_ngram_size": 2, "eval.stop": ["\n"], "eval.temperature": 0.5,
    "eval.top_k": 3, "eval.top_p": 0.5, "eval.sampling_seed": 1, "eval.metric": "exact", "checkpoint.every_steps": 1,
}  # fmt: skip
# Settings whose effect another file tests, or that this set-up cannot show.
ELSEWHERE = {
    "run.dir", "model.path", "model.config", "model.tokenizer", "model.add_tokens", "model.revision",
    "model.unfreeze", "model.any_seq2seq",
    "model.adapter",  # tests/model/adapters
    "task.name", "task.train_answers",
    "task.language", "task.head", "data.train", "data.eval", "data.eval_share", "data.eval_seed", "data.group_column",
    "data.columns", "data.header", "data.on_bad_record", "data.overlong", "data.window_overlap", "data.cache_dir",
    "optimizer.name",
    "loss.class_weights",  # tests/training/test_losses.py
    "distill.teacher", "distill.kind", "distill.num_beams", "distill.alpha", "distill.temperature",  # test_distill.py
    "data.num_processes", "data.window_shards",  # tests/data/store/test_prepared.py
    "data.bucket_pool",  # tests/data/store/test_stream.py: a set of a few batches has no pools
    "train.num_epochs", "train.capture", "train.early_stopping", "train.log_every_steps", "train.num_threads",
    "eval.at_start", "eval.max_examples", "eval.final", "eval.score_labels", "checkpoint.keep", "checkpoint.background",
    "train.ema", "checkpoint.average_best",  # tests/training/test_averaging.py
    "checkpoint.url",  # tests/training/state/test_bucket.py

    "telemetry.every_seconds",
    "report.title", "report.beside", "report.expected", "report.expected_model", "report.expected_examples",
    "report.sinks", "strategy.name", "launch.nproc", "launch.nnodes", "launch.timeout_minutes", "device",
}  # fmt: skip


def observe(setup: Setup) -> dict[str, Any]:
    """What a set-up will do, and what its first steps compute."""
    learner, stream, evaluator = setup.learner, setup.data.stream, setup.data.evaluator
    assert evaluator is not None
    seen: dict[str, Any] = {
        "plan": setup.plan,
        "metric": setup.metric,
        "rates": [setup.compute_lr(step) for step in range(setup.plan.num_steps)],
        "forward": learner.forward,
        "decoding": asdict(evaluator.decoding),
        "evaluated": [evaluator.store.read_example(row).inputs for row in range(len(evaluator.store))],
    }
    torch.manual_seed(setup.config.run.seed)
    for step in range(2):
        group = stream.build_micro_batches(step)
        seen[f"examples of step {step}"] = [batch.ids for batch in group]
        update = train_step(learner, group, lr=setup.compute_lr(step), step=step + 1)
        seen[f"values of step {step}"] = update.values.tolist()
    seen["weights"] = [parameter.detach().clone() for parameter in learner.model.parameters()]
    return seen


def differs(a: dict[str, Any], b: dict[str, Any]) -> bool:
    if len(a["weights"]) != len(b["weights"]):
        return True
    same = all(torch.equal(x, y) for x, y in zip(a["weights"], b["weights"], strict=True))
    return not same or {**a, "weights": 0} != {**b, "weights": 0}


def test_every_setting_is_tested_here_or_elsewhere(tmp_path, model_folder):
    tables = load_config(kit.recipe(tmp_path, model_folder)).as_dict()
    settings = {f"{section}.{key}" for section, table in tables.items() if isinstance(table, dict) for key in table}
    settings = {name for name in settings if not name.startswith("search.")} | {"device"}
    assert settings == (set(ACTING) | ELSEWHERE) & settings
    assert not set(ACTING) & ELSEWHERE


@pytest.fixture(scope="module")
def base(tmp_path_factory, model_folder) -> dict[str, Any]:
    return observe(kit.ready(tmp_path_factory.mktemp("base"), model_folder))


@pytest.mark.slow
@pytest.mark.parametrize("setting", list(ACTING))
def test_a_setting_acts(tmp_path, model_folder, base, setting):
    recipe = kit.recipe(tmp_path, model_folder)
    if setting == "model.init":
        recipe["model"] |= {"config": str(model_folder), "tokenizer": str(model_folder), "path": None}
    if setting == "eval.num_candidates":
        recipe["eval"]["num_beams"] = 3
    if setting in ("eval.top_k", "eval.top_p", "eval.sampling_seed"):
        recipe["eval"]["temperature"] = 0.5
        base = observe(set_up(load_config(recipe)))
    assert differs(base, observe(set_up(load_config(recipe, {setting: ACTING[setting]}))))


ADAFACTOR = {"optimizer": {"name": "adafactor", "lr": 1e-2}}
SPLIT = {
    "task": {"name": "gsm8k", "target": "number"},
    "data": {"train": "sums.jsonl", "eval_share": 0.25, "cache_dir": "cache"},
}
LABELS = {
    "task": {"name": "classification", "inputs": "{question}", "label": "label"},
    "data": {"train": "asked.jsonl", "eval": "asked.jsonl", "cache_dir": "cache"},
}
OPTIONS: list[tuple[dict[str, Any], str, Any]] = [
    (ADAFACTOR, "optimizer.clip_threshold", 0.1),
    (ADAFACTOR, "optimizer.decay_rate", -0.1),
    (ADAFACTOR, "optimizer.beta1", 0.5),
    (ADAFACTOR, "optimizer.weight_decay", 0.5),
    (ADAFACTOR, "optimizer.preset", "hf"),
    ({"optimizer": {"name": "adafactor", "relative_step": True}}, "optimizer.warmup_init", True),
    ({"schedule": {"name": "cosine"}}, "schedule.warmup_steps", 2),
    ({"schedule": {"name": "constant"}}, "schedule.warmup_fraction", 0.5),
    ({"train": {"num_epochs": 1, "batch_size": 4, "num_threads": 1}}, "train.num_epochs", 2),
    (SPLIT, "data.eval_share", 0.5),
    (SPLIT, "data.eval_seed", 7),
    (SPLIT, "data.group_column", "book"),
    (LABELS, "eval.score_labels", False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("base", "setting", "value"), OPTIONS, ids=lambda part: part if isinstance(part, str) else "")
def test_a_setting_acts_beside_others(tmp_path, model_folder, monkeypatch, base, setting, value):
    """From the recipe on: an optimizer heeded its options, and no test saw that its plugin could drop them."""
    monkeypatch.chdir(tmp_path)
    sums = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}", "book": i // 6} for i in range(24)]
    asked = [{"question": "Has Ann a hat?", "label": ("no", "yes")[i % 2]} for i in range(8)]
    for name, rows in (("sums", sums), ("asked", asked)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = kit.recipe(tmp_path, model_folder, **base)
    usual, changed = (observe(set_up(load_config(recipe, options))) for options in ({}, {setting: value}))
    assert differs(usual, changed)


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "every", "at_start"), [(2, 3, False), (3, 2, True)])
def test_settings_of_the_loop_act(tmp_path, model_folder, keep, every, at_start):
    options: dict[str, Any] = {
        "checkpoint": {"keep": keep, "every_steps": 1},
        "train__log_every_steps": every,
        "eval__at_start": at_start,
        "eval__every_steps": 6,
    }
    run = train(kit.recipe(tmp_path, model_folder, **options), preflight=False)
    kept = sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == list(range(7 - keep, 7))
    assert [record.step for record in run.evals] == [0] * at_start + [6]
    logged = re.findall(r"step +(\d+)/6", (tmp_path / "run" / "log.txt").read_text())
    assert [int(step) for step in logged] == list(range(every, 7, every))


def test_the_revision_of_a_model_is_the_one_that_is_fetched(tmp_path, model_folder, monkeypatch):
    asked: list[str | None] = []

    def fetch(name: str, revision: str | None, *, hint: str) -> Path:
        asked.append(revision)
        return model_folder

    monkeypatch.setattr(files, "fetch_snapshot", fetch)
    setup = kit.ready(tmp_path, Path("owner/name"), model__revision="v2")
    assert setup.config.model.revision == "v2" and set(asked) == {"v2"}


# --- one fault each that no other test would notice ---


def test_each_step_has_its_own_learning_rate(tmp_path, model_folder):
    run = train(kit.recipe(tmp_path, model_folder, schedule={"name": "linear"}), preflight=False, quiet=True)
    assert [step.lr for step in run.steps] == pytest.approx([1e-3 * (1 - k / 6) for k in range(6)])


def test_the_rate_of_the_step_is_the_one_that_is_applied(tmp_path, model_folder):
    setup = kit.ready(tmp_path, model_folder, schedule={"name": "linear"})
    seen: list[float] = []
    setup.learner.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    for step in range(3):
        train_step(setup.learner, setup.data.stream.build_micro_batches(step), lr=setup.compute_lr(step), step=step + 1)
    assert seen == [setup.compute_lr(step) for step in range(3)] and len(set(seen)) == 3


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_norms_are_not_decayed(tmp_path, model_folder, name):
    setup = kit.ready(tmp_path, model_folder, optimizer={"name": name, "lr": 1e-2, "weight_decay": 0.5})
    decay = {id(p): group["weight_decay"] for group in setup.learner.optimizer.param_groups for p in group["params"]}
    for label, parameter in setup.learner.model.named_parameters():
        assert decay[id(parameter)] == (0.0 if "layer_norm" in label else 0.5), label


def _adafactor(value: torch.Tensor, **options: Any) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(value.clone())
    return Adafactor(**{"lr": 0.1, "preset": "hf", **options}).build([{"params": [parameter]}])


def _steps(optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> torch.Tensor:
    parameter = optimizer.param_groups[0]["params"][0]
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("option", [{"clip_threshold": 0.1}, {"decay_rate": -0.1}, {"beta1": 0.5}])
def test_adafactor_options_change_its_steps(option):
    torch.manual_seed(0)
    value, gradients = torch.randn(4, 6), [torch.randn(4, 6) * scale for scale in (1.0, 5.0, 0.2)]
    usual, changed = (_steps(_adafactor(value, **options), gradients) for options in ({}, option))
    assert not torch.allclose(usual, changed, atol=1e-4)


def test_adafactor_moves_a_tensor_of_zeros_by_its_least_scale():
    """A step is the rate times max(RMS of the tensor, eps2): without eps2, zeros would stay zeros."""
    optimizer = _adafactor(torch.zeros(4, 6), preset="t5-paper")
    moved = _steps(optimizer, [torch.ones(4, 6)])
    assert torch.allclose(moved, torch.full((4, 6), -0.1 * 1e-3))
    assert optimizer.compute_mean_rate() == pytest.approx(0.1 * 1e-3)


def test_the_relative_step_falls_after_step_10_000():
    group = {"relative_step": True, "warmup_init": False}
    assert [compute_base_rate(group, step) for step in (1, 10_000, 40_000)] == [1e-2, 1e-2, 5e-3]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_products_are_computed_in_the_precision(tmp_path, model_folder, precision, dtype):
    setup = kit.ready(tmp_path, model_folder, train__precision=precision, train__forward="padded")
    seen: set[torch.dtype] = set()
    layer = setup.learner.model.encoder.block[0].layer[0].SelfAttention.q
    layer.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    train_step(setup.learner, setup.data.stream.build_micro_batches(0), lr=1e-3, step=1)
    assert seen == {dtype} and {p.dtype for p in setup.learner.model.parameters()} == {torch.float32}


class Scaler:
    """Loss scaling by 1,024 that records the order of its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def is_enabled(self) -> bool:
        return True

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return 1024 * loss

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("unscale")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= 1024

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def update(self) -> None: ...


def test_gradients_are_clipped_after_unscaling(tmp_path, model_folder):
    plain, scaled = (kit.ready(tmp_path, model_folder, model__dropout=0.0, train__max_grad_norm=0.5) for _ in range(2))
    learner = replace(scaled.learner, scaler=Scaler())  # type: ignore[arg-type]
    group = [collate(plain.data.stream.store, [0, 1, 2])]
    one, other = (train_step(each, group, lr=1e-3, step=1) for each in (plain.learner, learner))
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    for a, b in zip(plain.learner.model.parameters(), learner.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_memory_that_runs_out_in_the_middle_of_a_step_leaves_no_gradient_and_no_draw(tmp_path, model_folder):
    """The second micro-batch fails after the first one left its gradient; the retry is the step of half the size."""
    options: dict[str, Any] = {"model__dropout": 0.3, "train__batch_size": 4}
    whole, failing = (kit.ready(tmp_path, model_folder, **options) for _ in range(2))
    rows = [[0, 1, 2, 3], [4, 5, 6, 7]]
    store = whole.data.stream.store
    torch.manual_seed(5)
    halves = [collate(store, part[i : i + 2]) for part in rows for i in (0, 2)]
    expected = train_step(whole.learner, halves, lr=1e-3, step=1)
    calls = []

    class Failing:
        count_rows = whole.learner.forward.count_rows

        def compute_losses(self, *args: Any, **named: Any) -> Any:
            calls.append(len(args[1].ids))
            if len(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return failing.learner.forward.compute_losses(*args, **named)

    learner = replace(failing.learner, forward=Failing())  # type: ignore[arg-type]
    torch.manual_seed(5)
    update = train_step(learner, [collate(store, part) for part in rows], lr=1e-3, step=1, batch_size=4)
    assert calls == [4, 4, 2, 2, 2, 2] and update.batch_size == 2
    assert update.values.tolist() == expected.values.tolist()
    for a, b in zip(whole.learner.model.parameters(), learner.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_order_of_the_data_follows_the_seed(tmp_path, model_folder):
    orders = []
    for seed in (1, 1, 2):
        setup = set_up(load_config(kit.recipe(tmp_path, model_folder), {"run.seed": seed}))
        orders.append([batch.ids for batch in setup.data.stream.build_micro_batches(0)])
    assert orders[0] == orders[1] != orders[2]


def test_the_cap_comes_from_the_training_targets(tmp_path, model_folder):
    setup = kit.ready(tmp_path, model_folder, eval__max_new_tokens=None, data__max_target_tokens=64)
    longer = kit.squad_file(tmp_path / "longer.json", num_questions=12, offset=100)
    text = longer.read_text().replace("red hat", "red hat and a red hat and a red hat and a red hat")
    longer.write_text(text)
    other = kit.ready(tmp_path, model_folder, eval__max_new_tokens=None, data__eval=str(longer))
    assert other.plan.max_new_tokens == setup.plan.max_new_tokens


def test_a_run_takes_the_start_token_of_its_model(tmp_path, model_folder):
    """Training, evaluation and export begin targets with decoder_start_token_id 7, as transformers does."""
    folder = kit.changed_config(Path(shutil.copytree(model_folder, tmp_path / "model")), decoder_start_token_id=7)
    options: dict[str, Any] = {"model__dropout": 0.0, "train__num_steps": 1, "train__batch_size": 8}
    setup = kit.ready(tmp_path, folder, **options)
    batch = pad(setup.data.stream.build_micro_batches(0)[0], pad_id=0)
    plain = T5ForConditionalGeneration.from_pretrained(folder).eval()
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}
    with torch.no_grad():
        expected = plain(**inputs).loss.item()
        plain.config.decoder_start_token_id = 0
        assert abs(plain(**inputs).loss.item() - expected) > 1e-3
    run = train(kit.recipe(tmp_path, folder, **options), preflight=False, quiet=True)
    assert run.steps[0].loss == pytest.approx(expected, rel=1e-5)
    exported = T5ForConditionalGeneration.from_pretrained(tmp_path / "run" / "model").eval()
    assert exported.config.decoder_start_token_id == exported.generation_config.decoder_start_token_id == 7
    tokenizer = setup.loaded.tokenizer
    for line in run.predictions["eval-1"]:
        ids = exported.generate(**tokenizer(line.inputs, return_tensors="pt"))[0].tolist()
        assert ids[0] == 7 and line.prediction == setup.config.task.from_text(
            tokenizer.decode(ids[1:], skip_special_tokens=True)
        )


def test_the_loop_steps_with_the_rate_of_the_plan(tmp_path, model_folder, monkeypatch):
    seen = []
    original = PlainEngine.step

    def step(self: PlainEngine, learner: Any, inputs: Any) -> Any:
        seen.append(inputs.lr)
        return original(self, learner, inputs)

    monkeypatch.setattr(PlainEngine, "step", step)
    run = train(kit.recipe(tmp_path, model_folder, schedule={"name": "linear"}), preflight=False, quiet=True)
    assert seen == [record.lr for record in run.steps]


@pytest.mark.parametrize(
    ("labels", "limit", "message"),
    [
        (("red hat", "red coat"), 2, "tokenized identically in the 2 tokens of data.max_target_tokens. Choose other"),
        (("猫", "犬"), 128, "'猫' and '犬' are tokenized identically. Choose other words for the labels."),
        (("red", "<pad>"), 128, "'<pad>' holds the special token '<pad>'. Choose other words for the labels."),
        (("red", "blue </s>"), 128, "'blue </s>' holds the special token '</s>'."),
    ],
)
def test_labels_that_the_model_could_not_tell_apart_are_refused(model_folder, labels, limit, message):
    task = {"name": "stackoverflow_quality", "labels": dict(zip(("HQ", "LQ"), labels, strict=True))}
    config = {"model": {"path": str(model_folder)}, "task": task, "data": {"max_target_tokens": limit}}
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_decoding(load_config(config), AutoTokenizer.from_pretrained(model_folder), target_p99=4)
