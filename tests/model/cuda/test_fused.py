"""The forward of CUDA, run by Triton's interpreter: kernels for every part, static buffers, against the torch path."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import kit
import pytest
import torch
from flat_kit import gradients, make_batch, make_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="the package triton is not installed; it exists for Linux only")

from fivetune.model import ops
from fivetune.model import weight_cache as kept
from fivetune.model.attention import SequenceBounds, compute_relative_buckets, get_relative_buckets
from fivetune.model.cuda import attention, cross_entropy, dispatch, norm, pointwise, rows, tiles
from fivetune.model.cuda.buckets import Buckets
from fivetune.model.cuda.graphed import GraphedAdamW, GraphedUpdate, attach_flat_gradients
from fivetune.model.cuda.static_step import StaticBatch, compute_static_losses, fill_block
from fivetune.model.flat import compute_flat_losses
from fivetune.model.layers import (
    add_dropout_residual,
    apply_dropout_,
    apply_gated_dropout,
    apply_relu_dropout_,
    rms_norm,
)
from fivetune.types import Batch

pytestmark = pytest.mark.slow

SHORT = [(18, 2), (3, 9)]  # one is longer than a tile; the interpreter runs them one after the other
NUM_LAYERS = {"t5": 2}  # its layers share the position bias; of the other families one layer has every kernel


def use_kernels(monkeypatch) -> set[str]:
    """From here on the CPU counts as a device of the kernels. Returns: the names of those that were called."""
    called: set[str] = set()
    for module, name in (
        (norm, "compute_branch_norm"),
        (pointwise, "compute_activation_dropout"),
        (attention, "compute_attention"),
        (cross_entropy, "compute_nats"),
        (cross_entropy, "compute_nats_gradient"),
    ):
        original = getattr(module, name)

        def noted(*args: Any, original=original, name=name, **named: Any):
            called.add(name)
            return original(*args, **named)

        monkeypatch.setattr(module, name, noted)
    monkeypatch.setattr(dispatch, "DEVICES", ("cuda", "cpu"))
    for kernel in ("forward", "grad_q", "grad_kv"):
        for kind in ("fp32", "bf16, 64"):
            monkeypatch.setitem(tiles.TILES, (kernel, kind), tiles.Tile(16, 16, warps=1))
    return called


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, grad in theirs.items():
        assert (ours[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


def static_of(batch: Batch, *, weight: float = 1.0) -> StaticBatch:
    """The batch in a bucket with room to spare, as `CapturedStep` writes it."""
    longest = [int(cu.diff().max()) for cu in (batch.cu_seqlens_src, batch.cu_seqlens_tgt)]
    buckets = Buckets(len(batch.ids), *longest, input_grain=32, target_grain=16)
    static = StaticBatch(buckets.find_bucket(batch), "cpu")
    fill_block(static.block, static.bucket, batch, start_id=0, weight=weight)
    return static


@pytest.mark.parametrize("family", ["umt5", kit.release("t5"), kit.release("v1_1")])
def test_the_kernels_compute_the_whole_forward(monkeypatch, family):
    model, batch = make_model(family, num_heads=2, num_layers=NUM_LAYERS.get(family, 1)), make_batch(SHORT)
    weight = torch.rand(batch.num_target_tokens)
    expected = compute_flat_losses(model, batch)
    theirs = gradients(model, expected, weight)
    called = use_kernels(monkeypatch)
    ours = compute_flat_losses(model, batch, fused=True)
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert_close(gradients(model, ours, weight), theirs)
    assert called == {
        "compute_branch_norm",
        "compute_activation_dropout",
        "compute_attention",
        "compute_nats",
        "compute_nats_gradient",
    }


@pytest.mark.parametrize("family", ["mt5", kit.release("t5")])
def test_static_buffers_give_the_same_loss_and_gradients(monkeypatch, family):
    model, batch = make_model(family, num_heads=1, num_layers=1), make_batch(SHORT)
    use_kernels(monkeypatch)
    expected = compute_flat_losses(model, batch, fused=True).mean()
    theirs = gradients(model, expected)
    static = static_of(batch, weight=1 / batch.num_target_tokens)
    ours = (compute_static_losses(model, static, fused=True) * static.weights).sum()
    assert ours.item() == pytest.approx(expected.item(), rel=1e-6)
    found = gradients(model, ours)
    for name, grad in theirs.items():
        assert (found[name] - grad).abs().max() <= 1e-6 * max(grad.abs().max(), 1), name


class Operators(TorchDispatchMode):
    """Notes what is dispatched; adds a product of 16-bit factors, which CPUs do not, as CUDA does."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__()
        self.noted = noted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.noted.append(str(func))
        if func is torch.ops.aten.addmm.dtype_out:
            return kwargs["out"].add_(args[1].float() @ args[2].float())
        return func(*args, **(kwargs or {}))


def build_update(model, *, kind: torch.dtype = torch.bfloat16) -> GraphedUpdate:
    gradients = attach_flat_gradients(model)

    def autocast():
        return torch.autocast("cpu", kind, enabled=kind != torch.float32)

    return GraphedUpdate(
        model, gradients, Buckets(2, 18, 9, input_grain=16, target_grain=4), device="cpu", autocast=autocast, fused=True
    )


VIEWS = re.compile(
    r"aten\.(_unsafe_)?(view|t|transpose|permute|split|split_with_sizes|unbind|as_strided|expand|slice|select|detach|"
    r"alias|squeeze|unsqueeze|empty|new_empty|empty_like|empty_strided)\."
)


def list_kernels(monkeypatch, model) -> list[str]:
    """The operators and kernels of a static forward and backward in bf16; what the kernels compute does not matter."""
    noted: list[str] = []
    for module in (attention, cross_entropy, norm, pointwise, rows):
        monkeypatch.setattr(module, "launch", lambda kernel, *args, **named: noted.append(f"triton.{kernel.__name__}"))
    monkeypatch.setattr(kept, "has_mixed_products", lambda x: True)
    update, static = build_update(model), static_of(make_batch(SHORT))
    with Operators(noted):
        update.steps.step(static)  # fills the caches
        noted.clear()
        update.steps.step(static)
    return [name for name in noted if not VIEWS.match(name)]


@pytest.mark.parametrize("family", ["t5", "v1_1"])
def test_a_layer_of_encoder_and_decoder_is_67_kernels(monkeypatch, family):
    """Casts, gradient adds, seeds, joined projections and gradients of the bias made it 147 and 151."""
    use_kernels(monkeypatch)
    one, two = (
        list_kernels(
            monkeypatch, make_model(family, dropout=0.1, num_heads=2, d_kv=16, num_layers=n, num_decoder_layers=n)
        )
        for n in (1, 2)
    )
    pair = {name: two.count(name) - one.count(name) for name in set(two)}
    found = {name.split(".")[1]: count for name, count in pair.items() if count and not name.startswith("triton")}
    # 10 products forward, 20 backward; the norms' weights; tables of the bias. Products of the encoder's output for
    # cross-attention are the same in both.
    assert found == {"mm": 20, "addmm": 10, "sum": 5, "add_": 5, "add": 2} and len(two) - len(one) == 67


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("mt5", torch.float32),
        kit.release("t5", torch.bfloat16),
        kit.release("t5", torch.float32),
        kit.release("mt5", torch.bfloat16),
    ],
)
def test_gradients_added_in_place_are_the_gradients(monkeypatch, family, kind):
    model, batch = make_model(family, num_heads=2, num_layers=1), make_batch(SHORT)
    expected = gradients(model, compute_flat_losses(model, batch), torch.ones(batch.num_target_tokens))
    use_kernels(monkeypatch)
    monkeypatch.setattr(kept, "has_mixed_products", lambda x: True)
    update = build_update(model, kind=kind)
    with Operators([]):
        for weight in (0.25, 0.75):  # of two micro-batches
            update.accumulate_gradients([batch], num_scored_tokens=1 / weight)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        error = (parameter.grad - expected[name]).norm() / expected[name].norm()
        assert error <= (1e-5 if kind == torch.float32 else 1e-1), name  # the interpreter cuts off bits
    assert not any(hasattr(parameter, kept.KEPT) for parameter in model.parameters())


@pytest.mark.release
def test_copies_follow_the_weights(monkeypatch):
    model, batch = make_model("t5", num_heads=2, num_layers=1), make_batch(SHORT)
    use_kernels(monkeypatch)
    update = build_update(model)
    losses = []
    for _ in range(2):
        losses.append(float(update.accumulate_gradients([batch], num_scored_tokens=1)[0]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
    assert abs(losses[0] - losses[1]) > 0.01 * losses[0]
    again = build_update(model)
    for parameter in model.parameters():
        parameter.data /= 0.9
    assert float(again.accumulate_gradients([batch], num_scored_tokens=1)[0]) == pytest.approx(losses[1], rel=1e-3)


def test_keys_and_values_of_all_layers_are_one_product(monkeypatch):
    """Their gradients take the memory of keys and values, and are those of a product for each layer."""
    use_kernels(monkeypatch)
    model = make_model("t5", num_heads=2, d_kv=16, num_decoder_layers=3, dropout=0.1)
    attach_flat_gradients(model)
    modules = [block.layer[1].EncDecAttention for block in model.decoder.block]
    bounds = [SequenceBounds(torch.tensor([0, 2, count]), count) for count in (3, 5)]
    states = torch.randn(5, model.config.d_model, requires_grad=True)
    queries, weights = torch.randn(2, 3, 3, 2, 16)
    products: list[int] = []
    linear = kept.F.linear
    monkeypatch.setattr(kept.F, "linear", lambda x, weight: products.append(len(weight)) or linear(x, weight))
    found = []
    for recompute in (False, True):  # the blocks that are recomputed have products of their own
        computing = ops.Ops(recompute=recompute)
        with kept.KeptWeights(model, torch.float32).attach():
            memories = computing.project_memory(ops.EncoderOutput(states, bounds[1]), modules)
            outs = []
            for module, q, memory in zip(modules, queries, memories, strict=True):
                torch.manual_seed(len(outs))
                outs.append(computing.attend_memory(module, q, bounds[0], memory))
            (torch.stack(outs) * weights).sum().backward()
        grads = [states.grad, *(linear.weight.grad for module in modules for linear in (module.k, module.v))]
        found.append([grad.clone() for grad in grads])
        for grad in grads:
            grad.zero_()
    assert products == [6 * 32, 2 * 32, 2 * 32, 2 * 32] and all(grad.any() for grad in found[0])
    torch.testing.assert_close(found[0], found[1])
    with kept.KeptWeights(model, torch.float32).attach():
        for longest, is_near in ((2**31 // 192, True), (2**31 // 192 + 1, False)):  # offsets of 32 bits
            memory = ops.EncoderOutput(states, replace(bounds[1], longest=longest))
            memories = ops.Ops().project_memory(memory, modules)
            assert [one.projected is not None for one in memories] == [is_near] * 3


def test_what_the_optimizer_writes_is_not_copied_again(monkeypatch):
    model = make_model("t5", num_heads=2, num_layers=1)
    frozen = model.encoder.block[0].layer[0].SelfAttention.q.weight.requires_grad_(False)
    matrices = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "kind": "matrix"}, {"params": vectors, "kind": "norm"}]
    factors = kept.list_factors(model)
    adamw = GraphedAdamW(torch.optim.AdamW(groups), max_norm=1.0, factors=factors, kind=torch.bfloat16)
    weights = kept.KeptWeights(model, torch.bfloat16, adamw.flat.copies)
    copied: list[int] = []
    copy = kept.many._foreach_copy_
    monkeypatch.setattr(kept.many, "_foreach_copy_", lambda to, of: copied.append(len(of)) or copy(to, of))
    weights.update()
    adamw.flat.grads.normal_()
    adamw.step()
    weights.update()
    assert copied == [len(factors)]  # once, at the start
    moved = model.decoder.block[0].layer[1].EncDecAttention.k.weight
    with torch.no_grad(), weights.attach():
        for weight in (frozen, moved, model.shared.weight):
            torch.testing.assert_close(vars(weight)[kept.KEPT].value.float(), weight, rtol=2**-7, atol=0)
        frozen.mul_(2)
    weights.update()
    assert copied == [len(factors)] * 2
    with torch.no_grad(), weights.attach():
        assert torch.equal(vars(frozen)[kept.KEPT].value, frozen.bfloat16())


def test_trainable_weights_need_a_place_for_their_gradient():
    weights = kept.KeptWeights(model := make_model("t5", num_heads=2, num_layers=1), torch.bfloat16)
    refused = pytest.raises(AssertionError, match="without a gradient buffer, by shape:")
    with refused, weights.attach():
        pass
    attach_flat_gradients(model)
    with weights.attach():
        pass
    model.shared.weight.grad = None
    with refused, weights.attach():
        pass
    with torch.no_grad(), weights.attach():
        pass
    model.shared.weight.requires_grad_(False)
    with weights.attach():
        pass


def test_matrices_below_each_other_are_one_without_a_copy():
    buffer = torch.arange(24.0)
    parts = [buffer[:8].view(2, 4), buffer[8:12].view(1, 4), buffer[12:].view(3, 4)]
    joined = kept.join_rows(parts)
    assert joined.shape == (6, 4) and joined.data_ptr() == buffer.data_ptr()
    for others in ([parts[0], parts[2]], [parts[0], parts[1].clone()], parts[::-1]):
        assert torch.equal(kept.join_rows(others), torch.cat(others))


def test_static_buffers_need_nothing_from_the_host(monkeypatch):
    use_kernels(monkeypatch)
    seen = list(list_kernels(monkeypatch, make_model("mt5", dropout=0.1, num_heads=2)))
    unordered = ("index_add", "index_put", "scatter_add", "embedding_dense")  # atomics
    assert [name for name in seen if any(word in name for word in unordered)] == []
    host = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_copy_from", "lift_fresh", "aten.arange")
    assert len(seen) > 100 and [name for name in seen if any(word in name for word in host)] == []


def test_dropout_of_the_kernels_has_its_rate_and_its_gradient(monkeypatch):
    use_kernels(monkeypatch)
    torch.manual_seed(0)
    ones = torch.ones(64, 96)
    parts = {
        "dropout": lambda x: apply_dropout_(x, 0.25, fused=True),
        "sum": lambda x: add_dropout_residual(torch.zeros_like(x), x, 0.25, fused=True),
        "relu": lambda x: apply_relu_dropout_(x, 0.25, fused=True),
        "gated": lambda x: apply_gated_dropout(torch.cat([x, ones], -1), "relu", 0.25, fused=True),
    }
    for name, part in parts.items():
        x = ones.clone().requires_grad_()
        out = part(x.clone())
        assert out.detach().unique().tolist() == [0.0, pytest.approx(4 / 3)], name
        assert abs(out.mean().item() - 1) < 0.03, name
        out.sum().backward()
        assert torch.equal(x.grad, out.detach()), name  # the gradient meets the mask of the value


def test_a_sum_of_two_types_keeps_that_of_the_stream(monkeypatch):
    use_kernels(monkeypatch)
    stream, branch = torch.randn(4, 32, requires_grad=True), torch.randn(4, 32).bfloat16().requires_grad_()
    out = add_dropout_residual(stream, branch, 0.5, fused=True)
    out.sum().backward()
    assert out.dtype == stream.grad.dtype == torch.float32 and branch.grad.dtype == torch.bfloat16
    torch.testing.assert_close(out, stream + branch.float() * branch.grad.float())


def test_the_parts_can_be_left_to_torch(monkeypatch):
    called = use_kernels(monkeypatch)
    x, weight = torch.randn(3, 32), torch.ones(32)
    rms_norm(x, weight, 1e-6)
    assert called == set()
    rms_norm(x, weight, 1e-6, fused=True)
    rms_norm(x.half(), weight.half(), 1e-6, fused=True)
    assert called == {"compute_branch_norm"}


@pytest.mark.parametrize("longest", [1, 40, 600])
def test_kept_buckets_are_the_buckets(longest):
    rule = {"bidirectional": True, "num_buckets": 32, "max_distance": 128}
    kept = get_relative_buckets(torch.device("cpu"), longest, **rule)
    assert torch.equal(kept, compute_relative_buckets(longest, **rule))
    assert kept.data_ptr() == get_relative_buckets(torch.device("cpu"), longest, **rule).data_ptr()


def test_the_gradient_of_a_bias_table_is_a_product_and_equals_that_of_an_index(monkeypatch):
    embedding, buckets = (
        torch.nn.Embedding(32, 3),
        get_relative_buckets(torch.device("cpu"), 200, bidirectional=True, num_buckets=32, max_distance=128),
    )
    grad = torch.randn(3, len(buckets))
    (expected,) = torch.autograd.grad(ops._read_biases(embedding, buckets), embedding.weight, grad)
    monkeypatch.setattr(dispatch, "DEVICES", ("cuda", "cpu"))
    found = ops._read_biases(embedding, buckets)
    assert torch.equal(found, embedding.weight[buckets].t())
    torch.testing.assert_close(torch.autograd.grad(found, embedding.weight, grad)[0], expected)
