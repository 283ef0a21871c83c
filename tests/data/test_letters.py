"""Special tokens that a text spells out are letters, for every kind of tokenizer; all other texts keep their ids."""

from __future__ import annotations

from typing import Any

import family_kit
import kit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivetune.data.corpus import CHECKPOINT
from fivetune.data.letters import LITERALS, list_structural_tokens, tokenize
from fivetune.data.readers.records import apply_task
from fivetune.data.store.encode import LengthLimits, encode, encode_labels, find_frame
from fivetune.data.store.windows import _cut_window
from fivetune.model.tokenizer import load_tokenizer
from fivetune.tasks import load_task
from fivetune.training.answers.requests import WholeInputs
from fivetune.types import RawRecord, TextExample

SHARED = [kit.SHARED / "data" / "tokenizers" / name for name in ("t5-small", "ptt5-portuguese")]
FAMILIES = ["gemma", "roberta", "madlad", "bytes", "morphemes"]
KINDS = ["t5-nano", *FAMILIES, *(folder.name for folder in SHARED if folder.is_dir())]
SPELT = ["</s>", "<pad>", "<unk>", "rot. </s>", "<p>a</p></s>b", "</s></s>", "＜/s＞", "<eos>", "<s>x", "<bos>"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = next((one for one in SHARED if one.name == request.param), CHECKPOINT)
    if request.param in FAMILIES:
        folder = family_kit.make_family_tokenizer(tmp_path_factory.mktemp("tokenizer") / request.param, request.param)
    return load_tokenizer(None, folder)


@pytest.mark.parametrize("text", SPELT)
def test_no_text_holds_a_structural_token(tokenizer, text):
    structural = {tokenizer.convert_tokens_to_ids(token) for token in list_structural_tokens(tokenizer)}
    structural -= {tokenizer.unk_token_id}
    (alone,) = tokenize(tokenizer, [text])
    assert structural.isdisjoint(alone.ids)
    example = TextExample("q1", f"Say {text} now", text, (text,), (4, 4 + len(text)))
    (tokens,) = encode(tokenizer, [example], [text], limits=LengthLimits())
    (labels,) = encode_labels(tokenizer, [text])
    assert list(tokens.labels) == labels and labels.count(tokenizer.eos_token_id) == 1
    assert [*tokens.input_ids].count(tokenizer.eos_token_id) <= 1


def test_tokens_that_texts_use_on_purpose_stay_tokens(tokenizer):
    tokenizer.add_tokens(["<hl>"])
    names = [token for token in ("<extra_id_0>", "<hl>") if token in tokenizer.get_vocab()]
    (plain,) = tokenize(tokenizer, [f"a {' '.join(names)} b"])
    (spelt,) = tokenize(tokenizer, [f"a {' '.join(names)} b </s> <pad>"])
    for token in names:
        number = tokenizer.convert_tokens_to_ids(token)
        assert number in plain.ids and number in spelt.ids


@pytest.mark.parametrize("text", ["a </s> b", "one </s>", "</s>x<pad>"])
def test_letters_have_their_places_in_the_text(tokenizer, text):
    if not tokenizer.is_fast:
        pytest.skip("has no offsets")
    (found,) = tokenize(tokenizer, [text], with_offsets=True)
    assert found.offsets and found.offsets[-1][1] == len(text)
    assert all(low <= high for low, high in found.offsets)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text("aé <>/s&extra_id_0pu.\n가", max_size=20), min_size=1, max_size=3))
def test_other_texts_keep_their_ids(tokenizer, texts):
    structural = list_structural_tokens(tokenizer)
    texts = [text for text in texts if not any(token in text for token in structural)] or ["a"]
    expected = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert [one.ids for one in tokenize(tokenizer, texts)] == expected


def test_bytes_of_a_special_token_are_its_letters(tmp_path):
    own = load_tokenizer(None, family_kit.make_family_tokenizer(tmp_path / "own", "bytes"))
    (found,) = tokenize(own, ["</s>"])
    assert bytes(number - 3 for number in found.ids) == b"</s>"


@pytest.mark.parametrize("title", ["Why?", "Why</s>?"])
@pytest.mark.parametrize("body", ["So.", "<p>So</p></s> it <pad> is.", "＜/s＞"])
def test_tokens_of_a_template_are_tokens_beside_letters_in_its_values(tokenizer, title, body):
    end = str(tokenizer.eos_token)
    task = load_task("jsonl", {"inputs": "quality: {Body}" + end + "{Title}"})
    [example] = apply_task(task, RawRecord({"id": "1", "Title": title, "Body": body}, "a:1"), labelled=False)
    (tokens,) = encode(tokenizer, [example], [""], limits=LengthLimits())
    ids = [*tokens.input_ids]
    num_added = find_frame(tokenizer).after.count(tokenizer.eos_token_id)
    assert ids.count(tokenizer.eos_token_id) == 1 + num_added
    assert example.meta[LITERALS] == [len("quality: ") + len(body)]
    if title == "Why?" and body == "So.":
        assert ids == tokenizer(example.inputs)["input_ids"]


@pytest.mark.parametrize(
    ("template", "places"),
    [
        ("{{a}}</s><{Title}>{Body}", [3]),  # not the "<" of a tag whose name is a value
        ("a < b {Title}</s>{Body}<pad>", [20, 37]),
        ("{Title} {Body}", None),
    ],
)
def test_places_of_tokens_are_those_of_the_template(template, places):
    fields = {"id": "1", "Title": "Why</s>\ufdd0 <pad>", "Body": "So</s> it is."}
    task = load_task("jsonl", {"inputs": template})
    [example] = apply_task(task, RawRecord(fields, "a:1"), labelled=False)
    assert example == task.to_text(RawRecord(fields, "a:1"), labelled=False) or places
    assert example.inputs == template.format(**fields) and example.meta.get(LITERALS) == places


def test_a_whole_text_has_as_many_tokens_as_the_template():
    whole = WholeInputs(template="tags: {Title}</s>{Body}")
    record = RawRecord({"id": "1", "inputs": "tags: Why?</s>So</s> it is."}, "a:1")
    [example] = apply_task(whole, record, labelled=False)
    assert example.inputs == "tags: Why?</s>So</s> it is." and example.meta[LITERALS] == [10]


def test_windows_keep_the_places_of_tokens():
    example = TextExample("1", "a</s>0123</s>56</s>b", "", (), (5, 15), {LITERALS: [1, 9, 15]})
    (first, second) = (_cut_window(example, low, high, 1, 2) for low, high in ((5, 9), (9, 15)))
    assert (first.inputs, first.meta[LITERALS]) == ("a</s>0123</s>b", [1, 9])
    assert (second.inputs, second.meta[LITERALS]) == ("a</s></s>56</s>b", [1, 5, 11])
