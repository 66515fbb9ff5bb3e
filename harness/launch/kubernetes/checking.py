"""Whether Kubernetes would take an object, without asking one.

The models of ``kubeflow-trainer-api`` on PyPI, Kubeflow Trainer's own client (Apache-2.0), are
generated from the OpenAPI documents of JobSet and of Kubernetes itself. They drop fields that they
do not know, and fill in required ones, so both are found by what becomes of an object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from converge_harness.errors import ConfigError, Problem, installing

CLIENT = "kubeflow-trainer-api"
_HINT = (
    "it comes from [cluster] and [cluster.kubernetes]; docs/kubernetes.md says which key sets what"
)


def require_valid(made: Mapping[str, Any]) -> None:
    """Raise ConfigError, with the first wrong values of a JobSet, or all fields unknown or missing.

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
                installing("kubernetes"),
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
    except (AttributeError, TypeError, ValueError) as error:  # a list where an object belongs
        why = f"has a value of another type than Kubernetes expects ({error})"
        raise ConfigError(Problem(name, why, _HINT)) from error
    left = known.to_dict() if known is not None else {}
    if differences := list(_differences(made, left)):
        raise ConfigError([Problem(f"{name}: {at}", what, _HINT) for at, what in differences])


def _differences(made: Any, left: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """The places where the client dropped a field, or filled in a required one, and which."""
    if isinstance(made, Mapping) and isinstance(left, Mapping):
        for key in (*made, *(key for key in left if key not in made)):
            here = f"{place}.{key}" if place else str(key)
            if key not in left:
                yield here, "Kubernetes has no such field"
            elif key not in made:
                yield here, "is required, and missing"
            else:
                yield from _differences(made[key], left[key], here)
    elif isinstance(made, list) and isinstance(left, list) and len(made) == len(left):
        for index, (value, kept) in enumerate(zip(made, left, strict=True)):
            yield from _differences(value, kept, f"{place}[{index}]")
    elif made != left:
        yield place, f"would become {left!r}, not {made!r}"
