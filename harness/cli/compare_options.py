"""The options of ``converge compare``, with their help."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.model import Ask

COMPARE = """\
Judge finished run folders, or curves from anywhere, against a control, without training. Readable:
our run folders, TensorBoard folders, JSONL, CSV, torchtitan's console logs, "step loss" texts,
Hugging Face trainer_state.json, logs of MLPerf Training, Weights & Biases offline runs, Megatron-LM
golden values. Curves are judged on what they hold, and what had no evidence is said. Limits come
from repeats of the control (--repeat, --calibration). Curves without any PASS within rounding, or
within a --margin or --tolerance that you set, FAIL where they differ grossly, and are else
INCONCLUSIVE. A --tolerance is of single steps; whether the mean loss is the same is asked beside
it, within 0.1% or your --margin. Curves of other seeds (--seeds) are compared as two groups, by the
mean loss of their second halves; a change that is meant to change numbers (--ask "no worse")
by its loss alone."""

EXAMPLES = """\
examples:
  two runs of ours, by the repeats of the first:
    converge compare .converge/runs/fsdp2-… .converge/runs/fsdp2_tp2-… \\
      --repeat .converge/runs/fsdp2.ulp-… --repeat .converge/runs/fsdp2.ulp.2-…
  several curves against one, with a tolerance somebody chose:
    converge compare main.csv branch.csv nightly.jsonl --tolerance loss=1e-3
  names that are not the usual ones:
    converge compare a.csv b.csv --columns step=iteration loss="lm loss"
  a resumed run, from the step at which it was resumed:
    converge compare whole.csv resumed.csv --from 51
  long noisy curves: is the mean loss the same within 0.5%?
    converge compare a.jsonl b.jsonl --margin 0.005 --out report
  runs of other seeds: two groups, of which no run belongs to one of the other:
    converge compare --seeds --control a1.csv a2.csv a3.csv --test b1.csv b2.csv b3.csv \\
      --margin 0.005
  another optimizer: is its loss no higher than the control's by more than 1%?
    converge compare --seeds --control adamw-*.csv --test muon-*.csv \\
      --ask "no worse" --margin 0.01
  does it reach a loss of 2.5 in no more than 5% more steps?
    converge compare --seeds --control adamw-*.csv --test muon-*.csv --target loss=2.5 \\
      --margin 0.05
  a submission to MLPerf Training: neither faster nor later than its reference?
    converge compare --rcp rcps_llama31_8b.json --test result_*.txt --margin 0.05"""


def add_compare(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], exit_codes: str
) -> None:
    """Add ``converge compare``."""
    compare = commands.add_parser(
        "compare",
        help="judge finished runs, or curves from anywhere, against a control",
        description=COMPARE,
        epilog=f"{EXAMPLES}\n\n{exit_codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compare.add_argument(
        "control", type=Path, nargs="?", metavar="CONTROL", help="run folder or curve file"
    )
    compare.add_argument(
        "tests", type=Path, nargs="*", metavar="TEST", help="run folders or curve files to judge"
    )
    compare.add_argument(
        "--seeds",
        action="store_true",
        help="compare groups of runs of several seeds, which --control and --test name instead of "
        "CONTROL and TEST",
    )
    compare.add_argument(
        "--control",
        dest="control_seeds",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN",
        help="with --seeds: the control's runs, one per seed, at least two",
    )
    compare.add_argument(
        "--test",
        dest="test_seeds",
        type=Path,
        nargs="+",
        action="append",
        default=[],
        metavar="RUN",
        help="with --seeds or --rcp: the runs of one test set, one per seed, at least two (may be "
        "given again for another set)",
    )
    compare.add_argument(
        "--ask",
        choices=[each.value for each in Ask],
        metavar="QUESTION",
        help='what a test set has to show: "same" as the control (default), or "no worse": whole '
        "runs, and a loss that is no higher by more than the margin",
    )
    compare.add_argument(
        "--target",
        metavar="loss=VALUE",
        help="with --seeds: ask whether a loss of VALUE is reached in no more steps than the "
        "control needs, by more than --margin, which is then relative to those steps",
    )
    compare.add_argument(
        "--rcp",
        type=Path,
        metavar="TABLE",
        help="hold the MLPerf Training logs of --test against a table of reference convergence "
        "points (rcps_BENCHMARK.json): by MLPerf's rule, not faster beyond chance; with --margin "
        "no later, too",
    )
    compare.add_argument(
        "--repeat",
        type=Path,
        action="append",
        default=[],
        metavar="RUN",
        help="an A/A repeat of the control, to learn the envelope from (may be given again)",
    )
    compare.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="what repeats of the control taught before, instead of --repeat: a file of `converge "
        "calibrate --out`, or the calibration.json of a report folder",
    )
    compare.add_argument(
        "--columns",
        action="append",
        nargs="+",
        default=[],
        metavar="SIGNAL=COLUMN",
        help="what the curve files call step, loss, grad_norm, lr … where it is another name",
    )
    compare.add_argument(
        "--tolerance",
        action="append",
        default=[],
        metavar="SIGNAL=RELATIVE",
        help="largest allowed relative difference of a signal at any step, as loss=1e-3: replaces "
        "what was learnt",
    )
    compare.add_argument(
        "--margin",
        type=_fraction,
        metavar="RELATIVE",
        help="largest relative difference of the mean loss that still counts as equivalent, as "
        "0.005 for 0.5%% (default: by the precision of the runs)",
    )
    compare.add_argument(
        "--from",
        dest="since",
        type=_step,
        metavar="STEP",
        help="compare the curves from this step on, as where one of them is of a run that was "
        "resumed there (default: all steps)",
    )
    compare.add_argument("--out", type=Path, metavar="DIR", help="write reports here as well")


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no step: write a whole number, as 51")
    return int(text)


def _fraction(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number: write 0.01 for 1%") from None
