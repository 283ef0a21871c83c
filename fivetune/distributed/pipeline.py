"""A pipeline stage: the consecutive blocks that one rank of a copy of the model computes, and what it exchanges.

In: the activations of the stage before. Out: those for the stage after; in the backward pass gradients the other way.
Each direction has a process group of its own, so that on CUDA a message never queues behind one that its receiver waits
to answer. Sends do not wait; receives do, which the phase "bubble" measures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fivetune.distributed.world import import_collectives

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

IMPOSSIBLE: tuple[float, list[range]] = (math.inf, [])  # a division, with its largest cost
STAGE = "pipeline_stage"  # attribute of a model of which each rank holds a stage


@dataclass(slots=True)
class Stage:
    """This rank's stage: `number` of `len(ranks)`.

    Args:
        ranks: the rank of every stage of this copy of the model.
        schedule: order of passes, "gpipe" or "1f1b" (`order_passes`).
        encoder, decoder: numbers of the stage's blocks in each stack.
        group: all stages; downstream, upstream: the same ranks, for activations and for gradients.
        holders: the stages that hold a weight, by its name; the first of them owns it.
        frozen: names of the weights that were frozen when the model was divided.
        shared: the group of those stages, by the name of a weight that this stage shares with others.
        timer: called with the phase that begins.
    """

    number: int
    ranks: Sequence[int]
    schedule: str
    encoder: range
    decoder: range
    device: torch.device
    group: ProcessGroup
    downstream: ProcessGroup
    upstream: ProcessGroup
    holders: dict[str, tuple[int, ...]]
    frozen: frozenset[str]
    shared: dict[str, ProcessGroup]
    timer: Callable[[str], object]
    _inputs: deque[list[Tensor]] = field(default_factory=deque[Any])
    _outputs: deque[list[Tensor]] = field(default_factory=deque[Any])
    _sending: deque[tuple[Any, Tensor]] = field(default_factory=deque[Any])
    _num_exchanged: int = 0  # tensors that this pass has received and sent

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == len(self.ranks) - 1

    @property
    def starts_decoder(self) -> bool:
        return bool(self.decoder) and self.decoder.start == 0

    def is_owner(self, name: str) -> bool:
        """Whether this stage is the one that owns a weight; other stages may hold copies of it."""
        return self.holders[name][0] == self.number

    # --- activations and gradients ---

    def receive(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        """Receive fp32 activations of the given shapes from the stage before; they collect gradients."""
        import torch

        received = [torch.empty(shape, device=self.device) for shape in shapes]
        self._receive_into(received, self.number - 1, self.downstream, then="forward")
        if torch.is_grad_enabled():
            for tensor in received:
                tensor.requires_grad_()
            self._inputs.append(received)
        return received

    def send(self, *tensors: Tensor) -> None:
        """Send activations to the stage after."""
        import torch

        outputs = [tensor.float().contiguous() for tensor in tensors]
        self._send([tensor.detach() for tensor in outputs], self.number + 1, self.downstream)
        if torch.is_grad_enabled():
            self._outputs.append(outputs)

    def run_backward(self, loss: Tensor, backward: Callable[[Tensor], object]) -> None:
        """Run the backward pass of the oldest micro-batch that has had none.

        Args:
            loss: loss of the micro-batch, on the last stage.
            backward: runs the backward pass of that loss.
        """
        import torch

        if self.is_last:
            backward(loss)
        else:
            outputs = self._outputs.popleft()
            gradients = [torch.empty_like(tensor) for tensor in outputs]
            self._receive_into(gradients, self.number + 1, self.upstream, then="backward")
            torch.autograd.backward(outputs, gradients)
        if not self.is_first:
            inputs = self._inputs.popleft()
            self._send([_get_gradient(tensor) for tensor in inputs], self.number - 1, self.upstream)

    def begin_pass(self) -> None:
        """Begin the forward or the backward pass of a micro-batch."""
        self._num_exchanged = 0

    def forget_passes(self) -> None:
        """Free the activations of all micro-batches, after a pass has ended with an error."""
        self._inputs.clear()
        self._outputs.clear()

    def send_zeros(self, kind: str, rows: tuple[int, int], width: int) -> None:
        """Take part in the rest of what a pass exchanges, without computing it: zeros are sent.

        Args:
            kind: F for a forward, B for a backward pass.
            rows: rows of the encoder's and of the decoder's activations.
            width: width of both activations.
        """
        import torch

        within_decoder = bool(self.decoder) and not self.starts_decoder
        before = [] if self.is_first else list(rows[: 1 + within_decoder])
        after = [] if self.is_last else list(rows[: 1 + bool(self.decoder)])
        received, sent = (before, after) if kind == "F" else (after, before)
        step, group = (1, self.downstream) if kind == "F" else (-1, self.upstream)
        done = self._num_exchanged
        # A pass first receives, then sends; what it had exchanged before it failed is not exchanged again.
        tensors = [torch.zeros(count, width, device=self.device) for count in received[done:]]
        self._receive_into(tensors, self.number - step, group, then="forward" if kind == "F" else "backward")
        done = max(done - len(received), 0)
        self._send([torch.zeros(count, width, device=self.device) for count in sent[done:]], self.number + step, group)

    def finish_sends(self) -> None:
        """Wait until the other stages have what was sent to them."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def broadcast_last(self, tensor: Tensor) -> Tensor:
        """Broadcast a tensor of the last stage in place; returns it."""
        import_collectives().broadcast(tensor, src=self.ranks[-1], group=self.group)
        return tensor

    def sum_over_stages(self, tensor: Tensor) -> Tensor:
        """All-reduce (sum) a tensor over the stages in place; returns it."""
        import_collectives().all_reduce(tensor, group=self.group)
        return tensor

    def _send(self, tensors: list[Tensor], number: int, group: ProcessGroup) -> None:
        for tensor in tensors:
            work = import_collectives().isend(tensor, dst=self.ranks[number], group=group)
            self._sending.append((work, tensor))  # the tensor must live until it is sent
            self._num_exchanged += 1
        while len(self._sending) > 4 * len(self.ranks):  # so old that its receiver has it, or never waits for this rank
            self._sending.popleft()[0].wait()

    def _receive_into(self, tensors: list[Tensor], number: int, group: ProcessGroup, *, then: str) -> None:
        self.timer("bubble")
        for tensor in tensors:
            import_collectives().recv(tensor, src=self.ranks[number], group=group)
            self._num_exchanged += 1
        self.timer(then)

    # --- weights ---

    def sum_shared_gradients(self, model: nn.Module) -> None:
        """Sum the gradients of the weights that several stages hold, over those stages."""
        import torch

        for name, parameter in model.named_parameters():
            if name in self.shared:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                import_collectives().all_reduce(parameter.grad, group=self.shared[name])

    def gather_weight(self, name: str, value: Tensor) -> Tensor:
        """Broadcast a weight, or its gradient, from its owner. Collective: all stages call it."""
        import torch

        if self.is_owner(name):
            whole = value.contiguous()
        else:  # also where this stage holds a copy: the owner's value counts
            whole = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        import_collectives().broadcast(whole, src=self.ranks[self.holders[name][0]], group=self.group)
        return whole


def find_stage(model: nn.Module) -> Stage | None:
    """This rank's stage of a model; None if the rank computes the whole model."""
    return model.__dict__.get(STAGE)


def find_bias_block(stack: Any, number: int) -> int:
    """The block whose table of relative biases a block of the stack uses: its own, or the nearest before it."""
    return max(n for n in range(number + 1) if stack.block[n].layer[0].SelfAttention.has_relative_attention_bias)


def order_passes(schedule: str, number: int, num_stages: int, num_batches: int) -> list[str]:
    """List the passes of a stage in order: F for the forward, B for the backward pass of the next micro-batch.

    >>> "".join(order_passes("gpipe", 0, 2, 3)), "".join(order_passes("1f1b", 0, 2, 3))
    ('FFFBBB', 'FFBFBB')
    """
    ahead = num_batches if schedule == "gpipe" else min(num_stages - 1 - number, num_batches)
    rest = num_batches - ahead
    return ["F"] * ahead + ["F", "B"] * rest + ["B"] * ahead


def divide_costs(costs: Sequence[float], num_parts: int) -> list[range]:
    """Divide a row of costs into consecutive parts, none empty, so that the largest sum is as small as possible.

    >>> divide_costs([1, 1, 1, 1, 4], 2), divide_costs([3, 1, 1], 2)
    ([range(0, 4), range(4, 5)], [range(0, 1), range(1, 3)])
    """
    # The best division of the first n costs, for each n; every round divides them into one part more.
    best: list[tuple[float, list[range]]] = [(0.0, []), *[IMPOSSIBLE] * len(costs)]
    for _ in range(num_parts):
        longer = [IMPOSSIBLE]
        for end in range(1, len(costs) + 1):
            found = IMPOSSIBLE
            for first, (largest, parts) in enumerate(best[:end]):
                largest = max(largest, sum(costs[first:end]))
                if largest < found[0]:
                    found = largest, [*parts, range(first, end)]
            longer.append(found)
        best = longer
    return best[-1][1]


def _get_gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None, "every received activation is used"
    return tensor.grad.contiguous()
