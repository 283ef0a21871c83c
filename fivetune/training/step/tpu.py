"""Optimizer steps and answers on TPU chips: transformers' modules, traced by torchax, compiled by XLA through jax.

In: a model and an optimizer on the host, micro-batches, rows of a store. Out: an Update; answers.
Weights and optimizer state are on the chips, and the host's model and optimizer receive them by `fetch`, so that
checkpoints and exports are as on any device. Shapes are static: lengths are taken from `SIZES`, a batch has always the
same number of rows. Losses, greedy search and the choice of labels run on the chips; ids and scores are copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import Tensor

from fivetune.data.store.batch import collate, join_batches, pad
from fivetune.data.store.token_store import TokenStore
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.model import forward, functional
from fivetune.model.backend import SIZES
from fivetune.model.decode import Decoding, GenerateAnswers, GeneratedAnswer, OnToken, group_by_length
from fivetune.model.decode.traced import TracedDecoder, build_traced_answer
from fivetune.model.modules import T5Model
from fivetune.training.optimizers._traced import apply_update, compute_rates, create_state, make_counter
from fivetune.training.state.snapshot import list_weights, map_names
from fivetune.training.step.groups import set_lr
from fivetune.training.step.learner import Learner, StepEngine, StepInputs, Update
from fivetune.training.step.nonfinite import refuse_nonfinite
from fivetune.types import Autocast, Batch, OnNote, ignore_note

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Arrays = dict[str, Any]
"""jax arrays by name; jax is an optional dependency, so its types are not used."""


def import_torchax() -> Any:
    """Import torchax. Its release 0.0.13 names overloads for named tensors, which torch 2.13 has no more."""
    packet: Any = torch._ops.OpOverloadPacket
    find = packet.__getattr__

    def find_or_name(self: Any, key: str) -> object:
        try:
            return find(self, key)
        except AttributeError:
            if key.startswith("__"):
                raise
            return f"{self}.{key}"

    packet.__getattr__ = find_or_name
    try:
        import torchax.interop

        torchax.default_env()  # imports the rest
    finally:
        packet.__getattr__ = find
    return torchax


class Chips(StepEngine):
    """A step engine with a model's weights and optimizer state on all chips of this host.

    Args:
        sharded: every chip holds a share of weights, gradients and optimizer state; else all of them.
        precision: bf16 rounds the operands of matrix products; weights and activations are fp32.
        max_norm: largest gradient norm; None disables clipping.
        seed: seed of the dropout masks, which depend on it and on the number of the step alone.
        devices: chips to use; default: all.
    """

    def __init__(
        self,
        model: T5Model,
        *,
        sharded: bool = False,
        precision: str = "fp32",
        max_norm: float | None = None,
        seed: int = 0,
        devices: Sequence[Any] | None = None,
    ) -> None:
        self.model = model
        self.sharded = sharded
        self.max_norm = max_norm
        self.optimizer: torch.optim.Optimizer | None = None
        self.weights: Arrays = {}
        self.states: dict[str, Arrays] = {}
        self.num_steps = 0
        self.key = jax.random.key(seed)
        self._torchax = import_torchax()
        self._stateless = functional.StatelessModel(model)
        self.mesh = Mesh(np.array(devices or jax.devices()), ("data",))
        self._matmul = "highest" if precision == "fp32" else "bfloat16"
        self._versions: list[int] = []  # of the host's weights when they were equal to the chips'
        self._is_ahead = False  # whether a step has changed the chips' weights since
        self._programs: dict[object, Callable[..., Any]] = {}

    @property
    def num_chips(self) -> int:
        return self.mesh.size

    def get_peak_memory_bytes(self, device: str) -> int | None:
        """Peak memory of the first chip; None if it does not count. `device` is the host's."""
        return (self.mesh.devices.flat[0].memory_stats() or {}).get("peak_bytes_in_use")

    # --- host and chips ---

    def fetch(self) -> None:
        """Copy weights and optimizer state to the host, unless the host's are newer or equal."""
        # torch counts the changes of each tensor: another count means that somebody loaded or averaged weights.
        if not self._is_ahead or self._versions != self._read_versions():
            return
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(_to_torch(self.weights[name]))
                if self.optimizer is not None and name in self.states:
                    state = {key: _to_torch(value) for key, value in self.states[name].items()}
                    self.optimizer.state[parameter] = {**make_counter(self.optimizer, self.num_steps), **state}
        self._versions = self._read_versions()
        self._is_ahead = False

    def send(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Copy weights and optimizer state to the chips if the host's are newer or the optimizer is another one."""
        same = optimizer is self.optimizer
        if same and self._versions == self._read_versions():
            return
        # What the chips have computed for the other optimizer comes back first.
        if not same:
            self.fetch()
        parameters = dict(self.model.named_parameters())
        self.weights = {name: self._send_array(p.detach().numpy()) for name, p in parameters.items()}
        if not (same and self._is_ahead):  # else only the host's weights were changed
            self.optimizer = optimizer
            self.num_steps = 0
            self.states = {}
            if optimizer is not None:
                trained = set(list_weights(optimizer))
                self.states = {name: self._send_state(p) for name, p in parameters.items() if p in trained}
        self._versions = self._read_versions()
        self._is_ahead = False

    def fetch_rates(self) -> None:
        """Copy single numbers of the optimizer state to the host, from which Adafactor's effective rate follows."""
        small: dict[str, Arrays] = {}
        for name, state in self.states.items():
            small[name] = {key: value for key, value in state.items() if value.ndim == 0}
        small = jax.device_get(small)  # one transfer: the host waits for the chips once
        for name, parameter in self.model.named_parameters():
            found = small.get(name)
            if self.optimizer is not None and found:
                numbers = {key: torch.tensor(float(value)) for key, value in found.items()}
                self.optimizer.state[parameter].update(make_counter(self.optimizer, self.num_steps), **numbers)

    def _send_state(self, parameter: Tensor) -> Arrays:
        assert self.optimizer is not None
        state = self.optimizer.state.get(parameter) or create_state(self.optimizer, parameter)
        self.num_steps = int(state.get("step", 0))
        return {key: self._send_array(np.asarray(value, np.float32)) for key, value in state.items() if key != "step"}

    def _read_versions(self) -> list[int]:
        return [parameter._version for parameter in self.model.parameters()]

    def get_sharding(self, shape: Sequence[int]) -> NamedSharding:
        """The sharding of a weight or a state: by its first dimension that the chips divide, or replicated."""
        spec = PartitionSpec()
        if self.sharded:
            for place, size in enumerate(shape):
                if size > 1 and size % self.num_chips == 0:
                    spec = PartitionSpec(*[None] * place, "data")
                    break
        return NamedSharding(self.mesh, spec)

    def _send_array(self, value: Any) -> Any:
        return jax.device_put(np.array(value), self.get_sharding(value.shape))  # a copy: the host's buffer may change

    # --- an optimizer step ---

    def step(self, learner: Learner, inputs: StepInputs) -> Update:
        """Run the step of a Learner. One program has all phases: its time counts as the host's."""
        set_lr(learner.optimizer, inputs.lr)
        values = self.update(
            inputs.batches,
            learner.optimizer,
            batch_size=inputs.batch_size,
            num_scored_tokens=inputs.num_scored_tokens,
        )
        refuse_nonfinite(learner, inputs.batches, inputs.number, *values[:2].tolist())
        return Update(values, inputs.batch_size, inputs.get_signum())

    def update(
        self, batches: Sequence[Batch], optimizer: torch.optim.Optimizer, *, batch_size: int, num_scored_tokens: int
    ) -> Tensor:
        """Run one optimizer step with the rates of the optimizer's groups; a non-finite one changes no weight.

        Returns: `Update.values` [3]. The host waits for the step.
        """
        self.send(optimizer)
        # A program is compiled once for all optimizers with these options: the rate and the weights are its arguments.
        described = repr([{**group, "params": len(group["params"]), "lr": 0} for group in optimizer.param_groups])
        if described not in self._programs:
            self._programs[described] = self.build_step()
        batch = self.send_batch(join_batches(batches), batch_size)
        scalars = {"num_tokens": np.float32(num_scored_tokens)}
        for name, value in compute_rates(optimizer, self.num_steps + 1).items():
            scalars[name] = np.float32(value)
        key = jax.random.fold_in(self.key, self.num_steps)
        self.weights, self.states, values = self._programs[described](self.weights, self.states, batch, scalars, key)
        self._is_ahead = True
        self.num_steps += 1
        loss, norm = np.asarray(values).tolist()
        return torch.tensor([loss, norm, batch[0].size + batch[2].size])

    def send_batch(self, batch: Batch, num_rows: int) -> list[Any]:
        """Pad a batch and divide its rows among the chips: inputs, mask, labels [micro-batches, rows, length] each.

        Args:
            num_rows: rows of a micro-batch, rounded up to a multiple of the chips. Rows that are added have no label.
        """
        # -(-a // b) rounds up.
        num_rows = -(-num_rows // self.num_chips) * self.num_chips
        pad_id = self.model.config.pad_token_id
        count = -(-len(batch.ids) // num_rows)
        padded = pad(batch, pad_id=pad_id, sizes=SIZES).extend(count * num_rows, pad_id=pad_id)
        sharding = NamedSharding(self.mesh, PartitionSpec(None, "data"))
        return [
            jax.device_put(each.view(count, num_rows, -1).numpy().astype(np.int32), sharding)
            for each in (padded.input_ids, padded.attention_mask, padded.labels)
        ]

    def build_step(self) -> Any:
        """Build the program of a step: (weights, states, batch, scalars, key) -> (weights, states, values)."""
        optimizer = self.optimizer
        assert optimizer is not None
        name_of = map_names(self.model)
        options: dict[str, Any] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                options[name_of[parameter]] = group

        def compute_loss(trained: Arrays, frozen: Arrays, batch: list[Any], num_tokens: Any, key: Any) -> Any:
            nats = self._call(functional.compute_losses, {**frozen, **trained}, *batch, key=key, training=True)
            return nats.sum() / num_tokens

        def step(weights: Arrays, states: Arrays, batch: list[Any], scalars: Arrays, key: Any) -> Any:
            trained = {name: weights[name] for name in options}
            frozen = {name: weight for name, weight in weights.items() if name not in options}

            def accumulate(sums: Any, numbered: Any) -> Any:
                number, part = numbered
                found = jax.value_and_grad(compute_loss)(
                    trained, frozen, part, scalars["num_tokens"], jax.random.fold_in(key, number)
                )
                return jax.tree.map(jnp.add, sums, found), None

            # Gradients: with a scan the program has the passes of one micro-batch, not of each.
            zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, trained))
            numbers = jnp.arange(len(batch[0]))
            (loss, grads), _ = jax.lax.scan(accumulate, zeros, (numbers, batch))
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(grad)) for grad in grads.values()))
            scale = 1.0
            if self.max_norm is not None:
                scale = jnp.minimum(1.0, self.max_norm / (norm + 1e-6))

            # The update, which is dropped on the chips if the step is not finite: the host would have to wait for it.
            finite = jnp.isfinite(loss) & jnp.isfinite(norm)
            before = {name: (trained[name], states[name]) for name in options}
            after = {
                name: apply_update(jnp, optimizer, options[name], *before[name], grads[name] * scale, scalars)
                for name in options
            }
            kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
            new_weights, new_states = frozen, {}
            for name, (weight, state) in kept.items():
                new_weights[name] = weight
                new_states[name] = state
            return new_weights, new_states, jnp.stack([loss, norm])

        # New weights and states take the memory of the old ones, divided among the chips in the same way.
        shardings = jax.tree.map(lambda value: value.sharding, (self.weights, self.states))
        return jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, None))

    def _call(
        self, function: Callable[..., Any], weights: Arrays, *args: Any, key: Any = None, training: bool = False
    ) -> Any:
        """Call a function of the torch model with these weights and arrays; returns an array."""
        self._stateless.train(training)
        interop = self._torchax.interop
        env = self._torchax.default_env()
        with (
            warnings.catch_warnings(),
            jax.default_matmul_precision(self._matmul),
            env,
            env.override_property(prng=key),
        ):
            warnings.filterwarnings("ignore", message="Explicitly requested dtype int64")  # ids fit into int32
            tensors = interop.torch_view((weights, *args))
            return interop.jax_view(self._stateless.call(function, *tensors))

    # --- answers ---

    @property
    def generate(self) -> GenerateAnswers:
        return self._generate

    def _generate(
        self,
        model: T5Model,
        store: TokenStore,
        rows: Sequence[int],
        decoding: Decoding,
        *,
        device: str,
        autocast: Autocast,
        world: World = SINGLE_PROCESS,
        tokenizer: PreTrainedTokenizerBase | None = None,
        on_token: OnToken | None = None,
        on_note: OnNote = ignore_note,
    ) -> Iterator[GeneratedAnswer]:
        """Yield the answers for `rows` as `model.decode.generate` does: of greedy search, or the best label.

        One program writes whole answers: `on_token` is not called.
        """
        assert model is self.model
        self.send(self.optimizer)
        if decoding not in self._programs:
            self._programs[decoding] = jax.jit(lambda *arrays: self._answer(decoding, *arrays))
        chosen = np.asarray(rows, dtype=np.int64)
        for positions in group_by_length(store.inputs.lengths[chosen], decoding.batch_size):
            batch_rows = chosen[positions].tolist()
            placed = [one[0] for one in self.send_batch(collate(store, batch_rows), decoding.batch_size)]
            answers = jax.device_get(self._programs[decoding](self.weights, *placed))
            found = {name: values.tolist() for name, values in answers.items()}
            for i, row in enumerate(batch_rows):  # the rows after these are filler
                one = {name: values[i] for name, values in found.items()}
                yield build_traced_answer(row, one, decoding, self.model.config.eos_token_id)

    def _answer(self, decoding: Decoding, weights: Arrays, input_ids: Any, mask: Any, targets: Any) -> Arrays:
        config = self.model.config
        encoded = self._call(forward.encode_padded, weights, input_ids, mask)
        decoder = TracedDecoder(
            decoding,
            decode=lambda ids: self._call(forward.decode_padded, weights, ids, encoded, mask),
            compute_logits=lambda hidden: self._call(forward.compute_logits, weights, hidden),
            start_id=config.decoder_start_token_id,
            pad_id=config.pad_token_id,
            end_id=config.eos_token_id,
        )
        return decoder.answer(targets)


def _to_torch(value: Any) -> Tensor:
    return torch.from_numpy(np.array(value))
