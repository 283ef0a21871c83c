"""Output formats of predictions: JSON lines, a table joined to the input's columns, or BioASQ's submission format.

In: input rows with their predictions, in the input's order. Out: text. A record without a prediction has a line with
null, or a row with empty cells.
"""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fivetune.errors import ConfigError
from fivetune.evaluation.inputs import InputRow
from fivetune.metrics.bioasq import NUM_RANKS
from fivetune.rundir.records import Prediction

PREDICTED = ("id", "prediction", "confidence", "logprob", "no_answer_score", "candidates", "hit_cap", "skipped")
BIOASQ_TYPES = {"bioasq_factoid": "factoid", "bioasq_yesno": "yesno"}
TABLE_DELIMITERS = {".csv": ",", ".tsv": "\t"}
SUFFIXES_WRITTEN = (*TABLE_DELIMITERS, ".json", ".jsonl", ".ndjson")
INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")  # controls, direction marks, surrogates, private use, line separators


class PredictedRow(NamedTuple):
    """A record of the input and its prediction; `prediction.skipped` is the reason if there is none."""

    row: InputRow
    prediction: Prediction


def build_line(prediction: Prediction) -> dict[str, object]:
    """Build the output line of a prediction; `prediction` is null if the record was skipped."""
    line = {key: value for key, value in prediction.as_dict().items() if key in PREDICTED}
    return {**line, "prediction": None} if prediction.skipped else line


def format_array(predicted: Sequence[PredictedRow]) -> str:
    """Format predictions as one JSON array, an element per line."""
    lines = [json.dumps(build_line(one.prediction), ensure_ascii=False) for one in predicted]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def format_lines(predicted: Sequence[PredictedRow]) -> str:
    """Format predictions as JSON lines."""
    return "".join(json.dumps(build_line(one.prediction), ensure_ascii=False) + "\n" for one in predicted)


def format_table(predicted: Sequence[PredictedRow], *, delimiter: str = ",") -> str:
    """Format a table of the input's columns, prediction and confidence, one row per record of the input.

    If a record was skipped, the column `skipped` has the reasons.

    >>> row = InputRow("a.csv:2", "a-1", {"ticket": "17", "text": "no screen, help"})
    >>> print(format_table([PredictedRow(row, Prediction(id="a-1", prediction="hardware", confidence=0.5))]), end="")
    ticket,text,prediction,confidence
    17,"no screen, help",hardware,0.5
    """
    columns = list(dict.fromkeys(key for one in predicted for key in one.row.fields))
    has_skips = any(one.prediction.skipped for one in predicted)
    names = ("prediction", "confidence", "skipped") if has_skips else ("prediction", "confidence")
    added = [_choose_free_name(name, columns) for name in names]
    file = io.StringIO()
    table = csv.writer(file, delimiter=delimiter, lineterminator="\n")
    table.writerow([*columns, *added])
    for row, prediction in predicted:
        cells = [_format_cell(row.fields.get(name)) for name in columns]
        answer = ["", ""] if prediction.skipped else [prediction.prediction, _format_cell(prediction.confidence)]
        table.writerow([*cells, *answer, prediction.skipped or ""][: len(columns) + len(added)])
    return file.getvalue()


def _choose_free_name(name: str, taken: Sequence[str]) -> str:
    while name in taken:
        name = f"{name}_2"
    return name


def _format_cell(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def format_bioasq(predicted: Mapping[str, Sequence[PredictedRow]]) -> str:
    """Format BioASQ's submission: {"questions": [{"id", "type", "exact_answer"}]}.

    Args:
        predicted: rows by task name, one entry per part of a mixture.

    A factoid answer is a list of at most five lists of one synonym; a yes/no answer is a text.
    Raises ConfigError for other tasks.
    """
    questions: dict[str, dict[str, object]] = {}
    for task, rows in predicted.items():
        if task not in BIOASQ_TYPES:
            raise ConfigError(
                f"--format bioasq: the run's task is {task}. Allowed: {', '.join(BIOASQ_TYPES)}. Leave --format out."
            )
        for _, prediction in rows:
            if prediction.skipped:
                continue
            texts = [candidate.text for candidate in prediction.candidates] or [prediction.prediction]
            ranked = [[text] for text in texts[:NUM_RANKS] if text]
            answer = ranked if BIOASQ_TYPES[task] == "factoid" else prediction.prediction
            questions[prediction.id] = {"id": prediction.id, "type": BIOASQ_TYPES[task], "exact_answer": answer}
    return json.dumps({"questions": list(questions.values())}, ensure_ascii=False, indent=1) + "\n"


def summarise(predicted: Sequence[PredictedRow]) -> str:
    """Summarise how many records have a prediction, and why the others have none.

    >>> summarise([PredictedRow(InputRow("a:1"), Prediction(id="1", prediction="yes"))])
    '1 record: 1 answered'
    """
    skipped = [one for one in predicted if one.prediction.skipped]
    faulty = [one for one in skipped if not one.row.is_foreign]
    total, num_foreign = len(predicted), len(skipped) - len(faulty)
    parts = [f"{total - len(skipped):,} answered"]
    if num_foreign:
        parts.append(f"{num_foreign:,} of other types")
    if faulty:
        parts.append(f"{len(faulty):,} skipped (first: {faulty[0].row.where}: {faulty[0].prediction.skipped})")
    return f"{total:,} record{'s' if total != 1 else ''}: {', '.join(parts)}"


def choose_delimiter(path: Path) -> str | None:
    """The delimiter of a table by the suffix of its file; None for other files."""
    return TABLE_DELIMITERS.get(path.suffix.lower())


def escape_invisible(text: str) -> str:
    """Replace characters that a terminal would interpret instead of showing, such as U+202E, by \\u escapes of JSON.

    >>> escape_invisible('"a\\u202eb"')
    '"a\\\\u202eb"'
    """
    return re.sub(r"[^\x20-\x7e\n]", _escape_character, text)


def _escape_character(match: re.Match[str]) -> str:
    character = match.group()
    if unicodedata.category(character) not in INVISIBLE:
        return character
    return "".join(f"\\u{unit:04x}" for unit in _list_utf16_units(character))


def _list_utf16_units(character: str) -> list[int]:
    data = character.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2)]
