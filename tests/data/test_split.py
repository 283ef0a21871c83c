"""data.eval_share: an evaluation set split off the training records."""

from __future__ import annotations

import json
import random
from collections import Counter

import kit
import pytest

from fivetune.config import load_config
from fivetune.data.readers.records import apply_task
from fivetune.data.split import EvalSplit, split_records
from fivetune.errors import ConfigError, DataError
from fivetune.tasks.classification import Classification
from fivetune.tasks.denoising import Denoising
from fivetune.tasks.squad_v2 import SQuADV2
from fivetune.training.answers.loading import load_run_model
from fivetune.training.autotune.find_lr import as_single_process
from fivetune.training.checks.data_checks import iter_record_notes
from fivetune.training.checks.preflight import run_checks
from fivetune.training.run import train
from fivetune.training.setup import set_up
from fivetune.training.sources import with_data_labels
from fivetune.types import RawRecord


def split(task, records, **options):
    converted = [(record, (task.to_text(record),)) for record in records]
    found = split_records(converted, EvalSplit("eval", **options), by_label=task.labels is not None)
    return [record for record in records if found.is_on_side(record, "eval")]


def tickets(num, **more):
    return [
        RawRecord(
            {"id": f"t{i}", "text": f"text {i}", "label": "late" if i % 4 else "refund", **more}, f"a.csv:{i + 2}"
        )
        for i in range(num)
    ]


def test_labels_keep_their_shares_and_the_seed_decides():
    chosen = split(Classification(), tickets(400), share=0.1)
    assert Counter(record.fields["label"] for record in chosen) == {"late": 30, "refund": 10}
    assert chosen == split(Classification(), tickets(400), share=0.1)
    assert chosen != split(Classification(), tickets(400), share=0.1, seed=1)


def test_labels_too_small_for_their_share_fill_it_together():
    records = [
        RawRecord({"id": f"t{i}", "text": f"text {i}", "label": f"label {i % 26}"}, f"a.csv:{i + 2}") for i in range(40)
    ]
    chosen = split(Classification(), records, share=0.2)
    assert len(chosen) == 8
    assert max(Counter(record.fields["label"] for record in chosen).values()) == 1
    assert {int(record.fields["label"].split()[1]) for record in chosen} <= set(range(14))  # those with two records


def test_related_records_stay_on_one_side():
    """Questions of one context, and copies of one question, are on one side as a whole."""
    records = [
        RawRecord({"id": f"q{i}", "question": f"Who is {i}?", "context": f"Context {i // 5}.", "answers": ["x"]}, "a:1")
        for i in range(100)
    ]
    contexts = Counter(record.fields["context"] for record in split(SQuADV2(), records, share=0.2))
    assert set(contexts.values()) == {5} and sum(contexts.values()) == 20
    twice = [RawRecord({**record.fields, "id": f"copy-{record.fields['id']}"}, "b:1") for record in tickets(50)]
    chosen = split(Classification(), [*tickets(50), *twice], share=0.2)
    assert Counter(Counter(record.fields["text"] for record in chosen).values()).keys() == {2}


def test_chains_of_contexts_and_questions_end_before_they_join_everything():
    """Without an end, nearly all of 600 records would be one group."""
    draw = random.Random(3)
    records = [
        RawRecord(
            {"id": f"{i}", "question": f"What {draw.randrange(80)}?", "context": f"C {i // 3}.", "answers": ["x"]},
            "a:1",
        )
        for i in range(600)
    ]
    records += [RawRecord({**record.fields, "id": f"copy {record.fields['id']}"}, "b:1") for record in records[::50]]
    for seed in range(5):
        chosen = split(SQuADV2(), records, share=0.1, seed=seed)
        assert len(chosen) == pytest.approx(61, abs=2)
        contexts = {record.fields["context"] for record in chosen}
        assert len(contexts) > 10 and [r for r in records if r.fields["context"] in contexts] == chosen


@pytest.mark.parametrize(("num", "is_told"), [(100, False), (101, False), (109, False), (111, True), (88, True)])
def test_a_missed_share_is_told_with_the_numbers(num, is_told):
    facts = {
        "first_bad": None,
        "num_unlabelled": 0,
        "num_blank_golds": 0,
        "num_blank_synonyms": 0,
        "split": {"share": 0.1, "num_records": 1000, "num_eval_records": num, "largest_group": 700},
    }
    notes = [*iter_record_notes(facts)]
    assert bool(notes) == is_told
    assert not notes or (f"100 of 1,000 records, the evaluation data {num}: " in notes[0] and "has 700 " in notes[0])


def test_a_group_column_binds_and_a_question_asked_of_everything_does_not():
    records = [record for i in range(20) for record in tickets(5, customer=f"c{i}")]
    records = [RawRecord({**r.fields, "id": f"{i}", "text": f"unlike {i}"}, r.where) for i, r in enumerate(records)]
    customers = Counter(
        r.fields["customer"] for r in split(Classification(), records, share=0.2, group_column="customer")
    )
    assert set(customers.values()) == {5}
    asked = [
        RawRecord({"id": f"q{i}", "question": "Who?", "context": f"Context {i}.", "answers": ["x"]}, "a:1")
        for i in range(50)
    ]
    assert len(split(SQuADV2(), asked, share=0.2)) == 10
    with pytest.raises(DataError, match=r"there is no column 'x', which data\.group_column names"):
        split(Classification(), records, share=0.2, group_column="x")


@pytest.mark.parametrize("empty", [None, "", " "])
def test_records_without_a_group_are_not_related(empty):
    records = [
        RawRecord(
            {"id": f"{i}", "text": f"unlike {i}", "label": "a", "customer": empty if i % 2 else f"c{i // 10}"}, "a:1"
        )
        for i in range(100)
    ]
    chosen = split(Classification(), records, share=0.2, group_column="customer")
    customers = Counter(record.fields["customer"] for record in chosen)
    assert len(chosen) == 20 and 0 < customers.pop(empty) < 20 and set(customers.values()) == {5}


def test_what_cannot_be_split_is_an_error():
    same = [RawRecord({"id": f"{i}", "text": "one", "label": "a"}, "a:1") for i in range(9)]
    with pytest.raises(DataError, match=r"data\.eval_share: 0\.1 of 9 records in 1 groups .* one side empty"):
        split(Classification(), same, share=0.1)


def test_a_finder_leaves_out_all_settings_of_the_split():
    split = {"train": "a.csv", "eval_share": 0.1, "eval_seed": 3, "group_column": "book"}
    config = as_single_process(load_config({"model": {"path": "m"}, "task": "squad", "data": split}))
    assert load_config(config.as_dict()).data.group_column is None


@pytest.mark.parametrize(
    ("num_none", "counts", "other_forms"),
    [(1, {"red": 3, "blue": 1, "None": 3}, {"none": 1}), (3, {"red": 3, "blue": 1, "none": 5}, {"None": 2})],
)
def test_preflight_names_merged_forms_and_placeholders_once(tmp_path, model_folder, num_none, counts, other_forms):
    labels = ["red", "Red", "red", "blue", "None", "None", *["none"] * num_none]
    rows = [{"id": f"t{i}", "text": f"{kit.WORDS[i]} has {i}", "label": label} for i, label in enumerate(labels)]
    rows[0]["text"] = "nan"
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = str(tmp_path / "all.jsonl")
    task = {"name": "classification"}
    recipe = kit.recipe(tmp_path, model_folder, task=task, data__train=source, data__eval=[])
    setup = set_up(with_data_labels(load_config(recipe)))
    facts = setup.data.stream.store.summary
    assert (facts["label_counts"], facts["label_forms"]) == (counts, {"Red": 1, **other_forms})
    [detail] = [check.detail for check in run_checks(setup) if check.name == "records"]
    forms = "train: forms that differ only in case, white space or invisible characters count as one label: "
    assert detail.count(forms) == detail.count("'red' (2 records), 'Red' (1)") == 1
    assert detail.count("2 records have a label that programs write for an empty cell: 'None' (2 records)") == 1
    assert detail.count("1 record has an input that programs write for an empty cell: 'nan' (1 record)") == 1


@pytest.mark.slow
def test_a_run_is_scored_on_its_share_with_the_labels_of_its_data(tmp_path, model_folder):
    """The labels of the training data are in config.yaml, and the two sides together are all records."""
    rows = [{"id": f"t{i}", "text": f"{kit.WORDS[i % 14]} has {i}", "label": kit.COLOURS[i % 2]} for i in range(40)]
    rows += [{"id": "nan", "text": "no label", "label": "NaN"}]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = kit.recipe(
        tmp_path, model_folder, task={"name": "classification"}, data__train=str(tmp_path / "all.jsonl")
    )
    recipe["data"].pop("eval")
    run = train({**recipe, "data": {**recipe["data"], "eval_share": 0.25, "group_column": "id"}})
    assert load_config(tmp_path / "run").task.labels == {"blue": "blue", "red": "red"}
    kept, scored = run.data.train, run.data.eval
    assert (kept.num_records_kept, scored.num_records_kept) == (30, 10)
    assert (kept.num_unlabelled, kept.label_counts) == (1, {"red": 15, "blue": 15})
    assert scored.split.num_eval_records == 10 and scored.label_counts == {"red": 5, "blue": 5}
    assert run.evals[-1].num_examples == 10
    # In place of the run's own share.
    other = load_run_model(tmp_path / "run", {"data.eval": str(tmp_path / "all.jsonl")})
    assert (len(other.config.data.eval), other.config.data.eval_share, other.config.data.group_column) == (
        1,
        None,
        None,
    )
    with pytest.raises(ConfigError, match=r"data\.eval_share \(0\.5\) and data\.eval \(.*\) are both given"):
        load_run_model(tmp_path / "run", {"data.eval": "dev.jsonl", "data.eval_share": 0.5})
    assert run.evals[-1].rates["majority_label"] == 0.5 <= run.evals[-1].rates["one_label"]  # C2


def test_a_context_that_most_records_share_relates_none_of_them():
    """Of ten records six have one context: as one group they would all be evaluated, or none."""
    records = [
        RawRecord(
            {"id": f"q{i}", "question": f"Who is {i}?", "context": f"Context {max(5, i)}.", "answers": ["x"]}, "a:1"
        )
        for i in range(10)
    ]
    task = SQuADV2()
    converted = [(record, (task.to_text(record),)) for record in records]
    found = split_records(converted, EvalSplit("eval", 0.3), by_label=False)
    assert (len(found.eval_ids), found.num_groups) == (3, 10)


def test_texts_that_end_in_the_same_words_are_not_one_group():
    """Parts of texts, as span corruption divides them, relate no records; equal texts do."""
    task = Denoising(words=8)
    texts = [f"{' '.join(f'w{i}x{j}' for j in range(8))} the end" for i in range(20)]
    records = [RawRecord({"id": str(i), "text": text}, "a:1") for i, text in enumerate([*texts, texts[0]])]
    converted = [(record, apply_task(task, record)) for record in records]
    found = split_records(converted, EvalSplit("eval", 0.2), by_label=False, by_whole=True)
    assert (found.num_groups, found.largest_group) == (20, 2)
