"""The Triton kernels against plain torch, run by Triton's interpreter: values, every gradient, dropout masks."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import kit
import pytest
import torch
from torch import Tensor, nn

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below
pytest.importorskip("triton", reason="the package triton is not installed; it exists for Linux only")

import triton

from fivetune.errors import ModelError
from fivetune.model.cuda import attention, tiles
from fivetune.model.cuda.attention import compute_attention
from fivetune.model.cuda.cross_entropy import compute_nats, compute_nats_gradient
from fivetune.model.cuda.norm import compute_branch_norm
from fivetune.model.cuda.optimizer import CLIP, NORM, SKIPPED, STEPS, FlatAdamW
from fivetune.model.cuda.pointwise import add_dropout, compute_activation_dropout, compute_dropout
from fivetune.model.cuda.random import choose_seed, draw_seeds_together, round_dropout_rate
from fivetune.model.cuda.rows import add_rows_
from fivetune.model.ops import SplitProjections

pytestmark = pytest.mark.slow

HEADS, HEAD_SIZE, LONGEST = 2, 16, 45
LENGTHS = [1, 3, 17, 40]
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles so small that the sequences above have several, none of them full."""
    assert not isinstance(triton.language.sum, triton.JITFunction), (
        "triton was imported before TRITON_INTERPRET was set"
    )
    for kernel, kind in tiles.TILES:
        size = {"norm": (2, 0), "pointwise": (0, 64), "logits": (0, 64), "optimizer": (4, 64)}.get(kernel, (32, 32))
        monkeypatch.setitem(tiles.TILES, (kernel, kind), tiles.Tile(*size, warps=1))


# --- references ---


def philox(seed: int, place: Tensor) -> Tensor:
    """16 random bits for each element: eight halves of Philox 4x32-10's words for each group of 8 places."""
    low = 0xFFFFFFFF
    group = (place // 8).tolist()
    words = {}
    for g in set(group):
        c, key = [g & low, g >> 32, 0, 0], [seed & low, seed >> 32]
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [b >> 32 ^ c[1] ^ key[0], b & low, a >> 32 ^ c[3] ^ key[1], a & low]
            key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
        words[g] = [half for word in (c[0], c[2], c[1], c[3]) for half in (word & 0xFFFF, word >> 16)]
    return torch.tensor([words[g][p % 8] for g, p in zip(group, place.tolist(), strict=True)])


def kept(seed: Tensor, places: Tensor, probability: float) -> Tensor:
    """What elements at these places are multiplied with."""
    rate = round_dropout_rate(probability)
    bits = philox(int(seed), places.flatten()).view(places.shape)
    return (bits >= rate) * (65536 / (65536 - rate))


def eager(q, k, v, bias, cu_q, cu_k, *, causal=False, probability=0.0, seed=None) -> Tensor:
    """One sequence after the other, all scores at hand."""
    outs = []
    groups = -(-int(cu_k.diff().max()) // 8)
    for (start_q, end_q), (start_k, end_k) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        scores = torch.einsum("ihd,jhd->hij", q[start_q:end_q], k[start_k:end_k])
        rows, cols = torch.arange(end_q - start_q)[:, None], torch.arange(end_k - start_k)
        if bias is not None:
            scores = scores + bias[:, cols - rows + LONGEST - 1]
        weights = scores.masked_fill(cols > rows, -torch.inf).softmax(-1) if causal else scores.softmax(-1)
        if seed is not None:
            head = torch.arange(HEADS)[:, None, None]
            weights = weights * kept(seed, ((start_q + rows) * HEADS + head) * groups * 8 + cols, probability)
        outs.append(torch.einsum("hij,jhd->ihd", weights, v[start_k:end_k]))
    return torch.cat(outs)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def inputs(lengths_q: list[int], lengths_k: list[int], *, bias: bool, dtype=torch.float32) -> list[Tensor | None]:
    torch.manual_seed(0)
    tensors = [torch.randn(sum(n), HEADS, HEAD_SIZE).to(dtype) for n in (lengths_q, lengths_k, lengths_k)]
    table = torch.randn(HEADS, 2 * LONGEST - 1) if bias else None
    return [None if x is None else x.requires_grad_() for x in (*tensors, table)]


def compare(ours: Tensor, reference: Tensor, leaves: list[Tensor], doubles: list[Tensor], close: float) -> None:
    """Outputs and all gradients, by the largest error relative to the largest value."""
    grad = torch.randn(ours.shape).to(ours.dtype)
    pairs = [(ours, reference)]
    pairs += zip(
        torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(reference, doubles, grad.double()), strict=True
    )
    for mine, exact in pairs:
        assert mine.shape == exact.shape
        assert (mine.double() - exact).abs().max() <= close * exact.abs().max()


def double(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


# --- attention ---


@pytest.mark.parametrize(("causal", "longest", "together"), [(False, 40, 2), (True, 45, 8), kit.release(False, 43, 4)])
def test_the_gradient_of_the_bias_is_the_sum_of_all_tiles(monkeypatch, causal, longest, together):
    """Up to three tiles of a sequence, an empty one, and fewer or more read together than there are."""
    monkeypatch.setitem(tiles.TILES, ("grad_q", "fp32"), tiles.Tile(16, 16, warps=1))
    monkeypatch.setattr(attention, "SEQUENCES_TOGETHER", together)
    lengths = [3, 40, 0, 33, 5]
    q, k, v, bias = inputs(lengths, lengths, bias=True)
    cu = starts(lengths)
    ours = compute_attention(q, k, v, cu, cu, longest, longest, bias, causal)  # type: ignore[arg-type]
    leaves = [x for x in (q, k, v, bias) if x is not None]
    doubles = double(leaves)
    compare(ours, eager(*doubles, cu, cu, causal=causal), leaves, doubles, CLOSE[torch.float32])


def test_a_bias_without_a_gradient_costs_nothing(monkeypatch):
    q, k, v, bias = inputs([3], [3], bias=True)
    launched: list[str] = []
    monkeypatch.setattr(attention, "launch", lambda kernel, *args, **named: launched.append(kernel.__name__))
    compute_attention(q, k, v, starts([3]), starts([3]), 3, 3, bias.detach()).sum().backward()  # type: ignore
    assert launched == ["forward", "grad_q", "grad_kv"]


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        *((part, torch.float32) for part in ("encoder", "decoder", "cross", "dropout")),
        ("dropout", torch.bfloat16),
        *(kit.release(part, torch.bfloat16) for part in ("encoder", "decoder", "cross")),
    ],
)
def test_attention_and_its_gradients_equal_the_definition(part, dtype):
    lengths_q, lengths_k = ([17, 1, 3], [3, 40, 1]) if part == "cross" else (LENGTHS, LENGTHS)
    q, k, v, bias = inputs(lengths_q, lengths_k, bias=part != "cross", dtype=dtype)
    cu_q, cu_k = starts(lengths_q), starts(lengths_k)
    causal, probability = part == "decoder", 0.3 if part == "dropout" else 0.0
    seed = torch.tensor([2**40 + 5]) if probability else None
    ours = compute_attention(q, k, v, cu_q, cu_k, max(lengths_q), max(lengths_k), bias, causal, probability, seed)
    leaves = [x for x in (q, k, v, bias) if x is not None]
    doubles = double(leaves)
    table = None if bias is None else doubles[3]
    reference = eager(*doubles[:3], table, cu_q, cu_k, causal=causal, probability=probability, seed=seed)
    compare(ours, reference, leaves, doubles, CLOSE[dtype])


def test_products_of_fp32_are_tf32_where_the_run_asks_for_it(monkeypatch):
    (q, k, v, _), cu = inputs([3], [3], bias=False), starts([3])
    seen: list[object] = []
    monkeypatch.setattr(attention, "launch", lambda *args, **named: seen.append(named["PRODUCTS"]))
    try:
        for setting in ("tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = setting
            compute_attention(q, k, v, cu, cu, 3, 3).sum().backward()  # type: ignore[arg-type]
            compute_attention(*(x.bfloat16() for x in (q, k, v)), cu, cu, 3, 3)  # type: ignore[union-attr]
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert seen == [*["tf32"] * 3, *["ieee"] * 5]


def test_a_merged_projection_is_read_in_place_and_heads_of_8_columns_are_filled_up():
    torch.manual_seed(0)
    merged = torch.randn(5, 3, HEADS, 8, requires_grad=True)
    doubles = double([merged])
    cu = starts([2, 3])
    ours = compute_attention(*merged.unbind(1), cu, cu, 3, 3)
    compare(ours, eager(*doubles[0].unbind(1), None, cu, cu), [merged], doubles, CLOSE[torch.float32])


def test_gradients_of_a_merged_projection_are_written_beside_each_other():
    torch.manual_seed(0)
    merged, memory = torch.randn(5, 3, HEADS, HEAD_SIZE), torch.randn(7, 2, HEADS, HEAD_SIZE)
    for parts, count in (([merged], 3), ([merged[:, 0].contiguous(), memory], 2)):
        leaves = [part.requires_grad_() for part in parts]
        q, k, v = leaves[-1].unbind(1) if count == 3 else (leaves[0], *leaves[1].unbind(1))
        cu_k = starts([2, 3]) if count == 3 else starts([3, 4])
        out = compute_attention(q, k, v, starts([2, 3]), cu_k, 3, 4, overwrite=count == 2)
        grads = torch.autograd.grad(out, [q, k, v], torch.randn(out.shape))[-count:]
        assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
        assert SplitProjections.backward(None, *grads).data_ptr() == grads[0].data_ptr()
        apart = SplitProjections.backward(None, *[grad.clone() for grad in grads])
        assert torch.equal(apart, SplitProjections.backward(None, *grads))


def test_empty_sequences_and_queries_without_keys():
    cu_q, cu_k = torch.tensor([0, 0, 2, 3]).int(), torch.tensor([0, 2, 2, 4]).int()
    q, k, v, _ = inputs([3], [4], bias=False)
    assert q is not None and k is not None and v is not None
    out = compute_attention(q, k, v, cu_q, cu_k, 3, 3)
    assert (out[:2] == 0).all()
    torch.testing.assert_close(out[2:], eager(q[2:], k[2:], v[2:], None, starts([1]), starts([2])))
    grads = torch.autograd.grad(out.sum(), [q, k, v])
    assert all(grad.isfinite().all() for grad in grads) and (grads[2][:2] == 0).all()


@pytest.mark.parametrize("dtype", CLOSE)
def test_rows_of_equal_ids_are_summed_in_the_order_of_the_tokens(dtype):
    torch.manual_seed(0)
    ids = torch.cat([torch.zeros(70), torch.tensor([5, 3, 5, 9, 3, 3]), torch.zeros(3)]).long()  # runs of 1 to 73
    grad, total = torch.randn(len(ids), 40).to(dtype), torch.randn(11, 40).to(dtype)
    expected = total.double().index_add_(0, ids, grad.double())
    found = add_rows_(total.clone(), ids, grad)
    assert (found.double() - expected).abs().max() <= CLOSE[dtype] * expected.abs().max()
    assert torch.equal(found[[1, 2, 4, 10]], total[[1, 2, 4, 10]])


def test_no_kernel_adds_in_an_order_that_changes():
    sources = [path.read_text() for path in Path(tiles.__file__).parent.glob("*.py")]
    assert sources and not any("tl.atomic" in source for source in sources)


COMPILED_ONCE = """
import sys
from fivetune.model.cuda import attention_kernels, norm, rows
for kernel in (*map(vars(attention_kernels).get, ("forward", "grad_q", "grad_kv", "sum_parts")),
               norm._backward, rows._add_runs):
    print(kernel.__name__, *[each.name for each in kernel.params if each.do_not_specialize])
"""


def test_counts_that_change_with_the_batch_do_not_compile_kernels_anew():
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED_ONCE], capture_output=True, text=True, env=environ, check=True
    )
    found = {line.split()[0]: set(line.split()[1:]) for line in done.stdout.splitlines()}
    assert found == {
        **{name: {"num_rows", "groups"} for name in ("forward", "grad_kv")},
        "grad_q": {"num_rows", "groups", "tiles_k"},
        "sum_parts": {"num_sequences", "tiles_q", "tiles_k"},
        "_backward": {"rows"},
        "_add_runs": {"num_rows"},
    }


def test_a_head_size_without_a_kernel_is_refused():
    x, cu = torch.randn(3, 2, 48), starts([3])
    with pytest.raises(ModelError, match="heads have 48 columns"):
        compute_attention(x, x, x, cu, cu, 3, 3)


# --- norm, dropout, activation ---


@pytest.mark.parametrize("dtype", CLOSE)
def test_norm_is_t5s(dtype):
    torch.manual_seed(0)
    x, weight = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((5, 24), (24,)))
    doubles = double([x, weight])
    reference = doubles[1] * doubles[0] * (doubles[0].pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    compare(compute_branch_norm(x, weight, 1e-6)[1], reference, [x, weight], doubles, CLOSE[dtype])


def test_the_norm_of_an_fp32_stream_is_rounded_once_and_adds_the_gradients_of_both():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 24, requires_grad=True), torch.randn(24, requires_grad=True)
    stream, normed = compute_branch_norm(x, weight, 1e-6, torch.bfloat16)
    assert torch.equal(stream, x) and normed.dtype == torch.bfloat16
    whole = compute_branch_norm(x, weight, 1e-6)[1]
    torch.testing.assert_close(normed.float(), whole, rtol=2**-7, atol=0)  # cut off, here
    of_stream, of_norm = torch.randn(5, 24), torch.randn(5, 24).bfloat16()
    found = torch.autograd.grad([stream, normed], [x, weight], [of_stream, of_norm])
    of_x, of_weight = torch.autograd.grad(whole, [x, weight], of_norm.float())
    torch.testing.assert_close(found, (of_stream + of_x, of_weight))


@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_the_sum_of_a_branch_is_normalized_by_one_kernel(probability):
    torch.manual_seed(0)
    x, branch, weight = (torch.randn(*shape, requires_grad=True) for shape in ((7, 24), (7, 24), (24,)))
    seed, leaves = torch.tensor([9]), [x, branch, weight]
    ours = torch.cat(compute_branch_norm(x, weight, 1e-6, branch=branch, probability=probability, seed=seed))
    doubles = double(leaves)
    places = torch.arange(7 * 24).view(7, 24)
    stream = doubles[0] + doubles[1] * (kept(seed, places, probability) if probability else 1)
    reference = torch.cat([stream, doubles[2] * stream * (stream.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()])
    compare(ours, reference, leaves, doubles, CLOSE[torch.float32])
    apart = add_dropout(x, branch, probability, seed)  # the same bits: a block whose sum is stored has this kernel
    assert torch.equal(ours[:7], apart)


def test_a_branch_may_have_16_bits_and_rows_of_any_width():
    torch.manual_seed(0)
    x, weight = torch.randn(3, 20, requires_grad=True), torch.ones(20)
    branch = torch.randn(3, 20).bfloat16().requires_grad_()
    stream, normed = compute_branch_norm(x, weight, 1e-6, torch.bfloat16, branch=branch, probability=0.5)
    assert (stream.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
    of_x, of_branch = torch.autograd.grad(stream.sum(), [x, branch])
    assert (of_x == 1).all() and of_branch.dtype == torch.bfloat16 and set(of_branch.unique().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(stream, x + branch.float() * of_branch.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_the_gradient_of_logits_are_those_of_cross_entropy(dtype):
    """Three blocks, the last of which is not full; a piece without probability, and logits beyond the range of exp."""
    logits, labels, weights = torch.randn(5, 150) * 3, torch.tensor([0, 149, 63, 64, 7]), torch.rand(5)
    logits[1, 5], logits[2, 140] = -torch.inf, 300.0
    logits = logits.to(dtype)
    reference = logits.double().requires_grad_()
    expected = nn.functional.cross_entropy(reference, labels, reduction="none")
    nats, norms = compute_nats(logits, labels)
    torch.testing.assert_close(nats.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    expected.backward(weights.double())
    found = compute_nats_gradient(logits, norms, labels, weights)
    assert found.dtype == dtype and reference.grad is not None
    torch.testing.assert_close(found.double(), reference.grad, rtol=0, atol=CLOSE[dtype] / 4)
    logits[3, 77] = torch.nan
    assert compute_nats(logits, labels)[0].isfinite().tolist() == [True, True, True, False, True]


def test_the_seeds_of_a_pass_are_drawn_at_once():
    torch.manual_seed(0)
    x = torch.zeros(1)
    for _ in range(2):  # a second pass draws others
        with draw_seeds_together():
            seeds = [choose_seed(x, 1, None) for _ in range(600)]
            assert choose_seed(x, 0, None) is None
        values = [int(seed[0]) for seed in seeds if seed is not None]
        assert len(set(values)) == 600 and all(seed.data_ptr() % 16 == 0 for seed in seeds if seed is not None)
        first, torch_state = values, torch.get_rng_state()
    torch.manual_seed(0)
    with draw_seeds_together():
        assert int(choose_seed(x, 1, None)[0]) not in first  # type: ignore[index]
    with draw_seeds_together():
        choose_seed(x, 1, None)
    assert not torch.equal(torch_state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", CLOSE)
def test_residual_with_dropout(dtype):
    torch.manual_seed(0)
    residual, x = (torch.randn(7, 25).to(dtype).requires_grad_() for _ in "ab")
    seed = torch.tensor([9])
    doubles = double([residual, x])
    reference = doubles[0] + doubles[1] * kept(seed, torch.arange(7 * 25).view(7, 25), 0.1)
    compare(add_dropout(residual, x, 0.1, seed), reference, [residual, x], doubles, CLOSE[dtype])
    assert compute_dropout(x, 0.0) is x


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("kind", "gated"), [("relu", False), ("gelu_new", True)])
def test_activation_with_dropout(kind, gated, dtype):
    torch.manual_seed(0)
    x = torch.randn(3, 140 if gated else 70).to(dtype).requires_grad_()
    doubles = double([x])
    left, right = doubles[0].chunk(2, -1) if gated else (doubles[0], 1)
    function = torch.relu if kind == "relu" else lambda y: nn.functional.gelu(y, approximate="tanh")
    seed = torch.tensor([3])
    places = torch.arange(3)[:, None] * 72 + torch.arange(70)
    reference = function(left) * right * kept(seed, places, 0.5)
    compare(
        compute_activation_dropout(x, kind, gated=gated, probability=0.5, seed=seed),
        reference,
        [x],
        doubles,
        CLOSE[dtype],
    )


def test_dropout_follows_the_seed_on_the_device_and_keeps_the_mean():
    x, seed = torch.ones(1024), torch.tensor([1])
    first = compute_dropout(x, 0.25, seed)
    again = compute_dropout(x, 0.25, seed)
    seed += 1
    assert torch.equal(first, again) and not torch.equal(first, compute_dropout(x, 0.25, seed))
    torch.manual_seed(0)
    assert not torch.equal(compute_dropout(x, 0.25), compute_dropout(x, 0.25))
    assert first.unique().tolist() == [0.0, pytest.approx(4 / 3)] and abs(first.mean() - 1) < 0.06


# --- optimizer ---


def models() -> tuple[nn.ParameterList, nn.ParameterList]:
    torch.manual_seed(0)
    ours = nn.ParameterList([torch.randn(9, 15), torch.randn(70), torch.randn(3)])
    return ours, nn.ParameterList([p.detach().clone() for p in ours])


@pytest.mark.parametrize("max_norm", [1.0, float("inf")])
def test_optimizer_equals_clip_and_torchs_adamw(max_norm):
    ours, theirs = models()
    optimizer = FlatAdamW(ours[:1], ours[1:], lr=0.1, weight_decay=0.2, max_norm=max_norm)
    groups = [{"params": theirs[:1], "weight_decay": 0.2}, {"params": theirs[1:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.1)
    for step in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            other.grad = torch.randn_like(other)
            assert mine.grad is not None and (mine.grad == 0).all()
            mine.grad += other.grad
        norm = nn.utils.clip_grad_norm_(theirs, max_norm)
        optimizer.lr.fill_(0.1 / (1 + step))
        for group in reference.param_groups:
            group["lr"] = 0.1 / (1 + step)
        optimizer.step()
        reference.step()
        assert optimizer.state[NORM] == pytest.approx(norm.item(), rel=1e-5)
    torch.testing.assert_close(list(ours), list(theirs), rtol=1e-5, atol=3e-6)


def test_a_gradient_that_is_not_finite_changes_nothing():
    ours, _ = models()
    optimizer = FlatAdamW(ours, [], lr=0.1)
    before = optimizer.weights.clone()
    optimizer.grads[5] = torch.inf
    optimizer.step()
    assert optimizer.state[[CLIP, STEPS, SKIPPED]].tolist() == [0, 0, 1]
    assert torch.equal(before, optimizer.weights) and (optimizer.grads == 0).all()


def test_copies_are_written_with_the_weights():
    """Of the first two parameters; the third lies behind them in the block."""
    ours, theirs = models()
    optimizer = FlatAdamW(ours, [], lr=0.1, num_copied=2)
    reference = FlatAdamW(theirs, [], lr=0.1)
    assert optimizer.copies is not None and optimizer.copies.shape == (192 + 128,)
    for each in (optimizer, reference):
        each.grads[:] = torch.linspace(-1, 1, len(each.grads))
        each.step()
    assert torch.equal(optimizer.weights, reference.weights)
    torch.testing.assert_close(optimizer.copies.float(), optimizer.weights[:320], rtol=2**-7, atol=0)  # cut off, here
    before = optimizer.copies.clone()
    optimizer.grads[5] = torch.inf
    optimizer.step()
    assert torch.equal(optimizer.copies, before)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_blocks_without_a_gradient_are_left_out_until_they_have_one(weight_decay):
    """Of 64 elements each, here; what would be read of the moments is NaN."""
    parameters = [nn.Parameter(torch.ones(5, 40)), nn.Parameter(torch.ones(3))]
    plain = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    optimizer = FlatAdamW(parameters, [], lr=0.1, weight_decay=weight_decay)
    reference = torch.optim.AdamW(plain, lr=0.1, weight_decay=weight_decay)
    if not weight_decay:
        optimizer.mean[128:192], optimizer.square[192:] = torch.nan, torch.nan
    for row in (0, 3, 0):
        if row == 3:
            optimizer.mean[128:] = optimizer.square[128:] = 0
            optimizer._seen.zero_()  # as of a run that is resumed
            optimizer.find_seen()
        for parameter in (parameters[0], plain[0]):
            parameter.grad = torch.zeros(5, 40) if parameter.grad is None else parameter.grad
            parameter.grad[row] = 0.5
        for parameter in plain[1:]:
            parameter.grad = torch.zeros(3)
        reference.step()
        optimizer.step()
        plain[0].grad.zero_()  # type: ignore[union-attr]
        for ours, theirs in zip(parameters, plain, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert optimizer._seen.tolist() == [1] * 5 if weight_decay else [1, 1, 1, 0, 0]
