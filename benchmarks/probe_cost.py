"""What the probe costs: time and memory of a training step with the probe off, on and sampling.

``nox -s bench -- probe`` trains torchtitan's real trainer on two gloo ranks. In every three steps
the probe is once off, once on, and once on with a sample of every tensor, in random order, so that
slow phases of the machine affect all three. Times are medians over rounds of three; their intervals
contain 95% of 2,000 medians of rounds drawn with replacement (Efron's bootstrap). Besides the wall
time of whole steps, the CPU time within the probe's hooks is measured: it is not what a user waits
for, but other programs hardly disturb it.

A run of 64 steps at the default cadence has 57 steps without a sample, 7 with one, and one of step
0, which is measured with caches still empty.

Memory is what torch allocates in a step and in the probe's hooks, according to its profiler, in a
separate job with a large embedding. FSDP 2 has no copies to compare; DDP 2 compares everything.

In low precision a control and its test sets make frozen steps before training, and so does the
control's float32 reference, which then trains one step. A frozen step is compared with the steps
without the probe of the same run.

The library is measured in a plain training loop (``probed_script.py``), with one process and with
DDP on 2 ranks: a loop without the probe and one with it alternate in one program, in the same order
of modes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from converge_harness.corpus import prepare
from converge_harness.model import FROZEN_STEPS, SyntheticData
from converge_harness.trainers import find_toolchain

ROOT = Path(__file__).parent.parent
TOOLCHAIN = "torchtitan-0.3.0"
TRAIN_CONFIG = ROOT / "train_configs" / "llama3_debug.toml"
RANK = ROOT / "benchmarks" / "probed_titan.py"
SCRIPT = ROOT / "benchmarks" / "probed_script.py"
SCRIPT_RANKS = {"a script, one process": 1, "a script, DDP 2": 2}
MODES = ("off", "on", "sampled")
WARM_UP = 2
"""Rounds left out, because they fill caches and allocate the optimizer's state."""
DEFAULT_CADENCE_GOAL = 1.02
SAMPLED_STEP_GOAL = 1.25

STEPS, SAMPLES = 64, 7
"""Of the run whose cost is derived; samples at steps 1, 2, 4, 8, 16, 32, 64."""
FSDP, DDP = {"dp_shard": 2}, {"dp_replicate": 2}
DEGREES = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep"), 1)


@dataclass(frozen=True, slots=True)
class Case:
    """A job to measure: a model's shape, and how it is spread over two ranks."""

    name: str
    parallelism: Mapping[str, int]
    model: Mapping[str, int] = field(default_factory=dict)
    """Replaces the train config's."""
    settings: Mapping[str, Any] = field(default_factory=dict)


_MIDDLE = {"dim": 256, "n_layers": 6, "vocab_size": 2048}
_LARGE = {"dim": 256, "n_layers": 2, "vocab_size": 32768}
_SHORT = {"training.seq_len": 64, "training.local_batch_size": 1, "training.global_batch_size": 2}
TIMED = (
    Case("llama3_debug, FSDP 2", FSDP),
    Case("llama3_debug, DDP 2", DDP),
    Case("dim 256, 6 layers, FSDP 2", FSDP, _MIDDLE),
    Case("dim 256, 6 layers, DDP 2", DDP, _MIDDLE),
)
_BF16_MIXED = {"training.mixed_precision_param": "bfloat16"}
FROZEN = (
    Case("bf16 mixed, FSDP 2", FSDP, settings=_BF16_MIXED),
    Case("its reference in float32", FSDP),
    Case("bf16 mixed, dim 256, 6 layers, FSDP 2", FSDP, _MIDDLE, _BF16_MIXED),
    Case("its reference in float32", FSDP, _MIDDLE),
)
WEIGHED = (
    Case("vocabulary 32768, FSDP 2", FSDP, _LARGE, _SHORT),
    Case("vocabulary 32768, DDP 2", DDP, _LARGE, _SHORT),
)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds per round, and for the sample of step 0."""

    rounds: npt.NDArray[np.float64]
    """Shape (rounds, 3), columns as in MODES."""
    step_0_s: float
    clock: str
    """``wall``: whole steps, slowest rank; ``processors``: the same in CPU time of rank 0;
    ``hooks``: see ``in_hooks``.
    """

    def ratios(self) -> dict[str, Estimate]:
        """Ratio of time with the probe to time without, by what is compared."""
        resampled = np.random.default_rng(0).integers(
            len(self.rounds), size=(2000, len(self.rounds))
        )
        medians = np.median(self.rounds[resampled], axis=1)
        here = self._ratios(np.median(self.rounds, axis=0))
        there = self._ratios(medians.T)
        return {
            name: Estimate(here[name], *np.quantile(there[name], (0.025, 0.975))) for name in here
        }

    def _ratios(self, medians: npt.NDArray[np.float64]) -> dict[str, Any]:
        off, on, sampled = medians
        whole = (STEPS - SAMPLES) * on + SAMPLES * sampled + self.step_0_s
        return {
            "a step without a sample": on / off,
            "a step with a sample": sampled / off,
            "64 steps, default cadence": whole / (STEPS * off),
        }


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio and its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on rank 0."""

    step: Mapping[str, float]
    """Peak of a whole step by mode, median of several."""
    hook: tuple[int, str]
    """Largest peak within a hook of the probe at a sampled step, and which hook."""
    kept: int
    """Permanently held by the probe."""
    largest_shard: int


def main() -> int:
    arguments = _parser().parse_args()
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.scratch, prefix="bench-") as name:
        scratch = Path(name)
        lines = [f"{'time, with the probe over without':<54}{'ratio':>8}   {'95%':<18}goal"]
        for case in TIMED:
            for clock in timed(case, arguments.rounds, scratch):
                lines += _time_lines(case, clock)
        for script, ranks in SCRIPT_RANKS.items():
            clocks = timed_script(script, ranks, arguments.rounds, scratch)
            lines += [line for clock in clocks for line in _time_lines(Case(script, {}), clock)]
            bare, probed, _ = np.median(clocks[0].rounds, axis=0)
            lines.append(
                f"  {1 / bare:.2f} steps a second without, {1 / probed:.2f} with the probe"
            )
        lines += ["", f"{'time of frozen steps, over one without the probe':<54}{'ratio':>8}   95%"]
        for case in FROZEN:
            lines += _frozen_lines(case, *frozen(case, arguments.rounds, scratch))
        lines += [
            "",
            f"{'memory beyond a step without the probe':<54}{'KiB':>8}   of the largest shard",
        ]
        for case in WEIGHED:
            lines += _memory_lines(case, weighed(case, scratch))
    print("\n" + "\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure what the probe costs.")
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds of three steps")
    parser.add_argument("--scratch", type=Path, default=ROOT / ".converge", help="where to work")
    return parser


# -------------------------------------------------------------- measurements


def timed(case: Case, rounds: int, scratch: Path) -> tuple[Times, Times]:
    """Measure the steps of a case, in wall and CPU time."""
    modes = shuffled_modes(WARM_UP + rounds)
    result = _train(case, "seconds", modes, scratch)
    seconds = by_mode(modes, result["steps"])
    cpu, hooks = by_mode(modes, result["cpu"]), by_mode(modes, result["hooks_cpu"])
    first_step_s = result["hooks_cpu"][0]
    return Times(seconds, _step_0(result), "wall"), in_hooks(cpu, hooks, first_step_s)


def frozen(case: Case, rounds: int, scratch: Path) -> tuple[list[float], list[float]]:
    """Seconds of each frozen step of a case, and of its steps without the probe."""
    modes = shuffled_modes(WARM_UP + rounds)
    result = _train(case, "seconds", modes, scratch, FROZEN_STEPS)
    return result["frozen"], by_mode(modes, result["steps"])[:, MODES.index("off")].tolist()


def timed_script(name: str, ranks: int, rounds: int, scratch: Path) -> tuple[Times, Times]:
    """Measure steps with and without the library, in wall time and CPU time of rank 0."""
    modes = shuffled_modes(WARM_UP + rounds)
    probed = [mode for mode in modes if mode != "off"]
    print(f"seconds: {name}, {len(modes)} steps", flush=True)
    folder = Path(tempfile.mkdtemp(dir=scratch))
    job = {
        **_common_job(name, len(probed), folder),
        "dialect": "command",
        "train_config": {"path": str(SCRIPT)},
        "parallelism": {**DEGREES, "dp_replicate": ranks},
        "sample_steps": [0, *(step for step, mode in enumerate(probed, 1) if mode == "sampled")],
    }
    result = _torchrun(SCRIPT, ranks, job, {"modes": modes}, folder)
    wall, processors = (
        Times(by_mode(modes, result[clock]), result["made"][clock], clock)
        for clock in ("wall", "processors")
    )
    return wall, processors


def in_hooks(
    cpu: npt.NDArray[np.float64], hooks: npt.NDArray[np.float64], first_step_s: float
) -> Times:
    """CPU time of both ranks: of a step without the probe, and plus the time in its hooks.

    ``cpu`` and ``hooks`` have shape (rounds, 3): of whole steps, and within the hooks. The first
    step also takes the sample of step 0.
    """
    step_0_s = max(0.0, first_step_s - float(np.median(hooks[:, MODES.index("sampled")])))
    return Times(cpu[:, :1] + hooks, step_0_s, "hooks")


def by_mode(modes: Sequence[str], seconds: Sequence[float]) -> npt.NDArray[np.float64]:
    """Shape (rounds, 3): steps of each round sorted by mode, without warm-up."""
    rounds = [
        [seconds[first + modes[first : first + 3].index(mode)] for mode in MODES]
        for first in range(WARM_UP * 3, len(modes), 3)
    ]
    return np.array(rounds)


def weighed(case: Case, scratch: Path) -> Memory:
    """Measure what the steps of a case allocate."""
    modes = shuffled_modes(WARM_UP + 3)
    result = _train(case, "bytes", modes, scratch)
    steps = [(modes[step], step) for step in range(WARM_UP * 3, len(modes))]
    sampled = {0, *(step for mode, step in steps if mode == "sampled")}
    return Memory(
        {m: median(result["steps"][step] for mode, step in steps if mode == m) for m in MODES},
        max((size, name) for step, name, size in result["parts"] if step in sampled),
        result["kept"],
        max(result["shards"]),
    )


def shuffled_modes(rounds: int) -> list[str]:
    """The probe's mode in each step: all modes once per round, in random order.

    The first step samples, because step 0 is sampled in it.
    """
    draw = random.Random(0)
    later = [mode for _ in range(rounds - 1) for mode in draw.sample(MODES, len(MODES))]
    return [*reversed(MODES), *later]


def _step_0(result: Mapping[str, Any]) -> float:
    """Seconds of the sample of step 0, which is part of the first step."""
    return next(value for step, name, value in result["parts"] if _is_step_0(step, name))


def _is_step_0(step: int, hook: str) -> bool:
    return step == 0 and hook == "begin_step"


# ------------------------------------------------------------------- running


def _train(
    case: Case, measure: str, modes: Sequence[str], scratch: Path, frozen_steps: int = 0
) -> dict[str, Any]:
    """Run a case's job with torchrun.

    Raises SystemExit with its output if it fails.
    """
    print(f"{measure}: {case.name}, {len(modes)} steps", flush=True)
    folder = Path(tempfile.mkdtemp(dir=scratch))
    plan = {"measure": measure, "modes": list(modes)}
    job = {**_job(case, modes, folder, scratch / "data"), "frozen": frozen_steps}
    return _torchrun(RANK, 2, job, plan, folder)


def _torchrun(
    program: Path, ranks: int, job: Mapping[str, Any], plan: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Run one of our programs; return its result.

    Raises SystemExit with its output if it fails.
    """
    plan = {**plan, "result": str(folder / "result.json")}
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "job.json").write_text(json.dumps(job))
    argv = [
        *(str(find_toolchain(TOOLCHAIN).python), "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "localhost:0"),
        *(str(program), str(folder / "job.json"), str(folder / "plan.json")),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        argv, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(argv)} failed:\n{done.stdout}{done.stderr}")
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def _common_job(name: str, steps: int, folder: Path) -> dict[str, Any]:
    """The keys of every ``job.json``."""
    return {
        "schema": 1,
        "name": name,
        "role": "test",
        "identity": "0" * 64,
        "run_folder": str(folder),
        "seed": 42,
        "steps": steps,
    }


def _job(case: Case, modes: Sequence[str], folder: Path, data: Path) -> dict[str, Any]:
    """``job.json`` of a case, from the shipped train config."""
    settings = tomllib.loads(TRAIN_CONFIG.read_text())
    ours = settings.pop("converge")
    model = {**ours["model"], **case.model}
    corpus = prepare(SyntheticData(vocab_size=ours["data"]["vocab_size"], tokens=100_000), data)
    return {
        **_common_job("probe_cost", len(modes), folder),
        "dialect": "titan_0_3",
        "parallelism": {**DEGREES, **case.parallelism},
        "train_config": {
            "path": str(TRAIN_CONFIG),
            "module": ours["module"],
            "config": ours["config"],
            "model": model,
            "settings": settings,
        },
        "overrides": dict(case.settings),
        "data": {"folder": str(corpus.folder), "digest": "0"},
        "sample_steps": [0, *(step for step, mode in enumerate(modes, 1) if mode == "sampled")],
        "device": "cpu",
    }


# ------------------------------------------------------------------- printing


def _time_lines(case: Case, measured: Times) -> Iterator[str]:
    off = float(np.median(measured.rounds[:, 0]))
    step_0 = f"step 0 sampled in {measured.step_0_s * 1e3:.0f} ms"
    yield f"{case.name}, {measured.clock}: {off * 1e3:.0f} ms a step, {step_0}"
    goals = (None, SAMPLED_STEP_GOAL, DEFAULT_CADENCE_GOAL)
    for (what, ratio), goal in zip(measured.ratios().items(), goals, strict=True):
        interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
        yield f"  {what:<52}{ratio.value:>8.3f}   {interval:<18}{_verdict(ratio.value, goal)}"


def _frozen_lines(case: Case, frozen: Sequence[float], off: Sequence[float]) -> Iterator[str]:
    draw = np.random.default_rng(0)
    medians = [
        np.median(draw.choice(seconds, size=(2000, len(seconds))), axis=1)
        for seconds in (frozen, off)
    ]
    low, high = np.quantile(medians[0] / medians[1], (0.025, 0.975))
    ratio = float(np.median(frozen) / np.median(off))
    yield (
        f"{case.name}: {np.median(off) * 1e3:.0f} ms a step, {len(frozen)} frozen steps in "
        f"{sum(frozen):.1f} s"
    )
    yield f"  {'a frozen step':<52}{ratio:>8.3f}   {low:.3f} to {high:.3f}"


def _memory_lines(case: Case, memory: Memory) -> Iterator[str]:
    kib, off = 1024, memory.step["off"]
    shard = f"largest shard {memory.largest_shard / kib:.0f} KiB"
    yield f"{case.name}: {shard}, a step {off / kib:.0f} KiB"
    rows = {
        "peak of a step without a sample": memory.step["on"] - off,
        "peak of a step with a sample": memory.step["sampled"] - off,
        "held all the time": memory.kept,
        f"within {memory.hook[1]} of a step with a sample": memory.hook[0],
    }
    for what, size in rows.items():
        ratio = size / memory.largest_shard
        yield f"  {what:<52}{size / kib:>8.0f}   {ratio:<18.3f}{_verdict(ratio, 1.0)}"


def _verdict(value: float, goal: float | None) -> str:
    if goal is None:
        return ""
    return f"at most {goal:g}: {'met' if value <= goal else 'MISSED'}"


if __name__ == "__main__":
    sys.exit(main())
