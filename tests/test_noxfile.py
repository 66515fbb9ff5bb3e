"""What the noxfile makes of pip's settings, of uv's words and of constraints.txt."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


@pytest.fixture(scope="module")
def noxfile():
    made = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    module = importlib.util.module_from_spec(made)
    sys.modules["noxfile"] = module  # its dataclass looks its own module up
    made.loader.exec_module(module)
    return module


TOLD = """:env:.find-links='/wheels/of env'
:env:.timeout='180'
global.cert='/etc/ca.crt'
global.extra-index-url='https://one.example/simple https://two.example/simple'
global.find-links='/wheels/of/file'
install.extra-index-url='https://three.example/simple'
download.find-links='/of/another/command'
"""


def test_pips_environment_counts_more_than_its_files_and_install_more_than_global(noxfile):
    assert noxfile.pip_settings(TOLD) == {
        "cert": "/etc/ca.crt",
        "extra-index-url": "https://three.example/simple",
        "find-links": "/wheels/of env",
        "timeout": "180",
    }
    assert noxfile.pip_settings("") == {}


def test_uv_looks_where_pip_looks(noxfile):
    options, environment = noxfile.uv_settings(
        {
            "index-url": "https://main.example/simple",
            "extra-index-url": "https://one.example/simple\nhttps://two.example/simple",
            "find-links": "/wheels",
            "no-index": "true",
            "trusted-host": "one.example",
            "cert": "/etc/ca.crt",
            "proxy": "http://proxy.example:3128",
        }
    )
    assert options == [
        "--index-url=https://main.example/simple",
        "--extra-index-url=https://one.example/simple",
        "--extra-index-url=https://two.example/simple",
        "--find-links=/wheels",
        "--index-strategy=unsafe-best-match",
        "--no-index",
        "--allow-insecure-host=one.example",
    ]
    assert environment == {
        "SSL_CERT_FILE": "/etc/ca.crt",
        "HTTP_PROXY": "http://proxy.example:3128",
        "HTTPS_PROXY": "http://proxy.example:3128",
    }


def test_without_settings_of_pips_uv_has_its_own(noxfile):
    assert noxfile.uv_settings({}) == (["--index-strategy=unsafe-best-match"], {})
    assert "--no-index" not in noxfile.uv_settings({"no-index": "false"})[0]


NO_VERSION = """
error: No solution found when resolving dependencies
  cause: Because there is no version of torch==9.9.9 and you require torch==9.9.9, we can conclude \
that your requirements are unsatisfiable.
""".replace("\\\n", "")
OF_PIP = "Collecting x\nERROR: No matching distribution found for x\nWARNING: more\n"


@pytest.mark.parametrize(
    ("log", "told"),
    [
        (
            NO_VERSION,
            NO_VERSION.strip().replace("\n  cause:", ":"),
        ),
        (
            "warning: x\nerror: Request failed after 3 retries\n",
            "error: Request failed after 3 retries",
        ),
        (OF_PIP, "ERROR: No matching distribution found for x"),
        ("building\nkilled\n\n", "killed"),
        ("", "uv said nothing"),
    ],
)
def test_the_reason_of_a_build_that_failed_is_one_line(noxfile, log, told):
    assert noxfile.first_error(log) == told


def test_uvs_own_words_are_understood(noxfile, tmp_path):
    """What uv says of a package that is nowhere, asked without any index."""
    uv = (sys.executable, "-m", "uv")
    made = [*uv, "venv", "--quiet", "--python", sys.executable, str(tmp_path / "v")]
    subprocess.run(made, check=True, timeout=60)
    python = str(tmp_path / "v" / "bin" / "python")
    asked = [*uv, "pip", "install", "--quiet", "--no-index", "--python", python, "no-such-package"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode
    told = noxfile.first_error(done.stdout + done.stderr)
    assert told.startswith("error: No solution found")
    assert "no-such-package was not found" in told


def pins(text):
    return dict(re.findall(r"(?m)^([a-z0-9-]+)==(.*)$", text))


def test_every_recipe_has_one_version_of_all_that_constraints_pin(noxfile):
    for name, recipe in noxfile.RECIPES.items():
        instead = {**recipe.instead, "torchtitan": recipe.torchtitan}
        found = pins(noxfile.constraints_of(CONSTRAINTS, instead))
        expected = pins(CONSTRAINTS) | {key: each for key, each in instead.items() if each}
        if not recipe.torchtitan:
            del expected["torchtitan"]
        assert found == expected, name


def test_a_package_that_constraints_do_not_pin_is_not_replaced(noxfile):
    with pytest.raises(ValueError, match="pins no tourch"):
        noxfile.constraints_of(CONSTRAINTS, {"tourch": "2.13.0"})


def test_the_tests_toolchains_are_two_torches_and_two_torchtitans(noxfile):
    """The default is the newest of both; each other one differs from another in one of them."""
    found = {
        name: ({**pins(CONSTRAINTS), **recipe.instead}["torch"], recipe.torchtitan)
        for name in noxfile.TOOLCHAINS
        if (recipe := noxfile.RECIPES[name])
    }
    assert found == {
        "torchtitan-0.3.0": ("2.15.0", "0.3.0"),
        "torchtitan-0.3.0-torch-2.13": ("2.13.0", "0.3.0"),
        "torchtitan-0.2.2": ("2.13.0", "0.2.2"),
    }


def test_hidden_programs_are_not_found_and_all_others_are(noxfile, tmp_path):
    for place, names in {"a": ("squeue", "sh"), "b": ("sh", "sbatch", "ls")}.items():
        (tmp_path / place).mkdir()
        for name in names:
            program = tmp_path / place / name
            program.write_text(f"#!/bin/sh\necho {place}\n")
            program.chmod(0o755)
    path = os.pathsep.join(str(tmp_path / place) for place in ("a", "nowhere", "b"))
    links = tmp_path / "links"
    for _ in range(2):  # the second time over what the first has left
        noxfile.link_all_but({"squeue", "sbatch"}, path, links)
    assert sorted(each.name for each in links.iterdir()) == ["ls", "sh"]
    assert shutil.which("sbatch", path=str(links)) is None
    assert subprocess.check_output([str(links / "sh")], text=True) == "a\n"  # the first on the PATH


def test_tests_that_may_use_slurm_a_browser_or_shellcheck_are_found(noxfile):
    found = noxfile.tests_naming(ROOT / "tests", noxfile.OPTIONAL_TESTS)
    names = {str(Path(each).relative_to(ROOT / "tests")) for each in found}
    assert {
        "e2e/test_slurm_runs.py",
        "history/test_history_page.py",
        "launch/slurm/test_batch_script.py",
        "launch/slurm/test_slurm_backend.py",
        "night/test_workflows.py",
        "report/test_browser.py",
    } <= names
    assert not any(each.startswith("rank/") or "judge" in each for each in names)


def test_rank_tests_that_know_no_torchtitan_are_found(noxfile):
    """The older torchtitan's toolchain leaves them to the gate."""
    rank = ROOT / "tests" / "rank"
    found = {Path(each).name for each in noxfile.tests_naming(rank, noxfile.RELEASES)}
    assert {
        "test_titan_0_2_runs.py",
        "test_titan_0_2_shim.py",
        "test_permuted_runs.py",  # by the jobs of whichever release there is
        "test_corpus_in_torchtitan.py",
    } <= found
    assert found.isdisjoint({"test_digest.py", "test_replicas.py", "test_data_order.py"})
    real = {path.name for path in rank.glob("test_*.py") if "_jobs" in path.read_text()}
    assert real <= found


class Asked:
    """A session that notes what it is asked to run."""

    def __init__(self, *posargs):
        self.posargs = list(posargs)
        self.ran = []

    def run(self, *command, **_options):
        self.ran.append(command)


@pytest.fixture
def asked(noxfile, monkeypatch):
    """Commands of the session of the tests, by their Pythons."""

    def ask(*posargs):
        session = Asked(*posargs)
        monkeypatch.setattr(noxfile, "install_light", lambda *_: None)
        monkeypatch.setattr(noxfile, "build_toolchain", lambda _, name: name)
        noxfile.tests.func(session)
        return {python: command for python, *command in session.ran}

    return ask


def test_only_the_gate_waits_for_slow_tests_and_for_all_rank_code_on_the_older_torch(
    noxfile, asked
):
    quick, gate = asked(), asked("--slow")
    assert list(quick) == list(gate) == [*noxfile.TOOLCHAINS, "python"]
    assert all("not slow" in command for command in quick.values())
    assert not any("-m" in command[2:] for command in gate.values())
    assert "tests/rank" in quick[noxfile.DEFAULT_TOOLCHAIN]
    assert "tests/rank" not in quick[noxfile.OLDER_TOOLCHAIN]
    assert "tests/rank" in gate[noxfile.OLDER_TOOLCHAIN]
    assert "nox -s tests -- --slow\n" in (ROOT / ".ci" / "run").read_text()


def test_other_words_are_pytests_and_choose_among_light_tests(asked):
    (command,) = asked("tests/judge", "-k", "slow").values()
    assert command == ["-m", "pytest", "--ignore=tests/rank", "tests/judge", "-k", "slow"]


def test_a_matrix_of_each_release_is_not_slow():
    for release in ("0_2", "0_3"):
        text = (ROOT / "tests" / "e2e" / f"test_titan_{release}_matrix.py").read_text()
        assert "mark.slow" not in text
