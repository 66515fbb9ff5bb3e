"""The wheel, really built and installed outside of this repository: it has all that is needed."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = "converge_harness/shipped"


def run(*command, cwd):
    """Nothing of this checkout is on the paths or in the environment."""
    ours = ("PYTHONPATH", "CONVERGE_TOOLCHAINS", "CONVERGE_STORE", "CONVERGE_NO_SKIPS")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    environment["XDG_CACHE_HOME"] = str(cwd / "cache")
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def scratch(tmp_path_factory, wheel):
    """An environment that has the wheel, and the other packages of that of the tests."""
    folder = tmp_path_factory.mktemp("scratch")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "v", cwd=folder)
    (packages,) = folder.glob("v/lib/python*/site-packages")
    elsewhere = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(elsewhere))
    pip = (sys.executable, "-m", "pip", "--python", folder / "v" / "bin" / "python", "install")
    run(*pip, "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    (folder / "work").mkdir()
    return folder


@pytest.fixture
def converge(scratch):
    return lambda *arguments: run(
        scratch / "v" / "bin" / "converge", *arguments, cwd=scratch / "work"
    )


def files_below(folder, prefix):
    return {
        f"{prefix}/{path.relative_to(folder)}"
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_the_package_and_what_comes_with_it_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as contents:
        found = {name for name in contents.namelist() if ".dist-info/" not in name}
        scripts = [name for name in contents.namelist() if name.endswith("entry_points.txt")]
    assert found == {
        *files_below(ROOT / "harness", "converge_harness"),
        *files_below(ROOT / "experiments", f"{SHIPPED}/experiments"),
        *files_below(ROOT / "train_configs", f"{SHIPPED}/train_configs"),
        f"{SHIPPED}/constraints.txt",
        f"{SHIPPED}/docs/causes.md",
    }
    assert len(scripts) == 1


def test_an_installed_wheel_plans_an_example_and_lists_what_it_can_build(scratch, converge):
    assert "toolchain" in converge("--help")
    listed = converge("toolchain", "list")
    assert listed.startswith(f"toolchains in {scratch / 'work' / 'cache'}/converge/toolchains\n")
    assert "torchtitan-0.3.0" in listed
    converge("init", "--example", "smoke")
    plan = converge("plan", "smoke.toml")
    assert "build it with: converge toolchain build torchtitan-0.3.0" in plan
    code = "import converge_harness; print(converge_harness.__file__)"
    assert str(scratch / "v") in run(scratch / "v" / "bin" / "python", "-c", code, cwd=scratch)


def test_ranks_get_the_very_code_that_is_installed(scratch, wheel):
    """What is installed in toolchains is made of the installed files, not got from an index."""
    code = (
        "from pathlib import Path; from converge_harness.toolchains import this_package; "
        "print(*this_package.requirement(Path('again')), this_package.code_version(), sep='\\n')"
    )
    said = run(scratch / "v" / "bin" / "python", "-c", code, cwd=scratch).splitlines()
    path, code_version = said
    with zipfile.ZipFile(scratch / path) as again, zipfile.ZipFile(wheel) as first:
        assert set(again.namelist()) == set(first.namelist())
        for name in first.namelist():
            if not name.endswith("/RECORD"):
                assert again.read(name) == first.read(name), name
    assert code_version.startswith("0.1.0 ")
    pip = (sys.executable, "-m", "pip", "--python", scratch / "v" / "bin" / "python", "install")
    run(*pip, "--quiet", "--no-deps", "--no-index", "--force-reinstall", path, cwd=scratch)
    again = run(scratch / "v" / "bin" / "python", "-c", code, cwd=scratch).splitlines()
    assert again == said
