"""How far the same sets lie apart on two machines, such as a GPU with NCCL and a CPU with gloo.

``python benchmarks/two_machines.py reports/gpu/smoke reports/smoke`` prints a row per run of two
reports of an experiment: the largest relative difference of the recomputed loss and grad norm over
all steps ("-" where a run is missing or crashed), and the verdicts of the first and the second.
"""

from __future__ import annotations

import argparse
import sys

import pandas as pd

import converge_harness as converge

SIGNALS = ("loss_recomputed", "grad_norm_recomputed")


def apart(one: converge.Report, other: converge.Report) -> pd.DataFrame:
    """A row per run: largest relative differences over the steps that both have, and verdicts."""
    curves = [each.curves.set_index(["run", "step"])[list(SIGNALS)] for each in (one, other)]
    off = (curves[0] / curves[1] - 1).abs().groupby("run").max()  # NaN: only one has the steps
    first, second = (each.verdicts.set_index("set")["verdict"] for each in (one, other))
    return off.join(first.rename("first")).join(second.rename("second"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs=2, metavar="REPORT", help="a folder of `converge run`")
    table = apart(*map(converge.load, parser.parse_args().reports))
    sys.stdout.write(table.to_string(float_format=lambda value: f"{value:.1e}", na_rep="-") + "\n")


if __name__ == "__main__":
    main()
