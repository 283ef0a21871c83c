"""Common mistakes: what the user has, what he types, and what the message must say. docs/mistakes.md shows them.

Every command runs in a folder with `recipe.yaml`, `train.jsonl`, `posts.csv`, the model `tiny/`, its copy `copy/` and
the run `runs/done`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

RECIPE = """\
model: {path: tiny}
task: squad_v2
data: {train: train.jsonl, eval: train.jsonl}
train: {num_steps: 1, batch_size: 4}
run: {dir: runs/new}
device: cpu
"""
RECORDS = [
    {"question": f"Who is number {i}?", "context": f"Ann{i} is number {i}.", "answer": f"Ann{i}"} for i in range(8)
]
POSTS = "text,label\n" + "".join(f"{word} hat,{'good' if word < 'g' else 'bad'}\n" for word in ("red", "blue", "green"))
TRAIN = "fivetune train recipe.yaml"
LABELS = "--task.name classification --task.inputs '{text}' --task.labels '{good: good, bad: bad}'"


def to_jsonl(*records: Mapping[str, object]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Args:
        says: texts of the message: the cause, then what to do.
        files: name and content of files that differ.
        code: of the exit.
        act: changes the folder or the process before the command.
    """

    title: str
    command: str
    says: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    code: int = 2
    act: Callable[[Path, pytest.MonkeyPatch], object] = lambda folder, patch: None


def configure(**settings: object) -> Callable[[Path, pytest.MonkeyPatch], object]:
    """Replace the config.json of copy/."""
    return lambda folder, patch: (folder / "copy/config.json").write_text(json.dumps(settings))


def hide_package(name: str) -> Callable[[Path, pytest.MonkeyPatch], object]:
    return lambda folder, patch: patch.setitem(__import__("sys").modules, name, None)


def only_bin(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "copy/model.safetensors").rename(folder / "copy/pytorch_model.bin")


MISTAKES = (
    # --- the command ---
    Mistake("A command of another tool", "fivetune finetune recipe.yaml", ("no command 'finetune'", "mean train?")),
    Mistake("Train without anything", "fivetune train", ("required: recipe", "name of a shipped recipe, a data file")),
    Mistake(
        "A model in place of a recipe",
        "fivetune train t5-small",
        ("t5-small: no such recipe", "fivetune train squad_v2 --model.path t5-small --data.train FILE"),
    ),
    Mistake("A misspelt recipe", "fivetune train quickstat", ("no such recipe", "Did you mean quickstart?")),
    Mistake(
        "A setting before the recipe",
        "fivetune train --optimizer.lr 1e-3 recipe.yaml",
        ("settings come last", "fivetune train squad_v2 --optimizer.lr VALUE"),
    ),
    Mistake(
        "A sweep that is trained",
        "fivetune train sweep.yaml",
        ("sweep.yaml:2: grid is a key of a sweep", "fivetune compare FILE"),
        {"sweep.yaml": "base: recipe.yaml\ngrid: {optimizer.lr: [1e-3, 1e-4]}\n"},
    ),
    Mistake(
        "Braces without quotes: the shell divides them",
        f"{TRAIN} --data.columns {{question: Frage}}",
        ("should be a table", "put it into quotes: --data.columns '{question: Frage}'"),
    ),
    # --- the recipe ---
    Mistake(
        "A misspelt setting",
        TRAIN,
        ("recipe.yaml:7: optimizer.learning_rat is not a setting", "Did you mean lr"),
        {"recipe.yaml": RECIPE + "optimizer: {learning_rat: 1e-3}\n"},
    ),
    Mistake("A misspelt flag", f"{TRAIN} --optimizer.lrr 1e-3", ("--optimizer.lrr", "Did you mean lr?")),
    Mistake(
        "Broken YAML",
        TRAIN,
        ("recipe.yaml:2:5: not valid YAML: expected ',' or '}'",),
        {"recipe.yaml": "model: {path: tiny\ntask: squad_v2\n"},
    ),
    Mistake(
        "Tabs in YAML",
        TRAIN,
        ("recipe.yaml:2:1: not valid YAML", "Indent with spaces"),
        {"recipe.yaml": "model:\n\tpath: tiny\ntask: squad_v2\n"},
    ),
    Mistake(
        "No space after a colon",
        TRAIN,
        ("recipe.yaml:1: model", "needs a space after the colon: path: tiny"),
        {"recipe.yaml": "model:\n  path:tiny\ntask: squad_v2\n"},
    ),
    Mistake(
        "No model",
        TRAIN,
        ("model: Field required", "model: {path: google-t5/t5-small}"),
        {"recipe.yaml": "task: squad_v2\n"},
    ),
    Mistake(
        "No training data",
        TRAIN,
        ("no training data is given", "--data.train FILE"),
        {"recipe.yaml": "model: {path: tiny}\ntask: squad_v2\n"},
    ),
    Mistake("An unknown task", f"{TRAIN} --task squad2", ("no 'squad2'", "Did you mean squad or squad_v2?")),
    Mistake("An unknown metric", f"{TRAIN} --eval.metric accuracy", ("'accuracy' is not a score", "exact, f1")),
    Mistake("An unknown optimizer", f"{TRAIN} --optimizer adam", ("no 'adam'", "Did you mean adamw")),
    Mistake("A learning rate as a word", f"{TRAIN} --optimizer.lr fast", ("not 'fast'", "such as 1e-3")),
    Mistake("A decimal comma", f"{TRAIN} --optimizer.lr 0,001", ("not '0,001'", "a decimal point: 0.001")),
    Mistake("Batches of nothing", f"{TRAIN} --train.batch_size 0", ("at least 1, or auto, not 0",)),
    Mistake(
        "Batches that do not fit",
        f"{TRAIN} --train.batch_size 6 --train.global_batch_size 8",
        ("8 is not a multiple of train.batch_size 6", "Take 6 or 12"),
    ),
    Mistake("Part of a step", f"{TRAIN} --schedule.warmup_steps 0.1", ("valid integer", "not 0.1")),
    Mistake("fp16, as the Trainer names it", f"{TRAIN} --fp16 true", ("no setting", "auto takes bf16")),
    Mistake("DeepSpeed", f"{TRAIN} --deepspeed ds.json", ("DeepSpeed is not offered", "strategy.name: fsdp")),
    Mistake(
        "Labels as a list",
        f"{TRAIN} --task.name classification --task.labels good,bad",
        ("--task.labels: Input should be a table", "--task.labels '{name: value}'"),
    ),
    # --- the data ---
    Mistake(
        "A misspelt data file",
        f"{TRAIN} --data.train trian.jsonl",
        ("no such file", "Near it in .: tiny, train.jsonl"),
        code=3,
    ),
    Mistake(
        "Other names of columns",
        f"{TRAIN} --data.train fragen.csv",
        ("fragen.csv:2: there is no column 'question'", "Columns: Frage, context, answer", "data.columns: {question:"),
        {"fragen.csv": "Frage,context,answer\nWer?,Das ist Ann.,Ann\n"},
        code=3,
    ),
    Mistake(
        "A file for another task",
        f"{TRAIN} --data.train posts.csv",
        ("posts.csv:2: there is no column 'question'", "for another task", "fivetune list tasks"),
        code=3,
    ),
    Mistake(
        "An empty file", f"{TRAIN} --data.train a.csv", ("a.csv: the file is empty", "again"), {"a.csv": ""}, code=3
    ),
    Mistake(
        "A file with a header alone",
        f"{TRAIN} --data.train a.csv",
        ("a.csv: holds no records", "Check how the file was written"),
        {"a.csv": "question,context,answer\n"},
        code=3,
    ),
    Mistake(
        "A workbook of Excel 97",
        f"{TRAIN} --data.train a.xls",
        ("a.xls: this is a workbook of Excel 97", "save it as .xlsx"),
        {"a.xls": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99)},
        code=3,
    ),
    Mistake(
        "Text that is not UTF-8",
        f"{TRAIN} --data.train a.csv",
        ("a.csv:2: not UTF-8: byte 0xe9", "iconv -f cp1252 -t utf-8 a.csv"),
        {"a.csv": "question,context,answer\nQu\xe9?,Ann.,Ann\n".encode("latin-1")},
        code=3,
    ),
    Mistake(
        "Unicode text of a spreadsheet program",
        f"{TRAIN} --data.train a.csv",
        ("the text is utf-16", "iconv -f utf-16 -t utf-8 a.csv"),
        {"a.csv": "question,context,answer\nQué?,Ann.,Ann\n".encode("utf-16")},
        code=3,
    ),
    Mistake(
        "One id twice",
        f"{TRAIN} --data.train a.jsonl",
        ("a.jsonl:2: the id '7' is already used by record 1", "Rename one"),
        {"a.jsonl": to_jsonl(*({**record, "id": "7"} for record in RECORDS))},
        code=3,
    ),
    Mistake(
        "A misspelt label",
        f"{TRAIN} {LABELS} --data.train posts.csv --data.eval a.csv",
        ("a.csv:3: label is 'god'", "Labels: good, bad"),
        {"a.csv": "text,label\na hat,good\na bag,god\n"},
        code=3,
    ),
    Mistake(
        "A question without an answer",
        f"{TRAIN} --data.train a.jsonl",
        ("a.jsonl:2: answer is null", "data.on_bad_record: skip"),
        {"a.jsonl": to_jsonl(RECORDS[0], {**RECORDS[1], "answer": None})},
        code=3,
    ),
    # --- the model and the machine ---
    Mistake("A misspelt folder", f"{TRAIN} --model.path ./tinny", ("no such model folder", "mean tiny?"), code=4),
    Mistake(
        "A misspelt name of the hub",
        f"{TRAIN} --model.path google/t5-smal",
        ("no local folder of that name", "--model.path t5-nano", "give its folder in place of the name"),
        code=4,
    ),
    Mistake("A file of a model", f"{TRAIN} --model.path tiny/config.json", ("is a file", "config.json"), code=4),
    Mistake(
        "A model without an encoder",
        f"{TRAIN} --model.path copy",
        ("model_type 'gpt2' is not of the T5 family: it has no encoder", "fivetune list models"),
        code=4,
        act=configure(model_type="gpt2"),
    ),
    Mistake(
        "A model without a decoder",
        f"{TRAIN} --model.path copy",
        ("model_type 'bert' is not of the T5 family: it has no decoder", "fivetune list models"),
        code=4,
        act=configure(model_type="bert"),
    ),
    Mistake(
        "Weights as a pickle",
        f"{TRAIN} --model.path copy",
        ("has no model.safetensors", "model.revision: refs/pr/N"),
        code=4,
        act=only_bin,
    ),
    Mistake(
        "A Git-LFS pointer",
        f"{TRAIN} --model.path copy",
        ("is a Git-LFS pointer", "git lfs pull"),
        {"copy/model.safetensors": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"},
        code=4,
    ),
    Mistake(
        "The tokenizer of another model",
        f"{TRAIN} --model.tokenizer t5-nano",
        ("is not the vocabulary of the pre-trained weights", "Leave model.tokenizer out"),
        code=4,
    ),
    Mistake(
        "No GPU",
        f"{TRAIN} --device cuda",
        ("this machine has no CUDA devices", "Use auto or cpu"),
        code=4,
        act=lambda folder, patch: patch.setattr("torch.cuda.is_available", lambda: False),
    ),
    Mistake(
        "A package that is not installed",
        f"{TRAIN} --model.adapter lora",
        ("peft", "pip install"),
        code=4,
        act=hide_package("peft"),
    ),
    # --- the run ---
    Mistake("A run that exists", f"{TRAIN} --run.dir runs/done", ("holds a run already", "--overwrite"), code=4),
    Mistake("Nothing to resume", "fivetune train runs/none --resume", ("no run to resume", "done?"), code=4),
    Mistake(
        "A path that cannot be written",
        f"{TRAIN} --run.dir posts.csv/run",
        ("posts.csv/run: cannot be written: Not a directory", "Choose another run.dir"),
        code=4,
    ),
    Mistake(
        "A setting of training in an evaluation",
        "fivetune evaluate runs/done --optimizer.lr 1e-4",
        ("has no effect here: the model is trained", "Leave it out"),
    ),
    Mistake(
        "Predict with a folder of a model",
        "fivetune predict tiny --input train.jsonl",
        ("tiny: not a run directory", "Give the run.dir of a run"),
        code=4,
    ),
    Mistake(
        "Inputs with other columns",
        "fivetune predict runs/done --input posts.csv --output out.csv",
        ("posts.csv:2: there is no column 'question'", "data.columns: {question: ITS NAME}"),
        code=3,
    ),
    Mistake(
        "An output that is not offered",
        "fivetune predict runs/done --input train.jsonl --output out.docx",
        (".docx is not written", "Allowed: .csv"),
    ),
    Mistake(
        "Predictions of another file",
        "fivetune score squad_v2 train.jsonl answers.json",
        ("8 of 8 questions are missing", "the predictions of another data file"),
        {"answers.json": '{"q1": "Ann"}'},
        code=3,
    ),
    Mistake("An export to ONNX", "fivetune export runs/done --format onnx", ("not offered", "ctranslate2, hf")),
    Mistake(
        "Publish without a token",
        "fivetune push runs/done me/t5",
        ("HF_TOKEN is not set", "settings/tokens"),
        code=4,
        act=lambda folder, patch: patch.delenv("HF_TOKEN", raising=False),
    ),
)


def lay_out(folder: Path, mistake: Mistake, model: Path, run: Path, patch: pytest.MonkeyPatch) -> None:
    """Write the files that a command finds, and change to their folder."""
    patch.chdir(folder)
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("tiny").symlink_to(model)
    Path("runs").mkdir()
    Path("runs/done").symlink_to(run)
    if "copy" in mistake.command:
        shutil.copytree(model, "copy")
    written = {"recipe.yaml": RECIPE, "train.jsonl": to_jsonl(*RECORDS), "posts.csv": POSTS}
    for name, content in {**written, **mistake.files}.items():
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    mistake.act(folder, patch)
