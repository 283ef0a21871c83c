"""Types of the parts of transformers' models that FiveTune reads, for annotations, and the tensors of their files.

transformers chooses a model's class at run time and types most of its attributes as `Tensor | Module`; these
declarations give the type checker the type of each attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


class T5Settings(Protocol):
    """A transformers T5Config, MT5Config or UMT5Config."""

    model_type: str
    d_model: int
    d_kv: int
    d_ff: int
    num_heads: int
    num_layers: int
    num_decoder_layers: int
    vocab_size: int
    is_gated_act: bool
    dense_act_fn: str
    tie_word_embeddings: bool
    use_cache: bool
    architectures: list[str]
    save_pretrained: Callable[[Path], object]
    pad_token_id: int
    eos_token_id: int
    decoder_start_token_id: int
    get_text_config: Callable[..., object]

    def to_diff_dict(self) -> dict[str, Any]: ...


class GenerationIds(Protocol):
    """The special tokens in a transformers GenerationConfig."""

    decoder_start_token_id: int
    eos_token_id: int
    pad_token_id: int


class T5Norm(nn.Module):
    """T5LayerNorm."""

    weight: nn.Parameter
    variance_epsilon: float


class T5Attention(nn.Module):
    """T5Attention; only some layers have `relative_attention_bias`."""

    config: T5Settings
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    relative_attention_bias: nn.Embedding
    has_relative_attention_bias: bool
    relative_attention_num_buckets: int
    relative_attention_max_distance: int
    is_decoder: bool
    n_heads: int
    key_value_proj_dim: int
    inner_dim: int
    dropout: float
    compute_bias: Callable[..., Tensor]


class T5FeedForward(nn.Module):
    """T5DenseActDense with `wi`, or T5DenseGatedActDense with `wi_0` and `wi_1`."""

    wi: nn.Linear
    wi_0: nn.Linear
    wi_1: nn.Linear
    wo: nn.Linear
    dropout: nn.Dropout
    act: Callable[[Tensor], Tensor]


class T5Layer(nn.Module):
    """A norm and one of self-attention, cross-attention and feed-forward."""

    SelfAttention: T5Attention
    EncDecAttention: T5Attention
    DenseReluDense: T5FeedForward
    layer_norm: T5Norm
    dropout: nn.Dropout


class T5Block(nn.Module):
    """The layers of one block: two in the encoder, three in the decoder."""

    layer: Sequence[T5Layer]


class T5Stack(nn.Module):
    """The encoder or the decoder."""

    embed_tokens: nn.Embedding
    block: Sequence[T5Block]
    final_layer_norm: T5Norm
    dropout: nn.Dropout
    get_input_embeddings: Callable[[], nn.Embedding]


class T5Model(nn.Module):
    """A model with a language model head (`lm_head`) or a span head (`qa_outputs`)."""

    config: T5Settings
    generation_config: GenerationIds
    shared: nn.Embedding
    encoder: T5Stack
    decoder: T5Stack
    lm_head: nn.Linear
    qa_outputs: nn.Linear
    get_input_embeddings: Callable[[], nn.Embedding]
    get_output_embeddings: Callable[[], nn.Linear]
    get_encoder: Callable[[], nn.Module]
    get_decoder: Callable[[], T5Stack]
    resize_token_embeddings: Callable[[int], nn.Embedding]
    save_pretrained: Callable[[Path], object]


class AutogradContext(FunctionCtx):
    """The context of a torch.autograd.Function; subclasses declare the values that a function keeps besides tensors."""

    saved_tensors: tuple[Any, ...]  # tensors, and None where None was saved
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        super().save_for_backward(*tensors)  # type: ignore[arg-type]  # torch accepts None


def iter_saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of the tensors that belong to a model's files without being trained, such as Bart's bias of
    the logits; T5 has none.
    """
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
