"""A folder to a model and a tokenizer, with a check that what was loaded is what the folder holds.

In: paths and options. Out: `Loaded`: an fp32 transformers model of the T5 family, its tokenizer, warnings.
transformers ties and scales by flags that changed between its versions; selfcheck.py compares with the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fivetune.errors import ModelError
from fivetune.model import selfcheck, spans
from fivetune.model.files import find_folder, read_config, refuse_pointer, weight_files

FAMILIES = ("t5", "mt5", "umt5")
TOKENIZER_FILES = ("tokenizer.json", "spiece.model", "tokenizer_config.json")


@dataclass(slots=True)
class Loaded:
    """A model ready to train, in fp32 on the CPU, and the tokenizer that belongs to it."""

    model: Any
    tokenizer: Any
    warnings: list[str] = field(default_factory=list)


def load(
    path: str | None,
    *,
    config: str | None = None,
    tokenizer: str | None = None,
    init: str = "pretrained",
    revision: str | None = None,
    dropout: float | None = None,
    head: str = "generate",
) -> Loaded:
    """Load a pre-trained model, or build one from a config with random weights (torch's global generator).

    `head` "extractive" puts a new span head onto a model that writes, or loads one that has its head already.

    Raises ModelError when the folder is damaged, of another family, or loads into something else than it holds.
    """
    source = find_source(path, config=config, init=init, revision=revision)
    raw = read_config(source)
    if raw.get("model_type") not in FAMILIES:
        raise ModelError(
            f"{source}: model_type {raw.get('model_type')!r} is not of the T5 family. Allowed: {', '.join(FAMILIES)}."
        )
    settings = _settings(source, raw, dropout)
    words = load_tokenizer(tokenizer, source)
    _refuse_other_ids(words, settings, source)
    if init == "pretrained" and spans.has_span_head(raw):
        spans.refuse_other_head(head, source)
        return Loaded(spans.load_span_model(source, settings), words)
    if init == "pretrained":
        loaded = Loaded(_pretrained(source, settings, raw), words)
    else:
        loaded = Loaded(_random(settings, raw), words)
    _fit_vocabulary(loaded, source)
    if head == "extractive":
        loaded.model = spans.with_span_head(loaded.model)
    return loaded


def find_source(path: str | None, *, config: str | None, init: str, revision: str | None) -> Path:
    """The folder, or config.json, that a model is made from. Raises ModelError if it is not there."""
    if init == "pretrained" and path:
        return find_folder(path, revision=revision)
    return _config_source(config or path)


def load_tokenizer(tokenizer: str | None, source: Path) -> Any:
    """The tokenizer of a folder. Raises ModelError if the folder has none."""
    from transformers import AutoTokenizer, ByT5Tokenizer

    folder = find_folder(tokenizer) if tokenizer else (source.parent if source.is_file() else source)
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            refuse_pointer(folder / name)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"{folder}: has no tokenizer. Give model.tokenizer (a folder, a hub name, or t5-nano).")
    with quiet():
        try:
            words = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # transformers raises many kinds for a broken tokenizer file
            raise ModelError(f"{folder}: the tokenizer cannot be loaded: {error}. Copy its files again.") from None
    if words.eos_token_id is None or words.pad_token_id is None:
        raise ModelError(f"{folder}: the tokenizer has no end or no pad token, which every T5 tokenizer has.")
    assert words.is_fast or isinstance(words, ByT5Tokenizer), type(words)
    return words


def _refuse_other_ids(tokenizer: Any, settings: Any, source: Path) -> None:
    """The tokenizer and config.json must mean the same end and pad tokens: the one writes them, the other stops there.

    Raises ModelError with both values.
    """
    for name in ("eos_token_id", "pad_token_id"):
        said = getattr(settings, name, None)
        allowed = said if isinstance(said, list) else [said]
        if said is not None and getattr(tokenizer, name) not in allowed:
            raise ModelError(
                f"{source}: {name} is {said} in config.json, {getattr(tokenizer, name)} in the tokenizer. "
                "Use the tokenizer that belongs to the model (model.tokenizer), or correct config.json."
            )


def num_parameters(model: nn.Module) -> int:
    """Number of weights, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def sentinel_ids(tokenizer: Any) -> list[int]:
    """Ids of <extra_id_N>."""
    return sorted(i for token, i in tokenizer.get_vocab().items() if token.startswith("<extra_id_"))


def _config_source(config: str | None) -> Path:
    assert config is not None  # RunConfig has seen to it
    return Path(config) if Path(config).is_file() else find_folder(config)


def _settings(source: Path, raw: dict[str, Any], dropout: float | None) -> Any:
    """The transformers config, with what a config of the family may lack."""
    from transformers import AutoConfig

    try:
        settings = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers' strict validation raises its own kinds
        raise ModelError(f"{source}: config.json is refused: {str(error).strip()}") from None
    if dropout is not None:
        settings.dropout_rate = dropout
    if getattr(settings, "decoder_start_token_id", None) is None:
        settings.decoder_start_token_id = settings.pad_token_id
    settings.use_cache = True
    return settings


def _pretrained(folder: Path, settings: Any, raw: dict[str, Any]) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    files = weight_files(folder)
    with quiet():
        try:
            model = AutoModelForSeq2SeqLM.from_pretrained(
                folder, config=settings, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
            )
        except RuntimeError as error:
            raise ModelError(f"{folder}: the weights do not fit config.json: {str(error).splitlines()[0]}") from None
    return selfcheck.verified(_with_ids(model, settings), files, raw, where=str(folder))


def _random(settings: Any, raw: dict[str, Any]) -> Any:
    """A model with random weights; untied where the config says so, which transformers 5 no longer does itself."""
    from transformers import AutoModelForSeq2SeqLM

    with quiet():
        model = AutoModelForSeq2SeqLM.from_config(settings, dtype=torch.float32, trust_remote_code=False)
    if raw.get("tie_word_embeddings") is False:
        head = torch.empty_like(model.lm_head.weight).normal_(std=settings.d_model**-0.5)
        model.lm_head.weight = nn.Parameter(head)
        model.config.tie_word_embeddings = False
    return _with_ids(model, settings)


def _with_ids(model: Any, settings: Any) -> Any:
    """Give generation the start, end and pad ids, and no length limit of its own."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        decoder_start_token_id=settings.decoder_start_token_id,
        eos_token_id=settings.eos_token_id,
        pad_token_id=settings.pad_token_id,
    )
    return model


def _fit_vocabulary(loaded: Loaded, source: Path) -> None:
    """Every id of the tokenizer needs an embedding row: grow to a multiple of 128 if not; never shrink."""
    rows = loaded.model.get_input_embeddings().weight.shape[0]
    needed = max(loaded.tokenizer.get_vocab().values()) + 1
    if needed <= rows:
        return
    grown = -(-needed // 128) * 128
    head = loaded.model.lm_head.weight.detach().clone()
    tied = loaded.model.lm_head.weight is loaded.model.get_input_embeddings().weight
    with quiet():
        loaded.model.resize_token_embeddings(grown)
    if not tied:  # transformers 5 ties the head over while it resizes; new rows start as the mean of the old
        new_rows = head.mean(0, keepdim=True).expand(grown - rows, -1)
        loaded.model.lm_head.weight = nn.Parameter(torch.cat([head, new_rows]))
    loaded.warnings.append(
        f"{source}: the tokenizer has {needed} pieces, the embedding {rows} rows: grown to {grown}; "
        "the new rows are untrained."
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the terminal: the self-check says what matters."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
