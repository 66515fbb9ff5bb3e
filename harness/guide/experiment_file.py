"""Recommended sets as the text of an experiment file, for the user to edit."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

from converge_harness.guide.base import Base
from converge_harness.guide.factor import Factor
from converge_harness.guide.recommend import KEPT, Recommended
from converge_harness.model import ENOUGH_RERUNS, OwnTechnique, Repeat, RepeatKind, Setting
from converge_harness.plan.rules import RULES
from converge_harness.trainers import features_of, trainer_of

WIDTH = 100
FEW_REPEATS = ("rerun", "ulp", "ulp.2")
"""For a config too large to repeat seven times; as in ``experiments/llama3_8b.toml``."""
_RERUNS = tuple(str(Repeat(RepeatKind.RERUN, number)) for number in range(1, ENOUGH_RERUNS + 1))
NOISY_REPEATS = (*_RERUNS, "ulp", "ulp.2", "permute")
"""Where runs differ by themselves: that is what is to be learnt."""
FEW_NOISY_REPEATS = (*_RERUNS, "ulp")


def write_experiment(
    base: Base,
    named: Sequence[Factor],
    sets: Sequence[Recommended],
    *,
    name: str | None,
    train_config: str,
    place: Callable[[str], str] = str,
    deterministic: bool = True,
) -> str:
    """The whole file.

    Args:
        base: the control and its config.
        named: the factors of ``--technique``, for the heading.
        sets: the control first, then the tests.
        name: of the experiment; None: the file's.
        train_config: path of the base config as written in the file.
        place: from the path of another file to the path as written in this one.
        deterministic: as ``[trainer]`` says.
    """
    control, *tests = sets
    own = [factor.own for factor in named if factor.own]
    lines = [*_heading(base, named), "schema = 1"]
    if name is not None:
        lines.append(f"name = {_toml(name)}")
    few = not base.control.spec.train_config.own_loader
    if few:
        lines.append(
            "# A/A repeats of the control; `converge calibrate` stores the limits learnt from them."
        )
    if not deterministic:
        lines.append(
            "# Reruns show how far two runs of one set lie apart; add more of them freely."
        )
        lines.append(f"repeats = {_toml(list(FEW_NOISY_REPEATS if few else NOISY_REPEATS))}")
    elif few:
        lines.append(f"repeats = {_toml(list(FEW_REPEATS))}")
    lines += ["", "[trainer]", f"train_config = {_toml(train_config)}"]
    lines += [f"toolchain = {_toml(base.control.spec.toolchain)}"]
    lines += [] if deterministic else ["deterministic = false"]
    common = dict(base.control.spec.overrides)
    lines += _common(base, common, tests)
    for each in own:
        lines += ["", *_own_technique(each, place)]
    lines += ["", "[control]", *_entry(control, common)]
    return "\n".join([*lines, "", *write_tests(tests, common)]) + "\n"


def _own_technique(own: OwnTechnique, place: Callable[[str], str]) -> Iterator[str]:
    """``[technique.NAME]`` of a technique that ``--technique NAME=file.py:function`` named."""
    file, _, function = (own.apply or "").rpartition(":")
    yield f"[technique.{own.name}]"
    yield "# Say here what it is, in a sentence that reports can show."
    yield f"what = {_toml(own.what)}"
    yield f"apply = {_toml(f'{place(file)}:{function}')}"
    yield '# in_force = "file.py:function": a count that a run must have, 0 is INVALID. Without it'
    yield "# converge itself looks whether anything changed."


def write_tests(tests: Iterable[Recommended], common: Mapping[str, Setting]) -> list[str]:
    """``[[test]]`` entries, without what ``common``, the file's ``[trainer.set]``, already says."""
    return "\n\n".join(
        "\n".join(["[[test]]", *_entry(test, common)]) for test in tests
    ).splitlines()


def _heading(base: Base, named: Sequence[Factor]) -> Iterator[str]:
    yield from _comment(
        "What torchtitan's converging guide (its docs/converging.md) recommends for "
        f"{', '.join(map(str, named))} on dp {base.dp}, as `converge init` wrote it. "
        "`converge plan` shows what it runs."
    )
    yield "# Rules of the guide that all test sets keep:"
    for name in KEPT:
        yield from _comment(f"{name}: {RULES[name].title}", indent="  ")
    trainer = trainer_of(base.control.spec)
    words = {str(each.technique or each.slot) for each in named}
    for sentence in trainer.warnings(base.control.toolchain, words):
        yield from _comment(sentence)


def _comment(text: str, indent: str = "") -> Iterator[str]:
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"# {indent}",
        subsequent_indent=f"# {indent}",
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield from lines


def _common(
    base: Base, common: Mapping[str, Setting], tests: Sequence[Recommended]
) -> Iterator[str]:
    """``[trainer.set]``: settings that control and tests share beyond the base config."""
    no_graphs = _no_cuda_graphs(base, tests)
    if not common and not no_graphs:
        return
    yield ""
    yield "[trainer.set]"
    if common:
        yield from _comment(
            f"The token budget of all sets: {base.control.global_batch_size} samples a step, which "
            "the data-parallel ranks and the microbatches of pipelines divide."
        )
    for key, value in common.items():
        yield f"{_toml(key)} = {_toml(value)}"
    if no_graphs:
        yield from _comment(
            "The release does not allow CUDA graphs with pipelines or experts; off in the control "
            "too, so that only what is under test differs."
        )
        yield f"{_toml(no_graphs)} = true"


def _no_cuda_graphs(base: Base, tests: Sequence[Recommended]) -> str:
    """The key that switches CUDA graphs off, if a set needs that and the base config lacks it."""
    key = features_of(base.control).no_cuda_graphs
    needed = any(test.spec.parallelism.pp > 1 or test.spec.parallelism.ep > 1 for test in tests)
    return key if needed and base.control.spec.train_config.setting(key) is None else ""


def _entry(written: Recommended, common: Mapping[str, Setting]) -> Iterator[str]:
    spec = written.spec
    yield from _comment(" ".join(written.comments))
    yield f"name = {_toml(spec.name)}"
    degrees = {axis: degree for axis, degree in asdict(spec.parallelism).items() if degree > 1}
    yield f"parallelism = {_toml(degrees)}"
    if spec.pipeline_schedule:
        yield f"pipeline_schedule = {_toml(spec.pipeline_schedule)}"
    if spec.cp_rotation:
        yield f"cp_rotation = {_toml(spec.cp_rotation)}"
    if spec.technique_names:
        yield f"techniques = {_toml(list(spec.technique_names))}"
    of_techniques = {key for each in spec.own_techniques for key in each.overrides}
    own = {
        key: value
        for key, value in spec.overrides.items()
        if common.get(key) != value and key not in of_techniques
    }
    if own:
        yield f"set = {_toml(own)}"
    yield f"note = {_toml(spec.note)}"


def _toml(value: object) -> str:
    """A value in TOML. Its basic strings are JSON's, except that DEL has to be escaped."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_toml(each)}" for key, each in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return _toml(key) if "." in key else key
