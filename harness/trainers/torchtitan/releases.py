"""Differences between the supported releases of torchtitan, each with its source.

Rules in ``harness/plan/rules`` compare a job with its control; here is what a release has, refuses,
or silently does differently. Limitations are used only to propose sets: a set written by hand is
checked by torchtitan itself.

Also finds toolchains with a torchtitan of a supported release series.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from converge_harness.errors import ToolchainError
from converge_harness.model import (
    SPMD_BACKENDS,
    Loader,
    SetSpec,
    Technique,
    Toolchain,
    TrainConfig,
)
from converge_harness.toolchains.find import (
    DISTRIBUTIONS,
    build_hint,
    python_of,
    site_packages,
    toolchain_root,
    versions,
)
from converge_harness.toolchains.recipes import NameParts, has_recipe, recipe_of
from converge_harness.trainers.base import Features, Limitation
from converge_harness.trainers.torchtitan.dialect import (
    TITAN_02,
    TITAN_03,
    TITAN_MAIN,
    dialect_of,
)
from converge_harness.trainers.torchtitan.user_python import toolchain_of_python

DEFAULT_TOOLCHAIN = "torchtitan-0.3.0"
OLDER_TOOLCHAIN = "torchtitan-0.2.2"
STREAMING_TOOLCHAIN = "torchtitan-0.3.0-streaming"
MAIN = "main"
"""What comes after ``torchtitan-`` in names of toolchains of the main branch."""
NO_CUDA_GRAPHS = "training.disable_cuda_graphs"
FLEX_BLOCK = 128
"""FlexAttention's block: torchtitan 0.3 splits a sequence over context-parallel ranks by blocks."""
FEATURES = {
    TITAN_02: Features(fuses_in_twos=True),
    TITAN_03: Features(
        spmd_backends=SPMD_BACKENDS,
        cp_backends=SPMD_BACKENDS,
        cp_rotations=False,
        sequence_block=FLEX_BLOCK,
        no_cuda_graphs=NO_CUDA_GRAPHS,
    ),
    # Pull requests 4217 (full_dtensor) and 4218 (CP of partial_dtensor) removed what is missing.
    TITAN_MAIN: Features(
        spmd_backends=("spmd_types", "partial_dtensor"),
        cp_backends=("spmd_types",),
        cp_rotations=False,
        sequence_block=FLEX_BLOCK,
        no_cuda_graphs=NO_CUDA_GRAPHS,
    ),
}
"""By dialect."""
SPMD_TYPES, PARTIAL_DTENSOR = "spmd_types", "partial_dtensor"
FIT_FOR_SPMD_TYPES = (2, 15)
"""The first torch on which torchtitan 0.3.0's default backend trained all parallelisms."""
SPLIT_BACKWARD = frozenset({"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"})
"""Schedules that split the backward pass."""


class _Fact(NamedTuple):
    says: str
    source: str
    holds: Callable[[SetSpec, str], bool]
    """Whether it prevents a set from running, in a dialect."""


def _shards_over_cp(spec: SetSpec, _dialect: str) -> bool:
    return _is_ddp(spec) and spec.parallelism.cp > 1


def _ddp_beside_others(spec: SetSpec, dialect: str) -> bool:
    degrees = spec.parallelism
    return dialect == TITAN_02 and _is_ddp(spec) and degrees.tp * degrees.pp > 1


def _compiled_split_backward(spec: SetSpec, dialect: str) -> bool:
    return (
        dialect == TITAN_02
        and spec.pipeline_schedule in SPLIT_BACKWARD
        and Technique.COMPILE in spec.techniques
    )


def _no_float8_tp(spec: SetSpec, dialect: str) -> bool:
    return dialect != TITAN_02 and Technique.FLOAT8_TP in spec.techniques


def _no_experts(spec: SetSpec, _dialect: str) -> bool:
    model = spec.train_config.module or spec.setting("model.name")
    return spec.parallelism.ep > 1 and model == "llama3"


def _is_ddp(spec: SetSpec) -> bool:
    return spec.parallelism.dp_replicate > 1 and spec.parallelism.dp_shard == 1


_FACTS = (
    _Fact(
        "context parallelism shards parameters over its ranks, so DDP with it is HSDP",
        "torchtitan distributed/parallel_dims.py, fsdp_enabled",
        _shards_over_cp,
    ),
    _Fact(
        "torchtitan 0.2 does not combine DDP with other parallelisms",
        "torchtitan 0.2.2 models/llama3/infra/parallelize.py, parallelize_llama",
        _ddp_beside_others,
    ),
    _Fact(
        "schedules that split the backward pass refuse stages made by torch.compile",
        "torch 2.13 distributed/pipelining/schedules.py, _check_torch_compile_compatibility; "
        "torchtitan 0.2.2 wraps every block",
        _compiled_split_backward,
    ),
    _Fact(
        "torchtitan 0.3 has no Float8 TP styles: float8_tp needs a base config of 0.2",
        "harness/rank/titan/v0_3/config.py, _techniques",
        _no_float8_tp,
    ),
    _Fact(
        "Llama 3 has no experts for ep to distribute",
        "torchtitan models/llama3",
        _no_experts,
    ),
)


def features(toolchain: Toolchain) -> Features:
    """The features of the release in a toolchain; torchtitan's own defaults if it is not built."""
    found = FEATURES.get(toolchain.dialect, Features())
    if not found.spmd_backends:
        return found
    numbers = re.match(r"(\d+)\.(\d+)", toolchain.versions.get("torch", ""))
    fit = numbers is None or (int(numbers[1]), int(numbers[2])) >= FIT_FOR_SPMD_TYPES
    return replace(found, default_spmd_backend=SPMD_TYPES if fit else PARTIAL_DTENSOR)


def limitations(spec: SetSpec, dialect: str) -> Iterator[Limitation]:
    """Everything that prevents a set from running as specified."""
    return (Limitation(fact.says, fact.source) for fact in _FACTS if fact.holds(spec, dialect))


def warnings(dialect: str, words: set[str]) -> Iterator[str]:
    """Known bugs and limits of a release that affect these techniques and parallelisms."""
    if dialect != TITAN_02:
        if "async_tp" in words:
            yield "On a CPU, async_tp needs torchtitan-0.2.2 and a base config of it."
        if {"async_tp", "compile"} & words and {"float8", "float8_rowwise"} & words:
            yield "On a CPU, torchtitan 0.3 emulates Float8 and then refuses compile."
        return
    if "pp" in words:
        yield (
            "torchtitan 0.2.2 does not divide a pipeline's gradients by the valid tokens "
            "(issue 2972): expect its sets with PP to FAIL."
        )
    if "dp" in words:
        yield (
            "torchtitan 0.2.2 divides DDP's gradients by the replicate degree as well "
            "(issue 2318): expect DDP to FAIL."
        )


DIALECTS = {"0.2": TITAN_02, "0.3": TITAN_03, MAIN: TITAN_MAIN}
"""By torchtitan release series, its dialect."""


def toolchain_for(config: TrainConfig | None) -> str:
    """The toolchain that a config is written for: only 0.3 has a ``[converge] module``."""
    if config is None:
        return DEFAULT_TOOLCHAIN
    if config.loader is Loader.STREAMING:
        return STREAMING_TOOLCHAIN
    return DEFAULT_TOOLCHAIN if config.module else OLDER_TOOLCHAIN


def find_toolchain(name: str, root: Path | None) -> Toolchain:
    """A toolchain by name, or by the path of its Python, with the versions of relevant packages.

    Raises:
        ToolchainError: it does not exist, is not a virtual environment with torchtitan, or its
        release of torchtitan is not supported.
    """
    if Path(name).is_absolute():
        return toolchain_of_python(name)
    folder = (root or toolchain_root()) / name
    python = python_of(name, folder)
    found = versions(site_packages(folder), DISTRIBUTIONS)
    missing = [needed for needed in ("torch", "torchtitan") if needed not in found]
    if missing:
        other = has_recipe(name) and not recipe_of(name).recipe.torchtitan
        hint = f"name toolchain = {DEFAULT_TOOLCHAIN!r}" if other else build_hint(name)
        raise ToolchainError(f"toolchain {folder} has no {' and no '.join(missing)}; {hint}")
    return Toolchain(
        name=name,
        python=python,
        dialect=_dialect(name, folder, found["torchtitan"]),
        versions=found,
    )


def _dialect(name: str, folder: Path, version: str) -> str:
    """A release is known by its version, a commit by its code.

    A commit before or after a release may have the release's version, and one of main that of an
    old release.
    """
    distribution, series = _named(name)
    of_commit = "@" in name or series == MAIN
    if of_commit and distribution == "torchtitan":
        for package in site_packages(folder):
            if Path(package, "torchtitan", "__init__.py").is_file():
                return dialect_of(Path(package, "torchtitan"), version)
    else:
        series = _series(version)
    if series not in DIALECTS:
        supported = ", ".join(f"{known}.x" for known in DIALECTS if known != MAIN)
        raise ToolchainError(
            f"toolchain {folder} has torchtitan {version}; supported: {supported}, and its main "
            "branch in a toolchain torchtitan-main@REVISION"
        )
    return DIALECTS[series]


def _named(name: str) -> tuple[str, str]:
    """The distribution and the series that a toolchain's name says, such as torchtitan and 0.3."""
    distribution, version, *_ = [*NameParts.of(name).release.split("-"), ""]
    return distribution, _series(version)


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def assume_toolchain(name: str, root: Path | None) -> Toolchain:
    """A toolchain as it will be once built, for plans that launch nothing.

    Only torchtitan's version is known, from the name (``torchtitan-0.3.0``), so identities differ
    from those of the built one. An existing toolchain is returned unchanged.

    Raises:
        ToolchainError: as :func:`find_toolchain`, also for a name without a supported version.
    """
    if Path(name).is_absolute() and not Path(name).exists():
        return Toolchain(name, Path(name), TITAN_03, {})
    distribution, series = _named(name)
    folder = (root or toolchain_root()) / name
    if folder.exists() or distribution != "torchtitan" or series not in DIALECTS:
        return find_toolchain(name, root)
    release, *_, revision = NameParts.of(name)
    version = [*release.split("-"), ""][1]
    return Toolchain(
        name=name,
        python=folder / "bin" / "python",
        dialect=DIALECTS[series],
        versions={"torchtitan": f"{version}@{revision}" if revision else version},
    )
