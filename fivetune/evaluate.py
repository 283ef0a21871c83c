"""One evaluation: generate, turn into answers, score against all gold answers.

In: a model and a prepared evaluation set. Out: an EvalRecord and one line per prediction, streamed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import exp
from typing import Any

from fivetune.data.store import TokenStore
from fivetune.decode import Decoding, Generated, generate, to_text
from fivetune.metrics import Scorer
from fivetune.tasks import Task
from fivetune.types import EvalRecord

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Everything that an evaluation needs besides the model.

    Args:
        task: options of the task; its metrics score the answers.
        store: the evaluation set.
        keep_special: leave <extra_id_N> in the answers, where generation may write it.
        autocast: gives a fresh autocast context.
    """

    task: Task
    tokenizer: Any
    store: TokenStore
    decoding: Decoding
    device: str = "cpu"
    keep_special: bool = False
    autocast: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)

    def run(
        self, model: Any, *, step: int, write: Callable[[Iterator[dict[str, Any]]], Any],
        split: str = "eval", rows: Sequence[int] | None = None, progress: Progress = lambda done, total: None,
    ) -> EvalRecord:  # fmt: skip
        """Evaluate. `write` gets the prediction lines while they are made and must use them all."""
        started = time.perf_counter()
        rows = range(len(self.store)) if rows is None else rows
        answers = _Answers(Scorer(self.task.metrics))
        write(self._lines(model, rows, answers, progress))
        scores = answers.corpus_scores()
        seconds = time.perf_counter() - started
        return EvalRecord(
            step=step,
            task=self.task.plugin_name(),
            task_version=self.task.version,
            split=split,
            num_examples=len(rows),
            num_clipped=int(self.store.summary["num_examples_clipped"]),
            scores=scores,
            loss=answers.nats / max(answers.num_target_tokens, 1) if answers.num_target_tokens else None,
            rates={name: count / max(len(rows), 1) for name, count in answers.counts.items()},
            max_new_tokens=self.decoding.max_new_tokens,
            seconds=seconds,
        )

    def _lines(
        self, model: Any, rows: Sequence[int], answers: _Answers, progress: Progress
    ) -> Iterator[dict[str, Any]]:
        generated = generate(model, self.store, rows, self.decoding, device=self.device, autocast=self.autocast)
        for done, one in enumerate(generated, start=1):
            yield self._line(one, answers)
            progress(done, len(rows))

    def _line(self, one: Generated, answers: _Answers) -> dict[str, Any]:
        example = self.store.text(one.row)
        written = to_text(self.tokenizer, one.token_ids, keep_special=self.keep_special)
        prediction = self.task.from_text(written)
        no_answer = None if one.phrase_nats is None else exp(-one.phrase_nats)
        answers.add(one, prediction, example.references, no_answer, len(self.store.labels[one.row]), written)
        line = {
            "id": example.id,
            "inputs": example.inputs,
            "prediction": prediction,
            "references": list(example.references),
            "hit_cap": one.hit_cap,
        }
        if no_answer is not None:
            line["no_answer_score"] = no_answer
        if example.references:
            line["scores"] = answers.scorer.score([prediction], [example.references]).each[0]
        return line


class _Answers:
    """What is kept of an evaluation in memory: short texts and counts."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.predictions: list[str] = []
        self.references: list[tuple[str, ...]] = []
        self.no_answer: list[float | None] = []
        self.counts = {"cap_hit": 0, "empty": 0, "sentinel": 0}
        self.nats = 0.0
        self.num_target_tokens = 0

    def add(
        self, one: Generated, prediction: str, references: tuple[str, ...], no_answer: float | None,
        num_target_tokens: int, written: str,
    ) -> None:  # fmt: skip
        self.predictions.append(prediction)
        self.references.append(references)
        self.no_answer.append(no_answer)
        self.counts["cap_hit"] += one.hit_cap
        self.counts["empty"] += not prediction
        self.counts["sentinel"] += "<extra_id_" in written
        self.nats += one.target_nats
        self.num_target_tokens += num_target_tokens

    def corpus_scores(self) -> dict[str, float]:
        """The scores of all answers together; {} unless every example has references."""
        if not self.references or not all(self.references):
            return {}
        leanings = [value for value in self.no_answer if value is not None]
        complete = leanings if len(leanings) == len(self.references) else None
        return self.scorer.score(self.predictions, self.references, no_answer_scores=complete).corpus


def subset(num_examples: int, limit: int | None) -> list[int] | None:
    """Rows of an evenly spaced subset; None for all.

    >>> subset(10, 4), subset(3, 4)
    ([0, 2, 5, 7], None)
    """
    if limit is None or limit >= num_examples:
        return None
    return [i * num_examples // limit for i in range(limit)]
