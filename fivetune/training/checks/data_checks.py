"""Pre-flight checks of the data of a run: records, leakage, characters and truncation.

In: a Setup. Out: an Outcome of each check.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Literal

import numpy as np

from fivetune.data.characters import describe_odd_targets, find_lossy_characters
from fivetune.data.labels import describe_imbalance, describe_merged_forms, describe_placeholders
from fivetune.data.store.token_store import TokenStore
from fivetune.errors import ModelError
from fivetune.model.family import get_family
from fivetune.reading.diagnosis.truncation import find_cuts
from fivetune.rundir.parse import parse_record
from fivetune.rundir.records import SplitSummary
from fivetune.training.answers.decoding import can_write_sentinels
from fivetune.training.setup import Setup
from fivetune.training.sources import find_learnt_rows, find_shared_files
from fivetune.types import JsonTable

NUM_PROBED = 300  # examples whose characters are checked
UNKNOWN_SHARE = 0.01  # of examples, above which unknown characters are a warning
MISSED_SHARE = 0.1  # of the evaluation records that data.eval_share asks for
MAX_LOSSY_SHARE = 0.5  # of all characters: more cannot be learnt from

State = Literal["pass", "warn", "fail"]
Outcome = tuple[State, str] | tuple[State, str, int]
"""State and detail of a check, optionally with a smaller batch size."""


def check_data(setup: Setup) -> Outcome:
    """Count what was read. What is doubtful about it is up to `check_records`."""
    parts: list[str] = []
    for name, store in setup.data.stores:
        facts = store.summary
        parts.append(
            f"{name}: {facts['num_read']:,} records read = {facts['num_records_kept']:,} kept + "
            f"{facts['num_skipped']:,} left out; {facts['num_examples']:,} examples"
        )
        if facts["num_not_learnt"]:
            parts.append(f"{facts['num_not_learnt']:,} examples do not contain their answer: they are not trained on")
    if division := setup.data.stream.store.summary.get("split"):
        parts.append(
            f"data.eval_share {division['share']:g}: {division['num_eval_records']:,} of {division['num_records']:,} "
            f"records are evaluation data ({division['num_groups']:,} groups of related records)"
        )
    return "pass", "; ".join(parts)


def check_records(setup: Setup) -> Outcome:
    """Report what distorts scores: records that cannot be used, odd labels and gold answers, no evaluation data."""
    # A note of both sets is given once. Their shares differ a little: the first set's imbalance stands for both.
    found: dict[str, list[str]] = {}
    uneven = ""
    for name, store in setup.data.stores:
        imbalance = describe_imbalance(store.summary.get("label_counts", {}))
        uneven = uneven or imbalance
        for note in iter_record_notes(store.summary):
            found.setdefault(uneven if note == imbalance else note, []).append(name)
    notes = [f"{' and '.join(names)}: {note}" for note, names in found.items()]
    if setup.data.evaluator is None:
        notes.append("no data.eval: nothing is scored, model/ will hold the last weights")
    if notes:
        return "warn", "; ".join(notes)
    return "pass", "all can be used; labels and answers look sound"


def iter_record_notes(facts: JsonTable) -> Iterator[str]:
    """Yield what is doubtful about the records of a set; for a mixture, by part."""
    if first := facts["first_bad"]:
        where = f"{first['where']}: {first['reason'].rstrip('.')}"
        yield f"{facts['num_skipped_bad']:,} of {facts['num_read']:,} records cannot be used, the first: {where}"
    if "parts" in facts:
        for part, one in facts["parts"].items():
            # The first bad record of all parts is named above.
            for note in iter_record_notes({**one, "first_bad": None}):
                yield f"{part}: {note}"
        return
    if note := _describe_missed_share(facts.get("split")):
        yield note
    if num := facts["num_unlabelled"]:
        yield f"records left out because they have no label (blank, or nan): {num:,}"
    if num := facts["num_blank_golds"]:
        yield f"records with a blank gold answer beside others, which an empty prediction matches: {num:,}"
    if num := facts["num_blank_synonyms"]:
        yield f"records with blank synonyms among their right answers, which are dropped: {num:,}"
    labels = facts.get("label_counts", {})
    notes = (
        describe_imbalance(labels),
        describe_merged_forms(labels, facts.get("label_forms", {})),
        describe_placeholders(facts.get("placeholder_counts", {}), what="label" if labels else "answer"),
        describe_placeholders(facts.get("empty_input_counts", {}), what="input"),
    )
    yield from filter(None, notes)


def _describe_missed_share(split: JsonTable | None) -> str:
    """Describe how far data.eval_share was missed by more than a record and a tenth; "" if it was not."""
    if split is None:
        return ""
    wanted = split["share"] * split["num_records"]
    if abs(split["num_eval_records"] - wanted) <= max(1, MISSED_SHARE * wanted):
        return ""
    return (
        f"data.eval_share {split['share']:g} is {wanted:,.0f} of {split['num_records']:,} records, the evaluation data "
        f"{split['num_eval_records']:,}: groups of related records are not divided, and the largest has "
        f"{split['largest_group']:,} (equal inputs and equal values of data.group_column are related)"
    )


def check_leakage(setup: Setup) -> Outcome:
    """Check whether training and evaluation data share a file, by name or by content, an id, or an input's text."""
    if setup.data.evaluator is None:
        return "pass", "no data.eval that training could contain"
    if setup.data.evaluator.store.summary.get("split"):
        return "pass", "the evaluation records are split off those of data.train (data.eval_share)"
    (_, train), (_, evaluation) = setup.data.stores
    if same := find_shared_files(train.summary["source"], evaluation.summary["source"]):
        return "warn", (
            f"{same[0]} is in data.train and in data.eval: scores will measure memorisation, not generalisation"
        )
    # Translations share ids with their originals, and no text. They are hashes of ids; 0 is none.
    ids, rows = np.unique(evaluation.given_ids, return_index=True)
    is_shared = np.isin(ids, train.given_ids) & (ids != 0)
    if num := int(is_shared.sum()):
        return "warn", (
            f"{num:,} of {(ids != 0).sum():,} ids of data.eval are in data.train, such as "
            f"{_name_question(evaluation, int(rows[is_shared].min()))}: the same questions, perhaps in another language"
        )
    if train.input_hashes is None or evaluation.input_hashes is None:
        return "pass", (
            "no file and no id is in data.train and in data.eval; texts are not compared, because an earlier version "
            "prepared the data"
        )
    repeated = find_learnt_rows(train, evaluation)
    if len(repeated):
        return "warn", (
            f"{len(np.unique(evaluation.groups[repeated])):,} of {evaluation.num_groups:,} evaluation examples have "
            "the input of a training example, case and white space aside, such as "
            f"{_name_question(evaluation, int(repeated[0]))}: the model is scored on what it was taught. Leave them "
            "out of one of the two (fivetune inspect --against lists them)"
        )
    return "pass", "no file, no id and no input is in data.train and in data.eval"


def _name_question(store: TokenStore, row: int) -> str:
    example = store.read_example(row)
    return example.group or example.id


def check_characters(setup: Setup) -> Outcome:
    """Find characters that the tokenizer maps to <unk> or drops, and count the examples of each set that have them.

    Raises ModelError if most characters are lost: the vocabulary does not cover this text, or is incomplete.
    """
    parts = []
    notes = list[str]()
    state = "pass"
    num_probed = 0
    spaces = ""
    for name, store in setup.data.stores:
        # Evenly over the set, as far as it is on the disk: files are often sorted.
        num = store.count_near_rows()
        step = max(1, num // NUM_PROBED)
        probed = [store.read_example(row) for row in range(0, num, step)]
        texts = [f"{one.inputs} {one.targets}" for one in probed]
        keeps_sentinels = can_write_sentinels(setup.config)
        odd = describe_odd_targets(setup.loaded.tokenizer, probed, keeps_sentinels=keeps_sentinels)
        notes += [f"{name}: {note}" for note in odd]
        num_probed += len(texts)
        whole = "".join(texts)
        found = find_lossy_characters(setup.loaded.tokenizer, whole)
        lossy = {character for character, becomes in found.items() if not character.isspace() or becomes != " "}
        if len(lossy) < len(found):
            spaces = "; line ends and other white space become spaces"
        hit = [text for text in texts if lossy & set(text)]
        if not hit:
            continue
        counts = Counter("".join(whole.split()))  # white space says nothing about a vocabulary
        lossy_share = sum(counts[character] for character in lossy) / max(counts.total(), 1)
        if lossy_share > MAX_LOSSY_SHARE:
            raise ModelError(
                f"{name}: the tokenizer does not keep {lossy_share:.0%} of the characters. Allowed is at most "
                f"{MAX_LOSSY_SHARE:.0%}. Restore the model's tokenizer files, or use a model whose vocabulary has "
                "these characters (ByT5 has all)."
            )
        share = len(hit) / len(texts)
        examples_with = Counter[str]()
        for text in hit:
            examples_with.update(lossy & set(text))
        shown = ", ".join(f"{character!r} ({num})" for character, num in examples_with.most_common(8))
        parts.append(f"{name}: {share:.1%} of examples hold characters that the tokenizer does not keep: {shown}")
        if share > UNKNOWN_SHARE:
            state = "warn"
    if parts:
        advice = ""
        if state == "warn":
            advice = ". Replace them, give them in model.add_tokens, or use a model that has them (ByT5 has all)"
        notes.append(f"{'; '.join(parts)}{advice}")
    # Odd targets are a warning in any case, lost characters only from a share on.
    if len(notes) > bool(parts):
        state = "warn"
    if notes:
        return state, ". ".join(notes)
    return "pass", f"all characters of {num_probed} examples survive the tokenizer{spaces}"


def check_truncation(setup: Setup) -> Outcome:
    """Check what the length limits cut, as the diagnosis judges it, and inputs longer than the family is known for."""
    extractive = [task.extractive for task in setup.config.tasks]
    splits = {name: parse_record(SplitSummary, store.summary) or SplitSummary() for name, store in setup.data.stores}
    doubts = [f"{cut.message} {cut.advice}" for cut in find_cuts(splits, extractive=all(extractive))]
    family = get_family(setup.learner.model.config)
    longest = family.longest_input or math.inf
    for name, store in setup.data.stores:
        if num := int((store.inputs.lengths > longest).sum()):
            doubts.append(
                f"{name}: {num:,} inputs ({num / len(store):.1%}) over {family.longest_input:,} tokens, the longest "
                f"that {family.model_type} has published results for. Set data.max_input_tokens to "
                f"{family.longest_input}, or expect lower scores for them."
            )
    if doubts:
        return "warn", " ".join(doubts)
    parts: list[str] = []
    for name, facts in splits.items():
        clipped = facts.num_examples_clipped or 0
        cut_targets = facts.num_clipped_targets or 0
        if clipped or cut_targets:
            lost = f"{facts.num_answers_lost or 0:,} gold answers lost; " if any(extractive) else ""
            parts.append(
                f"{name}: {clipped:,} inputs ({clipped / max(facts.num_examples or 0, 1):.1%}) over "
                f"{facts.max_input_tokens} tokens; {lost}{cut_targets:,} targets over {facts.max_target_tokens}"
            )
    return "pass", "; ".join(parts) or "no input and no target is truncated"
