"""Names in a job that no framework's config classes check: fixes, repeats and loaders."""

from __future__ import annotations

from collections.abc import Collection

from converge_harness.rank.settings import KeyProblem
from converge_harness.run_folder.job import RankJob

REPEATS = ("rerun", "ulp", "rounding", "permute")
"""Kinds of repeats, as in ``converge_harness.model.RepeatKind`` (which ranks cannot import)."""


def unknown_fixes(job: RankJob, known: Collection[str]) -> list[KeyProblem]:
    """Names of ``without_fixes`` that the dialect has no repair of."""
    valid = tuple(sorted(known))
    none = "" if valid else f"; {job.dialect} has none to leave out"
    return [
        KeyProblem("without_fixes", f"no fix is named {name!r}{none}", valid)
        for name in job.without_fixes
        if name not in known
    ]


def repeat_problems(job: RankJob) -> list[KeyProblem]:
    """Why the job cannot be the repeat of a control that it should be."""
    if job.repeat is not None and job.repeat not in REPEATS:
        return [KeyProblem("repeats", f"no repeat is of kind {job.repeat!r}", REPEATS)]
    if job.repeat == "permute" and job.data_folder is None:
        message = (
            "permute deals our own samples out in another order, and this job reads "
            "torchtitan's dataset: declare one of ours in [converge.data], or repeat otherwise"
        )
        return [KeyProblem("repeats", message, ("rerun", "ulp"))]
    if job.repeat == "permute" and job.train_config.loader != "converge":
        message = (
            "permute deals out samples in another order, which only our own loader does, and "
            f"[converge.data] says loader = {job.train_config.loader!r}: repeat otherwise"
        )
        return [KeyProblem("repeats", message, ("rerun", "ulp"))]
    return []


def loader_problems(job: RankJob, known: Collection[str]) -> list[KeyProblem]:
    """Whether the dialect has no loader of the name that the job says."""
    loader = job.train_config.loader
    if loader in known:
        return []
    message = f"{job.dialect} has no loader {loader!r}"
    return [KeyProblem("converge.data.loader", message, tuple(sorted(known)))]
