"""Evaluation: every example once, official scores, and a model that is none the wiser."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace

import kit
import numpy as np
import pytest
import torch
from decoding_kit import lively

from fivetune import cli, plugins, rundir
from fivetune.data.examples import Source
from fivetune.data.store.batch import PaddedBatch
from fivetune.data.store.encode import LengthLimits
from fivetune.data.store.ragged import Ragged
from fivetune.data.store.token_store import load_or_build_store
from fivetune.errors import ConfigError, NumericError
from fivetune.model.forward import compute_padded_losses
from fivetune.rundir.figures import find_exported_eval
from fivetune.rundir.progress import Progress
from fivetune.rundir.records import EvalRecord, Prediction
from fivetune.scores.metrics.squad_v2 import SQuADV2 as Metric
from fivetune.training.answers.evaluator import select_subset
from fivetune.training.run import train
from fivetune.training.state import past_evals


@pytest.fixture
def setup(tmp_path, model_folder):
    return kit.ready(tmp_path, model_folder)


def _run(setup, **kwargs):
    predictions: list[Prediction] = []
    record = setup.data.evaluator.run(setup.learner.model, step=7, write=predictions.extend, **kwargs)
    return record, [one.as_dict() for one in predictions]


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
            nats = compute_padded_losses(
                setup.learner.model.eval(), PaddedBatch(inputs, torch.ones_like(inputs), labels)
            ).sum()
        assert math.isclose(line["no_answer_score"], math.exp(-nats), rel_tol=1e-4)


def test_weights_that_are_not_finite_are_a_numeric_error(setup):
    """It ended in an internal error of the JSON writer."""
    with torch.no_grad():
        next(setup.learner.model.parameters()).fill_(math.nan)
    with pytest.raises(NumericError, match=r"^evaluation of q1\d\d: loss nan, confidence nan, .*train.precision bf16"):
        _run(setup)


def test_loss_is_nats_per_target_token(setup):
    record, _ = _run(setup)
    store, total, count = setup.data.evaluator.store, 0.0, 0
    for row in range(len(store)):
        inputs, labels = torch.tensor([store.inputs[row].tolist()]), torch.tensor([store.labels[row].tolist()])
        with torch.no_grad():
            total += (
                compute_padded_losses(setup.learner.model.eval(), PaddedBatch(inputs, torch.ones_like(inputs), labels))
                .sum()
                .item()
            )
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
    setup.learner.model.train(mode)
    before = torch.get_rng_state()
    weights = [p.detach().clone() for p in setup.learner.model.parameters()]
    _run(setup)
    assert torch.equal(torch.get_rng_state(), before)
    assert setup.learner.model.training is mode
    assert all(
        torch.equal(a, b) and b.grad is None for a, b in zip(weights, setup.learner.model.parameters(), strict=True)
    )


def test_cap_hits_are_counted(tmp_path, model_folder):
    record, lines = _run(kit.ready(tmp_path, model_folder, eval__max_new_tokens=1))
    assert record.max_new_tokens == 1
    assert record.rates["cap_hit"] == sum(line["hit_cap"] for line in lines) / 12


def test_cap_comes_from_the_training_targets(tmp_path, model_folder):
    setup = kit.ready(tmp_path, model_folder, eval__max_new_tokens=None)
    longest = setup.data.stream.store.summary["target_p99"]
    assert setup.data.evaluator.decoding.max_new_tokens == longest + math.ceil(longest / 4) + 4


def _tempted(setup) -> None:
    """Make the model want to write sentinels: two of them get rows so large that one always wins."""
    words, rows = setup.loaded.tokenizer, setup.learner.model.shared.weight
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
    _run(setup, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(i, 12) for i in range(1, 13)]


def test_subset_of_rows(setup):
    record, lines = _run(setup, questions=[2, 5])
    assert (record.num_examples, record.scores["total"]) == (2, 2)
    assert sorted(line["id"] for line in lines) == ["q102", "q105"]


class Targets:
    """What the choice of a subset needs of a store: a question for each target."""

    def __init__(self, targets: Sequence[int], *, window_shards: int | None = None) -> None:
        self.labels = Ragged.from_rows([[target, 1] for target in targets], np.uint16)
        self.groups, self.num_groups = np.arange(len(targets)), len(targets)
        self.window_shards = window_shards


def test_a_subset_is_the_same_in_every_run_and_of_the_size_that_was_asked_for():
    store = Targets(range(100))
    chosen = select_subset(store, 30)
    assert chosen == select_subset(Targets(range(100)), 30) == sorted({*chosen}) and len(chosen) == 30
    assert select_subset(store, 100) is None and select_subset(store, None) is None
    assert len({*select_subset(Targets(range(100), window_shards=2), 30)}) == 30


@pytest.mark.parametrize("limit", [10, 25, 40, 100])
@pytest.mark.parametrize("period", [2, 4, 5])
def test_a_subset_has_the_labels_of_the_set_whatever_their_order(period, limit):
    """The share of the first label and of unanswerable questions, in files that alternate and in sorted ones."""
    for rest in (7, None):  # other labels, or a target of its own for each
        cycle = [9 if row % period == 0 else rest or 100 + row for row in range(400)]
        for targets in (cycle, sorted(cycle)):
            found = [targets[row] for row in select_subset(Targets(targets), limit)]
            assert abs(found.count(9) - limit / period) <= 1


def test_a_subset_asks_different_questions_of_each_passage():
    """Five questions a passage, a stride of ten: not always the first."""
    places = {row % 5 for row in select_subset(Targets(range(500)), 50)}
    assert places == {0, 1, 2, 3, 4}


def test_unlabelled_examples_are_answered_not_scored(setup, tmp_path):
    evaluator = setup.data.evaluator
    source = tmp_path / "questions.jsonl"
    source.write_text(json.dumps({"id": "a", "question": "What has Ann?", "context": "Ann has a red hat."}) + "\n")
    given = Source(paths=(str(source),), task=evaluator.task, limits=LengthLimits(64, 16, "truncate"), labelled=False)
    store = load_or_build_store(given, setup.loaded.tokenizer, cache=tmp_path / "cache")
    predictions: list[Prediction] = []
    record = replace(evaluator, store=store).run(setup.learner.model, step=0, write=predictions.extend)
    assert record.scores == {}
    assert [(one.id, one.references) for one in predictions] == [("a", ())]
    assert "scores" not in predictions[0].as_dict()


def test_run_directory_holds_the_predictions_of_each_evaluation(tmp_path, model_folder):
    run = train(kit.recipe(tmp_path, model_folder, eval__max_examples=4), preflight=False, quiet=True)
    folder = tmp_path / "run" / "predictions"
    assert not list(folder.glob("*.tmp"))
    for record in run.evals:
        lines = rundir.read_jsonl(folder / f"{record.split}-{record.step}.jsonl")
        assert len({line["id"] for line in lines}) == len(lines) == record.num_examples
        assert math.isclose(record.scores["exact"], 100 * sum(x["scores"]["exact"] for x in lines) / len(lines))
    assert {r.split for r in run.evals} >= {"eval"}


@pytest.mark.parametrize("final", ["full", "subset"])
def test_a_subset_at_the_end_too_only_if_asked_and_all_examples_announced(tmp_path, model_folder, capsys, final):
    given = kit.recipe(tmp_path, model_folder, eval__max_examples=4, eval__final=final)
    run = train(given, preflight=False)
    whole = [one for one in run.evals if one.num_examples > 4]
    said = "evaluating all" in (tmp_path / "run" / "log.txt").read_text()
    assert bool(whole) is said is (final == "full")
    assert find_exported_eval(run).num_examples == (max(one.num_examples for one in run.evals))


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"eval__final": "subset"}, "final is subset, and max_examples is not set"),
        ({"eval__final": "subset", "eval__max_examples": 4, "checkpoint__average_best": 2}, "eval.final is subset"),
    ],
)
def test_a_final_subset_that_cannot_be(tmp_path, model_folder, settings, said):
    with pytest.raises(ConfigError, match=said):
        train(kit.recipe(tmp_path, model_folder, **settings), preflight=False, quiet=True)


def test_progress_lines_fit_a_terminal(tmp_path, capsys):
    scores = dict.fromkeys(("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1"), 12.345)
    record = EvalRecord(
        123_456, "squad_v2", 1, "subset", 100, 0, scores, 1.5, {}, 9, 4_000.0, dict.fromkeys(scores, (10.0, 14.0))
    )
    progress = Progress(tmp_path / "log.txt")
    progress.show_evaluation(record)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 80
    assert "exact 12.35 (10.0-14.0)" in lines[0]
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 1


def test_only_a_terminal_folds_other_lines(monkeypatch, capsys):
    text = "a message of some words " * 10
    Progress().log(text.strip())
    assert capsys.readouterr().err == f"{text.strip()}\n"
    monkeypatch.setattr(Progress, "is_terminal", True)
    Progress().log(text.strip())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 80 and " ".join(lines).split() == text.split()


def test_the_time_left_of_an_evaluation_follows_its_first_answers(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("fivetune.rundir.progress.time.monotonic", lambda: now[0])
    progress = Progress()
    for start in (100.0, 5_000.0):  # the second evaluation has its own speed
        for seconds, done in ((0.0, 1), (10.0, 11)):
            now[0] = start + seconds
            progress.update("evaluating", done, 101)
        assert capsys.readouterr().err == "evaluating: 11 of 101, 1 min 30 s left\n"


def test_a_resumed_run_announces_how_long_all_examples_take(tmp_path, model_folder):
    """Its last part makes no other evaluation."""
    given = kit.recipe(tmp_path, model_folder, eval__max_examples=4, eval__final="subset")
    train(given, preflight=False, quiet=True)
    train(tmp_path / "run", {"eval.final": "full"}, resume=True, quiet=True)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert re.search(r"evaluating all \d+ examples, about \d", log), log


def test_a_long_evaluation_is_announced_without_a_limit_too(tmp_path, model_folder, monkeypatch):
    given = kit.recipe(tmp_path, model_folder)
    train(given, preflight=False, quiet=True)
    log = tmp_path / "run" / "log.txt"
    assert "evaluating" not in log.read_text()
    monkeypatch.setattr(past_evals, "SECONDS_ANNOUNCED", 1e-6)
    train(given | {"run": {**given["run"], "dir": str(tmp_path / "slow")}}, preflight=False, quiet=True)
    log = (tmp_path / "slow" / "log.txt").read_text()
    assert re.search(r"evaluating 12 examples, about \d.* \(eval\.max_examples limits it\)", log), log


# --- fivetune evaluate ---


@pytest.fixture
def trained(tmp_path, model_folder):
    train(kit.recipe(tmp_path, model_folder), preflight=False, quiet=True)
    return tmp_path / "run"


def _evaluate(run, *words: str, capsys) -> dict:
    assert cli.main(["evaluate", str(run), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_other_data_never_takes_the_name_of_the_run_s_own(trained, tmp_path, capsys):
    before = rundir.read_run(trained)
    own = {name: before.predictions[name] for name in before.predictions}
    best = find_exported_eval(before)
    other = str(kit.squad_file(tmp_path / "eval.json", num_questions=5, offset=300))
    assert _evaluate(trained, "--data.eval", other, capsys=capsys)["split"] == "other-eval"
    assert _evaluate(trained, "--data.eval", other, "--split", "subset", capsys=capsys)["split"] == "other-subset"
    assert _evaluate(trained, "--split", "eval", "--eval.max_new_tokens", "1", capsys=capsys)["split"] == "other-eval"
    after = rundir.read_run(trained)
    assert {name: after.predictions[name] for name in own} == own
    assert find_exported_eval(after) == best


def test_a_run_is_evaluated_again_on_its_own_data(trained, capsys):
    best = rundir.read_run(trained).status.best
    again = _evaluate(trained, "--split", "eval", capsys=capsys)
    assert (again["split"], again["step"], again["num_examples"]) == ("eval", best.step, 12)
    first, *_, last = rundir.read_evals(trained)
    assert first.basis == last.basis != ""
    assert _evaluate(trained, capsys=capsys)["split"] == "dev"


def test_a_run_without_evaluation_data_is_told_what_to_give(tmp_path, model_folder, capsys):
    train(kit.recipe(tmp_path, model_folder, data__eval=[]), preflight=False, quiet=True)
    assert cli.main(["evaluate", str(tmp_path / "run")]) == 3
    assert "data.eval: no data to evaluate on. Add --data.eval FILE." in capsys.readouterr().err


def test_metrics_are_looked_up_once(setup, monkeypatch):
    looked_up: list[str] = []
    whole = plugins.load_plugin
    monkeypatch.setattr(plugins, "load_plugin", lambda kind, name: looked_up.append(name) or whole(kind, name))
    _run(setup)
    assert looked_up == ["squad_v2"]


@pytest.mark.parametrize(
    "name, value",
    [
        ("length_penalty", 3.0),
        ("repetition_penalty", 1.9),
        ("min_new_tokens", 6),
        ("num_beams", 3),
        ("batch_size", 5),
        ("no_repeat_ngram_size", 2),
        ("stop", ("a", "\n")),
    ],
)
def test_settings_of_decoding_reach_the_decoder(tmp_path, model_folder, name, value):
    setup = kit.ready(tmp_path, model_folder, **{f"eval__{name}": value})
    assert getattr(setup.data.evaluator.decoding, name) == value


def test_settings_of_decoding_change_the_answers(tmp_path, model_folder, monkeypatch):
    """Each setting changes what the same lively model writes: by the recipe alone, from set-up to prediction."""
    model = lively(model_folder)

    def answers(**settings):
        setup = kit.ready(tmp_path, model_folder, eval__max_new_tokens=12, **settings)
        return {one.id: (one.prediction, one.num_tokens) for _, one in setup.data.evaluator.predict(model)}

    plain, beams = answers(), answers(eval__num_beams=4)
    assert all(num >= 8 for _, num in answers(eval__min_new_tokens=7).values())
    assert min(num for _, num in plain.values()) < 8
    assert answers(eval__repetition_penalty=1.9) != plain
    assert answers(eval__num_beams=4, eval__length_penalty=5.0) != beams


def test_several_answers_are_drawn_and_the_first_is_the_prediction(tmp_path, model_folder):
    model = lively(model_folder)

    def predict(**settings):
        options = {"eval__max_new_tokens": 12, "eval__temperature": 1.5, **settings}
        return {one.id: one for _, one in kit.ready(tmp_path, model_folder, **options).data.evaluator.predict(model)}

    one_each, several = predict(), predict(eval__num_candidates=5, eval__batch_size=7)
    assert {key: one.prediction for key, one in one_each.items()} == {
        key: one.prediction for key, one in several.items()
    }
    for one in several.values():
        assert len(one.candidates) == 5  # the probability of no answer is none of them
        assert one.candidates[0].text == one.prediction and one.candidates[0].score == one.confidence
        assert one.confidence == pytest.approx(math.exp(one.logprob))
    assert any(len({candidate.text for candidate in one.candidates}) > 1 for one in several.values())
    assert predict(eval__sampling_seed=1).keys() == one_each.keys() and predict(eval__sampling_seed=1) != one_each


@pytest.mark.parametrize("search", [{}, {"eval__num_beams": 3, "eval__num_candidates": 2}])
def test_an_answer_ends_before_a_stop_text(tmp_path, model_folder, search):
    model = lively(model_folder)

    def predict(**settings):
        options = {"eval__max_new_tokens": 12, **search, **settings}
        return {one.id: one for _, one in kit.ready(tmp_path, model_folder, **options).data.evaluator.predict(model)}

    whole = predict()
    longest = max((one.prediction for one in whole.values()), key=len)
    middle = len(longest) // 2
    stop = longest[middle : middle + 3]
    found = predict(eval__stop=["#none#", stop])
    for key, one in found.items():
        before, _, after = whole[key].prediction.partition(stop)
        assert one.prediction == (before.rstrip() if stop in whole[key].prediction else before)
        assert not any(stop in candidate.text for candidate in one.candidates)
        if after:
            assert not one.hit_cap and (search or one.num_tokens < whole[key].num_tokens)
    assert longest.partition(stop)[0].rstrip() in {one.prediction for one in found.values()}


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_answers_to_one_question_are_shares_of_one_whole(tmp_path, model_folder, temperature):
    """confidence was a mean per token beside the probability of no answer: lists added up to 138 %."""
    model = lively(model_folder)
    options = {"eval__max_new_tokens": 12, "eval__num_beams": 4, "eval__num_candidates": 4}
    evaluator = replace(kit.ready(tmp_path, model_folder, **options).data.evaluator, temperature=temperature)
    found = [one for _, one in evaluator.predict(model)]
    for one in found:
        assert sum(candidate.score for candidate in one.candidates) <= 1 + 1e-6
        assert one.candidates[0].text == one.prediction and one.candidates[0].score == one.confidence
        [leaning] = [candidate.score for candidate in one.candidates if not candidate.text]
        assert leaning == pytest.approx(one.no_answer_score, rel=1e-4)
        if temperature == 1:
            assert one.confidence == pytest.approx(math.exp(one.logprob))
    assert len(found) == 12
