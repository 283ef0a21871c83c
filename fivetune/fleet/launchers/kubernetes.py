"""Kubernetes: a Job for one node, a TrainJob or PyTorchJob of Kubeflow for several, on a volume that all pods share.

A pod that starts again continues its run. Shards are an indexed Job, whose pods start again each for itself
(`backoffLimitPerIndex`, Kubernetes 1.29). The recipe and its files must be in the image or on the volume.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt

from fivetune.errors import ConfigError
from fivetune.fleet.launchers import (
    OFFLINE,
    JobPlan,
    Launcher,
    PositiveInt,
    build_start_lines,
    format_manifest,
    submit_file,
)

PERMANENT_CODES = [2, 3, 5, 6]  # settings, data, a loss that is not finite, an incomplete result: a retry fails too
SECONDS_TO_SAVE = 300  # between SIGTERM and SIGKILL
SHARD = "$((JOB_COMPLETION_INDEX + 1))"
VOLUME, SHARED_MEMORY = "workspace", "shared-memory"


class Kubernetes(Launcher):
    """Kubernetes, with Kubeflow for several nodes."""

    image: str | None = Field(default=None, description="container image with FiveTune and its Python (required)")
    namespace: str | None = Field(default=None, description="namespace; default: that of kubectl")
    volume: str | None = Field(default=None, description="persistent volume claim for recipe, data and runs (required)")
    mount: Annotated[str, Field(pattern=r"^/")] = Field(
        default="/workspace", description="where the volume is mounted, and the working directory"
    )
    kind: Literal["trainjob", "pytorchjob"] = Field(
        default="trainjob", description="of several nodes: trainjob (Kubeflow Trainer 2.2) or pytorchjob (Operator 1)"
    )
    runtime: str = Field(default="torch-distributed", description="the ClusterTrainingRuntime of a TrainJob")
    retries: NonNegativeInt = Field(default=6, description="times that a failed job starts again")
    at_once: PositiveInt | None = Field(default=None, description="runs or shards of an array at the same time")
    offline: bool = Field(default=False, description="nodes read the hub's cache only")
    env: tuple[Annotated[str, Field(pattern=r"^\w+=")], ...] = Field(
        default=(), description="environment variable, such as HF_HOME=/workspace/hub"
    )

    supports_arrays = False
    shares_files = False

    def render(self, plan: JobPlan) -> dict[str, str]:
        for option in ("image", "volume"):
            if not getattr(self, option):
                description = type(self).model_fields[option].description
                raise ConfigError(f"--on kubernetes needs --{option}: {description}.")
        # normpath: a path with .. may leave the volume.
        for path in plan.list_paths():
            if not Path(os.path.normpath(Path(self.mount, path))).is_relative_to(self.mount):
                what = f"{path}: is" if plan.work else f"run.dir: {path} is"
                raise ConfigError(
                    f"{what} not on the volume, which pods have at {self.mount}: what it holds would be lost with its "
                    f"pod. Give a path below {self.mount} (--mount), or a relative one."
                )
        if plan.nnodes == 1:
            version, kind, spec = "batch/v1", "Job", self._build_job(plan)
        elif self.kind == "trainjob":
            version, kind, spec = "trainer.kubeflow.org/v1alpha1", "TrainJob", self._build_train_job(plan)
        else:
            version, kind, spec = "kubeflow.org/v1", "PyTorchJob", self._build_pytorch_job(plan)
        metadata = {"name": _make_name(plan.name, plan.launch_id)}
        if self.namespace:
            metadata["namespace"] = self.namespace
        manifest = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
        return {"job.yaml": format_manifest(plan, manifest, command="kubectl create -f job.yaml")}

    def submit(self, folder: Path) -> str:
        return submit_file(["kubectl", "create", "-f", str(folder / "job.yaml"), "-o", "name"], tool="Kubernetes")

    def explain_next_steps(self, job: str) -> list[str]:
        where = f" --namespace {self.namespace}" if self.namespace else ""
        return [f"kubectl get {job}{where}", f"kubectl delete {job}{where}"]

    def _build_job(self, plan: JobPlan) -> dict[str, Any]:
        pod = {
            "restartPolicy": "Never",
            **self._build_pod(),
            "containers": [{"name": "node", **self._build_container(plan)}],
        }
        limits: dict[str, Any] = {"backoffLimit": self.retries}
        failure = "FailJob"
        if plan.work:
            num = plan.work.count
            failure = "FailIndex"
            limits = {
                "completionMode": "Indexed",
                "completions": num,
                "parallelism": min(num, self.at_once or num),
                "backoffLimitPerIndex": self.retries,
            }
        return {
            **limits,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {"action": failure, "onExitCodes": {"operator": "In", "values": PERMANENT_CODES}},
                ]
            },
            "template": {"spec": pod},
        }

    def _build_train_job(self, plan: JobPlan) -> dict[str, Any]:
        container = self._build_container(plan)
        mounts = container.pop("volumeMounts")
        container.pop("workingDir")  # the command changes to it: a TrainJob has no field for it
        patch = {"volumes": self._build_pod()["volumes"], "containers": [{"name": "node", "volumeMounts": mounts}]}
        replicated = {"name": "node", "template": {"spec": {"template": {"spec": patch}}}}
        return {
            "runtimeRef": {"name": self.runtime, "kind": "ClusterTrainingRuntime", "apiGroup": "trainer.kubeflow.org"},
            "trainer": {
                "numNodes": plan.nnodes,
                "numProcPerNode": plan.nproc,
                "image": container["image"],
                "command": container["command"],
                "args": container["args"],
                "env": container["env"],
                "resourcesPerNode": container["resources"],
            },
            "runtimePatches": [
                {
                    "manager": "fivetune.distributed.processes/runs",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
                }
            ],
        }

    def _build_pytorch_job(self, plan: JobPlan) -> dict[str, Any]:
        pod = {**self._build_pod(), "containers": [{"name": "pytorch", **self._build_container(plan)}]}
        replica = {"restartPolicy": "OnFailure", "template": {"spec": pod}}
        return {
            "nprocPerNode": str(plan.nproc),
            "runPolicy": {"backoffLimit": self.retries},
            "pytorchReplicaSpecs": {
                "Master": {"replicas": 1, **replica},
                "Worker": {"replicas": plan.nnodes - 1, **replica},
            },
        }

    def _build_pod(self) -> dict[str, Any]:
        """Build what all pods have: time to save after SIGTERM, the volume, and memory that processes share."""
        return {
            "terminationGracePeriodSeconds": SECONDS_TO_SAVE,
            "volumes": [
                {"name": VOLUME, "persistentVolumeClaim": {"claimName": self.volume}},
                {"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}},
            ],
        }

    def _build_container(self, plan: JobPlan) -> dict[str, Any]:
        amounts: dict[str, Any] = {}
        if self.cpus:
            amounts["cpu"] = str(self.cpus)
        if self.memory:
            amounts["memory"] = f"{self.memory}i"
        if self.gpus:
            amounts["nvidia.com/gpu"] = self.gpus
        variables: dict[str, str] = {}
        if self.offline:
            variables |= OFFLINE
        for entry in self.env:
            name, _, value = entry.partition("=")
            variables[name] = value
        return {
            "image": self.image,
            "workingDir": self.mount,
            "command": ["bash", "-c"],
            "args": ["\n".join([f"cd {shlex.quote(self.mount)}", *build_start_lines(plan, SHARD), ""])],
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "resources": {"requests": amounts, "limits": dict(amounts)},
            "volumeMounts": [
                {"name": VOLUME, "mountPath": self.mount},
                {"name": SHARED_MEMORY, "mountPath": "/dev/shm"},
            ],
        }


def _make_name(name: str, launch_id: str) -> str:
    """Make a name that Kubernetes accepts and no earlier launch has; Kubeflow adds words such as -worker-12 to it.

    >>> _make_name("Squad_v2.small", "0a1b2c3d"), _make_name("3b", "0a1b2c3d")
    ('squad-v2-small-0a1b2c3d', 'run-3b-0a1b2c3d')
    """
    kept = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not kept[:1].isalpha():
        kept = f"run-{kept}"
    return f"{kept[:30].rstrip('-')}-{launch_id}"
