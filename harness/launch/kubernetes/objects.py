"""A job as a JobSet of Kubernetes: as many pods as it has nodes, one after another for segments.

Pure. The API is that of https://github.com/kubernetes-sigs/jobset, ``jobset.x-k8s.io/v1alpha2``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from converge_harness.errors import ConfigError, Problem
from converge_harness.launch.scheduler.backend import ScriptRequest
from converge_harness.launch.scheduler.batch_step import Layout, layout_of
from converge_harness.model import Cluster, Job, Kubernetes
from converge_harness.run_folder.layout import JOB_SCRIPT
from converge_harness.store import folder_key, slug
from converge_harness.trainers import calls_of_segments, part_of

OBJECT = "jobset.json"
ROLE = "converge/role"
"""Annotation with the role of a job."""
_NAME_LENGTH = 26
"""Longest part of a set's name, so that the names of pods, to which Kubernetes adds six characters
such as ``-x7k2p``, have at most 63."""
_GRACE_S = 60
"""Between SIGTERM and SIGKILL: torchrun takes 30 s to end ranks that do not end by themselves."""
_DAY_S, _HOUR_S, _MINUTE_S = 86_400, 3600, 60


def object_name(job: Job) -> str:
    """The name of a job's JobSet and of its service; it ends in the job's identity."""
    plain = re.sub(r"[^a-z0-9]+", "-", slug(job.name).lower())[:_NAME_LENGTH].strip("-")
    return f"cv-{plain or 'run'}-{folder_key(job.identity)}"


def delete_command(namespace: str, names: Iterable[str] = ()) -> tuple[str, ...]:
    """The command that deletes JobSets, and returns once their pods are gone.

    Otherwise these might still write while pods of the next run already do.
    """
    options = (f"--namespace={namespace}", "--cascade=foreground", "--ignore-not-found")
    return ("kubectl", "delete", "jobset", *options, *names)


def logs_command(namespace: str, name: str) -> str:
    """The command that shows what the pods of a JobSet printed."""
    return (
        f"kubectl logs --namespace={namespace} --tail=-1 -l jobset.sigs.k8s.io/jobset-name={name}"
    )


def host_names(job: Job, index: int) -> str:
    """The host names of a call's pods without the last part, ``-0`` of the first pod."""
    return f"{object_name(job)}-{_call_name(index)}-0"


def job_set(request: ScriptRequest) -> dict[str, Any]:
    """The JobSet of a job, whose run folder has its script.

    Raises ConfigError when the ranks do not fill nodes, and when pods do not see the folder.
    """
    job, folder, cluster = request.job, request.folder.absolute(), request.cluster
    site = kubernetes_of(cluster)
    if not folder.is_relative_to(site.mount):
        raise ConfigError(
            Problem(
                "cluster.kubernetes.mount",
                f"is {site.mount}, and pods would not see {folder} there",
                "mount the claim on this machine at the same path as in pods, and choose a --store "
                "below it",
            )
        )
    layouts = [
        layout_of(job, part_of(job, call).world_size, cluster) for call in calls_of_segments(job)
    ]
    labels = {"app.kubernetes.io/managed-by": "converge"}
    if site.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = site.queue
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": object_name(job),
            "namespace": site.namespace,
            "labels": labels,
            "annotations": {
                "converge/experiment": request.experiment,
                "converge/job": job.name,
                ROLE: str(job.role),
                "converge/identity": job.identity,
            },
        },
        "spec": {
            "replicatedJobs": [
                _call(folder, cluster, layout, index, of=len(layouts))
                for index, layout in enumerate(layouts)
            ]
        },
    }


def object_text(made: Mapping[str, Any]) -> str:
    """An object as JSON, which kubectl takes like YAML."""
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"


def _call(folder: Path, cluster: Cluster, layout: Layout, index: int, *, of: int) -> dict[str, Any]:
    """The pods of a call. They are started once: a restarted one would meet nobody."""
    spec: dict[str, Any] = {
        "parallelism": layout.nodes,
        "completions": layout.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": _pod(folder, cluster, layout, [str(index + 1)] if of > 1 else [])},
    }
    made = {"name": _call_name(index), "replicas": 1, "template": {"spec": spec}}
    if index:
        made["dependsOn"] = [{"name": _call_name(index - 1), "status": "Complete"}]
    return made


def _pod(folder: Path, cluster: Cluster, layout: Layout, call: list[str]) -> dict[str, Any]:
    site = kubernetes_of(cluster)
    container = {
        "name": "ranks",
        "image": site.image,
        # Kubernetes replaces $(NAME), and makes one $ of two.
        "command": ["bash", str(folder / JOB_SCRIPT).replace("$", "$$"), *call],
        "workingDir": str(folder),
        "resources": _resources(cluster, layout),
        "volumeMounts": [
            {"name": "shared", "mountPath": str(site.mount)},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - NCCL's, in the pod
        ],
    }
    # Of the pod, not of its Job: there it would count the time in which no node has room for it.
    limit = seconds_of(cluster.time)
    return {
        **site.pod,
        **({} if limit is None else {"activeDeadlineSeconds": limit}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_S,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": site.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _resources(cluster: Cluster, layout: Layout) -> dict[str, Any]:
    """What a pod requests. More CPU time than that is not forbidden, more memory is."""
    requests, limits = {}, {}
    if cluster.cpus_per_rank is not None:
        requests["cpu"] = str(cluster.cpus_per_rank * layout.ranks)
    if (memory := quantity_of(cluster.memory_per_node)) is not None:
        limits["memory"] = requests["memory"] = memory
    if cluster.device == "cuda" and cluster.gpus_per_node:
        limits[kubernetes_of(cluster).gpu] = str(layout.ranks)
    return {name: each for name, each in (("requests", requests), ("limits", limits)) if each}


def _call_name(index: int) -> str:
    return f"call-{index + 1}"


def kubernetes_of(cluster: Cluster) -> Kubernetes:
    """What its pods need. Raises ValueError for a cluster of another scheduler."""
    if cluster.kubernetes is None:
        raise ValueError("the cluster is not of Kubernetes")
    return cluster.kubernetes


def quantity_of(memory: str | None) -> str | None:
    """A memory size of sbatch, in which a number alone is MiB, as one of Kubernetes.

    None: none is requested, which 0 means, too (for sbatch: all of the node).
    """
    if memory is None or not memory.rstrip("KMGT").strip("0"):
        return None
    return f"{memory}i" if memory[-1].isalpha() else f"{memory}Mi"


def seconds_of(time: str | None) -> int | None:
    """A time limit of sbatch in seconds; None, and 0: no limit.

    The forms are ``MINUTES``, ``MINUTES:SECONDS``, ``HOURS:MINUTES:SECONDS``, ``DAYS-HOURS``,
    ``DAYS-HOURS:MINUTES`` and ``DAYS-HOURS:MINUTES:SECONDS``.
    """
    if time is None or time == "UNLIMITED":
        return None
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units: tuple[int, ...] = (_HOUR_S, _MINUTE_S, 1)
    if not dash and len(parts) < len(units):
        units = units[1:]
    seconds = sum(part * unit for part, unit in zip(parts, units, strict=False))
    return int(days or 0) * _DAY_S + seconds or None
