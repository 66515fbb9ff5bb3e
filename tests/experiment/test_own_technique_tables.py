"""``[technique.NAME]``: what is read of it, and what is said of a wrong one; no function is run."""

import re
from pathlib import Path

import pytest
import tomli

from converge_harness.experiment import load_experiment
from converge_harness.model import Technique

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "experiments" / "own_technique"

FILE = """
def use(model):
    raise SystemExit("a file is only parsed")

def to_config(config, loud=False): ...
def count(trainer): return 1
def two(model, trainer): ...
def none(): ...
def other(modul): ...
alias = use
"""
TECHNIQUE = """
[technique.fused_norm]
what = "RMSNorm by our kernel"
set = { "override.imports" = ["my_norm.fused"] }
apply = "features.py:use"
in_force = "features.py:count"
"""
EXPERIMENT = """
schema = 1
[trainer]
train_config = "base.toml"
[control]
parallelism = { dp_shard = 2 }
[[test]]
name = "fused"
parallelism = { dp_shard = 2 }
techniques = ["compile", "fused_norm"]
"""


@pytest.fixture(autouse=True)
def features(folder):
    (folder / "features.py").write_text(FILE)
    return folder / "features.py"


def test_a_set_names_a_technique_beside_built_in_ones(load, folder):
    (test,) = load(EXPERIMENT + TECHNIQUE).tests
    (own,) = test.own_techniques
    assert test.techniques == (Technique.COMPILE,)
    assert test.technique_names == ("compile", "fused_norm")
    assert (own.name, own.what, own.place) == ("fused_norm", "RMSNorm by our kernel", "model")
    assert own.apply == f"{folder / 'features.py'}:use"
    assert own.in_force == f"{folder / 'features.py'}:count"
    assert test.overrides["override.imports"] == ["my_norm.fused"]
    assert own.folder == str(folder)


def test_a_technique_of_keys_alone(load):
    table = '[technique.wide]\nwhat = "Wider"\nset = { training.seq_len = 512 }\n'
    (test,) = load(EXPERIMENT.replace('"fused_norm"', '"wide"') + table).tests
    assert test.overrides == {"training.seq_len": 512}
    assert test.own_techniques[0].functions == ()


def test_a_matrix_takes_it_too(load):
    text = EXPERIMENT.partition("[[test]]")[0] + (
        '[matrix]\nparallelism = { dp_shard = [2] }\ntechniques = [[], ["fused_norm"]]\n'
    )
    plain, fused = load(text + TECHNIQUE).tests
    assert (plain.name, fused.name) == ("fsdp2", "fsdp2_fused_norm")
    assert (plain.technique_names, fused.technique_names) == ((), ("fused_norm",))


WRONG = {
    "an unknown name": (
        EXPERIMENT,
        ": test[0].techniques[1] of 'fused': 'fused_norm' is not known",
    ),
    "a name nearly right": (
        EXPERIMENT.replace("fused_norm", "fused_nrom") + TECHNIQUE,
        "(did you mean 'fused_norm'?",
    ),
    "a built-in name": (
        EXPERIMENT + TECHNIQUE.replace("technique.fused_norm", "technique.float8"),
        ": technique.float8: 'float8' is the name of a built-in technique (give it another)",
    ),
    "a parallelism's name": (
        EXPERIMENT + TECHNIQUE.replace("technique.fused_norm", "technique.tp"),
        ": technique.tp: 'tp' is the name of a built-in technique",
    ),
    "no name for a command line": (
        EXPERIMENT + TECHNIQUE.replace("technique.fused_norm", 'technique."a b"'),
        ": technique.a b: 'a b' is not a name of letters, digits and _",
    ),
    "no sentence": (
        EXPERIMENT + TECHNIQUE.replace('what = "RMSNorm by our kernel"', ""),
        ": technique.fused_norm.what: is missing",
    ),
    "an empty sentence": (
        EXPERIMENT + TECHNIQUE.replace("RMSNorm by our kernel", " "),
        ": technique.fused_norm.what: is empty: describe the technique in one sentence",
    ),
    "nothing to do": (
        EXPERIMENT + '[technique.fused_norm]\nwhat = "nothing"\n',
        ": technique.fused_norm: has neither set nor apply, so it would change nothing",
    ),
    "no such file": (
        EXPERIMENT + TECHNIQUE.replace("features.py:use", "none.py:use"),
        ": technique.fused_norm.apply: there is no file 'none.py'",
    ),
    "no function": (
        EXPERIMENT + TECHNIQUE.replace("features.py:use", "features.py"),
        ": technique.fused_norm.apply: 'features.py' is not written path/to/file.py:function",
    ),
    "a function that is not there": (
        EXPERIMENT + TECHNIQUE.replace("features.py:use", "features.py:alias"),
        "defines no function 'alias' (it defines: use, to_config, count, two, none, other)",
    ),
    "a parameter that says no place": (
        EXPERIMENT + TECHNIQUE.replace("features.py:use", "features.py:other"),
        "only one says where it is called (valid: config, model, parallel_model, trainer)",
    ),
    "two parameters": (
        EXPERIMENT + TECHNIQUE.replace("features.py:use", "features.py:two"),
        ": technique.fused_norm.apply: two has the parameters model, trainer: the name of its",
    ),
    "no parameter": (
        EXPERIMENT + TECHNIQUE.replace("features.py:use", "features.py:none"),
        ": technique.fused_norm.apply: none has no parameter: the name of its only one",
    ),
    "a count of nothing": (
        EXPERIMENT + TECHNIQUE.replace("features.py:count", "features.py:none"),
        ": technique.fused_norm.in_force: none is called with the trainer alone",
    ),
    "a key that converge sets": (
        EXPERIMENT + TECHNIQUE.replace("override.imports", "compile.enable"),
        ": technique.fused_norm.set.compile.enable: cannot be set here (use techniques =",
    ),
    "a key of the set itself": (
        EXPERIMENT + 'set = { "override.imports" = [] }\n' + TECHNIQUE,
        "imports of 'fused': is set by technique fused_norm and by the set itself (leave out one)",
    ),
    "an unknown key": (
        EXPERIMENT + TECHNIQUE + 'aply = "features.py:use"\n',
        ": technique.fused_norm.aply: unknown key (did you mean 'apply'?",
    ),
    "no table": (EXPERIMENT + "[technique]\nfused_norm = 1\n", ": technique.fused_norm: must be"),
}


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_what_is_said_of_a_wrong_one(problems, text, said):
    found = problems(text)
    assert any(said in each for each in found), found


def test_a_file_that_is_not_python(problems, features):
    features.write_text("def use(model:\n")
    assert any("features.py:1 is not Python: " in each for each in problems(EXPERIMENT + TECHNIQUE))


def test_a_program_of_ones_own_takes_none(folder, problems):
    (folder / "train.py").write_text("")
    text = EXPERIMENT.replace(
        'train_config = "base.toml"',
        'kind = "command"\nargv = ["train.py"]\nlauncher = "none"\npython = "python"\nconfig = {}',
    )
    found = problems(text + TECHNIQUE)
    assert any(
        "techniques of 'fused': is not possible: all settings of a command trainer" in each
        for each in found
    ), found


def test_the_page_shows_the_example_as_it_is():
    page = (ROOT / "docs" / "own-technique.md").read_text()
    (shown,) = re.findall(r"^```python norms.py\n((?:.*\n)*?)```$", page, re.MULTILINE)
    assert shown == (EXAMPLE / "norms.py").read_text()
    (table,) = re.findall(r"^```toml\n((?:.*\n)*?)```$", page, re.MULTILINE)
    tables, example = tomli.loads(table), tomli.loads((EXAMPLE / "fused_norm.toml").read_text())
    assert tables["technique"] == example["technique"]
    assert tables["test"][0] in example["test"]
    first, *_, last = load_experiment(EXAMPLE / "fused_norm.toml").tests
    assert first.technique_names == ("fused_norm",)
    assert last.own_techniques[0].place == "model"
