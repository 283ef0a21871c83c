"""fp16: models whose sums pass its largest number train and answer as close to fp32 as in bf16."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import decoding_kit
import family_kit
import kit
import pytest
import torch
from flat_kit import gradients, make_batch, make_model

import fivetune
from fivetune.model.decode import Decoding, generate
from fivetune.model.flat import compute_flat_losses
from fivetune.model.half import apply_half_product, divide_rows, multiply_half
from fivetune.model.load import load_model_and_tokenizer
from fivetune.training.autotune import precision
from fivetune.training.autotune.precision import adopt_trained_precision, choose_faster
from fivetune.training.compute import ComputeConfig

LARGEST = 65_504  # of fp16
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
    assert rows[0].tolist() == [0, 0] and not rows[1:, 0].isfinite().any()
    assert divisors.isfinite().all()


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
        losses[name] = [step.loss for step in run.steps]
        assert all(math.isfinite(step.loss) and math.isfinite(step.grad_norm) for step in run.steps[10:])
    errors = {
        name: sum(abs(a - b) for a, b in zip(losses[name], losses["fp32"], strict=True)) for name in ("bf16", "fp16")
    }
    assert errors["fp16"] < 2 * errors["bf16"]


# --- choice ---


@pytest.mark.parametrize(("seconds", "chosen"), [(0.5, "fp16"), (0.95, "fp32")])
def test_a_trial_chooses_fp16_where_it_is_faster(
    monkeypatch: Any, tmp_path: Path, model_folder: Path, seconds: float, chosen: str
) -> None:
    setup = kit.ready(tmp_path, model_folder)
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
