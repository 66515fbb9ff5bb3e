"""Ranks that share a GPU, and triton kernels as torchao declares them, without a GPU."""

import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import version

import pytest

from converge_harness.rank.start.entry import take_own_gpu


@pytest.mark.parametrize(("rank", "gpu"), [("0", "2"), ("1", "3"), ("2", "2")])
def test_a_rank_sees_its_own_gpu_only(rank, gpu):
    environment = {
        "LOCAL_RANK": rank,
        "CUDA_VISIBLE_DEVICES": "2,3",
        "CONVERGE_GPU_OF_RANK": "2,3,2",
    }
    take_own_gpu(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == gpu
    assert environment["LOCAL_RANK"] == rank


def test_a_rank_with_a_gpu_of_its_own_keeps_what_it_was_given():
    environment = {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "2,3"}
    take_own_gpu(environment)
    assert environment == {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "2,3"}


def test_a_kernel_may_be_tuned_by_a_key_that_is_no_argument():
    import triton

    from converge_harness.rank.titan.v0_3 import patches

    def kernel(x_ptr, block):
        pass

    kernel = triton.jit(kernel)
    configs = [triton.Config({"block": 1})]
    newest = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
    with pytest.raises(ValueError, match="num_elements") if newest else nullcontext():
        triton.autotune(configs, key=["num_elements"])(kernel)
    before = triton.autotune
    with patches.unknown_autotune_keys_ignored():
        assert triton.autotune(configs, key=["x_ptr", "num_elements"])(kernel).keys == ["x_ptr"]
    assert triton.autotune is before


PRELOADED = """
import sys
import torch.utils._triton
torch.utils._triton.has_triton = lambda: True  # as where a GPU is
from converge_harness.rank.start import entry
entry.preload("titan_0_3", "cpu")
assert "torchao.prototype.moe_training.kernels.float8_rowwise" in sys.modules
"""


def test_torchtitan_is_imported_where_kernels_are_declared_for_a_gpu():
    if not version("torchtitan").startswith("0.3"):
        pytest.skip(f"needs torchtitan 0.3, found {version('torchtitan')}")
    command = [sys.executable, "-c", PRELOADED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
