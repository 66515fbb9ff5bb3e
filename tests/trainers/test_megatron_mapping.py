"""The file that maps a trainer's parameters to the tensors of another trainer's checkpoint."""

import pytest

from converge_harness.trainers.mapping import of_program, read_mapping
from converge_harness.trainers.megatron.mapping import name_problems

RIGHT = """
rotary_interleaved = true
beside = ["optimizer.*"]
[parameters]
"layers.*.mlp.linear_fc2.weight" = "layers.*.feed_forward.w2.weight"
"final_layernorm.weight" = "norm.weight"
[modules]
"layers.*.mlp" = "layers.*.feed_forward"
"""


def read(folder, text, name="names.toml", of_trainer=name_problems):
    """The mapping, and the problems without the folder."""
    (folder / "names.toml").write_text(text)
    problems = []
    found = read_mapping(
        name, (folder,), lambda key: f"x.toml: trainers.m.{key}", problems, of_trainer
    )
    return found, [str(each).replace(f"{folder}/", "") for each in problems]


def test_a_mapping_is_read(tmp_path):
    found, problems = read(tmp_path, RIGHT)
    assert problems == []
    assert found.rotary_interleaved
    assert found.parameter("layers.1.mlp.linear_fc2.weight") == "layers.1.feed_forward.w2.weight"
    assert found.module("layers.1.mlp") == "layers.1.feed_forward"
    assert found.is_beside("optimizer.state")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("rotary_interleaved = true", "", "names.toml: rotary_interleaved: is missing"),
        ("beside", "besides", "names.toml:3: besides: unknown key"),
        (
            '"norm.weight"',
            '"norm.*"',
            "names.toml:6: parameters.final_layernorm.weight: is 'norm.*': both names need one *",
        ),
        (
            '"norm.weight"',
            "1",
            "names.toml:6: parameters.final_layernorm.weight: must be a string, not 1",
        ),
        (
            '"layers.*.feed_forward.w2.weight"',
            '"norm.weight"',
            "is 'norm.weight': both names need one *",
        ),
        (
            '"final_layernorm.weight" = "norm.weight"',
            '"final_layernorm.weight" = "norm.weight"\n"output_layer.weight" = "norm.weight"',
            ":7: parameters.output_layer.weight: is 'norm.weight', and so is",
        ),
        (
            '"layers.*.mlp.linear_fc2.weight"',
            '"layers.*.mlp.linear_fc3.weight"',
            (
                ":5: parameters.layers.*.mlp.linear_fc3.weight: is not a name in the Megatron-Core "
                "GPT that converge builds (did you mean 'layers.*.mlp.linear_fc2.weight'?)"
            ),
        ),
        (
            '"layers.*.mlp" =',
            '"layers.*.mpl" =',
            (
                ":8: modules.layers.*.mpl: is not a name in the Megatron-Core GPT that converge "
                "builds (did you mean 'layers.*.mlp'?"
            ),
        ),
        (
            '"layers.*.mlp.linear_fc2.weight"',
            '"layers.*.self_attention.q_layernorm.weight"',
            (
                ":5: parameters.layers.*.self_attention.q_layernorm.weight: is a norm of queries "
                "or keys, which have no mapping yet (docs/across_frameworks.md) (train without "
                "transformer.qk_layernorm)"
            ),
        ),
        (
            '"layers.*.mlp" =',
            '"layers.3.self_attention.k_layernorm" =',
            ":8: modules.layers.3.self_attention.k_layernorm: is a norm of queries or keys",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, old, new, says):
    assert old in RIGHT
    found, problems = read(tmp_path, RIGHT.replace(old, new))
    assert found is None
    assert says in problems[0]


def test_a_single_layer_may_have_a_name_of_its_own(tmp_path):
    text = RIGHT.replace("[modules]", '"layers.3.mlp.linear_fc1.weight" = "odd.weight"\n[modules]')
    found, problems = read(tmp_path, text)
    assert problems == []
    assert found.parameter("layers.3.mlp.linear_fc1.weight") == "odd.weight"


def test_a_file_that_is_not_there_is_named_where_it_was_asked_for(tmp_path):
    found, (problem,) = read(tmp_path, RIGHT, "other.toml")
    assert found is None
    assert problem.startswith("x.toml: trainers.m.weights: there is no file 'other.toml'")


OF_PROGRAM = """
rotary_interleaved = true
[half_split]
"model.layers.*.q.weight" = 6
[parameters]
"model.layers.*.q.weight" = "layers.*.wq.weight"
"model.layers.*.v.weight" = "layers.*.wv.weight"
"""


def test_rows_that_a_program_rotates_half_split_are_neighbours_in_the_checkpoint(tmp_path):
    found, problems = read(tmp_path, OF_PROGRAM, of_trainer=of_program)
    assert problems == []
    assert found.parameter("model.layers.2.q.weight") == "layers.2.wq.weight"
    assert found.order_of_rows("model.layers.2.q.weight") == (0, 2, 4, 1, 3, 5)
    assert found.order_of_rows("model.layers.2.v.weight") == ()
    halves, _ = read(tmp_path, OF_PROGRAM.replace("true", "false"), of_trainer=of_program)
    assert halves.order_of_rows("model.layers.2.q.weight") == ()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            '"model.layers.*.q.weight" = 6',
            '"model.layers.*.k.weight" = 6',
            ":4: half_split.model.layers.*.k.weight: is no name in [parameters]",
        ),
        ("= 6", "= 5", ":4: half_split.model.layers.*.q.weight: must be a multiple of 2"),
        (
            '"layers.*.wv.weight"',
            '"layers.*.wq.weight"',
            ":7: parameters.model.layers.*.v.weight: is 'layers.*.wq.weight', and so is",
        ),
    ],
)
def test_what_is_wrong_with_a_programs_names_is_said_with_its_place(tmp_path, old, new, says):
    assert old in OF_PROGRAM
    found, problems = read(tmp_path, OF_PROGRAM.replace(old, new, 1), of_trainer=of_program)
    assert found is None
    assert says in problems[0]


def test_megatron_core_says_itself_how_it_rotates(tmp_path):
    text = f'{RIGHT}[half_split]\n"final_layernorm.weight" = 2\n'
    found, (problem,) = read(tmp_path, text)
    assert found is None
    assert ":10: half_split.final_layernorm.weight: is for a user's program" in problem
