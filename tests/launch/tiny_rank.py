"""A rank that trains nothing: one all-reduce a step, and the files that a real one writes.

``overrides`` of its job say how it goes wrong: ``tiny.mode``, at step ``tiny.at``, on rank 1.
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path


def check(paths):
    problems = []
    for path in paths:
        job = json.loads(Path(path).read_text())
        problems += [
            {"job": path, "key": key, "message": "no such key", "valid": ["tiny.mode", "tiny.at"]}
            for key in job["overrides"]
            if key not in ("tiny.mode", "tiny.at", "tiny.seconds", "tiny.imports")
        ]
    json.dump({"problems": problems}, sys.stdout)


def go_wrong(mode):
    if mode == "crash":
        raise ValueError("a tiny rank was told to crash")
    if mode == "hang":
        time.sleep(3600)
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "port once" and not (marker := Path("../port-was-taken")).exists():
        marker.touch()
        raise RuntimeError("bind: address already in use")
    if mode == "port":
        raise RuntimeError("bind: address already in use")
    if mode == "ignores SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)


def told_to_save(folder):
    """The steps after which a checkpoint is written, because the rank then waits."""
    told = folder / "wait.json"
    return json.loads(told.read_text())["saves"] if told.is_file() else []


def run(path):
    from converge_harness.rank.recorder.imported import leave_imported
    from converge_harness.rank.start.parent import die_with_parent
    from converge_harness.rank.waiting import wait_after

    die_with_parent()
    faulthandler.register(signal.SIGUSR1)
    import torch
    import torch.distributed as dist

    job = json.loads(Path(path).read_text())
    folder = Path(job["run_folder"])
    if (folder / "passes").is_dir() or told_to_save(folder):
        import tiny_passes

        tiny_passes.run(path, None)
        return
    overrides = job["overrides"]
    mode, at = overrides.get("tiny.mode"), overrides.get("tiny.at", 1)
    if name := overrides.get("tiny.imports"):
        importlib.import_module(name)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    part = folder / "metrics.jsonl.part"
    if rank == 0:
        part.write_text(
            json.dumps({"schema": 1, "kind": "header", "identity": job["identity"]}) + "\n"
        )
    last = dist.get_world_size() - 1
    for step in range(1, job["steps"] + 1):
        if rank == last and step == at:
            go_wrong(mode)
        loss = torch.ones(1, dtype=torch.float64) / step
        dist.all_reduce(loss)
        time.sleep(overrides.get("tiny.seconds", 0.0))
        if rank == 0:
            with part.open("a") as stream:
                stream.write(json.dumps({"kind": "step", "step": step, "loss": loss.item()}) + "\n")
        wait_after(folder, step)
    if job["role"] == "seed checkpoint":
        (folder / "checkpoint" / "step-0").mkdir(parents=True)
        (folder / "checkpoint" / "step-0" / ".metadata").touch()
    leave_imported(folder, rank)
    if rank == 0:
        facts = {
            "env": dict(os.environ),
            "cwd": str(Path.cwd()),
            "argv": sys.argv,
            "path": sys.path[0],
        }
        (folder / "surroundings.json").write_text(json.dumps(facts))
        part.replace(folder / "metrics.jsonl")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        check(sys.argv[2:])
    else:
        from torch.distributed.elastic.multiprocessing.errors import record

        record(run)(sys.argv[1])
