"""fp16: models whose sums pass its largest number train and answer as close to fp32 as in bf16."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import decoding_kit
import family_kit
import kit
import pytest
import torch
from flat_kit import gradients, make_batch, make_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fivetune
from fivetune.config import load_config
from fivetune.data.store.batch import collate, pad
from fivetune.distributed.world import World
from fivetune.model import half, weight_cache
from fivetune.model.backend import Forward
from fivetune.model.cuda import dispatch
from fivetune.model.decode import Decoding, engine, generate
from fivetune.model.decode.span_search import extract_spans
from fivetune.model.flat import compute_flat_losses
from fivetune.model.forward import compute_padded_losses
from fivetune.model.half import apply_half_product, divide_rows, multiply_half
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.teacher import Teacher
from fivetune.training import setup as setting_up
from fivetune.training.autotune import precision
from fivetune.training.autotune.precision import adopt_trained_precision, choose_faster, choose_half
from fivetune.training.compute_config import ComputeConfig
from fivetune.training.step import nonfinite

LARGEST = 65_504  # of fp16
HUGE = 2.0**18  # a factor of weights, which stay below it
BATCH = make_batch([(19, 11), (3, 2), (70, 9), (1, 1)])
LAST = ("wo.weight", "SelfAttention.o.weight", "EncDecAttention.o.weight", "o_proj.weight", "down_proj.weight")


def autocast(kind: torch.dtype) -> Any:
    return torch.autocast("cpu", dtype=kind)


def enlarge(model: Any, factor: float = 2.0**15) -> Any:
    """Make the sums at the end of all branches larger, which a T5's next norm undoes."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(LAST):
                weight.mul_(factor)
    return model


def find_largest_sum(model: Any) -> float:
    """The largest output of a module that ends a branch, in fp32."""
    found: list[float] = []
    ends = {name.removesuffix(".weight") for name, _ in model.named_parameters() if name.endswith(LAST)}
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: found.append(output.abs().max().item()))
        for name, module in model.named_modules()
        if name in ends
    ]
    ids = BATCH.input_ids[None, 22:92]
    with torch.no_grad():
        model(input_ids=ids, decoder_input_ids=ids)
    for hook in hooks:
        hook.remove()
    return max(found)


def compute(model: Any, kind: torch.dtype | None) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and the gradient at the largest loss scale that a run would find."""
    scale = 2.0**16 if kind == torch.float16 else 1.0
    while True:
        with nullcontext() if kind is None else autocast(kind):
            losses = compute_flat_losses(model, BATCH)
        found = gradients(model, losses * scale / len(losses))
        if scale == 1 or all(grad.isfinite().all() for grad in found.values()):
            return losses.mean().item(), {name: grad / scale for name, grad in found.items()}
        scale /= 2


def compare(model: Any) -> dict[torch.dtype, tuple[float, float]]:
    """By dtype: the relative errors of the loss and of all gradients as one vector."""
    exact, expected = compute(model, None)
    length = math.hypot(*(grad.norm().item() for grad in expected.values()))
    found: dict[torch.dtype, tuple[float, float]] = {}
    for kind in (torch.bfloat16, torch.float16):
        loss, grads = compute(model, kind)
        error = math.hypot(*((grads[name] - grad).norm().item() for name, grad in expected.items()))
        found[kind] = abs(loss - exact) / exact, error / length
    return found


def check_closer_than_bf16(model: Any) -> None:
    found = compare(model)
    assert found[torch.float16][0] < 2e-3
    assert found[torch.float16][1] < found[torch.bfloat16][1]


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_sums_beyond_fp16_are_closer_to_fp32_than_in_bf16(family: str) -> None:
    model = enlarge(make_model(family))
    assert find_largest_sum(model) > LARGEST
    check_closer_than_bf16(model)


@pytest.mark.parametrize("name", ["t5gemma", "t5gemma2"])
def test_sums_of_t5gemma(name: str, tmp_path: Path) -> None:
    folder = family_kit.make_family_model(tmp_path / "model", name)
    check_closer_than_bf16(enlarge(load_model_and_tokenizer(str(folder), dropout=0.0).model.train()))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft
@pytest.mark.parametrize("family", ["t5", "v1_1"])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_sums_beside_an_adapter(family: str, options: dict[str, Any]) -> None:
    """A low-rank pair adds to the wide sum; an adapter with a formula of its own computes it in fp32."""
    from peft import LoraConfig, get_peft_model

    plain = enlarge(make_model(family))
    model: Any = get_peft_model(
        plain, LoraConfig(r=2, target_modules=["wo", "o", "q"], init_lora_weights=False, **options)
    )
    check_closer_than_bf16(model.base_model.model)


def test_gated_activations_beyond_fp16() -> None:
    model = make_model("v1_1")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("wi_1.weight"):
                weight.mul_(2.0**11)
            elif name.endswith("wi_0.weight"):
                weight.mul_(2.0**6)
    check_closer_than_bf16(model)


def test_a_product_and_its_gradients_keep_small_and_large_rows() -> None:
    torch.manual_seed(0)
    sizes = torch.logspace(-12, 7, 16)[:, None]
    x = (torch.randn(16, 64) * sizes).requires_grad_()
    weight = torch.randn(8, 64).requires_grad_()
    out = apply_half_product(x, weight)
    exact = x.double() @ weight.double().t()
    assert ((out - exact).norm(dim=1) < 1e-3 * exact.norm(dim=1)).all()
    assert torch.equal(multiply_half(x.detach().view(2, 8, 64), weight.detach().half()).view(16, 8), out.detach())
    grad = torch.randn(16, 8) / sizes
    of_x, of_weight = torch.autograd.grad(out, (x, weight), grad)
    expected = torch.autograd.grad(exact, (x, weight), grad.double())
    assert ((of_x - expected[0]).norm(dim=1) < 1e-3 * expected[0].norm(dim=1)).all()
    assert (of_weight - expected[1]).norm() < 1e-3 * expected[1].norm()


def test_rows_that_are_zero_or_not_finite_stay_so() -> None:
    rows, divisors = divide_rows(torch.tensor([[0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0]]))
    assert rows[0].tolist() == [0, 0] and divisors[:2].isfinite().all()
    assert not (rows * divisors)[1:, 0].isfinite().any()


def test_divisors_are_powers_of_two_at_any_size() -> None:
    x = torch.logspace(-30, 21, 101)[:, None] * torch.tensor([[1.0, -3.7]])
    rows, divisors = divide_rows(x)
    assert (torch.frexp(divisors).mantissa == 0.5).all() and rows.isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-30])
def test_gradients_of_almost_nothing_are_zero(size: float) -> None:
    """As of the first matrix of a low-rank pair whose second one is zero."""
    x, weight = torch.full((3, 4), size), torch.zeros(2, 4, requires_grad=True)
    apply_half_product(x, weight).backward(torch.full((3, 2), size))
    assert weight.grad is not None and weight.grad.eq(0).all()


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_answers_in_fp16_are_those_of_fp32(family: str, family_folders: Any, tmp_path: Path) -> None:
    store = decoding_kit.question_store(tmp_path, family_folders[family], num_questions=6)
    model = enlarge(load_model_and_tokenizer(str(family_folders[family])).model.eval())
    assert find_largest_sum(model) > LARGEST
    decoding = Decoding(max_new_tokens=6, batch_size=6, score_targets=True)
    wide, half = (
        list(generate(model, store, range(6), decoding, device="cpu", autocast=one))
        for one in (nullcontext, partial(autocast, torch.float16))
    )
    for one, other in zip(wide, half, strict=True):
        assert one.target_loss == pytest.approx(other.target_loss, rel=5e-3)


def test_what_transformers_modules_answer_is_computed_in_fp32(tmp_path: Path) -> None:
    """A T5Gemma has no flat decoder; its sums beyond 65,504 would be infinite under autocast."""
    folder = family_kit.make_family_model(tmp_path / "model", "t5gemma")
    store = decoding_kit.question_store(tmp_path, folder, num_questions=3)
    model = enlarge(load_model_and_tokenizer(str(folder)).model.eval(), 2.0**18)
    decoding = Decoding(max_new_tokens=4, batch_size=3, score_targets=True)
    wide, half = (
        list(generate(model, store, range(3), decoding, device="cpu", autocast=one))
        for one in (nullcontext, partial(autocast, torch.float16))
    )
    assert wide == half and all(math.isfinite(one.target_loss) for one in half)


@pytest.mark.release
@pytest.mark.parametrize("family", kit.FAMILIES)
def test_200_steps_skip_none_and_follow_fp32(family: str, family_folders: Any, tmp_path: Path) -> None:
    model = load_model_and_tokenizer(str(family_folders[family]))
    from fivetune.model.save import save_model

    folder = tmp_path / "large"
    save_model(enlarge(model.model), model.tokenizer, folder)
    losses: dict[str, list[float]] = {}
    for name in ("fp32", "bf16", "fp16"):
        (tmp_path / name).mkdir()
        given = kit.recipe(tmp_path / name, folder, train__precision=name, train__num_steps=200, data__eval=[])
        run = fivetune.train(given, quiet=True, preflight=False)
        losses[name] = [step.loss or math.nan for step in run.steps]
        assert all(math.isfinite((step.loss or math.nan) + (step.grad_norm or math.nan)) for step in run.steps[10:])
    errors = {
        name: sum(abs(a - b) for a, b in zip(losses[name], losses["fp32"], strict=True)) for name in ("bf16", "fp16")
    }
    assert errors["fp16"] < 2 * errors["bf16"]


# --- choice ---


@pytest.mark.parametrize(("seconds", "chosen"), [(0.5, "fp16"), (0.95, "fp32"), (math.inf, "fp32")])
def test_a_trial_chooses_fp16_where_it_is_faster(
    monkeypatch: Any, tmp_path: Path, model_folder: Path, seconds: float, chosen: str
) -> None:
    setup = kit.ready(tmp_path, model_folder)
    with torch.no_grad():  # gradients that overflow at the first loss scale, which is lowered as in a run
        setup.learner.model.encoder.block[0].layer[1].layer_norm.weight.mul_(2.0**-12)
        setup.learner.model.encoder.block[0].layer[1].DenseReluDense.wi.weight.mul_(2.0**12)
    batch = setup.data.stream.build_micro_batches(0)[0]
    monkeypatch.setattr(
        precision, "_measure_seconds", lambda m, b, one, f: {"fp32": 1.0, "fp16": seconds}[one.precision]
    )
    forward = setup.learner.forward
    compute = ComputeConfig("cpu", "fp32")
    found = choose_faster("fp16", setup.learner.model, compute, batch, (forward, forward), "its units")
    assert found.precision == chosen and found.precision_why.startswith("measured: fp16 takes ")


def test_answers_on_an_old_gpu_are_computed_as_the_run_was_trained() -> None:
    place = ComputeConfig("cuda", "fp32")
    assert adopt_trained_precision(place, "auto", "fp16").precision == "fp16"
    assert adopt_trained_precision(place, "fp32", "fp16") == adopt_trained_precision(place, "auto", "fp32") == place


def test_a_forward_of_transformers_or_a_failed_trial_stays_in_fp32(tmp_path: Path, model_folder: Path) -> None:
    setup = kit.ready(tmp_path, model_folder)
    batch = setup.data.stream.build_micro_batches(0)[0]
    place = ComputeConfig("cuda", "fp32")  # no such device here: the trial fails
    for wanted, reason in (("padded", "train.forward is padded"), ("auto", "the trial of fp16 failed")):
        found = choose_half(setup.learner.model, place, batch, wanted)
        assert found.precision == "fp32" and reason in found.precision_why


def test_a_gpu_with_bf16_makes_no_trial(tmp_path: Path, model_folder: Path) -> None:
    config = load_config(kit.recipe(tmp_path, model_folder, train__precision="auto"))
    unused: Any = None
    for name in ("bf16", "fp16"):  # fp16: of a resumed run
        compute = ComputeConfig("cuda", name)
        chosen = setting_up.NOTHING_CHOSEN
        assert setting_up._choose_precision(config, unused, unused, compute, World(), chosen) == compute


# --- on CUDA ---


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose as on a CUDA device: products with fp32 sums, which take one dtype, and kernels, which would fail here."""
    for name, num_dims in (("mm", 2), ("bmm", 3), ("addmm", 2)):
        monkeypatch.setattr(torch, name, partial(multiply_as_cuda, getattr(torch, name), num_dims))
    monkeypatch.setattr(half, "DEVICES_WITH_WIDE_SUMS", ("cpu",))
    monkeypatch.setattr(weight_cache, "has_mixed_products", lambda total: True)
    monkeypatch.setattr(dispatch, "DEVICES", ("cpu",))
    monkeypatch.setattr(dispatch, "explain_missing_triton", lambda: "")


def multiply_as_cuda(
    multiply: Any, num_dims: int, *factors: torch.Tensor, out_dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:
    if out_dtype is None:
        return multiply(*factors, **options)
    assert out_dtype == torch.float32 and all(factor.dim() == num_dims for factor in factors)
    assert all(factor.dtype == torch.float16 for factor in factors[-2:])
    return multiply(*[factor.float() for factor in factors], **options)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("family", ["t5", "v1_1"])
def test_fp16_on_cuda_needs_no_kernel(family: str) -> None:
    """Neither in the forward pass nor in the backward pass, which is outside of autocast."""
    model = make_model(family)
    with autocast(torch.float16):
        losses = compute_flat_losses(model, BATCH, fused=True)
        assert Forward("flat", "").describe_attention(model) == "blocks"
    assert all(grad.isfinite().all() for grad in gradients(model, losses).values())
    assert Forward("flat", "").describe_attention(model) == "triton"


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("family", ["t5", "v1_1"])
def test_answers_on_cuda_use_kept_weights(family: str, family_folders: Any, tmp_path: Path, monkeypatch: Any) -> None:
    store = decoding_kit.question_store(tmp_path, family_folders[family], num_questions=4)
    model = load_model_and_tokenizer(str(family_folders[family])).model.eval()
    monkeypatch.setattr(engine, "explain_slow_decoding", lambda *_: "")
    updates: list[object] = []
    update = weight_cache.KeptWeights.update
    monkeypatch.setattr(weight_cache.KeptWeights, "update", lambda self: updates.append(update(self)))
    decoding = Decoding(max_new_tokens=4, batch_size=4, score_targets=True)
    kept = list(generate(model, store, range(4), decoding, device="cpu", autocast=partial(autocast, torch.float16)))
    assert len(updates) == 1
    monkeypatch.setattr(dispatch, "DEVICES", ())
    plain = list(generate(model, store, range(4), decoding, device="cpu", autocast=partial(autocast, torch.float16)))
    assert kept == plain


def test_rows_of_one_place_are_added_without_atomics_on_cuda() -> None:
    class Names(TorchDispatchMode):
        found: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.found.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Names():
        total = torch.empty(5, 3, device="cuda")
        weight_cache.add_at_(total, torch.empty(4, dtype=torch.int64, device="cuda"), torch.empty(4, 3, device="cuda"))
    assert not any("index_add" in name for name in Names.found)
    total = torch.zeros(5, 3)
    weight_cache.add_at_(total, torch.tensor([1, 1, 4]), torch.ones(3, 3))
    assert total[:, 0].tolist() == [0, 2, 0, 0, 1]


# --- transformers' modules ---


def test_a_teacher_of_transformers_modules_is_computed_in_fp32(tmp_path: Path, model_folder: Path) -> None:
    store = decoding_kit.question_store(tmp_path, model_folder, num_questions=3)
    model = enlarge(load_model_and_tokenizer(str(model_folder)).model.eval(), HUGE)
    batch = collate(store, [0, 1])
    padded = pad(batch, pad_id=0)
    with autocast(torch.float16):
        hidden = Teacher(model, 0.5, 1.0, is_flat=False).predict(batch).hidden
        assert not compute_padded_losses(model, padded).isfinite().all()
    assert hidden.dtype == torch.float16 and hidden.isfinite().all()


def test_spans_are_computed_in_fp32(tmp_path: Path, model_folder: Path) -> None:
    setup = kit.ready(tmp_path, model_folder, task__head="extractive")
    model = enlarge(setup.learner.model, HUGE)
    given: dict[str, Any] = {"context_of": lambda row: range(1, 4), "device": "cpu"}
    decoding = Decoding(max_new_tokens=4, batch_size=3)
    wide, found = (
        list(extract_spans(model, setup.data.stream.store, range(3), decoding, autocast=one, **given))
        for one in (nullcontext, partial(autocast, torch.float16))
    )
    assert wide == found and all(math.isfinite(one.target_loss) for one in found)


def test_a_step_that_is_not_finite_is_sought_in_the_forward_of_the_run(tmp_path: Path, model_folder: Path) -> None:
    setup = kit.ready(tmp_path, model_folder, train__precision="fp16")
    model = enlarge(setup.learner.model, 2.0**16).eval()
    batches = setup.data.stream.build_micro_batches(0)
    with autocast(torch.float16):
        assert not compute_padded_losses(model, pad(batches[0], pad_id=0)).isfinite().all()
    assert nonfinite._find_first_nonfinite(setup.learner, batches) is None
    with torch.no_grad():
        model.encoder.block[1].layer[0].layer_norm.weight[0] = math.nan
    found = nonfinite._find_first_nonfinite(setup.learner, batches)
    assert found is not None and found[1] == "encoder.block.1"
