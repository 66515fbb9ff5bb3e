"""The fewest jobs in which every pair meets, against every other choice of jobs."""

import tempfile
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from guide_bases import (
    EXPERTS_02,
    EXPERTS_03,
    LLAMA_02,
    LLAMA_03,
    TITAN_02,
    TITAN_03,
    VARIANTS,
    based,
    planned,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from converge_harness.errors import ConfigError
from converge_harness.guide import (
    completed,
    control_of,
    cover_pairs,
    factors_of,
    nominal_base,
    parse_factors,
    proposed,
    with_own_names,
    write_experiment,
)
from converge_harness.guide.fit import breaches
from converge_harness.guide.recommend import recommend
from converge_harness.model import Role


def cover(words, gpus=None, *, dp=2, toolchain=TITAN_03):
    named = parse_factors([words], VARIANTS)
    base = nominal_base(dp, toolchain, named)
    return cover_pairs(base, completed(base, named), gpus)


def jobs_of(found):
    return [(job.ranks, ",".join(map(str, job.factors))) for job in found.jobs]


def apart_of(found):
    return {str(each.pair): each.why for each in found.apart}


def test_all_that_can_run_together_is_one_job():
    found = cover("tp=2,cp=2,pp=2,float8,async_tp", 64, dp=8)
    assert jobs_of(found) == [(64, "tp=2,cp=2,pp=2,compile,async_tp,float8")]
    assert (found.pairs, found.alone, found.at_most_more) == (15, 0, 0)
    assert found.apart == ()


def test_fewer_gpus_take_more_jobs():
    found = cover("tp=2,cp=2,pp=2", 8)
    assert sorted(jobs_of(found)) == [(8, "cp=2,pp=2"), (8, "tp=2,cp=2"), (8, "tp=2,pp=2")]
    assert found.at_most_more == 0
    assert found.combinations == 6


def test_pairs_that_cannot_meet_say_why():
    found = cover("tp=2,cp=8,float8,float8_rowwise,ddp,async_tp", 64, dp=8)
    why = apart_of(found)
    assert why["tp=2 + cp=8"] == "it takes 128 ranks, and there are 64 GPUs"
    assert why["cp=8 + async_tp"] == why["tp=2 + cp=8"]
    assert "two scalings" in why["float8 + float8_rowwise"]
    assert "fsdp_enabled" in why["ddp + cp=8"]
    assert len(why) == 4


def test_a_dependency_of_0_2_keeps_pairs_apart():
    found = cover("pp=2:ZBVZeroBubble,async_tp,float8", toolchain=TITAN_02)
    assert "torch.compile" in apart_of(found)["pp=2:ZBVZeroBubble + async_tp"]
    assert apart_of(cover("pp=2:Interleaved1F1B,async_tp,float8", toolchain=TITAN_02)) == {}


def test_two_degrees_of_one_parallelism_are_no_pair():
    found = cover("cp=2,cp=4,tp=2")
    assert sorted(jobs_of(found)) == [(8, "tp=2,cp=2"), (16, "tp=2,cp=4")]
    assert apart_of(found) == {}


def test_a_technique_that_meets_no_other_has_a_job_of_its_own():
    found = cover("ddp,tp=2,pp=2", toolchain=TITAN_02)
    assert (4, "ddp") not in jobs_of(found)
    assert (2, "ddp") in jobs_of(found)
    assert (found.pairs, found.alone) == (1, 1)


@pytest.mark.parametrize(
    ("words", "gpus", "said"),
    [
        ("tp=4,float8", 16, "tp=4: fits in no job on dp 8: it takes 32 ranks, and there are 16"),
        ("float8", 4, "it takes 8 ranks, and there are 4 GPUs"),
        ("async_tp", 8, "async_tp: fits in no job on dp 8: it takes 16 ranks"),
        ("hsdp=8", 64, "does not leave two ranks"),
    ],
)
def test_a_technique_that_fits_nowhere_is_refused(words, gpus, said):
    with pytest.raises(ConfigError) as caught:
        cover(words, gpus, dp=8)
    assert said in str(caught.value)


def test_too_many_combinations_are_refused_before_they_are_counted():
    words = ",".join(f"{axis}={n}" for axis in ("tp", "cp", "pp", "ep") for n in range(2, 22))
    with pytest.raises(ConfigError, match="at most 50,000 can be tried"):
        cover(words)


def test_the_techniques_of_an_experiment_are_those_of_its_sets(tmp_path):
    base, named = based(tmp_path, "tp=2,pp=2:GPipe,float8,ddp,hsdp=2,cp=4", dp=4, local=4)
    sets = recommend(base, named)
    text = write_experiment(base, named, sets, name=None, train_config="base.toml")
    plan = planned(tmp_path, text)
    found = factors_of(plan.experiment.tests)
    assert sorted(map(str, found)) == sorted(map(str, named))
    control = next(job for job in plan.jobs if job.role is Role.CONTROL)
    again = cover_pairs(control_of(control, plan.experiment), found, 64)
    assert jobs_of(again) == jobs_of(cover_pairs(base, named, 64))


# ------------------------------------------------------------------- any techniques

CHOICES = (
    *("tp=2", "tp=4", "cp=2", "cp=4", "pp=2", "pp=4:Interleaved1F1B", "pp=2:DualPipeV"),
    *("ep=2", "hsdp=2", "ddp", "compile", "async_tp", "float8", "float8_rowwise", "bf16"),
    "float8_tp",
)
TECHNIQUES = st.lists(st.sampled_from(CHOICES), min_size=1, max_size=5, unique=True)
RESTS = st.sampled_from((LLAMA_02, LLAMA_03, EXPERTS_02, EXPERTS_03))
GPUS = st.sampled_from((4, 8, 16, 32, 64, None))


def covered(folder, words, gpus, rest):
    """The base, the factors and the cover; None where a technique fits nowhere."""
    base, named = based(folder, ",".join(words), rest=rest)
    factors = completed(base, named)
    try:
        return base, factors, cover_pairs(base, factors, gpus)
    except ConfigError:
        return base, factors, None


def subsets(factors):
    """Every combination of one factor or more."""
    return [
        frozenset(each)
        for count in range(1, len(factors) + 1)
        for each in combinations(factors, count)
    ]


@settings(max_examples=60)
@given(words=TECHNIQUES, gpus=GPUS, rest=RESTS)
def test_no_choice_of_fewer_jobs_covers_as_much(words, gpus, rest):
    with tempfile.TemporaryDirectory() as folder:
        base, factors, found = covered(Path(folder), words, gpus, rest)
    possible = [each for each in subsets(factors) if not breaches(base, each, gpus)]
    reached = frozenset().union(*possible)
    if found is None:
        assert reached < set(factors)
        return
    assert reached == set(factors)
    pairs = {frozenset(pair) for pair in combinations(factors, 2)}
    wanted = [pair for pair in pairs if any(pair <= each for each in possible)]
    wanted += [frozenset({each}) for each in factors]
    chosen = [frozenset(job.factors) for job in found.jobs]
    assert set(chosen) <= set(possible)
    assert all(any(want <= job for job in chosen) for want in wanted)
    assert found.combinations == len(possible)
    assert found.at_most_more == 0
    assert len(chosen) <= found.pairs + found.alone
    for count in range(1, min(len(chosen), 4)):
        for fewer in combinations(possible, count):
            assert not all(any(want <= job for job in fewer) for want in wanted)


@settings(max_examples=25)
@given(words=TECHNIQUES, rest=RESTS)
def test_more_gpus_cover_no_less_and_take_no_more_jobs_for_the_same_pairs(words, rest):
    with tempfile.TemporaryDirectory() as folder:
        founds = [
            found
            for gpus in (8, 16, 32, 64, 128, None)
            if (found := covered(Path(folder), words, gpus, rest)[2]) is not None
        ]
    for less, more in pairwise(founds):
        assert less.pairs <= more.pairs
        if less.pairs == more.pairs:
            assert len(less.jobs) >= len(more.jobs)


@settings(max_examples=60)
@given(words=TECHNIQUES, gpus=GPUS, rest=RESTS)
def test_what_is_proposed_can_be_planned_and_fits(words, gpus, rest):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, named = based(folder, ",".join(words), rest=rest)
        try:
            found = cover_pairs(base, completed(base, named), gpus)
        except ConfigError:
            return
        tests = with_own_names(
            [proposed(base, frozenset(j.factors), alone=False) for j in found.jobs]
        )
        control = recommend(base, [])[0]
        text = write_experiment(base, named, [control, *tests], name=None, train_config="base.toml")
        plan = planned(folder, text)
    sizes = [job.world_size for job in plan.jobs if job.role is Role.TEST]
    assert sizes == [job.ranks for job in found.jobs]
    assert gpus is None or max(sizes) <= gpus
