"""Text to text in a table: languages, summaries, code, corrections, instructions with their answers.

In: a Survey. Out: Readings of each text that may be learned, with what it may be learned from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations

from fivetune.start.questions import read_golds
from fivetune.start.roles import (
    CLEAR,
    DIALOGUES,
    REFERENCES,
    RETRIEVED,
    SHARED,
    USUAL,
    find_language,
    has_word,
    rate_name,
    split_name,
)
from fivetune.start.survey import (
    AS_TEXT,
    CODE,
    FORM,
    IN_TEXT,
    LEARNED,
    READ,
    SHORTER,
    UNKNOWN,
    Reading,
    Survey,
    describe_columns,
    describe_outputs,
    is_named_output,
    join_names,
)
from fivetune.tasks import list_names

SOURCES = ("inputs", "text", "question")  # roles of what a pair is learned from
MAX_VERSIONS = 5  # of a text, in languages and writings
LESS_DETAIL = 0.5  # length of a text, as a share of a longer one, up to which it tells the same in less detail
LONG_CONTEXT = 20  # mean words from which on a text may be asked about


def read_pairs(survey: Survey) -> Iterator[Reading]:
    """Yield each source with each target: by languages, else by names, else of two or three texts each with each."""
    columns = survey.columns
    is_named = not survey.given.keys().isdisjoint(("inputs", "targets"))
    languages = [name for name, column in columns.items() if find_language(name) and column.has_text]
    texts = [name for name in survey.list_unread(()) if columns[name].has_text]
    if not is_named:
        # one text in each language; several texts in one language have a label
        if 1 < len(languages) == len({*map(find_language, languages)}):
            for target in languages[1:]:  # the first is the source
                yield _read_pair(survey, languages[:1], target)
            return
        versions = _list_versions(survey, languages[0], texts) if len(languages) == 1 else []
        if len(versions) > 1:
            for source, target in combinations(versions, 2):  # the first is the source
                yield _read_pair(survey, [source], target, versions)
            return
        asked = _find_asked(survey)
        if asked:
            yield from _read_asked(survey, asked)
            return
    targets = survey.given.get("targets") or [*survey.objects, *_list_targets(survey, texts)]
    for target in targets:
        for sources in _list_sources(survey, target, texts):
            source = sources[-1]
            if source in targets and survey.has_questions(target) and not survey.has_questions(source):
                continue  # a question is not learned from its answer
            yield _read_pair(survey, sources, target)
            if target not in columns:
                continue
            if survey.has_titles_asked(target, source) or _is_longer_summary(survey, target, source):
                yield _read_pair(survey, [target], source)
    if is_named:
        return
    for short, long in _find_levels(survey, texts):
        found = _read_pair(survey, [long], short)
        if not found.doubts and survey.rate(short, "targets") < 2:
            found = replace(found, doubts=[f"{short} may be a short form of {long}, or another text"])
        yield found


def _find_asked(survey: Survey) -> tuple[str, ...]:
    """Find a question and the passage that it is about, as retrieval has them, if no column is left for an answer: the
    question may be written for the passage, or the passage for the question.
    """
    columns = survey.columns
    texts = [name for name in survey.free if columns[name].has_text or columns[name].is_list_of_texts]
    asked = [name for name in survey.list_columns("question", minimum=2) if name in texts]
    if not asked or columns[asked[0]].has_code:
        return ()
    retrieved = [name for name in texts if has_word(name, RETRIEVED)]
    told: list[str] = []
    for name in survey.list_columns("context", "text", minimum=2) or retrieved:
        if name in texts and name not in asked and rate_name("summary", name) < 2:  # no title
            told.append(name)
    if not told:
        return ()
    for name in survey.list_unread([asked[0], told[0]]):
        is_spare = rate_name("summary", name) >= 2 or has_word(name, RETRIEVED)
        if not is_spare and (name in texts or survey.rate(name, *LEARNED) >= 2):
            return ()
    return told[0], asked[0]


def _read_asked(survey: Survey, asked: Sequence[str]) -> Iterator[Reading]:
    """Yield a passage and its question, each learned from the other."""
    why = f"{join_names(asked)} are there, and no answer: either may be learned"
    for source, target in permutations(asked):
        whole = f"{source}.*" if survey.columns[source].is_list_of_texts else source
        for form in survey.list_forms(target):
            found = _read_pair(survey, [whole], form)
            yield replace(found, doubts=[why, *found.doubts])


def _list_versions(survey: Survey, language: str, texts: Sequence[str]) -> list[str]:
    """List the texts whose names are a language or say nothing, if no name says what is learned: the same text in a
    few languages or writings.
    """
    if len(split_name(language)) > 1 or survey.list_columns("targets", "label", minimum=USUAL):
        return []
    found = [name for name in texts if survey.rate(name, *READ, *LEARNED) == 0 or name == language]
    return found if len(found) <= MAX_VERSIONS else []


def _list_targets(survey: Survey, texts: Sequence[str]) -> list[str]:
    """List the forms of columns that may be learned: those with such names, lists beside titles alone, and of a few
    texts those whose names say nothing; without any, questions.
    """
    columns = survey.columns
    targets: list[str] = []
    apart: list[str] = []
    for name in survey.list_columns("targets", minimum=2):
        is_nested = columns[name].kind != "text" and not columns[name].is_list_of_texts
        if is_nested and read_golds(survey, name, "answers"):  # read with their questions
            apart.append(name)
        else:
            targets += survey.list_forms(name)
    if texts and all(survey.rate(name, "text") >= USUAL for name in targets):  # a title
        for name in survey.list_unread((*targets, *apart)):
            if survey.has_several(name) and survey.has_phrases(name):
                targets += survey.list_forms(name)
    unknown = [name for name in reversed(texts) if survey.rate(name, "targets", "context", *SOURCES) == 0]
    if len(texts) <= 3 or len(unknown) == 1:
        targets += unknown
    is_labelled = any(survey.rate(name, "label") == CLEAR for name in columns)
    if targets or len(texts) > 2 or is_labelled:
        return targets
    # a question may be written for a text, or for another question
    return [name for name in reversed(texts) if survey.rate(name, "question") >= CLEAR]


def _find_levels(survey: Survey, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield texts that report in less detail, by their lengths, what another text reports whose name shares a
    word: juniorDescription and seniorDescription.
    """
    chars = {name: survey.columns[name].mean_chars for name in texts if survey.columns[name].is_running}
    for name in chars:
        alike = [one for one in chars if not {*split_name(one)}.isdisjoint(split_name(name))]
        longest = max(alike, key=chars.__getitem__, default=name)
        if chars[name] < LESS_DETAIL * chars[longest]:
            yield name, longest


def _list_sources(survey: Survey, target: str, texts: Sequence[str]) -> list[list[str]]:
    """List the inputs that a target may have: the user's, else each text with a known name, else each text."""
    if "inputs" in survey.given:
        return [[*survey.given["inputs"]]]
    columns = survey.columns
    named = survey.list_columns(*SOURCES, "context", minimum=2)
    named = [name for name in named if columns[name].has_text and name != target]
    contexts = [name for name in survey.list_columns("context", minimum=USUAL) if name in named]
    # nothing is answered from a query
    known = [name for name in named if name in contexts or not columns[name].has_code] or named
    together = survey.list_named_inputs(target)
    learned = survey.rate(target, "targets")
    plain = [name for name in known if name not in contexts]
    questions = [name for name in plain if survey.rate(name, "question") >= USUAL]
    if questions and contexts:  # of a question and the schema of its tables, both
        both = survey.sort_names([questions[0], contexts[0]])
        return [together, both] if {*both} < {*together} else [both]
    if len(together) > 1:
        return [together, *([name] for name in known[:2])]
    asked = [name for name in plain if survey.rate(name, "inputs") >= USUAL]
    # a prompt of a word or two, which is no running text, and what it is about
    if asked and contexts and learned >= USUAL:
        return [survey.sort_names([asked[0], contexts[0]]), asked[:1], contexts[:1]]
    long = [name for name in contexts if columns[name].mean_words >= LONG_CONTEXT]
    if long and plain and learned == 0:  # what a text asks of a long one
        return [survey.sort_names([plain[0], long[0]]), plain[:1], long[:1]]
    unknown = [name for name in texts if survey.rate(name, "targets", "answer", *SOURCES) < 2]
    others = [name for name in unknown or texts if name != target]
    both = [name for name in texts if name != target]
    is_last = len(both) == 2 and target == texts[-1] and survey.rate(target, "targets", "label") == 0
    if is_last and all(survey.rate(name, "targets", "answer") < 2 for name in both):  # one text of two others
        return [both, *([name] for name in (known or others)[:2])]
    return [[name] for name in (known or others)[:3]]


def _is_longer_summary(survey: Survey, name: str, other: str) -> bool:
    """Whether a column is named as a summary, and its texts are longer than the texts of another column."""
    if rate_name("summary", name) < 2:
        return False
    return survey.table.describe(name).mean_chars > survey.columns[other].mean_chars


def _weigh_target(survey: Survey, source: str, target: str) -> tuple[str, int]:
    """Return what the values of a target say for learning it, and its points; "" if they say nothing."""
    first, last = survey.table.describe(source), survey.table.describe(target)
    if last.has_code and target not in survey.objects:
        return f"{target} holds code, a query or a formula", CODE
    if target in survey.golds and any(map(survey.is_of_system, survey.free)):
        return f"{target} is right, others what systems answered", IN_TEXT
    if survey.has_titles_asked(source, target):
        return f"{source} holds questions", IN_TEXT
    if target in survey.columns and survey.has_titles_asked(target, source):
        return f"{target} holds questions", UNKNOWN
    if last.mean_chars < 0.4 * first.mean_chars and last.mean_words >= 4:
        return f"length of {target}", SHORTER
    if _is_longer_summary(survey, target, source):
        return f"length of {target}", UNKNOWN
    return "", 0


def _read_pair(survey: Survey, sources: Sequence[str], target: str, versions: Sequence[str] = ()) -> Reading:
    """Read a target from its sources; with `versions` both are among these, the others of which are left out."""
    source = sources[-1]
    first, last = survey.table.describe(source), survey.table.describe(target)
    used = [*sources, source.removesuffix(".*"), target, target.removesuffix(".*")]
    others = [name for name in versions if name not in used]
    is_longer = _is_longer_summary(survey, target, source)
    values, points = _weigh_target(survey, source, target)
    if versions:
        values, points = "one text is named after a language, as those of a translation are", FORM + CLEAR
    # the kind of the pair
    kind, prefix, form = "text to text", "", ""
    reason = f"{describe_columns(sources)} what is read, {target} what is learned"
    languages = find_language(source), find_language(target)
    if all(languages) and languages[0] != languages[1]:
        kind, prefix = "translation", f"translate {languages[0]} to {languages[1]}: "
        form = reason = f"the columns {source} and {target} are named after languages"
        others = [name for name in survey.columns if find_language(name) and name not in used]
    elif rate_name("summary", target) >= 2 and not is_longer:
        kind, prefix = "summarisation", "summarize: "
        reason = f"{target} is {last.mean_chars / max(first.mean_chars, 1):.0%} as long as {join_names(sources)}"
    elif target in survey.objects:
        form = "an object that is learned"
    # what speaks against it
    doubts: list[str] = []
    if last.has_fractions:
        doubts.append(AS_TEXT)
    if survey.rate(source, *READ) < survey.rate(source, "targets"):
        doubts.append(f"{source} is named as what is learned, too")
    if not form:
        if is_longer:
            doubts.append(f"{target} is longer than {source}, so it is no summary of it: perhaps the other way round")
        doubts += _list_doubts(survey, source, target, used)
    # of one text and its contexts, the text is meant
    num_main = sum(survey.rate(one, "context") < USUAL or survey.rate(one, "text") >= CLEAR for one in sources)
    are_alike = len(sources) > 1 and num_main != 1 and "inputs" not in survey.given
    if are_alike and all(survey.is_named_input(one, target) for one in sources):
        doubts.append(f"{list_names(sources)} are named as texts to be read, together or one of them")
    if target in survey.golds:
        # another text that is named as what is learned may be right, too
        for name, column in survey.columns.items():
            if column.has_text and name not in used and survey.rate(name, "targets") == CLEAR:
                doubts += describe_outputs([name])
    if is_named_output(target):
        doubts += describe_outputs(survey.list_outputs(used))
    found = Reading(kind, "jsonl", {"inputs": sources, "targets": (target,)}, reason, prefix=prefix)
    return survey.weigh(found, form=form, values=values, points=points, read=others, doubts=doubts)


def _list_doubts(survey: Survey, source: str, target: str, used: Sequence[str]) -> Iterator[str]:
    """Yield why a target may not be learned from its source, if no form of the columns says so.

    Args:
        used: columns of the pair.
    """
    if target in survey.columns and survey.has_titles_asked(target, source):
        yield f"{target} holds questions, which {source} may answer"
    if survey.has_titles_asked(source, target):
        yield f"{source} holds questions, which {target} may answer"
    named = survey.rate(target, "targets")
    is_of_dialogue = has_word(source, DIALOGUES)
    texts = [name for name, column in survey.columns.items() if column.has_text]
    is_text = named <= survey.rate(target, "text") and survey.can_learn_other([*used, *texts])
    if named > 0 and is_text:
        yield f"{target} is named as a text, too"
    if named == 0 and (is_text or is_of_dialogue):
        yield f"no name says that {target} is learned"
    if has_word(target, REFERENCES):
        # a text that several records share, such as the document of a dialogue
        last = survey.table.describe(target)
        is_shared = last.is_running and last.share_distinct <= SHARED < survey.table.describe(source).share_distinct
        if is_of_dialogue or is_shared:
            yield f"{target} may be what {source} is about, or be learned"


def read_instructions(survey: Survey) -> Iterator[Reading]:
    """Yield instruction, input and output: the form of Alpaca and Dolly. An empty input is usual."""
    texts = [name for name, column in survey.columns.items() if column.kind == "text"]
    found = survey.list_columns("instruction", minimum=USUAL)
    if "inputs" in survey.given or {*texts}.isdisjoint(found):
        return
    targets = [*survey.objects]
    for name in survey.list_columns("targets", "answer", minimum=USUAL):
        targets += [name] if name in texts else survey.list_forms(name)
    further = survey.list_columns("inputs", "context", "question", minimum=USUAL)
    read = [name for name in texts if name in further and name not in (*targets, found[0])]
    read.insert(0, found[0])
    for target in targets:
        reason = f"{join_names(read)} instruct, {target} is the answer"
        pair = Reading("instructions", "jsonl", {"inputs": read, "targets": [target]}, reason)
        doubts = describe_outputs(survey.list_outputs([*read, target]))
        yield survey.weigh(pair, form="instruction and output", doubts=doubts)
