"""Which SPMD backend a set trains by that names none, and what counts to identities."""

from dataclasses import replace

import pytest
from plan_examples import TITAN_02, TITAN_03, TITAN_MAIN

from converge_harness.model import Role
from converge_harness.trainers import trainer_of_kind

FSDP_2 = "parallelism = { dp_shard = 2 }"

TITAN = trainer_of_kind("torchtitan")


@pytest.mark.parametrize(
    ("torch", "backend"),
    [
        ("2.13.0+cpu", "partial_dtensor"),
        ("2.14.1", "partial_dtensor"),
        ("2.15.0", "spmd_types"),
        ("2.16.0.dev20261122", "spmd_types"),
        ("3.0", "spmd_types"),
        (None, "spmd_types"),  # not built yet
    ],
)
def test_the_default_is_what_the_torch_is_fit_for(torch, backend):
    versions = {"torch": torch} if torch else {}
    features = TITAN.features(replace(TITAN_03, versions=versions))
    assert features.default_spmd_backend == backend


def test_a_release_without_a_choice_has_no_default():
    assert TITAN.features(TITAN_02).default_spmd_backend is None


def backends(plan):
    return {job.name: job.spec.spmd_backend for job in plan.jobs if job.role is not Role.REPEAT}


def test_sets_that_name_none_train_by_their_toolchains_default(planner):
    plan = planner.test_set(FSDP_2)
    assert set(backends(plan).values()) == {"partial_dtensor"}
    old = planner.test_set(FSDP_2, trainer='toolchain = "torchtitan-0.2.2"\n')
    assert set(backends(old).values()) == {None}


def test_a_named_backend_is_another_job_from_the_same_weights(planner):
    plain = planner.test_set(FSDP_2)
    named = planner.test_set(FSDP_2 + '\nspmd_backend = "spmd_types"')
    assert backends(named)["t"] == "spmd_types"
    assert plain.job("t").identity != named.job("t").identity
    assert plain.job("t").needs == named.job("t").needs
    # Weights depend on no backend, and the job that makes them takes the toolchain's default.
    assert backends(named)["seed"] == "partial_dtensor"


def test_naming_the_default_changes_nothing(planner):
    plain = planner.test_set(FSDP_2)
    named = planner.test_set(FSDP_2 + '\nspmd_backend = "partial_dtensor"')
    assert plain.job("t").identity == named.job("t").identity


def test_a_train_config_may_say_it_too(planner):
    path = planner.folder / "base.toml"
    path.write_text(path.read_text() + '\n[parallelism]\nspmd_backend = "full_dtensor"\n')
    plan = planner.test_set(FSDP_2 + '\nspmd_backend = "spmd_types"')
    assert backends(plan)["control"] == "full_dtensor"
    assert backends(plan)["t"] == "spmd_types"


# ----------------------------------------------------- torchtitan's main branch has fewer

MAIN = {"trainer": 'toolchain = "torchtitan-main"\n', "toolchains": (TITAN_MAIN,)}


def test_sets_of_main_train_by_its_own_default(planner):
    plan = planner.test_set("parallelism = { dp_shard = 2, cp = 2 }", **MAIN)
    assert set(backends(plan).values()) == {"spmd_types"}


def test_main_has_another_backend_that_trains_without_context_parallelism(planner):
    plan = planner.test_set(FSDP_2 + '\nspmd_backend = "partial_dtensor"', **MAIN)
    assert backends(plan)["t"] == "partial_dtensor"
    cp_2 = 'parallelism = { dp_shard = 2, cp = 2 }\nspmd_backend = "partial_dtensor"'
    (refused,) = planner.refused(cp_2, **MAIN)
    assert refused.startswith("test 't': spmd_backend: partial_dtensor of torchtitan 0.2.2+gb5bcd")
    assert "of toolchain torchtitan-main knows no context parallelism, and the set has CP 2" in (
        refused
    )
    assert refused.endswith("(CP needs spmd_types there)")


def test_a_backend_that_main_has_no_more_is_refused(planner):
    (refused,) = planner.refused(FSDP_2 + '\nspmd_backend = "full_dtensor"', **MAIN)
    assert "full_dtensor is named, which torchtitan 0.2.2+gb5bcd76c66d0 of toolchain" in refused
    assert refused.endswith("(it has spmd_types and partial_dtensor)")


def test_the_release_has_context_parallelism_by_every_backend(planner):
    for backend in ("spmd_types", "partial_dtensor", "full_dtensor"):
        body = f'parallelism = {{ dp_shard = 2, cp = 2 }}\nspmd_backend = "{backend}"'
        assert backends(planner.test_set(body))["t"] == backend
