"""Estimates of memory and time: worked numbers, the tensors of real steps, properties, the choice, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from fivetune import cli
from fivetune.config import load_config
from fivetune.errors import ModelError
from fivetune.fleet.estimation import recipe as estimation_recipe
from fivetune.fleet.estimation.choice import (
    Change,
    Refusal,
    choose_estimate,
    estimate_layout,
    estimate_strategies,
    find_change,
    list_layouts,
)
from fivetune.fleet.estimation.communication import (
    Fabric,
    Group,
    compute_all_gather_seconds,
    compute_all_reduce_seconds,
    compute_bandwidth,
    compute_send_seconds,
    make_group,
)
from fivetune.fleet.estimation.memory import (
    BLOCK_ROWS,
    CHUNK_LOGITS,
    CHUNK_TILE,
    CUDA_CHUNKS,
    Part,
    count_bucket_share,
    estimate_memory,
    list_parts,
    list_stages,
)
from fivetune.fleet.estimation.recipe import (
    build_machine,
    build_workload,
    find_device,
    find_local_device,
    suggest_strategy,
)
from fivetune.fleet.estimation.speed import Machine, estimate_step_time
from fivetune.fleet.estimation.workload import BUCKET_BYTES, Layout, Workload
from fivetune.machine.telemetry import limits
from fivetune.machine.telemetry.accelerators import find_accelerator
from fivetune.model import attention, loss
from fivetune.model.flat import compute_flat_losses
from fivetune.model.shapes import KNOWN_SHAPES, ModelShape, build_model_config, find_known_shape, read_shape
from fivetune.rundir.records import DeviceSample
from fivetune.training.strategies import _buckets
from fivetune.types import Batch

GOLDEN = Path(__file__).parent / "golden" / "squad_t5_base.json"
TINY = ModelShape(8, 4, 16, 2, 1, 1, 32, is_gated_act=False, is_tied=True)
LARGE = KNOWN_SHAPES["t5-11b"]
H100 = build_machine(find_device("h100"), "bf16", 8)


def make_work(shape: ModelShape = TINY, **changes: Any) -> Workload:
    values = {"batch_size": 1, "examples_per_step": 1, "num_inputs": 4, "num_targets": 2, **changes}
    return Workload(shape, **values)


def find_part(work: Workload, name: str, layout: Layout | None = None) -> Part:
    (part,) = [part for part in list_parts(work, layout or Layout("single")) if part.name == name]
    return part


# --- shapes ---


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("t5-base", "t5"),
        ("flan-t5-small", "t5"),
        ("mt5-small", "mt5"),
        ("umt5-small", "umt5"),
        ("byt5-small", "t5"),
        ("t5-11b", "t5"),
    ],
)
def test_known_shapes_have_the_weights_that_transformers_builds(name, kind):
    transformers: Any = import_module("transformers")
    shape = KNOWN_SHAPES[name]
    settings = transformers.AutoConfig.for_model(**build_model_config(shape, kind))
    with torch.device("meta"):
        model = transformers.AutoModelForSeq2SeqLM.from_config(settings)
    own_head = 0 if shape.is_tied else shape.table_size  # a new model is always tied
    assert sum(parameter.numel() for parameter in model.parameters()) + own_head == shape.num_weights


def test_a_folder_goes_before_the_table(tmp_path):
    folder = tmp_path / "t5-base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(build_model_config(TINY, "t5")))
    assert read_shape(str(folder)) == TINY
    assert read_shape("google-t5/t5-base") == find_known_shape("t5-base")
    assert read_shape("t5-nano").num_weights == 919_296


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "t5", "num_layers": 2, "d_model": "x"}', 'd_model is "x", not a number of at least 1'),
        ('{"model_type": "t5", "num_layers": 2, "d_model": 0}', "d_model is 0, not a number of at least 1"),
        ('{"model_type": "bert"}', "model_type 'bert' is not of the T5 family"),
        ('{"model_type', "not a JSON file"),
    ],
)
def test_an_unusable_config_is_named(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError) as raised:
        read_shape(None, str(path))
    assert str(path) in str(raised.value) and message in str(raised.value)


# --- memory: worked numbers ---


def test_constants_are_those_of_the_code_that_is_estimated():
    assert CHUNK_LOGITS == loss.MAX_CHUNK_LOGITS == loss.MAX_SAVED_LOGITS
    assert (CUDA_CHUNKS, CHUNK_TILE) == (loss.CUDA_CHUNKS, loss.CHUNK_TILE)
    assert (BLOCK_ROWS, BUCKET_BYTES) == (attention.MAX_BLOCK_ROWS, _buckets.BUCKET_BYTES)


def test_an_encoder_block_on_a_gpu():
    # 4 tokens, d 8, i 8, f 16, 2 heads, 2 bytes: two layers of 4 d + 4 + 2 d; 4 i numbers; log-sum-exp; 2 f numbers
    part = find_part(make_work(), "encoder block 0")
    assert part.saved == 4 * (2 * (32 + 4 + 16) + 4 * 2 * 8 + 4 * 2 + 2 * 2 * 16)
    assert part.sizes == (64, 64, 64, 64, 128, 128, 8, 8, 64)  # q, k, v, o, wi, wo, two norms, 32 buckets of 2 heads
    assert part.copies == 2 * (4 * 64 + 2 * 128 + 16)  # autocast's copies of all but the table of biases
    assert part.inputs == 4 * 8 * 4


def test_two_ranks_halve_what_heads_and_features_take():
    alone, halved = (find_part(make_work(), "encoder block 0", Layout("tensor", n, heads=n)) for n in (1, 2))
    assert halved.sizes == (32, 32, 32, 32, 64, 64, 8, 8, 32)
    assert alone.saved - halved.saved == 4 * (4 * 2 * 8 + 4 * 2 + 2 * 2 * 16) / 2


def test_the_head_saves_few_logits_and_computes_many_again():
    few, many = find_part(make_work(), "head"), find_part(make_work(num_targets=2**23), "head")
    assert few.saved == 2 * 2 * 32  # 2 targets, 32 tokens of the vocabulary, 2 bytes
    assert many.saved == 0
    # 8 chunks of 2^24 logits: 2 bytes each of it and of the one before, 8 of the softmax; gradients of hidden and table
    assert many.temporary == 12 * 8 * 2**24 + 2 * 8 * 2**23 + 2 * 32 * 8


def test_large_gradients_are_sent_in_place():
    large = BUCKET_BYTES // 4
    assert count_bucket_share([Part("x", (large, 10, 20))]) == pytest.approx(30 / (large + 30))
    assert count_bucket_share([Part("x", (large, large + 1))]) == 0


# --- memory: the tensors of a real step ---


@pytest.mark.parametrize("gated", [False, True], ids=["relu", "gated"])
@pytest.mark.parametrize("lengths", [(96, 24), (80, 72), (20, 30)], ids=["short targets", "long targets", "blocks"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_saved_tensors_of_the_flat_forward(gated, lengths, dropout):
    transformers: Any = import_module("transformers")
    torch.manual_seed(0)
    shape = ModelShape(64, 32, 256, 2, 2, 2, 512, is_gated_act=gated, is_tied=True)
    settings = transformers.AutoConfig.for_model(
        **{**build_model_config(shape, "t5"), "dropout_rate": dropout, "decoder_start_token_id": 0}
    )
    model = transformers.AutoModelForSeq2SeqLM.from_config(settings).train()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            kept.append(tensor)
        return tensor

    inputs, labels = (torch.randint(3, 512, (4 * n,)) for n in lengths)
    bounds = [torch.arange(5) * n for n in lengths]
    batch = Batch(inputs, labels, bounds[0], bounds[1], ids=("a", "b", "c", "d"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = compute_flat_losses(model, batch)
    assert losses.requires_grad
    work = Workload(shape, 4, 4, *lengths, matmul_bytes=4, dropout=dropout, on_gpu=False)
    predicted = sum(part.saved + part.copies for part in list_parts(work, Layout("single")))
    assert predicted == pytest.approx(sum(saved.values()), rel=0.02)


# --- memory: properties ---


def test_fsdp_falls_with_devices_and_ddp_does_not():
    work = make_work(LARGE, examples_per_step=64, num_inputs=512, num_targets=64)
    sizes = (8, 16, 32, 64)
    sharded = [estimate_memory(work, Layout("fsdp", n, shards=n)).peak for n in sizes]
    assert sharded == sorted(sharded, reverse=True) and len(set(sharded)) == len(sizes)
    held = [estimate_memory(work, Layout("fsdp", n, shards=n)).state * n for n in sizes]
    assert held == [8.0 * LARGE.num_weights] * len(sizes)
    assert {estimate_memory(work, Layout("ddp", n)).weights for n in sizes} == {4.0 * LARGE.num_weights}
    assert min(estimate_memory(work, Layout("ddp", n)).peak for n in sizes) > 12 * LARGE.num_weights


@pytest.mark.parametrize("layout", [Layout("single"), Layout("ddp", 4), Layout("fsdp", 4, shards=4)], ids=str)
def test_what_lowers_memory(layout):
    work = make_work(LARGE, batch_size=4, examples_per_step=32, num_inputs=512, num_targets=64)
    peak = estimate_memory(work, layout).peak
    assert estimate_memory(replace(work, recompute=True), layout).peak < peak
    assert estimate_memory(replace(work, batch_size=1), layout).peak < peak
    assert estimate_memory(replace(work, num_inputs=256), layout).peak < peak
    assert estimate_memory(replace(work, state_bytes=0.1), layout).peak < peak
    if layout.shards > 1:
        assert estimate_memory(work, replace(layout, reduce_once=False)).peak < peak
        assert estimate_memory(work, replace(layout, offload=True)).peak < peak


def test_the_kinds_add_up_to_the_peak():
    memory = estimate_memory(make_work(LARGE), Layout("fsdp", 8, shards=8))
    kinds = (memory.weights, memory.gradients, memory.state, memory.activations, memory.buffers)
    assert memory.peak == sum(kinds) and min(kinds) >= 0


def test_stages_hold_their_blocks():
    work = make_work(KNOWN_SHAPES["t5-base"], examples_per_step=8, num_inputs=400, num_targets=400)
    alone, two, four = (estimate_memory(work, Layout("pipeline", n, stages=n)) for n in (1, 2, 4))
    assert alone.weights > two.weights > four.weights > alone.weights / 4  # two stages hold the embedding


# --- communication ---


def test_collectives_with_worked_numbers():
    fabric, inside = Fabric(link=100, network=10, devices_per_node=8), Group(4, 4)
    assert compute_bandwidth(inside, fabric) == 80  # 80 % of a link
    assert compute_all_gather_seconds(800, inside, fabric) == pytest.approx(2 * 5e-6 + 3 / 4 * 800 / 80)
    assert compute_all_reduce_seconds(800, inside, fabric) == pytest.approx(6 * 5e-6 + 2 * 3 / 4 * 800 / 80)
    assert compute_all_reduce_seconds(800, Group(1, 1), fabric) == 0
    assert compute_all_gather_seconds(800, Group(1, 1), fabric) == 0
    # 16 ranks on two nodes use the network of 8; one of each node that of one
    assert compute_bandwidth(make_group(16, fabric), fabric) == 64
    assert compute_bandwidth(make_group(2, fabric, stride=8), fabric) == 8
    assert compute_all_gather_seconds(800, inside, fabric, num_calls=2) == pytest.approx(4 * 5e-6 + 7.5)
    assert compute_send_seconds(800, make_group(16, fabric), fabric) == pytest.approx(15e-6 + 100)


def test_trees_sum_small_tensors_of_many_ranks():
    fabric = Fabric(1e9, 1e9, 1)
    assert compute_all_reduce_seconds(8, Group(1024, 1), fabric) == pytest.approx(2 * 10 * 15e-6, rel=1e-3)


# --- time ---


def test_step_time_with_worked_numbers():
    work = make_work(examples_per_step=4)
    machine = Machine(1e9, flops=work.count_flops(4) / 6, bandwidth=28 * TINY.num_weights, fabric=Fabric(1e9, 1e9, 8))
    alone = estimate_step_time(work, Layout("single"), machine)
    assert alone is not None
    assert (alone.compute, alone.bubble, alone.exposed, alone.optimizer) == pytest.approx((6, 0, 0, 1))
    again = estimate_step_time(replace(work, recompute=True), Layout("single"), machine)
    assert again is not None and again.compute == pytest.approx(8)
    two = estimate_step_time(work, Layout("ddp", 2), machine)
    assert two is not None and two.compute == pytest.approx(3)
    assert two.exposed == 0 and two.hidden > 0
    stages = estimate_step_time(work, Layout("pipeline", 2, stages=2), machine)
    assert stages is not None and stages.bubble == pytest.approx(stages.compute / 4)
    assert estimate_step_time(work, Layout("single"), replace(machine, flops=None)) is None


def test_a_slow_network_exposes_the_communication():
    work = make_work(KNOWN_SHAPES["t5-base"], examples_per_step=16, num_inputs=512, num_targets=64)
    fast, slow = (
        estimate_step_time(work, Layout("ddp", 16), replace(H100, fabric=Fabric(450e9, n, 8))) for n in (50e9, 1e8)
    )
    assert fast is not None and slow is not None
    assert slow.exposed > fast.exposed and slow.compute == fast.compute


@pytest.mark.parametrize("name", ["t5-base", "mt5-small", "umt5-small"])
def test_one_rank_holds_the_weights_of_the_model(name):
    (parts,) = list_stages(make_work(KNOWN_SHAPES[name]), Layout("single"))
    assert sum(part.num_weights for part in parts) == KNOWN_SHAPES[name].num_weights


def test_copies_of_a_pipeline_sum_gradients_when_nothing_computes():
    work = make_work(KNOWN_SHAPES["t5-base"], examples_per_step=16, num_inputs=512, num_targets=64)
    one, two = (
        estimate_step_time(replace(work, examples_per_step=8 * n), Layout("pipeline", 2 * n, stages=2), H100)
        for n in (1, 2)
    )
    assert one is not None and two is not None and one.hidden == two.hidden == 0
    held = 4 * max(sum(part.num_weights for part in parts) for parts in list_stages(work, Layout("x", 2, stages=2)))
    assert two.exposed - one.exposed > held / (0.8 * H100.fabric.link)  # two ranks send every gradient once


def test_weights_that_ranks_replicate_are_updated_and_summed_by_each():
    # mt5-small: 256 M of 300 M weights are embedding and head, which two ranks of a tensor-parallel group hold whole
    shape = KNOWN_SHAPES["mt5-small"]
    work = make_work(shape, examples_per_step=2)
    machine = replace(H100, flops=1e30)  # hides nothing
    alone, tensor, stages = (
        estimate_step_time(work, layout, machine)
        for layout in (Layout("single"), Layout("tensor", 4, heads=2), Layout("pipeline", 4, stages=2))
    )
    assert alone is not None and tensor is not None and stages is not None
    assert tensor.optimizer > 0.9 * alone.optimizer  # divided alike it would be half
    assert stages.optimizer > 0.5 * alone.optimizer
    one_copy = estimate_step_time(replace(work, examples_per_step=1), Layout("tensor", 2, heads=2), machine)
    assert one_copy is not None  # differs by the all-reduce alone, in which each of two copies sends its tables once
    assert tensor.exposed - one_copy.exposed > 4 * 2 * shape.table_size / (0.8 * H100.fabric.link)


# --- the choice ---


def test_the_fastest_that_fits_is_taken_and_the_simplest_on_a_tie():
    small = make_work(KNOWN_SHAPES["t5-base"], batch_size=16, examples_per_step=1024, num_inputs=512, num_targets=64)
    found = estimate_strategies(small, H100, 8)
    chosen = choose_estimate(found)
    assert chosen is not None and chosen.layout.strategy == "ddp"
    assert [estimate.layout.strategy for estimate in found][:3] == ["single", "ddp", "fsdp"]
    same = [replace(found[2], time=found[1].time), replace(found[1], layout=found[2].layout)]
    assert choose_estimate(same) is same[0]
    large = replace(small, shape=LARGE, examples_per_step=512)
    chosen = choose_estimate(estimate_strategies(large, H100, 64))
    assert chosen is not None and chosen.layout.shards > 1


def test_what_cannot_share_a_batch_is_no_candidate():
    found = estimate_layout(make_work(examples_per_step=4), Layout("ddp", 8), H100)
    assert found.obstacle == "train.global_batch_size 4 is not a multiple of 8 copies" and not found.fits


def test_a_run_that_does_not_fit_gets_a_change_that_does():
    work = make_work(LARGE, batch_size=8, examples_per_step=128, num_inputs=512, num_targets=97)
    machine = build_machine(find_device("l4"), "bf16", 8)
    assert choose_estimate(estimate_strategies(work, machine, 8)) is None
    change = find_change(work, machine, 8)
    assert isinstance(change, Change) and change.estimate.fits and change.settings["strategy.name"] == "fsdp"
    refused = find_change(replace(work, num_inputs=10**8), machine, 8)
    assert refused == Refusal(128, 256, "train.global_batch_size 128 is not a multiple of 256 copies")


def test_groups_that_share_heads_stay_inside_a_node():
    machine = build_machine(find_device("h100"), "bf16", 12, devices_per_node=6)
    work = make_work(KNOWN_SHAPES["t5-base"], examples_per_step=12)
    assert {layout.heads for layout in list_layouts(work, machine, 12)} == {1, 2, 3, 6}  # 4 would cross the border


def test_a_change_uses_whole_nodes():
    machine = build_machine(find_device("l4"), "bf16", 3)  # 8 in a node
    work = make_work(LARGE, examples_per_step=96, num_inputs=512, num_targets=97)
    tried = []
    assert find_change(work, machine, 3, lambda layout: tried.append(layout.world) or "no") == Refusal(0, 3, "no")
    assert set(tried) == {3, 6, 24, 48, 96}


def test_nothing_is_tried_twice():
    tried: list[Layout] = []
    work = make_work(LARGE, examples_per_step=1, recompute=True, num_inputs=512, num_targets=64)
    full = replace(H100, memory_bytes=1)
    find_change(work, full, 1, lambda layout: tried.append(layout) or "")
    assert tried == [Layout("single")]


# --- devices ---


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("Tesla V100-SXM2-16GB", 16),
        ("Tesla V100-SXM2-32GB", 32),
        ("a100-40gb", 40),
        ("v100", 32),
        ("NVIDIA H100 64GB HBM3", 64),
    ],
)
def test_the_size_in_a_name_counts(name, gib):
    found = find_accelerator(name)
    assert found is not None and found.memory_bytes == gib * 2**30


def test_the_memory_of_a_local_device_is_sampled(monkeypatch):
    samples = (
        DeviceSample(index=0, name="NVIDIA H100 80GB HBM3", memory_total_bytes=80 * 2**30),
        DeviceSample(index=1, cuda_index=0, name="NVIDIA A100-SXM4", memory_total_bytes=39 * 2**30),
    )
    monkeypatch.setattr("fivetune.machine.telemetry.nvml.Nvml.sample", lambda self: samples)
    found = find_local_device("auto")
    assert found is not None and (found.memory_bytes, found.bandwidth) == (39 * 2**30, 1555)
    assert find_local_device("cpu") is None


def test_the_limit_of_a_container_is_the_memory_of_a_cpu(monkeypatch, tmp_path):
    for name, text in (("max", "1000000"), ("current", "600000"), ("stat", "anon 1\ninactive_file 50000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(limits, "CGROUP_DIR", tmp_path)
    assert limits.get_host_memory() == (1_000_000, 450_000)
    assert build_machine(None, "fp32", 4).memory_bytes == 250_000
    assert build_machine(None, "fp32", 4, devices_per_node=2).memory_bytes == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert limits.get_host_memory()[0] > 2**28


@pytest.mark.parametrize(
    ("group", "folder", "names"),
    [
        ("4:memory:/docker/a1\n", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
        (
            "4:cpu,memory:/a/b\n0::/\n",
            "memory/a",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
        ("0::/system.slice/job_1/step_0\n", "system.slice/job_1", ("memory.max", "memory.current", "inactive_file")),
    ],
)
def test_the_limit_of_a_job_or_of_an_older_system_counts(monkeypatch, tmp_path, group, folder, names):
    (tmp_path / "own").write_text(group)
    limited = tmp_path / folder
    limited.mkdir(parents=True)
    for name, text in zip(
        (*names[:2], "memory.stat"), ("1000000", "600000", f"{names[2]} 50000\nanon 1\n"), strict=True
    ):
        (limited / name).write_text(text)
    monkeypatch.setattr(limits, "CGROUP_DIR", tmp_path)
    monkeypatch.setattr(limits, "OWN_GROUPS", tmp_path / "own")
    assert limits.get_host_memory() == (1_000_000, 450_000)


# --- the command ---


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["estimate", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_an_adapter_excludes_strategies_that_divide_and_its_savings_are_not_counted(capsys):
    words = ("recipes/squad_t5_base.yaml", "--devices", "8", "--device", "h100", "--model.adapter.name", "lora")
    code, out, _ = run(capsys, *words, "--json")
    found = json.loads(out)
    fitting = {one["strategy"] for one in found["strategies"] if not one["obstacle"]}
    assert code == 0 and fitting == {"single", "ddp"}
    assert any(
        line.startswith("All weights are counted as trained in fp32: model.adapter") for line in found["assumptions"]
    )


def test_the_json_of_a_shipped_recipe(capsys):
    code, out, _ = run(capsys, "recipes/squad_t5_base.yaml", "--devices", "8", "--device", "h100", "--json")
    found, kept = json.loads(out), json.loads(GOLDEN.read_text())
    assert code == 0
    assert found.keys() == kept.keys()
    for one, other in zip(found.pop("strategies"), kept.pop("strategies"), strict=True):
        assert {k: v for k, v in one.items() if not isinstance(v, float)} == {
            k: v for k, v in other.items() if not isinstance(v, float)
        }
        numbers = {k: v for k, v in other.items() if isinstance(v, float)}
        assert {k: one[k] for k in numbers} == pytest.approx(numbers)
    assert found == kept


@pytest.mark.parametrize("model", ["t5-3b", "google/mt5-xxl", "google/byt5-xl", "google/ul2"])
def test_a_table_fits_a_narrow_terminal(capsys, monkeypatch, model):
    monkeypatch.setenv("COLUMNS", "80")
    words = ["--model.path", model, "--train.global_batch_size", "512"]
    code, out, _ = run(capsys, "squad_t5_base", "--devices", "64", "--device", "h100", *words)
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines[: lines.index("Assumptions") - 2])) <= 80
    assert "--launch.nnodes 8 --launch.nproc 8 --strategy.name" in out or "one device" in out


def test_a_cpu_has_memory_and_no_times(capsys):
    code, out, _ = run(capsys, "quickstart", "--devices", "2", "--device", "cpu")
    assert code == 0 and "Take ddp: the simplest that fits" in out and "n/a" in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--devices 0 --device h100", 2, "--devices: 0 is not possible. Allowed: above 0. Try --devices 8."),
        ("--devices -3 --device h100", 2, "--devices: -3 is not possible"),
        ("--devices 8 --device h1000", 2, "--device: there is no 'h1000'. Did you mean h100 or v100? Allowed: a10, "),
        ("--devices 8 --device h100 --link=-1", 2, "--link: -1.0 is not possible"),
        ("--devices 8 --device h100 --mfu 1.5", 2, "--mfu: 1.5 is more than the peak"),
        ("--devices 8 --device h100 --model.path nosuch", 4, "nosuch: neither a local folder nor a model whose shape"),
        ("--devices 8 --device v100 --train.precision bf16", 2, "train.precision: V100 SXM2 does not support bf16"),
        ("--devices 8 --device h100 --data.max_input_tokens null", 2, "data.max_input_tokens: not set"),
        ("--device h100", 2, "the following arguments are required: --devices"),
    ],
)
def test_mistakes_are_one_line(capsys, words, code, message):
    found, out, err = run(capsys, "squad_t5_base", *words.split())
    assert (found, out) == (code, "") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("words", ["--devices 12", "--devices 8 --devices-per-node 3"])
def test_devices_that_are_no_whole_nodes_are_refused(capsys, words):
    code, out, err = run(capsys, "squad_t5_base", "--device", "h100", *words.split())
    assert (code, out) == (2, "") and "are not whole nodes of" in err


BIG = ("--device", "h100", "--model.path", "t5-11b", "--optimizer.name", "adamw")


def test_settings_that_exclude_the_strategies_are_the_verdict(capsys):
    _, out, _ = run(capsys, "squad_t5_base", "--devices", "8", *BIG, "--train.precision", "fp16")
    assert (
        "None fits. With fsdp on 8 devices: train.precision fp16 adapts the loss scale" in out and "Shorten" not in out
    )
    words = ("--train.batch_size", "1", "--train.global_batch_size", "1")
    _, out, _ = run(capsys, "squad_t5_base", "--devices", "1", *BIG, *words)
    assert (
        "recomputation and micro-batches of one example. With fsdp on 2 devices: train.global_batch_size 1 is " in out
    )
    _, out, _ = run(capsys, "squad_t5_base", "--devices", "128", *BIG, "--data.max_input_tokens", "90000000")
    assert "Shorten the examples" not in out and "offload on 128 devices. With fsdp on 256 devices: train.global" in out


@pytest.mark.parametrize("num", ["2", "8"])
def test_a_layout_that_needs_a_batch_size_prints_one(capsys, num):
    words = ("--train.batch_size", "auto", "--train.global_batch_size", "128", "--json")
    _, out, _ = run(capsys, "squad_t5_base", "--devices", num, *BIG, *words)
    found = json.loads(out)
    settings = found["choice"] or found["change"]
    assert settings["train.batch_size"] == 1 and "--train.batch_size 1" in found["verdict"]
    ddp = next(one for one in found["strategies"] if one["strategy"] == "ddp")
    assert ddp["settings"] == {"strategy.name": "ddp"}  # supports auto


def test_options_of_a_strategy_that_are_not_used_are_named(capsys):
    words = ("--strategy.name", "pipeline", "--strategy.schedule", "gpipe", "--json")
    _, out, _ = run(capsys, "squad_t5_base", "--devices", "8", "--device", "h100", *words)
    assert any(
        "options of strategy pipeline are not used: schedule gpipe. " in line for line in json.loads(out)["assumptions"]
    )


def test_a_missing_recipe_is_named(capsys):
    assert run(capsys, "nosuch", "--devices", "8", "--device", "h100")[0] == 2


# --- several processes without a strategy ---


def train_words(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """The words with which `fivetune train` starts its processes."""
    started: list[list[str]] = []
    monkeypatch.setattr(
        "fivetune.distributed.processes.start_processes", lambda words, **_: started.append(list(words)) or 0
    )
    assert cli.main(["train", "quickstart", "--device", "cpu", *words]) == 0
    return started[0]


def test_ddp_is_proposed_if_the_model_fits(monkeypatch, capsys):
    words = train_words(monkeypatch, "--launch.nproc", "2")
    assert words[-2:] == ["--strategy.name", "ddp"]
    assert capsys.readouterr().out.startswith("strategy: ddp, which fits: ")
    words = train_words(monkeypatch, "--quiet", "--launch.nproc", "2")
    assert words[-2:] == ["--strategy.name", "ddp"] and capsys.readouterr().out == ""


def test_a_strategy_that_is_given_stays(monkeypatch, capsys):
    words = train_words(monkeypatch, "--launch.nproc", "2", "--strategy.name", "fsdp")
    assert words.count("--strategy.name") == 1 and capsys.readouterr().out == ""


def test_another_strategy_is_proposed_if_ddp_does_not_fit(monkeypatch):
    config = load_config(
        "squad_t5_base",
        {"model.path": "t5-11b", "optimizer.name": "adamw", "device": "cuda", "train.global_batch_size": 128},
    )
    monkeypatch.setattr(estimation_recipe, "find_local_device", lambda requested: find_device("h100"))
    settings, reason = suggest_strategy(config, 1, 8)
    assert settings["strategy.name"] == "fsdp_tensor" and "ddp needs 242" in reason
    monkeypatch.setattr(estimation_recipe, "find_local_device", lambda requested: find_device("l4"))
    assert "no strategy fits" in suggest_strategy(config, 1, 8)[1]
    unknown = config.model_copy(update={"model": config.model.model_copy(update={"path": "unknown/model"})})
    settings, reason = suggest_strategy(unknown, 1, 8)
    assert settings == {"strategy.name": "ddp"} and "memory cannot be estimated" in reason


def test_a_proposal_counts_nodes_and_their_processes(monkeypatch, tmp_path):
    config = load_config("quickstart", {"device": "cpu"})
    seen = []
    build = estimation_recipe.build_machine
    monkeypatch.setattr(estimation_recipe, "build_machine", lambda *a, **k: seen.append(build(*a, **k)) or seen[-1])
    monkeypatch.setattr(estimation_recipe, "get_host_memory", lambda: (8 * 2**30, 0))
    _, reason = suggest_strategy(config, 4, 2)
    assert seen[0].memory_bytes == 4 * 2**30 and seen[0].fabric.devices_per_node == 2 and "of 3.6 GiB" in reason


def test_nodes_and_processes_of_a_command_reach_the_proposal(monkeypatch):
    seen: list[object] = []

    def suggest(config: object, *counts: int) -> tuple[dict[str, object], str]:
        seen.extend(counts)
        return {"strategy.name": "ddp"}, "a reason"

    monkeypatch.setattr(estimation_recipe, "suggest_strategy", suggest)
    train_words(monkeypatch, "--launch.nnodes", "2", "--launch.nproc", "3", "--train.global_batch_size", "192")
    assert seen == [2, 3]


def test_a_proposal_names_the_setting_that_excludes_others(monkeypatch):
    config = load_config(
        "squad_t5_base", {"model.path": "t5-11b", "optimizer.name": "adamw", "train.precision": "fp16"}
    )
    monkeypatch.setattr(estimation_recipe, "find_local_device", lambda requested: find_device("h100"))
    settings, reason = suggest_strategy(config, 1, 8)
    assert settings == {"strategy.name": "ddp"} and "train.precision fp16 adapts the loss scale" in reason


@pytest.mark.parametrize("layout", [Layout("single"), Layout("ddp", 2), Layout("fsdp", 2, shards=2, reduce_once=True)])
def test_the_weights_of_a_teacher_are_whole_on_every_rank(layout):
    settings = {"model.path": "t5-small", "distill.teacher": "t5-base"}
    with_answers, with_logits = (
        build_workload(load_config("squad_t5_base", {**settings, "distill.kind": kind}), find_device("h100"))
        for kind in ("sequence", "logits")
    )
    alone, taught = (estimate_memory(work, layout) for work in (with_answers, with_logits))
    assert taught.weights - alone.weights == 4 * KNOWN_SHAPES["t5-base"].num_weights
    assert taught.peak - alone.peak == taught.weights - alone.weights


@pytest.mark.parametrize("layout", [Layout("single"), Layout("tensor", 2, heads=2), Layout("pipeline", 2, stages=2)])
def test_two_passes_take_what_twice_the_examples_take(layout):
    once = make_work(LARGE, batch_size=4, examples_per_step=8, num_inputs=64, num_targets=16)
    twice = replace(once, batch_size=8, examples_per_step=16)
    passes = replace(once, passes=2)
    assert estimate_memory(passes, layout).peak == estimate_memory(twice, layout).peak
    machine = build_machine(find_accelerator("h100"), "bf16", layout.world)
    seconds = [estimate_step_time(work, layout, machine) for work in (passes, twice)]
    assert seconds[0] and seconds[1] and seconds[0].total == pytest.approx(seconds[1].total, rel=1e-3)
