"""What a run was made of: settings, machine, the way to make it again, and what the words mean.

In: the config, machine and status tables of a Run. Out: Sections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from fivetune.report.scores import DEFINITIONS
from fivetune.report.wording import discreet, plain, setting, size, whole
from fivetune.types import Run, Section, Table, Text
from fivetune.values import dig, flat

MAIN_SETTINGS = (
    ("model", "model.path"),
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


def about(run: Run) -> str:
    """One line under the title: model, task, device, start."""
    model = dig(run.config, "model", "path") or dig(run.config, "model", "config")
    fresh = " (random weights)" if dig(run.config, "model", "init") == "random" else ""
    device = dig(run.machine, "device", "name") or dig(run.machine, "device", "kind")
    started = str(dig(run.status, "started") or "")[:16].replace("T", " ")
    words = (PurePath(str(model)).name + fresh if model else None, dig(run.config, "task", "name"), device, started)
    return " \u00b7 ".join(str(word) for word in words if word)


def settings_section(run: Run) -> Section:
    """The settings that people ask for first, then all of them."""
    values = flat(run.config)
    if not values:
        return Section("Settings", (Text("The run directory holds no settings (config.yaml).", "note"),))
    first = tuple((words, setting(key, values[key])) for words, key in MAIN_SETTINGS if values.get(key) is not None)
    everything = tuple((key, setting(key, value)) for key, value in values.items())
    main = Table("The main settings.", ("setting", "value"), first)
    whole_table = Table(
        f"All {len(everything)} settings, as resolved. (config.yaml)", ("key", "value"), everything, folded=True
    )
    return Section("Settings", (main, whole_table))


def machine_section(run: Run) -> Section:
    """On what it ran, and how to make it again."""
    machine = run.machine
    if not machine:
        return Section(
            "Reproduce", (Text("The run directory holds no facts about the machine (machine.json).", "note"),)
        )
    parts = (Table("Where it ran. (machine.json)", ("fact", "value"), tuple(machine_facts(machine))), *_again(run))
    return Section("Reproduce", parts)


def machine_facts(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Facts about the machine and the software of a run, as text."""
    return [
        ("device", _joined(dig(machine, "device", "name"), dig(machine, "device", "kind"))),
        ("device memory", size(dig(machine, "device", "memory_bytes"))),
        ("host", _joined(dig(machine, "host", "cpu"), _cores(dig(machine, "host", "num_cores")))),
        ("host memory", size(dig(machine, "host", "memory_bytes"))),
        ("system", plain(dig(machine, "host", "os"))),
        ("precision, attention", _joined(dig(machine, "precision"), dig(machine, "attention"))),
        ("parameters", whole(dig(machine, "num_parameters"))),
        ("commit", _commit(machine)),
        *((f"version of {name}", plain(version)) for name, version in (dig(machine, "versions") or {}).items()),
    ]


def _joined(*words: Any) -> str:
    return ", ".join(str(word) for word in words if word) or plain(None)


def _cores(num: Any) -> str | None:
    return None if num is None else f"{whole(num)} cores"


def _commit(machine: Mapping[str, Any]) -> str:
    commit = dig(machine, "git", "commit")
    return plain(commit) + (" with uncommitted changes" if commit and dig(machine, "git", "dirty") else "")


def _again(run: Run) -> list[Text]:
    folder = str(dig(run.config, "run", "dir") or f"runs/{run.name}")
    command = dig(run.machine, "command")
    parts = [Text("How to make it again", "heading")]
    if command:
        parts += [Text("The command that started the run:"), Text(discreet(str(command)), "code")]
    again = f"fivetune train {folder}/config.yaml --run.dir {folder}-again"
    parts += [Text("The resolved settings, which need no recipe and no overrides:"), Text(discreet(again), "code")]
    rebuilt = f"fivetune report {folder}"
    return [*parts, Text("This page, from the run directory alone:"), Text(discreet(rebuilt), "code")]


def definitions_section(keys: Sequence[str]) -> Section:
    """What the words on the page mean, the scores that it shows first."""
    rows = [*(DEFINITIONS[key] for key in keys if key in DEFINITIONS), *_WORDS]
    return Section("Definitions", (Table("What the words on this page mean.", ("word", "meaning"), tuple(rows)),))


_WORDS = [
    ("before fine-tuning", "The evaluation at step 0: the model as it was loaded, on the same examples."),
    (
        "95 % interval",
        "From a bootstrap over the examples, where the evaluation made one; else, and where all examples are right "
        "or all wrong, Wilson's score interval. It covers the choice of the examples, not the luck of the seed.",
    ),
    ("loss", "Negative log-likelihood in nats per target token of the whole global batch (natural logarithm)."),
    ("effective learning rate", "The step that the optimizer really took, parameter scaling included."),
    ("cut off", "Predictions that reached the generation cap before they ended."),
    ("padding", "Padded positions among those that the model computed; tokens per second does not count them."),
    ("answer lost", "An example whose input held a gold answer before truncation and holds none after it."),
]
