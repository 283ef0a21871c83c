"""Save a model into a folder that `from_pretrained` loads, in this and in older versions of transformers.

In: a model, its tokenizer, generation settings, a model card. Out: the folder, written under another name and then
renamed, so that it exists whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import save_file

from fivetune.errors import FiveTuneEnvironmentError, RunDirError
from fivetune.model.modules import iter_saved_buffers
from fivetune.model.tokenizer import save_tokenizer, suppress_output
from fivetune.rundir import fsync_folder
from fivetune.rundir.checksums import write_checksums
from fivetune.rundir.files import advise_on_space

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from fivetune.model.modules import T5Model
    from fivetune.types import JsonTable


MAX_FILE_BYTES = 5 * 10**9  # of a weights file; larger models are written to several


def save_model(
    model: T5Model,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    generation: JsonTable | None = None,
    card: str = "",
    run_id: str | None = None,
) -> None:
    """Write config, weights (safetensors), tokenizer, generation_config.json, model card and checksums of all of them.

    Args:
        weights: name and value of every weight, tied ones once, if the model holds shards of them.
        generation: entries of generation_config.json, with which transformers' `generate` decodes as FiveTune does
            (`Decoding.as_generation_config`).
        run_id: id of the run that exports the model, for manifest.json.

    Raises FiveTuneEnvironmentError if a write fails.
    """
    with write_folder(folder, "model", run_id=run_id) as staging:
        with suppress_output():
            _write_settings(model, generation or {}, staging)
            weights = model.named_parameters() if weights is None else weights
            write_weights(chain(weights, iter_saved_buffers(model)), staging)
        save_tokenizer(tokenizer, staging)
        if card:
            (staging / "README.md").write_text(card, encoding="utf-8")


@contextmanager
def write_folder(folder: Path, what: str, *, run_id: str | None) -> Generator[Path]:
    """Yield an empty folder that gets checksums and its final name when the block ends, and is removed if it raises.

    Args:
        what: the noun for its content, for the message.
        run_id: id of the run that it belongs to, for manifest.json.

    Raises FiveTuneEnvironmentError if a write fails, also inside the block.
    """
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        yield staging
        write_checksums(staging, run_id=run_id)
        apply_umask(staging)
        replace_folder(staging, folder)
    except (OSError, RunDirError, SafetensorError) as error:
        reason = str(error).rstrip(".")
        advice = ""
        if not isinstance(error, RunDirError):  # which has its own advice
            advice = f" {advise_on_space(folder.parent)}"
        raise FiveTuneEnvironmentError(f"{folder}: the {what} cannot be written: {reason}.{advice}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_settings(model: T5Model, generation: JsonTable, folder: Path) -> None:
    """Write config.json, with the name of transformers' class, and for a model that generates generation_config.json:
    its start, end and pad ids, and the run's decoding options.
    """
    from transformers import GenerationConfig

    # FSDP2 gives a model a class of its own, derived from transformers' class.
    kinds = (kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))
    model.config.architectures = [next(kinds)]
    model.config.save_pretrained(folder)
    if not hasattr(model, "lm_head"):  # a span head is never tied
        return
    # transformers 5 always writes that the head is tied.
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    tied = model.get_output_embeddings().weight is model.get_decoder().get_input_embeddings().weight
    config["tie_word_embeddings"] = tied
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    ids = model.generation_config
    # A new one: `update` drops entries that this version of transformers does not know.
    GenerationConfig(
        decoder_start_token_id=ids.decoder_start_token_id,
        eos_token_id=ids.eos_token_id,
        pad_token_id=ids.pad_token_id,
        **generation,
    ).save_pretrained(folder)


def write_weights(weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write model.safetensors; beyond MAX_FILE_BYTES several files and an index, with one file in memory at a time."""
    held: dict[str, Tensor] = {}
    names: list[list[str]] = []  # of the weights in each file
    total = size = 0

    def write_file() -> None:
        save_file(held, folder / f"part-{len(names)}.safetensors", metadata={"format": "pt"})
        names.append(list(held))
        held.clear()

    for name, weight in weights:
        num_bytes = weight.numel() * weight.element_size()
        if held and size + num_bytes > MAX_FILE_BYTES:
            write_file()
            size = 0
        held[name] = weight.detach().cpu().contiguous()
        size += num_bytes
        total += num_bytes
    write_file()
    # Only now the number of files is known, which is in their final names.
    if len(names) == 1:
        (folder / "part-0.safetensors").rename(folder / "model.safetensors")
        return
    file_of: dict[str, str] = {}
    for number, own in enumerate(names):
        final = f"model-{number + 1:05}-of-{len(names):05}.safetensors"
        (folder / f"part-{number}.safetensors").rename(folder / final)
        file_of |= dict.fromkeys(own, final)
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def apply_umask(folder: Path) -> None:
    """Set the mode of every file in a folder by the umask, because safetensors creates its files with mode 0600."""
    probe = folder / ".mode"
    probe.touch(0o666)
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for file in folder.iterdir():
        file.chmod(mode)


def replace_folder(staging: Path, folder: Path) -> None:
    """Rename a finished folder to its final name; the folder that it replaces is removed only afterwards."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    staging.rename(folder)
    fsync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
