"""What test_tpu.py runs in a process of its own: jax with four virtual devices, which stand in for chips.

In: a folder with a tiny model. Out: seen.json there.
"""

from __future__ import annotations

import copy
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import torch
from kit import ready, recipe

from fivetune.config import load_config
from fivetune.model.decode import generate
from fivetune.training.run import train
from fivetune.training.step.groups import build_optimizer
from fivetune.training.step.tpu import Chips
from fivetune.training.step.update import train_step

# AdamW divides by a gradient's size plus eps. With the usual 1e-8, rounding (1e-8 here) alone decides the first step of
# a weight whose gradient is nearly 0, and moves it by up to the learning rate. Typical gradients are 1e-3.
ADAMW = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.01, "eps": 1e-5}
ADAFACTOR = {"name": "adafactor", "lr": 1e-2}
CASES: dict[str, Any] = {"one": (1, False, ADAMW), "four": (4, False, ADAMW), "sharded": (4, True, ADAFACTOR)}


def differences(folder: Path, model: Path, num_chips: int, sharded: bool, optimizer: dict[str, Any]) -> dict[str, Any]:
    """Largest differences between torch and the chips over three steps of two uneven micro-batches, and answers."""
    setup = ready(
        folder, model, model__dropout=0.0, optimizer=optimizer, train__batch_size=5, train__global_batch_size=10
    )
    learner = setup.learner
    other = copy.deepcopy(learner.model)
    rebuilt = build_optimizer(setup.config, other)
    chips = Chips(other, sharded=sharded, max_norm=learner.max_grad_norm, devices=jax.devices()[:num_chips])
    found: dict[str, Any] = {"loss": 0.0}
    for step in range(3):
        group = setup.data.stream.build_micro_batches(step)
        expected = train_step(learner, group, lr=1e-3, step=step + 1)
        for each in rebuilt.param_groups:
            each["lr"] = 1e-3
        tokens = sum(batch.num_target_tokens for batch in group)
        values = chips.update(group, rebuilt, batch_size=5, num_scored_tokens=tokens)
        found["loss"] = max(found["loss"], *(values[:2] / expected.values[:2] - 1).abs().tolist())
    chips.fetch()
    pairs = list(zip(learner.model.parameters(), other.parameters(), strict=True))
    found["weights"] = max((a - b).abs().max().item() for a, b in pairs)
    found["state"] = max(
        (torch.as_tensor(value) - torch.as_tensor(rebuilt.state[b][name])).abs().max().item()
        for a, b in pairs
        for name, value in learner.optimizer.state[a].items()
    )
    if num_chips > 1:
        return found
    evaluator = setup.data.evaluator
    assert evaluator is not None
    rows = range(len(evaluator.store))
    free = replace(evaluator.decoding, min_new_tokens=3, suppressed_ids=(9, 10))
    for name, decoding in {"free": free, "labels": replace(free, label_ids=((5, 6, 1), (7, 1)))}.items():
        answers = [
            sorted(run(other, evaluator.store, rows, decoding, device="cpu", autocast=nullcontext), key=lambda a: a.row)
            for run in (generate, chips.generate)
        ]
        found[name] = [[flatten(answer) for answer in each] for each in answers]
    return found


def flatten(answer: Any) -> list[Any]:
    scores = (answer.logprob, answer.target_loss, answer.phrase_loss, *(answer.label_logprobs or ()))
    exact = (answer.token_ids, answer.hit_cap, answer.num_scored_tokens, answer.target_correct, answer.left_label_set)
    return [list(exact), list(scores)]


def dropout(folder: Path, model: Path) -> list[float]:
    """Losses of the first step with one seed, the same, and another."""
    setup = ready(folder, model, model__dropout=0.3)
    group = setup.data.stream.build_micro_batches(0)
    losses = []
    for seed in (1, 1, 2):
        other = copy.deepcopy(setup.learner.model)
        chips = Chips(other, seed=seed, devices=jax.devices()[:1])
        losses.append(chips.update(group, build_optimizer(setup.config, other), batch_size=4, num_scored_tokens=60)[0])
    return [loss.item() for loss in losses]


def resumed(folder: Path, model: Path) -> dict[str, Any]:
    """The losses of six steps on the CPU, and of three on the chips and three more on the CPU."""
    shared: dict[str, Any] = {"model__dropout": 0.0, "train__forward": "buckets", "train__log_every_steps": 1}
    losses = {}
    for name, parts in {"cpu": [("cpu", 6)], "tpu": [("tpu", 3), ("cpu", 6)]}.items():
        (folder / name).mkdir()
        for number, (device, num_steps) in enumerate(parts):
            given = recipe(folder / name, model, **shared, device=device, train__num_steps=num_steps)
            given["schedule"] = {"name": "constant"}
            train(load_config(given), resume=number > 0, quiet=True)
        lines = (folder / name / "run" / "steps.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
    return losses


if __name__ == "__main__":
    place, tied, own = (Path(word) for word in sys.argv[1:])
    seen: dict[str, Any] = {}
    for case, settings in CASES.items():
        (place / case).mkdir()
        seen[case] = differences(place / case, own if case == "sharded" else tied, *settings)
    (place / "dropout").mkdir()
    seen["dropout"] = dropout(place / "dropout", tied)
    seen["resumed"] = resumed(place, tied)
    (place / "seen.json").write_text(json.dumps(seen))
