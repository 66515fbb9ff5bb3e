"""Templates of a command trainer: what is filled in, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converge_harness.trainers.command.settings import fill, listed_key, placeholders

NAMES = st.text(st.characters(exclude_characters="{}"), min_size=1, max_size=8).filter(
    lambda name: not name.startswith("*")
)
LITERALS = st.text(max_size=8)


def doubled(text):
    return text.replace("{", "{{").replace("}", "}}")


@given(st.lists(st.tuples(LITERALS, NAMES), max_size=5), LITERALS)
def test_literal_text_comes_out_as_it_was_and_names_as_their_values(pairs, last):
    template = "".join(f"{doubled(text)}{{{name}}}" for text, name in pairs) + doubled(last)
    expected = "".join(f"{text}<{name}>" for text, name in pairs) + last
    assert fill(template, lambda name: f"<{name}>") == expected
    assert placeholders(template) == tuple(name for _, name in pairs)


@given(LITERALS)
def test_any_text_is_filled_or_refused_and_never_half(text):
    try:
        names = placeholders(text)
    except ValueError:
        with pytest.raises(ValueError, match=r"is unmatched|is no argument of its own"):
            fill(text, str)
        return
    asked = []
    fill(text, lambda name: asked.append(name) or "")
    assert tuple(asked) == names


@given(LITERALS)
def test_what_a_value_brings_is_not_filled_in_again(value):
    assert fill("--x={seed}", lambda _: value) == f"--x={value}"


@pytest.mark.parametrize("text", ["{", "}", "a{seed", "seed}", "{{{", '{"a": {seed}}'])
def test_a_single_brace_is_refused_by_its_place(text):
    with pytest.raises(ValueError, match=r"the brace '[{}]' at character \d+ is unmatched"):
        placeholders(text)


def test_a_list_is_a_whole_argument_of_the_train_config():
    assert listed_key("{*config.zero.flags}") == "zero.flags"
    assert placeholders("{*config.zero.flags}") == ("config.zero.flags",)
    assert listed_key("{config.zero.flags}") is None
    for text in ("--x={*config.flags}", "{*config.a}{*config.b}", "{*steps}", "{*}"):
        assert listed_key(text) is None
        with pytest.raises(ValueError, match="is no argument of its own from the train config"):
            placeholders(text)
