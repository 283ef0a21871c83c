"""Choose the reading of a table by its evidence, or doubt: then the best ones are listed, each with its command.

In: a RawTable, the task and the columns that the user named. Out: a Choice, or a DoubtError.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivetune.data.records import parse_item
from fivetune.errors import ConfigError, DataError
from fivetune.start.columns import RawTable
from fivetune.start.readings import FORMS, SIGNATURES, TARGET_ROLES, TASKS, Reading
from fivetune.start.roles import Given, check_given, find_group, rate_name, split_names
from fivetune.start.survey import ENOUGH, MARGIN, Survey, make_survey
from fivetune.tasks import load_task
from fivetune.types import RawRecord

NUM_TRIED = 20  # first records, one of which a reading's task must convert
NUM_SHOWN = 3  # readings that a doubt lists


@dataclass(frozen=True, slots=True)
class Choice:
    """The reading that is taken.

    Args:
        others: the next readings, the best first.
        unread: the columns that it does not read.
    """

    reading: Reading
    others: Sequence[Reading]
    unread: Sequence[str]


class DoubtError(DataError):
    """No reading of a table is clearly the best one.

    Args:
        readings: the best ones, the best first.
        commands: the command that takes each of them.
    """

    def __init__(self, table: RawTable, readings: Sequence[Reading]) -> None:
        self.table, self.readings = table, readings
        self.commands = [build_command(table, one) for one in readings]
        why = readings[0].doubts[0] if readings[0].doubts else "several readings are about as likely"
        head = f"{table.source}: it is not clear what is to be learned: {why}. Nothing was written."
        lines = [f"{head} Run the command of the reading that is meant:"]
        for number, (reading, command) in enumerate(zip(readings, self.commands, strict=True), 1):
            doubts = f" ({reading.doubts[0]})" if reading.doubts and number > 1 else ""
            lines += [f"{number}. {describe_reading(reading)}{doubts}", f"  {command}"]
        super().__init__("\n".join(lines))


def infer_task(table: RawTable, *, task: str | None = None, given: Given | None = None) -> Choice:
    """Choose the reading of a table; with `task` among those of that task, with `given` among those with its columns.

    Raises ConfigError for a wrong column in `given`, DataError if nothing fits, DoubtError if no reading
    has ENOUGH points, a lead of MARGIN and no doubts.
    """
    if task == "mixture":
        raise ConfigError(
            "--task mixture: its parts are data sets of their own. Run fivetune new for each, and join their recipes "
            "in task.parts (docs/tasks.md)."
        )
    given = given or {}
    check_given(given, table)
    survey = make_survey(table, given)
    wanted = {role: names for role, names in given.items() if role not in ("id", "group")}
    if task is not None and task not in TASKS:
        own = Reading(task, task, wanted, "--task names it", columns=wanted)
        return _complete(own, [], survey)
    found = [
        reading
        for one in list_readings(survey)
        if (reading := _adopt(one, task)) and wanted.items() <= reading.roles.items()
    ]
    if not found:
        raise DataError(f"{table.source}: {explain_none(survey, task)}")
    distinct: dict[str, Reading] = {}
    for reading in sorted(found, key=_get_points, reverse=True):
        distinct.setdefault(shlex.join(list_flags(reading)), reading)
    best, *others = distinct.values()
    if given.keys() & TARGET_ROLES.keys():  # the user has said what is learned
        return _complete(replace(best, warnings=(*best.warnings, *best.doubts)), [], survey)
    rivals = [one for one in others if is_rival(one, best)]
    is_close = bool(rivals) and rivals[0].points > best.points - MARGIN
    if best.doubts or best.points < ENOUGH or is_close:
        known = [one for one in others if one in rivals or (one.task, one.target) == (best.task, best.target)]
        likely = [one for one in known if one.points >= best.points - 2 * MARGIN]
        raise DoubtError(table, [best, *likely[: NUM_SHOWN - 1]])
    near = [one for one in rivals if one.points >= max(ENOUGH, best.points - 2 * MARGIN) and not one.doubts]
    return _complete(best, near, survey)


def list_readings(survey: Survey) -> list[Reading]:
    """List the readings of all forms whose task converts one of the first records."""
    return [reading for form in FORMS for reading in form(survey) if _can_convert(reading, survey.table)]


def is_rival(other: Reading, best: Reading) -> bool:
    """Whether another reading learns something else, or reads what the best one does not."""
    return other.target != best.target or not {*other.list_columns()} <= {*best.list_columns()}


def _adopt(reading: Reading, task: str | None) -> Reading | None:
    """Return the reading for the task that the user named; None if it is another one."""
    if task in (None, reading.task):
        return reading
    return replace(reading, task=task) if {task, reading.task} == {"squad", "squad_v2"} else None


def _can_convert(reading: Reading, table: RawTable) -> bool:
    task = load_task(reading.task, reading.options)
    for record in table.records[:NUM_TRIED]:
        named = parse_item(record, reading.columns, {}, str(record.fields["id"]))
        try:
            if isinstance(named, RawRecord) and task.to_text(named):
                return True
        except DataError:
            continue
    return False


def _complete(reading: Reading, others: Sequence[Reading], survey: Survey) -> Choice:
    """Add the columns of ids and groups, and take the mappings away that say nothing."""
    taken = reading.list_columns()
    columns, given = survey.table.columns, survey.given
    identity = given.get("id")
    if identity is None and "id" not in columns:
        unique = [name for name, column in columns.items() if column.has_codes and name not in taken]
        identity = next((name for name in unique if rate_name("id", name) or columns[name].kind != "link"), None)
    renamed = {wanted: name for wanted, name in reading.columns.items() if wanted != name}
    group = find_group(survey.table, given, [*taken, identity or ""])
    found = replace(reading, columns=renamed, id_column=identity, group_column=group)
    known = (*taken, *(name.partition(".")[0] for name in taken), identity, group, "id")
    unread = [name for name in survey.columns if name not in known and reading.task not in SIGNATURES]
    return Choice(found, others[: NUM_SHOWN - 1], unread)


def list_flags(reading: Reading) -> list[str]:
    """List the words of the command line that choose a reading."""
    words = ["--task", reading.task]
    for role, names in reading.roles.items():
        words += [word for name in split_names(role, names) for word in ("--column", f"{role}={name}")]
    return words


def build_command(table: RawTable, reading: Reading) -> str:
    """Build the command that writes the recipe of a reading."""
    header = ["--header", ",".join(table.header)] if table.header else []
    return shlex.join(["fivetune", "new", table.source, *header, *list_flags(reading)])


def describe_reading(reading: Reading) -> str:
    """Describe a reading in words.

    >>> describe_reading(Reading("classification", "classification", {"text": "a\\nb", "label": "y"}, ""))
    'classification: y from a, b'
    """
    inputs = reading.list_inputs()
    source = f" from {', '.join(inputs)}" if inputs else ""
    return f"{reading.kind}: {', '.join(reading.target.split(chr(10))[:4])}{source}"


def explain_none(survey: Survey, task: str | None) -> str:
    """Explain why no reading fits, and what to do."""
    texts = [name for name, column in survey.columns.items() if column.kind == "text"]
    reasons: list[str] = []
    if len(survey.columns) < 2:
        reasons.append(
            f"has one column with values, {', '.join(survey.columns) or 'none'}. Training needs inputs and what is "
            "to be learned for them, such as text,label or question,answer. Add the other column"
        )
        return f"{reasons[0]}."
    for name, column in survey.columns.items():
        if survey.rate(name, "label") >= 3 and column.num_distinct == 1:
            reasons.append(
                f"all values of {name} are {column.example!r}, and a classification needs two labels or more"
            )
        elif survey.rate(name, "label") >= 3 and not column.has_labels:
            number = f"{column.num_distinct:,} different values in {column.num_filled:,} records"
            reasons.append(f"{name} has {number}, so it is no label")
    asks = [name for name in texts if survey.rate(name, "question") >= 3]
    if asks and not any(survey.rate(name, "answer") >= 2 for name in survey.columns):
        reasons.append(f"the questions in {asks[0]} have no column of answers")
    holds = f"{', '.join(texts)} {'holds' if len(texts) == 1 else 'hold'} text" if texts else "no column holds text"
    reasons.append(f"{holds}, and no other column is named as what is to be learned")
    fits = f"--task {task} does not fit" if task else "no task fits"
    return (
        f"{fits} the columns {', '.join(survey.table.columns)}: {'; '.join(reasons)}. Name the columns, such as "
        "--column text=NAME --column label=NAME or --column inputs=NAME --column targets=NAME, or the task with --task."
    )


def _get_points(reading: Reading) -> int:
    return reading.points
