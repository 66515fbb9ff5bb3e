"""Small runs to judge: a right one, and ways to break it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from converge_harness.judge import judge as judge_pair
from converge_harness.model import (
    BufferRows,
    Evidence,
    InForce,
    Parallelism,
    PostStepState,
    ReplicaSample,
    SetSpec,
    TensorRows,
    TensorSample,
    TrainConfig,
    Verdict,
)
from converge_harness.readers.run_folder.documents import in_force_of
from converge_harness.trainers.torchtitan import TORCHTITAN

STEPS = 20
FSDP2 = Parallelism(dp_shard=2)
LOSSES = tuple(8.0 * 0.98**step for step in range(STEPS))
NORMS = tuple(0.9 + 0.01 * (step % 5) for step in range(STEPS))
SAMPLE_STEPS = (0, 1, 2, 4, 8, 16)
PARAMETERS = {"layers.0.attention.wq.weight": 64, "norm.weight": 8, "tok_embeddings.weight": 128}
"""Canonical name to number of entries."""
TOKENS = tuple(float(1000 + 7 * (step % 3)) for step in range(STEPS))


def judge(*runs: Any, **more: Any) -> Verdict:
    """The verdict on two runs, without what was compared for it."""
    return judge_pair(*runs, **more).verdict


def in_force(parallelism: Parallelism = FSDP2, **changes: Any) -> InForce:
    """What a torchtitan run of these degrees leaves as ``in_force.json``; changes as there."""
    degrees = {
        name: getattr(parallelism, name)
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
    }
    document: Any = {
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
    return in_force_of(document)


def tensor(name: str, step: int, what: str) -> np.ndarray:
    """The control's gradient or update of a parameter at a step: any numbers, always the same."""
    seed = [step, len(what), *name.encode()]
    return np.random.default_rng(seed).standard_normal(PARAMETERS[name])


def sketch(name: str, values: np.ndarray) -> np.ndarray:
    """64 signed projections, dense ones: judging knows only that they are linear."""
    signs = np.random.default_rng(list(name.encode())).choice([-1.0, 1.0], (64, values.size))
    return signs @ values / 8


def rows(tensors: Mapping[str, np.ndarray]) -> TensorRows:
    return TensorRows(
        sketch=np.array([sketch(name, values) for name, values in tensors.items()]),
        norm=np.array([float(np.linalg.norm(values)) for values in tensors.values()]),
        zeros=np.array([np.count_nonzero(values == 0) for values in tensors.values()]),
        not_finite=np.array([np.count_nonzero(~np.isfinite(x)) for x in tensors.values()]),
    )


def samples(
    gradient: Callable[[int, str, np.ndarray], np.ndarray] = lambda step, name, values: values,
    update: Callable[[int, str, np.ndarray], np.ndarray] = lambda step, name, values: values,
    initial: Callable[[str, np.ndarray], np.ndarray] = lambda name, values: values,
) -> tuple[TensorSample, ...]:
    """Per-tensor evidence of a run; the functions change what the control did."""
    weights = {name: initial(name, tensor(name, 0, "weight")) for name in PARAMETERS}
    found = []
    for step in SAMPLE_STEPS:
        if step:
            moved = {name: update(step, name, tensor(name, step, "update")) for name in weights}
            weights = {name: values + 1e-2 * moved[name] for name, values in weights.items()}
        gradients = {name: gradient(step, name, tensor(name, step, "grad")) for name in weights}
        before = rows(gradients) if step else None
        found.append(
            TensorSample(
                step=step,
                names=tuple(PARAMETERS),
                sizes=np.array(list(PARAMETERS.values())),
                parameters=rows(weights),
                gradients=before,
                post_step=left_after(step, before) if before else None,
                buffers=CACHE if before else None,
            )
        )
    return tuple(found)


CACHE = BufferRows(("rope.cache",), np.array([64]), np.array([8.0]), np.ones((1, 64)))


def left_after(step: int, gradients: TensorRows) -> PostStepState:
    """What a right step leaves: gradients clipped to a norm of one, a state, and its count."""
    clipped = gradients.norm * min(1.0, 1 / float(np.linalg.norm(gradients.norm)))
    state = np.ones((len(clipped), 1))
    return PostStepState(clipped, ("exp_avg",), state, np.full(len(clipped), float(step)))


SAMPLES = samples()
REPLICAS = tuple(ReplicaSample(step, {"parameter": 3}) for step in SAMPLE_STEPS)


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
        random_states=("",) * STEPS,
        random_shared=(None,) * STEPS,
        in_force=in_force(parallelism),
        expected_steps=STEPS,
        samples=SAMPLES,
        sample_steps=SAMPLE_STEPS,
        replicas=REPLICAS,
        keys=TORCHTITAN.keys,
    )
    return replace(evidence, **changes)


def with_signals(
    evidence: Evidence, **changes: Callable[[int, float], float | None] | None
) -> Evidence:
    """Replace signals by a function of step and value; None takes the signal away."""
    signals = dict(evidence.signals)
    for signal, change in changes.items():
        if change is None:
            del signals[signal]
        else:
            columns = zip(evidence.steps.tolist(), evidence.signals[signal], strict=True)
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
        samples=tuple(sample for sample in evidence.samples if sample.step <= steps),
        replicas=tuple(sample for sample in evidence.replicas if sample.step <= steps),
        complete=steps == evidence.steps.size,
    )


def without_first_step(evidence: Evidence) -> Evidence:
    """The run as it would be if its log began a step late."""
    return replace(
        evidence,
        steps=evidence.steps[1:],
        signals={name: values[1:] for name, values in evidence.signals.items()},
        batch_digests=evidence.batch_digests[1:],
        batch_agrees=evidence.batch_agrees[1:],
        expected_steps=evidence.steps.size - 1,
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
        **{"trainer": TORCHTITAN, **changes},
    )
