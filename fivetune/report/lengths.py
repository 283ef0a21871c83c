"""What was read, what was lost, how long the texts are: the section on data.

In: the counts of data.json by split. Out: a Section.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivetune.report import charts
from fivetune.report.wording import discreet, fixed, percent, plain, plural, share, whole
from fivetune.types import Run, Section, Table, Text
from fivetune.values import dig, number

Part = Any


def data_section(run: Run) -> Section:
    """What was read, what was lost, how long the texts are."""
    splits = {str(name): facts for name, facts in (run.data or {}).items() if isinstance(facts, Mapping)}
    if not splits:
        return Section("Data", (Text("The run directory holds no data counts (data.json).", "note"),))
    parts: list[Part] = [Text(_counts_words(splits)), Text(_truncation_words(splits))]
    cut = any(number(facts.get("num_windows")) for facts in splits.values())
    of_what = "of the windows, and of what needed none" if cut else "before truncation"
    for kind in ("input", "target"):
        histograms = {name: facts.get(f"{kind}_lengths") for name, facts in splits.items()}
        limit = next((number(facts.get(f"max_{kind}_tokens")) for facts in splits.values()), None)
        chart = charts.lengths_chart(
            histograms, f"Lengths of the {kind}s {of_what}.", unit=f"{kind} tokens", limit=limit
        )
        parts += [chart] if chart else []
    header = ("count", *(word for name in splits for word in (name, "share")))
    rows = tuple(
        (words, *(cell for facts in splits.values() for cell in _cells(facts, key, base)))
        for words, key, base in _DATA_ROWS
    )
    parts.append(Table("What was read and what was lost. (data.json)", header, rows))
    parts += _lengths_tables(splits)
    skips = [
        (name, plain(dig(skip, "where")), plain(dig(skip, "reason")))
        for name in splits
        for skip in splits[name].get("skips") or []
    ]
    if skips:
        caption = "Records left out: the first ones that cannot be used, and the first that the task does not want."
        parts.append(Table(caption, ("split", "where", "reason"), tuple(skips[:40]), folded=True))
    return Section("Data", tuple(parts))


def _counts_words(splits: Mapping[str, Mapping[str, Any]]) -> str:
    """30 records read = 3 kept + 27 left out; 35 examples."""
    sentences = []
    for name, facts in splits.items():
        read, out, bad = (number(facts.get(key)) for key in ("num_read", "num_skipped", "num_skipped_bad"))
        kept = f"{whole(facts.get('num_records_kept'))} kept + {whole(out)} left out"
        why = f" ({whole(out - bad)} by the task, {whole(bad)} that cannot be used)" if out and bad is not None else ""
        made = plural(facts.get("num_examples"), "example")
        sentences.append(f"{name}: {plural(read, 'record')} read = {kept}{why}; {made}.")
    return " ".join(sentences)


def num_rows(facts: Any) -> Any:
    """Examples as the model sees them: several per record where a task trains on all answers."""
    return dig(facts, "num_examples") or dig(facts, "num_kept")


_DATA_ROWS = (
    ("records read", "num_read", None),
    ("records kept", "num_records_kept", "num_read"),
    ("records left out", "num_skipped", "num_read"),
    ("of these, cannot be used", "num_skipped_bad", "num_read"),
    ("examples made of them", "num_examples", None),
    ("examples with a clipped input", "num_examples_clipped", "num_examples"),
    ("answers lost to truncation", "num_answers_lost", "num_examples"),
    ("targets clipped", "num_clipped_targets", "num_examples"),
    ("input tokens clipped", "num_clipped_input_tokens", None),
    ("input tokens", "num_input_tokens", None),
    ("target tokens", "num_target_tokens", None),
)


def _cells(facts: Mapping[str, Any], key: str, base: str | None) -> tuple[str, str]:
    """A count and its share of another count."""
    total = num_rows(facts) if base == "num_examples" else facts.get(base or "")
    return whole(facts.get(key)), "" if base is None else percent(share(facts.get(key), total), 2)


def _truncation_words(splits: Mapping[str, Mapping[str, Any]]) -> str:
    sentences = []
    for name, facts in splits.items():
        clipped, lost = number(facts.get("num_examples_clipped")), number(facts.get("num_answers_lost"))
        if clipped is None:
            continue
        cost = f"truncation shortened {plural(clipped, 'input')} ({percent(share(clipped, num_rows(facts)))})"
        loss = "and cut no answer away" if lost == 0 else f"and cut the answer away in {whole(lost)}"
        questions, cut = number(facts.get("num_cut_into_windows")), number(facts.get("num_windows"))
        windows = f"{plural(questions, 'question')} too long for one input became {plural(cut, 'window')}"
        if cut:
            sentences.append(f"{name}: {windows}.")
        if clipped or not cut:
            sentences.append(f"{name}: {cost} {loss}." if clipped else f"{name}: no input was too long.")
    for name, facts in splits.items():
        if num := number(facts.get("num_not_learnt")):
            sentences.append(
                f"{name}: nothing is learnt from {plural(num, 'example')} without the answer in the input."
            )
    sources = "; ".join(f"{name}: {_files(facts.get('source'))}" for name, facts in splits.items())
    return f"{' '.join(sentences) or 'What truncation cost is not known.'} Sources: {discreet(sources)}."


def _files(source: Any) -> str:
    """The files, each once: the parts of a mixture may share one."""
    return plain(list(dict.fromkeys(map(str, source))) if isinstance(source, list) else source)


def _lengths_tables(splits: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    rows = []
    for name, facts in splits.items():
        for kind in ("input", "target"):
            edges, shares = charts.bins(facts.get(f"{kind}_lengths"))
            rows += [
                (name, kind, f"{whole(low)} to {whole(high)}", fixed(part, 1))
                for low, high, part in zip(edges, edges[1:], shares, strict=False)
                if part
            ]
    caption = "The length histograms in numbers."
    return [Table(caption, ("split", "text", "tokens", "examples (%)"), tuple(rows), folded=True)] if rows else []
