"""The command line: help, exit codes, messages without tracebacks."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import pytest

from fivetune import __version__, cli, plugins
from fivetune.commands import list as list_command
from fivetune.commands import print_table
from fivetune.config import RunConfig, load_config
from fivetune.config.recipes import list_recipe_names
from fivetune.errors import ConfigError, DataError, IncompleteError, InterruptedRunError, NumericError, RunDirError
from fivetune.model.family import FAMILIES

COMMANDS = sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules([str(cli.COMMANDS)]))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command."""
    try:
        code = cli.main(list(words))
    except SystemExit as stop:  # argparse: help, wrong arguments
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "r.yaml").write_text("model: {path: m}\ntask: squad_v2\noptimizer: {lrr: 1}\n")
    return str(tmp_path / "r.yaml")


# --- help ---


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(capsys, words):
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("  ")}
    assert sorted(listed) == COMMANDS
    assert all(len(line.split()) > 2 for line in listed.values())
    assert max(map(len, out.splitlines())) <= 80


def test_every_command_is_in_one_group():
    grouped = [name for group in cli.GROUPS.values() for name in group]
    assert sorted(grouped) == COMMANDS and len(grouped) == len({*grouped})


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"fivetune {__version__}\n", "")


HELP = """
import sys
from fivetune import cli
for name in {names}:
    try:
        cli.main([name, "--help"])
    except SystemExit as stop:
        assert stop.code == 0, name
    heavy = {{"torch", "transformers", "datasets"}} & set(sys.modules)
    assert not heavy, f"{{name}} --help imports {{heavy}}"
"""


def test_help_of_every_command_without_torch():
    code = HELP.format(names=COMMANDS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for name in COMMANDS:
        assert f"usage: fivetune {name} " in done.stdout


def test_python_dash_m():
    done = subprocess.run(
        [sys.executable, "-m", "fivetune", "list", "schedules"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines() if line[0] != " "] == plugins.list_plugins("schedules")


# --- errors ---


def test_unknown_command(capsys):
    code, out, err = run(capsys, "trian", "recipe")
    assert (code, out) == (2, "")
    assert err.startswith("fivetune: there is no command 'trian'. Did you mean train? All names: fivetune --help.")
    code, out, err = run(capsys, "find-batch", "recipe")
    assert (code, out) == (2, "") and "train.batch_size: auto" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_wrong_setting_is_one_line_and_exit_2(capsys, recipe, command):
    code, out, err = run(capsys, command, recipe)
    assert (code, out) == (2, "")
    assert err == (
        f"fivetune: {recipe}:3: optimizer.lrr is not a setting. Did you mean lr? Allowed: beta1, clip_threshold, "
        "decay_rate, lr, name, preset, relative_step, scale_parameter, warmup_init, weight_decay.\n"
    )


def test_a_wrong_flag_is_named(capsys):
    code, _, err = run(capsys, "train", "squad_v2", "--optimiser.lr", "1e-3")
    assert (code, err.partition("?")[0]) == (
        2,
        "fivetune: --optimiser.lr: optimiser is not a setting. Did you mean optimizer",
    )
    assert run(capsys, "train", "squad_v2", "--optimizer.lr")[2] == (
        "fivetune: --optimizer.lr has no value. Write --optimizer.lr VALUE.\n"
    )


def test_traceback_reaches_the_processes_of_a_run(monkeypatch):
    commands = []
    monkeypatch.setattr(
        "fivetune.distributed.processes.start_processes", lambda words, **_: commands.append(words) or 0
    )
    settings = ["--model.path", "t5-nano", "--launch.nproc", "2", "--strategy.name", "ddp"]
    assert cli.main(["train", "squad_v2", "--traceback", *settings]) == 0
    assert "--traceback" in commands[0]


@pytest.mark.parametrize("place", [0, 1, 3])
def test_traceback_shows_where_an_error_comes_from(capsys, recipe, place):
    words = ["train", recipe, "--run.seed=1"]
    words.insert(place, "--traceback")
    code, _, err = run(capsys, *words)
    assert code == 2
    assert err.startswith("Traceback (most recent call last):")
    assert err.splitlines()[-1].startswith(f"fivetune: {recipe}:3: ")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("optimizer.lr: wrong."), 2, "fivetune: optimizer.lr: wrong.\n"),
        (DataError("a.json:3: torn. Mend it."), 3, "fivetune: a.json:3: torn. Mend it.\n"),
        (RunDirError("runs/a: in use."), 4, "fivetune: runs/a: in use.\n"),
        (NumericError("step 3: loss nan.", step=3), 5, "fivetune: step 3: loss nan.\n"),
        (IncompleteError("no report."), 6, "fivetune: no report.\n"),
        (InterruptedRunError("stopped.", signum=15), 143, "fivetune: stopped.\n"),
        (KeyboardInterrupt(), 130, "fivetune: stopped.\n"),
        (KeyboardInterrupt(15), 143, "fivetune: stopped.\n"),
        (
            ZeroDivisionError("by zero"),
            1,
            "fivetune: internal error: ZeroDivisionError: by zero. Run again with --traceback and report it.\n",
        ),
    ],
)
def test_every_error_has_its_code(capsys, monkeypatch, error, code, message):
    def fail(args):
        raise error

    monkeypatch.setattr(list_command, "run", fail)
    assert run(capsys, "list", "tasks") == (code, "", message)


def test_a_bug_can_be_seen(capsys, monkeypatch):
    monkeypatch.setattr(list_command, "run", lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["list", "tasks", "--traceback"])


def test_a_reader_that_goes_away_is_no_error():
    words = f"{sys.executable} -m fivetune list recipes | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False)
    assert (done.returncode in (0, 141), done.stderr) == (True, "")


# --- list ---


@pytest.mark.parametrize("kind", list_command.KINDS)
def test_list_names_each_with_a_line_of_help(capsys, kind):
    code, out, err = run(capsys, "list", kind, "--json")
    *lines, last = out.splitlines()
    table = json.loads(last)
    others = {"recipes": list_recipe_names, "models": lambda: list(FAMILIES)}
    names = others[kind]() if kind in others else plugins.list_plugins(kind)
    assert (code, err, list(table)) == (0, "", [kind])
    assert [row["name"] for row in table[kind]] == [line.split()[0] for line in lines if line[0] != " "] == names
    assert all(row["help"] and not row["help"].startswith(f"{row['name']}:") for row in table[kind])


def test_list_of_what_there_is_not(capsys):
    code, out, err = run(capsys, "list", "planets")
    assert (code, out) == (2, "")
    assert "invalid choice: 'planets'" in err


def test_plugins_of_ones_own_are_listed(tmp_path):
    (tmp_path / "schedules").mkdir()
    wave = "from fivetune.training.schedules import Warmup\n\nclass Wave(Warmup):\n    pass\n"
    (tmp_path / "schedules" / "wave.py").write_text(f'"""Up and down."""\n\n{wave}')
    code = "from fivetune.cli import main; main(['list', 'schedules'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"FIVETUNE_PLUGINS": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ["wave", "Up and down."] in [line.split(maxsplit=1) for line in done.stdout.splitlines()]


# --- config ---


def test_config_shows_a_recipe_that_can_be_run(capsys, tmp_path):
    code, out, err = run(capsys, "config", "squad_v2", "--optimizer.lr", "1e-4", "--task.no_answer", "nothing")
    assert (code, err) == (0, "")
    (tmp_path / "squad_v2.yaml").write_text(out, encoding="utf-8")
    shown = load_config(tmp_path / "squad_v2.yaml")
    assert shown == load_config("squad_v2", {"optimizer.lr": 1e-4, "task.no_answer": "nothing"})


def test_the_schema_and_the_manual_know_every_setting(capsys):
    code, out, _ = run(capsys, "config", "--schema")
    schema = json.loads(out)
    assert (code, set(RunConfig.model_fields) | {"base"}) == (0, set(schema["properties"]))
    code, manual, _ = run(capsys, "config", "--manual")
    assert code == 0
    for section, field in RunConfig.model_fields.items():
        assert f"## {section}\n" in manual
        assert all(f"| `{name}` |" in manual for name in getattr(field.annotation, "model_fields", ()))


@pytest.mark.parametrize(("flag", "name"), [("--manual", "config.md"), ("--schema", "recipe.schema.json")])
def test_what_docs_say_is_up_to_date(capsys, flag, name):
    path = cli.COMMANDS.parents[1] / "docs" / name
    if not path.is_file():
        pytest.skip("docs/ is not beside the package")
    written = path.read_text(encoding="utf-8")
    assert written == run(capsys, "config", flag)[1], f"write it again: fivetune config {flag} > docs/{name}"


def test_config_of_nothing(capsys):
    code, out, err = run(capsys, "config")
    assert (code, out) == (2, "")
    assert err == "fivetune: config: nothing to print. Give a recipe, --schema or --manual.\n"


def test_config_as_json_is_a_recipe_too(capsys, tmp_path):
    code, out, _ = run(capsys, "config", "squad_v2", "--json")
    (tmp_path / "squad_v2.json").write_text(out, encoding="utf-8")
    assert (code, load_config(tmp_path / "squad_v2.json")) == (0, load_config("squad_v2"))


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["card"], "the following arguments are required: run; run: run directory, or an export of one"),
        (["list", "tasks", "--x"], "unrecognized arguments: --x"),
        (
            ["import-config", "--output", "--fp16"],
            "argument --output: expected one argument (write one that begins with - after an equals sign: "
            "--name=-value)",
        ),
    ],
)
def test_wrong_words_are_one_line(capsys, words, wrong):
    assert run(capsys, *words) == (2, "", f"fivetune: error: {wrong}. Try: fivetune {words[0]} --help.\n")


def test_settings_before_the_recipe_are_told_their_place(capsys):
    code, out, err = run(capsys, "train", "--train.num_steps", "5", "recipe.yaml")
    assert (code, out) == (2, "")
    assert "--train.num_steps: settings come last. Write fivetune train RECIPE --train.num_steps VALUE" in err


def test_arguments_of_transformers_without_a_recipe(capsys):
    words = ["train", "--model_name_or_path", "t5-nano", "--train_file", "train.json"]
    assert run(capsys, *words) == (
        2,
        "",
        "fivetune: --model_name_or_path: settings come last. Write fivetune train RECIPE --model_name_or_path VALUE, "
        "for example fivetune train squad_v2 --model_name_or_path VALUE.\n",
    )


@pytest.mark.parametrize("command", ["config", "check", "train"])
def test_a_metric_that_is_never_computed_is_found_by_every_command(capsys, command):
    code, out, err = run(capsys, command, "squad_v2", "--metric_for_best_model", "eval_f2")
    assert (code, out) == (2, "")
    assert err.startswith(
        "fivetune: --metric_for_best_model: eval.metric 'f2' is not a score that can select a checkpoint. "
    )


def test_a_run_that_does_not_exist_is_not_resumed(capsys, tmp_path):
    (tmp_path / "ke").mkdir()
    (tmp_path / "ke" / "config.yaml").touch()
    assert run(capsys, "train", f"{tmp_path}/k", "--resume") == (
        4, "", f"fivetune: {tmp_path}/k: there is no run to resume: no such run directory. Did you mean {tmp_path}/ke? "
        f"Allowed: {tmp_path}/ke.\n",
    )  # fmt: skip
    assert "no such recipe" in run(capsys, "train", f"{tmp_path}/k.yaml", "--resume")[2]
    (tmp_path / "ke" / "config.yaml").unlink()
    assert run(capsys, "train", f"{tmp_path}/ke", "--resume") == (
        4, "", f"fivetune: {tmp_path}/ke: there is no run to resume: the folder has no config.yaml. If it is a run, "
        "restore that file.\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(36, "File name too long", "x" * 300), f"{'x' * 200}: File name too long. --traceback shows where."),
        (OSError(28, "No space left on device"), "list: No space left on device. --traceback shows where."),
        (MemoryError(), "list: memory ran out. --traceback shows where."),
    ],
    ids=["name", "disk", "memory"],
)
def test_what_the_system_refuses_is_an_environment_error(monkeypatch, capsys, error, message):
    def fail(args):
        raise error

    monkeypatch.setattr(list_command, "run", fail)
    assert cli.main(["list", "metrics"]) == 4
    assert capsys.readouterr().err == f"fivetune: {message}\n"


def test_words_that_are_not_utf8_are_refused(capsys):
    assert cli.main(["train", "quickstart", "--run.dir", "runs/\udce5"]) == 2
    assert capsys.readouterr().err.startswith(r"fivetune: 'runs/\udce5': is not UTF-8")


def test_an_error_that_cannot_be_printed_has_its_code():
    words = f"{sys.executable} -m fivetune report /nowhere 2> /dev/full"
    assert subprocess.run(words, shell=True, check=False).returncode == RunDirError.exit_code


def test_numbers_of_a_table_are_aligned_to_the_right(capsys):
    print_table(["name", "number", "mixed"], [["a", "1", "x"], ["b", "1,000", "2"]])
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.index("1") == second.index("1,000") + 4 and first.index("x") == second.rindex("2")


def test_a_narrow_table_breaks_between_words(capsys, monkeypatch):
    """Heads of the lengths of `inspect` broke inside words at 80 columns."""
    monkeypatch.setenv("COLUMNS", "44")
    header = ["name", "the longest", "tokens", "95 %", "what"]
    print_table(header, [["contexts", "5", "6,927", "48", "word " * 9], ["targets", "51", "8", "9", ""]])
    printed = capsys.readouterr().out
    assert {"contexts", "longest", "tokens", "word"} <= {*printed.split()}
    assert max(map(len, printed.splitlines())) <= 44
    print_table(["path", "size"], [["/a/folder" * 20, "1,234"]])  # a word that is longer than the line
    printed = capsys.readouterr().out
    assert "1,234" in printed and printed.count("size") == 1
    assert printed.count("folder") >= 16 and max(map(len, printed.splitlines())) <= 44


def test_a_table_is_as_wide_as_columns_says(capsys, monkeypatch):
    """Piped tables had 160 characters whatever COLUMNS was."""
    monkeypatch.setenv("COLUMNS", "60")
    print_table(["name", "what"], [["a", "word " * 40]])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60
