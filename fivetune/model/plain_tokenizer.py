"""The tokenizer of a model folder by the library tokenizers alone: a server of an export needs no transformers.

In: a folder with tokenizer.json and tokenizer_config.json. Out: PlainTokenizer, with the members of a transformers
tokenizer that answers use.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from fivetune.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fivetune.types import JsonTable

FAMILIES = ("t5", "mt5", "umt5")  # whose tokenizers transformers uses as tokenizer.json has them
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class PlainTokenizer:
    """A fast tokenizer without transformers; its methods have the meaning of those of `PreTrainedTokenizerFast`.

    Args:
        backend: the tokenizer of the library.
        settings: tokenizer_config.json.
        name_or_path: folder, for messages.
    """

    is_fast = True

    def __init__(self, backend: Tokenizer, settings: JsonTable, name_or_path: str) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend_tokenizer = backend
        self.name_or_path = name_or_path
        added: dict[int, Any] = backend.get_added_tokens_decoder()
        self._added = {str(token): number for number, token in added.items()}
        special = {str(token): number for number, token in added.items() if token.special}
        named: dict[str, str | None] = {}
        for name in NAMED:
            given = settings.get(name)
            named[name] = str(given["content"]) if isinstance(given, dict) else given
        self.bos_token, self.eos_token, self.unk_token, self.sep_token = (named[name] for name in NAMED[:4])
        self.pad_token, self.cls_token, self.mask_token = (named[name] for name in NAMED[4:])
        self.eos_token_id = self._find_id(self.eos_token)
        self.pad_token_id = self._find_id(self.pad_token)
        self.unk_token_id = self._find_id(self.unk_token)
        self.all_special_tokens = list(special)
        self.all_special_ids = list(special.values())

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(
        self,
        texts: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        verbose: bool = True,
    ) -> dict[str, Any]:
        """Encode a text or several. `verbose` has no effect: nothing is printed."""
        if isinstance(texts, str):
            return {"input_ids": self.backend_tokenizer.encode(texts, add_special_tokens=add_special_tokens).ids}
        encoded = self.backend_tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        found: dict[str, Any] = {"input_ids": [one.ids for one in encoded]}
        if return_offsets_mapping:
            found["offset_mapping"] = [one.offsets for one in encoded]
        return found

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        return dict(self._added)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        number = self.backend_tokenizer.token_to_id(token)
        return self.unk_token_id if number is None else number

    def convert_ids_to_tokens(self, number: int) -> str | None:
        return self.backend_tokenizer.id_to_token(number)

    def _find_id(self, token: str | None) -> int | None:
        return None if token is None else self.backend_tokenizer.token_to_id(token)


def load_plain_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model folder; None if it needs transformers. Raises ModelError if it is damaged."""
    path = folder / "tokenizer.json"
    settings = _read_object(folder / "tokenizer_config.json")
    if not path.is_file() or _read_object(folder / "config.json").get("model_type") not in FAMILIES:
        return None
    if settings.get("clean_up_tokenization_spaces"):
        return None
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other kind
        raise ModelError(f"{path}: {error}. Export the run again.") from None
    return PlainTokenizer(backend, settings, str(folder))


def read_plain_model(folder: Path) -> Any:
    """Read config.json of a model folder as what stands for the model where an engine holds the weights."""
    return SimpleNamespace(config=SimpleNamespace(**_read_object(folder / "config.json")))


def _read_object(path: Path) -> JsonTable:
    try:
        return cast("JsonTable", json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}
