"""Settings, machine, reproduction and definitions of a run.

In: a Run. Out: Sections.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from fivetune.reading.report.page.parts import Part, Section, Table, Text, build_section
from fivetune.reading.report.page.wording import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_plain,
    format_setting,
    shorten_home,
)
from fivetune.reading.report.run.methods import describe_methods
from fivetune.reading.report.run.scores import DEFINITIONS
from fivetune.rundir.records import MachineRecord, Run
from fivetune.values import flatten_table, get_nested

MAIN_SETTINGS = (
    ("model", "model.path"),
    ("adapter", "model.adapter.name"),
    ("task", "task.name"),
    ("optimizer", "optimizer.name"),
    ("learning rate", "optimizer.lr"),
    ("schedule", "schedule.name"),
    ("steps", "train.num_steps"),
    ("epochs", "train.num_epochs"),
    ("examples per step", "train.global_batch_size"),
    ("micro-batch", "train.batch_size"),
    ("input limit (tokens)", "data.max_input_tokens"),
    ("target limit (tokens)", "data.max_target_tokens"),
    ("dropout", "model.dropout"),
    ("seed", "run.seed"),
)


def name_run_folder(run: Run) -> str:
    """Return the path of the run directory, as a command line takes it."""
    return shlex.quote(str(get_nested(run.config, "run", "dir") or f"runs/{run.name}"))


def describe_run(run: Run) -> str:
    """Describe a run in one line: model, task, device, start, as far as they are known."""
    model = get_nested(run.config, "model", "path") or get_nested(run.config, "model", "config")
    name = PurePath(str(model)).name if model else ""
    if model and get_nested(run.config, "model", "init") == "random":
        name += " (random weights)"
    device = run.machine.device.name or run.machine.device.kind
    started = (run.status.started or "")[:16].replace("T", " ")
    words = (name, get_nested(run.config, "task", "name"), device, started)
    return " \u00b7 ".join(str(word) for word in words if word)


def build_settings_section(run: Run) -> Section:
    """Build the section: the main settings with the options of the loss that are on, then all settings."""
    values = flatten_table(run.config)
    if not values:
        return build_section("Settings", Text("The run directory holds no settings (config.yaml)."))
    told = {key: format_setting(key, value) for key, value in values.items()}
    first = [(words, told[key]) for words, key in MAIN_SETTINGS if values.get(key) is not None]
    options = [(key, told[key]) for key, value in values.items() if key.startswith("loss.") and value]
    plain = "The losses on this page are the plain negative log-likelihood: options of the loss change gradients only."
    caption = f"All {len(told)} settings, as resolved. (config.yaml)"
    return build_section(
        "Settings",
        Table("The main settings.", ("setting", "value"), first + options),
        Text(plain) if options else None,
        Table(caption, ("key", "value"), list(told.items()), folded=True),
    )


def iter_machine_parts(run: Run) -> Iterator[Part]:
    """Yield the machine of the run, and the commands that start it, train it again, and build the page."""
    machine = run.machine
    if machine == MachineRecord():
        yield Text("The run directory holds no facts about the machine (machine.json).")
        return
    known = [pair for pair in format_machine_facts(machine) if pair[1] != UNKNOWN]
    yield Table("Machine and software. (machine.json)", ("fact", "value"), known, folded=True)
    if len(machine.parts) > 1:
        rows: list[Sequence[str]] = []
        for part in machine.parts:
            facts = map(format_plain, (part.started, part.device, part.num_threads))
            rows.append((format_count(part.step), *facts, ", ".join(part.changed) or "nothing"))
        header = ("from step", "started", "device", "threads", "changed settings")
        yield Table("Parts of the run: it was resumed. (machine.json)", header, rows)
    yield Text("Methods, for a paper", "heading")
    yield Text(describe_methods(run))
    yield Text("Commands", "heading")
    folder = name_run_folder(run)
    for words, command in (
        ("Start of the run (again, it needs another --run.dir, or --overwrite):", machine.command),
        ("Train again with the resolved settings:", f"fivetune train {folder}/config.yaml --run.dir {folder}-again"),
        ("Rebuild this page from the run directory:", f"fivetune report {folder}"),
    ):
        if command:
            yield Text(words)
            yield Text(shorten_home(command), "code")


def format_machine_facts(machine: MachineRecord) -> list[tuple[str, str]]:
    """Format the machine and the software of a run as (fact, value) pairs; "n/a" for what is unknown."""
    cores = None if machine.host.num_cores is None else f"{format_count(machine.host.num_cores)} cores"
    changes = " with uncommitted changes" if machine.git.commit and machine.git.dirty else ""
    return [
        ("device", _join_words(machine.device.name, machine.device.kind)),
        ("device memory", format_bytes(machine.device.memory_bytes)),
        ("host", _join_words(machine.host.cpu, cores)),
        ("host memory", format_bytes(machine.host.memory_bytes)),
        ("system", format_plain(machine.host.os)),
        ("precision", _join_words(machine.precision, machine.precision_why)),
        ("attention", format_plain(machine.attention)),
        ("parameters", format_count(machine.num_parameters)),
        ("trained parameters", format_count(machine.num_trained_parameters)),
        ("commit", format_plain(machine.git.commit) + changes),
        *((f"version of {name}", format_plain(version)) for name, version in machine.versions.items()),
    ]


def _join_words(*words: str | None) -> str:
    """Join the known words by commas; "n/a" if none is known."""
    return ", ".join(word for word in words if word) or format_plain(None)


def build_run_definitions_section(keys: Sequence[str]) -> Section:
    """Build the section: meanings of the scores `keys` and of the terms on the page."""
    rows = [DEFINITIONS[key] for key in keys if key in DEFINITIONS]
    return build_section("Definitions", Table("Terms on this page.", ("term", "meaning"), rows + _WORDS, folded=True))


_WORDS = [
    ("before fine-tuning", "The evaluation at step 0: the model as it was loaded, on the same examples."),
    (
        "95 % interval",
        "From a bootstrap over the examples, where the evaluation made one; else, and where all examples are right "
        "or all wrong, Wilson's score interval. It covers the choice of the examples, not that of the seed.",
    ),
    ("loss", "Negative log-likelihood in nats per target token of the whole global batch (natural logarithm)."),
    ("effective learning rate", "Learning rate times the optimizer's parameter scaling."),
    ("cut off", "Predictions that reached the generation cap before they ended."),
    ("padding", "Share of padded positions in what the model computed; tokens per second does not count them."),
    ("answer lost", "An example whose input held a gold answer before truncation and holds none after it."),
]
