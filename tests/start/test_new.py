"""`fivetune new` and `fivetune train DATA`: the sets, the recipe, the messages."""

from __future__ import annotations

import csv
import errno
import json
import random
import shlex
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import kit
import pyarrow
import pytest
import yaml
from pyarrow import parquet

from fivetune import cli
from fivetune.config import load_config
from fivetune.data.split import EvalSplit, split_in_three
from fivetune.errors import ConfigError, DataError
from fivetune.start.columns import describe_form
from fivetune.start.files import is_data
from fivetune.start.plan import build_plan
from fivetune.tasks.classification import Classification
from fivetune.types import RawRecord

THINGS = {"Größe": "coat", "Farbe": "red", "Preis": "ring"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def write_tickets(path: Path, num: int = 120) -> Path:
    """A CSV of a German spreadsheet: byte order mark, semicolons, umlauts and spaces in names, copies of some texts."""
    draw = random.Random(3)
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        rows = csv.writer(file, delimiter=";")
        rows.writerow(["Nr", "Frage Text", "Überschrift", "Kategorie"])
        for i in range(num):
            label = draw.choice(list(THINGS))
            owner = draw.choice(kit.OWNERS)
            rows.writerow([f"T{i}", f"{owner} has a {THINGS[label]} {i // 2}", f"What has Bob {i // 2}?", label])
    return path


def read_sets(stem: str, folder: Path) -> dict[str, list[dict]]:
    return {
        name: [json.loads(line) for line in (folder / f"{stem}-{name}.jsonl").read_text().splitlines()]
        for name in ("train", "validation", "test")
    }


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = cli.main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# --- the split ---


def split(records, share=0.2, **options):
    task = Classification()
    converted = [(record, (task.to_text(record),)) for record in records]
    found = split_in_three(converted, EvalSplit("eval", share, **options), by_label=True)
    return {record.fields["id"]: found.find_set(record) for record in records}


def tickets(num, fields):
    return [RawRecord({"id": f"t{i}", "text": f"text {i}", "label": "a", **fields(i)}, f"a:{i}") for i in range(num)]


def test_three_sets_are_seeded_and_stratified():
    records = tickets(400, lambda i: {"label": "late" if i % 4 else "refund"})
    sets = split(records)
    shares = Counter((sets[r.fields["id"]], r.fields["label"]) for r in records)
    assert shares["test", "late"] == shares["validation", "late"] == 60
    assert shares["test", "refund"] == shares["validation", "refund"] == 20
    assert sets == split(records)
    assert sets != split(records, seed=1)


def test_related_records_are_in_one_set_of_the_three():
    records = tickets(300, lambda i: {"text": f"text {i // 3}", "label": "ab"[i % 2], "book": f"b{i // 6}"})
    for column, size in ((None, 3), ("book", 6)):
        sets = split(records, group_column=column)
        together = [{sets[f"t{i}"] for i in range(first, first + size)} for first in range(0, 300, size)]
        assert all(len(one) == 1 for one in together)
        assert Counter(sets.values())["test"] == pytest.approx(60, abs=6)


def test_a_label_of_one_record_is_trained_on():
    for seed in range(5):
        records = tickets(40, lambda i: {"label": f"only {i}" if i < 12 else "ab"[i % 2]})
        sets = split(records, seed=seed)
        assert {sets[f"t{i}"] for i in range(12)} == {"train"}


def test_what_cannot_be_divided_in_three_is_an_error():
    with pytest.raises(DataError, match=r"12 records in 1 groups of related records cannot be divided into training"):
        split(tickets(12, lambda i: {"text": "same"}))


def test_of_two_relations_that_join_everything_the_weaker_is_given_up(folder, capsys):
    """Short utterances recur in nearly all scenes of a dialogue."""
    draw = random.Random(5)
    rows = []
    for i in range(600):
        text = draw.choice(("Yeah.", "Oh.", "What?", "Hey!")) if draw.random() < 0.15 else f"utterance number {i}"
        rows.append(f"{text},{draw.choice(kit.COLOURS)},s{i // 12}")
    name = write_rows(folder / "t.csv", "Utterance,Emotion,Scene_ID", rows)
    words = ("new", name, "--model", "t5-nano", "--overwrite", "--column", "label=Emotion")
    for more, column, told in (
        ((), "Utterance", "the same Scene_ID may be in several sets"),
        (("--column", "group=Scene_ID"), "Scene_ID", "equal inputs may be in several sets"),
    ):
        code, _, err = run(capsys, *words, *more)
        sets = read_sets("t", folder)
        assert code == 0 and err.count("may be in several sets") == 1 and told in err
        assert all(45 <= len(sets[one]) <= 75 for one in ("validation", "test"))
        values = [{row[column] for row in sets[one]} for one in sets]
        assert sum(map(len, values)) == len(set.union(*values))


# --- the command ---


def test_a_spreadsheet_becomes_a_recipe_and_three_sets(folder, capsys):
    source = write_tickets(folder / "Meine Tickets.csv")
    before = source.read_bytes()
    code, out, err = run(capsys, "new", source.name, "--model", "t5-nano")
    assert code == 0, err
    assert "classification: Kategorie has 3 values that repeat" in " ".join(out.split())
    assert "--column 'text=Frage Text' --column 'text=Überschrift' --column label=Kategorie" in " ".join(out.split())
    assert "not read: Nr" not in out  # it is the id
    assert "another one: --model NAME" in " ".join(out.split())
    assert out.splitlines()[-2:] == [
        "next    fivetune train Meine-Tickets.yaml",
        "next    fivetune evaluate runs/Meine-Tickets --data.eval Meine-Tickets-test.jsonl",
    ]
    assert source.read_bytes() == before
    sets = read_sets("Meine-Tickets", folder)
    rows = [row for name in sets for row in sets[name]]
    assert sorted(row["id"] for row in rows) == sorted(f"T{i}" for i in range(120))
    texts = {name: {row["Frage Text"] for row in sets[name]} for name in sets}
    assert not texts["train"] & texts["test"] and not texts["train"] & texts["validation"]
    config = load_config(folder / "Meine-Tickets.yaml")
    assert (config.model.path, config.task.plugin_name(), config.data.eval) == (
        "t5-nano",
        "classification",
        ("Meine-Tickets-validation.jsonl",),
    )
    lines = (folder / "Meine-Tickets.yaml").read_text().splitlines()
    settings = [number for number, line in enumerate(lines) if line.startswith("  ") and "#" not in line]
    assert all(lines[number - 1].startswith("  # ") for number in settings)  # each has its reason


def test_inputs_that_hold_their_targets_are_told(folder, capsys):
    answers = [f"They are kept by {one} people, as case {one} shows" for one in range(40)]
    rows = [{"input": f"Who keeps them in {one}? {answer}", "output": answer} for one, answer in enumerate(answers)]
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = run(capsys, "new", "held.jsonl")
    assert code == 0 and "40 of 40 inputs hold what is to be learned" in err
    rows = [{"question": f"Who keeps {one}?", "choices": answers[one : one + 3], "answer": 0} for one in range(38)]
    rows = [{**row, "answer": place % 3} for place, row in enumerate(rows)]
    (folder / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = run(capsys, "new", "choices.jsonl")
    assert code == 0 and "inputs hold" not in err  # a choice is there to be found


def test_the_command_prints_json(folder, capsys):
    write_tickets(folder / "t.csv")
    code, out, err = run(capsys, "new", "t.csv", "--output", "made/here.yaml", "--json")
    assert code == 0, err
    facts = json.loads(out.splitlines()[-1])
    assert facts["recipe"] == "made/here.yaml" and (folder / "made" / "here-test.jsonl").is_file()
    assert facts["task"] == "classification" and facts["roles"]["label"] == ["Kategorie"]
    assert sum(facts["sizes"].values()) == 120 and facts["model"] == "google-t5/t5-small"
    assert facts["unread"] == [] and facts["points"] > 5 and facts["command"].startswith("fivetune new t.csv --task")
    assert "estimated from letters and signs" in (folder / "made" / "here.yaml").read_text()


def test_a_doubt_writes_nothing_and_its_commands_do(folder, capsys):
    rows = [f"the parcel {i} is late,{'ab'[i % 2]},{'cd'[i % 2 ^ (i % 3 > 0)]}" for i in range(40)]
    name = write_rows(folder / "t.csv", "Text,type,queue", rows)
    code, out, err = run(capsys, "new", name, "--json")
    readings = json.loads(out.splitlines()[-1])["readings"]
    assert code == 3 and [one["roles"]["label"] for one in readings] == [["type"], ["queue"]]
    assert sorted(path.name for path in folder.iterdir()) == ["t.csv"]
    for one in readings:
        assert f"  {one['command']}\n" in err
        assert run(capsys, *one["command"].split()[1:], "--model", "t5-nano", "--overwrite")[0] == 0
        assert f"label: {one['roles']['label'][0]}" in (folder / "t.yaml").read_text()


@pytest.mark.parametrize("name", ["t.tsv", "t.json"])
def test_a_table_without_a_header_has_its_names_from_the_command_line(folder, capsys, name):
    rows = [["Ann has a hat.", "Anna hat Hut 0."], *([f"Bob is {i}.", f"Bob ist {i}."] for i in range(30))]
    table = json.dumps(rows) if name.endswith("json") else "".join("\t".join(row) + "\n" for row in rows)
    (folder / name).write_text(table)
    code, out, err = run(capsys, "new", name, "--model", "t5-nano", "--json")
    assert code == 3 and "no header" in err
    for one in json.loads(out.splitlines()[-1])["readings"]:
        assert run(capsys, *shlex.split(one["command"])[1:], "--overwrite")[0] == 0
        assert sum(len(rows) for rows in read_sets("t", folder).values()) == 31
    code, out, _ = run(capsys, "new", name, "--header", "en,de", "--model", "t5-nano", "--overwrite")
    assert code == 0 and "translation" in out


def test_where_hardly_a_record_can_be_read_its_fault_is_told_last(folder, capsys):
    name = write_rows(
        folder / "t.csv", "text,label", [f"the parcel, as {i}, is late,{'ab'[i % 2]},x" for i in range(40)]
    )
    code, _, err = run(capsys, "new", name)
    assert code == 3 and err.rstrip().endswith("Correct the row.") and "40 that cannot be read" in err


WORDS = ("hi", "hello", "fine", "thanks", "what", "are", "you", "see", "later", "well", "now")


@pytest.mark.parametrize(
    "first",
    ["hi\thello", "how are you\tfine thanks", "thank you\tno problem", "good day\thi, you", "Klausimas\tAtsakymas"],
)
def test_a_first_line_that_may_be_a_record_is_a_doubt(folder, capsys, first):
    draw = random.Random(1)
    rows = [" ".join(draw.choices(WORDS, k=4)) + "\t" + " ".join(draw.choices(WORDS, k=3)) for _ in range(60)]
    name = write_rows(folder / "t.tsv", first, rows)
    code, out, err = run(capsys, "new", name, "--json", "--model", "t5-nano")
    readings = json.loads(out.splitlines()[-1])["readings"]
    assert code == 3 and "may be a record or the names of the columns" in err
    for one, num in zip(readings[:2], (61, 60), strict=True):
        assert run(capsys, *shlex.split(one["command"])[1:], "--overwrite")[0] == 0
        assert sum(len(rows) for rows in read_sets("t", folder).values()) == num


@pytest.mark.parametrize("first", ["en\tde", "Anfrage\tReaktion", "question\tSvar", "Question text\tAnswer text"])
def test_names_are_no_doubt(folder, capsys, first):
    draw = random.Random(1)
    rows = [" ".join(draw.choices(WORDS, k=4)) + "\t" + " ".join(draw.choices(WORDS, k=3)) for _ in range(60)]
    assert "may be a record" not in run(capsys, "new", write_rows(folder / "t.tsv", first, rows))[2]


@pytest.mark.parametrize(
    ("first", "is_sure"),
    [
        ("human\tai", True),
        ("Source Text\tCommentary", True),
        ("Klausimas\tAtsakymas", False),
        ("Nr\tVerse\tTeaching", False),
        ("意味\t教え", False),
    ],
)
def test_words_above_sentences_are_names_and_both_directions_are_shown(folder, capsys, first, is_sure):
    draw = random.Random(1)
    texts = [" ".join(draw.choices(WORDS, k=9)) + "\t" + " ".join(draw.choices(WORDS, k=9)) for _ in range(60)]
    rows = [f"{i}\t{row}" for i, row in enumerate(texts)] if first.count("\t") > 1 else texts
    _, out, err = run(capsys, "new", write_rows(folder / "t.tsv", first, rows), "--json", "--model", "t5-nano")
    assert "may be a record" not in err
    if not is_sure:
        readings = json.loads(out.splitlines()[-1])["readings"]
        names = first.split("\t")[-2:]
        assert [one["roles"]["targets"][0] for one in readings] == [*reversed(names)]


def test_of_a_doubtful_header_both_directions_are_shown_with_it(folder, capsys):
    draw = random.Random(1)
    rows = [" ".join(draw.choices(WORDS, k=3)) + "\t" + " ".join(draw.choices(WORDS, k=3)) for _ in range(60)]
    _, out, _ = run(capsys, "new", write_rows(folder / "t.tsv", "Klausimas\tAtsakymas", rows), "--json")
    learned = [one["roles"]["targets"][0] for one in json.loads(out.splitlines()[-1])["readings"]]
    assert {"Klausimas", "Atsakymas", "column1", "column2"} == {*learned}


@pytest.mark.parametrize("first", ["we all see you later\tbanana", "T-100\twe all see you later\tbanana"])
def test_a_sentence_in_the_first_line_is_a_doubt_whatever_its_label(folder, capsys, first):
    draw = random.Random(1)
    rows = [" ".join(draw.choices(WORDS, k=6)) + "\t" + draw.choice(["plum", "kiwi"]) for _ in range(60)]
    if first.startswith("T"):
        rows = [f"T-{number}\t{row}" for number, row in enumerate(rows, 101)]
    code, _, err = run(capsys, "new", write_rows(folder / "t.tsv", first, rows))
    assert code == 3 and "may be a record or the names of the columns" in err


@pytest.mark.parametrize(
    "first", ["Timestamp\tPlease say what you think of it\tRole", "code_1\tWhat do you think of it?\tyour group"]
)
def test_long_names_of_a_form_are_no_doubt(folder, capsys, first):
    draw = random.Random(1)
    rows = [f"T-{i}\t{' '.join(draw.choices(WORDS, k=6))}\t{draw.choice(['plum', 'kiwi'])}" for i in range(60)]
    assert "may be a record" not in run(capsys, "new", write_rows(folder / "t.tsv", first, rows))[2]


def test_a_first_label_that_many_records_have_is_a_doubt(folder, capsys):
    rows = [f"see you then {i}\t{'late' if i < 110 else 'greet'}" for i in range(160)]  # not among the first hundred
    code, _, err = run(capsys, "new", write_rows(folder / "t.tsv", "hello you\tgreet", rows))
    assert code == 3 and "--header column1,column2 --task classification" in err


def test_lines_above_the_header_are_told_in_the_recipe(folder, capsys):
    rows = [f"the parcel {i} is late,{'ab'[i % 2]}" for i in range(40)]
    code, _, err = run(capsys, "new", write_rows(folder / "t.csv", "Tickets of 2024\n\ntext,label", rows))
    assert code == 0 and "t.csv:1: 'Tickets of 2024' is above the header, in line 3" in err
    assert "above the header, in line 3" in " ".join((folder / "t.yaml").read_text().replace("#", "").split())


def test_a_recipe_with_control_characters_in_its_reasons_can_be_loaded(folder, capsys):
    rows = [f"it\u0080s the parcel {i} again,{'ab'[i % 2]}" for i in range(40)]
    assert run(capsys, "new", write_rows(folder / "t.csv", "text,label", rows))[0] == 0
    assert "[U+0080]" in (folder / "t.yaml").read_text()
    assert run(capsys, "inspect", "t.yaml")[0] == 0


def test_the_recipe_says_what_its_limits_cut_and_stops_early(folder, capsys):
    rows = [f"question {i}?,{'a word ' * (400 if i < 10 else 20)}{i}" for i in range(40)]
    name = write_rows(folder / "t.csv", "question,answer", rows)
    assert run(capsys, "new", name, "--model", "t5-nano")[0] == 0
    text = (folder / "t.yaml").read_text()
    assert "this limit cuts 25.0 % of them" in text and "this limit cuts none of them" in text
    assert "early_stopping: 3" in text


def test_data_of_which_most_records_cannot_be_read_have_no_recipe(folder, capsys):
    rows = [{"id": f"{i}", "text": f"a text {i}", "labels": ["a", "b"]} for i in range(40)]
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--task", "jsonl", "--column", "inputs=text", "--column", "targets=labels.0")
    assert run(capsys, "new", "t.jsonl", *words, "--model", "t5-nano")[0] == 0
    for row in rows[4:]:
        row["labels"] = []
    (folder / "u.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = run(capsys, "new", "u.jsonl", *words, "--model", "t5-nano")
    assert code == 3 and "4 of 40 records can be used; the first that cannot: u.jsonl:5: has nothing in labels.0" in err
    assert not (folder / "u.yaml").exists()


def test_records_without_a_label_are_counted_and_left_out(folder, capsys):
    rows = [f"text {i},{'ab'[i % 2] if i < 20 else ''}" for i in range(60)]
    name = write_rows(folder / "t.csv", "text,label", rows)
    code, _, err = run(capsys, "new", name, "--model", "t5-nano", "--column", "label=label")
    assert code == 0 and "40 records have nothing in label, and are left out; the first: t.csv:22" in err


def test_the_next_commands_name_a_run_directory_that_is_free(folder, capsys):
    write_tickets(folder / "t.csv")
    words = ["new", "t.csv", "--model", "t5-nano"]
    assert "next    fivetune train t.yaml\n" in run(capsys, *words)[1]
    for name in ("t", "t-2"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "config.yaml").touch()
        (folder / "runs" / name / "machine.json").touch()
    out = run(capsys, *words, "--output", "other")[1]
    assert "fivetune train other/t.yaml --run.dir runs/t-3\n" in out and "fivetune evaluate runs/t-3 " in out


def test_nothing_is_overwritten_unless_asked(folder, capsys):
    write_tickets(folder / "t.csv")
    (folder / "t.yaml").write_text("mine: 1\n")
    code, _, err = run(capsys, "new", "t.csv", "--model", "t5-nano")
    assert code == 2
    assert err.startswith("fivetune: t.yaml: exists. It is trained with: fivetune train t.yaml. Add --overwrite")
    assert (folder / "t.yaml").read_text() == "mine: 1\n" and not (folder / "t-test.jsonl").exists()
    assert run(capsys, "new", "t.csv", "--model", "t5-nano", "--overwrite")[0] == 0
    assert load_config(folder / "t.yaml")


def test_a_full_disk_leaves_no_recipe_without_its_sets(folder, capsys, monkeypatch):
    """It was an internal error."""
    write_tickets(folder / "t.csv")
    replace = Path.replace

    def fail(path: Path, target: Path) -> Path:
        if target.name == "t-train.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    code, _, err = run(capsys, "new", "t.csv", "--model", "t5-nano", "--output", "out")
    assert code == 4 and err.startswith(
        "fivetune: out: cannot be written: No space left on device. Free space, or choose"
    )
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["t-test.jsonl", "t-validation.jsonl"]


def test_the_source_is_never_written_to(folder, capsys):
    write_tickets(folder / "x-train.csv")
    (folder / "x-train.jsonl").write_text("".join(f'{{"text": "a {i}", "label": "{i % 2}"}}\n' for i in range(40)))
    code, _, err = run(capsys, "new", "x-train.jsonl", "--output", "x.yaml", "--overwrite")
    assert code == 2 and "x-train.jsonl: is among the data, which are never changed" in err
    (folder / "data").mkdir()
    (folder / "x-train.csv").rename(folder / "data" / "x.csv")
    code, _, err = run(capsys, "new", "data", "--output", "data")
    assert code == 2 and "is among the data" in err
    assert run(capsys, "new", "data", "--model", "t5-nano")[0] == 0
    assert (folder / "data.yaml").is_file()


PAIRS = [f"{number},what has Bob {number}?,a {kit.OWNERS[number % 3]} of number {number}" for number in range(60)]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["No,Source,Target", ",English,German"], []),
        (["No,Source,Target", "Number,the text,its form"], []),
        (["No,Question,Reply"], ["--header", "a,b,c", "--column", "inputs=b", "--column", "targets=c"]),
    ],
)
def test_a_further_line_of_names_is_left_out_with_a_word(folder, capsys, lines, words):
    (folder / "a.csv").write_text("\n".join([*lines, *PAIRS]) + "\n")
    code, _, err = run(capsys, "new", "a.csv", *words)
    assert code == 0
    assert f"a.csv:{len(lines)}: is a further line of names" in err
    assert sum(map(len, read_sets("a", folder).values())) == len(PAIRS)


def test_blank_records_are_counted_and_left_out(folder, capsys):
    blank = [f"{100 + number},," for number in range(90)]
    (folder / "a.csv").write_text("\n".join(["No,Source,Target", *PAIRS, *blank]) + "\n")
    code, _, err = run(capsys, "new", "a.csv")
    assert code == 0
    assert "90 records have nothing in Source, Target, and are left out" in err
    assert sum(map(len, read_sets("a", folder).values())) == len(PAIRS)


def test_repeated_ids_and_unusable_records(folder, capsys):
    rows = [{"id": f"q{i // 2}", "text": f"Ann has {i} red hats", "label": "ab"[i % 2]} for i in range(60)]
    rows[5]["text"] = ""
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = run(capsys, "new", "t.jsonl", "--model", "t5-nano")
    assert code == 0
    assert "1 record is left out; the first: t.jsonl:6: text is empty" in err
    ids = [row["id"] for one in read_sets("t", folder).values() for row in one]
    assert len(set(ids)) == len(ids) == 59 and "q0 (2)" in ids
    # equal ids may be the same case written twice
    assert "29 records have the id of an earlier one, such as 'q0': in the sets it is 'q0 (2)'" in err
    sets = read_sets("t", folder)
    values = [{row["id"].partition(" ")[0] for row in sets[one]} for one in sets]
    assert sum(map(len, values)) == len(set.union(*values)) == 30


@pytest.mark.parametrize(
    ("column", "words", "sizes"),
    [
        ("split", ("train", "dev", "test"), [40, 10, 10]),
        ("data_split", ("TRN", "Valid", "Testing"), [40, 10, 10]),
        ("partition", ("", "eval_set", "Test Set"), [40, 10, 10]),
        ("subset", ("Train", "test", "test"), [32, 8, 20]),
        ("fold", ("training", "val", "val"), [32, 20, 8]),
    ],
)
def test_the_sets_that_a_column_names_are_kept(folder, capsys, column, words, sizes):
    """Of six records, four are training records: one in twelve by a blank cell."""
    sets = [words[i % 6] if i % 6 < 3 else ("train", "")[i % 12 == 3] for i in range(60)]
    rows = [f"text {i},{'ab'[i % 2]},{sets[i]}" for i in range(60)]
    name = write_rows(folder / "t.csv", f"text,label,{column}", rows)
    code, out, _ = run(capsys, "new", name, "--model", "t5-nano")
    found = read_sets("t", folder)
    assert (code, [len(records) for records in found.values()]) == (0, sizes)
    held = {one: {record[column] for record in records} for one, records in found.items()}
    assert held["train"] <= {words[0], "train", ""}
    assert [one for one in held if words[2] in held[one]] == ["validation" if words[2] == "val" else "test"]
    assert f"as the column {column} says" in " ".join(out.split())
    assert f"not read: {column}" not in out
    assert f"as the column {column} says" in (folder / "t.yaml").read_text()


@pytest.mark.parametrize(
    ("columns", "flags", "sizes"),
    [
        ("is_test", ["0", "0", "1"], [32, 8, 20]),
        ("is_train", ["1", "1", "0"], [32, 8, 20]),
        ("isTrain", ["True", "True", "False"], [32, 8, 20]),
        ("is_valid,is_test", ["0,0", "1,0", "0,1"], [20, 20, 20]),
        ("in_train,in_test", ["1.0,0.0", "1.0,0.0", "0.0,1.0"], [32, 8, 20]),
    ],
)
def test_columns_of_0_and_1_that_are_named_after_sets_divide_the_file(folder, capsys, columns, flags, sizes):
    rows = [f"text {i},{'ab'[i % 2]},{flags[i % 3]}" for i in range(60)]
    name = write_rows(folder / "t.csv", f"text,label,{columns}", rows)
    code, out, _ = run(capsys, "new", name, "--model", "t5-nano")
    found = read_sets("t", folder)
    assert (code, [len(records) for records in found.values()]) == (0, sizes)
    assert {record["text"] for record in found["test"]} == {f"text {i}" for i in range(2, 60, 3)}
    assert f"as the column {columns.replace(',', ' and ')} says" in " ".join(out.split())


@pytest.mark.parametrize(
    "values", [("train",), ("train", "bus"), ("dev", "test"), ("0", "1"), ("train", "test", "bus")]
)
def test_other_columns_name_no_sets(folder, capsys, values):
    rows = [f"text {i},{'ab'[i % 2]},{values[i % len(values)]}" for i in range(60)]
    name = write_rows(folder / "t.csv", "text,label,kind", rows)
    code, out, err = run(capsys, "new", name, "--model", "t5-nano", "--column", "text=text", "--column", "label=label")
    assert (code, "as the column" in out) == (0, False)
    assert ("kind names sets, and does not divide the file, as it has other values: bus" in err) == (len(values) == 3)


def test_a_label_beyond_the_training_set_and_a_set_without_labels_are_told(folder, capsys):
    def write(label: str) -> str:
        rows = [f"text {i},{'ab'[i % 2]},train" for i in range(50)] + [f"text {i},{label},test" for i in range(50, 60)]
        return write_rows(folder / "t.csv", "text,label,split", rows)

    _, _, err = run(capsys, "new", write("c"), "--model", "t5-nano")
    assert "no training record has the label c" in err
    code, out, err = run(capsys, "new", write(""), "--model", "t5-nano", "--overwrite")
    assert (code, "as the column" in out, "10 records have nothing in label" in err) == (0, False, True)


def test_few_ids_relate_no_records(folder, capsys):
    rows = [f"{i % 2},text {i},{'ab'[i % 2]}" for i in range(60)]
    name = write_rows(folder / "t.csv", "id,text,label", rows)
    code, out, err = run(capsys, "new", name, "--model", "t5-nano")
    assert (code, "in 60 groups" in out, "group=id" in err) == (0, True, False)


def test_texts_that_repeat_keep_their_records_together(folder, capsys):
    """One premise has three hypotheses, one question several answers."""
    for column, other in (("sentence1", "sentence2"), ("sentence", "question")):
        rows = [f"Ann met person {i // 3},has she {i} of them?,{'abc'[i % 3]}" for i in range(240)]
        name = write_rows(folder / "t.csv", f"{column},{other},label", rows)
        code, out, _ = run(capsys, "new", name, "--model", "t5-nano", "--overwrite")
        assert code == 0 and f"the same {column}" in " ".join(out.split())
        values = [{row[column] for row in rows} for rows in read_sets("t", folder).values()]
        assert sum(map(len, values)) == len(set.union(*values)) == 80


def test_what_check_finds_in_targets_and_labels_is_told_before(folder, capsys):
    rows = [
        {"prompt": f"Say how many {i} {'are there ' * 99 * (i % 4)}->", "completion": f" it is {i} END"}
        for i in range(60)
    ]
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = run(capsys, "new", "t.jsonl", "--model", "t5-nano")
    assert code == 0 and "60 of 60 targets end in END" in err and "% of the inputs have more than 512 tokens" in err
    assert "inputs: '{prompt}'" in (folder / "t.yaml").read_text()
    name = write_rows(
        folder / "l.csv", "text,label", [f"Ann has {i},{('Late', 'late', 'ok')[i % 3]}" for i in range(60)]
    )
    code, _, err = run(capsys, "new", name, "--model", "t5-nano")
    assert code == 0 and "count as one label: 'Late' (20 records), 'late' (20)" in err
    name = write_rows(folder / "e.csv", "input,target", [f"Ann has {i},{i} hats</s>" for i in range(60)])
    code, _, err = run(capsys, "new", name)  # without a tokenizer
    assert code == 0 and "60 of 60 targets end in </s>" in err


def test_all_of_a_sorted_file_is_seen(folder, capsys, monkeypatch):
    monkeypatch.setattr("fivetune.start.columns.MAX_RECORDS", 500)
    rows = [f"Ann has {i},{'bad' if i < 1_000 else 'good'}" for i in range(1_100)]
    name = write_rows(folder / "t.csv", "text,label", rows)
    code, out, _ = run(capsys, "new", name, "--model", "t5-nano", "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["labels"] == {"bad": 1_000, "good": 100}


def test_the_commands_of_a_doubt_keep_what_was_given(folder, capsys):
    name = write_rows(folder / "t.csv", "", [f"Ann has {i},Bea has {i} hats,x{i // 2}" for i in range(60)])
    given = (
        "--header",
        "one,two,three",
        "--model",
        "t5-nano",
        "--output",
        "out",
        "--seed",
        "3",
        "--column",
        "group=three",
    )
    code, _, err = run(capsys, "new", name, *given)
    command = shlex.split(err.split("\n  ")[1].splitlines()[0])
    assert code == 3 and run(capsys, *command[1:])[0] == 0
    assert (folder / "out" / "t.yaml").is_file() and "t5-nano" in (folder / "out" / "t.yaml").read_text()
    assert {"--seed=3", "--column=group=three"} <= {*command}


def test_times_of_parquet_become_text(folder, capsys):
    rows = [{"text": f"Ann has {i}", "label": "ab"[i % 2], "at": datetime(2024, 1, 1 + i % 9)} for i in range(40)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "t.parquet")
    assert run(capsys, "new", "t.parquet", "--model", "t5-nano")[0] == 0
    assert read_sets("t", folder)["test"][0]["at"].startswith("2024-01-0")


def test_empty_cells_are_null_and_relate_no_records(folder, capsys):
    rows = [
        {"text": f"Ann has {i}", "label": "ab"[i % 2], "meta": {"author": f"a{i // 3}" if i < 90 else ""}, "price": 0.5}
        for i in range(200)
    ]
    rows[7]["price"] = float("nan")
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "t.parquet")
    words = ["new", "t.parquet", "--model", "t5-nano", "--column", "group=meta.author", "--json"]
    code, out, err = run(capsys, *words)
    assert code == 0, err
    facts = json.loads(out.splitlines()[-1])
    assert {one["name"]: one["kind"] for one in facts["columns"]}["price"] == "number"
    assert "NaN" not in "".join(path.read_text() for path in folder.glob("*.jsonl"))
    sets = read_sets("t", folder)
    authors = [{row["meta"]["author"] for row in sets[name]} - {""} for name in sets]
    assert not any(one & other for one in authors for other in authors if one is not other)
    assert all(len(sets[name]) > 30 for name in sets)


def test_an_input_that_some_records_have_not_is_empty_text(folder, capsys):
    draw = random.Random(3)
    rows = [{"instruction": f"Sing of {draw.choice(kit.OWNERS)} {i}.", "output": f"La {i} la."} for i in range(60)]
    for i, row in enumerate(rows):
        row |= [{"input": f"The {i} verses."}, {"input": None}, {}][i % 3]
    Path("songs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert run(capsys, "new", "songs.jsonl")[0] == 0
    found = [row for rows in read_sets("songs", folder).values() for row in rows]
    assert len(found) == 60
    assert sum(row["input"] == "" for row in found) == 40


def test_letters_that_t5_lacks_lead_to_another_model(folder, capsys):
    for name, words in (("es", "¿Dónde está la niña {}?"), ("ru", "Где живёт Анна {}?"), ("zh", "{}")):
        rows = [{"text": words.format(i), "label": "ab"[i % 2]} for i in range(40)]
        for i, row in enumerate(rows if name == "zh" else []):  # no letter is in many texts
            row["text"] = "".join(chr(0x4E00 + 9 * i + place) for place in range(9))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        facts = json.loads(run(capsys, "new", f"{name}.jsonl", "--json")[1].splitlines()[-1])
        assert facts["model"] == "google/mt5-small"
    assert run(capsys, "new", "ru.jsonl", "--model", "t5-nano", "--overwrite")[2].count("inputs hold characters") == 1


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            "google-t5/t5-base",
            {"60 of 60 targets hold line ends", "60 of 60 targets hold characters", "{ }: no answer"},
        ),
        ("google/flan-t5-small", {"60 of 60 targets hold line ends", "60 of 60 targets hold characters"}),
        ("google/mt5-small", {"60 of 60 targets hold line ends"}),
        ("google/byt5-small", set()),
    ],
)
def test_characters_that_a_model_lacks_are_told_without_its_tokenizer(folder, capsys, model, told):
    rows = [{"prompt": f"order {i}", "response": f"{{\n  'coats': {i}\n}}"} for i in range(60)]
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = run(capsys, "new", "t.jsonl", "--model", model)
    assert code == 0
    assert all(words in err for words in told)
    assert err.count("targets hold") == sum("targets hold" in words for words in told)
    assert "inputs hold" not in err


def test_separators_of_questions_and_other_forms_of_letters_are_no_lost_inputs(folder, capsys):
    rows = [{"question": f"Who… has {i} ½ hats?", "choices": ["Ann", "Bob"], "answer": "Ann"} for i in range(40)]
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = run(capsys, "new", "t.jsonl", "--model", "google-t5/t5-small")
    assert (code, "hold characters" in err) == (0, False)


@pytest.mark.parametrize(
    ("fields", "way", "part"),
    [
        ({"context": "", "question": "", "answers": ["red"]}, "windows", ""),
        ({"text": "", "label": "ab"}, "head_tail", "middle"),
        ({"instruction": "", "output": "It is what they have."}, "head_tail", "middle"),
        ({"prompt": "", "completion": "It is what they have."}, "head_tail", "middle"),
        ({"article": "", "summary": "It is what they have."}, "truncate", "end"),
    ],
)
def test_long_inputs_are_read_in_windows_or_keep_their_ends(folder, capsys, fields, way, part):
    words = " ".join(["Ann has a red hat."] * 100)
    read = [name for name, value in fields.items() if not value]
    rows = [{**fields, **dict.fromkeys(read, f"{i} {words} What has {i}?")} for i in range(40)]
    for i, row in enumerate(rows):
        row |= {"label": "ab"[i % 2]} if "label" in row else {}
        row |= {name: f"{row[name]} {i}" for name in ("output", "completion", "summary") if name in row}
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = run(capsys, "new", "t.jsonl", "--model", "t5-nano")
    data = load_config(folder / "t.yaml").data
    assert (code, data.overlong, data.max_input_tokens) == (0, way, 512)
    assert (f"lose their {part}" in err) == bool(part)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("t.csv", "--column", "label"), "--column label: is not ROLE=NAME. Roles: question"),
        (("t.csv", "--task", "squadd"), "squadd"),
        (("t.csv", "--seed", "-1"), "--seed -1: is negative"),
        (("nope.csv",), "nope.csv: no such file or folder"),
        (("b.csv",), "b.csv: this is no text file (PNG)"),
        (("h.csv",), "h.csv: holds no records"),
        (("t.csv", "--model", "./nowhere"), "./nowhere: no such model folder"),
    ],
)
def test_wrong_words_are_one_line(folder, capsys, words, message):
    write_tickets(folder / "t.csv")
    (folder / "b.csv").write_bytes(b"\x89PNG\r\n" + bytes(range(256)))
    (folder / "h.csv").write_text("text,label\n")
    code, _, err = run(capsys, "new", *words)
    assert code in (2, 3, 4) and message in err and err.count("\n") == 1
    assert not (folder / "t.yaml").exists()


def test_what_is_data_and_what_a_recipe(folder, capsys):
    write_tickets(folder / "t.csv")
    for name in ("run/config.yaml", "damaged/machine.json"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("{}")
        (folder / name).with_name("curve.csv").write_text("a")
    (folder / "r.json").write_text('{"model": {"path": "m"}, "task": "squad"}')
    (folder / "d.json").write_text('{"data": []}')
    data = ("t.csv", "t.csv.gz", ".", "d.json")
    assert all(map(is_data, data)) and not any(map(is_data, ("run", "damaged", "squad_v2", "y.yaml", "nope", "r.json")))
    code, _, err = run(capsys, "check", "t.csv")
    assert (code, err) == (2, "fivetune: t.csv: is data, not a recipe. Write a recipe for it: fivetune new t.csv.\n")
    with pytest.raises(
        ConfigError, match=r"recipe: is a list. Allowed are a file, .* Give data by the setting data.train"
    ):
        load_config([{"text": "a"}])  # pyright: ignore[reportArgumentType]


# --- from data to a model ---


def test_check_accepts_the_recipe(folder, capsys, model_folder):
    write_tickets(folder / "t.csv")
    assert run(capsys, "new", "t.csv", "--model", str(model_folder))[0] == 0
    code, out, _ = run(capsys, "check", "t.yaml", "--data.cache_dir", str(folder / "cache"))
    assert code == 0 and "0 failed" in out


@pytest.mark.slow
def test_train_starts_from_data(folder, capsys, model_folder):
    write_tickets(folder / "t.csv")
    words = ["--model.path", str(model_folder), "--train.num_epochs", "1", "--data.cache_dir", str(folder / "cache")]
    code, out, err = run(capsys, "train", "t.csv", *words, "--train.num_threads", "1")
    assert code == 0, err
    assert "recipe  t.yaml" in out and (folder / "runs" / "t" / "model" / "model.safetensors").is_file()
    assert yaml.safe_load((folder / "t.yaml").read_text())["model"]["path"] == str(model_folder)
    test = ["--data.eval", "t-test.jsonl", "--data.cache_dir", str(folder / "cache")]
    assert run(capsys, "evaluate", "runs/t", *test)[0] == 0
    assert run(capsys, "train", "t.csv", "--resume", *words)[0] == 0
    code, _, err = run(capsys, "train", "t.csv", *words)
    assert code == 2 and "t.yaml: exists. It is trained with: fivetune train t.yaml" in err


def write_rows(path: Path, header: str, rows: Iterable[str]) -> str:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path.name


@pytest.mark.parametrize(
    ("cell", "num", "told"),
    [
        ("", 2, "2 records have nothing in text_b"),
        ("nan", 1, "1 record has an input that programs write for an empty cell: 'nan' (1 record)"),
        ("None", 3, "3 records have an input that programs write for an empty cell: 'None' (3 records)"),
        ("", 40, ""),  # a column that is often empty is meant so
    ],
)
def test_inputs_that_are_empty_are_told(folder, capsys, cell, num, told):
    rows = [f"text {i},{cell if i < num else f'a second text {i}'},{'ab'[i % 2]}" for i in range(60)]
    name = write_rows(folder / "t.csv", "text,text_b,label", rows)
    words = ("--column", "text=text", "--column", "text=text_b", "--column", "label=label")
    code, _, err = run(capsys, "new", name, "--model", "t5-nano", *words)
    assert (code, told in err, "text_b" in err) == (0, True, "text_b" in told)


def test_inputs_that_repeat_are_told(folder, capsys):
    rows = [f"text {i % 19},{'ab'[i % 2]}" for i in range(240)]
    words = ("--model", "t5-nano", "--column", "text=text", "--column", "label=label")
    code, _, err = run(capsys, "new", write_rows(folder / "t.csv", "text,label", rows), *words)
    assert (code, "240 records have 19 different inputs" in err) == (0, True)


def test_misspelt_labels_are_named(folder, capsys) -> None:
    rows = [f"text number {i},{('Lieferung', 'Rechnung', 'Konto')[i % 3]}" for i in range(60)]
    rows += ["late again,Lieferng", "too much,rechnung", "one of few,Diverses"]
    code, _, err = run(capsys, "new", write_rows(folder / "a.csv", "text,label", rows), "--model", "t5-nano")
    assert code == 0
    assert "labels that may be misspelt: 'Lieferng' (1) for 'Lieferung'. Correct them: the model" in err
    assert "1 label has less than 10 records ('Diverses')" in err


@pytest.mark.parametrize(
    ("header", "rows", "words", "message"),
    [
        ('{"a": 1}', ["7", '"x"'], [], "holds 1 record, and 2 that cannot be read; the first: a.txt:2: "),
        ("text,label", ["late,a", "soon,b"] * 9, ["--task", "mixture"], "--task mixture: its parts are data sets of"),
        (
            "text,label",
            [f"t {i},x" for i in range(12)],
            [],
            "all values of label are 'x', and a classification needs two labels",
        ),
    ],
)
def test_a_source_without_a_recipe_says_why(folder, capsys, header, rows, words, message) -> None:
    name = write_rows(folder / ("a.txt" if header[0] == "{" else "a.csv"), header, rows)
    code, _, err = run(capsys, "new", name, *words)
    assert code in (2, 3) and message in err and err.count("\n") == 1


def test_a_label_of_nearly_all_records_is_told(folder, capsys) -> None:
    rows = [f"the parcel number {i} is late again,{'good' if i % 20 else 'bad'}" for i in range(200)]
    code, _, err = run(capsys, "new", write_rows(folder / "a.csv", "text,label", rows))
    assert code == 0 and "'good' has 95.0 % of the records" in err


def test_a_task_that_does_not_fit_columns_says_what_they_are_and_which_task_does(folder, capsys) -> None:
    rows = [f"How high is the mountain number {i}?,{i * 37 % 101},todo" for i in range(40)]
    name = write_rows(folder / "a.csv", "question,answer,status", rows)
    words = ["new", name, "--column", "question=question", "--column", "answer=answer"]
    code, _, err = run(capsys, *words, "--task", "unifiedqa")
    assert code == 3 and "status" not in err and "different values" not in err
    assert "--task squad" in err or "--task jsonl" in err
    assert run(capsys, *words)[0] == 0


@pytest.mark.parametrize(
    ("header", "rows", "words"),
    [
        ("text,label", ["a good film,pos", "so bad,neg", "fine day,pos"], "read as classification: label from text"),
        ("frage,antwort,x", ["Wer?,Ada war es,1", "Wo?,In Rom am See,2"], "antwort from frage"),
        ("text,label", ["a good film,pos", "so good,pos"], "read as classification: label from text"),
        ("x,y", ["we walked home,a day too late", "they ran off,in the rain"], "y from x; or text to text: x from y"),
    ],
)
def test_the_head_of_a_file_is_told_how_it_is_understood(folder, capsys, header, rows, words) -> None:
    code, _, err = run(capsys, "new", write_rows(folder / "a.csv", header, rows))
    assert code == 3 and words in err and "At least 10 are needed" in err
    assert [*folder.iterdir()] == [folder / "a.csv"]


def test_of_many_columns_those_that_are_read_are_listed(folder, capsys) -> None:
    names = [f"c{i}" for i in range(40)]
    rows = [",".join([*(str(i + n / 7) for n in range(40)), f"the text {i}", "ab"[i % 2]]) for i in range(20)]
    name = write_rows(folder / "a.csv", ",".join([*names, "text", "label"]), rows)
    code, out, _ = run(capsys, "new", name, "--model", "t5-nano")
    assert code == 0 and "20 records, 42 columns" in out
    shown = out.partition("\ntask ")[0]
    lines = [line.split()[0] for line in shown.splitlines()[3:] if line and line[0] != "─"]
    assert "c18" in lines and "c19" not in lines and {"text", "label"} <= set(lines) and "... 21 others" in out
    assert "and 1 other" not in out and "and text holds text" in " ".join(out.split())


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ("'a film, {}'", "single quotes enclose cells"),
        (r'"a \"film\", {}"', "double quotes enclose cells; inside, a backslash before a quote is left out"),
        ('"a ""film"", {}"', ""),
    ],
)
def test_unusual_quotes_are_told(tmp_path, cell, told):
    path = tmp_path / "a.csv"
    lines = [f"{cell.format(i)},{'ab'[i % 2]}\n" for i in range(20)]
    path.write_text("".join(["text,label\n", *lines]))
    assert describe_form(str(path)) == [told] * bool(told)


def test_a_table_of_which_much_cannot_be_read_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    lines = [f"a film {i},{'ab'[i % 2]}{f', number {i}' if i % 5 == 0 else ''}\n" for i in range(60)]
    path.write_text("".join(["text,label\n", *lines]))
    with pytest.raises(DataError, match=r"12 of 60 records cannot be read; the first: .*a\.csv:2: 3 cells"):
        build_plan(str(path), given={}, load_tokenizer=lambda name: None)


def test_records_within_records_are_told_with_the_command_that_joins_them(folder, capsys):
    pairs = [{"question": f"Who is it {i}?", "answer": "It is Ann."} for i in range(3)]
    (folder / "a.json").write_text(json.dumps([{"context": "It is Ann who sleeps.", "qa": pairs}] * 12))
    code, _, err = run(capsys, "new", "a.json")
    assert code == 3 and "its records are nested: *.qa.*." in err and "no task fits" not in err
    code, _, err = run(capsys, "new", "a.json", "--column", "label=context")
    assert code == 3 and "nested" not in err


def test_a_doubt_tells_the_records_within_records_too(folder, capsys):
    said = [{"body": "Yes, you can ask.", "verdict": "good"}, {"body": "It rains here.", "verdict": "bad"}]
    rows = [
        {"subject": f"Visa number {i}", "body": f"May I ask for {i} of them?", "is_open": "yn"[i % 2]}
        for i in range(12)
    ]
    (folder / "a.json").write_text("".join(json.dumps({**row, "comments": said}, indent=1) + "\n" for row in rows))
    code, _, err = run(capsys, "new", "a.json")
    assert code == 3 and "label=is_open" in err and "its records are nested: *.comments.*." in err


def test_texts_alone_are_data_of_denoising(folder, capsys):
    texts = [f"{owner} has a {colour} hat in town" for owner in kit.OWNERS for colour in kit.COLOURS]
    Path("texts.txt").write_text("\n\n".join(texts))
    code, out, err = run(capsys, "new", "texts.txt", "--task", "denoising", "--model", "t5-nano")
    assert code == 0 and "extra_id" not in out + err and "not read" not in out
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert "--task denoising" in run(capsys, "new", "texts.jsonl")[2]
