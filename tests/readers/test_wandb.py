"""Weights & Biases offline runs, written by wandb itself in a process of its own."""

import math
import os
import shutil
import struct
import subprocess
import sys
import zlib

import pytest
from reader_files import file

from converge_harness.errors import EvidenceError
from converge_harness.readers import read_curves, steps_so_far
from converge_harness.readers.foreign.wandb import BLOCK, HEADER, MAGIC, records

pytest.importorskip("wandb")

# As torchtitan logs; with a note so long that records spread over several blocks of the log.
LOGGING = """
import sys
import wandb
settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True)
with wandb.init(project="p", dir=sys.argv[1], mode="offline", settings=settings) as run:
    for step in [1, 2, 3, 4]:
        loss = float("nan") if step == 3 else 8 / step
        grad_norm = float("inf") if step == 3 else 0.5
        run.log({"loss_metrics/global_avg_loss": loss, "grad_norm": grad_norm}, step=step)
        run.log({"lr": 1e-3, "note": "x" * 50_000, "nested": {"ce": loss + 1}}, step=step)
    run.log({"validation_metrics/loss": 7.0}, step=9)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with one run as ``wandb`` leaves it."""
    folder = tmp_path_factory.mktemp("wandb")
    quiet = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    subprocess.run(
        [sys.executable, "-c", LOGGING, str(folder)],
        check=True,
        timeout=120,
        env={**os.environ, **quiet, "WANDB_DIR": str(folder), "HOME": str(folder)},
        cwd=folder,
    )
    return folder


@pytest.fixture
def run_file(written, tmp_path):
    """A copy of its run file, to be damaged."""
    (source,) = written.glob("wandb/offline-run-*/run-*.wandb")
    return shutil.copy(source, tmp_path / source.name)


def test_an_offline_run(written):
    evidence = read_curves(written)
    assert evidence.steps.tolist() == [1, 2, 3, 4]
    assert evidence.signals["loss"][:2] == (8.0, 4.0)
    assert math.isnan(evidence.signals["loss"][2])
    assert evidence.signals["grad_norm"][2] == math.inf
    assert evidence.signals["lr"] == (1e-3,) * 4
    assert (evidence.replayed, evidence.problems, evidence.complete) == ((), (), True)


def test_a_run_file_by_itself_and_a_key_within_a_dictionary(run_file):
    evidence = read_curves(run_file, {"loss": "nested.ce"})
    assert evidence.signals["loss"][:2] == (9.0, 5.0)
    with pytest.raises(EvidenceError, match=r"has no 'ce' for loss; it has .*'nested\.ce'"):
        read_curves(run_file, {"loss": "ce"})


def test_several_runs_are_ambiguous(written, tmp_path):
    for name in ("a", "b"):
        file(tmp_path, f"{name}/run-{name}.wandb", b"")
    with pytest.raises(EvidenceError, match=r"it has 2 runs; give one: .*a, .*b"):
        read_curves(tmp_path)


def test_a_cut_run_file_is_refused_wherever_it_was_cut(run_file):
    content = run_file.read_bytes()
    note = content.index(b"x" * 1000)  # longer than a block, so that a block ends within it
    block = (note // BLOCK + 1) * BLOCK
    for size in (HEADER.size + 3, note + 500, block, block + 3, block + 500, len(content) - 3):
        run_file.write_bytes(content[:size])
        with pytest.raises(EvidenceError, match=r"record \d+: the file ends within it"):
            read_curves(run_file)


def test_a_run_that_is_still_written_or_was_killed_has_the_rows_before_the_cut(run_file):
    content = run_file.read_bytes()
    found = {}
    for size in (0, 3, HEADER.size, HEADER.size + 3, len(content) // 2, len(content) - 3):
        run_file.write_bytes(content[:size])
        for path in (run_file, run_file.parent):  # a curve is a file or a folder
            found.setdefault(size, []).append(list(steps_so_far(path, {})))
    assert list(found.values())[:4] == [[[], []]] * 4
    half, most = list(found.values())[4:]
    assert half[0] == half[1] == list(range(1, len(half[0]) + 1))
    assert 0 < len(half[0]) < 4
    assert most == [[1, 2, 3, 4]] * 2
    damaged = bytearray(content[: len(content) // 2])
    damaged[len(damaged) // 2] ^= 1
    run_file.write_bytes(bytes(damaged))
    with pytest.raises(EvidenceError, match=r"record \d+: damaged at byte \d+"):
        steps_so_far(run_file, {})


def test_a_run_that_did_not_say_how_it_ended_is_incomplete(run_file):
    *most, _ = records(run_file)
    run_file.write_bytes(HEADER.pack(*MAGIC) + b"".join(framed(most)))
    evidence = read_curves(run_file)
    assert evidence.steps.tolist() == [1, 2, 3, 4]
    assert not evidence.complete


def framed(contents):
    """Records as fragments, as wandb frames them."""
    at = HEADER.size
    for content in contents:
        kind, rest = 1, content
        first = True
        while first or rest:
            left = BLOCK - at % BLOCK
            if left < 7:
                yield bytes(left)
                at += left
                continue
            part, rest = rest[: left - 7], rest[left - 7 :]
            kind = (2 if rest else 1) if first else (3 if rest else 4)
            checksum = zlib.crc32(bytes([kind]) + part)
            yield struct.pack("<IHB", checksum, len(part), kind) + part
            at += 7 + len(part)
            first = False


def test_a_damaged_run_file_is_named(run_file):
    content = bytearray(run_file.read_bytes())
    content[len(content) // 2] ^= 1
    run_file.write_bytes(bytes(content))
    with pytest.raises(EvidenceError, match=r"run-.*\.wandb: record \d+: damaged at byte \d+"):
        read_curves(run_file)


def test_a_record_that_is_no_message_is_named(tmp_path):
    content = HEADER.pack(*MAGIC) + b"".join(framed([b"\xff\xff"]))
    with pytest.raises(EvidenceError, match="record 1: not a record of Weights & Biases"):
        read_curves(file(tmp_path, "run-a.wandb", content))


@pytest.mark.parametrize("content", [b"", b":W&B", b"step,loss\n1,8.0\n"])
def test_what_is_no_run_file_is_refused(tmp_path, content):
    with pytest.raises(EvidenceError, match="is not a run file of Weights & Biases"):
        read_curves(file(tmp_path, "run-a.wandb", content))


def test_a_run_that_logged_nothing_is_refused(tmp_path):
    with pytest.raises(EvidenceError, match="has no row of values"):
        read_curves(file(tmp_path, "run-a.wandb", HEADER.pack(*MAGIC)))


def test_without_wandb_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb.proto.wandb_internal_pb2", None)
    with pytest.raises(EvidenceError, match=r"-m pip install 'converge-harness\[wandb\]'"):
        read_curves(file(tmp_path, "run-a.wandb", b""))
