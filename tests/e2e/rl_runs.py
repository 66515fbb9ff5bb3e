"""The sets of experiments/rl.toml and rl_mistakes.toml in one run, and what is said of each."""

import json
import os
import shutil
import subprocess
from pathlib import Path

from warm_converge import warm_python
from warm_toolchains import warm_torch

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
RIGHT = (
    "one_rank",
    "ddp4",
    "microbatches_of_2",
    "fsdp2",
    "left_padded",
    "padded_to_the_longest",
    "sequence_microbatches_of_2",
    "sequence_ddp4",
)
WRONG = {
    "microbatch_mean": "tokens weigh the same in each microbatch only, as if each divided by its",
    "rank_mean": "tokens weigh the same in each rank only, as if each divided by its own",
    "not_times_ranks": "which equals 1 / the replicate degree (2)",
    "generation_tokens": "weighs as if divided by 539, and by ",
    "padded_length": "all tokens of the step weigh the same, and in the control tokens weigh the "
    "same in each sample only",
    "padding_counted": "the objective counts other tokens: ",
    "eos_not_counted": "(16 fewer, one for each of 16 samples)",
    "shifted_old": "the objective differs from its term `old` on",
    "no_temperature": "so the loss is a different function of it",
    "coarse_scores": "so the loss is a different function of it",
    "no_positions": "the output of positions is off by 0.87",
    "microbatch_advantages": "the objective differs from its term `advantages` on",
    "other_groups": "the objective differs from its term `advantages` on",
    "turned_clip": "the objective differs from its term `gain` on",
    "twice_negated": "the loss has the other sign",
    "kl_without_gradient": "the term `kl` of the objective has no gradient, and one in the control",
}
"""Words of the cause of each mistake, or of what is wrong first."""


def judged(folder: Path, *names: str, timeout_s: float) -> dict[str, dict]:
    """The named sets of both files together, which share their controls, with fewer repeats."""
    shutil.copytree(EXPERIMENTS / "rl", folder / "rl")
    right, wrong = ((EXPERIMENTS / f"{name}.toml").read_text() for name in ("rl", "rl_mistakes"))
    sets = wrong.split("[[test]]\n", 1)[1]
    file = folder / "both.toml"
    repeats = 'name = "rl"\nrepeats = ["rerun", "ulp", "ulp.2"]'
    file.write_text(right.replace('name = "rl"', repeats, 1) + "\n[[test]]\n" + sets)
    command = [warm_python(), "-m", "converge_harness", "run", str(file), "--only", *names]
    done = subprocess.run(
        [*command, "--store", str(folder / "store"), "--out", str(folder / "out")],
        cwd=ROOT,
        env={
            **os.environ,
            "CONVERGE_TOOLCHAINS": str(warm_torch()),
            "CONVERGE_HISTORY": str(folder / "history.sqlite"),
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    report = folder / "out" / "report.json"
    assert report.is_file(), done.stdout + done.stderr
    return {test["name"]: test for test in json.loads(report.read_text())["tests"]}


def require_told(tests: dict[str, dict]) -> None:
    """Right updates PASS by the checks that count, and every mistake FAILs at once by its cause."""
    said = {name: (test["verdict"], test["cause"]) for name, test in tests.items()}
    for name, test in tests.items():
        if name in RIGHT:
            assert test["verdict"] == "PASS", said[name]
            outcomes = {check["name"]: check["outcome"] for check in test["checks"]}
            for check in ("same-data", "gradients-first-steps", "updates-first-steps"):
                assert outcomes[check] == "PASS", name
        else:
            assert test["verdict"] == "FAIL", said[name]
            assert WRONG[name] in f"{test['cause']}; {test['first_wrong']}", said[name]
            assert test["onset_step"] == 1, name
