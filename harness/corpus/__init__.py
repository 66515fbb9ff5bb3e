"""The project's own corpus: a synthetic language of known entropy, and its tokenizer.

``language`` holds the source and its likelihood, ``grammar`` the words and sentences of the
project's language, ``folder`` the tokenizer and the files that training reads.
"""

from converge_harness.corpus.folder import PreparedData, digest, prepare

__all__ = ["PreparedData", "digest", "prepare"]
