"""Load a model and its tokenizer from a folder, and verify that the loaded weights equal those of the files.

In: paths and options. Out: `LoadedModel`: an fp32 transformers model of the T5 family, its tokenizer, warnings.
The flags by which transformers ties and scales changed between its versions; selfcheck.py compares with the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from fivetune.errors import ModelError
from fivetune.model import selfcheck, span_head
from fivetune.model.adapter import find_adapter
from fivetune.model.added_tokens import KEY as ADDED
from fivetune.model.added_tokens import add_tokens, fill_rows
from fivetune.model.family import Family, find_family, get_family, has_own_head, has_span_head
from fivetune.model.files import find_folder, find_weight_files, read_model_config, refuse_missing_layers
from fivetune.model.misfit import explain_misfit
from fivetune.model.shards import find_tensors, is_untied
from fivetune.model.tokenizer import KEY, load_tokenizer, refuse_other_vocabulary, suppress_output
from fivetune.rundir.checksums import MANIFEST, verify_checksums

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from fivetune.model.modules import T5Model, T5Settings
    from fivetune.types import JsonTable


@dataclass(slots=True)
class LoadedModel:
    """A model in fp32 on the CPU, its tokenizer, and warnings for the user.

    Args:
        files: the model is on torch's meta device, and `model.shards.load_shards` reads its values from these files.
    """

    model: T5Model
    tokenizer: PreTrainedTokenizerBase
    warnings: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)


def load_model_and_tokenizer(
    path: str,
    *,
    tokenizer: str | None = None,
    new_tokens: Sequence[str] = (),
    init: str = "pretrained",
    dropout: float | None = None,
    head: str = "generate",
    on_meta: bool = False,
    any_seq2seq: bool | None = False,
    tokenizer_key: str | None = KEY,
) -> LoadedModel:
    """Load a pre-trained model, or build one from a config with random weights (torch's global generator).

    Args:
        path: folder, hub name or t5-nano; of a model with random weights also its config.json.
        tokenizer: folder or hub name, if it is not in the model's folder.
        new_tokens: what the vocabulary is grown by.
        head: "generate"; "extractive" adds a new span head to a generative model, or loads an existing one.
        on_meta: leave the weights of a pre-trained generative model of T5's blocks in their files, unless its
            vocabulary must grow.
        any_seq2seq: also load other models of transformers; None: no setting allows that. tokenizer_key: for messages.

    Raises RunDirError if a file differs from the checksums that FiveTune wrote beside it; ModelError for a damaged one,
    another family, another vocabulary than `tokenizer` has, and loaded weights that differ from the files.
    """
    from transformers import AutoModelForSeq2SeqLM

    source = find_source(path, config=None, init=init, revision=None)
    # Damage is named before anything is built.
    if source.is_dir():
        verify_checksums(source, advice=_advise_restoring(source))
    raw = read_model_config(source)
    family = find_family(raw, source, any_seq2seq=any_seq2seq)
    settings = _load_settings(source, dropout, family)
    words = load_tokenizer(tokenizer, source, key=tokenizer_key)
    _refuse_other_ids(words, settings, source, tokenizer_key)
    words, added = add_tokens(words, new_tokens)
    if settings.pad_token_id is None:
        settings.pad_token_id = cast("int", words.pad_token_id)
    if isinstance(settings.eos_token_id, list):  # instruction-tuned models have several; answers end with the first
        settings.eos_token_id = cast("int", words.eos_token_id)
    if head == "extractive" and not family.span_class:
        raise ModelError(f"{source}: model_type {family.model_type!r} has no span head. Set task.head: generate.")
    if init == "pretrained":
        if tokenizer:
            refuse_other_vocabulary(words, tokenizer, source, key=tokenizer_key)
        files = find_weight_files(source)
        refuse_missing_layers(raw, files, source)
        # A saved span head is loaded; a new span head is attached to a generative model below.
        if has_span_head(raw):
            span_head.refuse_other_head(head, source)
            if added:
                raise ModelError(f"{ADDED}: {source} has a span head already. Add tokens before it is trained.")
            return LoadedModel(span_head.load_span_model(source, settings), words)
        # A vocabulary that must grow needs the values of its table.
        fits = not added and count_ids(words) <= raw.get("vocab_size", 0)
        if on_meta and family.t5_blocks and head == "generate" and fits:
            return LoadedModel(_build_on_meta(source, settings, raw, files), words, files=files)
        with suppress_output(), explain_misfit(source, files, settings, AutoModelForSeq2SeqLM.from_config):
            model = AutoModelForSeq2SeqLM.from_pretrained(
                source, config=settings, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
            )
            _freeze_vision(model)
            model = selfcheck.verify_model(_set_generation_ids(model, settings), files, raw, where=str(source))
    else:
        model = _build_random(settings, raw)
    loaded = LoadedModel(model, words)
    _fit_vocabulary(loaded, source, tokenizer_key, num_added=len(added))
    if added and init == "pretrained":
        fill_rows(loaded.model, added)
    num_new = len({*new_tokens})
    if num_known := num_new - len(added):
        loaded.warnings.append(f"{ADDED}: {num_known} of {num_new} tokens are in the vocabulary already.")
    if head == "extractive":
        loaded.model = span_head.attach_span_head(loaded.model)
    return loaded


def load_without_weights(folder: Path) -> LoadedModel:
    """Load the tokenizer of a folder, and the model of its config.json on torch's meta device, without values."""
    settings = _load_settings(folder, None, find_family(read_model_config(folder), folder))
    return LoadedModel(_build_model(settings, "meta"), load_tokenizer(None, folder))


def find_source(path: str | None, *, config: str | None, init: str, revision: str | None) -> Path:
    """Find the folder or config.json that a model is built from. Raises ModelError if it does not exist."""
    if init == "pretrained" and path:
        return find_folder(path, revision=revision)
    name = config or path
    assert name is not None  # RunConfig requires it
    return Path(name) if Path(name).is_file() else find_folder(name)


def _advise_restoring(folder: Path) -> str:
    """Advice for restoring a damaged model: from the best checkpoint if the folder is model/ of a run that has one."""
    run = folder.parent
    best = folder.parent / "best"
    if folder.name == "model" and (best / "model.safetensors").is_file():
        return f"Export {best} again: delete {folder}, then run: fivetune train {run} --resume"
    return f"Copy its files again. If the change is yours, delete {folder / MANIFEST}."


def _refuse_other_ids(tokenizer: PreTrainedTokenizerBase, settings: T5Settings, source: Path, key: str | None) -> None:
    """Raise ModelError if config.json and the tokenizer have different end or pad ids, as generation would not stop, or
    if no piece has the id that answers begin with."""
    first = settings.decoder_start_token_id
    last = settings.vocab_size - 1
    if not isinstance(first, int) or not 0 <= first <= last:
        raise ModelError(
            f"{source}: decoder_start_token_id is {first} in config.json. Allowed is 0 to {last}. Correct config.json."
        )
    setting = f" ({key})" if key else ""
    for name in ("eos_token_id", "pad_token_id"):
        configured = getattr(settings, name, None)
        given = getattr(tokenizer, name)
        allowed = configured if isinstance(configured, list) else [configured]
        if configured is not None and given not in allowed:
            raise ModelError(
                f"{source}: {name} is {configured} in config.json, {given} in the tokenizer. Use the tokenizer that "
                f"belongs to the model{setting}, or correct config.json."
            )


def count_parameters(model: nn.Module, *, trained: bool = False) -> int:
    """Count the weights, tied ones once; with `trained`, without frozen ones."""
    return sum(count_values(p) for p in model.parameters() if p.requires_grad or not trained)


def count_bytes(model: nn.Module) -> int:
    """Count the bytes of all weights, tied ones once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def count_values(weight: Tensor) -> int:
    """The number of values of a weight; those that bitsandbytes keeps in 4 bits are counted one by one."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.numel()
    return state.shape.numel()


def describe_parameters(model: nn.Module) -> str:
    """Describe the number of weights, the share that is trained if some are frozen, and a base in 4 bits."""
    count = count_parameters(model)
    trained = count_parameters(model, trained=True)
    parts = [f"{count:,} parameters"]
    if trained < count:
        parts.append(f"{100 * trained / count:.3g} % trained")
    attached = find_adapter(model)
    if attached and attached.note:
        parts.append(attached.note)
    return ", ".join(parts)


def _load_settings(source: Path, dropout: float | None, family: Family) -> T5Settings:
    """Load the transformers config and fill in entries that a config of the family may lack."""
    from transformers import AutoConfig

    try:
        settings = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers' strict validation raises its own kinds
        raise ModelError(f"{source}: config.json is refused: {str(error).strip()}") from None
    if dropout is not None:
        _set_dropout(settings, dropout)
    if getattr(settings, "decoder_start_token_id", None) is None:
        settings.decoder_start_token_id = getattr(settings, family.start)
    # T5Gemma's settings have the size of the vocabulary in the part of a stack.
    settings.vocab_size = settings.get_text_config(decoder=True).vocab_size
    settings.use_cache = True
    return cast("T5Settings", settings)


def _set_dropout(settings: PreTrainedConfig, rate: float) -> None:
    """Set the dropout rate, in T5Gemma also that of its stacks; Bart's entry has another name."""
    for name in ("dropout_rate", "dropout"):
        if hasattr(settings, name):
            setattr(settings, name, rate)
    for name in settings.sub_configs:
        if (part := getattr(settings, name, None)) is not None:
            _set_dropout(part, rate)


def _build_model(settings: T5Settings, device: str) -> T5Model:
    """Build transformers' model of a config, with random weights; on "meta" without values."""
    from transformers import AutoModelForSeq2SeqLM

    with suppress_output(), torch.device(device):
        model = AutoModelForSeq2SeqLM.from_config(settings, dtype=torch.float32, trust_remote_code=False)
    return _set_generation_ids(model, settings)


def _build_random(settings: T5Settings, raw: JsonTable) -> T5Model:
    """Build a model with random weights; untie the head if the config declares that, which transformers 5 ignores."""
    model = _build_model(settings, "cpu")
    _freeze_vision(model)
    if has_own_head(raw) and get_family(settings).t5_tables:
        head = torch.empty_like(model.lm_head.weight).normal_(std=settings.d_model**-0.5)
        model.lm_head.weight = nn.Parameter(head)
        model.config.tie_word_embeddings = False
    return model


def _freeze_vision(model: T5Model | PreTrainedModel) -> None:
    """Exclude the part of T5Gemma 2 that reads images from training: text has no gradient for it; it is saved."""
    for name in ("vision_tower", "multi_modal_projector"):
        if (part := getattr(model.get_encoder(), name, None)) is not None:
            part.requires_grad_(False)


def _set_generation_ids(model: T5Model, settings: T5Settings) -> T5Model:
    """Replace the generation config by the start, end and pad ids: the run's settings decide the rest."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        decoder_start_token_id=settings.decoder_start_token_id,
        eos_token_id=settings.eos_token_id,
        pad_token_id=settings.pad_token_id,
    )
    return model


def _build_on_meta(folder: Path, settings: T5Settings, raw: JsonTable, files: list[Path]) -> T5Model:
    """Build the model without values; whether its head is tied is read from the files, as for a whole model."""
    untied = is_untied(find_tensors(files), own_head=has_own_head(raw))
    selfcheck.verify_variant(settings, raw, untied=untied, where=str(folder))
    model = _build_model(settings, "meta")
    if untied:
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model


def count_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of rows that an embedding needs for all ids of a tokenizer."""
    return max(tokenizer.get_vocab().values()) + 1


def _fit_vocabulary(loaded: LoadedModel, source: Path, key: str | None, *, num_added: int) -> None:
    """Grow the embedding to a multiple of 128 rows if the tokenizer has more ids than it has rows; never shrink it.

    It warns of rows that nothing fills: those of the `num_added` last ids are filled later (`fill_rows`).
    """
    rows = loaded.model.get_input_embeddings().weight.shape[0]
    needed = count_ids(loaded.tokenizer)
    if needed <= rows:
        return
    if not get_family(loaded.model.config).t5_tables:
        setting = f" ({key})" if key else ""
        raise ModelError(
            f"{source}: the tokenizer has {needed} pieces, the embedding {rows} rows. Use the tokenizer that belongs "
            f"to the model{setting}."
        )
    # Products with a table of whole tiles are faster on a GPU.
    grown = -(-needed // 128) * 128
    head = loaded.model.lm_head.weight.detach().clone()  # before it is tied below
    tied = loaded.model.lm_head.weight is loaded.model.get_input_embeddings().weight
    with suppress_output():
        loaded.model.resize_token_embeddings(grown)
    if not tied:  # transformers 5 ties the head while resizing; new rows start as the mean of the old ones
        new_rows = head.mean(0, keepdim=True).expand(grown - rows, -1)
        loaded.model.lm_head.weight = nn.Parameter(torch.cat([head, new_rows]))
    if (own := needed - num_added) > rows:
        loaded.warnings.append(
            f"{source}: the tokenizer has {own} pieces, the embedding {rows} rows: grown to {grown}; "
            "the new rows are untrained."
        )
