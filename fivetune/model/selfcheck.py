"""Is the loaded model the one in the file? Tensors, tied embeddings, output scaling: compared, not assumed.

In: a model, the safetensors files it came from, config.json as it stands. Out: the model, or ModelError.

What can go wrong silently (transformers issues 43681, 47620, 48154): an untied output head is tied over,
the decoder's output is scaled by d_model^-1/2 where the family does not, or the other way round.
The rule of the family: T5 1.0 ties and scales; v1.1, Flan-T5, mT5 and umT5 do neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fivetune.errors import ModelError
from fivetune.model.files import tensors

SHARED, HEAD = "shared.weight", "lm_head.weight"
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
KNOWN_LEFTOVERS = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)  # of old T5 1.0 files
TOLERANCE = 1e-4  # relative, of the probe's logits


def verified(model: Any, files: list[Path], raw: dict[str, Any], *, where: str) -> Any:
    """Return the model after comparing it with its files. Raises ModelError naming what differs."""
    head = _compare_tensors(model, files, where, own_head=raw.get("tie_word_embeddings") is False)
    scale = expected_scale(raw, untied=head is not None, where=where)
    if head is not None and model.lm_head.weight is model.get_input_embeddings().weight:
        model.lm_head.weight = nn.Parameter(head)  # transformers ties a head that has the embedding's values
    embedding = model.get_input_embeddings().weight.detach()
    if raw["model_type"] == "umt5":
        # transformers 5.23 forces the tie flag of umT5 to True and scales by it; the published models do neither
        model.config.tie_word_embeddings = scale
    _probe(model, embedding if head is None else head, scale, where)
    return model


def expected_scale(raw: dict[str, Any], *, untied: bool, where: str) -> bool:
    """Whether the decoder's output is multiplied with d_model^-1/2, by family and config.json.

    >>> expected_scale({"model_type": "t5"}, untied=False, where="")
    True
    >>> expected_scale({"model_type": "t5", "tie_word_embeddings": False}, untied=True, where="")
    False
    """
    flag = raw.get("tie_word_embeddings")
    if flag is False and not untied:
        raise ModelError(
            f"{where}: config.json says that the output head is its own, but the file holds no {HEAD}. "
            "The file is incomplete; get the model again."
        )
    if raw["model_type"] == "mt5":
        return False
    if raw["model_type"] == "umt5":
        return not untied
    scale = raw.get("scale_decoder_outputs", flag is not False)
    if untied and scale and flag is False:
        raise ModelError(
            f"{where}: config.json says that the output head is its own and that the decoder's output is scaled "
            '(scale_decoder_outputs), which only tied models do. Set "scale_decoder_outputs": false.'
        )
    if untied and scale:
        raise ModelError(
            f"{where}: the file holds an output head of its own ({HEAD}), but config.json says that it is tied. "
            'Set "tie_word_embeddings": false in config.json if this is a v1.1 or Flan model.'
        )
    return bool(scale)


def _compare_tensors(model: Any, files: list[Path], where: str, *, own_head: bool) -> Tensor | None:
    """Every tensor of the files must be in the model and the other way round. Returns an untied head.

    A head that equals the embedding is a copy of it, unless config.json says that it is a weight of its own.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    seen: set[str] = set()
    shared = head = None
    for name, tensor in tensors(files):
        if name in KNOWN_LEFTOVERS and name not in parameters:
            continue
        if name not in parameters:
            raise ModelError(f"{where}: tensor {name} of the file has no place in the model. Is config.json of it?")
        seen.add(name)
        if not tensor.isfinite().all():
            raise ModelError(
                f"{where}: tensor {name} of the file holds values that are not finite. Get the model again."
            )
        if not torch.equal(parameters[name].detach(), tensor.float()):
            raise ModelError(
                f"{where}: tensor {name} differs between file and loaded model (tied over by the loader?)."
            )
        shared = tensor.float() if name in (SHARED, *COPIES) else shared
        head = tensor.float() if name == HEAD else head
    tied = {SHARED, HEAD, *COPIES}
    missing = [n for n in parameters if n not in seen and n not in tied]
    if missing or not seen & tied:
        name = (missing or [SHARED])[0]
        raise ModelError(f"{where}: tensor {name} is not in the file ({len(missing)} missing). Get the model again.")
    if head is None or shared is None:
        return None
    return head if own_head or not torch.equal(head, shared) else None


@torch.no_grad()
def _probe(model: Any, head: Tensor, scale: bool, where: str) -> None:
    """Logits of a probe against the file's head, scaled by the family's rule, without transformers' own path."""
    model.eval()
    input_ids = torch.tensor([[3, 5, 7, 1]]) % head.shape[0]
    start = model.config.decoder_start_token_id
    decoder_input_ids = torch.tensor([[start, 5, 3]]) % head.shape[0]
    output = model(input_ids=input_ids, decoder_input_ids=decoder_input_ids, output_hidden_states=True, use_cache=False)
    hidden = output.decoder_hidden_states[-1]
    expected = (hidden * model.config.d_model**-0.5 if scale else hidden) @ head.T
    error = ((output.logits - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()
    if not error <= TOLERANCE:
        rule = "scaled by d_model^-1/2" if scale else "not scaled"
        raise ModelError(
            f"{where}: the loaded model's logits are off by {error:.2g} from its own weights "
            f"with the decoder output {rule}. "
            "This version of transformers computes the family wrongly; use another one."
        )
