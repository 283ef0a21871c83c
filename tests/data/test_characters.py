"""What no answer can hold is told: special tokens that targets spell out, line ends; labels that look alike are one."""

from __future__ import annotations

import json

import pytest

from fivetune.cli import main
from fivetune.data.characters import describe_odd_targets
from fivetune.data.corpus import CHECKPOINT
from fivetune.data.labels import choose_form
from fivetune.model.tokenizer import load_tokenizer
from fivetune.tasks import normalize_label
from fivetune.types import TextExample


def make_example(target: str) -> TextExample:
    return TextExample("1", "text", target, (target,))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(None, CHECKPOINT)


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (["a </s>", "b</s> ", "c"], ["2 of 3 targets end in </s>, which FiveTune adds itself"]),
        (["a </s> b", "c"], ["1 of 2 targets hold </s>"]),
        (["<pad> a", "b </s>"], ["1 of 2 targets end in </s>", "1 of 2 targets hold <pad>"]),
        (["<unk>"], ["1 of 1 targets hold <unk>"]),
        (["<extra_id_0> a <extra_id_1> b"], ["1 of 1 targets hold <extra_id_0>, a token of pre-training"]),
        (["a\nb", "a\r\nb", "a\n", "\nb", "a"], ["2 of 5 targets hold line ends"]),
        (["a <|endoftext|>", "b<|endoftext|>"], ["2 of 2 targets end in <|endoftext|>"]),
        (["<bos> a <eos>", "<bos> b <eos>"], ["2 of 2 targets begin with <bos>", "2 of 2 targets end in <eos>"]),
        (["Yes. END", "No. END", "Yes END"], ["3 of 3 targets end in END"]),
        (["a ###", "b\n###"], ["2 of 2 targets end in ###", "1 of 2 targets hold line ends"]),
        (["YES", "NO", "YES", "YES"], []),
        (["a\tb", "a b", "< /s>", "<p>a</p>"], []),
        ([], []),
    ],
)
def test_odd_targets(tokenizer, targets, told):
    notes = describe_odd_targets(tokenizer, list(map(make_example, targets)))
    assert len(notes) == len(told) and all(note.startswith(start) for note, start in zip(notes, told, strict=True))


def test_sentinels_are_nothing_odd_where_they_are_learned(tokenizer):
    examples = [make_example("<extra_id_0> hat <extra_id_1>"), make_example("<extra_id_0> red <extra_id_1>")]
    assert describe_odd_targets(tokenizer, examples, keeps_sentinels=True) == []
    assert len(describe_odd_targets(tokenizer, examples)) == 3


def test_line_ends_beside_the_answer_cost_nothing(tokenizer):
    """Of GSM8K's reasoning the number alone is compared."""
    assert describe_odd_targets(tokenizer, [TextExample("1", "2 + 3", "2 + 3\n#### 5", ("5",))]) == []


def test_bytes_keep_line_ends(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    assert describe_odd_targets(load_tokenizer(None, tmp_path), [make_example("a\nb")]) == []


def test_inspect_tells_them(tmp_path, capsys):
    lines = [{"inputs": f"text {i}", "targets": f"line\nof {i} </s>"} for i in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["inspect", str(tmp_path / "a.jsonl"), "--task", "jsonl"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "warning: train: 4 of 4 targets end in </s>" in printed
    assert "warning: train: 4 of 4 targets hold line ends" in printed


LOOK_ALIKE = [
    "positive", "Positive", " positive", "positive ", "positive\u00a0", "posi\u200btive", "\ufeffpositive",
    "posi\u00adtive", "positive\u200f", "pos\u2060itive", "positive\u3000", "POSITIVE\n",
]  # fmt: skip


@pytest.mark.parametrize("label", LOOK_ALIKE)
def test_labels_that_look_alike_are_one(label):
    assert normalize_label(label) == "positive"


@pytest.mark.parametrize(
    ("one", "other"), [("a b", "ab"), ("x²", "x2"), ("é", "e"), ("\u200b", ""), ("1.0", "1"), ("-", "–")]
)
def test_other_labels_are_not(one, other):
    assert normalize_label(one) != normalize_label(other)


def test_inspect_tells_labels_that_look_alike_and_trains_the_visible_one(tmp_path, capsys):
    rows = "".join(f"text {place},{label}\n" for place, label in enumerate(LOOK_ALIKE[:-1]))
    (tmp_path / "a.csv").write_text(f"text,label\n{rows}text 90,posi\u200btive\ntext 91,no\n")
    assert main(["inspect", str(tmp_path / "a.csv"), "--task", "classification", "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)["sets"]["train"]
    assert [name for name, _ in counted["counts"]["class"]["common"]] == ["positive", "no"]
    told = counted["golds"]["merged_forms"]
    assert "'posi\\u200btive' (2 records)" in told
    assert choose_form({"posi\u200btive": 9, "positive": 1}) == "positive"


def test_right_choices_in_one_place_are_told():
    def make(number: int, right: str) -> TextExample:
        return TextExample(str(number), "Where?", right, (right,), meta={"choices": ["Seine", f"Rhine {number}"]})

    (note,) = describe_odd_targets(None, [make(number, "Seine") for number in range(40)])
    assert note.startswith("the right choice is number 1 in all of 40 questions")
    assert not describe_odd_targets(None, [make(number, "Seine") for number in range(19)])
    assert not describe_odd_targets(None, [make(one, ("Seine", f"Rhine {one}")[one % 2]) for one in range(40)])
