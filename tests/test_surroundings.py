"""What lies outside an experiment file: hardware, rank code, injected files."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import converge_harness
from converge_harness.errors import ConfigError
from converge_harness.model import (
    Cluster,
    Experiment,
    Parallelism,
    SetSpec,
    SyntheticData,
    TrainConfig,
)
from converge_harness.surroundings import (
    PACKAGE,
    cluster_hardware,
    cluster_software,
    driver_version,
    gpus,
    hardware_class,
    local_software,
    rank_code_digest,
    read_surroundings,
)
from converge_harness.trainers.command import trained_by
from converge_harness.trainers.command.settings import Command
from converge_harness.trainers.torchtitan import TORCHTITAN


def experiment(inject: str | None, data: SyntheticData | None) -> Experiment:
    config = TrainConfig(path="t.toml", settings={}, data=data)
    control = SetSpec(
        "control", Parallelism(dp_shard=2), config, "torchtitan-0.3.0", trainer=TORCHTITAN
    )
    test = SetSpec(
        "a",
        Parallelism(),
        config,
        "torchtitan-0.3.0",
        inject=inject,
        control="control",
        trainer=TORCHTITAN,
    )
    return Experiment("x", Path("x.toml"), (control,), (test,))


def test_digests_are_read_once_per_corpus_and_file(tmp_path):
    file = tmp_path / "bug.py"
    file.write_text("def f(trainer): ...\n")
    asked = []

    def digest(data: SyntheticData) -> str:
        asked.append(data)
        return "d1"

    inject = f"{file}:f"
    surroundings = read_surroundings(experiment(inject, SyntheticData()), digest, on_gpu=False)
    assert asked == [SyntheticData()]
    assert surroundings.data == {SyntheticData(): "d1"}
    assert list(surroundings.injected) == [inject]
    assert surroundings.rank_code == rank_code_digest()
    assert surroundings.hardware.startswith("cpu-")


def injected_digest(file: Path) -> str:
    inject = f"{file}:f"
    return read_surroundings(experiment(inject, None), str, on_gpu=False).injected[inject]


def test_an_injected_files_digest_follows_what_it_imports_beside_it(tmp_path):
    bug, places, more = (tmp_path / name for name in ("bug.py", "places.py", "more.py"))
    bug.write_text("def f(trainer):\n    import places, math\n")
    alone = injected_digest(bug)
    places.write_text("from more import g\n")
    more.write_text("import bug\n")
    first = injected_digest(bug)
    (tmp_path / "unrelated.py").write_text("1")
    assert injected_digest(bug) == first
    more.write_text("import bug\nx = 1\n")
    assert len({alone, first, injected_digest(bug)}) == 3
    bug.write_text("def f(:\n")
    assert injected_digest(bug)


def test_a_vanished_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.py cannot be read: No such file"):
        read_surroundings(experiment(f"{tmp_path}/gone.py:f", None), str, on_gpu=False)


def test_the_rank_code_digest_follows_names_and_contents(tmp_path):
    (tmp_path / "a.py").write_text("1")
    first = rank_code_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("no code")
    assert rank_code_digest(tmp_path) == first
    (tmp_path / "a.py").write_text("2")
    second = rank_code_digest(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").rename(tmp_path / "sub" / "a.py")
    assert len({first, second, rank_code_digest(tmp_path)}) == 3


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1]),
        ("", []),
        ("NoDevFiles", []),
        ("-1", []),
        ("1", [1]),
        ("1, 0", [1, 0]),
        ("0,7,1", [0]),
    ],
)
def test_gpus_are_read_from_the_drivers_files(visible, expected, tmp_path, monkeypatch):
    for index, model in enumerate(["NVIDIA H100", "NVIDIA H200"]):
        folder = tmp_path / f"0000:0{index}:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 70\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    models = {0: "NVIDIA H100", 1: "NVIDIA H200"}
    assert list(gpus(tmp_path).items()) == [(number, models[number]) for number in expected]
    assert gpus(tmp_path / "none") == {}


def test_gpus_that_are_named_otherwise_are_refused(tmp_path, monkeypatch):
    (tmp_path / "0000:00:00.0").mkdir()
    (tmp_path / "0000:00:00.0" / "information").write_text("Model: NVIDIA H100\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    with pytest.raises(ConfigError, match=r"has 'GPU-8932f937' \(numbers as in 0,1"):
        gpus(tmp_path)


def test_the_hardware_class_says_which_device(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware_class(on_gpu=True) == "gpu of unknown model"
    assert hardware_class(on_gpu=False) == hardware_class(on_gpu=False)


@pytest.mark.parametrize(
    ("asked", "hardware"),
    [
        ({"hardware": "H100", "partition": "p"}, "gpu H100"),
        ({"partition": "p", "gres": "gpu:8", "constraint": "ib"}, "gpu slurm p gpu:8 ib"),
        ({"hardware": "cpu farm"}, "gpu cpu farm"),
        ({"partition": "p", "device": "cpu"}, "cpu slurm p"),
        ({"hardware": "epyc", "device": "cpu"}, "cpu epyc"),
    ],
)
def test_the_hardware_of_a_cluster_is_its_name_or_what_is_asked_for(asked, hardware):
    found = cluster_hardware(Cluster(ranks_per_node=8, **asked))
    assert found == f"{hardware} in nodes of 8"


def test_what_a_cluster_gives_besides_the_toolchain_is_listed_without_its_requests():
    assert cluster_software(Cluster(ranks_per_node=8, partition="p", sbatch=("--x",))) == {}
    given = Cluster(ranks_per_node=8, environment={"A": "1"}, container=("apptainer", "exec"))
    assert cluster_software(given) == {
        "container": ["apptainer", "exec"],
        "environment": {"A": "1"},
    }


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n",
            "535.104.05",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n",
            "570.86.15",
        ),
        ("something else\n", ""),
    ],
)
def test_the_driver_says_its_version(tmp_path, text, version):
    information = tmp_path / "version"
    information.write_text(text)
    assert driver_version(information) == version
    assert driver_version(tmp_path / "missing") == ""


def source_digest(file: Path, folder: Path) -> str:
    command = Command(argv=(file.name,), folder=folder, sources=(file,))
    made = experiment(None, None)
    control = replace(made.controls[0], trainer=trained_by(command))
    made = replace(made, controls=(control,), tests=())
    return read_surroundings(made, str, on_gpu=False).sources[file]


def test_a_programs_digest_follows_modules_and_packages_beside_it(tmp_path):
    script = tmp_path / "scripts" / "train.py"
    package = tmp_path / "model"
    for folder in (script.parent, package / "inner"):
        folder.mkdir(parents=True)
    script.write_text("from model.inner import layers\nimport helper\n")
    seen = [source_digest(script, tmp_path)]
    for file in (package / "__init__.py", package / "inner" / "layers.py"):
        file.write_text("x = 1\n")  # a package where the program is started
        seen.append(source_digest(script, tmp_path))
    (script.parent / "helper.py").write_text("from . import more\n")  # beside the script
    seen.append(source_digest(script, tmp_path))
    (script.parent / "more.py").write_text("")
    seen.append(source_digest(script, tmp_path))
    assert len(set(seen)) == len(seen)
    (tmp_path / "unrelated.py").write_text("1")
    assert source_digest(script, tmp_path) == seen[-1]


def test_a_folder_that_is_no_package_is_followed_to_what_is_imported_of_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import src.model.net\nfrom src.data import loaders\n")
    net, loaders = tmp_path / "src" / "model" / "net.py", tmp_path / "src" / "data" / "loaders.py"
    seen = set()
    for width in (1, 2):
        for file in (net, loaders):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"width = {width}\n")
            seen.add(source_digest(script, tmp_path))
    assert len(seen) == 4
    (tmp_path / "src" / "old").mkdir()
    (tmp_path / "src" / "old" / "unrelated.py").write_text("1")
    assert source_digest(script, tmp_path) in seen


def test_files_that_are_no_python_count_by_their_bytes(tmp_path):
    settings = tmp_path / "ds.json"
    settings.write_bytes(b"\xff{}")
    first = source_digest(settings, tmp_path)
    settings.write_bytes(b"\xff{ }")
    assert source_digest(settings, tmp_path) != first


def test_a_vanished_program_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.command: .*gone\.py cannot be read: No such"):
        source_digest(tmp_path / "gone.py", tmp_path)


def test_the_probe_as_a_library_and_the_file_contract_are_rank_code():
    folders = [
        Path(converge_harness.__file__).parent / name for name in ("rank", "probe", "run_folder")
    ]
    assert rank_code_digest() == rank_code_digest(*folders)
    for without in folders:
        assert rank_code_digest() != rank_code_digest(*(set(folders) - {without}))


def test_variables_that_choose_algorithms_are_software_and_others_are_not():
    assert local_software({"HOME": "/root", "NCCL_DEBUG": "INFO", "CUDA_HOME": "/usr"}) == {}
    assert local_software(
        {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "0"}
    ) == {"environment": {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Ring"}}


@pytest.mark.parametrize(
    "name",
    [
        "ACCELERATE_MIXED_PRECISION",
        "CUBLASLT_WORKSPACE_SIZE",
        "DS_ACCELERATOR",
        "FLASH_ATTENTION_DETERMINISTIC",
        "HIPBLASLT_ALLOW_TF32",
        "LD_PRELOAD",
        "NCCL_P2P_DIRECT_DISABLE",
        "NVIDIA_TF32_OVERRIDE",
        "TORCHDYNAMO_DISABLE",
    ],
)
def test_a_variable_that_may_change_numbers_is_software(name):
    assert local_software({name: "1"}) == {"environment": {name: "1"}}


@pytest.mark.parametrize(
    "name",
    [
        "ACCELERATE_LOG_LEVEL",
        "CUDNN_LOGDEST_DBG",
        "LD_PRELOAD_OF_ANOTHER",
        "NCCL_DEBUG_FILE",
        "NCCL_SOCKET_IFNAME",
        "NVIDIA_API_KEY",
        "OMP_NUM_THREADS",
        "PYTHONHASHSEED",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_LOGS",
    ],
)
def test_a_variable_of_places_logs_and_secrets_is_none(name):
    assert local_software({name: "1"}) == {}


def test_such_a_variable_makes_another_run(monkeypatch):
    found = []
    for algorithm in ("Ring", "Tree"):
        monkeypatch.setenv("NCCL_ALGO", algorithm)
        surroundings = read_surroundings(experiment(None, None), lambda _: "", on_gpu=False)
        found.append(surroundings.software)
    assert found[0] != found[1]


def refused(file: Path, folder: Path, **trainer) -> str:
    """What is said of a program in a file that is started in a folder; empty: nothing."""
    command = Command(argv=(file.name,), folder=folder, sources=(file,), **trainer)
    made = experiment(None, None)
    control = replace(made.controls[0], trainer=trained_by(command))
    try:
        read_surroundings(replace(made, controls=(control,), tests=()), str, on_gpu=False)
    except ConfigError as error:
        (problem,) = error.problems
        return str(problem)
    return ""


@pytest.mark.parametrize("beside", ["scripts", ""])
def test_a_module_that_hides_this_package_is_reported_before_anything_runs(tmp_path, beside):
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text("")
    folder = tmp_path / beside
    hiding = folder / PACKAGE
    hiding.mkdir()
    (hiding / "model.py").write_text("")
    assert refused(script, tmp_path) == ""  # without __init__.py it hides nothing
    (hiding / "__init__.py").write_text("raise RuntimeError('nobody imports it')")
    said = refused(script, tmp_path)
    assert "trainer.command: " in said
    assert f"{hiding} has the name of converge's own package" in said
    assert f"Python looks in {folder} first (rename it, or move the program" in said
    assert refused(script, tmp_path, probed=False, curves="x.csv") == ""  # it imports none of ours
    shutil.rmtree(hiding)
    (folder / f"{PACKAGE}.py").write_text("")
    assert f"{folder / PACKAGE}.py has the name" in refused(script, tmp_path)


def test_a_folder_on_pythonpath_that_hides_this_package_is_reported(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("")
    library = tmp_path / "library"
    library.mkdir()
    (library / f"{PACKAGE}.py").write_text("")
    ours = Path(converge_harness.__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/nowhere", str(ours), "", str(library)]))
    assert refused(script, tmp_path) == ""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(library), str(ours)]))
    said = refused(script, tmp_path)
    assert said.startswith(f"$PYTHONPATH: {library / PACKAGE}.py has the name of converge's own")
    assert f"take {library} off PYTHONPATH" in said
