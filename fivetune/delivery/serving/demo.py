"""The page at /: a form with the fields of the task, answers of one or two models, examples of the evaluation data.

In: tasks, and runs with their predictions. Out: HTML in which script and style are inlined, the policy that admits them
alone, and what the page asks for at /demo.json. Without a token the page shows nothing of the runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from fivetune.config.paths import find_typed_path
from fivetune.delivery.serving.schema import DemoExample, FieldFacts, RunFacts
from fivetune.errors import DataError
from fivetune.model.decode import Sampling
from fivetune.reading.report.run.examples import compute_mean_score, sample
from fivetune.reading.report.run.scores import choose_best_eval
from fivetune.rundir.reader import read_run
from fivetune.training.answers.inputs import iter_input_rows
from fivetune.training.answers.trained_run import TrainedRun
from fivetune.types import JsonTable, OnNote

PAGE = Path(__file__).with_name("page")
MAX_ROWS = 20_000  # of the evaluation data that are searched for the records of examples
MAX_CHARACTERS = 20_000  # of an example


def describe_models(models: Iterable[RunFacts]) -> list[JsonTable]:
    """Describe models for the page."""
    found: list[JsonTable] = []
    for one in models:
        fields: list[JsonTable] = []
        for field in one.fields:
            kind = "text" if isinstance(field.example, str) else "json"
            if isinstance(field.example, list) and all(isinstance(item, str) for item in field.example):
                kind = "list"
            fields.append({"name": field.name, "kind": kind, "is_required": field.is_required})
        examples = [asdict(example) for example in one.examples]
        facts = {"name": one.name, "task": one.task, "step": one.step, "fields": fields, "examples": examples}
        found.append({**facts, "search": _describe_search(one)})
    return found


def _describe_search(one: RunFacts) -> JsonTable | None:
    """Describe the run's options of the search, by their names in requests; None if requests cannot change them."""
    own = one.decoding
    if not one.writes or own.label_ids:
        return None
    drawn = own.sampling or Sampling()
    found: JsonTable = {
        "temperature": own.sampling.temperature if own.sampling else 0,
        "top_k": drawn.top_k,
        "top_p": drawn.top_p,
        "n": own.num_candidates,
        "max_tokens": own.max_new_tokens,
        "stop": own.stop,
    }
    if one.takes_seed:
        found["seed"] = None
    return found


def find_examples(
    trained: TrainedRun, fields: Sequence[FieldFacts], *, num: int, on_warning: OnNote
) -> tuple[DemoExample, ...]:
    """Choose up to `num` right and `num` wrong predictions of the run's best evaluation; () without predictions.

    An example has its record if the evaluation data are a local file whose first MAX_ROWS records hold it.
    """
    if not num or not (trained.folder / "predictions").is_dir():
        return ()
    run = read_run(trained.folder)  # not `trained.records`, which would stay in memory as long as the server runs
    scored = [
        one
        for one in run.read_predictions(choose_best_eval(run))
        if compute_mean_score(one) is not None and len(one.inputs) <= MAX_CHARACTERS
    ]
    for damage in run.damage:
        on_warning(damage)
    right = [one for one in scored if compute_mean_score(one) == 1]
    chosen = [*sample(right, [], num), *sample(scored, right, num)]
    records = _find_records(trained, {one.id for one in chosen})
    found: list[DemoExample] = []
    for one in chosen:
        record, shown = records.get(one.id), None
        if record:
            shown = {field.name: record[field.name] for field in fields if field.name in record}
        found.append(DemoExample(shown, one.inputs, one.prediction, one.references, compute_mean_score(one) == 1))
    return tuple(found)


def _find_records(trained: TrainedRun, ids: set[str]) -> dict[str, Mapping[str, object]]:
    """Find records of the evaluation data by the id of their prediction; only those that local files hold."""
    config = trained.loaded.config
    data, found = config.data, dict[str, Mapping[str, object]]()
    for source in data.eval or data.train:
        path = find_typed_path(source, trained.folder)
        if not Path(path).is_file():
            continue
        try:
            for row in islice(iter_input_rows(path, config.task, data.columns, data.header), MAX_ROWS):
                if row.key in ids and _is_json(row.fields):
                    found.setdefault(row.key, row.fields)
        except DataError:  # the file has changed since the run: its examples are texts
            continue
    return found


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
