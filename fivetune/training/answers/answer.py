"""Answers of the passages of a prepared set: generated text, the most probable label, or a span of the context.

In: a model, rows of a TokenStore. Out: (row, Prediction), streamed in the order of decoding: longest inputs first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import exp, isfinite
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fivetune.data.store.encode import LengthLimits, compute_encoded_offsets
from fivetune.data.store.spans import Offsets, extract_span_text, find_context_positions
from fivetune.data.store.token_store import TokenStore
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.errors import NumericError
from fivetune.model.decode import Decoding, GenerateAnswers, GeneratedAnswer, OnToken, cut_at_stop, to_text
from fivetune.model.family import SENTINEL
from fivetune.rundir.records import Candidate, Prediction
from fivetune.tasks import head_of
from fivetune.training.answers.tally import TargetLoss
from fivetune.types import OnNote, Task, TextExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.model.decode.span_search import SpanAnswer
    from fivetune.model.modules import T5Model
    from fivetune.types import Autocast


class AnswerSettings(Protocol):
    """Options of answering, without the model; `Evaluator` implements it."""

    @property
    def task(self) -> Task: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def store(self) -> TokenStore: ...
    @property
    def decoding(self) -> Decoding: ...
    @property
    def device(self) -> str: ...
    @property
    def keep_special(self) -> bool: ...
    @property
    def limits(self) -> LengthLimits: ...
    @property
    def autocast(self) -> Autocast: ...
    @property
    def generate(self) -> GenerateAnswers: ...
    @property
    def on_token(self) -> OnToken | None: ...
    @property
    def on_note(self) -> OnNote: ...


def answer_passages(
    settings: AnswerSettings,
    model: T5Model,
    rows: Sequence[int],
    loss: TargetLoss,
    world: World = SINGLE_PROCESS,
) -> Iterator[tuple[int, Prediction]]:
    """Yield row and Prediction of every passage as soon as it is answered; adds the loss of its target to `loss`.

    Raises NumericError if the loss or a confidence is not finite: no file of a run holds such a number.
    """
    answer = _answer_with_spans if head_of(settings.task) == "extractive" else _answer_with_text
    for row, prediction in answer(settings, model, rows, loss, world):
        found = {"loss": loss.total, "confidence": prediction.confidence, "log-probability": prediction.logprob}
        bad = [f"{name} {value}" for name, value in found.items() if value is not None and not isfinite(value)]
        if bad:
            raise NumericError(
                f"evaluation of {prediction.id}: {', '.join(bad)}. The weights are not finite or the forward pass "
                "overflows. Use train.precision bf16 or fp32, or earlier weights."
            )
        yield row, prediction


def _answer_with_text(
    settings: AnswerSettings, model: T5Model, rows: Sequence[int], loss: TargetLoss, world: World
) -> Iterator[tuple[int, Prediction]]:
    store = settings.store
    answers = settings.generate(
        model,
        store,
        rows,
        settings.decoding,
        device=settings.device,
        autocast=settings.autocast,
        world=world,
        tokenizer=settings.tokenizer,
        on_token=settings.on_token,
        on_note=settings.on_note,
    )
    for one in answers:
        yield one.row, _build_text_prediction(settings, one, loss)


def _start_prediction(settings: AnswerSettings, row: int, example: TextExample, prediction: str) -> Prediction:
    """Build a Prediction with the fields that all kinds of answers share."""
    # Known only for a task whose answers are parts of a context that the example has.
    in_context = None
    if settings.task.extractive and prediction and example.clippable[0] < example.clippable[1]:
        in_context = is_in_context(prediction, example)
    return Prediction(
        id=example.group or example.id,
        inputs=example.inputs,
        prediction=prediction,
        references=tuple(example.references),
        num_input_tokens=len(settings.store.inputs[row]),
        num_clipped_tokens=int(settings.store.num_clipped[row]),
        answer_clipped=bool(settings.store.answer_clipped[row]),
        in_context=in_context,
        meta=dict(example.meta),
    )


def _build_text_prediction(settings: AnswerSettings, one: GeneratedAnswer, loss: TargetLoss) -> Prediction:
    """Build the Prediction of a generated text, or of the most probable label for a label task."""
    task = settings.task
    tokenizer = settings.tokenizer
    example = settings.store.read_example(one.row)
    whole = to_text(tokenizer, one.token_ids, keep_special=settings.keep_special)
    text = cut_at_stop(whole, settings.decoding.stop)
    prediction = task.from_text(text)
    confidence = compute_probability(one.logprob)
    candidates = ()
    left_label_set = None
    if one.label_logprobs is not None:
        candidates = _rank_labels(task, one.label_logprobs)
        # The label itself, because the tokenizer may not return its words unchanged.
        prediction = candidates[0].text
        confidence = candidates[0].score
        left_label_set = one.left_label_set
    elif one.candidates:
        candidates = _decode_candidates(settings, one)
    no_answer_score = None
    if one.phrase_loss is not None:
        no_answer_score = compute_probability(-one.phrase_loss)
    started = _start_prediction(settings, one.row, example, prediction)

    # With the gold answer: its loss, and whether the model writes it after the gold tokens and after its own. Labels
    # are not written but chosen.
    teacher_forced = free_running = None
    if example.references:
        target = settings.store.labels[one.row].tolist()
        if one.label_logprobs is None:
            teacher_forced = one.target_correct
            free_running = [*one.token_ids, tokenizer.eos_token_id] == target
        loss.add(one.target_loss, len(target))
    return replace(
        started,
        confidence=confidence,
        logprob=one.logprob,
        num_tokens=one.num_scored_tokens,
        hit_cap=one.hit_cap and text == whole,
        sentinel=SENTINEL in text,
        unknown_chars=sum(token_id == tokenizer.unk_token_id for token_id in one.token_ids),
        no_answer_score=no_answer_score,
        candidates=candidates,
        left_label_set=left_label_set,
        teacher_forced_exact=teacher_forced,
        free_running_exact=free_running,
    )


def _rank_labels(task: Task, logprobs: Sequence[float]) -> tuple[Candidate, ...]:
    """Rank the labels by probability, normalized over the label set, best first."""
    assert task.labels is not None
    # The largest is subtracted first: exp of all of them may be 0.
    shares = np.exp(np.array(logprobs) - np.max(logprobs))
    shares /= shares.sum()
    ranked = sorted(zip(shares.tolist(), task.labels, strict=True), key=lambda pair: -pair[0])
    return tuple(Candidate(label, share) for share, label in ranked)


def _decode_candidates(settings: AnswerSettings, one: GeneratedAnswer) -> tuple[Candidate, ...]:
    """Decode several answers to texts, each with its probability.

    Answers of a search are in its order, by log p / length^length_penalty, and no answer follows if they lack it;
    drawn answers are as drawn.
    """
    found: list[Candidate] = []
    for ids, logprob in one.candidates:
        text = to_text(settings.tokenizer, ids, keep_special=settings.keep_special)
        text = cut_at_stop(text, settings.decoding.stop)
        found.append(Candidate(settings.task.from_text(text), compute_probability(logprob)))
    is_ranked = settings.decoding.sampling is None
    if is_ranked and one.phrase_loss is not None and all(candidate.text for candidate in found):
        found.append(Candidate("", compute_probability(-one.phrase_loss)))
    return tuple(found)


def _answer_with_spans(
    settings: AnswerSettings, model: T5Model, rows: Sequence[int], loss: TargetLoss, world: World
) -> Iterator[tuple[int, Prediction]]:
    from fivetune.model.decode.span_search import extract_spans  # needs torch

    # Offsets are computed once: when the search asks for the context, and used again for the text of the span.
    waiting: dict[int, tuple[TextExample, Offsets]] = {}

    def context_of(row: int) -> range:
        example = settings.store.read_example(row)
        waiting[row] = example, compute_encoded_offsets(settings.tokenizer, example, settings.limits)
        return find_context_positions(*waiting[row])

    spans = extract_spans(
        model,
        settings.store,
        rows,
        settings.decoding,
        context_of=context_of,
        device=settings.device,
        autocast=settings.autocast,
        world=world,
    )
    for one in spans:
        yield one.row, _build_span_prediction(settings, one, *waiting.pop(one.row), loss)


def _build_span_prediction(
    settings: AnswerSettings, one: SpanAnswer, example: TextExample, offsets: Offsets, loss: TargetLoss
) -> Prediction:
    """Build the Prediction of an extractive model; it abstains if the task allows that and no answer is likelier."""
    candidates = tuple(
        Candidate(extract_span_text(example.inputs, offsets, first, last), compute_probability(logprob))
        for first, last, logprob in one.spans
    )
    best = candidates[0] if candidates else Candidate("", 0.0)
    chosen = best
    answer = no_answer_score = None
    if settings.task.no_answer_text is not None:
        answer = best.text
        no_answer_score = compute_probability(one.null_logprob)
        if best.score < no_answer_score:
            chosen = Candidate("", no_answer_score)
    if example.references:
        loss.add(one.target_loss, 2)  # the first and the last token of the span
    return replace(
        _start_prediction(settings, one.row, example, chosen.text),
        confidence=chosen.score,
        candidates=candidates,
        no_answer_score=no_answer_score,
        answer=answer,
    )


def compute_probability(logprob: float) -> float:
    """Compute the probability (0-1) of a text from the sum of its tokens' log p, which rounding can take above 0.

    >>> compute_probability(1e-7), compute_probability(float("-inf"))
    (1.0, 0.0)
    """
    return exp(min(logprob, 0.0))


def is_in_context(prediction: str, example: TextExample) -> bool:
    """Whether the answer occurs in the clippable part of the inputs, ignoring white space and case.

    >>> is_in_context("the  Seine", TextExample("q", "q: Where? c: At The Seine.", "", (), (13, 26)))
    True
    """
    context = example.inputs[slice(*example.clippable)]
    return "".join(prediction.split()).casefold() in "".join(context.split()).casefold()
