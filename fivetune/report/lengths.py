"""What was read, what was lost, how long the texts are: the section on data.

In: the counts of data.json by split. Out: a Section.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivetune.report import charts
from fivetune.report.wording import dig, discreet, fixed, number, percent, plain, plural, share, whole
from fivetune.types import Run, Section, Table, Text

Part = Any


def data_section(run: Run) -> Section:
    """What was read, what was lost, how long the texts are."""
    splits = {str(name): facts for name, facts in (run.data or {}).items() if isinstance(facts, Mapping)}
    if not splits:
        return Section("Data", (Text("The run directory holds no data counts (data.json).", "note"),))
    parts: list[Part] = [Text(_truncation_words(splits))]
    for kind in ("input", "target"):
        histograms = {name: facts.get(f"{kind}_lengths") for name, facts in splits.items()}
        limit = next((number(facts.get(f"max_{kind}_tokens")) for facts in splits.values()), None)
        chart = charts.lengths_chart(
            histograms, f"Lengths of the {kind}s before truncation.", unit=f"{kind} tokens", limit=limit
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
        parts.append(
            Table("Skipped records, the first ones of each split.", ("split", "where", "reason"), tuple(skips[:40]))
        )
    return Section("Data", tuple(parts))


def num_rows(facts: Any) -> Any:
    """Examples as the model sees them: several per record where a task trains on all answers."""
    return dig(facts, "num_examples") or dig(facts, "num_kept")


_DATA_ROWS = (
    ("records read", "num_read", None),
    ("records skipped", "num_skipped", "num_read"),
    ("records kept", "num_kept", "num_read"),
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
        sentences.append(f"{name}: {cost} {loss}." if clipped else f"{name}: no input was too long.")
    for name, facts in splits.items():
        if num := number(facts.get("num_not_learnt")):
            sentences.append(
                f"{name}: nothing is learnt from {plural(num, 'example')} without the answer in the input."
            )
    sources = "; ".join(f"{name}: {plain(facts.get('source'))}" for name, facts in splits.items())
    return f"{' '.join(sentences) or 'What truncation cost is not known.'} Sources: {discreet(sources)}."


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
