"""Mixtures: the shares, the order, the joined store, and a run of two tasks from check to predict."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import kit
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivetune import cli, rundir
from fivetune.config import load_config
from fivetune.data.store.mixture import ConcatStore, MixtureSampler, compute_mixing_rates
from fivetune.data.store.stream import BatchPlan, TrainingStream
from fivetune.errors import ConfigError
from fivetune.rundir.records import Prediction
from fivetune.training.answers.loading import load_run_model
from fivetune.training.run import train
from fivetune.training.setup import set_up

LABELS = {"HQ": "red", "LQ": "blue"}


def posts(path: Path, *, num: int = 30) -> Path:
    """Posts as Stack Overflow has them; the label stands in the title, the tag in the body."""
    rows = [
        {
            "Id": i,
            "Title": kit.WORDS[i % 2],
            "Body": f"<p>{kit.WORDS[i % 3]} hat</p>",
            "Tags": f"<{kit.WORDS[i % 3]}>",
            "Y": ("HQ", "LQ")[i % 2],
        }
        for i in range(num)
    ]
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


def mixture(folder: Path, model: Path, **task) -> dict:
    """A recipe of three parts: two read the same posts, the third has files of its own."""
    recipe = kit.recipe(folder, model)
    parts = {
        "quality": {"task": {"name": "stackoverflow_quality", "labels": LABELS}},
        "tags": {"task": "stackoverflow_tags", "max_train_examples": 12},
        "squad": {"task": "squad_v2", "train": recipe["data"]["train"], "eval": recipe["data"]["eval"]},
    }
    recipe["data"] |= {"train": str(posts(folder / "posts.csv")), "eval": str(posts(folder / "dev.csv", num=8))}
    recipe["data"]["columns"] = {}
    return {**recipe, "task": {"name": "mixture", "parts": parts, "by": "size", **task}}


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_folder) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(mixture(folder, model_folder), quiet=True)
    return folder / "run"


# --- shares and order ---


def test_rates_of_the_paper():
    sizes = [100, 400, 2**30]
    assert compute_mixing_rates(sizes, limit=500) == [0.1, 0.4, 0.5]
    assert compute_mixing_rates(sizes, limit=1600, temperature=2) == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    assert compute_mixing_rates(sizes, temperature=1e9) == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(
    ("task", "shares"),
    [
        ({"by": "size", "limit": None}, [30, 12, 24]),
        ({"by": "size", "limit": 16}, [16, 12, 16]),
        ({"by": "size", "limit": 10}, [10, 10, 10]),
        ({"by": "temperature", "temperature": 2, "limit": None}, [26, 17, 23]),
        ({"by": "temperature", "temperature": 2, "limit": 12}, [12, 12, 12]),
    ],
)
def test_the_limit_decides_the_share_of_large_parts(tmp_path, model_folder, task, shares):
    """The parts have 30, 12 and 24 examples; the recipe's limit reaches the draw and data.json."""
    setup = set_up(load_config(mixture(tmp_path, model_folder, **task)))
    store = setup.data.stream.store
    parts = store.summary["parts"].values()
    assert [part["num_examples_per_epoch"] for part in parts] == shares
    assert [part["rate"] for part in parts] == [share / sum(shares) for share in shares]
    dealt = [
        row
        for step in range(setup.data.stream.steps_per_epoch)
        for rows in setup.data.stream.select_rows(step)
        for row in rows
    ]
    assert np.histogram(dealt, bins=[0, 30, 42, 66])[0].tolist() == shares


@given(st.lists(st.integers(1, 40), min_size=2, max_size=4), st.integers(1, 60), st.integers(1, 5), st.integers(0, 9))
def test_every_example_is_used_as_evenly_as_the_shares_allow(sizes, num_examples, num_epochs, seed):
    draw = MixtureSampler(sizes, compute_mixing_rates(sizes, temperature=2), num_examples, seed=seed)
    drawn = [draw(epoch) for epoch in range(num_epochs)]
    assert all(len(rows) == len(draw) for rows in drawn)
    uses = np.bincount(np.concatenate(drawn), minlength=sum(sizes))
    for part, share in zip(np.split(uses, np.cumsum(sizes)[:-1]), draw.shares, strict=True):
        assert part.sum() == share * num_epochs
        assert part.max() - part.min() <= 1
    assert np.array_equal(
        MixtureSampler(sizes, compute_mixing_rates(sizes, temperature=2), num_examples, seed=seed)(0), drawn[0]
    )


def test_the_stream_deals_what_the_epoch_draws(tmp_path, model_folder):
    setup = set_up(load_config(mixture(tmp_path, model_folder, by="temperature", temperature=5)))
    stream, store = setup.data.stream, setup.data.stream.store
    assert isinstance(store, ConcatStore)
    draw = MixtureSampler([30, 12, 24], compute_mixing_rates([30, 12, 24], temperature=5), 66, seed=1)
    for epoch in range(2):
        steps = range(epoch * stream.steps_per_epoch, (epoch + 1) * stream.steps_per_epoch)
        dealt = [row for step in steps for rows in stream.select_rows(step) for row in rows.tolist()]
        assert sorted(dealt) == sorted(draw(epoch).tolist())
    assert stream.count_examples_before(stream.steps_per_epoch) == len(draw) == stream.num_rows


def test_all_rows_of_one_task_are_dealt_as_before(tmp_path, model_folder):
    store = kit.ready(tmp_path, model_folder).data.stream.store
    order = BatchPlan(8, 4, 2, seed=3)
    plain, drawn = TrainingStream(store, order), TrainingStream(store, order, lambda epoch: np.arange(len(store)))
    for step in range(9):
        assert [rows.tolist() for rows in plain.select_rows(step)] == [
            rows.tolist() for rows in drawn.select_rows(step)
        ]


def test_joined_store(tmp_path, model_folder):
    setup = set_up(load_config(mixture(tmp_path, model_folder)))
    store = setup.data.stream.store
    assert isinstance(store, ConcatStore)
    quality, tags, squad = store.parts.values()
    assert (len(store), store.num_groups) == (66, 66)
    assert store.get_id(30) == f"tags/{tags.get_id(0)}"
    assert store.read_example(65) == squad.read_example(23)
    assert store.inputs[41].tolist() == tags.inputs[11].tolist()
    assert store.inputs.lengths.tolist() == [len(store.inputs[i]) for i in range(66)]
    assert sorted(store.groups.tolist()) == list(range(66))
    summary = store.summary
    assert summary["num_input_tokens"] == sum(part.summary["num_input_tokens"] for part in (quality, tags, squad))
    assert sum(summary["input_lengths"]["counts"]) == 66
    assert [part["rate"] for part in summary["parts"].values()] == [30 / 66, 12 / 66, 24 / 66]


# --- a run ---


@pytest.mark.slow
def test_every_part_is_scored_by_its_own_metrics(run):
    done = rundir.read_run(run)
    assert set(done.data.train.parts) == {"quality", "tags", "squad"}
    scores = done.evals[-1].scores
    assert {"quality_accuracy", "quality_macro_f1", "tags_micro_f1", "squad_f1", "squad_HasAns_f1"} <= set(scores)
    mains = [scores[name] for name in ("quality_accuracy", "tags_micro_f1", "squad_f1")]
    assert scores["mean"] == pytest.approx(sum(mains) / 3)
    assert (scores["total"], scores["quality_total"], scores["squad_total"]) == (28, 8, 12)
    assert done.status.best.metric == "mean"


@pytest.mark.slow
def test_prediction_lines_name_their_part(run):
    lines = rundir.read_jsonl(next((run / "predictions").glob("eval-6.jsonl")))
    assert len({line["id"] for line in lines}) == len(lines) == 28
    by_part = {part: [line for line in lines if line["meta"]["source_task"] == part] for part in ("quality", "tags")}
    assert all(line["prediction"] in LABELS and "left_label_set" in line for line in by_part["quality"])
    assert all(line["id"].startswith("tags/") and "tags_micro_f1" in line["scores"] for line in by_part["tags"])
    assert all("no_answer_score" in line for line in lines if line["id"].startswith("squad/"))


def test_a_subset_asks_every_part(tmp_path, model_folder):
    setup = set_up(load_config(mixture(tmp_path, model_folder)))
    assert setup.data.evaluator is not None
    predictions: list[Prediction] = []
    record = setup.data.evaluator.run(setup.learner.model, step=0, write=predictions.extend, questions=[0, 14])
    assert [one.id.partition("/")[0] for one in predictions] == ["quality", "tags", "squad"]
    assert "mean" in record.scores


@pytest.mark.slow
def test_one_part_predicts(run, capsys):
    texts = ["--inputs", "quality: red</s>hat"]
    assert cli.main(["predict", str(run), *texts]) == ConfigError.exit_code
    assert "task.part: the run is a mixture of quality, tags, squad. Name the one" in capsys.readouterr().err
    assert cli.main(["predict", str(run), *texts, "--task.part", "quality"]) == 0
    assert json.loads(capsys.readouterr().out)["prediction"] in LABELS


@pytest.mark.slow
def test_a_part_with_a_measured_batch_size_is_resumed_by_its_recipe(tmp_path, model_folder):
    """config.yaml had the part's task in place of the mixture."""
    recipe = mixture(tmp_path, model_folder, part="quality")
    recipe["train"] |= {"num_steps": 1, "batch_size": "auto"}
    train(recipe, preflight=False, quiet=True)
    assert train(recipe, {"train.num_steps": 2}, resume=True, preflight=False, quiet=True).status.step == 2


@pytest.mark.slow
def test_one_part_is_evaluated_on_other_files(run, tmp_path):
    other = posts(tmp_path / "other.csv", num=5)
    for overrides in ({"task.part": "tags", "data.eval": str(other)}, {"task.part": "squad", "data.eval": str(other)}):
        assert load_run_model(run, overrides).config.data.eval == (str(other),)
    trained = load_run_model(run, {"task.part": "tags", "data.eval": str(other)})
    record = trained.build_evaluator().run(trained.model, step=6, write=list)
    assert (record.task, record.scores["total"]) == ("stackoverflow_tags", 5)
    with pytest.raises(ConfigError, match=r"squad have files of their own. Give --task\.parts\.squad\.eval FILE"):
        load_run_model(run, {"data.eval": str(other)})


@pytest.mark.slow
def test_a_resumed_run_goes_on_where_it_stopped(run, tmp_path, model_folder):
    recipe = mixture(tmp_path, model_folder)
    train(recipe, {"train.num_steps": 3}, quiet=True)
    train(recipe, {"train.num_steps": 6}, resume=True, quiet=True)
    assert kit.weights_of(tmp_path / "run") == kit.weights_of(run)


@pytest.mark.slow
def test_check_and_evaluate(run, tmp_path, model_folder, capsys):
    recipe = tmp_path / "mixture.json"
    recipe.write_text(json.dumps(mixture(tmp_path, model_folder)))
    assert cli.main(["check", str(recipe)]) == 0
    assert cli.main(["evaluate", str(run), "--json"]) == 0
    assert "quality_accuracy" in json.loads(capsys.readouterr().out.splitlines()[-1])["scores"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.eval": []}, r"task\.parts\.quality\.eval: no file is given, though other parts have one"),
        ({"data.train": []}, r"task\.parts\.quality\.train: no file is given, though other parts have one"),
        ({"task.by": "rate"}, r"parts\.quality\.rate is None with by: rate\. Give every part one"),
        ({"task.parts.tags.rate": 2}, r"parts\.tags\.rate is 2\.0 with by: size\. Drop it, or take by: rate"),
        ({"task.parts.tags.task": "mixture"}, r"there is no task 'mixture' for a part"),
        ({"task.parts.tags.rats": 1}, r"task\.parts\.tags\.rats: rats is not a setting here\. Did you mean rate"),
        (
            {"task.parts.quality.task.x": 1},
            r"parts\.quality\.task\.x: x is not a setting here\. Allowed: labels, markup",
        ),
        ({"task.part": "tgas"}, r"there is no 'tgas'\. Did you mean tags"),
    ],
)
def test_mistakes(tmp_path, model_folder, changes, message):
    with pytest.raises(ConfigError, match=message):
        set_up(load_config(mixture(tmp_path, model_folder), changes))
