"""Test of the attention kernels on this GPU, in a process of its own: a kernel that breaks its device breaks only that.

In: head size, dtype and device of a model. Out: why the kernels cannot be used there; "" if they give the right values.
The process runs all kernels, forward and backward, on sequences at the edges of their tiles, and compares output
and gradients with their definition in fp64. A driver that is too old, a Triton that cannot compile, a kernel that reads
memory out of bounds (Triton 3.6 and later may for heads of 32 columns and fewer on Hopper: triton#10486), one that
hangs: each is a reason. What has passed is noted beside Triton's compiled kernels and is not tested again.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from fivetune.errors import format_error, is_out_of_memory

COMMAND = (sys.executable, "-m", "fivetune.model.cuda.kernel_trial")
LONGEST_SECONDS = 180.0  # of a test that compiles the kernels; a kernel that hangs has failed
LENGTHS = (1, 63, 64, 65, 130)  # at the edges of tiles
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # largest error relative to the largest value or 1
DROPOUT, NUM_HEADS = 0.1, 2
PASSED = "right"


@cache
def find_kernel_fault(head_size: int, kind: torch.dtype, device: str) -> str:
    """Explain why the attention kernels cannot be used on a GPU; empty if they give the right values there.

    Also empty where another process cannot open the device (exclusive mode): the comparison of gradients at the start
    of a run is then the only test.

    Args:
        head_size: columns of a head. kind: dtype of matrix products. device: `cuda` or `cuda:1`.
    """
    marker = _find_marker(head_size, kind, device)
    if marker.is_file():
        return ""
    request = [head_size, str(kind).removeprefix("torch."), device]
    output, failure = run_elsewhere(COMMAND, request, longest_seconds=LONGEST_SECONDS)
    if failure:
        return f"Triton's attention kernels failed their test on this device: {failure}"
    if output.strip().endswith(PASSED):
        with suppress(OSError):  # a full or read-only folder: the next start tests again
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
    return ""


def run_elsewhere(command: Sequence[str], request: object, *, longest_seconds: float) -> tuple[str, str]:
    """Run a program with a request, as JSON on its standard input. Returns: output; why it failed, "" if not."""
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]  # sources that are not installed
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=longest_seconds,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return "", f"it took more than {longest_seconds:.0f} s"
    if done.returncode == 0:
        return done.stdout, ""
    # The last line of a traceback names the error.
    return "", next(iter(done.stderr.strip().splitlines()[::-1]), f"it ended with code {done.returncode}")


def _find_marker(head_size: int, kind: torch.dtype, device: str) -> Path:
    """The file that says that these kernels have passed on this device, with this driver and these versions."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    parts: list[object] = [head_size, kind, torch.__version__]
    with suppress(PackageNotFoundError):
        parts.append(version("triton"))
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
        parts += [properties.name, getattr(properties, "uuid", device), driver]
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8)
    # Changed kernels are tested again.
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return folder / f"fivetune-{digest.hexdigest()}.passed"


def attend_eagerly(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, cu_q: Tensor, cu_k: Tensor, causal: bool
) -> Tensor:
    """Attention of one sequence after the other, all scores at hand; a query without keys gives 0."""
    outs: list[Tensor] = []
    for (start_q, end_q), (start_k, end_k) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        scores = torch.einsum("ihd,jhd->hij", q[start_q:end_q], k[start_k:end_k])
        rows = torch.arange(end_q - start_q, device=q.device)
        distance = torch.arange(end_k - start_k, device=q.device) - rows[:, None]
        if bias is not None:
            scores = scores + bias[:, distance + bias.shape[1] // 2]
        if causal:
            scores = scores.masked_fill(distance > 0, -torch.inf)
        outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[start_k:end_k]))
    return torch.cat(outs)


def find_wrong_value(
    head_size: int, kind: torch.dtype, device: str, *, lengths: tuple[int, ...] = LENGTHS, num_heads: int = NUM_HEADS
) -> str:
    """Describe the first output or gradient that differs from its definition or between two runs; empty if none."""
    for part in ("encoder", "decoder", "cross"):
        if fault := _find_wrong_part(part, head_size, kind, device, lengths, num_heads):
            return f"{part} attention with heads of {head_size} columns: {fault}"
    return ""


def _find_wrong_part(
    part: str, head_size: int, kind: torch.dtype, device: str, lengths: tuple[int, ...], num_heads: int
) -> str:
    from fivetune.model.cuda.attention import compute_attention  # needs Triton, which may be broken

    generator = torch.Generator().manual_seed(0)
    keys = lengths[::-1] if part == "cross" else lengths
    shapes = [(sum(n), num_heads, head_size) for n in (lengths, keys, keys)]
    drawn = [torch.randn(shape, generator=generator).to(device, kind) for shape in shapes]
    drawn[0] *= head_size**-0.5  # so that the softmax is neither flat nor a single one
    names = ["output", "gradient of the queries", "gradient of the keys", "gradient of the values"]
    if part != "cross":
        drawn.append(torch.randn(num_heads, 2 * max(lengths) - 1, generator=generator).to(device))
        names.append("gradient of the bias")
    leaves = [each.requires_grad_() for each in drawn]
    doubles = [each.detach().double().requires_grad_() for each in leaves]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int().to(device) for n in (lengths, keys))
    grad = torch.randn(shapes[0], generator=generator).to(device, kind)
    seed = torch.full((1,), 7, dtype=torch.int64, device=device)
    causal = part == "decoder"

    def run(dropout: float) -> list[Tensor]:
        q, k, v, *bias = leaves
        longest = max(lengths)
        bias = bias[0] if bias else None
        out = compute_attention(q, k, v, cu_q, cu_k, longest, longest, bias, causal, dropout, seed)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    q, k, v, *bias = doubles
    exact = attend_eagerly(q, k, v, bias[0] if bias else None, cu_q, cu_k, causal)
    expected = [exact, *torch.autograd.grad(exact, doubles, grad.double())]
    for name, ours, theirs in zip(names, run(0.0), expected, strict=True):
        error = ((ours.double() - theirs).abs().max() / theirs.abs().max().clamp_min(1)).item()
        if not error <= ALLOWED[kind]:
            return f"the {name} is off by {error:.2g} of its largest value, allowed is {ALLOWED[kind]:g}"
    # Masks of equal seeds are equal, so two runs are equal in every bit.
    for name, first, second in zip(names, run(DROPOUT), run(DROPOUT), strict=True):
        if (first != second).any():
            return f"the {name} differs between two runs"
    return ""


def main() -> int:
    """Run the request on the standard input; print why it failed, or PASSED."""
    head_size, kind, device = json.load(sys.stdin)
    try:
        torch.zeros(1, device=device)
    except RuntimeError:  # busy, or in exclusive mode: nothing is known of the kernels
        return 0
    try:
        fault = find_wrong_value(head_size, getattr(torch, kind), device)
    except Exception as error:  # of any class: drivers and compilers raise many
        if is_out_of_memory(error):  # others use the device: nothing is known of the kernels either
            return 0
        fault = format_error(error)
    if fault:
        sys.stderr.write(f"{fault}\n")
        return 1
    sys.stdout.write(f"{PASSED}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
