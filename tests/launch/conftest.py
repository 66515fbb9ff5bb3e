"""Plans of tiny jobs (``tiny_rank.py``) under real torchrun, with a toolchain's Python."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from forking_python import forking_python
from launch_jobs import ROOT, TOOLCHAIN, tiny_job
from small_disks import small_disk_at

from converge_harness.errors import ToolchainError
from converge_harness.launch import RunOptions
from converge_harness.store import Store
from converge_harness.trainers import find_toolchain


@pytest.fixture(scope="session")
def toolchain():
    try:
        return find_toolchain(
            TOOLCHAIN,
            Path(os.environ.get("CONVERGE_TOOLCHAINS") or ROOT / ".toolchains").absolute(),
        )
    except ToolchainError as error:
        pytest.skip(str(error))


PYTHON_PATH = f"{ROOT / 'src'}{os.pathsep}{Path(__file__).parent}"


@pytest.fixture(scope="session")
def warm_toolchain(toolchain):
    """The toolchain with a Python whose programs are forks of a server that has imported torch."""
    with forking_python(toolchain.python, Path(__file__).parent) as python:
        yield replace(toolchain, python=python)


def maker(toolchain):
    def make(name, **values):
        return replace(tiny_job(name, **values), toolchain=toolchain)

    return make


@pytest.fixture
def tiny(toolchain, monkeypatch):
    """Makes tiny jobs that really run, started as a person would."""
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    return maker(toolchain)


@pytest.fixture
def warm_tiny(warm_toolchain, monkeypatch):
    """The same with fast starts, for tests that are not about how processes start or end."""
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    return maker(warm_toolchain)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "a store")


@pytest.fixture
def cold():
    return RunOptions(warm=False, check=False, rank_module="tiny_rank", grace_s=2.0)


@pytest.fixture
def small_disk(tmp_path):
    with small_disk_at(tmp_path / "small disk", "1m") as folder:
        yield folder
