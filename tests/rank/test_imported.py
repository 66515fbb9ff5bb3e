"""Which modules a rank imported from outside of its toolchain's packages."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
import numpy, mine, package.part, zipped
from pathlib import Path
from harness.rank.imported import leave_imported
leave_imported(Path(sys.argv[1]), 3)
"""


def test_modules_from_elsewhere_are_digested_and_those_of_the_toolchain_are_not(tmp_path):
    elsewhere, run_folder = tmp_path / "elsewhere", tmp_path / "run"
    (elsewhere / "package").mkdir(parents=True)
    generated = run_folder / "inductor"
    generated.mkdir(parents=True)
    (elsewhere / "mine.py").write_text("import generated\n")
    (elsewhere / "package" / "__init__.py").write_text("")
    (elsewhere / "package" / "part.py").write_text("x = 1\n")
    (generated / "generated.py").write_text("")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        stream.writestr("zipped.py", "")
    path = os.pathsep.join(map(str, (elsewhere, generated, archive, ROOT)))
    subprocess.run(
        [sys.executable, str(program), str(run_folder)],
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    found = json.loads((run_folder / "imported" / "rank-00003.json").read_text())["files"]
    expected = [
        elsewhere / "mine.py",
        elsewhere / "package" / "__init__.py",
        elsewhere / "package" / "part.py",
        program,
    ]
    digests = {str(each): hashlib.sha256(each.read_bytes()).hexdigest() for each in expected}
    assert found == {**digests, f"{archive}/zipped.py": None}
