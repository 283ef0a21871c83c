"""The page of `fivetune inspect` from the facts about a data set, for the terminal and as HTML.

In: the facts of fivetune/data/inspect.py as plain tables. Out: a Page, and the same page as lines of text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import Page, Part, Section, Table, Text
from fivetune.reading.report.page.wording import (
    format_count,
    format_decimal,
    format_percent,
    format_plain,
    format_plural,
    shorten_home,
)
from fivetune.rundir.parse import parse_record
from fivetune.rundir.records import Histogram
from fivetune.values import divide

PARTS = {"inputs": "input", "contexts": "context", "targets": "target"}
MAX_FORMS = 5  # forms of a label
MAX_TEXT_CHARS = 240  # characters of a text from the data

Facts = Mapping[str, Any]


def build_inspection_page(facts: Facts) -> Page:
    """Build the page of an inspection."""
    sets = facts["sets"]
    sections = (
        _build_overview_section(facts),
        Section("Counts", tuple(part for name in sets for part in _build_counts_parts(name, sets[name]))),
        _build_lengths_section(facts),
        _build_limits_section(facts),
        _build_duplicates_section(facts),
        _build_leakage_section(facts),
        _build_answers_section(sets),
        _build_characters_section(facts),
        _build_examples_section(facts),
    )
    sources = "; ".join(f"{name}: {', '.join(one['sources'])}" for name, one in sets.items())
    return Page(
        title=f"Data for {facts['task']}",
        sections=tuple(section for section in sections if section.parts),
        subtitle=shorten_home(f"{sources}; tokenizer: {facts['tokenizer']}"),
    )


# --- overview ---


def _build_overview_section(facts: Facts) -> Section:
    sets = facts["sets"]
    parts: list[Part] = [Text(text, kind) for kind, text in _iter_findings(facts)]
    rows = [
        (words, *(format_count(one[key]) for one in sets.values()))
        for words, key in (
            ("records read", "num_read"),
            ("skipped: cannot be used", "num_skipped"),
            ("left out by the task", "num_left_out"),
            ("without usable answers", "num_unlabelled"),
            ("examples", "num_examples"),
            ("questions", "num_groups"),
            ("targets to learn or to score", "num_targets"),
        )
    ]
    parts.append(Table("Records read, and their use.", ("count", *sets), tuple(rows)))
    for key, words in (("skipped", "Records that cannot be used"), ("unlabelled", "Records without usable answers")):
        bad = [(name, one["where"], one["reason"]) for name in sets for one in sets[name][key]]
        if bad:
            parts.append(Table(f"{words}, the first of each set.", ("set", "where", "reason"), tuple(bad)))
    return Section("Overview", tuple(parts))


def _iter_findings(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield (kind of Text, sentence) for each finding."""
    if facts["is_default_tokenizer"]:
        words = (
            f"Lengths and characters are those of the tokenizer of {facts['tokenizer']}, which has a small vocabulary. "
            "To choose limits, give --tokenizer and the folder or hub name of the model to train."
        )
        yield "note", words
    found = [text for name, one in facts["sets"].items() for text in _iter_set_findings(name, one, facts["limits"])]
    for kind, leak in facts.get("leakage", {}).items():
        num = leak["num_exact"] + (leak["num_near"] or 0)
        if num:
            found.append(
                f"eval shares the {kind} with train in {format_plural(num, 'example')} "
                f"({format_percent(divide(num, leak['of']))}): "
                f"{format_count(leak['num_exact'])} exactly, {format_count(leak['num_near'] or 0)} nearly."
            )
    yield from (("warning", text) for text in found)
    if not found:
        yield "good", "No problem found: no invalid record, contradiction, leak, lost answer or lost character."


def _iter_set_findings(name: str, one: Facts, limits: Facts) -> Iterator[str]:
    if one["num_skipped"]:
        yield (
            f"{name}: {format_count(one['num_skipped'])} of {format_plural(one['num_read'], 'record')} cannot be used."
        )
    if one["num_unlabelled"]:
        yield f"{name}: {format_plural(one['num_unlabelled'], 'record')} without an answer to learn or to score by."
    lost = next((row["num_answers_lost"] for row in one["input_limits"] if row["limit"] == limits["input"]), 0)
    if lost and limits["overlong"] == "truncate":
        yield (
            f"{name}: the limit of {format_count(limits['input'])} input tokens cuts "
            f"{format_plural(lost, 'answer')} away."
        )
    cut = next((row["num_cut"] for row in one["target_limits"] if row["limit"] == limits["target"]), 0)
    if cut:
        yield (
            f"{name}: the limit of {format_count(limits['target'])} target tokens cuts {format_plural(cut, 'target')}."
        )
    repeated = one["duplicates"]["inputs with different answers"]["num"]
    if repeated:
        yield (f"{name}: {format_plural(repeated, 'example')} repeat another example's input with a different answer.")
    golds = one["golds"]
    if golds["num_blank"]:
        name_of, before = next(iter(golds["empty_scores"].items()))
        after = golds["empty_scores_without_blanks"][name_of]
        yield (
            f"{name}: {format_count(golds['num_blank'])} of {format_plural(golds['num'], 'question')} have a blank "
            f"gold answer beside others: predicting nothing scores {name_of} {format_decimal(before, 1)}, "
            f"without the blank ones {format_decimal(after, 1)}."
        )
    if golds["num_dropped_synonyms"]:
        num = format_plural(golds["num_dropped_synonyms"], "question")
        yield f"{name}: {num} with blank synonyms among the right answers; they are dropped."
    if golds["num_disjoint"] > golds["num"] / 10:
        yield (
            f"{name}: {format_plural(golds['num_disjoint'], 'question')} with several gold answers without a common "
            "word. Any of them counts as right: if all are wanted, join them into one answer."
        )
    if golds["language"]:
        yield (
            f"{name}: the gold answers are in the script of {golds['language']!r}, whose words the scores do not know. "
            f"Set task.language: {golds['language']}."
        )
    yield from (
        f"{name}: {golds[key]}." for key in ("imbalance", "merged_forms", "placeholders", "empty_inputs") if golds[key]
    )
    if one["offsets"]["num"]:
        first = one["offsets"]["shown"][0]
        yield (
            f"{name}: {format_plural(one['offsets']['num'], 'record')} with an answer that does not stand at its "
            f"answer_start, first {first['where']}: {first['reason']}."
        )
    if one["answers"] and one["answers"]["num_questions"]:
        num = one["answers"]["num_questions"]
        yield f"{name}: no context holds an answer to {format_plural(num, 'question')}."
    yield from (f"{name}: {note}." for note in one["odd_targets"])
    hit = one["characters"]["num"]
    if hit:
        part = format_percent(divide(hit, one["characters"]["of"]))
        yield f"{name}: the tokenizer does not keep all characters of {format_plural(hit, 'example')} ({part})."


# --- counts and lengths ---


def _build_counts_parts(name: str, one: Facts) -> Iterator[Part]:
    yield Text(f"Examples of {name}", "heading")
    for kind, found in one["counts"].items():
        rows = tuple(
            (_shorten(str(value)), format_count(num), format_percent(divide(num, found["num"])))
            for value, num in found["common"]
        )
        rest = found["num_values"] - len(rows)
        more = f", the most frequent; {format_plural(rest, 'other')} not shown" if rest else ""
        caption = f"{name}: {format_plural(found['num_values'], 'value')} of {kind}{more}."
        if forms := found.get("forms"):
            told = (
                ", ".join(f"{form!r} ({format_count(n)})" for form, n in forms.get(value, ())[:MAX_FORMS])
                for value, _ in found["common"]
            )
            rows = tuple((*row, text) for row, text in zip(rows, told, strict=True))
        yield Table(caption, (kind, "examples", "share", *(("forms in the data",) if forms else ())), rows)


def _build_lengths_section(facts: Facts) -> Section:
    sets = facts["sets"]
    parts: list[Part] = []
    for key, word in PARTS.items():
        histograms = {
            name: parse_record(Histogram, one["lengths"][key]["histogram"])
            for name, one in sets.items()
            if one["lengths"][key]
        }
        caption = f"Lengths of the {key} in tokens, before any cut."
        limit = facts["limits"].get(word)
        chart = charts.build_lengths_chart(histograms, caption, unit=f"{word} tokens", limit=limit)
        parts += [chart] if chart else []
    found = [(name, key, one["lengths"][key]) for name, one in sets.items() for key in PARTS if one["lengths"][key]]
    if not found:
        return Section("Lengths", ())
    quantiles = list(found[0][2]["quantiles"])
    header = ("set", "text", "tokens", "mean", *(f"{100 * float(q):g} %" for q in quantiles), "longest")
    rows = tuple(
        (
            name,
            key,
            format_count(row["num_tokens"]),
            format_decimal(row["mean"], 1),
            *(format_count(row["quantiles"][q]) for q in quantiles),
            format_count(row["longest"]),
        )
        for name, key, row in found
    )
    caption = "Lengths in tokens: sum, mean, quantiles, maximum."
    return Section("Lengths", (*parts, Table(caption, header, rows)))


def _build_limits_section(facts: Facts) -> Section:
    parts: list[Part] = [
        Text(
            "An answer is lost if the input holds a gold answer before truncation of the context's end and none after "
            "it. Cost is the encoder's, relative to a limit of 512: the sum of n + n² / 3072 over all examples, n "
            "tokens after truncation (attention and the other layers of t5-small, without padding)."
        )
    ]
    for name, one in facts["sets"].items():
        num = one["num_examples"]
        rows = tuple(
            (
                format_count(row["limit"]),
                format_count(row["num_cut"]),
                format_percent(divide(row["num_cut"], num)),
                format_count(row["num_answers_lost"]),
                format_percent(divide(row["num_answers_lost"], num), 2),
                format_decimal(row["cost"]),
            )
            for row in one["input_limits"]
        )
        header = ("input limit", "inputs cut", "share", "answers lost", "share lost", "cost")
        parts.append(Table(f"{name}: truncation and cost by limit of the input.", header, rows))
    for name, one in facts["sets"].items():
        rows = tuple(
            (
                format_count(row["limit"]),
                format_count(row["num_cut"]),
                format_percent(divide(row["num_cut"], one["num_targets"])),
            )
            for row in one["target_limits"]
        )
        if one["num_targets"]:
            parts.append(Table(f"{name}: truncation by limit of the target.", ("target limit", "cut", "share"), rows))
    return Section("Limits", tuple(parts))


# --- repetitions ---


def _build_duplicates_section(facts: Facts) -> Section:
    parts: list[Part] = [
        Text(
            f"Equal up to case and space; near: Jaccard similarity of the sets of three-word shingles of "
            f"{format_decimal(facts['near'])} or more, among texts that differ."
        )
    ]
    sets = facts["sets"]
    names = next(iter(sets.values()))["duplicates"]
    rows = tuple(
        (name, *(cell for one in sets.values() for cell in _format_count_and_share(one["duplicates"][name])))
        for name in names
    )
    parts.append(Table("Texts that repeat an earlier one of their set.", _build_share_header("text", sets), rows))
    repeated = tuple(
        (
            name,
            kind,
            ", ".join(one["ids"]),
            " / ".join(answer or "(none)" for answer in one["answers"]),
            _shorten(one["text"]),
        )
        for name, kind, one in _iter_duplicates(sets, near=False)
    )
    header = ("set", "same", "ids", "first answers", "inputs")
    caption = "Repeated inputs, and questions with different answers: the first of each."
    parts += [Table(caption, header, repeated)] if repeated else []
    pairs = tuple((name, kind, *_format_pair(one)) for name, kind, one in _iter_duplicates(sets, near=True))
    header = ("set", "same", "similarity", "text", "and")
    parts += [Table("Near ones: the first of each.", header, pairs)] if pairs else []
    return Section("Duplicates", tuple(parts))


def _iter_duplicates(sets: Facts, *, near: bool) -> Iterator[tuple[str, str, Facts]]:
    for name, one in sets.items():
        for kind, found in one["duplicates"].items():
            if kind.startswith("near") == near:
                yield from ((name, kind, shown) for shown in found["shown"])


def _build_share_header(first: str, sets: Facts) -> tuple[str, ...]:
    return (first, *(word for name in sets for word in (name, "share")))


def _format_count_and_share(found: Facts) -> tuple[str, str]:
    return format_count(found["num"]), format_percent(divide(found["num"], found["of"]), 2)


def _format_pair(one: Facts) -> tuple[str, str, str]:
    return format_decimal(one["similarity"]), _shorten(one["text"]), _shorten(one["other"])


def _build_leakage_section(facts: Facts) -> Section:
    leakage = facts.get("leakage")
    if not leakage:
        return Section("Leakage", ())
    rows = tuple(
        (
            kind,
            format_count(one["num_exact"]),
            format_count(one["num_near"]),
            format_count(one["of"]),
            format_percent(divide(one["num_exact"] + (one["num_near"] or 0), one["of"])),
        )
        for kind, one in leakage.items()
    )
    caption = "Examples of eval whose texts are in train too, exactly or nearly."
    parts = [Table(caption, ("same", "exactly", "nearly", "of", "share"), rows)]
    pairs = tuple((kind, *_format_pair(shown)) for kind, one in leakage.items() for shown in one["shown"])
    if pairs:
        parts.append(Table("The first of each kind.", ("same", "similarity", "in eval", "in train"), pairs))
    return Section("Leakage", tuple(parts))


# --- answers, characters, examples ---


def _build_answers_section(sets: Facts) -> Section:
    parts: list[Part] = []
    missing: list[tuple[str, ...]] = []
    for name, one in sets.items():
        found = one["answers"]
        if not found or not found["of"]:
            continue
        rows = (
            ("examples with an answer", format_count(found["of"]), ""),
            ("the context holds none of the answers", *_format_count_and_share(found)),
            (
                "it holds one in other case only",
                format_count(found["num_other_case"]),
                format_percent(divide(found["num_other_case"], found["of"]), 2),
            ),
            (
                "questions that no context answers",
                format_count(found["num_questions"]),
                format_percent(divide(found["num_questions"], found["of_questions"]), 2),
            ),
        )
        parts.append(Table(f"{name}: answers in their contexts.", ("count", name, "share"), rows))
        missing += [(name, row["id"], _shorten(row["answer"]), _shorten(row["text"])) for row in found["shown"]]
    if missing:
        caption = "Answers that are not in their context, the first ones of each set."
        parts.append(Table(caption, ("set", "id", "first answer", "inputs"), tuple(missing)))
    return Section("Answers", tuple(parts))


def _build_characters_section(facts: Facts) -> Section:
    parts: list[Part] = [Text("White space that becomes a space is listed, but is no warning.")]
    for name, one in facts["sets"].items():
        found = one["characters"]
        if not found["num_characters"]:
            parts.append(Text(f"{name}: the tokenizer keeps all characters.", "good"))
            continue
        rows = tuple(
            (
                _format_character(row["character"]),
                f"U+{ord(row['character']):04X}",
                _format_character(row["becomes"]),
                format_count(row["num_times"]),
                format_count(row["num_texts"]),
                format_percent(divide(row["num_texts"], found["of"])),
            )
            for row in found["common"]
        )
        rest = found["num_characters"] - len(rows)
        more = f", the most frequent; {format_plural(rest, 'other')} not shown" if rest else ""
        caption = f"{name}: {format_plural(found['num_characters'], 'character')} that the tokenizer loses{more}."
        header = ("character", "code", "becomes", "times", "examples", "share")
        parts.append(Table(caption, header, rows))
    return Section("Characters", tuple(parts))


def _format_character(text: str) -> str:
    """Format a character visibly.

    >>> _format_character("\\n"), _format_character(""), _format_character("ñ")
    ("'\\\\n'", '(nothing)', 'ñ')
    """
    if not text:
        return "(nothing)"
    return text if text.isprintable() and not text.isspace() else repr(text)


def _build_examples_section(facts: Facts) -> Section:
    limits = facts["limits"]
    words = (
        "From the shortest to the longest, decoded from the tokens after truncation to "
        f"{format_plain(limits['input'])} "
        f"input and {format_plain(limits['target'])} target tokens ({limits['overlong']})."
    )
    parts: list[Part] = [Text(words)]
    for one in facts["examples"]:
        window = f", window {one['window'][0]} of {one['window'][1]}" if one["window"] else ""
        lost = ", the answer is lost" if one["answer_lost"] else ""
        parts.append(Text(f"{one['id']}: {format_plural(one['num_input_tokens'], 'token')}{window}{lost}", "heading"))
        mark = f" [... {format_plural(one['num_cut'], 'token')} cut ...] "
        parts.append(Text(mark.join(one["inputs"]), "code"))
        cut = f" [... {format_plural(one['num_cut_targets'], 'token')} cut ...]" if one["num_cut_targets"] else ""
        golds = " / ".join(reference or "(no answer)" for reference in one["references"]) or "unknown"
        target = (
            f"{one['targets']}{cut}   ({format_plural(one['num_target_tokens'], 'token')}; right: {_shorten(golds)})"
        )
        parts.append(Text(f"target: {target}", "code"))
    return Section("Examples", tuple(parts))


def _shorten(text: str) -> str:
    """Shorten a long text to its beginning, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT_CHARS else f"{line[: MAX_TEXT_CHARS - 4]} ..."
