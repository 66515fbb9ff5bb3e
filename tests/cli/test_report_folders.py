"""Where reports go: a part of a matrix, or one of another name, never overwrites the whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm_converge import warm_python

ROOT = Path(__file__).parents[2]
MATRIX = f"""
schema = 1
name = "NAME"
repeats = []
[trainer]
kind = "command"
command = ["{{python}}", "train.py", "{{output}}", "{{config.word}}"]
launcher = "none"
python = "{sys.executable}"
probe = false
curves = "{{output}}/loss.csv"
[trainer.config]
word = "a"
training = {{ steps = 2, local_batch_size = 2 }}
[control]
name = "one"
parallelism.dp_replicate = 1
waive = ["control-is-repeated"]
"""
TEST = """
[[test]]
name = "{0}"
parallelism.dp_replicate = 1
set = {{ word = "{0}" }}
"""
PROGRAM = """
import sys
from pathlib import Path

(Path(sys.argv[1]) / "loss.csv").write_text("step,loss\\n1,2.0\\n2,1.0\\n")
"""


@pytest.fixture
def run(tmp_path):
    """Runs a matrix of that name and gives what the report of a folder says of which sets."""
    (tmp_path / "train.py").write_text(PROGRAM)

    def start(name, *options, reports):
        sets = "".join(TEST.format(each) for each in ("two", "three"))
        (tmp_path / "e.toml").write_text(MATRIX.replace("NAME", name) + sets)
        ended = subprocess.run(
            [warm_python(), "-m", "converge_harness", "run", "e.toml", *options],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode in (0, 1, 3), ended.stderr
        report = tmp_path / reports / "report.json"
        return report, {test["name"] for test in json.loads(report.read_bytes())["tests"]}

    return start


def test_a_part_has_a_folder_of_its_own(run):
    whole, sets = run("m", reports="reports/m")
    assert sets == {"two", "three"}
    before = whole.read_bytes()
    _, sets = run("m", "--only", "two", reports="reports/m/only/two")
    assert sets == {"two"}
    assert whole.read_bytes() == before
    _, sets = run("m", "--only", "two", "--out", "reports/m", reports="reports/m")
    assert sets == {"two"}


def test_names_that_are_not_ascii_share_no_folder(run, tmp_path):
    for name in ("\u5b9f\u9a13", "\u8a66\u9a13"):
        before = set(tmp_path.glob("reports/*"))
        with pytest.raises(FileNotFoundError):
            run(name, "--only", "two", reports="nowhere")
        assert len(set(tmp_path.glob("reports/*")) - before) == 1
