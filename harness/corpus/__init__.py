"""The project's own corpus: a synthetic language of known entropy, and its tokenizer.

``chance`` holds exact integer probabilities, ``language`` the source and its likelihood,
``grammar`` the words and sentences of the project's language, ``tokenizer`` the BPE vocabulary,
``prepare`` the folder that training reads.
"""

from harness.corpus.prepare import PreparedData, digest, prepare

__all__ = ["PreparedData", "digest", "prepare"]
