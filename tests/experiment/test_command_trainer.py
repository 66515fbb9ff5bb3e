"""``trainer.kind = "command"``: what the file means, and what is refused before anything starts."""

import shutil
from pathlib import Path

import pytest

from converge_harness.errors import ConfigError
from converge_harness.experiment import load_experiment
from converge_harness.experiment.tables import repeat_of
from converge_harness.model import Launcher, SyntheticData
from converge_harness.trainers.command.settings import PLACEHOLDERS, RankLauncher
from converge_harness.trainers.registry import keys_of

PROBED_REPEATS = tuple(map(repeat_of, ("rerun", "ulp", "ulp.2", "ulp.3")))
"""Nobody but the program deals out its samples."""
CURVE_REPEATS = (repeat_of("rerun"),)
"""And where it is not probed, nobody but it knows its initial weights."""
CONFIG = """
[trainer.config]
training.steps = 20
training.local_batch_size = 2
training.global_batch_size = 8
zero = { stage = 0 }
"""
SETS = """
[control]
name = "ddp2"
parallelism = { dp_replicate = 2 }
[[test]]
name = "zero2"
parallelism = { dp_shard = 2 }
set = { zero.stage = 2 }
"""
TOOLCHAIN = 'toolchain = "mine"'
ARGV = '["train.py", "--stage", "{config.zero.stage}", "--output", "{output}"]'


@pytest.fixture
def script(folder):
    (folder / "train.py").write_text("import model\n")
    return folder / "train.py"


BY_ITSELF = '["{python}", "train.py"]'
PLAIN = SETS.replace("set = { zero.stage = 2 }\n", "")


def text(trainer="", *, argv=ARGV, config=CONFIG, sets=SETS, top="", where=TOOLCHAIN):
    return f"""schema = 1
{top}
[trainer]
kind = "command"
command = {argv}
{where}
{trainer}
{config}{sets}"""


def test_sets_have_the_command_and_the_inline_config(load, script):
    experiment = load(text())
    (control,), (test,) = experiment.controls, experiment.tests
    command = control.trainer.settings
    assert command == test.trainer.settings
    assert command.argv[0] == "train.py"
    assert (command.folder, command.sources) == (script.parent, (script,))
    assert (command.launcher, command.probed) == (RankLauncher.TORCHRUN, True)
    assert (control.setting("zero.stage"), test.setting("zero.stage")) == (0, 2)
    assert (control.toolchain, control.train_config.path) == ("mine", "[trainer.config]")
    assert experiment.repeats == PROBED_REPEATS


def test_a_program_without_the_probe_leaves_a_curve(load, script):
    experiment = load(
        text(
            'probe = false\ncurves = "{output}/loss.csv"\n'
            'columns = { loss = "train/loss", step = "iteration" }'
        )
    )
    command = experiment.controls[0].trainer.settings
    assert (command.probed, command.curves) == (False, "{output}/loss.csv")
    assert dict(command.columns) == {"loss": "train/loss", "step": "iteration"}
    assert experiment.repeats == CURVE_REPEATS


def test_the_config_may_be_a_file_with_the_projects_corpus(load, script, folder):
    (folder / "config.toml").write_text(
        "[training]\nsteps = 4\nlocal_batch_size = 2\n[zero]\nstage = 0\n[converge.data]\n"
    )
    argv = ARGV.replace('"--output"', '"{data}", "--output"')
    loaded = load(text('train_config = "config.toml"', argv=argv, config=""))
    assert loaded.controls[0].train_config.data == SyntheticData()


def test_what_schedule_a_programs_pipeline_has_is_not_known(load, script):
    argv = ARGV.replace("]", ', "--pp", "{pp}"]')
    pipeline = PLAIN.replace("{ dp_shard = 2 }", "{ dp_replicate = 2, pp = 2 }")
    (test,) = load(text(argv=argv, sets=pipeline)).tests
    assert (test.parallelism.pp, test.pipeline_schedule) == (2, None)


def test_the_program_starts_where_its_first_file_is_found(load, folder):
    nested = folder / "experiments"
    nested.mkdir()
    (folder / "src").mkdir()
    (folder / "src" / "train.py").touch()
    (folder / "more.yaml").touch()
    path = nested / "x.toml"
    path.write_text(text('files = ["more.yaml"]', argv='["src/train.py"]', sets=PLAIN))
    command = load_experiment(path).controls[0].trainer.settings
    assert command.folder == folder
    assert command.sources == (folder / "src" / "train.py", folder / "more.yaml")


@pytest.mark.parametrize(
    ("launcher", "argv", "sources"),
    [
        ("torchrun", '["-m", "pkg.train"]', ["pkg/train.py"]),
        ("torchrun", '["-m", "pkg"]', ["pkg/__main__.py"]),
        ("composer", '["-m", "installed.train"]', []),
        ("deepspeed", '["--no_local_rank", "train.py", "other.json"]', ["train.py", "other.json"]),
        ("mpirun", '["{python}", "train.py"]', ["train.py"]),
        ("none", '["accelerate", "launch", "train.py"]', ["train.py"]),
        ("none", '["{python}", "-m", "pkg.train", "train.py"]', ["train.py", "pkg/train.py"]),
        ("none", '["./run.sh"]', ["run.sh"]),
    ],
)
def test_files_of_the_template_are_sources(load, script, folder, launcher, argv, sources):
    (folder / "pkg").mkdir()
    for name in ("pkg/train.py", "pkg/__main__.py", "other.json", "run.sh"):
        (folder / name).touch()
    (folder / "run.sh").chmod(0o755)
    command = (
        load(text(f'launcher = "{launcher}"', argv=argv, sets=PLAIN)).controls[0].trainer.settings
    )
    assert command.sources == tuple(folder / name for name in sources)


def test_files_that_the_config_names_are_sources_of_the_sets_that_name_them(load, script, folder):
    for name in ("other.py", "a.json", "b c.json"):
        (folder / name).touch()
    experiment = load(
        text(
            'environment = { SETTINGS = "b c.json" }',
            argv='["{config.script}", "--settings={config.settings}", "--output={output}"]',
            config=CONFIG.replace("zero", 'script = "train.py"\nsettings = "a.json"\nzero'),
            sets=SETS.replace("zero.stage = 2", 'script = "other.py"'),
        )
    )
    sources = [
        [each.name for each in spec.trainer.settings.sources]
        for spec in (*experiment.controls, *experiment.tests)
    ]
    assert sources == [["train.py", "a.json", "b c.json"], ["other.py", "a.json", "b c.json"]]


def test_a_python_by_its_path_is_kept_as_it_is_linked(load, script, folder):
    python = folder / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(shutil.which("python3"))
    written = text(where='python = "env/bin/python"')
    assert load(written).controls[0].toolchain == str(python)


def test_the_default_is_the_python_on_path(load, script, folder, monkeypatch):
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(shutil.which("python3"))
    monkeypatch.setenv("PATH", str(folder / "bin"))
    written = text(where="")
    assert load(written).controls[0].toolchain == str(folder / "bin" / "python")


def test_a_command_of_a_wrong_type_is_not_missing_too(load):
    with pytest.raises(ConfigError) as caught:
        load(text(argv="[[1]]"))
    assert "trainer.command[0]: must be a string" in str(caught.value)
    assert "is missing" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"argv": "[]"}, "trainer.command: is empty"),
        ({"argv": '[""]'}, "trainer.command[0]: is empty"),
        ({"argv": '"train.py --steps 2"'}, "trainer.command: must be a list"),
        ({"argv": '["trian.py"]'}, "trainer.command[0]: there is no file 'trian.py' (looked in: "),
        (
            {"argv": '["python", "train.py"]'},
            "there is no file 'python' (the launcher starts python itself: leave it out)",
        ),
        (
            {"argv": '["composer", "train.py"]'},
            'launcher = "composer" starts it: name it, and leave composer out here',
        ),
        (
            {"argv": '["srun", "train.py"]'},
            'launcher = "srun" starts it: name it, and leave srun out here',
        ),
        (
            {"argv": '["torchrun", "train.py"]'},
            "the launcher starts torchrun itself: leave it out",
        ),
        ({"argv": '["train.py", "{step}"]'}, "{step} is not a placeholder (did you mean 'steps'?"),
        (
            {"argv": '["train.py", "{"]'},
            "trainer.command[1]: the brace '{' at character 1 is unmatched",
        ),
        (
            {"argv": '["train.py", "{config.zero.stge}"]'},
            "is not a key of the train config [trainer.config] (did you mean 'config.zero.stage'?",
        ),
        ({"argv": '["train.py", "{config.zero}"]'}, "{config.zero} is a table, not a value"),
        (
            {"argv": '["train.py", "{*config.zero.stage}"]'},
            "is a list of arguments, and the train config has 0 (write a list of texts, such as",
        ),
        (
            {"argv": '["train.py", "--x={*config.zero.stage}"]'},
            "is no argument of its own from the train config in '--x={*config.zero.stage}' (write",
        ),
        (
            {"trainer": 'environment = { FLAGS = "{*config.zero.stage}" }'},
            "is a list of arguments, and here is one text (write {config.KEY} without the *",
        ),
        ({"argv": '["train.py", "{data}"]'}, "{data} needs a corpus, but there is no"),
        (
            {"argv": '["train.py"]', "trainer": 'launcher = "none"'},
            "'train.py' is not executable by itself (as [\"{python}\"",
        ),
        ({"trainer": 'launcher = "torchrum"'}, "'torchrum' is not known (did you mean 'torchrun'?"),
        ({"where": 'python = "nowhere/python"'}, "there is no Python 'nowhere/python'"),
        (
            {"trainer": 'python = "base.toml"'},
            "trainer.python: and toolchain are two environments",
        ),
        ({"where": 'python = "train.py"'}, "train.py is not executable"),
        ({"trainer": 'files = ["gone.py"]'}, "trainer.files[0]: there is no file 'gone.py'"),
        ({"trainer": "probe = false"}, "trainer.curves: is missing"),
        (
            {"trainer": 'probe = false\ncurves = "loss.csv"'},
            "'loss.csv' is not in the run's own folder",
        ),
        (
            {"trainer": 'probe = false\ncurves = "{output}/../loss.csv"'},
            "is not in the run's own folder",
        ),
        ({"trainer": 'curves = "{output}/x"'}, "has no effect on a probed program"),
        (
            {"trainer": 'probe = false\ncurves = "{output}/x"\ncolumns = { los = "a" }'},
            "trainer.columns.los: 'los' is not known (did you mean 'loss'?",
        ),
        (
            {
                "trainer": 'probe = false\ncurves = "{output}/x"\n'
                'columns = { loss = "a", grad_norm = "a" }'
            },
            "trainer.columns: uses column 'a' for loss and for grad_norm",
        ),
        (
            {"argv": '["train.py", "{steps}"]'},
            "set.zero.stage of 'zero2': has no effect: no argument and no variable of the",
        ),
        ({"trainer": 'environment = { RANK = "0" }'}, "RANK: is set by converge or the launche"),
        (
            {"trainer": 'environment = { A = "{x}" }'},
            "trainer.environment.A: {x} is not a placehold",
        ),
        ({"trainer": 'seed_checkpoint = "x"'}, "is a key of kind 'torchtitan'; this trainer is of"),
        ({"config": ""}, "control.train_config of 'ddp2': is missing (set trainer.train_config or"),
        ({"trainer": 'train_config = "base.toml"'}, "config: and train_config are two configs"),
        (
            {"config": f"{CONFIG}[trainer.config.converge.data]\nloader = 'streaming'\n"},
            "trainer.config: converge.data.loader: unknown key",
        ),
        (
            {"sets": SETS.replace("zero.stage", "zero.stagge")},
            "test[0].set.zero.stagge of 'zero2': is not a key of the train config",
        ),
        (
            {"sets": SETS + 'techniques = ["compile"]'},
            "test[0].techniques of 'zero2': is not possible: all settings of a command trainer",
        ),
        ({"trainer": "mean_over = 10"}, "trainer.mean_over: has no effect on a probed program"),
        (
            {"trainer": 'probe = false\ncurves = "{output}/x"\nmean_over = 0'},
            "trainer.mean_over",
        ),
        (
            {"top": 'baseline = "b"'},
            "baseline: is not possible: a command trainer's control cannot be blessed",
        ),
        ({"top": 'repeats = ["permute"]'}, "'permute' is not possible with a command trainer"),
        (
            {
                "top": 'repeats = ["ulp"]',
                "trainer": 'probe = false\ncurves = "{output}/x"',
            },
            "'ulp' is not possible: only the probe can move initial weights",
        ),
        (
            {
                "top": 'repeats = ["rounding"]',
                "trainer": 'probe = false\ncurves = "{output}/x"',
            },
            "'rounding' is not possible: this command trainer cannot round results otherwise",
        ),
        (
            {
                "trainer": 'probe = false\ncurves = "{output}/x"',
                "sets": SETS + "[probe]\ncadence = 4",
            },
            "probe: has no effect: with trainer.probe = false",
        ),
    ],
)
def test_what_cannot_work_is_said_before_a_start(problems, script, changes, expected):
    found = problems(text(**changes))
    assert any(expected in problem for problem in found), found


@pytest.mark.parametrize("argv", ['"train.py --steps 2"', '["train.py", "{config.zero.stage"]'])
def test_a_template_that_cannot_be_read_is_said_once(problems, script, argv):
    assert not any("reaches nothing" in problem for problem in problems(text(argv=argv)))


def test_keys_of_a_command_need_the_kind(problems):
    written = "schema = 1\n[trainer]\ncommand = ['x']\ntrain_config = 'base.toml'" + SETS
    assert any('add kind = "command"' in problem for problem in problems(written))


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training.gloabl_batch_size", "training.global_batch_size"),
        ("training.global_batchsize", "training.global_batch_size"),
        ("training.seq_lenn", "training.seq_len"),
        ("trainig.dtype", "training.dtype"),
        ("lr_scheduler.warmup_step", "lr_scheduler.warmup_steps"),
    ],
)
def test_a_key_that_is_nearly_one_of_converges_is_refused_unless_the_program_gets_it(
    problems, load, script, key, meant
):
    config = CONFIG + f"{key} = 1\n"
    (found,) = problems(text(config=config))
    assert f": {key}: is not a key that converge reads, and no placeholder passes it" in found
    assert f"did you mean {meant!r}?" in found
    assert f'"{{config.{key}}}" in trainer.command' in found
    passed = ARGV.replace('"--output"', f'"--mine", "{{config.{key}}}", "--output"')
    assert load(text(config=config, argv=passed)).controls[0].setting(key) == 1


def test_keys_of_the_programs_own_are_free(load, script):
    own = "training.batch_size = 1\ntraining.max_steps = 2\ntraining.warmup = 3\n"
    assert load(text(config=CONFIG + own)).controls[0].setting("training.max_steps") == 2


def test_flags_are_a_list_of_which_each_set_has_its_own(load, script, folder):
    (folder / "fused.yaml").write_text("a: 1\n")
    argv = ARGV.replace('"--output"', '"{*config.flags}", "--output"')
    sets = PLAIN + 'set = { flags = ["--fused", "--options=fused.yaml"] }\n'
    experiment = load(text(config=CONFIG + "flags = []\n", argv=argv, sets=sets))
    (control,), (test,) = experiment.controls, experiment.tests
    assert (control.setting("flags"), len(test.setting("flags"))) == ([], 2)
    # What a list names is part of the identity like any other file.
    named = [[file.name for file in spec.trainer.settings.sources] for spec in (control, test)]
    assert "fused.yaml" in named[1]
    assert "fused.yaml" not in named[0]


def test_one_wrong_placeholder_is_one_problem_however_many_sets(problems, script):
    found = problems(text(argv='["train.py", "{config.zero.stge}"]'))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("named", "launcher", "words"),
    [
        ("mpirun", Launcher.SLURM, "srun starts the ranks, not mpirun (trainer.launcher = 'srun'"),
        (
            "srun",
            Launcher.LOCAL,
            "'srun' is Slurm's (trainer.launcher = 'mpirun', or --launcher slurm",
        ),
    ],
)
def test_a_launcher_that_cannot_start_ranks_there_is_refused(
    script, folder, named, launcher, words
):
    path = folder / "x.toml"
    path.write_text(text(f'launcher = "{named}"', argv=BY_ITSELF, sets=PLAIN))
    with pytest.raises(ConfigError) as caught:
        load_experiment(path, launcher=launcher, cluster=Path("none.toml"))
    (problem,) = caught.value.problems
    assert words in str(problem)


@pytest.mark.parametrize("named", ["torchrun", "srun"])
def test_a_cluster_runs_it_without_checkpoints_that_a_person_has_elsewhere(script, folder, named):
    path = folder / "x.toml"
    argv = BY_ITSELF if named == "srun" else ARGV
    path.write_text(text(f'launcher = "{named}"', argv=argv, sets=PLAIN))
    mine = folder / "cluster.toml"
    mine.write_text("schema = 1\nranks_per_node = 8\ncheckpoint_every = 2\n")
    experiment = load_experiment(path, launcher=Launcher.SLURM, cluster=mine)
    assert experiment.cluster.ranks_per_node == 8
    assert {spec.recovery for spec in (*experiment.controls, *experiment.tests)} == {None}


def test_checkpoints_that_nobody_says_how_to_write_are_refused(script, folder):
    path = folder / "x.toml"
    path.write_text(text() + "\n[cluster]\nranks_per_node = 8\ncheckpoint_every = 2\n")
    with pytest.raises(ConfigError, match=r"cluster.checkpoint_every: is set, but a run that"):
        load_experiment(path, launcher=Launcher.SLURM, cluster=None)


def test_the_example_of_the_page_is_right(load, script):
    page = (Path(__file__).parents[2] / "docs" / "any-trainer.md").read_text()
    experiment = load(page.split("```toml\n", 1)[1].split("```", 1)[0])
    assert [spec.name for spec in (*experiment.controls, *experiment.tests)] == ["ddp2", "zero2"]


def test_the_page_tells_every_key_and_placeholder():
    page = (Path(__file__).parents[2] / "docs" / "any-trainer.md").read_text()
    for name in PLACEHOLDERS:
        assert f"{{{name}}}" in page
    for key in keys_of("command"):
        assert f"`{key}`" in page
