"""Tensor parallelism on a model of the T5 family: what `tensor` and `fsdp_tensor` share and import late, with torch.

In: a model and the mesh of the ranks that share it. Out: the same model; each rank holds a share of the attention heads
and of the feed-forward features. Embeddings, norms and the output head are replicated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivetune.distributed.collective_log import find_collective_log
from fivetune.distributed.tensor_parallel import (
    ColumnEmbedding,
    ColumnLinear,
    RowLinear,
    TensorGroup,
    separate_masks,
    shard_module,
)
from fivetune.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split_heads(model: Any, mesh: DeviceMesh) -> None:
    """Shard q, k, v and wi by columns, o and wo by rows, and the tables of relative biases by head, in place.

    Raises ConfigError unless the number of ranks divides heads and features.
    """
    size = mesh.size()
    for name in ("num_heads", "d_ff"):
        value = getattr(model.config, name)
        if value % size:
            raise ConfigError(
                f"strategy.size: {size} ranks cannot share the model's {name} {value}. Use a divisor of it as "
                "strategy.size (default: launch.nproc)."
            )
    group = TensorGroup(mesh, find_collective_log(model))
    for stack in (model.encoder, model.decoder):
        for block in stack.block:
            for layer in block.layer[:-1]:
                _split_attention(getattr(layer, "SelfAttention", None) or layer.EncDecAttention, group)
            _split_feed_forward(block.layer[-1].DenseReluDense, group)


def _split_attention(attention: Any, group: TensorGroup) -> None:
    for linear in (attention.q, attention.k, attention.v):
        shard_module(linear, ColumnLinear, group)
    shard_module(attention.o, RowLinear, group)
    if attention.has_relative_attention_bias:
        shard_module(attention.relative_attention_bias, ColumnEmbedding, group)
    separate_masks(attention, group)
    # By these numbers transformers' attention splits and joins its heads.
    attention.n_heads //= group.mesh.size()
    attention.inner_dim //= group.mesh.size()


def _split_feed_forward(dense: Any, group: TensorGroup) -> None:
    for name, linear in dense.named_children():
        if name.startswith("wi"):
            shard_module(linear, ColumnLinear, group)
        elif name == "wo":
            shard_module(linear, RowLinear, group)
    separate_masks(dense, group)
