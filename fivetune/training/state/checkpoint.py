"""Checkpoints: the complete state of a run at a step boundary, written atomically.

    checkpoints/<step>/  model.safetensors  state.pt (optimizer, scaler, random states)  state.json  manifest.json
    of a sharded model:  __<rank>_0.distcp  .metadata  state.pt (without tensors of the optimizer)  and the same two

Where averages are evaluated (train.ema, schedule_free), the weights of a checkpoint are averages, and it has the
trained weights too.

A checkpoint is written to a staging folder, every file fsynced, the manifest (sizes, CRC-32) last, then renamed; only
then are older ones removed. Reading takes the newest whole checkpoint; a damaged one is renamed and never used.
state.json also records the owner of the checkpoint: the run's id, its settings and its data. Weights and optimizer
state are stored by the names of weights, so that any number of processes under any strategy can resume from both forms.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fivetune.distributed.sharding import get_local, iter_held, release_gathered, shard_like
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.errors import RunDirError
from fivetune.model.adapter import select_own_weights
from fivetune.model.save import apply_umask, replace_folder
from fivetune.rundir import write_json
from fivetune.rundir.checksums import Checksum, compute_checksum, find_damage, write_checksums
from fivetune.rundir.files import advise_on_space
from fivetune.rundir.parse import parse_record
from fivetune.rundir.records import BestEval
from fivetune.training.averaging import Averages
from fivetune.training.state.snapshot import ShardedSnapshot, Snapshot, load_optimizer, map_tensors, set_random_states
from fivetune.types import JsonTable, TorchState

WEIGHTS = "model.safetensors"
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError, RunDirError)  # of a disk that refuses a write


@dataclass(slots=True)
class TrainingState:
    """Position of a run, what state.json stores; `Progress` of fivetune/rundir is its display.

    Args:
        step: optimizer steps done; with the seed it is also the position in the data.
        best: the best evaluation so far; None before the first one.
        runners_up: the next best ones that checkpoint.average_best needs, best first.
        improved: the evaluation that train.early_stopping counts from; its score may be another one.
        num_evals_without_improvement: number of evaluations since then.
        seconds: wall-clock seconds by phase, over all resumes.
    """

    step: int = 0
    best: BestEval | None = None
    num_evals_without_improvement: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    improved: BestEval | None = None
    runners_up: list[BestEval] = field(default_factory=list[BestEval])

    @property
    def kept_steps(self) -> frozenset[int]:
        """Steps of the best evaluations, whose checkpoints are kept."""
        return frozenset(one.step for one in (self.best, *self.runners_up) if one)


@dataclass(frozen=True, slots=True)
class CheckpointOwner:
    """Identity of the run that a checkpoint belongs to; a run resumes only from its own checkpoints.

    Args:
        run_id: id of the run directory, generated when the run is created.
        settings: the settings that a resume must not change, by dotted name.
        data: fingerprint of the training examples.
        eval_data: fingerprint of the evaluation set; eval_settings: the settings that change its scores, by dotted
            name. A resume may change both.
        forward: the fields of the run's Forward.
        batch_size: examples per forward pass when the checkpoint was written.
        base: checksum of the weights that an adapter was attached to; "" without an adapter.
    """

    run_id: str = ""
    settings: JsonTable = field(default_factory=dict)
    data: str = ""
    forward: JsonTable = field(default_factory=dict)
    batch_size: int = 0
    eval_data: str = ""
    eval_settings: JsonTable = field(default_factory=dict)
    base: str = ""

    @property
    def eval_basis(self) -> str:
        """Hash of evaluation data and settings, for EvalRecord.basis. The size of a subset has its own field there."""
        settings = {key: value for key, value in self.eval_settings.items() if key != "eval.max_examples"}
        content = json.dumps([self.eval_data, settings], sort_keys=True)
        return blake2b(content.encode(), digest_size=6).hexdigest()


NO_OWNER = CheckpointOwner()


def write_checkpoint(folder: Path, taken: Snapshot, position: TrainingState, owner: CheckpointOwner = NO_OWNER) -> Path:
    """Write checkpoints/<step>; returns its path. Raises RunDirError if a write fails; no partial checkpoint stays."""
    target = folder / str(position.step)
    staging = folder / f".staging-{position.step}"
    try:
        _write_facts(staging, taken.state, position, owner)
        save_file(taken.weights, staging / WEIGHTS)
        _finish_folder(staging, target)
    except WRITE_ERRORS as error:
        raise _build_write_error(target, error, _count_bytes([taken.weights, taken.state])) from None
    finally:
        with suppress(OSError):
            _remove(staging)
    return target


def write_shards(
    folder: Path, taken: ShardedSnapshot, position: TrainingState, owner: CheckpointOwner, world: World
) -> Path:
    """Write checkpoints/<step> of a sharded model; returns its path. Collective: all ranks call it.

    Each rank writes what it holds, and rank 0 renames the folder when all have finished. If a rank fails, all raise
    its error as a RunDirError with the same text; no partial checkpoint stays.
    """
    from fivetune.distributed.shards import write_tensors

    def write_facts() -> None:
        if world.is_first:
            _write_facts(staging, taken.state, position, owner)

    def write_own() -> dict[str, Checksum]:
        written = write_tensors(staging, taken.tensors, world)
        return {path.name: compute_checksum(path) for path in written}

    def finish() -> None:
        if world.is_first:
            _finish_folder(staging, target, checksums)

    target = folder / str(position.step)
    staging = folder / f".staging-{position.step}"
    checksums: dict[str, Checksum] = {}
    # Each stage runs on all ranks before the next begins, and an error of one rank stops all of them.
    try:
        world.run_on_all(write_facts)
        # Each rank reads back its own files alone: rank 0 would take as many times longer.
        for own in world.run_on_all(write_own):
            checksums |= own
        world.run_on_all(finish)
    except WRITE_ERRORS as error:
        own_bytes = _count_bytes([get_local(tensor) for tensor in taken.tensors.values()])
        needed = sum(world.gather(own_bytes))
        raise world.broadcast_object(_build_write_error(target, error, needed)) from None
    finally:
        if world.is_first:
            with suppress(OSError):
                _remove(staging)
    return target


def _write_facts(staging: Path, state: TorchState, position: TrainingState, owner: CheckpointOwner) -> None:
    """Write state.pt and state.json into an empty staging folder."""
    _remove(staging)
    staging.mkdir(parents=True)
    torch.save(state, staging / "state.pt")
    # With the owner, so that a checkpoint of another run in this folder is recognised.
    write_json(staging / "state.json", {**asdict(position), "owner": asdict(owner)})


def _finish_folder(staging: Path, target: Path, checksums: dict[str, Checksum] | None = None) -> None:
    write_checksums(staging, known=checksums)
    apply_umask(staging)
    replace_folder(staging, target)


def _build_write_error(target: Path, error: Exception, num_bytes: int) -> RunDirError:
    folder = target.parent
    kept = "Earlier checkpoints are whole." if list_steps(folder) else "There is no earlier checkpoint."
    return RunDirError(
        f"{target}: the checkpoint cannot be written: {_get_first_line(error).rstrip('.')}. "
        f"{advise_on_space(folder, num_bytes)} {kept}"
    )


def _count_bytes(tree: object) -> int:
    tensors: list[Tensor] = []
    map_tensors(tree, tensors.append)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def list_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, in numeric order: 7 comes before 14."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return []
    return sorted(int(name) for name in names if re.fullmatch(r"[0-9]{1,18}", name, re.ASCII))


def restore_replaced_checkpoints(folder: Path) -> None:
    """Rename `.N.old` back to N where N is missing: the process was killed between the renames of `replace_folder`.

    Raises RunDirError if the system refuses.
    """
    for old in folder.glob(".*.old"):
        target = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        try:
            if not target.exists():
                old.rename(target)
        except OSError as error:
            raise RunDirError(f"{old}: cannot be renamed to {target.name}: {error.strerror}. Rename it.") from None


def find_newest_checkpoint(folder: Path, *, on_damage: Callable[[str], object]) -> Path | None:
    """Find the newest whole checkpoint; damaged ones are renamed to <step>.damaged and reported to `on_damage`.

    Raises RunDirError if a damaged one cannot be renamed.
    """
    steps = list_steps(folder)
    for step in reversed(steps):
        path = folder / str(step)
        reason = find_damage(path) or find_state_damage(path)
        if reason is None:
            return path
        # Renamed, not removed: somebody may want to look at it, or to save its weights.
        aside = path.with_name(f"{path.name}.damaged")
        try:
            _remove(aside)
            path.rename(aside)
        except OSError as error:
            raise RunDirError(f"{path}: {reason}, and cannot be renamed: {error.strerror}. Remove it.") from None
        earlier = step != steps[0]
        left = "going back to the checkpoint before it" if earlier else "no earlier one is whole: starting over"
        on_damage(f"{path}: {reason}. Set aside as {aside.name}; {left}.")
    return None


def read_state(path: Path) -> tuple[TrainingState, CheckpointOwner]:
    """Read state.json of a checkpoint. Raises ValueError for content that `write_checkpoint` never writes."""
    wrong: list[str] = []
    try:
        table = json.loads((path / "state.json").read_bytes())
        table = {"improved": table["best"], **table}  # earlier versions had one for both
        position = parse_record(TrainingState, table, invalid=wrong)
        owner = parse_record(CheckpointOwner, table.get("owner", {}), invalid=wrong)
    except (OSError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {_get_first_line(error)}") from None
    if position is None or owner is None or wrong:
        raise ValueError(f"{', '.join(wrong) or 'owner'}: not a value that a checkpoint has")
    # Values of the right types that no checkpoint has: the folder was renamed, or the file edited.
    if str(position.step) != path.name.removesuffix(".damaged"):
        raise ValueError(f"step is {position.step!r}")
    if position.num_evals_without_improvement < 0:
        raise ValueError(f"num_evals_without_improvement is {position.num_evals_without_improvement!r}")
    for one in (position.best, position.improved, *position.runners_up):
        if one and not 0 < one.step <= position.step:
            raise ValueError(f"an evaluation of step {one.step} is later than the checkpoint")
    return position, owner


def find_state_damage(path: Path) -> str | None:
    """Describe damage of state.json that its checksum does not show; None if there is none."""
    try:
        read_state(path)
    except ValueError as error:
        return f"state.json is damaged ({_get_first_line(error)})"
    return None


def find_weights_damage(path: Path) -> str | None:
    """Describe damage of the files from which `load_weights` reads; None if they are whole."""
    if is_sharded_checkpoint(path):
        return find_damage(path)
    return find_damage(path, names=[WEIGHTS])


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether a checkpoint has one file per rank, as checkpoints of sharded models have."""
    return (path / ".metadata").exists()


def load_weights(path: Path, model: nn.Module) -> None:
    """Copy the weights of a checkpoint into the model, sharded as the model is.

    Raises RunDirError if they cannot be read or belong to another model.
    """
    if is_sharded_checkpoint(path):
        _read_shards(path, {f"weights/{name}": parameter.detach() for name, parameter in iter_held(model)})
        release_gathered(model)
        return
    file = path / WEIGHTS
    try:
        weights = load_file(file)
    except (OSError, MemoryError, RuntimeError, SafetensorError) as error:
        raise _build_load_error(file, error) from None
    # In place: the optimizer, captured graphs and tied weights refer to these parameters.
    try:
        with torch.no_grad():
            for name, parameter in select_own_weights(model):
                parameter.copy_(shard_like(weights[name], parameter))
        release_gathered(model)
    except (KeyError, RuntimeError) as error:
        raise _build_mismatch_error(path, error) from None


def _read_trained(path: Path, state: TorchState, into: dict[str, Tensor]) -> None:
    """Read the trained weights of a checkpoint that holds their averages, in place."""
    if is_sharded_checkpoint(path):
        _read_shards(path, {f"trained/{name}": tensor for name, tensor in into.items()})
        return
    for name, tensor in into.items():
        tensor.copy_(shard_like(state["trained"][name], tensor))


def _read_shards(path: Path, into: dict[str, Tensor]) -> None:
    """Read tensors of a sharded checkpoint in place. Raises RunDirError."""
    from fivetune.distributed.shards import read_tensors

    try:
        read_tensors(path, into)
    except (OSError, MemoryError) as error:
        raise _build_load_error(path, error) from None
    except (KeyError, ValueError, RuntimeError) as error:
        raise _build_mismatch_error(path, error) from None
    except pickle.UnpicklingError:
        raise _build_foreign_error(path / ".metadata") from None


def _read_optimizer_shards(path: Path, model: nn.Module, *, whole: bool) -> dict[str, dict[str, Tensor]]:
    """Read the tensors of the optimizer by weight and field; tensors of the weight's shape are sharded as the weight.

    Args:
        whole: whether every rank needs the full tensors.
    """
    from fivetune.distributed.shards import read_shapes

    own = dict(iter_held(model))
    found = defaultdict[str, dict[str, Tensor]](dict)
    try:
        shapes = read_shapes(path)
    except pickle.UnpicklingError:
        raise _build_foreign_error(path / ".metadata") from None
    # torch's reader fills tensors in place: for each field of a weight that this rank holds, one is made.
    places: dict[str, Tensor] = {}
    for key, (shape, dtype) in shapes.items():
        kind, name, *rest = key.split("/")
        parameter = own.get(name)
        if kind != "optimizer" or parameter is None:
            continue
        if shape == parameter.shape and not whole:
            place = torch.empty_like(parameter.detach(), dtype=dtype)
        else:  # all of it, a factored moment, or a number
            place = torch.empty(shape, dtype=dtype)
        places[key] = place
        found[name]["/".join(rest)] = place
    _read_shards(path, places)
    return found


def _build_load_error(file: Path, error: Exception) -> RunDirError:
    is_damaged = isinstance(error, SafetensorError)
    remedy = "Remove the folder and resume" if is_damaged else "Free memory and resume; the checkpoint stays"
    return RunDirError(f"{file}: cannot be loaded: {_get_first_line(error)}. {remedy}.")


def _build_foreign_error(file: Path) -> RunDirError:
    return RunDirError(
        f"{file}: holds objects other than tensors and plain values, which FiveTune never writes and "
        "does not load. Remove the folder and resume from an earlier checkpoint."
    )


def _build_mismatch_error(path: Path, error: Exception) -> RunDirError:
    return RunDirError(f"{path}: is of another model or optimizer: {_get_first_line(error)}. Start a new run.")


def restore_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    world: World = SINGLE_PROCESS,
    averages: Averages | None = None,
) -> TrainingState:
    """Restore weights, optimizer, scaler and random states. Raises RunDirError if the checkpoint is of another model.

    With averages, the weights of the checkpoint are averages, and it has the trained weights too. A rank without a
    saved random state, because the run had fewer ranks, keeps its own.
    """
    try:
        position, _ = read_state(path)
    except ValueError as error:
        raise RunDirError(f"{path}: state.json is damaged ({_get_first_line(error)}). Remove the folder.") from None
    load_weights(path, model)
    # weights_only: a pickle can run any code, and a checkpoint may come from a bucket.
    try:
        with warnings.catch_warnings(action="ignore"):  # about pickles of others, which are refused
            state = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
    except pickle.UnpicklingError:
        raise _build_foreign_error(path / "state.pt") from None
    except (OSError, MemoryError, EOFError) as error:
        raise RunDirError(f"{path}/state.pt: cannot be loaded: {_get_first_line(error)}. Free memory.") from None
    except RuntimeError as error:
        raise _build_mismatch_error(path, error) from None
    shards = None
    if is_sharded_checkpoint(path):
        whole = getattr(optimizer, "keeps_whole_state", False)
        shards = _read_optimizer_shards(path, model, whole=whole)
    try:
        load_optimizer(model, optimizer, state["optimizer"], shards, world)
        scaler.load_state_dict(state["scaler"])
        if averages is not None:
            averages.restore(partial(_read_trained, path, state))
        # Last, so that nothing of the above draws from them.
        states = [state["random"], *state.get("random_of_others", ())]
        if world.rank < len(states):
            set_random_states(states[world.rank])
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise _build_mismatch_error(path, error) from None
    return position


def remove_old_checkpoints(
    folder: Path,
    *,
    keep: int,
    held: Collection[int],
    on_failure: Callable[[str], object] | None = None,
) -> None:
    """Remove all checkpoints but the newest `keep` and the steps in `held`, and partial folders of killed processes.

    A folder that cannot be removed is reported and kept: the run does not need its space.

    Args:
        held: steps of the best evaluations, and of others that are still needed.
    """
    outdated = [folder / str(step) for step in list_steps(folder)[:-keep] if step not in held]
    for path in (*folder.glob(".staging-*"), *folder.glob(".*.old"), *outdated):
        try:
            _remove(path)
        except OSError as error:
            if on_failure:
                on_failure(
                    f"{path}: cannot be removed: {error.strerror or error}. The run continues; remove it by hand."
                )


def update_best_link(run: Path, step: int) -> None:
    """Point the symbolic link `best` at a checkpoint. Raises RunDirError if the system refuses."""
    # A new link is renamed over the old one: at no time is there none.
    link = run / f".best.{os.getpid()}"
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(Path("checkpoints") / str(step), target_is_directory=True)
        link.replace(run / "best")
    except OSError as error:
        with suppress(OSError):
            link.unlink(missing_ok=True)
        raise RunDirError(
            f"{run}/best: cannot be pointed at checkpoints/{step}: {error.strerror}. "
            "The run continues: status.json names the best step too."
        ) from None


def _remove(path: Path) -> None:
    """Remove a folder, a file, or a symbolic link without its target; no-op if there is none."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _get_first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return error.strerror or "no space"
    if re.search("inline_container|iostream error", str(error)):  # torch.save, whose message lacks the system's reason
        return "the system did not write the whole file"
    return (str(error) or type(error).__name__).splitlines()[0]
