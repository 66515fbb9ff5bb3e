"""Whether Kubernetes would take an object, without asking one.

The models of ``kubeflow-trainer-api`` on PyPI, Kubeflow Trainer's own client (Apache-2.0), are
generated from the OpenAPI documents of JobSet and of Kubernetes itself. They drop fields that they
do not know, so a misspelt one is found by what is left of an object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from converge_harness.errors import ConfigError, Problem

CLIENT = "kubeflow-trainer-api"
_HINT = (
    "it comes from [cluster] and [cluster.kubernetes]; docs/kubernetes.md says which key sets what"
)


def require_valid(made: Mapping[str, Any]) -> None:
    """Raise ConfigError, with every unknown field or else the first wrong value of a JobSet.

    Also where the client that knows the fields is not installed.
    """
    try:
        from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import (  # noqa: PLC0415 - optional
            JobsetV1alpha2JobSet,
        )
    except ImportError as missing:
        raise ConfigError(
            Problem(
                "launcher",
                f"is 'kubernetes', which needs {CLIENT} to check what is written ({missing})",
                "pip install 'converge-harness[kubernetes]'",
            )
        ) from missing
    name = made["metadata"]["name"]
    try:
        known = JobsetV1alpha2JobSet.from_dict(dict(made))
    except ValidationError as error:
        model = error.title.rpartition("V1")[2] or error.title
        problems = [
            Problem(
                f"{name}: {'.'.join([model, *map(str, each['loc'])])}",
                f"{each['msg']}, not {each['input']!r}",
                _HINT,
            )
            for each in error.errors()
        ]
        raise ConfigError(problems) from error
    left = known.to_dict() if known is not None else {}
    if unknown := list(_lost(made, left)):
        raise ConfigError(
            [
                Problem(f"{name}: {place}", "Kubernetes has no such field", _HINT)
                for place in unknown
            ]
        )


def _lost(made: Any, left: Any, place: str = "") -> Iterator[str]:
    """The places of fields that are not left, outermost first."""
    if isinstance(made, Mapping):
        for key, value in made.items():
            here = f"{place}.{key}" if place else str(key)
            if not isinstance(left, Mapping) or key not in left:
                yield here
            else:
                yield from _lost(value, left[key], here)
    elif isinstance(made, list):
        if not isinstance(left, list) or len(left) != len(made):
            yield place
            return
        for index, (value, kept) in enumerate(zip(made, left, strict=True)):
            yield from _lost(value, kept, f"{place}[{index}]")
