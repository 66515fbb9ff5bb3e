"""`converge --help` is there at once: it imports the options, and nothing that a command needs."""

import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, io, sys
before = set(sys.modules)
from converge_harness.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(sys.argv[1:])
print(*sorted(set(sys.modules) - before))
"""


def imported_by(*arguments):
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True
    )
    return found.stdout.split()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["run", "--help"], ["compare", "--help"]]
)
def test_help_needs_the_standard_library_and_the_options_only(arguments):
    names = imported_by(*arguments)
    ours = {name.split(".")[1] for name in names if name.startswith("converge_harness.")}
    assert ours <= {"cli", "errors", "model"}
    others = {name.partition(".")[0] for name in names} - {"converge_harness"}
    assert others - sys.stdlib_module_names == set()
