"""The batch fingerprint: blind to order and to the split over ranks, and to nothing else."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from converge_harness.rank.recorder.digest import BatchDigest, combine

samples = st.lists(st.lists(st.integers(0, 99), min_size=4, max_size=4), min_size=1, max_size=8)


def fingerprint(*ranks):
    """The digest of a global batch that these ranks read in parts."""
    parts = []
    for rows in ranks:
        part = BatchDigest()
        if rows:
            inputs = torch.tensor(rows)
            part.add(inputs, inputs + 1)
        parts.append((*part.halves, part.samples))
    return combine(parts)


@given(rows=samples, data=st.data())
def test_order_does_not_matter(rows, data):
    assert fingerprint(rows) == fingerprint(data.draw(st.permutations(rows)))


@given(rows=samples, cut=st.integers(0, 8))
def test_the_split_over_ranks_does_not_matter(rows, cut):
    assert fingerprint(rows) == fingerprint(rows[:cut], rows[cut:])


@given(rows=samples)
def test_a_repeated_sample_shows(rows):
    """Two ranks that read the same samples: an XOR of the hashes would not see it."""
    assert fingerprint(rows) != fingerprint(rows, rows)
    assert fingerprint(rows, rows) != fingerprint([*rows, *rows, *rows, *rows])


@given(rows=samples, token=st.integers(0, 3))
def test_one_changed_token_shows(rows, token):
    changed = [list(row) for row in rows]
    changed[0][token] += 1
    assert fingerprint(rows) != fingerprint(changed)


def test_a_changed_label_shows():
    inputs, labels = torch.ones(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)
    one, other = BatchDigest(), BatchDigest()
    one.add(inputs, labels)
    labels[1, 3] = -100
    other.add(inputs, labels)
    assert one.total != other.total


def test_the_integer_type_of_a_batch_does_not_matter():
    rows = torch.arange(8).view(2, 4)
    one, other = BatchDigest(), BatchDigest()
    one.add(rows, rows)
    other.add(rows.int(), rows.int())
    assert one == other


def test_a_digest_has_16_hex_digits_and_is_pinned():
    """Runs of different days and toolchains are compared by it."""
    assert fingerprint([[1, 2, 3, 4], [5, 6, 7, 8]]) == "cfb9091e7acc1cdb"
