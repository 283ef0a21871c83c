"""Every command of README and docs runs, shortened, on prepared files; those that cannot have their reason here."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path

import kit
import pytest
from docs_kit import PAGES, ROOT, blocks, commands, shell_lines

from fivetune import plugins
from fivetune.cli import main
from fivetune.config.recipes import list_recipe_names

NOT_RUN = {  # pattern of a command (without `fivetune`) -> why it is not run here; it is parsed by tests/test_readme.py
    r"^(train|prepare|launch) .*(s3://|gs://)": "needs a bucket; tests/data/store/test_prepared.py runs one",
    r"--device tpu": "needs torchax; tests/training/step/test_tpu.py runs it",
    r"^serve ": "serves until it is stopped; tests/delivery/serving runs it",
    r"^board": "serves until it is stopped; tests/delivery/board runs it",
    r"^watch ": "shows until it is stopped; tests/reading/report/test_watch.py runs it",
    r"^launch (?!.*--dry-run)|^compare .*--on slurm|--on skypilot": "needs a cluster: tests/launchers",
    r"^push (?!.*--dry-run)": "uploads; tests/delivery/hub runs it against a hub on loopback",
    r"^profile \S+\.sqlite": "needs a capture of Nsight Systems; tests/machine/profiling reads one",
    r"--launch\.nproc": "several processes; tests/training/strategies and tests/training/answers run them",
    r"log\.csv": "needs another tool's log; tests/reading/diagnosis/test_logs.py reads them",
    r"--num_epochs 3000|runs/long": "is stopped by hand; tests/training/state/test_resume.py stops runs",
    r"--resume --optimizer\.lr": "is an example of a refusal",
    r"runs/NAME|ARGUMENTS": "a placeholder",
    r"--verify": "trains for minutes; tests/reading/diagnosis/test_trial.py runs it",
    r"^(train|predict|check) .*(bioasq|gsm8k|preguntas)": "data of the hub; test_readme.py loads the recipes",
    r"^trim-vocab mt5-small": "needs mT5's weights; tests/model/test_trim.py trims a small one",
    r"^compare (recipes/\S+|quick)(?!.*--dry-run)|^compare runs/compare-quick": "minutes: tests/experiments",
    r"--model\.adapter\.name lora|--distill": "hundreds of steps; tests/model/adapters and tests/training run them",
    r"^train stackoverflow_quality_nano": "needs prepared posts; benchmarks.so_quality prepares them",
    r"^score (yes_no|squad_v2 dev-v2\.0)": "tests/test_readme.py runs it with the page's own task and files",
}
SHORT = ["--train.num_steps", "2", "--train.num_epochs", "null", "--data.max_train_examples", "24",
         "--data.max_eval_examples", "8", "--eval.every_steps", "null", "--train.num_threads", "1",
         "--device", "cpu"]  # fmt: skip
LONG_COMMANDS = ("train", "find-lr", "profile", "check", "tune")
SKIPPED_PAGES = {"CHANGELOG.md", "mistakes.md", "LOG.md"}
HUB = {"google-t5/t5-small": "t5-nano", "google-t5/t5-base": "t5-nano", "google/mt5-small": "t5-nano"}
DOCUMENTED = [
    (page, tuple(words))
    for page in PAGES
    if page.name not in SKIPPED_PAGES
    for words in dict.fromkeys(map(tuple, commands(shell_lines(page.read_text(encoding="utf-8")))))
    if not words[0].startswith("-")
]


def find_reason(words: tuple[str, ...]) -> str:
    line = " ".join(words)
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, line)), "")


def test_each_reason_is_one_of_a_documented_command():
    unused = [p for p in NOT_RUN if not any(re.search(p, " ".join(words)) for _, words in DOCUMENTED)]
    assert unused == []
    run = [words for _, words in DOCUMENTED if not find_reason(words)]
    assert len(run) > 40 and {words[0] for words in run} >= {"quickstart", "new", "train", "predict", "export", "score"}


def write_files(folder: Path) -> None:
    """The data files and recipes that the pages name, small."""
    for name in ("train-v2.0.json", "train.json", "preguntas-train.json", "preguntas-dev.json"):
        kit.squad_file(folder / name)
    for name in ("dev-v2.0.json", "dev.json", "other.json", "questions.json", "test.json"):
        kit.squad_file(folder / name, num_questions=6, offset=100)
    (folder / "answers.json").write_text(json.dumps({f"q{i}": "red hat" for i in range(100, 106)}))
    (folder / "preds.json").write_text((folder / "answers.json").read_text())
    rows = [{"id": str(i), "question": "What has Ann?", "context": "Ann has a red hat."} for i in range(4)]
    (folder / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ["id,question,context,subject,text"]  # the columns of runs/my and of runs/tickets
    lines += [f"{row['id']},{row['question']},{row['context']},help,I cannot log in" for row in rows]
    (folder / "new.csv").write_text("\n".join(lines) + "\n")
    page = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    [table] = [block for block in blocks(page, "") if block.startswith("nr,frage")]
    (folder / "faq-train.csv").write_text(table)
    rows = [f"q{i},What has Ann?,Ann has a red hat.,red hat" for i in range(100, 106)]
    (folder / "faq-dev.csv").write_text("\n".join([table.partition("\n")[0], *rows]) + "\n")
    recipe = next(block for block in blocks(page, "yaml") if "from our own CSV file" in block)
    (folder / "faq.yaml").write_text(recipe.replace("./tiny-t5", "t5-nano"))
    tickets = ["subject,text,category,customer"]
    kinds = (("money", "I want my money back since day"), ("login", "I cannot log in since day"))
    tickets += [f"help,{kinds[i % 2][1]} {i},{kinds[i % 2][0]},c{i}" for i in range(60)]
    (folder / "tickets.csv").write_text("\n".join(tickets) + "\n")
    data = "data: {train: train.json, eval: dev.json}\noptimizer: {name: adamw}\n"
    search = "search: {num_trials: 2, startup_trials: 1, over: {optimizer.lr: {low: 1e-4, high: 1e-2, log: true}}}\n"
    (folder / "my.yaml").write_text(f"model: {{path: t5-nano}}\ntask: squad_v2\n{data}{search}")
    (folder / "nano.yaml").write_text((folder / "my.yaml").read_text())
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    (folder / "data").mkdir()
    table = "article,summary,prefix,input_text,target_text\n" + "a text,a,sum,a text,a\n" * 6
    for name in ("train.csv", "dev.csv", "data/train.csv", "data/dev.csv"):
        (folder / name).write_text(table)


def drop_unanswerable(path: Path) -> None:
    table = json.loads(path.read_text())
    for article in table["data"]:
        for paragraph in article["paragraphs"]:
            paragraph["qas"] = [question for question in paragraph["qas"] if question["answers"]]
    path.write_text(json.dumps(table))


def run(words: tuple[str, ...] | list[str]) -> int:
    """Run a command, shortened and with the small model in place of those of the hub."""
    shortened = [HUB.get(word, word) for word in words]
    if words[0] in LONG_COMMANDS and "--resume" not in words:
        given = {word for word in words if word.startswith("--")}
        if "--train.num_steps" in given:
            shortened[shortened.index("--train.num_steps") + 1] = "2"
        pairs = zip(SHORT[::2], SHORT[1::2], strict=True)
        shortened += [word for flag, value in pairs if flag not in given for word in (flag, value)]
        if words[1] != "quickstart" and "--model.path" not in given:
            shortened += ["--model.path", "t5-nano"]
        if words[1] in list_recipe_names() and words[1] != "quickstart":
            shortened += [] if "--data.train" in given else ["--data.train", "train.json", "--data.eval", "dev.json"]
    if words[0] == "quickstart":
        shortened += ["--steps", "2"]
    return main(shortened)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files and finished runs that the pages name."""
    folder = tmp_path_factory.mktemp("documented")
    write_files(folder)
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert run(["train", "my.yaml", "--run.dir", "runs/my"]) == 0
        assert run(["train", "my.yaml", "--run.dir", "runs/two", "--optimizer.lr", "1e-4"]) == 0
        assert run(["quickstart"]) == 0
        assert main(["export", "runs/quickstart", "--format", "ctranslate2", "--quantization", "int8"]) == 0
    finally:
        os.chdir(before)
    for name in ("squad_v2", "one", "faq", "a"):
        shutil.copytree(folder / "runs" / "my", folder / "runs" / name)
    shutil.copytree(folder / "runs" / "two", folder / "runs" / "b")
    return folder


@pytest.mark.release
@pytest.mark.parametrize("page", sorted({page for page, _ in DOCUMENTED}), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run(prepared, page, tmp_path, monkeypatch, capsys):
    work = tmp_path / "work"
    shutil.copytree(prepared, work, symlinks=True)
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if page.parent.name == "migrating" and page.stem in plugins.list_plugins("importers"):
        source = ROOT / "tests" / "start" / "importers" / page.name
        text = source.read_text(encoding="utf-8") if source.is_file() else ""
        example = re.search(r"^## Example\n\n```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for name in ("train.json", "dev.json"):
            drop_unanswerable(work / name)
        if example:
            (work / "train.py").write_text(example[1], encoding="utf-8")
            (work / "my.yaml").unlink()  # the page writes it
    wrong = []
    for words in [words for at, words in DOCUMENTED if at == page and not find_reason(words)]:
        monkeypatch.setattr("sys.stdin", io.StringIO((work / "new.jsonl").read_text(encoding="utf-8")))
        if words[0] == "train" and not {"--resume", "--overwrite", "--run.dir"} & {*words}:
            shutil.rmtree(work / "runs" / Path(words[1]).stem, ignore_errors=True)
        if words[0] == "export":
            shutil.rmtree(work / "runs" / "quickstart" / "export", ignore_errors=True)  # a quickstart replaces the run
        code = run([*words, "--overwrite"] if words[0] == "new" else words)  # a page may show it twice
        error = capsys.readouterr().err
        if code != 0:
            wrong.append((" ".join(words), code, error[-300:]))
    assert wrong == []
