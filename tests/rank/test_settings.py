"""Dotted keys on nested dataclasses: what is set, and what an error says."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from converge_harness.rank.settings import KeyProblem, SettingError, apply_setting, flatten


@dataclass(kw_only=True, slots=True)
class Training:
    seq_len: int = 128
    max_norm: float | int = 1.0
    lr: float = 0.1
    dtype: Literal["bfloat16", "float32"] = "float32"
    balancer: str | None = "headtail"
    compiled: bool = False
    components: list[str] = field(default_factory=lambda: ["model", "loss"])


@dataclass(kw_only=True, slots=True)
class Group:
    pattern: str = ".*"
    kwargs: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-3, "betas": (0.9, 0.95)})


@dataclass(kw_only=True, slots=True)
class Optimizer:
    groups: list[Group] = field(default_factory=lambda: [Group()])


@dataclass(kw_only=True, slots=True)
class Config:
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.seq_len", 256),
        ("training.max_norm", 2),
        ("training.dtype", "bfloat16"),
        ("training.balancer", None),
        ("training.compiled", True),
        ("training.components", ["model"]),
    ],
)
def test_a_value_of_the_right_type_is_set(key, value):
    config = Config()
    apply_setting(config, key, value)
    assert getattr(config.training, key.rpartition(".")[2]) == value


def test_keys_reach_into_lists_and_open_tables():
    config = Config()
    apply_setting(config, "optimizer.groups[0].pattern", "norm")
    apply_setting(config, "optimizer.groups[0].kwargs.lr", 1)
    apply_setting(config, "optimizer.groups[0].kwargs.fused", True)
    apply_setting(config, "optimizer.groups[0].kwargs.betas", [0.9, 0.99])
    assert config.optimizer.groups[0].pattern == "norm"
    assert config.optimizer.groups[0].kwargs == {"lr": 1, "betas": [0.9, 0.99], "fused": True}


def test_an_int_for_a_float_becomes_one():
    config = Config()
    apply_setting(config, "training.lr", 1)
    assert type(config.training.lr) is float


def problem(key, value):
    with pytest.raises(SettingError) as caught:
        apply_setting(Config(), key, value)
    return caught.value.problem


def test_an_unknown_key_lists_the_valid_ones_nearest_first():
    found = problem("training.seq_lem", 1)
    assert found.key == "training.seq_lem"
    assert found.valid[0] == "training.seq_len"
    assert len(found.valid) == 7


def test_an_unknown_table_lists_the_tables():
    assert problem("trainig.seq_len", 1).valid == ("training", "optimizer")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("training.seq_len", "256", "takes int, not '256'"),
        ("training.seq_len", True, "takes int, not True"),
        ("training.seq_len", 1.5, "takes int, not 1.5"),
        ("training.compiled", 1, "takes bool, not 1"),
        ("training.balancer", 3, "takes str or nothing, not 3"),
        ("training.components", ["model", 1], "takes list"),
        ("training", 3, "is a table"),
        ("training.seq_len.x", 3, "is a single value"),
        ("optimizer.groups[1].pattern", "x", "has 1 entries"),
        ("training[0]", 1, "training is not a list"),
        ("optimizer.groups[0].kwargs.lr", "fast", "takes float, not 'fast'"),
        ("training..seq_len", 1, "is not a name"),
    ],
)
def test_what_does_not_fit_is_named(key, value, says):
    assert says in problem(key, value).message


def test_a_wrong_choice_lists_the_choices():
    found = problem("training.dtype", "fp8")
    assert found.valid == ("'bfloat16'", "'float32'")


def test_a_list_of_tables_names_the_keys_of_its_entries():
    found = problem("optimizer.groups", [{"pattern": ".*", "lr": 1}])
    assert found.message == "is a list of tables: set a key of one of them"
    assert found.valid == ("optimizer.groups[0].pattern", "optimizer.groups[0].kwargs")


def test_one_error_carries_several_problems():
    error = SettingError(KeyProblem("a", "is wrong", ("b",)), KeyProblem("", "is refused"))
    assert str(error) == "a: is wrong (b); is refused"


def test_flatten_gives_dotted_keys():
    table = {"a": {"b": 1, "c": {}}, "d": [{"e": 2}, {"e": 3}], "f": [1, 2]}
    assert dict(flatten(table)) == {"a.b": 1, "a.c": {}, "d[0].e": 2, "d[1].e": 3, "f": [1, 2]}
