"""Which forward a run trains with: all give one loss and one gradient, and what cannot run is refused or said."""

from __future__ import annotations

from contextlib import nullcontext

import kit
import pytest
import torch

from fivetune import rundir
from fivetune.data.batch import collate, pad, rounded_up
from fivetune.errors import ConfigError
from fivetune.model.backend import SIZES, Forward, choose_forward
from fivetune.model.load import load
from fivetune.training import train


@pytest.fixture
def setup(tmp_path, model_folder):
    return kit.ready(tmp_path, model_folder, model__dropout=0.0)


def _gradients(setup, forward):
    setup.plain.train().zero_grad()
    forward.prepare(setup.plain)
    nats, positions = forward.nats(setup.plain, collate(setup.stream.store, [0, 3, 5]), device="cpu")
    nats.sum().backward()
    setup.plain.apply(lambda module: setattr(module, "gradient_checkpointing", False))
    return nats.sum().item(), [p.grad.clone() for p in setup.plain.parameters()], positions


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["padded", "buckets", "flat"])
def test_all_forwards_give_one_gradient(setup, kind, recompute):
    nats, gradients, positions = _gradients(setup, Forward("padded", ""))
    again, others, computed = _gradients(setup, Forward(kind, "", recompute))
    assert again == pytest.approx(nats, rel=1e-5)
    for one, other in zip(gradients, others, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(one.abs().max()))
    assert {"flat": computed < positions, "padded": computed == positions, "buckets": computed > positions}[kind]


def test_buckets_have_few_shapes(setup):
    sizes = {rounded_up(length, SIZES) for length in range(1, 5000)}
    assert sizes == {*SIZES, 5120}
    padded = pad(collate(setup.stream.store, [0, 1]), pad_id=0, sizes=SIZES)
    assert padded.input_ids.shape[1] in SIZES and padded.labels.shape[1] in SIZES


def test_the_choice_and_its_reason(setup, tmp_path, model_folder):
    def choose(asked, device="cpu", model=setup.plain):
        return choose_forward(asked, model, device, [], autocast=nullcontext)

    pointing = load(str(model_folder), head="extractive").model
    assert choose("auto").kind == "flat" and choose("padded").why == "asked for"
    assert choose("auto", "mps") == Forward("buckets", "mps compiles every new shape")
    assert choose("auto", model=pointing) == Forward(
        "padded", "flat tokens cannot run: it is a T5ForQuestionAnswering, not one of T5ForConditionalGeneration, "
        "MT5ForConditionalGeneration, UMT5ForConditionalGeneration",
    )  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"train\.forward: flat cannot run this model: it is a T5ForQuestionAnswering"
    ):
        choose("flat", model=pointing)


@pytest.mark.parametrize("kind", ["flat", "buckets"])
def test_a_run_records_its_forward(tmp_path, model_folder, kind, capsys):
    run = train(kit.recipe(tmp_path, model_folder, train__forward=kind))
    assert run.machine["forward"] == {"kind": kind, "why": "asked for", "recompute": False}
    assert f"{kind} forward (asked for)" in capsys.readouterr().err
    shares = [step["padding_fraction"] for step in rundir.read(tmp_path / "run").steps]
    assert all(share == 0 for share in shares) if kind == "flat" else all(share > 0 for share in shares)
