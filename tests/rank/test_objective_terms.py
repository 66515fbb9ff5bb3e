"""What an objective is made of: sums that no layout changes, and that a wrong term does."""

import math

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from probed_loop import LENGTH, STEPS, VOCABULARY, lines_of, microbatches, write_job
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from converge_harness.probe import Probe, ProbeError
from converge_harness.rank.recorder.objective_terms import TermSums, terms_of

LENGTHS = (1, 2, 5, 3)
IGNORED = -100


def a_batch(pad="right", rows=range(4)):
    """Weights of a mean over all tokens, labels, gains and advantages of four samples."""
    longest = max(LENGTHS[row] for row in rows) + 2

    def padded(values, filling):
        gap = [filling] * (longest - len(values))
        return values + gap if pad == "right" else gap + values

    def stacked(make, filling):
        return torch.tensor([padded(make(row), filling) for row in rows])

    return (
        stacked(lambda row: [1 / sum(LENGTHS)] * LENGTHS[row], 0.0),
        stacked(lambda row: [(7 * row + place) % 11 for place in range(LENGTHS[row])], IGNORED),
        {
            "advantages": torch.tensor([0.5 * row - 1 for row in rows]),
            "gain": stacked(lambda row: [row + 0.1 * place for place in range(LENGTHS[row])], 9.0),
        },
    )


def shown(*batches):
    sums = TermSums()
    for batch in batches:
        sums.add(*batch)
    return sums.take()


def test_neither_microbatches_nor_padding_nor_ranks_change_anything():
    whole = terms_of([shown(a_batch())])
    assert whole["tokens"] == whole["targets"] == sum(LENGTHS)
    assert (whole["samples"], whole["microbatches"]) == (4, 1)
    assert whole["weight"] == pytest.approx(1)
    assert whole["uneven"] == dict.fromkeys(("step", "rank", "microbatch", "sample"), 0.0)
    gain = whole["sums"]["gain"]
    values = [row + 0.1 * place for row in range(4) for place in range(LENGTHS[row])]
    assert gain["total"] == pytest.approx(sum(values))
    assert gain["squares"] == pytest.approx(sum(value**2 for value in values))
    assert list(whole["sums"]) == ["advantages", "gain"]
    parts = [a_batch("left", rows) for rows in ((3, 0), (1, 2))]
    twice = [(2 * weights, *more) for weights, *more in parts]  # ranks average their gradients
    for other in (
        terms_of([shown(a_batch("left"))]),
        terms_of([shown(*parts)]),
        terms_of([shown(each) for each in twice]),
    ):
        assert other["tokens"] == whole["tokens"]
        assert other["weight"] == pytest.approx(whole["weight"])
        for name, term in other["sums"].items():
            assert term == pytest.approx(whole["sums"][name])


def test_values_on_other_tokens_differ_in_the_mixed_sum_alone():
    weights, labels, terms = a_batch()
    right = terms_of([shown((weights, labels, terms))])["sums"]["gain"]
    swapped = terms["gain"].clone()
    swapped[2, :2] = swapped[2, :2].flip(0)
    wrong = terms_of([shown((weights, labels, {"gain": swapped}))])["sums"]["gain"]
    assert wrong["total"] == pytest.approx(right["total"])
    assert wrong["squares"] == pytest.approx(right["squares"])
    assert abs(wrong["mixed"] - right["mixed"]) > 1e-2


def test_a_mean_of_means_is_uneven_beyond_its_parts():
    counts = a_batch()[0] != 0
    own = counts / counts.sum(1, keepdim=True)
    samples = terms_of([shown((own, *a_batch()[1:]))])["uneven"]
    assert samples["sample"] == 0
    assert samples["step"] == samples["rank"] == samples["microbatch"] == pytest.approx(4 / 5)
    two = [a_batch(rows=rows) for rows in ((0, 1), (2, 3))]
    means = [((each[0] != 0) / (each[0] != 0).sum() / 2, *each[1:]) for each in two]
    microbatches_alone = terms_of([shown(*means)])["uneven"]
    assert microbatches_alone["microbatch"] == microbatches_alone["sample"] == 0
    assert microbatches_alone["rank"] == microbatches_alone["step"] == pytest.approx(5 / 8)
    ranks = terms_of([shown(each) for each in means])["uneven"]
    assert ranks["rank"] == 0
    assert ranks["step"] == pytest.approx(5 / 8)


def test_a_step_without_any_tokens_has_sums_and_one_without_terms_has_none():
    weights, labels, terms = a_batch()
    none = terms_of([shown((weights * 0, labels, terms))])
    assert (none["tokens"], none["targets"], none["weight"]) == (0, sum(LENGTHS), 0)
    assert none["uneven"]["step"] == 0
    assert terms_of([None, None]) is None
    assert shown() is None


def train(job, monkeypatch, *, wrap=lambda model: model, change=lambda given: given):
    monkeypatch.setattr("converge_harness.probe.loop._probed", set())
    monkeypatch.setenv("CONVERGE_JOB", str(job))
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = Probe.from_env(model, optimizer)
    for step in range(1, STEPS + 1):
        parts = microbatches(step, ranks=ranks, rank=rank)
        counts = [(labels != IGNORED).float() for _, labels in parts]
        for (inputs, labels), counted in zip(parts, counts, strict=True):
            probe.batch(inputs, labels)
            nll = model(inputs).log_softmax(-1)[..., 0]
            given = {"weights": counted / sum(each.sum() for each in counts), "labels": labels}
            probe.terms(**change({**given, "fixed": nll.detach(), "nll": nll}))
            (nll * given["weights"]).sum().backward()
        optimizer.step()
        probe.step(loss=1.0)
        optimizer.zero_grad()


def test_a_loop_shows_its_terms_at_sampled_steps(tmp_path, monkeypatch):
    train(write_job(tmp_path / "run"), monkeypatch)
    first, second, third = (line.get("terms") for line in lines_of(tmp_path / "run"))
    assert third is None  # it is not sampled
    assert first["tokens"] == second["tokens"] == 8 * (LENGTH - 1)
    assert first["microbatches"] == 2
    assert first["weight"] == pytest.approx(1)
    fixed, nll = (dict(first["sums"][name]) for name in ("fixed", "nll"))
    assert (fixed.pop("trains"), nll.pop("trains")) == (False, True)
    assert fixed == nll
    assert second["sums"]["nll"]["total"] != nll["total"]


def rank_shows(folder):
    with pytest.MonkeyPatch.context() as patch:
        train(folder / "job.json", patch, wrap=DistributedDataParallel)
    dist.barrier()
    terms = lines_of(folder)[0]["terms"]
    assert terms["tokens"] == 8 * (LENGTH - 1)
    assert terms["weight"] == pytest.approx(1)
    assert terms["samples"] == 8


def test_terms_of_all_ranks_add_up(tmp_path):
    write_job(tmp_path / "run")
    run_on_ranks(rank_shows, 2, tmp_path / "run")


def without_last(given):
    return {**given, "labels": given["labels"][:, :-1]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            without_last,
            r"labels has the shape \(4, 4\); labels must have that of weights, \(4, 5\)",
        ),
        (lambda given: {**given, "kl": given["nll"].T}, r"kl has the shape \(5, 4\)"),
        (lambda given: {**given, "kl": torch.tensor(1.0)}, r"kl has the shape \(\)"),
        (lambda given: {**given, "kl": 0.5}, "kl is a float; weights, labels and terms must be"),
    ],
)
def test_what_is_not_one_number_per_token_is_refused(tmp_path, monkeypatch, change, words):
    with pytest.raises(ProbeError, match=words):
        train(write_job(tmp_path / "run"), monkeypatch, change=change)


def test_terms_that_are_not_finite_are_kept_as_they_are():
    weights, labels, terms = a_batch()
    sums = terms_of([shown((weights, labels, {"gain": terms["gain"] / 0}))])["sums"]
    assert not math.isfinite(sums["gain"]["squares"])
