"""``[matrix]``: expansion by product, names, and refusals."""

import pytest

from converge_harness.model import Parallelism

HEAD = """
schema = 1
[trainer]
train_config = "base.toml"
[control]
parallelism = { dp_shard = 2 }
"""


@pytest.fixture
def expand(load):
    def expand(matrix: str):
        return load(HEAD + "[matrix]\n" + matrix).tests

    return expand


def names(sets) -> list[str]:
    return [spec.name for spec in sets]


def test_axes_multiply_and_constants_hold_for_all(expand):
    sets = expand(
        """
parallelism = { dp_shard = [2], tp = [1, 2] }
techniques = [[], ["compile", "bf16"]]
waive = ["same-dp-degree"]
tolerance = { loss = 0.5 }
margin = 0.01
note = "n"
"""
    )
    assert names(sets) == ["fsdp2", "fsdp2_compile_bf16", "fsdp2_tp2", "fsdp2_tp2_compile_bf16"]
    assert sets[3].parallelism == Parallelism(dp_shard=2, tp=2)
    assert sets[3].techniques == ("compile", "bf16")
    assert {(spec.waive, spec.tolerances["loss"], spec.margin, spec.note) for spec in sets} == {
        (("same-dp-degree",), 0.5, 0.01, "n")
    }
    assert {spec.control for spec in sets} == {"control"}


def test_schedules_and_rotations_vary_only_where_there_is_something_to_vary(expand):
    sets = expand(
        """
parallelism = { dp_shard = [2], pp = [1, 2], cp = [1, 2] }
pipeline_schedule = ["1F1B", "Interleaved1F1B"]
cp_rotation = ["allgather", "alltoall"]
"""
    )
    assert names(sets) == [
        "fsdp2",
        "fsdp2_pp2_1f1b",
        "fsdp2_pp2_interleaved1f1b",
        "fsdp2_cp2_allgather",
        "fsdp2_cp2_alltoall",
        "fsdp2_cp2_pp2_1f1b_allgather",
        "fsdp2_cp2_pp2_1f1b_alltoall",
        "fsdp2_cp2_pp2_interleaved1f1b_allgather",
        "fsdp2_cp2_pp2_interleaved1f1b_alltoall",
    ]
    assert (sets[0].pipeline_schedule, sets[0].cp_rotation) == (None, None)


def test_spmd_backends_vary_as_schedules_do(expand):
    sets = expand(
        "parallelism = { dp_shard = [2], tp = [1, 2] }\n"
        'spmd_backend = ["spmd_types", "partial_dtensor"]'
    )
    assert names(sets) == [
        "fsdp2_spmd_types",
        "fsdp2_partial_dtensor",
        "fsdp2_tp2_spmd_types",
        "fsdp2_tp2_partial_dtensor",
    ]
    assert [each.spmd_backend for each in sets] == ["spmd_types", "partial_dtensor"] * 2


def test_data_parallel_layouts_have_their_own_names(expand):
    sets = expand("parallelism = { dp_replicate = [1, 2], dp_shard = [1, 2] }")
    assert names(sets) == ["fsdp1", "fsdp2", "ddp2", "hsdp2x2"]


def test_a_template_fills_in_degrees_techniques_and_settings(expand):
    sets = expand(
        """
name = "tp{tp} {techniques} {seq_len} {schedule}/{rotation}"
parallelism.tp = [1, 2]
techniques = [["float8", "compile"], []]
set = { "training.seq_len" = [128, 256], "lr_scheduler.warmup_steps" = [3] }
"""
    )
    assert names(sets)[0] == "tp1 float8+compile 128 none/none"
    assert names(sets)[-1] == "tp2 plain 256 none/none"
    assert len(sets) == 8
    assert sets[-1].overrides == {"training.seq_len": 256, "lr_scheduler.warmup_steps": 3}


def test_varying_settings_show_in_default_names(expand):
    sets = expand('parallelism.tp = [2]\nset = { "training.seq_len" = [128, 256], a.b = [[1]] }')
    assert names(sets) == ["fsdp1_tp2_seq_len128", "fsdp1_tp2_seq_len256"]
    assert sets[0].overrides["a.b"] == [1]


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ("parallelism.tp = 2", "matrix.parallelism.tp: must be a list, not 2"),
        ("parallelism.tp = []", "matrix.parallelism.tp: must have at least 1 item"),
        ('parallelism.tp = ["2"]', "matrix.parallelism.tp[0]: must be a whole number, not '2'"),
        ("parallelism.tq = [2]", "matrix.parallelism.tq: unknown key"),
        ('parallelism = {}\ntechniques = ["compile"]', "matrix.techniques[0]: must be a list"),
        ('parallelism = {}\nset = { "training.steps" = 3 }', "matrix.set.training.steps: must be"),
        ('parallelism.tp = [1, 2]\nname = "x"', "are both named 'x' (what varies: tp)"),
        ('parallelism.tp = [1, 2]\nname = "{tq}"', "{tq} is not a placeholder"),
        ('parallelism.tp = [1, 2]\nname = "{tp.real}"', "{tp.real} is not a placeholder"),
        ('parallelism.tp = [1, 2]\nname = "{tp:9}"', "{tp} is not a placeholder"),
        ('parallelism.tp = [1, 2]\nname = "{tp"', "expected '}'"),
        ('parallelism.tp = [1]\nname = ""', "matrix.name: is empty"),
        (
            f"parallelism = {{ tp = {list(range(1, 41))}, pp = {list(range(1, 41))} }}",
            "1600 combinations; at most 1000",
        ),
        ("techniques = [[]]", "matrix.parallelism: is missing"),
    ],
)
def test_a_wrong_matrix_is_refused(problems, matrix, message):
    assert message in "\n".join(problems(HEAD + "[matrix]\n" + matrix))


def test_a_matrix_name_that_a_test_has_is_refused(problems):
    found = problems(
        HEAD
        + '[[test]]\nname = "FSDP2"\nparallelism.dp_shard = 2\n'
        + "[matrix]\nparallelism.dp_shard = [2]\n"
    )
    (only,) = found
    assert only.startswith(": matrix.name of 'fsdp2': is already the name of another set")
