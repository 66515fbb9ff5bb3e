"""A corpus on disk: generated once, then found by its digest.

The folder ``<root>/<digest>/`` holds::

    corpus.json             what it is: sizes, special tokens, entropy, hashes of its content
    tokens.npy              the whole corpus as one int32 array: bos text eos bos text eos ...
    tokenizer.json          the tokenizer, for ``tokenizers`` and torchtitan
    tokenizer_config.json   which of its tokens are bos and eos
    sample.txt              the first documents, one per line, for people
    text/documents.jsonl    every document, one {"text": ...} per line, for loaders that tokenize

The tokenizer is a byte-pair encoding, trained on the corpus' own language.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from converge_harness.corpus.grammar import language
from converge_harness.corpus.language import Language
from converge_harness.errors import ConfigError, Problem, StoreError
from converge_harness.model import SyntheticData
from converge_harness.run_folder.corpus import (
    FACTS,
    SCHEMA,
    TOKENS,
    CorpusDocument,
    documents_of,
    read_corpus,
)

GENERATOR = 1
"""Version of everything that determines a corpus' bytes; a test pins these."""
SMALLEST_VOCABULARY = 64
TRAINING_CHARACTERS = 500
"""Characters of training text for the tokenizer, per entry of its vocabulary."""
SAMPLE_DOCUMENTS = 20


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A corpus that is ready in a folder."""

    folder: Path
    digest: str
    entropy_nats_per_token: float
    """The lowest expected mean loss of any model on this corpus without having seen it.

    It is the sum of the exact -log p(document) under the source, divided by the number of
    predicted tokens: every token of a document after its bos, its eos included. A bos is never
    predicted. Training for more than one epoch can get below it by memorising.
    """
    tokens: int
    """Length of ``tokens.npy``, special tokens included."""
    documents: int


def digest(data: SyntheticData) -> str:
    """Name of the corpus with these values, 64 hex digits; does not make it."""
    values = {"generator": GENERATOR, **asdict(data)}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def prepare(data: SyntheticData, root: Path) -> PreparedData:
    """Return the corpus below ``root``; make it if it is not there.

    Several processes may do this at once: each makes its own folder, the first to finish renames it
    into place, and the others use that one.

    Raises:
        ConfigError: a value of ``data`` is too small or too large for a corpus.
        StoreError: the folder cannot be written, or an earlier one cannot be read.
    """
    _validate(data)
    folder = root / digest(data)
    try:
        if not folder.is_dir():
            _make(data, folder)
        prepared = _read(folder)
        if not documents_of(folder).is_file():
            _write_documents(folder, _texts_of(folder))
    except OSError as error:
        raise StoreError(
            f"cannot write the corpus to {folder}: {error}; give a --store that can be written"
        ) from error
    return prepared


def _make(data: SyntheticData, folder: Path) -> None:
    unfinished = folder.parent / f".{folder.name[:12]}-{uuid.uuid4().hex}"
    try:
        unfinished.mkdir(parents=True)
        _write(data, unfinished)
        unfinished.rename(folder)
    except OSError:
        # The rename fails if another process was first; its folder has the same content.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _validate(data: SyntheticData) -> None:
    problems = [
        Problem(f"converge.data.{key}", f"{value} is too small", f"the least is {least}")
        for key, value, least in (
            ("seed", data.seed, 0),
            ("vocab_size", data.vocab_size, SMALLEST_VOCABULARY),
            ("tokens", data.tokens, 1),
        )
        if value < least
    ]
    if problems:
        raise ConfigError(problems)


def _read(folder: Path) -> PreparedData:
    remedy = f"remove {folder} and run again"
    try:
        corpus = read_corpus(folder)
    except OSError as error:
        why = error.strerror or error
        raise StoreError(f"{folder / FACTS}: cannot be read: {why}; {remedy}") from error
    except ValueError as error:
        raise StoreError(f"{error}; {remedy}") from error
    return PreparedData(
        folder=folder,
        digest=folder.name,
        entropy_nats_per_token=corpus["entropy_nats_per_token"],
        tokens=corpus["tokens"],
        documents=corpus["documents"],
    )


# ------------------------------------------------------------------- making


def _write(data: SyntheticData, folder: Path) -> None:
    source = language(data.seed, data.vocab_size)
    # The lexicon already drew from Random(seed): documents need their own random stream.
    spoken = source.documents(Random(2**32 + data.seed))
    sample = list(_take_characters(spoken, TRAINING_CHARACTERS * data.vocab_size))
    tokenizer = train(sample, data.vocab_size)
    if tokenizer.get_vocab_size() != data.vocab_size:
        raise ConfigError(
            Problem(
                "converge.data.vocab_size",
                f"{data.vocab_size} is more than the language has pieces for",
                f"the most with this seed is {tokenizer.get_vocab_size()}",
            )
        )
    documents: list[str] = []
    stream: list[int] = []
    for document in chain(sample, spoken):
        documents.append(document)
        stream += [BOS_ID, *tokenizer.encode(document).ids, EOS_ID]
        if len(stream) >= data.tokens:
            break
    tokens = np.array(stream, dtype="<i4")
    corpus: CorpusDocument = {
        "schema": SCHEMA,
        "generator": GENERATOR,
        "seed": data.seed,
        "vocab_size": data.vocab_size,
        "bos_id": BOS_ID,
        "eos_id": EOS_ID,
        "tokens": len(stream),
        "documents": len(documents),
        "predicted_tokens": len(stream) - len(documents),
        "entropy_nats_per_token": _entropy(source, documents, len(stream)),
        "tokens_sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
        "text_sha256": hashlib.sha256("\n".join(documents).encode()).hexdigest(),
    }
    # Not tokenizer.save() or np.save() to a path: they hide a full disk.
    array = io.BytesIO()
    np.save(array, tokens)
    (folder / TOKENS).write_bytes(array.getbuffer())
    for name, text in {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": hugging_face_config(),
        "sample.txt": "\n".join(documents[:SAMPLE_DOCUMENTS]) + "\n",
        FACTS: json.dumps(corpus, indent=2) + "\n",
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
    _write_documents(folder, documents)


def _write_documents(folder: Path, documents: list[str]) -> None:
    """Several processes may do this at once: each writes its own file and renames it."""
    path = documents_of(folder)
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_name(f".{uuid.uuid4().hex}")
    lines = [json.dumps({"text": document}) + "\n" for document in documents]
    try:
        unfinished.write_text("".join(lines), encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _texts_of(folder: Path) -> list[str]:
    """The documents of a corpus of an older version that did not store them, from its tokens.

    Raises:
        StoreError: the tokens are not those of the corpus.
    """
    corpus = read_corpus(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stream = np.load(folder / TOKENS)
    starts = np.flatnonzero(stream == BOS_ID)
    documents = [
        tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        for ids in np.split(stream, starts[1:])
    ]
    if hashlib.sha256("\n".join(documents).encode()).hexdigest() != corpus["text_sha256"]:
        raise StoreError(
            f"{folder} does not hold the corpus that it was made with; "
            f"remove {folder} and run again"
        )
    return documents


def _take_characters(documents: Iterator[str], characters: int) -> Iterator[str]:
    for document in documents:
        yield document
        characters -= len(document)
        if characters <= 0:
            return


def _entropy(source: Language, documents: list[str], tokens: int) -> float:
    """Nats per predicted token, rounded to hide differences in libm's last bits."""
    nats = -math.fsum(source.log_probability(document) for document in documents)
    return round(nats / (tokens - len(documents)), 9)


BOS, EOS = "<bos>", "<eos>"
BOS_ID, EOS_ID = 0, 1


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE, which can encode any text in the letters of the training texts.

    Its vocabulary has ``vocab_size`` entries, special tokens included, or fewer if the texts have
    too few different words.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[BOS, EOS], show_progress=False),
    )
    return tokenizer


def hugging_face_config() -> str:
    """``tokenizer_config.json``: tells torchtitan (0.2 and 0.3) and transformers bos from eos."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
        "add_eos_token": True,
        "clean_up_tokenization_spaces": False,
    }
    return json.dumps(config, indent=2) + "\n"
