"""What a run folder needs before its job is submitted, for the scheduler of a cluster. Pure."""

from __future__ import annotations

from pathlib import Path

from converge_harness.launch.kubernetes.checking import require_valid
from converge_harness.launch.kubernetes.objects import OBJECT, job_set, object_text
from converge_harness.launch.kubernetes.pod_script import pod_script
from converge_harness.launch.slurm.batch_script import batch_script
from converge_harness.model import Cluster, Job
from converge_harness.run_folder.layout import JOB_SCRIPT
from converge_harness.trainers import RANK_MODULE


def scripts_of(
    job: Job,
    folder: Path,
    cluster: Cluster,
    *,
    experiment: str,
    rank_module: str = RANK_MODULE,
    continues_after: int | None = None,
    data: Path | None = None,
) -> dict[str, str]:
    """The texts of its files, by their names in the run folder ``folder``.

    ``continues_after``: the number of the last call of an earlier job of the run, from whose newest
    checkpoint this one continues; None: it starts anew. ``data`` is the folder of its corpus.

    Raises ConfigError when the ranks do not fill nodes, and when the scheduler would refuse it.
    """
    of_kubernetes = cluster.kubernetes is not None
    script = pod_script if of_kubernetes else batch_script
    text = script(
        job,
        folder,
        cluster,
        experiment=experiment,
        rank_module=rank_module,
        continues_after=continues_after,
        data=data,
    )
    if not of_kubernetes:
        return {JOB_SCRIPT: text}
    made = job_set(job, folder, cluster, experiment=experiment)
    require_valid(made)
    return {JOB_SCRIPT: text, OBJECT: object_text(made)}


def submit_argv(folder: Path, cluster: Cluster) -> tuple[str, ...]:
    """The command that submits the job of a run folder by hand, without its dependencies."""
    if cluster.kubernetes is not None:
        return ("kubectl", "create", "-f", str(folder / OBJECT))
    return ("sbatch", str(folder / JOB_SCRIPT))
