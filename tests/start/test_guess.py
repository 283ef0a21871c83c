"""Which task a table is taken for, by which columns, and why."""

from __future__ import annotations

import kit
import pytest

from fivetune.data.records import read_records
from fivetune.errors import ConfigError, DataError
from fivetune.start.columns import build_table, describe_column
from fivetune.start.guess import infer_task
from fivetune.tasks import load_task
from fivetune.types import RawRecord

LABELS = ("late", "refund", "login")
SENTENCE = "the parcel number {} has not come to my house yet"


def table(fields, num=60):
    return build_table("a.csv", [RawRecord({"id": f"a-{i}", **fields(i)}, f"a.csv:{i + 2}", False) for i in range(num)])


def text(i):
    return SENTENCE.format(i)


def qa(i, **more):
    return {"question": f"Where does person {i} live?", "context": f"Person {i} lives in Town {i} now.", **more}


# fields of record i -> kind, task, options, data.columns, a part of the reason
CASES = {
    "classification": (
        lambda i: {"text": text(i), "label": LABELS[i % 3]},
        ("classification", "classification", {"inputs": "{text}", "label": "label"}, {}, "3 values that repeat"),
    ),
    "several texts, names that no template can hold": (
        lambda i: {"Nr": i, "Betreff": f"Frage {i} dazu", "was: {jetzt}": text(i), "Kategorie": LABELS[i % 3]},
        (
            "classification",
            "classification",
            {"inputs": "Betreff: {Betreff} was___jetzt: {was___jetzt}", "label": "Kategorie"},
            {"was___jetzt": "was: {jetzt}"},
            "Betreff and was: {jetzt} hold text",
        ),
    ),
    "unnamed label": (
        lambda i: {
            "when": f"2024-01-{i % 28 + 1:02}",
            "remark": text(i),
            "queue": LABELS[i % 3],
            "title": f"No {i} is",
        },
        (
            "classification",
            "classification",
            {"inputs": "remark: {remark} title: {title}", "label": "queue"},
            {},
            "late (20), refund (20), login (20)",
        ),
    ),
    "extractive": (
        lambda i: qa(i, answers={"text": [f"Town {i}"], "answer_start": [9]}),
        ("extractive question answering", "squad", {}, {}, "60 of 60 answers in answers are parts of their context"),
    ),
    "extractive with open questions, German names": (
        lambda i: {"Frage": qa(i)["question"], "Kontext": qa(i)["context"], "Antwort": f"Town {i}" if i % 3 else ""},
        (
            "extractive question answering",
            "squad_v2",
            {},
            {"question": "Frage", "context": "Kontext", "answer": "Antwort"},
            "20 questions have no answer",
        ),
    ),
    "free answers": (
        lambda i: qa(i, answer=f"that person has a house somewhere else, as of {i}"),
        ("questions with free answers", "unifiedqa", {"format": "abstractive", "lower_case": False}, {}, "no parts of"),
    ),
    "no context": (
        lambda i: {"question": qa(i)["question"], "answer": f"Town {i}"},
        ("questions without a context", "squad", {"template": "question: {question}"}, {}, "there is no context"),
    ),
    "yes/no": (
        lambda i: {**qa(i), "answer": i % 2 == 0},
        ("yes/no questions", "unifiedqa", {"format": "yes_no", "lower_case": False}, {}, "are false or true"),
    ),
    "multiple choice": (
        lambda i: {"question": qa(i)["question"], "options": ["Seine", "Rhine", "Elbe"], "answer": "Rhine"},
        (
            "multiple choice",
            "unifiedqa",
            {"format": "multiple_choice", "lower_case": False},
            {"choices": "options"},
            "options a list",
        ),
    ),
    "reasoning": (
        lambda i: {"problem": f"What is {i} and 1?", "solution": f"{i} + 1 = {i + 1}\n#### {i + 1}"},
        ("reasoning with a final number", "gsm8k", {}, {"question": "problem", "answer": "solution"}, "end in ####"),
    ),
    "translation": (
        lambda i: {"translation": {"en": text(i), "de": f"das Paket Nummer {i} ist noch nicht da"}},
        ("translation", "jsonl", {"inputs": "translate English to German: {translation_en}"}, None, "languages"),
    ),
    "summarisation": (
        lambda i: {"article": text(i) * 5, "highlights": f"a parcel is late, {i}"},
        ("summarisation", "jsonl", {"inputs": "summarize: {article}", "targets": "{highlights}"}, {}, "as long as"),
    ),
    "pair": (
        lambda i: {"source": text(i), "target": f"{text(i)} please"},
        ("text to text", "jsonl", {"inputs": "{source}", "targets": "{target}"}, {}, "hold free text"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_table_is_taken_for_its_task_and_the_task_reads_it(name):
    fields, (kind, task, options, columns, reason) = CASES[name]
    found = infer_task(table(fields))
    assert (found.kind, found.task) == (kind, task)
    assert options.items() <= found.options.items()
    assert columns is None or found.columns == columns
    assert reason in found.reason
    assert load_task(found.task, found.options)


def test_a_flag_corrects_a_wrong_guess():
    both = table(lambda i: {"text": text(i), "label": LABELS[i % 3], "tone": ("good", "bad")[i % 2], "note": text(-i)})
    assert infer_task(both).options["label"] == "label"
    assert infer_task(both, given={"label": "tone"}).options["label"] == "tone"
    assert infer_task(both, given={"text": "note"}).options["inputs"] == "{note}"
    pair = infer_task(both, given={"inputs": "text", "targets": "note"})
    assert (pair.task, pair.options["targets"]) == ("jsonl", "{note}")
    assert ("classification", "it reads no inputs, which --column names") in pair.rejected
    assert infer_task(both, task="jsonl", given={"inputs": "text", "targets": "label"}).options["targets"] == "{label}"
    assert infer_task(table(CASES["extractive"][0]), task="squad_v2").task == "squad_v2"


def test_rejected_candidates_have_their_reasons():
    rejected = dict(infer_task(table(CASES["pair"][0])).rejected)
    assert rejected["classification"].startswith("source and target are named as a pair of texts")
    assert any(reason == "there is no column of questions" for reason in rejected.values())
    ids = infer_task(
        table(lambda i: {"text": text(i), "label": f"case {i}", "more": f"other words {i}"}, 60),
        task="jsonl",
        given={"inputs": "text", "targets": "label"},
    )
    assert ids.task == "jsonl"


def test_ids_and_groups_are_found():
    found = infer_task(
        table(lambda i: {"Nr": f"T{i}", "customer_id": f"C{i // 3}", "text": text(i), "label": LABELS[i % 3]}, 90)
    )
    assert (found.id_column, found.group_column, found.options["inputs"]) == ("Nr", "customer_id", "{text}")
    assert infer_task(table(CASES["classification"][0]), given={"group": "none"}).group_column is None


@pytest.mark.parametrize(
    ("fields", "num", "message"),
    [
        (lambda i: {"text": text(i), "label": "late"}, 3, r"holds 3 records\. At least 10 are needed"),
        (lambda i: {"text": text(i)}, 60, r"has one column with values, text\. Training needs inputs and what"),
        (
            lambda i: {"id_a": i, "id_b": i + 7},
            60,
            r"no task fits the columns id_a, id_b: .*not text to text: 0 columns",
        ),
        (lambda i: {"a text": text(i), "late": LABELS[i % 3]}, 60, r"the first line has 'late' where the name of a"),
        (lambda i: {"3": text(i), "late": LABELS[i % 3]}, 60, r"the first line has '3' where the name of a column"),
        (
            lambda i: {"text": text(i), "label": f"n{i}"},
            60,
            r"label has 60 different values in 60 records, so it is no",
        ),
        (
            lambda i: {"text": text(i), "label": "late"},
            60,
            r"all values of label are 'late', and a class",
        ),
    ],
)
def test_hopeless_tables_are_refused_with_advice(fields, num, message):
    with pytest.raises(DataError, match=rf"^a\.csv: .*{message}"):
        infer_task(table(fields, num))


def test_a_label_may_be_the_name_of_its_column():
    found = infer_task(table(lambda i: {"spam": ("spam", "ham")[i % 2], "message": text(i)}, 60))
    assert (found.task, found.options["label"]) == ("classification", "spam")


def test_wrong_names_of_columns_are_refused():
    two = table(CASES["classification"][0])
    with pytest.raises(ConfigError, match=r"^--column label=labl: a.csv has no column 'labl'\. Did you mean label"):
        infer_task(two, given={"label": "labl"})
    with pytest.raises(ConfigError, match=r"^--column lable=label: there is no 'lable'\. Did you mean label"):
        infer_task(two, given={"lable": "label"})


def test_columns_are_described():
    assert describe_column("d", ["2024-01-02", "2023-12-31 10:00"]).kind == "date"
    assert describe_column("n", ["1", "2,5", "-3"]).kind == "number"
    assert describe_column("e", ["", None, "nan"]).kind == "empty"
    assert not describe_column("l", [f"{i} a" for i in range(9)]).has_labels


SHARED = {
    "so_quality/raw_schema_hq_lq.train.csv.gz": "stackoverflow_quality",
    "so_quality/clean_text_3class.valid.csv.gz": "classification",
    "squad_v2/train-v2.0.first10articles.json.gz": "squad_v2",
    "squad_v1.1/train-v1.1.part44articles.json.gz": "squad",
    "squad_es_dist/training.json.gz": "unifiedqa",
    "gsm8k/test.jsonl.gz": "gsm8k",
    "bioasq/golden/5B_golden.json.gz": "bioasq_factoid",
    "bioasq/yesno/train.tsv.gz": "bioasq_yesno",
    "causalqa/wikiwhy_nocontext_600.csv.gz": "causalqa",
}


@pytest.mark.skipif(not (kit.SHARED / "data").is_dir(), reason=kit.NEEDS_SHARED)
@pytest.mark.parametrize("name", SHARED)
def test_real_data_sets_are_recognised(name):
    path = str(kit.SHARED / "data" / name)
    assert infer_task(build_table(path, read_records(path))).task == SHARED[name]
