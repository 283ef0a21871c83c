"""BioASQ factoid questions: snippets in, one ranked answer out, official measures, from golden files to a score."""

from __future__ import annotations

import json
import re

import kit
import pytest

from fivetune import cli, rundir
from fivetune.data.readers.records import read_records
from fivetune.errors import DataError
from fivetune.rundir.records import Prediction
from fivetune.tasks.bioasq_factoid import BioASQFactoid
from fivetune.training.answers.merge import merge_passages
from fivetune.training.run import train
from fivetune.types import RawRecord

GOLDEN = kit.SHARED / "data" / "bioasq" / "golden"
TASK = BioASQFactoid()
HEX = "54f35a23c2a4ef3f6b000007"
QUESTION = {
    "id": "54f3",
    "type": "factoid",
    "body": "What has Ann?",
    "snippets": [{"text": "Ann has a Red hat."}, {"text": "Bob has a blue coat."}],
    "exact_answer": [["red hat", "hat"]],
}


def _record(**changes):
    fields = {**QUESTION, **changes}
    return RawRecord({key: value for key, value in fields.items() if value is not ...}, "6B1_golden.json:3")


def test_one_example_for_each_snippet():
    examples = TASK.to_text(_record())
    assert [(e.id, e.group, e.references) for e in examples] == [
        ("54f3_001", "54f3", ("red hat", "hat")),
        ("54f3_002", "54f3", ("red hat", "hat")),
    ]
    assert examples[1].inputs == "question: What has Ann? context: Bob has a blue coat."
    assert [TASK.train_targets(e) for e in examples] == [("Red hat",), ()]  # as the snippet writes it, or not at all


def test_other_types_are_left_out():
    assert TASK.to_text(_record(type="yesno", exact_answer="yes")) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exact_answer": ...}, r"golden\.json:3: there is no column 'exact_answer'.*fivetune predict"),
        ({"exact_answer": [[7]]}, r"golden\.json:3: exact_answer is \[\[7\]\]"),
        ({"snippets": []}, r"golden\.json:3: the question has no snippets"),
        ({"type": ...}, r"golden\.json:3: there is no column 'type'"),
    ],
)
def test_bad_questions(changes, message):
    with pytest.raises(DataError, match=message):
        TASK.to_text(_record(**changes))


def test_blank_synonyms_are_dropped_and_no_list_is_no_answer(tmp_path, capsys):
    """Fault C5: official golden files of later years were refused for one blank synonym."""
    [first, _] = TASK.to_text(_record(exact_answer=[["PITX1", ""]]))
    assert (first.references, first.meta["num_blank_synonyms"]) == (("PITX1",), 1)
    for nothing in ([], [[]], [[" "]]):
        assert {e.references for e in TASK.to_text(_record(exact_answer=nothing))} == {("",)}
        assert [TASK.train_targets(e) for e in TASK.to_text(_record(exact_answer=nothing))] == [(), ()]
    golden = {"questions": [{**QUESTION, "exact_answer": [["hat", ""]]}, {**QUESTION, "id": "54f4", "type": "list"}]}
    (tmp_path / "golden.json").write_text(json.dumps(golden))
    (tmp_path / "ours.json").write_text(json.dumps({"54f3": "hat", "54f4": "x", "54f5": "x"}))
    assert cli.main(["score", "bioasq_factoid", str(tmp_path / "golden.json"), str(tmp_path / "ours.json")]) == 0
    words = capsys.readouterr().err
    assert "1 questions have blank synonyms among their gold answers; they are dropped" in words
    assert "1 ids are of records that the task leaves out, first 54f4; not scored" in words  # C12
    assert "1 ids are not in the data, first 54f5; left out" in words


def test_rows_of_one_question_are_scored_as_one(tmp_path, model_folder):
    """Part D: nothing noticed when BioASQ was scored by snippet instead of by question."""
    rows = [
        {"id": f"{HEX}_{i:03}", "question": "Who?", "context": f"Ann has a {c} hat.", "answers": ["red hat"]}
        for i, c in enumerate(("red", "blue", "green"))
    ]
    (tmp_path / "rows.json").write_text(json.dumps({"data": rows}))
    run = train(
        kit.recipe(
            tmp_path,
            model_folder,
            task={"name": "bioasq_factoid"},
            data__train=str(tmp_path / "rows.json"),
            data__eval=str(tmp_path / "rows.json"),
            train__num_steps=1,
        )
    )
    assert run.evals[-1].num_examples == run.evals[-1].scores["total"] == 1


def test_ids_of_biobert_rows_name_their_question():
    row = {"id": f"{HEX}:12", "question": "Who?", "context": "Rollo came.", "answers": {"text": ["Rollo"]}}
    for own, group in ((f"{HEX}:12", HEX), (f"{HEX}_002", HEX), ("q_1", "q_1"), ("q_2", "q_2")):
        assert TASK.to_text(RawRecord({**row, "id": own}, "a.json:1")).group == group
    with pytest.raises(DataError, match=r"answers\[0\] is null"):
        TASK.to_text(RawRecord({**row, "answers": {"text": [None]}}, "a.json:1"))
    with pytest.raises(DataError, match="fivetune score bioasq_factoid"):
        TASK.to_text(RawRecord({key: value for key, value in row.items() if key != "answers"}, "a.json:1"))


@pytest.mark.parametrize("form", ["biobert", "golden"])
def test_a_question_is_scored_once_whatever_its_snippets(form, tmp_path, capsys):
    """Two questions of 9 and 1 snippets: the bootstrap draws questions, so its interval is from 0 to 100."""
    numbers = {"a" * 24: 9, "b" * 24: 1}
    if form == "biobert":
        answers = {"text": ["Rollo"], "answer_start": [0]}
        rows = [
            {"id": f"{name}_{i:03}", "question": "Who?", "context": f"Rollo {i}.", "answers": answers}
            for name, number in numbers.items()
            for i in range(1, number + 1)
        ]
    else:
        rows = [
            {**QUESTION, "id": name, "exact_answer": [["Rollo"]], "snippets": [{"text": f"Rollo {i}."}] * number}
            for i, (name, number) in enumerate(numbers.items())
        ]
    (tmp_path / "gold.json").write_text(json.dumps({"questions": rows} if form == "golden" else rows))
    (tmp_path / "said.json").write_text(json.dumps({"a" * 24: "Rollo", "b" * 24: "Ann"}))
    command = ["score", "bioasq_factoid", str(tmp_path / "gold.json"), str(tmp_path / "said.json"), "--json"]
    assert cli.main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_examples"], found["scores"]["total"], found["scores"]["strict_accuracy"]) == (2, 2, 50)
    assert found["intervals"]["strict_accuracy"] == [0, 100]


def test_ranked_answers_of_several_passages_are_shares_of_one_whole():
    """0.9 + 0.8 + 0.3 of three passages, of which two have the same answer: 0.9 / 1.2 and 0.3 / 1.2."""
    passages = [
        Prediction(id=f"q_{i}", prediction=text, confidence=sure)
        for i, (text, sure) in enumerate([("Rolf", 0.3), ("Rollo", 0.8), ("rollo", 0.9), ("", 0.95)])
    ]
    merged = merge_passages(passages, question="q", ranked=True)
    assert [(one.text, round(one.score, 9)) for one in merged.candidates] == [("rollo", 0.75), ("Rolf", 0.25)]
    assert (merged.prediction, merged.confidence) == ("rollo", merged.candidates[0].score)


def test_no_answer_in_any_window_is_as_sure_as_in_the_likeliest_one():
    passages = [Prediction(id="q", confidence=sure, no_answer_score=sure) for sure in (0.9, 0.6, 0.7)]
    merged = merge_passages(passages, question="q", ranked=False)
    assert (merged.prediction, merged.confidence, merged.no_answer_score) == ("", 0.6, 0.6)


@pytest.mark.skipif(not GOLDEN.exists(), reason=kit.NEEDS_SHARED)
def test_all_golden_years_load_whole():
    """Year 4 holds a factoid question whose gold answer is a blank: it counts, nobody can be right."""
    counted = {}
    for path in sorted(GOLDEN.iterdir()):
        found = [TASK.to_text(record) for record in read_records(str(path))]
        counted[path.name[:2]] = counted.get(path.name[:2], 0) + sum(map(bool, found))
    assert counted == {"4B": 161, "5B": 150, "6B": 161, "8B": 151}


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    path = tmp_path_factory.mktemp("golden") / "golden.json"
    path.write_text(json.dumps({"questions": [QUESTION, {**QUESTION, "id": "54f4", "exact_answer": ["blue coat"]}]}))
    return path


@pytest.mark.slow
def test_ranked_answers_from_training_to_score(golden, tmp_path, model_folder, capsys):
    run = train(
        kit.recipe(
            tmp_path,
            model_folder,
            task={"name": "bioasq_factoid"},
            data__train=str(golden),
            data__eval=str(golden),
            eval__num_beams=4,
            eval__num_candidates=3,
        )
    )
    assert run.evals[-1].num_examples == 2
    assert {"strict_accuracy", "lenient_accuracy", "mrr", "f1"} <= set(run.evals[-1].scores)
    lines = rundir.read_run(tmp_path / "run").predictions["eval-6"]
    assert all(line.num_passages == 2 and len(line.candidates) <= 5 for line in lines)
    assert all(sum(candidate.score for candidate in line.candidates) <= 1 + 1e-9 for line in lines)
    assert cli.main(["predict", str(tmp_path / "run"), "--input", str(golden)]) == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == ["54f3", "54f4"]


@pytest.mark.parametrize(
    "answers",
    [
        {
            "questions": [
                {"id": "54f3", "exact_answer": [["x"], ["hat"]]},
                {"id": "54f4", "exact_answer": [["blue coat"]]},
            ]
        },
        {"54f3": ["x", "Hat"], "54f4": "blue coat"},
        {
            "username": "u",
            "questions": [
                {"id": "54f3", "exact_answer": [["x"], ["hat"]]},
                {"id": "54f4", "exact_answer": [["Blue coat"]]},
            ],
        },
    ],
)
def test_score_reads_rankings(golden, tmp_path, capsys, answers):
    (tmp_path / "system.json").write_text(json.dumps(answers))
    assert cli.main(["score", "bioasq_factoid", str(golden), str(tmp_path / "system.json"), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])["scores"]
    assert (scores["strict_accuracy"], scores["lenient_accuracy"], scores["mrr"]) == (50.0, 100.0, 75.0)


def test_snippets_are_not_needed_to_score(tmp_path, capsys):
    for name, content in (
        ("golden.json", {"questions": [{**QUESTION, "snippets": []}]}),
        ("ours.json", {"54f3": "hat"}),
    ):
        (tmp_path / name).write_text(json.dumps(content))
    assert cli.main(["score", "bioasq_factoid", str(tmp_path / "golden.json"), str(tmp_path / "ours.json")]) == 0
    assert re.search(r"strict_accuracy +100\.00 ", capsys.readouterr().out)
