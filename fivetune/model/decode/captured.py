"""Greedy search and sampling by CUDA graphs: one launch per step, and the host reads tokens LATE steps after them.

In: a decoder, and inputs that it has encoded. Out: the answers to an input, as soon as all of them have ended.

A step of t5-base is about 300 operators. The host needs longer to launch them than the device to run them, and asks for
the tokens of every step. Here all that a step reads and writes has a fixed address and one of few shapes: each slot
writes its keys and values at its own age, so that the slots need no common column.

    slot 0   a b c d . . . .     age 4: its next token is written in column 4
    slot 1   x . . . . . . .     age 1: it was filled again three steps later
    memory   of the inputs, in steps of WIDTH tokens; the columns double where an answer grows longer

A finished slot goes on until the host knows of its end, and its answer is cut there. Then the next input takes its
place between two steps. NOT MEASURED: written for a GPU, tested on the CPU with a substitute for graphs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivetune.distributed.world import World
from fivetune.errors import format_error, refuse_broken_context
from fivetune.model.cuda.dispatch import supports_graphs
from fivetune.model.cuda.static_step import GraphRecorder, refuse_broken_generator
from fivetune.model.cuda.tiles import round_up
from fivetune.model.decode.encoder import EncodedInputs
from fivetune.model.decode.greedy import MIN_FREE_SHARE
from fivetune.model.decode.logits import LogitsProcessor
from fivetune.model.decode.records import Decoding, OnToken, ScoredRow
from fivetune.model.decode.running import Answered, Key, RunningAnswers
from fivetune.model.decode.sampling import choose_tokens
from fivetune.model.decode.steps import Decoder
from fivetune.types import OnNote

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LATE = 2  # steps that the host is behind the device: each is a wasted step of every slot
WIDTH = 64  # tokens by which shapes of inputs differ
FEWEST_COLUMNS, MOST_COLUMNS = 16, 128  # of a new cache, which doubles for longer answers
MAX_GRAPHS = 16  # because each holds memory; the least recently used one is dropped


class DeviceRecorder:
    """Records graphs for all searches of the process on a device: in one stream and one pool of memory.

    cuBLAS keeps a workspace for each stream in which it was captured, and torch the pool of graphs that are gone: with
    others for every search, memory would grow. Unlike `torch.cuda.graph`, a recording returns no memory to the driver.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._lock = Lock()
        self._kept = self.record(partial(torch.zeros, 1, device=device))  # a pool without graphs cannot be used again

    def record(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture a function. Returns: a function that runs its work in the current stream."""
        graph = torch.cuda.CUDAGraph()
        with self._lock, torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = function()
            except BaseException:  # also Ctrl-C: an open capture would fail all later ones, and random numbers
                with suppress(RuntimeError):  # that a capture has failed hides why
                    graph.capture_end()
                raise
            graph.capture_end()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@cache
def get_recorder(device: torch.device) -> GraphRecorder:
    """The `record` of the device's DeviceRecorder."""
    return DeviceRecorder(device).record


def can_capture(decoder: Decoder, decoding: Decoding) -> bool:
    """Whether graphs can replay the steps of a search.

    Beams change places, and top-p alone asks the device how many tokens it needs.
    """
    sampling = decoding.sampling
    asks = sampling and sampling.top_p < 1 and not sampling.top_k
    is_wanted = decoding.capture and decoding.num_beams == 1 and not (decoding.label_ids or asks)
    return is_wanted and supports_graphs(str(decoder.device)) and decoder.is_plain


class SlotCache:
    """Keys and values of all layers, each slot at its own age: [layers, slots, columns, 2, h, head size].

    Attributes:
        num_columns: columns that have memory.
    """

    def __init__(self, shape: tuple[int, ...], num_columns: int, like: Tensor) -> None:
        self.num_columns = num_columns
        layers, slots, heads, size = shape
        self._own = like.new_zeros(layers, slots, num_columns, 2, heads, size)
        self._first = torch.arange(slots, device=like.device) * num_columns  # of each slot, among the columns of all
        self._places = self._first

    def add_columns(self) -> None:
        """Double the columns, at other addresses."""
        self._own = F.pad(self._own, (0,) * 7 + (self.num_columns,))
        self._first = self._first * 2
        self.num_columns *= 2

    def clear(self, slots: Tensor) -> None:
        """Zero slots: what is hidden by -inf must be finite."""
        self._own.index_fill_(1, slots, 0)

    def begin_step(self, ages: Tensor) -> None:
        """Let the next columns of the slots be those of their ages, [slots]."""
        self._places = self._first + ages

    def append(self, layer: int, column: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values of a layer, [slots, 2, h, 1, head size].

        Returns: keys and values of all columns, [slots, h, columns, head size].
        """
        own = self._own[layer]
        own.flatten(0, 1).index_copy_(0, self._places, column[:, :, :, 0])
        keys, values = own.permute(2, 0, 3, 1, 4).unbind()
        return keys, values


class CapturedSteps:
    """The steps of all slots, and all that they read and write.

    Args:
        memory: the first inputs, none shorter than later ones; their states say the dtype.

    Attributes:
        num_steps, num_replayed: steps so far, and how many of them graphs replayed.
        failure: the reason why steps are launched; empty if graphs replay them.
    """

    def __init__(
        self,
        decoder: Decoder,
        decoding: Decoding,
        rules: LogitsProcessor,
        memory: EncodedInputs,
        on_note: OnNote,
    ) -> None:
        self._decoder = decoder
        self._decoding = decoding
        self._rules = rules
        self._on_note = on_note
        cap = decoding.max_new_tokens
        slots, longest, width = memory.states.shape
        zeros = memory.states.new_zeros
        self._memory = zeros(slots, round_up(longest, WIDTH), width)
        self._mask = zeros(slots, 1, self._memory.shape[1])  # added to scores, -inf at padding
        self._ages = zeros(slots, dtype=torch.int64)
        self._written = zeros(slots, cap + 1, dtype=torch.int64)  # with the start token
        self._uniforms = zeros(slots, cap, dtype=torch.float32)
        self._told = zeros(2, slots, dtype=torch.float32)  # ids, which fp32 holds exactly, and -log p, of the step
        columns = min(max(FEWEST_COLUMNS, 1 << (cap - 1).bit_length()), MOST_COLUMNS)
        self._cache = SlotCache((decoder.num_layers, slots, *decoder.head_shape), columns, self._memory)
        self._build_tables()
        is_cuda = decoder.device.type == "cuda"
        self._host = [torch.empty(2, slots, pin_memory=is_cuda) for _ in range(LATE + 1)]
        self._copied = [torch.cuda.Event() if is_cuda else None for _ in self._host]
        self._graphs: dict[tuple[int, int], Callable[[], Tensor]] = {}  # the last one was used last
        self._launched: set[tuple[int, int]] = set()
        self.num_steps = self.num_replayed = 0
        self.failure = ""

    @property
    def num_slots(self) -> int:
        return len(self._ages)

    def _build_tables(self) -> None:
        """Biases by distance: -inf for columns ahead of a slot, then those of 0, 1, 2 ... columns back."""
        columns = self._cache.num_columns
        self._tables: dict[int, Tensor] = {}
        for owner, table in self._decoder.tables.items():
            back = table[0, :, 0].flip(-1)[:, :columns].to(self._memory.dtype)
            self._tables[owner] = F.pad(back, (columns - 1, 0), value=-torch.inf)
        self._ahead = torch.arange(1 - columns, 1, device=self._ages.device)  # a column's number, less the last one's

    def fill(self, slots: Sequence[int], memory: EncodedInputs, uniforms: Tensor | None) -> None:
        """Begin answers to inputs in slots.

        Args:
            uniforms: [len(slots), cap], by which tokens are drawn.
        """
        numbers = _send(torch.tensor([slots, memory.lengths]), self._ages.device)
        places, lengths = numbers.unbind()
        width = self._memory.shape[1]
        self._memory.index_copy_(0, places, F.pad(memory.states, (0, 0, 0, width - memory.states.shape[1])))
        hidden = torch.arange(width, device=places.device) >= lengths[:, None]
        self._mask.index_copy_(0, places, self._mask.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None])
        self._written.index_fill_(0, places, self._decoder.config.decoder_start_token_id)
        self._ages.index_fill_(0, places, 0)
        self._cache.clear(places)
        if uniforms is not None:
            self._uniforms.index_copy_(0, places, uniforms)

    def run(self, longest: int, age: int) -> None:
        """Write one token in every slot.

        Args:
            longest: tokens of the longest input of a slot that counts.
            age: most tokens of such a slot so far.
        """
        while age >= self._cache.num_columns:
            self._cache.add_columns()
            self._build_tables()
            self._graphs.clear()  # of other addresses
        shape = round_up(longest, WIDTH), self._cache.num_columns
        replay = self._graphs.pop(shape, None)
        try:
            # The first step of a shape is launched: a capture must not load kernels.
            if replay is None and shape in self._launched and not self.failure:
                replay = get_recorder(self._ages.device)(partial(self._write_token, shape[0]))
            if replay is not None:
                replay()
        except Exception as error:  # of any class: drivers and kernels raise many
            self._give_up(error)
            replay = None
        if replay is not None:
            self._graphs[shape] = replay
            self.num_replayed += 1
        else:
            self._write_token(shape[0])
            self._launched.add(shape)
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        turn = self.num_steps % len(self._host)
        self._host[turn].copy_(self._told, non_blocking=True)
        if event := self._copied[turn]:
            event.record(torch.cuda.current_stream(self._ages.device))
        self.num_steps += 1

    def _give_up(self, error: Exception) -> None:
        """Launch all further steps: nothing was executed by a recording or replay that failed."""
        refuse_broken_context(error, "--train.capture off")
        refuse_broken_generator(str(self._ages.device))
        self._graphs.clear()
        self.failure = format_error(error)
        self._on_note(f"answers are written by steps that launch each kernel, not by CUDA graphs: {self.failure}")

    def read(self, step: int) -> tuple[list[int], list[float]]:
        """The tokens of a step, one of the last LATE + 1, and their -log p; waits for the device."""
        turn = step % len(self._host)
        if event := self._copied[turn]:
            event.synchronize()
        ids, losses = self._host[turn]
        return ids.long().tolist(), losses.tolist()

    def _write_token(self, width: int) -> Tensor:
        """The step: it reads nothing from the host, and its shapes follow from `width` and the cache alone."""
        # A slot that has ended goes on until the host knows of it, and longer if nothing waits for its place.
        ages = self._ages.clamp_max_(min(self._decoding.max_new_tokens, self._cache.num_columns) - 1)

        def rank(logits: Tensor) -> Tensor:
            return self._rules.apply(logits, ages, self._written[:, :-1])  # the start token is at unwritten places

        distances = ages[:, None] - self._ahead
        biases: dict[int, Tensor] = {}
        for owner, table in self._tables.items():
            biases[owner] = table[:, distances].transpose(0, 1).unsqueeze(2)
        self._cache.begin_step(ages)
        ids = self._written.gather(1, ages[:, None])
        hidden = self._decoder.run_stack(ids, biases, self._memory[:, :width], self._mask[..., :width], self._cache)
        scores = rank(self._decoder.compute_logits(hidden[:, 0], rank))
        uniforms = None
        if self._decoding.sampling:
            uniforms = self._uniforms.gather(1, ages[:, None])[:, 0]
        ids, losses = choose_tokens(scores, self._decoding.sampling, uniforms)
        self._written.scatter_(1, ages[:, None] + 1, ids[:, None])
        self._told[0].copy_(ids)
        self._told[1].copy_(losses)
        ages.add_(1)
        return self._told


def _send(values: Tensor, device: torch.device) -> Tensor:
    """Copy values of the host to the device, without waiting for the steps on their way."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


class CapturedSearch:
    """`GreedySearch` by CapturedSteps, with the same methods: inputs are encoded by batches and wait for slots."""

    def __init__(
        self,
        decoder: Decoder,
        decoding: Decoding,
        rules: LogitsProcessor,
        tokenizer: PreTrainedTokenizerBase | None,
        on_token: OnToken | None,
        on_note: OnNote,
    ) -> None:
        self.decoder = decoder
        self.decoding = decoding
        self.rules = rules
        self._answers = RunningAnswers(decoding, decoder.config.eos_token_id, tokenizer, on_token)
        self._on_note = on_note
        self._steps: CapturedSteps | None = None
        self._first: list[int] = []  # step that writes the first token of each slot
        self._lengths: list[int] = []  # of the slots' inputs
        self._num_read = 0  # steps
        self._waiting: deque[Key] = deque()  # answers to the last inputs of `_memory`
        self._memory = EncodedInputs(torch.empty(0), [])
        self._uniforms: Tensor | None = None

    @property
    def num_running(self) -> int:
        return self._answers.num_running

    @property
    def num_wanted(self) -> int:
        """How many inputs the next call of `fill_slots` takes at most."""
        return max(1, self.decoding.batch_size // self.decoding.num_candidates)

    def fill_slots(self, memory: EncodedInputs, rows: list[ScoredRow], uniforms: Tensor | None) -> None:
        """Let the answers to encoded inputs wait for slots; arguments as of `GreedySearch`."""
        assert rows and not self._waiting, "inputs are encoded when none waits"
        self._waiting.extend(self._answers.list_keys(rows))
        self._memory = memory.copy_rows(self.decoding.num_candidates)
        device = self.decoder.device
        self._uniforms = None if uniforms is None else _send(uniforms, device)
        if self._steps is None:
            self._steps = CapturedSteps(self.decoder, self.decoding, self.rules, self._memory, self._on_note)
            self._answers.start(self._steps.num_slots)
            self._first = [0] * self._steps.num_slots
            self._lengths = [0] * self._steps.num_slots

    def write_answers(self, together: World, *, has_more: bool) -> list[Answered]:
        """Write tokens until free slots need inputs that are not encoded, or all answers have ended.

        Returns: row and answers of every input of which all answers have ended.
        """
        assert together.size == 1, "ranks that gather weights launch their steps"
        steps = self._steps
        assert steps is not None
        found: list[Answered] = []
        enough = steps.num_slots * MIN_FREE_SHARE
        while True:
            free = self._answers.list_free()
            if self._waiting and len(free) >= min(enough, len(self._waiting)):
                self._begin_answers(steps, free[: len(self._waiting)])
            elif not self.num_running or (has_more and not self._waiting and len(free) >= enough):
                return found
            found += self._write_token(steps)

    def _begin_answers(self, steps: CapturedSteps, slots: list[int]) -> None:
        """Begin the next answers that wait."""
        end = len(self._memory.lengths) - len(self._waiting) + len(slots)
        taken = slice(end - len(slots), end)
        lengths = self._memory.lengths[taken]
        uniforms = None if self._uniforms is None else self._uniforms[taken]
        steps.fill(slots, EncodedInputs(self._memory.states[taken], lengths), uniforms)
        for slot, length in zip(slots, lengths, strict=True):
            self._answers.begin(slot, self._waiting.popleft())
            self._first[slot] = steps.num_steps
            self._lengths[slot] = length

    def _write_token(self, steps: CapturedSteps) -> list[Answered]:
        """Run a step, unless all answers are long enough; returns the answers that ended LATE steps before."""
        cap = self.decoding.max_new_tokens
        running = [slot for slot, key in enumerate(self._answers.keys) if key is not None]
        ages = [steps.num_steps - self._first[slot] for slot in running]
        is_needed = min(ages) < cap
        if is_needed:
            steps.run(max(self._lengths[slot] for slot in running), min(max(ages), cap - 1))
        if is_needed and steps.num_steps - self._num_read <= LATE:
            return []
        # Tokens of steps before a slot's first one are of the answer before.
        own = [slot for slot in running if self._first[slot] <= self._num_read]
        found = self._answers.add_tokens(*steps.read(self._num_read), own)
        self._num_read += 1
        return found
