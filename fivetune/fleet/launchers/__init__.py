"""Launchers: how a run gets onto the nodes of a cluster, one per file.

A launcher's file holds one subclass of `Launcher`, whose fields are its options (`--partition gpu`). In: a JobPlan.
Out: the files that the cluster reads, and the job's id after they are submitted. On each node the job runs
`fivetune train`, which starts that node's processes with torchrun (`fivetune/distributed/processes/`).
"""

from __future__ import annotations

import shlex
import subprocess
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import yaml
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from fivetune import plugins
from fivetune.errors import ConfigError, FiveTuneEnvironmentError, suggest_names
from fivetune.plugins import Options
from fivetune.redaction import redact_secrets

__all__ = ["JobPlan", "JobRun", "Launcher", "SharedWork", "SubmissionError"]

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""Switches by which the hub's libraries read their caches only."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """One run of a job.

    Args:
        run_dir: the run directory, relative to the job's working directory or absolute.
        source: the recipe, and `settings`: the dotted words that follow it.
        flags: flags of `fivetune train`, until this job's run exists; a later start has --resume instead.
    """

    name: str
    run_dir: str
    source: str
    settings: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedWork:
    """A command of FiveTune that several jobs share: each does a shard, the last one joins what they have done.

    Args:
        words: after `fivetune`, without --shard.
        paths: files and folders in them, which all nodes must see.
        numbers: numbers, from 1, of the shards to start; `count`: how many shards the work has.
    """

    words: tuple[str, ...]
    paths: tuple[str, ...]
    numbers: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What a launcher starts, on `nnodes` nodes with `nproc` processes each: one run, an array of runs, or of shards.

    Args:
        runs: () for shards.
        program: the words that start FiveTune on a node.
        directory: the working directory.
        folder: absolute folder of the job's files and logs.
        version: version of FiveTune.
        launch_id: name of this launch alone: a later one with the same name is another job.
        page: words after `fivetune` that run once after all runs of an array; () for none.
        work: what the shards do; None for runs.
        folders: absolute folders outside of `directory` that the job reads or writes.
        caches: variables of the environment that name caches, and their folders.
    """

    name: str
    runs: tuple[JobRun, ...]
    nnodes: int
    nproc: int
    program: tuple[str, ...]
    directory: Path
    folder: Path
    version: str
    launch_id: str
    page: tuple[str, ...] = ()
    work: SharedWork | None = None
    folders: tuple[Path, ...] = ()
    caches: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        for text in (self.name, str(self.directory), str(self.folder), *self.list_paths()):
            if not text.isprintable():
                raise ConfigError(
                    f"run.dir: {text!r}: has a character that cannot be printed, such as a line break. A job's files "
                    "hold this name. Choose another."
                )
        words_of_all = [shlex.join(run.settings) for run in self.runs]
        for words in [*words_of_all, shlex.join(self.work.words if self.work else ())]:
            if (hidden := redact_secrets(words)) != words:
                raise ConfigError(
                    f"{hidden}: holds a password or token, which the job's file would show. Move the setting into the "
                    "recipe, or the secret into a variable of the nodes' environment."
                )

    @property
    def is_array(self) -> bool:
        return self.work is not None or len(self.runs) > 1

    def list_paths(self) -> list[str]:
        """List the paths that the job writes, and those that shards read, as its words have them."""
        return [*self.work.paths] if self.work else [run.run_dir for run in self.runs]

    def describe(self) -> str:
        """Describe the job in a sentence, for the head of its file."""
        nodes = "1 node" if self.nnodes == 1 else f"{self.nnodes} nodes"
        each = "1 process" if self.nproc == 1 else f"{self.nproc} processes"
        what = f"{len(self.runs)} runs of {self.name}, each" if self.is_array else f"The run {self.name}"
        if self.work:
            what = f"{len(self.work.numbers)} of {self.work.count} shards of {self.name}, each"
        return f"{what} on {nodes} with {each}{' each' if self.nnodes > 1 else ''}"


class SubmissionError(FiveTuneEnvironmentError):
    """A cluster accepted nothing of a job."""


class Launcher(Options):
    """Interface of a launcher, with the options that all have."""

    nodes: PositiveInt | None = Field(default=None, description="nodes; default: launch.nnodes")
    gpus: NonNegativeInt | None = Field(
        default=None, description="GPUs per node, one process each; default: launch.nproc; none with --device cpu"
    )
    cpus: PositiveInt | None = Field(default=None, description="CPU cores per node")
    memory: Annotated[str, Field(pattern=r"^[0-9]+[KMGT]$")] | None = Field(
        default=None, description="memory per node, such as 64G"
    )

    supports_arrays: ClassVar[bool] = True  # of runs
    supports_shards: ClassVar[bool] = True
    shares_files: ClassVar[bool] = True  # whether the nodes see the files of this machine

    @abstractmethod
    def render(self, plan: JobPlan) -> dict[str, str]:
        """Render the job's files by name, the one to submit first."""

    @abstractmethod
    def submit(self, folder: Path) -> str:
        """Submit the files in `folder`; returns the id of the job. Raises SubmissionError if nothing was accepted."""

    def explain_next_steps(self, job: str) -> list[str]:
        """Commands with which a user looks at a submitted job, or ends it."""
        return []


def load_launcher(name: str, values: Mapping[str, object]) -> Launcher:
    """Load a launcher with its options. Raises ConfigError for an option that it does not have, or a wrong value."""
    kind = plugins.load_plugin("launchers", name)
    for option, value in values.items():
        if option not in kind.model_fields:
            flags = [option.replace("_", "-") for option in kind.model_fields]
            flag = option.replace("_", "-")
            owners: list[str] = []
            for other in plugins.list_plugins("launchers"):
                if option in plugins.load_plugin("launchers", other).model_fields:
                    owners.append(other)
            hint = suggest_names(flag, flags)
            if owners:
                hint = f"It is an option of {' and '.join(owners)}. Leave it out, or use one of: {', '.join(flags)}."
            raise ConfigError(f"--{flag} {value}: {name} has no such option. {hint}")
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0])
        limits = first.get("ctx", {})
        allowed = ""
        if "gt" in limits or "ge" in limits:  # of whole numbers
            allowed = f" {limits.get('ge', limits.get('gt', 0) + 1)} or more"
        elif first["type"].startswith("int_"):
            allowed = " a whole number"
        raise ConfigError(
            f"--{option.replace('_', '-')} {values.get(option)}: is not allowed. Give{allowed}: "
            f"{kind.model_fields[option].description}."
        ) from None


def build_choice_lines(run: str, marker: str) -> list[str]:
    """Build the shell lines that set `flags` to --resume once this job's run exists.

    A run that an earlier launch has left is not continued, but meets the job's own flags. All nodes decide alike:
    rank 0 creates the run directory after all nodes have looked and met.

    Args:
        run, marker: words of the shell: the run directory, and the file that keeps what was in it before.
    """
    return [
        "# The job was started again if the run directory holds another run than at its first start.",
        f"""find_start() {{ grep -s '"started":' {run}/status.json || true; }}""",
        f"before={marker}",
        'mkdir -p "${before%/*}"',
        '[ -e "$before" ] || { find_start > "$before.$HOSTNAME"; mv "$before.$HOSTNAME" "$before"; }',
        '[ "$(find_start)" = "$(cat "$before")" ] || flags=(--resume)',
    ]


def build_start_lines(plan: JobPlan, shard: str = "") -> list[str]:
    """Build the shell lines that start the only run of a job, or continue it on a machine that was started again.

    Args:
        shard: word of the shell: the number of the shard, from 1.
    """
    if plan.work:
        return [f'exec python -m fivetune {shlex.join(plan.work.words)} --shard "{shard}/{plan.work.count}"']
    run = plan.runs[0]
    marker = f"{Path(run.run_dir).parent / plan.folder.name}/{plan.launch_id}.before"
    return [
        f"flags=({shlex.join(run.flags)})",
        *build_choice_lines(shlex.quote(run.run_dir), shlex.quote(marker)),
        f'exec python -m fivetune {shlex.join(["train", run.source, *run.settings])} "${{flags[@]}}"',
    ]


def format_manifest(plan: JobPlan, manifest: Mapping[str, Any], *, command: str) -> str:
    """Format a manifest as YAML, with scripts as blocks, below a line that describes the job."""
    text = yaml.dump(dict(manifest), Dumper=_BlockDumper, sort_keys=False, allow_unicode=True)
    return f"# {plan.describe()}. Written by fivetune launch {plan.version}.\n# Submit it with: {command}\n{text}"


class _BlockDumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and equal values in full."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _represent_text)


def submit_file(words: Sequence[str], *, tool: str) -> str:
    """Run a cluster's own command; returns what it printed. Raises SubmissionError with its reason."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SubmissionError(
            f"{words[0]}: not found on this machine; {tool} provides it. Run fivetune launch where it is installed, or "
            f"print the file with --dry-run and submit it with: {shlex.join(words)}"
        ) from None
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise SubmissionError(f"{shlex.join(words)}: refused: {reason.rstrip('.')}.")
    return done.stdout.strip()
