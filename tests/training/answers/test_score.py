"""fivetune score: official numbers from files, and what is said when the files do not fit."""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fivetune.commands import score
from fivetune.errors import ConfigError, DataError, UnknownPluginError
from fivetune.scores.metrics.mlqa import LANGUAGES

SHARED = Path(__file__).parents[4] / "shared" / "data"
PARTS = ["--task.by", "size", "--task.parts.tags.task", "stackoverflow_tags", "--task.parts.squad.task", "squad"]
QUALITY = ["stackoverflow_quality", "--task.labels.HQ", "high", "--task.labels.LQ", "low"]
PREDICTIONS = {"q1": "Rollo", "q2": "the river", "q3": ""}


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    """A SQuAD v2.0 file with the questions q1 (Rollo), q2 (Seine) and q3 (unanswerable)."""
    context = "Rollo came up the river Seine."
    qas = [
        {"id": "q1", "question": "Who?", "answers": [{"text": "Rollo", "answer_start": 0}], "is_impossible": False},
        {"id": "q2", "question": "Where?", "answers": [{"text": "river Seine", "answer_start": 18}]},
        {"id": "q3", "question": "Why?", "answers": [], "is_impossible": True},
    ]
    article = {"title": "Normans", "paragraphs": [{"context": context, "qas": qas}]}
    return _write(tmp_path / "dev.json", {"version": "v2.0", "data": [article]})


def _write(path: Path, value: object) -> Path:
    text = value if isinstance(value, str) else json.dumps(value)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def _score(*words: object) -> int:
    parser = argparse.ArgumentParser()
    score.add_arguments(parser)
    args, settings = parser.parse_known_args(list(map(str, words)))
    return score.run(argparse.Namespace(**vars(args), settings=settings))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("preds.json", PREDICTIONS),
        ("preds.json.gz", PREDICTIONS),
        ("preds.jsonl", "\n".join(json.dumps({"id": k, "prediction": v}) for k, v in PREDICTIONS.items())),
        ("list.json", [{"id": k, "prediction_text": v} for k, v in PREDICTIONS.items()]),
        (
            "printed.json",  # by fivetune predict --json
            [{"id": k, "prediction": v} for k, v in PREDICTIONS.items()] + [{"id": "", "skipped": "no question"}],
        ),
    ],
)
def test_forms_of_predictions(dev, tmp_path, capsys, name, content):
    assert _score("squad_v2", dev, _write(tmp_path / name, content), "--json") == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["task"] == "squad_v2"
    assert printed["num_examples"] == 3
    assert printed["scores"]["exact"] == pytest.approx(200 / 3)
    assert printed["scores"]["HasAns_f1"] == pytest.approx(100 * (1 + 1 / 2) / 2 + 100 / 12)  # q2: P 1, R 1/2


def test_table(dev, tmp_path, capsys):
    assert _score("squad_v2", dev, _write(tmp_path / "p.json", PREDICTIONS)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "squad_v2: 3 examples"
    assert lines[3].split()[:2] == ["exact", "66.67"]
    assert len({line.index(".") for line in lines[3:] if "." in line}) == 1  # decimal points under each other


def test_no_answer_scores(dev, tmp_path, capsys):
    leanings = _write(tmp_path / "na.json", {"q1": 0.1, "q2": 0.8, "q3": 0.9})
    assert (
        _score("squad_v2", dev, _write(tmp_path / "p.json", PREDICTIONS), "--no-answer-scores", leanings, "--json") == 0
    )
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert (scores["best_exact_thresh"], scores["best_f1_thresh"]) == (0.1, 0.8)


def test_missing(dev, tmp_path, capsys):
    some = _write(tmp_path / "p.json", {"q1": "Rollo", "x": "?"})
    with pytest.raises(DataError, match=r"2 of 3 questions are missing, first q2, q3\. .*--missing wrong"):
        _score("squad_v2", dev, some)
    assert _score("squad_v2", dev, some, "--missing", "wrong", "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["scores"]["NoAns_exact"] == 0  # an absent prediction is no right abstention
    assert "2 of 3 questions are missing and count as wrong" in printed.err
    assert "1 ids are not in the data, first x; left out" in printed.err
    with pytest.raises(DataError, match="No id matches"):
        _score("squad_v2", dev, _write(tmp_path / "other.json", {"x": "?"}))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "sure.jsonl",
            '{"id": "q1", "prediction": "Rollo"}\n{"id": "q2", "prediction": "Seine"}\n'
            '{"id": "q3", "prediction": null, "unsure": true, "withheld": ""}\n',
        ),
        ("sure.csv", "id,prediction,unsure,withheld\nq1,Rollo,,\nq2,Seine,,\nq3,,true,\n"),
    ],
)
def test_withheld_answers_are_wrong_and_counted(dev, tmp_path, capsys, name, content):
    assert _score("squad_v2", dev, _write(tmp_path / name, content), "--json") == 0
    captured = capsys.readouterr()
    scores = json.loads(captured.out)["scores"]
    assert (scores["HasAns_exact"], scores["NoAns_exact"]) == (50, 0)  # not the empty answer, which would be right
    assert "1 answers are withheld as unsure" in captured.err


def test_answers_to_questions_of_other_types_are_no_other_file(tmp_path):
    golds = [("1", "yesno", "yes"), ("2", "list", [["a"]]), ("3", "factoid", [["dystrophin"]])]
    snippets = [{"text": "dystrophin", "document": "d"}]
    form = [{"id": i, "type": t, "body": "q", "exact_answer": a, "snippets": snippets} for i, t, a in golds]
    gold = _write(tmp_path / "gold.json", {"questions": form})
    given = _write(tmp_path / "p.json", {"questions": [{"id": "1", "exact_answer": "yes"}]})
    with pytest.raises(DataError, match=r"1 of 1 questions are missing, first 3\. The 1 answers .* leaves out"):
        _score("bioasq_factoid", gold, given)
    given = _write(tmp_path / "p.json", {"questions": [{"id": "3", "exact_answer": [[]]}]})
    assert _score("bioasq_factoid", gold, given) == 0


def test_raw_model_text(dev, tmp_path, capsys):
    raw = _write(tmp_path / "p.json", {**PREDICTIONS, "q3": "Unanswerable."})
    assert _score("squad_v2", dev, raw, "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["scores"]["NoAns_exact"] == 0
    assert "1 predictions read 'unanswerable' and are scored as that text" in printed.err
    assert _score("squad_v2", dev, raw, "--json", "--raw") == 0
    assert json.loads(capsys.readouterr().out)["scores"]["NoAns_exact"] == 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"q1": "a",\n "q2" "b"}', r"p\.json:2:7: malformed JSON"),
        ('{"id": "q1", "prediction": "a"}\n{"id": "q2"', r"p\.json:2:\d+: malformed JSON"),
        ('{"q1": 1}', r"the value of 'q1' is 1\. It must be text; no answer is"),
        ('{"q1": NaN}', r"the value of 'q1' is 'NaN'\. It must be text"),
        ('{"id": "q1", "prediction": "a", "prediction": "b"}', "has a duplicate key"),
        ('{"q1": null}', r"the value of 'q1' is null\. It must be text"),
        ('{"q1": "a", "q1": "b"}', "the id 'q1' occurs twice"),
        ('[{"id": "q1"}]', r"no prediction in id\. Allowed is one JSON object"),
        ('"Rollo"', "where an object was expected"),
        ("", "the file is empty"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "this is a Git-LFS pointer, not the data"),
        ("{}", "contains no values"),
    ],
)
def test_bad_predictions(dev, tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        _score("squad_v2", dev, _write(tmp_path / "p.json", content))


def test_wide_characters_are_recognised_in_predictions(dev, tmp_path):
    """Fault C12: UTF-16 was taken for cp1252."""
    (tmp_path / "p.json").write_bytes(json.dumps(PREDICTIONS).encode("utf-16"))
    with pytest.raises(DataError, match=r"p\.json: the text is utf-16\. Allowed is UTF-8\. Convert it: iconv"):
        _score("squad_v2", dev, str(tmp_path / "p.json"))


def test_blank_golds_are_counted_and_scored_without(tmp_path, capsys):
    """Fault C4: predicting nothing scored exact 39.1 in a Spanish set, and nothing said why."""
    rows = [
        {"id": "q1", "question": "¿Quién?", "context": "Rollo vino.", "answers": ["Rollo", ""]},
        {"id": "q2", "question": "¿Quién?", "context": "Rollo vino.", "answers": ["Rollo"]},
    ]
    data, silence = _write(tmp_path / "d.json", rows), _write(tmp_path / "p.json", {"q1": "", "q2": ""})
    assert _score("squad", data, silence, "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert table["scores"]["exact"] == 50.0
    assert table["without_blank_golds"] == {"num_questions": 1, "scores": {"exact": 0.0, "f1": 0.0, "total": 2}}
    assert _score("squad", data, silence) == 0
    words = "without the blank gold answers of 1 questions, which an empty prediction matches:"
    assert words in capsys.readouterr().out


def test_bad_records_can_be_left_out_of_the_score(tmp_path, capsys):
    """Fault C12: score proposed data.on_bad_record, and refused it."""
    rows = [{"id": "q1", "question": "Who?", "context": "Ann.", "answers": ["Ann"]}, {"id": "q2", "question": " "}]
    data, found = _write(tmp_path / "d.json", rows), _write(tmp_path / "p.json", {"q1": "Ann"})
    with pytest.raises(DataError, match=r"question is empty\..* give --data\.on_bad_record skip\.$"):
        _score("squad", data, found)
    assert _score("squad", data, found, "--data.on_bad_record", "skip") == 0
    assert "1 records cannot be used, first" in capsys.readouterr().err


def test_chinese_without_its_language_is_hinted_at(tmp_path, capsys):
    """Fault C12: Chinese scored f1 7.0 instead of 77.7, without a hint."""
    data = _write(tmp_path / "d.json", [{"id": "q1", "question": "谁？", "context": "罗洛来了", "answers": ["罗洛"]}])
    found = _write(tmp_path / "p.json", {"q1": "罗洛来"})
    assert _score("squad", data, found) == 0
    assert "Add --task.language zh" in capsys.readouterr().err
    assert _score("squad", data, found, "--task.language", "zh") == 0
    assert "task.language" not in capsys.readouterr().err


def test_numbers_that_only_the_lenient_rules_read_are_hinted_at(tmp_path, capsys):
    """Fault C12: accuracy 0.0 stood beside accuracy_lenient 56.3 without a word."""
    rows = [{"id": name, "question": "How many?", "answer": f"#### {name}"} for name in ("18", "72")]
    data = _write(tmp_path / "d.json", rows)
    assert _score("gsm8k", data, _write(tmp_path / "p.json", {"18": "It is 18.", "72": "It is 70."})) == 0
    words = 'warning: accuracy 0.00 beside accuracy_lenient 50.00: the official rules read a number only after "#### "'
    assert words in capsys.readouterr().err
    assert _score("gsm8k", data, _write(tmp_path / "p.json", {"18": "#### 18", "72": "It is 70."})) == 0
    assert "lenient" not in capsys.readouterr().err


def test_bad_files(dev, tmp_path):
    good = _write(tmp_path / "p.json", PREDICTIONS)
    with pytest.raises(DataError, match="no such file"):
        _score("squad_v2", dev, tmp_path / "nowhere.json")
    with pytest.raises(UnknownPluginError, match="squad_v2"):
        _score("squad2", dev, good)
    with pytest.raises(ConfigError, match="squad has no unanswerable questions"):
        _score("squad", dev, good, "--no-answer-scores", good)
    with pytest.raises(DataError, match=r"is 'NaN'\. It must be a finite number"):
        _score("squad_v2", dev, good, "--no-answer-scores", _write(tmp_path / "na.json", '{"q1": NaN}'))
    with pytest.raises(DataError, match=r"is true\. It must be a finite number"):
        _score("squad_v2", dev, good, "--no-answer-scores", _write(tmp_path / "na.json", '{"q1": true}'))


def test_needs_no_torch(dev, tmp_path):
    predictions = _write(tmp_path / "p.json", PREDICTIONS)
    program = (
        "import argparse, sys; from fivetune.commands import score; parser = argparse.ArgumentParser();"
        "score.add_arguments(parser); args = parser.parse_args(); args.settings = []; code = score.run(args);"
        "sys.exit(code or 'torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, "squad_v2", dev, predictions], check=True)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="../shared with the published prediction files is absent")
@pytest.mark.parametrize(
    ("name", "exact", "f1"),
    [
        ("igor_baseline_t5small", 34.42263960245936, 39.5366934720806),
        ("igor_finetuned_t5small", 46.8205171397288, 50.03194057891786),
    ],
)
def test_published_figures(capsys, name, exact, f1):
    dev, predictions = SHARED / "squad_v2/dev-v2.0.json.gz", SHARED / f"reference/{name}.json.gz"
    assert _score("squad_v2", dev, predictions, "--json") == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert (scores["exact"], scores["f1"]) == (exact, f1)
    assert scores["total"] == 11_873


def test_columns_and_task_options_are_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gold = tmp_path / "gold.jsonl"
    gold.write_text('{"id": "a", "Frage": "Wer?", "context": "Rollo kam.", "answers": ["Rollo"]}\n')
    preds = tmp_path / "preds.json"
    preds.write_text('{"a": "Rollo"}')
    words = ["squad_v2", gold, preds, "--json", "--data.columns.question", "Frage", "--task.train_answers", "all"]
    assert _score(*words) == 0
    assert json.loads(capsys.readouterr().out)["scores"]["exact"] == 100.0


def test_other_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--optimizer\.lr: not a setting of score"):
        _score("squad_v2", tmp_path / "gold.json", tmp_path / "preds.json", "--optimizer.lr", "1")


def test_against_other_predictions(dev, tmp_path, capsys):
    ours, theirs = _write(tmp_path / "a.json", PREDICTIONS), _write(tmp_path / "b.json", {**PREDICTIONS, "q1": "Rolf"})
    assert _score("squad_v2", dev, ours, "--against", theirs, "--json") == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["against"]["exact"] == pytest.approx(100 / 3)
    assert printed["differences"]["exact"]["difference"] == pytest.approx(100 / 3)
    assert 0 < printed["differences"]["exact"]["p_value"] <= 1
    low, high = printed["intervals"]["exact"]
    assert 0 <= low <= printed["scores"]["exact"] <= high <= 100
    assert _score("squad_v2", dev, ours, "--against", theirs) == 0
    assert "difference" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"c\.json: 3 of 3 questions are missing"):
        _score("squad_v2", dev, ours, "--against", _write(tmp_path / "c.json", {"x": "y"}))


def test_rules_of_a_language_stand_beside_squads(tmp_path, capsys):
    data = [{"id": "q", "question": "¿Quién?", "context": "Los Broncos.", "answers": {"text": ["Broncos"]}}]
    source = _write(tmp_path / "es.json", data)
    assert (
        _score("squad", source, _write(tmp_path / "p.json", {"q": "los Broncos"}), "--task.language", "es", "--json")
        == 0
    )
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])["scores"]
    assert (scores["exact"], scores["mlqa_exact"]) == (0.0, 100.0)


@pytest.mark.parametrize(
    ("language", "is_scored"), [(name, name in ("ar", "de", "en", "es", "hi", "vi", "zh")) for name in LANGUAGES]
)
def test_mlqa_scores_exist_for_the_languages_of_mlqa_only(tmp_path, capsys, language, is_scored):
    """Fault C12: columns of Russian, Danish, Portuguese were called mlqa_*, and MLQA has no such language."""
    for task in ("squad", "squad_v2"):
        data = _write(tmp_path / "d.json", [{"id": "q", "question": "q?", "context": "Ann.", "answers": ["Ann"]}])
        found = _write(tmp_path / "p.json", {"q": "Ann"})
        assert _score(task, data, found, "--task.language", language, "--json") == 0
        scores = json.loads(capsys.readouterr().out)["scores"]
        assert [name for name in scores if "mlqa" in name] == ["mlqa_exact", "mlqa_f1"] * is_scored
        assert ("korquad_f1" in scores) == (language == "ko")


def test_a_korean_set_is_told_its_rules(tmp_path, capsys):
    data = [{"id": "q", "question": "어디?", "context": "서울 사람.", "answers": {"text": ["서울"]}}]
    source, found = _write(tmp_path / "ko.json", data), _write(tmp_path / "p.json", {"q": "서울에"})
    assert _score("squad", source, found, "--json") == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["scores"]["f1"] == 0 and "--task.language ko" in told.err
    assert _score("squad", source, found, "--task.language", "ko", "--json") == 0
    assert json.loads(capsys.readouterr().out)["scores"]["korquad_f1"] == pytest.approx(80)


def test_a_wrong_ranking(dev, tmp_path):
    with pytest.raises(DataError, match="A ranking is a list of texts, the best first"):
        _score("squad_v2", dev, _write(tmp_path / "p.json", {**PREDICTIONS, "q1": [1]}))


@pytest.mark.parametrize(
    ("task", "column", "gold", "said", "main"),
    [
        (QUALITY, "Y", "HQ", "high", "accuracy"),
        (QUALITY, "Y", "HQ", "hq", "accuracy"),
        (["stackoverflow_tags"], "Tags", "<java><repeat>", "<repeat><java>", "exact_set"),
    ],
)
def test_answers_in_other_forms(tmp_path, capsys, task, column, gold, said, main):
    post = [{"id": "a", "Title": "Why?", "Body": "x", column: gold}]
    assert _score(task[0], _write(tmp_path / "g.json", post), _write(tmp_path / "p.json", {"a": said}), *task[1:]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith(main)] == ["100.00"]


@pytest.mark.parametrize(("part", "more"), [([], {"part": "tags"}), (["--task.part", "tags"], {})])
@pytest.mark.parametrize("key", ["a", "tags/a"])
def test_a_mixture_or_one_part_of_it(tmp_path, capsys, part, more, key):
    post = [{"id": "a", "Title": "Why?", "Body": "x", "Tags": "<java>", **more}]
    words = ["mixture", _write(tmp_path / "g.json", post), _write(tmp_path / "p.json", {key: "java"}), "--json"]
    assert _score(*words, *PARTS, *part) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert scores["micro_f1" if part else "tags_micro_f1"] == 100.0


def test_labels_one_by_one(tmp_path, capsys):
    posts = [{"Id": name, "Title": "Why?", "Body": "x", "Y": gold} for name, gold in (("a", "HQ"), ("b", "LQ"))]
    files = _write(tmp_path / "g.json", posts), _write(tmp_path / "p.json", {"a": "high", "b": "middling"})
    assert _score(QUALITY[0], *files, "--task.labels", "{HQ: high, LQ: low}", "--json") == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert printed["labels"]["HQ"] == {"precision": 100.0, "recall": 100.0, "f1": 100.0, "gold": 1, "predicted": 1}
    assert printed["confusion"]["LQ"] == {"HQ": 0, "LQ": 0, "(other)": 1}
    assert "p.json: 1 of 2 predictions are none of the labels and count as wrong, first 'middling'" in err
    assert _score(QUALITY[0], *files, *QUALITY[1:]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["LQ", "0", "0", "1"]
