"""The model card of a run: README.md with the metadata of the hub, scores, data, limits, training and code examples.

In: the records of a run and its settings. Out: Markdown. What the records do not hold is left out. A card ends with a
mark of its own content, by which a card that a user has edited is recognised.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

import fivetune
from fivetune.config import RunConfig
from fivetune.config.layers import as_yaml
from fivetune.config.paths import find_typed_path, resolve_adapter
from fivetune.errors import format_size
from fivetune.reading.card.facts import (
    escape_markdown,
    find_no_answer,
    format_metric_source,
    list_data_files,
    list_data_sets,
    list_dataset_names,
    list_limits,
    name_eval_data,
    read_base_license,
)
from fivetune.redaction import redact_settings
from fivetune.rundir.figures import JOULES_PER_WH, compute_energy_joules, compute_peak_bytes, describe_weights
from fivetune.rundir.records import BestEval, EvalRecord, Run
from fivetune.scores.metrics import get_metric_name, is_selectable_score
from fivetune.tasks import find_needed_columns, head_of

if TYPE_CHECKING:
    from fivetune.types import Adapter, JsonTable

Kind = Literal["model", "adapter", "export"]
MARK = "<!-- written by FiveTune, sha256 of the text above: {digest} -->"
_MARK = re.compile(r"\n<!-- written by FiveTune, sha256 of the text above: ([0-9a-f]{64}) -->\n?\Z")
TASK_TYPES = {
    "squad": "question-answering",
    "squad_v2": "question-answering",
    "mlqa": "question-answering",
    "korquad": "question-answering",
    "bioasq": "question-answering",
    "causalqa": "question-answering",
    "classification": "text-classification",
    "yes_no": "text-classification",
    "rouge": "summarization",
    "bleu": "translation",
}
"""The hub's name of a task by its first metric; text2text-generation for others."""
SAMPLE = "the text as the run's template writes it"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the reader of a card finds the model.

    Args:
        name: the run directory, or the repository (org/name).
        is_published: whether `name` is a repository, at whose root the model's files are.
    """

    name: str
    is_published: bool = False

    @property
    def model(self) -> str:
        return self.name if self.is_published else f"{self.name}/model"


@dataclass(frozen=True, slots=True)
class CardRequest:
    """What a card is asked for.

    Args:
        folder: the run directory, which relative paths are resolved with.
        model_type: the family in config.json: t5, mt5 or umt5.
        kind: the model, its adapter alone, or an export in another format.
        export: content of export.json, for that kind.
        license: the licence that the user gives the model; None if not given.
        with_checksums: read the data files and give their sha256.
    """

    folder: Path
    place: Place
    model_type: str
    kind: Kind = "model"
    export: JsonTable = field(default_factory=dict)
    license: str | None = None
    with_checksums: bool = False


def build_model_card(
    config: RunConfig, run: Run, evaluation: EvalRecord | None, best: BestEval | None, request: CardRequest
) -> str:
    """Build the card in Markdown.

    Secrets in settings are hidden as in config.yaml: labels and templates are unchanged.

    Args:
        evaluation: evaluation of the exported weights; None without evaluations.
        best: best evaluation as in status.json.
    """
    settings = config.as_redacted_dict()
    shown = shorten_paths(settings)
    base = find_base(config, request.folder)
    model = shown["model"]
    given = config.model.path
    export = request.export if request.kind == "export" else {}
    # A name on a command line may hold a token.
    place = Place(redact_settings(request.place.name), request.place.is_published)
    name = place.name if place.is_published else redact_settings(run.name)
    adapter = resolve_adapter(config.model.adapter, str(request.folder))
    adapted = ""
    if adapter:
        kind = "its virtual tokens are apart" if adapter.is_virtual else "its matrices are merged into the weights"
        if request.kind == "adapter":
            kind = "the weights here are the adapter's alone"
        adapted = f", with the adapter `{adapter.plugin_name()}` ({kind})"
    scorers: dict[str, None] = {}
    for task in config.tasks:
        for spec in task.metrics:
            scorers[f"`{get_metric_name(spec)}`{format_metric_source(spec, run, evaluation)}"] = None
    is_virtual = adapter is not None and adapter.is_virtual
    part = next(iter(getattr(config.task, "parts", ())), None)
    yaml = as_yaml(shown).strip()
    text = _build_template().render(
        metadata=_build_metadata(config, run, evaluation, request, name=name, base=base, adapter=adapter),
        name=name,
        version=fivetune.__version__,
        task=config.task.plugin_name(),
        base_name=model["path"] or f"random weights ({model['config']})",
        adapter=adapted,
        base_license=read_base_license(given, request.folder) if config.model.init == "pretrained" and given else None,
        evaluation=evaluation,
        weights=describe_weights(evaluation, best) if evaluation else "",
        scorers=scorers,
        eval_data=name_eval_data(run),
        export=export,
        export_options=", ".join(f"{name} {value}" for name, value in export.get("options", {}).items()),
        proof=export.get("proof") or {},
        kind=request.kind,
        place=place,
        base=base,
        model_type=request.model_type,
        sample=SAMPLE,
        record=_build_sample_record(config) or SAMPLE,
        options=f', {{"task.part": {json.dumps(part)}}}' if part else "",
        has_peft_example=request.kind == "adapter" or is_virtual,
        has_plain_example=head_of(config.task) != "extractive" and request.export.get("format", "hf") == "hf",
        limits=list_limits(
            run,
            evaluation,
            no_answer=find_no_answer(config.tasks),
            score=best.metric if best else config.task.main_metric,
        ),
        data_sets=list_data_sets(run),
        data_files=list_data_files(run, request.folder, with_checksums=request.with_checksums),
        training=_list_training(settings, run),
        settings=yaml,
        # Longer than any fence in the text.
        fence="`" * max(3, 1 + max(map(len, re.findall("`+", yaml)), default=0)),
    )
    return mark_card(text)


@cache
def _build_template() -> Template:
    environment = Environment(
        loader=PackageLoader("fivetune.reading.card"),
        autoescape=False,  # Markdown, in which the filter escapes names and values of the run
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["markdown"] = escape_markdown  # pyright: ignore[reportUnknownMemberType]
    environment.filters["quoted"] = quote_python  # pyright: ignore[reportUnknownMemberType]
    environment.globals["format_score"] = format_score  # pyright: ignore[reportUnknownMemberType]
    return environment.get_template("card.md")


# --- the mark ---


def mark_card(text: str) -> str:
    """Add the mark of a card's content."""
    text = text.rstrip("\n") + "\n"
    return text + MARK.format(digest=sha256(text.encode()).hexdigest()) + "\n"


def is_generated(text: str) -> bool:
    """Whether a card is as FiveTune wrote it: it has the mark of its content.

    >>> is_generated(mark_card("# a")), is_generated(mark_card("# a").replace("# a", "# mine")), is_generated("# a")
    (True, False, False)
    """
    found = _MARK.search(text)
    return found is not None and sha256(text[: found.start() + 1].encode()).hexdigest() == found[1]


# --- the base and the metadata ---


def find_base(config: RunConfig, folder: Path) -> str | None:
    """Return the name of the base model on the hub; None for a local folder, t5-nano and random weights."""
    name = config.model.path
    if config.model.init != "pretrained" or not name or name.startswith((".", "/", "~")):
        return None
    is_form = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None
    return name if is_form and not Path(find_typed_path(name, folder)).exists() else None


def shorten_paths(settings: Any) -> Any:
    """Replace absolute paths in settings by their last part: the folders of a machine concern no reader.

    Templates and labels (`task`) are unchanged, but for the files of a mixture's parts.

    >>> shorten_paths({"data": {"train": ["/home/me/a.csv", "b/c.csv"]}, "task": {"inputs": "/{text}"}})
    {'data': {'train': ['a.csv', 'b/c.csv']}, 'task': {'inputs': '/{text}'}}
    """
    if isinstance(settings, Mapping):
        shown = {key: value if key == "task" else shorten_paths(value) for key, value in settings.items()}
        task = shown.get("task")
        parts = task.get("parts") if isinstance(task, Mapping) else None
        if isinstance(task, Mapping) and isinstance(parts, Mapping):
            short = {name: shorten_paths(part) if isinstance(part, Mapping) else part for name, part in parts.items()}
            shown["task"] = {**task, "parts": short}
        return shown
    if isinstance(settings, list):
        return [shorten_paths(one) for one in settings]
    if isinstance(settings, str) and settings.startswith(("/", "~/")):
        return settings.rstrip("/").rpartition("/")[2]
    return settings


def _build_metadata(
    config: RunConfig,
    run: Run,
    evaluation: EvalRecord | None,
    request: CardRequest,
    *,
    name: str,
    base: str | None,
    adapter: Adapter | None,
) -> str:
    """Build the YAML that the hub reads, with the finite scores if the name of the evaluation data is known."""
    from huggingface_hub import EvalResult, ModelCardData

    is_adapter = request.kind == "adapter" or bool(adapter and adapter.is_virtual)
    library, relation = ("peft", "adapter") if is_adapter else ("transformers", "finetune")
    if request.kind == "export" and request.export.get("format") != "hf":
        library = str(request.export.get("format"))
        if request.export.get("options", {}).get("quantization", "none") != "none":
            relation = "quantized"
    dataset = name_eval_data(run)
    dataset_type = re.sub(r"\W+", "-", dataset).strip("-")
    if "/" in dataset:  # a data set of the hub, with its configuration and split
        dataset_type = dataset.partition(":")[0]
    task_type = TASK_TYPES.get(get_metric_name(config.tasks[0].metrics[0]), "text2text-generation")
    scores = evaluation.scores if evaluation and dataset else {}
    results: list[EvalResult] = []
    for score, value in scores.items():
        if not math.isfinite(value) or not is_selectable_score(score) or score.startswith("best_"):
            continue
        results.append(
            EvalResult(
                task_type=task_type,
                dataset_type=dataset_type,
                dataset_name=dataset,
                metric_type=score,
                metric_name=score,
                metric_value=round(value, 4),
            )
        )
    data = ModelCardData(
        base_model=base,
        base_model_relation=relation if base else None,
        datasets=list_dataset_names(run) or None,
        eval_results=results or None,
        model_name=name.rpartition("/")[2] if results else None,
        library_name=library,
        license=request.license,
        tags=["fivetune", config.task.plugin_name()],
    )
    return data.to_yaml().strip()


# --- sections ---


def _build_sample_record(config: RunConfig) -> dict[str, str]:
    """Build a record with the run's columns; {} for a mixture, and for a task with a column that is no text."""
    needed = {} if hasattr(config.task, "parts") else find_needed_columns(config.task)
    if not all(isinstance(value, str) for value in needed.values()):
        return {}
    return {config.data.columns.get(name, name): f"the {name}" for name in needed}


def quote_python(value: object) -> str:
    """Write a text or a record as Python code, with double quotes.

    >>> quote_python({"Größe": "a"})
    '{"Größe": "a"}'
    """
    return json.dumps(value, ensure_ascii=False)


def _list_training(settings: JsonTable, run: Run) -> Iterator[tuple[str, object]]:
    """Yield facts about settings, machine, time and energy; the template leaves out None."""
    optimizer = settings["optimizer"]
    data = settings["data"]
    plan = run.plan
    machine = run.machine
    yield "optimizer", optimizer["name"]
    yield "learning rate", _format_number(plan.lr if plan and plan.lr else optimizer.get("lr"))
    yield "weight decay", _format_number(optimizer.get("weight_decay"))
    yield "schedule", settings["schedule"]["name"]
    yield "steps", f"{run.status.step:,}" if run.status.step else None
    if run.steps and run.steps[0].step == 1:
        yield "examples per step", run.steps[0].num_examples_seen
    yield "precision", machine.precision
    yield "max input tokens", data.get("max_input_tokens")
    yield "max target tokens", data.get("max_target_tokens")
    yield "dropout", _format_number(settings["model"].get("dropout"))
    yield "seed", settings["run"].get("seed")
    yield "beams of the evaluation", settings["eval"].get("num_beams")
    world = machine.strategy.world_size or 1
    device = machine.device.name or machine.device.kind
    yield "hardware", f"{world} x {device}" if device and world > 1 else device
    yield "cores of the host", machine.host.num_cores
    yield "strategy", machine.strategy.name if world > 1 else None
    num = machine.num_parameters
    trained = machine.num_trained_parameters
    yield "parameters", f"{num:,}" if num else None
    yield "trained parameters", f"{trained:,}" if trained and trained != num else None
    peak = compute_peak_bytes(run.steps)
    seconds = run.status.seconds
    yield "peak memory of a device", format_size(peak) if peak else None
    yield "time", f"{seconds / 60:,.1f} min" if seconds else None
    energy = compute_energy_joules(run.telemetry)
    yield "energy of the devices", f"{energy / JOULES_PER_WH:,.2f} Wh" if energy else None
    yield "versions", ", ".join(f"{name} {text}" for name, text in machine.versions.items() if text)


def _format_number(value: object) -> str | None:
    return f"{value:g}" if isinstance(value, int | float) else None


def format_score(name: str, value: float) -> str:
    """Format a score with two decimals, a number of examples as an integer.

    >>> format_score("f1", 80.12345), format_score("HasAns_total", 600.0)
    ('80.12', '600')
    """
    return f"{value:,.0f}" if name.endswith("total") else f"{value:.2f}"
