"""No secret leaves the process: not in a file of the run, not on the terminal."""

from __future__ import annotations

import json
import time
from pathlib import Path

import kit
import pytest
import yaml

from fivetune.cli import main
from fivetune.config import load_config
from fivetune.errors import DataError
from fivetune.reading.card.card import CardRequest, Place, build_model_card
from fivetune.reading.report import write_report
from fivetune.redaction import is_secret_name, name_invisible, redact_json, redact_secrets, redact_settings
from fivetune.rundir.records import Run
from fivetune.training.answers.output import escape_invisible
from fivetune.training.run import train

TOKEN = "hf_" + "aB3" * 11


@pytest.mark.parametrize(
    "secret",
    [
        TOKEN,
        "sk-proj-abc_DEF-1234",
        "ghp_" + "a1" * 18,
        "github_pat_" + "a1" * 20,
        "AKIA" + "A1" * 8,
        "wandb_v1_abcdefgh12",
    ],
)
def test_tokens_are_hidden(secret):
    assert redact_secrets(f"with {secret}, and more") == "with (hidden), and more"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://me:p-w@host:5432/db", "postgresql://(hidden)@host:5432/db"),
        ("api_key: 1234abcd", "api_key: (hidden)"),
        ('{"wandb_api_key": "1234", "a": 1}', '{"wandb_api_key": "(hidden)", "a": 1}'),
        ("--sinks.wandb.api_key 1234 --run.seed 3", "--sinks.wandb.api_key (hidden) --run.seed 3"),
        ("export HF_TOKEN=abcd", "export HF_TOKEN=(hidden)"),
        ("password='p w'", "password='(hidden)'"),
        ("passphrase: correct horse battery staple", "passphrase: (hidden)"),
        ("passphrase: none of it's known\nseed: 1", "passphrase: (hidden)\nseed: 1"),
        ('{"password": "a \\"b\\" c", "seed": 1}', '{"password": "(hidden)", "seed": 1}'),
        ("Authorization: Bearer abcdefghijklmnop", "Authorization: Bearer (hidden)"),
    ],
)
def test_values_of_secret_names_are_hidden(text, expected):
    assert redact_secrets(text) == expected
    assert redact_secrets(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        "max_input_tokens: 512",
        "the tokenizer: t5-small",
        "api_key: null",
        "commit 0123456789abcdef0123456789abcdef01234567",
        "https://host:8080/x@y",
        "runs/hf_baseline2",
    ],
)
def test_other_texts_stay(text):
    assert redact_secrets(text) == text


def test_what_does_not_show_is_named_and_escaped_alike():
    """A soft hyphen, tags and private use were escaped in predictions, and unseen in messages and reports."""
    for character in "\x1b\xad\u202e\u2061\ue000\ufff9\U000e0041":
        assert name_invisible(f"a{character}") == f"a[U+{ord(character):04X}]"
        assert json.loads(f'"{(text := escape_invisible(character))}"') == character and text.isascii()
    joined = "\U0001f468\u200d\U0001f469 \u0645\u06cc\u200c\u062e"  # emoji and Persian need the joiners
    assert name_invisible(joined) == escape_invisible(joined) == joined


def test_values_of_a_json_tree_are_hidden_by_name_and_by_form():
    tree = {"token": "a", "num_tokens": 3, "list": [TOKEN, None, True], "nested": {"password": "", "key": "kept"}}
    expected = {"token": "(hidden)", "num_tokens": 3, "list": ["(hidden)", None, True]}
    assert redact_json(tree) == {**expected, "nested": {"password": "", "key": "kept"}}
    assert not is_secret_name("model.tokenizer")


@pytest.mark.parametrize("text", ["a" * 20_000, "-" * 20_000, "password " * 2_000, "password: '" * 2_000])
def test_the_time_is_linear_in_the_length(text):
    started = time.process_time()
    redact_secrets(text)
    assert time.process_time() - started < 2  # seconds; quadratic time takes a minute


def test_settings_that_a_run_reads_back_are_unchanged(tmp_path):
    table = {
        "model": {"path": "m"},
        "task": {
            "name": "classification",
            "inputs": "check password: {password}",
            "labels": {"password": "reset", "secret": "secret: leak", "other": "o"},
        },
        "data": {"train": "secret=a/train.csv", "columns": {"password": "info.password"}},
        "report": {"title": f"mine {TOKEN}"},
    }
    config = load_config(table)
    (tmp_path / "config.yaml").write_text(config.as_redacted_yaml())
    read = load_config(tmp_path / "config.yaml")
    assert (read.task, read.data) == (config.task, config.data)
    assert read.report.title == "mine (hidden)"


def test_the_config_of_a_run_keeps_its_labels(tmp_path, model_folder):
    (tmp_path / "t.jsonl").write_text('{"text": "a hat", "label": "password"}\n{"text": "a bag", "label": "coat"}\n')
    task = {"name": "classification", "inputs": "password: {text}", "labels": {"password": "reset", "coat": "coat"}}
    table = kit.recipe(tmp_path, model_folder, task=task, train__num_steps=1, train__global_batch_size=2)
    table["data"] |= {"train": str(tmp_path / "t.jsonl"), "eval": []}
    table["train"]["batch_size"] = 2
    train(table, preflight=False)
    assert load_config(tmp_path / "run" / "config.yaml").task == load_config(table).task
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert yaml.safe_load(card.partition("```yaml\n")[2].partition("```")[0])["task"]["inputs"] == task["inputs"]
    train(tmp_path / "run", resume=True, overrides={"train.num_steps": 2})


def test_a_model_card_hides_the_secrets_of_settings():
    path, token = "https://me:pw@host/model", f"runs/{TOKEN}"
    config = load_config(
        {"model": {"path": path}, "task": "squad_v2", "run": {"dir": token}, "report": {"title": TOKEN}}
    )
    request = CardRequest(Path(token), Place(token), "t5")
    card = build_model_card(config, Run(TOKEN), None, None, request)
    assert "# (hidden)" in card and "from https://(hidden)@host/model." in card and 'open_run("runs/(hidden)")' in card
    assert TOKEN not in card and "me:pw" not in card


def test_errors_show_no_secret(capsys):
    assert str(DataError(f"https://me:pw@host/x.json: {TOKEN}")) == "https://(hidden)@host/x.json: (hidden)"
    assert main(["train", f"{TOKEN}.yaml"]) == 2
    assert TOKEN not in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "squad_v2", "--report.title", TOKEN],
        ["config", "squad_v2", "--report.title", TOKEN, "--json"],
        ["import-config", f"run_qa.py --model_name_or_path m --train_file t.json --output_dir {TOKEN}"],
    ],
)
def test_printed_settings_show_no_secret(arguments, capsys):
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "(hidden)" in printed and TOKEN not in printed


def test_no_file_of_a_run_holds_a_secret(tmp_path, model_folder, capsys):
    table = kit.recipe(tmp_path, model_folder, report={"title": f"mine {TOKEN}"}, train__num_steps=2)
    train(table, command=f"fivetune train x.yaml --report.title {TOKEN}", preflight=False)
    write_report(tmp_path / "run")
    printed = "".join(capsys.readouterr())
    texts = {
        path: path.read_bytes().decode("utf-8", "replace") for path in (tmp_path / "run").rglob("*.*") if path.is_file()
    }
    assert [path.name for path, text in texts.items() if TOKEN in text] == []
    assert TOKEN not in printed
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["report"]["title"] == "mine (hidden)"
    assert "mine (hidden)" in (tmp_path / "run" / "report.html").read_text()


def test_the_title_of_a_report_is_searched_for_secrets():
    """Other settings are read back as they are."""
    table = {"report": {"title": "with password=horse"}, "data": {"train": "password=horse.json"}}
    assert redact_settings(table) == {**table, "report": {"title": "with password=(hidden)"}}
