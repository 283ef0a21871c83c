"""The extractive head: where the answer stands, what the model points at, and a run from training to prediction."""

from __future__ import annotations

import gzip
import json

import kit
import pytest
import torch
from transformers import T5ForQuestionAnswering

from fivetune import cli, rundir
from fivetune.data.store.encode import LengthLimits, compute_encoded_offsets, encode
from fivetune.data.store.spans import extract_span_text, find_answer_span
from fivetune.errors import ModelError
from fivetune.model.decode.span_search import find_best_spans
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.tokenizer import load_tokenizer
from fivetune.tasks.squad_v2 import SQuADV2
from fivetune.training.run import train
from fivetune.types import RawRecord, TextExample

SQUAD = kit.SHARED / "data" / "squad_v2" / "dev-v2.0.json.gz"
TASK = SQuADV2(head="extractive")


@pytest.mark.parametrize("limits", [LengthLimits(), LengthLimits(40), LengthLimits(40, overlong="head_tail")])
@pytest.mark.skipif(not SQUAD.exists(), reason=kit.NEEDS_SHARED)
def test_labels_point_at_the_answer(limits):
    """On real questions: the characters between the two positions are the answer, or it was cut away."""
    words = load_tokenizer("t5-nano", kit.SHARED)
    paragraph = json.loads(gzip.decompress(SQUAD.read_bytes()))["data"][0]["paragraphs"][1]
    examples = [
        TASK.to_text(RawRecord({**qa, "context": paragraph["context"], "answers": _columns(qa)}, "dev.json:1"))
        for qa in paragraph["qas"]
    ]
    tokens = list(encode(words, examples, [e.targets for e in examples], limits=limits, head="extractive"))
    found = 0
    for example, one in zip(examples, tokens, strict=True):
        offsets = compute_encoded_offsets(words, example, limits)
        assert len(offsets) == len(one.input_ids) - 1
        if tuple(one.labels) == (0, 0):
            assert example.references == ("",) or limits.max_input_tokens
        else:
            found += 1
            text = extract_span_text(example.inputs, offsets, *one.labels)
            assert example.references[0] in text and len(text) <= len(example.references[0]) + 12
    assert found or limits.max_input_tokens


def test_an_answer_in_other_case_is_found_behind_letters_that_fold_longer():
    example = TextExample("q", "Die Straße in Köln ist", "köln", ("köln",), clippable=(0, 22))
    assert find_answer_span(example, "köln") == (14, 18)


def _columns(qa):
    return {key: [answer[key] for answer in qa["answers"]] for key in ("text", "answer_start")}


def test_best_spans_are_ordered_and_forward():
    torch.manual_seed(0)
    logits = torch.randn(12, 2)
    spans = find_best_spans(logits, range(1, 12), 5)
    every = {(i, j): float(logits[i, 0] + logits[j, 1]) for i in range(1, 12) for j in range(i, 12)}
    assert [span[:2] for span in spans] == sorted(every, key=lambda pair: -every[pair])[:5]
    assert [logp for *_, logp in spans] == pytest.approx(sorted(every.values())[:-6:-1])


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("pointing")
    return train(kit.recipe(folder, model_folder, task={"name": "squad_v2", "head": "extractive"})), folder


@pytest.mark.slow
def test_a_run_that_points(finished):
    run, folder = finished
    assert run.status.state == "finished"
    assert {"HasAns_f1", "NoAns_f1", "best_f1"} <= set(run.evals[-1].scores)
    for line in rundir.read_run(folder / "run").predictions["eval-6"]:
        context = line.inputs.partition("context: ")[2]
        assert line.prediction == "" or (line.in_context and line.prediction in context)
        assert 0 <= line.no_answer_score <= 1
    assert T5ForQuestionAnswering.from_pretrained(folder / "run" / "model").config.d_model == 32


@pytest.mark.slow
def test_the_loss_is_transformers_own(finished):
    """nats / 2 per example is the loss that T5ForQuestionAnswering itself reports."""
    from fivetune.data.store.batch import PaddedBatch
    from fivetune.model.forward import compute_padded_losses

    model = load_model_and_tokenizer(str(finished[1] / "run" / "model"), head="extractive").model.eval()
    ids, labels = torch.tensor([[7, 8, 9, 1], [7, 1, 0, 0]]), torch.tensor([[1, 2], [0, 0]])
    mask = (ids != 0).long()
    with torch.no_grad():
        ours = compute_padded_losses(model, PaddedBatch(ids, mask, labels)) / 2
        one = model(ids[:1], mask[:1], start_positions=labels[:1, 0], end_positions=labels[:1, 1]).loss
    assert ours[0].sum().item() == pytest.approx(one.item(), rel=1e-5)


@pytest.mark.slow
def test_predict_and_evaluate_it(finished, capsys):
    run = str(finished[1] / "run")
    assert cli.main(["predict", run, "--input", str(finished[1] / "dev.json")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 12 and {"prediction", "confidence", "no_answer_score"} <= set(lines[0])
    assert cli.main(["evaluate", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["scores"]["total"] == 12


@pytest.mark.slow
def test_an_extractive_model_cannot_generate(finished):
    with pytest.raises(ModelError, match=r"has a span head and cannot generate answers\. Set task\.head: extractive"):
        load_model_and_tokenizer(str(finished[1] / "run" / "model"))
