"""Adapters on a model: attach one, merge it into the weights, save and read it in peft's format.

In: a model and the options of an adapter. Out: the same model with frozen weights and the adapter's; the weights of a
plain model; a folder that `peft.PeftModel.from_pretrained` loads on the base. peft puts low-rank pairs and factors
into the model; virtual tokens are put there by `virtual_tokens.py`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fivetune.distributed.sharding import iter_held
from fivetune.errors import ConfigError, ModelError
from fivetune.installation import require_package
from fivetune.model import virtual_tokens
from fivetune.model.adapters import has_virtual_tokens
from fivetune.model.freeze import select_names
from fivetune.model.save import write_folder
from fivetune.model.saved_adapter import (
    BASE,
    CONFIG,
    SPAN_HEAD,
    BaseModel,
    list_saved_targets,
    read_base,
    refuse_other_base,
    refuse_unsupported,
)
from fivetune.rundir import write_json

if TYPE_CHECKING:
    from peft import PeftConfig

    from fivetune.model.modules import T5Model
    from fivetune.types import Adapter

ATTACHED = "attached_adapter"  # attribute of a model
FOLDER, WEIGHTS = "adapter", "adapter_model.safetensors"
UNFIT = "the adapter was trained on another model, or by an option of peft that is not supported"
PREFIX = "base_model.model."  # of the names in peft's files
IN_BLOCK = re.compile(r"\b(?:block|layers)\.\d+\.")
FOREIGN_PARTS = ("vision_tower", "multi_modal_projector")


@dataclass(frozen=True, slots=True)
class AttachedAdapter:
    """What `attach_adapter` has put into a model.

    Args:
        config: configuration of peft.
        names: names of the weights that the base does not have; checkpoints and adapter/ hold these.
        base: name and checksum of the model that it was attached to; None where the adapter is only applied.
        note: what the base has become, for the user; "" if it is unchanged.
    """

    config: PeftConfig
    names: frozenset[str]
    base: BaseModel | None = None
    note: str = ""

    @property
    def is_virtual(self) -> bool:
        """Whether it consists of virtual tokens, which cannot be merged into weights."""
        return self.config.is_prompt_learning


def find_adapter(model: nn.Module) -> AttachedAdapter | None:
    """The adapter of a model; None if it has none."""
    return vars(model).get(ATTACHED)


def attach_adapter(model: T5Model, options: Adapter, *, base: str, device: str = "cpu") -> AttachedAdapter:
    """Freeze all weights of a model and add those of an adapter, new ones by torch's global generator.

    Args:
        base: name of the model, for adapter_config.json.
        device: device of the run, on which a base in 4 bits is computed.

    Raises FiveTuneEnvironmentError if peft or bitsandbytes is not installed, ConfigError for targets that match
    nothing, a family without virtual tokens, or an adapter of another base.
    """
    import_peft()
    saved_in = options.saved_in
    if saved_in and not (Path(saved_in) / CONFIG).is_file():
        raise ConfigError(
            f"model.adapter.path: {saved_in} holds no {CONFIG}. Give adapter/ of a run, or one of peft's."
        )
    targets: list[str] = []
    # A saved adapter names its own matrices, virtual tokens change none.
    if not saved_in and hasattr(options, "target_modules"):
        targets = list_targets(model, options)
    config = options.build_config(shorten_names(model, targets))
    bits = options.base_bits
    if saved_in:
        config.inference_mode = False  # peft saves True, by which it would freeze the adapter
        refuse_unsupported(config, saved_in, model)
        refuse_other_base(config, saved_in, base)
        targets = list_saved_targets(model, config, saved_in, _list_matrices(model))
        if not config.is_prompt_learning:  # a span head is in the model already, and peft would wrap it
            config.modules_to_save = None  # type: ignore[attr-defined]
        before = read_base(Path(saved_in))
        if before:
            bits = before.bits
    else:
        refuse_high_rank(model, targets, getattr(options, "r", 1))
    config.base_model_name_or_path = base
    # Before anything is put into the model: the checksum belongs to the base alone.
    identity = BaseModel(base, compute_base_checksum(model), bits)
    if hasattr(model, SPAN_HEAD) and config.is_prompt_learning:
        raise ConfigError(
            f"model.adapter.name {options.plugin_name()}: task.head extractive counts positions of the input, which "
            "virtual tokens shift. Use lora, or task.head: generate."
        )
    model.requires_grad_(False)
    note = convert_to_nf4(model, targets, device) if bits == 4 else ""
    put = virtual_tokens.attach_tokens if config.is_prompt_learning else _insert_modules
    names = put(model, config)
    if hasattr(model, SPAN_HEAD):  # it is new, so it belongs to the adapter
        model.qa_outputs.requires_grad_(True)
        config.modules_to_save = [SPAN_HEAD]  # type: ignore[attr-defined]  # of all that are no prompts
        for name, _ in model.qa_outputs.named_parameters():
            names.add(f"{SPAN_HEAD}.{name}")
    attached = AttachedAdapter(config, frozenset(names), identity, note)
    vars(model)[ATTACHED] = attached
    if saved_in:
        load_adapter_weights(model, Path(saved_in), identity)
    return attached


def compute_base_checksum(model: nn.Module) -> str:
    """Compute the checksum of a model's weights before an adapter is attached; about 1 GB/s.

    A span head is left out: a new one is random, and belongs to the adapter. Values are hashed, not files, so that
    copies in other files or dtypes without loss are the same base.
    """
    digest = blake2b(digest_size=8)
    for name, weight in model.named_parameters():
        if not name.startswith(f"{SPAN_HEAD}."):
            digest.update(f"{name} {tuple(weight.shape)}".encode())
            digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def _suppress_log() -> Iterator[None]:
    """Suppress what bitsandbytes reports on a machine without a GPU."""
    logger = logging.getLogger("bitsandbytes")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def import_peft() -> None:
    """Import peft, which imports bitsandbytes if it is installed."""
    require_package("model.adapter", "peft", "adapters")
    with _suppress_log():
        import peft  # noqa: F401


def list_targets(model: T5Model, options: Adapter) -> list[str]:
    """List the names of the matrices that an adapter changes. Raises ConfigError for a pattern that matches nothing."""
    names = list(_list_matrices(model))
    if not options.target_names:
        return [name for name in names if not options.usual or name.rpartition(".")[2] in options.usual]
    found: set[str] = set()
    for pattern in options.target_names:
        found.update(select_names(names, pattern, setting="model.adapter.target_modules", what="matrix"))
    return [name for name in names if name in found]


def refuse_high_rank(model: nn.Module, targets: Iterable[str], rank: int) -> None:
    """Raise ConfigError for a rank that a product of two matrices of these sizes cannot have."""
    for name, linear in _list_matrices(model).items():
        size = min(linear.in_features, linear.out_features)
        if rank > size and name in targets:
            raise ConfigError(
                f"model.adapter.r: {rank} exceeds the highest rank of {name} ({linear.out_features} x "
                f"{linear.in_features}), {size}. Lower it, or leave such matrices out by target_modules."
            )


def _list_matrices(model: nn.Module) -> dict[str, nn.Linear]:
    """The matrices of attention and feed-forward layers by name."""
    found: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        is_foreign = any(part in name for part in FOREIGN_PARTS)
        if isinstance(module, nn.Linear) and IN_BLOCK.search(name) and not is_foreign:
            found[name] = module
    return found


def shorten_names(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Shorten names of matrices to their last parts, as in peft's own files, if these name no other matrix."""
    short = sorted({name.rpartition(".")[2] for name in targets})
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in short and name not in targets:
            return sorted(targets)
    return short


def _insert_modules(model: T5Model, config: PeftConfig) -> set[str]:
    """Put peft's modules in the place of matrices; returns the names of the new weights."""
    from peft import inject_adapter_in_model

    before = {name for name, _ in model.named_parameters()}
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:  # of an adapter that was saved for another architecture
        raise ConfigError(f"model.adapter: it does not fit the model: {str(error).splitlines()[0]}") from None
    weights = dict(model.named_parameters())
    names = {name for name in weights if name.replace(".base_layer.", ".") not in before}
    for name, weight in weights.items():
        weight.requires_grad_(name in names)
    return names


def convert_to_nf4(model: nn.Module, targets: Sequence[str], device: str) -> str:
    """Replace matrices by NF4 ones of bitsandbytes on a device; returns how far they are from the given ones."""
    require_package("model.adapter with a base in 4 bits (qlora)", "bitsandbytes", "adapters")
    with _suppress_log():
        library: Any = import_module("bitsandbytes.nn")  # its types are not those of torch
    squares = errors = 0.0
    for name in targets:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        # Stored as fp32 words: T5's feed-forward layers convert their input to the dtype of the weights of wo.
        kind: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True, "quant_storage": torch.float32}
        small = library.Linear4bit(
            linear.in_features, linear.out_features, linear.bias is not None, torch.float32, device="meta", **kind
        )
        exact = linear.weight.detach()
        # The move to the device converts the values.
        small.weight = library.Params4bit(exact.clone(), requires_grad=False, module=small, **kind).to(device)
        small.bias = linear.bias
        small.support_avx512bf16_for_cpu = False  # it would convert the weights in the first evaluation, for good
        squares += exact.square().sum().item()
        errors += (read_matrix(small).cpu() - exact).square().sum().item()
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, small.train(linear.training))
    vars(model)["is_loaded_in_4bit"] = True  # asked for by peft
    share = 100 * (errors / squares) ** 0.5
    return f"{len(targets)} matrices in 4 bits (NF4), {share:.2g} % (root mean square) from those of model.path"


def read_matrix(linear: nn.Module) -> Tensor:
    """The weights of a matrix in fp32, converted back if it is kept in 4 bits."""
    weight = linear.weight
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.detach()  # type: ignore[operator]
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state).float()  # type: ignore[union-attr]


@torch.no_grad()
def merge_linear(layer: Any) -> nn.Linear:
    """The linear module with which one of peft's could be replaced. IA3 scales a bias too."""
    base = layer.get_base_layer()
    plain = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
    plain.weight = nn.Parameter(read_matrix(base).clone(), requires_grad=False)
    if base.bias is not None:
        plain.bias = nn.Parameter(base.bias.detach().clone(), requires_grad=False)
    if hasattr(layer, "lora_A") and not layer.lora_magnitude_vector:
        plain.weight.add_(layer.get_delta_weight("default").to(plain.weight.dtype))
        return plain
    # Other methods merge into whatever the base is: for this moment, the copy.
    layer.base_layer = plain
    try:
        layer.merge()
    finally:
        layer.base_layer = base
        layer.merged_adapters.clear()
    return plain


def iter_merged(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of the weights of a plain model, with the adapter's part in them; virtual tokens left out.

    Args:
        weights: name and value of every weight of the model.
    """
    attached = find_adapter(model)
    if attached is None:
        yield from weights
        return
    # peft's modules by the names of the matrices in whose place they are.
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
    for name, value in weights:
        if name.startswith(f"{SPAN_HEAD}."):
            yield name, value
        elif name in attached.names:
            continue
        elif ".base_layer." in name:
            owner, _, last = name.partition(".base_layer.")
            yield f"{owner}.{last}", getattr(merge_linear(layers[owner]), last)
        else:
            yield name.replace(virtual_tokens.WRAPPED, "embed_tokens."), value


def select_own_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the weights that a checkpoint needs: all, or those of the adapter, whose base is that of model.path."""
    attached = find_adapter(model)
    for name, weight in iter_held(model):
        if attached is None or name in attached.names:
            yield name, weight


def save_adapter(model: nn.Module, folder: Path, *, run_id: str | None = None) -> None:
    """Write adapter_config.json and adapter_model.safetensors as peft does, and checksums of all files.

    Args:
        run_id: id of the run that trained it, for manifest.json.

    Raises FiveTuneEnvironmentError if a write fails.
    """
    attached = find_adapter(model)
    assert attached is not None
    with write_folder(folder, "adapter", run_id=run_id) as staging:
        weights: dict[str, Tensor] = {}
        for name, weight in select_own_weights(model):
            weights[_name_in_file(name)] = weight.detach().cpu().contiguous()
        save_file(weights, staging / WEIGHTS, metadata={"format": "pt"})
        if attached.base:
            write_json(staging / BASE, asdict(attached.base))
        config = replace(attached.config, inference_mode=True)
        config.save_pretrained(str(staging))
        table = json.loads((staging / CONFIG).read_bytes())
        for name in table.keys() & {"target_modules", "feedforward_modules"}:  # sets, in the order of a hash
            table[name] = sorted(table[name] or ())
        (staging / CONFIG).write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _name_in_file(name: str) -> str:
    """peft's name of a weight in its files, without the name of the adapter."""
    if name.rpartition(".")[2] == virtual_tokens.PARAMETER:
        return "prompt_embeddings"
    name = name.replace("lora_magnitude_vector.default.weight", "lora_magnitude_vector")
    return PREFIX + re.sub(r"\.default\b", "", name)


@torch.no_grad()
def load_adapter_weights(model: nn.Module, folder: Path, base: BaseModel) -> None:
    """Copy the weights of a saved adapter into the one of the model.

    Raises ConfigError if they do not fit, or if they were trained on other weights of the base.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise ConfigError(
            f"model.adapter.path: {folder} holds no {WEIGHTS}. Save the adapter again, by peft 0.6 or later."
        )
    found = load_file(path)
    # A span head has replaced lm_head, which the checksum of an adapter for generation includes.
    has_own_head = not hasattr(model, SPAN_HEAD) or any(f".{SPAN_HEAD}." in name for name in found)
    trained_on = read_base(folder)
    if has_own_head and trained_on and trained_on.checksum != base.checksum:
        raise ConfigError(
            f"{folder}: was trained on a base with weights {trained_on.checksum}, and {base.name} has weights "
            f"{base.checksum}: it is another model, or its files have changed. Restore the base that the adapter was "
            "trained on."
        )
    has_prompt = virtual_tokens.find_prompt(model) is not None
    # What is left in `found` afterwards has no place in the model.
    for name, weight in select_own_weights(model):
        value = found.pop(_name_in_file(name), None)
        if has_prompt and value is not None and len(value) == 2 * len(weight):
            value = value[: len(weight)]  # peft's default has as many for the decoder, which its forward never reads
        if value is None and name.startswith(SPAN_HEAD):
            continue  # of an adapter for generation: the head stays new
        if value is None or value.shape != weight.shape:
            shape = "is not there" if value is None else f"has shape {list(value.shape)}, not {list(weight.shape)}"
            raise ConfigError(f"{path}: {_name_in_file(name)} {shape}: {UNFIT}.")
        weight.copy_(value)
    if found:
        raise ConfigError(f"{path}: the model has no place for {min(found)}: {UNFIT}.")


def refuse_lost_tokens(folder: Path, key: str, advice: str) -> None:
    """Raise ModelError for model/ of a run that trained virtual tokens, which is the unchanged base without them.

    Args:
        key: setting that names the model.
    """
    saved = folder.parent / FOLDER
    if folder.name == "model" and has_virtual_tokens(saved):
        raise ModelError(
            f"{key}: {folder} is the unchanged base of a run that trained virtual tokens, which are in {saved}. "
            f"{advice}"
        )


def attach_exported(model: T5Model, folder: Path) -> None:
    """Put the virtual tokens of adapter/ into the model that was loaded from a run; no-op without them.

    Args:
        folder: model/ of a run with its neighbour adapter/, or a published run, which holds adapter/.
    """
    saved = folder / FOLDER
    if not saved.is_dir():
        saved = folder.with_name(FOLDER)
    if not has_virtual_tokens(saved):  # a merged adapter needs no peft
        return
    import_peft()
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(saved))
    base = BaseModel(str(folder), compute_base_checksum(model))
    names = virtual_tokens.attach_tokens(model, config)
    vars(model)[ATTACHED] = AttachedAdapter(config, frozenset(names))
    load_adapter_weights(model, saved, base)
