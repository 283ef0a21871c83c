"""The interface of a server as OpenAPI, and a page of it that needs no script and no other server.

In: the run's task and columns. Out: a table for /openapi.json, HTML for /docs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fivetune import __version__
from fivetune.delivery.serving.openai import SEARCH_OPTIONS, list_option_schemas
from fivetune.model.decode import Decoding
from fivetune.scores.analysis.abstention import Silence
from fivetune.tasks import convert_inputs, find_needed_columns, list_input_columns
from fivetune.training.answers.output import PREDICTED
from fivetune.types import JsonTable, Task

ERRORS = {
    400: "not HTTP or not strict JSON",
    401: "token missing or wrong",
    403: "Host or Origin of another server",
    404: "no such route or model",
    405: "method not allowed",
    408: "the request arrived too slowly",
    413: "too many bytes or records",
    415: "not application/json",
    422: "a record that the run cannot answer, or an option that is not offered",
    429: "the queue is full: see Retry-After",
    500: "internal error",
    503: "stopping, or not answered in time",
}


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """A column that a task makes its inputs from.

    Args:
        name: in the run's data.
        example: its value in a record of the task.
    """

    name: str
    example: object
    is_required: bool


@dataclass(frozen=True, slots=True)
class DemoExample:
    """A prediction of an evaluation.

    Args:
        record: the columns of the fields; None where they are unknown.
        text: the inputs as the model reads them.
    """

    record: Mapping[str, object] | None
    text: str
    prediction: str
    references: Sequence[str]
    is_right: bool


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a server shows of its run.

    Args:
        name: model name in requests.
        fields: columns of a record; the required ones make an example.
        decoding: options of the run's searches.
        writes: whether the run writes its answers; else it marks spans or chooses labels.
        takes_seed: whether the engine draws by a seed.
        sends_tokens: whether the written tokens make the text of the answer; else the task makes the answer from the
            whole text.
        silence: which answers are withheld unless a request says so; None: none.
    """

    name: str
    task: str
    step: int
    fields: Sequence[FieldFacts]
    decoding: Decoding
    writes: bool = True
    sends_tokens: bool = True
    takes_seed: bool = True
    examples: Sequence[DemoExample] = ()
    silence: Silence | None = None

    @property
    def example(self) -> dict[str, object]:
        """The smallest record of the task."""
        return {one.name: one.example for one in self.fields if one.is_required}


def list_fields(task: Task, columns: Mapping[str, str]) -> tuple[FieldFacts, ...]:
    """List the columns of a record, by the data's names: those that its inputs need, and those that change them."""
    fields, needed = list_input_columns(task), find_needed_columns(task)
    least = convert_inputs(task, needed)
    shown = [name for name in fields if name in needed or convert_inputs(task, needed | {name: fields[name]}) != least]
    text = " ".join(least)
    shown.sort(key=lambda name: text.find(str(fields[name])) % (len(text) + 1))  # as the inputs have them
    return tuple(FieldFacts(columns.get(name, name), fields[name], name in needed) for name in shown)


def build_openapi(models: Sequence[RunFacts]) -> JsonTable:
    """Build the OpenAPI 3.1 description of a server."""
    record = {
        "type": "object",
        "description": " ".join(f"{one.name}: a record of the task {one.task}." for one in models),
        "examples": [one.example for one in models],
    }
    name: JsonTable = {"type": "string", "enum": [one.name for one in models]}
    parameter = {"name": "model", "in": "query", "required": len(models) > 1, "schema": name}
    inputs = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"$ref": "#/components/schemas/Record"}]}}
    least = {"type": "number", "minimum": 0, "maximum": 1, "description": "withhold answers below this confidence"}
    shared: JsonTable = {"model": name, **list_option_schemas()}
    search = {option: shared[option] for option in SEARCH_OPTIONS}
    batch = {
        "type": "object",
        "properties": {"inputs": inputs, "min_confidence": least, **search},
        "required": ["inputs"],
    }
    prompt = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    required = ["prompt", "model"] if len(models) > 1 else ["prompt"]
    completion = {"type": "object", "properties": {"prompt": prompt, **shared}, "required": required}
    message = {"type": "object", "properties": {"role": {"type": "string"}, "content": {}}, "required": ["role"]}
    messages = {"type": "array", "items": message, "minItems": 1}
    required = ["messages", "model"] if len(models) > 1 else ["messages"]
    chat = {"type": "object", "properties": {"messages": messages, **shared}, "required": required}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"fivetune serve {' '.join(one.name for one in models)}",
            "version": __version__,
            "description": " ".join(f"{one.name}: task {one.task}, weights of step {one.step}." for one in models),
        },
        "paths": {
            "/predict": _describe_post(
                "Predict for one record, or for a list of records or texts",
                {"anyOf": [{"$ref": "#/components/schemas/Record"}, batch]},
                {"anyOf": [{"$ref": "#/components/schemas/Prediction"}, {"type": "object"}]},
                [parameter],
            ),
            "/v1/completions": _describe_post(
                "Answer prompts, which are texts as the model reads them, in OpenAI's form, whole or as a stream",
                completion,
                {},
            ),
            "/v1/chat/completions": _describe_post(
                "Answer the last turn of the user, in OpenAI's form, whole or as a stream", chat, {}
            ),
            **{
                path: {"get": {"summary": summary, "responses": {"200": {"description": "OK"}}}}
                for path, summary in (
                    ("/v1/models", "The models that are served"),
                    ("/", "A page to try the models"),
                    ("/health", "The process runs"),
                    ("/ready", "200 if requests are taken, else 503"),
                    ("/metrics", "Counts and times in the text format of Prometheus"),
                )
            },
        },
        "components": {
            "schemas": {
                "Record": record,
                "Prediction": {"type": "object", "properties": {name: {} for name in PREDICTED}},
                "Error": {
                    "type": "object",
                    "properties": {
                        "error": {
                            "type": "object",
                            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
                        }
                    },
                },
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe_post(summary: str, body: JsonTable, answer: JsonTable, parameters: Sequence[JsonTable] = ()) -> JsonTable:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "post": {
            "summary": summary,
            "parameters": list(parameters),
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {
                "200": {"description": "OK", "content": {"application/json": {"schema": answer}}},
                **{str(code): {"description": why, "content": error} for code, why in ERRORS.items()},
            },
        }
    }


def render_docs(openapi: JsonTable, facts: RunFacts) -> str:
    """Render the page of /docs."""
    routes = "".join(
        f"<tr><td><code>{method.upper()} {path}</code></td><td>{escape(one['summary'])}</td></tr>"
        for path, methods in openapi["paths"].items()
        for method, one in methods.items()
    )
    errors = "".join(f"<tr><td>{code}</td><td>{escape(why)}</td></tr>" for code, why in ERRORS.items())
    title, body = escape(openapi["info"]["title"]), json.dumps(facts.example, ensure_ascii=False)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<style>:root{{color-scheme:light dark}}body{{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}}
pre{{overflow:auto;padding:1rem;border:1px solid}}td{{padding:.2rem 1rem .2rem 0;vertical-align:top}}</style>
</head><body>
<h1>{title}</h1><p>{escape(openapi["info"]["description"])}</p>
<h2>Routes</h2><table>{routes}</table>
<h2>A record</h2><pre>curl -H 'Content-Type: application/json' -d @record.json ADDRESS/predict</pre>
<pre>{escape(body)}</pre>
<h2>Errors</h2><p>Each is <code>{{"error": {{"message", "type"}}}}</code>.</p><table>{errors}</table>
<h2>Schema</h2><details><summary>openapi.json</summary>
<pre>{escape(json.dumps(openapi, indent=1, ensure_ascii=False))}</pre></details>
</body></html>
"""
