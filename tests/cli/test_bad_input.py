"""Every user's mistake ends with exit code 2, a sentence, and no traceback."""

import contextlib
import io
import os
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from converge_harness.cli import main

ROOT = Path(__file__).parents[2]
GOOD_CONTROL = (
    'schema = 1\n[trainer]\ntrain_config = "t.toml"\n[control]\nparallelism.dp_shard = 2\n'
)


class Said(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def converge(*arguments: str, cwd: Path, **environment: str) -> Said:
    """The command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd),
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = main(arguments)
        except SystemExit as stop:  # of argparse
            code = stop.code
    return Said(code, out.getvalue(), err.getvalue())


def assert_refused(result: Said, *words: str) -> None:
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "schema"),
        (b"\x00\xff\xfe\x80binary", "UTF-8"),
        (b"schema = 1\n[" + b"a." * 1000 + b"a]\n", "nest"),
        (b"schema = 1\nx = " + b"[" * 1000 + b"]" * 1000, "nest"),
        (b"schema = 1\n[contrl]\n", "control"),
        (b"this is no toml", "line 1"),
    ],
    ids=["empty", "binary", "deep table", "deep array", "typo", "no toml"],
)
@pytest.mark.parametrize("command", ["run", "plan", "toolchain list", "toolchain build --for"])
def test_bad_experiment_files(tmp_path, command, content, word):
    (tmp_path / "e.toml").write_bytes(content)
    assert_refused(converge(*command.split(), "e.toml", cwd=tmp_path), "e.toml", word)


def test_a_large_file_is_read_quickly_and_refused(tmp_path):
    (tmp_path / "e.toml").write_text(GOOD_CONTROL + "# padding\n" * 100_000 + "x = 1\n")
    assert_refused(converge("plan", "e.toml", cwd=tmp_path), "x")


@pytest.mark.parametrize("path", ["missing.toml", "."])
def test_no_such_experiment(tmp_path, path):
    assert_refused(converge("run", path, cwd=tmp_path), path)


def test_several_problems_come_together(tmp_path):
    (tmp_path / "e.toml").write_text(
        GOOD_CONTROL
        + '[[test]]\nname = "a"\nparalelism.tp = 2\n[[test]]\nname = "a"\nwaive = ["x"]\n'
    )
    result = converge("run", "e.toml", cwd=tmp_path)
    assert_refused(result, "paralelism", "parallelism", "t.toml", "waive")


def test_a_missing_toolchain_names_the_command(tmp_path):
    result = converge(
        "run", str(ROOT / "experiments/smoke.toml"), cwd=ROOT, CONVERGE_TOOLCHAINS=str(tmp_path)
    )
    assert_refused(result, "converge toolchain build torchtitan-0.3.0")


def test_plan_needs_no_toolchain(tmp_path):
    result = converge(
        "plan",
        str(ROOT / "experiments/llama3_8b.toml"),
        cwd=ROOT,
        CONVERGE_TOOLCHAINS=str(tmp_path),
    )
    assert result.returncode == 0, result.stderr
    assert "torch.distributed.run" in result.stdout
    assert "262,144" in result.stdout


def test_an_unknown_set_is_suggested(tmp_path):
    result = converge(
        "plan",
        "experiments/smoke.toml",
        "--only",
        "fsdp2_tp",
        cwd=ROOT,
        CONVERGE_TOOLCHAINS=str(tmp_path),
    )
    assert_refused(result, "fsdp2_tp2")


def test_compare_without_curves(tmp_path):
    assert_refused(converge("compare", "a", "b", cwd=tmp_path), "a")


def test_compare_refuses_a_bad_tolerance(tmp_path):
    result = converge("compare", "a", "b", "--tolerance", "loss", cwd=tmp_path)
    assert_refused(result, "loss=1e-3")


def test_report_of_a_folder_that_is_not_a_report(tmp_path):
    assert_refused(converge("report", ".", cwd=tmp_path), "converge run")


def test_help_teaches(tmp_path):
    result = converge("run", "--help", cwd=tmp_path)
    assert result.returncode == 0
    assert "example:" in result.stdout
    assert "exit codes:" in result.stdout


def test_plan_over_several_nodes(tmp_path):
    arguments = ("plan", "experiments/llama3_8b.toml", "--ranks-per-node")
    result = converge(*arguments, "8", cwd=ROOT, CONVERGE_TOOLCHAINS=str(tmp_path))
    assert "--nnodes=8 --nproc-per-node=8" in result.stdout
    refused = converge(*arguments, "5", cwd=ROOT, CONVERGE_TOOLCHAINS=str(tmp_path))
    assert_refused(refused, "fsdp8_cp8", "--ranks-per-node 5")


RESIZED = """
name = "resized"
kind = "elastic"
segments = [{ until = 4, dp_shard = 2 }, { until = 8, dp_shard = 3 }]
"""
KILLED = """
name = "killed"
kind = "fault"
parallelism.dp_shard = 2
checkpoint_every = 3
faults = [{ kind = "kill", step = 9, rank = 2 }, { kind = "disk_full", step = 4 }]
"""
SPACE_TIME = """
name = "st"
kind = "space_time"
product = 4
"""
WEIGHTS = '"weights/step-5"'


@pytest.mark.parametrize(
    ("test", "words"),
    [
        (
            RESIZED,
            ("'resized': segments[1]: set.training.global_batch_size", "8 is not a multiple", "12"),
        ),
        (
            RESIZED.replace("until = 8", "until = 3"),
            ("test[0].segments[1].until", "3 is not after", "training.steps is 8"),
        ),
        (
            KILLED,
            ("faults[0].step", "9 comes after", "faults[0].rank", "no rank 2", "at step 4"),
        ),
        (SPACE_TIME, ("test[0].product", "4 x local batch 4 = 16", "is 8")),
    ],
    ids=["segments that do not divide", "overlapping segments", "late faults", "another product"],
)
def test_kinds_that_could_not_run_are_refused(tmp_path, test, words):
    settings = '"training.steps" = 8\n"training.global_batch_size" = 8\n'
    control = GOOD_CONTROL.replace("t.toml", f"{ROOT}/train_configs/llama3_debug.toml")
    control = control.replace("[control]", f"[trainer.set]\n{settings}[control]")
    (tmp_path / "e.toml").write_text(f"{control}[[test]]{test}")
    # As `run` does before it launches anything.
    result = converge("plan", "e.toml", cwd=tmp_path, CONVERGE_TOOLCHAINS=str(tmp_path))
    assert_refused(result, *words)


def test_a_folder_that_is_not_a_checkpoint_is_refused(tmp_path):
    text = GOOD_CONTROL.replace("t.toml", f"{ROOT}/train_configs/llama3_debug.toml")
    text = text.replace("[control]", f"seed_checkpoint = {WEIGHTS}\n[control]")
    (tmp_path / "e.toml").write_text(
        text + '[[test]]\nname = "a"\nparallelism = { dp_shard = 2, tp = 2 }\n'
    )
    assert_refused(
        converge("run", "e.toml", cwd=tmp_path),
        "trainer.seed_checkpoint",
        "no folder",
        WEIGHTS[1:-1],
    )
    folder = tmp_path / "weights" / "step-5"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x")
    refused = converge("run", "e.toml", cwd=tmp_path)
    assert_refused(refused, "has no .metadata: there is model.safetensors", "*.distcp")


def test_plan_shows_segments_faults_and_generated_sets(tmp_path):
    def planned(*arguments: str) -> str:
        result = converge("plan", *arguments, cwd=ROOT, CONVERGE_TOOLCHAINS=str(tmp_path))
        assert result.returncode == 0, result.stderr
        return result.stdout

    elastic = planned("experiments/elastic.toml", "--only", "dp_2_1_4")
    assert "steps 5-8: one rank, 1 rank, local batch 4, 2 x accumulated" in elastic
    faults = planned("experiments/faults.toml", "--only", "nodes_leave_and_join", "torn")
    assert "agent_loss of node 1 at step 5; join at step 9" in faults
    assert "ckpt_torn of rank 1 (truncated) at step 8" in faults
    assert "1 to 2 nodes (first 2)" in faults
    assert "st_fsdp1_pp2_acc4" in planned("experiments/space_time.toml", "--only", "st")


@pytest.mark.parametrize("option", ["--out", "--store"])
@pytest.mark.parametrize("folder", ["/proc/converge", "/dev/null/converge"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, option, folder):
    root = os.environ.get("CONVERGE_TOOLCHAINS", str(ROOT / ".toolchains"))
    places = {"--out": str(tmp_path / "out"), "--store": str(tmp_path / "store"), option: folder}
    result = converge(
        "run",
        "experiments/smoke.toml",
        *(word for place in places.items() for word in place),
        cwd=ROOT,
        CONVERGE_TOOLCHAINS=root,
    )
    assert_refused(result, folder)
    assert not list((tmp_path / "store").glob("runs/*"))


@pytest.mark.parametrize(
    "saved",
    [
        "{}",
        '{"schema": 1}',
        '{"schema": 1, "experiment": 5, "only": [], "on_gpu": false, "runs": {}}',
        "[]",
    ],
)
def test_report_of_a_damaged_folder(tmp_path, saved):
    (tmp_path / "matrix.json").write_text(saved)
    assert_refused(converge("report", ".", cwd=tmp_path), "matrix.json")


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5", ""])
def test_a_value_that_is_not_a_number_is_refused(tmp_path, number):
    result = converge("history", f"--limit={number}", cwd=tmp_path)
    assert_refused(result, f"argument --limit: {number!r} is not a positive whole number")


def test_what_would_launch_nothing_anyway_does_not_say_so(tmp_path):
    result = converge("export", "reports/smoke", cwd=tmp_path)
    assert_refused(result, "1 problem:\n")
    assert_refused(converge("run", "e.toml", cwd=tmp_path), "1 problem, nothing was launched:\n")


def test_a_baseline_that_is_not_there_names_the_others(tmp_path):
    (tmp_path / "baselines" / "smoke").mkdir(parents=True)
    (tmp_path / "baselines" / "smoke" / "baseline.json").touch()
    result = converge("bless", "--show", "smok", cwd=tmp_path)
    assert_refused(result, "no baseline baselines/smok (there: smoke)")


def test_names_too_long_for_a_file_system(tmp_path):
    for arguments in (("compare", "x" * 300, "y"), ("report", "x" * 300), ("run", "x" * 300)):
        assert_refused(converge(*arguments, cwd=tmp_path))


def test_a_control_that_nobody_repeats_is_refused(tmp_path):
    smoke = (ROOT / "experiments/smoke.toml").read_text()
    unrepeated = smoke.replace("[trainer]", "repeats = []\n[trainer]").replace(
        "train_configs/", f"{ROOT}/train_configs/"
    )
    (tmp_path / "e.toml").write_text(unrepeated)
    assert_refused(converge("plan", "e.toml", cwd=tmp_path), "control-is-repeated")
    waived = unrepeated
    for table in ("[control]", "[controls.fsdp2_mixed]"):
        waived = waived.replace(table, f'{table}\nwaive = ["control-is-repeated"]')
    (tmp_path / "e.toml").write_text(waived)
    assert converge("plan", "e.toml", cwd=tmp_path).returncode == 0


def test_more_ranks_than_slots(tmp_path):
    result = converge(
        "plan",
        "experiments/smoke.toml",
        "--slots",
        "4",
        cwd=ROOT,
        CONVERGE_TOOLCHAINS=str(tmp_path),
        CUDA_VISIBLE_DEVICES="",
    )
    assert_refused(result, "fsdp2_tp2_pp2", "--slots")
    assert_refused(converge("plan", "experiments/smoke.toml", "--slots", "0", cwd=ROOT), "slots")


STEERING = """schema = 1
name = "turned"
{top}
[trainer]
kind = "command"
command = ["train.py", "{{config.word}}"]
toolchain = "mine"
[trainer.config]
word = "\\u001b]0;title\\u0007"
training = {{ steps = 2, local_batch_size = 2 }}
[control]
parallelism.dp_shard = 2
note = "\\u001b[2J\\u009b31m\\u202e gone"
[[test]]
name = "{name}"
parallelism.dp_replicate = 2
set = {{ word = "\\u001b[31m other\\u200b" }}
"""


def is_harmless(text):
    return all(character.isprintable() or character in "\n\t" for character in text)


def test_what_a_file_says_does_not_steer_the_terminal(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "e.toml").write_text(STEERING.format(top="", name="t"))
    result = converge("plan", "e.toml", cwd=tmp_path)
    assert is_harmless(result.stdout + result.stderr)
    assert r"\x1b[2J\x9b31m\u202e gone" in result.stdout
    assert r"\x1b[31m other\u200b" in result.stdout
    (tmp_path / "e.toml").write_text(STEERING.format(top='"\\u001b[31mkey" = 1', name="t"))
    result = converge("plan", "e.toml", cwd=tmp_path)
    assert_refused(result, r"\x1b[31mkey: unknown key")
    assert is_harmless(result.stderr)


@pytest.mark.parametrize("mark", ["202e", "2066", "200f", "200b", "feff", "00ad"])
def test_a_name_that_reads_as_another_is_refused(tmp_path, mark):
    (tmp_path / "train.py").touch()
    (tmp_path / "e.toml").write_text(STEERING.format(top="", name=f"tp\\u{mark}2"))
    result = converge("plan", "e.toml", cwd=tmp_path)
    assert_refused(
        result, f"holds U+{mark.upper()}, which is invisible or changes the direction of text"
    )
