"""Records read and lost, lengths of the texts: the section on data.

In: the counts of data.json by split. Out: a Section.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import Part, Table, Text
from fivetune.reading.report.page.wording import (
    format_count,
    format_decimal,
    format_percent,
    format_plain,
    format_plural,
    shorten_home,
)
from fivetune.rundir.records import Histogram, Run, SplitSummary
from fivetune.values import divide


def iter_data_parts(run: Run) -> Iterator[Part]:
    """Yield counts of records and examples, losses by truncation, lengths in tokens."""
    splits: dict[str, SplitSummary] = {}
    if run.data.train is not None:
        splits["train"] = run.data.train
    if run.data.eval is not None:
        splits["eval"] = run.data.eval
    if not splits:
        yield Text("The run directory holds no data counts (data.json).")
        return
    yield Text(_describe_counts(splits))
    yield Text(_describe_truncation(splits))
    cut = any(facts.num_windows for facts in splits.values())
    of_what = "of the windows, and of inputs that need none" if cut else "before truncation"
    lengths: list[Sequence[str]] = []
    # All sets have the limits of the run, so that the first one has them.
    first = next(iter(splits.values()))
    for kind, limit in (("input", first.max_input_tokens), ("target", first.max_target_tokens)):
        histograms: dict[str, Histogram | None] = {
            name: facts.input_lengths if kind == "input" else facts.target_lengths for name, facts in splits.items()
        }
        caption = f"Lengths of the {kind}s {of_what}."
        chart = charts.build_lengths_chart(histograms, caption, unit=f"{kind} tokens", limit=limit)
        if chart:
            yield chart
        for name, histogram in histograms.items():
            edges, shares = charts.compute_histogram_shares(histogram)
            for low, high, share in zip(edges, edges[1:], shares, strict=False):
                if share:
                    tokens = f"{format_count(low)} to {format_count(high)}"
                    lengths.append((name, kind, tokens, format_decimal(share, 1)))
    rows: list[Sequence[str]] = []
    zeros: list[str] = []
    for words, count, base in _DATA_ROWS:
        if not any(count(facts) != 0 for facts in splits.values()):
            zeros.append(words)
            continue
        cells = [words]
        for facts in splits.values():
            num = count(facts)
            cells += [format_count(num), "" if base is None else format_percent(divide(num, base(facts)), 2)]
        rows.append(cells)
    header = ("count", *(word for name in splits for word in (name, "share")))
    none = f" Zero: {', '.join(zeros)}." if zeros else ""
    yield Table(f"Counts of what was read and lost.{none} (data.json)", header, rows)
    if lengths:
        header = ("split", "text", "tokens", "examples (%)")
        yield Table("The length histograms in numbers.", header, lengths, folded=True)
    skips: list[Sequence[str]] = []
    for name, facts in splits.items():
        skips += [(name, skip.where, skip.reason) for skip in facts.skips]
    if skips:
        caption = "Records left out: the first invalid ones, and the first that the task excludes."
        yield Table(caption, ("split", "where", "reason"), skips[:40], folded=True)


def _describe_counts(splits: Mapping[str, SplitSummary]) -> str:
    """Describe the counts of each split: 30 records read = 3 kept + 27 left out; 35 examples."""
    sentences: list[str] = []
    for name, facts in splits.items():
        read, out, bad = facts.num_read, facts.num_skipped, facts.num_skipped_bad
        words = f"{format_count(facts.num_records_kept)} kept + {format_count(out)} left out"
        if out and bad is not None:
            words += f" ({format_count(out - bad)} by the task, {format_count(bad)} that cannot be used)"
        made = format_plural(facts.num_examples, "example")
        sentences.append(f"{name}: {format_plural(read, 'record')} read = {words}; {made}.")
    return " ".join(sentences)


def count_examples(facts: SplitSummary | None) -> int | None:
    """Return the number of examples, several per record where a task trains on all answers; None if it is unknown."""
    return None if facts is None else facts.num_examples or facts.num_kept


Count = Callable[[SplitSummary], int | None]
_DATA_ROWS: tuple[tuple[str, Count, Count | None], ...] = (
    ("records read", lambda facts: facts.num_read, None),
    ("records kept", lambda facts: facts.num_records_kept, lambda facts: facts.num_read),
    ("records left out", lambda facts: facts.num_skipped, lambda facts: facts.num_read),
    ("records that cannot be used", lambda facts: facts.num_skipped_bad, lambda facts: facts.num_read),
    ("examples made of them", lambda facts: facts.num_examples, None),
    ("examples with a clipped input", lambda facts: facts.num_examples_clipped, count_examples),
    ("answers lost to truncation", lambda facts: facts.num_answers_lost, count_examples),
    ("targets clipped", lambda facts: facts.num_clipped_targets, count_examples),
    ("input tokens clipped", lambda facts: facts.num_clipped_input_tokens, None),
    ("input tokens", lambda facts: facts.num_input_tokens, None),
    ("target tokens", lambda facts: facts.num_target_tokens, None),
    (
        "records with a blank gold answer beside others",
        lambda facts: facts.num_blank_golds,
        lambda facts: facts.num_read,
    ),
)


def _describe_truncation(splits: Mapping[str, SplitSummary]) -> str:
    """Describe by split what truncation and windows cost, and where the records come from."""
    sentences: list[str] = []
    for name, facts in splits.items():
        clipped = facts.num_examples_clipped
        if clipped is None:
            continue
        if facts.num_windows:
            questions = format_plural(facts.num_cut_into_windows, "question")
            windows = format_plural(facts.num_windows, "window")
            sentences.append(f"{name}: {questions} too long for one input became {windows}.")
        if clipped:
            share = format_percent(divide(clipped, count_examples(facts)))
            loss = "and cut no answer away"
            if facts.num_answers_lost != 0:
                loss = f"and cut the answer away in {format_count(facts.num_answers_lost)}"
            inputs = format_plural(clipped, "input")
            sentences.append(f"{name}: truncation shortened {inputs} ({share}) {loss}.")
        elif not facts.num_windows:
            sentences.append(f"{name}: no input was too long.")
    sources: list[str] = []
    for name, facts in splits.items():
        if facts.num_not_learnt:
            num = format_plural(facts.num_not_learnt, "example")
            sentences.append(f"{name}: {num} without the answer in the input have no training target.")
        files = list(dict.fromkeys(facts.source))
        sources.append(f"{name}: {format_plain(files or None)}")
    words = " ".join(sentences) or "Losses by truncation are not known."
    return f"{words} Sources: {shorten_home('; '.join(sources))}."
