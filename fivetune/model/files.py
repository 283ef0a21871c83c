"""The files of a model: find or download them, and check that they are complete.

In: a local folder, `t5-nano`, or a hub name. Out: a local folder whose weights are whole safetensors files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from fivetune.data.corpus import CHECKPOINT
from fivetune.errors import ModelError
from fivetune.model.download import fetch_snapshot
from fivetune.values import is_file_name

if TYPE_CHECKING:
    from torch import Tensor

    from fivetune.types import JsonTable

LFS_MARK = b"version https://git-lfs"
OTHER_WEIGHTS = (".h5", ".msgpack", ".ckpt", ".pt", ".pth", ".gguf", ".onnx")
CONVERT = (
    "FiveTune reads safetensors only, because a .bin file is a program that runs when it is opened. "
    "Use a revision with safetensors (model.revision: refs/pr/N), or convert a file that you trust once: "
    "transformers' from_pretrained(folder), then save_pretrained(folder)."
)


def find_folder(name: str, *, revision: str | None = None) -> Path:
    """Find the local folder of a model or tokenizer; a hub name is downloaded, or taken from the hub's cache.

    Raises ModelError if there is no such folder, FiveTuneEnvironmentError if the hub refuses or cannot be reached.
    """
    return find_local_folder(name) or fetch_snapshot(name, revision, hint=_suggest_name(Path(name)))


def find_local_folder(name: str) -> Path | None:
    """Find the local folder of a model; None for a hub name. Raises ModelError for any other name."""
    path = Path(name)
    if path.is_dir():
        return path
    if name == CHECKPOINT.name:
        return CHECKPOINT
    if path.is_file():
        raise ModelError(
            f"{name}: is a file. A model is a folder with config.json, weights and tokenizer: {path.parent}."
        )
    # Names that the hub does not have: it has org/name, or one part.
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.exists():
        raise ModelError(
            f"{name}: no such model folder.{_suggest_name(path)} Give a local folder, a hub name (org/name), or "
            "t5-nano."
        )
    return None


def _suggest_name(path: Path) -> str:
    """The hint "Did you mean ...?" with the nearest name: t5-nano, or a folder beside it."""
    beside = [str(folder) for folder in path.parent.glob("*/") if folder.is_dir()]
    close = get_close_matches(str(path), [CHECKPOINT.name, *beside], n=1, cutoff=0.7)
    return f" Did you mean {close[0]}?" if close else ""


def _refuse_adapter(folder: Path) -> None:
    """Raise ModelError for a folder of peft, which holds an adapter beside the weights of another model."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        return
    try:
        base = json.loads(path.read_bytes()).get("base_model_name_or_path")
    except (ValueError, AttributeError):
        base = None
    raise ModelError(
        f"{folder}: an adapter, not a model. Set model.adapter.path: {folder}, and its base in model.path: "
        f"{base or 'MODEL'}."
    )


def read_model_config(folder: Path) -> JsonTable:
    """Read config.json of a folder, or a config.json itself. Raises ModelError if it is missing or damaged."""
    path = folder if folder.is_file() else folder / "config.json"
    if not path.is_file():
        _refuse_adapter(folder)
        raise ModelError(f"{folder}: has no config.json. Give a folder that save_pretrained wrote.")
    refuse_pointer(path)
    try:
        config = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: not a JSON file: {error}. Copy the file again.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: holds a {type(config).__name__}, not settings. Copy the file again.")
    return config


def find_weight_files(folder: Path) -> list[Path]:
    """Find the safetensors files of a folder, and check that each is whole. Raises ModelError naming the file."""
    index = folder / "model.safetensors.index.json"
    names = _read_shard_names(index) if index.is_file() else ["model.safetensors"]
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{folder}: has no {file.name}. {_describe_other_weights(folder)}")
        refuse_pointer(file)
        _refuse_truncated(file)
    return files


def refuse_missing_layers(config: JsonTable, files: list[Path], where: Path) -> None:
    """Raise ModelError for a config.json of more layers than the files have tensors: building them could take hours."""
    num_tensors = sum(len(_read_header(path)[1]) for path in files)
    for table in (config, *config.values()):  # T5Gemma's stacks have settings of their own
        if not isinstance(table, dict):
            continue
        for name, value in table.items():
            if name.endswith("layers") and isinstance(value, int) and value > num_tensors:
                raise ModelError(
                    f"{where}: config.json has {name} {value:,}, the files hold {num_tensors} tensors. Use the "
                    "config.json that belongs to the weights."
                )


def read_tensor_shapes(files: list[Path]) -> dict[str, list[int]]:
    """Read the shape of every tensor of the files, by name."""
    shapes: dict[str, list[int]] = {}
    for path in files:
        for name, tensor in _read_header(path)[1].items():
            shapes[name] = tensor["shape"]
    return shapes


def _describe_other_weights(folder: Path) -> str:
    """What a folder has in place of safetensors, and what to do."""
    if pickles := sorted(path.name for path in folder.glob("*.bin")):
        return f"It has {', '.join(pickles)}. {CONVERT}"
    if others := sorted(path.name for path in folder.iterdir() if path.suffix in OTHER_WEIGHTS):
        return f"It has {', '.join(others)}; FiveTune reads safetensors only. Use a revision with safetensors."
    return "Copy the folder again."


def _read_shard_names(index: Path) -> list[str]:
    refuse_pointer(index)
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        if outside := [name for name in names if not is_file_name(name)]:
            raise ModelError(f"{index}: {outside[0]!r} is not the name of a file of this folder. Copy the file again.")
        return names
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: damaged: {error!r}. Copy the file again.") from None


def refuse_pointer(path: Path) -> None:
    """Raise ModelError if the file is a Git-LFS pointer instead of its content."""
    with path.open("rb") as file:
        if file.read(len(LFS_MARK)) == LFS_MARK:
            raise ModelError(f"{path}: is a Git-LFS pointer, not the file itself. Run `git lfs pull` in that folder.")


def _refuse_truncated(path: Path) -> None:
    """Raise ModelError unless the size is 8 bytes of header length, the header, and the data that it describes."""
    size = path.stat().st_size
    header_bytes, tensors = _read_header(path)
    try:
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    except (KeyError, TypeError):
        raise ModelError(f"{path}: damaged: its header cannot be read. Copy the file again.") from None
    if size != 8 + header_bytes + end:
        raise ModelError(f"{path}: truncated: {size} bytes of {8 + header_bytes + end}. Copy the file again.")


def _read_header(path: Path) -> tuple[int, JsonTable]:
    """Read the number of bytes of a header, and what it says of each tensor. Raises ModelError if it is damaged."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        # A damaged number may be larger than the memory.
        header = file.read(header_bytes) if header_bytes < path.stat().st_size else b""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        return header_bytes, tensors
    except (ValueError, TypeError, AttributeError):
        raise ModelError(f"{path}: damaged: its header cannot be read. Copy the file again.") from None


def iter_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the files with its name, one at a time."""
    from safetensors import safe_open

    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                yield name, file.get_tensor(name)
