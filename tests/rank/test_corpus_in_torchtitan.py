"""torchtitan's own tokenizer class, of either release, reads a prepared corpus."""

import json

import numpy as np
import pytest

pytest.importorskip("torchtitan")

from converge_harness.corpus import prepare
from converge_harness.model import SyntheticData


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return prepare(SyntheticData(vocab_size=256, tokens=5_000), tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def tokenizer(corpus):
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(tokenizer_path=str(corpus.folder))


def test_special_tokens_are_recognised(corpus, tokenizer):
    described = json.loads((corpus.folder / "corpus.json").read_text())
    assert (tokenizer.bos_id, tokenizer.eos_id) == (described["bos_id"], described["eos_id"])
    assert tokenizer.get_vocab_size() == described["vocab_size"] == 256


def test_encoding_a_document_gives_the_stream_of_the_corpus(corpus, tokenizer):
    stream = np.load(corpus.folder / "tokens.npy")
    document = (corpus.folder / "sample.txt").read_text().splitlines()[0]
    encoded = tokenizer.encode(document, add_bos=True, add_eos=True)
    assert encoded == stream[: len(encoded)].tolist()
    assert tokenizer.decode(encoded[1:-1]) == document
    assert tokenizer.encode(document) == encoded
