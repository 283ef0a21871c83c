"""SkyPilot: a task for managed jobs on any cloud, with a bucket for the runs; a lost machine is replaced.

The working directory is copied to the machines. A task that starts again continues its run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fivetune.distributed.processes.nodes import DEFAULT_PORT
from fivetune.errors import ConfigError
from fivetune.fleet.launchers import JobPlan, Launcher, build_start_lines, format_manifest, submit_file


class Skypilot(Launcher):
    """SkyPilot's managed jobs."""

    gpu_type: str | None = Field(default=None, description="type of the GPUs, such as H100 (required with GPUs)")
    infra: str | None = Field(default=None, description="cloud, region or cluster, such as aws/us-east-1")
    spot: bool = Field(default=False, description="cheaper machines that the cloud may take back")
    bucket: Annotated[str, Field(pattern=r"^[a-z0-9]+://.")] | None = Field(
        default=None, description="bucket that keeps the runs, such as s3://name, mounted at ./runs"
    )
    image: str | None = Field(default=None, description="image of the machines, such as docker:pytorch/pytorch")
    retries: int = Field(default=3, ge=0, description="times that a failed task starts again")
    setup: tuple[str, ...] = Field(default=("pip install -e .",), description="shell line that installs FiveTune")

    supports_arrays = False
    supports_shards = False
    shares_files = False

    def render(self, plan: JobPlan) -> dict[str, str]:
        run = Path(plan.runs[0].run_dir)
        if self.gpus and not self.gpu_type:
            raise ConfigError("--on skypilot needs --gpu-type, such as H100, or --device cpu.")
        if self.bucket and run.parts[:1] != ("runs",):
            raise ConfigError(f"--bucket {self.bucket}: is mounted at ./runs, and run.dir is {run}. Give runs/NAME.")
        if self.memory and not self.memory.endswith("G"):
            raise ConfigError(
                f"--memory {self.memory}: SkyPilot counts in gigabytes. Give a number with G, such as 64G."
            )
        resources: dict[str, Any] = {}
        if self.infra:
            resources["infra"] = self.infra
        if self.gpus:
            resources["accelerators"] = f"{self.gpu_type}:{self.gpus}"
        if self.cpus:
            resources["cpus"] = f"{self.cpus}+"
        if self.memory:
            resources["memory"] = f"{self.memory.rstrip('G')}+"
        if self.image:
            resources["image_id"] = self.image
        if self.spot:
            resources["use_spot"] = True
        resources["job_recovery"] = {"max_restarts_on_errors": self.retries}
        lines: list[str] = []
        if plan.nnodes > 1:
            lines += [
                "# Where the nodes meet. torchrun reads these variables.",
                'export PET_MASTER_ADDR=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")',
                f"export PET_NODE_RANK=$SKYPILOT_NODE_RANK PET_MASTER_PORT={DEFAULT_PORT}",
            ]
        lines += build_start_lines(plan)
        manifest: dict[str, Any] = {
            "name": re.sub(r"[^A-Za-z0-9]+", "-", plan.name).strip("-") or "fivetune",
            "num_nodes": plan.nnodes,
            "workdir": ".",
            "resources": resources,
        }
        if self.bucket:
            manifest["file_mounts"] = {"~/sky_workdir/runs": {"source": self.bucket, "mode": "MOUNT"}}
        manifest["setup"] = "\n".join(self.setup) + "\n"
        manifest["run"] = "\n".join(lines) + "\n"
        return {"job.yaml": format_manifest(plan, manifest, command="sky jobs launch job.yaml")}

    def submit(self, folder: Path) -> str:
        words = ["sky", "jobs", "launch", "--yes", "--detach-run", str(folder / "job.yaml")]
        return (submit_file(words, tool="SkyPilot").splitlines() or [""])[-1]

    def explain_next_steps(self, job: str) -> list[str]:
        return ["sky jobs queue", "sky jobs logs", "sky jobs cancel"]
