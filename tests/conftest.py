"""What all tests share: a real Slurm on loopback, what skips are allowed, and their order.

In CI a skip hides a failure: with ``CONVERGE_NO_SKIPS`` what a test needs has to be there.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine may take any time for an example.
settings.register_profile("converge", deadline=None)
settings.load_profile("converge")

MEANT = (
    "needs torchtitan 0.",  # rank tests run in every toolchain, each its own part
    "needs toolchain ",  # an optional one: sessions `streaming` and `e2e` build theirs
    "needs a checkout of Megatron-LM",  # set MEGATRON_LM, and session `e2e` runs its tests
    "needs a GPU",  # session `gpu` runs those tests where there is one
    "root writes everywhere",
)
"""How the reasons start of skips that say "not here", and not "something is missing"."""


def _refuse(report):
    if not (report.skipped and "CONVERGE_NO_SKIPS" in os.environ) or hasattr(report, "wasxfail"):
        return
    _, _, reason = report.longrepr
    if not reason.removeprefix("Skipped: ").startswith(MEANT):
        report.outcome = "failed"
        report.longrepr = f"skipped, which $CONVERGE_NO_SKIPS forbids: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    _refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    report = yield
    _refuse(report)
    return report


def pytest_collection_modifyitems(items):
    """Files of real runs come first: then what is short keeps all processes busy to the end."""
    long = {item.path for item in items if item.get_closest_marker("slow")}

    def order(item):
        short = item.path not in long and item.path.parent.name != "e2e"
        return item.get_closest_marker("longest") is None, short

    items.sort(key=order)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel of this checkout, really built."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder))
    subprocess.run((*pip, str(Path(__file__).parents[1])), cwd=folder, check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def slurm_installed():
    """Skips where Slurm's programs are missing."""
    from slurm_daemons import INSTALL, missing_programs

    if missing := missing_programs():
        pytest.skip(f"there is no {', '.join(missing)}: {INSTALL}")


@pytest.fixture(scope="module")
def slurm(slurm_installed):
    """Two nodes with 16 CPUs and 8 GPUs each, for the tests of a module."""
    from slurm_daemons import slurm_daemons

    with slurm_daemons() as cluster:
        yield cluster
