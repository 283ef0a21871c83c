"""Decoding on CUDA, without a GPU: the CPU counts as a device of the kernels, which Triton's interpreter runs."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import kit
import pytest
import torch
from cuda_kit import attend
from decoding_kit import lively, question_store
from flat_kit import make_model
from torch.utils._python_dispatch import TorchDispatchMode

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="the package triton is not installed; it exists for Linux only")

from fivetune.model.cuda import dispatch
from fivetune.model.decode import Decoding, captured, generate
from fivetune.model.decode.steps import Decoder
from fivetune.model.decode.weights import keep_weights
from fivetune.model.weight_cache import KEPT

pytestmark = pytest.mark.slow

IDS = torch.ones(72, dtype=torch.int64)
LENGTHS = [12] * 6, [12, 14, 11, 13, 10, 12]
AUTOCAST = partial(torch.autocast, "cpu", torch.bfloat16)


class Launches(TorchDispatchMode):
    """Names of the operators that compute, and the addresses of what is cast."""

    VIEWS = (
        "view",
        "t",
        "transpose",
        "permute",
        "split",
        "unbind",
        "as_strided",
        "expand",
        "slice",
        "select",
        "detach",
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.casts: set[int] = set()

    def note(self, what):
        self.names.append(str(what)[:40])
        return torch.empty(what.shape, dtype=what.dtype) if isinstance(what, torch.Tensor) else None

    def count(self, run) -> int:
        before = len(self.names)
        run()
        return len(self.names) - before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).split(".")[1].removeprefix("_unsafe_")
        if name not in self.VIEWS and "empty" not in name and "squeeze" not in name:
            self.names.append(name)
        if name == "_to_copy":
            self.casts.add(args[0].data_ptr())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_cuda(monkeypatch):
    monkeypatch.setattr(dispatch, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr("fivetune.model.cuda.attention.compute_attention", attend)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("t5", torch.float32),
        ("mt5", torch.bfloat16),
        kit.release("t5", torch.bfloat16),
        kit.release("mt5", torch.float32),
    ],
)
def test_copies_and_kernels_write_the_same_answers(family_folders, tmp_path, monkeypatch, as_cuda, kind, family):
    """Captured, in fp32 against the CPU's own path; in bf16, which the interpreter cuts off, without kept copies."""
    monkeypatch.setattr(captured, "supports_graphs", lambda device: True)
    monkeypatch.setattr(captured, "get_recorder", lambda device: lambda function: function)
    folder = family_folders[family]
    model, store = lively(folder), question_store(tmp_path, folder, num_questions=3)
    autocast = partial(torch.autocast, "cpu", kind, enabled=kind != torch.float32)
    decoding = Decoding(max_new_tokens=3, batch_size=2)
    run = partial(generate, model, store, range(3), device="cpu", autocast=autocast)
    found = {one.row: one for one in run(decoding)}
    assert not any(hasattr(parameter, KEPT) for parameter in model.parameters())
    if kind == torch.float32:
        monkeypatch.setattr(dispatch, "DEVICES", ("cuda",))
    else:
        monkeypatch.setattr("fivetune.model.decode.engine.keep_weights", lambda *args: nullcontext)
    for one in run(replace(decoding, capture=kind != torch.float32)):
        assert found[one.row].token_ids == one.token_ids and len(found) == 3
        assert found[one.row].logprob == pytest.approx(one.logprob, rel=1e-3)


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_lengths_cost_no_launches_and_weights_are_cast_once(monkeypatch, as_cuda, family):
    """Of a layer of t5, 8 kernels encode a batch and 21 take a step: 252 of t5-base, where `generate` has 579."""
    seen = Launches()
    monkeypatch.setattr("fivetune.model.cuda.attention.compute_attention", lambda q, *rest, **named: seen.note(q))
    for name in ("norm", "pointwise"):
        monkeypatch.setattr(f"fivetune.model.cuda.{name}.launch", lambda kernel, *args, **named: seen.note(kernel))
    encode, step = [], []
    for layers in (1, 2):
        model = make_model(family, num_layers=layers, num_decoder_layers=layers).eval()
        attach = keep_weights(model, "cpu", AUTOCAST)
        with torch.no_grad(), AUTOCAST(), attach(), seen:
            decoder = Decoder(model, num_beams=1, max_steps=8)
            decoder.encode(IDS, list(LENGTHS[0]))  # fills the cache of distances
            encode.append([seen.count(partial(decoder.encode, IDS, list(lengths))) for lengths in LENGTHS])
            decoder.start(decoder.encode(IDS, list(LENGTHS[0])))
            step.append([seen.count(partial(decoder.step, IDS[:6, None], [n] * 6)) for n in range(3)])
            assert not seen.casts & {parameter.data_ptr() for parameter in model.parameters() if parameter.dim() > 1}
    assert all(len(set(counts)) == 1 for counts in encode)
    assert (encode[1][0] - encode[0][0], step[1][2] - step[0][2]) == ((8, 21) if family == "t5" else (10, 22))
