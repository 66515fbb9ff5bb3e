"""What holds for all tests of rank code."""

import pytest
import torch

from converge_harness.rank.cpu import stay_forkable

stay_forkable()  # before a test computes on fake tensors, of which others then fork ranks


@pytest.fixture(autouse=True)
def _same_random_numbers_in_any_order():
    torch.manual_seed(0)
