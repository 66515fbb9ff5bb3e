"""Names of a model's parameters in another trainer's checkpoint."""

import pytest

from converge_harness.run_folder.weight_mapping import WeightMapping, weight_mapping_of

MAPPING = WeightMapping(
    {
        "embedding.weight": "tok_embeddings.weight",
        "layers.*.mlp.linear_fc2.weight": "layers.*.feed_forward.w2.weight",
        "layers.0.input_layernorm.weight": "first_norm.weight",
    },
    {"layers.*": "blocks.*"},
    ("optimizer.*", "step"),
    rotary_interleaved=True,
)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("embedding.weight", "tok_embeddings.weight"),
        ("layers.12.mlp.linear_fc2.weight", "layers.12.feed_forward.w2.weight"),
        ("layers.0.input_layernorm.weight", "first_norm.weight"),
        ("layers.1.input_layernorm.weight", None),
        ("embedding.bias", None),
        # A number is a whole part of a name: w2 is none.
        ("layers.x.mlp.linear_fc2.weight", None),
    ],
)
def test_a_parameter_has_the_other_name_with_its_layer(name, other):
    assert MAPPING.parameter(name) == other


def test_modules_have_names_of_their_own():
    assert MAPPING.module("layers.3") == "blocks.3"
    assert MAPPING.module("layers.3.mlp") is None


def test_tensors_that_are_no_weights_are_known_by_patterns():
    assert MAPPING.is_beside("optimizer.state.w.exp_avg")
    assert MAPPING.is_beside("step")
    assert not MAPPING.is_beside("norm.weight")


def test_a_mapping_survives_the_file_of_its_job():
    assert weight_mapping_of(MAPPING.document()) == MAPPING
    assert weight_mapping_of(None) is None
