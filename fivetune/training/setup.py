"""Builds the parts of a run from its config: model, optimizer, data and plan.

In: a RunConfig. Out: a Setup, frozen. The parts receive values, not the config.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fivetune.config import RunConfig
from fivetune.config.paths import find_typed_path, resolve_adapter
from fivetune.data.store.stream import BatchPlan, TrainingStream
from fivetune.data.store.token_store import TokenStore
from fivetune.distributed.pipeline import find_stage
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.errors import ConfigError, translate_oom_errors
from fivetune.model.adapter import attach_adapter, refuse_lost_tokens
from fivetune.model.added_tokens import KEY as ADDED_TOKENS
from fivetune.model.backend import Forward
from fivetune.model.family import explain_unsupported_parts, get_family
from fivetune.model.flops import list_block_flops
from fivetune.model.freeze import Unfreezing, freeze_weights
from fivetune.model.load import LoadedModel, find_source, load_model_and_tokenizer
from fivetune.model.shards import load_shards
from fivetune.rundir.plan import Plan
from fivetune.rundir.progress import ProgressCallback, ignore_progress
from fivetune.tasks import head_of
from fivetune.training.answers.decoding import build_decoding, make_evaluator
from fivetune.training.answers.evaluator import Evaluator
from fivetune.training.autotune.blocks import measure_block_seconds
from fivetune.training.autotune.forward import choose_forward, explain_unsupported_flat
from fivetune.training.autotune.micro_batch import Fit, find_largest_fit
from fivetune.training.autotune.precision import choose_half, choose_precision
from fivetune.training.averaging import build_averages
from fivetune.training.compute import choose_compute
from fivetune.training.compute_config import ComputeConfig
from fivetune.training.distill import load_teacher, refuse_other_teacher, replace_targets
from fivetune.training.mixture import build_mixture_sampler, select_part
from fivetune.training.plan import decide_plan
from fivetune.training.sources import check_sources, prepare_split, with_data_labels
from fivetune.training.state.snapshot import seed_everything
from fivetune.training.step.engine import build_engine
from fivetune.training.step.groups import build_optimizer, count_state_bytes, get_peak_lr
from fivetune.training.step.learner import Learner
from fivetune.training.step.objective import build_objective, weigh_labels
from fivetune.training.step.pipeline import PipelineEngine

if TYPE_CHECKING:
    from fivetune.model.modules import T5Model

PROVISIONAL_BATCH_SIZE = 8  # examples per forward pass until train.batch_size auto is known


@dataclass(frozen=True, slots=True)
class MeasuredChoices:
    """What a run chose by measurement when it began; a resume keeps it, because another choice rounds differently.

    Args:
        forward, precision: None if they are to be chosen.
        block_seconds: measured cost of every block, by which the model is divided into stages; () if not measured.
    """

    forward: Forward | None = None
    precision: str | None = None
    block_seconds: tuple[float, ...] = ()


NOTHING_CHOSEN = MeasuredChoices()


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The training stream and the evaluator of a run; None without evaluation data."""

    stream: TrainingStream
    evaluator: Evaluator | None

    @property
    def stores(self) -> list[tuple[str, TokenStore]]:
        """The tokenised sets by name: train, and eval if there is one."""
        stores = [("train", self.stream.store)]
        if self.evaluator:
            stores.append(("eval", self.evaluator.store))
        return stores


@dataclass(frozen=True, slots=True)
class Setup:
    """The parts of a run, built by `set_up`.

    Args:
        config: config of the recipe, with the size that was found in place of train.batch_size auto.
        loaded: the tokenizer, and warnings from loading the model.
        plan: the resolved numbers.
        fit: result of the search for train.batch_size auto; None if the recipe gives a number.
        block_seconds: measured cost of every block, by which the model was divided into stages; () if not measured.
        unfreezing: freezes and unfreezes weights between steps; None if model.unfreeze is empty.
    """

    config: RunConfig
    loaded: LoadedModel
    learner: Learner
    data: TrainingData
    plan: Plan
    fit: Fit | None = None
    block_seconds: tuple[float, ...] = ()
    unfreezing: Unfreezing | None = None

    @property
    def warnings(self) -> list[str]:
        """Sentences from loading the model, and about tokenised data that were damaged."""
        rebuilt = [store.rebuilt for _, store in self.data.stores]
        return [*self.loaded.warnings, *filter(None, rebuilt)]

    @property
    def metric(self) -> str:
        """Name of the score that selects the best checkpoint."""
        return self.config.eval.metric or self.config.task.main_metric

    @property
    def watched_metric(self) -> str:
        """Name of the score that train.early_stopping watches, or loss."""
        rule = self.config.train.early_stopping
        if rule and rule.metric:
            return rule.metric
        return self.metric

    def start_step(self, step: int) -> float | None:
        """Freeze and unfreeze weights for a 0-based step; returns its learning rate."""
        if self.unfreezing:
            self.unfreezing.update(step)
        return self.compute_lr(step)

    def compute_lr(self, step: int) -> float | None:
        """Learning rate of a 0-based step; None if the optimizer computes its own."""
        if self.plan.lr is None:
            return None
        return self.plan.lr * self.config.schedule.factor(step, self.plan.num_steps)


def set_up(
    config: RunConfig,
    *,
    on_progress: ProgressCallback = ignore_progress,
    chosen: MeasuredChoices = NOTHING_CHOSEN,
    world: World = SINGLE_PROCESS,
) -> Setup:
    """Load the model, prepare the data and build the rest. Writes only the data cache; raises the errors of all parts.

    Args:
        chosen: what a resumed run chose when it began.
        world: the ranks of the run; all of them call this, and rank 0 prepares the data first.
    """
    # The machine first: device, precision and ranks decide how everything else is built.
    config = select_part(config)
    compute = choose_compute(config, world, chosen.precision)
    world = world.split(config.strategy.get_model_size(world.size), compute.device)
    # Equal on all ranks: random weights and new adapters are drawn alike.
    seed_everything(config.run.seed)

    # Files and labels before the model, which may be a download.
    on_progress("checking the files", 0)
    with world.run_rank_zero_first("sources"):
        check_sources(config)
        config = with_data_labels(config)
        weigh_labels(config, {})  # refuses unknown labels
    on_progress("loading the model", 0)
    loaded = _load_supported_model(config, compute, world)
    model = loaded.model
    tokenizer = loaded.tokenizer
    engine = build_engine(config, model, compute)

    # The data, which rank 0 tokenises first.
    with world.run_rank_zero_first("data"):
        train = prepare_split(config, tokenizer, "train", on_progress=on_progress)
        evaluation = prepare_split(config, tokenizer, "eval", on_progress=on_progress)
    _refuse_missing_data(config, train, evaluation)
    assert train is not None
    # The generation cap, a teacher's too, follows from the training targets: the targets of data.eval are to be found.
    target_p99 = train.summary["target_p99"]
    if config.distill.teacher:
        decoding = build_decoding(config, tokenizer, target_p99=target_p99)
        train = replace_targets(config, train, decoding, compute, world, on_progress)
    stream = TrainingStream(train, _build_batch_plan(config), build_mixture_sampler(config, train), world)

    on_progress("choosing precision and forward", 0)
    # The precision of a CPU or an older GPU is measured with the data; evaluations compute in it.
    compute = _choose_precision(config, model, stream, compute, world, chosen)
    if compute.precision == "fp16":  # chosen, or of a resumed run with auto
        config = config.replace("train", precision="fp16")
    evaluator = None
    if evaluation is not None:
        evaluator = make_evaluator(
            config, tokenizer, evaluation, compute, target_p99=target_p99, generate=engine.generate
        )

    # The model where it trains, and what trains it. The optimizer comes after the strategy, which replaces parameters.
    block_seconds = chosen.block_seconds or _measure_blocks(config, model, stream, compute, world)
    model = _wrap_model(config, loaded, train, compute, world, block_seconds)
    if find_stage(model):
        engine = PipelineEngine()
    optimizer = build_optimizer(config, model)
    # Rank 0's choice counts: speeds differ between ranks, and two forwards round differently.
    forward = world.broadcast_object(_choose_forward(config, model, stream, compute, chosen))
    # The objective follows from the labels in the data.
    objective, class_weights = build_objective(config, model, tokenizer, train.summary)
    forward = replace(forward, objective=objective, teacher=load_teacher(config, compute))
    forward.prepare(model)

    # The numbers. The micro-batch is found with everything else in memory.
    fit = None
    if config.train.batch_size == "auto":
        found = find_largest_fit(
            model,
            forward,
            train,
            total=config.train.examples_per_step // world.data_size,
            device=compute.device,
            autocast=compute.make_autocast,
            state_bytes=count_state_bytes(model, config.optimizer, has_average=bool(config.train.ema)),
            num_processes=world.size,
        )
        # The tightest rank decides: all ranks run the same micro-batch.
        fit = min(world.gather(found), key=lambda one: one.batch_size)
        config = config.replace("train", batch_size=fit.batch_size)
        stream.plan = _build_batch_plan(config)
    plan = decide_plan(
        config,
        batch_size=stream.plan.batch_size,
        steps_per_epoch=stream.steps_per_epoch,
        lr=get_peak_lr(optimizer),
        max_new_tokens=evaluator.decoding.max_new_tokens if evaluator else None,
        class_weights=class_weights,
    )
    learner = Learner(
        model=model,
        optimizer=optimizer,
        scaler=compute.make_scaler(),
        forward=forward,
        compute=compute,
        strategy=config.strategy,
        engine=engine,
        max_grad_norm=config.train.max_grad_norm,
        world=world,
        averages=build_averages(config.optimizer, model, optimizer, config.train.ema),
    )
    return Setup(
        config=config,
        loaded=loaded,
        learner=learner,
        data=TrainingData(stream, evaluator),
        plan=plan,
        fit=fit,
        block_seconds=block_seconds,
        unfreezing=Unfreezing(model, config.model.unfreeze) if config.model.unfreeze else None,
    )


def _load_supported_model(config: RunConfig, compute: ComputeConfig, world: World) -> LoadedModel:
    """Load the model. Raises ConfigError if its family does not support the strategy or the device."""
    config.optimizer.refuse_missing_packages()
    is_sharded = config.strategy.sharded and world.size > 1
    loaded = load_configured_model(config, compute.device, on_meta=is_sharded)
    refuse_other_teacher(config, loaded.tokenizer)
    family = get_family(loaded.model.config)
    strategy = config.strategy.plugin_name()
    if reason := explain_unsupported_parts(family, strategy=strategy, sharded=is_sharded, device=compute.kind):
        raise ConfigError(reason)
    return loaded


def load_configured_model(config: RunConfig, device: str, *, on_meta: bool = False) -> LoadedModel:
    """Load the model with its adapter and frozen weights.

    Args:
        device: where a base in 4 bits computes.
    """
    section = config.model
    typed = (section.path, section.config, section.tokenizer)
    path, model_config, tokenizer = [name and find_typed_path(name, config.run.dir) for name in typed]
    advice = "Set model.path to the base; to continue the adapter, also set model.adapter.path to that folder."
    refuse_lost_tokens(Path(path or ""), "model.path", advice)
    source = find_source(path, config=model_config, init=section.init, revision=section.revision)
    loaded = load_model_and_tokenizer(
        str(source),
        tokenizer=tokenizer,
        new_tokens=section.add_tokens,
        init=section.init,
        dropout=section.dropout,
        head=head_of(config.task),
        on_meta=on_meta,
        any_seq2seq=section.any_seq2seq,
    )
    if adapter := resolve_adapter(section.adapter, config.run.dir):
        attach_adapter(loaded.model, adapter, base=str(path), device=device)
    freeze_weights(loaded.model, section.freeze, until=section.unfreeze)
    if section.add_tokens and not loaded.model.get_input_embeddings().weight.requires_grad:
        raise ConfigError(
            f"{ADDED_TOKENS}: the embedding is not trained (model.adapter or model.freeze), and the tokens would stay "
            "means of others. Train all weights, or remove the setting."
        )
    return loaded


def _refuse_missing_data(config: RunConfig, train: TokenStore | None, evaluation: TokenStore | None) -> None:
    """Raise ConfigError without training data, and without evaluation data for a setting that compares evaluations."""
    if train is None:
        raise ConfigError("data.train: no training data is given. Add --data.train FILE.")
    comparing = {
        "train.early_stopping": config.train.early_stopping,
        "checkpoint.average_best": config.checkpoint.average_best,
    }
    for key, value in comparing.items():
        if value and evaluation is None:
            raise ConfigError(f"{key}: it compares evaluations, and no data.eval is given. Add data.eval or remove it.")


def _build_batch_plan(config: RunConfig) -> BatchPlan:
    size = config.train.batch_size
    if size == "auto":
        size = PROVISIONAL_BATCH_SIZE
    data = config.data
    return BatchPlan(config.train.examples_per_step, size, data.bucket_pool, config.run.seed, data.window_shards)


def _choose_precision(
    config: RunConfig,
    model: T5Model,
    stream: TrainingStream,
    compute: ComputeConfig,
    world: World,
    chosen: MeasuredChoices,
) -> ComputeConfig:
    """Choose the precision of a CPU or an older GPU on each rank's first batch; the first rank's choice counts."""
    is_resumed = config.train.precision == "auto" and chosen.precision is not None
    # A sharded model may have no values before the strategy places it: nothing can be measured with it.
    has_weights = not config.strategy.sharded or world.size == 1
    lacks_bf16 = compute.kind == "cuda" and config.train.precision == "auto" and compute.precision == "fp32"
    if is_resumed or not has_weights or not (compute.kind == "cpu" or lacks_bf16):
        return compute
    batch = stream.build_micro_batches(0)[0]
    if lacks_bf16:
        with translate_oom_errors():
            model.to(compute.device)
        found = choose_half(model, compute, batch, config.train.forward, recompute=config.train.recompute)
    else:
        forward = _choose_forward(config, model, stream, compute, chosen)
        found = choose_precision(config.train.precision, model, compute, batch, forward)
    return world.broadcast_object(found)


def _choose_forward(
    config: RunConfig, model: T5Model, stream: TrainingStream, compute: ComputeConfig, chosen: MeasuredChoices
) -> Forward:
    return choose_forward(
        config.train.forward,
        model,
        compute.step_device,
        stream.build_micro_batches(0)[:2],
        autocast=compute.make_autocast,
        recompute=config.train.recompute,
        resumed_forward=chosen.forward,
    )


def _measure_blocks(
    config: RunConfig, model: T5Model, stream: TrainingStream, compute: ComputeConfig, world: World
) -> tuple[float, ...]:
    """Measure the blocks on this rank's first micro-batch; () if the strategy needs no costs, or if it cannot run."""
    if not config.strategy.needs_block_seconds or world.size == 1:
        return ()
    if explain_unsupported_flat(model, compute.device, compute.make_autocast):
        return ()
    return measure_block_seconds(model, stream.build_micro_batches(0)[0], compute, world)


def _wrap_model(
    config: RunConfig,
    loaded: LoadedModel,
    train: TokenStore,
    compute: ComputeConfig,
    world: World,
    block_seconds: Sequence[float],
) -> T5Model:
    """Place the model as the strategy does; a model on torch's meta device gets the values of this rank's shards."""
    strategy = config.strategy
    settings = loaded.model.config
    costs = block_seconds
    # Without a measurement the stages of a pipeline are divided by operations.
    if not costs and get_family(settings).t5_blocks:
        costs = list_block_flops(settings, train.inputs.lengths, train.labels.lengths)
    with translate_oom_errors():
        model = strategy.wrap(loaded.model, compute.device, world, precision=compute.precision, costs=costs)
        if loaded.files:
            load_shards(model, loaded.files, strategy.get_weight_device(compute.device), where=str(config.model.path))
    return model
