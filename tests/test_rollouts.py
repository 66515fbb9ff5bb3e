"""The frozen rollouts of experiments/rl: whole, as the experiments name them, and what they say."""

import hashlib
import statistics
import sys
import tomllib
from itertools import groupby
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
FROZEN = EXPERIMENTS / "rl" / "rollouts.jsonl"


@pytest.fixture
def rollouts(monkeypatch):
    """experiments/rl/rollouts.py, which needs no torch."""
    monkeypatch.syspath_prepend(EXPERIMENTS / "rl")
    yield __import__("rollouts")
    sys.modules.pop("rollouts", None)


@pytest.fixture
def frozen(rollouts):
    return rollouts.load_rollouts(FROZEN, hashlib.sha256(FROZEN.read_bytes()).hexdigest())


def test_the_experiment_names_the_digest_of_the_file_that_is_there(rollouts):
    named = tomllib.loads((EXPERIMENTS / "rl.toml").read_text())["trainer"]["config"]["rollouts"]
    _, rows = rollouts.load_rollouts(EXPERIMENTS / named["file"], named["sha256"])
    assert len(rows) == 64


def test_a_file_with_one_other_byte_is_refused_with_both_digests(rollouts, tmp_path):
    digest = hashlib.sha256(FROZEN.read_bytes()).hexdigest()
    other = tmp_path / "rollouts.jsonl"
    other.write_bytes(FROZEN.read_bytes().replace(b"-1.76133192", b"-1.76133193", 1))
    with pytest.raises(ValueError, match=rf"has the digest \w+, and the experiment names {digest}"):
        rollouts.load_rollouts(other, digest)


def test_advantages_are_standardised_within_a_group(rollouts):
    found = rollouts.group_advantages([0.0, 1.0, 2.0, 3.0])  # mean 1.5, variance 5 / 3
    assert found == pytest.approx([-1.16180, -0.38727, 0.38727, 1.16180], abs=1e-4)
    assert rollouts.group_advantages([0.5] * 4) == [0.0] * 4


def test_frozen_advantages_are_those_of_the_frozen_rewards(rollouts, frozen):
    settings, rows = frozen
    for _, group in groupby(rows, key=lambda row: row.group):
        some = list(group)
        assert len(some) == settings["group_size"]
        assert len({tuple(row.prompt) for row in some}) == 1
        expected = rollouts.group_advantages([row.reward for row in some])
        assert [row.advantage for row in some] == pytest.approx(expected, abs=1e-6)
        for row in some:
            assert row.reward == pytest.approx(rollouts.share_of_even(row.response), abs=1e-8)


def test_lengths_are_so_ragged_that_a_mean_of_means_is_another_mean(frozen):
    _, rows = frozen
    lengths = [len(row.response) for row in rows]
    assert max(lengths) > 5 * statistics.median_low(lengths)
    for first in range(0, len(rows), 16):  # global batches, dealt to two ranks in turn
        batch = lengths[first : first + 16]
        assert sum(batch[0::2]) != sum(batch[1::2])


def test_every_response_token_has_log_probabilities_and_ends_with_eos_or_is_cut(rollouts, frozen):
    for row in frozen[1]:
        assert len(row.old) == len(row.ref) == len(row.response)
        assert all(value <= 0 for value in (*row.old, *row.ref))
        assert rollouts.EOS not in row.response[:-1]
        whole = len(row.prompt) + len(row.response)
        assert row.response[-1] == rollouts.EOS or whole == rollouts.LONGEST
