"""From a RunConfig to everything that the loop needs.

This is the one place besides the commands that sees the whole config; what it builds gets values.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import nn

from fivetune.config import RunConfig
from fivetune.data.encode import Limits
from fivetune.data.mixture import JoinedStore
from fivetune.data.store import Source, TokenStore, cache_folder, prepare
from fivetune.data.stream import Order, TrainingStream
from fivetune.decode import Decoding, cap_from_lengths
from fivetune.errors import ConfigError, nearest
from fivetune.evaluate import Evaluator
from fivetune.metrics import score_names
from fivetune.model.backend import Forward, choose_forward
from fivetune.model.load import Loaded, load, num_parameters, sentinel_ids
from fivetune.progress import Count, uncounted
from fivetune.strategies import ALONE, World
from fivetune.tasks import head_of
from fivetune.tasks.mixture import Mixture
from fivetune.telemetry.devices import enough_memory, machine_facts, num_cores, peak_of, pick_device, pick_precision
from fivetune.training.micro_batch import Fit, largest_fit
from fivetune.training.mixture import alone, draw_of, joined, part_configs

EVALUATIONS_PER_RUN = 10
PROVISIONAL = 8  # examples per forward pass until train.batch_size auto is known
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True)
class Place:
    """Where and how exactly the model computes."""

    device: str
    precision: str

    def autocast(self) -> AbstractContextManager[Any]:
        """A fresh autocast context: 16-bit matrix products over fp32 weights, or nothing in fp32."""
        kind = self.device.partition(":")[0]
        return torch.autocast(kind, dtype=DTYPES.get(self.precision), enabled=self.precision in DTYPES)

    def scaler(self) -> Any:
        """Loss scaling for fp16, a pass-through otherwise."""
        return torch.amp.GradScaler(self.device.partition(":")[0], enabled=self.precision == "fp16")


@dataclass(slots=True)
class Setup:
    """A run, ready to start.

    Args:
        model: as the strategy places it; where that divides it, only `whole` gives all of its weights.
        batch_size: examples per forward pass; halved when memory runs out in a step.
        fit: how the batch size was found, where it is auto.
        num_steps: optimizer steps of the whole run.
        eval_every_steps, checkpoint_every_steps: at least 1; the last step has both anyway.
        world: the processes that train together.
        graphed: the GraphedUpdate that steps are replayed by; None where they are launched kernel by kernel.
    """

    config: RunConfig
    loaded: Loaded
    place: Place
    stream: TrainingStream
    evaluator: Evaluator | None
    model: Any
    optimizer: torch.optim.Optimizer
    scaler: Any
    forward: Forward
    batch_size: int
    fit: Fit | None
    num_steps: int
    eval_every_steps: int
    checkpoint_every_steps: int
    world: World = ALONE
    graphed: Any = None

    @property
    def plain(self) -> Any:
        """The model as transformers knows it: its classes, names and config."""
        return self.model

    def whole(self) -> AbstractContextManager[Any]:
        """The model with all its weights, to generate with and to save. All processes enter it."""
        return self.config.strategy.whole(self.model)

    @property
    def metric(self) -> str:
        """Score that picks the best checkpoint."""
        return self.config.eval.metric or self.config.task.main_metric

    def lr(self, step: int) -> float | None:
        """Learning rate of a 0-based step; None where the optimizer makes its own."""
        if self.optimizer.param_groups[0]["initial_lr"] is None:
            return None
        return self.optimizer.param_groups[0]["initial_lr"] * self.config.schedule.factor(step, self.num_steps)


def set_up(config: RunConfig, *, count: Count = uncounted, begun: Forward | None = None, world: World = ALONE) -> Setup:
    """Load, prepare, build. Raises the errors of every part; nothing is written but the data cache.

    Args:
        begun: the forward that a resumed run began with.
        world: the processes that train together; all of them call it, and the first one prepares the data.
    """
    config = alone(config)
    _refuse_unknown_metric(config)
    place = find_place(config, world)
    seed_everything(config.run.seed)
    loaded = load_model(config)
    with world.first_alone("data"):
        train = prepare_split(config, loaded.tokenizer, "train", count=count)
        evaluation = prepare_split(config, loaded.tokenizer, "eval", count=count)
    if train is None:
        raise ConfigError("data.train: no training data is given. Add --data.train FILE.")
    stream = TrainingStream(train, _order(config), draw_of(config, train), world)
    num_steps = _num_steps(config, stream)
    with enough_memory():
        model = config.strategy.wrap(loaded.model, place.device, world)
    optimizer = build_optimizer(config, model)
    evaluator = None
    if evaluation is not None:
        evaluator = make_evaluator(config, loaded.tokenizer, evaluation, place, target_p99=train.summary["target_p99"])
    every = config.eval.every_steps or ceil(num_steps / EVALUATIONS_PER_RUN)
    forward = choose_forward(
        config.train.forward, model, place.device, stream.group(0)[:2],
        autocast=place.autocast, recompute=config.train.recompute, begun=begun,
    )  # fmt: skip
    forward = world.from_first(forward)
    forward.prepare(model)
    fit = None
    if config.train.batch_size == "auto":
        fit = _fit(config, model, forward, train, place, world)
        config = with_batch_size(config, fit.batch_size)
        stream.order = _order(config)
    return Setup(
        config=config, loaded=loaded, place=place, stream=stream, evaluator=evaluator, model=model,
        optimizer=optimizer, scaler=place.scaler(), forward=forward,
        batch_size=stream.order.batch_size, fit=fit, num_steps=num_steps,
        eval_every_steps=every, checkpoint_every_steps=config.checkpoint.every_steps or every, world=world,
    )  # fmt: skip


def _fit(config: RunConfig, model: Any, forward: Forward, train: TokenStore, place: Place, world: World) -> Fit:
    """The largest micro-batch that fits in every process."""
    fit = largest_fit(
        model, forward, train, total=config.train.examples_per_step // world.size, device=place.device,
        autocast=place.autocast, state_bytes_per_parameter=config.optimizer.state_bytes_per_parameter,
        num_processes=world.size,
    )  # fmt: skip
    return min(world.gather(fit), key=lambda found: found.batch_size)


def with_batch_size(config: RunConfig, batch_size: int) -> RunConfig:
    """The config with a number for train.batch_size."""
    return config.model_copy(update={"train": config.train.model_copy(update={"batch_size": batch_size})})


def _refuse_unknown_metric(config: RunConfig) -> None:
    known = score_names(config.task.metrics)
    if config.eval.metric and config.eval.metric not in known:
        raise ConfigError(f"eval.metric: there is no {config.eval.metric!r}. {nearest(config.eval.metric, known)}")


def find_place(config: RunConfig, world: World = ALONE) -> Place:
    """Device, precision and threads, set for the process; before any work, because threads inherit the flushing.

    Numbers too small for a normal float count as 0: computing with them is many times slower on a CPU.
    """
    torch.set_flush_denormal(True)
    torch.set_num_threads(config.train.num_threads or num_cores())
    device = pick_device(config.device)
    if world.size > 1 and device == "cuda":
        device = pick_device(f"cuda:{world.local_rank}")
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    return Place(device, pick_precision(config.train.precision, device))


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def load_model(config: RunConfig) -> Loaded:
    section = config.model
    return load(
        section.path, config=section.config, tokenizer=section.tokenizer, init=section.init,
        revision=section.revision, dropout=section.dropout, head=head_of(config.task),
    )  # fmt: skip


def prepare_split(
    config: RunConfig, tokenizer: Any, split: str, *, count: Count, labelled: bool = True
) -> TokenStore | None:
    """The tokenised "train" or "eval" data; None if there is none."""
    data = config.data
    training = split == "train"
    if isinstance(config.task, Mixture):
        parts = part_configs(config)
        return joined({name: prepare_split(part, tokenizer, split, count=count, labelled=labelled)
                       for name, part in parts.items()}, split)  # fmt: skip
    paths = data.train if training else data.eval
    if not paths:
        return None
    source = Source(
        paths=paths, task=config.task, columns=data.columns, on_bad_record=data.on_bad_record,
        max_examples=data.max_train_examples if training else data.max_eval_examples,
        limits=limits_of(config),
        for_training=training, labelled=labelled,
    )  # fmt: skip
    return prepare(source, tokenizer, cache=cache_folder(data.cache_dir), progress=count)


def limits_of(config: RunConfig) -> Limits:
    data = config.data
    return Limits(data.max_input_tokens, data.max_target_tokens, data.overlong, data.window_overlap)


def make_evaluator(config: RunConfig, tokenizer: Any, store: TokenStore, place: Place, *, target_p99: int) -> Evaluator:
    """How a store is evaluated, that of a mixture part by part; the generation cap comes from the training targets."""
    parts = {}
    if isinstance(store, JoinedStore):
        parts = {name: make_evaluator(part, tokenizer, store.parts[name], place, target_p99=target_p99)
                 for name, part in part_configs(config).items()}  # fmt: skip
    phrase = config.task.no_answer_text
    phrase_ids = tokenizer(phrase, verbose=False)["input_ids"] if phrase else []
    suppress = config.eval.suppress_sentinels
    decoding = Decoding(
        max_new_tokens=config.eval.max_new_tokens or cap_from_lengths(target_p99),
        suppressed_ids=tuple(sentinel_ids(tokenizer)) if suppress else (),
        batch_size=config.eval.batch_size,
        phrase_ids=tuple(phrase_ids),
        label_ids=_label_ids(config, tokenizer),
        min_new_tokens=config.eval.min_new_tokens,
        num_beams=config.eval.num_beams,
        num_candidates=config.eval.num_candidates,
        length_penalty=config.eval.length_penalty,
        repetition_penalty=config.eval.repetition_penalty,
    )
    return Evaluator(
        task=config.task, tokenizer=tokenizer, store=store, decoding=decoding,
        device=place.device, keep_special=not suppress, limits=limits_of(config), autocast=place.autocast, parts=parts,
    )  # fmt: skip


def _label_ids(config: RunConfig, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Token ids of every label's target text; () where answers are free text. Raises ConfigError for equal ones."""
    if not config.task.labels or not config.eval.score_labels:
        return ()
    texts = list(config.task.labels.values())
    ids = [tuple(row) for row in tokenizer(texts, verbose=False)["input_ids"]]
    for i, row in enumerate(ids):
        if row in ids[:i]:
            other = texts[ids.index(row)]
            raise ConfigError(f"task.labels: the tokenizer makes the same of {other!r} and {texts[i]!r}. "
                              "Choose other words for the labels.")  # fmt: skip
    return tuple(ids)


def build_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all trainable weights; norms are not decayed."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        vars(parameter).pop("table_grad", None)  # an optimizer before this one may have taken gradients in parts
    groups: list[dict[str, Any]] = [{"params": [p for p in trainable if p.dim() > 1]}]
    norms = [p for p in trainable if p.dim() <= 1]
    if norms:
        groups.append({"params": norms, "weight_decay": 0.0})
    build = config.optimizer.build
    if _takes_tables(config):
        build = getattr(config.optimizer, "build_for_tables", build)
    optimizer = build(groups)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _takes_tables(config: RunConfig) -> bool:
    """Whether gradients stay in this process and unscaled, so that those of large tables may stay in parts."""
    return not config.strategy.several and config.train.precision != "fp16"


def describe_machine(setup: Setup, command: str | None) -> dict[str, Any]:
    """Content of machine.json; no `command` where FiveTune was used as a library."""
    return {
        **machine_facts(setup.place.device),
        "precision": setup.place.precision,
        "forward": asdict(setup.forward),
        "batch_size_auto": asdict(setup.fit) if setup.fit else None,
        "attention": setup.forward.attention(setup.plain, setup.place.device),
        "num_threads": torch.get_num_threads(),
        "peak_flops": peak_of(setup.place.device, setup.place.precision),
        "num_parameters": num_parameters(setup.model),
        "strategy": {
            "name": setup.config.strategy.plugin_name(),
            "world_size": setup.world.size,
            "devices": setup.world.gather(setup.place.device),
        },
        "command": command,
    }


def _order(config: RunConfig) -> Order:
    size = config.train.batch_size if config.train.batch_size != "auto" else PROVISIONAL
    return Order(config.train.examples_per_step, size, config.data.bucket_pool, config.run.seed)


def _num_steps(config: RunConfig, stream: TrainingStream) -> int:
    if config.train.num_steps:
        return config.train.num_steps
    return max(1, round((config.train.num_epochs or 3) * stream.steps_per_epoch))
