"""What the tests of decoding share: a small store of questions, and models whose answers end at different lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kit
import torch

from fivetune.data.examples import Source
from fivetune.data.store.encode import LengthLimits
from fivetune.data.store.token_store import TokenStore, load_or_build_store
from fivetune.model.family import compute_output_scale
from fivetune.model.load import load_model_and_tokenizer
from fivetune.tasks.squad_v2 import SQuADV2


def question_store(folder: Path, model: Path, *, num_questions: int, any_seq2seq: bool = False) -> TokenStore:
    """Questions of `kit.squad_file`, tokenised for a model."""
    paths = (str(kit.squad_file(folder / "dev.json", num_questions=num_questions)),)
    words = load_model_and_tokenizer(str(model), any_seq2seq=any_seq2seq).tokenizer
    return load_or_build_store(
        Source(paths=paths, task=SQuADV2(), limits=LengthLimits(512, 128, "truncate")), words, cache=folder
    )


def lively(folder: Path) -> Any:
    """A random model that ends its answers at different lengths: strong layers, an own head, a tempting end token."""
    model = load_model_and_tokenizer(str(folder)).model.eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.decoder.block.parameters():
            weight.mul_(2 if weight.dim() == 2 else 1)
        head = torch.randn_like(model.lm_head.weight) / compute_output_scale(model.config)
        head[1] *= 5 if model.config.model_type == "umt5" else 3
    model.lm_head.weight = torch.nn.Parameter(head)
    return model
