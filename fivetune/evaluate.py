"""One evaluation: answer, merge the passages of a question, score against all gold answers.

In: a model and a prepared evaluation set. Out: an EvalRecord and one line per question, streamed. Several processes
share the questions by their numbers, each question whole; the first one scores what all of them answered.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import exp
from typing import Any

import numpy as np

from fivetune.analysis.bootstrap import intervals
from fivetune.data.encode import Limits, kept_offsets
from fivetune.data.spans import Offsets, context_positions, span_text
from fivetune.data.store import TokenStore
from fivetune.decode import Decoding, Generated, generate, length_sorted, to_text
from fivetune.decode.spans import Pointed, point
from fivetune.merging import merge
from fivetune.metrics import Scorer, details_of
from fivetune.strategies import ALONE, World
from fivetune.tasks import Task, head_of
from fivetune.types import EvalRecord, Line, Scores, TextExample

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Everything that an evaluation needs besides the model.

    Args:
        task: options of the task; its metrics score the answers.
        store: the evaluation set.
        keep_special: leave <extra_id_N> in the answers, where generation may write it.
        limits: that the store was encoded with.
        autocast: gives a fresh autocast context.
        parts: of a mixture: how each part is evaluated, in the order of the store.
    """

    task: Task
    tokenizer: Any
    store: TokenStore
    decoding: Decoding
    device: str = "cpu"
    keep_special: bool = False
    limits: Limits = field(default_factory=Limits)
    autocast: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    parts: Mapping[str, Evaluator] = field(default_factory=dict)

    @property
    def num_questions(self) -> int:
        return self.store.num_groups

    def run(
        self, model: Any, *, step: int, write: Callable[[Iterator[Line]], Any], split: str = "eval",
        questions: Sequence[int] | None = None, progress: Progress = lambda done, total: None, world: World = ALONE,
    ) -> EvalRecord:  # fmt: skip
        """Evaluate. `write` gets the prediction lines while they are made and must use them all.

        Args:
            questions: numbers of the questions (`store.groups`) that are asked; None for all.
            world: whose processes share the questions; all get the record, the first one the lines.
        """
        started = time.perf_counter()
        tally = _Tally(Scorer(self.task.metrics))
        lines = self.lines(model, questions=questions, tally=tally, progress=progress, world=world)
        write(self._scored(_of_all(lines, tally, world), tally))
        return world.from_first(self._record(tally, step, split, started))

    def _record(self, tally: _Tally, step: int, split: str, started: float) -> EvalRecord:
        scores = tally.scores()
        return EvalRecord(
            step=step,
            task=self.task.plugin_name(),
            task_version=self.task.version,
            split=split,
            num_examples=len(tally.predictions),
            num_clipped=tally.num_clipped,
            scores=scores.corpus if scores else {},
            loss=tally.nats / tally.num_target_tokens if tally.num_target_tokens else None,
            rates=tally.rates(),
            max_new_tokens=self.decoding.max_new_tokens,
            seconds=time.perf_counter() - started,
            intervals=intervals(scores) if scores else {},
        )

    def lines(
        self, model: Any, *, questions: Sequence[int] | None = None, tally: _Tally | None = None,
        progress: Progress = lambda done, total: None, world: World = ALONE,
    ) -> Iterator[Line]:  # fmt: skip
        """One line per question as soon as all its passages are answered, with `question`, its number."""
        tally = tally or _Tally(Scorer(()))
        if self.parts:
            yield from self._part_lines(model, questions, tally, progress, world)
            return
        rows = rows_of(self.store, questions, world)
        missing = Counter(self.store.groups[rows].tolist())
        waiting: dict[int, list[Line]] = {}
        for done, (row, line) in enumerate(self._passages(model, rows.tolist(), tally), start=1):
            question = int(self.store.groups[row])
            waiting.setdefault(question, []).append(line)
            missing[question] -= 1
            if not missing[question]:
                yield {**self._merged(waiting.pop(question)), "question": question}
            progress(done, len(rows))

    def _part_lines(
        self, model: Any, questions: Sequence[int] | None, tally: _Tally, progress: Progress, world: World
    ) -> Iterator[Line]:
        """The lines of all parts, each with its part's name in `meta` and before its id; one of every part at least."""
        first, before, asked = 0, 0, {}
        for name, part in self.parts.items():
            own = range(first, first + part.num_questions)
            asked[name] = None if questions is None else [q - first for q in questions if q in own] or [0]
            first += part.num_questions
        sizes = {name: len(rows_of(part.store, asked[name], world)) for name, part in self.parts.items()}
        first = 0
        for name, part in self.parts.items():
            count = partial(_go_on, progress, before, sum(sizes.values()))
            for line in part.lines(model, questions=asked[name], tally=tally, progress=count, world=world):
                meta = {**line["meta"], "source_task": name}
                yield {**line, "id": f"{name}/{line['id']}", "question": first + line["question"], "meta": meta}
            first += part.num_questions
            before += sizes[name]

    def _passages(self, model: Any, rows: list[int], tally: _Tally) -> Iterator[tuple[int, Line]]:
        """Row and line of every passage, as soon as it is answered."""
        if head_of(self.task) == "extractive":
            yield from self._pointed(model, rows, tally)
            return
        written = generate(model, self.store, rows, self.decoding, device=self.device, autocast=self.autocast)
        yield from ((one.row, self._written_line(one, tally)) for one in written)

    def _line(self, row: int, example: TextExample, **answer: Any) -> Line:
        """What is known of every passage, and its answer."""
        line = {
            "id": example.group or example.id,
            "inputs": example.inputs,
            "references": list(example.references),
            **answer,
            "num_input_tokens": len(self.store.inputs[row]),
            "num_clipped_tokens": int(self.store.num_clipped[row]),
            "answer_clipped": bool(self.store.answer_clipped[row]),
            "meta": dict(example.meta),
        }
        if self.task.extractive and line["prediction"] and example.clippable[0] < example.clippable[1]:
            line["in_context"] = is_in_context(line["prediction"], example)
        return line

    def _pointed(self, model: Any, rows: list[int], tally: _Tally) -> Iterator[tuple[int, Line]]:
        waiting: dict[int, tuple[TextExample, Offsets]] = {}

        def context_of(row: int) -> range:
            example = self.store.text(row)
            waiting[row] = example, kept_offsets(self.tokenizer, example, self.limits)
            return context_positions(*waiting[row])

        batches = length_sorted(self.store.inputs.lengths[rows], self.decoding.batch_size)
        pointed = point(
            model, self.store, rows, batches, context_of=context_of, num_candidates=self.decoding.num_candidates,
            device=self.device, autocast=self.autocast,
        )  # fmt: skip
        for one in pointed:
            yield one.row, self._pointed_line(one, *waiting.pop(one.row), tally)

    def _pointed_line(self, one: Pointed, example: TextExample, offsets: Offsets, tally: _Tally) -> Line:
        """A span as an answer; none where no answer is likelier and the task has such questions."""
        candidates = [
            {"text": span_text(example.inputs, offsets, first, last), "score": expit(odds)}
            for first, last, odds in one.spans
        ]
        best = candidates[0] if candidates else {"text": "", "score": 0.0}
        abstains = self.task.no_answer_text is not None and best["score"] < 0.5
        line = self._line(
            one.row, example,
            prediction="" if abstains else best["text"],
            confidence=1 - best["score"] if abstains else best["score"],
            candidates=candidates,
        )  # fmt: skip
        if self.task.no_answer_text is not None:
            line |= {"no_answer_score": 1 - best["score"], "answer": best["text"]}
        if example.references:
            tally.add_target(one.target_nats, 2)
        return line

    def _written_line(self, one: Generated, tally: _Tally) -> Line:
        """A text as an answer, with what it says of the model."""
        example = self.store.text(one.row)
        written = to_text(self.tokenizer, one.token_ids, keep_special=self.keep_special)
        line = self._line(
            one.row, example,
            prediction=self.task.from_text(written),
            hit_cap=one.hit_cap,
            logprob=one.logprob,
            num_tokens=one.num_scored_tokens,
            confidence=exp(one.logprob / max(one.num_scored_tokens, 1)),
            sentinel="<extra_id_" in written,
            unknown_chars=one.token_ids.count(self.tokenizer.unk_token_id),
        )  # fmt: skip
        if one.phrase_nats is not None:
            line["no_answer_score"] = exp(-one.phrase_nats)
        if one.label_logprobs is not None:
            self._add_label(line, one)
        elif one.candidates:
            line["candidates"] = self._candidates(one)
        if example.references:
            target = self.store.labels[one.row].tolist()
            if one.label_logprobs is None:
                line["teacher_forced_exact"] = bool(one.target_correct)
                line["free_running_exact"] = [*one.token_ids, self.tokenizer.eos_token_id] == target
            tally.add_target(one.target_nats, len(target))
        return line

    def _add_label(self, line: Line, one: Generated) -> None:
        """The label itself, whatever the tokenizer makes of its words, and its share among the labels."""
        assert self.task.labels is not None and one.label_logprobs is not None
        logprobs = np.array(one.label_logprobs)
        shares = np.exp(logprobs - logprobs.max())
        shares /= shares.sum()
        line["prediction"] = list(self.task.labels)[int(shares.argmax())]
        line["confidence"] = float(shares.max())
        line["left_label_set"] = one.left_label_set
        ranked = sorted(zip(shares.tolist(), self.task.labels, strict=True), key=lambda pair: -pair[0])
        line["candidates"] = [{"text": label, "score": share} for share, label in ranked]

    def _candidates(self, one: Generated) -> list[dict[str, Any]]:
        return [
            {
                "text": self.task.from_text(to_text(self.tokenizer, ids, keep_special=self.keep_special)),
                "score": exp(logprob / min(len(ids) + 1, self.decoding.max_new_tokens)),
            }
            for ids, logprob in one.candidates
        ]

    def _merged(self, passages: list[Line]) -> Line:
        ranked = self.task.merging == "ranked"
        if len(passages) == 1 and not ranked:
            return passages[0]
        return merge(passages, question=passages[0]["id"], ranked=ranked)

    def _scored(self, lines: Iterator[Line], tally: _Tally) -> Iterator[Line]:
        """The lines as they are kept: with each question's own scores."""
        for line in lines:
            tally.add(line, line.pop("question"))
            if line["references"]:
                line["scores"] = tally.scorer.score(
                    [line["prediction"]], [line["references"]], details=[details_of(line)]
                ).each[0]
            yield line


def _go_on(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    """Report what a part has done as what all have."""
    progress(before + done, total)


RATES = {
    "cap_hit": "hit_cap",
    "sentinel": "sentinel",
    "left_label_set": "left_label_set",
    "teacher_forced_exact": "teacher_forced_exact",
    "free_running_exact": "free_running_exact",
}
"""Rates of an EvalRecord that are the share of lines in which a flag stands, of those that have the flag."""


class _Tally:
    """What is kept of an evaluation in memory: short texts and counts."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.questions: list[int] = []
        self.predictions: list[str] = []
        self.references: list[Sequence[str]] = []
        self.details: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.flagged: Counter[str] = Counter()
        self.nats = 0.0
        self.num_target_tokens = 0
        self.num_clipped = 0

    def add_target(self, nats: float, num_tokens: int) -> None:
        self.nats += nats
        self.num_target_tokens += num_tokens

    def add(self, line: Line, question: int) -> None:
        self.questions.append(question)
        self.predictions.append(line["prediction"])
        self.references.append(line["references"])
        self.details.append(details_of(line))
        self.num_clipped += line["num_clipped_tokens"] > 0
        flags = {rate: line[flag] for rate, flag in RATES.items() if flag in line}
        flags["empty"] = not line["prediction"]
        if "unknown_chars" in line:
            flags["unknown_characters"] = line["unknown_chars"] > 0
        if "in_context" in line:
            flags["not_in_context"] = not line["in_context"]
        for name, flag in flags.items():
            self.flagged[name] += 1
            self.counts[name] += bool(flag)

    def rates(self) -> dict[str, float]:
        return {name: self.counts[name] / total for name, total in self.flagged.items()}

    def scores(self) -> Scores | None:
        """The scores of all answers together, in the order of the questions, so that intervals are the same however
        the answers came; None unless every question has references."""
        if not self.references or not all(self.references):
            return None
        order = sorted(range(len(self.questions)), key=self.questions.__getitem__)
        return self.scorer.score(
            [self.predictions[i] for i in order],
            [self.references[i] for i in order],
            details=[self.details[i] for i in order],
        )


def _of_all(lines: Iterator[Line], tally: _Tally, world: World) -> Iterator[Line]:
    """The lines of all processes in the order of the questions, in the first one; none in the others.

    An error in one of them is raised in all.
    """
    if world.size == 1:
        return lines
    shares = world.alike(lambda: (list(lines), tally.nats, tally.num_target_tokens))
    tally.nats, tally.num_target_tokens = sum(nats for _, nats, _ in shares), sum(num for _, _, num in shares)
    everything = [line for share, _, _ in shares for line in share]
    return iter(sorted(everything, key=lambda line: line["question"]) if world.is_first else ())


def expit(odds: float) -> float:
    """1 / (1 + exp(-odds)), the probability of log-odds.

    >>> expit(0.0), expit(-1000.0)
    (0.5, 0.0)
    """
    return 1 / (1 + exp(-odds)) if odds > -700 else 0.0


def is_in_context(prediction: str, example: TextExample) -> bool:
    """Whether the answer stands in the part of the inputs that it was to be taken from, space and case apart.

    >>> is_in_context("the  Seine", TextExample("q", "q: Where? c: At The Seine.", "", (), (13, 26)))
    True
    """
    context = example.inputs[slice(*example.clippable)]
    return "".join(prediction.split()).casefold() in "".join(context.split()).casefold()


def rows_of(store: TokenStore, questions: Sequence[int] | None, world: World = ALONE) -> Any:
    """[n] int64, the rows of some questions in the store's order, of all for None; of them, this process's share."""
    asked = np.ones(len(store), bool) if questions is None else np.isin(store.groups, np.asarray(questions))
    return np.flatnonzero(asked & (store.groups % world.size == world.rank))


def subset(num_questions: int, limit: int | None) -> list[int] | None:
    """An evenly spaced part of the questions; None for all.

    >>> subset(10, 4), subset(3, 4)
    ([0, 2, 5, 7], None)
    """
    if limit is None or limit >= num_questions:
        return None
    return [i * num_questions // limit for i in range(limit)]
