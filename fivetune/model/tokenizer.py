"""The tokenizer of a model folder: load it, and check that it is complete and has the vocabulary of the weights.

In: a folder, a hub name or t5-nano. Out: a transformers tokenizer, or a ModelError with the remedy.
A folder holds its vocabulary as tokenizer.json (of the tokenizers library) or as spiece.model (SentencePiece). ByT5 has
none: its tokens are bytes.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fivetune.errors import FiveTuneEnvironmentError, ModelError
from fivetune.model.download import find_cached_snapshot
from fivetune.model.family import SENTINEL
from fivetune.model.files import find_folder, find_local_folder, refuse_pointer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.types import JsonTable

KEY = "model.tokenizer"
TOKENIZER, SENTENCEPIECE, TOKENIZER_CONFIG = "tokenizer.json", "spiece.model", "tokenizer_config.json"
SPECIAL = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
BYTE_CLASSES = ("ByT5Tokenizer", "MyT5Tokenizer")
OTHER_VOCABULARIES = (("vocab.json", "merges.txt"), ("sentencepiece.bpe.model",), ("tokenizer.model",))
"""Files of byte-level BPE (CodeT5, Bart) and of other SentencePiece models, which transformers converts."""
WORD_START = "\u2581"  # SentencePiece's mark of a space, which is not a piece of text by itself


def load_local_tokenizer(model: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model that is on this machine; None for one of the hub that is not in its cache."""
    folder = find_local_folder(model) or find_cached_snapshot(model)
    if folder is None:
        return None
    return load_tokenizer(None, folder, key=None)


def load_hub_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, which is downloaded if it is not on this machine."""
    return load_local_tokenizer(model) or load_tokenizer(None, find_folder(model), key=None)


def load_tokenizer(tokenizer: str | None, source: Path, *, key: str | None = KEY) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `tokenizer` (folder, hub name, t5-nano), or of the model folder `source`.

    Args:
        key: setting or flag that names another tokenizer, for messages; None if there is none.

    Raises ModelError if the folder has no tokenizer, no vocabulary, or an unreadable one.
    """
    try:
        folder = find_folder(tokenizer) if tokenizer else find_tokenizer_folder(source)
    except FiveTuneEnvironmentError as error:
        raise type(error)(f"{key}: {error}") from None
    # A clone without its large files has pointers, which read like damaged JSON.
    for name in (TOKENIZER, SENTENCEPIECE, TOKENIZER_CONFIG):
        if (folder / name).is_file():
            refuse_pointer(folder / name)
    settings, _ = _read_object(folder / TOKENIZER_CONFIG)
    _refuse_lost_vocabulary(folder, settings, key)
    with suppress_output(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # MyT5Tokenizer leaves its file open
        try:
            loaded = _load_from_folder(folder, settings)
        except Exception as error:  # transformers raises many kinds for a broken tokenizer file
            raise ModelError(_explain_failure(folder, error, key)) from None
    if loaded.eos_token_id is None or loaded.pad_token_id is None:
        raise ModelError(f"{folder}: the tokenizer has no end or no pad token, which every T5 tokenizer has.")
    if not list_pieces(loaded):
        raise ModelError(
            f"{folder}: the tokenizer's vocabulary has no pieces, only special tokens: every text would be unknown. "
            f"Copy the {TOKENIZER} or {SENTENCEPIECE} that belongs to the model into the folder."
        )
    return loaded


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the files of a tokenizer into a folder. Raises OSError."""
    with suppress_output():
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:
            if type(error) is not Exception:
                raise
            raise OSError(str(error)) from None  # tokenizers says in this way that a file cannot be written


def find_tokenizer_folder(source: Path) -> Path:
    """The folder of a model, whether `source` is that folder or its config.json."""
    return source.parent if source.is_file() else source


def has_tokenizer(source: Path) -> bool:
    """Whether a model's folder contains tokenizer files."""
    folder = find_tokenizer_folder(source)
    return any((folder / name).is_file() for name in (TOKENIZER, SENTENCEPIECE, TOKENIZER_CONFIG))


def list_pieces(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The ids of the pieces of text: without special tokens, sentinels and the bare mark of a space."""
    special = {*tokenizer.all_special_tokens, WORD_START}
    return {
        piece: number
        for piece, number in tokenizer.get_vocab().items()
        if piece not in special and not piece.startswith(SENTINEL)
    }


def list_sentinel_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of <extra_id_N>."""
    return sorted(number for piece, number in tokenizer.get_vocab().items() if piece.startswith(SENTINEL))


def refuse_other_vocabulary(
    tokenizer: PreTrainedTokenizerBase, name: str, source: Path, *, key: str | None = KEY
) -> None:
    """Raise ModelError if pieces of the model's own tokenizer have other ids in `tokenizer`, loaded from `name`.

    Pre-trained embeddings belong to the pieces that they were trained with. A tokenizer that only adds pieces is
    accepted, and any tokenizer if the model's folder has none to compare with.
    """
    if not has_tokenizer(source):
        return
    own = list_pieces(load_tokenizer(None, source, key=key))
    # Further pieces of the given tokenizer do not matter: the table grows for them.
    given = tokenizer.get_vocab()
    other = [piece for piece, number in own.items() if given.get(piece) != number]
    if not other:
        return
    first = min(other, key=own.__getitem__)
    here = next((repr(piece) for piece, number in given.items() if number == own[first]), "no piece")
    raise ModelError(
        f"{key}: {name}: is not the vocabulary of the pre-trained weights: {len(other):,} of {len(own):,} "
        f"pieces of {source}'s own tokenizer differ (id {own[first]} is {first!r} there, {here} here). Leave {key} out"
        f"{', or train from random weights with model.init: random' if key == KEY else ''}."
    )


def _refuse_lost_vocabulary(folder: Path, settings: JsonTable, key: str | None) -> None:
    """Raise ModelError for a folder without a tokenizer, or with a tokenizer config but without a vocabulary."""
    if any((folder / name).is_file() for name in (TOKENIZER, SENTENCEPIECE)) or _is_byte_level(settings):
        return
    for names in OTHER_VOCABULARIES:
        if all((folder / name).is_file() for name in names):
            return
    if not settings:
        for weights in sorted(folder.glob("*.safetensors")):  # a clone without its large files lacks the tokenizer too
            refuse_pointer(weights)
        advice = f"Give {key} (a folder, a hub name, or t5-nano)" if key else "Copy that of the model into the folder"
        raise ModelError(f"{folder}: has no tokenizer. {advice}.")
    raise ModelError(
        f"{folder}: has {TOKENIZER_CONFIG} but no vocabulary: {TOKENIZER} and {SENTENCEPIECE} are missing. Copy one of "
        f"them from the same model into the folder{f', or give {key}' if key else ''}."
    )


def _is_byte_level(settings: JsonTable) -> bool:
    return settings.get("tokenizer_class") in BYTE_CLASSES


def _load_from_folder(folder: Path, settings: JsonTable) -> PreTrainedTokenizerBase:
    """Load the tokenizer with the class that its files need: T5's for a unigram model, else the generic one.

    transformers' T5Tokenizer expects a unigram model in tokenizer.json and fails on others (BPE, WordPiece).
    AutoTokenizer identifies a spiece.model as T5's only with a tokenizer_config.json or config.json beside it.
    """
    from transformers import AutoTokenizer, ByT5Tokenizer, MyT5Tokenizer, PreTrainedTokenizerFast, T5Tokenizer

    pipeline, _ = _read_object(folder / TOKENIZER)
    kind = (pipeline.get("model") or {}).get("type")
    if _is_byte_level(settings):
        byte_level = MyT5Tokenizer if settings["tokenizer_class"] == "MyT5Tokenizer" else ByT5Tokenizer
        return byte_level.from_pretrained(folder)
    if kind not in (None, "Unigram"):
        # T5's end, pad and unknown token, if the vocabulary has them and the settings do not set them.
        added = {token.get("content") for token in pipeline.get("added_tokens") or ()}
        tokens: JsonTable = {key: text for key, text in SPECIAL.items() if key not in settings and text in added}
        return PreTrainedTokenizerFast.from_pretrained(folder, **tokens)
    if not settings:
        return T5Tokenizer.from_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert loaded.is_fast, type(loaded)
    return loaded


def _explain_failure(folder: Path, error: Exception, key: str | None) -> str:
    """Explain why the tokenizer did not load, with the remedy: another copy of a damaged file, else another format."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].strip()
    for name in (TOKENIZER, TOKENIZER_CONFIG):
        if (folder / name).is_file() and (problem := _read_object(folder / name)[1]):
            return f"{folder}: the tokenizer cannot be loaded: {name} is damaged: {problem}. Copy the file again."
    if (folder / TOKENIZER).is_file():
        advice = f"Give {key} another folder with" if key else "Copy into the folder"
        return (
            f"{folder}: the tokenizer cannot be loaded: {reason}. Its files are whole, but this version of "
            f"transformers cannot read them. {advice} a {TOKENIZER} or {SENTENCEPIECE} that it reads."
        )
    if problem := _find_sentencepiece_problem(folder / SENTENCEPIECE):
        return f"{folder}: the tokenizer cannot be loaded: {problem}"
    return (
        f"{folder}: the tokenizer cannot be loaded from {SENTENCEPIECE}: {reason}. Copy the model's {TOKENIZER} or "
        f"{TOKENIZER_CONFIG} beside it."
    )


def _find_sentencepiece_problem(path: Path) -> str:
    """Explain why spiece.model cannot be read, with the remedy; empty if sentencepiece reads it."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        return f"{SENTENCEPIECE} needs the package sentencepiece. Install it: pip install sentencepiece"
    try:
        SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError):
        return f"{SENTENCEPIECE} is damaged: sentencepiece cannot read it. Copy the file again."
    return ""


def _read_object(path: Path) -> tuple[JsonTable, str]:
    """Read a JSON object, and what is wrong with the file: {} if anything is (`_explain_failure` reports it)."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        return {}, str(error)
    if not isinstance(content, dict):
        return {}, f"it holds a {type(content).__name__}"
    return content, ""


@contextlib.contextmanager
def suppress_output() -> Iterator[None]:
    """Suppress transformers' progress bars and warnings inside the block; restore both on exit."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    had_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()
