"""Estimates of memory: worked numbers, the tensors of real steps, properties, the choice, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from fivetune import cli, plugins
from fivetune.config import load_config
from fivetune.errors import ModelError
from fivetune.fleet.estimation import recipe as estimation_recipe
from fivetune.fleet.estimation.choice import (
    Machine,
    choose_estimate,
    estimate_strategies,
    estimate_strategy,
    list_candidates,
    list_strategies,
)
from fivetune.fleet.estimation.memory import (
    BLOCK_ROWS,
    CHUNK_LOGITS,
    CHUNK_TILE,
    CUDA_CHUNKS,
    Part,
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
from fivetune.fleet.estimation.workload import Workload
from fivetune.machine.telemetry import limits
from fivetune.machine.telemetry.accelerators import find_accelerator, find_peak_flops
from fivetune.model import attention, loss
from fivetune.model.flat import compute_flat_losses
from fivetune.model.shapes import KNOWN_SHAPES, ModelShape, build_model_config, find_known_shape, read_shape
from fivetune.rundir.records import DeviceSample
from fivetune.types import Batch, Layout

GOLDEN = Path(__file__).parent / "golden" / "squad_t5_base.json"
TINY = ModelShape(8, 4, 16, 2, 1, 1, 32, is_gated_act=False, is_tied=True)
LARGE = KNOWN_SHAPES["t5-11b"]
H100 = build_machine(find_device("h100"), 8)


def make_work(shape: ModelShape = TINY, **changes: Any) -> Workload:
    values = {"batch_size": 1, "examples_per_step": 1, "num_inputs": 4, "num_targets": 2, **changes}
    return Workload(shape, **values)


def find_part(work: Workload, name: str, layout: Layout | None = None) -> Part:
    (part,) = [part for part in list_parts(work, layout or Layout()) if part.name == name]
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
    assert BLOCK_ROWS == attention.MAX_BLOCK_ROWS


def test_an_encoder_block_on_a_gpu():
    # 4 tokens, d 8, i 8, f 16, 2 heads, 2 bytes: two layers of 4 d + 4 + 2 d; 4 i numbers; log-sum-exp; 2 f numbers
    part = find_part(make_work(), "encoder block 0")
    assert part.saved == 4 * (2 * (32 + 4 + 16) + 4 * 2 * 8 + 4 * 2 + 2 * 2 * 16)
    assert part.sizes == (64, 64, 64, 64, 128, 128, 8, 8, 64)  # q, k, v, o, wi, wo, two norms, 32 buckets of 2 heads
    assert part.copies == 2 * (4 * 64 + 2 * 128 + 16)  # autocast's copies of all but the table of biases
    assert part.inputs == 4 * 8 * 4


def test_two_ranks_halve_what_heads_and_features_take():
    alone, halved = (find_part(make_work(), "encoder block 0", Layout(n, heads=n)) for n in (1, 2))
    assert halved.sizes == (32, 32, 32, 32, 64, 64, 8, 8, 32)
    assert alone.saved - halved.saved == 4 * (4 * 2 * 8 + 4 * 2 + 2 * 2 * 16) / 2


def test_the_head_saves_few_logits_and_computes_many_again():
    few, many = find_part(make_work(), "head"), find_part(make_work(num_targets=2**23), "head")
    assert few.saved == 2 * 2 * 32  # 2 targets, 32 tokens of the vocabulary, 2 bytes
    assert many.saved == 0
    # 8 chunks of 2^24 logits: 2 bytes each of it and of the one before, 8 of the softmax; gradients of hidden and table
    assert many.temporary == 12 * 8 * 2**24 + 2 * 8 * 2**23 + 2 * 32 * 8


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
    predicted = sum(part.saved + part.copies for part in list_parts(work, Layout()))
    assert predicted == pytest.approx(sum(saved.values()), rel=0.02)


# --- memory: properties ---


def test_fsdp_falls_with_devices_and_ddp_does_not():
    work = make_work(LARGE, examples_per_step=64, num_inputs=512, num_targets=64)
    sizes = (8, 16, 32, 64)
    sharded = [estimate_memory(work, Layout(n, shards=n)).peak for n in sizes]
    assert sharded == sorted(sharded, reverse=True) and len(set(sharded)) == len(sizes)
    held = [estimate_memory(work, Layout(n, shards=n)).state * n for n in sizes]
    assert held == [8.0 * LARGE.num_weights] * len(sizes)
    assert {estimate_memory(work, Layout(n)).weights for n in sizes} == {4.0 * LARGE.num_weights}
    assert min(estimate_memory(work, Layout(n)).peak for n in sizes) > 12 * LARGE.num_weights


@pytest.mark.parametrize("layout", [Layout(), Layout(4), Layout(4, shards=4)], ids=str)
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
    memory = estimate_memory(make_work(LARGE), Layout(8, shards=8))
    kinds = (memory.weights, memory.gradients, memory.state, memory.activations, memory.buffers)
    assert memory.peak == sum(kinds) and min(kinds) >= 0


def test_stages_hold_their_blocks():
    work = make_work(KNOWN_SHAPES["t5-base"], examples_per_step=8, num_inputs=400, num_targets=400)
    alone, two, four = (estimate_memory(work, Layout(n, stages=n)) for n in (1, 2, 4))
    assert alone.weights > two.weights > four.weights > alone.weights / 4  # two stages hold the embedding


@pytest.mark.parametrize("name", ["t5-base", "mt5-small", "umt5-small"])
def test_one_rank_holds_the_weights_of_the_model(name):
    (parts,) = list_stages(make_work(KNOWN_SHAPES[name]), Layout())
    assert sum(part.num_weights for part in parts) == KNOWN_SHAPES[name].num_weights


# --- the choice ---


def make_strategy(name: str, **options: Any) -> Any:
    return plugins.load_plugin("strategies", name)(**options)


def test_every_strategy_is_estimated_in_the_order_of_its_complexity():
    assert [one.plugin_name() for one in list_strategies()] == [
        *("single", "ddp", "fsdp", "tensor", "fsdp_tensor", "pipeline")
    ]
    small = make_work(KNOWN_SHAPES["t5-base"], batch_size=16, examples_per_step=1024, num_inputs=512, num_targets=64)
    found = estimate_strategies(small, H100, 16)
    assert [one.name for one in found] == [
        *("single", "ddp", "fsdp", "fsdp 2 copies", "tensor 2", "fsdp_tensor 2", "pipeline 2")
    ]


def test_the_simplest_that_fits_is_taken():
    small = make_work(KNOWN_SHAPES["t5-base"], batch_size=16, examples_per_step=1024, num_inputs=512, num_targets=64)
    chosen = choose_estimate(estimate_strategies(small, H100, 8))
    assert chosen is not None and chosen.as_settings() == {"strategy.name": "ddp"}
    large = replace(small, shape=LARGE, batch_size=8, examples_per_step=512)
    chosen = choose_estimate(estimate_strategies(large, H100, 64))
    assert chosen is not None and chosen.layout.shards > 1
    assert choose_estimate(estimate_strategies(large, Machine(2**30, 8), 8)) is None


@pytest.mark.parametrize("num", [2, 8])
@pytest.mark.parametrize("name", plugins.list_plugins("strategies"))
def test_settings_of_an_estimate_give_its_layout(name, num):
    for strategy in make_strategy(name).list_variants(num, min(num, 4)):
        layout = strategy.get_layout(num)
        estimate = estimate_strategy(make_work(examples_per_step=64), strategy, H100, num)
        options = {key.removeprefix("strategy."): value for key, value in estimate.as_settings().items()}
        assert plugins.load_plugin("strategies", str(options.pop("name"))).model_validate(options) == strategy
        shared = layout.heads * layout.stages
        assert name == "single" or (layout.world, shared) == (num, strategy.get_model_size(num))


def test_what_cannot_share_a_batch_is_no_candidate():
    found = estimate_strategy(make_work(examples_per_step=4), make_strategy("ddp"), H100, 8)
    assert found.obstacle == "train.global_batch_size 4 is not a multiple of 8 copies" and not found.fits


def test_groups_that_share_heads_stay_inside_a_node():
    sizes = {one.get_layout(12).heads for one in list_candidates(Machine(1, 6), 12)}
    assert sizes == {1, 2, 3, 6}  # 4 would cross the border


def test_options_of_the_recipe_are_estimated_in_place_of_others():
    work = make_work(LARGE, examples_per_step=64, num_inputs=512, num_targets=64)
    options = {"strategy.name": "fsdp", "strategy.offload": True, "strategy.reduce_once": False}
    usual, own = (
        {one.name: one for one in estimate_strategies(work, H100, 8, load_config("squad_t5_base", settings))}
        for settings in ({}, options)
    )
    assert own["fsdp"].layout.offload and own["fsdp"].room > usual["fsdp"].room
    assert own["ddp"] == usual["ddp"]


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


@pytest.mark.parametrize(
    ("name", "fp16", "bf16", "gib", "speed"),
    [
        ("Tesla P100-PCIE-16GB", 18.7, None, 15.9, 732),
        ("Tesla V100-SXM2-16GB", 125, None, 16, 900),
        ("Tesla T4", 65, None, 15, 320),
        ("Quadro RTX 8000", 130.5, None, 47.5, 672),
        ("NVIDIA L4", 121, 121, 22.5, 300),
        ("NVIDIA L40S", 362, 362, 45, 864),
        ("NVIDIA GeForce RTX 3090", 71, 71, 24, 936),
        ("NVIDIA GeForce RTX 4090", 165.2, 165.2, 24, 1008),
        ("NVIDIA GeForce RTX 5090", 209.5, 209.5, 31.8, 1792),
        ("Tesla P100-SXM2-16GB", 21.2, None, 16, None),  # a form that `estimate` has no short name for
    ],
)
def test_the_cards_that_people_have_are_known(name, fp16, bf16, gib, speed):
    found = find_accelerator(name)
    assert found is not None and found.memory_bytes == pytest.approx(gib * 2**30, rel=0.01)
    peaks = [find_peak_flops(name, precision) for precision in ("fp16", "bf16")]
    assert peaks == [peak and pytest.approx(peak * 1e12) for peak in (fp16, bf16)]
    assert found.gigabytes_per_second == speed


def test_the_memory_of_a_local_device_is_sampled(monkeypatch):
    samples = (
        DeviceSample(index=0, name="NVIDIA H100 80GB HBM3", memory_total_bytes=80 * 2**30),
        DeviceSample(index=1, cuda_index=0, name="NVIDIA A100-SXM4", memory_total_bytes=39 * 2**30),
    )
    monkeypatch.setattr("fivetune.machine.telemetry.nvml.Nvml.sample", lambda self: samples)
    found = find_local_device("auto")
    assert found is not None and (found.memory_bytes, found.peak_name) == (39 * 2**30, "A100 SXM4")
    assert find_local_device("cpu") is None
    monkeypatch.setattr(
        "fivetune.machine.telemetry.nvml.Nvml.sample",
        lambda self: (DeviceSample(index=0, name="NVIDIA T1000", memory_total_bytes=8 * 2**30),),
    )
    found = find_local_device("auto")
    assert found is not None and found.memory_bytes == 8 * 2**30 and not found.is_known


def test_the_limit_of_a_container_is_the_memory_of_a_cpu(monkeypatch, tmp_path):
    for name, text in (("max", "1000000"), ("current", "600000"), ("stat", "anon 1\ninactive_file 50000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(limits, "CGROUP_DIR", tmp_path)
    assert limits.get_host_memory() == (1_000_000, 450_000)
    assert build_machine(None, 4).memory_bytes == 250_000
    assert build_machine(None, 4, devices_per_node=2).memory_bytes == 500_000
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
    whole = {name for name in plugins.list_plugins("strategies") if not make_strategy(name).sharded}
    assert code == 0 and fitting == whole >= {"single", "ddp"}
    assert any(
        line.startswith("All weights are counted as trained in fp32: model.adapter") for line in found["assumptions"]
    )


def test_the_json_of_a_shipped_recipe(capsys):
    code, out, _ = run(capsys, "recipes/squad_t5_base.yaml", "--devices", "8", "--device", "h100", "--json")
    found, kept = json.loads(out), json.loads(GOLDEN.read_text())
    assert code == 0
    assert found.keys() == kept.keys()
    names = {one["strategy"] for one in kept["strategies"]}
    estimates = [one for one in found.pop("strategies") if one["strategy"] in names]
    for one, other in zip(estimates, kept.pop("strategies"), strict=True):
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


def test_the_memory_of_a_cpu_is_shared(capsys):
    code, out, _ = run(capsys, "quickstart", "--devices", "2", "--device", "cpu")
    assert code == 0 and "Take ddp: the simplest that fits" in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--devices 0 --device h100", 2, "--devices: 0 is not possible. Allowed: above 0. Try --devices 8."),
        ("--devices -3 --device h100", 2, "--devices: -3 is not possible"),
        ("--devices 8 --device h1000", 2, "--device: there is no 'h1000'. Did you mean h100 or v100? Allowed: a10, "),
        ("--devices 8 --device h100 --model.path nosuch", 4, "nosuch: neither a local folder nor a model whose shape"),
        ("--devices 8 --device v100 --train.precision bf16", 2, "train.precision: V100 SXM2 does not support bf16"),
        ("--devices 8 --device h100 --data.max_input_tokens null", 2, "data.max_input_tokens: not set"),
        ("--devices 8", 2, "--device: not given. Add the name of a GPU, --device h100, or the memory of one"),
        ("--device mi300", 2, "For another GPU add its memory: --memory 16G."),
        *((f"--memory {size}", 2, f"--memory: '{size}' is not a size.") for size in ("16", "0G", "16X", "nanG")),
    ],
)
def test_mistakes_are_one_line(capsys, words, code, message):
    found, out, err = run(capsys, "squad_t5_base", *words.split())
    assert (found, out) == (code, "") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "gib", "precision"),
    [
        ("--memory 16G", 16, "fp32"),
        ("--memory 16G --train.precision bf16", 16, "bf16"),
        ("--device mi300x --memory 196608MiB", 192, "fp32"),
        ("--device t4 --memory 8gb", 8, "fp32"),
        ("--device l4 --memory 0.5T", 512, "bf16"),
        ("--device cpu --memory 4G", 4, "fp32"),
    ],
)
def test_the_memory_of_a_gpu_can_be_given(capsys, words, gib, precision):
    code, out, _ = run(capsys, "quickstart", *words.split(), "--json")
    found = json.loads(out)
    assert code == 0 and found["precision"] == precision and found["devices"] == 1
    (single,) = [one for one in found["strategies"] if one["strategy"] == "single"]
    assert single["room_bytes"] + single["peak_bytes"] == pytest.approx(0.9 * gib * 2**30, abs=2)
    is_unsure = any("is not in the tables, so train.precision auto" in line for line in found["assumptions"])
    assert is_unsure == (words in ("--memory 16G", "--device mi300x --memory 196608MiB"))


@pytest.mark.parametrize("words", ["--devices 12", "--devices 8 --devices-per-node 3"])
def test_devices_that_are_no_whole_nodes_are_refused(capsys, words):
    code, out, err = run(capsys, "squad_t5_base", "--device", "h100", *words.split())
    assert (code, out) == (2, "") and "are not whole nodes of" in err


BIG = ("--device", "h100", "--model.path", "t5-11b", "--optimizer.name", "adamw")


def test_what_lowers_memory_and_what_excludes_strategies_is_told(capsys):
    _, out, _ = run(capsys, "squad_t5_base", "--devices", "8", *BIG, "--train.precision", "fp16")
    assert "fsdp: train.precision fp16 adapts the loss scale" in out
    assert "None fits; single lacks least" in out and "Add, one after the other: --train.recompute true, " in out
    added = ("--train.recompute", "true", "--strategy.name", "fsdp", "--strategy.offload", "true")
    _, out, _ = run(capsys, "squad_t5_base", "--devices", "8", *BIG, *added)
    assert "Take fsdp: " in out and "--strategy.name fsdp --strategy.offload true" in out


def test_a_strategy_that_needs_a_batch_size_prints_one(capsys):
    words = ("--train.batch_size", "auto", "--train.global_batch_size", "128", "--json")
    _, out, _ = run(capsys, "squad_t5_base", "--devices", "8", *BIG, *words)
    found = json.loads(out)
    assert found["choice"]["train.batch_size"] == 1 and "--train.batch_size 1" in found["verdict"]
    ddp = next(one for one in found["strategies"] if one["strategy"] == "ddp")
    assert ddp["settings"] == {"strategy.name": "ddp"}  # supports auto


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
    assert settings == {"strategy.name": "tensor", "strategy.size": 4} and "ddp needs 242" in reason
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
    assert seen[0].memory_bytes == 4 * 2**30 and seen[0].devices_per_node == 2 and "of 3.6 GiB" in reason


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


@pytest.mark.parametrize("layout", [Layout(), Layout(2), Layout(2, shards=2, reduce_once=True)])
def test_the_weights_of_a_teacher_are_whole_on_every_rank(layout):
    settings = {"model.path": "t5-small", "distill.teacher": "t5-base"}
    with_answers, with_logits = (
        build_workload(load_config("squad_t5_base", {**settings, "distill.kind": kind}), find_device("h100"))
        for kind in ("sequence", "logits")
    )
    alone, taught = (estimate_memory(work, layout) for work in (with_answers, with_logits))
    assert taught.weights - alone.weights == 4 * KNOWN_SHAPES["t5-base"].num_weights
    assert taught.peak - alone.peak == taught.weights - alone.weights


@pytest.mark.parametrize("layout", [Layout(), Layout(2, heads=2), Layout(2, stages=2)])
def test_two_passes_take_what_twice_the_examples_take(layout):
    once = make_work(LARGE, batch_size=4, examples_per_step=8, num_inputs=64, num_targets=16)
    twice = replace(once, batch_size=8, examples_per_step=16)
    passes = replace(once, passes=2)
    assert estimate_memory(passes, layout).peak == estimate_memory(twice, layout).peak
