"""Small random models of every family, with the values of published config.json files and their kinds of tokenizer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import kit
import torch

from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.save import save_model
from fivetune.rundir.checksums import MANIFEST

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 384}
GATED = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1}
GEMMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 64,
    "vocab_size": 384,
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 384,
    "scale_embedding": False,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5gemma": (
        "gemma",
        {
            "model_type": "t5gemma",
            "encoder": {**GEMMA, **CAPS, "model_type": "t5_gemma_module", "rope_theta": 10000.0},
            "decoder": {**GEMMA, **CAPS, "model_type": "t5_gemma_module", "rope_theta": 10000.0, "is_decoder": True},
            "vocab_size": 384,
            "eos_token_id": [1, 107],
            "is_encoder_decoder": True,
            "tie_word_embeddings": True,
        },
    ),
    "t5gemma2": (
        "gemma",
        {
            "model_type": "t5gemma2",
            "encoder": {
                "model_type": "t5gemma2_encoder",
                "text_config": {**GEMMA, "model_type": "t5gemma2_text"},
                "vision_config": VISION,
                "mm_tokens_per_image": 4,
                "boi_token_index": 380,
                "eoi_token_index": 381,
                "image_token_index": 382,
            },
            "decoder": {**GEMMA, "model_type": "t5gemma2_decoder"},
            "image_token_index": 382,
            "eoi_token_index": 381,
            "is_encoder_decoder": True,
            "tie_word_embeddings": True,
        },
    ),
    "longt5-local": (
        "t5",
        {**GATED, "model_type": "longt5", "encoder_attention_type": "local", "local_radius": 3, "global_block_size": 4},
    ),
    "longt5-tglobal": (
        "t5",
        {
            **GATED,
            "model_type": "longt5",
            "encoder_attention_type": "transient-global",
            "local_radius": 3,
            "global_block_size": 4,
        },
    ),
    "madlad400": (
        "madlad",
        {**GATED, "model_type": "t5", "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0},
    ),
    "ul2": ("t5", {**GATED, "model_type": "t5", "feed_forward_proj": "gated-silu", "decoder_start_token_id": 0}),
    "flan-ul2": (
        "t5",
        {
            **GATED,
            "model_type": "t5",
            "feed_forward_proj": "gated-silu",
            "decoder_start_token_id": 0,
            "n_positions": 512,
        },
    ),
    "byt5": ("bytes", {**GATED, "model_type": "t5", "num_decoder_layers": 1, "decoder_start_token_id": 0}),
    "myt5": ("morphemes", {**GATED, "model_type": "t5", "num_decoder_layers": 1, "decoder_start_token_id": 0}),
    "codet5": (
        "roberta",
        {
            **T5,
            "model_type": "t5",
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
            "feed_forward_proj": "relu",
        },
    ),
    "codet5p": (
        "roberta",
        {
            **T5,
            "model_type": "t5",
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "feed_forward_proj": "relu",
            "tie_word_embeddings": False,
        },
    ),
    "bart": (
        "roberta",
        {
            **BART,
            "model_type": "bart",
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": 2,
        },
    ),
    "pegasus": (
        "t5",
        {**BART, "model_type": "pegasus", "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
    ),
}
"""Kind of tokenizer and config.json, with the sizes of `kit.SHAPE`."""

FOREIGN = ("bart", "pegasus")


@cache
def _list_texts() -> tuple[str, ...]:
    return tuple(
        f"question: What has {asked}? context: {owner} has a {thing}. unanswerable"
        for asked in kit.WORDS
        for owner in kit.WORDS
        for thing in kit.WORDS
    )


def make_bpe_tokenizer(folder: Path, *, special: dict[str, str], template: str, byte_level: bool) -> Path:
    """A BPE tokenizer whose special tokens have the ids of their order, as Gemma's or, byte-level, RoBERTa's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    names = list(special.values())
    tokenizer = Tokenizer(models.BPE(unk_token=None if byte_level else special["unk_token"]))
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Replace("▁", " ")
        alphabet = []
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_list_texts()[::7], trainer)
    pairs = [(name, names.index(name)) for name in names]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=pairs)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = "RobertaTokenizerFast" if byte_level else "GemmaTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **special}))
    return folder


def make_family_tokenizer(folder: Path, kind: str) -> Path:
    """A tokenizer of the kind that a family has."""
    if kind == "gemma":
        special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
        return make_bpe_tokenizer(folder, special=special, template="<bos> $A", byte_level=False)
    if kind == "roberta":
        special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        return make_bpe_tokenizer(folder, special=special, template="<s> $A </s>", byte_level=True)
    if kind == "madlad":
        special = {"unk_token": "<unk>", "pad_token": "<s>", "eos_token": "</s>"}
        return make_bpe_tokenizer(folder, special=special, template="$A </s>", byte_level=False)
    if kind == "bytes":
        folder.mkdir(parents=True)
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
        return folder
    if kind == "morphemes":
        folder.mkdir(parents=True)
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "MyT5Tokenizer"}')
        maps = {"decompose_map": {"41": "61 41", "42": "61 42"}, "merge_map": {"68 61 73": "71 72"}}
        (folder / "byte_maps.json").write_text(json.dumps(maps))
        return folder
    return kit.make_tokenizer(folder)


def make_family_model(folder: Path, name: str, *, seed: int = 0, **changes: Any) -> Path:
    """A saved random model of CONFIGS, all of its weights of a size that shows in its scores."""
    kind, settings = CONFIGS[name]
    words = make_family_tokenizer(folder.with_name(f"{folder.name}-tokenizer"), kind)
    config = folder.with_name(f"{folder.name}-config")
    config.mkdir(parents=True)
    (config / "config.json").write_text(json.dumps({**settings, **changes}))
    torch.manual_seed(seed)
    loaded = load_model_and_tokenizer(
        str(config), tokenizer=str(words), init="random", dropout=0.1, any_seq2seq=name in FOREIGN
    )
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_((0.4 if name in FOREIGN else 0.1) * torch.randn_like(parameter))
        loaded.model.get_output_embeddings().weight[loaded.model.config.eos_token_id] *= 3  # answers end
    save_model(loaded.model, loaded.tokenizer, folder)
    (folder / MANIFEST).unlink()
    return folder
