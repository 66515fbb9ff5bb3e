"""A byte-pair tokenizer, trained on the language it is for."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS = "<bos>", "<eos>"
BOS_ID, EOS_ID = 0, 1


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE; decoding gives back every text made of the training texts' letters.

    Its vocabulary has ``vocab_size`` entries, special tokens included, or fewer when the texts
    hold too few different words.
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
