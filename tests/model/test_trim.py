"""A trimmed vocabulary: the same segmentation, scores and answers with fewer rows; what cannot be trimmed is named."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import family_kit
import kit
import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import fivetune
from fivetune.cli import main
from fivetune.commands import trim_vocab
from fivetune.data.readers.texts import TextReader
from fivetune.errors import ModelError
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.tokenizer import list_sentinel_ids, load_tokenizer
from fivetune.model.trim import choose_ids, iter_ids, trim_tables, trim_tokenizer, verify_segmentation
from fivetune.training.answers.trimmed import compare_samples, compute_sample

TEXTS = ["What has Ann?", "Ann has a red hat.", "<extra_id_0> Bob", "Bob has 2 hats"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(json.dumps({"id": f"zzz{n}", "a": text, "b": [text]}) + "\n" for n, text in enumerate(TEXTS))
    )
    return path


def trim(capsys: pytest.CaptureFixture[str], *words: Any) -> dict[str, Any]:
    assert main(["trim-vocab", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str]:
    code = main(["trim-vocab", *map(str, words)])
    return code, capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_ids_and_scores_of_the_kept_pieces_are_the_same(family_folders, family, data, tmp_path, capsys) -> None:
    folder, out = family_folders[family], tmp_path / "out" / "small"
    facts = trim(capsys, folder, "--data", data, "--output", out, "--margin", 5)
    old, new = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(out)
    assert facts["after"]["rows"] == len(new) < len(old) and len(new) % 8 == 0
    texts = [*TEXTS, "Bob has a hat", "red"]
    kept = [old.convert_tokens_to_ids(piece) for piece in new.convert_ids_to_tokens(range(len(new)))]
    before, after = old(texts).input_ids, new(texts).input_ids
    assert before == [[kept[one] for one in ids] for ids in after]
    assert [kept[one] for one in list_sentinel_ids(new)] == list_sentinel_ids(old)
    whole = load_model_and_tokenizer(str(folder)).model.eval()
    small = load_model_and_tokenizer(str(out)).model.eval()
    assert (whole.lm_head.weight is whole.shared.weight) == (small.lm_head.weight is small.shared.weight)
    for ids, own in zip(before, after, strict=True):
        logits = whole(input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([[0, *ids]])).logits[..., kept]
        given = small(input_ids=torch.tensor([own]), decoder_input_ids=torch.tensor([[0, *own]])).logits
        torch.testing.assert_close(given, logits, rtol=1e-5, atol=1e-5 * logits.abs().max().item())
    assert facts["sample"]["num_restricted"] == facts["sample"]["num_pairs"] == len(TEXTS)
    assert [path.name for path in out.parent.iterdir()] == ["small"]  # nothing is left beside it


def test_a_trained_model_gives_the_same_answers_and_trains_on(model_folder, tmp_path, capsys) -> None:
    table = kit.recipe(tmp_path, model_folder, optimizer__lr=1e-2, train__num_steps=40, eval__every_steps=40)
    fivetune.train(table)
    out = tmp_path / "small"
    words = ["--data", tmp_path / "train.json", tmp_path / "dev.json", "--task", "squad_v2", "--margin", 0]
    facts = trim(capsys, tmp_path / "run" / "model", *words, "--output", out)
    assert facts["after"]["rows"] < facts["before"]["rows"]
    assert facts["sample"]["num_equal"] == facts["sample"]["num_pairs"] == 32
    text = "question: What has Ann? context: Ann has a red hat."
    answers = [_answer_with_transformers(folder, text) for folder in (tmp_path / "run" / "model", out)]
    assert answers[0] == answers[1] != ""
    table["run"] = {"dir": str(tmp_path / "second")}
    fivetune.train(table, {"model.path": str(out), "train.num_steps": 2})


def _answer_with_transformers(folder: Path, text: str) -> str:
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=8)[0]
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_start_and_unknown_token_are_renumbered(tokenizer_folder, data, tmp_path, capsys) -> None:
    folder = kit.make_model(tmp_path / "model", tokenizer_folder, decoder_start_token_id=200)
    out = tmp_path / "small"
    trim(capsys, folder, "--data", data, "--output", out, "--margin", 0)
    old, new = load_tokenizer(None, folder), load_tokenizer(None, out)
    for name in ("config.json", "generation_config.json"):
        start = json.loads((out / name).read_text())["decoder_start_token_id"]
        assert start < 200 and new.convert_ids_to_tokens(start) == old.convert_ids_to_tokens(200)


def test_the_settings_of_generation_are_renumbered(tokenizer_folder, data, tmp_path, capsys) -> None:
    folder, out = kit.make_model(tmp_path / "model", tokenizer_folder), tmp_path / "small"
    path = folder / "generation_config.json"
    given = {
        "suppress_tokens": [150, 201],
        "bad_words_ids": [[202, 203], [204]],
        "force_words_ids": [[[205], [206, 207]]],
        "forced_eos_token_id": [208],
        "sequence_bias": [[[209, 210], -2.0]],
        "forced_decoder_ids": [[1, 211]],
        "max_new_tokens": 201,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | given))
    trim(capsys, folder, "--data", data, "--output", out, "--margin", 0)
    found = json.loads((out / "generation_config.json").read_text())
    old, new = load_tokenizer(None, folder), load_tokenizer(None, out)

    def name(value: Any) -> Any:
        return [name(one) for one in value] if isinstance(value, list) else old.convert_ids_to_tokens(value)

    for key in ("suppress_tokens", "bad_words_ids", "force_words_ids", "forced_eos_token_id"):
        assert re.sub(r"\d+", lambda one: repr(new.convert_ids_to_tokens(int(one[0]))), json.dumps(found[key])) == str(
            name(given[key])
        )
    assert new.convert_ids_to_tokens(found["sequence_bias"][0][0]) == name([209, 210])
    assert found["sequence_bias"][0][1] == -2 and found["max_new_tokens"] == 201
    assert found["forced_decoder_ids"][0][0] == 1 and found["forced_decoder_ids"][0][1] < 211
    path.write_text(json.dumps(given | {"max_new_tokens": -1}))
    code, message = refused(capsys, folder, "--data", data, "--output", tmp_path / "other")
    assert code and "generation_config.json: is refused: " in message
    path.write_text(json.dumps(given | {"suppress_tokens": [999]}))
    code, message = refused(capsys, folder, "--data", data, "--output", tmp_path / "other")
    assert code and "suppress_tokens has the id 999, and the table has 384 rows. Correct config.json" in message


def test_a_task_gives_the_texts_with_its_template(model_folder, data, tmp_path, capsys) -> None:
    out, task = tmp_path / "small", ["--task", "jsonl", "--task.inputs", "Eve {a}", "--task.targets", "{a}"]
    facts = trim(capsys, model_folder, "--data", data, "--output", out, "--margin", 0, "--text", "Cid", *task)
    assert facts["records"] == 4 and facts["sample"]["num_pairs"] == 4
    old, new = load_tokenizer(None, model_folder), load_tokenizer(None, out)
    for text in ("Eve", "Cid"):
        assert old.tokenize(text) == new.tokenize(text)
    assert old.tokenize("Dan") != new.tokenize("Dan")


def test_the_words_of_labels_that_do_not_occur_are_kept(model_folder, data, tmp_path, capsys) -> None:
    out = tmp_path / "small"
    labels = "{zzz0: Ann, zzz1: hat, zzz2: Bob, zzz3: red, other: Dan}"
    task = ["--task", "classification", "--task.inputs", "{a}", "--task.label", "id", "--task.labels", labels]
    trim(capsys, model_folder, "--data", data, "--output", out, "--margin", 0, *task)
    old, new = load_tokenizer(None, model_folder), load_tokenizer(None, out)
    assert old.tokenize("Dan") == new.tokenize("Dan")


def test_longt5_is_trimmed(data, tmp_path, capsys) -> None:
    folder = family_kit.make_family_model(tmp_path / "model", "longt5-tglobal")
    facts = trim(capsys, folder, "--data", data, "--output", tmp_path / "small", "--margin", 0)
    assert facts["after"]["rows"] < facts["before"]["rows"] and facts["sample"]["num_restricted"] == 4


# --- a wrong trim is found ---


@pytest.fixture
def parts(model_folder: Path) -> tuple[Any, Any, Any]:
    loaded = load_model_and_tokenizer(str(model_folder))
    counts = np.zeros(loaded.model.config.vocab_size, np.int64)
    for _, ids in iter_ids(loaded.tokenizer, TEXTS):
        counts[ids] += 1
    return loaded.model, loaded.tokenizer, counts


def test_a_dropped_piece_that_is_used_changes_the_segmentation(parts, tmp_path) -> None:
    _, tokenizer, counts = parts
    kept = choose_ids(tokenizer, counts, set("".join(TEXTS)), config_ids=[0], margin=0)
    kept = np.setdiff1d(kept, tokenizer(TEXTS[0]).input_ids[1])
    with pytest.raises(ModelError, match=r"segments a text of the data differently: 'What has Ann\?'. Nothing"):
        verify_segmentation(tokenizer, trim_tokenizer(tokenizer, kept, tmp_path), kept, TEXTS)


def test_other_rows_give_other_scores(parts, tmp_path) -> None:
    model, tokenizer, counts = parts
    kept = choose_ids(tokenizer, counts, set(), config_ids=[0], margin=0)
    whole = compute_sample(model, tokenizer, [(TEXTS[0], TEXTS[1])], kept=kept)
    trimmed = trim_tokenizer(tokenizer, kept, tmp_path)
    trim_tables(model, kept)
    with torch.no_grad():
        model.shared.weight[-1] += 0.01
    with pytest.raises(ModelError, match=r"logits differ by .* \(relative\), allowed is 1e-05"):
        compare_samples(whole, compute_sample(model, trimmed, [(TEXTS[0], TEXTS[1])]), kept)


def test_unknown_characters_keep_their_segmentation(parts, tmp_path) -> None:
    """The score of an unknown character depends on the least probable piece, which is kept."""
    _, tokenizer, counts = parts
    texts = [*TEXTS, "Ann hasñhas ¿hat?", "hatñ Ж"]
    for _, ids in iter_ids(tokenizer, texts):
        counts[ids] += 1
    kept = choose_ids(tokenizer, counts, set("".join(texts)), config_ids=[0], margin=0)
    assert verify_segmentation(tokenizer, trim_tokenizer(tokenizer, kept, tmp_path), kept, texts) > 20
    pieces = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    assert min(score for _, score in pieces) == min(pieces[number][1] for number in kept.tolist())


# --- bad input ---


def test_what_cannot_be_trimmed_is_refused_by_name(data, tmp_path, capsys) -> None:
    wrong = {
        "byt5": r"the tokens of ByT5Tokenizer are bytes: there is nothing to trim",
        "codet5": r"the tokenizer is a BPE model, whose pieces are merged from others",
        "t5gemma": r"model_type 't5gemma' has other tables than T5's.*Trim a model with .*: t5, mt5, umt5, longt5",
    }
    for name, message in wrong.items():
        folder = family_kit.make_family_model(tmp_path / name, name)
        code, text = refused(capsys, folder, "--data", data, "--output", tmp_path / "out")
        assert code == 4 and re.search(message, text)
    assert not (tmp_path / "out").exists()


def test_bad_arguments_are_refused_before_the_model_is_loaded(
    model_folder, data, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("fivetune.model.load.load_model_and_tokenizer", None)
    (tmp_path / "there").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    bare = tmp_path / "bare"
    bare.mkdir()
    out = ["--output", tmp_path / "out"]
    for code, message, words in (
        (2, "--output", [model_folder, "--data", data, "--output", tmp_path / "there"]),
        (
            2,
            "--margin -1: is not a number of pieces. Allowed: 0 or more",
            [model_folder, "--data", data, *out, "--margin=-1"],
        ),
        (2, "--train.lr: not a setting of trim-vocab", [model_folder, "--data", data, *out, "--train.lr", "1"]),
        (2, "--task.inputs: not a setting of trim-vocab", [model_folder, "--data", data, *out, "--task.inputs", "{a}"]),
        (3, "no such file or folder", [model_folder, "--data", tmp_path / "nope.jsonl", *out]),
        (3, "empty", [model_folder, "--data", tmp_path / "empty.jsonl", *out]),
        (4, "has no tokenizer. Give --tokenizer (", [bare, "--data", data, *out]),
        (4, "--tokenizer: ./none: no such model", [model_folder, "--tokenizer", "./none", "--data", data, *out]),
    ):
        found, text = refused(capsys, *words)
        assert (found, message in text) == (code, True), text
    assert not (tmp_path / "out").exists()


def test_data_without_a_text_and_bad_records(model_folder, tmp_path, capsys) -> None:
    (tmp_path / "numbers.jsonl").write_text('{"a": 1}\n{"a": " "}\n')
    code, text = refused(capsys, model_folder, "--data", tmp_path / "numbers.jsonl", "--output", tmp_path / "out")
    assert (code, "no record holds a text (2 read, 0 of them skipped)" in text) == (3, True)
    (tmp_path / "one.jsonl").write_text('{"a": "Ann ñ"}\nnonsense\n')
    facts = trim(capsys, model_folder, "--data", tmp_path / "one.jsonl", "--output", tmp_path / "out", "--margin", 0)
    assert (facts["records"], facts["skipped"]) == (2, 1)
    assert facts["warnings"][0].startswith("1 of 2 records cannot be used: ")


def test_unknown_characters_are_counted(model_folder, tmp_path, capsys) -> None:
    (tmp_path / "one.jsonl").write_text('{"a": "Ann \u4e2d\u56fd Ж"}\n')
    facts = trim(capsys, model_folder, "--data", tmp_path / "one.jsonl", "--output", tmp_path / "out", "--margin", 0)
    assert "the tokenizer does not know 3 characters of the data: Ж 中 国 (" in facts["warnings"][0]


def test_what_is_printed_tells_the_proof_from_the_answers(model_folder, data, tmp_path, capsys) -> None:
    facts = trim(capsys, model_folder, "--data", data, "--output", tmp_path / "out", "--margin", 0)
    facts["sample"] |= {"num_equal": 0, "num_dropped": 4}  # random weights answer with any piece
    trim_vocab._print_facts(facts, tmp_path / "out")
    proof, answers = capsys.readouterr().out.splitlines()[-3:-1]
    assert proof.strip() == "4 of 4 greedy answers are those of the whole model without the dropped pieces"
    whole = "answers 0 of 4 are those of the whole model with all its pieces"
    assert answers == f"{whole}; 4 of its answers contain a dropped piece"


def test_a_vocabulary_that_is_used_whole(model_folder, data, tmp_path, capsys) -> None:
    folder = kit.make_model(tmp_path / "model", model_folder, vocab_size=len(load_tokenizer(None, model_folder)))
    code, text = refused(capsys, folder, "--data", data, "--output", tmp_path / "out")
    assert (code, "--margin 1000 none is left to drop" in text) == (2, True)


def test_a_failure_leaves_no_folder(model_folder, data, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("fivetune.training.answers.trimmed.TOLERANCE", -1.0)
    code, text = refused(capsys, model_folder, "--data", data, "--output", tmp_path / "new" / "out")
    assert code == 4 and "logits differ" in text
    assert list((tmp_path / "new").iterdir()) == []


def test_memory_does_not_grow_with_the_data(tmp_path, model_folder, monkeypatch) -> None:
    monkeypatch.setattr("fivetune.model.trim.MAX_CHARACTERS", 10_000)
    tokenizer = load_tokenizer(None, model_folder)
    peaks = []
    for num_lines in (500, 10_000):
        path = tmp_path / f"{num_lines}.jsonl"
        path.write_text("".join(json.dumps({"a": f"Ann has {n} hats " * 3}) + "\n" for n in range(num_lines)))
        texts = (text for texts in TextReader([str(path)], None, {}).read() for text in texts)
        tracemalloc.start()
        assert sum(1 for _ in iter_ids(tokenizer, texts)) == num_lines
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]  # the texts of the longer file, kept, would add a megabyte


def test_the_least_probable_piece_is_kept(tokenizer_folder):
    """The score of an unknown character depends on it."""
    tokenizer = load_tokenizer(None, tokenizer_folder)
    pieces = json.loads((tokenizer_folder / "tokenizer.json").read_text())["model"]["vocab"]
    least = min(range(len(pieces)), key=lambda number: pieces[number][1])
    counts = np.zeros(len(tokenizer), dtype=np.int64)
    assert least in choose_ids(tokenizer, counts, set(), config_ids=(), margin=0)
