"""The data order: what is read depends on seed, step and position, never on the dp degree."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converge_harness.rank.data_order import (
    Corpus,
    SampleStream,
    open_corpus,
    place_in_batch,
    place_in_order,
    positions,
)
from converge_harness.run_folder.corpus import SHAPES

SEQ_LEN = 8
BOS = 0


def make_corpus(samples=50, seed=3):
    tokens = np.random.default_rng(seed).integers(2, 30, size=samples * SEQ_LEN + 1)
    tokens[::11] = BOS
    return Corpus(tokens.astype(np.int32), bos_id=BOS, vocab_size=30)


def stream(corpus, *, dp_rank=0, dp_degree=1, batch_size=None, **changes):
    batch_size = batch_size or 8 // dp_degree
    values = {"seq_len": SEQ_LEN, "seed": 42, "global_batch_size": 8, **changes}
    return SampleStream(
        corpus, batch_size=batch_size, dp_rank=dp_rank, dp_degree=dp_degree, **values
    )


def global_batch(corpus, step, dp_degree, batch_size, **changes):
    """All samples of a step (counted from 0) in the order of the ranks."""
    rows = []
    for dp_rank in range(dp_degree):
        place = {"dp_rank": dp_rank, "dp_degree": dp_degree, "batch_size": batch_size}
        batches = iter(stream(corpus, **place, **changes))
        per_step = 8 // dp_degree // batch_size
        for number, batch in zip(range((step + 1) * per_step), batches, strict=False):
            if number >= step * per_step:
                rows.append(batch.inputs)
    return torch.cat(rows)


every_split = pytest.mark.parametrize(
    ("dp_degree", "batch_size"), [(1, 4), (1, 1), (2, 4), (2, 2), (4, 1), (8, 1)]
)


@every_split
@pytest.mark.parametrize("step", [0, 3, 7])
def test_a_global_batch_is_the_same_for_every_dp_degree_and_batch_size(step, dp_degree, batch_size):
    corpus = make_corpus()
    expected = global_batch(corpus, step, dp_degree=1, batch_size=8)
    assert torch.equal(global_batch(corpus, step, dp_degree, batch_size), expected)


@every_split
def test_a_permuted_global_batch_has_the_same_samples_in_an_order_of_its_step(
    dp_degree, batch_size
):
    corpus = make_corpus()
    orders = []
    for step in (0, 1, 6):
        control = global_batch(corpus, step, dp_degree=1, batch_size=8).tolist()
        permuted = global_batch(corpus, step, dp_degree, batch_size, order_seed=1).tolist()
        whole = global_batch(corpus, step, dp_degree=1, batch_size=8, order_seed=1).tolist()
        assert permuted == whole != control
        assert sorted(permuted) == sorted(control)
        orders.append([control.index(sample) for sample in permuted])
    assert orders[0] != orders[1] != orders[2]


def test_another_order_seed_or_seed_permutes_otherwise():
    orders = {
        tuple(place_in_batch(place, 32, step, seed, order_seed) for place in range(32))
        for step in range(5)
        for seed in range(5)
        for order_seed in range(5)
    }
    assert len(orders) == 125
    assert all(sorted(order) == list(range(32)) for order in orders)


def test_a_permuted_run_resumes_in_its_order():
    corpus = make_corpus()
    place = {"dp_degree": 2, "dp_rank": 1, "batch_size": 2, "order_seed": 3}
    taken = [
        batch.inputs for batch, _ in zip(iter(stream(corpus, **place)), range(8), strict=False)
    ]
    resumed = iter(stream(corpus, **place, consumed=16))
    assert all(torch.equal(next(resumed).inputs, inputs) for inputs in taken[4:])


def test_another_seed_gives_another_order():
    corpus = make_corpus()
    first = next(iter(stream(corpus)))
    assert not torch.equal(first.inputs, next(iter(stream(corpus, seed=43))).inputs)


@given(count=st.integers(1, 300), seed=st.integers(0, 2**31), epoch=st.integers(0, 5))
def test_an_epoch_is_a_permutation(count, seed, epoch):
    order = [place_in_order(epoch * count + i, count, seed) for i in range(count)]
    assert sorted(order) == list(range(count))


def test_epochs_differ_and_the_order_is_pinned():
    first = [place_in_order(i, 20, 42) for i in range(20)]
    second = [place_in_order(20 + i, 20, 42) for i in range(20)]
    assert first != second
    # Cached runs and both toolchains rely on these very numbers.
    assert first[:6] == [2, 1, 0, 18, 13, 19]


def test_state_is_the_samples_consumed_and_resumes():
    corpus = make_corpus()
    whole = iter(stream(corpus, dp_degree=2, dp_rank=1, batch_size=2))
    taken = [next(whole) for _ in range(6)]  # three steps of two batches
    interrupted = stream(corpus, dp_degree=2, dp_rank=1, batch_size=2)
    batches = iter(interrupted)
    for _ in range(4):
        next(batches)
    assert interrupted.consumed == 16
    resumed = stream(corpus, dp_degree=2, dp_rank=1, batch_size=2, consumed=16)
    assert torch.equal(next(iter(resumed)).inputs, taken[4].inputs)


def test_state_does_not_depend_on_the_rank():
    corpus = make_corpus()
    streams = [stream(corpus, dp_degree=4, dp_rank=rank) for rank in range(4)]
    for one in streams:
        next(iter(one))
    assert {one.consumed for one in streams} == {8}


def test_labels_are_next_tokens_and_ignore_the_next_documents_bos():
    corpus = Corpus(np.array([0, 5, 6, 1, 0, 7, 8, 9, 1], dtype=np.int32), BOS, 30)
    sample = corpus.sample(0, SEQ_LEN)
    assert sample.inputs.tolist() == [0, 5, 6, 1, 0, 7, 8, 9]
    assert sample.labels.tolist() == [5, 6, 1, -100, 7, 8, 9, 1]
    assert sample.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert sample.inputs.dtype == sample.labels.dtype == torch.int64


def test_positions_of_a_sample_that_begins_inside_a_document_begin_at_zero():
    assert positions(np.array([4, 5, 0, 6, 7]), bos_id=0).tolist() == [0, 1, 0, 1, 2]


def test_valid_targets_are_uneven_over_samples():
    corpus = make_corpus()
    valid = {int((corpus.sample(i, SEQ_LEN).labels >= 0).sum()) for i in range(20)}
    assert len(valid) > 1


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="global batch of 8"):
        stream(make_corpus(), dp_degree=3, batch_size=2)


def test_a_corpus_too_small_for_one_sample_is_refused():
    with pytest.raises(ValueError, match="too few"):
        stream(Corpus(np.zeros(SEQ_LEN, dtype=np.int32), BOS, 30))


def test_open_corpus_reads_a_folder_and_refuses_another_schema(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(100, dtype=np.int32))
    facts = dict.fromkeys(SHAPES, 1) | {"bos_id": 3, "eos_id": 4, "vocab_size": 100, "schema": 1}
    facts |= {"tokens_sha256": "", "text_sha256": ""}
    (tmp_path / "corpus.json").write_text(json.dumps(facts))
    corpus = open_corpus(tmp_path)
    assert (corpus.bos_id, corpus.vocab_size, corpus.count(9)) == (3, 100, 11)
    (tmp_path / "corpus.json").write_text(json.dumps({**facts, "schema": 2}))
    with pytest.raises(ValueError, match=r"corpus\.json: schema is 2"):
        open_corpus(tmp_path)
    (tmp_path / "corpus.json").write_text(json.dumps({**facts, "bos_id": "3"}))
    with pytest.raises(ValueError, match="bos_id is '3', which is not a count"):
        open_corpus(tmp_path)
