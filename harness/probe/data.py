"""The samples of a corpus of converge, in the order in which torchtitan and Megatron-Core get them.

For a program whose control is another trainer's set: both have to train on the same batches
(docs/across_frameworks.md). Unlike the rest of the probe it needs no job, and imports torch when
it is imported.
"""

from converge_harness.rank.data_order import Corpus, Sample, SampleStream, open_corpus

__all__ = ["Corpus", "Sample", "SampleStream", "open_corpus"]
