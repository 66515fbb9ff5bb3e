"""One rank of a torchtitan 0.3 job whose probe changes between on, off and sampling.

``torchrun … benchmarks/probed_titan.py JOB.json PLAN.json`` trains, and rank 0 writes what it
measured to the plan's ``result``: the seconds of every step, or the bytes that it allocated. The
plan's ``modes`` says what the probe does in each step; the job's ``sample_steps`` must agree.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from converge_harness.rank.start.parent import die_with_parent
from converge_harness.rank.titan import v0_3
from converge_harness.run_folder.job import read_job

_HOOKS = ("begin_step", "on_batch", "on_logits", "before_clip", "on_log", "end_step")


def main(job_path: str, plan_path: str) -> None:
    die_with_parent()  # an interrupted benchmark leaves no rank behind
    job = read_job(job_path)
    plan = json.loads(Path(plan_path).read_text(encoding="utf-8"))
    v0_3.preload(job.device)
    # Imported only now: preload patches torch before torchtitan is imported.
    from torchtitan.tools.logging import init_logger  # noqa: PLC0415

    from converge_harness.rank.titan.v0_3 import hooks  # noqa: PLC0415
    from converge_harness.rank.titan.v0_3.attention import write_out_masks  # noqa: PLC0415
    from converge_harness.rank.titan.v0_3.config import build_config  # noqa: PLC0415

    init_logger()
    trainer = build_config(job).trainer.build()
    if job.device == "cpu":
        write_out_masks(trainer)
    measure = _Seconds() if plan["measure"] == "seconds" else _Bytes(trainer.device)
    with measure.attaching():
        probe = hooks.attach(trainer, job, lambda _: None)
    frozen = _watch_frozen(probe)
    _rotate(trainer, probe, plan["modes"], measure)
    trainer.train()
    cpu, hooks_cpu = _added_up(measure.cpu), _added_up(measure.hooks_cpu)
    if dist.get_rank() == 0:
        result = {
            "steps": measure.steps,
            "cpu": cpu,
            "hooks_cpu": hooks_cpu,
            "parts": measure.parts,
            "kept": measure.kept,
            "shards": _shards(trainer),
            "frozen": [after - before for before, after in pairwise(frozen)],
        }
        Path(plan["result"]).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    trainer.close()
    dist.destroy_process_group()


class _Seconds:
    """Wall time of the slowest rank, since all ranks synchronise before and after."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.cpu: list[float] = []
        """CPU seconds of this rank, which other programs on the machine disturb less."""
        self.hooks_cpu: list[float] = []
        """CPU seconds in the probe's hooks."""
        self.parts: list[tuple[int, str, float]] = []
        """Step (counted from 0), hook, seconds."""
        self.kept = 0

    def attaching(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def step(self) -> Iterator[None]:
        dist.barrier()
        self.hooks_cpu.append(0.0)
        began, cpu_began = time.perf_counter(), time.process_time()
        yield
        dist.barrier()
        self.steps.append(time.perf_counter() - began)
        self.cpu.append(time.process_time() - cpu_began)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began, cpu_began = time.perf_counter(), time.thread_time()
        yield
        self.hooks_cpu[-1] += time.thread_time() - cpu_began
        self.parts.append((len(self.steps), name, time.perf_counter() - began))


class _Bytes:
    """Peak memory of torch during a step or a hook, minus what it held before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.steps: list[int] = []
        self.cpu: list[float] = []
        self.hooks_cpu: list[float] = []
        self.parts: list[tuple[int, str, int]] = []
        """Step (counted from 0), hook, bytes."""
        self._spans: list[tuple[str, int, int]] = []
        self._events: list[tuple[int, int]] = []
        """Time, and bytes allocated or, if negative, freed."""
        self.kept = 0
        """Bytes that the probe holds permanently."""

    @contextmanager
    def attaching(self) -> Iterator[None]:
        with self._profiled():
            yield
        self.kept = sum(size for _, size in self._events)

    @contextmanager
    def step(self) -> Iterator[None]:
        self._spans.clear()
        with self._profiled():
            yield
        events = self._events
        for name, begin, end in self._spans:
            inside = [event for event in events if begin <= event[0] <= end]
            self.parts.append((len(self.steps), name, _peak(inside)))
        self.steps.append(_peak(events))

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            yield
        self._events = sorted(
            (event.start_ns(), event.nbytes())
            for event in profile.profiler.kineto_results.events()
            if event.name() == "[memory]" and event.device_type() == _device_type(self._device)
        )

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.time_ns()
        yield
        self._spans.append((name, begin, time.time_ns()))


def _rotate(trainer: Any, probe: Any, modes: list[str], measure: _Seconds | _Bytes) -> None:
    """Measure every step, with the probe in the step's mode on all ranks."""
    train_step = trainer.train_step
    at_work = {name: _part(getattr(probe, name), name, measure) for name in _HOOKS}

    def measured(batches: Any) -> None:
        if probe.is_frozen:
            train_step(batches)
            return
        on = modes[trainer.step - 1] != "off"
        for name, hook in at_work.items():
            setattr(probe, name, hook if on else _nothing)
        with measure.step():
            train_step(batches)

    trainer.train_step = measured


def _watch_frozen(probe: Any) -> list[float]:
    """Wall times at which each frozen step begins and the last one ends."""
    times: list[float] = []

    def timed(hook: Callable[[], None]) -> Callable[[], None]:
        def watched() -> None:
            dist.barrier()
            times.append(time.perf_counter())
            hook()

        return watched

    probe.begin_frozen, probe.close_frozen = timed(probe.begin_frozen), timed(probe.close_frozen)
    return times


def _part(hook: Callable[..., Any], name: str, measure: _Seconds | _Bytes) -> Callable[..., Any]:
    def measured(*arguments: Any) -> Any:
        with measure.part(name):
            return hook(*arguments)

    return measured


def _nothing(*_: Any) -> None:
    pass


def _peak(events: list[tuple[int, int]]) -> int:
    """Largest running sum of bytes."""
    held = peak = 0
    for _, size in events:
        held += size
        peak = max(peak, held)
    return peak


def _added_up(mine: list[float]) -> list[float]:
    """Sums over the ranks."""
    total = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def _device_type(device: torch.device) -> Any:
    from torch.autograd import DeviceType  # noqa: PLC0415

    return DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU


def _shards(trainer: Any) -> list[int]:
    """Bytes of this rank's shard of each parameter."""
    from converge_harness.rank.recorder.cross_entropy import local_part  # noqa: PLC0415

    parameters = [p for part in trainer.model_parts for p in part.parameters()]
    return [local_part(p).numel() * p.element_size() for p in parameters]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
