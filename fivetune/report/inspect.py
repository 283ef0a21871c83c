"""Facts about a data set -> Page: what `fivetune inspect` shows, in the terminal and as HTML.

In: the facts of fivetune/data/inspect.py as plain tables. Out: a Page, and the same page as lines of text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fivetune.report import charts
from fivetune.report.render import align
from fivetune.report.wording import discreet, fixed, percent, plain, plural, share, visible, whole
from fivetune.types import Chart, Example, Figure, Page, Section, Table, Text

PARTS = {"inputs": "input", "contexts": "context", "targets": "target"}
LAST_WORDS = 240  # characters of a text from the data
LAST_CELL = 90  # characters of a cell in the terminal

Facts = Mapping[str, Any]
Part = Any


def inspection_page(facts: Facts) -> Page:
    """The page of an inspection."""
    sets = facts["sets"]
    sections = (
        _read_section(facts),
        Section("Counts", tuple(part for name in sets for part in _counts_parts(name, sets[name]))),
        _lengths_section(facts),
        _limits_section(facts),
        _duplicates_section(facts),
        _leakage_section(facts),
        _answers_section(sets),
        _characters_section(facts),
        _examples_section(facts),
    )
    sources = "; ".join(f"{name}: {', '.join(one['sources'])}" for name, one in sets.items())
    return Page(
        title=f"Data for {facts['task']}",
        sections=tuple(section for section in sections if section.parts),
        subtitle=discreet(f"{sources}; tokenizer: {facts['tokenizer']}"),
    )


# --- what was read ---


def _read_section(facts: Facts) -> Section:
    sets = facts["sets"]
    parts: list[Part] = [Text(text, kind) for kind, text in _findings(facts)]
    rows = [
        (words, *(whole(one[key]) for one in sets.values()))
        for words, key in (
            ("records read", "num_read"),
            ("skipped: cannot be used", "num_skipped"),
            ("left out by the task", "num_left_out"),
            ("without answers that can be used", "num_unlabelled"),
            ("examples", "num_examples"),
            ("questions", "num_groups"),
            ("targets to learn or to score", "num_targets"),
        )
    ]
    parts.append(Table("What was read, and what became of it.", ("count", *sets), tuple(rows)))
    for key, words in (("skipped", "Records that cannot be used"), ("unlabelled", "Records without usable answers")):
        bad = [(name, one["where"], one["reason"]) for name in sets for one in sets[name][key]]
        if bad:
            parts.append(Table(f"{words}, the first of each set.", ("set", "where", "reason"), tuple(bad)))
    return Section("Overview", tuple(parts))


def _findings(facts: Facts) -> Iterator[tuple[str, str]]:
    """What to look at, in a sentence each, with the kind of its Text."""
    if facts["is_default_tokenizer"]:
        words = (
            f"Lengths and characters are those of {facts['tokenizer']}, whose vocabulary is small. Judge limits with "
            "--tokenizer and the folder or hub name of the model that is to be trained."
        )
        yield "note", words
    found = [text for name, one in facts["sets"].items() for text in _set_findings(name, one, facts["limits"])]
    for kind, leak in facts.get("leakage", {}).items():
        num = leak["num_exact"] + (leak["num_near"] or 0)
        if num:
            found.append(
                f"eval shares the {kind} with train in {plural(num, 'example')} ({percent(share(num, leak['of']))}): "
                f"{whole(leak['num_exact'])} exactly, {whole(leak['num_near'] or 0)} nearly."
            )
    yield from (("warning", text) for text in found)
    if not found:
        yield "good", "Nothing to warn about: no bad record, contradiction, leak, lost answer or lost character."


def _set_findings(name: str, one: Facts, limits: Facts) -> Iterator[str]:
    if one["num_skipped"]:
        yield f"{name}: {whole(one['num_skipped'])} of {plural(one['num_read'], 'record')} cannot be used."
    if one["num_unlabelled"]:
        yield f"{name}: {plural(one['num_unlabelled'], 'record')} without an answer to learn or to score by."
    lost = next((row["num_answers_lost"] for row in one["input_limits"] if row["limit"] == limits["input"]), 0)
    if lost and limits["overlong"] == "truncate":
        yield f"{name}: the limit of {whole(limits['input'])} input tokens cuts {plural(lost, 'answer')} away."
    cut = next((row["num_cut"] for row in one["target_limits"] if row["limit"] == limits["target"]), 0)
    if cut:
        yield f"{name}: the limit of {whole(limits['target'])} target tokens cuts {plural(cut, 'target')}."
    repeated = one["duplicates"]["inputs with different answers"]["num"]
    if repeated:
        yield f"{name}: in {plural(repeated, 'example')} the inputs of another stand again, with a different answer."
    if one["answers"] and one["answers"]["num_questions"]:
        num = one["answers"]["num_questions"]
        yield f"{name}: no context holds an answer to {plural(num, 'question')}."
    hit = one["characters"]["num"]
    if hit:
        part = percent(share(hit, one["characters"]["of"]))
        yield f"{name}: the tokenizer does not keep all characters of {plural(hit, 'example')} ({part})."


# --- counts and lengths ---


def _counts_parts(name: str, one: Facts) -> Iterator[Part]:
    yield Text(f"Examples of {name}", "heading")
    for kind, found in one["counts"].items():
        rows = tuple(
            (_short(str(value)), whole(num), percent(share(num, found["num"]))) for value, num in found["common"]
        )
        rest = found["num_values"] - len(rows)
        more = f", the most frequent; {plural(rest, 'other')} not shown" if rest else ""
        caption = f"{name}: {plural(found['num_values'], 'value')} of {kind}{more}."
        yield Table(caption, (kind, "examples", "share"), rows)


def _lengths_section(facts: Facts) -> Section:
    sets, parts = facts["sets"], []
    for key, word in PARTS.items():
        histograms = {name: one["lengths"][key]["histogram"] for name, one in sets.items() if one["lengths"][key]}
        caption = f"Lengths of the {key} in tokens, before any cut."
        limit = facts["limits"].get(word)
        chart = charts.lengths_chart(histograms, caption, unit=f"{word} tokens", limit=limit)
        parts += [chart] if chart else []
    found = [(name, key, one["lengths"][key]) for name, one in sets.items() for key in PARTS if one["lengths"][key]]
    if not found:
        return Section("Lengths", ())
    quantiles = list(found[0][2]["quantiles"])
    header = ("set", "text", "tokens", "mean", *(f"{100 * float(q):g} %" for q in quantiles), "longest")
    rows = tuple(
        (name, key, whole(row["num_tokens"]), fixed(row["mean"], 1),
         *(whole(row["quantiles"][q]) for q in quantiles), whole(row["longest"]))
        for name, key, row in found
    )  # fmt: skip
    caption = "Lengths in tokens: of all together, the mean, and how long so many of them are at most."
    return Section("Lengths", (*parts, Table(caption, header, rows)))


def _limits_section(facts: Facts) -> Section:
    parts: list[Part] = [
        Text(
            "An answer counts as lost when the inputs hold it, and hold none any more after the cut at the end of the "
            "context. Cost is that of the encoder beside a limit of 512: the sum of n + n² / 3072 over all examples, "
            "n tokens after the cut (attention and the other layers of t5-small; padding not counted)."
        )
    ]
    for name, one in facts["sets"].items():
        num = one["num_examples"]
        rows = tuple(
            (whole(row["limit"]), whole(row["num_cut"]), percent(share(row["num_cut"], num)),
             whole(row["num_answers_lost"]), percent(share(row["num_answers_lost"], num), 2), fixed(row["cost"]))
            for row in one["input_limits"]
        )  # fmt: skip
        header = ("input limit", "inputs cut", "share", "answers lost", "share lost", "cost")
        parts.append(Table(f"{name}: what a limit of the inputs cuts and costs.", header, rows))
    for name, one in facts["sets"].items():
        rows = tuple(
            (whole(row["limit"]), whole(row["num_cut"]), percent(share(row["num_cut"], one["num_targets"])))
            for row in one["target_limits"]
        )
        if one["num_targets"]:
            parts.append(Table(f"{name}: what a limit of the targets cuts.", ("target limit", "cut", "share"), rows))
    return Section("Limits", tuple(parts))


# --- repetitions ---


def _duplicates_section(facts: Facts) -> Section:
    parts: list[Part] = [
        Text(f"Equal up to case and space; near: Jaccard similarity of the sets of three-word shingles of "
             f"{fixed(facts['near'])} or more, among texts that differ.")
    ]  # fmt: skip
    sets = facts["sets"]
    names = next(iter(sets.values()))["duplicates"]
    rows = tuple(
        (name, *(cell for one in sets.values() for cell in _num_of(one["duplicates"][name]))) for name in names
    )
    parts.append(Table("Texts that repeat an earlier one of their set.", _beside("text", sets), rows))
    repeated = tuple(
        (name, kind, ", ".join(one["ids"]), " / ".join(answer or "(none)" for answer in one["answers"]),
         _short(one["text"]))
        for name, kind, one in _shown(sets, near=False)
    )  # fmt: skip
    header = ("set", "same", "ids", "first answers", "inputs")
    caption = "Repeated inputs, and questions with different answers: the first of each."
    parts += [Table(caption, header, repeated)] if repeated else []
    pairs = tuple((name, kind, *_pair(one)) for name, kind, one in _shown(sets, near=True))
    header = ("set", "same", "similarity", "text", "and")
    parts += [Table("Near ones: the first of each.", header, pairs)] if pairs else []
    return Section("Duplicates", tuple(parts))


def _shown(sets: Facts, *, near: bool) -> Iterator[tuple[str, str, Facts]]:
    for name, one in sets.items():
        for kind, found in one["duplicates"].items():
            if kind.startswith("near") == near:
                yield from ((name, kind, shown) for shown in found["shown"])


def _beside(first: str, sets: Facts) -> tuple[str, ...]:
    return (first, *(word for name in sets for word in (name, "share")))


def _num_of(found: Facts) -> tuple[str, str]:
    return whole(found["num"]), percent(share(found["num"], found["of"]), 2)


def _pair(one: Facts) -> tuple[str, str, str]:
    return fixed(one["similarity"]), _short(one["text"]), _short(one["other"])


def _leakage_section(facts: Facts) -> Section:
    leakage = facts.get("leakage")
    if not leakage:
        return Section("Leakage", ())
    rows = tuple(
        (kind, whole(one["num_exact"]), whole(one["num_near"]), whole(one["of"]),
         percent(share(one["num_exact"] + (one["num_near"] or 0), one["of"])))
        for kind, one in leakage.items()
    )  # fmt: skip
    caption = "Examples of eval whose texts stand in train as well, exactly or nearly."
    parts = [Table(caption, ("same", "exactly", "nearly", "of", "share"), rows)]
    pairs = tuple((kind, *_pair(shown)) for kind, one in leakage.items() for shown in one["shown"])
    if pairs:
        parts.append(Table("The first of each kind.", ("same", "similarity", "in eval", "in train"), pairs))
    return Section("Leakage", tuple(parts))


# --- answers, characters, examples ---


def _answers_section(sets: Facts) -> Section:
    parts: list[Part] = []
    missing: list[tuple[str, ...]] = []
    for name, one in sets.items():
        found = one["answers"]
        if not found or not found["of"]:
            continue
        rows = (
            ("examples with an answer", whole(found["of"]), ""),
            ("the context holds none of the answers", *_num_of(found)),
            ("it holds one in other case only", whole(found["num_other_case"]),
             percent(share(found["num_other_case"], found["of"]), 2)),
            ("questions that no context answers", whole(found["num_questions"]),
             percent(share(found["num_questions"], found["of_questions"]), 2)),
        )  # fmt: skip
        parts.append(Table(f"{name}: do the answers stand in their contexts?", ("count", name, "share"), rows))
        missing += [(name, row["id"], _short(row["answer"]), _short(row["text"])) for row in found["shown"]]
    if missing:
        caption = "Answers that do not stand in their context, the first ones of each set."
        parts.append(Table(caption, ("set", "id", "first answer", "inputs"), tuple(missing)))
    return Section("Answers", tuple(parts))


def _characters_section(facts: Facts) -> Section:
    parts: list[Part] = [Text("White space that becomes a space is listed here, but no reason for a warning.")]
    for name, one in facts["sets"].items():
        found = one["characters"]
        if not found["num_characters"]:
            parts.append(Text(f"{name}: the tokenizer keeps all characters.", "good"))
            continue
        rows = tuple(
            (_character(row["character"]), f"U+{ord(row['character']):04X}", _character(row["becomes"]),
             whole(row["num_times"]), whole(row["num_texts"]), percent(share(row["num_texts"], found["of"])))
            for row in found["common"]
        )  # fmt: skip
        rest = found["num_characters"] - len(rows)
        more = f", the most frequent; {plural(rest, 'other')} not shown" if rest else ""
        caption = f"{name}: {plural(found['num_characters'], 'character')} that the tokenizer does not keep{more}."
        header = ("character", "code", "becomes", "times", "examples", "share")
        parts.append(Table(caption, header, rows))
    return Section("Characters", tuple(parts))


def _character(text: str) -> str:
    """A character as it can be seen.

    >>> _character("\\n"), _character(""), _character("ñ")
    ("'\\\\n'", '(nothing)', 'ñ')
    """
    if not text:
        return "(nothing)"
    return text if text.isprintable() and not text.isspace() else repr(text)


def _examples_section(facts: Facts) -> Section:
    limits = facts["limits"]
    words = (
        f"From the shortest to the longest, decoded from the tokens that remain with at most {plain(limits['input'])} "
        f"input and {plain(limits['target'])} target tokens ({limits['overlong']})."
    )
    parts: list[Part] = [Text(words)]
    for one in facts["examples"]:
        window = f", window {one['window'][0]} of {one['window'][1]}" if one["window"] else ""
        lost = ", the answer is lost" if one["answer_lost"] else ""
        parts.append(Text(f"{one['id']}: {plural(one['num_input_tokens'], 'token')}{window}{lost}", "heading"))
        mark = f" [... {plural(one['num_cut'], 'token')} cut ...] "
        parts.append(Text(mark.join(one["inputs"]), "code"))
        cut = f" [... {plural(one['num_cut_targets'], 'token')} cut ...]" if one["num_cut_targets"] else ""
        golds = " / ".join(reference or "(no answer)" for reference in one["references"]) or "unknown"
        target = f"{one['targets']}{cut}   ({plural(one['num_target_tokens'], 'token')}; right: {_short(golds)})"
        parts.append(Text(f"target: {target}", "code"))
    return Section("Examples", tuple(parts))


def _short(text: str) -> str:
    """The beginning of a long text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= LAST_WORDS else f"{line[: LAST_WORDS - 4]} ..."


# --- the page as text ---


def page_lines(page: Page) -> Iterator[str]:
    """A page for the terminal: all but its charts, with hidden characters made visible."""
    yield visible(page.title)
    yield visible(page.subtitle)
    for section in page.sections:
        yield ""
        yield f"== {section.title} =="
        for part in section.parts:
            if isinstance(part, Text):
                yield from ("", _paragraph(part))
            elif isinstance(part, Table):
                yield from ("", visible(part.caption), *_table_lines(part))
            else:
                assert isinstance(part, Chart | Figure | Example)  # for the eye


def _paragraph(part: Text) -> str:
    return f"warning: {visible(part.body)}" if part.kind == "warning" else visible(part.body)


def _table_lines(table: Table) -> Iterator[str]:
    """Aligned columns, numbers to the right.

    >>> print(*_table_lines(Table("", ("limit", "cut"), (("8", "1,200"), ("16", "7")))), sep="|")
    limit    cut|    8  1,200|   16      7
    """
    rows = [[_cell(cell) for cell in row] for row in (table.header, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if kind == "num" else "<" for kind in align(table)]
    for row in rows:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)]
        yield "  ".join(cells).rstrip()


def _cell(text: str) -> str:
    text = visible(" ".join(text.split()))
    return text if len(text) <= LAST_CELL else f"{text[: LAST_CELL - 4]} ..."
