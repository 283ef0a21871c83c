"""What test_tpu.py runs in a process of its own: the compiler of TPU v5e on a training step, without a chip.

In: a folder, a tiny model. Out: seen.json in the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from kit import ready

from fivetune.training.optimizers._traced import compute_rates, create_state
from fivetune.training.step.tpu import Chips

if __name__ == "__main__":
    place, model = (Path(word) for word in sys.argv[1:])
    setup = ready(place, model, model__dropout=0.1)
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    chips = Chips(setup.learner.model, precision="bf16", max_norm=1.0, devices=list(topology.devices))
    optimizer = setup.learner.optimizer
    chips.optimizer = optimizer
    replicated = NamedSharding(chips.mesh, PartitionSpec())
    rows = NamedSharding(chips.mesh, PartitionSpec(None, "data"))

    def shape(size, kind=jnp.float32, sharding=replicated):
        return jax.ShapeDtypeStruct(tuple(size), kind, sharding=sharding)

    for name, parameter in setup.learner.model.named_parameters():
        chips.weights[name] = shape(parameter.shape)
        state = create_state(optimizer, parameter)
        chips.states[name] = {key: shape(value.shape) for key, value in state.items() if key != "step"}
    batch = [shape((1, 8, length), jnp.int32, rows) for length in (64, 64, 16)]
    scalars = {name: shape(()) for name in ("num_tokens", *compute_rates(optimizer, 1))}
    key = shape((), chips.key.dtype)
    compiled = chips.build_step().lower(chips.weights, chips.states, batch, scalars, key).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    seen = {"all_reduces": text.count("all-reduce"), "argument_bytes": memory.argument_size_in_bytes}
    (place / "seen.json").write_text(json.dumps(seen))
