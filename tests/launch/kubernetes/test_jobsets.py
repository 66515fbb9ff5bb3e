"""Objects of Kubernetes: what its own client says of them, and what is refused before that."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from batch_jobs import SEGMENTS, job
from test_pod_script import CASES, EVERYTHING, FOLDER, GOLDEN, ON_CPUS, PLAIN

from converge_harness.errors import ConfigError
from converge_harness.launch.kubernetes.checking import require_valid
from converge_harness.launch.kubernetes.objects import (
    job_set,
    object_name,
    quantity_of,
    seconds_of,
)
from converge_harness.launch.kubernetes.written import WrittenObjects
from converge_harness.launch.scheduler.backend import ScriptRequest
from converge_harness.model import Kind
from converge_harness.store import Store

pytest.importorskip("kubeflow_trainer_api")


def made_for(pod):
    """An object whose pods have these further fields."""
    cluster = replace(ON_CPUS, kubernetes=replace(PLAIN, pod=pod))
    return job_set(ScriptRequest(CASES["one_pod"][0], FOLDER, cluster, experiment="x"))


def refused(made):
    with pytest.raises(ConfigError) as caught:
        require_valid(made)
    return str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_the_engines_own_client_takes_every_object(name):
    require_valid(json.loads((GOLDEN / f"{name}.json").read_text()))


@pytest.mark.parametrize(
    ("pod", "problem"),
    [
        ({"nodeSelectr": {"a": "b"}}, "template.spec.nodeSelectr: Kubernetes has no such field"),
        ({"tolerations": [{"kay": "x"}]}, "spec.tolerations[0].kay: Kubernetes has no such field"),
        ({"nodeSelector": {"a": 1}}, "valid string, not 1"),
        ({"tolerations": {"key": "x"}}, "Toleration: Input should be a valid dictionary"),
        ({"tolerations": 5}, "has a value of another type than Kubernetes expects"),
        ({"affinity": ["x"]}, "Affinity: Input should be a valid dictionary"),
        ({"priority": "high"}, "PodSpec.priority: Input should be a valid integer, not 'high'"),
    ],
)
def test_fields_of_pods_that_kubernetes_would_not_take_are_refused(pod, problem):
    said = refused(made_for(pod))
    assert problem in said
    assert "cv-fsdp8-0123456789ab" in said


def test_wrong_and_missing_values_are_refused():
    made = made_for({})
    made["spec"]["replicatedJobs"][0]["template"]["spec"]["completionMode"] = "Ordered"
    assert "JobSpec" in refused(made)
    made = made_for({})
    del made["spec"]["replicatedJobs"][0]["name"]
    assert "spec.replicatedJobs[0].name: is required, and missing" in refused(made)


def test_files_are_checked_before_there_are_any(tmp_path):
    backend = WrittenObjects(Store(tmp_path))
    cluster = replace(ON_CPUS, kubernetes=replace(PLAIN, pod={"nodeSelectr": {}}))
    with pytest.raises(ConfigError, match="nodeSelectr"):
        backend.files(ScriptRequest(CASES["one_pod"][0], FOLDER, cluster, experiment="x"))
    files = backend.files(ScriptRequest(CASES["one_pod"][0], FOLDER, ON_CPUS, experiment="x"))
    assert sorted(files) == ["job.sh", "jobset.json"]
    argv = ("kubectl", "create", "-f", f"{FOLDER}/jobset.json")
    assert backend.submit_argv(FOLDER) == argv


def test_a_store_that_pods_do_not_see_is_refused():
    with pytest.raises(ConfigError, match=r"mount: is /store, and pods would not see /home/me/run"):
        job_set(ScriptRequest(CASES["one_pod"][0], Path("/home/me/run"), ON_CPUS, experiment="x"))


def test_calls_of_one_run_come_one_after_another():
    resized = job("resized", ranks=16, steps=30, kind=Kind.ELASTIC, segments=SEGMENTS)
    calls = job_set(ScriptRequest(resized, FOLDER, EVERYTHING, experiment="x"))["spec"][
        "replicatedJobs"
    ]
    assert [each["template"]["spec"]["parallelism"] for each in calls] == [2, 1, 2]
    pods = [each["template"]["spec"]["template"]["spec"]["containers"][0] for each in calls]
    assert [pod["command"][-1] for pod in pods] == ["1", "2", "3"]
    assert [pod["resources"]["limits"]["nvidia.com/gpu"] for pod in pods] == ["8", "4", "8"]
    waits = [each.get("dependsOn") for each in calls]
    assert waits[0] is None
    assert waits[1:] == [[{"name": f"call-{n}", "status": "Complete"}] for n in (1, 2)]


@pytest.mark.parametrize("name", ["fsdp2_tp2", "X" * 200, "Ünï.code", "-._", "a" * 27 + "-b"])
def test_names_are_those_of_hosts(name):
    made = object_name(job(name, ranks=8))
    longest = f"{made}-call-99-0-9999-abcde"
    assert len(longest) <= 63
    assert all(each.isascii() and (each.isalnum() or each == "-") for each in longest)
    assert made == made.lower()
    assert "--" not in made
    assert made.startswith("cv-")
    assert made.endswith("-0123456789ab")


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        *((None, None), ("UNLIMITED", None), ("0", None), ("00:00:00", None), ("0-0", None)),
        *(("90", 5400), ("90:30", 5430)),
        *(("04:00:00", 14_400), ("1-12", 129_600), ("1-12:30", 131_400), ("1-12:30:05", 131_405)),
    ],
)
def test_times_of_sbatch_are_seconds_of_kubernetes(time, seconds):
    assert seconds_of(time) == seconds


def test_sizes_of_sbatch_are_quantities_of_kubernetes():
    assert [quantity_of(size) for size in ("900G", "64000", "2T")] == ["900Gi", "64000Mi", "2Ti"]
    assert [quantity_of(size) for size in (None, "0", "0G")] == [None, None, None]


def test_the_time_limit_is_of_each_pod():
    made = job_set(ScriptRequest(CASES["four_pods"][0], FOLDER, EVERYTHING, experiment="x"))
    of_job = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert "activeDeadlineSeconds" not in of_job
    assert of_job["template"]["spec"]["activeDeadlineSeconds"] == 129_600


def test_kubernetes_does_not_expand_names_in_the_path_of_a_script():
    folder = Path("/store/$(HOSTNAME)/run")
    made = job_set(ScriptRequest(CASES["one_pod"][0], folder, ON_CPUS, experiment="x"))
    pod = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"] == ["bash", "/store/$$(HOSTNAME)/run/job.sh"]
