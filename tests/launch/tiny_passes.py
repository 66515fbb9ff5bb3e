"""A rank of a run in several passes that trains nothing: one all-reduce a step, checkpoints, and
faults that strike once, as ``converge_harness.rank`` makes them.

``tiny.mode`` and ``tiny.at`` of its job's overrides make it go wrong in every pass, and
``tiny.memory`` is how many bytes its ranks claim to have. It waits after the step that
``hold-after`` beside its run folder names, as long as that file is there.
"""

import argparse
import faulthandler
import json
import os
import signal
import time
from pathlib import Path

import tiny_rank

SHARD = b"a shard of some length"
HELD = ("preempt", "agent_loss", "join")


def from_rank_0(value):
    import torch
    import torch.distributed as dist

    told = torch.tensor([value])
    dist.broadcast(told, src=0)
    return int(told)


def newest_checkpoint(folder):
    found = [
        int(path.parent.name.removeprefix("step-"))
        for path in folder.glob("checkpoint/step-*/.metadata")
    ]
    step = max(found, default=0)
    if step and (folder / "checkpoint" / f"step-{step}" / "shard").read_bytes() != SHARD:
        raise ValueError(f"the torn checkpoint of step {step} was loaded")
    return step


def strike(folder, index, fault):
    import torch.distributed as dist

    struck = folder / "faults" / f"{index}.json"
    if struck.exists():
        return
    dist.barrier()  # all have looked
    if dist.get_rank() != fault["rank"]:
        return
    struck.parent.mkdir(exist_ok=True)
    struck.write_text(json.dumps({"schema": 1, "index": index, "step": fault["step"]}))
    if fault["kind"] == "hang":
        time.sleep(3600)
    if fault["kind"] == "ckpt_torn" and fault["torn"] == "truncated":
        (folder / "checkpoint" / f"step-{fault['step']}" / "shard").write_bytes(SHARD[:5])
    os.kill(os.getpid(), signal.SIGKILL)


def save(folder, of_pass, step, *, whole):
    checkpoint = folder / "checkpoint" / f"step-{step}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    manifest = of_pass / "state" / f"saved-step-{step:08d}.json"
    manifest.parent.mkdir(exist_ok=True)
    manifest.with_suffix(".npz").touch()
    (checkpoint / "shard").write_bytes(SHARD)
    if not whole:
        return
    (checkpoint / ".metadata").touch()
    manifest.write_text(json.dumps({"schema": 1, "files": {"shard": len(SHARD)}}))


def hold(over):
    deadline = time.monotonic() + 120
    while not over.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


class Tiny:
    """One rank in one pass."""

    def __init__(self, job, segment):
        import torch.distributed as dist

        self.job, self.folder, self.overrides = job, Path(job["run_folder"]), job["overrides"]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.told = tiny_rank.told_to_save(self.folder)
        self.first = from_rank_0(newest_checkpoint(self.folder) if self.rank == 0 else 0)
        number = from_rank_0(1 + len(list(self.folder.glob("passes/*"))))
        self.of_pass = self.folder / "passes" / f"{number:03d}"
        self.last = job["steps"] if segment is None else job["segments"][segment]["until"]
        if self.rank == 0:
            self.of_pass.mkdir(parents=True)
        self.write(schema=1, kind="header", world_size=self.world, segment=segment)
        self.write(kind="loaded", step=self.first, at=time.time())

    def write(self, **line):
        if self.rank == 0:
            with (self.of_pass / "metrics.jsonl.part").open("a") as stream:
                stream.write(json.dumps(line) + "\n")

    def faults(self, step, *kinds):
        return [
            (index, fault)
            for index, fault in enumerate(self.job["faults"])
            if fault["step"] == step and fault["kind"] in kinds
        ]

    def train(self):
        import torch
        import torch.distributed as dist

        from converge_harness.rank.waiting import wait_after

        if self.first:
            wait_after(self.folder, self.first)
        for step in range(self.first + 1, self.last + 1):
            for index, fault in self.faults(step, "kill", "hang"):
                strike(self.folder, index, fault)
            if step == self.overrides.get("tiny.at") and self.rank == self.world - 1:
                tiny_rank.go_wrong(self.overrides["tiny.mode"])
            loss = torch.ones(1, dtype=torch.float64) / step
            dist.all_reduce(loss)
            time.sleep(self.overrides.get("tiny.seconds", 0.0))
            memory = self.overrides.get("tiny.memory")
            line = {"loss": loss.item() / self.world, "at": time.time(), "memory_bytes": memory}
            self.write(kind="step", step=step, **line)
            self.save(step)
            for index, fault in self.faults(step, "ckpt_torn"):
                strike(self.folder, index, fault)
            for index, _ in self.faults(step, *HELD):
                hold(self.folder / "faults" / f"{index}.over.json")
            self.hold_after(step)
            wait_after(self.folder, step)
            dist.barrier()
        self.write(kind="end", steps=self.last)
        if self.rank == 0:
            part = self.of_pass / "metrics.jsonl.part"
            part.replace(self.of_pass / "metrics.jsonl")
        dist.barrier()

    def hold_after(self, step):
        told = self.folder.parent / "hold-after"
        while told.exists() and told.read_text() == str(step):
            time.sleep(0.02)

    def save(self, step):
        due = step % (self.job["checkpoint_every"] or self.last) == 0 or step == self.last
        due = due or step in self.told
        if self.rank != 0 or not due or self.overrides.get("tiny.mode") == "forget":
            return
        torn = self.faults(step, "ckpt_torn")
        dies = any(
            fault["torn"] == "death" and not (self.folder / "faults" / f"{index}.json").exists()
            for index, fault in torn
        )
        save(self.folder, self.of_pass, step, whole=not dies)


def run(path, segment):
    from converge_harness.rank.start.loopback import listen_on_loopback
    from converge_harness.rank.start.parent import die_with_parent

    die_with_parent()
    listen_on_loopback()
    faulthandler.register(signal.SIGUSR1)
    import torch.distributed as dist

    dist.init_process_group("gloo")
    Tiny(json.loads(Path(path).read_text()), segment).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("--segment", type=int)
    options = parser.parse_args()
    record(run)(options.job, options.segment)
