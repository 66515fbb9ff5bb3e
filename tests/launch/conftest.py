"""Plans of tiny jobs (``tiny_rank.py``) under real torchrun, with a toolchain's Python."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
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


@pytest.fixture
def tiny(toolchain, monkeypatch):
    """Makes tiny jobs that really run."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{Path(__file__).parent}")

    def make(name, **values):
        return replace(tiny_job(name, **values), toolchain=toolchain)

    return make


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
