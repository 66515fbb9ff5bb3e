"""Reads everything outside an experiment file that can change a job's numbers."""

from __future__ import annotations

import ast
import hashlib
import itertools
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from converge_harness.errors import ConfigError, Problem
from converge_harness.model import Cluster, Experiment, SetSpec, Surroundings, SyntheticData
from converge_harness.run_folder.layout import CHECKPOINT_METADATA
from converge_harness.trainers import trainer_of
from converge_harness.trainers.environment import SHARE_GPUS

PACKAGE = __name__.partition(".")[0]
"""The name by which programs and ranks import this package."""
RANK_CODE = tuple(Path(__file__).parent / name for name in ("rank", "probe", "run_folder"))
GPU_INFORMATION = Path("/proc/driver/nvidia/gpus")
CPU_INFORMATION = Path("/proc/cpuinfo")
DRIVER_INFORMATION = Path("/proc/driver/nvidia/version")


def read_surroundings(
    experiment: Experiment, data_digest: Callable[[SyntheticData], str], *, on_gpu: bool
) -> Surroundings:
    """Everything outside the file that ``make_plan``, which is pure, needs to know.

    Args:
        experiment: as loaded. data_digest: maps the values of a synthetic corpus to the digest of
        its bytes. on_gpu: whether ranks will run on GPUs of this machine; a ``[cluster]`` table
        says it itself.

    Raises:
        ConfigError: a file to inject, one of a program, or the seed checkpoint cannot be read; or
            ranks would import something else by the name of this package.
    """
    anchors = (experiment.anchor,) if experiment.anchor else ()
    specs = (*experiment.controls, *anchors, *experiment.tests)
    corpora = dict.fromkeys(spec.train_config.data for spec in specs)
    injected = dict(_functions(specs))
    cluster = experiment.cluster
    _require_own_name(experiment, specs)
    return Surroundings(
        hardware=cluster_hardware(cluster) if cluster else hardware_class(on_gpu=on_gpu),
        software=cluster_software(cluster) if cluster else local_software(os.environ),
        rank_code=rank_code_digest(),
        data={data: data_digest(data) for data in corpora if data is not None},
        injected={each: _injected_digest(experiment, each, key) for each, key in injected.items()},
        sources=dict(_source_digests(experiment, specs)),
        seed_checkpoint=_checkpoint_digest(experiment),
    )


def rank_code_digest(*folders: Path) -> str:
    """Hex SHA-256 of every Python source under the folders, with its relative path.

    The default is all code that runs inside ranks: dialects, CPU shim, the probe as a library,
    and the file formats that they share with converge.
    """
    digest = hashlib.sha256()
    for folder in folders or RANK_CODE:
        for path in sorted(folder.rglob("*.py")):
            source, named = path.read_bytes(), path.relative_to(folder.parent).as_posix()
            digest.update(f"{named}\0{len(source)}\0".encode())
            digest.update(source)
    return digest.hexdigest()


def hardware_class(*, on_gpu: bool) -> str:
    """``gpu NVIDIA H200``, or ``cpu-x86_64`` and the processor's model.

    Another processor model may sum in another order, so a finished run is reused as bit-identical
    on the same model only.
    """
    if on_gpu:
        models = sorted(set(gpus().values())) or ["of unknown model"]
        shared = f", {len(gpus())} of them shared" if os.environ.get(SHARE_GPUS) == "1" else ""
        return f"gpu {', '.join(models)}{shared}"
    return f"cpu-{platform.machine()} {_cpu_model()}".strip()


def cluster_hardware(cluster: Cluster) -> str:
    """``gpu H100 in nodes of 8``, or ``cpu slurm PARTITION in nodes of 8`` without ``hardware``.

    Without a name the resources that are requested identify the hardware. A partition with several
    kinds of nodes therefore needs a name, or a constraint. The number of ranks per node decides
    which links a collective uses, and so in which order it sums.
    """
    asked = ("slurm", cluster.partition, cluster.gres, cluster.constraint)
    named = cluster.hardware or " ".join(each for each in asked if each)
    kind = "cpu" if cluster.device == "cpu" else "gpu"
    return f"{kind} {named} in nodes of {cluster.ranks_per_node}"


def cluster_software(cluster: Cluster) -> dict[str, Any]:
    """What a cluster's jobs get besides their toolchain; empty if nothing.

    An environment variable can choose another algorithm, a container another NCCL.
    """
    given = {
        "container": list(cluster.container),
        "environment": dict(cluster.environment),
        "modules": list(cluster.modules),
        "prologue": list(cluster.prologue),
        "srun": list(cluster.srun),
        "image": cluster.kubernetes.image if cluster.kubernetes else None,
    }
    return {key: value for key, value in given.items() if value}


def local_software(environment: Mapping[str, str]) -> dict[str, Any]:
    """Environment variables that select algorithms in torch and its libraries; empty without any.

    Ranks inherit the environment. Variables that only concern paths and logging are left out.
    """
    chosen = {
        name: value
        for name, value in sorted(environment.items())
        if _OF_LIBRARIES.match(name) and not _NO_NUMBERS.search(name)
    }
    return {"environment": chosen} if chosen else {}


_OF_LIBRARIES = re.compile(
    "(TORCH|PYTORCH|TORCHINDUCTOR|TORCHDYNAMO|ATEN|FSDP|NCCL|RCCL|GLOO|UCC|CUBLAS|CUBLASLT|CUDNN"
    "|CUDA|NVIDIA|NVTE|MKL|KMP|OMP|DNNL|ONEDNN|OPENBLAS|TRITON|HIP|HSA|ROCBLAS|HIPBLASLT|MIOPEN|AMD"
    "|FLASH_ATTENTION|FLASHINFER|XFORMERS|DS|DEEPSPEED|ACCELERATE|MEGATRON)_|LD_PRELOAD$"
)
_NO_NUMBERS = re.compile(
    "(^|_)(DEBUG|DBG|LOG|LOGS|LOGGING|LOGDEST|LOGINFO|LOGLEVEL|LOGGER|HOME|PATH|DIR|ROOT|CACHE"
    "|VERSION|VISIBLE|CAPABILITIES|REQUIRE|SOCKET|TIMEOUT|TRACE|DUMP|TOKEN|KEY|SECRET|PASSWORD)(_|$)"
    "|^OMP_NUM_THREADS$"
)
"""Parts of variable names that concern paths, logging, hardware or secrets, and the number of
threads, which is one per rank anyway. PYTHONHASHSEED is ignored: without it hashes differ by run.
"""


def gpus(information: Path = GPU_INFORMATION) -> dict[int, str]:
    """Number and model of every NVIDIA GPU that this process may use, by the driver's files.

    ``CUDA_VISIBLE_DEVICES`` chooses them by number, in the order of the PCI bus: set to nothing it
    hides all, and what follows a number that no GPU has is not read. Raises ConfigError if it has
    anything but numbers.
    """
    found = {}
    for number, path in enumerate(sorted(information.glob("*/information"))):
        model = re.search(r"(?m)^Model:\s*(.+?)\s*$", path.read_text())
        found[number] = model[1] if model else "unknown"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not found:
        return found
    if visible.strip() == "NoDevFiles":  # Slurm, for a job without GPUs
        return {}
    wanted = [each.strip() for each in visible.split(",") if each.strip()]
    if named := [each for each in wanted if not re.fullmatch(r"-?\d+", each)]:
        hint = "numbers as in 0,1; empty: train on the CPU"
        raise ConfigError([Problem("CUDA_VISIBLE_DEVICES", f"has {named[0]!r}", hint)])
    known = itertools.takewhile(found.__contains__, map(int, wanted))
    return {number: found[number] for number in known}


def driver_version(information: Path = DRIVER_INFORMATION) -> str:
    """Version of the NVIDIA driver of this machine, by its own file; empty without one."""
    try:
        found = re.search(r"Kernel Module.*?(\d+(?:\.\d+)+)", information.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def _cpu_model(information: Path = CPU_INFORMATION) -> str:
    try:
        text = information.read_text()
    except OSError:  # not Linux, or /proc is hidden
        return platform.processor()
    model = re.search(r"(?m)^model name\s*:\s*(.+?)\s*$", text)
    return model[1] if model else platform.processor()


def _functions(specs: Sequence[SetSpec]) -> Iterator[tuple[str, str]]:
    """Functions of the user that ranks call, and the key that names each."""
    for spec in specs:
        if spec.inject:
            yield spec.inject, "inject"
        for own in spec.own_techniques:
            yield from ((each, f"technique.{own.name}") for each in own.functions)


def _injected_digest(experiment: Experiment, function: str, key: str) -> str:
    path = Path(function.rpartition(":")[0])
    try:
        return _digest_of(with_imports(path, (path.parent,)))
    except OSError as error:
        raise ConfigError(
            Problem(f"{experiment.path}: {key}", f"{path} cannot be read: {error.strerror}")
        ) from None


def _source_digests(experiment: Experiment, specs: Sequence[SetSpec]) -> Iterator[tuple[Path, str]]:
    """Every file of the programs that train, and its digest."""
    for path, folder, key in dict.fromkeys(
        each for spec in specs for each in trainer_of(spec).sources(spec)
    ):
        try:
            yield path, _digest_of(sources_with(path, folder))
        except OSError as error:
            raise ConfigError(
                Problem(
                    f"{experiment.path}: trainer.{key}",
                    f"{path} cannot be read: {error.strerror}",
                )
            ) from None


def _require_own_name(experiment: Experiment, specs: Sequence[SetSpec]) -> None:
    """Raise ConfigError where a folder that Python searches first has a module of our name.

    Ranks would end with "No module named 'converge_harness.rank'" or import who knows what. That is
    found by looking: nothing is imported.
    """
    probed = [spec for spec in specs if spec.trainer.can.probed]
    asked: dict[Path, tuple[str, str]] = {}
    for spec in probed:
        for path, folder, key in trainer_of(spec).sources(spec):
            where = f"{experiment.path}: trainer.{key}"
            # The first entry of sys.path is the script's folder; with ``-m``, the working
            # directory.
            for each in (path.parent, folder) if path.suffix == ".py" else (folder,):
                asked[each] = (where, "rename it, or move the program to another folder")
    on_path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)) if probed else ()
    for each in map(Path, on_path):
        if _bearer(each) is not None:  # later entries cannot shadow it
            asked.setdefault(each, ("$PYTHONPATH", f"rename it, or take {each} off PYTHONPATH"))
            break
    problems = [
        Problem(
            where,
            f"{found} has the name of converge's own package, and ranks would import it instead: "
            f"Python looks in {folder} first",
            hint,
        )
        for folder, (where, hint) in asked.items()
        if (found := _bearer(folder)) is not None and found.resolve() != _OWN_FOLDER
    ]
    if problems:
        raise ConfigError(problems)


_OWN_FOLDER = Path(__file__).resolve().parent


def _bearer(folder: Path) -> Path | None:
    """The module or package in a folder that has this package's name, ours or another.

    A folder without ``__init__.py`` does not count: Python prefers any package later on the path.
    """
    found = PathFinder.find_spec(PACKAGE, [str(folder)])
    if found is None or found.origin is None:
        return None
    origin = Path(found.origin)
    return origin.parent if found.submodule_search_locations else origin


def _digest_of(sources: Sequence[Path]) -> str:
    """Hex SHA-256 of files, in this order."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


def _checkpoint_digest(experiment: Experiment) -> str | None:
    """Hex SHA-256 of a distributed checkpoint: its metadata, and names and sizes of its files.

    Shards may be terabytes, so their content is not read.
    """
    folder = experiment.seed_checkpoint
    if folder is None:
        return None
    try:
        digest = hashlib.sha256((folder / CHECKPOINT_METADATA).read_bytes())
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                digest.update(f"{name}\0{path.stat().st_size}\0".encode())
    except OSError as error:
        raise ConfigError(
            Problem(
                f"{experiment.path}: trainer.seed_checkpoint",
                f"{folder} cannot be read: {error.strerror}",
            )
        ) from None
    return digest.hexdigest()


def sources_with(path: Path, folder: Path) -> list[Path]:
    """A file of a program and, if it is Python, all files that it imports.

    A script imports from its own folder, a module from ``folder``, where it is started.
    """
    return with_imports(path, (path.parent, folder)) if path.suffix == ".py" else [path]


def with_imports(path: Path, folders: Sequence[Path]) -> list[Path]:
    """A Python file and the files in the folders that it imports, directly or indirectly, sorted.

    Of an imported package all files count. A file that cannot be parsed imports nothing; the rank
    will report what is wrong with it.
    """
    found = {path}
    left = [path]
    while left:
        importing = left.pop()
        beside = dict.fromkeys((importing.parent, *folders))
        for name in _imported(importing):
            new = {file for folder in beside for file in _module(folder, name)} - found
            found |= new
            left += new
    return [path, *sorted(found - {path})]


def _module(folder: Path, name: str) -> list[Path]:
    """The files of a module or package in a folder; empty when it has none of that name."""
    first, _, rest = name.partition(".")
    file, package = folder / f"{first}.py", folder / first
    # Python takes a package before a module of its name.
    if (package / "__init__.py").is_file():
        return sorted(package.rglob("*.py"))
    if file.is_file():
        return [file]
    # Without __init__.py it may be any folder of that name, however large: take its own files, and
    # of its subfolders only what is imported.
    found = set(package.glob("*.py"))
    return sorted(found.union(_module(package, rest)) if rest and package.is_dir() else found)


def _imported(path: Path) -> set[str]:
    """Dotted names of everything that a file imports anywhere, without leading dots."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:  # the names may be modules
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):  # from . import a, b
            names |= {alias.name for alias in node.names}
    return names
