"""The arithmetic of experiments/rl: the objective, its means, and the scores of tokens."""

import hashlib
import importlib
import sys
from pathlib import Path

import pytest
import torch
from gloo_ranks import run_on_ranks

FOLDER = Path(__file__).parents[2] / "experiments" / "rl"
MODULES = ("rollouts", "policy", "objective", "mistakes", "score", "make_rollouts")


class Modules:
    """Those of the folder; their names are too general to stay imported."""

    def __init__(self):
        for name in MODULES:
            setattr(self, name, importlib.import_module(name))


@pytest.fixture(scope="module")
def rl():
    sys.path.insert(0, str(FOLDER))
    torch.set_num_threads(1)  # other tests fork this process
    yield Modules()
    sys.path.remove(str(FOLDER))
    for name in MODULES:
        sys.modules.pop(name)


@pytest.fixture(scope="module")
def frozen(rl):
    path = FOLDER / "rollouts.jsonl"
    return rl.rollouts.load_rollouts(path, hashlib.sha256(path.read_bytes()).hexdigest())


def step(rl, frozen, kind, size, *, normalize="token", pad="right", to="longest"):
    """The loss and all gradients of one update of 16 rollouts, in microbatches of ``size``."""
    settings, rollouts = frozen
    model = rl.policy.policy_of(settings["policy_seed"])
    objective = kind(normalize, settings, rollouts)
    parts = [rollouts[first : first + size] for first in range(0, 16, size)]
    batches = [rl.policy.batch_of(part, pad, to) for part in parts]
    objective.begin_step(batches)
    total = 0.0
    for batch in batches:
        logits = model(batch.tokens, objective.positions(batch), batch.allowed)
        found = rl.policy.log_probs(objective.scores(logits), objective.labels(batch))
        loss = objective.loss(objective.terms(found, batch), objective.weights(batch))
        loss.backward()
        total += loss.item()
    return total, torch.cat([each.grad.flatten() for each in model.parameters()])


def off(ours, theirs):
    """The relative difference of two gradients."""
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain"),
    [
        (1.1, 2.0, 2.2),
        (1.5, 2.0, 2.4),  # gains nothing beyond 1.2
        (0.5, 2.0, 1.0),  # a likelier token can still be gained back
        (0.5, -2.0, -1.6),  # gains nothing below 0.8
        (1.5, -2.0, -3.0),
    ],
)
def test_clipping_takes_the_smaller_gain(rl, ratio, advantage, gain):
    found = rl.objective.clipped(torch.tensor(ratio), torch.tensor(advantage))
    assert found.item() == pytest.approx(gain)


def test_k3_is_zero_for_the_same_policy_and_has_a_gradient_elsewhere(rl):
    found = torch.tensor([-1.0, -1.5], requires_grad=True)
    kl = rl.objective.k3(found, torch.tensor([-1.0, -1.0]))
    assert kl.tolist() == pytest.approx([0.0, 0.14872127])  # exp(0.5) - 0.5 - 1
    kl.sum().backward()
    assert found.grad.tolist() == pytest.approx([0.0, -0.64872127])  # 1 - exp(0.5)


def test_weights_are_a_mean_over_tokens_or_over_sequences(rl, frozen):
    settings, rollouts = frozen
    batch = rl.policy.batch_of(rollouts[:3])  # responses of 1 token and more
    lengths = [len(each.response) for each in rollouts[:3]]
    for normalize, shares in (
        ("token", [length / sum(lengths) for length in lengths]),
        ("sequence", [1 / 3] * 3),
    ):
        objective = rl.objective.Grpo(normalize, settings, rollouts)
        objective.begin_step([batch])
        weights = objective.weights(batch)
        assert weights.sum(1).tolist() == pytest.approx(shares)
        assert torch.equal(weights > 0, batch.labels >= 0)


@pytest.mark.parametrize("normalize", ["token", "sequence"])
def test_microbatches_and_padding_change_neither_loss_nor_gradients(rl, frozen, normalize):
    kind = rl.objective.Grpo
    loss, gradient = step(rl, frozen, kind, 16, normalize=normalize)
    for other in ({"size": 1}, {"size": 4, "pad": "left"}, {"size": 8, "to": "alike"}):
        found, theirs = step(rl, frozen, kind, normalize=normalize, **other)
        assert found == pytest.approx(loss, abs=1e-6)
        assert off(theirs, gradient) < 1e-5


def test_every_mistake_that_one_rank_can_make_changes_the_gradient(rl, frozen):
    needs = {"padded_length": {"normalize": "sequence"}, "no_positions": {"pad": "left"}}
    # On one rank, which has whole groups one after another, these are right.
    right_here = {"rank_mean", "not_times_ranks", "other_groups"}
    for name, kind in rl.mistakes.MISTAKES.items():
        options = needs.get(name, {})
        size = 4 if name == "microbatch_mean" else 8
        _, right = step(rl, frozen, rl.objective.Grpo, size, **options)
        _, wrong = step(rl, frozen, kind, size, **options)
        changed = off(wrong, right) > 1e-3  # rounding: 1e-5
        assert changed is (name not in right_here), name


@torch.no_grad()
def test_some_ratios_of_the_first_step_are_outside_of_the_clipping_range(rl, frozen):
    """docs/rl.md says how many: with none, a wrong clipping would show nothing."""
    settings, rollouts = frozen
    batch = rl.policy.batch_of(rollouts[:16])
    model = rl.policy.policy_of(settings["policy_seed"])
    scores = model(batch.tokens, batch.positions) / settings["temperature"]
    ratios = (rl.policy.log_probs(scores, batch.labels) - batch.old).exp()[batch.labels >= 0]
    outside = (ratios - 1).abs() > rl.objective.CLIP
    assert float(outside.float().mean()) == pytest.approx(0.08, abs=0.005)


def test_recorded_log_probabilities_are_those_of_the_policies_of_the_generator(rl, frozen):
    """Scored, not sampled again: on other hardware a token may fall otherwise."""
    made = rl.make_rollouts
    behind, reference = made.policies(torch.Generator().manual_seed(made.SEED))
    for kept in frozen[1]:
        assert made.scored(behind, kept) == pytest.approx(kept.old, abs=1e-5)
        assert made.scored(reference, kept) == pytest.approx(kept.ref, abs=1e-5)


@torch.no_grad()
def test_layouts_of_the_same_tokens_have_the_same_scores(rl, frozen):
    settings, rollouts = frozen
    model = rl.policy.policy_of(settings["policy_seed"])
    found = {
        name: torch.tensor([value for row in score() for value in row])
        for name, score in rl.score.layouts(model, settings, rollouts[:8]).items()
    }
    control = found.pop("control")
    assert len(control) == sum(len(each.response) for each in rollouts[:8])
    for name, scores in found.items():
        if name == "wrong_end_dropped":
            assert len(scores) == len(control) - 8
        else:
            alike = torch.allclose(scores, control, rtol=0, atol=1e-5)
            assert alike is not name.startswith("wrong_"), name


@torch.no_grad()
def test_a_policy_that_is_split_over_ranks_has_the_same_scores(rl, frozen):
    run_on_ranks(scored_in_parts, 2, rl, frozen)


def scored_in_parts(rl, frozen):
    settings, rollouts = frozen[0], frozen[1][:8]
    whole, parts = (rl.policy.policy_of(settings["policy_seed"]) for _ in range(2))
    objective = rl.objective.Grpo("token", settings, rollouts)
    with torch.no_grad():
        split = rl.score.split(parts)
        ours, theirs = (
            [
                value
                for row in rl.score.Scorer(model, rollouts, objective).in_batches(8)
                for value in row
            ]
            for model in (split, whole)
        )
    assert split.layers[0].attention.wq.weight.to_local().shape == (16, 32)
    assert ours == pytest.approx(theirs, abs=1e-5)
