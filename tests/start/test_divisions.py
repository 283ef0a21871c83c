"""Parts of a text, a list or a dialogue that become columns: what divides them, and what is learned then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivetune.errors import DataError
from fivetune.start.choose import DoubtError, describe_reading
from fivetune.start.marks import find_marks
from fivetune.start.plan import StartPlan, build_plan, read_sets

HOW = ["red", "blue", "green", "white", "black"]
THINGS = ["hat", "coat", "lamp", "book", "cup", "key", "ring"]


def ask(row: int) -> str:
    return f"Who has the {HOW[row % 5]} {THINGS[row % 7]} number {row}?"


def reply(row: int) -> str:
    return f"It is {THINGS[row % 7]} {row + 3}."


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def plan(source: str, **given: list[str]) -> StartPlan:
    return build_plan(source, given=given, load_tokenizer=lambda name: None)


SYSTEM = "<|start_header_id|>system<|end_header_id|>\n\nBe nice.<|eot_id|>"
FORMS = {
    "### Human: {}### Assistant: {}": "response from prompt",
    "### Instruction:\n{}\n\n### Response:\n{}": "response from instruction",
    "Below is an instruction.\n\n### Instruction:\n{}\n\n### Response: {}": "response from instruction",
    "<s>[INST] {} [/INST] {} </s>": "response from prompt",
    "<s>[INST] <<SYS>>\nBe nice.\n<</SYS>>\n\n{} [/INST] {} </s>": "response from prompt",
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n": "response from prompt",
    "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n{}<end_of_turn>": "response from prompt",
    SYSTEM
    + SYSTEM.replace("system", "user").replace("Be nice.", "{}")
    + SYSTEM.replace("system", "assistant").replace("Be nice.", "{}"): "response from prompt",
    "<｜User｜>{}<｜Assistant｜>{}<｜end▁of▁sentence｜>": "response from prompt",
    "<|user|>\n{}</s>\n<|assistant|>\n{}</s>": "response from prompt",
    "<human>: {}\n<bot>: {}": "response from prompt",
    "User: {}\nAssistant: {}": "response from prompt",
    "کاربر: {}\nدستیار: {}": "response from prompt",
    "用户：{}助手：{}": "response from prompt",
    "Пользователь: {}\nАссистент: {}": "response from prompt",
    "ユーザー: {}\nアシスタント: {}": "response from prompt",
    "**Question:** {}\n**Answer:** {}": "answer from question",
    "Q: {} A: {}": "answer from question",
    "问：{}答：{}": "answer from question",
    "<question>{}</question><answer>{}</answer>": "answer from question",
    "Вопрос: {} Ответ: {}": "ответ from вопрос",
    "सवाल: {}\nजवाब: {}": "जवाब from question",
    "### 指令：\n{}\n### 回复：\n{}": "response from instruction",
    "[|Human|] {} [|AI|] {}": "response from prompt",
    "[Q]: {}\n[A]: {}": "answer from question",
    "<s>Human: {}\n</s><s>Assistant: {}\n</s>": "response from prompt",
    "A chat with an AI. USER: {} ASSISTANT: {}</s>": "response from prompt",
    "<extra_id_0>System\n\n<extra_id_1>User\n{}\n<extra_id_1>Assistant\n{}": "response from prompt",
    "en: {} de: {}": "de from en",
    "{{{{user}}}}: {}\n{{{{char}}}}: {}": "char from prompt",
    "{}\n{}": "answer from question",
    "{} \r\n\r\n{}": "answer from question",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_dialogue_or_prompt_in_one_text_is_divided(tmp_path, form):
    found = plan(write(tmp_path / "a.jsonl", [{"text": form.format(ask(row), reply(row))} for row in range(40)]))
    assert describe_reading(found.reading).partition(": ")[2] == FORMS[form]
    (asked,), (learned,) = found.reading.inputs, found.reading.targets
    written = [fields for _, fields in read_sets(found)]
    assert [(one[asked], one[learned]) for one in written] == [(ask(row), reply(row)) for row in range(40)]
    assert any("text is divided at" in one for one in found.warnings)


@pytest.mark.parametrize(
    "form",
    [
        "{} => {}",
        "{} ||| {}",
        "{}\t{}",
        "{} [SEP] {}",
        "{} vs {}",
        "{} -> {}",
        "{} :: {}",
        "A: {}\nB: {}",
        "Speaker 1: {}\nSpeaker 2: {}",
    ],
)
def test_parts_without_a_name_are_a_doubt_whose_commands_learn_the_second_or_the_first(tmp_path, form):
    source = write(tmp_path / "a.jsonl", [{"text": form.format(ask(row), ask(row + 2))} for row in range(40)])
    with pytest.raises(DoubtError) as error:
        plan(source)
    roles = [one.roles for _, one in error.value.choices]
    assert roles[0] == {"inputs": ["part1"], "targets": ("part2",)}
    written = [fields for _, fields in read_sets(plan(source, **{k: [*v] for k, v in roles[0].items()}))]
    assert [(one["part1"], one["part2"]) for one in written] == [(ask(row), ask(row + 2)) for row in range(40)]


@pytest.mark.parametrize(
    "make",
    [
        lambda row: f"Ann has number {row}." + f" Bob - her friend - has {row + 1}." * (row % 3),
        lambda row: f"<p>{ask(row)}</p><p>{reply(row)}</p>",
        lambda row: f"Subject: {ask(row)}\n\nDear all,\n{reply(row)}",
        lambda row: f"17{row}\t18{row}\t19{row}",
        lambda row: f"A note: {ask(row)}" if row % 2 else f"A {THINGS[row % 7]}: {ask(row)}",
    ],
)
def test_other_texts_are_not_divided(make):
    assert find_marks([make(row) for row in range(40)]) is None


def test_the_first_answer_of_a_long_dialogue_is_learned_with_a_word(tmp_path):
    more = [f"### Human: {ask(row + 1)}### Assistant: No." if row % 2 else "" for row in range(40)]
    texts = [f"### Human: {ask(row)}### Assistant: {reply(row)}{more[row]}" for row in range(40)]
    found = plan(write(tmp_path / "a.jsonl", [{"text": text} for text in texts]))
    assert [one["response"] for _, one in read_sets(found)] == [reply(row) for row in range(40)]
    assert any("20 of the first" in one and "is not read" in one for one in found.warnings)


def test_a_text_without_the_marks_is_told(tmp_path):
    texts = [f"User: {ask(row)}\nBot: {reply(row)}" for row in range(60)]
    texts[7] = "No dialogue."
    found = plan(write(tmp_path / "a.jsonl", [{"text": text} for text in texts]))
    assert len([*read_sets(found)]) == 59
    assert any(
        "1 record is left out" in one and "a.jsonl:8" in one and "'No dialogue.'" in one for one in found.warnings
    )


@pytest.mark.parametrize(("column", "is_doubt"), [("label", False), ("source", True), ("lang", True)])
def test_a_label_of_a_dialogue_is_a_doubt_unless_it_is_named_so(tmp_path, column, is_doubt):
    rows = [{"text": f"User: {ask(row)}\nBot: {reply(row)}", column: "ab"[row % 2]} for row in range(40)]
    source = write(tmp_path / "a.jsonl", rows)
    if is_doubt:
        with pytest.raises(DoubtError) as error:
            plan(source)
        shown = [describe_reading(one) for _, one in error.value.choices]
        assert shown == ["text to text: response from prompt", f"classification: {column} from text"]
        for _, one in error.value.choices:
            given = {role: [*names] for role, names in one.roles.items()}
            assert plan(source, **given).reading.targets == one.targets
    else:
        assert plan(source).reading.targets == ["label"]


def test_lines_of_text_that_a_mark_divides_are_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"Human: {ask(row)} AI: {reply(row)}\n" for row in range(40)))
    found = plan(str(path))
    assert [one["response"] for _, one in read_sets(found)] == [reply(row) for row in range(40)]


def test_a_first_line_with_the_marks_is_a_record(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("".join(f'"User: {ask(row)[:-1]}\nBot: {reply(row)[:-1]}"\n' for row in range(40)))
    assert len([*read_sets(plan(str(path)))]) == 40


@pytest.mark.parametrize("as_text", [False, True])
def test_a_pair_in_a_list_is_two_columns(tmp_path, as_text):
    pairs: list[object] = [[reply(row), reply(row + 9)] for row in range(40)]
    rows = [{"pair": str(pair) if as_text else pair, "label": "ab"[row % 2]} for row, pair in enumerate(pairs)]
    found = plan(write(tmp_path / "a.jsonl", [*rows]))
    assert (found.reading.task, found.reading.inputs) == ("classification", ["pair_1", "pair_2"])
    assert [[one["pair_1"], one["pair_2"]] for _, one in read_sets(found)] == pairs


CONTEXTS = [f"{ask(row)} {reply(row)} {reply(row + 1)}" for row in range(40)]


def place(row: int) -> tuple[int, int]:
    start = CONTEXTS[row].index(reply(row))
    return start, start + len(reply(row)) - 1  # without the full stop


@pytest.mark.parametrize(
    "make",
    [
        lambda start, end: {"answer_start": start, "answer_end": end},
        lambda start, end: {"answer": {"answer_start": start, "answer_end": end}},
        lambda start, end: {"answer": {"start": [start], "end": [end]}},
        lambda start, end: {"answerStart": start, "answerEnd": end},
        lambda start, end: {"answer_begin_char": str(start), "answer_end_char": str(end)},
        lambda start, end: {"answer_start": start, "answer_end": end - 1},  # the last character
    ],
)
def test_answers_by_their_places_are_read_as_their_texts(tmp_path, make):
    rows = [{"context": CONTEXTS[row], "question": ask(row), **make(*place(row))} for row in range(40)]
    found = plan(write(tmp_path / "a.jsonl", rows))
    assert (found.reading.task, found.reading.targets) == ("squad", ["answer"])
    assert [one["answer"] for _, one in read_sets(found)] == [reply(row)[:-1] for row in range(40)]


def test_places_beside_their_texts_are_no_answers(tmp_path):
    rows = [
        {"context": CONTEXTS[row], "question": ask(row), "answer_text": reply(row)[:-1], "answer_start": place(row)[0]}
        for row in range(40)
    ]
    assert plan(write(tmp_path / "a.jsonl", [*rows])).reading.targets == ["answer_text"]


def write_turns(path: Path, names: str, cells) -> str:
    rows = [",".join(map(str, (row // 4, *cells(row), f'"{ask(row)}"'))) for row in range(160)]
    path.write_text("\n".join([names, *rows]) + "\n")
    return str(path)


def test_rows_of_a_dialogue_are_pairs_of_turns(tmp_path):
    source = write_turns(tmp_path / "a.csv", "dlg_id,turn,utterance", lambda row: (row % 4 + 1,))
    found = plan(source)
    assert (found.reading.inputs, found.reading.targets, found.reading.group_column) == (
        ["prompt"],
        ["response"],
        "dlg_id",
    )
    pairs = [(one["prompt"], one["response"]) for _, one in read_sets(found)]
    assert pairs == [(ask(row), ask(row + 1)) for row in range(159) if row % 4 < 3]


@pytest.mark.parametrize("speakers", [("user", "assistant"), ("USER", "SYSTEM"), ("Пользователь", "Бот")])
def test_the_assistant_replies(tmp_path, speakers):
    source = write_turns(tmp_path / "a.csv", "talk,role,content", lambda row: (speakers[row % 2],))
    pairs = [(one["prompt"], one["response"]) for _, one in read_sets(plan(source))]
    assert pairs == [(ask(row), ask(row + 1)) for row in range(0, 160, 2)]


def test_a_speaker_that_may_be_the_label_is_a_doubt(tmp_path):
    source = write_turns(tmp_path / "a.csv", "hilo,hablante,frase", lambda row: (("Ana", "Luis")[row % 2],))
    with pytest.raises(DoubtError) as error:
        plan(source)
    shown = [describe_reading(one) for _, one in error.value.choices]
    assert shown[0] == "text to text: response from prompt" and "classification: hablante from frase" in shown


def test_documents_by_sentences_are_no_dialogues(tmp_path):
    source = write_turns(tmp_path / "a.csv", "doc_id,number,label,sentence", lambda row: (row % 4, "ab"[row % 3 % 2]))
    assert plan(source).reading.targets == ["label"]


@pytest.mark.parametrize("member", ["text", "utterance", ""])
def test_the_first_two_turns_of_lists_are_learned(tmp_path, member):
    turns = [[ask(row + turn) for turn in range(2 + row % 3)] for row in range(40)]
    rows: list[object] = [[{member: text, "mood": "good"} if member else text for text in own] for own in turns]
    found = plan(write(tmp_path / "a.txt", rows))
    dot = f".{member}" if member else ""
    assert (found.reading.inputs, found.reading.targets) == ([f"turns.0{dot}"], [f"turns.1{dot}"])
    assert len([*read_sets(found)]) == 40


def test_few_dialogues_are_told_as_what_they_are(tmp_path):
    rows = [f"{row // 6},{row % 6},{ask(row)}" for row in range(12)]
    (tmp_path / "a.csv").write_text(
        "\n".join(["dialogue,turn,said", *rows[:6], *(f"2{one[1:]}" for one in rows[6:9]), *rows[9:]])
    )
    with pytest.raises(DataError, match=r"holds 9 records.*turns of a dialogue"):
        plan(str(tmp_path / "a.csv"))


@pytest.mark.parametrize("form", [json.dumps, repr], ids=["json", "python"])
@pytest.mark.parametrize("said", ["{}", "I think a while. Answer: {}"])
def test_a_chat_that_is_written_as_text_in_a_cell_is_read(tmp_path, form, said):
    """A word with a colon within the turns divides nothing."""
    chats = [
        [{"from": "human", "value": ask(row)}, {"from": "gpt", "value": said.format(reply(row))}] for row in range(40)
    ]
    found = plan(write(tmp_path / "a.jsonl", [{"conversations": form(chat)} for chat in chats]))
    assert found.reading.inputs == ["conversations.0.value"]
    assert [fields["conversations"] for _, fields in read_sets(found)] == chats


def test_what_a_user_says_is_read_and_what_an_agent_says_is_learned(tmp_path):
    found = plan(write(tmp_path / "a.jsonl", [{"USER": ask(row), "AGENT": reply(row)} for row in range(40)]))
    assert (found.reading.inputs, found.reading.targets) == (["USER"], ["AGENT"])


def write_dialogues(path: Path, name: str) -> str:
    rows: list[object] = []
    for row in range(40):
        dialogue = f"<user> {ask(row)}\n\n<assistant> {reply(row)}"
        rows.append({name: f"All {THINGS[row % 7]}s of house {row // 2} are old.", "dialogue": dialogue})
    return write(path, rows)


@pytest.mark.parametrize("name", ["context", "document", "knowledge", "passage"])
def test_the_parts_of_a_dialogue_are_read_beside_what_it_is_about(tmp_path, name):
    found = plan(write_dialogues(tmp_path / "a.jsonl", name)).reading
    assert {*found.inputs} == {"prompt", name} and found.targets == ["response"]


@pytest.mark.parametrize("name", ["reference", "references"])
def test_a_reference_beside_a_dialogue_may_be_its_source(tmp_path, name):
    with pytest.raises(DoubtError) as caught:
        plan(write_dialogues(tmp_path / "a.jsonl", name))
    first, *_, last = caught.value.choices
    assert describe_reading(first[1]) == "text to text: response from prompt"
    assert describe_reading(last[1]) == f"text to text: {name} from dialogue"


FOOTERS = ["Misleading, it has true facts but omits others", "False, no word of it is right or has a source"]


@pytest.mark.parametrize("mark", ["We give one of these categories: ", "\nNote: ", "\nSignature: "])
def test_the_text_that_pages_end_in_is_no_part(mark):
    assert find_marks([f"{ask(row)} {mark}{FOOTERS[row % 2]}" for row in range(40)]) is None
    labelled = find_marks([f"{ask(row)} {mark}{THINGS[row % 2]}" for row in range(40)])
    answered = find_marks([f"{ask(row)}\nOutput: {FOOTERS[row % 2]}" for row in range(40)])
    assert labelled and answered and answered.names[-1] == "output"
