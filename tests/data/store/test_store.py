"""Tokenised data on disk: counts, the cache and its fingerprint, bad records."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import kit
import numpy as np
import pytest
from transformers import AutoTokenizer

from fivetune.data import storage
from fivetune.data.examples import MAX_SKIPS_KEPT, Source
from fivetune.data.store import arrays, build, convert, encode
from fivetune.data.store import token_store as store_module
from fivetune.data.store.encode import LengthLimits
from fivetune.data.store.token_store import TokenStore, describe_data, get_cache_folder, load_or_build_store
from fivetune.errors import DataError, FiveTuneEnvironmentError
from fivetune.rundir import replace_file
from fivetune.tasks.bioasq_factoid import BioASQFactoid
from fivetune.tasks.jsonl import JSONL
from fivetune.tasks.squad_v2 import SQuADV2


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder) -> Any:
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture
def squad(tmp_path) -> Source:
    return Source(paths=(str(kit.squad_file(tmp_path / "train.json")),), task=SQuADV2(), limits=LengthLimits(64, 16))


def pairs(folder: Path, *lines: dict[str, Any] | str, **options: Any) -> Source:
    """A JSONL source of these lines."""
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / "pairs.jsonl").write_text(text)
    return Source(paths=(str(folder / "pairs.jsonl"),), task=JSONL(), limits=LengthLimits(), **options)


def pair(number: int, words: str = "red hat") -> dict[str, Any]:
    return {"id": number, "inputs": f"Ann has a {words}", "targets": words}


# --- content ---


def test_examples_come_back_in_ids_and_words(tokenizer, squad, tmp_path):
    store = load_or_build_store(squad, tokenizer, cache=tmp_path / "cache")
    assert (len(store), store.get_id(1)) == (24, "q1")
    text = store.read_example(1)
    assert (text.inputs, text.targets) == ("question: What has Bob? context: Bob has a blue coat.", "blue coat")
    assert (text.references, text.inputs[slice(*text.clippable)]) == (("blue coat",), "Bob has a blue coat.")
    assert store.inputs[1].tolist() == tokenizer(text.inputs)["input_ids"]
    assert store.labels[0].tolist() == tokenizer("unanswerable")["input_ids"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(tokenizer, squad, tmp_path, monkeypatch):
    store = load_or_build_store(squad, tokenizer, cache=tmp_path / "cache")
    assert store.inputs[0].dtype == np.uint16
    peaks = []
    for num in (20, 80):  # texts of 6 kB, several chunks
        lines = [pair(i, "red hat " * 800) for i in range(num)]
        source = pairs(tmp_path, *lines)
        monkeypatch.setattr(build, "BLOCK", 10)
        monkeypatch.setattr(build, "SHARD_ROWS", 10)
        tracemalloc.start()
        load_or_build_store(source, tokenizer, cache=tmp_path / str(num))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]


@pytest.mark.slow
def test_memory_does_not_grow_with_questions_times_context(tokenizer, tmp_path, monkeypatch):
    """Fault C9: 98 contexts with 1,380 questions took 2.6 GB: a chunk was tokenised at once."""
    monkeypatch.setattr(encode, "MAX_CHARACTERS", 20_000)
    peaks = []
    for num in (10, 40):  # questions about one text of 8 kB
        context = "Ann has a red hat. " * 400
        asked = [
            {"id": f"q{i}", "question": "What has Ann?", "answers": [{"text": "red hat", "answer_start": 10}]}
            for i in range(num)
        ]
        path = tmp_path / f"{num}.json"
        path.write_text(json.dumps({"data": [{"paragraphs": [{"context": context, "qas": asked}]}]}))
        source = Source(paths=(str(path),), task=SQuADV2(), limits=LengthLimits(64, 16))
        tracemalloc.start()
        load_or_build_store(source, tokenizer, cache=tmp_path / str(num))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]


def test_the_summary_counts(tokenizer, squad, tmp_path):
    summary = load_or_build_store(squad, tokenizer, cache=tmp_path / "cache").summary
    assert (summary["num_read"], summary["num_kept"], summary["num_skipped"], summary["num_examples"]) == (
        24,
        24,
        0,
        24,
    )
    assert sum(summary["input_lengths"]["counts"]) == sum(summary["target_lengths"]["counts"]) == 24
    assert summary["target_p99"] <= summary["longest_target"] <= summary["max_target_tokens"] == 16
    assert (summary["num_skipped_bad"], summary["first_bad"]) == (0, None)
    assert (summary["num_examples_clipped"], summary["num_answers_lost"], summary["num_unknown_tokens"]) == (0, 0, 0)
    assert summary["source"] == list(squad.paths)


def test_what_the_limits_cost_is_counted(tokenizer, squad, tmp_path):
    tight = replace(squad, limits=LengthLimits(18, 2))
    summary = load_or_build_store(tight, tokenizer, cache=tmp_path / "cache").summary
    assert summary["num_examples_clipped"] == summary["num_clipped_targets"] == 24
    assert summary["num_answers_lost"] == 16  # all that had an answer
    whole = load_or_build_store(squad, tokenizer, cache=tmp_path / "cache").summary
    for key in ("longest_input", "longest_target", "input_lengths", "target_lengths"):  # before truncation
        assert summary[key] == whole[key]
    assert summary["longest_input"] > 18 and summary["target_p99"] == 2
    unknown = load_or_build_store(pairs(tmp_path, pair(1, "日本 hat")), tokenizer, cache=tmp_path / "cache").summary
    assert unknown["num_unknown_tokens"] == 1


def test_training_on_all_answers_makes_several_examples(tokenizer, tmp_path):
    answers = {"text": ["red hat", "hat", "hat"], "answer_start": [6, 10, 10]}
    record = {"id": "q1", "question": "What?", "context": "Ann a red hat", "answers": answers}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    source = Source((str(tmp_path / "a.jsonl"),), SQuADV2(train_answers="all"), LengthLimits(), for_training=True)
    store = load_or_build_store(source, tokenizer, cache=tmp_path / "cache")
    assert ([store.read_example(i).targets for i in range(2)], store.summary["num_kept"]) == (["red hat", "hat"], 1)
    assert len(load_or_build_store(replace(source, for_training=False), tokenizer, cache=tmp_path / "cache")) == 1


def test_only_the_first_so_many(tokenizer, squad, tmp_path):
    store = load_or_build_store(replace(squad, max_examples=5), tokenizer, cache=tmp_path / "cache")
    assert ([store.get_id(row) for row in range(len(store))], store.summary["num_read"]) == (
        ["q0", "q1", "q2", "q3", "q4"],
        5,
    )


def test_chunks_make_no_difference(tokenizer, squad, tmp_path, monkeypatch):
    whole = load_or_build_store(squad, tokenizer, cache=tmp_path / "one")
    monkeypatch.setattr(build, "BLOCK", 7)
    seen: list[int] = []
    cut = load_or_build_store(
        squad, tokenizer, cache=tmp_path / "two", on_progress=lambda what, n, total=None: seen.append(n)
    )
    assert (seen, cut.summary) == ([0, 7, 14, 21, 24], whole.summary)
    assert [cut.inputs[i].tolist() for i in range(24)] == [whole.inputs[i].tolist() for i in range(24)]


# --- cache ---


def test_a_cached_store_is_used_again(tokenizer, squad, tmp_path, monkeypatch):
    built = load_or_build_store(squad, tokenizer, cache=tmp_path / "cache")
    monkeypatch.setattr(store_module, "_build_store", lambda *_: pytest.fail("built twice"))
    again = load_or_build_store(squad, tokenizer, cache=tmp_path / "cache")
    assert (again.fingerprint, again.summary) == (built.fingerprint, built.summary)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_what_holds_no_answer_is_counted_not_learnt(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "BLOCK", 1)
    monkeypatch.setattr(convert, "CHUNK", 1)
    asked = {"question": "Who?", "answers": ["Ann"]}
    lines = [{**asked, "id": "q1", "context": "A hat."}, {**asked, "id": "q2", "context": "ann"}]
    source = pairs(tmp_path, *lines, for_training=True)
    store = load_or_build_store(replace(source, task=BioASQFactoid()), tokenizer, cache=tmp_path / "cache")
    assert (len(store), store.summary["num_kept"], store.summary["num_not_learnt"]) == (1, 2, 1)
    source = pairs(tmp_path, lines[0], for_training=True)
    with pytest.raises(DataError, match=r"no example is left of 1 record\. 1 without their answer in the context"):
        load_or_build_store(replace(source, task=BioASQFactoid()), tokenizer, cache=tmp_path / "cache")


def test_empty_facts_are_a_damaged_store(tokenizer, squad, tmp_path):
    load_or_build_store(squad, tokenizer, cache=tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / build.ROWS).write_bytes(b"")
    with pytest.raises(store_module.DamagedStoreError, match=r"damaged tokenised data"):
        TokenStore(folder)


@pytest.mark.parametrize("name", ["shard-00000.safetensors", "rows.safetensors", "index.json"])
def test_a_damaged_store_is_built_again(tokenizer, squad, tmp_path, name):
    built = load_or_build_store(squad, tokenizer, cache=tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-8])
    with pytest.raises(FiveTuneEnvironmentError, match=r"damaged tokenised data: .* Delete that folder"):
        TokenStore(folder)
    again = load_or_build_store(squad, tokenizer, cache=tmp_path / "cache")
    assert (again.summary, (folder / name).read_bytes()) == (built.summary, whole)


@pytest.mark.parametrize("name", ["shard-00000", "rows", "progress-00000", "index"])
def test_a_full_disk_names_the_cache(tokenizer, squad, tmp_path, monkeypatch, name):
    def fill(path: Path) -> Any:
        if path.name.startswith(name):
            raise OSError(28, "No space left on device")
        return replace_file(path)

    monkeypatch.setattr(arrays, "replace_file", fill)
    monkeypatch.setattr(storage, "replace_file", fill)
    with pytest.raises(
        FiveTuneEnvironmentError, match=r"cache: cannot be written: No space left.*another data\.cache_dir"
    ):
        load_or_build_store(squad, tokenizer, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_task_that_was_edited_builds_anew(tokenizer, squad, tmp_path, monkeypatch):
    built = load_or_build_store(squad, tokenizer, cache=tmp_path / "cache")
    edited = tmp_path / "squad_v2.py"
    edited.write_text(Path(store_module.inspect.getfile(SQuADV2)).read_text() + "# edited\n")
    monkeypatch.setattr(store_module.inspect, "getfile", lambda _: str(edited))
    assert load_or_build_store(squad, tokenizer, cache=tmp_path / "cache").fingerprint == built.fingerprint
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_tokenizer_that_splits_otherwise_builds_anew(tokenizer, squad, tmp_path):
    load_or_build_store(squad, tokenizer, cache=tmp_path / "cache")
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.backend_tokenizer.add_special_tokens(["<brand new>"])
    load_or_build_store(squad, other, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_an_interrupted_build_leaves_nothing(tokenizer, squad, tmp_path):
    def stop(what: str, done: int, total: int | None = None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_or_build_store(squad, tokenizer, cache=tmp_path / "cache", on_progress=stop)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_fingerprint_sees_everything_that_decides(tokenizer, squad, tmp_path):
    kit.make_tokenizer(tmp_path / "other")
    settings = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    settings["model"]["vocab"][5:7] = settings["model"]["vocab"][6:4:-1]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(settings))

    def compute_fingerprint(*data: Any) -> str:
        return describe_data(*data)[1].fingerprint

    same = compute_fingerprint(squad, tokenizer)
    changed = [
        compute_fingerprint(replace(squad, **change), tokenizer)
        for change in (
            {"task": SQuADV2(template="q: {question} c: {context}")},
            {"task": SQuADV2(no_answer="nothing")},
            {"limits": LengthLimits(63, 16)},
            {"limits": LengthLimits(64, 15)},
            {"limits": LengthLimits(64, 16, "head_tail")},
            {"columns": {"question": "title"}},
            {"max_examples": 3},
            {"for_training": True},
            {"labelled": False},
        )
    ]
    changed.append(compute_fingerprint(squad, AutoTokenizer.from_pretrained(tmp_path / "other")))
    assert compute_fingerprint(replace(squad), AutoTokenizer.from_pretrained(tokenizer.name_or_path)) == same
    kit.squad_file(Path(squad.paths[0]), offset=1)
    changed.append(compute_fingerprint(squad, tokenizer))
    assert len({same, *changed}) == len(changed) + 1


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (get_cache_folder(None), get_cache_folder("mine")) == (tmp_path / "fivetune", Path("mine"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ann")
    assert get_cache_folder(None) == Path("/home/ann/.cache/fivetune")


def test_a_cache_that_cannot_be_written(tokenizer, squad, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        FiveTuneEnvironmentError, match=r"file: cannot be written: Not a directory\. Choose another data\.cache_dir\."
    ):
        load_or_build_store(squad, tokenizer, cache=tmp_path / "file")


# --- bad records ---

BAD = [
    ("{torn", "pairs.jsonl:2", "pairs.jsonl:2: "),
    ({"id": 2, "inputs": "", "targets": "x"}, "pairs.jsonl:2", "inputs is empty."),
    ({"id": 2, "inputs": "x"}, "pairs.jsonl:2", "there is no column 'targets'."),
    (pair(1, "blue ring"), "pairs.jsonl:2", "the id '1' is already used by record 1."),
]


@pytest.mark.parametrize(("line", "where", "words"), BAD)
def test_bad_records_stop_or_are_counted(tokenizer, tmp_path, line, where, words):
    source = pairs(tmp_path, pair(1), line, pair(3))
    with pytest.raises(DataError) as caught:
        load_or_build_store(source, tokenizer, cache=tmp_path / "cache")
    assert words in str(caught.value)
    store = load_or_build_store(replace(source, on_bad_record="skip"), tokenizer, cache=tmp_path / "cache")
    assert [store.get_id(row) for row in range(len(store))] == ["1", "3"]
    summary = store.summary
    assert (summary["num_read"], summary["num_kept"], summary["num_skipped"]) == (3, 2, 1)
    assert summary["skips"][0]["where"].endswith(where)
    assert where not in summary["skips"][0]["reason"]


def test_check_and_train_share_a_store(tokenizer, squad, tmp_path, monkeypatch):
    """`check` skips bad records to count them, `train` does not: the data is tokenised once."""
    built = load_or_build_store(replace(squad, on_bad_record="skip"), tokenizer, cache=tmp_path / "cache")
    monkeypatch.setattr(store_module, "_build_store", lambda *_: pytest.fail("built twice"))
    assert load_or_build_store(squad, tokenizer, cache=tmp_path / "cache").fingerprint == built.fingerprint


@pytest.mark.parametrize(("line", "where", "words"), BAD)
def test_a_store_with_skipped_records_is_refused_where_they_must_not_be(tokenizer, tmp_path, line, where, words):
    source = pairs(tmp_path, pair(1), line, pair(3), on_bad_record="skip")
    load_or_build_store(source, tokenizer, cache=tmp_path / "cache")
    with pytest.raises(DataError) as caught:
        load_or_build_store(replace(source, on_bad_record="fail"), tokenizer, cache=tmp_path / "cache")
    message = str(caught.value)
    assert where in message and words in message
    assert message.count("data.on_bad_record: skip") == 1


def test_all_skips_are_counted_the_first_ones_named(tokenizer, tmp_path):
    bad = [{"id": i, "inputs": "x"} for i in range(2, 70)]
    summary = load_or_build_store(
        pairs(tmp_path, pair(1), *bad, on_bad_record="skip"), tokenizer, cache=tmp_path / "cache"
    ).summary
    assert (summary["num_read"], summary["num_skipped"], len(summary["skips"])) == (69, 68, MAX_SKIPS_KEPT)


def test_records_are_counted_apart_from_examples_and_what_the_task_leaves_out_is_named_once(tokenizer, tmp_path):
    golden = {
        "id": "q",
        "type": "factoid",
        "body": "Who?",
        "snippets": ["Ann did.", "Ann was."],
        "exact_answer": ["Ann"],
    }
    records = [golden, *({**golden, "id": f"y{i}", "type": "yesno"} for i in range(4))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    source = Source((str(tmp_path / "a.jsonl"),), BioASQFactoid(), LengthLimits())
    summary = load_or_build_store(source, tokenizer, cache=tmp_path / "cache").summary
    counts = [summary[f"num_{name}"] for name in ("read", "records_kept", "skipped", "skipped_bad", "examples")]
    assert (counts, len(summary["skips"])) == ([5, 1, 4, 0, 2], 1)


def test_windows_and_the_questions_cut_into_them_are_counted(tokenizer, tmp_path):
    records = [qa(1, "red hat " * 40), qa(2, "red hat")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    source = Source((str(tmp_path / "a.jsonl"),), SQuADV2(), LengthLimits(32, 8, overlong="windows"))
    summary = load_or_build_store(source, tokenizer, cache=tmp_path / "cache").summary
    assert (summary["num_cut_into_windows"], summary["num_windows"]) == (1, summary["num_examples"] - 1)
    assert summary["num_windows"] > 2


def qa(number, context):
    answers = {"text": ["red hat"], "answer_start": [0]}
    return {"id": f"q{number}", "question": "What?", "context": context, "answers": answers}


def test_a_source_that_leaves_nothing(tokenizer, tmp_path):
    source = pairs(tmp_path, {"id": 1, "inputs": "x"}, {"id": 2}, on_bad_record="skip")
    with pytest.raises(DataError) as caught:
        load_or_build_store(source, tokenizer, cache=tmp_path / "cache")
    assert "pairs.jsonl: no example is left of 2 records. The first: " in str(caught.value)
    assert str(caught.value).endswith("Check task.name and data.columns.")
    assert list((tmp_path / "cache").iterdir()) == []


def test_questions_that_say_nothing_about_answers(tokenizer, tmp_path):
    qas = [{"id": "q1", "question": "Who?"}]
    document = {"data": [{"title": "T", "paragraphs": [{"context": "Ann has a hat.", "qas": qas}]}]}
    (tmp_path / "ask.json").write_text(json.dumps(document))
    source = Source((str(tmp_path / "ask.json"),), SQuADV2(), LengthLimits(), labelled=False)
    store = load_or_build_store(source, tokenizer, cache=tmp_path / "cache")
    assert isinstance(store, TokenStore)
    assert store.read_example(0).references == ()
    with pytest.raises(DataError, match=r"there is no column 'answers'.*good for `fivetune predict` only"):
        load_or_build_store(replace(source, labelled=True), tokenizer, cache=tmp_path / "cache")
