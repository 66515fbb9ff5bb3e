"""A program without a probe: plain Python, one curve, and one way of going wrong at a time."""

import argparse
import os
import random
import sys
import time
from pathlib import Path


def main(steps, seed, output, bug):
    if bug == "nothing":
        return
    if bug == "held" and "SLURM_RESTART_COUNT" not in os.environ:
        (output / "held").touch()
        time.sleep(600)
    if (output / "held").exists():
        raise ValueError("the output of an earlier start is still there")
    (output / "flag").write_text(os.environ.get("FLAG", ""))
    numbers = random.Random(seed)
    weight, target = numbers.uniform(2, 3), 1.0
    header = {"other column": "iteration,accuracy"}.get(bug, "iteration,train/loss")
    writes = os.environ.get("RANK", "0") == "0"
    with (output / "loss.csv" if writes else Path(os.devnull)).open("w") as curve:
        curve.write("" if bug == "empty" else f"{header}\n")
        for step in range(1, (2 * steps if bug == "longer" else steps) + 1):
            error = weight - target + 0.01 * numbers.gauss(0, 1)
            weight -= (0.12 if bug == "rate" else 0.1) * error
            loss = float("nan") if bug == "nan" and step > steps // 2 else error**2
            if bug != "empty":
                curve.write(f"{step},{loss!r}\n")
                curve.flush()
            if step == steps // 2 and bug == "half":
                sys.exit(0)
            if step == steps // 2 and bug == "raise":
                raise ValueError("told to raise")
            if step == steps // 2 and bug == "hang":
                time.sleep(600)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--bug")
    arguments = parser.parse_args()
    main(**vars(arguments))
