"""Evaluation: every example once, official scores, and a model that is none the wiser."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import kit
import pytest
import torch

from fivetune import cli, plugins, rundir
from fivetune.data.batch import PaddedBatch
from fivetune.data.encode import Limits
from fivetune.data.store import Source, prepare
from fivetune.evaluate import subset
from fivetune.metrics.squad_v2 import SquadV2 as Metric
from fivetune.model.forward import label_nats
from fivetune.training import train


@pytest.fixture
def setup(tmp_path, model_folder):
    return kit.ready(tmp_path, model_folder)


def _run(setup, **kwargs):
    lines: list[dict] = []
    record = setup.evaluator.run(setup.plain, step=7, write=lines.extend, **kwargs)
    return record, lines


def test_every_example_once_with_its_scores(setup):
    record, lines = _run(setup)
    assert sorted(line["id"] for line in lines) == sorted(f"q{i}" for i in range(100, 112))
    assert (record.step, record.task, record.split, record.num_examples) == (7, "squad_v2", "eval", 12)
    for line in lines:
        assert set(line) - {"in_context"} == {
            *("id", "inputs", "prediction", "references", "scores", "meta", "logprob", "num_tokens", "confidence"),
            *("no_answer_score", "hit_cap", "num_input_tokens", "num_clipped_tokens", "answer_clipped", "sentinel"),
            *("unknown_chars", "teacher_forced_exact", "free_running_exact"),
        }
        assert line["scores"]["exact"] in (0.0, 1.0)
    assert math.isclose(record.scores["exact"], 100 * sum(line["scores"]["exact"] for line in lines) / 12)
    assert math.isclose(record.scores["f1"], 100 * sum(line["scores"]["f1"] for line in lines) / 12)


def test_corpus_scores_are_the_metric_of_the_lines(setup):
    record, lines = _run(setup)
    golds = [tuple(line["references"]) for line in lines]
    again = Metric().score([line["prediction"] for line in lines], golds, details=lines)
    assert again.corpus == record.scores
    assert record.scores["HasAns_total"] + record.scores["NoAns_total"] == record.scores["total"] == 12


def test_no_answer_score_is_the_probability_of_the_phrase(setup):
    """By hand: exp(-nats) of "unanswerable" and its end token, given the inputs."""
    _, lines = _run(setup)
    for line in lines[:4]:
        inputs = setup.loaded.tokenizer(line["inputs"], return_tensors="pt").input_ids
        labels = setup.loaded.tokenizer("unanswerable", return_tensors="pt").input_ids
        with torch.no_grad():
            nats = label_nats(setup.plain.eval(), PaddedBatch(inputs, torch.ones_like(inputs), labels)).sum()
        assert math.isclose(line["no_answer_score"], math.exp(-nats), rel_tol=1e-4)


def test_loss_is_nats_per_target_token(setup):
    record, _ = _run(setup)
    store, total, count = setup.evaluator.store, 0.0, 0
    for row in range(len(store)):
        inputs, labels = torch.tensor([store.inputs[row].tolist()]), torch.tensor([store.labels[row].tolist()])
        with torch.no_grad():
            total += label_nats(setup.plain.eval(), PaddedBatch(inputs, torch.ones_like(inputs), labels)).sum().item()
        count += labels.numel()
    assert math.isclose(record.loss, total / count, rel_tol=1e-5)


def test_batch_size_changes_nothing(tmp_path, model_folder):
    found, losses = [], []
    for size in (1, 5, 64):
        record, lines = _run(kit.ready(tmp_path, model_folder, eval__batch_size=size))
        rounded = {k: v for k, v in record.scores.items() if not k.endswith("_thresh")}  # a no-answer probability
        found.append((rounded, record.rates, {line["id"]: line["prediction"] for line in lines}))
        losses.append(record.loss)
    assert found[0] == found[1] == found[2]
    assert max(losses) - min(losses) < 1e-5


@pytest.mark.parametrize("mode", [True, False])
def test_no_random_numbers_no_gradients_no_change_of_mode(setup, mode):
    setup.plain.train(mode)
    before = torch.get_rng_state()
    weights = [p.detach().clone() for p in setup.plain.parameters()]
    _run(setup)
    assert torch.equal(torch.get_rng_state(), before)
    assert setup.plain.training is mode
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(weights, setup.plain.parameters(), strict=True))


def test_cap_hits_are_counted(tmp_path, model_folder):
    record, lines = _run(kit.ready(tmp_path, model_folder, eval__max_new_tokens=1))
    assert record.max_new_tokens == 1
    assert record.rates["cap_hit"] == sum(line["hit_cap"] for line in lines) / 12


def test_cap_comes_from_the_training_targets(tmp_path, model_folder):
    setup = kit.ready(tmp_path, model_folder, eval__max_new_tokens=None)
    longest = setup.stream.store.summary["target_p99"]
    assert setup.evaluator.decoding.max_new_tokens == longest + math.ceil(longest / 4) + 4


def _tempted(setup) -> None:
    """Make the model want to write sentinels: two of them get rows so large that one always wins."""
    words, rows = setup.loaded.tokenizer, setup.plain.shared.weight
    with torch.no_grad():
        for index, sign in ((0, 9), (1, -9)):
            rows[words.convert_tokens_to_ids(f"<extra_id_{index}>")] = sign * rows[3:].abs().max() * rows[5].sign()


def test_sentinels_are_suppressed_or_counted(tmp_path, model_folder):
    kept = kit.ready(tmp_path, model_folder)
    _tempted(kept)
    record, lines = _run(kept)
    assert record.rates["sentinel"] == 0
    assert not any("extra_id" in line["prediction"] for line in lines)
    free = kit.ready(tmp_path, model_folder, eval__suppress_sentinels=False)
    _tempted(free)
    record, lines = _run(free)
    assert record.rates["sentinel"] == sum("<extra_id_" in line["prediction"] for line in lines) / 12 > 0


def test_progress_is_told(setup):
    told: list[tuple[int, int]] = []
    _run(setup, progress=lambda done, total: told.append((done, total)))
    assert told == [(i, 12) for i in range(1, 13)]


def test_subset_of_rows(setup):
    record, lines = _run(setup, questions=[2, 5])
    assert (record.num_examples, record.scores["total"]) == (2, 2)
    assert sorted(line["id"] for line in lines) == ["q102", "q105"]
    assert subset(5, 5) is None and subset(4, None) is None
    assert subset(100, 3) == [0, 33, 66]


def test_unlabelled_examples_are_answered_not_scored(setup, tmp_path):
    evaluator = setup.evaluator
    source = tmp_path / "questions.jsonl"
    source.write_text(json.dumps({"id": "a", "question": "What has Ann?", "context": "Ann has a red hat."}) + "\n")
    given = Source(paths=(str(source),), task=evaluator.task, limits=Limits(64, 16, "truncate"), labelled=False)
    store = prepare(given, setup.loaded.tokenizer, cache=tmp_path / "cache")
    lines: list[dict] = []
    record = replace(evaluator, store=store).run(setup.plain, step=0, write=lines.extend)
    assert record.scores == {}
    assert [(line["id"], line["references"]) for line in lines] == [("a", [])]
    assert "scores" not in lines[0]


def test_run_directory_holds_the_predictions_of_each_evaluation(tmp_path, model_folder):
    run = train(kit.recipe(tmp_path, model_folder, eval__max_examples=4), preflight=False, quiet=True)
    folder = tmp_path / "run" / "predictions"
    assert not list(folder.glob("*.tmp"))
    for record in run.evals:
        lines = rundir.read_jsonl(folder / f"{record['split']}-{record['step']}.jsonl")
        assert len({line["id"] for line in lines}) == len(lines) == record["num_examples"]
        assert math.isclose(record["scores"]["exact"], 100 * sum(x["scores"]["exact"] for x in lines) / len(lines))
    assert {r["split"] for r in run.evals} >= {"eval"}


# --- fivetune evaluate ---


@pytest.fixture
def trained(tmp_path, model_folder):
    train(kit.recipe(tmp_path, model_folder), preflight=False, quiet=True)
    return tmp_path / "run"


def _evaluate(run, *words: str, capsys) -> dict:
    assert cli.main(["evaluate", str(run), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_other_data_never_takes_the_name_of_the_run_s_own(trained, tmp_path, capsys):
    before = rundir.read(trained)
    own = {name: before.predictions[name] for name in before.predictions}
    best = rundir.best_eval(before.evals, before.status["best"])
    other = str(kit.squad_file(tmp_path / "eval.json", num_questions=5, offset=300))
    assert _evaluate(trained, "--data.eval", other, capsys=capsys)["split"] == "other-eval"
    assert _evaluate(trained, "--data.eval", other, "--split", "subset", capsys=capsys)["split"] == "other-subset"
    assert _evaluate(trained, "--split", "eval", "--eval.max_new_tokens", "1", capsys=capsys)["split"] == "other-eval"
    after = rundir.read(trained)
    assert {name: after.predictions[name] for name in own} == own
    assert rundir.best_eval(after.evals, after.status["best"]) == best


def test_a_run_is_evaluated_again_on_its_own_data(trained, capsys):
    best = rundir.read(trained).status["best"]
    again = _evaluate(trained, "--split", "eval", capsys=capsys)
    assert (again["split"], again["step"], again["num_examples"]) == ("eval", best["step"], 12)
    assert _evaluate(trained, capsys=capsys)["split"] == "dev"


def test_a_run_without_evaluation_data_is_told_what_to_give(tmp_path, model_folder, capsys):
    train(kit.recipe(tmp_path, model_folder, data__eval=[]), preflight=False, quiet=True)
    assert cli.main(["evaluate", str(tmp_path / "run")]) == 3
    assert "data.eval: no data to evaluate on. Add --data.eval FILE." in capsys.readouterr().err


def test_metrics_are_looked_up_once(setup, monkeypatch):
    looked_up: list[str] = []
    whole = plugins.load
    monkeypatch.setattr(plugins, "load", lambda kind, name: looked_up.append(name) or whole(kind, name))
    _run(setup)
    assert looked_up == ["squad_v2"]
