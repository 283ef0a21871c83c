"""SLURM: an sbatch file with one task per node, which starts that node's processes with torchrun.

Before its time limit the job is warned: the run saves at a step boundary, the job is queued again and continues.
Several runs are an array of jobs.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fivetune.launchers import OFFLINE, JobPlan, JobTask, Launcher, PositiveInt, submit_file

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
        files = {"job.sbatch": _join_lines(self._list_lines(plan))}
        if plan.page:
            files["page.sbatch"] = _join_lines(self._list_page_lines(plan))
        return files

    def submit(self, folder: Path) -> str:
        job = _submit(["sbatch", "--parsable", str(folder / "job.sbatch")])
        if (folder / "page.sbatch").is_file():
            _submit(["sbatch", "--parsable", f"--dependency=afterany:{job}", str(folder / "page.sbatch")])
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
            *_list_tasks(plan),
            "",
            *self._list_start(plan),
        ]

    def _list_directives(self, plan: JobPlan) -> list[str]:
        """List the options of sbatch; srun starts one task on each node, and that starts one process per device."""
        last = len(plan.tasks) - 1
        limit = f"%{self.at_once}" if self.at_once else ""
        log = f"{plan.folder}/%A_%a.log" if plan.is_array else f"{plan.folder}/%j.log"
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
        found = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
        found.append("#SBATCH --requeue" if self.requeue else "#SBATCH --no-requeue")
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
                f"export PET_MASTER_PORT=$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))",
            ]
        return lines or ["# Nodes may download from the hub."]

    def _list_start(self, plan: JobPlan) -> list[str]:
        log = f"{plan.folder}/%A_%a-node%n.log" if plan.is_array else f"{plan.folder}/%j-node%n.log"
        cpus = f" --cpus-per-task={self.cpus}" if self.cpus else ""
        lines = [
            "# A job that was queued again continues its run.",
            'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -d "$run" ]; then',
            "  flags=(--resume)",
        ]
        if self.stage:
            lines += ["else  # the data are tokenised once, before the processes of all nodes wait for them"]
            lines += ['  "${fivetune[@]}" prepare "${recipe[@]}" --quiet || exit']
        lines += ["fi", "", "# srun torchrun: one task per node; fivetune train starts torchrun there. A log per node."]
        return [
            *lines,
            f"srun --nodes={plan.nnodes} --ntasks-per-node=1{cpus} --wait={SECONDS_TO_END} --open-mode=append \\",
            f"  --output={shlex.quote(log)} \\",
            '  "${fivetune[@]}" train "${recipe[@]}" "${flags[@]}" &',
            "pid=$!",
            "",
            "# The warning before the time limit: all processes finish their step, save, and exit with "
            f"{SAVED_CODE} (128 + SIGUSR1).",
            "trap 'kill -USR1 \"$pid\"' USR1",
            "trap : TERM  # srun passes it on; this script waits until the run is saved",
            'wait "$pid"',
            'while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done  # a signal ends a wait',
            'wait "$pid"',
            "code=$?",
            *self._list_requeue(),
            'exit "$code"',
        ]

    def _list_requeue(self) -> list[str]:
        if not self.requeue:
            return []
        return [
            f"# A preempted job has saved as well ({TERMINATED_CODE}, 128 + SIGTERM); a cancelled one stays ended.",
            "preempted() { scontrol show job \"$SLURM_JOB_ID\" | grep -q 'PreemptTime=[0-9]'; }",
            f'if [ "$code" -eq {SAVED_CODE} ] || {{ [ "$code" -eq {TERMINATED_CODE} ] && preempted; }}; then',
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
        ]

    def _list_page_lines(self, plan: JobPlan) -> list[str]:
        given = {"partition": self.partition, "account": self.account, "qos": self.qos}
        return [
            "#!/bin/bash",
            f"# The page that compares the runs of {plan.name}, after all of them have ended.",
            f"#SBATCH --job-name={plan.name}-page",
            f"#SBATCH --chdir={plan.directory}",
            f"#SBATCH --output={plan.folder}/page.log",
            "#SBATCH --ntasks=1",
            *(f"#SBATCH --{name}={value}" for name, value in given.items() if value),
            "",
            *self.setup,
            shlex.join([*plan.program, *plan.page]),
        ]


def _list_tasks(plan: JobPlan) -> list[str]:
    """List the lines that set `run`, `recipe` and `flags`: of the only run, or of the array's number."""
    if not plan.is_array:
        return _list_task(plan.tasks[0])
    lines = ['case "$SLURM_ARRAY_TASK_ID" in']
    for number, task in enumerate(plan.tasks):
        lines += [f"  {number})", *(f"    {line}" for line in _list_task(task)), "    ;;"]
    return [*lines, "esac"]


def _list_task(task: JobTask) -> list[str]:
    return [
        f"run={shlex.quote(task.run_dir)}",
        f"recipe=({shlex.join([task.source, *task.settings])})",
        f"flags=({shlex.join(task.flags)})",
    ]


def _submit(words: Sequence[str]) -> str:
    """Submit with sbatch; returns the job's id, without the name of its cluster."""
    return submit_file(words, tool="SLURM").partition(";")[0]


def _join_lines(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
