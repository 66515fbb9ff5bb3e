"""``converge plan`` for Slurm: nodes, scripts, whose cluster file counts, and what is refused."""

import json

import pytest

from converge_harness.cli import main

TRAIN_CONFIG = """
[training]
steps = 12
local_batch_size = 4
global_batch_size = 8
seq_len = 256
mixed_precision_param = "float32"
[converge.data]
"""
EXPERIMENT = """
schema = 1
[trainer]
train_config = "t.toml"
[control]
parallelism.dp_shard = 2
[[test]]
name = "tp"
parallelism = { dp_shard = 2, tp = 2 }
"""
MINE = 'schema = 1\nranks_per_node = 2\npartition = "p1"\n'


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """Run ``converge plan`` of an experiment; its exit code, and what it printed and warned."""
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "none"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.delenv("CONVERGE_CLUSTER", raising=False)
    (tmp_path / "t.toml").write_text(TRAIN_CONFIG)

    def plan(*options: str, experiment: str = EXPERIMENT) -> tuple[int, str, str]:
        (tmp_path / "e.toml").write_text(experiment)
        code = main(["plan", str(tmp_path / "e.toml"), "--store", str(tmp_path), *options])
        return code, *capsys.readouterr()

    return plan


def test_nodes_and_ranks_stand_in_the_table(plan, tmp_path):
    (tmp_path / "mine.toml").write_text(MINE)
    code, printed, _ = plan("--launcher", "slurm", "--cluster", str(tmp_path / "mine.toml"))
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if "│" in line}
    assert code == 0
    assert "1x2" in rows["control"]
    assert "2x2" in rows["tp"]


@pytest.mark.parametrize(("device", "where"), [("cuda", "one GPU each"), ("cpu", "on CPUs")])
def test_a_job_of_slurm_is_planned_by_its_script(plan, tmp_path, device, where):
    (tmp_path / "mine.toml").write_text(f'{MINE}device = "{device}"\n')
    _, printed, _ = plan("--launcher", "slurm", "--cluster", str(tmp_path / "mine.toml"))
    told = [line.strip() for line in printed.splitlines()]
    commands = [line for line in told if line.startswith("sbatch ")]
    assert len(commands) == 2
    assert all(line.endswith("/job.sh") for line in commands)
    assert "torchrun" not in printed
    assert f"({where})" in printed
    assert "the scripts are written and submitted by `converge submit`" in printed


def test_a_note_that_begins_with_the_rule_is_printed_without_it(plan):
    rule = "minimal test set of TP: 2D, FSDP + TP"
    _, printed, _ = plan(experiment=f'{EXPERIMENT}note = "{rule}. And more."\n')
    assert printed.count(rule) == 1
    assert "  And more.\n" in printed


def test_thousands_of_sets_are_printed_as_the_few_are(plan):
    many = "".join(
        f'[[test]]\nname = "t{index}"\nparallelism.dp_shard = 2\nmargin = 0.{index + 1}\n'
        for index in range(201)
    )
    few = plan(experiment=EXPERIMENT)[1].splitlines()
    lines = plan(experiment=EXPERIMENT + many)[1].splitlines()
    (few_row,) = [line.replace("│", " ").split() for line in few if "│" in line and " tp " in line]
    (row,) = [line.split() for line in lines if line.startswith("tp ") and "8 = " in line]
    assert row == few_row
    start = few.index(next(line for line in few if line.startswith("tp  ")))
    assert set(few[start : start + 2]) <= set(lines)


def test_the_script_of_a_job_is_printed_alone(plan, tmp_path):
    (tmp_path / "mine.toml").write_text(MINE)
    options = ("--launcher", "slurm", "--cluster", str(tmp_path / "mine.toml"), "--script")
    code, printed, warned = plan(*options, "tp")
    assert code == 0
    assert warned.startswith("`converge submit` writes it as /")
    assert printed.startswith("#!/bin/bash\n")
    assert "#SBATCH --partition=p1\n" in printed
    code, printed, warned = plan(*options, "tq")
    assert (code, printed) == (2, "")
    assert "--script tq: there is no such job (valid: seed, control, " in warned


def test_json_says_the_launcher_and_the_cluster(plan, tmp_path):
    (tmp_path / "mine.toml").write_text(MINE)
    cluster = str(tmp_path / "mine.toml")
    document = json.loads(plan("--launcher", "slurm", "--cluster", cluster, "--json")[1])
    assert (document["launcher"], document["cluster"]["partition"]) == ("slurm", "p1")
    assert [each["name"] for each in document["sets"]] == ["control", "tp"]
    assert json.loads(plan("--json")[1])["cluster"] is None


def test_the_named_file_comes_before_the_environment_s_and_that_before_the_home_s(
    plan, tmp_path, monkeypatch
):
    home = tmp_path / "settings" / "converge" / "cluster.toml"
    home.parent.mkdir(parents=True)
    home.write_text(MINE.replace("p1", "home"))
    (tmp_path / "env.toml").write_text(MINE.replace("p1", "env"))
    (tmp_path / "mine.toml").write_text(MINE)
    slurm = ("--launcher", "slurm", "--json")

    def partition(*options: str) -> str:
        return json.loads(plan(*slurm, *options)[1])["cluster"]["partition"]

    assert partition() == "home"
    monkeypatch.setenv("CONVERGE_CLUSTER", str(tmp_path / "env.toml"))
    assert partition() == "env"
    assert partition("--cluster", str(tmp_path / "mine.toml")) == "p1"
    assert json.loads(plan("--json")[1])["launcher"] == "local"


def test_another_launcher_or_hardware_is_another_identity(plan, tmp_path):
    (tmp_path / "mine.toml").write_text(MINE)
    options = ("--launcher", "slurm", "--cluster", str(tmp_path / "mine.toml"), "--json")

    def identity(table: str = "") -> str:
        jobs = json.loads(plan(*options, experiment=EXPERIMENT + table)[1])["jobs"]
        return jobs[0]["identity"]

    asked = identity()
    assert identity('[cluster]\nhardware = "H100"') != asked
    assert identity('[cluster]\nenvironment = { NCCL_ALGO = "Ring" }') != asked
    assert identity('[cluster]\ntime = "1"\nmax_jobs = 1\naccount = "a"') == asked


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--launcher", "slurm"), "cluster.ranks_per_node: is missing"),
        (("--launcher", "slurm", "--cluster", "no.toml"), "no.toml: there is no such file"),
        (("--cluster", "no.toml"), "--cluster no.toml: has no effect"),
        (("--script", "tp"), "jobs on this machine have no script (add --launcher slurm)"),
        (("--throughput", "5000"), "--throughput: needs --dry-run"),
        (("--gpu-memory", "80"), "--gpu-memory: needs --dry-run"),
        (("--dry-run", "--script", "tp"), "--script: cannot be combined with --dry-run"),
    ],
)
def test_options_that_do_not_fit_are_refused(plan, options, words):
    code, printed, warned = plan(*options)
    assert (code, printed) == (2, "")
    assert words in warned
