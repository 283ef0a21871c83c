"""Optimizer steps: FiveTune's Adafactor against transformers', over the weights of a whole model.

Same weights, same gradients, windows of steps interleaved A B B A; the weights are compared at the end.
Peaks of memory are those of the whole process, so only the state is told.
    python -m benchmarks.optimizers --model t5-small
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import (
    UnequalWork,
    Work,
    facts,
    interleaved,
    make_parser,
    publish_result,
    rates,
    ratio,
    same_totals,
    table,
)
from benchmarks.workloads import MODELS, make_model
from fivetune.machine.telemetry.cores import count_cores
from fivetune.training.optimizers._batched_adafactor import BatchedAdafactor

WARM_UP, STEPS, NUM_WINDOWS = 1, 2, 6
GRADIENT_SIZE = 1e-3
MOST_ROUNDING = 5e-6  # relative to 1 + |weight|; equal gradients repeat one rounding in every step
VARIANTS: dict[str, dict[str, Any]] = {
    "t5-paper": {"scale_parameter": True},
    "hf": {"scale_parameter": False},
    "t5-paper, momentum": {"beta1": 0.9},
    "t5-paper, weight decay": {"weight_decay": 0.01},
}


class Steps:
    """An optimizer over its own copy of the weights; gradients stay as they are."""

    def __init__(self, name: str, kind: Any, weights: list[Tensor], gradients: list[Tensor], **options: Any) -> None:
        self.name = name
        self.parameters = [nn.Parameter(weight.clone()) for weight in weights]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer: torch.optim.Optimizer = kind(self.parameters, lr=1e-3, relative_step=False, **options)

    def work(self, num_units: int) -> Work:
        for _ in range(num_units):
            self.optimizer.step()
        return Work(num_units, {"parameters": num_units * sum(p.numel() for p in self.parameters)})

    def state_bytes(self) -> float:
        """Bytes of state per parameter."""
        tensors = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors) / sum(p.numel() for p in self.parameters)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="t5-small", choices=list(MODELS))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="CPU threads; default: physical cores")
    args = parser.parse_args()
    torch.set_num_threads(args.threads or count_cores())
    weights = [weight.to(args.device) for weight in weights_of(args.model)]
    random = torch.Generator(args.device).manual_seed(1)
    gradients = [torch.randn(w.shape, generator=random, device=args.device) * GRADIENT_SIZE for w in weights]
    found = {name: compare(weights, gradients, args.device, options) for name, options in VARIANTS.items()}
    head = [
        "Adafactor",
        "transformers ms",
        "FiveTune ms",
        "ratio",
        "(least to most)",
        "state B/parameter",
        "difference",
    ]
    print(table([head, *([name, *_cells(one)] for name, one in found.items())]))
    result = {"model": args.model, "device": args.device, "variants": found, "machine": facts(args.device)}
    publish_result(args, f"optimizers-{args.device}-{args.model}", result)


def weights_of(model: str) -> list[Tensor]:
    """The random weights of a model of the benchmarks."""
    from fivetune.model.load import load_model_and_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model_and_tokenizer(str(make_model(model, Path(folder))))
        return [parameter.detach() for parameter in loaded.model.parameters()]


def compare(weights: list[Tensor], gradients: list[Tensor], device: str, options: dict[str, Any]) -> dict[str, Any]:
    """Times of both, and how far their weights are apart. Raises UnequalWork if that is more than rounding."""
    from transformers.optimization import Adafactor

    theirs = Steps("transformers", Adafactor, weights, gradients, **options)
    ours = Steps("fivetune", BatchedAdafactor, weights, gradients, **options)
    interleaved([ours, theirs], WARM_UP, 1, device=device)
    windows = interleaved([ours, theirs], STEPS, NUM_WINDOWS, device=device)
    same_totals(windows, "parameters")
    pairs = zip(ours.parameters, theirs.parameters, strict=True)
    difference = max(float(((a - b).abs() / (1 + b.abs())).max().detach()) for a, b in pairs)
    if difference > MOST_ROUNDING:
        raise UnequalWork(f"Adafactor {options}: weights are {difference} apart, more than rounding.")
    return {
        "milliseconds": {name: 1e3 / rates(each, "units").median for name, each in windows.items()},
        "ratio": ratio(windows["fivetune"], windows["transformers"], "units").as_list(),
        "state_bytes_per_parameter": ours.state_bytes(),
        "largest_difference": difference,
    }


def _cells(found: dict[str, Any]) -> list[str]:
    middle, least, most = found["ratio"]
    return [
        f"{found['milliseconds']['transformers']:.1f}",
        f"{found['milliseconds']['fivetune']:.1f}",
        f"{middle:.2f}x",
        f"{least:.2f} to {most:.2f}",
        f"{found['state_bytes_per_parameter']:.3f}",
        f"{found['largest_difference']:.1e}",
    ]


if __name__ == "__main__":
    main()
