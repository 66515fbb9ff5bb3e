"""The gate in a repository of one's own: the action and the GitLab job, converge from its wheel."""

import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from curve_program import EXPERIMENT, PROGRAM, WRONG
from workflow_steps import ACTION, Run, action_steps, machine

from converge_harness import DISTRIBUTION, __version__

ROOT = Path(__file__).parents[2]
GITLAB = ROOT / ".gitlab" / "gate.yml"
WORKFLOWS = ROOT / ".github" / "workflows"
# `gh api`: lists comments, writes them.
GH = """#!/bin/sh
echo "$@" >> "$GH_LOG"
case "$*" in
  *"--method POST"*) [ "$GH_FORK" ] && exit 1; cp "$RUNNER_TEMP/comment.md" "$GH_COMMENT";;
  *"--method PATCH"*) cp "$RUNNER_TEMP/comment.md" "$GH_COMMENT";;
  *) [ -f "$GH_COMMENT" ] && echo 34;;
esac
exit 0
"""


# Lists the notes of a merge request, writes notes and issues.
CURL = """#!/bin/sh
echo "$@" >> "$CURL_LOG"
case "$*" in
  *per_page*) if [ -f "$CURL_NOTE" ]; then cat "$CURL_NOTE"; else echo "[]"; fi;;
  *"--request POST"*) echo '[{"id": 78, "body": "<!-- converge: mine --> …"}]' > "$CURL_NOTE";;
  *issues*) exit "$CURL_ISSUES";;
esac
"""

# An environment that it makes finds what $NEEDED has.
PYTHON = f"""#!/bin/sh
{sys.executable} "$@" || exit
if [ "$2" = venv ]; then cd "$3"/lib/*/site-packages; echo "$NEEDED" > needed.pth; fi
"""


@pytest.fixture
def repository(tmp_path):
    """A repository that has nothing of this one."""
    folder = tmp_path / "mine"
    (folder / "experiments").mkdir(parents=True)
    (folder / "program.py").write_text(PROGRAM)
    (folder / "experiments" / "mine.toml").write_text(EXPERIMENT)
    git = ("git", "-c", "user.name=me", "-c", "user.email=me@example.org", "-C", str(folder))
    for command in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "-m", "Begin")):
        subprocess.run((*git, *command), check=True)
    return folder


def without_dependencies(folder):
    """Variables for pip to install converge alone, beside links to all that these tests have.

    Installing the rest takes longer than all jobs here. ``tests/test_architecture.py`` checks that
    the wheel names it.
    """
    links = folder / "needed"
    links.mkdir(exist_ok=True)
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if "converge" not in each.name and not (links / each.name).is_symlink():
            (links / each.name).symlink_to(each)
    return {"PIP_NO_DEPS": "1", "NEEDED": str(links)}


def on_github(repository, runner, wheel, number=1, **environment):
    """A run of the action for pull request 12."""
    runner.mkdir(exist_ok=True)
    environment = {
        **machine(),
        "PATH": path_with(runner, gh=GH, python=PYTHON),
        **without_dependencies(runner),
        "GH_LOG": str(runner / "gh.log"),
        "GH_COMMENT": str(runner / "comment.md"),
        **environment,
    }
    inputs = {"experiment": "experiments/mine.toml", "converge": str(wheel)}
    return Run(inputs, repository, runner, environment, event="pull_request", number=number)


def path_with(folder, **scripts):
    """A $PATH with these programs and the Python of the tests before all else."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, script in scripts.items():
        (folder / "bin" / name).write_text(script)
        (folder / "bin" / name).chmod(stat.S_IRWXU)
    return os.pathsep.join(
        (str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"])
    )


@pytest.mark.slow
def test_the_action_gates_a_repository_that_has_only_an_experiment(repository, tmp_path, wheel):
    runner = tmp_path / "runner"
    experiment = repository / "experiments" / "mine.toml"

    experiment.write_text(EXPERIMENT + WRONG)
    run = on_github(repository, runner, wheel)
    assert run.steps() == 1, run.log
    assert {name for name, code in run.codes.items() if code} == {"Gate"}
    assert set(run.codes) == {step["name"] for step in action_steps() if "run" in step} - {
        "Open an issue, or comment on the open one",  # of scheduled runs
        "List the bugs that nothing found",  # of experiments of bugs
    }
    assert __version__ in run.log
    comment = (runner / "comment.md").read_text()
    assert "doubled" in comment
    assert "FAIL" in comment
    assert "<details>" not in comment
    assert "https://github.example/somebody/model/actions/runs/1" in comment
    assert "POST repos/repository/issues/12/comments" in (runner / "gh.log").read_text()

    # The next commit of the pull request fixes it, and changes the comment.
    experiment.write_text(EXPERIMENT)
    run = on_github(repository, runner, wheel, number=2)
    assert run.steps(leave_out=("Install converge",)) == 0, run.log
    assert "doubled" not in (runner / "comment.md").read_text()
    assert "PATCH repos/repository/issues/comments/34" in (runner / "gh.log").read_text()

    # From a fork the token may not write.
    (runner / "comment.md").unlink()
    run = on_github(repository, runner, wheel, GH_FORK="yes")
    assert run.steps(leave_out=("Install converge",)) == 0, run.log
    assert "::warning::no comment was written" in run.log


@pytest.mark.slow
def test_the_gitlab_job_gates_a_repository_that_has_only_an_experiment(repository, tmp_path, wheel):
    job = yaml.safe_load(GITLAB.read_text())[".converge"]
    environment = {
        **machine(),
        **without_dependencies(tmp_path),
        "PATH": path_with(tmp_path, curl=CURL, python=PYTHON),
        "EXPERIMENT": "experiments/mine.toml",
        "TMPDIR": str(tmp_path / "tmp"),
        "CURL_LOG": str(tmp_path / "curl.log"),
        "CURL_NOTE": str(tmp_path / "note.json"),
        "CURL_ISSUES": "22",
        "CI_PROJECT_DIR": str(repository),
        "CI_JOB_NAME_SLUG": "mine",
        "CI_JOB_ID": "1",
        "CI_PIPELINE_SOURCE": "merge_request_event",
        "CI_MERGE_REQUEST_IID": "12",
        "CI_API_V4_URL": "https://gitlab.example/api/v4",
        "CI_PROJECT_ID": "56",
        "CI_PIPELINE_URL": "https://gitlab.example/p/1",
        "CONVERGE_TOKEN": "secret",
    }
    for name, value in {**job["variables"], "CONVERGE": str(wheel)}.items():
        if name != "PIP_EXTRA_INDEX_URL":  # that of this machine
            environment[name] = value.replace("$CI_PROJECT_DIR", str(repository))

    def asked():
        return (tmp_path / "curl.log").read_text()

    def pipeline(number, *, again=False):
        lines = [
            line
            for line in job["script"]
            if not (again and ("venv" in line or "pip install" in line))
        ]
        environment["CI_JOB_ID"] = str(number)
        return subprocess.run(
            ("bash", "-eo", "pipefail", "-c", "\n".join(lines)),
            cwd=repository,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    (tmp_path / "tmp").mkdir()
    (repository / "experiments" / "mine.toml").write_text(EXPERIMENT + WRONG)
    done = pipeline(1)
    assert done.returncode == 1, done.stdout + done.stderr
    report = repository / "reports" / "mine" / "1" / "report.json"
    verdicts = {each["name"]: each["verdict"] for each in json.loads(report.read_text())["tests"]}
    assert verdicts == {"again": "PASS", "doubled": "FAIL"}
    assert "--request POST" in asked()
    assert "doubled" in (repository / "comment.md").read_text()
    for path in (*job["artifacts"]["paths"], job["artifacts"]["reports"]["junit"]):
        place = path.replace("$CI_JOB_NAME_SLUG", "mine").replace("$CI_JOB_ID", "1")
        assert (repository / place).exists(), path
    # Once more, without installing it again: the note that is there is changed.
    (installed,) = (tmp_path / "tmp").glob("*/bin/converge")
    environment["PATH"] = f"{installed.parent}:{environment['PATH']}"
    assert pipeline(2, again=True).returncode == 1
    assert "--request PUT" in asked()
    assert "notes/78" in asked()

    # A merge request only reads the cache with the history.
    (history,) = (each for each in job["cache"] if each["paths"] == [".history/"])
    assert (history["policy"], job["variables"]["HISTORY_POLICY"]) == ("$HISTORY_POLICY", "pull")
    shutil.rmtree(repository / ".history")
    environment["CI_PIPELINE_SOURCE"] = "schedule"
    assert pipeline(3, again=True).returncode == 1  # the issue could not be written
    assert asked().count("/projects/56/issues") == 1
    assert not list((repository / ".history").glob("*.sqlite"))
    environment["CURL_ISSUES"] = "0"
    assert pipeline(4, again=True).returncode == 1
    assert asked().count("/projects/56/issues") == 2
    assert pipeline(5, again=True).returncode == 1  # is no news
    assert asked().count("/projects/56/issues") == 2
    # Two nights on which nothing is judged: the first is news.
    (repository / "experiments" / "mine.toml").write_text("schema = 2")
    assert pipeline(6, again=True).returncode == 2
    assert pipeline(7, again=True).returncode == 2
    assert asked().count("/projects/56/issues") == 3


def test_what_is_installed_by_default_is_this_version():
    published = f"{DISTRIBUTION}=={__version__}"
    action = yaml.safe_load(ACTION.read_text())["inputs"]
    # YAML 1.1 reads the key `on` as true.
    workflow = yaml.safe_load((WORKFLOWS / "matrix.yml").read_text())[True]["workflow_call"]
    job = yaml.safe_load(GITLAB.read_text())[".converge"]
    assert action["converge"]["default"] == published
    assert workflow["inputs"]["converge"]["default"] == published
    assert job["variables"]["CONVERGE"] == published


def test_the_workflow_gives_the_action_what_it_takes():
    inputs = yaml.safe_load(ACTION.read_text())["inputs"]
    steps = yaml.safe_load((WORKFLOWS / "matrix.yml").read_text())["jobs"]["matrix"]["steps"]
    (call,) = (step for step in steps if step.get("uses", "").startswith("./"))
    assert set(call["with"]) <= set(inputs)
    required = {name for name, each in inputs.items() if each.get("required")}
    assert required <= set(call["with"])


def test_the_action_that_is_checked_out_leaves_the_tree_clean(repository):
    (repository / ".converge-action").mkdir()
    (repository / ".converge-action" / "action.yml").write_text("")
    steps = yaml.safe_load((WORKFLOWS / "matrix.yml").read_text())["jobs"]["matrix"]["steps"]
    (step,) = (step for step in steps if "run" in step)
    (repository / ".git" / "info").mkdir(exist_ok=True)
    subprocess.run(("bash", "-e", "-c", step["run"]), cwd=repository, check=True)
    status = ("git", "-C", str(repository), "status", "--porcelain")
    assert subprocess.run(status, capture_output=True, text=True, check=True).stdout == ""
