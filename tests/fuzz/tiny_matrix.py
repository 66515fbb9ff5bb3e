"""A matrix of plain Python programs that train nothing in a moment: for stores and for kills."""

import json
import venv

PROGRAM = """
import subprocess, sys, time
from pathlib import Path

output, seed, rate, pause, ranks = sys.argv[1:]
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            for _ in range(int(ranks) - 1)]
weight = 2.0 + int(seed) / 100
with (Path(output) / "loss.csv").open("w") as curve:
    curve.write("step,loss,grad_norm\\n")
    for step in range(1, 17):
        error = weight - 1 + 0.01 * ((step * 7919) % 13 - 6)
        weight -= float(rate) * error
        curve.write(f"{step},{1 + error**2!r},{abs(2 * error)!r}\\n")
        curve.flush()
        time.sleep(float(pause))
for child in children:
    child.kill()
    child.wait()
"""
EXPERIMENT = """
schema = 1
name = "tiny"
repeats = ["rerun"]
[trainer]
kind = "command"
command = [
    "{{python}}", "train.py", "{{output}}", "{{seed}}", "{{config.rate}}", "{pause}",
    "{{config.ranks}}",
]
launcher = "none"
python = "python/bin/python"
probe = false
curves = "{{output}}/loss.csv"
[trainer.config]
rate = 0.1
ranks = 1
training = {{ steps = 16, local_batch_size = 1 }}
[control]
name = "control"
parallelism = {{}}
[[test]]
name = "same"
parallelism = {{}}
set = {{ ranks = 2 }}
[[test]]
name = "same_too"
parallelism = {{}}
set = {{ ranks = 3 }}
[[test]]
name = "other_rate"
parallelism = {{}}
set = {{ rate = 0.13 }}
"""
VERDICTS = {"same": "PASS", "same_too": "PASS", "other_rate": "FAIL"}
RUN = ("run", "e.toml", "--store", "store", "--out", "out", "--history", "history.sqlite")


def write_matrix(folder, pause=0.0):
    """The experiment and its program; ``pause`` is in seconds, after each of 16 steps.

    Its Python has no packages: the versions of many would be read for every command.
    """
    if not (folder / "python").exists():
        venv.create(folder / "python", symlinks=True)
    (folder / "train.py").write_text(PROGRAM)
    (folder / "e.toml").write_text(EXPERIMENT.format(pause=pause))


def verdicts(folder):
    """Test set to verdict, of the report that lies in a folder; empty without one."""
    path = folder / "report.json"
    if not path.is_file():
        return {}
    return {test["name"]: test["verdict"] for test in json.loads(path.read_text())["tests"]}
