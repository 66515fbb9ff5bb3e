"""What frozen steps leave in run folders, whole and damaged."""

import numpy as np
import pytest

from converge_harness.errors import EvidenceError, StoreError
from converge_harness.readers.run_folder.arrays import read_frozen
from converge_harness.run_folder.layout import FROZEN

NAMES = ["layers.0.attention.wq.weight", "norm.weight"]


def save(folder, **changes):
    content = {
        "schema": np.array(1),
        "names": np.array(NAMES),
        "sizes": np.array([4096, 64]),
        "gradients_sketch": np.ones((3, 2, 64)),
        "gradients_norm": np.array([[1.0, 2.0], [1.0, np.nan], [1.0, 2.0]]),
        "loss": np.array([6.25, np.nan, 6.5]),
        "batch_digests": np.array(["0" * 16, "", "2" * 16]),
        "problems": np.array([], dtype=np.str_),
        **changes,
    }
    np.savez(folder / FROZEN, **{key: value for key, value in content.items() if value is not None})


def test_frozen_steps_are_read_batch_by_batch(tmp_path):
    save(tmp_path)
    frozen = read_frozen(tmp_path)
    assert frozen.names == tuple(NAMES)
    assert frozen.sketch.shape == (3, 2, 64)
    assert frozen.norm.shape == (3, 2)
    np.testing.assert_array_equal(frozen.loss, [6.25, np.nan, 6.5])
    assert frozen.batch_digests == ("0" * 16, "", "2" * 16)
    assert frozen.problems == ()
    assert frozen.again is None  # as runs of before there was a second pass


def test_the_second_pass_over_the_first_batch_is_read(tmp_path):
    save(tmp_path, again_sketch=np.full((2, 64), 2.0))
    np.testing.assert_array_equal(read_frozen(tmp_path).again, np.full((2, 64), 2.0))


def test_a_run_without_frozen_steps_has_no_such_file(tmp_path):
    assert read_frozen(tmp_path) is None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"names": np.array(NAMES[::-1])}, "names"),
        ({"sizes": np.array([4096])}, "sizes"),
        ({"gradients_sketch": np.ones((3, 2, 32))}, "gradients_sketch"),
        ({"gradients_sketch": np.ones((2, 2, 64))}, "gradients_sketch"),
        ({"gradients_norm": np.ones((3, 1))}, "gradients_norm"),
        ({"gradients_norm": None}, "gradients_norm"),
        ({"loss": np.array(["six"])}, "loss"),
        ({"batch_digests": np.array(["0" * 16])}, "batch_digests"),
        ({"again_sketch": np.ones((3, 64))}, "again_sketch"),
        ({"again_sketch": np.ones((2, 32))}, "again_sketch"),
    ],
)
def test_a_damaged_file_names_its_key(tmp_path, changes, key):
    save(tmp_path, **changes)
    with pytest.raises((EvidenceError, StoreError), match=key):
        read_frozen(tmp_path)


def test_a_newer_file_is_refused(tmp_path):
    save(tmp_path, schema=np.array(2))
    with pytest.raises(StoreError, match="schema"):
        read_frozen(tmp_path)
