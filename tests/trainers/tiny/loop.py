"""What the tiny trainer runs: y = 3x - 1 from samples that every rank draws a part of."""

import argparse
import random
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (("ranks", int), ("batch", int), ("steps", int), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--mistake")
    parser.add_argument("--curve", type=Path)
    told = parser.parse_args()
    if told.mistake == "dies":
        raise RuntimeError("as told")
    draw = random.Random(told.seed)
    weight, bias = draw.uniform(-1, 1), draw.uniform(-1, 1)
    with told.curve.open("w") as curve:
        curve.write("step,loss\n")
        for step in range(1, told.steps + 1):
            samples = [draw.uniform(-1, 1) for _ in range(told.ranks * told.batch)]
            parts = [samples[rank :: told.ranks] for rank in range(told.ranks)]
            errors = [[(x, weight * x + bias - (3 * x - 1)) for x in part] for part in parts]
            loss = sum(sum(e * e for _, e in part) / told.batch for part in errors) / told.ranks
            curve.write(f"{step},{loss!r}\n")
            scale = told.rate * 2 / told.batch / (1 if told.mistake == "scale" else told.ranks)
            weight -= scale * sum(sum(e * x for x, e in part) for part in errors)
            bias -= scale * sum(sum(e for _, e in part) for part in errors)


if __name__ == "__main__":
    main()
