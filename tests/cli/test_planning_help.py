"""``converge init`` and ``converge plan --cover``, as somebody types them."""

import json
from pathlib import Path

import pytest

from converge_harness.cli import main

ROOT = Path(__file__).parents[2]
DEBUG = str(ROOT / "train_configs" / "llama3_debug.toml")
GUIDE = ["--technique", "tp=2,pp=2,float8,async_tp", "--dp", "8"]
BIG = ["--base", str(ROOT / "train_configs" / "llama3_8b.toml")]


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """A current directory without toolchains, and a wide terminal."""
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "none"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys, *arguments):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_what_init_prints_is_what_it_writes_and_what_plan_takes(capsys, nowhere):
    assert main(["init", *GUIDE, *BIG]) == 0
    printed = capsys.readouterr().out
    assert main(["init", *GUIDE, *BIG, "--out", "new/guide.toml"]) == 0
    assert Path("new/guide.toml").read_text() == printed
    assert "converge plan new/guide.toml" in capsys.readouterr().out
    assert main(["plan", "new/guide.toml"]) == 0
    assert "technique async_tp on top of FSDP + TP + compile" in capsys.readouterr().out


def test_the_base_is_found_from_wherever_the_file_is(nowhere):
    (nowhere / "configs").mkdir()
    (nowhere / "configs" / "mine.toml").write_text(Path(DEBUG).read_text())
    base = ["init", "--technique", "tp=2", "--dp", "2", "--base", "configs/mine.toml", "--out"]
    assert main([*base, "experiments/near.toml"]) == 0
    assert 'train_config = "configs/mine.toml"' in Path("experiments/near.toml").read_text()
    assert main([*base, "deep/er/far.toml"]) == 0
    assert f'train_config = "{nowhere}/configs/mine.toml"' in Path("deep/er/far.toml").read_text()


def test_an_experiment_file_is_no_base(capsys):
    base = str(ROOT / "experiments" / "llama3_8b.toml")
    told = refused(capsys, "init", "--technique", "tp=2", "--dp", "2", "--base", base)
    assert "is an experiment file, not a train config" in told
    assert "its own train config is train_configs/llama3_8b.toml" in told


def test_an_unknown_launcher_is_reported_with_those_that_are_known(capsys):
    with pytest.raises(SystemExit):
        main(["run", "e.toml", "--launcher", "lsf"])
    assert (
        "--launcher: 'lsf' is not known; valid: local, slurm, kubernetes" in capsys.readouterr().err
    )


def test_a_file_that_is_there_is_kept_unless_forced(capsys):
    Path("mine.toml").write_text("precious")
    told = refused(capsys, "init", *GUIDE, *BIG, "--out", "mine.toml")
    assert "--out mine.toml: exists already (give another name, or --force)" in told
    assert Path("mine.toml").read_text() == "precious"
    assert main(["init", *GUIDE, *BIG, "--out", "mine.toml", "--force"]) == 0
    assert "schema = 1" in Path("mine.toml").read_text()


def test_a_file_that_would_not_load_is_not_written(capsys):
    Path("mine.toml").write_text("precious")
    out = ["--out", "mine.toml", "--force"]
    told = refused(capsys, "init", *GUIDE, *BIG, *out, "--name", "a\nb")
    assert "mine.toml: name: holds control characters" in told
    assert Path("mine.toml").read_text() == "precious"
    assert list(Path().iterdir()) == [Path("mine.toml")]


@pytest.mark.parametrize("name", ['quoted "and" \\ slashed', "umlaut ä, 日本語", "délicat # = [x]"])
def test_a_name_is_written_so_that_it_is_read_again(capsys, name):
    assert main(["init", *GUIDE, *BIG, "--name", name, "--out", "x.toml"]) == 0
    capsys.readouterr()
    assert main(["plan", "x.toml", "--json"]) == 0
    from converge_harness.experiment import load_experiment

    assert load_experiment(Path("x.toml")).name == name


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([*GUIDE, "--base", "missing.toml"], "there is no train config 'missing.toml'"),
        ([*GUIDE, *BIG, "--out", "."], "is a folder"),
        (["--technique", "tpp=2", "--dp", "8", *BIG], "did you mean 'tp'"),
        (["--technique", "cp=2", "--dp", "2", "--base", "bad.toml"], "this is not TOML"),
    ],
)
def test_mistakes_are_reported_without_a_traceback(capsys, arguments, word):
    Path("bad.toml").write_text("= 1")
    told = refused(capsys, "init", *arguments)
    assert word in told
    assert "bug" not in told


def test_the_cover_of_an_experiment_has_its_techniques(capsys):
    experiment = str(ROOT / "experiments" / "llama3_8b.toml")
    assert main(["plan", experiment, "--cover", "pairs", "--gpus", "64"]) == 0
    printed = capsys.readouterr().out
    assert "2 jobs of at most 64 GPUs, beside the control: proved to be the fewest" in printed
    assert "17 pairs can run together: all are covered." in printed
    assert "One job per pair would be 17 jobs, 15 more" in printed
    assert "tp=2 + cp=8" in printed.split("cannot run together:")[1]


def test_the_cover_as_json_counts_what_it_lists(capsys):
    techniques = ["--technique", "tp=2,cp=2", "--technique", "ddp,float8"]
    assert main(["plan", "--cover", "pairs", "--gpus", "8", *techniques, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    listed = [pair for job in told["jobs"] for pair in job["first_to_cover"]]
    assert len(listed) == told["pairs"] == 5
    assert told["jobs_of_one_per_pair"] == 5
    assert [each["pair"] for each in told["apart"]] == [["ddp", "cp=2"]]
    assert told["at_most_more_than_the_fewest"] == 0


def test_the_proposed_entries_can_be_pasted_into_a_file(capsys):
    techniques = ["--technique", "tp=2,pp=2:Interleaved1F1B,async_tp", "--dp", "2"]
    cover = ["plan", "--cover", "pairs", "--gpus", "4", *techniques, "--base", DEBUG, "--toml"]
    told = refused(capsys, *cover[:4], "2", *cover[5:])
    assert "fits in no job" in told
    assert main(cover) == 0
    entries = capsys.readouterr().out
    head = f'schema = 1\n[trainer]\ntrain_config = "{DEBUG}"\n[control]\nparallelism.dp_shard = 2\n'
    Path("pasted.toml").write_text(head + entries)
    assert main(["plan", "pasted.toml"]) == 0
    assert "fsdp2_pp2_interleaved1f1b_compile" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "EXPERIMENT: is missing"),
        (["--gpus", "8", "--technique", "tp=2"], "--gpus: needs --cover pairs"),
        (["--cover", "pairs", "--technique", "tp=2"], "needs --gpus N"),
        (["--cover", "pairs", "--gpus", "8"], "needs either an EXPERIMENT or --technique"),
        (["e.toml", "--cover", "pairs", "--gpus", "8", "--technique", "tp=2"], "needs either"),
        (["e.toml", "--cover", "pairs", "--gpus", "8", "--dp", "2"], "--dp: needs --technique"),
    ],
)
def test_options_that_say_nothing_together_are_refused(capsys, arguments, word):
    assert word in refused(capsys, "plan", *arguments)
