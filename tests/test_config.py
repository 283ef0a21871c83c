"""Configuration: layers and their order, where an error comes from, nearest names, values as YAML 1.2 reads them."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivetune import plugins
from fivetune.config import PLUGIN_SECTIONS, RunConfig, find_recipe, load_config, recipe_names
from fivetune.config_layers import ALIASES, EXCLUSIVE, NO_EQUIVALENT, VALUE_ALIASES, parse_overrides, parse_value
from fivetune.errors import ConfigError, UnknownPlugin

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
    assert refusal(tmp_path, MINIMAL, by_hand) == f"--train.num_epochs: train: {both}"
    assert "schedule: warmup_steps and warmup_fraction are both given. Keep one of them." in refusal(
        tmp_path, MINIMAL + "schedule: {warmup_steps: 1, warmup_fraction: 0.1}\n"
    )


# --- what is refused, and in which words ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: {name: adamw,\n  lrr: 1}", "r.yaml:4: optimizer.lrr is not a setting. Did you mean lr? Allowed:"),
        ("optimiser: {name: adamw}", "r.yaml:3: optimiser is not a setting. Did you mean optimizer? Allowed: "),
        ("train: {batch_size: no}", "r.yaml:3: train.batch_size: Input should be a valid integer"),
        ("run:\n  seed: -1", "r.yaml:4: run.seed: Input should be greater than or equal to 0, not -1."),
        ("data: {max_input_tokens: 1.5}", "got a number with a fractional part, not 1.5."),
        ("device: gpu", "r.yaml:3: device: there is no 'gpu'. Allowed: auto, cpu, cuda, cuda:N or mps."),
        ("launch: {nproc: 2}", "r.yaml:3: launch.nproc 2 needs a strategy for several processes, strategy.name single"),
        ("checkpoint: {keep: 1}", "r.yaml:3: checkpoint.keep: Input should be greater than or equal to 2, not 1."),
        ("train: 3", "r.yaml:3: train: Input should be a table, not 3."),
        ("report: {sinks: [wandbb]}", "r.yaml:3: report: sinks: there is no 'wandbb'. Did you mean wandb? Allowed:"),
        (
            "train:\n  batch_size: 3\n  global_batch_size: 8",
            "r.yaml:5: train.global_batch_size 8 is not a multiple of train.batch_size 3.",
        ),
        (
            "optimizer: {name: adafactor, lr: 1e-3, relative_step: true}",
            "r.yaml:3: optimizer: lr 0.001 is given together with relative_step, which makes its own. Drop one of",
        ),
        (
            "optimizer: {name: adafactor, warmup_init: true}",
            "r.yaml:3: optimizer: warmup_init belongs to relative_step. Set relative_step: true or drop warmup_init.",
        ),
        (
            "optimizer: {name: adafactor, preset: hf, scale_parameter: true}",
            "r.yaml:3: optimizer: scale_parameter True contradicts preset hf. Set preset: t5-paper, which is what",
        ),
        (
            "optimizer: {relative_step: true}\nschedule: linear",
            "r.yaml:4: schedule.name linear has no effect with optimizer.relative_step, which makes its own rate.",
        ),
        (
            "optimizer: {relative_step: true}\nschedule:\n  warmup_steps: 5",
            "r.yaml:5: schedule.warmup_steps 5 has no effect with optimizer.relative_step, which makes its own rate.",
        ),
        (
            "learning_rate: 1e-3\noptimizer: {lr: 1e-4}",
            "r.yaml:4: optimizer.lr is 0.0001, but learning_rate (r.yaml:3) is 0.001, and both name the same setting.",
        ),
        (
            "optimizer: adafactor\noptim: adamw_torch",
            "r.yaml:4: optim is 'adamw', but optimizer (r.yaml:3) is 'adafactor', and both name the same setting.",
        ),
        ("train: {num_steps: 3}\ntrain: {num_steps: 4}", "r.yaml:4: train stands twice (first in line 3)."),
        ("train:\n  num_steps: 3\n  num_steps: 4", "r.yaml:5: train.num_steps stands twice (first in line 4)."),
        ("train: {num_steps: 3", "r.yaml:4:1: not valid YAML: expected ',' or '}', but got '<stream end>'."),
        ("\tx: 1", "r.yaml:3:1: not valid YAML: found character '\\t' that cannot start any token."),
        ("x: \0", "r.yaml: not valid YAML: unacceptable character #x0000: special characters are not allowed in "),
        ("? [a, b]\n: 3", "r.yaml:3: the name of a setting is a word, not a sequence."),
        ("base: nope.yaml", "r.yaml:3: base 'nope.yaml' is no file (looked for nope.yaml)."),
        ("base: r.yaml", "r.yaml: base files form a circle. Take one `base:` out."),
    ],
)  # fmt: skip
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


def test_latin_1_is_named(tmp_path):
    (tmp_path / "r.yaml").write_bytes("run: {dir: Café}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"r\.yaml: not UTF-8 text\. Save the file as UTF-8\."):
        load_config(tmp_path / "r.yaml")


@pytest.mark.parametrize(("section", "kind"), PLUGIN_SECTIONS.items())
def test_unknown_plugins_name_the_nearest(section, kind):
    name = plugins.names(kind)[0]
    with pytest.raises(UnknownPlugin, match=rf"^{kind}: there is no '{name}x'. Did you mean {name}\b"):
        load_config(BASIC, {f"{section}.name": f"{name}x"})


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match=r"^squad_v3: no such recipe\. Did you mean squad_v2.*\? Allowed: base, "):
        load_config("squad_v3")


@pytest.mark.parametrize("key", ALL_KEYS)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_one_typo_in_any_key_is_understood(key, data):
    section, _, name = key.partition(".")
    typo = data.draw(_one_edit(name).filter(lambda word: word not in field_names(section)))
    with pytest.raises(ConfigError) as caught:
        load_config(BASIC, {"task.name": "squad_v2", f"{section}.{typo}": 1} if key != "task.name" else
                    {"model.path": "m", "task": {typo: "squad"}})  # fmt: skip
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
    assert set(ALIASES.values()) <= set(ALL_KEYS)
    assert set(VALUE_ALIASES) <= set(ALIASES)
    assert not set(NO_EQUIVALENT) & set(ALIASES)


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
    with pytest.raises(ConfigError) as caught:
        load_config(BASIC, {name: 1})
    assert str(caught.value) == f"--{name}: {name} has no setting of its own here. {advice}"


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
    ("words", "message"),
    [
        (["--a.b", "1", "--a.b=2"], "--a.b is given twice. Keep one."),
        (["x"], "'x' is not understood. Settings are given as --section.key value."),
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
    lr=st.floats(1e-12, 10), seed=st.integers(0, 2**31 - 1), title=st.text(st.characters(exclude_categories=["Cs"])),
    phrase=st.sampled_from(["no", "null", "1e3", "yes: really", "no answer", "непонятно"]),
    optimizer=st.sampled_from(["adamw", "adafactor"]), max_grad_norm=st.none() | st.floats(1e-6, 1e6),
)  # fmt: skip
def test_the_resolved_config_reads_back_equal(tmp_path, lr, seed, title, phrase, optimizer, max_grad_norm):
    config = load_config({
        "model": {"path": "m"}, "task": {"name": "squad_v2", "no_answer": phrase}, "run": {"seed": seed},
        "optimizer": {"name": optimizer, "lr": lr}, "train": {"max_grad_norm": max_grad_norm},
        "schedule": {"name": "linear", "warmup_fraction": 0.1}, "report": {"title": title},
    })  # fmt: skip
    assert load_config(write(tmp_path, config.as_yaml())) == config
    assert load_config(config.as_dict()) == config


@pytest.mark.parametrize("title", ["\x85", "a\x85b", "a\u2028b", "\u2029", "a\nb", "a\r\nb"])
def test_every_line_break_is_read_back(tmp_path, title):
    config = load_config(BASIC, {"report.title": title})
    assert load_config(write(tmp_path, config.as_yaml())).report.title == title


@pytest.mark.parametrize("name", [name for name in recipe_names() if name != "base"])
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
    with pytest.raises(ConfigError, match=r"^--task\.labels: Input should be a table, not 'high'\.$"):
        load_config(task, {"task.labels": "high"})


def test_the_shortest_answer_fits_into_the_longest():
    with pytest.raises(ConfigError, match="min_new_tokens 9 is more than max_new_tokens 4"):
        load_config(BASIC, {"eval.min_new_tokens": 9, "eval.max_new_tokens": 4})
