"""Which sets the guide asks for, and that the file of them is one."""

import tempfile
from pathlib import Path

import pytest
from guide_bases import EXPERTS_02, EXPERTS_03, LLAMA_02, LLAMA_03, VARIANTS, planned, written
from hypothesis import given, settings
from hypothesis import strategies as st

from converge_harness.errors import ConfigError
from converge_harness.guide import parse_factors
from converge_harness.model import Parallelism, Role, Technique
from converge_harness.plan import describe


def sets_of(folder, techniques, **options):
    """What is recommended, by name: degrees and techniques."""
    _, sets = written(folder, techniques, **options)
    return {
        each.spec.name: (each.spec.parallelism, [str(t) for t in each.spec.techniques])
        for each in sets
    }


def refused(folder, techniques, **options):
    with pytest.raises(ConfigError) as caught:
        written(folder, techniques, **options)
    return [str(each) for each in caught.value.problems]


def test_the_guides_example(tmp_path):
    assert sets_of(tmp_path, "tp=2,pp=2,float8,async_tp", dp=8) == {
        "fsdp8": (Parallelism(dp_shard=8), []),
        "fsdp8_tp2": (Parallelism(dp_shard=8, tp=2), []),
        "fsdp8_pp2": (Parallelism(dp_shard=8, pp=2), []),
        "fsdp8_float8": (Parallelism(dp_shard=8), ["float8"]),
        "fsdp8_tp2_async_tp": (Parallelism(dp_shard=8, tp=2), ["compile", "async_tp"]),
        "fsdp8_tp2_pp2_compile_async_tp_float8": (
            Parallelism(dp_shard=8, tp=2, pp=2),
            ["compile", "async_tp", "float8"],
        ),
    }


def test_a_technique_alone_gets_the_parallelism_that_it_needs(tmp_path):
    assert list(sets_of(tmp_path, "async_tp")) == ["fsdp4", "fsdp4_tp2_async_tp"]
    assert list(sets_of(tmp_path, "async_tp,tp=4")) == [
        *("fsdp4", "fsdp4_tp4_async_tp", "fsdp4_tp4")
    ]


def test_a_larger_degree_is_tested_in_two_dimensions_only(tmp_path):
    assert list(sets_of(tmp_path, "cp=2,cp=8,tp=2")) == [
        *("fsdp4", "fsdp4_cp2", "fsdp4_cp8", "fsdp4_tp2", "fsdp4_tp2_cp2")
    ]


def test_what_cannot_run_together_is_composed_in_several_sets(tmp_path):
    composed = list(sets_of(tmp_path, "tp=2,float8,float8_rowwise"))[4:]
    assert sorted(composed) == ["fsdp4_tp2_float8", "fsdp4_tp2_float8_rowwise"]


def test_ddp_is_compared_with_the_control_and_composed_with_nothing(tmp_path):
    assert sets_of(tmp_path, "ddp,tp=2")["ddp4"] == (Parallelism(dp_replicate=4), [])
    assert list(sets_of(tmp_path, "ddp,tp=2")) == ["fsdp4", "ddp4", "fsdp4_tp2"]


def test_a_pipeline_gets_its_microbatches_and_every_set_the_same_budget(tmp_path):
    text, _ = written(tmp_path, "pp=4:Interleaved1F1B,tp=2", local=2, budget=-1)
    plan = planned(tmp_path, text)
    budgets = {job.global_batch_size for job in plan.jobs if job.role is not Role.SEED}
    assert budgets == {32}
    locals_ = {job.name: job.local_batch_size for job in plan.jobs}
    assert locals_["fsdp4_tp2"] == 2
    assert locals_["fsdp4_pp4_interleaved1f1b"] == 8
    assert '"training.global_batch_size" = 32' in text


def test_a_config_that_holds_everything_is_not_touched(tmp_path):
    text, _ = written(tmp_path, "pp=2,tp=2", local=4, budget=32)
    assert "batch_size" not in "".join(line for line in text.splitlines() if line[:1] != "#")


def test_a_budget_that_the_ranks_do_not_divide_is_raised(tmp_path):
    text, _ = written(tmp_path, "tp=2", dp=8, local=4, budget=12)
    assert {job.global_batch_size for job in planned(tmp_path, text).jobs} >= {32}


def test_async_tp_in_a_pipeline_of_0_2_has_microbatches_of_two(tmp_path):
    text, sets = written(tmp_path, "pp=2,async_tp", rest=LLAMA_02, local=4)
    composed = sets[-1].spec
    assert composed.setting("parallelism.pipeline_parallel_microbatch_size") == 2
    assert next(job for job in planned(tmp_path, text).jobs if job.name == composed.name)


@pytest.mark.parametrize(
    ("techniques", "options", "word"),
    [
        ("float8_tp", {}, "torchtitan 0.3 has no Float8 TP styles"),
        ("cp=2:alltoall", {}, "no ring rotation"),
        ("ep=2", {}, "Llama 3 has no experts"),
        ("hsdp=3", {}, "hsdp=3 does not leave"),
        ("hsdp=4", {}, "hsdp=4 does not leave"),
        ("ep=3", {"rest": EXPERTS_03}, "does not divide"),
        ("cp=128", {}, "(training.seq_len) is not a multiple of"),
        ("pp=300", {}, "makes the microbatches"),
    ],
)
def test_what_cannot_run_on_the_base_is_refused_with_its_word(tmp_path, techniques, options, word):
    (problem,) = refused(tmp_path, techniques, **options)
    assert techniques in problem
    assert word in problem


def test_sizes_that_the_base_does_not_state_are_named(tmp_path):
    (tmp_path / "base.toml").write_text("[training]\nsteps = 0\nlocal_batch_size = true\n")
    from guide_bases import TITAN_02, load_train_config, sized_base

    with pytest.raises(ConfigError) as caught:
        sized_base(load_train_config("base.toml", [tmp_path], "--base"), TITAN_02, 2, [])
    assert [each.where.split(": ")[1] for each in caught.value.problems] == [
        *("training.steps", "training.local_batch_size", "training.seq_len")
    ]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("tpp=2", "did you mean 'tp'"),
        ("foat8", "did you mean 'float8'"),
        ("tp", "as tp=2"),
        ("tp=1", "as tp=2"),
        ("tp=x", "as tp=2"),
        ("float8=2", "write float8"),
        ("pp=2:1F1", "did you mean '1F1B'"),
        ("tp=2:x", "write tp=2"),
        (" , ", "names no technique"),
    ],
)
def test_words_that_are_not_known_get_a_suggestion(word, hint):
    with pytest.raises(ConfigError, match=r".") as caught:
        parse_factors([word], VARIANTS)
    assert hint in str(caught.value)


def test_a_word_is_written_as_it_is_read():
    words = "hsdp=2,ddp,tp=4,cp=2:alltoall,pp=2:GPipe,ep=8,compile,bf16"
    assert ",".join(map(str, parse_factors([words, "tp=4"], VARIANTS))) == words


# ------------------------------------------------------------------- any techniques

DEGREES = st.sampled_from((2, 4, 8))
WORDS = st.one_of(
    st.builds("tp={}".format, DEGREES),
    st.builds("cp={}{}".format, DEGREES, st.sampled_from(("", ":allgather", ":alltoall"))),
    st.builds("pp={}{}".format, DEGREES, st.sampled_from(("", *(f":{s}" for s in VARIANTS["pp"])))),
    st.builds("ep={}".format, DEGREES),
    st.builds("hsdp={}".format, DEGREES),
    st.just("ddp"),
    st.sampled_from([str(each) for each in Technique]),
)
CONFIGS = st.sampled_from((LLAMA_02, LLAMA_03, EXPERTS_02, EXPERTS_03))


def impossible(words, rest, dp):
    """What no recommendation can hold, by upstream's own limits."""
    on_03 = "module" in rest
    for word in words:
        name, _, degree = word.partition("=")
        number = int(degree.partition(":")[0] or 1)
        yield from [word] * (
            (on_03 and (word == "float8_tp" or ":all" in word))
            or (name == "ep" and (rest in (LLAMA_02, LLAMA_03) or dp % number != 0))
            or (word == "ddp" and dp == 1)
            or (name == "hsdp" and (dp % number != 0 or number == dp))
        )


@settings(max_examples=150)
@given(
    words=st.lists(WORDS, min_size=1, max_size=6, unique=True),
    dp=st.sampled_from((1, 2, 4, 8)),
    rest=CONFIGS,
    local=st.sampled_from((1, 3, 4)),
    times=st.sampled_from((None, 1, 5)),
)
def test_any_recommendation_loads_and_plans_as_recommended(words, dp, rest, local, times):
    budget = -1 if times is None else times * local * dp
    wrong = list(impossible(words, rest, dp))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = {"dp": dp, "rest": rest, "local": local, "budget": budget}
        if wrong:
            assert refused(folder, ",".join(words), **options)
            return
        text, sets = written(folder, ",".join(words), **options)
        plan = planned(folder, text)
    loaded = (*plan.experiment.controls, *plan.experiment.tests)
    assert [each.name for each in loaded] == [each.spec.name for each in sets]
    for spec, expected in zip(loaded, (each.spec for each in sets), strict=True):
        assert spec.parallelism == expected.parallelism
        assert spec.techniques == expected.techniques
        assert spec.pipeline_schedule == expected.pipeline_schedule
        assert spec.cp_rotation == expected.cp_rotation
        assert expected.overrides.items() <= spec.overrides.items()
    held = {technique for spec in loaded for technique in spec.techniques}
    assert {word for word in words if word in list(Technique)} <= set(map(str, held))
    assert plan.waived == ()
    for row in describe(plan):
        assert row.note.startswith(f"{row.serves}.")
