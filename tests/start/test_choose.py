"""Which task a table is taken for, by which columns, and why; tests/start/test_layouts.py has whole layouts."""

from __future__ import annotations

import re

import kit
import pytest

from fivetune.data.readers.records import read_records
from fivetune.errors import ConfigError, DataError
from fivetune.start.choose import DoubtError, convert_record, explain_few, infer_task
from fivetune.start.columns import build_table, describe_column
from fivetune.start.roles import parse_columns
from fivetune.start.survey import Reading
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
        lambda i: {"Nr": i, "Betreff": f"Frage {i} dazu", "text: {jetzt}": text(i), "Kategorie": LABELS[i % 3]},
        (
            "classification",
            "classification",
            {"inputs": "Betreff: {Betreff} text___jetzt: {text___jetzt}", "label": "Kategorie"},
            {"text___jetzt": "text: {jetzt}"},
            "Betreff and text: {jetzt} hold text",
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
    "answers of which three in five are in the context": (
        lambda i: qa(i, answer=f"Town {i}" if i % 5 < 3 else f"that person has a house elsewhere, as of {i}"),
        ("questions with free answers", "unifiedqa", {"format": "abstractive", "lower_case": False}, {}, "no parts of"),
    ),
    "answers of which four in five are in the context": (
        lambda i: qa(i, answer=f"Town {i}" if i % 5 else f"that person has a house elsewhere, as of {i}"),
        ("extractive question answering", "squad", {}, {}, "48 of 60 answers in answer are parts of their context"),
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
            "options the choices",
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
        ("text to text", "jsonl", {"inputs": "{source}", "targets": "{target}"}, {}, "source holds what is read"),
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


def test_a_flag_chooses_another_reading():
    both = table(
        lambda i: {"text": text(i), "label": LABELS[i % 3], "tone": ("good", "bad")[i % 2], "note": text(i + 7)}
    )

    def choose(**more):
        return infer_task(both, **more)

    assert choose().options["label"] == "label"
    assert choose(given={"label": ("tone",)}).options["label"] == "tone"
    assert choose(given={"text": ("note",)}).options["inputs"] == "{note}"
    pair = choose(given={"inputs": ("text",), "targets": ("note",)})
    assert (pair.task, pair.options["targets"]) == ("jsonl", "{note}")
    assert choose(task="jsonl", given={"inputs": ("text",), "targets": ("label",)}).options["targets"] == "{label}"
    several = choose(given={"inputs": ("text", "note"), "targets": ("label",)})
    assert several.options["inputs"] == "text: {text} note: {note}"
    assert infer_task(table(CASES["extractive"][0]), task="squad_v2").task == "squad_v2"


def test_a_doubt_lists_readings_with_their_commands():
    """Two columns of labels with names that are equally usual: nothing is guessed."""
    fields = {"Subject": lambda i: f"No {i} is late", "queue": lambda i: LABELS[i % 3], "status": lambda i: "ab"[i % 2]}
    with pytest.raises(DoubtError) as caught:
        infer_task(table(lambda i: {name: make(i) for name, make in fields.items()}))
    assert [one.targets[0] for _, one in caught.value.choices] == ["queue", "status"]
    assert "  fivetune new a.csv --task classification --column text=Subject --column label=queue" in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        (lambda i: {"TEXT": text(i), "cOPN": i / 7, "cCON": i / 9}, "inputs=TEXT targets=cOPN (so of cCON)"),
        (lambda i: {"phrase": text(i), "num_statements": i % 3}, "text=phrase label=num_statements"),
        (
            lambda i: {"premise": text(i), "hypothesis": text(i + 7), "ratings": str(["CEN"[i % 3], "CE"[i % 2], "N"])},
            "text=premise text=hypothesis tags=ratings",
        ),
    ],
)
def test_columns_that_may_be_learned_are_named_where_no_task_fits(fields, flags):
    with pytest.raises(DataError) as caught:
        infer_task(table(fields))
    command = re.sub(r" (?=\w+=)", " --column ", flags)
    assert f"such as --column {command}" in str(caught.value)


@pytest.mark.parametrize("task", ["jsonl", "classification", None])
def test_a_label_that_no_task_learns_is_learned_as_text_by_other_flags(task):
    given = {"text": ("TEXT",), "label": ("cOPN",)}
    with pytest.raises(DataError, match="--task jsonl --column inputs=TEXT --column targets=cOPN"):
        infer_task(table(lambda i: {"TEXT": text(i), "cOPN": i / 7}), task=task, given=given)


def test_named_columns_are_read_whatever_new_would_take_them_for():
    rare = table(lambda i: {"Exemple": text(i), "Categoria": f"rule {i % 19}"}, 31)
    assert infer_task(rare, task="classification", given={"text": ("Exemple",), "label": ("Categoria",)}).targets
    asked = table(
        lambda i: {"reference": text(i // 2) * 5, "dialogue": text(i), "turn": f"so it is with case {i} and me"}
    )
    given = {"context": ("reference",), "question": ("dialogue",), "answer": ("turn",)}
    assert infer_task(asked, task="unifiedqa", given=given).roles == given


def test_labels_of_equal_names_are_a_doubt():
    fields = {"text": text, "label_sexist": lambda i: "ab"[i % 2], "label_category": lambda i: LABELS[i % 3]}
    with pytest.raises(DoubtError, match="label_sexist may be the label, too"):
        infer_task(table(lambda i: {name: make(i) for name, make in fields.items()}))


def test_a_doubt_names_the_columns_that_count():
    fields = {"queue": lambda i: LABELS[i % 3], "status": lambda i: "ab"[i % 2], "num_errors": lambda i: i % 4}
    with pytest.raises(DoubtError, match="in the same way: num_errors"):
        infer_task(
            table(lambda i: {"Subject": text(i), "n_words": 7 + i % 3} | {name: fields[name](i) for name in fields})
        )


def test_equal_texts_with_different_labels_are_a_doubt():
    """Each sentence occurs with several aspects, which are not among the inputs."""
    rows = table(lambda i: {"sentence": text(i // 3), "position": i, "label": LABELS[i % 3]})
    with pytest.raises(DoubtError, match="60 records have the texts of others and another label"):
        infer_task(rows)
    assert infer_task(rows, given={"label": ("label",)}).warnings


def test_names_without_a_letter_say_nothing():
    pairs = table(lambda i: {"0": text(i), "1": f"it comes on day {i} of the month"})
    with pytest.raises(DoubtError, match="--column inputs=0 --column targets=1"):
        infer_task(pairs)


def test_rows_of_parquet_with_a_word_each_have_no_line():
    words = [f"w{chr(97 + i % 26)}{chr(97 + i // 26)}" if i % 5 else "." for i in range(60)]
    records = [
        RawRecord({"token": word, "tag": "ab"[i % 2]}, f"a.parquet: row {i}", False) for i, word in enumerate(words)
    ]
    with pytest.raises(DataError, match="each record has one word of a text"):
        infer_task(build_table("a.parquet", records))


def test_many_whole_numbers_are_labels_only_by_their_name():
    assert infer_task(table(lambda i: {"essay": text(i), "label": i % 40}, 600)).task == "classification"
    found = infer_task(table(lambda i: {"essay": text(i), "score": i % 40}, 600))
    assert (found.task, found.options["step"]) == ("regression", 2)


@pytest.mark.parametrize("given", [{}, {"label": ["points"]}, {"text": ["a", "b"], "targets": ["points"]}])
def test_numbers_of_few_levels_are_learned_as_such_where_the_task_is_named(given):
    pairs = table(lambda i: {"a": text(i), "b": text(i + 1), "points": f"{i % 6}.0"}, 60)
    found = infer_task(pairs, task="regression", given=given)
    assert (found.inputs, found.targets) == (["a", "b"], ["points"])


def test_a_lone_number_that_says_nothing_of_the_text_is_learned_where_the_task_is_named():
    likes = table(lambda i: {"text": text(i), "likes": i % 4}, 60)
    assert infer_task(likes, task="regression").targets == ["likes"]


def test_a_label_of_numbers_may_be_meant_as_numbers():
    stars = infer_task(table(lambda i: {"text": text(i), "stars": i % 5}, 60))
    assert (stars.task, [one.task for one in stars.others]) == ("classification", ["regression"])
    spam = infer_task(table(lambda i: {"text": text(i), "spam": i % 2}, 60))
    assert not spam.others


def test_of_two_labels_that_say_the_same_the_words_are_learned():
    found = infer_task(table(lambda i: {"text": text(i), "label": i % 3, "label_text": LABELS[i % 3]}))
    assert found.options["label"] == "label_text"


@pytest.mark.parametrize(
    ("target", "metrics", "main"),
    [
        (lambda i: f"SELECT a FROM t WHERE b < {i}", ["exact_match", "rouge"], "exact_match"),
        (
            lambda i: f"The force on the block is found by the law of motion, so F = m * a = {i} newtons here.",
            ["rouge"],
            "rougeL_f1",
        ),
        (
            lambda i: f"def get_{i}(x):\n    # Return the sum.\n    return x + {i}",
            ["exact_match", "rouge"],
            "exact_match",
        ),
        (lambda i: f"Town {i}", ["exact_match"], "exact_match"),
        (lambda i: f"they live in the town of {i} now", ["rouge"], "rougeL_f1"),
        (lambda i: f"они живут в городе {i} сейчас", [{"name": "rouge", "words": "unicode"}], "rougeL_f1"),
    ],
)
def test_the_metric_sees_the_text(target, metrics, main):
    options = infer_task(table(lambda i: {"input": text(i), "output": target(i)})).options
    assert (options["metrics"], options["main_metric"]) == (metrics, main)


def test_the_last_answer_of_longer_chats_is_learned():
    turns = [{"role": role, "content": text(0)} for role in ("user", "assistant")]
    found = infer_task(table(lambda i: {"messages": turns * (1 + i % 2)}))
    assert found.columns == {"messages_chat": "messages.chat", "messages_answer": "messages.answer"}
    assert (found.options["inputs"], found.options["targets"]) == ("{messages_chat}", "{messages_answer}")


def test_chats_with_and_without_a_system_are_one_form():
    turns = [{"role": role, "content": text(0)} for role in ("system", "user", "assistant")]
    found = infer_task(table(lambda i: {"messages": turns[i % 3 == 0 and i > 0 :]}))
    assert found.targets == ["messages.answer"]


def test_ids_and_groups_are_found():
    reading = infer_task(
        table(lambda i: {"Nr": f"T{i}", "customer_id": f"C{i // 3}", "text": text(i), "label": LABELS[i % 3]}, 90)
    )
    assert (reading.id_column, reading.group_column, reading.options["inputs"]) == ("Nr", "customer_id", "{text}")
    assert infer_task(table(CASES["classification"][0]), given={"group": ("none",)}).group_column is None


@pytest.mark.parametrize(
    ("name", "value", "is_id"),
    [
        ("datetime", lambda i: f"2024-01-{i % 28 + 1:02} 10:{i:02}:00", False),
        ("Start_Time", lambda i: f"{i % 24:02}:{i:02}:{i % 31:02}", False),
        ("created_at", lambda i: f"Mon Apr 06 22:{i:02}:10 PDT 2009", False),
        ("timestamp", lambda i: 1_700_000_000 + 77 * i, False),
        ("created_utc", lambda i: 1.7e9 + i / 4, False),
        ("Posted", lambda i: f"2024-01-02T10:{i:02}:00Z", False),
        ("Report Date", lambda i: f"Jan {i % 28 + 1}, 20{i % 30:02}", False),
        ("price", lambda i: f"${i}.99", False),
        ("duration", lambda i: f"{i}m", False),
        ("lat", lambda i: 50 + i / 91, False),
        ("tweet_id", lambda i: 10**15 + i, True),
        ("order_time_id", lambda i: i, True),
        ("uuid", lambda i: f"{i * 7919:016x}", True),
        ("Ticket", lambda i: f"T-{i}", True),
    ],
)
def test_an_id_is_no_date_no_time_and_no_amount(name, value, is_id):
    rows = table(lambda i: {name: value(i), "text": text(i), "label": LABELS[i % 3]})
    reading = infer_task(rows, given={"label": ("label",)})
    assert reading.id_column == (name if is_id else None)


def test_a_text_that_holds_the_whole_record_is_not_read():
    """Alpaca's `text` has the instruction and the output in it."""

    def fields(i: int) -> dict[str, object]:
        output = f"they live in the town of person {i} since some years"
        return {"instruction": text(i), "input": "", "output": output, "text": f"Do: {text(i)} Answer: {output}"}

    assert infer_task(table(fields)).inputs == ["instruction"]


@pytest.mark.parametrize(
    ("fields", "num", "message"),
    [
        (lambda i: {"text": text(i)}, 60, r"has one column with values, text\. Training needs inputs and what"),
        (
            lambda i: {"id_a": i, "id_b": i + 7},
            60,
            r"no task fits the columns id_a, id_b: no column holds text",
        ),
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


def test_few_records_are_told_with_what_is_wrong_with_their_form():
    plain = explain_few(table(lambda i: {"text": text(i), "label": "late"}, 3), (), {})
    assert "holds 3 records. At least 10 are needed" in plain and plain.endswith("Collect more.")
    assert "in another form: has one column" in explain_few(table(lambda i: {"text": text(i)}, 3), (), {})
    spans = table(lambda i: {"text": text(i), "spans": [{"start": 1, "end": i}]}, 3)
    assert "--column inputs=text --column 'targets=spans.*'" in explain_few(spans, (), {})


def test_advice_never_names_the_flags_that_were_given():
    given = {"text": ("text",), "label": ("label",)}
    with pytest.raises(DataError, match=r"Give other columns than --column text=text --column label=label") as caught:
        infer_task(table(lambda i: {"text": text(i), "label": "late"}, 60), given=given)
    assert "Name the columns" not in str(caught.value)


def test_flags_that_do_not_fit_are_refused_with_what_they_name():
    given = {"question": ("text",), "choices": ("label",), "answer": ("case",)}
    with pytest.raises(DataError, match=r"label, given as choices, has 2 different values, such as 'late'"):
        infer_task(table(lambda i: {"text": text(i), "label": ("late", "soon")[i % 2], "case": i}, 60), given=given)


def test_the_example_of_a_message_works():
    unread = table(lambda i: {"Q1": f"What is {text(i)}?", "Q2": f"Who is {text(i)}?"}, 60)
    with pytest.raises(DataError) as caught:
        infer_task(unread)
    words = str(caught.value).split("such as ")[1].split(",")[0].replace("--column ", "").split()
    assert infer_task(unread, given={role: (name,) for role, name in (one.split("=") for one in words)}).targets


def test_what_is_missing_is_named():
    with pytest.raises(DataError, match=r"what the model would read is missing\. Add a column with the text"):
        infer_task(table(lambda i: {"case": i, "abuse": ("no", "yes")[i % 2]}, 60))
    with pytest.raises(DataError, match=r"sentences holds lists or objects\. .* NAME\.0\.PART"):
        infer_task(table(lambda i: {"sentences": [{"text": text(i)}] * (1 + i % 2), "sql": [f"select {i}"] * 2}, 60))
    with pytest.raises(DataError, match=r"spans holds lists as text, such as \[0, 1\]"):
        infer_task(table(lambda i: {"spans": f"[{i}, {i + 1}]", "text": text(i)}, 60))


def test_labels_and_texts_of_two_languages_are_kept_apart():
    def fields(i: int) -> dict[str, object]:
        label = ("yes", "no", "maybe")[i % 3]
        return {
            "a_en": text(i),
            "b_en": f"{text(i)} now",
            "y_en": label,
            "a_ja": f"これは第{i}番の文です",
            "b_ja": f"これは第{i}番の文でした",
            "y_ja": label[::-1],
        }

    given = {"label": ("y_ja",)}
    assert infer_task(table(fields, 60), given=given).inputs == ["a_ja", "b_ja"]


def test_a_longer_summary_is_offered_the_other_way_round():
    with pytest.raises(DoubtError) as caught:
        infer_task(table(lambda i: {"headline": text(i), "summary": f"{text(i)} {text(i + 1)} {text(i + 2)}" * 2}, 60))
    assert [(one.targets, one.kind) for _, one in caught.value.choices[:2]] == [
        (["summary"], "text to text"),
        (["headline"], "summarisation"),
    ]


def test_a_label_may_be_the_name_of_its_column():
    found = infer_task(table(lambda i: {"spam": ("spam", "ham")[i % 2], "message": text(i)}, 60))
    assert (found.task, found.options["label"]) == ("classification", "spam")


def test_wrong_names_of_columns_are_refused():
    two = table(CASES["classification"][0])
    with pytest.raises(ConfigError, match=r"^--column label=labl: a.csv has no column 'labl'\. Did you mean label"):
        infer_task(two, given={"label": ("labl",)})
    with pytest.raises(ConfigError, match=r"^--column lable=label: there is no 'lable'\. Did you mean label"):
        infer_task(two, given={"lable": ("label",)})


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


@pytest.mark.parametrize("names", [("question", "answer", "option"), ("Frage", "Lösung", "option")])
@pytest.mark.parametrize(("step", "is_shuffled"), [(0, True), (1, False)])
def test_a_right_choice_that_has_one_place_is_shuffled(names, step, is_shuffled):
    asked, learned, choice = names

    def fields(i):
        options = {f"{choice}{place}": f"{place} hats of {i}" for place in (1, 2, 3)}
        return {asked: f"What has person {i} there?", learned: options[f"{choice}{1 + step * i % 3}"], **options}

    reading = infer_task(table(fields))
    assert reading.options.get("shuffle_choices", False) == is_shuffled
    assert bool(reading.warnings) == is_shuffled


def test_a_list_given_as_a_target_is_told_with_its_form_as_text():
    found = table(lambda i: {"text": text(i), "sql": {"sel": i, "from": ["a"]}})
    with pytest.raises(DataError, match=r"sql holds objects.*--column 'targets=sql\.\*'"):
        infer_task(found, given={"inputs": ("text",), "targets": ("sql",)})
    reading = infer_task(found, given={"inputs": ("text",), "targets": ("sql.*",)})
    assert (reading.options["targets"], reading.columns) == ("{sql}", {"sql": "sql.*"})


def test_it_is_told_that_the_first_of_several_right_texts_is_learned():
    found = table(lambda i: {"text": text(i), "references": [f"{text(i)} one", f"{text(i)} two"]})
    assert infer_task(found).warnings == [
        "of the texts in each list of references the first is learned, and all count as right"
    ]


def test_a_record_on_which_a_task_fails_is_a_bad_one(monkeypatch):
    def fail(self, record, *, labelled=True):
        raise KeyError("colour")

    task = load_task("jsonl", {"inputs": "{a}", "targets": "{b}"})
    monkeypatch.setattr(type(task), "to_text", fail)
    reading = Reading("text to text", "jsonl", {"inputs": ["a"], "targets": ["b"]}, "")
    bad = []
    assert not convert_record(RawRecord({"id": "1", "a": "x", "b": "y"}, "a.csv:2"), reading, task, bad.append)
    assert bad[0].where == "a.csv:2" and "KeyError: 'colour'" in bad[0].reason


def test_a_role_of_one_column_is_given_once():
    with pytest.raises(ConfigError, match="targets is a already"):
        parse_columns(["targets=a", "targets=b"])
    assert parse_columns(["inputs=a", "inputs=b"]) == {"inputs": ("a", "b")}


THINGS = {"who": lambda i: f"Ann {i}", "what": lambda i: f"a lamp of the year {i}", "price": lambda i: i + 0.5}


def make_object(i, *names):
    return {name: THINGS.get(name, text)(i) for name in names}


# fields of record i -> the inputs of the first reading, which learns all of the last field
OBJECTS = {
    "output": (lambda i: {"input": text(i), "output": make_object(i, "who", "what")}, ["input"]),
    "gold beside facts": (
        lambda i: {"style": LABELS[i % 3], "input": text(i), "gold": {**make_object(i, "who"), "steps": ["a", "b"]}},
        ["input"],
    ),
    "an instruction": (
        lambda i: {"instruction": "Find it.", "input": text(i), "output": make_object(i, "who", "price")},
        ["instruction", "input"],
    ),
    "two labels": (lambda i: {"text": text(i), "label": {"tone": "ab"[i % 2], "topic": LABELS[i % 3]}}, ["text"]),
    "a completion": (lambda i: {"prompt": text(i), "completion": make_object(i, "who", "summary")}, ["prompt"]),
    "an expected output": (lambda i: {"input": text(i), "expected_output": make_object(i, "who", "what")}, ["input"]),
    "an extraction": (lambda i: {"document": text(i), "extraction": make_object(i, "who", "price")}, ["document"]),
    "an answer": (lambda i: {"question": text(i), "answer": make_object(i, "who", "what")}, ["question"]),
    "a response with slots": (
        lambda i: {"prompt": text(i), "response": {"intent": LABELS[i % 3], "slots": {"who": f"Ann {i}"}}},
        ["prompt"],
    ),
    "annotations": (lambda i: {"text": text(i), "annotations": make_object(i, "who", "where")}, ["text"]),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_is_learned_is_one_text_and_its_members_are_not_read(name):
    fields, inputs = OBJECTS[name]
    with pytest.raises(DoubtError) as caught:
        infer_task(table(fields))
    learned = [*fields(0)][-1]
    first = caught.value.choices[0][1]
    assert (first.targets, first.inputs) == ([f"{learned}.*"], inputs)
    assert not any(one.startswith(f"{learned}.") for _, reading in caught.value.choices for one in reading.inputs)
    assert infer_task(table(fields), given={"targets": [f"{learned}.*"], "inputs": inputs}).targets == first.targets


@pytest.mark.parametrize(
    ("fields", "target"),
    [
        (lambda i: {"question": text(i), "answer": {"value": f"Town {i}", "aliases": ["a"]}}, "answer.value"),
        (lambda i: {"input": text(i), "output": {"text": f"it is {i}", "start": i}}, "output.text"),
        (lambda i: {"translation": {"en": text(i), "de": f"das Paket {i} fehlt"}}, "translation.de"),
        (lambda i: {"id": i, "output": {"question": text(i), "answer": f"it is number {i}"}}, "output.answer"),
        (lambda i: {"text": text(i), "label": {"intent": LABELS[i % 3], "start": i}}, "label.intent"),
    ],
)
def test_an_object_of_one_text_or_of_all_columns_is_no_target(fields, target):
    assert infer_task(table(fields)).targets == [target]


def test_a_doubt_names_other_columns_as_commands_take_them():
    given = {"who": "Ann", "n": 1}
    fields = {"subject": text, "queue": lambda i: LABELS[i % 3], "status": lambda i: ("open", "shut")[i % 2]}
    nested = {"counts": lambda i: [i, 2], "notes": lambda i: [given, {**given, "n": i}], "more": lambda i: {"n": i}}
    rows = table(lambda i: {name: make(i) for name, make in {**fields, **nested}.items()})
    with pytest.raises(DoubtError) as caught:
        infer_task(rows)
    assert str(caught.value).splitlines()[-1].endswith("in the same way: counts.*, notes.*, more.*.")
    for name in nested:
        assert infer_task(rows, given={"inputs": ["subject"], "targets": [f"{name}.*"]}).task == "jsonl"


@pytest.mark.parametrize("names", [("type1", "type2", "type3"), ("level_a", "level_b", "level_c")])
def test_numbered_facts_beside_a_list_of_choices_are_no_choices(names):
    """The answers are letters, which the numbered columns could be chosen by, too."""
    facts = dict.fromkeys(names, LABELS)
    choices = [f"Town {number}" for number in range(4)]
    rows = table(
        lambda i: {
            "question": text(i), "options": [f"{one}, {i}" for one in choices], "answer": "ABC"[i % 3],
            **{name: values[i % 2] for name, values in facts.items()},
        }
    )  # fmt: skip
    assert infer_task(rows).roles["choices"] == ["options"]


@pytest.mark.parametrize(("name", "own", "columns"), [("Id", "5{}", 3), ("ID", "5{}", 3), ("Id", "x{}", 4)])
def test_an_id_in_capitals_is_one_column(name, own, columns):
    rows = [{"id": f"5{i}", name: own.format(i), "text": text(i), "label": LABELS[i % 3]} for i in range(30)]
    found = build_table("a.csv", [RawRecord(row, f"a.csv:{i}", True) for i, row in enumerate(rows)])
    assert len(found.columns) == columns and ("id" in found.columns) == (columns == 4)


@pytest.mark.parametrize("first", ["This ship is too small\tDieses Schiff ist klein\t", "A ship for us\t\tEin Schiff"])
def test_a_first_line_with_an_empty_cell_may_be_a_record(tmp_path, first):
    path = tmp_path / "t.tsv"
    path.write_text("\n".join([first, *(f"This hat has number {i}\tDieser Hut hat Nummer {i}\t" for i in range(20))]))
    with pytest.raises(DoubtError) as doubt:
        infer_task(build_table(str(path), read_records(str(path), on_bad=lambda bad: None)))
    table, reading = doubt.value.choices[0]
    assert (table.header, table.num_records) == (["column1", "column2", "column3"], 21)
    assert (reading.inputs, reading.targets) == (["column1"], ["column2"])
    assert all(name for _, one in doubt.value.choices for name in (*one.inputs, *one.targets))
