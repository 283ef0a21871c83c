"""Configuration: layers and their order, where an error comes from, nearest names, values as YAML 1.2 reads them."""

from __future__ import annotations

import dataclasses
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivetune import plugins
from fivetune.config import RunConfig, load_config
from fivetune.config.aliases import (
    ALIASES,
    NO_EFFECT,
    NO_EQUIVALENT,
    UNCHANGED,
    VALUE_ALIASES,
    NoEquivalentError,
    is_known,
)
from fivetune.config.layers import EXCLUSIVE, PLUGIN_SECTIONS, as_yaml, parse_overrides, parse_value
from fivetune.config.paths import find_typed_path
from fivetune.config.recipes import find_recipe, list_recipe_names
from fivetune.errors import ConfigError

MINIMAL = "model: {path: m}\ntask: squad_v2\n"
BASIC: dict[str, Any] = {"model": {"path": "m"}, "task": "squad_v2"}


def write(folder: Path, text: str, name: str = "r.yaml") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def refusal(folder: Path, text: str, overrides: dict[str, Any] | None = None) -> str:
    """What is said about a recipe that is wrong, without the folder's name."""
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text), overrides)
    return str(caught.value).replace(f"{folder}/", "")


def field_names(section: str) -> list[str]:
    """Settings of a section; those of a plugin section are its default plugin's, or the task's."""
    if section == "device":
        return []
    if section in PLUGIN_SECTIONS:
        return ["name", *type(getattr(load_config(BASIC), section)).model_fields]
    annotation = RunConfig.model_fields[section].annotation
    return list(annotation.model_fields) if annotation else []


ALL_KEYS = [f"{section}.{name}" for section in RunConfig.model_fields for name in field_names(section)]


# --- layers ---


def test_later_layers_win(tmp_path):
    write(tmp_path, "train: {batch_size: 2, global_batch_size: 8, num_epochs: 5}\nrun: {seed: 1}\n", "first.yaml")
    write(tmp_path, "base: first.yaml\nrun: {seed: 2}\ntrain: {batch_size: 4}\n", "second.yaml")
    recipe = write(tmp_path, "base: second.yaml\n" + MINIMAL + "run: {seed: 3}\n")
    config = load_config(recipe, {"run.seed": 4})
    assert (config.run.seed, config.train.batch_size, config.train.global_batch_size) == (4, 4, 8)
    assert load_config(recipe).run.seed == 3
    assert config.train.log_every_steps == 10


def test_run_dir_is_named_after_the_recipe(tmp_path):
    assert load_config(write(tmp_path, MINIMAL, "mine.yaml")).run.dir == "runs/mine"
    assert load_config(BASIC).run.dir == "runs/run"
    assert load_config(BASIC, {"output_dir": "out/{recipe}-1"}).run.dir == "out/run-1"


def test_columns_are_merged_one_by_one(tmp_path):
    recipe = write(tmp_path, MINIMAL + "data: {columns: {question: Frage}}\n")
    merged = load_config(recipe, {"data.columns.context": "Text"}).data.columns
    assert merged == {"question": "Frage", "context": "Text"}
    assert load_config(recipe, {"data.columns": {"a": "b"}}).data.columns == {"a": "b"}


def test_one_source_or_many():
    one = load_config(BASIC, {"data.train": "a.json"})
    many = load_config(BASIC, {"data.train": ["a.json", "b.json"]})
    assert (one.data.train, many.data.train) == (("a.json",), ("a.json", "b.json"))


def test_another_plugin_forgets_the_options_of_the_one_before(tmp_path):
    write(tmp_path, "optimizer: {lr: 1e-2, preset: hf, name: adafactor}\n", "base.yaml")
    recipe = write(tmp_path, "base: base.yaml\n" + MINIMAL)
    assert load_config(recipe).optimizer.model_dump(include={"lr", "preset"}) == {"lr": 1e-2, "preset": "hf"}
    switched = load_config(recipe, {"optimizer": "adamw"}).optimizer
    assert (switched.plugin_name(), switched.lr) == ("adamw", 3e-4)
    same = load_config(recipe, {"optimizer.name": "adafactor", "optimizer.lr": 1e-3}).optimizer
    assert (same.lr, same.preset) == (1e-3, "hf")


@pytest.mark.parametrize("name", ["optimizer", "optimizer.name", "optim"])
def test_order_of_overrides_does_not_matter(tmp_path, name):
    recipe = write(tmp_path, MINIMAL + "optimizer: {name: adafactor, preset: hf}\n")
    for overrides in ({name: "adamw", "optimizer.lr": 1e-2}, {"optimizer.lr": 1e-2, name: "adamw"}):
        optimizer = load_config(recipe, overrides).optimizer
        assert (optimizer.plugin_name(), optimizer.lr) == ("adamw", 1e-2)


def test_options_without_a_name_are_those_of_the_default(tmp_path):
    config = load_config(BASIC, {"optimizer.lr": 1e-2, "warmup_steps": 5})
    assert (config.optimizer.plugin_name(), config.optimizer.lr) == ("adafactor", 1e-2)
    assert (config.schedule.plugin_name(), config.schedule.warmup_steps) == ("constant", 5)


@pytest.mark.parametrize(("key", "rival"), EXCLUSIVE.items())
def test_a_later_layer_replaces_the_rival(tmp_path, key, rival):
    section, name = key.split(".")
    rival_name = rival.partition(".")[2]
    value = 0.5 if "fraction" in name else 2
    recipe = write(tmp_path, f"{MINIMAL}{section}: {{{rival_name}: {0.5 if 'fraction' in rival else 2}}}\n")
    chosen = getattr(load_config(recipe, {key: value}), section)
    assert (getattr(chosen, name), getattr(chosen, rival_name)) == (value, None)
    kept = getattr(load_config(recipe, {key: None}), section)
    assert getattr(kept, rival_name) is not None


def test_rivals_in_one_layer_are_refused(tmp_path):
    both = "num_steps and num_epochs are both given. Keep one of them."
    assert refusal(tmp_path, MINIMAL + "train: {num_steps: 3, num_epochs: 2}\n") == f"r.yaml:3: train: {both}"
    by_hand = {"train.num_steps": 3, "train.num_epochs": 2}
    assert refusal(tmp_path, MINIMAL, by_hand) == f"--train.num_steps: {both}"
    assert "schedule: warmup_steps and warmup_fraction are both given. Keep one of them." in refusal(
        tmp_path, MINIMAL + "schedule: {warmup_steps: 1, warmup_fraction: 0.1}\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eval: d.csv, eval_share: 0.1", "r.yaml:3: data.eval_share (0.1) and data.eval (d.csv) are both given, but"),
        ("eval: d.csv, eval_share: 0.1", "Keep one (a resumed run keeps data.eval_share): add data.eval: [] or"),
        ("group_column: book", "data.group_column (book) has no effect without data.eval_share, the share of the"),
        ("eval: dev.csv, group_column: book", "Add data.eval_share: 0.1, or remove data.group_column."),
        ("eval_seed: 3", "data.eval_seed (3) has no effect without data.eval_share, the share of the training"),
    ],
)
def test_settings_of_a_split_that_is_not_made_are_refused(tmp_path, text, message):
    assert message in refusal(tmp_path, MINIMAL + f"data: {{{text}}}\n")


def test_a_refused_split_is_named_with_its_own_origin(tmp_path):
    told = "data.eval_share (0.1) and data.eval (d.csv) are both given"
    both = {"data.eval": "d.csv", "data.eval_share": 0.1, "train.num_steps": 3}
    assert refusal(tmp_path, MINIMAL, both).startswith(f"--data.eval_share: {told}")
    named = {"validation_file": "d.csv", "validation_split_percentage": 10, "num_train_epochs": 3}
    assert refusal(tmp_path, MINIMAL, named).startswith(f"--validation_split_percentage: {told}")
    assert refusal(tmp_path, MINIMAL, {"data.eval_seed": 3}).startswith("--data.eval_seed: data.eval_seed (3) has no")
    with pytest.raises(ConfigError, match=r"^the given dict: data\.eval_share"):
        load_config({"model": {"path": "m"}, "task": "squad", "data": {"eval": "d.csv", "eval_share": 0.1}})


# --- what is refused, and in which words ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: {name: adamw,\n  lrr: 1}", "r.yaml:4: optimizer.lrr is not a setting. Did you mean lr? Allowed:"),
        ("optimiser: {name: adamw}", "r.yaml:3: optimiser is not a setting. Did you mean optimizer? Allowed: "),
        ("train: {batch_size: no}", "r.yaml:3: train.batch_size: Input should be a valid integer"),
        ("run:\n  seed: -1", "r.yaml:4: run.seed: Input should be greater than or equal to 0, not -1."),
        ("data: {max_input_tokens: 1.5}", "got a number with a fractional part, not 1.5."),
        (
            "device: gpu",
            "r.yaml:3: device: there is no 'gpu'. Allowed: auto (a GPU if there is one, else cpu), cpu,",
        ),
        ("launch: {nproc: 2}", "r.yaml:3: launch.nproc 2 needs a strategy for several processes, strategy.name single"),
        ("checkpoint: {keep: 1}", "r.yaml:3: checkpoint.keep: Input should be greater than or equal to 2, not 1."),
        ("train: 3", "r.yaml:3: train: Input should be a table, not 3."),
        ("strategy: dpp", "r.yaml:3: strategy: there is no 'dpp'. Did you mean ddp? Allowed: ddp,"),
        ("report: {sinks: [wandbb]}", "r.yaml:3: report: sinks: there is no 'wandbb'. Did you mean wandb? Allowed:"),
        (
            "train:\n  batch_size: 3\n  global_batch_size: 8",
            "r.yaml:5: train.global_batch_size 8 is not a multiple of train.batch_size 3.",
        ),
        (
            "optimizer: {name: adafactor, lr: 1e-3, relative_step: true}",
            "r.yaml:3: optimizer: lr 0.001 is given together with relative_step, which computes its own. Drop one of",
        ),
        (
            "optimizer: {name: adafactor, warmup_init: true}",
            "r.yaml:3: optimizer: warmup_init belongs to relative_step. Set relative_step: true or drop warmup_init.",
        ),
        (
            "optimizer: {name: adafactor, preset: hf, scale_parameter: true}",
            "r.yaml:3: optimizer: scale_parameter True contradicts preset hf. Set preset: t5-paper, which implies",
        ),
        (
            "optimizer: {relative_step: true}\nschedule: linear",
            "r.yaml:4: schedule.name linear has no effect with optimizer.relative_step, which computes its rate.",
        ),
        (
            "optimizer: {relative_step: true}\nschedule:\n  warmup_steps: 5",
            "r.yaml:5: schedule.warmup_steps 5 has no effect with optimizer.relative_step, which computes its rate.",
        ),
        (
            "learning_rate: 1e-3\noptimizer: {lr: 1e-4}",
            "r.yaml:4: optimizer.lr is 0.0001, but learning_rate (r.yaml:3) is 0.001, and both name the same setting.",
        ),
        (
            "optimizer: adafactor\noptim: adamw_torch",
            "r.yaml:4: optim is 'adamw', but optimizer (r.yaml:3) is 'adafactor', and both name the same setting.",
        ),
        (
            "optimizer: schedule_free\nschedule: {name: cosine}",
            "r.yaml:4: schedule.name cosine lowers the learning rate, and optimizer.name schedule_free averages the "
            "weights instead. Use schedule.name constant, with warmup_steps or warmup_fraction.",
        ),
        ("train: {num_steps: 3}\ntrain: {num_steps: 4}", "r.yaml:4: train is repeated (first in line 3). Keep one."),
        (
            "train:\n  num_steps: 3\n  num_steps: 4",
            "r.yaml:5: train.num_steps is repeated (first in line 4). Keep one.",
        ),
        ("train: {num_steps: 3", "r.yaml:4:1: not valid YAML: expected ',' or '}', but got '<stream end>'."),
        ("\tx: 1", "r.yaml:3:1: not valid YAML: found character '\\t' that cannot start any token."),
        ("x: \0", "r.yaml: not valid YAML: unacceptable character #x0000: special characters are not allowed in "),
        ("? [a, b]\n: 3", "r.yaml:3: the name of a setting must be a text, not a sequence."),
        ("base: squad_v3", "r.yaml:3: base 'squad_v3' is neither a file nor a shipped recipe. Did you mean squad_v2"),
        ("base: r.yaml", "r.yaml: base files form a cycle. Remove one `base:`."),
    ],
)
def test_refusals(tmp_path, text, message):
    assert message in refusal(tmp_path, MINIMAL + text + "\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml: the file is empty. A recipe needs at least model and task."),
        ("- 1", "r.yaml: a recipe is a table of sections, not a sequence."),
        ("model: {path: m}", "r.yaml: task: Field required."),
        ("task: squad", "r.yaml: model: Field required."),
        ("model: {}\ntask: squad", "r.yaml:1: model: path is missing. Give model.path, or model.init: random with"),
        ("model: {init: random}\ntask: squad", "r.yaml:1: model: init: random needs model.config (a folder or a"),
        ("model: {path: m}\ntask: {}", "r.yaml:2: task: needs a name. Allowed: "),
        ("model: {path: m}\ntask: {nme: squad}", "r.yaml:2: task: needs a name, has nme. Allowed: "),
    ],
)
def test_refused_recipes(tmp_path, text, message):
    assert message in refusal(tmp_path, text)


def test_errors_come_all_at_once_each_with_its_place(tmp_path):
    text = MINIMAL + "run:\n  seed: -1\ntrain:\n  batch_size: 0\n"
    places = [line.partition(": ")[0] for line in refusal(tmp_path, text, {"checkpoint.keep": 0}).splitlines()]
    assert places == ["r.yaml:4", "r.yaml:6", "--checkpoint.keep"]


def test_an_error_names_the_base_file(tmp_path):
    write(tmp_path, "run:\n  seed: no\n", "other.yaml")
    assert refusal(tmp_path, "base: other.yaml\n" + MINIMAL).startswith("other.yaml:2: run.seed: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("report: {title: !!python/name:os.system }", "r.yaml:3:17: not valid YAML: could not determine a constructor"),
        ("report:\n  title: !!python/object/apply:os.system [x]", "r.yaml:4:10: not valid YAML: could not determine"),
        (f"report:\n  title: {'[' * 5000}{']' * 5000}", "r.yaml:4: nested more than 100 levels deep."),
        ("run:\n  seed: !!int word", "r.yaml:4: not valid YAML: tag:yaml.org,2002:int does not fit the value"),
        (f"run: {{seed: {'9' * 5000}}}", "r.yaml:3: not valid YAML: tag:yaml.org,2002:int does not fit the value"),
    ],
)
def test_a_recipe_holds_plain_data_only(tmp_path, text, message):
    assert message in refusal(tmp_path, MINIMAL + text + "\n")


def test_nesting_on_the_command_line_is_text():
    assert parse_value("[" * 1500) == "[" * 1500  # beyond Python's own limit of 1000 calls


def test_a_run_s_config_that_is_cut_off_is_refused(tmp_path):
    run = write_run(tmp_path / "old")
    whole = (run / "config.yaml").read_text(encoding="utf-8")
    (run / "config.yaml").write_text(whole[: whole.index("eval:\n", whole.index("train:\n"))])
    with pytest.raises(ConfigError, match=r"config\.yaml:\d+: the file is truncated: eval, checkpoint, .* missing\."):
        load_config(run)


def test_a_run_of_a_version_without_a_section_has_its_defaults(tmp_path):
    run = write_run(tmp_path / "old")
    whole = (run / "config.yaml").read_text(encoding="utf-8")
    start = whole.index("loss:\n")
    (run / "config.yaml").write_text(whole[:start] + whole[whole.index("eval:\n", start) :])
    assert load_config(run).loss.used == ()


def test_base_names_a_shipped_recipe(tmp_path):
    for base in ("squad_v2", "recipes/squad_v2.yaml", "squad_v2.yaml"):
        assert load_config(write(tmp_path, f"base: {base}\n")).task == load_config("squad_v2").task


@pytest.mark.parametrize("name", ["f2", "total", "HasAns_total", "best_f1_thresh", "loss"])
def test_the_metric_that_chooses_is_a_score(name):
    with pytest.raises(
        ConfigError, match=rf"--eval.metric: eval.metric '{name}' is not a score that can select"
    ) as caught:
        load_config(BASIC, {"eval.metric": name})
    assert "thresh" not in str(caught.value).partition("Allowed")[2]
    assert load_config(BASIC, {"metric_for_best_model": "eval_HasAns_f1"}).eval.metric == "HasAns_f1"


def test_latin_1_is_named(tmp_path):
    (tmp_path / "r.yaml").write_bytes("run: {dir: Café}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"r\.yaml: not UTF-8 text\. Save the file as UTF-8\."):
        load_config(tmp_path / "r.yaml")


@pytest.mark.parametrize(("section", "kind"), PLUGIN_SECTIONS.items())
def test_unknown_plugins_name_the_nearest(section, kind):
    name = plugins.list_plugins(kind)[0]
    with pytest.raises(ConfigError, match=rf"^--{section}\.name: there is no '{name}x'. Did you mean {name}\b"):
        load_config(BASIC, {f"{section}.name": f"{name}x"})


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(
        ConfigError, match=r"^squad_v3: no such recipe\. Did you mean squad_v2.*\? All names: fivetune list recipes"
    ):
        load_config("squad_v3")


@pytest.mark.parametrize("key", ALL_KEYS)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_one_typo_in_any_key_is_understood(key, data):
    section, _, name = key.partition(".")
    typo = data.draw(_one_edit(name).filter(lambda word: word not in field_names(section)))
    with pytest.raises(ConfigError) as caught:
        load_config(
            BASIC,
            {"task.name": "squad_v2", f"{section}.{typo}": 1}
            if key != "task.name"
            else {"model.path": "m", "task": {typo: "squad"}},
        )
    message = str(caught.value)
    suggestions = message.partition("Did you mean ")[2].partition("?")[0].split(" or ")
    assert name in suggestions or f"needs a name, has {typo}" in message


@pytest.mark.parametrize("section", RunConfig.model_fields)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_one_typo_in_any_section_is_understood(section, data):
    typo = data.draw(_one_edit(section).filter(lambda word: word not in (*RunConfig.model_fields, *ALIASES)))
    with pytest.raises(ConfigError) as caught:
        load_config({**BASIC, typo: {"x": 1}})
    assert section in str(caught.value).partition("Did you mean ")[2].partition("?")[0].split(" or ")


def _one_edit(word: str) -> st.SearchStrategy[str]:
    """A letter left out, doubled, replaced, or two exchanged."""
    place, letter = st.integers(0, len(word) - 1), st.sampled_from(string.ascii_lowercase)
    return st.one_of(
        place.map(lambda i: word[:i] + word[i + 1 :]),
        place.map(lambda i: word[:i] + word[i] + word[i:]),
        st.builds(lambda i, c: word[:i] + c + word[i + 1 :], place, letter),
        place.map(lambda i: word[:i] + word[i : i + 2][::-1] + word[i + 2 :]),
    ).filter(lambda typo: typo != word and len(typo) > 1)


# --- transformers' names ---


def test_aliases_lead_to_settings_that_exist():
    columns = {f"data.columns.{name}" for name in ("question", "context", "answer")}
    adamw = {f"optimizer.{name}" for name in ("beta2", "eps")}
    assert set(ALIASES.values()) <= {*ALL_KEYS, *columns, *adamw, "train.early_stopping.patience", "device"}
    assert set(VALUE_ALIASES) <= set(ALIASES)
    tables = [set(ALIASES), set(UNCHANGED), set(NO_EFFECT), set(NO_EQUIVALENT)]
    assert sum(map(len, tables)) == len(set.union(*tables))


def test_every_argument_of_transformers_is_understood():
    from transformers import Seq2SeqTrainingArguments  # slow: not in each process that collects tests

    arguments = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    assert {name for name in arguments if not is_known(name)} == set()


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({"gradient_checkpointing": True}, {"train.recompute": True}),
        ({"max_seq_length": 384, "doc_stride": 96}, {"data.max_input_tokens": 384, "data.window_overlap": 96}),
        ({"val_max_answer_length": 30, "num_beams": 4}, {"eval.max_new_tokens": 30, "eval.num_beams": 4}),
        ({"question_column": "frage", "answer_column": "answers"}, {"data.columns": {"question": "frage"}}),
        ({"optim": "adamw_torch", "adam_beta1": 0.8}, {"optimizer.beta1": 0.8}),
        ({"optim": "adamw_bnb_8bit"}, {"optimizer.table_bits": 32}),
        ({"ema_decay": 0.99}, {"train.ema": 0.99}),
        ({"optim": "schedule_free_adamw"}, {"optimizer.beta1": 0.9}),
        ({"adafactor": True, "eval_steps": 5, "evaluation_strategy": "steps"}, {"eval.every_steps": 5}),
        ({"auto_find_batch_size": True, "train.global_batch_size": 8}, {"train.batch_size": "auto"}),
        ({"version_2_with_negative": False}, {"task.name": "squad"}),
        ({"metric_for_best_model": "eval_exact_match"}, {"eval.metric": "exact"}),
        ({"label_smoothing_factor": 0.1, "early_stopping_threshold": 0}, {"loss.label_smoothing": 0.1}),
        (
            {"early_stopping_patience": 3},
            {"train.early_stopping": {"patience": 3, "min_delta": 0.0, "metric": None}},
        ),
        ({"warmup_steps": 0.1}, {"schedule.warmup_fraction": 0.1}),
        ({"ddp_timeout": 600, "cache_dir": "c"}, {"launch.timeout_minutes": 10, "data.cache_dir": "c"}),
        ({"do_train": True, "predict_with_generate": True, "dataloader_num_workers": 4, "bf16": False}, {}),
        (
            {"dataset_name": "squad_v2", "dataset_config_name": "v2"},
            {"data.train": ("rajpurkar/squad_v2:v2:train",), "data.eval": ("rajpurkar/squad_v2:v2:validation",)},
        ),
    ],
)
def test_transformers_arguments_arrive(arguments, settings):
    config = load_config(BASIC, arguments).as_dict()
    for key, value in settings.items():
        section, name = key.split(".")
        assert config[section][name] == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--resume_from_checkpoint", "--resume_from_checkpoint: resume_from_checkpoint has no setting of its own here. "
         "Write fivetune train RUN --resume."),
        ("--typical_p 0.5", "Answers are drawn by eval.temperature, eval.top_k and eval.top_p."),
        ("--source_prefix x", "--task.inputs"),
        ("--forced_bos_token ro_RO", "leave it out"),
        ("--eval_strategy epoch", "has no setting of its own here. By default a run evaluates ten times"),
        ("--save_strategy no", "has no setting of its own here. By default a checkpoint is written at each"),
        ("--use_ema true", "Set train.ema: 0.999, the decay of a moving average of the weights."),
        ("--swa true", "Set checkpoint.average_best: 3, or train.ema: 0.999 (docs/optimizers.md)."),
        ("--overwrite_output_dir", "Write --overwrite, which moves the old run aside."),
        ("--do_predict", "After training: fivetune predict RUN --input FILE."),
        ("--early_stopping_threshold 0.1", "Set train.early_stopping.min_delta, in points of the score (0 to 100)."),
        ("--lora true", "Set model.adapter.name: lora"),
        ("--global_batch_size 8", "global_batch_size is not a setting. Did you mean train.global_batch_size?"),
        ("--adapter lora", "adapter is not a setting. Did you mean model.adapter?"),
        ("--batch-size 8", "batch-size is not a setting. Did you mean train.batch_size or eval.batch_size?"),
        ("--learning_rat 1", "Did you mean learning_rate (transformers' name of optimizer.lr)?"),
        ("--dataset_name mine", "--dataset_name: 'mine' has no owner. Names of the hub have the form org/name."),
    ],
)  # fmt: skip
def test_answers_to_other_arguments(words, message):
    with pytest.raises(ConfigError) as caught:
        load_config(BASIC, parse_overrides(words.split()))
    assert message in str(caught.value)


def test_transformers_names_are_understood(tmp_path):
    recipe = write(
        tmp_path, "model_name_or_path: m\ntask: squad\nper_device_train_batch_size: 4\nlearning_rate: 1e-4\n"
    )
    config = load_config(recipe, {"optim": "adamw_torch", "max-source-length": 99, "num_train_epochs": 2})
    assert (config.model.path, config.train.batch_size, config.data.max_input_tokens) == ("m", 4, 99)
    assert (config.optimizer.plugin_name(), config.train.num_epochs) == ("adamw", 2)
    constant = load_config(BASIC, {"lr_scheduler_type": "constant_with_warmup", "report_to": "none"})
    assert (constant.schedule.plugin_name(), constant.report.sinks) == ("constant", ())


def test_report_to_takes_one_or_all():
    assert load_config(BASIC, {"report_to": "wandb"}).report.sinks == ("wandb",)
    assert load_config(BASIC, {"report_to": "all"}).report.sinks == ("tensorboard", "wandb", "mlflow")


@pytest.mark.parametrize(("name", "advice"), NO_EQUIVALENT.items())
def test_names_without_a_place_say_what_to_do(name, advice):
    with pytest.raises(NoEquivalentError) as caught:
        load_config(BASIC, {name: 1})
    assert str(caught.value) == f"--{name}: {name} has no setting of its own here. {advice}"
    assert caught.value.where == f"--{name}" and caught.value.advice == advice


# --- values ---

VALUES = [
    ("1e-4", 1e-4), ("1E4", 1e4), ("1_000", 1000), ("-3", -3), (".5", 0.5), ("1.", 1.0), ("0x10", 16), ("0", 0),
    ("true", True), ("False", False), ("null", None), ("~", None), ("no", "no"), ("yes", "yes"), ("on", "on"),
    ("2020-01-01", "2020-01-01"), ("1:30", "1:30"), ("010", "010"), ("1e", "1e"), ("'1'", "1"), ("[1, b]", [1, "b"]),
    ("a: b", "a: b"), ("question: {question}", "question: {question}"), ("{", "{"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_values_mean_what_people_mean(tmp_path, text, value):
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("1_000.5e-1", 100.05), ("1", 1.0)])
def test_numbers_are_the_same_in_a_file(tmp_path, text, value):
    recipe = write(tmp_path, MINIMAL + f"train: {{max_grad_norm: {text}, num_steps: 1_000}}\n")
    config = load_config(recipe)
    assert (config.train.max_grad_norm, config.train.num_steps) == (value, 1000)


@pytest.mark.parametrize(
    "name", ["runs/a\nb", "runs/a. ", "'runs/a'", '"x"', " a", "2026", "1e3", "true", "{recipe}", "a #b", "a: b"]
)
def test_a_path_is_taken_as_it_is(name):
    """YAML folded line breaks, and dropped ends and quotes, so that predict did not find the folder of train."""
    flags = parse_overrides(["--run.dir", name, "--model_name_or_path", name, "--data.train", name, "b"])
    config = load_config(BASIC, flags)
    assert (config.run.dir.replace("run", "{recipe}") if name == "{recipe}" else config.run.dir) == name
    assert (config.model.path, config.data.train) == (name, (name, "b"))


@pytest.mark.parametrize(("name", "allowed"), [("n" * 200, True), ("n" * 201, False), ("ä" * 101, False)])
def test_a_long_name_of_a_run_is_refused_before_it_trains(tmp_path, name, allowed):
    """A name of 240 bytes trained, and failed at the end: the names beside it were too long."""
    flags = parse_overrides(["--run.dir", str(tmp_path / name)])
    if allowed:
        assert load_config(BASIC, flags).run.dir.endswith(name)
    else:
        with pytest.raises(ConfigError, match=r"^--run\.dir: .* 20[12] bytes\. Allowed are 200"):
            load_config(BASIC, flags)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--a.b", "1", "--a.b=2"], "--a.b is given twice. Keep one."),
        (["x"], "'x' is neither a setting nor a value. Write --section.key VALUE."),
        (["--a.b"], "--a.b has no value. Write --a.b VALUE."),
        (["--a.b", "--a.c", "1"], "--a.b has no value. Write --a.b VALUE."),
    ],
)
def test_flags_that_are_refused(words, message):
    with pytest.raises(ConfigError) as caught:
        parse_overrides(words)
    assert str(caught.value) == message


# --- written and read again ---


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lr=st.floats(1e-12, 10),
    seed=st.integers(0, 2**31 - 1),
    title=st.text(st.characters(exclude_categories=["Cs"])),
    phrase=st.sampled_from(["no", "null", "1e3", "yes: really", "no answer", "непонятно"]),
    optimizer=st.sampled_from(["adamw", "adafactor"]),
    max_grad_norm=st.none() | st.floats(1e-6, 1e6),
)
def test_the_resolved_config_reads_back_equal(tmp_path, lr, seed, title, phrase, optimizer, max_grad_norm):
    config = load_config(
        {
            "model": {"path": "m"},
            "task": {"name": "squad_v2", "no_answer": phrase},
            "run": {"seed": seed},
            "optimizer": {"name": optimizer, "lr": lr},
            "train": {"max_grad_norm": max_grad_norm},
            "schedule": {"name": "linear", "warmup_fraction": 0.1},
            "report": {"title": title},
        }
    )
    assert load_config(write(tmp_path, config.as_yaml())) == config
    assert load_config(config.as_dict()) == config


@pytest.mark.parametrize("title", ["\x85", "a\x85b", "a\u2028b", "\u2029", "a\nb", "a\r\nb"])
def test_every_line_break_is_read_back(tmp_path, title):
    config = load_config(BASIC, {"report.title": title})
    assert load_config(write(tmp_path, config.as_yaml())).report.title == title


@pytest.mark.parametrize("name", [name for name in list_recipe_names() if name != "base"])
def test_shipped_recipes_are_right(name, tmp_path):
    config = load_config(name, {"run.dir": str(tmp_path)})
    assert find_recipe(name).read_text(encoding="utf-8").startswith("# ")
    (tmp_path / "config.yaml").write_text(config.as_yaml(), encoding="utf-8")
    assert load_config(tmp_path) == config


# --- a run directory as recipe ---


def write_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    config = load_config(BASIC, {"run.dir": "where/it/was", "run.seed": 5})
    (folder / "config.yaml").write_text(config.as_yaml(), encoding="utf-8")
    return folder


def test_a_run_directory_is_a_recipe_for_where_it_is_now(tmp_path):
    run = write_run(tmp_path / "old")
    config = load_config(run)
    assert (config.run.dir, config.run.seed) == (str(run), 5)


def test_a_run_directory_gives_way_to_an_override(tmp_path):
    run = write_run(tmp_path / "old")
    assert load_config(run, {"run.dir": "runs/new"}).run.dir == "runs/new"
    assert load_config(run, {"output_dir": "runs/{recipe}-2"}).run.dir == "runs/old-2"


def test_a_folder_with_a_recipe_s_name_is_not_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "squad_v2").mkdir()
    assert load_config("squad_v2").run.dir == load_config(find_recipe("squad_v2")).run.dir == "runs/squad_v2"


def test_the_same_thing_by_two_names_is_no_contradiction():
    assert load_config(BASIC, {"learning_rate": 1e-3, "optimizer.lr": 1e-3}).optimizer.lr == 1e-3
    with pytest.raises(
        ConfigError, match=r"--optimizer.lr: optimizer.lr is 2, but learning_rate \(--learning_rate\) is 1,"
    ):
        load_config(BASIC, {"learning_rate": 1, "optimizer.lr": 2})


@pytest.mark.parametrize("text", ["file #1.json", "#1", "[a, b] # c", "5 # five", "a#b", "x\t#y"])
def test_a_comment_is_part_of_a_value_on_the_command_line(text):
    assert parse_value(text) == text


@pytest.mark.parametrize(("text", "value"), [("'a #b'", "a #b"), ('"x" ', "x"), (" 5 ", 5), ("[a, b]", ["a", "b"])])
def test_values_without_a_comment(text, value):
    assert parse_value(text) == value


def test_a_table_on_the_command_line():
    task = {"model": {"path": "m"}, "task": "pubmedqa"}
    flags = parse_overrides(["--task.labels", "{yes: ja, no: nein}", "--data.columns", "{question: Frage}"])
    config = load_config(task, flags)
    assert (config.task.labels, config.data.columns) == ({"yes": "ja", "no": "nein"}, {"question": "Frage"})
    with pytest.raises(
        ConfigError, match=r"^--task\.labels: Input should be a table, not 'high'\. A table is written "
    ):
        load_config(task, {"task.labels": "high"})


def test_the_shortest_answer_fits_into_the_longest():
    with pytest.raises(ConfigError, match="min_new_tokens 9 is more than max_new_tokens 4"):
        load_config(BASIC, {"eval.min_new_tokens": 9, "eval.max_new_tokens": 4})


def test_the_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert find_typed_path("~/model", tmp_path) == str(tmp_path / "model")
    assert find_typed_path("~/none", tmp_path) == str(tmp_path / "none")


@pytest.mark.parametrize("value", [None, "", ["dev.json", ""]])
@pytest.mark.parametrize("key", ["data.eval", "data.train"])
def test_an_empty_source_says_what_it_means(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"model": {"path": "t5-nano"}, "task": "squad_v2"}, {key: value})
    assert str(caught.value) == (
        f"--{key}: an empty value (null) names no file. Allowed are files, folders and hub names. Give one, or leave "
        "the setting out; [] overrides one of the base with none."
    )


def test_an_empty_value_of_another_setting_is_null() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"model": {"path": "t5-nano"}, "task": "squad_v2"}, parse_overrides(["--run.dir", ""]))
    assert str(caught.value) == (
        "--run.dir: Input should be a valid string, not null (an empty value). Leave the setting out for its default."
    )


def test_a_share_is_refused_where_all_parts_of_a_mixture_have_evaluation_files() -> None:
    parts = {"a": {"task": "squad", "eval": "a.json"}, "b": {"task": "jsonl", "eval": "b.jsonl"}}
    table = {
        "model": {"path": "t5-nano"},
        "task": {"name": "mixture", "parts": parts},
        "data": {"train": "t.json", "eval_share": 0.1},
    }
    with pytest.raises(ConfigError) as caught:
        load_config(table)
    assert str(caught.value) == (
        "the given dict: data.eval_share (0.1) has no effect: all parts of the mixture (a, b) have evaluation files of "
        "their own. Remove it (a resumed run keeps it: add data.eval_share: null), or remove task.parts.a.eval."
    )
    assert load_config(table, {"data.eval_share": None}).data.eval_share is None
    parts["b"].pop("eval")
    assert load_config(table).data.eval_share == 0.1


def test_tables_and_single_names_are_values_of_flags():
    flags = {
        "--model.adapter": "{name: lora, r: 8}",
        "--optimizer": "{name: adamw, lr: 1e-3}",
        "--train.param_groups": "{match: encoder, lr: 0.1}",
        "--model.freeze": "decoder",
        "--report.sinks": "tensorboard",
    }
    config = load_config(BASIC, parse_overrides([word for pair in flags.items() for word in pair])).as_dict()
    assert config["model"]["adapter"].items() >= {"name": "lora", "r": 8}.items()
    assert config["optimizer"].items() >= {"name": "adamw", "lr": 1e-3}.items()
    assert config["train"]["param_groups"] == [{"match": "encoder", "lr": 0.1, "weight_decay": None}]
    assert (config["model"]["freeze"], config["report"]["sinks"]) == (["decoder"], ["tensorboard"])
    two = parse_overrides(["--train.param_groups", "{match: encoder}", "{match: shared, lr: 0.2}"])
    assert [group.match for group in load_config(BASIC, two).train.param_groups] == ["encoder", "shared"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model.adapter.r": 8}, "--model.adapter.r: needs a name, has r."),
        ({"model.adapter": "lora", "model.unfreeze": "{encoder: 2}"}, "--model.unfreeze: unfreeze (encoder): adapter"),
        ({"model.adapter": "lora", "model.init": "random"}, "--model.adapter: adapter lora is trained beside frozen"),
        ({"train.batch_size": "auto"}, "--train.batch_size: batch_size auto needs global_batch_size,"),
        ({"data.eval_share": 0.1}, "--data.eval_share: data.eval_share (0.1) and data.eval (dev.json) are both given"),
        ({"model.unfreeze": "{encoder: 9}"}, "--model.unfreeze: model.unfreeze encoder at step 9 has no effect"),
        ({"train.num_steps": 3}, "--train.num_steps: model.unfreeze shared at step 5 has no effect"),
        (
            {"train.early_stopping": True},
            "--train.early_stopping: true is not a number of evaluations. Give one, such as 3, or a table such as "
            "{patience: 3, min_delta: 0.5}; null is off.",
        ),
        (
            {"loss.class_weights": "{good: -1, bad: x}"},
            "--loss.class_weights: the weight of good is -1. Allowed is a number above 0, such as 3.",
        ),
        ({"data.columns": [1]}, "--data.columns: Input should be a table, not [1]."),
    ],
)
def test_errors_of_flags_name_the_flag(tmp_path, flags, message):
    recipe = MINIMAL + "data: {eval: dev.json}\ntrain: {num_steps: 8}\n"
    if "train.num_steps" in flags:
        recipe = recipe.replace("model: {", "model: {unfreeze: {shared: 5}, ")
    found = refusal(tmp_path, recipe, flags)
    assert found.startswith(message) and "\n" not in found


def test_characters_that_a_terminal_obeys_are_escaped_in_yaml():
    table = {"title": "a\u202eb\u2069\x1b[2J", "other": "é"}
    text = as_yaml(table)
    assert not set(text) & set("\u202e\u2069\x1b") and yaml.safe_load(text) == table


LABELLED = {"task": {"name": "classification", "inputs": "{text}", "label": "label"}}


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ({}, {"eval.temperature": 0.7, "eval.num_beams": 4}, "Set temperature 0 or num_beams 1"),
        ({}, {"eval.temperature": -1}, "eval.temperature"),
        ({}, {"eval.temperature": 1, "eval.top_p": 0}, "eval.top_p"),
        ({}, {"eval.temperature": 1, "eval.top_p": 1.5}, "eval.top_p"),
        ({}, {"eval.temperature": 1, "eval.top_k": -1}, "eval.top_k"),
        ({}, {"eval.top_k": 5}, "top_k 5 has no effect with temperature 0"),
        ({}, {"eval.top_p": 0.9}, "top_p 0.9 has no effect with temperature 0"),
        ({}, {"eval.num_candidates": 3}, "num_candidates 3 exceeds num_beams 1"),
        ({}, {"eval.stop": [".", " "], "eval.no_repeat_ngram_size": -1}, "eval.no_repeat_ngram_size"),
        ({}, {"eval.stop": [""]}, "an empty text ends every answer"),
        (LABELLED, {"eval.temperature": 1}, "eval.temperature has no effect: task classification scores its labels"),
        (LABELLED, {"eval.stop": "."}, "eval.stop has no effect: task classification scores its labels"),
        ({"task": {"name": "squad_v2", "head": "extractive"}}, {"eval.temperature": 1}, "marks a span"),
        ({"device": "tpu"}, {"eval.temperature": 1}, "eval.temperature 1.0 is not supported with device tpu. Use 0.0"),
    ],
)
def test_settings_of_answers_that_cannot_act_are_refused(recipe, settings, message):
    with pytest.raises(ConfigError) as caught:
        load_config({**BASIC, **recipe}, settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_label_task_that_writes_its_answers_may_draw_them():
    found = load_config({**BASIC, **LABELLED}, {"eval.score_labels": False, "eval.temperature": 1, "eval.top_k": 5})
    assert (found.eval.temperature, found.eval.top_k) == (1.0, 5)


def test_generation_names_of_transformers_are_settings():
    names = {"num_return_sequences": 2, "num_beams": 4, "min_length": 3, "no_repeat_ngram_size": 0, "do_sample": False}
    found = load_config("squad_v2", {**names, "lr_scheduler_type": "polynomial", "optim": "paged_adamw_32bit"})
    assert (found.eval.num_candidates, found.eval.num_beams, found.eval.min_new_tokens) == (2, 4, 3)
    assert (found.schedule.plugin_name(), found.optimizer.plugin_name()) == ("linear", "adamw")
    drawn = load_config("squad_v2", {"do_sample": True, "top_p": 0.9, "no_repeat_ngram_size": 3})
    assert (drawn.eval.temperature, drawn.eval.top_k, drawn.eval.top_p) == (1.0, 50, 0.9)
    assert drawn.eval.no_repeat_ngram_size == 3
    drawn = load_config("squad_v2", {"temperature": 0.5, "num_return_sequences": 4, "stop_strings": "."})
    assert (drawn.eval.temperature, drawn.eval.num_candidates, drawn.eval.stop) == (0.5, 4, (".",))
    shared = load_config({"model": {"path": "m"}, "task": "jsonl"}, {"validation_split": 0.1})
    assert shared.data.eval_share == 0.1


def test_an_empty_value_is_named_by_its_word():
    with pytest.raises(ConfigError, match="An empty value is written null"):
        load_config("squad_v2", {"train.num_epochs": "none"})
