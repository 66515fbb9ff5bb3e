"""Small runs to judge: a right one, and ways to break it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from harness.model import Evidence, Parallelism, SetSpec, TrainConfig

STEPS = 20
FSDP2 = Parallelism(dp_shard=2)
LOSSES = tuple(8.0 * 0.98**step for step in range(STEPS))
NORMS = tuple(0.9 + 0.01 * (step % 5) for step in range(STEPS))
TOKENS = tuple(float(1000 + 7 * (step % 3)) for step in range(STEPS))


def in_force(parallelism: Parallelism = FSDP2, **changes: Any) -> dict[str, Any]:
    """What a torchtitan run of these degrees leaves as ``in_force.json``."""
    degrees = {
        name: getattr(parallelism, name)
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
    }
    return {
        "schema": 1,
        "world_size": parallelism.world_size,
        "degrees": degrees,
        "seq_len": 256,
        "local_batch_size": 4,
        "global_batch_size": 4 * parallelism.dp,
        "gradient_accumulation_steps": 1,
        "pipeline_schedule": "Schedule1F1B" if parallelism.pp > 1 else None,
        "pipeline_microbatches": 4 if parallelism.pp > 1 else None,
        "param_dtype": "float32",
        "mixed_precision_param": "float32",
        "float8": {"modules": 0, "recipe": None, "emulated": False, "tp_styles": 0},
        "compile": {"regions": 0, "graphs": 0},
        "async_tp": {"fused_nodes": {}},
        "attention": "sdpa",
        "cp_rotation": None,
        "without_fixes": [],
        "injected": None,
        "config": {"training.seq_len": 256, "parallelism.pipeline_parallel_microbatch_size": 1},
        "declared": [],
        **changes,
    }


def run(
    name: str = "fsdp2",
    parallelism: Parallelism = FSDP2,
    **changes: Any,
) -> Evidence:
    """A whole run of ours, as the reader would give it."""
    evidence = Evidence(
        name=name,
        source=f"runs/{name}",
        steps=tuple(range(1, STEPS + 1)),
        signals={
            "loss": LOSSES,
            "grad_norm": NORMS,
            "loss_recomputed": LOSSES,
            "grad_norm_recomputed": NORMS,
            "lr": tuple(1e-3 for _ in range(STEPS)),
            "tokens": TOKENS,
            "grads_missing": tuple(0.0 for _ in range(STEPS)),
        },
        batch_digests=tuple(f"{step:016x}" for step in range(STEPS)),
        batch_agrees=tuple(True for _ in range(STEPS)),
        in_force=in_force(parallelism),
        expected_steps=STEPS,
    )
    return replace(evidence, **changes)


def with_signals(
    evidence: Evidence, **changes: Callable[[int, float], float | None] | None
) -> Evidence:
    """Replace signals by a function of step and value; None takes the signal away."""
    signals: dict[str, tuple[float | None, ...]] = dict(evidence.signals)
    for signal, change in changes.items():
        if change is None:
            del signals[signal]
        else:
            columns = zip(evidence.steps, evidence.signals[signal], strict=True)
            signals[signal] = tuple(change(step, value) for step, value in columns)
    return replace(evidence, signals=signals)


def truncated(evidence: Evidence, steps: int) -> Evidence:
    """The run as it would be if it had ended after so many steps."""
    return replace(
        evidence,
        steps=evidence.steps[:steps],
        signals={name: values[:steps] for name, values in evidence.signals.items()},
        batch_digests=evidence.batch_digests[:steps],
        batch_agrees=evidence.batch_agrees[:steps],
        complete=steps == len(evidence.steps),
    )


def without_first_step(evidence: Evidence) -> Evidence:
    """The run as it would be if its log began a step late."""
    return replace(
        evidence,
        steps=evidence.steps[1:],
        signals={name: values[1:] for name, values in evidence.signals.items()},
        batch_digests=evidence.batch_digests[1:],
        batch_agrees=evidence.batch_agrees[1:],
        expected_steps=len(evidence.steps) - 1,
    )


def foreign(name: str, **signals: tuple[float | None, ...]) -> Evidence:
    """Curves from a CSV: no audit, no digests, no probe."""
    count = len(next(iter(signals.values())))
    return Evidence(name, f"{name}.csv", tuple(range(1, count + 1)), signals)


def spec(
    name: str = "fsdp2",
    parallelism: Parallelism = FSDP2,
    settings: Mapping[str, Any] | None = None,
    **changes: Any,
) -> SetSpec:
    return SetSpec(
        name=name,
        parallelism=parallelism,
        train_config=TrainConfig("debug.toml", settings or {}),
        toolchain="torchtitan-0.3.0",
        **changes,
    )
