"""The manifests of Kubernetes and SkyPilot against schemas; no cluster is called.

kubernetes-validate holds the schemas of Kubernetes itself: for the Job, and for the pods inside PyTorchJobs. Those of
TrainJob, PyTorchJob and SkyPilot's task are written here from their documented fields.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fivetune.errors import ConfigError
from fivetune.fleet.launchers import JobPlan, JobRun, load_launcher

TASK = JobRun("faq", "runs/faq", "faq.yaml", ("--optimizer.lr", "1e-3"), ("--overwrite",))
PODS = {"image": "registry/fivetune:1", "volume": "work", "gpus": 2, "cpus": 8, "memory": "32G", "env": ("A=b=c",)}
NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}


def table(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON schema of an object that has these keys and no other."""
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **(optional or {})},
        "additionalProperties": False,
    }


OBJECT, COUNT, TEXT = {"type": "object"}, {"type": "integer", "minimum": 1}, {"type": "string", "minLength": 1}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1}
VARIABLE = table({"name": TEXT, "value": TEXT})
RESOURCES = table({"requests": OBJECT, "limits": OBJECT})
METADATA = table({"name": NAME}, {"namespace": NAME})
POD_PATCH = table({"volumes": {"type": "array"}, "containers": {"type": "array", "items": OBJECT}})
TRAIN_JOB = table(
    {
        "apiVersion": {"const": "trainer.kubeflow.org/v1alpha1"},
        "kind": {"const": "TrainJob"},
        "metadata": METADATA,
        "spec": table(
            {
                "runtimeRef": table({"name": NAME}, {"kind": TEXT, "apiGroup": TEXT}),
                "trainer": table(
                    {"numNodes": COUNT, "numProcPerNode": COUNT, "image": TEXT, "command": TEXTS, "args": TEXTS},
                    {"env": {"type": "array", "items": VARIABLE}, "resourcesPerNode": RESOURCES},
                ),
                "runtimePatches": {
                    "type": "array",
                    "items": table(
                        {
                            "manager": {"type": "string", "pattern": r"^[a-z.]+/[a-z]+$"},
                            "trainingRuntimeSpec": table({"template": table({"spec": table({"replicatedJobs": {
                                "type": "array",
                                "items": table({
                                    "name": {"const": "node"},
                                    "template": table({"spec": table({"template": table({"spec": POD_PATCH})})}),
                                }),
                            }})})}),
                        }
                    ),
                },
            }
        ),
    }
)  # fmt: skip
REPLICAS = table(
    {"replicas": COUNT, "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]}, "template": OBJECT}
)
PYTORCH_JOB = table(
    {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": METADATA,
        "spec": table(
            {
                "nprocPerNode": {"type": "string", "pattern": r"^\d+$"},
                "runPolicy": table({"backoffLimit": {"type": "integer", "minimum": 0}}),
                "pytorchReplicaSpecs": table({"Master": REPLICAS, "Worker": REPLICAS}),
            }
        ),
    }
)
AMOUNT = {"type": "string", "pattern": r"^\d+\+?$"}
SKY_TASK = table(
    {"name": TEXT, "num_nodes": COUNT, "workdir": TEXT, "resources": table({}, {
        "infra": TEXT,
        "accelerators": {"type": "string", "pattern": r"^[\w.-]+:\d+$"},
        "cpus": AMOUNT,
        "memory": AMOUNT,
        "image_id": TEXT,
        "use_spot": {"type": "boolean"},
        "job_recovery": table({}, {"strategy": TEXT, "max_restarts_on_errors": {"type": "integer", "minimum": 0}}),
    }), "setup": TEXT, "run": TEXT},
    {"file_mounts": {"type": "object", "additionalProperties": table({"source": TEXT}, {
        "mode": {"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]}, "name": TEXT, "store": TEXT,
    })}},
)  # fmt: skip


def manifest(name: str, options: dict[str, Any], *, nnodes: int = 1, run: str = "runs/faq") -> dict[str, Any]:
    task = JobRun("faq", run, TASK.source, TASK.settings, TASK.flags)
    plan = JobPlan("Faq_v2", (task,), nnodes, 2, ("python",), Path("/w"), Path("/w/runs/faq.x"), "0.1.0", "0a1b2c3d")
    (text,) = load_launcher(name, options).render(plan).values()
    return yaml.safe_load(text)


def validate_object(found: dict[str, Any]) -> None:
    # Imported where it is used: the grammars of its dependencies take a second, in each process that collects tests.
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    kubernetes_validate.validate(found, kubernetes_validate.latest_version(), strict=True)


def validate_fields(found: dict[str, Any], schema: dict[str, Any]) -> None:
    pytest.importorskip("jsonschema", reason="pip install jsonschema").validate(found, schema)


def validate_pod(spec: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    validate_object(pod)


def test_the_job_of_one_node_is_valid():
    job = manifest("kubernetes", {**PODS, "namespace": "lab", "offline": "true"})
    validate_object(job)
    pod = job["spec"]["template"]["spec"]
    validate_pod(pod)
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": 2}
    assert {"name": "A", "value": "b=c"} in container["env"] and {"name": "HF_HUB_OFFLINE", "value": "1"} in container[
        "env"
    ]
    assert job["metadata"] == {"name": "faq-v2-0a1b2c3d", "namespace": "lab"}
    broken = {**job, "spec": {**job["spec"], "backofLimit": 3}}
    from kubernetes_validate import ValidationError

    with pytest.raises(ValidationError):
        validate_object(broken)


def test_the_train_job_has_the_documented_fields():
    job = manifest("kubernetes", PODS, nnodes=3)
    validate_fields(job, TRAIN_JOB)
    assert job["spec"]["trainer"]["numNodes"] == 3 and job["spec"]["trainer"]["numProcPerNode"] == 2
    (replicated,) = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    patch = replicated["template"]["spec"]["template"]["spec"]
    validate_pod({**patch, "containers": [{**patch["containers"][0], "image": "x"}]})


def test_the_pytorch_job_has_the_documented_fields_and_valid_pods():
    job = manifest("kubernetes", {**PODS, "kind": "pytorchjob"}, nnodes=3)
    validate_fields(job, PYTORCH_JOB)
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert {role: one["replicas"] for role, one in specs.items()} == {"Master": 1, "Worker": 2}
    for one in specs.values():
        validate_pod(one["template"]["spec"])
        assert one["template"]["spec"]["containers"][0]["name"] == "pytorch"


@pytest.mark.parametrize("nnodes", [1, 2])
def test_the_task_of_skypilot_has_the_documented_fields(nnodes):
    options = {"gpus": 2, "gpu_type": "H100", "cpus": 8, "memory": "32G", "spot": "true", "bucket": "s3://runs"}
    task = manifest("skypilot", options, nnodes=nnodes)
    validate_fields(task, SKY_TASK)
    assert task["num_nodes"] == nnodes and task["resources"]["accelerators"] == "H100:2"
    assert ("PET_MASTER_ADDR" in task["run"]) == (nnodes > 1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kubernetes", {"volume": "w"}, "--on kubernetes needs --image: container image"),
        ("kubernetes", {"image": "i"}, "--on kubernetes needs --volume: persistent volume claim"),
        ("skypilot", {"gpus": 1}, "--on skypilot needs --gpu-type, such as H100, or --device cpu."),
        (
            "skypilot",
            {"bucket": "s3://b"},
            "--bucket s3://b: is mounted at ./runs, and run.dir is out/faq. Give runs/NAME.",
        ),
        ("skypilot", {"memory": "64M"}, "--memory 64M: SkyPilot counts in gigabytes. Give a number with G"),
    ],
)
def test_what_a_cluster_needs_and_does_not_have_is_refused(name, options, message):
    with pytest.raises(ConfigError) as caught:
        manifest(name, options, run="out/faq")
    assert str(caught.value).startswith(message)
