"""Every strategy: what a run learns does not depend on how many processes share it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kit
import pytest
import several_processes
import torch
import yaml
from built_once import build_once
from flat_kit import make_batch
from ranks import start_ranks
from safetensors.torch import load_file
from torch import distributed
from torch.distributed import distributed_c10d

from fivetune import plugins, rundir
from fivetune.config import load_config
from fivetune.distributed import shards
from fivetune.distributed import world as world_module
from fivetune.distributed.pipeline import divide_costs, order_passes
from fivetune.distributed.sharding import gather_tensor, shard_like
from fivetune.distributed.tensor_parallel import draw_own_masks
from fivetune.distributed.world import World, refuse_shared_devices, refuse_wrong_world_size
from fivetune.errors import ConfigError
from fivetune.model.flops import list_block_flops
from fivetune.model.load import load_model_and_tokenizer
from fivetune.reading.report.run.speed import build_step_time_section
from fivetune.rundir.checksums import find_damage
from fivetune.rundir.records import Run, StrategyFacts
from fivetune.training.autotune.blocks import measure_block_seconds
from fivetune.training.run import train
from fivetune.training.setup import MeasuredChoices, set_up
from fivetune.training.strategies import _stages
from fivetune.training.strategies._buckets import BUCKET_BYTES, iter_buckets

STRATEGIES = plugins.list_plugins("strategies")
SEVERAL = ("ddp", "fsdp", "pipeline", "tensor")  # on two processes
FOUR = {  # on four
    "fsdp_tensor": {"name": "fsdp_tensor"},
    "hybrid": {"name": "fsdp", "replicas": 2, "reduce_once": False},
    "two_copies": {"name": "tensor", "size": 2},
    "four_stages": {"name": "pipeline"},
    "two_pipelines": {"name": "pipeline", "stages": 2, "schedule": "gpipe", "balance": "memory"},
}
DISTILLED = (("ddp", "logits"), ("fsdp", "sequence"))
OUT_OF_MEMORY = [  # in which pass, after the forward pass or in the middle of a pass, memory runs out
    ("ddp", "after"),
    ("ddp", "backward"),
    *((name, place) for name in SEVERAL[1:] for place in ("forward", "backward")),
]
OUT_OF_MEMORY_OF_FOUR = list(zip(FOUR, ("backward", "backward", "forward", "backward", "forward"), strict=True))
RESUMED = ("ddp", "pipeline")  # in `make test`; the others are resumed and stopped in the release tier
FAMILIES = ("t5", "v1_1")  # a head that is tied to the embeddings, and one of its own
NUM_STEPS = 5
SEED = 2  # the first step has a whole batch, so that each process has several micro-batches


def mark(cases: Iterable[Any], *default: Any) -> list[Any]:
    """Cases as parameters, of the release tier unless they are named."""
    return [case if case in default else kit.release(*(case if isinstance(case, tuple) else (case,))) for case in cases]


# --- one process ---


def model_with_gradients() -> torch.nn.Module:
    """Two weights with the gradient (3, 4)."""
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    return model


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_model_that_nobody_shares_stays_as_it_is(name):
    strategy, model = plugins.load_plugin("strategies", name)(), model_with_gradients()
    assert strategy.wrap(model, "cpu") is model
    assert not model.weight.is_meta


def test_every_strategy_runs_on_several_processes_here():
    tested = {*SEVERAL, *(spec["name"] for spec in FOUR.values())}
    shared = {n for n in STRATEGIES if plugins.load_plugin("strategies", n).supports_multiple}
    assert tested == shared, "add the strategy to SEVERAL or FOUR"


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("limit", "clipped"), [(None, 5.0), (10.0, 5.0), (1.0, 1.0)])
def test_clipping_says_the_norm_before(name, limit, clipped):
    strategy, model = plugins.load_plugin("strategies", name)(), model_with_gradients()
    norm = strategy.clip(strategy.wrap(model, "cpu"), limit)
    assert float(norm) == pytest.approx(5.0)
    assert float(next(model.parameters()).grad.norm()) == pytest.approx(clipped, rel=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "pipeline"])
def test_gradients_are_reduced_after_the_last_micro_batch_only(name, monkeypatch):
    """Fillers may be one and the same batch: two processes waited for each other for ever."""
    options, asked = plugins.load_plugin("strategies", name), []
    monkeypatch.setattr(options, "prepare_backward", lambda self, model, world, *, is_last: asked.append(is_last))
    batch = make_batch([(3, 2)])
    passes = SimpleNamespace(
        compute_loss=lambda batch: torch.ones(()), backward=lambda loss: None, count_rows=lambda batch: (3, 2)
    )
    options().accumulate_gradients(torch.nn.Linear(1, 1), World(), [batch] * 3, passes)
    assert asked == [False, False, True]


def test_gradients_are_clipped_on_devices_without_grouped_kernels():
    """torch's meta device has none, as MPS."""
    model = torch.nn.Linear(3, 2, device="meta")
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    assert plugins.load_plugin("strategies", "single")().clip(model, 1.0).is_meta
    for name in ("sgd", "adafactor", "lion", "muon"):
        options = plugins.load_plugin("optimizers", name)()
        groups: Any = [{"params": list(model.parameters()), "kind": "matrix", "lr_factor": 1.0}]
        options.build(groups).step()


def test_a_failed_run_does_not_wait_for_nccl(monkeypatch):
    """A lost rank never answers: the groups are aborted, not destroyed in order."""
    done: list[str] = []
    monkeypatch.setattr("torch.cuda.set_device", lambda number: None)
    monkeypatch.setattr(world_module, "import_collectives", FakeCollectives)
    monkeypatch.setattr(distributed, "init_process_group", lambda *args, **named: None)
    monkeypatch.setattr(distributed, "is_initialized", lambda: "aborted" not in done)
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: done.append("destroyed"))
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", lambda: done.append("aborted"))
    with World(rank=0, size=2).connect(cuda=True, timeout_minutes=1):
        pass
    with pytest.raises(ConfigError), World(rank=0, size=2).connect(cuda=True, timeout_minutes=1):
        raise ConfigError("lost")
    assert done == ["destroyed", "aborted"]


class FakeCollectives:
    def rendezvous(self, url, *, timeout):
        yield distributed.HashStore(), 0, 2


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_broken_gradient_is_not_hidden(name):
    strategy, model = plugins.load_plugin("strategies", name)(), model_with_gradients()
    next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
    assert not torch.isfinite(strategy.clip(strategy.wrap(model, "cpu"), 1.0))


def test_alone_nothing_is_sent():
    world, tensor = World(), torch.ones(2)
    world.all_reduce_sum(tensor)
    assert tensor.tolist() == [1.0, 1.0]
    assert (world.gather(7), world.broadcast_object(7), world.all_reduce_max(7), world.run_on_all(lambda: 7)) == (
        [7],
        7,
        7,
        [7],
    )
    assert gather_tensor(tensor) is tensor and shard_like(tensor, torch.zeros(2)) is tensor


def test_small_gradients_travel_together():
    small, large = torch.zeros(3), torch.empty(BUCKET_BYTES // 4 + 1)
    found = list(iter_buckets([small, small, large, small, small.double()]))
    assert [[t.numel() for t in bucket] for bucket in found] == [[3, 3], [large.numel()], [3], [3]]


@pytest.mark.parametrize(
    ("environ", "asked", "words"),
    [
        ({}, 2, "world size 1, 2 devices requested. The command fivetune train starts"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            1,
            "world size 2, 1 device requested. Set launch.nproc to 2",
        ),
        ({"SLURM_NTASKS": "2"}, 1, "world size 1, 2 tasks requested from SLURM"),
    ],
)
def test_as_many_processes_as_were_asked_for_or_an_error(environ, asked, words):
    with pytest.raises(ConfigError, match=f"^launch.nproc: {words}"):
        refuse_wrong_world_size(World.from_environment(environ), asked, environ)
    refuse_wrong_world_size(World.from_environment({"SLURM_NTASKS": "1"}), 1, {"SLURM_NTASKS": "1"})


def test_more_processes_than_devices_are_an_error():
    with pytest.raises(
        ConfigError, match=r"2 processes on this machine, which has 1 CUDA device\. .*launch.nproc to 1, or"
    ):
        refuse_shared_devices(1, {"LOCAL_WORLD_SIZE": "2"})
    refuse_shared_devices(2, {"LOCAL_WORLD_SIZE": "2"})


def test_devices_asked_for_from_python_are_an_error(tmp_path, model_folder):
    table = kit.recipe(tmp_path, model_folder, launch={"nproc": 2}, strategy="ddp")
    with pytest.raises(ConfigError, match=r"world size 1, 2 devices requested"):
        train(table, quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategy": "single"}, "strategy.name single supports one. Use ddp"),
        (
            {"train": {"global_batch_size": 9, "batch_size": 3}},
            "global_batch_size 9 is not a multiple of launch.nproc 2",
        ),
        ({"device": "cuda:1"}, "device cuda:1 is one device, launch.nproc 2 needs 2"),
        ({"strategy": "fsdp", "train__precision": "fp16"}, "train.precision fp16"),
        ({"strategy": "tensor", "train__precision": "fp16"}, "train.precision fp16"),
        ({"strategy": "tensor", "train__batch_size": "auto"}, "train.batch_size auto"),
        ({"strategy": {"name": "tensor", "size": 3}}, "strategy.size 3 does not divide launch.nproc 2"),
        ({"strategy": "pipeline", "train__precision": "fp16"}, "train.precision fp16"),
        ({"strategy": "pipeline", "train__batch_size": "auto"}, "train.batch_size auto"),
        ({"strategy": "pipeline", "train__forward": "padded"}, "train.forward padded computes the whole model"),
        ({"strategy": {"name": "pipeline", "stages": 3}}, "strategy.stages 3 does not divide launch.nproc 2"),
        (
            {"strategy": "fsdp_tensor"},
            "needs at least two groups of strategy.size 2 ranks, launch.nproc is 2",
        ),
        ({"strategy": {"name": "fsdp", "replicas": 3}}, "strategy.replicas 3 does not divide launch.nproc 2"),
        ({"strategy": "fsdp", "train__batch_size": "auto"}, "train.batch_size auto"),
    ],
)
def test_settings_that_several_processes_cannot_have(tmp_path, model_folder, changes, words):
    table = kit.recipe(tmp_path, model_folder, **{"launch": {"nproc": 2}, "strategy": "ddp", **changes})
    with pytest.raises(ConfigError, match=words):
        load_config(table)


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_a_stage_keeps_the_weights_that_its_blocks_use(family_folders, family):
    """Three stages: embedding and a block; a block of the encoder and one of the decoder; the last one and the head."""
    whole = load_model_and_tokenizer(str(family_folders[family])).model
    kept = []
    for part in (range(1), range(1, 3), range(3, 4)):
        model = load_model_and_tokenizer(str(family_folders[family])).model
        _stages._release_weights(model, set(_stages._iter_weights(model, part, 2)), "cpu")
        assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight is model.shared.weight
        assert (model.lm_head.weight is model.shared.weight) == (whole.lm_head.weight is whole.shared.weight)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        assert shapes == {name: p.shape for name, p in whole.named_parameters()}
        kept.append({name for name, p in model.named_parameters() if not p.is_meta})
        assert all(p.requires_grad == (name in kept[-1]) for name, p in model.named_parameters())
    assert set.union(*kept) == {name for name, _ in whole.named_parameters()}
    tied, own_biases = family == "t5", family == "umt5"
    bias = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    shared = {"shared.weight"} if tied else set()
    assert kept[0] & kept[2] == shared
    assert kept[0] & kept[1] == {"shared.weight"} | (set() if own_biases else {bias.format("encoder")})
    assert kept[1] & kept[2] == shared | (set() if own_biases else {bias.format("decoder")})


def test_models_that_have_no_stages_are_refused(family_folders):
    model = load_model_and_tokenizer(str(family_folders["t5"])).model
    with pytest.raises(ConfigError, match=r"^strategy.stages: 8 stages, the model has 4 blocks\. Set"):
        _stages.assign_stage(model, "cpu", World(size=8, model_size=8), ())
    del model.lm_head
    with pytest.raises(ConfigError, match=r"^strategy.name: pipeline has no stages for a model with a span head\. Use"):
        _stages.assign_stage(model, "cpu", World(size=2, model_size=2), ())


def test_stages_have_equal_shares_of_time_or_of_memory(family_folders):
    """Long inputs with short targets: the encoder computes more, the decoder holds more."""
    model = load_model_and_tokenizer(str(family_folders["t5"])).model
    assert divide_costs(list_block_flops(model.config, [400], [4]), 2) == [range(1), range(1, 4)]
    assert divide_costs(_stages.count_block_weights(model), 2) == [range(2), range(2, 4)]


def test_stages_follow_measured_seconds(tmp_path, model_folder, monkeypatch):
    """A resumed run has those that it began with: other stages would round otherwise."""
    ready = kit.ready(tmp_path, model_folder, model__dropout=0.1)
    learner, state = ready.learner, torch.get_rng_state()
    batch = make_batch([(400, 4)] * 2)
    seconds = measure_block_seconds(learner.model, batch, learner.compute, World())
    assert seconds[0] == seconds[1] > seconds[2] > 0 and seconds[3] > seconds[2]  # the last one has the head
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    used: list[Any] = []
    options = plugins.load_plugin("strategies", "pipeline")
    monkeypatch.setattr(options, "wrap", lambda self, model, *_, costs, **options: used.append(costs) or model)
    config = load_config(kit.recipe(tmp_path, model_folder, strategy="pipeline"))
    assert set_up(config, chosen=MeasuredChoices(block_seconds=seconds)).block_seconds == seconds
    set_up(config)
    store = ready.data.stream.store
    assert used == [seconds, list_block_flops(learner.model.config, store.inputs.lengths, store.labels.lengths)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_batches"), [(2, 1), (2, 4), (4, 2), (4, 7)])
def test_a_schedule_runs_every_pass_once_and_no_stage_waits_for_ever(schedule, num_stages, num_batches):
    """With receives that wait for the neighbour's pass and sends that do not wait."""
    orders = [order_passes(schedule, number, num_stages, num_batches) for number in range(num_stages)]
    assert all(order.count("F") == order.count("B") == num_batches for order in orders)
    done = [{"F": 0, "B": 0} for _ in orders]
    most_held = 0
    for _ in range(2 * num_batches * num_stages):
        for number, order in enumerate(orders):
            kind = order[sum(done[number].values())] if sum(done[number].values()) < len(order) else ""
            giver = number + {"F": -1, "B": 1}.get(kind, 0)
            if kind and (giver not in range(num_stages) or done[giver][kind] > done[number][kind]):
                assert kind == "F" or done[number]["F"] > done[number]["B"]
                done[number][kind] += 1
                most_held = max(most_held, done[number]["F"] - done[number]["B"])
    assert done == [{"F": num_batches, "B": num_batches}] * num_stages
    assert most_held == (num_batches if schedule == "gpipe" else min(num_batches, num_stages))


# --- two processes ---


@dataclass(frozen=True)
class Together:
    """What two processes did, and in `alone` what one does with the same recipes."""

    folder: Path
    seen: list[dict[str, Any]]
    alone: dict[str, Any]
    stderr: str


def recipe(
    folder: Path, model: Path, name: str, strategy: str | dict[str, Any], nproc: int, num_steps: int = NUM_STEPS
) -> dict[str, Any]:
    """25 examples, 8 a step in micro-batches of 2, but 4 and 5 in two steps, which two processes share unevenly."""
    table = kit.recipe(
        folder,
        model,
        strategy=strategy,
        launch={"nproc": nproc},
        model__dropout=0.0,
        train__batch_size=2,
        train__num_steps=num_steps,
        eval__every_steps=5,
        eval__at_start=False,
    )
    table["run"] |= {"dir": str(folder / name), "seed": SEED}
    table["data"]["train"] = str(kit.squad_file(folder / "train.json", num_questions=25))
    return table


def stopping_early(folder: Path, model: Path, strategy: str, nproc: int) -> dict[str, Any]:
    """A rate that moves no weight: no evaluation after the first is better."""
    table = recipe(folder, model, f"early-{strategy}", strategy, nproc, num_steps=20)
    table["optimizer"]["lr"] = 1e-30
    table["eval"] |= {"every_steps": 1, "metric": "f1"}
    table["train"]["early_stopping"] = 2
    return table


def in_bf16(folder: Path, model: Path, name: str, strategy: str, nproc: int) -> dict[str, Any]:
    table = recipe(folder, model, name, strategy, nproc)
    return {**table, "train": {**table["train"], "precision": "bf16"}}


def in_sixes(folder: Path, model: Path, name: str, strategy: str, nproc: int) -> dict[str, Any]:
    """Six examples a step, for one, two and three processes, with Adafactor."""
    table = recipe(folder, model, name, strategy, nproc)
    table["train"]["global_batch_size"] = 6
    return {**table, "optimizer": {"name": "adafactor"}}


@pytest.fixture(scope="module")
def together(request, tmp_path_factory, family_folders) -> Together:
    """One start of two processes that do everything, because starting is what takes long."""
    work = partial(run_two, family_folders, everything=kit.has_release_tests(request))
    built = build_once(tmp_path_factory, "together", work)
    alone = {name: rundir.read_run(one) if isinstance(one, Path) else one for name, one in built.alone.items()}
    return replace(built, alone=alone)


def train_alone(table: dict[str, Any]) -> Path:
    train(table, preflight=False, quiet=True)
    return Path(table["run"]["dir"])


def run_two(family_folders: dict[str, Path], folder: Path, *, everything: bool) -> Together:
    """
    Args:
        everything: with what only tests of the release tier need.
    """
    t5 = family_folders["t5"]

    def write(name: str, table: dict[str, Any]) -> None:
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(table))

    alone = train_each_alone(family_folders, folder, everything=everything)
    for strategy, kind in DISTILLED:
        section = {"teacher": str(family_folders["v1_1"]), "kind": kind}
        table = recipe(folder, t5, f"alone-{kind}", "single", 1) | {"distill": section}
        alone[f"gradients-{kind}"] = several_processes.gradients(table)
        write(f"gradients-{kind}-{strategy}", table | {"strategy": strategy, "launch": {"nproc": 2}})
    alone["gradients-bf16"] = several_processes.gradients(in_bf16(folder, t5, "alone-bf16", "single", 1))
    for strategy in SEVERAL:
        write(f"gradients-bf16-{strategy}", in_bf16(folder, t5, f"bf16-{strategy}", strategy, 2))
        write(f"gradients-losses-{strategy}", recipe(folder, t5, f"losses-{strategy}", strategy, 2))
        for family in FAMILIES:
            table = recipe(folder, family_folders[family], f"run-{strategy}-{family}", strategy, 2)
            write(f"gradients-{strategy}-{family}", table)
            if family == "t5" or everything:
                write(f"run-{strategy}-{family}{'-checked' if family == 't5' else ''}", table)
        if strategy == "fsdp" or everything:
            write(f"early-{strategy}", stopping_early(folder, t5, strategy, 2))
            table = begin_alone(folder, t5, f"adafactor-{strategy}", strategy, {"name": "adafactor"})
            write(f"resumed-adafactor-{strategy}", table)
        if strategy in RESUMED or everything:
            write(f"resumed-{strategy}", begin_alone(folder, t5, f"resumed-{strategy}", strategy))
            write(f"stopped-{strategy}", recipe(folder, t5, f"stopped-{strategy}", strategy, 2))
    for strategy, place in OUT_OF_MEMORY:
        write(f"memory-{strategy}-{place}", recipe(folder, t5, "memory", {"name": strategy}, 2))
    write("broken", recipe(folder, t5, "broken", {"name": "pipeline", "balance": "memory"}, 2))
    table = recipe(folder, t5, "switched", "fsdp", 2)
    write("stopped-switched", table)
    write("switched", {**table, "strategy": "tensor"})
    write("full", {**recipe(folder, t5, "full", "fsdp", 2), "checkpoint": {"every_steps": 1}})
    table = recipe(folder, t5, "background", "fsdp", 2)
    write("background", {**table, "checkpoint": {"every_steps": 1, "background": True}})
    if everything:
        write("stopped-six", in_sixes(folder, t5, "six", "fsdp", 2))
    stderr = run_ranks(folder, 2)
    return Together(folder, [torch.load(folder / f"seen-{rank}.pt") for rank in (0, 1)], alone, stderr)


def train_each_alone(family_folders: dict[str, Path], folder: Path, *, everything: bool) -> dict[str, Any]:
    alone: dict[str, Any] = {}
    for family in FAMILIES:
        table = recipe(folder, family_folders[family], f"alone-{family}", "single", 1)
        alone[f"gradients-{family}"] = several_processes.gradients(table)
        if family == "t5" or everything:
            alone[family] = train_alone(table)
    t5 = family_folders["t5"]
    table = {**recipe(folder, t5, "alone-adafactor", "single", 1), "optimizer": {"name": "adafactor"}}
    alone["adafactor"] = train_alone(table)
    alone["early"] = train_alone(stopping_early(folder, t5, "single", 1))
    if everything:
        alone["six"] = train_alone(in_sixes(folder, t5, "alone-six", "single", 1))
    table = recipe(folder, t5, "alone-losses", "single", 1)
    return alone | {"gradients-losses": several_processes.gradients_of_all_losses(table)}


def begin_alone(
    folder: Path, model: Path, name: str, strategy: str, optimizer: dict[str, str] | None = None
) -> dict[str, Any]:
    """Train two steps in one process. Returns the recipe that continues in two."""
    table = recipe(folder, model, name, strategy, 1, num_steps=2)
    if optimizer:
        table["optimizer"] = optimizer
    train({**table, "launch": {}}, preflight=False, quiet=True)
    return {**table, "launch": {"nproc": 2}, "train": {**table["train"], "num_steps": NUM_STEPS}}


@pytest.fixture(scope="module")
def four_together(request, tmp_path_factory, family_folders, together) -> Together:
    """What four processes did, beside the runs of one in `together`."""
    work = partial(run_four, family_folders, together, everything=kit.has_release_tests(request))
    built = build_once(tmp_path_factory, "four", work)
    return replace(built, alone=together.alone)


def run_four(family_folders: dict[str, Path], together: Together, folder: Path, *, everything: bool) -> Together:
    def write(name: str, table: dict[str, Any]) -> None:
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(table))

    for name, strategy in FOUR.items():
        table = recipe(folder, family_folders["t5"], f"run-{name}-t5", strategy, 4)
        write(f"gradients-{name}-t5", table)
        if name == "fsdp_tensor" or everything:
            write(f"run-{name}-t5", table)
        if everything:
            table = recipe(folder, family_folders["v1_1"], f"run-{name}-v1_1", strategy, 4)
            write(f"gradients-{name}-v1_1", table)
    if everything:
        for name, place in OUT_OF_MEMORY_OF_FOUR:
            write(f"memory-{name}-{place}", recipe(folder, family_folders["t5"], "memory", FOUR[name], 4))
        shutil.copytree(together.folder / "stopped-fsdp", folder / "stopped-fsdp", symlinks=True)
        table = recipe(together.folder, family_folders["t5"], "stopped-fsdp", "fsdp_tensor", 4)
        table["run"]["dir"] = str(folder / "stopped-fsdp")
        write("resumed", table)
    stderr = run_ranks(folder, 4)
    return Together(folder, [torch.load(folder / f"seen-{rank}.pt") for rank in range(4)], {}, stderr)


def run_ranks(folder: Path, count: int) -> str:
    ended = start_ranks(several_processes.run_rank, folder, count=count, seconds=300)
    told = "".join(one.stderr for one in ended)
    assert not any(one.returncode for one in ended), told
    return told


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", SEVERAL)
def test_gradients_are_those_of_one_process(together, strategy, family):
    """With uneven targets, accumulation, and clipping by the norm of all of them."""
    expected = together.alone[f"gradients-{family}"]
    for seen in together.seen:
        found = seen[f"gradients-{strategy}-{family}"]
        assert found.keys() == expected.keys()
        worst = max((found[name] - expected[name]).abs().max().item() for name in expected)
        assert worst < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SEVERAL)
def test_gradients_in_bf16_are_those_of_one_process_but_for_rounding(together, strategy):
    expected = together.alone["gradients-bf16"]
    for seen in together.seen:
        found = seen[f"gradients-bf16-{strategy}"]
        for name, one in expected.items():
            assert (found[name] - one).norm() <= 0.1 * one.norm() + 1e-3, name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SEVERAL)
def test_gradients_of_all_losses_are_those_of_one_process(together, strategy):
    expected, plain = together.alone["gradients-losses"], together.alone["gradients-t5"]
    for seen in together.seen:
        found = seen[f"gradients-losses-{strategy}"]
        assert max((found[name] - expected[name]).abs().max().item() for name in expected) < 1e-6
    assert max((plain[name] - expected[name]).abs().max().item() for name in expected) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kind"), DISTILLED)
def test_gradients_of_a_distillation_are_those_of_one_process(together, strategy, kind):
    expected, plain = together.alone[f"gradients-{kind}"], together.alone["gradients-t5"]
    for seen in together.seen:
        found = seen[f"gradients-{kind}-{strategy}"]
        assert max((found[name] - expected[name]).abs().max().item() for name in expected) < 1e-6
    assert max((plain[name] - expected[name]).abs().max().item() for name in expected) > 1e-3


@pytest.mark.slow
def test_the_block_of_a_stage_that_is_not_finite_is_named(together):
    first, second = (seen["broken"] for seen in together.seen)
    words = r"NumericError 5: step 1: loss nan, first in decoder.block.0; examples q\d+, q\d+\. The weights were not"
    assert sorted([first, second])[1] == "ReportedByOtherRankError 5: " and re.match(words, min(first, second))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "place"), OUT_OF_MEMORY)
def test_when_one_process_runs_out_of_memory_all_repeat_the_step_with_less(together, strategy, place):
    expected = together.alone["gradients-t5"]
    for seen in together.seen:
        found = seen[f"memory-{strategy}-{place}"]
        assert max((found[key] - expected[key]).abs().max().item() for key in expected) < 1e-6


@pytest.mark.release
@pytest.mark.parametrize(("name", "place"), OUT_OF_MEMORY_OF_FOUR)
def test_when_one_of_four_processes_runs_out_of_memory_all_repeat_the_step(four_together, name, place):
    expected = four_together.alone["gradients-t5"]
    for seen in four_together.seen:
        found = seen[f"memory-{name}-{place}"]
        assert max((found[key] - expected[key]).abs().max().item() for key in expected) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("family", mark(FAMILIES, "t5"))
@pytest.mark.parametrize("name", FOUR)
def test_gradients_of_four_processes_are_those_of_one(four_together, name, family):
    expected = four_together.alone[f"gradients-{family}"]
    for seen in four_together.seen:
        found = seen[f"gradients-{name}-{family}"]
        assert found.keys() == expected.keys()
        assert max((found[key] - expected[key]).abs().max().item() for key in expected) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", mark(FOUR, "fsdp_tensor"))
def test_a_run_of_four_processes_is_that_of_one(four_together, together, name):
    folder = four_together.folder / f"run-{name}-t5"
    check_same_run(rundir.read_run(folder), four_together.alone["t5"], world_size=4)
    saved = load_file(folder / "model/model.safetensors")
    for key, weight in load_file(together.folder / "alone-t5/model/model.safetensors").items():
        torch.testing.assert_close(saved[key], weight, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", mark(FAMILIES, "t5"))
@pytest.mark.parametrize("strategy", SEVERAL)
def test_a_run_is_that_of_one_process(together, strategy, family):
    ours = rundir.read_run(together.folder / f"run-{strategy}-{family}")
    check_same_run(ours, together.alone[family], world_size=2)
    assert replace(ours.machine.strategy, block_seconds=()) == StrategyFacts(strategy, 2, ("cpu", "cpu"))
    assert len(ours.machine.strategy.block_seconds) == (4 if strategy == "pipeline" else 0)
    waits = [step.phase_seconds.get("bubble", 0.0) > 0 for step in ours.steps]
    assert waits == [strategy == "pipeline"] * NUM_STEPS
    table = "".join(str(part) for part in build_step_time_section(ours).parts)
    assert ("bubble: waiting for another pipeline stage" in table) == (strategy == "pipeline")


def check_same_run(ours: Run, alone: Run, *, world_size: int) -> None:
    """The same losses, counts, scores and predictions, and telemetry of every rank."""
    assert [step.loss for step in ours.steps] == pytest.approx([step.loss for step in alone.steps], rel=1e-6)
    counts = ("step", "num_input_tokens", "num_target_tokens", "num_examples_seen", "encoder_flops")
    found, expected = ([[getattr(step, name) for name in counts] for step in run.steps] for run in (ours, alone))
    assert found == expected
    assert {step.world_size for step in ours.steps} == {world_size}
    for found, expected in zip(ours.evals, alone.evals, strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        same = ("scores", "intervals", "num_examples", "rates")
        assert [getattr(found, key) for key in same] == [getattr(expected, key) for key in same]
    assert {line.id for line in ours.predictions["eval-5"]} == {f"q{i}" for i in range(100, 112)}
    assert ours.status.state == "finished" and {line.rank for line in ours.telemetry} == set(range(world_size))


@pytest.mark.slow
@pytest.mark.parametrize("family", mark(FAMILIES, "t5"))
@pytest.mark.parametrize("strategy", SEVERAL)
def test_what_is_saved_is_the_whole_plain_model(together, strategy, family):
    ours, alone = (together.folder / name for name in (f"run-{strategy}-{family}", f"alone-{family}"))
    found, expected = (load_file(run / "model/model.safetensors") for run in (ours, alone))
    assert found.keys() == expected.keys()
    saved, states = zip(*(read_saved(run / f"checkpoints/{NUM_STEPS}") for run in (ours, alone)), strict=True)
    assert saved[0].keys() == saved[1].keys()
    for one, other in ((found, expected), saved):
        for name in other:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=2e-5)
    assert states[0].keys() == states[1].keys()
    for name, state in states[1].items():
        assert {k: v.shape for k, v in states[0][name].items()} == {k: v.shape for k, v in state.items()}


def read_saved(checkpoint: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """The weights and the optimizer's state in a checkpoint of either form."""
    state = torch.load(checkpoint / "state.pt")["optimizer"]["state"]
    if (checkpoint / "model.safetensors").exists():
        return load_file(checkpoint / "model.safetensors"), state
    tensors = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in shards.read_shapes(checkpoint).items()}
    shards.read_tensors(checkpoint, tensors)
    for key, tensor in tensors.items():
        kind, name, *rest = key.split("/")
        if kind == "optimizer":
            state[name][rest[0]] = tensor
    return {key.removeprefix("weights/"): tensors[key] for key in tensors if key.startswith("weights/")}, state


@pytest.mark.slow
def test_each_process_saves_its_own_shards(together):
    """No process gathers the model: each file has about half of weights and state."""
    saved = together.folder / f"run-fsdp-t5/checkpoints/{NUM_STEPS}"
    listed = json.loads((saved / "manifest.json").read_text())["files"]
    assert set(listed) == {".metadata", "__0_0.distcp", "__1_0.distcp", "state.json", "state.pt"}
    assert find_damage(saved) is None
    sizes = [listed[f"__{rank}_0.distcp"]["size"] for rank in (0, 1)]
    assert max(sizes) < 0.6 * sum(sizes) and listed["state.pt"]["size"] < 0.1 * sum(sizes)


@pytest.mark.slow
def test_two_processes_save_and_go_on_under_another_strategy(together):
    done = rundir.read_run(together.folder / "switched")
    assert [step.world_size for step in done.steps] == [2] * 5
    assert [step.loss for step in done.steps] == pytest.approx([s.loss for s in together.alone["t5"].steps], rel=1e-6)
    assert done.machine.strategy == StrategyFacts("tensor", 2, ("cpu", "cpu"))


@pytest.mark.release
def test_two_processes_save_and_four_go_on_under_another_strategy(together, four_together):
    done = rundir.read_run(four_together.folder / "stopped-fsdp")
    assert [step.world_size for step in done.steps] == [2, 2, 4, 4, 4]
    assert [step.loss for step in done.steps] == pytest.approx([s.loss for s in together.alone["t5"].steps], rel=1e-6)


@pytest.mark.slow
def test_checkpoints_are_written_while_several_processes_train(together):
    """The same weights as of a run that waits for each of them."""
    run = together.folder / "background"
    assert [step.loss for step in rundir.read_run(run).steps] == pytest.approx(
        [step.loss for step in together.alone["t5"].steps], rel=1e-6
    )
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["4", "5"]
    assert [find_damage(run / "checkpoints" / step) for step in "45"] == [None, None]
    found, expected = (read_saved(path / "checkpoints/5")[0] for path in (run, together.folder / "run-fsdp-t5"))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.release
def test_two_processes_save_and_three_go_on(together, tmp_path, family_folders):
    """Adafactor, whose state every process holds as a whole."""
    expected = [step.loss for step in together.alone["six"].steps]
    for strategy in ("ddp", "fsdp"):
        run = shutil.copytree(together.folder / "six", tmp_path / strategy, symlinks=True)
        table = in_sixes(together.folder, family_folders["t5"], "six", strategy, 3)
        table["run"]["dir"] = str(run)
        (tmp_path / f"resumed-{strategy}.yaml").write_text(yaml.safe_dump(table))
    run_ranks(tmp_path, 3)
    for strategy in ("ddp", "fsdp"):
        done = rundir.read_run(tmp_path / strategy)
        assert [step.world_size for step in done.steps] == [2, 2, 3, 3, 3]
        assert [step.loss for step in done.steps] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_a_full_disk_of_one_process_is_tried_again_and_then_told_by_one(together):
    first, second = (seen["full"] for seen in together.seen)
    told = {first, second} - {"ReportedByOtherRankError 4: "}
    assert len({first, second}) == 2 and len(told) == 1
    words = (
        r"RunDirError 4: .*checkpoints/2: the checkpoint cannot be written: No space left on device\. .*are whole\.$"
    )
    assert re.match(words, told.pop())
    assert [path.name for path in (together.folder / "full/checkpoints").iterdir()] == ["1"]
    assert "checkpoints/1: the checkpoint cannot be written" in (together.folder / "full/log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", mark(SEVERAL, *RESUMED))
def test_another_number_of_processes_goes_on_as_if_nothing_was(together, strategy, tmp_path):
    """One process began and two went on; two began and were stopped, and one goes on."""
    expected = [step.loss for step in together.alone["t5"].steps]
    resumed = rundir.read_run(together.folder / f"resumed-{strategy}")
    assert [step.world_size for step in resumed.steps] == [1, 1, 2, 2, 2]
    assert [step.loss for step in resumed.steps] == pytest.approx(expected, rel=1e-6)
    stopped = shutil.copytree(together.folder / f"stopped-{strategy}", tmp_path / "run", symlinks=True)
    measured = rundir.read_machine(stopped).strategy.block_seconds
    done = train(str(stopped), {"launch.nproc": 1}, resume=True, quiet=True)
    assert [step.world_size for step in done.steps] == [2, 2, 1, 1, 1]
    assert done.machine.strategy.block_seconds == measured
    assert [step.loss for step in done.steps] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", mark(SEVERAL, "fsdp"))
def test_adafactor_needs_whole_matrices_and_gets_them(together, strategy):
    ours, alone = rundir.read_run(together.folder / f"adafactor-{strategy}"), together.alone["adafactor"]
    assert [step.loss for step in ours.steps] == pytest.approx([step.loss for step in alone.steps], rel=1e-6)
    weights = [
        read_saved(together.folder / name / f"checkpoints/{NUM_STEPS}")[0]
        for name in (f"adafactor-{strategy}", "alone-adafactor")
    ]
    for name, expected in weights[1].items():
        torch.testing.assert_close(weights[0][name], expected, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", mark(SEVERAL, *RESUMED))
def test_a_signal_to_one_process_stops_all_at_the_same_step(together, strategy):
    first, second = (seen[f"stopped-{strategy}"] for seen in together.seen)
    assert first.startswith("InterruptedRunError 143: stopped by SIGTERM after step 2 of 5; saved.")
    assert second == "ReportedByOtherRankError 143: "


@pytest.mark.slow
@pytest.mark.parametrize("strategy", mark(SEVERAL, "fsdp"))
def test_early_stopping_ends_all_processes_at_the_same_step(together, strategy):
    ours, alone = rundir.read_run(together.folder / f"early-{strategy}"), together.alone["early"]
    assert alone.status.step == 3 and "(train.early_stopping)" in alone.status.why
    assert (ours.status.state, ours.status.step, ours.status.why) == ("finished", alone.status.step, alone.status.why)
    assert [e.step for e in ours.evals] == [e.step for e in alone.evals]


@pytest.mark.slow
def test_warnings_are_hidden_only_while_a_run_lasts(together):
    assert not any("FSDP2" in message for seen in together.seen for message in seen["filters"])
    assert "returned a view" not in together.stderr


@pytest.mark.slow
def test_errors_are_told_once_and_by_all_who_have_another(together):
    first, second = together.seen
    assert sorted([first["same"], second["same"]]) == ["DataError 3: bad file", "ReportedByOtherRankError 3: "]
    other = {first["different"], second["different"]}
    assert other in (
        {"DataError 3: bad file 0", "DataError 3: process 1: bad file 1"},
        {"DataError 3: process 0: bad file 0", "DataError 3: bad file 1"},
    )
    assert (first["lost"], second["lost"]) == ("ReportedByOtherRankError 3: ", "DataError 3: no more")
    assert first["alike"] == second["alike"] == "ZeroDivisionError"


def test_ranks_of_tensor_parallelism_draw_masks_of_their_own():
    """Equal masks would drop the same features of all ranks' shares together."""

    def draw(rank: int) -> tuple[list[float], list[float]]:
        module, mesh = torch.nn.Dropout(0.5), SimpleNamespace(device_type="cpu", get_local_rank=lambda: rank)
        module.__dict__["group"] = SimpleNamespace(mesh=mesh)
        torch.manual_seed(1)
        with draw_own_masks(module):
            own = module(torch.ones(64)).tolist()
        return own, torch.rand(4).tolist()

    (first, after_first), (second, after_second) = draw(0), draw(1)
    assert first == draw(0)[0] and first != second and after_first == after_second
