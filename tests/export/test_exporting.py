"""What ``converge export`` writes, read back: by our readers, and by TensorBoard itself."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from stored_samples import NAMES, copied

from converge_harness.cli import main
from converge_harness.cli.exit_codes import ExitCode
from converge_harness.export import ExportedPoints, ExportedRun, write_tensorboard
from converge_harness.model import Role
from converge_harness.readers import read_curves, read_run

RUNS = ["ddp2", "doubled", "dp_2_1", "fsdp2", "fsdp2.rerun", "fsdp2.ulp"]
"""Of the sample; the crashed set left no step."""
SIGNALS = ("loss", "grad_norm", "lr", "loss_recomputed", "grad_norm_recomputed", "tokens")


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return copied(NAMES[-1], tmp_path_factory.mktemp("sample"))


def evidence_of(sample, name):
    (folder,) = (sample / "store" / "runs").glob(f"{name}-*")
    return read_run(folder)


def program(*arguments, home):
    """The command in a process of its own, for a person who never logged in anywhere."""
    environment = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    quiet = {"HOME": str(home), "WANDB_ERROR_REPORTING": "false", "NETRC": str(home / "netrc")}
    return subprocess.run(
        [sys.executable, "-m", "converge_harness", "export", *map(str, arguments)],
        env={**environment, **quiet},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# ----------------------------------------------------------------- TensorBoard


@pytest.fixture(scope="module")
def logdir(sample, tmp_path_factory):
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("tensorboard")
    report = str(sample / "report")
    assert main(["export", report, "--tensorboard", str(folder)]) == ExitCode.PASS
    return folder


def test_every_run_that_left_steps_is_a_tensorboard_run(logdir):
    assert sorted(path.name for path in logdir.iterdir()) == RUNS


@pytest.mark.parametrize("name", RUNS)
def test_tensorboard_holds_the_curves_in_float32(sample, logdir, name):
    left, read = evidence_of(sample, name), read_curves(logdir / name)
    assert read.steps.tolist() == left.steps.tolist()
    assert read.complete
    for signal in SIGNALS:
        expected = left.signals[signal].values.astype(np.float32)
        np.testing.assert_array_equal(read.signals[signal].values.astype(np.float32), expected)


def test_tensorboard_itself_finds_differences_and_limits(sample, logdir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(logdir / "doubled"), size_guidance={"scalars": 0}).Reload()
    tags = set(found.Tags()["scalars"])
    assert {"loss", "grad_norm", "lr", "difference/grad_norm", "limit/grad_norm"} <= tags
    ours, theirs = (
        evidence_of(sample, name).signals["grad_norm"].values for name in ("doubled", "fsdp2")
    )
    apart = np.array([each.value for each in found.Scalars("difference/grad_norm")])
    np.testing.assert_allclose(apart, np.abs(ours - theirs) / np.abs(theirs), rtol=1e-5)
    allowed = np.array([each.value for each in found.Scalars("limit/grad_norm")])
    assert (apart > allowed).all()
    control = EventAccumulator(str(logdir / "fsdp2")).Reload().Tags()["scalars"]
    assert not [tag for tag in control if "/" in tag]


def test_writing_again_replaces_what_was_written(sample, logdir):
    before = {path: path.read_bytes() for path in logdir.rglob("*") if path.is_file()}
    main(["export", str(sample / "report"), "--tensorboard", str(logdir)])
    assert {path: path.read_bytes() for path in logdir.rglob("*") if path.is_file()} == before


def test_names_that_are_one_folder_name_become_two(tmp_path):
    pytest.importorskip("tensorboard")
    names = ("tp/2 <b>", "tp/2 (b)", "TP-2 b", "..")
    curve = {"loss": ExportedPoints(np.array([1, 2]), np.array([np.nan, 2.5]))}
    runs = [ExportedRun(name, Role.TEST, curve, seconds={}) for name in names]
    files = write_tensorboard(runs, tmp_path)
    assert [path.parent.name for path in files] == ["tp-2-b", "tp-2-b-2", "TP-2-b-3", "run"]
    loss = read_curves(files[1]).signals["loss"].values
    np.testing.assert_array_equal(loss, [np.nan, 2.5])


# ------------------------------------------------------------ Weights & Biases


@pytest.fixture(scope="module")
def offline(sample, tmp_path_factory):
    pytest.importorskip("wandb")
    home = tmp_path_factory.mktemp("home")
    result = program(sample / "report", "--wandb", "--offline", home=home)
    assert result.returncode == ExitCode.PASS, result.stderr
    return result.stdout.splitlines()


def test_offline_runs_hold_the_curves_in_full_precision(sample, offline):
    *folders, last = offline
    assert (
        last == f"{len(RUNS)} runs; send them with: wandb sync {sample}/report/wandb/offline-run-*"
    )
    order = ["fsdp2", "fsdp2.rerun", "fsdp2.ulp", "ddp2", "doubled", "dp_2_1"]
    for folder, name in zip(folders, order, strict=True):
        left, read = evidence_of(sample, name), read_curves(Path(folder))
        assert read.steps.tolist() == left.steps.tolist()
        assert read.complete
        for signal in SIGNALS:
            expected = left.signals[signal].values
            np.testing.assert_array_equal(read.signals[signal].values, expected)


def test_logging_online_without_a_login_says_what_to_do(sample, tmp_path):
    pytest.importorskip("wandb")
    result = program(sample / "report", "--wandb", home=tmp_path)
    assert result.returncode == ExitCode.USAGE, result.stdout
    assert "wandb login" in result.stderr
    assert "--offline" in result.stderr
    assert "Traceback" not in result.stderr


# --------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "add --tensorboard OUT, or --wandb"),
        (["--tensorboard", "x", "--offline"], "add --wandb"),
    ],
)
def test_an_export_of_nothing_is_refused(tmp_path, options, told, capsys):
    assert main(["export", str(tmp_path), *options]) == ExitCode.USAGE
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "option"), [("tensorboard", "--tensorboard=out"), ("wandb", "--wandb")]
)
def test_a_missing_package_is_named(sample, package, option, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    assert main(["export", str(sample / "report"), option]) == ExitCode.USAGE
    told = f"{sys.executable} -m pip install 'converge-harness[{package}]'\n"
    assert told in capsys.readouterr().err
