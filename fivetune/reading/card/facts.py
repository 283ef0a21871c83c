"""What a model card says of the data of a run: its files with sizes and checksums, and the limits that they show.

In: the records of a run and its files. Out: sentences and rows in Markdown; an unknown value is left out.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from fivetune.config.paths import find_typed_path
from fivetune.data.readers.records import is_hub_name
from fivetune.errors import FiveTuneError, format_size
from fivetune.redaction import name_invisible
from fivetune.rundir.checksums import compute_sha256
from fivetune.rundir.records import EvalRecord, Prediction, Run, SplitSummary
from fivetune.scores.analysis.abstention import describe_promise, list_promise_facts
from fivetune.scores.analysis.labels import build_confusion
from fivetune.scores.analysis.slices import Slice, compute_slices
from fivetune.scores.metrics import find_absent, load_metric
from fivetune.types import MetricSpec

MIN_GROUP = 20
"""Fewest examples of a group that a card names: the interval of a smaller one is wider than most differences."""
MAX_GROUPS = 5
LOW_RECALL = 0.5  # below it, most examples of a label get another one
MAX_NAME_CHARS = 60
SETS = {"train": "training", "eval": "evaluation"}


def iter_splits(run: Run) -> Iterator[tuple[str, SplitSummary]]:
    """Yield the name and the summary of each set; of a mixture those of its parts."""
    for split, words in SETS.items():
        summary: SplitSummary | None = getattr(run.data, split)
        if summary is None:
            continue
        parts = {f"{words}, {name}": part for name, part in summary.parts.items()}
        if parts:
            yield from parts.items()
        else:
            yield words, summary


def list_data_sets(run: Run) -> list[tuple[str, str]]:
    """List each set with its counts; [] if data.json has none."""
    found: list[tuple[str, str]] = []
    for name, summary in iter_splits(run):
        counts = {
            "records": summary.num_records_kept,
            "examples": summary.num_examples,
            "records left out": summary.num_skipped or None,
            "of them without a label": summary.num_unlabelled or None,
            "target tokens": summary.num_target_tokens,
        }
        words = [f"{number:,} {unit}" for unit, number in counts.items() if number is not None]
        if summary.split and summary.split.share:
            words.append(f"divided by data.eval_share {summary.split.share:g}, seed {summary.split.seed}")
        if summary.fingerprint:
            words.append(f"fingerprint {summary.fingerprint}")
        found.append((name, ", ".join(words) or "sizes unknown"))
    return found


def list_data_files(run: Run, folder: Path, *, with_checksums: bool) -> list[tuple[str, str, str, str]]:
    """List set, name, size and sha256 of each file in Markdown; "" for what is unknown.

    Args:
        folder: run directory, which relative paths are resolved with.
        with_checksums: whether to read the files for their sha256; files that changed after the start have none.
    """
    try:
        started = datetime.fromisoformat(run.status.started or "").timestamp()
    except ValueError:
        started = -math.inf  # unknown, so that any file may have changed
    rows: list[tuple[str, str, str, str]] = []
    for name, summary in iter_splits(run):
        for source in summary.source:
            if is_hub_name(source):
                rows.append((escape_markdown(name), quote_markdown(source), "", ""))
                continue
            path = Path(find_typed_path(source, folder))
            size = digest = ""
            if path.is_file():
                with suppress(OSError):
                    facts = path.stat()
                    # A file that changed after the start of the run is not what the run read.
                    if with_checksums and facts.st_mtime <= started:
                        digest = f"`{compute_sha256(path)}`"
                    size = format_size(facts.st_size)
            rows.append((escape_markdown(name), quote_markdown(path.name), size, digest))
    return rows


def list_dataset_names(run: Run) -> list[str]:
    """List the data sets of the hub that a run was trained on, without configuration and split."""
    names: dict[str, None] = {}
    for name, part in iter_splits(run):
        if name.startswith(SETS["train"]):
            names |= dict.fromkeys(source.partition(":")[0] for source in part.source if is_hub_name(source))
    return list(names)


def name_eval_data(run: Run) -> str:
    """The name of the evaluation data: of its first file, or of the data set of the hub; "" if unknown."""
    parts = [part for name, part in iter_splits(run) if name.startswith(SETS["eval"])]
    if not parts or not parts[0].source:
        return ""
    source = parts[0].source[0]
    return source if is_hub_name(source) else os.path.basename(source.rstrip("/"))


def format_metric_source(spec: MetricSpec, run: Run, evaluation: EvalRecord | None) -> str:
    """Format the source of a metric as a remark, such as " (Rajpurkar et al.)"; "" for a metric that is not there."""
    if find_absent([spec]):
        return ""
    references = [one.references for one in run.read_predictions(evaluation)]
    return f" ({load_metric(spec).describe_source(references, run.machine.versions)})"


# --- limits ---


def list_limits(run: Run, evaluation: EvalRecord | None, *, no_answer: str | None, score: str | None) -> list[str]:
    """List sentences on limits: truncation, unknown tokens, broken and missing answers, groups that do worse.

    Args:
        evaluation: evaluation of the exported weights.
        no_answer: text of an unanswerable question, for tasks with such.
        score: name of the main score.
    """
    lines: list[str] = []
    for name, part in iter_splits(run):
        lines += _describe_truncation(name, part)
    if evaluation:
        num_damaged = len(run.damage)
        predictions = run.read_predictions(evaluation)
        if len(run.damage) != num_damaged:  # a part would stand for the whole
            predictions = []
        texts = {
            "cap_hit": f"reach the limit of {evaluation.max_new_tokens} new tokens and may be incomplete",
            "sentinel": "hold a sentinel token of the pre-training (`<extra_id_0>`)",
            "unknown_characters": "hold characters that the tokenizer does not have",
            "left_label_set": "would be none of the labels if the model wrote freely; the labels are scored instead",
            "not_in_context": "are no part of their context",
            "empty": "are empty",
        }
        if no_answer is not None or any("" in one.references for one in predictions):
            del texts["empty"]  # it is right for some questions
        for rate, words in texts.items():
            share = evaluation.rates.get(rate)
            if share:
                lines.append(f"{share:.1%} of the answers {words}.")
        known = [one for one in predictions if one.references]
        if no_answer is not None and known:
            abstained = sum(not one.prediction for one in known) / len(known)
            unanswerable = sum(not any(one.references) for one in known) / len(known)
            lines.append(
                f"The model abstains ({quote_markdown(no_answer)}) on {abstained:.1%} of the questions; "
                f"{unanswerable:.1%} of them have no answer."
            )
        promise = list_promise_facts(run.abstention, run.temperature) if run.abstention else {}
        if promise:
            lines.append(describe_promise(promise))
        lines += _describe_weak_groups(predictions, score)
    else:
        lines.append("The run has no evaluation of these weights: nothing is known of their quality.")
    status = run.status
    if status.state and status.state not in ("finished", "running", "pruned"):
        planned = f" of {run.num_steps:,}" if run.num_steps else ""
        lines.append(f"The run did not finish: {status.state} at step {status.step:,}{planned}.")
    return lines


def _describe_truncation(name: str, part: SplitSummary) -> Iterator[str]:
    """Yield sentences on the truncation and the unknown tokens of a set."""
    if part.num_examples and part.num_examples_clipped is not None:
        limit = f" of {part.max_input_tokens:,} tokens" if part.max_input_tokens else ""
        if part.num_examples_clipped:
            lost = f"; {part.num_answers_lost:,} lost their answer" if part.num_answers_lost else ""
            inputs = f"{part.num_examples_clipped:,} of {part.num_examples:,} inputs"
            share = part.num_examples_clipped / part.num_examples
            yield f"{name}: {inputs} ({share:.1%}) are longer than the limit{limit} and were truncated{lost}."
        else:
            yield f"{name}: no input is longer than the limit{limit}."
    if part.num_clipped_targets:
        limit = f" of {part.max_target_tokens:,} tokens" if part.max_target_tokens else ""
        yield f"{name}: {part.num_clipped_targets:,} targets were truncated to the limit{limit}."
    if part.num_unknown_tokens and part.num_input_tokens:
        share = part.num_unknown_tokens / part.num_input_tokens
        yield (
            f"{name}: {part.num_unknown_tokens:,} tokens ({share:.2%}) are unknown to the tokenizer: the model does "
            "not see these characters."
        )


def _describe_weak_groups(predictions: Sequence[Prediction], score: str | None) -> Iterator[str]:
    """Yield sentences on groups whose 95 % interval lies below the mean of all, the largest difference first."""
    values = [line.scores[score] for line in predictions if score in line.scores] if score else []
    if values and score:
        mean = 100 * sum(values) / len(values)
        weak: list[Slice] = []
        for group in compute_slices(predictions, score).values():
            for one in group:
                # Compared as printed: no "worse" between equals.
                if len(group) > 1 and one.num >= MIN_GROUP and round(one.high, 1) < round(mean, 1):
                    weak.append(one)
        for one in sorted(weak, key=lambda one: one.score)[:MAX_GROUPS]:
            yield (
                f"Worse where {one.name} is {quote_markdown(one.value)}: {score} {one.score:.1f} (95 % interval "
                f"{one.low:.1f} to {one.high:.1f}, {one.num:,} examples); all examples: {mean:.1f}."
            )
    confusion = build_confusion(predictions)
    if confusion is None:
        return
    rare: list[tuple[float, str]] = []
    for label in confusion.labels:
        recall = confusion.compute_recall(label)
        if confusion.count_support(label) >= MIN_GROUP and recall is not None and recall < LOW_RECALL:
            rare.append((recall, label))
    for recall, label in sorted(rare)[:MAX_GROUPS]:
        num = confusion.count_support(label)
        yield f"Label {quote_markdown(label)} is found in {recall:.1%} of its {num:,} examples."


def escape_markdown(text: str) -> str:
    r"""Escape a name or value of the run, which is text of one line in Markdown and no markup.

    >>> escape_markdown("a_b <img>\n| [x](y)")
    'a_b \\<img\\> \\| \\[x\\](y)'
    """
    text = re.sub(r"([\\`*\[\]<>|&~]|(?<!\w)_|_(?!\w)|(?<=_)_)", r"\\\1", " ".join(text.split()))
    return name_invisible(text)


def quote_markdown(text: str) -> str:
    """Quote a value of the run as Markdown code of one line."""
    text = name_invisible(" ".join(text.split())).replace("`", "'").replace("|", "/")
    return f"`{text if len(text) <= MAX_NAME_CHARS else text[:MAX_NAME_CHARS] + '...'}`"


def find_no_answer(tasks: Sequence[object]) -> str | None:
    """The text of an unanswerable question, if all tasks have the same; None without such questions."""
    texts = {getattr(task, "no_answer_text", None) for task in tasks}
    return next(iter(texts)) if len(texts) == 1 else None


def read_base_license(base: str, folder: Path) -> str | None:
    """Read the licence of a base model from its own card, where that is on this machine; None if unknown."""
    from huggingface_hub import ModelCard, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from yaml import YAMLError

    from fivetune.data.corpus import CHECKPOINT

    path = CHECKPOINT if base == CHECKPOINT.name else Path(find_typed_path(base, folder))
    try:
        card = path / "README.md" if path.is_dir() else try_to_load_from_cache(base, "README.md")
        if isinstance(card, str | Path) and Path(card).is_file():
            found = ModelCard.load(card, ignore_metadata_errors=True).data.get("license")
            return found if isinstance(found, str) else None
    except (OSError, ValueError, HFValidationError, HfHubHTTPError, FiveTuneError, YAMLError):
        pass
    return None
