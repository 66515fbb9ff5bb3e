"""The file that maps Megatron-Core's parameters to the tensors of another trainer's checkpoint."""

import pytest

from converge_harness.trainers.megatron.mapping import read_mapping

RIGHT = """
rotary_interleaved = true
beside = ["optimizer.*"]
[parameters]
"layers.*.mlp.linear_fc2.weight" = "layers.*.feed_forward.w2.weight"
"final_layernorm.weight" = "norm.weight"
[modules]
"layers.*.mlp" = "layers.*.feed_forward"
"""


def read(folder, text, name="names.toml"):
    """The mapping, and the problems without the folder."""
    (folder / "names.toml").write_text(text)
    problems = []
    found = read_mapping(name, (folder,), lambda key: f"x.toml: trainers.m.{key}", problems)
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
