"""The page of `fivetune inspect` from the facts about a data set, for the terminal and as HTML.

In: the facts of fivetune/data/inspect.py as plain tables. Out: a Page, and the same page as lines of text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import Page, Part, Table, Text, build_section, collect_quiet_sections
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
        build_section("Overview", _iter_overview_parts(facts)),
        build_section("Counts", _iter_counts_parts(sets)),
        build_section("Lengths", _build_lengths_parts(facts)),
        build_section("Limits", _iter_limits_parts(sets)),
        build_section("Duplicates", _iter_duplicates_parts(facts)),
        build_section("Leakage", _iter_leakage_parts(facts.get("leakage"))),
        build_section("Answers", _build_answers_parts(sets)),
        build_section("Characters", () if facts["absent_model"] else _iter_characters_parts(sets)),
        build_section("Examples", _iter_examples_parts(facts)),
    )
    sources = "; ".join(f"{name}: {', '.join(one['sources'])}" for name, one in sets.items())
    return Page(
        title=f"Data for {facts['task']}",
        sections=collect_quiet_sections(sections),
        subtitle=shorten_home(f"{sources}; tokenizer: {facts['tokenizer']}"),
    )


def _iter_overview_parts(facts: Facts) -> Iterator[Part]:
    """Yield what was found, and how many records were read, used and left out."""
    sets = facts["sets"]
    if facts["absent_model"]:
        words = (
            f"{facts['absent_model']}, the recipe's model, is not on this machine. Lengths and cuts below are those of "
            f"{facts['tokenizer']}'s small vocabulary, which says little of it. Once it is here, inspect takes its "
            "tokenizer; one in a folder is named with --tokenizer."
        )
        yield Text(words)
    elif facts["is_default_tokenizer"]:
        words = (
            f"Lengths and characters are those of the tokenizer of {facts['tokenizer']}, which has a small vocabulary. "
            "To choose limits, give --tokenizer and the folder or hub name of the model to train."
        )
        yield Text(words)
    found: list[str] = []
    for name, one in sets.items():
        found += _iter_set_findings(name, one)
        if not facts["absent_model"]:  # another tokenizer cuts and loses something else
            found += _iter_token_findings(name, one, facts["limits"])
    for kind, leak in facts.get("leakage", {}).items():
        near = leak["num_near"] or 0
        num = leak["num_exact"] + near
        if num:
            found.append(
                f"eval shares the {kind} with train in {format_plural(num, 'example')} "
                f"({format_percent(divide(num, leak['of']))}): {format_count(leak['num_exact'])} exactly, "
                f"{format_count(near)} nearly."
            )
    for text in found:
        yield Text(text, "warning")
    if not found:
        words = "No problem found: no invalid record, contradiction, leak, lost answer or lost character."
        yield Text(words, "good")
    counts = {
        "records read": "num_read",
        "skipped: cannot be used": "num_skipped",
        "left out by the task": "num_left_out",
        "without usable answers": "num_unlabelled",
        "examples": "num_examples",
        "questions": "num_groups",
        "targets to learn or to score": "num_targets",
    }
    rows: list[Sequence[str]] = []
    for words, key in counts.items():
        rows.append((words, *(format_count(one[key]) for one in sets.values())))
    yield Table("Records read, and their use.", ("count", *sets), rows)
    for key, words in (("skipped", "Records that cannot be used"), ("unlabelled", "Records without usable answers")):
        bad: list[Sequence[str]] = []
        for name, one in sets.items():
            bad += [(name, record["where"], record["reason"]) for record in one[key]]
        if bad:
            yield Table(f"{words}, the first of each set.", ("set", "where", "reason"), bad)


def _iter_set_findings(name: str, one: Facts) -> Iterator[str]:
    if one["num_skipped"]:
        yield (
            f"{name}: {format_count(one['num_skipped'])} of {format_plural(one['num_read'], 'record')} cannot be used."
        )
    if one["num_unlabelled"]:
        yield f"{name}: {format_plural(one['num_unlabelled'], 'record')} without an answer to learn or to score by."
    repeated = one["duplicates"]["inputs with different answers"]["num"]
    if repeated:
        yield (f"{name}: {format_plural(repeated, 'example')} with another example's input and a different answer.")
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
    for key in ("imbalance", "merged_forms", "placeholders", "empty_inputs"):
        if golds[key]:
            yield f"{name}: {golds[key]}."
    if one["offsets"]["num"]:
        first = one["offsets"]["shown"][0]
        yield (
            f"{name}: {format_plural(one['offsets']['num'], 'record')} with an answer that does not stand at its "
            f"answer_start, first {first['where']}: {first['reason']}."
        )
    if one["answers"] and one["answers"]["num_questions"]:
        num = one["answers"]["num_questions"]
        yield f"{name}: no context holds an answer to {format_plural(num, 'question')}."
    for note in one["odd_targets"]:
        yield f"{name}: {note}."


def _iter_token_findings(name: str, one: Facts, limits: Facts) -> Iterator[str]:
    """Yield what the limits cut, and the tokenizer loses."""
    for row in one["input_limits"]:
        lost = row["num_answers_lost"]
        if row["limit"] == limits["input"] and lost and limits["overlong"] == "truncate":
            limit = format_count(limits["input"])
            yield f"{name}: the limit of {limit} input tokens cuts {format_plural(lost, 'answer')} away."
    for row in one["target_limits"]:
        cut = row["num_cut"]
        if row["limit"] == limits["target"] and cut:
            limit = format_count(limits["target"])
            yield f"{name}: the limit of {limit} target tokens cuts {format_plural(cut, 'target')}."
    hit = one["characters"]["num"]
    if hit:
        part = format_percent(divide(hit, one["characters"]["of"]))
        yield f"{name}: the tokenizer does not keep all characters of {format_plural(hit, 'example')} ({part})."


def _describe_rest(num: int, shown: Sequence[object]) -> str:
    """Describe how many values a table leaves out; "" if it shows all."""
    rest = num - len(shown)
    return f", the most frequent; {format_plural(rest, 'other')} not shown" if rest else ""


def _iter_counts_parts(sets: Facts) -> Iterator[Part]:
    """Yield the numbers of examples of each set by the values of a property."""
    for name, one in sets.items():
        yield Text(f"Examples of {name}", "heading")
        for kind, found in one["counts"].items():
            forms = found.get("forms")
            header = [kind, "examples", "share"]
            if forms:
                header.append("forms in the data")
            rows: list[list[str]] = []
            for value, num in found["common"]:
                row = [_shorten(str(value)), format_count(num), format_percent(divide(num, found["num"]))]
                if forms:
                    own = forms.get(value, ())[:MAX_FORMS]
                    row.append(", ".join(f"{form!r} ({format_count(n)})" for form, n in own))
                rows.append(row)
            more = _describe_rest(found["num_values"], rows)
            yield Table(f"{name}: {format_plural(found['num_values'], 'value')} of {kind}{more}.", header, rows)


def _build_lengths_parts(facts: Facts) -> list[Part]:
    """Build the histograms of the lengths, and the table of their sums, means and quantiles."""
    parts: list[Part] = []
    rows: list[Sequence[str]] = []
    header: list[str] = []
    sets = facts["sets"]
    for key, word in PARTS.items():
        histograms: dict[str, Histogram | None] = {}
        for name, one in sets.items():
            if one["lengths"][key]:
                histograms[name] = parse_record(Histogram, one["lengths"][key]["histogram"])
        caption = f"Lengths of the {key} in tokens, before any cut."
        limit = facts["limits"].get(word)
        chart = charts.build_lengths_chart(histograms, caption, unit=f"{word} tokens", limit=limit)
        if chart:
            parts.append(chart)
    for name, one in sets.items():
        for key in PARTS:
            row = one["lengths"][key]
            if row:
                quantiles = row["quantiles"]
                header = [f"{100 * float(fraction):g} %" for fraction in quantiles]
                counts = map(format_count, (*quantiles.values(), row["longest"]))
                rows.append((name, key, format_count(row["num_tokens"]), format_decimal(row["mean"], 1), *counts))
    if not rows:
        return []
    caption = "Lengths in tokens: sum, mean, quantiles, maximum."
    parts.append(Table(caption, ("set", "text", "tokens", "mean", *header, "longest"), rows))
    return parts


def _iter_limits_parts(sets: Facts) -> Iterator[Part]:
    """Yield what each limit of the inputs and of the targets cuts, and what it costs."""
    yield Text(
        "An answer is lost if the input holds a gold answer before truncation of the context's end and none after "
        "it. Cost is the encoder's, relative to a limit of 512: the sum of n + n² / 3072 over all examples, n "
        "tokens after truncation (attention and the other layers of t5-small, without padding)."
    )
    for name, one in sets.items():
        num = one["num_examples"]
        rows: list[Sequence[str]] = []
        for row in one["input_limits"]:
            cut = _format_part(row["num_cut"], num, digits=1)
            lost = _format_part(row["num_answers_lost"], num)
            rows.append((format_count(row["limit"]), *cut, *lost, format_decimal(row["cost"])))
        header = ("input limit", "inputs cut", "share", "answers lost", "share lost", "cost")
        yield Table(f"{name}: truncation and cost by limit of the input.", header, rows)
    for name, one in sets.items():
        num = one["num_targets"]
        rows = []
        for row in one["target_limits"]:
            rows.append((format_count(row["limit"]), *_format_part(row["num_cut"], num, digits=1)))
        if num:
            yield Table(f"{name}: truncation by limit of the target.", ("target limit", "cut", "share"), rows)


def _format_part(num: int | None, whole: int, *, digits: int = 2) -> tuple[str, str]:
    """Format a count, and its share of the whole."""
    return format_count(num), format_percent(divide(num, whole), digits)


def _iter_duplicates_parts(facts: Facts) -> Iterator[Part]:
    """Yield how many texts repeat an earlier one of their set, and the first of each kind."""
    sets = facts["sets"]
    yield Text(
        f"Equal up to case and space; near: Jaccard similarity of the sets of three-word shingles of "
        f"{format_decimal(facts['near'])} or more, among texts that differ."
    )
    header = ["text"]
    for name in sets:
        header += [name, "share"]
    counts: list[Sequence[str]] = []
    for kind in next(iter(sets.values()))["duplicates"]:
        row = [kind]
        for one in sets.values():
            found = one["duplicates"][kind]
            row += _format_part(found["num"], found["of"])
        counts.append(row)
    yield Table("Texts that repeat an earlier one of their set.", header, counts)
    repeated: list[Sequence[str]] = []
    near: list[Sequence[str]] = []
    for name, one in sets.items():
        for kind, found in one["duplicates"].items():
            for shown in found["shown"]:
                if kind.startswith("near"):
                    near.append((name, kind, *_format_pair(shown)))
                    continue
                answers = " / ".join(answer or "(none)" for answer in shown["answers"])
                repeated.append((name, kind, ", ".join(shown["ids"]), answers, _shorten(shown["text"])))
    if repeated:
        header = ("set", "same", "ids", "first answers", "inputs")
        yield Table("Repeated inputs, and questions with different answers: the first of each.", header, repeated)
    if near:
        yield Table("Near ones: the first of each.", ("set", "same", "similarity", "text", "and"), near)


def _format_pair(one: Facts) -> tuple[str, str, str]:
    return format_decimal(one["similarity"]), _shorten(one["text"]), _shorten(one["other"])


def _iter_leakage_parts(leakage: Facts | None) -> Iterator[Part]:
    """Yield how many texts of the evaluation data are in the training data, and the first of each kind."""
    if not leakage:
        return
    rows: list[Sequence[str]] = []
    for kind, one in leakage.items():
        numbers = (one["num_exact"], one["num_near"], one["of"])
        share = format_percent(divide(one["num_exact"] + (one["num_near"] or 0), one["of"]))
        rows.append((kind, *map(format_count, numbers), share))
    caption = "Examples of eval whose texts are in train too, exactly or nearly."
    yield Table(caption, ("same", "exactly", "nearly", "of", "share"), rows)
    pairs: list[Sequence[str]] = []
    for kind, one in leakage.items():
        pairs += [(kind, *_format_pair(shown)) for shown in one["shown"]]
    if pairs:
        yield Table("The first of each kind.", ("same", "similarity", "in eval", "in train"), pairs)


def _build_answers_parts(sets: Facts) -> list[Part]:
    """Build the tables of the answers that their contexts do not hold; [] for tasks without contexts."""
    parts: list[Part] = []
    missing: list[Sequence[str]] = []
    for name, one in sets.items():
        found = one["answers"]
        if not found or not found["of"]:
            continue
        num = found["of"]
        rows = (
            ("examples with an answer", format_count(num), ""),
            ("the context holds none of the answers", *_format_part(found["num"], num)),
            ("it holds one in other case only", *_format_part(found["num_other_case"], num)),
            ("questions that no context answers", *_format_part(found["num_questions"], found["of_questions"])),
        )
        parts.append(Table(f"{name}: answers in their contexts.", ("count", name, "share"), rows))
        missing += [(name, row["id"], _shorten(row["answer"]), _shorten(row["text"])) for row in found["shown"]]
    if missing:
        caption = "Answers that are not in their context, the first ones of each set."
        parts.append(Table(caption, ("set", "id", "first answer", "inputs"), missing))
    return parts


def _iter_characters_parts(sets: Facts) -> Iterator[Part]:
    """Yield the characters of each set that the tokenizer loses."""
    yield Text("White space that becomes a space is listed, but is no warning.")
    for name, one in sets.items():
        found = one["characters"]
        if not found["num_characters"]:
            yield Text(f"{name}: the tokenizer keeps all characters.", "good")
            continue
        rows: list[Sequence[str]] = []
        for row in found["common"]:
            character = row["character"]
            rows.append(
                (
                    _format_character(character),
                    f"U+{ord(character):04X}",
                    _format_character(row["becomes"]),
                    format_count(row["num_times"]),
                    *_format_part(row["num_texts"], found["of"], digits=1),
                )
            )
        num = found["num_characters"]
        more = _describe_rest(num, rows)
        caption = f"{name}: {format_plural(num, 'character')} that the tokenizer loses{more}."
        yield Table(caption, ("character", "code", "becomes", "times", "examples", "share"), rows)


def _format_character(text: str) -> str:
    """Format a character visibly.

    >>> _format_character("\\n"), _format_character(""), _format_character("ñ")
    ("'\\\\n'", '(nothing)', 'ñ')
    """
    if not text:
        return "(nothing)"
    return text if text.isprintable() and not text.isspace() else repr(text)


def _iter_examples_parts(facts: Facts) -> Iterator[Part]:
    """Yield examples as the model reads them; as text, if its tokenizer is not there."""
    if facts["absent_model"]:
        for one in facts["examples"]:
            yield Text(one["id"], "heading")
            yield Text(one["text"], "code")
            yield Text(f"target: {_shorten(' / '.join(one['references']) or 'unknown')}", "code")
        return
    limits = facts["limits"]
    yield Text(
        "From the shortest to the longest, decoded from the tokens after truncation to "
        f"{format_plain(limits['input'])} input and {format_plain(limits['target'])} target tokens "
        f"({limits['overlong']})."
    )
    for one in facts["examples"]:
        words = f"{one['id']}: {format_plural(one['num_input_tokens'], 'token')}"
        if one["window"]:
            words += f", window {one['window'][0]} of {one['window'][1]}"
        if one["answer_lost"]:
            words += ", the answer is lost"
        yield Text(words, "heading")
        yield Text(f" [... {format_plural(one['num_cut'], 'token')} cut ...] ".join(one["inputs"]), "code")
        target = one["targets"]
        if one["num_cut_targets"]:
            target += f" [... {format_plural(one['num_cut_targets'], 'token')} cut ...]"
        golds = _shorten(" / ".join(reference or "(no answer)" for reference in one["references"]) or "unknown")
        num = format_plural(one["num_target_tokens"], "token")
        yield Text(f"target: {target}   ({num}; right: {golds})", "code")


def _shorten(text: str) -> str:
    """Shorten a long text to its beginning, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT_CHARS else f"{line[: MAX_TEXT_CHARS - 4]} ..."
