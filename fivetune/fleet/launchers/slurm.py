"""SLURM: an sbatch file with one task per node, which starts that node's processes with torchrun.

Before its time limit the job is warned: the run saves at a step boundary, the job is queued again and continues.
Several runs, and shards of a prediction or of data, are an array of jobs. A job may work in a container.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

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
KILLED_CODE = 128 + 9
MAX_KILLED = 3  # times that a shard starts again after its process was killed, as for want of memory
SECONDS_TO_END = 60  # for the other nodes after the first one has ended
STRUCTURE = r"--(array|nodes|ntasks|ntasks-per-node|chdir)\b(?!-)|-[aNnD]"  # sbatch's options that the job relies on
PAGE_TIME = "00:10:00"  # limit of the job that compares the runs of an array, which takes seconds


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
    at_once: PositiveInt | None = Field(default=None, description="runs or shards of an array at the same time")
    stage: bool = Field(default=True, description="tokenise the data before the processes start")
    offline: bool = Field(default=True, description="nodes read the hub's cache only")
    modules: tuple[str, ...] = Field(default=(), description="modules that the job loads, such as cuda/12")
    container: str | None = Field(
        default=None, description="image with FiveTune and its Python, in which the job works: FILE.sif, docker://NAME"
    )
    container_runtime: Literal["apptainer", "pyxis"] = Field(
        default="apptainer", description="of the container: apptainer, or pyxis, srun's option --container-image"
    )
    bind: tuple[Annotated[str, Field(pattern=r"^/[^,]*$")], ...] = Field(
        default=(), description="another folder that the container sees, as /FOLDER or /FOLDER:/PLACE"
    )
    setup: tuple[str, ...] = Field(default=(), description="shell line before the start, such as 'module load cuda'")
    sbatch: tuple[str, ...] = Field(default=(), description="any other option of sbatch, such as --sbatch=--exclusive")

    @model_validator(mode="after")
    def _refuse_options_without_container(self) -> Slurm:
        for name in ("container_runtime", "bind"):
            if name in self.model_fields_set and not self.container:
                raise ConfigError(f"--{name.replace('_', '-')}: has no effect without --container. Add it.")
        return self

    def render(self, plan: JobPlan) -> dict[str, str]:
        lines = {"job.sbatch": self._list_lines(plan)}
        if plan.page:
            lines["page.sbatch"] = self._list_page_lines(plan)
        return {name: "\n".join([*own, ""]) for name, own in lines.items()}

    def submit(self, folder: Path) -> str:
        image = self.container or ""
        if image.endswith((".sif", ".sqsh")) and "://" not in image and not Path(image).is_file():
            raise SubmissionError(f"--container {image}: there is no such file. Build it, or correct the name.")
        try:
            job = _submit([str(folder / "job.sbatch")])
        except SubmissionError as error:
            if "generic resource" not in str(error):
                raise
            raise SubmissionError(
                f"{error} The cluster has no such GPUs: sinfo --Format=nodehost,gres lists what it has. Correct --gpus "
                "and --gpu-type, or add --device cpu."
            ) from None
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
        work = plan.work
        what = _list_runs(plan)
        if work:
            what = [f'work=({shlex.join(work.words)} --shard "$SLURM_ARRAY_TASK_ID/{work.count}")']
        return [
            "#!/bin/bash",
            f"# {plan.describe()}. Written by fivetune launch {plan.version}.",
            "# Submit it with: sbatch job.sbatch",
            *self._list_directives(plan),
            "",
            *self._list_environment(plan),
            "",
            *self._list_program(plan, has_gpus=bool(self.gpus)),
            *what,
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
        numbers = f"0-{len(plan.runs) - 1}"
        if plan.work:
            numbers = ",".join(map(str, plan.work.numbers))
            if len(plan.work.numbers) == plan.work.count:
                numbers = f"1-{plan.work.count}"
        limit = f"%{self.at_once}" if self.at_once else ""
        log = _build_log_path(plan.folder, "%A_%a.log" if plan.is_array else "%j.log")
        options = {
            "job-name": plan.name,
            "chdir": plan.directory,
            "output": log,
            "open-mode": "append",
            "array": f"{numbers}{limit}" if plan.is_array else None,
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
            if re.match(STRUCTURE, option):
                raise ConfigError(
                    f"--sbatch {option}: changes how the job starts its processes. Leave it out: FiveTune writes this "
                    "option, from --shards, --seeds and --nodes."
                )
        return [*found, *(f"#SBATCH {option}" for option in self.sbatch)]

    def _list_environment(self, plan: JobPlan) -> list[str]:
        lines = self._list_setup(plan)
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
        command = '"${work[@]}"'
        first: list[str] = []
        if not plan.work:
            command = 'train "${recipe[@]}" "${flags[@]}"'
            first = [*build_choice_lines('"$run"', marker), ""]
        lines = [
            *first,
            "wait_for() {  # a signal ends a wait, but not the process",
            '  wait "$1"',
            '  while kill -0 "$1" 2>/dev/null; do wait "$1"; done',
            '  wait "$1"',
            "}",
            *self._list_end(is_shard=plan.work is not None),
            "",
            "# The warning before the time limit: all processes finish their step, save, and exit with "
            f"{SAVED_CODE} (128 + SIGUSR1).",
            f"trap 'kill -USR1 \"$pid\" 2>/dev/null || end {SAVED_CODE}' USR1",
        ]
        # One process, which TERM ends at once: it has nothing to save.
        step = 'srun --nodes=1 --ntasks=1 "${container[@]}" ' if self._is_pyxis else ""
        if self.stage and not plan.work:
            lines += [
                f"trap 'kill \"$pid\" 2>/dev/null || end {TERMINATED_CODE}' TERM",
                "",
                "# The data are tokenised once, before the processes of all nodes wait for them.",
                'if [ "${flags[0]:-}" != --resume ]; then',
                f'  {step}"${{fivetune[@]}}" prepare "${{recipe[@]}}" --quiet &',
                "  pid=$!",
                '  wait_for "$pid" || end "$?"',
                "fi",
                "",
            ]
        inside = '"${container[@]}" ' if self._is_pyxis else ""
        return [
            *lines,
            "trap : TERM  # srun passes it on; this script waits until the run is saved",
            "# srun torchrun: one task per node, which starts torchrun for several processes. A log per node.",
            f"srun --nodes={plan.nnodes} --ntasks-per-node=1{cpus} --wait={SECONDS_TO_END} --open-mode=append \\",
            f"  --output={shlex.quote(log)} \\",
            f'  {inside}"${{fivetune[@]}}" {command} &',
            "pid=$!",
            'wait_for "$pid"',
            'end "$?"',
        ]

    def _list_end(self, *, is_shard: bool) -> list[str]:
        if not self.requeue:
            return ['end() { exit "$1"; }']
        again = f'[ "$1" -eq {SAVED_CODE} ] || {{ [ "$1" -eq {TERMINATED_CODE} ] && preempted; }}'
        if is_shard:
            again += f' ||\n    {{ [ "$1" -eq {KILLED_CODE} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {MAX_KILLED} ]; }}'
        return [
            f"# A preempted job has saved as well ({TERMINATED_CODE}, 128 + SIGTERM); a cancelled one stays ended.",
            "preempted() { scontrol show job \"$SLURM_JOB_ID\" | grep -q 'PreemptTime=[0-9]'; }",
            "end() {",
            "  trap '' USR1",
            f"  if {again}; then",
            '    scontrol requeue "$SLURM_JOB_ID"',
            "  fi",
            '  exit "$1"',
            "}",
        ]

    def _list_page_lines(self, plan: JobPlan) -> list[str]:
        step = 'srun --ntasks=1 "${container[@]}" ' if self._is_pyxis else ""
        options = {
            "job-name": f"{plan.name}-page",
            "chdir": plan.directory,
            "output": _build_log_path(plan.folder, "page.log"),
            "ntasks": 1,
            "time": min(self.time or PAGE_TIME, PAGE_TIME, key=_count_seconds),
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
        }
        return [
            "#!/bin/bash",
            f"# The page that compares the runs of {plan.name}, after all of them have ended.",
            *_list_sbatch_options(options),
            "",
            *self._list_setup(plan),
            *self._list_program(plan, has_gpus=False),
            f'{step}"${{fivetune[@]}}" {shlex.join(plan.page)}',
        ]

    @property
    def _is_pyxis(self) -> bool:
        return self.container is not None and self.container_runtime == "pyxis"

    def _list_setup(self, plan: JobPlan) -> list[str]:
        lines: list[str] = []
        if self.modules:
            names = " ".join(self.modules).split()
            lines += [
                "type module > /dev/null 2>&1 || . /etc/profile  # scripts may start without it",
                f"module load {shlex.join(names)} || exit {FiveTuneEnvironmentError.exit_code}",
            ]
        if self.container and plan.caches:
            lines.append("# The container may have another home.")
            lines.append(f"export {' '.join(f'{name}={shlex.quote(path)}' for name, path in plan.caches.items())}")
        return [*lines, *self.setup]

    def _list_program(self, plan: JobPlan, *, has_gpus: bool) -> list[str]:
        """List the lines that set `fivetune`, and for pyxis `container`, the options of srun."""
        if not self.container:
            return [f"fivetune=({shlex.join(plan.program)})"]
        inside = ["python", "-m", "fivetune"]
        folders = [str(plan.directory), *map(str, plan.folders)]
        for folder in folders:
            if re.search("[,:]", folder):
                raise ConfigError(f"{folder}: has a comma or a colon, and cannot be bound into a container. Rename it.")
        folders += self.bind
        if self.container_runtime == "apptainer":
            gpus = ["--nv"] if has_gpus else []
            words = ["apptainer", "exec", *gpus, "--bind", ",".join(folders), "--pwd", str(plan.directory)]
            return [f"fivetune=({shlex.join([*words, self.container, *inside])})"]
        if self.container.endswith(".sif"):
            raise ConfigError(f"--container {self.container}: pyxis reads FILE.sqsh or an image's name. Give one.")
        mounts = ",".join(path if ":" in path else f"{path}:{path}" for path in folders)
        options = [f"--container-image={self.container}", f"--container-mounts={mounts}"]
        return [
            f"container=({shlex.join([*options, f'--container-workdir={plan.directory}'])})",
            f"fivetune=({shlex.join(inside)})",
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
