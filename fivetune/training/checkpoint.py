"""Checkpoints: the whole state of a run at a step boundary, whole on disk or not at all.

    checkpoints/<step>/  model.safetensors  state.pt (optimizer, scaler, random states)  state.json  manifest.json

Written to a staging folder, every file fsynced, the manifest (sizes, CRC-32) last, then renamed; only then are
older ones removed. Reading takes the newest whole one; a damaged one is set aside by name, never used.
Several processes write what one would: weights and optimizer state are whole, so that any number of them can go on.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fivetune.errors import RunDirError
from fivetune.model.save import replace_folder
from fivetune.rundir import fsync_folder, write_json
from fivetune.sharding import placed_like, whole
from fivetune.strategies import ALONE, World

FORMAT_VERSION = 1


@dataclass(slots=True)
class Progression:
    """How far a run is: what state.json holds.

    Args:
        step: optimizer steps done; with the seed it is also the position in the data.
        best: {"step", "metric", "score"} of the best evaluation so far.
        seconds: wall-clock seconds by phase, over all resumes.
    """

    step: int = 0
    best: dict[str, Any] | None = None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a checkpoint holds besides the Progression: weights by name, and the content of state.pt."""

    weights: dict[str, Tensor]
    state: dict[str, Any]


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, world: World = ALONE) -> Snapshot:
    """The state as it is now, on the host. All processes call it; it is complete in the first one."""

    def taken(tensor: Tensor) -> Tensor:
        full = whole(tensor.detach())
        return full.cpu().contiguous() if world.is_first else full.new_empty(0)

    states = world.gather(random_states())
    return Snapshot({name: taken(parameter) for name, parameter in model.named_parameters()}, {
        "optimizer": _mapped(optimizer.state_dict(), taken),
        "scaler": scaler.state_dict(),
        "random": states[0],
        "random_of_others": states[1:],
    })  # fmt: skip


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A tree of dicts and lists with its tensors changed."""
    if isinstance(tree, dict):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_mapped(value, change) for value in tree]
    return change(tree) if isinstance(tree, Tensor) else tree


def write(folder: Path, taken: Snapshot, progression: Progression) -> Path:
    """Write checkpoints/<step>. Raises RunDirError when the disk does not take it; nothing half-written stays."""
    target = folder / str(progression.step)
    staging = folder / f".staging-{progression.step}"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        save_file(taken.weights, staging / "model.safetensors")
        torch.save(taken.state, staging / "state.pt")
        write_json(staging / "state.json", asdict(progression))
        _seal(staging)
        replace_folder(staging, target)
    except (OSError, RuntimeError, SafetensorError, RunDirError) as error:
        raise RunDirError(
            f"{target}: the checkpoint cannot be written: {_first_line(error)}. "
            "Free disk space; earlier checkpoints are whole."
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def newest(folder: Path, *, report: Callable[[str], Any]) -> Path | None:
    """The newest whole checkpoint; damaged ones are renamed to <step>.damaged and reported."""
    for path in sorted(folder.glob("[0-9]*"), key=_step_of, reverse=True):
        if not path.name.isdigit():
            continue
        reason = damage(path)
        if reason is None:
            return path
        aside = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        report(f"{path}: {reason}. Set aside as {aside.name}; going back to the checkpoint before it.")
    return None


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None if it is whole."""
    manifest = path / "manifest.json"
    try:
        listed = json.loads(manifest.read_text())
        if listed["format_version"] > FORMAT_VERSION:
            return f"written in format {listed['format_version']}, this version reads up to {FORMAT_VERSION}"
        for name, facts in listed["files"].items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != facts["size"] or _crc32(file) != facts["crc32"]:
                return f"{name} is damaged (its checksum differs)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json cannot be read ({_first_line(error)})"
    return None


def load_weights(path: Path, model: nn.Module) -> None:
    """Copy the weights of a checkpoint into the model."""
    weights = load_file(path / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(placed_like(weights[name], parameter))


def restore(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, world: World = ALONE
) -> Progression:
    """Bring everything back to where it was. Raises RunDirError if the checkpoint is of another model.

    A process that the run did not have when it was saved goes on with random numbers of its own.
    """
    try:
        load_weights(path, model)
        state = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
        _load_optimizer(optimizer, state["optimizer"])
    except (KeyError, IndexError, ValueError, RuntimeError) as error:
        raise RunDirError(f"{path}: is of another model or optimizer: {_first_line(error)}. Start a new run.") from None
    scaler.load_state_dict(state["scaler"])
    states = [state["random"], *state.get("random_of_others", ())]
    if world.rank < len(states):
        set_random_states(states[world.rank])
    facts = json.loads((path / "state.json").read_text())
    return Progression(**{name: facts[name] for name in Progression.__slots__ if name in facts})


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a whole state, of which each process keeps the part that belongs to its part of the weights."""
    if getattr(optimizer, "keeps_whole_state", False):
        optimizer.load_state_dict(saved)
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    placed = {
        number: _mapped(state, partial(placed_like, other=parameters[number]))
        for number, state in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": placed})


def rotate(folder: Path, *, keep: int, best_step: int | None) -> None:
    """Remove old checkpoints but the newest `keep` and the best, and what a killed process left half-written."""
    for leftover in (*folder.glob(".staging-*"), *folder.glob(".*.old")):
        shutil.rmtree(leftover, ignore_errors=True)
    steps = sorted(_step_of(p) for p in folder.glob("[0-9]*") if p.name.isdigit())
    for step in steps[:-keep]:
        if step != best_step:
            shutil.rmtree(folder / str(step))


def link_best(run: Path, step: int) -> None:
    """Point `best` at a checkpoint."""
    link = run / f".best.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(Path("checkpoints") / str(step), target_is_directory=True)
    link.replace(run / "best")


def random_states() -> dict[str, Any]:
    """States of all random generators, in types that torch loads with weights_only."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    if states.get("mps") is not None:
        torch.mps.set_rng_state(states["mps"])


def _seal(staging: Path) -> None:
    """Make every file durable, then write the manifest."""
    files = {}
    for path in sorted(staging.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = {"size": path.stat().st_size, "crc32": _crc32(path)}
    write_json(staging / "manifest.json", {"format_version": FORMAT_VERSION, "files": files})
    fsync_folder(staging)


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _step_of(path: Path) -> int:
    return int(path.name) if path.name.isdigit() else -1


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
