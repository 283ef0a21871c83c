"""fivetune inspect: what is counted is true, bad records never stop it, and the page says the same as the JSON."""

from __future__ import annotations

import json
import random
from itertools import combinations

import kit
import pytest
import yaml

from fivetune.cli import main
from fivetune.data.characters import measure_coverage
from fivetune.data.duplicates import find_near_duplicates
from fivetune.data.limits import build_input_limit_table, measure_lengths
from fivetune.data.readers.records import read_records
from fivetune.data.store.encode import LengthLimits, encode
from fivetune.model.tokenizer import load_tokenizer
from fivetune.tasks.squad_v2 import SQuADV2
from fivetune.types import TextExample


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return load_tokenizer(None, tokenizer_folder)


def jaccard(one: str, other: str) -> float:
    a, b = ({tuple(words[i : i + 3]) for i in range(len(words) - 2)} for words in (one.split(), other.split()))
    return len(a & b) / len(a | b)


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 1.0])
def test_near_texts_are_all_found_and_no_others(threshold):
    draw = random.Random(0)
    texts = [" ".join(draw.choices("abcdefgh", k=draw.randint(3, 20))) for _ in range(40)]
    for text in texts[:40]:
        words = text.split()
        texts.append(" ".join([*words, draw.choice("abcdefgh")][draw.randint(0, 1) :]))
    expected = {j for i, j in combinations(range(len(texts)), 2) if jaccard(texts[i], texts[j]) >= threshold}
    assert {one.row for one in find_near_duplicates(texts, threshold=threshold)} == expected
    across = {j for i in range(40) for j in range(40) if jaccard(texts[i], texts[40 + j]) >= threshold}
    assert {one.row for one in find_near_duplicates(texts[40:], texts[:40], threshold=threshold)} == across


@pytest.mark.parametrize("limit", range(8, 40))
def test_limits_cut_what_training_cuts(tokenizer, tmp_path, limit):
    records = read_records(str(kit.squad_file(tmp_path / "train.json")))
    examples = [example for record in records if (example := SQuADV2().to_text(record))]
    examples.append(TextExample("behind", "say: Ann has a hat. Who? Ann", "Ann", ("Ann",), (5, 19)))
    targets = [example.targets for example in examples]
    tokens = list(encode(tokenizer, examples, targets, limits=LengthLimits(limit)))
    row = next(
        row
        for row in build_input_limit_table(measure_lengths(tokenizer, examples, targets), limit)
        if row["limit"] == limit
    )
    assert row["num_cut"] == sum(one.num_clipped_inputs > 0 for one in tokens)
    assert row["num_answers_lost"] == sum(one.answer_clipped for one in tokens)


def test_texts_without_a_question_are_inputs_and_questions_alone_lack_no_context(tmp_path, tokenizer_folder, capsys):
    pair = json.dumps({"id": "p1", "inputs": "Ann has a red hat.", "targets": "yes"}) + "\n"
    asked = json.dumps({"id": "q1", "question": "What has Ann?", "answers": ["a hat"]}) + "\n"
    tasks = {"jsonl": (pair, ()), "squad": (asked, ("--task.template", "question: {question}"))}
    found = {}
    for task, (record, options) in tasks.items():
        path = tmp_path / f"{task}.jsonl"
        path.write_text(record)
        words = ("inspect", str(path), "--task", task, "--tokenizer", str(tokenizer_folder), "--against", str(path))
        assert main([*words, *options, "--json"]) == 0
        found[task] = json.loads(capsys.readouterr().out)
    assert found["jsonl"]["leakage"].keys() - {"id"} == {"input"}
    assert found["squad"]["sets"]["train"]["answers"]["num_questions"] == 0


def test_lost_characters_are_named(tokenizer):
    found = measure_coverage(tokenizer, ["a 中 b", "中中", "red\n", "red"])
    assert [(one.character, one.num_times, one.num_texts) for one in found.lossy] == [("中", 3, 2), ("\n", 1, 1)]
    assert (found.num_texts_hit, found.num_texts) == (2, 4)  # a line end becomes a space, as in all of T5


def question(number: int, asked: str, context: str, *answers: str) -> str:
    return json.dumps({"id": f"q{number}", "question": asked, "context": context, "answers": list(answers)})


TRAIN = (
    question(1, "What has Ann?", "Ann has a red hat.", "red hat"),
    question(2, "What has  ann?", "Ann has a red hat.", "coat"),  # the same inputs, another answer, not in the context
    question(3, "What has Bob?", "Bob has a <b>blue</b> coat.", "blue"),
    '{"question": "Who?", "id": "q4"}',
    '{"broken',
    '{"id": "q5", "question": "Who has it?", "context": "Nobody."}',
)
EVAL = (question(9, "What has Ann?", "Ann has a red hat.", "hat"), question(8, "Why?", "So.", "So"))


@pytest.fixture
def words(tmp_path, tokenizer_folder):
    (tmp_path / "train.jsonl").write_text("\n".join(TRAIN) + "\n")
    (tmp_path / "dev.jsonl").write_text("\n".join(EVAL) + "\n")
    return [
        "inspect",
        str(tmp_path / "train.jsonl"),
        "--task",
        "squad_v2",
        "--tokenizer",
        str(tokenizer_folder),
        "--against",
        str(tmp_path / "dev.jsonl"),
    ]


def test_everything_is_counted(words, capsys):
    assert main([*words, "--json", "--data.max_input_tokens", "9"]) == 0
    facts = json.loads(capsys.readouterr().out)
    train, leakage = facts["sets"]["train"], facts["leakage"]
    assert [train[f"num_{name}"] for name in ("read", "skipped", "unlabelled", "examples")] == [6, 2, 1, 4]
    assert train["skipped"][0]["where"].endswith("train.jsonl:4")
    assert train["duplicates"]["inputs with different answers"]["shown"][0]["ids"] == ["q1", "q2"]
    assert train["answers"]["num"] == 1 and train["answers"]["shown"][0]["id"] == "q2"
    assert train["counts"]["question word"]["common"] == [["what", 3], ["who", 1]]
    assert [leakage[kind]["num_exact"] for kind in ("question", "context", "question and context")] == [1, 1, 1]
    assert any(one["num_cut"] and len(one["inputs"]) == 2 for one in facts["examples"])


def test_terminal_and_page_say_it(words, tmp_path, capsys):
    assert main([*words, "--html", str(tmp_path / "page.html")]) == 0
    told = capsys.readouterr().out
    page = (tmp_path / "page.html").read_text().replace("&nbsp;", " ").replace("\u00a0", " ")
    for text in (
        "2 of 6 records cannot be used",
        "eval shares the question and context with train in 1 example (50.0 %)",
    ):
        assert text in told and text in page
    assert "question: What has Ann? context: Ann has a red hat.</s>" in told
    assert "&lt;b&gt;blue&lt;/b&gt;" in page.replace(" ", "") and "<b>blue" not in page


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--optimizer.lr", "1"], "--optimizer.lr: not a setting of inspect"),
        (["--near", "3"], "--near: 3.0 is not a similarity"),
        (["--task.no_anser", "x"], "Did you mean no_answer"),
    ],
)
def test_mistakes_are_named(words, capsys, more, message):
    assert main([*words, *more]) == 2
    assert message in capsys.readouterr().err


def test_what_changes_the_meaning_of_scores_is_found(tmp_path, tokenizer_folder, capsys):
    """Faults C4, C8, C12: blank golds, ids of a translation, wrong offsets, languages, answers that are all wanted."""
    ids = ["56be4db0acb8001400a502ec", "56be4db0acb8001400a502ed"]
    rows = [
        {"question": "谁？", "context": "罗洛来了", "answers": {"text": ["罗洛", ""], "answer_start": [0, -1]}},
        {"question": "谁来？", "context": "安来了", "answers": {"text": ["安", "来"], "answer_start": [1, 1]}},
    ]
    for name, more in (("train", {}), ("dev", {"context": "另一个安来了罗洛"})):
        table = [{"id": id, **row, **more} for id, row in zip(ids, rows, strict=True)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    words = ["inspect", str(tmp_path / "train.jsonl"), "--task", "squad", "--tokenizer", str(tokenizer_folder)]
    assert main([*words, "--against", str(tmp_path / "dev.jsonl")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 questions have a blank gold answer beside others: predicting nothing scores exact 50.0" in printed
    assert "answer_start 1 points at '来', the answer is '安'" in printed
    assert "Set task.language: zh" in printed
    assert "1 question with several gold answers without a common word" in printed
    assert "eval shares the id with train in 2 examples" in printed


def test_labels_in_several_forms_and_placeholders_of_empty_cells_are_named(tmp_path, tokenizer_folder, capsys):
    kinds = ["late", "Late", "late", "refund", "None", "None", "N/A", "none"]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"text {i},{kind}\n" for i, kind in enumerate(kinds)))
    words = ["inspect", str(tmp_path / "a.csv"), "--task", "classification", "--tokenizer", str(tokenizer_folder)]
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    told = (
        "count as one label: 'late' (2 records), 'Late' (1); 'None' (2 records), 'none' (1); rename",
        "train: 3 records have a label that programs write for an empty cell: 'None' (2 records), 'N/A' (1); it counts "
        "as a label.",
    )
    assert [printed.count(sentence) for sentence in told] == [1, 1]
    assert "train: 4 values of class. class examples share forms in the data" in printed
    assert "late 3 37.5 % 'late' (2), 'Late' (1) None 3 37.5 % 'None' (2), 'none' (1)" in printed
    assert main([*words, "--task.labels", "{none: none, late: late, refund: refund, N/A: other}"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert [printed.count(sentence) for sentence in told] == [1, 1]


def test_answers_that_stand_for_empty_cells_are_named_but_not_those_of_a_context(tmp_path, tokenizer_folder, capsys):
    rows = [{"inputs": "a", "targets": "null"}, {"inputs": "NaN", "targets": "Ann"}]
    asked = {"question": "Who?", "context": "Null or NaN", "answers": {"text": ["NaN"], "answer_start": [8]}}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.jsonl").write_text(json.dumps(asked) + "\n")
    tokenizer = ["--tokenizer", str(tokenizer_folder)]
    assert main(["inspect", str(tmp_path / "a.jsonl"), "--task", "jsonl", *tokenizer]) == 0
    told = "1 record has an answer that programs write for an empty cell: 'null' (1 record); it counts as an answer."
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count(f"train: {told}") == 1
    assert printed.count("1 record has an input that programs write for an empty cell: 'NaN' (1 record)") == 1
    assert main(["inspect", str(tmp_path / "b.jsonl"), "--task", "squad", *tokenizer]) == 0
    assert "empty cell" not in " ".join(capsys.readouterr().out.split())


def test_a_classification_gets_its_recipe_and_a_word_on_uneven_labels(tmp_path, tokenizer_folder, capsys):
    rows = "".join(f"text {i},{'late' if i else 'refund'}\n" for i in range(20))
    (tmp_path / "a.csv").write_text(f"body,kind\n{rows}")
    words = ["inspect", str(tmp_path / "a.csv"), "--task", "classification", "--tokenizer", str(tokenizer_folder)]
    assert main([*words, "--task.inputs", "{body}", "--task.label", "kind"]) == 0
    printed = capsys.readouterr().out
    assert "labels are uneven: late has 95.0 % of 20 examples, refund 5.0 %" in " ".join(printed.split())
    recipe = yaml.safe_load(printed.partition("A recipe for this data:\n")[2])
    assert recipe["task"] == {"name": "classification", "inputs": "{body}", "label": "kind"}
    assert recipe["data"] == {"train": [str(tmp_path / "a.csv")], "eval_share": 0.1}


def test_merged_labels_are_those_of_the_training_set(tmp_path, tokenizer_folder, capsys):
    """The table counted "Yes" and "yes" apart, below the sentence that they are one label."""
    for name, kinds in (("train", ["Yes"] * 10 + ["yes"] * 5 + ["no"]), ("dev", ["yes", "yes", "No", "new"])):
        rows = "".join(f"{name} text {i},{kind}\n" for i, kind in enumerate(kinds))
        (tmp_path / f"{name}.csv").write_text("text,label\n" + rows)
    words = ["inspect", str(tmp_path / "train.csv"), "--against", str(tmp_path / "dev.csv"), "--task", "classification"]
    assert main([*words, "--tokenizer", str(tokenizer_folder), "--json"]) == 0
    found = {name: one["counts"]["class"] for name, one in json.loads(capsys.readouterr().out)["sets"].items()}
    assert (found["train"]["common"], found["train"]["num_values"]) == ([["Yes", 15], ["no", 1]], 2)
    assert found["train"]["forms"] == {"Yes": [["Yes", 10], ["yes", 5]]}
    assert found["eval"]["common"] == [["Yes", 2], ["no", 1], ["new", 1]]
    assert found["eval"]["forms"] == {"Yes": [["yes", 2]], "no": [["No", 1]]}


def test_a_recipe_is_inspected_with_its_own_task_data_and_model(tmp_path, capsys, tokenizer_folder):
    rows = "".join(f"a hat {i},{'good' if i % 2 else 'bad'}\n" for i in range(9))
    (tmp_path / "a.csv").write_text("text,tone\n" + rows)
    recipe = {
        "model": {"path": str(tokenizer_folder)},
        "task": {"name": "classification", "inputs": "it says: {text}", "label": "tone"},
        "data": {"train": str(tmp_path / "a.csv")},
    }
    (tmp_path / "a.yaml").write_text(json.dumps(recipe))
    assert main(["inspect", str(tmp_path / "a.yaml")]) == 0
    assert "it says: a hat 0" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "a.csv")]) == 2
    assert "--task: is needed" in capsys.readouterr().err


def test_without_the_model_of_a_recipe_no_characters_and_cuts_are_told(tmp_path, capsys):
    rows = "".join(f"что {i} такое,{'да' if i % 2 else 'нет'}\n" for i in range(9))
    (tmp_path / "a.csv").write_text("text,label\n" + rows)
    recipe = {
        "model": {"path": "google/mt5-small"},
        "task": {"name": "classification"},
        "data": {"train": str(tmp_path / "a.csv"), "max_target_tokens": 1},
    }
    (tmp_path / "a.yaml").write_text(json.dumps(recipe))
    assert main(["inspect", str(tmp_path / "a.yaml")]) == 0
    told = capsys.readouterr().out
    assert "google/mt5-small, the recipe's model, is not on this machine" in told and "что 0 такое" in told
    assert "does not keep" not in told and "target tokens cuts" not in told and "<unk>" not in told
    assert main(["inspect", str(tmp_path / "a.yaml"), "--tokenizer", "t5-nano"]) == 0
    assert "does not keep" in capsys.readouterr().out
