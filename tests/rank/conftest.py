"""What holds for all tests of rank code."""

from converge_harness.rank.titan.common.cpu import stay_forkable

stay_forkable()  # before a test computes on fake tensors, of which others then fork ranks
