"""A real SLURM of two nodes on this machine: munged, slurmctld and two slurmd, started and stopped here.

At the end all jobs are cancelled and their processes have ended, or an AssertionError says so.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from reliability.faults import train
from reliability.ranks import Ranks, find_free_port
from reliability.warm import adopt_orphans, check_success, is_alive, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
CONFIG = """
ClusterName=ci
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=8000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=8000
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=10 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=n1,n2 MaxTime=10 State=UP PriorityTier=9
"""


def explain_absence() -> str:
    """Why no cluster can be started here; empty if one can."""
    missing = [name for name in PROGRAMS if not find_program(name)]
    if missing:
        return f"no {', '.join(missing)} (Debian: apt-get install --no-install-recommends slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "the daemons of SLURM need root"


def find_program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextmanager
def start_cluster(folder: Path) -> Generator[dict[str, str]]:
    """Start the cluster; yields the variables of its commands' environment."""
    ports = [find_free_port() for _ in range(3)]
    (folder / "state").mkdir()
    for node in ("n1", "n2"):
        (folder / f"spool.{node}").mkdir()
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=socket.gethostname(), folder=folder, ports=ports))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    folder.chmod(0o755)
    environ = {**os.environ, "SLURM_CONF": str(config)}
    daemons = [
        [
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
        ],
        ["slurmctld", "-D", "-f", str(config)],
        ["slurmd", "-D", "-N", "n1", "-f", str(config)],
        ["slurmd", "-D", "-N", "n2", "-f", str(config)],
    ]  # fmt: skip
    running: list[subprocess.Popen[bytes]] = []
    try:
        for words in daemons:
            program = find_program(words[0])
            assert program
            with (folder / "daemons.log").open("ab") as log:
                running.append(
                    subprocess.Popen(
                        [program, *words[1:]], stdout=log, stderr=log, env=environ, preexec_fn=adopt_orphans
                    )
                )
            if words[0] == "munged":
                wait_until((folder / "munge.socket").exists, 10)
        wait_until(lambda: _count_idle_nodes(environ) == 2, 30)
        yield {
            "SLURM_CONF": str(config),
            "PET_MASTER_ADDR": "127.0.0.1",  # n1 and n2 are names in this file only
            # Two clusters number their jobs alike: ports by job number would collide. From 32768 on they are ephemeral.
            "PET_MASTER_PORT": str(random.randint(20_000, 31_999)),
        }
    finally:
        try:
            subprocess.run(["scancel", "--user=root"], env=environ, check=True)
            wait_until(lambda: not _list_children(running[2:]), 40)
        finally:
            _stop(running)


def is_started_early(job: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a job that is queued again, which would wait for two minutes, could be told to start soon.

    Not at once: in the second in which SLURM has ended a job it refuses to start it ("credential revoked").
    """
    words = ["scontrol", "update", f"JobId={job}", "StartTime=now+2"]
    return subprocess.run(words, capture_output=True, env=environ, check=False).returncode == 0


def train_on_two_ranks(recipe: str, run_dir: str) -> None:
    """The same run without a cluster and without interruption."""
    check_success(Ranks(train, recipe, "--launch.nproc", "2", "--run.dir", run_dir).finish())


def _list_children(daemons: Sequence[subprocess.Popen[bytes]]) -> list[psutil.Process]:
    """List the running processes that these daemons have started: those of slurmd are jobs."""
    found = [child for one in daemons if one.poll() is None for child in psutil.Process(one.pid).children(True)]
    return [child for child in found if is_alive(child)]


def _stop(daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stop the daemons, then kill what they have left behind. Raises AssertionError if there is something."""
    children = _list_children(daemons)
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in daemons:
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    names = [process.name() for process in children if is_alive(process)]
    for process in children:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not names, f"processes of the cluster still run: {names}"


def _count_idle_nodes(environ: dict[str, str]) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--partition=low", "--format=%t"],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    return done.stdout.split().count("idle")
