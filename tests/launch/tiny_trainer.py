"""A program of a user's: leaves a curve, and goes wrong in the way that it is told."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path


def main(output, steps, mode, at):
    output = Path(output)
    rank = int(os.environ.get("RANK", "0"))
    with (output / f"loss.{rank}.csv").open("w") as curve:
        curve.write("step,loss\n")
        for step in range(1, steps + 1):
            if step == at:
                go_wrong(mode, output, rank)
            curve.write(f"{step},{2.0 / step}\n")
            curve.flush()
    (output / "told.json").write_text(
        json.dumps(
            {"job": os.environ.get("CONVERGE_JOB"), "cwd": str(Path.cwd()), "argv": sys.argv}
        )
    )


def go_wrong(mode, output, rank):
    if mode == "raise" and rank == 1:
        raise ValueError("a tiny trainer was told to raise")
    if mode == "slow":
        time.sleep(2)
    if mode == "meet":
        meet(rank)
    if mode.startswith("port "):
        socket.create_server(("127.0.0.1", int(mode.removeprefix("port "))))
    if mode == "exit":
        sys.exit(3)
    if mode == "no curve":
        (output / f"loss.{rank}.csv").unlink()
        sys.exit(0)
    if mode == "orphan":
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (output / "orphan").write_text(str(child.pid))
    if mode == "hang" or (mode == "raise" and rank != 1):
        time.sleep(600)


def meet(rank):
    """Meet the other of two ranks; rank 0 starts it, unless a launcher of its own has."""
    other = None
    if "WORLD_SIZE" not in os.environ:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
        other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "1"})
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    time.sleep(0.5)
    dist.destroy_process_group()
    if other is not None and other.wait():
        sys.exit("the other rank failed")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
