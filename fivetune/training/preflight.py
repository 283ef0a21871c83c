"""Pre-flight: everything that would fail after hours, tried on a few examples in under a minute.

In: a Setup. Out: one Check per thing tried, each with pass, warn or fail and what to do. Weights, optimizer
and random states are left as they were found.
"""

from __future__ import annotations

import filecmp
import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from fivetune.data.batch import PaddedBatch, collate, pad
from fivetune.data.characters import lossy_characters
from fivetune.data.records import is_hub_name, source_files
from fivetune.data.store import TokenStore
from fivetune.errors import ConfigError, EnvironmentProblem, FiveTuneError
from fivetune.evaluate import subset
from fivetune.model.forward import label_nats
from fivetune.model.load import load, num_parameters
from fivetune.model.save import save_model
from fivetune.progress import Progress, duration
from fivetune.rundir import CONFIG, RunDir, occupied
from fivetune.sharding import whole
from fivetune.tasks import head_of
from fivetune.telemetry.devices import enough_memory, peak_bytes, reset_peak
from fivetune.training.setup import Setup, build_optimizer, seed_everything
from fivetune.training.update import update_weights

NUM_PROBED = 300  # examples looked at for characters
NUM_GENERATED = 16
UNKNOWN_SHARE = 0.01  # of examples, above which unknown characters are a warning
LOST_SHARE = 0.01  # of examples that lose their answer, likewise
MAX_RELOADED = 1_000_000_000  # parameters above which saving and reloading would take longer than a minute
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried."""

    name: str
    state: Literal["pass", "warn", "fail"]
    detail: str
    kind: type[FiveTuneError] = EnvironmentProblem  # what a failure of it is raised as


def check_before_training(setup: Setup, progress: Progress, run: RunDir) -> None:
    """Run all checks; warnings go to the user and the report, the first failure raises."""
    started = time.perf_counter()
    checks = []
    for number, check in enumerate(checks_of(setup), start=1):
        checks.append(check)
        progress.count("pre-flight checks", number)
        if check.state == "fail":
            raise check.kind(f"pre-flight: {check.name}: {check.detail}")
        if check.state == "warn" and run.warn(f"{check.name}: {check.detail}"):
            progress.warn(f"{check.name}: {check.detail}")
    good = sum(check.state == "pass" for check in checks)
    progress.say(f"pre-flight: {good} of {len(checks)} checks passed in {duration(time.perf_counter() - started)}")


def checks_of(setup: Setup) -> Iterator[Check]:
    """All checks, one after the other. An error of the user's making becomes a failed check."""
    before = {name: p.detach().to("cpu", copy=True) for name, p in setup.model.named_parameters()}
    named = (
        ("data", _data), ("leakage", _leakage), ("model", _model), ("characters", _characters),
        ("truncation", _truncation), ("learning rate", _learning_rate), ("train step", _train_step),
        ("generation", _generation), ("save and reload", _reload), ("memory", _memory), ("disk", _disk),
    )  # fmt: skip
    for name, check in named:
        try:
            yield Check(name, *check(setup))
        except FiveTuneError as error:
            yield Check(name, "fail", str(error), type(error))
    with torch.no_grad():
        for name, parameter in setup.model.named_parameters():
            parameter.copy_(before[name])
            parameter.grad = None  # a step that failed leaves some
    setup.optimizer = build_optimizer(setup.config, setup.model)
    setup.scaler = setup.place.scaler()
    seed_everything(setup.config.run.seed)


Outcome = tuple[Literal["pass", "warn", "fail"], str]


def _stores(setup: Setup) -> list[tuple[str, TokenStore]]:
    stores = [("train", setup.stream.store)]
    return [*stores, ("eval", setup.evaluator.store)] if setup.evaluator else stores


def _data(setup: Setup) -> Outcome:
    parts, state = [], "pass"
    for name, store in _stores(setup):
        facts = store.summary
        parts.append(
            f"{name}: {facts['num_read']:,} records read = {facts['num_records_kept']:,} kept + "
            f"{facts['num_skipped']:,} left out; {facts['num_examples']:,} examples"
        )
        if facts["num_not_learnt"]:
            parts.append(f"{facts['num_not_learnt']:,} examples do not hold their answer: nothing is learnt from them")
        if first := facts["first_bad"]:
            told = f"{first['where']}: {first['reason'].rstrip('.')}"
            parts.append(f"{facts['num_skipped_bad']:,} of them cannot be used, the first: {told}")
            state = "warn"
    if setup.evaluator is None:
        return "warn", "; ".join([*parts, "no data.eval: nothing is scored, model/ will hold the last weights"])
    return state, "; ".join(parts)


def _leakage(setup: Setup) -> Outcome:
    """Whether a file is both learnt from and scored on, under its own name or as a copy."""
    if setup.evaluator is None:
        return "pass", "no data.eval that could be learnt"
    learnt, scored = (store.summary["source"] for _, store in _stores(setup))
    copies = (b for b in _local_files(scored) if any(filecmp.cmp(a, b, shallow=False) for a in _local_files(learnt)))
    same = [*sorted({*learnt} & {*scored}), *map(str, copies)]
    if same:
        return "warn", f"{same[0]} is in data.train and in data.eval: the scores tell what was learnt by heart"
    return "pass", "no file is in data.train and in data.eval"


def _local_files(sources: Sequence[str]) -> list[Path]:
    return [file for source in sources if not is_hub_name(source) for file in source_files(source)]


def _model(setup: Setup) -> Outcome:
    kind, count = setup.plain.config.model_type, num_parameters(setup.plain)
    verified = "compared with its file" if setup.config.model.init == "pretrained" else "random weights"
    if setup.loaded.warnings:
        return "warn", "; ".join(setup.loaded.warnings)
    return "pass", f"{kind}, {count:,} parameters, {verified}"


def _characters(setup: Setup) -> Outcome:
    """Characters that the tokenizer turns into <unk> or drops, and in how many examples of each set."""
    parts, state, num_probed, spaces = [], "pass", 0, ""
    for name, store in _stores(setup):
        step = max(1, len(store) // NUM_PROBED)
        texts = [e.inputs + " " + e.targets for e in map(store.text, range(0, len(store), step))]
        num_probed += len(texts)
        found = lossy_characters(setup.loaded.tokenizer, "".join(texts))
        lossy = {character for character, becomes in found.items() if not character.isspace() or becomes != " "}
        if len(lossy) < len(found):
            spaces = "; line ends and other white space become spaces"
        hit = [text for text in texts if lossy & set(text)]
        if not hit:
            continue
        share = len(hit) / len(texts)
        top = Counter(c for text in hit for c in set(text) if c in lossy).most_common(8)
        shown = ", ".join(f"{c!r} ({n})" for c, n in top)
        parts.append(f"{name}: {share:.1%} of examples hold characters that the tokenizer does not keep: {shown}")
        state = "warn" if share > UNKNOWN_SHARE else state
    if not parts:
        return "pass", f"all characters of {num_probed} examples survive the tokenizer{spaces}"
    advice = "Replace them, or use a model whose vocabulary has them (ByT5 has all)"
    return state, f"{'; '.join(parts)}. {advice}"


def _truncation(setup: Setup) -> Outcome:
    parts, advice = [], set()
    extractive = [task.extractive for task in setup.config.tasks]
    for name, store in _stores(setup):
        facts = store.summary
        clipped, lost, cut_targets = (
            facts[f"num_{what}"] for what in ("examples_clipped", "answers_lost", "clipped_targets")
        )
        total = max(facts["num_examples"], 1)
        if clipped or cut_targets:
            gold = f"{lost:,} gold answers lost; " if any(extractive) else ""
            parts.append(
                f"{name}: {clipped:,} inputs ({clipped / total:.1%}) over {facts['max_input_tokens']} tokens; "
                f"{gold}{cut_targets:,} targets over {facts['max_target_tokens']}"
            )
        if lost / total > LOST_SHARE:
            way = (
                "ask in windows: data.overlong: windows"
                if all(extractive)
                else "keep both ends: data.overlong: head_tail"
            )
            advice.add(f"Raise data.max_input_tokens (T5 has no fixed limit) or {way}")
        if cut_targets / total > LOST_SHARE:
            advice.add("Raise data.max_target_tokens")
    if not parts:
        return "pass", "no input and no target is cut"
    return "warn" if advice else "pass", ". ".join(["; ".join(parts), *sorted(advice)])


def _learning_rate(setup: Setup) -> Outcome:
    lr = setup.optimizer.param_groups[0]["initial_lr"]
    low, high = setup.config.optimizer.lr_range
    if lr is not None and not low <= lr <= high:
        return "warn", f"optimizer.lr {lr:g} is outside {low:g} to {high:g}, where T5 fine-tuning is known to work"
    return "pass", "the optimizer makes its own" if lr is None else f"optimizer.lr {lr:g}"


def _train_step(setup: Setup) -> Outcome:
    """One optimizer step on the longest examples, so that trouble with memory shows now."""
    lengths = setup.stream.store.inputs.lengths
    rows = lengths.argsort()[::-1][: setup.batch_size].tolist()
    probe = next(iter(setup.model.parameters()))
    before = whole(probe.detach()).clone()
    reset_peak(setup.place.device)
    started = time.perf_counter()
    with enough_memory():
        update = update_weights(setup, [collate(setup.stream.store, rows)], lr=setup.lr(setup.num_steps // 2), step=0)
    seconds = time.perf_counter() - started
    if not math.isfinite(update.grad_norm):
        return "warn", "the first step overflowed in fp16 and was skipped; the loss scale is lowered until steps fit"
    if setup.batch_size < len(rows):
        return "warn", f"memory ran out with {len(rows)} examples in a forward pass; {setup.batch_size} are taken now"
    if torch.equal(before, whole(probe.detach())):
        return "fail", "one optimizer step did not change the weights. Check optimizer.lr and train.precision"
    return (
        "pass",
        f"loss {update.loss:.3f}, {duration(seconds)} for {len(rows)} examples of up to {lengths.max():,} tokens",
    )


def _generation(setup: Setup) -> Outcome:
    if setup.evaluator is None:
        return "warn", "no data.eval, nothing to generate for"
    lines: list[dict[str, Any]] = []
    questions = subset(setup.evaluator.num_questions, NUM_GENERATED)
    with enough_memory(), setup.whole() as plain:
        record = setup.evaluator.run(plain, step=0, questions=questions, write=lines.extend)
    if setup.metric not in record.scores:
        raise ConfigError(f"eval.metric: there is no {setup.metric!r}. Allowed: {', '.join(sorted(record.scores))}.")
    return (
        "pass",
        f"{len(lines)} predictions, {setup.metric} {record.scores[setup.metric]:.2f}, "
        f"cap {record.max_new_tokens} tokens",
    )


def _reload(setup: Setup) -> Outcome:
    """Save, load again, compare logits."""
    if num_parameters(setup.model) > MAX_RELOADED:
        return "warn", "skipped: the model is too large to be written and read in a minute"
    with setup.whole() as plain:
        error = setup.world.from_first(_reload_error(setup, plain) if setup.world.is_first else 0.0)
    if error > 1e-5:
        return "fail", f"a saved and reloaded model differs by {error:.3g} nats. Report this with your versions"
    return "pass", f"the reloaded model gives the same nats (largest difference {error:.1g})"


def _reload_error(setup: Setup, plain: Any) -> float:
    batch = pad(collate(setup.stream.store, [0]), pad_id=plain.config.pad_token_id)
    with tempfile.TemporaryDirectory(prefix="fivetune-check-") as folder:
        save_model(plain, setup.loaded.tokenizer, Path(folder) / "model")
        again = load(str(Path(folder) / "model"), head=head_of(setup.config.task)).model
    error = (_probe(again, batch) - _probe(plain.to("cpu"), batch)).abs().max().item()
    plain.to(setup.place.device)
    return error


@torch.no_grad()
def _probe(model: Any, batch: PaddedBatch) -> torch.Tensor:
    model.eval()
    return label_nats(model, batch)


def _memory(setup: Setup) -> Outcome:
    """What training will take at most, from the sizes and from what the step on the longest examples took.

    That first step had no optimizer state yet when its activations were there; the later ones have both.
    """
    count = num_parameters(setup.plain)
    weights, gradients, state = (count * n for n in (4, 4, setup.config.optimizer.state_bytes_per_parameter))
    rest = max((peak_bytes(setup.place.device) or 0) - weights - gradients, 0)
    forecast = weights + gradients + state + rest
    if setup.place.device.startswith("cuda"):
        there = torch.cuda.get_device_properties(setup.place.device).total_memory
    else:
        there = psutil.virtual_memory().total
    text = (
        f"forecast: up to {forecast / GIB:.2f} of {there / GIB:.1f} GiB: weights {weights / GIB:.2f}, "
        f"gradients {gradients / GIB:.2f}, optimizer {state / GIB:.2f}, activations and the rest {rest / GIB:.2f}"
    )
    if forecast > 0.9 * there:
        return "warn", f"{text}. Lower train.batch_size (keep train.global_batch_size) or data.max_input_tokens"
    return "pass", text


def run_directory(path: Path) -> Check:
    """Whether a run could start in `path`. Only `fivetune check` asks: `train` has taken it before its pre-flight."""
    name, there = "run directory", _nearest_there(path)
    if not there.is_dir():
        return Check(name, "fail", f"{there} is a file. Choose another run.dir")
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "fail", f"{there} cannot be written. Choose another run.dir")
    if reason := occupied(path):
        return Check(name, "warn" if (path / CONFIG).is_file() else "fail", reason)
    return Check(name, "pass", f"{path} is free")


def _nearest_there(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    path = path.absolute()
    return path if path.exists() else _nearest_there(path.parent)


def _disk(setup: Setup) -> Outcome:
    """Room for the checkpoints that are kept, one more while it is written, and model/."""
    config = setup.config
    each = num_parameters(setup.plain) * (4 + config.optimizer.state_bytes_per_parameter)
    needed = each * (config.checkpoint.keep + 2) + num_parameters(setup.plain) * 8
    free = shutil.disk_usage(_nearest_there(Path(config.run.dir))).free
    text = f"{needed / GIB:.2f} GiB for checkpoints and model, {free / GIB:.1f} GiB free"
    if free < needed:
        return "fail", f"{text}. Free space, lower checkpoint.keep, or choose another run.dir"
    return ("warn" if free < 2 * needed else "pass"), text
