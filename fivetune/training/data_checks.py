"""Pre-flight checks of the data of a run: losses of records, leakage, characters and truncation.

In: a Setup. Out: an Outcome of each check.
"""

from __future__ import annotations

import filecmp
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from fivetune.data.characters import find_lossy_characters
from fivetune.data.labels import describe_imbalance, describe_merged_forms, describe_placeholders
from fivetune.data.prepared import is_prepared
from fivetune.data.records import is_hub_name, list_source_files
from fivetune.errors import ModelError
from fivetune.model.family import get_family
from fivetune.training.setup import Setup

if TYPE_CHECKING:
    from fivetune.types import JsonTable

NUM_PROBED = 300  # examples whose characters are checked
UNKNOWN_SHARE = 0.01  # of examples, above which unknown characters are a warning
MAX_LOSSY_SHARE = 0.5  # of all characters: more cannot be learnt from
LOST_SHARE = 0.01  # of examples, above which lost answers are a warning

State = Literal["pass", "warn", "fail"]
Outcome = tuple[State, str] | tuple[State, str, int]
"""State and detail of a check, optionally with a smaller batch size."""


def check_data(setup: Setup) -> Outcome:
    parts, state = [], "pass"
    for name, store in setup.data.stores:
        facts = store.summary
        parts.append(
            f"{name}: {facts['num_read']:,} records read = {facts['num_records_kept']:,} kept + "
            f"{facts['num_skipped']:,} left out; {facts['num_examples']:,} examples"
        )
        if facts["num_not_learnt"]:
            parts.append(f"{facts['num_not_learnt']:,} examples do not contain their answer: they are not trained on")
        if first := facts["first_bad"]:
            told = f"{first['where']}: {first['reason'].rstrip('.')}"
            parts.append(f"{facts['num_skipped_bad']:,} of them cannot be used, the first: {told}")
            state = "warn"
        notes = list(iter_data_notes(name, facts))
        parts += notes
        state = "warn" if notes else state
    if division := setup.data.stream.store.summary.get("split"):
        parts.append(
            f"data.eval_share {division['share']:g}: {division['num_eval_records']:,} of {division['num_records']:,} "
            f"records are evaluation data ({division['num_groups']:,} groups of related records)"
        )
    if setup.data.evaluator is None:
        return "warn", "; ".join([*parts, "no data.eval: nothing is scored, model/ will hold the last weights"])
    return state, "; ".join(parts)


def iter_data_notes(name: str, facts: JsonTable) -> Iterator[str]:
    """Yield properties of the data that distort scores; for a mixture, by part."""
    for part, one in facts.get("parts", {}).items():
        yield from iter_data_notes(f"{name} {part}", one)
    if num := facts["num_unlabelled"] if "parts" not in facts else 0:
        yield f"{name}: records left out because they have no label (blank, or nan): {num:,}"
    if num := facts["num_blank_golds"] if "parts" not in facts else 0:
        yield f"{name}: records with a blank gold answer beside others, which an empty prediction matches: {num:,}"
    if num := facts["num_blank_synonyms"] if "parts" not in facts else 0:
        yield f"{name}: records with blank synonyms among their right answers, which are dropped: {num:,}"
    labels = facts.get("label_counts", {})
    notes = (
        describe_imbalance(labels),
        describe_merged_forms(labels, facts.get("label_forms", {})),
        describe_placeholders(facts.get("placeholder_counts", {}), what="label" if labels else "answer"),
    )
    yield from (f"{name}: {note}" for note in notes if note)


def check_leakage(setup: Setup) -> Outcome:
    """Check whether training and evaluation data share a file, by name or by content, or an id."""
    if setup.data.evaluator is None:
        return "pass", "no data.eval that training could contain"
    if setup.data.evaluator.store.summary.get("split"):
        return "pass", "the evaluation records are split off those of data.train (data.eval_share)"
    learnt, scored = (store.summary["source"] for _, store in setup.data.stores)
    copies = (
        b for b in _list_local_files(scored) if any(filecmp.cmp(a, b, shallow=False) for a in _list_local_files(learnt))
    )
    same = [*sorted({*learnt} & {*scored}), *map(str, copies)]
    if same:
        return "warn", (
            f"{same[0]} is in data.train and in data.eval: scores will measure memorisation, not generalisation"
        )
    (_, train), (_, evaluation) = setup.data.stores
    ids, rows = np.unique(evaluation.given_ids, return_index=True)
    is_shared = np.isin(ids, train.given_ids) & (ids != 0)
    if num := int(is_shared.sum()):
        example = evaluation.read_example(int(rows[is_shared].min()))
        return "warn", (
            f"{num:,} of {(ids != 0).sum():,} ids of data.eval are in data.train, such as "
            f"{example.group or example.id}: the same questions, perhaps in another language"
        )
    return "pass", "no file and no id is in data.train and in data.eval"


def _list_local_files(sources: Sequence[str]) -> list[Path]:
    return [
        file
        for source in sources
        if not is_prepared(source) and not is_hub_name(source)
        for file in list_source_files(source)
    ]


def check_characters(setup: Setup) -> Outcome:
    """Find characters that the tokenizer maps to <unk> or drops, and count the examples of each set that have them.

    Raises ModelError if most characters are lost: the vocabulary does not cover this text, or is incomplete.
    """
    parts, state, num_probed, spaces = [], "pass", 0, ""
    for name, store in setup.data.stores:
        num = store.count_near_rows()
        step = max(1, num // NUM_PROBED)
        texts = [e.inputs + " " + e.targets for e in map(store.read_example, range(0, num, step))]
        num_probed += len(texts)
        found = find_lossy_characters(setup.loaded.tokenizer, "".join(texts))
        lossy = {character for character, becomes in found.items() if not character.isspace() or becomes != " "}
        if len(lossy) < len(found):
            spaces = "; line ends and other white space become spaces"
        hit = [text for text in texts if lossy & set(text)]
        if not hit:
            continue
        counts = Counter(character for text in texts for character in text if not character.isspace())
        lossy_share = sum(counts[character] for character in lossy) / max(counts.total(), 1)
        if lossy_share > MAX_LOSSY_SHARE:
            raise ModelError(
                f"{name}: the tokenizer does not keep {lossy_share:.0%} of the characters. Allowed is at most "
                f"{MAX_LOSSY_SHARE:.0%}. Restore the model's tokenizer files, or use a model whose vocabulary has "
                "these characters (ByT5 has all)."
            )
        share = len(hit) / len(texts)
        top = Counter(c for text in hit for c in set(text) if c in lossy).most_common(8)
        shown = ", ".join(f"{c!r} ({n})" for c, n in top)
        parts.append(f"{name}: {share:.1%} of examples hold characters that the tokenizer does not keep: {shown}")
        state = "warn" if share > UNKNOWN_SHARE else state
    if not parts:
        return "pass", f"all characters of {num_probed} examples survive the tokenizer{spaces}"
    advice = "Replace them, or use a model whose vocabulary has them (ByT5 has all)"
    return state, f"{'; '.join(parts)}. {advice}"


def check_truncation(setup: Setup) -> Outcome:
    parts, advice = [], set()
    extractive = [task.extractive for task in setup.config.tasks]
    for name, store in setup.data.stores:
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
                "read contexts in windows: data.overlong: windows"
                if all(extractive)
                else "keep both ends: data.overlong: head_tail"
            )
            advice.add(f"Raise data.max_input_tokens (T5 has no fixed limit) or {way}")
        if cut_targets / total > LOST_SHARE:
            advice.add("Raise data.max_target_tokens")
        family = get_family(setup.learner.model.config)
        if num := int((store.inputs.lengths > (family.longest_input or math.inf)).sum()):
            parts.append(
                f"{name}: {num:,} inputs ({num / total:.1%}) over {family.longest_input:,} tokens, the longest that "
                f"{family.model_type} has published results for"
            )
            advice.add(f"Set data.max_input_tokens to {family.longest_input}, or expect lower scores for them")
    if not parts:
        return "pass", "no input and no target is truncated"
    return "warn" if advice else "pass", ". ".join(["; ".join(parts), *sorted(advice)])
