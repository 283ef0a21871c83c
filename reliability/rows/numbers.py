"""Values that are not finite: in losses, gradients, activations, on one rank, and where fp16 overflows."""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Iterator
from functools import partial
from itertools import count, cycle, product
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from fivetune.rundir import read_run
from reliability.campaign import Row, Trial
from reliability.faults import NEVER_FIRED, train
from reliability.peer import VARIANTS as peer_variants
from reliability.peer import train_peer
from reliability.ranks import Ranks
from reliability.warm import WarmProcess, check_no_trace, check_success
from reliability.workload import (
    FAMILIES,
    NUM_STEPS,
    Workload,
    check_same_run,
    count_ranks,
    find_resume_words,
    make_model,
    resume,
)

PLACES = ("loss", "gradient", "activations")
VARIANTS = ("adamw", "adafactor", "accumulation", "ddp")
FOR_EVER = 10**9
OVERFLOWING_FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {"family": name} for name in FAMILIES},
    "longt5": {
        "model_type": "longt5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
        "encoder_attention_type": "local", "local_radius": 8, "global_block_size": 4,
    },
}  # fmt: skip
OVERFLOWING = 2.0**18  # times the feed-forward outputs of a tiny model: they pass 65,504, its weights do not
UNSUPPORTED = ("longt5",)  # families that transformers' modules compute
NUM_SCALES = 16  # that a GradScaler tries, from 65,536 to 2
LARGEST_HALF = 65_504  # of fp16


def put_bad_values(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """NaN or infinity at each place of each variant in turn, from a random step on: once, or for ever."""
    faults = list(product(PLACES, VARIANTS))
    for number, (place, variant) in enumerate(cycle(random.sample(faults, len(faults)))):
        value, step = random.choice((math.nan, math.inf, -math.inf)), random.randint(1, NUM_STEPS)
        last = step if random.random() < 0.5 else FOR_EVER
        share = random.random()
        kept = "once" if last == step else "for ever"

        def run(
            folder: Path,
            fault: tuple[Any, ...] = (place, value, step, last, share),
            variant: str = variant,
            step: int = step,
            is_once: bool = last == step,
        ) -> None:
            num, path = count_ranks(variant), folder / "run"
            recipe = workload.write_recipe(folder, variant)
            check_nonfinite_exit(Ranks(train_with_bad_values, str(recipe), *fault, num=num).finish(), path, step)
            if is_once:
                resume(recipe, path, num_ranks=num)
                check_same_run(path, workload.run_undisturbed(variant).run)
                return
            again = Ranks(train_with_bad_values, str(recipe), *fault, *find_resume_words(path), num=num)
            check_nonfinite_exit(again.finish(), path, step)

        yield Trial(f"{number} {value} {kept} in the {place} of {variant} from step {step}", run)


def check_nonfinite_exit(done: CompletedProcess[str], run: Path, step: int) -> None:
    """The run ended with code 5 at the step, which it names, and every weight on the disk is finite."""
    assert done.returncode == 5, f"exit code {done.returncode}: {done.stderr[-600:]}"
    assert re.search(rf"step {step}: (loss|gradient norm) -?(nan|inf), first in ", done.stderr), done.stderr[-600:]
    check_no_trace(done.stderr)
    check_finite(run)
    found = read_run(run)
    assert (found.status.state, found.status.nonfinite_step) == ("failed", step), found.status
    assert [one.step for one in found.steps] == list(range(1, step)), "steps on record"
    assert not (run / "model").exists(), "a model was exported"


def check_finite(run: Path) -> None:
    """Every weight that the run has written is finite."""
    import numpy as np
    from safetensors.numpy import load_file

    for file in run.rglob("*.safetensors"):
        bad = [name for name, tensor in load_file(file).items() if not np.isfinite(tensor).all()]
        assert not bad, f"{file.relative_to(run)} has values that are not finite in {bad[:3]}"


def train_with_bad_values(
    recipe: str, place: str, value: float, first: int, last: int, share: float, *words: str
) -> int:
    """Train; from step `first` to `last`, on the last rank, values at `place` are `value`.

    Args:
        share: which of the weights has the bad gradient, in 0 to 1.
    """
    from torch import Tensor

    from fivetune.model import flat
    from fivetune.model.backend import Forward
    from fivetune.training import loop

    whole = {"step": loop.train_step, "loss": Forward.compute_losses, "activations": flat.apply_feed_forward}
    state = {"active": False, "hooked": False, "fired": False}

    def spoil(values: Tensor) -> Tensor:
        if not state["active"]:
            return values
        state["fired"] = True
        spoilt = values.clone()
        spoilt.view(-1)[0] = value
        return spoilt

    def train_step(learner: Any, group: Any, **options: Any) -> Any:
        state["active"] = first <= options["step"] <= last and learner.world.rank == learner.world.size - 1
        if place == "gradient" and not state["hooked"]:
            weights = [weight for weight in learner.model.parameters() if weight.requires_grad]
            weights[int(share * len(weights))].register_hook(spoil)
            state["hooked"] = True
        return whole["step"](learner, group, **options)

    def compute_losses(*args: Any, **named: Any) -> Any:
        losses, num_positions = whole["loss"](*args, **named)
        return spoil(losses), num_positions

    def apply_feed_forward(*args: Any, **named: Any) -> Any:
        found = whole["activations"](*args, **named)
        return found._replace(branch=spoil(found.branch))

    loop.train_step = train_step
    if place == "loss":
        Forward.compute_losses = compute_losses
    if place == "activations":
        flat.apply_feed_forward = apply_feed_forward
    code = train(recipe, *words)
    is_spoilt = os.environ.get("RANK", "1") == "1"  # of two ranks the last, or the only one
    return NEVER_FIRED if is_spoilt and not state["fired"] else code


def put_bad_values_in_peer(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """The same in the Trainer, of one process: its weights are to stay finite, or its exit code to tell."""
    for number in count():
        variant, place = list(peer_variants)[number % len(peer_variants)], PLACES[number // 2 % len(PLACES)]
        value, step = random.choice((math.nan, math.inf)), random.randint(1, NUM_STEPS)
        last = step if random.random() < 0.5 else FOR_EVER
        kept = "once" if last == step else "for ever"

        def run(
            folder: Path, variant: str = variant, fault: tuple[Any, ...] = (place, value, step, last, random.random())
        ) -> None:
            prepare = partial(spoil_trainer, str(folder / "fired"), *fault)
            words = (str(folder), str(workload.model), peer_variants[variant], prepare)
            done = WarmProcess(train_peer, *words).finish()
            assert (folder / "fired").exists(), f"no value was spoilt: {done.stderr[-300:]}"
            if done.returncode == 0:
                check_finite(folder / "run")

        yield Trial(f"{number} {value} {kept} in the {place} of {variant} from step {step}", run)


def spoil_trainer(fired: str, place: str, value: float, first: int, last: int, share: float) -> None:
    """Replace a value of the Trainer's steps `first` to `last`, as in `train_with_bad_values`; then make `fired`."""
    import torch
    from torch import Tensor
    from transformers.models.t5.modeling_t5 import T5LayerFF
    from transformers.trainer import Trainer

    whole = {"loss": Trainer.compute_loss, "activations": T5LayerFF.forward}
    state = {"active": False, "hooked": False}

    def spoil(values: Tensor) -> Tensor:
        if not state["active"]:
            return values
        Path(fired).touch()
        spoilt = values.clone()
        spoilt.view(-1)[0] = value
        return spoilt

    def compute_loss(self: Any, model: Any, *args: Any, **named: Any) -> Any:
        state["active"] = first <= self.state.global_step + 1 <= last
        if place == "gradient" and not state["hooked"]:
            weights = [weight for weight in model.parameters() if weight.requires_grad]
            weights[int(share * len(weights))].register_hook(spoil)
            state["hooked"] = True
        loss: Any = whole["loss"](self, model, *args, **named)
        # A constant in its place would have no gradient.
        return loss * spoil(torch.ones(1))[0] if place == "loss" else loss

    def forward(*args: Any, **named: Any) -> Any:
        return spoil(whole["activations"](*args, **named))

    Trainer.compute_loss = compute_loss
    if place == "activations":
        T5LayerFF.forward = forward


def overflow_fp16(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Models whose feed-forward outputs pass the largest number of fp16, trained in fp16, as those of large T5s do; and
    now and then gradients that overflow at every loss scale."""
    families = cycle(random.sample(sorted(OVERFLOWING_FAMILIES), len(OVERFLOWING_FAMILIES)))
    for number in count():
        if number % 4 == 1:
            step, share = random.randint(1, NUM_STEPS - NUM_SCALES), random.random()

            def run_out_of_scales(folder: Path, step: int = step, share: float = share) -> None:
                fault = ("gradient", math.inf, step, FOR_EVER, share)
                recipe = workload.write_recipe(folder, train__precision="fp16")
                done = WarmProcess(train_with_bad_values, str(recipe), *fault).finish()
                assert done.returncode == 5 and f"step {step + NUM_SCALES}: " in done.stderr, done.stderr[-600:]
                assert "bf16 or fp32" in done.stderr, f"no advice: {done.stderr[-600:]}"
                check_finite(folder / "run")

            yield Trial(f"{number} gradients from step {step}", run_out_of_scales)
            continue
        family, seed = next(families), random.randrange(1000)
        scale = OVERFLOWING * random.choice((1, 2, 4))

        def run(folder: Path, family: str = family, seed: int = seed, scale: float = scale) -> None:
            places = (str(folder / "model"), str(workload.folder / "tokenizer"))
            check_success(WarmProcess(make_overflowing_model, *places, family, seed, scale).finish())
            options: dict[str, Any] = {"model__path": str(folder / "model"), "train__precision": "fp16"}
            done = WarmProcess(train, str(workload.write_recipe(folder, **options))).finish()
            steps = folder / "run" / "steps.jsonl"
            num_steps = len(steps.read_text().splitlines()) if steps.exists() else 0
            check_finite(folder / "run")
            if family not in UNSUPPORTED:
                check_success(done)
                assert num_steps == NUM_STEPS, f"{num_steps} steps"
                return
            assert done.returncode in (2, 5), f"exit code {done.returncode}: {done.stderr[-600:]}"
            assert "bf16 or fp32" in done.stderr, f"no advice: {done.stderr[-600:]}"
            assert num_steps < 10, f"found after {num_steps} steps"

        yield Trial(f"{number} {family} of seed {seed} times {scale:.0e}", run)


def make_overflowing_model(folder: str, tokenizer: str, family: str, seed: int, scale: float) -> None:
    """A model whose feed-forward outputs are `scale` times as large; in fp32 they pass LARGEST_HALF."""
    from safetensors.torch import load_file, save_file

    made = make_model(Path(folder), Path(tokenizer), seed=seed, **OVERFLOWING_FAMILIES[family])
    weights = load_file(made / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("DenseReluDense.wi.weight", "DenseReluDense.wi_1.weight")):
            weight.mul_(16)
        elif name.endswith("DenseReluDense.wo.weight"):
            weight.mul_(scale / 16)
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    largest = measure_feed_forward(made)
    assert LARGEST_HALF < largest < math.inf, f"the largest feed-forward output is {largest:g}"


def measure_feed_forward(model: Path) -> float:
    """The largest output of a feed-forward layer in fp32."""
    import torch
    from transformers.models.auto.modeling_auto import AutoModelForSeq2SeqLM

    largest: list[float] = []
    loaded = AutoModelForSeq2SeqLM.from_pretrained(model, dtype=torch.float32).eval()
    for name, module in loaded.named_modules():
        if name.endswith("DenseReluDense.wo"):
            module.register_forward_hook(lambda _module, _inputs, output: largest.append(output.abs().max().item()))
    ids = torch.arange(2, 34)[None]
    with torch.no_grad():
        loaded(input_ids=ids, decoder_input_ids=ids)
    return max(largest)


ROWS = [
    Row("R12", "NaN or infinity in losses, a gradient, activations, on one of two ranks; once or for ever",
        "exit code 5 with step and place, no bad weight on the disk; resumes to identical weights",
        put_bad_values, 6, 60, put_bad_values_in_peer),
    Row("R13", "feed-forward outputs beyond fp16's 65,504 in T5, T5 v1.1, mT5, umT5, LongT5; "
        "gradients that overflow at every loss scale",
        "trains in fp16 with finite values; LongT5 and gradients: found within 10 steps, with the advice to use bf16 "
        "or fp32", overflow_fp16, 2, 20),
]  # fmt: skip
