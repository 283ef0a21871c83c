"""Distillation: a teacher's answers as targets (Kim & Rush 2016), or its predictions in the loss (Hinton et al. 2015).

In: a RunConfig, the model's tokenizer. Out: a store with the teacher's targets; the Teacher of the run's Forward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from fivetune.config import RunConfig
from fivetune.config.paths import find_typed_path
from fivetune.config.recipes import is_run_directory
from fivetune.data.store.distilled import DistilledStore, list_missing_parts, write_part
from fivetune.data.store.token_store import TokenStore, get_cache_folder
from fivetune.distributed.world import World
from fivetune.errors import FiveTuneEnvironmentError, ModelError, translate_oom_errors
from fivetune.model.adapter import refuse_lost_tokens
from fivetune.model.decode import Decoding, generate
from fivetune.model.files import find_folder, find_weight_files, read_model_config
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.teacher import Teacher
from fivetune.model.tokenizer import list_pieces, load_tokenizer
from fivetune.training.autotune.forward import explain_unsupported_flat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.model.modules import T5Model
    from fivetune.rundir.progress import ProgressCallback
    from fivetune.training.compute_config import ComputeConfig

KEY = "distill.teacher"
Answer: TypeAlias = tuple[list[int], bool]
"""Labels with one end token, and whether they were cut at the longest length."""


def find_teacher(config: RunConfig) -> Path | None:
    """Find the folder of the teacher; None without one. Raises ModelError for a folder without a model."""
    if config.distill.teacher is None:
        return None
    name = find_typed_path(config.distill.teacher, config.run.dir)
    is_run = is_run_directory(name)
    if is_run and not (Path(name) / "model").is_dir():
        raise ModelError(f"{KEY}: {name}: the run has no model/. Let it finish, or name another run or model.")
    with _name_setting():
        folder = Path(name) / "model" if is_run else find_folder(name)
    advice = "Use a teacher that was trained whole, or with an adapter whose weights are merged (lora)."
    refuse_lost_tokens(folder, KEY, advice)
    return folder


@contextmanager
def _name_setting() -> Iterator[None]:
    """Begin the errors of loading a model with the setting that names the teacher."""
    try:
        yield
    except FiveTuneEnvironmentError as error:
        raise type(error)(f"{KEY}: {error}") from None


def refuse_other_teacher(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError if the teacher has another vocabulary than the model: its answers are other tokens there."""
    folder = find_teacher(config)
    if folder is None:
        return
    with _name_setting():
        teacher = load_tokenizer(None, folder, key=None)
    own = list_pieces(tokenizer)
    theirs = list_pieces(teacher)
    # Equal pieces are not enough: answers end with the end token.
    for name in ("pad_token_id", "eos_token_id"):
        own[name] = getattr(tokenizer, name)
        theirs[name] = getattr(teacher, name)
    other = sorted(piece for piece in {*own, *theirs} if own.get(piece) != theirs.get(piece))
    if other:
        described: list[str] = []
        for ids_of in (theirs, own):
            number = ids_of.get(other[0])
            described.append("not a piece" if number is None else f"id {number}")
        ids = " and ".join(described)
        raise ModelError(
            f"{KEY}: {folder} has another vocabulary than {config.model.path or config.model.config}: {len(other):,} "
            f"of {len({*own, *theirs}):,} pieces differ, {other[0]!r} is {ids}. Allowed is a teacher with the same "
            "tokenizer; trim neither or both alike."
        )


def load_teacher(config: RunConfig, compute: ComputeConfig) -> Teacher | None:
    """Load the teacher of kind logits; None for other runs. The random state of the run is not changed."""
    section = config.distill
    folder = find_teacher(config)
    if folder is None or section.kind != "logits":
        return None
    # Every rank holds the whole teacher, also where the model is sharded: it has neither gradients nor optimizer state.
    model = _load_frozen_model(folder, compute)
    is_flat = not explain_unsupported_flat(model, compute.device, compute.make_autocast)
    return Teacher(model, section.alpha, section.temperature, is_flat)


def _load_frozen_model(folder: Path, compute: ComputeConfig) -> T5Model:
    # Building modules draws random weights: the run's own numbers must not depend on the teacher.
    with torch.random.fork_rng(devices=[]), translate_oom_errors():
        with _name_setting():
            model = load_model_and_tokenizer(str(folder), tokenizer_key=None, any_seq2seq=None).model
        return model.requires_grad_(False).eval().to(compute.device)


def replace_targets(
    config: RunConfig,
    store: TokenStore,
    decoding: Decoding,
    compute: ComputeConfig,
    world: World,
    on_progress: ProgressCallback,
) -> TokenStore:
    """Replace the targets of a training set by the teacher's answers; the same store for runs of another kind.

    The answers are cached by teacher, data and decoding; only missing ones are generated. Collective: all ranks call
    it, and share the examples.

    Args:
        decoding: decoding of the run's evaluation; the teacher searches with distill.num_beams.
    """
    folder = find_teacher(config)
    if folder is None or config.distill.kind != "sequence":
        return store
    # No longer than a target of the data may be: the store's rows keep to the limit.
    limit = config.data.max_target_tokens or decoding.max_new_tokens
    decoding = replace(
        decoding,
        max_new_tokens=min(decoding.max_new_tokens, limit),
        num_beams=config.distill.num_beams,
        num_candidates=1,
        sampling=None,
        stop=(),
        phrase_ids=(),
        score_targets=False,
    )
    with _name_setting():
        key = _compute_key(folder, store, decoding, compute)
    cache = get_cache_folder(config.data.cache_dir) / f"distilled-{key}"
    # Each node may have a cache of its own: what one lacks is generated by all, and written by one rank of each node.
    found = world.gather(list_missing_parts(cache, len(store)))
    missing = sorted({*chain.from_iterable(found)}, key=lambda rows: rows.start)
    if missing:
        model = _load_frozen_model(folder, compute)
        for first in range(0, len(missing), world.size):
            parts = missing[first : first + world.size]
            generate_own = partial(_answer_share, model, store, parts, decoding, compute, world, on_progress)
            answers = dict(chain.from_iterable(world.run_on_all(generate_own)))
            written = parts if world.local_rank == 0 else ()
            world.run_on_all(partial(_write_parts, cache, written, answers))
    return DistilledStore(store, cache)


def _answer_share(
    model: T5Model,
    store: TokenStore,
    parts: Sequence[range],
    decoding: Decoding,
    compute: ComputeConfig,
    world: World,
    on_progress: ProgressCallback,
) -> list[tuple[int, Answer]]:
    """Answer every example of some parts that is this rank's; returns rows, each with its answer."""
    rows = [*chain.from_iterable(parts)][world.rank :: world.size]
    answers: list[tuple[int, Answer]] = []
    for one in generate(model, store, rows, decoding, device=compute.device, autocast=compute.make_autocast):
        labels = [*one.token_ids[: decoding.max_new_tokens - 1], model.config.eos_token_id]
        answers.append((one.row, (labels, one.hit_cap)))
        done = min(parts[0].start + len(answers) * world.size, len(store))
        on_progress("answers of the teacher", done, len(store))
    return answers


def _write_parts(cache: Path, parts: Sequence[range], answers: Mapping[int, Answer]) -> None:
    try:
        for rows in parts:
            cache.mkdir(parents=True, exist_ok=True)
            labels, were_cut = zip(*[answers[row] for row in rows], strict=True)
            write_part(cache, rows.start, labels, were_cut)
    except OSError as error:
        raise FiveTuneEnvironmentError(
            f"{cache}: the teacher's answers cannot be written: {error.strerror}. Free disk space, or set "
            "data.cache_dir; what was written is kept."
        ) from None


def _compute_key(folder: Path, store: TokenStore, decoding: Decoding, compute: ComputeConfig) -> str:
    """The hash of all that the answers depend on: weights and config of the teacher, data, decoding and precision.

    bf16 has three digits, so that of two tokens about as probable it often chooses another one than fp32; a run's data
    would depend on who generated them first. Device, graphs and batch size change the last of seven digits, and
    are left out.
    """
    search = asdict(decoding) | {"batch_size": 0}
    del search["capture"]
    settings = [store.fingerprint, search, compute.precision, read_model_config(folder)]
    digest = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    # All bytes, not a sample: a wrong answer in the cache would be learnt without a word.
    for path in find_weight_files(folder):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def describe_distillation(config: RunConfig, store: TokenStore) -> str:
    """The teacher and its options for the first line of a run; "" without one."""
    section = config.distill
    if section.teacher is None:
        return ""
    if section.kind == "logits":
        return f"; teacher {section.teacher} (logits, alpha {section.alpha:g}, temperature {section.temperature:g})"
    facts = store.summary["distilled"]
    more = ""
    if facts["num_empty"]:
        more += f", {facts['num_empty']:,} empty"
    if facts["num_cut"]:
        more += f", {facts['num_cut']:,} cut at the longest length"
    return f"; targets by teacher {section.teacher}: {facts['num_equal']:,} of {len(store):,} as in the data{more}"
