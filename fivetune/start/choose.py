"""Choose the reading of a table by its evidence, or doubt: then the best ones are listed, each with its command.

In: a RawTable, the task and the columns that the user named. Out: a Reading, or a DoubtError.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, permutations, product, starmap
from operator import attrgetter

from fivetune.data.readers.delimited import list_plain_names
from fivetune.data.readers.records import apply_task, as_bad_record, ignore_bad_record, parse_item, read_records
from fivetune.data.readers.source_files import BadRecord, quote_value
from fivetune.errors import ConfigError, DataError, FiveTuneError
from fivetune.start.columns import (
    FORMS,
    MIN_RECORDS,
    Column,
    Division,
    RawTable,
    are_cells_empty,
    as_text,
    build_table,
    count_words,
    is_empty_cell,
    read_table,
)
from fivetune.start.divisions import LABEL_TASKS, Excerpt, TextParts, find_division, split_place
from fivetune.start.marks import MIN_SHARE
from fivetune.start.partners import describe_partner
from fivetune.start.readings import SIGNATURES, TASKS, iter_readings
from fivetune.start.roles import (
    CLEAR,
    USUAL,
    Given,
    find_given,
    find_group,
    find_language,
    has_word,
    is_column_name,
    split_name,
)
from fivetune.start.survey import (
    ENOUGH,
    FEW_WORDS,
    GENERAL_LABELS,
    MARGIN,
    SPEAKERS,
    TARGET_ROLES,
    Reading,
    Survey,
    make_survey,
)
from fivetune.start.task_options import TEXT_TASKS
from fivetune.start.wide_lists import explain_wide_list
from fivetune.start.word_labels import WordLabels, find_word_labels, iter_ways
from fivetune.tasks import list_names, load_task, shorten_repr
from fivetune.types import RawRecord, Task, TextExample

NUMBER_ROLES = {"label": "targets", "answer": "targets", "text": "inputs"}
NUM_TRIED = 20  # first records, one of which a reading's task must convert
LONG_NAME = 4  # words from which on a name may be a text
SHORT_NAME = 2  # words of a name that is no sentence
MAX_SHORT = 0.02  # share of texts of up to LONG_NAME words in a column of sentences
NUM_SHOWN = 3  # readings that a doubt lists
UNKNOWN_NAMES = "its names say too little of it"
SEVERAL_LIKELY = "several readings are about as likely"
SEQUENCES = (
    "FiveTune learns texts, not labels of words or of spans. Write a record for each text, and what is to be found in "
    "it as text, such as `Ann: person; Oslo: place` in a column `targets`. A part of a list can be named: NAME.0.PART, "
    "and all of it as text: NAME.*"
)


class DoubtError(DataError):
    """No reading of a table is clearly the best one.

    Args:
        choices: the best ones, the best first, each with the table that it reads: with the names of its columns.
        others: further columns that may be read or learned.
    """

    def __init__(self, why: str, choices: Sequence[tuple[RawTable, Reading]], others: Sequence[str] = ()) -> None:
        self.choices = choices
        division = choices[0][0].division
        if division and why != division.describe():
            why += f"; {division.describe()}"
        head = f"{choices[0][0].source}: it is not clear what is to be learned: {why}. Nothing was written."
        lines = [f"{head} Run the command of the reading that is meant:"]
        for number, (table, reading) in enumerate(choices, 1):
            doubts = f" ({reading.doubts[0]})" if reading.doubts and reading.doubts[0] != why else ""
            lines += [f"{number}. {describe_reading(reading)}{doubts}", f"  {build_command(table, reading)}"]
        if others:
            lines.append(f"Other columns can be named in the same way: {list_names(others)}.")
        super().__init__("\n".join(lines))


def infer_task(table: RawTable, *, task: str | None = None, given: Given | None = None) -> Reading:
    """Choose the reading of a table; with `task` among those of that task, with `given` among those with its columns.

    Raises ConfigError for a wrong column in `given`, DataError if nothing fits, DoubtError if no reading
    has ENOUGH points, a lead of MARGIN and no doubts.
    """
    if task == "mixture":
        raise ConfigError(
            "--task mixture: its parts are data sets of their own. Run fivetune new for each, and join their recipes "
            "in task.parts (docs/tasks.md)."
        )
    given = find_given(given or {}, table)
    if task == "regression":  # its number may be called a label, and what it reads a text
        given = {NUMBER_ROLES.get(role, role): names for role, names in given.items()}
    survey = make_survey(table, given)
    wanted = {role: names for role, names in given.items() if role not in ("id", "group")}
    # a task without readings of its own takes the user's columns as they are
    if task is not None and task not in TASKS:
        columns = {role: names[0] for role, names in wanted.items()}
        return _complete(Reading(task, task, wanted, "--task names it", columns=columns), [], survey)
    if not given:
        # the table may have another form than a record in each line, below the names of its columns
        choices = list_without_header(table, task) if can_lack_header(table) else []
        if choices:
            first = ", ".join(map(quote_value, table.first_line))
            raise DoubtError(f"the first line, {first}, may be a record or the names of the columns", choices)
        words = explain_words(survey) or explain_wide_list(survey)
        if words:
            raise DataError(f"{table.source}: {words}.")
    # the readings, the best first; where words have labels, what a reading of whole texts learns must be clear
    bad: list[BadRecord] = []
    ranked = _list_readings(survey, task, wanted, bad.append)
    marked = find_word_labels(survey)
    if marked:
        ranked = [one for one in ranked if not marked.is_guess(survey, one)]
    if not ranked:
        partner = "" if given else describe_partner(table.source)
        raise DataError(f"{table.source}: {explain_none(survey, task, wanted, bad, marked)}{partner}")
    best, *others = ranked
    is_only = task == "regression" and all(one.targets == best.targets for one in others)
    if is_only or given.keys() & TARGET_ROLES.keys():  # the user has said what is learned
        return _complete(replace(best, warnings=[*best.warnings, *best.doubts]), [], survey)
    # a rival learns something else, or reads what the best reading does not
    rivals = [one for one in others if one.targets != best.targets or not {*one.inputs} <= {*best.inputs}]
    if best.doubts or best.points < ENOUGH or any(one.points > best.points - MARGIN for one in rivals):
        is_one = not rivals or rivals[0].points <= best.points - 2 * MARGIN
        unclear = UNKNOWN_NAMES if is_one else SEVERAL_LIKELY
        why = best.doubts[0] if best.doubts else unclear
        raise _make_doubt(why, best, others, survey, marked)
    # near ones are told, as they may be meant
    least = max(ENOUGH, best.points - 2 * MARGIN)
    near = [one for one in rivals if one.points >= least and not one.doubts]
    if best.task == "jsonl":  # a few texts that repeat are labels, too
        labels = [one for one in others if one.task == "classification" and one.targets == best.targets]
        near = [*labels[:1], *near]
    elif best.task == "classification" and survey.table.describe(best.targets[0]).num_distinct > 2:
        numbers = [one for one in _list_readings(survey, "regression", {}) if one.targets == best.targets]
        near = [*numbers[:1], *near]
    return _complete(best, near, survey)


def _make_doubt(
    why: str, best: Reading, others: Sequence[Reading], survey: Survey, marked: WordLabels | None
) -> DoubtError:
    """Make the error that shows the likely readings, and the columns that none of these has.

    Args:
        marked: lists with a value for each word, which are not shown.
    """
    shown = _list_likely(best, others, why, survey)
    if why == SEVERAL_LIKELY and len(shown) == 1:  # the others learn a text from its copy
        why = UNKNOWN_NAMES
    used: list[str] = []
    for one in shown:
        used += one.inputs + one.targets
    used += [name.partition(".")[0] for name in used]  # of a chat
    left = [survey.columns[name] for name in (*survey.list_unread(used), *survey.list_counts()) if name not in used]
    for column in left:
        if column.num_distinct == 1 and survey.rate(column.name, "label") == CLEAR:
            why += f"; {column.name} is no label, as it is {shorten_repr(column.example)} in all records"
    left += [survey.table.describe(name) for members in survey.objects.values() for name in members]
    taken = {*used, *(marked.lists if marked else ())}
    # as what is learned, a list of objects or an object is a text with all of it
    further: dict[str, None] = {}
    for one in left:
        is_nested = one.kind in ("list", "object") and not one.is_list_of_texts
        if one.num_distinct > 1 and one.name not in taken:
            further[f"{one.name}.*" if is_nested else one.name] = None
    return DoubtError(why, [(survey.table, one) for one in shown], [*further])


def infer_divided(table: RawTable, *, task: str | None = None, given: Given | None = None) -> tuple[RawTable, Reading]:
    """Choose the reading of a table, or of the table that its records are divided into if they fit no task as they are;
    return it with the table that it reads.

    Raises what `infer_task` does; DoubtError if both may be meant.
    """
    own, failure = _list_choices(table, task, given)
    if own and not failure and (given or not can_be_divided(own[0][1])):
        return own[0]
    learned = {name for _, one in own for name in one.targets}
    tasks = {one.task for _, one in own}
    division = find_division(table)
    if division is None or (own and not division.is_meant(learned, tasks)):
        if failure:
            raise failure
        return own[0]
    try:
        divided = divide_table(table, division)
    except DataError as error:
        raise failure or error from None
    if divided.num_records < MIN_RECORDS:
        if failure and own:
            raise failure
        raise DataError(f"{explain_few(divided, [], given or {})} ({division.describe()}.)")
    choices, unclear = _list_choices(divided, task, given)
    if unclear and not choices:
        raise failure or unclear
    if not own or isinstance(division, Excerpt):
        # as they are, the records are not meant
        if unclear:
            raise unclear
        return choices[0]
    if unclear:
        choices = [one for one in choices if one[1].task not in LABEL_TASKS] or choices
    raise DoubtError(division.describe(), [*choices, *own][:NUM_SHOWN])


def _list_choices(
    table: RawTable, task: str | None, given: Given | None
) -> tuple[Sequence[tuple[RawTable, Reading]], FiveTuneError | None]:
    """List the reading of a table, or those that may be meant, with the error that says why it is none or not sure."""
    try:
        return [(table, infer_task(table, task=task, given=given))], None
    except DoubtError as error:
        return error.choices, error
    except (DataError, ConfigError) as error:  # the user may name columns of the divided records
        return [], error


def can_be_divided(reading: Reading) -> bool:
    """Whether a sure reading learns what stands beside a dialogue, such as the speaker, or a place in a text."""
    is_label = reading.task in LABEL_TASKS and len(reading.inputs) == 1
    is_place = any(split_place(name)[2] for name in reading.targets)
    return is_place or (is_label and not has_word(reading.targets[0], GENERAL_LABELS))


def divide_table(table: RawTable, division: Division) -> RawTable:
    """Return a table of the records of a division. Raises DataError if it does not fit all but a few."""
    bad: list[BadRecord] = []
    header = table.header
    if isinstance(division, TextParts) and not header and division.marks.split(division.column):
        header = ["text"]  # the first line is a record
        division = replace(division, column="text")
    records = division.iter_records(read_records(table.source, header=header, on_bad=bad.append), bad.append)
    divided = build_table(table.source, records, header=header, flags=table.flags)
    if len(bad) > (1 - MIN_SHARE) * (divided.num_read + len(bad)):
        raise DataError(f"{table.source}: {len(bad):,} records are not divided alike; the first: {bad[0]}")
    return replace(divided, division=division, first_line=())


def _list_likely(best: Reading, others: Sequence[Reading], why: str, survey: Survey) -> list[Reading]:
    """List the readings that a doubt shows: one for each target among the best one, readings whose targets the doubt
    names, and readings with nearly as many points; then other inputs. A text is not learned from its copy.

    An answer to a question comes first. If the doubt is of the inputs, another reading of the same target comes second.
    If none learns a text, the last place is for one that does.
    """

    def is_told(name: str) -> bool:
        return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", why) is not None

    def is_answer(one: Reading) -> bool:
        asked = max((survey.rate(name, "question") for name in one.inputs), default=0)
        answered = min((survey.rate(name, "answer") for name in one.targets), default=0)
        return min(asked, answered) >= USUAL and {*one.targets}.isdisjoint(best.inputs)

    def can_learn_text(one: Reading) -> bool:
        has_labels = any(survey.table.describe(name).has_labels for name in one.targets)
        return one.task not in LABEL_TASKS and not has_labels

    others = [one for one in others if not any(starmap(survey.is_copy, product(one.inputs, one.targets)))]
    named: list[Reading] = []
    near: list[Reading] = []
    for one in others:
        if one.targets and all(map(is_told, one.targets)):
            named.append(one)
        elif one.points >= best.points - 2 * MARGIN:
            near.append(one)
    likely = sorted((best, *named, *near), key=is_answer, reverse=True)
    first = likely[0]
    order = [first]
    if any(words in why for words in (" read", " texts", "question, too")):  # a doubt of the inputs
        for one in others:
            if one.targets == first.targets and any(map(is_told, {*one.inputs} ^ {*first.inputs})):
                order.append(one)
                break
    # of several tasks for the same columns the likeliest, of several inputs for the same target, too
    by_target: dict[str, Reading] = {}
    for one in likely:
        by_target.setdefault(" ".join(one.targets), one)
    by_columns: dict[tuple[str, ...], Reading] = {}
    for one in (*order, *by_target.values(), *likely):
        by_columns.setdefault((*one.inputs, "", *one.targets), one)
    shown = [*by_columns.values()][:NUM_SHOWN]
    texts = [one for one in others if can_learn_text(one)]
    if texts and not any(map(can_learn_text, shown)):
        shown[NUM_SHOWN - 1 :] = texts[:1]
    return shown


def can_lack_header(table: RawTable) -> bool:
    """Whether the first line may be a record: it has no known names, and each could stand in its column."""
    names = [name.strip() for name in table.first_line if name.strip()]
    if len(names) < len(table.first_line) and not table.first_line[0].strip():  # above the index of pandas
        return False
    columns: dict[str, Column] = {}
    numbered: list[str] = []
    for name in names:
        column = table.columns.get(name)
        if column and column.num_filled:
            columns[name] = column
            if _is_numbered_alike(name, column.example):
                numbered.append(name)
    known = [name for name in names if is_column_name(name) and name not in numbered]
    languages = {find_language(name) for name in names} - {None}
    if len(known) == len(names) or any(re.fullmatch(r"\S*", name) for name in known) or len(languages) > 1:
        return False
    has_labels = False
    is_told = False  # a label stands in the first line
    is_long = False  # a text does
    for name, column in columns.items():
        is_long |= _is_long(name) and column.is_running
        if column.has_labels:
            has_labels = True
            is_told |= name in column.values
        elif name not in numbered and not _can_stand(name, column):
            return False
    if is_told:
        return True
    return not _are_above_sentences(table, columns) and (is_long or not has_labels)


def _can_stand(name: str, column: Column) -> bool:
    """Whether a text of the first line could be a value of its column, which has no labels."""
    form = FORMS.get(column.kind)
    if form is not None:
        return form.fullmatch(name) is not None
    return column.kind == "text" and (not column.has_codes or re.search(r"\d", name) is not None)


def _are_above_sentences(table: RawTable, columns: Mapping[str, Column]) -> bool:
    """Whether names of a word or two stand above columns of sentences, among which such a short text is rare."""
    running = [name for name, column in columns.items() if column.is_running]
    for name in running:
        words = [count_words(as_text(value)) for value in table.list_values(name) if not is_empty_cell(value)]
        num_short = sum(number <= LONG_NAME for number in words)
        if count_words(name) > SHORT_NAME or num_short > MAX_SHORT * len(words):
            return False
    return len(running) > 1


def _is_numbered_alike(name: str, value: str) -> bool:
    """Whether a name differs from a value in its numbers alone: T-0001 and T-0002."""
    both = [re.sub(r"\d+", "0", text) for text in (name, value)]
    return both[0] == both[1] != name


def _is_long(name: str) -> bool:
    """Whether a text in the first line is too long for a name, and no question of a survey."""
    return count_words(name) >= LONG_NAME and not name.endswith(("?", ":", "？", "："))


def list_without_header(table: RawTable, task: str | None) -> list[tuple[RawTable, Reading]]:
    """List the best two readings of a table whose first line may be a record: by names of columns that say nothing, and
    by the names that may be there.
    """
    names = dict(zip(list_plain_names(len(table.first_line)), table.first_line, strict=True))
    plain = read_table(table.source, [*names], table.flags)
    choices: list[tuple[RawTable, Reading]] = []
    for reading in _list_readings(make_survey(plain, {}), task, {})[:2]:
        roles = {role: [names[name] for name in of_role] for role, of_role in reading.roles.items()}
        choices.append((plain, replace(reading, doubts=["the first line is a record"])))
        if all(names[name] for of_role in reading.roles.values() for name in of_role):
            named = replace(reading, roles=roles, doubts=["the first line has the names of the columns"])
            choices.append((table, named))
    return choices


def _list_readings(
    survey: Survey, task: str | None, wanted: Given, on_bad: Callable[[BadRecord], None] = ignore_bad_record
) -> list[Reading]:
    """List the readings of all forms that fit the user's words and whose task converts one of the first records, the
    best first.

    Args:
        on_bad: called with records that a task does not convert.
    """
    found: dict[str, Reading] = {}
    for reading in iter_readings(survey):
        if {task, reading.task} == {"squad", "squad_v2"}:
            reading = replace(reading, task=task)
        is_wanted = all([*reading.roles.get(role, ())] == [*names] for role, names in wanted.items())
        if task not in (None, reading.task) or not is_wanted:
            continue
        if task is None and reading.task == "regression" and not survey.is_score(reading.targets[0]):
            continue
        # the first records with a value to learn
        targets, records = reading.targets, survey.table.records
        filled = (one for one in records if not are_cells_empty(one.fields, targets))
        first = [*islice(filled, NUM_TRIED)] or records[:NUM_TRIED]
        loaded = load_task(reading.task, reading.options)
        if any(convert_record(record, reading, loaded, on_bad) for record in first):
            flags = shlex.join(list_flags(reading))
            if flags not in found or found[flags].points < reading.points:
                found[flags] = reading
    return sorted(found.values(), key=attrgetter("points"), reverse=True)


def convert_record(
    record: RawRecord, reading: Reading, task: Task, on_bad: Callable[[BadRecord], None]
) -> Sequence[TextExample]:
    """Return the examples that the task of a reading makes of a record; none if it leaves it out, or of a bad one."""
    named = parse_item(record, reading.columns, {}, str(record.fields["id"]))
    if isinstance(named, BadRecord):
        on_bad(named)
        return ()
    try:
        return apply_task(task, named)
    except DataError as error:
        on_bad(as_bad_record(error, record))
        return ()


def _complete(reading: Reading, others: Sequence[Reading], survey: Survey) -> Reading:
    """Add the columns of ids and groups, and take the mappings away that say nothing."""
    columns = survey.table.columns
    taken = [*reading.inputs, *reading.targets]
    renamed = {wanted: name for wanted, name in reading.columns.items() if wanted != name}
    # the id: the user's column, else one that is not read
    ids = survey.given.get("id", ())
    if not ids and "id" not in columns:
        ids = [name for name in columns if survey.is_id(name) and name not in taken]
        ids.sort(key=lambda name: -columns[name].num_distinct)
    identity = ids[0] if ids else None
    # the group, and what is left; tasks of questions relate contexts and questions themselves
    inputs = reading.inputs if reading.task in TEXT_TASKS else []
    group = find_group(survey.table, survey.given, [*taken, identity or ""], inputs)
    unread: list[str] = []
    if reading.task in TASKS and reading.task not in SIGNATURES:  # what others read is not known
        known = {*taken, identity, group, "id"}
        for name in taken:
            known.add(name.partition(".")[0])
            known.update(survey.objects.get(name, ()))
        unread = [name for name in survey.columns if name not in known]
    warnings = [*reading.warnings]
    for name, parts in survey.wholes.items():
        warnings.append(f"{name} is made of {', '.join(parts)}, and is not read")
    return replace(
        reading,
        warnings=warnings,
        columns=renamed,
        id_column=identity,
        group_column=group,
        others=others[: NUM_SHOWN - 1],
        unread=unread,
    )


def list_flags(reading: Reading) -> list[str]:
    """List the words of the command line that choose a reading."""
    flags = ["--task", reading.task]
    for role, names in reading.roles.items():
        is_joined = role == "tags" and "," not in "".join(names)
        flags += _list_column_flags(role, [",".join(names)] if is_joined else names)
    return flags


def _list_column_flags(role: str, names: Sequence[str]) -> list[str]:
    """List the words of the command line that give columns a role."""
    flags: list[str] = []
    for name in names:
        flags += ["--column", f"{role}={name}"]
    return flags


def build_command(table: RawTable, reading: Reading) -> str:
    """Build the command that writes the recipe of a reading."""
    header = ["--header", ",".join(table.header)] if table.header else []
    return shlex.join(["fivetune", "new", table.source, *header, *list_flags(reading), *table.flags])


def describe_reading(reading: Reading) -> str:
    """Describe a reading in words.

    >>> describe_reading(Reading("classification", "classification", {"text": ("a", "b"), "label": ("y",)}, ""))
    'classification: y from a, b'
    """
    if not reading.targets:
        return reading.kind
    source = f" from {list_names(reading.inputs)}" if reading.inputs else ""
    return f"{reading.kind}: {list_names(reading.targets)}{source}"


def explain_words(survey: Survey) -> str | None:
    """Explain why a table with one word in each record fits no task: a line for each word of a text, as of CoNLL.

    Full stops are among the words, or blank lines or a column part them into sentences.
    """
    columns = survey.columns.values()
    words = [one for one in columns if one.has_text and one.mean_words <= FEW_WORDS]
    if not words or any(one.is_running for one in columns):
        return None
    word = max(words, key=attrgetter("num_distinct"))
    has_marks = word.share_distinct < 0.9 and "." in map(as_text, survey.table.list_values(word.name))
    records = survey.table.records
    first, last = (re.search(r":(\d+)$", one.where) for one in (records[0], records[-1]))
    has_gaps = False  # a table without lines, such as Parquet, has none
    if first and last:
        has_gaps = int(last[1]) - int(first[1]) + 1 > 1.02 * survey.table.num_read
    has_sentences = any(split_name(name)[:1] == ["sentence"] for name in survey.columns)
    if not (has_marks or has_gaps or has_sentences) or not any(one.has_labels for one in columns):
        return None
    return f"each record has one word of a text, in {word.name}: {SEQUENCES}"


def explain_few(table: RawTable, bad: Sequence[BadRecord], given: Given, task: str | None = None) -> str:
    """Explain that a table has too few records, how these are read, and what is wrong with their form, which more would
    have, too.

    Args:
        bad: records that cannot be read.
    """
    noun = "record" if table.num_records == 1 else "records"
    read = _describe_few(table, given, task)
    head = f"{table.source}: {read}holds {table.num_records} {noun}"
    unread = f", and {len(bad):,} that cannot be read; the first: {bad[0]}" if bad else "."
    if table.num_records + len(bad) >= MIN_RECORDS:
        return f"{head}{unread}"
    form = None
    if table.records and not (read or given or find_division(table)):
        survey = make_survey(table, {})
        if wide := explain_wide_list(survey):
            return f"{head}: {wide}."
        form = explain_form(survey, find_word_labels(survey))
    more = f"Collect more, in another form: {form}" if form else "Collect more."
    remedy = "Correct the file." if bad else more
    return (
        f"{head}{unread} At least {MIN_RECORDS} are needed to train on some and score on others; some hundred give a "
        f"useful model. {remedy}"
    )


def _describe_few(table: RawTable, given: Given, task: str | None) -> str:
    """Describe how several records are read, as far as they show, before the words of their number; else ""."""
    readings: list[Reading] = []
    try:
        readings = [infer_divided(table, task=task, given=given)[1]] if table.num_records > 1 else []
    except DoubtError as doubt:
        readings = [reading for _, reading in doubt.choices]
    except DataError:
        pass  # more records may show what these do not
    if readings:
        return f"would be read as {'; or '.join(map(describe_reading, readings))}. It "
    has_lists = any(one.is_list_of_texts for one in table.columns.values())  # which are no labels, as more may show
    example = _find_example(make_survey(table, {}), task) if has_lists and table.num_records > 1 else ""
    return f"can be read with names of columns, such as {example}. It " if example else ""


def explain_form(survey: Survey, marked: WordLabels | None, task: str | None = None) -> str | None:
    """Explain why the columns of a table fit no task, whatever their names: there is one, or no text but lists.

    Args:
        marked: lists with a value for each word.
    """
    columns = survey.columns
    if len(columns) < 2:
        return (
            f"has one column with values, {list_names(columns)}. Training needs inputs and what is to "
            "be learned for them, such as text,label or question,answer. Add the other column; or, to pre-train on the "
            "texts themselves, give --task denoising."
        )
    if marked:
        verb = "has" if len(marked.labels) == 1 else "have"
        what = f"{list_names(marked.labels)} {verb} a value for each word of {marked.words}"
        ways: list[Iterable[Given]] = [iter_ways(survey, marked)]
    else:
        nested = _list_nested(survey)
        texts = [name for name, column in columns.items() if column.has_text and name not in nested]
        if not nested or len(texts) > 1 or survey.given:
            return None
        what = f"{list_names(nested)} {'holds' if len(nested) == 1 else 'hold'} lists or objects"
        learned = [f"{name}.*" for name in nested if not _has_ids(survey, name)]
        labels = [name for name, column in columns.items() if column.has_labels and column.num_distinct > 1]
        ways = [
            [{"inputs": [text], "targets": [name]} for text in texts for name in learned],
            [{"text": [text], "label": [name]} for text in texts for name in labels],
        ]
    working = [flags for known in ways if (flags := _find_working(survey, task, known))]
    way = f" What works: {'; or '.join(working)}." if working else ""
    return f"{what}. {SEQUENCES}.{way}"


def explain_none(
    survey: Survey, task: str | None, wanted: Given, bad: Sequence[BadRecord], marked: WordLabels | None
) -> str:
    """Explain why no reading fits, and what to do.

    Args:
        wanted: the user's columns, without the id and the group.
        bad: records that the task of a reading does not convert.
        marked: lists with a value for each word.
    """
    if form := explain_form(survey, marked, task):
        return form
    if survey.given:
        return _explain_given(survey, task, wanted, bad)
    columns = survey.columns
    nested = _list_nested(survey)
    reasons: list[str] = []
    for name, column in columns.items():
        if column.kind == "text list":
            reasons.append(_describe_text_list(column))
        elif survey.rate(name, "label") < USUAL or column.has_labels or name in nested:
            continue
        elif column.num_distinct == 1:
            reasons.append(
                f"all values of {name} are {column.example!r}, and a classification needs two labels: if other files "
                "hold the others, give their folder"
            )
        else:
            number = f"{column.num_distinct:,} different values in {column.num_filled:,} records"
            reasons.append(f"{name} has {number}, so it is no label")
    read = [name for name, column in columns.items() if column.has_text and name not in nested]
    texts = sorted(read, key=lambda name: -columns[name].mean_chars)
    lists = [name for name, column in columns.items() if column.is_list_of_texts and name not in nested]
    if not texts and len(lists) < 2:
        reasons.append("no column holds text: what the model would read is missing")
        return _join_reasons(survey, task, reasons, "Add a column with the text of each record.")
    held = {"text": texts, "lists of texts": lists}
    told = " and ".join(f"{what} in {list_names(names)}" for what, names in held.items() if names)
    reasons.append(f"{told}, and no other column is named as what is to be learned")
    # lists of what several annotators say, then numbers that one text is given, then another text
    known: list[Given] = []
    for name, column in columns.items():
        if texts and column.kind == "text list":
            known.append({"text": read, "tags": [name]})
    numbers: list[str] = []
    if texts and all(survey.is_copy(texts[0], name) for name in texts[1:]):
        numbers = [name for name in survey.free if columns[name].kind == "number"] + survey.list_counts()
    for name in numbers:
        if columns[name].has_labels:
            known.append({"text": texts[:1], "label": [name]})
        else:
            known.append({"inputs": texts[:1], "targets": [name]})
    example = _find_working(survey, task, known) or _find_example(survey, task)
    way = f"Name the columns, such as {example or '--column text=NAME --column label=NAME'}"
    if len(numbers) > 1:
        way += f" (so of {list_names(numbers[1:])})"
    way += ", or the task with --task."
    if len(texts) + len(lists) < 2:
        way += " If the file holds the texts of one label, add it as a column, and join the files of all labels."
    return _join_reasons(survey, task, reasons, way)


def _explain_given(survey: Survey, task: str | None, wanted: Given, bad: Sequence[BadRecord]) -> str:
    """Explain why no reading fits the columns that the user gave."""
    flags = _join_columns(survey.given)
    # the columns of a label or an answer may be learned as text
    read = [name for role in ("text", "context", "question") for name in wanted.get(role, ())]
    learned = [name for role in ("label", "answer", "tags") for name in wanted.get(role, ())]
    way = ""
    if read and learned:
        way = _find_working(survey, None, [{"inputs": read, "targets": learned[:1]}])
    by_pair = f", or learn it as text, with inputs and targets: --task jsonl {way}" if way else ""
    others = _list_readings(survey, None, wanted) if task else []
    if others:
        return (
            f"--task {task} does not fit {flags}: {others[0].reason}, as of {others[0].kind}. Leave out --task, or "
            f"give --task {others[0].task}, or other columns{by_pair}."
        )
    reasons = [str(one).rstrip(".") for one in bad[:1]]
    for role, names in survey.given.items():
        for name in names:
            column = survey.columns[name]
            if column.kind in ("list", "object"):
                whole = shlex.join(["--column", f"{role}={name}.*"])
                return f"--column {role}={name}: {name} holds {column.kind}s. All of one is a text by {whole}."
            values = f"{column.num_distinct:,} different values, such as {shorten_repr(column.example)}"
            reasons.append(f"{name}, given as {role}, has {values}")
    reasons += [_describe_text_list(column) for column in survey.columns.values() if column.kind == "text list"]
    return _join_reasons(
        survey, task, reasons, f"Give other columns than {flags}, or another task with --task{by_pair}."
    )


def _describe_text_list(column: Column) -> str:
    return f"{column.name} holds lists as text, such as {column.example[:20]}: write what they stand for"


def _join_reasons(survey: Survey, task: str | None, reasons: Sequence[str], way: str) -> str:
    """Join the reasons why no reading fits, and the way out."""
    fits = f"--task {task} does not fit" if task else "no task fits"
    return f"{fits} the columns {list_names(survey.table.columns)}: {'; '.join(reasons)}. {way}"


def _find_example(survey: Survey, task: str | None) -> str:
    """Find the flags by which one text or list of texts is learned from another; "" if no two are there."""
    nested = _list_nested(survey)
    texts: list[str] = []
    lists: list[str] = []
    for name, column in survey.columns.items():
        if name in nested:
            continue
        if column.has_text:
            texts.append(name)
        elif column.is_list_of_texts and not _has_ids(survey, name):
            lists.append(name)
    # who answers is learned from who asks, and what stands aside is taken last
    ranks: dict[str, tuple[int, float]] = {}
    aside: list[str] = []
    for name in (*texts, *lists):
        is_speaker = has_word(name, SPEAKERS)
        ranks[name] = (survey.rate(name, "targets") - is_speaker, -survey.columns[name].mean_chars)
        if not is_speaker and survey.is_aside(name):
            aside.append(name)
    texts.sort(key=ranks.__getitem__)
    names = sorted([*texts[:4], *lists[:4]], key=aside.__contains__)
    pairs = permutations([f"{name}.*" if name in lists else name for name in names], 2)
    return _find_working(survey, task, ({"inputs": [read], "targets": [learned]} for read, learned in pairs))


def _find_working(survey: Survey, task: str | None, known: Iterable[Given]) -> str:
    """Find the flags of the first of some columns that a reading takes; "" if none does."""
    for given in known:
        if _list_readings(make_survey(survey.table, given), task, given):
            return _join_columns(given)
    return ""


def _join_columns(given: Given) -> str:
    """Join the flags that give columns their roles."""
    flags: list[str] = []
    for role, names in given.items():
        flags += _list_column_flags(role, names)
    return shlex.join(flags)


def _list_nested(survey: Survey) -> list[str]:
    """List the columns that hold objects, or a value for each word: what is learned has to be written as text."""
    nested: list[str] = []
    for name, column in survey.columns.items():
        is_object = column.kind == "object" or column.has_objects or ".0." in name
        if is_object or (column.kind == "list" and survey.is_sequence(name)):
            nested.append(name)
    return nested


def _has_ids(survey: Survey, name: str) -> bool:
    """Whether the lists of a column hold texts of one word with digits, as the ids of documents are."""
    words = [word for value in survey.read_lists(name)[:NUM_TRIED] for word in str(value).split()]
    return bool(words) and all("'" in word and re.search(r"\d", word) for word in words)
