"""SLURM: an sbatch file with one task per node, which starts that node's processes with torchrun.

Before its time limit the job is warned: the run saves at a step boundary, the job is queued again and continues.
Several runs are an array of jobs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fivetune.errors import ConfigError, FiveTuneEnvironmentError
from fivetune.fleet.launchers import (
    OFFLINE,
    JobPlan,
    JobRun,
    Launcher,
    PositiveInt,
    SubmissionError,
    build_choice_lines,
    submit_file,
)

FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below the ports that systems give to outgoing connections
SAVED_CODE = 128 + 10  # the exit code of a run that SIGUSR1 has stopped after saving
TERMINATED_CODE = 128 + 15
SECONDS_TO_END = 60  # for the other nodes after the first one has ended


class Slurm(Launcher):
    """SLURM's sbatch."""

    partition: str | None = Field(default=None, description="partition")
    account: str | None = Field(default=None, description="account that is charged")
    qos: str | None = Field(default=None, description="quality of service")
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")] | None = Field(
        default=None, description="time limit, such as 04:00:00 or 1-12:00:00; the job is queued again at its end"
    )
    constraint: str | None = Field(default=None, description="features that the nodes must have")
    gpu_type: str | None = Field(default=None, description="type of the GPUs, such as a100")
    warn_seconds: PositiveInt = Field(
        default=120, description="seconds before the time limit at which the run saves and stops"
    )
    requeue: bool = Field(default=True, description="queue the job again after its time limit or a preemption")
    at_once: PositiveInt | None = Field(default=None, description="runs of an array that train at the same time")
    stage: bool = Field(default=True, description="tokenise the data before the processes start")
    offline: bool = Field(default=True, description="nodes read the hub's cache only")
    setup: tuple[str, ...] = Field(default=(), description="shell line before the start, such as 'module load cuda'")
    sbatch: tuple[str, ...] = Field(default=(), description="any other option of sbatch, such as --sbatch=--exclusive")

    def render(self, plan: JobPlan) -> dict[str, str]:
        lines = {"job.sbatch": self._list_lines(plan)}
        if plan.page:
            lines["page.sbatch"] = self._list_page_lines(plan)
        return {name: "\n".join([*own, ""]) for name, own in lines.items()}

    def submit(self, folder: Path) -> str:
        job = _submit([str(folder / "job.sbatch")])
        # afterany: the page also tells which runs have failed.
        page = [f"--dependency=afterany:{job}", str(folder / "page.sbatch")]
        if (folder / "page.sbatch").is_file():
            try:
                _submit(page)
            except SubmissionError as error:
                raise FiveTuneEnvironmentError(
                    f"{error} The runs were submitted as job {job}, the job of their page was not. Submit it with: "
                    f"{shlex.join(['sbatch', *page])}"
                ) from None
        return job

    def explain_next_steps(self, job: str) -> list[str]:
        return [f"squeue --job {job}", f"scancel {job}"]

    def _list_lines(self, plan: JobPlan) -> list[str]:
        return [
            "#!/bin/bash",
            f"# {plan.describe()}. Written by fivetune launch {plan.version}.",
            "# Submit it with: sbatch job.sbatch",
            *self._list_directives(plan),
            "",
            *self._list_environment(plan),
            "",
            f"fivetune=({shlex.join(plan.program)})",
            *_list_runs(plan),
            "",
            *self._list_start(plan),
        ]

    def _list_directives(self, plan: JobPlan) -> list[str]:
        """List the options of sbatch; srun starts one task on each node, and that starts one process per device."""
        if self.time and (limit := _count_seconds(self.time)) <= self.warn_seconds:
            raise ConfigError(
                f"--time {self.time}: is {limit} s, and the run would save and stop at once, because it is warned "
                f"{self.warn_seconds} s before (--warn-seconds). Give a longer time, or a shorter warning."
            )
        last = len(plan.runs) - 1
        limit = f"%{self.at_once}" if self.at_once else ""
        log = _build_log_path(plan.folder, "%A_%a.log" if plan.is_array else "%j.log")
        options = {
            "job-name": plan.name,
            "chdir": plan.directory,
            "output": log,
            "open-mode": "append",
            "array": f"0-{last}{limit}" if plan.is_array else None,
            "nodes": plan.nnodes,
            "ntasks-per-node": 1,
            "gpus-per-node": ":".join(filter(None, (self.gpu_type, str(self.gpus)))) if self.gpus else None,
            "cpus-per-task": self.cpus,
            "mem": self.memory,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "signal": f"B:USR1@{self.warn_seconds}",
        }
        found = _list_sbatch_options(options)
        found.append("#SBATCH --requeue" if self.requeue else "#SBATCH --no-requeue")
        for option in self.sbatch:
            if not option.startswith("-") or not option.isprintable():
                raise ConfigError(
                    f"--sbatch {option!r}: is not an option. Give one line, such as --sbatch=--exclusive."
                )
        return [*found, *(f"#SBATCH {option}" for option in self.sbatch)]

    def _list_environment(self, plan: JobPlan) -> list[str]:
        lines = [*self.setup]
        if self.offline:
            lines += ["# Nodes read models and data sets of the hub from its cache."]
            lines += [f"export {' '.join(f'{name}={value}' for name, value in OFFLINE.items())}"]
        if plan.nnodes > 1:
            lines += [
                "# Where the nodes meet: the first node, and a port of this job alone. torchrun reads these variables.",
                'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                'export PET_MASTER_ADDR="${PET_MASTER_ADDR:-$head}"',
                f'export PET_MASTER_PORT="${{PET_MASTER_PORT:-$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))}}"',
            ]
        return lines or ["# Nodes may download from the hub."]

    def _list_start(self, plan: JobPlan) -> list[str]:
        log = _build_log_path(plan.folder, "%A_%a-node%n.log" if plan.is_array else "%j-node%n.log")
        cpus = f" --cpus-per-task={self.cpus}" if self.cpus else ""
        marker = f"{shlex.quote(str(plan.folder))}/{plan.launch_id}-$SLURM_JOB_ID.before"
        lines = [
            *build_choice_lines('"$run"', marker),
            "",
            "wait_for() {  # a signal ends a wait, but not the process",
            '  wait "$1"',
            '  while kill -0 "$1" 2>/dev/null; do wait "$1"; done',
            '  wait "$1"',
            "}",
            *self._list_end(),
            "",
            "# The warning before the time limit: all processes finish their step, save, and exit with "
            f"{SAVED_CODE} (128 + SIGUSR1).",
            f"trap 'kill -USR1 \"$pid\" 2>/dev/null || end {SAVED_CODE}' USR1",
        ]
        # One process, which TERM ends at once: it has nothing to save.
        if self.stage:
            lines += [
                f"trap 'kill \"$pid\" 2>/dev/null || end {TERMINATED_CODE}' TERM",
                "",
                "# The data are tokenised once, before the processes of all nodes wait for them.",
                'if [ "${flags[0]:-}" != --resume ]; then',
                '  "${fivetune[@]}" prepare "${recipe[@]}" --quiet &',
                "  pid=$!",
                '  wait_for "$pid" || end "$?"',
                "fi",
                "",
            ]
        return [
            *lines,
            "trap : TERM  # srun passes it on; this script waits until the run is saved",
            "# srun torchrun: one task per node; fivetune train starts torchrun there. A log per node.",
            f"srun --nodes={plan.nnodes} --ntasks-per-node=1{cpus} --wait={SECONDS_TO_END} --open-mode=append \\",
            f"  --output={shlex.quote(log)} \\",
            '  "${fivetune[@]}" train "${recipe[@]}" "${flags[@]}" &',
            "pid=$!",
            'wait_for "$pid"',
            'end "$?"',
        ]

    def _list_end(self) -> list[str]:
        if not self.requeue:
            return ['end() { exit "$1"; }']
        return [
            f"# A preempted job has saved as well ({TERMINATED_CODE}, 128 + SIGTERM); a cancelled one stays ended.",
            "preempted() { scontrol show job \"$SLURM_JOB_ID\" | grep -q 'PreemptTime=[0-9]'; }",
            "end() {",
            "  trap '' USR1",
            f'  if [ "$1" -eq {SAVED_CODE} ] || {{ [ "$1" -eq {TERMINATED_CODE} ] && preempted; }}; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "  fi",
            '  exit "$1"',
            "}",
        ]

    def _list_page_lines(self, plan: JobPlan) -> list[str]:
        options = {
            "job-name": f"{plan.name}-page",
            "chdir": plan.directory,
            "output": _build_log_path(plan.folder, "page.log"),
            "ntasks": 1,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
        }
        return [
            "#!/bin/bash",
            f"# The page that compares the runs of {plan.name}, after all of them have ended.",
            *_list_sbatch_options(options),
            "",
            *self.setup,
            shlex.join([*plan.program, *plan.page]),
        ]


def _list_sbatch_options(options: Mapping[str, object]) -> list[str]:
    """List the lines of sbatch's options. sbatch removes quotes as a shell does.

    >>> _list_sbatch_options({"job-name": "my run", "qos": None, "nodes": 2})
    ["#SBATCH --job-name='my run'", '#SBATCH --nodes=2']
    """
    lines: list[str] = []
    for name, value in options.items():
        if value is None:
            continue
        if not str(value).isprintable() or "\\" in str(value):
            raise ConfigError(
                f"--{name} {str(value)!r}: has a line break, a backslash or such. sbatch does not read it."
            )
        lines.append(f"#SBATCH --{name}={shlex.quote(str(value))}")
    return lines


def _build_log_path(folder: Path, pattern: str) -> str:
    """Build the path of a log; in sbatch's patterns a % of the folder is written twice."""
    return f"{str(folder).replace('%', '%%')}/{pattern}"


def _list_runs(plan: JobPlan) -> list[str]:
    """List the lines that set `run`, `recipe` and `flags`: of the only run, or of the array's number."""
    if not plan.is_array:
        return _list_run(plan.runs[0])
    lines = ['case "$SLURM_ARRAY_TASK_ID" in']
    for number, run in enumerate(plan.runs):
        lines += [f"  {number})", *(f"    {line}" for line in _list_run(run)), "    ;;"]
    return [*lines, "esac"]


def _list_run(run: JobRun) -> list[str]:
    return [
        f"run={shlex.quote(run.run_dir)}",
        f"recipe=({shlex.join([run.source, *run.settings])})",
        f"flags=({shlex.join(run.flags)})",
    ]


def _submit(words: Sequence[str]) -> str:
    """Submit with sbatch; returns the job's id, without the name of its cluster."""
    return submit_file(["sbatch", "--parsable", *words], tool="SLURM").partition(";")[0]


def _count_seconds(time: str) -> int:
    """Return the seconds of a time in one of SLURM's forms.

    >>> [_count_seconds(time) for time in ("90", "1:30", "04:00:00", "1-12", "1-12:30", "0-0:0:5")]
    [5400, 90, 14400, 129600, 131400, 5]
    """
    days, dash, rest = time.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:
        hours, minutes, seconds = [(0, numbers[0], 0), (0, *numbers), numbers][len(numbers) - 1]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
