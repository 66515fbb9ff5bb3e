"""The action as nightly.yml calls it: its steps run here, night after night, on real matrices."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from two_layers import with_two_layers
from warm_converge import warm_python
from warm_toolchains import TOOLCHAINS, warm_toolchains
from workflow_steps import Run, action_steps, machine

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
BUGS = "List the bugs that nothing found"
INSTALL = ("Install converge", "Build the toolchains")
EXPERIMENT = """
schema = 1
name = "tiny"
repeats = ["rerun"]
[trainer]
train_config = "train_configs/llama3_debug.toml"
[trainer.set]
"training.steps" = 2
"training.seq_len" = 64
[control]
name = "fsdp2"
parallelism.dp_shard = 2
[[test]]
name = "ddp2"
parallelism.dp_replicate = 2
"""
BUG = """inject = "tests/e2e/injections.py:double_gradients"\n"""
GH = """#!/bin/sh
echo "$@" >> "$GH_LOG"
if [ "$2" = list ]; then echo "$GH_OPEN"; fi
"""


class Nights:
    """A repository whose workflow runs night after night, as on hosted runners."""

    def __init__(self, folder):
        self.folder = folder
        self.workspace = folder / "model"
        self.workspace.mkdir()
        with_two_layers(self.workspace)
        (self.workspace / "tests").symlink_to(ROOT / "tests")
        self.cache = folder / "cache.sqlite"
        self.calls = folder / "gh.log"
        self.calls.write_text("")
        programs = folder / "bin"
        programs.mkdir()
        (programs / "gh").write_text(GH)
        (programs / "gh").chmod(stat.S_IRWXU)
        self.environment = {
            **machine(),
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GH_LOG": str(self.calls),
        }
        self.installed = folder / "installed"
        self.installed.mkdir()
        command = self.installed / "converge"
        command.write_text(f'#!/bin/sh\nexec {warm_python()} -m converge_harness "$@"\n')
        command.chmod(stat.S_IRWXU)
        self.toolchains = TOOLCHAINS
        self.number = 0
        self.event = "schedule"

    def night(self, experiment: str, expect: str = "pass") -> tuple[int, Run]:
        """One night on a new runner, to which the cache brings toolchains and history."""
        self.number += 1
        (self.workspace / "tiny.toml").write_text(experiment)
        runner = self.folder / f"runner{self.number}"
        inputs = {"experiment": "tiny.toml", "expect": expect}
        run = Run(inputs, self.workspace, runner, dict(self.environment), number=self.number)
        run.event = self.event
        (runner / "tools" / "converge").symlink_to(self.toolchains)
        if self.installed:
            (runner / "temp" / "converge-python").mkdir()
            (runner / "temp" / "converge-python" / "bin").symlink_to(self.installed)
        history = runner / "temp" / "converge-tiny" / "history.sqlite"
        if self.cache.exists():
            history.parent.mkdir()
            shutil.copy(self.cache, history)
        code = run.steps(leave_out=INSTALL)
        if history.exists():
            shutil.copy(history, self.cache)
        return code, run

    def asked_of_github(self) -> list[str]:
        lines = self.calls.read_text().splitlines()
        self.calls.write_text("")
        return [" ".join(line.split()[:2]) for line in lines]


@pytest.mark.slow
def test_a_week_of_nights(tmp_path):
    nights = Nights(tmp_path)
    nights.toolchains = warm_toolchains()

    code, run = nights.night(EXPERIMENT)
    assert code == 0, run.log
    assert "PASS" in run.summary
    assert "ddp2" in run.summary
    assert nights.asked_of_github() == []

    bad = EXPERIMENT + BUG
    code, run = nights.night(bad)
    assert code == 1, run.log
    assert set(run.codes.values()) == {0, 1}  # the gate alone fails
    assert run.codes["Gate"] == 1
    assert "FAIL" in run.summary
    message = (run.runner / "temp" / "message-tiny.md").read_text()
    assert "It passed last on" in message
    assert "https://github.example/somebody/model/actions/runs/2" in message
    assert nights.asked_of_github() == ["issue list", "issue create"]
    (trends,) = nights.workspace.glob("reports/tiny-2-1/history.html")
    assert "ddp2" in trends.read_text()

    code, run = nights.night(bad)
    assert code == 1, run.log
    assert "still bad, already reported" in run.log
    assert nights.asked_of_github() == []

    # The same files as an experiment of bugs: found is what is wanted.
    run.environment["GATE_EXPECT"] = "no pass"
    bugs, gate = (step for step in action_steps() if step.get("name") in ("Gate", BUGS))
    assert (run.step(bugs), run.step(gate)) == (0, 0), run.log
    run.environment["GATE_REPORT"] = "reports/tiny-1-1"
    assert run.step(bugs) == 0
    assert run.step(gate) != 0
    assert "bugs that nothing found: ddp2" in run.log


def test_a_wrong_file_is_red_and_reported_once(tmp_path):
    nights = Nights(tmp_path)
    wrong = EXPERIMENT.replace("dp_replicate", "dp_copies")
    code, run = nights.night(wrong)
    assert code == 2, run.log
    assert {name: each for name, each in run.codes.items() if each} == {"Gate": 2}
    assert "no report was written" in run.summary
    message = (run.runner / "temp" / "message-tiny.md").read_text()
    assert "nothing was judged" in message
    assert "dp_copies" in message
    assert nights.asked_of_github() == ["issue list", "issue create"]
    code, run = nights.night(wrong)
    assert (code, nights.asked_of_github()) == (2, []), run.log


def test_a_night_without_converge_is_reported(tmp_path):
    nights = Nights(tmp_path)
    nights.installed = None
    code, run = nights.night(EXPERIMENT)
    assert [name for name, each in run.codes.items() if each] == ["Gate"], run.log
    assert code != 0
    assert nights.asked_of_github() == ["issue list", "issue create"]
    nights.environment["GH_OPEN"] = "7"  # the issue of the night before
    nights.night(EXPERIMENT)
    assert nights.asked_of_github() == ["issue list"]


def test_a_night_started_by_hand_opens_no_issue_and_is_not_remembered(tmp_path):
    nights = Nights(tmp_path)
    nights.event = "workflow_dispatch"
    code, run = nights.night(EXPERIMENT.replace("dp_replicate", "dp_copies"))
    assert (code, nights.asked_of_github()) == (2, []), run.log
    (save,) = (step for step in action_steps() if step.get("name") == "Save the history")
    assert not run.value(save["if"])


def test_every_experiment_of_the_night_is_there():
    jobs = yaml.safe_load((WORKFLOWS / "nightly.yml").read_text())["jobs"]
    hosted = [each["experiment"] for each in jobs["cpu"]["strategy"]["matrix"]["include"]]
    for name in (*hosted, jobs["gpu"]["with"]["experiment"]):
        assert (ROOT / name).is_file(), name


def test_no_experiment_restores_the_history_of_another():
    (restore,) = (step for step in action_steps() if step.get("name") == "Restore the history")

    def filled(text, name):
        return text.replace("${{ steps.places.outputs.name }}", name)

    key, prefix = restore["with"]["key"], restore["with"]["restore-keys"]
    assert filled(key, "smoke").startswith(filled(prefix, "smoke"))
    assert not filled(key, "smoke-long").startswith(filled(prefix, "smoke"))


def test_a_wrong_expectation_is_refused_before_anything_runs(tmp_path):
    nights = Nights(tmp_path)
    code, run = nights.night(EXPERIMENT, expect="fail")
    assert run.codes["Choose the places"] == 2
    assert "'fail' is neither 'pass' nor 'no pass'" in run.log
    assert code != 0
    assert "Run the matrix" not in run.codes


def test_what_could_not_be_reported_is_not_remembered():
    names = [step.get("name") for step in action_steps()]
    report, save = (
        names.index("Open an issue, or comment on the open one"),
        names.index("Save the history"),
    )
    assert report < save
    assert "steps.issue.outcome == 'success'" in action_steps()[save]["if"]


def test_values_of_others_go_into_variables_and_not_into_a_script():
    for step in action_steps():
        assert "${{" not in step.get("run", ""), step["name"]


def test_scripts_of_the_steps_are_sound(tmp_path):
    if shutil.which("shellcheck") is None:
        pytest.skip("there is no shellcheck: install shellcheck")
    for step in action_steps():
        if "run" in step:
            path = tmp_path / "step.sh"
            path.write_text("set -eo pipefail\n" + step["run"])
            found = subprocess.run(
                ["shellcheck", "--shell=bash", str(path)],
                capture_output=True,
                text=True,
                check=False,
            )
            assert found.returncode == 0, step["name"] + found.stdout
