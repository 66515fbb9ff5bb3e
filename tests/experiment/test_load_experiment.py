"""Experiment files: what is read from a right one, and what is said of a wrong one."""

import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from converge_harness.errors import ConfigError
from converge_harness.experiment import load_experiment
from converge_harness.model import (
    CADENCE_OFF,
    DEFAULT_REPEATS,
    POWERS_OF_TWO,
    STOP_AFTER,
    Parallelism,
    Repeat,
    RepeatKind,
    Stop,
    SyntheticData,
    Technique,
)

MINIMAL = """
schema = 1
[trainer]
train_config = "base.toml"
[control]
parallelism = { dp_shard = 2 }
[[test]]
name = "tp"
parallelism = { dp_shard = 2, tp = 2 }
"""


def test_a_minimal_file_has_the_documented_defaults(load):
    experiment = load(MINIMAL)
    assert experiment.name == "x"
    assert experiment.seed == 42
    assert experiment.repeats == DEFAULT_REPEATS
    assert (experiment.cadence, experiment.anchor) == (POWERS_OF_TWO, None)
    assert experiment.calibration is None
    (control,), (test,) = experiment.controls, experiment.tests
    assert (control.name, control.control) == ("control", None)
    assert (test.name, test.control) == ("tp", "control")
    assert test.parallelism == Parallelism(dp_shard=2, tp=2)
    assert test.toolchain == "torchtitan-0.3.0"
    assert test.pipeline_schedule is None
    assert test.train_config.data == SyntheticData()
    assert test.train_config.model == {"n_layers": 4, "n_heads": 4}
    assert test.train_config.settings["training"]["seq_len"] == 256
    assert "converge" not in test.train_config.settings


def test_a_test_set_inherits_train_config_toolchain_and_common_settings_only(load, folder):
    (folder / "other.toml").write_text("[training]\nsteps = 3\n")
    experiment = load(
        """
schema = 1
[trainer]
train_config = "base.toml"
[trainer.set]
training.steps = 7
"training.seq_len" = 512
[control]
parallelism = { dp_shard = 2 }
[controls.other]
parallelism = { dp_shard = 4 }
train_config = "other.toml"
toolchain = "torchtitan-0.2.2"
techniques = ["float8"]
set = { "lr_scheduler.warmup_steps" = 1 }
[[test]]
name = "a"
control = "other"
parallelism = { pp = 2 }
set = { training = { seq_len = 128 } }
"""
    )
    (test,) = experiment.tests
    assert test.train_config.path == "other.toml"
    assert test.toolchain == "torchtitan-0.2.2"
    assert test.techniques == ()
    assert test.parallelism == Parallelism(pp=2)
    assert test.pipeline_schedule == "1F1B"
    assert test.overrides == {"training.steps": 7, "training.seq_len": 128}
    assert test.setting("training.steps") == 7
    assert test.setting("training.global_batch_size", -1) == -1


def test_everything_a_set_can_say_is_read(load, folder):
    (folder / "bug.py").write_text("def break_it(trainer): ...\n")
    (test,) = load(
        MINIMAL
        + """
techniques = ["compile", "async_tp"]
cp_rotation = "alltoall"
pipeline_schedule = "GPipe"
tolerance = { loss = 1, grad_norm = 1e-2 }
margin = 0.005
waive = ["same-dp-degree"]
inject = "bug.py:break_it"
without_fixes = ["act-grad"]
note = "why"
"""
    ).tests
    assert test.techniques == (Technique.COMPILE, Technique.ASYNC_TP)
    assert (test.cp_rotation, test.pipeline_schedule) == ("alltoall", "GPipe")
    assert test.tolerances == {"loss": 1.0, "grad_norm": 1e-2}
    assert test.margin == 0.005
    assert test.waive == ("same-dp-degree",)
    assert test.inject == f"{folder / 'bug.py'}:break_it"
    assert test.without_fixes == ("act-grad",)
    assert test.note == "why"


def test_when_a_set_stops_is_said_by_the_file_and_by_the_set(load):
    assert load(MINIMAL).stop_after == STOP_AFTER == 16
    assert load(MINIMAL + "[stop]\nafter = 3\n").stop_after == 3
    assert load(MINIMAL).waiting_ranks is None
    assert load(MINIMAL + "[stop]\nwaiting_ranks = 0\n").waiting_ranks == 0
    assert load(MINIMAL).tests[0].stop is Stop.FAIL
    assert load(MINIMAL + '[stop]\nwhen = "settled"\n').tests[0].stop is Stop.SETTLED
    one = load(MINIMAL + 'stop = "settled"\n[stop]\nwhen = "never"\n')
    assert one.tests[0].stop is Stop.SETTLED
    assert one.controls[0].stop is Stop.NEVER


BACKENDS = """
schema = 1
[trainer]
train_config = "base.toml"
spmd_backend = "partial_dtensor"
[control]
parallelism = { dp_shard = 2 }
[controls.other]
parallelism = { dp_shard = 2 }
spmd_backend = "full_dtensor"
[[test]]
name = "of_the_experiment"
parallelism = { tp = 2 }
[[test]]
name = "of_its_control"
control = "other"
parallelism = { tp = 2 }
[[test]]
name = "elsewhere"
control = "other"
toolchain = "torchtitan-0.3.0-torch-2.13"
parallelism = { tp = 2 }
[[test]]
name = "its_own"
control = "other"
parallelism = { tp = 2 }
spmd_backend = "spmd_types"
"""


def test_an_spmd_backend_is_said_of_an_experiment_a_control_and_a_set(load):
    experiment = load(BACKENDS)
    assert [spec.spmd_backend for spec in experiment.controls] == [
        "partial_dtensor",
        "full_dtensor",
    ]
    assert {spec.name: spec.spmd_backend for spec in experiment.tests} == {
        "of_the_experiment": "partial_dtensor",
        "of_its_control": "full_dtensor",
        "elsewhere": "partial_dtensor",  # of another toolchain than its control
        "its_own": "spmd_types",
    }
    assert load(MINIMAL).tests[0].spmd_backend is None


def test_an_unknown_spmd_backend_is_refused_with_the_nearest(load):
    with pytest.raises(ConfigError, match=r"spmd_backend of .*did you mean 'spmd_types'"):
        load(MINIMAL + 'spmd_backend = "spmd_type"\n')


def test_an_spmd_backend_is_not_set_by_its_config_key(load):
    with pytest.raises(ConfigError, match=r"cannot be set here.*use spmd_backend"):
        load(MINIMAL + 'set = { "parallelism.spmd_backend" = "full_dtensor" }\n')


def test_repeats_are_kinds_with_seeds(load):
    written = 'repeats = ["permute", "ulp", "ulp.2", "rerun.10"]'
    experiment = load(MINIMAL.replace("schema = 1", f"schema = 1\n{written}"))
    assert experiment.repeats == (
        Repeat(RepeatKind.PERMUTE),
        Repeat(RepeatKind.ULP),
        Repeat(RepeatKind.ULP, 2),
        Repeat(RepeatKind.RERUN, 10),
    )


@pytest.mark.parametrize(
    ("written", "cadence"),
    [
        ('"powers of two"', POWERS_OF_TWO),
        ('"off"', CADENCE_OFF),
        ("10", 10),
        ("[16, 0, 1]", (0, 1, 16)),
    ],
)
def test_a_cadence_is_a_word_a_number_or_a_list(load, written, cadence):
    assert load(MINIMAL + f"[probe]\ncadence = {written}").cadence == cadence


def test_a_python_by_its_path_is_a_toolchain_of_the_file_and_of_a_set(load, folder):
    for name in ("venv", "other"):
        python = folder / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text("")
        python.chmod(0o755)
    (folder / "link").symlink_to(folder / "venv" / "bin" / "python")
    text = MINIMAL.replace(
        "[trainer]", '[trainer]\ntoolchain = { python = "venv/../venv/bin/python" }'
    )
    experiment = load(text + 'toolchain.python = "other/bin/python"\n')
    assert experiment.controls[0].toolchain == str(folder / "venv" / "bin" / "python")
    assert experiment.tests[0].toolchain == str(folder / "other" / "bin" / "python")
    linked = load(MINIMAL + 'toolchain.python = "link"\n')
    assert linked.tests[0].toolchain == str(folder / "link")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{ python = "nowhere/python" }', "toolchain.python of 'tp': there is no Python"),
        ('{ python = "venv" }', "(did you mean venv/bin/python?)"),
        ('{ python = "base.toml" }', "base.toml is not executable"),
        ('{ pyhton = "python" }', "toolchain.pyhton of 'tp': unknown key (did you mean 'python'?"),
        ("{}", "toolchain.python of 'tp': is missing"),
        ("3", "toolchain of 'tp': must be a string, not 3"),
    ],
)
def test_a_wrong_python_is_named_with_its_place(problems, folder, value, message):
    (folder / "venv" / "bin").mkdir(parents=True)
    (folder / "venv" / "bin" / "python").write_text("")
    assert message in "\n".join(problems(f"{MINIMAL}toolchain = {value}\n"))


def test_a_toolchain_of_the_file_in_which_no_set_trains_is_refused(load):
    """As in an upgrade whose test sets silently trained in their control's toolchain."""
    older = MINIMAL.replace("[control]", '[control]\ntoolchain = "torchtitan-0.2.2"')
    newer = older.replace("[control]", 'toolchain = "torchtitan-0.3.0"\n[control]')
    with pytest.raises(ConfigError, match=r"no set trains in 'torchtitan-0.3.0': every control"):
        load(newer)
    assert load(older)
    assert load(newer + 'toolchain = "torchtitan-0.3.0"\n')


def test_an_anchor_takes_the_train_config_and_toolchain_of_the_control(load):
    text = MINIMAL.replace("[control]", '[control]\ntoolchain = "torchtitan-0.2.2"')
    anchor = load(text + "[anchor]\nparallelism = {}\nmargin = 0.1").anchor
    assert (anchor.name, anchor.control, anchor.toolchain) == ("anchor", None, "torchtitan-0.2.2")
    assert (anchor.parallelism, anchor.train_config.path) == (Parallelism(), "base.toml")
    named = load(text + '[anchor]\nname = "ddp"\nparallelism.dp_replicate = 2').anchor
    assert (named.name, named.parallelism) == ("ddp", Parallelism(dp_replicate=2))


def test_a_calibration_is_found_beside_the_file_or_is_yet_to_be_written_there(load, folder):
    text = MINIMAL.replace("schema = 1", 'schema = 1\ncalibration = "c/x.json"')
    assert load(text).calibration == folder / "c/x.json"
    (folder / "c").mkdir()
    (folder / "c/x.json").touch()
    assert load(text).calibration == folder / "c/x.json"


def test_batches_of_somebody_elses_loader_cannot_be_permuted(load, problems, folder):
    (folder / "own.toml").write_text("[training]\nsteps = 3\n")
    text = MINIMAL.replace("base.toml", "own.toml")
    assert load(text).repeats == DEFAULT_REPEATS  # the plan leaves out what cannot be made
    (only,) = problems(text.replace("schema = 1", 'schema = 1\nrepeats = ["ulp", "permute.2"]'))
    assert only.startswith(": repeats[1]: 'permute.2' is not possible for 'control'")
    assert "no [converge.data]" in only


def test_paths_are_found_beside_the_file_above_it_and_in_the_current_directory(
    folder, tmp_path_factory, monkeypatch
):
    below = folder / "experiments"
    below.mkdir()
    (below / "x.toml").write_text(MINIMAL)
    assert load_experiment(below / "x.toml").controls[0].train_config.path == "base.toml"
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "deep" / "x.toml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(MINIMAL)
    with pytest.raises(ConfigError, match=r"no train config 'base.toml' \(looked in: "):
        load_experiment(elsewhere)
    monkeypatch.chdir(folder)
    assert load_experiment(elsewhere).controls


# ---------------------------------------------------------------- what is wrong


def test_all_problems_of_a_file_come_at_once(problems):
    found = problems(
        """
schema = 1
sead = 4
seed = true
[trainer]
train_config = "missing.toml"
startup_timeout_s = 0
[control]
parallelism = { dp_shard = 2.5, dp_shrad = 2 }
[[test]]
name = "a"
parallelism = { tp = "2" }
techniques = ["compiel"]
[[test]]
parallelism = {}
pipeline_schedule = "Interleaved1F1b"
tolerance = { los = 1 }
[[test]]
name = "b"
control = "nobody"
parallelism = { dp_shard = 2 }
"""
    )
    text = "\n".join(found)
    assert ": sead: unknown key (did you mean 'seed'?" in text
    assert ": seed: must be a whole number, not true" in text
    assert ": control.parallelism.dp_shrad: unknown key (did you mean" in text
    assert ": control.parallelism.dp_shard: must be a whole number, not 2.5" in text
    assert ": test[0].parallelism.tp of 'a': must be a whole number, not '2'" in text
    assert ": test[0].techniques[0] of 'a': 'compiel' is not known (did you mean 'compile'?" in text
    assert ": test[1].name: is missing" in text
    assert "'Interleaved1F1b' is not known (did you mean 'Interleaved1F1B'?" in text
    assert "test[1].tolerance.los: 'los' is not known (did you mean 'loss'?" in text
    assert ": trainer.startup_timeout_s: must be greater than 0, not 0" in text
    assert ": test[2].control of 'b': there is no control 'nobody'" in text
    assert ": trainer.train_config: there is no train config 'missing.toml'" in text


def test_a_broken_control_does_not_make_its_name_unknown(problems):
    found = problems(MINIMAL.replace("dp_shard = 2 }", "dp_shard = 0 }", 1))
    assert len(found) == 1
    assert "control.parallelism.dp_shard" in found[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('control = "contrl"', "test[0].control of 'tp': there is no control 'contrl' (did you"),
        (
            "set = { parallelism.tensor_parallel_degree = 2 }",
            "cannot be set here (use parallelism.tp",
        ),
        ('set = { "checkpoint.initial_load_path" = "/w" }', "cannot be set here: converge decides"),
        ("set.checkpoint = { load_step = 3 }", "use trainer.seed_checkpoint"),
        ("set.checkpoint.initial_load_in_hf = true", "use trainer.seed_checkpoint"),
        ('set = { "training.steps" = 1, training = { steps = 2 } }', "is set twice"),
        ('set = { "training..steps" = 1 }', "is not a dotted key"),
        ("set = { training = {} }", "must be a value, not {}"),
        ("set = { a = 2020-01-01 }", "dates and times are not supported here"),
        ('inject = "bug.py"', "is not written path/to/file.py:function"),
        ('inject = "bug.py:f"', "there is no file 'bug.py'"),
        ("tolerance = { loss = nan }", "must be a finite number"),
        ("tolerance = { loss = -1 }", "must be greater than or equal to 0"),
        ("margin = 0", "margin of 'tp': must be greater than 0, not 0"),
        ("margin = 5", "margin of 'tp': must be less than 1, not 5"),
        ("margin = nan", "margin of 'tp': must be a finite number"),
        ('margin = "1%"', "margin of 'tp': must be a number, not '1%'"),
        ('techniques = ["compile", "compile"]', "names something twice"),
        ('toolchain = "../evil"', "must match pattern"),
        ("parallelism.tp = 70000", "this is not TOML"),
        ('train_config = "nowhere.toml"', "there is no train config 'nowhere.toml'"),
        ("parallel = 2", "unknown key (did you mean 'parallelism'?"),
        ('train_config = "~nosuchuser/x.toml"', "no home folder is known for '~nosuchuser'"),
        ('inject = "~nosuchuser/x.py:f"', "no home folder is known for '~nosuchuser'"),
        (f'train_config = "{"n" * 300}"', "there is no train config 'nnn"),
        ("note = 3", "must be a string, not 3"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(problems, change, message):
    assert message in "\n".join(problems(MINIMAL + change))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 1", "", ": schema: is missing (add schema = 1 at the top)"),
        ("schema = 1", "schema = 2", "this converge reads schema 1 only"),
        (
            "[control]\nparallelism = { dp_shard = 2 }",
            "",
            ": control: is missing (add a [control] table, ",
        ),
        ('train_config = "base.toml"', "", "is missing (set trainer.train_config for all sets)"),
        ('[[test]]\nname = "tp"', "[other]", "there is no test set (add a [[test]] or a [matrix])"),
        ("[trainer]", "[trainer]\ncpu_ranks = 0", "cpu_ranks: must be greater than or equal to 1"),
        ("schema = 1", 'schema = 1\nrepeats = ["again"]', "'again' is not known"),
        ("schema = 1", 'schema = 1\nrepeats = ["ulpp.2"]', "is not known (did you mean 'ulp'?"),
        (
            "schema = 1",
            'schema = 1\nrepeats = ["ulp.0"]',
            "from 1 to 999999, such as ulp.2, not 'ulp.0'",
        ),
        ("schema = 1", 'schema = 1\nrepeats = ["ulp.x"]', ": repeats[0]: must end in a seed"),
        (
            "schema = 1",
            'schema = 1\nrepeats = ["ulp", "ulp.1"]',
            ": repeats: names something twice",
        ),
        ("schema = 1", "schema = 1\nrepeats = [2]", ": repeats[0]: must be a string, not 2"),
        ("schema = 1", "schema = 1\ncalibration = 3", ": calibration: must be a string, not 3"),
        (
            "schema = 1",
            'schema = 1\ncalibration = "~nosuchuser/c.json"',
            ": calibration: no home folder is known for '~nosuchuser'",
        ),
        (
            "[trainer]",
            '[trainer]\nseed_checkpoint = "~nosuchuser/c"',
            ": trainer.seed_checkpoint: no home folder is known for '~nosuchuser'",
        ),
        (
            "[trainer]",
            "[trainer]\nset.checkpoint.load_step = 2",
            ": trainer.set.checkpoint.load_step: cannot be set here",
        ),
        (
            "[control]",
            "[probe]\ncadence = 'power of two'\n[control]",
            "did you mean 'powers of two'",
        ),
        (
            "[control]",
            "[probe]\ncadence = 0\n[control]",
            'must be 1 or more ("off" for none), not 0',
        ),
        (
            "[control]",
            "[probe]\ncadence = 2.5\n[control]",
            ': probe.cadence: must be "powers of two"',
        ),
        (
            "[control]",
            "[probe]\ncadence = []\n[control]",
            ': probe.cadence: must be "powers of two"',
        ),
        (
            "[control]",
            "[probe]\ncadence = [1, -1]\n[control]",
            "must be steps, whole numbers from 0",
        ),
        ("[control]", "[probe]\ncadence = [1, 1]\n[control]", "names something twice"),
        ("[control]", "[probe]\ncadense = 2\n[control]", "unknown key (did you mean 'cadence'?"),
        ("schema = 1", "schema = 1\nprobe = 2", ": probe: must be a table, not 2"),
        (
            "[control]",
            "[anchor]\n[control]",
            ": anchor.parallelism: is missing (name its degrees, as { dp",
        ),
        (
            "[control]",
            "[anchor]\nparallelism = {}\ncontrol = 'x'\n[control]",
            "anchor.control: unknown",
        ),
        (
            "[control]",
            "[anchor]\nname = 'tp'\nparallelism = {}\n[control]",
            "anchor.name of 'tp': is",
        ),
        ("schema = 1", "schema = 1\nanchor = 2", ": anchor: must be a table, not 2"),
        ("schema = 1", "schema = 1\ncontrols = 3", ": controls: must be a table, not 3"),
        ("schema = 1", "schema = 1\ncontrols.a = 3", ": controls.a: must be a table, not 3"),
        ("[[test]]", "[test]", ": test: must be a list, not {"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(problems, old, new, message):
    assert message in "\n".join(problems(MINIMAL.replace(old, new)))


@pytest.mark.parametrize(
    "name",
    ["a b", "a/b", "../x", "q\"uo'te", "<script>alert(1)</script>", "étude", "日本", "x" * 80],
)
def test_any_printable_name_is_taken(load, name):
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    experiment = load(MINIMAL.replace('"tp"', f'"{escaped}"'))
    assert experiment.tests[0].name == name


@pytest.mark.parametrize("name", ["", "  ", r"a\u0007", r"a\nb", r"a\u2028b", "x" * 81])
def test_empty_overlong_and_control_character_names_are_refused(problems, name):
    assert "test[0].name" in "\n".join(problems(MINIMAL.replace('"tp"', f'"{name}"')))


@pytest.mark.parametrize(
    "name", ["TP", "\uff54\uff50", "control", "Control.rerun", "seed", "seed.2"]
)
def test_names_are_unique_also_after_case_folding(problems, name):
    more = f'[[test]]\nname = "{name}"\nparallelism = {{ dp_shard = 2 }}\n'
    assert any("name" in each for each in problems(MINIMAL + more))


# ----------------------------------------------------------------- bad files


def test_a_missing_file_names_its_neighbours(folder):
    with pytest.raises(ConfigError, match=r"there is no such file .*base\.toml"):
        load_experiment(folder / "y.toml")
    (folder / "experiments").mkdir()
    (folder / "experiments" / "x.toml").write_text("")
    with pytest.raises(ConfigError, match=r"base\.toml; in \S*experiments there are: x\.toml"):
        load_experiment(folder / "y.toml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n\t\n", "the file is empty"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "not UTF-8 text"),
        (b"\x00\x01\x02", "this is not TOML"),
        (b"schema = \n", "line 1, column"),
        (b"a = " + b"9" * 5000, "cannot be read"),
        (b"a = " + b"[" * 1000 + b"]" * 1000, "nested more than 32 deep"),
        (b"a = " + b"[" * 500_000, "nested more than 32 deep"),
        (b"[" + b".".join([b"a"] * 1000) + b"]\nb = 1", "nested more than 32 deep"),
        (b"#" * (4 * 1024 * 1024 + 1), "at most 4194304 are read"),
    ],
)
def test_a_file_that_is_no_experiment_is_a_config_error(problems, content, message):
    assert message in problems(content)[0]


def test_a_megabyte_of_nested_tables_is_refused(problems):
    """It ends well before the time limit of a test: the walk through them stops at the depth."""
    row = ".".join(["a"] * 1000)
    text = "".join(f"[t{index}.{row}]\nx = 1\n" for index in range(520))
    assert len(text) > 1_000_000
    assert "nested more than 32 deep" in problems(text)[0]


def test_a_folder_and_a_device_are_no_files(folder):
    with pytest.raises(ConfigError, match="this is a folder"):
        load_experiment(folder)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_experiment(type(folder)("/dev/zero"))


# ---------------------------------------------------------------- hypothesis

WORDS = """schema name seed repeats probe cadence anchor calibration margin trainer control
controls test matrix parallelism tp dp_shard set
techniques waive tolerance loss train_config note inject cp_rotation spmd_backend x"""
KEYS = st.sampled_from(WORDS.split()) | st.text(string.ascii_letters, max_size=4)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["base.toml", "compile", "1F1B", "rerun", "{tp}", "a.py:f"])
    | st.text(max_size=8)
)
VALUES = st.recursive(
    LEAVES,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS, below, max_size=4),
    max_leaves=20,
)
FUNCTION_FIXTURE = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def write(value) -> str:
    """A value as inline TOML; None, which TOML has not, as an empty string."""
    match value:
        case None:
            return '""'
        case bool():
            return str(value).lower()
        case str():
            return '"' + "".join(f"\\U{ord(letter):08x}" for letter in value) + '"'
        case dict():
            return "{" + ", ".join(f"{write(k)} = {write(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(write, value)) + "]"
    return repr(value)


def problems_of(load, text: str) -> list[str]:
    """What is wrong, if anything; every other exception than ConfigError comes through."""
    try:
        load(text)
    except ConfigError as error:
        return [f"{problem.where}{problem.message}" for problem in error.problems] or ["nothing"]
    return []


@FUNCTION_FIXTURE
@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_arbitrary_tables_are_read_or_refused(load, tables):
    tables = {"schema": 1, "control": {"parallelism": {}}, **tables}
    text = "".join(f"{write(key)} = {write(value)}\n" for key, value in tables.items())
    assert "nothing" not in problems_of(load, text)


@FUNCTION_FIXTURE
@given(st.dictionaries(KEYS, VALUES, max_size=6), st.dictionaries(KEYS, VALUES, max_size=6))
def test_arbitrary_sets_are_read_or_refused(load, test, matrix):
    text = (
        f"schema = 1\ntrainer = {{ train_config = 'base.toml' }}\n"
        f"control = {{ parallelism = {{ dp_shard = 2 }} }}\n"
        f"test = [{write({'name': 'a', 'parallelism': {}, **test})}]\n"
        f"matrix = {write({'parallelism': {'tp': [1, 2]}, **matrix})}\n"
    )
    assert "nothing" not in problems_of(load, text)


@FUNCTION_FIXTURE
@given(st.text() | st.binary())
def test_arbitrary_bytes_are_refused(load, content):
    with pytest.raises(ConfigError):
        load(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))


BASE = (
    MINIMAL.replace("[trainer]", 'name = "base"\nseed = 7\n[trainer]')
    + """
[trainer.set]
"training.steps" = 6
"""
)


def test_a_file_is_laid_over_the_one_that_it_extends(load, folder):
    (folder / "models.toml").write_text(BASE)
    mixed = load(
        'extends = "models.toml"\ntrainer.set."training.mixed_precision_param" = "bfloat16"'
    )
    assert (mixed.name, mixed.seed) == ("x", 7)
    (test,) = mixed.tests
    assert test.name == "tp"
    assert dict(test.overrides) == {
        "training.steps": 6,
        "training.mixed_precision_param": "bfloat16",
    }
    other = load(
        'extends = "models.toml"\nseed = 8\ntest = [{ name = "ddp", parallelism.dp_replicate = 2 }]'
    )
    assert other.seed == 8
    assert [each.name for each in other.tests] == ["ddp"]


OWN_SET = "[[test]]\nname = 'a'\nparallelism.dp_replicate = 2"
CONTROLS = """
[controls.one]
parallelism.dp_shard = 2
[controls.two]
name = "second"
parallelism.dp_shard = 2
"""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("seed = 8", ["one", "second"]),  # the other file's sets
        (OWN_SET, []),
        (f"{OWN_SET}\ncontrol = 'second'", ["second"]),
        (f"{OWN_SET}\n[matrix]\ncontrol = 'one'\nparallelism.dp_replicate = [2]", ["one"]),
        (f"{OWN_SET}\ncontrol = 'one'\n[controls.mine]\nparallelism.dp_shard = 2", ["one", "mine"]),
    ],
)
def test_controls_of_the_other_file_that_no_set_names_are_left_out(load, folder, text, names):
    (folder / "models.toml").write_text(BASE + CONTROLS)
    found = load(f'extends = "models.toml"\n{text}').controls
    assert [each.name for each in found][1:] == names


@pytest.mark.parametrize(
    ("extended", "words"),
    [
        ('"missing.toml"', "missing.toml"),
        ('"other/models.toml"', "'other/models.toml' is not a file name in"),
        ("3", "3 is not a file name in"),
        ('"second.toml"', "second.toml extends models.toml itself"),
    ],
)
def test_only_a_file_beside_it_that_stands_alone_can_be_extended(load, folder, extended, words):
    (folder / "models.toml").write_text(BASE)
    (folder / "second.toml").write_text('extends = "models.toml"')
    with pytest.raises(ConfigError) as caught:
        load(f"extends = {extended}")
    assert words in str(caught.value)


def test_mistakes_in_what_is_extended_are_said_to_be_there(load, folder):
    (folder / "models.toml").write_text(BASE.replace("tp = 2", "tpp = 2"))
    with pytest.raises(ConfigError) as caught:
        load('extends = "models.toml"')
    assert "test[0].parallelism.tpp" in str(caught.value)
    assert "extends models.toml, where keys may be meant" in str(caught.value)
