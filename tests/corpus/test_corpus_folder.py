import hashlib
import json
import math
import multiprocessing
import os
import shutil
import timeit
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from converge_harness.corpus import digest, prepare
from converge_harness.corpus import folder as preparation
from converge_harness.corpus.grammar import language
from converge_harness.errors import ConfigError, StoreError
from converge_harness.model import SyntheticData

DEFAULT = SyntheticData()
SMALL = SyntheticData(seed=5, vocab_size=256, tokens=20_000)


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    return prepare(DEFAULT, tmp_path_factory.mktemp("default"))


def described(prepared):
    return json.loads((prepared.folder / "corpus.json").read_text())


def tokens_of(prepared):
    return np.load(prepared.folder / "tokens.npy")


def texts_of(prepared):
    """The corpus's documents, decoded from the token stream."""
    tokenizer = Tokenizer.from_file(str(prepared.folder / "tokenizer.json"))
    corpus, stream = described(prepared), tokens_of(prepared).tolist()
    documents, start = [], 0
    while start < len(stream):
        assert stream[start] == corpus["bos_id"]
        end = stream.index(corpus["eos_id"], start)
        documents.append(tokenizer.decode(stream[start + 1 : end]))
        start = end + 1
    return documents


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def written_documents(prepared):
    lines = (prepared.folder / "text" / "documents.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


# ------------------------------------------------------------------ identity


def test_the_default_corpus_has_the_bytes_it_always_had(default):
    """When this fails, the generator makes other bytes: raise GENERATOR, then pin anew."""
    assert default.digest == "6c6690c9cb3ee84e05ddaaeaea4160c3f118f2cd79d473d3f02667fb2be32a4d"
    corpus = described(default)
    assert {key: corpus[key] for key in ("schema", "generator", "seed", "vocab_size")} == {
        "schema": 1,
        "generator": 1,
        "seed": 1,
        "vocab_size": 512,
    }
    assert (corpus["bos_id"], corpus["eos_id"]) == (0, 1)
    assert (default.tokens, default.documents) == (400_001, 3_291)
    assert default.entropy_nats_per_token == 2.218264147
    assert corpus["tokens_sha256"] == (
        "0067fa3a0463914cc8ee20c0fc88848185a3a65c865efd3f1a8ea4dfe233ff1a"
    )
    assert corpus["text_sha256"] == (
        "8c42af5f2f81fd337210f3a58554af71396a64f473858fd2508138690a24015f"
    )


def test_the_same_values_make_the_same_files(tmp_path):
    first, second = (prepare(SMALL, tmp_path / name) for name in "ab")
    names = files_of(first.folder)
    assert "text/documents.jsonl" in names
    assert names == files_of(second.folder)
    for name in names:
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()


def test_another_seed_makes_another_corpus(tmp_path):
    first, second = (prepare(replace(SMALL, seed=seed), tmp_path) for seed in (5, 6))
    assert first.digest != second.digest
    assert described(first)["text_sha256"] != described(second)["text_sha256"]


def test_more_tokens_only_lengthen_the_corpus(tmp_path):
    short = tokens_of(prepare(SMALL, tmp_path))
    long = tokens_of(prepare(replace(SMALL, tokens=30_000), tmp_path))
    assert np.array_equal(long[: len(short)], short)


@pytest.mark.parametrize("change", [{"seed": 2}, {"vocab_size": 513}, {"tokens": 400_001}])
def test_every_value_changes_the_digest(change):
    assert digest(replace(DEFAULT, **change)) != digest(DEFAULT)


def test_the_generators_version_changes_the_digest(monkeypatch):
    before = digest(DEFAULT)
    monkeypatch.setattr("converge_harness.corpus.folder.GENERATOR", 99)
    assert digest(DEFAULT) != before


# ------------------------------------------------------------------- content


def test_hashes_tell_the_content(default):
    corpus, stream = described(default), tokens_of(default)
    assert stream.dtype == np.int32
    assert hashlib.sha256(stream.astype("<i4").tobytes()).hexdigest() == corpus["tokens_sha256"]
    text = "\n".join(texts_of(default)).encode()
    # The text's hash was taken before tokenization: equal hashes mean nothing was lost.
    assert hashlib.sha256(text).hexdigest() == corpus["text_sha256"]


def test_tokenization_is_canonical(default):
    """A text has one token sequence, so the entropy of texts is the entropy of tokens."""
    tokenizer = Tokenizer.from_file(str(default.folder / "tokenizer.json"))
    documents = texts_of(default)
    again = [0, *tokenizer.encode(documents[0]).ids, 1]
    assert tokens_of(default)[: len(again)].tolist() == again


def test_entropy_is_the_mean_code_length_of_what_is_predicted(default):
    source = language(DEFAULT.seed, DEFAULT.vocab_size)
    documents = texts_of(default)
    nats = -math.fsum(map(source.log_probability, documents))
    stream = tokens_of(default)
    targets = np.count_nonzero(stream != described(default)["bos_id"])
    assert targets == described(default)["predicted_tokens"]
    assert default.entropy_nats_per_token == pytest.approx(nats / targets, abs=1e-8)


def code_length(stream, bos, order):
    """Nats per predicted token of the best model of that order, fitted on the stream itself."""
    contexts = [tuple(stream[i - order : i]) for i in range(order, len(stream))]
    targets = stream[order:]
    pairs = Counter(zip(contexts, targets, strict=True))
    alone = Counter(contexts)
    nats = [
        math.log(alone[context] / pairs[context, target])
        for context, target in zip(contexts, targets, strict=True)
        if target != bos
    ]
    return math.fsum(nats) / len(nats)


def test_no_short_memory_reaches_the_floor(default):
    stream = tokens_of(default).tolist()
    unigram, bigram = (code_length(stream, 0, order) for order in (0, 1))
    floor = default.entropy_nats_per_token
    assert floor < bigram < unigram < math.log(DEFAULT.vocab_size)
    assert bigram - floor > 0.3  # there is something left for attention to learn


def test_the_vocabulary_is_as_large_as_asked_and_used(default):
    tokenizer = Tokenizer.from_file(str(default.folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    stream = tokens_of(default)
    assert stream.min() == 0
    assert stream.max() == 511
    assert len(np.unique(stream)) > 450  # the rest are steps towards longer pieces


def test_documents_are_very_uneven(default):
    stream = tokens_of(default)
    lengths = np.diff(np.append(np.flatnonzero(stream == 0), len(stream)))
    assert len(lengths) == default.documents
    shortest, median, longest = np.percentile(lengths, [1, 50, 99])
    assert shortest < median / 8
    assert longest > median * 8
    assert lengths.max() > 1024  # longer than any sequence of the debug configs


def test_people_can_read_a_sample(default):
    lines = (default.folder / "sample.txt").read_text().splitlines()
    assert lines == texts_of(default)[: len(lines)]
    assert len(lines) == 20


def test_the_documents_lie_beside_their_tokens(default):
    documents = written_documents(default)
    assert len(documents) == default.documents
    text = "\n".join(documents).encode()
    assert hashlib.sha256(text).hexdigest() == described(default)["text_sha256"]


@pytest.mark.parametrize("vocab_size", [64, 2048])
def test_other_vocabularies(vocab_size, tmp_path):
    prepared = prepare(SyntheticData(vocab_size=vocab_size, tokens=5_000), tmp_path)
    tokenizer = Tokenizer.from_file(str(prepared.folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocab_size
    text = "\n".join(texts_of(prepared)).encode()
    assert hashlib.sha256(text).hexdigest() == described(prepared)["text_sha256"]


# -------------------------------------------------------------------- folder


def test_a_corpus_is_made_once(tmp_path, monkeypatch):
    first = prepare(SMALL, tmp_path)
    monkeypatch.setattr("converge_harness.corpus.folder._write", None)
    assert prepare(SMALL, tmp_path) == first
    # Measured: 0.2 ms. The best of many, because a loaded machine may stop any one of them.
    assert min(timeit.repeat(lambda: prepare(SMALL, tmp_path), number=1, repeat=20)) < 0.005


def test_a_folder_of_before_the_documents_is_completed(tmp_path):
    prepared = prepare(SMALL, tmp_path)
    written = (prepared.folder / "text" / "documents.jsonl").read_bytes()
    shutil.rmtree(prepared.folder / "text")
    assert prepare(SMALL, tmp_path) == prepared
    assert (prepared.folder / "text" / "documents.jsonl").read_bytes() == written
    assert files_of(prepared.folder) == files_of(prepare(SMALL, tmp_path / "new").folder)


def test_documents_are_not_taken_from_other_tokens(tmp_path):
    folder = prepare(SMALL, tmp_path).folder
    shutil.rmtree(folder / "text")
    tokens = np.load(folder / "tokens.npy")
    np.save(folder / "tokens.npy", tokens[::-1].copy())
    with pytest.raises(StoreError, match=f"remove {folder} and run again"):
        prepare(SMALL, tmp_path)
    assert not (folder / "text").exists()


def test_two_processes_at_once_agree(tmp_path):
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        results = pool.starmap(prepare, [(SMALL, tmp_path)] * 4, chunksize=1)
    assert results == [results[0]] * 4
    assert [path.name for path in tmp_path.iterdir()] == [results[0].digest]


def test_the_loser_of_a_race_takes_the_winners_folder(tmp_path, monkeypatch):
    write = preparation._write

    def overtaken(data, folder):
        write(data, folder)
        monkeypatch.setattr("converge_harness.corpus.folder._write", write)
        prepare(data, tmp_path)

    monkeypatch.setattr("converge_harness.corpus.folder._write", overtaken)
    prepared = prepare(SMALL, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [prepared.digest]


def test_a_failed_attempt_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(data, folder):
        (folder / "tokens.npy").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("converge_harness.corpus.folder._write", full_disk)
    with pytest.raises(StoreError, match="No space left"):
        prepare(SMALL, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_a_file_is_a_store_error(tmp_path):
    (tmp_path / "root").write_text("")
    with pytest.raises(StoreError, match="cannot write the corpus"):
        prepare(SMALL, tmp_path / "root")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_root_is_a_store_error(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(StoreError, match="cannot write the corpus"):
        prepare(SMALL, tmp_path / "root")


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"[]", b"{}", b'{"schema": 2}'])
def test_a_damaged_folder_is_named_with_its_remedy(content, tmp_path):
    folder = tmp_path / digest(SMALL)
    folder.mkdir()
    if content is not None:
        (folder / "corpus.json").write_bytes(content)
    with pytest.raises(StoreError, match=f"remove {folder} and run again"):
        prepare(SMALL, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": -1}, r"converge\.data\.seed: -1 is too small \(the least is 0\)"),
        ({"vocab_size": 63}, r"vocab_size: 63 is too small \(the least is 64\)"),
        ({"tokens": 0}, r"tokens: 0 is too small"),
    ],
)
def test_values_that_make_no_corpus_are_refused(change, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        prepare(replace(SMALL, **change), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_without_enough_pieces_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("converge_harness.corpus.folder.TRAINING_CHARACTERS", 1)
    with pytest.raises(ConfigError, match="more than the language has pieces for"):
        prepare(replace(SMALL, vocab_size=4096), tmp_path)
    assert list(tmp_path.iterdir()) == []
