"""What modules computed, and frozen steps, as they are read from a run folder and its passes."""

import numpy as np
import pytest
from pass_files import STEPS, step, write_job, write_pass
from test_frozen_samples import save as save_frozen

from converge_harness.errors import EvidenceError
from converge_harness.readers import read_run
from converge_harness.readers.run_folder.arrays import read_activations
from converge_harness.run_folder.arrays import SIGNS
from converge_harness.run_folder.layout import ACTIVATIONS

COLUMNS = 3 + 6 * SIGNS


def save(folder, **changes):
    content = {
        "schema": np.array(1),
        "modules": np.array(["layers.0", "norm"]),
        "tensors": np.array(["in.0", "out.0"]),
        "widths": np.array([64, 64]),
        "same_as": np.array([0, 1]),
        "forward": np.ones((4, 2, COLUMNS)),
        "backward": np.zeros((4, 2, COLUMNS)),
        **changes,
    }
    np.savez(folder / ACTIVATIONS, **content)


def test_rows_are_read_in_the_order_of_the_calls(tmp_path):
    save(tmp_path)
    found = read_activations(tmp_path)
    assert found.modules == ("layers.0", "norm")
    assert found.tensors == ("in.0", "out.0")
    assert found.widths.tolist() == [64, 64]
    assert found.forward.shape == found.backward.shape == (4, 2, COLUMNS)


def test_a_run_that_recorded_none_has_no_such_file(tmp_path):
    assert read_activations(tmp_path) is None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"tensors": np.array(["in.0"])}, "tensors"),
        ({"widths": np.array([64.0, 64.0])}, "widths"),
        ({"same_as": np.array([0, 2])}, "same_as"),
        ({"forward": np.ones((4, 2, 3))}, "forward"),
        ({"backward": np.ones((3, 2, COLUMNS))}, "backward"),
    ],
)
def test_a_damaged_file_is_named_with_its_key(tmp_path, changes, key):
    save(tmp_path, **changes)
    with pytest.raises(EvidenceError, match=rf"activations\.npz.*{key}"):
        read_activations(tmp_path)


def test_an_interrupted_run_keeps_what_its_first_pass_left(tmp_path):
    folder = write_job(tmp_path / "continued-abc", faults=[])
    first = write_pass(folder, 1, 0, [step(number) for number in range(1, 5)])
    save_frozen(first)
    save(first)
    write_pass(folder, 2, 4, [step(number) for number in range(5, STEPS + 1)], end=STEPS)
    evidence = read_run(folder)
    assert evidence.frozen.loss[0] == 6.25
    assert evidence.activations.modules == ("layers.0", "norm")
