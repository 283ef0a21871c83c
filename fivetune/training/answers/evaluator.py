"""One evaluation: answer the passages, merge those of a question, score against all gold answers.

In: a model and a prepared evaluation set. Out: an EvalRecord, and one Prediction per question, streamed. Ranks share
the questions by number, all passages of a question on one rank; rank 0 scores all predictions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from fivetune.data.store.encode import LengthLimits
from fivetune.data.store.token_store import TokenStore
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.model.decode import Decoding, GenerateAnswers, OnToken, generate
from fivetune.rundir.records import EvalRecord, Prediction
from fivetune.scores.analysis.bootstrap import compute_intervals
from fivetune.scores.analysis.calibration import calibrate_prediction
from fivetune.scores.metrics import Scorer
from fivetune.training.answers.answer import answer_passages
from fivetune.training.answers.merge import merge_questions
from fivetune.training.answers.tally import Tally, TargetLoss
from fivetune.types import OnNote, Task, ignore_note

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from fivetune.model.modules import T5Model
    from fivetune.types import Autocast

SUBSET_SEED = 0  # of all runs: their scores of a subset are of the same questions
PhaseCallback = Callable[[int, int], None]
Answered = tuple[int, Prediction]
"""A question's number in the store, and its Prediction."""


def ignore_count(done: int, total: int) -> None:
    """A PhaseCallback that shows nothing."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Options and data of an evaluation, without the model.

    Args:
        task: options of the task; its metrics score the answers.
        store: the evaluation set.
        keep_special: keep <extra_id_N> in the answers if generation writes it.
        limits: the length limits that the store was encoded with.
        autocast: returns a new autocast context.
        generate: searches for answers: `fivetune.model.decode.generate`, or the same on another device.
        on_token: called for each token that is written, where the search reports them.
        on_note: called with a sentence if answers are written more slowly than they should be.
        parts: evaluators of the parts of a mixture, in the order of the store; empty for other tasks.
        temperature: temperature of the confidences; scores are computed before it.
    """

    task: Task
    tokenizer: PreTrainedTokenizerBase
    store: TokenStore
    decoding: Decoding
    device: str = "cpu"
    keep_special: bool = False
    limits: LengthLimits = field(default_factory=LengthLimits)
    autocast: Autocast = field(default=nullcontext)
    generate: GenerateAnswers = field(default=generate)
    parts: Mapping[str, Evaluator] = field(default_factory=dict[str, "Evaluator"])
    temperature: float = 1.0
    on_token: OnToken | None = None
    on_note: OnNote = ignore_note

    @property
    def num_questions(self) -> int:
        return self.store.num_groups

    def run(
        self,
        model: T5Model,
        *,
        step: int,
        write: Callable[[Iterator[Prediction]], object],
        split: str = "eval",
        questions: Sequence[int] | NDArray[np.int64] | None = None,
        on_progress: PhaseCallback = ignore_count,
        world: World = SINGLE_PROCESS,
    ) -> EvalRecord:
        """Evaluate the model; returns the record.

        Args:
            write: consumes the iterator of scored predictions completely, while they are computed.
            questions: numbers of the questions (`TokenStore.groups`) to answer; None for all.
            world: the ranks that share the questions; all return the record, rank 0 writes the predictions.
        """
        started = time.perf_counter()
        tally = Tally(Scorer(self.task.metrics))
        loss = TargetLoss()
        answered = self._answer(model, questions, loss, on_progress, world)
        gathered = _gather_on_rank_zero(answered, loss, world)

        # One pass over the answers: each is scored, counted and written while the next one is computed.
        def score() -> EvalRecord:
            write(calibrate_prediction(one, self.temperature) for one in tally.score_each(gathered))
            scores = tally.compute_scores()
            corpus: dict[str, float] = {}
            intervals: dict[str, tuple[float, float]] = {}
            if scores:
                corpus = scores.corpus
                intervals = compute_intervals(scores)
            return EvalRecord(
                step=step,
                task=self.task.plugin_name(),
                task_version=self.task.version,
                split=split,
                num_examples=tally.num_examples,
                num_clipped=tally.num_clipped,
                scores=corpus,
                loss=loss.mean,
                rates=tally.compute_rates(),
                max_new_tokens=self.decoding.max_new_tokens,
                seconds=time.perf_counter() - started,
                intervals=intervals,
                temperature=None if self.temperature == 1 else self.temperature,
            )

        return world.run_on_all(score)[0]  # only rank 0 has answers to score; an error there is raised on all

    def predict(
        self,
        model: T5Model,
        *,
        questions: Sequence[int] | NDArray[np.int64] | None = None,
        on_progress: PhaseCallback = ignore_count,
        world: World = SINGLE_PROCESS,
    ) -> Iterator[Answered]:
        """Yield number and Prediction of each question as soon as all its passages are answered."""
        for question, prediction in self._answer(model, questions, TargetLoss(), on_progress, world):
            yield question, calibrate_prediction(prediction, self.temperature)

    def _answer(
        self,
        model: T5Model,
        questions: Sequence[int] | NDArray[np.int64] | None,
        loss: TargetLoss,
        on_progress: PhaseCallback,
        world: World,
    ) -> Iterator[Answered]:
        """Yield the predictions with the model's own probabilities."""
        if self.parts:
            yield from self._predict_parts(model, questions, loss, on_progress, world)
            return
        # Of a store with a window of shards on the disk, rows are answered window after window.
        rows = select_rows(self.store, questions, world)
        passages = chain.from_iterable(
            answer_passages(self, model, near.tolist(), loss, world) for near in self.store.iter_windows(rows)
        )
        merged = merge_questions(passages, self.store.groups, rows, ranked=self.task.merging == "ranked")
        for done, (question, prediction) in enumerate(merged, start=1):
            if prediction is not None:
                yield question, prediction
            on_progress(done, len(rows))

    def _predict_parts(
        self,
        model: T5Model,
        questions: Sequence[int] | NDArray[np.int64] | None,
        loss: TargetLoss,
        on_progress: PhaseCallback,
        world: World,
    ) -> Iterator[Answered]:
        """Yield the predictions of all parts, each with its part's name in `meta` and as prefix of its id.

        With a subset of questions, every part answers at least one.
        """
        # The questions of the parts follow one another in the mixture's store.
        numbers = [part.num_questions for part in self.parts.values()]
        ends = np.cumsum([0, *numbers]).tolist()
        selected: list[list[int] | None] = []
        sizes: list[int] = []  # rows of each part that this rank answers
        for first, end, part in zip(ends, ends[1:], self.parts.values(), strict=False):
            own = None
            if questions is not None:
                own = [number - first for number in questions if first <= number < end] or [0]
            selected.append(own)
            sizes.append(len(select_rows(part.store, own, world)))
        total = sum(sizes)
        before = 0
        for first, chosen, size, (name, part) in zip(ends, selected, sizes, self.parts.items(), strict=False):

            def report(done: int, _: int, before: int = before) -> None:
                on_progress(before + done, total)

            for question, one in replace(part, on_note=self.on_note)._answer(model, chosen, loss, report, world):
                yield first + question, replace(one, id=f"{name}/{one.id}", meta={**one.meta, "source_task": name})
            before += size


def _gather_on_rank_zero(answered: Iterator[Answered], loss: TargetLoss, world: World) -> Iterator[Answered]:
    """Gather the predictions of all ranks on rank 0, in the order of the questions; none on the other ranks.

    `loss` becomes the sum over all ranks. An error on one rank is raised on all.
    """
    if world.size == 1:
        return answered

    def answer_own() -> tuple[list[Answered], TargetLoss]:
        return list(answered), loss

    # The ranks of one copy of the model have the same answers: the first of them counts.
    shares = world.run_on_all(answer_own)[:: world.model_size]
    loss.total = sum(own.total for _, own in shares)
    loss.num_tokens = sum(own.num_tokens for _, own in shares)
    if not world.is_first:
        return iter(())
    everything = chain.from_iterable(share for share, _ in shares)
    return iter(sorted(everything, key=itemgetter(0)))


def select_rows(
    store: TokenStore, questions: Sequence[int] | NDArray[np.int64] | None, world: World = SINGLE_PROCESS
) -> NDArray[np.intp]:
    """Select this rank's share of the rows of some questions (None: all), [n] int64 in the store's order."""
    # By the number of the question: all passages of a question are answered on one rank.
    selected = store.groups % world.data_size == world.data_rank
    if questions is not None:
        selected &= np.isin(store.groups, np.asarray(questions))
    return np.flatnonzero(selected)


def select_subset(store: TokenStore, limit: int | None) -> list[int] | None:
    """Select `limit` questions of a store, the same in every run; None for all.

    The questions are ordered by target, as far as a target is frequent enough to be in the sample, then as in the file,
    and divided into `limit` parts, of each of which one question is drawn: labels, and passages with several questions,
    occur as often as in the whole set, whatever the file's order is.
    """
    num = store.num_groups
    if limit is None or limit >= num:
        return None
    # One of each stretch, not every n-th: files often alternate with a period.
    edges = np.arange(limit + 1) * num // limit
    drawn = np.random.default_rng(SUBSET_SEED).integers(edges[:-1], edges[1:])
    return sorted(_order_by_target(store, num / limit)[drawn].tolist())


def _order_by_target(store: TokenStore, least: float) -> NDArray[np.intp]:
    """Return the numbers of all questions, those whose targets occur `least` times together, in the order of the store.

    A store of which only a window is on the disk keeps its order: its targets are not at hand.
    """
    if store.window_shards is not None:
        return np.arange(store.num_groups)
    # The first passage of each question stands for it.
    _, rows = np.unique(store.groups, return_index=True)
    targets = [store.labels[row].tobytes() for row in rows.tolist()]
    frequent = [target for target, num in Counter(targets).items() if num >= least]
    places = {target: place for place, target in enumerate(frequent, start=1)}
    return np.argsort([places.get(target, 0) for target in targets], kind="stable")
