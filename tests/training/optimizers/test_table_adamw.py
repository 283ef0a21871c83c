"""AdamW over tables in parts: torch's AdamW, step by step."""

from __future__ import annotations

import pytest
import torch
from flat_kit import make_batch, make_model

from fivetune.model.flat import compute_flat_losses
from fivetune.plugins import load_plugin
from fivetune.training.optimizers._table_adamw import TableAdamW, TableGrad, compute_total_norm, scale_tables

ROWS, WIDTH = 40, 6


def parts(*, product: bool, seed: int) -> TableGrad:
    random = torch.Generator().manual_seed(seed)
    grad = TableGrad()
    grad.add_rows(torch.randint(ROWS, (9,), generator=random), torch.randn(9, WIDTH, generator=random))
    if product:
        for n in (2, 3):
            grad.add_product(torch.randn(n, ROWS, generator=random), torch.randn(n, WIDTH, generator=random))
    return grad


def optimizers(weight_decay: float) -> tuple[torch.Tensor, torch.optim.AdamW, torch.Tensor, TableAdamW]:
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(ROWS, WIDTH))
    table = torch.nn.Parameter(whole.detach().clone())
    options = {"lr": 0.1, "weight_decay": weight_decay}
    return (
        whole,
        torch.optim.AdamW([whole], fused=True, **options),
        table,
        TableAdamW([{"params": [table]}], smallest=1, **options),
    )


@pytest.mark.parametrize("product", [False, True])
def test_the_parts_are_the_dense_gradient(product, monkeypatch):
    monkeypatch.setattr("fivetune.training.optimizers._table_adamw.SLICE", 16)
    grad = parts(product=product, seed=1)
    dense = grad.to_dense(ROWS)
    assert grad.compute_norm() == pytest.approx(float(dense.norm()), rel=1e-6)
    grad.mul_(0.5)
    torch.testing.assert_close(grad.to_dense(ROWS), dense / 2)
    grad.clear()
    assert not grad


def test_parts_are_clipped_as_the_dense_gradient():
    _, _, table, _ = optimizers(0.0)
    model = torch.nn.Module()
    model.table, model.norm = table, torch.nn.Parameter(torch.ones(3))
    table.table_grad, model.norm.grad = parts(product=True, seed=1), torch.ones(3)  # type: ignore[attr-defined]
    dense = table.table_grad.to_dense(ROWS)  # type: ignore[attr-defined]
    whole = torch.cat([dense.flatten(), torch.ones(3)]).norm()
    assert load_plugin("strategies", "single")().clip(model, 0.5) == pytest.approx(float(whole), rel=1e-6)
    torch.testing.assert_close(table.table_grad.to_dense(ROWS), dense * 0.5 / whole)  # type: ignore[attr-defined]
    torch.testing.assert_close(model.norm.grad, torch.ones(3) * 0.5 / whole)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kinds", ["rrrr", "pppp", "rdrp", "rr-r"], ids=str)
def test_steps_equal_those_of_torch(kinds, weight_decay):
    """r: rows only, p: with a product, d: a dense gradient, -: saved and loaded."""
    whole, plain, table, ours = optimizers(weight_decay)
    for seed, kind in enumerate(kinds):
        if kind == "-":
            ours.load_state_dict(ours.state_dict())
            continue
        grad = parts(product=kind == "p", seed=seed)
        whole.grad = grad.to_dense(ROWS)
        table.grad = whole.grad.clone() if kind == "d" else None
        if kind != "d":
            table.table_grad = grad
        assert compute_total_norm([table]) == pytest.approx(float(compute_total_norm([whole])), rel=1e-6)
        torch.nn.utils.clip_grads_with_norm_([whole], 1.0, compute_total_norm([whole]))
        torch.nn.utils.clip_grads_with_norm_([table], 1.0, norm := compute_total_norm([table]))
        scale_tables([table], 1.0, norm)
        plain.step()
        ours.step()
        ours.zero_grad()
        torch.testing.assert_close(table, whole, rtol=0, atol=1e-6)
    mine, theirs = ours.state_dict()["state"][0], plain.state_dict()["state"][0]
    assert mine.keys() == theirs.keys() and mine["step"] == theirs["step"]
    torch.testing.assert_close(mine["exp_avg_sq"], theirs["exp_avg_sq"])


def test_hooks_are_called_once():
    *_, table, ours = optimizers(0.0)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # torch wraps the step of a class at its first instance
    calls: list[int] = []
    ours.register_step_post_hook(lambda *called: calls.append(1))
    table.grad = torch.ones_like(table)
    ours.step()
    assert calls == [1]


def test_a_dense_gradient_takes_in_what_came_in_parts():
    whole, plain, table, ours = optimizers(0.0)
    grad = parts(product=True, seed=3)
    whole.grad = grad.to_dense(ROWS) + 1
    table.grad, table.table_grad = torch.ones_like(table), grad
    plain.step()
    ours.step()
    torch.testing.assert_close(table, whole)


@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_training_on_parts_is_training(family):
    """Two micro-batches a step, of which the second has as many labels as make its head's gradient dense."""
    losses = []
    for smallest in (1, 2**40):
        model, losses_now = make_model(family), []
        optimizer = TableAdamW([{"params": list(model.parameters())}], smallest=smallest, lr=1e-3, eps=1e-3)
        for step in range(4):
            for lengths in ([(9, 2), (5, 1)], [(7, 2), (6, 9 if step % 2 else 1)]):
                nats = compute_flat_losses(model, make_batch(lengths)).mean()
                nats.backward()
                losses_now.append(nats.item())
            norm = compute_total_norm(list(model.parameters()))
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
            scale_tables(list(model.parameters()), 0.5, norm)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(losses_now)
        assert hasattr(model.shared.weight, "table_grad") == (smallest == 1)
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)
