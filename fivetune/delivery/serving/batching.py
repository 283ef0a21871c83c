"""Dynamic batching: requests that arrive close together are answered by one call of the model.

In: requests, each a list of records or texts for one model. Out: a Future of each. One thread owns all models, so that
no two computations share its cores.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Protocol

from fivetune.model.decode import Decoding
from fivetune.rundir.records import Prediction
from fivetune.training.answers.listening import OnWritten, WrittenToken

GAP_SHARE = 1 / 5
Inputs = Sequence[dict[str, object] | str]


class AnswerTogether(Protocol):
    """Answers several requests with the same options of the search; `TrainedRun.predict_each` does it.

    `decoding` None: the options of the run. `on_written` is called with the number of a request and each token.
    """

    def __call__(
        self, requests: Sequence[Inputs], *, decoding: Decoding | None, on_written: OnWritten | None
    ) -> Sequence[Sequence[Prediction]]: ...


class QueueFullError(Exception):
    """As many requests wait as may wait."""


class ServerStoppingError(Exception):
    """The server takes no more requests, because it stops."""


@dataclass(slots=True)
class WaitingRequest:
    """A request in the queue; one whose future is cancelled is dropped before it is computed.

    Args:
        decoding: options of the search; None: the run's options.
        on_token: called for each token of the answers by the model's thread; None: not asked for.
    """

    model: str
    inputs: Inputs
    decoding: Decoding | None = None
    on_token: Callable[[WrittenToken], object] | None = None
    future: Future[Sequence[Prediction]] = field(default_factory=Future[Sequence[Prediction]])
    arrived: float = field(default_factory=time.monotonic)

    def is_answered_with(self, other: WaitingRequest) -> bool:
        """Whether both can be answered together."""
        return self.model == other.model and self.decoding == other.decoding


class Batcher:
    """Answers requests in batches, oldest first.

    A batch begins when `max_batch` records wait, when the oldest request has waited `max_wait_seconds`, or when no
    request has arrived for GAP_SHARE of that: clients that got their answers from one batch come back one after the
    other. It begins at once if the last one had one request, and none arrived while it was computed: there is one
    client. What arrives during a batch joins the next one, so that under load none waits longer than the batches before
    it. A batch is for one model and one choice of options: the model and options of the oldest request.

    Args:
        answers: what answers, by the name of the model.
        max_batch: most records of a batch; a request with more is a batch of its own.
        max_queue: most requests that wait.
        on_batch: called with the number of records of each batch and its seconds.
    """

    def __init__(
        self,
        answers: Mapping[str, AnswerTogether],
        *,
        max_batch: int,
        max_wait_seconds: float,
        max_queue: int,
        on_batch: Callable[[int, float], object] = lambda num_records, seconds: None,
    ) -> None:
        self._answers, self._on_batch = answers, on_batch
        self._max_batch, self._max_wait, self._max_queue = max_batch, max_wait_seconds, max_queue
        self._waiting: deque[WaitingRequest] = deque()
        self._changed = Condition()
        self._is_closing = False
        self._is_alone = False  # whether the last batch had one request, and none arrived meanwhile
        self._thread = Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    @property
    def is_ready(self) -> bool:
        return self._thread.is_alive() and not self._is_closing

    def submit(
        self,
        model: str,
        inputs: Inputs,
        decoding: Decoding | None = None,
        on_token: Callable[[WrittenToken], object] | None = None,
    ) -> Future[Sequence[Prediction]]:
        """Queue a request for the model of that name; further arguments as for WaitingRequest.

        Raises QueueFullError, ServerStoppingError.
        """
        request = WaitingRequest(model, inputs, decoding, on_token)
        with self._changed:
            if not self.is_ready:
                raise ServerStoppingError
            if len(self._waiting) >= self._max_queue:
                raise QueueFullError
            self._waiting.append(request)
            self._changed.notify()
        request.future.add_done_callback(self._drop_cancelled)
        return request.future

    def close(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until those in the queue are answered or `timeout` seconds have passed.

        Returns whether the model's thread has ended.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _drop_cancelled(self, future: Future[Sequence[Prediction]]) -> None:
        """Take a cancelled request out of the queue at once: its place is for one whose client waits."""
        if future.cancelled():
            with self._changed:
                self._waiting = deque(one for one in self._waiting if one.future is not future)
                self._changed.notify()

    def _run(self) -> None:
        while (batch := self._take_batch()) is not None:
            if batch:
                self._compute(batch)
                self._is_alone = len(batch) == 1 and not self._waiting

    def _take_batch(self) -> list[WaitingRequest] | None:
        """Wait for the requests of the next batch; None when the queue is empty and closed."""
        with self._changed:
            while True:
                if not self._waiting:
                    if self._is_closing:
                        return None
                    self._changed.wait()
                    continue
                oldest, newest = self._waiting[0], self._waiting[-1]  # other ones after each wait: clients may go
                until = min(oldest.arrived + self._max_wait, newest.arrived + GAP_SHARE * self._max_wait)
                left = until - time.monotonic()
                num_records = sum(len(one.inputs) for one in self._waiting if one.is_answered_with(oldest))
                if self._is_closing or self._is_alone or left <= 0 or num_records >= self._max_batch:
                    return self._take_requests(oldest)
                self._changed.wait(left)

    def _take_requests(self, oldest: WaitingRequest) -> list[WaitingRequest]:
        """Take the requests that can be answered with the oldest one and fit into a batch, at least one."""
        taken: list[WaitingRequest] = []
        left: deque[WaitingRequest] = deque()
        num_records = 0
        is_full = False
        for one in self._waiting:
            is_same = one.is_answered_with(oldest)
            is_full = is_full or (is_same and bool(taken) and num_records + len(one.inputs) > self._max_batch)
            if is_full or not is_same:
                left.append(one)
            elif one.future.set_running_or_notify_cancel():
                taken.append(one)
                num_records += len(one.inputs)
        self._waiting = left
        return taken

    def _compute(self, batch: Sequence[WaitingRequest]) -> None:
        """Answer a batch; if that fails, each request alone, so that one cannot fail the others."""
        # A record that breaks the model must fail its own request alone.
        started = time.monotonic()
        answer = self._answers[batch[0].model]

        def pass_token(number: int, token: WrittenToken) -> None:
            listener = batch[number].on_token
            if listener:
                listener(token)

        on_written = pass_token if any(one.on_token for one in batch) else None

        try:
            found = answer([one.inputs for one in batch], decoding=batch[0].decoding, on_written=on_written)
        except Exception as error:
            if len(batch) == 1:
                batch[0].future.set_exception(error)
            else:
                for one in batch:
                    one.on_token = None  # it has heard the tokens of the first attempt
                    self._compute([one])
            return
        self._on_batch(sum(len(one.inputs) for one in batch), time.monotonic() - started)
        for one, predictions in zip(batch, found, strict=True):
            one.future.set_result(predictions)
