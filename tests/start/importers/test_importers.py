"""Configurations of other programs as recipes: nothing is dropped in silence, and each recipe loads."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import kit
import pytest

from fivetune import plugins
from fivetune.cli import main
from fivetune.config import RunConfig, aliases, load_config
from fivetune.errors import ConfigError
from fivetune.start.importers import NOT_LITERAL, ImportedRecipe, RawConfig
from fivetune.start.importers._python import PythonSource
from fivetune.start.importers._recipe import format_recipe, import_recipe, load_importer, read_source

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs" / "migrating"
FORMATS = plugins.list_plugins("importers")


def convert(text: str, name: str = "the command line", **overrides) -> ImportedRecipe:
    return import_recipe(RawConfig(name, text), None, overrides)


def load(recipe: ImportedRecipe, folder: Path) -> RunConfig:
    """The recipe as it is written and read back."""
    (folder / "recipe.yaml").write_text(format_recipe(recipe), encoding="utf-8")
    return load_config(folder / "recipe.yaml")


def left_out(recipe: ImportedRecipe) -> dict[str, str]:
    return {one.argument: one.reason for one in recipe.findings if one.state in ("left out", "unknown")}


# --- the pages of migration ---


def read_example(name: str) -> tuple[str, str, str]:
    """The file of an importer's example, or "", its text and its recipe."""
    page = Path(__file__).parent / f"{name}.md"
    text = (page if page.is_file() else PAGES / page.name).read_text(encoding="utf-8")
    example, recipe = re.findall(r"^```\w+\n(.*?)^```", text.partition("## Example")[2], re.DOTALL | re.MULTILINE)
    return "train.py" if "```python" in text else "", example, recipe


@pytest.mark.parametrize("name", FORMATS)
def test_the_example_of_an_importer_becomes_its_recipe(tmp_path, name):
    file, example, expected = read_example(name)
    source = RawConfig(file or "the command line", example)
    assert load_importer(source, None).plugin_name() == name
    recipe = import_recipe(source, None, {})
    assert format_recipe(recipe) == expected
    assert load(recipe, tmp_path).model.path == "google-t5/t5-small"


def test_the_page_of_transformers_has_all_arguments_with_their_settings():
    rules = plugins.load_plugin("importers", "transformers").rules
    found = re.findall(
        r"^\| `(.+?)` \| (.*?) \|", (PAGES / "transformers.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    rows = dict(found)
    assert len(rows) == len(found)
    settings = {**aliases.ALIASES, **rules.settings}
    settings |= {argument: names for argument, (names, _) in rules.joint.items()}
    names = {*rules.list_names(), *aliases.ALIASES, *aliases.UNCHANGED, *aliases.NO_EFFECT, *aliases.NO_EQUIVALENT}
    assert names ^ rows.keys() <= {"dataset_name", "dataset_config_name"}
    for argument, setting in settings.items():
        assert rows[argument] == ", ".join(f"`{one}`" for one in setting.split(", "))


@pytest.mark.parametrize("name", FORMATS)
def test_settings_of_rules_exist(name):
    from test_readme import _is_setting

    rules = plugins.load_plugin("importers", name).rules
    for setting in (*rules.settings.values(), *", ".join(found for found, _ in rules.joint.values()).split(", ")):
        assert setting == "device" or _is_setting(setting), setting
    assert all(
        advice or argument in rules.settings or argument in rules.joint
        for argument, (_, advice) in rules.unchanged.items()
    )


def write_table(path: Path, columns: tuple[str, ...]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([[f"Ann has a {kit.WORDS[i % 4]} hat" for _ in columns] for i in range(6)])


COMMANDS = {
    "": "run_summarization.py --model_name_or_path MODEL --train_file t.csv --text_column a --max_steps 2 --seed 3",
    "simple.py": 'import pandas as pd\nmodel = T5Model("t5", "MODEL", args={"num_train_epochs": 1})\n'
    'model.train_model(pd.read_csv("t.csv"))\n',
    "trainer.py": 'm = T5ForConditionalGeneration.from_pretrained("MODEL")\n'
    'data = load_dataset("csv", data_files="t.csv", split="train")\n'
    'data = data.map(lambda b: tokenizer("to: " + b["a"], text_target=b["summary"], max_length=40))\n'
    'args = Seq2SeqTrainingArguments("o", num_train_epochs=1)\n'
    "Seq2SeqTrainer(model=m, args=args, train_dataset=data).train()\n",
}


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=[] if file in ("", "trainer.py") else pytest.mark.release) for file in COMMANDS]
)
def test_check_accepts_a_recipe_with_its_data(tmp_path, monkeypatch, capsys, model_folder, file):
    monkeypatch.chdir(tmp_path)
    write_table(
        Path("t.csv"), ("a", "summary", "prefix", "input_text", "target_text", "source_text", "inputs", "targets")
    )
    text = COMMANDS[file].replace("MODEL", str(model_folder))
    if file:
        Path(file).write_text(text, encoding="utf-8")
    words = ["import-config", file or text, "--output", "my.yaml", "--device", "cpu", "--data.cache_dir", "cache"]
    assert main(words) == 0
    assert "next: fivetune check my.yaml\n" in capsys.readouterr().out
    assert main(["check", "my.yaml", "--train.num_threads", "1"]) == 0, capsys.readouterr().out


# --- transformers ---


def test_run_seq2seq_qa(tmp_path):
    text = """CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 --standalone run_seq2seq_qa.py \\
      --model_name_or_path t5-small --dataset_name squad_v2 --version_2_with_negative --context_column context \\
      --question_column question --answer_column answers --do_train --do_eval --do_predict \\
      --per_device_train_batch_size 12 --gradient_accumulation_steps 4 --learning_rate 3e-5 --num_train_epochs 2 \\
      --max_seq_length 384 --doc_stride 128 --max_answer_length 40 --predict_with_generate --num_beams 4 --fp16 \\
      --metric_for_best_model eval_f1 --dataloader_num_workers 4 --colour blue --output_dir /tmp/debug/"""
    recipe = convert(text)
    config = load(recipe, tmp_path)
    assert (config.model.path, config.task.plugin_name(), config.run.seed) == ("t5-small", "squad_v2", 42)
    assert (config.run.dir, config.data.train) == ("/tmp/debug/", ("rajpurkar/squad_v2::train",))
    assert (config.data.max_input_tokens, config.data.max_target_tokens, config.data.overlong) == (384, 40, "windows")
    assert (config.train.batch_size, config.train.global_batch_size, config.launch.nproc) == (12, 96, 2)
    assert (config.optimizer.lr, config.schedule.plugin_name(), config.eval.metric) == (3e-5, "linear", "f1")
    assert list(left_out(recipe)) == ["--standalone", "--do_predict true", "--fp16 true", "--colour blue"]


def test_data_sets_that_the_hub_had_without_an_owner(tmp_path):
    recipe = convert(
        "run_translation.py --model_name_or_path t5-small --dataset_name wmt16 --dataset_config_name ro-en"
    )
    assert load(recipe, tmp_path).data.train == ("wmt/wmt16:ro-en:train",)
    reasons = {one.argument: one.reason for one in recipe.findings}
    assert reasons["--dataset_config_name ro-en"] == "a part of data.train and data.eval"


def test_run_qa_with_adafactor(tmp_path):
    text = (
        "python examples/run_qa.py --model_name_or_path google-t5/t5-base --train_file train.json --validation_file "
        "dev.json --do_train --max_steps 500 --num_train_epochs 3 --adafactor --adam_beta1 0.9 --warmup_ratio 0.1 "
        "--warmup_steps 50 --validation_split_percentage 5 --overwrite_output_dir --output_dir out --bf16"
    )
    recipe = convert(text)
    config = load(recipe, tmp_path)
    assert (config.task.head, config.data.eval, config.data.eval_share) == ("extractive", ("dev.json",), None)
    assert (config.train.num_steps, config.train.num_epochs, config.train.precision) == (500, None, "bf16")
    assert (config.optimizer.preset, config.optimizer.beta1, config.schedule.warmup_steps) == ("hf", None, 50)
    assert left_out(recipe) == {
        "--num_train_epochs 3": "max_steps is given, which wins",
        "--adam_beta1 0.9": "AdamW's; Adafactor does not use it",
        "--warmup_ratio 0.1": "warmup_steps is given, which wins",
        "--validation_split_percentage 5": "applies only without validation data, which is given",
        "--overwrite_output_dir true": "Write --overwrite, which moves the old run aside.",
    }


def test_a_script_with_variables_and_a_pipe(tmp_path):
    text = "A=1\nM=t5-small # the model\nexport LR='1e-4'\n# run_qa.py --seed 9\n"
    text += (
        "python run_summarization.py --model_name_or_path $M --learning_rate ${LR} --seed $SEED \\\n --source_prefix "
    )
    text += '"summarize: " --text_column article --summary_column highlights 2>&1 | tee log.txt\n'
    recipe = convert(text, "a.sh")
    config = load(recipe, tmp_path)
    assert (config.model.path, config.optimizer.lr, config.run.seed) == ("t5-small", 1e-4, 42)
    assert (config.task.inputs, config.task.targets) == ("summarize: {article}", "{highlights}")
    assert list(left_out(recipe)) == ["--seed $SEED"]
    with pytest.raises(ConfigError, match=r"^a\.sh: has several commands that run one of"):
        convert("python run_qa.py --seed 1\npython run_qa.py --seed 2\n", "a.sh")


def test_the_command_is_found_among_others_of_its_line():
    line = "cd /data; echo run && python run_qa.py --model_name_or_path m --seed 5 > log.txt && echo done"
    for name in ("a.sh", "the command line"):
        assert convert(line, name).settings["run.seed"] == 5


def test_a_token_of_any_form_is_hidden():
    recipe = convert("--model_name_or_path m --hub_token letmein")
    assert "letmein" not in format_recipe(recipe) and "--hub_token (hidden)" in str(recipe.findings)
    recipe = convert("WANDB_API_KEY=letmein python run_qa.py --model_name_or_path m")
    assert "letmein" not in str(recipe.findings) and "WANDB_API_KEY (hidden)" in format_recipe(recipe)
    assert "--forced_bos_token ro_RO" in str(convert("--model_name_or_path m --forced_bos_token ro_RO").findings)


def test_a_translation_reads_nested_columns(tmp_path):
    text = "run_translation.py --model_name_or_path m --source_lang en_XX --target_lang ro --source_prefix 'to ro: '"
    config = load(convert(text), tmp_path)
    assert config.data.columns == {"source": "translation.en", "target": "translation.ro"}
    assert (config.task.inputs, config.task.targets, config.task.main_metric) == ("to ro: {source}", "{target}", "bleu")


def test_two_visible_devices_double_the_batch():
    text = "CUDA_VISIBLE_DEVICES=0,1 python run_qa.py --model_name_or_path m --per_device_train_batch_size 4"
    settings = convert(text).settings
    assert (settings["train.global_batch_size"], settings["launch.nproc"]) == (8, 2)


@pytest.mark.parametrize(
    ("launcher", "counts"),
    [
        ("torchrun --nnodes 2 --nproc_per_node 4", (64, 2, 4)),
        ("accelerate launch --num_machines 2 --num_processes 4", (32, 2, 2)),
        ("torchrun --nnodes 1:4 --nproc_per_node 4", (32, None, 4)),
    ],
)
@pytest.mark.parametrize("flag", ["", "--auto_find_batch_size"])  # finds the micro-batch: the steps stay the same
def test_the_batch_is_of_all_nodes(launcher, counts, flag):
    recipe = convert(f"{launcher} run_qa.py --model_name_or_path m --per_device_train_batch_size 8 {flag}")
    assert recipe.settings["train.batch_size"] == ("auto" if flag else 8)
    names = ("train.global_batch_size", "launch.nnodes", "launch.nproc")
    assert tuple(recipe.settings.get(name) for name in names) == counts
    assert ("--nnodes 1:4" in left_out(recipe)) == (counts[1] is None and "1:4" in launcher)


def test_flags_of_a_launcher_are_settings_or_told():
    recipe = convert(
        "accelerate launch --mixed_precision fp16 --cpu --num_processes 2 run_qa.py --model_name_or_path m"
    )
    assert (recipe.settings["device"], recipe.settings["launch.nproc"]) == ("cpu", 2)
    assert list(left_out(recipe)) == ["--mixed_precision fp16"] and "train.precision" not in recipe.settings
    recipe = convert("python run_summarization_no_trainer.py --model_name_or_path m --with_tracking false")
    assert list(left_out(recipe)) == ["--with_tracking false"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "run_glue.py --model_name_or_path m",
            "the command line: run_glue.py has no counterpart. Allowed: run_seq2seq_qa,",
        ),
        ("run_qa.py --learning_rate '3", "the command line: cannot be read as a command line: No closing quotation."),
        ("run_qa.py --learning_rate 3", "the command line: names no model. Add --model.path MODEL."),
        (
            "python train.py --lr 3",
            "the command line: is in no known format. Choose with --format. Allowed: simpletransformers,",
        ),
    ],
)
def test_command_lines_that_cannot_be_converted(text, message):
    with pytest.raises(ConfigError) as caught:
        convert(text)
    assert message in str(caught.value)


def test_arguments_may_be_abbreviated_as_argparse_allows():
    recipe = convert("--model_name_or_path m --dataset_name o/d --dataset_config c --max-source 9 --do_pred --save 1")
    assert recipe.settings["data.train"] == "o/d:c:train" and recipe.settings["data.max_input_tokens"] == 9
    assert list(left_out(recipe)) == ["--do_predict true", "--save 1"]


def test_a_metric_is_a_score_of_the_task_or_left_out():
    words = "run_summarization.py --model_name_or_path m --metric_for_best_model"
    assert convert(f"{words} rougeL").settings["eval.metric"] == "rougeL_f1"
    recipe = convert(f"{words} eval_loss")
    assert "eval.metric" not in recipe.settings
    assert left_out(recipe)["--metric_for_best_model eval_loss"].startswith("eval.metric: eval.metric 'loss' is not a")


def test_a_shell_script_and_a_table_of_arguments(tmp_path):
    text = (
        "#!/bin/sh\nMODEL=google-t5/t5-small\n# four GPUs\ntorchrun --nproc_per_node 4 run_summarization.py \\\n"
        '  --model_name_or_path $MODEL --train_file train.csv --source_prefix "summarize: " --text_column article \\\n'
        "  --summary_column highlights --adafactor --learning_rate 1e-3 --lr_scheduler_type constant \\\n"
        "  --warmup_steps 500 --label_smoothing_factor 0.1 --max_steps 2000 --output_dir runs/sums 2>&1 | tee log.txt\n"
    )
    config = load(convert(text, "summarize.sh"), tmp_path)
    assert (config.launch.nproc, config.optimizer.preset, config.train.num_steps) == (4, "hf", 2000)
    text = (
        '{"model_name_or_path": "m", "source_lang": "en", "target_lang": "ro", "source_prefix": "to ro: ", '
        '"train_file": "train.json", "per_device_train_batch_size": 4, "do_train": true, "num_beams": 4}'
    )
    config = load(convert(text, "translate.json"), tmp_path)
    assert (config.task.inputs, config.eval.num_beams, config.train.batch_size) == ("to ro: {source}", 4, 4)


# --- simpletransformers ---


def test_simpletransformers_tables_of_arguments(tmp_path):
    text = (
        'args = {"learning_rate": 3e-4, "optimizer": "AdamW", "max_seq_length": 64, "warmup_ratio": 0.1, '
        '"scheduler": "linear_schedule_with_warmup", "manual_seed": 7, "preprocess_inputs": False}\n'
        'model = T5Model("mt5", "google/mt5-small", args=args, use_cuda=False)\n'
        'model.train_model(pd.read_csv("train.tsv", sep="\\t"))\n'
    )
    config = load(convert(text, "dict.py"), tmp_path)
    assert (config.model.path, config.data.train, config.device) == ("google/mt5-small", ("train.tsv",), "cpu")
    assert (config.task.inputs, config.schedule.warmup_fraction, config.run.seed) == ("{prefix}{input_text}", 0.1, 7)
    text = (
        '{"model_class": "T5Model", "model_name": "t5-base", "adafactor_scale_parameter": true, "optimizer": '
        '"Adafactor", "scheduler": "constant_schedule_with_warmup", "warmup_ratio": 0.06, "train_batch_size": 16}'
    )
    config = load(convert(text, "model_args.json"), tmp_path)
    assert (config.model.path, config.optimizer.preset, config.train.batch_size) == ("t5-base", "t5-paper", 16)


def test_simpletransformers_attributes_and_computed_values(tmp_path):
    text = "args = T5Args()\nargs.num_train_epochs = 2\nargs.train_batch_size = size()\nargs.optimizer = 'AdamW'\n"
    text += "args.adam_betas = (0.8, 0.99)\nargs.adafactor_clip_threshold = 2\nargs.n_gpu = 2\nargs.colour = 'red'\n"
    text += "args.max_length = 30\nmodel = T5Model('t5', 't5-small', args=args)\nmodel.train_model(df)\n"
    recipe = convert(text, "a.py")
    config = load(recipe, tmp_path)
    assert (config.train.batch_size, config.train.global_batch_size, config.launch.nproc) == (4, 8, 2)  # 8: its default
    assert (config.optimizer.beta1, config.optimizer.lr, config.eval.max_new_tokens) == (0.8, 1e-3, 30)
    assert (config.data.max_input_tokens, config.data.max_target_tokens) == (128, 128)
    assert left_out(recipe) == {
        "train_batch_size size() (line 3)": NOT_LITERAL,
        "adafactor_clip_threshold 2 (line 6)": "does not apply beside the other arguments",
        "colour red (line 8)": "not an argument that FiveTune knows",
        "train_data df (line 11)": NOT_LITERAL,
    }


def test_python_is_read_and_never_executed(tmp_path):
    path = tmp_path / "proof"
    text = f"open({str(path)!r}, 'w')\nmodel = T5Model('t5', 'm', args={{'manual_seed': 5}})\nmodel.train_model(x)\n"
    assert convert(text, "a.py").settings["run.seed"] == 5
    assert not path.exists()


def test_names_are_followed_to_their_files():
    python = PythonSource(RawConfig("a.py", "a = pd.read_csv('t.csv', sep=';')\nb = a\nc = c2\nc2 = c\nf(b, c, 'x')"))
    call = python.find_calls("f")[0]
    values = [one.value for one in python.read_table(call, ("first", "second", "third")).values()]
    assert (values[0], values[2]) == ("t.csv", "x") and values[1].code in ("c", "c2")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "T5Model(", "a.py:1: not valid Python: '(' was never closed. Correct it."),
        ("a.ipynb", '{"T5Model(": 1}', "a.ipynb: not a notebook of Jupyter (format 4). Give the code as a .py file."),
        ("a.py", "# T5Model(\n", "a.py: calls T5Model 0 times, and one call is needed. Give a file with one."),
        ("model_args.json", '{"model_class": ', "model_args.json: not valid JSON: Expecting value: line 1 column 17"),
        ("model_args.json", '["model_class"]', "model_args.json: holds no table of arguments. Give a JSON object,"),
        ("a.json", '["model_name_or_path"]', "a.json: holds no table of arguments. Give a JSON object,"),
        ("a.json", '{"model_name_or_path"', "a.json: not valid JSON: Expecting ':' delimiter"),
    ],
)
def test_errors_name_the_place(name, text, message):
    with pytest.raises(ConfigError) as caught:
        convert(text, name)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            "'train_batch_size': 3, 'n_gpu': 2",
            "train_batch_size 3 is not a multiple of it, and the GPUs share the batch",
        ),
        ("'train_batch_size': 'many'", "'many' is not a whole number above 0; 8 is taken"),
        ("'train_batch_size': 0", "0 is not a whole number above 0; 8 is taken"),
        ("'gradient_accumulation_steps': float('inf')", "inf is not a whole number above 0; 1 is taken"),
        ("'num_beams': 3, 'do_sample': True", "eval.temperature: temperature 1 draws answers, and num_beams 3"),
        ("'num_beams': 3, 'num_return_sequences': 5", "eval.num_candidates: num_candidates 5 exceeds num_beams 3."),
    ],
)
def test_a_value_that_does_not_fit_is_left_out(tmp_path, arguments, reason):
    recipe = convert(f"m = T5Model('t5', 'm', args={{{arguments}}})", "a.py")
    assert any(one.startswith(reason) for one in left_out(recipe).values()) and load(
        recipe, tmp_path
    ).train.batch_size == (3 if "n_gpu" in arguments else 8)


def test_arguments_of_simpletransformers_that_are_settings_or_defaults_of_transformers_too():
    given = "'warmup_steps': 0, 'max_steps': -1, 'length_penalty': 0.5, 'repetition_penalty': 1.2, 'num_beams': 3, "
    given += "'weight_decay': 0.01, 'scheduler': 'linear_schedule_with_warmup', 'save_steps': -1"
    recipe = convert(f"m = T5Model('t5', 'm', args={{{given}}})", "a.py")
    settings = recipe.settings
    assert (settings["eval.length_penalty"], settings["eval.repetition_penalty"], settings["eval.num_beams"]) == (
        0.5, 1.2, 3,
    )  # fmt: skip
    assert (settings["optimizer.weight_decay"], settings["schedule.warmup_fraction"]) == (0.01, 0.06)
    assert not settings.keys() & {"schedule.warmup_steps", "train.num_steps", "checkpoint.every_steps"}
    assert not left_out(recipe)


def test_null_is_the_default_of_an_argument():
    recipe = convert("m = T5Model('t5', 'm', args={'num_beams': None, 'top_k': None, 'max_length': 5})", "a.py")
    assert "eval.num_beams" not in recipe.settings and recipe.settings["eval.max_new_tokens"] == 5


# --- accelerate ---

ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: 1
machine_rank: 0
mixed_precision: bf16
num_machines: 2
num_processes: 4
"""


def test_accelerate_starts_processes(tmp_path):
    recipe = import_recipe(RawConfig("accelerate.yaml", ACCELERATE), None, {"model.path": "m", "task.name": "jsonl"})
    found = {name: recipe.settings[name] for name in ("launch.nproc", "launch.nnodes", "strategy.name")}
    assert found == {"launch.nproc": 2, "launch.nnodes": 2, "strategy.name": "fsdp"}
    assert load(recipe, tmp_path).train.precision == "bf16" and "fsdp_config.fsdp_sharding_strategy" in str(
        left_out(recipe)
    )
    with pytest.raises(ConfigError, match=r"names no model.*--train.precision 'bf16'"):
        convert(ACCELERATE, "accelerate.yaml")


def test_accelerate_launch_reads_its_file_and_the_script_without_trainer(tmp_path):
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
    text = "accelerate launch --config_file accelerate.yaml run_summarization_no_trainer.py --model_name_or_path m "
    text += "--train_file t.csv --text_column a --source_prefix 'summarize: ' --max_source_length 99 --with_tracking"
    recipe = convert(text, str(tmp_path / "a.sh"))
    settings = recipe.settings
    assert (settings["strategy.name"], settings["data.max_input_tokens"]) == ("fsdp", 99)
    assert (settings["task.inputs"], settings["train.global_batch_size"]) == ("summarize: {a}", 32)


# --- values that a recipe does not have ---

SUMMARIES = "run_summarization.py --model_name_or_path m --train_file a.csv --text_column x --summary_column y"


@pytest.mark.parametrize(
    ("argument", "state", "settings"),
    [
        ("--save_total_limit 1", "left out", {"checkpoint.keep": None}),
        ("--logging_steps 0.1", "left out", {"train.log_every_steps": None}),
        ("--eval_steps 0.2", "left out", {"eval.every_steps": None}),
        ("--eval_steps 0.2 --max_steps 50", "set", {"eval.every_steps": 10}),
        ("--lr_scheduler_type polynomial", "set", {"schedule.name": "linear"}),
        ("--lr_scheduler_type cosine_with_restarts", "set", {"schedule.name": "cosine"}),
        ("--lr_scheduler_type cosine_with_min_lr", "left out", {"schedule.name": "linear"}),
        ("--optim paged_adamw_32bit", "set", {"optimizer.name": "adamw"}),
        ("--optim galore_adamw", "left out", {"optimizer.name": "adamw"}),
        ("--early_stopping_patience 3", "set", {"train.early_stopping.patience": 3}),
        ("--learning_rate fast", "left out", {"optimizer.lr": 5e-5}),
        ("--num_train_epochs -1", "left out", {"train.num_epochs": 3}),
        ("--gradient_accumulation_steps auto", "left out", {"train.batch_size": 8}),
        ("--num_return_sequences 3", "left out", {"eval.num_candidates": None}),
        ("--no_repeat_ngram_size 3", "set", {"eval.no_repeat_ngram_size": 3}),
        ("--temperature 0.7", "same", {"eval.temperature": None}),
        ("--top_k 5 --do_sample false", "same", {"eval.temperature": None, "eval.top_k": None}),
        ("--do_sample true --top_p 0.8", "set", {"eval.temperature": 1.0, "eval.top_k": 50, "eval.top_p": 0.8}),
    ],
)
def test_a_value_that_fivetune_lacks_is_left_out_by_its_argument(tmp_path, argument, state, settings):
    recipe = convert(f"{SUMMARIES} {argument}")
    load(recipe, tmp_path)
    assert {name: recipe.settings.get(name) for name in settings} == settings
    name = argument.partition(" ")[0]
    assert [one.state for one in recipe.findings if one.argument.startswith(f"{name} ")] == [state]


def test_a_setting_given_beside_the_source_is_never_left_out():
    with pytest.raises(ConfigError, match=r"--checkpoint\.keep"):
        import_recipe(RawConfig("the command line", SUMMARIES), None, {"checkpoint.keep": 1})


def test_metrics_are_those_of_the_script():
    settings = convert(SUMMARIES).settings
    assert settings["task.metrics"] == [
        {"name": "rouge", "types": ["rouge1", "rouge2", "rougeL", "rougeLsum"], "stemmer": True}
    ]
    assert settings["task.main_metric"] == "rougeLsum_f1"


@pytest.mark.parametrize(
    ("name", "text", "page"),
    [
        ("a.py", "model = SimpleT5()\nmodel.train(df)", "simplet5"),
        ("a.yml", "task: seq2seq\nbase_model: t5-small\n", "autotrain"),
        ("a.gin", "TRAIN_STEPS = 1_010_000\n", "t5x"),
    ],
)
def test_a_source_that_is_not_read_names_its_page(name, text, page):
    with pytest.raises(ConfigError, match=rf"is in no known format\. docs/migrating/{page}\.md"):
        convert(text, name)
    assert (ROOT / "docs" / "migrating" / f"{page}.md").is_file()


# --- the command ---


def test_the_command_prints_yaml_and_json(capsys, tmp_path):
    words = ["import-config", "--model_name_or_path m --hub_token hf_abcdefghijklmnopqrstuvwx --fp16"]
    assert main(words) == 0
    text = capsys.readouterr().out
    (tmp_path / "a.yaml").write_text(text)
    assert load_config(tmp_path / "a.yaml").run.seed == 42
    assert "#   --fp16 true: train.precision: auto" in text and "hf_abc" not in text
    assert main([*words, "--json", "--train.num_epochs", "7"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["train"]["num_epochs"] == 7 and "hf_abc" not in str(found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "import-config: no source. Give a command line in quotation marks, or a file."),
        (["none.sh"], "none.sh: no such file. Give a file, or a command line in quotation marks."),
        (["--model_name_or_path m", "--output", "old.yaml"], "old.yaml: exists already. Give another --output, or"),
        (["latin.sh"], "latin.sh: not UTF-8 text. Save the file as UTF-8."),
    ],
)
def test_the_command_refuses(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Path("old.yaml").write_text("kept")
    Path("latin.sh").write_bytes(b"caf\xe9")
    assert main(["import-config", *words]) == 2
    assert message in capsys.readouterr().err and Path("old.yaml").read_text() == "kept"


def test_a_file_is_read_by_its_path(tmp_path):
    (tmp_path / "args.txt").write_text("--model_name_or_path m")
    assert read_source(str(tmp_path / "args.txt")).text == "--model_name_or_path m"
