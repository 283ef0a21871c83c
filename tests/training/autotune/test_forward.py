"""Which forward a run trains with: all give one loss and one gradient, and what cannot run is refused or said."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import kit
import pytest
import torch

from fivetune import rundir
from fivetune.data.store.batch import collate, pad, round_up_length
from fivetune.errors import ConfigError
from fivetune.model.attention import explain_unsupported_kernel
from fivetune.model.backend import SIZES, Forward
from fivetune.model.cuda import dispatch
from fivetune.model.load import load_model_and_tokenizer
from fivetune.rundir.records import ForwardFacts
from fivetune.training.autotune import forward as autotune
from fivetune.training.autotune.forward import choose_forward
from fivetune.training.compute import choose_compute
from fivetune.training.run import train


@pytest.fixture
def setup(tmp_path, model_folder):
    return kit.ready(tmp_path, model_folder, model__dropout=0.0)


def _gradients(setup, forward):
    setup.learner.model.train().zero_grad()
    forward.prepare(setup.learner.model)
    nats, positions = forward.compute_losses(
        setup.learner.model, collate(setup.data.stream.store, [0, 3, 5]), device="cpu"
    )
    nats.sum().backward()
    return nats.sum().item(), [p.grad.clone() for p in setup.learner.model.parameters()], positions


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
    sizes = {round_up_length(length, SIZES) for length in range(1, 5000)}
    assert sizes == {*SIZES, 5120}
    padded = pad(collate(setup.data.stream.store, [0, 1]), pad_id=0, sizes=SIZES)
    assert padded.input_ids.shape[1] in SIZES and padded.labels.shape[1] in SIZES


def test_the_choice_and_its_reason(setup, tmp_path, model_folder):
    def choose(asked, device="cpu", model=setup.learner.model):
        return choose_forward(asked, model, device, [], autocast=nullcontext)

    pointing = load_model_and_tokenizer(str(model_folder), head="extractive").model
    assert choose("auto").kind == "flat" and choose("padded").why == "requested"
    assert choose("auto", "mps") == Forward("buckets", "mps compiles every new shape")
    assert choose("auto", model=pointing) == Forward(
        "padded",
        "flat tokens cannot run: it is a T5ForQuestionAnswering, not one of T5ForConditionalGeneration, "
        "MT5ForConditionalGeneration, UMT5ForConditionalGeneration, T5GemmaForConditionalGeneration, "
        "T5Gemma2ForConditionalGeneration",
    )
    with pytest.raises(
        ConfigError, match=r"train\.forward: flat cannot run this model: it is a T5ForQuestionAnswering"
    ):
        choose("flat", model=pointing)


@pytest.mark.parametrize("kind", ["flat", "buckets"])
def test_a_run_records_its_forward(tmp_path, model_folder, kind, capsys):
    run = train(kit.recipe(tmp_path, model_folder, train__forward=kind))
    assert run.machine.forward == ForwardFacts(kind, "requested", recompute=False, parts="torch")
    assert f"{kind} forward (requested)" in capsys.readouterr().err
    assert f"{kind} forward (requested)" in (tmp_path / "run" / "log.txt").read_text()  # there in one line
    shares = [step.padding_fraction for step in rundir.read_run(tmp_path / "run").steps]
    assert all(share == 0 for share in shares) if kind == "flat" else all(share > 0 for share in shares)


def test_a_resumed_run_keeps_the_forward_that_it_began_with(tmp_path, model_folder):
    recipe = kit.recipe(tmp_path, model_folder, train__num_steps=1, train__forward="padded", data__eval=[])
    train(recipe, quiet=True, preflight=False)
    path = tmp_path / "run" / "machine.json"  # the checkpoint holds the forward, an edited machine.json changes nothing
    machine = json.loads(path.read_text())
    path.write_text(json.dumps({**machine, "forward": {**machine["forward"], "kind": "flat"}}))
    run = train(recipe, {"train.num_steps": 2}, resume=True, quiet=True)
    assert run.machine.forward == ForwardFacts("padded", "as the run began", recompute=False, parts="torch")
    assert run.machine.attention == "sdpa" == machine["attention"]


def test_forwards_are_timed_as_they_train_and_leave_no_trace(setup, monkeypatch):
    seen = []

    def nats(self, model, batch, *, device):
        seen.append((model.training, model.encoder.gradient_checkpointing))
        if len(batch.ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(self, model, batch, device=device)

    original = Forward.compute_losses
    monkeypatch.setattr(Forward, "compute_losses", nats)
    model, sample = setup.learner.model.eval(), [collate(setup.data.stream.store, [0])]
    state = torch.get_rng_state()
    again = Forward("padded", "", recompute=True)
    assert 0 < autotune.measure_batch_seconds(again, model, "cpu", sample, nullcontext) < 60
    assert seen == [(True, True)] * 3 and not model.training and torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert autotune.measure_batch_seconds(
        again, model, "cpu", [collate(setup.data.stream.store, [0, 1])], nullcontext
    ) == float("inf")


def test_on_cuda_flat_needs_its_kernel(setup, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("fivetune.model.attention.find_kernel_fault", lambda *request: f"tested {request[0]}")
    assert explain_unsupported_kernel(64, torch.bfloat16, "cuda") == "tested 64"
    assert explain_unsupported_kernel(48, torch.bfloat16, "cuda").startswith(
        "its heads have 48 columns, Triton's kernel has powers of"
    )
    assert explain_unsupported_kernel(48, torch.float16, "cuda") == ""  # plain torch computes it
    monkeypatch.setattr("fivetune.model.attention.explain_missing_triton", lambda: "Triton is not installed")
    chosen = choose_forward("auto", setup.learner.model, "cuda", [], autocast=nullcontext)
    assert chosen == Forward("padded", "flat tokens cannot run: Triton is not installed")


def test_the_place_is_taken(monkeypatch):
    taken = []
    monkeypatch.setattr("fivetune.training.compute.pick_device", lambda asked: asked)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for device in ("cuda:1", "cuda", "cpu"):
        train_section = SimpleNamespace(num_threads=1, precision="fp32")
        choose_compute(SimpleNamespace(device=device, train=train_section))  # type: ignore[arg-type]
    assert taken == ["cuda:1"]
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # it plans every exact shape anew, and decoding has thousands
    torch.backends.cuda.enable_cudnn_sdp(True)


FLUSHED = """
from types import SimpleNamespace
import torch
from fivetune.training.compute import choose_compute
choose_compute(SimpleNamespace(device="cpu", train=SimpleNamespace(num_threads=2, precision="fp32")))
assert torch.get_num_threads() == 2
assert not (torch.full((2**20,), 1e-38) * 0.1).view(torch.int32).any()
"""


@pytest.mark.slow
def test_all_threads_flush_denormals():
    done = subprocess.run([sys.executable, "-c", FLUSHED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


OURS = [Forward("flat", "", False, "triton"), Forward("flat", "", False, "torch")]
PADDED = Forward("padded", "")


@pytest.fixture
def cuda(monkeypatch):
    """The CPU counts as a device of Triton's kernels, and the forwards take these seconds a batch."""
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "DEVICES", ("cuda", "cpu"))
    times = dict(zip((*OURS, PADDED), (0.1, 0.2, 0.3), strict=True))
    monkeypatch.setattr(autotune, "measure_batch_seconds", lambda forward, *_: times[forward])
    return times


@pytest.fixture
def small(tmp_path, tokenizer_folder):
    """A set-up whose model the interpreter runs in seconds."""
    model = kit.make_model(tmp_path / "small", tokenizer_folder, num_layers=1, num_heads=2)
    return kit.ready(tmp_path, model, model__dropout=0.0)


def _fastest(setup, wanted="auto", ours=OURS):
    batch = collate(setup.data.stream.store, [0])  # the interpreter takes a second for each example
    return autotune.choose_fastest(ours, PADDED, setup.learner.model, "cpu", [batch], nullcontext, wanted=wanted)


@pytest.mark.slow
def test_the_fastest_forward_that_agrees_is_taken(small, cuda):
    weights = [p.detach().clone() for p in small.learner.model.parameters()]
    found = _fastest(small)
    assert (found.kind, found.parts) == ("flat", "triton")
    assert found.why == (
        "measured: flat (triton norms and activations) 100.0 ms a batch; "
        "flat (torch norms and activations) 200.0 ms a batch; padded 300.0 ms a batch"
    )
    assert all(p.grad is None for p in small.learner.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, small.learner.model.parameters(), strict=True))
    cuda[PADDED] = 0.01
    assert _fastest(small, ours=OURS[1:]).kind == "padded"
    assert _fastest(small, "flat", ours=OURS[1:]).parts == "torch"


@pytest.mark.slow
def test_kernels_that_disagree_or_fail_are_not_used_and_why_is_said(small, cuda, monkeypatch):
    from fivetune.model.cuda import attention, norm

    def fail(*args, **named):
        raise RuntimeError("PTX was compiled with an unsupported toolchain.\nmore")

    original = norm.compute_branch_norm

    def cut(*args, branch=None, **named):
        return original(*args, branch=None if branch is None else branch.detach(), **named)

    monkeypatch.setattr(norm, "compute_branch_norm", cut)
    found = _fastest(small)
    assert found.parts == "torch" and "(triton norms and activations) is not used: " in found.why
    assert " instead of " in found.why
    monkeypatch.setattr(norm, "compute_branch_norm", fail)
    found = _fastest(small)
    assert found.parts == "torch" and "is not used: RuntimeError: PTX was compiled with an unsupp" in found.why
    monkeypatch.setattr(attention, "compute_attention", fail)
    assert _fastest(small).kind == _fastest(small, "flat").kind == "padded"
