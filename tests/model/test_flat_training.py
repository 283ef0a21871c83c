"""Training on flat tokens: dropout, what a step dispatches, and the loss curve beside transformers'."""

from __future__ import annotations

import copy
from dataclasses import replace

import kit
import pytest
import torch
from flat_kit import make_batch, make_model, padded_nats
from torch.utils._python_dispatch import TorchDispatchMode

from fivetune.distributed.collective_log import CollectiveLog
from fivetune.distributed.tensor_parallel import TensorGroup, separate_masks
from fivetune.model import attention, layers, loss, ops
from fivetune.model.attention import SequenceBounds, compute_relative_buckets
from fivetune.model.dropout import draw_dropout, split_dropout, zero_dropped_
from fivetune.model.flat import compute_flat_losses
from fivetune.model.loss import TiedGradient, compute_head_losses, embed

CPU = torch.device("cpu")


class Count(TorchDispatchMode):
    """Names of the operations that are dispatched, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


# --- dropout ---


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.003, 0.95])
def test_every_value_is_dropped_at_the_rate_and_on_its_own(rate):
    torch.manual_seed(0)
    kept = zero_dropped_(torch.ones(1000, 1000), draw_dropout(10**6, rate, CPU))
    error = (rate * (1 - rate) / 1e6) ** 0.5
    assert abs((kept == 0).double().mean() - rate) < 4 * error
    gone = (kept == 0).double()
    assert abs((gone[:, 1:] * gone[:, :-1]).mean() - rate**2) < 5 * error
    assert abs((gone[1:] * gone[:-1]).mean() - rate**2) < 5 * error
    assert gone.mean(0).std() == pytest.approx(error * 1000**0.5, rel=0.2)


def test_draws_follow_the_seed_and_split_at_any_place():
    torch.manual_seed(3)
    first = draw_dropout(5000, 0.2, CPU)
    torch.manual_seed(3)
    again = draw_dropout(5000, 0.2, CPU)
    assert first is not None and again is not None and torch.equal(first, again)
    parts = [
        zero_dropped_(torch.ones(n), part)
        for n, part in zip((1000, 1, 3999), split_dropout(first, (1000, 1, 3999)), strict=True)
    ]
    assert torch.equal(torch.cat(parts), zero_dropped_(torch.ones(5000), first))
    assert draw_dropout(5000, 0.0, CPU) is None and draw_dropout(3, 1.0, CPU).tolist() == [0, 1, 2]


class _Mesh:
    """Of tensor parallelism: what dropout reads of a mesh."""

    device_type = "cpu"

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def get_local_rank(self) -> int:
        return self._rank


@pytest.mark.parametrize("forward", ["flat", "recomputed", "padded"])
def test_heads_and_features_of_every_rank_have_their_own_dropout(forward, monkeypatch):
    """Of tensor parallelism: the masks of what all ranks hold are the same, and a recomputed block draws them again."""
    batch, drawn = make_batch([(5, 3), (9, 4)]), {}
    for rank in (0, 1):
        torch.manual_seed(0)
        model = make_model("v1_1", dropout=0.5)
        for module in model.modules():
            if type(module).__name__ in ("T5Attention", "T5DenseGatedActDense"):
                separate_masks(module, TensorGroup(_Mesh(rank), CollectiveLog()))  # type: ignore[arg-type]
        own = drawn[rank] = []
        torch.manual_seed(1)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "should_attend_memory", lambda *_: False)  # never with shares of k and v
            _record_dropout(patch, torch.nn.functional, "dropout", own)
            _record_dropout(patch, layers, "draw_dropout", own)
            _record_dropout(patch, attention, "draw_dropout", own)
            if forward == "padded":
                padded_nats(model, batch)
            else:
                compute_flat_losses(model, batch, recompute=forward == "recomputed").sum().backward()
    same = [torch.equal(a, b) for a, b in zip(*drawn.values(), strict=True)]
    encoder, decoder = [False, True] * 2, [False, True] * 3  # of each branch of a block: inside, its sum
    again = [*decoder * 2, *encoder * 2] if forward == "recomputed" else []
    assert same == [True, *encoder * 2, True, True, *decoder * 2, True, *again]
    if again:
        assert all(torch.equal(a, b) for a, b in zip(drawn[0][1:5], drawn[0][-4:], strict=True))


def _record_dropout(patch, place, name, found):
    draw = getattr(place, name)

    def record(*inputs, **options):
        result = draw(*inputs, **options)
        found.append(result.detach() == 0 if result.is_floating_point() else result)
        return result

    patch.setattr(place, name, record)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["v1_1", kit.release("t5")])
def test_with_dropout_the_loss_has_the_distribution_of_transformers(family):
    model, once = make_model(family, dropout=0.2, num_layers=1), make_batch([(5, 3), (9, 4), (3, 2)])
    lengths = [(5, 3), (9, 4), (3, 2)] * 60
    batch = replace(make_batch(lengths), input_ids=once.input_ids.repeat(60), labels=once.labels.repeat(60))
    torch.manual_seed(0)
    with torch.no_grad():
        ours, theirs = (
            torch.cat([run(model, batch).view(60, -1) for _ in range(10)]).double()
            for run in (compute_flat_losses, padded_nats)
        )
    error = (ours.var(0) / 600 + theirs.var(0) / 600).sqrt()
    assert ((ours.mean(0) - theirs.mean(0)).abs() / error).max() < 4
    assert ((ours.std(0) / theirs.std(0)).log().abs()).max() < 0.25
    assert model.eval() and torch.equal(compute_flat_losses(model, batch), compute_flat_losses(model, batch))


@pytest.mark.parametrize("family", ["t5", "v1_1", "umt5"])
def test_the_gradient_belongs_to_the_values_that_were_dropped(family):
    model, batch = make_model(family, dropout=0.3), make_batch([(5, 3), (70, 4)])
    parameters = list(model.parameters())

    def total() -> torch.Tensor:
        torch.manual_seed(11)
        return compute_flat_losses(model, batch).double().sum()

    grads = torch.autograd.grad(total(), parameters)
    length = sum(grad.double().square().sum() for grad in grads).sqrt()
    step, values = 3e-3 / length, []
    for sign in (1, -2):
        with torch.no_grad():
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter += sign * step * grad
            values.append(total())
    assert ((values[0] - values[1]) / (2 * step)).item() == pytest.approx(length.item() ** 2, rel=0.02)


# --- what a step does ---


def test_a_step_dispatches_few_operations():
    model, batch = make_model("t5", dropout=0.1), make_batch([(5, 3), (9, 4), (30, 2)])
    counts = {}
    for run in (compute_flat_losses, padded_nats):
        with Count() as count:
            run(model, batch).sum().backward()
        counts[run] = len(count.names)
    assert counts[compute_flat_losses] <= 780 < counts[padded_nats], counts


def test_nothing_waits_for_the_device():
    """On the meta device there are no values: whatever asked for one would fail."""
    model, batch = make_model("umt5", dropout=0.1).to("meta"), make_batch([(5, 3), (9, 4), (70, 2)])
    nats = compute_flat_losses(model, batch)
    nats.sum().backward()
    assert nats.shape == (9,)
    assert all(p.grad is not None for n, p in model.named_parameters() if "embed_" not in n)


@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_autocast_is_as_near_to_fp32_as_that_of_transformers(family):
    model, batch = make_model(family), make_batch([(5, 3), (70, 40)])
    exact = padded_nats(model, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = compute_flat_losses(model, batch), padded_nats(model, batch)
    ours.sum().backward()
    assert ours.dtype == torch.float32 and all(p.grad is not None for p in model.parameters())
    assert (ours - exact).square().mean() <= 2 * (theirs - exact).square().mean()


@pytest.mark.parametrize("tied", [True, False])
def test_autocast_sums_a_table_in_fp32(tied, monkeypatch):
    """4,096 times one id: a sum in bf16 would stop growing after some 256 of them."""
    monkeypatch.setattr(loss, "MAX_CHUNK_LOGITS", 16 * 50)
    torch.manual_seed(0)
    ids, labels = torch.full((4096,), 5), torch.full((4096,), 7)
    gradients = []
    for enabled in (False, True):
        torch.manual_seed(0)
        tables = [torch.randn(50, 8, requires_grad=True) for _ in range(1 if tied else 2)]
        meeting = TiedGradient()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            nats = compute_head_losses(embed(tables[0], ids, meeting), tables[-1], labels, meeting if tied else None)
        gradients.append(torch.cat(torch.autograd.grad(nats.sum(), tables)))
    assert (gradients[1] - gradients[0]).abs().max() < 0.02 * gradients[0].abs().max()


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_are_those_of_transformers(bidirectional):
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-2999, 3000)
    for num_buckets, max_distance in ((32, 128), (8, 20)):
        theirs = T5Attention._relative_position_bucket(distances, bidirectional, num_buckets, max_distance)
        ours = compute_relative_buckets(
            3000, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
        )
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_two_hundred_steps_have_the_losses_of_transformers():
    ours = make_model("v1_1", num_layers=1)
    theirs = copy.deepcopy(ours)
    batches = [make_batch([(5, 3), (9, 4), (3, 2)]), make_batch([(12, 1), (6, 6)])]
    losses = []
    for model, run in ((ours, compute_flat_losses), (theirs, padded_nats)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses.append([])
        for step in range(200):
            loss = run(model, batches[step % 2]).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-3) and losses[0][-1] < 0.5 * losses[0][0]


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_cross_attention_drops_weights_whichever_way_it_is_computed(monkeypatch, rate):
    """Short targets take the shortcut through the encoder's space; both ways drop attention weights at the rate."""
    model, batch = make_model("t5"), make_batch([(30, 2), (40, 3)])
    module = model.decoder.block[0].layer[1].EncDecAttention
    for block in model.decoder.block:
        block.layer[1].EncDecAttention.dropout = rate  # of the attention weights of cross-attention alone
    lengths = [(batch.cu_seqlens_src, batch.cu_seqlens_tgt)]
    source, target = (SequenceBounds.from_cu_seqlens(cu, CPU) for cu in lengths[0])
    assert ops.should_attend_memory(module, target, source)
    for shortcut in (True, False):
        monkeypatch.setattr(ops, "should_attend_memory", lambda *_, shortcut=shortcut: shortcut)
        losses = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            losses.append(compute_flat_losses(model, batch).detach())
        assert torch.equal(*losses) is (rate == 0.0), shortcut
