"""The test of the attention kernels on a device: what it finds, and that a run without them computes by plain torch."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import nullcontext

import kit
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="the package triton is not installed; it exists for Linux only")

from fivetune.model.cuda import attention, kernel_trial, tiles
from fivetune.model.cuda.kernel_trial import find_kernel_fault, find_wrong_value
from fivetune.training.autotune.forward import choose_forward


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder of compiled kernels, and no verdict of an earlier test."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "compiled"))
    find_kernel_fault.cache_clear()
    yield tmp_path / "compiled"
    find_kernel_fault.cache_clear()


def end_with(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_kernels_that_pass_are_tested_once(folder, monkeypatch):
    monkeypatch.setattr(kernel_trial, "COMMAND", end_with("print('right')"))
    assert find_kernel_fault(64, torch.bfloat16, "cuda") == ""
    assert [path.suffix for path in folder.iterdir()] == [".passed"]
    find_kernel_fault.cache_clear()
    monkeypatch.setattr(kernel_trial, "COMMAND", end_with("raise SystemExit('again')"))
    assert find_kernel_fault(64, torch.bfloat16, "cuda") == ""
    assert find_kernel_fault(32, torch.bfloat16, "cuda").endswith("on this device: again")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise RuntimeError('CUDA error: an illegal memory access was encountered')", "an illegal memory access"),
        ("raise RuntimeError('the provided PTX was compiled with an unsupported toolchain.')", "unsupported toolchain"),
        ("import os; os.abort()", "it ended with code -6"),
        ("import time; time.sleep(60)", "took more than 1 s"),
    ],
)
def test_a_device_on_which_they_fail_is_not_given_them(tmp_path, model_folder, monkeypatch, code, why):
    """An old driver, a broken Triton, a kernel that breaks its device or hangs: the run computes by plain torch."""
    setup = kit.ready(tmp_path, model_folder)
    monkeypatch.setattr(kernel_trial, "COMMAND", end_with(code))
    monkeypatch.setattr(kernel_trial, "LONGEST_SECONDS", 1.0 if "sleep" in code else 60.0)
    chosen = choose_forward("auto", setup.learner.model, "cuda", [], autocast=nullcontext)
    assert chosen.kind == "padded" and chosen.why.startswith("flat tokens cannot run: ") and why in chosen.why
    assert chosen.as_facts()["why"] == chosen.why  # what machine.json records
    assert not list((tmp_path / "compiled").glob("*"))


def test_a_device_that_another_process_cannot_open_is_not_judged(folder, monkeypatch):
    monkeypatch.setattr(kernel_trial, "COMMAND", end_with("pass"))
    assert find_kernel_fault(64, torch.bfloat16, "cuda") == "" and not folder.exists()


@pytest.fixture
def small_tiles(monkeypatch):
    for kernel, kind in tiles.TILES:
        monkeypatch.setitem(tiles.TILES, (kernel, kind), tiles.Tile(32, 32, warps=1))


def find(kind: torch.dtype = torch.float32) -> str:
    return find_wrong_value(8, kind, "cpu", lengths=(1, 33), num_heads=1)


@pytest.mark.release
def test_right_values_in_16_bit_pass(small_tiles):
    assert find(torch.bfloat16) == ""


@pytest.mark.slow
def test_right_values_pass_and_wrong_ones_are_named(monkeypatch, small_tiles):
    assert find() == ""
    original = attention.compute_attention
    monkeypatch.setattr(attention, "compute_attention", lambda q, k, v, *rest: original(q, k, 1.1 * v, *rest))
    assert find().startswith("encoder attention with heads of 8 columns: the output is off by 0.")
    monkeypatch.setattr(
        attention, "compute_attention", lambda q, k, v, *rest: original(q, k.detach() + 0 * k, v, *rest)
    )
    assert "the gradient of the keys is off by 1 of its largest value, allowed is 0.0001" in find()

    def race(q, k, v, *rest):
        drawn = 1e-7 * torch.rand(()) if rest[-2] else 0.0  # with dropout alone, whose two runs are compared
        return original(q, k, v, *rest) + drawn

    monkeypatch.setattr(attention, "compute_attention", race)
    assert find().endswith("the output differs between two runs")


@pytest.mark.slow
def test_the_process_says_why(monkeypatch, capsys):
    def fail(*args):
        raise ImportError("libtriton.so: undefined symbol\nmore")

    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps([16, "float32", "cpu"])))
    monkeypatch.setattr(attention, "compute_attention", fail)
    assert kernel_trial.main() == 1
    assert capsys.readouterr() == ("", "ImportError: libtriton.so: undefined symbol\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps([16, "float32", "cuda:9"])))
    monkeypatch.setattr(torch, "zeros", lambda *args, device: fail() if device == "cpu" else raise_busy())
    assert kernel_trial.main() == 0 and capsys.readouterr().out == ""


def test_too_little_memory_says_nothing_of_the_kernels(monkeypatch, capsys):
    def fail(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps([16, "float32", "cpu"])))
    monkeypatch.setattr(kernel_trial, "find_wrong_value", fail)
    assert (kernel_trial.main(), capsys.readouterr().out) == (0, "")


def raise_busy():
    raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")


def test_small_heads_have_tiles_without_wgmma():
    """Triton multiplies tiles of fewer than 64 rows by mma.sync; wgmma is where it reads memory out of bounds."""
    for kernel in ("forward", "grad_q", "grad_kv"):
        for head_size in (8, 16, 32):
            tile = tiles.choose_attention_tile(kernel, head_size, num_bytes=2)
            assert max(tile.rows, tile.cols) == 32, (kernel, head_size)
        assert tiles.choose_attention_tile(kernel, 64, num_bytes=2).cols == 64


BROKEN = """
import sys
sys.modules["triton"] = None  # every import of it fails
from fivetune.model.decode import generate
from fivetune.model.attention import explain_unsupported_kernel
"""


@pytest.mark.slow
def test_a_broken_triton_does_not_keep_a_run_from_starting():
    """What decides is imported without Triton."""
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
