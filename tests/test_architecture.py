"""The import table of docs/architecture.md, enforced."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from converge_harness.model import Parallelism
from converge_harness.model.trainer import DATA_TYPE_KEYS, PLAIN_DEFAULTS
from converge_harness.rank import settings
from converge_harness.run_folder import arrays, layout
from converge_harness.toolchains.recipes import RECIPES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "harness"

# Layer → layers it may import besides itself. `cli` may import everything.
ALLOWED = {
    "__init__": {"notebook"},
    "errors": set(),
    "wording": set(),
    "model": set(),
    "toml": {"errors"},
    "experiment": {"model", "errors", "wording", "toml", "trainers"},
    "checkout": {"errors"},
    "shipped": {"errors", "run_folder"},
    "toolchains": {"model", "errors", "shipped", "checkout"},
    "surroundings": {"run_folder", "model", "errors", "trainers"},
    "plan": {"model", "errors", "wording", "trainers"},
    "guide": {"model", "errors", "plan", "trainers"},
    "corpus": {"run_folder", "model", "errors"},
    "seal": {"run_folder", "model", "errors", "trainers"},
    "store": {"run_folder", "model", "errors", "seal"},
    "calibrations": {"model", "errors", "store"},
    "baselines": {"run_folder", "model", "errors", "store", "readers", "calibrations"},
    "trainers": {"run_folder", "model", "errors", "toml", "toolchains", "checkout"},
    "launch": {"run_folder", "model", "errors", "wording", "seal", "store", "trainers"},
    "readers": {"run_folder", "model", "errors", "seal", "store", "trainers"},
    "shrink": {"model", "wording"},
    "bisect": set(),
    "judge": {"model", "wording"},
    "report": {"model", "errors", "wording", "store", "judge", "shipped"},
    "notebook": {"model", "errors", "store", "judge", "readers", "report", "matrix"},
    "history": {"run_folder", "model", "errors", "wording", "store", "report"},
    "night": {"model", "wording", "history", "report"},
    "export": {"model", "errors", "store"},
    "pytest_plugin": {"errors", "experiment"},
    "matrix": {
        *(
            "model",
            "errors",
            "wording",
            "experiment",
            "toolchains",
            "surroundings",
            "plan",
            "guide",
            "corpus",
        ),
        *(
            "run_folder",
            "checkout",
            "store",
            "baselines",
            "calibrations",
            "trainers",
            "launch",
            "readers",
            "judge",
            "report",
            "history",
            "shrink",
            "bisect",
        ),
    },
    "run_folder": set(),
    "rank": {"run_folder"},
    "probe": {"rank", "run_folder"},
}
TRAINING = {"torch", "torchtitan", "torchao", "triton"}
COMES_WITH = {
    "google": "tensorboard",
    "markupsafe": "jinja2",
    "pydantic_core": "pydantic",
}
"""What is imported without being declared, and the dependency that always brings it."""


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """Every module imported anywhere in a file, inside functions too."""
    modules: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            modules.add(base)
            ours = base.split(".")[0] == "converge_harness"  # then a name may be a module's
            modules |= {f"{base}.{alias.name}" for alias in node.names if ours}
    return frozenset(modules)


def names_of(requirements: Iterable[str]) -> set[str]:
    """Of distributions, from texts such as ``jinja2>=3.1; extra == 'x'``."""
    return {canonicalize_name(Requirement(each).name) for each in requirements}


SOURCES = sorted(
    path for path in PACKAGE.rglob("*.py") if layer_of(path) not in ("cli", "__main__")
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards_only(path):
    layer = layer_of(path)
    assert layer in ALLOWED, f"add {layer} to the table here and in docs/architecture.md"
    ours = {name.split(".")[1] for name in imports_of(path) if name.startswith("converge_harness.")}
    ours -= {"DISTRIBUTION", "__version__"}  # constants of the package, and no layers
    assert ours <= ALLOWED[layer] | {layer}


def in_a_circle(folder: Path, package: str) -> set[str]:
    """Modules and packages directly in a package's folder that import themselves by way of others.

    All modules of such a package count, at any depth; the folder's own ``__init__`` does not.
    """
    members = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    members |= {path.parent.name for path in folder.glob("*/__init__.py")}
    needs: dict[str, set[str]] = {member: set() for member in members}
    for path in folder.rglob("*.py"):
        member = path.relative_to(folder).parts[0].removesuffix(".py")
        inside = {
            name.removeprefix(f"{package}.").split(".")[0]
            for name in imports_of(path)
            if name.startswith(f"{package}.")
        }
        if member in members:
            needs[member] |= (inside & members) - {member}
    for way in members:
        for member in members:
            if way in needs[member]:
                needs[member] |= needs[way]
    return {member for member in members if member in needs[member]}


def test_no_part_of_launch_imports_itself_by_way_of_others():
    """So what all schedulers share knows none of them."""
    assert not in_a_circle(PACKAGE / "launch", "converge_harness.launch")


@pytest.mark.parametrize(
    ("line", "circle"),
    [
        ("from converge_harness.x.slurm.commands import Slurm", {"shared", "slurm"}),
        ("from converge_harness.x import backends", {"shared", "slurm", "backends"}),
        ("from converge_harness.x.shared import result", set()),
        ("from converge_harness.x.events import Event", set()),
    ],
)
def test_a_circle_of_packages_is_seen(tmp_path, line, circle):
    files = {
        "shared/result.py": line,
        "shared/backend.py": "",
        "slurm/commands.py": "from converge_harness.x.shared.backend import Backend",
        "backends.py": "from converge_harness.x.slurm import commands",
        "events.py": "",
        "__init__.py": "from converge_harness.x import backends, events",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    assert in_a_circle(tmp_path, "converge_harness.x") == circle


@pytest.mark.parametrize(
    "path",
    [path for path in PACKAGE.rglob("*.py") if layer_of(path) not in ("rank", "probe")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_only_rank_code_imports_torch(path):
    assert not {name.split(".")[0] for name in imports_of(path)} & TRAINING


def test_what_it_imports_is_a_dependency():
    """Outside of toolchains. Tests of the wheel leave out to install them, for their time."""
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ours["optional-dependencies"]
    optional = [*extras["tensorboard"], *extras["wandb"], *extras["kubernetes"]]
    declared = names_of([*ours["dependencies"], *optional, "pytest"])
    providers = metadata.packages_distributions()
    own = [path for path in PACKAGE.rglob("*.py") if layer_of(path) not in ("rank", "probe")]
    imported = {name.split(".")[0] for path in own for name in imports_of(path)}
    outside = imported - set(sys.stdlib_module_names) - {"converge_harness"} - set(COMES_WITH)
    assert {"numpy", "scipy"} <= outside
    assert not {name for name in outside if not names_of(providers.get(name, [])) & declared}
    assert set(COMES_WITH.values()) <= declared


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if layer_of(path) == "probe"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_probe_imports_torch_alone(path):
    outside = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names)
    frameworks = {"deepspeed": "deepspeed", "megatron_loop": "megatron"}
    assert outside <= {"converge_harness", "torch", frameworks.get(path.stem, "torch")}
    assert not {name for name in imports_of(path) if name.startswith("converge_harness.rank.titan")}


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if layer_of(path) == "run_folder"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_contract_of_both_pythons_needs_numpy_alone(path):
    outside = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names)
    assert outside <= {"converge_harness", "numpy"}


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if layer_of(path) == "judge"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_judge_is_pure(path):
    standard = {"__future__", "collections", "dataclasses", "enum", "functools", "math", "typing"}
    standard |= {"bisect", "itertools", "statistics", "types", "inspect", "re"}
    outside = {name.split(".")[0] for name in imports_of(path)} - {
        "converge_harness",
        "numpy",
        "scipy",
    }
    assert outside <= standard, f"{outside - standard}: judging knows no files, clocks or processes"


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if layer_of(path) == "matrix"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_application_knows_no_terminal_and_no_arguments(path):
    outside = {name.split(".")[0] for name in imports_of(path)}
    assert not outside & {"rich", "argparse", "sys"}
    assert "print(" not in path.read_text()


DIALECTS = {"titan_0_2", "titan_0_3", "megatron_0_16"}
OWN_TABLES = {"TitanTable", "CommandTable", "Command", "MegatronTable"}
"""What only a trainer's own package knows."""
TITAN = re.compile(r"torchtitan(-[\w.@-]*)?")
"""The name of the default trainer, and of its toolchains."""


def asks_which_trainer(path: Path) -> set[str]:
    """How a module asks which trainer a set has, instead of what it can do."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        if isinstance(node, ast.Match):
            compared.append(node.subject)
        for each in compared:
            text = ast.unparse(each)
            if text.endswith((".dialect", "spec.command", "trainer.kind", "trainer.settings")):
                found.add(ast.unparse(node))
            if isinstance(each, ast.Constant) and each.value in DIALECTS:
                found.add(ast.unparse(node))
        if isinstance(node, ast.Name) and node.id in OWN_TABLES:
            found.add(node.id)
        if isinstance(node, ast.Constant) and node.value in DIALECTS:
            found.add(str(node.value))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} if TITAN.fullmatch(node.value) else set()
    return found | {
        name
        for name in imports_of(path)
        if name.startswith(
            (
                "converge_harness.trainers.torchtitan",
                "converge_harness.trainers.command",
                "converge_harness.trainers.megatron",
            )
        )
    }


@pytest.mark.parametrize(
    "path",
    [path for path in PACKAGE.rglob("*.py") if layer_of(path) not in ("trainers", "rank", "probe")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_only_trainers_ask_which_trainer_it_is(path):
    # The model has the loaders of the corpus. Toolchains lists the packages whose versions count,
    # and has a recipe for each environment.
    allowed = {"torchtitan"} if layer_of(path) in ("model", "toolchains") else set()
    allowed |= {*RECIPES, "torchtitan-"} if path.name == "recipes.py" else set()
    assert asks_which_trainer(path) <= allowed


@pytest.mark.parametrize(
    "line",
    [
        "if job.spec.trainer.kind == 'command': pass",
        "x = toolchain.dialect != other",
        "if spec.command is None: pass",
        "isinstance(table, CommandTable)",
        "NAMES = ('titan_0_3',)",
        "from converge_harness.trainers.megatron.table import MegatronTable",
        "from converge_harness.trainers.torchtitan.table import TitanTable",
        "toolchain.versions.get('torchtitan')",
        "OLDER = 'torchtitan-0.2.2'",
        "name.startswith('torchtitan-')",
        "match job.toolchain.dialect:\n    case _: pass",
    ],
)
def test_asking_which_trainer_is_seen(tmp_path, line):
    (tmp_path / "x.py").write_text(line)
    assert asks_which_trainer(tmp_path / "x.py")


TITAN_KEY = re.compile(
    r"(activation_checkpoint|checkpoint|comm|compile|dataloader|debug|lr_scheduler|metrics|model"
    r"|optimizer|parallelism|profiling|training|validation)\.\w+"
)
OF_EVERY_TRAINER = PLAIN_DEFAULTS.keys()
"""Keys by which converge itself knows every trainer's config."""
OF_A_SET = {f"parallelism.{each.name}" for each in fields(Parallelism)}
"""Keys of an experiment file that read like torchtitan's."""
WRITE_KEYS = {"rank", "run_folder", "trainers", "model"}
"""Layers that may write out keys: those of a trainer, and of every trainer."""


def titan_keys(path: Path) -> set[str]:
    """Keys of torchtitan's config that a module writes out."""
    constants = (node for node in ast.walk(tree_of(path)))
    texts = (node.value for node in constants if isinstance(node, ast.Constant))
    found = {text for text in texts if isinstance(text, str) and TITAN_KEY.fullmatch(text)}
    return found - OF_EVERY_TRAINER - OF_A_SET


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if layer_of(path) not in WRITE_KEYS],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_keys_of_a_trainers_config_come_from_the_trainer_or_the_model(path):
    assert not titan_keys(path)


def test_ranks_know_the_keys_of_data_types_that_the_harness_knows():
    """Ranks cannot import the model, so both write them out."""
    assert settings.DATA_TYPE_KEYS == DATA_TYPE_KEYS


@pytest.mark.parametrize(
    "key", ["debug.deterministic", "training.max_norm", "parallelism.pipeline_parallel_schedule"]
)
def test_a_key_of_torchtitan_is_seen(tmp_path, key):
    (tmp_path / "x.py").write_text(f'ran.get("{key}")')
    assert titan_keys(tmp_path / "x.py")


FRAMEWORK = re.compile(r"torchtitan|megatron", re.IGNORECASE)
NAME_FRAMEWORKS = {"rank", "run_folder", "probe", "trainers", "toolchains", "readers", "cli"}
"""Layers whose texts may name a framework: those that drive one or read its files, and the command
line, whose help says for what a command is."""
FRAMEWORKS_NAMED = {
    "matrix/bisect.py": 1,  # searches among the commits of torchtitan's repository
    "guide/experiment_file.py": 1,  # the guide is torchtitan's
    "model/experiment.py": 1,  # a loader of the corpus
    "model/plan.py": 1,  # a place in a user's shell, of a checkout
    "surroundings.py": 1,  # environment variables
}
"""How many texts of other modules name one."""


def named_frameworks(path: Path) -> list[str]:
    """Texts of a module, docstrings aside, that name a framework."""
    tree = tree_of(path)
    described = {
        id(each.value)
        for node in ast.walk(tree)
        for each in (node.body if isinstance(getattr(node, "body", None), list) else [])
        if isinstance(each, ast.Expr)
    }
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [
        node.value
        for node in texts
        if isinstance(node.value, str) and id(node) not in described
        if FRAMEWORK.search(node.value)
    ]


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if layer_of(path) not in NAME_FRAMEWORKS],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_what_is_said_of_a_trainer_comes_from_the_trainer(path):
    found = named_frameworks(path)
    assert len(found) <= FRAMEWORKS_NAMED.get(str(path.relative_to(PACKAGE)), 0), found


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ('hint = f"{name}: see the keys of torchtitan"', True),
        ('problem("name it where Megatron-Core trains")', True),
        ('def f():\n    """As torchtitan does."""\nhint = "see the trainer"', False),
    ],
)
def test_a_framework_that_is_named_is_seen(tmp_path, line, seen):
    (tmp_path / "x.py").write_text(line)
    assert bool(named_frameworks(tmp_path / "x.py")) is seen


CONTRACT = {
    value
    for name, value in vars(layout).items()
    if name.isupper() and isinstance(value, str)
    if name == "LOGS" or "." in value or value.startswith("CONVERGE_")
}
"""Names that only ``run_folder/`` writes out. Its other folders' are words that mean more."""
CONTRACT |= {name for name in arrays.KEYS if "_" in name}
"""The same for arrays of ``.npz`` files. Names of one word mean more, too."""


def written_names(path: Path) -> set[str]:
    """Names of the contract that a module writes out as texts, alone or at the end of a path.

    A sentence for people may have them: it has a space.
    """
    tree = tree_of(path)
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in formatted for part in node.values}
    texts = [ast.unparse(node).strip("rf\"'") for node in formatted]
    texts += [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
    ]
    return {name for text in texts if " " not in text if (name := text.split("/")[-1]) in CONTRACT}


@pytest.mark.parametrize(
    "path",
    [path for path in PACKAGE.rglob("*.py") if layer_of(path) != "run_folder"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_only_the_contract_names_the_files_of_a_run_folder(path):
    # These two run before, or without, a Python that could import the contract.
    alone = {"stub.py": "CONVERGE_PARENT", "process_guard.py": "CONVERGE_PARENT"}
    assert written_names(path) <= {alone.get(path.name)}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("folder / 'job.json'", "job.json"),
        ("(checkpoint / '.metadata').exists()", ".metadata"),
        ("f'{folder}/logs'", "logs"),
        ("variables['CONVERGE_FAILURES'] = str(log)", "CONVERGE_FAILURES"),
        ("open(logs / 'torchrun.log')", "torchrun.log"),
        ("{RunStatus.REFUSED: 'job.sh'}", "job.sh"),
        ("SLURM_LOG = 'slurm.log'", "slurm.log"),
        ("del arrays['clipped_norm']", "clipped_norm"),
    ],
)
def test_a_name_of_the_run_folder_is_seen(tmp_path, line, name):
    (tmp_path / "x.py").write_text(line)
    assert written_names(tmp_path / "x.py") == {name}


def constants_of_arrays(path: Path) -> set[str]:
    """Constants of ``run_folder/arrays.py`` that a module has as its own, by name."""
    numbers = {name for name, value in vars(arrays).items() if isinstance(value, int)} - {"SCHEMA"}
    assigned = [node for node in tree_of(path).body if isinstance(node, ast.Assign)]
    return numbers & {ast.unparse(target) for node in assigned for target in node.targets}


@pytest.mark.parametrize(
    "path",
    [path for path in PACKAGE.rglob("*.py") if layer_of(path) != "run_folder"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_only_the_contract_sets_the_sizes_of_arrays(path):
    assert not constants_of_arrays(path)


def test_a_size_of_arrays_is_seen(tmp_path):
    (tmp_path / "x.py").write_text("PROJECTIONS = 64\n")
    assert constants_of_arrays(tmp_path / "x.py") == {"PROJECTIONS"}


def defined_twice(folder: Path) -> dict[str, list[str]]:
    """Public classes of modules that have one name, and the modules of each.

    Classes inside of classes do not count: torchtitan calls each component's own ``Config``.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(folder)))
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_a_class_name_means_one_thing():
    assert not defined_twice(PACKAGE)


def test_a_class_name_for_two_things_is_seen(tmp_path):
    (tmp_path / "one.py").write_text("class Job: pass\nclass _Own: pass\n")
    (tmp_path / "two.py").write_text("class Job: pass\nclass _Own: pass\n")
    assert defined_twice(tmp_path) == {"Job": ["one.py", "two.py"]}


def unnamed_in_docstrings(folder: Path) -> dict[str, set[str]]:
    """Modules and subpackages that the docstring of their package leaves out, by package.

    It names them as ``name.py``, ``name/`` or a word in backticks. ``__main__`` need not be named:
    it is there for ``python -m`` alone.
    """
    found: dict[str, set[str]] = {}
    for init in sorted(folder.rglob("__init__.py")):
        docstring = ast.get_docstring(tree_of(init)) or ""
        modules = {path.stem for path in init.parent.glob("*.py")} - {"__init__", "__main__"}
        modules |= {path.parent.name for path in init.parent.glob("*/__init__.py")}
        named = {name for each in NAMED.findall(docstring) for name in each if name}
        if modules - named:
            found[str(init.parent.relative_to(folder))] = modules - named
    return found


NAMED = re.compile(r"(?<![\w./])(\w+)(?:\.py|/)(?=[\s,;:)`]|$)|``(\w+)``")


def test_the_docstring_of_a_package_names_all_its_modules():
    assert not unnamed_in_docstrings(PACKAGE)


def test_a_module_that_its_package_does_not_name_is_seen(tmp_path):
    inside = tmp_path / "inner"
    inside.mkdir()
    (tmp_path / "__init__.py").write_text('"""Two of 3: ``one``, two.py\n\ninner is prose."""')
    for path in (tmp_path / "one.py", tmp_path / "two.py", tmp_path / "__main__.py"):
        path.touch()
    (inside / "__init__.py").write_text('"""It has other/three.py and some errors."""')
    for path in (inside / "three.py", inside / "errors.py"):
        path.touch()
    assert unnamed_in_docstrings(tmp_path) == {".": {"inner"}, "inner": {"three", "errors"}}


def test_the_table_of_the_architecture_page_is_the_one_enforced():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `harness/(\w+)(?:\.py|/)` \| .* \| (.*) \|$", page, re.MULTILINE)
    written = {
        layer: set(re.findall(r"\w+", may_import)) & ALLOWED.keys()
        for layer, may_import in rows
        if layer not in ("matrix", "cli")  # said by what they may not import
    }
    assert written == {
        layer: allowed
        for layer, allowed in ALLOWED.items()
        if layer not in ("__init__", "matrix", "cli")
    }


def test_every_layer_stands_in_the_architecture_page():
    page = (ROOT / "docs" / "architecture.md").read_text()
    missing = [layer for layer in ALLOWED if layer != "__init__" and f"harness/{layer}" not in page]
    assert not missing


def test_the_light_part_needs_no_torch():
    assert "torch" not in sys.modules


def test_the_package_is_imported_by_no_name_that_a_persons_folder_may_have():
    """The folder's own name is found in a checkout only, and there by chance."""
    link = ROOT / "src" / "converge_harness"
    assert link.is_symlink()
    assert link.resolve() == PACKAGE
    folders = (PACKAGE, ROOT / "tests", ROOT / "benchmarks", ROOT / "experiments")
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    imported = {path: {name.split(".")[0] for name in imports_of(path)} for path in paths}
    assert not [path for path, names in imported.items() if PACKAGE.name in names]
