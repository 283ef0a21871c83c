"""Check that a loaded model equals its files: tensors, tied embeddings and output scaling.

In: a model, its safetensors files, the content of config.json. Out: the model, or ModelError.

Silent errors of loading (transformers issues 43681, 47620, 48154): an untied output head is replaced by the embedding;
the decoder's output is scaled although the variant (`family.py`) is not, or the reverse.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fivetune.errors import ModelError
from fivetune.model.family import (
    EMBEDDING_COPIES,
    HEAD,
    LEFTOVER_WEIGHTS,
    SHARED,
    get_family,
    has_own_head,
    infer_output_scale,
    set_output_scale,
)
from fivetune.model.files import iter_tensors
from fivetune.model.forward import compute_logits
from fivetune.model.modules import iter_saved_buffers
from fivetune.model.tokenizer import suppress_output

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightRenaming

    from fivetune.model.modules import T5Model, T5Settings
    from fivetune.types import JsonTable

TOLERANCE = 1e-4  # relative, of the probe's logits


def verify_model(model: T5Model, files: list[Path], raw: JsonTable, *, where: str) -> T5Model:
    """Return the model after comparing it with its files. Raises ModelError naming what differs."""
    head = _compare_tensors(model, files, where, own_head=has_own_head(raw))
    family = get_family(model.config)
    if not family.t5_tables:
        _probe(model, partial(compute_logits, model), "computed from the decoder's output alone", where)
        return model
    scale = infer_output_scale(raw, untied=head is not None, where=where)
    if head is not None and model.lm_head.weight is model.get_input_embeddings().weight:
        model.lm_head.weight = nn.Parameter(head)  # transformers ties a head that has the embedding's values
    embedding = model.get_input_embeddings().weight.detach()
    # The files decide: transformers' own flag is wrong for umT5 in some versions.
    set_output_scale(model.config, scale)
    _probe_head(model, embedding if head is None else head, scale, where)
    return model


def verify_variant(settings: T5Settings, raw: JsonTable, *, untied: bool, where: str) -> None:
    """`verify_model` for a model that is loaded in shards: probes a small model with random weights and its settings.

    Args:
        untied: whether the files hold an output head of their own.
    """
    from transformers import AutoModelForSeq2SeqLM

    scale = infer_output_scale(raw, untied=untied, where=where)
    set_output_scale(settings, scale)
    small: Any = deepcopy(settings)
    small.update({"d_model": 16, "d_kv": 4, "d_ff": 16, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1})
    # The variant's rules do not depend on the sizes, and a small model is built at once.
    small.vocab_size = max(64, settings.decoder_start_token_id + 1)
    with torch.random.fork_rng(devices=[]), suppress_output():
        model = AutoModelForSeq2SeqLM.from_config(small, dtype=torch.float32, trust_remote_code=False)
        if untied:
            model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    _probe_head(model, model.lm_head.weight, scale, where)


def _compare_tensors(model: T5Model, files: list[Path], where: str, *, own_head: bool) -> Tensor | None:
    """Raise ModelError unless files and model hold the same tensors. Returns: the untied head of the files, or None.

    A head that equals the embedding counts as tied, unless config.json declares an untied one (`own_head`).
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(iter_saved_buffers(model))
    renamings = _list_renamings(model)
    seen: set[Tensor] = set()
    shared = head = None
    for name, tensor in iter_tensors(files):
        if name not in parameters:
            for renaming in renamings:
                name = renaming.rename_source_key(name)[0]
        if name in LEFTOVER_WEIGHTS and name not in parameters:
            continue
        held = parameters.get(name, buffers.get(name))
        if held is None:
            raise ModelError(f"{where}: the model has no tensor {name} of the file. Does config.json belong to it?")
        seen.add(held)
        if not tensor.isfinite().all():
            raise ModelError(
                f"{where}: tensor {name} of the file holds values that are not finite. Get the model again."
            )
        if not torch.equal(held.detach(), tensor.float()):
            raise ModelError(f"{where}: tensor {name} differs between file and loaded model (did the loader tie it?).")
        if name in (SHARED, *EMBEDDING_COPIES):
            shared = tensor.float()
        elif name == HEAD:
            head = tensor.float()
    missing = [name for name, parameter in parameters.items() if parameter not in seen]
    if missing:
        raise ModelError(
            f"{where}: tensor {missing[0]} is not in the file ({len(missing)} missing). Get the model again."
        )
    if head is None or shared is None:
        return None
    if torch.equal(head, shared) and not own_head:
        return None
    return head


def _list_renamings(model: T5Model) -> list[WeightRenaming]:
    """transformers' renamings of tensors from published files of a family to its classes; T5 has none."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    if get_family(model.config).t5_tables:
        return []
    mapping = get_model_conversion_mapping(cast("PreTrainedModel", model))
    return [one for one in mapping if isinstance(one, WeightRenaming)]


def _probe_head(model: T5Model, head: Tensor, scale: bool, where: str) -> None:
    """Compare the model's logits of a probe with hidden states times the file's head, scaled by the variant's rule."""

    factor = model.config.d_model**-0.5 if scale else 1.0

    def compute(hidden: Tensor) -> Tensor:
        return (hidden * factor) @ head.T

    _probe(model, compute, f"with the decoder output {'scaled by d_model^-1/2' if scale else 'not scaled'}", where)


@torch.no_grad()
def _probe(model: T5Model, compute: Callable[[Tensor], Tensor], how: str, where: str) -> None:
    """Compare the model's logits of a probe with those that `compute` makes of the decoder's output."""
    model.eval()
    rows = model.config.vocab_size  # a small vocabulary may lack these ids
    input_ids = torch.tensor([[3, 5, 7, 1]]) % rows
    decoder_input_ids = torch.tensor([[model.config.decoder_start_token_id, 5, 3]]) % rows
    output = model(input_ids=input_ids, decoder_input_ids=decoder_input_ids, output_hidden_states=True, use_cache=False)
    expected = compute(output.decoder_hidden_states[-1])
    error = ((output.logits - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()
    if not error <= TOLERANCE:  # also where the error is NaN
        raise ModelError(
            f"{where}: the loaded model's logits differ by {error:.2g} (relative) from those of its own weights {how}. "
            "This version of transformers computes this model family incorrectly; use another version."
        )
