"""Which reading of a table is taken: the layouts of published data sets, doubts, and the commands that settle them."""

from __future__ import annotations

import shlex

import pytest

from fivetune.errors import DataError
from fivetune.start.choose import DoubtError, infer_task
from fivetune.start.columns import RawTable, build_table
from fivetune.start.roles import find_language, parse_columns
from fivetune.start.survey import TARGET_ROLES, Reading
from fivetune.types import RawRecord
from tests.start.layouts import LAYOUTS, make_rows


def make_table(layout: str) -> RawTable:
    records = [
        RawRecord({**row, "id": str(row.get("id", f"a-{number}"))}, f"a.csv:{number + 2}", "id" in row)
        for number, row in enumerate(make_rows(layout))
    ]
    return build_table("a.csv", records)


def describe(reading: Reading) -> str:
    task = " ".join(filter(None, (reading.task, str(reading.options.get("format", "")))))
    return f"{task}: {' '.join(reading.targets)} < {' '.join(reading.inputs)}"


def find(table: RawTable) -> Reading | DoubtError | DataError:
    try:
        return infer_task(table)
    except DataError as error:
        return error


def find_doubt(name: str) -> DoubtError:
    """Find the doubt of a layout."""
    found = find(make_table(LAYOUTS[name][0]))
    assert isinstance(found, DoubtError), str(found)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read_as_its_users_mean_it_or_doubted(name: str) -> None:
    layout, expected = LAYOUTS[name]
    table = make_table(layout)
    found = find(table)
    if isinstance(found, DoubtError):
        assert expected == "?", str(found)
        readings = [one for _, one in found.choices]
    elif isinstance(found, DataError):
        assert expected == "!", str(found)
        readings = []
    else:
        assert describe(found) == expected
        readings = [found, *found.others]
    if "in two languages" in name and expected == "?":  # none is read with the columns of another
        for reading in readings:
            languages = {find_language(column) for column in (*reading.inputs, *reading.targets)}
            assert len(languages - {None}) < 2
    for reading in readings:  # the flags that are printed for a reading give it
        if reading.roles.keys() & TARGET_ROLES.keys():
            settled = infer_task(table, task=reading.task, given=reading.roles)
            assert describe(settled) == describe(reading)
            assert settled.options == reading.options


FAQS = {
    "a FAQ in Romanian": "jsonl: raspuns < intrebare",
    "a FAQ in Estonian": "jsonl: vastus < küsimus",
    "a FAQ with names that say nothing": "jsonl: col2 < col1",
    "titles that ask": "jsonl: paragraphs < title",
    "titles that ask of a post": "jsonl: Body < Title",
    "a FAQ in Czech, answers first": "unifiedqa abstractive: odpoved < otazka",
}


@pytest.mark.parametrize("name", FAQS)
def test_the_answers_of_a_faq_are_learned_by_one_of_the_first_two_readings(name: str) -> None:
    found = find_doubt(name)
    assert FAQS[name] in [describe(one) for _, one in found.choices[:2]]


def test_of_two_pairs_the_longer_one_is_read_or_both() -> None:
    shown = [describe(one) for _, one in find_doubt("crowdsourced pairs").choices]
    longer, shorter = "INPUT:query1 INPUT:query2", "INPUT:diff1 INPUT:diff2"
    assert shown[:2] == [f"classification: OUTPUT:result < {names}" for names in (longer, f"{shorter} {longer}")]


WORLD = {
    "German": "Aufgabe Lösung Kommentar Kategorie Kurzfassung",
    "German without umlauts": "Frage Loesung Nachricht Klasse Zusammenfassung",
    "French": "Question Réponse Commentaire Catégorie Résumé",
    "French without accents": "question reponse avis categorie resume",
    "Spanish": "Pregunta Respuesta Reseña Categoría Resumen",
    "Italian": "domanda risposta commento etichetta riassunto",
    "Portuguese": "Questão Resposta comentário rótulo resumo",
    "Dutch": "vraag antwoord bericht categorie samenvatting",
    "Polish": "pytanie odpowiedź opinia etykieta streszczenie",
    "Turkish": "SORU Yanıt yorum SINIF özet",
    "Russian": "Вопрос Ответ Отзыв Категория Резюме",
    "Vietnamese": "câu_hỏi đáp_án bình_luận nhãn tóm_tắt",
    "Vietnamese without accents": "cau_hoi cau_tra_loi van_ban nhan tom_tat",
    "Indonesian": "pertanyaan jawaban ulasan kategori ringkasan",
    "Chinese": "题目 参考答案 评论内容 情感标签 摘要",
    "Japanese": "質問文 回答 レビュー本文 カテゴリー 要約",
    "Korean": "질문 답변 리뷰내용 감정라벨 요약문",
    "Arabic": "السؤال الإجابة النص التصنيف الملخص",
    "Persian": "پرسش پاسخ متن برچسب خلاصه",
}


@pytest.mark.parametrize("language", WORLD)
def test_names_in_other_languages_say_what_columns_are(language: str) -> None:
    question, answer, text, label, summary = WORLD[language].split()
    layouts = {
        f"{question}=question | {answer}=count": f"jsonl: {answer} < {question}",
        f"{text}=sentence | {label}=three": f"classification: {label} < {text}",
        f"{text}=long | {summary}=sentence": f"jsonl: {summary} < {text}",
    }
    for layout, expected in layouts.items():
        found = find(make_table(layout))
        assert isinstance(found, Reading), str(found)
        assert describe(found) == expected


def test_numbers_that_differ_are_ids_only_if_they_ascend_or_are_named_so() -> None:
    draw = "numero=hidden | tekst uten navn=question | hjelp=sentence"
    assert isinstance(find(make_table(draw)), DoubtError)
    assert isinstance(find(make_table(draw.replace("hidden", "row"))), Reading)


def test_positive_and_negative_are_listed_before_other_labels_without_a_known_name() -> None:
    found = find_doubt("opinions beside other labels")
    assert "classification: valencia < texto" in [describe(one) for _, one in found.choices]


@pytest.mark.parametrize(
    ("name", "readings"),
    [
        (
            "attributes, one called a category",
            ["classification: Category < description", "tags: Look Wearer Category < description"],
        ),
        ("attributes, one called a type", ["classification: Type < text", "tags: Type Look < text"]),
        (
            "two labels and two forms of a text",
            ["classification: category < content", "classification: sentiment < content"],
        ),
        (
            "texts in several degrees of detail",
            ["jsonl: title < juniorDescription", "jsonl: juniorDescription < seniorDescription"],
        ),
        ("a quiz of categories with a hint", ["jsonl: answer < question", "classification: category < question"]),
    ],
)
def test_a_doubt_lists_each_target_before_variants(name: str, readings: list[str]) -> None:
    found = find_doubt(name)
    assert {*readings} <= {describe(one) for _, one in found.choices}
    command = next(line for line in str(found).splitlines() if readings[1].split(":")[0] in line and "--task" in line)
    if readings[1].startswith("tags"):
        assert f"--column tags={readings[1].split(' <')[0].removeprefix('tags: ').replace(' ', ',')}" in command


def test_columns_of_words_that_are_named_as_labels_are_said_to_hold_labels() -> None:
    table = make_table(LAYOUTS["attributes, one called a category"][0])
    found = infer_task(table, task="tags", given={"tags": ["Look", "Wearer", "Category"]})
    assert "hold labels" in found.reason and "0 or 1" not in found.reason


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("a post and its answer", "jsonl: answer < title body"),
        ("a post in HTML and its answer", "jsonl: answer < question_title question_body"),
        ("the label of a model", "classification: ground_truth < claim"),
        ("exams with several right answers", "unifiedqa multiple_choice: answer < question A B C D"),
        ("a gold text beside outputs", "jsonl: Truth < Source"),
        ("a gold translation beside a system's", "jsonl: gold < source"),
        ("what a label comes from", "classification: ground_truth < text"),
        ("exams with true and false", "unifiedqa multiple_choice: answer < question A B C D"),
    ],
)
def test_a_doubt_lists_what_is_most_likely_first(name: str, first: str) -> None:
    found = find_doubt(name)
    assert describe(found.choices[0][1]) == first


@pytest.mark.parametrize(
    ("name", "separator"),
    [
        ("labels with the usual separator", "; "),
        ("codes divided by blanks", " "),
        ("labels that most records lack", " "),
    ],
)
def test_the_separator_of_labels_is_one_that_divides_them_and_that_none_holds(name: str, separator: str) -> None:
    found = find(make_table(LAYOUTS[name][0]))
    assert isinstance(found, Reading) and found.options["separator"] == separator


@pytest.mark.parametrize(
    ("name", "readings"),
    [
        ("positions beside a query", ["jsonl: sql.* < question"]),
        ("steps", ["jsonl: output.* < instruction", "jsonl: output < instruction"]),
        ("pairs with licences", ["jsonl: column2 < column1", "jsonl: column1 < column2"]),
        ("a question and documents", ["jsonl: question < docs", "jsonl: docs < question"]),
        ("a query and a list of passages", ["jsonl: query < pos.*", "jsonl: pos < query"]),
        (
            "a question, a title and a passage",
            ["jsonl: user_query < retrieved_passage", "jsonl: retrieved_passage < user_query"],
        ),
        ("two main texts", ["jsonl: response < prompt input", "jsonl: response < input"]),
    ],
)  # fmt: skip
def test_a_doubt_lists_these_readings(name: str, readings: list[str]) -> None:
    found = find_doubt(name)
    assert [describe(one) for _, one in found.choices] == readings


def test_a_doubt_lists_one_language_from_one_other_before_where_the_texts_are_from() -> None:
    found = find_doubt("a language with its writings")
    assert [describe(one) for _, one in found.choices[:2]] == [
        "jsonl: phonetic < english",
        "jsonl: syllabary < english",
    ]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("two lists of texts", "--column 'inputs=symptoms.*' --column 'targets=actions.*'"),
        ("objects beside who wrote a text", "--column inputs=text --column 'targets=meta.*'"),
        ("objects beside who wrote a text", "--column text=text --column label=author_id"),
    ],
)
def test_a_refusal_of_lists_of_texts_names_columns_that_work(name: str, flags: str) -> None:
    table = make_table(LAYOUTS[name][0])
    assert flags in str(find(table))
    given = parse_columns([word for word in shlex.split(flags) if word != "--column"])
    assert describe(infer_task(table, given=given)).endswith(f"< {next(iter(given.values()))[0]}")


def test_ids_of_documents_are_not_named_as_targets() -> None:
    assert "targets=" not in str(find(make_table(LAYOUTS["ids of documents alone"][0])))


def test_one_reading_is_not_said_to_be_one_of_several() -> None:
    found = find_doubt("a plain text and its marked copy")
    assert len(found.choices) == 1 and "several" not in str(found)


def test_a_refusal_of_a_label_of_many_texts_names_the_same_columns_as_text() -> None:
    table = make_table("name=title | ingredients=steps | steps=steps")
    with pytest.raises(DataError, match=r"inputs=ingredients\.\*' --column targets=name"):
        infer_task(table, given={"text": ["ingredients.*"], "label": ["name"]})


def test_a_few_outputs_that_repeat_are_labels_in_the_next_reading() -> None:
    found = find(make_table("instruction=sentence | input=empty | output=three"))
    assert isinstance(found, Reading)
    assert [describe(one) for one in (found, *found.others)] == [
        "jsonl: output < instruction",
        "classification: output < instruction",
    ]


def test_a_doubt_tells_a_label_that_is_the_same_in_all_records() -> None:
    found = find_doubt("pairs of one label")
    assert "label is no label, as it is '1' in all records" in str(found)
    assert str(found).splitlines()[-1].endswith("in the same way: scores.")


def test_a_doubt_names_the_columns_that_may_be_meant_beside_those_of_its_readings() -> None:
    found = find_doubt("opinions beside other labels")
    learned = {name for _, one in found.choices for name in (*one.targets, *one.inputs)}
    rest = {"texto", "calificacion", "tipo_lugar", "fuente", "valencia"} - learned
    named = str(found).splitlines()[-1].removeprefix("Other columns can be named in the same way: ").rstrip(".")
    assert rest and {*named.split(", ")} == rest
