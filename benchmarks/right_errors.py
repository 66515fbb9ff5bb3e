"""How much correct set-ups differ from float32, over models, sizes, precisions and seeds.

``nox -s bench -- right_errors`` trains the set-ups of ``right_sets`` for one step by ``converge
run``, with the frozen steps that every run of low precision makes, and measures each against its
matched control as the judge does (``converge_harness.judge.compare.precision_errors``). The
multiples that the judge allows stand on what is printed here. All set-ups are right, so one outside
of a limit is a false alarm; it is named, and the exit code is 1.

The sets of one seed, of all models, are one matrix, so that torch is imported only once. An
interrupted benchmark continues where it was, and more seeds or models add to existing results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w
from proof.regimes import Regime, rewritten

from converge_harness.judge.compare.precision_errors import (
    EMBEDDING,
    Errors,
    PrecisionRuns,
    measure_errors,
)
from converge_harness.matrix.save import load_matrix
from converge_harness.model import Role
from converge_harness.readers import read_run

ROOT = Path(__file__).parent.parent
SETS = ROOT / "benchmarks" / "right_sets"
OUT = Path("reports/right_errors")
CHECKS = ("reference-sound", "gradient-errors", "gradient-scale", "frozen-loss")
"""Checks that use the reference; every set has to pass them."""
FAILED, INTERRUPTED = 1, 130
"""Exit codes of ``converge run`` after a failed set, and after Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model to train: a train config of the repository, with another shape."""

    name: str
    """Its name in names of sets."""
    title: str
    config: str
    """In ``train_configs``."""
    base: Mapping[str, str] = field(default_factory=dict)
    """Keys of ``[converge]`` that replace the config's."""
    shape: Mapping[str, int] = field(default_factory=dict)
    """Keys of ``[converge.model]`` in addition to the config's."""
    sets: str = "dense"
    """File in ``right_sets``."""

    def train_config(self) -> dict[str, Any]:
        """The parsed train config with this shape."""
        path = ROOT / "train_configs" / f"{self.config}.toml"
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        data["converge"] |= self.base
        data["converge"]["model"] |= self.shape
        return data


_QWEN3 = {"module": "qwen3", "config": "qwen3_debugmodel"}
MODELS = (
    Model("llama3_64", "Llama 3, width 64, 2 layers", "llama3_debug", shape={"n_layers": 2}),
    Model("llama3_128", "Llama 3, width 128, 4 layers", "llama3_debug", shape={"dim": 128}),
    Model(
        "llama3_256",
        "Llama 3, width 256, 8 layers",
        "llama3_debug",
        shape={"dim": 256, "n_layers": 8},
    ),
    Model(
        "qwen3_128",
        "Qwen 3, width 128, 4 layers",
        "llama3_debug",
        base=_QWEN3,
        shape={"dim": 128, "head_dim": 32},
    ),
    Model("experts_64", "Qwen 3, width 64, 2 layers, 4 experts", "moe_debug", sets="experts"),
)
SEEDS = (42, 43, 44, 45, 46)
FEW = SEEDS[:2]


class Part(NamedTuple):
    """A part of the benchmark: all of its models with all of its seeds."""

    regime: Regime
    models: Sequence[str]
    seeds: Sequence[int]


PARTS = (
    Part(Regime.MIXED, ("llama3_64", "llama3_128", "qwen3_128", "experts_64"), SEEDS),
    Part(Regime.MIXED, ("llama3_256",), FEW),
    Part(Regime.BF16, ("llama3_64",), FEW),
    Part(Regime.FLOAT8, ("llama3_64",), FEW),
)
QUICK = (Part(Regime.MIXED, ("llama3_64", "experts_64"), SEEDS[:1]),)


class Group(NamedTuple):
    """A model in a precision: one control and its test sets."""

    model: Model
    regime: Regime

    @property
    def name(self) -> str:
        return f"{self.model.name}_{self.regime.value}"


@dataclass(frozen=True, slots=True)
class Measured:
    """One test set of one seed."""

    group: Group
    seed: int
    name: str
    """Of the set, within its group."""
    errors: Errors | None
    """None if nothing could be measured: then a check is outside, too."""
    outside: tuple[str, ...]
    """Checks that it does not pass, with their details."""


def matrix_of(groups: Sequence[Group], seed: int, configs: Path) -> dict[str, Any]:
    """A matrix of all groups as a parsed file; ``configs`` is the folder of their train configs."""
    whole: dict[str, Any] = {"controls": {}, "test": []}
    for model, regime in groups:
        path = SETS / f"{model.sets}.toml"
        data = rewritten(tomllib.loads(path.read_text(encoding="utf-8")), regime, frozenset())
        # `rewritten` adds repeats for low precision; here nothing is repeated.
        own = {"train_config": str(configs / f"{model.name}.toml")}
        whole |= {"schema": data["schema"], "trainer": data["trainer"] | own, "repeats": []}
        group = Group(model, regime)
        control = data["control"] | own
        if "control" not in whole:
            whole["control"] = control | {"name": group.name}
        else:
            del control["name"]
            whole["controls"][group.name] = control
        whole["test"] += [
            {**test, "name": f"{group.name}_{test['name']}", "control": group.name, **own}
            for test in data["test"]
        ]
    return {**whole, "name": f"right_errors_{seed}", "seed": seed}


def run_matrix(groups: Sequence[Group], seed: int, out: Path, store: Path | None) -> Path:
    """``converge run`` on the groups with a seed; returns the folder of its report.

    Raises SystemExit if there are no verdicts.
    """
    configs = out.resolve() / "train_configs"
    configs.mkdir(parents=True, exist_ok=True)
    for model in {group.model.name: group.model for group in groups}.values():
        (configs / f"{model.name}.toml").write_text(tomli_w.dumps(model.train_config()))
    file, report = out / f"seed{seed}.toml", out / f"seed{seed}"
    file.write_text(tomli_w.dumps(matrix_of(groups, seed, configs)), encoding="utf-8")
    command = [sys.executable, "-m", "converge_harness", "run", str(file), "--out", str(report)]
    command += ["--store", str(store)] if store else []
    with subprocess.Popen(command) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the command got it too, and cleans up its runs
            process.wait()
            raise
    if code in (2, INTERRUPTED) or code < 0:
        raise SystemExit(code)
    return report


def measured(groups: Sequence[Group], seed: int, report: Path) -> list[Measured]:
    """All test sets of a finished matrix."""
    verdicts = json.loads((report / "report.json").read_text(encoding="utf-8"))["tests"]
    wrong = {each["name"]: tuple(_not_passed(each)) for each in verdicts}
    matrix = load_matrix(report)
    runs = {
        job.name: read_run(record.folder)
        for job, record in zip(matrix.plan.jobs, matrix.records, strict=True)
        if job.role is not Role.SEED
    }
    controls = {group.name: group for group in groups}
    found = []
    for job in matrix.plan.jobs:
        if job.role is not Role.TEST:
            continue
        group = controls[job.spec.control or ""]
        errors = None
        if job.matched and job.reference:
            measure = PrecisionRuns(runs[job.matched], runs[job.reference])
            errors = measure_errors(runs[job.name], measure)
        name = job.name.removeprefix(f"{group.name}_")
        found.append(Measured(group, seed, name, errors, wrong[job.name]))
    return found


def _not_passed(verdict: Mapping[str, Any]) -> Iterable[str]:
    outcomes = {check["name"]: check for check in verdict["checks"]}
    if verdict["error"]:
        yield f"no run: {verdict['error']}"
    for name in CHECKS:
        check = outcomes.get(name)
        if check is None or check["outcome"] != "PASS":
            yield f"{name}: {check['detail'] if check else 'was not asked'}"


class Row(NamedTuple):
    """The results of a group of sets."""

    sets: int
    outside: int
    error: tuple[float, float]
    """Smallest and largest error of the matched control, for the median parameter."""
    ratio: float
    """Largest ratio of errors without embeddings, whose rows are summed token by token."""
    spread: float
    """Standard deviation of the logarithm of the ratios, including the sketches' noise."""
    of_limit: float
    """Largest ratio of errors relative to its limit, including embeddings."""
    mean: float
    """Largest mean over batches of the logarithm of the scale of all gradients, in errors."""
    size: float
    """The same for its root mean square."""
    each: float
    """Largest scale of one parameter relative to its limit."""


def row_of(sets: Sequence[Measured]) -> Row | None:
    """The results of some sets; None if nothing could be measured."""
    errors = [each.errors for each in sets if each.errors is not None]
    if not errors:
        return None
    ratios = [each.ratio[[EMBEDDING not in name for name in each.names]] for each in errors]
    scales = [each.scales_of_all for each in errors]
    known = [each.error for each in errors]
    return Row(
        sets=len(sets),
        outside=sum(bool(each.outside) for each in sets),
        error=(min(known), max(known)),
        ratio=max(float(ratio.max()) for ratio in ratios),
        spread=float(np.std(np.log(np.concatenate(ratios)))),
        of_limit=max(float((each.ratio / each.multiple).max()) for each in errors),
        mean=max(mean / each.error for (((mean, _), _), each) in zip(scales, errors, strict=True)),
        size=max(size / each.error for ((_, (size, _)), each) in zip(scales, errors, strict=True)),
        each=max(float(each.scale_excess.max()) for each in errors),
    )


HEAD = (
    *("sets", "outside", "error of the matched control", "largest ratio of errors"),
    *("spread of ratios", "largest, over its limit", "scale of all: mean; rms"),
    "scale of one, over its limit",
)


def table(first: str, sets: Sequence[Measured], key: Callable[[Measured], str]) -> str:
    """A Markdown table with a row per value of the key, in order of appearance."""
    lines = [f"| {first} | {' | '.join(HEAD)} |", "|---" * (1 + len(HEAD)) + "|"]
    for title in dict.fromkeys(map(key, sets)):
        row = row_of([each for each in sets if key(each) == title])
        if row is None:
            lines.append(f"| {title} | nothing measured |{' |' * (len(HEAD) - 1)}")
            continue
        least, most = (f"{100 * error:.2g}" for error in row.error)
        error = f"{least}%" if least == most else f"{least} to {most}%"
        cells = (
            *(str(row.sets), str(row.outside), error, f"{row.ratio:.2f}", f"{row.spread:.3f}"),
            *(f"{row.of_limit:.2f}", f"{row.mean:.3f}; {row.size:.3f}", f"{row.each:.2f}"),
        )
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(sets: Sequence[Measured]) -> str:
    """Tables by model and by kind of set, and the sets that are outside of a limit."""
    order = [Group(model, regime) for regime in Regime for model in MODELS]
    sets = sorted(sets, key=lambda each: order.index(each.group))
    parts = [
        table("model", sets, lambda each: f"{each.group.regime.title}: {each.group.model.title}"),
        table("set", sets, lambda each: f"{each.group.regime.title}: {each.name}"),
    ]
    outside = [
        f"- seed {each.seed}, {each.group.regime.title}, {each.group.model.title}, {each.name}: "
        f"{'; '.join(each.outside)}"
        for each in sets
        if each.outside
    ]
    seeds = sorted({each.seed for each in sets})
    parts.append(
        f"{len(sets)} sets, seeds {', '.join(map(str, seeds))}; {len(outside)} outside of a limit"
        + (":\n" + "\n".join(outside) if outside else ".")
    )
    return "\n\n".join(parts)


def groups_by_seed(parts: Iterable[Part]) -> dict[int, list[Group]]:
    """The groups to train with every seed."""
    of = {model.name: model for model in MODELS}
    found: dict[int, list[Group]] = {}
    for regime, models, seeds in parts:
        for seed in seeds:
            found.setdefault(seed, []).extend(Group(of[name], regime) for name in models)
    return found


def _asked(arguments: argparse.Namespace) -> list[Part]:
    """The parts to run: all combinations of the given models, precisions and seeds."""
    parts = QUICK if arguments.quick else PARTS
    if arguments.models:
        asked = {part.regime: part.seeds for part in reversed(parts)}
        parts = tuple(Part(regime, arguments.models, seeds) for regime, seeds in asked.items())
    return [
        part._replace(seeds=arguments.seeds or part.seeds)
        for part in parts
        if part.regime in (arguments.regimes or list(Regime))
    ]


def main() -> int:
    arguments = _parser().parse_args()
    plan = groups_by_seed(_asked(arguments))
    sets: list[Measured] = []
    text = ""
    for seed, groups in plan.items():
        report = run_matrix(groups, seed, arguments.out, arguments.store)
        sets += measured(groups, seed, report)
        text = page(sets)
        (arguments.out / "right_errors.md").write_text(f"{text}\n", encoding="utf-8")
    print(f"\n{text}")
    return FAILED if any(each.outside for each in sets) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nox -s bench -- right_errors", description=(__doc__ or "").split("\n", 1)[0]
    )
    names = [model.name for model in MODELS]
    regimes = sorted({part.regime for part in PARTS}, key=list(Regime).index)
    parser.add_argument("--models", nargs="+", choices=names, help="only these")
    parser.add_argument(
        "--regimes", nargs="+", type=Regime, choices=regimes, help="only these precisions"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, metavar="N", help="these for every model and precision"
    )
    parser.add_argument("--quick", action="store_true", help="two models, bf16 mixed, one seed")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"default: {OUT}")
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="where runs are kept (default: as converge run)"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
