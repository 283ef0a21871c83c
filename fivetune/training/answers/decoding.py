"""How a run answers: the options of its searches, and the evaluator that uses them.

In: a RunConfig, a tokenizer, tokenised questions. Out: a Decoding, an Evaluator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from fivetune.config import RunConfig
from fivetune.data.letters import list_structural_tokens
from fivetune.data.store.encode import encode_labels, find_frame
from fivetune.data.store.mixture import ConcatStore
from fivetune.data.store.token_store import TokenStore
from fivetune.errors import ConfigError
from fivetune.model.decode import Decoding, GenerateAnswers, Sampling, estimate_max_new_tokens
from fivetune.model.tokenizer import list_sentinel_ids
from fivetune.tasks import has_sentinels
from fivetune.training.answers.evaluator import Evaluator
from fivetune.training.compute_config import ComputeConfig
from fivetune.training.mixture import build_part_configs
from fivetune.training.sources import build_length_limits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_evaluator(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    store: TokenStore,
    compute: ComputeConfig,
    *,
    target_p99: int,
    generate: GenerateAnswers,
    decoding: Decoding | None = None,
) -> Evaluator:
    """Build the evaluator of a store, for a mixture with one per part.

    Args:
        target_p99: 99th percentile of the training targets' lengths in tokens, from which the generation cap follows.
        generate: searches for answers.
        decoding: options of the search, of a task that is no mixture; default: the config's options.
    """
    parts: dict[str, Evaluator] = {}
    if isinstance(store, ConcatStore):
        for name, part in build_part_configs(config).items():
            own = store.parts[name]
            parts[name] = make_evaluator(part, tokenizer, own, compute, target_p99=target_p99, generate=generate)
    return Evaluator(
        task=config.task,
        tokenizer=tokenizer,
        store=store,
        decoding=decoding or build_decoding(config, tokenizer, target_p99=target_p99),
        device=compute.device,
        keep_special=can_write_sentinels(config),
        limits=build_length_limits(config),
        autocast=compute.make_autocast,
        generate=generate,
        parts=parts,
    )


def can_write_sentinels(config: RunConfig) -> bool:
    """Whether answers may have tokens <extra_id_N>: the setting says so, or the task learns them."""
    return not config.eval.suppress_sentinels or has_sentinels(config.task)


def build_decoding(config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, target_p99: int) -> Decoding:
    """Build the options of a run's searches, for its evaluations and its predictions.

    Args:
        target_p99: as for `make_evaluator`; eval.max_new_tokens comes before it.

    Raises ConfigError for labels that are no distinct answers.
    """
    section = config.eval
    suppressed: list[int] = []
    if not can_write_sentinels(config):
        suppressed = list_sentinel_ids(tokenizer)
    # The probability of the text that means no answer is computed for each question.
    phrase_ids: list[int] = []
    if phrase := config.task.no_answer_text:
        phrase_ids = encode_labels(tokenizer, [phrase])[0]
    label_ids: tuple[tuple[int, ...], ...] = ()
    if section.score_labels and config.task.labels:
        label_ids = _encode_labels(tokenizer, [*config.task.labels.values()], config.data.max_target_tokens)
    sampling = None
    if section.temperature and not label_ids:  # in a mixture, other parts may write their answers
        sampling = Sampling(section.temperature, section.top_k, section.top_p, section.sampling_seed)
    return Decoding(
        max_new_tokens=section.max_new_tokens or estimate_max_new_tokens(target_p99),
        suppressed_ids=tuple(suppressed),
        batch_size=section.batch_size,
        phrase_ids=tuple(phrase_ids),
        label_ids=label_ids,
        min_new_tokens=section.min_new_tokens,
        num_beams=section.num_beams,
        num_candidates=section.num_candidates if sampling else min(section.num_candidates, section.num_beams),
        sampling=sampling,
        length_penalty=section.length_penalty,
        repetition_penalty=section.repetition_penalty,
        no_repeat_ngram_size=section.no_repeat_ngram_size,
        stop=section.stop,
        capture=config.train.capture != "off",
    )


def _encode_labels(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], limit: int | None
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of every label's target text.

    Args:
        limit: data.max_target_tokens, within which the labels must differ; None: no limit.

    Raises ConfigError for special tokens in a text, and for texts with equal ids.
    """
    ids = [tuple(row) for row in encode_labels(tokenizer, texts)]
    num_before = len(find_frame(tokenizer).before_target)
    special = set(tokenizer.all_special_ids) - {cast("int", tokenizer.unk_token_id)}
    room = None if limit is None else limit - 1  # the last is the end token
    seen: dict[tuple[int, ...], int] = {}  # the number of the first label with these ids
    for number, row in enumerate(ids):
        # Special tokens are letters in a text: an answer would lose them, or be taken for another.
        inside = special.intersection(row[num_before:-1])
        tokens = [str(tokenizer.convert_ids_to_tokens(one)) for one in inside]
        # No id shows the end token and its like: in a text they are encoded as letters.
        tokens += [token for token in list_structural_tokens(tokenizer) if token in texts[number]]
        if tokens:
            raise ConfigError(
                f"task.labels: {texts[number]!r} holds the special token {tokens[0]!r}. Choose other words for the "
                "labels."
            )

        # Compared without the end token, which a cut target may lack.
        other = seen.setdefault(row[:-1][:room], number)
        if other == number:
            continue
        found = f"task.labels: {texts[other]!r} and {texts[number]!r} are tokenized identically"
        if ids[number] == ids[other]:
            raise ConfigError(f"{found}. Choose other words for the labels.")
        raise ConfigError(
            f"{found} in the {limit} tokens of data.max_target_tokens. Choose other words for the labels, or raise "
            "data.max_target_tokens."
        )
    return tuple(ids)
