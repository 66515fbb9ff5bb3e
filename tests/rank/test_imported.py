"""Which modules a rank imported from outside of its toolchain's packages."""

import hashlib
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
import numpy, mine, package.part, zipped
from pathlib import Path
from converge_harness.rank.recorder.imported import leave_imported, resolve_imported
if sys.argv[2] == "forked":
    resolve_imported()  # as the process does of which ranks are forks
    import wave, late
leave_imported(Path(sys.argv[1]), 3)
"""


@pytest.mark.parametrize("start", ["cold", "forked"])
def test_modules_from_elsewhere_are_digested_and_those_of_the_toolchain_are_not(tmp_path, start):
    elsewhere, run_folder = tmp_path / "elsewhere", tmp_path / "run"
    (elsewhere / "package").mkdir(parents=True)
    generated = run_folder / "inductor"
    generated.mkdir(parents=True)
    (elsewhere / "mine.py").write_text("import generated\n")
    (elsewhere / "package" / "__init__.py").write_text("")
    (elsewhere / "package" / "part.py").write_text("x = 1\n")
    (elsewhere / "late.py").write_text("x = 2\n")
    (generated / "generated.py").write_text("")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        stream.writestr("zipped.py", "")
    path = os.pathsep.join(map(str, (elsewhere, generated, archive, ROOT / "src")))
    subprocess.run(
        [sys.executable, str(program), str(run_folder), start],
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    found = json.loads((run_folder / "imported" / "rank-00003.json").read_text())["files"]
    expected = [
        elsewhere / "mine.py",
        elsewhere / "package" / "__init__.py",
        elsewhere / "package" / "part.py",
        program,
        *([elsewhere / "late.py"] if start == "forked" else []),
    ]
    digests = {str(each): hashlib.sha256(each.read_bytes()).hexdigest() for each in expected}
    assert found == {**digests, f"{archive}/zipped.py": None}


def left_by(python: Path | str, program: str, folder: Path, path: str) -> dict[str, str | None]:
    """What a rank of a Python leaves that runs a program, which leaves ``folder``'s evidence."""
    folder.mkdir()
    script = folder.with_suffix(".py")
    imports = "from converge_harness.rank.recorder.imported import leave_imported"
    leaving = f"\n{imports}\nleave_imported(folder, 0)\n"
    begin = "import sys\nfrom pathlib import Path\nfolder = Path(sys.argv[1])\n"
    script.write_text(begin + program + leaving)
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([python, script, folder], check=True, env=environment)
    return json.loads((folder / "imported" / "rank-00000.json").read_text())["files"]


def test_a_module_that_was_written_while_the_rank_ran_has_no_digest(tmp_path):
    module, moved = tmp_path / "mine.py", tmp_path / "moved.py"
    for each in (module, moved):
        each.write_text("x = 1\n")
    other = tmp_path / "other.py"
    other.write_text("x = 2\n")
    os.utime(other, (0, 0))
    path = os.pathsep.join(map(str, (tmp_path, ROOT / "src")))
    unchanged = left_by(sys.executable, "import mine, moved", tmp_path / "run", path)
    assert unchanged[str(module)] is not None
    assert unchanged[str(moved)] is not None
    edit = "import mine, moved, time\ntime.sleep(0.3)\n"
    edit += f"Path({str(module)!r}).write_text('x = 3')\n"
    edit += f"Path({str(other)!r}).rename({str(moved)!r})\n"
    edited = left_by(sys.executable, edit, tmp_path / "again", path)
    assert edited[str(module)] is None
    assert edited[str(moved)] is None  # by a file that was written long ago


def test_packages_are_known_by_their_versions_but_for_local_ones(tmp_path):
    """A folder or wheel may have other code tomorrow and the same version."""
    venv.create(tmp_path / "env")
    (packages,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    elsewhere = tmp_path / "elsewhere" / "site-packages"
    elsewhere.mkdir(parents=True)
    origins = {
        "of_index": None,
        "of_folder": {"url": "file:///fork", "dir_info": {}},
        "of_wheel": {"url": "file:///fork.whl", "archive_info": {}},
        "of_commit": {"url": "https://x", "vcs_info": {"vcs": "git", "commit_id": "1"}},
        "editable": {"url": "file:///fork", "dir_info": {"editable": True}},
        "damaged": "{",
    }
    for name, origin in origins.items():
        (packages / f"{name}.py").write_text("x = 1\n")
        information = packages / f"{name}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\n")
        own = f"{information.name}/RECORD"
        (information / "RECORD").write_text(f"{name}.py,sha256=x,6\n{own},,\n")
        if origin is not None:
            text = origin if isinstance(origin, str) else json.dumps(origin)
            (information / "direct_url.json").write_text(text)
    (packages / "copied.py").write_text("x = 1\n")
    (elsewhere / "foreign.py").write_text("x = 1\n")
    numpy_folder = Path(np.__file__).parents[1]
    path = os.pathsep.join(map(str, (ROOT / "src", elsewhere, numpy_folder)))
    imports = f"import {', '.join(origins)}, copied, foreign"
    found = left_by(tmp_path / "env" / "bin" / "python", imports, tmp_path / "run", path)
    of_test = {name for name in found if not Path(name).is_relative_to(numpy_folder)}
    assert of_test == {
        str(tmp_path / "run.py"),
        str(packages / "copied.py"),
        str(elsewhere / "foreign.py"),
        *(str(packages / f"{name}-1.0.dist-info/RECORD") for name in ("of_folder", "of_wheel")),
        str(packages / "damaged-1.0.dist-info/RECORD"),
    }
    assert None not in {found[name] for name in of_test}
