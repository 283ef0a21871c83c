"""Lists of records or texts that are answered together, without files that outlive them.

In: requests, each a list of records or of texts. Out: for each its Predictions, as if it were alone: ids, and the
reasons of records that cannot be used, never depend on the other requests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from fivetune.data.examples import Source
from fivetune.data.letters import UNMARKED
from fivetune.data.readers.records import find_column
from fivetune.data.readers.source_files import quote_value
from fivetune.data.readers.tables import is_table, iter_rows, name_tables
from fivetune.data.store.convert import ConvertedRows
from fivetune.data.store.encode import find_clipped_spans
from fivetune.data.store.in_memory import MemoryStore, convert_source
from fivetune.errors import DataError
from fivetune.rundir.records import Prediction
from fivetune.tasks import find_needed_columns, parse_template
from fivetune.tasks.jsonl import JSONL
from fivetune.training.answers.batch_size import AutoBatchSize, predict_in_batches
from fivetune.training.answers.evaluator import Evaluator, ignore_count
from fivetune.training.answers.inputs import InputRow, iter_input_rows, write_records, write_texts
from fivetune.training.answers.listening import Listener, OnWritten
from fivetune.training.answers.predicted_file import PredictedRow, PredictionCounts
from fivetune.types import RawRecord, Task, TextExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.model.modules import T5Model

Given = Mapping[str, object] | str
"""A record, or a text exactly as the model reads it."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request that was read and tokenised.

    Args:
        rows: one per record.
        written: id of each record, and why JSON cannot represent it ("" if it can).
        converted: rows of tokens; empty if no record can be used.
    """

    rows: Sequence[InputRow]
    written: Sequence[tuple[str, str]]
    converted: Sequence[ConvertedRows]


class WholeInputs(JSONL):
    """Texts as the model reads them; their first special tokens are special if the template has them."""

    template: str = ""

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> TextExample | None:
        """Return an example, marked as a filled template is."""
        example = super().to_text(record, labelled=labelled)
        inputs = example.inputs if example else ""
        for literal, _ in parse_template(self.template):
            inputs = inputs.replace(literal.translate(UNMARKED), literal, 1)
        return example and replace(example, inputs=inputs)


def list_inputs(inputs: object) -> list[Given]:
    """List records or texts; of a table its rows. Raises DataError for one record or text alone, which iterate by name
    or letter, for a table of another library, for anything else, and for records and texts mixed.
    """
    kind = type(inputs).__name__
    # A DataFrame or a data set; a list of records is a table too, but its errors name the record.
    if is_table(inputs) and not isinstance(inputs, Sequence):
        return list(iter_rows(inputs, "inputs")) if len(cast("Sized", inputs)) else []
    if isinstance(inputs, Mapping | str):
        raise DataError(f"predict: the inputs are one {kind}. Allowed is a list of them. Put it into a list.")
    if hasattr(cast("object", inputs), "columns"):
        raise DataError(
            f"predict: the inputs are a {kind}. Allowed are a list of records or texts, a DataFrame of pandas or "
            "polars, and a datasets.Dataset. Give its rows as a list of records."
        )
    if not isinstance(inputs, Iterable):
        raise DataError(f"predict: the inputs are {kind}. Allowed is a list of records or texts. A file: predict_file.")
    found: list[Given] = []
    for number, one in enumerate(cast("Iterable[object]", inputs)):
        if not isinstance(one, Mapping | str):
            raise DataError(
                f"predict: inputs[{number}] is {quote_value(str(one))} ({type(one).__name__}). Allowed are records "
                "(dict of column and value) and texts."
            )
        found.append(cast("Given", one))
    if len({isinstance(one, str) for one in found}) > 1:
        raise DataError("predict: texts and records are mixed. Give one kind.")
    return found


def name_texts(given: Sequence[Given], task: Task, columns: Mapping[str, str]) -> list[Given]:
    """Put texts into records of the only column that a task reads; texts for a task of several columns stay.

    >>> name_texts(["late"], JSONL(inputs="ticket: {text}"), {"text": "body"})
    [{'body': 'late'}]
    """
    if not any(isinstance(one, str) for one in given):
        return list(given)
    needed = list(find_needed_columns(task))
    if len(needed) != 1:
        return list(given)
    column = columns.get(needed[0], needed[0])
    named: list[Given] = []
    for one in given:
        named.append({column: one} if isinstance(one, str) else one)
    return named


def read_requests(
    requests: Sequence[Sequence[Given]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    task: Task,
    columns: Mapping[str, str],
    describe: Callable[[str, Task, Mapping[str, str]], Source],
    refuses_incomplete: bool = False,
) -> list[ReadRequest]:
    """Read and tokenise requests, each as `list_inputs` returns it.

    Args:
        task, columns: task and columns of records.
        describe: describes the source of a path, a task and columns.
        refuses_incomplete: raise DataError for a request whose records all lack a column.
    """
    found: list[ReadRequest] = []
    with tempfile.TemporaryDirectory(prefix="fivetune-inputs-") as folder:
        path = Path(folder) / "inputs.jsonl"
        for given in requests:
            texts = [one for one in given if isinstance(one, str)]
            records = [one for one in given if not isinstance(one, str)]
            own_task = task
            own_columns: Mapping[str, str] = columns
            if texts:
                template = getattr(task, "template", None) or getattr(task, "inputs", "")
                own_task = WholeInputs(template=str(template))
                own_columns = {}
                written = write_texts(path, texts)
            else:
                written = write_records(path, records, columns)

            # Errors name the inputs, not the temporary file. A request without a usable record has nothing to tokenise.
            rows: list[InputRow] = []
            converted: list[ConvertedRows] = []
            with name_tables({path: "inputs"}):
                if given:
                    rows = list(iter_input_rows(str(path), own_task, own_columns))
                if records:
                    rows = _name_missing_fields(rows, records, task, columns)
                if refuses_incomplete and all(row.is_incomplete for row in rows):
                    PredictionCounts.count(
                        PredictedRow(row, Prediction(id=row.id)) for row in rows
                    ).refuse_none_answered()
                if not all(row.skipped for row in rows):
                    converted = convert_source(describe(str(path), own_task, own_columns), tokenizer)
            found.append(ReadRequest(rows, written, converted))
    return found


def _name_missing_fields(
    rows: Sequence[InputRow], records: Sequence[Mapping[str, object]], task: Task, columns: Mapping[str, str]
) -> list[InputRow]:
    """Give records that lack a column a reason for who sends them: data.columns is set where the model was trained."""
    if not any(row.is_incomplete for row in rows):
        return list(rows)
    needed = {name: columns.get(name, name) for name in find_needed_columns(task)}
    named: list[InputRow] = []
    for row, record in zip(rows, records, strict=True):
        missing = [own for name, own in needed.items() if not (find_column(record, own) or name in record)]
        if row.is_incomplete and missing:
            found = ", ".join(quote_value(str(name)) for name in record) or "none"
            reason = (
                f"missing: {', '.join(missing)}. A record needs the fields {', '.join(needed.values())}. This one has "
                f"{found}. Add what is missing."
            )
            row = replace(row, skipped=reason)
        named.append(row)
    return named


def answer_requests(
    requests: Sequence[ReadRequest],
    model: T5Model,
    *,
    build_evaluator: Callable[[MemoryStore], Evaluator],
    batch_size: AutoBatchSize | int | None = None,
    max_input_tokens: int | None = None,
    on_progress: Callable[[int, int], object] = ignore_count,
    on_written: OnWritten | None = None,
) -> list[list[Prediction]]:
    """Answer requests in common batches; returns the Predictions of each, in its order.

    Args:
        batch_size: examples per generation batch; default: the evaluator's.
        max_input_tokens: most tokens of a record before clipping; one with more has a reason in `skipped`.
        on_written: called for each token of an answer, where the search reports them.
    """
    usable = [one for one in requests if one.converted]
    if not usable:
        return [_join_rows(one, {}) for one in requests]
    store = MemoryStore([one.converted for one in usable])
    found = _refuse_long_inputs(store, max_input_tokens)
    questions = np.setdiff1d(np.arange(store.num_groups), np.fromiter(found, np.int64))
    evaluator = build_evaluator(store)
    if on_written:
        listener = Listener(
            _find_places(requests, store), on_written, evaluator.tokenizer, keep_special=evaluator.keep_special
        )
        evaluator = replace(evaluator, on_token=listener)
    answered = predict_in_batches(evaluator, model, questions, batch_size)
    for number, (question, prediction) in enumerate(answered, start=1):
        found[question] = _add_clipped_spans(prediction, evaluator, store, question)
        on_progress(number, len(questions))
    # Ids repeat among requests: each is joined with its own answers only.
    joined: list[list[Prediction]] = []
    for one, questions in zip(requests, _list_questions(requests, store), strict=True):
        own = {found[question].id: found[question] for question in questions}
        joined.append(_join_rows(one, own))
    return joined


def _list_questions(requests: Sequence[ReadRequest], store: MemoryStore) -> list[range]:
    """List the numbers of the questions of each request, which follow one another."""
    ends = [*store.first_groups[1:], store.num_groups]
    usable = iter(zip(store.first_groups, ends, strict=True))
    return [range(*next(usable)) if one.converted else range(0) for one in requests]


def _find_places(requests: Sequence[ReadRequest], store: MemoryStore) -> dict[int, tuple[int, int]]:
    """Find the number of the request and of its record for each row that is the only passage of its question."""
    rows_of: dict[int, list[int]] = {}
    for row, question in enumerate(store.groups.tolist()):
        rows_of.setdefault(question, []).append(row)
    places: dict[int, tuple[int, int]] = {}
    for number, (one, questions) in enumerate(zip(requests, _list_questions(requests, store), strict=True)):
        records = {row.key: record for record, row in enumerate(one.rows)}
        for question in questions:
            rows = rows_of[question]
            example = store.read_example(rows[0])
            if len(rows) == 1:
                places[rows[0]] = number, records[example.group or example.id]
    return places


def _add_clipped_spans(prediction: Prediction, evaluator: Evaluator, store: MemoryStore, question: int) -> Prediction:
    """Add the part of the inputs that was not read."""
    if not prediction.num_clipped_tokens:
        return prediction
    # Of several passages of the question, the one that was answered.
    examples = (store.read_example(row) for row in np.flatnonzero(store.groups == question).tolist())
    read = next(one for one in examples if one.inputs == prediction.inputs)
    return replace(prediction, clipped_spans=find_clipped_spans(evaluator.tokenizer, read, evaluator.limits))


def _refuse_long_inputs(store: MemoryStore, limit: int | None) -> dict[int, Prediction]:
    """Return a Prediction with the reason for each question that has a passage of more than `limit` tokens."""
    found: dict[int, Prediction] = {}
    if not limit:
        return found
    for row in np.flatnonzero(store.whole_lengths > limit).tolist():
        example = store.read_example(row)
        reason = (
            f"the input has {store.whole_lengths[row]:,} tokens. Allowed are {limit:,}. Shorten it, or split it into "
            "several records."
        )
        found[int(store.groups[row])] = Prediction(id=example.group or example.id, skipped=reason)
    return found


def _join_rows(request: ReadRequest, answers: Mapping[str, Prediction]) -> list[Prediction]:
    """Return a Prediction per record of a request.

    Args:
        answers: answers by the key of `InputRow`.
    """
    found: list[Prediction] = []
    for row, (own_id, wrong) in zip(request.rows, request.written, strict=True):
        one = Prediction(id=row.id, skipped=row.skipped) if row.skipped else answers[row.key]
        # A record that cannot be read from the file has no id there.
        found.append(replace(one, id=row.id or own_id, skipped=wrong or one.skipped))
    return found
