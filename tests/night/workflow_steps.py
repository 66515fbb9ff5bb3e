"""A small GitHub runner: the ``run`` steps of our action, in bash, as the real one starts them.

Steps that ``use`` an action are left out; what the cache would bring is put into place by the test.
"""

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ACTION = Path(__file__).parents[2] / "action.yml"
REFERENCE = re.compile(r"\b(?:inputs|steps|github|runner)(?:\.[\w-]+)+")
EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}")
SHELL = ("bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c")  # as `shell: bash` there


@dataclass
class Run:
    """One run of the action; ``inputs`` replace its defaults."""

    inputs: dict[str, str]
    workspace: Path
    runner: Path
    """Folder of what the runner itself keeps: its files, temporary files and tools."""
    environment: dict[str, str]
    event: str = "schedule"
    number: int = 1
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    """Step name to exit code, of the steps that ran."""
    log: str = ""

    def __post_init__(self) -> None:
        given = yaml.safe_load(ACTION.read_text())["inputs"]
        defaults = {name: self.text(each.get("default", "")) for name, each in given.items()}
        self.inputs = defaults | self.inputs
        for name in ("temp", "tools"):
            (self.runner / name).mkdir(parents=True, exist_ok=True)
        for name in ("env", "output", "summary"):
            (self.runner / name).write_text("")
        self.environment = {
            **self.environment,
            "GITHUB_ENV": str(self.runner / "env"),
            "GITHUB_OUTPUT": str(self.runner / "output"),
            "GITHUB_STEP_SUMMARY": str(self.runner / "summary"),
            "GITHUB_RUN_ID": str(self.number),
            "GITHUB_RUN_ATTEMPT": "1",
            "GITHUB_SERVER_URL": "https://github.example",
            "GITHUB_REPOSITORY": "somebody/model",
            "RUNNER_TEMP": str(self.runner / "temp"),
            "RUNNER_TOOL_CACHE": str(self.runner / "tools"),
        }

    @property
    def summary(self) -> str:
        return (self.runner / "summary").read_text()

    def steps(self, leave_out: tuple[str, ...] = ()) -> int:
        """Run the steps; return the exit code of the first that failed, or 0."""
        failed = 0
        for step in action_steps():
            if "run" not in step:
                for value in step.get("with", {}).values():
                    self.text(value)  # a name that does not exist raises KeyError
                continue
            if step["name"] in leave_out:
                continue
            condition = str(step.get("if", "success()"))
            if self.value(condition, success=not failed):
                failed = self.step(step) or failed
        return failed

    def step(self, step: dict) -> int:
        own = {name: self.text(value) for name, value in step.get("env", {}).items()}
        result = subprocess.run(
            [*SHELL, step["run"]],
            cwd=self.workspace,
            env={**self.environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=800,
            check=False,
        )
        self.log += f"--- {step['name']}\n{result.stdout}"
        self.codes[step["name"]] = result.returncode
        self.environment |= self.take("env")
        if "id" in step:
            self.outputs[step["id"]] = self.take("output")
        return result.returncode

    def take(self, name: str) -> dict[str, str]:
        """Lines ``NAME=VALUE`` that a step left for later ones."""
        path = self.runner / name
        lines = path.read_text().splitlines()
        path.write_text("")
        return dict(line.split("=", 1) for line in lines)

    def output(self, identifier: str, name: str) -> str:
        """An output of a step, empty where the step has not run."""
        (step,) = (step for step in action_steps() if step.get("id") == identifier)
        if "run" in step and f'"{name}=' not in step["run"]:
            raise KeyError(f"steps.{identifier}.outputs.{name}")
        return self.outputs.get(identifier, {}).get(name, "")

    def text(self, value: object) -> str:
        return EXPRESSION.sub(lambda found: str(self.value(found[1])), str(value))

    def value(self, expression: str, *, success: bool = True) -> object:
        """An expression of GitHub's, of the few kinds that our workflows have."""
        python = REFERENCE.sub(lambda found: repr(self.context(found[0])), expression)
        for theirs, ours in (
            ("!cancelled()", "True"),
            ("success()", str(success)),
            ("&&", " and "),
            ("||", " or "),
        ):
            python = python.replace(theirs, ours)
        return eval(python, {"__builtins__": {}})  # noqa: S307 - our own workflow

    def context(self, reference: str) -> object:
        kind, *names = reference.split(".")
        match kind, names:
            case "inputs", [name]:
                return self.inputs[name]
            case "steps", [identifier, "outputs", name]:
                return self.output(identifier, name)
            case "steps", ["issue", "outcome"]:
                return "success"
            case "github", ["event_name"]:
                return self.event
            case "github" | "runner", [
                "token" | "repository" | "run_id" | "run_attempt" | "os" | "arch" as name
            ]:
                return name
            case "github", ["event", "pull_request", "number"]:
                return 12
        raise KeyError(reference)


def action_steps() -> list[dict]:
    return yaml.safe_load(ACTION.read_text())["runs"]["steps"]


def machine() -> dict[str, str]:
    """The environment of this process, less what would tell our programs of other places."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CONVERGE_", "GITHUB_", "RUNNER_"))
    }
