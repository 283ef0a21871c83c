"""Common mistakes end in one screen with the cause and what to do, the exit code of their kind, and no trace."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import kit
import pytest
from mistakes import MISTAKES, Mistake, lay_out

import fivetune
from fivetune import cli
from reliability.fake_hub import running_hub

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "mistakes.md"
NEWLINE = "\n"
LONG_LIST = re.compile(
    r"Allowed: (?:[\w/.-]+, ){7,}[\w/.-]+\.(?= |$)"
)  # left out of the page: it grows with the program
HEAD = """\
# Mistakes

What FiveTune answers to {number} common mistakes: the cause, and what to do. Every message is the output of the command
above it, without lists of more than seven names (`WRITE_PAGE=1 pytest tests/test_forty_mistakes.py` writes the page).
Exit codes: 2 a setting, 3 data, 4 the machine, a model, a run or the hub.
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    fivetune.train(kit.recipe(folder, model_folder, train__num_steps=1, data__eval=[]), quiet=True, preflight=False)
    return folder / "run"


def test_there_are_forty() -> None:
    assert len(MISTAKES) >= 40 and len({mistake.title for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.title.replace(" ", "-"))
def test_a_mistake_is_answered_in_one_screen(
    mistake: Mistake, tmp_path: Path, model_folder: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    lay_out(tmp_path, mistake, model_folder, trained, monkeypatch)
    monkeypatch.setattr("fivetune.installation._find_source", lambda: Path("."))  # as in a checkout
    capsys.readouterr()
    code = cli.main(shlex.split(mistake.command)[1:])
    out, err = capsys.readouterr()
    assert (code, out) == (mistake.code, "")
    lines = cli.wrap_message(err.strip(), 100).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    assert err.startswith("fivetune: ") and "Traceback" not in err and "internal error" not in err
    assert str(tmp_path) not in err
    place = 0
    for words in mistake.says:  # the cause before the fix
        assert words in err[place:], err
        place = err.index(words, place)
    shown = LONG_LIST.sub("Allowed: (a list of all).", err.strip())
    lines = cli.wrap_message(shown, 100).splitlines()
    section = f"\n## {mistake.title}\n\n```text\n$ {mistake.command}\n{NEWLINE.join(lines)}\nexit code {code}\n```\n"
    if os.environ.get("WRITE_PAGE"):
        is_first = mistake is MISTAKES[0]
        before = HEAD.format(number=len(MISTAKES)) if is_first else PAGE.read_text(encoding="utf-8")
        PAGE.write_text(before + section, encoding="utf-8")
    assert section in PAGE.read_text(encoding="utf-8"), "WRITE_PAGE=1 pytest tests/test_forty_mistakes.py"


def test_the_page_shows_each_once() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(HEAD.format(number=len(MISTAKES)))
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [mistake.title for mistake in MISTAKES]


def test_a_gated_model_without_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text('{"question": "Who?", "context": "Ann.", "answer": "Ann"}\n')
    with running_hub() as hub:
        hub.gated = ("google/t5gemma-2b",)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        assert cli.main(["train", "squad_v2", "--model.path", "google/t5gemma-2b", "--data.train", "t.jsonl"]) == 4
    error = capsys.readouterr().err
    assert "google/t5gemma-2b: the model is gated" in error
    assert (
        "Accept them at https://huggingface.co/google/t5gemma-2b, then set the environment variable HF_TOKEN" in error
    )


def test_a_terminal_wraps_messages_at_words(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert cli.main(["trian"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and max(map(len, lines)) <= 60
    assert " ".join(line.strip() for line in lines).startswith(
        "fivetune: there is no command 'trian'. Did you mean train?"
    )
