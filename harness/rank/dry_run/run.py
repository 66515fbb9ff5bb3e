"""The rank side of a dry run: builds and steps a job of many GPUs in one process without any.

``python -m converge_harness.rank --dry-run JOB.json --rank R`` is rank R of the job's whole world
on torch's fake process group, whose collectives return at once, with fake tensors, which have
shapes but no memory. The trainer, its parallelisms and its optimizer are torchtitan's own; it takes
two steps, because optimizer states appear at the end of the first.

Standard output is one JSON object (``run_folder/dry_run.py``). A dialect has a module ``dry_run``
with ``take_steps(job, meter) -> Stepped``; without one the job is not supported.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
import resource
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from converge_harness.rank.settings import KeyProblem, SettingError
from converge_harness.rank.start.entry import DIALECTS
from converge_harness.run_folder.dry_run import DryRunDocument
from converge_harness.run_folder.job import JobError, RankJob, read_job

TRACED = "traced: allocations counted over two steps on fake tensors, what the peak has besides"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a dialect built and traced."""

    parts: Iterable[Any]
    """The modules of this rank."""
    optimizers: Iterable[Any]
    stages: tuple[int, ...]
    """Pipeline stages on this rank; more than one with a looped schedule."""
    model_parameters: int
    """Parameters of the whole model, all stages."""
    estimated: int | None = None
    """Bytes of activations by formula, if the steps could not be traced."""
    how: str = TRACED
    stand_ins: tuple[str, ...] = ()
    """Sentences on what was replaced, because this machine does not have it."""
    more: DryRunDocument = field(default_factory=DryRunDocument)
    """Other results of the dialect: compiled blocks, async TP, boundary problems."""


def run(path: str, rank: int, segment: int | None = None) -> DryRunDocument:
    """Dry-run one rank of a job; problems of the job are returned, never raised."""
    begun = time.monotonic()
    try:
        job = read_job(path, segment)
        found = _run(job, rank)
    except SettingError as error:
        found = _with_problems(*error.problems)
    except JobError as error:
        found = _with_problems(KeyProblem("", str(error)))
    except Exception as error:  # noqa: BLE001 - whatever torchtitan raises is a problem of the job
        traceback.print_exc()
        found = _with_problems(_problem(error))
    own: DryRunDocument = {
        "rank": rank,
        "problems": found.get("problems", []),
        "seconds": round(time.monotonic() - begun, 1),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    return {**found, **own}


def _with_problems(*problems: KeyProblem) -> DryRunDocument:
    return {
        "problems": [
            {"key": each.key, "message": each.message, "valid": list(each.valid)}
            for each in problems
        ]
    }


def _run(job: RankJob, rank: int) -> DryRunDocument:
    package = DIALECTS[job.dialect]
    dialect = importlib.import_module(package)
    if importlib.util.find_spec(f"{package}.dry_run") is None:
        release = job.dialect.removeprefix("titan_").replace("_", ".")
        return {"unsupported": f"there is no dry run of torchtitan {release} yet"}
    # This machine's device: fake CUDA tensors need a torch built with CUDA.
    dialect.preload("cpu")
    from converge_harness.rank.dry_run.meter import Meter
    from converge_harness.rank.dry_run.sharding import sharding_problems

    world = math.prod(asdict(replace(job.parallelism, ep=1)).values())
    os.environ.update(NGPU=str(world), WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK="0")
    module = importlib.import_module(f"{package}.dry_run")
    meter = Meter()
    stepped: Stepped = module.take_steps(job, meter)
    return {
        "world_size": world,
        "degrees": asdict(job.parallelism),
        "stages": list(stepped.stages),
        **_memory(stepped, meter),
        "float8_modules": _float8(stepped.parts),
        "sharding_problems": sharding_problems(stepped.parts, job.parallelism),
        "stand_ins": list(stepped.stand_ins),
        **stepped.more,
    }


def _memory(stepped: Stepped, meter: Any) -> DryRunDocument:
    """Bytes on this rank; exact for parameters, gradients and states."""
    parameters = [parameter for part in stepped.parts for parameter in part.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    own = sum(map(local_bytes, parameters))
    states = sum(map(local_bytes, _states(stepped.optimizers)))
    if stepped.estimated is None:
        gradients = sum(local_bytes(each.grad) for each in trained if each.grad is not None)
        activations = meter.peak - own - gradients - states
    else:
        gradients = sum(map(local_bytes, trained))  # same shape and type as the parameter
        activations = stepped.estimated
    return {
        "parameters": {
            "count": sum(each.numel() for each in parameters),
            "of_model": stepped.model_parameters,
            "bytes": own,
        },
        "gradients": {"bytes": gradients},
        "optimizer_states": {"bytes": states},
        "activations": {"bytes": activations, "how": stepped.how},
        "peak_bytes": own + gradients + states + activations,
    }


def local_bytes(tensor: Any) -> int:
    """Bytes of the shard on this rank, or of an unsharded tensor."""
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.numel()) * int(local.element_size())


def _states(optimizers: Iterable[Any]) -> Iterable[Any]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if hasattr(value, "element_size"))


def _float8(parts: Iterable[Any]) -> int:
    return sum(
        any(base.__name__ == "Float8Linear" for base in type(module).__mro__)
        for part in parts
        for module in part.modules()
    )


def _problem(error: Exception) -> KeyProblem:
    message = _ADDRESS.sub("", " ".join(str(error).split())) or "no message"
    where = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in where if "torchtitan" in frame.filename.split("/")]
    place = f", in torchtitan's {theirs[-1].name}" if theirs else ""
    sentence = f"{message} ({type(error).__name__}{place})"
    return KeyProblem(key_of(sentence), sentence)


_SPEAKS_OF = (
    # A stage without layers in torchtitan 0.3.0, such as 4 layers over 4 stages with CP.
    (r"list index out of range.*apply_cp_to_forward", "parallelism.pp"),
    (r"n_(kv_)?heads|num_(kv_)?heads|attention heads", "parallelism.tp"),
    (r"seq(uence)?[ _]len", "training.seq_len"),
    (r"global.batch.size", "training.global_batch_size"),
    (r"micro-?batch|local.batch.size|\bbatch size", "training.local_batch_size"),
    (r"stages?\b|layers_per_stage|pipeline", "parallelism.pp"),
    (r"context.parallel|\bCP\b|load balancer", "parallelism.cp"),
    (r"expert", "parallelism.ep"),
    (r"float8", "techniques"),
    (r"tensor.parallel|\bTP\b|\btp\b", "parallelism.tp"),
    (r"parallel dims|WORLD_SIZE", "parallelism"),
)


def key_of(message: str) -> str:
    """The dotted key that a message is about; empty if unknown."""
    for pattern, key in _SPEAKS_OF:
        if re.search(pattern, message, re.IGNORECASE if pattern.islower() else 0):
            return key
    return ""
