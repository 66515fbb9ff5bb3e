"""Calibration files: what is written is read bit for bit, and half a file judges nothing."""

import json
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converge_harness.calibrations import (
    StoredCalibration,
    find_calibration,
    read_calibrations,
    what_changed,
    write_calibrations,
)
from converge_harness.errors import StoreError
from converge_harness.model import (
    Calibration,
    ModuleTensor,
    Precision,
    SignalScale,
    TensorScale,
)
from converge_harness.store import Store

FACTS = {"versions": {"torch": "2.13.0"}, "hardware": "cpu A", "sample_steps": [0, 1]}


def learnt(
    scales=(1e-7, 2.5e-7), name="fsdp2", identity: str | None = "a" * 64
) -> StoredCalibration:
    steps = np.arange(1, len(scales) + 1)
    calibration = Calibration(
        control=name,
        identity=identity,
        precision=Precision.BF16,
        repeats=(f"{name}.rerun", f"{name}.ulp"),
        taught_by=1,
        signals={"loss": SignalScale(steps, np.array(scales), 0.5, 3.25, lasting=0.1, ending=0.3)},
        tensors={
            0: TensorScale(("a", "b"), None, None),
            1: TensorScale(("a", "b"), np.array([1e-6, 0.0]), np.array([1 / 3, 2.0])),
        },
        modules={
            ModuleTensor("a", "in.0", backward=False): scales[0],
            ModuleTensor("a", "in.0", backward=True): 1 / 3,
            ModuleTensor("a b", "out.0", backward=True): 2e-7,  # names of a dictionary's modules
        },
    )
    repeats = {f"{name}.rerun": "b" * 64, f"{name}.ulp": "c" * 64}
    return StoredCalibration(calibration, repeats, FACTS, "2026-02-03T04:05:06+00:00")


def same(ours, theirs) -> bool:
    """Whether two values of the model are equal, arrays bit for bit."""
    if isinstance(ours, np.ndarray):
        return ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if hasattr(ours, "__dataclass_fields__"):
        names = [field.name for field in fields(ours)]
        return all(same(getattr(ours, name), getattr(theirs, name)) for name in names)
    return ours == theirs


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=20))
def test_what_is_written_is_read_bit_for_bit(tmp_path_factory, scales):
    path = tmp_path_factory.mktemp("c") / "c.json"
    written = learnt(scales)
    write_calibrations(path, [written])
    (read,) = read_calibrations(path)
    assert same(read, written)


def test_one_file_holds_several_controls_and_finds_each_by_identity(tmp_path):
    path = tmp_path / "c.json"
    write_calibrations(path, [learnt(), learnt(name="float8", identity="d" * 64)])
    read = read_calibrations(path)
    assert find_calibration(read, "d" * 64).calibration.control == "float8"
    assert find_calibration(read, "e" * 64) is None
    assert find_calibration(read, None) is None


def test_the_store_keeps_one_file_for_each_control(tmp_path):
    path = Store(tmp_path).calibration_file("a" * 64)
    assert path == tmp_path / "calibrations" / f"{'a' * 64}.json"


def loss(entry):
    return entry["signals"]["loss"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda entry: entry.pop("identity"), "calibrations.0.identity: Field required"),
        (lambda entry: loss(entry)["scale"].pop(), "loss has 1 scales for 2 steps"),
        (lambda entry: loss(entry).update(steps=[], scale=[]), "loss has 0 scales for 0 steps"),
        (lambda entry: loss(entry)["steps"].reverse(), "the steps of loss do not increase"),
        (lambda entry: loss(entry)["scale"].__setitem__(0, "nan"), "negative or not finite"),
        (lambda entry: loss(entry)["scale"].__setitem__(0, -1), "negative or not finite"),
        (lambda entry: loss(entry).update(ending=-1), "negative or not finite"),
        (lambda entry: entry["tensors"][1]["update"].pop(), "step 1 has 1 update scales"),
        (lambda entry: entry["modules"].update({"a in.0": [-1, None]}), "module 'a in.0' has no"),
        (lambda entry: entry.update(taught_by=3), "learnt from 3 of 2 repeats"),
        (lambda entry: entry.update(precision="fp33"), "precision"),
    ],
)
def test_a_damaged_file_is_refused_with_the_command_that_renews_it(tmp_path, damage, message):
    path = tmp_path / "c.json"
    write_calibrations(path, [learnt()])
    document = json.loads(path.read_text())
    damage(document["calibrations"][0])
    path.write_text(json.dumps(document))
    with pytest.raises(StoreError, match="converge calibrate EXPERIMENT --out") as caught:
        read_calibrations(path)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", ['{"schema": 1}', '{"schema": 1, "calibrations": []}', "{"])
def test_a_file_without_calibrations_is_refused(tmp_path, content):
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(StoreError, match=r"c\.json"):
        read_calibrations(path)


def test_changes_are_named_with_both_values():
    now = {"versions": {"torch": "2.14.0", "triton": "3.9"}, "hardware": "cpu A", "rank_code": "2"}
    then = {**FACTS, "rank_code": "1"}
    assert what_changed(then, now) == (
        'versions.torch is "2.14.0", was "2.13.0"',
        'versions.triton is "3.9", was not there',
        "rank_code has changed",
        "sample_steps is not there, was [0, 1]",
    )
    assert what_changed(FACTS, FACTS) == ()
