"""A toolchain's Python for jobs on a cluster whose nodes need no torch: it stands for an agent with
its ranks, and leaves the files that they leave. It finds no fault with any config.

``tiny.mode`` and ``tiny.at`` of the job's overrides make it go wrong, as in ``tiny_rank.py``.
"""

import json
import sys
import time
from pathlib import Path


def main(*arguments):
    if "--check" in arguments:
        json.dump({"problems": []}, sys.stdout)
        return
    job = json.loads(Path(arguments[arguments.index("-m", 3) + 2]).read_text())
    folder, overrides = Path(job["run_folder"]), job["overrides"]
    lives = folder / "lives"
    with lives.open("a") as stream:
        stream.write(f"{time.time()}\n")
    number = len(lives.read_text().splitlines())
    part = folder / "metrics.jsonl.part"
    part.write_text(json.dumps({"schema": 1, "kind": "header", "identity": job["identity"]}) + "\n")
    for step in range(1, job["steps"] + 1):
        if step == overrides.get("tiny.at", 1):
            go_wrong(overrides.get("tiny.mode"), number)
        time.sleep(overrides.get("tiny.seconds", 0.0))
        with part.open("a") as stream:
            stream.write(json.dumps({"kind": "step", "step": step, "loss": 1 / step}) + "\n")
    if job["role"] == "seed checkpoint":
        (folder / "checkpoint" / "step-0").mkdir(parents=True)
        (folder / "checkpoint" / "step-0" / ".metadata").touch()
    (folder / "over").write_text(f"{time.time()}\n")
    part.replace(folder / "metrics.jsonl")


def go_wrong(mode, life):
    if mode == "crash":
        raise ValueError("a tiny node was told to crash")
    if mode == "hang" or (mode == "hang once" and life == 1):
        time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
