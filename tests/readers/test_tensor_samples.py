"""Per-tensor evidence of run folders, whole and damaged."""

import json
import pickle
import struct
import tracemalloc
import zipfile
from contextlib import suppress

import numpy as np
import pytest
from reader_files import file

from converge_harness.errors import EvidenceError, StoreError
from converge_harness.readers import read_run
from converge_harness.readers.run_folder.arrays import read_sample

NAMES = ["layers.0.attention.wq.weight", "layers.0.attention_norm.weight", "output.weight"]
SIZES = [4096, 64, 8192]


def arrays(number=1, **changes):
    generator = np.random.default_rng(number)
    content = {
        "schema": np.array(1),
        "step": np.array(number),
        "names": np.array(NAMES),
        "sizes": np.array(SIZES),
    }
    for kind in ("parameters", "gradients") if number else ("parameters",):
        content[f"{kind}_sketch"] = generator.normal(size=(3, 64))
        content[f"{kind}_norm"] = np.array([1.0, np.nan, 2.0])
        content[f"{kind}_zeros"] = np.array([0, 64, 5])
        content[f"{kind}_not_finite"] = np.array([0, 0, 8192])
    content |= changes
    return {key: value for key, value in content.items() if value is not None}


def save(folder, number=1, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{number:08d}.npz"
    np.savez(path, **arrays(number, **changes))
    return path


LEFT = {
    "clipped_norm": np.array([0.5, np.nan, 1.0]),
    "state_names": np.array(["exp_avg", "exp_avg_sq"]),
    "state_norm": np.array([[0.1, 0.01], [np.nan, np.nan], [0.2, 0.02]]),
    "state_steps": np.array([3.0, np.nan, 3.0]),
}
BUFFERS = {
    "buffer_names": np.array(["layers.0.moe.expert_bias", "rope.cache"]),
    "buffer_sizes": np.array([8, 512]),
    "buffer_norm": np.array([0.5, 16.0]),
    "buffer_sketch": np.ones((2, 64)),
}


def test_what_a_step_left_behind_its_gradients(tmp_path):
    sample = read_sample(save(tmp_path, 1, **LEFT, **BUFFERS))
    assert sample.post_step.states == ("exp_avg", "exp_avg_sq")
    np.testing.assert_array_equal(sample.post_step.state_norm, LEFT["state_norm"])
    np.testing.assert_array_equal(sample.post_step.clipped_norm, LEFT["clipped_norm"])
    np.testing.assert_array_equal(sample.post_step.state_steps, LEFT["state_steps"])
    assert sample.buffers.names == ("layers.0.moe.expert_bias", "rope.cache")
    assert sample.buffers.sizes.tolist() == [8, 512]


def test_an_older_file_says_nothing_of_updates_and_buffers(tmp_path):
    sample = read_sample(save(tmp_path, 1))
    assert sample.post_step is None
    assert sample.buffers is None


def test_models_without_buffers_and_optimizers_without_state_have_empty_arrays(tmp_path):
    nothing = {
        "state_names": np.zeros(0, np.str_),
        "state_norm": np.zeros((3, 0)),
        "buffer_names": np.zeros(0, np.str_),
        "buffer_sizes": np.zeros(0, np.int64),
        "buffer_norm": np.zeros(0),
        "buffer_sketch": np.zeros((0, 64)),
    }
    sample = read_sample(save(tmp_path, 1, **{**LEFT, **nothing}))
    assert sample.post_step.states == ()
    assert sample.buffers.names == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state_norm": None}, "state_norm: is missing"),
        ({"state_norm": np.ones((3, 1))}, "state_norm: has 1 states, must have 2"),
        ({"state_steps": np.ones(2)}, r"state_steps: has shape \(2,\), must have .* 3 rows"),
        ({"clipped_norm": -np.ones(3)}, "clipped_norm: a negative number"),
        ({"buffer_names": np.array(["b", "a"])}, "buffer_names: not unique and sorted"),
        ({"buffer_sketch": np.ones((2, 8))}, "buffer_sketch: has 8 projections, must be 64"),
    ],
)
def test_a_damaged_array_of_updates_or_buffers_is_named(tmp_path, changes, words):
    path = save(tmp_path, 1, **{**LEFT, **BUFFERS, **changes})
    with pytest.raises(EvidenceError, match=words):
        read_sample(path)


def test_the_samples_of_a_run_in_the_order_of_its_steps(tmp_path):
    file(tmp_path, "job.json", json.dumps({"schema": 1, "identity": "a", "sample_steps": [0, 1]}))
    for step in (16, 0, 2):
        save(tmp_path / "tensors", step)
    file(tmp_path, "tensors/step-00000032.npz.part", b"not yet whole")
    evidence = read_run(tmp_path)
    assert evidence.sample_steps == (0, 1)
    assert [sample.step for sample in evidence.samples] == [0, 2, 16]
    first, second, _ = evidence.samples
    assert first.gradients is None
    assert second.names == tuple(NAMES)
    assert second.sizes.tolist() == SIZES
    np.testing.assert_array_equal(second.gradients.sketch, arrays(2)["gradients_sketch"])
    assert second.gradients.zeros.tolist() == [0, 64, 5]
    assert np.isnan(second.parameters.norm[1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": None}, "schema: is missing; the file has step, names"),
        ({"schema": np.array("1")}, "schema: has dtype <U1, must be int64"),
        ({"step": np.array(2)}, r"step is 2, so its name should be step-00000002\.npz"),
        ({"names": np.array(NAMES[::-1])}, "names: not unique and sorted"),
        ({"names": np.array([NAMES[0]] * 3)}, "names: not unique and sorted"),
        ({"names": np.array(["a", "b"])}, r"sizes: has shape \(3,\), must have .* 2 rows"),
        ({"names": np.array([1, 2, 3])}, "names: has dtype int64, must be str"),
        ({"sizes": np.array([1.0, 2.0, 3.0])}, "sizes: has dtype float64, must be int64"),
        ({"sizes": np.array([4096, 64, -1])}, "sizes: a negative number"),
        (
            {"parameters_sketch": np.ones((3, 64), np.float32)},
            "parameters_sketch: has dtype float",
        ),
        (
            {"parameters_sketch": np.ones(3)},
            r"parameters_sketch: has shape \(3,\), must have 2",
        ),
        (
            {"parameters_sketch": np.ones((3, 0))},
            "parameters_sketch: has 0 projections, must be 64",
        ),
        (
            {"gradients_sketch": np.ones((3, 16))},
            "gradients_sketch: has 16 projections, must be 64",
        ),
        ({"gradients_norm": np.ones(2)}, r"gradients_norm: has shape \(2,\), must have .* 3 rows"),
        ({"gradients_norm": None}, "gradients_norm: is missing"),
        ({"gradients_zeros": np.array([0, 65, 0])}, "gradients_zeros: a count that is negative"),
        ({"gradients_not_finite": np.array([-1, 0, 0])}, "gradients_not_finite: a count that is"),
    ],
)
def test_a_sample_that_is_not_as_agreed_is_named(tmp_path, changes, words):
    with pytest.raises(EvidenceError, match=rf"step-00000001\.npz: {words}"):
        read_sample(save(tmp_path, **changes))


def test_a_newer_sample_is_refused(tmp_path):
    with pytest.raises(StoreError, match="schema 2"):
        read_sample(save(tmp_path, schema=np.array(2)))


class Trap:
    """Unpickling it would run code."""

    def __reduce__(self):
        return (pytest.fail, ("was unpickled",))


def test_objects_are_never_unpickled(tmp_path):
    path = tmp_path / "step-00000001.npz"
    np.savez(path, allow_pickle=True, **arrays(names=np.array([Trap()], dtype=object)))
    with pytest.raises(EvidenceError, match=r"names: cannot be read: Object arrays"):
        read_sample(path)


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", pickle.dumps([1]), b"\x93NUMPY\x01\x00", "step,loss\n1,2\n"]
)
def test_a_file_that_is_no_npz_is_named(tmp_path, content):
    with pytest.raises(EvidenceError, match=r"step-00000001\.npz: is not an npz file"):
        read_sample(file(tmp_path, "step-00000001.npz", content))


def test_a_cut_or_damaged_sample_is_named(tmp_path):
    path = save(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(EvidenceError, match=r"step-00000001\.npz: is not an npz file"):
        read_sample(path)
    at = content.index(b"\x93NUMPY") + 300
    path.write_bytes(content[:at] + bytes(200) + content[at + 200 :])
    with pytest.raises(EvidenceError, match=r"step-00000001\.npz: \w+: cannot be read: "):
        read_sample(path)


def peak_of(action):
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_small_file_takes_no_more_memory_than_its_length(tmp_path):
    path = tmp_path / "step-00000001.npz"
    np.savez_compressed(path, **arrays(gradients_norm=np.zeros(30_000_000)))
    assert path.stat().st_size < 1_000_000

    def read():
        with pytest.raises(EvidenceError, match=r"npz: \w+\.npy: is compressed, which converge's"):
            read_sample(path)

    assert peak_of(read) < 10_000_000


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_array_that_is_there_twice_is_refused(tmp_path):
    """A small file could name one array thousands of times, each of which would be read."""
    path = save(tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("names.npy", archive.read("names.npy"))
    with pytest.raises(EvidenceError, match=r"npz: names\.npy: occurs twice"):
        read_sample(path)


def test_arrays_that_nobody_asks_for_are_not_loaded(tmp_path):
    path = save(tmp_path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("unknown.npy", bytes(30_000_000))
        archive.writestr("no array.txt", b"none")
    assert peak_of(lambda: read_sample(path)) < 10_000_000


def with_header(folder, header):
    """A sample whose ``sizes`` is a header alone."""
    path = folder / "step-00000001.npz"
    whole = arrays()
    del whole["sizes"]
    np.savez(path, **whole)
    text = header.ljust(117) + b"\n"
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("sizes.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    return path


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (999999999999,), }",
        b"{'descr': '<U0', 'fortran_order': False, 'shape': (999999999999,), }",
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }",
        b"{'descr': '<i8', 'fortran_order': False, 'shape': 'many', }",
        b"{'descr': 'what', 'fortran_order': False, 'shape': (1,), }",
        b"{'descr': [('a', ",
        b"(" * 100,
        b'"""',
        b"\xff\x00",
        b"",
    ],
)
def test_a_header_that_is_damaged_or_lies_is_named(tmp_path, header):
    with pytest.raises(EvidenceError, match=r"step-00000001\.npz: sizes: cannot be read: "):
        read_sample(with_header(tmp_path, header))


def test_whatever_byte_is_damaged_ends_in_a_sample_or_in_our_error(tmp_path):
    path = save(tmp_path)
    whole = path.read_bytes()
    generator = np.random.default_rng(1)
    ends = [*range(len(whole) - 400, len(whole)), *range(400)]  # the directory, and headers
    for at in [*ends, *generator.integers(len(whole), size=300)]:
        damaged = bytearray(whole)
        damaged[at] ^= int(generator.integers(1, 256))
        path.write_bytes(damaged)
        with suppress(EvidenceError, StoreError):
            read_sample(path)
